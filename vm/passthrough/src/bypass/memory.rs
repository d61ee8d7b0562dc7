// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a QEMU's memory is: which guest-physical addresses lie where in its memfds, and which host-physical pages are behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::Session;
use super::format::{self, tbp_page};

/// A range of guest-physical addresses that is memory, as `info mtree -f` of QEMU's monitor shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first address.
    pub first: u64,
    /// The last address.
    pub last: u64,
}

/// Reads the ranges of a guest's own memory from the monitor's answer to `info mtree -f`: those of the backends ram0, ram1 …; zones have others.
#[must_use]
pub fn ranges(mtree: &str) -> Vec<Range> {
    let views = mtree.split("FlatView #");
    let Some(view) = views.into_iter().find(|view| view.contains("AS \"memory\"")) else { return Vec::new() };
    let range = |line: &str| {
        let (addresses, rest) = line.trim().split_once(' ')?;
        let (first, last) = addresses.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (_, name) = rest.split_once(", ram): ")?;
        let backend = name.split(' ').next()?.strip_prefix("ram")?;
        let own = backend.chars().all(|c| c.is_ascii_digit());
        own.then_some(Range { first: number(first)?, last: number(last)? })
    };
    view.lines().filter_map(range).collect()
}

/// A place in QEMU's address space: an address of the monitor's answer to `gpa2hva`.
#[must_use]
pub fn host_address(said: &str) -> Option<u64> {
    let (_, address) = said.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address, 16).ok()
}

/// A file by the device that it lies on, major and minor number, and its inode number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    /// The file that these metadata are of.
    #[must_use]
    pub fn of(metadata: &fs::Metadata) -> FileId {
        let device = metadata.dev();
        FileId { device: (rustix::fs::major(device), rustix::fs::minor(device)), inode: metadata.ino() }
    }
}

/// A memfd and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    memfd: FileId,
    offset: u64,
}

/// Finds the memfd that a process has at `address`, by its /proc/PID/maps. `None`: something else is there.
#[must_use]
pub fn place(maps: &str, address: u64) -> Option<Place> {
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (first, last) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (first, last) = (number(first)?, number(last)?);
        let offset = number(words.nth(1)?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = words.next()?.parse().ok()?;
        let named = words.next().is_some_and(|name| name.starts_with("/memfd:"));
        (named && (first..last).contains(&address))
            .then(|| Place { memfd: FileId { device, inode }, offset: offset + address - first })
    })
}

/// The memory of a VM, pinned by a session.
#[derive(Debug)]
pub struct Memory {
    /// Bytes of a page.
    page: u64,
    memfds: BTreeMap<FileId, (File, Vec<u64>)>,
    /// By number of the guest-physical page.
    pages: BTreeMap<u64, Place>,
}

impl Memory {
    /// Pins the memory of the process `pid`: ranges of guest-physical addresses with the address of each in that process.
    ///
    /// # Errors
    /// A part is in pages of another size, or not where a huge page can be.
    pub fn pin(
        session: &Session,
        pid: u32,
        page: u64,
        ranges: &[(Range, Option<u64>)],
    ) -> anyhow::Result<Memory> {
        let process = Path::new("/proc").join(pid.to_string());
        let maps = fs::read_to_string(process.join("maps"))?;
        let mut memory = Memory { page, memfds: BTreeMap::new(), pages: BTreeMap::new() };
        for (range, address) in ranges {
            if let Some(place) = address.and_then(|address| place(&maps, address)) {
                memory.add(*range, place)?;
            }
        }
        let wanted: BTreeSet<FileId> = memory.pages.values().map(|place| place.memfd).collect();
        for entry in fs::read_dir(process.join("fd"))? {
            let path = entry?.path();
            let Ok(id) = fs::metadata(&path).map(|metadata| FileId::of(&metadata)) else { continue };
            if !wanted.contains(&id) || memory.memfds.contains_key(&id) {
                continue;
            }
            let file = File::options().read(true).write(true).open(&path)?;
            let size = file.metadata()?.len();
            let frames = session.pin(std::os::fd::AsFd::as_fd(&file), size, page).map_err(|e| {
                anyhow::anyhow!("its memory is not pinned in huge pages of {} MiB: {e}", page >> 20)
            })?;
            memory.memfds.insert(id, (file, frames));
        }
        let lost = wanted.iter().find(|id| !memory.memfds.contains_key(id));
        anyhow::ensure!(lost.is_none(), "QEMU has closed a memfd of its guest's memory");
        anyhow::ensure!(!memory.pages.is_empty(), "QEMU shows no memory in huge pages");
        Ok(memory)
    }

