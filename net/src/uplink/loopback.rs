// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a guest behind passt from the host's loopback addresses, and so from services that the host keeps to itself.
//!
//! A guest has two ways there. It sends to a loopback address: passt of Debian 12 connects to it. Or it sends to its gateway's
//! address, which passt maps to the loopback, for the sake of forwarded ports: a client on the host's loopback has the gateway's
//! address for the guest. So a guest may answer there, but begin nothing: no TCP connection, and no datagrams but to a peer that has
//! sent it one. passt (of all versions) makes a connection of a SYN without ACK only, and forwards no ICMP but echoes, which it doesn't map.
//!
//! A datagram from the gateway's address need not be from the loopback: passt also passes on what a neighbour sends from that address.
//! So a guest answers it at its forwarded UDP ports alone. What it sends from all others has no clients on the host.
//!
//! A peer is forgotten [`MEMORY_NS`] after its last datagram. It must be before passt forgets it, after 180 s: passt then takes any
//! peer of that port for one on the loopback. Answers of the guest don't count, since passt doesn't count them either.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::frames::headers::{Headers, LOOK, Net, Part, protocol};
use crate::ports::counters::Reason;

/// Time for which a peer that has sent a datagram may be answered (nanoseconds).
pub const MEMORY_NS: u64 = 120_000_000_000;
/// Most peers that are remembered. The one heard longest ago makes room.
pub const MOST_PEERS: usize = 1024;

/// The gateway that passt is given where the host's routes name none. It is a link-local address, and so no other host's.
pub const NO_GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 2, 2);
/// The gateway that passt is given for IPv6. Whatever the host's is, passt answers for it. Its interface identifier is random, so
/// that no neighbour has it by chance, as routers have fe80::1.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x6a1f, 0x93d2, 0x5c07, 0xb84e);

const TCP_SYN: u8 = 0x02;
const TCP_ACK: u8 = 0x10;
const DNS: u16 = 53;
const DHCP_SERVER: u16 = 67;

/// A gateway's address, which passt maps to the host's loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// The address that guests send to.
    pub address: IpAddr,
    /// passt offers it to the guest as a name server, and sends datagrams for it to a name server of the host.
    pub dns: bool,
    /// A name server listens where passt leads TCP connections to this address: at 127.0.0.1 or ::1.
    pub tcp_dns: bool,
}

/// The addresses that a passt maps to the host's loopback, and the ports at which guests may answer there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// The gateways, one per version of IP.
    pub gateways: [Gateway; 2],
    /// The guest's ports to which passt forwards UDP ports of the host.
    pub udp_ports: Vec<RangeInclusive<u16>>,
}

/// A peer on the host, as the guest knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Peer {
    guest: IpAddr,
    gateway: IpAddr,
    guest_port: u16,
    port: u16,
}

/// Decides which frames of a guest passt gets.
#[derive(Debug, Default)]
pub struct Firewall {
    mapping: Option<Mapping>,
    /// Peers, and the time of their last datagram.
    peers: Mutex<BTreeMap<Peer, u64>>,
}

/// Returns whether an address means the receiving host itself: the loopback, "this host" (RFC 1122, §3.2.1.3), and IPv4 in IPv6,
/// which sockets take for IPv4.
fn is_internal(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => matches!(ip.octets()[0], 0 | 127),
        IpAddr::V6(ip) => matches!(ip.segments(), [0, 0, 0, 0, 0, 0 | 0xffff, ..]),
    }
}

impl Firewall {
    /// Makes the firewall of a passt that has this `mapping` to the loopback; none: it has none, or the guest may use it.
    #[must_use]
    pub fn new(mapping: Option<Mapping>) -> Self {
        Self { mapping, peers: Mutex::default() }
    }

