// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IPv6 for guests without settings: router advertisements (RFC 4861, RFC 8106) with the network's prefix, from which a
//! guest's kernel makes its own address (RFC 4862), and the switch's side of [DHCPv6](super::dhcp6).
//!
//! The switch is no router: its advertisements have a lifetime of zero, so guests send no packets for the outside to it. A
//! router behind an uplink or a port with `router = true` advertises itself.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use super::dhcp6;
use super::wire::{ETH, ethernet, group_mac, ipv6};
use super::{Leases, Responder};
use crate::frames::frame::Mac;
use crate::frames::headers::{Headers, LOOK, Net, Part, get, protocol};
use crate::policy::spoof::{icmp, link_local};

/// All nodes of a link.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Neighbour discovery is accepted only with this hop limit, which no forwarded packet has (RFC 4861 §6.1).
const HOPS: u8 = 255;
/// Valid and preferred lifetime of an address after the last advertisement (RFC 4861 §6.2.1), in seconds.
const VALID: u32 = 30 * 24 * 3600;
const PREFERRED: u32 = 7 * 24 * 3600;
/// Lifetime of a name server after the last advertisement: three of [`super::querier::PERIOD`], in seconds (RFC 8106 §5.1).
const DNS_LIFETIME: u32 = 375;

pub use tombolo_control::net::config::Ipv6Config;

/// The service: `config`, and the leases.
pub struct Ipv6 {
    config: Ipv6Config,
    leases: Leases<Ipv6Addr>,
}

impl Ipv6 {
    /// Makes the service of `config`, which gives the addresses in `leases`.
    #[must_use]
    pub fn new(config: Ipv6Config, leases: Leases<Ipv6Addr>) -> Self {
        Self { config, leases }
    }
}

impl Responder for Ipv6 {
    fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let from = Mac(get(frame, 6)?);
        let headers = Headers::parse(&frame[..frame.len().min(LOOK)], frame.len() as u32);
        if headers.net != Net::Ipv6 || headers.tags > 0 || headers.part != Part::Whole {
            return None;
        }
        let body = frame.get(usize::from(headers.l4)..headers.end as usize)?;
        let source = Ipv6Addr::from(get::<16>(frame, ETH + 8)?);
        match headers.protocol {
            protocol::ICMPV6 if frame[ETH + 7] == HOPS => neighbour(&self.config, from, source, body),
            protocol::UDP => {
                let lease = self.leases.get(from)?;
                let own = self.config.mac();
                let reply = dhcp6::answer(&self.config, own, body, &lease)?;
                let packet = ipv6([link_local(own), source], (protocol::UDP, 6), HOPS, &reply);
                source.is_unicast_link_local().then(|| ethernet(from, own, 0x86dd, &packet))
            }
            _ => None,
        }
    }

    fn announcements(&self, _: &BTreeSet<u16>) -> Vec<Vec<u8>> {
        vec![advertisement(&self.config, group_mac(ALL_NODES))]
    }
}

/// Answers a router solicitation, and solicitations for the service's own MAC.
fn neighbour(config: &Ipv6Config, from: Mac, source: Ipv6Addr, message: &[u8]) -> Option<Vec<u8>> {
    let own = config.mac();
    match *message.first()? {
        icmp::ROUTER_SOLICITATION if message.len() >= 8 => Some(advertisement(config, from)),
        icmp::NEIGHBOUR_SOLICITATION if get(message, 8) == Some(link_local(own).octets()) => {
            // Solicited, with override. A host without an address gets no answer.
            let mut reply = vec![icmp::NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, 0x60, 0, 0, 0];
            reply.extend(link_local(own).octets());
            reply.extend([2, 1]);
            reply.extend(own.0);
            let packet = ipv6([link_local(own), source], (protocol::ICMPV6, 2), HOPS, &reply);
            (!source.is_unspecified()).then(|| ethernet(from, own, 0x86dd, &packet))
        }
        _ => None,
    }
}

