// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Persistent memory behind caches: the stores that it may hold after a power failure.
//!
//! Stores to one cache line become durable in their order. A line may be written back at any time, and certainly when it was flushed
//! and the flush waited for. So before each wait, of each line any number of its stores since it was last durable may be there. Few
//! such states are tried all; of many: none, all, each line alone, all but each line, and some at random.

use std::collections::BTreeMap;

use crate::recorder::{Order, Store};

const LINE: usize = 64;
/// States of one epoch that are all tried.
const ALL: usize = 24;
const RANDOM: usize = 8;
/// Lines that are tried alone and left out alone.
const ALONE: usize = 12;

/// The numbers of the stores that the memory holds, in order.
pub type Durable = Vec<usize>;

#[derive(Default)]
struct Line {
    /// Stores that may not be durable.
    pending: Vec<usize>,
    /// Of these, how many are durable after the next wait.
    flushed: usize,
}

/// Calls `crash` with the states that memory can be in during `log`, and, last, with those after it.
pub fn each_state(
    log: &[Store],
    orders: &[(usize, Order)],
    mut crash: impl FnMut(&Durable, bool) -> Result<(), String>,
) -> Result<(), String> {
    let mut lines: BTreeMap<usize, Line> = BTreeMap::new();
    let mut durable: Durable = Vec::new();
    let mut next = 0;
    let mut random = 1u64;
    for (before, order) in orders {
        while next < *before {
            lines.entry(log[next].at / LINE).or_default().pending.push(next);
            next += 1;
        }
        match order {
            Order::Flush { at, len } => {
                for line in at / LINE..=(at + len.max(&1) - 1) / LINE {
                    if let Some(line) = lines.get_mut(&line) {
                        line.flushed = line.pending.len();
                    }
                }
            }
            Order::Drain => {
                states(&lines, &durable, &mut random, |state| crash(state, false))?;
                for line in lines.values_mut() {
                    durable.extend(line.pending.drain(..line.flushed));
                    line.flushed = 0;
                }
                lines.retain(|_, line| !line.pending.is_empty());
                durable.sort_unstable();
            }
        }
    }
    for (i, store) in log.iter().enumerate().skip(next) {
        lines.entry(store.at / LINE).or_default().pending.push(i);
    }
    states(&lines, &durable, &mut random, |state| crash(state, true))
}

fn states(
    lines: &BTreeMap<usize, Line>,
    durable: &Durable,
    random: &mut u64,
    mut crash: impl FnMut(&Durable) -> Result<(), String>,
) -> Result<(), String> {
    let lines: Vec<&[usize]> = lines.values().map(|line| &line.pending[..]).collect();
    // The number of each line's stores that are there.
    let mut try_one = |counts: &[usize]| {
        let mut state = durable.clone();
        state.extend(lines.iter().zip(counts).flat_map(|(line, n)| &line[..*n]));
        state.sort_unstable();
        crash(&state)
    };
    let all: Vec<usize> = lines.iter().map(|line| line.len()).collect();
    let product = all.iter().try_fold(1usize, |product, n| product.checked_mul(n + 1).filter(|p| *p <= ALL));
    if let Some(product) = product {
        for mut number in 0..product {
            let mut counts = Vec::with_capacity(all.len());
            for n in &all {
                counts.push(number % (n + 1));
                number /= n + 1;
            }
            try_one(&counts)?;
        }
        return Ok(());
    }
    let none = vec![0; all.len()];
    try_one(&none)?;
    try_one(&all)?;
    let step = 1 + all.len() / ALONE;
    for i in (0..all.len()).step_by(step) {
        for n in 0..=all[i].min(4) {
            let (mut alone, mut without) = (none.clone(), all.clone());
            alone[i] = n;
            without[i] = all[i] - n;
            try_one(&alone)?;
            try_one(&without)?;
        }
    }
    for _ in 0..RANDOM {
        let counts: Vec<usize> = all
            .iter()
            .map(|n| {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                (*random % (*n as u64 + 1)) as usize
            })
            .collect();
        try_one(&counts)?;
    }
    Ok(())
}
