// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All members die after any store: the core's stores are recorded, and every prefix of them is recovered from.
//!
//! - [`recorder`]: records the stores, undoes and repeats them.
//! - [`world`]: a small zone, and its contents as plain values.
//! - [`sweep`]: operations cut off after every store.
//! - [`living`]: members that go on meanwhile.
//! - [`lines`]: the stores that persistent memory may hold after a power failure.

mod lines;
mod living;
mod recorder;
mod sweep;
mod world;

use recorder::Order;
use sweep::Sweep;
use tombolo_files::fs::{Attr, Create, FileLock, Filesystem, Handle, ROOT, xattr_image};
use tombolo_files::sys;
use world::World;

const REG: u32 = libc::S_IFREG | 0o640;
const DIR: u32 = libc::S_IFDIR | 0o750;
const BLOCK: u64 = 4096;

fn create(fs: &Filesystem, dir: impl Into<Handle>, name: &str, mode: u32) -> Handle {
    fs.create(dir, Some(name.as_bytes()), &Create::mode(mode)).expect("create")
}

fn find(fs: &Filesystem, path: &str) -> Handle {
    path.split('/')
        .filter(|n| !n.is_empty())
        .fold(ROOT.into(), |dir, name| fs.lookup(dir, name.as_bytes()).expect("a name").0)
}

fn write(fs: &Filesystem, ino: impl Into<Handle>, byte: u8, len: u64, at: u64) {
    let bytes: Vec<u8> = (0..len).map(|i| byte ^ (i / 64) as u8 | 1).collect();
    assert_eq!(fs.pwrite(ino, &bytes, at, false), Ok(bytes.len()));
}

fn rename(fs: &Filesystem, from: &str, to: &str, flags: u32) {
    let split = |path: &str| {
        let (dir, name) = path.rsplit_once('/').expect("an absolute path");
        (find(fs, dir), name.as_bytes().to_vec())
    };
    let (from, to) = (split(from), split(to));
    fs.rename((from.0, &from.1), (to.0, &to.1), flags).expect("rename");
}

/// /d, /d/sub, /e, and some files.
fn some_files(fs: &Filesystem) {
    let (d, e) = (create(fs, ROOT, "d", DIR), create(fs, ROOT, "e", DIR));
    create(fs, d, "sub", DIR);
    for (dir, name, len) in [(d, "f", 5000), (d, "g", 100), (e, "f", 9000), (e, "h", 0)] {
        let ino = create(fs, dir, name, REG);
        if len > 0 {
            write(fs, ino, name.as_bytes()[0], len, 0);
        }
    }
    fs.xattr_set(find(fs, "d/f"), b"user.a", Some(b"value"), 0, None).expect("attribute");
}

fn report(sweep: &Sweep) {
    println!("{} prefixes, {} of recoveries", sweep.prefixes, sweep.second);
}

fn make_names(persistent: bool) {
    let mut s = Sweep::new(4, persistent, some_files);
    s.step("create", |fs| create(fs, ROOT, "new", REG));
    s.step("create and open", |fs| {
        fs.create(ROOT, Some(b"opened"), &Create { open: true, ..Create::mode(REG) }).expect("create")
    });
    s.step("create with a long name", |fs| create(fs, find(fs, "d"), &"x".repeat(255), REG));
    s.step("mkdir", |fs| create(fs, find(fs, "d"), "m", DIR));
    s.step("symlink", |fs| {
        let link = Create { target: Some(b"d/f"), ..Create::mode(libc::S_IFLNK | 0o777) };
        fs.create(ROOT, Some(b"symlink"), &link).expect("symlink")
    });
    s.step("mknod", |fs| {
        let device = Create { rdev: 5 << 20 | 1, uid: 3, gid: 4, ..Create::mode(libc::S_IFCHR | 0o600) };
        fs.create(ROOT, Some(b"device"), &device).expect("mknod")
    });
    s.step("create with attributes", |fs| {
        let xattrs = xattr_image(&[(b"user.small", b"1"), (b"user.large", &[7; 6000])]);
        fs.create(find(fs, "e"), Some(b"x"), &Create { xattrs: &xattrs, ..Create::mode(REG) })
            .expect("create")
    });
    s.step("link", |fs| fs.link(find(fs, "e"), b"link", find(fs, "d/f")).expect("link"));
    let unnamed = s.step("a file without a name", |fs| {
        fs.create(ROOT, None, &Create { open: true, ..Create::mode(REG) }).expect("create")
    });
    s.step("write to it", |fs| write(fs, unnamed, 3, 5000, 0));
    s.step("a name for it", |fs| fs.link(find(fs, "d"), b"named", unnamed).expect("link"));
    s.step("close it", |fs| fs.close_ref(unnamed).expect("close"));
    report(&s);
}

