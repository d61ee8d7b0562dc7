// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A port's socket: the switch listens on it (server), or its keeper connects to it (client), one connection at a time,
//! again and again. One thread per port, which sleeps in the kernel until the front-end sends a message.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tombolo_brief::{Brief, within};
use tombolo_listen::Begun;
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut};

use crate::control::link::Link;
use crate::forwarding::switch::Switch;
use crate::frames::frame::Mac;
use crate::ports::port::Port;
use crate::ports::protocol::Session;

pub use tombolo_control::net::config::Role;

/// The source of a port's connections.
pub struct Endpoint(Source);

enum Source {
    /// The switch listens.
    Listener(UnixListener),
    /// The keeper connects for each byte sent, and sends the connection back.
    Dialer(UnixStream),
}

/// The pause before another try to connect, or for descriptors to become free.
pub(crate) const RETRY: Duration = Duration::from_millis(200);

/// The time that a server gets to close its socket, once its successor starts.
const ENDING: Duration = Duration::from_secs(1);

/// Longer than a message takes: the end of a file that a front-end passes along with one, such as a TCP socket that lingers, waits for no longer.
const LATE: Duration = Duration::from_millis(100);

/// The pause after a front-end whose eventfds have blocked a worker, before its successor is served. A worker is blocked for up to a
/// tenth of a second by each front-end, so the other ports keep 19 of 20 parts of its time.
const AFTER_BLOCKING: Duration = Duration::from_secs(2);

/// Connects to the socket at `path`, without waiting for room at it.
///
/// # Errors
/// No process listens there, or (`WouldBlock`) more wait for it than it has room for.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Waits until no server listens at `path`, for at most [`ENDING`]: the keeper of a switch that was killed closes its sockets a moment after
/// the switch has ended. A connection that waits at them hangs up then.
pub fn wait_for_end(path: &Path) {
    let start = Instant::now();
    while let Ok(waiting) = connect(path) {
        let left = ENDING.saturating_sub(start.elapsed());
        let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut end = [PollFd::new(&waiting, PollFlags::RDHUP)];
        // An interrupted wait begins again with the time that is left.
        let is_over = matches!(rustix::event::poll(&mut end, Some(&limit)), Ok(0));
        if is_over || left.is_zero() {
            return;
        }
    }
}

/// Makes a socket that is to listen at `path`. Replaces one that a dead server left.
///
/// # Errors
/// The path is in use, or no socket, or this process may not make it.
pub fn begin(path: &Path) -> Result<Begun, tombolo_listen::Error> {
    wait_for_end(path);
    tombolo_listen::begin(path)
}

impl Endpoint {
    /// Makes the endpoint of a port of this role, for which the keeper has made `source`.
    #[must_use]
    pub fn over(role: Role, source: OwnedFd) -> Self {
        Self(match role {
            Role::Server => Source::Listener(source.into()),
            Role::Client => Source::Dialer(source.into()),
        })
    }

