// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's memory seen from outside: its memfd, found below /proc and mapped here, and pages of it allocated and zeroed before QEMU pins them.
//!
//! Huge pages need no reservation: where the host allows them on shared memory, MADV_HUGEPAGE asks for them; where it does not,
//! MADV_COLLAPSE (Linux 6.1) makes one of an empty range directly. Where neither works the pages are small, and all else is the same.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use thiserror::Error;

/// A huge page of x86-64.
const HUGE: u64 = 2 << 20;

/// Memory that cannot be reached from outside.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// QEMU has no such memfd.
    #[error(
        "process {pid} has no memory file of {size} bytes: the memory behind virtio-mem must be a memory-backend-memfd with share=on"
    )]
    NoFile {
        /// QEMU's process.
        pid: u32,
        /// The size looked for.
        size: u64,
    },
    /// The system refused.
    #[error("the VM's memory cannot be mapped ({0})")]
    System(#[from] io::Error),
    /// The host has no memory left for it.
    #[error("the host has no memory for bytes {start} to {end} of the VM ({source})")]
    Exhausted {
        /// First byte.
        start: u64,
        /// Behind the last byte.
        end: u64,
        /// What the kernel said.
        source: io::Error,
    },
}

/// How pages are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pages {
    /// Huge by MADV_HUGEPAGE.
    Advised,
    /// Huge by MADV_COLLAPSE.
    Collapsed,
    /// Whatever the file gives: small pages, or hugetlb's.
    Plain,
}

/// A VM's memory, mapped here.
pub struct Memory {
    start: NonNull<u8>,
    length: usize,
    pages: Pages,
}

// SAFETY: the mapping is only ever given to madvise, which any thread may call on any part of it at any time; no
// reference into it is made.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The `index`th memory file of `size` bytes that QEMU has open, in the order it opened them.
pub fn find_file(root: &Path, pid: u32, size: u64, index: usize) -> Result<PathBuf, MemoryError> {
    let folder = root.join("proc").join(pid.to_string()).join("fd");
    let mut found: Vec<(u32, u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let number = path.file_name().and_then(|n| n.to_str()?.parse().ok());
        let Some(number) = number else { continue };
        // Zones are memfds too, and named.
        let memory = fs::read_link(&path).is_ok_and(|target| {
            let target = target.to_string_lossy();
            target.contains("memfd:") && !target.contains("memfd:tombolo-zone")
        });
        if !memory {
            continue;
        }
        let status = fs::metadata(&path)?;
        // A file that is open twice is one file.
        if status.size() == size && !found.iter().any(|(_, inode, _)| *inode == status.ino()) {
            found.push((number, status.ino(), path));
        }
    }
    found.sort();
    found.into_iter().nth(index).map(|(_, _, path)| path).ok_or(MemoryError::NoFile { pid, size })
}

impl Memory {
    /// Maps the file at `path`, all of its `size` bytes. Nothing is touched yet.
    pub fn map(path: &Path, size: u64, huge: bool) -> Result<Self, MemoryError> {
        let file = File::options().read(true).write(true).open(path)?;
        let length = usize::try_from(size).map_err(io::Error::other)?;
        // One page more than needed would do to align by hand; the kernel aligns large shared mappings to huge pages itself.
        // SAFETY: a new mapping at an address the kernel chooses replaces nothing.
        let start = unsafe {
            mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        }
        .map_err(io::Error::from)?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at null"))?;
        let mut memory = Self { start, length, pages: Pages::Plain };
        if huge {
            memory.pages = if memory.advise(0..size, Advice::LinuxHugepage).is_ok() && shared_thp_on_request()
            {
                Pages::Advised
            } else {
                Pages::Collapsed
            };
        }
        Ok(memory)
    }

