// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads that meet within a few accesses, and states that several deaths leave.

use core::cell::Cell;
use core::mem::offset_of;

use rustix::io::Errno;
use tombolo_files::fs::{Create, FileLock, Filesystem, Handle, ROOT};
use tombolo_files::sys;

use crate::Zone;
use crate::found::file;
use crate::plan::Plan;
use crate::schedule::{self, Ran, Schedule, Thread};

const REG: u32 = libc::S_IFREG | 0o644;
const BLOCK: u64 = sys::TFS_BLOCK as u64;
const SECOND: u64 = 1_000_000_000;
/// The last of the numbers that mkfs makes room for.
const LAST_INO: u64 = 255;

impl Zone {
    fn slot(&self, member: u32, field: usize) -> u64 {
        let (table, _) = self.state(member);
        table.word(u64::from(member) * 256 + field as u64).expect("a slot")
    }

    fn set_slot(&self, member: u32, field: usize, value: u64) {
        let (table, _) = self.state(member);
        assert!(table.store_word(u64::from(member) * 256 + field as u64, value));
    }

    /// The member's worker does what its doorbell asks for. False: nothing is asked for.
    fn serve_revoke(&self, fs: &Filesystem, member: u32) -> bool {
        let (field, reason) = (offset_of!(sys::tmb_member, pending), u64::from(sys::TMB_PENDING_REVOKE));
        let pending = self.slot(member, field);
        self.set_slot(member, field, pending & !reason);
        if pending & reason != 0 {
            fs.let_go();
        }
        pending & reason != 0
    }

    fn map_of(&self, block: u64) -> u64 {
        self.area.word(offset_of!(sys::tfs_super, map_start) as u64).expect("a super block") * BLOCK + block
    }

    fn set_map(&self, block: u64, byte: u8) {
        let (at, shift) = (self.map_of(block) & !7, self.map_of(block) % 8 * 8);
        let word = self.area.word(at).expect("the map");
        self.store(at, word & !(0xff << shift) | u64::from(byte) << shift);
    }

    /// Opens a transaction of a member that names inodes.
    fn begins(&self, member: u32, slot: usize, inodes: &[Handle]) {
        let tx = Zone::member_area(member, slot * size_of::<sys::tfs_tx>());
        for (i, inode) in inodes.iter().enumerate() {
            self.store(tx + (offset_of!(sys::tfs_tx, ino) + 8 * i) as u64, inode.ino);
        }
        self.store(tx, 1 << 32 | u64::from(sys::TFS_TX_OPEN));
    }

    pub fn run(&self, plan: Plan, bodies: Vec<Box<dyn FnOnce() + '_>>) -> Result<Ran, String> {
        let threads = bodies.into_iter().map(|body| Thread { body, after: None, process: None }).collect();
        Schedule::run(threads, [Zone::region(&self.map), Zone::region(&self.reader)], plan, |_| {})
    }
}

/// Leaves no free number but those that become free.
fn take_all_numbers(fs: &Filesystem) {
    for i in 0.. {
        let name = i.to_string();
        let made = fs.create(ROOT, Some(name.as_bytes()), &Create::mode(REG)).expect("create");
        if made.ino == LAST_INO {
            return;
        }
    }
}

#[test]
fn a_member_that_lets_go_at_any_moment_of_a_removal_leaves_no_block_deferred() {
    for place in 1.. {
        let zone = Zone::new(|_| {});
        let (fs, mapper) = (zone.open(4, false).expect("open"), zone.open(10, false).expect("open"));
        let (sparse, cut) = (file(&fs, "sparse", b""), file(&fs, "cut", &[1; 9000]));
        fs.truncate(sparse, BLOCK, false).expect("grow");
        [sparse, cut].into_iter().for_each(|f| zone.maps(10, f));
        // It lets this wait run out, so the removal does not wait for it.
        zone.does(|| fs.pwrite(sparse, b"x", 0, false)).expect("write");
        let ran = zone.run(
            Plan::new(0, vec![(0, place)], Vec::new(), true),
            vec![
                Box::new(|| fs.truncate(cut, 0, false).expect("truncate")),
                Box::new(|| _ = zone.serve_revoke(&mapper, 10)),
            ],
        );
        let ran = ran.expect("both end");
        while zone.does(|| zone.serve_revoke(&mapper, 10)) {}
        assert_eq!(fs.deferred(), (0, vec![]), "let go before access {place}");
        [fs, mapper].into_iter().for_each(Filesystem::abandon);
        if place > ran.steps[0] {
            break;
        }
    }
}

