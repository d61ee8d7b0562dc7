// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The directory in a zone into which an archive is unpacked, before it gets its name. Its lock tells an import that runs from one that was killed, whose
//! directory the next import to that name removes.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{FlockOperation, Mode, OFlags, RenameFlags};

use super::unpack::{names, remove};

/// The lock. It is a file, as a lock of a directory is seen by its own mount alone.
const LOCK: &str = "lock";
/// What is unpacked.
const ROOT: &str = "root";

/// `.NAME.UUID` beside NAME.
pub(in crate::cli) struct Stage<'a> {
    folder: &'a OwnedFd,
    own: OsString,
    open: OwnedFd,
    _lock: OwnedFd,
}

impl<'a> Stage<'a> {
    /// Makes the directory for `name` in `folder`, and removes those of killed imports.
    pub(in crate::cli) fn new(folder: &'a OwnedFd, name: &OsStr) -> rustix::io::Result<Stage<'a>> {
        let mut begin = OsString::from(".");
        begin.push(name);
        begin.push(".");
        for name in names(folder)?.iter().filter(|name| is_stage(name, &begin)) {
            // It is removed by the next one, if not by this.
            let _ = sweep(folder, name);
        }
        let mut own = begin;
        own.push(uuid::Uuid::new_v4().to_string());
        rustix::fs::mkdirat(folder, &*own, Mode::RWXU)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = rustix::fs::openat(folder, &*own, flags, Mode::empty())?;
        let lock = lock(&open, OFlags::CREATE | OFlags::EXCL)?;
        rustix::fs::mkdirat(&open, ROOT, Mode::RWXU)?;
        Ok(Stage { folder, own, open, _lock: lock })
    }

    /// Opens the directory to be filled.
    pub(in crate::cli) fn root(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.open, ROOT, flags, Mode::empty())
    }

    /// Gives what was unpacked its name, which nothing has yet.
    pub(in crate::cli) fn publish(&self, name: &OsStr) -> rustix::io::Result<()> {
        rustix::fs::renameat_with(&self.open, ROOT, self.folder, name, RenameFlags::NOREPLACE)
    }

    /// Removes what is left of it.
    pub(in crate::cli) fn remove(self) -> rustix::io::Result<()> {
        remove(self.folder, &self.own)
    }
}

fn is_stage(name: &OsStr, begin: &OsStr) -> bool {
    let uuid = name.as_bytes().strip_prefix(begin.as_bytes());
    uuid.is_some_and(|uuid| uuid::Uuid::try_parse_ascii(uuid).is_ok())
}

fn lock(stage: &OwnedFd, how: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = how | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = rustix::fs::openat(stage, LOCK, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

/// Removes a directory whose lock nobody has; one without a lock has been left before it had one.
fn sweep(folder: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let stage = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    match lock(&stage, OFlags::empty()) {
        Err(e) if e != rustix::io::Errno::NOENT => Err(e),
        _free => remove(folder, name),
    }
}
