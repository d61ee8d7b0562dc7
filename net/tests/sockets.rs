// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A whole switch with its threads, and guests that connect over sockets as a VMM does.

mod common;

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::lab::{Lab, exchange, hung_up, message, port};
use common::{Rig, frame, wait_for};
use tombolo_net::control::config::{Config, PortConfig};
use tombolo_net::control::daemon::Daemon;
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::event::Event;
use tombolo_net::forwarding::view::Attached;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::counters::Reason;
use tombolo_net::ports::endpoint::Role;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net::vring::features::bit;
use tombolo_net::vring::queue::Negotiated;
use tombolo_net_driver::{Nic, NicConfig, Ram};
use vhost::VhostBackend;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

#[test]
fn guests_over_sockets_exchange_frames_asleep_and_awake() {
    for packed in [false, true] {
        for workers in [1, 2] {
            let lab = Lab::new(2, workers);
            let features = NicConfig::default().features | 1 << bit::EVENT_IDX;
            let config = NicConfig { packed, features, ..NicConfig::default() };
            let (mut a, mut b) = (lab.connect(0, config), lab.connect(1, config));
            exchange(&mut a, &mut b, 300, 1);
        }
    }
}

#[test]
fn a_switch_that_never_polls_wakes_for_each_frame() {
    let lab = Lab::with(2, 2, |config, _| config.switch.poll_us = 0);
    let (mut a, mut b) = (lab.connect(0, NicConfig::default()), lab.connect(1, NicConfig::default()));
    for round in 0..50 {
        exchange(&mut a, &mut b, 1, round);
    }
}

#[test]
fn a_queue_may_be_enabled_before_the_features_are_set_as_qemu_does() {
    let lab = Lab::new(1, 1);
    let stream = UnixStream::connect(lab.socket(0)).unwrap();
    message(&stream, 1, &[], &[]);
    message(&stream, 15, &[], &[]);
    message(&stream, 16, &0xffff_u64.to_ne_bytes(), &[]);
    (&stream).read_exact(&mut [0; 40]).unwrap();
    for index in [0u32, 1] {
        let mut payload = index.to_ne_bytes().to_vec();
        payload.extend(1u32.to_ne_bytes());
        message(&stream, 18, &payload, &[]);
    }
    message(&stream, 1, &[], &[]);
    (&stream).read_exact(&mut [0; 20]).unwrap();
    let view = lab.daemon.switch().view();
    assert!(view.ports()[0].port.rx(0).lock().enabled && view.ports()[0].port.tx(0).lock().enabled);
}

#[test]
fn frames_in_a_queue_that_the_guest_no_longer_uses_end_and_reach_nobody() {
    for packed in [false, true] {
        let lab = Lab::new(2, 1);
        let config = NicConfig { packed, ..NicConfig::default() };
        let (mut a, mut b) = (lab.connect(0, config), lab.connect(1, config));
        exchange(&mut a, &mut b, 3, 1);
        a.front().unwrap().set_vring_enable(1, false).unwrap();
        // Answered after the message before.
        a.front().unwrap().get_features().unwrap();
        assert!(a.send(&frame(Rig::mac(1), Rig::mac(0), 90, 2)));
        wait_for("the frame's end", || {
            a.reap();
            (a.unsent() == 0).then_some(())
        });
        let sent = lab.daemon.switch().view().ports()[0].port.sent();
        assert_eq!((sent.packets, sent.dropped_for(Reason::Disabled)), (4, 1));
        a.front().unwrap().set_vring_enable(1, true).unwrap();
        a.front().unwrap().get_features().unwrap();
        exchange(&mut a, &mut b, 3, 3);
    }
}

#[test]
fn a_driver_may_be_told_its_mtu_by_its_vmm() {
    let lab = Lab::new(2, 1);
    let features = NicConfig::default().features | 1 << bit::MTU;
    let config = NicConfig { features, ..NicConfig::default() };
    let (mut a, mut b) = (lab.connect(0, config), lab.connect(1, config));
    exchange(&mut a, &mut b, 3, 1);
}

