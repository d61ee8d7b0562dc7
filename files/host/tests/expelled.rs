// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims about a member that was declared dead and goes on: its slot, with all bits and counters of the slot, is another's by then.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::io::Errno;
use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::fs::{self, Create, Filesystem, Handle, Mkfs, ROOT};
use tombolo_files::{fsck, sys};

const AREA_AT: u64 = 2 << 20;
const MEMBERS_AT: u64 = 4096;
const SIZE: u64 = 16 << 20;

/// A zone's memory, with a member table that the tests write as its host would.
struct Zone {
    map: Arc<Map>,
    area: Area,
}

impl Zone {
    fn new() -> Zone {
        let map = Arc::new(Map::memfd("expelled", AREA_AT + SIZE).expect("memory"));
        let area = Area::in_map(&map, AREA_AT, SIZE, None).expect("an area");
        fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
        Zone { map, area }
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        let page = Area::in_map(&self.map, at / 4096 * 4096, 4096, None).expect("a page").base();
        // SAFETY: an aligned word of the mapping, which lives as long as self and is only accessed by atomics.
        unsafe { AtomicU64::from_ptr(page.add((at % 4096) as usize).cast()) }
    }

    fn set(&self, member: u32, epoch: u32, state: u32) {
        self.word(MEMBERS_AT + u64::from(member) * 256)
            .store(u64::from(epoch) << 32 | u64::from(state), SeqCst);
    }

    /// The damage that was seen, as the super block counts it.
    fn errors(&self) -> &AtomicU64 {
        self.word(AREA_AT + offset_of!(sys::tfs_super, errors) as u64)
    }

    fn join(&self, member: u32, epoch: u32) -> Filesystem {
        self.set(member, epoch, sys::TMB_MEMBER_ACTIVE);
        let own = Some((MEMBERS_AT, Incarnation { member, epoch }));
        Filesystem::open(Area::in_map(&self.map, AREA_AT, SIZE, own).expect("an area")).expect("open")
    }

    /// Declares the slot's member dead, has `by` recover it, and gives the slot to another one.
    fn replace(&self, member: u32, epoch: u32, by: &Filesystem) -> Filesystem {
        self.set(member, epoch + 1, sys::TMB_MEMBER_DEAD);
        by.recover_all().expect("its recovery");
        self.join(member, epoch + 2)
    }
}

/// A zone with two members, of which the second one is to be expelled, and a file.
fn stage() -> (Zone, Filesystem, Filesystem, Handle) {
    let zone = Zone::new();
    let (other, expelled) = (zone.join(0, 1), zone.join(1, 1));
    let file = file(&other, "file");
    (zone, other, expelled, file)
}

/// The members end, and the file system is clean then.
fn end(zone: &Zone, members: [Filesystem; 3]) {
    drop(members);
    fsck::expect_clean(&zone.area, &mut |_, _, _| {}).expect("clean");
}

fn file(fs: &Filesystem, name: &str) -> Handle {
    let made = fs.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFREG | 0o644)).expect("create");
    fs.pwrite(made, name.as_bytes(), 0, false).expect("write");
    made
}

#[test]
fn the_close_of_an_expelled_member_takes_no_file_from_its_successor() {
    let (zone, other, expelled, open) = stage();
    expelled.open_ref(open).expect("open");
    let successor = zone.replace(1, 1, &other);
    successor.open_ref(open).expect("open");
    other.unlink(ROOT, b"file", None).expect("unlink");
    // Its answer has no reader: it is the close of a mount that ends.
    let _ = expelled.close_ref(open);
    // A recovery frees each file that has neither name nor opener.
    drop(zone.join(2, 1));
    zone.set(2, 2, sys::TMB_MEMBER_DEAD);
    other.recover_all().expect("a recovery");
    let mut back = [0; 4];
    assert_eq!(successor.pread(open, &mut back, 0), Ok(4), "a file that it has open");
    assert_eq!(&back, b"file");
    successor.close_ref(open).expect("close");
    assert_eq!(successor.pread(open, &mut back, 0), Err(Errno::STALE), "the last close frees it");
    end(&zone, [expelled, successor, other]);
}

#[test]
fn whatever_an_expelled_member_asks_for_it_is_told_that_it_is_over() {
    let (zone, other, expelled, file) = stage();
    expelled.open_ref(file).expect("open");
    let successor = zone.replace(1, 1, &other);
    assert!(expelled.area().is_expelled() && !successor.area().is_expelled());
    let over = Err(Errno::SHUTDOWN);
    let mut back = [0; 4];
    assert_eq!(expelled.pread(file, &mut back, 0).map(drop), over, "no member waits for its reads");
    assert_eq!(back, [0; 4], "it was given bytes that may be another file's");
    assert_eq!(expelled.pwrite(file, b"else", 0, false).map(drop), over);
    assert_eq!(expelled.getattr(file).map(drop), over);
    assert_eq!(expelled.open_ref(file), over, "the bit would be its successor's");
    assert_eq!(expelled.map_ref(file), over);
    assert_eq!(expelled.truncate(file, 0, false), over);
    assert_eq!(expelled.unlink(ROOT, b"file", None), over);
    assert_eq!(expelled.create(ROOT, Some(b"new"), &Create::mode(libc::S_IFREG)).map(drop), over);
    // If its bit were set now, the file would stay as long as the successor.
    other.unlink(ROOT, b"file", None).expect("unlink");
    assert_eq!(successor.getattr(file).map(drop), Err(Errno::STALE));
    end(&zone, [expelled, successor, other]);
}

/// Others wait for a member's counter of revocations before they use a block again that it maps.
#[test]
fn an_expelled_member_does_not_let_go_for_its_successor() {
    let (zone, other, expelled, file) = stage();
    let successor = zone.replace(1, 1, &other);
    successor.map_ref(file).expect("it maps the file");
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| other.truncate(file, 0, false));
        while !removal.is_finished() {
            expelled.let_go();
        }
        removal.join().expect("a thread").expect("truncate");
    });
    let (deferred, holders) = other.deferred();
    assert!(deferred > 0 && holders == [1], "blocks that the successor maps: {deferred}, {holders:?}");
    successor.unmap_ref(file).expect("unmap");
    end(&zone, [expelled, successor, other]);
}

/// Blocks that it was about to read are other files' by then.
#[test]
fn what_an_expelled_member_finds_is_no_damage() {
    let (zone, other, expelled, file) = stage();
    let nowhere = Handle { ino: 1 << 40, ..file };
    let successor = zone.replace(1, 1, &other);
    assert_eq!(expelled.getattr(nowhere).map(drop), Err(Errno::SHUTDOWN));
    assert_eq!(zone.errors().load(SeqCst), 0);
    assert_eq!(successor.getattr(nowhere).map(drop), Err(Errno::UCLEAN));
    assert_eq!(zone.errors().swap(0, SeqCst), 1);
    end(&zone, [expelled, successor, other]);
}
