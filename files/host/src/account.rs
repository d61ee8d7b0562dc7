// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts: files that are counted and limited together (`files/core/account.c`).

use std::mem::offset_of;

use serde::Serialize;

use crate::area::Area;
use crate::fs::Filesystem;
use crate::sys;

/// The number of accounts in a file system.
pub const MAX: u32 = sys::TFS_ACCOUNTS;

/// A copy of an account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Account {
    pub name: String,
    /// Bytes that its files take.
    pub bytes: u64,
    /// Limit of `bytes`; 0: none.
    pub bytes_limit: u64,
    /// Files and directories that it has.
    pub inodes: u64,
    /// Limit of `inodes`; 0: none.
    pub inodes_limit: u64,
}

/// Returns the offset of account `number` in an area.
pub(crate) fn at(number: u32) -> u64 {
    let member = size_of::<sys::tfs_member_area>() as u64;
    u64::from(sys::TFS_BLOCK) + u64::from(number) * member + offset_of!(sys::tfs_member_area, own) as u64
}

pub(crate) fn read(area: &Area, number: u32) -> Option<Account> {
    let word = |field: usize| area.word(at(number) + field as u64);
    let mut name = [0; 32];
    if !area.copy_out(at(number), &mut name) || name[0] == 0 {
        return None;
    }
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    // A negative count is wrong by the work of a dead member.
    let count = |word: u64| u64::try_from(word as i64).unwrap_or(0);
    Some(Account {
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        bytes: count(word(offset_of!(sys::tfs_account, blocks))?).saturating_mul(4096),
        bytes_limit: word(offset_of!(sys::tfs_account, blocks_limit))?.saturating_mul(4096),
        inodes: count(word(offset_of!(sys::tfs_account, inodes))?),
        inodes_limit: word(offset_of!(sys::tfs_account, inodes_limit))?,
    })
}

/// All accounts of a file system.
pub fn list(fs: &Filesystem) -> Vec<Account> {
    (0..MAX).filter_map(|number| read(fs.area(), number)).collect()
}

/// Returns the offsets of a slot's grant: root with generation, and account.
fn grant_words(member: u32) -> [u64; 3] {
    let start = at(member) - offset_of!(sys::tfs_member_area, own) as u64;
    [
        offset_of!(sys::tfs_member_area, root),
        offset_of!(sys::tfs_member_area, root_generation),
        offset_of!(sys::tfs_member_area, account),
    ]
    .map(|field| start + field as u64)
}

/// Returns the root, its generation and the account that a slot was granted, 0: none. `None`: the area is too small.
pub(crate) fn granted(area: &Area, member: u32) -> Option<[u64; 3]> {
    let [root, generation, account] = grant_words(member);
    Some([area.word(root)?, area.word(generation)?, area.word(account)?])
}

/// Revokes a slot's grants, before another member gets the slot.
pub(crate) fn revoke(area: &Area, member: u32) -> bool {
    grant_words(member).iter().all(|word| area.store_word(*word, 0))
}
