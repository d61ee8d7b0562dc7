// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The messages of the switch and its keeper on standard error. Logging never fails, never panics and never blocks: lines go
//! into a queue of bounded size, and a thread writes them. A reader that doesn't read, a full disk or a guest that provokes
//! messages again and again costs lines, which are counted, and no frame.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Most bytes that wait to be written.
const ROOM: usize = 256 << 10;
/// Lines that each thread may log, and all together: at once after a silence, and per second from then on. A port has a thread
/// of its own, so its front-end can't silence other ports.
const EACH: Limit = Limit { burst: 40, per_second: 2 };
const TOGETHER: Limit = Limit { burst: 1000, per_second: 100 };
/// Threads whose lines are counted; those that have been silent longest make room.
const THREADS: usize = 1024;
/// Time that the process waits at its end for the last lines.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A limit of lines.
#[derive(Clone, Copy, Debug)]
struct Limit {
    burst: u32,
    per_second: u32,
}

/// The rest of a limit.
#[derive(Clone, Copy, Debug)]
struct Budget {
    left: u32,
    since: Instant,
}

impl Budget {
    fn new(limit: Limit, now: Instant) -> Self {
        Self { left: limit.burst, since: now }
    }

    /// Returns whether a line may be logged at `now`, and counts it.
    fn admits(&mut self, limit: Limit, now: Instant) -> bool {
        let gained =
            now.saturating_duration_since(self.since).as_millis() * u128::from(limit.per_second) / 1000;
        if gained > 0 {
            self.since = now;
            self.left = self.left.saturating_add(u32::try_from(gained).unwrap_or(u32::MAX)).min(limit.burst);
        }
        let admits = self.left > 0;
        self.left = self.left.saturating_sub(1);
        admits
    }
}

/// Lines that wait, and how many were refused.
#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Box<[u8]>>,
    bytes: usize,
    lost: u64,
    together: Option<Budget>,
    threads: BTreeMap<u64, Budget>,
    /// A writing thread exists.
    written: bool,
    /// The thread is writing.
    busy: bool,
}

impl Queue {
    /// Returns whether `thread` may log a line at `now`, and counts it.
    fn admits(&mut self, thread: u64, now: Instant) -> bool {
        if self.threads.len() >= THREADS && !self.threads.contains_key(&thread) {
            let quiet = Duration::from_secs((EACH.burst / EACH.per_second).into());
            self.threads.retain(|_, budget| now.saturating_duration_since(budget.since) < quiet);
            if self.threads.len() >= THREADS {
                return false;
            }
        }
        let own = self.threads.entry(thread).or_insert_with(|| Budget::new(EACH, now));
        let together = self.together.get_or_insert_with(|| Budget::new(TOGETHER, now));
        own.admits(EACH, now) && together.admits(TOGETHER, now)
    }

    fn push(&mut self, thread: u64, line: &[u8], now: Instant) {
        if !self.admits(thread, now) || self.bytes + line.len() > ROOM {
            self.lost += 1;
            return;
        }
        if self.lost > 0 {
            let gap = format!("({} lines were left out)\n", std::mem::take(&mut self.lost));
            self.add(gap.as_bytes());
        }
        self.add(line);
    }

    fn add(&mut self, line: &[u8]) {
        self.bytes += line.len();
        self.lines.push_back(line.into());
    }

    fn take(&mut self) -> Option<Box<[u8]>> {
        let line = self.lines.pop_front()?;
        self.bytes -= line.len();
        Some(line)
    }
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    lines: VecDeque::new(),
    bytes: 0,
    lost: 0,
    together: None,
    threads: BTreeMap::new(),
    written: false,
    busy: false,
});
static CHANGED: Condvar = Condvar::new();

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(line: &[u8]) {
    // Standard error may have no reader.
    let _unheard = io::stderr().write_all(line);
}

/// The writer for `tracing`.
#[derive(Clone, Copy, Debug)]
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = queue();
        // SAFETY: asks for a number.
        let thread = unsafe { libc::gettid() };
        queue.push(thread.unsigned_abs().into(), line, Instant::now());
        if queue.written {
            CHANGED.notify_all();
        } else {
            while let Some(line) = queue.take() {
                write(&line);
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

/// Installs the logger of the process. A subscriber that a test or an embedding program has installed stays.
pub(crate) fn open() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let _taken = tracing_subscriber::fmt()
        .with_writer(Lines)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .with_env_filter(filter)
        .log_internal_errors(false)
        .try_init();
}

/// Starts the writing thread of this process. A forked process needs one of its own.
pub(crate) fn start() {
    if std::mem::replace(&mut queue().written, true) {
        return;
    }
    if std::thread::Builder::new().name("net-log".into()).spawn(write_all).is_err() {
        queue().written = false;
    }
}

fn write_all() {
    let mut waiting = queue();
    loop {
        waiting = CHANGED.wait_while(waiting, |q| q.lines.is_empty()).unwrap_or_else(PoisonError::into_inner);
        let Some(line) = waiting.take() else { continue };
        waiting.busy = true;
        drop(waiting);
        write(&line);
        waiting = queue();
        waiting.busy = false;
        CHANGED.notify_all();
    }
}

/// Waits until all was written, or a second.
pub(crate) fn finish() {
    let pending = |q: &mut Queue| q.written && (q.busy || !q.lines.is_empty());
    // A timeout loses lines only.
    let _late = CHANGED.wait_timeout_while(queue(), LAST_WORDS, pending);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_makes_the_switch_say_much_loses_its_own_lines_and_the_log_says_how_many() {
        let mut queue = Queue::default();
        let begin = Instant::now();
        for _ in 0..1000 {
            queue.push(1, b"again\n", begin);
        }
        assert_eq!((queue.lines.len(), queue.lost), (EACH.burst as usize, 1000 - u64::from(EACH.burst)));
        while queue.take().is_some() {}
        queue.push(2, b"another\n", begin);
        let said: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(said[0][..], b"(960 lines were left out)\n"[..]);
        assert_eq!(said[1][..], b"another\n"[..]);
        for n in 0..1000 {
            queue.push(1, b"and on\n", begin + Duration::from_millis(1000 + 10 * n));
        }
        let said = std::iter::from_fn(|| queue.take()).filter(|l| l[..] == *b"and on\n").count();
        assert!(said <= 11 * EACH.per_second as usize, "{said} in ten seconds");
    }

    #[test]
    fn what_nobody_takes_and_threads_without_end_fill_no_memory() {
        let mut queue = Queue::default();
        let begin = Instant::now();
        for n in 0..5_000u64 {
            queue.push(n, &[b'x'; 1000], begin + Duration::from_millis(n));
        }
        assert!(queue.bytes <= ROOM && queue.threads.len() <= THREADS);
    }
}