#[test]
fn a_member_that_lets_go_waits_for_no_member_that_is_suspended_while_it_defers_blocks() {
    let zone = Zone::new(|_| {});
    let [fs, mapper, owner] = [4, 10, 11].map(|m| zone.open(m, false).expect("open"));
    let (lock, holders) = (
        offset_of!(sys::tfs_super, deferred_lock) as u64,
        offset_of!(sys::tfs_super, deferred_members) as u64,
    );
    zone.hold(11, lock);
    zone.store(holders, 1 << 10);
    let (again, waited) = zone.does(|| {
        let start = schedule::clock();
        (mapper.let_go(), schedule::clock() - start)
    });
    assert!(again && waited < SECOND / 10, "it comes again: {again}; it waited {waited} ns");
    // The other member goes on, and this one lets go in its next round.
    zone.store(lock, 0);
    assert!(zone.does(|| zone.serve_revoke(&mapper, 10)), "no next round is asked for");
    assert_eq!(fs.deferred(), (0, vec![]));
    [fs, mapper, owner].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10, 11]);
}

#[test]
fn a_member_that_lets_go_waits_for_no_member_that_takes_the_lock_meanwhile_and_is_suspended() {
    let zone = Zone::new(|_| {});
    let lock = offset_of!(sys::tfs_super, deferred_lock) as u64;
    for place in 1.. {
        zone.reset();
        let [mapper, owner] = [10, 11].map(|m| zone.open(m, false).expect("open"));
        zone.store(offset_of!(sys::tfs_super, deferred_members) as u64, 1 << 10);
        let (waited, is_taken) = (std::cell::Cell::new(0), std::cell::Cell::new(false));
        let ran = zone.run(
            Plan::new(0, vec![(0, place)], Vec::new(), true),
            vec![
                Box::new(|| {
                    let start = schedule::clock();
                    mapper.let_go();
                    waited.set(schedule::clock() - start);
                }),
                Box::new(|| {
                    is_taken.set(zone.area.word(lock).is_some_and(|word| word & 0xff == 0));
                    if is_taken.get() {
                        zone.hold(11, lock);
                    }
                }),
            ],
        );
        let ran = ran.expect("both end");
        assert!(waited.get() < SECOND / 10, "taken before access {place}: it waited {} ns", waited.get());
        if is_taken.get() {
            zone.store(lock, 0);
        }
        [mapper, owner].into_iter().for_each(Filesystem::abandon);
        if place > ran.steps[0] {
            break;
        }
    }
}

/// Places among so many accesses: all at the beginning and at the end, and some in between, where a map is scanned.
fn some_of(steps: usize) -> impl Iterator<Item = usize> {
    (1..=steps + 1).filter(move |at| *at < 40 || at + 40 > steps || at % 16 == 0)
}

/// A member with deferred blocks of another file, and a file that it maps: `mapper` let a wait run out, so that no removal waits for it.
fn mapped(zone: &Zone, fs: &Filesystem, mapper: u32) -> Handle {
    let (sparse, old, cut) =
        (file(fs, "sparse", b""), file(fs, "old", &[1; 9000]), file(fs, "cut", &[2; 9000]));
    fs.truncate(sparse, BLOCK, false).expect("grow");
    [sparse, old, cut].into_iter().for_each(|f| zone.maps(mapper, f));
    zone.does(|| fs.pwrite(sparse, b"x", 0, false)).expect("write");
    zone.does(|| fs.truncate(old, 0, false)).expect("truncate");
    cut
}

