// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest memory: the regions that a front-end shares, mapped here, and address translation.
//!
//! A [`GuestMemory`] is an immutable, sorted table of [`Region`]s; a change makes a new table that shares the
//! mappings that stay. Each vring looks addresses up through its own [`Translator`], which remembers the region
//! that it hit last, so that the usual case is one subtraction and one comparison.
//!
//! Only files that are memory themselves are mapped: those of tmpfs (a memfd, a file in `/dev/shm`) and of hugetlbfs. A
//! page of any other file comes from a disk, a server or a FUSE process, and a worker that touches it waits for that as
//! long as it takes, with all other ports. A region of such a file is known and never translated.
//!
//! Files are mapped only from `mmap_offset` on and only as far as the region says, after a check that the file is that
//! long. A process that can write to the file may still shrink it: QEMU seals its memfds against that, a file in
//! `/dev/shm` can't be sealed. [`tombolo_sigbus`] catches an access beyond its new end, and the port is stopped.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Most regions that one port may have (the protocol's GET_MAX_MEM_SLOTS answer).
pub const MAX_REGIONS: usize = 128;
// 64 ports with as many regions as they may have, each with a new table beside the old one.
const _: () =
    assert!(tombolo_sigbus::SLOTS >= 64 * 2 * (MAX_REGIONS + 2), "no port may keep memory from others");

/// The fault of a region that a front-end wants to share.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The file is shorter than the region says.
    #[error(
        "memory region of {size:#x} bytes at offset {offset:#x} reaches beyond its file of {file:#x} bytes"
    )]
    BeyondFile {
        /// Bytes in the region.
        size: u64,
        /// Offset of the region in the file.
        offset: u64,
        /// Bytes in the file.
        file: u64,
    },
    /// Two regions overlap in guest-physical or in front-end virtual addresses.
    #[error("memory region at guest address {gpa:#x} overlaps another one")]
    Overlap {
        /// Start of the region.
        gpa: u64,
    },
    /// Empty, or wraps around the address space.
    #[error("memory region at guest address {gpa:#x} of {size:#x} bytes is empty or wraps around")]
    Shape {
        /// Start of the region.
        gpa: u64,
        /// Bytes in the region.
        size: u64,
    },
    /// More regions than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} memory regions")]
    TooMany,
    /// More memory than a port may share.
    #[error("{size:#x} bytes of memory are more than a port may share on this machine, which is {most:#x}")]
    TooLarge {
        /// Bytes in all regions.
        size: u64,
        /// The largest possible number.
        most: u64,
    },
    /// The file is no memory, or can't be written.
    #[error("memory region at guest address {gpa:#x} is {why}")]
    NotMemory {
        /// Start of the region.
        gpa: u64,
        why: &'static str,
    },
    /// The kernel refused the mapping.
    #[error("memory region can't be mapped: {0}")]
    Map(#[from] io::Error),
}

/// One mapping, unmapped when the last region that uses it goes.
struct Mapping {
    base: *mut u8,
    len: usize,
    watch: Option<tombolo_sigbus::Watch>,
}

// SAFETY: the mapping is plain shared memory; all access goes through raw pointers whose users (vrings) are
// serialized by their own locks, and the kernel's unmap is done once, by the last owner.
unsafe impl Send for Mapping {}
// SAFETY: see Send.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The watch ends first: a late fault must not be taken for this mapping's once the range is another one.
        self.watch = None;
        // SAFETY: base and len are what mmap returned, and only this value unmaps them.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A piece of guest memory.
#[derive(Clone)]
pub struct Region {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    pub size: u64,
    /// Address of the first byte in the front-end's process (ring addresses come in these).
    pub user: u64,
    /// Offset of the first byte in the file.
    offset: u64,
    file: Option<FileId>,
    /// Address of the first byte here; null if the region is not mapped.
    host: *mut u8,
    /// None: the file is no memory.
    map: Option<Arc<Mapping>>,
}

// SAFETY: a region is a description; see Mapping.
unsafe impl Send for Region {}
// SAFETY: see Send.
unsafe impl Sync for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}+{:#x} (user {:#x})", self.gpa, self.size, self.user)
    }
}

