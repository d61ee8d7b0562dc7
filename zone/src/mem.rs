// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All accesses to memory that other machines write.
//!
//! [`SharedMem`] is a shared mapping of (part of) a file. All access is by atomic loads and stores through bounds-checked offsets: no
//! reference to the memory's contents ever exists as plain Rust data, so no store of another member can cause undefined behaviour here.
//! Code that needs a structure copies it out ([`SharedMem::read`]) and checks the copy.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::{Error, Result};
use tombolo_sigbus::Watch;

/// Alignment of mappings, so that files in the zone can be mapped with huge pages.
const ALIGN: usize = 2 << 20;

/// A shared mapping. Dropping it unmaps.
pub struct SharedMem {
    ptr: NonNull<u8>,
    len: usize,
    writable: bool,
    /// `None`: the file is sealed, so no process can cut it short.
    watch: Option<Watch>,
}

// SAFETY: the mapping is process-wide and all access is atomic.
unsafe impl Send for SharedMem {}
// SAFETY: as above.
unsafe impl Sync for SharedMem {}

impl SharedMem {
    /// Maps `len` bytes of `fd` from `offset` on (both multiples of the file's page size), at an address that is a multiple of
    /// 2 MiB and of the file's page size.
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: u64, writable: bool) -> Result<SharedMem> {
        let align = ALIGN.max(crate::backing::huge_page_size(fd).unwrap_or(0));
        let size = usize::try_from(len)
            .ok()
            .filter(|&n| n > 0 && n.checked_add(align).is_some())
            .ok_or_else(|| Error::Access(format!("cannot map {len} bytes")))?;
        let offset = libc::off_t::try_from(offset)
            .map_err(|_| Error::Access(format!("cannot map at file offset {offset}")))?;
        // SAFETY: a new anonymous reservation; no existing mapping is touched.
        let reserve = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size + align,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserve == libc::MAP_FAILED {
            return Err(Error::last_os(format!("reserving {len} bytes of address space")));
        }
        let start = reserve as usize;
        let aligned = start.next_multiple_of(align);
        let prot = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: [aligned, aligned + size) lies within the reservation made above, which no other code uses.
        let ptr = unsafe {
            libc::mmap(
                aligned as *mut libc::c_void,
                size,
                prot,
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                offset,
            )
        };
        let failed =
            (ptr == libc::MAP_FAILED).then(|| Error::last_os(format!("mapping {len} bytes of the zone")));
        let end = start + size + align;
        let tail = if failed.is_some() { start } else { (aligned + size).next_multiple_of(4096) };
        // SAFETY: both ranges belong to the reservation and hold no live mapping.
        unsafe {
            if failed.is_none() && aligned > start {
                libc::munmap(reserve, aligned - start);
            }
            if end > tail {
                libc::munmap(tail as *mut libc::c_void, end - tail);
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let ptr =
            NonNull::new(ptr.cast::<u8>()).expect("mmap never returns 0 for MAP_FIXED at a non-zero address");
        let mut mem = SharedMem { ptr, len: size, writable, watch: None };
        if !is_sealed(fd) {
            let watch = tombolo_sigbus::watch(ptr.as_ptr() as usize, size);
            mem.watch = Some(watch.map_err(|e| Error::io("watching over a mapping", e))?);
        }
        Ok(mem)
    }

    /// Returns whether a process has cut the file short. The mapping is then private to this process: it began as zeroes, and no other
    /// process sees its stores.
    pub fn is_lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_hit)
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a mapping has at least a byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether stores are allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The mapping's start, for C code that follows the same rules (`files/core`, `zone/sync`). It stays valid as long
    /// as `self`; on a read-only mapping stores fault.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// A copy of `buf.len()` bytes at `offset`; words that are 8-aligned are copied untorn.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let at = self.check(offset, buf.len(), 1)?;
        let mut done = 0;
        while done < buf.len() {
            if (at + done) % 8 == 0 && buf.len() - done >= 8 {
                // SAFETY: in bounds and aligned: check() and the condition above.
                let word = unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(at + done).cast()) };
                buf[done..done + 8].copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
                done += 8;
            } else {
                // SAFETY: in bounds: check().
                let byte = unsafe { AtomicU8::from_ptr(self.ptr.as_ptr().add(at + done)) };
                buf[done] = byte.load(Ordering::Relaxed);
                done += 1;
            }
        }
        Ok(())
    }

    /// Stores `buf` at `offset`; words that are 8-aligned are stored untorn, in any order: publish with [`Self::store_u64`].
    pub fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let at = self.check_write(offset, buf.len(), 1)?;
        let mut done = 0;
        while done < buf.len() {
            if (at + done) % 8 == 0 && buf.len() - done >= 8 {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&buf[done..done + 8]);
                // SAFETY: in bounds and aligned: check_write() and the condition above.
                let word = unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(at + done).cast()) };
                word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
                done += 8;
            } else {
                // SAFETY: in bounds: check_write().
                let byte = unsafe { AtomicU8::from_ptr(self.ptr.as_ptr().add(at + done)) };
                byte.store(buf[done], Ordering::Relaxed);
                done += 1;
            }
        }
        Ok(())
    }

    /// Loads a word (acquire).
    pub fn load_u64(&self, offset: u64) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Loads half a word (acquire).
    pub fn load_u32(&self, offset: u64) -> Result<u32> {
        let at = self.check(offset, 4, 4)?;
        // SAFETY: in bounds and aligned.
        Ok(unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(at).cast()) }.load(Ordering::Acquire))
    }

    /// Stores a word (release).
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<()> {
        self.word_mut(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Stores half a word (release).
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<()> {
        let at = self.check_write(offset, 4, 4)?;
        // SAFETY: in bounds and aligned.
        unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(at).cast()) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Sets bits; returns the value before.
    pub fn fetch_or_u64(&self, offset: u64, bits: u64) -> Result<u64> {
        Ok(self.word_mut(offset)?.fetch_or(bits, Ordering::SeqCst))
    }

    /// Stores a word and returns the value before.
    pub fn swap_u64(&self, offset: u64, value: u64) -> Result<u64> {
        Ok(self.word_mut(offset)?.swap(value, Ordering::SeqCst))
    }

    /// Compare and swap: `Ok(Ok(()))` if the word was `old` and is now `new`, `Ok(Err(found))` otherwise.
    pub fn cas_u64(&self, offset: u64, old: u64, new: u64) -> Result<std::result::Result<(), u64>> {
        let word = self.word_mut(offset)?;
        Ok(word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ()))
    }

    fn word(&self, offset: u64) -> Result<&AtomicU64> {
        let at = self.check(offset, 8, 8)?;
        // SAFETY: in bounds and aligned; the mapping lives as long as self.
        Ok(unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(at).cast()) })
    }

    fn word_mut(&self, offset: u64) -> Result<&AtomicU64> {
        self.check_write(offset, 8, 8)?;
        self.word(offset)
    }

    fn check(&self, offset: u64, len: usize, align: usize) -> Result<usize> {
        let at = usize::try_from(offset).ok();
        match at {
            Some(at) if at % align == 0 && at.checked_add(len).is_some_and(|end| end <= self.len) => Ok(at),
            _ => Err(Error::Access(format!(
                "{len} bytes at {offset:#x} (alignment {align}) are outside of the {} mapped bytes",
                self.len
            ))),
        }
    }

    fn check_write(&self, offset: u64, len: usize, align: usize) -> Result<usize> {
        if !self.writable {
            return Err(Error::Access(format!("write at {offset:#x} of a read-only mapping")));
        }
        self.check(offset, len, align)
    }
}

