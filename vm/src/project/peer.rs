// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection between a command and the supervisor, or between the supervisor and a server: one JSON object per line.
//!
//! [`ask`] is how a command reaches a supervisor. It tells four cases apart: the request was heard; no supervisor lives; one lives and is
//! stopped; one lives and does not answer. A supervisor that dies between accept and answer closes the connection (EPIPE, ECONNRESET or
//! the end of the stream, as the moment has it), which is 'none lives' once its process has ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use crate::compose::Project;
use crate::project::control::{Event, Request};
use crate::project::patience::Patience;
use crate::project::state::{self, Found};

/// Time for a running supervisor to hear a request, and to end once it has closed a connection.
const ANSWER: Duration = Duration::from_secs(5);
/// The longest line, in bytes: an exec's chunk in base64 with room to spare.
const LINE_MAX: u64 = 16 << 20;

/// One end of a connection.
#[derive(Debug)]
pub struct Peer {
    reader: BufReader<Watched>,
    socket: Arc<UnixStream>,
}

impl Peer {
    /// Wraps a connected socket; no further descriptor is needed.
    pub fn new(socket: UnixStream) -> Peer {
        Peer::over(Arc::new(socket))
    }

    /// Wraps a connected socket that others know, too.
    pub fn over(socket: Arc<UnixStream>) -> Peer {
        let reader = Watched { socket: socket.clone(), watch: None, end: None };
        Peer { reader: BufReader::new(reader), socket }
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn send<T: Serialize>(&mut self, message: &T) -> std::io::Result<()> {
        send(&self.socket, message)
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

    /// Limits how long all further messages of a supervisor are waited for; time in which it waits for a CPU does not count.
    pub fn set_limit(&mut self, longest: Option<Duration>) {
        if let Some((supervisor, patience)) = &mut self.reader.get_mut().watch {
            *patience = Patience::new(supervisor.pid, longest);
        }
    }

    /// Ends all waiting for messages at this time: a side that sends a byte now and then is waited for no longer than a silent one.
    pub fn set_end(&mut self, end: Option<Instant>) {
        self.reader.get_mut().end = end;
    }

    /// The socket, for another thread.
    pub fn socket(&self) -> Arc<UnixStream> {
        self.socket.clone()
    }

    /// Waits until the supervisor at the other end has ended.
    ///
    /// # Errors
    /// When it still lives after `limit`.
    pub fn wait_ended(&self, limit: Duration) -> anyhow::Result<()> {
        let Some((supervisor, _)) = &self.reader.get_ref().watch else { return Ok(()) };
        anyhow::ensure!(
            supervisor.ends_within(&mut Patience::new(supervisor.pid, Some(limit)))?,
            "the supervisor (process {}) did not end within {} s",
            supervisor.pid,
            limit.as_secs()
        );
        Ok(())
    }

    /// The error of a connection that has ended without an answer; `died` is that of a supervisor's death.
    pub fn broken(&self, died: &str) -> anyhow::Error {
        match (self.wait_ended(ANSWER), &self.reader.get_ref().watch) {
            (Err(_), Some((supervisor, _))) => anyhow::anyhow!(
                "the supervisor (process {}) lives, and has closed the connection before the answer; 'tombolo ps' shows what runs",
                supervisor.pid
            ),
            _ => anyhow::anyhow!("{died}"),
        }
    }

    /// The other end is a supervisor, which this process has started: it is watched as one that was found.
    pub fn watch(&mut self, supervisor: u32) {
        if let Ok(Some(process)) = open_process(supervisor) {
            let watch = (Supervisor { pid: supervisor, process }, Patience::new(supervisor, None));
            self.reader.get_mut().watch = Some(watch);
        }
    }

    /// Returns the bytes that were read ahead, and the socket.
    pub fn into_raw(self) -> (Vec<u8>, Arc<UnixStream>) {
        (self.reader.buffer().to_vec(), self.socket)
    }
}

/// Refuses a request that no supervisor would read.
///
/// # Errors
/// It is too long, which only a compose file with long texts makes it.
pub fn check_length(request: &Request) -> anyhow::Result<()> {
    let length = serde_json::to_vec(request)?.len() as u64;
    anyhow::ensure!(
        length < LINE_MAX,
        "the compose file with the texts in it has {}M, and {}M are possible; put long texts, such as cloud_init.user_data, into files of their own",
        length >> 20,
        LINE_MAX >> 20
    );
    Ok(())
}

/// Sends one message over `socket`.
///
/// # Errors
/// When the other side is gone.
pub fn send<T: Serialize>(socket: &UnixStream, message: &T) -> std::io::Result<()> {
    send_while(socket, message, &mut || false)
}

/// Sends one message over `socket`, whose writes have a limit; each time that it is reached `goes_on` says whether there is another.
///
/// # Errors
/// When the other side is gone, or takes nothing.
pub fn send_while<T: Serialize>(
    mut socket: &UnixStream,
    message: &T,
    goes_on: &mut dyn FnMut() -> bool,
) -> std::io::Result<()> {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    line.push(b'\n');
    let mut left = &line[..];
    while !left.is_empty() {
        match socket.write(left) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(n) => left = &left[n..],
            Err(e) if e.kind() == Interrupted => {}
            Err(e) if matches!(e.kind(), TimedOut | WouldBlock) && goes_on() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A socket whose reads end when the supervisor at its other end is given up.
#[derive(Debug)]
struct Watched {
    socket: Arc<UnixStream>,
    /// None: the other end is no supervisor.
    watch: Option<(Supervisor, Patience)>,
    /// The time at which reads end.
    end: Option<Instant>,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(end) = self.end {
            loop {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(std::io::Error::new(
                        std::io::ErrorKind::TimedOut,
                        "the message comes too late",
                    ));
                }
                if readable(&*self.socket, left)? {
                    break;
                }
            }
        }
        if let Some((supervisor, patience)) = &mut self.watch {
            while !readable(&*self.socket, patience.pause())? {
                patience.look().map_err(|why| why.of_supervisor(supervisor.pid))?;
            }
        }
        (&*self.socket).read(buffer)
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

/// Asks the project's supervisor. `None`: none lives, and nothing of the request was begun. Otherwise the request was heard, and its events
/// follow; while they are waited for, a supervisor that is stopped is an error.
///
/// # Errors
/// When a supervisor lives and does not answer.
pub fn ask(project: &Project, request: &Request) -> anyhow::Result<Option<Peer>> {
    check_length(request)?;
    while let Some(found) = state::supervisor(&project.file)? {
        // One that has ended before it heard the request may be followed by another.
        if let Some(peer) = ask_found(&found, request)? {
            return Ok(Some(peer));
        }
    }
    Ok(None)
}

/// As [`ask`], for a supervisor that was found.
///
/// # Errors
/// As [`ask`].
pub fn ask_found(found: &Found, request: &Request) -> anyhow::Result<Option<Peer>> {
    let mut peer = ask_within(found, request, ANSWER)?;
    if let Some(peer) = &mut peer {
        peer.set_limit(None);
    }
    Ok(peer)
}

/// As [`ask_found`], with the longest time that it, and the messages that follow, may take.
///
/// # Errors
/// As [`ask`].
pub fn ask_within(found: &Found, request: &Request, longest: Duration) -> anyhow::Result<Option<Peer>> {
    let Some(process) = open_process(found.process)? else {
        anyhow::ensure!(
            !found.is_there(),
            "the supervisor (process {}) is in another PID namespace than this command, such as a container; run the command there",
            found.process
        );
        return Ok(None);
    };
    let supervisor = Supervisor { pid: found.process, process };
    ask_at(|pause| found.connect(Some(pause)), &supervisor, request, longest)
}

fn ask_at(
    connect: impl Fn(Duration) -> std::io::Result<UnixStream>,
    supervisor: &Supervisor,
    request: &Request,
    longest: Duration,
) -> anyhow::Result<Option<Peer>> {
    let mut patience = Patience::new(supervisor.pid, Some(longest));
    let heard = reach(connect, supervisor.pid, &mut patience)
        .map_err(anyhow::Error::from)
        .and_then(|socket| converse(socket, supervisor.try_clone()?, request, patience.clone()));
    match heard {
        Err(e) if is_gone(&e) && supervisor.ends_within(&mut patience)? => Ok(None),
        other => other
            .map(Some)
            .with_context(|| format!("the supervisor (process {}) can't be reached", supervisor.pid)),
    }
}

/// Connects, if need be when the supervisor has accepted some of those who wait already.
fn reach(
    connect: impl Fn(Duration) -> std::io::Result<UnixStream>,
    supervisor: u32,
    patience: &mut Patience,
) -> std::io::Result<UnixStream> {
    loop {
        match connect(patience.pause()) {
            Err(e) if e.kind() == std::io::ErrorKind::TimedOut => {
                patience.look().map_err(|why| why.of_supervisor(supervisor))?;
            }
            other => return other,
        }
    }
}

/// Asks the supervisor behind `socket`, up to and with its 'heard'.
fn converse(
    socket: UnixStream,
    supervisor: Supervisor,
    request: &Request,
    patience: Patience,
) -> anyhow::Result<Peer> {
    let mut peer = Peer::new(socket);
    peer.reader.get_mut().watch = Some((supervisor, patience));
    peer.send(request)?;
    match peer.receive::<Event>()? {
        Some(Event::Heard) => Ok(peer),
        Some(Event::Failed { message }) => anyhow::bail!("{message}"),
        Some(other) => anyhow::bail!("it began with {other:?}"),
        None => Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()),
    }
}

/// Returns whether the other side has closed the connection, or no process listens.
fn is_gone(error: &anyhow::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(BrokenPipe | ConnectionRefused | ConnectionReset | NotFound | UnexpectedEof))
}

/// A supervisor's process.
#[derive(Debug)]
struct Supervisor {
    pid: u32,
    process: OwnedFd,
}

fn open_process(pid: u32) -> anyhow::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => Ok(Some(process)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

impl Supervisor {
    fn try_clone(&self) -> std::io::Result<Supervisor> {
        Ok(Supervisor { pid: self.pid, process: self.process.try_clone()? })
    }

    /// Returns whether the process has ended, or ends before patience does: its descriptors are closed before its process ends.
    fn ends_within(&self, patience: &mut Patience) -> std::io::Result<bool> {
        while !readable(&self.process, patience.pause())? {
            if patience.look().is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command, Stdio};

    /// A supervisor as a command sees it: a process, and a socket that the test serves.
    struct Fake {
        process: Child,
        listener: UnixListener,
        dir: tempfile::TempDir,
    }

    impl Fake {
        fn new() -> Fake {
            let dir = tempfile::tempdir().unwrap();
            let process = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let listener = UnixListener::bind(dir.path().join("door")).unwrap();
            Fake { process, listener, dir }
        }

        fn ask(&self) -> anyhow::Result<Option<Peer>> {
            self.ask_within(ANSWER)
        }

        fn ask_within(&self, longest: Duration) -> anyhow::Result<Option<Peer>> {
            let process = open_process(self.process.id()).unwrap().unwrap();
            let supervisor = Supervisor { pid: self.process.id(), process };
            let connect = |_| UnixStream::connect(self.dir.path().join("door"));
            ask_at(connect, &supervisor, &Request::Ps, longest)
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
    fn a_supervisor_that_is_killed_after_it_has_heard_the_question_is_not_there() {
        let fake = Fake::new();
        let status = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut peer = Peer::new(fake.listener.accept().unwrap().0);
                peer.receive::<Request>().unwrap();
                peer.send(&Event::Heard).unwrap();
                // Its process ends after its connections.
                drop(peer);
                fake.signal(rustix::process::Signal::KILL);
            });
            let mut peer = fake.ask().unwrap().unwrap();
            crate::commands::client::receive_status(&mut peer)
        });
        assert!(status.unwrap().is_none());
    }

    #[test]
    fn a_supervisor_that_dies_before_it_answers_is_not_there() {
        // It dies with the request unread (ECONNRESET), after reading it (the stream's end), or without accepting (ECONNRESET).
        for (accepts, reads) in [(true, false), (true, true), (false, false)] {
            let fake = Fake::new();
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| fake.ask());
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
    fn a_side_that_sends_a_byte_now_and_then_is_waited_for_no_longer_than_a_silent_one() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            // Ends when the reader has closed its end.
            while (&theirs).write_all(b" ").is_ok() {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let mut peer = Peer::new(ours);
        peer.set_end(Some(Instant::now() + Duration::from_millis(100)));
        let late = peer.receive::<Request>().unwrap_err();
        assert!(late.to_string().contains("too late"), "{late:#}");
        drop(peer);
        writer.join().unwrap();
    }

    #[test]
    fn a_supervisor_that_lives_and_hangs_up_is_an_error_and_not_absence() {
        let fake = Fake::new();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| fake.ask());
            drop(fake.listener.accept().unwrap());
            let error = asking.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("can't be reached"), "{error:#}");
        });
    }

    #[test]
    fn a_supervisor_that_is_stopped_is_named_with_the_remedy() {
        let fake = Fake::new();
        fake.signal(rustix::process::Signal::STOP);
        let error = format!("{:#}", fake.ask().unwrap_err());
        let pid = fake.process.id();
        assert!(error.contains(&format!("is stopped; to let it go on: kill -CONT {pid}")), "{error}");
    }

    #[test]
    fn a_supervisor_that_does_not_answer_is_said_to_live_and_the_limit_holds_for_all_its_messages() {
        let fake = Fake::new();
        let words = format!("(process {}) lives and has not answered within 0.05 s", fake.process.id());
        let error = format!("{:#}", fake.ask_within(Duration::from_millis(50)).unwrap_err());
        assert!(error.contains(&words), "{error}");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let mut peer = fake.ask_within(Duration::from_millis(50)).unwrap().unwrap();
                peer.receive::<Event>().map(drop).unwrap_err().to_string()
            });
            // The one before is in the queue, too.
            let sockets = [fake.listener.accept().unwrap().0, fake.listener.accept().unwrap().0];
            for socket in &sockets {
                // The first connection has no reader.
                let _gone = send(socket, &Event::Heard);
            }
            let error = asking.join().unwrap();
            assert!(error.contains(&words), "{error}");
        });
    }
}