impl Region {
    /// Maps `size` bytes of `file` from `offset` on as guest memory at `gpa`.
    ///
    /// # Errors
    /// The region is empty or wraps, the file is too short or no memory, or the kernel refuses.
    pub fn map(file: &File, gpa: u64, size: u64, user: u64, offset: u64) -> Result<Self, MemoryError> {
        let shape = MemoryError::Shape { gpa, size };
        let (Some(_), Some(_), Some(end)) =
            (gpa.checked_add(size), user.checked_add(size), offset.checked_add(size))
        else {
            return Err(shape);
        };
        if size == 0 || size > isize::MAX as u64 / 2 {
            return Err(shape);
        }
        if !is_memory(file) {
            return Err(MemoryError::NotMemory { gpa, why: "a file that is no memory" });
        }
        let stat = rustix::fs::fstat(file).map_err(io::Error::from)?;
        let file_len = stat.st_size as u64;
        if end > file_len {
            return Err(MemoryError::BeyondFile { size, offset, file: file_len });
        }
        // hugetlbfs wants offset and length in its own page size, which is what st_blksize says there.
        let page = (stat.st_blksize as u64).max(4096);
        if !page.is_power_of_two() {
            return Err(shape);
        }
        let start = offset & !(page - 1);
        let len = (end - start).checked_next_multiple_of(page).ok_or(shape)? as usize;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                start as libc::off_t,
            )
        };
        if base == libc::MAP_FAILED {
            let err = io::Error::last_os_error();
            return Err(match err.kind() {
                io::ErrorKind::PermissionDenied => {
                    MemoryError::NotMemory { gpa, why: "memory that can only be read" }
                }
                _ => err.into(),
            });
        }
        // SAFETY: our own mapping; failure only makes core dumps larger.
        unsafe { libc::madvise(base, len, libc::MADV_DONTDUMP) };
        let base = base.cast::<u8>();
        let watch = Some(tombolo_sigbus::watch(base as usize, len)?);
        // SAFETY: offset - start < page <= len.
        let host = unsafe { base.add((offset - start) as usize) };
        let map = Some(Arc::new(Mapping { base, len, watch }));
        Ok(Self { gpa, size, user, offset, file: Some((stat.st_dev, stat.st_ino)), host, map })
    }

    /// As [`Region::map`], for a region that a VMM shares besides its guest's RAM: if its file is no memory, or is
    /// read-only, the region is known but not mapped. Such are zones in files on a disk, and zones that the guest only
    /// reads.
    ///
    /// # Errors
    /// As for [`Region::map`] otherwise.
    pub fn map_or_leave_out(
        file: &File,
        gpa: u64,
        size: u64,
        user: u64,
        offset: u64,
    ) -> Result<Self, MemoryError> {
        match Self::map(file, gpa, size, user, offset) {
            Err(why @ MemoryError::NotMemory { .. }) => {
                tracing::warn!(
                    "{why}; it is left out: a guest that sends from there or receives there is stopped"
                );
                let host = std::ptr::null_mut();
                Ok(Self { gpa, size, user, offset, file: file_id(file), host, map: None })
            }
            other => other,
        }
    }

    /// Returns whether the file behind this region shrank, so that zero pages replaced it.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.map.as_ref().and_then(|map| map.watch.as_ref()).is_some_and(tombolo_sigbus::Watch::is_hit)
    }
}

