// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages between a shim and its managers: one JSON value a packet (SOCK_SEQPACKET), with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most descriptors of one message (Linux, SCM_MAX_FD).
pub const MOST: usize = 253;
/// The longest message in bytes; a command line of QEMU has some thousands.
const LONGEST: usize = 160 << 10;

/// Sends a message with descriptors.
///
/// # Errors
/// `InvalidInput`: it is too long or has too many descriptors. Those of sendmsg(2).
pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = serde_json::to_vec(message).map_err(io::Error::other)?;
    if text.len() > LONGEST || fds.len() > MOST {
        let what = format!("a message of {} bytes with {} descriptors is too long", text.len(), fds.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for descriptors"));
    }
    loop {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(&text)], &mut ancillary, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a message with its descriptors; `None`: the other side has gone.
///
/// # Errors
/// It is no message, or descriptors of it were lost, as this process has no room for them. Those of recvmsg(2).
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // A thread that waits takes no room for what comes.
    let peeked = || rustix::net::recv(&socket, &mut [0; 0][..], RecvFlags::PEEK | RecvFlags::TRUNC);
    let mut text = vec![0; rustix::io::retry_on_intr(peeked)?.1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut text)];
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(all) = message {
            fds.extend(all);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("it has no file descriptor left"));
    }
    let message = serde_json::from_slice(&text[..received.bytes]);
    Ok(Some((message.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    #[test]
    fn a_message_comes_with_its_descriptors_and_the_end_is_told_apart() {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&a, &"two", &[file.as_fd(), file.as_fd()]).unwrap();
        let (text, fds) = receive::<String>(&b).unwrap().unwrap();
        assert_eq!((text.as_str(), fds.len()), ("two", 2));
        let long = "x".repeat(LONGEST);
        assert_eq!(send(&a, &long, &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        drop(a);
        assert!(receive::<String>(&b).unwrap().is_none());
    }
}
