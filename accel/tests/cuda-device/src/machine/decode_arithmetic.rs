// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decodes instructions that are functions on rows.

use super::decode::{Decoder, Result};
use super::rows::{RowFn, row};
use super::{compare, convert, float, halves, int};
use crate::ptx::ast::{self, Operand};
use crate::ptx::types::Ty;

impl Decoder<'_> {
    /// Instructions that are row functions. False for others.
    pub(super) fn arithmetic(&mut self, instruction: &ast::Instruction) -> Result<bool> {
        let ast::Instruction { name, modifiers, operands, .. } = instruction;
        let types: Vec<Ty> = modifiers.iter().filter_map(|modifier| Ty::parse(modifier)).collect();
        let ty = types.last().copied().unwrap_or(Ty::B32);
        match name.as_str() {
            "mov" => return self.mov(ty, operands),
            "cvt" => return self.cvt(modifiers, &types, operands),
            "setp" => return self.setp(modifiers, ty, operands),
            "set" => return self.set(modifiers, &types, operands),
            "addc" | "subc" | "madc" => return self.carry(name, modifiers, ty, operands),
            "add" | "sub" | "mad"
                if modifiers.first().is_some_and(|modifier| modifier == "cc")
                    || modifiers.iter().any(|modifier| modifier == "cc") =>
            {
                return self.carry(name, modifiers, ty, operands);
            }
            "bfi" | "selp" | "slct" => return self.select(name, &types, operands),
            _ => {}
        }
        let first = types.first().copied().unwrap_or(Ty::B32);
        let found = match ty {
            Ty::F32 | Ty::F64 => float::find(name, modifiers, ty),
            Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 => halves::find(name, modifiers, ty),
            _ => int::find(name, modifiers, if name == "dp4a" || name == "dp2a" { first } else { ty }),
        };
        let Some((function, p)) = found else { return Ok(false) };
        let Some((to, from)) = operands.split_first() else { return self.fail("no operands") };
        let (mut abc, wide) = ([0; 3], modifiers.iter().any(|modifier| modifier == "wide"));
        for (at, operand) in from.iter().take(3).enumerate() {
            let ty = match (name.as_str(), at) {
                ("shl" | "shr", 1) | ("bfe", 1 | 2) => Ty::U32,
                ("mad", 2) if wide => Ty::B64,
                _ => ty,
            };
            abc[at] = self.source(operand, ty)?;
        }
        let to = if let Operand::Pair(to, _) = to { to } else { to };
        // lop3 and shf have their parameter as the last operand.
        let p = match (name.as_str(), from.get(3)) {
            ("lop3", Some(Operand::Integer(table))) => *table,
            _ => p,
        };
        let (d, _) = self.destination(to)?;
        self.rows(function, d, abc, p);
        Ok(true)
    }

    fn mov(&mut self, ty: Ty, operands: &[Operand]) -> Result<bool> {
        match operands {
            // Unpacks: the lowest bits go first.
            [Operand::Vector(to), from] => {
                let a = self.source(from, ty)?;
                let width = (ty.size() * 8 / to.len().max(1)) as u64;
                for (at, to) in to.iter().enumerate() {
                    let (d, _) = self.destination(to)?;
                    self.rows(
                        row!(|a, _, _, p| a >> (p & 0xff) & (u64::MAX >> (64 - (p >> 8)))),
                        d,
                        [a, 0, 0],
                        at as u64 * width | width << 8,
                    );
                }
            }
            [to, Operand::Vector(from)] => {
                let width = ty.size() * 8 / from.len().max(1);
                let part = [Ty::B8, Ty::B16, Ty::B32][(width / 16).min(2)];
                let mut sum = 0;
                let (d, _) = self.destination(to)?;
                for (at, operand) in from.iter().enumerate() {
                    let b = self.source(operand, part)?;
                    let next = if at + 1 == from.len() { d } else { self.new_row() };
                    self.rows(
                        row!(|a, b, _, p| a | b << (p & 0xff) & (u64::MAX >> (64 - (p >> 8)) << (p & 0xff))),
                        next,
                        [sum, b, 0],
                        (at * width) as u64 | (width as u64) << 8,
                    );
                    sum = next;
                }
            }
            [to, from] => {
                let a = self.source(from, ty)?;
                let (d, mask) = self.destination(to)?;
                self.rows(
                    row!(|a, _, _, p| a & p),
                    d,
                    [a, 0, 0],
                    mask & if ty == Ty::Pred { 1 } else { ty.mask() },
                );
            }
            _ => return self.fail("mov has two operands"),
        }
        Ok(true)
    }

    fn cvt(&mut self, modifiers: &[String], types: &[Ty], operands: &[Operand]) -> Result<bool> {
        let &[to, from] = types else { return Ok(false) };
        // cvt.rn.f16x2.f32 d, a, b: a goes to the upper half.
        if matches!(to, Ty::F16x2 | Ty::Bf16x2) {
            let [d, high, low] = operands else { return Ok(false) };
            let one = if to == Ty::F16x2 { Ty::F16 } else { Ty::Bf16 };
            let Some((function, p)) = convert::find(modifiers, one, from, 0xffff) else { return Ok(false) };
            let (upper, lower) = (self.new_row(), self.new_row());
            let (a, b) = (self.source(high, from)?, self.source(low, from)?);
            self.rows(function, upper, [a, 0, 0], p);
            self.rows(function, lower, [b, 0, 0], p);
            let (d, _) = self.destination(d)?;
            self.rows(row!(|a, b, _, _| a << 16 | b & 0xffff), d, [upper, lower, 0], 0);
            return Ok(true);
        }
        let [d, a] = operands else { return Ok(false) };
        let a = self.source(a, from)?;
        let (d, mask) = self.destination(d)?;
        let Some((function, p)) = convert::find(modifiers, to, from, mask) else { return Ok(false) };
        self.rows(function, d, [a, 0, 0], p);
        Ok(true)
    }

    fn select(&mut self, name: &str, types: &[Ty], operands: &[Operand]) -> Result<bool> {
        let ty = types.first().copied().unwrap_or(Ty::B32);
        let rest = |at: usize| match (name, at) {
            ("selp", 2) => Ty::Pred,
            ("slct", 2) => types.get(1).copied().unwrap_or(Ty::S32),
            ("bfi", 2 | 3) => Ty::U32,
            _ => ty,
        };
        let Some((to, from)) = operands.split_first() else { return self.fail("no operands") };
        let mut sources = Vec::new();
        for (at, operand) in from.iter().enumerate() {
            sources.push(self.source(operand, rest(at))?);
        }
        let (d, _) = self.destination(to)?;
        match (name, sources.as_slice()) {
            ("selp", &[a, b, c]) => {
                self.rows(row!(|a, b, c, _| if c & 1 != 0 { a } else { b }), d, [a, b, c], 0)
            }
            ("slct", &[a, b, c]) if rest(2) == Ty::F32 => self.rows(
                row!(|a, b, c, _| if f32::from_bits(c as u32) >= 0.0 { a } else { b }),
                d,
                [a, b, c],
                0,
            ),
            ("slct", &[a, b, c]) => {
                self.rows(row!(|a, b, c, _| if c as i32 >= 0 { a } else { b }), d, [a, b, c], 0)
            }
            ("bfi", &[value, into, start, len]) => {
                // Start and length share a row.
                let both = self.new_row();
                self.rows(row!(|a, b, _, _| a & 0xff | (b & 0xff) << 8), both, [start, len, 0], 0);
                let function = row!(|a, b, c, p| int::insert(a, b, c & 0xff, c >> 8 & 0xff, p as u32));
                self.rows(function, d, [value, into, both], ty.size() as u64 * 8);
            }
            _ => return self.fail(format!("{name} has {} operands", operands.len())),
        }
        Ok(true)
    }

    /// setp.lt.and.f32 p|q, a, b, !c.
    fn setp(&mut self, modifiers: &[String], ty: Ty, operands: &[Operand]) -> Result<bool> {
        let Some(function) = modifiers.first().and_then(|how| compare::find(how, ty)) else {
            return Ok(false);
        };
        let [to, a, b, combined @ ..] = operands else { return self.fail("setp has three operands") };
        let (a, b) = (self.source(a, ty)?, self.source(b, ty)?);
        let (p, q) = match to {
            Operand::Pair(p, q) => (self.destination(p)?.0, Some(self.destination(q)?.0)),
            p => (self.destination(p)?.0, None),
        };
        let combine = modifiers.get(1).and_then(|how| combination(how));
        if q.is_none() && combine.is_none() && !matches!(ty, Ty::F16 | Ty::Bf16) {
            self.rows(function, p, [a, b, 0], 0);
            return Ok(true);
        }
        let raw = self.new_row();
        self.rows(function, raw, [a, b, 0], 0);
        let c = match combined.first() {
            Some(operand) => self.source(operand, Ty::Pred)?,
            None => 0,
        };
        let combine = combine.unwrap_or(row!(|a, _, _, _| a & 1));
        if let Some(q) = q {
            let other = self.new_row();
            let pair = matches!(ty, Ty::F16x2 | Ty::Bf16x2);
            self.rows(
                row!(|a, _, _, p| if p != 0 { a >> 1 & 1 } else { a & 1 ^ 1 }),
                other,
                [raw, 0, 0],
                u64::from(pair),
            );
            self.rows(combine, q, [other, c, 0], 0);
        }
        self.rows(combine, p, [raw, c, 0], 0);
        Ok(true)
    }

    /// set.lt.u32.f32: all ones or 1.0 where the comparison holds.
    fn set(&mut self, modifiers: &[String], types: &[Ty], operands: &[Operand]) -> Result<bool> {
        let &[to, from] = types else { return Ok(false) };
        let Some(function) = modifiers.first().and_then(|how| compare::find(how, from)) else {
            return Ok(false);
        };
        let [d, a, b, combined @ ..] = operands else { return self.fail("set has three operands") };
        let (a, b, mut raw) = (self.source(a, from)?, self.source(b, from)?, self.new_row());
        self.rows(function, raw, [a, b, 0], 0);
        if let (Some(combine), Some(c)) =
            (modifiers.get(1).and_then(|how| combination(how)), combined.first())
        {
            let (c, joined) = (self.source(c, Ty::Pred)?, self.new_row());
            self.rows(combine, joined, [raw, c, 0], 0);
            raw = joined;
        }
        let (d, _) = self.destination(d)?;
        let (one, pair) = match (to, from) {
            (Ty::F16x2, _) => (0x3c00, true),
            (Ty::Bf16x2, _) => (0x3f80, true),
            (_, Ty::F16x2 | Ty::Bf16x2) => (0xffff, true),
            (Ty::F32, _) => (0x3f80_0000, false),
            (Ty::F16, _) => (0x3c00, false),
            (Ty::Bf16, _) => (0x3f80, false),
            _ => (to.mask(), false),
        };
        let function = if pair {
            row!(|a, _, _, p| (a & 1) * p | (a >> 1 & 1) * p << 16)
        } else {
            row!(|a, _, _, p| (a & 1) * p)
        };
        self.rows(function, d, [raw, 0, 0], one);
        Ok(true)
    }

    /// add.cc, addc and the like: the carry is a register of each function.
    fn carry(&mut self, name: &str, modifiers: &[String], ty: Ty, operands: &[Operand]) -> Result<bool> {
        let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
        let carry = self.carry_flag();
        let Some((to, from)) = operands.split_first() else { return self.fail("no operands") };
        let mut sources = Vec::new();
        for operand in from {
            sources.push(self.source(operand, ty)?);
        }
        let (d, _) = self.destination(to)?;
        if name.starts_with("mad") {
            let part: Vec<String> = modifiers.iter().filter(|modifier| *modifier != "cc").cloned().collect();
            let (Some((product, p)), &[a, b, c]) = (int::find("mul", &part, ty), sources.as_slice()) else {
                return Ok(false);
            };
            let row = self.new_row();
            self.rows(product, row, [a, b, 0], p);
            sources = vec![row, c];
        }
        let &[a, b] = sources.as_slice() else {
            return self.fail(format!("{name} has {} operands", operands.len()));
        };
        let carry_in = if name.ends_with('c') { carry } else { 0 };
        // The parameter: the width in bits, and 128 for a subtraction.
        let p = ty.size() as u64 * 8 | if name.starts_with("sub") { 128 } else { 0 };
        let sum = self.new_row();
        self.rows(
            row!(|a, b, c, p| total(a, b, c, p) as u64 & u64::MAX >> (64 - (p & 127))),
            sum,
            [a, b, carry_in],
            p,
        );
        if has("cc") {
            self.rows(
                row!(|a, b, c, p| (total(a, b, c, p) >> (p & 127)) as u64 & 1),
                carry,
                [a, b, carry_in],
                p,
            );
        }
        self.rows(row!(|a, _, _, _| a), d, [sum, 0, 0], 0);
        Ok(true)
    }
}

/// a + b + c or a - b - c in 128 bits: the bit above the width is the carry or the borrow.
fn total(a: u64, b: u64, c: u64, p: u64) -> u128 {
    let mask = u64::MAX >> (64 - (p & 127));
    let (a, b, c) = (u128::from(a & mask), u128::from(b & mask), u128::from(c & 1));
    if p & 128 != 0 { a.wrapping_sub(b).wrapping_sub(c) } else { a + b + c }
}

fn combination(how: &str) -> Option<RowFn> {
    Some(match how {
        "and" => row!(|a, b, _, _| a & b & 1),
        "or" => row!(|a, b, _, _| (a | b) & 1),
        "xor" => row!(|a, b, _, _| (a ^ b) & 1),
        _ => return None,
    })
}
