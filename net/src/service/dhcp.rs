// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IPv4 addresses for guests that ask for one (DHCP, RFC 2131 and 2132): the answers to their messages.
//!
//! Each MAC has one address, from the configuration, so there is no state: any switch with the same configuration gives
//! the same answer. A request for another address is refused; a request to another server, or through a relay, gets no
//! answer.

use std::net::Ipv4Addr;

use super::wire::{ETH, ethernet, sum};
use super::{Lease, Leases, Responder};
use crate::frames::frame::Mac;

pub use tombolo_control::net::config::DhcpConfig;

const IP: usize = 20;
const UDP: usize = 8;
/// Bytes of a BOOTP message in front of its options, the magic cookie included.
const FIXED: usize = 240;
const COOKIE: [u8; 4] = [0x63, 0x82, 0x53, 0x63];
/// The shortest BOOTP message that old clients accept.
const SHORTEST: usize = 300;

/// Types of messages (RFC 2132, option 53).
mod kind {
    pub const DISCOVER: u8 = 1;
    pub const OFFER: u8 = 2;
    pub const REQUEST: u8 = 3;
    pub const ACK: u8 = 5;
    pub const NAK: u8 = 6;
    pub const INFORM: u8 = 8;
}

/// Numbers of options.
mod option {
    pub const MASK: u8 = 1;
    pub const ROUTER: u8 = 3;
    pub const DNS: u8 = 6;
    pub const NAME: u8 = 12;
    pub const DOMAIN: u8 = 15;
    pub const BROADCAST: u8 = 28;
    pub const REQUESTED: u8 = 50;
    pub const LEASE: u8 = 51;
    pub const KIND: u8 = 53;
    pub const SERVER: u8 = 54;
    pub const RENEW: u8 = 58;
    pub const REBIND: u8 = 59;
    pub const CLIENT: u8 = 61;
    pub const END: u8 = 255;
}

/// Returns the value of the first option of this number.
fn find(mut options: &[u8], wanted: u8) -> Option<&[u8]> {
    loop {
        match options {
            [0, rest @ ..] => options = rest,
            [number, len, rest @ ..] if *number != option::END => {
                let (value, rest) = rest.split_at_checked((*len).into())?;
                if *number == wanted {
                    return Some(value);
                }
                options = rest;
            }
            _ => return None,
        }
    }
}

fn ip(bytes: &[u8]) -> Option<Ipv4Addr> {
    bytes.first_chunk::<4>().map(|b| Ipv4Addr::from(*b))
}

/// Answers a request for an address, or for the server's own MAC (ARP); None: no answer. `lease`: the lease of a MAC.
#[must_use]
pub fn answer(
    config: &DhcpConfig,
    frame: &[u8],
    lease: impl Fn(Mac) -> Option<Lease<Ipv4Addr>>,
) -> Option<Vec<u8>> {
    let from = Mac(*frame.get(6..12)?.first_chunk()?);
    match frame.get(12..ETH)? {
        [0x08, 0x06] => arp(config, from, &frame[ETH..]),
        [0x08, 0x00] => dhcp(config, from, &frame[ETH..], lease),
        _ => None,
    }
}

/// Answers with the server's MAC. The router's address belongs to the router, even if it equals the server's.
fn arp(config: &DhcpConfig, from: Mac, body: &[u8]) -> Option<Vec<u8>> {
    const QUESTION: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let own = config.address.address;
    if body.first_chunk() != Some(&QUESTION) || ip(body.get(24..)?)? != own || config.router == Some(own) {
        return None;
    }
    let reply = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &config.mac().0, &own.octets(), &body[8..18]].concat();
    Some(ethernet(from, config.mac(), 0x0806, &reply))
}

