// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A stream of what a VM says: a log of bounded size, the last bytes for those who come later, people who watch and type.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::Watch;
use crate::log::Log;

/// Bytes of the end that are kept in memory.
const TAIL: usize = 16 << 10;
/// Bytes that are read at once.
const CHUNK: usize = 8 << 10;
/// For a watcher to take what is said. One that does not is dropped.
const SLOW: Duration = Duration::from_millis(200);

/// A stream with its log and its watchers, who stay from one child to the next.
pub(super) struct Streamed {
    log: Log,
    /// The child's end for input and output; `None`: it has closed it.
    socket: Option<UnixStream>,
    tail: Vec<u8>,
    watchers: Vec<Watcher>,
}

struct Watcher {
    socket: UnixStream,
    /// Typed bytes that the child has not read yet.
    typed: Vec<u8>,
    /// It types no more, and still watches.
    silent: bool,
    /// It is sent away when the child ends.
    one_child: bool,
}

impl Streamed {
    pub(super) fn new(log: &Path) -> Streamed {
        Streamed { log: Log::new(log), socket: None, tail: Vec::new(), watchers: Vec::new() }
    }

    /// Goes on with the stream of the next child.
    pub(super) fn begin(&mut self, socket: OwnedFd) -> io::Result<()> {
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        self.tail.clear();
        self.socket = Some(socket);
        Ok(())
    }

    /// Adds a watcher.
    pub(super) fn watch(&mut self, socket: OwnedFd, watch: Watch) -> io::Result<()> {
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(SLOW))?;
        let start = self.tail.len().saturating_sub(watch.recent);
        (&socket).write_all(&self.tail[start..])?;
        self.watchers.push(Watcher { socket, typed: Vec::new(), silent: false, one_child: watch.one_child });
        Ok(())
    }

    /// Sends all watchers away.
    pub(super) fn unwatch(&mut self) {
        self.watchers.clear();
    }

    /// The sockets to be polled for reading, the child's first: with each whether it is polled for writing as well.
    pub(super) fn polled(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        let waits = self.watchers.iter().any(|w| !w.typed.is_empty());
        let child = self.socket.iter().map(|socket| (socket.as_fd(), waits));
        child.chain(self.watchers.iter().map(|w| (w.socket.as_fd(), false))).collect()
    }

    /// Whether the `index`th of [`Streamed::polled`] is to be read: not what is typed while the child takes nothing.
    pub(super) fn wants(&self, index: usize) -> bool {
        let index = index.checked_sub(usize::from(self.socket.is_some()));
        index.and_then(|index| self.watchers.get(index)).is_none_or(|w| w.typed.is_empty() && !w.silent)
    }

    /// Passes on what is there; `ready` is as [`Streamed::polled`].
    pub(super) fn pump(&mut self, ready: &[bool]) {
        let (child, watchers) = ready.split_at(usize::from(self.socket.is_some()).min(ready.len()));
        for (watcher, ready) in self.watchers.iter_mut().zip(watchers) {
            if *ready && watcher.typed.is_empty() && !watcher.silent {
                watcher.read();
            }
        }
        self.type_in();
        self.watchers.retain(|watcher| !watcher.has_gone());
        if child.first().is_some_and(|ready| *ready) {
            self.read();
        }
    }

    /// Gives the child what was typed, as far as it takes that. Between two children it is lost.
    fn type_in(&mut self) {
        for watcher in &mut self.watchers {
            let Some(mut socket) = self.socket.as_ref() else {
                watcher.typed.clear();
                continue;
            };
            match socket.write(&watcher.typed) {
                Ok(n) => drop(watcher.typed.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => watcher.typed.clear(),
            }
        }
    }

    /// Reads what the child says.
    fn read(&mut self) {
        let mut buffer = [0; CHUNK];
        let Some(mut socket) = self.socket.as_ref() else { return };
        match socket.read(&mut buffer) {
            Ok(n) if n > 0 => self.say(&buffer[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            _ => self.socket = None,
        }
    }

    fn say(&mut self, data: &[u8]) {
        self.log.write(data);
        self.tail.extend_from_slice(data);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
        self.watchers.retain(|w| (&w.socket).write_all(data).is_ok());
    }

    /// Reads to the end what a child that has ended has said. A process beside it that still has its end is not heard any more.
    pub(super) fn drain(&mut self) {
        let mut buffer = [0; CHUNK];
        while let Some(mut socket) = self.socket.as_ref() {
            match socket.read(&mut buffer) {
                Ok(n) if n > 0 => self.say(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                _ => self.socket = None,
            }
        }
        self.watchers.retain(|w| !w.one_child);
    }
}

impl Watcher {
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        match self.socket.read(&mut buffer) {
            Ok(0) => self.silent = true,
            Ok(n) => self.typed.extend_from_slice(&buffer[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.silent = true,
        }
    }

    /// It neither types nor reads any more.
    fn has_gone(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.socket, rustix::event::PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
    }
}
