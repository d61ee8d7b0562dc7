// SPDX-License-Identifier: Apache-2.0 OR MIT
//! cvt: between all integer and floating-point types with all roundings (PTX ISA 8.8 §9.7.9.21).

use super::float::{Mode, Rounding};
use super::rows::{Lane, RowFn, row};
use crate::ptx::types::Ty;
use rustc_apfloat::ieee::{BFloat, Double, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

const TYPES: [Ty; 14] = [
    Ty::U8,
    Ty::S8,
    Ty::U16,
    Ty::S16,
    Ty::U32,
    Ty::S32,
    Ty::U64,
    Ty::S64,
    Ty::F16,
    Ty::Bf16,
    Ty::F32,
    Ty::F64,
    Ty::Tf32,
    Ty::Pred,
];

fn index(ty: Ty) -> Option<u64> {
    let ty = match ty {
        Ty::B8 => Ty::U8,
        Ty::B16 => Ty::U16,
        Ty::B32 => Ty::U32,
        Ty::B64 => Ty::U64,
        ty => ty,
    };
    TYPES.iter().position(|&known| known == ty).map(|at| at as u64)
}

/// The row function of a conversion. `mask` is the destination register's: it may be wider than the type, and signed values fill it.
pub fn find(modifiers: &[String], to: Ty, from: Ty, mask: u64) -> Option<(RowFn, u64)> {
    let mode = Mode::of(modifiers);
    let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
    let integral = ["rni", "rzi", "rmi", "rpi"].iter().any(|what| has(what));
    if mode == Mode::default() && !integral {
        let quick = match (to, from) {
            (Ty::F32, Ty::S32) => Some(row!(|a, _, _, _| (a as i32 as f32).put())),
            (Ty::F32, Ty::U32) => Some(row!(|a, _, _, _| (a as u32 as f32).put())),
            (Ty::F64, Ty::S32) => Some(row!(|a, _, _, _| f64::from(a as i32).put())),
            (Ty::F64, Ty::F32) => Some(row!(|a, _, _, _| f64::from(f32::get(a)).put())),
            (Ty::F32, Ty::F64) => Some(row!(|a, _, _, _| (f64::get(a) as f32).put())),
            (Ty::U64 | Ty::S64, Ty::U32) => Some(row!(|a, _, _, _| a & 0xffff_ffff)),
            (Ty::U64 | Ty::S64, Ty::S32) => Some(row!(|a, _, _, _| (a as i32 as i64).put())),
            (Ty::U32, Ty::U64 | Ty::S64 | Ty::U32 | Ty::S32) if mask == 0xffff_ffff => {
                Some(row!(|a, _, _, _| a & 0xffff_ffff))
            }
            (Ty::F32, Ty::F16) => Some(row!(|a, _, _, _| half::f16::get(a).to_f32().put())),
            _ => None,
        };
        if let Some(quick) = quick {
            return Some((quick, 0));
        }
    }
    let width = (64 - mask.count_ones() as u64) << 32;
    let relu = u64::from(has("relu")) << 25;
    let p = mode.pack() | u64::from(integral) << 24 | relu | index(to)? << 8 | index(from)? << 16 | width;
    Some((row!(|a, _, _, p| convert(a, p) & u64::MAX >> (p >> 32)), p))
}

fn convert(bits: u64, p: u64) -> u64 {
    let (to, from) = (TYPES[(p >> 8 & 0xff) as usize], TYPES[(p >> 16 & 0xff) as usize]);
    let mut mode = Mode::unpack(p & 0xff);
    let integral = p >> 24 & 1 != 0;
    match (from.is_float(), to.is_float()) {
        (false, false) => from_integer(integer(bits, from), to, mode.saturate),
        (false, true) => {
            let value = integer(bits, from);
            let round = mode.round();
            finish(
                match to {
                    Ty::F16 => Half::from_i128_r(value, round).value.to_bits() as u64,
                    Ty::Bf16 => BFloat::from_i128_r(value, round).value.to_bits() as u64,
                    Ty::F32 => Single::from_i128_r(value, round).value.to_bits() as u64,
                    _ => Double::from_i128_r(value, round).value.to_bits() as u64,
                },
                to,
                mode,
                false,
            )
        }
        (true, false) => {
            let value = rounded(flushed(real(bits, from), from, mode), mode.rounding);
            if value.is_nan() {
                let wide = from == Ty::F64 || to.size() == 8;
                return if wide { 1 << (to.size() * 8 - 1) } else { 0 };
            }
            // Saturates to 64 bits, then to the type.
            from_integer(value as i128, to, true)
        }
        (true, true) => {
            let mut value = flushed(real(bits, from), from, mode);
            if integral {
                value = rounded(value, mode.rounding);
                mode.rounding = Rounding::Nearest;
            }
            finish(narrow(value, to, mode.round()), to, mode, p >> 25 & 1 != 0)
        }
    }
}

/// Rounds to a float type and gives its bits.
pub fn narrow(value: f64, to: Ty, round: Round) -> u64 {
    let wide = Double::from_bits(u128::from(value.to_bits()));
    fn into<T: Float>(wide: Double, round: Round) -> u64
    where
        Double: FloatConvert<T>,
    {
        let value: T = wide.convert_r(round, &mut false).value;
        value.to_bits() as u64
    }
    match to {
        Ty::F16 => into::<Half>(wide, round),
        Ty::Bf16 => into::<BFloat>(wide, round),
        Ty::F32 => into::<Single>(wide, round),
        // Ten bits of fraction in a word of 32: round at the thirteenth bit.
        Ty::Tf32 => {
            let bits = (value as f32).to_bits();
            let half = if round == Round::NearestTiesToAway { 0x1000 } else { 0xfff + (bits >> 13 & 1) };
            if value.is_finite() { u64::from(bits.wrapping_add(half) & !0x1fff) } else { u64::from(bits) }
        }
        _ => value.to_bits(),
    }
}

pub fn real(bits: u64, from: Ty) -> f64 {
    match from {
        Ty::F16 => half::f16::get(bits).to_f64(),
        Ty::Bf16 => half::bf16::get(bits).to_f64(),
        Ty::F64 => f64::get(bits),
        _ => f64::from(f32::get(bits)),
    }
}

fn flushed(value: f64, from: Ty, mode: Mode) -> f64 {
    let subnormal = from == Ty::F32 && value != 0.0 && value.abs() < f64::from(f32::MIN_POSITIVE);
    if mode.flush && subnormal { 0f64.copysign(value) } else { value }
}

fn rounded(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
        Rounding::Away => value.round(),
    }
}