    /// How pages are made; Collapsed turns into Plain for a range where it fails.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Allocates and zeroes the pages of a range that are not there yet. Returns how many bytes were asked for as huge pages
    /// and not refused.
    pub fn populate(&self, range: Range<u64>) -> Result<u64, MemoryError> {
        let mut huge = 0;
        match self.pages {
            Pages::Collapsed => {
                let mut at = range.start;
                while at < range.end {
                    let end = (at / HUGE * HUGE + HUGE).min(range.end);
                    if end - at == HUGE && self.collapse(at..end) {
                        huge += HUGE;
                    }
                    at = end;
                }
            }
            Pages::Advised => huge = range.end - range.start,
            Pages::Plain => {}
        }
        self.advise(range.clone(), Advice::LinuxPopulateWrite).map_err(|source| MemoryError::Exhausted {
            start: range.start,
            end: range.end,
            source,
        })?;
        Ok(huge)
    }

    /// How much of the whole file exists, in bytes.
    pub fn allocated(path: &Path) -> io::Result<u64> {
        Ok(fs::metadata(path)?.blocks() * 512)
    }

    fn part(&self, range: &Range<u64>) -> io::Result<(*mut std::ffi::c_void, usize)> {
        let start = usize::try_from(range.start).map_err(io::Error::other)?;
        let end = usize::try_from(range.end).map_err(io::Error::other)?;
        if start >= end || end > self.length {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: start is below the mapping's length.
        let pointer = unsafe { self.start.as_ptr().add(start) };
        Ok((pointer.cast(), end - start))
    }

    fn advise(&self, range: Range<u64>, advice: Advice) -> io::Result<()> {
        let (pointer, length) = self.part(&range)?;
        loop {
            // SAFETY: the range lies in this mapping, and none of these advices changes what it contains.
            match unsafe { madvise(pointer, length, advice) } {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn collapse(&self, range: Range<u64>) -> bool {
        let Ok((pointer, length)) = self.part(&range) else { return false };
        // SAFETY: the range lies in this mapping; collapsing keeps its content.
        unsafe { libc::madvise(pointer, length, libc::MADV_COLLAPSE) == 0 }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and nothing refers to it any more.
        let result = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(result.is_ok());
    }
}

/// Whether madvise gets huge pages on shared memory here.
fn shared_thp_on_request() -> bool {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|word| text.contains(word))
}

/// CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn memfd(size: u64) -> (File, PathBuf) {
        let fd = rustix::fs::memfd_create("tombolo-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(size).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        (file, path)
    }

    #[test]
    fn populating_from_outside_allocates_the_range_and_nothing_else() {
        for huge in [false, true] {
            let (_file, path) = memfd(32 << 20);
            let memory = Memory::map(&path, 32 << 20, huge).unwrap();
            assert_eq!(Memory::allocated(&path).unwrap(), 0);
            memory.populate(8 << 20..16 << 20).unwrap();
            assert_eq!(Memory::allocated(&path).unwrap(), 8 << 20, "huge: {huge}");
        }
    }

    #[test]
    fn what_the_guest_has_written_stays() {
        use std::os::unix::fs::FileExt;
        let (file, path) = memfd(8 << 20);
        file.write_all_at(b"guest", 3 << 20).unwrap();
        let memory = Memory::map(&path, 8 << 20, true).unwrap();
        memory.populate(0..8 << 20).unwrap();
        let mut bytes = [0; 5];
        file.read_exact_at(&mut bytes, 3 << 20).unwrap();
        assert_eq!(&bytes, b"guest");
    }

    #[test]
    fn a_range_outside_is_refused() {
        let (_file, path) = memfd(4 << 20);
        let memory = Memory::map(&path, 4 << 20, false).unwrap();
        assert!(memory.populate(0..8 << 20).is_err());
        assert!(memory.populate(1 << 20..1 << 20).is_err());
    }

    #[test]
    fn files_are_found_by_size_and_order() {
        let size = (64 << 20) + 4096 * u64::from(std::process::id() % 1000);
        let (first, _) = memfd(size);
        let (second, _) = memfd(size);
        let own = std::process::id();
        let inode = |index| fs::metadata(find_file(Path::new("/"), own, size, index).unwrap()).unwrap().ino();
        assert_eq!(inode(0), first.metadata().unwrap().ino());
        assert_eq!(inode(1), second.metadata().unwrap().ino());
        assert!(matches!(find_file(Path::new("/"), own, size, 2), Err(MemoryError::NoFile { .. })));
    }
}
