// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Any bytes as a frame: what checks, cuts and sums them neither panics nor writes where it shouldn't.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tombolo_net::frame::{GSO_NONE, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::policy::{Policy, Vlan};
use tombolo_net::{lane, offload, spoof};

fuzz_target!(|input: ([u8; 12], bool, Vec<u8>)| {
    let (header, trunk, mut frame) = input;
    let header = NetHeader::parse(&header);
    let policy = Policy {
        macs: vec![Mac([2, 0, 0, 0, 0, 1])],
        check_mac: trunk,
        ips: vec!["10.0.0.1".parse().expect("an address"), "fd00::1".parse().expect("an address")],
        vlan: if trunk { Vlan::Trunk { vlans: vec![5], native: Some(7) } } else { Vlan::Access(5) },
        ..Policy::default()
    };
    let head = &frame[..frame.len().min(spoof::DEEP)];
    let _verdict = spoof::check(&policy, head);
    if let Some(lane) = lane::enter(&policy, head) {
        let _edit = lane::leave(&policy, lane);
    }
    if frame.len() < 14 || !offload::is_valid(&header, frame.len() as u32) {
        return;
    }
    if header.gso_type != GSO_NONE {
        let mut out = vec![0; 65_600];
        if let Some(n) = offload::segments(&frame, &header) {
            for i in 0..n {
                let len = offload::segment(&frame, &header, i, &mut out).expect("as many as were said");
                assert!(len <= frame.len());
            }
            assert_eq!(offload::segment(&frame, &header, n, &mut out), None);
        }
    }
    if header.flags & NEEDS_CSUM != 0 {
        offload::checksum(&mut frame, &header);
    }
});
