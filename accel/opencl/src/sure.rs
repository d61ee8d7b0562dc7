// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that can't fail, judged by what the client knows. `false` only means that the call waits for the native answer, so
//! every doubt is a `false`.

use crate::rt::Obj;
use crate::state::{As, Body, Mem};
use tombolo_accel_spec::image;
use tombolo_accel_spec::opencl::{self as wire, cl};

/// The flags that restrict the host's access to an object.
const HOST_ACCESS: u64 = cl::MEM_HOST_WRITE_ONLY | cl::MEM_HOST_READ_ONLY | cl::MEM_HOST_NO_ACCESS;

/// Returns whether a queue and an object are of one context.
pub fn same_context(queue: Obj, object: Obj) -> bool {
    match (queue.body().context(), object.body().context()) {
        (Some(a), Some(b)) => a == b,
        _ => false,
    }
}

fn inside(mem: &Mem, offset: u64, size: u64) -> bool {
    mem.object_type == cl::MEM_OBJECT_BUFFER
        && size > 0
        && offset.checked_add(size).is_some_and(|end| end <= mem.size)
}

/// Returns whether all events of a wait list are of the queue's context. The list was checked for live events.
fn waits_ok(queue: Obj, waits: &[u64]) -> bool {
    waits.iter().all(|id| crate::rt::ARENA.by_id(*id).is_some_and(|e| same_context(queue, e)))
}

/// A read or write of a range by the host.
pub fn host_range(queue: Obj, buffer: Obj, offset: u64, size: u64, waits: &[u64]) -> bool {
    let Ok(mem) = buffer.mem() else { return false };
    same_context(queue, buffer)
        && inside(mem, offset, size)
        && mem.flags & HOST_ACCESS == 0
        && mem.parent.is_none()
        && waits_ok(queue, waits)
}

/// clEnqueueFillBuffer
pub fn enqueue_fill_buffer(queue: Obj, buffer: Obj, r: &wire::EnqueueFillBuffer<'_>) -> bool {
    let Ok(mem) = buffer.mem() else { return false };
    same_context(queue, buffer)
        && inside(mem, r.offset, r.size)
        && mem.parent.is_none()
        && r.pattern_size.is_power_of_two()
        && r.pattern_size <= 128
        && r.offset % r.pattern_size == 0
        && r.size % r.pattern_size == 0
        && waits_ok(queue, &r.waits)
}

/// clEnqueueCopyBuffer
pub fn enqueue_copy_buffer(queue: Obj, from: Obj, to: Obj, r: &wire::EnqueueCopyBuffer<'_>) -> bool {
    let (Ok(a), Ok(b)) = (from.mem(), to.mem()) else { return false };
    same_context(queue, from)
        && same_context(queue, to)
        && from != to
        && a.parent.is_none()
        && b.parent.is_none()
        && inside(a, r.src_offset, r.size)
        && inside(b, r.dst_offset, r.size)
        && waits_ok(queue, &r.waits)
}

/// A read, write or copy of pixels that the client found to lie in the image. The only device of a context has images, as one was made.
pub fn pixels(queue: Obj, image: Obj, waits: &[u64]) -> bool {
    let Ok(mem) = image.mem() else { return false };
    mem.is_image()
        && mem.parent.is_none()
        && mem.context.obj().context().is_ok_and(|context| context.devices.len() == 1)
        && same_context(queue, image)
        && waits_ok(queue, waits)
}

/// clEnqueueCopyImage
pub fn enqueue_copy_image(queue: Obj, from: Obj, to: Obj, r: &wire::EnqueueCopyImage<'_>) -> bool {
    let (Ok(a), Ok(b)) = (from.mem(), to.mem()) else { return false };
    pixels(queue, from, &r.waits)
        && pixels(queue, to, &[])
        && from != to
        && a.format == b.format
        && image::contains(a.extent, r.src_origin, r.region)
        && image::contains(b.extent, r.dst_origin, r.region)
}

/// clEnqueueMarkerWithWaitList
pub fn enqueue_marker_with_wait_list(queue: Obj, r: &wire::EnqueueMarkerWithWaitList<'_>) -> bool {
    waits_ok(queue, &r.waits)
}

/// clEnqueueBarrierWithWaitList
pub fn enqueue_barrier_with_wait_list(queue: Obj, r: &wire::EnqueueBarrierWithWaitList<'_>) -> bool {
    waits_ok(queue, &r.waits)
}

/// A launch like one that the driver accepted before, with arguments like those.
pub fn launch(queue: Obj, kernel: Obj, r: &wire::EnqueueNDRangeKernel<'_>) -> bool {
    let (Body::Queue(q), Ok(k)) = (queue.body(), kernel.kernel()) else { return false };
    let dims = r.work_dim as usize;
    let has_local = r.present & 4 != 0;
    let shape = |i: usize| {
        (1..1 << 40).contains(&r.global[i])
            && r.offset[i] < 1 << 40
            && (!has_local || r.local[i] != 0 && r.global[i] % r.local[i] == 0)
    };
    (1..=3).contains(&dims)
        && r.present & 2 != 0
        && (0..dims).all(shape)
        && same_context(queue, kernel)
        && waits_ok(queue, &r.waits)
        && k.learned
            .lock()
            .is_ok_and(|l| l.launched(&(r.work_dim, r.local, crate::rt::ARENA.id(q.device.obj()))))
}
