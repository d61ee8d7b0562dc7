// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Single claims about the core, through its safe interface.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::io::Errno;
use tombolo_files::account;
use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::change::Change;
use tombolo_files::fs::{self, Attr, Create, Expect, FileLock, Filesystem, Handle, Mkfs, ROOT};
use tombolo_files::fsck::{self, Options};
use tombolo_files::{snapshot, sys};

const REG: u32 = libc::S_IFREG | 0o644;
const BLOCK: u64 = 4096;

fn area(mib: u64) -> Area {
    let area = Area::whole(Map::memfd("core", mib << 20).expect("memory")).expect("an area");
    fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
    area
}

fn file(fs: &Filesystem, name: &str) -> Handle {
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
    fs.unlink(ROOT, b"big", None).expect("unlink frees");
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
    // Every second name is removed during a listing in pieces: each remaining name is listed once.
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
                fs.unlink(dir, format!("name-{i}").as_bytes(), None).expect("unlink");
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

/// A zone with the member table at the start and the file system behind it, and a function that opens it for a member.
/// Names with changes in pairs of words that cancelled each other out in the hash of older file systems, whatever its seed was.
fn of_one_hash(i: usize) -> Vec<u8> {
    let mut name = vec![b'a'; 208];
    for pair in (0..13).filter(|pair| i >> pair & 1 != 0) {
        for (byte, change) in [(7, 0x80), (15, 0x80), (12, 4)] {
            name[16 * pair + byte] ^= change;
        }
    }
    name
}

/// In a directory of all users, the names of one must not keep the others from making theirs.
#[test]
fn names_that_a_user_has_chosen_to_have_one_hash_are_no_damage_and_keep_no_other_name_out() {
    const NAMES: usize = 7800;
    for features in [sys::TFS_INCOMPAT_KNOWN, sys::TFS_INCOMPAT_ALL] {
        let area = area(32);
        assert!(area.store_word(offset_of!(sys::tfs_super, incompat) as u64, u64::from(features)));
        let fs = Filesystem::open_with(area.clone(), Box::new(|what, _, _| panic!("damage: {what}")))
            .expect("open");
        let made = file(&fs, "file");
        for i in 0..NAMES {
            fs.link(ROOT, &of_one_hash(i), made).unwrap_or_else(|e| panic!("name {i}: {e}"));
        }
        for i in 0..100 {
            file(&fs, &format!("other {i}"));
        }
        assert_eq!(fs.list(ROOT).expect("names").len(), NAMES + 101);
        for i in (0..NAMES).step_by(70) {
            assert_eq!(fs.lookup(ROOT, &of_one_hash(i)).map(|found| found.0), Ok(made), "name {i}");
            fs.unlink(ROOT, &of_one_hash(i), None).expect("unlink");
            assert_eq!(fs.lookup(ROOT, &of_one_hash(i)), Err(Errno::NOENT), "name {i}");
        }
        drop(fs);
        assert_clean(&area);
    }
}

#[test]
fn room_for_a_file_that_is_not_there_is_taken_from_nobody() {
    let area = area(32);
    let fs = Filesystem::open(area.clone()).expect("open");
    let kept = file(&fs, "kept");
    fs.fallocate(kept, sys::TFS_FALLOC_KEEP_SIZE, 0, 1 << 20).expect("room");
    fs.pwrite(kept, &[7; 5000], 0, false).expect("write");
    let (before, blocks) = (fs.statfs().blocks_free, fs.getattr(kept).expect("attributes").blocks);
    for mode in [0, sys::TFS_FALLOC_KEEP_SIZE, sys::TFS_FALLOC_ZERO] {
        for len in [before * BLOCK + (2 << 20), 1 << 40] {
            assert_eq!(fs.fallocate(kept, mode, 0, len), Err(Errno::NOSPC), "mode {mode}, {len} bytes");
            let attr = fs.getattr(kept).expect("attributes");
            assert_eq!((attr.size, attr.blocks), (5000, blocks), "mode {mode}, {len} bytes");
            assert_eq!(fs.statfs().blocks_free, before, "mode {mode}, {len} bytes");
        }
    }
    let mut bytes = [0; 5000];
    assert_eq!((fs.pread(kept, &mut bytes, 0), bytes), (Ok(5000), [7; 5000]));
    drop(fs);
    assert_clean(&area);
}

/// Of so few blocks it is not known before that they do not suffice.
#[test]
fn room_that_ends_in_the_middle_is_given_back() {
    const LEN: u64 = 2000 * BLOCK;
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let before = fs.statfs().blocks_free;
    assert!((1100..1900).contains(&before), "{before}");
    for (mode, size) in [(0, 0), (sys::TFS_FALLOC_KEEP_SIZE, 0), (0, 5000)] {
        let name = format!("{mode} {size}");
        let made = file(&fs, &name);
        fs.pwrite(made, &vec![7; size], 0, false).expect("write");
        let before = fs.statfs().blocks_free;
        assert_eq!(fs.fallocate(made, mode, 0, LEN), Err(Errno::NOSPC), "{name}");
        let after = fs.statfs().blocks_free;
        // A tree that has grown keeps the node above its first one.
        assert!(
            fs.size(made) == size as u64 && after + u64::from(size > 0) >= before,
            "{name}: {after} of {before}"
        );
    }
    drop(fs);
    assert_clean(&area);
}

#[test]
fn room_beyond_a_members_limit_is_not_taken() {
    let (_host, guest, area) = with_grant(3000, 0);
    let made = file(&guest, "f");
    let before = guest.statfs().blocks_free;
    assert_eq!(guest.fallocate(made, 0, 0, 4000 * BLOCK), Err(Errno::DQUOT));
    assert_eq!((guest.size(made), guest.statfs().blocks_free), (0, before));
    guest.fallocate(made, 0, 0, 2500 * BLOCK).expect("room within it");
    drop(guest);
    drop(_host);
    assert_clean(&area);
}

/// The value of `system.posix_acl_access` with these entries: tag, permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

#[test]
fn a_new_mode_changes_the_acls_mask_and_not_its_group_also_where_all_is_full() {
    const ACCESS: &[u8] = b"system.posix_acl_access";
    const NONE: u32 = !0;
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let (with_mask, without) = (file(&fs, "mask"), file(&fs, "none"));
    let set = |file, mode, entries: &[_]| {
        fs.xattr_set(file, ACCESS, Some(&acl(entries)), 0, Some(mode)).expect("an ACL")
    };
    set(with_mask, 0o774, &[(1, 7, NONE), (2, 6, 2000), (4, 5, NONE), (16, 7, NONE), (32, 4, NONE)]);
    set(without, 0o754, &[(1, 7, NONE), (4, 5, NONE), (32, 4, NONE)]);
    fs.xattr_set(with_mask, b"user.a", Some(b"kept"), 0, None).expect("an attribute");
    let big = file(&fs, "big");
    while fs.pwrite(big, &[1; BLOCK as usize], fs.size(big), false).is_ok() {}
    for mode in [0o1610, 0o4077, 0o612] {
        for file in [with_mask, without] {
            let attr = Attr { mode, ..Attr::default() };
            fs.setattr(file, sys::TFS_SET_MODE, &attr).expect("chmod");
            assert_eq!(fs.getattr(file).expect("attributes").mode & 0o7777, mode);
        }
    }
    assert_eq!(
        fs.xattr_get(with_mask, ACCESS),
        Ok(acl(&[(1, 6, NONE), (2, 6, 2000), (4, 5, NONE), (16, 1, NONE), (32, 2, NONE)]))
    );
    assert_eq!(fs.xattr_get(without, ACCESS), Ok(acl(&[(1, 6, NONE), (4, 1, NONE), (32, 2, NONE)])));
    assert_eq!(fs.xattr_get(with_mask, b"user.a"), Ok(b"kept".to_vec()));
    fs.truncate(big, 0, false).expect("a shorter file");
    drop(fs);
    assert_clean(&area);
}

#[test]
fn attributes_are_replaced_and_removed_where_all_is_full() {
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let kept = file(&fs, "kept");
    for name in [b"user.a".as_slice(), b"user.b"] {
        fs.xattr_set(kept, name, Some(&[1; 100]), 0, None).expect("an attribute");
    }
    let big = file(&fs, "big");
    while fs.pwrite(big, &[1; BLOCK as usize], fs.size(big), false).is_ok() {}
    for i in 0..10u8 {
        fs.xattr_set(kept, b"user.a", Some(&[i; 100]), 0, Some(0o640)).expect("no larger than before");
    }
    assert_eq!(fs.xattr_get(kept, b"user.a"), Ok(vec![9; 100]));
    fs.xattr_set(kept, b"user.a", None, 0, None).expect("removed, though another one stays");
    assert_eq!(fs.xattr_set(kept, b"user.c", Some(&[1; 6000]), 0, None), Err(Errno::NOSPC));
    // What was reserved for removals is there again.
    fs.truncate(big, 5000, false).expect("a shorter file");
    drop(fs);
    assert_clean(&area);
}

fn zone() -> (Area, impl Fn(u32) -> Filesystem) {
    let map = Arc::new(Map::memfd("zone", 34 << 20).expect("memory"));
    let whole = Area::in_map(&map, 2 << 20, 32 << 20, None).expect("an area");
    fs::mkfs(&whole, &Mkfs::default()).expect("mkfs");
    let table = Area::in_map(&map, 4096, 64 * 256, None).expect("a table");
    let open = move |member: u32| {
        assert!(table.store_word(u64::from(member) * 256, 1 << 32 | u64::from(sys::TMB_MEMBER_ACTIVE)));
        let incarnation = Some((4096, Incarnation { member, epoch: 1 }));
        Filesystem::open(Area::in_map(&map, 2 << 20, 32 << 20, incarnation).expect("an area")).expect("open")
    };
    (whole, open)
}

fn two_members() -> (Filesystem, Filesystem) {
    let (_, open) = zone();
    (open(0), open(5))
}

/// Makes files until one gets a freed number.
fn reuse(fs: &Filesystem, ino: u64, name: &str) -> Handle {
    for _ in 0..10_000 {
        let made = file(fs, name);
        if made.ino == ino {
            return made;
        }
        fs.unlink(ROOT, name.as_bytes(), Some(made)).expect("unlink");
    }
    panic!("number {ino} is not given out again");
}

#[test]
fn a_handle_of_a_removed_file_does_not_reach_the_file_that_has_its_number_now() {
    let (a, b) = two_members();
    let old = file(&a, "old");
    a.unlink(ROOT, b"old", Some(old)).expect("unlink");
    let new = reuse(&b, old.ino, "new");
    assert_ne!(old, new);
    assert_eq!(a.lookup(ROOT, b"new").map(|found| found.0), Ok(new));
    b.pwrite(new, b"contents", 0, false).expect("write");
    let before = b.getattr(new).expect("attributes");

    let gone = Err(Errno::STALE);
    let any = Attr { mode: 0o777, uid: 7, gid: 7, ..Attr::default() };
    let lock = FileLock {
        owner: 1,
        start: 0,
        end: !0,
        type_: sys::TFS_LK_WRITE,
        kind: sys::TFS_LK_POSIX,
        pid: 1,
        member: 0,
    };
    assert_eq!(a.truncate(old, 0, false), gone);
    assert_eq!(a.setattr(old, sys::TFS_SET_MODE | sys::TFS_SET_OWNER, &any), gone);
    assert_eq!(a.touch_atime(old, 1), gone);
    assert_eq!(a.xattr_set(old, b"user.a", Some(b"x"), 0, None), gone);
    assert_eq!(a.xattr_list(old).map(|_| ()), gone);
    assert_eq!(a.fallocate(old, 0, 0, 1 << 20), gone);
    assert_eq!(a.pwrite(old, b"other", 0, false).map(|_| ()), gone);
    assert_eq!(a.append(old, b"other", false).map(|_| ()), gone);
    assert_eq!(a.pread(old, &mut [0; 8], 0).map(|_| ()), gone);
    assert_eq!(a.map(old, 0, 1).map(|_| ()), gone);
    assert_eq!(a.seek(old, 0, false).map(|_| ()), gone);
    assert_eq!(a.set_lock(old, &lock), gone);
    assert_eq!(a.get_lock(old, &lock).map(|_| ()), gone);
    assert_eq!(a.getattr(old).map(|_| ()), gone);
    assert_eq!(a.open_ref(old), gone);
    assert_eq!(a.link(ROOT, b"other", old), Err(Errno::NOENT));
    assert_eq!(a.unlink(ROOT, b"new", Some(old)), gone);
    assert_eq!(a.size(old), 0);

    let after = b.getattr(new).expect("attributes");
    assert_eq!((after.mode, after.uid, after.size, after.version), (before.mode, 0, 8, before.version));
    assert_eq!((after.nlink, after.blocks, after.atime), (1, before.blocks, before.atime));
    let mut buf = [0; 8];
    assert_eq!(b.pread(new, &mut buf, 0), Ok(8));
    assert_eq!(&buf, b"contents");
}

#[test]
fn a_handle_of_a_removed_directory_does_not_reach_the_directory_that_has_its_number_now() {
    let (a, b) = two_members();
    let dir = |fs: &Filesystem, name: &[u8]| {
        fs.create(ROOT, Some(name), &Create::mode(libc::S_IFDIR | 0o755)).expect("create")
    };
    let old = dir(&a, b"old");
    a.rmdir(ROOT, b"old", Some(old)).expect("rmdir");
    reuse(&b, old.ino, "x");
    b.unlink(ROOT, b"x", None).expect("unlink");
    let new = (0..10_000).find_map(|i| {
        let name = format!("d{i}");
        Some(dir(&b, name.as_bytes())).filter(|made| made.ino == old.ino)
    });
    let new = new.expect("a directory that has its number");
    b.create(new, Some(b"f"), &Create::mode(REG)).expect("create");
    assert_eq!(a.lookup(old, b"f").map(|_| ()), Err(Errno::STALE));
    assert_eq!(a.list(old).map(|_| ()), Err(Errno::STALE));
    assert_eq!(a.create(old, Some(b"g"), &Create::mode(REG)).map(|_| ()), Err(Errno::NOENT));
    assert_eq!(a.unlink(old, b"f", None), Err(Errno::NOENT));
    assert_eq!(a.rename((old, b"f"), (ROOT, b"f"), 0), Err(Errno::NOENT));
    assert_eq!(a.dir_seq(old) % 2, 1, "what was known of the old one's names holds no more");
    assert_eq!(b.list(new).expect("names").len(), 1);
}

/// Fills it to the last block, and returns the file's length.
fn fill(fs: &Filesystem, name: &str) -> u64 {
    let full = file(fs, name);
    let mut at = 0;
    for len in [65_536, 4096] {
        while let Ok(n) = fs.pwrite(full, &vec![1; len], at, false) {
            at += n as u64;
        }
    }
    assert_eq!(fs.statfs().blocks_free, 0);
    at
}

#[test]
fn a_file_is_cut_within_a_large_run_also_where_all_is_full() {
    let area = area(16);
    let fs = Filesystem::open(area.clone()).expect("open");
    let files: Vec<Handle> = (0..4).map(|i| file(&fs, &format!("large{i}"))).collect();
    for f in &files {
        fs.pwrite(*f, &[b'S'; 2 << 20], 0, false).expect("room");
        assert_eq!(fs.map(*f, 0, 512).map(|run| (run.block % 512, run.count)), Ok((0, 512)));
    }
    fs.pwrite(files[3], &[b'S'; 2 << 20], 2 << 20, false).expect("room");
    let zeros = |f: Handle, at: u64| {
        let mut buf = [1; 64];
        fs.pread(f, &mut buf, at).expect("read");
        buf == [0; 64]
    };
    for (i, f) in files.iter().enumerate() {
        fill(&fs, &format!("full{i}"));
        if i >= 2 {
            let mode = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
            let end = if i == 2 { 3 << 19 } else { 3 << 20 };
            fs.fallocate(*f, mode, 1 << 20, end - (1 << 20)).expect("a hole needs no room");
            assert!(zeros(*f, 1 << 20) && zeros(*f, end - 64));
            assert!(!zeros(*f, (1 << 20) - 64) && !zeros(*f, end));
            continue;
        }
        fs.truncate(*f, 100 * BLOCK, false).expect("cutting needs no room");
        // All but the node that the rest needs, and the reserved block for the next time.
        assert_eq!(fs.getattr(*f).map(|attr| (attr.size, attr.blocks)), Ok((100 * BLOCK, 100 + 2)));
        assert_eq!(fs.statfs().blocks_free, 412 - 1);
        fs.truncate(*f, 2 << 20, false).expect("longer");
        assert!(zeros(*f, 300 * BLOCK), "old bytes show in a file that grew again");
    }
    drop(fs);
    assert_clean(&area);
}

/// Its predecessor's locks would count as its own if both had the same epoch.
#[test]
fn a_process_that_is_alone_follows_one_that_died_in_the_same_second() {
    let area = area(8);
    for _ in 0..2 {
        let alone = area.lone();
        let epoch = alone.incarnation().expect("a member").epoch;
        let fs = Filesystem::open(alone).expect("open");
        let made = fs.lookup(ROOT, b"f").map_or_else(|_| file(&fs, "f"), |found| found.0);
        let word = u64::from(epoch) << 32 | u64::from(sys::TFS_LOCK_HELD) | 1;
        let (sent, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || sent.send(Box::new((fs.pwrite(made, b"x", 0, false), fs))));
        let received = done.recv_timeout(std::time::Duration::from_secs(60));
        let (written, fs) = *received.expect("its lock is taken over");
        assert_eq!(written, Ok(1));
        assert!(area.store_word(inode_field(&area, made.ino, offset_of!(sys::tfs_inode, lock)), word));
        fs.abandon();
    }
}

#[test]
fn a_late_close_leaves_the_open_file_that_has_its_number_now() {
    let (a, b) = two_members();
    let old = file(&a, "old");
    a.unlink(ROOT, b"old", Some(old)).expect("unlink");
    let new = reuse(&a, old.ino, "new");
    a.open_ref(new).expect("open");
    b.unlink(ROOT, b"new", Some(new)).expect("unlink");
    a.close_ref(old).expect("close of what is gone");
    assert_eq!(a.getattr(new).map(|attr| attr.nlink), Ok(0));
    a.close_ref(new).expect("close");
    assert_eq!(a.getattr(new).map(|_| ()), Err(Errno::STALE));
}

#[test]
fn a_rename_does_not_replace_or_move_what_it_does_not_expect() {
    let (a, b) = two_members();
    let (mine, theirs) = (file(&a, "mine"), file(&b, "theirs"));
    let root = Handle::from(ROOT);
    let names = ((root, &b"mine"[..]), (root, &b"theirs"[..]));
    let rename = |expect, flags| a.rename_expecting(names.0, names.1, expect, flags);
    for flags in [0, sys::TFS_RENAME_EXCHANGE] {
        assert_eq!(rename([Expect::This(mine), Expect::Nothing], flags), Err(Errno::STALE));
        assert_eq!(rename([Expect::This(mine), Expect::This(mine)], flags), Err(Errno::STALE));
        assert_eq!(rename([Expect::This(theirs), Expect::This(theirs)], flags), Err(Errno::STALE));
    }
    let other = Handle { generation: theirs.generation + 1, ..theirs };
    assert_eq!(rename([Expect::Any, Expect::This(other)], 0), Err(Errno::STALE));
    assert_eq!(rename([Expect::Any, Expect::Nothing], sys::TFS_RENAME_NOREPLACE), Err(Errno::EXIST));
    assert_eq!(b.lookup(ROOT, b"theirs").map(|found| found.0), Ok(theirs));
    assert_eq!(rename([Expect::This(mine), Expect::This(theirs)], 0), Ok(()));
    assert_eq!(b.lookup(ROOT, b"theirs").map(|found| found.0), Ok(mine));
    assert_eq!(
        a.rename_expecting((root, b"theirs"), (root, b"free"), [Expect::This(mine), Expect::Nothing], 0),
        Ok(())
    );
}

#[test]
fn a_file_that_another_member_unlinked_stays_readable_until_closed() {
    let (a, b) = two_members();
    let ino = file(&a, "f");
    a.pwrite(ino, b"contents", 0, false).expect("write");
    b.open_ref(ino).expect("open");
    let free = a.statfs().blocks_free;
    a.unlink(ROOT, b"f", None).expect("unlink");
    assert_eq!(a.lookup(ROOT, b"f"), Err(Errno::NOENT));
    let mut buf = [0; 8];
    assert_eq!(b.pread(ino, &mut buf, 0), Ok(8));
    assert_eq!(&buf, b"contents");
    b.pwrite(ino, b"more", 8, false).expect("write after unlink");
    assert_eq!(b.getattr(ino).expect("attributes").nlink, 0);
    b.close_ref(ino).expect("close");
    assert_eq!(b.getattr(ino).map(|_| ()), Err(Errno::STALE));
    assert!(a.statfs().blocks_free > free);
}

#[test]
fn writes_truncation_and_chown_bits_follow_posix() {
    let fs = Filesystem::open(area(8)).expect("open");
    let mode = libc::S_IFREG | 0o6755;
    let ino = fs.create(ROOT, Some(b"suid"), &Create::mode(mode)).expect("create");
    fs.pwrite(ino, b"x", 0, false).expect("write by root");
    assert_eq!(fs.getattr(ino).expect("attributes").mode, mode);
    fs.pwrite(ino, b"x", 0, true).expect("write by another");
    assert_eq!(fs.getattr(ino).expect("attributes").mode, libc::S_IFREG | 0o755);
    let locking = fs.create(ROOT, Some(b"locking"), &Create::mode(libc::S_IFREG | 0o2644)).expect("create");
    fs.truncate(locking, 0, true).expect("truncate");
    assert_eq!(fs.getattr(locking).expect("attributes").mode, libc::S_IFREG | 0o2644);
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
    assert_eq!(fs.getattr(ino).expect("attributes").blocks, 512 - 5 + nodes);
    fs.truncate(ino, 0, false).expect("truncate");
    assert_eq!(fs.getattr(ino).expect("attributes").blocks, 0);
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

/// One memory with two handles: one that may write, and one whose mapping is read-only.
fn writer_and_reader() -> (Filesystem, Filesystem) {
    let map = Map::memfd("ro", 8 << 20).expect("memory");
    let read_only = Map::new(map.file(), 8 << 20, false).expect("a second mapping");
    let area = Area::whole(map).expect("an area");
    fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
    let fs = Filesystem::open(area).expect("open");
    let reader = Filesystem::open(Area::whole(read_only).expect("an area")).expect("open read-only");
    (fs, reader)
}

#[test]
fn a_read_only_handle_reads_and_refuses_to_write() {
    let (fs, reader) = writer_and_reader();
    let ino = file(&fs, "f");
    fs.pwrite(ino, b"data", 0, false).expect("write");
    let mut buf = [0; 4];
    assert_eq!(reader.lookup(ROOT, b"f").expect("lookup").0, ino);
    assert_eq!(reader.pread(ino, &mut buf, 0), Ok(4));
    assert_eq!(reader.pwrite(ino, b"x", 0, false), Err(Errno::ROFS));
    assert_eq!(reader.unlink(ROOT, b"f", None), Err(Errno::ROFS));
    let report = fsck::check(reader.area(), Options::default(), &mut |_, _, _| {}).expect("a file system");
    assert!(report.is_clean());
}

#[test]
fn a_read_only_member_that_leaves_no_pin_never_reads_another_files_blocks() {
    let (fs, reader) = writer_and_reader();
    let ino = file(&fs, "f");
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let other = file(&fs, "other");
            for _ in 0..1000 {
                fs.pwrite(ino, &[b'f'; 1 << 20], 0, false).expect("write");
                fs.truncate(ino, 0, false).expect("truncate");
                fs.pwrite(other, &[b'o'; 1 << 20], 0, false).expect("write");
                fs.truncate(other, 0, false).expect("truncate");
            }
        });
        let mut buf = vec![0; 1 << 20];
        while !writing.is_finished() {
            let got = match reader.pread(ino, &mut buf, 0) {
                Ok(got) => got,
                Err(Errno::BUSY) => 0,
                Err(e) => panic!("{e}"),
            };
            let wrong = buf[..got].iter().position(|c| *c != b'f' && *c != 0);
            assert_eq!(wrong, None, "a byte of another file");
        }
    });
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