#[test]
fn a_removal_waits_for_no_member_that_is_suspended_while_it_frees_deferred_blocks() {
    let zone = Zone::new(|_| {});
    let [fs, mapper, owner] = [4, 10, 11].map(|m| zone.open(m, false).expect("open"));
    let cut = mapped(&zone, &fs, 10);
    let before = fs.deferred().0;
    let lock = offset_of!(sys::tfs_super, deferred_lock) as u64;
    zone.hold(11, lock);
    let waited = zone.does(|| {
        let start = schedule::clock();
        fs.truncate(cut, 0, false).expect("truncate");
        schedule::clock() - start
    });
    assert!(waited < SECOND / 10, "it waited {waited} ns");
    assert_eq!(fs.deferred(), (before + 4, vec![10]), "three blocks and a node are the mapper's still");
    zone.store(lock, 0);
    while zone.does(|| zone.serve_revoke(&mapper, 10)) {}
    assert_eq!(fs.deferred(), (0, vec![]));
    [fs, mapper, owner].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10, 11]);
}

#[test]
fn a_death_is_recovered_beside_a_member_that_is_suspended_while_it_frees_deferred_blocks() {
    let zone = Zone::new(|_| {});
    let [fs, mapper, owner] = [4, 10, 11].map(|m| zone.open(m, false).expect("open"));
    mapped(&zone, &fs, 10);
    mapper.abandon();
    let lock = offset_of!(sys::tfs_super, deferred_lock) as u64;
    zone.hold(11, lock);
    zone.declare_dead(10);
    zone.does(|| fs.recover_all()).expect("recovery");
    assert!(fs.deferred().0 > 0, "the owner of the lock was looking at them");
    // It goes on, and does for the other one what that has asked for.
    zone.store(lock, 0);
    assert!(zone.does(|| zone.serve_revoke(&owner, 11)), "it is not asked");
    assert_eq!(fs.deferred(), (0, vec![]));
    [fs, owner].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 11]);
}

/// Recovers the death of a member that was cutting a file which member 10 maps, before an access of a member that frees deferred blocks: `frees`.
/// A recovery waits for no mapper. Returns the accesses of that member.
fn cut_meanwhile(zone: &Zone, place: usize, frees: u32, taken: bool) -> usize {
    const DEAD: u32 = 1;
    zone.reset();
    let [dead, fs, mapper, other] = [DEAD, 4, 10, 12].map(|m| zone.open(m, false).expect("open"));
    let cut = mapped(zone, &fs, 10);
    dead.abandon();
    zone.truncates(DEAD, 0, cut);
    zone.declare_dead(DEAD);
    if frees != 10 {
        // The deferred blocks are this member's, which lets go now.
        zone.store(offset_of!(sys::tfs_super, deferred_members) as u64, 1 << frees);
        zone.set_slot(frees, offset_of!(sys::tmb_member, pending), u64::from(sys::TMB_PENDING_REVOKE));
    }
    let begun = Zone::member_area(10, offset_of!(sys::tfs_member_area, revokes_begun));
    let block = fs.map(cut, 0, 1).expect("map").block;
    let is_late = std::cell::Cell::new(false);
    let recover = || {
        is_late.set(frees != 10 || zone.area.word(begun) == Some(1));
        fs.recover_all().expect("recovery");
    };
    let take = || {
        // From here on the thread is about to take the bits; the other one runs first.
        fs.size(cut);
        recover();
        let bits = zone.slot(10, offset_of!(sys::tmb_member, pending));
        zone.set_slot(10, offset_of!(sys::tmb_member, pending), 0);
        Ok::<_, Errno>(bits)
    };
    let at = (1, place);
    let ran = zone.run(
        Plan::new(usize::from(!taken), if taken { vec![(0, 1), at] } else { vec![at] }, Vec::new(), true),
        vec![
            Box::new(|| match taken {
                true => _ = mapper.take_pending(take).expect("the bits"),
                false => recover(),
            }),
            Box::new(|| _ = zone.serve_revoke(if frees == 10 { &mapper } else { &other }, frees)),
        ],
    );
    let ran = ran.expect("both end");
    let word = zone.area.word(zone.map_of(block) & !7).expect("the map");
    let byte = (word >> (zone.map_of(block) % 8 * 8)) as u8;
    let is_kept = u32::from(byte) == sys::TFS_MAP_DEFERRED;
    assert!(is_kept || !is_late.get() || place > ran.steps[1], "{byte:#x}, cut before access {place}");
    // The recovery asks all holders once more.
    while zone.does(|| zone.serve_revoke(&mapper, 10) || mapper.let_go() || zone.serve_revoke(&other, 12)) {}
    assert_eq!(fs.deferred(), (0, vec![]), "cut before access {place}");
    [fs, mapper, other].into_iter().for_each(Filesystem::abandon);
    ran.steps[1]
}

