// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The folder of a running project, and the lock and the door by which commands know that its supervisor lives.
//!
//! `$XDG_RUNTIME_DIR/tombolo/` (root: `/run/tombolo/`) has one folder per project, named by the project and its [`Identity`]'s number: `lock` (held
//! with flock by the supervisor, for as long as it lives) and the logs. Sockets are not files: the supervisor is found and reached by its standard
//! input, a [`Door`] that is named for the project's [`Identity`], and QEMU talks to it over inherited descriptors. So a project is found by its
//! compose file alone, whatever becomes of this folder, and nothing has to be swept up after a crash but that.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::FlockOperation;
use tombolo_zone::door::{self, Door, Found};

use crate::compose::Project;
use crate::project::identity::{DOOR, Folder, Identity};

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

/// A supervisor's door is its standard input, which it does not read: commands look at one descriptor of each process.
const DOOR_NUMBER: u32 = 0;

/// The supervisor that lives for this compose file, whatever its environment was: that of its folder, whatever its name was then, or else one that
/// was started under this path (see [`Identity::is_of`]).
///
/// # Errors
/// When /proc can't be read, or the supervisor lives and this process may not look at it.
pub fn supervisor(file: &Path) -> io::Result<Option<Found>> {
    let wanted = Identity::of(file);
    let found = doors_of(&wanted, file)?;
    if found.is_empty() {
        let folders = folders_of(&wanted);
        if let Some(hidden) = hidden()?.into_iter().find(|hidden| hidden.is_of(file, &folders)) {
            let hidden = Hidden { file: Some(file.to_owned()), ..hidden };
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, hidden.to_string()));
        }
    }
    let same_folder = found.iter().position(|door| {
        Identity::of_door(door.name()).is_some_and(|identity| identity.has_folder_of(&wanted))
    });
    Ok(found.into_iter().nth(same_folder.unwrap_or_default()))
}

/// The folders for logs that this project can have in this environment; its name is not known.
fn folders_of(wanted: &Identity) -> Vec<PathBuf> {
    let end = format!("-{:08x}", folder_number(wanted));
    let entries = base().ok().and_then(|base| fs::read_dir(base).ok()).into_iter().flatten().flatten();
    let is_its = |name: &OsStr| name.as_bytes().ends_with(end.as_bytes());
    entries.filter(|entry| is_its(&entry.file_name())).map(|entry| entry.path()).collect()
}

/// The number in the name of a project's folder for logs.
fn folder_number(identity: &Identity) -> u64 {
    identity.number() & 0xffff_ffff
}

/// Returns whether a process has locked the file with this inode number by flock(2) (proc_locks(5)).
fn has_locked(process: u32, inode: u64) -> bool {
    let (process, inode) = (process.to_string(), format!(":{inode}"));
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        matches!(words[..], [_, "FLOCK", _, _, by, file, ..] if by == process && file.ends_with(&inode))
    })
}

/// The doors of supervisors of this project.
fn doors_of(wanted: &Identity, file: &Path) -> io::Result<Vec<Found>> {
    let mut found = door::find(|name| name.starts_with(DOOR), Some(DOOR_NUMBER))?;
    found.retain(|door| {
        Identity::of_door(door.name()).is_some_and(|identity| identity.is_of(door.process, wanted, file))
    });
    Ok(found)
}

/// All supervisors of this user that live.
///
/// # Errors
/// When /proc can't be read.
pub fn supervisors() -> io::Result<Vec<Found>> {
    let mut all = door::find(|n| n.starts_with(DOOR), Some(DOOR_NUMBER))?;
    all.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(all)
}

/// A supervisor of this user that this process may not look at: it has capabilities that this process lacks.
#[derive(Debug)]
pub struct Hidden {
    process: u32,
    /// The compose file under which it was started; `None`: it was upgraded since.
    file: Option<PathBuf>,
}

impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hidden { process, file } = self;
        let of = file.as_ref().map(|file| format!(" of {}", file.display())).unwrap_or_default();
        write!(
            f,
            "a supervisor{of} lives (process {process}), and this command may not look at it, as it has capabilities that the command lacks \
             ('grep Cap /proc/{process}/status'); run the command with the same ones, or as root"
        )
    }
}

impl Hidden {
    /// The supervisor that a process is by its command line, which every process may read.
    fn of(process: u32, line: &[u8]) -> Option<Hidden> {
        let mut words = line.split(|&byte| byte == 0);
        if words.next() != Some(b"tombolo") || !matches!(words.next(), Some(b"supervise" | b"supervise-on")) {
            return None;
        }
        let file = words.skip_while(|word| *word != b"--file").nth(1);
        Some(Hidden { process, file: file.map(|file| OsStr::from_bytes(file).into()) })
    }

    /// Returns whether it is the supervisor of this compose file, whose folders for logs these are: one that was upgraded is known by the lock of such a
    /// folder.
    fn is_of(&self, file: &Path, folders: &[PathBuf]) -> bool {
        let has_lock = |folder: &PathBuf| {
            folder.join("lock").metadata().is_ok_and(|lock| has_locked(self.process, lock.ino()))
        };
        self.file.as_ref().map_or_else(|| folders.iter().any(has_lock), |own| own == file)
    }
}

/// Supervisors of this user that this process may not look at.
///
/// # Errors
/// When /proc can't be read.
pub fn hidden() -> io::Result<Vec<Hidden>> {
    let user = format!("\nUid:\t{}\t", rustix::process::getuid().as_raw());
    let mut hidden = Vec::new();
    for entry in fs::read_dir("/proc")?.filter_map(Result::ok) {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let path = entry.path();
        let door = fs::read_link(path.join("fd").join(DOOR_NUMBER.to_string()));
        if !door.is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied) {
            continue;
        }
        // One that ends meanwhile is none.
        let found = Hidden::of(process, &fs::read(path.join("cmdline")).unwrap_or_default());
        if found.is_some() && fs::read_to_string(path.join("status")).is_ok_and(|text| text.contains(&user)) {
            hidden.extend(found);
        }
    }
    Ok(hidden)
}

