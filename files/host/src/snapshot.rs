// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Snapshots: a consistent image of a file system that is in use, and its way back into a zone.
//! The image is the area itself in a sparse file, which mount and fsck accept like any other. The file system is frozen while it is copied; the copy
//! is then recovered as after the death of all its members, and checked. The magic of each copy comes last: a part of one is no file system.

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::fs::{Timespec, Timestamps};

use crate::area::{Area, Map};
use crate::fs::{self, Filesystem, Handle, Mkfs, Result};
use crate::fsck::{self, Progress};
use crate::sys;

const BLOCK: u64 = sys::TFS_BLOCK as u64;
const FREE: u8 = sys::TFS_MAP_FREE as u8;
const MAGIC: u64 = offset_of!(sys::tfs_super, magic) as u64;
/// The type of FUSE file systems in statfs(2).
const FUSE: rustix::fs::FsWord = 0x6573_5546;
/// Blocks written to an image at a time.
const PIECE: usize = 256;
/// The members' changes wait so long for a piece of the copy at most.
const STANDSTILL: Duration = Duration::from_secs(30);
const SUSPENDED: &str = "this process was suspended, and the members of the zone went on after they had waited for it for a minute; take the snapshot again, and let it run";

/// The result of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Blocks copied.
    pub blocks: u64,
    /// The time for which the file system was frozen.
    pub frozen: Duration,
}

/// Thaws when dropped.
struct Frozen<'a>(&'a Filesystem);

impl<'a> Frozen<'a> {
    fn new(fs: &'a Filesystem) -> Result<Frozen<'a>> {
        fs.freeze()?;
        Ok(Frozen(fs))
    }
}

impl Frozen<'_> {
    /// Thaws.
    ///
    /// # Errors
    /// Others have ended the freeze: what was copied meanwhile is no state of the file system.
    fn end(self) -> anyhow::Result<()> {
        self.0.thaw().map_err(|_| anyhow::anyhow!(SUSPENDED))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // Where it is not frozen any more there is nothing to thaw.
        let _ = self.0.thaw();
    }
}

fn super_word(area: &Area, field: usize) -> anyhow::Result<u64> {
    area.word(field as u64).context("an area without a super block")
}

/// Returns the start of the block map and the number of blocks, checked.
fn geometry(area: &Area) -> anyhow::Result<(u64, u64)> {
    let blocks = super_word(area, offset_of!(sys::tfs_super, blocks))?;
    let map = super_word(area, offset_of!(sys::tfs_super, map_start))?.saturating_mul(BLOCK);
    if blocks > area.size() / BLOCK || map.checked_add(blocks).is_none_or(|end| end > area.size()) {
        bail!("the super block does not fit the area: {blocks} blocks, map at {map}, {} bytes", area.size());
    }
    Ok((map, blocks))
}

/// Copies the blocks in use, by the area's own map, into a file of the same size, whose rest stays a hole, as does the magic. Calls `step` after each
/// piece.
fn copy_used(
    area: &Area,
    to: &File,
    step: &mut dyn FnMut(u64, u64) -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let (map_at, blocks) = geometry(area)?;
    let mut map = vec![0; blocks as usize];
    if !area.copy_out(map_at, &mut map) {
        bail!("the block map does not lie in the area");
    }
    let (mut at, mut copied) = (0usize, 0);
    while let Some(skip) = map[at..].iter().position(|b| *b != FREE) {
        let start = at + skip;
        let most = PIECE.min(map.len() - start);
        let len = map[start..start + most].iter().position(|b| *b == FREE).unwrap_or(most);
        let (from, end) = ((start as u64 * BLOCK).max(MAGIC + 8), (start + len) as u64 * BLOCK);
        area.write_to(from, end - from, to).context("writing the image")?;
        copied += len as u64;
        at = start + len;
        step(at as u64, blocks)?;
    }
    Ok(copied)
}

