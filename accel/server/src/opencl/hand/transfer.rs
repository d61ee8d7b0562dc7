// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes whose bytes travel in the record, long transfers in pieces, mapping, and launches. All other transfers are generated.

use super::Done;
use crate::opencl::stream::{self, Arguments, Piece, Stream};
use crate::opencl::{Cx, Extra, Handle};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

/// Bytes of a record that a command reads until it has ended.
unsafe extern "C" fn on_read(_event: Handle, _status: i32, user: *mut c_void) {
    // SAFETY: from enqueue_write_buffer(), and the driver calls once.
    drop(unsafe { Box::from_raw(user.cast::<Vec<u8>>()) });
}

pub(crate) fn enqueue_write_buffer(cx: &mut Cx<'_>, r: &wire::EnqueueWriteBuffer<'_>) -> Done {
    let f = native!(cx, clEnqueueWriteBuffer);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.command_queue)?, cx.get(kind::MEM, r.buffer)?);
    let (offset, size, blocking) = (r.offset as usize, r.size as usize, r.blocking_write);
    if blocking != 0 {
        cx.may_block()?;
    }
    if r.inline.is_empty() {
        let from = cx.offered(r.data, r.size)?;
        // SAFETY: live handles; the range lies in the buffer (checked before) and in the window.
        return cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| unsafe {
            f(queue, buffer, blocking, offset, size, from, n, list, event)
        });
    }
    cx.same_length(r.inline, r.size)?;
    let bytes = Box::into_raw(Box::new(r.inline.to_vec()));
    let mut native: Handle = null_mut();
    // SAFETY: as above; the bytes live until the command has ended.
    let sent = cx.enqueue_into(&r.waits, r.event, &mut native, |n, list, event| unsafe {
        f(queue, buffer, blocking, offset, size, (*bytes).as_ptr().cast(), n, list, event)
    });
    if sent.is_err() {
        // SAFETY: the driver refused the command and reads no bytes.
        drop(unsafe { Box::from_raw(bytes) });
        return sent;
    }
    let (set, release) = (native!(cx, clSetEventCallback), native!(cx, clReleaseEvent));
    // SAFETY: a live event; the callback frees the bytes. Our reference goes to the table, or is given up.
    unsafe {
        set(native, cl::COMPLETE, on_read as *const c_void, bytes.cast());
        if r.event == 0 {
            release(native);
        }
    }
    if r.event != 0 {
        cx.keep(kind::EVENT, r.event, native, Extra::default())?;
    }
    Ok(())
}

pub(crate) fn enqueue_stream(cx: &mut Cx<'_>, r: &wire::EnqueueStream<'_>) -> Done {
    let f = native!(cx, clEnqueueNativeKernel);
    let (retain, flush) = (native!(cx, clRetainEvent), native!(cx, clFlush));
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let stream = Stream::new(r.writes != 0, r.size as usize);
    cx.cl.streams.add(r.stream, &stream)?;
    let mut arguments = Arguments::new(cx.cl, buffer, r.offset as usize, stream);
    let (len, arguments) = (size_of::<Arguments>(), (&raw mut arguments).cast::<c_void>());
    let (objects, places, mut native) = ([buffer], [arguments], null_mut());
    let sent = cx.enqueue_into(&r.waits, r.event, &mut native, |n, list, event| {
        let (objects, places) = (objects.as_ptr().cast(), places.as_ptr().cast());
        let (run, list, event) = (stream::run as *const c_void, list.cast(), event.cast_const().cast());
        // SAFETY: live handles; the driver copies the arguments, and puts the buffer's address where the buffer stands.
        unsafe { f(queue, run, arguments, len, 1, objects, places, n, list, event) }
    });
    if let Err(code) = sent {
        cx.cl.streams.end(cx.cl, r.stream, code);
        return Err(code);
    }
    if r.event != 0 {
        // SAFETY: a live event; this reference is the table's.
        unsafe { retain(native) };
        cx.keep(kind::EVENT, r.event, native, Extra::default())?;
    }
    cx.cl.streams.enqueued(cx.cl, r.stream, native);
    // A queue that may wait for more commands is told to begin: the client waits for the pieces.
    // SAFETY: a live queue.
    cx.status(unsafe { flush(queue) })
}

