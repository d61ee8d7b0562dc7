// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of buffers. Small writes travel in the record itself; long transfers are cut into pieces, so that one side copies while the
//! other is at the next piece.

use super::region::Host;
use super::slot::{Slot, pinned, read_slot, staged_read, staged_write, write_slot};
use super::{Direction, check_host_access, stream};
use crate::deferred::in_order;
use crate::rt::{self, Id, Obj};
use crate::state::{As, Pages};
use crate::sure;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use tombolo_accel_client::connection::{Awaited, Redeem};
use tombolo_accel_spec::opencl::{self as wire, cl};

/// A write of at most this many bytes travels in its record.
const INLINE: u64 = 16 << 10;
/// Length of a piece of a long transfer.
const PIECE: u64 = 2 << 20;
/// Pieces of one transfer that are under way.
const UNDER_WAY: usize = 3;

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

    /// Makes the staging of a piece its slot.
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

/// Returns whether a range needs no staging.
fn in_window(pointer: usize, len: u64) -> Result<bool, i32> {
    Ok(pinned(rt::connection()?, &Host::flat(pointer, len)).is_some())
}

/// Pieces of a transfer: offset and length.
fn pieces(len: u64, cut: bool) -> impl Iterator<Item = (u64, u64)> {
    let piece = if cut && len > PIECE { PIECE } else { len.max(1) };
    let count = len.div_ceil(piece).max(1);
    (0..count).map(move |i| (i * piece, piece.min(len - i * piece)))
}

/// A range of a buffer, and the program's memory that it is read into or written from.
#[derive(Clone, Copy)]
pub struct Range {
    pub buffer: Obj,
    pub offset: u64,
    pub len: u64,
    pub pointer: usize,
}

impl Range {
    /// Returns whether the transfer is cut into pieces, which needs a queue that keeps their order.
    pub fn cut(&self, queue: Obj) -> Result<bool, i32> {
        Ok(in_order(queue) && !in_window(self.pointer, self.len)?)
    }

    /// The program's memory of a piece.
    pub fn piece(&self, at: u64, len: u64) -> Host {
        Host::flat(self.pointer + at as usize, len)
    }
}

/// Reads a range of a buffer; `pages` stay until it was copied.
pub fn read(
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
        probe(queue, &range, Direction::Reads)?;
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
            command_queue: queue.id(),
            buffer: buffer.id(),
            offset: offset + at,
            size: len,
            data: slot.data,
            ticket: slot.ticket,
            blocking_read: u32::from(blocking && is_last),
            waits: if at == 0 { waits.into() } else { Cow::Borrowed(&[]) },
            event: if is_last { event } else { 0 },
        };
        rt::send(&record, sure && !(is_last && blocking))?;
    }
    Ok(())
}

/// Writes a range of a buffer; the program's bytes have been taken when it returns.
pub fn write(queue: Obj, range: Range, blocking: bool, waits: &[u64], event: u64) -> Result<(), i32> {
    let Range { buffer, offset, len, .. } = range;
    let sure = sure::host_range(queue, buffer, offset, len, waits);
    if !sure {
        probe(queue, &range, Direction::Writes)?;
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
            command_queue: queue.id(),
            buffer: buffer.id(),
            offset: offset + at,
            size: len,
            data: slot.data,
            ticket: slot.ticket,
            inline,
            waits: if at == 0 { waits.into() } else { Cow::Borrowed(&[]) },
            event: if is_last { event } else { 0 },
        };
        rt::send(&record, sure)?;
    }
    Ok(())
}

/// Refuses what no driver accepts: another context, no buffer, a range outside of the buffer.
fn probe(queue: Obj, range: &Range, direction: Direction) -> Result<(), i32> {
    let mem = range.buffer.mem()?;
    rt::same_context(queue, range.buffer)?;
    if mem.is_image() {
        return Err(cl::INVALID_MEM_OBJECT);
    }
    check_host_access(mem, direction)?;
    // The driver decides whether an empty transfer is an error.
    let end = range.offset.checked_add(range.len).ok_or(cl::INVALID_VALUE)?;
    if end > mem.size { Err(cl::INVALID_VALUE) } else { Ok(()) }
}
