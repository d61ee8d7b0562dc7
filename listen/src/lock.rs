// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks (flock) that the kernel releases when their holder ends, in whatever way, and files that exist for such a lock alone.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::Identity;

/// Locks what was opened until all copies of the descriptor are closed. Returns whether no other process has locked it.
///
/// # Errors
/// Its file system has no such locks.
pub fn try_lock(opened: &impl AsFd) -> io::Result<bool> {
    match rustix::fs::flock(opened, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        locked => Ok(locked.map(|()| true)?),
    }
}

/// A locked file that is removed when this is dropped.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    locked: File,
}

impl LockFile {
    /// Locks the file at this path, and makes it if there is none. `None`: another process holds the lock.
    ///
    /// # Errors
    /// This process may not open the file, or its file system has no locks.
    pub fn take(path: &Path) -> io::Result<Option<LockFile>> {
        loop {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
            if !try_lock(&file)? {
                return Ok(None);
            }
            let lock = LockFile { path: path.to_owned(), locked: file };
            // The process that had the lock before removes the file first.
            if lock.is_there() {
                return Ok(Some(lock));
            }
        }
    }

    fn is_there(&self) -> bool {
        self.locked.metadata().is_ok_and(|own| Identity::at(&self.path) == Some(Identity::of(&own)))
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Its user may have removed it, and another process have made it anew.
        if self.is_there() {
            let _gone = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_holder_at_a_time_and_its_file_goes_with_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let take = || LockFile::take(&path).unwrap();
        let first = take().expect("free");
        assert!(take().is_none());
        // By an administrator.
        std::fs::remove_file(&path).unwrap();
        let second = take().expect("free");
        drop(first);
        assert!(path.exists() && take().is_none(), "who had it before leaves the new one alone");
        drop(second);
        assert!(!path.exists());
        // Of a process that was killed.
        std::fs::write(&path, "").unwrap();
        drop(take().expect("free"));
        assert!(!path.exists());
    }

    #[test]
    fn a_link_in_a_locks_place_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join("lock"), folder.path().join("target"));
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(LockFile::take(&path).is_err() && !target.exists());
    }
}
