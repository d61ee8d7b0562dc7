// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small HTTP server for Prometheus (text format 0.0.4): `/metrics` and nothing else, over TCP or a Unix socket.
//!
//! One thread serves all connections without blocking on any: each has [`TIMEOUT`] for its request and its answer, and beyond
//! [`MOST`] connections the oldest is closed. So a slow or silent peer delays no scrape.
//!
//! - [`Place`] is the listening address; [`Server`] the loop; [`Stop`] ends it
//! - [`request`] parses one request
//! - [`text`] writes the metrics in Prometheus' text format

#![deny(missing_docs)]

pub mod request;
pub mod text;

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use tombolo_brief::{A_MOMENT, Brief, within};
use tombolo_listen::Name;

use request::{Request, read};

/// Time for a peer to send its request and to read the answer.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at one time.
pub const MOST: usize = 32;
/// Pause if there are no descriptors.
const RETRY: Duration = Duration::from_millis(100);

/// A listening address: `127.0.0.1:9127`, or the path of a Unix socket (absolute).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Place {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A socket's path; the permissions of its folder and its owner decide which processes may connect.
    Unix(PathBuf),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let wrong =
            |_| format!("'{text}' is neither ADDRESS:PORT, such as 127.0.0.1:9127, nor an absolute path");
        text.parse().map(Self::Tcp).map_err(wrong)
    }
}

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Place> for String {
    fn from(place: Place) -> Self {
        place.to_string()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A peer's end of a connection.
trait Peer: Read + Write + AsFd {}
impl Peer for TcpStream {}
impl Peer for UnixStream {}

impl Listener {
    /// Accepts a waiting connection, if there is one.
    fn accept(&self) -> io::Result<Brief<Box<dyn Peer>>> {
        let peer: Box<dyn Peer> = match self {
            Self::Tcp(listener) => Box::new(listener.accept()?.0),
            Self::Unix(listener) => Box::new(listener.accept()?.0),
        };
        let peer = Brief::from(peer);
        rustix::io::ioctl_fionbio(&*peer, true)?;
        Ok(peer)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// One connection.
struct Client {
    peer: Brief<Box<dyn Peer>>,
    until: Instant,
    asked: Vec<u8>,
    /// The rest of the answer; empty before there is one.
    answer: Vec<u8>,
}

impl Client {
    fn new(peer: Brief<Box<dyn Peer>>, now: Instant) -> Self {
        Self { peer, until: now + TIMEOUT, asked: Vec::new(), answer: Vec::new() }
    }

    fn wants(&self) -> PollFlags {
        if self.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Reads and writes as far as possible without blocking. False: finished, or the peer has closed.
    fn go_on(&mut self, what: &str, text: &dyn Fn() -> String) -> bool {
        if self.answer.is_empty() {
            let mut piece = [0; 2048];
            match within(A_MOMENT, || self.peer.read(&mut piece)) {
                Ok(0) => return false,
                Ok(n) => self.asked.extend_from_slice(&piece[..n]),
                Err(err) => return err.kind() == ErrorKind::WouldBlock,
            }
            self.answer = match read(&self.asked) {
                Request::Part => return true,
                Request::Figures { body } => respond("200 OK", "", &text(), body),
                Request::Elsewhere => {
                    respond("404 Not Found", "", &format!("the {what} are at /metrics\n"), true)
                }
                Request::Method => {
                    respond("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "use GET\n", true)
                }
                Request::Broken => respond("400 Bad Request", "", "this is no HTTP request\n", true),
            };
        }
        match self.peer.write(&self.answer) {
            Ok(n) => self.answer.drain(..n),
            Err(err) => return err.kind() == ErrorKind::WouldBlock,
        };
        if self.answer.is_empty() {
            // The peer may have closed.
            let _gone = shutdown(&*self.peer, Shutdown::Write);
        }
        !self.answer.is_empty()
    }
}

fn respond(status: &str, fields: &str, text: &str, body: bool) -> Vec<u8> {
    let mut answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n{fields}Content-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    if body {
        answer.push_str(text);
    }
    answer.into_bytes()
}

/// The server, listening.
pub struct Server {
    /// With the connections that wait at it.
    listener: Brief<Listener>,
    /// Of its Unix socket, to be removed.
    name: Option<Name>,
}

/// Ends a [`Server::serve`].
#[derive(Debug)]
pub struct Stop(Brief<OwnedFd>);

impl Stop {
    /// Ends it now.
    pub fn now(&self) {
        // It may have ended already.
        let _ended = shutdown(&self.0, Shutdown::Both);
    }
}

impl Server {
    /// Listens at `place`. Replaces a Unix socket at which no process listens.
    ///
    /// # Errors
    /// The address is in use, or this user may not listen there.
    pub fn bind(place: &Place) -> io::Result<Self> {
        match place {
            Place::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self { listener: Listener::Tcp(listener).into(), name: None })
            }
            Place::Unix(path) => {
                let (listener, name) = tombolo_listen::listen(path, None)?;
                listener.set_nonblocking(true)?;
                Ok(Self { listener: Listener::Unix(listener).into(), name: Some(name) })
            }
        }
    }

    /// Returns the listening address, with the port that the kernel chose for port 0.
    ///
    /// # Errors
    /// The kernel refuses to tell.
    pub fn place(&self) -> io::Result<Place> {
        Ok(match (&*self.listener, &self.name) {
            (Listener::Tcp(listener), _) => Place::Tcp(listener.local_addr()?),
            (_, name) => Place::Unix(name.as_ref().map(|name| name.path().into()).unwrap_or_default()),
        })
    }

    /// Returns the listener, and the name of its Unix socket, which the caller must remove: for a server in another process.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn into_parts(mut self) -> io::Result<(OwnedFd, Option<Name>)> {
        let listener = self.listener.as_fd().try_clone_to_owned()?;
        Ok((listener, self.name.take()))
    }

    /// Makes the server of a listener that came from [`Server::into_parts`] of one at `place`.
    #[must_use]
    pub fn over(listener: OwnedFd, place: &Place) -> Self {
        let listener = match place {
            Place::Tcp(_) => Listener::Tcp(listener.into()),
            Place::Unix(_) => Listener::Unix(listener.into()),
        };
        Self { listener: listener.into(), name: None }
    }

    /// Returns a handle that ends [`Server::serve`].
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn stop(&self) -> io::Result<Stop> {
        Ok(Stop(self.listener.as_fd().try_clone_to_owned()?.into()))
    }

    /// Answers requests with the result of `text` until it is stopped. `what`: the name of the metrics for messages.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn serve(&self, what: &str, text: impl Fn() -> String) -> io::Result<()> {
        let mut clients: Vec<Client> = Vec::new();
        loop {
            let next = clients.iter().map(|c| c.until).min();
            let (listening, ready) = wait(&self.listener, &clients, next)?;
            if listening.contains(PollFlags::HUP) {
                return Ok(());
            }
            let now = Instant::now();
            let mut ready = ready.into_iter();
            clients.retain_mut(|client| {
                let ready = ready.next().is_some_and(|flags| !flags.is_empty());
                (!ready || client.go_on(what, &text)) && client.until > now
            });
            if listening.contains(PollFlags::IN) {
                match self.listener.accept() {
                    Ok(peer) => {
                        if clients.len() == MOST {
                            clients.remove(0);
                        }
                        clients.push(Client::new(peer, now));
                    }
                    // The peer has closed meanwhile.
                    Err(err)
                        if matches!(err.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
                    // No descriptors are left: this server closes a connection, or other code closes descriptors.
                    Err(_) if clients.is_empty() => std::thread::sleep(RETRY),
                    Err(_) => drop(clients.remove(0)),
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have been removed already.
        let _gone = self.name.as_ref().map(Name::remove);
    }
}

/// Waits for the listener and for the clients, at most until `next`; returns which are ready.
fn wait(
    listener: &Listener,
    clients: &[Client],
    next: Option<Instant>,
) -> io::Result<(PollFlags, Vec<PollFlags>)> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(clients.iter().map(|c| PollFd::new(&*c.peer, c.wants())));
    let left = next.map(|at| at.saturating_duration_since(Instant::now()));
    let left = left.map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() });
    match poll(&mut fds, left.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok((PollFlags::empty(), Vec::new())),
        Err(err) => return Err(err.into()),
    }
    Ok((fds[0].revents(), fds[1..].iter().map(PollFd::revents).collect()))
}
