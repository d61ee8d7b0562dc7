// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random frames, policies and receivers. Each frame that arrives was allowed, by a second and simpler form of the rules,
//! and every frame is in exactly one counter.

mod common;

use std::net::{IpAddr, Ipv6Addr};

use common::Rig;
use proptest::prelude::*;
use tombolo_net::frames::frame::{DATA_VALID, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::policy::rules::{Rule, Way};
use tombolo_net::vring::features::{OFFLOADS, bit};
use tombolo_net_driver::NicConfig;

const PORTS: usize = 4;

/// A frame that a guest sends.
#[derive(Clone, Debug)]
struct Sent {
    to: usize,
    from: usize,
    tags: Vec<(u16, u16)>,
    body: Body,
    payload: usize,
    header: Wish,
    cuts: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Body {
    Ipv4 { source: u8, protocol: u8, ports: (u16, u16), fragment: u16, options: bool },
    Ipv6 { source: u8, chain: Vec<u8>, last: u8, kind: u8, target: u8, option: u8 },
    Arp { mac: usize, ip: u8 },
    Snap,
    Other,
}

/// The offload that its virtio-net header asks for.
#[derive(Clone, Debug)]
enum Wish {
    Nothing,
    Checksum,
    Segments(u16),
    Noise([u8; 12]),
}

#[derive(Clone, Debug)]
enum Act {
    Send(usize, Sent),
    Pass(usize, u64),
    Receive(usize, usize),
    /// A pass while another worker has a receiver.
    Contended(usize, usize),
    Restart(usize),
}

/// Unicast of a port, unicast without an owner, broadcast, multicast, addresses that bridges keep.
fn destination(to: usize) -> Mac {
    match to {
        0..PORTS => Rig::mac(to),
        PORTS => Mac([0x52, 0x54, 9, 9, 9, 9]),
        5 => Mac([1, 0x80, 0xc2, 0, 0, 0x0e]),
        6 => Mac([0x33, 0x33, 0, 0, 0, 1]),
        _ => Mac::BROADCAST,
    }
}

fn ip4(n: u8) -> [u8; 4] {
    if n == 9 { [0; 4] } else { [10, 0, 0, n] }
}

fn link_local(mac: Mac) -> Ipv6Addr {
    let m = mac.0;
    format!(
        "fe80::{:x}:{:x}:{:x}:{:x}",
        u16::from(m[0] ^ 2) << 8 | u16::from(m[1]),
        u16::from(m[2]) << 8 | 0xff,
        0xfe00 | u16::from(m[3]),
        u16::from(m[4]) << 8 | u16::from(m[5])
    )
    .parse()
    .unwrap()
}

fn ip6(n: u8) -> Ipv6Addr {
    match n {
        9 => Ipv6Addr::UNSPECIFIED,
        8 => "fe80::dead".parse().unwrap(),
        4..8 => link_local(Rig::mac(usize::from(n) - 4)),
        _ => format!("fd00::{n}").parse().unwrap(),
    }
}

impl Sent {
    /// Builds the frame; its payload repeats `id`, which identifies the frame in any of its parts.
    fn build(&self, id: u32) -> (NetHeader, Vec<u8>) {
        let mut f = Vec::new();
        f.extend(destination(self.to).0);
        f.extend(Rig::mac(self.from).0);
        for (tpid, tci) in &self.tags {
            f.extend(tpid.to_be_bytes());
            f.extend(tci.to_be_bytes());
        }
        let payload = id.to_be_bytes().repeat(self.payload);
        let (mut l4, mut protocol) = (0, 0);
        let transport = |protocol, (a, b): (u16, u16), v6: bool| {
            let mut t = [a.to_be_bytes(), b.to_be_bytes()].concat();
            match protocol {
                6 => t.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 0, 0, 0, 0, 0]),
                17 => t.extend([((payload.len() + 8) >> 8) as u8, (payload.len() + 8) as u8, 0, 0]),
                _ => t.extend([0; 4]),
            }
            let _same_for_both = v6;
            t
        };
        match &self.body {
            Body::Ipv4 { source, protocol: p, ports, fragment, options } => {
                let t = transport(*p, *ports, false);
                let ihl = if *options { 6 } else { 5 };
                let total = (4 * ihl + t.len() + payload.len()) as u16;
                f.extend([8, 0, 0x40 | ihl as u8, 0]);
                f.extend(total.to_be_bytes());
                f.extend([0, 1]);
                f.extend(fragment.to_be_bytes());
                f.extend([64, *p, 0, 0]);
                f.extend(ip4(*source));
                f.extend([10, 0, 0, 99]);
                f.extend(vec![1; 4 * (ihl - 5)]);
                (l4, protocol) = (f.len(), *p);
                f.extend(t);
            }
            Body::Ipv6 { source, chain, last, kind, target, option } => {
                f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                let length_at = f.len();
                f.extend([0, 0, chain.first().copied().unwrap_or(*last), 255]);
                f.extend(ip6(*source).octets());
                f.extend([0xff; 16]);
                for (i, header) in chain.iter().enumerate() {
                    let next = chain.get(i + 1).copied().unwrap_or(*last);
                    // A first fragment with more to come, or two words of padding.
                    f.extend(if *header == 44 {
                        [next, 0, 0, 1, 0, 0, 0, 7]
                    } else {
                        [next, 0, 1, 4, 0, 0, 0, 0]
                    });
                }
                (l4, protocol) = (f.len(), *last);
                if *last == 58 {
                    f.extend([*kind, 0, 0, 0, 0, 0, 0, 0]);
                    f.extend(ip6(*target).octets());
                    if *option > 0 {
                        f.extend([*option, 1]);
                        f.extend(Rig::mac(usize::from(*target) % PORTS).0);
                    }
                    // An option that means nothing, as long as the payload.
                    if payload.len() % 8 == 0 && !payload.is_empty() && payload.len() < 2000 {
                        f.extend([200, (payload.len() / 8 + 1) as u8, 0, 0, 0, 0, 0, 0]);
                    }
                } else {
                    f.extend(transport(*last, (1, 2), true));
                }
                let length = ((f.len() - length_at - 36 + payload.len()) as u16).to_be_bytes();
                f[length_at..length_at + 2].copy_from_slice(&length);
            }
            Body::Arp { mac, ip } => {
                f.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
                f.extend(Rig::mac(*mac).0);
                f.extend(ip4(*ip));
                f.extend([0; 6]);
                f.extend(ip4(*mac as u8));
            }
            Body::Snap => f.extend([
                0, 60, 0xaa, 0xaa, 3, 0, 0, 0, 8, 0, 0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0, 9, 9, 9, 9,
            ]),
            Body::Other => f.extend([0x88, 0xb5]),
        }
        f.extend(&payload);
        let right = NetHeader {
            flags: NEEDS_CSUM,
            csum_start: l4 as u16,
            csum_offset: if protocol == 17 { 6 } else { 16 },
            ..NetHeader::default()
        };
        let v6 = matches!(self.body, Body::Ipv6 { .. });
        let header = match self.header {
            Wish::Nothing => NetHeader::default(),
            Wish::Checksum => right,
            Wish::Segments(size) => NetHeader {
                gso_type: if protocol == 17 {
                    5
                } else if v6 {
                    4
                } else {
                    1
                },
                gso_size: size & !3,
                ..right
            },
            Wish::Noise(bytes) => NetHeader::parse(&bytes),
        };
        (header, f)
    }
}

