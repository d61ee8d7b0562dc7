// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sessions of processes that fork: a child has no part in its parent's.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tombolo_sync::{Agent, Error, Locked, Mutex, RwLock, Semaphore, Sync};
use tombolo_zone::{Backing, Zone, ZoneConfig};

/// Longer than any operation here takes; a test that waits for it has failed.
const LONG: Option<Duration> = Some(Duration::from_secs(20));
const NOW: Option<Duration> = Some(Duration::ZERO);
const EBADF: Error = Error::Os(libc::EBADF);

struct Bench {
    dir: tempfile::TempDir,
    _agent: Agent,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::File(dir.path().join("zone"));
        let zone = Zone::create(&ZoneConfig::new("sync", 8 << 20).backing(backing)).unwrap();
        Bench { dir, _agent: Agent::start(Arc::new(zone), None).unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("zone")
    }
}

/// A process that is killed at the end.
struct Process(i32);

impl Process {
    /// Forks. The child does `work`, and ends with status 0 if that is true.
    fn fork(work: impl FnOnce() -> bool) -> Process {
        // SAFETY: the child uses what this thread has, calls nothing that another thread may have locked, and ends by _exit().
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            // SAFETY: a plain call.
            0 => unsafe { libc::_exit(i32::from(!work())) },
            pid => Process(pid),
        }
    }

    fn succeeds(self) -> bool {
        let mut status = 0;
        // SAFETY: a child of this process and a valid place for its status.
        unsafe { libc::waitpid(self.0, &mut status, 0) };
        std::mem::forget(self);
        status == 0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SAFETY: plain calls; a process that is no child of this one is reaped by another.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Waits until it is killed.
fn live() -> bool {
    loop {
        // SAFETY: a plain call.
        unsafe { libc::pause() };
    }
}

/// Starts a process that opens the zone and does `work` with its session, then lives on. Returns it and the pid that `work` gave.
fn holder(path: &Path, work: impl FnOnce(&Path, Sync) -> i32) -> (Process, i32) {
    let (mut reader, mut writer) = UnixStream::pair().unwrap();
    let process = Process::fork(|| {
        let pid = work(path, Sync::open(path).unwrap());
        writer.write_all(&pid.to_ne_bytes()).unwrap();
        live()
    });
    drop(writer);
    let mut pid = [0; 4];
    reader.read_exact(&mut pid).expect("the process is ready");
    (process, i32::from_ne_bytes(pid))
}

#[test]
fn the_locks_of_a_process_that_died_are_free_though_a_child_of_it_lives() {
    let bench = Bench::new();
    let sync = Sync::open(bench.path()).unwrap();
    let mutex = Mutex::create(&sync, "m").unwrap();
    let lock = RwLock::create(&sync, "rw").unwrap();
    let (parent, child) = holder(&bench.path(), |_, own| {
        let _ = Mutex::open(&own, "m").unwrap().lock(LONG).unwrap();
        let _ = RwLock::open(&own, "rw").unwrap().read(LONG).unwrap();
        let child = Process::fork(live);
        let pid = child.0;
        std::mem::forget((child, own));
        pid
    });
    let child = Process(child);
    assert_eq!(mutex.lock(NOW), Err(Error::TimedOut));
    drop(parent);
    assert_eq!(mutex.lock(LONG), Ok(Locked::OwnerDied));
    assert_eq!(lock.write(LONG), Ok(Locked::Clean));
    // SAFETY: a plain call.
    assert_eq!(unsafe { libc::kill(child.0, 0) }, 0, "the child lives");
}

#[test]
fn a_child_that_closes_its_copy_of_a_session_frees_no_lock_of_its_parent() {
    let bench = Bench::new();
    let sync = Sync::open(bench.path()).unwrap();
    let mutex = Mutex::create(&sync, "m").unwrap();
    let (parent, closed) = holder(&bench.path(), |_, own| {
        let _ = Mutex::open(&own, "m").unwrap().lock(LONG).unwrap();
        // SAFETY: the child only drops its copy; the parent's stays.
        let mut copy = Some(unsafe { std::ptr::read(&own) });
        let child = Process::fork(|| {
            drop(copy.take());
            true
        });
        std::mem::forget((copy, own));
        i32::from(child.succeeds())
    });
    assert_eq!(closed, 1, "the child ended well");
    assert_eq!(mutex.lock(NOW), Err(Error::TimedOut), "its owner lives");
    drop(parent);
    assert_eq!(mutex.lock(LONG), Ok(Locked::OwnerDied));
}

#[test]
fn a_child_is_refused_with_its_parents_session_and_opens_its_own() {
    let bench = Bench::new();
    let sync = Sync::open(bench.path()).unwrap();
    let (mutex, sem) = (Mutex::create(&sync, "m").unwrap(), Semaphore::create(&sync, "s", 1).unwrap());
    let lock = RwLock::create(&sync, "rw").unwrap();
    assert_eq!(mutex.lock(NOW), Ok(Locked::Clean));
    let path = bench.path();
    let child = Process::fork(|| {
        let refused = mutex.unlock() == Err(EBADF)
            && mutex.lock(NOW) == Err(EBADF)
            && lock.read(NOW) == Err(EBADF)
            && sem.wait(NOW) == Err(EBADF)
            && Mutex::open(&sync, "m").err() == Some(EBADF)
            && Mutex::create(&sync, "n").err() == Some(EBADF)
            && sync.destroy("m") == Err(EBADF);
        let own = Sync::open(&path).unwrap();
        refused
            && Mutex::open(&own, "m").unwrap().lock(NOW) == Err(Error::TimedOut)
            && Semaphore::open(&own, "s").unwrap().wait(NOW) == Ok(())
    });
    assert!(child.succeeds());
    assert_eq!(mutex.unlock(), Ok(()));
    assert_eq!(sem.value(), Ok(0));
}

#[test]
fn a_child_that_may_have_no_more_memory_has_no_part_in_its_parents_session_either() {
    let bench = Bench::new();
    let sync = Sync::open(bench.path()).unwrap();
    let mutex = Mutex::create(&sync, "m").unwrap();
    let (parent, child) = holder(&bench.path(), |_, own| {
        let _ = Mutex::open(&own, "m").unwrap().lock(LONG).unwrap();
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a plain call, for this process and its child alone.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &none) }, 0);
        let child = Process::fork(live);
        let pid = child.0;
        std::mem::forget((child, own));
        pid
    });
    let child = Process(child);
    drop(parent);
    assert_eq!(mutex.lock(LONG), Ok(Locked::OwnerDied));
    // SAFETY: a plain call.
    assert_eq!(unsafe { libc::kill(child.0, 0) }, 0, "the child lives");
}

