// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames that mean one thing to the switch and another to their receiver, and changes while a frame waits.

mod common;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use common::{Rig, frame};
use proptest::prelude::*;
use tombolo_net::control::metrics::status;
use tombolo_net::forwarding::forward::{BATCH, Forwarder, Pass};
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::{GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, MAX_FRAME, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::frames::headers::{Headers, LOOK};
use tombolo_net::frames::offload;
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::policy::rules::{self, Rule, Way};
use tombolo_net::policy::spoof;
use tombolo_net::ports::counters::Reason;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::passt::Passt;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net::vring::driver::{Nic, NicConfig};
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net::vring::queue::Negotiated;

fn offloading() -> NicConfig {
    NicConfig {
        features: NicConfig::default().features | OFFLOADS,
        tx_buffer: 65_700,
        ..NicConfig::default()
    }
}

fn ethernet(ethertype: u16, body: &[u8]) -> Vec<u8> {
    [&Rig::mac(1).0[..], &Rig::mac(0).0, &ethertype.to_be_bytes(), body].concat()
}

fn udp(from: u16, to: u16, data: usize) -> Vec<u8> {
    let len = (8 + data) as u16;
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &len.to_be_bytes(), &[0, 0], &vec![7; data]].concat()
}

/// A packet from 10.0.0.1 whose length field says `total`.
fn ipv4(total: usize, fragment: u16, protocol: u8, body: &[u8]) -> Vec<u8> {
    let head = [0x45, 0, (total >> 8) as u8, total as u8, 0, 1];
    let packet = [&head[..], &fragment.to_be_bytes(), &[64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2], body];
    ethernet(0x0800, &packet.concat())
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

/// A TCP segment with `data` bytes, to be segmented into pieces of `size`; `behind` bytes follow the packet.
fn tcp(data: usize, size: u16, behind: usize) -> (NetHeader, Vec<u8>) {
    let head = [0, 9, 0, 10, 0, 0, 0, 0, 0, 0, 0, 7, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    let body = [&head[..], &vec![1; data + behind]].concat();
    let asked = NetHeader { gso_type: GSO_TCPV4, gso_size: size, ..NetHeader::default() };
    let header = NetHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..asked };
    (header, ipv4(40 + data, 0, 6, &body))
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

/// An uplink in memory.
#[derive(Default)]
struct Wire {
    /// Frames from outside.
    inward: Mutex<VecDeque<Vec<u8>>>,
    /// The results of the next sends: 0 no room, 1 an error. Empty: all are taken.
    trouble: Mutex<VecDeque<u8>>,
}

/// The switch's end of it.
struct End(Arc<Wire>);

impl Link for End {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, _: &[libc::iovec]) -> io::Result<()> {
        match self.0.trouble.lock().unwrap().pop_front() {
            Some(0) => Err(io::ErrorKind::WouldBlock.into()),
            Some(1) => Err(io::ErrorKind::InvalidInput.into()),
            _ => Ok(()),
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let f = self.0.inward.lock().unwrap().pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        if f.is_empty() {
            return Err(io::ErrorKind::NetworkDown.into());
        }
        buffer[..f.len()].copy_from_slice(&f);
        Ok(f.len())
    }

    fn fd(&self) -> RawFd {
        -1
    }
}

/// Gives the guests of `rig` an uplink, as their last port.
fn with_uplink(rig: &mut Rig) -> Arc<Wire> {
    let wire = Arc::new(Wire::default());
    with_link(rig, Box::new(End(wire.clone())));
    wire
}

fn with_link(rig: &mut Rig, link: Box<dyn Link>) {
    let port = Arc::new(Port::new("up", 1));
    rig.ports.push(port.clone());
    let uplink = Some(Arc::new(Uplink::new(link)));
    let policy = Policy { uplink: true, ..Policy::default() };
    let mut ports = rig.view.ports().to_vec();
    ports.push(Attached { uplink, ..Attached::guest(port, policy) });
    rig.view = View::new(ports).unwrap();
}

#[test]
fn passt_gets_no_frame_that_is_longer_than_it_takes() {
    // passt (since 2024) closes the connection over which a longer one comes, and with it the uplink of all guests.
    const LONGEST: usize = 65_535;
    let (own, mut theirs) = UnixStream::pair().unwrap();
    let mut rig = Rig::new(&[NicConfig { tx_buffer: 70_000, ..NicConfig::default() }]);
    with_link(&mut rig, Box::new(Passt::over(own.into()).unwrap()));
    for len in [LONGEST + 1, MAX_FRAME, LONGEST] {
        assert!(rig.nics[0].send(&frame(Mac([2, 9, 9, 9, 9, 9]), Rig::mac(0), len, 0)));
        assert_eq!(rig.pass(0), Pass::Worked(1));
    }
    let mut head = [0; 4];
    theirs.read_exact(&mut head).unwrap();
    assert_eq!(u32::from_be_bytes(head) as usize, LONGEST);
    assert_eq!(rig.ports[1].received().dropped_for(Reason::Uplink), 2);
}

#[test]
fn a_port_that_learns_takes_no_address_of_somebody_outside() {
    const SECOND: u64 = 1_000_000_000;
    let gateway = Mac([0x52, 0x99, 0, 0, 0, 1]);
    let mut rig = Rig::with_policies(&[NicConfig::default(); 2], |i| Policy {
        check_mac: true,
        learn: [8, 0][i],
        ..Policy::default()
    });
    let wire = with_uplink(&mut rig);
    let claim = frame(Rig::mac(1), gateway, 60, 1);
    let heard = |rig: &mut Rig, now| {
        wire.inward.lock().unwrap().push_back(frame(Rig::mac(1), gateway, 60, 2));
        rig.pass_at(2, now);
        assert!(rig.nics[1].receive().is_some());
    };
    // Returns the receiver of a frame from the other guest to the gateway.
    let stolen = |rig: &mut Rig, now| {
        assert!(rig.nics[1].send(&frame(gateway, Rig::mac(1), 60, 3)));
        rig.pass_at(1, now);
        rig.nics[0].receive().is_some()
    };
    // The zero address must not match an empty place.
    assert!(rig.nics[1].send(&frame(Mac([0; 6]), Rig::mac(1), 60, 4)));
    rig.pass_at(1, 1);
    assert_eq!(rig.nics[0].receive(), None);
    heard(&mut rig, SECOND);
    assert!(rig.nics[0].send(&claim));
    rig.pass_at(0, 2 * SECOND);
    assert_eq!(rig.nics[1].receive(), None);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::SpoofMac), 1);
    assert!(!stolen(&mut rig, 3 * SECOND));
    // An address that was silent for long is forgotten, until it is heard again.
    assert!(rig.nics[0].send(&claim));
    rig.pass_at(0, 400 * SECOND);
    assert!(rig.nics[1].receive().is_some() && stolen(&mut rig, 401 * SECOND));
    heard(&mut rig, 402 * SECOND);
    assert!(!stolen(&mut rig, 403 * SECOND));
}

