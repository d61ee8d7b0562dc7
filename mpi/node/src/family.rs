// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes of the job in this VM: all descendants of the node, which adopts those whose parents end.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

/// Time for processes to end after SIGTERM.
const GRACE: Duration = Duration::from_millis(300);
/// Time for the kernel to end what was killed.
const KILLED: Duration = Duration::from_secs(5);
/// The pause between two looks at what still lives.
const LOOK: Duration = Duration::from_millis(5);

/// Ends all descendants of this process. Another thread waits for them, so that they go.
pub fn end() {
    descendants().into_iter().for_each(|pid| sys::send_signal(pid, sys::SIGTERM));
    wait(GRACE, |_| {});
    wait(KILLED, |pid| sys::send_signal(pid, sys::SIGKILL));
}

/// Waits until no descendant is left, and does something to those that are.
fn wait(longest: Duration, act: impl Fn(i32)) {
    let begun = Instant::now();
    loop {
        let left = descendants();
        if left.is_empty() || begun.elapsed() > longest {
            return;
        }
        left.into_iter().for_each(&act);
        thread::sleep(LOOK);
    }
}

/// The living descendants of this process.
fn descendants() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|entry| {
        entry.file_name().to_str()?.parse::<i32>().ok()?;
        parse(&fs::read_to_string(entry.path().join("stat")).ok()?)
    });
    let all: Vec<(i32, i32)> = stats.collect();
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let mut family = vec![own];
    let mut at = 0;
    while let Some(parent) = family.get(at).copied() {
        family.extend(all.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    family.remove(0);
    family
}

/// Returns whether a process is ending or has ended: a peer may have seen its connections close before its parent hears of it.
pub fn is_ending(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| ends(&stat))
}

/// Returns whether the kernel's line is that of a process that ends (PF_EXITING, or a zombie).
fn ends(stat: &str) -> bool {
    const PF_EXITING: u64 = 4;
    let Some((_, rest)) = stat.rsplit_once(')') else { return true };
    let words: Vec<&str> = rest.split_whitespace().collect();
    let flags = words.get(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(PF_EXITING);
    flags & PF_EXITING != 0 || matches!(words[0], "Z" | "X")
}

/// The number of a process and that of its parent; `None`: it has ended. The name in parentheses may have blanks.
fn parse(stat: &str) -> Option<(i32, i32)> {
    let (pid, _) = stat.split_once(' ')?;
    let mut rest = stat.rsplit_once(')')?.1.split_whitespace();
    let state = rest.next()?;
    let parent = rest.next()?.parse().ok()?;
    (state != "Z" && state != "X").then_some((pid.parse().ok()?, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_and_its_parent_are_told_by_the_kernels_line() {
        assert_eq!(parse("12 (a) b) S 7 12 12"), Some((12, 7)));
        assert_eq!(parse("12 (a) Z 7 12 12"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_process_that_ends_is_told_before_its_parent_hears_of_it() {
        assert!(!ends("12 (a) R 7 12 12 0 -1 4194560 9"));
        assert!(ends("12 (a) R 7 12 12 0 -1 4194564 9") && ends("12 (a) Z 7 12 12 0 -1 4194560 9"));
        assert!(!is_ending(1) && is_ending(i32::MAX));
    }
}
