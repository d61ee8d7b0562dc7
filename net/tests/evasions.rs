// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames that mean one thing to the switch and another to their receiver.

mod common;

use common::Rig;
use common::offloads::{ethernet, ipv4, offloading, tcp};
use proptest::prelude::*;
use tombolo_net::frames::frame::{GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, NetHeader};
use tombolo_net::frames::headers::{Headers, LOOK};
use tombolo_net::frames::offload;
use tombolo_net::policy::port::Policy;
use tombolo_net::policy::rules::{self, Rule, Way};
use tombolo_net::policy::spoof;
use tombolo_net::ports::counters::Reason;
use tombolo_net_driver::NicConfig;

fn udp(from: u16, to: u16, data: usize) -> Vec<u8> {
    let len = (8 + data) as u16;
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &len.to_be_bytes(), &[0, 0], &vec![7; data]].concat()
}

/// A packet from fd00::1 whose length field says `payload`.
fn ipv6(payload: usize, next: u8, body: &[u8]) -> Vec<u8> {
    let mut own = [0; 16];
    (own[0], own[15]) = (0xfd, 1);
    let head = [0x60, 0, 0, 0, (payload >> 8) as u8, payload as u8, next, 64];
    ethernet(0x86dd, &[&head[..], &own, &[0xff; 16], body].concat())
}

/// A virtio-net header that asks for segmentation of a datagram whose UDP header is at `l4`.
fn cut_udp(l4: u16) -> NetHeader {
    let asked = NetHeader { gso_type: GSO_UDP_L4, gso_size: 1000, ..NetHeader::default() };
    NetHeader { flags: NEEDS_CSUM, csum_start: l4, csum_offset: 6, ..asked }
}

fn guarded(router: bool) -> Policy {
    let ips = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
    Policy { check_mac: true, ips, router, ..Policy::default() }
}

#[test]
fn a_guarded_port_answers_no_dhcp_client_in_any_form() {
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let plain = NetHeader::default();
    let answers = [
        ("by the server's port", plain, ipv4(128, 0, 17, &udp(67, 68, 100)), Reason::Server),
        ("by another port", plain, ipv4(128, 0, 17, &udp(1067, 68, 100)), Reason::Server),
        ("IPv6", plain, ipv6(108, 17, &udp(547, 546, 100)), Reason::Server),
        ("IPv6, by another port", plain, ipv6(108, 17, &udp(1547, 546, 100)), Reason::Server),
        // The switch computes the segments' lengths: bytes behind the packet would become part of it.
        ("behind the packet's end", cut_udp(34), ipv4(20, 0, 17, &udp(67, 68, 100)), Reason::Unparsable),
        (
            "behind the end of an IPv6 packet",
            cut_udp(62),
            ipv6(8, 60, &[&options(17)[..], &udp(547, 546, 100)].concat()),
            Reason::Unparsable,
        ),
        ("in a later fragment", plain, ipv4(20, 0x2000, 17, &[0; 40]), Reason::Unparsable),
        (
            "in a later fragment of IPv6",
            plain,
            ipv6(16, 44, &[&[60, 0, 0, 1, 0, 0, 0, 1][..], &options(17)].concat()),
            Reason::Unparsable,
        ),
    ];
    for (what, header, sent, reason) in answers {
        let configs = [offloading(), NicConfig::default()];
        let mut rig =
            Rig::with_policies(&configs, |i| if i == 0 { guarded(false) } else { Policy::default() });
        assert!(rig.nics[0].send_cut(&header, &sent, &[]));
        rig.pass(0);
        assert_eq!(rig.nics[1].receive(), None, "{what}");
        assert_eq!(rig.ports[0].sent().dropped_for(reason), 1, "{what}");
    }
    // A port that may be a server answers, and any guest's datagrams are segmented.
    let mut rig = Rig::with_policies(&[offloading(), NicConfig::default()], |i| match i {
        0 => guarded(true),
        _ => Policy::default(),
    });
    assert!(rig.nics[0].send(&ipv4(128, 0, 17, &udp(67, 68, 100))));
    assert!(rig.nics[0].send_cut(&cut_udp(34), &ipv4(2528, 0, 17, &udp(1, 2, 2500)), &[]));
    rig.pass(0);
    assert_eq!(std::iter::from_fn(|| rig.nics[1].receive()).count(), 1 + 3);
}

#[test]
fn a_guarded_port_is_no_router_of_ipv4_either() {
    // A redirect (RFC 792), and a router's advertisement (RFC 1256), which some systems take for their default route.
    let served = |router| Policy { check_mac: true, no_server: true, router, ..Policy::default() };
    for (policy, arrives) in
        [(guarded(false), false), (served(false), false), (guarded(true), true), (served(true), true)]
    {
        let policy = |i| if i == 0 { policy.clone() } else { Policy::default() };
        let mut rig = Rig::with_policies(&[NicConfig::default(); 2], policy);
        for fragment in [0, 0x2000] {
            for message in [[5, 1, 0, 0, 10, 0, 0, 1], [9, 0, 0, 0, 1, 2, 7, 8]] {
                let sent = ipv4(36, fragment, 1, &[&message[..], &[0; 8]].concat());
                assert!(rig.nics[0].send(&sent));
                rig.pass(0);
                assert_eq!(rig.nics[1].receive().is_some(), arrives, "{message:?}");
            }
        }
        assert_eq!(rig.ports[0].sent().dropped_for(Reason::Server), if arrives { 0 } else { 4 });
        assert!(rig.nics[0].send(&ipv4(36, 0, 1, &[8; 16])), "an echo request");
        rig.pass(0);
        assert!(rig.nics[1].receive().is_some());
    }
}

