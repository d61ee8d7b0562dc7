// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prefetching, which differs between processors.

/// Fetches the line at `at` for reading. Any address is harmless.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Fetches the line at `at` with the right to write it, if the processor can: a store to a line that the other side has
/// read then does not wait for that right. Any address is harmless.
#[inline(always)]
pub fn prefetch_write(at: *const u8) {
    // As an instruction of its own: the intrinsic becomes a prefetch for reading unless the compiler knows that the
    // processor has this one. Processors without it execute it as a no-op.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults and changes no register.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Bytes of a cache line.
const LINE: usize = 64;
/// Longest stretch to fetch ahead; beyond it the processor's own prefetcher is active.
const STRETCH: usize = 2048;

/// Fetches all lines of `len` bytes at `at` for reading.
#[inline(always)]
pub fn prefetch_all(at: *const u8, len: u32) {
    let mut off = 0;
    while off < (len as usize).min(STRETCH) {
        prefetch(at.wrapping_add(off));
        off += LINE;
    }
}

/// Fetches all lines of `len` bytes at `at` for writing.
#[inline(always)]
pub fn prefetch_write_all(at: *const u8, len: u32) {
    let mut off = 0;
    while off < (len as usize).min(STRETCH) {
        prefetch_write(at.wrapping_add(off));
        off += LINE;
    }
}
