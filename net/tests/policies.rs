// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports' policies and receivers' abilities: VLANs, isolation, spoofing, rates, offloads, captures.

mod common;

use std::sync::Arc;

use common::{Rig, frame};
use tombolo_net::forwarding::capture::Capture;
use tombolo_net::forwarding::view::View;
use tombolo_net::frames::frame::{GSO_TCPV4, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::frames::offload;
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::policy::rules::Rule;
use tombolo_net::ports::counters::Reason;
use tombolo_net::vring::features::{OFFLOADS, bit};
use tombolo_net_driver::NicConfig;

fn plain(n: usize) -> Vec<NicConfig> {
    vec![NicConfig::default(); n]
}

#[test]
fn an_uplink_of_one_port_exchanges_frames_with_no_other() {
    let uplink = |only: &str| Policy { uplink: true, only: Some(only.into()), ..Policy::default() };
    let mut rig = Rig::with_policies(&[NicConfig::default(); 5], |n| match n {
        2 => uplink("vm0"),
        3 => uplink("vm1"),
        4 => uplink("gone"),
        _ => Policy::default(),
    });
    // Uplinks own no addresses.
    let ports = rig.view.ports().iter().cloned().map(|mut a| {
        if a.policy.uplink {
            a.policy = Arc::new(Policy { macs: Vec::new(), ..(*a.policy).clone() });
        }
        a
    });
    rig.view = View::new(ports.collect()).unwrap();
    let outside = Mac([2, 9, 9, 9, 9, 9]);
    for (from, to, receivers) in [
        (0, outside, vec![2]),
        (1, outside, vec![3]),
        (0, Mac::BROADCAST, vec![1, 2]),
        (1, Mac::BROADCAST, vec![0, 3]),
        (2, Mac::BROADCAST, vec![0]),
        (2, Rig::mac(0), vec![0]),
        (2, Rig::mac(1), vec![]),
        (3, Rig::mac(1), vec![1]),
        (4, Rig::mac(0), vec![]),
        (4, Mac::BROADCAST, vec![]),
    ] {
        let mac = if from < 2 { Rig::mac(from) } else { outside };
        assert!(rig.nics[from].send(&frame(to, mac, 60, 0)));
        rig.pass(from);
        let got: Vec<usize> = (0..5).filter(|n| rig.nics[*n].receive().is_some()).collect();
        assert_eq!(got, receivers, "from {from} to {to}");
    }
}

#[test]
fn a_port_sends_from_its_own_mac_only() {
    let mut rig = Rig::with_policies(&plain(2), |_| Policy { check_mac: true, ..Policy::default() });
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Mac([2, 1, 1, 1, 1, 1]), 60, 1)));
    let honest = frame(Rig::mac(1), Rig::mac(0), 60, 2);
    assert!(rig.nics[0].send(&honest));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(honest));
    assert_eq!(rig.nics[1].receive(), None);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::SpoofMac), 1);
}

