// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long transfers that the program waits for, piece by piece through a few slots of the window: one side copies a piece while the other is at the next. The
//! server's end is one command of the driver, so it needs a device that runs native kernels: a processor.

use super::buffer::Range;
use super::slot::staging;
use crate::rt::{self, Id, Obj};
use crate::state::As;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use tombolo_accel_client::connection::{Awaited, Connection};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, cl};

const PAGE: u64 = 4096;
/// The longest piece. Shorter ones cost more: a piece takes three threads' turns (the program's, the worker's leader, the driver's), which are too many
/// for two processors.
const LONGEST_PIECE: u64 = 1 << 20;
/// The shortest piece, beside which its record costs little.
const SHORTEST_PIECE: u64 = 256 << 10;
/// Transfers at once, at least, for which the window has room.
const AT_ONCE: u64 = 16;
/// Pieces that are under way; their slots stay in the processors' caches. A power of two.
const SLOTS: u64 = 4;
/// The shortest transfer that gains by it: of 1 MiB, two copies one after the other take less time than handing the pieces over.
const LEAST: u64 = 2 << 20;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Returns whether a transfer that the program waits for may go this way.
pub fn suits(queue: Obj, range: &Range) -> Result<bool, i32> {
    let long = range.len >= LEAST && rt::connection()?.shares_window;
    Ok(long && range.cut(queue)? && crate::local::runs_native_kernels(queue.queue()?.device.obj())?)
}

/// Bytes of each piece of a transfer but the last, a multiple of a page: each slot is used, and sixteen transfers at once have room in the window.
fn piece_of(len: u64, window: u64) -> u64 {
    let piece = (len / SLOTS).min(window / (AT_ONCE * SLOTS)).clamp(SHORTEST_PIECE, LONGEST_PIECE);
    piece & !(PAGE - 1)
}

/// A piece that is under way.
struct Piece {
    at: u64,
    len: u64,
    slot: u64,
    copied: Awaited,
    status: Arc<AtomicI32>,
}

struct Stream<'c> {
    connection: &'c Connection,
    id: u64,
    range: Range,
    /// Bytes of each piece but the last.
    piece: u64,
    writes: bool,
    under_way: VecDeque<Piece>,
}

impl Stream<'_> {
    fn post(&mut self, at: u64, slot: u64) -> Result<(), i32> {
        let len = self.piece.min(self.range.len - at);
        let host = self.range.piece(at, len);
        if self.writes {
            let to = self.connection.window.at(slot, len).map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
            // SAFETY: the program's region is readable, as the API says; the slot is ours.
            unsafe { host.gather(to) };
        }
        let status = Arc::new(AtomicI32::new(wire::SUCCESS));
        let told = status.clone();
        let (ticket, copied) =
            self.connection.awaited(Box::new(move |_, status| told.store(status, Ordering::Relaxed)));
        let record = wire::StreamPiece { stream: self.id, data: slot, at, size: len, ticket };
        rt::lost(self.connection.post(&record))?;
        self.under_way.push_back(Piece { at, len, slot, copied, status });
        Ok(())
    }

    /// Waits for the oldest piece. Returns its slot.
    fn take(&mut self) -> Result<Option<u64>, i32> {
        let Some(piece) = self.under_way.pop_front() else { return Ok(None) };
        if piece.at == 0 && !rt::lost(self.connection.redeemed_soon(&piece.copied))? {
            rt::lost(self.connection.post(&wire::StreamWatch { stream: self.id }))?;
        }
        rt::lost(self.connection.redeemed(&piece.copied))?;
        let status = piece.status.load(Ordering::Relaxed);
        if status < 0 {
            return Err(status);
        }
        if !self.writes {
            let host = self.range.piece(piece.at, piece.len);
            let from = self
                .connection
                .window
                .at(piece.slot, piece.len)
                .map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
            // SAFETY: the program's region is writable, as the API says; the slot was filled.
            unsafe { host.scatter(from) };
        }
        Ok(Some(piece.slot))
    }

    fn all(&mut self, slots: u64, count: u64) -> Result<(), i32> {
        for at in (0..self.range.len).step_by(self.piece as usize) {
            let slot = match self.under_way.len() as u64 {
                full if full == count => self.take()?.unwrap_or(slots),
                free => slots + free * self.piece,
            };
            self.post(at, slot)?;
        }
        while self.take()?.is_some() {}
        Ok(())
    }
}

fn transfer(queue: Obj, range: Range, writes: bool) -> Result<(), i32> {
    let connection = rt::connection()?;
    let piece = piece_of(range.len, connection.window.len());
    let count = SLOTS.min(range.len.div_ceil(piece));
    let slots = staging(queue, count * piece, Place::Beside(range.pointer))?;
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut stream = Stream { connection, id, range, piece, writes, under_way: VecDeque::new() };
    let record = wire::EnqueueStream {
        queue: queue.id(),
        buffer: range.buffer.id(),
        stream: id,
        writes: u32::from(writes),
        offset: range.offset,
        size: range.len,
        waits: (&[]).into(),
        event: 0,
    };
    let outcome = rt::lost(connection.post(&record)).and_then(|()| stream.all(slots, count));
    if let Err(code) = outcome {
        // The slots are free when the server has done with each piece.
        for piece in stream.under_way.drain(..) {
            rt::lost(connection.redeemed(&piece.copied))?;
        }
        connection.give_staging(slots, count * piece);
        // If what failed closed the queue, that knows its code. Else a command before this one failed: the answer is that of the driver to who waits for them.
        rt::call(&wire::Finish { command_queue: queue.id() })?;
        return if code == cl::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST { Ok(()) } else { Err(code) };
    }
    connection.give_staging(slots, count * piece);
    Ok(())
}

/// Reads a range of a buffer.
pub fn read(queue: Obj, range: Range) -> Result<(), i32> {
    transfer(queue, range, false)
}

/// Writes a range of a buffer.
pub fn write(queue: Obj, range: Range) -> Result<(), i32> {
    transfer(queue, range, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_pages_and_leave_room_for_sixteen_transfers() {
        for (len, window, piece) in [
            (LEAST, 1 << 30, 512 << 10),
            (4 << 20, 1 << 30, 1 << 20),
            ((4 << 20) - 1, 1 << 30, (1 << 20) - PAGE),
            (1 << 40, 1 << 30, 1 << 20),
            (64 << 20, 64 << 20, 1 << 20),
            (64 << 20, 32 << 20, 512 << 10),
            (64 << 20, 8 << 20, 256 << 10),
        ] {
            assert_eq!(piece_of(len, window), piece, "{len} {window}");
        }
    }
}
