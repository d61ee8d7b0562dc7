// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Multicast goes to the ports that joined, and no port changes the membership of another.

mod common;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use common::talk::{datagram, group4, group6, igmp, ipv4, ipv6, mld};
use common::{Rig, frame};
use tombolo_net::forwarding::forward::Pass;
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::ports::counters::Reason;
use tombolo_net::ports::port::Port;
use tombolo_net::service::querier::{self, Querier};
use tombolo_net::service::{Announcer, Service};
use tombolo_net::uplink::Uplink;
use tombolo_net_driver::NicConfig;

const SECOND: u64 = 1_000_000_000;
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
/// Guests 0 to 2 are hosts, guest 3 is a router.
const ROUTER: usize = 3;

struct Net {
    rig: Rig,
    /// Seconds since the beginning.
    now: u64,
    /// Frames sent.
    sent: u8,
}

fn host(n: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, n as u8 + 1)
}

impl Net {
    fn with(policy: impl Fn(usize) -> Policy) -> Self {
        let configs = [NicConfig { size: 256, ..NicConfig::default() }; 4];
        let mut rig =
            Rig::with_policies(&configs, |i| Policy { router: i == ROUTER, check_mac: true, ..policy(i) });
        rig.view = rig.view.snooping(Some(Arc::default()));
        Self { rig, now: 1, sent: 0 }
    }

    fn new() -> Self {
        Self::with(|_| Policy::default())
    }

    /// Sends a frame from guest `n`; returns a bit per receiver.
    fn send(&mut self, n: usize, f: &[u8]) -> u8 {
        assert!(self.rig.nics[n].send(f));
        assert_eq!(self.rig.pass_at(n, self.now * SECOND), Pass::Worked(1));
        let mut got = 0;
        for (i, nic) in self.rig.nics.iter_mut().enumerate() {
            while let Some((_, received)) = nic.receive() {
                assert_eq!((received, got >> i & 1), (f.to_vec(), 0));
                got |= 1 << i;
            }
        }
        got
    }

    /// Returns the receivers of a frame from guest `n` to a group.
    fn reaches(&mut self, n: usize, group: Ipv4Addr) -> u8 {
        self.sent = self.sent.wrapping_add(1);
        self.send(n, &datagram(Rig::mac(n), host(n), group, self.sent))
    }

    fn says(&mut self, n: usize, kind: u8, group: Ipv4Addr) -> u8 {
        self.send(n, &igmp(Rig::mac(n), host(n), kind, group))
    }

    /// The router queries, and hosts had time to answer.
    fn asked(mut self) -> Self {
        assert_eq!(self.says(ROUTER, 0x11, Ipv4Addr::UNSPECIFIED), 0b0111, "a query is for all");
        self.now += 12;
        self
    }

    fn dropped(&self, n: usize, reason: Reason) -> u64 {
        self.rig.ports[n].sent().dropped_for(reason)
    }
}

#[test]
fn a_group_goes_to_those_who_joined_it_and_to_routers_and_comes_to_an_end() {
    let mut net = Net::new().asked();
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER);
    assert_eq!(net.says(1, 0x16, GROUP), 1 << ROUTER, "a report is for routers only");
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010);
    assert_eq!(net.reaches(1, GROUP), 1 << ROUTER);
    assert_eq!(net.reaches(ROUTER, GROUP), 0b010);
    assert_eq!(net.says(1, 0x17, GROUP), 1 << ROUTER, "and so is a leave, though it goes to 224.0.0.2");
    net.now += 2;
    assert_eq!(net.reaches(ROUTER, GROUP), 0);
    assert_eq!(net.dropped(ROUTER, Reason::Unwanted), 1, "counted where no port has joined");
    // A silent member is forgotten, while the router keeps querying.
    net.says(2, 0x22, Ipv4Addr::new(0, 0, 0, 0));
    net.says(2, 0x16, GROUP);
    for _ in 0..2 {
        assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b100);
        net.now += 125;
        net.says(ROUTER, 0x11, Ipv4Addr::UNSPECIFIED);
    }
    net.now += 20;
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER);
}

