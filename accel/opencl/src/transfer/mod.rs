// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transfers between a program's memory and memory objects, for the generated stubs and for the functions by hand.
//!
//! Memory in the window is passed by its offset: no copy. Other memory goes through a staging range of the window. A write has taken the
//! program's data when it returns, so it never waits; a blocking read waits for its last piece.
//!
//! - [`region`]: the bytes of a transfer in the program's memory.
//! - [`slot`]: the same bytes in the window.
//! - [`buffer`]: ranges of buffers; long ones are cut into pieces.
//! - [`stream`]: long ones that the program waits for.

pub mod buffer;
pub mod region;
pub mod slot;
pub mod stream;

use crate::deferred::Write;
use crate::rt::{self, Handle, Obj};
use crate::state::{As, Mem};
use region::Host;
use slot::{Slot, read_slot, write_slot};
use tombolo_accel_spec::opencl::{self as wire, cl};
use tombolo_accel_spec::{image, rectangle as rect};

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the program.
    Reads,
    /// From the program to the device.
    Writes,
}

/// Refuses what the program ruled out when it created the object (CL_MEM_HOST_…). The driver doesn't know of it: the server reads what
/// is mapped for writing only.
pub fn check_host_access(mem: &Mem, direction: Direction) -> Result<(), i32> {
    let other = match direction {
        Direction::Reads => cl::MEM_HOST_WRITE_ONLY,
        Direction::Writes => cl::MEM_HOST_READ_ONLY,
    };
    if mem.flags & (cl::MEM_HOST_NO_ACCESS | other) == 0 { Ok(()) } else { Err(wire::UNSUPPORTED) }
}

/// Refuses a rectangle that leaves its buffer, before anything is staged.
pub fn check_rect(
    direction: Direction,
    buffer: Obj,
    origin: [u64; 3],
    region: [u64; 3],
    row_pitch: u64,
    slice_pitch: u64,
) -> Result<(), i32> {
    let mem = buffer.mem()?;
    if mem.is_image() {
        return Err(cl::INVALID_MEM_OBJECT);
    }
    check_host_access(mem, direction)?;
    let end = rect::end(origin, region, row_pitch, slice_pitch).ok_or(cl::INVALID_VALUE)?;
    if end <= mem.size { Ok(()) } else { Err(cl::INVALID_VALUE) }
}

/// Refuses a region that leaves its image, before anything is staged.
pub fn check_pixels(direction: Direction, image: Obj, origin: [u64; 3], region: [u64; 3]) -> Result<(), i32> {
    let mem = image.mem()?;
    if !mem.is_image() {
        return Err(cl::INVALID_MEM_OBJECT);
    }
    check_host_access(mem, direction)?;
    if image::contains(mem.extent, origin, region) { Ok(()) } else { Err(cl::INVALID_VALUE) }
}

/// The program's rectangle: origin, region and pitches as the API has them, checked.
pub fn rectangle(
    pointer: usize,
    origin: [u64; 3],
    region: [u64; 3],
    row_pitch: u64,
    slice_pitch: u64,
) -> Result<Host, i32> {
    Host::rectangle(pointer, origin, region, row_pitch, slice_pitch)
        .filter(|_| pointer != 0)
        .ok_or(cl::INVALID_VALUE)
}

/// The program's pixels of a region that lies in the image, with pitches as the API has them.
pub fn pixels(
    pointer: usize,
    image: Obj,
    region: [u64; 3],
    row_pitch: u64,
    slice_pitch: u64,
) -> Result<Host, i32> {
    let host = Host::pixels(pointer, image.mem()?, region, row_pitch, slice_pitch);
    let overlaps = host.slices > 1 && host.slice_pitch < host.row_pitch * host.rows;
    if pointer == 0 || host.row_pitch < host.row || overlaps { Err(cl::INVALID_VALUE) } else { Ok(host) }
}

/// Reads into the program's memory, at once: `send` gets the slot and the event's id. The program gets the event.
///
/// # Safety
/// The program's region is writable until the command has ended; `event` is null or points to room for a handle.
pub unsafe fn read(
    queue: Obj,
    host: Host,
    command: u32,
    event: *mut Handle,
    send: impl FnOnce(Slot, u64) -> Result<(), i32>,
) -> Result<(), i32> {
    let new = rt::new_event(queue, !event.is_null(), command)?;
    send(read_slot(queue, host)?, new.id())?;
    // SAFETY: as the caller promises.
    unsafe { new.give(event) };
    Ok(())
}

/// Writes the program's memory, at once: `send` gets the slot, the event's id, and whether the driver blocks. The program gets the event.
///
/// # Safety
/// The program's region is readable; `event` is null or points to room for a handle.
pub unsafe fn write(
    blocking: bool,
    queue: Obj,
    host: Host,
    command: u32,
    event: *mut Handle,
    send: impl FnOnce(Slot, u64, u32) -> Result<(), i32>,
) -> Result<(), i32> {
    let new = Write::new(queue, blocking, !event.is_null(), command)?;
    send(write_slot(queue, &host)?, new.event(), u32::from(new.waits()))?;
    // SAFETY: as the caller promises.
    unsafe { new.sent(event) }
}
