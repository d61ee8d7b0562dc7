// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The identity of a project: the folder of its compose file, whatever its name is, and the path of the compose file.
//!
//! A supervisor holds its project's folder open ([`Folder`]), so that no other folder gets its inode number. Its door is named for the identity
//! that the project had when it was started, and a command compares that with the identity of the compose file that it was given: see
//! [`Identity::is_of`].

use std::ffi::OsStr;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use tombolo_zone::keep::{Keep, Kept};

use crate::project::state::hash;

/// Names of doors of supervisors begin so; the identity follows.
pub const DOOR: &str = "tombolo-project-";

/// A project's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Of the compose file's canonical path.
    path: u64,
    /// Of the folder's device and inode number, of its time of birth where the file system has one, and of the compose file's name in it.
    /// `None`: there was no such folder.
    folder: Option<u64>,
}

impl Identity {
    /// The identity of the project with this compose file, which need not be there.
    pub fn of(file: &Path) -> Identity {
        let folder = file.parent().and_then(|folder| std::fs::metadata(folder).ok());
        Identity::with(file, folder.as_ref())
    }

    /// The identity of the project with this compose file in this folder.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn in_folder(file: &Path, folder: &Folder) -> io::Result<Identity> {
        Ok(Identity::with(file, Some(&folder.0.metadata()?)))
    }

    fn with(file: &Path, folder: Option<&Metadata>) -> Identity {
        let path = hash(file.as_os_str().as_encoded_bytes());
        Identity {
            path,
            folder: folder.zip(file.file_name()).map(|(meta, name)| hash_folder(meta, meta.dev(), name)),
        }
    }

    /// A number of the folder of this compose file, and of the file's name in it, that lasts over reboots of the host, renames and moves within a
    /// file system. A copy has another one. `None`: the file system knows no times of birth, without which an inode number says too little.
    pub fn lasting(file: &Path) -> Option<u64> {
        let folder = std::fs::metadata(file.parent()?).ok()?;
        folder.created().ok()?;
        // The host may number its devices anew when it boots.
        Some(hash_folder(&folder, 0, file.file_name()?))
    }

    /// The identity in the name of a door.
    pub fn of_door(name: &str) -> Option<Identity> {
        let mut numbers = name.strip_prefix(DOOR)?.split('-').map(|hex| u64::from_str_radix(hex, 16).ok());
        Some(Identity { path: numbers.next()??, folder: numbers.next().flatten() })
    }

    /// The name of the project's door.
    pub fn door(&self) -> String {
        format!("{DOOR}{self}")
    }

    /// A number that no two projects have at the same time.
    pub fn number(&self) -> u64 {
        self.folder.unwrap_or(self.path)
    }

    /// Returns whether both are of the same folder.
    pub fn has_folder_of(&self, other: &Identity) -> bool {
        self.folder.is_some() && self.folder == other.folder
    }

    /// Returns whether both are of the same path.
    pub fn has_path_of(&self, other: &Identity) -> bool {
        self.path == other.path
    }

    /// Returns whether a supervisor, which was started with this identity, is that of the project `file`, whose identity is `wanted`.
    ///
    /// It is by its folder. It is by its path alone where there is no folder at that path, or where its own was removed: another folder there
    /// is another project as long as the supervisor's has a name.
    pub fn is_of(&self, supervisor: u32, wanted: &Identity, file: &Path) -> bool {
        self.has_folder_of(wanted)
            || self.has_path_of(wanted) && (wanted.folder.is_none() || !self.is_held(supervisor, file))
    }

    /// Returns whether a process holds this identity's folder open, and the folder has a name.
    fn is_held(&self, process: u32, file: &Path) -> bool {
        let Some(name) = file.file_name() else { return false };
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
        descriptors.filter_map(Result::ok).any(|descriptor| {
            std::fs::metadata(descriptor.path()).is_ok_and(|meta| {
                meta.is_dir() && meta.nlink() > 0 && Some(hash_folder(&meta, meta.dev(), name)) == self.folder
            })
        })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.path)?;
        self.folder.map_or(Ok(()), |folder| write!(f, "-{folder:016x}"))
    }
}

fn hash_folder(folder: &Metadata, device: u64, name: &OsStr) -> u64 {
    // Some file systems do not know it.
    let birth = folder.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    let mut bytes = [device, folder.ino()].map(u64::to_le_bytes).concat();
    bytes.extend(birth.as_nanos().to_le_bytes());
    bytes.extend(name.as_encoded_bytes());
    hash(&bytes)
}

/// The folder of a project that runs. While it is open no other folder has its inode number.
#[derive(Debug)]
pub struct Folder(File);

