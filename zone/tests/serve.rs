// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of a zone for VMs that tombolo does not start, and a member that writes into the member table.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tombolo_zone::doorbell::process::Process;
use tombolo_zone::doorbell::{Bell, wire};
use tombolo_zone::serve::{Server, room::Room, start};
use tombolo_zone::{Backing, Member, MemberId, MemberState, Rights, Role, Zone, ZoneConfig};

const LONG: Duration = Duration::from_secs(300);
const FOLDER: &str = "TOMBOLO_ZONES_RUN";

/// Runs the rest of the test `name` in a process of its own, whose folder of sockets is a new one.
fn apart(name: &str, test: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os("TOMBOLO_TEST_FOLDER") {
        return test(Path::new(&folder));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut own = Command::new(std::env::current_exe().unwrap());
    own.args(["--exact", name, "--nocapture"]).env("TOMBOLO_TEST_FOLDER", dir.path());
    assert!(own.env(FOLDER, dir.path().join("zones")).status().unwrap().success());
}

fn named(zone: &Zone, name: &str) -> Option<Member> {
    zone.members().unwrap().into_iter().find(|m| m.name == name)
}

fn created(dir: &Path) -> (PathBuf, Zone) {
    let path = dir.join("zone");
    let config = ZoneConfig::new("served", 16 << 20).backing(Backing::File(path.clone()));
    let zone = Zone::create(&config).unwrap();
    (path, zone)
}

/// Serves the zone in a thread. Returns the server's log lines.
fn serve(path: &Path) -> Receiver<String> {
    let server = Server::start(path).unwrap();
    let (says, said) = channel();
    std::thread::spawn(move || server.run(&mut |line| drop(says.send(line))));
    said
}

/// A zone with a server that runs in a thread, and the VM `a` that is invited to it.
struct Served {
    zone: Zone,
    a: MemberId,
    /// The server's log lines.
    said: Receiver<String>,
    socket: PathBuf,
}

impl Served {
    fn new(dir: &Path) -> Served {
        let (path, zone) = created(dir);
        let a = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        drop(zone);
        let said = serve(&path);
        let zone = Zone::open(&path, true).unwrap();
        let socket = Room::of(zone.uuid()).unwrap().socket("a");
        Served { zone, a, said, socket }
    }
}

/// Waits for the server, which looks once a second.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until the server has looked twice which members live.
fn await_looks(zone: &Zone) {
    for _ in 0..2 {
        let pulse = zone.pulse().unwrap();
        until("the server stands still", || zone.pulse().unwrap() != pulse);
    }
}

#[test]
fn slots_with_another_vms_name_connect_to_no_socket_and_take_no_vm_its_own() {
    apart("slots_with_another_vms_name_connect_to_no_socket_and_take_no_vm_its_own", |dir| {
        let (path, zone) = created(dir);
        let a = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        drop(zone);
        let said = serve(&path);
        let none = Path::new("/nonexistent");
        let socket = start::invite(&path, "b", Rights::READ_WRITE, none).unwrap().socket;
        let zone = Zone::open(&path, true).unwrap();
        let b = named(&zone, "b").unwrap().id;
        let slot = |id: tombolo_zone::MemberId| 4096 + 256 * u64::from(id.index());
        for (round, name) in ["b", "a", "other", ""].into_iter().enumerate() {
            for id in [a, b] {
                let mut field = [0; 32];
                field[..name.len()].copy_from_slice(name.as_bytes());
                zone.mem().write(slot(id) + 24, &field).unwrap();
                zone.mem().store_u64(slot(id), u64::from(u32::MAX) << 32 | 2).unwrap();
            }
            // Slots that nobody was invited to.
            for i in 40..64 {
                zone.mem().store_u64(4096 + 256 * i, 1).unwrap();
                zone.mem().store_u32(4096 + 256 * i + 12, 1).unwrap();
                zone.mem().write(4096 + 256 * i + 24, b"a\0").unwrap();
            }
            until("the names are not restored", || {
                let kept = |id, name| {
                    let there = zone.member(id).unwrap();
                    there.name == name && there.state == MemberState::Invited && there.role == Some(Role::Vm)
                };
                kept(a, "a") && kept(b, "b")
            });
            // The server looks at all of them before it serves this one.
            start::invite(&path, &format!("more-{round}"), Rights::READ_WRITE, none).unwrap();
        }
        let said: Vec<String> = said.try_iter().collect();
        assert!(!said.iter().any(|line| line.contains("connected")), "{said:?}");
        let room = Room::of(zone.uuid()).unwrap();
        assert!(room.socket("a").exists() && socket.exists() && !room.socket("other").exists());
        // Their own socket is theirs, whatever their slots say meanwhile.
        let _bell = Bell::connect(&socket, || ()).unwrap();
        until("b does not live", || zone.member(b).unwrap().alive);
        zone.mem().write(slot(b) + 24, b"a\0").unwrap();
        until("the name of a living VM is not restored", || zone.member(b).unwrap().name == "b");
        start::expel(&path, "a", false).unwrap();
        until("its socket is there", || !room.socket("a").exists());
        assert!(start::expel(&path, "b", false).unwrap_err().to_string().contains("lives"));
    });
}

#[test]
fn a_vm_that_comes_while_its_zone_is_repaired_is_refused_and_can_come_afterwards() {
    apart("a_vm_that_comes_while_its_zone_is_repaired_is_refused_and_can_come_afterwards", |dir| {
        let Served { zone, a, said, socket } = Served::new(dir);
        let kept_out = zone.keep_members_out().unwrap();
        let mut refused = UnixStream::connect(&socket).unwrap();
        let mut answer = Vec::new();
        refused.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, wire::REFUSED.to_le_bytes(), "it was let in, or QEMU waits for an answer");
        let line = said.recv_timeout(LONG).unwrap();
        assert!(line.starts_with("a: refused:") && line.contains("is being repaired"), "{line}");
        drop(kept_out);
        // A VM that is let in is seen by who keeps members out from now on.
        let _bell = Bell::connect(&socket, || ()).unwrap();
        let _kept_out = zone.keep_members_out().unwrap();
        assert!(zone.member(a).unwrap().alive);
        zone.mem().store_u64(4096 + 256 * u64::from(a.index()), 7 << 32 | 2).unwrap();
        await_looks(&zone);
        let there = zone.member(a).unwrap();
        assert!(there.alive && there.state == MemberState::Active && there.epoch == 7, "{there:?}");
    });
}

