// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims about locks across members and about waiting for them. tests/lock_model.rs explores the protocol itself.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, mpsc};

use rustix::io::Errno;
use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::fs::{self, Attr, Create, FileLock, Filesystem, Handle, Mkfs, ROOT};
use tombolo_files::fuse::abi::{self, Cursor};
use tombolo_files::fuse::locks::{Locks, Request};
use tombolo_files::{fsck, sys};

const REG: u32 = libc::S_IFREG | 0o644;
const AREA_AT: u64 = 2 << 20;

/// A zone's memory, with a member table that the tests write as its host would.
struct Zone {
    map: Arc<Map>,
    area: Area,
    damage: Arc<AtomicU64>,
}

impl Zone {
    fn new() -> Zone {
        let map = Arc::new(Map::memfd("waiting", AREA_AT + (64 << 20)).expect("memory"));
        let area = Area::in_map(&map, AREA_AT, 64 << 20, None).expect("an area");
        fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
        Zone { map, area, damage: Arc::default() }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let at = Area::in_map(&self.map, 0, self.map.size(), None).expect("all of it").base();
        assert!(offset % 8 == 0 && offset < self.map.size());
        // SAFETY: an aligned word of the mapping, which lives as long as self and is only accessed by atomics.
        unsafe { AtomicU64::from_ptr(at.add(offset as usize).cast()) }
    }

    fn member(&self, member: u32, field: usize) -> &AtomicU64 {
        self.word(4096 + u64::from(member) * 256 + field as u64)
    }

    fn set(&self, member: u32, epoch: u32, state: u32) {
        self.member(member, 0).store(u64::from(epoch) << 32 | u64::from(state), SeqCst);
    }

    fn open(&self, member: u32) -> Filesystem {
        self.set(member, 1, sys::TMB_MEMBER_ACTIVE);
        let area = Area::in_map(
            &self.map,
            AREA_AT,
            self.area.size(),
            Some((4096, Incarnation { member, epoch: 1 })),
        );
        let damage = Arc::clone(&self.damage);
        let log = Box::new(move |what: &str, a, b| {
            eprintln!("damage: {what} ({a:#x}, {b:#x})");
            damage.fetch_add(1, SeqCst);
        });
        Filesystem::open_with(area.expect("an area"), log).expect("open")
    }

    fn declare_dead(&self, member: u32) {
        self.set(member, 2, sys::TMB_MEMBER_DEAD);
    }

    /// The word of an inode's lock; all inodes of these tests lie in the table's first blocks.
    fn lock_of(&self, ino: Handle) -> &AtomicU64 {
        let data_start = self.area.word(core::mem::offset_of!(sys::tfs_super, data_start) as u64);
        let table = AREA_AT + data_start.expect("a super block") * 4096;
        self.word(table + ino.ino * 256 + core::mem::offset_of!(sys::tfs_inode, lock) as u64)
    }

    /// The word of the lock of a file's lock table: the words after 'entries'.
    fn table_lock_of(&self, ino: Handle) -> &AtomicU64 {
        let before =
            core::mem::offset_of!(sys::tfs_inode, lock) - core::mem::offset_of!(sys::tfs_inode, entries);
        // SAFETY: a word of the same inode, in the mapping.
        unsafe { AtomicU64::from_ptr(self.lock_of(ino).as_ptr().wrapping_byte_sub(before)) }
    }

    /// No damage was counted; the caller has closed the file system.
    fn assert_undamaged(&self) {
        assert_eq!(self.damage.load(SeqCst), 0, "damage was reported");
        assert_eq!(self.area.word(core::mem::offset_of!(sys::tfs_super, errors) as u64), Some(0));
        fsck::expect_clean(&self.area, &mut |_, _, _| {}).expect("clean");
    }
}

fn held_by(member: u32) -> u64 {
    1 << 32 | u64::from(sys::TFS_LOCK_HELD) | u64::from(member + 1)
}

fn offered_to(member: u32) -> u64 {
    let turn = u64::from(member + 1) << 16;
    1 << 32 | u64::from(sys::TFS_LOCK_OFFERED) | turn | u64::from(member + 1)
}

fn file(fs: &Filesystem, name: &str) -> Handle {
    fs.create(ROOT, Some(name.as_bytes()), &Create::mode(REG)).expect("create")
}