    /// Checks a frame of `len` bytes that starts with `head` and is for passt, at time `now` (nanoseconds).
    ///
    /// # Errors
    /// The reason for dropping it.
    pub fn check(&self, head: &[u8], len: u32, now: u64) -> Result<(), Reason> {
        let headers = Headers::parse(head, len);
        if headers.net == Net::Unknown {
            return Err(Reason::Unparsable);
        }
        let Some((from, to)) = headers.addresses(head) else { return Ok(()) };
        // From no address: a host that has none yet.
        if is_internal(to) || is_internal(from) && !from.is_unspecified() {
            return Err(Reason::Loopback);
        }
        let gateway = self.mapping.iter().flat_map(|m| &m.gateways).find(|g| g.address == to);
        match gateway {
            Some(gateway) if !self.may_reach(gateway, &headers, head, from, now) => Err(Reason::Loopback),
            _ => Ok(()),
        }
    }

    fn may_reach(&self, gateway: &Gateway, headers: &Headers, head: &[u8], from: IpAddr, now: u64) -> bool {
        // Versions of passt differ in what they take for the transport header behind extension headers.
        let direct = headers.net == Net::Ipv4 || headers.l4 == headers.at + 40;
        if headers.part != Part::Whole || !direct {
            return false;
        }
        match (headers.protocol, headers.ports(head)) {
            (protocol::ICMP | protocol::ICMPV6, _) => true,
            (protocol::TCP, Some((_, to))) => {
                let flags = head.get(usize::from(headers.l4) + 13);
                let begins = flags.is_none_or(|flags| flags & (TCP_SYN | TCP_ACK) == TCP_SYN);
                !begins || gateway.tcp_dns && to == DNS
            }
            (protocol::UDP, Some((guest_port, port))) => {
                let served = gateway.dns && port == DNS || headers.net == Net::Ipv4 && port == DHCP_SERVER;
                served
                    || self.has_heard(&Peer { guest: from, gateway: gateway.address, guest_port, port }, now)
            }
            _ => false,
        }
    }

    fn has_heard(&self, peer: &Peer, now: u64) -> bool {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(peer).is_some_and(|heard| now.saturating_sub(*heard) < MEMORY_NS)
    }

