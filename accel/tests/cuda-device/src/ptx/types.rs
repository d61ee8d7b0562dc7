// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PTX's fundamental types (PTX ISA 8.8 §5.2).

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F64,
    U16x2,
    S16x2,
}

impl Ty {
    /// The type that a modifier names, as in `.u32`; None for modifiers that are no type.
    pub fn parse(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "b8" => Ty::B8,
            "b16" => Ty::B16,
            "b32" => Ty::B32,
            "b64" => Ty::B64,
            "b128" => Ty::B128,
            "u8" => Ty::U8,
            "u16" => Ty::U16,
            "u32" => Ty::U32,
            "u64" => Ty::U64,
            "s8" => Ty::S8,
            "s16" => Ty::S16,
            "s32" => Ty::S32,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "f16x2" => Ty::F16x2,
            "bf16" => Ty::Bf16,
            "bf16x2" => Ty::Bf16x2,
            "tf32" => Ty::Tf32,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            "u16x2" => Ty::U16x2,
            "s16x2" => Ty::S16x2,
            _ => return None,
        })
    }

    /// Bytes in memory.
    pub fn size(self) -> usize {
        match self {
            Ty::Pred | Ty::B8 | Ty::U8 | Ty::S8 => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 8,
            Ty::B128 => 16,
            _ => 4,
        }
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    pub fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2 | Ty::Tf32 | Ty::F32 | Ty::F64)
    }

    /// The bits of a register of this type. A predicate is 0 or 1.
    pub fn mask(self) -> u64 {
        match self.size() {
            _ if self == Ty::Pred => 1,
            1 => 0xff,
            2 => 0xffff,
            4 => 0xffff_ffff,
            _ => u64::MAX,
        }
    }
}
