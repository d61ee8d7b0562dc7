// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Control groups (version 2): memory, tasks and processor time of all processes of a tenant together are limited, and they are killed at once.
//!
//! A server needs a group of its own to divide, which it is told (`--cgroup`) or finds ([`find`]). A tenant has a group in that one: a client that came by a
//! socket has its worker's, a VM has one with a group for each of its workers. So the users of a VM are kept from each other's memory, and the VM's
//! sum is limited too.
//!
//! The name of each group has the server's process number, and the server has its folder locked. What a server that was killed leaves is removed by the next one that divides the same
//! group; a number alone doesn't tell whether its server lives, which may be in a PID namespace of its own.

mod find;

pub use find::find;

use super::limits::{SCRATCH, TASKS, WORKING};
use crate::limits::Limits;
use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tombolo_calls::say;

/// The controllers that limit a tenant.
const CONTROLLERS: &str = "+memory +pids +cpu";

/// A group that is this server's own to divide.
#[derive(Clone, Debug)]
pub struct Delegated {
    own: Arc<Own>,
    next: Arc<AtomicU64>,
    /// The folders of its groups that live. Their names don't tell: a server in another PID namespace may have this one's number, and divide the same group.
    groups: Arc<Mutex<Vec<Weak<Path>>>>,
}

#[derive(Debug)]
struct Own {
    folder: PathBuf,
    /// The lock of a group that this server made, and removes.
    made: Option<Mutex<OwnedFd>>,
}

/// The group of a tenant or of a worker; ends with this value, and its processes with it.
#[derive(Debug)]
pub struct Group {
    folder: Arc<Path>,
    open: OwnedFd,
}

/// The limits of a control group: the sum over its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Most {
    /// Bytes of memory.
    memory: u64,
    tasks: u64,
    /// 1 to 100.
    weight: u32,
}

impl Most {
    /// Of one worker. The window is charged to the first that writes there, and so are the files that a driver compiles.
    fn of_worker(limits: &Limits) -> Most {
        let memory =
            limits.memory.saturating_add(WORKING).saturating_add(limits.window).saturating_add(SCRATCH);
        Most { memory, tasks: TASKS, weight: limits.weight }
    }

    /// Of a VM. Its workers share its device memory and have a window each. Of everything else four of them may use as much as one may alone.
    fn of_vm(limits: &Limits, channels: u32) -> Most {
        let channels = u64::from(channels);
        let shared = |of_one: u64| of_one.max(of_one / 4 * channels);
        let windows = limits.window.saturating_mul(channels);
        let memory = limits.memory.saturating_add(windows).saturating_add(shared(WORKING + SCRATCH));
        Most { memory, tasks: shared(TASKS), weight: limits.weight }
    }
}

fn set(folder: &Path, file: &str, value: &str) -> anyhow::Result<()> {
    let path = folder.join(file);
    std::fs::write(&path, value).with_context(|| format!("{}: {value}", path.display()))
}

/// Keeps a group's memory out of the host's swap, which the limit of memory doesn't count: a tenant could fill it, and keep the disk busy that its
/// neighbours use. Nothing to do where the kernel has no swap.
fn no_swap(folder: &Path) -> anyhow::Result<()> {
    let path = folder.join("memory.swap.max");
    let limited = File::options().write(true).open(&path).and_then(|mut file| file.write_all(b"0"));
    match limited {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).with_context(|| path.display().to_string()),
        _ => Ok(()),
    }
}

/// The server whose group this is, by the group's name.
fn server_of(name: &str) -> Option<u32> {
    let rest = ["worker-", "vm-", find::PREFIX].iter().find_map(|prefix| name.strip_prefix(prefix))?;
    rest.split('-').next()?.parse().ok()
}

