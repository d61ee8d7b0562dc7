// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of Unix sockets in the file system. A name has one server at a time, which the kernel doesn't see to: each process that may change the folder can replace
//! or remove the name of a socket that another process serves.
//!
//! A server that takes a name holds a lock (flock) on a file beside it from its look whether a process listens there until it listens itself. A server that gives a
//! name up changes nothing where the name is another server's by then.

use crate::scratch;
use anyhow::{Context, bail};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The name of a socket of this process.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    /// The socket's file, which the kernel keeps as long as the socket is open.
    file: (u64, u64),
}

/// A taken name's lock, beside the name.
struct Lock {
    path: PathBuf,
    _held: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Its user may have removed it.
        let _gone = std::fs::remove_file(&self.path);
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(ending);
    beside.into()
}

fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// Returns whether the path leads to this file.
fn is_at(path: &Path, file: (u64, u64)) -> bool {
    path.symlink_metadata().is_ok_and(|there| identity(&there) == file)
}

/// Locks a name. `None`: another server is about to take it.
fn lock(name: &Path) -> anyhow::Result<Option<Lock>> {
    let path = beside(name, ".tombolo-lock");
    let whose = || path.display().to_string();
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file =
            options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path).with_context(whose)?;
        if !scratch::lock(&file).with_context(whose)? {
            return Ok(None);
        }
        // The server that had the lock before removes the file first.
        if is_at(&path, identity(&file.metadata().with_context(whose)?)) {
            return Ok(Some(Lock { path, _held: file }));
        }
    }
}

/// Sets the mode of a socket's file, and returns its identity. The owner of the folder may have put a link in its place, which is not followed.
fn set_mode(path: &Path, mode: u32) -> io::Result<(u64, u64)> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let found = file.metadata()?;
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "another file has the new socket's name"));
    }
    std::fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), Permissions::from_mode(mode))?;
    Ok(identity(&found))
}

/// Returns whether a process listens at the path, one that is stopped too: a connection is not waited for.
pub fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?));
    // Without room for one more that waits.
    matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
}

impl Name {
    /// Listens at a path, with this mode of its file; makes the folder if it is missing. `None`: another process listens there, or is about to.
    ///
    /// # Errors
    /// This process may not do that, or something that is no socket has the name.
    pub fn listen(path: &Path, mode: u32) -> anyhow::Result<Option<(UnixListener, Name)>> {
        let whose = || path.display().to_string();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let Some(_lock) = lock(path)? else { return Ok(None) };
        match path.symlink_metadata() {
            Ok(found) if !found.file_type().is_socket() => {
                bail!("{}: there is something that is no socket; choose another path", path.display());
            }
            Ok(_) if is_served(path) => return Ok(None),
            _ => {}
        }
        // The socket gets its name when it listens, and when its mode is right: from then on other processes can connect.
        let fresh = beside(path, ".new");
        if fresh.symlink_metadata().is_ok_and(|left| left.file_type().is_socket()) {
            // Of a server that was killed.
            std::fs::remove_file(&fresh).with_context(|| fresh.display().to_string())?;
        }
        let listener = UnixListener::bind(&fresh).with_context(|| fresh.display().to_string())?;
        let file = set_mode(&fresh, mode).with_context(whose)?;
        std::fs::rename(&fresh, path).with_context(whose)?;
        Ok(Some((listener, Name { path: path.to_owned(), file })))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the name, unless another server's socket has it.
    ///
    /// # Errors
    /// This process may not do that.
    pub fn remove(&self) -> io::Result<()> {
        if is_at(&self.path, self.file) { std::fs::remove_file(&self.path) } else { Ok(()) }
    }

    /// Gives the socket another name, unless another server's socket has this one.
    ///
    /// # Errors
    /// This process may not do that.
    pub fn change(&self, to: PathBuf) -> io::Result<()> {
        if is_at(&self.path, self.file) { std::fs::rename(&self.path, to) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn listen(path: &Path) -> Option<(UnixListener, Name)> {
        Name::listen(path, 0o600).expect("this folder is this user's")
    }

    #[test]
    fn a_name_has_one_server_at_a_time_and_that_of_a_dead_one_is_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deeper/socket");
        let first = listen(&path).expect("free");
        assert!(listen(&path).is_none());
        drop(first);
        let second = listen(&path).expect("its server has ended");
        assert_eq!(second.1.path().metadata().expect("it is there").permissions().mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
        second.1.remove().expect("removed");
        assert_eq!(std::fs::read_dir(path.parent().expect("a folder")).expect("read").count(), 0);
    }

    #[test]
    fn a_server_that_has_no_room_for_one_more_client_keeps_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let (listener, _name) = listen(&path).expect("free");
        rustix::net::listen(&listener, 0).expect("listens");
        let _waits = UnixStream::connect(&path).expect("room for one");
        assert!(listen(&path).is_none());
    }

    #[test]
    fn of_servers_that_take_a_name_at_once_one_has_it() {
        let folder = tempfile::tempdir().expect("a folder");
        for round in 0..50 {
            let path = folder.path().join(round.to_string());
            let all: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| listen(&path))).collect();
                threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(all.len(), 1, "round {round}");
            let _client = UnixStream::connect(&path).expect("it listens");
            all[0].0.set_nonblocking(true).expect("set");
            all[0].0.accept().expect("it is this one's client");
        }
    }

    #[test]
    fn who_gives_up_a_name_that_another_server_has_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let (_old, name) = listen(&path).expect("free");
        // By an administrator.
        std::fs::remove_file(&path).expect("removed");
        let (_new, others) = listen(&path).expect("free");
        name.remove().expect("nothing to do");
        name.change(folder.path().join("elsewhere")).expect("nothing to do");
        assert!(UnixStream::connect(&path).is_ok());
        others.change(folder.path().join("elsewhere")).expect("its own");
        assert!(!path.exists() && UnixStream::connect(folder.path().join("elsewhere")).is_ok());
    }

    #[test]
    fn files_that_are_no_sockets_stay_whatever_their_names() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("Cargo");
        for (name, is_in_the_way) in [("Cargo.lock", false), ("Cargo.new", true)] {
            let file = folder.path().join(name);
            std::fs::write(&file, "words").expect("written");
            assert_eq!(Name::listen(&path, 0o600).is_err(), is_in_the_way);
            assert_eq!(std::fs::read(&file).expect("it is there"), b"words");
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_new_socket_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "words").expect("written");
        std::fs::set_permissions(&target, Permissions::from_mode(0o600)).expect("set");
        std::os::unix::fs::symlink(&target, &link).expect("linked");
        assert_eq!(set_mode(&link, 0o660).expect_err("refused").kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(target.metadata().expect("it is there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("letter");
        std::fs::write(&path, "words").expect("written");
        let why = Name::listen(&path, 0o600).expect_err("refused").to_string();
        assert!(why.contains("letter") && why.contains("no socket"), "{why}");
        assert_eq!(std::fs::read(&path).expect("it is there"), b"words");
    }
}
