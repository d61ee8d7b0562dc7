// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts: compares each sum with the inodes of the account.

use std::mem::offset_of;

use super::Checker;
use super::raw::field;
use crate::account;
use crate::sys;

impl Checker<'_> {
    pub(crate) fn check_accounts(&mut self) {
        if self.options.live {
            return;
        }
        let mut sums = vec![(0u64, 0u64); sys::TFS_ACCOUNTS as usize];
        for ino in 0..self.inodes.len() as u64 {
            let live = self.inodes[ino as usize].live;
            let Some(inode) = self.inode(ino).filter(|_| live) else { continue };
            let number = inode.account();
            match usize::try_from(number).ok().and_then(|n| sums.get_mut(n.wrapping_sub(1))) {
                Some((blocks, inodes)) => {
                    *blocks = blocks.wrapping_add(inode.blocks());
                    *inodes += 1;
                }
                None if number == 0 => {}
                None => {
                    if self.damage(
                        "account",
                        format!("inode {ino}: counts for account {number}, which can't be"),
                    ) {
                        self.put(inode.at + field::account, 0);
                    }
                }
            }
        }
        for (number, (blocks, inodes)) in (0u32..).zip(sums) {
            let at = account::at(number);
            let fields = [
                (offset_of!(sys::tfs_account, blocks), blocks, "blocks"),
                (offset_of!(sys::tfs_account, inodes), inodes, "inodes"),
            ];
            for (offset, right, what) in fields {
                let offset = at + offset as u64;
                let stored = self.area.word(offset).unwrap_or(0);
                let text = || format!("account {number} counts {} {what}, there are {right}", stored as i64);
                if stored != right && self.note("account-count", text()) {
                    self.put(offset, right);
                }
            }
        }
    }
}
