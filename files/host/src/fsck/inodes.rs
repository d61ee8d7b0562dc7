// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the super block, members' leftovers in their areas, and each inode by itself.

use std::mem::offset_of;

use super::raw::{self, BLOCK, Inode, PER_BLOCK, field};
use super::trees::Tree;
use super::{Checker, Known};
use crate::sys;

const KINDS: [u32; 7] = [
    libc::S_IFREG,
    libc::S_IFDIR,
    libc::S_IFLNK,
    libc::S_IFCHR,
    libc::S_IFBLK,
    libc::S_IFIFO,
    libc::S_IFSOCK,
];
const XATTR_IMAGE_MAX: u64 = 2 * sys::TFS_XATTR_MAX as u64;

impl Checker<'_> {
    pub(crate) fn check_super(&mut self) {
        for (offset, right, name) in self.layout.stored() {
            let stored = self.area.word(offset as u64).unwrap_or(0);
            if stored != right
                && self.damage("super", format!("super block: {name} is {stored}, must be {right}"))
            {
                self.put(offset as u64, right);
            }
        }
        let word = self.area.word(offset_of!(sys::tfs_super, version) as u64).unwrap_or(0);
        let right = u64::from(sys::TFS_VERSION) | u64::from(sys::TFS_BLOCK) << 32;
        if word != right && self.damage("super", format!("super block: block size is {}", word >> 32)) {
            self.put(offset_of!(sys::tfs_super, version) as u64, right);
        }
        if !self.options.live {
            for (lock, name) in [
                (offset_of!(sys::tfs_super, itable_lock), "inode table"),
                (offset_of!(sys::tfs_super, rename_lock), "directory renames"),
                (offset_of!(sys::tfs_super, deferred_lock), "deferred blocks"),
            ] {
                let word = self.area.word(lock as u64).unwrap_or(0);
                self.check_lock(lock as u64, word, name);
            }
            for (offset, name) in [
                (offset_of!(sys::tfs_super, freeze), "freeze"),
                (offset_of!(sys::tfs_super, deferred_members), "deferred_members"),
            ] {
                if self.area.word(offset as u64) != Some(0)
                    && self.note("leftover", format!("super block: {name} is set"))
                {
                    self.put(offset as u64, 0);
                }
            }
        }
    }

    /// Checks a lock word. A dead owner's lock is taken over later, so only an impossible owner is damage.
    fn check_lock(&mut self, at: u64, word: u64, what: &str) {
        // A free lock still holds turn and count.
        let free = word & !u64::from(sys::TFS_LOCK_TURN | sys::TFS_LOCK_COUNT) == 0;
        let kind = word & u64::from(sys::TFS_LOCK_KIND);
        let known = [sys::TFS_LOCK_HELD, sys::TFS_LOCK_OFFERED].iter().any(|k| u64::from(*k) == kind);
        let ownerless = word & 0xff > u64::from(sys::TFS_MEMBERS) || word & 0xff == 0 || !known;
        let fix = match word {
            _ if free => false,
            _ if ownerless => self.damage("lock", format!("lock of {what}: {word:#x} names no member")),
            _ => self.note("lock", format!("lock of {what}: member {} had it", (word & 0xff) - 1)),
        };
        if fix {
            self.put(at, 0);
        }
    }

    /// Checks transactions and pins. Repair has the core complete them first, so what is left then is damage.
    pub(crate) fn check_members(&mut self) {
        if self.options.live {
            return;
        }
        for (member, slot, at, state) in self.layout.begun(self.area) {
            let text = format!(
                "member {member}: an operation was interrupted (transaction {slot}, state {state:#x})"
            );
            if self.damage("transaction", text) {
                self.put(at, 0);
            }
        }
        for member in 0..sys::TFS_MEMBERS {
            let base = self.layout.member(member);
            for pin in 0..u64::from(sys::TFS_PINS) {
                let at = base
                    + offset_of!(sys::tfs_member_area, pins) as u64
                    + pin * size_of::<sys::tfs_pin>() as u64;
                if self.area.word(at) != Some(0)
                    && self.note("leftover", format!("member {member}: read pin {pin} is set"))
                {
                    self.put(at, 0);
                }
            }
        }
    }

    /// Returns a copy of an inode of the table.
    pub(crate) fn inode(&self, ino: u64) -> Option<Inode> {
        let block = *self.table.get((ino / PER_BLOCK) as usize)?;
        if block == 0 { None } else { Inode::read(self.area, block, ino) }
    }

    pub(crate) fn check_root(&mut self) {
        let Some(root) = self.inode(u64::from(sys::TFS_ROOT_INO)) else { return };
        let live = root.state() == sys::TFS_INODE_LIVE;
        if live && root.kind() == libc::S_IFDIR {
            return;
        }
        if self
            .loss("root", "the root directory is gone: made anew, what was in it comes to lost+found".into())
        {
            for offset in (0..raw::INODE).step_by(8).skip(1) {
                self.put(root.at + offset, 0);
            }
            self.put(root.at + field::mode, u64::from(libc::S_IFDIR | 0o755));
            self.put(root.at + field::nlink, 2);
            self.put(root.at + field::parent, u64::from(sys::TFS_ROOT_INO));
            let generation = (root.state_gen() >> sys::TFS_GEN_SHIFT).max(1);
            self.put(root.at, generation << sys::TFS_GEN_SHIFT | u64::from(sys::TFS_INODE_LIVE));
        }
    }

    fn drop_inode(&mut self, inode: &Inode) {
        self.put(inode.at, raw::free_state(inode.state_gen()));
    }

    pub(crate) fn check_inode(&mut self, ino: u64, inode: &Inode) {
        match inode.state() {
            sys::TFS_INODE_FREE => {
                // The next inode made here clears it.
                if !self.options.live {
                    self.check_lock(inode.at + field::lock, inode.lock(), &format!("free inode {ino}"));
                }
                return;
            }
            sys::TFS_INODE_LIVE => {}
            sys::TFS_INODE_NEW => {
                if !self.options.live
                    && self.damage("inode-new", format!("inode {ino}: its creation was interrupted"))
                {
                    self.drop_inode(inode);
                }
                return;
            }
            state => {
                if self.loss("inode-state", format!("inode {ino}: state {state} does not exist: dropped")) {
                    self.drop_inode(inode);
                }
                return;
            }
        }
        let kind = inode.kind();
        if !KINDS.contains(&kind) || inode.mode() >> 16 != 0 {
            if self
                .loss("inode-mode", format!("inode {ino}: mode {:#o} does not exist: dropped", inode.mode()))
            {
                self.drop_inode(inode);
            }
            return;
        }
        if inode.nlink() == 0 && (!self.options.live || inode.openers() == 0) {
            // Unlinked, kept for members that had it open; no member has it open now.
            let what = format!("inode {ino}: unlinked, but not freed (openers {:#x})", inode.openers());
            if !self.options.live && self.damage("orphan", what) {
                self.drop_inode(inode);
            }
            return;
        }
        let what = format!("inode {ino}");
        let tree = self.claim_tree(inode.at + field::root, inode.root(), &what);
        let others = self.check_xattrs(ino, inode) + self.check_file_locks(ino, inode);
        let good = match kind {
            libc::S_IFDIR => true, // its blocks come with the directories
            libc::S_IFREG => self.check_file(ino, inode, &tree),
            libc::S_IFLNK => self.check_symlink(ino, inode, &tree),
            _ => {
                if !tree.runs.is_empty()
                    && self.damage("device-data", format!("inode {ino}: a device or pipe with data"))
                {
                    self.unclaim(&tree);
                    self.put(inode.at + field::root, 0);
                }
                true
            }
        };
        if !good {
            return;
        }
        if kind != libc::S_IFDIR
            && inode.index_root() != 0
            && self.damage("index", format!("inode {ino}: a file with an index"))
        {
            self.put(inode.at + field::index_root, 0);
        }
        let blocks = tree.blocks() + others;
        if kind != libc::S_IFDIR {
            self.check_blocks(ino, inode, blocks); // a directory's with its index
        }
        if !self.options.live {
            self.check_lock(inode.at + field::lock, inode.lock(), &what);
            for (offset, value, name) in
                [(field::openers, inode.openers(), "open"), (field::mappers, inode.mappers(), "mapped")]
            {
                if value != 0
                    && self.note(
                        "leftover",
                        format!("inode {ino}: members {value:#x} are marked to have it {name}, and do not"),
                    )
                {
                    self.put(inode.at + offset, 0);
                }
            }
        }
        self.report.inodes += 1;
        if kind == libc::S_IFDIR {
            self.report.directories += 1;
            self.dirs.push(ino);
        }
        if let Some(known) = self.inodes.get_mut(ino as usize) {
            *known = Known {
                live: true,
                mode: inode.mode() as u32,
                nlink: inode.nlink(),
                blocks,
                ..Known::default()
            };
        }
    }

    /// `right`: the number of blocks of all its trees, nodes included.
    pub(crate) fn check_blocks(&mut self, ino: u64, inode: &Inode, right: u64) {
        let text = || format!("inode {ino}: counts {} blocks, has {right}", inode.blocks());
        if right != inode.blocks() && !self.options.live && self.note("blocks", text()) {
            self.put(inode.at + field::blocks, right);
        }
    }

    fn check_file(&mut self, ino: u64, inode: &Inode, tree: &Tree) -> bool {
        let size = inode.size();
        if size > sys::TFS_MAX_SIZE {
            let right = tree.end().saturating_mul(BLOCK).min(sys::TFS_MAX_SIZE);
            if self.damage("size", format!("inode {ino}: a size of {size} can't be: {right} now")) {
                self.put(inode.at + field::size, right);
            }
        }
        true
    }

    fn check_symlink(&mut self, ino: u64, inode: &Inode, tree: &Tree) -> bool {
        let size = inode.size();
        let mut target = vec![0; size.min(u64::from(sys::TFS_SYMLINK_MAX)) as usize];
        let readable = tree.block(0).is_some_and(|block| self.area.copy_out(block * BLOCK, &mut target));
        let good = size != 0 && size <= u64::from(sys::TFS_SYMLINK_MAX) && readable && !target.contains(&0);
        if !good && self.loss("symlink", format!("inode {ino}: a symbolic link without a target: dropped")) {
            self.unclaim(tree);
            self.drop_inode(inode);
        }
        good
    }

    /// Returns the number of blocks of the attributes.
    fn check_xattrs(&mut self, ino: u64, inode: &Inode) -> u64 {
        let tree = self.claim_tree(
            inode.at + field::xattr_root,
            inode.xattr_root(),
            &format!("attributes of inode {ino}"),
        );
        if inode.xattr_root() == 0 || tree.blocks() == 0 {
            return 0;
        }
        if !self.xattrs_ok(&tree)
            && self.loss("xattrs", format!("inode {ino}: its extended attributes are not readable: dropped"))
        {
            self.unclaim(&tree);
            self.put(inode.at + field::xattr_root, 0);
            return 0;
        }
        tree.blocks()
    }

    /// Checks the blocks that the table's head counts; records of dead members are void. Returns the number of blocks of
    /// the table.
    fn check_file_locks(&mut self, ino: u64, inode: &Inode) -> u64 {
        let tree =
            self.claim_tree(inode.at + field::locks, inode.locks(), &format!("file locks of inode {ino}"));
        if inode.locks() == 0 || tree.blocks() == 0 {
            return 0;
        }
        let head = offset_of!(sys::tfs_lock_head, blocks) as u64;
        let says = tree.block(0).and_then(|block| self.area.word(block * BLOCK + head)).unwrap_or(u64::MAX);
        let good = says <= tree.end() && (0..says).all(|b| tree.block(b).is_some());
        if !good
            && self.damage(
                "file-locks",
                format!("inode {ino}: its table of file locks is not readable: dropped"),
            )
        {
            self.unclaim(&tree);
            self.put(inode.at + field::locks, 0);
            return 0;
        }
        tree.blocks()
    }

    fn xattrs_ok(&self, tree: &Tree) -> bool {
        let mut head = [0; 8];
        let Some(first) = tree.block(0) else { return false };
        if !self.area.copy_out(first * BLOCK, &mut head) {
            return false;
        }
        let number = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let (bytes, count) = (u64::from(number(&head)), number(&head[4..]));
        if !(8..=XATTR_IMAGE_MAX).contains(&bytes) || tree.end() != bytes.div_ceil(BLOCK) {
            return false;
        }
        let mut image = vec![0; bytes as usize];
        for (i, part) in image.chunks_mut(BLOCK as usize).enumerate() {
            let Some(block) = tree.block(i as u64) else { return false };
            if !self.area.copy_out(block * BLOCK, part) {
                return false;
            }
        }
        let (mut at, mut seen) = (8, 0);
        while at < image.len() {
            let Some(head) = image.get(at..at + 8) else { return false };
            let (name, value) =
                (usize::from(u16::from_le_bytes([head[0], head[1]])), number(&head[4..]) as usize);
            if name == 0 || name > sys::TFS_NAME_MAX as usize || value > sys::TFS_XATTR_MAX as usize {
                return false;
            }
            let len = (8 + name + value).next_multiple_of(8);
            let Some(text) = image.get(at + 8..at + 8 + name) else { return false };
            if text.contains(&0) || at + len > image.len() {
                return false;
            }
            at += len;
            seen += 1;
        }
        seen == count && count != 0
    }
}