#[test]
fn link_local_groups_and_what_is_not_ip_go_to_all() {
    let mut net = Net::new().asked();
    net.send(ROUTER, &mld(Rig::mac(ROUTER), "fe80::1".parse().unwrap(), 130, Ipv6Addr::UNSPECIFIED));
    net.now += 12;
    for group in [1, 2, 22, 251] {
        assert_eq!(net.reaches(0, Ipv4Addr::new(224, 0, 0, group)), 0b1110);
    }
    let v6 = |net: &mut Net, group: &str| {
        let group: Ipv6Addr = group.parse().unwrap();
        let f = ipv6(
            group6(group),
            Rig::mac(0),
            ["fe80::5".parse().unwrap(), group],
            17,
            &[0, 7, 0, 7, 0, 8, 0, 0],
        );
        net.send(0, &f)
    };
    assert_eq!(v6(&mut net, "ff02::1"), 0b1110);
    assert_eq!(v6(&mut net, "ff02::1:ff00:2"), 1 << ROUTER);
    let listens = mld(Rig::mac(2), "fe80::2".parse().unwrap(), 131, "ff02::1:ff00:2".parse().unwrap());
    assert_eq!(net.send(2, &listens), 1 << ROUTER);
    assert_eq!(v6(&mut net, "ff02::1:ff00:2"), 1 << ROUTER | 0b100, "a solicited node");
    for to in [Mac::BROADCAST, Mac([1, 0x80, 0xc2, 0, 0, 0x20]), Mac([1, 0, 0x0c, 0xcc, 0xcc, 0xcc])] {
        assert_eq!(net.send(0, &frame(to, Rig::mac(0), 60, 1)), 0b1110);
    }
    let llc =
        [&[1, 0, 0x0c, 0xcc, 0xcc, 0xcc][..], &Rig::mac(0).0, &[0, 46, 0xaa, 0xaa, 3], &[0; 43]].concat();
    assert_eq!(net.send(0, &llc), 0b1110);
}

#[test]
fn without_a_querier_and_until_all_have_answered_multicast_goes_to_all() {
    let mut net = Net::new();
    assert_eq!(net.reaches(0, GROUP), 0b1110);
    assert_eq!(net.says(1, 0x16, GROUP), 0b1101, "its report too");
    net.says(ROUTER, 0x11, Ipv4Addr::UNSPECIFIED);
    net.now += 10;
    assert_eq!(net.reaches(0, GROUP), 0b1110, "a host may still answer");
    net.now += 2;
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010, "what was said before counts");
    net.now += 260;
    assert_eq!(net.reaches(0, GROUP), 0b1110, "the router is gone");
}

#[test]
fn a_guest_is_no_querier() {
    // Otherwise one query with an answer time of an hour, or of zero, would cut off all hosts that don't answer it.
    let mut net = Net::new();
    assert_eq!(net.says(0, 0x11, Ipv4Addr::UNSPECIFIED), 0b1110);
    net.now += 12;
    assert_eq!(net.reaches(1, GROUP), 0b1101);
    // A port that has addresses, or is served by the switch, may not even query.
    for (guarded, no_server) in [(true, false), (false, true)] {
        let mut net = Net::with(|_| Policy {
            ips: if guarded { vec![host(0).into(), "fe80::1".parse().unwrap()] } else { vec![] },
            no_server,
            ..Policy::default()
        });
        assert_eq!(net.says(0, 0x11, Ipv4Addr::UNSPECIFIED), 0);
        let query = mld(Rig::mac(0), "fe80::1".parse().unwrap(), 130, Ipv6Addr::UNSPECIFIED);
        assert_eq!(net.send(0, &query), 0);
        assert_eq!(net.dropped(0, Reason::Server), 2);
    }
}

#[test]
fn no_host_hears_anothers_report_in_whatever_form() {
    // A host that hears a report of its group suppresses its own (RFC 2236 §3), and would be forgotten.
    let mut net = Net::new().asked();
    net.send(ROUTER, &mld(Rig::mac(ROUTER), "fe80::1".parse().unwrap(), 130, Ipv6Addr::UNSPECIFIED));
    net.now += 12;
    net.says(1, 0x16, GROUP);
    let report = igmp(Rig::mac(0), host(0), 0x16, GROUP);
    let broadcast = [&[0xff; 6][..], &report[6..]].concat();
    let for_all = [&group4(Ipv4Addr::new(224, 0, 0, 1)).0[..], &report[6..]].concat();
    let tagged = |n: usize| [&report[..12], &[0x81, 0, 0, 0].repeat(n), &report[12..]].concat();
    let mut fragment = report.clone();
    fragment[20] = 0x20;
    let mut later = report.clone();
    later[21] = 1;
    let group: Ipv6Addr = "ff15::7".parse().unwrap();
    let far = [&[58, 30][..], &[0; 246], &[131, 0, 0, 0, 0, 0, 0, 0], &group.octets()].concat();
    let far = ipv6(group6(group), Rig::mac(0), ["fe80::5".parse().unwrap(), group], 60, &far);
    for hidden in [&report, &broadcast, &for_all, &tagged(1), &tagged(2), &tagged(3), &fragment, &later, &far]
    {
        assert_eq!(net.send(0, hidden), 1 << ROUTER, "{hidden:02x?}");
    }
    // The host with a hidden report gets too much rather than too little.
    assert_eq!(net.reaches(2, Ipv4Addr::new(239, 9, 9, 9)), 1 << ROUTER | 0b001);
}

