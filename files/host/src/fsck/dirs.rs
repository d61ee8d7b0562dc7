// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Directories: their blocks, entries, names, and the hash index.

use std::collections::HashSet;

use super::raw::{BLOCK, FANOUT, HUGE, Inode, field};
use super::trees::Tree;
use super::{Checker, Progress, Severity};
use crate::sys;

const GRANULE: usize = sys::TFS_GRANULE as usize;
const PER_BLOCK: usize = sys::TFS_GRANULES_PER_BLOCK as usize;
const INDEX_LOG: std::ops::RangeInclusive<u32> = 9..=34;
/// The core's bound on one search.
const PROBE_MAX: u64 = 1 << 20;

struct Entry {
    granule: u64,
    hash: u32,
}

struct Contents {
    entries: Vec<Entry>,
    free: u64,
    names: HashSet<Vec<u8>>,
}

fn granules_of(len: usize) -> usize {
    (sys::TFS_DIRENT_HEADER as usize + len).div_ceil(GRANULE)
}

impl Checker<'_> {
    pub(crate) fn check_dirs(&mut self, progress: Progress<'_>) {
        let dirs = std::mem::take(&mut self.dirs);
        let of = dirs.len() as u64;
        for (i, ino) in dirs.iter().enumerate() {
            if i % 256 == 0 {
                progress("directories", i as u64, of);
            }
            if let Some(inode) = self.inode(*ino) {
                self.check_dir(*ino, &inode);
            }
        }
        progress("directories", of, of);
        self.dirs = dirs;
    }

    /// Walks a directory's data tree again without claiming blocks: its inode has claimed them.
    fn walk(&self, root: u64) -> Tree {
        let mut tree = Tree::default();
        let (block, height) = (root & sys::TFS_BLOCKNR_MASK, (root >> sys::TFS_HEIGHT_SHIFT & 15) as u32);
        let mut left = self.layout.blocks;
        if self.layout.block_ok(block) && height <= sys::TFS_MAX_HEIGHT {
            self.walk_node(block, height, 0, &mut tree, &mut left);
        }
        tree
    }

    fn walk_node(&self, node: u64, level: u32, first: u64, tree: &mut Tree, left: &mut u64) {
        if *left == 0 || !self.layout.block_ok(node) {
            return;
        }
        *left -= 1;
        if level == 0 {
            tree.runs.push((first, node, 1));
            return;
        }
        let Some(entries) = self.area.block(node) else { return };
        let span = 1u64 << (sys::TFS_FANOUT_SHIFT * (level - 1));
        for (i, entry) in entries.iter().enumerate().filter(|(_, e)| **e != 0) {
            let (fblock, block) = (first + i as u64 * span, entry & sys::TFS_BLOCKNR_MASK);
            if entry & HUGE == 0 {
                self.walk_node(block, level - 1, fblock, tree, left);
            } else if self.layout.block_ok(block) && self.layout.block_ok(block.saturating_add(FANOUT - 1)) {
                tree.runs.push((fblock, block, FANOUT));
            }
        }
    }

    /// Runs of a directory's data.
    pub(crate) fn dir_runs(&self, root: u64) -> Vec<(u64, u64, u64)> {
        self.walk(root).runs
    }

    fn check_dir(&mut self, ino: u64, inode: &Inode) {
        let tree = self.walk(inode.root());
        let mut blocks = inode.size() / BLOCK;
        // Counts blocks from the first on, up to the first missing one.
        let mut there = 0;
        while there < blocks && tree.block(there).is_some() {
            there += 1;
        }
        if inode.size() % BLOCK != 0 || blocks != there {
            let text = format!(
                "directory {ino}: {} bytes long, but only {there} blocks follow each other",
                inode.size()
            );
            if self.loss("directory-size", text) {
                self.put(inode.at + field::size, there * BLOCK);
                self.put(inode.at + field::index_root, 0);
            }
            blocks = there;
        }
        let mut contents = Contents { entries: Vec::new(), free: 0, names: HashSet::new() };
        for b in 0..blocks {
            if let Some(block) = tree.block(b) {
                self.check_dir_block(ino, b, block, &mut contents);
            }
        }
        if !self.options.live {
            let names = contents.names.len() as u64;
            if names != inode.entries()
                && self.damage(
                    "entries",
                    format!("directory {ino}: has {names} names, counts {}", inode.entries()),
                )
            {
                self.put(inode.at + field::entries, names);
            }
            if contents.free != inode.free_granules()
                && self.note(
                    "free-granules",
                    format!(
                        "directory {ino}: {} granules free, counts {}",
                        contents.free,
                        inode.free_granules()
                    ),
                )
            {
                self.put(inode.at + field::free_granules, contents.free);
            }
            if inode.seq() % 2 != 0
                && self.damage("seq", format!("directory {ino}: a change was interrupted"))
            {
                self.put(inode.at + field::seq, inode.seq().wrapping_add(1));
            }
        }
        let index = self.check_index(ino, inode, &contents.entries);
        let blocks = self.inodes.get(ino as usize).map_or(0, |known| known.blocks);
        self.check_blocks(ino, inode, blocks + index);
    }

    fn check_dir_block(&mut self, dir: u64, b: u64, block: u64, contents: &mut Contents) {
        let mut copy = vec![0; BLOCK as usize];
        if !self.area.copy_out(block * BLOCK, &mut copy) {
            return;
        }
        let mut i = 0;
        while i < PER_BLOCK {
            let (entry, at) = (&copy[i * GRANULE..], block * BLOCK + (i * GRANULE) as u64);
            let reference = u64::from_le_bytes(entry[0..8].try_into().unwrap_or_default());
            let hash = u32::from_le_bytes(entry[8..12].try_into().unwrap_or_default());
            let (len, granules) = (usize::from(entry[12]), usize::from(entry[13]));
            let step = granules.max(1);
            let granule = b * PER_BLOCK as u64 + i as u64;
            if i + step > PER_BLOCK {
                // The reference is cleared first: the entry is then free space, whose length can be set.
                let text = format!("directory {dir}: entry {granule} is longer than its block");
                if self.loss("entry-length", text) {
                    self.put(at, 0);
                    let head = u64::from(hash) | (len as u64) << 32 | ((PER_BLOCK - i) as u64) << 40;
                    self.put(at + 8, head);
                }
                if reference == 0 {
                    contents.free += (PER_BLOCK - i) as u64;
                }
                return;
            }
            if reference == 0 {
                contents.free += step as u64;
            } else {
                let name = copy.get(i * GRANULE + 16..i * GRANULE + 16 + len).unwrap_or_default().to_vec();
                match self.entry_fault(dir, reference, &name, hash, granules, contents) {
                    None => {
                        contents.entries.push(Entry { granule, hash });
                        contents.names.insert(name);
                    }
                    Some(fault) => {
                        let name = String::from_utf8_lossy(&name).into_owned();
                        let text = format!("directory {dir}: entry {granule} ({name:?}): {fault}: removed");
                        if self.loss("entry", text) {
                            self.put(at, 0);
                            contents.free += step as u64;
                        }
                    }
                }
            }
            i += step;
        }
    }

    /// Returns the fault of an entry; an entry without one counts as a link.
    fn entry_fault(
        &mut self,
        dir: u64,
        reference: u64,
        name: &[u8],
        hash: u32,
        granules: usize,
        contents: &Contents,
    ) -> Option<String> {
        let (ino, kind) = (reference & sys::TFS_REF_INO_MASK, (reference >> sys::TFS_REF_TYPE_SHIFT) as u32);
        if name.is_empty() || granules_of(name.len()) > granules {
            return Some("its name has no room".into());
        }
        if name.contains(&0) || name.contains(&b'/') || name == b"." || name == b".." {
            return Some("no name that can be".into());
        }
        if hash != self.layout.hash.of(name) {
            return Some("its hash is another name's".into());
        }
        if contents.names.contains(name) {
            return Some("a name that is there already".into());
        }
        let root = u64::from(sys::TFS_ROOT_INO);
        let live = self.options.live;
        let Some(known) = self.inodes.get_mut(ino as usize).filter(|k| k.live && ino != root) else {
            // A member may be making or removing it now.
            return if live { None } else { Some(format!("refers to inode {ino}, which does not exist")) };
        };
        if (known.mode & libc::S_IFMT) >> 12 != kind & 15 || reference >> 48 & 0xff != 0 {
            return Some(format!("says type {kind}, inode {ino} has mode {:o}", known.mode));
        }
        if known.mode & libc::S_IFMT == libc::S_IFDIR {
            if known.names != 0 {
                return Some(format!("a second name of directory {ino}"));
            }
            known.named_by = dir;
            self.parents.insert(ino, dir);
        }
        known.names += 1;
        if known.mode & libc::S_IFMT == libc::S_IFDIR {
            if let Some(known) = self.inodes.get_mut(dir as usize) {
                known.subdirs += 1;
            }
        }
        None
    }

    /// Returns the number of blocks of the index.
    fn check_index(&mut self, ino: u64, inode: &Inode, entries: &[Entry]) -> u64 {
        let root = inode.index_root();
        if root == 0 {
            return 0;
        }
        let log = (root >> sys::TFS_INDEX_LOG_SHIFT & 63) as u32;
        let tree_root = root & ((1 << sys::TFS_INDEX_LOG_SHIFT) - 1);
        let at = inode.at + field::index_root;
        let drop = |checker: &mut Self, tree: &Tree, why: String| {
            if checker.damage(
                "index",
                format!("directory {ino}: its index {why}: dropped, built anew with the next name"),
            ) {
                checker.unclaim(tree);
                checker.put(at, 0);
                checker.put(inode.at + field::index_used, 0);
            }
            0
        };
        if root >> 58 != 0 || !INDEX_LOG.contains(&log) {
            return drop(self, &Tree::default(), format!("word {root:#x} can't be"));
        }
        let tree = self.claim_tree(at, tree_root, &format!("index of directory {ino}"));
        let blocks = (1u64 << log) / FANOUT;
        let table: Vec<u64> = (0..blocks.min(self.layout.blocks)).map_while(|b| tree.block(b)).collect();
        if table.len() as u64 != blocks {
            return drop(self, &tree, "has holes".into());
        }
        if self.options.live {
            return tree.blocks();
        }
        let value = |slot: u64| {
            self.area.word(table[(slot / FANOUT) as usize] * BLOCK + slot % FANOUT * 8).unwrap_or(0)
        };
        let used = (0..1u64 << log).filter(|slot| value(*slot) != 0).count() as u64;
        let mask = (1u64 << log) - 1;
        let missing = entries.iter().find(|e| {
            let start = if log > 32 { u64::from(e.hash) << (log - 32) } else { u64::from(e.hash) } & mask;
            let want = u64::from(e.hash) << 32 | (e.granule + 1);
            let found = (0..(mask + 1).min(PROBE_MAX))
                .map(|i| value((start + i) & mask))
                .take_while(|v| *v != 0)
                .any(|v| v == want);
            !found
        });
        if let Some(entry) = missing {
            return drop(self, &tree, format!("does not have entry {}", entry.granule));
        }
        if used == mask + 1 {
            return drop(self, &tree, "is full".into());
        }
        if used != inode.index_used() {
            // The core counts before it takes, so a death in between leaves one too many, which is harmless.
            let severity = if used > inode.index_used() { Severity::Damage } else { Severity::Note };
            let text =
                format!("directory {ino}: its index has {used} places taken, counts {}", inode.index_used());
            if self.found(severity, "index-used", text) {
                self.put(inode.at + field::index_used, used);
            }
        }
        tree.blocks()
    }
}
