// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sandboxed program and its keeper: the rights that the program has given up, and the keeper's use of them.

mod common;

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::namespace::alone;
use common::network::{cable, sh};
use common::program::Switch;
use common::{Rig, frame, wait_for};
use tombolo_net::control::config::UplinkConfig;
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::frames::frame::Mac;
use tombolo_net_driver::{Nic, NicConfig};

/// A line of /proc/PID/status; `None`: there is no such process any more.
fn status_if_there(pid: u32, key: &str) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':')).unwrap();
    Some(line.split_whitespace().map(str::to_owned).collect())
}

fn status(pid: u32, key: &str) -> Vec<String> {
    status_if_there(pid, key).expect("a process")
}

fn is_root() -> bool {
    // SAFETY: asks for a number.
    unsafe { libc::geteuid() == 0 }
}

fn runs(pid: u32) -> bool {
    status_if_there(pid, "State").is_some_and(|state| state[0] != "Z")
}

fn port(name: &str, socket: &Path, n: usize, role: &str) -> Request {
    let port = serde_json::json!({ "name": name, "socket": socket, "macs": [Rig::mac(n)], "role": role });
    Request::Add { port: serde_json::from_value(port).unwrap() }
}

#[test]
fn a_switch_that_root_starts_is_an_ordinary_user_without_rights() {
    let switch = Switch::start(0, &[]);
    let pid = switch.child.id();
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(pid, set), ["0000000000000000"], "{set}");
    }
    assert_eq!((&status(pid, "NoNewPrivs")[0][..], &status(pid, "Seccomp")[0][..]), ("1", "2"));
    if is_root() {
        for id in ["Uid", "Gid"] {
            assert!(status(pid, id).iter().all(|n| n != "0"), "{id}: {:?}", status(pid, id));
        }
        assert_eq!(status(pid, "Groups"), Vec::<String>::new());
        let named = Switch::start(0, &["--user", "daemon"]);
        assert_eq!(status(named.child.id(), "Uid"), ["1"; 4]);
    }
}

#[test]
fn the_sockets_of_ports_have_the_owner_group_and_mode_that_were_asked_for() {
    let of = |switch: &Switch, name: &str| {
        let meta = switch.dir.path().join(name).metadata().unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o777)
    };
    let switch = Switch::start(0, &["--mode", "0600"]);
    // SAFETY: asks for numbers.
    let own = unsafe { (libc::geteuid(), libc::getegid()) };
    assert_eq!(of(&switch, "vm"), (own.0, own.1, 0o600));
    // The port's own settings take precedence over the switch's.
    let mut port = port("more", &switch.dir.path().join("more"), 1, "server");
    let Request::Add { port: config } = &mut port else { unreachable!() };
    config.access = Some(serde_json::from_value(serde_json::json!({ "mode": "0606" })).unwrap());
    ask::<serde_json::Value>(&switch.control(), &port).unwrap();
    assert_eq!(of(&switch, "more").2, 0o606);
    if is_root() {
        let given = Switch::start(0, &["--owner", "daemon", "--group", "3"]);
        assert_eq!(of(&given, "vm"), (1, 3, 0o660));
        // The group of libvirt's QEMU, or that of KVM's users, if it exists.
        let text = std::fs::read_to_string("/etc/group").unwrap();
        let number = |name: &str| {
            text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(":x:")?.split(':').next())
        };
        let fits = ["libvirt-qemu", "qemu", "kvm"].into_iter().find_map(number);
        let plain = Switch::start(0, &[]);
        if let Some(group) = fits {
            assert_eq!(of(&plain, "vm"), (0, group.parse().unwrap(), 0o660));
        }
    }
    let mut refused = port_of(&switch, "wrong");
    let Request::Add { port: config } = &mut refused else { unreachable!() };
    config.access = Some(serde_json::from_value(serde_json::json!({ "group": "no such group" })).unwrap());
    let said = ask::<serde_json::Value>(&switch.control(), &refused).unwrap_err().to_string();
    assert!(said.contains("port wrong: there is no group 'no such group'"), "{said}");
    assert!(!switch.dir.path().join("wrong").exists());
}

fn port_of(switch: &Switch, name: &str) -> Request {
    port(name, &switch.dir.path().join(name), 2, "server")
}

#[test]
fn ports_come_and_go_in_a_sandboxed_switch_and_take_their_sockets_with_them() {
    let switch = Switch::start(0, &[]);
    for _ in 0..20 {
        ask::<serde_json::Value>(&switch.control(), &port_of(&switch, "more")).unwrap();
        let said =
            ask::<serde_json::Value>(&switch.control(), &port_of(&switch, "more")).unwrap_err().to_string();
        assert!(said.contains("the name is in use"), "{said}");
        assert!(switch.dir.path().join("more").exists());
        ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "more".into() }).unwrap();
        assert!(!switch.dir.path().join("more").exists());
    }
    // Refused by the switch itself, which owns the MAC already: no socket is left.
    let taken = port("taken", &switch.dir.path().join("taken"), 0, "server");
    let said = ask::<serde_json::Value>(&switch.control(), &taken).unwrap_err().to_string();
    assert!(said.contains("belongs to port vm already"), "{said}");
    assert!(!switch.dir.path().join("taken").exists());
}

