// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a command in a lab from outside: takes a free port, opens a session, carries input and output.
//!
//! A port is a Unix socket where QEMU runs the lab. Where Bochs does, all ports are one TCP address, and what a command leaves for
//! outside is fetched over the session.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::agent::PORTS;
use crate::bochs::{self, Address};
use crate::initramfs::OUT;
use crate::protocol::{Frame, MAX_PAYLOAD, Nonce, Parsed, Start, encode, parse, prelude};
use crate::qemu::Files;

/// A session with the agent on one port; the port is free again when it is dropped.
pub struct Session {
    /// A socket of either family.
    stream: File,
    input: Vec<u8>,
    number: usize,
    /// The lab shares no folder with this machine.
    apart: bool,
    _lock: File,
}

/// The outcome of a command whose output was collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code, or 128 plus the signal.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Error output.
    pub stderr: Vec<u8>,
}

/// Sees output as it comes.
pub trait Sink {
    /// A piece of standard output.
    fn stdout(&mut self, data: &[u8]) -> io::Result<()>;
    /// A piece of error output.
    fn stderr(&mut self, data: &[u8]) -> io::Result<()>;
}

impl Sink for Output {
    fn stdout(&mut self, data: &[u8]) -> io::Result<()> {
        self.stdout.extend_from_slice(data);
        Ok(())
    }
    fn stderr(&mut self, data: &[u8]) -> io::Result<()> {
        self.stderr.extend_from_slice(data);
        Ok(())
    }
}

/// Passes output on to this process's own.
pub struct Through;

impl Sink for Through {
    fn stdout(&mut self, data: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(data)?;
        out.flush()
    }
    fn stderr(&mut self, data: &[u8]) -> io::Result<()> {
        io::stderr().lock().write_all(data)
    }
}

