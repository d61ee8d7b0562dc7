// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own frames: headers and the Internet checksum (RFC 1071).

use std::net::Ipv6Addr;

use crate::frames::frame::Mac;

/// Bytes of an Ethernet header.
pub(super) const ETH: usize = 14;
/// Bytes of an IPv6 header.
pub(super) const IPV6: usize = 40;

/// Makes an Ethernet frame.
pub(super) fn ethernet(to: Mac, from: Mac, ethertype: u16, body: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &ethertype.to_be_bytes(), body].concat()
}

/// Returns the Internet checksum of `first` and `bytes`.
pub(super) fn sum(bytes: &[u8], first: u32) -> [u8; 2] {
    let word = |c: &[u8]| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0));
    let mut s = bytes.chunks(2).map(word).sum::<u32>() + first;
    while s > 0xffff {
        s = (s & 0xffff) + (s >> 16);
    }
    (!(s as u16)).to_be_bytes()
}

/// Makes an IPv6 packet with `body`, a transport header of `protocol` and its data, and stores the checksum at
/// `checksum_at`.
pub(super) fn ipv6(
    [from, to]: [Ipv6Addr; 2],
    (protocol, checksum_at): (u8, usize),
    hop_limit: u8,
    body: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((body.len() as u16).to_be_bytes());
    packet.extend([protocol, hop_limit]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(body);
    // The pseudo-header: the addresses, the length and the protocol (RFC 8200 §8.1).
    let check = match sum(&packet[8..], body.len() as u32 + u32::from(protocol)) {
        [0, 0] => [0xff, 0xff],
        check => check,
    };
    packet[IPV6 + checksum_at..][..2].copy_from_slice(&check);
    packet
}

/// Returns the MAC of an IPv6 multicast group (RFC 2464 §7).
pub(super) fn group_mac(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    Mac([0x33, 0x33, a, b, c, d])
}