#[test]
fn a_guest_that_reconnects_goes_on_and_the_other_notices_nothing() {
    let lab = Lab::new(2, 1);
    let mut b = lab.connect(1, NicConfig::default());
    for round in 0..5 {
        let mut a = lab.connect(0, NicConfig { packed: round % 2 == 1, ..NicConfig::default() });
        exchange(&mut a, &mut b, 20, round);
    }
}

#[test]
fn a_switch_that_is_restarted_takes_up_the_same_rings() {
    for packed in [false, true] {
        let config = NicConfig { packed, ..NicConfig::default() };
        let mut a = Nic::new(config).unwrap();
        let mut b = Nic::new(config).unwrap();
        let mut kept: Vec<Option<(vhost::vhost_user::message::VhostUserInflight, std::fs::File)>> =
            vec![None, None];
        for round in 0..4 {
            let lab = Lab::new(2, 1);
            for (i, nic) in [&mut a, &mut b].into_iter().enumerate() {
                nic.connect_with(&lab.socket(i), &mut kept[i]).unwrap();
            }
            exchange(&mut a, &mut b, 37, round);
        }
    }
}

/// A front-end's description of `size` bytes of `ram`.
fn region(ram: &Ram, size: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: ram.gpa(),
        memory_size: size,
        userspace_addr: ram.user(),
        mmap_offset: 0,
        mmap_handle: ram.file().as_raw_fd(),
    }
}

#[test]
fn memory_comes_and_goes_while_frames_flow() {
    let lab = Lab::new(2, 1);
    let (mut a, mut b) = (lab.connect(0, NicConfig::default()), lab.connect(1, NicConfig::default()));
    let more = Ram::new(1 << 20, 0x9_0000_0000).unwrap();
    let second = Ram::new(1 << 19, more.gpa() + (1 << 19)).unwrap();
    let (whole, half) = (region(&more, 1 << 20), region(&more, 1 << 19));
    let other = region(&second, 1 << 19);
    for pairs in [1, 2, 4] {
        // QEMU 7.2 sends each change once for each queue pair: all that goes, then all that comes.
        let changes: [[&[_]; 2]; 3] = [[&[], &[whole]], [&[whole], &[half, other]], [&[half, other], &[]]];
        for [goes, comes] in changes {
            for _ in 0..pairs {
                let front = a.front().unwrap();
                goes.iter().for_each(|region| front.remove_mem_region(region).unwrap());
                comes.iter().for_each(|region| front.add_mem_region(region).unwrap());
                exchange(&mut a, &mut b, 5, pairs);
            }
        }
    }
}

#[test]
fn a_refusal_is_acknowledged_as_one_and_only_its_port_is_down() {
    let lab = Lab::new(3, 1);
    let mut rest: Vec<Nic> = (1..3).map(|n| lab.connect(n, NicConfig::default())).collect();
    let mut a = lab.connect(0, NicConfig::default());
    let other = Ram::new(a.ram.size(), a.ram.gpa()).unwrap();
    let mut again = region(&a.ram, a.ram.size());
    again.mmap_handle = other.file().as_raw_fd();
    // REPLY_ACK: the answer to a message that asked for one is not 0 (vhost-user, 'VHOST_USER_PROTOCOL_F_REPLY_ACK').
    let refused = a.front().unwrap().add_mem_region(&again);
    assert!(
        matches!(
            refused,
            Err(vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::BackendInternalError))
        ),
        "{refused:?}"
    );
    let there = frame(Rig::mac(2), Rig::mac(1), 100, 1);
    let (b, c) = rest.split_at_mut(1);
    wait_for("room", || b[0].send(&there).then_some(()));
    assert_eq!(wait_for("a frame", || c[0].receive()).1, there);
}