extern "C" fn fork_here(_signal: libc::c_int) {
    // SAFETY: the interrupted thread sleeps, outside of any allocation.
    unsafe { libc::fork() };
}

#[test]
fn a_child_that_a_signal_handler_forks_while_its_parent_waits_is_told_that_it_has_no_lock() {
    let bench = Bench::new();
    let sync = Sync::open(bench.path()).unwrap();
    let mutex = Mutex::create(&sync, "m").unwrap();
    assert_eq!(mutex.lock(NOW), Ok(Locked::Clean));
    let (mut reader, mut writer) = UnixStream::pair().unwrap();
    let path = bench.path();
    let parent = Process::fork(|| {
        let own = Sync::open(&path).unwrap();
        let mutex = Mutex::open(&own, "m").unwrap();
        // SAFETY: plain calls.
        let pid = unsafe {
            libc::signal(libc::SIGUSR1, fork_here as *const () as libc::sighandler_t);
            libc::getpid()
        };
        writer.write_all(b"w").unwrap();
        let got = mutex.lock(LONG);
        // SAFETY: a plain call.
        if unsafe { libc::getpid() } == pid {
            return live();
        }
        writer.write_all(if got == Err(EBADF) { b"y" } else { b"n" }).is_ok()
    });
    drop(writer);
    let mut said = [0];
    reader.read_exact(&mut said).unwrap();
    let place = format!("/proc/{}/wchan", parent.0);
    while !std::fs::read_to_string(&place).unwrap().contains("futex") {
        std::thread::yield_now();
    }
    // SAFETY: a plain call.
    unsafe { libc::kill(parent.0, libc::SIGUSR1) };
    reader.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"y");
}
