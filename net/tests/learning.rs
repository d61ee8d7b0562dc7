// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports that learn the addresses of nested VMs, and uplinks behind which the same addresses are.

mod common;

use common::wire::with_uplink;
use common::{Rig, frame};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::ports::counters::Reason;
use tombolo_net_driver::NicConfig;

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

/// The same frame with a tag of this VLAN.
fn tagged(vid: u16, f: &[u8]) -> Vec<u8> {
    [&f[..12], &[0x81, 0], &vid.to_be_bytes(), &f[12..]].concat()
}

#[test]
fn an_address_learned_on_a_vlan_steers_no_frame_of_another() {
    let nested = Mac([0x52, 0x99, 0, 0, 0, 1]);
    let vlans = [10, 10, 20, 20];
    let mut rig = Rig::with_policies(&[NicConfig::default(); 4], |i| Policy {
        check_mac: true,
        learn: if i == 3 { 0 } else { 2 },
        vlan: Vlan::Access(vlans[i]),
        ..Policy::default()
    });
    let wire = with_uplink(&mut rig);
    let send = |rig: &mut Rig, n: usize, to: Mac, from: Mac| {
        assert!(rig.nics[n].send(&frame(to, from, 60, 1)));
        rig.pass_at(n, 2);
    };
    let outward = || std::mem::take(&mut *wire.outward.lock().unwrap());
    let reached = |rig: &mut Rig| (0..4).filter(|n| rig.nics[*n].receive().is_some()).collect::<Vec<_>>();
    send(&mut rig, 0, Rig::mac(1), nested);
    assert_eq!(reached(&mut rig), [1]);
    send(&mut rig, 1, nested, Rig::mac(1));
    assert_eq!(reached(&mut rig), [0]);
    send(&mut rig, 3, nested, Rig::mac(3));
    assert_eq!(
        (reached(&mut rig), outward()),
        (vec![], vec![tagged(20, &frame(nested, Rig::mac(3), 60, 1))])
    );
    // Another machine has it on the other VLAN: a station outside takes it from neither, and another port may learn it there.
    wire.inward.lock().unwrap().push_back(tagged(20, &frame(Rig::mac(3), Mac([2, 9, 9, 9, 9, 9]), 60, 1)));
    send(&mut rig, 2, Rig::mac(3), nested);
    assert_eq!(reached(&mut rig), [3]);
    for (n, owner) in [(1, 0), (3, 2)] {
        send(&mut rig, n, nested, Rig::mac(n));
        assert_eq!(reached(&mut rig), [owner]);
    }
}

#[test]
fn a_station_outside_takes_an_address_back_on_its_own_vlan() {
    let nested = Mac([0x52, 0x99, 0, 0, 0, 1]);
    let rig = |vlan: Vlan| {
        Rig::with_policies(&[NicConfig::default(); 2], |i| Policy {
            check_mac: true,
            learn: [2, 0][i],
            vlan: vlan.clone(),
            ..Policy::default()
        })
    };
    for (vlan, heard, keeps) in [
        (Vlan::Access(10), 20, true),
        (Vlan::Access(10), 10, false),
        (Vlan::Transparent, 20, true),
        // A tag that only has a priority.
        (Vlan::Transparent, 0, false),
    ] {
        let mut rig = rig(vlan.clone());
        let wire = with_uplink(&mut rig);
        let arrives = |rig: &mut Rig| {
            assert!(rig.nics[1].send(&frame(nested, Rig::mac(1), 60, 1)));
            rig.pass_at(1, 3);
            rig.nics[0].receive().is_some()
        };
        assert!(rig.nics[0].send(&frame(Rig::mac(1), nested, 60, 1)));
        rig.pass_at(0, 1);
        assert!(arrives(&mut rig));
        wire.inward.lock().unwrap().push_back(tagged(heard, &frame(Rig::mac(1), nested, 60, 2)));
        rig.pass_at(2, 2);
        assert_eq!(arrives(&mut rig), keeps, "{vlan:?}, heard on {heard}");
    }
}

#[test]
fn an_address_that_a_transparent_port_uses_with_one_tag_is_free_with_another_and_on_vlans() {
    let nested = Mac([0x52, 0x99, 0, 0, 0, 1]);
    let mut rig = Rig::with_policies(&[NicConfig::default(); 5], |i| Policy {
        check_mac: true,
        learn: [2, 2, 0, 2, 0][i],
        vlan: if i < 3 { Vlan::Transparent } else { Vlan::Access(10) },
        ..Policy::default()
    });
    let wire = with_uplink(&mut rig);
    let receivers = |rig: &mut Rig, n: usize, sent: Vec<u8>| {
        assert!(rig.nics[n].send(&sent));
        rig.pass_at(n, 1);
        let guests = (0..5).filter(|n| rig.nics[*n].receive().is_some()).collect::<Vec<_>>();
        (guests, std::mem::take(&mut *wire.outward.lock().unwrap()).len())
    };
    let (from, to) = (|to| frame(to, nested, 60, 1), |from| frame(nested, from, 60, 1));
    // Nested VMs of three guests have it: with tag 10, with tag 20, and on VLAN 10 of the switch.
    assert_eq!(receivers(&mut rig, 0, tagged(10, &from(Rig::mac(2)))), (vec![2], 0));
    assert_eq!(receivers(&mut rig, 1, tagged(20, &from(Rig::mac(2)))), (vec![2], 0));
    assert_eq!(receivers(&mut rig, 3, from(Rig::mac(4))), (vec![4], 0));
    let reached = |rig: &mut Rig| {
        let from_open = |vid| tagged(vid, &to(Rig::mac(2)));
        let open = [10, 20, 30].map(|vid| receivers(rig, 2, from_open(vid)));
        (open, receivers(rig, 2, to(Rig::mac(2))), receivers(rig, 4, to(Rig::mac(4))))
    };
    let (out, at) = (|| (vec![], 1), |n| (vec![n], 0));
    assert_eq!(reached(&mut rig), ([at(0), at(1), out()], out(), at(3)));
    // A machine outside takes back what it uses itself.
    wire.inward.lock().unwrap().push_back(tagged(20, &from(Rig::mac(2))));
    rig.pass_at(5, 2);
    assert!(rig.nics[2].receive().is_some());
    assert_eq!(reached(&mut rig), ([at(0), out(), out()], out(), at(3)));
}
