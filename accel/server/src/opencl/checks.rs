// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges, rectangles and pixels are checked with arithmetic that can't overflow, before the driver sees them.

use super::{Cx, Extra, VALUE};
use tombolo_accel_spec::opencl::kind;

/// Whether `size` bytes from `offset` lie in `len` bytes.
fn inside(offset: u64, size: u64, len: u64) -> bool {
    offset.checked_add(size).is_some_and(|end| end <= len)
}

/// The end of a rectangle in a buffer, in bytes; None: it overflows, is empty, or its pitches are smaller than its rows.
fn rectangle_end(origin: [u64; 3], region: [u64; 3], row: u64, slice: u64) -> Option<u64> {
    if region.contains(&0) {
        return None;
    }
    let row = if row == 0 { region[0] } else { row };
    let slice = if slice == 0 { region[1].checked_mul(row)? } else { slice };
    if row < region[0] || slice < region[1].checked_mul(row)? {
        return None;
    }
    let z = origin[2].checked_add(region[2] - 1)?.checked_mul(slice)?;
    let y = origin[1].checked_add(region[1] - 1)?.checked_mul(row)?;
    origin[0].checked_add(region[0])?.checked_add(y)?.checked_add(z)
}

impl Cx<'_> {
    pub(super) fn of<T>(&self, mem: u64, f: impl FnOnce(&Extra) -> T) -> Result<T, i32> {
        self.extra(kind::MEM, mem, f)
    }

    /// An object is an image, or is none.
    fn is_image(&self, object: u64, wanted: bool) -> Result<(), i32> {
        let is = self.of(object, |e| e.pixel != 0)?;
        if is == wanted { Ok(()) } else { Err(kind::invalid(kind::MEM)) }
    }

    /// A range lies in a buffer.
    pub fn check_range(&self, buffer: u64, offset: u64, size: u64) -> Result<(), i32> {
        // Unmapping names one offset twice: it only has to lie inside.
        self.is_image(buffer, false)?;
        let inside =
            self.of(buffer, |e| inside(offset, size, e.size) || offset == size && offset < e.size)?;
        inside.then_some(()).ok_or(VALUE)
    }

    /// A rectangle lies in a buffer.
    pub fn check_rect(
        &self,
        buffer: u64,
        origin: [u64; 3],
        region: [u64; 3],
        row: u64,
        slice: u64,
    ) -> Result<(), i32> {
        self.is_image(buffer, false)?;
        let end = rectangle_end(origin, region, row, slice).ok_or(VALUE)?;
        if end <= self.of(buffer, |e| e.size)? { Ok(()) } else { Err(VALUE) }
    }

    /// A region lies in an image.
    pub fn check_pixels(&self, image: u64, origin: [u64; 3], region: [u64; 3]) -> Result<(), i32> {
        self.is_image(image, true)?;
        let inside = self.of(image, |e| {
            (0..3).all(|i| region[i] != 0 && inside(origin[i], region[i], e.extent[i].max(1)))
        })?;
        inside.then_some(()).ok_or(VALUE)
    }

    /// The packed pixels of a region of an image lie in a buffer.
    pub fn check_packed(&self, image: u64, region: [u64; 3], buffer: u64, offset: u64) -> Result<(), i32> {
        let len = self.packed(image, region)?;
        self.check_range(buffer, offset, len)
    }

    /// Bytes of the packed pixels of a region of an image.
    pub fn packed(&self, image: u64, region: [u64; 3]) -> Result<u64, i32> {
        let pixel = self.of(image, |e| e.pixel)?;
        region.iter().try_fold(pixel, |n, r| n.checked_mul(*r)).ok_or(VALUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_offset_or_pitch_can_leave_a_buffer_by_overflow() {
        assert!(inside(0, 10, 10) && !inside(1, 10, 10) && !inside(u64::MAX, 2, 10));
        assert_eq!(rectangle_end([0; 3], [4, 2, 1], 8, 0), Some(12));
        assert_eq!(rectangle_end([4, 1, 2], [4, 2, 1], 8, 32), Some(4 + 4 + 16 + 64));
        for bad in [u64::MAX, u64::MAX / 2, 1 << 63] {
            assert_eq!(rectangle_end([0, bad, 0], [4, 2, 1], 8, 0), None);
            assert_eq!(rectangle_end([0, 0, bad], [4, 2, 1], 8, 16), None);
            assert_eq!(rectangle_end([bad, 0, 0], [bad, 2, 2], 0, 0), None);
        }
        assert_eq!(rectangle_end([0; 3], [4, 2, 1], 3, 0), None);
        assert_eq!(rectangle_end([0; 3], [4, 0, 1], 0, 0), None);
    }
}
