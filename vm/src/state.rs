// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a running project keeps its files, and how one tells that its supervisor lives.
//!
//! `$XDG_RUNTIME_DIR/tombolo/` (root: `/run/tombolo/`) has one folder per project, named by the project and a hash of its
//! compose file's path: `lock` (held with flock by the supervisor, for as long as it lives), `supervisor.json` (how to
//! reach it) and the logs. Sockets are not files: the supervisor listens on an abstract address, and QEMU talks to it
//! over inherited descriptors; so nothing has to be swept up after a crash but the folder, and the next command does that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::compose::Project;

/// The folder of all projects of this user, made if it is missing.
///
/// # Errors
/// When it can't be made or belongs to somebody else.
pub fn base_dir() -> anyhow::Result<PathBuf> {
    let user = rustix::process::geteuid();
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir).join("tombolo"),
        _ if user.is_root() => "/run/tombolo".into(),
        _ => std::env::temp_dir().join(format!("tombolo-{}", user.as_raw())),
    };
    make_private(&dir)?;
    Ok(dir)
}

pub(crate) fn make_private(dir: &Path) -> anyhow::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => {
            return Err(e).with_context(|| format!("{} can't be made; set XDG_RUNTIME_DIR", dir.display()));
        }
    }
    let meta = fs::symlink_metadata(dir)?;
    if !meta.is_dir()
        || meta.uid() != rustix::process::geteuid().as_raw()
        || meta.permissions().mode() & 0o077 != 0
    {
        anyhow::bail!(
            "{} is not a folder that only you can open; remove it or set XDG_RUNTIME_DIR",
            dir.display()
        );
    }
    Ok(())
}

/// FNV-1a: names that need to be equal only on this machine.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// `n` random bytes from the kernel, in hex.
pub fn random_hex(n: usize) -> String {
    let mut bytes = vec![0; n];
    let mut filled = 0;
    while filled < n {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(got) => filled += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("getrandom without flags fails only where the kernel lacks it: {e}"),
        }
    }
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Replaces `path` by a file with this content; readers see the old or the new one.
///
/// # Errors
/// Those of the file system.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    fs::rename(&temporary, path)
}

/// Sends what this process says on its standard error into `log`.
///
/// # Errors
/// When the file can't be made.
pub fn log_to(log: &Path) -> anyhow::Result<()> {
    let file = File::create(log).with_context(|| log.display().to_string())?;
    rustix::stdio::dup2_stderr(&file)?;
    Ok(())
}

/// How to reach a supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Address {
    /// The abstract socket's name.
    pub socket: String,
    /// The supervisor's process id.
    pub pid: u32,
    /// The project's name.
    pub project: String,
    /// Its compose file.
    pub file: PathBuf,
}

/// A project's folder.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The folder of this project; it need not exist.
    ///
    /// # Errors
    /// See [`base_dir`].
    pub fn of(project: &Project) -> anyhow::Result<StateDir> {
        let hash = hash(project.file.as_os_str().as_encoded_bytes());
        Ok(StateDir { path: base_dir()?.join(format!("{}-{:08x}", project.name, hash & 0xffff_ffff)) })
    }

    /// The folder at this path.
    pub fn at(path: PathBuf) -> StateDir {
        StateDir { path }
    }

    /// All projects' folders.
    ///
    /// # Errors
    /// Those of reading the folder.
    pub fn all() -> anyhow::Result<Vec<StateDir>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(base_dir()?)? {
            let path = entry?.path();
            if path.is_dir() {
                all.push(StateDir { path });
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The log of a VM's console.
    pub fn console_log(&self, vm: &str) -> PathBuf {
        self.path.join(format!("{vm}.console"))
    }

    /// The log of a VM's QEMU.
    pub fn qemu_log(&self, vm: &str) -> PathBuf {
        self.path.join(format!("{vm}.qemu"))
    }

    /// Makes the folder and takes its lock: `None` when a supervisor lives already. The lock lasts as long as the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn lock(&self) -> anyhow::Result<Option<File>> {
        loop {
            make_private(&self.path)?;
            let path = self.path.join("lock");
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
            // Whoever swept the folder up meanwhile has unlinked the file that was locked here.
            if path.metadata().is_ok_and(|m| file.metadata().is_ok_and(|f| f.ino() == m.ino())) {
                return Ok(Some(file));
            }
        }
    }

    /// How to reach the supervisor: `None` when none lives. What a dead one left is swept up, except its logs.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn address(&self) -> anyhow::Result<Option<Address>> {
        let lock = match File::options().write(true).open(self.path.join("lock")) {
            Ok(lock) => lock,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let file = self.path.join("supervisor.json");
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared) {
            Ok(()) => {
                // Nobody holds it: the supervisor is dead.
                match fs::remove_file(&file) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
                    _ => Ok(None),
                }
            }
            Err(rustix::io::Errno::WOULDBLOCK) => match fs::read(&file) {
                Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
                // It lives and has not written it yet, or is about to end.
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(e.into()),
            },
            Err(e) => Err(e.into()),
        }
    }

    /// Tells clients how to reach this supervisor.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn publish(&self, address: &Address) -> anyhow::Result<()> {
        Ok(write_atomically(&self.path.join("supervisor.json"), &serde_json::to_vec(address)?)?)
    }

    /// Takes back what [`StateDir::publish`] said; the folder goes with it where no VM has left a log. Called with the lock held.
    pub fn withdraw(&self) {
        let _ = fs::remove_file(self.path.join("supervisor.json"));
        let logs = fs::read_dir(&self.path).is_ok_and(|entries| {
            entries.filter_map(Result::ok).any(|e| e.path().extension().is_some_and(|x| x == "console"))
        });
        if !logs && self.path.exists() {
            self.remove();
        }
    }

    /// Removes the folder; called with the lock held.
    pub fn remove(&self) {
        if let Err(e) = fs::remove_dir_all(&self.path) {
            eprintln!("tombolo: {}: {e}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_tells_whether_the_supervisor_lives() {
        let base = tempfile::tempdir().unwrap();
        let dir = StateDir { path: base.path().join("p") };
        assert!(dir.address().unwrap().is_none());
        let lock = dir.lock().unwrap().expect("nobody has it");
        assert!(dir.lock().unwrap().is_none(), "taken");
        let address = Address { socket: "s".into(), pid: 1, project: "p".into(), file: "/f".into() };
        dir.publish(&address).unwrap();
        assert_eq!(dir.address().unwrap().unwrap().socket, "s");
        drop(lock);
        assert!(dir.address().unwrap().is_none(), "dead");
        assert!(!dir.path().join("supervisor.json").exists(), "swept up");
    }

    #[test]
    fn a_folder_that_others_can_open_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("open");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(make_private(&dir).unwrap_err().to_string().contains("only you"));
    }
}
