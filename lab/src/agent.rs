// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab's first process in user space. It starts a few workers and takes in orphans; a worker serves one client after
//! another: it runs the client's command in a session of its own, carries its input and output, tells how it ended, and ends it when
//! the client goes away. A worker is a single thread around `poll`.
//!
//! Clients come over virtio-serial ports, one for each worker, where the lab has some. Where it has none ([`crate::bochs`]) they come over
//! TCP: all workers accept from one socket, and a client must first show the lab's token, since any user of the outer
//! machine could connect.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process_group, pidfd_open};
use rustix::termios::{Winsize, tcsetwinsize};
use serde::{Deserialize, Serialize};

use crate::protocol::{Frame, MAX_PAYLOAD, Nonce, Parsed, Start, encode, parse};
use crate::signals::{ChildOf, Signals, detach, signal_changes};

/// The most commands that run in one lab at a time.
pub const PORTS: usize = 8;
/// Names of the virtio-serial ports begin with this; a number follows.
pub const PORT_PREFIX: &str = "tombolo.lab.";
/// The TCP port in a lab without virtio-serial.
pub const TCP_PORT: u16 = 1;
/// Holds the token of a lab without virtio-serial, inside it.
pub const TOKEN: &str = "/run/tombolo-lab/token";
/// The serial port to which such a lab writes its [`Status`], a line of JSON.
pub const STATUS_PORT: &str = "/dev/ttyS1";

/// Input of a command that may wait inside the agent, in bytes; beyond it the port is not read.
const INPUT_WINDOW: usize = 1 << 20;
/// A worker's port when its clients come from the socket on its standard input.
const ACCEPTING: &str = "-";

/// The report of a lab without virtio-serial when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// There is a /dev/kvm.
    pub kvm: bool,
    /// IA32_VMX_VMFUNC (Intel SDM vol. 3, A.11): the VM functions a guest may be allowed. 0 where there is no VMX.
    pub vm_functions: u64,
}

impl Status {
    /// Returns whether EPTP switching (VM function 0) can be allowed.
    pub fn eptp_switching(&self) -> bool {
        self.vm_functions & 1 != 0
    }

    fn here() -> Self {
        const IA32_VMX_VMFUNC: u64 = 0x491;
        let mut value = [0; 8];
        let read =
            File::open("/dev/cpu/0/msr").and_then(|msrs| msrs.read_exact_at(&mut value, IA32_VMX_VMFUNC));
        Self {
            kvm: Path::new("/dev/kvm").exists(),
            // A processor without the register refuses.
            vm_functions: read.map_or(0, |()| u64::from_le_bytes(value)),
        }
    }
}

/// Runs as process 1 of a lab, or as the worker for `port`.
pub fn run(port: Option<&Path>) -> Result<()> {
    port.map_or_else(supervise, serve)
}

/// Starts the workers and reaps children for ever.
fn supervise() -> Result<()> {
    if Path::new(TOKEN).exists() {
        let socket = TcpListener::bind((Ipv4Addr::UNSPECIFIED, TCP_PORT)).context("listening for clients")?;
        for _ in 0..PORTS {
            start_worker(Path::new(ACCEPTING), Stdio::from(OwnedFd::from(socket.try_clone()?)))?;
        }
        let mut line = serde_json::to_string(&Status::here())?;
        line.push('\n');
        fs::write(STATUS_PORT, line).with_context(|| format!("writing to {STATUS_PORT}"))?;
    } else {
        let ports = ports()?;
        if ports.is_empty() {
            bail!("this machine has no port named {PORT_PREFIX}*; the agent runs only inside a lab");
        }
        for port in ports {
            start_worker(&port, Stdio::inherit())?;
        }
    }
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CHILD) => bail!("every worker of the agent ended"),
            Err(error) => return Err(error).context("waiting for children"),
        }
    }
}