    /// Remembers the peer of a datagram that came from passt for a forwarded port, at time `now` (nanoseconds).
    pub fn note(&self, frame: &[u8], now: u64) {
        let Some(mapping) = &self.mapping else { return };
        let head = &frame[..frame.len().min(LOOK)];
        let headers = Headers::parse(head, frame.len() as u32);
        if headers.protocol != protocol::UDP {
            return;
        }
        let (Some((gateway, guest)), Some((port, guest_port))) =
            (headers.addresses(head), headers.ports(head))
        else {
            return;
        };
        let maps = mapping.gateways.iter().any(|g| g.address == gateway);
        if !maps || !mapping.udp_ports.iter().any(|ports| ports.contains(&guest_port)) {
            return;
        }
        let peer = Peer { guest, gateway, guest_port, port };
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= MOST_PEERS && !peers.contains_key(&peer) {
            let oldest = peers.iter().min_by_key(|(_, heard)| **heard).map(|(peer, _)| *peer);
            oldest.and_then(|oldest| peers.remove(&oldest));
        }
        peers.insert(peer, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 4] = [192, 0, 2, 7];
    const GATEWAY: [u8; 4] = [192, 0, 2, 1];

    fn firewall(dns: bool, tcp_dns: bool) -> Firewall {
        let of = |address: IpAddr| Gateway { address, dns, tcp_dns };
        let gateways = [of(GATEWAY.into()), of(GATEWAY6.into())];
        Firewall::new(Some(Mapping { gateways, udp_ports: vec![7..=8, 53..=53] }))
    }

    fn v4(from: [u8; 4], to: [u8; 4], fragment: u16, protocol: u8, body: &[u8]) -> Vec<u8> {
        let len = (20 + body.len() as u16).to_be_bytes();
        let fragment = fragment.to_be_bytes();
        let start = [&[0; 12][..], &[8, 0, 0x45, 0], &len, &[0, 0], &fragment].concat();
        [&start[..], &[64, protocol, 0, 0], &from, &to, body].concat()
    }

    fn v6(to: Ipv6Addr, next: u8, body: &[u8]) -> Vec<u8> {
        let own: Ipv6Addr = "fd00::7".parse().unwrap();
        let len = (body.len() as u16).to_be_bytes();
        let start = [&[0; 12][..], &[0x86, 0xdd, 0x60, 0, 0, 0], &len, &[next, 64]].concat();
        [&start[..], &own.octets(), &to.octets(), body].concat()
    }

    fn tcp(to: u16, flags: u8) -> Vec<u8> {
        [&[0x9c, 0x40][..], &to.to_be_bytes(), &[0; 8], &[5 << 4, flags, 0, 0, 0, 0, 0, 0]].concat()
    }

    fn udp(from: u16, to: u16) -> Vec<u8> {
        [from.to_be_bytes(), to.to_be_bytes(), [0, 8], [0, 0]].concat()
    }

    fn check(firewall: &Firewall, frame: &[u8], now: u64) -> Result<(), Reason> {
        firewall.check(&frame[..frame.len().min(LOOK)], frame.len() as u32, now)
    }

    #[test]
    fn at_the_gateway_a_guest_begins_no_connection_whatever_form_it_gives_to_that() {
        let of = |protocol, body: &[u8]| v4(OWN, GATEWAY, 0, protocol, body);
        let passes = |frame: Vec<u8>| check(&firewall(false, false), &frame, 0).is_ok();
        assert!(!passes(of(protocol::TCP, &tcp(80, TCP_SYN))));
        assert!(!passes(of(protocol::TCP, &tcp(80, TCP_SYN | 0xc8))), "other flags beside");
        assert!(!passes(of(protocol::TCP, &tcp(80, TCP_SYN)[..13])), "cut before its flags");
        assert!(passes(of(protocol::TCP, &tcp(80, TCP_SYN | TCP_ACK))));
        assert!(passes(of(protocol::TCP, &tcp(80, TCP_ACK))));
        assert!(!passes(v4(OWN, GATEWAY, 0x2000, protocol::TCP, &tcp(80, TCP_ACK))), "a first fragment");
        assert!(!passes(v4(OWN, GATEWAY, 1, protocol::TCP, &tcp(80, TCP_ACK))), "a later one");
        assert!(!passes(of(protocol::SCTP, &tcp(80, TCP_ACK))));
        assert!(passes(of(protocol::ICMP, &[8; 8])));
        let options = |next: u8| [&[next, 0, 1, 4, 0, 0, 0, 0][..], &tcp(80, TCP_ACK)].concat();
        assert!(!passes(v6(GATEWAY6, protocol::DESTINATION, &options(protocol::TCP))));
        assert!(passes(v6(GATEWAY6, protocol::TCP, &tcp(80, TCP_ACK))));
        assert!(!passes(v6(GATEWAY6, protocol::TCP, &tcp(80, TCP_SYN))));
        assert!(passes(v6("fd00::9".parse().unwrap(), protocol::TCP, &tcp(80, TCP_SYN))));
        assert!(passes(v4(OWN, [192, 0, 2, 9], 0, protocol::TCP, &tcp(80, TCP_SYN))));
    }

    #[test]
    fn a_loopback_address_is_neither_source_nor_destination_and_no_address_is_a_source() {
        let passes = |from, to| {
            check(&Firewall::default(), &v4(from, to, 0, protocol::UDP, &udp(68, 67)), 0) == Ok(())
        };
        assert!(passes([0; 4], [255; 4]) && passes(OWN, GATEWAY));
        for inside in [[127, 0, 0, 1], [127, 255, 1, 2], [0, 1, 2, 3]] {
            assert!(!passes(inside, GATEWAY) && !passes(OWN, inside), "{inside:?}");
        }
        assert!(!passes(OWN, [0; 4]));
    }

    #[test]
    fn a_datagrams_peer_is_answered_at_its_own_port_until_it_is_forgotten() {
        let firewall = firewall(false, false);
        let answer = |from, to| v4(OWN, GATEWAY, 0, protocol::UDP, &udp(from, to));
        assert_eq!(check(&firewall, &answer(7, 40_000), 0), Err(Reason::Loopback));
        firewall.note(&v4(GATEWAY, OWN, 0, protocol::UDP, &udp(40_000, 7)), 5);
        firewall.note(&v4([198, 51, 100, 1], OWN, 0, protocol::UDP, &udp(40_001, 7)), 5);
        assert_eq!(check(&firewall, &answer(7, 40_000), 4 + MEMORY_NS), Ok(()));
        assert_eq!(check(&firewall, &answer(7, 40_000), 5 + MEMORY_NS), Err(Reason::Loopback));
        assert_eq!(check(&firewall, &answer(7, 40_001), 6), Err(Reason::Loopback));
        assert_eq!(check(&firewall, &answer(8, 40_000), 6), Err(Reason::Loopback));
        let other = v4([192, 0, 2, 8], GATEWAY, 0, protocol::UDP, &udp(7, 40_000));
        assert_eq!(check(&firewall, &other, 6), Err(Reason::Loopback), "from another address");
    }

    #[test]
    fn a_peer_is_answered_at_forwarded_ports_alone() {
        let firewall = firewall(false, false);
        for (port, answers) in [(6, false), (7, true), (8, true), (9, false), (53, true), (4321, false)] {
            firewall.note(&v4(GATEWAY, OWN, 0, protocol::UDP, &udp(40_000, port)), 0);
            let answer = v4(OWN, GATEWAY, 0, protocol::UDP, &udp(port, 40_000));
            assert_eq!(check(&firewall, &answer, 1).is_ok(), answers, "port {port}");
        }
    }

    #[test]
    fn the_peer_heard_longest_ago_makes_room() {
        let firewall = firewall(false, false);
        let note = |n: usize| {
            firewall.note(&v4(GATEWAY, OWN, 0, protocol::UDP, &udp(n as u16, 7)), n as u64);
        };
        let knows =
            |n: usize| check(&firewall, &v4(OWN, GATEWAY, 0, protocol::UDP, &udp(7, n as u16)), 1).is_ok();
        (1..=MOST_PEERS).for_each(note);
        note(1);
        assert!(knows(1));
        note(MOST_PEERS + 1);
        assert!(!knows(1) && knows(2) && knows(MOST_PEERS + 1));
        assert_eq!(firewall.peers.lock().unwrap().len(), MOST_PEERS);
    }

    #[test]
    fn name_servers_and_dhcp_at_the_gateway_are_asked_where_they_are_offered() {
        let asks = |dns, tcp_dns, protocol, body: &[u8]| {
            check(&firewall(dns, tcp_dns), &v4(OWN, GATEWAY, 0, protocol, body), 0).is_ok()
        };
        let (query, syn) = (udp(40_000, DNS), tcp(DNS, TCP_SYN));
        assert!(!asks(false, false, protocol::UDP, &query) && !asks(false, false, protocol::TCP, &syn));
        assert!(asks(true, false, protocol::UDP, &query) && !asks(true, false, protocol::TCP, &syn));
        assert!(asks(true, true, protocol::UDP, &query) && asks(true, true, protocol::TCP, &syn));
        assert!(asks(false, false, protocol::UDP, &udp(68, DHCP_SERVER)));
    }

    #[test]
    fn a_frame_that_cannot_be_read_does_not_pass() {
        let frame = v4(OWN, GATEWAY, 0, protocol::TCP, &tcp(80, TCP_ACK));
        let of_a_frame_cut_for_a_port_without_policy = &frame[..16];
        let checked =
            Firewall::default().check(of_a_frame_cut_for_a_port_without_policy, frame.len() as u32, 0);
        assert_eq!(checked, Err(Reason::Unparsable));
    }
}
