// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor's side of what lasts: a command in a guest, a console, the wait for a client's going, signals.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::guest::exec::{self, Ended, Exec, Input, Stream};
use crate::guest::terminal::{self, Terminal, Typed};
use crate::machine::Machine;
use crate::project::barrier::BACKGROUND;
use crate::project::control::{Event, Feed};
use crate::project::peer::Peer;
use crate::project::state::random_hex;

/// Milliseconds between looks at a flag while a socket is watched.
const LOOK: i64 = 100;
/// The time between two checks whether a console's client has gone while its guest does not read.
const READY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Waits until the other side of `socket` goes or says anything (true), or `finished` is set (false).
pub fn wait_hangup(socket: &UnixStream, finished: &AtomicBool) -> bool {
    let limit = Timespec { tv_sec: 0, tv_nsec: LOOK * 1_000_000 };
    while !finished.load(Ordering::Acquire) {
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN | PollFlags::RDHUP)];
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return true,
        }
    }
    false
}

/// Returns whether the other side of `socket` has closed it.
pub fn has_gone(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
}

/// Returns whether the other side of `socket` neither writes nor reads any more.
fn has_left(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
}

/// SIGINT, SIGTERM and SIGHUP, made waitable.
#[derive(Debug)]
pub struct Signals {
    reader: UnixStream,
    /// The program before has heard one and not told of it.
    heard: AtomicBool,
}

/// From here on these signals are told rather than end the process. A process that was started to ignore SIGHUP, as by nohup(1), goes on to ignore it.
///
/// # Errors
/// When they can't be caught.
pub fn signals() -> anyhow::Result<Signals> {
    let (reader, writer) = UnixStream::pair()?;
    let all = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
    for signal in
        all.into_iter().filter(|signal| *signal != signal_hook::consts::SIGHUP || !is_ignored(*signal))
    {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(Signals { reader, heard: AtomicBool::new(false) })
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: the call changes nothing, and sets `action`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

impl Signals {
    /// Takes over a signal that the program before this one has received and not handled. No process writes to its socket any more.
    pub fn take_over(&self, mut before: UnixStream) {
        let mut byte = [0];
        self.heard.store(before.read_exact(&mut byte).is_ok(), Ordering::Release);
    }

    /// The socket through which they are heard, for the next program of this process.
    pub fn socket(&self) -> &UnixStream {
        &self.reader
    }

    /// Waits until there is one, and does not take it.
    pub fn wait_there(&self) {
        let mut fds = [PollFd::new(&self.reader, PollFlags::IN)];
        while !self.heard.load(Ordering::Acquire) {
            match rustix::event::poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => {}
                _ => return,
            }
        }
    }

    /// Returns whether there is one, and does not take it.
    pub fn are_there(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.reader, PollFlags::IN)];
        self.heard.load(Ordering::Acquire) || rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
    }

    /// Waits for one: true; false only when nothing can be heard any more.
    pub fn wait(&self) -> bool {
        let mut byte = [0];
        self.heard.swap(false, Ordering::AcqRel) || (&self.reader).read_exact(&mut byte).is_ok()
    }
}

/// Runs a command for a client and reports its output and its end.
///
/// # Errors
/// When the agent fails, with the VM's name.
pub fn exec(
    machine: &Machine,
    exec: &Exec,
    input: bool,
    mut peer: Peer,
    report: &dyn Fn(&Event),
) -> anyhow::Result<()> {
    if exec.argv.is_empty() {
        anyhow::bail!("there is no command to run");
    }
    // The reader ends with the connection, and with it the command: also where there is no input.
    let (sender, receiver) = mpsc::sync_channel(4);
    let client = peer.socket();
    let gone = Arc::new(AtomicBool::new(false));
    let seen = gone.clone();
    crate::thread::start("exec-input", move || {
        while let Ok(Some(feed)) = peer.receive::<Feed>() {
            let message = match feed {
                Feed::Input(text) => match BASE64.decode(text) {
                    Ok(data) => Input::Data(data),
                    Err(_) => break,
                },
                Feed::Size(_) => continue,
                Feed::End => Input::End,
            };
            if input && sender.send(message).is_err() {
                break;
            }
        }
        seen.store(true, Ordering::Release);
    })?;
    let mut output = |stream: Stream, bytes: &[u8]| {
        let data = BASE64.encode(bytes);
        report(&match stream {
            Stream::Out => Event::Out { data },
            Stream::Err => Event::Err { data },
        });
    };
    // The reader waits while a command does not take its input, and sees no end then.
    let cancelled = || gone.load(Ordering::Acquire) || has_gone(&client);
    let port =
        input.then(|| machine.add_port(&format!("org.tombolo.input.{}", random_hex(8)))).transpose()?;
    let input = port.as_ref().map(|port| (port, receiver));
    let ended = exec::run(machine.agent(), exec, input, &cancelled, &mut output);
    if let (Err(e), true) = (&ended, cancelled()) {
        // Its client can't be told any more.
        let command = exec.argv.join(" ");
        crate::say!("the VM '{}': '{command}' was interrupted and may still run: {e:#}", machine.name());
    }
    let ended = ended?;
    match ended {
        Ended::Code(code) => report(&Event::Exit { code }),
        Ended::Cancelled => {}
    }
    Ok(())
}

