// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Directories and files that a hostile member has made as large as an area can hold, out of one block. Walks over them end, yield the CPU, and end at
//! once in a killed process. In a guest they run in the kernel.

use core::mem::offset_of;

use rustix::io::Errno;
use tombolo_files::fs::{Create, Filesystem, Handle, ROOT, Result};
use tombolo_files::sys;

use crate::found::file;
use crate::plan::Plan;
use crate::schedule::Ran;
use crate::{MIB, Zone, hooks};

const BLOCK: u64 = sys::TFS_BLOCK as u64;
const HEIGHT: u64 = sys::TFS_MAX_HEIGHT as u64;
/// Accesses of a walk: that over each entry of as many blocks as the area has, and back.
const MOST: usize = 3 << 20;
/// Accesses between two yields: some microseconds.
const SLICE: usize = 1 << 13;

impl Zone {
    /// Makes a tree over this file's first block, its only one, such that the block is at each place.
    fn repeat(&self, inode: Handle, nodes: [u64; 2]) {
        let at = self.inode(inode, offset_of!(sys::tfs_inode, root));
        let block = self.area.word(at).expect("a root word") & sys::TFS_BLOCKNR_MASK;
        for (node, to) in [(nodes[0], nodes[1]), (nodes[1], block)] {
            (0..BLOCK / 8).for_each(|i| self.store(node * BLOCK + 8 * i, to));
        }
        self.store(at, nodes[0] | 2 << sys::TFS_HEIGHT_SHIFT);
    }

    /// Makes the file's only block a node that refers to itself at each place.
    fn make_circle(&self, inode: Handle) {
        let at = self.inode(inode, offset_of!(sys::tfs_inode, root));
        let block = self.area.word(at).expect("a root word") & sys::TFS_BLOCKNR_MASK;
        (0..BLOCK / 8).for_each(|i| self.store(block * BLOCK + 8 * i, block));
        self.store(at, block | HEIGHT << sys::TFS_HEIGHT_SHIFT);
    }

    fn one(&self, body: impl FnOnce()) -> Ran {
        let plan = Plan::new(0, Vec::new(), Vec::new(), true);
        self.run(plan, vec![Box::new(body)]).expect("it ends")
    }
}

type Operation = (&'static str, fn(&Filesystem, Handle) -> Result<()>);

/// Runs each operation in a zone that `damage` has prepared; then once more in a process that is killed.
fn ends(
    setup: fn(&Filesystem),
    name: &str,
    damage: impl Fn(&Zone, &Filesystem, Handle),
    operations: &[Operation],
) {
    let zone = Zone::new(setup);
    for (what, operation) in operations {
        let steps = [false, true].map(|killed| {
            zone.reset();
            let fs = zone.open(4, false).expect("open");
            let (inode, _) = fs.lookup(ROOT, name.as_bytes()).expect("lookup");
            damage(&zone, &fs, inode);
            let mut done = Ok(());
            let ran = zone.one(|| {
                hooks::KILLED.set(killed);
                done = operation(&fs, inode);
            });
            hooks::KILLED.set(false);
            fs.abandon();
            assert!(ran.steps[0] < MOST, "{what}: {} accesses", ran.steps[0]);
            assert!(ran.longest < SLICE, "{what}: {} accesses without a yield", ran.longest);
            (ran.steps[0], done)
        });
        let [(whole, _), (cut, done)] = steps;
        assert!(
            cut < whole / 4 || done != Err(Errno::INTR),
            "{what}: {cut} accesses when killed, else {whole}"
        );
        println!("{what}: {whole} accesses, {cut} when killed, which gives {done:?}");
    }
}

#[test]
fn a_directory_of_which_each_block_is_the_same_is_walked_in_slices_and_to_an_end() {
    let large = |zone: &Zone, fs: &Filesystem, dir: Handle| {
        let run = fs.map(fs.lookup(ROOT, b"nodes").expect("lookup").0, 0, 2).expect("map");
        zone.repeat(dir, [run.block, run.block + 1]);
        zone.store(zone.inode(dir, offset_of!(sys::tfs_inode, size)), MIB << 20);
    };
    let setup = |fs: &Filesystem| {
        let dir = fs.create(ROOT, Some(b"d"), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
        let f = fs.create(dir, Some(b"f"), &Create::mode(libc::S_IFREG | 0o644)).expect("create");
        fs.unlink(dir, b"f", Some(f)).expect("unlink");
        file(fs, "nodes", &[1; 2 * BLOCK as usize]);
    };
    ends(
        setup,
        "d",
        large,
        &[
            ("a lookup", |fs, dir| fs.lookup(dir, b"x").map(drop)),
            ("a list", |fs, dir| fs.readdir(dir, 0, |_, _, _, _| true).map(drop)),
            ("a new name", |fs, dir| {
                fs.create(dir, Some(b"x"), &Create::mode(libc::S_IFREG | 0o644)).map(drop)
            }),
            ("a removed name", |fs, dir| fs.unlink(dir, b"x", None)),
        ],
    );
}

#[test]
fn a_file_of_which_each_block_is_the_same_is_walked_in_slices_and_to_an_end() {
    let large = |zone: &Zone, _: &Filesystem, file: Handle| {
        zone.make_circle(file);
        zone.store(zone.inode(file, offset_of!(sys::tfs_inode, size)), sys::TFS_MAX_SIZE);
    };
    let setup = |fs: &Filesystem| _ = file(fs, "f", &[1; 100]);
    const ZERO: u32 = sys::TFS_FALLOC_ZERO | sys::TFS_FALLOC_KEEP_SIZE;
    const PUNCH: u32 = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
    ends(
        setup,
        "f",
        large,
        &[
            ("a hole that is not there", |fs, file| fs.seek(file, 0, true).map(drop)),
            ("a truncation", |fs, file| fs.truncate(file, 0, false)),
            ("a truncation in it", |fs, file| fs.truncate(file, (1 << 40) + 5, false)),
            ("a punch", |fs, file| fs.fallocate(file, PUNCH, 5, 1 << 45)),
            ("zeroes", |fs, file| fs.fallocate(file, ZERO, 0, 1 << 30)),
            ("a removal", |fs, _| fs.unlink(ROOT, b"f", None)),
        ],
    );
}
