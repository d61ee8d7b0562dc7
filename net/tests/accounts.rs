// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counters: each frame is in one of them, with uplinks, mirrors, learned addresses and ports that go while a frame waits.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::offloads::{offloading, tcp};
use common::wire::with_uplink;
use common::{Rig, frame};
use proptest::prelude::*;
use tombolo_net::control::metrics::status;
use tombolo_net::forwarding::forward::{Forwarder, Pass};
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::{Mac, NetHeader};
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::ports::port::Port;
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net_driver::{Nic, NicConfig};

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
fn a_frame_leaves_once_by_the_uplink_that_mirrors_its_port_and_none_of_the_uplinks_own_goes_back() {
    let outside = Mac([2, 9, 9, 9, 9, 9]);
    let mut rig = Rig::with_policies(&[NicConfig::default(); 2], |i| Policy {
        mirror: (i == 0).then(|| "up".to_owned()),
        ..Policy::default()
    });
    let wire = with_uplink(&mut rig);
    let outward = || wire.outward.lock().unwrap().drain(..).count();
    for to in [outside, Mac::BROADCAST, Rig::mac(1)] {
        assert!(rig.nics[0].send(&frame(to, Rig::mac(0), 60, 1)));
        rig.pass(0);
        assert_eq!(outward(), 1, "to {to}");
    }
    assert!(rig.nics[1].send(&frame(Rig::mac(0), Rig::mac(1), 60, 1)));
    rig.pass(1);
    assert_eq!(outward(), 1, "received from a guest");
    wire.inward.lock().unwrap().push_back(frame(Rig::mac(0), outside, 60, 1));
    rig.pass(2);
    assert!(rig.nics[0].receive().is_some());
    assert_eq!(outward(), 0, "received from the uplink");
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
    let without = |rig: &Rig, gone: &str| {
        View::new(rig.view.ports().iter().filter(|a| a.port.name() != gone).cloned().collect()).unwrap()
    };
    rig.view = without(&rig, "vm1");
    rig.pass(0);
    for n in 1..5 {
        assert_eq!(rig.nics[n].receive().map(|f| f.1).as_ref(), Some(&sent), "vm{n}");
        assert_eq!(rig.nics[n].receive(), None, "vm{n}");
    }
    // Now the port that it waits for is removed, too.
    assert!(rig.nics[0].send(&sent));
    let other_worker = busy.rx(0).lock();
    assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 2), Pass::Held(0));
    drop(other_worker);
    rig.view = without(&rig, "vm2");
    rig.view = without(&rig, "vm3");
    rig.pass(0);
    for (n, count) in [(2, 1), (3, 0), (4, 1)] {
        assert_eq!(std::iter::from_fn(|| rig.nics[n].receive()).count(), count, "vm{n}");
    }
}

#[test]
fn a_port_that_gets_the_address_of_one_that_has_had_some_segments_gets_all_of_them() {
    const SEGMENTS: usize = 30;
    let mut rig =
        Rig::new(&[offloading(), NicConfig { size: 16, ..NicConfig::default() }, NicConfig::default()]);
    let (header, mut sent) = tcp(SEGMENTS * 1000, 1000, 0);
    sent[..6].copy_from_slice(&Rig::mac(1).0);
    sent[6..12].copy_from_slice(&Rig::mac(0).0);
    assert!(rig.nics[0].send_cut(&header, &sent, &[]));
    assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 1), Pass::Held(0));
    assert_eq!(rig.ports[1].received().packets, 16);
    let mut ports = rig.view.ports().to_vec();
    let policy = ports.remove(1).policy;
    ports[1].policy = policy;
    rig.view = View::new(ports).unwrap();
    rig.pass(0);
    assert_eq!(rig.ports[2].received().packets, SEGMENTS as u64);
    let (sent, ended) = ledger(&rig);
    assert_eq!(sent, ended);
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
