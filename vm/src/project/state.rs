// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The folder of a running project, and the lock and the socket in it by which commands find its supervisor.
//!
//! `$XDG_RUNTIME_DIR/tombolo/` (root: `/run/tombolo/`) has one folder per project. It is named for the folder of the compose file and for a hash of the file's
//! canonical path. In it are `lock`, which the supervisor holds with flock as long as it lives and which has its pid, `socket`, at which it listens,
//! and the logs. A supervisor whose folder has vanished, as at the end of a login session, makes it again within a second once there is a place for it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::FlockOperation;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::compose::folder_name;
use crate::project::revival;

/// The file in a project's folder that the supervisor has locked.
const LOCK: &str = "lock";
/// The supervisor's socket.
const SOCKET: &str = "socket";
/// Time for a process that has just taken a lock to write its pid.
const PID: Duration = Duration::from_secs(1);
/// Bits of a mode by which others could change a folder.
const CHANGE: u32 = 0o022;
/// Bits of a mode by which others could do anything with a folder.
const ANYTHING: u32 = 0o077;

/// The folder of all projects of this user, made if it is missing.
///
/// # Errors
/// It can't be made, or belongs to another user.
pub fn base_dir() -> anyhow::Result<PathBuf> {
    let dir = base()?;
    make(&dir)?;
    check_own(&dir, CHANGE)?;
    Ok(dir)
}

/// As [`base_dir`], where it need not be there: a command that only looks or removes makes nothing. Others may enter it, as they may where
/// another command of root's made `/run/tombolo` for its sockets; a project's own folder they may not.
///
/// # Errors
/// It belongs to another user, or others can write to it.
pub fn base() -> anyhow::Result<PathBuf> {
    let user = rustix::process::geteuid();
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        // The supervisor has another current folder.
        Some(dir) if !dir.is_empty() => std::path::absolute(dir)?.join("tombolo"),
        _ if user.is_root() => "/run/tombolo".into(),
        _ => std::env::temp_dir().join(format!("tombolo-{}", user.as_raw())),
    };
    anyhow::ensure!(
        dir.to_str().is_some(),
        "{} is not UTF-8; set XDG_RUNTIME_DIR to another folder",
        dir.display()
    );
    if fs::symlink_metadata(&dir).is_ok() {
        check_own(&dir, CHANGE)?;
    }
    Ok(dir)
}

/// Makes a folder that only this user can open, if it is missing.
pub(crate) fn make_private(dir: &Path) -> anyhow::Result<()> {
    make(dir)?;
    check_own(dir, ANYTHING)
}

/// Makes a project's folder, and the one of all projects around it, where they have vanished, as at the end of a login session. It may still be
/// missing then, where there is no room for it, or its place is gone as well.
///
/// # Errors
/// Another user has made one of them, which is possible in `/tmp`.
pub(crate) fn renew(dir: &Path) -> anyhow::Result<()> {
    let is_there = |dir: &Path| fs::symlink_metadata(dir).is_ok();
    if !is_there(dir) {
        let Some(base) = dir.parent() else { return Ok(()) };
        if make(base).is_err() {
            return Ok(());
        }
        check_own(base, CHANGE)?;
        if make(dir).is_err() {
            return Ok(());
        }
    }
    check_own(dir, CHANGE)
}

fn make(dir: &Path) -> anyhow::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("{} can't be made; set XDG_RUNTIME_DIR", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Refuses what is no folder of this user, or has one of these bits in its mode.
fn check_own(dir: &Path, refused: u32) -> anyhow::Result<()> {
    let meta = fs::symlink_metadata(dir)?;
    let own = meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw();
    anyhow::ensure!(
        own && meta.permissions().mode() & refused == 0,
        "{} is not a folder that only you can {}; remove it or set XDG_RUNTIME_DIR",
        dir.display(),
        if refused == ANYTHING { "open" } else { "write to" }
    );
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
/// Those of the file system, with the path.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = File::options();
    // Whatever the umask allows, others may not write to it.
    let file = file.write(true).create(true).truncate(true).mode(0o644);
    let written = file
        .open(&temporary)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| fs::rename(&temporary, path));
    written.map_err(|e| {
        let _was_never_made = fs::remove_file(&temporary);
        at(path, &e)
    })
}

/// An error with the path at which it came: a full file system must be found to be emptied.
pub fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// A supervisor that lives.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its process.
    pub process: u32,
    dir: PathBuf,
}

impl Found {
    /// The folder of its project.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns whether the process is still the project's supervisor.
    pub fn is_there(&self) -> bool {
        holder(&self.dir).is_ok_and(|holder| holder == Some(self.process))
    }

    /// Connects; `limit` is for a process whose backlog is full.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` if the process does not listen, `TimedOut` at the limit.
    pub fn connect(&self, limit: Option<Duration>) -> io::Result<UnixStream> {
        let folder = File::open(&self.dir)?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, limit)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(in_folder(&folder, SOCKET))?) {
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            other => other?,
        }
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
        Ok(socket.into())
    }
}

/// The path of a file in an open folder. The address of a socket has room for 107 bytes: too few for some paths.
fn in_folder(folder: &File, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()).into()
}

