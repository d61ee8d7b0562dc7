// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening sockets that only processes of the same user (and root) can reach, and that leave no file behind.
//!
//! A [`Door`] is a Unix socket that is bound in a folder, opened (O_PATH) and unlinked at once. A process that looks for it reads the links in
//! `/proc/PID/fd`, which the kernel shows to the same user and to root alone, and connects through such a link. So other users can neither
//! connect nor take the name, nothing depends on a folder that may be removed, and a process that is killed leaves no file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use crate::keep::{Keep, Kept};

/// The text that /proc appends to the name of a file that has been unlinked.
const UNLINKED: &str = " (deleted)";

/// A listening socket and the descriptor through which other processes reach it.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    handle: OwnedFd,
}

impl Door {
    /// Makes a door. The socket is in `folder` for a moment, under this name.
    ///
    /// # Errors
    /// Those of the file system, a name that is taken there among them.
    pub fn open(folder: &Path, name: &str) -> io::Result<Door> {
        let folder = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(folder)?;
        // An address has room for 107 bytes: too few for some paths.
        let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()));
        let listener = UnixListener::bind(&path)?;
        let opened = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).and_then(|()| {
            OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&path)
        });
        let removed = std::fs::remove_file(&path);
        let handle: File = opened?;
        removed?;
        Ok(Door { listener, handle: handle.into() })
    }

    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// The descriptor by which other processes find the door; it must stay open.
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// A door that the next program of this process keeps open.
#[derive(Debug, Serialize, Deserialize)]
pub struct DoorState {
    listener: Kept,
    handle: Kept,
}

impl DoorState {
    /// Notes the descriptors of a door.
    pub fn of(door: &Door, keep: &mut Keep) -> DoorState {
        DoorState { listener: keep.add(&door.listener), handle: keep.add(&door.handle) }
    }

    /// The door, with those who have knocked meanwhile.
    ///
    /// # Errors
    /// When a descriptor is not open.
    pub fn resume(self) -> io::Result<Door> {
        Ok(Door { listener: self.listener.take()?.into(), handle: self.handle.take()? })
    }
}

/// A door of another process.
#[derive(Clone, Debug)]
pub struct Found {
    /// The process that has it.
    pub process: u32,
    /// Its user.
    pub user: u32,
    /// The path at which it was bound; the file has been unlinked.
    pub path: PathBuf,
    link: PathBuf,
}

impl Found {
    /// The name under which it was opened.
    pub fn name(&self) -> &str {
        self.path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
    }

    /// Returns whether the process still has the door.
    pub fn is_there(&self) -> bool {
        let link = std::fs::read_link(&self.link);
        link.is_ok_and(|at| {
            at.to_str().and_then(|at| at.strip_suffix(UNLINKED)).map(Path::new) == Some(&self.path)
        })
    }

    /// Connects; `limit` is for a process whose backlog is full.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` if the process or its door has gone meanwhile, `TimedOut` at the limit, `PermissionDenied` if the
    /// socket is another process's.
    pub fn connect(&self, limit: Option<Duration>) -> io::Result<UnixStream> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, limit)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(&self.link)?) {
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            other => other?,
        }
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
        let peer = sockopt::socket_peercred(&socket)?;
        let own = rustix::process::geteuid();
        if u32::try_from(peer.pid.as_raw_pid()) != Ok(self.process) || peer.uid != own && !peer.uid.is_root()
        {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another process's socket"));
        }
        Ok(socket.into())
    }
}

/// Returns the doors of this user's processes whose name `wanted` accepts. With `number` only that descriptor of each process is looked at.
///
/// # Errors
/// When /proc can't be read.
pub fn find(wanted: impl Fn(&str) -> bool, number: Option<u32>) -> io::Result<Vec<Found>> {
    let own = rustix::process::geteuid().as_raw();
    find_of(|user| user == own, wanted, number)
}

/// As [`find`], of the users that `of` accepts; root alone finds those of others.
///
/// # Errors
/// When /proc can't be read.
pub fn find_of(
    of: impl Fn(u32) -> bool,
    wanted: impl Fn(&str) -> bool,
    number: Option<u32>,
) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Ok(entry) = entry else { continue };
        let Some(process) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        // A process that ends meanwhile has no door.
        let Ok(user) = entry.metadata().map(|meta| meta.uid()) else { continue };
        if !of(user) {
            continue;
        }
        let folder = entry.path().join("fd");
        let mut look = |link: PathBuf| {
            let Ok(path) = std::fs::read_link(&link) else { return };
            let Some(path) = path.to_str().and_then(|p| p.strip_suffix(UNLINKED)) else { return };
            let path = PathBuf::from(path);
            if path.file_name().and_then(|n| n.to_str()).is_some_and(&wanted) {
                found.push(Found { process, user, path, link });
            }
        };
        match number {
            Some(number) => look(folder.join(number.to_string())),
            None => {
                let links = std::fs::read_dir(&folder).into_iter().flatten();
                links.filter_map(Result::ok).for_each(|link| look(link.path()));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str) -> (Door, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let door = Door::open(folder.path(), name).unwrap();
        (door, folder)
    }

    #[test]
    fn a_door_is_found_without_its_folder_and_ends_with_its_process() {
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let (door, folder) = open(&name);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the name is gone");
        drop(folder);
        let all = find(|n| n == name, None).unwrap();
        let [found] = &all[..] else { panic!("{all:?}") };
        assert_eq!((found.process, found.name()), (std::process::id(), name.as_str()));
        assert!(found.is_there());
        let _ours = found.connect(None).unwrap();
        drop(door.listener().accept().unwrap());
        assert!(find(|n| n == name, Some(0)).unwrap().is_empty(), "it is not the standard input");
        drop(door);
        assert!(!found.is_there() && found.connect(None).is_err());
        assert!(find(|n| n == name, None).unwrap().is_empty());
    }

    #[test]
    fn a_path_of_any_length_has_room_for_a_door() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("x".repeat(200));
        std::fs::create_dir(&deep).unwrap();
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let _door = Door::open(&deep, &name).unwrap();
        assert_eq!(find(|n| n == name, None).unwrap()[0].path, deep.join(&name));
    }

    #[test]
    fn a_connect_to_a_door_that_accepts_nothing_ends_at_the_limit() {
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let (_door, _folder) = open(&name);
        let found = find(|n| n == name, None).unwrap().remove(0);
        let mut waiting = Vec::new();
        let error = loop {
            match found.connect(Some(Duration::from_millis(20))) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
            assert!(waiting.len() < 10_000);
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
