// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drops frames with a forged sender: anti-spoofing of MAC, IPv4, IPv6, ARP and neighbour discovery (RFC 826, RFC 4861, RFC
//! 6980), by the frame's description and the copy of its first bytes.
//!
//! A port that has IP addresses is *guarded*: it may claim only its own addresses and sends no unparsable frames. Unless its
//! policy makes it a router, it sends neither router advertisements, redirects and multicast queries nor a DHCP server's
//! answers. If the switch serves addresses ([`Policy::no_server`]), that also holds for ports without addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::frames::frame::Mac;
use crate::frames::headers::{Headers, Net, Part, get, protocol, source};
use crate::frames::membership::{igmp, mld};
use crate::policy::port::Policy;
use crate::ports::counters::Reason;

/// Types of ICMPv6 messages.
pub(crate) mod icmp {
    pub const ROUTER_SOLICITATION: u8 = 133;
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    pub const REDIRECT: u8 = 137;
}
/// Types of ICMP messages (RFC 792, RFC 1256).
mod icmp4 {
    pub const REDIRECT: u8 = 5;
    pub const ROUTER_ADVERTISEMENT: u8 = 9;
}
/// The ports that DHCP clients listen on (RFC 2131, RFC 8415). Clients accept messages from any port.
mod dhcp_client {
    pub const V4: u16 = 68;
    pub const V6: u16 = 546;
}
/// Options of neighbour discovery: source and target link-layer address.
const LINK_ADDRESS: [u8; 2] = [1, 2];

/// Checks that the frame's source is one of the port's MACs, if the policy wants that. A port that learns addresses may use
/// another one once [`crate::forwarding::learn`] has taken it.
///
/// # Errors
/// The reason for dropping it.
#[inline(always)]
pub fn check_mac(policy: &Policy, head: &[u8]) -> Result<(), Reason> {
    if policy.check_mac && policy.learn == 0 && !policy.macs.contains(&source(head).ok_or(Reason::Short)?) {
        return Err(Reason::SpoofMac);
    }
    Ok(())
}

/// Checks a frame with these `headers` that starts with `head` against the port's addresses.
///
/// # Errors
/// The reason for dropping it.
pub fn check(policy: &Policy, headers: &Headers, head: &[u8]) -> Result<(), Reason> {
    check_mac(policy, head)?;
    let guarded = !policy.ips.is_empty();
    if !guarded && !policy.no_server {
        return Ok(());
    }
    if headers.lacks_ports(head) || headers.net == Net::Unknown {
        return Err(Reason::Unparsable);
    }
    if !policy.router {
        check_server(headers, head)?;
    }
    if guarded { check_addresses(policy, headers, head) } else { Ok(()) }
}

/// Refuses messages of routers, multicast queriers and DHCP servers, also behind extension headers.
fn check_server(headers: &Headers, head: &[u8]) -> Result<(), Reason> {
    let client = match headers.net {
        Net::Ipv4 => dhcp_client::V4,
        Net::Ipv6 => dhcp_client::V6,
        _ => return Ok(()),
    };
    if udp_destination(headers, head) == Some(client) {
        return Err(Reason::Server);
    }
    let router: &[u8] = match (headers.net, headers.protocol) {
        (Net::Ipv4, protocol::ICMP) => &[icmp4::REDIRECT, icmp4::ROUTER_ADVERTISEMENT],
        (Net::Ipv4, protocol::IGMP) => &[igmp::QUERY, igmp::ROUTER_ADVERTISEMENT],
        (Net::Ipv6, protocol::ICMPV6) => {
            &[icmp::ROUTER_ADVERTISEMENT, icmp::REDIRECT, mld::QUERY, mld::ROUTER_ADVERTISEMENT]
        }
        _ => return Ok(()),
    };
    if headers.part == Part::Later {
        return Ok(());
    }
    let l4 = usize::from(headers.l4);
    match head.get(l4).filter(|_| l4 < headers.end as usize) {
        None => Err(Reason::Unparsable),
        Some(kind) if router.contains(kind) => Err(Reason::Server),
        Some(_) => Ok(()),
    }
}