#[test]
fn blocks_that_a_member_maps_are_not_free_though_it_lets_go_of_earlier_ones_meanwhile() {
    let zone = Zone::new(|_| {});
    // Another thread of the mapper takes its pending bits, as that of a mount does, or none does.
    for taken in [false, true] {
        for place in some_of(cut_meanwhile(&zone, usize::MAX, 10, taken)) {
            cut_meanwhile(&zone, place, 10, taken);
        }
    }
}

#[test]
fn a_member_that_frees_deferred_blocks_frees_none_that_another_one_defers_meanwhile() {
    let zone = Zone::new(|_| {});
    for place in some_of(cut_meanwhile(&zone, usize::MAX, 12, false)) {
        cut_meanwhile(&zone, place, 12, false);
    }
}

#[test]
fn a_late_open_of_a_removed_file_leaves_the_new_file_with_its_number_open() {
    let zone = Zone::new(take_all_numbers);
    let opened = Create { open: true, ..Create::mode(REG) };
    // The number of accesses in which another member removes the file.
    let removes = |other: &Filesystem| other.unlink(ROOT, b"7", None).expect("unlink");
    let other = zone.open(20, false).expect("open");
    let plan = Plan::new(0, Vec::new(), Vec::new(), true);
    let removal = zone.run(plan, vec![Box::new(|| removes(&other))]).expect("an end").steps[0];
    other.abandon();
    let mut reused_late = 0;
    let late = std::cell::Cell::new(false);
    for (before, after) in (1..12).flat_map(|a| (a + 1..14).map(move |b| (a, b))) {
        zone.reset();
        let (fs, other) = (zone.open(4, false).expect("open"), zone.open(20, false).expect("open"));
        let (old, _) = fs.lookup(ROOT, b"7").expect("lookup");
        let plan = Plan::new(0, vec![(0, before), (1, removal + 1), (0, after)], Vec::new(), true);
        let made = std::cell::Cell::new(Handle::default());
        let bodies: Vec<Box<dyn FnOnce()>> = vec![
            Box::new(|| late.set(fs.open_ref(old) == Err(Errno::STALE))),
            Box::new(|| {
                removes(&other);
                made.set(fs.create(ROOT, Some(b"new"), &opened).expect("create"));
            }),
        ];
        zone.run(plan, bodies).expect("both end");
        reused_late += i32::from(late.get() && made.get().ino == old.ino);
        other.unlink(ROOT, b"new", None).expect("unlink");
        assert!(
            fs.getattr(made.get()).is_ok(),
            "freed though it is open, after {before} and {after} accesses"
        );
        [fs, other].into_iter().for_each(Filesystem::abandon);
    }
    assert!(reused_late > 0, "no open came too late for a number that was used again");
}

