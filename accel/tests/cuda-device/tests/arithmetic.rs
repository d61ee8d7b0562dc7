// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Each arithmetic instruction gives what plain Rust gives, on random values and on those at the edges.

mod common;

use common::{Device, kernel, shape};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

/// Inputs of one lane.
type Three = (u64, u64, u64);

/// Runs `instruction` with its operands: D, A, B, C stand for registers of the given kinds, 'r' for 32 bits, 'd' for 64, 'h' for 16.
fn results(instruction: &str, kinds: &str, inputs: &[Three]) -> Vec<u64> {
    let device = Device::new();
    let arrays =
        [0, 1, 2].map(|at| device.put(&inputs.iter().map(|&(a, b, c)| [a, b, c][at]).collect::<Vec<_>>()));
    let out = device.put(&vec![0u64; inputs.len()]);
    let kinds: Vec<char> = kinds.chars().collect();
    let mut body = String::new();
    for at in 0..3 {
        body += &format!(
            "ld.param.u64 %d1, [p{at}]; add.u64 %d1, %d1, %o; ld.global.u64 %d{}, [%d1]; cvt.u32.u64 %r{}, %d{}; cvt.u16.u64 %h{}, %d{};\n",
            10 + at,
            10 + at,
            10 + at,
            10 + at,
            10 + at
        );
    }
    let name = |at: usize| format!("%{}{}", kinds[at], if at == 0 { 9 } else { 9 + at });
    let mut text = instruction.to_owned();
    for (at, letter) in ["D", "A", "B", "C"].iter().enumerate().take(kinds.len()) {
        text = text.replace(letter, &name(at));
    }
    body += &format!("{text}\n");
    body += match kinds[0] {
        'r' => "cvt.u64.u32 %d9, %r9;\n",
        'h' => "cvt.u64.u16 %d9, %h9;\n",
        _ => "",
    };
    body += "ld.param.u64 %d1, [p3]; add.u64 %d1, %d1, %o; st.global.u64 [%d1], %d9;";
    device
        .run(&kernel(4, &body), &shape(1, inputs.len() as u32), &[arrays[0], arrays[1], arrays[2], out])
        .unwrap_or_else(|fault| panic!("{instruction}: {fault:?}"));
    device.get(out, inputs.len())
}

fn edges() -> impl Strategy<Value = u64> {
    let special = vec![
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        1 << 63,
        u64::MAX,
        0x3c00,
        0x7c00,
        0x7e00,
        0xfc00,
        0x0001,
        0x3f80_0000,
        0xbf80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x0000_0001,
        0x007f_ffff,
        0x0080_0000,
        0x4b00_0000,
        0x4f00_0000,
        0x4f80_0000,
        0x7f7f_ffff,
        0x3ff0_0000_0000_0000,
        0x7ff0_0000_0000_0000,
        0x7ff8_0000_0000_0000,
        0x000f_ffff_ffff_ffff,
        0x41df_ffff_ffc0_0000,
        0x43e0_0000_0000_0000,
    ];
    prop_oneof![
        prop::sample::select(special),
        any::<u64>(),
        any::<f32>().prop_map(|value| u64::from(value.to_bits())),
        any::<f64>().prop_map(f64::to_bits),
        (0u64..80)
    ]
}

fn inputs() -> Vec<Three> {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = (edges(), edges(), edges());
    (0..256).map(|_| strategy.new_tree(&mut runner).expect("a value").current()).collect()
}

/// Compares an instruction with a function of the same operands.
fn check(instruction: &str, kinds: &str, expected: impl Fn(u64, u64, u64) -> u64) {
    let inputs = inputs();
    for (found, &(a, b, c)) in results(instruction, kinds, &inputs).into_iter().zip(&inputs) {
        let expected = expected(a, b, c);
        assert_eq!(found, expected, "{instruction} of {a:#x}, {b:#x}, {c:#x}: {found:#x}, not {expected:#x}");
    }
}