fn named(ino: u64, name: &str, mask: u32) -> Change {
    Change::new(ino, Some((ROOT, name.as_bytes().to_vec())), mask)
}

#[test]
fn changes_are_heard_whole_and_in_order_while_somebody_listens() {
    let (a, b) = two_members();
    assert!(!a.change_wanted(), "no member listens yet");
    let mut listener = b.listen().expect("listen");
    assert!(a.change_wanted());
    assert!(!b.change_wanted(), "its own changes are no news to it");
    let longest = "x".repeat(255);
    // More than a ring holds, heard in between: records wrap.
    for i in 0..1000 {
        let mut told =
            [named(i, &longest[..i as usize % 256], libc::IN_MOVED_FROM), named(i, "to", libc::IN_MOVED_TO)];
        a.tell(&mut told);
        a.tell(&mut [Change::new(i + 1, None, libc::IN_ATTRIB)]);
        for expected in told.into_iter().filter(|c| c.ino != 0) {
            assert_ne!(expected.cookie, 0);
            assert_eq!(listener.next_change(), Ok(Some(expected)));
        }
        assert_eq!(listener.next_change(), Ok(Some(Change::new(i + 1, None, libc::IN_ATTRIB))));
        assert_eq!(listener.next_change(), Ok(None));
    }
    drop(listener);
    assert!(!a.change_wanted());
}

