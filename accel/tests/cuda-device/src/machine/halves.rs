// SPDX-License-Identifier: Apache-2.0 OR MIT
//! f16, bf16 and pairs of them (PTX ISA 8.8 §9.7.4). Sums, products and fused products are exact in double precision, or made odd where they are not,
//! so rounding them once more gives the result that one rounding gives.

use super::int::Found;
use super::rows::{Lane, RowFn, row};
use crate::ptx::types::Ty;
use half::{bf16, f16};

/// A 16-bit format.
pub trait Half: Lane {
    fn widen(self) -> f64;
    fn narrow(value: f64) -> Self;
}

impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f64 {
        f64::from(self.to_f32())
    }
    #[inline(always)]
    fn narrow(value: f64) -> f16 {
        f16::from_f32(to_odd(value))
    }
}

impl Half for bf16 {
    #[inline(always)]
    fn widen(self) -> f64 {
        f64::from(self.to_f32())
    }
    #[inline(always)]
    fn narrow(value: f64) -> bf16 {
        bf16::from_f32(to_odd(value))
    }
}

/// Rounds to odd: an inexact result has its last bit set, so a second rounding errs to neither side.
#[inline(always)]
pub fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() || near.to_bits() & 1 != 0 {
        return near;
    }
    if near.is_infinite() {
        return f32::MAX.copysign(near);
    }
    if (f64::from(near) < value) == (value > 0.0) {
        f32::from_bits(near.to_bits() + 1)
    } else {
        f32::from_bits(near.to_bits() - 1)
    }
}

/// a * b + c, where a * b is exact, rounded to odd.
#[inline(always)]
fn fused(a: f64, b: f64, c: f64) -> f64 {
    odd_sum(a * b, c)
}

fn odd_sum(x: f64, y: f64) -> f64 {
    let sum = x + y;
    if !sum.is_finite() {
        return sum;
    }
    let back = sum - x;
    let error = (x - (sum - back)) + (y - back);
    if error == 0.0 || sum.to_bits() & 1 != 0 {
        return sum;
    }
    if (error > 0.0) == (sum > 0.0) {
        f64::from_bits(sum.to_bits() + 1)
    } else {
        f64::from_bits(sum.to_bits() - 1)
    }
}

fn least(a: f64, b: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => a.min(b),
    }
}

/// Bits of the parameter.
const NAN: u64 = 1;
const RELU: u64 = 2;
const SAT: u64 = 4;
const ABS: u64 = 8;

fn finish(value: f64, p: u64) -> f64 {
    if p & RELU != 0 && !value.is_nan() {
        return value.max(0.0);
    }
    if p & SAT != 0 {
        return if value >= 0.0 { value.min(1.0) } else { 0.0 };
    }
    value
}

fn extremum(a: f64, b: f64, p: u64, max: bool) -> f64 {
    if p & NAN != 0 && (a.is_nan() || b.is_nan()) {
        return f64::NAN;
    }
    if p & ABS != 0 {
        let sign = if a.is_sign_negative() ^ b.is_sign_negative() { -1.0 } else { 1.0 };
        return extremum(a.abs(), b.abs(), 0, max).copysign(sign);
    }
    finish(if max { -least(-a, -b) } else { least(a, b) }, p)
}

/// The row function of an instruction on f16, bf16 or pairs.
pub fn find(name: &str, modifiers: &[String], ty: Ty) -> Found {
    let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
    let flag = |what, bit| if has(what) { bit } else { 0 };
    let p = flag("NaN", NAN) | flag("relu", RELU) | flag("sat", SAT) | flag("xorsign", ABS);
    Some((function(name, ty)?, p))
}

fn function(name: &str, ty: Ty) -> Option<RowFn> {
    macro_rules! both {
        (|$a:ident, $b:ident, $c:ident, $p:ident| $e:expr) => {
            match ty {
                Ty::F16 => both!(f16, |$a, $b, $c, $p| $e),
                Ty::Bf16 => both!(bf16, |$a, $b, $c, $p| $e),
                Ty::F16x2 => both!(pair f16, |$a, $b, $c, $p| $e),
                Ty::Bf16x2 => both!(pair bf16, |$a, $b, $c, $p| $e),
                _ => return None,
            }
        };
        (pair $t:ty, |$a:ident, $b:ident, $c:ident, $p:ident| $e:expr) => {
            row!(|a, b, c, $p| {
                let one = |a: u64, b: u64, c: u64| -> u64 {
                    let ($a, $b, $c) = (<$t>::get(a).widen(), <$t>::get(b).widen(), <$t>::get(c).widen());
                    let _ = ($b, $c, $p);
                    <$t>::narrow($e).put()
                };
                one(a & 0xffff, b & 0xffff, c & 0xffff) | one(a >> 16 & 0xffff, b >> 16 & 0xffff, c >> 16 & 0xffff) << 16
            })
        };
        ($t:ty, |$a:ident, $b:ident, $c:ident, $p:ident| $e:expr) => {
            row!(|a, b, c, $p| {
                let ($a, $b, $c) = (<$t>::get(a).widen(), <$t>::get(b).widen(), <$t>::get(c).widen());
                let _ = ($b, $c, $p);
                <$t>::narrow($e).put()
            })
        };
    }
    Some(match name {
        "add" => both!(|a, b, c, p| finish(odd_sum(a, b), p)),
        "sub" => both!(|a, b, c, p| finish(odd_sum(a, -b), p)),
        "mul" => both!(|a, b, c, p| finish(a * b, p)),
        "fma" => both!(|a, b, c, p| finish(fused(a, b, c), p)),
        "min" => both!(|a, b, c, p| extremum(a, b, p, false)),
        "max" => both!(|a, b, c, p| extremum(a, b, p, true)),
        "ex2" => both!(|a, b, c, p| a.exp2()),
        "tanh" => both!(|a, b, c, p| a.tanh()),
        "neg" => {
            if matches!(ty, Ty::F16x2 | Ty::Bf16x2) {
                row!(|a, _, _, _| a ^ 0x8000_8000)
            } else {
                row!(|a, _, _, _| a ^ 0x8000)
            }
        }
        "abs" => {
            if matches!(ty, Ty::F16x2 | Ty::Bf16x2) {
                row!(|a, _, _, _| a & 0x7fff_7fff)
            } else {
                row!(|a, _, _, _| a & 0x7fff)
            }
        }
        _ => return None,
    })
}
