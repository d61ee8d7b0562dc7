// SPDX-License-Identifier: Apache-2.0 OR MIT
//! States that dead, suspended and killed members leave, made by hand, and one member's operations in them. The schedule provides the
//! time.

use core::mem::offset_of;

use rustix::io::Errno;
use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};
use tombolo_files::{fsck, sys};

use crate::plan::Plan;
use crate::{Zone, hooks, schedule};

const REG: u32 = libc::S_IFREG | 0o644;
const BLOCK: u64 = sys::TFS_BLOCK as u64;
const SECOND: u64 = 1_000_000_000;

impl Zone {
    /// Returns the offset of a field in the area.
    pub(super) fn inode(&self, ino: Handle, field: usize) -> u64 {
        let table = self.area.word(offset_of!(sys::tfs_super, data_start) as u64).expect("a super block");
        table * BLOCK + ino.ino * size_of::<sys::tfs_inode>() as u64 + field as u64
    }

    pub(super) fn member_area(member: u32, field: usize) -> u64 {
        BLOCK + u64::from(member) * size_of::<sys::tfs_member_area>() as u64 + field as u64
    }

    pub(super) fn store(&self, offset: u64, value: u64) {
        assert!(self.area.store_word(offset, value), "{offset:#x} is in the area");
    }

    /// A member in its first epoch holds a lock.
    pub(super) fn hold(&self, member: u32, lock: u64) {
        self.store(lock, 1 << 32 | u64::from(sys::TFS_LOCK_HELD) | u64::from(member + 1));
    }

    /// The member holds the lock of an inode, and has a transaction in this slot that truncates it to nothing.
    pub(super) fn truncates(&self, member: u32, slot: usize, ino: Handle) {
        let size = self.inode(ino, offset_of!(sys::tfs_inode, size));
        let tx = |field| Zone::member_area(member, slot * size_of::<sys::tfs_tx>() + field);
        self.hold(member, self.inode(ino, offset_of!(sys::tfs_inode, lock)));
        self.store(tx(offset_of!(sys::tfs_tx, redo)), 1 << 32 | u64::from(sys::TFS_REDO_TRUNCATE));
        self.store(tx(offset_of!(sys::tfs_tx, ino)), ino.ino);
        self.store(tx(offset_of!(sys::tfs_tx, arg)), 0);
        self.store(tx(offset_of!(sys::tfs_tx, arg) + 8), !0);
        self.store(tx(offset_of!(sys::tfs_tx, words)), size);
        self.store(tx(offset_of!(sys::tfs_tx, words) + 8), 0);
        self.store(tx(0), 1 << 32 | u64::from(sys::TFS_TX_COMMITTED));
    }

    /// The member declares that it maps the inode, holes too.
    pub(super) fn maps(&self, member: u32, ino: Handle) {
        for field in [offset_of!(sys::tfs_inode, mappers), offset_of!(sys::tfs_inode, hole_mappers)] {
            self.store(self.inode(ino, field), 1 << member);
        }
    }

    pub(super) fn does<T>(&self, body: impl FnOnce() -> T) -> T {
        self.alone(body).expect("it comes to its end without damage")
    }

    /// All former members are dead and recovered, and fsck finds nothing.
    pub(super) fn assert_clean(&self, members: &[u32]) {
        members.iter().for_each(|member| self.declare_dead(*member));
        let last = self.open(30, false).expect("open");
        self.does(|| last.recover_all()).expect("the last recovery");
        last.abandon();
        fsck::expect_clean(&self.area, &mut |_, _, _| {}).expect("clean");
    }
}

pub(super) fn file(fs: &Filesystem, name: &str, bytes: &[u8]) -> Handle {
    let file = fs.create(ROOT, Some(name.as_bytes()), &Create::mode(REG)).expect("create");
    assert_eq!(fs.pwrite(file, bytes, 0, false), Ok(bytes.len()));
    file
}

#[test]
fn a_member_that_died_in_a_truncation_and_in_a_recovery_comes_back_though_it_is_alone() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let (cut, other) = (file(&fs, "cut", &[1; 20_000]), file(&fs, "other", &[2; 9000]));
    fs.abandon();
    zone.truncates(4, 0, cut);
    let slot = sys::TFS_TX_RECOVERY as usize * size_of::<sys::tfs_tx>();
    zone.store(Zone::member_area(4, slot + offset_of!(sys::tfs_tx, ino)), other.ino);
    zone.store(Zone::member_area(4, slot), 1 << 32 | u64::from(sys::TFS_TX_OPEN));
    zone.declare_dead(4);
    let fs = zone.does(|| zone.open(4, false)).expect("open");
    assert_eq!((fs.size(cut), fs.size(other)), (0, 9000));
    fs.abandon();
    zone.assert_clean(&[4]);
}