fn dhcp(
    config: &DhcpConfig,
    from: Mac,
    packet: &[u8],
    lease: impl Fn(Mac) -> Option<Lease<Ipv4Addr>>,
) -> Option<Vec<u8>> {
    // Unfragmented IPv4, with UDP from port 68 to port 67.
    let head = 4 * usize::from(packet.first()? & 15);
    let total = usize::from(u16::from_be_bytes(*packet.get(2..)?.first_chunk()?));
    let fragment = u16::from_be_bytes(*packet.get(6..)?.first_chunk()?) & 0x3fff;
    if packet[0] >> 4 != 4 || head < IP || fragment != 0 || *packet.get(9)? != 17 {
        return None;
    }
    let udp = packet.get(..total)?.get(head..)?;
    if udp.get(..4)? != [0, 68, 0, 67] {
        return None;
    }
    let len = usize::from(u16::from_be_bytes(*udp.get(4..)?.first_chunk()?));
    let asked = udp.get(UDP..len)?;
    let (fixed, options) = asked.split_at_checked(FIXED)?;
    // A request over Ethernet, for the sender itself, not through a relay.
    let own = fixed[..3] == [1, 1, 6] && fixed[28..34] == from.0 && fixed[24..28] == [0; 4];
    if !own || fixed[236..] != COOKIE {
        return None;
    }
    let lease = lease(from)?;
    let server = config.address.address;
    if find(options, option::SERVER).is_some_and(|s| s != server.octets()) {
        return None;
    }
    let has = ip(&fixed[12..])?;
    let kind = match find(options, option::KIND)? {
        [kind::DISCOVER] => kind::OFFER,
        [kind::INFORM] => kind::ACK,
        [kind::REQUEST] => {
            let wanted = find(options, option::REQUESTED).and_then(ip).unwrap_or(has);
            if wanted == lease.address { kind::ACK } else { kind::NAK }
        }
        _ => return None,
    };
    let informs = find(options, option::KIND) == Some(&[kind::INFORM]);
    let gives = kind != kind::NAK && !informs;

    let mut reply = vec![0; FIXED];
    reply[..4].copy_from_slice(&[2, 1, 6, 0]);
    // Transaction id; flags; the client's hardware address.
    reply[4..8].copy_from_slice(&fixed[4..8]);
    reply[10..12].copy_from_slice(&fixed[10..12]);
    reply[28..44].copy_from_slice(&fixed[28..44]);
    if kind != kind::NAK {
        reply[12..16].copy_from_slice(&has.octets());
    }
    if gives {
        reply[16..20].copy_from_slice(&lease.address.octets());
    }
    reply[236..].copy_from_slice(&COOKIE);
    let mut say = |number: u8, value: &[u8]| {
        if let (Ok(len), false) = (u8::try_from(value.len()), value.is_empty()) {
            reply.extend([number, len]);
            reply.extend(value);
        }
    };
    say(option::KIND, &[kind]);
    say(option::SERVER, &server.octets());
    say(option::CLIENT, find(options, option::CLIENT).unwrap_or_default());
    if gives {
        for (number, seconds) in [
            (option::LEASE, config.lease),
            (option::RENEW, config.lease / 2),
            (option::REBIND, config.lease / 8 * 7),
        ] {
            say(number, &seconds.to_be_bytes());
        }
    }
    if kind != kind::NAK {
        let mask = config.address.mask();
        say(option::MASK, &mask.to_be_bytes());
        say(option::BROADCAST, &(u32::from(lease.address) | !mask).to_be_bytes());
        say(
            option::ROUTER,
            &config.router.map(|r| r.octets()).unwrap_or_default()
                [..4 * usize::from(config.router.is_some())],
        );
        say(option::DNS, &config.dns.iter().flat_map(Ipv4Addr::octets).collect::<Vec<_>>());
        say(option::DOMAIN, config.domain.as_deref().unwrap_or_default().as_bytes());
        say(option::NAME, lease.name.as_bytes());
    }
    reply.push(option::END);
    reply.resize(reply.len().max(SHORTEST), 0);

    // To the client's address; broadcast if it has none yet and asks for that, or is refused.
    let broadcast = kind == kind::NAK || fixed[10] & 0x80 != 0;
    let to = match (kind == kind::NAK, has.is_unspecified(), broadcast) {
        (false, false, _) => has,
        (_, _, true) => Ipv4Addr::BROADCAST,
        _ => lease.address,
    };
    let mut packet = vec![0; IP + UDP];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&((IP + UDP + reply.len()) as u16).to_be_bytes());
    packet[8..10].copy_from_slice(&[64, 17]);
    packet[12..16].copy_from_slice(&server.octets());
    packet[16..20].copy_from_slice(&to.octets());
    let check = sum(&packet[..IP], 0);
    packet[10..12].copy_from_slice(&check);
    packet[20..24].copy_from_slice(&[0, 67, 0, 68]);
    packet[24..26].copy_from_slice(&((UDP + reply.len()) as u16).to_be_bytes());
    packet.extend(reply);
    // UDP's checksum covers the addresses, the protocol and the length.
    let length = (packet.len() - IP) as u32;
    let check = match sum(&packet[12..], 17 + length) {
        [0, 0] => [0xff, 0xff],
        check => check,
    };
    packet[26..28].copy_from_slice(&check);
    Some(ethernet(from, config.mac(), 0x0800, &packet))
}

