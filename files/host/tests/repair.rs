// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims about what a repair brings back.

use std::mem::offset_of;

use tombolo_files::area::{Area, Map};
use tombolo_files::fs::{self, Create, Filesystem, Handle, Mkfs, ROOT};
use tombolo_files::fsck::{self, Options};
use tombolo_files::sys;

const BLOCK: u64 = 4096;
const REG: u32 = libc::S_IFREG | 0o644;

/// A file system with a file `f`, whose contents are its name.
fn with_file() -> (Area, Filesystem, Handle) {
    let area = Area::whole(Map::memfd("repair", 16 << 20).expect("memory")).expect("an area");
    fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
    let fs = Filesystem::open(area.clone()).expect("open");
    let f = make(&fs, ROOT, b"f");
    (area, fs, f)
}

fn make(fs: &Filesystem, dir: impl Into<Handle>, name: &[u8]) -> Handle {
    let made = fs.create(dir, Some(name), &Create::mode(REG)).expect("create");
    fs.pwrite(made, name, 0, false).expect("write");
    made
}

/// Damage: removes the only name of an inode.
fn cut(area: &Area, ino: u64) {
    let entry = ino | 8 << sys::TFS_REF_TYPE_SHIFT;
    let start = area.word(offset_of!(sys::tfs_super, data_start) as u64).expect("a word") * BLOCK;
    let granule = sys::TFS_GRANULE as usize;
    let found: Vec<u64> =
        (start..area.size()).step_by(granule).filter(|at| area.word(*at) == Some(entry)).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(area.store_word(found[0], 0));
}

/// Repairs, and returns the file system, which is clean then.
fn repaired(area: Area) -> Filesystem {
    let repair = Options { repair: true, live: false };
    let report = fsck::check(&area, repair, &mut |_, _, _| {}).expect("a file system");
    assert_eq!(report.left, 0, "{:?}", report.problems);
    let report = fsck::check(&area, Options::default(), &mut |_, _, _| {}).expect("a file system");
    assert!(report.is_clean(), "{:?}", report.problems);
    Filesystem::open(area).expect("open")
}

fn read(fs: &Filesystem, path: &[&str]) -> String {
    let at =
        path.iter().fold(Handle::from(ROOT), |dir, name| fs.lookup(dir, name.as_bytes()).expect("a name").0);
    let mut bytes = [0; 100];
    let len = fs.pread(at, &mut bytes, 0).expect("read");
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// By a user, or by a repair that was killed before it gave its stand-in's name to the file.
#[test]
fn a_lost_file_is_found_again_though_its_name_in_lost_found_is_taken() {
    let (area, fs, f) = with_file();
    let dir = fs.create(ROOT, Some(b"lost+found"), &Create::mode(libc::S_IFDIR | 0o700)).expect("mkdir");
    let taken = format!("#{}", f.ino);
    make(&fs, dir, taken.as_bytes());
    drop(fs);
    cut(&area, f.ino);
    let fs = repaired(area);
    assert_eq!(read(&fs, &["lost+found", &format!("#{}.1", f.ino)]), "f");
    assert_eq!(read(&fs, &["lost+found", &taken]), taken, "what was there stays");
}

#[test]
fn a_lost_file_is_found_again_though_lost_found_is_a_file() {
    let (area, fs, f) = with_file();
    make(&fs, ROOT, b"lost+found");
    drop(fs);
    cut(&area, f.ino);
    let fs = repaired(area);
    assert_eq!(read(&fs, &["lost+found.1", &format!("#{}", f.ino)]), "f");
    assert_eq!(read(&fs, &["lost+found"]), "lost+found");
}