    fn add(&mut self, range: Range, place: Place) -> anyhow::Result<()> {
        anyhow::ensure!(
            range.first % self.page == place.offset % self.page,
            "guest-physical address {:#x} and its memory are not aligned to each other in huge pages",
            range.first
        );
        let inside = range.first % self.page;
        let mut offset = place.offset - inside;
        for number in range.first / self.page..=range.last / self.page {
            let page = Place { memfd: place.memfd, offset };
            let other = self.pages.insert(number, page).filter(|other| *other != page);
            anyhow::ensure!(other.is_none(), "page {number} of the guest lies at two places of its memory");
            offset += self.page;
        }
        Ok(())
    }

    /// Bytes of a page.
    pub(super) fn page(&self) -> u64 {
        self.page
    }

    /// The number of frames in the map.
    pub(super) fn frames(&self) -> u64 {
        self.pages.last_key_value().map_or(0, |(number, _)| number + 1)
    }

    /// The host-physical address of a guest's page.
    pub(super) fn frame(&self, number: u64) -> Option<u64> {
        let place = self.pages.get(&number)?;
        let (_, frames) = self.memfds.get(&place.memfd)?;
        frames.get(usize::try_from(place.offset / self.page).ok()?).copied()
    }

    /// The last host-physical address.
    pub(super) fn highest(&self) -> u64 {
        self.pages.keys().filter_map(|number| self.frame(*number)).max().unwrap_or(0) + (self.page - 1)
    }

    /// The request at a guest-physical address. `None`: no page of the guest's is there.
    pub(super) fn request(&self, address: u64) -> Option<Request> {
        if address % 4096 != 0 {
            return None;
        }
        let place = self.pages.get(&(address / self.page))?;
        let (file, _) = self.memfds.get(&place.memfd)?;
        Request::map(file, self.page, place.offset, address % self.page).ok()
    }

    #[cfg(test)]
    pub(super) fn of_frames(page: u64, file: File, frames: &[u64]) -> Memory {
        let memfd = FileId::of(&file.metadata().unwrap());
        let pages = (0..frames.len() as u64).map(|n| (n, Place { memfd, offset: n * page })).collect();
        Memory { page, memfds: BTreeMap::from([(memfd, (file, frames.to_vec()))]), pages }
    }
}

/// A request page, mapped with the huge page that it is in.
pub(super) struct Request {
    start: NonNull<libc::c_void>,
    size: usize,
    page: NonNull<tbp_page>,
}

