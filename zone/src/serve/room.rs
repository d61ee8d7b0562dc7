// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The folder of a served zone: for each invited VM a socket and a record of the invitation, and a file that the server locks as long as it lives. No member of
//! the zone can write here. A copy of a zone's file has the same UUID, so a record names the file that the room is of.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use uuid::Uuid;

use crate::liveness::{self, Own};
use crate::{Error, Result, Rights};

/// The file that the server locks. It has the server's process number, for people.
const SERVER: &str = "server.lock";
/// The byte of it that is locked as long as the server lives, and the one while it does not know yet whom it serves.
const LIVES: u32 = 0;
const STARTS: u32 = 1;
/// The text of an invitation that is taken back though no lock tells whether the VM has ended.
const EXPELLED: &str = "expelled";
/// The record of the zone's file: its device, number and path.
const FILE: &str = "zone.file";
/// The file that an invitation locks.
const INVITING: &str = "inviting";

/// The folder of one zone's sockets and records. [`Room::of`] gives none in a folder that another user could change.
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

/// Returns the path of the socket of a switch's port for a VM that tombolo does not start. [`make_folder`] makes its folder.
///
/// # Errors
/// Another user could change the folder: see [`make_folder`].
pub fn port(mac: &str) -> Result<PathBuf> {
    let ports = base().join("ports");
    check(&ports)?;
    Ok(ports.join(format!("{}.sock", mac.replace(':', ""))))
}

/// Makes a folder of sockets, and the one that it is in. Other users may enter them but not list them.
///
/// # Errors
/// Those of the file system, and a folder that another user could change: in a temporary folder another one may have made it first. Whoever owns
/// it could put its own socket there, and be the other end of a VM's device.
pub fn make_folder(folder: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("making the folder {}", folder.display()), e);
    let make = |folder: &Path| DirBuilder::new().recursive(true).mode(0o711).create(folder).map_err(failed);
    make(folder.parent().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?)?;
    check(folder)?;
    make(folder)?;
    check(folder)
}

/// Refuses a folder that another user could change, or that is in such a one. Neither need exist.
fn check(folder: &Path) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    for path in folder.parent().into_iter().chain([folder]) {
        let Ok(meta) = fs::symlink_metadata(path) else { continue };
        if !(meta.is_dir() && meta.uid() == own && meta.mode() & 0o022 == 0) {
            let why = "it is not a folder that only you can write to; remove it, or set TOMBOLO_ZONES_RUN";
            return Err(Error::io(format!("the folder {}", path.display()), io::Error::other(why)));
        }
    }
    Ok(())
}

impl Room {
    /// Returns the room of a zone without making it.
    ///
    /// # Errors
    /// Another user could change its folder.
    pub fn of(zone: Uuid) -> Result<Room> {
        let room = Room(base().join(zone.to_string()));
        check(&room.0)?;
        Ok(room)
    }

    /// Returns the file that this is the room of, if that is another one than `file`: one of them is a copy. A record whose file is gone means nothing, unless
    /// its server lives.
    pub fn other_file(&self, file: &Metadata) -> Option<PathBuf> {
        let text = fs::read(self.0.join(FILE)).ok()?;
        let mut parts = text.strip_suffix(b"\n")?.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse::<u64>().ok();
        let recorded = (number()?, number()?);
        let path = PathBuf::from(OsStr::from_bytes(parts.next()?));
        let is_there = || fs::metadata(&path).is_ok_and(|there| (there.dev(), there.ino()) == recorded);
        let is_other = recorded != (file.dev(), file.ino()) && (self.is_served() || is_there());
        is_other.then_some(path)
    }

    /// Makes this the room of the zone in a file.
    ///
    /// # Errors
    /// It is another file's; those of [`Room::make`] and of the file system.
    pub fn take_for(&self, path: &Path) -> Result<()> {
        let failed = |e| Error::io(format!("looking for zone {}", path.display()), e);
        let path = path.canonicalize().map_err(failed)?;
        let file = fs::metadata(&path).map_err(failed)?;
        if let Some(other) = self.other_file(&file) {
            return Err(Error::Config {
                zone: path.display().to_string(),
                why: format!(
                    "{} has the same identity, so one of them is a copy, and VMs of both would be members of one. Make a zone for the copy: tombolo zone create, then \
                     tombolo files snapshot and restore",
                    other.display()
                ),
            });
        }
        self.make()?;
        let record = self.0.join(FILE);
        let mut line = OsString::from(format!("{} {} ", file.dev(), file.ino()));
        line.push(path);
        // What is recorded already needs no room on a full file system: there, too, a VM can be expelled.
        let is_there =
            fs::read(&record).is_ok_and(|there| there.strip_suffix(b"\n") == Some(line.as_bytes()));
        if is_there {
            return Ok(());
        }
        replace(&record, line).map_err(|e| Error::io(format!("writing {}", record.display()), e))
    }

