// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Integer arithmetic, logic and shifts (PTX ISA 8.8 §9.7.1, §9.7.2, §9.7.8).

use super::rows::{RowFn, by_int, by_type, lanes, row};
use crate::ptx::types::Ty;

/// A row function and its parameter.
pub type Found = Option<(RowFn, u64)>;

fn plain(function: Option<RowFn>) -> Found {
    function.map(|function| (function, 0))
}

/// The row function of an integer instruction by its name, modifiers and type.
pub fn find(name: &str, modifiers: &[String], ty: Ty) -> Found {
    let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
    match name {
        "add" if has("sat") => plain(by_type!(ty, T => lanes!(T, |a, b| a.saturating_add(b)); S32 => i32)),
        "sub" if has("sat") => plain(by_type!(ty, T => lanes!(T, |a, b| a.saturating_sub(b)); S32 => i32)),
        "add" | "sub" if matches!(ty, Ty::U16x2 | Ty::S16x2) => plain(pairs(name, ty)),
        "min" | "max" if matches!(ty, Ty::U16x2 | Ty::S16x2) => plain(pairs(name, ty)),
        "add" => plain(by_int!(ty, T => lanes!(T, |a, b| a.wrapping_add(b)))),
        "sub" => plain(by_int!(ty, T => lanes!(T, |a, b| a.wrapping_sub(b)))),
        "mul" | "mad" => plain(product(name, modifiers, ty)),
        "mul24" | "mad24" => plain(product24(name, has("hi"), ty)),
        "sad" => plain(
            by_int!(ty, T => lanes!(T, |a, b, c| c.wrapping_add(if a > b { a.wrapping_sub(b) } else { b.wrapping_sub(a) }))),
        ),
        // Division by zero has no defined result: all ones, as NVIDIA's devices give.
        "div" => plain(by_int!(ty, T => lanes!(T, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }))),
        "rem" => plain(by_int!(ty, T => lanes!(T, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }))),
        "abs" => {
            plain(by_type!(ty, T => lanes!(T, |a| a.wrapping_abs()); S16 => i16, S32 => i32, S64 => i64))
        }
        "neg" => plain(by_int!(ty, T => lanes!(T, |a| a.wrapping_neg()))),
        "min" if has("relu") => plain(by_type!(ty, T => lanes!(T, |a, b| a.min(b).max(0)); S32 => i32)),
        "max" if has("relu") => plain(by_type!(ty, T => lanes!(T, |a, b| a.max(b).max(0)); S32 => i32)),
        "min" => plain(by_int!(ty, T => lanes!(T, |a, b| a.min(b)))),
        "max" => plain(by_int!(ty, T => lanes!(T, |a, b| a.max(b)))),
        "popc" | "clz" | "brev" | "bfind" | "cnot" | "not" => plain(bits(name, has("shiftamt"), ty)),
        "and" | "or" | "xor" => plain(logic(name)),
        "shl" => plain(
            by_int!(ty, T => row!(|a, b, _, _| if b as u32 >= T::BITS { 0 } else { super::rows::Lane::put((a as T) << (b as u32)) })),
        ),
        "shr" => plain(by_int!(ty, T => row!(|a, b, _, _| super::rows::Lane::put({
            let shift = b as u32;
            let value = a as T;
            // Arithmetic for signed types: the sign fills in, also beyond the width.
            if shift >= T::BITS { (value >> (T::BITS - 1)) >> u32::from(T::MIN == 0) } else { value >> shift }
        })))),
        "shf" => plain(funnel(has("l"), has("wrap"))),
        "lop3" => plain(Some(row!(|a, b, c, table| lop3(a as u32, b as u32, c as u32, table)))),
        "prmt" => permute(modifiers),
        "bfe" => plain(extract(ty)),
        "bmsk" => plain(Some(if has("wrap") {
            row!(|a, b, _, _| mask(a & 31, b & 31))
        } else {
            row!(|a, b, _, _| mask(u64::from(a as u32), u64::from(b as u32)))
        })),
        "szext" => plain(sign_or_zero_extend(ty, has("wrap"))),
        "dp4a" | "dp2a" => Some(dot(name, modifiers)),
        _ => None,
    }
}

