// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Regions of a program's memory, with gaps between their rows or without.

use crate::state::Mem;
use tombolo_accel_spec::{image, rectangle};

/// A region of a program's memory: rows of rows.
#[derive(Clone, Copy)]
pub struct Host {
    /// The address of the first byte.
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
    /// `len` bytes without gaps.
    pub fn flat(pointer: usize, len: u64) -> Host {
        Host { pointer, row: len, rows: 1, slices: 1, row_pitch: len, slice_pitch: len }
    }

    /// A rectangle of bytes, from `origin` on, with pitches as the API has them: 0 stands for no gaps. None: the API allows no such
    /// rectangle, since it is empty, has a pitch that is too small, or is larger than memory.
    pub fn rectangle(
        pointer: usize,
        origin: [u64; 3],
        region: [u64; 3],
        row_pitch: u64,
        slice_pitch: u64,
    ) -> Option<Host> {
        let [row, rows, slices] = region;
        if region.contains(&0) {
            return None;
        }
        let row_pitch = if row_pitch == 0 { row } else { row_pitch };
        let slice = rows.checked_mul(row_pitch)?;
        let slice_pitch = if slice_pitch == 0 { slice } else { slice_pitch };
        if row_pitch < row || slice_pitch < slice || slice_pitch % row_pitch != 0 {
            return None;
        }
        let start = origin[2]
            .checked_mul(slice_pitch)?
            .checked_add(origin[1].checked_mul(row_pitch)?)?
            .checked_add(origin[0])?;
        rectangle::volume(region)?;
        Some(Host { pointer: pointer + start as usize, row, rows, slices, row_pitch, slice_pitch })
    }

    /// The pixels of a region of an image, with pitches as the API has them: 0 stands for no gaps. Layers of a 1D array lie a slice
    /// pitch apart.
    pub fn pixels(pointer: usize, mem: &Mem, region: [u64; 3], row_pitch: u64, slice_pitch: u64) -> Host {
        let row = region[0] * mem.pixel;
        let row_pitch = if row_pitch == 0 { row } else { row_pitch };
        let (rows, slices) = match image::is_one_dimensional(mem.object_type) {
            true => (1, region[1]),
            false => (region[1], region[2]),
        };
        let slice_pitch = if slice_pitch == 0 { row_pitch * rows } else { slice_pitch };
        Host { pointer, row, rows, slices, row_pitch, slice_pitch }
    }

    /// Bytes without gaps.
    pub fn len(&self) -> u64 {
        self.row.saturating_mul(self.rows).saturating_mul(self.slices)
    }

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