#[test]
fn what_one_guest_says_changes_nothing_for_another() {
    let mut net = Net::new().asked();
    net.says(1, 0x16, GROUP);
    // It leaves the group, and fills whatever table it can.
    for n in 0..2000u16 {
        let [high, low] = n.to_be_bytes();
        net.says(0, 0x16, Ipv4Addr::new(238, 1, high, low));
    }
    net.says(0, 0x17, GROUP);
    let mut to_include = vec![0x22, 0, 0, 0, 0, 0, 0, 1, 3, 0, 0, 0];
    to_include.extend(GROUP.octets());
    net.send(0, &ipv4(group4(Ipv4Addr::new(224, 0, 0, 22)), Rig::mac(0), [host(0), GROUP], 2, &to_include));
    assert_eq!(net.reaches(2, GROUP), 1 << ROUTER | 0b011, "the one that fills its table gets all");
    assert_eq!(net.reaches(2, Ipv4Addr::new(239, 7, 7, 7)), 1 << ROUTER | 0b001);
    assert_eq!(net.reaches(0, Ipv4Addr::new(238, 1, 0, 1)), 1 << ROUTER);
}

#[test]
fn a_port_with_several_hosts_stays_in_a_group_until_the_others_were_asked() {
    let mut net = Net::with(|i| Policy { learn: if i == 1 { 2 } else { 0 }, ..Policy::default() }).asked();
    net.says(1, 0x16, GROUP);
    net.says(1, 0x17, GROUP);
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010);
    net.now += 1;
    net.says(1, 0x16, GROUP);
    net.now += 2;
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010, "another host answered");
    net.says(1, 0x17, GROUP);
    net.now += 2;
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER);
}

#[test]
fn hosts_that_share_a_mac_lose_no_group_when_one_of_them_leaves_it() {
    // As containers behind ipvlan do: the switch can't know that there is only one host behind a MAC.
    let mut net = Net::new().asked();
    net.says(1, 0x16, GROUP);
    net.says(1, 0x17, GROUP);
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010, "the others are asked now");
    net.now += 1;
    net.says(1, 0x16, GROUP);
    net.now += 2;
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010);
}

#[test]
fn a_question_about_one_group_says_nothing_about_the_others() {
    // Only members of that group answer it, so it doesn't make the others' memberships known.
    let mut net = Net::new();
    let about = Ipv4Addr::new(239, 9, 9, 9);
    let one = [&[0x11, 10, 0, 0][..], &about.octets()].concat();
    net.send(ROUTER, &ipv4(group4(about), Rig::mac(ROUTER), [host(ROUTER), about], 2, &one));
    let about: Ipv6Addr = "ff15::9".parse().unwrap();
    let one = [&[58, 0, 5, 2, 0, 0, 1, 0, 130, 0, 0, 0, 3, 0xe8, 0, 0][..], &about.octets()].concat();
    let from = "fe80::1".parse().unwrap();
    net.send(ROUTER, &ipv6(group6(about), Rig::mac(ROUTER), [from, about], 0, &one));
    net.now += 12;
    assert_eq!(net.reaches(0, GROUP), 0b1110);
    let group: Ipv6Addr = "ff15::7".parse().unwrap();
    let data =
        ipv6(group6(group), Rig::mac(0), ["fe80::5".parse().unwrap(), group], 17, &[0, 7, 0, 7, 0, 8, 0, 0]);
    assert_eq!(net.send(0, &data), 0b1110);
}

