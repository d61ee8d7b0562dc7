// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ends of files that clients pass along. A client may send descriptors over its Unix socket. A server that takes none reads without room for them, so the kernel drops
//! them in the thread that reads past them, or that closes the socket in which they lie. If they are the last of their file, that thread carries out the
//! file's end, which takes as long as the client said: that of a TCP socket with SO_LINGER, whose peer reads nothing, takes hours.
//!
//! The kernel ends such a wait when a signal comes. So a timer sends signals to a thread while it may be in one. It doesn't help a server that takes descriptors (recvmsg with
//! room for them): closing a file of FUSE that this process has a number for waits for that file's server, whatever signals come.
//!
//! - [`within`] reads what a client sends, [`Brief`] owns the socket
//! - [`child`] is for processes that a server starts
//! - [`aside`] is a thread for ends that are much work
//! - [`endless`] makes such files, for tests

#![deny(missing_docs)]

pub mod aside;
pub mod child;
pub mod endless;

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::time::Duration;

/// It is handled by a function that does nothing: a signal that is ignored ends no wait.
const SIGNAL: libc::c_int = libc::SIGUSR1;
/// Longer than it takes to close a socket, and short enough for a thread that serves all clients.
pub const A_MOMENT: Duration = Duration::from_millis(1);

extern "C" fn nothing(_signal: libc::c_int) {}

/// Lets signals through to this thread. A program may have started this one with any of them blocked.
fn let_through() {
    static HANDLED: Once = Once::new();
    // SAFETY: plain data, for which zeroes are values, that lives during the calls; a handler that does nothing may run at any time.
    unsafe {
        HANDLED.call_once(|| {
            let mut how: libc::sigaction = std::mem::zeroed();
            how.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            how.sa_flags = libc::SA_RESTART;
            libc::sigaction(SIGNAL, &how, std::ptr::null_mut());
        });
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, SIGNAL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
    }
}

/// A timer that sends signals to the thread that made it.
struct Timer(libc::timer_t);

impl Timer {
    /// None: the kernel has no timer left for this user.
    fn every(interval: Duration) -> Option<Timer> {
        let part =
            libc::timespec { tv_sec: interval.as_secs() as _, tv_nsec: interval.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: part, it_value: part };
        // SAFETY: plain data, for which zeroes are values, that lives during the calls.
        unsafe {
            let (mut event, mut timer): (libc::sigevent, libc::timer_t) = std::mem::zeroed();
            event.sigev_signo = SIGNAL;
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_notify_thread_id = libc::gettid();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) < 0 {
                return None;
            }
            let timer = Timer(timer);
            libc::timer_settime(timer.0, 0, &times, std::ptr::null_mut());
            Some(timer)
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: made by every(), and deleted here only.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Does something that may end files of clients: no such end waits for much longer than `most`. Calls that `run` makes may be interrupted (EINTR).
pub fn within<T>(most: Duration, run: impl FnOnce() -> T) -> T {
    let_through();
    let _timer = Timer::every(most);
    run()
}

/// Something that owns a descriptor behind which there may be files of clients: dropping it takes a moment, whatever those are.
#[derive(Debug)]
pub struct Brief<T = OwnedFd>(ManuallyDrop<T>);

impl<T> From<T> for Brief<T> {
    fn from(owner: T) -> Brief<T> {
        Brief(ManuallyDrop::new(owner))
    }
}

impl<T> Deref for Brief<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Brief<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: AsFd> AsFd for Brief<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T> Drop for Brief<T> {
    fn drop(&mut self) {
        // SAFETY: dropped here only.
        within(A_MOMENT, || unsafe { ManuallyDrop::drop(&mut self.0) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_file_whose_end_takes_hours_holds_up_neither_who_reads_past_it_nor_who_closes_its_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = Brief::from(ours);
        let (read, others) = endless::lingering().unwrap();
        endless::pass(&theirs, b"T", read).unwrap();
        let (left, and_others) = endless::lingering().unwrap();
        endless::pass(&theirs, b"T", left).unwrap();
        assert_eq!(within(A_MOMENT, || (&*ours).read(&mut [0; 1])).unwrap(), 1);
        drop(ours);
        drop((others, and_others));
    }
}