fn remove_names(persistent: bool) {
    let mut s = Sweep::new(4, persistent, |fs| {
        some_files(fs);
        fs.link(find(fs, "e"), b"link", find(fs, "d/f")).expect("link");
        write(fs, find(fs, "d/g"), 1, 9000, 3 << 20);
        fs.xattr_set(find(fs, "d/g"), b"user.large", Some(&[1; 6000]), 0, None).expect("attribute");
    });
    s.step("unlink one of two", |fs| fs.unlink(find(fs, "e"), b"link", None).expect("unlink"));
    s.step("unlink the last", |fs| fs.unlink(find(fs, "d"), b"g", None).expect("unlink"));
    s.step("rmdir", |fs| fs.rmdir(find(fs, "d"), b"sub", None).expect("rmdir"));
    let open = find(s.worker(), "d/f");
    s.step("open", |fs| fs.open_ref(open).expect("open"));
    s.step("unlink what is open", |fs| fs.unlink(find(fs, "d"), b"f", None).expect("unlink"));
    s.step("write to it", |fs| write(fs, open, 9, 5000, 8192));
    s.step("close it", |fs| fs.close_ref(open).expect("close"));
    report(&s);
}

fn rename_all(persistent: bool) {
    let mut s = Sweep::new(4, persistent, |fs| {
        some_files(fs);
        let deep = create(fs, create(fs, ROOT, "x", DIR), "y", DIR);
        create(fs, deep, "z", REG);
    });
    s.step("in a directory", |fs| rename(fs, "/d/f", "/d/renamed", 0));
    s.step("to another directory", |fs| rename(fs, "/d/renamed", "/e/moved", sys::TFS_RENAME_NOREPLACE));
    s.step("over a file", |fs| rename(fs, "/e/moved", "/d/g", 0));
    s.step("over a file of the same directory", |fs| rename(fs, "/e/f", "/e/h", 0));
    s.step("a directory to another", |fs| rename(fs, "/x/y", "/d/y", 0));
    s.step("a directory over an empty one", |fs| rename(fs, "/d/y", "/d/sub", 0));
    s.step("a directory over an empty one elsewhere", |fs| rename(fs, "/d/sub", "/x", 0));
    s.step("two exchanged", |fs| rename(fs, "/d/g", "/x", sys::TFS_RENAME_EXCHANGE));
    s.step("two of a directory exchanged", |fs| rename(fs, "/d", "/e", sys::TFS_RENAME_EXCHANGE));
    s.step("with a whiteout", |fs| rename(fs, "/x", "/d/back", sys::TFS_RENAME_WHITEOUT));
    s.step("over the whiteout", |fs| rename(fs, "/d/back", "/x", 0));
    let open = find(s.worker(), "d/h");
    s.step("open", |fs| fs.open_ref(open).expect("open"));
    s.step("over a file that is open", |fs| rename(fs, "/x", "/d/h", 0));
    s.step("close it", |fs| fs.close_ref(open).expect("close"));
    report(&s);
}