/// As `check` for floats: NaNs are equal, and each result is turned to a float by `of`.
fn check_float<T: PartialEq + std::fmt::Debug>(
    instruction: &str,
    kinds: &str,
    of: impl Fn(u64) -> T,
    nan: impl Fn(&T) -> bool,
    expected: impl Fn(u64, u64, u64) -> T,
) {
    let inputs = inputs();
    for (found, &(a, b, c)) in results(instruction, kinds, &inputs).into_iter().zip(&inputs) {
        let (found, expected) = (of(found), expected(a, b, c));
        assert!(
            found == expected || (nan(&found) && nan(&expected)),
            "{instruction} of {a:#x}, {b:#x}, {c:#x}: {found:?}, not {expected:?}"
        );
    }
}

fn s(value: u64) -> f32 {
    f32::from_bits(value as u32)
}

fn w(value: u64) -> f64 {
    f64::from_bits(value)
}

/// The next larger float.
fn next_up(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if value == 0.0 {
        1
    } else if value > 0.0 {
        bits + 1
    } else {
        bits - 1
    })
}

fn u(value: i32) -> u64 {
    u64::from(value as u32)
}

#[test]
fn integer_arithmetic_wraps_and_extends_as_rust_does() {
    check("add.u32 D, A, B;", "rrr", |a, b, _| u64::from((a as u32).wrapping_add(b as u32)));
    check("sub.s64 D, A, B;", "ddd", |a, b, _| a.wrapping_sub(b));
    check("add.sat.s32 D, A, B;", "rrr", |a, b, _| u((a as i32).saturating_add(b as i32)));
    check("mul.lo.s32 D, A, B;", "rrr", |a, b, _| u((a as i32).wrapping_mul(b as i32)));
    check("mul.hi.u32 D, A, B;", "rrr", |a, b, _| ((a & 0xffff_ffff) * (b & 0xffff_ffff)) >> 32);
    check("mul.hi.s64 D, A, B;", "ddd", |a, b, _| {
        ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
    });
    check("mul.wide.s32 D, A, B;", "drr", |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64);
    check("mul.wide.u16 D, A, B;", "rhh", |a, b, _| u64::from(a as u16) * u64::from(b as u16));
    check("mad.wide.s32 D, A, B, C;", "drrd", |a, b, c| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(c as i64) as u64
    });
    check("mad.lo.u32 D, A, B, C;", "rrrr", |a, b, c| {
        u64::from((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32))
    });
    check("mad.hi.s32 D, A, B, C;", "rrrr", |a, b, c| {
        u((((i64::from(a as i32) * i64::from(b as i32)) >> 32) as i32).wrapping_add(c as i32))
    });
    check("mul24.lo.u32 D, A, B;", "rrr", |a, b, _| u64::from(((a & 0xff_ffff) * (b & 0xff_ffff)) as u32));
    check("sad.s32 D, A, B, C;", "rrrr", |a, b, c| {
        u64::from((a as i32).abs_diff(b as i32).wrapping_add(c as u32))
    });
    check("div.s32 D, A, B;", "rrr", |a, b, _| {
        if b as u32 == 0 { 0xffff_ffff } else { u((a as i32).wrapping_div(b as i32)) }
    });
    check("rem.u64 D, A, B;", "ddd", |a, b, _| if b == 0 { a } else { a % b });
    check("min.s32 D, A, B;", "rrr", |a, b, _| u((a as i32).min(b as i32)));
    check("max.u16 D, A, B;", "hhh", |a, b, _| u64::from((a as u16).max(b as u16)));
    check("neg.s16 D, A;", "hh", |a, _, _| u64::from((a as u16).wrapping_neg()));
    check("abs.s32 D, A;", "rr", |a, _, _| u((a as i32).wrapping_abs()));
}

