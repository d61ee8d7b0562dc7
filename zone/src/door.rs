// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening sockets that only processes of the same user (and root) can reach, and that leave no file behind.
//!
//! A [`Door`] is a Unix socket that is bound in a folder, opened (O_PATH) and unlinked at once. A process that looks for it reads the links in
//! `/proc/PID/fd`, which the kernel shows to the same user and to root alone, and connects through such a link. So other users can neither
//! connect nor take the name, nothing depends on a folder that may be removed, and a process that is killed leaves no file.
//!
//! A process may have inherited a descriptor from another user: a set-uid program has the standard input of the user who runs it. Such a file is
//! no door, whatever its path: a door is a socket that the process's own user has made, and that has no name any more.
//!
//! The kernel tells such a file's path as it is below the root folder of its process, and a container chooses what its root folder has. So a process
//! with another root folder than the one that looks has no door for it.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use tombolo_brief::Brief;

/// The text that /proc appends to the name of a file that has been unlinked.
const UNLINKED: &str = " (deleted)";

/// A listening socket and the descriptor through which other processes reach it.
#[derive(Debug)]
pub struct Door {
    /// With the connections that wait at it.
    listener: Brief<UnixListener>,
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
        let listener = Brief::from(UnixListener::bind(&path)?);
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

/// A door of another process.
#[derive(Clone, Debug)]
pub struct Found {
    /// The process that has it.
    pub process: u32,
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
        let peer = tombolo_listen::peer::of(&socket)?;
        let own = rustix::process::geteuid().as_raw();
        if peer.process != Some(self.process) || ![own, 0].contains(&peer.user) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another process's socket"));
        }
        Ok(socket.into())
    }
}

/// Returns the doors of this user's processes whose name `wanted` accepts.
///
/// # Errors
/// When /proc can't be read.
pub fn find(wanted: impl Fn(&str) -> bool) -> io::Result<Vec<Found>> {
    let own = rustix::process::geteuid().as_raw();
    check_proc()?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Ok(entry) = entry else { continue };
        let Some(process) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        // A process that ends meanwhile has no door.
        if !entry.metadata().is_ok_and(|meta| meta.uid() == own) {
            continue;
        }
        for link in std::fs::read_dir(entry.path().join("fd")).into_iter().flatten().filter_map(Result::ok) {
            let link = link.path();
            let Ok(path) = std::fs::read_link(&link) else { continue };
            let Some(path) = path.to_str().and_then(|p| p.strip_suffix(UNLINKED)) else { continue };
            let path = PathBuf::from(path);
            let named = path.file_name().and_then(|n| n.to_str()).is_some_and(&wanted);
            let is_door = named && std::fs::metadata(&link).is_ok_and(|file| is_door(&file, own));
            if is_door && has_this_root(process) {
                found.push(Found { process, path, link });
            }
        }
    }
    Ok(without_copies(found))
}

/// Refuses a /proc that numbers processes otherwise than this process's PID namespace does: a number that is read there is another process here.
pub(crate) fn check_proc() -> io::Result<()> {
    let own = std::fs::read_link("/proc/self").ok();
    if own.is_some_and(|own| own.to_str() == Some(&std::process::id().to_string())) {
        return Ok(());
    }
    Err(io::Error::other(
        "/proc shows the processes of another PID namespace than this one's; mount its own: mount -t proc proc /proc (unshare --mount-proc)",
    ))
}

/// Returns whether a process has the same root folder as this one.
fn has_this_root(process: u32) -> bool {
    let number = |path: &str| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    number("/").is_ok_and(|own| number(&format!("/proc/{process}/root/")).is_ok_and(|root| root == own))
}