fn grow(persistent: bool) {
    let mut s = Sweep::new(4, persistent, |fs| {
        let d = create(fs, ROOT, "d", DIR);
        (0..64).for_each(|i| _ = create(fs, d, &format!("n{i}"), REG));
    });
    s.step("a second block, and an index", |fs| create(fs, find(fs, "d"), "one-more", REG));
    s.step("into the index", |fs| create(fs, find(fs, "d"), "another", REG));
    s.step("out of the index", |fs| fs.unlink(find(fs, "d"), b"n5", None).expect("unlink"));
    s.step("rename in the index", |fs| rename(fs, "/d/n6", "/d/n-six", 0));
    report(&s);

    let mut s = Sweep::new(4, persistent, |fs| {
        let d = create(fs, ROOT, "d", DIR);
        let first = create(fs, d, "first", REG);
        (1..384).for_each(|i| fs.link(d, format!("n{i}").as_bytes(), first).expect("link"));
    });
    s.step("a larger index", |fs| fs.link(find(fs, "d"), b"one-more", find(fs, "d/first")).expect("link"));
    report(&s);

    let mut s = Sweep::new(4, persistent, |fs| {
        let d = create(fs, ROOT, "d", DIR);
        (4..256).for_each(|i| _ = create(fs, d, &format!("n{i}"), REG));
    });
    s.step("a larger inode table", |fs| create(fs, ROOT, "one-more", REG));
    report(&s);
}

fn change_data(persistent: bool) {
    let mut s = Sweep::new(4, persistent, some_files);
    let keep = sys::TFS_FALLOC_KEEP_SIZE;
    let f = find(s.worker(), "e/h");
    let step = |s: &mut Sweep, name: &str, at: u64, len: u64| {
        s.data(name, "/e/h", |fs| write(fs, f, name.as_bytes()[0], len, at));
    };
    step(&mut s, "a first block", 0, 100);
    step(&mut s, "in place", 50, 30);
    step(&mut s, "longer", 80, 4000);
    step(&mut s, "more blocks", 4080, 9000);
    s.step("append", |fs| fs.append(f, &[5; 5000], false).expect("append"));
    step(&mut s, "far away", 3 << 20, 5000);
    step(&mut s, "further away", 2 << 30, 10);
    step(&mut s, "into the hole", 1 << 20, 20_000);
    s.data("punch", "/e/h", |fs| {
        fs.fallocate(f, sys::TFS_FALLOC_PUNCH | keep, 5000, (1 << 20) + 5000).expect("punch")
    });
    s.data("zero", "/e/h", |fs| fs.fallocate(f, sys::TFS_FALLOC_ZERO, 100, 9000).expect("zero"));
    s.data("fallocate in a hole", "/e/h", |fs| fs.fallocate(f, 0, 40_000, 9000).expect("fallocate"));
    s.step("shorter", |fs| fs.truncate(f, (3 << 20) + 100, false).expect("truncate"));
    s.step("longer again", |fs| fs.truncate(f, (3 << 20) + 9000, false).expect("truncate"));
    s.step("fallocate", |fs| fs.fallocate(f, 0, 3 << 20, 30_000).expect("fallocate"));
    s.step("fallocate past the end", |fs| {
        fs.fallocate(f, keep, (3 << 20) + 4096, 60_000).expect("fallocate")
    });
    s.step("to nothing", |fs| fs.truncate(f, 0, false).expect("truncate"));
    let set = find(s.worker(), "e/f");
    s.step("a privileged mode", |fs| {
        fs.setattr(set, sys::TFS_SET_MODE, &Attr { mode: 0o6755, ..Attr::default() }).expect("chmod")
    });
    s.data("a write that takes it away", "/e/f", |fs| fs.pwrite(set, &[8; 3000], 7000, true).expect("write"));
    report(&s);
}

fn large_runs(persistent: bool) {
    let mut s = Sweep::new(6, persistent, some_files);
    let f = find(s.worker(), "e/h");
    s.data("a large run", "/e/h", |fs| write(fs, f, 1, 2 << 20, 2 << 20));
    let run = s.worker().map(f, 512, 512).expect("map");
    assert_eq!((run.block % 512, run.count), (0, 512));
    s.data("a hole in it", "/e/h", |fs| {
        let mode = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
        fs.fallocate(f, mode, (2 << 20) + 5 * BLOCK, 3 * BLOCK).expect("punch");
    });
    s.step("cut off in it", |fs| fs.truncate(f, (2 << 20) + 100_000, false).expect("truncate"));
    s.step("removed", |fs| fs.unlink(find(fs, "e"), b"h", None).expect("unlink"));
    report(&s);
}

