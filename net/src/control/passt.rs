// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The keeper's connections to passt. A passt may be killed, or end by an error of its own: the keeper then starts it again, or
//! connects to it again, after a pause that grows with each failure. When an uplink is removed or the switch ends, the keeper kills
//! the passt that it has started and waits for its end, so that the ports of the host are free. A stopped one (SIGSTOP) ends too.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_brief::child::leave_sockets;

use crate::control::loopback;
use crate::event::Event;
use crate::ports::endpoint;
use crate::uplink::Opened;

/// The pause after the first failure. Each further one doubles it, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The end of a connection that has lasted so long counts as a first failure.
const LASTING: Duration = Duration::from_secs(10);

/// Where the connections of an uplink come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The socket of a passt that the user has started.
    Socket(PathBuf),
    /// A program that is started for each connection and ends with it.
    Program(Program),
}

/// A passt to be started.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The file that is run.
    pub path: PathBuf,
    /// The TCP ports of the host that it forwards, as its option -t takes them.
    pub tcp: Vec<String>,
    /// The UDP ports, as its option -u takes them.
    pub udp: Vec<String>,
    /// The guest reaches the host's loopback addresses at its gateway's.
    pub host_loopback: bool,
}

/// The first connection of an uplink.
pub(crate) type Connected = (Source, Connection);

/// A connection to passt.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The switch has the same socket.
    socket: OwnedFd,
    /// passt, if the keeper has started it.
    child: Option<Child>,
    since: Instant,
}

impl Source {
    /// Makes a connection. A passt whose ports of the host the predecessor's still has ends, and is started again.
    ///
    /// # Errors
    /// No process listens at the socket, or the program can't be started.
    pub fn connect(&self) -> io::Result<Connection> {
        let since = Instant::now();
        match self {
            Self::Socket(path) => Ok(Connection { socket: to(path)?, child: None, since }),
            Self::Program(program) => {
                let (socket, child) = program.start()?;
                Ok(Connection { socket, child: Some(child), since })
            }
        }
    }
}

/// Connects to the socket of a passt.
fn to(path: &Path) -> io::Result<OwnedFd> {
    endpoint::connect(path).map(Into::into).map_err(|err| {
        let text = format!("passt at {}: {err} (start it with: passt -s {0})", path.display());
        io::Error::new(err.kind(), text)
    })
}

impl Program {
    /// Starts it; it ends with the connection.
    fn start(&self) -> io::Result<(OwnedFd, Child)> {
        let (own, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs);
        let number = theirs.as_raw_fd();
        let mut command = Command::new(&self.path);
        command.args(["--foreground", "--quiet", "--fd", &number.to_string()]).stdin(Stdio::null());
        for (option, ports) in [("-t", &self.tcp), ("-u", &self.udp)] {
            for port in ports {
                command.args([option, port]);
            }
        }
        if !self.host_loopback {
            command.args(loopback::options(&self.path, &self.udp)?);
        }
        // SAFETY: between fork and exec, one system call that is safe there.
        unsafe {
            command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        leave_sockets(&mut command);
        let child = command.spawn().map_err(|err| {
            let text = format!("{} can't be started: {err}; install the package passt", self.path.display());
            io::Error::new(err.kind(), text)
        })?;
        Ok((own.into(), child))
    }
}

impl Connection {
    /// Returns the connection's socket, for the switch.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Makes the connection of `uplink` to `source` again whenever it ends, from [`Kept::begin`] on, and gives `pass_on` each new one.
    ///
    /// # Errors
    /// No descriptor or thread is left.
    pub fn keep(
        self,
        source: Source,
        uplink: &str,
        pass_on: impl Fn(Opened, &OwnedFd) + Send + 'static,
    ) -> io::Result<Kept> {
        let stop = Arc::new(Event::new()?);
        let (begin, begun) = mpsc::channel();
        let (stopped, uplink) = (stop.clone(), uplink.to_owned());
        let thread = std::thread::Builder::new().name("net-passt".into()).spawn(move || {
            match begun.recv() {
                Ok(()) => keep(&uplink, &source, self, &stopped, &pass_on),
                // The switch did not take the uplink.
                Err(_) => drop(self),
            }
        })?;
        Ok(Kept { stop, begin: Some(begin), thread: Some(thread) })
    }

    /// Ends the passt that was started for it, and returns its status.
    fn end(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        // It may have ended.
        let _ended = child.kill();
        child.wait().ok()
    }

    /// Waits until passt has closed it. False: `stop` was raised before.
    fn outlast(&self, stop: &Event) -> bool {
        loop {
            let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.socket, PollFlags::RDHUP)];
            // An error: a signal.
            if poll(&mut fds, None).is_ok_and(|n| n > 0) {
                return fds[0].revents().is_empty();
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
    }
}

/// Keeps an uplink's connection until it is dropped.
pub(crate) struct Kept {
    stop: Arc<Event>,
    begin: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Kept {
    /// Lets later connections be passed on, as the switch has the first.
    pub fn begin(&self) {
        // The thread waits for it.
        let _begun = self.begin.as_ref().map(|begin| begin.send(()));
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.stop.raise();
        self.begin = None;
        // A thread that panicked has ended, too.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

fn keep(
    uplink: &str,
    source: &Source,
    mut connection: Connection,
    stop: &Event,
    pass_on: &dyn Fn(Opened, &OwnedFd),
) {
    let mut pause = FIRST_PAUSE;
    while connection.outlast(stop) {
        if connection.since.elapsed() >= LASTING {
            pause = FIRST_PAUSE;
        }
        let status = connection.end().map(|status| format!(" ({status})")).unwrap_or_default();
        tracing::error!("uplink {uplink}: passt ended{status}; the next connection is made in {pause:?}");
        connection = loop {
            if rests(stop, pause) {
                return;
            }
            pause = LONGEST_PAUSE.min(2 * pause);
            match source.connect() {
                Ok(next) => break next,
                Err(err) => tracing::error!("uplink {uplink}: {err}; the next try is in {pause:?}"),
            }
        };
        pass_on(Opened::Passt, &connection.socket);
    }
}

/// Rests for `time`. True: `stop` was raised meanwhile.
fn rests(stop: &Event, time: Duration) -> bool {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // An error: a signal.
        if let Ok(n) = poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&left)) {
            return n > 0;
        }
    }
}