#[test]
fn a_port_that_is_removed_leaves_the_socket_of_another_server_that_has_its_place() {
    let switch = Switch::start(0, &[]);
    ask::<serde_json::Value>(&switch.control(), &port_of(&switch, "more")).unwrap();
    let path = switch.dir.path().join("more");
    // By an administrator.
    std::fs::remove_file(&path).unwrap();
    let _others = UnixListener::bind(&path).unwrap();
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "more".into() }).unwrap();
    assert!(UnixStream::connect(&path).is_ok());
}

#[test]
fn a_port_that_many_add_and_remove_at_once_has_a_socket_if_and_only_if_the_switch_has_it() {
    let switch = Switch::start(0, &[]);
    let control = switch.control();
    let (add, remove) = (port_of(&switch, "come"), Request::Remove { name: "come".into() });
    for round in 0..200 {
        // Some are refused.
        let said = |request| drop(ask::<serde_json::Value>(&control, request));
        said(&add);
        std::thread::scope(|s| {
            for request in [&remove, &remove, &add, &remove, &add] {
                s.spawn(move || said(request));
            }
        });
        let answers = UnixStream::connect(switch.dir.path().join("come")).is_ok();
        assert_eq!(switch.port("come").is_some(), answers, "round {round}");
        said(&remove);
    }
}

#[test]
fn peers_of_the_control_socket_that_send_nothing_half_a_request_or_too_much_hold_up_no_command() {
    let switch = Switch::start(0, &[]);
    let peers: Vec<UnixStream> = (0..200)
        .map(|n| {
            let mut peer = UnixStream::connect(switch.control()).unwrap();
            peer.set_nonblocking(true).unwrap();
            // The switch takes as much as it likes.
            let _taken = match n % 4 {
                0 => Ok(()),
                1 => peer.write_all(b"{\"do\":\"por"),
                2 => peer.write_all(&vec![b'['; 4 << 20]),
                _ => peer.write_all(&[0xff, b'\n', 0]),
            };
            peer
        })
        .collect();
    for _ in 0..20 {
        ask::<serde_json::Value>(&switch.control(), &port_of(&switch, "more")).unwrap();
        assert!(switch.port("more").is_some());
        ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "more".into() }).unwrap();
    }
    drop(peers);
}

#[test]
fn a_sandboxed_switch_is_the_client_of_a_socket_that_comes_and_goes() {
    let switch = Switch::start(0, &[]);
    let mut a = switch.guest(0);
    let path = switch.dir.path().join("theirs");
    ask::<serde_json::Value>(&switch.control(), &port("theirs", &path, 1, "client")).unwrap();
    for round in 0..3 {
        let listener = UnixListener::bind(&path).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut b = Nic::new(NicConfig::default()).unwrap();
        b.connect_over(stream, &mut None).unwrap();
        let sent = frame(Rig::mac(1), Rig::mac(0), 100, round);
        assert!(a.send(&sent));
        assert_eq!(wait_for("the frame", || b.receive()).1, sent);
        drop((listener, b));
        std::fs::remove_file(&path).unwrap();
    }
    // No process listens: the port is removed all the same.
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "theirs".into() }).unwrap();
    assert!(switch.port("theirs").is_none());
}

