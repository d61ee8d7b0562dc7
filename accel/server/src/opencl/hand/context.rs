// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contexts and queues.

use super::Done;
use super::notify::{on_context, once};
use crate::opencl::late::NO_QUEUE;
use crate::opencl::waits;
use crate::opencl::{Cx, Handle, lock};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

/// A context's properties for the driver: ours name the platform by id. Nothing else may point anywhere.
fn context_properties(cx: &Cx<'_>, platform: u64, given: &[i64]) -> Result<Vec<isize>, i32> {
    let mut out = Vec::new();
    if platform != 0 {
        out.extend([cl::CONTEXT_PLATFORM as isize, cx.get(kind::PLATFORM, platform)? as isize]);
    }
    for pair in given.chunks(2) {
        match *pair {
            [key @ cl::CONTEXT_INTEROP_USER_SYNC, v] => out.extend([key as isize, v as isize]),
            [0] => {}
            _ => return Err(cl::INVALID_PROPERTY),
        }
    }
    out.push(0);
    Ok(out)
}

fn context_notify(cx: &Cx<'_>, number: u64) -> (*const c_void, *const c_void) {
    if number == 0 { (null(), null()) } else { (on_context as *const c_void, once(cx, number)) }
}

pub(crate) fn create_context(cx: &mut Cx<'_>, r: &wire::CreateContext<'_>) -> Done {
    let f = native!(cx, clCreateContext);
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let properties = context_properties(cx, r.platform, &r.properties)?;
    let (notify, user) = context_notify(cx, r.notify);
    cx.create(kind::CONTEXT, r.new, |code| {
        let properties = if properties.len() > 1 { properties.as_ptr().cast() } else { null() };
        // SAFETY: lists as long as said; the callback's data is never freed.
        unsafe { f(properties, devices.len() as u32, devices.as_ptr(), notify, user, code) }
    })
}

pub(crate) fn create_context_from_type(cx: &mut Cx<'_>, r: &wire::CreateContextFromType<'_>) -> Done {
    let f = native!(cx, clCreateContextFromType);
    let properties = context_properties(cx, r.platform, &r.properties)?;
    let (notify, user) = context_notify(cx, r.notify);
    cx.create(kind::CONTEXT, r.new, |code| {
        // SAFETY: as above.
        unsafe { f(properties.as_ptr().cast(), r.device_type, notify, user, code) }
    })
}

/// A property of a queue. The device's default queue is told by its id; 0: none that is the client's.
pub(crate) fn get_command_queue_info(cx: &mut Cx<'_>, r: &wire::GetCommandQueueInfo) -> Done {
    let f = native!(cx, clGetCommandQueueInfo);
    let queue = cx.get(kind::QUEUE, r.command_queue)?;
    // Context, device and references are the client's to answer; this names a queue.
    let local = [cl::QUEUE_CONTEXT, cl::QUEUE_DEVICE, cl::QUEUE_REFERENCE_COUNT];
    if r.param != cl::QUEUE_DEVICE_DEFAULT {
        // SAFETY: a live queue; buffers are as long as said.
        return cx.info(r.param, &local, |size, value, ret| unsafe { f(queue, r.param, size, value, ret) });
    }
    let mut default: Handle = null_mut();
    let room = size_of::<Handle>();
    // SAFETY: a live queue; room for a handle.
    cx.status(unsafe { f(queue, r.param, room, (&raw mut default).cast(), null_mut()) })?;
    let id = lock(&cx.cl.table).id_of(kind::QUEUE, default as usize).unwrap_or(0);
    cx.reply().u64(id);
    Ok(())
}

pub(crate) fn finish(cx: &mut Cx<'_>, r: &wire::Finish) -> Done {
    waits::queue(cx, r.command_queue)?;
    let late = &cx.cl.late;
    late.check(r.command_queue, cx.waited).and_then(|()| late.check(NO_QUEUE, cx.waited))
}