#[test]
fn a_damaged_tree_of_a_dead_member_ends_its_recovery_soon_and_costs_no_other_file_its_blocks() {
    const DEAD: u32 = 1;
    let zone = Zone::new(|_| {});
    let (dead, fs) = (zone.open(DEAD, false).expect("open"), zone.open(7, false).expect("open"));
    let damaged = ["one", "two"].map(|name| file(&dead, name, &[1; 9000]));
    let sound = file(&dead, "sound", &[2; 9000]);
    dead.abandon();
    // Nodes that refer to themselves, and blocks that the dead member had linked, and not yet counted as used.
    for inode in damaged {
        let field = zone.inode(inode, offset_of!(sys::tfs_inode, root));
        let node = zone.area.word(field).expect("a root") & ((1 << sys::TFS_HEIGHT_SHIFT) - 1);
        (0..u64::from(sys::TFS_FANOUT)).for_each(|i| zone.store(node * BLOCK + 8 * i, node));
        zone.store(field, 3 << sys::TFS_HEIGHT_SHIFT | node);
    }
    let run = fs.map(sound, 0, 2).expect("map");
    (run.block..run.block + run.count).for_each(|block| zone.set_map(block, DEAD as u8 + 1));
    zone.begins(DEAD, 0, &[damaged[0], damaged[1], sound]);
    zone.declare_dead(DEAD);
    let plan = Plan::new(0, Vec::new(), Vec::new(), true);
    let ran = zone.run(plan, vec![Box::new(|| fs.recover_all().expect("recovery"))]).expect("an end");
    assert!(ran.damage.iter().any(|what| what.starts_with("tree without end")), "{:?}", ran.damage);
    assert!(ran.steps[0] < 5_000_000, "{} accesses", ran.steps[0]);
    // Other files get the free blocks.
    let other = file(&fs, "other", b"");
    let mut at = 0;
    while let Ok(n) = fs.pwrite(other, &[3; 4096], at, false) {
        at += n as u64;
    }
    let mut bytes = [0; 9000];
    assert_eq!(fs.pread(sound, &mut bytes, 0), Ok(9000));
    assert!(bytes.iter().all(|byte| *byte == 2), "another file has its blocks");
    fs.abandon();
}

#[test]
fn members_that_recover_two_dead_ones_at_once_of_whom_one_recovered_the_other_lose_no_block() {
    const FIRST: u32 = 1;
    const SECOND: u32 = 2;
    let held = |member: u32| 1 << 32 | 1 << 8 | u64::from(member + 1);
    for place in 1.. {
        let zone = Zone::new(|_| {});
        let [first, second, one, other] = [FIRST, SECOND, 7, 8].map(|m| zone.open(m, false).expect("open"));
        let cut = file(&first, "cut", &[1; 20_000]);
        let run = one.map(cut, 0, 5).expect("map");
        [first, second].into_iter().for_each(Filesystem::abandon);
        // The first died in a truncation; the second when it had recovered that up to a block that it was about to unlink.
        zone.truncates(FIRST, 0, cut);
        zone.begins(SECOND, sys::TFS_TX_RECOVERY as usize, &[cut]);
        zone.set_map(run.block, SECOND as u8 + 1);
        zone.set_slot(FIRST, offset_of!(sys::tmb_member, recovery_lock), held(SECOND));
        [FIRST, SECOND].into_iter().for_each(|m| zone.declare_dead(m));
        let ran = zone.run(
            Plan::new(0, vec![(0, place)], Vec::new(), true),
            vec![
                Box::new(|| one.recover(SECOND).expect("recovery")),
                Box::new(|| other.recover(FIRST).expect("recovery")),
            ],
        );
        let ran = ran.expect("both end");
        assert_eq!(ran.damage, Vec::<String>::new());
        [one, other].into_iter().for_each(Filesystem::abandon);
        zone.assert_clean(&[7, 8]);
        if place > ran.steps[0] {
            break;
        }
    }
}

