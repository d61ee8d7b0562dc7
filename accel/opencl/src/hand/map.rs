// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mapping. A buffer whose home is the window is mapped where it lies. Anything else is read into staging (or into the program's own
//! host pointer) when it is mapped, and written back when it is unmapped; events report the commands that the program asked for. A region
//! that doesn't fit into the window is mapped in pages of the process, and travels in pieces.

use crate::rt::{self, Handle, Id, New, Obj};
use crate::state::{As, Backing, Map, Mem, Pages, Region};
use crate::sure;
use crate::transfer::buffer::{Range, read, write};
use crate::transfer::region::Host;
use crate::transfer::slot::{Slot, filled_in_place, read_slot, staging, write_slot};
use crate::transfer::{Direction, check_host_access};
use std::ffi::c_void;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::image;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

/// Flags of a mapping whose bytes go to the device when it is unmapped.
const WRITES: u64 = cl::MAP_WRITE | cl::MAP_WRITE_INVALIDATE_REGION;
const FLAGS: u64 = cl::MAP_READ | WRITES;

/// Flags that a driver refuses: unknown ones, or invalidation together with reading or writing.
fn flags_ok(mem: &Mem, flags: u64) -> Result<(), i32> {
    let invalidates = flags & cl::MAP_WRITE_INVALIDATE_REGION != 0;
    if flags & !FLAGS != 0 || invalidates && flags & (cl::MAP_READ | cl::MAP_WRITE) != 0 {
        return Err(cl::INVALID_VALUE);
    }
    if flags & cl::MAP_READ != 0 {
        check_host_access(mem, Direction::Reads)?;
    }
    if flags & WRITES != 0 {
        check_host_access(mem, Direction::Writes)?;
    }
    Ok(())
}

/// A command of a mapping: the queue, the object, the commands to wait for, and the event.
struct Command {
    queue: Obj,
    object: Obj,
    mem: &'static Mem,
    blocking: bool,
    waits: Vec<u64>,
    new: New,
}