#[test]
fn a_recovery_without_memory_ends_and_the_next_one_goes_on() {
    let zone = Zone::new(|_| {});
    let (first, second, other) = [1, 2, 7].map(|m| zone.open(m, false).expect("open")).into();
    let (orphan, cut) = (file(&first, "orphan", &[1; 9000]), file(&first, "cut", &[2; 20_000]));
    first.open_ref(orphan).expect("open");
    other.unlink(ROOT, b"orphan", None).expect("unlink");
    [first, second].into_iter().for_each(Filesystem::abandon);
    // The second died with the lock of an inode that the first had open, and its own recovery needs memory.
    zone.truncates(2, 0, cut);
    zone.hold(2, zone.inode(orphan, offset_of!(sys::tfs_inode, lock)));
    [1, 2].into_iter().for_each(|m| zone.declare_dead(m));
    hooks::NO_MEMORY.set(1);
    assert_eq!(zone.does(|| other.recover_all()), Err(Errno::NOMEM));
    zone.does(|| other.recover_all()).expect("there is memory again");
    assert_eq!(other.getattr(orphan).err(), Some(Errno::STALE), "the orphan was freed");
    assert_eq!(other.size(cut), 0);
    other.abandon();
    zone.assert_clean(&[7]);
}

#[test]
fn a_truncation_that_is_killed_beside_suspended_members_leaves_nothing_behind_the_end() {
    const BLOCKS: u64 = 300;
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let cut = file(&fs, "cut", b"");
    // From the end on, so that no two blocks form a run: more runs than one pass removes.
    for block in (0..BLOCKS).rev() {
        assert_eq!(fs.pwrite(cut, &[7; BLOCK as usize], block * BLOCK, false), Ok(BLOCK as usize));
    }
    let (mapper, owner) = (10, 11);
    let suspended = [mapper, owner].map(|m| zone.open(m, false).expect("open"));
    zone.maps(mapper, cut);
    zone.hold(owner, offset_of!(sys::tfs_super, deferred_lock) as u64);
    hooks::KILLED.set(true);
    zone.does(|| fs.truncate(cut, 0, false)).expect("truncate");
    hooks::KILLED.set(false);
    zone.does(|| fs.truncate(cut, BLOCKS * BLOCK, false)).expect("grow");
    let mut bytes = vec![1; (BLOCKS * BLOCK) as usize];
    assert_eq!(fs.pread(cut, &mut bytes, 0), Ok(bytes.len()));
    assert!(bytes.iter().all(|byte| *byte == 0), "old bytes show");
    suspended.into_iter().for_each(Filesystem::abandon);
    fs.abandon();
    zone.assert_clean(&[4, mapper, owner]);
}

#[test]
fn a_suspended_member_that_maps_holes_is_waited_for_once_until_it_answers() {
    let zone = Zone::new(|_| {});
    let (fs, mapper) = (zone.open(4, false).expect("open"), zone.open(10, false).expect("open"));
    let sparse = file(&fs, "sparse", b"");
    fs.truncate(sparse, 100 * BLOCK, false).expect("grow");
    zone.maps(10, sparse);
    let fill = |blocks: std::ops::Range<u64>| {
        zone.does(|| {
            let start = schedule::clock();
            for block in blocks {
                assert_eq!(fs.pwrite(sparse, b"x", block * BLOCK, false), Ok(1));
            }
            schedule::clock() - start
        })
    };
    let waited = fill(0..20);
    assert!((2 * SECOND..3 * SECOND).contains(&waited), "20 blocks took {waited} ns");
    // It begins to revoke mappings, and is suspended once more.
    zone.store(Zone::member_area(10, offset_of!(sys::tfs_member_area, revokes_begun)), 1);
    let waited = fill(20..40);
    assert!((2 * SECOND..3 * SECOND).contains(&waited), "20 blocks took {waited} ns");
    [fs, mapper].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10]);
}