/// Returns whether the file can't be cut short.
fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK))
}

impl Drop for SharedMem {
    fn drop(&mut self) {
        // The address range may belong to another mapping in a moment.
        self.watch = None;
        // SAFETY: the mapping is this value's, and no reference into it outlives the value.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

impl std::fmt::Debug for SharedMem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedMem({} bytes, {})", self.len, if self.writable { "rw" } else { "ro" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn memory(len: u64) -> (std::fs::File, SharedMem) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        let mem = SharedMem::map(file.as_fd(), 0, len, true).unwrap();
        (file, mem)
    }

    #[test]
    fn two_mappings_of_one_file_see_each_other() {
        let (file, a) = memory(8192);
        let b = SharedMem::map(file.as_fd(), 4096, 4096, false).unwrap();
        a.write(4099, b"hello, neighbour").unwrap();
        let mut copy = [0; 16];
        b.read(3, &mut copy).unwrap();
        assert_eq!(&copy, b"hello, neighbour");
        assert_eq!(a.as_ptr() as usize % ALIGN, 0);
    }

    #[test]
    fn nothing_outside_or_misaligned_or_read_only_is_touched() {
        let (file, mem) = memory(4096);
        assert!(mem.load_u64(4096).is_err());
        assert!(mem.load_u64(4092).is_err());
        assert!(mem.load_u64(u64::MAX - 3).is_err());
        assert!(mem.load_u64(4).is_err());
        assert!(mem.read(4095, &mut [0; 2]).is_err());
        assert!(mem.write(u64::MAX, &[1]).is_err());
        let ro = SharedMem::map(file.as_fd(), 0, 4096, false).unwrap();
        assert!(ro.store_u64(0, 1).is_err());
        assert!(ro.cas_u64(0, 0, 1).is_err());
        assert_eq!(ro.load_u64(0).unwrap(), 0);
    }

    #[test]
    fn a_refused_mapping_gives_its_reservation_back() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let ro = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert!(SharedMem::map(ro.as_fd(), 0, 4096, true).is_err());
        assert!(SharedMem::map(file.as_fd(), 0, 0, true).is_err());
        assert!(SharedMem::map(file.as_fd(), 0, u64::MAX, true).is_err());
    }
}