#[test]
fn a_recovery_leaves_the_block_count_of_a_file_that_a_living_member_writes_to_that_member() {
    const DEAD: u32 = 1;
    for place in 1.. {
        let zone = Zone::new(|_| {});
        let [dead, writer, other] = [DEAD, 7, 8].map(|m| zone.open(m, false).expect("open"));
        // It died at the end of the file's creation, when others could see the file.
        let made = file(&dead, "made", b"");
        dead.abandon();
        zone.begins(DEAD, 0, &[made]);
        zone.declare_dead(DEAD);
        let ran = zone.run(
            Plan::new(0, vec![(0, place)], Vec::new(), true),
            vec![
                Box::new(|| assert_eq!(writer.pwrite(made, &[1; 20_000], 0, false), Ok(20_000))),
                Box::new(|| other.recover(DEAD).expect("recovery")),
            ],
        );
        let ran = ran.expect("both end");
        // Five blocks and a node.
        assert_eq!(writer.getattr(made).expect("attributes").blocks, 6, "recovered before access {place}");
        [writer, other].into_iter().for_each(Filesystem::abandon);
        zone.assert_clean(&[7, 8]);
        if place > ran.steps[0] {
            break;
        }
    }
}

#[test]
fn a_member_that_comes_back_after_it_died_frozen_freezes_again() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    fs.freeze().expect("freeze");
    fs.abandon();
    zone.declare_dead(4);
    let fs = zone.open(4, false).expect("open");
    fs.freeze().expect("its former life's freeze has ended");
    fs.thaw().expect("frozen");
    fs.abandon();
    zone.assert_clean(&[4]);
}

#[test]
fn a_freeze_of_a_suspended_member_ends_and_that_member_learns_of_it() {
    const MINUTE: u64 = 60 * SECOND;
    let zone = Zone::new(|_| {});
    let [freezer, writer, other] = [4, 7, 8].map(|m| zone.open(m, false).expect("open"));
    let files = [file(&writer, "one", b"x"), file(&other, "two", b"x")];
    let waited = [Cell::new(0), Cell::new(0)];
    let change = |fs: &Filesystem, i: usize| {
        let start = schedule::clock();
        fs.pwrite(files[i], b"y", 0, false).expect("write");
        waited[i].set(schedule::clock() - start);
    };
    freezer.freeze().expect("freeze");
    let bodies: Vec<Box<dyn FnOnce() + '_>> =
        vec![Box::new(|| change(&writer, 0)), Box::new(|| change(&other, 1))];
    zone.run(Plan::new(0, Vec::new(), Vec::new(), true), bodies).expect("both end");
    for waited in &waited {
        assert!((MINUTE..MINUTE * 2).contains(&waited.get()), "{}", waited.get());
    }
    assert_eq!((freezer.renew_freeze(), freezer.thaw()), (Err(Errno::STALE), Err(Errno::STALE)));

    // Renewed, it lasts.
    freezer.freeze().expect("freeze");
    let bodies: Vec<Box<dyn FnOnce() + '_>> = vec![
        Box::new(|| change(&writer, 0)),
        Box::new(|| {
            for _ in 0..10 {
                (0..1000).for_each(|_| schedule::wait(10_000_000));
                freezer.renew_freeze().expect("still frozen");
            }
            freezer.thaw().expect("frozen all the time");
        }),
    ];
    zone.run(Plan::new(0, Vec::new(), Vec::new(), true), bodies).expect("both end");
    assert!(waited[0].get() > MINUTE + 30 * SECOND, "{}", waited[0].get());
    [freezer, writer, other].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 7, 8]);
}

