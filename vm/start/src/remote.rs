// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Anonymous memory of another process, made to exist from outside without a byte of it being written.
//!
//! `process_vm_writev(2)` takes hold of the target's pages for writing, which allocates and zeroes those that are not there, huge ones where the
//! target asked for them (QEMU does), and then copies. Here it has nothing that it could copy: the source is a mapping that no process may read, so
//! the copy fails at its first byte and the pages stay. The call's answer is the same error as for a page that could not be had; which
//! it was is read from the target's `pagemap` (Linux `Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Bytes per call; one huge page, and no more than the kernel takes hold of at once.
const PIECE: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// Why pages could not be made.
#[derive(Debug)]
pub enum RemoteError {
    /// The process has ended.
    Gone,
    /// The kernel has no page for it, or refuses to let us.
    Refused(io::Error),
}

/// A part of another process' memory.
#[derive(Debug)]
pub struct Remote {
    pid: i32,
    start: u64,
    pages: File,
    unreadable: Unreadable,
}

/// Address space without access; read from it is an error, never a crash, in a system call.
#[derive(Debug)]
struct Unreadable(usize);

impl Unreadable {
    fn new() -> io::Result<Self> {
        let length = usize::try_from(PIECE).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address the kernel chooses replaces nothing.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        Ok(Self(start as usize))
    }
}

impl Drop for Unreadable {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and there is no reference into it.
        let result = unsafe { munmap(self.0 as *mut _, PIECE as usize) };
        debug_assert!(result.is_ok());
    }
}

impl Remote {
    /// The memory from `start` on of the process `pid`.
    pub fn open(pid: u32, start: u64) -> io::Result<Self> {
        Ok(Self {
            pid: i32::try_from(pid).map_err(io::Error::other)?,
            start,
            pages: File::open(format!("/proc/{pid}/pagemap"))?,
            unreadable: Unreadable::new()?,
        })
    }

    /// Makes the pages of a range exist. What is there stays as it is.
    pub fn populate(&self, range: Range<u64>) -> Result<(), RemoteError> {
        let mut at = range.start;
        while at < range.end {
            let end = (at / PIECE * PIECE + PIECE).min(range.end);
            self.piece(at, end)?;
            at = end;
        }
        Ok(())
    }

    fn piece(&self, at: u64, end: u64) -> Result<(), RemoteError> {
        let wrong = |e: std::num::TryFromIntError| RemoteError::Refused(io::Error::other(e));
        let length = usize::try_from(end - at).map_err(wrong)?;
        let address = usize::try_from(self.start + at).map_err(wrong)?;
        let local = libc::iovec { iov_base: self.unreadable.0 as *mut _, iov_len: length };
        let remote = libc::iovec { iov_base: address as *mut _, iov_len: length };
        // SAFETY: both vectors are plain numbers to this process: the first lies in a mapping of ours that the kernel only tries to read,
        // the second in another process.
        let written = unsafe { libc::process_vm_writev(self.pid, &local, 1, &remote, 1, 0) };
        debug_assert!(written <= 0, "something was copied out of memory without access");
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ESRCH) {
            return Err(RemoteError::Gone);
        }
        // Pages are taken in order, so the last one tells of all.
        match self.exists(end - 1) {
            Ok(true) => Ok(()),
            Ok(false) if error.raw_os_error() == Some(libc::EFAULT) => {
                Err(RemoteError::Refused(io::Error::from_raw_os_error(libc::ENOMEM)))
            }
            Ok(false) => Err(RemoteError::Refused(error)),
            Err(error) => Err(RemoteError::Refused(error)),
        }
    }

    /// Returns whether the page of a byte is in memory, or was and is swapped.
    fn exists(&self, at: u64) -> io::Result<bool> {
        const PRESENT_OR_SWAPPED: u64 = 3 << 62;
        let mut entry = [0; 8];
        self.pages.read_exact_at(&mut entry, (self.start + at) / PAGE * 8)?;
        Ok(u64::from_le_bytes(entry) & PRESENT_OR_SWAPPED != 0)
    }
}

/// The address of the anonymous, writable, private memory of exactly `size` bytes in a process.
pub fn find(root: &Path, pid: u32, size: u64) -> io::Result<Option<u64>> {
    let maps = fs::read_to_string(root.join("proc").join(pid.to_string()).join("maps"))?;
    Ok(maps.lines().find_map(|line| anonymous(line, size)))
}