impl Command {
    /// Reads a region of an image into a slot.
    fn read_image(&self, origin: [u64; 3], region: [u64; 3], slot: &Slot) -> Result<(), i32> {
        let record = wire::EnqueueReadImage {
            command_queue: self.queue.id(),
            image: self.object.id(),
            blocking_read: u32::from(self.blocking),
            origin,
            region,
            data: slot.data,
            ticket: slot.ticket,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::call(&record).map(drop)
    }

    /// Writes a slot to a region of an image.
    fn write_image(&self, origin: [u64; 3], region: [u64; 3], slot: &Slot) -> Result<(), i32> {
        let record = wire::EnqueueWriteImage {
            command_queue: self.queue.id(),
            image: self.object.id(),
            blocking_write: 0,
            origin,
            region,
            data: slot.data,
            ticket: slot.ticket,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::call(&record).map(drop)
    }

    /// Reads a range of a buffer into a slot.
    fn read_buffer(&self, offset: u64, size: u64, slot: &Slot) -> Result<(), i32> {
        let record = wire::EnqueueReadBuffer {
            command_queue: self.queue.id(),
            buffer: self.object.id(),
            blocking_read: u32::from(self.blocking),
            offset,
            size,
            data: slot.data,
            ticket: slot.ticket,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::send(&record, self.may_post(offset, size))
    }

    /// Writes a slot to a range of a buffer: posted, as the range was mapped.
    fn write_buffer(&self, offset: u64, size: u64, slot: &Slot) -> Result<(), i32> {
        let record = wire::EnqueueWriteBuffer {
            command_queue: self.queue.id(),
            buffer: self.object.id(),
            blocking_write: 0,
            offset,
            size,
            data: slot.data,
            ticket: slot.ticket,
            inline: &[],
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::send(&record, true)
    }

    /// Returns whether a range can be mapped without an answer of the server.
    fn may_post(&self, offset: u64, size: u64) -> bool {
        !self.blocking && sure::host_range(self.queue, self.object, offset, size, &self.waits)
    }

    /// Maps a range of a buffer where it lies in the window.
    fn map_home(&self, home: u64, offset: u64, size: u64, flags: u64) -> Result<(usize, Backing), i32> {
        let window = &rt::connection()?.window;
        let seen = window.at(home + offset, size).map_err(|_| cl::MAP_FAILURE)? as usize;
        let host_ptr = self.mem.host_ptr;
        let record = wire::EnqueueMapHome {
            queue: self.queue.id(),
            buffer: self.object.id(),
            flags,
            blocking: u32::from(self.blocking),
            offset,
            size,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::send(&record, self.may_post(offset, size))?;
        Ok((if host_ptr == 0 { seen } else { host_ptr + offset as usize }, Backing::Home))
    }

    /// Maps a range of a buffer in staging. None: there is no room.
    fn map_staged(&self, offset: u64, size: u64) -> Result<Option<(usize, Backing)>, i32> {
        let Ok((at, pointer)) = self.staging(size) else { return Ok(None) };
        let slot = filled_in_place(rt::connection()?, at);
        or_give_back(at, size, self.read_buffer(offset, size, &slot))?;
        Ok(Some((pointer, Backing::Staging(at, size))))
    }

    /// Maps a range of a buffer in pages of this process, or in the program's own memory.
    fn map_copied(&self, offset: u64, size: u64) -> Result<(usize, Backing), i32> {
        let pages = match self.mem.host_ptr {
            0 => Some(Pages::new(size).ok_or(cl::MAP_FAILURE)?),
            _ => None,
        };
        let pointer = pages.as_ref().map_or(self.mem.host_ptr + offset as usize, |p| p.pointer());
        let range = Range { buffer: self.object, offset, len: size, pointer };
        read(self.queue, range, self.blocking, &self.waits, self.new.id(), pages.as_ref())?;
        Ok((pointer, pages.map_or(Backing::Program, Backing::Pages)))
    }

    /// Maps a region of an image: in the program's own memory if it gave some, in staging otherwise.
    fn map_image(&self, origin: [u64; 3], region: [u64; 3], host: Host) -> Result<(usize, Backing), i32> {
        if self.mem.host_ptr != 0 {
            self.read_image(origin, region, &read_slot(self.queue, host)?)?;
            return Ok((host.pointer, Backing::Program));
        }
        let (at, pointer) = self.staging(host.len())?;
        let slot = filled_in_place(rt::connection()?, at);
        or_give_back(at, host.len(), self.read_image(origin, region, &slot))?;
        Ok((pointer, Backing::Staging(at, host.len())))
    }

    /// Takes staging that the program sees; its offset, and its address.
    fn staging(&self, len: u64) -> Result<(u64, usize), i32> {
        let at = staging(self.queue, len, Place::Aligned(1)).map_err(|_| cl::MAP_FAILURE)?;
        let seen = rt::connection()?.window.at(at, len).map_err(|_| cl::MAP_FAILURE)?;
        Ok((at, seen as usize))
    }

    /// Notes what is mapped, and gives the program its event and the pointer.
    ///
    /// # Safety
    /// `event` is null or points to room for a handle.
    unsafe fn mapped(self, map: Map, event: *mut Handle) -> Result<*mut c_void, i32> {
        let pointer = map.pointer as *mut c_void;
        self.mem.maps.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?.push(map);
        // SAFETY: as the caller promises.
        unsafe { self.new.give(event) };
        Ok(pointer)
    }

    /// Ends a mapping of a buffer at home in the window.
    fn unmap_home(&self, offset: u64) -> Result<(), i32> {
        let record = wire::EnqueueUnmapHome {
            queue: self.queue.id(),
            buffer: self.object.id(),
            offset,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::call(&record).map(drop)
    }

    /// Ends a mapping that the program only read: nothing goes to the device. Staging is free when the commands before have ended.
    fn unmap_read(&self, backing: &Backing) -> Result<(), i32> {
        let connection = rt::connection()?;
        let ticket = match *backing {
            Backing::Staging(at, len) => connection.ticket(Box::new(move |c, _| c.give_staging(at, len))),
            _ => 0,
        };
        let record = wire::EnqueueHost {
            queue: self.queue.id(),
            ticket,
            waits: (&self.waits).into(),
            event: self.new.id(),
        };
        rt::send(&record, true)
    }

    /// Sends staging that the program may have written to the device.
    fn unmap_staged(&self, at: u64, len: u64, region: Region) -> Result<(), i32> {
        let connection = rt::connection()?;
        rt::lost(connection.push_window(at, len))?;
        let ticket = connection.ticket(Box::new(move |c, _| c.give_staging(at, len)));
        let slot = Slot { data: at, ticket };
        match region {
            Region::Bytes(offset, size) => self.write_buffer(offset, size, &slot),
            Region::Pixels(origin, region) => self.write_image(origin, region, &slot),
        }
    }

    /// Sends memory of the process that the program may have written to the device.
    fn unmap_copied(&self, map: &Map) -> Result<(), i32> {
        match map.region {
            Region::Bytes(offset, len) => {
                let range = Range { buffer: self.object, offset, len, pointer: map.pointer };
                write(self.queue, range, false, &self.waits, self.new.id())
            }
            Region::Pixels(origin, region) => {
                let (row, slice) = (map.pitches.0 as u64, map.pitches.1 as u64);
                let host = Host::pixels(map.pointer, self.mem, region, row, slice);
                self.write_image(origin, region, &write_slot(self.queue, &host)?)
            }
        }
    }
}

/// Gives staging back if the command that should fill it was refused.
fn or_give_back(at: u64, len: u64, sent: Result<(), i32>) -> Result<(), i32> {
    sent.inspect_err(|_| rt::connection().into_iter().for_each(|c| c.give_staging(at, len)))
}

/// Maps a part of a buffer.
pub unsafe extern "C" fn clEnqueueMapBuffer(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    flags: u64,
    offset: usize,
    size: usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
    errcode: *mut i32,
) -> *mut c_void {
    let map = || {
        let queue = rt::object(queue, kind::QUEUE)?;
        let object = rt::object(buffer, kind::MEM)?;
        let mem = object.mem()?;
        if mem.is_image() {
            return Err(cl::INVALID_MEM_OBJECT);
        }
        rt::same_context(queue, object)?;
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let (offset, size) = (offset as u64, size as u64);
        if size == 0 || offset.checked_add(size).is_none_or(|end| end > mem.size) {
            return Err(cl::INVALID_VALUE);
        }
        flags_ok(mem, flags)?;
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_MAP_BUFFER)?;
        let command = Command { queue, object, mem, blocking: blocking != 0, waits, new };
        let (pointer, backing) = match (mem.home, mem.host_ptr) {
            (Some(home), _) => command.map_home(home, offset, size, flags)?,
            (None, 0) => match command.map_staged(offset, size)? {
                Some(mapped) => mapped,
                None => command.map_copied(offset, size)?,
            },
            _ => command.map_copied(offset, size)?,
        };
        let region = Region::Bytes(offset, size);
        // SAFETY: as the API says.
        unsafe { command.mapped(Map { pointer, backing, region, flags, pitches: (0, 0) }, event) }
    };
    // SAFETY: as the API says.
    unsafe { rt::create(errcode, map) }
}

/// The pixels of a region as a program sees them that maps it: with the pitches of its own memory, or without gaps.
fn seen(mem: &Mem, origin: [u64; 3], region: [u64; 3]) -> Host {
    if mem.host_ptr == 0 {
        return Host::pixels(0, mem, region, 0, 0);
    }
    let (row_pitch, slice_pitch) = (mem.pitches.0 as u64, mem.pitches.1 as u64);
    let (y, z) = match image::is_one_dimensional(mem.object_type) {
        true => (0, origin[1]),
        false => (origin[1], origin[2]),
    };
    let start = z * slice_pitch + y * row_pitch + origin[0] * mem.pixel;
    Host::pixels(mem.host_ptr + start as usize, mem, region, row_pitch, slice_pitch)
}

/// Maps a part of an image.
pub unsafe extern "C" fn clEnqueueMapImage(
    queue: Handle,
    image: Handle,
    blocking: u32,
    flags: u64,
    origin: *const usize,
    region: *const usize,
    row_pitch: *mut usize,
    slice_pitch: *mut usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
    errcode: *mut i32,
) -> *mut c_void {
    let map = || {
        let queue = rt::object(queue, kind::QUEUE)?;
        let object = rt::object(image, kind::MEM)?;
        let mem = object.mem()?;
        rt::same_context(queue, object)?;
        if !mem.is_image() {
            return Err(cl::INVALID_MEM_OBJECT);
        }
        flags_ok(mem, flags)?;
        let layered = image::is_layered(mem.object_type);
        if row_pitch.is_null() || layered && slice_pitch.is_null() {
            return Err(cl::INVALID_VALUE);
        }
        // SAFETY: as the API says.
        let (waits, origin, region) =
            unsafe { (rt::waits(n, list)?, rt::triple(origin)?, rt::triple(region)?) };
        if !image::contains(mem.extent, origin, region) {
            return Err(cl::INVALID_VALUE);
        }
        let host = seen(mem, origin, region);
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_MAP_IMAGE)?;
        let command = Command { queue, object, mem, blocking: blocking != 0, waits, new };
        let (pointer, backing) = command.map_image(origin, region, host)?;
        let pitches = (host.row_pitch as usize, host.slice_pitch as usize);
        let region = Region::Pixels(origin, region);
        // SAFETY: as the API says.
        unsafe {
            let pointer = command.mapped(Map { pointer, backing, region, flags, pitches }, event)?;
            rt::write(row_pitch, pitches.0);
            rt::write(slice_pitch, if layered { pitches.1 } else { 0 });
            Ok(pointer)
        }
    };
    // SAFETY: as the API says.
    unsafe { rt::create(errcode, map) }
}

/// Takes a mapping out of an object's list.
fn take(mem: &Mem, pointer: usize) -> Result<Map, i32> {
    let mut maps = mem.maps.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
    let at = maps.iter().position(|m| m.pointer == pointer).ok_or(cl::INVALID_VALUE)?;
    Ok(maps.swap_remove(at))
}

/// Unmaps a region. If the program may have written to it, its bytes go to the device.
pub unsafe extern "C" fn clEnqueueUnmapMemObject(
    queue: Handle,
    object: Handle,
    pointer: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let object = rt::object(object, kind::MEM)?;
        let mem = object.mem()?;
        rt::same_context(queue, object)?;
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let map = take(mem, pointer as usize)?;
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_UNMAP_MEM_OBJECT)?;
        let command = Command { queue, object, mem, blocking: false, waits, new };
        match (&map.backing, map.region) {
            (Backing::Home, Region::Bytes(offset, _)) => command.unmap_home(offset)?,
            (backing, _) if map.flags & WRITES == 0 => command.unmap_read(backing)?,
            (Backing::Staging(at, len), region) => command.unmap_staged(*at, *len, region)?,
            _ => command.unmap_copied(&map)?,
        }
        // SAFETY: as the API says.
        unsafe { command.new.give(event) };
        Ok(())
    })
}