/// A member that only maps files waits in page faults, and processes that are killed after some seconds and begun again wait for less than a minute each.
#[test]
fn who_tries_again_and_again_ends_the_freeze_of_a_suspended_member_too() {
    const MINUTE: u64 = 60 * SECOND;
    let zone = Zone::new(|_| {});
    let [freezer, mapper] = [4, 7].map(|m| zone.open(m, false).expect("open"));
    let h = file(&mapper, "one", b"x");
    let body = || {
        freezer.freeze().expect("freeze");
        let start = schedule::clock();
        while mapper.map_ref(h) == Err(Errno::AGAIN) && schedule::clock() - start < 10 * MINUTE {
            schedule::wait(10_000_000);
        }
        mapper.unmap_ref(h).expect("unmap");
        let waited = schedule::clock() - start;
        assert!((MINUTE..MINUTE * 2).contains(&waited), "{waited}");
        assert_eq!(freezer.thaw(), Err(Errno::STALE));

        // Each freeze has a minute of its own, also those of one process.
        for _ in 0..3 {
            freezer.freeze().expect("freeze");
            assert_eq!(mapper.map_ref(h), Err(Errno::AGAIN));
            freezer.thaw().expect("frozen all the time");
            (0..9000).for_each(|_| schedule::wait(10_000_000));
        }
    };
    zone.run(Plan::new(0, Vec::new(), Vec::new(), true), vec![Box::new(body)]).expect("it ends");
    [freezer, mapper].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 7]);
}

#[test]
fn a_dead_members_lock_is_taken_over_though_all_places_to_wait_are_taken() {
    let zone = Zone::new(|_| {});
    let [dead, alive, fs] = [1, 2, 7].map(|m| zone.open(m, false).expect("open"));
    let (busy, free) = (file(&fs, "busy", b"x"), file(&fs, "free", b"x"));
    dead.abandon();
    zone.hold(1, zone.inode(free, offset_of!(sys::tfs_inode, lock)));
    let table_lock = zone.inode(busy, offset_of!(sys::tfs_inode, entries));
    zone.hold(2, table_lock);
    zone.declare_dead(1);
    let lock = FileLock { end: !0, type_: sys::TFS_LK_WRITE, kind: sys::TFS_LK_POSIX, ..FileLock::default() };
    let mut bodies: Vec<Box<dyn FnOnce() + '_>> = Vec::new();
    for _ in 0..sys::TFS_QUEUE {
        bodies.push(Box::new(|| _ = fs.get_lock(busy, &lock).expect("there is none")));
    }
    bodies.push(Box::new(|| {
        // Until the others sleep in their places.
        (0..1000).for_each(|_| schedule::wait(0));
        fs.pwrite(free, b"y", 0, false).expect("write");
        zone.store(table_lock, 0);
    }));
    zone.run(Plan::new(0, Vec::new(), Vec::new(), true), bodies).expect("all end");
    [alive, fs].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[2, 7]);
}

#[test]
fn a_release_of_a_lock_that_waits_until_its_file_is_gone_changes_nothing_of_the_directory_with_its_number() {
    let zone = Zone::new(take_all_numbers);
    let [holder, fs, other] = [1, 4, 20].map(|m| zone.open(m, false).expect("open"));
    let (gone, _) = fs.lookup(ROOT, b"7").expect("lookup");
    let lock = FileLock { end: !0, type_: sys::TFS_LK_WRITE, kind: sys::TFS_LK_POSIX, ..FileLock::default() };
    fs.set_lock(gone, &lock).expect("a lock");
    // Another member has the file open, and is suspended with the lock of the file's lock table.
    holder.open_ref(gone).expect("open");
    other.unlink(ROOT, b"7", None).expect("unlink");
    let table_lock = zone.inode(gone, offset_of!(sys::tfs_inode, entries));
    zone.hold(1, table_lock);
    let (made, released) = (std::cell::Cell::new(Handle::default()), std::cell::Cell::new(Ok(())));
    let bodies: Vec<Box<dyn FnOnce() + '_>> = vec![
        Box::new(|| {
            let release = FileLock { type_: sys::TFS_LK_UNLOCK, ..lock };
            released.set(fs.set_lock(gone, &release));
        }),
        Box::new(|| {
            zone.store(table_lock, 0);
            holder.close_ref(gone).expect("close");
            let mode = Create::mode(libc::S_IFDIR | 0o755);
            made.set(other.create(ROOT, Some(b"dir"), &mode).expect("mkdir"));
            for name in [b"a", b"b", b"c"] {
                other.create(made.get(), Some(name), &Create::mode(REG)).expect("create");
            }
        }),
    ];
    let ran = zone.run(Plan::new(0, Vec::new(), Vec::new(), true), bodies).expect("both end");
    assert_eq!(made.get().ino, gone.ino, "the number is used again");
    assert_eq!(other.rmdir(ROOT, b"dir", None), Err(Errno::NOTEMPTY));
    assert_eq!((ran.damage, released.get()), (Vec::new(), Err(Errno::STALE)));
    [holder, fs, other].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[1, 4, 20]);
}

