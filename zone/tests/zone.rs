// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones between real processes: creating, opening, taking over, dying.

#[path = "common/namespace.rs"]
mod namespace;
#[path = "common/never.rs"]
mod never;

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use namespace::alone;
use never::Never;
use tombolo_zone::mem::SharedMem;
use tombolo_zone::{
    AreaConfig, AreaType, Backing, Error, MemberState, Pending, Rights, Role, Zone, ZoneConfig,
};

const MIB: u64 = 1 << 20;

fn file_zone(dir: &Path) -> (PathBuf, Zone) {
    let path = dir.join("zone");
    let zone = Zone::create(&ZoneConfig::new("test", 16 * MIB).backing(Backing::File(path.clone()))).unwrap();
    (path, zone)
}

/// Runs the test `name` of this binary, which is a helper, as another process, on the zone at `path`.
fn helper(name: &str, path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("TOMBOLO_HELPER_ZONE", path)
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("helper is ready")), "the helper ended early");
    child
}

/// In a helper process: the zone that it was given. `None`: the test runner calls the helper as if it were a test.
fn given() -> Option<PathBuf> {
    std::env::var_os("TOMBOLO_HELPER_ZONE").map(PathBuf::from)
}

fn ready_then_wait() {
    println!("helper is ready");
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn helper_joins_and_waits() {
    let Some(path) = given() else { return };
    let zone = Zone::open(path, true).unwrap();
    let _member = zone.join(zone.invite("helper", Role::Host, Rights::READ_WRITE).unwrap()).unwrap();
    ready_then_wait();
}

#[test]
fn helper_owns_and_waits() {
    let Some(path) = given() else { return };
    let _zone = Zone::take_over(path).unwrap();
    ready_then_wait();
}

#[test]
fn a_memfd_zone_cannot_be_shrunk_under_its_members() {
    let zone = Zone::create(&ZoneConfig::new("sealed", 8 * MIB)).unwrap();
    let file = std::fs::File::from(zone.as_fd().try_clone_to_owned().unwrap());
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(1 << 30).is_err());
    let again = Zone::open_fd(file.into(), true).unwrap();
    assert_eq!(again.uuid(), zone.uuid());
}

#[test]
fn a_zone_in_a_file_is_found_again_with_its_areas() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zone");
    let areas = vec![
        AreaConfig { kind: AreaType::Calls, name: "c".to_owned(), size: Some(8192) },
        AreaConfig { kind: AreaType::Files, name: "f".to_owned(), size: None },
    ];
    let config = ZoneConfig::new("kept", 8 * MIB).backing(Backing::File(path.clone())).areas(areas);
    let uuid = {
        let zone = Zone::create(&config).unwrap();
        zone.mem().write(zone.area(AreaType::Files, None).unwrap().offset, b"data").unwrap();
        zone.uuid()
    };
    let zone = Zone::take_over(&path).unwrap();
    assert_eq!(zone.uuid(), uuid);
    let files = zone.area(AreaType::Files, Some("f")).unwrap();
    let mut data = [0; 4];
    zone.mem().read(files.offset, &mut data).unwrap();
    assert_eq!(&data, b"data");
    let missing = zone.area(AreaType::Sync, Some("s")).unwrap_err().to_string();
    assert_eq!(missing, "zone kept has no sync area named \"s\"");
    assert!(matches!(Zone::create(&config), Err(Error::Io { .. })), "an existing file is not overwritten");
    assert!(path.exists());
}

#[test]
fn a_file_that_is_no_zone_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("noise");
    std::fs::write(&path, vec![7; 9 << 20]).unwrap();
    let said = Zone::open(&path, true).unwrap_err().to_string();
    assert!(said.contains("noise: not a zone: magic is 0x07"), "{said}");
    std::fs::write(&path, b"short").unwrap();
    assert!(Zone::open(&path, true).unwrap_err().to_string().contains("only 5 bytes"));
}

#[test]
fn a_zone_is_neither_made_nor_opened_where_another_process_delivers_its_pages() {
    alone("a_zone_is_neither_made_nor_opened_where_another_process_delivers_its_pages", || {
        let never = Never::new(16 * MIB);
        let refused = |made: Result<Zone, Error>| {
            let said = made.unwrap_err().to_string();
            assert!(said.contains("can't lie in a file of FUSE"), "{said}");
        };
        refused(Zone::open(never.path(), true));
        refused(Zone::open_fd(never.open().into(), false));
        let backing = Backing::File(never.path().with_file_name("new"));
        refused(Zone::create(&ZoneConfig::new("test", 16 * MIB).backing(backing)));
    });
}

