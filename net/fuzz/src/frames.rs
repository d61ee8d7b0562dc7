// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Any bytes as a frame: the code that parses, checks, segments and sums it neither panics nor contradicts itself.

use std::sync::OnceLock;

use tombolo_net::frames::frame::{GSO_NONE, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::frames::headers::{Headers, LOOK, Part};
use tombolo_net::frames::{offload, vlan};
use tombolo_net::policy::port::{Policy, Vlan};
use tombolo_net::policy::rules::{self, Rule, Way};
use tombolo_net::policy::spoof;

/// No UDP, and ports to be compared.
fn rules() -> &'static [Rule] {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    let all = || {
        ["out", "in"].map(|way| {
            ["\"destination-port\": 7, \"source\": \"10.0.0.0/24\"", "\"protocol\": \"udp\""]
                .map(|fields| format!("{{\"action\": \"drop\", \"direction\": \"{way}\", {fields}}}"))
        })
    };
    RULES.get_or_init(|| all().iter().flatten().map(|t| serde_json::from_str(t).expect("a rule")).collect())
}

/// One input: a virtio-net header, a byte that chooses the policy, and the frame.
pub fn one(data: &[u8]) {
    let Some((header, rest)) = data.split_first_chunk() else { return };
    let Some((choice, frame)) = rest.split_first() else { return };
    let (trunk, more, mut frame) = (choice & 1 != 0, choice >> 1, frame.to_vec());
    let header = NetHeader::parse(header);
    let policy = Policy {
        macs: vec![Mac([2, 0, 0, 0, 0, 1])],
        check_mac: trunk,
        ips: vec!["10.0.0.1".parse().expect("an address"), "fd00::1".parse().expect("an address")],
        vlan: if trunk { Vlan::Trunk { vlans: vec![5], native: Some(7) } } else { Vlan::Access(5) },
        ..Policy::default()
    };
    let head = &frame[..frame.len().min(LOOK)];
    // A longer frame with the same first bytes has the same description.
    let long = Headers::parse(head, frame.len() as u32 + u32::from(more));
    if long.is_ip() {
        assert!(u32::from(long.l4) <= long.end && long.end <= frame.len() as u32 + u32::from(more));
    }
    let headers = Headers::parse(head, frame.len() as u32);
    let allowed = spoof::check(&policy, &headers, head).is_ok();
    for direction in [Way::In, Way::Out] {
        let passes = rules::decide(rules(), direction, &headers, head).passes();
        assert!(!passes || headers.protocol != 17 || !headers.is_ip());
    }
    if headers.is_ip() {
        assert!(u32::from(headers.l4) <= headers.end && headers.end <= frame.len() as u32);
        // Bytes behind the packet's end change nothing.
        let end = headers.end as usize;
        let same = Headers::parse(&frame[..end.min(LOOK)], headers.end);
        assert_eq!(same, headers);
        assert_eq!(spoof::check(&policy, &same, &frame[..end.min(LOOK)]).is_ok(), allowed);
    }
    if let Some(tag) = vlan::enter(&policy, &headers) {
        assert!(headers.tags <= 1);
        let _edit = vlan::leave(&policy, tag);
    }
    let Some((header, layers)) = offload::wanted(&header, &headers, head, frame.len() as u32) else { return };
    if header.gso_type != GSO_NONE {
        let mut out = vec![0; 65_600];
        let n = offload::segments(&frame, &header, &layers);
        for i in 0..n {
            let len = offload::segment(&frame, &header, &layers, i, &mut out).expect("as many as were said");
            assert!(len <= frame.len());
        }
        assert_eq!(offload::segment(&frame, &header, &layers, n, &mut out), None);
    } else if header.flags & NEEDS_CSUM != 0 {
        assert!(headers.part == Part::Whole);
        let before = frame.clone();
        offload::checksum(&mut frame, &layers);
        let at = usize::from(header.csum_start + header.csum_offset);
        assert_eq!((&before[..at], &before[at + 2..]), (&frame[..at], &frame[at + 2..]));
        assert_eq!(Headers::parse(&frame[..frame.len().min(LOOK)], frame.len() as u32), headers);
    }
}