/// Returns whether a port with that policy may send this, as far as IP addresses go. Tags are removed already.
fn is_honest(policy: &Policy, mac: Mac, f: &[u8]) -> bool {
    if policy.ips.is_empty() {
        return true;
    }
    let any_mac = !policy.check_mac;
    let has = |ip: IpAddr| policy.ips.contains(&ip) || ip == link_local(mac);
    let ip4_at = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&f[at..at + 4]).unwrap());
    let ip6_at = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&f[at..at + 16]).unwrap());
    let word = |at: usize| u16::from_be_bytes([f[at], f[at + 1]]);
    match word(12) {
        0x0800 => {
            let l4 = 14 + usize::from(f[14] & 15) * 4;
            let whole = word(20) & 0x1fff == 0;
            let answers = whole && f[23] == 17 && word(l4 + 2) == 68;
            !answers && (has(ip4_at(26)) || f[26..30] == [0; 4] && whole && f[23] == 17 && word(l4 + 2) == 67)
        }
        0x0806 => {
            (any_mac || f[22..28] == mac.0) && (has(ip4_at(28)) || f[28..32] == [0; 4] && has(ip4_at(38)))
        }
        0x86dd => {
            let nameless = f[22..38] == [0; 16];
            if !has(ip6_at(22)) && !nameless {
                return false;
            }
            let (mut at, mut next) = (54, f[20]);
            let mut fragment = false;
            while matches!(next, 0 | 43 | 44 | 60) {
                fragment |= next == 44;
                next = f[at];
                at += 8;
            }
            if next != 58 {
                return !nameless;
            }
            let target = || has(ip6_at(at + 8));
            let link = || any_mac || !matches!(f[at + 24], 1 | 2) || f[at + 26..at + 32] == mac.0;
            match f[at] {
                134 | 137 => false,
                135 => !fragment && link() && (target() || !nameless),
                136 => !fragment && link() && target() && !nameless,
                _ => !nameless,
            }
        }
        other => other >= 0x600,
    }
}