/// Ends the freeze if no piece comes for `longest`, and returns whether it did; returns when no further piece can come.
fn thaw_at_standstill(fs: &Filesystem, pieces: &Receiver<()>, longest: Duration) -> bool {
    loop {
        match pieces.recv_timeout(longest) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => {
                // If others have ended the freeze, they go on already.
                let _ = fs.thaw();
                return true;
            }
        }
    }
}

/// Copies a frozen file system. Returns the blocks copied.
fn copy_frozen(fs: &Filesystem, to: &File, longest: Duration, progress: Progress<'_>) -> anyhow::Result<u64> {
    let (tell, pieces) = channel();
    std::thread::scope(|scope| {
        let watch = std::thread::Builder::new().name("standstill".to_owned());
        let watch = watch.spawn_scoped(scope, move || thaw_at_standstill(fs, &pieces, longest));
        let watch = watch.context("starting a thread")?;
        let copied = copy_used(fs.area(), to, &mut |done, of| {
            progress("copying", done, of);
            // The watch has ended the freeze, or will not: its result tells.
            let _ = tell.send(());
            if watch.is_finished() {
                bail!("given up");
            }
            fs.renew_freeze().map_err(|_| anyhow::anyhow!(SUSPENDED))
        });
        drop(tell);
        if watch.join().unwrap_or(true) {
            bail!(
                "nothing of the image was written for {} s, and the members of the zone waited for it; they go on now. Write it to a disk that answers, to no directory that is served out of this zone, and do not suspend this command",
                longest.as_secs_f64()
            );
        }
        copied
    })
}

/// Writes a consistent image into an empty file.
///
/// # Errors
/// A member that does not revoke a mapping (it is pinned for DMA, say), damage, an image that can't be written for half a minute, or the file's own
/// errors. The members go on in any case.
pub fn take(fs: &Filesystem, to: &File, progress: Progress<'_>) -> anyhow::Result<Taken> {
    take_within(fs, to, STANDSTILL, progress)
}

/// [`take`], with the longest time for which members wait for a piece of the image.
pub fn take_within(
    fs: &Filesystem,
    to: &File,
    longest: Duration,
    progress: Progress<'_>,
) -> anyhow::Result<Taken> {
    let (_, blocks) = geometry(fs.area())?;
    to.set_len(blocks * BLOCK).context("growing the image")?;
    let start = Instant::now();
    let frozen = Frozen::new(fs).map_err(|e| match e {
        rustix::io::Errno::BUSY => anyhow::anyhow!(
            "another snapshot is being taken, or a member stands still in the middle of a change or keeps a file's pages pinned; try again when that has ended"
        ),
        rustix::io::Errno::STALE => anyhow::anyhow!(SUSPENDED),
        e => anyhow::Error::new(e).context("freezing the file system"),
    })?;
    let copied = copy_frozen(fs, to, longest, progress)?;
    frozen.end()?;
    if fs.area().is_lost() {
        bail!("{}", fsck::LOST);
    }
    let taken = Taken { blocks: copied, frozen: start.elapsed() };

    // Should the host fail, no image has its magic and not its contents.
    to.sync_data().context("syncing the image")?;
    let image = Area::whole(Map::new(to.as_fd(), blocks * BLOCK, true)?)?;
    let last = [
        (offset_of!(sys::tfs_super, freeze) as u64, 0),
        (offset_of!(sys::tfs_super, area_offset) as u64, 0),
        (MAGIC, sys::TFS_MAGIC),
    ];
    if !last.iter().all(|(field, value)| image.store_word(*field, *value)) {
        bail!("the image has no super block");
    }
    let alone = Filesystem::open(image.lone()).context("opening the image")?;
    alone.recover_all().context("putting the image in order")?;
    drop(alone);
    check(&image, progress)?;
    to.sync_data().context("syncing the image")?;
    Ok(taken)
}