/// Checks that a frame of a guarded port claims only the port's addresses.
fn check_addresses(policy: &Policy, headers: &Headers, head: &[u8]) -> Result<(), Reason> {
    let body = usize::from(headers.at);
    let v4 = |at: usize| get(head, body + at).map_or(Ipv4Addr::BROADCAST, Ipv4Addr::from);
    let owns = |ip: Ipv4Addr| policy.ips.contains(&IpAddr::V4(ip));
    match headers.net {
        Net::Unknown => Err(Reason::Unparsable),
        Net::Other(_) => Ok(()),
        Net::Ipv4 => {
            // From 0.0.0.0 to port 67: a DHCP client without an address.
            let asks = v4(12).is_unspecified() && udp_destination(headers, head) == Some(67);
            if owns(v4(12)) || asks { Ok(()) } else { Err(Reason::SpoofIp) }
        }
        Net::Arp => {
            // Sender hardware address at 8, protocol address at 14. 0.0.0.0 is a probe for the target's at 24. A probe for
            // another port's address would tell that port, which probes it too, that it is taken (RFC 5227).
            let mac = is_own_mac(policy, head, get(head, body + 8));
            let probes = v4(14).is_unspecified() && owns(v4(24));
            if mac && (owns(v4(14)) || probes) { Ok(()) } else { Err(Reason::SpoofIp) }
        }
        Net::Ipv6 => check_ipv6(policy, headers, head),
    }
}

/// Returns the destination port of a UDP datagram.
fn udp_destination(headers: &Headers, head: &[u8]) -> Option<u16> {
    headers.ports(head).filter(|_| headers.protocol == protocol::UDP).map(|(_, to)| to)
}

/// Returns the frame's source, which was learned, if it isn't one of the port's own addresses.
fn learned(policy: &Policy, head: &[u8]) -> Option<Mac> {
    source(head).filter(|_| policy.learn > 0)
}

fn is_own_mac(policy: &Policy, head: &[u8], mac: Option<[u8; 6]>) -> bool {
    mac.map(Mac).is_some_and(|mac| {
        !policy.check_mac || policy.macs.contains(&mac) || learned(policy, head) == Some(mac)
    })
}

/// Returns the link-local address of a MAC (RFC 4291, appendix A).
#[must_use]
pub fn link_local(mac: Mac) -> Ipv6Addr {
    let m = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]])
}

fn owns6(policy: &Policy, head: &[u8], ip: Ipv6Addr) -> bool {
    policy.ips.contains(&IpAddr::V6(ip))
        || policy.macs.iter().copied().chain(learned(policy, head)).any(|mac| link_local(mac) == ip)
}

