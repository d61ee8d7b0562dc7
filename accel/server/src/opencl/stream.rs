// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long transfers between a program's memory and a buffer of a device that is the CPU. The program's bytes pass through slots of the window, piece
//! by piece. One command of the driver, a native kernel, copies the pieces between the window and the buffer on a thread of the driver, at its place
//! in the queue; the client meanwhile copies the next ones between the window and the program's memory. So a transfer takes about as long as one
//! copy, and costs the driver one command.
//!
//! The client sends a record for each piece, which has a ticket: it is redeemed when the piece was copied. A transfer that the driver ends
//! before its time (a command before it failed) redeems what is left with the driver's code.

use super::{Handle, OpenCl, lock, tickets};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use tombolo_accel_spec::opencl::cl;
use tombolo_accel_spec::wire::ReplyKind;
use tombolo_calls::spin::Spin;

/// Transfers of a client at once.
const MOST: usize = 1024;
/// Pieces of a transfer that wait to be copied; a client has few slots for them.
const MOST_PIECES: usize = 64;
/// The driver's thread polls for the next piece so long before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// A piece that the client has staged, or made room for.
pub struct Piece {
    /// The address of its slot in the window.
    pub slot: usize,
    /// The offset of its first byte in the transfer.
    pub at: usize,
    pub len: usize,
    /// Redeemed when it was copied.
    pub ticket: u64,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<Piece>,
    /// The driver's thread waits for a piece.
    sleeps: bool,
    /// The driver has ended the command, with this status.
    ended: Option<i32>,
}

