// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes between a program's memory and memory objects.
//!
//! Memory in the window is passed by its offset: no copy. Other memory goes through a staging range of the window: small writes travel
//! in the record itself; long transfers are cut into pieces, so that one side copies while the other is at the next piece. A write has
//! taken the program's data when it returns, so it never waits; a blocking read waits for its last piece.

use super::memory::host_access;
use super::region::Host;
use super::stream;
use crate::deferred::{Write, in_order};
use crate::rt::{self, Handle, Id, New, Obj, code};
use crate::state::{As, Pages};
use crate::sure;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use tombolo_accel_client::connection::{Awaited, Connection, Redeem};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, kind};

/// A write of at most this many bytes travels in its record.
const INLINE: u64 = 16 << 10;
/// Length of a piece of a long transfer.
const PIECE: u64 = 2 << 20;
/// Pieces of one transfer that are under way.
const UNDER_WAY: usize = 3;

/// Takes staging memory; when transfers under way hold too much of it, waits for the queue once.
pub(crate) fn staging(queue: Obj, len: u64, place: Place) -> Result<u64, i32> {
    let connection = rt::connection()?;
    if let Some(at) = rt::lost(connection.take_staging(len, place))? {
        return Ok(at);
    }
    if len > connection.window.len() {
        return Err(code::ALLOCATION);
    }
    rt::call(&wire::Finish { queue: queue.id() })?;
    rt::lost(connection.take_staging(len, place))?.ok_or(code::ALLOCATION)
}

/// Where a transfer's bytes are in the window.
pub(crate) struct Slot {
    pub data: u64,
    pub ticket: u64,
}

/// A region that lies in the window already (memory that the program got by mapping); None: it doesn't.
fn pinned(connection: &Connection, host: &Host) -> Option<u64> {
    host.is_flat().then(|| connection.window.offset_of(host.pointer, host.len())).flatten()
}

/// A range of the window that a read fills: the program's own memory, or staging whose contents are copied when the ticket is redeemed.
pub(crate) fn read_slot(queue: Obj, host: Host) -> Result<Slot, i32> {
    let connection = rt::connection()?;
    if let Some(data) = pinned(connection, &host) {
        // Over a stream, the ticket makes the server push the range when it is filled.
        let ticket = if connection.shares_window { 0 } else { connection.ticket(Box::new(|_, _| ())) };
        return Ok(Slot { data, ticket });
    }
    let (data, redeem) = staged_read(queue, host, None)?;
    Ok(Slot { data, ticket: connection.ticket(redeem) })
}

/// Staging that a read fills, and what is done when it is full; until then, `pages` stay.
fn staged_read(queue: Obj, host: Host, pages: Option<Arc<Pages>>) -> Result<(u64, Redeem), i32> {
    let len = host.len();
    let data = staging(queue, len, Place::Beside(host.pointer))?;
    let redeem = Box::new(move |c: &Connection, status| {
        let _until_copied = &pages;
        if status >= 0 {
            if let Ok(from) = c.window.at(data, len) {
                // SAFETY: the program keeps its memory until the command is complete, which is what the ticket says.
                unsafe { host.scatter(from) };
            }
        }
        c.give_staging(data, len);
    });
    Ok((data, redeem))
}

/// A range of the window with a program's bytes, and the ticket that frees it.
pub(crate) fn write_slot(queue: Obj, host: &Host) -> Result<Slot, i32> {
    let connection = rt::connection()?;
    let len = host.len();
    if let Some(data) = pinned(connection, host) {
        rt::lost(connection.push_window(data, len))?;
        return Ok(Slot { data, ticket: 0 });
    }
    let (data, redeem) = staged_write(queue, host)?;
    Ok(Slot { data, ticket: connection.ticket(redeem) })
}

/// Staging with a program's bytes, and what is done when they have been read.
fn staged_write(queue: Obj, host: &Host) -> Result<(u64, Redeem), i32> {
    let connection = rt::connection()?;
    let len = host.len();
    let data = staging(queue, len, Place::Beside(host.pointer))?;
    let to = connection.window.at(data, len).map_err(|_| code::ALLOCATION)?;
    // SAFETY: the program's region is readable, as the API says; the range is ours.
    unsafe { host.gather(to) };
    rt::lost(connection.push_window(data, len))?;
    Ok((data, Box::new(move |c: &Connection, _| c.give_staging(data, len))))
}

