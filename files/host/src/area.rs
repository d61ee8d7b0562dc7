// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that holds a file system: a mapping, the area in it, and the member that uses it.
//!
//! The only module that maps memory. Everything that is read from an area may change at any time, so bytes are
//! copied out with [`Area::copy_out`] and friends, never borrowed.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use tombolo_sigbus::Watch;

use crate::sys;
use crate::writeback::Writeback;

/// Memory that an area lies in.
trait Memory: Send + Sync {
    /// Returns whether a page of it was missing: its file was cut short, or has a hole for which its file system has no room. Since then the
    /// mapping is private to this process.
    fn is_lost(&self) -> bool;
}

impl Memory for tombolo_zone::Zone {
    fn is_lost(&self) -> bool {
        tombolo_zone::Zone::is_lost(self)
    }
}

/// A shared mapping of a file or memory object, unmapped when dropped.
pub struct Map {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    file: Arc<OwnedFd>,
    watch: Option<Watch>,
}

impl Memory for Map {
    fn is_lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_hit)
    }
}

// SAFETY: the mapping lives as long as the value and is accessed through raw pointers only, by atomic or volatile
// accesses or by the core, which expects concurrent writers.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `len` bytes of `file` from its start. The file must be that long. Should it be cut short, [`Area::is_lost`] tells.
    pub fn new(file: impl AsFd, len: u64, writable: bool) -> io::Result<Map> {
        Map::with(file, len, writable, MapFlags::SHARED)
    }

    fn with(file: impl AsFd, len: u64, writable: bool, flags: MapFlags) -> io::Result<Map> {
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
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut map = Map { base, len, writable, file: Arc::new(file), watch: None };
        map.watch = Some(tombolo_sigbus::watch(base.as_ptr() as usize, len)?);
        Ok(map)
    }

    /// Makes a memory object of `len` bytes, zeroed; its descriptor can be shared.
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
}

impl Drop for Map {
    fn drop(&mut self) {
        // The address range may belong to another mapping in a moment.
        self.watch = None;
        // SAFETY: mapped in new() with this length; nothing borrows from it.
        unsafe {
            let _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

/// One life of a member: its slot number and epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incarnation {
    /// Own member id, 0 to 63.
    pub member: u32,
    /// Epoch of the join.
    pub epoch: u32,
}

/// A member table that is not in any zone, and the memory of the area that it is for.
struct Table(Box<[UnsafeCell<sys::tmb_member>]>, Arc<dyn Memory>);

impl Memory for Table {
    fn is_lost(&self) -> bool {
        self.1.is_lost()
    }
}

// SAFETY: only the core accesses it, by atomics.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// One FILES area. Clones share the mapping, which lives as long as any of them.
#[derive(Clone)]
pub struct Area {
    base: *mut u8,
    len: usize,
    offset: u64,
    writable: bool,
    members: *mut sys::tmb_member,
    incarnation: Option<Incarnation>,
    stores: Option<Arc<Writeback>>,
    memory: Arc<dyn Memory>,
}

// SAFETY: raw pointers into a mapping that 'memory' keeps; access is by atomics or the core.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

fn misfit(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("an area does not fit its zone: {what}"))
}

impl Area {
    /// Returns the area at `offset`, `len` bytes; for a member also the offset of its zone's member table, and its incarnation.
    pub fn in_map(
        map: &Arc<Map>,
        offset: u64,
        len: u64,
        incarnation: Option<(u64, Incarnation)>,
    ) -> io::Result<Area> {
        if offset.checked_add(len).is_none_or(|end| end > map.size()) || offset % 4096 != 0 || len < 4096 {
            return Err(misfit(&format!("{len} bytes at {offset} of {}", map.size())));
        }
        let mut members = std::ptr::null_mut();
        if let Some((at, incarnation)) = incarnation {
            let size = u64::from(sys::TMB_MAX_MEMBERS) * size_of::<sys::tmb_member>() as u64;
            let fits = at.checked_add(size).is_some_and(|end| end <= map.size()) && at % 64 == 0;
            if !fits || incarnation.member >= sys::TMB_MAX_MEMBERS {
                return Err(misfit(&format!("member table at {at}, member {}", incarnation.member)));
            }
            // SAFETY: the table lies in the mapping, checked above.
            members = unsafe { map.base.as_ptr().add(at as usize) }.cast();
        }
        Ok(Area {
            // SAFETY: offset + len lies in the mapping, checked above.
            base: unsafe { map.base.as_ptr().add(offset as usize) },
            len: len as usize,
            offset,
            writable: map.writable,
            members,
            incarnation: incarnation.map(|(_, incarnation)| incarnation),
            stores: Some(Arc::new(Writeback::of(Arc::clone(&map.file)))),
            memory: Arc::clone(map) as Arc<dyn Memory>,
        })
    }

