// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab's first process in user space. It starts one worker per virtio-serial port and takes in orphans; a worker
//! serves one client after another: it runs the client's command in a session of its own, carries its input and output, tells how
//! it ended, and ends it when the client goes away. A worker is a single thread around `poll`.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process_group, pidfd_open};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::protocol::{Frame, MAX_PAYLOAD, Parsed, Start, encode, parse};
use crate::signals::{ChildOf, Signals, detach, signal_changes};

/// Names of the ports begin with this; a number follows.
pub const PORT_PREFIX: &str = "tombolo.lab.";

/// Input of a command that may wait inside the agent, in bytes; beyond it the port is not read.
const INPUT_WINDOW: usize = 1 << 20;

/// Runs as process 1: starts the workers and reaps children for ever.
pub fn supervise() -> Result<()> {
    let ports = ports()?;
    if ports.is_empty() {
        bail!("this machine has no port named {PORT_PREFIX}*; the agent runs only inside a lab");
    }
    let own = std::env::current_exe().context("finding the agent's own program")?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    for port in ports {
        Command::new(&own)
            .args(&arguments)
            .arg("--port")
            .arg(&port)
            .spawn()
            .with_context(|| format!("starting the worker for {}", port.display()))?;
    }
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CHILD) => bail!("every worker of the agent ended"),
            Err(error) => return Err(error).context("waiting for children"),
        }
    }
}

fn ports() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let class = "/sys/class/virtio-ports";
    for entry in fs::read_dir(class).with_context(|| format!("reading {class}"))? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim().starts_with(PORT_PREFIX) {
            found.push(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    found.sort();
    Ok(found)
}

/// Serves the clients of one port, one after another, for ever.
pub fn serve(port: &PathBuf) -> Result<()> {
    let changes = Signals::block(&[libc::SIGIO]).context("blocking SIGIO")?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(port)
        .with_context(|| format!("opening {}", port.display()))?;
    signal_changes(&file).with_context(|| format!("watching {}", port.display()))?;
    let mut worker = Worker { port: file, changes, input: Vec::new(), session: None };
    loop {
        worker.turn()?;
    }
}

struct Worker {
    port: File,
    changes: Signals,
    /// Bytes from the client that are no whole frame yet.
    input: Vec<u8>,
    session: Option<Session>,
}

/// A command that runs, and the ends of its pipes or of its terminal.
struct Session {
    child: Child,
    ended: OwnedFd,
    stdin: Option<OwnedFd>,
    pending: VecDeque<u8>,
    at_end: bool,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    terminal: bool,
}

impl Worker {
    fn turn(&mut self) -> Result<()> {
        let connected = !hung_up(&self.port)?;
        if !connected {
            self.end_session();
            self.input.clear();
            // Data or a new client: the kernel signals both. A signal that came before is still pending.
            self.changes.next().context("waiting for a client")?;
            return Ok(());
        }
        let full = self.session.as_ref().is_some_and(|s| s.pending.len() >= INPUT_WINDOW);
        let port_events = if full { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&self.port, port_events)];
        if let Some(session) = &self.session {
            fds.push(PollFd::new(&session.ended, PollFlags::IN));
            for fd in [&session.stdout, &session.stderr].into_iter().flatten() {
                fds.push(PollFd::new(fd, PollFlags::IN));
            }
            if let Some(stdin) = session.stdin.as_ref().filter(|_| !session.pending.is_empty()) {
                fds.push(PollFd::new(stdin, PollFlags::OUT));
            }
        }
        rustix::io::retry_on_intr(|| poll(&mut fds, None)).context("waiting for work")?;
        let readable = fds[0].revents().contains(PollFlags::IN);
        drop(fds);
        if readable {
            self.read_port()?;
        }
        self.carry()
    }

    fn read_port(&mut self) -> Result<()> {
        let mut chunk = [0; 32 * 1024];
        match self.port.read(&mut chunk) {
            Ok(length) => self.input.extend_from_slice(&chunk[..length]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error).context("reading the port"),
        }
        loop {
            match parse(&self.input) {
                Parsed::More(skipped) => {
                    self.input.drain(..skipped);
                    return Ok(());
                }
                Parsed::Broken(_, used) => {
                    self.input.drain(..used);
                }
                Parsed::Frame(frame, used) => {
                    self.input.drain(..used);
                    self.handle(frame)?;
                }
            }
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<()> {
        match frame {
            Frame::Hello(nonce) => {
                self.end_session();
                self.send(&Frame::Hello(nonce))
            }
            Frame::Start(start) => {
                self.end_session();
                match Session::start(&start) {
                    Ok(session) => {
                        self.session = Some(session);
                        Ok(())
                    }
                    Err(error) => {
                        let mut text = format!("{error:#}");
                        text.truncate(text.floor_char_boundary_at(MAX_PAYLOAD));
                        self.send(&Frame::Failed(text))
                    }
                }
            }
            Frame::Stdin(data) => {
                if let Some(session) = &mut self.session {
                    session.at_end |= data.is_empty();
                    session.pending.extend(data);
                    session.feed();
                }
                Ok(())
            }
            Frame::Resize(rows, columns) => {
                if let Some(terminal) =
                    self.session.as_ref().filter(|s| s.terminal).and_then(|s| s.stdout.as_ref())
                {
                    tcsetwinsize(terminal, winsize(rows, columns)).context("resizing the terminal")?;
                }
                Ok(())
            }
            // Only an agent sends these.
            Frame::Stdout(_) | Frame::Stderr(_) | Frame::Exit(_) | Frame::Failed(_) => Ok(()),
        }
    }

    /// Moves output to the client, and tells it when the command has ended and nothing is left in its pipes.
    fn carry(&mut self) -> Result<()> {
        let Some(session) = &mut self.session else { return Ok(()) };
        session.feed();
        let ended = session.child.try_wait().context("asking for the command's state")?;
        let mut frames = Vec::new();
        let mut moved = false;
        for (stream, wrap) in [
            (&mut session.stdout, Frame::Stdout as fn(Vec<u8>) -> Frame),
            (&mut session.stderr, Frame::Stderr as fn(Vec<u8>) -> Frame),
        ] {
            if let Some(data) = take_output(stream)? {
                moved = true;
                frames.push(wrap(data));
            }
        }
        // Output that a background child may still write later is not waited for, as `docker exec` does.
        let finished = ended.filter(|_| !moved);
        if let Some(status) = finished {
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            frames.push(Frame::Exit(code));
            // Its background children live on: `run -- tombolo up` must leave its VMs behind.
            self.session = None;
        }
        for frame in frames {
            self.send(&frame)?;
        }
        Ok(())
    }

    /// Writes a whole frame, or gives up when the client has gone; then the next turn ends the session.
    fn send(&mut self, frame: &Frame) -> Result<()> {
        let bytes = encode(frame);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.port.write(rest) {
                Ok(0) => return Ok(()),
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut fds = [PollFd::new(&self.port, PollFlags::OUT)];
                    rustix::io::retry_on_intr(|| poll(&mut fds, None)).context("waiting for the port")?;
                    if fds[0].revents().contains(PollFlags::HUP) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error).context("writing to the port"),
            }
        }
        Ok(())
    }

    fn end_session(&mut self) {
        if let Some(mut session) = self.session.take() {
            session.end();
        }
    }
}

