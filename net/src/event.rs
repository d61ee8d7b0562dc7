// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event descriptors and waiting for several of them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};

use rustix::event::EventfdFlags;

/// An eventfd that doesn't block.
#[derive(Debug)]
pub struct Event(File);

impl Event {
    /// A new one.
    ///
    /// # Errors
    /// None are left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?.into()))
    }

    /// Makes it readable.
    pub fn raise(&self) {
        // A full counter is readable already.
        let _full = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Makes it unreadable; returns whether it was readable.
    pub fn clear(&self) -> bool {
        (&self.0).read(&mut [0; 8]).is_ok()
    }

    /// Duplicates the descriptor as a file, for other users.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn to_file(&self) -> io::Result<File> {
        self.0.try_clone()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Checks that a descriptor that a peer sent is an eventfd, and makes it non-blocking. Others may block: a file when it is written, and a
/// set of descriptors (epoll) when it is polled, as long as the file systems of the files in it want.
///
/// # Errors
/// It is another kind of descriptor.
pub fn check_peer_event(file: &File) -> io::Result<()> {
    let other = || io::Error::other("the descriptor sent for a queue is not an eventfd");
    // SAFETY: an all-zero statx is a valid value to be filled in; the descriptor is open, and the name empty.
    unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        // Cached values only: the file system that would be asked may never answer.
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
        if libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, &raw mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        if u32::from(stat.stx_mode) & libc::S_IFMT != 0 {
            return Err(other());
        }
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        if flags < 0 || libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // An eventfd takes a zero at any time, and stays as it is. Of the other anonymous files none that a worker could be held up by
    // can be written.
    match (&*file).write(&0u64.to_ne_bytes()) {
        Ok(8) => Ok(()),
        _ => Err(other()),
    }
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll(File);

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a new descriptor of our own.
        unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(File::from_raw_fd(fd)))
        }
    }

    /// Adds a descriptor. It wakes if it is readable now, and by each later event, so that no thread has to read it.
    ///
    /// # Errors
    /// It can't be waited for.
    pub fn add(&self, fd: RawFd) -> io::Result<()> {
        self.add_for(fd, libc::EPOLLIN | libc::EPOLLET)
    }

    /// Adds a descriptor whose later events wake, also that there is room for writing.
    ///
    /// # Errors
    /// It can't be waited for.
    pub fn add_both_ways(&self, fd: RawFd) -> io::Result<()> {
        self.add_for(fd, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET)
    }

    fn add_for(&self, fd: RawFd, events: i32) -> io::Result<()> {
        let events = events as u32;
        let mut event = libc::epoll_event { events, u64: fd as u64 };
        // SAFETY: both descriptors are open, and event is ours.
        if unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } != 0 {
            let err = io::Error::last_os_error();
            // The same descriptor for two queues wakes for both.
            return if err.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(err) };
        }
        Ok(())
    }

    /// Waits until something happens, at most `timeout_ms` (negative: for ever). Returns how many events.
    ///
    /// # Errors
    /// The kernel's; an interruption counts as no event.
    pub fn wait(&self, timeout_ms: i32) -> io::Result<usize> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: events has room for 16.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 16, timeout_ms) };
        if n < 0 {
            let err = io::Error::last_os_error();
            return if err.kind() == io::ErrorKind::Interrupted { Ok(0) } else { Err(err) };
        }
        Ok(n as usize)
    }
}