#[test]
fn a_vm_whose_connection_another_process_has_made_lives_on_when_that_one_ends() {
    apart("a_vm_whose_connection_another_process_has_made_lives_on_when_that_one_ends", |dir| {
        let Served { zone, a, said, socket } = Served::new(dir);
        // The first process ends with a line on its input, the second one, which is the VM, with its input.
        let script = "import os,socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.readline() if os.fork() else os.read(3, 1)";
        let mut first = Command::new("sh");
        first.args(["-c", "exec 3<&0 < \"$2\"; exec python3 -c \"$0\" \"$1\"", script]).arg(&socket);
        let line = dir.join("line");
        assert!(Command::new("mkfifo").arg(&line).status().unwrap().success());
        let mut first = first.arg(&line).stdin(Stdio::piped()).spawn().unwrap();
        let vm = first.stdin.take();
        let mut line = File::create(&line).unwrap();
        until("it did not join", || said.try_iter().any(|line| line.starts_with("a: connected")));
        assert!(zone.member(a).unwrap().assumed);
        line.write_all(b"\n").unwrap();
        first.wait().unwrap();
        await_looks(&zone);
        assert!(zone.member(a).unwrap().alive && said.try_recv().is_err());
        drop(vm);
        until("it does not end", || !zone.member(a).unwrap().alive);
        assert_eq!(said.recv_timeout(LONG).unwrap(), "a: ended");
    });
}

#[test]
fn a_vm_joins_though_another_can_not_be_served() {
    apart("a_vm_joins_though_another_can_not_be_served", |dir| {
        let (path, zone) = created(dir);
        let a = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        let room = Room::of(zone.uuid()).unwrap();
        drop(zone);
        let said = serve(&path);
        // No member has such a name.
        room.invite("a\nb", Rights::READ_WRITE).unwrap();
        let zone = Zone::open(&path, true).unwrap();
        let _bell = Bell::connect(room.socket("a"), || ()).unwrap();
        until("it did not join", || said.try_iter().any(|line| line.starts_with("a: connected")));
        assert!(zone.member(a).unwrap().alive);
    });
}

