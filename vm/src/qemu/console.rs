// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's serial console: everything it says goes to a log of bounded size, the last lines stay at hand for errors, and
//! people may watch and type.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};
use tombolo_zone::keep::{Keep, Kept};

use crate::log::Log;
use crate::moment;
use crate::project::barrier::BACKGROUND;
use crate::thread;

/// Bytes of the end that are kept in memory.
const TAIL: usize = 16 << 10;

/// Bytes that are read at once. A VM has two consoles, its own and QEMU's, each with a thread and such a buffer.
const CHUNK: usize = 8 << 10;

/// The console of one VM.
#[derive(Debug)]
pub struct Console {
    inner: Mutex<Inner>,
    said: Condvar,
}

#[derive(Debug)]
struct Inner {
    log: Log,
    tail: Vec<u8>,
    watchers: Vec<Arc<UnixStream>>,
    /// QEMU's end, for input; `None`: an upgrade has lost it, and the console has ended.
    input: Option<Arc<UnixStream>>,
    /// A line has matched the pattern.
    matches: bool,
    pattern: Option<regex_lite::Regex>,
    first_output: Option<Instant>,
    /// QEMU has closed it.
    ended: bool,
}

/// The state of a console that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub struct ConsoleState {
    socket: Option<Kept>,
    tail: Vec<u8>,
    matches: bool,
    #[serde(with = "moment")]
    first_output: Option<Instant>,
    ended: bool,
}

