// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ways around a port's policy, or to waste other ports' time. Each was possible once.

mod common;

use std::sync::Arc;

use common::{Rig, frame};
use tombolo_net::forwarding::capture::Capture;
use tombolo_net::forwarding::forward::Pass;
use tombolo_net::forwarding::view::View;
use tombolo_net::frames::frame::{DATA_VALID, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::frames::offload;
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::ports::counters::Reason;
use tombolo_net::vring::features::{OFFLOADS, bit};
use tombolo_net_driver::NicConfig;

fn plain(n: usize) -> Vec<NicConfig> {
    vec![NicConfig::default(); n]
}

/// A card that may leave checksums and segmentation to the switch.
fn offloading() -> NicConfig {
    let features = NicConfig::default().features | 1 << bit::CSUM | 1 << bit::HOST_TSO4;
    NicConfig { features, ..NicConfig::default() }
}

/// The TCI of each tag of a frame.
fn tags(f: &[u8]) -> Vec<u16> {
    let word = |at: usize| u16::from_be_bytes([f[at], f[at + 1]]);
    (12..).step_by(4).take_while(|at| word(*at) == 0x8100).map(|at| word(at + 2)).collect()
}

#[test]
fn no_tag_of_a_guests_own_reaches_a_trunk_from_an_access_port() {
    let mut rig = Rig::with_policies(&plain(3), |i| Policy {
        vlan: match i {
            0 => Vlan::Access(5),
            1 => Vlan::Trunk { vlans: vec![5, 6], native: Some(1) },
            _ => Vlan::Trunk { vlans: vec![6], native: Some(5) },
        },
        ..Policy::default()
    });
    for (own, vlans) in [
        (&[0x8100u16, 0, 0x8100, 6][..], 1),
        (&[0x8100, 6], 1),
        (&[0x88a8, 6], 1),
        (&[0x8100, 0, 0x88a8, 6], 1),
    ] {
        for to in [1, 2] {
            let mut evil = frame(Rig::mac(to), Rig::mac(0), 200, 1);
            evil.splice(12..12, own.iter().flat_map(|w| w.to_be_bytes()));
            assert!(rig.nics[0].send(&evil));
            let before = rig.ports[0].sent().dropped_for(Reason::Vlan);
            rig.pass(0);
            assert_eq!(rig.nics[to].receive(), None, "{own:x?}");
            assert_eq!(rig.ports[0].sent().dropped_for(Reason::Vlan) - before, vlans);
        }
    }
    // A priority tag is no VLAN: the trunk gets the VLAN's number with it, in one tag.
    let mut urgent = frame(Rig::mac(1), Rig::mac(0), 200, 1);
    urgent.splice(12..12, [0x81, 0, 0xa0, 0]);
    assert!(rig.nics[0].send(&urgent));
    rig.pass(0);
    assert_eq!(tags(&rig.nics[1].receive().unwrap().1), [0xa005]);
}

#[test]
fn a_trunk_sends_nothing_on_by_a_tag_behind_its_native_vlan() {
    let mut rig = Rig::with_policies(&plain(2), |_| Policy {
        vlan: Vlan::Trunk { vlans: vec![7, 6], native: Some(7) },
        ..Policy::default()
    });
    let mut evil = frame(Rig::mac(1), Rig::mac(0), 200, 1);
    evil.splice(12..12, [0x81, 0, 0, 7, 0x81, 0, 0, 6]);
    assert!(rig.nics[0].send(&evil));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive(), None);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Vlan), 1);
}

#[test]
fn a_checksum_that_is_left_to_the_switch_changes_nothing_that_was_checked() {
    let mut rig = Rig::with_policies(&[offloading(), NicConfig::default()], |i| Policy {
        ips: if i == 0 { vec!["10.0.0.1".parse().unwrap()] } else { vec![] },
        check_mac: true,
        ..Policy::default()
    });
    // An ARP reply whose sender would become 10.0.0.254, an IP packet whose source would, a tag that would become another.
    let mut arp = frame(Mac::BROADCAST, Rig::mac(0), 12, 0);
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.extend(Rig::mac(0).0);
    arp.extend([10, 0, 0, 1]);
    arp.extend([0; 28]);
    let mut udp = frame(Rig::mac(1), Rig::mac(0), 12, 0);
    udp.extend([
        8, 0, 0x45, 0, 0, 46, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 7, 0, 26, 0, 0,
    ]);
    udp.extend([3; 18]);
    let mut tagged = udp.clone();
    tagged.splice(12..12, [0x81, 0, 0, 0]);
    for (sent, csum_start, csum_offset) in [(&arp, 14, 16), (&udp, 14, 12), (&udp, 26, 2), (&tagged, 14, 0)] {
        let h = NetHeader { flags: NEEDS_CSUM, csum_start, csum_offset, ..NetHeader::default() };
        assert!(rig.nics[0].send_cut(&h, sent, &[]));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive(), None, "checksum at {csum_start}+{csum_offset}");
    }
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Header), 4);
    // The checksum that the guest asks for is made.
    let h = NetHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..NetHeader::default() };
    let pseudo = !offload::fold(offload::sum(&udp[26..34], 17 + 26));
    udp[40..42].copy_from_slice(&pseudo.to_be_bytes());
    assert!(rig.nics[0].send_cut(&h, &udp, &[]));
    rig.pass(0);
    let (_, got) = rig.nics[1].receive().expect("a frame");
    assert_eq!(offload::fold(offload::sum(&got[34..], offload::sum(&got[26..34], 17 + 26))), 0);
}

