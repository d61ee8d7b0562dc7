// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events, waiting, and commands that only OpenCL 1 had by these names.

use crate::rt::{self, Handle, Id, Ref};
use crate::state::{As, Body, Event};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, Ordering};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

/// Waits for events. Those known to be complete need no asking.
pub unsafe extern "C" fn clWaitForEvents(n: u32, list: *const Handle) -> i32 {
    rt::status(|| {
        // SAFETY: as the API says.
        let events = unsafe { rt::list(n, list, kind::EVENT)? };
        let first = events.first().ok_or(cl::INVALID_VALUE)?.event()?.context.obj();
        let mut ids = Vec::with_capacity(events.len());
        for event in &events {
            if event.event()?.context.obj() != first {
                return Err(cl::INVALID_CONTEXT);
            }
            if event.event()?.status.load(Ordering::Acquire) != cl::COMPLETE {
                ids.push(event.id());
            }
        }
        if ids.is_empty() {
            return Ok(());
        }
        rt::call(&wire::WaitForEvents { events: ids.into() })?;
        for event in events {
            event.event()?.status.store(cl::COMPLETE, Ordering::Release);
        }
        Ok(())
    })
}

/// A property of an event. A final status is remembered.
pub unsafe extern "C" fn clGetEventInfo(
    event: Handle,
    param: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    rt::status(|| {
        let event = rt::object(event, kind::EVENT)?;
        let bytes = match param {
            cl::EVENT_COMMAND_EXECUTION_STATUS => {
                let state = event.event()?;
                let mut status = state.status.load(Ordering::Acquire);
                if status > cl::COMPLETE {
                    let connection = rt::connection()?;
                    status = match rt::call(&wire::GetEventInfo { event: event.id(), param }) {
                        Ok(reply) => reply.first_chunk().map(|b| i32::from_le_bytes(*b)).ok_or(wire::LOST)?,
                        // Its command was posted, and the driver refused it.
                        Err(code) if connection.lost().is_none() => code,
                        Err(lost) => return Err(lost),
                    };
                    if status <= cl::COMPLETE {
                        state.status.store(status, Ordering::Release);
                    }
                }
                status.to_ne_bytes().to_vec()
            }
            cl::EVENT_COMMAND_QUEUE
            | cl::EVENT_COMMAND_TYPE
            | cl::EVENT_REFERENCE_COUNT
            | cl::EVENT_CONTEXT => crate::local::answer(event, param)?,
            _ => rt::call(&wire::GetEventInfo { event: event.id(), param })?,
        };
        // SAFETY: as the API says.
        unsafe { rt::answer(&bytes, size, value, size_ret) }
    })
}

/// An event that the program completes.
pub unsafe extern "C" fn clCreateUserEvent(context: Handle, errcode: *mut i32) -> Handle {
    // SAFETY: as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let event = Event {
                context: rt::hold(context),
                queue: None,
                command: cl::COMMAND_USER,
                status: AtomicI32::new(cl::SUBMITTED),
                counted: Some(crate::deferred::new_user_event()?),
            };
            let new = rt::new_object(kind::EVENT, Body::Event(event))?;
            let record = wire::CreateUserEvent { context: context.id(), new: new.id() };
            rt::lost(rt::connection()?.post(&record))?;
            Ok(new.publish())
        })
    }
}

/// Completes a user event, once.
pub unsafe extern "C" fn clSetUserEventStatus(event: Handle, status: i32) -> i32 {
    rt::status(|| {
        let event = rt::object(event, kind::EVENT)?;
        let state = event.event()?;
        if state.command != cl::COMMAND_USER {
            return Err(cl::INVALID_EVENT);
        }
        if status > cl::COMPLETE {
            return Err(cl::INVALID_VALUE);
        }
        let set = state.status.compare_exchange(cl::SUBMITTED, status, Ordering::AcqRel, Ordering::Relaxed);
        set.map_err(|_| wire::UNSUPPORTED)?;
        let record = wire::SetUserEventStatus { event: event.id(), execution_status: status };
        rt::lost(rt::connection()?.post(&record))
    })
}

/// Registers a callback for a status of an event.
pub unsafe extern "C" fn clSetEventCallback(
    event: Handle,
    callback_type: i32,
    f: Option<unsafe extern "C" fn(Handle, i32, *mut c_void)>,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let event = rt::object(event, kind::EVENT)?;
        let f = f.ok_or(cl::INVALID_VALUE)?;
        if !(cl::COMPLETE..=cl::SUBMITTED).contains(&callback_type) {
            return Err(cl::INVALID_VALUE);
        }
        let user = user as usize;
        // The event lives until the callback was called, even if the program gives it up before.
        let held: Ref = rt::hold(event);
        let connection = rt::connection()?;
        let notify = connection.callback(Box::new(move |status, _| {
            // SAFETY: the program registered this function with this pointer.
            unsafe { f(held.obj().handle(), status, user as *mut c_void) };
            false
        }));
        rt::call(&wire::SetEventCallback { event: event.id(), callback_type, notify })
            .map(|_| ())
            .inspect_err(|_| connection.forget_callback(notify))
    })
}

/// A marker, the way of OpenCL 1.
pub unsafe extern "C" fn clEnqueueMarker(queue: Handle, event: *mut Handle) -> i32 {
    if event.is_null() {
        return cl::INVALID_VALUE;
    }
    // SAFETY: as the API says.
    unsafe { crate::stubs::clEnqueueMarkerWithWaitList(queue, 0, std::ptr::null(), event) }
}

/// Waits in the queue, the way of OpenCL 1.
pub unsafe extern "C" fn clEnqueueWaitForEvents(queue: Handle, n: u32, list: *const Handle) -> i32 {
    if n == 0 || list.is_null() {
        return cl::INVALID_EVENT_WAIT_LIST;
    }
    // SAFETY: as the API says.
    unsafe { crate::stubs::clEnqueueBarrierWithWaitList(queue, n, list, std::ptr::null_mut()) }
}

/// A barrier, the way of OpenCL 1.
pub unsafe extern "C" fn clEnqueueBarrier(queue: Handle) -> i32 {
    // SAFETY: no lists.
    unsafe { crate::stubs::clEnqueueBarrierWithWaitList(queue, 0, std::ptr::null(), std::ptr::null_mut()) }
}