#[test]
fn a_port_that_may_learn_addresses_has_so_many_and_none_of_anothers() {
    let nested = |n: u8| Mac([0x52, 0x54, 1, 0, 0, n]);
    let mut rig = Rig::with_policies(&plain(3), |i| Policy {
        check_mac: true,
        learn: [2, 1, 0][i],
        ..Policy::default()
    });
    let from = |rig: &mut Rig, port: usize, source: Mac, second: u64| {
        assert!(rig.nics[port].send(&frame(Rig::mac(2), source, 60, 1)));
        rig.pass_at(port, second * 1_000_000_000);
        rig.nics[2].receive().is_some()
    };
    assert!(
        from(&mut rig, 0, nested(1), 1)
            && from(&mut rig, 0, nested(2), 1)
            && from(&mut rig, 0, Rig::mac(0), 1)
    );
    assert!(!from(&mut rig, 0, nested(3), 2), "one too many");
    assert!(!from(&mut rig, 0, Rig::mac(1), 2), "a configured one of another port");
    assert!(!from(&mut rig, 1, nested(1), 2), "a learned one of another port");
    assert!(!from(&mut rig, 0, Mac([0x53, 0, 0, 0, 0, 1]), 2), "a group's");
    // Frames to the learned address arrive there, and at no other port.
    let to = frame(nested(2), Rig::mac(2), 60, 1);
    assert!(rig.nics[2].send(&to));
    rig.pass_at(2, 3_000_000_000);
    assert_eq!(rig.nics[0].receive().map(|f| f.1), Some(to.clone()));
    assert_eq!(rig.nics[1].receive(), None);
    // A silent address is forgotten, and may appear at another port.
    assert!(from(&mut rig, 0, nested(1), 290));
    assert!(from(&mut rig, 0, nested(3), 310) && from(&mut rig, 1, nested(2), 311));
    assert!(!from(&mut rig, 1, nested(1), 312));
    assert!(rig.nics[2].send(&to));
    rig.pass_at(2, 313_000_000_000);
    assert_eq!((rig.nics[0].receive(), rig.nics[1].receive().map(|f| f.1)), (None, Some(to)));
    let sent = rig.ports[0].sent();
    assert_eq!((sent.dropped_for(Reason::TooManyMacs), sent.dropped_for(Reason::SpoofMac)), (1, 2));
}

#[test]
fn a_port_with_addresses_claims_no_others() {
    let mut rig = Rig::with_policies(&plain(2), |_| Policy {
        ips: vec!["10.0.0.1".parse().unwrap()],
        ..Policy::default()
    });
    let arp = |ip: [u8; 4]| {
        let mut f = frame(Mac::BROADCAST, Rig::mac(0), 12, 0);
        f.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        f.extend(Rig::mac(0).0);
        f.extend(ip);
        f.extend([0; 10]);
        f
    };
    assert!(rig.nics[0].send(&arp([10, 0, 0, 254])));
    assert!(rig.nics[0].send_cut(&NetHeader::default(), &arp([10, 0, 0, 1]), &[12, 30]));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(arp([10, 0, 0, 1])));
    assert_eq!(rig.nics[1].receive(), None);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::SpoofIp), 1);
}

#[test]
fn isolated_ports_reach_neither_each_other_nor_their_neighbours() {
    let mut rig = Rig::with_policies(&plain(3), |i| Policy { isolated: i == 0, ..Policy::default() });
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, 1)));
    assert!(rig.nics[0].send(&frame(Mac::BROADCAST, Rig::mac(0), 60, 2)));
    assert!(rig.nics[1].send(&frame(Rig::mac(0), Rig::mac(1), 60, 3)));
    assert!(rig.nics[1].send(&frame(Rig::mac(2), Rig::mac(1), 60, 4)));
    rig.pass(0);
    rig.pass(1);
    assert_eq!(rig.nics[0].receive(), None);
    assert_eq!(rig.nics[1].receive(), None);
    assert!(rig.nics[2].receive().is_some());
    assert_eq!(rig.nics[2].receive(), None);
    assert_eq!(rig.ports[1].sent().dropped_for(Reason::Isolated), 1);
}

#[test]
fn an_access_port_and_a_trunk_exchange_frames_with_the_tag_put_in_and_taken_out() {
    let mut rig = Rig::with_policies(&plain(3), |i| Policy {
        vlan: match i {
            0 => Vlan::Access(5),
            1 => Vlan::Trunk { vlans: vec![5, 6], native: None },
            _ => Vlan::Access(6),
        },
        ..Policy::default()
    });
    let bare = frame(Rig::mac(1), Rig::mac(0), 200, 1);
    let mut tagged = bare.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    assert!(rig.nics[0].send(&bare));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(tagged));

    let bare = frame(Rig::mac(0), Rig::mac(1), 200, 2);
    let mut tagged = bare.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    assert!(rig.nics[1].send(&tagged));
    tagged[15] = 6;
    assert!(rig.nics[1].send(&tagged));
    rig.pass(1);
    assert_eq!(rig.nics[0].receive().map(|f| f.1), Some(bare));
    assert_eq!(rig.nics[0].receive(), None, "VLAN 6 isn't port 0's");
    assert_eq!(rig.nics[2].receive(), None, "a known MAC is not flooded");
    assert_eq!(rig.ports[1].sent().dropped_for(Reason::Vlan), 1);
}

