// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies and fills.

use super::super::memory::{self, Way};
use super::super::work::{Copy, Fill};
use super::super::{Handle, INVALID_VALUE, NOT_SUPPORTED, Result};
use super::words;

/// One side of a copy, as 64-bit words describe it: memory, address on the host and on the device, coordinates, pitch and rows of a slice. Arrays are not there.
struct Side {
    memory: u32,
    host: u64,
    device: u64,
    at: [u64; 3],
    pitch: u64,
    rows: u64,
}

impl Side {
    /// The address of its first byte, and what lies between slices.
    fn start(&self) -> Result<(u64, u64)> {
        let base = match self.memory {
            1 => self.host,
            2 | 4 => self.device,
            _ => return Err(NOT_SUPPORTED),
        };
        let slice = self.pitch.checked_mul(self.rows).ok_or(INVALID_VALUE)?;
        let [x, y, z] = self.at;
        let before = z.checked_mul(slice).zip(y.checked_mul(self.pitch));
        let start = before.and_then(|(z, y)| base.checked_add(z)?.checked_add(y)?.checked_add(x));
        Ok((start.ok_or(INVALID_VALUE)?, slice))
    }
}

/// A copy whose rows and slices don't overlap.
fn copy_of(from: &Side, to: &Side, [width, height, depth]: [u64; 3]) -> Result<(Copy, Way)> {
    let overlaps = |side: &Side| (height > 1 && side.pitch < width) || (depth > 1 && side.rows < height);
    if overlaps(from) || overlaps(to) {
        return Err(INVALID_VALUE);
    }
    let (start, slice) = from.start()?;
    let (to_start, to_slice) = to.start()?;
    let copy = Copy {
        from: start,
        to: to_start,
        from_pitch: from.pitch as usize,
        to_pitch: to.pitch as usize,
        from_slice: slice as usize,
        to_slice: to_slice as usize,
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    };
    Ok((copy, way(from.memory, to.memory)))
}

fn or(value: u64, default: u64) -> u64 {
    if value == 0 { default } else { value }
}

/// CUDA_MEMCPY2D
fn rectangle(from: *const u64) -> Result<(Copy, Way)> {
    let w: [u64; 16] = words(from)?;
    let side = |at: usize| Side {
        memory: w[at + 2] as u32,
        host: w[at + 3],
        device: w[at + 4],
        at: [w[at], w[at + 1], 0],
        pitch: or(w[at + 6], w[14]),
        rows: w[15],
    };
    copy_of(&side(0), &side(7), [w[14], w[15], 1])
}

fn way(from: u32, to: u32) -> Way {
    match (from, to) {
        (2, 2) => Way::OnDevice,
        (2, _) => Way::ToHost,
        (_, 2) => Way::ToDevice,
        _ => Way::Any,
    }
}

/// CUDA_MEMCPY3D
pub fn cuboid(from: *const u64) -> Result<(Copy, Way)> {
    let w: [u64; 25] = words(from)?;
    let side = |at: usize| Side {
        memory: w[at + 4] as u32,
        host: w[at + 5],
        device: w[at + 6],
        at: [w[at], w[at + 1], w[at + 2]],
        pitch: or(w[at + 9], w[22]),
        rows: or(w[at + 10], w[23]),
    };
    copy_of(&side(0), &side(11), [w[22], w[23], w[24]])
}

fn one(to: u64, value: u32, element: usize, count: usize) -> Fill {
    Fill { to, pitch: 0, value, element, width: count, height: 1 }
}

pub fn many(to: u64, pitch: usize, value: u32, element: usize, width: usize, height: usize) -> Fill {
    Fill { to, pitch, value, element, width, height }
}

fn copy_linear(to: u64, from: u64, bytes: usize, way: Way) -> Result {
    memory::copy(Copy::linear(to, from, bytes), way)
}

fn copy_linear_async(to: u64, from: u64, bytes: usize, way: Way, stream: Handle) -> Result {
    memory::copy_async(Copy::linear(to, from, bytes), way, stream)
}

api! {
    4000 cuMemcpy / cuMemcpy_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::Any) }
    3020 cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::ToDevice) }
    3020 cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::ToHost) }
    3020 cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::OnDevice) }
    4000 cuMemcpyAsync / cuMemcpyAsync_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::Any, stream) }
    3020 cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::ToDevice, stream) }
    3020 cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::ToHost, stream) }
    3020 cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::OnDevice, stream) }
    3020 cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds: (what: *const u64) { let (copy, way) = rectangle(what)?; memory::copy(copy, way) }
    3020 cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds: (what: *const u64) { let (copy, way) = rectangle(what)?; memory::copy(copy, way) }
    3020 cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz: (what: *const u64, stream: Handle) { let (copy, way) = rectangle(what)?; memory::copy_async(copy, way, stream) }
    3020 cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds: (what: *const u64) { let (copy, way) = cuboid(what)?; memory::copy(copy, way) }
    3020 cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz: (what: *const u64, stream: Handle) { let (copy, way) = cuboid(what)?; memory::copy_async(copy, way, stream) }
    3020 cuMemsetD8_v2 / cuMemsetD8_v2_ptds: (to: u64, value: u8, count: usize) { memory::fill(one(to, value.into(), 1, count), None) }
    3020 cuMemsetD16_v2 / cuMemsetD16_v2_ptds: (to: u64, value: u16, count: usize) { memory::fill(one(to, value.into(), 2, count), None) }
    3020 cuMemsetD32_v2 / cuMemsetD32_v2_ptds: (to: u64, value: u32, count: usize) { memory::fill(one(to, value, 4, count), None) }
    3020 cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds: (to: u64, pitch: usize, value: u8, width: usize, height: usize) { memory::fill(many(to, pitch, value.into(), 1, width, height), None) }
    3020 cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds: (to: u64, pitch: usize, value: u32, width: usize, height: usize) { memory::fill(many(to, pitch, value, 4, width, height), None) }
    3020 cuMemsetD8Async / cuMemsetD8Async_ptsz: (to: u64, value: u8, count: usize, stream: Handle) { memory::fill(one(to, value.into(), 1, count), Some(stream)) }
    3020 cuMemsetD16Async / cuMemsetD16Async_ptsz: (to: u64, value: u16, count: usize, stream: Handle) { memory::fill(one(to, value.into(), 2, count), Some(stream)) }
    3020 cuMemsetD32Async / cuMemsetD32Async_ptsz: (to: u64, value: u32, count: usize, stream: Handle) { memory::fill(one(to, value, 4, count), Some(stream)) }
    3020 cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz: (to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) { memory::fill(many(to, pitch, value.into(), 1, width, height), Some(stream)) }
    3020 cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz: (to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) { memory::fill(many(to, pitch, value, 4, width, height), Some(stream)) }
    8000 cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz: (_address: u64, _bytes: usize, _device: i32, _stream: Handle) { Ok(()) }
    12020 cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz: (_address: u64, _bytes: usize, _location: u64, _flags: u32, _stream: Handle) { Ok(()) }
    8000 cuMemAdvise: (_address: u64, _bytes: usize, _advice: u32, _device: i32) { Ok(()) }
    12020 cuMemAdvise_v2: (_address: u64, _bytes: usize, _advice: u32, _location: u64) { Ok(()) }
}
