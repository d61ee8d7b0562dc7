// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bench of semaphores on one host, next to POSIX named semaphores and shm_open: JSON lines on standard output.
//! An argument other than cargo's is the number of repetitions.

use std::ffi::CString;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use tombolo_sync::{Agent, Semaphore, Sync};
use tombolo_zone::{Zone, ZoneConfig};

const POSTS: u32 = 2_000_000;
const OBJECTS: u32 = 20_000;

fn line(case: &str, system: &str, nanoseconds: f64) {
    let value = serde_json::json!({
        "bench": "sync", "case": case, "system": system, "value": nanoseconds, "unit": "ns", "better": "lower"
    });
    println!("{value}");
}

/// Nanoseconds for one of `n` calls.
fn each(n: u32, mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..n {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(n)
}

/// Creating and destroying a POSIX named semaphore.
fn posix_semaphore(name: &CString) {
    // SAFETY: a valid name; the semaphore is closed before its name goes.
    unsafe {
        let sem = libc::sem_open(name.as_ptr(), libc::O_CREAT | libc::O_EXCL, 0o600, 0u32);
        assert!(sem != libc::SEM_FAILED);
        libc::sem_close(sem);
        libc::sem_unlink(name.as_ptr());
    }
}

/// Creating, mapping and destroying a page of POSIX shared memory with a semaphore in it, as Nahanni's users do.
fn posix_shared_memory(name: &CString) {
    // SAFETY: a valid name; the mapping is a page, holds a semaphore and is unmapped before its name goes.
    unsafe {
        let fd = libc::shm_open(name.as_ptr(), libc::O_CREAT | libc::O_EXCL | libc::O_RDWR, 0o600);
        assert!(fd >= 0 && libc::ftruncate(fd, 4096) == 0);
        let page = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        );
        assert!(page != libc::MAP_FAILED);
        let sem = page.cast::<libc::sem_t>();
        assert!(libc::sem_init(sem, 1, 0) == 0);
        libc::sem_destroy(sem);
        libc::munmap(page, 4096);
        libc::close(fd);
        libc::shm_unlink(name.as_ptr());
    }
}

/// Creating and destroying a System V semaphore.
fn system_v() {
    // SAFETY: no pointers.
    unsafe {
        let id = libc::semget(libc::IPC_PRIVATE, 1, 0o600);
        assert!(id >= 0 && libc::semctl(id, 0, libc::IPC_RMID) == 0);
    }
}

fn main() {
    let repetitions: u32 = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(5);
    let zone = Arc::new(Zone::create(&ZoneConfig::new("bench", 8 << 20)).expect("a zone"));
    let agent = Agent::start(Arc::clone(&zone), None).expect("an agent");
    let path =
        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&*zone)));
    let sync = Sync::open(path).expect("a session");
    let sem = Semaphore::create(agent.sync(), "s", 0).expect("a semaphore");
    let name = CString::new(format!("/tombolo-bench-{}", std::process::id())).expect("no NUL");
    // SAFETY: a valid name.
    let posix = unsafe { libc::sem_open(name.as_ptr(), libc::O_CREAT | libc::O_EXCL, 0o600, 0u32) };
    assert!(posix != libc::SEM_FAILED);
    for _ in 0..repetitions {
        let ours = each(POSTS, || {
            sem.post().and_then(|()| sem.wait(None)).expect("post and wait");
        });
        line("sem-post-wait", "tombolo", ours);
        let theirs = each(POSTS, || {
            // SAFETY: an open semaphore.
            unsafe { black_box(libc::sem_post(posix) + libc::sem_wait(posix)) };
        });
        line("sem-post-wait", "posix-sem", theirs);
    }
    // SAFETY: an open semaphore, not used below.
    unsafe {
        libc::sem_close(posix);
        libc::sem_unlink(name.as_ptr());
    }
    for _ in 0..repetitions {
        let ours = each(OBJECTS, || {
            Semaphore::create(&sync, "x", 0).expect("create");
            sync.destroy("x").expect("destroy");
        });
        line("sem-create-destroy", "tombolo", ours);
        line("sem-create-destroy", "posix-sem", each(OBJECTS, || posix_semaphore(&name)));
        line("sem-create-destroy", "shm-open", each(OBJECTS, || posix_shared_memory(&name)));
        line("sem-create-destroy", "system-v", each(OBJECTS, system_v));
    }
}