#[test]
fn a_rate_lets_a_burst_through_and_then_the_rate() {
    let rate = Rate { bytes: 0, packets: 1000 };
    let mut rig = Rig::with_policies(&plain(2), |_| Policy { rate, ..Policy::default() });
    let mut got = 0;
    for ms in 0..1000u64 {
        for n in 0..5 {
            assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n)));
        }
        rig.pass_at(0, ms * 1_000_000);
        while rig.nics[1].receive().is_some() {
            got += 1;
        }
    }
    assert!((1000..1100).contains(&got), "{got} frames in a second at 1000 a second");
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Rate), 5000 - got);
}

#[test]
fn what_a_port_is_sent_is_limited_where_it_arrives() {
    let receive_rate = Rate { bytes: 0, packets: 1000 };
    let mut rig = Rig::with_policies(&plain(3), |i| match i {
        1 => Policy { receive_rate, ..Policy::default() },
        _ => Policy::default(),
    });
    let (mut got, mut free) = (0, 0);
    for ms in 0..1000u64 {
        for n in 0..5 {
            assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n)));
            assert!(rig.nics[0].send(&frame(Rig::mac(2), Rig::mac(0), 60, n)));
        }
        rig.pass_at(0, ms * 1_000_000);
        while rig.nics[1].receive().is_some() {
            got += 1;
        }
        while rig.nics[2].receive().is_some() {
            free += 1;
        }
    }
    assert!((1000..1100).contains(&got), "{got} frames in a second at 1000 a second");
    assert_eq!((free, rig.ports[0].sent().dropped_for(Reason::ReceiveRate)), (5000, 5000 - got));
}

#[test]
fn rules_decide_what_a_guest_sends_and_gets_and_count_it_once() {
    let rules: Vec<Rule> = ["out", "in"]
        .map(|direction| {
            let text = format!("action='drop'\ndirection='{direction}'\nprotocol='tcp'\ndestination-port=25");
            toml::from_str(&text).unwrap()
        })
        .into();
    let mail = |to: usize, from: usize, port: u8| {
        let mut f = frame(Rig::mac(to), Rig::mac(from), 12, 0);
        f.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 9, 9, 0, port]);
        f.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0, 0, 0, 0, 0, 0, 0]);
        f
    };
    let small = NicConfig { size: 8, ..NicConfig::default() };
    let mut rig = Rig::with_policies(&[NicConfig::default(), small], |i| Policy {
        rules: if i == 1 { rules.clone() } else { vec![] },
        ..Policy::default()
    });
    // In one buffer, and with the ports in a buffer of their own.
    for cuts in [&[][..], &[12, 12 + 34]] {
        for (port, passes) in [(25, false), (80, true)] {
            for (to, from) in [(1, 0), (0, 1)] {
                assert!(rig.nics[from].send_cut(&NetHeader::default(), &mail(to, from, port), cuts));
                rig.pass(from);
                let got = rig.nics[to].receive().map(|f| f.1);
                assert_eq!(got, passes.then(|| mail(to, from, port)), "to {to}, port {port}");
            }
        }
    }
    assert_eq!(rules.iter().map(|r| r.hits.get()).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(rig.ports.iter().map(|p| p.sent().dropped_for(Reason::Rule)).collect::<Vec<_>>(), [2, 2]);

    // A waiting frame is decided once.
    let allow: Rule = toml::from_str("action='allow'\ndirection='in'\nprotocol='tcp'").unwrap();
    let mut rig = Rig::with_policies(&[NicConfig::default(), small], |i| Policy {
        rules: if i == 1 { vec![allow.clone()] } else { vec![] },
        ..Policy::default()
    });
    for _ in 0..9 {
        assert!(rig.nics[0].send(&mail(1, 0, 80)));
    }
    for ns in [1, 1000, 2000] {
        rig.pass_at(0, ns);
    }
    assert_eq!(allow.hits.get(), 8);
    while rig.nics[1].receive().is_some() {}
    rig.pass_at(0, 3000);
    assert_eq!((allow.hits.get(), rig.nics[1].receive().map(|f| f.1)), (9, Some(mail(1, 0, 80))));
}