/// A child that has not become its program has all that its parent has open, and no door of its own.
fn without_copies(found: Vec<Found>) -> Vec<Found> {
    let is_copy = |door: &Found| {
        let same = found.iter().filter(|other| other.path == door.path && other.process != door.process);
        let others: Vec<u32> = same.map(|other| other.process).collect();
        !others.is_empty() && parent(door.process).is_some_and(|parent| others.contains(&parent))
    };
    found.iter().filter(|door| !is_copy(door)).cloned().collect()
}

/// The parent of a process (proc_pid_stat(5)).
fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The state and the parent follow the name, which is in parentheses and may contain some.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Returns whether a file to which a process of `user` has a descriptor is a door. A hard link to another user's socket still has a name.
fn is_door(file: &Metadata, user: u32) -> bool {
    file.file_type().is_socket() && file.uid() == user && file.nlink() == 0
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
        let all = find(|n| n == name).unwrap();
        let [found] = &all[..] else { panic!("{all:?}") };
        assert_eq!((found.process, found.name()), (std::process::id(), name.as_str()));
        assert!(found.is_there());
        let _ours = found.connect(None).unwrap();
        drop(door.listener().accept().unwrap());
        drop(door);
        assert!(!found.is_there() && found.connect(None).is_err());
        assert!(find(|n| n == name).unwrap().is_empty());
    }

    #[test]
    fn a_child_that_still_has_all_that_its_parent_has_is_no_second_one_with_the_door() {
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let (door, _folder) = open(&name);
        let handle = door.handle().try_clone_to_owned().unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").stdin(handle).spawn().unwrap();
        let with: Vec<u32> = find(|n| n == name).unwrap().iter().map(|found| found.process).collect();
        assert_eq!(with, [std::process::id()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_with_another_root_folder_has_no_door() {
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let (door, folder) = open(&name);
        let mut command = std::process::Command::new("unshare");
        let wait = "import os, signal, sys; os.chroot(sys.argv[1]); print(flush=True); signal.pause()";
        command.args(["-Ur", "python3", "-c", wait]).arg(folder.path());
        let handle = door.handle().try_clone_to_owned().unwrap();
        let piped = std::process::Stdio::piped;
        let mut process = command.stdin(handle).stdout(piped()).spawn().unwrap();
        let mut line = [0];
        std::io::Read::read_exact(process.stdout.as_mut().unwrap(), &mut line).unwrap();
        let is_its = |found: &Found| found.process == process.id();
        assert!(!find(|n| n == name).unwrap().iter().any(is_its));
        process.kill().unwrap();
        process.wait().unwrap();
    }

    #[test]
    fn a_file_a_linked_socket_and_another_users_socket_are_no_doors_whatever_their_paths() {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let path = folder.path().join(&name);
        let _file = File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(find(|n| n == name).unwrap().is_empty(), "a file");
        let _listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        std::fs::hard_link(folder.path().join("socket"), &path).unwrap();
        let path_only = libc::O_PATH | libc::O_NOFOLLOW;
        let socket = OpenOptions::new().read(true).custom_flags(path_only).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(find(|n| n == name).unwrap().is_empty(), "a socket with another link");
        std::fs::remove_file(folder.path().join("socket")).unwrap();
        assert_eq!(find(|n| n == name).unwrap().len(), 1, "its last link is gone");
        let own = rustix::process::geteuid().as_raw();
        let socket = socket.metadata().unwrap();
        assert!(is_door(&socket, own) && !is_door(&socket, own + 1));
    }

    #[test]
    fn a_path_of_any_length_has_room_for_a_door() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("x".repeat(200));
        std::fs::create_dir(&deep).unwrap();
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let _door = Door::open(&deep, &name).unwrap();
        assert_eq!(find(|n| n == name).unwrap()[0].path, deep.join(&name));
    }

    #[test]
    fn a_connect_to_a_door_that_accepts_nothing_ends_at_the_limit() {
        let name = format!("tombolo-door-{}", uuid::Uuid::new_v4());
        let (_door, _folder) = open(&name);
        let found = find(|n| n == name).unwrap().remove(0);
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