    /// Makes the folders; each socket's permissions decide which other users may connect.
    ///
    /// # Errors
    /// Those of [`make_folder`].
    pub fn make(&self) -> Result<()> {
        make_folder(&self.0)
    }

    /// The socket that a VM connects to. A name may have any characters but '/'.
    pub fn socket(&self, member: &str) -> PathBuf {
        self.0.join(format!("{member}.sock"))
    }

    /// Removes the sockets that a killed server has left; a command would take them for the present server's. The caller owns the zone.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn clear_sockets(&self) -> Result<()> {
        let is_socket = |path: &&PathBuf| path.extension() == Some(OsStr::new("sock"));
        self.entries()?.iter().filter(is_socket).try_for_each(|path| remove(path))
    }

    /// Returns the path for the server's output if a command started it.
    pub fn log(&self) -> PathBuf {
        self.0.join("server.log")
    }

    fn invitation(&self, member: &str) -> PathBuf {
        self.0.join(format!("{member}.invited"))
    }

    /// Makes the folders, and locks the zone's invitations as long as the file is open; `None`: another process has them locked.
    ///
    /// # Errors
    /// Those of [`Room::make`] and of the file system.
    pub fn turn(&self) -> Result<Option<File>> {
        self.make()?;
        let path = self.0.join(INVITING);
        let failed = |e| Error::io(format!("locking {}", path.display()), e);
        let mut options = OpenOptions::new();
        let file =
            options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed(e.into())),
        }
    }

    /// Records that a VM is invited, with these rights.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn invite(&self, member: &str, rights: Rights) -> Result<()> {
        let path = self.invitation(member);
        let text = if rights.write { "read-write" } else { "read-only" };
        replace(&path, text).map_err(|e| Error::io(format!("writing {}", path.display()), e))
    }

    /// Forgets a VM's invitation.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn expel(&self, member: &str) -> Result<()> {
        remove(&self.invitation(member))
    }

    /// Has the server forget a VM that is only assumed to live, and its invitation.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn expel_assumed(&self, member: &str) -> Result<()> {
        let path = self.invitation(member);
        replace(&path, EXPELLED).map_err(|e| Error::io(format!("writing {}", path.display()), e))
    }

    /// Returns the invited VMs and their rights, or why these can't be read: such a VM is invited still. `None`: see [`Self::expel_assumed`].
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn invited(&self) -> Result<BTreeMap<String, Result<Option<Rights>>>> {
        let mut found = BTreeMap::new();
        for path in self.entries()? {
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".invited"));
            let Some(name) = name else { continue };
            let rights = match fs::read_to_string(&path) {
                Ok(text) => Ok(match text.trim() {
                    EXPELLED => None,
                    "read-write" => Some(Rights::READ_WRITE),
                    _ => Some(Rights::READ_ONLY),
                }),
                // One that is removed in this moment is not invited.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => Err(Error::io(format!("reading {}", path.display()), e)),
            };
            found.insert(name.to_owned(), rights);
        }
        Ok(found)
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let failed = |e| Error::io(format!("reading {}", self.0.display()), e);
        match fs::read_dir(&self.0) {
            Ok(entries) => entries.map(|entry| entry.map(|e| e.path()).map_err(failed)).collect(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(failed(e)),
        }
    }

    /// Makes this process the zone's server, which is starting. The caller owns the zone.
    ///
    /// # Errors
    /// Those of the file system, and a server that lives.
    pub(crate) fn begin(&self) -> Result<Serving> {
        let path = self.0.join(SERVER);
        let failed = |e| Error::io(format!("writing {}", path.display()), e);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(failed)?;
        let lock = Own::try_hold(file.as_fd(), LIVES)?
            .ok_or_else(|| failed(io::Error::other("another server has it locked")))?;
        lock.set(STARTS, true)?;
        let line = format!("{}\n", std::process::id());
        file.set_len(0).and_then(|()| (&file).write_all(line.as_bytes())).map_err(failed)?;
        Ok(Serving { lock })
    }

    /// Returns whether the zone's server is starting.
    pub fn is_starting(&self) -> bool {
        self.has_locked(STARTS)
    }

    /// Returns whether the zone's server lives.
    pub fn is_served(&self) -> bool {
        self.has_locked(LIVES)
    }

    fn has_locked(&self, byte: u32) -> bool {
        let file = File::open(self.0.join(SERVER));
        file.is_ok_and(|file| liveness::is_held(file.as_fd(), byte).is_ok_and(|held| held))
    }
}

