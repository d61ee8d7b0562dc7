// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes of buffers. Those with pitches and those of images are generated; both rest on [`crate::transfer`].

use crate::deferred::Write;
use crate::rt::{self, Handle, Obj};
use crate::sure;
use crate::transfer::buffer::{Range, check, read, write};
use crate::transfer::{Direction, stream};
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{cl, kind};

/// Looks up and checks what a transfer of a buffer names: its queue, its range, its wait list.
///
/// # Safety
/// `list` is null or points to `n` events.
unsafe fn named(
    queue: Handle,
    buffer: Handle,
    (offset, size): (usize, usize),
    pointer: *const c_void,
    (n, list): (u32, *const Handle),
    direction: Direction,
) -> Result<(Obj, Range, Vec<u64>), i32> {
    let queue = rt::object(queue, kind::QUEUE)?;
    let buffer = rt::object(buffer, kind::MEM)?;
    if pointer.is_null() {
        return Err(cl::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let waits = unsafe { rt::waits(n, list)? };
    let range = Range { buffer, offset: offset as u64, len: size as u64, pointer: pointer as usize };
    check(queue, &range, direction)?;
    Ok((queue, range, waits))
}

pub unsafe extern "C" fn clEnqueueReadBuffer(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    offset: usize,
    size: usize,
    pointer: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        // SAFETY: as the API says.
        let (queue, range, waits) =
            unsafe { named(queue, buffer, (offset, size), pointer, (n, list), Direction::Reads)? };
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_READ_BUFFER)?;
        read(queue, range, blocking != 0, &waits, new.id(), None)?;
        // SAFETY: as the API says.
        unsafe { new.give(event) };
        Ok(())
    })
}

pub unsafe extern "C" fn clEnqueueWriteBuffer(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    offset: usize,
    size: usize,
    pointer: *const c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        // SAFETY: as the API says.
        let (queue, range, waits) =
            unsafe { named(queue, buffer, (offset, size), pointer, (n, list), Direction::Writes)? };
        let (blocking, wanted) = (blocking != 0, !event.is_null());
        let sure = sure::host_range(queue, range.buffer, range.offset, range.len, &waits);
        if sure && blocking && !wanted && waits.is_empty() && stream::suits(queue, &range)? {
            return stream::write(queue, range);
        }
        let new = Write::new(queue, blocking, wanted, cl::COMMAND_WRITE_BUFFER)?;
        write(queue, range, new.waits(), &waits, new.event())?;
        // SAFETY: as the API says.
        unsafe { new.sent(event) }
    })
}
