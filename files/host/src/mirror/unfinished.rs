// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The names under which entries are made until they are whole. Several runs may copy into one directory at once, so each entry has a name that no other
//! run uses. A run holds a lock of the file that it writes: one without a lock was left by a run that died, and the next run in its directory removes it.
//! Links and special files can't be locked, and have their places at once: those that are older than a minute were left.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

/// The whole name in earlier releases; the rest is a UUID without hyphens.
const PREFIX: &[u8] = b".tombolo-unfinished";

/// A living run needs less to give a link or a special file its place.
const AT_ONCE: Duration = Duration::from_secs(60);

/// Returns whether entries that are not whole yet have names like this one.
pub(super) fn is_named(name: &OsStr) -> bool {
    match name.as_bytes().strip_prefix(PREFIX) {
        Some([]) => true,
        Some([b'-', id @ ..]) => id.len() == 32 && id.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')),
        _ => false,
    }
}

/// Returns a new name beside `target`.
pub(super) fn beside(target: &Path) -> PathBuf {
    let id = uuid::Uuid::new_v4();
    target.with_file_name(format!("{}-{}", String::from_utf8_lossy(PREFIX), id.simple()))
}

/// Makes a file under a new name beside `target`, that only this user can read. It counts as a dead run's once the file returned is closed.
pub(super) fn create(target: &Path) -> io::Result<(PathBuf, File)> {
    loop {
        let path = beside(target);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Another run took it for a dead one's before it was locked.
            Err(Errno::WOULDBLOCK) => {}
            Ok(()) if file.metadata()?.nlink() == 0 => {}
            // A file system without locks tells no run that this one is dead.
            Ok(()) | Err(_) => return Ok((path, file)),
        }
    }
}

/// Removes what a dead run left. Returns whether nothing is left at `path`; a living run's entry stays, and so does a directory.
pub(super) fn remove_if_dead(path: &Path) -> io::Result<bool> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() => {
            File::options().read(true).write(true).custom_flags(flags.try_into().unwrap_or(0)).open(path)
        }
        Ok(meta) if meta.is_dir() || !is_old(&meta) => return Ok(false),
        Ok(_) => return remove(path),
        Err(e) => Err(e),
    };
    let file = match file {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        // A file that this user may not open may be a living run's.
        Err(_) => return Ok(false),
    };
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(false);
    }
    remove(path)
}

/// The other run's host may have set the time by another clock. An entry whose time is in the future is not old.
fn is_old(meta: &fs::Metadata) -> bool {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(meta.ctime()).unwrap_or(0));
    SystemTime::now().duration_since(made).is_ok_and(|age| age > AT_ONCE)
}

fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(true),
    }
}

/// Removes what dead runs left in a directory.
pub(super) fn sweep(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if is_named(&entry.file_name()) {
            remove_if_dead(&entry.path())?;
        }
    }
    Ok(())
}
