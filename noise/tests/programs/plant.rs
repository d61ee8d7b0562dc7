// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Noise of known size while a file exists: `noise-plant FILE BEGUN [CLEAR_REFS]`. It makes the file BEGUN when it begins, and at its end writes a line for
//! each stretch: ticks of the time-stamp counter at its begin and end.
//!
//! It takes its CPU for 200 µs every 10 ms; a stretch has no interruption. With CLEAR_REFS, a file `/proc/PID/clear_refs`, it has the kernel write-protect all
//! pages of that process every second: from the begin of a stretch to its end KVM maps none of the memory of a guest in it.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_millis(10);
const UNMAP_PERIOD: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_micros(200);

fn now() -> u64 {
    // SAFETY: every x86-64 processor has both.
    unsafe {
        _mm_lfence();
        _rdtsc()
    }
}

/// The shortest of many distances between two readings; one that is ten times as long is an interruption.
fn usual() -> u64 {
    let distance = |_| {
        let before = now();
        std::hint::black_box(Instant::now());
        now().saturating_sub(before)
    };
    (0..10_000).map(distance).min().unwrap_or(1).max(1)
}

/// Takes the CPU for [`BUSY`]. An interruption, which is longer than `long` ticks, begins another stretch.
fn take_cpu(long: u64, stretches: &mut Vec<(u64, u64)>) {
    let begin = Instant::now();
    let (mut start, mut last) = (now(), now());
    while begin.elapsed() < BUSY {
        let time = now();
        if time.saturating_sub(last) > long {
            stretches.push((start, last));
            start = time;
        }
        last = time;
    }
    stretches.push((start, last));
}

/// Has the kernel write-protect a process's pages. Their mappings in a guest end at the begin, and none is made before the end.
fn unmap(mut clear_refs: &File, stretches: &mut Vec<(u64, u64)>) {
    let start = now();
    clear_refs
        .write_all(b"4")
        .expect("the kernel can track which pages are written to (CONFIG_MEM_SOFT_DIRTY)");
    stretches.push((start, now()));
}

fn main() {
    let mut files = std::env::args().skip(1);
    let file = files.next().expect("the file for whose life this runs");
    let begun = files.next().expect("the file that says that this runs");
    let clear_refs =
        files.next().map(|file| OpenOptions::new().write(true).open(file).expect("the process is one's own"));
    let period = if clear_refs.is_some() { UNMAP_PERIOD } else { PERIOD };
    let long = 10 * usual();
    let mut stretches = Vec::new();
    std::fs::write(begun, "").expect("a file can be made");
    let mut next = Instant::now();
    while Path::new(&file).exists() {
        next += period;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        match &clear_refs {
            Some(clear_refs) => unmap(clear_refs, &mut stretches),
            None => take_cpu(long, &mut stretches),
        }
    }
    for (start, end) in stretches {
        println!("{start} {end}");
    }
}