/// A TCP segment of `payload` bytes as a guest with segmentation offload sends it.
fn large(payload: usize) -> (NetHeader, Vec<u8>) {
    let mut f = frame(Rig::mac(1), Rig::mac(0), 12, 0);
    f.extend([8, 0, 0x45, 0]);
    f.extend(((payload + 40) as u16).to_be_bytes());
    f.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend([0x10, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    f.extend((0..payload).map(|i| (i / 3) as u8));
    let header = NetHeader {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    (header, f)
}

fn big(features: u64) -> NicConfig {
    let features = NicConfig::default().features | features;
    NicConfig { tx_buffer: 66_000, features, ..NicConfig::default() }
}

#[test]
fn between_capable_guests_a_large_segment_passes_untouched() {
    for packed in [false, true] {
        let config = NicConfig { packed, ..big(OFFLOADS) };
        let mut rig = Rig::new(&[config, config]);
        let (header, sent) = large(60_000);
        assert!(rig.nics[0].send_cut(&header, &sent, &[12, 66]));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive(), Some((header, sent)));
    }
}

#[test]
fn a_receiver_without_offloads_gets_segments_with_right_checksums() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[big(OFFLOADS), NicConfig { packed, ..NicConfig::default() }]);
        let (header, sent) = large(60_000);
        assert!(rig.nics[0].send_cut(&header, &sent, &[12, 66]));
        rig.pass(0);
        let mut payload = Vec::new();
        while let Some((h, f)) = rig.nics[1].receive() {
            assert_eq!(h, NetHeader::default());
            let pseudo = offload::sum(&f[26..34], 6 + (f.len() - 34) as u32);
            assert_eq!(offload::fold(offload::sum(&f[34..], pseudo)), 0, "TCP checksum");
            assert_eq!(offload::fold(offload::sum(&f[14..34], 0)), 0, "IP checksum");
            assert!(f.len() <= 1514);
            payload.extend_from_slice(&f[54..]);
        }
        assert!(payload == sent[54..], "{} of 60000 bytes", payload.len());
    }
}

#[test]
fn segments_held_up_by_a_full_receiver_go_on_where_they_stopped() {
    let receiver = NicConfig { size: 16, ..NicConfig::default() };
    let mut rig = Rig::new(&[big(OFFLOADS), receiver]);
    let (header, sent) = large(60_000);
    assert!(rig.nics[0].send_cut(&header, &sent, &[]));
    let mut payload = Vec::new();
    for _ in 0..10 {
        rig.pass_at(0, 1);
        while let Some((_, f)) = rig.nics[1].receive() {
            payload.extend_from_slice(&f[54..]);
        }
    }
    assert!(payload == sent[54..], "{} of 60000 bytes", payload.len());
    assert_eq!(rig.ports[1].received().dropped() + rig.ports[0].sent().dropped(), 0);
}

#[test]
fn a_receiver_with_checksum_offload_only_gets_segments_and_one_with_neither_a_whole_checksum() {
    let csum = 1 << bit::GUEST_CSUM;
    let mut rig = Rig::new(&[big(OFFLOADS), big(csum)]);
    let (header, sent) = large(5000);
    assert!(rig.nics[0].send_cut(&header, &sent, &[]));
    rig.pass(0);
    assert_eq!((0..9).filter(|_| rig.nics[1].receive().is_some()).count(), 4);

    let mut rig = Rig::new(&[big(OFFLOADS), big(0)]);
    let (header, sent) = large(1000);
    let header = NetHeader { gso_type: 0, gso_size: 0, ..header };
    assert!(rig.nics[0].send_cut(&header, &sent, &[]));
    rig.pass(0);
    let (h, got) = rig.nics[1].receive().expect("a frame");
    assert!(h.is_plain());
    assert_eq!(got[..50], sent[..50]);
    assert_eq!(got[52..], sent[52..]);
}