#[test]
fn a_removed_file_that_could_not_be_freed_is_freed_when_its_member_has_left() {
    let zone = Zone::new(|_| {});
    let (fs, mapper) = (zone.open(4, false).expect("open"), zone.open(10, false).expect("open"));
    let file = file(&fs, "f", &[1; 9000]);
    fs.open_ref(file).expect("open");
    fs.unlink(ROOT, b"f", None).expect("unlink");
    zone.maps(10, file);
    hooks::NO_MEMORY.set(1);
    fs.close_ref(file).expect("close");
    assert_eq!(hooks::NO_MEMORY.get(), 0, "freeing it takes memory");
    zone.does(|| drop(fs));
    zone.leave(4);
    zone.does(|| mapper.recover_all()).expect("recovery");
    assert_eq!(mapper.getattr(file).err(), Some(Errno::STALE), "it was freed");
    mapper.abandon();
    zone.assert_clean(&[10]);
}

#[test]
fn a_slot_of_recoveries_that_damage_opened_is_told_of_and_holds_up_nobody() {
    let zone = Zone::new(|_| {});
    let (dead, fs) = (zone.open(1, false).expect("open"), zone.open(7, false).expect("open"));
    let cut = file(&dead, "cut", &[2; 20_000]);
    dead.abandon();
    zone.truncates(1, 0, cut);
    zone.declare_dead(1);
    let slot = sys::TFS_TX_RECOVERY as usize * size_of::<sys::tfs_tx>();
    zone.store(Zone::member_area(7, slot), 1 << 32 | u64::from(sys::TFS_TX_OPEN));
    let told = zone.alone(|| fs.recover_all()).expect_err("it is told of");
    assert!(told.starts_with("damage:"), "{told}");
    assert_eq!(fs.size(cut), 0);
    fs.abandon();
    zone.store(offset_of!(sys::tfs_super, errors) as u64, 0);
    zone.assert_clean(&[7]);
}

#[test]
fn a_file_system_from_before_fair_locks_is_taken_over_with_what_the_dead_left_in_it() {
    let zone = Zone::new(|_| {});
    let [dead, other] = [1, 2].map(|m| zone.open(m, false).expect("open"));
    let (cut, kept) = (file(&dead, "cut", &[1; 20_000]), file(&dead, "kept", &[2; 9000]));
    [dead, other].into_iter().for_each(Filesystem::abandon);
    // As older programs made it: no features, no reserved blocks, the tag of a lock's word is 1.
    let incompat = offset_of!(sys::tfs_super, incompat) as u64;
    zone.store(incompat, u64::from(sys::TFS_INCOMPAT_KEYED_HASH));
    let map = zone.area.word(offset_of!(sys::tfs_super, map_start) as u64).expect("a super block") * BLOCK;
    for word in (map..).step_by(8).take((zone.area.size() / BLOCK / 8) as usize) {
        let bytes = zone.area.word(word).expect("the map").to_le_bytes();
        let then = bytes.map(|byte| if u32::from(byte) == sys::TFS_MAP_RESERVED { 0 } else { byte });
        zone.store(word, u64::from_le_bytes(then));
    }
    zone.truncates(1, 31, cut);
    zone.store(zone.inode(cut, offset_of!(sys::tfs_inode, lock)), 1 << 32 | 1 << 8 | 2);
    zone.declare_dead(1);
    zone.store(Zone::member_area(2, offset_of!(sys::tfs_member_area, features)), 0);
    let refused = zone.does(|| zone.open(3, false).map(Filesystem::abandon));
    assert!(refused.is_err(), "the second is one of the older ones");
    assert_eq!(zone.area.word(incompat), Some(u64::from(sys::TFS_INCOMPAT_KEYED_HASH)));
    zone.leave(20);
    [2, 3].into_iter().for_each(|m| zone.declare_dead(m));
    let fs = zone.does(|| zone.open(4, false)).expect("open");
    assert_eq!(zone.area.word(incompat), Some(u64::from(sys::TFS_INCOMPAT_KNOWN)));
    zone.does(|| fs.truncate(cut, 3, false)).expect("the dead one's lock is taken over");
    assert_eq!((fs.size(cut), fs.size(kept)), (3, 9000));
    let mut bytes = [1; 3];
    assert_eq!((fs.pread(cut, &mut bytes, 0), bytes), (Ok(3), [0; 3]), "it had been cut");
    fs.abandon();
    zone.assert_clean(&[4]);
}

