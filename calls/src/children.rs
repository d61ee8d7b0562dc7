// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that processes forked from this one don't keep. A peer learns by the end of a socket, or of a device's file, that this process
//! has gone; a child with a copy would hide that from it for as long as the child lives.
//!
//! In a child of fork(3) each such descriptor becomes one of nothing (an eventfd) under the same number, so that its owner may still close
//! it. Children of vfork and posix_spawn close it when they execute a program; those of a bare clone(2) keep it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// A place for one descriptor in the list of all. Places are reused and never freed, so that a child can go through them in the state in which
/// some thread of its parent left them.
struct Place {
    fd: AtomicI32,
    next: *const Place,
}

const EMPTY: i32 = -1;
static PLACES: AtomicPtr<Place> = AtomicPtr::new(null_mut());

fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place that was leaked by take_place().
    let at = |p: *const Place| unsafe { p.as_ref() };
    std::iter::successors(at(PLACES.load(Ordering::Acquire)), move |place| at(place.next))
}

fn take_place(fd: RawFd) -> &'static Place {
    let take = |p: &&Place| p.fd.compare_exchange(EMPTY, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if let Some(place) = places().find(take) {
        return place;
    }
    let place = Box::leak(Box::new(Place { fd: AtomicI32::new(fd), next: null_mut() }));
    let mut first = PLACES.load(Ordering::Acquire);
    loop {
        place.next = first;
        match PLACES.compare_exchange(first, place, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return place,
            Err(now) => first = now,
        }
    }
}

/// Runs in a child before fork returns there: system calls only.
extern "C" fn in_child() {
    for place in places() {
        let fd = place.fd.load(Ordering::Acquire);
        if fd == EMPTY {
            continue;
        }
        // SAFETY: integers only; the descriptors are of this list's owners, who do nothing with them in a child but close them.
        unsafe {
            let nothing = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if nothing < 0 || libc::dup3(nothing, fd, libc::O_CLOEXEC) < 0 {
                libc::close(fd);
            }
            if nothing >= 0 {
                libc::close(nothing);
            }
        }
    }
}

fn handle_forks() -> io::Result<()> {
    static HANDLED: OnceLock<libc::c_int> = OnceLock::new();
    // SAFETY: a function that lives as long as this library.
    match *HANDLED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(in_child)) }) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// A descriptor that is none any more in processes forked from this one.
pub struct NotInChildren {
    fd: OwnedFd,
    place: &'static Place,
}

// SAFETY: of a place only the atomic is used after it was published.
unsafe impl Send for NotInChildren {}
// SAFETY: as above.
unsafe impl Sync for NotInChildren {}

impl NotInChildren {
    /// Takes a descriptor.
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<NotInChildren> {
        handle_forks()?;
        let fd = fd.into();
        let place = take_place(fd.as_raw_fd());
        Ok(NotInChildren { fd, place })
    }

    /// A second descriptor of the same kind.
    pub fn try_clone(&self) -> io::Result<NotInChildren> {
        NotInChildren::new(self.fd.try_clone()?)
    }
}

impl Drop for NotInChildren {
    fn drop(&mut self) {
        // Before another descriptor can get its number.
        self.place.fd.store(EMPTY, Ordering::Release);
    }
}

impl AsRawFd for NotInChildren {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for NotInChildren {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_child_that_lives_on_does_not_keep_its_parents_sockets() {
        let (peer, own) = UnixStream::pair().expect("a pair");
        let own = NotInChildren::new(own).expect("kept");
        let copy = own.try_clone().expect("a copy");
        let (waits, ends) = UnixStream::pair().expect("a pair");
        // SAFETY: the child makes system calls only.
        let child = unsafe {
            match libc::fork() {
                0 => {
                    // Until its parent ends or says so.
                    libc::close(ends.as_raw_fd());
                    libc::close(peer.as_raw_fd());
                    libc::read(waits.as_raw_fd(), [0_u8; 1].as_mut_ptr().cast(), 1);
                    libc::_exit(0)
                }
                child => child,
            }
        };
        drop(waits);
        // The parent still has them.
        peer.set_nonblocking(true).expect("set");
        let here = (&peer).read(&mut [0]).expect_err("the peer is there");
        assert_eq!(here.kind(), io::ErrorKind::WouldBlock);
        drop((own, copy));
        peer.set_nonblocking(false).expect("set");
        // The end comes though the child lives: it waits for what is dropped after this.
        assert_eq!((&peer).read(&mut [0]).expect("an end"), 0);
        drop(ends);
        let mut status = -1;
        // SAFETY: room for a status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
