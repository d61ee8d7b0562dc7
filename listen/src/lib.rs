// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unix sockets with names in the file system. A name has one server at a time, which the kernel doesn't see to: each process that may change the folder can replace
//! or remove the name of a socket that another process serves.
//!
//! A server that takes a name holds a lock (flock) on a file beside it from its look whether a process listens there until it listens itself. The socket gets the
//! name, by rename, when it listens and has its mode: a client finds no socket that refuses it, and one that replaces a dead server's leaves no moment without a
//! name. A server that gives a name up changes nothing where the name is another server's by then.
//!
//! - [`listen`] takes a name; [`begin`] does so in two steps, between which the socket's file can be given to another user
//! - [`Name`] is what its server has of it
//! - [`is_served`] looks whether a process listens at a path
//! - [`lock`] has the locks
//! - [`peer`] tells who is at the other end of a connection

#![deny(missing_docs)]

pub mod lock;
pub mod peer;

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use lock::LockFile;

/// Room for a path in an address, and for the zero at its end.
const LONGEST: usize = 107;

/// Why a name can't be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has it.
    #[error("{}: another server listens there already; stop it or choose another path", .0.display())]
    Served(PathBuf),
    /// Another process holds the lock beside it.
    #[error(
        "{}: another process holds this lock, as a server does that begins to listen there; 'fuser {}' says which process", .0.display(), .0.display()
    )]
    Locked(PathBuf),
    /// Something that is no socket has it.
    #[error("{}: there is something that is no socket; choose another path", .0.display())]
    NoSocket(PathBuf),
    /// The kernel doesn't tell whether a process listens there.
    #[error("{}: whether a server listens there can't be found out: {cause}; if none does, remove this socket", path.display())]
    Unknown {
        /// The name.
        path: PathBuf,
        /// The kernel's answer; not a `source`, which a chain of errors would print twice.
        cause: io::Error,
    },
    /// This process may not take it.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        cause: io::Error,
    },
}

impl Error {
    fn io(path: &Path, cause: impl Into<io::Error>) -> Error {
        Error::Io { path: path.to_owned(), cause: cause.into() }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Served(_) | Error::Locked(_) => io::ErrorKind::AddrInUse,
            Error::NoSocket(_) => io::ErrorKind::AlreadyExists,
            Error::Unknown { cause, .. } | Error::Io { cause, .. } => cause.kind(),
        };
        io::Error::new(kind, error)
    }
}

/// A file, whatever names it has. A later one may get the number of one that is gone, and has another time of birth where the file system keeps that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    number: u64,
    born: Option<SystemTime>,
}

impl Identity {
    fn of(file: &Metadata) -> Identity {
        Identity { device: file.dev(), number: file.ino(), born: file.created().ok() }
    }

    /// Of the file at this path, which may be a link.
    fn at(path: &Path) -> Option<Identity> {
        path.symlink_metadata().ok().map(|found| Identity::of(&found))
    }
}

/// The name of a socket of this process.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    socket: Identity,
}

impl Name {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn is_own(&self) -> bool {
        Identity::at(&self.path) == Some(self.socket)
    }

    /// Removes the name, unless another server's socket has it.
    ///
    /// # Errors
    /// This process may not do that.
    pub fn remove(&self) -> io::Result<()> {
        if self.is_own() { std::fs::remove_file(&self.path) } else { Ok(()) }
    }

    /// Gives the socket another name, unless another server's socket has this one.
    ///
    /// # Errors
    /// This process may not do that.
    pub fn change(&self, to: PathBuf) -> io::Result<()> {
        if self.is_own() { std::fs::rename(&self.path, to) } else { Ok(()) }
    }
}

/// A socket that gets its name when it listens.
#[derive(Debug)]
pub struct Begun {
    path: PathBuf,
    /// Where it is until then.
    fresh: PathBuf,
    socket: OwnedFd,
    file: File,
    /// Dropped after all else.
    _lock: LockFile,
}

impl Begun {
    /// The socket's file, opened by O_PATH: a link that another process puts in its place is not followed.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Sets the mode of the socket's file.
    ///
    /// # Errors
    /// The file system has none.
    pub fn set_mode(&self, mode: u32) -> Result<(), Error> {
        set_mode(&self.file, mode).map_err(|e| Error::io(&self.path, e))
    }

