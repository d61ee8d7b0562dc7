// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rare messages of a VMM: resets, addresses at the end of the address space, state for fewer queues than there are.

mod common;

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use common::lab::{Lab, exchange, message};
use common::program::Switch;
use common::{Rig, frame, wait_for};
use tombolo_net::control::config::{UplinkConfig, Way};
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::forwarding::multicast::OPEN;
use tombolo_net::ports::counters::Reason;
use tombolo_net::ports::port::Port;
use tombolo_net::ports::protocol::Session;
use tombolo_net::vring::dirty::DirtyLog;
use tombolo_net::vring::features::OFFERED;
use tombolo_net_driver::{Nic, NicConfig, Ram};
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{VhostUserBackendReqHandlerMut, VhostUserFrontend};

#[test]
fn a_device_that_is_reset_starts_again_in_the_memory_that_was_shared_before() {
    // QEMU 10 resets the back-end whenever the guest resets its device, and shares only memory that has changed.
    for packed in [false, true] {
        let lab = Lab::new(2, 1);
        let config = NicConfig { packed, ..NicConfig::default() };
        let (mut a, mut b) = (lab.connect(0, config), lab.connect(1, NicConfig::default()));
        for (round, owner) in [false, true, false].into_iter().enumerate() {
            exchange(&mut a, &mut b, 5, round as u8);
            let features = a.features();
            let front = a.front().unwrap();
            for queue in 0..2 {
                front.get_vring_base(queue).unwrap();
            }
            if owner {
                front.reset_owner().unwrap()
            } else {
                front.reset_device().unwrap()
            }
            let down = frame(Rig::mac(0), Rig::mac(1), 80, 1);
            assert!(b.send(&down));
            wait_for("the end of a frame for a device that is down", || (b.reap() > 0).then_some(()));
            a.front().unwrap().set_features(features).unwrap();
            a.start_rings(0).unwrap();
        }
        exchange(&mut a, &mut b, 5, 9);
    }
}

#[test]
fn a_used_ring_whose_log_is_at_the_end_of_all_addresses_stops_no_worker() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[NicConfig { packed, ..NicConfig::default() }, NicConfig::default()]);
        let log = Ram::new(4096, 0).unwrap();
        let log = Arc::new(DirtyLog::map(log.file(), 4096, 0).unwrap());
        for vring in rig.ports[0].vrings() {
            let mut vring = vring.lock();
            (vring.log, vring.log_used) = (Some(log.clone()), Some(u64::MAX));
        }
        let sent = frame(Rig::mac(1), Rig::mac(0), 80, 1);
        assert!(rig.nics[0].send(&sent));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
    }
}

#[test]
fn a_log_that_begins_where_a_ring_began_keeps_back_no_frame() {
    // A packed ring is at the same place again after two laps.
    let config = NicConfig { packed: true, size: 16, ..NicConfig::default() };
    let mut rig = Rig::new(&[config; 2]);
    let log = Ram::new(4096, 0).unwrap();
    let log = Arc::new(DirtyLog::map(log.file(), 4096, 0).unwrap());
    for n in 0..40 {
        if n == 31 {
            rig.ports.iter().flat_map(|p| p.vrings()).for_each(|v| v.lock().log = Some(log.clone()));
        }
        let sent = frame(Rig::mac(1), Rig::mac(0), 80, n);
        assert!(rig.nics[0].send(&sent));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent), "frame {n}");
        assert_eq!(rig.nics[0].reap(), 1, "frame {n}");
    }
}

/// SEND_RARP.
const ANNOUNCE: u32 = 19;

#[test]
fn of_a_flood_of_announcements_the_others_get_a_few() {
    let lab = Lab::new(2, 1);
    let stream = UnixStream::connect(lab.socket(0)).unwrap();
    let raw = stream.try_clone().unwrap();
    let mut a = Nic::new(NicConfig::default()).unwrap();
    a.connect_over(stream, &mut None).unwrap();
    let _b = lab.connect(1, NicConfig::default());
    let begun = Instant::now();
    for _ in 0..2000 {
        message(&raw, ANNOUNCE, &[&Rig::mac(0).0[..], &[0; 2]].concat(), &[]);
    }
    // Answered after all of them.
    a.front().unwrap().get_features().unwrap();
    // Twenty a second, and two at once.
    let most = 3 + begun.elapsed().as_millis() as u64 / 50;
    let sent = lab.daemon.switch().view().ports()[0].port.sent().packets;
    assert!((1..=most).contains(&sent), "{sent} announcements, {most} at most");
}

