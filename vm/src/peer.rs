// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection between a command and the supervisor, or between the supervisor and a server: one JSON object per line.
//!
//! [`ask`] is how a command reaches a supervisor. It tells four cases apart: the request was heard; no supervisor lives; one lives and is
//! stopped; one lives and does not answer. A supervisor that dies between accept and answer closes the connection (EPIPE, ECONNRESET or
//! the end of the stream, as the moment has it), which is 'none lives' once its process has ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use crate::control::{Event, Request};
use crate::state::{Address, StateDir};

/// How long a supervisor that runs may take to hear a request, and to end once it has closed a connection.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a supervisor that is stopped is waited for.
const STOPPED: Duration = Duration::from_millis(500);
/// How often a wait looks whether the supervisor is stopped.
const LOOK: Duration = Duration::from_millis(100);
/// The longest line, in bytes: an exec's chunk in base64 with room to spare.
const LINE_MAX: u64 = 16 << 20;

/// One end of a connection.
#[derive(Debug)]
pub struct Peer {
    reader: BufReader<Watched>,
    writer: UnixStream,
}

impl Peer {
    /// Wraps a connected socket.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn new(socket: UnixStream) -> std::io::Result<Peer> {
        let reader = Watched { socket: socket.try_clone()?, supervisor: None, limit: None };
        Ok(Peer { reader: BufReader::new(reader), writer: socket })
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn send<T: Serialize>(&mut self, message: &T) -> std::io::Result<()> {
        send(&mut self.writer, message)
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// When it can't be read or understood.
    pub fn receive<T: for<'a> Deserialize<'a>>(&mut self) -> anyhow::Result<Option<T>> {
        let mut line = Vec::new();
        let n = Read::take(&mut self.reader, LINE_MAX).read_until(b'\n', &mut line)?;
        if n == 0 {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            anyhow::bail!("the other side ended in the middle of a message");
        }
        serde_json::from_slice(&line)
            .map(Some)
            .context("the other side is of another version; take the project down and up again")
    }

    /// The socket for writing, for another thread.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn writer(&self) -> std::io::Result<UnixStream> {
        self.writer.try_clone()
    }

    /// What has been read ahead, and the socket.
    pub fn into_raw(self) -> (Vec<u8>, UnixStream) {
        (self.reader.buffer().to_vec(), self.writer)
    }
}

/// Sends one message over `socket`.
///
/// # Errors
/// When the other side is gone.
pub fn send<T: Serialize>(socket: &mut UnixStream, message: &T) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// A socket whose reads end when the supervisor at its other end is stopped, or says nothing within the limit.
#[derive(Debug)]
struct Watched {
    socket: UnixStream,
    /// The supervisor's process; none: the other end is no supervisor.
    supervisor: Option<u32>,
    limit: Option<Duration>,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(pid) = self.supervisor {
            self.wait(pid)?;
        }
        self.socket.read(buffer)
    }
}

impl Watched {
    fn wait(&self, pid: u32) -> std::io::Result<()> {
        let begun = Instant::now();
        let mut stopped_since: Option<Instant> = None;
        while !readable(&self.socket, LOOK)? {
            stopped_since = is_stopped(pid).then(|| stopped_since.unwrap_or_else(Instant::now));
            if stopped_since.is_some_and(|since| since.elapsed() >= STOPPED) {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::TimedOut,
                    format!("the supervisor (process {pid}) is stopped; to let it go on: kill -CONT {pid}"),
                ));
            }
            if let Some(limit) = self.limit.filter(|limit| begun.elapsed() >= *limit) {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::TimedOut,
                    format!("the supervisor (process {pid}) did not answer within {} s", limit.as_secs()),
                ));
            }
        }
        Ok(())
    }
}

