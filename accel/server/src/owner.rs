// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server in the VM that owns the accelerator. Each client VM's zone is a device of this VM, and its driver makes
//! `/dev/tombolo-serve-UUID` of it (`zone/format/tombolo_calls.h`): the area to map, a read that sleeps until the client VM or the host rings, a write that
//! rings the client VM. A thread per client VM sleeps in that read; nothing runs while there are no calls.

use crate::vm::Side;
use anyhow::Context;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tombolo_calls::hello::Geometry;
use tombolo_calls::say;
use tombolo_calls::zone::Area;

/// Returns whether the path is a character device: the driver of a VM that owns an accelerator shows a client's zone as one.
pub fn is_device(zone: &Path) -> bool {
    zone.metadata().is_ok_and(|meta| meta.file_type().is_char_device())
}

/// The server's side of a client VM's zone.
pub struct OwnerSide {
    doorbell: File,
    /// As the driver told it last; 0: the client VM isn't there.
    life: Arc<AtomicU64>,
}

/// Becomes the server behind a device, when the one before it has gone. `look` is called after each ring, and when the client VM came or went.
///
/// # Errors
/// The device's, and a zone whose area isn't as `channels` and `geometry` say.
pub fn open(
    device: &Path,
    channels: u32,
    geometry: Geometry,
    mut look: impl FnMut() + Send + 'static,
) -> anyhow::Result<(Area, OwnerSide)> {
    let path = || device.display().to_string();
    let mut server = File::options().read(true).write(true).open(device).with_context(path)?;
    let memory = server.try_clone().with_context(path)?;
    let area = Area::of_device(memory, channels, geometry).with_context(path)?;
    // The kernel maps nothing of a file that is open for writing only, so a worker that has it can ring and no more.
    let doorbell = OpenOptions::new().write(true).open(device).with_context(path)?;
    let life = Arc::new(AtomicU64::new(0));
    let (told, name) = (life.clone(), path());
    std::thread::Builder::new().name("doorbell".into()).spawn(move || {
        let why = loop {
            let mut now = [0; 8];
            if let Err(e) = server.read_exact(&mut now) {
                break e;
            }
            told.store(u64::from_ne_bytes(now), Ordering::Release);
            look();
        };
        say!("tombolo accel: {name}: no thread hears its rings any more: {why}");
    })?;
    Ok((area, OwnerSide { doorbell, life }))
}

impl Side for OwnerSide {
    fn life(&self) -> Option<u64> {
        Some(self.life.load(Ordering::Acquire)).filter(|&life| life != 0)
    }

    fn ring(&self) {
        // The driver takes whatever is written.
        let _always = (&self.doorbell).write(&1u64.to_ne_bytes());
    }

    fn doorbell(&self) -> anyhow::Result<OwnedFd> {
        Ok(self.doorbell.try_clone().context("the client VM's doorbell")?.into())
    }
}