    /// Listens, and takes the name.
    ///
    /// # Errors
    /// This process may not replace the socket that a dead server has left there.
    pub fn finish(self) -> Result<(UnixListener, Name), Error> {
        let failed = |e: io::Error| Error::io(&self.path, e);
        let socket = Identity::of(&self.file.metadata().map_err(failed)?);
        // As many may wait as the host's administrator allows (net.core.somaxconn).
        rustix::net::listen(&self.socket, -1).map_err(|e| failed(e.into()))?;
        let listener = UnixListener::from(self.socket.try_clone().map_err(failed)?);
        std::fs::rename(&self.fresh, &self.path).map_err(failed)?;
        Ok((listener, Name { path: self.path.clone(), socket }))
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let own = self.file.metadata().ok().map(|own| Identity::of(&own));
        // It has gone if the socket has its name.
        if own.is_some() && Identity::at(&self.fresh) == own {
            let _gone = std::fs::remove_file(&self.fresh);
        }
    }
}

/// Sets the mode of a file that was opened by O_PATH, which fchmod refuses.
fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), Permissions::from_mode(mode))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(ending);
    beside.into()
}

fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
}

/// Returns whether an address has room for a path.
fn has_room(path: &Path) -> bool {
    path.as_os_str().len() <= LONGEST
}

/// Where the socket is that is to get a name: beside it, for which an address may have no room.
fn fresh(path: &Path) -> PathBuf {
    let beside = beside(path, ".tombolo-new");
    if has_room(&beside) {
        return beside;
    }
    let mut hasher = DefaultHasher::new();
    path.file_name().hash(&mut hasher);
    path.with_file_name(format!("{:016x}.tombolo-new", hasher.finish()))
}

/// Gives a socket this path, whose file name is short: an address has room for that in each folder.
fn bind(socket: &OwnedFd, path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(folder)?;
    let through = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
    let through = through.join(path.file_name().unwrap_or_default());
    let path = if has_room(path) { path } else { &through };
    Ok(rustix::net::bind(socket, &SocketAddrUnix::new(path)?)?)
}

/// Opens a socket's file. The owner of the folder may have put something else in its place.
fn open(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path);
    let file = file.map_err(|e| Error::io(path, e))?;
    let is_socket = file.metadata().map_err(|e| Error::io(path, e))?.file_type().is_socket();
    if is_socket { Ok(file) } else { Err(Error::NoSocket(path.to_owned())) }
}

/// Returns whether a process listens at the path, one that is stopped too: a connection is not waited for.
///
/// # Errors
/// The kernel doesn't tell: this process may not connect there, or has no descriptors or memory.
pub fn is_served(path: &Path) -> io::Result<bool> {
    let address = SocketAddrUnix::new(path)?;
    match rustix::net::connect(socket(SocketFlags::NONBLOCK)?, &address) {
        // Without room for one more that waits; a socket of another kind.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(other) => Err(other.into()),
    }
}

/// Makes a socket that is to have this name; replaces one at which no process listens.
///
/// # Errors
/// Another process listens there or is about to, something that is no socket has the name, or this process may not take it.
pub fn begin(path: &Path) -> Result<Begun, Error> {
    let failed = |e| Error::io(path, e);
    if !has_room(path) {
        // Its clients have no more room for it.
        let why = format!("a socket's path has at most {LONGEST} bytes; choose a shorter one");
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    let beside_it = beside(path, ".tombolo-lock");
    let lock = LockFile::take(&beside_it).map_err(|e| Error::io(&beside_it, e))?;
    let lock = lock.ok_or(Error::Locked(beside_it))?;
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => return Err(Error::NoSocket(path.to_owned())),
        Ok(_) => match is_served(path) {
            Ok(true) => return Err(Error::Served(path.to_owned())),
            Ok(false) => {}
            Err(cause) => return Err(Error::Unknown { path: path.to_owned(), cause }),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    let fresh = fresh(path);
    if fresh.symlink_metadata().is_ok_and(|left| left.file_type().is_socket()) {
        // Of a server that was killed.
        std::fs::remove_file(&fresh).map_err(|e| Error::io(&fresh, e))?;
    }
    let socket = socket(SocketFlags::empty()).map_err(|e| failed(e.into()))?;
    bind(&socket, &fresh).map_err(|e| Error::io(&fresh, e))?;
    let file = open(&fresh)?;
    Ok(Begun { path: path.to_owned(), fresh, socket, file, _lock: lock })
}

/// Listens at a path, with this mode of its file (`None`: what the process's umask leaves); replaces a socket at which no process listens.
///
/// # Errors
/// Those of [`begin`] and of the file system.
pub fn listen(path: &Path, mode: Option<u32>) -> Result<(UnixListener, Name), Error> {
    let begun = begin(path)?;
    if let Some(mode) = mode {
        begun.set_mode(mode)?;
    }
    begun.finish()
}

#[cfg(test)]
mod tests;