/// Waits at most `limit` until `fd` can be read, which an ended peer and an ended process can.
fn readable(fd: &impl AsFd, limit: Duration) -> std::io::Result<bool> {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    match rustix::event::poll(&mut fds, Some(&limit)) {
        Ok(n) => Ok(n > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Whether a process is stopped, by a signal (SIGSTOP) or a debugger.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may contain some.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// Asks the supervisor that lives in `dir`. `None`: none lives, and nothing of the request was begun. Otherwise the request was heard, and
/// its events follow; while they are waited for, a supervisor that is stopped is an error.
///
/// # Errors
/// When a supervisor lives and does not answer.
pub fn ask(dir: &StateDir, request: &Request) -> anyhow::Result<Option<Peer>> {
    let Some(address) = dir.address()? else { return Ok(None) };
    let name = SocketAddr::from_abstract_name(&address.socket)?;
    let heard = match UnixStream::connect_addr(&name) {
        Ok(socket) => converse(socket, address.pid, request),
        Err(e) => Err(e.into()),
    };
    match heard {
        Err(e) if is_gone(&e) && has_ended(&address, ANSWER)? => Ok(None),
        other => other
            .map(Some)
            .with_context(|| format!("the supervisor (process {}) can't be reached", address.pid)),
    }
}

/// Asks the supervisor `pid` behind `socket`, up to and with its 'heard'.
fn converse(socket: UnixStream, pid: u32, request: &Request) -> anyhow::Result<Peer> {
    check_user(&socket)?;
    let mut peer = Peer::new(socket)?;
    let reader = peer.reader.get_mut();
    (reader.supervisor, reader.limit) = (Some(pid), Some(ANSWER));
    peer.send(request)?;
    match peer.receive::<Event>()? {
        Some(Event::Heard) => {}
        Some(Event::Failed { message }) => anyhow::bail!("{message}"),
        Some(other) => anyhow::bail!("it began with {other:?}"),
        None => return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()),
    }
    peer.reader.get_mut().limit = None;
    Ok(peer)
}

/// Whether the other side has closed the connection, or nobody listens.
fn is_gone(error: &anyhow::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(BrokenPipe | ConnectionRefused | ConnectionReset | UnexpectedEof))
}

/// Whether the supervisor's process has ended, or ends within `limit`: its descriptors are closed before its process ends.
fn has_ended(address: &Address, limit: Duration) -> anyhow::Result<bool> {
    let Some(pid) = i32::try_from(address.pid).ok().and_then(Pid::from_raw) else { return Ok(true) };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let begun = Instant::now();
            while begun.elapsed() < limit {
                if readable(&process, LOOK)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Err(rustix::io::Errno::SRCH) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Abstract addresses have no permissions: both sides look who the other is.
///
/// # Errors
/// When it is neither this user nor root.
pub fn check_user(socket: &UnixStream) -> anyhow::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(socket)?;
    let own = rustix::process::geteuid();
    if peer.uid != own && !peer.uid.is_root() {
        anyhow::bail!("the other side of the control socket belongs to the user {}", peer.uid.as_raw());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command, Stdio};

    /// What a command sees of a supervisor: a process, and a socket that the test serves.
    struct Fake {
        process: Child,
        listener: UnixListener,
        dir: StateDir,
        _lock: std::fs::File,
        _base: tempfile::TempDir,
    }

    impl Fake {
        fn new() -> Fake {
            let base = tempfile::tempdir().unwrap();
            let dir = StateDir::at(base.path().join("p"));
            let lock = dir.lock().unwrap().unwrap();
            let process = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let socket = format!("tombolo-test-{}", crate::state::random_hex(12));
            let listener =
                UnixListener::bind_addr(&SocketAddr::from_abstract_name(&socket).unwrap()).unwrap();
            let address = Address { socket, pid: process.id(), project: "p".into(), file: "/f".into() };
            dir.publish(&address).unwrap();
            Fake { process, listener, dir, _lock: lock, _base: base }
        }

        fn signal(&self, signal: rustix::process::Signal) {
            rustix::process::kill_process(Pid::from_child(&self.process), signal).unwrap();
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    #[test]
    fn a_supervisor_that_dies_before_it_answers_is_not_there() {
        // It dies with the request unread (ECONNRESET), after reading it (the stream's end), or without accepting (ECONNRESET).
        for (accepts, reads) in [(true, false), (true, true), (false, false)] {
            let fake = Fake::new();
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| ask(&fake.dir, &Request::Ps));
                readable(&fake.listener, Duration::from_secs(60)).unwrap();
                if accepts {
                    let (socket, _) = fake.listener.accept().unwrap();
                    readable(&socket, Duration::from_secs(60)).unwrap();
                    if reads {
                        BufReader::new(&socket).read_line(&mut String::new()).unwrap();
                    }
                } else {
                    rustix::net::shutdown(&fake.listener, rustix::net::Shutdown::Both).unwrap();
                    while fake.listener.accept().is_ok() {}
                }
                fake.signal(rustix::process::Signal::KILL);
                assert!(asking.join().unwrap().unwrap().is_none(), "accepts: {accepts}, reads: {reads}");
            });
        }
    }

    #[test]
    fn a_supervisor_that_lives_and_hangs_up_is_an_error_and_not_absence() {
        let fake = Fake::new();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&fake.dir, &Request::Ps));
            drop(fake.listener.accept().unwrap());
            let error = asking.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("can't be reached"), "{error:#}");
        });
    }

    #[test]
    fn a_supervisor_that_is_stopped_is_named_with_the_remedy() {
        let fake = Fake::new();
        fake.signal(rustix::process::Signal::STOP);
        let error = format!("{:#}", ask(&fake.dir, &Request::Ps).unwrap_err());
        let pid = fake.process.id();
        assert!(error.contains(&format!("is stopped; to let it go on: kill -CONT {pid}")), "{error}");
    }
}