/// Runs a command on a terminal for a client, as [`exec()`].
///
/// # Errors
/// When QEMU or the agent fails, and what the guest lacks.
pub fn exec_on_terminal(
    machine: &Machine,
    exec: &Exec,
    terminal: &Terminal,
    mut peer: Peer,
    report: &(dyn Fn(&Event) + Sync),
) -> anyhow::Result<()> {
    let (sender, typed) = mpsc::sync_channel(4);
    let client = peer.socket();
    let gone = Arc::new(AtomicBool::new(false));
    let seen = gone.clone();
    crate::thread::start("exec-terminal", move || {
        while let Ok(Some(feed)) = peer.receive::<Feed>() {
            let message = match feed {
                Feed::Input(text) => match BASE64.decode(text) {
                    Ok(keys) => Typed::Keys(keys),
                    Err(_) => break,
                },
                Feed::Size(size) => Typed::Size(size),
                Feed::End => Typed::End,
            };
            if sender.send(message).is_err() {
                break;
            }
        }
        seen.store(true, Ordering::Release);
    })?;
    let output = |stream: Stream, bytes: &[u8]| {
        let data = BASE64.encode(bytes);
        report(&match stream {
            Stream::Out => Event::Out { data },
            Stream::Err => Event::Err { data },
        });
    };
    let cancelled = || gone.load(Ordering::Acquire) || has_gone(&client);
    match terminal::run(machine, exec, terminal, &typed, &cancelled, &output)? {
        Ended::Code(code) => report(&Event::Exit { code }),
        Ended::Cancelled => {}
    }
    Ok(())
}

/// Makes the connection a view of the VM's console.
///
/// # Errors
/// When the VM has ended.
pub fn watch(machine: &Machine, mut peer: Peer, recent: usize) -> anyhow::Result<Arc<UnixStream>> {
    peer.send(&Event::Done)?;
    let (ahead, socket) = peer.into_raw();
    machine.console().watch(socket.clone(), recent)?;
    machine.console().type_in(&ahead)?;
    Ok(socket)
}

/// Types what a client that watches a console sends, until either side ends.
///
/// # Errors
/// When QEMU takes no more.
pub fn type_all(machine: &Machine, socket: &Arc<UnixStream>) -> anyhow::Result<()> {
    let typed = read_all(machine, socket);
    machine.console().unwatch(socket);
    // The client may have gone already.
    let _ = socket.shutdown(std::net::Shutdown::Both);
    typed
}

fn read_all(machine: &Machine, mut socket: &UnixStream) -> anyhow::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let waited = rustix::event::poll(&mut fds, None);
        // A guest that does not read keeps neither this thread beyond its client nor an upgrade.
        while !machine.console().is_ready_within(READY) {
            if has_left(socket) {
                return Ok(());
            }
        }
        let _inside = BACKGROUND.enter(&format!("what is typed on the console of '{}'", machine.name()));
        match waited.map_err(std::io::Error::from).and_then(|_| socket.read(&mut buffer)) {
            Ok(0) => return Ok(()),
            Ok(n) => machine.console().type_in(&buffer[..n])?,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(()),
        }
    }
}
