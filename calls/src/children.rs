// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that processes forked from this one don't keep. A peer learns by the end of a socket, or of a device's file, that this process
//! has gone; a child with a copy would hide that from it for as long as the child lives.
//!
//! In a child of fork(3) each such descriptor becomes one of nothing (an eventfd) under the same number, so that its owner may still close
//! it. Children of vfork and posix_spawn close it when they execute a program; those of a bare clone(2) keep it.
//!
//! A number may come to name another file behind its owner's back: a program that becomes a daemon closes all numbers and opens files of its own. So a
//! number is replaced, and closed by its owner, only while it still names the file that the owner took.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

/// A place for one descriptor in the list of all. Places are reused and never freed, so that a child can go through them in the state in which
/// some thread of its parent left them.
struct Place {
    /// [`EMPTY`], [`TAKEN`], or the descriptor's number; with a number, the file is that descriptor's.
    fd: AtomicI32,
    file: [AtomicU64; 2],
    next: *const Place,
}

const EMPTY: i32 = -1;
/// An owner has the place, and writes down what its descriptor is.
const TAKEN: i32 = -2;
static PLACES: AtomicPtr<Place> = AtomicPtr::new(null_mut());

fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place that was leaked by take_place().
    let at = |p: *const Place| unsafe { p.as_ref() };
    std::iter::successors(at(PLACES.load(Ordering::Acquire)), move |place| at(place.next))
}

/// The file that a number names: device and inode, which no two sockets, memory files or nodes of devices share. None: it names nothing.
fn file_of(fd: RawFd) -> Option<[u64; 2]> {
    // SAFETY: numbers only, for which zeroes are values.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: room for what the kernel tells; it is a system call alone, as a child before fork returns may make.
    let asked = unsafe { libc::fstat(fd, &mut found) };
    (asked == 0).then_some([found.st_dev, found.st_ino])
}

impl Place {
    /// The number, if it still names the file that was taken.
    fn descriptor(&self) -> Option<RawFd> {
        let fd = self.fd.load(Ordering::Acquire);
        let file = self.file.each_ref().map(|word| word.load(Ordering::Relaxed));
        (fd >= 0 && file_of(fd) == Some(file)).then_some(fd)
    }
}

fn take_place() -> &'static Place {
    let take = |p: &&Place| p.fd.compare_exchange(EMPTY, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if let Some(place) = places().find(take) {
        return place;
    }
    let (fd, file) = (AtomicI32::new(TAKEN), [const { AtomicU64::new(0) }; 2]);
    let place = Box::leak(Box::new(Place { fd, file, next: null_mut() }));
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
    for fd in places().filter_map(Place::descriptor) {
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
    fd: ManuallyDrop<OwnedFd>,
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
        let file = file_of(fd.as_raw_fd()).ok_or_else(io::Error::last_os_error)?;
        let place = take_place();
        place.file.iter().zip(file).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        place.fd.store(fd.as_raw_fd(), Ordering::Release);
        Ok(NotInChildren { fd: ManuallyDrop::new(fd), place })
    }

    /// A second descriptor of the same kind.
    pub fn try_clone(&self) -> io::Result<NotInChildren> {
        NotInChildren::new(self.as_fd().try_clone_to_owned()?)
    }
}

impl Drop for NotInChildren {
    fn drop(&mut self) {
        let is_own = self.place.descriptor().is_some();
        // Before another descriptor can get its number.
        self.place.fd.store(EMPTY, Ordering::Release);
        if is_own {
            // SAFETY: dropped here only.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
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

    /// Waits for a child of this test; how it ended.
    fn ended(child: libc::pid_t) -> i32 {
        let mut status = -1;
        // SAFETY: room for a status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        libc::WEXITSTATUS(status)
    }

    /// Runs something in a child of fork, which makes system calls only; what it returned.
    fn in_fork(run: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child makes system calls only, and leaves.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child.
            0 => unsafe { libc::_exit(run()) },
            child => ended(child),
        }
    }

    #[test]
    fn a_number_that_names_another_file_by_now_is_neither_replaced_in_later_forks_nor_closed() {
        let (_peer, own) = UnixStream::pair().expect("a pair");
        let own = NotInChildren::new(own).expect("kept");
        let (number, null) = (own.as_raw_fd(), std::fs::File::open("/dev/null").expect("a node"));
        let is_null = || file_of(number) == file_of(null.as_raw_fd());
        let reuse = || {
            // SAFETY: numbers only. Programs that become daemons do the same to all numbers.
            unsafe { (libc::close(number), libc::dup2(null.as_raw_fd(), number)).1 == number }
        };
        // By a child, whose own children have its files.
        let in_child = || {
            let gone = !is_null() && reuse() && is_null();
            if gone { in_fork(|| i32::from(is_null())) } else { 2 }
        };
        assert_eq!(in_fork(in_child), 1, "a grandchild has lost a file of its parent");
        // By the owner's process.
        assert!(reuse());
        assert_eq!(in_fork(|| i32::from(is_null())), 1, "a child has lost a file of its parent");
        drop(own);
        assert!(is_null(), "another owner's descriptor was closed");
        // SAFETY: the copy that was made here.
        unsafe { libc::close(number) };
    }
}