#[test]
fn what_a_guest_writes_into_its_virtio_header_reaches_no_other_guest() {
    for features in [0, OFFLOADS] {
        let receiver =
            NicConfig { features: NicConfig::default().features | features, ..NicConfig::default() };
        let mut rig = Rig::new(&[offloading(), receiver]);
        let sent = frame(Rig::mac(1), Rig::mac(0), 100, 1);
        for flags in [0xfe, DATA_VALID, 4, 0] {
            let noise =
                NetHeader { flags, gso_size: 7, hdr_len: 9, csum_start: 1, csum_offset: 2, gso_type: 0 };
            assert!(rig.nics[0].send_cut(&noise, &sent, &[]));
            rig.pass(0);
            assert_eq!(rig.nics[1].receive(), Some((NetHeader::default(), sent.clone())), "flags {flags:#x}");
        }
    }
}

/// Frames that reach a fast receiver in 20 ms, where every 16th is for one that takes a buffer each `period` µs.
fn frames_beside(period: Option<u64>) -> u64 {
    let mut rig = Rig::new(&[NicConfig { size: 256, ..NicConfig::default() }; 3]);
    let (mut fast, mut n) = (0, 0u8);
    for us in 0..20_000u64 {
        for _ in 0..8 {
            n = n.wrapping_add(1);
            let to = if period.is_some() && n % 16 == 0 { 1 } else { 2 };
            if !rig.nics[0].send(&frame(Rig::mac(to), Rig::mac(0), 60, n)) {
                break;
            }
        }
        rig.forwarder.pass(&rig.view, 0, 0, us * 1000);
        while rig.nics[2].receive().is_some() {
            fast += 1;
        }
        if period.is_some_and(|period| us % period == 0) {
            rig.nics[1].receive();
        }
    }
    fast
}

#[test]
fn a_receiver_that_takes_its_buffers_one_by_one_stops_nothing_for_others() {
    let alone = frames_beside(None);
    for period in [5, 190, 1_000_000] {
        let beside = frames_beside(Some(period));
        assert!(beside * 100 >= alone * 90, "{beside} of {alone} frames, one buffer each {period} µs");
    }
}

#[test]
fn a_burst_that_a_receiver_takes_soon_is_not_lost() {
    let mut rig = Rig::new(&[
        NicConfig { size: 256, ..NicConfig::default() },
        NicConfig { size: 16, ..NicConfig::default() },
    ]);
    for n in 0..100 {
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n)));
    }
    let mut got = 0;
    for us in 0..500 {
        rig.forwarder.pass(&rig.view, 0, 0, us * 1000);
        if us % 20 == 0 {
            while rig.nics[1].receive().is_some() {
                got += 1;
            }
        }
    }
    assert_eq!((got, rig.ports[0].sent().dropped()), (100, 0));
}

#[test]
fn a_frame_that_waits_is_paid_for_and_captured_once() {
    let rate = Rate { bytes: 125_000_000, packets: 0 };
    let mut rig = Rig::with_policies(&[NicConfig { size: 64, ..NicConfig::default() }; 3], |i| Policy {
        rate: if i == 0 { rate } else { Rate::default() },
        ..Policy::default()
    });
    let watch = Arc::new(Capture::new(128));
    let mut ports = rig.view.ports().to_vec();
    ports[0].capture = Some(watch.clone());
    rig.view = View::new(ports).unwrap();
    let captured = |full: &mut Vec<u8>| {
        full.clear();
        watch.drain(full, &mut Vec::new()).unwrap();
        full.len()
    };
    let mut file = Vec::new();
    for i in 0..64 {
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 1400, i)));
    }
    rig.pass_at(0, 1000);
    let one = captured(&mut file) / 64;
    rig.nics[0].reap();
    let waiting = frame(Rig::mac(1), Rig::mac(0), 1400, 99);
    assert!(rig.nics[0].send(&waiting));
    for k in 0..4000u64 {
        assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 2000 + k * 40), Pass::Held(0));
    }
    assert_eq!(captured(&mut file), one, "one frame was captured");
    while rig.nics[1].receive().is_some() {}
    assert!(rig.nics[0].send(&frame(Rig::mac(2), Rig::mac(0), 1400, 1)));
    rig.pass_at(0, 180_000);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(waiting));
    assert!(rig.nics[2].receive().is_some(), "a frame for another");
    assert_eq!(rig.ports[0].sent().dropped(), 0);
}