#[test]
fn what_was_kept_for_a_reader_that_stood_still_is_free_once_it_has_gone_on() {
    let zone = Zone::new(|_| {});
    let (fs, reader) = (zone.open(4, false).expect("open"), zone.open(10, false).expect("open"));
    let (cut, other) = (file(&fs, "cut", &[1; 20_000]), file(&fs, "other", &[2; 9000]));
    let free = fs.statfs().blocks_free;
    let pin = |slot: u64, ino| {
        zone.store(Zone::member_area(10, offset_of!(sys::tfs_member_area, pins)) + slot * 64, ino)
    };
    zone.store(Zone::member_area(10, offset_of!(sys::tfs_member_area, pins_in_use)), 2);
    pin(0, cut.ino);
    zone.does(|| fs.truncate(cut, 0, false)).expect("truncate");
    assert_eq!(fs.statfs().blocks_free, free, "they are kept");
    let pending = || {
        let (table, _) = zone.state(10);
        let at = 10 * 256 + offset_of!(sys::tmb_member, pending) as u64;
        let pending = table.word(at).expect("a slot");
        assert!(table.store_word(at, 0));
        pending & u64::from(sys::TMB_PENDING_REVOKE) != 0
    };
    assert!(pending(), "it is asked to");
    // That thread goes on, while another of its threads stays suspended at another file.
    pin(0, 0);
    pin(1, other.ino);
    zone.does(|| reader.let_go());
    assert!(pending(), "it is to look again");
    pin(1, 0);
    zone.does(|| reader.let_go());
    assert!(!pending());
    assert!(fs.statfs().blocks_free > free, "they are free");
    [fs, reader].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10]);
}

/// Sets a pin of a member, as it would itself.
fn pin(zone: &Zone, member: u32, slot: u64, ino: u64) {
    zone.store(Zone::member_area(member, offset_of!(sys::tfs_member_area, pins)) + slot * 64, ino);
    zone.store(Zone::member_area(member, offset_of!(sys::tfs_member_area, pins_in_use)), slot + 1);
}

#[test]
fn a_suspended_reader_costs_those_who_remove_what_it_reads_one_short_wait() {
    let zone = Zone::new(|_| {});
    let (fs, reader) = (zone.open(4, false).expect("open"), zone.open(10, false).expect("open"));
    let cut = file(&fs, "cut", &[1; 9000]);
    pin(&zone, 10, 0, cut.ino);
    let waited = zone.does(|| {
        let start = schedule::clock();
        for round in 0..20 {
            fs.truncate(cut, 0, false).expect("truncate");
            assert_eq!(fs.pwrite(cut, &[round; 9000], 0, false), Ok(9000));
            fs.xattr_set(cut, b"user.a", Some(&[round; 5000]), 0, None).expect("an attribute");
        }
        schedule::clock() - start
    });
    assert!(waited < SECOND / 10, "40 removals took {waited} ns");
    assert!(fs.deferred().0 >= 20 * 3, "what it may still read is kept");
    [fs, reader].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10]);
}

#[test]
fn a_reader_that_finds_all_pins_taken_reads_at_once() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let read = file(&fs, "read", &[7; 9000]);
    (0..u64::from(sys::TFS_PINS)).for_each(|slot| pin(&zone, 4, slot, u64::MAX));
    let (bytes, waited) = zone.does(|| {
        let (start, mut bytes) = (schedule::clock(), [0; 9000]);
        assert_eq!(fs.pread(read, &mut bytes, 0), Ok(9000));
        (bytes, schedule::clock() - start)
    });
    assert!(bytes.iter().all(|byte| *byte == 7));
    assert!(waited < SECOND / 1000, "it took {waited} ns");
    assert!(fs.pin(read).is_err(), "there is no pin to be had");
    fs.abandon();
    zone.assert_clean(&[4]);
}

