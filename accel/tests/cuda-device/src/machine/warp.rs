// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exchanges between the lanes of a warp (PTX ISA 8.8 §9.7.9.6, §9.7.13). Each function gets the lanes that take part, as bits of a warp.

use super::program::Reduce;

pub const WARP: usize = 32;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Match {
    Any,
    All,
}

/// The lane that `lane` reads from, and whether that lies in its segment; `control` packs the clamp and the segment's mask.
pub fn source(shuffle: Shuffle, lane: u32, operand: u32, control: u32) -> (u32, bool) {
    let (operand, clamp, segment) = (operand & 31, control & 31, control >> 8 & 31);
    let max = (lane & segment) | (clamp & !segment);
    let min = lane & segment;
    let (from, inside) = match shuffle {
        Shuffle::Up => (lane.wrapping_sub(operand), lane as i32 - operand as i32 >= max as i32),
        Shuffle::Down => (lane + operand, lane + operand <= max),
        Shuffle::Butterfly => (lane ^ operand, lane ^ operand <= max),
        Shuffle::Index => {
            let from = min | (operand & !segment);
            (from, from <= max)
        }
    };
    if inside { (from & 31, true) } else { (lane, false) }
}

/// The result for a lane with membership `mask`; `predicates` are the lanes' bits.
pub fn vote(vote: Vote, mask: u32, predicates: u32) -> u32 {
    let set = predicates & mask;
    match vote {
        Vote::All => u32::from(set == mask),
        Vote::Any => u32::from(set != 0),
        Vote::Uniform => u32::from(set == 0 || set == mask),
        Vote::Ballot => set,
    }
}

/// The lanes of `mask` whose value is the lane's own; for `All`, the mask if all are equal.
pub fn matching(how: Match, mask: u32, values: &[u64; WARP], own: u64) -> u32 {
    let equal = (0..WARP)
        .filter(|&lane| mask >> lane & 1 != 0 && values[lane] == own)
        .fold(0, |equal, lane| equal | 1 << lane);
    match how {
        Match::Any => equal,
        Match::All => {
            if equal == mask {
                mask
            } else {
                0
            }
        }
    }
}

pub fn reduce(how: Reduce, mask: u32, values: &[u64; WARP]) -> u32 {
    let values = (0..WARP).filter(|&lane| mask >> lane & 1 != 0).map(|lane| values[lane] as u32);
    match how {
        Reduce::Add => values.fold(0, u32::wrapping_add),
        Reduce::And => values.fold(u32::MAX, |all, value| all & value),
        Reduce::Or => values.fold(0, |all, value| all | value),
        Reduce::Xor => values.fold(0, |all, value| all ^ value),
        Reduce::Min(true) => values.map(|value| value as i32).min().unwrap_or(0) as u32,
        Reduce::Max(true) => values.map(|value| value as i32).max().unwrap_or(0) as u32,
        Reduce::Min(false) => values.min().unwrap_or(0),
        Reduce::Max(false) => values.max().unwrap_or(0),
    }
}