    /// Returns the whole of a mapping as an area without members: no other process uses it.
    pub fn whole(map: Map) -> io::Result<Area> {
        let len = map.size() & !4095;
        Area::in_map(&Arc::new(map), 0, len, None)
    }

    /// Returns an area of a zone; without an incarnation the process is alone. `file`: the zone's file, to be synced.
    pub fn of_zone(
        zone: &Arc<tombolo_zone::Zone>,
        area: &tombolo_zone::Area,
        incarnation: Option<Incarnation>,
        file: Option<OwnedFd>,
    ) -> tombolo_zone::Result<Area> {
        Ok(Area {
            base: zone.area_ptr(area)?,
            len: area.len as usize,
            offset: area.offset,
            writable: zone.mem().writable(),
            members: zone.members_ptr().cast(),
            incarnation,
            stores: file.map(|file| Arc::new(Writeback::of(Arc::new(file)))),
            memory: Arc::clone(zone) as Arc<dyn Memory>,
        })
    }

    /// Returns the same area for another member, or for a process that is alone (no table is used then).
    pub fn used_by(&self, incarnation: Option<Incarnation>) -> Area {
        Area { incarnation, ..self.clone() }
    }

    /// Returns the area as this process alone will see it: what is stored there goes into copies of its pages. `None`: it lies in no file.
    pub(crate) fn private(&self) -> io::Result<Option<Area>> {
        let Some(stores) = &self.stores else { return Ok(None) };
        // Of all that could be stored there little will be: the kernel would refuse to keep memory for the whole.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let map = Map::with(stores.file(), self.offset + self.size(), true, flags)?;
        Area::in_map(&Arc::new(map), self.offset, self.size(), None).map(Some)
    }

    /// Returns the same area for a process that is alone and recovers all former members: in a private member table, member 0 is active
    /// in an epoch later than any before, and all other members are dead.
    pub fn lone(&self) -> Area {
        let since_2020 = crate::fs::now() / 1_000_000_000 - 1_577_836_800;
        // The last process that was alone may have opened it in this second, or before the clock was set back.
        let features = u64::from(sys::TFS_BLOCK) + offset_of!(sys::tfs_member_area, features) as u64;
        let last = (self.word(features).unwrap_or(0) >> 32) as u32;
        let next = if last < sys::TMB_EPOCH_END { last + 1 } else { 0 };
        let epoch = u32::try_from(since_2020).unwrap_or(0).max(next).max(2);
        let table: Vec<sys::tmb_member> = (0..sys::TMB_MAX_MEMBERS)
            .map(|id| {
                let state = if id == 0 { sys::TMB_MEMBER_ACTIVE } else { sys::TMB_MEMBER_DEAD };
                sys::tmb_member {
                    state_epoch: u64::from(epoch) << 32 | u64::from(state),
                    ..Default::default()
                }
            })
            .collect();
        let table = table.into_iter().map(UnsafeCell::new).collect();
        let table = Arc::new(Table(table, Arc::clone(&self.memory)));
        Area {
            members: table.0[0].get(),
            incarnation: Some(Incarnation { member: 0, epoch }),
            memory: table,
            ..self.clone()
        }
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.len as u64
    }

    /// Offset in the zone, bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns whether the area may be written; a store to a read-only area faults.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Returns whether a page of its memory was missing. This process then sees zeroes, and its own stores since, which no other process sees.
    pub fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    /// Returns whether the member that uses it was declared dead, though this process lives.
    pub fn is_expelled(&self) -> bool {
        let Some(own) = self.incarnation.filter(|_| self.writable) else { return false };
        // SAFETY: a slot of the member table, which in_map(), of_zone() and lone() found or made; the word is accessed atomically.
        let word =
            unsafe { AtomicU64::from_ptr(&raw mut (*self.members.add(own.member as usize)).state_epoch) };
        word.load(Ordering::Acquire) != u64::from(own.epoch) << 32 | u64::from(sys::TMB_MEMBER_ACTIVE)
    }

    /// Returns the member that uses it; `None`: the process is alone.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.incarnation
    }

    /// Start of the area in this address space.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Returns the member table, or null if the process is alone.
    pub fn members(&self) -> *mut sys::tmb_member {
        if self.incarnation.is_some() { self.members } else { std::ptr::null_mut() }
    }