/// Returns whether a file lies in the file system itself, on a FUSE mount of it: a time that is set at one end shows at the other.
pub fn is_inside(fs: &Filesystem, file: &File) -> bool {
    let mark = uuid::Uuid::new_v4().as_fields().0 % 1_000_000_000;
    let at = Timespec { tv_sec: 1, tv_nsec: mark.into() };
    let marked = rustix::fs::fstatfs(file).is_ok_and(|of| of.f_type == FUSE)
        && rustix::fs::futimens(file, &Timestamps { last_access: at, last_modification: at }).is_ok();
    let Some(there) = marked.then(|| rustix::fs::fstat(file).ok()).flatten() else { return false };
    fs.getattr(Handle::from(there.st_ino)).is_ok_and(|attr| attr.mtime == 1_000_000_000 + i64::from(mark))
}

fn check(image: &Area, progress: Progress<'_>) -> anyhow::Result<()> {
    fsck::expect_clean(image, progress).map(|_| ()).map_err(|why| anyhow::anyhow!("it is damaged: {why}"))
}

/// Makes an empty file system in an unused area, from an image in memory. `retire` as for [`restore`].
///
/// # Errors
/// An area that is too small, then it is unchanged; otherwise those of [`restore`].
pub fn make(to: &Area, options: &Mkfs, retire: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let image = Area::whole(Map::memfd("mkfs", to.size())?)?;
    fs::mkfs(&image, options).map_err(|e| match e.raw_os_error() {
        libc::ENOSPC | libc::EINVAL => anyhow!("{} bytes are too few for a file system", to.size()),
        _ => anyhow!("making the file system: {e}"),
    })?;
    restore(&image, to, retire, &mut |_, _, _| {}).map(drop)
}

/// Checks an image and copies it into an unused area. `retire` makes sure that it is unused, once the image is known to be good. Returns the blocks
/// copied.
///
/// # Errors
/// A damaged image, or one that is larger than the area; then the area is unchanged.
pub fn restore(
    image: &Area,
    to: &Area,
    retire: impl FnOnce() -> anyhow::Result<()>,
    progress: Progress<'_>,
) -> anyhow::Result<u64> {
    let (_, blocks) = geometry(image).context("this is no image of a file system")?;
    if blocks * BLOCK > to.size() {
        bail!("the image has {} MiB, the zone room for {} MiB", blocks >> 8, to.size() >> 20);
    }
    check(image, progress)?;
    let (map_at, _) = geometry(image)?;
    let mut map = vec![0; blocks as usize];
    let magic = to.word(MAGIC).context("an area without a super block")?;
    retire()?;
    if !image.copy_out(map_at, &mut map) || !to.store_word(MAGIC, 0) {
        bail!("the block map does not lie in the image");
    }
    // Should the host fail, a zone in a file has no magic with contents that are partly the image's.
    if let Err(e) = to.sync() {
        let as_before = to.store_word(MAGIC, magic);
        return Err(e).context(if as_before {
            "syncing the zone; it is as it was"
        } else {
            "syncing the zone"
        });
    }
    let mut copied = 0;
    for (block, _) in map.iter().enumerate().filter(|(_, b)| **b != FREE) {
        let words = image.block(block as u64).context("the image ends early")?;
        for (i, word) in words.iter().enumerate() {
            let at = block as u64 * BLOCK + 8 * i as u64;
            // The magic comes last: half a copy is no file system.
            if at != MAGIC && !to.store_word(at, *word) {
                bail!("the zone can't be written");
            }
        }
        copied += 1;
        if copied % 4096 == 0 {
            progress("restoring", block as u64, blocks);
        }
    }
    // Should the host fail, a zone in a file has no magic without the contents.
    to.sync().context("syncing the zone")?;
    let last = [(offset_of!(sys::tfs_super, area_offset) as u64, to.offset()), (MAGIC, sys::TFS_MAGIC)];
    if !last.iter().all(|(field, value)| to.store_word(*field, *value)) {
        bail!("the zone can't be written");
    }
    // Stores went into memory of this process then.
    if to.is_lost() || image.is_lost() {
        bail!("{}", fsck::LOST);
    }
    Ok(copied)
}
