// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks which directories can be reached, link counts, the block map and counters.

use std::mem::offset_of;

use super::raw::{BLOCK, field};
use super::{Checker, Progress, Severity};
use crate::sys;

const ROOT: u64 = sys::TFS_ROOT_INO as u64;

impl Checker<'_> {
    pub(crate) fn check_links(&mut self) {
        if self.options.live {
            return;
        }
        let dirs = std::mem::take(&mut self.dirs);
        self.check_reachable(&dirs);
        for dir in &dirs {
            self.check_parent(*dir);
        }
        self.dirs = dirs;
        for ino in ROOT..self.inodes.len() as u64 {
            let known = self.inodes[ino as usize];
            if !known.live {
                continue;
            }
            let is_dir = known.mode & libc::S_IFMT == libc::S_IFDIR;
            if known.names == 0 && ino != ROOT {
                if self.damage(
                    "nameless",
                    format!("inode {ino}: linked, but without a name: goes to lost+found"),
                ) {
                    self.lost.push(ino);
                }
                continue;
            }
            let right = if is_dir { 2 + known.subdirs } else { known.names };
            if right != known.nlink
                && self.damage("nlink", format!("inode {ino}: counts {} links, has {right}", known.nlink))
            {
                if let Some(inode) = self.inode(ino) {
                    self.put(inode.at + field::nlink, right);
                }
            }
        }
    }

    /// Removes a name of each cycle of directories: such directories have names but can't be reached.
    fn check_reachable(&mut self, dirs: &[u64]) {
        // 0: not seen, 1: on the present way up, 2: reaches the root, or a directory without a name.
        let mut seen = vec![0u8; self.inodes.len()];
        for dir in dirs {
            let mut way = Vec::new();
            let mut at = *dir;
            while seen[at as usize] == 0 {
                seen[at as usize] = 1;
                way.push(at);
                match self.parents.get(&at) {
                    Some(parent) if at != ROOT => at = *parent,
                    _ => break,
                }
            }
            let circle = way.last().is_some_and(|last| *last != at) && seen[at as usize] == 1;
            for ino in way {
                seen[ino as usize] = 2;
            }
            if circle
                && self.damage("circle", format!("directory {at}: lies inside itself: goes to lost+found"))
            {
                self.cut_name(at);
                self.inodes[at as usize].names = 0;
            }
        }
    }

    /// Removes the entry that names a directory.
    fn cut_name(&mut self, ino: u64) {
        let Some(parent) = self.parents.remove(&ino) else { return };
        let Some(inode) = self.inode(parent) else { return };
        for (_, block, count) in self.dir_runs(inode.root()) {
            for at in (block * BLOCK..(block + count) * BLOCK).step_by(sys::TFS_GRANULE as usize) {
                let reference = self.area.word(at).unwrap_or(0);
                // Inside a longer name the bytes could be text; but a name with these bytes and this type is too
                // unlikely to handle.
                if reference == ino | 4 << sys::TFS_REF_TYPE_SHIFT {
                    self.put(at, 0);
                }
            }
        }
        if let Some(known) = self.inodes.get_mut(parent as usize) {
            known.subdirs = known.subdirs.saturating_sub(1);
        }
    }

    fn check_parent(&mut self, dir: u64) {
        let Some(inode) = self.inode(dir) else { return };
        let right = if dir == ROOT { ROOT } else { self.parents.get(&dir).copied().unwrap_or(0) };
        if right != 0
            && inode.parent() != right
            && self
                .damage("parent", format!("directory {dir}: \"..\" is {}, must be {right}", inode.parent()))
        {
            self.put(inode.at + field::parent, right);
        }
    }

    pub(crate) fn check_map(&mut self, progress: Progress<'_>) {
        let base = self.layout.map_start * BLOCK;
        let (free, meta, used) = (sys::TFS_MAP_FREE, sys::TFS_MAP_META, sys::TFS_MAP_USED);
        let mut bytes = vec![0; BLOCK as usize];
        let mut wrong = [0u64; 3];
        for first in (0..self.layout.blocks).step_by(BLOCK as usize) {
            progress("block map", first, self.layout.blocks);
            if !self.area.copy_out(base + first, &mut bytes) {
                return;
            }
            for block in first..(first + BLOCK).min(self.layout.blocks) {
                let stored = u32::from(bytes[(block - first) as usize]);
                let is_meta = block < self.layout.data_start;
                let is_used = !is_meta && self.used(block);
                self.report.blocks_used += u64::from(is_used);
                let right = match (is_meta, is_used) {
                    (true, _) => meta,
                    (_, true) => used,
                    _ => free,
                };
                let under_way = self.options.live && (1..=64).contains(&stored);
                let is_reserve = right == free && stored == sys::TFS_MAP_RESERVED;
                if stored == right || is_reserve || under_way || (self.options.live && !is_meta) {
                    continue;
                }
                let (severity, code, text) = if stored == sys::TFS_MAP_DEFERRED && right == free {
                    (
                        Severity::Note,
                        "deferred",
                        "is unused; its freeing waits for a member that did not unmap it",
                    )
                } else if right == free {
                    wrong[0] += 1;
                    (Severity::Damage, "leaked", "is marked used, but nothing refers to it")
                } else if right == used {
                    wrong[1] += 1;
                    (Severity::Damage, "unmarked", "is in use, but not marked so")
                } else {
                    wrong[2] += 1;
                    (Severity::Damage, "map-meta", "belongs to the file system, but is not marked so")
                };
                if self.found(severity, code, format!("block {block} {text} ({stored:#x})")) {
                    let _ = self.area.store_byte(base + block, right as u8);
                }
            }
        }
        progress("block map", self.layout.blocks, self.layout.blocks);
    }

    pub(crate) fn check_counters(&mut self) {
        if self.options.live || self.inodes.is_empty() {
            return;
        }
        let field = offset_of!(sys::tfs_member_area, inodes_used) as u64;
        let at = |checker: &Self, member| checker.layout.member(member) + field;
        let sum = (0..sys::TFS_MEMBERS)
            .fold(0u64, |sum, m| sum.wrapping_add(self.area.word(at(self, m)).unwrap_or(0)));
        // The root is not counted.
        let right = self.report.inodes.saturating_sub(1);
        if sum != right {
            let text = format!("members count {} inodes, there are {right}", sum as i64);
            if self.note("inodes-used", text) {
                for member in 1..sys::TFS_MEMBERS {
                    let at = at(self, member);
                    self.put(at, 0);
                }
                let at = at(self, 0);
                self.put(at, right);
            }
        }
    }
}