#[test]
fn an_announcement_is_judged_like_a_frame_of_the_guest_and_its_front_end_stays_connected() {
    // QEMU announces the MAC of its device, which is not the port's where the guest has set another one.
    for check_mac in [true, false] {
        let lab = Lab::with(2, 1, |config, _| config.port[0].check_mac = check_mac);
        let stream = UnixStream::connect(lab.socket(0)).unwrap();
        let raw = stream.try_clone().unwrap();
        let mut a = Nic::new(NicConfig::default()).unwrap();
        a.connect_over(stream, &mut None).unwrap();
        let mut b = lab.connect(1, NicConfig::default());
        message(&raw, ANNOUNCE, &[&Rig::mac(7).0[..], &[0; 2]].concat(), &[]);
        a.front().unwrap().get_features().expect("an answer after the announcement");
        if !check_mac {
            let (_, announced) = wait_for("the announcement", || b.receive());
            assert_eq!((&announced[6..12], &announced[12..14]), (&Rig::mac(7).0[..], &[0x80, 0x35][..]));
        }
        exchange(&mut a, &mut b, 1, 1);
        let sent = lab.daemon.switch().view().ports()[0].port.sent();
        assert_eq!(sent.dropped_for(Reason::SpoofMac), u64::from(check_mac));
        assert_eq!(sent.packets, 2, "the announcement and a frame");
    }
}

#[test]
fn in_flight_state_for_fewer_queues_than_before_keeps_no_older_memory() {
    let switch = Arc::new(tombolo_net::forwarding::switch::Switch::new(1, 0, true).unwrap());
    let port = Arc::new(Port::new("p", 2));
    let mut session = Session::new(switch, port.clone(), OFFERED);
    for queues in [4, 1] {
        let (shape, file) = session.get_inflight_fd(&VhostUserInflight::new(0, 0, queues, 64)).unwrap();
        session.set_inflight_fd(&shape, file).unwrap();
        let stored = port.vrings().iter().filter(|v| v.lock().inflight.is_some()).count();
        assert_eq!(stored, usize::from(queues));
    }
}

#[test]
fn a_guest_that_comes_to_run_long_after_its_vmm_connected_gets_all_multicast_at_first() {
    // A migration may take longer than that; the guest joined its groups on the other host.
    let lab = Lab::new(1, 1);
    let mut a = lab.connect(0, NicConfig::default());
    a.front().unwrap().get_vring_base(0).unwrap();
    a.front().unwrap().get_vring_base(1).unwrap();
    let switch = lab.daemon.switch();
    let resumed = switch.now();
    a.start_rings(0).unwrap();
    assert!(switch.view().ports()[0].port.groups.is_open(resumed + OPEN.as_nanos() as u64 - 1));
}