/// The pieces of a long transfer. Of one that blocks only a few are under way, so that their staging stays in the processors' caches; the
/// program waits anyway. One that doesn't block never waits for the device.
struct Flow {
    blocking: bool,
    under_way: VecDeque<Awaited>,
}

impl Flow {
    fn new(blocking: bool) -> Flow {
        Flow { blocking, under_way: VecDeque::new() }
    }

    /// Waits until another piece may be staged.
    fn next(&mut self) -> Result<(), i32> {
        if self.under_way.len() == UNDER_WAY {
            if let Some(first) = self.under_way.pop_front() {
                rt::lost(rt::connection()?.redeemed(&first))?;
            }
        }
        Ok(())
    }

    /// The staging of a piece becomes its slot.
    fn slot(&mut self, (data, redeem): (u64, Redeem)) -> Result<Slot, i32> {
        let connection = rt::connection()?;
        if !self.blocking {
            return Ok(Slot { data, ticket: connection.ticket(redeem) });
        }
        let (ticket, awaited) = connection.awaited(redeem);
        self.under_way.push_back(awaited);
        Ok(Slot { data, ticket })
    }
}

/// Sends a transfer. The server redeems its ticket also where it refuses it.
fn transfer<'a, R: tombolo_accel_spec::wire::Record<'a>>(record: &R, post: bool) -> Result<(), i32> {
    if post { rt::lost(rt::connection()?.post(record)) } else { rt::call(record).map(|_| ()) }
}

/// The end of a transfer: the program gets its event.
pub(super) unsafe fn finish(new: New, event: *mut Handle) {
    if new.object().is_some() {
        // SAFETY: as the API says.
        unsafe { rt::write(event, new.publish()) };
    }
}

/// Whether a range needs no staging.
fn in_window(pointer: usize, len: u64) -> Result<bool, i32> {
    Ok(pinned(rt::connection()?, &Host::flat(pointer, len)).is_some())
}

/// Pieces of a transfer: offset and length.
fn pieces(len: u64, cut: bool) -> impl Iterator<Item = (u64, u64)> {
    let piece = if cut && len > PIECE { PIECE } else { len.max(1) };
    let count = len.div_ceil(piece).max(1);
    (0..count).map(move |i| (i * piece, piece.min(len - i * piece)))
}

/// A range of a buffer and the program's memory that it goes to or comes from.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub buffer: Obj,
    pub offset: u64,
    pub len: u64,
    pub pointer: usize,
}

impl Range {
    /// Whether it goes in pieces: their order is the queue's.
    pub fn cut(&self, queue: Obj) -> Result<bool, i32> {
        Ok(in_order(queue) && !in_window(self.pointer, self.len)?)
    }

    /// The program's memory of a piece.
    pub fn piece(&self, at: u64, len: u64) -> Host {
        Host::flat(self.pointer + at as usize, len)
    }
}

/// Reads a range of a buffer; `pages` stay until it was copied.
pub(crate) fn read(
    queue: Obj,
    range: Range,
    blocking: bool,
    waits: &[u64],
    event: u64,
    pages: Option<&Arc<Pages>>,
) -> Result<(), i32> {
    let Range { buffer, offset, len, .. } = range;
    let sure = sure::host_range(queue, buffer, offset, len, waits);
    if !sure {
        // The driver will probably refuse it; nothing is staged before it was asked.
        probe(queue, buffer, offset, len, true)?;
    }
    if sure && blocking && waits.is_empty() && event == 0 && stream::suits(queue, &range)? {
        return stream::read(queue, range);
    }
    let cut = range.cut(queue)?;
    let last = pieces(len, cut).last();
    let mut flow = Flow::new(blocking);
    for piece @ (at, len) in pieces(len, cut) {
        let is_last = Some(piece) == last;
        let slot = if cut {
            flow.next()?;
            flow.slot(staged_read(queue, range.piece(at, len), pages.cloned())?)?
        } else {
            read_slot(queue, range.piece(at, len))?
        };
        let record = wire::EnqueueReadBuffer {
            queue: queue.id(),
            buffer: buffer.id(),
            offset: offset + at,
            size: len,
            data: slot.data,
            ticket: slot.ticket,
            blocking: u32::from(blocking && is_last),
            waits: if at == 0 { waits.into() } else { Cow::Borrowed(&[]) },
            event: if is_last { event } else { 0 },
        };
        transfer(&record, sure && !(is_last && blocking))?;
    }
    Ok(())
}

