// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The other end of a connection, as the kernel knows it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The process that connected, or that listens where this one has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number. `None`: it lives in a PID namespace that this process doesn't see, as one of another container does. (`rustix` has no room for that in its own structure:
    /// there the answer becomes an error.)
    pub process: Option<u32>,
    /// Its user.
    pub user: u32,
}

/// Asks who is at the other end of a Unix socket.
///
/// # Errors
/// It is no Unix socket.
pub fn of(socket: &impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: the structure is the one that this option gives, of plain numbers.
    unsafe { ask(socket, libc::SO_PEERCRED, &mut found) }?;
    Ok(Peer { process: u32::try_from(found.pid).ok().filter(|number| *number > 0), user: found.uid })
}

/// Returns a pidfd of the process at the other end of a Unix socket, in whatever PID namespace it lives.
///
/// # Errors
/// The kernel is older than Linux 6.5, or the process is gone.
pub fn pidfd(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    // SAFETY: the option gives a number, of a descriptor that the kernel has just made for this process.
    unsafe {
        ask(socket, libc::SO_PEERPIDFD, &mut fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Reads a socket's option.
///
/// # Safety
/// Any bytes that the kernel gives for this option are a value of `T`.
unsafe fn ask<T>(socket: &impl AsFd, option: libc::c_int, found: &mut T) -> io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (fd, at) = (socket.as_fd().as_raw_fd(), (&raw mut *found).cast());
    // SAFETY: room for as many bytes as are said.
    if unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, at, &mut len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_has_its_number_and_user() {
        let (one, _other) = UnixStream::pair().unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(of(&one).unwrap(), Peer { process: Some(std::process::id()), user });
    }

    #[test]
    fn a_peer_of_a_pid_namespace_that_is_not_seen_has_a_user_and_no_number() {
        let (one, _other) = UnixStream::pair().unwrap();
        // Others than root need a user namespace for that, in which no user has a name.
        let is_root = rustix::process::geteuid().is_root();
        let namespaces = libc::CLONE_NEWPID | if is_root { 0 } else { libc::CLONE_NEWUSER };
        let ends = |run: &dyn Fn() -> libc::c_int| {
            let mut status = 0;
            // SAFETY: the child makes system calls only; room for a status.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(run());
                }
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
            }
            libc::WEXITSTATUS(status)
        };
        let look = || match of(&one) {
            Ok(Peer { process: None, user }) => libc::c_int::from(is_root && user != 0),
            Ok(_) => 2,
            Err(_) => 3,
        };
        // SAFETY: a number.
        let result = ends(&|| if unsafe { libc::unshare(namespaces) } < 0 { 4 } else { ends(&look) });
        assert_eq!(result, 0);
    }
}