#[test]
fn a_repeated_change_counts_as_told_only_until_somebody_has_heard_it() {
    let (a, b) = two_members();
    let mut listener = b.listen().expect("listen");
    let end = a.tell(&mut [Change::new(7, None, libc::IN_MODIFY)]);
    assert!(a.change_unheard(end));
    assert!(listener.next_change().expect("a change").is_some());
    assert!(!a.change_unheard(end), "what is done now must be told again");
    let end = a.tell(&mut [Change::new(7, None, libc::IN_MODIFY)]);
    drop(listener);
    let _late = b.listen().expect("listen");
    assert!(!a.change_unheard(end), "who listens from now on never hears the record");
}

#[test]
fn who_falls_behind_by_a_ring_knows_it_and_hears_what_follows() {
    let (a, b) = two_members();
    let mut listener = b.listen().expect("listen");
    for i in 1..10_000 {
        a.tell(&mut [named(i, "name", libc::IN_CREATE)]);
    }
    assert_eq!(listener.next_change(), Err(Errno::OVERFLOW));
    assert_eq!(listener.next_change(), Ok(None));
    a.tell(&mut [named(5, "after", libc::IN_CREATE)]);
    assert_eq!(listener.next_change(), Ok(Some(named(5, "after", libc::IN_CREATE))));
}