impl Console {
    /// Reads `socket` on a thread of its own until its end; `pattern` is what [`Console::wait_match`] waits for.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(
        socket: UnixStream,
        log: &Path,
        pattern: Option<regex_lite::Regex>,
    ) -> anyhow::Result<Arc<Console>> {
        let log = Log::new(log);
        let reader = socket.try_clone()?;
        let console = Arc::new(Console {
            inner: Mutex::new(Inner {
                log,
                tail: Vec::new(),
                watchers: Vec::new(),
                input: Some(Arc::new(socket)),
                matches: false,
                pattern,
                first_output: None,
                ended: false,
            }),
            said: Condvar::new(),
        });
        console.begin_pump(reader)?;
        Ok(console)
    }

    /// Goes on with the console of a new QEMU for the same VM, after the end of the one before: log and watchers stay.
    ///
    /// # Errors
    /// When the QEMU before has not ended, or no thread can be had.
    pub fn resume(
        self: &Arc<Self>,
        socket: UnixStream,
        pattern: Option<regex_lite::Regex>,
    ) -> anyhow::Result<()> {
        let reader = socket.try_clone()?;
        let mut inner = self.lock();
        anyhow::ensure!(inner.ended, "the console is still another QEMU's");
        inner.input = Some(Arc::new(socket));
        inner.tail.clear();
        (inner.matches, inner.pattern, inner.first_output, inner.ended) = (false, pattern, None, false);
        drop(inner);
        Ok(self.begin_pump(reader)?)
    }

    /// Reads on a thread of its own. Where none can be had the console has ended, and goes on with the VM's next QEMU.
    fn begin_pump(self: &Arc<Self>, reader: UnixStream) -> std::io::Result<()> {
        let own = self.clone();
        let pump = thread::start("console", move || own.pump(reader));
        pump.map(drop).inspect_err(|_| {
            let mut inner = self.lock();
            (inner.input, inner.ended) = (None, true);
        })
    }

    /// Notes what the next program needs. Those who watch are handed over by themselves.
    pub fn hand_over(&self, keep: &mut Keep) -> ConsoleState {
        let inner = self.lock();
        ConsoleState {
            socket: inner.input.as_ref().map(|input| keep.add(input)),
            tail: inner.tail.clone(),
            matches: inner.matches,
            first_output: inner.first_output,
            ended: inner.ended,
        }
    }

    /// Goes on with the console of a VM that was up in the program before. Beside it: why that could not be done, where a descriptor is not open
    /// or no thread can be had. The console has ended then, and goes on with the VM's next QEMU.
    pub fn take_over(state: ConsoleState, log: &Path) -> (Arc<Console>, anyhow::Result<()>) {
        let ConsoleState { socket, tail, matches, first_output, ended } = state;
        let inner = Inner {
            log: Log::new(log),
            tail,
            watchers: Vec::new(),
            input: None,
            matches,
            pattern: None,
            first_output,
            ended: true,
        };
        let console = Arc::new(Console { inner: Mutex::new(inner), said: Condvar::new() });
        let taken = match socket {
            Some(socket) if !ended => console.listen_on(socket),
            Some(ended) => ended.take().map(drop).map_err(Into::into),
            None => Ok(()),
        };
        (console, taken)
    }

    fn listen_on(self: &Arc<Self>, socket: Kept) -> anyhow::Result<()> {
        let socket = UnixStream::from(socket.take()?);
        let reader = socket.try_clone()?;
        {
            let mut inner = self.lock();
            (inner.input, inner.ended) = (Some(Arc::new(socket)), false);
        }
        Ok(self.begin_pump(reader)?)
    }

    /// Sends those away who watch: the VM is over.
    pub fn close(&self) {
        for watcher in self.lock().watchers.drain(..) {
            // It fails where the watcher has gone already.
            let _ = watcher.shutdown(std::net::Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self, mut reader: UnixStream) {
        let mut buffer = [0; CHUNK];
        loop {
            let mut fds = [PollFd::new(&reader, PollFlags::IN)];
            let waited = rustix::event::poll(&mut fds, None);
            let _inside = BACKGROUND.enter("a console");
            let n = match waited.map_err(std::io::Error::from).and_then(|_| reader.read(&mut buffer)) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            self.take(&buffer[..n]);
        }
        let mut inner = self.lock();
        inner.ended = true;
        self.said.notify_all();
    }

    fn take(&self, data: &[u8]) {
        let mut inner = self.lock();
        inner.first_output.get_or_insert_with(Instant::now);
        inner.log.write(data);
        inner.tail.extend_from_slice(data);
        let excess = inner.tail.len().saturating_sub(TAIL);
        inner.tail.drain(..excess);
        // A watcher that does not read is dropped rather than waited for.
        inner.watchers.retain(|w| (&**w).write_all(data).is_ok());
        if !inner.matches {
            if let Some(pattern) = &inner.pattern {
                let tail = String::from_utf8_lossy(&inner.tail);
                if tail.lines().any(|l| pattern.is_match(l)) {
                    inner.matches = true;
                }
            }
        }
        self.said.notify_all();
    }

    /// Waits until a line has matched the pattern: false at the time limit or the console's end.
    pub fn wait_match(&self, limit: Duration) -> bool {
        let (inner, _) = self
            .said
            .wait_timeout_while(self.lock(), limit, |i| !i.matches && !i.ended)
            .unwrap_or_else(PoisonError::into_inner);
        inner.matches
    }

    /// When the guest (or its firmware) first said something.
    pub fn first_output(&self) -> Option<Instant> {
        self.lock().first_output
    }

    /// The last lines, at most `count`, without control characters.
    pub fn last_lines(&self, count: usize) -> Vec<String> {
        last_lines(&self.lock().tail, count)
    }

    /// Waits (bounded) for QEMU's end of the console, so that the last words are in.
    pub fn wait_end(&self, limit: Duration) {
        drop(self.said.wait_timeout_while(self.lock(), limit, |i| !i.ended));
    }

    /// As [`Console::wait_end`], and the console has ended then: a process beside QEMU that still has its end is not heard any more.
    pub fn end_within(&self, limit: Duration) {
        self.wait_end(limit);
        let left = {
            let inner = self.lock();
            inner.input.clone().filter(|_| !inner.ended)
        };
        if let Some(socket) = left {
            // The pump reads its end now.
            let _gone_already = socket.shutdown(std::net::Shutdown::Both);
            self.wait_end(limit);
        }
    }

    /// Gives `watcher` what is said from now on, after the last `recent` bytes, until [`Console::close`].
    ///
    /// # Errors
    /// When the console has ended.
    pub fn watch(&self, watcher: Arc<UnixStream>, recent: usize) -> std::io::Result<()> {
        let mut inner = self.lock();
        if inner.ended {
            return Err(std::io::Error::other("the VM has ended"));
        }
        watcher.set_write_timeout(Some(Duration::from_millis(200)))?;
        let start = inner.tail.len().saturating_sub(recent);
        (&*watcher).write_all(&inner.tail[start..])?;
        inner.watchers.push(watcher);
        Ok(())
    }

    /// A watcher has gone.
    pub fn unwatch(&self, watcher: &Arc<UnixStream>) {
        self.lock().watchers.retain(|w| !Arc::ptr_eq(w, watcher));
    }

    /// Waits at most `limit` until [`Console::type_in`] of some KB would not block, and returns whether that is so. QEMU does not read for a
    /// guest that does not, once the buffers between them hold some 100 KB.
    pub fn is_ready_within(&self, limit: Timespec) -> bool {
        let inner = self.lock();
        let Some(input) = inner.input.clone().filter(|_| !inner.ended) else { return true };
        drop(inner);
        // type_in() tells of an error.
        !matches!(rustix::event::poll(&mut [PollFd::new(&*input, PollFlags::OUT)], Some(&limit)), Ok(0))
    }

    /// Types into the console. Between two QEMUs of a VM that reboots the input is lost.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub fn type_in(&self, data: &[u8]) -> std::io::Result<()> {
        let inner = self.lock();
        let Some(input) = inner.input.clone().filter(|_| !inner.ended) else { return Ok(()) };
        // A guest that does not read must not keep what it says from being heard.
        drop(inner);
        (&*input).write_all(data)
    }
}