fn chmod(fs: &Filesystem, ino: Handle) -> fs::Result<()> {
    fs.setattr(ino, sys::TFS_SET_MODE, &Attr { mode: 0o600, ..Attr::default() })
}

fn range(owner: u64, type_: u32) -> FileLock {
    let kind = sys::TFS_LK_POSIX;
    FileLock { owner, start: owner * 10, end: owner * 10 + 5, type_, kind, ..FileLock::default() }
}

fn flock(owner: u64, type_: u32) -> FileLock {
    FileLock { owner, start: 0, end: !0, type_, kind: sys::TFS_LK_FLOCK, ..FileLock::default() }
}

#[test]
fn more_lockers_than_transaction_slots_and_an_appender_wait_for_each_other_only_briefly() {
    let zone = Zone::new();
    let fs = zone.open(0);
    let ino = file(&fs, "f");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for who in 0..u64::from(sys::TFS_TX_SLOTS) + 8 {
            let (fs, stop) = (&fs, &stop);
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    fs.set_lock(ino, &range(who, sys::TFS_LK_WRITE)).expect("a lock");
                    fs.set_lock(ino, &range(who, sys::TFS_LK_UNLOCK)).expect("given back");
                }
            });
        }
        for _ in 0..200 {
            fs.append(ino, &[1; 4096], false).expect("append");
        }
        stop.store(true, SeqCst);
    });
    assert_eq!(fs.size(ino), 200 * 4096);
    drop(fs);
    zone.assert_undamaged();
}

#[test]
fn a_member_that_writes_without_pause_lets_another_change_the_file() {
    let zone = Zone::new();
    let (writer, other) = (zone.open(0), zone.open(1));
    let ino = file(&writer, "f");
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![1; 8 << 20];
            while !stop.load(SeqCst) {
                writer.pwrite(ino, &bytes, 0, false).expect("write");
                writes.fetch_add(1, SeqCst);
            }
        });
        while writes.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        let before = writes.load(SeqCst);
        for _ in 0..20 {
            chmod(&other, ino).expect("chmod");
        }
        let passed = writes.load(SeqCst) - before;
        stop.store(true, SeqCst);
        // Some two each, and more where a busy host runs the waiter so late that its offer lapses.
        assert!(passed < 20 * 100, "{passed} writes came before 20 changes of the mode");
    });
    drop((writer, other));
    zone.assert_undamaged();
}

#[test]
fn fallocate_gives_others_their_turn_between_its_steps() {
    let zone = Zone::new();
    let fs = zone.open(0);
    let ino = file(&fs, "f");
    let (step, steps) = (4 << 20, 8);
    let taken = || zone.lock_of(ino).load(SeqCst) >> sys::TFS_LOCK_COUNT.trailing_zeros();
    let before = taken();
    fs.fallocate(ino, 0, 0, steps * step).expect("fallocate");
    assert_eq!(taken() - before, steps, "the lock is taken for each step");
    assert_eq!(fs.size(ino), steps * step);
    drop(fs);
    zone.assert_undamaged();
}

#[test]
fn a_member_that_is_suspended_with_a_lock_makes_others_wait_and_is_no_damage() {
    let zone = Zone::new();
    let (suspended, mut other) = (zone.open(0), zone.open(1));
    let ino = file(&suspended, "f");
    let (told, tells) = mpsc::channel();
    let told = std::sync::Mutex::new(told);
    other.tell_waits_to(Box::new(move |member, _, answers, _| {
        // The receiver ends after the first message.
        let _ = told.lock().expect("no panic").send((member, answers));
    }));
    zone.lock_of(ino).store(held_by(0), SeqCst);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| chmod(&other, ino));
        // It is reported as not answering, since no thread takes its pending bits.
        assert_eq!(tells.recv().expect("it is told"), (0, false));
        assert!(!waiter.is_finished());
        assert_eq!(zone.lock_of(ino).load(SeqCst) & 0xff, 1, "the lock is still its own");
        zone.lock_of(ino).store(0, SeqCst);
        waiter.join().expect("no panic").expect("it went on once the lock was given back");
    });
    drop((suspended, other));
    zone.assert_undamaged();
}

