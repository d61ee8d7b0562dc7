// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses. Device memory is a reservation of the host's address space: a device address is a host address, so copies are copies and managed and
//! pinned memory are plain memory. A bit for each 256 bytes says what is allocated; a kernel's access outside is the fault that a GPU reports.
//! Shared, local and parameter memory are windows beyond every host address.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

pub const SHARED_WINDOW: u64 = 1 << 48;
pub const LOCAL_WINDOW: u64 = 2 << 48;
pub const PARAM_WINDOW: u64 = 3 << 48;
/// Addresses of functions.
pub const CODE_WINDOW: u64 = 4 << 48;

const PAGE: usize = 4096;
const GRANULE: usize = 256;
/// cuMemAlloc's alignment.
pub const ALIGNMENT: usize = 512;

pub struct Arena {
    base: usize,
    size: usize,
    granules: &'static [AtomicU64],
    blocks: Mutex<Blocks>,
    /// Host memory that was registered: start and end.
    registered: RwLock<BTreeMap<u64, u64>>,
}

struct Blocks {
    /// Start and length of what is allocated.
    used: BTreeMap<usize, usize>,
    free: BTreeMap<usize, usize>,
}

/// Anonymous memory that costs nothing until it is touched.
fn reserve(size: usize, access: libc::c_int) -> std::io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private mapping; no address is given.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(at as usize) }
}

const ACCESS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

impl Arena {
    /// Lives as long as the process, as device memory does.
    pub fn new(size: usize) -> std::io::Result<Arena> {
        // Memory that may be written to counts against RLIMIT_DATA, so that comes with each allocation.
        let base = reserve(size, libc::PROT_NONE)?;
        let words = size / GRANULE / 64;
        let map = reserve(words * 8, ACCESS)?;
        // SAFETY: a zeroed mapping of this size that is never unmapped; AtomicU64 has u64's layout.
        let granules = unsafe { std::slice::from_raw_parts(map as *const AtomicU64, words) };
        let blocks = Mutex::new(Blocks { used: BTreeMap::new(), free: BTreeMap::from([(base, size)]) });
        Ok(Arena { base, size, granules, blocks, registered: RwLock::default() })
    }

    /// Zeroed memory; None when no gap is large enough.
    pub fn allocate(&self, bytes: usize, align: usize) -> Option<u64> {
        let align = align.max(ALIGNMENT);
        let len = bytes.max(1).checked_next_multiple_of(GRANULE)?;
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (gap, gap_len, start) = blocks.free.iter().find_map(|(&gap, &gap_len)| {
            let start = gap.next_multiple_of(align);
            (start + len <= gap + gap_len).then_some((gap, gap_len, start))
        })?;
        let pages = (start & !(PAGE - 1), (start + len).next_multiple_of(PAGE));
        // SAFETY: pages of the arena, which others that lie in them may use already.
        if unsafe { libc::mprotect(pages.0 as *mut libc::c_void, pages.1 - pages.0, ACCESS) } < 0 {
            return None;
        }
        blocks.free.remove(&gap);
        if start > gap {
            blocks.free.insert(gap, start - gap);
        }
        if start + len < gap + gap_len {
            blocks.free.insert(start + len, gap + gap_len - start - len);
        }
        blocks.used.insert(start, bytes);
        self.mark(start, len, true);
        Some(start as u64)
    }

    /// Returns the size of what was allocated at this very address.
    pub fn release(&self, address: u64) -> Option<usize> {
        let start = address as usize;
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = blocks.used.remove(&start)?;
        let len = bytes.max(1).next_multiple_of(GRANULE);
        self.mark(start, len, false);
        self.clear(start, len);
        let (mut start, mut len) = (start, len);
        if let Some((&before, &before_len)) = blocks.free.range(..start).next_back() {
            if before + before_len == start {
                blocks.free.remove(&before);
                (start, len) = (before, len + before_len);
            }
        }
        if let Some(after_len) = blocks.free.remove(&(start + len)) {
            len += after_len;
        }
        blocks.free.insert(start, len);
        Some(bytes)
    }

    /// Zeroes what is given back: whole pages return to the host.
    fn clear(&self, start: usize, len: usize) {
        let (first, last) = (start.next_multiple_of(4096), (start + len) & !4095);
        // SAFETY: the range lies in the arena and is no longer allocated; pages of an anonymous mapping read as zero after MADV_DONTNEED.
        unsafe {
            if first < last {
                libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_DONTNEED);
                std::ptr::write_bytes(start as *mut u8, 0, first - start);
                std::ptr::write_bytes(last as *mut u8, 0, start + len - last);
            } else {
                std::ptr::write_bytes(start as *mut u8, 0, len);
            }
        }
    }

    fn mark(&self, start: usize, len: usize, used: bool) {
        let first = (start - self.base) / GRANULE;
        let end = first + len / GRANULE;
        let mut at = first;
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            if used {
                self.granules[at / 64].fetch_or(mask, Ordering::Relaxed);
            } else {
                self.granules[at / 64].fetch_and(!mask, Ordering::Relaxed);
            }
            at += bits;
        }
    }

    /// Start and size of the allocation that holds an address.
    pub fn find(&self, address: u64) -> Option<(u64, usize)> {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (&start, &bytes) = blocks.used.range(..=address as usize).next_back()?;
        (address as usize - start < bytes.max(1)).then_some((start as u64, bytes))
    }

    /// Returns whether any of these bytes is an address of device memory, allocated or not.
    pub fn reaches(&self, address: u64, bytes: usize) -> bool {
        let (start, end) = (self.base as u64, (self.base + self.size) as u64);
        bytes > 0 && address < end && address.saturating_add(bytes as u64) > start
    }

    /// Lets kernels reach host memory. The caller keeps it mapped until `unregister`.
    pub fn register(&self, start: u64, len: u64) {
        self.registered
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(start, start.saturating_add(len));
    }

    pub fn unregister(&self, start: u64) -> bool {
        self.registered.write().unwrap_or_else(PoisonError::into_inner).remove(&start).is_some()
    }

    pub fn registered(&self, address: u64) -> Option<(u64, u64)> {
        let registered = self.registered.read().unwrap_or_else(PoisonError::into_inner);
        registered
            .range(..=address)
            .next_back()
            .map(|(&start, &end)| (start, end))
            .filter(|&(_, end)| address < end)
    }

    /// May a kernel read and write these bytes? `len` is at most 16.
    #[inline(always)]
    pub fn valid(&self, address: u64, len: usize) -> bool {
        let offset = (address as usize).wrapping_sub(self.base);
        if offset >= self.size - 16 {
            return self.registered(address).is_some_and(|(_, end)| address + len as u64 <= end);
        }
        let allocated = |offset: usize| {
            self.granules[offset / GRANULE / 64].load(Ordering::Relaxed) >> (offset / GRANULE % 64) & 1 != 0
        };
        allocated(offset) && (offset % GRANULE + len <= GRANULE || allocated(offset + len - 1))
    }
}
