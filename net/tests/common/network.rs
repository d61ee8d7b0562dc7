// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interfaces in a test's own network namespace, and packets.

use std::process::Command;

use tombolo_net::frames::frame::{GSO_UDP_L4, Mac, NEEDS_CSUM, NetHeader};

use super::wait_for;

pub fn sh(text: &str) -> String {
    let output = Command::new("sh").args(["-ec", text]).output().unwrap();
    assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes two interfaces, v0 and v1, connected to each other and without other traffic.
pub fn cable() {
    sh("ip link add v0 type veth peer name v1; for d in v0 v1; do
        echo 1 >/proc/sys/net/ipv6/conf/$d/disable_ipv6; ip link set $d up; done");
    for end in ["v0", "v1"] {
        // Until the kernel has noticed that its peer is up too, the interface drops packets.
        wait_for("the cable", || {
            let said = sh(&format!("ip link show {end}"));
            (said.contains("state UP") && !said.contains("qdisc noop ")).then_some(())
        });
    }
}

/// The Internet checksum.
pub fn sum(bytes: &[u8]) -> [u8; 2] {
    let mut s: u32 = bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0))).sum();
    while s > 0xffff {
        s = (s & 0xffff) + (s >> 16);
    }
    (!(s as u16)).to_be_bytes()
}

/// Asks for an IPv4 frame's UDP payload to be cut into datagrams of so many bytes.
pub fn datagrams_of(size: usize) -> NetHeader {
    NetHeader {
        flags: NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        hdr_len: 42,
        gso_size: size as u16,
        csum_start: 34,
        csum_offset: 6,
    }
}

pub fn ethernet(to: Mac, from: Mac, ethertype: u16, body: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &ethertype.to_be_bytes(), body].concat()
}

pub fn ipv4(to: [u8; 4], from: [u8; 4], protocol: u8, body: &[u8]) -> Vec<u8> {
    let len = ((20 + body.len()) as u16).to_be_bytes();
    let mut head = [&[0x45, 0][..], &len, &[0, 0, 0, 0, 64, protocol, 0, 0], &from, &to].concat();
    let check = sum(&head);
    head[10..12].copy_from_slice(&check);
    head.extend(body);
    head
}

pub fn arp(operation: u8, mac: Mac, ip: [u8; 4], to: Mac, target: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, operation][..], &mac.0, &ip, &to.0, &target].concat()
}