fn change_attributes(persistent: bool) {
    let mut s = Sweep::new(4, persistent, some_files);
    let f = find(s.worker(), "d/f");
    let attr = Attr { mode: 0o4711, uid: 7, gid: 8, flags: sys::TFS_FL_APPEND, ..Attr::default() };
    s.step("chmod", |fs| fs.setattr(f, sys::TFS_SET_MODE, &attr).expect("chmod"));
    s.step("chown and mode", |fs| {
        fs.setattr(f, sys::TFS_SET_OWNER | sys::TFS_SET_MODE, &Attr { mode: 0o711, ..attr }).expect("chown")
    });
    s.step("flags", |fs| fs.setattr(f, sys::TFS_SET_FLAGS, &attr).expect("flags"));
    s.step("times", |fs| fs.setattr(f, sys::TFS_SET_ATIME | sys::TFS_SET_MTIME, &attr).expect("times"));
    let set = |fs: &Filesystem, name: &str, value: &[u8], mode| {
        fs.xattr_set(f, name.as_bytes(), Some(value), 0, mode).expect("attribute");
    };
    s.step("an attribute", |fs| set(fs, "user.b", b"value", None));
    s.step("replaced by a large one", |fs| set(fs, "user.a", &[6; 9000], None));
    s.step("with the mode", |fs| set(fs, "system.posix_acl_access", b"acl", Some(0o640)));
    s.step("removed", |fs| fs.xattr_set(f, b"user.a", None, 0, None).expect("remove"));
    // Entries: tag, permissions, id; the group's is the mask's.
    let entries = [(1u16, 6u16, !0u32), (2, 7, 1000), (4, 7, !0), (16, 4, !0), (32, 0, !0)];
    let bytes = entries
        .map(|(tag, perm, id)| (u64::from(id) << 32 | u64::from(perm) << 16 | u64::from(tag)).to_le_bytes());
    let acl = [&2u32.to_le_bytes()[..], &bytes.concat()].concat();
    s.step("an access ACL", |fs| set(fs, "system.posix_acl_access", &acl, Some(0o640)));
    s.step("a mode and the ACL", |fs| {
        fs.setattr(f, sys::TFS_SET_MODE, &Attr { mode: 0o4715, ..attr }).expect("chmod")
    });
    s.step("an owner, a mode and the ACL", |fs| {
        let what = sys::TFS_SET_OWNER | sys::TFS_SET_MODE | sys::TFS_SET_FLAGS | sys::TFS_SET_MTIME;
        fs.setattr(f, what, &Attr { mode: 0o751, uid: 9, ..attr }).expect("chown")
    });
    report(&s);
}

