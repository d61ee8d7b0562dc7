// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as its users run it, sandboxed, with passt. Each test has a network namespace of its own. Needs iproute2, util-linux
//! and passt.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use common::namespace::alone;
use common::network::{ethernet, sh, sum};
use common::passt::{configured, discover, host, offer};
use common::program::Switch;
use common::{Rig, wait_for};
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::frames::frame::Mac;
use tombolo_net_driver::{Nic, NicConfig};

/// The processes that the keeper of `switch` has started: passt.
fn passts(switch: &Switch) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", switch.keeper())).unwrap();
    let children = threads.filter_map(|thread| {
        // The thread may have ended.
        std::fs::read_to_string(thread.unwrap().path().join("children")).ok()
    });
    let all: String = children.collect();
    all.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn passt(switch: &Switch) -> u32 {
    wait_for("passt", || passts(switch).first().copied())
}

fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn signal(pid: u32, signal: libc::c_int) {
    // SAFETY: a signal to a process of this test.
    assert_eq!(unsafe { libc::kill(pid as libc::pid_t, signal) }, 0);
}

#[test]
fn a_guest_gets_an_address_from_passt_which_ends_with_the_switch() {
    alone("a_guest_gets_an_address_from_passt_which_ends_with_the_switch", || {
        host();
        let mut switch = Switch::start(1, &["--uplink", "user=passt"]);
        let own = Rig::mac(1);
        let mut guest = switch.guest(0);
        let offer = offer(&mut guest, own);
        assert!(!switch.log().contains("passt ended"), "{}", switch.log());
        assert_eq!(
            (&offer[46..50], &offer[58..62]),
            (&[1, 2, 3, 4][..], &[192, 0, 2, 7][..]),
            "{}",
            switch.log()
        );

        // A stopped process restarts the call that it waited in, which passes the sandbox again.
        let pid = switch.child.id() as i32;
        // SAFETY: signals to a child that has not ended, and waiting for its stop.
        unsafe {
            assert_eq!(libc::kill(pid, libc::SIGSTOP), 0);
            assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), libc::WUNTRACED), pid);
            assert_eq!(libc::kill(pid, libc::SIGCONT), 0);
        }
        assert!(switch.port("uplink0").is_some());
        let passt = passt(&switch);
        switch.child.kill().unwrap();
        switch.child.wait().unwrap();
        wait_for("passt's end", || (!is_there(passt)).then_some(()));
    });
}

#[test]
fn a_guest_gets_a_prefix_of_ipv6_from_passt() {
    alone("a_guest_gets_a_prefix_of_ipv6_from_passt", || {
        host();
        sh("ip addr add fd00:9::2/64 dev out nodad; ip -6 route add default via fd00:9::1");
        let switch = Switch::start(1, &["--uplink", "user=passt"]);
        let mut guest = switch.guest(0);
        // A router solicitation from no address, to all routers.
        let mut solicitation = [&[0x60, 0, 0, 0, 0, 8, 58, 255][..], &[0; 16], &[0xff, 2]].concat();
        solicitation.extend([0; 13]);
        solicitation.extend([2, 133, 0, 0, 0, 0, 0, 0, 0]);
        let check = sum(&[&solicitation[8..40], &[0, 0, 0, 8, 0, 0, 0, 58], &solicitation[40..]].concat());
        solicitation[42..44].copy_from_slice(&check);
        let solicitation = ethernet(Mac([0x33, 0x33, 0, 0, 0, 2]), Rig::mac(1), 0x86dd, &solicitation);
        // passt may still be starting, so the request is repeated.
        let mut asked = Instant::now() - Duration::from_secs(1);
        let advertised = wait_for("a router's advertisement", || {
            if asked.elapsed() > Duration::from_millis(500) {
                guest.send(&solicitation);
                asked = Instant::now();
            }
            guest
                .receive()
                .map(|(_, f)| f)
                .filter(|f| f.len() > 70 && f[12..14] == [0x86, 0xdd] && f[54] == 134)
        });
        let prefix = [0xfd, 0, 0, 9, 0, 0, 0, 0];
        assert!(advertised.windows(8).any(|w| w == prefix), "{advertised:02x?}");
    });
}

const FORWARDS: &str = "[[uplink]]\nname = 'out'\nuser = 'passt'\ntcp-ports = ['8080:80']\n";

#[test]
fn a_switch_that_takes_the_place_of_a_killed_one_forwards_its_ports() {
    alone("a_switch_that_takes_the_place_of_a_killed_one_forwards_its_ports", || {
        host();
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..20 {
            let mut switch = configured(dir.path(), FORWARDS);
            // The predecessor's passt may still have the port: the first one ends then, and is started again.
            wait_for("a forwarded port", || {
                let is_forwarded = switch.is_up("out") && TcpStream::connect("192.0.2.7:8080").is_ok();
                is_forwarded.then_some(())
            });
            switch.child.kill().unwrap();
            switch.child.wait().unwrap();
        }
    });
}

#[test]
fn each_port_has_a_passt_of_its_own_and_no_frame_of_another() {
    alone("each_port_has_a_passt_of_its_own_and_no_frame_of_another", || {
        host();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("other");
        let other = format!("other,{},{}", socket.display(), Rig::mac(2));
        let switch = Switch::start(1, &["--port", &other, "--uplink", "user=passt"]);
        assert_eq!(passts(&switch).len(), 2);
        let mut guests = [switch.guest(0), Nic::new(NicConfig::default()).unwrap()];
        guests[1].connect(&socket).unwrap();
        for (guest, own) in guests.iter_mut().zip([1, 2]) {
            let offer = offer(guest, Rig::mac(own));
            assert_eq!((&offer[..6], &offer[58..62]), (&Rig::mac(own).0[..], &[192, 0, 2, 7][..]));
        }
        // Of the two guests' broadcasts each passt had those of one.
        let count = |name: &str, way: &str| switch.port(name).unwrap()[way]["packets"].as_u64().unwrap();
        for (port, uplink) in [("vm", "uplink0"), ("other", "uplink1")] {
            wait_for(port, || (count(uplink, "received") == count(port, "sent")).then_some(()));
        }
    });
}

