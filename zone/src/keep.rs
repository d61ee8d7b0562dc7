// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File descriptors that a process keeps when it becomes another program by execve(2), which closes all others.
//!
//! The old program notes each descriptor in a [`Keep`] and hands their numbers over; the new one [takes](Kept::take) each once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use serde::{Deserialize, Serialize};

/// The descriptors that are to be kept.
#[derive(Debug, Default)]
pub struct Keep(Vec<RawFd>);

/// The number of a descriptor that is kept.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kept(RawFd);

impl Keep {
    /// Notes a descriptor, which must stay open until the execve.
    pub fn add(&mut self, fd: &impl AsFd) -> Kept {
        let number = fd.as_fd().as_raw_fd();
        self.0.push(number);
        Kept(number)
    }

    /// Notes all that `other` has noted.
    pub fn extend(&mut self, other: Keep) {
        self.0.extend(other.0);
    }

    /// Sets whether an execve keeps them from now on.
    ///
    /// # Errors
    /// When one of them is not open.
    pub fn set(&self, kept: bool) -> io::Result<()> {
        self.0.iter().try_for_each(|fd| set_close_on_exec(*fd, !kept))
    }
}

impl Kept {
    /// Returns whether the descriptor is open.
    pub fn is_open(&self) -> bool {
        // SAFETY: the call reads a flag of a descriptor, whichever it is.
        unsafe { libc::fcntl(self.0, libc::F_GETFD) >= 0 }
    }

    /// The descriptor itself; children do not inherit it.
    ///
    /// # Errors
    /// When it is not open.
    pub fn take(self) -> io::Result<OwnedFd> {
        set_close_on_exec(self.0, true)?;
        // SAFETY: it is open, and the program that this process was before has left it to this one. A `Kept` can't be copied.
        Ok(unsafe { OwnedFd::from_raw_fd(self.0) })
    }
}

fn set_close_on_exec(fd: RawFd, closes: bool) -> io::Result<()> {
    // SAFETY: the call sets a flag of a descriptor and touches no memory.
    match unsafe { libc::fcntl(fd, libc::F_SETFD, if closes { libc::FD_CLOEXEC } else { 0 }) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_inherited_only_while_it_is_kept() {
        let file = tempfile::tempfile().unwrap();
        let inherited = || {
            let link = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::process::Command::new("test").args(["-e", &link]).status().unwrap().success()
        };
        let mut keep = Keep::default();
        let kept = keep.add(&file);
        assert!(kept.is_open() && !inherited());
        keep.set(true).unwrap();
        assert!(inherited());
        keep.set(false).unwrap();
        assert!(!inherited());
    }

    #[test]
    fn a_descriptor_that_is_not_open_can_not_be_taken() {
        assert!(!Kept(1_000_000).is_open());
        assert_eq!(Kept(1_000_000).take().unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