#[test]
fn a_wait_ends_when_the_waiter_is_to_end() {
    let zone = Zone::new();
    let (suspended, other) = (zone.open(0), zone.open(1));
    let ino = file(&suspended, "f");
    zone.lock_of(ino).store(held_by(0), SeqCst);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..3).map(|_| scope.spawn(|| chmod(&other, ino))).collect();
        let waits = zone.lock_of(ino).as_ptr().wrapping_add(1);
        // SAFETY: the lock's second word, in the mapping like the first.
        let waits = unsafe { AtomicU64::from_ptr(waits) };
        while waits.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        other.end_waits();
        for waiter in waiters {
            assert_eq!(waiter.join().expect("no panic"), Err(Errno::INTR));
        }
        assert_eq!(waits.load(SeqCst), 0, "a member still waits");
    });
    zone.lock_of(ino).store(0, SeqCst);
    drop((suspended, other));
    zone.assert_undamaged();
}

#[test]
fn a_lock_that_was_offered_to_a_member_that_does_not_come_is_taken_by_who_waits() {
    let zone = Zone::new();
    let (here, idle, gone) = (zone.open(0), zone.open(1), zone.open(2));
    let ino = file(&here, "f");
    for to in [1, 2] {
        zone.lock_of(ino).store(offered_to(to), SeqCst);
        if to == 2 {
            gone_away(&zone);
        }
        chmod(&here, ino).expect("chmod");
        let word = zone.lock_of(ino).load(SeqCst);
        assert_eq!((word & 0xff, word >> 16 & 0xff), (0, u64::from(to) + 1), "free, and its turn is over");
    }
    // Offered to this member; any of its threads may take it.
    zone.lock_of(ino).store(offered_to(0), SeqCst);
    chmod(&here, ino).expect("chmod");
    gone.abandon();
    drop((here, idle));
    zone.assert_undamaged();
}

fn gone_away(zone: &Zone) {
    zone.declare_dead(2);
}

#[test]
fn recoveries_that_meet_end() {
    // One member recovers member 1 and is forgetting its open references; another, which recovers member 2, needs a lock that 1
    // held.
    let zone = Zone::new();
    let (first, second, busy, other) = (zone.open(1), zone.open(2), zone.open(5), zone.open(6));
    let ino = file(&first, "f");
    second.open_ref(ino).expect("open");
    other.unlink(ROOT, b"f", None).expect("unlink");
    first.abandon();
    second.abandon();
    zone.lock_of(ino).store(held_by(1), SeqCst);
    zone.declare_dead(1);
    zone.declare_dead(2);
    let recovered = core::mem::offset_of!(sys::tmb_member, recovered_epoch);
    let recovery_lock = core::mem::offset_of!(sys::tmb_member, recovery_lock);
    zone.member(1, recovered).store(2, SeqCst);
    zone.member(1, recovery_lock).store(held_by(5), SeqCst);
    other.recover(2).expect("it waits for no recovery that is done");
    assert_eq!(other.getattr(ino).err(), Some(Errno::STALE), "the orphan was freed");
    zone.member(1, recovery_lock).store(0, SeqCst);
    drop((busy, other));
    zone.assert_undamaged();
}

#[test]
fn who_waits_for_a_recovery_goes_on_once_the_transactions_are_recovered() {
    // The recoverer forgets open references then, which may need a lock that the waiter has.
    let zone = Zone::new();
    let (dead, recoverer, other) = (zone.open(1), zone.open(5), zone.open(6));
    let ino = file(&dead, "f");
    dead.abandon();
    zone.table_lock_of(ino).store(held_by(1), SeqCst);
    zone.declare_dead(1);
    let recovered = core::mem::offset_of!(sys::tmb_member, recovered_epoch);
    let recovery_lock = core::mem::offset_of!(sys::tmb_member, recovery_lock);
    zone.member(1, recovery_lock).store(held_by(5), SeqCst);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            tell.send(rustix::thread::gettid()).expect("the test lives");
            other.get_lock(ino, &range(1, sys::TFS_LK_WRITE)).map(|found| found.type_)
        });
        let thread = told.recv().expect("its number");
        let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
        // It has nothing to sleep for but the recovery.
        wait_until(|| std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S ")));
        assert!(!waiter.is_finished(), "it did not wait");
        zone.member(1, recovered).store(2, SeqCst);
        wait_until(|| waiter.is_finished());
        let has_gone_on = waiter.is_finished();
        zone.member(1, recovery_lock).store(0, SeqCst);
        assert_eq!(waiter.join().expect("no panic"), Ok(sys::TFS_LK_UNLOCK));
        assert!(has_gone_on, "it waited for the whole recovery");
    });
    drop((recoverer, other));
    zone.assert_undamaged();
}

