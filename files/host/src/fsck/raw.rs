// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fields of the structures on the area, as copies.

use std::mem::offset_of;

use super::Unreadable;
use crate::area::Area;
use crate::sys;

pub(crate) const BLOCK: u64 = sys::TFS_BLOCK as u64;
pub(crate) const FANOUT: u64 = sys::TFS_FANOUT as u64;
/// Marks an entry for 512 blocks.
pub(crate) const HUGE: u64 = 1 << 63;
pub(crate) const INODE: u64 = size_of::<sys::tfs_inode>() as u64;
pub(crate) const PER_BLOCK: u64 = BLOCK / INODE;

/// The layout; follows from the area's length alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) blocks: u64,
    pub(crate) member_start: u64,
    pub(crate) map_start: u64,
    pub(crate) data_start: u64,
    pub(crate) hash: NameHash,
}

/// How names are hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameHash {
    seed: u64,
    keyed: bool,
}

fn super_word(area: &Area, offset: usize) -> Result<u64, Unreadable> {
    area.word(offset as u64).ok_or_else(|| Unreadable("the area is smaller than a super block".into()))
}

fn super_half(area: &Area, offset: usize) -> Result<u32, Unreadable> {
    let word = super_word(area, offset & !7)?;
    Ok((word >> (8 * (offset & 4))) as u32)
}

impl Layout {
    pub(crate) fn read(area: &Area) -> Result<Layout, Unreadable> {
        let word = |offset| super_word(area, offset);
        if word(offset_of!(sys::tfs_super, magic))? != sys::TFS_MAGIC {
            return Err(Unreadable("there is no file system here".into()));
        }
        let version = super_half(area, offset_of!(sys::tfs_super, version))?;
        let features = word(offset_of!(sys::tfs_super, incompat))?;
        let incompat = features & !u64::from(sys::TFS_INCOMPAT_KNOWN);
        let ro_compat = word(offset_of!(sys::tfs_super, ro_compat))?;
        let incompat = incompat | (ro_compat & !u64::from(sys::TFS_RO_COMPAT_PERSISTENT));
        if version != sys::TFS_VERSION || incompat != 0 {
            return Err(Unreadable(format!(
                "a file system of version {version} with features {incompat:#x}; this program knows version {}; use the program that made it",
                sys::TFS_VERSION
            )));
        }
        // The stored layout is compared with this one; where they differ, the computed one is right unless the size is damaged.
        let stored = word(offset_of!(sys::tfs_super, blocks))?;
        let whole = area.size() / BLOCK;
        let fits = |blocks: u64| (1024..=whole).contains(&blocks) && blocks <= sys::TFS_BLOCKNR_MASK;
        let blocks = if fits(stored) { stored } else { whole };
        if !fits(blocks) {
            return Err(Unreadable(format!("{} bytes are too few for a file system", area.size())));
        }
        let member_start = 1;
        let member_blocks = size_of::<sys::tfs_member_area>() as u64 / BLOCK;
        let map_start = member_start + u64::from(sys::TFS_MEMBERS) * member_blocks;
        let mut data_start = map_start + blocks.div_ceil(BLOCK);
        if blocks >= 16384 {
            data_start = data_start.next_multiple_of(FANOUT);
        }
        let hash = NameHash {
            seed: word(offset_of!(sys::tfs_super, hash_seed))?,
            keyed: features & u64::from(sys::TFS_INCOMPAT_KEYED_HASH) != 0,
        };
        Ok(Layout { blocks, member_start, map_start, data_start, hash })
    }

