// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own multicast querier, for networks without a multicast router: it asks guests for the groups that they have
//! joined (IGMPv3, RFC 3376 §4.1; MLDv2, RFC 3810 §5.1), so that [snooping](crate::forwarding::multicast) works there too.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::Responder;
use super::wire::{IPV6, ethernet, group_mac, ipv6, sum};
use crate::frames::frame::Mac;
use crate::frames::headers::protocol;
use crate::policy::spoof::link_local;

/// The querier's MAC, a local one.
pub const MAC: Mac = Mac([0x0a, 0x54, 0, 0, 0, 1]);
/// Time from one query to the next (RFC 3376 §8.2).
pub const PERIOD: Duration = Duration::from_secs(125);
/// Time from the first query to the second (RFC 3376 §8.6).
pub const SECOND: Duration = Duration::from_secs(31);
/// The robustness variable, and [`PERIOD`] in seconds, as in a query.
const ROBUSTNESS_AND_PERIOD: [u8; 2] = [2, 125];

/// The service.
pub struct Querier;

impl Responder for Querier {
    fn answer(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn announcements(&self) -> Vec<Vec<u8>> {
        vec![igmp(), mld()]
    }
}

/// Makes a general query to all systems, answered within ten seconds, from address 0.0.0.0 (RFC 4541 §2.1.1).
fn igmp() -> Vec<u8> {
    let mut message = [0x11, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    message[8..10].copy_from_slice(&ROBUSTNESS_AND_PERIOD);
    let check = sum(&message, 0);
    message[2..4].copy_from_slice(&check);
    // A header with the router alert option (RFC 2113), for the next hop only.
    let mut packet =
        vec![0x46, 0xc0, 0, 36, 0, 0, 0, 0, 1, protocol::IGMP, 0, 0, 0, 0, 0, 0, 224, 0, 0, 1, 148, 4, 0, 0];
    let check = sum(&packet, 0);
    packet[10..12].copy_from_slice(&check);
    packet.extend(message);
    ethernet(Mac([1, 0, 0x5e, 0, 0, 1]), MAC, 0x0800, &packet)
}

/// Makes a general query to all nodes, answered within ten seconds.
fn mld() -> Vec<u8> {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut message = vec![130, 0, 0, 0];
    message.extend(10_000u16.to_be_bytes());
    message.extend([0; 18]);
    message.extend(ROBUSTNESS_AND_PERIOD);
    message.extend([0; 2]);
    let mut packet = ipv6([link_local(MAC), ALL_NODES], (protocol::ICMPV6, 2), 1, &message);
    // The router alert option in front (RFC 2711).
    const ALERT: [u8; 8] = [protocol::ICMPV6, 0, 5, 2, 0, 0, 1, 0];
    packet.splice(IPV6..IPV6, ALERT);
    packet[6] = protocol::HOP_BY_HOP;
    packet[5] += ALERT.len() as u8;
    ethernet(group_mac(ALL_NODES), MAC, 0x86dd, &packet)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::headers::Headers;
    use crate::frames::membership::{Message, read};

    #[test]
    fn its_questions_are_queries_with_right_sums() {
        for frame in Querier.announcements() {
            let headers = Headers::parse(&frame, frame.len() as u32);
            let query = read(&headers, &frame).expect("a message about groups");
            let Message::Query { response, lifetime } = query else { panic!("{query:?}") };
            assert_eq!((response.as_secs(), lifetime.as_secs()), (10, 260));
            let at = usize::from(headers.l4);
            let pseudo = if frame[12] == 0x86 {
                let length = (frame.len() - at) as u32;
                u32::from(!u16::from_be_bytes(sum(&frame[22..54], length + 58)))
            } else {
                assert_eq!(sum(&frame[14..38], 0), [0, 0], "IP's sum");
                0
            };
            assert_eq!(sum(&frame[at..], pseudo), [0, 0]);
        }
    }
}