#[test]
fn two_shared_flocks_that_become_exclusive_do_not_wait_for_each_other() {
    let zone = Zone::new();
    let (a, b) = (zone.open(0), zone.open(1));
    let ino = file(&a, "f");
    a.set_lock(ino, &flock(1, sys::TFS_LK_READ)).expect("shared");
    b.set_lock(ino, &flock(1, sys::TFS_LK_READ)).expect("shared");
    // The first releases its own, and waits; so the second gets it.
    assert_eq!(a.set_lock(ino, &flock(1, sys::TFS_LK_WRITE)), Err(Errno::AGAIN));
    b.set_lock(ino, &flock(1, sys::TFS_LK_WRITE)).expect("exclusive");
    b.set_lock(ino, &flock(1, sys::TFS_LK_WRITE)).expect("once more");
    assert_eq!(a.set_lock(ino, &flock(1, sys::TFS_LK_WRITE)), Err(Errno::AGAIN));
    b.set_lock(ino, &flock(1, sys::TFS_LK_UNLOCK)).expect("given back");
    a.set_lock(ino, &flock(1, sys::TFS_LK_WRITE)).expect("exclusive");
    drop((a, b));
    zone.assert_undamaged();
}

#[test]
fn any_number_of_lockers_can_wait() {
    let zone = Zone::new();
    let fs = zone.open(0);
    let ino = file(&fs, "f");
    let whole = |owner| FileLock { start: 0, end: !0, ..range(owner, sys::TFS_LK_WRITE) };
    fs.set_lock(ino, &flock(1000, sys::TFS_LK_WRITE)).expect("a lock");
    fs.set_lock(ino, &whole(1000)).expect("a lock");
    let waits: Vec<_> = (0..200u64)
        .map(|owner| {
            let lock = if owner % 2 == 0 { flock(owner, sys::TFS_LK_WRITE) } else { whole(owner) };
            assert_eq!(fs.set_lock(ino, &lock), Err(Errno::AGAIN));
            fs.wait_lock(ino, &lock).expect("it can wait")
        })
        .collect();
    // A waiter without a slot also finds its deadlock.
    let other = file(&fs, "g");
    fs.set_lock(other, &whole(1)).expect("a lock");
    assert_eq!(fs.wait_lock(other, &whole(1000)).err(), Some(Errno::DEADLK));
    assert!(waits.iter().any(|wait| !wait.is_seen()));
    waits.into_iter().for_each(|wait| fs.end_wait(wait));
    assert!(fs.wait_lock(ino, &whole(7)).expect("a place is free").is_seen());
    drop(fs);
    zone.assert_undamaged();
}

#[test]
fn the_lock_that_is_named_as_in_the_way_is_the_one_that_ext4_names() {
    let zone = Zone::new();
    let (a, b) = (zone.open(0), zone.open(1));
    let ino = file(&a, "f");
    let at = |owner, start, end, type_| FileLock { start, end, ..range(owner, type_) };
    let (read, unlock) = (sys::TFS_LK_READ, sys::TFS_LK_UNLOCK);
    // Owner 1 comes first, takes its lower range last, and owner 2 lies below both.
    a.set_lock(ino, &at(1, 100, 109, read)).expect("a lock");
    b.set_lock(ino, &at(2, 0, 9, read)).expect("a lock");
    a.set_lock(ino, &at(1, 50, 59, read)).expect("a lock");
    let found = |from| b.get_lock(ino, &at(3, from, 200, sys::TFS_LK_WRITE)).expect("asked");
    assert_eq!((found(0).owner, found(0).start), (1, 50));
    assert_eq!((found(60).owner, found(60).start), (1, 100));
    // A range that is split keeps its owner's place; an owner that releases all and locks again gets a new one.
    a.set_lock(ino, &at(1, 103, 105, unlock)).expect("given back");
    assert_eq!((found(60).start, found(104).start), (100, 106));
    a.set_lock(ino, &at(1, 0, 200, unlock)).expect("given back");
    a.set_lock(ino, &at(1, 50, 59, read)).expect("a lock");
    assert_eq!((found(0).owner, found(0).start), (2, 0));
    drop((a, b));
    zone.assert_undamaged();
}

/// Waits, bounded, for other threads; if they never come, the caller's next claim fails.
fn wait_until(mut test: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !test() && start.elapsed() < std::time::Duration::from_secs(300) {
        std::thread::yield_now();
    }
}