fn run_full(persistent: bool) {
    let mut s = Sweep::new(4, persistent, |fs| {
        some_files(fs);
        let d = find(fs, "d");
        (0..60).for_each(|i| _ = create(fs, d, &format!("n{i}"), REG));
        let full = create(fs, ROOT, "full", REG);
        let mut at = 0;
        while let Ok(n) = fs.pwrite(full, &[1; 4096], at, false) {
            at += n as u64;
        }
        fs.truncate(full, at - 4096, false).expect("one block is free");
        assert_eq!(fs.statfs().blocks_free, 1);
    });
    let full = |result: Result<_, rustix::io::Errno>| assert_eq!(result, Err(rustix::io::Errno::NOSPC));
    s.step("a directory block that needs a node", |fs| {
        full(fs.create(find(fs, "d"), Some("x".repeat(250).as_bytes()), &Create::mode(REG)).map(|_| ()));
    });
    s.step("an attribute of two blocks", |fs| {
        full(fs.xattr_set(find(fs, "d/f"), b"user.b", Some(&[1; 5000]), 0, None));
    });
    s.step("a block that needs nodes", |fs| {
        full(fs.pwrite(find(fs, "d/f"), b"x", 1 << 30, false).map(|_| ()))
    });
    let last = find(s.worker(), "full");
    s.step("a block more", |fs| fs.truncate(last, fs.size(last) - BLOCK, false).expect("truncate"));
    let long = |i: usize| format!("{i:x<250}");
    s.step("a directory block without an index", |fs| create(fs, find(fs, "d"), &long(0), REG));
    (1..12).for_each(|i| _ = create(s.worker(), find(s.worker(), "d"), &long(i), REG));
    s.step("a directory block where there is none", |fs| {
        full(fs.create(find(fs, "d"), Some(long(12).as_bytes()), &Create::mode(REG)).map(|_| ()));
    });
    let short = |i: usize| {
        s.worker().link(find(s.worker(), "d"), format!("s{i}").as_bytes(), find(s.worker(), "d/f"))
    };
    assert!((0..100).any(|i| short(i).is_err()), "the directory takes no end of names");
    s.step("a name in a directory without room", |fs| {
        rename(fs, "/d/n5", "/d/in-the-same-place-and-longer", 0)
    });
    s.step("an attribute replaced by a reserved block", |fs| {
        fs.xattr_set(find(fs, "d/f"), b"user.a", Some(&[7; 300]), 0, None).expect("attribute");
    });
    report(&s);
}

/// A death in the middle of an unlink may leave the name's place in the index. It must find nothing once a longer name lies there, whose last bytes
/// are where the inode number of the removed name was.
#[test]
fn a_place_that_a_death_left_in_an_index_finds_no_name_within_a_longer_one() {
    const IN_TWO_BLOCKS: u64 = 2 * sys::TFS_GRANULES_PER_BLOCK as u64;
    // The bytes of a name in its first granule.
    const FIRST: usize = (sys::TFS_GRANULE - sys::TFS_DIRENT_HEADER) as usize;
    let mut s = Sweep::new(4, false, |fs| {
        let d = create(fs, ROOT, "d", DIR);
        (0..IN_TWO_BLOCKS).for_each(|i| _ = create(fs, d, &format!("n{i}"), REG));
        fs.unlink(d, b"n100", None).expect("unlink");
    });
    let d = find(s.worker(), "d");
    for tail in 1..=40 {
        let long = "x".repeat(FIRST + tail);
        s.each_death(
            |fs| fs.unlink(d, b"n101", None).expect("unlink"),
            |world| {
                let fs = world.open(0)?;
                fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
                create(&fs, d, &long, REG);
                let is_there = fs.list(d).expect("names").iter().any(|entry| entry.name == b"n101");
                let found = fs.lookup(d, b"n101");
                fs.abandon();
                if found.is_ok() != is_there || !matches!(found, Ok(_) | Err(rustix::io::Errno::NOENT)) {
                    return Err(format!("beside a name of {} bytes: {found:?}", long.len()));
                }
                world.check().map(|_| ())
            },
        );
        // each_death leaves the last state: the name is removed.
        create(s.worker(), d, "n101", REG);
    }
}

/// After a death in the middle of removing blocks, none of them may be reused while a living member may still map it.
#[test]
fn blocks_of_a_half_done_truncate_stay_with_who_maps_them() {
    let mut mapped = Vec::new();
    let mut s = Sweep::new(4, false, |fs| {
        let ino = create(fs, ROOT, "mapped", REG);
        write(fs, ino, 3, 40_000, 0);
        let run = fs.map(ino, 0, 10).expect("map");
        mapped.extend(run.block..run.block + run.count);
    });
    let ino = find(s.worker(), "mapped");
    let mapper = s.world.open(3).expect("open");
    s.world.map_file(3, ino.ino);
    s.each_death(
        |fs| fs.truncate(ino, 0, false).expect("truncate"),
        |world| {
            let reader = world.open(0)?;
            reader.recover_all().map_err(|e| format!("recovery: {e}"))?;
            if mapped.iter().any(|block| world.map_byte(*block) == sys::TFS_MAP_FREE) {
                return Err("a mapped block is free".into());
            }
            World::declare_dead(3);
            reader.recover_all().map_err(|e| format!("recovery: {e}"))?;
            reader.abandon();
            let deferred = mapped.iter().any(|block| world.map_byte(*block) == sys::TFS_MAP_DEFERRED);
            if deferred { Err("a block stays deferred".into()) } else { world.check().map(|_| ()) }
        },
    );
    mapper.abandon();
}

