// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The room on a disk that a file needs before it is mapped and written: a store to a page without room raises SIGBUS.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::Context;
use rustix::fs::{FallocateFlags, FileType, SealFlags};
use rustix::io::Errno;

use crate::area::open_backing;

/// Gives a file `size` bytes, each with room on its file system. Where a file system can't keep room, its files have holes.
///
/// # Errors
/// ENOSPC; and others of fallocate(2) and ftruncate(2).
pub(crate) fn take(file: &File, size: u64) -> io::Result<()> {
    tombolo_zone::backing::write_in_place(file);
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(size),
        done => Ok(done?),
    }
}

/// Takes the room for the holes of a file that is to be mapped and written, as sparse copies have some, and for blocks that it shares with copies
/// (`cp --reflink`).
///
/// # Errors
/// Names the file, and what it has no room for.
pub(crate) fn fill_holes(path: &Path) -> anyhow::Result<()> {
    let file = open_backing(path, true).with_context(|| format!("opening {}", path.display()))?;
    let about = rustix::fs::fstat(&file)?;
    let (size, room) = (u64::try_from(about.st_size)?, u64::try_from(about.st_blocks)? * 512);
    // Memory that is no file's is taken as it is used, and a disk has its room.
    let is_memory = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if is_memory || FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    let take = |flags| match rustix::fs::fallocate(&file, flags | FallocateFlags::KEEP_SIZE, 0, size) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(e) => Err(e),
    };
    if room < size {
        take(FallocateFlags::empty()).with_context(|| {
            format!(
                "{}: has holes, and {} KiB that they take are not free on its file system",
                path.display(),
                (size - room) >> 10
            )
        })?;
    }
    // A store to a block that two files share takes a new one.
    take(FallocateFlags::UNSHARE_RANGE).with_context(|| {
        format!(
            "{}: shares blocks with a copy of it, and its file system has no room for others",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_no_holes_and_shares_nothing() {
        fill_holes(Path::new("/dev/null")).unwrap();
    }
}