#[test]
fn a_rename_that_waits_for_a_suspended_members_file_holds_up_no_rename_of_another_file() {
    let zone = Zone::new();
    let (suspended, one, other) = (zone.open(0), zone.open(1), zone.open(2));
    let [a, b] = ["a", "b"].map(|name| {
        one.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir")
    });
    let (held, free) = (file(&one, "held"), file(&one, "free"));
    for (name, dir) in [("held", a), ("free", b)] {
        one.rename((ROOT, name.as_bytes()), (dir, name.as_bytes()), 0).expect("rename");
    }
    zone.lock_of(held).store(held_by(0), SeqCst);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| one.rename((a, b"held"), (ROOT, b"held"), 0));
        // SAFETY: the lock's second word, in the mapping like the first.
        let waits = unsafe { AtomicU64::from_ptr(zone.lock_of(held).as_ptr().wrapping_add(1)) };
        wait_until(|| waits.load(SeqCst) != 0);
        let renamed = scope.spawn(|| other.rename((b, b"free"), (ROOT, b"free"), 0));
        wait_until(|| renamed.is_finished());
        let (done, waited) = (renamed.is_finished(), !waiter.is_finished());
        zone.lock_of(held).store(0, SeqCst);
        assert!(done, "it waits with the other one");
        assert!(waited, "no member waits for the file that is held");
        renamed.join().expect("no panic").expect("renamed");
        waiter.join().expect("no panic").expect("renamed once the file was given back");
    });
    assert_eq!(one.lookup(ROOT, b"free").map(|found| found.0), Ok(free));
    drop((suspended, one, other));
    zone.assert_undamaged();
}

/// Several kinds of operations, each on a file of its own, all in one directory.
#[test]
fn more_threads_than_transaction_slots_that_wait_for_a_suspended_member_leave_others_room() {
    type Operation = fn(&Filesystem, Handle, &str) -> fs::Result<()>;
    const OPERATIONS: [Operation; 6] = [
        |fs, file, _| chmod(fs, file),
        |fs, file, _| fs.pwrite(file, b"x", 0, false).map(drop),
        |fs, file, _| fs.xattr_set(file, b"user.a", Some(b"x"), 0, None),
        |fs, _, name| fs.unlink(ROOT, name.as_bytes(), None),
        |fs, file, name| fs.link(ROOT, format!("{name}-link").as_bytes(), file),
        |fs, _, name| fs.rename((ROOT, name.as_bytes()), (ROOT, format!("{name}-new").as_bytes()), 0),
    ];
    const FILES: usize = 48;
    let zone = Zone::new();
    let (suspended, fs) = (zone.open(0), zone.open(1));
    let names: Vec<String> = (0..FILES).map(|i| format!("f{i}")).collect();
    let files: Vec<Handle> = names.iter().map(|name| file(&fs, name)).collect();
    files.iter().for_each(|file| zone.lock_of(*file).store(held_by(0), SeqCst));
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..FILES)
            .map(|i| {
                let (fs, names, files) = (&fs, &names, &files);
                scope.spawn(move || OPERATIONS[i % OPERATIONS.len()](fs, files[i], &names[i]))
            })
            .collect();
        // SAFETY: the lock's second word, in the mapping like the first.
        let waits =
            |file: &Handle| unsafe { AtomicU64::from_ptr(zone.lock_of(*file).as_ptr().wrapping_add(1)) };
        wait_until(|| files.iter().all(|file| waits(file).load(SeqCst) != 0));
        let other = scope.spawn(|| file(&fs, "other"));
        wait_until(|| other.is_finished());
        let done = other.is_finished();
        files.iter().for_each(|file| zone.lock_of(*file).store(0, SeqCst));
        assert!(done, "a file in the same directory is not made meanwhile");
        for waiter in waiters {
            waiter.join().expect("no panic").expect("done once the member has gone on");
        }
    });
    drop((suspended, fs));
    zone.assert_undamaged();
}

/// More threads than a member has transactions.
const WAITERS: usize = sys::TFS_TX_SLOTS as usize + 8;