/// After a death at any store of a write to preallocated blocks behind the end, a file that grows over them shows all of that write or zeroes.
#[test]
fn a_half_done_write_behind_the_end_shows_in_no_growth() {
    const LEN: u64 = 20_000;
    let growths: [fn(&Filesystem, Handle); 3] = [
        |fs, file| fs.truncate(file, LEN + 1, false).expect("truncate"),
        |fs, file| assert_eq!(fs.pwrite(file, &[0], LEN, false), Ok(1)),
        |fs, file| fs.fallocate(file, 0, LEN, 1).expect("fallocate"),
    ];
    for grow in growths {
        let mut s = Sweep::new(4, false, |fs| {
            let ahead = create(fs, ROOT, "ahead", REG);
            fs.fallocate(ahead, sys::TFS_FALLOC_KEEP_SIZE, 0, 8 * BLOCK).expect("fallocate");
        });
        let ahead = find(s.worker(), "ahead");
        s.each_death(
            |fs| write(fs, ahead, 3, LEN, 0),
            |world| {
                let fs = world.open(0)?;
                fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
                let written = fs.size(ahead) == LEN;
                grow(&fs, ahead);
                let mut bytes = vec![0; LEN as usize];
                fs.pread(ahead, &mut bytes, 0).map_err(|e| format!("read: {e}"))?;
                fs.abandon();
                let shown = bytes.iter().filter(|byte| **byte != 0).count() as u64;
                if shown != if written { LEN } else { 0 } {
                    return Err(format!("{shown} bytes show of a write that did not return"));
                }
                world.check().map(|_| ())
            },
        );
    }
}

/// After a death at any store of a write or a punch, the blocks that a fallocate had put behind the end are there.
#[test]
fn a_death_in_a_write_or_a_punch_takes_no_block_that_was_preallocated() {
    for persistent in [false, true] {
        let mut s = Sweep::new(4, persistent, |fs| {
            let ahead = create(fs, ROOT, "ahead", REG);
            fs.fallocate(ahead, sys::TFS_FALLOC_KEEP_SIZE, 4 * BLOCK, 4 * BLOCK).expect("fallocate");
        });
        let ahead = find(s.worker(), "ahead");
        let check = |world: &World| {
            let fs = world.open(0)?;
            fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
            let there = fs.map(ahead, 4, 4).map_err(|e| format!("blocks: {e}"))?;
            let size = fs.size(ahead);
            let behind = fs.map(ahead, 8, 4).map_err(|e| format!("blocks: {e}"))?;
            fs.abandon();
            if there.block == 0 || there.count < 4 {
                return Err(format!("preallocated blocks are gone: {there:?}"));
            }
            if size < 9 * BLOCK && behind.block != 0 {
                return Err("a write that did not return has left blocks".into());
            }
            world.check().map(|_| ())
        };
        let punch = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
        s.each_death(|fs| fs.fallocate(ahead, punch, 0, BLOCK).expect("punch"), check);
        s.each_death(|fs| write(fs, ahead, 3, BLOCK, 0), check);
        s.each_death(|fs| write(fs, ahead, 3, 2 * BLOCK, 7 * BLOCK), check);
    }
}

