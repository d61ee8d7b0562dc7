// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mapping. A buffer whose home is the window is mapped where it lies. Anything else is read into staging (or into the program's own
//! host pointer) when it is mapped, and written back when it is unmapped; events report the commands that the program asked for. What the
//! window has no room for is mapped in pages of the process, and travels in pieces.

use super::memory::{host_access, is_image};
use super::rectangle::pixels;
use super::region::Host;
use super::transfer::{Range, Slot, read, read_slot, staging, write, write_slot};
use crate::rt::{self, Handle, Id, New, Obj, code};
use crate::state::{As, Map, Mem, Pages, Region};
use crate::sure;
use std::ffi::c_void;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, kind};

const READ: u64 = 1;
const WRITE: u64 = 2;
const INVALIDATE: u64 = 4;
const MAP_BUFFER: u32 = 0x11fb;
const MAP_IMAGE: u32 = 0x11fc;
const UNMAP: u32 = 0x11fd;

/// Flags that a driver refuses: unknown ones, or invalidation together with reading or writing.
fn flags_ok(mem: &Mem, flags: u64) -> Result<(), i32> {
    if flags & !(READ | WRITE | INVALIDATE) != 0 || flags & INVALIDATE != 0 && flags & (READ | WRITE) != 0 {
        return Err(code::VALUE);
    }
    if flags & READ != 0 {
        host_access(mem, true)?;
    }
    if flags & (WRITE | INVALIDATE) != 0 {
        host_access(mem, false)?;
    }
    Ok(())
}

/// What a map reads, and where to.
enum Target {
    /// Memory of the program: it is filled when the ticket is redeemed.
    Program(Host),
    /// Staging, which the program sees.
    Staging(u64, u64),
}

/// Chooses where the program sees a region, and gives the pointer.
fn target(queue: Obj, own: Option<Host>, len: u64) -> Result<(Target, usize), i32> {
    match own {
        Some(host) => Ok((Target::Program(host), host.pointer)),
        None => {
            let at = staging(queue, len, Place::Aligned(1)).map_err(|_| code::MAP_FAILURE)?;
            let window = &rt::connection()?.window;
            let pointer = window.at(at, len).map_err(|_| code::MAP_FAILURE)? as usize;
            Ok((Target::Staging(at, len), pointer))
        }
    }
}

impl Target {
    fn slot(&self, queue: Obj) -> Result<Slot, i32> {
        match self {
            Target::Program(host) => read_slot(queue, *host),
            Target::Staging(at, _) => {
                let connection = rt::connection()?;
                let ticket =
                    if connection.shares_window { 0 } else { connection.ticket(Box::new(|_, _| ())) };
                Ok(Slot { data: *at, ticket })
            }
        }
    }
    fn staging(&self) -> Option<(u64, u64)> {
        match self {
            Target::Program(_) => None,
            Target::Staging(at, len) => Some((*at, *len)),
        }
    }
    fn give_back(&self) {
        if let (Some((at, len)), Ok(c)) = (self.staging(), rt::connection()) {
            c.give_staging(at, len);
        }
    }
}

fn remember(mem: &Mem, map: Map) -> Result<(), i32> {
    mem.maps.lock().map_err(|_| code::HOST_MEMORY)?.push(map);
    Ok(())
}