#[test]
fn a_passt_without_a_port_is_refused_where_there_are_several_and_a_second_port_where_there_is_one() {
    alone(
        "a_passt_without_a_port_is_refused_where_there_are_several_and_a_second_port_where_there_is_one",
        || {
            host();
            let switch = Switch::start(1, &["--uplink", "user=passt"]);
            let socket = switch.dir.path().join("other");
            let port = serde_json::json!({ "name": "other", "socket": socket, "macs": [Rig::mac(2)] });
            let port = || serde_json::from_value(port.clone()).unwrap();
            let add = || ask::<serde_json::Value>(&switch.control(), &Request::Add { port: port() });
            let said = add().unwrap_err().to_string();
            assert!(said.contains("uplink0, a passt, serves one guest"), "{said}");
            assert!(switch.port("other").is_none() && !socket.exists());
            ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "uplink0".into() }).unwrap();
            add().unwrap();
            let uplink = |port: &[&str]| {
                let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tombolo-switch"));
                command
                    .args(["add-uplink", "out", "user=passt", "--control"])
                    .arg(switch.control())
                    .args(port);
                let output = command.output().unwrap();
                (output.status.success(), String::from_utf8(output.stderr).unwrap())
            };
            let (taken, said) = uplink(&[]);
            assert!(!taken && said.contains("write an uplink for each, with port = "), "{said}");
            assert!(passts(&switch).is_empty());
            let (taken, said) = uplink(&["--port", "vm"]);
            assert!(taken, "{said}");
            offer(&mut switch.guest(0), Rig::mac(1));
        },
    );
}

#[test]
fn a_passt_that_is_killed_is_started_again_and_its_uplink_is_down_meanwhile() {
    alone("a_passt_that_is_killed_is_started_again_and_its_uplink_is_down_meanwhile", || {
        host();
        let dir = tempfile::tempdir().unwrap();
        let (program, broken) = (dir.path().join("program"), dir.path().join("broken"));
        let script = format!("#!/bin/sh\n[ ! -e {} ] && exec passt \"$@\"\n", broken.display());
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let uplink = format!("[[uplink]]\nname = 'out'\nuser = '{}'\n", program.display());
        let switch = configured(dir.path(), &uplink);
        let mut guest = switch.guest(0);
        assert_eq!(offer(&mut guest, Rig::mac(1))[58..62], [192, 0, 2, 7]);
        let state = || switch.is_up("out");
        assert!(state());
        for _ in 0..2 {
            std::fs::write(&broken, "").unwrap();
            signal(passt(&switch), libc::SIGKILL);
            wait_for("the uplink's end", || (!state()).then_some(()));
            std::fs::remove_file(&broken).unwrap();
            assert_eq!(offer(&mut guest, Rig::mac(1))[58..62], [192, 0, 2, 7]);
            assert!(state());
        }
        assert!(switch.log().contains("uplink out: passt ended (signal: 9"), "{}", switch.log());
    });
}

#[test]
fn a_stopped_passt_ends_with_its_uplink_and_with_its_switch_and_frees_its_ports() {
    alone("a_stopped_passt_ends_with_its_uplink_and_with_its_switch_and_frees_its_ports", || {
        host();
        let dir = tempfile::tempdir().unwrap();
        let start = || {
            let switch = configured(dir.path(), FORWARDS);
            wait_for("a forwarded port", || TcpStream::connect("192.0.2.7:8080").ok());
            let passt = passt(&switch);
            signal(passt, libc::SIGSTOP);
            (switch, passt)
        };
        let free = || std::net::TcpListener::bind("192.0.2.7:8080").unwrap();
        let (mut switch, stopped) = start();
        ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "out".into() }).unwrap();
        assert!(!is_there(stopped));
        free();
        signal(switch.child.id(), libc::SIGTERM);
        assert!(switch.child.wait().unwrap().success());
        let (mut switch, stopped) = start();
        signal(switch.child.id(), libc::SIGTERM);
        assert!(switch.child.wait().unwrap().success());
        assert!(!is_there(stopped));
        free();
        let (mut switch, stopped) = start();
        switch.child.kill().unwrap();
        switch.child.wait().unwrap();
        let (_successor, _) = start();
        assert!(!is_there(stopped));
    });
}

#[test]
fn a_connection_to_a_passt_of_somebody_else_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("passt");
    let listener = UnixListener::bind(&socket).unwrap();
    let switch = Switch::start(1, &["--uplink", &format!("passt={}", socket.display())]);
    let mut guest = switch.guest(0);
    let sent = discover(Rig::mac(1));
    for _ in 0..2 {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let (mut got, mut have) = (vec![0; 4 + sent.len()], 0);
        // The switch may not have the connection yet.
        wait_for("a frame", || {
            let _full = guest.send(&sent);
            have += stream.read(&mut got[have..]).unwrap_or(0);
            (have == got.len()).then_some(())
        });
        assert_eq!((&got[..4], &got[4..]), (&(sent.len() as u32).to_be_bytes()[..], &sent[..]));
    }
    // Its frames have no end that the switch could find.
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&[0xff; 4]).unwrap();
    drop(listener);
    wait_for("the uplink's end", || (!switch.is_up("uplink0")).then_some(()));
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}
