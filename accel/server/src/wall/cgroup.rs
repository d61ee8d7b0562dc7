// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Control groups (version 2), where a server was given one: what all processes of a worker use together is limited, and killed at once.

use super::limits::TASKS;
use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A group that is this server's own, with no process in it.
#[derive(Clone, Debug)]
pub struct Delegated {
    folder: Arc<PathBuf>,
    next: Arc<AtomicU64>,
}

/// The group of one worker; ends with this value, and its processes with it.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    open: OwnedFd,
}

fn set(folder: &Path, file: &str, value: &str) -> anyhow::Result<()> {
    let path = folder.join(file);
    std::fs::write(&path, value).with_context(|| format!("{}: {value}", path.display()))
}

impl Delegated {
    /// The group at a folder of a mounted cgroup2.
    pub fn at(folder: &Path) -> anyhow::Result<Delegated> {
        set(folder, "cgroup.subtree_control", "+memory +pids +cpu").context(
            "no group to divide: it needs the controllers memory, pids and cpu, no process in it, and an owner who is this user",
        )?;
        Ok(Delegated { folder: Arc::new(folder.to_owned()), next: Arc::default() })
    }

    /// A new group with limits; `memory` in bytes, `weight` from 1 to 100.
    pub fn group(&self, memory: u64, weight: u32) -> anyhow::Result<Group> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(format!("worker-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::openat(CWD, &folder, flags, Mode::empty()).context("its folder")?;
        // Removed from here on, whatever fails.
        let group = Group { folder, open };
        set(&group.folder, "memory.max", &memory.to_string())?;
        set(&group.folder, "memory.oom.group", "1")?;
        set(&group.folder, "pids.max", &TASKS.to_string())?;
        set(&group.folder, "cpu.weight", &weight.to_string())?;
        Ok(group)
    }
}

impl Group {
    /// To start a process in.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }
}

impl Group {
    /// Kills whoever is in it, and waits until they have gone.
    fn empty(&self) -> io::Result<()> {
        std::fs::write(self.folder.join("cgroup.kill"), "1")?;
        let mut events = File::open(self.folder.join("cgroup.events"))?;
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|line| line == "populated 0") {
                return Ok(());
            }
            // Changed since it was read.
            let mut changed = [PollFd::new(&events, PollFlags::PRI)];
            match rustix::event::poll(&mut changed, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(e) = self.empty().and_then(|()| std::fs::remove_dir(&self.folder)) {
            eprintln!("tombolo accel: {}: {e}", self.folder.display());
        }
    }
}
