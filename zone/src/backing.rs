// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory of a zone: an anonymous memory file, huge pages, or a file that persists.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::IFlags;
use serde::{Deserialize, Serialize};

use crate::numa::{self, Nodes};
use crate::{Error, Result};

/// The kind of a zone's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// A memfd: freed with its last member. Its size is sealed, so that no member can shrink it and raise SIGBUS in another.
    #[default]
    Memfd,
    /// A memfd of huge pages of this many bytes (2 MiB or 1 GiB), which must be reserved (`/proc/sys/vm/nr_hugepages`); sealed as well.
    Hugetlb(u64),
    /// A file, which persists. On a DAX file system (persistent memory) or tmpfs it is memory itself. Its file system must be the
    /// kernel's own: pages that another process or machine delivers may never come, while a member holds a lock of the zone.
    File(PathBuf),
}

impl Backing {
    /// Returns a name for messages.
    pub fn describe(&self, zone: &str) -> String {
        match self {
            Backing::Memfd => format!("zone {zone} (memfd)"),
            Backing::Hugetlb(size) => format!("zone {zone} (huge pages of {size} bytes)"),
            Backing::File(path) => path.display().to_string(),
        }
    }

    /// Makes the memory, `size` bytes, zeroed, on these NUMA nodes. A file must not exist yet.
    pub(crate) fn create(&self, name: &str, size: u64, nodes: Option<&Nodes>) -> Result<File> {
        let what = self.describe(name);
        let length = libc::off_t::try_from(size).map_err(|_| Error::Config {
            zone: name.to_owned(),
            why: format!("{size} bytes is too large"),
        })?;
        let place = |file: &File| match nodes {
            Some(nodes) => numa::place(file.as_fd(), size, nodes)
                .map_err(|e| Error::io(format!("{what}: memory {nodes}"), e)),
            None => Ok(()),
        };
        match self {
            Backing::Memfd => {
                let file = sealed_memfd(name, length, 0, &what)?;
                place(&file)?;
                Ok(file)
            }
            Backing::Hugetlb(page) => {
                if !page.is_power_of_two() || *page < 4096 || size % page != 0 {
                    return Err(Error::Config {
                        zone: name.to_owned(),
                        why: format!("{size} bytes is not a multiple of the huge page size {page}"),
                    });
                }
                let flags = libc::MFD_HUGETLB | page.trailing_zeros() << libc::MFD_HUGE_SHIFT;
                let file = sealed_memfd(name, length, flags, &what)?;
                place(&file)?;
                // Without this a lack of huge pages would raise SIGBUS in the member that touches the last one.
                // SAFETY: a descriptor of our own.
                if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } != 0 {
                    return Err(Error::last_os(format!(
                        "{what}: reserving {} huge pages (write a larger number into /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages)",
                        size / page,
                        page >> 10
                    )));
                }
                Ok(file)
            }
            Backing::File(path) => {
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(path)
                    .map_err(|e| Error::io(format!("creating {what}"), e))?;
                write_in_place(&file);
                if let Err(error) = reserve(&file, length, &what) {
                    let _ = std::fs::remove_file(path);
                    return Err(error);
                }
                Ok(file)
            }
        }
    }
}

/// Has stores to an empty file change the blocks that it has, where its file system would else write new ones (btrfs: then without checksums). On a full disk
/// there would be none, and a store to a mapped page would raise SIGBUS, in QEMU too, though all room was allocated.
pub fn write_in_place(file: &File) {
    if let Ok(flags) = rustix::fs::ioctl_getflags(file) {
        // Other file systems refuse it: they do so anyway.
        let _refused = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Allocates an empty file's `length` bytes, if its pages are this kernel's own.
pub(crate) fn reserve(file: &File, length: libc::off_t, what: &str) -> Result<()> {
    check_pages(file.as_fd(), what)?;
    // SAFETY: a descriptor of our own.
    let refused = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) };
    if refused != 0 {
        let error = std::io::Error::from_raw_os_error(refused);
        return Err(Error::io(format!("{what}: allocating {length} bytes"), error));
    }
    Ok(())
}

