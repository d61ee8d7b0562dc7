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

/// Bytes of a piece, a multiple of a page: short, so that the side which begins later soon does, and long beside what a record costs.
const PIECE: u64 = 256 << 10;
/// Pieces that are under way; their slots stay in the processors' caches.
const SLOTS: u64 = 4;
/// The shortest transfer that gains by it: of 1 MiB, two copies one after the other take less time than handing the pieces over.
const LEAST: u64 = 2 << 20;

static NEXT: AtomicU64 = AtomicU64::new(1);

fn runs_native_kernels(queue: Obj) -> Result<bool, i32> {
    let device = queue.queue()?.device.id();
    let (status, bytes) =
        rt::ask_once(&wire::GetDeviceInfo { device, param: cl::DEVICE_EXECUTION_CAPABILITIES })?;
    let bits = bytes.first_chunk().map_or(0, |bits| u64::from_le_bytes(*bits));
    Ok(status == wire::SUCCESS && bits & cl::EXEC_NATIVE_KERNEL != 0)
}

/// Returns whether a transfer that the program waits for may go this way.
pub fn suits(queue: Obj, range: &Range) -> Result<bool, i32> {
    let long = range.len >= LEAST && rt::connection()?.shares_window;
    Ok(long && range.cut(queue)? && runs_native_kernels(queue)?)
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
    writes: bool,
    under_way: VecDeque<Piece>,
}

impl Stream<'_> {
    fn post(&mut self, at: u64, slot: u64) -> Result<(), i32> {
        let len = PIECE.min(self.range.len - at);
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
        for at in (0..self.range.len).step_by(PIECE as usize) {
            let slot = match self.under_way.len() as u64 {
                full if full == count => self.take()?.unwrap_or(slots),
                free => slots + free * PIECE,
            };
            self.post(at, slot)?;
        }
        while self.take()?.is_some() {}
        Ok(())
    }
}

fn transfer(queue: Obj, range: Range, writes: bool) -> Result<(), i32> {
    let connection = rt::connection()?;
    let count = SLOTS.min(range.len.div_ceil(PIECE));
    let slots = staging(queue, count * PIECE, Place::Beside(range.pointer))?;
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut stream = Stream { connection, id, range, writes, under_way: VecDeque::new() };
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
        connection.give_staging(slots, count * PIECE);
        // The queue was closed by what failed, and knows its code.
        rt::call(&wire::Finish { command_queue: queue.id() })?;
        return Err(code);
    }
    connection.give_staging(slots, count * PIECE);
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
