// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of the window: first fit from the front, so that few pages are touched; free neighbours are joined.

use std::collections::BTreeMap;

/// Alignment of every range: what OpenCL wants of the largest type, and a cache line pair.
pub const ALIGN: u64 = 128;

const PAGE: u64 = 4096;

/// The places at which a range may begin.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// At a multiple of this power of two.
    Aligned(u64),
    /// At an offset that makes copies between the range and this address fast: half a page apart, counted within a page. Processors with fast string
    /// copies make `memcpy` ten times slower where the target begins less than a cache line behind the source, counted within a page (seen on
    /// AMD's Zen; glibc bug 30994). Device memory begins at cache lines, as ranges do.
    Beside(usize),
}

/// The allocator of a window that begins at a page.
pub struct Staging {
    free: BTreeMap<u64, u64>,
}

impl Staging {
    /// All of a window of `len` bytes is free, except offset 0, which means 'none' in records.
    pub fn new(len: u64) -> Staging {
        let mut free = BTreeMap::new();
        if len > PAGE {
            free.insert(PAGE, len - PAGE);
        }
        Staging { free }
    }

    /// Takes `len` bytes (at least 1). None: no such range is free now.
    pub fn take(&mut self, len: u64, place: Place) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(ALIGN)?;
        let (align, phase) = match place {
            Place::Aligned(align) => (align.max(ALIGN), 0),
            Place::Beside(address) => (PAGE, (address as u64 + PAGE / 2) % PAGE / ALIGN * ALIGN),
        };
        let (start, room, at) = self.free.iter().find_map(|(&start, &room)| {
            // Ranges begin behind the first page, so this is no less than 0.
            let at = (start - phase).next_multiple_of(align) + phase;
            (at - start <= room && room - (at - start) >= len).then_some((start, room, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        let end = start + room;
        if end > at + len {
            self.free.insert(at + len, end - (at + len));
        }
        Some(at)
    }

    /// Gives a range back: the same offset and length that [`Staging::take`] was asked for.
    pub fn give(&mut self, at: u64, len: u64) {
        let (mut at, mut len) = (at, len.max(1).next_multiple_of(ALIGN));
        if let Some((&before, &room)) = self.free.range(..at).next_back() {
            if before + room == at {
                self.free.remove(&before);
                at = before;
                len += room;
            }
        }
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        self.free.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_all_come_back() {
        let mut s = Staging::new(1 << 20);
        let mut taken = Vec::new();
        for i in 0..200u64 {
            let len = 1 + i * 37 % 5000;
            let at =
                s.take(len, if i % 3 == 0 { Place::Aligned(4096) } else { Place::Aligned(1) }).expect("fits");
            assert!(i % 3 != 0 || at % 4096 == 0);
            assert!(taken.iter().all(|&(a, l): &(u64, u64)| at + len <= a || a + l <= at));
            taken.push((at, len));
            if i % 2 == 0 {
                let (a, l) = taken.swap_remove((i as usize / 2) % taken.len());
                s.give(a, l);
            }
        }
        taken.into_iter().for_each(|(a, l)| s.give(a, l));
        assert_eq!(s.free.into_iter().collect::<Vec<_>>(), [(4096, (1 << 20) - 4096)]);
    }

    #[test]
    fn a_range_beside_an_address_begins_half_a_page_from_it() {
        let mut s = Staging::new(1 << 20);
        for address in [0usize, 16, 100, 2047, 2048, 4095, 0x7f00_1234_5010] {
            for len in [1, 5000, 100_000] {
                let at = s.take(len, Place::Beside(address)).expect("fits");
                let apart = (at + 4096 - address as u64 % 4096) % 4096;
                assert!(at % ALIGN == 0 && (2048 - 128..=2048).contains(&apart), "{address:#x}: {apart}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut s = Staging::new(8192);
        assert_eq!(s.take(4097, Place::Aligned(1)), None);
        assert_eq!(s.take(u64::MAX, Place::Aligned(1)), None);
        assert_eq!(s.take(4096, Place::Aligned(1)), Some(4096));
        assert_eq!(s.take(1, Place::Aligned(1)), None);
    }
}
