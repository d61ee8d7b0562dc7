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
use crate::machine::port::PREFIX;
use crate::project::control::{Event, Feed};
use crate::project::peer::Peer;
use crate::project::state::random_hex;
use crate::shim::{self, Watch};

/// Milliseconds between looks at a flag while a socket is watched.
const LOOK: i64 = 100;

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

/// SIGINT, SIGTERM and SIGHUP, made waitable.
#[derive(Debug)]
pub struct Signals {
    reader: UnixStream,
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
    Ok(Signals { reader })
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
    /// Waits for one: true; false only when nothing can be heard any more.
    pub fn wait(&self) -> bool {
        let mut byte = [0];
        (&self.reader).read_exact(&mut byte).is_ok()
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
    let port = input.then(|| machine.add_port(&format!("{PREFIX}input.{}", random_hex(8)))).transpose()?;
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

/// Makes the connection a view of the VM's console, which the VM's shim serves from here on.
///
/// # Errors
/// When the VM's shim does not answer.
pub fn watch(machine: &Machine, mut peer: Peer, recent: usize) -> anyhow::Result<()> {
    anyhow::ensure!(!machine.has_ended() || machine.is_to_start_again(), "the VM has ended");
    peer.send(&Event::Done)?;
    machine.shim().watch(&peer.socket(), Watch { stream: shim::Stream::Console, recent, one_child: false })
}
