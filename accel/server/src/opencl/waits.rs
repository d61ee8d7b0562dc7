// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for an event or a queue. Where the driver calls back, the thread that ends a command answers the client itself; otherwise it would wake the thread
//! that waits inside the driver, which then wakes the client. That thread waits all the same, and answers where a command failed, with the driver's code, and where no
//! callback comes: PoCL 3.1 makes no call for a command that fails.

use super::{Cx, Handle, OpenCl, lock, tickets};
use crate::session::Early;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

/// A queue whose last wait took so long gets a marker, a command that calls back; before short waits it would cost more than it saves.
const LONG: Duration = Duration::from_millis(1);

/// The data of an event's callback: the reply that it sends.
struct Answer {
    early: Arc<Early>,
    cl: &'static OpenCl,
    /// Of a wait for a queue.
    queue: Option<u64>,
}

unsafe extern "C" fn ended(event: Handle, _status: i32, answer: *mut c_void) {
    // SAFETY: from watch(), and the driver calls once.
    let Answer { early, cl, queue } = *unsafe { Box::from_raw(answer.cast::<Answer>()) };
    let succeeded = tickets::status(cl, event) == Some(wire::SUCCESS);
    if succeeded && queue.is_none_or(|queue| cl.late.is_clean(queue)) {
        early.answer(wire::SUCCESS);
    }
}

/// Has the driver answer when the event has ended well, if the client waits.
fn watch(cx: &mut Cx<'_>, event: Handle, queue: Option<u64>) {
    let Some(set) = cx.native().clSetEventCallback else { return };
    let Some(early) = cx.call.early() else { return };
    let answer = Box::into_raw(Box::new(Answer { early, cl: cx.cl, queue }));
    // SAFETY: a live event; the callback frees what it is given.
    if unsafe { set(event, cl::COMPLETE, ended as *const c_void, answer.cast()) } != 0 {
        // SAFETY: the driver didn't take it.
        drop(unsafe { Box::from_raw(answer) });
    }
}

pub(super) fn event(cx: &mut Cx<'_>, event: Handle) -> Result<(), i32> {
    let n = cx.native();
    let (wait, retain, release) = (
        n.clWaitForEvents.ok_or(wire::UNSUPPORTED)?,
        n.clRetainEvent.ok_or(wire::UNSUPPORTED)?,
        n.clReleaseEvent.ok_or(wire::UNSUPPORTED)?,
    );
    cx.may_block()?;
    // SAFETY: a live event, which stays while this thread waits: the client may have its answer and give it up before.
    let status = unsafe {
        retain(event);
        watch(cx, event, None);
        let status = wait(1, &event);
        release(event);
        status
    };
    cx.status(status)
}

/// Waits for all commands of a queue.
pub(super) fn queue(cx: &mut Cx<'_>, id: u64) -> Result<(), i32> {
    let native = cx.get(kind::QUEUE, id)?;
    let n = cx.native();
    let (finish, retain, release) = (
        n.clFinish.ok_or(wire::UNSUPPORTED)?,
        n.clRetainCommandQueue.ok_or(wire::UNSUPPORTED)?,
        n.clReleaseCommandQueue.ok_or(wire::UNSUPPORTED)?,
    );
    let marked = cx.extra(kind::QUEUE, id, |extra| extra.waits_long)?;
    cx.may_block()?;
    let begun = Instant::now();
    // SAFETY: a live queue, which stays while this thread waits, as above.
    let status = unsafe {
        retain(native);
        if marked {
            mark(cx, native, id);
        }
        let status = finish(native);
        release(native);
        status
    };
    let long = begun.elapsed() > LONG;
    if long != marked {
        // It may have been given up meanwhile.
        let _gone = lock(&cx.cl.table).extra_mut(kind::QUEUE, id).map(|extra| extra.waits_long = long);
    }
    cx.status(status)
}

/// Puts a marker behind the queue's commands, and watches it.
fn mark(cx: &mut Cx<'_>, queue: Handle, id: u64) {
    let n = cx.native();
    let (Some(marker), Some(release)) = (n.clEnqueueMarkerWithWaitList, n.clReleaseEvent) else { return };
    let mut event: Handle = null_mut();
    // SAFETY: a live queue, and room for an event, whose reference is given up.
    unsafe {
        if marker(queue, 0, null(), &mut event) == wire::SUCCESS {
            watch(cx, event, Some(id));
            release(event);
        }
    }
}