impl Folder {
    /// Opens the folder of a compose file. It is neither read nor listed.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn of(file: &Path) -> io::Result<Folder> {
        let folder = file.parent().unwrap_or(Path::new("/"));
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        OpenOptions::new().read(true).custom_flags(flags).open(folder).map(Folder)
    }

    /// Notes it for the next program of this process.
    pub fn keep(&self, keep: &mut Keep) -> Kept {
        keep.add(&self.0)
    }

    /// The folder that the program before has kept open.
    ///
    /// # Errors
    /// When the descriptor is not open.
    pub fn resume(kept: Kept) -> io::Result<Folder> {
        Ok(Folder(kept.take()?.into()))
    }

    /// The path of the folder where another folder lies at `path`, at which this one was once. `None`: it is still there, it was removed, or
    /// nothing is there.
    pub fn replaced_at(&self, path: &Path) -> Option<PathBuf> {
        let number = |meta: &Metadata| (meta.dev(), meta.ino());
        let (there, own) = (std::fs::metadata(path).ok()?, self.0.metadata().ok()?);
        let now = std::fs::read_link(format!("/proc/self/fd/{}", self.0.as_raw_fd()));
        (own.nlink() > 0 && number(&there) != number(&own)).then(|| now.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_keeps_its_identity_under_another_name_and_a_file_beside_has_its_own() {
        let base = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| base.path().join(name));
        std::fs::create_dir(&old).unwrap();
        let before = Identity::of(&old.join("tombolo.toml"));
        assert_eq!(Identity::of_door(&before.door()), Some(before));
        std::fs::rename(&old, &new).unwrap();
        let after = Identity::of(&new.join("tombolo.toml"));
        assert!(after.has_folder_of(&before) && !after.has_path_of(&before));
        assert!(!Identity::of(&new.join("other.toml")).has_folder_of(&before));
        let gone = Identity::of(&old.join("tombolo.toml"));
        assert!(gone.has_path_of(&before) && !gone.has_folder_of(&before) && !gone.has_folder_of(&gone));
        assert_eq!(Identity::of_door(&gone.door()), Some(gone));
    }

    #[test]
    fn the_lasting_number_of_a_folder_goes_with_it_and_a_copy_has_another() {
        let base = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| base.path().join(name));
        std::fs::create_dir(&old).unwrap();
        let Some(before) = Identity::lasting(&old.join("tombolo.toml")) else {
            panic!("{} has no times of birth", old.display());
        };
        std::fs::rename(&old, &new).unwrap();
        assert_eq!(Identity::lasting(&new.join("tombolo.toml")), Some(before));
        std::fs::create_dir(&old).unwrap();
        assert_ne!(Identity::lasting(&old.join("tombolo.toml")), Some(before));
        assert_ne!(Identity::lasting(&new.join("other.toml")), Some(before));
    }

    #[test]
    fn a_supervisors_folder_is_its_project_by_any_path_and_its_path_is_while_no_other_folder_is_there() {
        let base = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| base.path().join(name));
        let file = old.join("tombolo.toml");
        std::fs::create_dir(&old).unwrap();
        let folder = Folder::of(&file).unwrap();
        let started = Identity::in_folder(&file, &folder).unwrap();
        assert_eq!(started, Identity::of(&file));
        let is_of = |file: &Path| started.is_of(std::process::id(), &Identity::of(file), file);
        std::fs::rename(&old, &new).unwrap();
        assert!(is_of(&file), "there is no other");
        assert_eq!(folder.replaced_at(&old), None);
        std::fs::create_dir(&old).unwrap();
        assert!(!is_of(&file) && is_of(&new.join("tombolo.toml")), "another folder");
        assert_eq!(folder.replaced_at(&old), Some(new.canonicalize().unwrap()));
        std::fs::remove_dir(&new).unwrap();
        assert!(is_of(&file), "its own was removed");
        assert_eq!(folder.replaced_at(&old), None);
        // While it is held, its inode number is not another folder's.
        let number = |meta: Metadata| (meta.dev(), meta.ino());
        let held = number(folder.0.metadata().unwrap());
        for n in 0..64 {
            let other = base.path().join(n.to_string());
            std::fs::create_dir(&other).unwrap();
            assert_ne!(number(other.metadata().unwrap()), held);
        }
    }

    #[test]
    fn only_doors_of_projects_have_an_identity() {
        for name in ["tombolo-zone-0123", "tombolo-project-", "tombolo-project-x"] {
            assert_eq!(Identity::of_door(name), None, "{name}");
        }
    }
}