#[test]
fn a_zone_that_has_a_living_owner_or_member_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    assert!(zone.is_owner());
    assert!(Zone::take_over(&path).unwrap_err().to_string().contains("in use by its owner"));
    let mut child = helper("helper_joins_and_waits", &path);
    drop(zone);
    let said = Zone::take_over(&path).unwrap_err().to_string();
    assert!(said.contains("in use by members that outlived its owner: helper"), "{said}");
    assert!(!Zone::take_over_or_open(&path).unwrap().is_owner());
    child.kill().unwrap();
    child.wait().unwrap();
    let zone = Zone::take_over(&path).unwrap();
    assert_eq!(zone.members().unwrap()[0].state, MemberState::Dead);
}

/// umount(8) returns before a mount's process has left.
#[test]
fn who_wants_to_own_a_zone_waits_for_an_owner_and_members_that_end() {
    for name in ["helper_owns_and_waits", "helper_joins_and_waits"] {
        let dir = tempfile::tempdir().unwrap();
        let (path, zone) = file_zone(dir.path());
        drop(zone);
        let mut child = helper(name, &path);
        let taker = std::thread::spawn(move || Zone::take_over(path).map(drop));
        // It passes also if this thread is ahead.
        std::thread::sleep(std::time::Duration::from_millis(100));
        child.kill().unwrap();
        child.wait().unwrap();
        taker.join().unwrap().unwrap();
    }
}

#[test]
fn processes_that_want_to_own_a_zone_at_once_are_its_owners_in_turn_once_its_members_have_left() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let mut child = helper("helper_joins_and_waits", &path);
    drop(zone);
    let take = |_| {
        let path = path.clone();
        std::thread::spawn(move || Zone::take_over(path).map(drop))
    };
    let takers: Vec<_> = (0..8).map(take).collect();
    // It passes also if this thread is ahead.
    std::thread::sleep(std::time::Duration::from_millis(100));
    child.kill().unwrap();
    child.wait().unwrap();
    takers.into_iter().for_each(|taker| taker.join().unwrap().unwrap());
}

#[test]
fn an_owner_that_is_killed_leaves_a_zone_that_can_be_taken_over_in_a_new_session() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    drop(zone);
    let mut child = helper("helper_owns_and_waits", &path);
    let watcher = Zone::open(&path, false).unwrap();
    assert!(watcher.has_owner().unwrap());
    let session = watcher.pulse().unwrap().1;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!watcher.has_owner().unwrap());
    let zone = Zone::take_over(&path).unwrap();
    assert_ne!(zone.pulse().unwrap().1, session);
    zone.beat().unwrap();
    assert!(watcher.pulse().unwrap().0 > 0);
}

#[test]
fn a_killed_member_is_reaped_and_rejoins_in_a_later_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let me = zone.join(zone.invite("me", Role::Host, Rights::READ_WRITE).unwrap()).unwrap();
    let mut child = helper("helper_joins_and_waits", &path);
    let id = zone.members().unwrap().into_iter().find(|m| m.name == "helper").unwrap().id;
    zone.set_doorbell(id, Some(5)).unwrap();
    assert_eq!(zone.reap().unwrap(), []);
    assert_eq!(zone.pend(id, Pending::Lock).unwrap(), Some(5));
    assert_eq!(zone.pend(id, Pending::Lock).unwrap(), None, "rung already");
    let before = zone.member(id).unwrap();
    assert_eq!((before.state, before.alive), (MemberState::Active, true));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(zone.reap().unwrap(), [id]);
    let dead = zone.member(id).unwrap();
    assert_eq!((dead.state, dead.epoch, dead.doorbell), (MemberState::Dead, before.epoch + 1, None));
    assert_eq!(zone.take_pending(me.id()).unwrap(), Pending::Members as u64);
    assert!(!zone.declare_dead(id).unwrap(), "it is dead already");
    assert_eq!(zone.invite("helper", Role::Host, Rights::READ_WRITE).unwrap(), id, "a name keeps its slot");
    let again = zone.join(id).unwrap();
    assert_eq!(again.epoch(), dead.epoch + 1);
}

