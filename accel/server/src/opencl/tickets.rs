// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tickets of transfers: the client gave a part of its window, and wants to know when the device has read or filled it. A ticket is
//! redeemed when its native event has ended: at once by the driver's callback, and at the latest before any reply that could
//! tell the client so by other means.

use super::{Handle, OpenCl, lock};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Mutex;
use tombolo_accel_spec::opencl::cl;
use tombolo_accel_spec::wire::ReplyKind;

struct Outstanding {
    ticket: u64,
    event: usize,
    /// The range of the window that a read fills.
    filled: Option<(u64, u64)>,
}

/// The last events of commands that failed: they stay for so many others. PoCL 3.1 locks the event of a command that failed after it has given up its
/// reference, and ends the process where that was the last one.
const FAILED: usize = 64;

/// All outstanding tickets of a client.
#[derive(Default)]
pub struct Tickets {
    outstanding: Mutex<Vec<Outstanding>>,
    failed: Mutex<VecDeque<usize>>,
}

unsafe extern "C" fn ended(_event: Handle, _status: i32, cl: *mut c_void) {
    // SAFETY: the pointer is of an OpenCl that is never freed.
    let cl: &'static OpenCl = unsafe { &*cl.cast_const().cast() };
    cl.tickets.settle(cl);
}

impl Tickets {
    /// Adds a ticket; the reference to the event becomes its own.
    pub(super) fn add(&self, cl: &'static OpenCl, ticket: u64, event: Handle, filled: Option<(u64, u64)>) {
        lock(&self.outstanding).push(Outstanding { ticket, event: event as usize, filled });
        if status(cl, event).is_some() {
            return self.settle(cl);
        }
        if let Some(set) = cl.native.clSetEventCallback {
            // SAFETY: the callback's pointer is never freed.
            unsafe { set(event, cl::COMPLETE, ended as *const c_void, std::ptr::from_ref(cl).cast()) };
        }
    }

    /// The event of an outstanding ticket, with a reference for the caller. None: it has been redeemed.
    pub(super) fn event(&self, cl: &OpenCl, ticket: u64) -> Option<Handle> {
        let all = lock(&self.outstanding);
        let event = all.iter().find(|o| o.ticket == ticket)?.event as Handle;
        // SAFETY: a live event, as the ticket has a reference.
        unsafe { cl.native.clRetainEvent?(event) };
        Some(event)
    }

    /// Redeems the tickets of commands that have ended. Holds the lock while it tells the client, so that no reply of another thread can come between.
    pub fn settle(&self, cl: &OpenCl) {
        let mut done = Vec::new();
        {
            let mut all = lock(&self.outstanding);
            all.retain(|o| {
                let Some(status) = status(cl, o.event as Handle) else { return true };
                if let Some((at, len)) = o.filled {
                    cl.session().push_window(at, len);
                }
                cl.session().notify(ReplyKind::Ticket, status, o.ticket, &[]);
                done.push((o.event, status));
                false
            });
        }
        for (event, status) in done {
            self.release(cl, event, status);
        }
    }

    /// Gives up a reference to an event that has ended.
    pub(super) fn release(&self, cl: &OpenCl, event: usize, status: i32) {
        let released = match status {
            failed if failed < 0 => {
                let mut all = lock(&self.failed);
                all.push_back(event);
                if all.len() > FAILED { all.pop_front() } else { None }
            }
            _ => Some(event),
        };
        if let (Some(event), Some(release)) = (released, cl.native.clReleaseEvent) {
            // SAFETY: the caller's own reference, or one that was left here.
            unsafe { release(event as Handle) };
        }
    }
}

/// The final status of an event; None: it hasn't ended. A callback's status says less: PoCL 3.1 calls back with 0 for what had failed before.
pub(super) fn status(cl: &OpenCl, event: Handle) -> Option<i32> {
    let mut status: i32 = 0;
    let f = cl.native.clGetEventInfo?;
    let (asked, to) = (cl::EVENT_COMMAND_EXECUTION_STATUS, (&raw mut status).cast());
    // SAFETY: a live event; room for its status.
    let asked = unsafe { f(event, asked, size_of::<i32>(), to, std::ptr::null_mut()) };
    match (asked, status) {
        (0, s) if s > 0 => None,
        (0, s) => Some(s),
        (e, _) => Some(e),
    }
}
