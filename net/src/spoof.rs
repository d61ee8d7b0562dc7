// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who does a frame say that it is from? Anti-spoofing of MAC, IPv4, IPv6, ARP and neighbour discovery (RFC 826,
//! RFC 4861). Looks only at the bytes that were copied beforehand.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::counters::Reason;
use crate::frame::Mac;
use crate::policy::Policy;

/// Bytes at the front of a frame that are enough to decide: Ethernet, a tag, IPv6, a neighbour advertisement and its
/// first option.
pub const DEEP: usize = 128;

fn get<const N: usize>(b: &[u8], at: usize) -> Option<[u8; N]> {
    b.get(at..at + N)?.try_into().ok()
}

/// Checks the first bytes of a frame (up to [`DEEP`]) against what the port owns.
///
/// # Errors
/// The reason for dropping it.
pub fn check(policy: &Policy, head: &[u8]) -> Result<(), Reason> {
    if policy.check_mac {
        let source = Mac(get(head, 6).ok_or(Reason::Short)?);
        if !policy.macs.contains(&source) {
            return Err(Reason::SpoofMac);
        }
    }
    if policy.ips.is_empty() { Ok(()) } else { check_ip(policy, head) }
}

fn check_ip(policy: &Policy, head: &[u8]) -> Result<(), Reason> {
    let word = |at: usize| get(head, at).map(u16::from_be_bytes).ok_or(Reason::SpoofIp);
    let mut at = 12;
    let mut ethertype = word(at)?;
    // A guest can't hide behind tags: two are looked through, more are refused.
    for _ in 0..2 {
        if !matches!(ethertype, 0x8100 | 0x88a8) {
            break;
        }
        at += 4;
        ethertype = word(at)?;
    }
    let body = &head[(at + 2).min(head.len())..];
    let owns = |ip: IpAddr| policy.ips.contains(&ip);
    let own4 = |at: usize| get(body, at).is_some_and(|b: [u8; 4]| owns(Ipv4Addr::from(b).into()));
    let own6 = |at: usize| get(body, at).is_some_and(|b: [u8; 16]| owns(Ipv6Addr::from(b).into()));
    let zero = |at: usize, len: usize| body.get(at..at + len).is_some_and(|b| b.iter().all(|x| *x == 0));
    let fine = match ethertype {
        0x0800 => own4(12) || is_dhcp_request(body),
        0x86dd => {
            let link_local = own6(8) || body.get(8..10).is_some_and(|b| b[0] == 0xfe && b[1] & 0xc0 == 0x80);
            let unspecified = zero(8, 16) && body.get(6) == Some(&58);
            (link_local || unspecified) && neighbour_is_own(policy, body)
        }
        0x0806 => {
            // Sender hardware address at 8, protocol address at 14; 0.0.0.0 is a probe.
            let mac = get(body, 8).is_some_and(|m| !policy.check_mac || policy.macs.contains(&Mac(m)));
            mac && (own4(14) || zero(14, 4))
        }
        // Nothing that claims an IP address, except what is tagged too deep to be seen.
        0x8100 | 0x88a8 => false,
        _ => true,
    };
    if fine { Ok(()) } else { Err(Reason::SpoofIp) }
}

/// From 0.0.0.0, UDP, to port 67: somebody who has no address yet.
fn is_dhcp_request(ip: &[u8]) -> bool {
    let header = usize::from(ip.first().copied().unwrap_or(0) & 0xf) * 4;
    ip.get(12..16) == Some(&[0; 4])
        && ip.get(9) == Some(&17)
        && get(ip, header + 2).map(u16::from_be_bytes) == Some(67)
}