/// The process that has the lock in a project's folder.
fn holder(dir: &Path) -> io::Result<Option<u32>> {
    let begun = Instant::now();
    loop {
        let file = match File::open(dir.join(LOCK)) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            file => file?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            free => return Ok(free.map(|()| None)?),
        }
        if let Ok(process) = io::read_to_string(&file)?.trim().parse() {
            return Ok(Some(process));
        }
        if begun.elapsed() > PID {
            let text = format!("{}: an unknown process has locked it", dir.join(LOCK).display());
            return Err(io::Error::other(text));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The supervisor of the project with this compose file, if anything of it lives.
///
/// # Errors
/// The runtime folder can't be used.
pub fn supervisor(file: &Path) -> anyhow::Result<Option<Found>> {
    found(StateDir::of(file)?.path)
}

/// The supervisor of the project with this folder. One that has died while VMs of it live on is followed by another.
fn found(dir: PathBuf) -> anyhow::Result<Option<Found>> {
    let holder_of = |dir: &Path| holder(dir).with_context(|| dir.display().to_string());
    let mut holder = holder_of(&dir)?;
    if holder.is_none() && revival::revive(&dir)? {
        holder = holder_of(&dir)?;
    }
    Ok(holder.map(|process| Found { process, dir }))
}

/// All supervisors of this user that live.
///
/// # Errors
/// The runtime folder can't be read.
pub fn supervisors() -> anyhow::Result<Vec<Found>> {
    let base = base()?;
    let entries = match fs::read_dir(&base) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|e| at(&base, &e))?,
    };
    let folders = entries.filter_map(Result::ok).map(|entry| entry.path());
    let living = folders.filter_map(|dir| {
        found(dir).unwrap_or_else(|e| {
            crate::say!("{e:#}");
            None
        })
    });
    let mut living: Vec<Found> = living.collect();
    living.sort_by(|a, b| a.dir.cmp(&b.dir));
    Ok(living)
}

/// The lock of a project's folder, and the socket at which its supervisor listens.
#[derive(Debug)]
pub struct Endpoint {
    /// Of the lock's file.
    lock: File,
    listener: UnixListener,
}

impl Endpoint {
    /// The locked file.
    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns whether its lock is the file in this folder.
    pub fn is_in(&self, dir: &StateDir) -> bool {
        is_at(&self.lock, &dir.path.join(LOCK))
    }
}

/// Returns whether an open file is the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    path.metadata().is_ok_and(|there| file.metadata().is_ok_and(|own| own.ino() == there.ino()))
}

