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
use std::sync::atomic::{AtomicI32, Ordering};
use tombolo_accel_client::connection::{Awaited, Redeem};
use tombolo_accel_spec::opencl::{self as wire, cl};

/// A write of at most this many bytes travels in its record.
const INLINE: u64 = 16 << 10;
/// Length of a piece of a long transfer, in a window that has room for several.
const PIECE: u64 = 2 << 20;
/// Pieces of one transfer that are under way.
const UNDER_WAY: usize = 3;

/// The pieces of a long transfer. Of one that blocks only a few are under way, so that their staging stays in the processors' caches; the
/// program waits anyway. One that doesn't block never waits for the device.
struct Flow {
    blocking: bool,
    /// Each piece's ticket, its redemption, and how its command ended.
    under_way: VecDeque<(u64, Awaited, Arc<AtomicI32>)>,
}

impl Flow {
    fn new(blocking: bool) -> Flow {
        Flow { blocking, under_way: VecDeque::new() }
    }

    /// Waits until another piece may be staged. Returns the status of a piece that failed, after which there are no more.
    fn next(&mut self) -> Result<i32, i32> {
        if self.under_way.len() == UNDER_WAY {
            if let Some((ticket, first, status)) = self.under_way.pop_front() {
                rt::redeemed(ticket, &first)?;
                return Ok(status.load(Ordering::Acquire));
            }
        }
        Ok(wire::SUCCESS)
    }

    /// Makes the staging of a piece its slot.
    fn slot(&mut self, (data, redeem): (u64, Redeem)) -> Result<Slot, i32> {
        let connection = rt::connection()?;
        if !self.blocking {
            return Ok(Slot { data, ticket: connection.ticket(redeem) });
        }
        let status = Arc::new(AtomicI32::new(wire::SUCCESS));
        let told = status.clone();
        let (ticket, awaited) = connection.awaited(Box::new(move |connection, status| {
            told.store(status, Ordering::Release);
            redeem(connection, status);
        }));
        self.under_way.push_back((ticket, awaited, status));
        Ok(Slot { data, ticket })
    }
}

/// Returns whether a range needs no staging.
fn in_window(pointer: usize, len: u64) -> Result<bool, i32> {
    Ok(pinned(rt::connection()?, &Host::flat(pointer, len)).is_some())
}

/// Pieces of a transfer: offset and length. Those under way have room in the window.
fn pieces(len: u64, cut: bool, window: u64) -> impl Iterator<Item = (u64, u64)> + Clone {
    let longest = PIECE.min(window / (2 * UNDER_WAY as u64));
    let piece = if cut && len > longest { longest } else { len.max(1) };
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
    if sure && blocking && waits.is_empty() && event == 0 && stream::suits(queue, &range)? {
        return stream::read(queue, range);
    }
    let cut = range.cut(queue)?;
    let pieces = pieces(len, cut, rt::connection()?.window.len());
    let last = pieces.clone().last();
    let mut flow = Flow::new(blocking);
    for piece @ (at, len) in pieces {
        let is_last = Some(piece) == last;
        let slot = if cut {
            let status = flow.next()?;
            if status < 0 {
                return ended_early(queue, event, status);
            }
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

/// Writes a range of a buffer; the program's bytes have been taken when it returns, and with `blocking` the device has them.
pub fn write(queue: Obj, range: Range, blocking: bool, waits: &[u64], event: u64) -> Result<(), i32> {
    let Range { buffer, offset, len, .. } = range;
    let sure = sure::host_range(queue, buffer, offset, len, waits);
    let cut = range.cut(queue)?;
    let pieces = pieces(len, cut, rt::connection()?.window.len());
    let last = pieces.clone().last();
    let mut flow = Flow::new(blocking);
    for piece @ (at, len) in pieces {
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
            let status = flow.next()?;
            if status < 0 {
                return ended_early(queue, event, status);
            }
            flow.slot(staged_write(queue, &host)?)?
        } else {
            write_slot(queue, &host)?
        };
        let blocks = blocking && is_last;
        let record = wire::EnqueueWriteBuffer {
            command_queue: queue.id(),
            buffer: buffer.id(),
            blocking_write: u32::from(blocks),
            offset: offset + at,
            size: len,
            data: slot.data,
            ticket: slot.ticket,
            inline,
            waits: if at == 0 { waits.into() } else { Cow::Borrowed(&[]) },
            event: if is_last { event } else { 0 },
        };
        rt::send(&record, sure && !blocks)?;
    }
    Ok(())
}

/// Ends a transfer that the program waits for and of which a piece failed, as a command before it did. The answer is the driver's to who waits for the queue.
fn ended_early(queue: Obj, event: u64, status: i32) -> Result<(), i32> {
    if event != 0 {
        let context = queue.queue()?.context.id();
        rt::call(&wire::FailedEvent { context, status, new: event })?;
    }
    rt::call(&wire::Finish { command_queue: queue.id() }).map(drop)
}

/// Refuses what no driver accepts: another context, no buffer, access that the program ruled out, a range outside of the buffer. Nothing is staged before.
pub fn check(queue: Obj, range: &Range, direction: Direction) -> Result<(), i32> {
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