#[test]
fn a_frame_that_waits_arrives_as_it_was_when_it_was_admitted() {
    // Judged by the receiver: it gets the bytes that were checked, even if the sender overwrites them.
    let mut rig = Rig::with_policies(&[NicConfig { size: 16, ..NicConfig::default() }; 2], |i| Policy {
        check_mac: i == 0,
        ips: if i == 0 { vec!["10.0.0.1".parse().unwrap()] } else { vec![] },
        ..Policy::default()
    });
    let honest = frame(Rig::mac(1), Rig::mac(0), 100, 1);
    for _ in 0..16 {
        assert!(rig.nics[0].send(&honest));
    }
    rig.pass_at(0, 1000);
    rig.nics[0].reap();
    assert!(rig.nics[0].send(&honest));
    assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 2000), Pass::Held(0));
    let held = rig.ports[0].tx(0).lock().window.chains()[0];
    let at = rig.ports[0].tx(0).lock().window.segments(&held)[0].ptr;
    // SAFETY: the guest's own buffer, as the switch has it mapped, which holds a header and a frame of 100 bytes.
    unsafe { std::ptr::write_bytes(at.add(12), 0xee, 100) };
    while rig.nics[1].receive().is_some() {}
    rig.pass_at(0, 3000);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(honest));
}

#[test]
fn a_broadcast_waits_for_a_receiver_that_another_worker_has_and_is_counted_if_it_is_in_vain() {
    let mut rig = Rig::new(&plain(3));
    let sent = frame(Mac::BROADCAST, Rig::mac(0), 60, 1);
    let port = rig.ports[1].clone();
    let taken = port.rx(0).lock();
    assert!(rig.nics[0].send(&sent));
    assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 1000), Pass::Held(0));
    drop(taken);
    rig.pass_at(0, 2000);
    for n in [1, 2] {
        assert_eq!(rig.nics[n].receive().map(|f| f.1), Some(sent.clone()), "guest {n}");
        assert_eq!(rig.nics[n].receive(), None, "guest {n}");
    }
    let taken = port.rx(0).lock();
    assert!(rig.nics[0].send(&sent));
    rig.pass_at(0, 3000);
    rig.pass_at(0, 10_000_000);
    drop(taken);
    assert_eq!(rig.nics[1].receive(), None);
    assert_eq!(rig.nics[2].receive().map(|f| f.1), Some(sent));
    let counts = rig.ports[0].sent();
    assert_eq!((counts.packets, counts.copies, counts.dropped_for(Reason::Busy)), (2, 2, 1));
}

#[test]
fn every_broadcast_that_a_receiver_has_no_buffer_for_is_counted() {
    let mut rig = Rig::new(&[NicConfig { size: 16, ..NicConfig::default() }; 2]);
    let mut now = 0;
    for i in 0..18 {
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, i)));
        now += 10_000_000_000;
        rig.pass_at(0, now);
        rig.pass_at(0, now + 1_000_000);
    }
    let dropped =
        |rig: &Rig| rig.ports.iter().map(|p| p.received().dropped() + p.sent().dropped()).sum::<u64>();
    assert_eq!(dropped(&rig), 2);
    for _ in 0..5 {
        assert!(rig.nics[0].send(&frame(Mac::BROADCAST, Rig::mac(0), 60, 1)));
        rig.pass_at(0, now + 2_000_000);
    }
    assert_eq!(dropped(&rig), 7);
}

#[test]
fn what_is_for_bridges_is_forwarded_by_none() {
    let mut rig = Rig::new(&plain(2));
    for last in [0u8, 1, 2, 0x0e, 0x0f, 0x10] {
        let to = Mac([1, 0x80, 0xc2, 0, 0, last]);
        assert!(rig.nics[0].send(&frame(to, Rig::mac(0), 60, 1)));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive().is_some(), last == 0x10, "{to}");
    }
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Reserved), 5);
}

#[test]
fn a_packed_ring_that_stops_within_a_chain_of_several_goes_on_where_it_was() {
    let config = NicConfig { packed: true, size: 64, tx_buffer: 4096, ..NicConfig::default() };
    let mut rig = Rig::new(&[config, config]);
    let mut sent = 0u8;
    let mut cross = |rig: &mut Rig, cuts: &[usize]| {
        sent = sent.wrapping_add(1);
        let f = frame(Rig::mac(1), Rig::mac(0), 60, sent);
        assert!(rig.nics[0].send_cut(&NetHeader::default(), &f, cuts));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(f));
    };
    // One lap, whose last chain takes two entries.
    for _ in 0..62 {
        cross(&mut rig, &[]);
    }
    cross(&mut rig, &[12]);
    rig.nics[0].reap();
    for own in [true, false] {
        let mut vring = rig.ports[0].tx(0).lock();
        let base = vring.stop();
        // The base from the switch itself, or from a front-end for a new switch.
        vring.known_base = own.then_some(base);
        vring.base = base;
        vring.start().unwrap();
        assert_eq!(vring.ring.as_ref().unwrap().base(), base);
    }
    for _ in 0..200 {
        cross(&mut rig, &[]);
    }
}
