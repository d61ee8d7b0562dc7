// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small zone: member table and file system in one recorded region, and the file system's contents as plain values.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::fs::{self, Filesystem, Mkfs, ROOT};
use tombolo_files::fsck::{self, Options};
use tombolo_files::sys;

use crate::recorder;

const TABLE: usize = 4096;
const AREA: usize = 32768;
const MEMBER: usize = size_of::<sys::tmb_member>();
const BLOCK: u64 = sys::TFS_BLOCK as u64;

/// Memory that only this thread uses.
pub struct World {
    map: Arc<Map>,
    area: Area,
}

impl World {
    pub fn new(mib: u64, persistent: bool) -> World {
        let map = Arc::new(Map::memfd("prefixes", AREA as u64 + (mib << 20)).expect("memory"));
        let area = Area::in_map(&map, AREA as u64, mib << 20, None).expect("an area");
        let whole = Area::in_map(&map, 0, map.size(), None).expect("all of it");
        recorder::attach(whole.base(), map.size() as usize);
        fs::mkfs(&area, &Mkfs { hash_seed: 5, persistent, ..Mkfs::default() }).expect("mkfs");
        World { map, area }
    }

    fn epoch(member: u32) -> u32 {
        (recorder::get(TABLE + member as usize * MEMBER) >> 32) as u32
    }

    fn set(member: u32, epoch: u32, state: u32) {
        recorder::set(TABLE + member as usize * MEMBER, u64::from(epoch) << 32 | u64::from(state));
    }

    /// Admits a member.
    pub fn open(&self, member: u32) -> Result<Filesystem, String> {
        World::set(member, World::epoch(member) + 1, sys::TMB_MEMBER_ACTIVE);
        self.open_again(member)
    }

    /// Returns another handle of an active member.
    pub fn open_again(&self, member: u32) -> Result<Filesystem, String> {
        let log = Box::new(|what: &str, a, b| eprintln!("damage: {what} ({a:#x}, {b:#x})"));
        let incarnation = Some((TABLE as u64, Incarnation { member, epoch: World::epoch(member) }));
        let area = Area::in_map(&self.map, AREA as u64, self.area.size(), incarnation).expect("an area");
        Filesystem::open_with(area, log).map_err(|e| format!("opening: {e}"))
    }

    /// Returns whether a member is ACTIVE.
    pub fn is_active(member: u32) -> bool {
        (recorder::get(TABLE + member as usize * MEMBER) & 0xff) as u32 == sys::TMB_MEMBER_ACTIVE
    }

    /// Declares a member dead.
    pub fn declare_dead(member: u32) {
        World::set(member, World::epoch(member) + 1, sys::TMB_MEMBER_DEAD);
    }

    /// Returns what a member's doorbell asks for, and clears it.
    pub fn take_pending(member: u32) -> u64 {
        let at = TABLE + member as usize * MEMBER + core::mem::offset_of!(sys::tmb_member, pending);
        let asked = recorder::get(at);
        recorder::set(at, 0);
        asked
    }

    pub fn map_file(&self, member: u32, ino: u64) {
        let at = self.super_word(88) as usize * 4096 + ino as usize * size_of::<sys::tfs_inode>();
        let at = AREA + at + core::mem::offset_of!(sys::tfs_inode, mappers);
        recorder::set(at, recorder::get(at) | 1 << member);
    }

    /// Returns whether the lock of the inode table, under which it grows, is held.
    pub fn table_is_locked(&self) -> bool {
        self.super_word(core::mem::offset_of!(sys::tfs_super, itable_lock)) & 0xff != 0
    }

    /// Returns the address of a block.
    pub fn address(&self, block: u64) -> usize {
        AREA + (block * BLOCK) as usize
    }

    pub fn map_byte(&self, block: u64) -> u32 {
        let at = AREA + self.super_word(80) as usize * 4096 + block as usize;
        (recorder::get(at & !7) >> (8 * (at % 8)) & 0xff) as u32
    }

    fn super_word(&self, offset: usize) -> u64 {
        self.area.word(offset as u64).expect("in the super block")
    }

    /// Returns the blocks in use; fsck must find nothing.
    pub fn check(&self) -> Result<u64, String> {
        fsck::expect_clean(&self.area, &mut |_, _, _| {}).map(|report| report.blocks_used)
    }

    /// As `fsck -n` before anybody recovers the dead: what they left unfinished is no damage.
    pub fn check_before_recovery(&self) -> Result<(), String> {
        let finished = fsck::finished(&self.area).ok_or("no copy")?;
        let report = fsck::check(&finished, Options::default(), &mut |_, _, _| {}).map_err(|e| e.0)?;
        if report.is_clean() { Ok(()) } else { Err(format!("fsck -n: {:?}", report.problems)) }
    }

    /// Names the field that a store changes, for failure messages.
    pub fn name_of(&self, at: usize) -> String {
        let Some(at) = at.checked_sub(AREA) else {
            return format!("member {} +{}", (at - TABLE) / MEMBER, (at - TABLE) % MEMBER);
        };
        let [members, map, data] = [64, 80, 88].map(|offset| self.super_word(offset) as usize * 4096);
        let member_size = size_of::<sys::tfs_member_area>();
        match at {
            _ if at < members => format!("super block +{at}"),
            _ if at < map => {
                let (member, rest) = ((at - members) / member_size, (at - members) % member_size);
                if rest < 512 * sys::TFS_TX_SLOTS as usize {
                    format!("member {member} transaction {} +{}", rest / 512, rest % 512)
                } else {
                    format!("member {member} +{rest}")
                }
            }
            _ if at < data => format!("block map of {}", at - map),
            _ if at < data + 16 * 4096 => format!("inode {} +{}", (at - data) / 256, (at - data) % 256),
            _ => format!("block {} +{}", at / 4096, at % 4096),
        }
    }
}

