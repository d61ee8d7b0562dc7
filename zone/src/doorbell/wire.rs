// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ivshmem protocol's messages: 8 bytes, little endian, some with a descriptor; eventfds; the shared page.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, sendmsg,
};
use tombolo_brief::{A_MOMENT, within};
use uuid::Uuid;

use crate::format::TMB_DOORBELL_MAGIC;
use crate::{Error, Result};

/// The only protocol version there is.
pub const VERSION: i64 = 0;
/// Stands in the version's place for a client that is refused. QEMU ends with it ("server sent version -1"); of a connection that is closed without a message
/// it reads for ever.
pub const REFUSED: i64 = -1;
/// Accompanies the descriptor of the shared page.
pub const SHARED_MEMORY: i64 = -1;
const MESSAGE: usize = 8;
/// Descriptors that one message of a peer may carry; the kernel closes further ones.
const DESCRIPTORS: usize = 4;

/// Sends one message, with a descriptor or without. Never blocks (`WouldBlock` when the peer doesn't read), never raises SIGPIPE.
pub fn send(socket: &UnixStream, value: i64, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = value.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)? {
        MESSAGE => Ok(()),
        n => Err(io::Error::new(io::ErrorKind::WriteZero, format!("{n} of {MESSAGE} bytes sent"))),
    }
}

/// Tells a client that it gets no doorbell.
pub(super) fn refuse(socket: &UnixStream) {
    // It may be gone.
    let _ = send(socket, REFUSED, None);
}

/// Receives one message. `Ok(None)`: the peer closed. Waits as the socket is set to; a message that is cut short is an error.
pub fn receive(socket: &UnixStream) -> io::Result<Option<(i64, Option<OwnedFd>)>> {
    let mut bytes = [0u8; MESSAGE];
    let mut have = 0;
    let mut received: Option<OwnedFd> = None;
    while have < MESSAGE {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes[have..])];
        let n = match recvmsg(socket, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => message.bytes,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) if have > 0 => return Err(cut_short()),
            Err(e) => return Err(e.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                // Further descriptors are dropped, which closes them.
                let first = fds.fold(None, |first, fd| first.or(Some(fd)));
                received = received.or(first);
            }
        }
        match n {
            0 if have == 0 => return Ok(None),
            0 => return Err(cut_short()),
            n => have += n,
        }
    }
    Ok(Some((i64::from_le_bytes(bytes), received)))
}

/// Receives one message of a client, and none of the descriptors that come with it: the kernel closes them here, which takes a moment whatever they are. `Ok(None)`: the
/// client closed. Never waits.
pub(super) fn take(socket: &UnixStream) -> io::Result<Option<i64>> {
    let mut bytes = [0u8; MESSAGE];
    let read = || recv(socket, &mut bytes, RecvFlags::DONTWAIT);
    match within(A_MOMENT, read)?.1 {
        0 => Ok(None),
        MESSAGE => Ok(Some(i64::from_le_bytes(bytes))),
        _ => Err(cut_short()),
    }
}

fn cut_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "a message was cut short")
}

/// A non-blocking eventfd.
pub fn eventfd() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).map_err(|e| Error::io("creating an eventfd", e.into()))
}

/// Rings an eventfd. A full counter is rung already.
pub fn ring(fd: BorrowedFd<'_>) -> Result<()> {
    match rustix::io::write(fd, &1u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(e) => Err(Error::io("ringing a doorbell", e.into())),
    }
}

/// Takes the rings of an eventfd; returns whether there were any.
pub fn take_rings(fd: BorrowedFd<'_>) -> bool {
    rustix::io::read(fd, &mut [0u8; 8]).is_ok()
}

/// Waits until one of `fds` is readable or hung up; returns which. `None`: waits for ever.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Option<std::time::Duration>) -> Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Ok(polled.iter().map(|p| !p.revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(e) => Err(Error::io("waiting for doorbells", e.into())),
    }
}

/// Makes the page of a doorbell device, which names its zone. One per connection, since its member may write it; its size is sealed,
/// so that no process can make QEMU fault.
pub fn doorbell_page(zone: Uuid) -> Result<File> {
    let page = crate::backing::sealed_memfd("doorbell", 4096, 0, "the doorbell page")?;
    let mem = crate::mem::SharedMem::map(std::os::fd::AsFd::as_fd(&page), 0, 4096, true)?;
    mem.write(8, zone.as_bytes())?;
    mem.store_u64(0, TMB_DOORBELL_MAGIC)?;
    Ok(page)
}