#[test]
fn a_child_that_inherits_the_liveness_keeps_the_member_alive() {
    let dir = tempfile::tempdir().unwrap();
    let (_path, zone) = file_zone(dir.path());
    let id = zone.invite("vm", Role::Vm, Rights::READ_ONLY).unwrap();
    let liveness = zone.hold(id).unwrap();
    // The child gets the description as its standard input, as QEMU would get it as an extra descriptor.
    let stdin = liveness.as_fd().try_clone_to_owned().unwrap();
    let mut child = Command::new("sleep").arg("1000").stdin(stdin).spawn().unwrap();
    zone.activate(id).unwrap();
    drop(liveness);
    assert!(zone.member(id).unwrap().alive);
    assert!(zone.hold(id).unwrap_err().to_string().contains("another process is this member"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(zone.reap().unwrap(), [id]);
}

#[test]
fn leaving_keeps_the_slot_and_a_stale_membership_cannot_leave() {
    let zone = Zone::create(&ZoneConfig::new("leave", 8 * MIB)).unwrap();
    let id = zone.invite("a", Role::Host, Rights::READ_WRITE).unwrap();
    assert!(
        zone.activate(tombolo_zone::MemberId::new(9).unwrap()).is_err(),
        "no member was invited to slot 9"
    );
    let member = zone.join(id).unwrap();
    assert!(zone.invite("a", Role::Host, Rights::READ_WRITE).unwrap_err().to_string().contains("already"));
    assert!(zone.remove(id).unwrap_err().to_string().contains("stop it first"));
    // As a process has it that is being started.
    let _copy = member.liveness().as_fd().try_clone_to_owned().unwrap();
    zone.leave(member).unwrap();
    let there = zone.member(id).unwrap();
    assert_eq!((there.state, there.alive), (MemberState::Invited, false));
    let member = zone.join(id).unwrap();
    zone.declare_dead(id).unwrap();
    assert!(zone.leave(member).unwrap_err().to_string().contains("declared dead"));
    zone.remove(id).unwrap();
    assert_eq!(zone.members().unwrap(), []);
}

/// Tombolo neither starts nor serves such a VM: its QEMU was given the zone by hand.
#[test]
fn a_member_that_owns_the_zone_declares_no_vm_dead_that_nobody_holds() {
    let zone = Zone::create(&ZoneConfig::new("by-hand", 8 * MIB)).unwrap();
    let vm = zone.invite("vm", Role::Vm, Rights::READ_WRITE).unwrap();
    zone.activate(vm).unwrap();
    let process = zone.invite("mount", Role::Host, Rights::READ_WRITE).unwrap();
    drop(zone.join(process).unwrap());
    assert_eq!(zone.reap_without_owner().unwrap(), [process]);
    assert_eq!(zone.member(vm).unwrap().state, MemberState::Active);
}

#[test]
fn the_sixty_fifth_member_is_refused() {
    let zone = Zone::create(&ZoneConfig::new("full", 8 * MIB)).unwrap();
    for i in 0..64 {
        zone.invite(&format!("m{i}"), Role::Vm, Rights::READ_WRITE).unwrap();
    }
    assert!(
        zone.invite("m64", Role::Vm, Rights::READ_WRITE).unwrap_err().to_string().contains("all 64 slots")
    );
}

#[test]
fn nonsense_in_a_slot_is_shown_as_damage_and_can_be_cleared() {
    let zone = Zone::create(&ZoneConfig::new("nonsense", 8 * MIB)).unwrap();
    let id = zone.invite("a", Role::Host, Rights::READ_WRITE).unwrap();
    zone.mem().write(4096, &[0xee; 256]).unwrap();
    let member = zone.member(id).unwrap();
    assert_eq!((member.state, member.role, member.doorbell), (MemberState::Damaged, None, None));
    assert_eq!(zone.reap().unwrap(), [id]);
    assert_eq!(zone.member(id).unwrap().state, MemberState::Dead);
    // An epoch at its end is not wrapped: the slot goes on after the last one that the owner gave.
    zone.mem().store_u64(4096, u64::from(u32::MAX) << 32 | 1).unwrap();
    assert!((1..1 << 31).contains(&zone.join(id).unwrap().epoch()));
}

const ACTIVE: u64 = 2;
const LAST: u64 = u32::MAX as u64;

/// Stores a slot's state and epoch, as any member can.
fn store(zone: &Zone, slot: u32, state: u64, epoch: u64) {
    zone.mem().store_u64(4096 + 256 * u64::from(slot), epoch << 32 | state).unwrap();
}

#[test]
fn a_member_that_writes_the_last_epoch_into_all_slots_keeps_nobody_alive_and_no_owner_out() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let mut child = helper("helper_joins_and_waits", &path);
    let id = zone.members().unwrap()[0].id;
    assert_eq!(zone.reap().unwrap(), []);
    for slot in 0..64 {
        store(&zone, slot, ACTIVE, LAST);
        // Recovered for ever, it says.
        zone.mem().store_u64(4096 + 256 * u64::from(slot) + 192, u64::MAX).unwrap();
    }
    let dead = zone.reap().unwrap();
    assert_eq!(dead.len(), 63, "all but the living one");
    child.kill().unwrap();
    child.wait().unwrap();
    store(&zone, id.index(), ACTIVE, LAST);
    assert_eq!(zone.reap().unwrap(), [id]);
    for member in zone.members().unwrap() {
        assert!(member.state == MemberState::Dead && (1..1 << 31).contains(&member.epoch), "{member:?}");
        assert!(member.recovered_epoch < u64::from(member.epoch), "{member:?}");
    }
    (0..64).for_each(|slot| store(&zone, slot, ACTIVE, LAST));
    drop(zone);
    let zone = Zone::take_over(&path).unwrap();
    assert!(zone.members().unwrap().iter().all(|m| m.state == MemberState::Dead));
    assert!(zone.join(zone.invite("b", Role::Vm, Rights::READ_WRITE).unwrap()).unwrap().epoch() > 0);
}

#[test]
fn a_member_keeps_no_other_from_its_slot_whatever_it_writes_into_the_table() {
    let zone = Zone::create(&ZoneConfig::new("table", 8 * MIB)).unwrap();
    let hostile = zone.invite("hostile", Role::Vm, Rights::READ_WRITE).unwrap();
    let _hostile = zone.join(hostile).unwrap();
    for state in 0..=255 {
        for slot in (0..64).filter(|&slot| slot != hostile.index()) {
            store(&zone, slot, state, LAST);
        }
        // It has the other's name, it says.
        zone.mem().write(4096 + 256 * u64::from(hostile.index()) + 24, b"b\0").unwrap();
        let id = zone.invite("b", Role::Vm, Rights::READ_ONLY).unwrap();
        assert_ne!(id, hostile);
        store(&zone, id.index(), state, LAST);
        let epoch = zone.activate(id).unwrap();
        assert_eq!(zone.member(id).unwrap().epoch, epoch);
        assert_eq!(zone.member(hostile).unwrap().name, "hostile");
        zone.declare_dead(id).unwrap();
        // It has no other name and no other right than it came with.
        zone.mem().store_u32(4096 + 256 * u64::from(hostile.index()) + 16, 0).unwrap();
        zone.reap().unwrap();
        let other = Zone::open_fd(zone.as_fd().try_clone_to_owned().unwrap(), false).unwrap();
        let seen = other.member(hostile).unwrap();
        assert_eq!((seen.name.as_str(), seen.rights), ("hostile", Rights::READ_WRITE));
    }
}

#[test]
fn a_living_member_whose_slot_was_emptied_is_seen_and_keeps_its_slot() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let mut child = helper("helper_joins_and_waits", &path);
    let id = zone.members().unwrap()[0].id;
    zone.reap().unwrap();
    store(&zone, id.index(), 0, 0);
    assert_ne!(zone.invite("b", Role::Vm, Rights::READ_WRITE).unwrap(), id);
    assert!(zone.remove(id).unwrap_err().to_string().contains("stop it first"));
    zone.reap().unwrap();
    let member = zone.member(id).unwrap();
    assert_eq!((member.name.as_str(), member.state), ("helper", MemberState::Invited));
    store(&zone, id.index(), 0, 0);
    drop(zone);
    assert!(Zone::take_over(&path).unwrap_err().to_string().contains("members that outlived its owner"));
    child.kill().unwrap();
    child.wait().unwrap();
    Zone::take_over(&path).unwrap();
}

