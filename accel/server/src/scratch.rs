// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Folders for the temporary files of a driver, for processes without a file system of their own.
//!
//! A folder has a random name, is open to its user alone, and its owner holds a lock (flock) on it. The kernel releases the lock when
//! the owner ends in whatever way: a folder of this user that can be locked belongs to no living process, and a server that starts removes it.

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;
use tombolo_calls::say;
use tombolo_listen::lock::try_lock;

/// No folder of releases that locked none begins so.
const PREFIX: &str = "tombolo-scratch-";
const MODE: u32 = 0o700;
/// A server that cleans up at the same moment may take a folder before it is locked.
const ATTEMPTS: usize = 100;

/// A folder that is removed when this is dropped.
pub struct Folder {
    folder: TempDir,
    _lock: OwnedFd,
}

impl Folder {
    /// Makes one in the system's folder for temporary files (TMPDIR).
    pub fn new() -> anyhow::Result<Folder> {
        Folder::in_folder(&std::env::temp_dir())
    }

    fn in_folder(above: &Path) -> anyhow::Result<Folder> {
        let whose = || format!("a folder for the driver's temporary files in {}", above.display());
        for _ in 0..ATTEMPTS {
            let folder = tempfile::Builder::new()
                .prefix(PREFIX)
                .permissions(PermissionsExt::from_mode(MODE))
                .tempdir_in(above)
                .with_context(whose)?;
            if let Some(lock) = lock_at(folder.path()).with_context(whose)? {
                return Ok(Folder { folder, _lock: lock });
            }
        }
        bail!("{}: other processes remove what is made there; choose another one (TMPDIR)", whose())
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// The lock of the folder at this path; `None`: another process holds it, or the folder is gone.
fn lock_at(path: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    if !try_lock(&folder)? {
        return Ok(None);
    }
    // Whoever held the lock before may have removed the folder.
    let there = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).ok();
    let own = rustix::fs::fstat(&folder)?;
    Ok(there.is_some_and(|there| is_same(&there, &own)).then_some(folder))
}

fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Removes the folders that killed servers of this user have left.
pub fn remove_left() {
    remove_left_in(&std::env::temp_dir());
}

fn remove_left_in(above: &Path) {
    let names = std::fs::read_dir(above).into_iter().flatten().flatten().map(|entry| entry.file_name());
    for name in names.filter(|name| name.as_encoded_bytes().starts_with(PREFIX.as_bytes())) {
        if let Err(e) = remove_if_left(above, &name) {
            say!("tombolo accel: {}, left by a server that was killed: {e}", above.join(&name).display());
        }
    }
}

fn remove_if_left(above: &Path, name: &OsStr) -> io::Result<()> {
    let path = above.join(name);
    if !is_own(above, &path)? {
        return Ok(());
    }
    let Some(lock) = lock_at(&path)? else { return Ok(()) };
    // Held until the folder is gone, so that no two servers remove it at once.
    std::fs::remove_dir_all(&path)?;
    drop(lock);
    Ok(())
}

/// Returns whether this user made the folder as [`Folder::new`] does. Others can make what they like in the folders for temporary files: what is a mount point is not opened, since it may
/// belong to a FUSE process that never answers.
fn is_own(above: &Path, path: &Path) -> io::Result<bool> {
    let device = rustix::fs::stat(above)?.st_dev;
    let as_cached = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = match rustix::fs::statx(CWD, path, as_cached, rustix::fs::StatxFlags::BASIC_STATS) {
        Err(rustix::io::Errno::NOENT) => return Ok(false),
        found => found?,
    };
    let mode = u32::from(found.stx_mode);
    Ok(FileType::from_raw_mode(mode) == FileType::Directory
        && mode & 0o7777 == MODE
        && found.stx_uid == rustix::process::geteuid().as_raw()
        && rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor) == device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::MetadataExt;
    use std::path::PathBuf;

    fn above() -> TempDir {
        tempfile::tempdir().expect("a folder")
    }

    fn names(above: &TempDir) -> usize {
        std::fs::read_dir(above.path()).expect("a folder").count()
    }

    /// A folder as a server that was killed leaves it, with a file in it.
    fn left_in(above: &TempDir) -> PathBuf {
        let Folder { folder, _lock } = Folder::in_folder(above.path()).expect("a folder");
        let path = folder.keep();
        std::fs::create_dir(path.join("kernels")).expect("a folder");
        std::fs::write(path.join("kernels/a.so"), "compiled").expect("written");
        path
    }

    #[test]
    fn folders_have_names_of_their_own_are_open_to_their_user_alone_and_go_with_their_owner() {
        let above = above();
        let both = [(); 2].map(|()| Folder::in_folder(above.path()).expect("a folder"));
        assert_ne!(both[0].path(), both[1].path());
        for folder in &both {
            assert_eq!(folder.path().metadata().expect("it is there").mode() & 0o7777, MODE);
        }
        drop(both);
        assert_eq!(names(&above), 0);
    }

    #[test]
    fn what_a_killed_server_left_goes_and_a_living_ones_stays() {
        let above = above();
        let living = Folder::in_folder(above.path()).expect("a folder");
        let left = left_in(&above);
        remove_left_in(above.path());
        assert!(!left.exists());
        assert!(living.path().exists());
        drop(living);
        assert_eq!(names(&above), 0);
    }

    #[test]
    fn what_others_made_under_such_a_name_stays() {
        let above = above();
        let elsewhere = tempfile::tempdir().expect("a folder");
        std::fs::write(elsewhere.path().join("file"), "theirs").expect("written");
        std::fs::set_permissions(elsewhere.path(), Permissions::from_mode(MODE)).expect("its mode");
        let named = |name: &str| above.path().join(format!("{PREFIX}{name}"));
        std::os::unix::fs::symlink(elsewhere.path(), named("link")).expect("a link");
        std::fs::write(named("file"), "").expect("written");
        let open = left_in(&above);
        std::fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("its mode");
        let mut stay = vec![elsewhere.path().join("file"), named("link"), named("file"), open];
        if rustix::process::geteuid().is_root() {
            let theirs = left_in(&above);
            std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).expect("given");
            stay.push(theirs);
        }
        remove_left_in(above.path());
        for path in stay {
            assert!(path.symlink_metadata().is_ok(), "{}", path.display());
        }
    }

    #[test]
    fn a_mount_point_of_such_a_name_is_not_opened() {
        let (above, path) = (above(), Path::new("/dev"));
        // As statx(2) tells it of what another file system lies on.
        assert!(!is_own(above.path(), path).expect("it is there"));
        assert!(!is_own(above.path(), &above.path().join("none")).expect("none is there"));
    }

    #[test]
    fn a_folder_that_was_removed_before_it_was_locked_gives_no_lock() {
        let above = above();
        let left = left_in(&above);
        let held = lock_at(&left).expect("opened").expect("no process has it");
        assert!(lock_at(&left).expect("opened").is_none());
        std::fs::remove_dir_all(&left).expect("removed");
        drop(held);
        assert!(lock_at(&left).expect("none is there").is_none());
    }
}