/// [`WAITERS`] threads of a member wait for `locks`, which another member holds. Meanwhile one more thread of the member changes a file whose lock is free.
fn others_go_on_while_all_wait_for(locks: &[&AtomicU64], fs: &Filesystem, wait: impl Fn(usize) + Sync) {
    let free = file(fs, "free");
    let begun = AtomicU64::new(0);
    locks.iter().for_each(|lock| lock.store(held_by(0), SeqCst));
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..WAITERS)
            .map(|i| {
                let (wait, begun) = (&wait, &begun);
                scope.spawn(move || {
                    begun.fetch_add(1, SeqCst);
                    wait(i);
                })
            })
            .collect();
        let other = scope.spawn(|| {
            let mut after = 0;
            while after < 5000 {
                chmod(fs, free).expect("changed");
                std::thread::yield_now();
                after += u32::from(begun.load(SeqCst) == WAITERS as u64);
            }
        });
        wait_until(|| other.is_finished());
        let (done, waited) = (other.is_finished(), waiters.iter().all(|waiter| !waiter.is_finished()));
        locks.iter().for_each(|lock| lock.store(0, SeqCst));
        assert!(done, "it waits with the others");
        assert!(waited, "one does not wait for the suspended member");
    });
}

#[test]
fn threads_that_wait_for_a_suspended_member_to_make_room_for_inodes_leave_others_room() {
    let zone = Zone::new();
    let (suspended, fs) = (zone.open(0), zone.open(1));
    let super_block = |field: usize| zone.word(AREA_AT + field as u64);
    let inodes = super_block(core::mem::offset_of!(sys::tfs_super, itable_inodes)).load(SeqCst);
    // Two are left: the one that others_go_on_while_all_wait_for() makes, and number 0, which is none.
    for i in 2..inodes - 1 {
        file(&fs, &format!("f{i}"));
    }
    let lock = super_block(core::mem::offset_of!(sys::tfs_super, itable_lock));
    others_go_on_while_all_wait_for(&[lock], &fs, |i| {
        file(&fs, &format!("new{i}"));
    });
    drop((suspended, fs));
    zone.assert_undamaged();
}

#[test]
fn threads_that_wait_for_a_suspended_member_to_make_room_for_locks_leave_others_room() {
    let zone = Zone::new();
    let (suspended, fs) = (zone.open(0), zone.open(1));
    let written = file(&fs, "written");
    others_go_on_while_all_wait_for(&[zone.lock_of(written)], &fs, |i| {
        fs.set_lock(written, &range(i as u64, sys::TFS_LK_WRITE)).expect("a lock");
    });
    drop((suspended, fs));
    zone.assert_undamaged();
}

#[test]
fn threads_that_wait_for_a_suspended_member_to_free_removed_files_leave_others_room() {
    let zone = Zone::new();
    let (suspended, fs) = (zone.open(0), zone.open(1));
    let name = |i: usize| format!("removed{i}");
    let removed: Vec<Handle> = (0..WAITERS).map(|i| file(&fs, &name(i))).collect();
    let free = fs.statfs().blocks_free;
    for (i, removed) in removed.iter().enumerate() {
        fs.open_ref(*removed).expect("open");
        fs.append(*removed, b"x", false).expect("append");
        fs.unlink(ROOT, name(i).as_bytes(), None).expect("unlink");
    }
    let locks: Vec<_> = removed.iter().map(|removed| zone.lock_of(*removed)).collect();
    others_go_on_while_all_wait_for(&locks, &fs, |i| fs.close_ref(removed[i]).expect("close"));
    assert_eq!(fs.statfs().blocks_free, free, "the files are freed once the member has gone on");
    drop((suspended, fs));
    zone.assert_undamaged();
}

#[test]
fn an_append_waits_for_no_lock_of_a_range() {
    let zone = Zone::new();
    let (locker, writer) = (zone.open(0), zone.open(1));
    let ino = file(&locker, "f");
    locker.set_lock(ino, &range(1, sys::TFS_LK_WRITE)).expect("a lock");
    // A member is suspended with the lock of the lock table.
    let table = zone.table_lock_of(ino);
    table.store(held_by(0), SeqCst);
    assert_eq!(writer.append(ino, b"x", false), Ok((1, 0)));
    chmod(&writer, ino).expect("chmod");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| writer.get_lock(ino, &range(2, sys::TFS_LK_WRITE)));
        // SAFETY: the lock's second word.
        let waits = unsafe { AtomicU64::from_ptr(table.as_ptr().wrapping_add(1)) };
        wait_until(|| waits.load(SeqCst) != 0);
        assert!(!waiter.is_finished());
        table.store(0, SeqCst);
        assert_eq!(waiter.join().expect("no panic").map(|found| found.type_), Ok(sys::TFS_LK_UNLOCK));
    });
    drop((locker, writer));
    zone.assert_undamaged();
}