/// Its end would not be seen.
#[test]
fn a_process_for_which_no_descriptor_is_left_is_not_taken_for_one_that_can_not_be_known() {
    apart("a_process_for_which_no_descriptor_is_left_is_not_taken_for_one_that_can_not_be_known", |_| {
        let (stream, _other) = UnixStream::pair().unwrap();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let none = rustix::process::Rlimit { current: Some(0), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
        let found = Process::of(&stream);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        assert_eq!(found.unwrap_err().raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()));
        assert!(Process::of(&stream).unwrap().is_some());
    });
}

#[test]
fn the_rights_of_an_invitation_change_while_its_vm_does_not_run() {
    apart("the_rights_of_an_invitation_change_while_its_vm_does_not_run", |dir| {
        let path = dir.join("zone");
        let config = ZoneConfig::new("served", 16 << 20).backing(Backing::File(path.clone()));
        drop(Zone::create(&config).unwrap());
        let room = Room::of(Zone::open(&path, false).unwrap().uuid()).unwrap();
        room.make().unwrap();
        room.invite("a", Rights::READ_WRITE).unwrap();
        let server = Server::start(&path).unwrap();
        std::thread::spawn(move || server.run(&mut |_| ()));
        let zone = Zone::open(&path, true).unwrap();
        assert_eq!(named(&zone, "a").unwrap().rights, Rights::READ_WRITE);
        let none = Path::new("/nonexistent");
        let socket = start::invite(&path, "a", Rights::READ_ONLY, none).unwrap().socket;
        let _bell = Bell::connect(&socket, || ()).unwrap();
        until("it is not active", || named(&zone, "a").unwrap().state == MemberState::Active);
        assert_eq!(named(&zone, "a").unwrap().rights, Rights::READ_ONLY);
        assert!(start::invite(&path, "a", Rights::READ_WRITE, none).is_err(), "it runs");
    });
}

#[test]
fn names_in_all_slots_keep_no_invited_vm_from_its_socket_when_a_server_starts() {
    apart("names_in_all_slots_keep_no_invited_vm_from_its_socket_when_a_server_starts", |dir| {
        let (path, zone) = created(dir);
        let room = Room::of(zone.uuid()).unwrap();
        room.make().unwrap();
        room.invite("web", Rights::READ_WRITE).unwrap();
        for i in 0..64 {
            zone.mem().write(4096 + 256 * i + 24, format!("a{i}\0").as_bytes()).unwrap();
            zone.mem().store_u32(4096 + 256 * i + 12, 1).unwrap();
            zone.mem().store_u64(4096 + 256 * i, 1).unwrap();
        }
        assert_eq!(zone.members().unwrap().iter().filter(|m| m.role == Some(Role::Vm)).count(), 64);
        drop(zone);
        let server = Server::start(&path);
        assert!(room.socket("web").exists());
        drop(server);
    });
}

/// A slot went to such a VM later, though its invitation had failed.
#[test]
fn an_invitation_that_gets_no_server_leaves_nothing() {
    apart("an_invitation_that_gets_no_server_leaves_nothing", |dir| {
        let (path, zone) = created(dir);
        let room = Room::of(zone.uuid()).unwrap();
        drop(zone);
        let program = Path::new("/bin/false");
        let said = start::invite(&path, "a", Rights::READ_WRITE, program).unwrap_err().to_string();
        assert!(said.contains("the zone's server ended at once"), "{said}");
        let zone = Zone::open(&path, true).unwrap();
        assert!(room.invited().unwrap().is_empty() && zone.members().unwrap().is_empty());
        // One that was invited before stays so.
        room.invite("b", Rights::READ_WRITE).unwrap();
        start::invite(&path, "b", Rights::READ_WRITE, program).unwrap_err();
        assert!(room.invited().unwrap().contains_key("b") && named(&zone, "b").is_some());
    });
}