#[test]
fn a_crowd_outside_hides_nobody_from_a_port_that_learns() {
    const SECOND: u64 = 1_000_000_000;
    let mut rig = Rig::with_policies(&[NicConfig { size: 256, ..NicConfig::default() }; 2], |i| Policy {
        check_mac: true,
        learn: [64, 0][i],
        ..Policy::default()
    });
    let wire = with_uplink(&mut rig);
    let outside = |n: u32| {
        let [_, a, b, c] = n.to_be_bytes();
        Mac([0x52, 0x99, 0, a, b, c])
    };
    // The gateway sends first, then all the others: more than the table of addresses outside holds.
    for crowd in [100, 20_000] {
        for n in 0..crowd {
            wire.inward.lock().unwrap().push_back(frame(Rig::mac(1), outside(n), 60, 2));
            rig.pass_at(2, SECOND);
            while rig.nics[1].receive().is_some() {}
        }
        for n in [0, crowd / 2, crowd - 1] {
            assert!(rig.nics[0].send(&frame(Rig::mac(1), outside(n), 60, 1)));
            rig.pass_at(0, 2 * SECOND);
            assert_eq!(rig.nics[1].receive(), None, "{n} of {crowd}");
        }
    }
}

#[test]
fn a_pass_ends_before_a_port_that_floods_or_has_much_cut_takes_the_time_of_others() {
    const PORTS: usize = 40;
    let big = NicConfig {
        size: 256,
        tx_buffer: 66_000,
        features: NicConfig::default().features | OFFLOADS,
        ..NicConfig::default()
    };
    let mut configs = [NicConfig { size: 64, ..NicConfig::default() }; PORTS];
    configs[0] = big;
    let mut rig = Rig::new(&configs);
    let sent = frame(Mac::BROADCAST, Rig::mac(0), 1514, 1);
    (0..BATCH).for_each(|_| assert!(rig.nics[0].send(&sent)));
    let got = |rig: &mut Rig| -> usize {
        (1..PORTS).map(|n| std::iter::from_fn(|| rig.nics[n].receive()).count()).sum()
    };
    rig.forwarder.pass(&rig.view, 0, 0, 1);
    let first = got(&mut rig);
    assert!((1..=16 * PORTS).contains(&first), "{first} frames in one turn");
    // Nothing of it is lost.
    let mut all = first;
    while rig.forwarder.pass(&rig.view, 0, 0, 2) != Pass::Idle {
        all += got(&mut rig);
    }
    assert_eq!(all, BATCH * (PORTS - 1));
}

