// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ends of waits for other members: the death of the process that a thread of a mount works for, or a limit of time.
//! The kernel waits for the answer to a request though its caller was killed, and doesn't say so: it tells of
//! the first signal alone, which may be one that the caller goes on after. So a thread that waits for other members looks now and then.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Interval of looks.
const LOOK: Duration = Duration::from_millis(200);
const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);

/// Of `/proc/PID/stat`: the thread ends, and has no pending signals any more.
const PF_EXITING: u64 = 4;

#[derive(Clone, Copy)]
struct Caller {
    thread: u32,
    /// Its end counts as its death by a signal.
    ends: bool,
    look: Instant,
    killed: bool,
}

thread_local! {
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
    static LIMIT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Until it is dropped, this thread's waits are limited.
pub(crate) struct Limited(());

impl Drop for Limited {
    fn drop(&mut self) {
        LIMIT.set(None);
    }
}

/// Has the waits of this thread for other members end after `time` with EINTR, as if its caller had been killed.
pub(crate) fn wait_at_most(time: Duration) -> Limited {
    LIMIT.set(Some(Instant::now() + time));
    Limited(())
}

/// Until it is dropped, this thread works for that of another process.
pub(crate) struct Working(());

impl Drop for Working {
    fn drop(&mut self) {
        CALLER.set(None);
    }
}

/// thread: by its number in this PID namespace; 0: it is in none that can be seen.
pub(crate) fn work_for(thread: u32) -> Working {
    work(thread, false)
}

/// The same for what a thread also asks for when it ends.
pub(crate) fn work_for_last(thread: u32) -> Working {
    work(thread, true)
}

fn work(thread: u32, ends: bool) -> Working {
    CALLER.set((thread != 0).then(|| Caller { thread, ends, look: Instant::now() + LOOK, killed: false }));
    Working(())
}

/// Returns whether the process that this thread works for was killed, and only waits for the answer, or the time of [`wait_at_most`] is over.
pub(crate) fn is_killed() -> bool {
    if LIMIT.get().is_some_and(|end| Instant::now() >= end) {
        return true;
    }
    let Some(mut caller) = CALLER.get() else { return false };
    if !caller.killed && Instant::now() >= caller.look {
        caller.killed = has_sigkill(caller.thread) || (caller.ends && is_ending(caller.thread));
        caller.look = Instant::now() + LOOK;
        CALLER.set(Some(caller));
    }
    caller.killed
}

/// Any fatal signal becomes a SIGKILL of each thread. It stays pending while a thread waits for the file system.
fn has_sigkill(thread: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let pending = |line: &str| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(set.trim(), 16).ok()
    };
    status.lines().filter_map(pending).any(|set| set & SIGKILL != 0)
}

fn is_ending(thread: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    // The second field is a name in parentheses that may contain any characters; the flags are the ninth field.
    let flags =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}