/// Returns whether the pages of `file` are the kernel's own memory: a file of tmpfs or hugetlbfs, as memfds are. Only
/// those have seals. Unlike fstatfs and fstat, F_GET_SEALS does not call the file's file system, which may be a
/// front-end's own and never answer.
fn is_memory(file: &File) -> bool {
    // SAFETY: asks for a number.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Device and inode.
type FileId = (u64, u64);

/// Returns what tells `file` from all others, if it is memory ([`is_memory`]).
fn file_id(file: &File) -> Option<FileId> {
    let stat = is_memory(file).then(|| rustix::fs::fstat(file).ok())??;
    Some((stat.st_dev, stat.st_ino))
}

/// Bytes that each port may share, also if the machine has less memory. A file of any length costs its owner nothing as long as it is
/// empty, but its mapping takes addresses, of which the switch has 2^47: 64 ports may have these, twice while they are replaced.
const EACH: u64 = 1 << 39;

/// Returns the bytes that a port may share: [`EACH`], or the machine's memory if that is more.
fn most() -> u64 {
    // SAFETY: an all-zero sysinfo is a valid value to be filled in.
    let info = unsafe {
        let mut info: libc::sysinfo = std::mem::zeroed();
        let _zero_is_less = libc::sysinfo(&raw mut info);
        info
    };
    EACH.max(info.totalram.saturating_mul(info.mem_unit.into()))
}

/// Checks that files to be mapped leave addresses for the memory of other ports: `held` bytes are mapped already, `wanted` are files
/// and the bytes of them. Called before any of them is mapped.
///
/// # Errors
/// They are more than a port may share.
pub fn check_sum<'a>(
    held: u64,
    wanted: impl IntoIterator<Item = (&'a File, u64)>,
) -> Result<(), MemoryError> {
    let mapped = wanted.into_iter().filter(|(file, _)| is_memory(file));
    let size = mapped.fold(held, |sum, (_, size)| sum.saturating_add(size));
    let most = most();
    if size > most { Err(MemoryError::TooLarge { size, most }) } else { Ok(()) }
}

/// All memory of one guest, sorted by guest-physical address.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
    /// The numbers of the mapped ones, by their addresses here.
    mapped: Vec<usize>,
}

impl GuestMemory {
    /// Makes a table of `regions`.
    ///
    /// # Errors
    /// They overlap, or there are too many.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.len() > MAX_REGIONS {
            return Err(MemoryError::TooMany);
        }
        regions.sort_by_key(|r| r.user);
        for pair in regions.windows(2) {
            if pair[0].user + pair[0].size > pair[1].user {
                return Err(MemoryError::Overlap { gpa: pair[1].gpa });
            }
        }
        regions.sort_by_key(|r| r.gpa);
        for pair in regions.windows(2) {
            if pair[0].gpa + pair[0].size > pair[1].gpa {
                return Err(MemoryError::Overlap { gpa: pair[1].gpa });
            }
        }
        Ok(Self::sorted(regions))
    }

    /// Makes a table of regions that are sorted by guest-physical address.
    fn sorted(regions: Vec<Region>) -> Self {
        let mut mapped: Vec<usize> = (0..regions.len()).filter(|i| regions[*i].map.is_some()).collect();
        mapped.sort_by_key(|i| regions[*i].host as usize);
        Self { regions, mapped }
    }

    /// Returns this table with one more region.
    ///
    /// # Errors
    /// It overlaps another, or there are too many.
    pub fn with(&self, region: Region) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(region);
        Self::new(regions)
    }

    /// Returns whether exactly this region of `file` is in the table.
    #[must_use]
    pub fn has(&self, file: &File, gpa: u64, size: u64, user: u64, offset: u64) -> bool {
        let asked = (gpa, size, user, offset, file_id(file));
        self.regions.iter().any(|r| (r.gpa, r.size, r.user, r.offset, r.file) == asked)
    }

    /// Returns this table without the region of exactly that place and size. None: there is no such region.
    #[must_use]
    pub fn without(&self, gpa: u64, size: u64, user: u64) -> Option<Self> {
        let mut regions = self.regions.clone();
        let at = regions.iter().position(|r| r.gpa == gpa && r.size == size && r.user == user)?;
        regions.remove(at);
        Some(Self::sorted(regions))
    }

    /// The regions, by guest-physical address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the bytes of all regions that are mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.regions.iter().filter(|r| r.map.is_some()).map(|r| r.size).sum()
    }

    /// Returns the region that holds `gpa`.
    fn find(&self, gpa: u64) -> Option<&Region> {
        let after = self.regions.partition_point(|r| r.gpa <= gpa);
        let region = self.regions.get(after.checked_sub(1)?)?;
        (gpa - region.gpa < region.size && region.map.is_some()).then_some(region)
    }

    /// Returns the local address of `len` bytes at the front-end's address `user`; they must lie in one region.
    #[must_use]
    pub fn at_user(&self, user: u64, len: u64) -> Option<*mut u8> {
        let mut mapped = self.regions.iter().filter(|r| r.map.is_some());
        let region = mapped.find(|r| user.checked_sub(r.user).is_some_and(|off| off < r.size))?;
        let off = user - region.user;
        // SAFETY: off + len lies within the region, which is mapped.
        (len <= region.size - off).then(|| unsafe { region.host.add(off as usize) })
    }

    /// Returns the guest-physical address of a translated byte.
    #[must_use]
    pub fn gpa_of(&self, host: *const u8) -> Option<u64> {
        let after = self.mapped.partition_point(|i| self.regions[*i].host.cast_const() <= host);
        let region = &self.regions[*self.mapped.get(after.checked_sub(1)?)?];
        let off = host as u64 - region.host as u64;
        (off < region.size).then(|| region.gpa + off)
    }

    /// Returns whether the front-end cut memory short.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.regions.iter().any(Region::is_gone)
    }
}

