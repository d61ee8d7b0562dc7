// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Single claims about the core, through its safe face.

use std::sync::Arc;

use rustix::io::Errno;
use tombolo_files::area::{Area, Map, Seat};
use tombolo_files::fs::{self, Create, Filesystem, Mkfs, ROOT};
use tombolo_files::fsck::{self, Options};
use tombolo_files::sys;

const REG: u32 = libc::S_IFREG | 0o644;
const BLOCK: u64 = 4096;

fn area(mib: u64) -> Area {
    let area = Area::whole(Map::memfd("core", mib << 20).expect("memory")).expect("an area");
    fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
    area
}

fn file(fs: &Filesystem, name: &str) -> u64 {
    fs.create(ROOT, Some(name.as_bytes()), &Create::mode(REG)).expect("create")
}

fn assert_clean(area: &Area) {
    let report = fsck::check(area, Options::default(), &mut |_, _, _| {}).expect("a file system");
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[test]
fn a_full_zone_says_so_and_loses_nothing() {
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let kept = file(&fs, "kept");
    fs.pwrite(kept, &[7; 50_000], 0, false).expect("room");
    let big = file(&fs, "big");
    let mut at = 0;
    let error = loop {
        match fs.pwrite(big, &[1; 60_000], at, false) {
            Ok(n) => at += n as u64,
            Err(e) => break e,
        }
    };
    assert_eq!(error, Errno::NOSPC);
    assert_eq!(fs.statfs().blocks_free, 0);
    let mut full = 0;
    while fs.create(ROOT, Some(format!("f{full}").as_bytes()), &Create::mode(REG)).is_ok() {
        full += 1;
        assert!(full < 100_000, "a full zone takes no end of files");
    }
    let mut back = vec![0; 60_000];
    assert_eq!(fs.pread(kept, &mut back, 0), Ok(50_000));
    assert!(back[..50_000].iter().all(|b| *b == 7));
    assert_eq!(fs.size(big), at);
    fs.unlink(ROOT, b"big", 0).expect("unlink frees");
    fs.pwrite(kept, &[8; 50_000], 1 << 20, false).expect("room again");
    drop(fs);
    assert_clean(&area);
}

#[test]
fn a_hundred_thousand_names_are_found_and_listed_with_stable_cookies() {
    const NAMES: u64 = 100_000;
    let area = area(128);
    let fs = Filesystem::open(area.clone()).expect("open");
    let dir = fs.create(ROOT, Some(b"large"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
    for i in 0..NAMES {
        fs.create(dir, Some(format!("name-{i}").as_bytes()), &Create::mode(REG)).expect("create");
    }
    // Listing in pieces while every second name goes away: what stays is listed once.
    let mut seen = std::collections::HashSet::new();
    let mut pos = 0;
    loop {
        let mut taken = 0;
        let next = fs
            .readdir(dir, pos, |name, _, _, _| {
                taken += 1;
                if taken > 1000 {
                    return false;
                }
                assert!(seen.insert(name.to_vec()), "{name:?} is listed twice");
                true
            })
            .expect("readdir");
        if taken == 0 {
            break;
        }
        if pos == 0 {
            for i in (0..NAMES).step_by(2) {
                fs.unlink(dir, format!("name-{i}").as_bytes(), 0).expect("unlink");
            }
        }
        pos = next;
    }
    for i in (1..NAMES).step_by(2) {
        let name = format!("name-{i}");
        assert!(seen.contains(name.as_bytes()), "{name} was not listed");
        fs.lookup(dir, name.as_bytes()).expect("lookup");
    }
    assert_eq!(fs.lookup(dir, b"name-0"), Err(Errno::NOENT));
    drop(fs);
    assert_clean(&area);
}

/// Two members of one zone: member tables at the start, the file system behind.
fn two_members() -> (Filesystem, Filesystem) {
    let map = Arc::new(Map::memfd("two", 34 << 20).expect("memory"));
    let whole = Area::in_map(&map, 2 << 20, 32 << 20, None).expect("an area");
    fs::mkfs(&whole, &Mkfs::default()).expect("mkfs");
    let table = Area::in_map(&map, 4096, 64 * 256, None).expect("a table");
    let open = |member: u32| {
        assert!(table.store_word(u64::from(member) * 256, 1 << 32 | u64::from(sys::TMB_MEMBER_ACTIVE)));
        let seat = Some((4096, Seat { member, epoch: 1 }));
        Filesystem::open(Area::in_map(&map, 2 << 20, 32 << 20, seat).expect("an area")).expect("open")
    };
    (open(0), open(5))
}

#[test]
fn a_file_that_another_member_unlinked_stays_readable_until_closed() {
    let (a, b) = two_members();
    let ino = file(&a, "f");
    a.pwrite(ino, b"contents", 0, false).expect("write");
    b.open_ref(ino, 0).expect("open");
    let free = a.statfs().blocks_free;
    a.unlink(ROOT, b"f", 0).expect("unlink");
    assert_eq!(a.lookup(ROOT, b"f"), Err(Errno::NOENT));
    let mut buf = [0; 8];
    assert_eq!(b.pread(ino, &mut buf, 0), Ok(8));
    assert_eq!(&buf, b"contents");
    b.pwrite(ino, b"more", 8, false).expect("write after unlink");
    assert_eq!(b.getattr(ino, 0).expect("attributes").nlink, 0);
    b.close_ref(ino).expect("close");
    assert_eq!(b.getattr(ino, 0).map(|_| ()), Err(Errno::STALE));
    assert!(a.statfs().blocks_free > free);
}

#[test]
fn writes_truncation_and_chown_bits_follow_posix() {
    let fs = Filesystem::open(area(8)).expect("open");
    let mode = libc::S_IFREG | 0o6755;
    let ino = fs.create(ROOT, Some(b"suid"), &Create::mode(mode)).expect("create");
    fs.pwrite(ino, b"x", 0, false).expect("write by root");
    assert_eq!(fs.getattr(ino, 0).expect("attributes").mode, mode);
    fs.pwrite(ino, b"x", 0, true).expect("write by another");
    assert_eq!(fs.getattr(ino, 0).expect("attributes").mode, libc::S_IFREG | 0o755);
    let locking = fs.create(ROOT, Some(b"locking"), &Create::mode(libc::S_IFREG | 0o2644)).expect("create");
    fs.truncate(locking, 0, true).expect("truncate");
    assert_eq!(fs.getattr(locking, 0).expect("attributes").mode, libc::S_IFREG | 0o2644);
}

#[test]
fn two_mebibytes_are_one_aligned_run_and_are_counted_right_after_a_punch_splits_them() {
    let area = area(32);
    let fs = Filesystem::open(area.clone()).expect("open");
    let ino = file(&fs, "huge");
    fs.pwrite(ino, &vec![3; 2 << 20], 0, false).expect("write");
    let run = fs.map(ino, 0, 512).expect("map");
    assert_eq!((run.block % 512, run.count), (0, 512));
    fs.fallocate(ino, sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE, 10 * BLOCK, 5 * BLOCK)
        .expect("punch");
    assert_eq!(fs.seek(ino, 0, true), Ok(10 * BLOCK));
    assert_eq!(fs.seek(ino, 10 * BLOCK, false), Ok(15 * BLOCK));
    let nodes = 2;
    assert_eq!(fs.getattr(ino, 0).expect("attributes").blocks, 512 - 5 + nodes);
    fs.truncate(ino, 0, false).expect("truncate");
    assert_eq!(fs.getattr(ino, 0).expect("attributes").blocks, 0);
    drop(fs);
    assert_clean(&area);
}

#[test]
fn what_was_behind_the_end_is_zero_when_a_file_grows_again() {
    let fs = Filesystem::open(area(8)).expect("open");
    let ino = file(&fs, "f");
    fs.pwrite(ino, &[9; 10_000], 0, false).expect("write");
    fs.truncate(ino, 100, false).expect("shrink");
    fs.truncate(ino, 10_000, false).expect("grow");
    let mut buf = vec![1; 10_000];
    assert_eq!(fs.pread(ino, &mut buf, 0), Ok(10_000));
    assert!(buf[..100].iter().all(|b| *b == 9) && buf[100..].iter().all(|b| *b == 0));
    fs.pwrite(ino, b"x", 20_000, false).expect("write past the end");
    assert_eq!(fs.pread(ino, &mut buf, 10_000), Ok(10_000));
    assert!(buf.iter().all(|b| *b == 0));
}

#[test]
fn a_read_only_handle_reads_and_refuses_to_write() {
    let map = Map::memfd("ro", 8 << 20).expect("memory");
    let read_only = Map::new(map.file(), 8 << 20, false).expect("a second mapping");
    let area = Area::whole(map).expect("an area");
    fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
    let fs = Filesystem::open(area).expect("open");
    let ino = file(&fs, "f");
    fs.pwrite(ino, b"data", 0, false).expect("write");
    let reader = Filesystem::open(Area::whole(read_only).expect("an area")).expect("open read-only");
    let mut buf = [0; 4];
    assert_eq!(reader.lookup(ROOT, b"f").expect("lookup").0, ino);
    assert_eq!(reader.pread(ino, &mut buf, 0), Ok(4));
    assert_eq!(reader.pwrite(ino, b"x", 0, false), Err(Errno::ROFS));
    assert_eq!(reader.unlink(ROOT, b"f", 0), Err(Errno::ROFS));
    let report = fsck::check(reader.area(), Options::default(), &mut |_, _, _| {}).expect("a file system");
    assert!(report.is_clean());
}

#[test]
fn what_is_no_file_system_or_another_version_is_refused() {
    let area = area(8);
    let version = core::mem::offset_of!(sys::tfs_super, version) as u64;
    let word = area.word(version).expect("a word");
    assert!(area.store_word(version, word + 1));
    assert_eq!(
        Filesystem::open(area.clone()).map(|_| ()),
        Err(Errno::from_raw_os_error(libc::EPROTONOSUPPORT))
    );
    assert!(area.store_word(0, 0));
    assert_eq!(Filesystem::open(area).map(|_| ()), Err(Errno::INVAL));
}

/// Where the core keeps an inode; the first blocks of a new file system's data are the inode table's.
fn inode_field(area: &Area, ino: u64, field: usize) -> u64 {
    let data_start = area.word(core::mem::offset_of!(sys::tfs_super, data_start) as u64).expect("a word");
    data_start * BLOCK + ino * size_of::<sys::tfs_inode>() as u64 + field as u64
}

/// Member 5 says that it maps a file, and does not unmap it when member 0 truncates it. The blocks that were free before and are after.
fn truncate_what_another_maps(a: &Filesystem) -> (u64, u64) {
    let ino = file(a, "mapped");
    let before = a.statfs().blocks_free;
    a.pwrite(ino, &[7; 100_000], 0, false).expect("write");
    let mappers = inode_field(a.area(), ino, core::mem::offset_of!(sys::tfs_inode, mappers));
    assert!(a.area().store_word(mappers, 1 << 5));
    a.truncate(ino, 0, false).expect("truncate");
    let after = a.statfs().blocks_free;
    assert!(after < before, "blocks that member 5 maps became free");
    assert_eq!(a.limbo(), (before - after, vec![5]));
    (before, after)
}

#[test]
fn blocks_that_a_member_maps_become_free_when_it_leaves() {
    let (a, b) = two_members();
    let (before, _) = truncate_what_another_maps(&a);
    drop(b);
    assert_eq!(a.statfs().blocks_free, before);
    assert_eq!(a.limbo(), (0, vec![]));
}

#[test]
fn blocks_that_a_member_maps_become_free_when_it_dies() {
    let (a, b) = two_members();
    let (before, after) = truncate_what_another_maps(&a);
    a.recover_all().expect("nobody is dead");
    assert_eq!(a.statfs().blocks_free, after);
    let state = a.area().members();
    b.abandon();
    // SAFETY: the table of a zone that stays mapped while `a` lives.
    unsafe { (*state.add(5)).state_epoch = 2 << 32 | u64::from(sys::TMB_MEMBER_DEAD) };
    a.recover_all().expect("recovery");
    assert_eq!(a.statfs().blocks_free, before);
}