#[test]
fn uplinks_come_and_go_while_the_switch_runs() {
    alone("uplinks_come_and_go_while_the_switch_runs", || {
        cable();
        let (here, there) = (Switch::start(0, &[]), Switch::start(1, &[]));
        let (mut a, mut b) = (here.guest(0), there.guest(0));
        let uplink = |way: &str, to: &str| {
            let uplink: UplinkConfig =
                serde_json::from_value(serde_json::json!({ "name": "out", way: to })).unwrap();
            Request::AddUplink { uplink }
        };
        for round in 0..3 {
            ask::<serde_json::Value>(&here.control(), &uplink("interface", "v0")).unwrap();
            ask::<serde_json::Value>(&there.control(), &uplink("interface", "v1")).unwrap();
            let sent = frame(Rig::mac(1), Rig::mac(0), 100, round);
            assert!(a.send(&sent));
            assert_eq!(wait_for("the frame", || b.receive()).1, sent);
            ask::<serde_json::Value>(&here.control(), &Request::Remove { name: "out".into() }).unwrap();
            assert!(here.port("out").is_none());
            // A frame without an owner has no uplink any more.
            assert!(a.send(&frame(Mac([2, 0, 0, 0, 0, 9]), Rig::mac(0), 60, 0)));
            wait_for("the drop", || {
                (here.port("vm")?["sent"]["drops"]["unknown"] == round + 1).then_some(())
            });
            ask::<serde_json::Value>(&there.control(), &Request::Remove { name: "out".into() }).unwrap();
        }
        for (way, to, words) in [
            ("interface", "nosuch0", "uplink out: interface nosuch0: not there"),
            ("passt", "/nonexistent", "start it with: passt -s /nonexistent"),
        ] {
            let said = ask::<serde_json::Value>(&here.control(), &uplink(way, to)).unwrap_err().to_string();
            assert!(said.contains(words), "{said}");
        }
        ask::<serde_json::Value>(&here.control(), &uplink("tap", "tap0")).unwrap();
        assert_eq!(here.port("out").unwrap()["kind"], "uplink");
        sh("ip link show tap0");
    });
}

#[test]
fn a_keeper_that_dies_takes_no_frame_along_and_a_switch_that_dies_takes_its_keeper() {
    let mut switch = Switch::start(0, &[]);
    let path = switch.dir.path().join("b");
    ask::<serde_json::Value>(&switch.control(), &port("b", &path, 1, "server")).unwrap();
    let (mut a, mut b) = (switch.guest(0), Nic::new(NicConfig::default()).unwrap());
    b.connect(&path).unwrap();
    let keeper = switch.keeper();
    // SAFETY: a signal to a process of ours.
    assert_eq!(unsafe { libc::kill(keeper as i32, libc::SIGKILL) }, 0);
    wait_for("the word of it", || switch.log().contains("the switch's keeper ended").then_some(()));
    let sent = frame(Rig::mac(1), Rig::mac(0), 100, 1);
    assert!(a.send(&sent));
    assert_eq!(wait_for("the frame", || b.receive()).1, sent);
    // It can still be told to end.
    // SAFETY: a signal to a process of ours.
    assert_eq!(unsafe { libc::kill(switch.child.id() as i32, libc::SIGTERM) }, 0);
    assert!(wait_for("the end", || switch.child.try_wait().unwrap()).success());

    let mut switch = Switch::start(0, &[]);
    let keeper = switch.keeper();
    switch.child.kill().unwrap();
    switch.child.wait().unwrap();
    wait_for("the keeper's end", || (!runs(keeper)).then_some(()));
}

#[test]
fn a_switch_ends_with_whoever_started_it_if_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control");
    // The kernel sends the signal when the thread ends that started the process.
    let (program, socket) = (env!("CARGO_BIN_EXE_tombolo-switch"), control.clone());
    let starter = std::thread::spawn(move || {
        let mut command = Command::new(program);
        command.arg("run").arg("--control").arg(&socket);
        // SAFETY: between fork and exec, one call that is safe there.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().unwrap();
        wait_for("the switch", || ask::<serde_json::Value>(&socket, &Request::Ports).ok());
        child
    });
    let mut child = starter.join().unwrap();
    assert!(wait_for("its end", || child.try_wait().unwrap()).success());
    assert!(!control.exists());
}

#[test]
fn ports_of_one_name_that_many_users_add_and_remove_at_once_are_the_same_to_switch_and_keeper() {
    let switch = Switch::start(0, &[]);
    let (control, socket) = (switch.control(), switch.dir.path().join("one"));
    let add = || ask::<serde_json::Value>(&control, &port("one", &socket, 1, "server"));
    let remove = || ask::<serde_json::Value>(&control, &Request::Remove { name: "one".into() });
    std::thread::scope(|scope| {
        for n in 0..6 {
            scope.spawn(move || {
                for _ in 0..15 {
                    // Others may have been faster.
                    let _refused = if n % 2 == 0 { add() } else { remove() };
                }
            });
        }
    });
    let _absent = remove();
    for _ in 0..3 {
        assert!(switch.port("one").is_none());
        add().unwrap();
        assert!(switch.port("one").is_some());
        remove().unwrap();
    }
}

#[test]
fn a_request_that_is_too_long_is_refused_in_words() {
    let switch = Switch::start(0, &[]);
    let mut stream = UnixStream::connect(switch.control()).unwrap();
    stream.write_all(&[b'x'; (64 << 10) + 1]).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("the line has more than 65536 bytes"), "{answer}");
    // The switch hangs up before the client has sent all of it.
    let name = "x".repeat(4 << 20);
    let said =
        ask::<serde_json::Value>(&switch.control(), &Request::Remove { name }).unwrap_err().to_string();
    assert!(said.contains("the line has more than 65536 bytes"), "{said}");
}