#[test]
fn a_record_that_the_next_one_may_be_overwriting_counts_as_lost() {
    // The record's own bytes, and its name's.
    const RECORD: u32 = 64;
    // The writer may be one record further than its head says, and have skipped the ring's end for it.
    let sure = (sys::TFS_CHANGE_RING - 2 * 288) / RECORD;
    for (told, heard) in [(sure, true), (sure + 1, false), (sys::TFS_CHANGE_RING / RECORD, false)] {
        let (a, b) = two_members();
        let mut listener = b.listen().expect("listen");
        for i in 1..=u64::from(told) {
            a.tell(&mut [named(i, "name", libc::IN_CREATE)]);
        }
        let first = if heard { Ok(Some(named(1, "name", libc::IN_CREATE))) } else { Err(Errno::OVERFLOW) };
        assert_eq!(listener.next_change(), first, "{told} records");
    }
}

#[test]
fn garbage_in_a_ring_is_passed_in_a_bounded_number_of_steps() {
    let (a, b) = two_members();
    let mut listener = b.listen().expect("listen");
    let mut seed = 1u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let ring = 4096 + std::mem::offset_of!(sys::tfs_member_area, changes) as u64;
    let head = 4096 + std::mem::offset_of!(sys::tfs_member_area, change_head) as u64;
    for _ in 0..300 {
        for word in 0..u64::from(sys::TFS_CHANGE_RING) / 8 {
            assert!(a.area().store_word(ring + 8 * word, random() >> (random() % 64)));
        }
        let at = a.area().word(head).expect("a head");
        assert!(a.area().store_word(head, if random() % 2 == 0 { random() } else { at + random() % 20_000 }));
        let mut steps = 0;
        while !matches!(listener.next_change(), Ok(None)) {
            steps += 1;
            assert!(steps < 10_000, "no end");
        }
    }
}