/// The last `count` lines of `bytes` that are not empty, without escape sequences and control characters.
pub fn last_lines(bytes: &[u8], count: usize) -> Vec<String> {
    let text = plain(&String::from_utf8_lossy(bytes));
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|l| !l.is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|l| (*l).to_owned()).collect()
}

/// `text` without escape sequences and control characters other than newlines and tabs.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                if chars.peek() == Some(&'[') {
                    chars.next();
                    // Parameters end at the first letter.
                    for c in chars.by_ref() {
                        if c.is_ascii_alphabetic() || c == '\n' {
                            break;
                        }
                    }
                } else {
                    chars.next();
                }
            }
            '\n' | '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(pattern: Option<&str>) -> (Arc<Console>, UnixStream, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let (ours, guest) = UnixStream::pair().unwrap();
        let pattern = pattern.map(|p| regex_lite::Regex::new(p).unwrap());
        (Console::start(ours, &dir.path().join("c.log"), pattern).unwrap(), guest, dir)
    }

    #[test]
    fn what_a_guest_says_is_logged_matched_and_kept_for_errors() {
        let (console, mut guest, dir) = console(Some("^login:"));
        guest.write_all(b"\x1b[2Jfirst\r\n\r\nsec\x07ond\r\nlog").unwrap();
        guest.write_all(b"in: ").unwrap();
        assert!(console.wait_match(Duration::from_secs(60)));
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        assert_eq!(console.last_lines(2), ["second", "login:"]);
        assert_eq!(console.last_lines(9), ["first", "second", "login:"]);
        let log = std::fs::read(dir.path().join("c.log")).unwrap();
        assert_eq!(log, b"\x1b[2Jfirst\r\n\r\nsec\x07ond\r\nlogin: ");
    }

    #[test]
    fn the_end_of_a_guest_ends_the_wait_for_its_readiness() {
        let (console, guest, _dir) = console(Some("never"));
        drop(guest);
        assert!(!console.wait_match(Duration::from_secs(3600)));
    }

    #[test]
    fn a_watcher_sees_the_recent_past_and_what_follows() {
        let (console, mut guest, _dir) = console(Some("past"));
        guest.write_all(b"the past\n").unwrap();
        assert!(console.wait_match(Duration::from_secs(60)));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        console.watch(Arc::new(theirs), 5).unwrap();
        guest.write_all(b"the future\n").unwrap();
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        console.close();
        let mut seen = String::new();
        ours.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "past\nthe future\n");
    }

    #[test]
    fn log_and_watchers_outlast_a_reboot_and_its_readiness_is_a_new_one() {
        let (console, mut guest, dir) = console(Some("login"));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        console.watch(Arc::new(theirs), 0).unwrap();
        guest.write_all(b"first login\n").unwrap();
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        console.type_in(b"lost").unwrap();
        let (next, mut guest) = UnixStream::pair().unwrap();
        console.resume(next, Some(regex_lite::Regex::new("login").unwrap())).unwrap();
        assert!(!console.wait_match(Duration::ZERO), "the old login is no sign");
        guest.write_all(b"second login\n").unwrap();
        assert!(console.wait_match(Duration::from_secs(60)));
        console.type_in(b"root").unwrap();
        drop(console.resume(UnixStream::pair().unwrap().0, None).unwrap_err());
        let mut typed = [0; 4];
        guest.read_exact(&mut typed).unwrap();
        assert_eq!(&typed, b"root");
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        console.close();
        let mut seen = String::new();
        ours.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "first login\nsecond login\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("c.log")).unwrap(), seen);
    }

    #[test]
    fn a_log_does_not_grow_without_bound() {
        let (console, mut guest, dir) = console(None);
        let line = [b'x'; 1 << 16];
        for _ in 0..((3 * crate::log::LIMIT) >> 16) {
            guest.write_all(&line).unwrap();
        }
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        let size: u64 =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(size <= 2 * crate::log::LIMIT && size > crate::log::LIMIT, "{size}");
    }
}