#[test]
fn segments_are_of_the_packet_and_within_the_senders_mtu() {
    for (data, size, behind, reason) in [
        (4000, 1460, 0, None),
        (4000, 1461, 0, Some(Reason::Oversize)),
        (1000, 9000, 0, None),
        (4000, 1460, 1, Some(Reason::Header)),
        (60_000, 65_500, 0, Some(Reason::Header)),
    ] {
        let configs = [offloading(), NicConfig::default()];
        let mut rig = Rig::with_policies(&configs, |_| Policy { mtu: 1500, ..Policy::default() });
        let (header, sent) = tcp(data, size, behind);
        assert!(rig.nics[0].send_cut(&header, &sent, &[]));
        rig.pass(0);
        let pieces: Vec<_> = std::iter::from_fn(|| rig.nics[1].receive()).collect();
        assert!(pieces.iter().all(|(_, f)| f.len() <= 1514));
        let carried: usize = pieces.iter().map(|(_, f)| f.len() - 54).sum();
        assert_eq!(carried, if reason.is_none() { data } else { 0 }, "{data} by {size} and {behind}");
        let drops = reason.map_or(0, |reason| rig.ports[0].sent().dropped_for(reason));
        assert_eq!((drops, rig.ports[0].sent().dropped()), (u64::from(reason.is_some()), drops));
    }
}

/// Returns whether the switch's checks admit a frame.
fn may_be_sent(policy: &Policy, f: &[u8]) -> bool {
    let head = &f[..f.len().min(LOOK)];
    let headers = Headers::parse(head, f.len() as u32);
    let rules = rules::decide(&policy.rules, Way::Out, &headers, head);
    spoof::check(policy, &headers, head).is_ok() && rules.passes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_the_switch_makes_of_a_frame_it_would_have_let_pass_itself(
        base in 0usize..6,
        (from, to) in prop::sample::select(vec![(67u16, 68u16), (547, 546), (9, 25), (9, 99)]),
        ruled in any::<bool>(),
        data in 1usize..600,
        size in prop::sample::select(vec![48u16, 100, 65_535]),
        checksum_only in any::<bool>(),
        changes in prop::collection::vec(
            (12usize..70, prop::sample::select(vec![0u8, 1, 4, 6, 8, 17, 20, 28, 44, 60, 0x45, 0x46, 0x50, 0x81, 255])),
            0..5,
        ),
    ) {
        let drop: Rule = toml::from_str("action = 'drop'\ndirection = 'out'\ndestination-port = 25").unwrap();
        let policy = Policy { rules: if ruled { vec![drop] } else { vec![] }, check_mac: false, ..guarded(false) };
        let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
        let datagram = udp(from, to, data);
        let stream = [&from.to_be_bytes()[..], &to.to_be_bytes(), &[0, 0, 0, 0, 0, 0, 0, 7, 0x50, 0x18, 1, 0, 0, 0, 0, 0], &vec![1; data]];
        let stream = stream.concat();
        let (mut f, l4) = match base {
            0 => (ipv4(28 + data, 0, 17, &datagram), 34),
            1 => (ipv4(40 + data, 0, 6, &stream), 34),
            2 => (ipv6(8 + data, 17, &datagram), 54),
            3 => (ipv6(20 + data, 6, &stream), 54),
            4 => (ipv6(16 + data, 60, &[&options(17)[..], &datagram].concat()), 62),
            _ => (ipv6(28 + data, 0, &[&options(6)[..], &stream].concat()), 62),
        };
        for (at, byte) in changes {
            let last = f.len() - 1;
            f[at.min(last)] = byte;
        }
        let (udp, v6) = (base % 2 == 0, base > 1);
        let kind = if udp { GSO_UDP_L4 } else if v6 { GSO_TCPV6 } else { GSO_TCPV4 };
        let (gso_type, gso_size) = if checksum_only { (0, 0) } else { (kind, size) };
        let csum_offset = if udp { 6 } else { 16 };
        let asked = NetHeader { flags: NEEDS_CSUM, gso_type, gso_size, csum_start: l4, csum_offset, hdr_len: 0 };
        let head = &f[..f.len().min(LOOK)];
        let made = offload::wanted(&asked, &Headers::parse(head, f.len() as u32), head, f.len() as u32);
        if let Some((header, layers)) = made.filter(|_| may_be_sent(&policy, &f)) {
            if checksum_only {
                offload::checksum(&mut f, &layers);
                prop_assert!(may_be_sent(&policy, &f), "{:02x?}", f);
            } else {
                let mut out = vec![0; 70_000];
                for n in 0..offload::segments(&f, &header, &layers) {
                    let len = offload::segment(&f, &header, &layers, n, &mut out).unwrap();
                    prop_assert!(may_be_sent(&policy, &out[..len]), "{:02x?} of {:02x?}", &out[..len], f);
                }
            }
        }
    }
}
