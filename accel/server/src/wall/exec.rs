// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that a worker executes. Drivers have processes of their own execute compilers and linkers. A thread of the worker itself that executed a program would put that in the worker's
//! place, and the kernel forgets with the worker's first thread that the process is to end with its server (PR_SET_PDEATHSIG is a thread's).
//!
//! A filter doesn't know which process makes a call, so it has the kernel ask the supervisor (SECCOMP_RET_USER_NOTIF). Without a supervisor these calls fail.

use anyhow::Context;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use seccompiler::sock_filter;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A supervisor's thread rests so long after each answer: a process that asks for a program that isn't there pays less for a question than the answer costs.
const REST: Duration = Duration::from_millis(5);

/// The supervisor's end: the questions of one worker.
pub struct Executions {
    /// A socket by which the worker passes the descriptor of the questions, then that descriptor.
    fd: OwnedFd,
    are_heard: bool,
}

/// Asks the supervisor at the other end of this socket about each program that this process, or one that it starts, executes from now on. For a process that has one thread, after
/// no_new_privs.
///
/// A process whose calls another program judges in this way already, as some container managers do, can't ask a second one: it goes on, and nothing is passed.
pub fn ask(supervisor: OwnedFd) -> anyhow::Result<()> {
    let listener = match listen() {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
        listener => listener.context("seccomp with a listener")?,
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let passed = [listener.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&passed));
    rustix::net::sendmsg(&supervisor, &[IoSlice::new(b"E")], &mut control, SendFlags::NOSIGNAL)
        .context("the supervisor's socket")?;
    Ok(())
}

/// Has the kernel stop this process, and those that it starts, at each execution until it is judged.
fn listen() -> io::Result<OwnedFd> {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    let line = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    // The calls of other ABIs are refused by the filters that come later.
    let lines = [
        line(LOAD, 0, 0, 0), // the number of the call
        line(EQUAL, 2, 0, libc::SYS_execve as u32),
        line(EQUAL, 1, 0, libc::SYS_execveat as u32),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        line(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_ptr().cast_mut().cast() };
    // SAFETY: the program lives during the call, and its lines are of the kernel's shape.
    let fd = unsafe {
        let (set, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
        libc::syscall(libc::SYS_seccomp, set, flags, &raw const program)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is fresh.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

impl Executions {
    /// The supervisor's end, and the socket for the worker.
    pub fn new() -> io::Result<(Executions, OwnedFd)> {
        let (own, workers) = UnixStream::pair()?;
        Ok((Executions { fd: own.into(), are_heard: false }, workers.into()))
    }

    /// Takes what has come, when poll(2) tells of these events: first the descriptor of the questions, then a question.
    ///
    /// # Errors
    /// No process is left that could ask, or the worker asks nothing.
    pub fn hear(&mut self, events: libc::c_short, worker: u32) -> io::Result<()> {
        if events & libc::POLLIN == 0 {
            // The end comes before the kernel has taken the worker's memory apart, and stays; older kernels (before Linux 6.11) would wait here for a question.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if self.are_heard {
            return self.answer(worker);
        }
        self.fd = self.passed()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.are_heard = true;
        Ok(())
    }

    fn passed(&self) -> io::Result<Option<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(&mut [0])], &mut control, flags)?;
        Ok(control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut passed) => passed.next(),
            _ => None,
        }))
    }

    /// Lets all processes but the worker itself execute what they want. For a thread that looks after this worker alone.
    fn answer(&self, worker: u32) -> io::Result<()> {
        // SAFETY: plain integers, for which zeroes are values.
        let (mut asked, mut answer): (libc::seccomp_notif, libc::seccomp_notif_resp) =
            unsafe { std::mem::zeroed() };
        // SAFETY: room for a question.
        if unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) } < 0 {
            return unless_gone();
        }
        answer.id = asked.id;
        // The thread waits for the answer, so its number stays its own; and one that the kernel does not show (0) is refused.
        // SAFETY: integers; without a signal the kernel only looks.
        let looked = unsafe { libc::syscall(libc::SYS_tgkill, worker, asked.pid, 0) };
        if looked < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) {
            answer.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        } else {
            answer.error = -libc::EPERM;
        }
        // SAFETY: an answer that lives during the call.
        let sent =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
        if sent < 0 {
            unless_gone()?;
        }
        std::thread::sleep(REST);
        Ok(())
    }
}

/// The last error, unless it says that the process that asked was killed meanwhile.
fn unless_gone() -> io::Result<()> {
    match io::Error::last_os_error() {
        e if [Some(libc::ENOENT), Some(libc::EINTR)].contains(&e.raw_os_error()) => Ok(()),
        e => Err(e),
    }
}

impl AsFd for Executions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Executions {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::fs::Timespec;

    /// The events of what a worker asks by, of which there is one within ten seconds.
    fn events(of: &Executions) -> libc::c_short {
        let mut fds = [PollFd::new(of, PollFlags::IN)];
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
        fds[0].revents().bits() as libc::c_short
    }

    #[test]
    fn the_end_of_the_last_process_that_could_ask_is_told_once() {
        let (mut executions, workers) = Executions::new().unwrap();
        // A thread's filter ends with it.
        let asker = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            ask(workers).unwrap();
        });
        executions.hear(events(&executions), std::process::id()).expect("the descriptor of the questions");
        asker.join().unwrap();
        assert!(executions.hear(events(&executions), std::process::id()).is_err());
    }
}