/// A vring's address translation: the table and the region hit last.
pub struct Translator {
    mem: Arc<GuestMemory>,
    gpa: u64,
    size: u64,
    host: *mut u8,
}

// SAFETY: the pointer belongs to a mapping that `mem` keeps alive; see Mapping.
unsafe impl Send for Translator {}

impl Translator {
    /// A translator over `mem`.
    #[must_use]
    pub fn new(mem: Arc<GuestMemory>) -> Self {
        Self { mem, gpa: 0, size: 0, host: std::ptr::null_mut() }
    }

    /// The memory behind it.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.mem
    }

    /// Returns the local address of `gpa`, and how many of the `len` bytes wanted from there on are in one piece (at least
    /// one, unless `len` is 0). None: not in the guest's memory.
    #[inline(always)]
    pub fn at(&mut self, gpa: u64, len: u32) -> Option<(*mut u8, u32)> {
        let off = gpa.wrapping_sub(self.gpa);
        if off < self.size && u64::from(len) <= self.size - off {
            // SAFETY: off < size, within the mapping.
            return Some((unsafe { self.host.add(off as usize) }, len));
        }
        self.at_slow(gpa, len)
    }

    /// Returns the local address of `len` bytes from `gpa` on, if they are all in the region that was hit last.
    #[inline(always)]
    #[must_use]
    pub fn near(&self, gpa: u64, len: u32) -> Option<*mut u8> {
        let off = gpa.wrapping_sub(self.gpa);
        // SAFETY: off < size, within the mapping.
        (off < self.size && u64::from(len) <= self.size - off).then(|| unsafe { self.host.add(off as usize) })
    }

    #[cold]
    fn at_slow(&mut self, gpa: u64, len: u32) -> Option<(*mut u8, u32)> {
        let region = self.mem.find(gpa)?;
        (self.gpa, self.size, self.host) = (region.gpa, region.size, region.host);
        let off = gpa - region.gpa;
        let piece = u64::from(len).min(region.size - off) as u32;
        // SAFETY: find made sure that off < size.
        Some((unsafe { region.host.add(off as usize) }, piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn an_address_here_is_led_back_to_the_one_that_it_was_translated_from() {
        const SIZE: u64 = 1 << 16;
        // SAFETY: a string with its zero; the descriptor is fresh.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len(8 * SIZE).unwrap();
        let region = |n| Region::map(&file, n * 16 * SIZE, SIZE, 0x1000_0000 * (n + 1), n * SIZE).unwrap();
        let regions = (0..8).map(region);
        let (user, host) = (1, std::ptr::null_mut());
        let unmapped = Region { gpa: SIZE, size: SIZE, user, offset: 0, file: None, host, map: None };
        let all = GuestMemory::new(regions.chain([unmapped]).collect()).unwrap();
        let fewer = all.without(7 * 16 * SIZE, SIZE, 8 * 0x1000_0000).unwrap();
        for (memory, count) in [(all, 8), (fewer, 7)] {
            let mut translator = Translator::new(Arc::new(memory));
            for own in (0..count).map(|n| n * 16 * SIZE) {
                let (first, _) = translator.at(own, 1).unwrap();
                let (end, _) = translator.at(own + SIZE - 1, 1).unwrap();
                let memory = translator.memory();
                assert_eq!(memory.gpa_of(first), Some(own));
                assert_eq!(memory.gpa_of(end), Some(own + SIZE - 1));
                let behind = memory.gpa_of(end.wrapping_add(1));
                assert!(
                    behind.is_none_or(|gpa| gpa % (16 * SIZE) == 0),
                    "{behind:x?} is another region's first"
                );
            }
            assert_eq!(translator.memory().gpa_of(std::ptr::null()), None);
            assert_eq!(translator.memory().gpa_of(std::ptr::without_provenance(usize::MAX)), None);
        }
    }
}