/// A mount's request for a whole file's lock (`fuse_lk_in`), through an open file.
fn request_through(handle: u64, owner: u64, type_: i32, flags: u32) -> Request {
    let mut body = Vec::new();
    for word in [handle, owner, 0, i64::MAX as u64] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    for word in [type_ as u32, 1, flags] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    Request::parse(Cursor(&body)).expect("a request")
}

fn request(owner: u64, type_: i32) -> Request {
    request_through(owner, owner, type_, 0)
}

/// One thread of a process closes a descriptor of the file while another one takes a lock through a second descriptor, which it then closes.
#[test]
fn a_lock_of_a_mount_that_is_taken_during_a_close_is_released_by_the_next_close() {
    let zone = Zone::new();
    let (suspended, mounted) = (zone.open(0), zone.open(1));
    let (locked, locks) = (file(&mounted, "locked"), Locks::default());
    let inode = zone.lock_of(locked);
    // The first lock makes the table, for which it takes the inode's lock.
    inode.store(held_by(0), SeqCst);
    std::thread::scope(|scope| {
        let set = scope.spawn(|| locks.set(&mounted, locked, &request(1, libc::F_WRLCK)));
        // SAFETY: the lock's second word.
        let waits = unsafe { AtomicU64::from_ptr(inode.as_ptr().wrapping_add(1)) };
        wait_until(|| waits.load(SeqCst) != 0);
        locks.flush(&mounted, locked, 1, 1).expect("the first close");
        inode.store(0, SeqCst);
        set.join().expect("no panic").expect("a lock");
    });
    locks.flush(&mounted, locked, 1, 1).expect("the second close");
    let found = mounted.get_lock(locked, &range(2, sys::TFS_LK_WRITE)).map(|found| found.type_);
    assert_eq!(found, Ok(sys::TFS_LK_UNLOCK), "no process is left that could release the lock");
    drop((suspended, mounted));
    zone.assert_undamaged();
}

/// The kernel does not wait for the RELEASE of an open file: close(2) returns, and the process opens and locks the file again.
#[test]
fn a_late_release_of_an_open_file_of_a_mount_takes_no_lock_that_was_taken_since() {
    let zone = Zone::new();
    let mounted = zone.open(0);
    let (locked, locks) = (file(&mounted, "locked"), Locks::default());
    let set = |handle, owner, type_| locks.set(&mounted, locked, &request_through(handle, owner, type_, 0));
    assert_eq!(set(1, 7, libc::F_WRLCK), Ok(()));
    locks.flush(&mounted, locked, 1, 7).expect("a close");
    assert_eq!(set(2, 7, libc::F_WRLCK), Ok(()));
    locks.release(&mounted, 1).expect("the RELEASE of what was closed");
    assert_eq!(set(3, 8, libc::F_WRLCK), Err(Errno::AGAIN), "the process was told that it has the lock");
    locks.flush(&mounted, locked, 2, 7).expect("a close");
    locks.release(&mounted, 2).expect("its RELEASE");
    assert_eq!(set(3, 8, libc::F_WRLCK), Ok(()));
    drop(mounted);
    zone.assert_undamaged();
}

/// The kernel gives an open file the number of one that was closed a moment ago.
#[test]
fn the_flock_of_an_open_file_of_a_mount_is_not_that_of_an_earlier_one_with_its_number() {
    let zone = Zone::new();
    let mounted = zone.open(0);
    let (locked, locks) = (file(&mounted, "locked"), Locks::default());
    let flock = |handle, owner, type_| {
        locks.set(&mounted, locked, &request_through(handle, owner, type_, abi::LK_FLOCK))
    };
    assert_eq!(flock(1, 7, libc::F_WRLCK), Ok(()));
    let mut second = flock(2, 7, libc::F_WRLCK);
    locks.release(&mounted, 1).expect("the RELEASE of the first open file");
    if second == Err(Errno::AGAIN) {
        second = flock(2, 7, libc::F_WRLCK);
    }
    assert_eq!(second, Ok(()), "no other open file is left");
    assert_eq!(
        flock(3, 8, libc::F_WRLCK),
        Err(Errno::AGAIN),
        "the second open file was told that it has the lock"
    );
    locks.release(&mounted, 2).expect("its RELEASE");
    assert_eq!(flock(3, 8, libc::F_WRLCK), Ok(()));
    drop(mounted);
    zone.assert_undamaged();
}

