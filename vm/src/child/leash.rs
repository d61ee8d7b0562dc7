// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A leash has the kernel kill a QEMU, and all that a script has started beside it, when this process ends in any way. Another kind of leash has
//! the kernel continue stopped children then (SIGCONT), so that they can end in good order.
//!
//! A [tied](super::tie) child alone dies with this process: its own children do not. And the kernel unties one that changes its user, as QEMU's option
//! `-runas` does, or becomes a program that has more rights than it had. A leash is a socket pair. The child has one end, for whose hang-up the kernel sends SIGKILL to the
//! process group that the child leads, or SIGCONT (fcntl(2), `O_ASYNC`); this process has the other one, on which it says nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Not in the crate libc (Linux, include/uapi/asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// This process's end. The process group at the other one is killed, or continued, when this is dropped.
#[derive(Debug)]
pub struct Leash(OwnedFd);

impl Leash {
    /// Puts the process group of `command`'s process, which must [lead one](super::shield), on a leash.
    ///
    /// # Errors
    /// When no descriptor can be had.
    pub fn put(command: &mut Command) -> io::Result<Leash> {
        Leash::with(command, libc::SIGKILL)
    }

    /// Makes `command`'s process the leader of a process group, which is continued when this process ends: a stopped one then hears the signal that it
    /// has got.
    ///
    /// # Errors
    /// When no descriptor can be had.
    pub fn to_wake(command: &mut Command) -> io::Result<Leash> {
        Leash::with(command.process_group(0), libc::SIGCONT)
    }

    /// Has the process group that the child leads get a signal.
    fn with(command: &mut Command, signal: libc::c_int) -> io::Result<Leash> {
        let (own, held) = UnixStream::pair()?;
        // SAFETY: between fork and exec only async-signal-safe system calls are made: fcntl, getpid; no allocation. The command keeps the descriptor open.
        unsafe {
            command.pre_exec(move || {
                let fd = held.as_raw_fd();
                let calls = [
                    (libc::F_SETFD, 0),
                    (libc::F_SETOWN, -libc::getpid()),
                    (F_SETSIG, signal),
                    (libc::F_SETFL, libc::O_ASYNC),
                ];
                for (call, argument) in calls {
                    if libc::fcntl(fd, call, argument) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Ok(Leash(own.into()))
    }

    /// The end that the program before has left.
    pub fn resume(own: OwnedFd) -> Leash {
        Leash(own)
    }
}

impl AsFd for Leash {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
