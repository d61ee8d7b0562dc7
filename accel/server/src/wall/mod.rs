// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wall around a worker. A worker runs kernels that its client wrote, in its own address space if the device is the CPU; so whatever the
//! worker may do, the client may do. Nothing here knows accelerators: any process that runs native code of others can stand behind it.
//!
//! The stages, in order, and what each takes away:
//!
//! 1. [`spawn`], by the supervisor: the worker begins as process 1 of its own PID, mount, network, IPC, UTS and cgroup namespaces, with
//!    the descriptors that it was given and no others, and with the variables that drivers read. Other processes, their sockets and their System V
//!    memory don't exist for it; what it forks dies with it.
//! 2. [`view`], by the worker before it reads a byte of its client: a root of its own with programs, libraries, the device's nodes, the kernel's
//!    facts about devices, all read-only, its own `/proc`, and a `/tmp` of limited size that no other process sees and that ends with it.
//! 3. [`limits`]: memory, processes, descriptors; no core dump. Of a worker whose driver is loaded also addresses, where its devices are processors.
//! 4. [`rules`] (Landlock): the same view once more, should a mount be wrong; no signal, no abstract socket and no port beyond the worker.
//! 5. [`identity`]: a user id that no other process has, or where the server may not give one, the server's own inside a user namespace; no
//!    capabilities, nor a way to get any.
//! 6. [`exec`] (seccomp): no program takes the worker's place, which would outlive the server.
//! 7. [`calls`] (seccomp), once the driver is loaded and before a request is carried out: system calls that no driver needs fail.
//!
//! Where the server has a cgroup to divide, each worker begins in one of its own ([`cgroup`]).
//!
//! A stage that fails ends the worker with a sentence that names what is missing. The supervisor tries all of them when it starts, so that
//! a server that can't confine its workers says so at once. `--unconfined` leaves out stages 1 (but for descriptors and variables), 2, 4 and 6,
//! the own user id, and the limits that need one.

pub mod calls;
pub mod cgroup;
pub mod exec;
pub mod identity;
pub mod limits;
pub mod rules;
pub mod spawn;
pub mod view;

use anyhow::Context;
use identity::Identity;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The confinement of a worker, as its supervisor tells it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wall {
    /// The user that it becomes.
    pub identity: Identity,
    /// Bytes of private memory of each of its processes.
    pub memory: u64,
    /// Its threads and processes.
    pub tasks: u64,
}

impl Wall {
    /// Namespaces that the worker begins in, as flags of clone(2).
    pub fn namespaces(&self) -> u64 {
        let all = libc::CLONE_NEWPID
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        let user = if self.identity == Identity::Mapped { libc::CLONE_NEWUSER } else { 0 };
        (all | user) as u64
    }

    /// Stages 2 to 5, for a process that has one thread. Returns the view's /dev/null, which its user may not be allowed to open.
    pub fn enter(&self) -> anyhow::Result<OwnedFd> {
        // Asked while the host's /proc is there.
        let uid = self.identity.uid().context("a user id of its own")?;
        limits::first_to_go()?;
        let groups = view::enter().context("a file system of its own (mount namespace)")?;
        let null = view::null().context("/dev/null")?;
        limits::set(self.memory, self.tasks).context("limits")?;
        rules::set().context("Landlock")?;
        identity::become_nobody(uid, &groups).context("a user without capabilities")?;
        Ok(null)
    }
}

/// The parts of stages 2 to 5 that remain for a worker that is not confined.
pub fn enter_unconfined() -> anyhow::Result<()> {
    limits::first_to_go()?;
    limits::no_core_dump()?;
    identity::become_nobody(None, &[])
}