#[test]
fn while_frozen_others_stand_still_and_the_freezers_end_thaws() {
    let (a, b) = two_members();
    let ino = file(&a, "f");
    a.freeze().expect("freeze");
    assert_eq!(b.freeze(), Err(Errno::BUSY), "one at a time");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| b.pwrite(ino, b"late", 0, false));
        let maker = scope.spawn(|| b.create(ROOT, Some(b"g"), &Create::mode(REG)));
        let mut buf = [0; 4];
        for _ in 0..50 {
            assert_eq!(a.pread(ino, &mut buf, 0), Ok(0));
            assert_eq!(a.lookup(ROOT, b"g"), Err(Errno::NOENT));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        a.pwrite(ino, b"mine", 0, false).expect("who froze may write");
        a.thaw().expect("frozen all the time");
        assert_eq!(writer.join().expect("the writer"), Ok(4));
        maker.join().expect("the maker").expect("create");
    });
    a.freeze().expect("freeze");
    let members = a.area().members();
    a.abandon();
    // SAFETY: member 0's word of the table, which lives as long as b's area.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr((&raw mut (*members).state_epoch).cast()) };
    word.store(2 << 32 | u64::from(sys::TMB_MEMBER_DEAD), std::sync::atomic::Ordering::Release);
    b.pwrite(ino, b"free", 0, false).expect("a dead member holds up no other");
}

