// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that holds a file system: a mapping, the area in it, and whose eyes look at it.
//!
//! The only module that maps memory. Everything that is read from an area may change at any time, so bytes are
//! copied out with [`Area::copy_out`] and friends, never borrowed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::sys;

/// A shared mapping of a file or memory object, unmapped when dropped.
pub struct Map {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    file: OwnedFd,
}

// SAFETY: the mapping lives as long as the value and is accessed through raw pointers only, by atomic or volatile
// accesses or by the core, which expects concurrent writers.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `len` bytes of `file` from its start. The file must be that long, and stay so.
    pub fn new(file: impl AsFd, len: u64, writable: bool) -> io::Result<Map> {
        let file = file.as_fd().try_clone_to_owned()?;
        let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if len == 0 || (len as u64) > size {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes should be mapped of a file of {size}"),
            ));
        }
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Map { base, len, writable, file })
    }

    /// A new memory object of `len` bytes, zeroed, shared with whoever gets its descriptor.
    pub fn memfd(name: &str, len: u64) -> io::Result<Map> {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, len)?;
        Map::new(&file, len, true)
    }

    /// The file behind it.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.len as u64
    }

    /// Makes what was stored durable, as far as the backing can.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in new() with this length; nothing borrows from it.
        unsafe {
            let _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

/// Who looks at an area: a slot of the zone's member table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Where the member table is in the mapping, bytes.
    pub members_offset: u64,
    /// Own member id, 0 to 63.
    pub member: u32,
    /// Epoch of the join.
    pub epoch: u32,
}

/// One FILES area in a mapping.
#[derive(Clone)]
pub struct Area {
    map: Arc<Map>,
    offset: usize,
    len: usize,
    seat: Option<Seat>,
}

impl Area {
    /// The area at `offset`, `len` bytes, seen from `seat` (None: alone, nobody else has it open).
    pub fn new(map: Arc<Map>, offset: u64, len: u64, seat: Option<Seat>) -> io::Result<Area> {
        let end = offset.checked_add(len).filter(|end| *end <= map.size());
        let table = seat.map(|s| {
            s.members_offset
                .checked_add(u64::from(sys::TMB_MAX_MEMBERS) * size_of::<sys::tmb_member>() as u64)
                .filter(|end| *end <= map.size() && s.members_offset % 64 == 0 && s.member < sys::TMB_MAX_MEMBERS)
        });
        if end.is_none() || offset % 4096 != 0 || len < 4096 || table == Some(None) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("an area of {len} bytes at {offset} does not fit its zone of {} bytes", map.size()),
            ));
        }
        Ok(Area { offset: offset as usize, len: len as usize, map, seat })
    }

    /// The whole of a mapping, alone.
    pub fn whole(map: Map) -> io::Result<Area> {
        let len = map.size() & !4095;
        Area::new(Arc::new(map), 0, len, None)
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.len as u64
    }

    /// Where it starts in its zone, bytes.
    pub fn offset(&self) -> u64 {
        self.offset as u64
    }

    /// Whether stores are possible; a store to another one would be a fault.
    pub fn writable(&self) -> bool {
        self.map.writable
    }

    /// The mapping it lies in.
    pub fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// Whose eyes.
    pub fn seat(&self) -> Option<Seat> {
        self.seat
    }

    /// Start of the area in this address space.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: offset + len <= the mapping's length, checked in new().
        unsafe { self.map.base.as_ptr().add(self.offset) }
    }

    /// The member table, or null.
    pub fn members(&self) -> *mut sys::tmb_member {
        match self.seat {
            // SAFETY: the table lies in the mapping, checked in new().
            Some(seat) => unsafe { self.map.base.as_ptr().add(seat.members_offset as usize).cast() },
            None => std::ptr::null_mut(),
        }
    }

    fn checked(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len as u64)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: within the area.
        Some(unsafe { self.base().add(offset as usize) })
    }

    /// Copies bytes out; false when they don't lie in the area. Other members may store meanwhile, then it's a mixture.
    #[must_use]
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(from) = self.checked(offset, to.len()) else { return false };
        for (i, byte) in to.iter_mut().enumerate() {
            // SAFETY: within the area; bytes are accessed atomically.
            *byte = unsafe { AtomicU8::from_ptr(from.add(i)) }.load(Ordering::Relaxed);
        }
        true
    }

    /// One block, copied word by word.
    pub fn block(&self, block: u64) -> Option<Box<[u64; 512]>> {
        let from = self.checked(block.checked_mul(4096)?, 4096)?;
        let mut copy = Box::new([0u64; 512]);
        for (i, word) in copy.iter_mut().enumerate() {
            // SAFETY: within the area, whose start is page aligned.
            *word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(i)) }.load(Ordering::Relaxed);
        }
        Some(copy)
    }

    /// The word at a multiple of 8.
    pub fn word(&self, offset: u64) -> Option<u64> {
        if offset % 8 != 0 {
            return None;
        }
        // SAFETY: within the area and aligned.
        Some(unsafe { AtomicU64::from_ptr(self.checked(offset, 8)?.cast()) }.load(Ordering::Acquire))
    }

    /// Stores a word at a multiple of 8; false when it doesn't lie in the area or the area is read-only.
    #[must_use]
    pub fn store_word(&self, offset: u64, value: u64) -> bool {
        let Some(to) = self.checked(offset, 8).filter(|_| offset % 8 == 0 && self.writable()) else {
            return false;
        };
        // SAFETY: within the area, aligned, mapped writable.
        unsafe { AtomicU64::from_ptr(to.cast()) }.store(value, Ordering::Release);
        true
    }

    /// Stores one byte; false as [`Area::store_word`].
    #[must_use]
    pub fn store_byte(&self, offset: u64, value: u8) -> bool {
        let Some(to) = self.checked(offset, 1).filter(|_| self.writable()) else { return false };
        // SAFETY: within the area, mapped writable.
        unsafe { AtomicU8::from_ptr(to) }.store(value, Ordering::Release);
        true
    }
}

/// Opens the file that backs a zone or a bare file system.
pub fn open_backing(path: &std::path::Path, writable: bool) -> io::Result<File> {
    File::options().read(true).write(writable).open(path)
}