/// One transfer.
pub struct Stream {
    /// From the window to the buffer.
    writes: bool,
    len: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// The arguments that the driver hands to the native kernel. They hold a reference to the stream, which the kernel gives up; that of a command which never starts stays.
#[repr(C)]
pub struct Arguments {
    /// The address of the buffer's memory, which the driver puts here.
    buffer: *mut u8,
    offset: usize,
    stream: *const Stream,
    cl: *const OpenCl,
}

impl Arguments {
    /// Of a transfer at an offset of a buffer.
    pub fn new(cl: &'static OpenCl, buffer: Handle, offset: usize, stream: Arc<Stream>) -> Arguments {
        Arguments { buffer: buffer.cast(), offset, stream: Arc::into_raw(stream), cl }
    }
}

impl Stream {
    /// A transfer of `len` bytes.
    pub fn new(writes: bool, len: usize) -> Arc<Stream> {
        Arc::new(Stream { writes, len, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Takes a piece, or returns the code for a piece that can't be used.
    pub fn put(&self, piece: Piece) -> Result<(), i32> {
        if piece.len == 0 || piece.at.checked_add(piece.len).is_none_or(|end| end > self.len) {
            return Err(cl::INVALID_VALUE);
        }
        let mut state = lock(&self.state);
        if let Some(status) = state.ended {
            return Err(if status < 0 { status } else { cl::INVALID_VALUE });
        }
        if state.pieces.len() >= MOST_PIECES {
            return Err(cl::OUT_OF_RESOURCES);
        }
        state.pieces.push_back(piece);
        if std::mem::take(&mut state.sleeps) {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Waits for the next piece.
    fn next(&self) -> Piece {
        let mut spin = Spin::new(SPIN);
        loop {
            let mut state = lock(&self.state);
            if let Some(piece) = state.pieces.pop_front() {
                return piece;
            }
            if !spin.turn() {
                state.sleeps = true;
                let waited = self.changed.wait_while(state, |state| state.pieces.is_empty());
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// Copies until all has been copied.
    ///
    /// # Safety
    /// `buffer` points to the transfer's range of the buffer.
    unsafe fn copy(&self, cl: &OpenCl, buffer: *mut u8) {
        let mut left = self.len;
        while left > 0 {
            let Piece { slot, at, len, ticket } = self.next();
            // SAFETY: put() checked that the piece lies in the transfer; its slot lies in the window. Others may write there meanwhile:
            // any bytes will do.
            unsafe {
                let (device, host) = (buffer.add(at), slot as *mut u8);
                let (from, to) = if self.writes { (host, device) } else { (device, host) };
                std::ptr::copy(from, to, len);
            }
            cl.session().notify(ReplyKind::Ticket, 0, ticket, &[]);
            left = left.saturating_sub(len);
        }
    }

    /// Notes that the driver has ended the command, and answers the pieces that it did not copy.
    fn end(&self, cl: &OpenCl, status: i32) {
        let left = {
            let mut state = lock(&self.state);
            state.ended = Some(status);
            std::mem::take(&mut state.pieces)
        };
        let status = if status < 0 { status } else { cl::OUT_OF_RESOURCES };
        for piece in left {
            cl.session().notify(ReplyKind::Ticket, status, piece.ticket, &[]);
        }
    }
}

pub(super) unsafe extern "C" fn run(arguments: *mut c_void) {
    // SAFETY: the driver's copy of what was enqueued, which it hands over once.
    let (arguments, stream, cl) = unsafe {
        let arguments = &*arguments.cast::<Arguments>();
        (arguments, Arc::from_raw(arguments.stream), &*arguments.cl)
    };
    // The output of earlier kernels comes before the end of a read.
    cl.output.settle();
    if arguments.buffer.is_null() {
        // A driver that has no memory for the buffer.
        return;
    }
    // SAFETY: the range lies in the buffer, as was checked when this was enqueued.
    unsafe { stream.copy(cl, arguments.buffer.add(arguments.offset)) };
}

/// A transfer whose command the driver has.
struct Running {
    stream: Arc<Stream>,
    /// The command's event, with a reference of its own; 0: not yet.
    event: usize,
}

/// The transfers of a client, by the ids that it chose.
#[derive(Default)]
pub struct Streams(Mutex<HashMap<u64, Running>>);

impl Streams {
    /// One more, whose command the driver is about to get.
    pub fn add(&self, id: u64, stream: &Arc<Stream>) -> Result<(), i32> {
        let mut all = lock(&self.0);
        if all.len() >= MOST {
            return Err(cl::OUT_OF_RESOURCES);
        }
        if all.contains_key(&id) {
            return Err(cl::INVALID_VALUE);
        }
        all.insert(id, Running { stream: stream.clone(), event: 0 });
        Ok(())
    }

    /// The driver has its command. The reference to the event becomes the stream's.
    pub(super) fn enqueued(&self, cl: &'static OpenCl, id: u64, event: Handle) {
        if let Some(running) = lock(&self.0).get_mut(&id) {
            running.event = event as usize;
        }
        let enqueued = Box::into_raw(Box::new((cl, id)));
        let set = cl.native.clSetEventCallback;
        // SAFETY: a live event; the callback frees what it is given.
        let taken = set.is_some_and(
            |set| unsafe { set(event, cl::COMPLETE, ended as *const c_void, enqueued.cast()) } == 0,
        );
        if !taken {
            // SAFETY: the driver didn't take it.
            drop(unsafe { Box::from_raw(enqueued) });
        }
    }

    pub fn get(&self, id: u64) -> Result<Arc<Stream>, i32> {
        lock(&self.0).get(&id).map(|running| running.stream.clone()).ok_or(cl::INVALID_VALUE)
    }

    /// The event of a stream, with a reference for the caller.
    pub(super) fn event(&self, cl: &OpenCl, id: u64) -> Result<Handle, i32> {
        let all = lock(&self.0);
        let event = all.get(&id).ok_or(cl::INVALID_VALUE)?.event as Handle;
        if let Some(retain) = cl.native.clRetainEvent {
            // SAFETY: a live event, as it is in the table.
            unsafe { retain(event) };
        }
        Ok(event)
    }

    /// Ends a transfer whose command has ended, or was refused by the driver. Calls after the first have no effect.
    pub fn end(&self, cl: &OpenCl, id: u64, status: i32) {
        let Some(Running { stream, event }) = lock(&self.0).remove(&id) else { return };
        stream.end(cl, status);
        if event != 0 {
            cl.tickets.release(cl, event, status);
        }
    }
}

/// The driver's callback for the event of a stream.
unsafe extern "C" fn ended(event: Handle, _status: i32, enqueued: *mut c_void) {
    // SAFETY: from enqueued(), and the driver calls once.
    let (cl, id) = unsafe { *Box::from_raw(enqueued.cast::<(&'static OpenCl, u64)>()) };
    let failed = tickets::status(cl, event).is_some_and(|status| status < 0);
    cl.streams.end(cl, id, if failed { cl::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST } else { 0 });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_lies_in_its_transfer_and_comes_before_its_end() {
        let stream = Stream::new(true, 100);
        let piece = |at, len| Piece { slot: 0, at, len, ticket: 1 };
        for (at, len) in [(0, 101), (100, 1), (0, 0), (usize::MAX, 1), (1, usize::MAX)] {
            assert_eq!(stream.put(piece(at, len)), Err(cl::INVALID_VALUE), "{at} {len}");
        }
        for _ in 0..MOST_PIECES {
            assert_eq!(stream.put(piece(0, 100)), Ok(()));
        }
        assert_eq!(stream.put(piece(0, 100)), Err(cl::OUT_OF_RESOURCES));
        assert_eq!(stream.next().len, 100);
        assert_eq!(stream.put(piece(0, 100)), Ok(()));
        lock(&stream.state).ended = Some(cl::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
        assert_eq!(stream.put(piece(0, 100)), Err(cl::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST));
    }

    #[test]
    fn a_thread_that_sleeps_is_woken_by_the_next_piece() {
        let stream = Stream::new(true, 100);
        let reader = stream.clone();
        let waiting = std::thread::spawn(move || reader.next().at);
        while !lock(&stream.state).sleeps {
            std::thread::yield_now();
        }
        stream.put(Piece { slot: 0, at: 42, len: 1, ticket: 1 }).expect("taken");
        assert_eq!(waiting.join().expect("it ends"), 42);
    }
}