/// The transport protocol of an IP packet. Tags are off already.
fn protocol(f: &[u8]) -> Option<u8> {
    match f[12..14] {
        [8, 0] => Some(f[23]),
        [0x86, 0xdd] => {
            let (mut at, mut next) = (54, f[20]);
            while matches!(next, 0 | 43 | 44 | 60) {
                (next, at) = (f[at], at + 8);
            }
            Some(next)
        }
        _ => None,
    }
}

/// Checks that the port `to` may get `f` of the frame that `from` sent.
fn is_allowed(
    rig: &Rig,
    from: usize,
    sent: &Sent,
    to: usize,
    header: &NetHeader,
    f: &[u8],
) -> Result<(), String> {
    let [source, dest] = [from, to].map(|n| &*rig.view.ports()[n].policy);
    let check = |ok: bool, what: &str| if ok { Ok(()) } else { Err(what.to_owned()) };
    check(from != to || to == 3, "came back")?;
    let mirrored = |n: usize| rig.view.ports()[n].policy.mirror.is_some();
    if to == 3 && ((0..3).any(mirrored)) {
        // A mirror's copies of allowed frames, in the form that their receivers got.
        return Ok(());
    }
    check(!source.isolated && !dest.isolated, "isolated")?;
    check(sent.to == to || sent.to > 5, "another's")?;
    check(!source.check_mac || sent.from == from, "not the sender's MAC")?;
    // Tags: as sent between transparent ports, else the switch's own.
    let vid = |vlan: &Vlan| match (vlan, &sent.tags[..]) {
        (Vlan::Access(v), [] | [(0x8100, 0 | 0xa000)]) => Some(*v),
        (Vlan::Trunk { native, .. }, [] | [(0x8100, 0 | 0xa000)]) => *native,
        (Vlan::Trunk { vlans, .. }, [(0x8100, tci)]) => Some(tci & 0xfff).filter(|v| vlans.contains(v)),
        _ => None,
    };
    let lead: Vec<u8> =
        sent.tags.iter().flat_map(|(a, b)| [a.to_be_bytes(), b.to_be_bytes()].concat()).collect();
    let tagged = f[12..14] == [0x81, 0];
    let bare = if source.vlan == Vlan::Transparent && dest.vlan == Vlan::Transparent {
        check(f[12..].starts_with(&lead), "tags were changed")?;
        [&f[..12], &f[12 + lead.len()..]].concat()
    } else {
        let on = vid(&source.vlan).ok_or("on no VLAN")?;
        let (may, with) = match &dest.vlan {
            Vlan::Transparent => (false, false),
            Vlan::Access(v) => (*v == on, false),
            Vlan::Trunk { native, .. } if *native == Some(on) => (true, false),
            Vlan::Trunk { vlans, .. } => (vlans.contains(&on), true),
        };
        check(may, "another VLAN")?;
        check(with == tagged, "tag")?;
        check(!with || f[14] & 15 == 0 && u16::from(f[15]) == on, "the tag's VLAN")?;
        if with { [&f[..12], &f[16..]].concat() } else { f.to_vec() }
    };
    check(!matches!(bare[12..14], [0x81, 0]), "a second tag")?;
    let forbids = |policy: &Policy, way| policy.rules.iter().any(|r| r.direction == way);
    let udp = protocol(&bare) == Some(17);
    check(!udp || !forbids(source, Way::Out) && !forbids(dest, Way::In), "a rule forbids it")?;
    check(is_honest(source, Rig::mac(from), &bare), "claims what isn't its own")?;
    let limit = usize::from(source.mtu);
    check(limit == 0 || header.gso_type != 0 || bare.len() <= 14 + limit, "MTU")?;
    // The header refers to this frame's transport header, and the receiver has negotiated that.
    check(header.flags & (!NEEDS_CSUM | DATA_VALID) == 0, "flags")?;
    if header.flags == 0 {
        return check(*header == NetHeader::default(), "an empty header");
    }
    let n = rig.ports[to].rx(0).lock().negotiated;
    check(n.csum && rig.ports[from].tx(0).lock().negotiated.host, "a header that was not agreed to")?;
    let start = usize::from(header.csum_start) - (f.len() - bare.len());
    let (protocol, begin) =
        if bare[12] == 8 { (bare[23], 14 + usize::from(bare[14] & 15) * 4) } else { (bare[20], 54) };
    let chained = !matches!(protocol, 6 | 17);
    check(start == begin || chained && start > begin, "where the checksum begins")?;
    check(matches!(header.csum_offset, 6 | 16), "where the checksum is")
}

