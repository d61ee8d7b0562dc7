// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo zone invite, expel, serve`: zones for VMs that tombolo does not start. A process that connects to a doorbell socket stands for a
//! VM here; tests/plain.rs has real ones.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tombolo_zone::{Member, MemberState, Rights, Role, Zone};

const LONG: Duration = Duration::from_secs(300);

/// A zone in a file, and a run folder of its own.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { dir: tempfile::tempdir().unwrap() };
        place.good(&["zone", "create", "own.zone", "--size", "16M"]);
        place
    }

    fn zone(&self) -> PathBuf {
        self.dir.path().join("own.zone")
    }

    fn kill_server(&self) {
        kill(self.server().unwrap());
        self.until("the server lives", || self.server().is_none());
    }

    /// Waits until the server has looked at its zone twice.
    fn await_looks(&self) {
        let pulse = || Zone::open(self.zone(), false).unwrap().pulse().unwrap().0;
        let mut last = 0;
        for _ in 0..3 {
            self.until("the server stands still", || pulse() != last);
            last = pulse();
        }
    }

    fn run(&self, args: &[&str]) -> Output {
        self.run_in("run", args)
    }

    /// Runs a command that looks for sockets and records in another folder.
    fn run_in(&self, folder: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(args).current_dir(self.dir.path());
        command.env("TOMBOLO_ZONES_RUN", self.dir.path().join(folder)).stdin(Stdio::null()).output().unwrap()
    }

    fn good(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The error of a command that must fail.
    fn bad(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "{args:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Invites a VM; its doorbell's socket.
    fn invite(&self, name: &str, more: &[&str]) -> PathBuf {
        let text = self.good(&[&["zone", "invite", "own.zone", name, "--json"], more].concat());
        let invitation: serde_json::Value = serde_json::from_str(&text).unwrap();
        invitation["socket"].as_str().unwrap().into()
    }

    fn member(&self, name: &str) -> Option<Member> {
        let members = Zone::open(self.zone(), false).unwrap().members().unwrap();
        members.into_iter().find(|m| m.name == name)
    }

    /// A file in the zone's folder of records. A zone that was removed has none.
    fn room(&self, file: &str) -> Option<PathBuf> {
        let uuid = Zone::open(self.zone(), false).ok()?.uuid();
        Some(self.dir.path().join("run").join(uuid.to_string()).join(file))
    }

    fn server(&self) -> Option<u32> {
        let pid = std::fs::read_to_string(self.room("server.lock")?).ok()?.trim().parse().ok()?;
        // One that is ending has its locks until its last thread has ended.
        Zone::open(self.zone(), false).is_ok_and(|zone| zone.has_owner().unwrap()).then_some(pid)
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < LONG, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(pid) = self.server() {
            kill(pid);
        }
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// A process that has a zone in its memory and is connected to a doorbell, as a QEMU would be.
struct Vm(Child);

/// Opens and maps the zone, as QEMU does before it needs an answer at its doorbell.
const OPENS: &str = "f = open(sys.argv[2], 'r+b')\nm = mmap.mmap(f.fileno(), 0)\n";
const CONNECTS: &str =
    "s = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nassert s.recv(8) == bytes(8)\n";

impl Vm {
    fn start(place: &Place, socket: &Path) -> Vm {
        Vm::run(place, socket, &[OPENS, CONNECTS])
    }

    /// One that can only read the zone.
    fn reading(place: &Place, socket: &Path) -> Vm {
        let opens = "f = open(sys.argv[2], 'rb')\nm = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n";
        Vm::run(place, socket, &[opens, CONNECTS])
    }

    /// One that has lost its doorbell since.
    fn without_doorbell(place: &Place, socket: &Path) -> Vm {
        Vm::run(place, socket, &[OPENS, CONNECTS, "s.close()\n"])
    }

    /// One that opens the zone only once it has its doorbell, so that the server can't have it hold its slot before.
    fn late(place: &Place, socket: &Path) -> Vm {
        Vm::run(place, socket, &[CONNECTS, OPENS])
    }

    /// One whose connection another process has made: it ends with its input, the other one when it is killed.
    fn launched(place: &Place, socket: &Path) -> Vm {
        Vm::run(place, socket, &[CONNECTS, "if os.fork():\n  signal.pause()\n", OPENS])
    }

    fn run(place: &Place, socket: &Path, script: &[&str]) -> Vm {
        Vm::try_run(place, socket, script).unwrap()
    }

    /// `None`: it was refused.
    fn try_run(place: &Place, socket: &Path, script: &[&str]) -> Option<Vm> {
        let script = [&["import mmap, os, signal, socket, sys\n"], script].concat().concat();
        let mut python = Command::new("python3");
        python.args(["-c", &format!("{script}print('in', flush=True)\nsys.stdin.read()")]);
        python.arg(socket).arg(place.zone()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut vm = Vm(python.stderr(Stdio::null()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(vm.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (line == "in\n").then_some(vm)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A copy has the identity of its original, by which the server's sockets and records are found.
#[test]
fn a_vm_that_is_invited_to_a_copy_of_a_zone_does_not_join_the_original() {
    let place = Place::new();
    place.invite("a", &[]);
    std::fs::copy(place.zone(), place.dir.path().join("copy.zone")).unwrap();
    for args in [&["invite", "copy.zone", "b"][..], &["expel", "copy.zone", "a"], &["serve", "copy.zone"]] {
        let said = place.bad(&[&["zone"], args].concat());
        assert!(said.contains("one of them is a copy"), "{args:?}: {said}");
    }
    assert_eq!(place.member("b"), None, "the original has a VM of the copy");
    assert!(place.room("a.invited").unwrap().exists(), "the original's invitation is the copy's to revoke");
    // The copy as such can be used, whatever VMs the original has.
    let vm = Vm::start(&place, &place.room("a.sock").unwrap());
    place.good(&["files", "mkfs", "copy.zone"]);
    drop(vm);
    place.until("the VM was not declared dead", || !place.member("a").unwrap().alive);
    place.good(&["zone", "expel", "own.zone", "a"]);
    place.until("the server stays without an invitation", || place.server().is_none());
    std::fs::remove_file(place.zone()).unwrap();
    std::fs::rename(place.dir.path().join("copy.zone"), place.zone()).unwrap();
    place.invite("b", &[]);
    place.good(&["zone", "expel", "own.zone", "b"]);
}

#[test]
fn a_vm_that_writes_a_path_for_its_name_gets_no_socket_elsewhere_and_keeps_no_other_from_its_own() {
    let place = Place::new();
    let old = "a-vm-with-a-long-name";
    let socket = place.invite(old, &[]);
    let elsewhere = place.dir.path().join("elsewhere.sock");
    let mut zone = std::fs::read(place.zone()).unwrap();
    let at = zone.windows(old.len()).position(|bytes| bytes == old.as_bytes()).unwrap();
    // As the guest's kernel could, in the memory that it shares.
    let file = std::fs::File::options().write(true).open(place.zone()).unwrap();
    let mut rename = |new: &str| {
        zone[at..at + old.len()].fill(0);
        zone[at..at + new.len()].copy_from_slice(new.as_bytes());
        std::os::unix::fs::FileExt::write_all_at(&file, &zone[at..at + old.len()], at as u64).unwrap();
    };
    rename("../../elsewhere");
    place.until("the name is not restored", || place.member(old).is_some());
    assert!(socket.exists() && !elsewhere.exists());
    let listed = place.good(&["zone", "ls", "own.zone"]);
    rename("\x1b[2J");
    let shown = place.good(&["zone", "inspect", "own.zone"]);
    assert!(!(listed + &shown).contains('\x1b'), "{shown}");
    place.invite("c", &[]);
    rename("c");
    place.until("the name is not restored", || place.member(old).is_some());
    place.invite("d", &[]);
    let _vm = Vm::start(&place, &socket);
    place.until("it is not the VM that it was", || place.member(old).is_some_and(|m| m.alive));
}

#[test]
fn a_vm_that_ends_loses_its_epoch_and_keeps_its_slot() {
    let place = Place::new();
    let socket = place.invite("a", &[]);
    let invited = place.member("a").unwrap();
    assert_eq!(invited.state, MemberState::Invited);
    for _ in 0..2 {
        let vm = Vm::start(&place, &socket);
        place.until("the server does not hold the VM alive", || place.member("a").is_some_and(|m| m.alive));
        // The guest's kernel does this.
        let epoch = Zone::open(place.zone(), true).unwrap().activate(invited.id).unwrap();
        drop(vm);
        // Its slot is empty for a moment, before it is kept for its next start.
        place.until("the VM was not declared dead", || {
            place.member("a").is_some_and(|m| m.state == MemberState::Invited && m.epoch > epoch && !m.alive)
        });
        assert_eq!(place.member("a").unwrap().id, invited.id);
    }
}

#[test]
fn a_server_ends_with_the_last_invitation_and_leaves_no_socket() {
    let place = Place::new();
    let sockets = [place.invite("a", &[]), place.invite("b", &["--read-only"])];
    assert!(place.server().is_some());
    place.good(&["zone", "expel", "own.zone", "a"]);
    place.until("the socket of an expelled VM stays", || !sockets[0].exists());
    assert!(sockets[1].exists());
    place.good(&["zone", "expel", "own.zone", "b"]);
    place.until("the server stays without an invitation", || place.server().is_none());
    assert!(!sockets[1].exists());
    place.good(&["zone", "rm", "own.zone"]);
}

#[test]
fn vms_that_are_invited_at_once_share_one_server() {
    let place = Place::new();
    let names = ["a", "b", "c", "d"];
    std::thread::scope(|scope| {
        for name in names {
            scope.spawn(|| place.invite(name, &[]));
        }
    });
    let invited = |name: &&str| place.member(name).is_some_and(|m| m.state == MemberState::Invited);
    assert!(names.iter().all(invited) && place.server().is_some());
}

/// Each of these commands becomes the zone's owner for a moment while it has none.
#[test]
fn vms_that_are_invited_and_expelled_at_once_keep_no_server_from_starting() {
    let place = Place::new();
    let (come, go) = (["a", "b", "c", "d"], ["e", "f", "g", "h"]);
    for _ in 0..5 {
        go.iter().for_each(|name| drop(place.invite(name, &[])));
        place.kill_server();
        std::thread::scope(|scope| {
            for (comes, goes) in come.iter().zip(go) {
                let place = &place;
                scope.spawn(move || place.invite(comes, &[]));
                scope.spawn(move || drop(place.good(&["zone", "expel", "own.zone", goes])));
            }
        });
        assert!(come.iter().all(|name| place.member(name).is_some()) && place.server().is_some());
        assert!(go.iter().all(|name| place.member(name).is_none()), "one that was expelled is back");
    }
}

/// The doorbell of the VM that stays is the former server's: it knows its slot by that one's id.
#[test]
fn a_server_that_was_killed_is_followed_by_one_that_finds_its_vms_and_hears_of_their_ends() {
    let place = Place::new();
    let socket = place.invite("a", &[]);
    let vm = Vm::start(&place, &socket);
    Zone::open(place.zone(), true).unwrap().activate(place.member("a").unwrap().id).unwrap();
    let before = place.member("a").unwrap();
    for name in ["b", "c"] {
        place.kill_server();
        let said = place.bad(&["zone", "rm", "own.zone"]);
        assert!(said.contains("members that outlived its owner: a"), "{said}");
        let other = Vm::start(&place, &place.invite(name, &[]));
        place.await_looks();
        assert_eq!(place.member("a").unwrap(), before);
        let there = place.member(name).unwrap();
        assert!(there.alive && there.doorbell != before.doorbell, "{there:?}");
        assert!(Vm::try_run(&place, &socket, &[OPENS, CONNECTS]).is_none(), "a second process is the VM");
        drop(other);
        place.until("it was not declared dead", || !place.member(name).unwrap().alive);
    }
    drop(vm);
    place.until("the VM was not declared dead", || {
        place
            .member("a")
            .is_some_and(|m| m.state == MemberState::Invited && m.epoch > before.epoch && !m.alive)
    });
    assert_eq!(place.invite("a", &[]), socket);
    let _again = Vm::start(&place, &socket);
    assert!(place.member("a").is_some_and(|m| m.alive && m.id == before.id));
}

/// At whatever moment: while a VM connects, while it is let in, while its end is heard.
#[test]
fn a_server_that_is_killed_again_and_again_loses_no_vm_and_keeps_none_that_has_ended() {
    let place = Place::new();
    let [a, b] = ["a", "b"].map(|name| place.invite(name, &[]));
    let _stays = Vm::start(&place, &a);
    let before = place.member("a").unwrap();
    for round in 0..30 {
        let vm = std::thread::scope(|scope| {
            let comes = scope.spawn(|| Vm::try_run(&place, &b, &[OPENS, CONNECTS]));
            // It takes some 40 ms to start.
            std::thread::sleep(Duration::from_millis(20 + 2 * round));
            place.kill_server();
            comes.join().unwrap()
        });
        assert_eq!(vm.is_some(), place.member("b").unwrap().alive, "round {round}");
        place.invite("b", &[]);
        assert_eq!(vm.is_some(), place.member("b").unwrap().alive, "round {round}");
        drop(vm);
        place.until("a VM that has ended lives", || !place.member("b").unwrap().alive);
        let now = place.member("a").unwrap();
        assert!(now.alive && now.epoch == before.epoch && now.doorbell == before.doorbell, "{now:?}");
    }
}

/// The VM can write to the zone at any moment, so a repair would race with it.
#[test]
fn the_files_of_a_vm_whose_server_died_are_neither_repaired_nor_replaced_nor_its_slot_given_away() {
    let place = Place::new();
    place.good(&["files", "mkfs", "own.zone"]);
    place.good(&["files", "snapshot", "own.zone", "image"]);
    let vm = Vm::start(&place, &place.invite("a", &[]));
    // The guest's kernel does this when it mounts.
    Zone::open(place.zone(), true).unwrap().activate(place.member("a").unwrap().id).unwrap();
    place.kill_server();
    for args in [
        &["fsck", "-y", "own.zone"][..],
        &["mkfs", "--force", "own.zone"],
        &["restore", "--force", "image", "own.zone"],
        &["mount", "--member", "a", "own.zone", "."],
    ] {
        let said = place.bad(&[&["files"], args].concat());
        assert!(
            said.contains("in the zone already")
                || said.contains("could mount it")
                || said.contains("in use by a"),
            "{said}"
        );
    }
    assert!(place.member("a").is_some_and(|m| m.state == MemberState::Active));
    drop(vm);
    place.good(&["files", "fsck", "-y", "own.zone"]);
}

/// Whoever asks has not the rights to see the VM's process.
#[test]
fn a_vm_whose_server_died_lives_for_commands_of_other_users_and_environments() {
    let place = Place::new();
    place.good(&["files", "mkfs", "own.zone"]);
    place.good(&["files", "snapshot", "own.zone", "image"]);
    let vm = Vm::start(&place, &place.invite("a", &[]));
    Zone::open(place.zone(), true).unwrap().activate(place.member("a").unwrap().id).unwrap();
    place.kill_server();
    let before = place.member("a").unwrap();
    let commands = [
        &["files", "fsck", "-y", "own.zone"][..],
        &["files", "mkfs", "--force", "own.zone"],
        &["files", "restore", "--force", "image", "own.zone"],
        &["files", "mount", "--member", "a", "own.zone", "."],
        &["zone", "rm", "own.zone"],
    ];
    for args in commands {
        let output = place.run_in("other", args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        let refused =
            ["in the zone already", "could mount it", "in use by a;", "members that outlived its owner: a"];
        assert!(refused.iter().any(|words| said.contains(words)), "{said}");
    }
    // A container whose processes have other numbers.
    let mut contained = Command::new("unshare");
    contained.args(["-rpf", "--mount-proc", env!("CARGO_BIN_EXE_tombolo"), "zone", "rm", "own.zone"]);
    contained.current_dir(place.dir.path()).env("TOMBOLO_ZONES_RUN", place.dir.path().join("run"));
    let output = contained.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("members that outlived its owner: a"), "{said}");
    assert_eq!(place.member("a").unwrap(), before);
    drop(vm);
    let output = place.run_in("other", commands[0]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// LXC and systemd-nspawn give each container such a number, and the VM runs beside it.
#[test]
fn a_vm_that_holds_no_lock_lives_for_a_container_that_has_a_boot_of_its_own() {
    let place = Place::new();
    place.good(&["files", "mkfs", "own.zone"]);
    let vm = Vm::launched(&place, &place.invite("a", &[]));
    place.kill_server();
    let script = "cat /proc/sys/kernel/random/uuid > boot && mount --bind boot /proc/sys/kernel/random/boot_id && \
                  TOMBOLO_ZONES_RUN=$PWD/other exec \"$@\"";
    for args in [&["files", "fsck", "-y", "own.zone"][..], &["zone", "rm", "own.zone"]] {
        let mut contained = Command::new("unshare");
        contained.args(["-rm", "sh", "-c", script, "sh", env!("CARGO_BIN_EXE_tombolo")]).args(args);
        let output = contained.current_dir(place.dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let refused = ["could mount it", "members that outlived its owner: a"];
        assert!(
            !output.status.success() && refused.iter().any(|words| said.contains(words)),
            "{args:?}: {said}"
        );
    }
    drop(vm);
}

/// Commands repair and remove the zone of the VM `a` only once the VM has ended.
fn lives_for_commands_elsewhere_until_its_process_ends(place: &Place, vm: Vm) {
    for args in [&["files", "fsck", "-y", "own.zone"][..], &["zone", "rm", "own.zone"]] {
        let output = place.run_in("other", args);
        assert!(!output.status.success(), "{args:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains("could mount it") || said.contains("members that outlived its owner: a"),
            "{said}"
        );
    }
    drop(vm);
    let output = place.run_in("other", &["zone", "rm", "own.zone"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_vm_whose_server_died_lives_also_if_it_can_only_read_or_has_lost_its_doorbell() {
    for can_write in [false, true] {
        let place = Place::new();
        place.good(&["files", "mkfs", "own.zone"]);
        let socket = place.invite("a", if can_write { &[] } else { &["--read-only"] });
        let start = if can_write { Vm::without_doorbell } else { Vm::reading };
        let vm = start(&place, &socket);
        if can_write {
            place.until("its doorbell is not gone", || place.member("a").unwrap().doorbell.is_none());
        }
        place.kill_server();
        lives_for_commands_elsewhere_until_its_process_ends(&place, vm);
    }
}

/// A cleaner of temporary folders removes it, say, or no descriptor is left for reading it.
#[test]
fn a_vm_whose_invitation_is_gone_or_can_not_be_read_keeps_its_doorbell_and_its_server() {
    let place = Place::new();
    let (a, b) = (place.invite("a", &[]), place.invite("b", &[]));
    let vm = Vm::start(&place, &a);
    place.until("it has no doorbell", || place.member("a").unwrap().doorbell.is_some());
    let [of_a, of_b] = ["a.invited", "b.invited"].map(|file| place.room(file).unwrap());
    std::fs::remove_file(&of_b).unwrap();
    std::fs::create_dir(&of_b).unwrap();
    std::fs::remove_file(&of_a).unwrap();
    let server = place.server().unwrap();
    place.await_looks();
    assert!(a.exists() && b.exists() && place.member("a").unwrap().doorbell.is_some());
    drop(Vm::start(&place, &b));
    // One that ended is not invited any more; the one that can't be read is.
    drop(vm);
    place.until("the VM has a slot", || place.member("a").is_none() && !a.exists());
    assert!(b.exists() && place.server() == Some(server));
    std::fs::remove_dir(&of_b).unwrap();
    place.until("the server lives", || place.server().is_none());
}

/// As for a QEMU with `-chardev socket,fd=N`, one of another PID namespace, or a server that may not have QEMU's descriptors.
#[test]
fn a_vm_that_holds_no_lock_ends_for_its_server_and_without_that_when_it_is_expelled_by_force() {
    let place = Place::new();
    place.good(&["files", "mkfs", "own.zone"]);
    let launch = || {
        let mut launcher = Vm::launched(&place, &place.invite("a", &[]));
        let vm = launcher.0.stdin.take();
        assert!(place.member("a").unwrap().assumed);
        // While its connection stands the VM lives.
        drop(launcher);
        place.await_looks();
        assert!(place.member("a").unwrap().alive);
        vm
    };
    drop(launch());
    place.until("its server does not see its end", || !place.member("a").unwrap().alive);
    for is_served in [false, true] {
        let vm = launch();
        place.kill_server();
        drop(vm);
        for args in [&["files", "fsck", "-y", "own.zone"][..], &["zone", "rm", "own.zone"]] {
            let said = place.bad(args);
            assert!(said.contains("a (no lock tells") && said.contains("zone expel --force"), "{said}");
        }
        if is_served {
            place.invite("b", &[]);
            assert!(Vm::try_run(&place, &place.room("a.sock").unwrap(), &[OPENS, CONNECTS]).is_none());
        }
        let said = place.bad(&["zone", "expel", "own.zone", "a"]);
        assert!(said.contains("has ended unseen") && said.contains("--force"), "{said}");
        place.good(&["zone", "expel", "own.zone", "a", "--force"]);
        assert!(place.member("a").is_none() && !place.room("a.invited").unwrap().exists());
    }
    place.good(&["files", "fsck", "-y", "own.zone"]);
}

#[test]
fn force_expels_no_vm_that_holds_its_slot_or_whose_process_lives() {
    let place = Place::new();
    let _a = Vm::start(&place, &place.invite("a", &[]));
    let said = place.bad(&["zone", "expel", "own.zone", "a", "--force"]);
    assert!(said.contains("lives; stop it first"), "{said}");
    let mut b = Vm::run(&place, &place.invite("b", &[]), &[CONNECTS]);
    assert!(place.member("b").unwrap().assumed);
    std::thread::scope(|scope| {
        let expelled = scope.spawn(|| place.good(&["zone", "expel", "own.zone", "b", "--force"]));
        place.await_looks();
        assert!(place.member("b").unwrap().alive && !expelled.is_finished());
        b.0.kill().unwrap();
        expelled.join().unwrap();
    });
    assert!(place.member("b").is_none());
}

#[test]
fn a_vm_that_opens_the_zone_after_it_was_let_in_holds_its_slot_from_then_on() {
    let place = Place::new();
    let vm = Vm::late(&place, &place.invite("a", &[]));
    place.until("it does not hold its slot", || place.member("a").is_some_and(|m| m.alive && !m.assumed));
    place.kill_server();
    assert!(place.member("a").unwrap().alive);
    drop(vm);
    assert!(!place.member("a").unwrap().alive);
}

#[test]
fn a_vm_that_dies_after_its_server_is_found_dead_by_a_mount_that_stays() {
    let place = Place::new();
    place.good(&["files", "mkfs", "own.zone"]);
    let vms = ["a", "b"].map(|name| Vm::start(&place, &place.invite(name, &[])));
    let mount = place.dir.path().join("mnt");
    std::fs::create_dir(&mount).unwrap();
    place.good(&["files", "mount", "own.zone", "mnt"]);
    let zone = Zone::open(place.zone(), true).unwrap();
    for name in ["a", "b"] {
        zone.activate(place.member(name).unwrap().id).unwrap();
    }
    let [a, b] = vms;
    place.kill_server();
    drop(a);
    place.until("it is not declared dead", || place.member("a").unwrap().state == MemberState::Dead);
    assert_eq!(place.member("b").unwrap().state, MemberState::Active, "it lives");
    drop(b);
    place.until("it is not declared dead", || place.member("b").unwrap().state == MemberState::Dead);
    assert!(Command::new("umount").arg(&mount).status().unwrap().success());
}

/// The kernel closes the descriptors of a process that was killed one after the other.
#[test]
fn a_vm_lives_at_each_moment_while_its_server_is_killed() {
    let place = Place::new();
    let vm = Vm::start(&place, &place.invite("a", &[]));
    let zone = Zone::open(place.zone(), true).unwrap();
    let id = place.member("a").unwrap().id;
    zone.activate(id).unwrap();
    let server = place.server().unwrap();
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut ended = 0;
            while ended < 1000 {
                assert!(
                    zone.member(id).unwrap().alive,
                    "it is not alive, {ended} looks after its server's end"
                );
                ended += u32::from(!zone.has_owner().unwrap());
            }
        });
        kill(server);
        looks.join().unwrap();
    });
    drop(vm);
}

/// Of both the table says that they run: one was let in and held no lock, the other one was never let in.
#[test]
fn vms_that_ended_with_their_host_are_expelled_and_get_other_rights() {
    let place = Place::new();
    let vm = Vm::launched(&place, &place.invite("a", &[]));
    place.kill_server();
    drop(vm);
    let zone = Zone::open(place.zone(), true).unwrap();
    let b = zone.invite("b", Role::Vm, Rights::READ_WRITE).unwrap();
    zone.activate(b).unwrap();
    for name in ["a", "b"] {
        let member = place.member(name).unwrap();
        assert!(member.assumed, "this boot's: {member:?}");
        // The slot's number of the boot.
        let at = 4096 + 256 * u64::from(member.id.index()) + 20;
        zone.mem().store_u32(at, zone.mem().load_u32(at).unwrap() ^ 2).unwrap();
        assert!(!place.member(name).unwrap().alive);
    }
    place.good(&["zone", "expel", "own.zone", "a"]);
    place.invite("b", &["--read-only"]);
    assert_eq!(place.member("a"), None);
    assert_eq!(place.member("b").unwrap().rights, Rights::READ_ONLY);
}

#[test]
fn who_is_invited_after_the_server_was_killed_gets_no_socket_of_that_one() {
    let place = Place::new();
    let sockets = ["a", "b"].map(|name| place.invite(name, &[]));
    place.kill_server();
    place.good(&["zone", "expel", "own.zone", "a"]);
    assert!(sockets[0].exists(), "nobody has removed it");
    place.invite("b", &[]);
    // At once: another VM's invitation has started the server, which has not seen this one.
    drop(Vm::start(&place, &place.invite("a", &[])));
}

/// Each waits for the server, which looks once a second.
#[test]
fn many_vms_are_invited_and_expelled_at_once() {
    let place = Place::new();
    let names: Vec<String> = (0..50).map(|i| format!("vm-{i}")).collect();
    for command in ["invite", "expel"] {
        std::thread::scope(|scope| {
            for name in &names {
                scope.spawn(|| place.good(&["zone", command, "own.zone", name]));
            }
        });
    }
    assert_eq!(Zone::open(place.zone(), false).unwrap().members().unwrap(), []);
}

/// The owner kept the former slot, and gave it to the new invitation, which had another one by then; expelled again, the VM was still in the table.
#[test]
fn a_vm_that_is_expelled_and_invited_again_at_once_has_one_slot() {
    let place = Place::new();
    place.invite("other", &[]);
    for _ in 0..5 {
        place.invite("a", &[]);
        place.good(&["zone", "expel", "own.zone", "a"]);
        assert!(!place.room("a.sock").unwrap().exists(), "the server has not seen it");
    }
    place.invite("a", &["--read-only"]);
    let members = Zone::open(place.zone(), false).unwrap().members().unwrap();
    let names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names.iter().filter(|name| **name == "a").count(), 1, "{names:?}");
    place.good(&["zone", "expel", "own.zone", "a"]);
    assert_eq!(place.member("a"), None);
}

#[test]
fn a_vm_that_starts_again_at_once_is_not_taken_for_the_one_that_ended() {
    let place = Place::new();
    let socket = place.invite("a", &[]);
    for _ in 0..20 {
        let vm = Vm::start(&place, &socket);
        let there = place.member("a").unwrap();
        assert!(there.alive, "it was let in before it counted as alive");
        let zone = Zone::open(place.zone(), true).unwrap();
        let epoch = zone.activate(there.id).unwrap();
        drop(vm);
        let again = Vm::start(&place, &socket);
        // The first one's death is declared before the second one is let in.
        let there = place.member("a").unwrap();
        assert!(there.alive && there.state == MemberState::Invited && there.epoch > epoch, "{there:?}");
        drop(again);
    }
}

#[test]
fn vms_of_a_server_whose_output_nobody_reads_wait_for_nothing() {
    let place = Place::new();
    let sockets = ["a", "b", "c"].map(|name| place.invite(name, &[]));
    place.kill_server();
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let room = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
    std::io::Write::write_all(&mut std::fs::File::from(writer.try_clone().unwrap()), &vec![0; room]).unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    serve.args(["zone", "serve", "own.zone"]).current_dir(place.dir.path()).stdout(writer);
    let mut server = serve.env("TOMBOLO_ZONES_RUN", place.dir.path().join("run")).spawn().unwrap();
    place.until("it serves nobody", || {
        assert_eq!(server.try_wait().unwrap(), None, "it has ended");
        place.server() == Some(server.id()) && sockets[2].exists()
    });
    let vms = sockets.map(|socket| Vm::start(&place, &socket));
    assert!(["a", "b", "c"].iter().all(|name| place.member(name).unwrap().alive));
    drop(vms);
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn a_second_process_does_not_become_the_vm_and_does_not_end_it() {
    let place = Place::new();
    let socket = place.invite("a", &[]);
    let _vm = Vm::start(&place, &socket);
    place.until("the VM is not noticed", || place.member("a").is_some_and(|m| m.alive));
    let peer = place.member("a").unwrap().doorbell;
    let script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nprint(s.recv(8).hex(), len(s.recv(8)))";
    let second = Command::new("python3").args(["-c", script]).arg(&socket).output().unwrap();
    // QEMU ends with this version of the protocol, which is none.
    assert_eq!(String::from_utf8_lossy(&second.stdout), "ffffffffffffffff 0\n");
    assert!(place.member("a").unwrap().alive);
    assert_eq!(place.member("a").unwrap().doorbell, peer);
}

#[test]
fn what_can_not_be_said_what_and_what_to_do() {
    let place = Place::new();
    let said = place.bad(&["zone", "expel", "own.zone", "nobody"]);
    assert!(said.contains("no VM is called 'nobody'"), "{said}");
    let said = place.bad(&["zone", "invite", "none.zone", "a"]);
    assert!(said.contains("none.zone") && said.contains("No such file"), "{said}");
    let said = place.bad(&["zone", "invite", "own.zone", "a/b"]);
    assert!(said.contains("without '/'"), "{said}");
    let socket = place.invite("a", &[]);
    let vm = Vm::start(&place, &socket);
    place.until("the VM is not noticed", || place.member("a").is_some_and(|m| m.alive));
    let said = place.bad(&["zone", "expel", "own.zone", "a"]);
    assert!(said.contains("lives") && said.contains("stop it first"), "{said}");
    let said = place.bad(&["zone", "invite", "own.zone", "a", "--read-only"]);
    assert!(said.contains("rights can't change"), "{said}");
    let said = place.bad(&["zone", "serve", "own.zone"]);
    assert!(said.contains("in use by its owner"), "{said}");
    drop(vm);
}

#[test]
fn a_zone_of_a_process_that_serves_no_others_invites_nobody() {
    let place = Place::new();
    let _owner = Zone::take_over(place.zone()).unwrap();
    let said = place.bad(&["zone", "invite", "own.zone", "a"]);
    assert!(said.contains("serves no VMs of others") && said.contains("compose file"), "{said}");
    assert!(place.member("a").is_none());
}

/// The memory devices in QEMU's monitor with these arguments; the guest never runs.
fn qemu_takes(arguments: &str) -> String {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-nodefaults", "-display", "none", "-S", "-monitor", "stdio"])
        .args(arguments.split_whitespace());
    let mut qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut qemu.stdin.take().unwrap(), b"info memory-devices\nquit\n").unwrap();
    let output = qemu.wait_with_output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_hook_of_proxmox_invites_and_prints_arguments_that_qemu_takes() {
    let place = Place::new();
    let lists = place.dir.path().join("lists");
    std::fs::create_dir(&lists).unwrap();
    std::fs::write(lists.join("100.zones"), format!("# zones of VM 100\n{}\n", place.zone().display()))
        .unwrap();
    let hook = |words: &[&str]| {
        let program = Path::new(env!("CARGO_BIN_EXE_tombolo"));
        let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../vm/proxmox/tombolo-hook"));
        command.args(words).env("PATH", path).env("TOMBOLO_PROXMOX", &lists);
        command.env("TOMBOLO_ZONES_RUN", place.dir.path().join("run")).output().unwrap()
    };
    assert!(hook(&["100", "pre-start"]).status.success());
    assert_eq!(place.member("vm-100").unwrap().state, MemberState::Invited);
    let printed = hook(&["100", "args", "512"]);
    let arguments = String::from_utf8(printed.stdout).unwrap();
    // Proxmox puts its own -m before what 'args' has.
    let said = qemu_takes(&format!("-machine pc -m 512 {arguments}"));
    assert!(said.contains("virtio-pmem") && said.contains("zone-own"), "{said}");
    // A second zone of the same name.
    let second = place.dir.path().join("second");
    std::fs::create_dir(&second).unwrap();
    place.good(&["zone", "create", "second/own.zone", "--size", "16M"]);
    let both = format!("{}\n{} ro", place.zone().display(), second.join("own.zone").display());
    std::fs::write(lists.join("102.zones"), both).unwrap();
    let arguments = String::from_utf8(hook(&["102", "args", "512"]).stdout).unwrap();
    let said = qemu_takes(&format!("-machine pc -m 512 {arguments}"));
    assert_eq!(said.matches("memdev: /objects/zone-own-").count(), 2, "{said}");
    assert!(hook(&["101", "pre-start"]).status.success(), "a VM without a list is none of our business");
    std::fs::write(lists.join("100.zones"), format!("{} rw\n", place.zone().display())).unwrap();
    let refused = hook(&["100", "pre-start"]);
    assert!(
        !refused.status.success()
            && String::from_utf8_lossy(&refused.stderr).contains("write 'ro' or nothing")
    );
    std::fs::write(lists.join("100.zones"), "/nowhere/own.zone\n").unwrap();
    assert!(!hook(&["100", "pre-start"]).status.success());
    let refused = hook(&["100", "args", "512"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{said}");
    assert!(said.contains("/nowhere/own.zone") && said.contains("No such file"), "{said}");
}