pub(crate) fn stream_watch(cx: &mut Cx<'_>, r: &wire::StreamWatch) -> Done {
    let (wait, release) = (native!(cx, clWaitForEvents), native!(cx, clReleaseEvent));
    // It may have ended meanwhile.
    let Ok(event) = cx.cl.streams.event(cx.cl, r.stream) else { return Ok(()) };
    let outcome = cx.may_block().map(|()| {
        // SAFETY: a live event.
        let status = unsafe { wait(1, &event) };
        if status < 0 {
            cx.cl.streams.end(cx.cl, r.stream, status);
        }
    });
    // SAFETY: the reference that event() took.
    unsafe { release(event) };
    outcome
}

pub(crate) fn stream_piece(cx: &mut Cx<'_>, r: &wire::StreamPiece) -> Done {
    let slot = cx.offered(r.data, r.size)? as usize;
    let piece = Piece { slot, at: r.at as usize, len: r.size as usize, ticket: r.ticket };
    cx.cl.streams.get(r.stream)?.put(piece)?;
    // The thread that copies the piece redeems its ticket.
    cx.owed = 0;
    Ok(())
}

pub(crate) fn enqueue_map_home(cx: &mut Cx<'_>, r: &wire::EnqueueMapHome<'_>) -> Done {
    let f = native!(cx, clEnqueueMapBuffer);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    if cx.of(r.buffer, |e| e.home)? == 0 {
        return Err(cl::INVALID_VALUE);
    }
    let (offset, size) = (r.offset as usize, r.size as usize);
    if r.blocking != 0 {
        cx.may_block()?;
    }
    cx.enqueue(&r.waits, r.event, |n, list, event| {
        let mut code = 0;
        // SAFETY: live handles; the range lies in the buffer (checked before).
        unsafe { f(queue, buffer, r.blocking, r.flags, offset, size, n, list, event, &mut code) };
        code
    })
}

pub(crate) fn enqueue_unmap_home(cx: &mut Cx<'_>, r: &wire::EnqueueUnmapHome<'_>) -> Done {
    let f = native!(cx, clEnqueueUnmapMemObject);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let home = cx.of(r.buffer, |e| e.home)?;
    if home == 0 {
        return Err(cl::INVALID_VALUE);
    }
    let mapped = home.wrapping_add(r.offset as usize) as *const c_void;
    // SAFETY: live handles; the driver checks that this address is mapped.
    cx.enqueue(&r.waits, r.event, |n, list, event| unsafe { f(queue, buffer, mapped, n, list, event) })
}

pub(crate) fn enqueue_host(cx: &mut Cx<'_>, r: &wire::EnqueueHost<'_>) -> Done {
    let f = native!(cx, clEnqueueMarkerWithWaitList);
    let queue = cx.get(kind::QUEUE, r.queue)?;
    // SAFETY: a live queue.
    cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| unsafe { f(queue, n, list, event) })
}

pub(crate) fn enqueue_nd_range_kernel(cx: &mut Cx<'_>, r: &wire::EnqueueNDRangeKernel<'_>) -> Done {
    let f = native!(cx, clEnqueueNDRangeKernel);
    let (queue, kernel) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::KERNEL, r.kernel)?);
    if !(1..=3).contains(&r.work_dim) {
        return Err(cl::INVALID_WORK_DIMENSION);
    }
    let sizes = [r.offset, r.global, r.local].map(|t| t.map(|v| v as usize));
    let given = |bit: u32| -> *const c_void {
        if r.present & 1 << bit == 0 { null() } else { sizes[bit as usize].as_ptr().cast() }
    };
    let (offset, global, local) = (given(0), given(1), given(2));
    cx.enqueue(&r.waits, r.event, |n, list, event| {
        // SAFETY: live handles; three numbers each, or null.
        unsafe { f(queue, kernel, r.work_dim, offset, global, local, n, list, event) }
    })
}
