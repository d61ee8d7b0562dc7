// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims the blocks of radix trees. A reference to a block outside the data, or to one that is claimed already, is cut.

use super::raw::{BLOCK, FANOUT, HUGE};
use super::{Checker, Severity};
use crate::sys;

#[derive(Default)]
pub(crate) struct Tree {
    /// Runs of data: file block, block, count; in order.
    pub(crate) runs: Vec<(u64, u64, u64)>,
    /// Blocks of nodes.
    pub(crate) nodes: Vec<u64>,
}

impl Tree {
    /// Returns the number of its blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.nodes.len() as u64 + self.runs.iter().map(|r| r.2).sum::<u64>()
    }

    /// Returns the block at a file block.
    pub(crate) fn block(&self, at: u64) -> Option<u64> {
        let i = self.runs.partition_point(|r| r.0 <= at).checked_sub(1)?;
        let (from, block, count) = self.runs[i];
        (at - from < count).then(|| block + (at - from))
    }

    /// File blocks from 0 to the end of the last run.
    pub(crate) fn end(&self) -> u64 {
        self.runs.last().map_or(0, |r| r.0.saturating_add(r.2))
    }

    fn push(&mut self, at: u64, block: u64, count: u64) {
        match self.runs.last_mut() {
            Some(last) if last.0 + last.2 == at && last.1 + last.2 == block => last.2 += count,
            _ => self.runs.push((at, block, count)),
        }
    }
}

impl Checker<'_> {
    fn is_claimed(&self, block: u64) -> bool {
        self.claimed[(block / 64) as usize] >> (block % 64) & 1 != 0
    }

    /// Claims a run; false: a part of it is claimed already.
    fn claim(&mut self, block: u64, count: u64) -> bool {
        let Some(last) = block.checked_add(count - 1) else { return false };
        if !self.layout.block_ok(block) || !self.layout.block_ok(last) {
            return false;
        }
        if (block..=last).any(|b| self.is_claimed(b)) {
            return false;
        }
        for b in block..=last {
            self.claimed[(b / 64) as usize] |= 1 << (b % 64);
        }
        true
    }

    /// Releases a tree's blocks: it is cut as a whole.
    pub(crate) fn unclaim(&mut self, tree: &Tree) {
        let runs = tree.runs.iter().map(|r| (r.1, r.2)).chain(tree.nodes.iter().map(|n| (*n, 1)));
        for (block, count) in runs {
            for b in block..block + count {
                self.claimed[(b / 64) as usize] &= !(1 << (b % 64));
            }
        }
    }

    /// Returns whether a block is referred to.
    pub(crate) fn used(&self, block: u64) -> bool {
        self.is_claimed(block)
    }

    /// Claims the tree whose root word lies at `at`. `what` names it in findings.
    pub(crate) fn claim_tree(&mut self, at: u64, root: u64, what: &str) -> Tree {
        let mut tree = Tree::default();
        let (block, height) = (root & sys::TFS_BLOCKNR_MASK, (root >> sys::TFS_HEIGHT_SHIFT & 15) as u32);
        if root == 0 {
            return tree;
        }
        if height > sys::TFS_MAX_HEIGHT || root >> 52 != 0 || !self.claim(block, 1) {
            if self.loss("tree-root", format!("{what}: tree root {root:#x} is not usable: contents lost")) {
                self.put(at, 0);
            }
            return tree;
        }
        if height == 0 {
            tree.push(0, block, 1);
        } else {
            tree.nodes.push(block);
            self.claim_node(block, height, 0, what, &mut tree);
        }
        tree
    }

    fn claim_node(&mut self, node: u64, level: u32, first: u64, what: &str, tree: &mut Tree) {
        // Four levels at most.
        let Some(entries) = self.area.block(node) else { return };
        let span = 1u64 << (sys::TFS_FANOUT_SHIFT * (level - 1));
        for (i, entry) in entries.iter().enumerate().filter(|(_, e)| **e != 0) {
            let (at, fblock) = (node * BLOCK + i as u64 * 8, first + i as u64 * span);
            let (block, huge) = (entry & sys::TFS_BLOCKNR_MASK, entry & HUGE != 0);
            let plain = entry & !(sys::TFS_BLOCKNR_MASK | HUGE) == 0;
            let count = if huge { FANOUT } else { 1 };
            let shape = plain && block != 0 && (!huge || (level == 2 && block % FANOUT == 0));
            if !shape || !self.claim(block, count) {
                let bytes = fblock.saturating_mul(BLOCK);
                let text = format!(
                    "{what}: entry {entry:#x} for offset {bytes} refers to no block of its own: a hole now"
                );
                if self.found(Severity::Loss, "tree-entry", text) {
                    self.put(at, 0);
                }
            } else if huge || level == 1 {
                tree.push(fblock, block, count);
            } else {
                tree.nodes.push(block);
                self.claim_node(block, level - 1, fblock, what, tree);
            }
        }
    }
}
