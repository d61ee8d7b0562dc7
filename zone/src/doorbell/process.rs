// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The process at the other end of a doorbell's connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tombolo_brief::Brief;

/// The most descriptors of a process that are looked at. QEMU opens a zone among its first.
const LOOKED_AT: usize = 4096;

/// A process of this host that has connected, held by a pidfd: its number can't come to mean another process.
#[derive(Debug)]
pub struct Process {
    /// `None`: it lives in a PID namespace that this process doesn't see.
    number: Option<u32>,
    fd: OwnedFd,
}

impl Process {
    /// Returns the process that made the other end of `stream`. `None`: the kernel can't tell (a process of another PID namespace, before Linux 6.5), or it has
    /// ended; another one may have the connection then.
    ///
    /// # Errors
    /// This process has no descriptor left for it, say: it may live, and its end would not be seen.
    pub fn of(stream: &UnixStream) -> io::Result<Option<Process>> {
        let number = tombolo_listen::peer::of(stream)?.process;
        let pid = number.and_then(|number| Pid::from_raw(i32::try_from(number).ok()?));
        let (opened, by_number) = match (tombolo_listen::peer::pidfd(stream), pid) {
            // Before Linux 6.5.
            (Err(e), Some(pid)) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                (pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from), true)
            }
            (opened, _) => (opened, false),
        };
        let fd = match opened {
            Ok(fd) => fd,
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                return Err(e);
            }
            Err(_) => return Ok(None),
        };
        let process = Process { number, fd };
        // While the connection stands, the process that made it has hardly ended, and its number is no other's.
        let may_be_another = by_number
            && loop {
                if let Some(hung_up) = has_hung_up(stream) {
                    break hung_up;
                }
            };
        // One that has not ended by now had this number.
        Ok((!may_be_another && !process.has_ended()).then_some(process))
    }

    /// Its number. `None`: it lives in a PID namespace that this process doesn't see.
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Returns whether it has ended.
    pub fn has_ended(&self) -> bool {
        ready(self.fd.as_fd(), PollFlags::IN) == Some(true)
    }

    /// Returns copies of the descriptors by which the process has this file open.
    ///
    /// # Errors
    /// This process may not have them (ptrace(2), 'Ptrace access mode checking').
    pub fn descriptors_of(&self, file: BorrowedFd<'_>) -> io::Result<Vec<Brief>> {
        let number = self.number.ok_or_else(|| io::Error::other("it is in another PID namespace"))?;
        crate::door::check_proc()?;
        let wanted = identity(file, c"", AtFlags::EMPTY_PATH)?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/{number}/fd"))?.take(LOOKED_AT) {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
            if identity(CWD, &path, AtFlags::empty()) != Ok(wanted) {
                continue;
            }
            match pidfd_getfd(&self.fd, name, PidfdGetfdFlags::empty()).map(Brief::from) {
                // It may have put another file there meanwhile.
                Ok(fd) if identity(&fd, c"", AtFlags::EMPTY_PATH) == Ok(wanted) => found.push(fd),
                Ok(_) | Err(Errno::BADF) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(found)
    }
}

/// Returns whether nobody has the other end of a connection any more. `None`: interrupted.
pub(super) fn has_hung_up(stream: &UnixStream) -> Option<bool> {
    ready(stream.as_fd(), PollFlags::RDHUP)
}

/// A file's device and number. No file system is asked, which could keep this process waiting.
fn identity(
    at: impl AsFd,
    path: impl rustix::path::Arg,
    how: AtFlags,
) -> rustix::io::Result<(u32, u32, u64)> {
    let of = rustix::fs::statx(at, path, how | AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((of.stx_dev_major, of.stx_dev_minor, of.stx_ino))
}

/// Returns whether one of `events`, or an error, is there now. `None`: interrupted.
fn ready(fd: BorrowedFd<'_>, events: PollFlags) -> Option<bool> {
    let mut polled = [PollFd::from_borrowed_fd(fd, events)];
    poll(&mut polled, Some(&rustix::time::Timespec::default())).ok().map(|n| n > 0)
}
