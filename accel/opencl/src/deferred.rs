// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocking writes that return when their bytes were taken, before the device has them. A program can't tell the difference while every command that
//! reads the data comes behind the write: with one queue, which keeps its order, and without an event that the program completes. Everywhere else a
//! blocking write waits for the device, and a call that makes a second queue or such an event waits for the writes before.

use crate::rt::{self, Handle, Id, New, Obj};
use crate::state::Body;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tombolo_accel_spec::opencl::{self as wire, cl};

/// The number of queues that live.
static QUEUES: AtomicUsize = AtomicUsize::new(0);
/// The number of live events that the program completes.
static USER_EVENTS: AtomicUsize = AtomicUsize::new(0);
/// The queue with a write that the device may not have; 0: none has one.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Counts an object for as long as it lives.
pub struct Counted(&'static AtomicUsize);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn count(all: &'static AtomicUsize) -> Result<Counted, i32> {
    all.fetch_add(1, Ordering::SeqCst);
    // Given back where the wait fails.
    let counted = Counted(all);
    settle()?;
    Ok(counted)
}

/// Counts a new queue, after the device has all writes.
pub fn new_queue() -> Result<Counted, i32> {
    count(&QUEUES)
}

/// Counts a new event that the program completes, after the device has all writes.
pub fn new_user_event() -> Result<Counted, i32> {
    count(&USER_EVENTS)
}

/// Waits until the device has what was written.
fn settle() -> Result<(), i32> {
    match WRITTEN.swap(0, Ordering::SeqCst) {
        0 => Ok(()),
        queue => rt::call(&wire::Finish { command_queue: queue }).map(drop),
    }
}

/// Waits for the writes of a queue that is about to be given up.
pub fn leave(queue: Obj) -> Result<(), i32> {
    if WRITTEN.load(Ordering::SeqCst) == queue.id() { settle() } else { Ok(()) }
}

/// Forgets the writes of a connection that was lost.
pub fn forget() {
    WRITTEN.store(0, Ordering::SeqCst);
}

/// Returns whether a queue executes its commands in their order.
pub fn in_order(queue: Obj) -> bool {
    matches!(queue.body(), Body::Queue(q) if q.properties & cl::QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE == 0)
}

/// Returns whether a program can't tell a write whose bytes were taken from one that the device has.
fn looks_complete(queue: Obj) -> bool {
    in_order(queue) && QUEUES.load(Ordering::SeqCst) == 1 && USER_EVENTS.load(Ordering::SeqCst) == 0
}

/// A write that is being enqueued.
pub struct Write {
    queue: Obj,
    blocking: bool,
    waits: bool,
    new: New,
}

impl Write {
    /// Of a queue; `command` is its event's, which the program wants or not.
    pub fn new(queue: Obj, blocking: bool, wanted: bool, command: u32) -> Result<Write, i32> {
        let waits = blocking && (wanted || !looks_complete(queue));
        Ok(Write { queue, blocking, waits, new: rt::new_event(queue, wanted, command)? })
    }

    /// The id of its event; 0: it has none.
    pub fn event(&self) -> u64 {
        self.new.id()
    }

    /// Returns whether the driver blocks for it.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Ends a write that was sent, and gives the program its event.
    ///
    /// # Safety
    /// `event` is null or points to room for a handle.
    pub unsafe fn sent(self, event: *mut Handle) -> Result<(), i32> {
        if self.blocking && !self.waits {
            WRITTEN.store(self.queue.id(), Ordering::SeqCst);
            // A second queue may have come meanwhile, before it could see this.
            if !looks_complete(self.queue) {
                settle()?;
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.new.give(event) };
        Ok(())
    }
}