impl Request {
    fn map(file: &File, size: u64, offset: u64, inside: u64) -> io::Result<Request> {
        let too_large = |_| io::ErrorKind::InvalidInput;
        let (size, inside) =
            (usize::try_from(size).map_err(too_large)?, usize::try_from(inside).map_err(too_large)?);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )?
        };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the page lies in the mapping: `inside` is a multiple of 4096 below `size`.
        let page = unsafe { start.byte_add(inside) }.cast();
        Ok(Request { start, size, page })
    }

    /// Takes the request up, unless the guest has withdrawn it or it was answered before. The guest then waits for the answer.
    pub(super) fn take(&self) -> bool {
        self.status()
            .compare_exchange(format::TBP_PENDING, format::TBP_TAKEN, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: the word is mapped and aligned for as long as this value lives, and this process writes it only as an atomic.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.page.as_ptr()).status) }
    }

    /// A copy of the page; the guest may change the page at any time.
    pub(super) fn read(&self) -> tbp_page {
        fence(Ordering::Acquire);
        // SAFETY: the page is mapped and aligned, and any bytes are a tbp_page.
        unsafe { self.page.read_volatile() }
    }

    /// Writes the answer, its status last.
    pub(super) fn answer(&self, answer: &tbp_page) {
        let body = tbp_page { status: format::TBP_TAKEN, ..*answer };
        // SAFETY: the page is mapped and aligned; nothing else of this process refers to it meanwhile.
        unsafe { self.page.write_volatile(body) };
        self.status().store(answer.status, Ordering::Release);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own. Unmapping what is mapped can't fail.
        let _ = unsafe { munmap(self.start.as_ptr(), self.size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTREE: &str = "FlatView #0\n AS \"I/O\", root: io\n Root memory region: io\n  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan\n\n\
        FlatView #1\n AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n Root memory region: system\n\
        \x20 0000000000000000-00000000000bffff (prio 0, ram): ram0 KVM\n\
        \x20 00000000000c0000-00000000000dffff (prio 1, rom): pc.rom KVM\n\
        \x20 0000000000100000-000000003fffffff (prio 0, ram): ram0 @0000000000100000 KVM\n\
        \x20 0000000040000000-000000007fffffff (prio 0, ram): ram1 KVM\n\
        \x20 00000000fd000000-00000000fd003fff (prio 0, i/o): nvme\n\
        \x20 0000000100000000-000000013fffffff (prio 0, ram): ram1 @0000000040000000 KVM\n\
        \x20 0000000140000000-0000000143ffffff (prio 0, ram): zone-shared KVM\n";

    #[test]
    fn the_guests_memory_is_what_its_own_view_calls_ram() {
        let found: Vec<(u64, u64)> = ranges(MTREE).iter().map(|range| (range.first, range.last)).collect();
        let gib = 1 << 30;
        assert_eq!(found, [(0, 0xbffff), (0x10_0000, gib - 1), (gib, 2 * gib - 1), (4 * gib, 5 * gib - 1)]);
        assert_eq!(ranges("FlatView #0\n AS \"I/O\"\n"), []);
    }

    #[test]
    fn an_address_of_qemu_is_found_in_its_memfd() {
        let said = "Host virtual address for 0x100000 (ram0) is 0x7f0f87f00000\r\n";
        assert_eq!(host_address(said), Some(0x7f0f_87f0_0000));
        assert_eq!(host_address("No memory is mapped at address 0xff0000000"), None);
        let maps = "7f0f87e00000-7f0f9be00000 rw-s 00200000 00:0f 1077 /memfd:memory-backend-memfd (deleted)\n\
                    7f0fa0000000-7f0fa0021000 rw-p 00000000 00:00 0 \n";
        let memfd = FileId { device: (0, 15), inode: 1077 };
        assert_eq!(place(maps, 0x7f0f_87f0_0000), Some(Place { memfd, offset: 0x30_0000 }));
        assert_eq!(place(maps, 0x7f0f_a000_0000), None);
    }

    #[test]
    fn a_mapping_and_a_descriptor_of_one_file_have_the_same_device_and_inode() {
        let file = File::from(rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice, which nothing else refers to.
        let mapped = unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let found = place(&maps, mapped.unwrap() as u64).unwrap();
        assert_eq!(found, Place { memfd: FileId::of(&file.metadata().unwrap()), offset: 0 });
        // A file of another file system may have that inode number.
        let elsewhere = FileId { device: (u32::MAX, 0), ..found.memfd };
        assert_ne!(found.memfd, elsewhere);
    }

    #[test]
    fn a_range_that_begins_inside_a_huge_page_is_that_page_and_another_place_for_it_is_refused() {
        let mut memory = Memory { page: 2 << 20, memfds: BTreeMap::new(), pages: BTreeMap::new() };
        let memfd = FileId { device: (0, 15), inode: 1 };
        memory.add(Range { first: 0, last: 0xbffff }, Place { memfd, offset: 0 }).unwrap();
        memory.add(Range { first: 0x10_0000, last: 0x5f_ffff }, Place { memfd, offset: 0x10_0000 }).unwrap();
        assert_eq!(memory.pages.len(), 3);
        assert_eq!(memory.frames(), 3);
        let elsewhere = memory.add(Range { first: 0, last: 0xfff }, Place { memfd, offset: 0x20_0000 });
        assert!(elsewhere.is_err());
        let oblique = memory.add(Range { first: 0x80_0000, last: 0x80_ffff }, Place { memfd, offset: 4096 });
        assert!(oblique.is_err());
    }
}
