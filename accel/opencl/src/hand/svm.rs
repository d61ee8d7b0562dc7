// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared virtual memory, coarse-grained. A range has the same addresses in the program and in the server, so pointers inside of it
//! hold on both sides; mapping and unmapping copies what the program sees from and to the device.

use crate::rt::{self, Handle, Id, code};
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{self as wire, kind};

/// Memory at addresses that both sides have free. Null: there is none.
pub unsafe extern "C" fn clSVMAlloc(context: Handle, _: u64, _: usize, _: u32) -> *mut c_void {
    let _known = rt::object(context, kind::CONTEXT).map(|c| c.id());
    std::ptr::null_mut()
}

/// Frees shared memory.
pub unsafe extern "C" fn clSVMFree(_context: Handle, _pointer: *mut c_void) -> i32 {
    wire::SUCCESS
}

fn none(queue: Handle) -> i32 {
    rt::status(|| rt::object(queue, kind::QUEUE).and(Err(wire::UNSUPPORTED)))
}

/// Frees shared memory in a queue.
pub unsafe extern "C" fn clEnqueueSVMFree(queue: Handle) -> i32 {
    none(queue)
}
/// Copies.
pub unsafe extern "C" fn clEnqueueSVMMemcpy(queue: Handle) -> i32 {
    none(queue)
}
/// Fills.
pub unsafe extern "C" fn clEnqueueSVMMemFill(queue: Handle) -> i32 {
    none(queue)
}
/// Maps.
pub unsafe extern "C" fn clEnqueueSVMMap(queue: Handle) -> i32 {
    none(queue)
}
/// Unmaps.
pub unsafe extern "C" fn clEnqueueSVMUnmap(queue: Handle) -> i32 {
    none(queue)
}
/// Migrates.
pub unsafe extern "C" fn clEnqueueSVMMigrateMem(queue: Handle) -> i32 {
    none(queue)
}
/// An argument that is a shared address.
pub unsafe extern "C" fn clSetKernelArgSVMPointer(kernel: Handle, _: u32, _: *const c_void) -> i32 {
    rt::status(|| rt::object(kernel, kind::KERNEL).and(Err(code::VALUE)))
}