#[test]
fn an_uplinks_frames_behind_an_error_are_taken_at_once_and_an_uplink_that_only_fails_lets_its_worker_sleep() {
    // An interface that was down for a moment says so once, before it hands out its next frame.
    let mut rig = Rig::new(&[NicConfig::default()]);
    let wire = with_uplink(&mut rig);
    let sent = frame(Rig::mac(0), Mac([2, 9, 9, 9, 9, 9]), 80, 1);
    wire.inward.lock().unwrap().extend([vec![], sent.clone()]);
    assert_eq!(rig.forwarder.pass(&rig.view, 1, 0, 1), Pass::Worked(1));
    assert_eq!(rig.nics[0].receive().map(|f| f.1), Some(sent));
    wire.inward.lock().unwrap().extend(vec![vec![]; 10 * BATCH]);
    assert_eq!(rig.forwarder.pass(&rig.view, 1, 0, 2), Pass::Idle);
    assert!(wire.inward.lock().unwrap().len() >= 9 * BATCH);
}

#[test]
fn asking_for_figures_waits_for_no_worker() {
    let switch = Switch::new(1, 0, true).unwrap();
    let port = Arc::new(Port::new("vm", 1));
    let nic = Nic::new(NicConfig::default()).unwrap();
    nic.attach(&port).unwrap();
    switch
        .attach(Attached::guest(port.clone(), Policy { macs: vec![Rig::mac(0)], ..Policy::default() }))
        .unwrap();
    let (rx, tx) = (port.rx(0).lock(), port.tx(0).lock());
    let status = status(&switch);
    assert_eq!((status[0].up, status[0].workers.len()), (true, 1));
    drop((rx, tx));
}

#[test]
fn what_bridges_keep_leaves_by_no_uplink_as_a_copy_either() {
    let mut rig = Rig::with_policies(&[NicConfig::default(); 2], |i| Policy {
        mirror: (i == 0).then(|| "up".to_owned()),
        ..Policy::default()
    });
    with_uplink(&mut rig);
    for (to, copies) in [(Mac([1, 0x80, 0xc2, 0, 0, 0]), 0), (Rig::mac(1), 1)] {
        assert!(rig.nics[0].send(&frame(to, Rig::mac(0), 60, 1)));
        rig.pass(0);
        assert_eq!(rig.ports[2].received().packets, copies);
    }
}

#[test]
fn a_broadcast_that_waits_reaches_everybody_once_though_a_port_is_removed() {
    let mut rig = Rig::new(&[NicConfig::default(); 5]);
    let sent = frame(Mac::BROADCAST, Rig::mac(0), 60, 1);
    assert!(rig.nics[0].send(&sent));
    let busy = rig.ports[3].clone();
    let other_worker = busy.rx(0).lock();
    assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 1), Pass::Held(0));
    drop(other_worker);
    let ports: Vec<_> = rig.view.ports().iter().filter(|a| a.port.name() != "vm1").cloned().collect();
    rig.view = View::new(ports).unwrap();
    rig.pass(0);
    for n in 1..5 {
        assert_eq!(rig.nics[n].receive().map(|f| f.1).as_ref(), Some(&sent), "vm{n}");
        assert_eq!(rig.nics[n].receive(), None, "vm{n}");
    }
}

#[derive(Clone, Debug)]
enum Act {
    /// The sender (the last: an address outside), the receiver, the kind.
    Send(usize, usize, u8, usize),
    Pass(usize, u64),
    Receive(usize, usize),
    Contended(usize, usize),
    Trouble(u8),
    Restart(usize),
    /// A port is taken out of the view, or comes back.
    Toggle(usize),
}

