// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signals as a descriptor: blocked in the whole process, read where it suits, unblocked again in children.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Blocked signals that can be polled and read.
pub struct Signals {
    fd: OwnedFd,
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set it is given; sigaddset gets an initialized set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

impl Signals {
    /// Blocks `signals` in this thread and every thread it starts from now on; call it before there are others.
    pub fn block(signals: &[i32]) -> io::Result<Self> {
        let set = set_of(signals);
        // SAFETY: `set` is initialized; the old mask is not asked for.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: `set` is initialized; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd just returned this descriptor, and no other part of the program has it.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Waits for the next signal and takes it.
    pub fn next(&self) -> io::Result<i32> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut info))?;
        // ssi_signo is the first field, 32 bits (signalfd(2)).
        let number = u32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        i32::try_from(number).map_err(io::Error::other)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Asks the kernel for SIGIO in this process whenever the state of `fd` changes.
pub fn signal_changes(fd: &impl AsRawFd) -> io::Result<()> {
    let raw = fd.as_raw_fd();
    // SAFETY: fcntl on a descriptor that is open as long as `fd` is borrowed, with integer arguments only.
    let result = unsafe {
        let flags = libc::fcntl(raw, libc::F_GETFL);
        if libc::fcntl(raw, libc::F_SETOWN, libc::getpid()) < 0 {
            -1
        } else {
            libc::fcntl(raw, libc::F_SETFL, flags | libc::O_ASYNC | libc::O_NONBLOCK)
        }
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The parent of a child, which decides when the kernel ends the child. Set between fork and exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildOf {
    /// A session of its own; it lives on when we end.
    None,
    /// A session of its own; the kernel ends it when we end, however we end.
    Us,
    /// A session of its own, with standard input as its controlling terminal.
    Terminal,
}

/// Sets up `command`, a helper that is waited for, so that its child starts with no signal blocked and ends when we end: a terminal's Ctrl-C
/// reaches it as it reaches us.
pub fn follow(command: &mut Command) {
    let before_exec = || {
        let none = set_of(&[]);
        // SAFETY: the mask is initialized; this is async-signal-safe.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) };
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
        Ok(())
    };
    // SAFETY: the closure makes only system calls that are async-signal-safe and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
}

/// Sets up `command` so that its child starts with no signal blocked, in a session of its own.
pub fn detach(command: &mut Command, child_of: ChildOf) {
    let before_exec = move || {
        let none = set_of(&[]);
        // SAFETY: the mask is initialized; this is async-signal-safe.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) };
        rustix::process::setsid()?;
        match child_of {
            ChildOf::None => Ok(()),
            ChildOf::Us => {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                Ok(())
            }
            ChildOf::Terminal => {
                // SAFETY: standard input is open (the caller gave the child a terminal there); no pointer is passed.
                if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            }
        }
    };
    // SAFETY: the closure makes only system calls that are async-signal-safe and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
}