impl Session {
    /// Takes a free port of the lab in `folder` and waits at most `timeout` for the agent's answer.
    pub fn open(folder: &Path, timeout: Duration) -> Result<Self> {
        let (number, lock) = free_port(folder)?;
        let address = Address::of(folder)?;
        let (stream, nonce, greeting) = match &address {
            Some(address) => {
                if bochs::status(folder)?.is_none() {
                    bail!("the lab is only just starting: wait until it is up");
                }
                let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, address.port)).with_context(|| {
                    format!("connecting to port {} of this machine: is the lab up?", address.port)
                })?;
                stream.set_nodelay(true)?;
                (OwnedFd::from(stream), address.token, encode(&Frame::Hello(address.token)))
            }
            None => {
                let path = Files::port(folder, number);
                let stream = UnixStream::connect(&path)
                    .with_context(|| format!("connecting to {}: is the lab up?", path.display()))?;
                let nonce = nonce()?;
                (OwnedFd::from(stream), nonce, prelude(nonce))
            }
        };
        // The agent reads only once it runs: what does not fit into the socket waits there.
        let limit = |time: Option<Duration>| {
            set_socket_timeout(&stream, Timeout::Send, time)?;
            set_socket_timeout(&stream, Timeout::Recv, time)
        };
        limit(Some(timeout))?;
        let mut session = Self {
            stream: stream.try_clone()?.into(),
            input: Vec::new(),
            number,
            apart: address.is_some(),
            _lock: lock,
        };
        session.stream.write_all(&greeting).context("greeting the lab's agent")?;
        session.await_hello(nonce)?;
        limit(None)?;
        Ok(session)
    }

    fn await_hello(&mut self, nonce: Nonce) -> Result<()> {
        loop {
            match self.next().context("waiting for the lab's agent")? {
                Some(Frame::Hello(answer)) if answer == nonce => return Ok(()),
                // Left over from a client before us.
                Some(_) => {}
                None => bail!("the lab ended before its agent answered"),
            }
        }
    }

    /// The next frame, or None at the end of the lab.
    fn next(&mut self) -> Result<Option<Frame>> {
        loop {
            match parse(&self.input) {
                Parsed::Frame(frame, used) => {
                    self.input.drain(..used);
                    return Ok(Some(frame));
                }
                Parsed::Broken(_, used) => drop(self.input.drain(..used)),
                Parsed::More(used) => {
                    self.input.drain(..used);
                    let mut chunk = [0; 64 * 1024];
                    match self.stream.read(&mut chunk) {
                        Ok(0) => return Ok(None),
                        Ok(length) => self.input.extend_from_slice(&chunk[..length]),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
    }

    /// Runs a command to its end. `input` (if any) is read by a thread of its own, which may outlive the call where reading cannot be
    /// interrupted. Returns the exit code.
    pub fn run(
        &mut self,
        start: Start,
        input: Option<Box<dyn Read + Send>>,
        sink: &mut dyn Sink,
    ) -> Result<i32> {
        let encoded = serde_json::to_vec(&start)?.len();
        if encoded > MAX_PAYLOAD {
            bail!(
                "the command and its environment take {encoded} bytes, at most {MAX_PAYLOAD} can be sent: put it into a script"
            );
        }
        self.stream.write_all(&encode(&Frame::Start(start)))?;
        let writer = Arc::new(Mutex::new(self.stream.try_clone()?));
        match input {
            Some(input) => {
                let writer = writer.clone();
                std::thread::spawn(move || feed(input, &writer));
            }
            None => send(&writer, &Frame::Stdin(Vec::new()))?,
        }
        loop {
            match self.next()? {
                Some(Frame::Stdout(data)) => sink.stdout(&data)?,
                Some(Frame::Stderr(data)) => sink.stderr(&data)?,
                Some(Frame::Exit(code)) => return Ok(code),
                Some(Frame::Failed(text)) => bail!("{text}"),
                Some(_) => {}
                None => bail!("the lab ended while the command ran"),
            }
        }
    }

    /// Tells the command's terminal its new size.
    pub fn resizer(&self) -> Result<impl Fn(u16, u16) + Send + use<>> {
        let writer = Mutex::new(self.stream.try_clone()?);
        Ok(move |rows, columns| {
            // A lab that has gone needs no size; the reader tells.
            let _ = send(&writer, &Frame::Resize(rows, columns));
        })
    }

    /// The folder whose files come back, outside and inside the lab: a fresh one for this session.
    pub fn out_folder(&mut self, folder: &Path) -> Result<(PathBuf, String)> {
        let name = format!("session-{}", self.number);
        let outside = folder.join("out").join(&name);
        if outside.exists() {
            fs::remove_dir_all(&outside).with_context(|| format!("emptying {}", outside.display()))?;
        }
        fs::create_dir_all(&outside).with_context(|| format!("creating {}", outside.display()))?;
        let inside = format!("{OUT}/{name}");
        if self.apart {
            let script = format!("rm -rf {inside} && mkdir -p {inside}");
            self.helper(&["/bin/busybox", "sh", "-c", &script], &mut Through)?;
        }
        Ok((outside, inside))
    }

    /// Brings what is in `inside` to `outside`, where the two are not one folder anyway.
    pub fn collect(&mut self, outside: &Path, inside: &str) -> Result<()> {
        if !self.apart {
            return Ok(());
        }
        let mut unpack = Unpack::into(outside)?;
        self.helper(&["/bin/busybox", "tar", "-C", inside, "-cf", "-", "."], &mut unpack)?;
        unpack.finish()
    }

    /// Runs a program of ours in the lab.
    fn helper(&mut self, argv: &[&str], sink: &mut dyn Sink) -> Result<()> {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        let code = self.run(Start { argv, env: Vec::new(), cwd: "/".into(), tty: None }, None, sink)?;
        if code != 0 {
            bail!("handling the command's files in the lab failed with {code}");
        }
        Ok(())
    }
}

/// Unpacks an archive that comes as output.
struct Unpack {
    tar: Child,
}

impl Unpack {
    fn into(folder: &Path) -> Result<Self> {
        let tar = Command::new("tar").arg("-C").arg(folder).args(["-xf", "-"]).stdin(Stdio::piped()).spawn();
        Ok(Self { tar: tar.context("running tar (package tar)")? })
    }

    fn finish(mut self) -> Result<()> {
        drop(self.tar.stdin.take());
        let status = self.tar.wait().context("waiting for tar")?;
        if !status.success() {
            bail!("tar could not unpack the files from the lab ({status})");
        }
        Ok(())
    }
}

impl Sink for Unpack {
    fn stdout(&mut self, data: &[u8]) -> io::Result<()> {
        self.tar.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(data))
    }
    fn stderr(&mut self, data: &[u8]) -> io::Result<()> {
        Through.stderr(data)
    }
}

fn free_port(folder: &Path) -> Result<(usize, File)> {
    for number in 0..PORTS {
        let path = Files::port(folder, number).with_extension("lock");
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok((number, file));
        }
    }
    bail!("all {PORTS} ports of this lab are busy: wait for a command in it to end")
}

fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

fn send(writer: &Mutex<File>, frame: &Frame) -> io::Result<()> {
    let mut stream = writer.lock().map_err(|_| io::Error::other("a thread that sent to the lab panicked"))?;
    stream.write_all(&encode(frame))
}

fn feed(mut input: Box<dyn Read + Send>, writer: &Mutex<File>) {
    let mut chunk = [0; MAX_PAYLOAD];
    loop {
        let data = match input.read(&mut chunk) {
            Ok(length) => &chunk[..length],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // Input that cannot be read ends, as it does for a local command.
            Err(_) => &chunk[..0],
        };
        if send(writer, &Frame::Stdin(data.to_vec())).is_err() || data.is_empty() {
            return;
        }
    }
}

/// A terminal that passes every key on, until this is dropped.
pub struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Makes standard input raw; None where it is no terminal.
    pub fn enter() -> Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin).context("reading the terminal's mode")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("setting the terminal's mode")?;
        Ok(Some(Self { before }))
    }

    /// Rows and columns of the terminal on standard input.
    pub fn size() -> Option<(u16, u16)> {
        tcgetwinsize(io::stdin()).ok().map(|size| (size.ws_row, size.ws_col))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nothing better can be done for a terminal that has gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Copies what is in `from` into `to`, folders and plain files; returns how many files.
pub fn copy_back(from: &Path, to: &Path) -> Result<usize> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let mut count = 0;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            count += copy_back(&entry.path(), &target)?;
        } else if kind.is_file() {
            fs::copy(entry.path(), &target).with_context(|| format!("writing {}", target.display()))?;
            count += 1;
        }
    }
    Ok(count)
}