fn pairs(name: &str, ty: Ty) -> Option<RowFn> {
    macro_rules! halves {
        ($t:ty, |$a:ident, $b:ident| $e:expr) => {
            row!(|a, b, _, _| {
                let one = |$a: $t, $b: $t| -> u64 { ($e) as u16 as u64 };
                one(a as $t, b as $t) | one((a >> 16) as $t, (b >> 16) as $t) << 16
            })
        };
    }
    Some(match (name, ty) {
        ("add", _) => halves!(u16, |a, b| a.wrapping_add(b)),
        ("sub", _) => halves!(u16, |a, b| a.wrapping_sub(b)),
        ("min", Ty::U16x2) => halves!(u16, |a, b| a.min(b)),
        ("max", Ty::U16x2) => halves!(u16, |a, b| a.max(b)),
        ("min", _) => halves!(i16, |a, b| a.min(b)),
        ("max", _) => halves!(i16, |a, b| a.max(b)),
        _ => return None,
    })
}

/// mul and mad: low, high or whole product.
fn product(name: &str, modifiers: &[String], ty: Ty) -> Option<RowFn> {
    let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
    let add = name == "mad";
    if has("wide") {
        return by_wide(ty, add);
    }
    if has("hi") {
        macro_rules! high {
            ($t:ty, $wide:ty) => {
                if add && has("sat") {
                    lanes!($t, |a, b, c| ((((a as $wide) * (b as $wide)) >> <$t>::BITS) as $t)
                        .saturating_add(c))
                } else if add {
                    lanes!($t, |a, b, c| ((((a as $wide) * (b as $wide)) >> <$t>::BITS) as $t)
                        .wrapping_add(c))
                } else {
                    lanes!($t, |a, b| (((a as $wide) * (b as $wide)) >> <$t>::BITS) as $t)
                }
            };
        }
        return Some(match ty {
            Ty::U16 => high!(u16, u32),
            Ty::S16 => high!(i16, i32),
            Ty::U32 => high!(u32, u64),
            Ty::S32 => high!(i32, i64),
            Ty::U64 => high!(u64, u128),
            Ty::S64 => high!(i64, i128),
            _ => return None,
        });
    }
    if add {
        by_int!(ty, T => lanes!(T, |a, b, c| a.wrapping_mul(b).wrapping_add(c)))
    } else {
        by_int!(ty, T => lanes!(T, |a, b| a.wrapping_mul(b)))
    }
}

fn by_wide(ty: Ty, add: bool) -> Option<RowFn> {
    macro_rules! wide {
        ($t:ty, $wide:ty) => {
            if add {
                row!(|a, b, c, _| super::rows::Lane::put(
                    (a as $t as $wide).wrapping_mul(b as $t as $wide).wrapping_add(c as $wide)
                ))
            } else {
                row!(|a, b, _, _| super::rows::Lane::put((a as $t as $wide).wrapping_mul(b as $t as $wide)))
            }
        };
    }
    Some(match ty {
        Ty::U16 => wide!(u16, u32),
        Ty::S16 => wide!(i16, i32),
        Ty::U32 => wide!(u32, u64),
        Ty::S32 => wide!(i32, i64),
        _ => return None,
    })
}

