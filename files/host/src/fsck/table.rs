// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The inode table as a whole. A missing block takes its 16 inodes along, but not the following ones: an empty block replaces it.
//! mkfs puts the first blocks at known places, so a table whose root word is damaged is found by them.

use std::mem::offset_of;

use super::raw::{BLOCK, FANOUT, PER_BLOCK};
use super::trees::Tree;
use super::{Checker, Known, Progress};
use crate::sys;

/// Blocks by which the table grows.
const GROWTH: u64 = 16;
/// Blocks that mkfs gives it, the first ones for data.
const FIRST: u64 = 16;
const ROOT: u64 = offset_of!(sys::tfs_super, itable_root) as u64;
const COUNT: u64 = offset_of!(sys::tfs_super, itable_inodes) as u64;

impl Checker<'_> {
    pub(crate) fn check_table(&mut self, progress: Progress<'_>) {
        let root = self.root();
        let stored = self.area.word(COUNT).unwrap_or(0);
        let tree = self.claim_tree(ROOT, root, "inode table");
        let present: u64 = tree.runs.iter().map(|run| run.2).sum();
        if present == 0 {
            let text = "the inode table is gone, and with it all files: make a new file system".into();
            self.hopeless("table", text);
            return;
        }
        let blocks = self.length(&tree, present);
        self.table = (0..blocks).map(|block| tree.block(block).unwrap_or(0)).collect();
        let there = blocks * PER_BLOCK;
        // A member died between linking the blocks and counting them; they became durable in any order. Then all inodes in them are
        // free, and the core finds the blocks when it grows the table.
        let free = |ino| self.inode(ino).is_none_or(|inode| inode.state() == sys::TFS_INODE_FREE);
        let growing = stored % PER_BLOCK == 0 && stored < there && there - stored <= GROWTH * PER_BLOCK;
        let growing = growing && !self.options.live && (stored..there).all(free);
        for block in 0..if growing { stored / PER_BLOCK } else { blocks } {
            if self.table[block as usize] == 0 {
                let (from, to) = (block * PER_BLOCK, (block + 1) * PER_BLOCK - 1);
                let text =
                    format!("inode table: the block of inodes {from} to {to} is gone: an empty one now");
                self.loss("table-hole", text);
            }
        }
        if stored > there || stored % PER_BLOCK != 0 {
            if self.damage("table-size", format!("the inode table has {there} inodes and says {stored}")) {
                self.put(COUNT, there);
            }
        } else if growing {
            self.note("table-size", format!("the inode table has {there} inodes and uses {stored} yet"));
            self.table.truncate((stored / PER_BLOCK) as usize);
        } else if stored < there
            && !self.options.live
            && self.damage("table-size", format!("the inode table has {there} inodes and says {stored}"))
        {
            self.put(COUNT, there);
        }
        self.inodes = vec![Known::default(); self.table.len() * PER_BLOCK as usize];
        self.check_root();
        let of = self.inodes.len() as u64;
        for ino in u64::from(sys::TFS_ROOT_INO)..of {
            if ino % 4096 == 0 {
                progress("inodes", ino, of);
            }
            let Some(inode) = self.inode(ino) else { continue };
            self.check_inode(ino, &inode);
        }
        progress("inodes", of, of);
    }

    /// Finds the table's root word: the one above the first block of inodes.
    fn root(&mut self) -> u64 {
        let stored = self.area.word(ROOT).unwrap_or(0);
        let first = self.layout.data_start;
        let path = self.leftmost(stored);
        if path.last() == Some(&first) {
            return stored;
        }
        // The node above the first blocks, then its parent; nothing else refers to them.
        let mut root = None;
        let mut below = first;
        for height in 1..=u64::from(sys::TFS_MAX_HEIGHT) {
            let above = |block: &u64| {
                let entry = |i| self.area.word(block * BLOCK + i * 8);
                entry(0) == Some(below) || (height == 1 && (1..4).all(|i| entry(i) == Some(first + i)))
            };
            let Some(node) = (first + FIRST..self.layout.blocks).find(above) else { break };
            root = Some(node | height << sys::TFS_HEIGHT_SHIFT);
            below = node;
        }
        let Some(root) = root else { return stored };
        if root != stored {
            let text =
                format!("super block: the inode table's root is {stored:#x}, found it to be {root:#x}");
            if self.damage("table-root", text) {
                self.put(ROOT, root);
            }
        }
        let path = self.leftmost(root);
        if let (Some(leaf), false) = (path.iter().rev().nth(1), path.last() == Some(&first)) {
            if self.damage("table-root", "inode table: its first entry is not its first block".into()) {
                self.put(leaf * BLOCK, first);
            }
        }
        root
    }

    /// Returns the blocks from a root down to the first block of its tree, as far as they are valid.
    fn leftmost(&self, root: u64) -> Vec<u64> {
        let height = root >> sys::TFS_HEIGHT_SHIFT & 15;
        let mut path = vec![root & sys::TFS_BLOCKNR_MASK];
        if root >> 52 != 0 || height > u64::from(sys::TFS_MAX_HEIGHT) {
            return Vec::new();
        }
        for _ in 0..height {
            let Some(node) = path.last().copied().filter(|node| self.layout.block_ok(*node)) else { break };
            path.push(self.area.word(node * BLOCK).unwrap_or(0));
        }
        path
    }

    /// Returns the table's length in blocks. A block far behind all others is an accident and is cut off.
    fn length(&mut self, tree: &Tree, present: u64) -> u64 {
        let most = 2 * present + GROWTH;
        let (end, within) = (tree.end(), |run: &&(u64, u64, u64)| run.0.saturating_add(run.2) <= most);
        if end <= most {
            return end;
        }
        let blocks = tree.runs.iter().filter(within).map(|run| run.0 + run.2).max().unwrap_or(0);
        let text = format!("inode table: a block at {end}, far behind its end at {blocks}: cut off");
        if self.loss("table-stray", text) {
            let root = self.area.word(ROOT).unwrap_or(0);
            let height = (root >> sys::TFS_HEIGHT_SHIFT & 15) as u32;
            self.cut_behind(root & sys::TFS_BLOCKNR_MASK, height, 0, blocks);
        }
        blocks
    }

    /// Clears the entries of a claimed tree from file block `end` on.
    fn cut_behind(&mut self, node: u64, level: u32, first: u64, end: u64) {
        let Some(entries) = self.area.block(node).filter(|_| level > 0) else { return };
        let span = 1u64 << (sys::TFS_FANOUT_SHIFT * (level - 1));
        for (i, entry) in entries.iter().enumerate().filter(|(_, e)| **e != 0) {
            let at = first + i as u64 * span;
            if at >= end {
                self.put(node * BLOCK + i as u64 * 8, 0);
            } else if at + span > end && entry & super::raw::HUGE == 0 {
                self.cut_behind(entry & sys::TFS_BLOCKNR_MASK, level - 1, at, end);
            }
        }
    }

    /// Fills gaps of the table with empty blocks. At the end of a pass, when the free blocks are known.
    pub(crate) fn fill_table(&mut self) {
        if !self.options.repair {
            return;
        }
        let holes: Vec<u64> =
            (0..self.table.len() as u64).filter(|block| self.table[*block as usize] == 0).collect();
        for hole in holes {
            if self.fill(hole).is_none() {
                self.hopeless("table-hole", "no block is free for the inode table: remove some files".into());
                return;
            }
        }
    }

    fn fill(&mut self, fblock: u64) -> Option<()> {
        let root = self.area.word(ROOT)?;
        let (mut node, mut level) =
            (root & sys::TFS_BLOCKNR_MASK, (root >> sys::TFS_HEIGHT_SHIFT & 15) as u32);
        while level > 0 {
            let index = fblock >> (sys::TFS_FANOUT_SHIFT * (level - 1)) & (FANOUT - 1);
            let at = node * BLOCK + index * 8;
            node = self.area.word(at)? & sys::TFS_BLOCKNR_MASK;
            if node == 0 {
                node = self.take_block()?;
                self.put(at, node);
            }
            level -= 1;
        }
        Some(())
    }

    /// Takes a free block and zeroes it.
    fn take_block(&mut self) -> Option<u64> {
        let block = (self.layout.data_start..self.layout.blocks).find(|block| !self.used(*block))?;
        self.claimed[(block / 64) as usize] |= 1 << (block % 64);
        for word in 0..BLOCK / 8 {
            self.put(block * BLOCK + word * 8, 0);
        }
        let map = self.layout.map_start * BLOCK + block;
        self.area.store_byte(map, sys::TFS_MAP_USED as u8).then_some(block)
    }
}
