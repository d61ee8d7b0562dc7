// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The allocator of programs that others wait for: an allocation that fails ends the process at once.
//!
//! The standard library ends a process that is out of memory, too, but with `RUST_BACKTRACE` set it first prints a backtrace. That takes locks and
//! allocates. A thread that finds no memory there waits for ever, while it holds its locks in a zone, and other members wait for a process that
//! lives. A process that has ended is recovered from.
//!
//! A program says in its root module:
//! ```
//! #[global_allocator]
//! static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;
//! ```
//! [`zeroed`] makes a buffer that the program can do without.

#![deny(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

/// No part of a backtrace is as large. What the standard library reads into memory may be, where a file says that it is: then the read fails.
const HUGE: usize = 1 << 30;

thread_local! {
    /// The caller of this thread's allocation handles its failure.
    static MAY_FAIL: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator; where that returns no memory, the process ends by SIGABRT. An allocation of 1 GiB or more fails as the system's does.
#[derive(Debug)]
pub struct Heap;

// SAFETY: each call is passed on as it is; a null pointer is replaced by the end of the process.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.realloc(old, layout, size) }, size)
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn checked(memory: *mut u8, size: usize) -> *mut u8 {
    if memory.is_null() { failed(size) } else { memory }
}

#[cold]
#[inline(never)]
fn failed(size: usize) -> *mut u8 {
    if MAY_FAIL.get() || size >= HUGE {
        return std::ptr::null_mut();
    }
    // This takes no lock and allocates nothing, as std::io::stderr would.
    let mut line = [0; 80];
    let mut rest = &mut line[..];
    // It fits.
    let _ = writeln!(rest, "tombolo: no memory for {size} bytes");
    let len = 80 - rest.len();
    // SAFETY: the line is readable for its length.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len) };
    std::process::abort();
}

/// Returns `len` bytes of zeroes, or none if there is no memory for them.
#[must_use]
pub fn zeroed(len: usize) -> Option<Vec<u8>> {
    if len == 0 {
        return Some(Vec::new());
    }
    let layout = Layout::array::<u8>(len).ok()?;
    MAY_FAIL.set(true);
    // SAFETY: the layout has a size.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    MAY_FAIL.set(false);
    // SAFETY: so many bytes of the global allocator's, all initialized, that nothing else refers to.
    (!memory.is_null()).then(|| unsafe { Vec::from_raw_parts(memory, len, len) })
}