#[test]
fn carries_go_from_one_word_to_the_next() {
    let add = "{ .reg .b32 l, m, n, o; mov.b64 {l, m}, A; mov.b64 {n, o}, B; add.cc.u32 l, l, n; addc.u32 m, m, o; mov.b64 D, {l, m}; }";
    check(add, "ddd", |a, b, _| a.wrapping_add(b));
    let sub = "{ .reg .b32 l, m, n, o; mov.b64 {l, m}, A; mov.b64 {n, o}, B; sub.cc.u32 l, l, n; subc.u32 m, m, o; mov.b64 D, {l, m}; }";
    check(sub, "ddd", |a, b, _| a.wrapping_sub(b));
    let mad = "{ .reg .b32 l, h; mad.lo.cc.u32 l, A, B, C; madc.hi.u32 h, A, B, 0; mov.b64 D, {l, h}; }";
    check(mad, "drrr", |a, b, c| (a & 0xffff_ffff) * (b & 0xffff_ffff) + (c & 0xffff_ffff));
}

#[test]
fn bits_are_counted_moved_and_chosen() {
    check("popc.b64 D, A;", "rd", |a, _, _| u64::from(a.count_ones()));
    check("clz.b32 D, A;", "rr", |a, _, _| u64::from((a as u32).leading_zeros()));
    check("brev.b32 D, A;", "rr", |a, _, _| u64::from((a as u32).reverse_bits()));
    check("bfind.u32 D, A;", "rr", |a, _, _| u64::from((a as u32).checked_ilog2().unwrap_or(u32::MAX)));
    check("bfind.shiftamt.s32 D, A;", "rr", |a, _, _| {
        let magnitude = (a as i32 ^ (a as i32 >> 31)) as u32;
        if magnitude == 0 { 0xffff_ffff } else { u64::from(magnitude.leading_zeros()) }
    });
    check("shl.b32 D, A, B;", "rrr", |a, b, _| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0)));
    check("shr.u64 D, A, B;", "ddr", |a, b, _| a.checked_shr(b as u32).unwrap_or(0));
    check("shr.s32 D, A, B;", "rrr", |a, b, _| u((a as i32) >> (b as u32).min(31)));
    check("shr.s16 D, A, B;", "hhr", |a, b, _| u64::from(((a as i16) >> (b as u32).min(15)) as u16));
    check("shf.l.wrap.b32 D, A, B, C;", "rrrr", |a, b, c| {
        u64::from(((b << 32 | a & 0xffff_ffff) << (c & 31) >> 32) as u32)
    });
    check("shf.r.clamp.b32 D, A, B, C;", "rrrr", |a, b, c| {
        u64::from(((b << 32 | a & 0xffff_ffff) >> (c as u32).min(32)) as u32)
    });
    check("lop3.b32 D, A, B, C, 0x96;", "rrrr", |a, b, c| (a ^ b ^ c) & 0xffff_ffff);
    check("lop3.b32 D, A, B, C, 0xE8;", "rrrr", |a, b, c| (a & b | a & c | b & c) & 0xffff_ffff);
    check("lop3.b32 D, A, B, C, 0xca;", "rrrr", |a, b, c| (a & b | !a & c) & 0xffff_ffff);
    check("prmt.b32 D, A, B, 0x5410;", "rrr", |a, b, _| b << 16 & 0xffff_0000 | a & 0xffff);
    check("prmt.b32 D, A, B, 0x0123;", "rrr", |a, _, _| u64::from((a as u32).swap_bytes()));
    check("prmt.b32 D, A, B, 0xba98;", "rrr", |a, _, _| {
        u64::from(u32::from_le_bytes((a as u32).to_le_bytes().map(|byte| if byte >= 128 { 255 } else { 0 })))
    });
    check("not.b64 D, A;", "dd", |a, _, _| !a);
    check("cnot.b32 D, A;", "rr", |a, _, _| u64::from(a as u32 == 0));
    check("dp4a.u32.s32 D, A, B, C;", "rrrr", |a, b, c| {
        let products =
            (0..4).map(|at| i64::from((a >> (8 * at)) as u8) * i64::from((b >> (8 * at)) as i8)).sum::<i64>();
        u64::from((c as u32).wrapping_add(products as u32))
    });
}