#[test]
fn the_rest_of_a_frame_follows_as_soon_as_passt_reads_though_no_other_frame_does() {
    let listeners = Mutex::new(None);
    let lab = Lab::with(1, 1, |config, dir| {
        let path = dir.join("passt");
        *listeners.lock().unwrap() = Some(UnixListener::bind(&path).unwrap());
        config.uplink = vec![UplinkConfig::new("out".into(), Way::Passt(path))];
    });
    let listener = listeners.into_inner().unwrap().unwrap();
    let (mut passt, _) = listener.accept().unwrap();
    passt.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let config = NicConfig { tx_buffer: 66_000, ..NicConfig::default() };
    let mut a = Nic::new(config).unwrap();
    a.connect(&lab.socket(0)).unwrap();
    // More than the connection holds, so one frame is cut.
    let out = |n: u8| frame(Rig::mac(9), Rig::mac(0), 60_000, n);
    for n in 0..16 {
        assert!(a.send(&out(n)));
    }
    let view = lab.daemon.switch().view();
    let [uplink, sender] = ["out", "vm0"].map(|n| view.ports().iter().find(|p| p.port.name() == n).unwrap());
    let taken = || uplink.port.received().packets;
    wait_for("the end of each frame", || (taken() + sender.port.sent().dropped() == 16).then_some(()));
    let taken = taken();
    assert!(taken < 16, "all of them fit, so none was cut");
    for n in 0..taken {
        let mut len = [0; 4];
        passt.read_exact(&mut len).unwrap();
        let mut got = vec![0; u32::from_be_bytes(len) as usize];
        passt.read_exact(&mut got).unwrap();
        assert_eq!(got, out(n as u8), "frame {n} of {taken}");
    }
}

#[test]
fn a_port_whose_settings_are_too_long_to_be_handed_over_is_named_and_the_others_go_on() {
    for rules in [2000, 4000] {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("switch.toml");
        let rule = r#"{ action = "drop", direction = "out", protocol = "tcp", destination-port = 25 }, "#;
        let [socket, mac] = [dir.path().join("long").display().to_string(), Rig::mac(2).to_string()];
        let text = format!(
            "[[port]]\nname = 'long'\nsocket = '{socket}'\nmacs = ['{mac}']\nrules = [{}]",
            rule.repeat(rules)
        );
        std::fs::write(&config, text).unwrap();
        let switch = Switch::start(1, &["-c", config.to_str().unwrap()]);
        assert!(switch.port("vm").is_some() && switch.port("long").is_none());
        assert!(switch.log().contains("long has too many settings"), "{}", switch.log());
        assert!(!std::path::Path::new(&socket).exists());
    }
}

#[test]
fn the_capture_of_a_port_ends_with_the_port() {
    let lab = Lab::new(1, 1);
    let capture = Request::Capture { name: "vm0".into(), snap: 100 };
    let (_, mut frames) = ask::<serde_json::Value>(&lab.control(), &capture).unwrap();
    frames.get_ref().set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    ask::<serde_json::Value>(&lab.control(), &Request::Remove { name: "vm0".into() }).unwrap();
    let mut all = Vec::new();
    frames.read_to_end(&mut all).expect("the end of the capture");
    assert_eq!(all[..4], [0x0a, 0x0d, 0x0d, 0x0a]);
}

#[test]
fn a_port_that_fails_stops_all_its_queues_tells_its_vmm_and_starts_again_with_the_next() {
    let mut rig = Rig::new(&[NicConfig::default(); 3]);
    let errors: Vec<_> = (0..2)
        .map(|queue| {
            let event = tombolo_net::event::Event::new().unwrap();
            let theirs = std::os::fd::AsFd::as_fd(&event).try_clone_to_owned().unwrap();
            rig.ports[1].vrings()[queue].lock().err = Some(theirs.into());
            event
        })
        .collect();
    rig.ports[1].fail();
    assert!(rig.ports[1].active_rx(0).is_none() && !rig.ports[1].is_transmitting(0));
    for (queue, mut error) in errors.into_iter().enumerate() {
        assert!(rig.ports[1].vrings()[queue].lock().ring.is_none());
        assert_eq!(rustix::io::read(&mut error, &mut [0; 8]).unwrap(), 8, "queue {queue}");
    }
    let to = |n: usize| frame(Rig::mac(n), Rig::mac(0), 60, 1);
    assert!(rig.nics[0].send(&to(1)) && rig.nics[0].send(&to(2)));
    rig.pass(0);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Down), 1);
    assert!(rig.nics[2].receive().is_some());
    // Failing twice changes nothing.
    rig.ports[1].fail();
    let next = Nic::new(NicConfig::default()).unwrap();
    next.attach(&rig.ports[1]).unwrap();
    rig.nics[1] = next;
    assert!(rig.nics[0].send(&to(1)));
    rig.pass(0);
    assert!(rig.nics[1].receive().is_some());
}
