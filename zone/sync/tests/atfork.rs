// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A program with fork handlers of its own. It is a process of its own, since no handler can be taken back.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use tombolo_sync::{Agent, Sync};
use tombolo_zone::{Backing, Zone, ZoneConfig};

/// The program's lock, which it holds while it opens sessions, and across fork.
struct Lock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a mutex, used by pthread's functions alone.
unsafe impl std::marker::Sync for Lock {}

static LOCK: Lock = Lock(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

extern "C" fn lock() {
    // SAFETY: a mutex that lives for ever.
    unsafe { libc::pthread_mutex_lock(LOCK.0.get()) };
}

extern "C" fn unlock() {
    // SAFETY: as above; the thread that forks holds it.
    unsafe { libc::pthread_mutex_unlock(LOCK.0.get()) };
}

#[test]
fn a_program_that_holds_a_lock_across_fork_opens_sessions_while_it_has_that_lock() {
    // SAFETY: functions that live for ever.
    assert_eq!(unsafe { libc::pthread_atfork(Some(lock), Some(unlock), Some(unlock)) }, 0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zone");
    let zone = Zone::create(&ZoneConfig::new("sync", 8 << 20).backing(Backing::File(path.clone()))).unwrap();
    let _agent = Agent::start(Arc::new(zone), None).unwrap();
    let (done, ended) = channel();
    let opened = done.clone();
    std::thread::spawn(move || {
        for _ in 0..500 {
            lock();
            drop(Sync::open(&path).unwrap());
            unlock();
        }
        opened.send(()).unwrap();
    });
    std::thread::spawn(move || {
        for _ in 0..500 {
            // SAFETY: the child ends at once.
            match unsafe { libc::fork() } {
                // SAFETY: a plain call.
                0 => unsafe { libc::_exit(0) },
                // SAFETY: a child of this process.
                child => assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child),
            }
        }
        done.send(()).unwrap();
    });
    for _ in 0..2 {
        if ended.recv_timeout(Duration::from_secs(60)).is_err() {
            // At once: to end in order, this process would need the locks as well.
            eprintln!("threads wait for each other");
            std::process::abort();
        }
    }
}
