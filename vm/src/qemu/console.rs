// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's [shim](crate::shim) passes on the guest's console and QEMU's output. The supervisor keeps the last lines of each for its errors, and a start waits for a line.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::shim::{Shim, Stream, Watch};
use crate::thread;

/// Bytes of the end that are kept in memory.
const TAIL: usize = 16 << 10;

/// Bytes that are read at once. A VM has two streams, its console and QEMU's log, each with a thread and such a buffer.
const CHUNK: usize = 8 << 10;

/// A stream of one QEMU.
#[derive(Debug, Default)]
pub struct Console {
    inner: Mutex<Inner>,
    said: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    tail: Vec<u8>,
    /// A line has matched the pattern.
    matches: bool,
    pattern: Option<regex_lite::Regex>,
    first_output: Option<Instant>,
    /// QEMU has closed it.
    ended: bool,
}

impl Console {
    /// Reads a stream of the shim's child on a thread of its own until its end; `pattern` is what [`Console::wait_match`] waits for.
    ///
    /// # Errors
    /// When no thread can be had, or the shim does not answer.
    pub fn start(
        shim: &Shim,
        stream: Stream,
        pattern: Option<regex_lite::Regex>,
    ) -> anyhow::Result<Arc<Console>> {
        let (own, its) = UnixStream::pair()?;
        shim.watch(&its, Watch { stream, recent: TAIL, one_child: true })?;
        Ok(Console::over(own, pattern)?)
    }

    /// A stream that has ended.
    pub fn ended() -> Arc<Console> {
        let inner = Inner { ended: true, ..Inner::default() };
        Arc::new(Console { inner: Mutex::new(inner), said: Condvar::new() })
    }

    fn over(reader: UnixStream, pattern: Option<regex_lite::Regex>) -> io::Result<Arc<Console>> {
        let inner = Inner { pattern, ..Inner::default() };
        let console = Arc::new(Console { inner: Mutex::new(inner), said: Condvar::new() });
        let own = console.clone();
        thread::start("console", move || own.pump(reader))?;
        Ok(console)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self, mut reader: UnixStream) {
        let mut buffer = [0; CHUNK];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => self.take(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.lock().ended = true;
        self.said.notify_all();
    }

    fn take(&self, data: &[u8]) {
        let mut inner = self.lock();
        inner.first_output.get_or_insert_with(Instant::now);
        inner.tail.extend_from_slice(data);
        let excess = inner.tail.len().saturating_sub(TAIL);
        inner.tail.drain(..excess);
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

    /// Waits (bounded) for the end of the stream, so that the last words are in.
    pub fn wait_end(&self, limit: Duration) {
        drop(self.said.wait_timeout_while(self.lock(), limit, |i| !i.ended));
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
    use std::io::Write;

    use super::*;

    fn console(pattern: Option<&str>) -> (Arc<Console>, UnixStream) {
        let (ours, guest) = UnixStream::pair().unwrap();
        let pattern = pattern.map(|p| regex_lite::Regex::new(p).unwrap());
        (Console::over(ours, pattern).unwrap(), guest)
    }

    #[test]
    fn what_a_guest_says_is_matched_and_kept_for_errors() {
        let (console, mut guest) = console(Some("^login:"));
        guest.write_all(b"\x1b[2Jfirst\r\n\r\nsec\x07ond\r\nlog").unwrap();
        guest.write_all(b"in: ").unwrap();
        assert!(console.wait_match(Duration::from_secs(60)));
        drop(guest);
        console.wait_end(Duration::from_secs(60));
        assert_eq!(console.last_lines(2), ["second", "login:"]);
        assert_eq!(console.last_lines(9), ["first", "second", "login:"]);
    }

    #[test]
    fn the_end_of_a_guest_ends_the_wait_for_its_readiness() {
        let (console, guest) = console(Some("never"));
        drop(guest);
        assert!(!console.wait_match(Duration::from_secs(3600)));
    }
}