fn vlan() -> impl Strategy<Value = Vlan> {
    prop_oneof![
        4 => Just(Vlan::Transparent),
        2 => (5u16..7).prop_map(Vlan::Access),
        2 => prop::option::of(5u16..8).prop_map(|native| Vlan::Trunk { vlans: vec![5, 6], native }),
    ]
}

fn policies() -> impl Strategy<Value = Vec<Policy>> {
    let one =
        (vlan(), any::<[bool; 2]>(), 0u8..12, prop_oneof![3 => Just(0u16), 1 => Just(300)], any::<bool>());
    let rule = |way| format!("action = 'drop'\ndirection = '{way}'\nprotocol = 'udp'");
    let no_udp = move |way| -> Rule { toml::from_str(&rule(way)).unwrap() };
    let filters = prop::collection::vec((0u8..8, 0u8..8), PORTS);
    (any::<bool>(), prop::collection::vec(one, PORTS), filters).prop_map(move |(vlans, all, filters)| {
        all.into_iter()
            .enumerate()
            .map(|(i, (vlan, [check_mac, guarded], isolated, mtu, limited))| Policy {
                vlan: if vlans { vlan } else { Vlan::Transparent },
                check_mac,
                isolated: isolated == 0,
                mtu,
                rate: Rate { bytes: 0, packets: if limited && mtu > 0 { 1000 } else { 0 } },
                rules: match filters[i].0 {
                    0 => vec![no_udp("out")],
                    1 => vec![no_udp("in")],
                    _ => vec![],
                },
                receive_rate: Rate { bytes: 0, packets: if filters[i].1 == 0 { 500 } else { 0 } },
                mirror: (filters[i].0 == 2).then(|| "vm3".to_owned()),
                ips: if guarded { vec![ip4(i as u8).into(), ip6(i as u8).into()] } else { vec![] },
                ..Policy::default()
            })
            .collect()
    })
}

fn guests() -> impl Strategy<Value = Vec<NicConfig>> {
    let one =
        (any::<[bool; 3]>(), prop::sample::select(vec![8u16, 64]), prop::sample::select(vec![256u32, 2048]));
    prop::collection::vec(one, PORTS).prop_map(|all| {
        all.into_iter()
            .map(|([packed, offloads, mergeable], size, rx_buffer)| {
                let mut features = if offloads { OFFLOADS } else { 0 };
                features |= u64::from(mergeable) << bit::MRG_RXBUF;
                NicConfig { packed, features, size, rx_buffer, tx_buffer: 8192, indirect: false }
            })
            .collect()
    })
}

fn body() -> impl Strategy<Value = Body> {
    let port = prop::sample::select(vec![(1u16, 2u16), (67, 68), (68, 67), (1, 68)]);
    let fragment = prop::sample::select(vec![0u16, 0x4000, 0x2000, 5]);
    let ipv4 = (0u8..10, prop::sample::select(vec![6u8, 17, 1]), port, fragment, any::<bool>()).prop_map(
        |(source, protocol, ports, fragment, options)| Body::Ipv4 {
            source,
            protocol,
            ports,
            fragment,
            options,
        },
    );
    let chain = prop::collection::vec(prop::sample::select(vec![0u8, 60, 43, 44]), 0..3);
    let last = prop::sample::select(vec![58u8, 58, 6, 17]);
    let ipv6 =
        (0u8..10, chain, last, prop::sample::select(vec![128u8, 133, 134, 135, 136, 137]), 0u8..10, 0u8..3)
            .prop_map(|(source, chain, last, kind, target, option)| Body::Ipv6 {
                source,
                chain,
                last,
                kind,
                target,
                option,
            });
    prop_oneof![
        4 => ipv4,
        4 => ipv6,
        1 => (0..PORTS, 0u8..10).prop_map(|(mac, ip)| Body::Arp { mac, ip }),
        1 => Just(Body::Snap),
        1 => Just(Body::Other),
    ]
}