/// The ISA's own pseudocode for bfe and bfi.
#[test]
fn fields_are_extracted_and_inserted_as_the_pseudocode_says() {
    fn extract(a: u64, b: u64, c: u64, width: u64, signed: bool) -> u64 {
        let (pos, len, msb) = (b & 0xff, c & 0xff, width - 1);
        let sign = signed && len != 0 && a >> (pos + len - 1).min(msb) & 1 != 0;
        (0..width)
            .map(|i| (if i < len && pos + i <= msb { a >> (pos + i) & 1 } else { u64::from(sign) }) << i)
            .sum()
    }
    check("bfe.u32 D, A, B, C;", "rrrr", |a, b, c| extract(a, b, c, 32, false));
    check("bfe.s32 D, A, B, C;", "rrrr", |a, b, c| extract(a, b, c, 32, true));
    check("bfe.s64 D, A, B, C;", "ddrr", |a, b, c| extract(a, b, c, 64, true));
    let insert = |a: u64, b: u64, start: u64, len: u64| {
        (0..32)
            .map(|i| (if i >= start && i < start + len { a >> (i - start) & 1 } else { b >> i & 1 }) << i)
            .sum()
    };
    check("bfi.b32 D, A, B, 5, 9;", "rrr", |a, b, _| insert(a, b, 5, 9));
    check("bfi.b32 D, A, B, C, 40;", "rrrr", |a, b, c| insert(a, b, c & 0xff, 40));
}

#[test]
fn single_precision_rounds_once() {
    let float = |bits| s(bits);
    check_float("add.f32 D, A, B;", "rrr", float, |f| f.is_nan(), |a, b, _| s(a) + s(b));
    check_float("mul.rn.f32 D, A, B;", "rrr", float, |f| f.is_nan(), |a, b, _| s(a) * s(b));
    check_float("fma.rn.f32 D, A, B, C;", "rrrr", float, |f| f.is_nan(), |a, b, c| s(a).mul_add(s(b), s(c)));
    check_float("div.rn.f32 D, A, B;", "rrr", float, |f| f.is_nan(), |a, b, _| s(a) / s(b));
    check_float("sqrt.rn.f32 D, A;", "rr", float, |f| f.is_nan(), |a, _, _| s(a).sqrt());
    check_float("rcp.rn.f64 D, A;", "dd", w, |f| f.is_nan(), |a, _, _| 1.0 / w(a));
    check_float("fma.rn.f64 D, A, B, C;", "dddd", w, |f| f.is_nan(), |a, b, c| w(a).mul_add(w(b), w(c)));
    check_float(
        "add.sat.f32 D, A, B;",
        "rrr",
        float,
        |f| f.is_nan(),
        |a, b, _| if (s(a) + s(b)).is_nan() { 0.0 } else { (s(a) + s(b)).clamp(0.0, 1.0) },
    );
    check_float("ex2.approx.f32 D, A;", "rr", float, |f| f.is_nan(), |a, _, _| f64::from(s(a)).exp2() as f32);
    check_float(
        "rsqrt.approx.f32 D, A;",
        "rr",
        float,
        |f| f.is_nan(),
        |a, _, _| (1.0 / f64::from(s(a)).sqrt()) as f32,
    );
    check_float("min.f32 D, A, B;", "rrr", float, |f| f.is_nan(), |a, b, _| s(a).min(s(b)));
    check_float(
        "max.NaN.f32 D, A, B;",
        "rrr",
        float,
        |f| f.is_nan(),
        |a, b, _| if s(a).is_nan() || s(b).is_nan() { f32::NAN } else { s(a).max(s(b)) },
    );
    check_float("copysign.f32 D, A, B;", "rrr", float, |f| f.is_nan(), |a, b, _| s(b).copysign(s(a)));
}

