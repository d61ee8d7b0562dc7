// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies between the window and device memory.

use super::{Cx, Handle};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// Bytes that a reply may carry.
const IN_REPLY: u64 = 64 << 10;

/// Bytes of the window, or of the record, are not pinned: the driver has read or written them when this returns, so the client may use them again. In a capture they would be
/// read later.
pub(super) fn finish(cx: &mut Cx<'_>, stream: Handle) -> Result<(), i32> {
    cx.blocks.set(true);
    // The stream may wait for the client's answer, which another thread must read then.
    if cx.cuda.turns.used() {
        cx.may_block()?;
    }
    let f = cx.native().cuStreamSynchronize.ok_or(wire::UNSUPPORTED)?;
    // SAFETY: a live stream, or the context's.
    cx.status(unsafe { f(stream) })
}

pub(super) fn refuse_capture(cx: &Cx<'_>, stream: Handle) -> Result<(), i32> {
    if is_captured(cx, stream)? { Err(cu::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Returns whether what is put into a stream becomes a graph's.
pub(super) fn is_captured(cx: &Cx<'_>, stream: Handle) -> Result<bool, i32> {
    let Some(f) = cx.native().cuStreamIsCapturing else { return Ok(false) };
    let mut captured = 0;
    // SAFETY: a live stream, or the context's; room for a number.
    cx.status(unsafe { f(stream, &mut captured) })?;
    Ok(captured != 0)
}

/// The range of the window that a copy names.
pub(super) fn window(cx: &Cx<'_>, offset: u64, len: u64) -> Result<*mut u8, i32> {
    cx.cuda.session().window.at(offset, len).map_err(|_| cu::CUDA_ERROR_INVALID_VALUE)
}

/// Whether a copy is one of the context's own stream, which is never captured: a driver waits for that in this thread, and when it returns it has read or written the bytes.
/// Where the stream may wait for the client, another thread must read the client's answer meanwhile.
fn is_at_once(cx: &Cx<'_>, stream: u64) -> bool {
    let at_once = stream == 0 && !cx.cuda.turns.used();
    if at_once {
        cx.blocks.set(true);
    }
    at_once
}

/// A copy to the device that has ended with the call.
fn up(cx: &mut Cx<'_>, to: u64, from: *const u8, len: usize, stream: u64) -> Result<(), i32> {
    if let Some(f) = cx.native().cuMemcpyHtoD_v2.filter(|_| is_at_once(cx, stream)) {
        // SAFETY: the client's memory, and so many bytes that live during the call.
        return cx.status(unsafe { f(to, from.cast(), len) });
    }
    let f = cx.native().cuMemcpyHtoDAsync_v2.ok_or(wire::UNSUPPORTED)?;
    let stream = cx.maybe(kind::STREAM, stream)?;
    refuse_capture(cx, stream)?;
    // SAFETY: the client's memory, and so many bytes that live until finish() has returned.
    cx.status(unsafe { f(to, from.cast(), len, stream) })?;
    finish(cx, stream)
}

/// A copy from the device that has ended with the call.
fn down(cx: &mut Cx<'_>, to: *mut u8, from: u64, len: usize, stream: u64) -> Result<(), i32> {
    let to = to.cast_const().cast();
    if let Some(f) = cx.native().cuMemcpyDtoH_v2.filter(|_| is_at_once(cx, stream)) {
        // SAFETY: the client's memory; room for so many bytes.
        return cx.status(unsafe { f(to, from, len) });
    }
    let f = cx.native().cuMemcpyDtoHAsync_v2.ok_or(wire::UNSUPPORTED)?;
    let stream = cx.maybe(kind::STREAM, stream)?;
    refuse_capture(cx, stream)?;
    // SAFETY: the client's memory; room for so many bytes until finish() has returned.
    cx.status(unsafe { f(to, from, len, stream) })?;
    finish(cx, stream)
}

pub(super) fn memcpy_hto_d_async_v2(cx: &mut Cx<'_>, r: &wire::MemcpyHtoDAsyncV2<'_>) -> Result<(), i32> {
    cx.bytes(r.dstDevice, r.ByteCount)?;
    let from = match r.bytes.len() as u64 {
        0 => window(cx, r.data, r.ByteCount)?.cast_const(),
        len if len == r.ByteCount => r.bytes.as_ptr(),
        _ => return Err(cu::CUDA_ERROR_INVALID_VALUE),
    };
    up(cx, r.dstDevice, from, r.ByteCount as usize, r.hStream)
}

pub(super) fn memcpy_dto_h_async_v2(cx: &mut Cx<'_>, r: &wire::MemcpyDtoHAsyncV2) -> Result<(), i32> {
    cx.bytes(r.srcDevice, r.ByteCount)?;
    let len = r.ByteCount as usize;
    if r.data != 0 {
        let to = window(cx, r.data, r.ByteCount)?;
        down(cx, to, r.srcDevice, len, r.hStream)?;
        cx.cuda.session().push_window(r.data, r.ByteCount);
        return Ok(());
    }
    if r.ByteCount > IN_REPLY {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let mut bytes = vec![0u8; len];
    down(cx, bytes.as_mut_ptr(), r.srcDevice, len, r.hStream)?;
    cx.reply.extend_from_slice(&bytes);
    Ok(())
}