/// The start of a line's mapping, if it is what [`find`] looks for (proc_pid_maps(5)).
fn anonymous(line: &str, size: u64) -> Option<u64> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let private = fields.next()? == "rw-p";
    let inode = fields.nth(2)?;
    (private && inode == "0" && fields.next().is_none() && end.checked_sub(start)? == size).then_some(start)
}

/// The bytes of the mapping at `start` that exist.
pub fn allocated(pid: u32, start: u64) -> io::Result<u64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let head = format!("{start:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.trim_start_matches('0').starts_with(&head));
    let kib =
        lines.find_map(|line| line.strip_prefix("Rss:")?.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.unwrap_or(0) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const SIZE: u64 = 24 << 20;

    /// A process with a mapping of [`SIZE`] bytes in which one byte is written: a copy of this one that waits.
    struct Other {
        pid: u32,
        start: u64,
        ended: Cell<bool>,
    }

    impl Other {
        fn start() -> Self {
            // A guard before and behind it, as QEMU has, so that no neighbour becomes part of it.
            let whole = SIZE as usize + 2 * PAGE as usize;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: new mappings replace nothing; the inner one replaces a part of the outer one, and the byte lies in it.
            let start = unsafe {
                let outer =
                    mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE)
                        .unwrap();
                let inner = outer.cast::<u8>().add(PAGE as usize).cast();
                let inner = mmap_anonymous(inner, SIZE as usize, access, MapFlags::PRIVATE | MapFlags::FIXED);
                inner.unwrap().cast::<u8>()
            };
            // SAFETY: 5 MiB into a mapping of 24.
            unsafe { start.add(5 << 20).write(42) };
            // SAFETY: the child calls nothing but pause(2).
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                loop {
                    // SAFETY: no arguments.
                    unsafe { libc::pause() };
                }
            }
            Self { pid: pid.try_into().unwrap(), start: start as u64, ended: Cell::new(false) }
        }

        fn end(&self) {
            self.ended.set(true);
            // SAFETY: plain numbers, and no status is asked for.
            unsafe {
                libc::kill(self.pid as i32, libc::SIGKILL);
                libc::waitpid(self.pid as i32, std::ptr::null_mut(), 0);
            }
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            if !self.ended.get() {
                self.end();
            }
        }
    }

    #[test]
    fn pages_of_another_process_come_to_exist_and_what_it_wrote_stays() {
        let other = Other::start();
        let Other { pid, start, .. } = other;
        assert_eq!(find(Path::new("/"), pid, SIZE).unwrap(), Some(start));
        assert_eq!(find(Path::new("/"), pid, SIZE + PAGE).unwrap(), None);
        let remote = Remote::open(pid, start).unwrap();
        let before = allocated(pid, start).unwrap();
        remote.populate(4 << 20..13 << 20).unwrap();
        assert!(remote.exists(4 << 20).unwrap() && remote.exists((13 << 20) - 1).unwrap());
        // All but the page that was written, at most what whole huge pages around it add.
        let more = allocated(pid, start).unwrap() - before;
        assert!(((9 << 20) - (2 << 20)..=13 << 20).contains(&more), "{more}");
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let mut byte = [0];
        memory.read_exact_at(&mut byte, start + (5 << 20)).unwrap();
        assert_eq!(byte, [42]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_so_is_a_process_that_has_ended() {
        let other = Other::start();
        let remote = Remote::open(other.pid, other.start).unwrap();
        assert!(matches!(remote.populate(SIZE - PAGE..SIZE + PAGE), Err(RemoteError::Refused(_))));
        other.end();
        assert!(matches!(remote.populate(0..PAGE), Err(RemoteError::Gone)));
    }

    #[test]
    fn only_private_writable_memory_without_a_file_or_a_name_is_taken() {
        let line = |text| anonymous(text, 0x1000);
        assert_eq!(line("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 "), Some(0x7f00_0000_0000));
        assert_eq!(line("7f0000000000-7f0000001000 r--p 00000000 00:00 0 "), None);
        assert_eq!(line("7f0000000000-7f0000001000 rw-s 00000000 00:01 7 /memfd:x (deleted)"), None);
        assert_eq!(line("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [heap]"), None);
        assert_eq!(line("7f0000000000-7f0000002000 rw-p 00000000 00:00 0 "), None);
    }
}