/// An inode with all that a program could see of it, but times and statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    pub ino: u64,
    pub mode: u32,
    pub nlink: u32,
    pub owner: (u32, u32),
    pub rdev: u64,
    pub flags: u32,
    pub size: u64,
    /// Bytes that are not zero, by file block.
    pub data: BTreeMap<u64, Vec<u8>>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub target: Vec<u8>,
    pub parent: u64,
}

/// All objects by path.
pub type Tree = BTreeMap<String, Object>;

/// Reads the whole file system.
pub fn read(fs: &Filesystem) -> Result<Tree, String> {
    let mut tree = Tree::new();
    let mut queue = vec![(String::new(), ROOT)];
    while let Some((path, ino)) = queue.pop() {
        let object = read_object(fs, ino).map_err(|e| format!("{path}/ (inode {ino}): {e}"))?;
        if object.mode & libc::S_IFMT == libc::S_IFDIR {
            for entry in fs.list(ino).map_err(|e| format!("{path}/: {e}"))? {
                let name = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
                let found = fs.lookup(ino, &entry.name).map_err(|e| format!("{name}: {e}"))?;
                if found.0.ino != entry.ino {
                    return Err(format!("{name}: listed as {}, found as {}", entry.ino, found.0.ino));
                }
                queue.push((name, entry.ino));
            }
        }
        if tree.insert(path.clone(), object).is_some() {
            return Err(format!("{path} is there twice"));
        }
    }
    Ok(tree)
}

fn read_object(fs: &Filesystem, ino: u64) -> fs::Result<Object> {
    let attr = fs.getattr(ino)?;
    let kind = attr.mode & libc::S_IFMT;
    let mut object = Object {
        ino,
        mode: attr.mode,
        nlink: attr.nlink,
        owner: (attr.uid, attr.gid),
        rdev: attr.rdev,
        flags: attr.flags,
        size: if kind == libc::S_IFDIR { 0 } else { attr.size },
        data: BTreeMap::new(),
        xattrs: BTreeMap::new(),
        target: if kind == libc::S_IFLNK { fs.readlink(ino)? } else { Vec::new() },
        parent: if kind == libc::S_IFDIR { fs.parent(ino)? } else { 0 },
    };
    for name in fs.xattr_list(ino)?.split(|b| *b == 0).filter(|n| !n.is_empty()) {
        object.xattrs.insert(name.to_vec(), fs.xattr_get(ino, name)?);
    }
    let blocks = if kind == libc::S_IFREG { attr.size.div_ceil(BLOCK) } else { 0 };
    let mut at = 0;
    while at < blocks {
        let run = fs.map(ino, at, blocks - at)?;
        for fblock in at..at + if run.block == 0 { 0 } else { run.count } {
            let mut bytes = vec![0; BLOCK as usize];
            let n = fs.pread(ino, &mut bytes, fblock * BLOCK)?;
            bytes.truncate(n);
            if bytes.iter().any(|b| *b != 0) {
                object.data.insert(fblock, bytes);
            }
        }
        at += run.count;
    }
    Ok(object)
}

pub fn difference(real: &Tree, wanted: &Tree) -> String {
    let mut out = Vec::new();
    for path in real.keys().chain(wanted.keys().filter(|p| !real.contains_key(*p))) {
        match (real.get(path), wanted.get(path)) {
            (Some(_), None) => out.push(format!("{path}/ is there")),
            (None, Some(_)) => out.push(format!("{path}/ is missing")),
            (Some(a), Some(b)) if a != b => {
                let brief = |o: &Object| {
                    let data: Vec<u64> = o.data.keys().copied().collect();
                    let xattrs: Vec<usize> = o.xattrs.values().map(Vec::len).collect();
                    format!(
                        "inode {} {:o} links {} {:?} size {} data at {data:?} attributes {xattrs:?} .. {}",
                        o.ino, o.mode, o.nlink, o.owner, o.size, o.parent
                    )
                };
                out.push(format!("{path}/ is {}, not {}", brief(a), brief(b)));
            }
            _ => {}
        }
    }
    out.join("; ")
}

/// Returns whether `real` is a mixture of `old` and `new`: in the file at `path` each byte, and the size, is one of theirs; all else is
/// equal in both.
pub fn is_mixture(real: &Tree, old: &Tree, new: &Tree, path: &str) -> bool {
    let (Some(file), Some(a), Some(b)) = (real.get(path), old.get(path), new.get(path)) else { return false };
    let blocks: BTreeSet<u64> = file.data.keys().chain(a.data.keys()).chain(b.data.keys()).copied().collect();
    let data_ok = blocks.into_iter().all(|block| {
        let of = |object: &Object| object.data.get(&block).cloned().unwrap_or_default();
        let (real, a, b) = (of(file), of(a), of(b));
        let byte = |bytes: &[u8], i: usize| bytes.get(i).copied().unwrap_or(0);
        let end = (BLOCK as usize).min(file.size.saturating_sub(block * BLOCK) as usize);
        real == a || real == b || (0..end).all(|i| [byte(&a, i), byte(&b, i)].contains(&byte(&real, i)))
    });
    let mode_ok = [a.mode, b.mode].contains(&file.mode);
    let mut rest = real.clone();
    for (other, object) in &mut rest {
        // Other names of the same file show the same bytes.
        if object.ino == file.ino {
            if let Some(wanted) = old.get(other) {
                *object = wanted.clone();
            }
        }
    }
    data_ok && mode_ok && [a.size, b.size].contains(&file.size) && rest == *old
}
