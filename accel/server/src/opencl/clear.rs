// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a client gets is cleared first: a driver may hand out what a former client, or another program, left on the device.
//! It's done by fill commands on a queue of the server's own, one for each context, and is over before the object exists for the client.

use super::{Cx, Handle, OpenCl, lock};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

#[derive(Default)]
pub struct Queues(Mutex<HashMap<usize, usize>>);

impl Queues {
    /// The client gave a context up.
    pub fn forget(&self, cl: &OpenCl, context: usize) {
        if let Some(queue) = lock(&self.0).remove(&context) {
            cl.release_native(kind::QUEUE, queue);
        }
    }

    fn of(&self, cx: &Cx<'_>, context: Handle) -> Result<Handle, i32> {
        let mut queues = lock(&self.0);
        if let Some(queue) = queues.get(&(context as usize)) {
            return Ok(*queue as Handle);
        }
        let info = cx.native().clGetContextInfo.ok_or(wire::UNSUPPORTED)?;
        let make = cx.native().clCreateCommandQueue.ok_or(wire::UNSUPPORTED)?;
        let mut size = 0;
        // SAFETY: a live context; only the size is asked for.
        cx.status(unsafe { info(context, cl::CONTEXT_DEVICES, 0, null_mut(), &mut size) })?;
        let mut devices: Vec<Handle> = vec![null_mut(); size / size_of::<Handle>()];
        // SAFETY: a live context; the buffer is as long as said.
        cx.status(unsafe {
            info(context, cl::CONTEXT_DEVICES, size, devices.as_mut_ptr().cast(), null_mut())
        })?;
        let device = *devices.first().ok_or(cl::OUT_OF_RESOURCES)?;
        let mut code = 0;
        // SAFETY: a live context and a device of its own.
        let queue = unsafe { make(context, device, 0, &mut code) };
        if queue.is_null() {
            return Err(code);
        }
        queues.insert(context as usize, queue as usize);
        Ok(queue)
    }
}

fn finish(cx: &Cx<'_>, queue: Handle) -> Result<(), i32> {
    let f = cx.native().clFinish.ok_or(wire::UNSUPPORTED)?;
    // SAFETY: a live queue.
    cx.status(unsafe { f(queue) })
}

pub(super) fn buffer(cx: &Cx<'_>, context: Handle, buffer: Handle, size: usize) -> Result<(), i32> {
    let fill = cx.native().clEnqueueFillBuffer.ok_or(wire::UNSUPPORTED)?;
    let queue = cx.cl.queues.of(cx, context)?;
    // A driver may be slow with small patterns, and wants the size to be a multiple of the pattern's.
    let zeros = [0u8; 128];
    let pattern = if size % zeros.len() == 0 { zeros.len() } else { 1 };
    let from: *const c_void = zeros.as_ptr().cast();
    // SAFETY: live handles; the pattern and the buffer are as long as said.
    let status = unsafe { fill(queue, buffer, from, pattern, 0, size, 0, null(), null_mut()) };
    cx.status(status)?;
    finish(cx, queue)
}

pub(super) fn image(cx: &Cx<'_>, context: Handle, image: Handle, extent: [u64; 3]) -> Result<(), i32> {
    let fill = cx.native().clEnqueueFillImage.ok_or(wire::UNSUPPORTED)?;
    let queue = cx.cl.queues.of(cx, context)?;
    let (color, origin) = ([0u32; 4], [0usize; 3]);
    let region = extent.map(|e| e as usize);
    let (color, origin, region) = (color.as_ptr().cast(), origin.as_ptr(), region.as_ptr());
    // SAFETY: live handles; a color of any type has 16 bytes; the region is the whole image.
    let status = unsafe { fill(queue, image, color, origin, region, 0, null(), null_mut()) };
    cx.status(status)?;
    finish(cx, queue)
}