    /// Waits for the next connection.
    fn next(&self) -> io::Result<Brief<UnixStream>> {
        match &self.0 {
            Source::Listener(listener) => listener.accept().map(|(stream, _)| stream.into()),
            Source::Dialer(channel) => {
                let link = Link::over(channel.try_clone()?.into());
                (&*channel).write_all(&[0])?;
                match link.receive::<()>()? {
                    Some(((), Some(stream))) => Ok(UnixStream::from(stream).into()),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
        }
    }

    /// Serves one front-end after the other until [`Stop::now`].
    pub fn serve(&self, switch: &Arc<Switch>, port: &Arc<Port>, offered: u64, stop: &Stop) {
        while !stop.is_set() {
            // An error: there are too few descriptors, for example. The front-end connects again.
            let next = self.next().and_then(|stream| Ok((stop.watch(&stream)?, stream)));
            let Ok((goes_on, stream)) = next else {
                std::thread::park_timeout(RETRY);
                continue;
            };
            if !goes_on {
                return;
            }
            tracing::info!(port = port.name(), "front-end connected");
            port.connected.store(true, Ordering::Relaxed);
            let why = converse(&stream, switch, port, offered);
            // The last one to be closed ends messages that were not read.
            stop.forget();
            drop(stream);
            port.connected.store(false, Ordering::Relaxed);
            tracing::info!(port = port.name(), %why, "front-end gone");
            if port.blocks.load(Ordering::Relaxed) {
                tracing::warn!(
                    port = port.name(),
                    "its front-end made eventfds block that were full, and got no more interrupts; another is served in {} s",
                    AFTER_BLOCKING.as_secs()
                );
                std::thread::park_timeout(AFTER_BLOCKING);
                port.blocks.store(false, Ordering::Relaxed);
            }
            if matches!(self.0, Source::Dialer(_)) {
                std::thread::park_timeout(RETRY);
            }
        }
    }

    /// Returns the handle that ends [`Endpoint::serve`].
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn stop(&self) -> io::Result<Stop> {
        let source = match &self.0 {
            Source::Listener(listener) => listener.as_fd(),
            Source::Dialer(channel) => channel.as_fd(),
        };
        let source = source.try_clone_to_owned()?;
        Ok(Stop { set: AtomicBool::new(false), source, stream: Mutex::default() })
    }
}

/// Ends a port's thread wherever it waits: for a connection, or for a front-end that has sent a part of a message or
/// doesn't read its answer.
#[derive(Debug)]
pub struct Stop {
    set: AtomicBool,
    /// The source of connections.
    source: OwnedFd,
    /// The connection that is served.
    stream: Mutex<Option<UnixStream>>,
}

impl Stop {
    /// Ends the connection, and prevents another.
    pub fn now(&self) {
        self.set.store(true, Ordering::Release);
        interrupt(&self.source);
        if let Some(stream) = &*self.stream.lock().unwrap_or_else(PoisonError::into_inner) {
            // The front-end may have closed it.
            let _gone = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Registers the connection that is served from now on. False: the endpoint is stopped.
    ///
    /// # Errors
    /// No descriptors are left.
    fn watch(&self, stream: &UnixStream) -> io::Result<bool> {
        let mut watched = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        *watched = Some(stream.try_clone()?);
        // [`Stop::now`] sets the flag before it looks for a connection.
        Ok(!self.is_set())
    }

    fn forget(&self) {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Ends the wait for a connection at a socket, even if its path no longer leads to it.
pub(crate) fn interrupt(socket: &impl AsFd) {
    // It may have been shut down already.
    let _ended = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Serves one front-end until it disconnects or breaks the protocol; returns the reason.
fn converse(own: &UnixStream, switch: &Arc<Switch>, port: &Arc<Port>, offered: u64) -> Error {
    let session = Arc::new(Mutex::new(Session::new(switch.clone(), port.clone(), offered)));
    let stream = match own.try_clone() {
        Ok(stream) => stream,
        Err(err) => return Error::SocketError(err),
    };
    let mut handler = BackendReqHandler::from_stream(stream, session.clone());
    loop {
        let mut poll = libc::pollfd { fd: own.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd of our own.
        unsafe { libc::poll(&mut poll, 1, -1) };
        match within(LATE, || own_message(own, &session)) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(why) => return why,
        }
        match within(LATE, || handler.handle_request()) {
            Ok(()) => {}
            Err(Error::SocketRetry(_)) => {}
            Err(why) => return why,
        }
    }
}

/// Handles messages that the `vhost` crate (0.14) does not: a SET_VRING_ENABLE before SET_FEATURES, which QEMU sends as
/// soon as the protocol features are negotiated, and SEND_RARP. True: there was one of them.
fn own_message(stream: &UnixStream, session: &Mutex<Session>) -> Result<bool, Error> {
    const SET_VRING_ENABLE: u32 = 18;
    const SEND_RARP: u32 = 19;
    const NEED_REPLY: u32 = 8;
    const REPLY: u32 = 5;
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    // Three words of header, two of body.
    let mut bytes = [0u8; 20];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: a local buffer, as long as stated.
    let n = unsafe { libc::recv(stream.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), flags) };
    let word =
        |b: &[u8; 20], i: usize| u32::from_ne_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]);
    let request = word(&bytes, 0);
    let ours = request == SEND_RARP || request == SET_VRING_ENABLE && !session.has_features();
    if n != 20 || !ours || word(&bytes, 2) != 8 {
        return Ok(false);
    }
    (&*stream).read_exact(&mut bytes).map_err(Error::SocketError)?;
    match request {
        // The MAC in memory order.
        SEND_RARP => {
            session.send_rarp(Mac([bytes[12], bytes[13], bytes[14], bytes[15], bytes[16], bytes[17]]))?
        }
        _ => session.set_vring_enable(word(&bytes, 3), word(&bytes, 4) != 0)?,
    }
    if word(&bytes, 1) & NEED_REPLY != 0 {
        let mut reply = bytes;
        reply[4..8].copy_from_slice(&REPLY.to_ne_bytes());
        reply[12..].fill(0);
        (&*stream).write_all(&reply).map_err(Error::SocketError)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_with_a_full_backlog_is_not_taken_for_a_dead_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let server = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&server, 0).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match connect(&path) {
                Ok(stream) => waiting.push(stream),
                Err(err) => break err,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let refused = begin(&path).unwrap_err();
        assert!(matches!(refused, tombolo_listen::Error::Served(_)), "{refused}");
        server.accept().unwrap();
        connect(&path).unwrap();
        drop(server);
        begin(&path).unwrap();
    }

    #[test]
    fn a_server_that_ends_makes_room_for_its_successor_and_one_that_lives_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let server = UnixListener::bind(&path).unwrap();
        let refused = begin(&path).unwrap_err();
        assert!(refused.to_string().contains("another server listens there"), "{refused}");
        server.accept().unwrap();
        // As the keeper of a killed switch: it ends when its successor waits for it.
        let ending = std::thread::spawn(move || {
            let mut arrived = [PollFd::new(&server, PollFlags::IN)];
            rustix::event::poll(&mut arrived, None).unwrap();
            drop(server);
        });
        begin(&path).unwrap();
        ending.join().unwrap();
    }
}
