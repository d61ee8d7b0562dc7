// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes of rectangles: parts of buffers with pitches, and of images. Their bytes pass through the window at once.

use super::memory::{host_access, is_one_dimensional};
use super::region::Host;
use super::transfer::{finish, read_slot, write_slot};
use crate::deferred::Write;
use crate::rt::{self, Handle, Id, Obj, code};
use crate::state::As;
use crate::sure;
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{self as wire, kind};

/// A program's rectangle: origin, region and pitches as the API has them, checked.
unsafe fn rectangle(
    ptr: usize,
    origin: *const usize,
    region: *const usize,
    row_pitch: usize,
    slice_pitch: usize,
) -> Result<Host, i32> {
    // SAFETY: three numbers each, as the caller promises.
    let (origin, region) = unsafe { (rt::triple(origin)?, rt::triple(region)?) };
    if ptr == 0 || region.contains(&0) {
        return Err(code::VALUE);
    }
    let row_pitch = if row_pitch == 0 { region[0] } else { row_pitch as u64 };
    let slice = region[1].checked_mul(row_pitch).ok_or(code::VALUE)?;
    let slice_pitch = if slice_pitch == 0 { slice } else { slice_pitch as u64 };
    if row_pitch < region[0] || slice_pitch < slice || slice_pitch % row_pitch != 0 {
        return Err(code::VALUE);
    }
    let skip = |n: u64, by: u64| n.checked_mul(by).ok_or(code::VALUE);
    let start = skip(origin[2], slice_pitch)?
        .checked_add(skip(origin[1], row_pitch)?)
        .and_then(|s| s.checked_add(origin[0]))
        .ok_or(code::VALUE)?;
    skip(skip(region[0], region[1])?, region[2])?;
    Ok(Host {
        pointer: ptr + start as usize,
        row: region[0],
        rows: region[1],
        slices: region[2],
        row_pitch,
        slice_pitch,
    })
}

pub unsafe extern "C" fn clEnqueueReadBufferRect(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    buffer_origin: *const usize,
    host_origin: *const usize,
    region: *const usize,
    buffer_row_pitch: usize,
    buffer_slice_pitch: usize,
    host_row_pitch: usize,
    host_slice_pitch: usize,
    ptr: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let buffer = rt::object(buffer, kind::MEM)?;
        // SAFETY: as the API says.
        let (waits, host, origin, region) = unsafe {
            (
                rt::waits(n, list)?,
                rectangle(ptr as usize, host_origin, region, host_row_pitch, host_slice_pitch)?,
                rt::triple(buffer_origin)?,
                rt::triple(region)?,
            )
        };
        rectangle_inside(buffer, origin, region, buffer_row_pitch, buffer_slice_pitch, true)?;
        let new = rt::new_event(queue, !event.is_null(), 0x1201)?;
        let slot = read_slot(queue, host)?;
        rt::call(&wire::EnqueueReadBufferRect {
            queue: queue.id(),
            buffer: buffer.id(),
            origin,
            region,
            row_pitch: buffer_row_pitch as u64,
            slice_pitch: buffer_slice_pitch as u64,
            data: slot.data,
            ticket: slot.ticket,
            blocking,
            waits: waits.into(),
            event: new.id(),
        })?;
        // SAFETY: as the API says.
        unsafe { finish(new, event) };
        Ok(())
    })
}

pub unsafe extern "C" fn clEnqueueWriteBufferRect(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    buffer_origin: *const usize,
    host_origin: *const usize,
    region: *const usize,
    buffer_row_pitch: usize,
    buffer_slice_pitch: usize,
    host_row_pitch: usize,
    host_slice_pitch: usize,
    ptr: *const c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let buffer = rt::object(buffer, kind::MEM)?;
        // SAFETY: as the API says.
        let (waits, host, origin, region) = unsafe {
            (
                rt::waits(n, list)?,
                rectangle(ptr as usize, host_origin, region, host_row_pitch, host_slice_pitch)?,
                rt::triple(buffer_origin)?,
                rt::triple(region)?,
            )
        };
        rectangle_inside(buffer, origin, region, buffer_row_pitch, buffer_slice_pitch, false)?;
        let new = Write::new(queue, blocking != 0, !event.is_null(), 0x1202)?;
        let slot = write_slot(queue, &host)?;
        rt::call(&wire::EnqueueWriteBufferRect {
            queue: queue.id(),
            buffer: buffer.id(),
            origin,
            region,
            row_pitch: buffer_row_pitch as u64,
            slice_pitch: buffer_slice_pitch as u64,
            data: slot.data,
            ticket: slot.ticket,
            waits: waits.into(),
            event: new.event(),
        })?;
        // SAFETY: as the API says.
        unsafe { new.sent(event) }
    })
}