/// What [`Room::begin`] gives. Dropping it ends the service.
#[derive(Debug)]
pub(crate) struct Serving {
    lock: Own,
}

impl Serving {
    /// Tells that the server knows whom it serves: it takes no name from the member table any more.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(crate) fn has_started(&self) -> Result<()> {
        self.lock.set(STARTS, false)
    }
}

/// Removes a file that may be missing.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("removing {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Writes a line atomically, so that no reader finds half of it. A server that starts and a command may write the same file at once.
fn replace(path: &Path, line: impl Into<OsString>) -> io::Result<()> {
    let new = path.with_file_name(format!("{}.new", Uuid::new_v4()));
    let mut line = line.into();
    line.push("\n");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let replaced = file.write_all(line.as_bytes()).and_then(|()| fs::rename(&new, path));
    replaced.inspect_err(|_| drop(fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_folder_that_another_user_could_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (open, link) = (dir.path().join("open"), dir.path().join("link"));
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for base in [&open, &link] {
            let room = Room(base.join("z"));
            let ports = base.join("ports");
            let refused =
                [room.make().unwrap_err(), check(&ports).unwrap_err(), make_folder(&ports).unwrap_err()];
            for e in refused.map(|e| e.to_string()) {
                assert!(e.contains("not a folder that only you can write to"), "{e}");
            }
            assert!(!base.join("z").exists() && !base.join("ports").exists());
        }
        // The folder itself, too.
        let inner = dir.path().join("own").join("ports");
        make_folder(&inner).unwrap();
        fs::set_permissions(&inner, Permissions::from_mode(0o777)).unwrap();
        assert!(make_folder(&inner).is_err());
    }

    #[test]
    fn a_server_is_known_while_it_lives_and_invitations_until_they_are_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room(dir.path().join("zones").join("z"));
        room.make().unwrap();
        assert!(!room.is_served());
        let serving = room.begin().unwrap();
        assert!(room.is_served() && room.is_starting() && room.begin().is_err());
        serving.has_started().unwrap();
        assert!(room.is_served() && !room.is_starting());
        drop(serving);
        assert!(!room.is_served());
        let turn = room.turn().unwrap();
        assert!(turn.is_some() && room.turn().unwrap().is_none());
        drop(turn);
        assert!(room.turn().unwrap().is_some());
        for (name, rights) in
            [("a", Rights::READ_ONLY), ("a.b", Rights::READ_WRITE), ("a", Rights::READ_WRITE)]
        {
            room.invite(name, rights).unwrap();
        }
        room.invite("c", Rights::READ_ONLY).unwrap();
        room.expel("a.b").unwrap();
        room.expel("a.b").unwrap();
        room.expel_assumed("d").unwrap();
        let invited = [("a", Some(Rights::READ_WRITE)), ("c", Some(Rights::READ_ONLY)), ("d", None)];
        let read = || -> BTreeMap<String, Option<Option<Rights>>> {
            room.invited().unwrap().into_iter().map(|(name, rights)| (name, rights.ok())).collect()
        };
        assert_eq!(read(), invited.map(|(name, rights)| (name.to_owned(), Some(rights))).into());
        // One that can't be read at this moment is no one that was removed.
        fs::remove_file(room.invitation("c")).unwrap();
        fs::create_dir(room.invitation("c")).unwrap();
        assert_eq!(read().get("c"), Some(&None));
    }

    /// A full file system has no room for it.
    #[test]
    fn a_zones_room_that_is_its_room_already_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let zone = dir.path().join("zone");
        fs::write(&zone, "").unwrap();
        let room = Room(dir.path().join("zones").join("z"));
        let record = || fs::metadata(room.0.join(FILE)).unwrap().ino();
        room.take_for(&zone).unwrap();
        let (first, other) = (record(), dir.path().join("moved"));
        room.take_for(&zone).unwrap();
        assert_eq!(record(), first);
        fs::rename(&zone, &other).unwrap();
        room.take_for(&other).unwrap();
        assert!(fs::read_to_string(room.0.join(FILE)).unwrap().ends_with("/moved\n"));
    }

    /// A server that starts records the VMs of the member table, and a command records the VM that it has just put there.
    #[test]
    fn an_invitation_that_two_processes_record_at_once_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room(dir.path().join("zones").join("z"));
        room.make().unwrap();
        let record = || (0..1000).for_each(|_| room.invite("a", Rights::READ_WRITE).unwrap());
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(record))));
        assert_eq!(room.entries().unwrap(), [room.invitation("a")]);
    }
}
