// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Between processes of one host: a sealed memfd holds both rings and the window, eventfds are the doorbells, all made by the
//! server and passed over a Unix socket. The socket stays open: its end says that the peer is gone.

use crate::children::NotInChildren;
use crate::hello::{Geometry, Hello, welcome, welcomed};
use crate::memory::{Mapping, sealed_memfd};
use crate::rings::{self, Bells, Ring, Side};
use crate::{Bell, Error, Link};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
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
        // SAFETY: takes no memory; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is fresh.
        Ok(EventFd(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
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
    let mut socket = UnixStream::connect(path)?;
    hello.send(&mut socket)?;
    let (bytes, fds) = receive_with_fds(&socket)?;
    // What doesn't fit into the first message (a long refusal) follows on the socket.
    let geometry = welcomed(&mut io::Read::chain(&bytes[..], &socket))?;
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
    send_with_fds(&socket, &welcome(Ok(geometry)), &[&memory, &bells[0], &bells[1], &bells[2]])?;
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

/// A buffer for the control message, aligned as cmsghdr wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);
const _: () = assert!(
    // SAFETY: a computation on integers.
    unsafe { libc::CMSG_SPACE((FDS * size_of::<RawFd>()) as u32) } <= 64
);

fn send_with_fds(socket: &UnixStream, bytes: &[u8], fds: &[&OwnedFd; FDS]) -> io::Result<()> {
    let raw: [RawFd; FDS] = fds.map(|f| f.as_raw_fd());
    let mut control = Control([0; 64]);
    let mut iov = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // SAFETY: msghdr is plain data; zero is valid.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: integers only; and the control buffer is large enough for one header with FDS descriptors (asserted above).
    let sent = unsafe {
        msg.msg_controllen = libc::CMSG_SPACE(size_of_val(&raw) as u32) as usize;
        let header = libc::CMSG_FIRSTHDR(&msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of_val(&raw) as u32) as usize;
        std::ptr::copy_nonoverlapping(raw.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), size_of_val(&raw));
        libc::sendmsg(socket.as_raw_fd(), &msg, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(io::Error::new(io::ErrorKind::WriteZero, "the handshake was cut")),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

fn receive_with_fds(socket: &UnixStream) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let mut bytes = vec![0u8; 20];
    let mut control = Control([0; 64]);
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: msghdr is plain data; zero is valid.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.0.as_mut_ptr().cast();
    msg.msg_controllen = control.0.len();
    // SAFETY: all buffers live during the call.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut msg, libc::MSG_CMSG_CLOEXEC) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    if n == 0 {
        return Err(Error::Closed);
    }
    bytes.truncate(n);
    let mut fds = Vec::new();
    // SAFETY: the kernel wrote msg and the control buffer; the macros stay inside of it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&msg);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                for i in 0..count {
                    let mut fd: RawFd = -1;
                    let from = libc::CMSG_DATA(header).add(i * size_of::<RawFd>());
                    std::ptr::copy_nonoverlapping(from, (&raw mut fd).cast(), size_of::<RawFd>());
                    fds.push(OwnedFd::from_raw_fd(fd));
                }
            }
            header = libc::CMSG_NXTHDR(&msg, header);
        }
    }
    Ok((bytes, fds))
}