#[test]
fn pages_that_the_switch_writes_are_logged_for_migration() {
    for packed in [false, true] {
        let lab = Lab::new(2, 1);
        let features = NicConfig::default().features | 1 << bit::LOG_ALL;
        let config = NicConfig { packed, features, ..NicConfig::default() };
        let (mut a, mut b) = (lab.connect(0, NicConfig::default()), lab.connect(1, config));
        let pages = (b.ram.gpa() + b.ram.size()) / 4096;
        let log = Ram::new((pages / 8).next_multiple_of(4096), 0).unwrap();
        // By hand: the crate's two ends don't agree on the form of this reply.
        let raw = b.front().unwrap().as_raw_fd();
        // SAFETY: a duplicate of an open descriptor, which becomes a stream of its own.
        let stream = unsafe { UnixStream::from_raw_fd(libc::dup(raw)) };
        let mut payload = log.size().to_ne_bytes().to_vec();
        payload.extend(0u64.to_ne_bytes());
        message(&stream, SET_LOG_BASE, &payload, &[log.file().as_raw_fd()]);
        (&stream).read_exact(&mut [0; 28]).unwrap();
        let features = b.features();
        b.front().unwrap().set_features(features).unwrap();
        let sent = frame(Rig::mac(1), Rig::mac(0), 1000, 7);
        let before = b.ram.read(b.ram.gpa(), b.ram.size() as usize);
        wait_for("room", || a.send(&sent).then_some(()));
        wait_for("a frame", || b.peek_used().then_some(()));
        let after = b.ram.read(b.ram.gpa(), b.ram.size() as usize);
        let bits = log.read(0, log.size() as usize);
        let mut changed = 0;
        for (i, (old, new)) in before.chunks(4096).zip(after.chunks(4096)).enumerate() {
            if old != new {
                let page = b.ram.gpa() / 4096 + i as u64;
                let set = bits[(page / 8) as usize] >> (page % 8) & 1;
                // Kick suppression is of no use on another host.
                let is_kick_wish = page == b.tx.used / 4096;
                assert!(
                    set == 1 || is_kick_wish,
                    "page {page:#x} was written and not logged, packed {packed}"
                );
                changed += 1;
            }
        }
        assert!(changed >= 1);
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SEND_RARP: u32 = 19;
const SET_VRING_ADDR: u32 = 9;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;

/// After any messages of a peer, an honest guest on the same port and its neighbour work.
fn survives(hostile: impl Fn(&UnixStream)) {
    let lab = Lab::new(2, 1);
    let mut b = lab.connect(1, NicConfig::default());
    for _ in 0..3 {
        let stream = UnixStream::connect(lab.socket(0)).unwrap();
        // Protocol features: all that the messages below need.
        message(&stream, 1, &[], &[]);
        message(&stream, 2, &(1u64 << 30 | 1 << 32).to_ne_bytes(), &[]);
        message(&stream, 15, &[], &[]);
        message(&stream, 16, &0xffff_u64.to_ne_bytes(), &[]);
        hostile(&stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        hung_up(&stream);
    }
    let mut a = lab.connect(0, NicConfig::default());
    exchange(&mut a, &mut b, 3, 1);
}

#[test]
fn cve_2020_10723_a_ring_index_beyond_the_port_is_refused() {
    survives(|s| {
        let mut payload = 65_537u32.to_ne_bytes().to_vec();
        payload.extend(256u32.to_ne_bytes());
        message(s, SET_VRING_NUM, &payload, &[]);
        let mut addr = 0xffff_ffffu32.to_ne_bytes().to_vec();
        addr.resize(40, 0);
        message(s, SET_VRING_ADDR, &addr, &[]);
    });
}

#[test]
fn cve_2020_10722_a_log_whose_offset_and_size_wrap_is_refused() {
    let file = Ram::new(4096, 0).unwrap();
    for (size, offset) in [(u64::MAX - 4095, 4096u64), (4096, u64::MAX), (1 << 40, 0), (4096, 1 << 50)] {
        survives(|s| {
            let mut payload = size.to_ne_bytes().to_vec();
            payload.extend(offset.to_ne_bytes());
            message(s, SET_LOG_BASE, &payload, &[file.file().as_raw_fd()]);
        });
    }
}

#[test]
fn cve_2019_14818_a_flood_of_ring_sizes_costs_no_memory() {
    let lab = Lab::new(1, 1);
    let stream = UnixStream::connect(lab.socket(0)).unwrap();
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let before = resident();
    for n in 0..20_000u32 {
        let mut payload = (n % 8).to_ne_bytes().to_vec();
        payload.extend(256u32.to_ne_bytes());
        message(&stream, SET_VRING_NUM, &payload, &[]);
    }
    message(&stream, 1, &[], &[]);
    let mut reply = [0u8; 20];
    (&stream).read_exact(&mut reply).unwrap();
    assert!(resident() < before + (32 << 20), "{} grew to {}", before, resident());
}

#[test]
fn a_guest_that_has_come_from_another_host_is_announced_to_all_others_with_its_own_mac_only() {
    let lab = Lab::new(3, 1);
    let (mut b, mut c) = (lab.connect(1, NicConfig::default()), lab.connect(2, NicConfig::default()));
    let stream = UnixStream::connect(lab.socket(0)).unwrap();
    let raw = stream.try_clone().unwrap();
    let mut a = Nic::new(NicConfig::default()).unwrap();
    a.connect_over(stream, &mut None).unwrap();
    let features = a.front().unwrap().get_protocol_features().unwrap();
    assert!(features.contains(VhostUserProtocolFeatures::RARP));
    let own = Rig::mac(0).0;
    message(&raw, SEND_RARP, &[&own[..], &[0; 2]].concat(), &[]);
    for nic in [&mut b, &mut c] {
        let (_, frame) = wait_for("the announcement", || nic.receive());
        assert_eq!(
            (&frame[..6], &frame[6..12], &frame[12..14]),
            (&[0xff; 6][..], &own[..], &[0x80, 0x35][..])
        );
        assert_eq!((&frame[22..28], &frame[32..38], frame.len()), (&own[..], &own[..], 60));
    }
    exchange(&mut a, &mut b, 3, 1);
    // A front-end can't announce another port's MAC.
    message(&raw, SEND_RARP, &[&Rig::mac(1).0[..], &[0; 2]].concat(), &[]);
    let sent = frame(Rig::mac(2), Rig::mac(0), 80, 1);
    assert!(a.send(&sent));
    assert_eq!(wait_for("the next frame", || c.receive()).1, sent);
}

#[test]
fn a_flood_of_started_and_stopped_queues_leaves_the_workers_to_the_others() {
    let lab = Lab::new(3, 2);
    let (mut a, mut b) = (lab.connect(0, NicConfig::default()), lab.connect(1, NicConfig::default()));
    let mut hostile = lab.connect(2, NicConfig::default());
    exchange(&mut a, &mut b, 10, 0);
    let (before, begun) = (lab.daemon.switch().adoptions(), Instant::now());
    for n in 0..20_000u32 {
        hostile.front().unwrap().set_vring_enable(1, n % 2 == 1).unwrap();
    }
    exchange(&mut a, &mut b, 10, 1);
    // Two workers, each once a millisecond at most.
    let most = 2 * (begun.elapsed().as_millis() as u64 + 2);
    let adopted = lab.daemon.switch().adoptions() - before;
    assert!(adopted <= most, "{adopted} adoptions, {most} at most");
    // Setting the same value is no change.
    let before = lab.daemon.switch().generation();
    for _ in 0..100 {
        hostile.front().unwrap().set_vring_enable(1, true).unwrap();
    }
    assert_eq!(lab.daemon.switch().generation(), before);
}

#[test]
fn cve_2022_0669_descriptors_attached_to_any_message_are_closed() {
    let file = Ram::new(4096, 0).unwrap();
    let fds = [file.file().as_raw_fd(); 8];
    let lab = Lab::new(1, 1);
    let mut before = 0;
    for round in 0..60 {
        let stream = UnixStream::connect(lab.socket(0)).unwrap();
        message(&stream, 1, &[], &[]);
        message(&stream, 2, &(1u64 << 30 | 1 << 32).to_ne_bytes(), &[]);
        message(&stream, 15, &[], &[]);
        message(&stream, 16, &0xffff_u64.to_ne_bytes(), &[]);
        let request = if round % 2 == 0 { GET_INFLIGHT_FD } else { SET_INFLIGHT_FD };
        message(&stream, request, &[0; 24], &fds);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        hung_up(&stream);
        drop(stream);
        if round == 9 {
            before = open_files();
        }
    }
    // Other tests of this process open files too, but not eight for each round here.
    let after = open_files();
    assert!(after < before + 200, "{before} open files became {after}");
}

#[test]
fn cve_2020_10726_a_flood_of_inflight_requests_leaks_nothing() {
    let lab = Lab::new(1, 1);
    let mut nic = Nic::new(NicConfig::default()).unwrap();
    nic.connect(&lab.socket(0)).unwrap();
    let before = open_files();
    for _ in 0..300 {
        let wanted = vhost::vhost_user::message::VhostUserInflight::new(0, 0, 2, 64);
        nic.front().unwrap().get_inflight_fd(&wanted).unwrap();
    }
    assert!(open_files() < before + 200);
    survives(|s| {
        let mut payload = vec![0u8; 16];
        payload.extend(u16::MAX.to_ne_bytes());
        payload.extend(u16::MAX.to_ne_bytes());
        payload.extend([0; 4]);
        message(s, GET_INFLIGHT_FD, &payload, &[]);
    });
}

#[test]
fn peers_that_speak_another_protocol_or_stop_in_the_middle_are_hung_up_on() {
    survives(|s| drop((&mut &*s).write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")));
    survives(|s| drop((&mut &*s).write_all(&[5, 0, 0])));
    survives(|s| drop((&mut &*s).write_all(&[0xff; 4096])));
}

#[test]
fn descriptors_that_could_block_the_switch_are_refused() {
    survives(|s| {
        let file = Ram::new(4096, 0).unwrap();
        message(s, 13, &1u64.to_ne_bytes(), &[file.file().as_raw_fd()]);
    });
    survives(|s| {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors, which become files.
        let _pipe = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            [std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1])]
        };
        message(s, 13, &1u64.to_ne_bytes(), &[ends[1]]);
    });
}

#[test]
fn a_front_end_that_passes_files_whose_end_takes_hours_keeps_its_port_from_no_successor() {
    let lab = Lab::new(2, 1);
    let mut b = lab.connect(1, NicConfig::default());
    let connect = || UnixStream::connect(lab.socket(0)).unwrap();
    // The next ones wait until it has gone, so that what they pass ends in the switch.
    let mut first = connect();
    message(&first, 1, &[], &[]);
    first.read_exact(&mut [0; 20]).unwrap();
    let kick: Vec<u8> = [13u32, 1, 8, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let hostile: Vec<_> = [&kick[..], &[0], &[0xff; 20]]
        .into_iter()
        .map(|bytes| {
            let (passed, other) = tombolo_brief::endless::lingering().unwrap();
            let stream = connect();
            tombolo_brief::endless::pass(&stream, bytes, passed).unwrap();
            let (unread, and_other) = tombolo_brief::endless::lingering().unwrap();
            tombolo_brief::endless::pass(&stream, bytes, unread).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            (stream, other, and_other)
        })
        .collect();
    drop(first);
    let mut a = lab.connect(0, NicConfig::default());
    exchange(&mut a, &mut b, 3, 1);
    drop(hostile);
}

#[test]
fn ports_come_and_go_at_run_time_and_refusals_say_why() {
    let lab = Lab::new(2, 1);
    let names = |lab: &Lab| -> Vec<String> {
        let (answer, _) = ask::<serde_json::Value>(&lab.control(), &Request::Ports).unwrap();
        let ports = answer["ports"].as_array().unwrap().clone();
        ports.iter().map(|p| p["name"].as_str().unwrap().to_string()).collect()
    };
    let mut again = port(lab.dir.path(), 2);
    ask::<serde_json::Value>(&lab.control(), &Request::Add { port: again.clone() }).unwrap();
    assert_eq!(names(&lab), ["vm0", "vm1", "vm2"]);
    let refused = |port: &PortConfig| {
        ask::<serde_json::Value>(&lab.control(), &Request::Add { port: port.clone() })
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&again).contains("name is in use"));
    again.name = "other".into();
    assert!(refused(&again).contains("another server listens"));
    again.socket = lab.dir.path().join("other");
    let text = refused(&again);
    assert!(text.contains("belongs to port vm2"), "{text}");
    std::fs::write(lab.dir.path().join("file"), "x").unwrap();
    again.socket = lab.dir.path().join("file");
    assert!(refused(&again).contains("no socket"));
    ask::<serde_json::Value>(&lab.control(), &Request::Remove { name: "vm2".into() }).unwrap();
    assert_eq!(names(&lab), ["vm0", "vm1"]);
    assert!(ask::<serde_json::Value>(&lab.control(), &Request::Remove { name: "vm2".into() }).is_err());
    let (mut a, mut b) = (lab.connect(0, NicConfig::default()), lab.connect(1, NicConfig::default()));
    exchange(&mut a, &mut b, 3, 1);
}

#[test]
fn workers_and_processors_that_cannot_be_had_are_named() {
    let start = |workers: usize, cpus: &[usize]| {
        let mut config = Config::default();
        config.switch.sandbox = false;
        (config.switch.workers, config.switch.cpus) = (workers, cpus.to_vec());
        Daemon::start(&config).map(|daemon| daemon.stop()).map_err(|err| err.to_string())
    };
    assert!(start(0, &[]).unwrap_err().contains("1 to 64"));
    assert!(start(65, &[]).unwrap_err().contains("1 to 64"));
    for cpu in [1023, 100_000] {
        assert!(start(2, &[cpu]).unwrap_err().contains(&format!("CPU {cpu}")));
    }
    start(64, &[]).unwrap();
}

#[test]
fn a_switch_whose_sockets_were_removed_still_ends() {
    let lab = Lab::new(2, 1);
    for entry in std::fs::read_dir(lab.dir.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    lab.daemon.stop();
}

#[test]
fn the_switch_can_be_the_client_of_a_socket_that_comes_and_goes() {
    let lab = Lab::new(1, 1);
    let mut config = port(lab.dir.path(), 1);
    config.role = Role::Client;
    ask::<serde_json::Value>(&lab.control(), &Request::Add { port: config.clone() }).unwrap();
    let mut a = lab.connect(0, NicConfig::default());
    for round in 0..3 {
        let listener = UnixListener::bind(&config.socket).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut b = Nic::new(NicConfig::default()).unwrap();
        b.connect_over(stream, &mut None).unwrap();
        exchange(&mut a, &mut b, 5, round);
        drop(listener);
        std::fs::remove_file(&config.socket).unwrap();
    }
}

#[test]
fn every_frame_is_explained_while_guests_come_and_go_under_load() {
    let lab = Lab::new(3, 2);
    let mut a = lab.connect(0, NicConfig::default());
    let mut sent = 0u64;
    for round in 0..30u32 {
        let mut b = lab.connect(1, NicConfig { packed: round % 2 == 0, ..NicConfig::default() });
        for n in 0..400u32 {
            let to = Rig::mac(1 + (n % 2) as usize);
            sent += u64::from(a.send(&frame(to, Rig::mac(0), 60 + n as usize, n as u8)));
            while b.receive().is_some() {}
        }
    }
    wait_for("the end", || {
        a.reap();
        (a.unsent() == 0).then_some(())
    });
    let view = lab.daemon.switch().view();
    let ports = view.ports();
    let out = ports[0].port.sent();
    let arrived: u64 = ports.iter().map(|p| p.port.received().packets).sum();
    let lost: u64 = ports.iter().map(|p| p.port.received().dropped()).sum();
    assert_eq!(out.packets, sent);
    assert_eq!(arrived + lost + out.dropped(), sent);
}

#[test]
fn a_queue_moves_between_workers_under_load_and_frames_stay_whole_and_in_order() {
    for packed in [false, true] {
        let lab = Lab::new(2, 3);
        let features = NicConfig::default().features | 1 << bit::EVENT_IDX;
        let config = NicConfig { packed, features, ..NicConfig::default() };
        let (mut a, mut b) = (lab.connect(0, config), lab.connect(1, config));
        let switch = lab.daemon.switch();
        for round in 0..60 {
            for (n, attached) in switch.view().ports().iter().enumerate() {
                attached.port.set_home(0, (round + n) % 3);
            }
            switch.changed();
            exchange(&mut a, &mut b, 5, round as u8);
        }
    }
}

/// An uplink on which each frame takes a while, and that checks the order of each sender's frames.
struct Slow {
    next: Mutex<[u64; 3]>,
    disorder: Arc<AtomicBool>,
    silence: Event,
}

impl Link for Slow {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> std::io::Result<()> {
        let bytes: Vec<u8> = pieces
            .iter()
            // SAFETY: the switch's promise: each piece is mapped.
            .flat_map(|p| unsafe { std::slice::from_raw_parts(p.iov_base.cast::<u8>(), p.iov_len) }.to_vec())
            .collect();
        let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
        let next = &mut self.next.lock().unwrap()[usize::from(bytes[11])];
        if number < *next {
            self.disorder.store(true, Ordering::Relaxed);
        }
        *next = number + 1;
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_micros(100) {
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn receive(&self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::WouldBlock.into())
    }

    fn fd(&self) -> i32 {
        self.silence.as_raw_fd()
    }
}

/// Guests 0 and 2 send as fast as they can; two workers share the queues by number, 0 and 2 to the same.
#[test]
fn of_two_busy_ports_on_one_worker_one_moves_to_the_other_and_frames_stay_in_order() {
    let lab = Lab::new(3, 2);
    let disorder = Arc::new(AtomicBool::new(false));
    let link = Slow { next: Mutex::default(), disorder: disorder.clone(), silence: Event::new().unwrap() };
    let mut out =
        Attached::guest(Arc::new(Port::new("out", 1)), Policy { uplink: true, ..Policy::default() });
    out.uplink = Some(Arc::new(Uplink::new(Box::new(link))));
    lab.daemon.switch().attach(out).unwrap();
    let mut nics = [0, 2].map(|n| (n, 0u64, lab.connect(n, NicConfig::default())));
    let homes = || -> Vec<u64> {
        let (answer, _) = ask::<serde_json::Value>(&lab.control(), &Request::Ports).unwrap();
        let ports = answer["ports"].as_array().unwrap().clone();
        ports.iter().filter_map(|p| p["workers"][0].as_u64()).collect()
    };
    assert_eq!(homes(), [0, 0, 1], "guest 1 is not there");
    let mut load = |rounds| {
        for _ in 0..rounds {
            for (n, number, nic) in &mut nics {
                let mut text = frame(Rig::mac(77), Rig::mac(*n), 100, 0);
                text[14..22].copy_from_slice(&number.to_le_bytes());
                *number += u64::from(nic.send(&text));
            }
        }
    };
    wait_for("a port to move", || {
        load(100);
        let homes = homes();
        (homes[0] != homes[1]).then_some(())
    });
    load(1000);
    assert!(!disorder.load(Ordering::Relaxed), "frames overtook one another");
}

/// A switch as a process, ended with the test.
struct Program(std::process::Child);

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_switch_with_a_budget_keeps_to_it_and_loses_nothing_for_that() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tombolo-switch"));
    command.args(["run", "--budget", "10", "--control"]).arg(&control);
    for n in 0..2 {
        command.arg("--port").arg(format!(
            "{n},{},{}",
            dir.path().join(format!("{n}")).display(),
            Rig::mac(n)
        ));
    }
    let child = Program(command.env("RUST_LOG", "warn").spawn().unwrap());
    wait_for("the switch", || ask::<serde_json::Value>(&control, &Request::Ports).ok());
    let config = NicConfig { size: 256, ..NicConfig::default() };
    let mut nics: Vec<Nic> = (0..2).map(|_| Nic::new(config).unwrap()).collect();
    for (n, nic) in nics.iter_mut().enumerate() {
        nic.connect(&dir.path().join(format!("{n}"))).unwrap();
    }
    let used = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let there = frame(Rig::mac(1), Rig::mac(0), 1514, 0);
    let (start, before) = (std::time::Instant::now(), used());
    let (mut sent, mut received) = (0u64, 0u64);
    // Longer where others keep the processors busy.
    while start.elapsed() < Duration::from_secs(3) || received <= 1000 {
        // Never more on the way than the receiver has buffers for.
        if sent - received < 128 {
            sent += u64::from(nics[0].send(&there));
        }
        received += u64::from(nics[1].receive().is_some());
    }
    // SAFETY: asks for a number.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let share = (used() - before) as f64 / ticks / start.elapsed().as_secs_f64();
    wait_for("the rest", || {
        received += u64::from(nics[1].receive().is_some());
        (received == sent).then_some(())
    });
    assert!(share < 0.15, "{share} of a processor, 0.1 were allowed; {received} frames");
}