fn product24(name: &str, high: bool, ty: Ty) -> Option<RowFn> {
    let signed = ty == Ty::S32;
    Some(match (signed, high, name == "mad24") {
        (false, false, false) => row!(|a, b, _, _| u64::from(((a & 0xff_ffff) * (b & 0xff_ffff)) as u32)),
        (false, false, true) => {
            row!(|a, b, c, _| u64::from((((a & 0xff_ffff) * (b & 0xff_ffff)) as u32).wrapping_add(c as u32)))
        }
        (false, true, false) => {
            row!(|a, b, _, _| u64::from((((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16) as u32))
        }
        (false, true, true) => row!(|a, b, c, _| u64::from(
            ((((a & 0xff_ffff) * (b & 0xff_ffff)) >> 16) as u32).wrapping_add(c as u32)
        )),
        (true, false, false) => row!(|a, b, _, _| u64::from((low24(a) * low24(b)) as u32)),
        (true, false, true) => {
            row!(|a, b, c, _| u64::from(((low24(a) * low24(b)) as u32).wrapping_add(c as u32)))
        }
        (true, true, false) => row!(|a, b, _, _| u64::from(((low24(a) * low24(b)) >> 16) as u32)),
        (true, true, true) => {
            row!(|a, b, c, _| u64::from((((low24(a) * low24(b)) >> 16) as u32).wrapping_add(c as u32)))
        }
    })
}

/// The low 24 bits as a signed number.
fn low24(value: u64) -> i64 {
    ((value << 40) as i64) >> 40
}

fn bits(name: &str, shift: bool, ty: Ty) -> Option<RowFn> {
    // find_most_significant: of a negative number, the highest bit that is not the sign.
    macro_rules! bfind {
        ($t:ty, $u:ty) => {{
            if shift {
                row!(|a, _, _, _| {
                    let value = a as $t;
                    let value = (if value < 0 as $t { !value } else { value }) as $u;
                    if value == 0 { 0xffff_ffff } else { u64::from(value.leading_zeros()) }
                })
            } else {
                row!(|a, _, _, _| {
                    let value = a as $t;
                    let value = (if value < 0 as $t { !value } else { value }) as $u;
                    if value == 0 { 0xffff_ffff } else { u64::from(<$u>::BITS - 1 - value.leading_zeros()) }
                })
            }
        }};
    }
    Some(match (name, ty.size(), ty) {
        ("popc", 4, _) => lanes!(u32, |a| a.count_ones()),
        ("popc", 8, _) => lanes!(u64, |a| a.count_ones()),
        ("clz", 4, _) => lanes!(u32, |a| a.leading_zeros()),
        ("clz", 8, _) => lanes!(u64, |a| a.leading_zeros()),
        ("brev", 4, _) => lanes!(u32, |a| a.reverse_bits()),
        ("brev", 8, _) => lanes!(u64, |a| a.reverse_bits()),
        ("bfind", _, Ty::U32) => bfind!(u32, u32),
        ("bfind", _, Ty::S32) => bfind!(i32, u32),
        ("bfind", _, Ty::U64) => bfind!(u64, u64),
        ("bfind", _, Ty::S64) => bfind!(i64, u64),
        ("not", _, Ty::Pred) => lanes!(bool, |a| !a),
        ("cnot", ..) => return by_int!(ty, T => lanes!(T, |a| u64::from(a == 0))),
        ("not", ..) => return by_int!(ty, T => lanes!(T, |a| !a)),
        _ => return None,
    })
}

fn logic(name: &str) -> Option<RowFn> {
    Some(match name {
        "and" => row!(|a, b, _, _| a & b),
        "or" => row!(|a, b, _, _| a | b),
        _ => row!(|a, b, _, _| a ^ b),
    })
}

fn funnel(left: bool, wrap: bool) -> Option<RowFn> {
    Some(match (left, wrap) {
        (true, true) => row!(|a, b, c, _| ((b << 32 | a & 0xffff_ffff) << (c & 31)) >> 32),
        (true, false) => row!(|a, b, c, _| u64::from(
            (((b as u32 as u64) << 32 | a & 0xffff_ffff) << (c as u32).min(32) >> 32) as u32
        )),
        (false, true) => row!(|a, b, c, _| u64::from(((b << 32 | a & 0xffff_ffff) >> (c & 31)) as u32)),
        (false, false) => {
            row!(|a, b, c, _| u64::from(((b << 32 | a & 0xffff_ffff) >> (c as u32).min(32)) as u32))
        }
    })
}

/// Each bit of the result is the table's bit at the number that a's, b's and c's bits make.
pub fn lop3(a: u32, b: u32, c: u32, table: u64) -> u64 {
    let mut out = 0;
    for index in 0..8 {
        if table >> index & 1 != 0 {
            let pick = |value: u32, bit: u32| if index & bit != 0 { value } else { !value };
            out |= pick(a, 4) & pick(b, 2) & pick(c, 1);
        }
    }
    u64::from(out)
}

fn permute(modifiers: &[String]) -> Found {
    let mode = modifiers.iter().find(|modifier| *modifier != "b32").map(String::as_str);
    Some(match mode {
        None => (row!(|a, b, c, _| select_bytes(a, b, c)), 0),
        Some("f4e") => {
            (row!(|a, b, c, _| select_bytes(a, b, [0x3210, 0x4321, 0x5432, 0x6543][c as usize & 3])), 0)
        }
        Some("b4e") => {
            (row!(|a, b, c, _| select_bytes(a, b, [0x5670, 0x6701, 0x7012, 0x0123][c as usize & 3])), 0)
        }
        Some("rc8") => (row!(|a, b, c, _| select_bytes(a, b, 0x1111 * (c & 3))), 0),
        Some("ecl") => {
            (row!(|a, b, c, _| select_bytes(a, b, [0x3210, 0x3211, 0x3222, 0x3333][c as usize & 3])), 0)
        }
        Some("ecr") => {
            (row!(|a, b, c, _| select_bytes(a, b, [0x0000, 0x1110, 0x2210, 0x3210][c as usize & 3])), 0)
        }
        Some("rc16") => (row!(|a, b, c, _| select_bytes(a, b, if c & 1 == 0 { 0x1010 } else { 0x3232 })), 0),
        Some(_) => return None,
    })
}

/// prmt: four selectors of four bits: which of the eight bytes, and whether to spread its sign.
pub fn select_bytes(a: u64, b: u64, selectors: u64) -> u64 {
    let bytes = (b << 32 | a & 0xffff_ffff).to_le_bytes();
    let mut out = 0;
    for at in 0..4 {
        let selector = selectors >> (4 * at);
        let byte = bytes[selector as usize & 7];
        let byte = if selector & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        out |= u64::from(byte) << (8 * at);
    }
    out
}

fn extract(ty: Ty) -> Option<RowFn> {
    macro_rules! extract {
        ($u:ty, $signed:expr) => {
            row!(|a, b, c, _| {
                let (value, start, len) = (a as $u, b as u32 & 0xff, c as u32 & 0xff);
                let width = <$u>::BITS;
                let sign_at = (start + len).saturating_sub(1).min(width - 1);
                let sign = $signed && len != 0 && value >> sign_at & 1 != 0;
                let field = if start >= width { 0 } else { value >> start };
                let bits = len.min(width.saturating_sub(start));
                let keep: $u = if bits == 0 { 0 } else { <$u>::MAX >> (width - bits) };
                u64::from((field & keep) | if sign { !keep } else { 0 })
            })
        };
    }
    Some(match ty {
        Ty::U32 => extract!(u32, false),
        Ty::S32 => extract!(u32, true),
        Ty::U64 => extract!(u64, false),
        Ty::S64 => extract!(u64, true),
        _ => return None,
    })
}

/// bfi: the low `len` bits of `value` put into `into` at `start`.
pub fn insert(value: u64, into: u64, start: u64, len: u64, width: u32) -> u64 {
    let (start, len) = ((start & 0xff) as u32, (len & 0xff) as u32);
    let bits = len.min(width.saturating_sub(start));
    if bits == 0 {
        return into;
    }
    let keep = (u64::MAX >> (64 - bits)) << start;
    (into & !keep) | (value << start & keep)
}

fn mask(start: u64, len: u64) -> u64 {
    let low = |count: u64| if count >= 32 { 0xffff_ffff } else { (1u64 << count) - 1 };
    let end = start.saturating_add(len);
    low(end) & !low(start)
}

fn sign_or_zero_extend(ty: Ty, wrap: bool) -> Option<RowFn> {
    macro_rules! extend {
        ($signed:expr, $limit:expr) => {
            row!(|a, b, _, _| {
                let bits = if $limit { b as u32 & 31 } else { b as u32 };
                match bits {
                    0 => 0,
                    32.. => a & 0xffff_ffff,
                    bits if $signed => u64::from((((a as u32) << (32 - bits)) as i32 >> (32 - bits)) as u32),
                    bits => u64::from((a as u32) << (32 - bits) >> (32 - bits)),
                }
            })
        };
    }
    Some(match (ty, wrap) {
        (Ty::S32, true) => extend!(true, true),
        (Ty::S32, false) => extend!(true, false),
        (Ty::U32, true) => extend!(false, true),
        (Ty::U32, false) => extend!(false, false),
        _ => return None,
    })
}

/// dp4a and dp2a: the parameter says which operand is signed, and for dp2a which half of b counts.
fn dot(name: &str, modifiers: &[String]) -> (RowFn, u64) {
    let signed: Vec<bool> =
        modifiers.iter().filter_map(|modifier| Ty::parse(modifier)).map(Ty::is_signed).collect();
    let signs = u64::from(signed.first() == Some(&true)) | u64::from(signed.get(1) == Some(&true)) << 1;
    let high = modifiers.iter().any(|modifier| modifier == "hi");
    if name == "dp4a" {
        (
            row!(|a, b, c, p| (0..4)
                .fold(c, |sum, at| sum.wrapping_add((byte_of(a, at, p & 1) * byte_of(b, at, p & 2)) as u64))
                & 0xffff_ffff),
            signs,
        )
    } else {
        let row = row!(|a, b, c, p| {
            let half = |at: u32| {
                if p & 1 != 0 {
                    i64::from((a >> (16 * at)) as i16)
                } else {
                    i64::from((a >> (16 * at)) as u16)
                }
            };
            let first = if p & 4 != 0 { 2 } else { 0 };
            (0..2).fold(c, |sum, at| sum.wrapping_add((half(at) * byte_of(b, first + at, p & 2)) as u64))
                & 0xffff_ffff
        });
        (row, signs | u64::from(high) << 2)
    }
}

fn byte_of(bits: u64, at: u32, signed: u64) -> i64 {
    if signed != 0 { i64::from((bits >> (8 * at)) as i8) } else { i64::from((bits >> (8 * at)) as u8) }
}
