// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Snapshots: a consistent image of a file system that is in use, and its way back into a zone.
//! The image is the area itself in a sparse file, which mount and fsck accept like any other. The file system is frozen while it is copied; the copy
//! is then recovered as after the death of all its members, and checked.

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::area::{Area, Map};
use crate::fs::{Filesystem, Result};
use crate::fsck::{self, Progress};
use crate::sys;

const BLOCK: u64 = sys::TFS_BLOCK as u64;
const FREE: u8 = sys::TFS_MAP_FREE as u8;

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

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
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

/// Copies the blocks in use, by the area's own map, into a file of the same size, whose rest stays a hole.
fn copy_used(area: &Area, to: &File, progress: Progress<'_>) -> anyhow::Result<u64> {
    let (map_at, blocks) = geometry(area)?;
    let mut map = vec![0; blocks as usize];
    if !area.copy_out(map_at, &mut map) {
        bail!("the block map does not lie in the area");
    }
    let (mut at, mut copied) = (0usize, 0);
    while let Some(skip) = map[at..].iter().position(|b| *b != FREE) {
        let start = at + skip;
        // Pieces of a size at which progress shows.
        let len =
            map[start..].iter().take(4096).position(|b| *b == FREE).unwrap_or((map.len() - start).min(4096));
        area.write_to(start as u64 * BLOCK, len as u64 * BLOCK, to).context("writing the image")?;
        copied += len as u64;
        at = start + len;
        progress("copying", at as u64, blocks);
    }
    Ok(copied)
}

/// Writes a consistent image into an empty file.
///
/// # Errors
/// A member that does not revoke a mapping (it is pinned for DMA, say), damage, or the file's own errors. The members go on in any case.
pub fn take(fs: &Filesystem, to: &File, progress: Progress<'_>) -> anyhow::Result<Taken> {
    let (_, blocks) = geometry(fs.area())?;
    to.set_len(blocks * BLOCK).context("growing the image")?;
    let start = Instant::now();
    let frozen = Frozen::new(fs).context("freezing the file system")?;
    let copied = copy_used(fs.area(), to, progress)?;
    drop(frozen);
    let taken = Taken { blocks: copied, frozen: start.elapsed() };

    let image = Area::whole(Map::new(to.as_fd(), blocks * BLOCK, true)?)?;
    for field in [offset_of!(sys::tfs_super, freeze), offset_of!(sys::tfs_super, area_offset)] {
        if !image.store_word(field as u64, 0) {
            bail!("the image has no super block");
        }
    }
    let alone = Filesystem::open(image.lone()).context("opening the image")?;
    alone.recover_all().context("putting the image in order")?;
    drop(alone);
    check(&image, progress)?;
    to.sync_data().context("syncing the image")?;
    Ok(taken)
}

fn check(image: &Area, progress: Progress<'_>) -> anyhow::Result<()> {
    fsck::expect_clean(image, progress).map(|_| ()).map_err(|why| anyhow::anyhow!("it is damaged: {why}"))
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
    retire()?;
    if !image.copy_out(map_at, &mut map) || !to.store_word(offset_of!(sys::tfs_super, magic) as u64, 0) {
        bail!("the block map does not lie in the image");
    }
    let mut copied = 0;
    for (block, _) in map.iter().enumerate().filter(|(_, b)| **b != FREE) {
        let words = image.block(block as u64).context("the image ends early")?;
        for (i, word) in words.iter().enumerate() {
            let at = block as u64 * BLOCK + 8 * i as u64;
            // The magic comes last: half a copy is no file system.
            if at != offset_of!(sys::tfs_super, magic) as u64 && !to.store_word(at, *word) {
                bail!("the zone can't be written");
            }
        }
        copied += 1;
        if copied % 4096 == 0 {
            progress("restoring", block as u64, blocks);
        }
    }
    let last = [
        (offset_of!(sys::tfs_super, area_offset), to.offset()),
        (offset_of!(sys::tfs_super, magic), sys::TFS_MAGIC),
    ];
    if !last.iter().all(|(field, value)| to.store_word(*field as u64, *value)) {
        bail!("the zone can't be written");
    }
    Ok(copied)
}
