// SPDX-License-Identifier: Apache-2.0 OR MIT
//! setp and set: comparisons, ordered and unordered, combined with a predicate (PTX ISA 8.8 §9.7.5, §9.7.6).

use super::rows::{Lane, RowFn, row};
use crate::ptx::types::Ty;

/// The function that puts a comparison's outcome, 0 or 1, into d; for pairs of halves one bit for each.
#[allow(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::nonminimal_bool,
    clippy::double_comparisons,
    reason = "a NaN makes each comparison false, so its negation is the unordered one"
)]
pub fn find(how: &str, ty: Ty) -> Option<RowFn> {
    macro_rules! compare {
        ($t:ty, |$a:ident, $b:ident| $e:expr) => {
            row!(|a, b, _, _| {
                let ($a, $b) = (<$t>::get(a), <$t>::get(b));
                u64::from($e)
            })
        };
    }
    macro_rules! integer {
        ($t:ty) => {
            match how {
                "eq" => compare!($t, |a, b| a == b),
                "ne" => compare!($t, |a, b| a != b),
                "lt" | "lo" => compare!($t, |a, b| a < b),
                "le" | "ls" => compare!($t, |a, b| a <= b),
                "gt" | "hi" => compare!($t, |a, b| a > b),
                "ge" | "hs" => compare!($t, |a, b| a >= b),
                _ => return None,
            }
        };
    }
    macro_rules! float {
        ($compare:ident) => {
            match how {
                "eq" => $compare!(|a, b| a == b),
                "ne" => $compare!(|a, b| a < b || a > b),
                "lt" => $compare!(|a, b| a < b),
                "le" => $compare!(|a, b| a <= b),
                "gt" => $compare!(|a, b| a > b),
                "ge" => $compare!(|a, b| a >= b),
                "equ" => $compare!(|a, b| !(a < b || a > b)),
                "neu" => $compare!(|a, b| a != b),
                "ltu" => $compare!(|a, b| !(a >= b)),
                "leu" => $compare!(|a, b| !(a > b)),
                "gtu" => $compare!(|a, b| !(a <= b)),
                "geu" => $compare!(|a, b| !(a < b)),
                "num" => $compare!(|a, b| !a.is_nan() && !b.is_nan()),
                "nan" => $compare!(|a, b| a.is_nan() || b.is_nan()),
                _ => return None,
            }
        };
    }
    macro_rules! of32 {
        (|$a:ident, $b:ident| $e:expr) => {
            compare!(f32, |$a, $b| $e)
        };
    }
    macro_rules! of64 {
        (|$a:ident, $b:ident| $e:expr) => {
            compare!(f64, |$a, $b| $e)
        };
    }
    macro_rules! of16 {
        (|$a:ident, $b:ident| $e:expr) => {
            half_compare!(half::f16, $a, $b, $e)
        };
    }
    macro_rules! ofb16 {
        (|$a:ident, $b:ident| $e:expr) => {
            half_compare!(half::bf16, $a, $b, $e)
        };
    }
    // Both halves' outcomes; a single half's register has zeros above, whose outcome the decoder drops.
    macro_rules! half_compare {
        ($t:ty, $a:ident, $b:ident, $e:expr) => {
            row!(|a, b, _, _| {
                let one = |a: u64, b: u64| -> u64 {
                    let ($a, $b) = (<$t>::get(a).to_f32(), <$t>::get(b).to_f32());
                    u64::from($e)
                };
                one(a & 0xffff, b & 0xffff) | one(a >> 16 & 0xffff, b >> 16 & 0xffff) << 1
            })
        };
    }
    Some(match ty {
        Ty::U8 | Ty::B8 => integer!(u8),
        Ty::S8 => integer!(i8),
        Ty::U16 | Ty::B16 => integer!(u16),
        Ty::S16 => integer!(i16),
        Ty::U32 | Ty::B32 => integer!(u32),
        Ty::S32 => integer!(i32),
        Ty::U64 | Ty::B64 => integer!(u64),
        Ty::S64 => integer!(i64),
        Ty::F32 => float!(of32),
        Ty::F64 => float!(of64),
        Ty::F16 | Ty::F16x2 => float!(of16),
        Ty::Bf16 | Ty::Bf16x2 => float!(ofb16),
        _ => return None,
    })
}
