// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Operations that find too few blocks, or no memory: they succeed, or change nothing; no block is lost, and none counts wrong.

use rustix::io::Errno;
use tombolo_files::fs::{Create, FileLock, Filesystem, Handle, ROOT, Result, xattr_image};
use tombolo_files::{fsck, sys};

use crate::{Zone, hooks};

const REG: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;
const BLOCK: u64 = sys::TFS_BLOCK as u64;
const MEMBER: u32 = 4;

fn find(fs: &Filesystem, path: &str) -> Handle {
    path.split('/').fold(ROOT.into(), |dir, name| fs.lookup(dir, name.as_bytes()).expect("a name").0)
}

fn make(fs: &Filesystem, dir: Handle, name: &str, mode: u32) -> Result<Handle> {
    fs.create(dir, Some(name.as_bytes()), &Create::mode(mode))
}

/// d has one full block of names, e is empty; f has data and attributes, l a full block of locks. The rest is one file.
fn setup(fs: &Filesystem) {
    let d = make(fs, ROOT.into(), "d", DIR).expect("mkdir");
    make(fs, ROOT.into(), "e", DIR).expect("mkdir");
    let [f, l, full] = ["f", "l", "full"].map(|name| make(fs, ROOT.into(), name, REG).expect("create"));
    for i in 0..64 {
        fs.link(d, format!("n{i}").as_bytes(), f).expect("link");
    }
    fs.pwrite(f, &[1; 9000], 0, false).expect("write");
    fs.xattr_set(f, b"user.a", Some(&[2; 5000]), 0, None).expect("attribute");
    (1..63).for_each(|i| fs.set_lock(l, &lock(i)).expect("lock"));
    let mut at = 0;
    while let Ok(n) = fs.pwrite(full, &[3; BLOCK as usize], at, false) {
        at += n as u64;
    }
}

fn lock(i: u64) -> FileLock {
    let (type_, kind) = (sys::TFS_LK_READ, sys::TFS_LK_POSIX);
    FileLock { owner: 1, start: 10 * i, end: 10 * i, type_, kind, ..FileLock::default() }
}