fn check_ipv6(policy: &Policy, headers: &Headers, head: &[u8]) -> Result<(), Reason> {
    let spoofed = Err(Reason::SpoofIp);
    let Some(from) = get(head, usize::from(headers.at) + 8).map(Ipv6Addr::from) else { return spoofed };
    let own = owns6(policy, head, from);
    if headers.protocol != protocol::ICMPV6 || headers.part == Part::Later {
        return if own { Ok(()) } else { spoofed };
    }
    let end = headers.end as usize;
    let Some(&kind) = head.get(usize::from(headers.l4)).filter(|_| usize::from(headers.l4) < end) else {
        return Err(Reason::Unparsable);
    };
    // The messages of a host without an address.
    let nameless = from.is_unspecified()
        && matches!(
            kind,
            icmp::ROUTER_SOLICITATION
                | icmp::NEIGHBOUR_SOLICITATION
                | mld::REPORT
                | mld::DONE
                | mld::REPORT_V2
        );
    if !own && !nameless {
        return spoofed;
    }
    let fixed = match kind {
        icmp::ROUTER_SOLICITATION => 8,
        icmp::NEIGHBOUR_SOLICITATION | icmp::NEIGHBOUR_ADVERTISEMENT => 24,
        _ => return Ok(()),
    };
    // Neighbour discovery is never fragmented, and short enough to be read whole.
    if headers.part != Part::Whole || end > head.len() {
        return Err(Reason::Unparsable);
    }
    let message = &head[usize::from(headers.l4)..end];
    let target = get(message, 8).map(Ipv6Addr::from);
    // A host asks for other addresses; its own it announces, or probes before it takes it.
    let tells = kind == icmp::NEIGHBOUR_ADVERTISEMENT || kind == icmp::NEIGHBOUR_SOLICITATION && !own;
    if tells && !target.is_some_and(|ip| owns6(policy, head, ip)) {
        return spoofed;
    }
    let mut options = message.get(fixed..).ok_or(Reason::Unparsable)?;
    while let [option, units, ..] = options {
        let size = 8 * usize::from(*units);
        if size == 0 || size > options.len() {
            return Err(Reason::Unparsable);
        }
        if LINK_ADDRESS.contains(option) && !is_own_mac(policy, head, get(options, 2)) {
            return spoofed;
        }
        options = &options[size..];
    }
    Ok(())
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

    fn verdict(p: &Policy, f: &[u8]) -> Result<(), Reason> {
        check(p, &Headers::parse(f, f.len() as u32), f)
    }

    fn ipv4(source: [u8; 4], protocol: u8, ports: [u8; 2]) -> Vec<u8> {
        let mut b = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, protocol, 0, 0];
        b.extend(source);
        b.extend([255; 4]);
        b.extend([0, ports[0], 0, ports[1], 0, 8, 0, 0]);
        b
    }

    fn ipv6(source: &str, next: u8, rest: &[u8]) -> Vec<u8> {
        let mut b = vec![0x60, 0, 0, 0, 0, rest.len() as u8, next, 255];
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

    fn arp(mac: Mac, ip: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac.0, &ip, &[0; 6], &target].concat()
    }

    /// Puts a header of destination options in front, as no host needs to.
    fn behind_options(next: u8, message: &[u8]) -> Vec<u8> {
        [&[next, 0, 1, 4, 0, 0, 0, 0][..], message].concat()
    }

    const LINK: &str = "fe80::ff:fe00:1";

    #[test]
    fn a_port_speaks_for_itself_only() {
        let p = policy();
        for tags in [0, 1, 2] {
            let ok = |ethertype, body: Vec<u8>| verdict(&p, &frame(OWN, tags, ethertype, &body)).is_ok();
            assert!(ok(0x0800, ipv4([10, 0, 0, 1], 6, [68, 80])));
            assert!(!ok(0x0800, ipv4([10, 0, 0, 2], 6, [68, 80])));
            assert!(ok(0x0800, ipv4([0; 4], 17, [68, 67])), "DHCP");
            assert!(!ok(0x0800, ipv4([0; 4], 17, [68, 53])));
            assert!(ok(0x0806, arp(OWN, [10, 0, 0, 1], [10, 0, 0, 9])));
            assert!(ok(0x0806, arp(OWN, [0; 4], [10, 0, 0, 1])), "is my own address taken?");
            assert!(!ok(0x0806, arp(OWN, [0; 4], [10, 0, 0, 9])), "is another's?");
            assert!(!ok(0x0806, arp(OWN, [10, 0, 0, 254], [10, 0, 0, 9])));
            assert!(!ok(0x0806, arp(OTHER, [10, 0, 0, 1], [10, 0, 0, 9])));
            assert!(ok(0x86dd, ipv6("fd00::1", 6, &[0; 20])));
            assert!(!ok(0x86dd, ipv6("fd00::1", 6, &[0; 3])), "without its ports");
            assert!(!ok(0x86dd, ipv6("fd00::2", 6, &[0; 20])));
            assert!(ok(0x86dd, ipv6(LINK, 58, &advertisement("fd00::1", OWN))));
            assert!(ok(0x86dd, ipv6(LINK, 58, &advertisement(LINK, OWN))));
            assert!(!ok(0x86dd, ipv6(LINK, 58, &advertisement("fd00::fe", OWN))));
            assert!(!ok(0x86dd, ipv6("fd00::1", 58, &advertisement("fd00::1", OTHER))));
            assert!(!ok(0x86dd, ipv6(LINK, 58, &[134, 0, 0, 0])), "router advertisement");
            assert!(ok(0x88b5, vec![1, 2, 3]));
            assert!(!ok(0x0800, vec![]), "cut short");
        }
        assert_eq!(verdict(&p, &frame(OTHER, 0, 0x88b5, &[])), Err(Reason::SpoofMac));
        let deep = frame(OWN, 3, 0x0800, &ipv4([10, 0, 0, 1], 6, [1, 1]));
        assert_eq!(verdict(&p, &deep), Err(Reason::Unparsable));
    }

    #[test]
    fn a_guarded_port_has_the_link_local_address_of_its_mac_and_no_other() {
        let p = policy();
        let v6 = |from, message: &[u8]| verdict(&p, &frame(OWN, 0, 0x86dd, &ipv6(from, 58, message)));
        let spoofed = Err(Reason::SpoofIp);
        assert_eq!(v6("fe80::dead", &advertisement("fe80::dead", OWN)), spoofed);
        assert_eq!(v6(LINK, &advertisement("fe80::dead", OWN)), spoofed);
        assert_eq!(v6("fe80::dead", &[128, 0, 0, 0]), spoofed, "an echo request");
        let listed = Policy { ips: vec!["fe80::dead".parse().unwrap()], ..policy() };
        let claim = frame(OWN, 0, 0x86dd, &ipv6("fe80::dead", 58, &advertisement("fe80::dead", OWN)));
        assert_eq!(verdict(&listed, &claim), Ok(()), "one that is its own by configuration");

        // A solicitation also tells of its sender: its MAC, and the address that it probes.
        let solicit = |target: &str, option: &[u8]| {
            let target = target.parse::<Ipv6Addr>().unwrap().octets();
            [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target, option].concat()
        };
        let link = |mac: Mac| [&[1, 1][..], &mac.0].concat();
        assert_eq!(v6(LINK, &solicit("fd00::99", &link(OWN))), Ok(()));
        assert_eq!(v6(LINK, &solicit("fd00::99", &link(OTHER))), spoofed);
        // An innocent option in front of the forged one.
        let hidden = [&[14, 1, 0, 0, 0, 0, 0, 0][..], &link(OTHER)].concat();
        assert_eq!(v6(LINK, &solicit("fd00::99", &hidden)), spoofed);
        assert_eq!(v6("::", &solicit("fd00::1", &[])), Ok(()), "is my own address taken?");
        assert_eq!(v6("::", &solicit("fd00::99", &[])), spoofed, "is another's?");
        assert_eq!(v6("::", &[143, 0, 0, 0, 0, 0, 0, 0]), Ok(()), "a multicast report");
        assert_eq!(v6("::", &[128, 0, 0, 0]), spoofed);
    }

    #[test]
    fn extension_headers_and_fragments_hide_no_neighbour_discovery() {
        let p = policy();
        let sent = |next, rest: &[u8]| verdict(&p, &frame(OWN, 0, 0x86dd, &ipv6(LINK, next, rest)));
        let advertised = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(sent(60, &behind_options(58, &advertised)), Err(Reason::Server));
        assert_eq!(sent(0, &behind_options(60, &behind_options(58, &advertised))), Err(Reason::Server));
        let claim = advertisement("fd00::fe", OWN);
        assert_eq!(sent(60, &behind_options(58, &claim)), Err(Reason::SpoofIp));
        let own = advertisement("fd00::1", OWN);
        assert_eq!(sent(60, &behind_options(58, &own)), Ok(()));
        let first = [&[58, 0, 0, 1, 0, 0, 0, 1][..], &own].concat();
        assert_eq!(sent(44, &first), Err(Reason::Unparsable), "the first fragment of one");
        let headless = [60, 0, 0, 1, 0, 0, 0, 1, 58, 2, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            sent(44, &headless),
            Err(Reason::Unparsable),
            "a first fragment without the end of its headers"
        );
        let router = Policy { router: true, ..policy() };
        let plain = frame(OWN, 0, 0x86dd, &ipv6(LINK, 58, &advertised));
        assert_eq!(verdict(&router, &plain), Ok(()));
    }

    #[test]
    fn a_guarded_port_sends_neither_llc_nor_a_dhcp_servers_answers() {
        let p = policy();
        let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &ipv4([9, 9, 9, 9], 17, [1, 1])].concat();
        assert_eq!(verdict(&p, &frame(OWN, 0, snap.len() as u16, &snap)), Err(Reason::Unparsable));
        let answer = frame(OWN, 0, 0x0800, &ipv4([10, 0, 0, 1], 17, [67, 68]));
        assert_eq!(verdict(&p, &answer), Err(Reason::Server));
        let udp6 = ipv6("fd00::1", 17, &[2, 35, 2, 34, 0, 8, 0, 0]);
        assert_eq!(verdict(&p, &frame(OWN, 0, 0x86dd, &udp6)), Err(Reason::Server));
        let router = Policy { router: true, ..policy() };
        assert_eq!(verdict(&router, &answer), Ok(()));
    }

    #[test]
    fn several_macs_may_be_owned() {
        let p = Policy { macs: vec![OWN, OTHER], check_mac: true, ..Policy::default() };
        assert!(verdict(&p, &frame(OTHER, 0, 0x88b5, &[])).is_ok());
        assert!(verdict(&p, &frame(Mac([2, 0, 0, 0, 0, 3]), 0, 0x88b5, &[])).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_without_a_panic(head in prop::collection::vec(any::<u8>(), 0..130)) {
            let _ = verdict(&policy(), &head);
        }
    }
}
