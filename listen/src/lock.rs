// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks (flock) that the kernel releases when their holder ends, in whatever way, and files that exist for such a lock alone.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::{Identity, set_mode};

/// The mode of a lock's file. A umask that has these bits takes them from the file when it is made.
const MODE: u32 = 0o600;

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
            let Some(file) = opened(path)? else { continue };
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

/// Opens the file, or makes it. `None`: another process has made or removed it meanwhile.
fn opened(path: &Path) -> io::Result<Option<File>> {
    let open = |options: &mut OpenOptions| {
        options.write(true).mode(MODE).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
    };
    // In a sticky folder such as /tmp, open(2) with O_CREAT fails for a file of another user, for root too (fs.protected_regular).
    let there = open(&mut OpenOptions::new());
    let (file, of_others) = match &there {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            (open(OpenOptions::new().create_new(true)), io::ErrorKind::AlreadyExists)
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && give_mode(path)? => {
            (open(&mut OpenOptions::new()), io::ErrorKind::NotFound)
        }
        _ => return there.map(Some),
    };
    match file {
        Err(e) if e.kind() == of_others => Ok(None),
        file => file.map(Some),
    }
}

/// Gives a file of this process's user the mode that it lacks where a server with an odd umask has made it and was killed. Returns whether it lacked that, or
/// is gone.
fn give_mode(path: &Path) -> io::Result<bool> {
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?,
    };
    let found = file.metadata()?;
    let lacks =
        found.is_file() && found.mode() & MODE != MODE && found.uid() == rustix::process::geteuid().as_raw();
    if lacks {
        set_mode(&file, MODE)?;
    }
    Ok(lacks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

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
    fn a_lock_in_a_folder_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let why = LockFile::take(&folder.path().join("missing/lock")).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_link_in_a_locks_place_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join("lock"), folder.path().join("target"));
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(LockFile::take(&path).is_err() && !target.exists());
    }

    #[test]
    fn a_lock_of_a_server_that_was_killed_is_taken_whatever_mode_its_umask_left() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let path = folder.path().join("lock");
        let taken = || {
            if rustix::process::geteuid().is_root() {
                // SAFETY: a number; of this thread alone, from whom it takes root's way past modes too.
                assert!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) } == 0);
            }
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
            LockFile::take(&path).map(|lock| lock.is_some())
        };
        assert!(std::thread::scope(|scope| scope.spawn(taken).join().unwrap()).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn root_takes_a_lock_that_another_user_has_left_in_a_folder_for_all() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        let path = folder.path().join("lock");
        std::fs::write(&path, "").unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        drop(LockFile::take(&path).expect("it may").expect("free"));
        assert!(!path.exists());
    }
}
