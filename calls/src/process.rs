// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Between processes of one host: a sealed memfd holds both rings and the window, eventfds are the doorbells, all made by the
//! server and passed over a Unix socket. The socket stays open: its end says that the peer is gone.

use crate::children::NotInChildren;
use crate::hello::{Geometry, Hello, welcome, welcomed};
use crate::memory::{Mapping, sealed_memfd};
use crate::rings::{self, Bells, Ring, Side};
use crate::stream::Plain;
use crate::{Bell, Error, Link};
use rustix::event::EventfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Descriptors passed: memory, the server's bell, the client's bell, the client's bell for room.
const FDS: usize = 4;

/// An eventfd that both sides may hold.
pub(crate) struct EventFd(File);

impl From<OwnedFd> for EventFd {
    fn from(fd: OwnedFd) -> Self {
        EventFd(File::from(fd))
    }
}

impl Ring for EventFd {
    fn ring(&self) {
        EventFd::ring(self);
    }
}

impl EventFd {
    pub(crate) fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(File::from(rustix::event::eventfd(0, flags)?)))
    }

    /// Rings. A counter that is full needs no more ringing, so the result doesn't matter.
    pub(crate) fn ring(&self) {
        let _full = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Takes what was rung; `false`: nothing was.
    pub(crate) fn take(&self) -> bool {
        (&self.0).read(&mut [0; 8]).is_ok()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Sleeps on an eventfd and on the end of a socket.
pub(crate) struct EventBell {
    pub(crate) event: Arc<EventFd>,
    pub(crate) socket: NotInChildren,
}

impl Bell for EventBell {
    fn wait(&self) -> Result<(), Error> {
        let mut fds = [
            libc::pollfd { fd: self.event.as_raw_fd(), events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 },
        ];
        // SAFETY: the array lives during the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) } < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(e.into()) };
        }
        if fds[0].revents != 0 {
            self.event.take();
            return Ok(());
        }
        if fds[1].revents != 0 {
            return Err(Error::Closed);
        }
        Ok(())
    }

    fn ring(&self) {
        self.event.ring();
    }
}

fn link(socket: UnixStream, geometry: Geometry, fds: [OwnedFd; FDS], side: Side) -> Result<Link, Error> {
    let [memory, server, client, client_room] = fds;
    let memory = File::from(memory);
    if memory.metadata()?.len() < rings::total(geometry) {
        return Err(Error::Broken("the shared memory is smaller than announced"));
    }
    let mapping = Arc::new(Mapping::of_whole(&memory, rings::total(geometry) as usize)?);
    let [server, client, client_room] = [server, client, client_room].map(|fd| Arc::new(EventFd::from(fd)));
    let socket = NotInChildren::new(socket)?;
    let bell = |event: &Arc<EventFd>| -> Result<Arc<dyn Bell>, Error> {
        Ok(Arc::new(EventBell { event: event.clone(), socket: socket.try_clone()? }))
    };
    let bells = match side {
        Side::Client => {
            Bells { bell: bell(&client)?, room: bell(&client_room)?, peer: server.clone(), peer_room: server }
        }
        Side::Server => {
            Bells { bell: bell(&server)?, room: bell(&server)?, peer: client, peer_room: client_room }
        }
    };
    rings::link(mapping, 0, geometry, side, bells, socket)
}

/// Connects to a server's Unix socket.
pub fn connect(path: &std::path::Path, hello: &Hello) -> Result<Link, Error> {
    let socket = UnixStream::connect(path)?;
    let (geometry, fds) = hello.greet(&mut Plain(&socket), || {
        let (bytes, fds) = receive_with_fds(&socket)?;
        // The rest of a message that is longer than the first packet (a long refusal) follows on the socket.
        Ok((welcomed(&mut io::Read::chain(&bytes[..], &socket))?, fds))
    })?;
    let fds = <[OwnedFd; FDS]>::try_from(fds).map_err(|_| Error::Broken("the server passed no memory"))?;
    link(socket, geometry, fds, Side::Client)
}

/// Tells a client that it can't be served, and why.
pub fn refuse(mut socket: &UnixStream, why: &str) -> io::Result<()> {
    socket.write_all(&welcome(Err(why)))
}

/// Makes the memory and the doorbells for one client whose [`Hello`] was accepted.
pub fn accept(socket: UnixStream, geometry: Geometry) -> Result<Link, Error> {
    let geometry = geometry.check()?;
    let memory = OwnedFd::from(sealed_memfd(c"tombolo-calls", rings::total(geometry))?);
    let bells = [EventFd::new()?, EventFd::new()?, EventFd::new()?].map(|e| OwnedFd::from(e.0));
    send_with_fds(
        &socket,
        &welcome(Ok(geometry)),
        &[memory.as_fd(), bells[0].as_fd(), bells[1].as_fd(), bells[2].as_fd()],
    )?;
    let [a, b, c] = bells;
    link(socket, geometry, [memory, a, b, c], Side::Server)
}

/// Both sides of a channel inside one process, for tests and benches.
pub fn pair(geometry: Geometry) -> Result<(Link, Link), Error> {
    let (ours, theirs) = UnixStream::pair()?;
    let server = accept(ours, geometry)?;
    let (bytes, fds) = receive_with_fds(&theirs)?;
    let geometry = welcomed(&mut &bytes[..])?;
    let fds = <[OwnedFd; FDS]>::try_from(fds).map_err(|_| Error::Broken("the server passed no memory"))?;
    Ok((link(theirs, geometry, fds, Side::Client)?, server))
}

fn send_with_fds(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>; FDS]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for the descriptors"));
    }
    match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "the handshake was cut")),
    }
}

fn receive_with_fds(socket: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let mut bytes = vec![0u8; 20];
    // A server that passes more than these is refused; the kernel closes what is beyond.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(&mut bytes)];
    let received =
        recvmsg(socket, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC).map_err(io::Error::from)?;
    if received.bytes == 0 {
        return Err(Error::Closed);
    }
    bytes.truncate(received.bytes);
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    Ok((bytes, fds))
}