#[test]
fn a_reader_cannot_write_and_its_descriptor_cannot_be_mapped_for_writing() {
    let zone = Zone::create(&ZoneConfig::new("ro", 8 * MIB)).unwrap();
    let fd = zone.read_only_fd().unwrap();
    assert!(SharedMem::map(fd.as_fd(), 0, 4096, true).is_err());
    let reader = Zone::open_fd(fd, false).unwrap();
    assert!(reader.invite("x", Role::Host, Rights::READ_ONLY).is_err());
    assert!(reader.mem().store_u64(0, 0).is_err());
    zone.mem().write(2 * MIB, b"seen").unwrap();
    let mut seen = [0; 4];
    reader.mem().read(2 * MIB, &mut seen).unwrap();
    assert_eq!(&seen, b"seen");
}

#[test]
fn huge_pages_are_used_or_their_lack_is_explained() {
    let config = ZoneConfig::new("huge", 8 * MIB).backing(Backing::Hugetlb(2 << 20));
    match Zone::create(&config) {
        Ok(zone) => {
            let again = Zone::open(format!("/proc/self/fd/{}", zone.as_fd().as_raw_fd()), true).unwrap();
            assert_eq!(again.areas(), zone.areas());
        }
        Err(error) => assert!(error.to_string().contains("nr_hugepages"), "{error}"),
    }
    let odd = ZoneConfig::new("huge", 8 * MIB).backing(Backing::Hugetlb(3 << 20));
    assert!(Zone::create(&odd).unwrap_err().to_string().contains("huge page size"));
}

