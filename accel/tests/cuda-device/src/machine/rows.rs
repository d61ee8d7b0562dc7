// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Registers of a block as rows: one u64 for each lane. An arithmetic instruction is a function on rows, made by one of the macros here from a closure
//! on plain values. A row holds its register's bits, zero-extended; constants and special registers are rows too.

use half::{bf16, f16};

/// Which rows an instruction works on, and for which lanes.
pub struct Rows<'a> {
    base: *mut u64,
    stride: usize,
    /// The active lanes, in order; when `all`, every lane is active.
    lanes: &'a [u16],
    all: bool,
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    /// A parameter that the decoder chose, such as lop3's table.
    pub p: u64,
}

/// Carries out an instruction.
pub type RowFn = fn(&Rows<'_>);

impl<'a> Rows<'a> {
    /// `file` holds whole rows of `stride` lanes; each lane is less than that.
    pub fn new(file: &'a mut [u64], stride: usize, lanes: &'a [u16]) -> Rows<'a> {
        debug_assert!(lanes.iter().all(|&lane| usize::from(lane) < stride));
        Rows {
            all: lanes.len() == stride,
            base: file.as_mut_ptr(),
            stride,
            lanes,
            d: 0,
            a: 0,
            b: 0,
            c: 0,
            p: 0,
        }
    }

    /// The decoder gives no row beyond the register file's end.
    fn row(&self, row: u32) -> *mut u64 {
        self.base.wrapping_add(row as usize * self.stride)
    }

    pub fn get(&self, row: u32, lane: u16) -> u64 {
        // SAFETY: the row and the lane lie in the register file that `new` borrowed.
        unsafe { *self.row(row).add(usize::from(lane)) }
    }

    pub fn set(&self, row: u32, lane: u16, value: u64) {
        // SAFETY: as in `get`; one thread works on a block.
        unsafe { *self.row(row).add(usize::from(lane)) = value }
    }

    /// Applies a function of (a, b, c, p) to each active lane. Rows may be the same.
    #[inline(always)]
    pub fn map(&self, f: impl Fn(u64, u64, u64, u64) -> u64) {
        let (d, a, b, c) = (self.row(self.d), self.row(self.a), self.row(self.b), self.row(self.c));
        // SAFETY: every lane lies in its row (`new`), every row in the file, and a lane is read before it is written.
        let lane = |at: usize| unsafe { *d.add(at) = f(*a.add(at), *b.add(at), *c.add(at), self.p) };
        if self.all {
            (0..self.stride).for_each(lane);
        } else {
            self.lanes.iter().for_each(|&at| lane(usize::from(at)));
        }
    }
}

/// A value in a lane: its bits, zero-extended.
pub trait Lane: Copy {
    fn get(bits: u64) -> Self;
    fn put(self) -> u64;
}

macro_rules! lane {
    ($($ty:ty, $bits:ty;)*) => { $(impl Lane for $ty {
        #[inline(always)]
        fn get(bits: u64) -> Self { bits as $ty }
        #[inline(always)]
        fn put(self) -> u64 { self as $bits as u64 }
    })* };
}

lane! { u8, u8; u16, u16; u32, u32; u64, u64; i8, u8; i16, u16; i32, u32; i64, u64; u128, u64; }

macro_rules! float_lane {
    ($($ty:ty, $bits:ty;)*) => { $(impl Lane for $ty {
        #[inline(always)]
        fn get(bits: u64) -> Self { <$ty>::from_bits(bits as $bits) }
        #[inline(always)]
        fn put(self) -> u64 { self.to_bits() as u64 }
    })* };
}

float_lane! { f32, u32; f64, u64; f16, u16; bf16, u16; }

impl Lane for bool {
    #[inline(always)]
    fn get(bits: u64) -> Self {
        bits & 1 != 0
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self)
    }
}

/// A row function of the closure (a, b, c, p) on bits.
macro_rules! row {
    (|$a:pat_param, $b:pat_param, $c:pat_param, $p:pat_param| $e:expr) => {{
        fn run(rows: &$crate::machine::rows::Rows<'_>) {
            rows.map(|$a: u64, $b: u64, $c: u64, $p: u64| -> u64 { $e })
        }
        run as $crate::machine::rows::RowFn
    }};
}

/// A row function of one to three operands of type T.
macro_rules! lanes {
    ($t:ty, |$a:ident| $e:expr) => {
        $crate::machine::rows::row!(|a, _, _, _| {
            let $a = <$t as $crate::machine::rows::Lane>::get(a);
            $crate::machine::rows::Lane::put($e)
        })
    };
    ($t:ty, |$a:ident, $b:ident| $e:expr) => {
        $crate::machine::rows::row!(|a, b, _, _| {
            let ($a, $b) =
                (<$t as $crate::machine::rows::Lane>::get(a), <$t as $crate::machine::rows::Lane>::get(b));
            $crate::machine::rows::Lane::put($e)
        })
    };
    ($t:ty, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        $crate::machine::rows::row!(|a, b, c, _| {
            let ($a, $b) =
                (<$t as $crate::machine::rows::Lane>::get(a), <$t as $crate::machine::rows::Lane>::get(b));
            let $c = <$t as $crate::machine::rows::Lane>::get(c);
            $crate::machine::rows::Lane::put($e)
        })
    };
}

/// Chooses T by the PTX type: `by_int!(ty, T => lanes!(T, |a, b| a.wrapping_add(b)))`. None for other types.
macro_rules! by_int {
    ($ty:expr, $t:ident => $e:expr) => {
        $crate::machine::rows::by_type!($ty, $t => $e;
            U8 | B8 => u8, S8 => i8, U16 | B16 => u16, S16 => i16, U32 | B32 => u32, S32 => i32, U64 | B64 => u64, S64 => i64)
    };
}

macro_rules! by_type {
    ($ty:expr, $t:ident => $e:expr; $($($from:ident)|+ => $to:ty),+) => {
        match $ty {
            $($($crate::ptx::types::Ty::$from)|+ => { type $t = $to; Some($e) })+
            _ => None,
        }
    };
}

pub(crate) use {by_int, by_type, lanes, row};
