// SPDX-License-Identifier: Apache-2.0 OR MIT
//! This side of `exec -t`: the user's terminal in raw mode, its keys and its size. It is as it was before however the command ends, a signal to
//! this process included.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::client::{RawTerminal, living, restore_at_signal, write};
use crate::compose::Project;
use crate::guest::terminal::{Size, Terminal};
use crate::project::control::{Event, Feed, Request};
use crate::project::peer;

/// Bytes of keys that are sent at once.
const KEYS: usize = 16 << 10;

/// The terminal at the standard input, or a usual one if that is no terminal.
#[must_use]
pub fn here() -> Terminal {
    let term = std::env::var("TERM").ok().filter(|term| !term.is_empty());
    Terminal { size: size().unwrap_or_default(), term: term.unwrap_or_else(|| "dumb".into()) }
}

fn size() -> Option<Size> {
    let size = rustix::termios::tcgetwinsize(std::io::stdin()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some(Size { rows: size.ws_row, columns: size.ws_col })
}

/// The connection, on which two threads speak.
struct Line(Mutex<Arc<UnixStream>>);

impl Line {
    /// Returns whether the supervisor is there to hear it.
    fn tell(&self, message: &Feed) -> bool {
        peer::send(&self.0.lock().unwrap_or_else(PoisonError::into_inner), message).is_ok()
    }
}

/// Runs a command of a guest on this process's terminal: its exit code.
///
/// # Errors
/// When it can't be run.
pub fn exec(project: &Project, request: &Request) -> anyhow::Result<i32> {
    let mut peer = living(project, request)?;
    let line = Arc::new(Line(Mutex::new(peer.socket())));
    let raw = RawTerminal::enter()?;
    if let Some(raw) = &raw {
        restore_at_signal(raw)?;
        follow_size(line.clone())?;
    }
    feed_keys(line)?;
    let mut code = None;
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => write(&mut std::io::stdout().lock(), &BASE64.decode(data)?)?,
            Some(Event::Err { data }) => write(&mut std::io::stderr().lock(), &BASE64.decode(data)?)?,
            Some(Event::Exit { code: c }) => code = Some(c),
            Some(Event::Done) => return code.context("the command's exit code is missing"),
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(_) => {}
            None => return Err(peer.broken("the supervisor died while the command ran")),
        }
    }
}

/// Tells the guest of each change of the terminal's size.
fn follow_size(line: Arc<Line>) -> anyhow::Result<()> {
    let (mut changed, writer) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGWINCH, writer)?;
    crate::thread::start("size", move || {
        let mut byte = [0];
        while changed.read_exact(&mut byte).is_ok() {
            let Some(size) = size() else { continue };
            if !line.tell(&Feed::Size(size)) {
                break;
            }
        }
    })?;
    Ok(())
}

/// Sends what is typed. The thread ends with the process: a read of a terminal can't be called off.
fn feed_keys(line: Arc<Line>) -> anyhow::Result<()> {
    crate::thread::start("keys", move || {
        let mut buffer = vec![0; KEYS];
        loop {
            let message = match std::io::stdin().read(&mut buffer) {
                Ok(n) if n > 0 => Feed::Input(BASE64.encode(&buffer[..n])),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                _ => Feed::End,
            };
            if !line.tell(&message) || matches!(message, Feed::End) {
                break;
            }
        }
    })?;
    Ok(())
}