/// Cutting text at a character.
trait FloorCharBoundary {
    fn floor_char_boundary_at(&self, limit: usize) -> usize;
}

impl FloorCharBoundary for String {
    fn floor_char_boundary_at(&self, limit: usize) -> usize {
        (0..=limit.min(self.len())).rev().find(|i| self.is_char_boundary(*i)).unwrap_or(0)
    }
}

fn hung_up(port: &File) -> Result<bool> {
    let mut fds = [PollFd::new(port, PollFlags::empty())];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now))).context("asking for the port's state")?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Up to one frame of output; None when there is none now. A stream at its end becomes None itself.
fn take_output(stream: &mut Option<OwnedFd>) -> Result<Option<Vec<u8>>> {
    let Some(fd) = stream else { return Ok(None) };
    let mut data = vec![0; MAX_PAYLOAD];
    match rustix::io::retry_on_intr(|| rustix::io::read(&*fd, &mut data)) {
        // A terminal whose last user has gone answers EIO.
        Ok(0) | Err(rustix::io::Errno::IO) => {
            *stream = None;
            Ok(None)
        }
        Ok(length) => {
            data.truncate(length);
            Ok(Some(data))
        }
        Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(error) => Err(error).context("reading the command's output"),
    }
}

fn winsize(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
    Ok(())
}

impl Session {
    fn start(start: &Start) -> Result<Self> {
        let (program, arguments) = start.argv.split_first().context("no command was given")?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(start.env.iter().cloned()).current_dir(&start.cwd);
        let terminal = start.tty.map(|(rows, columns)| open_terminal(rows, columns)).transpose()?;
        if let Some((_, slave)) = &terminal {
            detach(&mut command, ChildOf::Terminal);
            command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave.try_clone()?);
        } else {
            detach(&mut command, ChildOf::Us);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot run {program:?} in {:?} inside the lab", start.cwd))?;
        let pid = Pid::from_child(&child);
        let ended = pidfd_open(pid, PidfdFlags::empty()).context("watching the command")?;
        let (stdin, stdout, stderr) = match terminal {
            Some((master, _)) => (Some(master.try_clone()?), Some(master), None),
            None => (
                child.stdin.take().map(OwnedFd::from),
                child.stdout.take().map(OwnedFd::from),
                child.stderr.take().map(OwnedFd::from),
            ),
        };
        for fd in [&stdin, &stdout, &stderr].into_iter().flatten() {
            nonblocking(fd.as_fd())?;
        }
        let terminal = start.tty.is_some();
        Ok(Self { child, ended, stdin, pending: VecDeque::new(), at_end: false, stdout, stderr, terminal })
    }

    /// Writes what the command takes now; what it no longer wants is dropped.
    fn feed(&mut self) {
        while let Some(stdin) = &self.stdin {
            let (data, _) = self.pending.as_slices();
            if data.is_empty() {
                // A terminal has no end of input; its user types one.
                if self.at_end && !self.terminal {
                    self.stdin = None;
                }
                return;
            }
            match rustix::io::write(stdin, data) {
                Ok(length) => drop(self.pending.drain(..length)),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => self.stdin = None,
            }
        }
        self.pending.clear();
    }

    fn end(&mut self) {
        let pid = Pid::from_child(&self.child);
        // Both fail only where the process is already gone.
        let _ = kill_process_group(pid, Signal::KILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn open_terminal(rows: u16, columns: u16) -> Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
        .context("opening a terminal")?;
    grantpt(&master).context("granting the terminal")?;
    unlockpt(&master).context("unlocking the terminal")?;
    let name = ptsname(&master, Vec::new()).context("naming the terminal")?;
    let slave = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
        .context("opening the terminal's other end")?;
    tcsetwinsize(&slave, winsize(rows, columns)).context("setting the terminal's size")?;
    Ok((master, slave))
}