#[test]
fn groups_and_queriers_are_those_of_their_vlan() {
    let mut net = Net::with(|i| Policy {
        vlan: match i {
            0 | 1 => Vlan::Access(5),
            2 => Vlan::Trunk { vlans: vec![5, 6], native: None },
            _ => Vlan::Trunk { vlans: vec![6], native: Some(5) },
        },
        ..Policy::default()
    });
    let on = |vid: u8, f: &[u8]| [&f[..12], &[0x81, 0, 0, vid], &f[12..]].concat();
    let to_trunk = |net: &mut Net, n: usize, f: &[u8]| {
        assert!(net.rig.nics[n].send(f));
        net.rig.pass_at(n, net.now * SECOND);
        (0..4).filter(|i| std::iter::from_fn(|| net.rig.nics[*i].receive()).count() > 0).collect::<Vec<_>>()
    };
    // The router asks on VLAN 5 only.
    to_trunk(&mut net, ROUTER, &igmp(Rig::mac(ROUTER), host(ROUTER), 0x11, Ipv4Addr::UNSPECIFIED));
    net.now += 12;
    let data = |n: usize| datagram(Rig::mac(n), host(n), GROUP, 1);
    assert_eq!(to_trunk(&mut net, 0, &data(0)), [ROUTER]);
    assert_eq!(to_trunk(&mut net, 2, &on(6, &data(2))), [ROUTER], "the other port of VLAN 6");
    assert_eq!(to_trunk(&mut net, ROUTER, &on(6, &data(ROUTER))), [2], "no querier there");
    // A trunk that joins on VLAN 6 has not joined on VLAN 5.
    to_trunk(&mut net, 2, &on(6, &igmp(Rig::mac(2), host(2), 0x16, GROUP)));
    assert_eq!(to_trunk(&mut net, 0, &data(0)), [ROUTER]);
    to_trunk(&mut net, 2, &on(5, &igmp(Rig::mac(2), host(2), 0x16, GROUP)));
    assert_eq!(to_trunk(&mut net, 0, &data(0)), [2, ROUTER]);
}

#[test]
fn transparent_ports_keep_their_own_vlans_to_themselves() {
    let mut net = Net::new().asked();
    let tagged = |f: Vec<u8>| [&f[..12], &[0x81, 0, 0, 5], &f[12..]].concat();
    assert_eq!(net.send(0, &tagged(datagram(Rig::mac(0), host(0), GROUP, 1))), 0b1110, "no querier there");
    net.send(1, &tagged(igmp(Rig::mac(1), host(1), 0x16, GROUP)));
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER, "a report on another VLAN");
}

#[test]
fn a_long_report_is_read_to_its_end() {
    let mut net = Net::new().asked();
    let mut message = vec![0x22, 0, 0, 0, 0, 0, 0, 40];
    for n in 0..40 {
        message.extend([4, 0, 0, 0, 239, 2, 2, n]);
    }
    let f = ipv4(
        group4(Ipv4Addr::new(224, 0, 0, 22)),
        Rig::mac(1),
        [host(1), Ipv4Addr::new(224, 0, 0, 22)],
        2,
        &message,
    );
    assert!(f.len() > 300);
    assert!(net.rig.nics[1].send_cut(&Default::default(), &f, &[20, 100, 250]));
    net.rig.pass_at(1, net.now * SECOND);
    assert!(net.rig.nics[ROUTER].receive().is_some());
    assert_eq!(net.reaches(0, Ipv4Addr::new(239, 2, 2, 39)), 1 << ROUTER | 0b010);
    assert_eq!(net.reaches(0, Ipv4Addr::new(239, 2, 2, 40)), 1 << ROUTER);
}

/// Adds the switch's own querier to the network, as its port 4.
fn with_querier(net: &mut Net) -> Announcer {
    let service = Service::new(Arc::new(Querier)).unwrap();
    let announcer = service.announcer();
    let policy = Policy { macs: vec![querier::MAC], uplink: true, ..Policy::default() };
    let uplink = Some(Arc::new(Uplink::new(Box::new(service))));
    let mut ports = net.rig.view.ports().to_vec();
    ports.push(Attached { uplink, ..Attached::guest(Arc::new(Port::new("querier", 1)), policy) });
    net.rig.view = View::new(ports).unwrap().snooping(Some(Arc::default()));
    announcer
}

/// The querier sends what waits; returns the bytes from the EtherType on that each guest gets.
fn asked_by_the_switch(net: &mut Net) -> Vec<Vec<[u8; 4]>> {
    net.rig.pass_at(4, net.now * SECOND);
    let kind = |f: &[u8]| *f[12..].first_chunk().unwrap();
    net.rig
        .nics
        .iter_mut()
        .map(|nic| std::iter::from_fn(|| nic.receive()).map(|r| kind(&r.1)).collect())
        .collect()
}

#[test]
fn where_there_is_no_router_the_switch_itself_asks() {
    let mut net = Net::new();
    let announcer = with_querier(&mut net);
    announcer.announce(&net.rig.view.vlans());
    let questions = vec![[0x08, 0, 0x46, 0xc0], [0x86, 0xdd, 0x60, 0]];
    assert_eq!(asked_by_the_switch(&mut net), vec![questions; 4], "one of each version of IP");
    net.now += 12;
    assert_eq!(net.says(1, 0x16, GROUP), 1 << ROUTER);
    assert_eq!(net.reaches(0, GROUP), 1 << ROUTER | 0b010);
    assert_eq!(net.reaches(0, Ipv4Addr::new(239, 9, 9, 9)), 1 << ROUTER);
}