#[test]
fn a_mirror_gets_copies_of_what_a_port_sends_and_gets_and_holds_up_nobody() {
    let mirror = Some("vm3".to_owned());
    let mut rig =
        Rig::with_policies(&[big(OFFLOADS), big(OFFLOADS), big(0), NicConfig::default()], |i| Policy {
            mirror: mirror.clone().filter(|_| i == 1),
            vlan: if i == 2 { Vlan::Access(5) } else { Vlan::Transparent },
            ..Policy::default()
        });
    let (to, from) = (frame(Rig::mac(1), Rig::mac(0), 300, 1), frame(Rig::mac(0), Rig::mac(1), 60, 2));
    let other = frame(Rig::mac(3), Rig::mac(0), 60, 3);
    for (n, f) in [(0, &to), (1, &from), (0, &other)] {
        assert!(rig.nics[n].send(f));
        rig.pass(n);
    }
    assert_eq!(rig.nics[0].receive().map(|f| f.1), Some(from.clone()));
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(to.clone()));
    for f in [to.clone(), from, other] {
        assert_eq!(rig.nics[3].receive(), Some((NetHeader::default(), f)));
    }
    // A large one comes in the form that the mirror takes.
    let (header, whole) = large(5000);
    assert!(rig.nics[0].send_cut(&header, &whole, &[]));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive(), Some((header, whole)));
    assert_eq!((0..9).filter(|_| rig.nics[3].receive().is_some()).count(), 4);
    // A full mirror loses copies, and no frame waits for it.
    for _ in 0..200 {
        assert!(rig.nics[0].send(&to));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(to.clone()));
    }
    assert_eq!(rig.ports[3].received().dropped_for(Reason::NoBuffer), 200 - 64);
    let counts = rig.ports.iter().fold((0, 0), |(sent, ended), port| {
        let (s, r) = (port.sent(), port.received());
        (sent + s.packets + s.copies, ended + s.dropped() + r.packets + r.dropped())
    });
    assert_eq!(counts.0, counts.1);
}

#[test]
fn a_capture_shows_both_directions_of_one_port() {
    let mut rig = Rig::new(&plain(3));
    let watch = Arc::new(Capture::new(96));
    let mut ports = rig.view.ports().to_vec();
    ports[1].capture = Some(watch.clone());
    rig.view = tombolo_net::forwarding::view::View::new(ports).unwrap();
    let to = frame(Rig::mac(1), Rig::mac(0), 300, 1);
    let from = frame(Rig::mac(0), Rig::mac(1), 60, 2);
    assert!(rig.nics[0].send(&to));
    assert!(rig.nics[1].send(&from));
    assert!(rig.nics[0].send(&frame(Rig::mac(2), Rig::mac(0), 60, 3)));
    rig.pass(0);
    rig.pass(1);
    let mut file = watch.preamble("vm1");
    watch.drain(&mut file, &mut Vec::new()).unwrap();
    file.extend(watch.statistics());
    // Walk the blocks: kind, length, …, length.
    let (mut at, mut frames) = (0, Vec::new());
    while at < file.len() {
        let word = |i: usize| u32::from_le_bytes(file[i..i + 4].try_into().unwrap()) as usize;
        let (kind, len) = (word(at), word(at + 4));
        assert_eq!(word(at + len - 4), len, "block {kind}");
        if kind == 6 {
            frames.push((word(at + 24), file[at + 28..at + 28 + word(at + 20)].to_vec()));
        }
        at += len;
    }
    assert_eq!(frames, vec![(300, to[..96].to_vec()), (60, from)]);
    assert_eq!(watch.missed(), 0);
}