#[test]
fn what_an_older_program_kept_for_a_mapper_stays_its_until_that_lets_go() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let mapper = 10;
    let [mapping, other] = [mapper, 11].map(|m| zone.open(m, false).expect("open"));
    let cut = file(&fs, "cut", &[1; 20_000]);
    let free = fs.statfs().blocks_free;
    zone.maps(mapper, cut);
    zone.does(|| fs.truncate(cut, 0, false)).expect("truncate");
    assert_eq!(fs.deferred(), (6, vec![mapper]), "five blocks and a node are the mapper's still");
    // As a program left them that was killed while it waited to defer them.
    let map = zone.area.word(offset_of!(sys::tfs_super, map_start) as u64).expect("a super block") * BLOCK;
    for word in (map..).step_by(8).take((zone.area.size() / BLOCK / 8) as usize) {
        let bytes = zone.area.word(word).expect("the map").to_le_bytes();
        let then = bytes.map(|byte| if u32::from(byte) == sys::TFS_MAP_DEFERRED { 5 } else { byte });
        zone.store(word, u64::from_le_bytes(then));
    }
    zone.store(offset_of!(sys::tfs_super, deferred_members) as u64, 0);
    zone.store(Zone::member_area(4, offset_of!(sys::tfs_member_area, kept_for)), 1 << mapper);
    fs.abandon();
    zone.declare_dead(4);
    zone.does(|| other.recover_all()).expect("recovery");
    assert_eq!(other.deferred(), (6, vec![mapper]));
    assert_eq!(other.statfs().blocks_free, free);
    let (table, _) = zone.state(mapper);
    assert!(table.store_word(u64::from(mapper) * 256 + offset_of!(sys::tmb_member, pending) as u64, 0));
    zone.does(|| mapping.let_go());
    assert_eq!(other.deferred(), (0, vec![]));
    assert_eq!(other.statfs().blocks_free, free + 6);
    [mapping, other].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[mapper, 11]);
}

#[test]
fn an_attribute_that_was_replaced_by_a_killed_process_leaves_no_block_behind() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let (reader, owner) = (zone.open(10, false).expect("open"), zone.open(11, false).expect("open"));
    let named = file(&fs, "named", b"x");
    fs.xattr_set(named, b"user.a", Some(&[1; 5000]), 0, None).expect("an attribute");
    pin(&zone, 10, 0, named.ino);
    let deferred_lock = offset_of!(sys::tfs_super, deferred_lock) as u64;
    zone.hold(11, deferred_lock);
    hooks::KILLED.set(true);
    zone.does(|| fs.xattr_set(named, b"user.a", Some(&[2; 5000]), 0, None)).expect("an attribute");
    hooks::KILLED.set(false);
    zone.store(deferred_lock, 0);
    zone.does(|| drop(fs));
    zone.leave(4);
    [reader, owner].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[10, 11]);
}

#[test]
fn two_members_that_open_an_older_file_system_at_once_both_get_in() {
    for place in 1..60 {
        let zone = Zone::new(|_| {});
        let incompat = offset_of!(sys::tfs_super, incompat) as u64;
        zone.store(incompat, u64::from(sys::TFS_INCOMPAT_KEYED_HASH));
        let open = |member| {
            let fs = zone.open(member, false).unwrap_or_else(|e| panic!("member {member}: {e}"));
            fs.abandon();
        };
        let plan = Plan::new(0, vec![(0, place)], Vec::new(), true);
        zone.both(plan, || open(4), || open(10));
        assert_eq!(zone.area.word(incompat), Some(u64::from(sys::TFS_INCOMPAT_KNOWN)));
        zone.assert_clean(&[4, 10]);
    }
}

#[test]
fn a_recovery_that_was_killed_before_its_end_is_made_once_more() {
    let zone = Zone::new(|_| {});
    let (dead, fs) = (zone.open(1, false).expect("open"), zone.open(7, false).expect("open"));
    let half = file(&dead, "half", &[1; 9000]);
    dead.open_ref(half).expect("open");
    fs.unlink(ROOT, b"half", None).expect("unlink");
    dead.abandon();
    zone.declare_dead(1);
    // Other threads have all slots of the recovering member.
    let tx = |slot| Zone::member_area(7, slot * size_of::<sys::tfs_tx>());
    (0..sys::TFS_TX_RECOVERY as usize).for_each(|i| zone.store(tx(i), 1 << 32 | u64::from(sys::TFS_TX_OPEN)));
    hooks::KILLED.set(true);
    assert_eq!(zone.does(|| fs.recover_all()), Err(Errno::INTR));
    hooks::KILLED.set(false);
    (0..sys::TFS_TX_RECOVERY as usize).for_each(|i| zone.store(tx(i), 0));
    assert!(fs.getattr(half).is_ok(), "it could not be freed");
    zone.does(|| fs.recover_all()).expect("once more");
    assert_eq!(fs.getattr(half).err(), Some(Errno::STALE), "it was freed");
    fs.abandon();
    zone.assert_clean(&[7]);
}
