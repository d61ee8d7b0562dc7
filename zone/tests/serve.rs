// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of a zone for VMs that tombolo does not start, and a member that writes into the member table.

use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use tombolo_zone::doorbell::Bell;
use tombolo_zone::serve::{Server, room::Room, start};
use tombolo_zone::{Backing, Member, MemberState, Rights, Role, Zone, ZoneConfig};

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

/// Waits for the server, which looks once a second.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn slots_with_another_vms_name_connect_to_no_socket_and_take_no_vm_its_own() {
    apart("slots_with_another_vms_name_connect_to_no_socket_and_take_no_vm_its_own", |dir| {
        let path = dir.join("zone");
        let config = ZoneConfig::new("served", 16 << 20).backing(Backing::File(path.clone()));
        let zone = Zone::create(&config).unwrap();
        let a = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        drop(zone);
        let server = Server::start(&path).unwrap();
        let (says, said) = channel();
        std::thread::spawn(move || server.run(&mut |line| says.send(line).unwrap()));
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
        start::expel(&path, "a").unwrap();
        until("its socket is there", || !room.socket("a").exists());
        assert!(start::expel(&path, "b").unwrap_err().to_string().contains("lives"));
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
        let path = dir.join("zone");
        let config = ZoneConfig::new("served", 16 << 20).backing(Backing::File(path.clone()));
        let zone = Zone::create(&config).unwrap();
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
