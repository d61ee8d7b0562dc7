// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The folder of a served zone: a socket for each invited VM, and a record of each VM's process. Records outlive the server, so that a
//! server's death does not make its VMs dead.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::doorbell::process::{Process, started};
use crate::{Error, Result};

/// The server's own record.
const SERVER: &str = "server.process";

/// The folder of one zone's sockets and records.
#[derive(Clone, Debug)]
pub struct Room(PathBuf);

/// Returns the folder of all zones: `$TOMBOLO_ZONES_RUN`; for root `/run/tombolo-zones`, which VMs of other users can enter; for others a
/// folder of their own.
fn base() -> PathBuf {
    let user = rustix::process::geteuid();
    match (std::env::var_os("TOMBOLO_ZONES_RUN"), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(chosen), _) => chosen.into(),
        _ if user.is_root() => "/run/tombolo-zones".into(),
        (None, Some(own)) => PathBuf::from(own).join("tombolo-zones"),
        (None, None) => std::env::temp_dir().join(format!("tombolo-zones-{}", user.as_raw())),
    }
}

/// Returns the folder of sockets of switches' ports for VMs that tombolo does not start.
pub fn ports() -> PathBuf {
    base().join("ports")
}

impl Room {
    /// Returns the room of a zone without making it.
    pub fn of(zone: Uuid) -> Room {
        Room(base().join(zone.to_string()))
    }

    /// Makes the folders. Other users may enter them but not list them; each socket's permissions decide which of them may connect.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn make(&self) -> Result<()> {
        let failed = |e| Error::io(format!("making the folder {}", self.0.display()), e);
        let base = self.0.parent().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        DirBuilder::new().recursive(true).mode(0o711).create(base).map_err(failed)?;
        DirBuilder::new().recursive(true).mode(0o711).create(&self.0).map_err(failed)
    }

    /// The socket that a VM connects to. A name may have any characters but '/'.
    pub fn socket(&self, member: &str) -> PathBuf {
        self.0.join(format!("{member}.sock"))
    }

    /// Returns the path for the server's output if a command started it.
    pub fn log(&self) -> PathBuf {
        self.0.join("server.log")
    }

    fn record(&self, member: &str) -> PathBuf {
        self.0.join(format!("{member}.vm"))
    }

    /// Records a VM's process.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn note(&self, member: &str, process: &Process) -> Result<()> {
        let path = self.record(member);
        write(&path, process.id(), Some(process.started()))
            .map_err(|e| Error::io(format!("writing {}", path.display()), e))
    }

    /// Forgets a VM's process.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn forget(&self, member: &str) -> Result<()> {
        let path = self.record(member);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("removing {}", path.display()), e))
            }
            _ => Ok(()),
        }
    }

    /// Records this process as the zone's server.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn note_server(&self) -> Result<()> {
        let (path, own) = (self.0.join(SERVER), std::process::id());
        write(&path, own, started(own)).map_err(|e| Error::io(format!("writing {}", path.display()), e))
    }

    /// Returns the process of the zone's server, if it lives.
    pub fn server(&self) -> Option<u32> {
        living(&self.0.join(SERVER))
    }

    /// Returns the VMs whose processes live, with the processes' numbers.
    ///
    /// # Errors
    /// The folder exists and can't be read.
    pub fn vms(&self) -> Result<Vec<(String, u32)>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io(format!("reading {}", self.0.display()), e)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| Error::io(format!("reading {}", self.0.display()), e))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".vm"));
            if let (Some(name), Some(pid)) = (name, living(&path)) {
                found.push((name.to_owned(), pid));
            }
        }
        found.sort();
        Ok(found)
    }
}

/// Writes number and start of a process atomically, so that no reader finds half a line.
fn write(path: &Path, pid: u32, started: Option<u64>) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, format!("{pid} {}\n", started.unwrap_or(0)))?;
    fs::set_permissions(&new, Permissions::from_mode(0o600))?;
    fs::rename(&new, path)
}

/// Returns the process of a record, if it lives.
fn living(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    let (pid, start) = text.trim().split_once(' ')?;
    let pid = pid.parse().ok()?;
    (started(pid)? == start.parse::<u64>().ok()?).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_a_process_only_while_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room(dir.path().join("zones").join("z"));
        assert_eq!(room.vms().unwrap(), []);
        room.make().unwrap();
        assert_eq!(room.server(), None);
        room.note_server().unwrap();
        assert_eq!(room.server(), Some(std::process::id()));
        // The same number with another start is another process.
        let own = std::process::id();
        write(&room.record("old"), own, started(own).map(|s| s - 1)).unwrap();
        write(&room.record("new"), own, started(own)).unwrap();
        assert_eq!(room.vms().unwrap(), [("new".to_owned(), own)]);
        room.forget("new").unwrap();
        room.forget("new").unwrap();
        assert_eq!(room.vms().unwrap(), []);
    }
}