/// A result rounded down is the largest value not above the exact one: neighbours in double precision show that.
#[test]
fn directed_roundings_enclose_the_exact_value() {
    let inputs = inputs();
    for (name, exact) in
        [("add", (|a, b| a + b) as fn(f64, f64) -> f64), ("mul", |a, b| a * b), ("div", |a, b| a / b)]
    {
        let of = |rounding: &str| results(&format!("{name}.{rounding}.f32 D, A, B;"), "rrr", &inputs);
        let (down, up, zero, near) = (of("rm"), of("rp"), of("rz"), of("rn"));
        for (at, &(a, b, _)) in inputs.iter().enumerate() {
            let (down, up, zero, near) = (s(down[at]), s(up[at]), s(zero[at]), s(near[at]));
            let value = exact(f64::from(s(a)), f64::from(s(b)));
            if value.is_nan() {
                assert!(down.is_nan() && up.is_nan());
                continue;
            }
            assert!(
                f64::from(down) <= value && value <= f64::from(up),
                "{name} of {a:#x}, {b:#x}: {down:e} {value:e} {up:e}"
            );
            assert!(
                down == up || next_up(down) == up,
                "{name} of {a:#x}, {b:#x}: {down:e} and {up:e} are not neighbours"
            );
            assert_eq!(zero, if value > 0.0 { down } else { up }, "{name} of {a:#x}, {b:#x} towards zero");
            assert!(near == down || near == up);
        }
    }
}

#[test]
fn subnormals_are_flushed_only_where_the_instruction_says_so() {
    let flush = |value: f32| if value.is_subnormal() { 0.0f32.copysign(value) } else { value };
    check_float("mul.ftz.f32 D, A, B;", "rrr", s, |f| f.is_nan(), |a, b, _| flush(flush(s(a)) * flush(s(b))));
    check_float("cvt.ftz.f32.f32 D, A;", "rr", s, |f| f.is_nan(), |a, _, _| flush(s(a)));
}

#[test]
fn conversions_saturate_extend_and_round() {
    check("cvt.rzi.s32.f32 D, A;", "rr", |a, _, _| u(s(a) as i32));
    check("cvt.rni.s32.f32 D, A;", "rr", |a, _, _| u(s(a).round_ties_even() as i32));
    check("cvt.rmi.u32.f64 D, A;", "rd", |a, _, _| {
        if w(a).is_nan() { 1 << 31 } else { u64::from(w(a).floor() as u32) }
    });
    check(
        "cvt.rpi.s64.f32 D, A;",
        "dr",
        |a, _, _| if s(a).is_nan() { 1 << 63 } else { s(a).ceil() as i64 as u64 },
    );
    check("cvt.s32.s8 D, A;", "rr", |a, _, _| u(i32::from(a as i8)));
    check("cvt.sat.u8.s32 D, A;", "rr", |a, _, _| (a as i32).clamp(0, 255) as u64);
    check("cvt.s64.s16 D, A;", "dh", |a, _, _| i64::from(a as i16) as u64);
    check_float("cvt.rn.f32.u64 D, A;", "rd", s, |f| f.is_nan(), |a, _, _| a as f32);
    check_float("cvt.rn.f32.f64 D, A;", "rd", s, |f| f.is_nan(), |a, _, _| w(a) as f32);
    check_float("cvt.rzi.f32.f32 D, A;", "rr", s, |f| f.is_nan(), |a, _, _| s(a).trunc());
    check_float("cvt.f64.f32 D, A;", "dr", w, |f| f.is_nan(), |a, _, _| f64::from(s(a)));
    check_float(
        "cvt.rn.bf16.f32 D, A;",
        "hr",
        |b| bf16::from_bits(b as u16).to_f32(),
        |f| f.is_nan(),
        |a, _, _| bf16::from_f32(s(a)).to_f32(),
    );
    check_float(
        "cvt.rn.f16.f32 D, A;",
        "hr",
        |b| f16::from_bits(b as u16).to_f32(),
        |f| f.is_nan(),
        |a, _, _| f16::from_f32(s(a)).to_f32(),
    );
    check_float("cvt.f32.f16 D, A;", "rh", s, |f| f.is_nan(), |a, _, _| f16::from_bits(a as u16).to_f32());
    let pair = |bits: u64| {
        [
            f16::from_bits(bits as u16).to_f32().to_bits(),
            f16::from_bits((bits >> 16) as u16).to_f32().to_bits(),
        ]
    };
    check_float(
        "cvt.rn.f16x2.f32 D, A, B;",
        "rrr",
        pair,
        |_| false,
        |a, b, _| [b, a].map(|value| f16::from_f32(s(value)).to_f32().to_bits()),
    );
}

