// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests that leave work to their receivers, and frames that ask for it.

use tombolo_net::frames::frame::{GSO_TCPV4, NEEDS_CSUM, NetHeader};
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net_driver::NicConfig;

use super::Rig;

pub fn offloading() -> NicConfig {
    NicConfig {
        features: NicConfig::default().features | OFFLOADS,
        tx_buffer: 65_700,
        ..NicConfig::default()
    }
}

pub fn ethernet(ethertype: u16, body: &[u8]) -> Vec<u8> {
    [&Rig::mac(1).0[..], &Rig::mac(0).0, &ethertype.to_be_bytes(), body].concat()
}

/// A packet from 10.0.0.1 whose length field says `total`.
pub fn ipv4(total: usize, fragment: u16, protocol: u8, body: &[u8]) -> Vec<u8> {
    let head = [0x45, 0, (total >> 8) as u8, total as u8, 0, 1];
    let packet = [&head[..], &fragment.to_be_bytes(), &[64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2], body];
    ethernet(0x0800, &packet.concat())
}

/// A TCP segment with `data` bytes, to be segmented into pieces of `size`; `behind` bytes follow the packet.
pub fn tcp(data: usize, size: u16, behind: usize) -> (NetHeader, Vec<u8>) {
    let head = [0, 9, 0, 10, 0, 0, 0, 0, 0, 0, 0, 7, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    let body = [&head[..], &vec![1; data + behind]].concat();
    let asked = NetHeader { gso_type: GSO_TCPV4, gso_size: size, ..NetHeader::default() };
    let header = NetHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..asked };
    (header, ipv4(40 + data, 0, 6, &body))
}