/// By these the others know what a VM may do, and who lives.
#[test]
fn what_a_member_writes_over_the_words_that_tell_of_a_vms_rights_and_life_is_written_back() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let ids = ["lives", "comes"].map(|vm| zone.invite(vm, Role::Vm, Rights::READ_WRITE).unwrap());
    let _held = zone.hold(ids[0]).unwrap();
    assert_eq!(zone.reap().unwrap(), []);
    let member = Zone::open(&path, true).unwrap();
    let before = ids.map(|id| member.member(id).unwrap());
    assert!(before[0].alive && !before[1].alive);
    for rights in 0..8 {
        for boot in [0, 1, u32::MAX] {
            for id in ids {
                let slot = 4096 + 256 * u64::from(id.index());
                member.mem().store_u32(slot + 16, if id == ids[0] { rights } else { rights | 1 }).unwrap();
                member.mem().store_u32(slot + 20, boot).unwrap();
            }
            assert_eq!(zone.reap().unwrap(), []);
            let now = ids.map(|id| member.member(id).unwrap());
            assert_eq!(now[0], before[0], "{rights} {boot}");
            assert!(!now[1].alive, "{rights} {boot}");
        }
    }
}

#[test]
fn a_zone_whose_file_is_cut_short_is_lost_and_its_owner_lives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zone");
    let zone = Zone::create(&ZoneConfig::new("cut", 16 << 20).backing(Backing::File(path.clone()))).unwrap();
    assert!(!zone.is_lost());
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    zone.beat().unwrap();
    assert!(zone.is_lost());
    assert!(zone.members().unwrap().iter().all(|m| !m.alive));
    // Others are not.
    let other = Zone::create(&ZoneConfig::new("whole", 16 << 20)).unwrap();
    other.beat().unwrap();
    assert!(!other.is_lost());
}

#[test]
fn members_that_write_invited_into_all_slots_keep_no_process_of_the_host_out_and_give_it_no_kept_slot() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    const INVITED: u64 = 1;
    let kept = zone.invite("vm", Role::Vm, Rights::READ_WRITE).unwrap();
    let other = Zone::open(&path, true).unwrap();
    (0..64).filter(|&slot| slot != kept.index()).for_each(|slot| store(&zone, slot, INVITED, 3));
    // It is the process's own, says the slot of a VM that has not come yet.
    zone.mem().write(4096 + 256 * u64::from(kept.index()) + 24, b"mount\0").unwrap();
    let (id, liveness) = other.claim("mount", Role::Host, Rights::READ_WRITE).unwrap();
    assert_ne!(id, kept);
    for state in 0..=255 {
        store(&zone, id.index(), state, LAST);
    }
    let joined = other.join_claimed(id, liveness).unwrap();
    let member = other.member(id).unwrap();
    assert_eq!((member.state, member.epoch), (MemberState::Active, joined.epoch()));
    // All others but the kept one can be had, too.
    let claimed: Vec<_> =
        (0..62).map(|n| other.claim(&format!("m{n}"), Role::Host, Rights::READ_WRITE).unwrap()).collect();
    let full = other.claim("one more", Role::Host, Rights::READ_WRITE).unwrap_err().to_string();
    assert!(full.contains("all 64 slots are taken"), "{full}");
    assert!(claimed.iter().all(|(id, _)| *id != kept));
    zone.hold(kept).unwrap();
}

