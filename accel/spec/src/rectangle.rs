// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rectangles in buffers: rows of bytes, a row pitch apart; slices of rows, a slice pitch apart. Client and server judge them alike.

/// The end of a rectangle in bytes; None: it overflows, is empty, or a pitch is smaller than what it separates. Pitches of 0 stand for no gaps.
pub fn end(origin: [u64; 3], region: [u64; 3], row_pitch: u64, slice_pitch: u64) -> Option<u64> {
    if region.contains(&0) {
        return None;
    }
    let row = if row_pitch == 0 { region[0] } else { row_pitch };
    let slice = if slice_pitch == 0 { region[1].checked_mul(row)? } else { slice_pitch };
    if row < region[0] || slice < region[1].checked_mul(row)? {
        return None;
    }
    let z = origin[2].checked_add(region[2] - 1)?.checked_mul(slice)?;
    let y = origin[1].checked_add(region[1] - 1)?.checked_mul(row)?;
    origin[0].checked_add(region[0])?.checked_add(y)?.checked_add(z)
}

/// Bytes of a rectangle without gaps; None: more than a number holds.
pub fn volume(region: [u64; 3]) -> Option<u64> {
    region.iter().try_fold(1u64, |n, v| n.checked_mul(*v))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_offset_or_pitch_can_leave_a_buffer_by_overflow() {
        assert_eq!(end([0; 3], [4, 2, 1], 8, 0), Some(12));
        assert_eq!(end([4, 1, 2], [4, 2, 1], 8, 32), Some(4 + 4 + 16 + 64));
        for bad in [u64::MAX, u64::MAX / 2, 1 << 63] {
            assert_eq!(end([0, bad, 0], [4, 2, 1], 8, 0), None);
            assert_eq!(end([0, 0, bad], [4, 2, 1], 8, 16), None);
            assert_eq!(end([bad, 0, 0], [bad, 2, 2], 0, 0), None);
            assert_eq!(volume([bad, 4, 1]), None);
        }
        assert_eq!(end([0; 3], [4, 2, 1], 3, 0), None);
        assert_eq!(end([0; 3], [4, 0, 1], 0, 0), None);
    }
}