#[test]
fn a_snapshot_of_a_busy_file_system_is_clean_and_each_file_in_it_is_whole() {
    let (a, b) = two_members();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let dir = tempfile::tempdir().expect("a directory");
    std::thread::scope(|scope| {
        for (fs, name) in [(&b, "x"), (&b, "y")] {
            let stop = &stop;
            scope.spawn(move || {
                let ino = file(fs, name);
                // Each write is one letter from end to end, and a rename follows it.
                for round in 0u32.. {
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        break;
                    }
                    fs.pwrite(ino, &[b'a' + (round % 26) as u8; 100_000], 0, false).expect("write");
                    let (from, to) = if round % 2 == 0 { ("", "2") } else { ("2", "") };
                    let (from, to) = (format!("{name}{from}"), format!("{name}{to}"));
                    fs.rename((ROOT, from.as_bytes()), (ROOT, to.as_bytes()), 0).expect("rename");
                }
            });
        }
        for i in 0..10 {
            let path = dir.path().join(format!("image{i}"));
            let image =
                std::fs::File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
            snapshot::take(&a, &image, &mut |_, _, _| {}).expect("a snapshot, checked");
            let len = image.metadata().expect("metadata").len();
            let fs = Filesystem::open(Area::whole(Map::new(&image, len, true).expect("map")).expect("area"))
                .expect("open");
            for name in ["x", "y"] {
                let found = [name.to_owned(), format!("{name}2")].map(|n| fs.lookup(ROOT, n.as_bytes()).ok());
                let there: Vec<_> = found.iter().flatten().collect();
                assert!(there.len() <= 1, "{name} is there under both names");
                for (ino, _) in there {
                    let mut buf = vec![0; 100_000];
                    let got = fs.pread(*ino, &mut buf, 0).expect("read");
                    assert!(buf[..got].iter().all(|c| *c == buf[0]), "half a write in {name}");
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// As a process that is killed, or a host that fails, leaves it after each piece.
#[test]
fn an_image_that_is_not_whole_yet_is_no_file_system() {
    let a = Filesystem::open(area(16)).expect("open");
    a.pwrite(file(&a, "f"), &[7; 5 << 20], 0, false).expect("write");
    let image = tempfile::tempfile().expect("a file");
    let (to, mut pieces) = (area(16), 0);
    snapshot::take(&a, &image, &mut |stage, _, _| {
        if stage == "copying" {
            let part = Area::whole(Map::new(&image, 16 << 20, true).expect("map")).expect("area");
            let said =
                snapshot::restore(&part, &to, || Ok(()), &mut |_, _, _| {}).expect_err("half an image");
            assert!(said.to_string().contains("no file system"), "{said}");
            pieces += 1;
        }
    })
    .expect("a snapshot");
    assert!(pieces > 4, "{pieces} pieces");
}

/// A host that fails during the copy leaves the old magic on the disk otherwise, with contents that are partly the new ones.
#[test]
fn a_restore_and_a_mkfs_write_nothing_before_it_is_on_the_disk_that_there_is_no_file_system() {
    let a = Filesystem::open(area(16)).expect("open");
    a.pwrite(file(&a, "f"), &[7; 5 << 20], 0, false).expect("write");
    let image = tempfile::tempfile().expect("a file");
    snapshot::take(&a, &image, &mut |_, _, _| {}).expect("a snapshot");
    let image = Area::whole(Map::new(&image, 16 << 20, false).expect("map")).expect("area");
    let zone =
        Arc::new(tombolo_zone::Zone::create(&tombolo_zone::ZoneConfig::new("z", 32 << 20)).expect("a zone"));
    let place = zone.area(tombolo_zone::AreaType::Files, None).expect("an area");
    // Nothing is written back by it.
    let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
    let to = Area::of_zone(&zone, &place, None, Some(pipe)).expect("an area");
    fs::mkfs(&to, &Mkfs::default()).expect("mkfs");
    let contents = |area: &Area| {
        let mut all = vec![0; area.size() as usize];
        assert!(area.copy_out(0, &mut all));
        all
    };
    let before = contents(&to);
    let said =
        snapshot::restore(&image, &to, || Ok(()), &mut |_, _, _| {}).expect_err("not synced").to_string();
    assert!(said.contains("syncing the zone"), "{said}");
    assert!(contents(&to) == before, "it has been overwritten in part");
    let said = snapshot::make(&to, &Mkfs::default(), || Ok(())).expect_err("not synced").to_string();
    assert!(said.contains("syncing the zone"), "{said}");
    assert!(contents(&to) == before, "it has been overwritten in part");
}

/// As where a disk is full behind a hole, or a file is truncated: what is stored then is in this process's memory only.
#[test]
fn of_a_file_whose_pages_go_missing_meanwhile_nothing_is_said_to_be_good_or_made() {
    let file = tempfile::tempfile().expect("a file");
    let mapped = || {
        file.set_len(16 << 20).expect("a size");
        Area::whole(Map::new(&file, 16 << 20, true).expect("map")).expect("an area")
    };
    let cut = || file.set_len(1 << 16);
    for repair in [false, true] {
        let area = mapped();
        fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
        assert_clean(&area);
        cut().expect("a size");
        let options = Options { repair, live: false };
        let said = fsck::check(&area, options, &mut |_, _, _| {}).expect_err("pages are missing").0;
        assert!(said.contains("cut short"), "{said}");
    }
    let made = snapshot::make(&mapped(), &Mkfs::default(), || Ok(cut()?));
    let said = made.expect_err("pages are missing").to_string();
    assert!(said.contains("cut short"), "{said}");
}

#[test]
fn members_go_on_though_nothing_can_be_written_of_an_image() {
    let (a, b) = two_members();
    let ino = file(&b, "f");
    let image = tempfile::tempfile().expect("a file");
    let mut begun = None;
    let taken = snapshot::take_within(&a, &image, std::time::Duration::from_millis(200), &mut |_, _, _| {
        // As a write that waits for this very file system.
        if begun.is_none() {
            b.pwrite(ino, b"on", 0, false).expect("a write");
            begun = Some(());
        }
    });
    let said = taken.expect_err("no image").to_string();
    assert!(said.contains("nothing of the image was written for 0.2 s"), "{said}");
    a.freeze().expect("nobody else has frozen it");
    let image = tempfile::tempfile().expect("a file");
    let said = snapshot::take(&b, &image, &mut |_, _, _| {}).expect_err("frozen").to_string();
    assert!(said.contains("another snapshot is being taken"), "{said}");
    a.thaw().expect("frozen all the time");
}

#[test]
fn an_image_goes_back_into_another_area_and_a_damaged_one_is_refused() {
    let a = Filesystem::open(area(16)).expect("open");
    let ino = file(&a, "kept");
    a.pwrite(ino, b"contents", 0, false).expect("write");
    let image = tempfile::tempfile().expect("a file");
    snapshot::take(&a, &image, &mut |_, _, _| {}).expect("a snapshot");
    let image = Area::whole(Map::new(&image, 16 << 20, true).expect("map")).expect("area");

    let small = area(8);
    let said =
        snapshot::restore(&image, &small, || Ok(()), &mut |_, _, _| {}).expect_err("too small").to_string();
    assert!(said.contains("16 MiB"), "{said}");
    let larger = area(32);
    snapshot::restore(&image, &larger, || Ok(()), &mut |_, _, _| {}).expect("restore");
    assert_clean(&larger);
    let b = Filesystem::open(larger.clone()).expect("open");
    let mut buf = [0; 8];
    let (ino, _) = b.lookup(ROOT, b"kept").expect("lookup");
    assert_eq!((b.pread(ino, &mut buf, 0), &buf), (Ok(8), b"contents"));
    drop(b);

    let root = image.word(std::mem::offset_of!(sys::tfs_super, itable_root) as u64).expect("a root word");
    let node = (root & ((1 << 48) - 1)) * BLOCK;
    assert!(image.store_word(node, !0));
    let before = larger.block(0);
    let said =
        snapshot::restore(&image, &larger, || Ok(()), &mut |_, _, _| {}).expect_err("damaged").to_string();
    assert!(said.contains("damaged"), "{said}");
    assert_eq!(larger.block(0), before);
}

/// Two members, of whom the second has a grant.
fn with_grant(blocks: u64, inodes: u64) -> (Filesystem, Filesystem, Area) {
    let (area, open) = zone();
    let host = open(0);
    host.grant(5, "tenant", blocks, inodes, None).expect("grant");
    let tenant = open(5);
    (host, tenant, area)
}

#[test]
fn what_a_member_makes_counts_for_its_account_whoever_fills_and_removes_it() {
    let (host, tenant, area) = with_grant(100, 4);
    let limited = tenant.statfs();
    assert_eq!((limited.blocks, limited.inodes), (100, 4));
    let ino = file(&tenant, "mine");
    assert_eq!(host.pwrite(ino, &[1; 50 * 4096], 0, false), Ok(50 * 4096));
    let used = account::list(&host).remove(0);
    assert_eq!((used.name.as_str(), used.inodes, used.bytes_limit), ("tenant", 1, 100 * 4096));
    assert!((50 * 4096..60 * 4096).contains(&used.bytes), "{used:?}");

    // Neither its own writes nor another member's take it beyond its limit; the host's files have none.
    let wrote = tenant.pwrite(ino, &[2; 100 * 4096], 50 * 4096, false).expect("as far as it goes");
    assert!((40 * 4096..=50 * 4096).contains(&wrote), "{wrote}");
    assert_eq!(tenant.pwrite(ino, &[2; 4096], 1 << 20, false), Err(Errno::DQUOT));
    assert_eq!(host.pwrite(ino, &[2; 4096], 1 << 20, false), Err(Errno::DQUOT));
    let free = file(&host, "free");
    assert_eq!(tenant.pwrite(free, &[3; 200 * 4096], 0, false), Ok(200 * 4096));

    host.unlink(ROOT, b"mine", None).expect("unlink");
    let used = account::list(&host).remove(0);
    assert_eq!((used.bytes, used.inodes), (0, 0), "what goes is given back");
    for i in 0..4 {
        file(&tenant, &format!("{i}"));
    }
    let fifth = tenant.create(ROOT, Some(b"fifth"), &Create::mode(REG));
    assert_eq!(fifth, Err(Errno::DQUOT));
    host.grant(5, "tenant", 100, 5, None).expect("grant more");
    file(&tenant, "fifth");
    drop((host, tenant));
    assert_clean(&area);
}

/// A program that creates a file or else opens it would otherwise be told that there is no room, since another one was faster.
#[test]
fn a_name_that_exists_does_so_without_room_and_at_a_limit() {
    let makes = |fs: &Filesystem, kind: u32| {
        fs.create(ROOT, Some(b"there"), &Create::mode(kind | 0o755)).expect_err("exists")
    };
    let (host, tenant, _area) = with_grant(100, 1);
    let there = file(&tenant, "there");
    assert_eq!(tenant.create(ROOT, Some(b"new"), &Create::mode(REG)), Err(Errno::DQUOT));
    for kind in [libc::S_IFREG, libc::S_IFDIR, libc::S_IFIFO] {
        assert_eq!(makes(&tenant, kind), Errno::EXIST, "{kind:o}");
    }
    let target = vec![b't'; 3000];
    let link = Create { target: Some(&target), ..Create::mode(libc::S_IFLNK | 0o777) };
    assert_eq!(tenant.create(ROOT, Some(b"there"), &link), Err(Errno::EXIST));
    assert_eq!(tenant.link(ROOT, b"there", there), Err(Errno::EXIST));

    let others = (0..1_000_000)
        .find(|n| host.create(ROOT, Some(format!("{n}").as_bytes()), &Create::mode(REG)).is_err());
    assert!(others.is_some(), "a zone takes no end of files");
    assert_eq!(makes(&host, libc::S_IFREG), Errno::EXIST);
    assert_eq!(host.create(ROOT, Some(b"new"), &link), Err(Errno::NOSPC));
}

#[test]
fn attributes_indexes_and_tables_of_locks_count_for_an_account_as_data_does() {
    let (host, tenant, area) = with_grant(100, 2000);
    let used = || account::list(&host).remove(0).bytes / 4096;
    let f = file(&tenant, "f");
    assert_eq!(used(), 0);
    tenant.xattr_set(f, b"user.a", Some(&[1; 9000]), 0, None).expect("attribute");
    assert_eq!(used(), 4, "three blocks and a node");
    tenant.xattr_set(f, b"user.a", Some(&[1; 100]), 0, None).expect("attribute");
    assert_eq!(used(), 1);
    let lock = |n: u64| FileLock {
        owner: n,
        start: n,
        end: n,
        type_: sys::TFS_LK_READ,
        kind: sys::TFS_LK_POSIX,
        pid: 1,
        member: 0,
    };
    let taken = (0..).find(|n| tenant.set_lock(f, &lock(*n)) == Err(Errno::NOLCK)).expect("a limit");
    assert_eq!(used(), 100);
    assert_eq!(taken, 98 * 64 - 1, "all but the attribute's block and the table's node hold locks");
    assert_eq!(tenant.xattr_set(f, b"user.a", Some(&[1; 9000]), 0, None), Err(Errno::DQUOT));
    assert_eq!(tenant.pwrite(f, b"x", 0, false), Err(Errno::DQUOT));
    tenant.xattr_set(f, b"user.a", None, 0, None).expect("what is removed needs no room");
    tenant.unlink(ROOT, b"f", None).expect("unlink");
    assert_eq!(used(), 0);

    let dir = tenant.create(ROOT, Some(b"dir"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
    for i in 0..1000 {
        tenant.create(dir, Some(format!("name-{i}").as_bytes()), &Create::mode(REG)).expect("create");
    }
    let blocks = tenant.getattr(dir).expect("attributes").blocks;
    assert_eq!(used(), blocks);
    assert!(blocks >= 1000 / 64 + 1 + 5, "names, and an index of 2048 places: {blocks}");
    drop((host, tenant));
    assert_clean(&area);
    let report = fsck::check(&area, Options::default(), &mut |_, _, _| {}).expect("a file system");
    let counts = |p: &&fsck::Problem| p.code == "blocks" || p.code == "account-count";
    assert_eq!(report.problems.iter().filter(counts).count(), 0, "{:?}", report.problems);
}

/// Counts the blocks with a member's tag that nothing refers to.
fn tagged(area: &Area) -> usize {
    let word = |field: usize| area.word(field as u64).expect("in the super block");
    let (map, blocks) = (
        word(core::mem::offset_of!(sys::tfs_super, map_start)),
        word(core::mem::offset_of!(sys::tfs_super, blocks)),
    );
    let mut bytes = vec![0; blocks as usize];
    assert!(area.copy_out(map * BLOCK, &mut bytes));
    bytes.iter().filter(|b| (1..=64).contains(*b)).count()
}

#[test]
fn a_new_inode_whose_attributes_are_too_large_together_finds_no_room() {
    let fs = Filesystem::open(area(8)).expect("open");
    let largest = vec![b'v'; sys::TFS_XATTR_MAX as usize];
    let made = |names: &[&str]| {
        let attributes: Vec<_> = names.iter().map(|name| (name.as_bytes(), &largest[..])).collect();
        let xattrs = fs::xattr_image(&attributes);
        fs.create(ROOT, Some(b"file"), &Create { xattrs: &xattrs, ..Create::mode(REG) })
    };
    assert_eq!(made(&["user.one", "user.two"]), Err(Errno::NOSPC));
    made(&["user.one"]).expect("one of them alone");
}

#[test]
fn empty_files_leave_three_quarters_of_a_zone_to_data_and_every_inode_that_df_shows_can_be_used() {
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let dir = fs.create(ROOT, Some(b"dir"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
    let all = fs.statfs().inodes_free;
    let mut made = 0;
    let error = loop {
        match fs.create(dir, Some(format!("f{made}").as_bytes()), &Create::mode(REG)) {
            Ok(_) => made += 1,
            Err(e) => break e,
        }
    };
    assert_eq!((error, made, fs.statfs().inodes_free), (Errno::NOSPC, all, 0));
    // One free record among all is found, wherever it is.
    for i in [0, all / 2, all - 1] {
        fs.unlink(dir, format!("f{i}").as_bytes(), None).expect("unlink");
        assert_eq!(fs.statfs().inodes_free, 1);
        fs.create(dir, Some(format!("f{i}").as_bytes()), &Create::mode(REG)).expect("its record");
    }
    for i in 0..made {
        fs.unlink(dir, format!("f{i}").as_bytes(), None).expect("unlink");
    }
    fs.rmdir(ROOT, b"dir", None).expect("rmdir");
    let data = fill(&fs, "data");
    let blocks = fs.statfs().blocks;
    assert!(data / BLOCK > blocks * 7 / 10, "{data} bytes of {blocks} blocks");
    drop(fs);
    assert_clean(&area);
}

#[test]
fn names_find_room_in_a_full_zone_as_long_as_their_directory_has_some() {
    let area = area(8);
    let fs = Filesystem::open(area.clone()).expect("open");
    let dir = fs.create(ROOT, Some(b"dir"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
    let first = fs.create(dir, Some(b"first"), &Create::mode(REG)).expect("create");
    // The next name but one asks for a larger index.
    for i in 1..383 {
        fs.link(dir, format!("n{i}").as_bytes(), first).expect("link");
    }
    fill(&fs, "full");
    let before = fs.statfs().blocks_free;
    for i in 0..10_000 {
        let (from, to) = (format!("n{}", 1 + i % 382), format!("moved{i}"));
        fs.rename((dir, from.as_bytes()), (dir, to.as_bytes()), 0)
            .expect("a rename in a directory with room");
        fs.rename((dir, to.as_bytes()), (dir, from.as_bytes()), 0).expect("and back");
    }
    let failed = (0..100_000).find_map(|i| fs.link(dir, format!("more-{i}").as_bytes(), first).err());
    assert_eq!(failed, Some(Errno::NOSPC));
    assert_eq!((fs.statfs().blocks_free, tagged(&area)), (before, 0), "what failed leaves no block behind");
    // Without room for another entry, every name can become another one of the same length, or shorter, in as many granules.
    let names: Vec<Vec<u8>> = fs.list(dir).expect("names").into_iter().map(|entry| entry.name).collect();
    for (i, name) in names.iter().enumerate() {
        let to = format!("renamed-to-{i:036}");
        fs.rename((dir, name), (dir, to.as_bytes()), 0).expect("a rename in a full directory");
        assert_eq!(fs.lookup(dir, name).map(|_| ()), Err(Errno::NOENT));
        assert_eq!(fs.lookup(dir, to.as_bytes()).map(|found| found.0), Ok(first));
    }
    assert_eq!(fs.list(dir).expect("names").len(), names.len());
    for entry in fs.list(dir).expect("names") {
        assert_eq!(fs.lookup(dir, &entry.name).map(|found| found.0), Ok(first));
    }
    drop(fs);
    assert_clean(&area);
}

#[test]
fn a_rename_in_a_full_directory_to_a_name_that_is_too_long_for_a_transaction_changes_nothing() {
    // Bytes of the longest name that a transaction can replace in its place: its words (tfs_tx_word) also hold the entry's head.
    const LONGEST: usize = 184;
    for (len, done) in [(LONGEST, Ok(())), (LONGEST + 1, Err(Errno::NOSPC)), (255, Err(Errno::NOSPC))] {
        let area = area(8);
        let fs = Filesystem::open(area.clone()).expect("open");
        let dir = fs.create(ROOT, Some(b"dir"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
        let name = |i: usize| format!("{i:0len$}").into_bytes();
        let first = fs.create(dir, Some(&name(0)), &Create::mode(REG)).expect("create");
        fill(&fs, "full");
        let failed = (1..100).find_map(|i| fs.link(dir, &name(i), first).err());
        assert_eq!(failed, Some(Errno::NOSPC), "the directory is full");
        let names = fs.list(dir).expect("names").len();
        assert_eq!(fs.rename((dir, &name(0)), (dir, &name(100)), 0), done, "{len} bytes");
        assert_eq!(fs.lookup(dir, &name(0)).is_ok(), done.is_err());
        assert_eq!(fs.lookup(dir, &name(100)).is_ok(), done.is_ok());
        assert_eq!((fs.list(dir).expect("names").len(), tagged(&area)), (names, 0));
        drop(fs);
        assert_clean(&area);
    }
}

#[test]
fn a_grant_to_a_member_that_is_there_holds_at_once_for_what_it_makes() {
    let (area, open) = zone();
    let (host, tenant) = (open(0), open(5));
    let before = file(&tenant, "before");
    host.grant(5, "tenant", 100, 2, None).expect("grant");
    let wrote = tenant.pwrite(file(&tenant, "after"), &[1; 200 * 4096], 0, false).expect("as far as it goes");
    assert!(wrote <= 100 * 4096, "{wrote}");
    assert_eq!(tenant.create(ROOT, Some(b"more"), &Create::mode(REG)), Err(Errno::DQUOT));
    assert_eq!(tenant.statfs().blocks, 100);
    assert_eq!(tenant.pwrite(before, &[1; 200 * 4096], 0, false), Ok(200 * 4096), "made before the grant");
    host.grant(5, "tenant", 0, 0, None).expect("grant without limits");
    file(&tenant, "free");
    drop((host, tenant));
    assert_clean(&area);
}

#[test]
fn a_member_is_confined_to_no_other_directory_that_has_its_directorys_number() {
    let (area, open) = zone();
    let host = open(0);
    let mkdir = |name: &str| {
        host.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir")
    };
    let granted = mkdir("tenant");
    host.grant(5, "tenant", 0, 0, Some(granted)).expect("grant");
    let tenant = open(5);
    assert_eq!(tenant.root(), granted);
    assert!(tenant.getattr(tenant.root()).is_ok());
    drop(tenant);
    host.rmdir(ROOT, b"tenant", None).expect("rmdir");
    drop(host);
    // The first that a member makes after it has opened the file system.
    let host = open(0);
    let other = host.create(ROOT, Some(b"other"), &Create::mode(libc::S_IFDIR | 0o700)).expect("mkdir");
    assert_eq!(other.ino, granted.ino);
    let tenant = open(5);
    assert_eq!(tenant.getattr(tenant.root()).err(), Some(Errno::STALE));
    drop((host, tenant));
    assert_clean(&area);
}

#[test]
fn fsck_counts_accounts_anew() {
    let (host, tenant, area) = with_grant(100, 4);
    tenant.pwrite(file(&tenant, "f"), &[1; 4096], 0, false).expect("write");
    let right = account::list(&host).remove(0);
    drop((host, tenant));
    let at = 4096 + std::mem::offset_of!(sys::tfs_member_area, own) as u64;
    assert!(area.store_word(at + std::mem::offset_of!(sys::tfs_account, blocks) as u64, 77));
    assert!(area.store_word(at + std::mem::offset_of!(sys::tfs_account, inodes) as u64, u64::MAX));
    fsck::check(&area, Options { repair: true, live: false }, &mut |_, _, _| {}).expect("fsck");
    let fs = Filesystem::open(area.clone()).expect("open");
    assert_eq!(account::list(&fs), [right]);
}

/// Returns the offset of an inode's field; the first blocks of a new file system's data are the inode table's.
fn inode_field(area: &Area, ino: u64, field: usize) -> u64 {
    let data_start = area.word(core::mem::offset_of!(sys::tfs_super, data_start) as u64).expect("a word");
    data_start * BLOCK + ino * size_of::<sys::tfs_inode>() as u64 + field as u64
}

/// Member 5 declares that it maps a file, and does not unmap it when member 0 truncates it. Returns the free blocks before and after.
fn truncate_what_another_maps(a: &Filesystem) -> (u64, u64) {
    let ino = file(a, "mapped");
    let before = a.statfs().blocks_free;
    a.pwrite(ino, &[7; 100_000], 0, false).expect("write");
    let mappers = inode_field(a.area(), ino.ino, core::mem::offset_of!(sys::tfs_inode, mappers));
    assert!(a.area().store_word(mappers, 1 << 5));
    a.truncate(ino, 0, false).expect("truncate");
    let after = a.statfs().blocks_free;
    assert!(after < before, "blocks that member 5 maps became free");
    assert_eq!(a.deferred(), (before - after, vec![5]));
    (before, after)
}

/// Its bit is never seen clear: it maps the rest as soon as it has revoked its mappings.
#[test]
fn a_member_that_maps_a_file_again_at_once_does_not_keep_what_was_cut_off() {
    let (mut a, _b) = two_members();
    let ino = file(&a, "mapped");
    let before = a.statfs().blocks_free;
    a.pwrite(ino, &[7; 100_000], 0, false).expect("write");
    let mappers = inode_field(a.area(), ino.ino, core::mem::offset_of!(sys::tfs_inode, mappers));
    assert!(a.area().store_word(mappers, 1 << 5));
    let area = a.area().clone();
    a.ring_by(Some(Box::new(move |member| {
        assert_eq!(member, 5);
        let own = BLOCK + 5 * size_of::<sys::tfs_member_area>() as u64;
        for counter in [
            core::mem::offset_of!(sys::tfs_member_area, revokes_begun),
            core::mem::offset_of!(sys::tfs_member_area, revokes_done),
        ] {
            let at = own + counter as u64;
            assert!(area.store_word(at, area.word(at).expect("a word") + 1));
        }
    })));
    a.truncate(ino, 0, false).expect("truncate");
    assert_eq!(a.deferred(), (0, vec![]));
    assert_eq!(a.statfs().blocks_free, before);
}

/// A page of one of its files is in a pipe. It answers whenever it is asked, lets go of its other files, and maps some of them again at once.
#[test]
fn a_member_that_can_not_let_go_of_a_page_is_waited_for_once_and_again_when_it_can() {
    let (mut a, _b) = two_members();
    let ino = file(&a, "mapped");
    let mappers = inode_field(a.area(), ino.ino, core::mem::offset_of!(sys::tfs_inode, mappers));
    assert!(a.area().store_word(mappers, 1 << 5));
    let (area, told) = (a.area().clone(), Arc::new(AtomicU32::new(0)));
    let lets_go = Arc::new(AtomicBool::new(false));
    let (tells, ends) = (Arc::clone(&told), Arc::clone(&lets_go));
    a.tell_waits_to(Box::new(move |member, _, answers, _| {
        assert_eq!((member, answers), (5, true));
        tells.fetch_add(1, Ordering::SeqCst);
    }));
    a.ring_by(Some(Box::new(move |_| {
        let own = BLOCK + 5 * size_of::<sys::tfs_member_area>() as u64;
        let begun = own + core::mem::offset_of!(sys::tfs_member_area, revokes_begun) as u64;
        let done = own + core::mem::offset_of!(sys::tfs_member_area, revokes_done) as u64;
        let round = area.word(begun).expect("a word") + 1;
        assert!(area.store_word(begun, round));
        assert!(!ends.load(Ordering::SeqCst) || area.store_word(done, round));
    })));
    let cut = || {
        a.pwrite(ino, &[7; 100_000], 0, false).expect("write");
        a.truncate(ino, 0, false).expect("truncate");
        (a.deferred().0, told.load(Ordering::SeqCst))
    };
    let (first, _) = cut();
    assert_eq!(told.load(Ordering::SeqCst), 1, "it is waited for, and the log says so");
    assert_eq!([cut(), cut()], [(2 * first, 1), (3 * first, 1)]);
    lets_go.store(true, Ordering::SeqCst);
    assert_eq!(cut(), (3 * first, 1), "it lets go of what is removed now");
    lets_go.store(false, Ordering::SeqCst);
    assert_eq!(cut(), (4 * first, 2), "it is waited for as before");
}

#[test]
fn blocks_that_a_member_maps_become_free_when_it_leaves() {
    let (a, b) = two_members();
    let (before, _) = truncate_what_another_maps(&a);
    drop(b);
    assert_eq!(a.statfs().blocks_free, before);
    assert_eq!(a.deferred(), (0, vec![]));
}

#[test]
fn blocks_that_a_member_maps_become_free_when_it_dies() {
    let (a, b) = two_members();
    let (before, after) = truncate_what_another_maps(&a);
    a.recover_all().expect("no member is dead");
    assert_eq!(a.statfs().blocks_free, after);
    let state = a.area().members();
    b.abandon();
    // SAFETY: the table of a zone that stays mapped while `a` lives.
    unsafe { (*state.add(5)).state_epoch = 2 << 32 | u64::from(sys::TMB_MEMBER_DEAD) };
    a.recover_all().expect("recovery");
    assert_eq!(a.statfs().blocks_free, before);
}
