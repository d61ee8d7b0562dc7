// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decodes instructions among the lanes of a warp.

use super::decode::{Decoder, Result};
use super::matrix::Matrix;
use super::program::{Op, Reduce, SINK};
use super::warp::{Match, Shuffle, Vote};
use crate::ptx::ast::{Instruction, Operand};
use crate::ptx::types::Ty;

impl Decoder<'_> {
    /// Warp-wide instructions. False for others.
    pub(super) fn warp(&mut self, instruction: &Instruction) -> Result<bool> {
        let Instruction { name, modifiers, operands, .. } = instruction;
        let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
        let whole = Operand::Integer(0xffff_ffff);
        match (name.as_str(), operands.as_slice()) {
            ("shfl", [to, a, b, c, rest @ ..]) => {
                let how = if has("up") {
                    Shuffle::Up
                } else if has("down") {
                    Shuffle::Down
                } else if has("bfly") {
                    Shuffle::Butterfly
                } else {
                    Shuffle::Index
                };
                let sources = [self.source(a, Ty::B32)?, self.source(b, Ty::U32)?, self.source(c, Ty::U32)?];
                let mask = self.source(rest.first().unwrap_or(&whole), Ty::U32)?;
                let (d, predicate) = self.pair(to)?;
                self.emit(Op::Shuffle(how), d, sources, u64::from(mask) | u64::from(predicate) << 32);
            }
            ("vote", [to, a, rest @ ..]) => {
                let how = if has("all") {
                    Vote::All
                } else if has("any") {
                    Vote::Any
                } else if has("uni") {
                    Vote::Uniform
                } else {
                    Vote::Ballot
                };
                let (a, b) =
                    (self.source(a, Ty::Pred)?, self.source(rest.first().unwrap_or(&whole), Ty::U32)?);
                let (d, _) = self.destination(to)?;
                self.emit(Op::Vote(how), d, [a, b, 0], 0);
            }
            ("match", [to, a, mask]) => {
                let ty = if has("b64") { Ty::B64 } else { Ty::B32 };
                let (a, b) = (self.source(a, ty)?, self.source(mask, Ty::U32)?);
                let (d, predicate) = self.pair(to)?;
                self.emit(
                    Op::Match(if has("all") { Match::All } else { Match::Any }),
                    d,
                    [a, b, 0],
                    u64::from(predicate) << 32,
                );
            }
            ("activemask", [to]) => {
                let (d, _) = self.destination(to)?;
                self.emit(Op::ActiveMask, d, [0; 3], 0);
            }
            ("redux", [to, a, mask]) if !has("f32") => {
                let signed = has("s32");
                let how = match modifiers.get(1).map(String::as_str) {
                    Some("add") => Reduce::Add,
                    Some("min") => Reduce::Min(signed),
                    Some("max") => Reduce::Max(signed),
                    Some("and") => Reduce::And,
                    Some("or") => Reduce::Or,
                    Some("xor") => Reduce::Xor,
                    _ => return Ok(false),
                };
                let (a, b) = (self.source(a, Ty::B32)?, self.source(mask, Ty::U32)?);
                let (d, _) = self.destination(to)?;
                self.emit(Op::Reduce(how), d, [a, b, 0], 0);
            }
            ("elect", [to, mask]) => {
                let b = self.source(mask, Ty::U32)?;
                let (d, predicate) = self.pair(to)?;
                self.emit(Op::Elect, d, [0, b, 0], u64::from(predicate) << 32);
            }
            ("mma" | "ldmatrix", _) => return self.matrix(instruction),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// `d|p`: a destination and a predicate, either of which may be missing.
    fn pair(&mut self, to: &Operand) -> Result<(u32, u32)> {
        Ok(match to {
            Operand::Pair(d, predicate) => (self.destination(d)?.0, self.destination(predicate)?.0),
            d => (self.destination(d)?.0, SINK),
        })
    }

    fn matrix(&mut self, instruction: &Instruction) -> Result<bool> {
        let mut parts = Vec::new();
        for operand in &instruction.operands {
            let mut rows = Vec::new();
            match operand {
                Operand::Vector(registers) => {
                    for register in registers {
                        rows.push(self.source(register, Ty::B32)?);
                    }
                }
                Operand::Memory { base, offset, .. } => {
                    let row = self.source(base, Ty::B64)?;
                    rows.push(self.plus(row, *offset));
                }
                other => rows.push(self.source(other, Ty::B32)?),
            }
            parts.push(rows);
        }
        let Some(matrix) = Matrix::parse(&instruction.name, &instruction.modifiers, parts) else {
            return Ok(false);
        };
        self.emit(Op::Matrix(Box::new(matrix)), 0, [0; 3], 0);
        Ok(true)
    }
}
