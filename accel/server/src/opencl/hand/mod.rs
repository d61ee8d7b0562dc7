// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handlers of OpenCL that are written by hand: where data goes through the window, where callbacks come back, where one request
//! creates several objects. The files are the client's of the same names.
//!
//! - [`platform`]: platforms and devices, and what never changes about them.
//! - [`context`]: contexts and queues.
//! - [`memory`]: buffers, images and pipes.
//! - [`program`]: programs, from source to build.
//! - [`kernel`]: kernels and their arguments.
//! - [`event`]: events and waiting.
//! - [`svm`]: shared virtual memory.
//! - [`transfer`]: commands that the generator has no class for: writes in the record, streams, mapping, launches.
//! - [`notify`]: callbacks of the driver.

/// A function of the driver, or 'not supported'.
macro_rules! native {
    ($cx:expr, $name:ident) => {
        $cx.native().$name.ok_or(wire::UNSUPPORTED)?
    };
}

mod context;
mod event;
mod kernel;
mod memory;
mod notify;
mod platform;
mod program;
mod svm;
mod transfer;

pub(super) use context::*;
pub(super) use event::*;
pub(super) use kernel::*;
pub(super) use memory::*;
pub(super) use platform::*;
pub(super) use program::*;
pub(super) use svm::{
    Svm, alloc as svm_alloc, free as svm_free, memcpy as enqueue_svm_memcpy,
    migrate as enqueue_svm_migrate_mem, set_exec_info as set_kernel_exec_info,
};
pub(super) use transfer::*;

use super::Handle;
use std::ffi::c_void;
use std::ptr::null_mut;

type Done = Result<(), i32>;
type Query<'a> = &'a dyn Fn(usize, *mut c_void, *mut usize) -> i32;

/// The value of a property: status and bytes.
pub(super) fn value(ask: Query<'_>) -> (i32, Vec<u8>) {
    let mut size = 0;
    let status = ask(0, null_mut(), &mut size);
    if status != 0 || size > 1 << 20 {
        return (status, Vec::new());
    }
    let mut bytes = vec![0; size];
    let status = if size == 0 { 0 } else { ask(size, bytes.as_mut_ptr().cast(), &mut size) };
    (status, bytes)
}

/// Handles of one kind that a function lists.
pub(super) fn listed(ask: impl Fn(u32, *mut Handle, *mut u32) -> i32) -> Result<Vec<Handle>, i32> {
    let mut n = 0;
    let status = ask(0, null_mut(), &mut n);
    if status != 0 {
        return Err(status);
    }
    let mut handles = vec![null_mut(); n.min(4096) as usize];
    if !handles.is_empty() {
        let status = ask(handles.len() as u32, handles.as_mut_ptr(), null_mut());
        if status != 0 {
            return Err(status);
        }
    }
    Ok(handles)
}