/// A neighbour advertisement tells only of the port's own addresses, and only of its MAC; router advertisements and
/// redirects are for routers.
fn neighbour_is_own(policy: &Policy, ip: &[u8]) -> bool {
    if ip.get(6) != Some(&58) {
        // What hides behind extension headers isn't neighbour discovery: RFC 6980 forbids the fragments, hop-by-hop
        // headers come with MLD only.
        return true;
    }
    match ip.get(40) {
        Some(136) => {
            let Some(target) = get::<16>(ip, 48) else { return false };
            let target = Ipv6Addr::from(target);
            let own = policy.ips.contains(&target.into()) || target.segments()[0] & 0xffc0 == 0xfe80;
            let mac = match (ip.get(64), get(ip, 66)) {
                (Some(2), Some(mac)) => !policy.check_mac || policy.macs.contains(&Mac(mac)),
                _ => true,
            };
            own && mac
        }
        Some(134 | 137) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn policy() -> Policy {
        Policy {
            macs: vec![OWN],
            check_mac: true,
            ips: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            ..Policy::default()
        }
    }

    fn frame(from: Mac, tags: usize, ethertype: u16, body: &[u8]) -> Vec<u8> {
        let mut f = vec![0xff; 6];
        f.extend(from.0);
        for _ in 0..tags {
            f.extend([0x81, 0, 0, 5]);
        }
        f.extend(ethertype.to_be_bytes());
        f.extend(body);
        f
    }

    fn ipv4(source: [u8; 4], protocol: u8, port: u16) -> Vec<u8> {
        let mut b = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0];
        b.extend(source);
        b.extend([255; 4]);
        b.extend([0, 68]);
        b.extend(port.to_be_bytes());
        b
    }

    fn ipv6(source: &str, next: u8, rest: &[u8]) -> Vec<u8> {
        let mut b = vec![0x60, 0, 0, 0, 0, 0, next, 255];
        b.extend(source.parse::<Ipv6Addr>().unwrap().octets());
        b.extend([0xff; 16]);
        b.extend(rest);
        b
    }

    fn advertisement(target: &str, mac: Mac) -> Vec<u8> {
        let mut b = vec![136, 0, 0, 0, 0, 0, 0, 0];
        b.extend(target.parse::<Ipv6Addr>().unwrap().octets());
        b.extend([2, 1]);
        b.extend(mac.0);
        b
    }

    fn arp(mac: Mac, ip: [u8; 4]) -> Vec<u8> {
        let mut b = vec![0, 1, 8, 0, 6, 4, 0, 1];
        b.extend(mac.0);
        b.extend(ip);
        b.extend([0; 10]);
        b
    }

    #[test]
    fn a_port_speaks_for_itself_only() {
        let p = policy();
        let tags_allowed = [0, 1, 2];
        for tags in tags_allowed {
            let ok = |ethertype, body: Vec<u8>| check(&p, &frame(OWN, tags, ethertype, &body)).is_ok();
            assert!(ok(0x0800, ipv4([10, 0, 0, 1], 6, 80)));
            assert!(!ok(0x0800, ipv4([10, 0, 0, 2], 6, 80)));
            assert!(ok(0x0800, ipv4([0; 4], 17, 67)), "DHCP");
            assert!(!ok(0x0800, ipv4([0; 4], 17, 53)));
            assert!(ok(0x0806, arp(OWN, [10, 0, 0, 1])));
            assert!(ok(0x0806, arp(OWN, [0; 4])), "ARP probe");
            assert!(!ok(0x0806, arp(OWN, [10, 0, 0, 254])));
            assert!(!ok(0x0806, arp(OTHER, [10, 0, 0, 1])));
            assert!(ok(0x86dd, ipv6("fd00::1", 6, &[])));
            assert!(!ok(0x86dd, ipv6("fd00::2", 6, &[])));
            assert!(ok(0x86dd, ipv6("fe80::1", 58, &advertisement("fd00::1", OWN))));
            assert!(!ok(0x86dd, ipv6("fe80::1", 58, &advertisement("fd00::fe", OWN))));
            assert!(!ok(0x86dd, ipv6("fd00::1", 58, &advertisement("fd00::1", OTHER))));
            assert!(!ok(0x86dd, ipv6("fe80::1", 58, &[134, 0, 0, 0])), "router advertisement");
            assert!(ok(0x88b5, vec![1, 2, 3]));
            assert!(!ok(0x0800, vec![]), "cut short");
        }
        assert_eq!(check(&p, &frame(OTHER, 0, 0x88b5, &[])), Err(Reason::SpoofMac));
        assert_eq!(check(&p, &frame(OWN, 3, 0x0800, &ipv4([10, 0, 0, 1], 6, 1))), Err(Reason::SpoofIp));
    }

    #[test]
    fn several_macs_may_be_owned() {
        let p = Policy { macs: vec![OWN, OTHER], check_mac: true, ..Policy::default() };
        assert!(check(&p, &frame(OTHER, 0, 0x88b5, &[])).is_ok());
        assert!(check(&p, &frame(Mac([2, 0, 0, 0, 0, 3]), 0, 0x88b5, &[])).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_without_a_panic(head in prop::collection::vec(any::<u8>(), 0..130)) {
            let _ = check(&policy(), &head);
        }
    }
}
