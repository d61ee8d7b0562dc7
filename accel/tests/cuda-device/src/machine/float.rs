// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Floating point of 32 and 64 bits (PTX ISA 8.8 §9.7.3). Round to nearest without flushing is the processor's own arithmetic; other modes go through
//! rustc_apfloat. Approximate instructions give the host's correctly rounded or nearly correct result.

use super::int::Found;
use super::rows::{Lane, RowFn, by_type, lanes, row};
use crate::ptx::types::Ty;
use rustc_apfloat::ieee::{Double, Single};
use rustc_apfloat::{Float as _, Round};

/// Modifiers of a floating-point instruction, packed into its parameter.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Mode {
    pub rounding: Rounding,
    pub flush: bool,
    pub saturate: bool,
}

#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub enum Rounding {
    #[default]
    Nearest,
    Zero,
    Down,
    Up,
    Away,
}

impl Mode {
    pub fn of(modifiers: &[String]) -> Mode {
        let mut mode = Mode::default();
        for modifier in modifiers {
            match modifier.as_str() {
                "rz" | "rzi" => mode.rounding = Rounding::Zero,
                "rm" | "rmi" => mode.rounding = Rounding::Down,
                "rp" | "rpi" => mode.rounding = Rounding::Up,
                "rna" => mode.rounding = Rounding::Away,
                "ftz" => mode.flush = true,
                "sat" => mode.saturate = true,
                _ => {}
            }
        }
        mode
    }

    pub fn pack(self) -> u64 {
        self.rounding as u64 | u64::from(self.flush) << 3 | u64::from(self.saturate) << 4
    }

    pub fn unpack(p: u64) -> Mode {
        let rounding = match p & 7 {
            0 => Rounding::Nearest,
            1 => Rounding::Zero,
            2 => Rounding::Down,
            3 => Rounding::Up,
            _ => Rounding::Away,
        };
        Mode { rounding, flush: p & 8 != 0, saturate: p & 16 != 0 }
    }

    pub fn round(self) -> Round {
        match self.rounding {
            Rounding::Nearest => Round::NearestTiesToEven,
            Rounding::Zero => Round::TowardZero,
            Rounding::Down => Round::TowardNegative,
            Rounding::Up => Round::TowardPositive,
            Rounding::Away => Round::NearestTiesToAway,
        }
    }
}