/// Makes a router advertisement to all nodes, in a frame for `to`.
fn advertisement(config: &Ipv6Config, to: Mac) -> Vec<u8> {
    const MANAGED: u8 = 0x80;
    const OTHER: u8 = 0x40;
    const ON_LINK: u8 = 0x80;
    const AUTONOMOUS: u8 = 0x40;
    let own = config.mac();
    let ask = if config.managed { MANAGED | OTHER } else { OTHER };
    // No hop limit, a lifetime of zero: no router; no timers of its own.
    let mut message = vec![icmp::ROUTER_ADVERTISEMENT, 0, 0, 0, 0, ask, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    message.extend([1, 1]);
    message.extend(own.0);
    let kind = if config.managed { ON_LINK } else { ON_LINK | AUTONOMOUS };
    message.extend([3, 4, 64, kind]);
    message.extend(VALID.to_be_bytes());
    message.extend(PREFERRED.to_be_bytes());
    message.extend([0; 4]);
    message.extend(config.prefix.base().octets());
    if !config.dns.is_empty() {
        message.extend([25, 1 + 2 * config.dns.len() as u8, 0, 0]);
        message.extend(DNS_LIFETIME.to_be_bytes());
        config.dns.iter().for_each(|dns| message.extend(dns.octets()));
    }
    let packet = ipv6([link_local(own), ALL_NODES], (protocol::ICMPV6, 2), HOPS, &message);
    ethernet(to, own, 0x86dd, &packet)
}

#[cfg(test)]
mod tests {
    use super::super::Lease;
    use super::super::wire::{IPV6, sum};
    use super::*;
    use proptest::prelude::*;
    use tombolo_control::net::address::Prefix64;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);

    fn config(more: &str) -> Ipv6Config {
        serde_json::from_str(&format!(r#"{{ "prefix": "fd00:86::/64"{more} }}"#)).unwrap()
    }

    fn service(more: &str) -> Ipv6 {
        let leases = Leases::default();
        let address = config("").prefix.of(GUEST);
        leases.put(GUEST, Lease { address, name: "web".into() }).unwrap();
        Ipv6::new(config(more), leases)
    }

    /// Returns the payload of a frame's packet, whose checksum is right.
    fn carried(frame: &[u8]) -> &[u8] {
        let body = &frame[ETH + IPV6..];
        let protocol = u32::from(frame[ETH + 6]);
        assert_eq!(sum(&frame[ETH + 8..], body.len() as u32 + protocol), [0, 0], "the checksum");
        assert_eq!(usize::from(frame[ETH + 5]) + 256 * usize::from(frame[ETH + 4]), body.len());
        assert_eq!(frame[ETH + 7], 255);
        body
    }

    fn asks(source: Ipv6Addr, message: &[u8]) -> Vec<u8> {
        let all_routers = "ff02::2".parse().unwrap();
        let packet = ipv6([source, all_routers], (58, 2), 255, message);
        ethernet(group_mac(all_routers), GUEST, 0x86dd, &packet)
    }

    #[test]
    fn a_guest_that_looks_for_a_router_learns_the_prefix_and_that_there_is_no_router() {
        let solicitation = [133, 0, 0, 0, 0, 0, 0, 0];
        for source in [Ipv6Addr::UNSPECIFIED, link_local(GUEST)] {
            let reply = service(r#", "dns": ["fd00::53"]"#).answer(&asks(source, &solicitation)).unwrap();
            assert_eq!((&reply[..6], &reply[6..12]), (&GUEST.0[..], &config("").mac().0[..]));
            let told = carried(&reply);
            assert_eq!((told[0], &told[5..8]), (134, &[0x40, 0, 0][..]), "lifetime zero; ask for the rest");
            assert_eq!(&told[24..28], [3, 4, 64, 0xc0], "on the link, and for addresses");
            assert_eq!(told[40..56], "fd00:86::".parse::<Ipv6Addr>().unwrap().octets());
            assert_eq!(&told[56..58], [25, 3]);
            assert_eq!(told[64..], "fd00::53".parse::<Ipv6Addr>().unwrap().octets());
        }
        let managed = service(r#", "managed": true"#).announcements(&BTreeSet::new()).remove(0);
        let told = carried(&managed);
        assert_eq!((told[5], told[27], told.len()), (0xc0, 0x80, 56));
        assert_eq!(managed[..6], [0x33, 0x33, 0, 0, 0, 1]);
    }

    #[test]
    fn the_services_mac_is_told_to_those_who_have_an_address() {
        let own = link_local(config("").mac());
        let question = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &own.octets()].concat();
        let reply = service("").answer(&asks(link_local(GUEST), &question)).unwrap();
        let told = carried(&reply);
        assert_eq!((told[0], &told[8..24], &told[26..]), (136, &own.octets()[..], &config("").mac().0[..]));
        assert_eq!(service("").answer(&asks(Ipv6Addr::UNSPECIFIED, &question)), None, "a probe");
        let other = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &link_local(GUEST).octets()].concat();
        assert_eq!(service("").answer(&asks(link_local(GUEST), &other)), None, "another's");
        let mut far = asks(link_local(GUEST), &question);
        far[ETH + 7] = 64;
        assert_eq!(service("").answer(&far), None, "through a router");
    }

    #[test]
    fn a_prefix_has_64_bits_and_a_guests_address_is_made_of_its_mac() {
        let prefix = config("").prefix;
        assert_eq!(prefix.of(GUEST).to_string(), "fd00:86::5054:ff:fe00:1");
        assert!(prefix.has(prefix.of(GUEST)) && !prefix.has("fd00:87::1".parse().unwrap()));
        assert!(!prefix.has("fd00:86::".parse().unwrap()));
        for text in ["fd00:86::/48", "fd00:86::1/64", "fe80::/64", "ff02::/64", "::/64", "10.0.0.0/24", "x"] {
            assert!(text.parse::<Prefix64>().unwrap_err().contains("such as \"fd00:86::/64\""), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_frame_is_too_broken_to_be_looked_at(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            message in proptest::collection::vec(any::<u8>(), 4..80),
        ) {
            let _any = service("").answer(&bytes);
            if let Some(reply) = service("").answer(&asks(link_local(GUEST), &message)) {
                prop_assert!(carried(&reply).len() < 1400);
            }
        }
    }
}