/// Refuses a rectangle that leaves the buffer before anything is staged.
fn rectangle_inside(
    buffer: Obj,
    origin: [u64; 3],
    region: [u64; 3],
    row_pitch: usize,
    slice_pitch: usize,
    reads: bool,
) -> Result<(), i32> {
    let mem = buffer.mem()?;
    if super::memory::is_image(mem) {
        return Err(kind::invalid(kind::MEM));
    }
    host_access(mem, reads)?;
    let row = if row_pitch == 0 { region[0] } else { row_pitch as u64 };
    let inside = || {
        let slice = if slice_pitch == 0 { region[1].checked_mul(row)? } else { slice_pitch as u64 };
        let last = origin[2].checked_add(region[2] - 1)?.checked_mul(slice)?;
        let last = origin[1].checked_add(region[1] - 1)?.checked_mul(row)?.checked_add(last)?;
        let end = origin[0].checked_add(region[0])?.checked_add(last)?;
        (end <= mem.size).then_some(())
    };
    inside().ok_or(code::VALUE)
}

/// A program's pixels, with its pitches checked.
pub(crate) unsafe fn pixels(
    image: Obj,
    origin: *const usize,
    region: *const usize,
    row_pitch: usize,
    slice_pitch: usize,
    ptr: usize,
) -> Result<(Host, [u64; 3], [u64; 3]), i32> {
    let mem = image.mem()?;
    if !super::memory::is_image(mem) {
        return Err(kind::invalid(kind::MEM));
    }
    // SAFETY: three numbers each, as the caller promises.
    let (origin, region) = unsafe { (rt::triple(origin)?, rt::triple(region)?) };
    let outside = |i: usize| origin[i].checked_add(region[i]).is_none_or(|end| end > mem.extent[i].max(1));
    if ptr == 0 || region.contains(&0) || (0..3).any(outside) {
        return Err(code::VALUE);
    }
    let row = region[0] * mem.pixel;
    let row_pitch = if row_pitch == 0 { row } else { row_pitch as u64 };
    let one = is_one_dimensional(mem);
    // Layers of a 1D array lie a slice apart.
    let (rows, slices) = if one { (1, region[1]) } else { (region[1], region[2]) };
    let slice_pitch = if slice_pitch == 0 { row_pitch * rows } else { slice_pitch as u64 };
    if row_pitch < row || slice_pitch < row_pitch * rows && slices > 1 {
        return Err(code::VALUE);
    }
    Ok((Host { pointer: ptr, row, rows, slices, row_pitch, slice_pitch }, origin, region))
}

pub unsafe extern "C" fn clEnqueueReadImage(
    queue: Handle,
    image: Handle,
    blocking: u32,
    origin: *const usize,
    region: *const usize,
    row_pitch: usize,
    slice_pitch: usize,
    ptr: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let image = rt::object(image, kind::MEM)?;
        if !sure::same_context(queue, image) {
            return Err(code::CONTEXT);
        }
        // SAFETY: as the API says.
        let (waits, (host, origin, region)) = unsafe {
            (rt::waits(n, list)?, pixels(image, origin, region, row_pitch, slice_pitch, ptr as usize)?)
        };
        host_access(image.mem()?, true)?;
        let new = rt::new_event(queue, !event.is_null(), 0x11f6)?;
        let slot = read_slot(queue, host)?;
        rt::call(&wire::EnqueueReadImage {
            queue: queue.id(),
            image: image.id(),
            origin,
            region,
            data: slot.data,
            ticket: slot.ticket,
            blocking,
            waits: waits.into(),
            event: new.id(),
        })?;
        // SAFETY: as the API says.
        unsafe { finish(new, event) };
        Ok(())
    })
}

pub unsafe extern "C" fn clEnqueueWriteImage(
    queue: Handle,
    image: Handle,
    blocking: u32,
    origin: *const usize,
    region: *const usize,
    row_pitch: usize,
    slice_pitch: usize,
    ptr: *const c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let image = rt::object(image, kind::MEM)?;
        if !sure::same_context(queue, image) {
            return Err(code::CONTEXT);
        }
        // SAFETY: as the API says.
        let (waits, (host, origin, region)) = unsafe {
            (rt::waits(n, list)?, pixels(image, origin, region, row_pitch, slice_pitch, ptr as usize)?)
        };
        host_access(image.mem()?, false)?;
        let new = Write::new(queue, blocking != 0, !event.is_null(), 0x11f7)?;
        let slot = write_slot(queue, &host)?;
        rt::call(&wire::EnqueueWriteImage {
            queue: queue.id(),
            image: image.id(),
            origin,
            region,
            data: slot.data,
            ticket: slot.ticket,
            waits: waits.into(),
            event: new.event(),
        })?;
        // SAFETY: as the API says.
        unsafe { new.sent(event) }
    })
}