/// The number of supervisors of this user that live under another root folder, such as in a container.
///
/// # Errors
/// When /proc can't be read.
pub fn supervisors_elsewhere() -> io::Result<usize> {
    Ok(door::find_elsewhere(|n| n.starts_with(DOOR), Some(DOOR_NUMBER))?.len())
}

/// Supervisors of other users that live; root alone finds some.
///
/// # Errors
/// When /proc can't be read.
pub fn supervisors_of_others() -> io::Result<Vec<Found>> {
    let own = rustix::process::geteuid().as_raw();
    door::find_of(|user| user != own, |name| name.starts_with(DOOR), Some(DOOR_NUMBER))
}

/// A sentence about another user's supervisor of this compose file, which root alone finds; commands of root's don't reach it.
///
/// # Errors
/// When /proc can't be read.
pub fn another_users(file: &Path) -> io::Result<Option<String>> {
    let wanted = Identity::of(file);
    let is_its = |found: &Found| {
        Identity::of_door(found.name()).is_some_and(|identity| identity.is_of(found.process, &wanted, file))
    };
    let found = supervisors_of_others()?.into_iter().find(is_its);
    Ok(found.map(|Found { process, user, .. }| {
        format!("user {user} runs this project (process {process}); that user's commands reach it")
    }))
}

/// A project's folder.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The folder of this project: its supervisor's, if one lives. It need not exist. The supervisor's is for reading: another environment
    /// has named it.
    ///
    /// # Errors
    /// See [`base`].
    pub fn of(project: &Project) -> anyhow::Result<StateDir> {
        let living = supervisor(&project.file)?;
        if let Some(dir) = living.as_ref().and_then(|found| found.path.parent()) {
            return Ok(StateDir { path: dir.to_owned() });
        }
        StateDir::own(project)
    }

    /// The folder of this project in this environment. It need not exist.
    ///
    /// # Errors
    /// See [`base`].
    pub fn own(project: &Project) -> anyhow::Result<StateDir> {
        let number = folder_number(&Identity::of(&project.file));
        Ok(StateDir { path: base()?.join(format!("{}-{number:08x}", project.name)) })
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

    /// Makes the folder and takes its lock: `None` when a supervisor lives already. The lock lasts as long as the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn lock(&self) -> anyhow::Result<Option<File>> {
        loop {
            make_private(&self.path)?;
            let path = self.path.join("lock");
            let file = match File::options().create(true).truncate(false).write(true).open(&path) {
                // What a dead supervisor has left can be looked at on a file system that has become read-only.
                Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => File::open(&path),
                other => other,
            };
            let file = file.with_context(|| format!("{} can't be made", path.display()))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
            // A process that removed the folder meanwhile has unlinked the locked file.
            if path.metadata().is_ok_and(|m| file.metadata().is_ok_and(|f| f.ino() == m.ino())) {
                return Ok(Some(file));
            }
        }
    }

    /// Returns whether no process has the lock. The folder is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn is_free(&self) -> io::Result<bool> {
        let file = File::open(self.path.join("lock"))?;
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
                    self.path.join("lock").display()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Makes a door of this process, which holds the lock and the compose file's folder, its standard input. `None`: another process has one
    /// for this project, which it keeps in another folder.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open_door(&self, file: &Path, folder: &Folder) -> io::Result<Option<Door>> {
        let identity = Identity::in_folder(file, folder)?;
        let name = identity.door();
        // A supervisor that was killed in the middle of this.
        let path = self.path.join(&name);
        fs::remove_file(&path).or_else(absent)?;
        let door = Door::open(&self.path, &name).map_err(|e| at(&path, &e))?;
        rustix::stdio::dup2_stdin(door.handle())?;
        // Of two that begin at the same time both may see the other here, never neither.
        let others = doors_of(&identity, file)?;
        if others.iter().any(|found| found.process != std::process::id()) {
            self.close_door();
            return Ok(None);
        }
        Ok(Some(door))
    }

    /// This process can't be found any more.
    pub fn close_door(&self) {
        let closed = File::open("/dev/null").and_then(|null| Ok(rustix::stdio::dup2_stdin(&null)?));
        if closed.is_err() {
            // Without a descriptor for /dev/null any other that is no door will do.
            let _nothing_left = rustix::stdio::dup2_stdin(rustix::stdio::stderr());
        }
    }

    /// Called with the lock held by a supervisor that is about to end: the folder goes where no VM has left a log.
    pub fn withdraw(&self) {
        self.close_door();
        let logs = fs::read_dir(&self.path).is_ok_and(|entries| {
            entries.filter_map(Result::ok).any(|e| e.path().extension().is_some_and(|x| x == "console"))
        });
        if !logs && self.path.exists() {
            self.remove();
        }
    }

    /// Makes the folder again where it has vanished; see [`renew`].
    ///
    /// # Errors
    /// Another user has made one in its place.
    pub fn renew(&self) -> anyhow::Result<()> {
        renew(&self.path)
    }

    /// Removes the folder, unless another user has made it; called with the lock held.
    pub fn remove(&self) {
        if fs::symlink_metadata(&self.path).is_ok() {
            if let Err(e) = check_own(&self.path, CHANGE) {
                crate::say!("{e:#}");
                return;
            }
        }
        if let Err(e) = fs::remove_dir_all(&self.path).or_else(absent) {
            crate::say!("{}: {e}", self.path.display());
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
        drop(lock);
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
        dir.remove();
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
