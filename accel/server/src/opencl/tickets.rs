// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tickets of transfers: the client gave a part of its window, and wants to know when the device has read or filled it. A ticket is
//! redeemed when its native event has ended: at once by the driver's callback, and at the latest before any reply that could
//! tell the client so by other means.

use super::{Handle, OpenCl, lock};
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

/// All outstanding tickets of a client.
#[derive(Default)]
pub struct Tickets(Mutex<Vec<Outstanding>>);

unsafe extern "C" fn ended(_event: Handle, _status: i32, cl: *mut c_void) {
    // SAFETY: the pointer is of an OpenCl that is never freed.
    let cl: &'static OpenCl = unsafe { &*cl.cast_const().cast() };
    cl.tickets.settle(cl);
}

impl Tickets {
    /// Adds a ticket; the reference to the event becomes its own.
    pub(super) fn add(&self, cl: &'static OpenCl, ticket: u64, event: Handle, filled: Option<(u64, u64)>) {
        lock(&self.0).push(Outstanding { ticket, event: event as usize, filled });
        if let Some(set) = cl.native.clSetEventCallback {
            // SAFETY: the callback's pointer is never freed.
            unsafe { set(event, cl::COMPLETE, ended as *const c_void, std::ptr::from_ref(cl).cast()) };
        }
    }

    /// Redeems the tickets of commands that have ended. Holds the lock while it tells the client, so that no reply of another thread can come between.
    pub fn settle(&self, cl: &OpenCl) {
        let mut done = Vec::new();
        {
            let mut all = lock(&self.0);
            all.retain(|o| {
                let Some(status) = status(cl, o.event) else { return true };
                if let Some((at, len)) = o.filled {
                    cl.session().push_window(at, len);
                }
                cl.session().notify(ReplyKind::Ticket, status, o.ticket, &[]);
                done.push(o.event);
                false
            });
        }
        for event in done {
            if let Some(release) = cl.native.clReleaseEvent {
                // SAFETY: the ticket's own reference.
                unsafe { release(event as Handle) };
            }
        }
    }
}

/// The final status of an event; None: it hasn't ended.
fn status(cl: &OpenCl, event: usize) -> Option<i32> {
    let mut status: i32 = 0;
    let f = cl.native.clGetEventInfo?;
    let (asked, to) = (cl::EVENT_COMMAND_EXECUTION_STATUS, (&raw mut status).cast());
    // SAFETY: a live event; room for its status.
    let asked = unsafe { f(event as Handle, asked, size_of::<i32>(), to, std::ptr::null_mut()) };
    match (asked, status) {
        (0, s) if s > 0 => None,
        (0, s) => Some(s),
        (e, _) => Some(e),
    }
}