/// The folder in which a driver may write, in a worker's view.
pub fn scratch() -> PathBuf {
    PathBuf::from("/tmp")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Set in the process that goes behind the wall; its name is one of those that such a process gets.
    const INSIDE: &str = "TOMBOLO_ACCEL_TEST_INSIDE";

    /// Things that libraries do at any time: arenas of malloc in many threads (which look for processors in /sys), memory that grows, time zones,
    /// locales, names of users and hosts, other programs, the log of the system, panics with their backtraces.
    fn all_that_libraries_do() {
        let work = |n: usize| {
            let mut grows = Vec::new();
            let mut small = Vec::new();
            for i in 0..20_000_usize {
                grows.push([i; 8]);
                small.push(vec![0_u8; (i * 37 + n) % 700]);
                if i % 3 == 0 {
                    small.swap_remove(i % small.len());
                }
            }
            let caught = std::panic::catch_unwind(|| assert!(grows.is_empty(), "on purpose"));
            assert!(caught.is_err());
            grows.len() + small.len()
        };
        let threads: Vec<_> = (0..128).map(|n| std::thread::spawn(move || work(n))).collect();
        for thread in threads {
            assert!(thread.join().expect("a thread ends by itself") > 20_000);
        }
        let _names = (std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1)), std::env::temp_dir());
        assert!(std::thread::available_parallelism().is_ok());
        // By posix_spawn, as drivers start the linker.
        assert!(Command::new("/bin/sh").args(["-c", "exit 0"]).status().expect("a shell").success());
        for locale in [c"", c"C.UTF-8", c"xx_XX"] {
            // SAFETY: the strings end with a zero; no other thread runs any more.
            unsafe { libc::setlocale(libc::LC_ALL, locale.as_ptr()) };
        }
        // SAFETY: strings that end with a zero, integers, and room for a time, which live during the calls.
        unsafe {
            for zone in [c"Europe/Berlin", c"Nowhere/Nowhere", c":/etc/shadow"] {
                libc::setenv(c"TZ".as_ptr(), zone.as_ptr(), 1);
                let (now, mut parts) = (libc::time(std::ptr::null_mut()), std::mem::zeroed());
                assert!(!libc::localtime_r(&now, &mut parts).is_null());
            }
            let _nobody = (libc::getpwuid(libc::getuid()), libc::getpwnam(c"root".as_ptr()));
            libc::syslog(libc::LOG_INFO, c"behind the wall".as_ptr());
            assert!(libc::sysconf(libc::_SC_NPROCESSORS_CONF) > 0);
            assert_eq!(libc::dlopen(c"libnonesuch.so".as_ptr(), libc::RTLD_NOW), std::ptr::null_mut());
            // A large block that grows would be moved by mremap.
            let mut block = libc::malloc(64 << 20);
            block.cast::<u8>().write(7);
            block = libc::realloc(block, 256 << 20);
            assert_eq!(block.cast::<u8>().read(), 7);
            libc::free(block);
        }
    }

    #[test]
    fn libraries_get_errors_behind_the_wall_and_nobody_is_killed() {
        if std::env::var_os(INSIDE).is_some() {
            let wall = std::env::var("TOMBOLO_ACCEL_TEST_WALL").expect("told");
            let wall: Wall = serde_json::from_str(&wall).expect("a wall");
            wall.enter().expect("confined");
            calls::filter(calls::Again::inside(0..0), None).expect("filtered");
            all_that_libraries_do();
            return;
        }
        let identity = Identity::here().expect("/proc");
        let wall = Wall { identity, memory: limits::WORKING, tasks: limits::tasks(1) };
        let told = serde_json::to_string(&wall).expect("JSON");
        // The thread that starts it has to live as long: this one.
        let name = "wall::tests::libraries_get_errors_behind_the_wall_and_nobody_is_killed";
        let arguments = ["test", "--exact", name, "--test-threads=1"].map(Into::into).to_vec();
        let (said, says) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let fd = std::os::fd::AsFd::as_fd(&says);
        let process = spawn::spawn(&spawn::Start {
            arguments,
            variables: &[(INSIDE, "1"), ("TOMBOLO_ACCEL_TEST_WALL", &told), ("RUST_BACKTRACE", "1")],
            descriptors: &[fd, fd, fd],
            nice: 0,
            namespaces: wall.namespaces(),
            cgroup: None,
        })
        .expect("a process");
        drop(says);
        let words = std::io::read_to_string(said).expect("text");
        assert!(process.wait().expect("waited for"), "{words}");
        assert!(words.contains("1 passed"), "{words}");
    }
}