fn start_worker(port: &Path, stdin: Stdio) -> Result<()> {
    let own = std::env::current_exe().context("finding the agent's own program")?;
    let mut command = Command::new(own);
    command.args(std::env::args().skip(1)).arg("--port").arg(port).stdin(stdin);
    command.spawn().with_context(|| format!("starting the worker for {}", port.display()))?;
    Ok(())
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
fn serve(port: &Path) -> Result<()> {
    if port == Path::new(ACCEPTING) {
        return accept();
    }
    let changes = Signals::block(&[libc::SIGIO]).context("blocking SIGIO")?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(port)
        .with_context(|| format!("opening {}", port.display()))?;
    signal_changes(&file).with_context(|| format!("watching {}", port.display()))?;
    let mut worker = Worker::new(file, None);
    loop {
        if hung_up(&worker.port)? {
            worker.end_session();
            worker.input.clear();
            // Data or a new client: the kernel signals both. A signal that came before is still pending.
            changes.next().context("waiting for a client")?;
        } else {
            worker.turn()?;
        }
    }
}

/// Serves clients of the listening socket on standard input that know the lab's token.
fn accept() -> Result<()> {
    let token = fs::read(TOKEN).with_context(|| format!("reading {TOKEN}"))?;
    let token = Nonce::try_from(token).map_err(|t| anyhow::anyhow!("{TOKEN} has {} bytes", t.len()))?;
    // SAFETY: the supervisor gave this process its standard input, and nothing else here uses it.
    let socket = TcpListener::from(unsafe { OwnedFd::from_raw_fd(0) });
    loop {
        let (stream, _) = socket.accept().context("accepting a client")?;
        serve_stream(stream, token)?;
    }
}

/// Serves one client until it goes.
fn serve_stream(stream: TcpStream, token: Nonce) -> Result<()> {
    stream.set_nodelay(true).context("setting up a client's connection")?;
    stream.set_nonblocking(true).context("setting up a client's connection")?;
    let mut worker = Worker::new(File::from(OwnedFd::from(stream)), Some(token));
    while !worker.gone {
        worker.turn()?;
    }
    worker.end_session();
    Ok(())
}

struct Worker {
    port: File,
    /// The token that a client must send first; `None`: every client is served.
    token: Option<Nonce>,
    /// A connection's other end has gone, or must not be listened to. Never set for a virtio-serial port, which outlives its clients.
    gone: bool,
    /// A client has greeted. Before, nothing else is listened to.
    greeted: bool,
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
    fn new(port: File, token: Option<Nonce>) -> Self {
        Self { port, token, gone: false, greeted: false, input: Vec::new(), session: None }
    }

    /// Waits until there is something to do, and does it.
    fn turn(&mut self) -> Result<()> {
        let full = self.session.as_ref().is_some_and(|s| s.pending.len() >= INPUT_WINDOW);
        // Clients never close one direction alone.
        let port_events = if full { PollFlags::RDHUP } else { PollFlags::IN | PollFlags::RDHUP };
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
        let closed = fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        drop(fds);
        if closed && self.token.is_some() {
            self.gone = true;
            return Ok(());
        }
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
            Err(error) => return self.broken(error).context("reading the port"),
        }
        while !self.gone {
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
        Ok(())
    }

    /// An error of a connection is its end; one of a virtio-serial port has no explanation.
    fn broken(&mut self, error: io::Error) -> io::Result<()> {
        self.gone = self.token.is_some();
        if self.gone { Ok(()) } else { Err(error) }
    }

    fn handle(&mut self, frame: Frame) -> Result<()> {
        match frame {
            Frame::Hello(nonce) if self.token.is_none_or(|token| token == nonce) => {
                self.greeted = true;
                self.end_session();
                self.send(&Frame::Hello(nonce))
            }
            // The client is not of this lab: it sent another token.
            _ if !self.greeted => {
                self.gone = self.token.is_some();
                Ok(())
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
            // Only an agent sends these. A second greeting with another nonce is ignored.
            Frame::Hello(_) | Frame::Stdout(_) | Frame::Stderr(_) | Frame::Exit(_) | Frame::Failed(_) => {
                Ok(())
            }
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
                    if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
                        return Ok(());
                    }
                }
                Err(error) => return self.broken(error).context("writing to the port"),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bochs::Address;
    use crate::client;

    const SECRET: Nonce = [7; 16];

    /// A lab's folder whose agent, a thread, serves `clients` clients over TCP.
    fn lab(clients: usize) -> (tempfile::TempDir, std::thread::JoinHandle<()>, TcpListener) {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let address = Address { port: socket.local_addr().unwrap().port(), token: SECRET };
        fs::write(folder.path().join("address"), serde_json::to_vec(&address).unwrap()).unwrap();
        fs::write(folder.path().join("status"), "{\"kvm\":true,\"vm_functions\":1}\r\n").unwrap();
        let server = socket.try_clone().unwrap();
        let agent = std::thread::spawn(move || {
            for _ in 0..clients {
                let (stream, _) = server.accept().unwrap();
                serve_stream(stream, SECRET).unwrap();
            }
        });
        (folder, agent, socket)
    }

    fn run(session: &mut client::Session, script: &str, input: &'static [u8]) -> client::Output {
        let start = Start {
            argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            env: vec![("A".into(), "b".into())],
            cwd: "/".into(),
            tty: None,
        };
        let mut output = client::Output { code: 0, stdout: Vec::new(), stderr: Vec::new() };
        output.code = session.run(start, Some(Box::new(input)), &mut output).unwrap();
        output
    }

    #[test]
    fn clients_over_tcp_come_one_after_another_and_get_code_output_and_errors() {
        let (folder, agent, _socket) = lab(2);
        for code in [3, 4] {
            let mut session = client::Session::open(folder.path(), Duration::from_secs(60)).unwrap();
            let output = run(&mut session, &format!("cat; echo $A; echo err >&2; exit {code}"), b"in\n");
            assert_eq!(
                output,
                client::Output { code, stdout: b"in\nb\n".to_vec(), stderr: b"err\n".to_vec() }
            );
            // One session runs any number of commands.
            assert_eq!(run(&mut session, "exit 7", b"").code, 7);
        }
        agent.join().unwrap();
    }

    #[test]
    fn who_does_not_know_the_token_is_not_heard() {
        let (folder, agent, socket) = lab(2);
        let witness = folder.path().join("witness");
        let argv = vec!["/bin/sh".into(), "-c".into(), format!("echo ran >{}", witness.display())];
        let start = Frame::Start(Start { argv, env: Vec::new(), cwd: "/".into(), tty: None });
        for first in [Frame::Hello([8; 16]), start.clone()] {
            let mut stream = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
            stream.write_all(&encode(&first)).unwrap();
            // The agent has gone already, or goes when it reads the first frame.
            let _ = stream.write_all(&encode(&start));
            let mut answer = Vec::new();
            // An end, or a reset where the second frame was still unread.
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.is_empty(), "{answer:?}");
        }
        agent.join().unwrap();
        assert!(!witness.exists());
    }

    #[test]
    fn a_command_ends_with_its_client() {
        let (_folder, agent, socket) = lab(1);
        let mut stream = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
        stream.write_all(&encode(&Frame::Hello(SECRET))).unwrap();
        let argv = vec!["/bin/sh".into(), "-c".into(), "echo pid $$; exec sleep 1000".into()];
        stream
            .write_all(&encode(&Frame::Start(Start { argv, env: Vec::new(), cwd: "/".into(), tty: None })))
            .unwrap();
        let mut seen = Vec::new();
        let mut chunk = [0; 1024];
        // The greeting, then the command's pid.
        while !seen.ends_with(b"\n") {
            let length = stream.read(&mut chunk).unwrap();
            assert_ne!(length, 0);
            seen.extend_from_slice(&chunk[..length]);
        }
        drop(stream);
        // Joins only once the command has been ended and waited for.
        agent.join().unwrap();
        let said = String::from_utf8_lossy(&seen).into_owned();
        let (_, number) = said.trim_end().rsplit_once("pid ").unwrap();
        assert!(!Path::new("/proc").join(number).exists(), "{number} still runs");
    }
}