fn folders(of: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(of).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// A server that begins or ends waits so long for processes that were killed; one may hang in its driver.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Removes a group and those in it, and kills the processes that are left there.
fn remove(folder: &Path, most: Option<Duration>) -> io::Result<()> {
    empty(folder, most)?;
    for inner in folders(folder) {
        remove(&inner, most)?;
    }
    std::fs::remove_dir(folder)
}

/// Returns whether a group that names this server was left by one that has ended. One with this process's own number was, too: in a PID namespace of its
/// own each server has the same. For a server that has made no group yet.
fn was_left_by(server: u32) -> bool {
    server == std::process::id() || !Path::new(&format!("/proc/{server}")).exists()
}

fn opened(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, folder, flags, Mode::empty())?)
}

/// Makes a group's folder, locked for as long as the descriptor is open.
fn made(folder: &Path) -> anyhow::Result<OwnedFd> {
    let path = || folder.display().to_string();
    match std::fs::create_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => bail!(
            "{}: a server with this one's process number, in another PID namespace, divides the same group; give each a group of its own",
            path()
        ),
        other => other.with_context(path)?,
    }
    let lock = opened(folder).with_context(path)?;
    // Another server has it for a moment at most, to look whether it is locked.
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).with_context(path)?;
    Ok(lock)
}

/// Returns whether a group was left by a server that has ended.
fn is_left(folder: &Path) -> bool {
    let server = folder.file_name().and_then(|name| name.to_str()).and_then(server_of);
    let is_locked = || {
        opened(folder).is_ok_and(|open| {
            rustix::fs::flock(&open, FlockOperation::NonBlockingLockShared)
                == Err(rustix::io::Errno::WOULDBLOCK)
        })
    };
    server.is_some_and(was_left_by) && !is_locked()
}

/// Removes what servers left that have ended.
fn sweep(folder: &Path) {
    for left in folders(folder) {
        if is_left(&left) {
            // Another server may do the same now.
            let _gone = remove(&left, Some(KILL_TIMEOUT));
        }
    }
}

