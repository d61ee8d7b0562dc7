// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The job's directory in the zone, and the view that its processes have of the machine: the directory is their /dev/shm, and all have one boot id.
//!
//! ```text
//! MOUNT/.tombolo-mpi/lock          held while a job's directory is made or removed
//! MOUNT/.tombolo-mpi/JOB/owners    every node of the job holds a shared lock: without one nobody uses the directory
//!                       /up-N      what node N says to the first node; /down-N the other way (link.rs)
//!                       /shm       the job's /dev/shm; in it .tombolo, with the boot id, the wrapper and its socket
//! ```

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::sys;

/// The directory of all jobs, in a zone's root.
const JOBS: &str = ".tombolo-mpi";
/// The shared-memory directory of the libraries.
const SHM: &str = "/dev/shm";
/// The kernel's random number of this boot, by which libraries tell machines apart.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The program in the first VM of a job that stands for a rank of any VM.
pub const WRAPPER: &str = "/dev/shm/.tombolo/rank";
/// The socket to which wrappers connect.
pub const SOCKET: &str = "/dev/shm/.tombolo/socket";

/// The directory of one job, of which this node is an owner until this is dropped.
#[derive(Debug)]
pub struct Space {
    jobs: PathBuf,
    dir: PathBuf,
    owner: File,
}

/// A file of zone `uuid` that is mounted here: the mount point, and whether it can be written.
pub fn mount_of(mounts: &str, uuid: &str) -> Option<(PathBuf, bool)> {
    let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let own = lines.filter(|words| words.len() > 3 && words[0] == uuid && words[2] == "tombolo");
    let found = own.map(|words| (unescaped(words[1]), words[3].split(',').any(|option| option == "rw")));
    // A mount that can be written, if there is one.
    found.max_by_key(|(_, writes)| *writes)
}

/// A path of /proc/mounts: blanks and the like stand there as a backslash and an octal number.
fn unescaped(path: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let octal =
            more.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[3..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from(String::from_utf8_lossy(&bytes).into_owned()))
}

