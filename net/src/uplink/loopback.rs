// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a guest behind passt from the host's loopback addresses, and so from services that the host keeps to itself: passt of Debian 12
//! connects to one that the guest sends to. At its gateway's address passt leads it nowhere: see `control::loopback`.

use std::net::IpAddr;

use crate::frames::headers::{Headers, Net};
use crate::ports::counters::Reason;

/// Returns whether an address means the receiving host itself: the loopback, "this host" (RFC 1122, §3.2.1.3), and IPv4 in IPv6,
/// which sockets take for IPv4.
fn is_internal(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => matches!(ip.octets()[0], 0 | 127),
        IpAddr::V6(ip) => matches!(ip.segments(), [0, 0, 0, 0, 0, 0 | 0xffff, ..]),
    }
}

/// Checks a frame of `len` bytes that starts with `head` and is for passt.
///
/// # Errors
/// The reason for dropping it.
pub fn check(head: &[u8], len: u32) -> Result<(), Reason> {
    let headers = Headers::parse(head, len);
    if headers.net == Net::Unknown {
        return Err(Reason::Unparsable);
    }
    let Some((from, to)) = headers.addresses(head) else { return Ok(()) };
    // From no address: a host that has none yet.
    if is_internal(to) || is_internal(from) && !from.is_unspecified() {
        return Err(Reason::Loopback);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::headers::LOOK;

    const OWN: [u8; 4] = [192, 0, 2, 7];
    const GATEWAY: [u8; 4] = [192, 0, 2, 1];

    fn datagram(from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
        let start = [&[0; 12][..], &[8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]].concat();
        [&start[..], &from, &to, &[0, 68, 0, 67, 0, 8, 0, 0]].concat()
    }

    fn check(frame: &[u8]) -> Result<(), Reason> {
        super::check(&frame[..frame.len().min(LOOK)], frame.len() as u32)
    }

    #[test]
    fn a_loopback_address_is_neither_source_nor_destination_and_no_address_is_a_source() {
        let passes = |from, to| check(&datagram(from, to)) == Ok(());
        assert!(passes([0; 4], [255; 4]) && passes(OWN, GATEWAY));
        for inside in [[127, 0, 0, 1], [127, 255, 1, 2], [0, 1, 2, 3]] {
            assert!(!passes(inside, GATEWAY) && !passes(OWN, inside), "{inside:?}");
        }
        assert!(!passes(OWN, [0; 4]));
    }

    #[test]
    fn a_frame_that_cannot_be_read_does_not_pass() {
        let frame = datagram(OWN, GATEWAY);
        let of_a_frame_cut_for_a_port_without_policy = &frame[..16];
        let checked = super::check(of_a_frame_cut_for_a_port_without_policy, frame.len() as u32);
        assert_eq!(checked, Err(Reason::Unparsable));
    }
}