/// The service: `config`, and the leases.
pub struct Dhcp {
    config: DhcpConfig,
    leases: Leases<Ipv4Addr>,
}

impl Dhcp {
    /// Makes the service of `config`, which gives the addresses in `leases`.
    #[must_use]
    pub fn new(config: DhcpConfig, leases: Leases<Ipv4Addr>) -> Self {
        Self { config, leases }
    }
}

impl Responder for Dhcp {
    fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
        answer(&self.config, frame, |mac| self.leases.get(mac))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tombolo_control::net::address::SubnetAddress;

    const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 86, 0, 5);
    const SERVER: Ipv4Addr = Ipv4Addr::new(10, 86, 0, 1);

    fn config() -> DhcpConfig {
        serde_json::from_str(
            r#"{ "address": "10.86.0.1/24", "router": "10.86.0.254", "dns": ["9.9.9.9", "1.1.1.1"], "domain": "lan" }"#,
        )
        .unwrap()
    }

    fn lease(mac: Mac) -> Option<Lease<Ipv4Addr>> {
        (mac == GUEST).then(|| Lease { address: ADDRESS, name: "web".into() })
    }

    /// Makes a message with these options from `from`, which has the address `has`.
    fn message(from: Mac, has: Ipv4Addr, options: &[u8]) -> Vec<u8> {
        let mut body = vec![0; FIXED];
        body[..8].copy_from_slice(&[1, 1, 6, 0, 1, 2, 3, 4]);
        body[12..16].copy_from_slice(&has.octets());
        body[28..34].copy_from_slice(&from.0);
        body[236..].copy_from_slice(&COOKIE);
        body.extend(options);
        body.push(255);
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend([0, 0, 0, 0, 255, 255, 255, 255, 0, 68, 0, 67, 0, 0, 0, 0]);
        packet[24..26].copy_from_slice(&((UDP + body.len()) as u16).to_be_bytes());
        packet.extend(body);
        let len = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&len);
        ethernet(Mac::BROADCAST, from, 0x0800, &packet)
    }

    /// Returns type, address and options of an answer, whose checksums are right.
    fn read(frame: &[u8]) -> (u8, Ipv4Addr, Vec<u8>) {
        assert_eq!((&frame[..6], &frame[6..12]), (&GUEST.0[..], &config().mac().0[..]));
        let packet = &frame[ETH..];
        assert_eq!(sum(&packet[..IP], 0), [0, 0], "IP's sum");
        assert_eq!(sum(&packet[12..], 17 + (packet.len() - IP) as u32), [0, 0], "UDP's sum");
        let body = &packet[IP + UDP..];
        assert_eq!((&body[..8], &body[28..34]), (&[2, 1, 6, 0, 1, 2, 3, 4][..], &GUEST.0[..]));
        assert!(body.len() >= SHORTEST);
        (find(&body[FIXED..], 53).unwrap()[0], ip(&body[16..]).unwrap(), body[FIXED..].to_vec())
    }

    #[test]
    fn a_guest_is_offered_its_address_and_gets_it_with_what_belongs_to_it() {
        let none = Ipv4Addr::UNSPECIFIED;
        let offer = answer(&config(), &message(GUEST, none, &[53, 1, 1, 61, 3, 1, 2, 3]), lease).unwrap();
        let (kind, address, options) = read(&offer);
        assert_eq!((kind, address), (2, ADDRESS));
        for (number, value) in [
            (54, &SERVER.octets()[..]),
            (51, &3600u32.to_be_bytes()),
            (1, &[255, 255, 255, 0]),
            (28, &[10, 86, 0, 255]),
            (3, &[10, 86, 0, 254]),
            (6, &[9, 9, 9, 9, 1, 1, 1, 1]),
            (15, b"lan"),
            (12, b"web"),
            (61, &[1, 2, 3]),
        ] {
            assert_eq!(find(&options, number), Some(value), "option {number}");
        }
        let wants = [&[53, 1, 3, 54, 4][..], &SERVER.octets(), &[50, 4], &ADDRESS.octets()].concat();
        let (kind, address, _) = read(&answer(&config(), &message(GUEST, none, &wants), lease).unwrap());
        assert_eq!((kind, address), (5, ADDRESS));
        // A renewal, from the leased address.
        let renewed = answer(&config(), &message(GUEST, ADDRESS, &[53, 1, 3]), lease).unwrap();
        assert_eq!((read(&renewed).0, &renewed[30..34]), (5, &ADDRESS.octets()[..]));
        // A client with a static address is only told the other options.
        let (kind, address, options) =
            read(&answer(&config(), &message(GUEST, ADDRESS, &[53, 1, 8]), lease).unwrap());
        assert_eq!((kind, address, find(&options, 51)), (5, none, None));
    }

    #[test]
    fn another_address_is_refused_and_others_get_no_answer() {
        let none = Ipv4Addr::UNSPECIFIED;
        let wrong = [53, 1, 3, 50, 4, 10, 86, 0, 6];
        let (kind, address, options) =
            read(&answer(&config(), &message(GUEST, none, &wrong), lease).unwrap());
        assert_eq!((kind, address, find(&options, 51)), (6, none, None));
        let silent = |frame: &[u8]| assert_eq!(answer(&config(), frame, lease), None);
        // An unknown guest; another server's client; a release; a relay; a request for another host.
        silent(&message(Mac([2, 0, 0, 0, 0, 9]), none, &[53, 1, 1]));
        silent(&message(GUEST, none, &[53, 1, 3, 54, 4, 10, 86, 0, 9]));
        silent(&message(GUEST, none, &[53, 1, 7]));
        for at in [24, 28] {
            let mut other = message(GUEST, none, &[53, 1, 1]);
            other[ETH + IP + UDP + at] ^= 1;
            silent(&other);
        }
    }

    #[test]
    fn the_servers_mac_is_told_unless_its_address_is_the_routers() {
        let body =
            [&[0, 1, 8, 0, 6, 4, 0, 1][..], &GUEST.0, &ADDRESS.octets(), &[0; 6], &SERVER.octets()].concat();
        let question = ethernet(Mac::BROADCAST, GUEST, 0x0806, &body);
        let told = answer(&config(), &question, lease).unwrap();
        assert_eq!(
            (&told[..6], &told[20..22], &told[22..28]),
            (&GUEST.0[..], &[0, 2][..], &config().mac().0[..])
        );
        assert_eq!(
            (&told[28..32], &told[32..38], &told[38..]),
            (&SERVER.octets()[..], &GUEST.0[..], &ADDRESS.octets()[..])
        );
        let router = DhcpConfig { router: Some(SERVER), ..config() };
        assert_eq!(answer(&router, &question, lease), None);
    }

    #[test]
    fn an_address_lies_within_its_subnet() {
        let own: SubnetAddress = "10.86.0.1/24".parse().unwrap();
        assert!(own.has(ADDRESS));
        for outside in ["10.86.1.5", "10.86.0.0", "10.86.0.255"] {
            assert!(!own.has(outside.parse().unwrap()), "{outside}");
        }
        for text in ["10.86.0.1", "10.86.0.0/24", "10.86.0.1/31", "10.86.0.1/0", "10.86.0.255/24", "x/24"] {
            assert!(text.parse::<SubnetAddress>().unwrap_err().contains("such as 10.86.0.1/24"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_frame_is_too_broken_to_be_looked_at(
            bytes in proptest::collection::vec(any::<u8>(), 0..700),
            cut in 0usize..400,
            options in proptest::collection::vec(any::<u8>(), 0..60),
            at in 0usize..340,
            value in any::<u8>(),
        ) {
            let _any = answer(&config(), &bytes, |_| lease(GUEST));
            let mut near = message(GUEST, Ipv4Addr::UNSPECIFIED, &options);
            let cut = cut.min(near.len());
            let _cut = answer(&config(), &near[..cut], lease);
            let at = at.min(near.len() - 1);
            near[at] = value;
            if let Some(reply) = answer(&config(), &near, lease) {
                prop_assert!(reply.len() < 1514);
            }
        }
    }
}