/// After a death at any store of a write or a truncation, a file's block count is that of its blocks.
#[test]
fn a_death_leaves_no_wrong_block_count() {
    let mut s = Sweep::new(4, false, |fs| {
        create(fs, ROOT, "empty", REG);
        let full = create(fs, ROOT, "full", REG);
        write(fs, full, 3, 20_000, 0);
    });
    let (empty, full) = (find(s.worker(), "empty"), find(s.worker(), "full"));
    let counted = |world: &World| {
        let fs = world.open(0)?;
        fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
        for file in [empty, full] {
            let attr = fs.getattr(file).map_err(|e| format!("attributes: {e}"))?;
            // Five blocks, and a node.
            let right = if attr.size == 0 { 0 } else { 6 };
            if attr.blocks != right {
                return Err(format!("inode {} counts {} blocks, not {right}", file.ino, attr.blocks as i64));
            }
        }
        fs.abandon();
        world.check().map(|_| ())
    };
    s.each_death(|fs| write(fs, empty, 3, 20_000, 0), counted);
    s.each_death(|fs| fs.truncate(full, 0, false).expect("truncate"), counted);
}

/// After a death at any store while the table of a file's locks grows, it can grow again, and no block is lost.
#[test]
fn records_of_locks_grow_and_no_block_is_lost() {
    let lock = |owner: u64, n: u64| FileLock {
        owner,
        start: 10 * n,
        end: 10 * n + 1,
        type_: sys::TFS_LK_READ,
        kind: sys::TFS_LK_POSIX,
        ..FileLock::default()
    };
    let records = u64::from(sys::TFS_LOCK_RECORDS);
    // The head takes the place of one.
    for full in [0, records - 1, 2 * records - 1] {
        let mut s = Sweep::new(4, false, some_files);
        let file = find(s.worker(), "d/f");
        let holder = s.world.open(3).expect("open");
        (0..full).for_each(|n| holder.set_lock(file, &lock(1, n)).expect("a lock"));
        s.each_death(
            |fs| fs.set_lock(file, &lock(2, full)).expect("a lock"),
            |world| {
                let other = world.open(0)?;
                other.recover_all().map_err(|e| format!("recovery: {e}"))?;
                for n in 0..2 * records {
                    other.set_lock(file, &lock(3, n)).map_err(|e| format!("lock {n}: {e}"))?;
                }
                other.abandon();
                world.check().map(|_| ())
            },
        );
        holder.abandon();
    }
}

/// Also once the mapping is gone, and then only once.
#[test]
fn fsync_flushes_what_was_stored_through_a_mapping() {
    let world = World::new(4, true);
    let fs = world.open(0).expect("open");
    let f = create(&fs, ROOT, "f", REG);
    write(&fs, f, 1, 5000, 0);
    let at = world.address(fs.map(f, 0, 2).expect("map").block);
    let flushed = |op: &dyn Fn()| {
        let base = recorder::count();
        op();
        let orders = recorder::orders_since(base);
        orders.iter().any(
            |(_, order)| matches!(order, Order::Flush { at: from, len } if *from <= at && at < from + len),
        )
    };
    let sync = || fs.sync(f).expect("sync");
    fs.map_ref(f).expect("map");
    assert!(flushed(&sync) && flushed(&sync), "stores may come at any time");
    fs.unmap_ref(f).expect("unmap");
    assert!(flushed(&sync), "what was stored since is in caches");
    assert!(!flushed(&sync), "it is not any more");
    fs.abandon();
}