#[test]
fn the_switch_asks_on_every_vlan_of_its_ports_and_loses_no_group_there() {
    let mut net = Net::with(|i| Policy {
        vlan: match i {
            0 | 1 => Vlan::Access(5),
            2 => Vlan::Trunk { vlans: vec![5, 6], native: Some(7) },
            _ => Vlan::Access(6),
        },
        router: false,
        ..Policy::default()
    });
    let announcer = with_querier(&mut net);
    announcer.announce(&net.rig.view.vlans());
    let (v4, v6) = ([0x08, 0, 0x46, 0xc0], [0x86, 0xdd, 0x60, 0]);
    let trunk = [[0x81, 0, 0, 5], [0x81, 0, 0, 5], [0x81, 0, 0, 6], [0x81, 0, 0, 6], v4, v6];
    let asked = asked_by_the_switch(&mut net);
    assert_eq!(asked, [vec![v4, v6], vec![v4, v6], trunk.to_vec(), vec![v4, v6]]);
    net.now += 12;
    let on = |vid: u8, f: &[u8]| [&f[..12], &[0x81, 0, 0, vid], &f[12..]].concat();
    let join = igmp(Rig::mac(2), host(2), 0x16, GROUP);
    let data = datagram(Rig::mac(0), host(0), GROUP, 1);
    let none: [usize; 0] = [];
    let receivers = |net: &mut Net, n: usize, f: &[u8]| {
        assert!(net.rig.nics[n].send(f));
        net.rig.pass_at(n, net.now * SECOND);
        (0..4).filter(|i| std::iter::from_fn(|| net.rig.nics[*i].receive()).count() > 0).collect::<Vec<_>>()
    };
    assert_eq!(receivers(&mut net, 0, &data), none, "no port has joined it on VLAN 5");
    receivers(&mut net, 2, &on(6, &join));
    assert_eq!(receivers(&mut net, 0, &data), none);
    receivers(&mut net, 2, &on(5, &join));
    assert_eq!(receivers(&mut net, 0, &data), [2]);
    // One that leaves is followed by a question, on its VLAN only.
    receivers(&mut net, 2, &on(5, &igmp(Rig::mac(2), host(2), 0x17, GROUP)));
    let tag = [0x81, 0, 0, 5];
    assert_eq!(asked_by_the_switch(&mut net), [vec![v4], vec![v4], vec![tag], vec![]]);
    net.now += 1;
    assert_eq!(receivers(&mut net, 0, &data), [2], "another host there may answer yet");
    net.now += 1;
    assert_eq!(receivers(&mut net, 0, &data), none);
}

#[test]
fn a_guest_that_leaves_without_end_keeps_no_other_from_a_question() {
    let mut net = Net::new();
    with_querier(&mut net);
    for n in 0..20 {
        net.says(0, 0x17, Ipv4Addr::new(239, 3, 3, n));
    }
    net.says(1, 0x17, GROUP);
    assert_eq!(asked_by_the_switch(&mut net)[2].len(), 5, "four for the one, one for the other");
    assert_eq!(net.rig.view.ports()[4].port.received().dropped_for(Reason::Uplink), 16);
}

#[test]
fn a_transparent_guests_own_tag_takes_no_question_of_the_switch_into_a_vlan() {
    let mut net = Net::with(|i| Policy {
        vlan: if i == 2 { Vlan::Access(5) } else { Vlan::Transparent },
        router: false,
        ..Policy::default()
    });
    with_querier(&mut net);
    let leave = igmp(Rig::mac(0), host(0), 0x17, GROUP);
    let to_querier = [&querier::MAC.0[..], &leave[6..]].concat();
    for (plain, f) in [(false, &leave), (false, &to_querier), (true, &leave), (true, &to_querier)] {
        let tag: &[u8] = if plain { &[] } else { &[0x81, 0, 0, 5] };
        assert!(net.rig.nics[0].send(&[&f[..12], tag, &f[12..]].concat()));
        net.rig.pass_at(0, net.now * SECOND);
        net.rig.nics.iter_mut().for_each(|nic| while nic.receive().is_some() {});
        let v4 = [0x08, 0, 0x46, 0xc0];
        let there = if plain { vec![v4] } else { vec![] };
        assert_eq!(asked_by_the_switch(&mut net), [there.clone(), there.clone(), vec![], there]);
    }
    assert_eq!(net.dropped(0, Reason::Vlan), 1, "the one for the querier alone");
}
