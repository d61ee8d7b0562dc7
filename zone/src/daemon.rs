// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that outlive the command that starts them: a supervisor, a mount, the server of a zone.
//!
//! What such a process inherits it would keep for days. A lock that the command's caller has taken, or a pipe that it reads to its end, would never be
//! released, and a signal that the caller ignores or blocks would never be heard.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes `command`'s process one that outlives this one. `kept` are the only descriptors beside the standard ones that it has of this process.
pub fn detach(command: &mut Command, kept: &[BorrowedFd<'_>]) {
    let kept: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec only async-signal-safe system calls are made: setsid, sigaction, sigprocmask, close_range, fcntl; no allocation.
    // The descriptor is open there, as it is here.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            take_all_signals();
            close_all_at_exec();
            for kept in &kept {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*kept), rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
}

/// Makes the program a child of the host's first process, or of its subreaper, which reaps it. The process that `command` starts ends at once.
pub fn orphan(command: &mut Command) {
    // SAFETY: between fork and exec only async-signal-safe system calls are made: fork, _exit.
    unsafe {
        command.pre_exec(|| match libc::fork() {
            0 => Ok(()),
            child if child < 0 => Err(io::Error::last_os_error()),
            _ => libc::_exit(0),
        });
    }
}

/// Gives this thread's process the usual dispositions, and blocks no signal. Async-signal-safe.
fn take_all_signals() {
    const LAST: i32 = 64;
    // SAFETY: the process has no handlers, as it is about to become another program; the set is initialized before it is used.
    unsafe {
        for signal in 1..=LAST {
            // Some can't be changed, and have their usual one.
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Has the kernel close all descriptors but the standard ones at the next exec. Async-signal-safe.
fn close_all_at_exec() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the calls change flags of descriptors only, and set `limit`.
    unsafe {
        let flag = libc::CLOSE_RANGE_CLOEXEC;
        if libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, flag) == 0 {
            return;
        }
        // A kernel before 5.11, or a filter of system calls.
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        for number in 3..i32::try_from(limit.rlim_cur).unwrap_or(1 << 20) {
            libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
}