#[test]
fn halves_round_the_exact_result() {
    let half = |bits: u64| f16::from_bits(bits as u16).to_f32();
    let brain = |bits: u64| bf16::from_bits(bits as u16).to_f32();
    let h = |bits: u64| f64::from(half(bits));
    check_float(
        "add.f16 D, A, B;",
        "hhh",
        half,
        |f| f.is_nan(),
        |a, b, _| f16::from_f32(half(a) + half(b)).to_f32(),
    );
    check_float(
        "mul.f16 D, A, B;",
        "hhh",
        half,
        |f| f.is_nan(),
        |a, b, _| f16::from_f32(half(a) * half(b)).to_f32(),
    );
    check_float(
        "mul.bf16 D, A, B;",
        "hhh",
        brain,
        |f| f.is_nan(),
        |a, b, _| bf16::from_f64(f64::from(brain(a)) * f64::from(brain(b))).to_f32(),
    );
    // The sum of a product and an f16 has at most 53 bits.
    check_float(
        "fma.rn.f16 D, A, B, C;",
        "hhhh",
        half,
        |f| f.is_nan(),
        |a, b, c| {
            let exact = rustc_apfloat::ieee::Double::from_bits(u128::from((h(a) * h(b) + h(c)).to_bits()));
            let rounded: rustc_apfloat::ieee::Half =
                rustc_apfloat::FloatConvert::convert(exact, &mut false).value;
            half(rustc_apfloat::Float::to_bits(rounded) as u64)
        },
    );
    check("neg.f16x2 D, A;", "rr", |a, _, _| (a ^ 0x8000_8000) & 0xffff_ffff);
}

use rustc_apfloat::Float as _;

#[test]
fn comparisons_tell_ordered_from_unordered() {
    let choose = |condition: &str| format!("setp.{condition} %p1, A, B; selp.u32 D, 1, 0, %p1;");
    check(&choose("lt.s32"), "rrr", |a, b, _| u64::from((a as i32) < b as i32));
    check(&choose("hi.u64"), "rdd", |a, b, _| u64::from(a > b));
    check(&choose("lt.f32"), "rrr", |a, b, _| u64::from(s(a) < s(b)));
    check(&choose("geu.f32"), "rrr", |a, b, _| u64::from(s(a) >= s(b) || s(a).is_nan() || s(b).is_nan()));
    check(&choose("neu.f64"), "rdd", |a, b, _| u64::from(w(a) != w(b)));
    check(&choose("ne.f32"), "rrr", |a, b, _| u64::from(s(a) < s(b) || s(a) > s(b)));
    check(&choose("num.f32"), "rrr", |a, b, _| u64::from(!s(a).is_nan() && !s(b).is_nan()));
    let both = "setp.lt.u32 %p1, C, 7; setp.eq.and.s32 %p2|%p3, A, B, !%p1; selp.u32 %r1, 2, 0, %p3; selp.u32 D, 1, %r1, %p2;";
    check(both, "rrrr", |a, b, c| match (c as u32 >= 7, a as u32 == b as u32) {
        (false, _) => 0,
        (true, true) => 1,
        (true, false) => 2,
    });
    check("set.gt.u32.f32 D, A, B;", "rrr", |a, b, _| if s(a) > s(b) { 0xffff_ffff } else { 0 });
    check(
        "slct.u32.s32 D, A, B, C;",
        "rrrr",
        |a, b, c| if c as i32 >= 0 { a & 0xffff_ffff } else { b & 0xffff_ffff },
    );
}
