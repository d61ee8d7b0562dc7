// SPDX-License-Identifier: Apache-2.0 OR MIT
//! atom and red (PTX ISA 8.8 §9.7.13.5). Blocks run on several threads, so each is an atomic instruction of the host, on the word that holds the value.

use super::rows::Lane;
use crate::ptx::ast::Space;
use crate::ptx::types::Ty;
use half::{bf16, f16};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Update {
    Add,
    Min,
    Max,
    Inc,
    Dec,
    Exchange,
    CompareExchange,
    And,
    Or,
    Xor,
}

/// d = the old value, unless d is SINK; address a + offset, operands b and c. Several rows for vectors, one after the other.
pub struct Atomic {
    pub space: Space,
    pub update: Update,
    pub ty: Ty,
    pub offset: i64,
    pub frame: bool,
    /// (d, b) of each element of a vector; empty for a scalar.
    pub elements: Box<[(u32, u32)]>,
}

impl Update {
    pub fn parse(name: &str) -> Option<Update> {
        Some(match name {
            "add" => Update::Add,
            "min" => Update::Min,
            "max" => Update::Max,
            "inc" => Update::Inc,
            "dec" => Update::Dec,
            "exch" => Update::Exchange,
            "cas" => Update::CompareExchange,
            "and" => Update::And,
            "or" => Update::Or,
            "xor" => Update::Xor,
            _ => return None,
        })
    }

    /// The new value: of the old one and the operands.
    pub fn apply(self, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
        match self {
            Update::Exchange => b,
            Update::CompareExchange => {
                if old == b & ty.mask() {
                    c
                } else {
                    old
                }
            }
            Update::And => old & b,
            Update::Or => old | b,
            Update::Xor => old ^ b,
            Update::Inc => {
                if old as u32 >= b as u32 {
                    0
                } else {
                    u64::from(old as u32 + 1)
                }
            }
            Update::Dec => {
                if old as u32 == 0 || old as u32 > b as u32 {
                    b
                } else {
                    u64::from(old as u32 - 1)
                }
            }
            Update::Add => add(ty, old, b),
            Update::Min => extreme(ty, old, b, true),
            Update::Max => extreme(ty, old, b, false),
        }
    }
}

fn add(ty: Ty, old: u64, b: u64) -> u64 {
    match ty {
        Ty::F32 => (f32::get(old) + f32::get(b)).put(),
        Ty::F64 => (f64::get(old) + f64::get(b)).put(),
        Ty::F16 => f16::from_f32(f16::get(old).to_f32() + f16::get(b).to_f32()).put(),
        Ty::Bf16 => bf16::from_f32(bf16::get(old).to_f32() + bf16::get(b).to_f32()).put(),
        Ty::F16x2 => add(Ty::F16, old & 0xffff, b & 0xffff) | add(Ty::F16, old >> 16, b >> 16) << 16,
        Ty::Bf16x2 => add(Ty::Bf16, old & 0xffff, b & 0xffff) | add(Ty::Bf16, old >> 16, b >> 16) << 16,
        _ => old.wrapping_add(b),
    }
}

fn extreme(ty: Ty, old: u64, b: u64, least: bool) -> u64 {
    macro_rules! pick {
        ($t:ty) => {{
            let (old, b) = (<$t>::get(old), <$t>::get(b));
            (if least == (b < old) && b != old { b } else { old }).put()
        }};
    }
    match ty {
        Ty::S32 => pick!(i32),
        Ty::S64 => pick!(i64),
        Ty::U64 => pick!(u64),
        Ty::F32 => pick!(f32),
        Ty::F64 => pick!(f64),
        Ty::F16 => pick!(f16),
        Ty::Bf16 => pick!(bf16),
        Ty::F16x2 => {
            extreme(Ty::F16, old & 0xffff, b & 0xffff, least)
                | extreme(Ty::F16, old >> 16, b >> 16, least) << 16
        }
        Ty::Bf16x2 => {
            extreme(Ty::Bf16, old & 0xffff, b & 0xffff, least)
                | extreme(Ty::Bf16, old >> 16, b >> 16, least) << 16
        }
        _ => pick!(u32),
    }
}

/// Replaces the value at `at` and returns the old one.
///
/// # Safety
/// `at` is aligned to the type's size, and valid for reads and writes.
pub unsafe fn update(at: *mut u8, update: Update, ty: Ty, b: u64, c: u64) -> u64 {
    macro_rules! on {
        ($atomic:ty, $word:ty) => {{
            // SAFETY: the caller's promise.
            let word = unsafe { <$atomic>::from_ptr(at.cast()) };
            match (update, ty.is_float()) {
                (Update::Add, false) => u64::from(word.fetch_add(b as $word, Ordering::SeqCst)),
                (Update::Exchange, _) => u64::from(word.swap(b as $word, Ordering::SeqCst)),
                _ => {
                    let new = |old: $word| Some(update.apply(ty, u64::from(old), b, c) as $word);
                    u64::from(word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, new).unwrap_or_default())
                }
            }
        }};
    }
    match ty.size() {
        2 => on!(AtomicU16, u16),
        8 => on!(AtomicU64, u64),
        _ => on!(AtomicU32, u32),
    }
}
