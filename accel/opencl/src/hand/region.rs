// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Regions of a program's memory, with gaps between their rows or without.

/// A region of a program's memory: rows of rows.
#[derive(Clone, Copy)]
pub struct Host {
    /// The first byte.
    pub pointer: usize,
    /// Bytes of a row.
    pub row: u64,
    /// Rows of a slice.
    pub rows: u64,
    pub slices: u64,
    pub row_pitch: u64,
    pub slice_pitch: u64,
}

impl Host {
    /// Bytes without gaps.
    pub fn flat(pointer: usize, len: u64) -> Host {
        Host { pointer, row: len, rows: 1, slices: 1, row_pitch: len, slice_pitch: len }
    }

    /// All bytes, packed.
    pub fn len(&self) -> u64 {
        self.row.saturating_mul(self.rows).saturating_mul(self.slices)
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the region's bytes follow one another in memory: pitches equal sizes.
    pub fn is_flat(&self) -> bool {
        (self.rows == 1 || self.row_pitch == self.row)
            && (self.slices == 1 || self.slice_pitch == self.row * self.rows)
    }

    fn rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let (slices, rows) = if self.is_flat() { (1, 1) } else { (self.slices, self.rows) };
        (0..slices).flat_map(move |s| {
            (0..rows).map(move |r| {
                let there = self.pointer + (s * self.slice_pitch + r * self.row_pitch) as usize;
                (there, ((s * self.rows + r) * self.row) as usize)
            })
        })
    }

    fn row_len(&self) -> usize {
        if self.is_flat() { self.len() as usize } else { self.row as usize }
    }

    /// Packs the program's bytes.
    ///
    /// # Safety
    /// The region is readable, `to` has room for [`Host::len`] bytes.
    pub unsafe fn gather(&self, to: *mut u8) {
        for (there, packed) in self.rows() {
            // SAFETY: as the caller promises.
            unsafe { std::ptr::copy_nonoverlapping(there as *const u8, to.add(packed), self.row_len()) };
        }
    }

    /// Unpacks into the program's memory.
    ///
    /// # Safety
    /// The region is writable, `from` has [`Host::len`] bytes.
    pub unsafe fn scatter(&self, from: *const u8) {
        for (there, packed) in self.rows() {
            // SAFETY: as the caller promises.
            unsafe { std::ptr::copy_nonoverlapping(from.add(packed), there as *mut u8, self.row_len()) };
        }
    }
}
