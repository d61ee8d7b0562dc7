// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's end of a worker's line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::tree::{Answer, Call, Result, Tree};
use crate::worker::{Order, Report};

/// Timeout for a worker's answer: far beyond what any operation takes.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Accepts a connection, within a bound.
pub fn accept(listener: &UnixListener, who: &str) -> std::result::Result<UnixStream, String> {
    let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    match poll(&mut fds, Some(&limit)) {
        Ok(1) => listener.accept().map(|a| a.0).map_err(|e| format!("{who}: {e}")),
        other => Err(format!("{who} does not connect: {other:?}")),
    }
}

/// Makes a socket that a worker or a QEMU will connect to; the path must not exist.
pub fn listen(path: &Path) -> std::result::Result<UnixListener, String> {
    UnixListener::bind(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// A worker.
pub struct Remote {
    name: String,
    reader: Mutex<BufReader<UnixStream>>,
    writer: UnixStream,
}

impl Remote {
    /// `stream` is connected to a worker, or will be: waits until the worker is ready.
    pub fn new(name: &str, stream: UnixStream) -> std::result::Result<Remote, String> {
        let text = |e: std::io::Error| format!("{name}: {e}");
        stream.set_read_timeout(Some(TIMEOUT)).map_err(text)?;
        let writer = stream.try_clone().map_err(text)?;
        let remote = Remote { name: name.to_owned(), reader: Mutex::new(BufReader::new(stream)), writer };
        match remote.receive()? {
            Report::Ready => Ok(remote),
            other => Err(format!("{name}: begins with {other:?}")),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends an order. An error: the worker has ended.
    pub fn send(&self, order: &Order) -> std::result::Result<(), String> {
        let mut line = serde_json::to_vec(order).map_err(|e| e.to_string())?;
        line.push(b'\n');
        (&self.writer).write_all(&line).map_err(|e| format!("{}: {e}", self.name))
    }

    /// Returns the next report. An error: the worker has ended, or the timeout is over.
    pub fn receive(&self) -> std::result::Result<Report, String> {
        let mut line = String::new();
        let since = Instant::now();
        let n =
            self.reader.lock().unwrap_or_else(PoisonError::into_inner).read_line(&mut line).map_err(|e| {
                format!("{}: no report within {} s: {e}", self.name, since.elapsed().as_secs())
            })?;
        if n == 0 || !line.ends_with('\n') {
            return Err(format!("{}: is gone", self.name));
        }
        serde_json::from_str(&line).map_err(|e| format!("{}: {line:?}: {e}", self.name))
    }
}

impl Tree for Remote {
    fn call(&self, call: &Call) -> Result<Answer> {
        let gone = |why: String| {
            eprintln!("{why}");
            Errno::PIPE
        };
        self.send(&Order::Call(call.clone())).map_err(gone)?;
        match self.receive().map_err(gone)? {
            Report::Answer(answer) => answer.map_err(Errno::from_raw_os_error),
            other => Err(gone(format!("{}: {other:?} instead of an answer", self.name))),
        }
    }

    fn far(&self) -> bool {
        true
    }
}
