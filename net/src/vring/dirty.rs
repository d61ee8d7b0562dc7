// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The dirty log of a migration (VHOST_F_LOG_ALL, SET_LOG_BASE): one bit per 4 KiB page of guest-physical memory.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::vring::memory::{GuestMemory, MemoryError, Region};

const PAGE: u64 = 4096;
/// The longest log, for addresses of 49 bits.
const LONGEST: u64 = 16 << 30;

/// A mapped log.
#[derive(Debug)]
pub struct DirtyLog {
    base: *mut u8,
    len: u64,
    _map: Region,
}

// SAFETY: the mapping lives as long as the log, and bits are set atomically.
unsafe impl Send for DirtyLog {}
// SAFETY: see Send.
unsafe impl Sync for DirtyLog {}

impl DirtyLog {
    /// Maps `len` bytes of `file` from `offset` on.
    ///
    /// # Errors
    /// It is longer than any guest needs; others as [`Region::map`].
    pub fn map(file: &File, len: u64, offset: u64) -> Result<Self, MemoryError> {
        if len > LONGEST {
            return Err(MemoryError::TooLarge { size: len, most: LONGEST });
        }
        let region = Region::map(file, 0, len, 0, offset)?;
        let base = GuestMemory::new(vec![region.clone()])?
            .at_user(0, len)
            .ok_or_else(|| io::Error::other("log can't be reached"))?;
        Ok(Self { base, len, _map: region })
    }

    /// Marks the pages of `len` bytes at `gpa` as written; pages beyond the log are ignored.
    pub fn mark(&self, gpa: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = gpa.saturating_add(len - 1) / PAGE;
        for page in gpa / PAGE..=last {
            if page / 8 >= self.len {
                return;
            }
            // SAFETY: page / 8 < len, mapped.
            let byte = unsafe { AtomicU8::from_ptr(self.base.add((page / 8) as usize)) };
            byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
        }
    }
}