unsafe fn finish(new: New, event: *mut Handle) {
    if new.object().is_some() {
        // SAFETY: as the API says.
        unsafe { rt::write(event, new.publish()) };
    }
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
        let buffer = rt::object(buffer, kind::MEM)?;
        let mem = buffer.mem()?;
        if is_image(mem) {
            return Err(kind::invalid(kind::MEM));
        }
        if !sure::same_context(queue, buffer) {
            return Err(code::CONTEXT);
        }
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let (offset, size) = (offset as u64, size as u64);
        if size == 0 || offset.checked_add(size).is_none_or(|end| end > mem.size) {
            return Err(code::VALUE);
        }
        flags_ok(mem, flags)?;
        let new = rt::new_event(queue, !event.is_null(), MAP_BUFFER)?;
        let post = blocking == 0 && sure::host_range(queue, buffer, offset, size, &waits);
        if let Some(home) = mem.home {
            let seen = rt::connection()?.window.at(home + offset, size).map_err(|_| code::MAP_FAILURE)?;
            let pointer = if mem.host_ptr == 0 { seen as usize } else { mem.host_ptr + offset as usize };
            let record = wire::EnqueueMapHome {
                queue: queue.id(),
                buffer: buffer.id(),
                flags: flags | u64::from(blocking != 0) << 63,
                offset,
                size,
                waits: waits.into(),
                event: new.id(),
            };
            if post {
                rt::lost(rt::connection()?.post(&record))?
            } else {
                rt::call(&record).map(|_| ())?
            }
            remember(
                mem,
                Map {
                    pointer,
                    staging: None,
                    pages: None,
                    region: Region::Bytes(offset, size),
                    flags,
                    pitches: (0, 0),
                },
            )?;
            // SAFETY: as the API says.
            unsafe { finish(new, event) };
            return Ok(pointer as *mut c_void);
        }
        let region = Region::Bytes(offset, size);
        let staged = if mem.host_ptr == 0 { target(queue, None, size).ok() } else { None };
        let map = if let Some((target, pointer)) = staged {
            let sent = target.slot(queue).and_then(|slot| {
                let record = wire::EnqueueReadBuffer {
                    queue: queue.id(),
                    buffer: buffer.id(),
                    offset,
                    size,
                    data: slot.data,
                    ticket: slot.ticket,
                    blocking: u32::from(blocking != 0),
                    waits: waits.into(),
                    event: new.id(),
                };
                if post { rt::lost(rt::connection()?.post(&record)) } else { rt::call(&record).map(|_| ()) }
            });
            sent.inspect_err(|_| target.give_back())?;
            Map { pointer, staging: target.staging(), pages: None, region, flags, pitches: (0, 0) }
        } else {
            let pages =
                if mem.host_ptr == 0 { Some(Pages::new(size).ok_or(code::MAP_FAILURE)?) } else { None };
            let pointer = pages.as_ref().map_or(mem.host_ptr + offset as usize, |p| p.pointer());
            let range = Range { buffer, offset, len: size, pointer };
            read(queue, range, blocking != 0, &waits, new.id(), pages.as_ref())?;
            Map { pointer, staging: None, pages, region, flags, pitches: (0, 0) }
        };
        let pointer = map.pointer;
        remember(mem, map)?;
        // SAFETY: as the API says.
        unsafe { finish(new, event) };
        Ok(pointer as *mut c_void)
    };
    // SAFETY: as the API says.
    unsafe { rt::create(errcode, map) }
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
        let image = rt::object(image, kind::MEM)?;
        let mem = image.mem()?;
        if !sure::same_context(queue, image) {
            return Err(code::CONTEXT);
        }
        if !is_image(mem) {
            return Err(kind::invalid(kind::MEM));
        }
        flags_ok(mem, flags)?;
        let layered = matches!(mem.object_type, 0x10f2 | 0x10f3 | 0x10f5);
        if row_pitch.is_null() || layered && slice_pitch.is_null() {
            return Err(code::VALUE);
        }
        // SAFETY: as the API says.
        let (waits, (mut host, origin, region)) =
            unsafe { (rt::waits(n, list)?, pixels(image, origin, region, 0, 0, 1)?) };
        let own = if mem.host_ptr != 0 {
            (host.row_pitch, host.slice_pitch) = (mem.pitches.0 as u64, mem.pitches.1 as u64);
            let one = super::memory::is_one_dimensional(mem);
            let (y, z) = if one { (0, origin[1]) } else { (origin[1], origin[2]) };
            let start = z * host.slice_pitch + y * host.row_pitch + origin[0] * mem.pixel;
            host.pointer = mem.host_ptr + start as usize;
            Some(host)
        } else {
            None
        };
        let new = rt::new_event(queue, !event.is_null(), MAP_IMAGE)?;
        let (target, pointer) = target(queue, own, host.len())?;
        let sent = target.slot(queue).and_then(|slot| {
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
            })
        });
        sent.inspect_err(|_| target.give_back())?;
        let pitches = (host.row_pitch as usize, host.slice_pitch as usize);
        let region = Region::Pixels(origin, region);
        remember(mem, Map { pointer, staging: target.staging(), pages: None, region, flags, pitches })?;
        // SAFETY: as the API says.
        unsafe {
            rt::write(row_pitch, pitches.0);
            rt::write(slice_pitch, if layered { pitches.1 } else { 0 });
            finish(new, event);
        }
        Ok(pointer as *mut c_void)
    };
    // SAFETY: as the API says.
    unsafe { rt::create(errcode, map) }
}