/// What f32 and f64 have in common for the instructions here.
pub trait Real: Lane + PartialOrd {
    fn arithmetic(op: Op, a: Self, b: Self, c: Self, mode: Mode) -> Self;
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Op {
    Add,
    Sub,
    Mul,
    Fma,
    Div,
    Sqrt,
}

macro_rules! real {
    ($t:ty, $soft:ty, $from:ty) => {
        impl Real for $t {
            fn arithmetic(op: Op, a: $t, b: $t, c: $t, mode: Mode) -> $t {
                let flush = |value: $t| {
                    if mode.flush && value.is_subnormal() { (0.0 as $t).copysign(value) } else { value }
                };
                let (a, b, c) = (flush(a), flush(b), flush(c));
                let value = if mode.rounding == Rounding::Nearest {
                    match op {
                        Op::Add => a + b,
                        Op::Sub => a - b,
                        Op::Mul => a * b,
                        Op::Fma => a.mul_add(b, c),
                        Op::Div => a / b,
                        Op::Sqrt => a.sqrt(),
                    }
                } else {
                    let soft = |value: $t| <$soft>::from_bits(u128::from(value.to_bits()));
                    let hard = |value: $soft| <$t>::from_bits(value.to_bits() as $from);
                    let round = mode.round();
                    match op {
                        Op::Add => hard(soft(a).add_r(soft(b), round).value),
                        Op::Sub => hard(soft(a).sub_r(soft(b), round).value),
                        Op::Mul => hard(soft(a).mul_r(soft(b), round).value),
                        Op::Fma => hard(soft(a).mul_add_r(soft(b), soft(c), round).value),
                        Op::Div => hard(soft(a).div_r(soft(b), round).value),
                        Op::Sqrt => {
                            // The residue's sign says on which side of the nearest result the exact one lies. A root with a residue is positive, so its neighbours' bits
                            // are the next numbers.
                            let root = a.sqrt();
                            let residue = (-root).mul_add(root, a);
                            match mode.rounding {
                                Rounding::Up if residue > 0.0 => <$t>::from_bits(root.to_bits() + 1),
                                Rounding::Zero | Rounding::Down if residue < 0.0 => {
                                    <$t>::from_bits(root.to_bits() - 1)
                                }
                                _ => root,
                            }
                        }
                    }
                };
                let value = flush(value);
                if !mode.saturate {
                    value
                } else if value >= 0.0 {
                    value.min(1.0)
                } else {
                    0.0
                }
            }
        }
    };
}

real!(f32, Single, u32);
real!(f64, Double, u64);

/// IEEE 754's minNum and maxNum with -0 below +0; `nan` makes a NaN win.
macro_rules! extremum {
    ($name:ident, $t:ty, $less:tt, $first:expr) => {
        fn $name(a: $t, b: $t, nan: bool) -> $t {
            if a.is_nan() || b.is_nan() {
                if nan || (a.is_nan() && b.is_nan()) { <$t>::NAN } else if a.is_nan() { b } else { a }
            } else if a == b {
                if a.is_sign_negative() == $first { a } else { b }
            } else if a $less b { a } else { b }
        }
    };
}

extremum!(min32, f32, <, true);
extremum!(max32, f32, >, false);
extremum!(min64, f64, <, true);
extremum!(max64, f64, >, false);

/// The row function of a floating-point instruction on f32 or f64.
pub fn find(name: &str, modifiers: &[String], ty: Ty) -> Found {
    let mode = Mode::of(modifiers);
    let plain = mode == Mode::default();
    let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
    // Approximations flush where .ftz says so; their rounding has no mode.
    let flush = |function: Option<RowFn>| function.map(|function| (function, mode.pack()));
    macro_rules! arithmetic {
        ($op:expr, |$a:ident, $b:ident, $c:ident| $e:expr) => {
            match (ty, plain) {
                (Ty::F32, true) => Some(row!(|$a, $b, $c, _| {
                    let ($a, $b, $c) = (f32::get($a), f32::get($b), f32::get($c));
                    let _ = ($b, $c);
                    ($e).put()
                })),
                (Ty::F64, true) => Some(row!(|$a, $b, $c, _| {
                    let ($a, $b, $c) = (f64::get($a), f64::get($b), f64::get($c));
                    let _ = ($b, $c);
                    ($e).put()
                })),
                (Ty::F32, false) => Some(row!(|a, b, c, p| f32::arithmetic(
                    $op,
                    f32::get(a),
                    f32::get(b),
                    f32::get(c),
                    Mode::unpack(p)
                )
                .put())),
                (Ty::F64, false) => Some(row!(|a, b, c, p| f64::arithmetic(
                    $op,
                    f64::get(a),
                    f64::get(b),
                    f64::get(c),
                    Mode::unpack(p)
                )
                .put())),
                _ => None,
            }
        };
    }
    match name {
        "add" => flush(arithmetic!(Op::Add, |a, b, c| a + b)),
        "sub" => flush(arithmetic!(Op::Sub, |a, b, c| a - b)),
        "mul" => flush(arithmetic!(Op::Mul, |a, b, c| a * b)),
        "fma" | "mad" => flush(arithmetic!(Op::Fma, |a, b, c| a.mul_add(b, c))),
        "div" => flush(arithmetic!(Op::Div, |a, b, c| a / b)),
        "sqrt" => flush(arithmetic!(Op::Sqrt, |a, b, c| a.sqrt())),
        "rcp" => flush(reciprocal(ty, plain)),
        "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" => flush(approximate(name, ty)),
        "abs" | "neg" => flush(sign(name, ty, mode.flush)),
        "copysign" => flush(by_type!(ty, T => lanes!(T, |a, b| b.copysign(a)); F32 => f32, F64 => f64)),
        "min" | "max" => Some((
            extremum(name, ty)?,
            mode.pack() | u64::from(has("NaN")) << 8 | u64::from(has("xorsign")) << 9,
        )),
        "testp" => flush(test(modifiers, ty)),
        _ => None,
    }
}

fn reciprocal(ty: Ty, plain: bool) -> Option<RowFn> {
    Some(match (ty, plain) {
        (Ty::F32, true) => lanes!(f32, |a| 1.0 / a),
        (Ty::F64, true) => lanes!(f64, |a| 1.0 / a),
        (Ty::F32, false) => {
            row!(|a, _, _, p| f32::arithmetic(Op::Div, 1.0, f32::get(a), 0.0, Mode::unpack(p)).put())
        }
        (Ty::F64, false) => {
            row!(|a, _, _, p| f64::arithmetic(Op::Div, 1.0, f64::get(a), 0.0, Mode::unpack(p)).put())
        }
        _ => return None,
    })
}

fn flushed(value: f32, p: u64) -> f32 {
    if Mode::unpack(p).flush && value.is_subnormal() { 0f32.copysign(value) } else { value }
}

fn approximate(name: &str, ty: Ty) -> Option<RowFn> {
    // In double precision, then rounded once.
    macro_rules! single {
        (|$a:ident| $e:expr) => {
            row!(|a, _, _, p| {
                let $a = f64::from(flushed(f32::get(a), p));
                flushed(($e) as f32, p).put()
            })
        };
    }
    Some(match (name, ty) {
        ("rsqrt", Ty::F64) => lanes!(f64, |a| 1.0 / a.sqrt()),
        ("rsqrt", Ty::F32) => single!(|a| 1.0 / a.sqrt()),
        ("sin", Ty::F32) => single!(|a| a.sin()),
        ("cos", Ty::F32) => single!(|a| a.cos()),
        ("lg2", Ty::F32) => single!(|a| a.log2()),
        ("ex2", Ty::F32) => single!(|a| a.exp2()),
        ("tanh", Ty::F32) => single!(|a| a.tanh()),
        _ => return None,
    })
}

fn sign(name: &str, ty: Ty, flush: bool) -> Option<RowFn> {
    Some(match (name, ty, flush) {
        ("abs", Ty::F32, true) => row!(|a, _, _, p| flushed(f32::get(a), p).abs().put()),
        ("neg", Ty::F32, true) => row!(|a, _, _, p| (-flushed(f32::get(a), p)).put()),
        ("abs", Ty::F32, _) => lanes!(f32, |a| a.abs()),
        ("neg", Ty::F32, _) => lanes!(f32, |a| -a),
        ("abs", Ty::F64, _) => lanes!(f64, |a| a.abs()),
        ("neg", Ty::F64, _) => lanes!(f64, |a| -a),
        _ => return None,
    })
}

fn extremum(name: &str, ty: Ty) -> Option<RowFn> {
    macro_rules! pick {
        ($t:ty, $f:ident, $flushed:expr) => {
            row!(|a, b, _, p| {
                let (a, b) = ($flushed(<$t>::get(a), p), $flushed(<$t>::get(b), p));
                let negative = a.is_sign_negative() ^ b.is_sign_negative();
                if p >> 9 & 1 == 0 {
                    $f(a, b, p >> 8 & 1 != 0).put()
                } else {
                    $f(a.abs(), b.abs(), p >> 8 & 1 != 0).copysign(if negative { -1.0 } else { 1.0 }).put()
                }
            })
        };
    }
    Some(match (name, ty) {
        ("min", Ty::F32) => pick!(f32, min32, flushed),
        ("max", Ty::F32) => pick!(f32, max32, flushed),
        ("min", Ty::F64) => pick!(f64, min64, |value: f64, _| value),
        ("max", Ty::F64) => pick!(f64, max64, |value: f64, _| value),
        _ => return None,
    })
}

fn test(modifiers: &[String], ty: Ty) -> Option<RowFn> {
    let what = modifiers.first()?.as_str();
    macro_rules! test {
        ($t:ty) => {
            match what {
                "finite" => lanes!($t, |a| a.is_finite()),
                "infinite" => lanes!($t, |a| a.is_infinite()),
                "number" => lanes!($t, |a| !a.is_nan()),
                "notanumber" => lanes!($t, |a| a.is_nan()),
                "normal" => lanes!($t, |a| a.is_normal()),
                "subnormal" => lanes!($t, |a| a.is_subnormal()),
                _ => return None,
            }
        };
    }
    Some(match ty {
        Ty::F32 => test!(f32),
        Ty::F64 => test!(f64),
        _ => return None,
    })
}
