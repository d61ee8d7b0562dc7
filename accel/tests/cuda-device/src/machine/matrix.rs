// SPDX-License-Identifier: Apache-2.0 OR MIT
//! mma.sync and ldmatrix (PTX ISA 8.8 §9.7.14.5): each lane of a warp holds a few elements of each matrix, in an order that the ISA's figures give.

use super::convert::{narrow, real};
use super::rows::Rows;
use crate::ptx::types::Ty;
use rustc_apfloat::Round;

pub enum Matrix {
    Multiply(Box<Multiply>),
    /// ldmatrix: each of `rows` gets one matrix of 8 × 8 16-bit elements; row `address` of lane 8 i + j points to row j of matrix i.
    Load {
        rows: Vec<u32>,
        address: u32,
        transposed: bool,
    },
}

/// d = a b + c with a of m × k, row by row, and b of k × n, column by column.
pub struct Multiply {
    m: usize,
    n: usize,
    k: usize,
    a_type: Ty,
    b_type: Ty,
    sum_type: Ty,
    d: Vec<u32>,
    a: Vec<u32>,
    b: Vec<u32>,
    c: Vec<u32>,
}

impl Matrix {
    /// `parts` are the rows of each operand.
    pub fn parse(name: &str, modifiers: &[String], mut parts: Vec<Vec<u32>>) -> Option<Matrix> {
        let has = |what: &str| modifiers.iter().any(|modifier| modifier == what);
        if name == "ldmatrix" {
            let [rows, address] = &mut parts[..] else { return None };
            return (has("m8n8") && has("b16")).then(|| Matrix::Load {
                rows: std::mem::take(rows),
                address: address[0],
                transposed: has("trans"),
            });
        }
        let shape = modifiers.iter().find_map(|modifier| {
            let (m, rest) = modifier.strip_prefix('m')?.split_once('n')?;
            let (n, k) = rest.split_once('k')?;
            Some((m.parse().ok()?, n.parse().ok()?, k.parse().ok()?))
        })?;
        let types: Vec<Ty> = modifiers.iter().filter_map(|modifier| Ty::parse(modifier)).collect();
        let &[sum_type, a_type, b_type, _] = types.as_slice() else { return None };
        let known = matches!(a_type, Ty::F16 | Ty::Bf16 | Ty::Tf32 | Ty::S8 | Ty::U8) && shape.0 == 16
            || a_type == Ty::F64 && shape.0 == 8;
        let [d, a, b, c] = <[Vec<u32>; 4]>::try_from(parts).ok()?;
        let (m, n, k) = shape;
        (known && has("row") && has("col") && !has("sp"))
            .then(|| Matrix::Multiply(Box::new(Multiply { m, n, k, a_type, b_type, sum_type, d, a, b, c })))
    }
}

/// Elements in a register of 32 bits, or of 64 for f64.
fn packed(ty: Ty) -> usize {
    4usize.div_ceil(ty.size())
}

fn element(bits: u64, ty: Ty, at: usize) -> f64 {
    let bits = if ty.size() < 4 { bits >> (at * ty.size() * 8) & ty.mask() } else { bits };
    match ty {
        Ty::S8 => f64::from(bits as i8),
        Ty::U8 => f64::from(bits as u8),
        Ty::S32 => f64::from(bits as i32),
        // The low bits of a tf32 operand do not count.
        Ty::Tf32 => real(bits & !0x1fff, Ty::F32),
        ty => real(bits, ty),
    }
}

impl Multiply {
    /// `lanes` are the 32 lanes of a warp.
    pub fn run(&self, rows: &Rows<'_>, lanes: &[u16]) {
        let Multiply { m, n, k, .. } = *self;
        let (mut a, mut b, mut sum) = (vec![0.0; m * k], vec![0.0; k * n], vec![0.0; m * n]);
        for (at, &lane) in lanes.iter().enumerate() {
            let (group, thread) = (at >> 2, at & 3);
            let per = packed(self.a_type);
            for (i, &row) in self.a.iter().enumerate() {
                for j in 0..per {
                    let (y, x) = (group + (i & 1) * 8, thread * per + (i >> 1) * 4 * per + j);
                    a[y * k + x] = element(rows.get(row, lane), self.a_type, j);
                }
            }
            for (i, &row) in self.b.iter().enumerate() {
                for j in 0..per {
                    b[(thread * per + i * 4 * per + j) * n + group] =
                        element(rows.get(row, lane), self.b_type, j);
                }
            }
            self.sums(group, thread, |register, part, y, x| {
                sum[y * n + x] = element(rows.get(self.c[register], lane), self.sum_type, part)
            });
        }
        for y in 0..m {
            for x in 0..n {
                sum[y * n + x] += (0..k).map(|z| a[y * k + z] * b[z * n + x]).sum::<f64>();
            }
        }
        for (at, &lane) in lanes.iter().enumerate() {
            let mut out = vec![0; self.d.len()];
            self.sums(at >> 2, at & 3, |register, part, y, x| {
                let value = sum[y * n + x];
                let bits = if self.sum_type == Ty::S32 {
                    u64::from(value as i64 as u32)
                } else {
                    narrow(value, self.sum_type, Round::NearestTiesToEven)
                };
                out[register] |= bits << (part * 16);
            });
            for (&row, bits) in self.d.iter().zip(out) {
                rows.set(row, lane, bits);
            }
        }
    }

    /// Calls `each` with register, half, row and column of every element of c and d that a lane holds.
    fn sums(&self, group: usize, thread: usize, mut each: impl FnMut(usize, usize, usize, usize)) {
        for y in 0..self.m / 8 {
            for x in 0..2 {
                let (register, part) = if self.sum_type == Ty::F16 { (y, x) } else { (y * 2 + x, 0) };
                each(register, part, group + y * 8, thread * 2 + x);
            }
        }
    }
}
