// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state that a switch leaves to its successor in memory that the front-end keeps (GET_INFLIGHT_FD,
//! SET_INFLIGHT_FD).
//!
//! Chains are completed in order and batch by batch, so no state of single descriptors is needed: the used index is
//! enough. A split ring has it in its own memory. A packed ring has no index in memory, so its place is stored here
//! around each batch, in the header that the vhost-user specification defines for packed rings (`used_idx` and
//! `used_wrap_counter` with their `old_` copies). If a switch dies within a batch, the successor sees by the first
//! descriptor of the batch whether it became visible; if not, it sends the frames again, and none is lost.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use crate::vring::memory::{GuestMemory, MemoryError, Region};

/// Bytes of a queue's header: features u64, version, desc_num, free_head, old_free_head, used_idx, old_used_idx (u16
/// each), used_wrap_counter, old_used_wrap_counter (u8 each), padding.
const HEADER: u64 = 32;
/// Bytes of one descriptor's state (the larger, packed one).
const DESC: u64 = 32;
const VERSION: usize = 8;
const DESC_NUM: usize = 10;
/// used_idx, old_used_idx, used_wrap_counter, old_used_wrap_counter: one aligned word, so never torn.
const PLACES: usize = 16;

fn queue_bytes(size: u16) -> u64 {
    (HEADER + DESC * u64::from(size)).next_multiple_of(64)
}

#[must_use]
pub fn total_bytes(queues: u16, size: u16) -> u64 {
    queue_bytes(size) * u64::from(queues)
}

/// Makes a file for the state of `queues` queues of `size` entries, all zero.
///
/// # Errors
/// The kernel has no memory.
pub fn create(queues: u16, size: u16) -> io::Result<File> {
    // SAFETY: a new descriptor of our own.
    let file = unsafe {
        let fd = libc::memfd_create(c"tombolo-inflight".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    file.set_len(total_bytes(queues, size))?;
    Ok(file)
}

/// One queue's part of a mapped file.
#[derive(Debug)]
pub struct Queue {
    base: *mut u8,
    size: u16,
    _map: Region,
}

// SAFETY: as for DirtyLog.
unsafe impl Send for Queue {}

/// Maps the parts of all queues of a file that holds `queues` of them with `size` entries each, from `offset` on.
///
/// # Errors
/// The file is too short or can't be mapped.
pub fn map(file: &File, offset: u64, queues: u16, size: u16) -> Result<Vec<Queue>, MemoryError> {
    let len = total_bytes(queues, size);
    let region = Region::map(file, 0, len, 0, offset)?;
    let mem = GuestMemory::new(vec![region.clone()])?;
    (0..u64::from(queues))
        .map(|i| {
            let base = mem
                .at_user(i * queue_bytes(size), queue_bytes(size))
                .filter(|p| (*p as usize) % 8 == 0)
                .ok_or_else(|| io::Error::other("in-flight area is not aligned to 8 bytes"))?;
            Ok(Queue { base, size, _map: region.clone() })
        })
        .collect()
}

impl Queue {
    fn u16_at(&self, byte: usize) -> &AtomicU16 {
        // SAFETY: an even offset within the mapped, 8-aligned header.
        unsafe { AtomicU16::from_ptr(self.base.add(byte).cast()) }
    }

    fn places(&self) -> &AtomicU64 {
        // SAFETY: an offset that is a multiple of 8 within the mapped, 8-aligned header.
        unsafe { AtomicU64::from_ptr(self.base.add(PLACES).cast()) }
    }

    fn set_places(&self, old: u16, new: u16) {
        let word = u64::from(new & 0x7fff)
            | u64::from(old & 0x7fff) << 16
            | u64::from(new >> 15) << 32
            | u64::from(old >> 15) << 40;
        self.places().store(word, Ordering::Release);
    }

    /// Called before a batch becomes visible: it leads from place `old` to place `new` (the high halves of
    /// [`crate::vring::ring::Ring::base`]).
    pub fn begin(&self, old: u16, new: u16) {
        self.set_places(old, new);
        self.u16_at(DESC_NUM).store(self.size, Ordering::Relaxed);
        self.u16_at(VERSION).store(1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Called after the batch became visible.
    pub fn end(&self, new: u16) {
        self.set_places(new, new);
    }

    /// Returns the places before and after a predecessor's last batch; they are equal unless it died within. None: there
    /// was no predecessor.
    #[must_use]
    pub fn places_left(&self) -> Option<(u16, u16)> {
        if self.u16_at(VERSION).load(Ordering::Acquire) != 1 {
            return None;
        }
        let word = self.places().load(Ordering::Acquire);
        let new = (word & 0x7fff) as u16 | ((word >> 32 & 1) as u16) << 15;
        let old = (word >> 16 & 0x7fff) as u16 | ((word >> 40 & 1) as u16) << 15;
        Some((old, new))
    }
}