/// Unmaps a region: what the program may have written goes to the device.
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
        if !sure::same_context(queue, object) {
            return Err(code::CONTEXT);
        }
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let map = {
            let mut maps = mem.maps.lock().map_err(|_| code::HOST_MEMORY)?;
            let at = maps.iter().position(|m| m.pointer == pointer as usize).ok_or(code::VALUE)?;
            maps.swap_remove(at)
        };
        let new = rt::new_event(queue, !event.is_null(), UNMAP)?;
        let connection = rt::connection()?;
        if let (Some(_), Region::Bytes(offset, _)) = (mem.home, map.region) {
            rt::call(&wire::EnqueueUnmapHome {
                queue: queue.id(),
                buffer: object.id(),
                offset,
                waits: waits.into(),
                event: new.id(),
            })?;
            // SAFETY: as the API says.
            unsafe { finish(new, event) };
            return Ok(());
        }
        let written = map.flags & (WRITE | INVALIDATE) != 0;
        if let (None, Region::Bytes(offset, len), true) = (map.staging, map.region, written) {
            let range = Range { buffer: object, offset, len, pointer: map.pointer };
            write(queue, range, false, &waits, new.id())?;
            // SAFETY: as the API says.
            unsafe { finish(new, event) };
            return Ok(());
        }
        let ids = (queue.id(), object.id(), new.id());
        if !written {
            // Nothing goes to the device; staging is free when the map before has ended.
            let ticket =
                map.staging.map(|(at, len)| connection.ticket(Box::new(move |c, _| c.give_staging(at, len))));
            let (ticket, waits) = (ticket.unwrap_or(0), waits.into());
            let record = wire::EnqueueHost { queue: ids.0, ticket, waits, event: ids.2 };
            rt::lost(connection.post(&record))?;
            // SAFETY: as the API says.
            unsafe { finish(new, event) };
            return Ok(());
        }
        let slot = match (map.staging, map.region) {
            (Some((at, len)), _) => {
                rt::lost(connection.push_window(at, len))?;
                Slot { data: at, ticket: connection.ticket(Box::new(move |c, _| c.give_staging(at, len))) }
            }
            (None, Region::Pixels(_, region)) => {
                let one = super::memory::is_one_dimensional(mem);
                let (rows, slices) = if one { (1, region[1]) } else { (region[1], region[2]) };
                let host = Host {
                    pointer: map.pointer,
                    row: region[0] * mem.pixel,
                    rows,
                    slices,
                    row_pitch: map.pitches.0 as u64,
                    slice_pitch: map.pitches.1 as u64,
                };
                write_slot(queue, &host)?
            }
            // Written above.
            (None, Region::Bytes(..)) => return Err(code::VALUE),
        };
        match map.region {
            Region::Pixels(origin, region) => rt::call(&wire::EnqueueWriteImage {
                queue: ids.0,
                image: ids.1,
                origin,
                region,
                data: slot.data,
                ticket: slot.ticket,
                waits: waits.into(),
                event: ids.2,
            })
            .map(|_| ())?,
            Region::Bytes(offset, size) => {
                let record = wire::EnqueueWriteBuffer {
                    queue: ids.0,
                    buffer: ids.1,
                    offset,
                    size,
                    data: slot.data,
                    ticket: slot.ticket,
                    inline: &[],
                    waits: waits.into(),
                    event: ids.2,
                };
                rt::lost(connection.post(&record))?;
            }
        }
        // SAFETY: as the API says.
        unsafe { finish(new, event) };
        Ok(())
    })
}