#[test]
fn nobody_becomes_a_member_while_members_are_kept_out() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let id = zone.invite("vm", Role::Vm, Rights::READ_WRITE).unwrap();
    let other = Zone::open(&path, true).unwrap();
    let kept_out = zone.keep_members_out().unwrap();
    assert!(matches!(other.keep_members_out(), Err(Error::InUse { .. })));
    let refused = [
        other.hold(id).map(drop).unwrap_err().to_string(),
        other.claim("mount", Role::Host, Rights::READ_WRITE).map(drop).unwrap_err().to_string(),
    ];
    assert!(refused.iter().all(|why| why.contains("being repaired")), "{refused:?}");
    assert!(zone.members().unwrap().iter().all(|member| !member.alive));
    drop(kept_out);
    other.join(id).unwrap();
}

/// Locks a byte of the zone's file for as long as the file is open: another process that holds it.
fn hold_byte(path: &Path, byte: libc::off_t) -> std::fs::File {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    // SAFETY: flock is plain data for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (libc::F_WRLCK as libc::c_short, byte, 1);
    // SAFETY: an open descriptor and a valid struct flock.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }, 0);
    file
}

#[test]
fn a_process_that_joins_while_another_takes_the_zone_over_stays_a_member() {
    /// Serializes changes of the member table (`src/liveness.rs`).
    const TABLE_BYTE: libc::off_t = 65;
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    let id = zone.invite("m", Role::Host, Rights::READ_WRITE).unwrap();
    drop(zone);
    let (zone, table) = (Zone::open(&path, true).unwrap(), hold_byte(&path, TABLE_BYTE));
    let (thread, number) = std::sync::mpsc::channel();
    let taking = std::thread::spawn(move || {
        // SAFETY: a plain call.
        thread.send(unsafe { libc::gettid() }).unwrap();
        Zone::take_over(path)
    });
    let place = format!("/proc/self/task/{}/wchan", number.recv().unwrap());
    let waits = || {
        taking.is_finished()
            || std::fs::read_to_string(&place).is_ok_and(|at| at.contains("setlk") || at.contains("lock"))
    };
    for _ in 0..2000 {
        if waits() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let own = zone.join(id).unwrap();
    drop(table);
    assert!(matches!(taking.join().unwrap(), Err(Error::InUse { .. })));
    let found = zone.member(id).unwrap();
    assert_eq!((found.state, found.epoch), (MemberState::Active, own.epoch()));
}

#[test]
fn invitations_of_a_zone_whose_owner_tells_of_no_slots_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (path, zone) = file_zone(dir.path());
    drop(zone);
    let zone = Zone::open(&path, true).unwrap();
    for n in 0..64 {
        zone.invite(&format!("vm{n}"), Role::Vm, Rights::READ_WRITE).unwrap();
    }
    let full = zone.claim("mount", Role::Host, Rights::READ_WRITE).unwrap_err().to_string();
    assert!(full.contains("all 64 slots are taken"), "{full}");
    assert!(zone.invite("vm7", Role::Vm, Rights::READ_ONLY).is_ok(), "its own");
}

/// A zone of which mounts live on has no owner once the one that made it has ended.
#[test]
fn slots_of_processes_that_died_before_they_joined_are_free_also_without_an_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (path, owner) = file_zone(dir.path());
    let member = Zone::open(&path, true).unwrap();
    let (id, liveness) = member.claim("lives", Role::Host, Rights::READ_WRITE).unwrap();
    let _member = member.join_claimed(id, liveness).unwrap();
    let vm = owner.invite("vm", Role::Vm, Rights::READ_WRITE).unwrap();
    drop(owner);
    for i in 0..100 {
        let (id, dies) = member.claim(&format!("mount-{i}"), Role::Host, Rights::READ_WRITE).unwrap();
        assert_ne!(id, vm);
        drop(dies);
    }
    assert_eq!(member.member(vm).unwrap().name, "vm", "an invitation is kept");
}

#[test]
fn a_process_that_leaves_leaves_the_slot_to_one_that_has_taken_it_at_that_moment() {
    let dir = tempfile::tempdir().unwrap();
    let (_, zone) = file_zone(dir.path());
    let (id, liveness) = zone.claim("same", Role::Host, Rights::READ_WRITE).unwrap();
    zone.leave(zone.join_claimed(id, liveness).unwrap()).unwrap();
    let (next, liveness) = zone.claim("same", Role::Host, Rights::READ_WRITE).unwrap();
    assert_eq!(next, id);
    zone.remove_left(id).unwrap();
    let next = zone.join_claimed(next, liveness).unwrap();
    assert_eq!(zone.member(id).unwrap().state, MemberState::Active);
    zone.leave(next).unwrap();
    zone.remove_left(id).unwrap();
    assert_eq!(zone.member(id).unwrap().state, MemberState::Empty);
}