type Operation = (&'static str, fn(&Filesystem) -> Result<()>);

const OPERATIONS: &[Operation] = &[
    ("a name in a new block", |fs| make(fs, find(fs, "d"), "new", REG).map(drop)),
    ("a first name", |fs| make(fs, find(fs, "e"), "new", REG).map(drop)),
    ("a directory", |fs| make(fs, find(fs, "d"), "new", DIR).map(drop)),
    ("a symbolic link", |fs| {
        let link = Create { target: Some(&[b't'; 3000]), ..Create::mode(libc::S_IFLNK | 0o777) };
        fs.create(find(fs, "e"), Some(b"link"), &link).map(drop)
    }),
    ("a file with attributes", |fs| {
        let xattrs = xattr_image(&[(b"user.large", &[7; 6000])]);
        fs.create(find(fs, "d"), Some(b"x"), &Create { xattrs: &xattrs, ..Create::mode(REG) }).map(drop)
    }),
    ("a link", |fs| fs.link(find(fs, "d"), &[b'l'; 200], find(fs, "f"))),
    ("a longer name", |fs| fs.rename((find(fs, "d"), b"n5"), (find(fs, "d"), &[b'l'; 200]), 0)),
    ("a name in a directory that has none", |fs| {
        fs.rename((find(fs, "d"), b"n5"), (find(fs, "e"), b"n5"), 0)
    }),
    ("a name that leaves a whiteout", |fs| {
        fs.rename((find(fs, "d"), b"n5"), (find(fs, "e"), b"n5"), sys::TFS_RENAME_WHITEOUT)
    }),
    ("a replaced attribute", |fs| fs.xattr_set(find(fs, "f"), b"user.a", Some(&[8; 9000]), 0, None)),
    ("a removed attribute", |fs| fs.xattr_set(find(fs, "f"), b"user.a", None, 0, None)),
    ("a block far away", |fs| fs.pwrite(find(fs, "f"), b"x", 3 << 30, false).map(drop)),
    ("room far away", |fs| {
        fs.fallocate(find(fs, "f"), sys::TFS_FALLOC_KEEP_SIZE, (3 << 21) - BLOCK, 2 * BLOCK)
    }),
    ("a hole", |fs| {
        let mode = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
        fs.fallocate(find(fs, "full"), mode, 3 * BLOCK, 2 * BLOCK)
    }),
    ("a shorter file", |fs| fs.truncate(find(fs, "full"), 3 * BLOCK + 5, false)),
    ("a lock", |fs| fs.set_lock(find(fs, "l"), &lock(100))),
    ("half a lock", |fs| {
        fs.set_lock(find(fs, "f"), &FileLock { start: 0, end: 100, ..lock(1) })?;
        fs.set_lock(find(fs, "f"), &FileLock { start: 10, end: 20, type_: sys::TFS_LK_UNLOCK, ..lock(1) })
    }),
    ("a removed file", |fs| fs.unlink(ROOT, b"full", None)),
];

/// Everything that a program sees, but times, and files' block counts.
fn contents(fs: &Filesystem, dir: Handle, path: &str, out: &mut Vec<String>) {
    for entry in fs.list(dir).expect("names") {
        let name = String::from_utf8_lossy(&entry.name).into_owned();
        let (found, _) = fs.lookup(dir, &entry.name).expect("a listed name");
        let attr = fs.getattr(found).expect("attributes");
        let mut bytes = vec![0; 20_000];
        let read =
            if attr.mode & libc::S_IFMT == libc::S_IFREG { fs.pread(found, &mut bytes, 0) } else { Ok(0) };
        let named = fs.xattr_get(found, b"user.a").ok();
        let sum = bytes.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect::<Vec<_>>();
        let what = (attr.mode, attr.nlink, attr.size, attr.rdev, read, sum, named.map(|n| (n.len(), n[0])));
        out.push(format!("{path}/{name} {found:?} {what:?}"));
        if attr.mode & libc::S_IFMT == libc::S_IFDIR {
            contents(fs, found, &format!("{path}/{name}"), out);
        }
    }
}

fn all(fs: &Filesystem) -> Vec<String> {
    let mut out = Vec::new();
    contents(fs, ROOT.into(), "", &mut out);
    out.sort();
    out
}

impl Zone {
    /// Runs the operation in a zone with so many free blocks, and fails one of its allocations of memory. If it fails it must have changed nothing.
    fn attempt(&self, (name, operation): Operation, free: u64, allocation: Option<usize>) -> Result<()> {
        self.reset();
        let fs = self.open(MEMBER, false).expect("open");
        let full = find(&fs, "full");
        while fs.statfs().blocks_free < free {
            fs.truncate(full, (fs.size(full) - 1) / BLOCK * BLOCK, false).expect("truncate");
        }
        let before = all(&fs);
        if let Some(n) = allocation {
            hooks::MEMORY.set(n);
            hooks::NO_MEMORY.set(1);
        }
        let done = self.alone(|| operation(&fs)).unwrap_or_else(|e| panic!("{name}, {free} blocks: {e}"));
        hooks::NO_MEMORY.set(0);
        hooks::MEMORY.set(0);
        if done.is_err() {
            let after = all(&fs);
            let differ = before.iter().zip(&after).find(|(a, b)| a != b);
            assert!(
                before == after,
                "{name}, {free} blocks, failed and changed {:.200}",
                format!("{differ:?}")
            );
        }
        drop(fs);
        self.leave(MEMBER);
        fsck::expect_clean(&self.area, &mut |_, _, _| {})
            .unwrap_or_else(|e| panic!("{name}, {free} blocks: {e}"));
        done
    }
}

#[test]
fn an_operation_that_finds_too_few_blocks_changes_nothing() {
    let zone = Zone::new(setup);
    for operation in OPERATIONS {
        let mut enough = false;
        for free in 0..16 {
            match zone.attempt(*operation, free, None) {
                Ok(()) => enough = true,
                Err(Errno::NOSPC | Errno::NOLCK) => {
                    assert!(!enough, "{}: fails with {free} blocks", operation.0)
                }
                Err(e) => panic!("{}: {e}", operation.0),
            }
        }
        assert!(enough, "{} never succeeds", operation.0);
    }
}

#[test]
fn an_operation_that_finds_no_memory_changes_nothing() {
    let zone = Zone::new(setup);
    let mut failed = 0;
    for operation in OPERATIONS {
        for allocation in 0.. {
            match zone.attempt(*operation, 16, Some(allocation)) {
                Ok(()) => break,
                Err(Errno::NOMEM) => failed += 1,
                Err(e) => panic!("{}: {e}", operation.0),
            }
        }
    }
    assert!(failed > 0, "no operation takes memory");
}
