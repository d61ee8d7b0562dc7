// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The process that a thread of a mount works for. The kernel waits for the answer to a request though its caller was killed, and doesn't say so: it tells of
//! the first signal alone, which may be one that the caller goes on after. So a thread that waits for other members looks now and then.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Interval of looks.
const LOOK: Duration = Duration::from_millis(200);
const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);

#[derive(Clone, Copy)]
struct Caller {
    thread: u32,
    look: Instant,
    killed: bool,
}

thread_local! {
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
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
    CALLER.set((thread != 0).then(|| Caller { thread, look: Instant::now() + LOOK, killed: false }));
    Working(())
}

/// Returns whether the process that this thread works for was killed, and only waits for the answer.
pub(crate) fn is_killed() -> bool {
    let Some(mut caller) = CALLER.get() else { return false };
    if !caller.killed && Instant::now() >= caller.look {
        caller.killed = has_sigkill(caller.thread);
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