/// Writes a range of a buffer; the program's bytes have been taken when it returns.
pub(crate) fn write(queue: Obj, range: Range, blocking: bool, waits: &[u64], event: u64) -> Result<(), i32> {
    let Range { buffer, offset, len, .. } = range;
    let sure = sure::host_range(queue, buffer, offset, len, waits);
    if !sure {
        probe(queue, buffer, offset, len, false)?;
    }
    let cut = range.cut(queue)?;
    let last = pieces(len, cut).last();
    let mut flow = Flow::new(blocking);
    for piece @ (at, len) in pieces(len, cut) {
        let is_last = Some(piece) == last;
        let host = range.piece(at, len);
        let small = (1..=INLINE).contains(&len) && pinned(rt::connection()?, &host).is_none();
        let inline: &[u8] = if small {
            // SAFETY: a piece of the program's bytes, as the API says.
            unsafe { std::slice::from_raw_parts(host.pointer as *const u8, len as usize) }
        } else {
            &[]
        };
        let slot = if small {
            Slot { data: 0, ticket: 0 }
        } else if cut {
            flow.next()?;
            flow.slot(staged_write(queue, &host)?)?
        } else {
            write_slot(queue, &host)?
        };
        let record = wire::EnqueueWriteBuffer {
            queue: queue.id(),
            buffer: buffer.id(),
            offset: offset + at,
            size: len,
            data: slot.data,
            ticket: slot.ticket,
            inline,
            waits: if at == 0 { waits.into() } else { Cow::Borrowed(&[]) },
            event: if is_last { event } else { 0 },
        };
        transfer(&record, sure)?;
    }
    Ok(())
}

pub unsafe extern "C" fn clEnqueueReadBuffer(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    offset: usize,
    size: usize,
    ptr: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let buffer = rt::object(buffer, kind::MEM)?;
        if ptr.is_null() {
            return Err(code::VALUE);
        }
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let new = rt::new_event(queue, !event.is_null(), 0x11f3)?;
        let range = Range { buffer, offset: offset as u64, len: size as u64, pointer: ptr as usize };
        read(queue, range, blocking != 0, &waits, new.id(), None)?;
        // SAFETY: as the API says.
        unsafe { finish(new, event) };
        Ok(())
    })
}

/// What no driver accepts: a range outside of the buffer, or none at all.
fn probe(queue: Obj, buffer: Obj, offset: u64, size: u64, reads: bool) -> Result<(), i32> {
    let mem = buffer.mem()?;
    if !sure::same_context(queue, buffer) {
        return Err(code::CONTEXT);
    }
    if super::memory::is_image(mem) {
        return Err(kind::invalid(kind::MEM));
    }
    host_access(mem, reads)?;
    // The driver decides whether an empty transfer is an error.
    let end = offset.checked_add(size).ok_or(code::VALUE)?;
    if end > mem.size { Err(code::VALUE) } else { Ok(()) }
}

pub unsafe extern "C" fn clEnqueueWriteBuffer(
    queue: Handle,
    buffer: Handle,
    blocking: u32,
    offset: usize,
    size: usize,
    ptr: *const c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let buffer = rt::object(buffer, kind::MEM)?;
        if ptr.is_null() {
            return Err(code::VALUE);
        }
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let (blocking, wanted) = (blocking != 0, !event.is_null());
        let range = Range { buffer, offset: offset as u64, len: size as u64, pointer: ptr as usize };
        let sure = sure::host_range(queue, buffer, range.offset, range.len, &waits);
        if sure && blocking && !wanted && waits.is_empty() && stream::suits(queue, &range)? {
            return stream::write(queue, range);
        }
        let new = Write::new(queue, blocking, wanted, 0x11f4)?;
        write(queue, range, blocking, &waits, new.event())?;
        // SAFETY: as the API says.
        unsafe { new.sent(event) }
    })
}