/// Returns whether files of a folder are memory, which a reboot of the host takes.
///
/// # Errors
/// The folder can't be opened.
pub fn lies_in_memory(folder: &Path) -> Result<bool> {
    let failed = |e| Error::io(format!("the folder {}", folder.display()), e);
    let opened = File::open(folder).map_err(failed)?;
    // SAFETY: statfs is plain data; the kernel fills it.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid descriptor and a valid buffer.
    if unsafe { libc::fstatfs(opened.as_raw_fd(), &mut info) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok([libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, RAMFS_MAGIC].contains(&info.f_type))
}

/// linux/magic.h.
const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;

pub(crate) fn sealed_memfd(name: &str, length: libc::off_t, flags: libc::c_uint, what: &str) -> Result<File> {
    let c_name = CString::new(format!("tombolo-zone-{name}"))
        .map_err(|_| Error::Config { zone: name.to_owned(), why: "its name holds a NUL".to_owned() })?;
    // SAFETY: a valid string; the descriptor is new and ours.
    let fd =
        unsafe { libc::memfd_create(c_name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) };
    if fd < 0 {
        return Err(Error::last_os(format!("{what}: memfd_create")));
    }
    // SAFETY: as above.
    let file = unsafe { File::from_raw_fd(fd) };
    // SAFETY: a descriptor of our own.
    if unsafe { libc::ftruncate(fd, length) } != 0 {
        return Err(Error::last_os(format!("{what}: setting its size to {length} bytes")));
    }
    // SAFETY: a descriptor of our own.
    if unsafe {
        libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)
    } != 0
    {
        return Err(Error::last_os(format!("{what}: sealing its size")));
    }
    Ok(file)
}

/// Returns the page size of a hugetlbfs file; `None` for others.
pub(crate) fn huge_page_size(fd: BorrowedFd<'_>) -> Option<usize> {
    // SAFETY: statfs is plain data; the kernel fills it.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid descriptor and a valid buffer.
    let answered = unsafe { libc::fstatfs(fd.as_raw_fd(), &mut info) } == 0;
    (answered && info.f_type == libc::HUGETLBFS_MAGIC).then(|| usize::try_from(info.f_bsize).ok()).flatten()
}

/// File systems whose pages another process or machine delivers (linux/magic.h and the file systems' own headers).
const DELIVERED: &[(libc::__fsword_t, &str)] = &[
    (libc::FUSE_SUPER_MAGIC, "FUSE"),
    (0x0102_1997, "9p"),
    (libc::NFS_SUPER_MAGIC, "NFS"),
    (libc::SMB_SUPER_MAGIC, "SMB"),
    (0xff53_4d42, "SMB"),
    (0xfe53_4d42, "SMB"),
    (libc::AFS_SUPER_MAGIC, "AFS"),
    (libc::CODA_SUPER_MAGIC, "Coda"),
    (0x00c3_6400, "Ceph"),
];

/// Refuses a file whose pages come from another process or machine.
pub(crate) fn check_pages(fd: BorrowedFd<'_>, what: &str) -> Result<()> {
    // SAFETY: asks for a number. Memory files and those of tmpfs and hugetlbfs have seals, others don't.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) } >= 0 {
        return Ok(());
    }
    // SAFETY: statfs is plain data; the kernel fills it.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid descriptor and a valid buffer.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &mut info) } != 0 {
        return Err(Error::last_os(format!("{what}: asking for its file system")));
    }
    match DELIVERED.iter().find(|(magic, _)| *magic == info.f_type) {
        None => Ok(()),
        Some((_, name)) => Err(Error::NotMemory { zone: what.to_owned(), kind: (*name).to_owned() }),
    }
}