/// Wherever the release is held up, and however often the lock of the table was taken before: its word counts up to 255.
#[test]
fn a_late_release_of_a_lock_leaves_an_empty_directory_with_its_files_number_empty() {
    let lock = FileLock { end: !0, type_: sys::TFS_LK_WRITE, kind: sys::TFS_LK_POSIX, ..FileLock::default() };
    let release = FileLock { type_: sys::TFS_LK_UNLOCK, ..lock };
    let zone = Zone::new(take_all_numbers);
    // The first lock takes it three times.
    for (looks, place) in [0, 252, 253, 254].into_iter().flat_map(|looks| (1..40).map(move |at| (looks, at)))
    {
        zone.reset();
        let [fs, other] = [4, 20].map(|m| zone.open(m, false).expect("open"));
        let (gone, _) = fs.lookup(ROOT, b"7").expect("lookup");
        zone.does(|| {
            fs.set_lock(gone, &lock).expect("a lock");
            (0..looks).for_each(|_| _ = fs.get_lock(gone, &lock).expect("a look"));
        });
        let made = std::cell::Cell::new(Handle::default());
        let bodies: Vec<Box<dyn FnOnce() + '_>> = vec![
            Box::new(|| _ = fs.set_lock(gone, &release)),
            Box::new(|| {
                other.unlink(ROOT, b"7", None).expect("unlink");
                let mode = Create::mode(libc::S_IFDIR | 0o755);
                made.set(other.create(ROOT, Some(b"dir"), &mode).expect("mkdir"));
            }),
        ];
        let ran = zone.run(Plan::new(0, vec![(0, place)], Vec::new(), true), bodies).expect("both end");
        assert_eq!((ran.damage, made.get().ino), (Vec::new(), gone.ino), "the number is used again");
        let removed = zone.does(|| other.rmdir(ROOT, b"dir", None));
        assert_eq!(removed, Ok(()), "held up before access {place}, after {looks} looks");
        [fs, other].into_iter().for_each(Filesystem::abandon);
        zone.assert_clean(&[4, 20]);
    }
}

/// As many steps as there could be inodes, if the walk had no other end.
#[test]
fn a_rename_leaves_a_circle_of_directories_that_a_member_has_made_soon() {
    const MOST: usize = 2000;
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    let dir = |parent, name: &[u8]| {
        fs.create(parent, Some(name), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir")
    };
    let (x, y) = (dir(ROOT.into(), b"x"), dir(ROOT.into(), b"y"));
    let w = dir(x, b"w");
    fs.create(w, Some(b"f"), &Create::mode(REG)).expect("create");
    zone.store(zone.inode(x, offset_of!(sys::tfs_inode, parent)), w.ino);
    zone.store(offset_of!(sys::tfs_super, itable_inodes) as u64, 1 << 40);
    let ran = zone.run(
        Plan::new(0, Vec::new(), Vec::new(), true),
        vec![Box::new(|| assert_eq!(fs.rename((w, b"f"), (y, b"f"), 0), Err(Errno::UCLEAN)))],
    );
    let ran = ran.expect("it ends");
    assert_eq!(ran.damage.len(), 1, "{:?}", ran.damage);
    assert!(ran.steps[0] < MOST, "after {} accesses", ran.steps[0]);
    fs.abandon();
}
