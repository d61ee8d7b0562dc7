// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ivshmem protocol's messages: 8 bytes, little endian, some with a descriptor; eventfds; the shared page.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use uuid::Uuid;

use crate::format::TMB_DOORBELL_MAGIC;
use crate::{Error, Result};

/// The only protocol version there is.
pub const VERSION: i64 = 0;
/// Goes with the descriptor of the shared page.
pub const SHARED_MEMORY: i64 = -1;
const MESSAGE: usize = 8;

/// Room for one descriptor's control message, aligned as `cmsghdr` wants it.
#[repr(align(8))]
struct Control([u8; 64]);

/// Sends one message, with a descriptor or without. Never blocks (`WouldBlock` when the peer doesn't read), never raises SIGPIPE.
pub fn send(socket: &UnixStream, value: i64, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = value.to_le_bytes();
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: MESSAGE };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE computes; the header and the descriptor fit into the 64 bytes of `control`, which is aligned.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as _;
            libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(fd.as_raw_fd());
        }
    }
    // SAFETY: all pointers in `message` are valid for the call.
    let sent =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    match sent {
        8 => Ok(()),
        n if n < 0 => Err(io::Error::last_os_error()),
        n => Err(io::Error::new(io::ErrorKind::WriteZero, format!("{n} of 8 bytes sent"))),
    }
}

/// Receives one message. `Ok(None)`: the peer closed. Waits as the socket is set to; a message that is cut short is an error.
pub fn receive(socket: &UnixStream) -> io::Result<Option<(i64, Option<OwnedFd>)>> {
    let mut bytes = [0u8; MESSAGE];
    let mut have = 0;
    let mut received: Option<OwnedFd> = None;
    while have < MESSAGE {
        let mut iov = libc::iovec { iov_base: bytes[have..].as_mut_ptr().cast(), iov_len: MESSAGE - have };
        let mut control = Control([0; 64]);
        // SAFETY: msghdr is plain data for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len() as _;
        // SAFETY: all pointers in `message` are valid for the call.
        let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
        if n < 0 {
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::WouldBlock if have > 0 => return Err(cut_short()),
                _ => return Err(error),
            }
        }
        for fd in descriptors(&message) {
            // A second descriptor is dropped, which closes it.
            received.get_or_insert(fd);
        }
        match n {
            0 if have == 0 => return Ok(None),
            0 => return Err(cut_short()),
            n => have += n as usize,
        }
    }
    Ok(Some((i64::from_le_bytes(bytes), received)))
}

fn cut_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "a message was cut short")
}

/// Takes ownership of every descriptor that came with a message.
fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    // SAFETY: the kernel filled the control buffer; CMSG_* walk within msg_controllen, and each SCM_RIGHTS entry
    // holds descriptors that are now ours alone.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                for i in 0..bytes / size_of::<libc::c_int>() {
                    found.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    found
}

/// A non-blocking eventfd.
pub fn eventfd() -> Result<OwnedFd> {
    // SAFETY: no pointers; the descriptor is new and ours.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(Error::last_os("creating an eventfd"));
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Rings an eventfd. One that is full is rung already.
pub fn ring(fd: BorrowedFd<'_>) -> Result<()> {
    let one = 1u64.to_ne_bytes();
    // SAFETY: a valid descriptor and 8 readable bytes.
    if unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), 8) } == 8 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        e if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
        e => Err(Error::io("ringing a doorbell", e)),
    }
}

/// Takes the rings of an eventfd: whether there were any.
pub fn take_rings(fd: BorrowedFd<'_>) -> bool {
    let mut count = [0u8; 8];
    // SAFETY: a valid, non-blocking descriptor and 8 writable bytes.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
}

/// Waits until one of `fds` is readable or hung up; says which. `None`: for ever.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Option<std::time::Duration>) -> Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> =
        fds.iter().map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
    let millis = timeout.map_or(-1, |t| libc::c_int::try_from(t.as_millis()).unwrap_or(libc::c_int::MAX));
    // SAFETY: an array of valid pollfds of the given length.
    let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) };
    if n < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(Error::io("waiting for doorbells", error));
        }
        return Ok(vec![false; fds.len()]);
    }
    Ok(polled.iter().map(|p| p.revents != 0).collect())
}

/// The page that a doorbell device carries: which zone it belongs to. One per connection, since its member may write it; its size is
/// sealed, so that nobody can make its QEMU fault.
pub fn doorbell_page(zone: Uuid) -> Result<File> {
    let page = crate::backing::sealed_memfd("doorbell", 4096, 0, "the doorbell page")?;
    let mem = crate::mem::SharedMem::map(std::os::fd::AsFd::as_fd(&page), 0, 4096, true)?;
    mem.write(8, zone.as_bytes())?;
    mem.store_u64(0, TMB_DOORBELL_MAGIC)?;
    Ok(page)
}
