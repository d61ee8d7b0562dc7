// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver API. Each module holds the behaviour of one subject as plain functions that return a CUresult as their error; `exports` names them for C.
//!
//! - `device`: what the device says of itself
//! - `context`: the primary context, the stack of each thread, the sticky error
//! - `memory`: allocations, copies, what a pointer is
//! - `module`: images, libraries, functions, kernels
//! - `linker`: several inputs to one image
//! - `launch`: a kernel with its arguments
//! - `work`: what a stream carries out, and what a graph's node is
//! - `stream`: a queue and a thread for each; `event`; `graph`: capture, nodes, launches
//! - `find`: cuGetProcAddress and cuGetExportTable
//! - `registry`: handles

pub mod context;
pub mod device;
pub mod event;
pub mod exports;
pub mod find;
pub mod graph;
pub mod launch;
pub mod linker;
pub mod memory;
pub mod module;
pub mod registry;
pub mod stream;
pub mod work;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A CUresult other than CUDA_SUCCESS.
pub type Code = i32;
pub type Result<T = ()> = std::result::Result<T, Code>;
/// An opaque pointer of the API.
pub type Handle = usize;

pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const DEINITIALIZED: Code = 4;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_IMAGE: Code = 200;
pub const INVALID_CONTEXT: Code = 201;
pub const NO_BINARY_FOR_GPU: Code = 209;
pub const INVALID_PTX: Code = 218;
pub const FILE_NOT_FOUND: Code = 301;
pub const INVALID_HANDLE: Code = 400;
pub const ILLEGAL_STATE: Code = 401;
pub const NOT_FOUND: Code = 500;
pub const NOT_READY: Code = 600;
pub const ILLEGAL_ADDRESS: Code = 700;
pub const ASSERT: Code = 710;
pub const ALREADY_REGISTERED: Code = 712;
pub const NOT_REGISTERED: Code = 713;
pub const STACK_ERROR: Code = 714;
pub const MISALIGNED_ADDRESS: Code = 716;
pub const LAUNCH_FAILED: Code = 719;
pub const NOT_SUPPORTED: Code = 801;
pub const CAPTURE_UNSUPPORTED: Code = 900;
pub const CAPTURE_UNMATCHED: Code = 903;
pub const CAPTURE_UNJOINED: Code = 904;
pub const GRAPH_UPDATE_FAILURE: Code = 910;
pub const UNKNOWN: Code = 999;

/// Poisoned or not: what these locks guard is whole between calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes through an output pointer.
pub(crate) fn put<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the API's caller gives room for a T, or null.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes through an output pointer that may be null.
pub(crate) fn offer<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as in `put`.
        unsafe { to.write_unaligned(value) };
    }
}

/// An array that the API's caller describes; empty when the pointer is null.
pub(crate) fn array<T: Copy>(from: *const T, count: usize) -> Vec<T> {
    if from.is_null() {
        return Vec::new();
    }
    // SAFETY: the API's caller says that `count` elements are there.
    (0..count).map(|at| unsafe { from.add(at).read_unaligned() }).collect()
}

/// A string of the API's caller.
pub(crate) fn text(from: *const std::ffi::c_char) -> Result<String> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a C string, as the API says.
    Ok(unsafe { std::ffi::CStr::from_ptr(from) }.to_string_lossy().into_owned())
}