fn make(dir: &Path, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// The lock under which directories of jobs are made and removed.
fn gate(jobs: &Path) -> io::Result<File> {
    let gate = File::options().create(true).truncate(false).write(true).open(jobs.join("lock"))?;
    sys::lock(&gate)?;
    Ok(gate)
}

/// Removes the directories of jobs that have no owner any more: their names.
///
/// # Errors
/// The directory of jobs can't be read.
pub fn clean(mount: &Path) -> io::Result<Vec<String>> {
    let jobs = mount.join(JOBS);
    if !jobs.is_dir() {
        return Ok(Vec::new());
    }
    let _gate = gate(&jobs)?;
    let mut removed = Vec::new();
    for entry in fs::read_dir(&jobs)? {
        let dir = entry?.path();
        if dir.is_dir() && is_abandoned(&dir) {
            fs::remove_dir_all(&dir)?;
            removed.extend(dir.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    Ok(removed)
}

/// Copies this program to where launchers of all members find it: its path.
///
/// # Errors
/// The zone is full.
pub fn install(mount: &Path) -> io::Result<PathBuf> {
    let jobs = mount.join(JOBS);
    make(&jobs, 0o755)?;
    let _gate = gate(&jobs)?;
    let (new, path) = (jobs.join("wrap.new"), jobs.join("wrap"));
    fs::copy("/proc/self/exe", &new)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::rename(new, &path)?;
    Ok(path)
}

/// Returns whether no node of the job lives. The caller holds the gate.
fn is_abandoned(dir: &Path) -> bool {
    match File::open(dir.join("owners")) {
        Ok(owners) => sys::try_lock(&owners, true).is_ok(),
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    }
}

impl Space {
    /// Makes the directory of a job, or joins it, and removes those that nobody owns.
    ///
    /// # Errors
    /// The zone is full or can't be written.
    pub fn join(mount: &Path, job: &str, nodes: u32) -> io::Result<Space> {
        let jobs = mount.join(JOBS);
        make(&jobs, 0o755)?;
        clean(mount)?;
        let _gate = gate(&jobs)?;
        let dir = jobs.join(job);
        make(&dir, 0o755)?;
        let shm = dir.join("shm");
        if !shm.exists() {
            make(&shm, 0o1777)?;
            fs::set_permissions(&shm, fs::Permissions::from_mode(0o1777))?;
            make(&shm.join(".tombolo"), 0o755)?;
        }
        for node in 1..nodes {
            make(&dir.join(format!("up-{node}")), 0o700)?;
            make(&dir.join(format!("down-{node}")), 0o700)?;
        }
        let owner = File::options().create(true).truncate(false).write(true).open(dir.join("owners"))?;
        sys::try_lock(&owner, false)?;
        Ok(Space { jobs, dir, owner })
    }

    /// Shows this process, and those that it starts, the job's directory as /dev/shm, and the job's boot id.
    ///
    /// # Errors
    /// Says which step failed.
    pub fn enter(&self, boot_id: &str) -> Result<(), String> {
        let step = |what: &str| {
            let what = what.to_owned();
            move |e: io::Error| format!("{what}: {e}")
        };
        let id = self.dir.join("shm/.tombolo/boot_id");
        self.write_once(&id, &format!("{boot_id}\n")).map_err(step("the boot id can't be written"))?;
        sys::own_mounts().map_err(step("no mount namespace can be had"))?;
        let shm = Path::new(SHM);
        make(shm, 0o1777).map_err(step("the guest has no /dev/shm"))?;
        sys::mount_on(Some(&self.dir.join("shm")), shm, sys::BIND)
            .map_err(step("/dev/shm can't be bound"))?;
        sys::mount_on(None, shm, sys::REBIND).map_err(step("programs can't be run in /dev/shm"))?;
        sys::mount_on(Some(&id), Path::new(BOOT_ID), sys::BIND).map_err(step("the boot id can't be bound"))
    }

    /// Writes a file that another owner may have written.
    fn write_once(&self, path: &Path, text: &str) -> io::Result<()> {
        let _gate = gate(&self.jobs)?;
        if path.exists() { Ok(()) } else { fs::write(path, text) }
    }

    /// The folder in which wrappers without a node meet.
    pub fn meeting(&self) -> PathBuf {
        self.dir.join("meeting")
    }

    /// The folder in which node `node` of the others finds what the first one says (`down`), or the other way.
    pub fn link(&self, down: bool, node: u32) -> PathBuf {
        self.dir.join(format!("{}-{node}", if down { "down" } else { "up" }))
    }

    /// Ends this node's ownership; the last owner removes the directory.
    ///
    /// # Errors
    /// The directory can't be removed.
    pub fn leave(self) -> io::Result<()> {
        let _gate = gate(&self.jobs)?;
        drop(self.owner);
        if is_abandoned(&self.dir) {
            fs::remove_dir_all(&self.dir)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zones_mount_is_found_by_its_identity_and_one_that_can_be_written_is_preferred() {
        let mounts = "proc /proc proc rw 0 0\nu-1 /mnt/a\\040b tombolo ro,nosuid 0 0\nu-1 /mnt/c tombolo rw,nosuid 0 0\nu-2 /x tombolo ro 0 0\n";
        assert_eq!(mount_of(mounts, "u-1"), Some(("/mnt/c".into(), true)));
        assert_eq!(mount_of(mounts, "u-2"), Some(("/x".into(), false)));
        assert_eq!(mount_of(mounts, "u-3"), None);
        assert_eq!(unescaped("/mnt/a\\040b\\"), PathBuf::from("/mnt/a b\\"));
    }

    #[test]
    fn a_jobs_directory_goes_with_its_last_owner_and_one_without_owners_with_the_next_job() {
        let mount = std::env::temp_dir().join(format!("tombolo-mpi-space-{}", std::process::id()));
        fs::create_dir_all(&mount).unwrap();
        let first = Space::join(&mount, "one", 2).unwrap();
        let second = Space::join(&mount, "one", 2).unwrap();
        let dir = mount.join(".tombolo-mpi/one");
        assert!(dir.join("up-1").is_dir() && dir.join("down-1").is_dir());
        first.leave().unwrap();
        assert!(dir.is_dir());
        assert_eq!(clean(&mount).unwrap(), Vec::<String>::new());
        second.leave().unwrap();
        assert!(!dir.exists());
        // A node that was killed leaves without a word.
        drop(Space::join(&mount, "two", 1).unwrap());
        let third = Space::join(&mount, "three", 1).unwrap();
        assert!(!mount.join(".tombolo-mpi/two").exists());
        drop(third);
        assert_eq!(clean(&mount).unwrap(), ["three"]);
        fs::remove_dir_all(&mount).unwrap();
    }
}
