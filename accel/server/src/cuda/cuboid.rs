// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies of cuboids. A record's addresses have its coordinates already; host memory is a range of the window.

use super::Cx;
use super::copy::{finish, refuse_capture, window};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// A copy whose memory is the client's.
pub(super) struct Cuboid {
    native: wire::Memcpy3d,
    /// The range of the window that it writes.
    written: Option<(u64, u64)>,
    /// One side is in the window.
    on_host: bool,
}

/// The bytes between the first and the last; None: more than a number holds, or rows or slices that overlap.
fn span(pitch: usize, rows: usize, copy: &wire::Memcpy3d) -> Option<u64> {
    let (width, height, depth) = (copy.WidthInBytes, copy.Height, copy.Depth);
    if width == 0 || height == 0 || depth == 0 {
        return Some(0);
    }
    if (height > 1 && pitch < width) || (depth > 1 && rows < height) {
        return None;
    }
    let slices = pitch.checked_mul(rows)?.checked_mul(depth - 1)?;
    Some(slices.checked_add(pitch.checked_mul(height - 1)?)?.checked_add(width)? as u64)
}

impl Cuboid {
    pub(super) fn of(cx: &Cx<'_>, copy: &wire::Memcpy3d) -> Result<Cuboid, i32> {
        let len = |pitch, rows| span(pitch, rows, copy).ok_or(cu::CUDA_ERROR_INVALID_VALUE);
        let (from, to) = (len(copy.srcPitch, copy.srcHeight)?, len(copy.dstPitch, copy.dstHeight)?);
        let side = |memory, host: usize, device, len| match memory {
            cu::CU_MEMORYTYPE_DEVICE => cx.bytes(device, len).map(|()| 0),
            cu::CU_MEMORYTYPE_HOST => window(cx, host as u64, len).map(|at| at as usize),
            _ => Err(cu::CUDA_ERROR_INVALID_VALUE),
        };
        // All else of the description is this process's: what a client says of arrays and coordinates is left out.
        let native = wire::Memcpy3d {
            srcMemoryType: copy.srcMemoryType,
            srcHost: side(copy.srcMemoryType, copy.srcHost, copy.srcDevice, from)?,
            srcDevice: copy.srcDevice,
            srcPitch: copy.srcPitch,
            srcHeight: copy.srcHeight,
            dstMemoryType: copy.dstMemoryType,
            dstHost: side(copy.dstMemoryType, copy.dstHost, copy.dstDevice, to)?,
            dstDevice: copy.dstDevice,
            dstPitch: copy.dstPitch,
            dstHeight: copy.dstHeight,
            WidthInBytes: copy.WidthInBytes,
            Height: copy.Height,
            Depth: copy.Depth,
            ..wire::Memcpy3d::default()
        };
        let is_host = |memory| memory == cu::CU_MEMORYTYPE_HOST;
        Ok(Cuboid {
            native,
            written: is_host(copy.dstMemoryType).then_some((copy.dstHost as u64, to)),
            on_host: is_host(copy.srcMemoryType) || is_host(copy.dstMemoryType),
        })
    }

    /// Returns the copy for a node of a graph. A launch of the graph does not bring the window to the server, so one that reads or writes the window needs a
    /// window that both share.
    pub(super) fn in_graph(self, cx: &Cx<'_>) -> Result<wire::Memcpy3d, i32> {
        if self.on_host && !cx.cuda.session().shares_window {
            Err(wire::UNSUPPORTED)
        } else {
            Ok(self.native)
        }
    }
}

pub(super) fn memcpy3_d_async_v2(cx: &mut Cx<'_>, r: &wire::Memcpy3DAsyncV2) -> Result<(), i32> {
    let f = cx.native().cuMemcpy3DAsync_v2.ok_or(wire::UNSUPPORTED)?;
    let stream = cx.maybe(kind::STREAM, r.hStream)?;
    let copy = Cuboid::of(cx, &r.copy)?;
    if copy.on_host {
        refuse_capture(cx, stream)?;
    }
    // SAFETY: the client's memory, and ranges of its window that live until finish() has returned.
    cx.status(unsafe { f((&raw const copy.native).cast(), stream) })?;
    if copy.on_host {
        finish(cx, stream)?;
    }
    if let Some((at, len)) = copy.written {
        cx.cuda.session().push_window(at, len);
    }
    Ok(())
}
