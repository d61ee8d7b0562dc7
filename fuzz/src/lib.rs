// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The common half of the fuzz targets of several parts: libFuzzer's entry point, and inputs for tests without libFuzzer.
//!
//! A part's package of targets is a static library with [`entry`]; `fuzz/build PACKAGE PROGRAM` links it with libFuzzer, with the
//! crates instrumented that `fuzz/instrument` names.

#![deny(missing_docs)]

use std::panic::{UnwindSafe, catch_unwind};

/// Defines libFuzzer's entry point, which calls a function of type `fn(&[u8])` with each input.
#[macro_export]
macro_rules! entry {
    ($one:expr) => {
        /// libFuzzer's entry point.
        ///
        /// # Safety
        /// `data` points to `size` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn LLVMFuzzerTestOneInput(data: *const u8, size: usize) -> i32 {
            // SAFETY: as the caller promises.
            unsafe { $crate::run(data, size, $one) }
        }
    };
}

/// Calls `one` with an input of libFuzzer. A panic ends the process, as it must not unwind into C.
///
/// # Safety
/// `data` points to `size` bytes.
pub unsafe fn run(data: *const u8, size: usize, one: impl FnOnce(&[u8]) + UnwindSafe) -> i32 {
    let input = if size == 0 {
        &[]
    } else {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(data, size) }
    };
    if catch_unwind(|| one(input)).is_err() {
        std::process::abort();
    }
    0
}

/// Returns a stream of bytes from one seed (xorshift), so that a failure can be replayed.
pub fn bytes(seed: u64) -> impl Iterator<Item = u8> {
    std::iter::successors(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)), |n| {
        let n = n ^ n << 13;
        let n = n ^ n >> 7;
        Some(n ^ n << 17)
    })
    .map(|n| (n >> 32) as u8)
}
