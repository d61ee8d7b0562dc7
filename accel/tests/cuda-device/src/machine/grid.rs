// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A launch: its blocks run one after the other on as many threads as the host has processors. Blocks of a cooperative launch wait for each other, so they
//! take turns on one thread.

use super::block::{Block, Fault, Launch, Progress};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Instructions of a block's turn in a cooperative launch.
const TURN: u64 = 100_000;
/// Launches of fewer threads than this don't pay for a thread of the host.
const SMALL: u64 = 2048;

pub fn run(launch: &Launch<'_>, cooperative: bool) -> Result<(), Fault> {
    let blocks = launch.grid.iter().map(|&size| u64::from(size)).product::<u64>();
    if cooperative {
        return take_turns(launch, blocks);
    }
    let threads = launch.block.iter().map(|&size| u64::from(size)).product::<u64>();
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let workers = if blocks * threads < SMALL { 1 } else { processors.min(blocks) };
    let next = AtomicU64::new(0);
    let fault = Mutex::new(None);
    let work = || {
        let mut block = Block::new(launch);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= blocks {
                return;
            }
            block.start(index(launch, number));
            if let Err(error) = block.run(u64::MAX) {
                // The others find no more blocks.
                next.store(blocks, Ordering::Relaxed);
                fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
        }
    };
    if workers == 1 {
        work();
    } else {
        std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    }
    fault.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn index(launch: &Launch<'_>, number: u64) -> [u32; 3] {
    let [x, y, _] = launch.grid.map(u64::from);
    [(number % x) as u32, (number / x % y) as u32, (number / x / y) as u32]
}

fn take_turns(launch: &Launch<'_>, blocks: u64) -> Result<(), Fault> {
    let mut running = Vec::new();
    for number in 0..blocks {
        let mut block = Block::new(launch);
        block.start(index(launch, number));
        running.push(block);
    }
    while !running.is_empty() {
        let mut left = Vec::with_capacity(running.len());
        for mut block in running {
            if block.run(TURN)? == Progress::Running {
                left.push(block);
            }
        }
        running = left;
    }
    Ok(())
}
