// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's memory seen from outside, and pages of it allocated and zeroed before QEMU pins them: anonymous memory ([`crate::remote`]), or a
//! memfd, found below /proc and mapped here.
//!
//! Huge pages need no reservation. Anonymous memory has them wherever the host's transparent huge pages are not off, since QEMU asks for them.
//! On a memfd, where the host allows them on shared memory MADV_HUGEPAGE asks for them; where it does not, MADV_COLLAPSE (Linux 6.1)
//! makes one of an empty range directly. Where neither works the pages are small, and all else is the same.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use thiserror::Error;

use crate::remote::{self, Remote, RemoteError};

/// A huge page of x86-64.
const HUGE: u64 = 2 << 20;

/// Memory that cannot be reached from outside.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// QEMU has no such memory.
    #[error(
        "process {pid} has no memory of {size} bytes: the memory behind virtio-mem must be a memory-backend-ram, or a memory-backend-memfd \
         with share=on"
    )]
    Absent {
        /// QEMU's process.
        pid: u32,
        /// The size looked for.
        size: u64,
    },
    /// The system refused.
    #[error("the VM's memory cannot be mapped ({0})")]
    System(#[from] io::Error),
    /// QEMU has ended.
    #[error("process {0} has ended")]
    Gone(u32),
    /// The host has no memory left for it.
    #[error("the host has no memory for bytes {start} to {end} of the VM ({source})")]
    Exhausted {
        /// First byte.
        start: u64,
        /// Behind the last byte.
        end: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The way in which pages of a file are made; Collapsed turns into Plain for a range where it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    /// Huge by MADV_HUGEPAGE.
    Advised,
    /// Huge by MADV_COLLAPSE.
    Collapsed,
    /// The pages of the file itself: small ones, or hugetlb's.
    Plain,
}

/// The place of a VM's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A memory file, below /proc.
    File(PathBuf),
    /// Anonymous memory of a process, at an address of its own.
    Anonymous {
        /// The PID of the process that has the memory mapped.
        pid: u32,
        /// The first byte's address.
        start: u64,
    },
}

impl Source {
    /// The memory of exactly `size` bytes that the process has: a file, or else anonymous.
    pub fn find(root: &Path, pid: u32, size: u64) -> Result<Self, MemoryError> {
        if let Some(path) = find_file(root, pid, size)? {
            return Ok(Self::File(path));
        }
        match remote::find(root, pid, size)? {
            Some(start) => Ok(Self::Anonymous { pid, start }),
            None => Err(MemoryError::Absent { pid, size }),
        }
    }

    /// Opens it, all of its `size` bytes. Nothing is touched yet.
    pub fn open(&self, size: u64, huge: bool) -> Result<Memory, MemoryError> {
        match self {
            Self::File(path) => Ok(Memory::Mapped(Mapped::open(path, size, huge)?)),
            Self::Anonymous { pid, start } => Ok(Memory::Remote(Remote::open(*pid, *start)?, *pid)),
        }
    }

    /// The bytes of it that exist.
    pub fn allocated(&self) -> io::Result<u64> {
        match self {
            Self::File(path) => Ok(fs::metadata(path)?.blocks() * 512),
            Self::Anonymous { pid, start } => remote::allocated(*pid, *start),
        }
    }
}

/// A VM's memory, open.
pub enum Memory {
    /// A file, mapped here.
    Mapped(Mapped),
    /// A process' own, with its id.
    Remote(Remote, u32),
}

impl Memory {
    /// Allocates and zeroes the pages of a range that are not there yet. Returns how many bytes were asked for as huge pages
    /// and not refused.
    pub fn populate(&self, range: Range<u64>) -> Result<u64, MemoryError> {
        let Range { start, end } = range;
        match self {
            Self::Mapped(memory) => memory.populate(start..end),
            Self::Remote(memory, pid) => match memory.populate(start..end) {
                Ok(()) => Ok(if anonymous_thp() { end - start } else { 0 }),
                Err(RemoteError::Gone) => Err(MemoryError::Gone(*pid)),
                Err(RemoteError::Refused(source)) => Err(MemoryError::Exhausted { start, end, source }),
            },
        }
    }
}

/// A memory file, mapped.
pub struct Mapped {
    start: NonNull<u8>,
    length: usize,
    pages: Pages,
}

// SAFETY: the mapping is only ever given to madvise, which any thread may call on any part of it at any time; no
// reference into it is made.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

/// The memory file of `size` bytes that QEMU has open; the first, should there be several.
fn find_file(root: &Path, pid: u32, size: u64) -> io::Result<Option<PathBuf>> {
    let folder = root.join("proc").join(pid.to_string()).join("fd");
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
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
        if fs::metadata(&path)?.size() == size {
            found.push((number, path));
        }
    }
    Ok(found.into_iter().min().map(|(_, path)| path))
}

impl Mapped {
    fn open(path: &Path, size: u64, huge: bool) -> Result<Self, MemoryError> {
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

    fn populate(&self, range: Range<u64>) -> Result<u64, MemoryError> {
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

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and nothing refers to it any more.
        let result = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(result.is_ok());
    }
}

/// Returns whether madvise gets huge pages on shared memory here.
fn shared_thp_on_request() -> bool {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|word| text.contains(word))
}

/// Returns whether anonymous memory that asks for huge pages gets them here.
fn anonymous_thp() -> bool {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    ["[always]", "[madvise]"].iter().any(|word| text.contains(word))
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
            let memory = Mapped::open(&path, 32 << 20, huge).unwrap();
            assert_eq!(Source::File(path.clone()).allocated().unwrap(), 0);
            memory.populate(8 << 20..16 << 20).unwrap();
            assert_eq!(Source::File(path.clone()).allocated().unwrap(), 8 << 20, "huge: {huge}");
        }
    }

    #[test]
    fn what_the_guest_has_written_stays() {
        use std::os::unix::fs::FileExt;
        let (file, path) = memfd(8 << 20);
        file.write_all_at(b"guest", 3 << 20).unwrap();
        let memory = Mapped::open(&path, 8 << 20, true).unwrap();
        memory.populate(0..8 << 20).unwrap();
        let mut bytes = [0; 5];
        file.read_exact_at(&mut bytes, 3 << 20).unwrap();
        assert_eq!(&bytes, b"guest");
    }

    #[test]
    fn a_range_outside_is_refused() {
        let (_file, path) = memfd(4 << 20);
        let memory = Mapped::open(&path, 4 << 20, false).unwrap();
        assert!(memory.populate(0..8 << 20).is_err());
        assert!(memory.populate(1 << 20..1 << 20).is_err());
    }

    #[test]
    fn files_are_found_by_size() {
        let size = (64 << 20) + 4096 * u64::from(std::process::id() % 1000);
        let (file, _) = memfd(size);
        let own = std::process::id();
        let Source::File(path) = Source::find(Path::new("/"), own, size).unwrap() else { panic!("a file") };
        assert_eq!(fs::metadata(path).unwrap().ino(), file.metadata().unwrap().ino());
        drop(file);
        assert!(matches!(Source::find(Path::new("/"), own, size), Err(MemoryError::Absent { .. })));
    }
}
