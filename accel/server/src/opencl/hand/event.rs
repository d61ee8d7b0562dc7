// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events and waiting.

use super::Done;
use super::notify::{Notify, on_event, once};
use crate::opencl::{Cx, waits};
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{self as wire, kind};

pub(crate) fn wait_for_events(cx: &mut Cx<'_>, r: &wire::WaitForEvents<'_>) -> Done {
    let f = native!(cx, clWaitForEvents);
    let events = cx.all(kind::EVENT, &r.events).inspect_err(|_| {
        // A posted command that failed: now the client is told of what its queue keeps, too.
        for event in r.events.iter() {
            let queue = cx.extra(kind::EVENT, *event, |e| e.queue).unwrap_or(0);
            let _told = cx.cl.late.check(queue, cx.waited);
        }
    })?;
    if let [event] = events[..] {
        return waits::event(cx, event);
    }
    cx.may_block()?;
    // SAFETY: live events; the list is as long as said.
    cx.status(unsafe { f(events.len() as u32, events.as_ptr()) })
}

pub(crate) fn ticket_wait(cx: &mut Cx<'_>, r: &wire::TicketWait) -> Done {
    let release = native!(cx, clReleaseEvent);
    let Some(event) = cx.cl.tickets.event(cx.cl, r.outstanding) else { return Ok(()) };
    let outcome = cx.may_block();
    if outcome.is_ok() {
        // The ticket tells the client how the command ended.
        let _told = waits::event(cx, event);
    }
    // SAFETY: the reference that event() took.
    unsafe { release(event) };
    outcome
}

pub(crate) fn failed_event(cx: &mut Cx<'_>, r: &wire::FailedEvent) -> Done {
    let (create, set) = (native!(cx, clCreateUserEvent), native!(cx, clSetUserEventStatus));
    let context = cx.get(kind::CONTEXT, r.context)?;
    // SAFETY: a live context.
    cx.create(kind::EVENT, r.new, |code| unsafe { create(context, code) })?;
    // SAFETY: a live event, which is the driver's own kind of user event.
    cx.status(unsafe { set(cx.get(kind::EVENT, r.new)?, r.status.min(-1)) })
}

pub(crate) fn set_event_callback(cx: &mut Cx<'_>, r: &wire::SetEventCallback) -> Done {
    let f = native!(cx, clSetEventCallback);
    let event = cx.get(kind::EVENT, r.event)?;
    let user = once(cx, r.notify);
    // SAFETY: a live event; the callback's data is freed by the callback, or here if the driver refused.
    let status = unsafe { f(event, r.callback_type, on_event as *const c_void, user) };
    if status != 0 {
        // SAFETY: from once(), and the driver didn't take it.
        drop(unsafe { Box::from_raw(user.cast::<Notify>()) });
    }
    cx.status(status)
}
