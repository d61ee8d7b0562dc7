// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory shared with a peer: mappings, ring memory over a mapping, and the window for bulk data.
//!
//! This is the only place where shared memory is touched by pointer. Everything is copied in or out; a reference into shared memory
//! is never formed.

use crate::Error;
use crate::children::NotInChildren;
use crate::ring::{RingMem, Word};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes in front of a ring's data: four words, each alone on two cache lines (adjacent lines are fetched in pairs).
pub const RING_HEADER: u64 = 512;
const WORD_STRIDE: usize = 128;
const _: () = assert!(WORD_STRIDE * 4 == RING_HEADER as usize);

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of the larger parts by which [`Window::map_over`] maps.
pub const PART: usize = 2 << 20;

/// A mapping of a file, or of anonymous memory; unmapped when dropped.
pub struct Mapping {
    base: *mut u8,
    len: usize,
    /// The file that is mapped from its first byte on, if parts of it may be mapped again.
    file: Option<NotInChildren>,
}

// SAFETY: the mapping is plain memory; all access goes through copies by raw pointer, from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

fn keep_from_children(base: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: a mapping of the caller's; nothing changes for this process.
    if unsafe { libc::madvise(base.cast(), len, libc::MADV_DONTFORK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` (both multiples of the page size), shared.
    pub fn of_file(file: &impl AsRawFd, offset: u64, len: usize) -> io::Result<Mapping> {
        Mapping::shared(file, offset, len, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Maps the first `len` bytes of `file`, shared, of which this process only reads.
    pub fn to_read(file: &impl AsRawFd, len: usize) -> io::Result<Mapping> {
        Mapping::shared(file, 0, len, libc::PROT_READ)
    }

    fn shared(file: &impl AsRawFd, offset: u64, len: usize, access: libc::c_int) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        Mapping::check(base, len)
    }

    /// Maps the first `len` bytes of `file`, shared; parts of it can be mapped again.
    pub fn of_whole(file: &impl AsFd, len: usize) -> io::Result<Mapping> {
        let mut mapping = Mapping::of_file(&file.as_fd(), 0, len)?;
        mapping.file = Some(NotInChildren::new(file.as_fd().try_clone_to_owned()?)?);
        Ok(mapping)
    }

    /// Leaves it out of processes that are forked from this one: they could only disturb the peer.
    pub fn not_in_children(&self) -> io::Result<()> {
        keep_from_children(self.base, self.len)
    }

    /// Maps `len` bytes from byte `at` of this mapping (multiples of the page size) a second time, at an address where nothing is mapped. The
    /// owner of that address unmaps it.
    fn again(&self, at: usize, len: usize, address: u64) -> io::Result<()> {
        let Some(file) = &self.file else { return Err(io::ErrorKind::Unsupported.into()) };
        let (to, read_write) = (address as *mut libc::c_void, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: only where nothing is mapped.
        let got = unsafe { libc::mmap(to, len, read_write, flags, file.as_raw_fd(), at as libc::off_t) };
        if got == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if got != to {
            // A kernel that takes the address for a wish.
            // SAFETY: what was just mapped.
            unsafe { libc::munmap(got, len) };
            return Err(io::ErrorKind::AddrInUse.into());
        }
        keep_from_children(got.cast(), len)
    }

    /// Maps `len` bytes of private memory, for a window whose peer is reached by a stream.
    pub fn private(len: usize) -> io::Result<Mapping> {
        // SAFETY: as above.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        Mapping::check(base, len)
    }

    fn check(base: *mut libc::c_void, len: usize) -> io::Result<Mapping> {
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { base: base.cast(), len, file: None })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are of a mapping that this value owns.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Creates a sealed memfd of `len` bytes: no peer can change its size, so no access to the mapping can fail with SIGBUS.
pub fn sealed_memfd(name: &std::ffi::CStr, len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd is fresh, and this is its only owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes an int and touches no memory.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// A ring inside a mapping: [`RING_HEADER`] bytes of words, then the data.
pub struct SharedRing {
    mapping: Arc<Mapping>,
    at: usize,
    capacity: u64,
}

impl SharedRing {
    /// The ring at byte `at` (a multiple of 128) with `capacity` data bytes, a power of two of at least 4096. None: it doesn't fit.
    pub fn new(mapping: Arc<Mapping>, at: u64, capacity: u64) -> Option<SharedRing> {
        let end = at.checked_add(RING_HEADER)?.checked_add(capacity)?;
        (capacity.is_power_of_two()
            && (4096..=1 << 30).contains(&capacity)
            && at % 128 == 0
            && end <= mapping.len() as u64)
            .then_some(SharedRing { mapping, at: at as usize, capacity })
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: new() checked that the words lie inside the mapping, aligned; the mapping lives as long as self; an atomic may
        // be written by others at any time.
        unsafe { AtomicU64::from_ptr(self.mapping.base().add(self.at + word as usize * WORD_STRIDE).cast()) }
    }

    fn data(&self, at: u64, len: usize) -> *mut u8 {
        assert!(at <= self.capacity && len as u64 <= self.capacity - at, "access outside of the ring");
        // SAFETY: checked just now, and by new(): inside the mapping.
        unsafe { self.mapping.base().add(self.at + RING_HEADER as usize + at as usize) }
    }
}

impl RingMem for SharedRing {
    fn capacity(&self) -> u64 {
        self.capacity
    }
    fn load(&self, word: Word, order: Ordering) -> u64 {
        self.word(word).load(order)
    }
    fn store(&self, word: Word, value: u64, order: Ordering) {
        self.word(word).store(value, order);
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn read(&self, at: u64, into: &mut [u8]) {
        // SAFETY: data() checked the range; into is private memory, so the two can't overlap. A peer may write meanwhile: any bytes will
        // do here, what they mean is checked on the copy.
        unsafe { std::ptr::copy_nonoverlapping(self.data(at, into.len()), into.as_mut_ptr(), into.len()) };
    }
    fn write(&self, at: u64, from: &[u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.data(at, from.len()), from.len()) };
    }
    #[cfg(target_arch = "x86_64")]
    fn writes_soon(&self, at: u64) {
        let line = self.data(at, 1);
        // SAFETY: a hint, which neither reads nor writes. (The intrinsic asks only for reading where the target is every x86-64.)
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Memory for bulk data that both sides see (or, over a stream, of which each side has a copy that is pushed explicitly).
pub struct Window {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl Window {
    /// The window at byte `at` of a mapping. None: it doesn't fit.
    pub fn new(mapping: Arc<Mapping>, at: u64, len: u64) -> Option<Window> {
        (at.checked_add(len)? <= mapping.len() as u64).then_some(Window {
            mapping,
            at: at as usize,
            len: len as usize,
        })
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Returns whether there is no window.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes from `offset`; an error when that is not all inside.
    pub fn at(&self, offset: u64, len: u64) -> Result<*mut u8, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len as u64 => {
                // SAFETY: inside the mapping, as new() and the line above checked.
                Ok(unsafe { self.mapping.base().add(self.at + offset as usize) })
            }
            _ => Err(Error::Broken("a range lies outside of the window")),
        }
    }

    /// Maps a range a second time, at an address where nothing is mapped; fails also where the window is not shared memory.
    pub fn map_again(&self, offset: u64, len: u64, address: u64) -> Result<(), Error> {
        self.at(offset, len)?;
        self.mapping.again(self.at + offset as usize, len as usize, address).map_err(Error::Io)
    }

    /// Maps a range (multiples of [`PAGE`]) a second time over what is mapped at `address`, by parts of [`PAGE`] or [`PART`] bytes: a filter of system
    /// calls compares an address with the bounds of the mapping for each of these sizes.
    ///
    /// # Safety
    /// The caller owns the pages at `address`.
    pub unsafe fn map_over(&self, offset: u64, len: u64, address: *mut u8) -> Result<(), Error> {
        let from = self.at(offset, len)?;
        let mut done = 0;
        while done < len as usize {
            let part = if len as usize - done >= PART { PART } else { PAGE };
            let (old, to) = (from.wrapping_add(done), address.wrapping_add(done));
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: old lies in the mapping; the pages at to are the caller's to give. An old size of 0 leaves a shared mapping where it is.
            let got = unsafe { libc::mremap(old.cast(), 0, part, flags, to) };
            if got == libc::MAP_FAILED {
                return Err(Error::Io(io::Error::last_os_error()));
            }
            done += part;
        }
        Ok(())
    }

    /// The addresses of the mapping that the window is a part of.
    pub fn mapping(&self) -> Range<usize> {
        let base = self.mapping.base() as usize;
        base..base + self.mapping.len()
    }

    /// The offset of an address of this process, if `len` bytes from it all lie in the window.
    pub fn offset_of(&self, address: usize, len: u64) -> Option<u64> {
        let base = self.mapping.base() as usize + self.at;
        let offset = address.checked_sub(base)? as u64;
        (offset.checked_add(len)? <= self.len as u64).then_some(offset)
    }

    /// Copies out.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: at() checked the range; into is private.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies in.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let to = self.at(offset, from.len() as u64)?;
        // SAFETY: at() checked the range; from is private.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }
}