/// A project's folder.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The folder of the project with this compose file. It need not exist.
    ///
    /// # Errors
    /// See [`base`].
    pub fn of(file: &Path) -> anyhow::Result<StateDir> {
        let number = hash(file.as_os_str().as_encoded_bytes()) & 0xffff_ffff;
        Ok(StateDir { path: base()?.join(format!("{}-{number:08x}", folder_name(file))) })
    }

    /// The folder at this path.
    pub fn at(path: PathBuf) -> StateDir {
        StateDir { path }
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

    /// Makes the folder and takes its lock: `None` when another process has it. The lock lasts as long as the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn lock(&self) -> anyhow::Result<Option<File>> {
        loop {
            make_private(&self.path)?;
            let path = self.path.join(LOCK);
            let file = match File::options().create(true).truncate(false).write(true).open(&path) {
                // What a dead supervisor has left can be looked at on a file system that has become read-only.
                Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => File::open(&path),
                other => other,
            };
            let file = match file {
                // Another process has removed the folder meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                file => file.with_context(|| format!("{} can't be made", path.display()))?,
            };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
            // A process that removed the folder meanwhile has unlinked the locked file.
            if is_at(&file, &path) {
                // Who finds it locked needs to know by whom; a full file system has no room for that.
                let _full = fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
                    .and_then(|()| file.set_len(0))
                    .and_then(|()| write!(&file, "{}", std::process::id()));
                return Ok(Some(file));
            }
        }
    }

    /// Takes the folder's lock and listens at its socket. `None`: another process is the project's supervisor.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn listen(&self) -> anyhow::Result<Option<Endpoint>> {
        let Some(lock) = self.lock()? else { return Ok(None) };
        let folder = File::open(&self.path)?;
        let path = in_folder(&folder, SOCKET);
        // One of a supervisor that was killed.
        fs::remove_file(&path).or_else(absent)?;
        let listener = UnixListener::bind(&path)
            .and_then(|listener| {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map(|()| listener)
            })
            .map_err(|e| at(&self.path.join(SOCKET), &e))?;
        Ok(Some(Endpoint { lock, listener }))
    }

    /// Returns whether no process has the lock. The folder is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn is_free(&self) -> io::Result<bool> {
        let file = File::open(self.path.join(LOCK))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// The path at which a zone's memory is opened under the zone's name. It need not exist.
    pub fn zone_link(&self, zone: &str) -> PathBuf {
        self.path.join("zones").join(zone)
    }

    /// Gives a zone's memory, which is at `target`, a path with the zone's name in it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn link_zone(&self, zone: &str, target: &str) -> io::Result<()> {
        let link = self.zone_link(zone);
        fs::create_dir(self.path.join("zones"))
            .or_else(|e| if e.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })
            .and_then(|()| fs::remove_file(&link).or_else(absent))
            .and_then(|()| std::os::unix::fs::symlink(target, &link))
            .map_err(|e| at(&link, &e))
    }

    /// Takes the lock, from a process that ends within `limit` if need be.
    ///
    /// # Errors
    /// When another process keeps it, and those of the file system.
    pub fn lock_within(&self, limit: Duration) -> anyhow::Result<File> {
        let begun = Instant::now();
        loop {
            if let Some(lock) = self.lock()? {
                return Ok(lock);
            }
            if begun.elapsed() >= limit {
                anyhow::bail!(
                    "a supervisor that can't be reached any more keeps {} locked; 'fuser {0}' says which process",
                    self.path.join(LOCK).display()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Removes the socket: this process is not reached any more.
    fn close(&self) {
        if let Err(e) = fs::remove_file(self.path.join(SOCKET)).or_else(absent) {
            crate::say!("{}: {e}", self.path.join(SOCKET).display());
        }
    }

    /// Called by a supervisor that is about to end: the folder whose lock it has goes where no VM has left a log.
    pub fn withdraw(&self, lock: &File) {
        if !is_at(lock, &self.path.join(LOCK)) {
            return;
        }
        self.close();
        let logs = fs::read_dir(&self.path).is_ok_and(|entries| {
            entries.filter_map(Result::ok).any(|e| e.path().extension().is_some_and(|x| x == "console"))
        });
        if !logs {
            self.remove(lock);
        }
    }

    /// Makes the folder again where it has vanished; see [`renew`].
    ///
    /// # Errors
    /// Another user has made one in its place.
    pub fn renew(&self) -> anyhow::Result<()> {
        renew(&self.path)
    }

    /// Removes the folder whose lock this process has. One that another process has made and locked since stays, so the folder is renamed first: a new one at
    /// its place loses no file.
    pub fn remove(&self, lock: &File) {
        if !is_at(lock, &self.path.join(LOCK)) {
            return;
        }
        if fs::symlink_metadata(&self.path).is_ok() {
            if let Err(e) = check_own(&self.path, CHANGE) {
                crate::say!("{e:#}");
                return;
            }
        }
        let removed = self.path.with_extension(format!("removed-{}", random_hex(4)));
        match fs::rename(&self.path, &removed).and_then(|()| fs::remove_dir_all(&removed)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => crate::say!("{}: {e}", self.path.display()),
            _ => {}
        }
    }
}

/// Takes the absence of a file that is to be removed for success.
fn absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_supervisor_at_a_time_has_a_folder() {
        let base = tempfile::tempdir().unwrap();
        let dir = StateDir { path: base.path().join("p") };
        let lock = dir.lock().unwrap().expect("the lock is free");
        assert!(dir.lock().unwrap().is_none(), "taken");
        // The folder of the next supervisor is not this one's to remove.
        dir.remove(&lock);
        let next = dir.lock().unwrap().expect("it is gone, and made again");
        dir.remove(&lock);
        dir.withdraw(&lock);
        assert!(is_at(&next, &dir.path.join(LOCK)));
        drop(next);
        assert!(dir.lock().unwrap().is_some(), "free again");
    }

    #[test]
    fn a_folder_that_has_vanished_is_made_again_and_anothers_in_its_place_is_refused_and_stays() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("tombolo-1000");
        let dir = StateDir { path: base.join("p") };
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        dir.renew().unwrap();
        assert_eq!((mode(&base), mode(&dir.path)), (0o700, 0o700));
        fs::remove_dir_all(&base).unwrap();
        // As another user could in /tmp: a folder that everybody can write to, or a link.
        let set = |mode| fs::set_permissions(&base, fs::Permissions::from_mode(mode)).unwrap();
        fs::create_dir(&base).unwrap();
        set(0o777);
        assert!(dir.renew().unwrap_err().to_string().contains("only you can write to"));
        assert!(!dir.path.exists());
        fs::create_dir(&dir.path).unwrap();
        fs::set_permissions(&dir.path, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(dir.renew().is_err());
        let lock = File::create(dir.path.join(LOCK)).unwrap();
        dir.remove(&lock);
        assert!(dir.path.exists());
        fs::remove_dir_all(&base).unwrap();
        std::os::unix::fs::symlink(place.path(), &base).unwrap();
        assert!(dir.renew().is_err());
        fs::remove_file(&base).unwrap();
        // Its place is gone as well: that is nobody's.
        StateDir { path: place.path().join("gone/tombolo/p") }.renew().unwrap();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_others_can_open_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("open");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(make_private(&dir).unwrap_err().to_string().contains("only you can open"));
        assert!(check_own(&dir, CHANGE).unwrap_err().to_string().contains("only you can write to"));
        // Another command of this user has made it.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        check_own(&dir, CHANGE).unwrap();
        assert!(make_private(&dir).is_err());
        let link = base.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(check_own(&link, CHANGE).is_err());
    }
}
