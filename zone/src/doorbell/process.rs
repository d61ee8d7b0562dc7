// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The process at the other end of a doorbell's connection: a VM lives as long as this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process of this host that has connected, held by a pidfd: its number can't come to mean another process.
#[derive(Clone, Debug)]
pub struct Process {
    /// `None`: it lives in a PID namespace that this process doesn't see.
    number: Option<u32>,
    /// `None`: it has no number, or its entry in /proc is hidden from this process (the mount option `hidepid`).
    started: Option<u64>,
    fd: Arc<OwnedFd>,
}

/// Number and start together name a process for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// The PID; the kernel may have given it to another process once this one has ended.
    pub pid: u32,
    /// When it was started, in the kernel's ticks since boot.
    pub started: u64,
}

/// One without a number equals only its own copies.
impl PartialEq for Process {
    fn eq(&self, other: &Process) -> bool {
        let is_same = match (self.started, other.started) {
            (Some(own), Some(others)) => own == others,
            // No two processes that live have one number.
            _ => !self.has_ended() && !other.has_ended(),
        };
        Arc::ptr_eq(&self.fd, &other.fd) || (self.number.is_some() && self.number == other.number && is_same)
    }
}

impl Eq for Process {}

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
            Ok(fd) => Arc::new(fd),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                return Err(e);
            }
            Err(_) => return Ok(None),
        };
        let process = Process { number, started: number.and_then(started), fd };
        // While the connection stands, the process that made it has hardly ended, and its number is no other's.
        let may_be_another = by_number
            && loop {
                if let Some(hung_up) = ready(stream.as_fd(), PollFlags::RDHUP, 0) {
                    break hung_up;
                }
            };
        // One that has not ended by now had this start.
        Ok((!may_be_another && !process.has_ended()).then_some(process))
    }

    /// Its number and start. `None`: this process can't see one of the two.
    pub fn name(&self) -> Option<Name> {
        Some(Name { pid: self.number?, started: self.started? })
    }

    /// Its number. `None`: it lives in a PID namespace that this process doesn't see.
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Waits until the process has ended.
    pub fn wait_ended(&self) {
        while ready(self.fd.as_fd(), PollFlags::IN, -1) != Some(true) {}
    }

    /// Returns whether it has ended.
    pub fn has_ended(&self) -> bool {
        ready(self.fd.as_fd(), PollFlags::IN, 0) == Some(true)
    }
}

/// The namespaces by which number and start of a process are to be read, in the kernel's words. `None`: /proc shows those of other ones.
pub fn namespaces() -> Option<String> {
    crate::door::check_proc().ok()?;
    let link = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
    let pid = link("pid")?;
    // Start times are shifted in a time namespace; a kernel that has none shifts none.
    let time = link("time").unwrap_or_default();
    Some(format!("{} {}", pid.display(), time.display()))
}

/// Returns whether the process lives that had this number and this start in this process's namespaces; `None`: this process can't tell.
pub fn lives(number: u32, start: u64) -> Option<bool> {
    let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        // No process's number, or by now that of a thread.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Some(false),
        Err(_) => return None,
    };
    // A process that has ended and waits for its parent: whichever it was.
    if ready(fd.as_fd(), PollFlags::IN, 0)? {
        return Some(false);
    }
    let now = started(number)?;
    Some(now == start)
}

/// Returns the start time of the process with this number; `None`: there is none.
pub fn started(pid: u32) -> Option<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses that may contain any characters; the start is the 22nd field.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // A process that has ended and waits for its parent.
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok()).flatten()
}

/// Waits at most `milliseconds` (-1: for ever) until one of `events`, or an error, is there. `None`: interrupted.
fn ready(fd: BorrowedFd<'_>, events: PollFlags, milliseconds: i32) -> Option<bool> {
    let limit = u32::try_from(milliseconds).ok().map(|ms| rustix::time::Timespec {
        tv_sec: i64::from(ms / 1000),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    });
    let mut polled = [PollFd::from_borrowed_fd(fd, events)];
    poll(&mut polled, limit.as_ref()).ok().map(|n| n > 0)
}
