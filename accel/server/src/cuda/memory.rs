// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client's allocations, by address: a device address that a client names is looked up here before the driver sees it. With unified addresses the driver itself
//! would also take one of this process.

use std::collections::BTreeMap;

/// An allocation, or a variable of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub len: u64,
    /// The object that it ends with: a context, a module, a library.
    pub owner: u64,
    /// Bytes that it was charged for: 0 of a variable, which the client can't free.
    pub charged: u64,
}

/// The allocations of a client. They don't overlap.
#[derive(Debug, Default)]
pub struct Ranges(BTreeMap<u64, Range>);

impl Ranges {
    pub fn insert(&mut self, start: u64, range: Range) {
        self.0.insert(start, range);
    }

    /// Takes out the allocation that begins there, if the client may free it.
    pub fn take(&mut self, start: u64) -> Option<Range> {
        self.0.get(&start).filter(|range| range.charged > 0)?;
        self.0.remove(&start)
    }

    /// Takes all of them out.
    pub fn drain(&mut self) -> Vec<(u64, Range)> {
        std::mem::take(&mut self.0).into_iter().collect()
    }

    /// Returns whether one allocation has all of `len` bytes.
    pub fn has(&self, address: u64, len: u64) -> bool {
        let Some((start, range)) = self.0.range(..=address).next_back() else { return false };
        let at = address - start;
        at <= range.len && range.len - at >= len.max(1)
    }

    /// Takes out all that end with an owner; the bytes that they were charged for.
    pub fn end(&mut self, owner: u64) -> u64 {
        let mut freed = 0;
        self.0.retain(|_, range| {
            let stays = range.owner != owner;
            if !stays {
                freed += range.charged;
            }
            stays
        });
        freed
    }
}

/// The bytes between the first and the last of a rectangle; None: more than a number holds, or rows that overlap.
pub fn rectangle(pitch: u64, width: Option<u64>, height: u64) -> Option<u64> {
    let width = width?;
    match height {
        0 => Some(0),
        1 => Some(width),
        _ if pitch < width => None,
        _ => pitch.checked_mul(height - 1)?.checked_add(width),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> Ranges {
        let mut ranges = Ranges::default();
        ranges.insert(4096, Range { len: 100, owner: 1, charged: 100 });
        ranges.insert(8192, Range { len: 8, owner: 2, charged: 0 });
        ranges
    }

    #[test]
    fn bytes_are_the_clients_only_where_one_allocation_has_all_of_them() {
        let ranges = ranges();
        assert!(ranges.has(4096, 100) && ranges.has(4100, 96) && ranges.has(4195, 1) && ranges.has(4195, 0));
        assert!(!ranges.has(4196, 0) && !ranges.has(4095, 1) && !ranges.has(4100, 97));
        assert!(!ranges.has(4096, u64::MAX) && !ranges.has(u64::MAX, 1) && !ranges.has(0, 0));
    }

    #[test]
    fn a_variable_is_not_freed_and_all_ends_with_its_owner() {
        let mut ranges = ranges();
        assert_eq!((ranges.take(8192), ranges.take(4097)), (None, None));
        assert_eq!(ranges.end(1), 100);
        assert!(!ranges.has(4096, 1) && ranges.has(8192, 8));
        assert_eq!(ranges.take(4096), None);
    }

    #[test]
    fn a_rectangle_that_overflows_is_none() {
        assert_eq!(rectangle(16, Some(4), 3), Some(36));
        assert_eq!(rectangle(0, Some(4), 1), Some(4));
        assert_eq!((rectangle(3, Some(4), 2), rectangle(u64::MAX, Some(4), 3)), (None, None));
        assert_eq!((rectangle(16, None, 3), rectangle(16, Some(4), 0)), (None, Some(0)));
    }
}