#[test]
fn a_request_for_a_lock_of_a_mount_does_not_fail_because_of_an_open_file_that_was_closed() {
    let zone = Zone::new();
    let mounted = zone.open(0);
    let (locked, locks) = (file(&mounted, "locked"), Locks::default());
    let flock =
        |handle| locks.set(&mounted, locked, &request_through(handle, handle, libc::F_WRLCK, abi::LK_FLOCK));
    assert_eq!(flock(1), Ok(()));
    locks.flush(&mounted, locked, 1, 7).expect("the close");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| flock(2));
        locks.release(&mounted, 1).expect("the RELEASE");
        assert_eq!(asked.join().expect("no panic"), Ok(()));
    });
    locks.flush(&mounted, locked, 2, 7).expect("a close of one of two descriptors");
    assert_eq!(flock(3), Err(Errno::AGAIN), "the other descriptor has the lock");
    drop(mounted);
    zone.assert_undamaged();
}

#[test]
fn a_lock_of_a_mount_that_waits_for_a_suspended_member_holds_up_no_lock_of_another_file() {
    let zone = Zone::new();
    let (suspended, mounted) = (zone.open(0), zone.open(1));
    let (held, free) = (file(&mounted, "held"), file(&mounted, "free"));
    let locks = Locks::default();
    let answers = Arc::new(tempfile::tempfile().expect("a file"));
    locks.set(&mounted, held, &request(1, libc::F_WRLCK)).expect("a lock");
    assert!(locks.set_or_wait(&mounted, (&answers, 7), held, &request(2, libc::F_WRLCK)).is_none());
    let table = zone.table_lock_of(held);
    table.store(held_by(0), SeqCst);
    let (done, answered) = std::thread::scope(|scope| {
        scope.spawn(|| locks.serve(&mounted));
        // SAFETY: the lock's second word.
        let waits = unsafe { AtomicU64::from_ptr(table.as_ptr().wrapping_add(1)) };
        wait_until(|| waits.load(SeqCst) != 0);
        let set = scope.spawn(|| {
            locks.set(&mounted, free, &request(1, libc::F_WRLCK))?;
            locks.set(&mounted, free, &request(1, libc::F_UNLCK))
        });
        wait_until(|| set.is_finished());
        let done = set.is_finished();
        table.store(0, SeqCst);
        set.join().expect("no panic").expect("a lock");
        locks.set(&mounted, held, &request(1, libc::F_UNLCK)).expect("given back");
        let length = || answers.metadata().map_or(0, |file| file.len());
        wait_until(|| length() > 0);
        locks.stop();
        (done, length() > 0)
    });
    assert!(done, "it waits with the other one");
    assert!(answered, "the waiter is not answered once the lock is free");
    drop((suspended, mounted));
    zone.assert_undamaged();
}

#[test]
fn a_lock_of_a_mount_that_waits_for_a_suspended_member_keeps_no_other_waiter_from_being_interrupted() {
    let zone = Zone::new();
    let (suspended, mounted) = (zone.open(0), zone.open(1));
    let (held, other) = (file(&mounted, "held"), file(&mounted, "other"));
    let locks = Locks::default();
    let answers = Arc::new(tempfile::tempfile().expect("a file"));
    for (ino, unique) in [(held, 7), (other, 9)] {
        locks.set(&mounted, ino, &request(1, libc::F_WRLCK)).expect("a lock");
        assert!(locks.set_or_wait(&mounted, (&answers, unique), ino, &request(2, libc::F_WRLCK)).is_none());
    }
    let table = zone.table_lock_of(held);
    table.store(held_by(0), SeqCst);
    let length = || answers.metadata().map_or(0, |file| file.len());
    let answered = std::thread::scope(|scope| {
        scope.spawn(|| locks.serve(&mounted));
        // SAFETY: the lock's second word.
        let waits = unsafe { AtomicU64::from_ptr(table.as_ptr().wrapping_add(1)) };
        wait_until(|| waits.load(SeqCst) != 0);
        locks.interrupt(&mounted, 9);
        wait_until(|| length() > 0);
        let answered = length() > 0;
        table.store(0, SeqCst);
        locks.stop();
        answered
    });
    assert!(answered, "its process can't be killed before the other member goes on");
    drop((suspended, mounted));
    zone.assert_undamaged();
}
