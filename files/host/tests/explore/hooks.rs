// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The functions that the instrumented core calls: before each access to memory, each copy and fill; and its
//! surroundings.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};

use crate::schedule;

// The instrumented core is linked before the plain one that comes with the crate, so its functions are taken.
#[link(name = "tfs_recorded", kind = "static", modifiers = "+whole-archive")]
unsafe extern "C" {}

thread_local! {
    /// So many allocations succeed before the first of those that fail.
    pub static MEMORY: Cell<usize> = const { Cell::new(0) };
    /// So many allocations fail then.
    pub static NO_MEMORY: Cell<usize> = const { Cell::new(0) };
    /// The waiting threads have been killed.
    pub static KILLED: Cell<bool> = const { Cell::new(false) };
}

macro_rules! silent {
    ($($name:ident($($arg:ty),*))*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($(_: $arg),*) {}
    )* };
}
silent! {
    __tsan_init() __tsan_func_entry(usize) __tsan_func_exit() __tsan_atomic_thread_fence(c_int) __tsan_atomic_signal_fence(c_int)
    tfs_os_flush(usize, usize) tfs_os_drain() tfs_os_ring(usize, u32) tfs_os_wake(usize, usize)
    tfs_os_waiting(usize, u32, bool, u64)
}

/// Plain accesses, which the core itself makes after the call.
macro_rules! plain {
    (loads: $($load:ident)*; stores: $($store:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $load(address: usize) {
                schedule::access(address, false);
            }
        )*
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $store(address: usize) {
                schedule::access(address, true);
            }
        )*
    };
}
plain! {
    loads: __tsan_read1 __tsan_read2 __tsan_read4 __tsan_read8 __tsan_read16
        __tsan_unaligned_read2 __tsan_unaligned_read4 __tsan_unaligned_read8 __tsan_unaligned_read16;
    stores: __tsan_write1 __tsan_write2 __tsan_write4 __tsan_write8 __tsan_write16
        __tsan_unaligned_write2 __tsan_unaligned_write4 __tsan_unaligned_write8 __tsan_unaligned_write16
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_read_range(address: usize, _: usize) {
    schedule::access(address, false);
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_write_range(address: usize, _: usize) {
    schedule::access(address, true);
}

/// The access to a shared word that the core asked for; it passes valid, aligned pointers.
macro_rules! atomics {
    ($atomic:ident $ty:ty: load $load:ident $store:ident store $($name:ident $op:ident)*) => {
        #[unsafe(no_mangle)]
        extern "C" fn $load(p: *mut $ty, _: c_int) -> $ty {
            schedule::access(p as usize, false);
            // SAFETY: the core's own pointer.
            unsafe { $atomic::from_ptr(p) }.load(SeqCst)
        }
        #[unsafe(no_mangle)]
        extern "C" fn $store(p: *mut $ty, value: $ty, _: c_int) {
            schedule::access(p as usize, true);
            // SAFETY: the core's own pointer.
            unsafe { $atomic::from_ptr(p) }.store(value, SeqCst);
        }
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(p: *mut $ty, value: $ty, _: c_int) -> $ty {
                schedule::access(p as usize, true);
                // SAFETY: the core's own pointer.
                unsafe { $atomic::from_ptr(p) }.$op(value, SeqCst)
            }
        )*
    };
}
atomics!(AtomicU8 u8: load __tsan_atomic8_load __tsan_atomic8_store store);
atomics!(AtomicU16 u16: load __tsan_atomic16_load __tsan_atomic16_store store);
atomics!(AtomicU32 u32: load __tsan_atomic32_load __tsan_atomic32_store store
    __tsan_atomic32_fetch_add fetch_add __tsan_atomic32_exchange swap);
atomics!(AtomicU64 u64: load __tsan_atomic64_load __tsan_atomic64_store store
    __tsan_atomic64_exchange swap __tsan_atomic64_fetch_add fetch_add __tsan_atomic64_fetch_or fetch_or
    __tsan_atomic64_fetch_and fetch_and);

macro_rules! swaps {
    ($($name:ident $atomic:ident $ty:ty)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(p: *mut $ty, expected: *mut $ty, value: $ty, _: c_int, _: c_int) -> c_int {
            schedule::access(p as usize, true);
            // SAFETY: the core's own pointers; 'expected' is on its stack.
            unsafe {
                match $atomic::from_ptr(p).compare_exchange(*expected, value, SeqCst, SeqCst) {
                    Ok(_) => 1,
                    Err(now) => {
                        *expected = now;
                        0
                    }
                }
            }
        }
    )* };
}
swaps! {
    __tsan_atomic32_compare_exchange_strong AtomicU32 u32
    __tsan_atomic64_compare_exchange_strong AtomicU64 u64
}

#[unsafe(no_mangle)]
extern "C" fn recorded_memcpy(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void {
    schedule::access(to as usize, true);
    schedule::access(from as usize, false);
    // SAFETY: as the caller of memcpy promises.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), len) };
    to
}

#[unsafe(no_mangle)]
extern "C" fn recorded_memset(to: *mut c_void, byte: c_int, len: usize) -> *mut c_void {
    schedule::access(to as usize, true);
    // SAFETY: as the caller of memset promises.
    unsafe { std::ptr::write_bytes(to.cast::<u8>(), byte as u8, len) };
    to
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_alloc(bytes: u64) -> *mut c_void {
    if let (Some(left), true) = (MEMORY.get().checked_sub(1), NO_MEMORY.get() > 0) {
        MEMORY.set(left);
    } else if let Some(left) = NO_MEMORY.get().checked_sub(1) {
        NO_MEMORY.set(left);
        return std::ptr::null_mut();
    }
    // SAFETY: any size will do.
    unsafe { libc::calloc(1, bytes as usize) }
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_free(p: *mut c_void) {
    // SAFETY: from tfs_os_alloc, once.
    unsafe { libc::free(p) }
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_yield() {
    schedule::yielded();
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_relax() {
    schedule::wait(0);
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_wait(_: usize, round: u32) {
    schedule::wait(u64::from(round.min(200)) * 10_000);
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_sleep(_: usize, _: usize, _: u32, ns: u64, killable: bool) -> bool {
    schedule::wait(ns);
    killable && KILLED.get()
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_killed(_fs: usize) -> bool {
    KILLED.get()
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_clock() -> u64 {
    schedule::clock()
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_now() -> i64 {
    1
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_cpu() -> u32 {
    schedule::thread() as u32
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_damage(_: usize, what: *const c_char, a: u64, b: u64) {
    // SAFETY: static text of the core.
    let what = unsafe { CStr::from_ptr(what) };
    schedule::damage(format!("{} ({a:#x}, {b:#x})", what.to_string_lossy()));
}
