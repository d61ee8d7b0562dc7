// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files whose end takes hours, and how a client passes them along: for tests of servers.

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Most descriptors in a message (SCM_MAX_FD).
pub const MOST: usize = 253;

/// A connection whose end waits for hours, and its other end, which has no room for more, and reads nothing.
///
/// # Errors
/// No descriptors are left.
pub fn lingering() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    let hours = libc::linger { l_onoff: 1, l_linger: 30_000 };
    // SAFETY: the structure lives during the call, and its size is given.
    let set = unsafe {
        let (at, len) = ((&raw const hours).cast(), size_of_val(&hours) as libc::socklen_t);
        libc::setsockopt(own.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, len)
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    own.set_nonblocking(true)?;
    let mut fd = libc::pollfd { fd: own.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: the structure lives during the call.
    while unsafe { libc::poll(&mut fd, 1, 500) } > 0 {
        while (&own).write(&[0; 65536]).is_ok() {}
    }
    Ok((own, other))
}

/// Sends a descriptor, the last one of its file, [`MOST`] times with these bytes. The server must stand still meanwhile: else this thread may be the last to close it.
///
/// # Errors
/// The kernel's.
pub fn pass(to: &UnixStream, bytes: &[u8], passed: TcpStream) -> io::Result<()> {
    let fds = [passed.as_raw_fd(); MOST];
    let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // Aligned for a header; room for one and for the descriptors.
    let mut control = [0_u64; 2 + MOST.div_ceil(2)];
    // SAFETY: plain data, for which zeroes are values; the pointers lead to what lives during the calls, and as many bytes as are said.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of_val(&fds) as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of_val(&fds) as u32) as _;
        std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
        libc::sendmsg(to.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