    /// Returns the name of a member from the table.
    pub fn member_name(&self, member: u32) -> String {
        if self.members().is_null() || member >= sys::TMB_MAX_MEMBERS {
            return String::new();
        }
        // SAFETY: a slot of the member table, which in_map() and of_zone() found to lie in the mapping; bytes are read one by one.
        let name = unsafe { &raw const (*self.members.add(member as usize)).name }.cast::<u8>();
        let bytes: Vec<u8> = (0..sys::TMB_NAME_LEN as usize)
            // SAFETY: within the name.
            .map(|i| unsafe { AtomicU8::from_ptr(name.add(i).cast_mut()) }.load(Ordering::Relaxed))
            .take_while(|b| *b != 0)
            .collect();
        String::from_utf8_lossy(&bytes).escape_default().to_string()
    }

    /// Makes all stores durable, as far as the backing file can. Once that has failed, it fails for this area and its clones: what was stored since the last
    /// success may never reach the disk.
    pub fn sync(&self) -> io::Result<()> {
        self.stores.as_ref().map_or(Ok(()), |stores| stores.sync())
    }

    fn checked(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len as u64)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: within the area.
        Some(unsafe { self.base().add(offset as usize) })
    }

    /// Copies bytes out; false: they don't lie in the area. Other members may store meanwhile, then the copy is a mixture.
    #[must_use]
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(from) = self.checked(offset, to.len()) else { return false };
        for (i, byte) in to.iter_mut().enumerate() {
            // SAFETY: within the area; bytes are accessed atomically.
            *byte = unsafe { AtomicU8::from_ptr(from.add(i)) }.load(Ordering::Relaxed);
        }
        true
    }

    /// Writes bytes of the area into a file at the same offset, directly from the mapping.
    pub fn write_to(&self, offset: u64, len: u64, file: &File) -> io::Result<()> {
        let start = usize::try_from(len).ok().and_then(|len| self.checked(offset, len));
        let start = start.ok_or(io::ErrorKind::InvalidInput)?;
        let mut done = 0;
        while done < len {
            // SAFETY: within the area, checked above; the kernel copies, and concurrent stores are harmless to it.
            let n = unsafe {
                let from = start.add(done as usize).cast::<libc::c_void>();
                libc::pwrite(file.as_raw_fd(), from, (len - done) as usize, (offset + done) as libc::off_t)
            };
            match n {
                n if n > 0 => done += n as u64,
                0 => return Err(io::ErrorKind::WriteZero.into()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies one block word by word.
    pub fn block(&self, block: u64) -> Option<Box<[u64; 512]>> {
        let from = self.checked(block.checked_mul(4096)?, 4096)?;
        let mut copy = Box::new([0u64; 512]);
        for (i, word) in copy.iter_mut().enumerate() {
            // SAFETY: within the area, whose start is page aligned.
            *word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(i)) }.load(Ordering::Relaxed);
        }
        Some(copy)
    }

    /// Loads the word at a multiple of 8.
    pub fn word(&self, offset: u64) -> Option<u64> {
        if offset % 8 != 0 {
            return None;
        }
        // SAFETY: within the area and aligned.
        Some(unsafe { AtomicU64::from_ptr(self.checked(offset, 8)?.cast()) }.load(Ordering::Acquire))
    }

    /// Stores a word at a multiple of 8; false: it doesn't lie in the area, or the area is read-only.
    #[must_use]
    pub fn store_word(&self, offset: u64, value: u64) -> bool {
        let Some(to) = self.checked(offset, 8).filter(|_| offset % 8 == 0 && self.writable) else {
            return false;
        };
        // SAFETY: within the area, aligned, mapped writable.
        unsafe { AtomicU64::from_ptr(to.cast()) }.store(value, Ordering::Release);
        true
    }

    /// Stores one byte; false as [`Area::store_word`].
    #[must_use]
    pub fn store_byte(&self, offset: u64, value: u8) -> bool {
        let Some(to) = self.checked(offset, 1).filter(|_| self.writable) else { return false };
        // SAFETY: within the area, mapped writable.
        unsafe { AtomicU8::from_ptr(to) }.store(value, Ordering::Release);
        true
    }
}

/// Opens the file that backs a zone or a bare file system. A pipe in its place is not waited for.
pub fn open_backing(path: &std::path::Path, writable: bool) -> io::Result<File> {
    File::options().read(true).write(writable).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_copy_of_an_area_larger_than_memory_takes_what_is_stored_there() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8 << 40).expect("a sparse file");
        let area = Area::whole(Map::new(&file, 8 << 40, false).expect("a mapping")).expect("an area");
        let copy = area.private().expect("a private mapping").expect("it lies in a file");
        assert!(copy.store_word(4096, 1));
        assert_eq!((area.word(4096), copy.word(4096)), (Some(0), Some(1)));
    }
}
