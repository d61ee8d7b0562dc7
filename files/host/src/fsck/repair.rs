// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Repairs through the core: recovery of dead members, and names in /lost+found.

use std::mem::offset_of;

use rustix::io::Errno;

use super::raw::{HUGE, INODE, Layout, PER_BLOCK};
use super::{Problem, Report, Severity};
use crate::area::Area;
use crate::fs::{Create, Filesystem, Handle, ROOT};
use crate::sys;

fn say(report: &mut Report, code: &'static str, text: String, fixed: bool) {
    report.damage += 1;
    report.left += u64::from(!fixed);
    report.problems.push(Problem { code, text, severity: Severity::Damage, fixed });
}

/// Has the core recover dead members. Damage that stops it is left to the passes.
pub(crate) fn recover(area: &Area) {
    if let Ok(fs) = Filesystem::open_with(area.lone(), Box::new(|_, _, _| {})) {
        let _ = fs.recover_all();
    }
}

/// Names tried for one that may be taken, by what users have made or by what a repair left that was killed.
const NAMES: u32 = 1000;

/// Returns `name`, then that with a number behind it.
fn names(name: &str) -> impl Iterator<Item = String> {
    let numbered = format!("{name}.");
    std::iter::once(name.to_owned()).chain((1..NAMES).map(move |n| format!("{numbered}{n}")))
}

/// Returns the first directory called lost+found or that with a number, which is made if no such name is there.
fn lost_and_found(fs: &Filesystem) -> Result<Handle, Errno> {
    for name in names("lost+found") {
        match fs.lookup(ROOT, name.as_bytes()) {
            Ok((dir, libc::DT_DIR)) => return Ok(dir),
            Ok(_) => {}
            Err(_) => return fs.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o700)),
        }
    }
    Err(Errno::EXIST)
}

/// Puts inodes without a name into /lost+found as `#number`: the core makes an inode of that name, then the entry is
/// pointed at the lost inode.
pub(crate) fn reconnect(area: &Area, lost: &[u64], report: &mut Report) {
    let fs = match Filesystem::open_with(area.used_by(None), Box::new(|_, _, _| {})) {
        Ok(fs) => fs,
        Err(e) => return say(report, "lost+found", format!("can't be made: {e}"), false),
    };
    let dir = match lost_and_found(&fs) {
        Ok(dir) => dir,
        Err(e) => return say(report, "lost+found", format!("can't be made: {e}"), false),
    };
    for ino in lost.iter().filter(|ino| **ino != dir.ino) {
        if let Err(why) = reconnect_one(area, &fs, dir.ino, *ino) {
            say(report, "lost+found", format!("inode {ino} finds no place there: {why}"), false);
        }
    }
}

/// Makes the stand-in of a lost inode, whose name that inode gets.
fn stand_in(fs: &Filesystem, dir: u64, ino: u64, what: &Create) -> Result<Handle, Errno> {
    let mut made = Err(Errno::EXIST);
    for name in names(&format!("#{ino}")) {
        made = fs.create(dir, Some(name.as_bytes()), what);
        if made != Err(Errno::EXIST) {
            break;
        }
    }
    made
}

fn reconnect_one(area: &Area, fs: &Filesystem, dir: u64, ino: u64) -> Result<(), String> {
    let attr = fs.getattr(ino).map_err(|e| e.to_string())?;
    let kind = attr.mode & libc::S_IFMT;
    let target: Option<&[u8]> = (kind == libc::S_IFLNK).then_some(b"x");
    let what = Create { target, ..Create::mode(kind | 0o600) };
    let stand_in = stand_in(fs, dir, ino, &what).map_err(|e| e.to_string())?.ino;
    let layout = Layout::read(area).map_err(|e| e.0)?;
    // The one word of the entry that refers to the stand-in.
    let entry = entry_of(area, &layout, fs, dir, stand_in, attr.mode).ok_or("its new entry is not found")?;
    let old = area.word(entry).ok_or("its new entry is not readable")?;
    // With a link count of 0 the next pass frees the stand-in. A repair that is killed between the two stores leaves an entry without an inode, which
    // the next one removes; the other way round it would find the stand-in lost.
    let at = inode_at(area, fs, stand_in).ok_or("no stand-in")?;
    let unlinked = area.store_word(at + offset_of!(sys::tfs_inode, nlink) as u64, 0);
    let stored = area.store_word(entry, (old & !sys::TFS_REF_INO_MASK) | ino);
    (stored && unlinked).then_some(()).ok_or_else(|| "the area is read-only".to_owned())
}

fn inode_at(area: &Area, fs: &Filesystem, ino: u64) -> Option<u64> {
    // The table is a tree like a file's, but the core has no call for it, so it is walked here.
    let _ = fs;
    let root = area.word(offset_of!(sys::tfs_super, itable_root) as u64)?;
    let (mut block, mut level) = (root & sys::TFS_BLOCKNR_MASK, (root >> sys::TFS_HEIGHT_SHIFT & 15) as u32);
    let fblock = ino / PER_BLOCK;
    while level > 0 {
        let index = fblock >> (sys::TFS_FANOUT_SHIFT * (level - 1)) & u64::from(sys::TFS_FANOUT - 1);
        let entry = area.word(block.checked_mul(u64::from(sys::TFS_BLOCK))?.checked_add(index * 8)?)?;
        block = entry & sys::TFS_BLOCKNR_MASK;
        if entry & HUGE != 0 {
            block += fblock & u64::from(sys::TFS_FANOUT - 1);
            break;
        }
        level -= 1;
    }
    (block != 0).then(|| block * u64::from(sys::TFS_BLOCK) + ino % PER_BLOCK * INODE)
}

fn entry_of(area: &Area, layout: &Layout, fs: &Filesystem, dir: u64, ino: u64, mode: u32) -> Option<u64> {
    let want = ino | u64::from(mode >> 12 & 15) << sys::TFS_REF_TYPE_SHIFT;
    let end = fs.size(dir) / u64::from(sys::TFS_BLOCK);
    for fblock in 0..end.min(layout.blocks) {
        let block = fs.map(dir, fblock, 1).ok()?.block;
        let start = block * u64::from(sys::TFS_BLOCK);
        for at in (start..start + u64::from(sys::TFS_BLOCK)).step_by(sys::TFS_GRANULE as usize) {
            if area.word(at) == Some(want) {
                return Some(at);
            }
        }
    }
    None
}