/// Kills the processes of a group, and waits until they have gone, at most for `most`.
fn empty(folder: &Path, most: Option<Duration>) -> io::Result<()> {
    let timeout = most.map(|most| Timespec { tv_sec: most.as_secs() as i64, tv_nsec: 0 });
    std::fs::write(folder.join("cgroup.kill"), "1")?;
    let mut events = File::open(folder.join("cgroup.events"))?;
    loop {
        let mut text = String::new();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        if text.lines().any(|line| line == "populated 0") {
            return Ok(());
        }
        // Changed since it was read.
        let mut changed = [PollFd::new(&events, PollFlags::PRI)];
        match rustix::event::poll(&mut changed, timeout.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl Delegated {
    /// The group at a folder of a mounted cgroup2.
    pub fn at(folder: &Path) -> anyhow::Result<Delegated> {
        Delegated::over(Own { folder: folder.to_owned(), made: None })
    }

    fn over(own: Own) -> anyhow::Result<Delegated> {
        sweep(&own.folder);
        set(&own.folder, "cgroup.subtree_control", CONTROLLERS).context(
            "no group to divide: it needs the controllers memory, pids and cpu, no process in it, and an owner who is this user",
        )?;
        let delegated = Delegated { own: Arc::new(own), next: Arc::default(), groups: Arc::default() };
        // A controller that is missing fails now, and not when a client comes.
        let trial = delegated.worker(&Limits::default())?;
        if !trial.folder.join("cgroup.kill").exists() {
            bail!("{}: no cgroup.kill (Linux 5.14)", trial.folder.display());
        }
        drop(trial);
        Ok(delegated)
    }

    pub fn folder(&self) -> &Path {
        &self.own.folder
    }

    /// Makes the group anew if an administrator has removed it, which works while the server has no clients.
    fn restore(&self) -> anyhow::Result<()> {
        let Own { folder, made: lock } = &*self.own;
        match lock {
            _ if folder.exists() => return Ok(()),
            Some(lock) => *lock.lock().unwrap_or_else(PoisonError::into_inner) = made(folder)?,
            None => std::fs::create_dir(folder).with_context(|| folder.display().to_string())?,
        }
        set(folder, "cgroup.subtree_control", CONTROLLERS)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn groups(&self) -> MutexGuard<'_, Vec<Weak<Path>>> {
        // A list stays whole whatever happens between two changes.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a group among this server's.
    fn counted(&self, group: Group) -> Group {
        let mut groups = self.groups();
        groups.retain(|folder| folder.strong_count() > 0);
        groups.push(Arc::downgrade(&group.folder));
        group
    }

    /// A new group for the worker of a client that came by a socket.
    pub fn worker(&self, limits: &Limits) -> anyhow::Result<Group> {
        self.restore()?;
        let group = Group::worker(&self.own.folder, self.number(), &Most::of_worker(limits));
        group.map(|group| self.counted(group))
    }

    /// A new group for a worker of a VM, in the VM's.
    pub fn worker_of(&self, vm: &Group, limits: &Limits) -> anyhow::Result<Group> {
        Group::worker(&vm.folder, self.number(), &Most::of_worker(limits))
    }

    /// A new group for the workers of a VM, of which there are `channels` at most.
    pub fn vm(&self, name: &str, limits: &Limits, channels: u32) -> anyhow::Result<Group> {
        self.restore()?;
        let name = format!("vm-{}-{}-{name}", std::process::id(), self.number());
        let group = self.counted(Group::new(self.own.folder.join(name), &Most::of_vm(limits, channels))?);
        set(&group.folder, "cgroup.subtree_control", CONTROLLERS)?;
        Ok(group)
    }

    /// Kills this server's workers, and removes their groups. For a server that is about to end.
    pub fn end(&self) {
        let groups: Vec<_> = self.groups().iter().filter_map(Weak::upgrade).collect();
        for group in groups {
            // The thread that waits for the worker removes its group, too.
            let _gone = remove(&group, Some(KILL_TIMEOUT));
        }
        if self.own.made.is_some() {
            // The next server tries again.
            let _busy = std::fs::remove_dir(&self.own.folder);
        }
    }
}

impl Group {
    fn new(folder: PathBuf, most: &Most) -> anyhow::Result<Group> {
        let open = made(&folder)?;
        // Removed from here on, whatever fails.
        let group = Group { folder: folder.into(), open };
        set(&group.folder, "memory.max", &most.memory.to_string())?;
        no_swap(&group.folder)?;
        set(&group.folder, "pids.max", &most.tasks.to_string())?;
        set(&group.folder, "cpu.weight", &most.weight.to_string())?;
        Ok(group)
    }

    fn worker(within: &Path, number: u64, most: &Most) -> anyhow::Result<Group> {
        let group = Group::new(within.join(format!("worker-{}-{number}", std::process::id())), most)?;
        // When memory runs out, one of a VM's workers ends, with all of its processes.
        set(&group.folder, "memory.oom.group", "1")?;
        Ok(group)
    }

    /// The processor time of all processes that were in the group; `None`: the group was removed.
    pub fn cpu(&self) -> Option<Duration> {
        let stat = std::fs::read_to_string(self.folder.join("cpu.stat")).ok()?;
        let micros = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
        micros.parse().ok().map(Duration::from_micros)
    }

    /// To start a process in.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        match remove(&self.folder, None) {
            // The server ends and has removed it.
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                say!("tombolo accel: {}: {e}", self.folder.display())
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_no_swap_also_where_the_kernel_has_none() {
        let folder = tempfile::tempdir().expect("a folder");
        no_swap(folder.path()).expect("nothing to do");
        let file = folder.path().join("memory.swap.max");
        assert!(!file.exists());
        std::fs::write(&file, "max").expect("written");
        no_swap(folder.path()).expect("limited");
        assert_eq!(std::fs::read(&file).expect("read")[..1], *b"0");
    }

    #[test]
    fn a_groups_processor_time_is_what_the_kernel_says_and_unknown_once_it_was_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = File::open(folder.path()).expect("it is there").into();
        let group = Group { folder: folder.path().into(), open };
        assert_eq!(group.cpu(), None);
        let stat = "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n";
        std::fs::write(folder.path().join("cpu.stat"), stat).expect("written");
        assert_eq!(group.cpu(), Some(Duration::from_millis(1500)));
        // It is no control group, and has nothing to be killed.
        std::mem::forget(group);
    }

    #[test]
    fn a_group_of_a_server_that_has_ended_is_known_also_by_one_with_the_same_number() {
        let mut ended = std::process::Command::new("true").spawn().expect("it starts");
        ended.wait().expect("its end");
        let of = [ended.id(), std::process::id(), std::os::unix::process::parent_id()];
        assert_eq!(of.map(was_left_by), [true, true, false]);
    }

    #[test]
    fn a_group_that_was_removed_is_there_again_for_the_next_client() {
        let top = tempfile::tempdir().expect("a folder");
        let folder = top.path().join("accel");
        for lock in [None, Some(Mutex::new(made(&folder).expect("made")))] {
            let own = Arc::new(Own { folder: folder.clone(), made: lock });
            let delegated = Delegated { own, next: Arc::default(), groups: Arc::default() };
            for _ in 0..2 {
                if folder.exists() {
                    std::fs::remove_dir_all(&folder).expect("removed");
                }
                let of_client = delegated.worker(&Limits::default()).expect("a group");
                assert!(of_client.folder.starts_with(&folder) && of_client.folder.exists());
                let controllers = std::fs::read_to_string(folder.join("cgroup.subtree_control"));
                assert_eq!(controllers.expect("written"), CONTROLLERS);
            }
        }
    }

    #[test]
    fn a_group_that_is_locked_was_not_left_whatever_number_its_server_has_here() {
        let top = tempfile::tempdir().expect("a folder");
        let mut ended = std::process::Command::new("true").spawn().expect("it starts");
        ended.wait().expect("its end");
        for name in [format!("worker-{}-3", ended.id()), format!("vm-{}-0-train", std::process::id())] {
            let folder = top.path().join(name);
            let lock = made(&folder).expect("made");
            assert!(!is_left(&folder));
            let again = made(&folder).expect_err("it is there").to_string();
            assert!(again.contains("give each a group of its own"), "{again}");
            drop(lock);
            assert!(is_left(&folder));
        }
    }

    #[test]
    fn a_server_that_ends_kills_no_process_of_another_with_its_number_that_divides_the_same_group() {
        let top = tempfile::tempdir().expect("a folder");
        let [one, other] = [(); 2].map(|()| Delegated {
            own: Arc::new(Own { folder: top.path().to_owned(), made: None }),
            next: Arc::default(),
            groups: Arc::default(),
        });
        let group = one.worker(&Limits::default()).expect("a group");
        let is_killed = || group.folder.join("cgroup.kill").exists();
        other.end();
        assert!(group.folder.exists() && !is_killed());
        one.end();
        assert!(is_killed());
    }

    #[test]
    fn a_groups_name_says_whose_it_is() {
        for (name, server) in [
            ("worker-77-3", Some(77)),
            ("vm-78-0-train-9", Some(78)),
            ("tombolo-accel-79", Some(79)),
            ("server", None),
            ("vm-train", None),
            ("system.slice", None),
        ] {
            assert_eq!(server_of(name), server, "{name}");
        }
    }

    #[test]
    fn a_vms_workers_together_have_its_device_memory_once_and_the_rest_by_their_number() {
        let limits = Limits { memory: 100, window: 10, ..Limits::default() };
        let one = Most::of_worker(&limits);
        assert_eq!(Most::of_vm(&limits, 1), one);
        assert_eq!(Most::of_vm(&limits, 4), Most { memory: one.memory + 30, ..one });
        let eight = Most::of_vm(&limits, 8);
        assert_eq!((eight.memory, eight.tasks), (100 + 80 + 2 * (WORKING + SCRATCH), 2 * TASKS));
    }
}