/// Whatever another member does between two accesses of an fsync, its own fsync writes back what it has stored through a mapping.
#[test]
fn fsync_beside_another_one_and_beside_a_new_mapping_flushes_what_was_stored() {
    let world = World::new(4, true);
    let (fs, other) = (world.open(0).expect("open"), world.open(1).expect("open"));
    let f = create(&fs, ROOT, "f", REG);
    write(&fs, f, 1, 5000, 0);
    let at = world.address(fs.map(f, 0, 2).expect("map").block);
    let is_flushed = |since| {
        let orders = recorder::orders_since(since);
        orders.iter().any(
            |(_, order)| matches!(order, Order::Flush { at: from, len } if *from <= at && at < from + len),
        )
    };
    let unmap = || {
        other.unmap_ref(f).expect("unmap");
        recorder::count()
    };
    for beside_fsync in [true, false] {
        for access in 0.. {
            other.map_ref(f).expect("map");
            let stored = unmap();
            // What the other one's fsync has left, if it came between.
            let mut left = None;
            let meanwhile = || {
                let done = if beside_fsync { other.sync(f) } else { other.map_ref(f) };
                left = Some(done.is_err() || (beside_fsync && !is_flushed(stored)));
            };
            recorder::interrupt_at(recorder::accesses() + access, meanwhile, || fs.sync(f).expect("sync"));
            assert!(is_flushed(stored), "not after an fsync");
            let Some(left) = left else { break };
            assert!(!left, "not after the fsync before access {access} of another one");
            if !beside_fsync {
                let stored = unmap();
                other.sync(f).expect("sync");
                assert!(is_flushed(stored), "not what was mapped before access {access} of an fsync");
            }
        }
    }
    [fs, other].into_iter().for_each(Filesystem::abandon);
}

/// A member takes the reserve of a full area and leaves before any block is free: the next removal of any other member fills it again.
#[test]
fn the_reserve_of_a_full_area_is_filled_again_by_any_member() {
    const LARGE: u64 = 512 * BLOCK;
    let punch = |fs: &Filesystem, file, at, len| {
        fs.fallocate(file, sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE, at, len)
    };
    let fill = |fs: &Filesystem, name: &str| {
        let file = create(fs, ROOT, name, REG);
        let mut at = 0;
        while let Ok(n) = fs.pwrite(file, &[1; 4096], at, false) {
            at += n as u64;
        }
        (file, at)
    };
    let world = World::new(12, false);
    let [first, other, mapper] = [0, 1, 3].map(|m| world.open(m).expect("open"));
    let large = create(&first, ROOT, "large", REG);
    write(&first, large, 1, 3 * LARGE, 0);
    assert_eq!(first.map(large, 0, 3 * 512).expect("map").block % 512, 0);
    let (full, end) = fill(&first, "full");
    world.map_file(3, large.ino);
    punch(&first, large, LARGE / 2, LARGE).expect("two large runs are split, for which there are two blocks");
    drop(first);
    assert_eq!(other.statfs().blocks_free, 0, "what was removed is the mapper's still");
    while World::take_pending(3) != 0 {
        mapper.let_go();
    }
    other.truncate(full, end - BLOCK, false).expect("truncate");
    fill(&other, "more");
    punch(&other, large, 5 * LARGE / 2, BLOCK).expect("a block is reserved for the large run that is split");
    [other, mapper].into_iter().for_each(Filesystem::abandon);
}

macro_rules! claims {
    ($($claim:ident: $scenario:ident $persistent:literal;)*) => { $(
        #[test]
        fn $claim() {
            $scenario($persistent);
        }
    )* };
}
claims! {
    names_are_made_whole_or_not_at_all: make_names false;
    names_are_removed_whole_or_not_at_all: remove_names false;
    renames_happen_whole_or_not_at_all: rename_all false;
    directories_indexes_and_the_inode_table_grow_whole_or_not_at_all: grow false;
    data_is_that_of_before_or_after_and_no_block_is_lost: change_data false;
    large_runs_are_made_split_and_removed_and_no_block_is_lost: large_runs false;
    attributes_change_whole_or_not_at_all: change_attributes false;
    what_fails_for_want_of_space_changes_nothing: run_full false;
    on_persistent_memory_names_are_made_whole_or_not_at_all: make_names true;
    on_persistent_memory_names_are_removed_whole_or_not_at_all: remove_names true;
    on_persistent_memory_renames_happen_whole_or_not_at_all: rename_all true;
    on_persistent_memory_directories_indexes_and_the_inode_table_grow_whole_or_not_at_all: grow true;
    on_persistent_memory_data_is_that_of_before_or_after_and_no_block_is_lost: change_data true;
    on_persistent_memory_attributes_change_whole_or_not_at_all: change_attributes true;
    on_persistent_memory_what_fails_for_want_of_space_changes_nothing: run_full true;
}