fn sent() -> impl Strategy<Value = Sent> {
    let tag = (
        prop::sample::select(vec![0x8100u16, 0x8100, 0x8100, 0x88a8]),
        prop::sample::select(vec![0u16, 5, 6, 7, 0xa000]),
    );
    let tags = prop_oneof![3 => Just(vec![]), 2 => prop::collection::vec(tag, 1..4)];
    let wish = prop_oneof![
        3 => Just(Wish::Nothing),
        2 => Just(Wish::Checksum),
        2 => (48u16..800).prop_map(Wish::Segments),
        1 => any::<[u8; 12]>().prop_map(Wish::Noise),
    ];
    let payload = prop_oneof![4 => 8usize..60, 1 => 60usize..1500];
    (
        0usize..8,
        any::<prop::sample::Index>(),
        tags,
        body(),
        payload,
        wish,
        prop::collection::vec(1usize..300, 0..3),
    )
        .prop_map(|(to, from, tags, body, payload, header, mut cuts)| {
            cuts.sort_unstable();
            Sent { to, from: from.index(PORTS), tags, body, payload, header, cuts }
        })
}

fn act() -> impl Strategy<Value = Act> {
    // Mostly a guest's own address, and its own IP.
    let honest = (0..PORTS, sent(), 0u8..4).prop_map(|(n, mut s, lie)| {
        if lie > 0 {
            s.from = n;
            match &mut s.body {
                Body::Ipv4 { source, .. } if lie > 1 => *source = n as u8,
                Body::Ipv6 { source, target, .. } if lie > 1 => {
                    *source = if lie == 2 { n as u8 } else { n as u8 + 4 };
                    if *target < 4 {
                        *target = n as u8;
                    }
                }
                Body::Arp { mac, ip } => (*mac, *ip) = (n, n as u8),
                _ => {}
            }
        }
        Act::Send(n, s)
    });
    prop_oneof![
        12 => honest,
        6 => (0..PORTS, 0u64..300_000).prop_map(|(n, ns)| Act::Pass(n, ns)),
        4 => (0..PORTS, 0usize..8).prop_map(|(n, count)| Act::Receive(n, count)),
        1 => (0..PORTS, 0..PORTS).prop_map(|(n, other)| Act::Contended(n, other)),
        1 => (0..PORTS).prop_map(Act::Restart),
    ]
}

/// Receives the frames of guest `n`, and checks them.
fn receive(rig: &mut Rig, n: usize, all: &[(usize, Sent)], count: usize) -> Result<(), TestCaseError> {
    for _ in 0..count {
        let Some((header, f)) = rig.nics[n].receive() else { break };
        let id = u32::from_be_bytes(f[f.len() - 4..].try_into().unwrap()) as usize;
        let (from, sent) = &all[id];
        if let Err(why) = is_allowed(rig, *from, sent, n, &header, &f) {
            prop_assert!(
                false,
                "{why}: port {from} to {n}, {sent:x?}, {header:x?}, {:02x?}",
                &f[..f.len().min(96)]
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_arrives_is_allowed_and_every_frame_is_counted_once(
        policies in policies(),
        guests in guests(),
        acts in prop::collection::vec(act(), 20..150),
    ) {
        let mut rig = Rig::with_policies(&guests, |i| policies[i].clone());
        let mut all: Vec<(usize, Sent)> = Vec::new();
        let (mut now, mut restarts) = (1u64, 0);
        for act in acts {
            match act {
                Act::Send(n, sent) => {
                    let (header, f) = sent.build(all.len() as u32);
                    if rig.nics[n].send_cut(&header, &f, &sent.cuts) {
                        all.push((n, sent));
                    }
                }
                Act::Pass(n, ns) => {
                    now += ns;
                    rig.forwarder.pass(&rig.view, n, 0, now);
                }
                Act::Receive(n, count) => receive(&mut rig, n, &all, count)?,
                Act::Contended(n, other) => {
                    now += 1000;
                    let port = rig.ports[other].clone();
                    let _other_worker = port.rx(0).lock();
                    rig.forwarder.pass(&rig.view, n, 0, now);
                }
                Act::Restart(n) => {
                    let mut vring = rig.ports[n].tx(0).lock();
                    // A waiting frame that some of its receivers have got is sent once more.
                    restarts += u64::from(vring.held.is_some());
                    vring.stop();
                    vring.start().unwrap();
                }
            }
        }
        for _ in 0..400 {
            now += 1_000_000;
            for n in 0..PORTS {
                rig.forwarder.pass(&rig.view, n, 0, now);
                receive(&mut rig, n, &all, usize::MAX)?;
            }
        }
        let (mut sent, mut ended) = (0, 0);
        for port in &rig.ports {
            let (s, r) = (port.sent(), port.received());
            sent += s.packets + s.copies;
            ended += s.dropped() + r.packets + r.dropped();
        }
        let packets: u64 = rig.ports.iter().map(|p| p.sent().packets).sum();
        prop_assert!(packets >= all.len() as u64 && packets <= all.len() as u64 + restarts);
        prop_assert_eq!(sent, ended, "of {} frames", all.len());
    }
}
