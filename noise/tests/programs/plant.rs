// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that takes a CPU for 200 µs every 10 ms while its first file exists, then writes when it had the CPU: ticks of the time-stamp counter at
//! the begin and end of each stretch without an interruption. It makes its second file when it begins.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::path::Path;
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_millis(10);
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

fn main() {
    let mut files = std::env::args().skip(1);
    let file = files.next().expect("the file for whose life this runs");
    let long = 10 * usual();
    let mut stretches = Vec::new();
    std::fs::write(files.next().expect("the file that says that this runs"), "").expect("a file can be made");
    let mut next = Instant::now();
    while Path::new(&file).exists() {
        next += PERIOD;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
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
    for (start, end) in stretches {
        println!("{start} {end}");
    }
}