    /// Fields of the super block that hold the layout: offset, value, name.
    pub(crate) fn stored(&self) -> [(usize, u64, &'static str); 5] {
        [
            (offset_of!(sys::tfs_super, blocks), self.blocks, "blocks"),
            (offset_of!(sys::tfs_super, member_start), self.member_start, "member_start"),
            (
                offset_of!(sys::tfs_super, member_blocks),
                size_of::<sys::tfs_member_area>() as u64 / BLOCK,
                "member_blocks",
            ),
            (offset_of!(sys::tfs_super, map_start), self.map_start, "map_start"),
            (offset_of!(sys::tfs_super, data_start), self.data_start, "data_start"),
        ]
    }

    pub(crate) fn block_ok(&self, block: u64) -> bool {
        (self.data_start..self.blocks).contains(&block)
    }

    pub(crate) fn member(&self, member: u32) -> u64 {
        self.member_start * BLOCK + u64::from(member) * size_of::<sys::tfs_member_area>() as u64
    }

    /// The operations that have begun and not ended: member, transaction slot, where its state lies, and the state.
    pub(crate) fn begun(&self, area: &Area) -> Vec<(u32, u64, u64, u64)> {
        let slots =
            (0..sys::TFS_MEMBERS).flat_map(|m| (0..u64::from(sys::TFS_TX_SLOTS)).map(move |slot| (m, slot)));
        let states = slots.map(|(member, slot)| {
            let at = self.member(member) + slot * size_of::<sys::tfs_tx>() as u64;
            (member, slot, at, area.word(at).unwrap_or(0))
        });
        states.filter(|(.., state)| state & 0xff != u64::from(sys::TFS_TX_FREE)).collect()
    }
}

pub(crate) fn clear_errors(area: &Area) {
    let _ = area.store_word(offset_of!(sys::tfs_super, errors) as u64, 0);
}

macro_rules! fields {
    ($($name:ident)*) => {
        /// A copy of an inode.
        pub(crate) struct Inode {
            /// Its offset in bytes.
            pub(crate) at: u64,
            words: [u64; 32],
        }
        impl Inode {
            $(
                #[allow(dead_code)]
                pub(crate) fn $name(&self) -> u64 {
                    self.words[offset_of!(sys::tfs_inode, $name) / 8]
                }
            )*
        }
        /// Offsets of an inode's fields.
        #[allow(dead_code)]
        pub(crate) mod field {
            use super::*;
            $(
                #[allow(non_upper_case_globals)]
                pub(crate) const $name: u64 = offset_of!(sys::tfs_inode, $name) as u64;
            )*
        }
    };
}
fields!(state_gen mode owner nlink flags rdev parent xattr_root root size blocks seq index_root index_used
    entries free_granules openers mappers lock locks account);

impl Inode {
    pub(crate) fn read(area: &Area, table_block: u64, ino: u64) -> Option<Inode> {
        let at = table_block * BLOCK + ino % PER_BLOCK * INODE;
        let mut words = [0; 32];
        for (i, word) in words.iter_mut().enumerate() {
            *word = area.word(at + i as u64 * 8)?;
        }
        Some(Inode { at, words })
    }

    pub(crate) fn state(&self) -> u32 {
        (self.state_gen() & 0xff) as u32
    }

    pub(crate) fn kind(&self) -> u32 {
        self.mode() as u32 & libc::S_IFMT
    }
}

/// Returns the state of a free inode, with the generation kept.
pub(crate) fn free_state(state_gen: u64) -> u64 {
    ((state_gen >> sys::TFS_GEN_SHIFT).wrapping_add(1)) << sys::TFS_GEN_SHIFT
}

impl NameHash {
    /// The core's hash of a name.
    pub(crate) fn of(self, name: &[u8]) -> u32 {
        let word = |chunk: &[u8]| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        };
        if self.keyed { self.siphash(name, word) } else { self.unkeyed(name, word) }
    }

    fn unkeyed(self, name: &[u8], word: impl Fn(&[u8]) -> u64) -> u32 {
        let mut h = self.seed ^ name.len() as u64;
        for chunk in name.chunks(8) {
            h = (h ^ word(chunk)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h ^= h >> 29;
        }
        h = h.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h ^= h >> 32;
        h as u32
    }

    /// SipHash-1-3.
    fn siphash(self, name: &[u8], word: impl Fn(&[u8]) -> u64) -> u32 {
        let (k0, k1) = (self.seed, self.seed ^ 0x9e37_79b9_7f4a_7c15);
        let mut v = [*b"uespemos", *b"modnarod", *b"arenegyl", *b"setybdet"].map(u64::from_le_bytes);
        v.iter_mut().zip([k0, k1, k0, k1]).for_each(|(v, k)| *v ^= k);
        let round = |v: &mut [u64; 4]| {
            v[0] = v[0].wrapping_add(v[1]);
            v[2] = v[2].wrapping_add(v[3]);
            v[1] = v[1].rotate_left(13) ^ v[0];
            v[3] = v[3].rotate_left(16) ^ v[2];
            v[0] = v[0].rotate_left(32).wrapping_add(v[3]);
            v[2] = v[2].wrapping_add(v[1]);
            v[1] = v[1].rotate_left(17) ^ v[2];
            v[3] = v[3].rotate_left(21) ^ v[0];
            v[2] = v[2].rotate_left(32);
        };
        let whole = name.len() / 8 * 8;
        let last = word(&name[whole..]) | (name.len() as u64) << 56;
        for word in name[..whole].chunks(8).map(word).chain([last]) {
            v[3] ^= word;
            round(&mut v);
            v[0] ^= word;
        }
        v[2] ^= 0xff;
        (0..3).for_each(|_| round(&mut v));
        let h = v.into_iter().fold(0, |h, v| h ^ v);
        (h ^ h >> 32) as u32
    }
}
