// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages of hosts and routers about multicast groups, and frames for them.

use std::net::{Ipv4Addr, Ipv6Addr};

use tombolo_net::frames::frame::Mac;

/// An IPv4 packet of `protocol` in a frame.
pub fn ipv4(to: Mac, from: Mac, [source, dest]: [Ipv4Addr; 2], protocol: u8, body: &[u8]) -> Vec<u8> {
    let len = (20 + body.len()) as u16;
    let mut f =
        [&to.0[..], &from.0, &[8, 0, 0x45, 0], &len.to_be_bytes(), &[0, 0, 0, 0, 1, protocol, 0, 0]].concat();
    f.extend(source.octets());
    f.extend(dest.octets());
    f.extend(body);
    f
}

/// An IPv6 packet in a frame; its chain of headers begins with `next`.
pub fn ipv6(to: Mac, from: Mac, [source, dest]: [Ipv6Addr; 2], next: u8, body: &[u8]) -> Vec<u8> {
    let len = (body.len() as u16).to_be_bytes();
    let mut f = [&to.0[..], &from.0, &[0x86, 0xdd, 0x60, 0, 0, 0], &len, &[next, 255]].concat();
    f.extend(source.octets());
    f.extend(dest.octets());
    f.extend(body);
    f
}

/// The MAC of a group.
pub fn group4(group: Ipv4Addr) -> Mac {
    let [_, b, c, d] = group.octets();
    Mac([1, 0, 0x5e, b & 0x7f, c, d])
}

/// The MAC of a group.
pub fn group6(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    Mac([0x33, 0x33, a, b, c, d])
}

/// An IGMP message of eight bytes from `source`, to the group that hears it.
pub fn igmp(from: Mac, source: Ipv4Addr, kind: u8, group: Ipv4Addr) -> Vec<u8> {
    let to = match kind {
        0x11 => Ipv4Addr::new(224, 0, 0, 1),
        0x17 => Ipv4Addr::new(224, 0, 0, 2),
        _ => group,
    };
    let message = [&[kind, if kind == 0x11 { 100 } else { 0 }, 0, 0][..], &group.octets()].concat();
    ipv4(group4(to), from, [source, to], 2, &message)
}

/// An MLD message behind a router alert.
pub fn mld(from: Mac, source: Ipv6Addr, kind: u8, group: Ipv6Addr) -> Vec<u8> {
    let to = if kind == 130 { "ff02::1".parse().unwrap() } else { group };
    let mut body = vec![58, 0, 5, 2, 0, 0, 1, 0, kind, 0, 0, 0, 0x27, 0x10, 0, 0];
    body.extend(group.octets());
    ipv6(group6(to), from, [source, to], 0, &body)
}

/// A UDP datagram for a group.
pub fn datagram(from: Mac, source: Ipv4Addr, group: Ipv4Addr, seed: u8) -> Vec<u8> {
    let mut body = vec![0x20, 0, 0x20, 0, 0, 40, 0, 0];
    body.extend([seed; 32]);
    ipv4(group4(group), from, [source, group], 17, &body)
}