const GUESTS: usize = 4;

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        10 => (0..=GUESTS, 0..GUESTS + 4, 0u8..8, 1usize..9000).prop_map(|(a, b, c, d)| Act::Send(a, b, c, d)),
        6 => (0..=GUESTS, 0u64..200_000).prop_map(|(n, ns)| Act::Pass(n, ns)),
        3 => (0..GUESTS, 0usize..12).prop_map(|(n, count)| Act::Receive(n, count)),
        2 => (0..=GUESTS, 0..=GUESTS).prop_map(|(n, other)| Act::Contended(n, other)),
        2 => (0u8..3).prop_map(Act::Trouble),
        1 => (0..GUESTS).prop_map(Act::Restart),
        1 => (0..=GUESTS).prop_map(Act::Toggle),
    ]
}

/// Returns the position of port `n` in the present view.
fn place(rig: &Rig, n: usize) -> Option<usize> {
    rig.view.ports().iter().position(|a| Arc::ptr_eq(&a.port, &rig.ports[n]))
}

fn pass(rig: &mut Rig, n: usize, now: u64) {
    if let Some(at) = place(rig, n) {
        rig.forwarder.pass(&rig.view, at, 0, now);
    }
}

fn ledger(rig: &Rig) -> (u64, u64) {
    rig.ports.iter().map(|p| (p.sent(), p.received())).fold((0, 0), |(sent, ended), (s, r)| {
        (sent + s.packets + s.copies, ended + s.dropped() + r.packets + r.dropped())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_frame_is_in_one_counter_with_uplinks_mirrors_learners_and_ports_that_go(
        kinds in prop::collection::vec((0u8..10, 0u8..4, any::<bool>(), any::<bool>()), GUESTS),
        acts in prop::collection::vec(act(), 20..150),
    ) {
        let nics: Vec<_> = kinds.iter().map(|(_, _, packed, offloads)| NicConfig {
            packed: *packed,
            size: 16,
            tx_buffer: 16_384,
            indirect: true,
            features: NicConfig::default().features | if *offloads { OFFLOADS } else { 0 },
            ..NicConfig::default()
        }).collect();
        let mut rig = Rig::with_policies(&nics, |i| Policy {
            check_mac: kinds[i].0 != 1,
            learn: if kinds[i].0 == 0 { 2 } else { 0 },
            vlan: match kinds[i].1 {
                0 => Vlan::Access(5),
                1 => Vlan::Trunk { vlans: vec![5, 6], native: None },
                _ => Vlan::Transparent,
            },
            mirror: match kinds[i].0 {
                2 => Some("up".into()),
                3 => Some("vm0".into()),
                _ => None,
            },
            ips: if kinds[i].0 == 4 { vec!["10.0.0.1".parse().unwrap()] } else { vec![] },
            mtu: if kinds[i].0 == 5 { 1000 } else { 0 },
            isolated: kinds[i].0 == 6,
            rate: Rate { bytes: 0, packets: if kinds[i].0 == 7 { 2000 } else { 0 } },
            receive_rate: Rate { bytes: 0, packets: if kinds[i].0 == 8 { 2000 } else { 0 } },
            ..Policy::default()
        });
        let wire = with_uplink(&mut rig);
        let whole = rig.view.clone();
        let (mut now, mut given, mut restarts) = (1u64, 0u64, 0u64);
        for act in acts {
            match act {
                Act::Send(from, to, how, len) => {
                    let (header, mut f) = if how < 2 { tcp(len, 1000, 0) } else { Default::default() };
                    if how >= 2 {
                        f = frame(Rig::mac(1), Rig::mac(0), 10 + len % 1500, 1);
                    }
                    let to = match to {
                        0..=GUESTS => Rig::mac(to),
                        5 => Mac([0x52, 0x77, 0, 0, 0, 1]),
                        6 => Mac([1, 0x80, 0xc2, 0, 0, 2]),
                        _ => Mac::BROADCAST,
                    };
                    let source = if how == 7 { Mac([0x52, 0x77, 0, 0, 0, len as u8 % 4]) } else { Rig::mac(from) };
                    f[..6].copy_from_slice(&to.0);
                    let room = f.len().min(12);
                    f[6..room].copy_from_slice(&source.0[..room - 6]);
                    if how % 2 == 1 && f.len() > 14 && how > 1 {
                        f.splice(12..12, [0x81, 0, 0, 5]);
                    }
                    if from == GUESTS {
                        wire.inward.lock().unwrap().push_back(f);
                        given += 1;
                    } else if rig.nics[from].send_cut(&header, &f, &[len % 40, len % 40 + 1]) {
                        given += 1;
                    }
                }
                Act::Pass(n, ns) => {
                    now += ns;
                    pass(&mut rig, n, now);
                }
                Act::Receive(n, count) => {
                    let _some = (0..count).map_while(|_| rig.nics[n].receive()).count();
                }
                Act::Contended(n, other) => {
                    now += 1000;
                    let port = rig.ports[other].clone();
                    let _other_worker = port.rx(0).lock();
                    pass(&mut rig, n, now);
                }
                Act::Trouble(kind) => wire.trouble.lock().unwrap().push_back(kind),
                Act::Restart(n) => {
                    let mut vring = rig.ports[n].tx(0).lock();
                    restarts += u64::from(vring.held.is_some());
                    vring.stop();
                    vring.start().unwrap();
                }
                Act::Toggle(n) => {
                    let gone = place(&rig, n).is_some();
                    let keep = |a: &&Attached| {
                        let own = Arc::ptr_eq(&a.port, &rig.ports[n]);
                        if own { !gone } else { rig.view.ports().iter().any(|b| Arc::ptr_eq(&a.port, &b.port)) }
                    };
                    let ports = whole.ports().iter().filter(keep).cloned().collect();
                    rig.view = View::new(ports).unwrap();
                }
            }
            let (sent, ended) = ledger(&rig);
            prop_assert_eq!(sent, ended, "after {:?}", act);
        }
        rig.view = whole;
        for _ in 0..100 {
            now += 1_000_000;
            for n in 0..=GUESTS {
                pass(&mut rig, n, now);
            }
            for nic in &mut rig.nics {
                let _all = std::iter::from_fn(|| nic.receive()).count();
            }
        }
        let (sent, ended) = ledger(&rig);
        let packets: u64 = rig.ports.iter().map(|p| p.sent().packets).sum();
        prop_assert_eq!(sent, ended);
        prop_assert!((given..=given + restarts).contains(&packets), "{} of {}", packets, given);
    }
}

#[test]
fn two_workers_in_each_others_way_count_every_frame_once() {
    let mut rig =
        Rig::with_policies(&[offloading(), NicConfig::default(), offloading(), NicConfig::default()], |i| {
            let mirror = (i == 1).then(|| "vm3".to_owned());
            Policy { check_mac: true, mirror, ..Policy::default() }
        });
    let over = AtomicBool::new(false);
    let begun = Instant::now();
    let (nics, view) = (&mut rig.nics, &rig.view);
    std::thread::scope(|s| {
        for worker in 0..2 {
            let over = &over;
            s.spawn(move || {
                let mut forwarder = Forwarder::default();
                for n in worker.. {
                    // After the end, until all waiting frames have ended.
                    let last = over.load(Ordering::Acquire);
                    let now = begun.elapsed().as_nanos() as u64;
                    let passes = (0..4).map(|at| forwarder.pass(view, (n + at) % 4, 0, now));
                    if passes.filter(|p| *p != Pass::Idle).count() == 0 && last {
                        break;
                    }
                }
            });
        }
        for n in 0..10_000usize {
            let from = n % 4;
            let to = if n % 3 == 0 { Mac::BROADCAST } else { Rig::mac(n / 4 % 5) };
            let (header, mut f) = match n % 5 {
                0 if from % 2 == 0 => tcp(20_000, 1400, 0),
                _ => (NetHeader::default(), frame(to, to, 60 + n % 1000, 1)),
            };
            f[..6].copy_from_slice(&to.0);
            f[6..12].copy_from_slice(&Rig::mac(from).0);
            while !nics[from].send_cut(&header, &f, &[]) {
                std::thread::yield_now();
            }
            // One of them is slow.
            for nic in nics.iter_mut().take(if n % 1000 == 0 { 4 } else { 3 }) {
                let _all = std::iter::from_fn(|| nic.receive()).count();
            }
        }
        over.store(true, Ordering::Release);
    });
    // The frames that a worker left because the other held the lock.
    for n in 0..4 {
        rig.pass_at(n, begun.elapsed().as_nanos() as u64 + 1_000_000_000);
    }
    let (sent, ended) = ledger(&rig);
    assert_eq!(sent, ended);
    assert_eq!(rig.ports.iter().map(|p| p.sent().packets).sum::<u64>(), 10_000);
    assert!(rig.ports.iter().map(|p| p.received().packets).sum::<u64>() >= 64);
}
