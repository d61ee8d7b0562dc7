// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges, rectangles and pixels are checked with arithmetic that can't overflow, before the driver sees them.

use super::{Cx, Extra};
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{cl, kind};
use tombolo_accel_spec::{image, rectangle};

/// Returns whether `size` bytes from `offset` lie in `len` bytes.
fn inside(offset: u64, size: u64, len: u64) -> bool {
    offset.checked_add(size).is_some_and(|end| end <= len)
}

impl Cx<'_> {
    pub(super) fn of<T>(&self, mem: u64, f: impl FnOnce(&Extra) -> T) -> Result<T, i32> {
        self.extra(kind::MEM, mem, f)
    }

    /// Refuses an object that is an image, or one that isn't.
    fn is_image(&self, object: u64, wanted: bool) -> Result<(), i32> {
        let is = self.of(object, |e| e.pixel != 0)?;
        if is == wanted { Ok(()) } else { Err(kind::invalid(kind::MEM)) }
    }

    /// Refuses a range that leaves its buffer.
    pub fn check_range(&self, buffer: u64, offset: u64, size: u64) -> Result<(), i32> {
        // Unmapping names one offset twice: it only has to lie inside.
        self.is_image(buffer, false)?;
        let inside =
            self.of(buffer, |e| inside(offset, size, e.size) || offset == size && offset < e.size)?;
        inside.then_some(()).ok_or(cl::INVALID_VALUE)
    }

    /// Refuses a rectangle that leaves its buffer.
    pub fn check_rect(
        &self,
        buffer: u64,
        origin: [u64; 3],
        region: [u64; 3],
        row: u64,
        slice: u64,
    ) -> Result<(), i32> {
        self.is_image(buffer, false)?;
        let end = rectangle::end(origin, region, row, slice).ok_or(cl::INVALID_VALUE)?;
        if end <= self.of(buffer, |e| e.size)? { Ok(()) } else { Err(cl::INVALID_VALUE) }
    }

    /// Refuses a region that leaves its image.
    pub fn check_pixels(&self, image: u64, origin: [u64; 3], region: [u64; 3]) -> Result<(), i32> {
        self.is_image(image, true)?;
        let inside = self.of(image, |e| image::contains(e.extent, origin, region))?;
        inside.then_some(()).ok_or(cl::INVALID_VALUE)
    }

    /// Refuses packed pixels of a region of an image that leave their buffer.
    pub fn check_packed(&self, image: u64, region: [u64; 3], buffer: u64, offset: u64) -> Result<(), i32> {
        let len = self.pixels(image, region)?;
        self.check_range(buffer, offset, len)
    }

    /// The number of bytes of a range.
    pub fn bytes(&self, size: u64) -> Result<u64, i32> {
        Ok(size)
    }

    /// The number of bytes of a rectangle without gaps.
    pub fn volume(&self, region: [u64; 3]) -> Result<u64, i32> {
        rectangle::volume(region).ok_or(cl::INVALID_VALUE)
    }

    /// The number of bytes of a region of an image without gaps.
    pub fn pixels(&self, image: u64, region: [u64; 3]) -> Result<u64, i32> {
        let pixel = self.of(image, |e| e.pixel)?;
        region.iter().try_fold(pixel, |n, r| n.checked_mul(*r)).ok_or(cl::INVALID_VALUE)
    }

    /// The address of a range of the window that the client offers for a transfer.
    pub fn offered(&self, at: u64, len: u64) -> Result<*mut c_void, i32> {
        if at == 0 {
            return Err(cl::INVALID_VALUE);
        }
        Ok(self.cl.session().window.at(at, len).map_err(|_| cl::INVALID_VALUE)?.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_offset_can_leave_a_buffer_by_overflow() {
        assert!(inside(0, 10, 10) && !inside(1, 10, 10) && !inside(u64::MAX, 2, 10));
    }
}