/// .ftz, .sat and .relu on a result's bits.
fn finish(bits: u64, to: Ty, mode: Mode, relu: bool) -> u64 {
    if !(mode.flush || mode.saturate || relu) {
        return bits;
    }
    let value = flushed(real(bits, to), to, mode);
    let value = match (mode.saturate, relu) {
        (true, _) if value >= 0.0 => value.min(1.0),
        (true, _) => 0.0,
        (_, true) if value < 0.0 => 0.0,
        _ => value,
    };
    narrow(value, to, Round::NearestTiesToEven)
}

fn integer(bits: u64, from: Ty) -> i128 {
    match from {
        Ty::S8 => i128::from(bits as i8),
        Ty::S16 => i128::from(bits as i16),
        Ty::S32 => i128::from(bits as i32),
        Ty::S64 => i128::from(bits as i64),
        _ => i128::from(bits & from.mask()),
    }
}

/// To an integer type; a signed result's sign fills 64 bits.
fn from_integer(value: i128, to: Ty, saturate: bool) -> u64 {
    let bits = to.size() * 8;
    let (low, high) = if to.is_signed() {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    };
    let value = if saturate { value.clamp(low, high) } else { value };
    if to.is_signed() {
        (((value as i64) << (64 - bits)) >> (64 - bits)) as u64
    } else {
        value as u64 & (u64::MAX >> (64 - bits))
    }
}
