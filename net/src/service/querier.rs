// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own multicast querier, for networks without a multicast router: it asks guests for the groups that they have
//! joined (IGMPv3, RFC 3376 §4.1; MLDv2, RFC 3810 §5.1), so that [snooping](crate::forwarding::multicast) works there too.
//!
//! It asks on every VLAN of the guests' ports from time to time, and at once when a host has left a group: other hosts behind the
//! same port may still be members (RFC 3376 §6.6.3).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::Responder;
use super::wire::{IPV6, ethernet, group_mac, ipv6, sum};
use crate::frames::frame::Mac;
use crate::frames::headers::{Headers, LOOK, Net, TPID_VLAN, protocol};
use crate::frames::membership::{Message, read};
use crate::policy::spoof::link_local;

/// The querier's MAC, a local one.
pub const MAC: Mac = Mac([0x0a, 0x54, 0, 0, 0, 1]);
/// Time from one query to the next (RFC 3376 §8.2).
pub const PERIOD: Duration = Duration::from_secs(125);
/// Time from the first query to the second (RFC 3376 §8.6).
pub const SECOND: Duration = Duration::from_secs(31);
/// The robustness variable, and [`PERIOD`] in seconds, as in a query.
const ROBUSTNESS_AND_PERIOD: [u8; 2] = [2, 125];
/// Time to answer a general query (RFC 3376 §8.3).
const RESPONSE: Duration = Duration::from_secs(10);
/// Time to answer a query after a host has left a group (RFC 3376 §8.8).
const LAST_MEMBER: Duration = Duration::from_secs(1);
const ALL_SYSTEMS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

pub struct Querier;

impl Responder for Querier {
    /// Asks for other members of the group that a host has left. A report by which it left several groups is followed by a
    /// general query.
    fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let headers = Headers::parse(&frame[..frame.len().min(LOOK)], frame.len() as u32);
        let Some(Message::Report(report)) = read(&headers, frame) else { return None };
        let mut left = Vec::new();
        report.each(|change| left.extend(change.filter(|(_, joined)| !joined).map(|(group, _)| group)));
        let query = match (&left[..], headers.net) {
            ([], _) => return None,
            ([IpAddr::V4(group)], _) => igmp(Some(*group).filter(Ipv4Addr::is_multicast)?, LAST_MEMBER),
            ([IpAddr::V6(group)], _) => mld(Some(*group).filter(Ipv6Addr::is_multicast)?, LAST_MEMBER),
            (_, Net::Ipv4) => igmp(Ipv4Addr::UNSPECIFIED, LAST_MEMBER),
            _ => mld(Ipv6Addr::UNSPECIFIED, LAST_MEMBER),
        };
        Some(tagged(headers.only_tag().unwrap_or(0) & VID, query))
    }

    fn announcements(&self, vlans: &BTreeSet<u16>) -> Vec<Vec<u8>> {
        let general = [igmp(Ipv4Addr::UNSPECIFIED, RESPONSE), mld(Ipv6Addr::UNSPECIFIED, RESPONSE)];
        vlans.iter().flat_map(|vid| general.clone().map(|query| tagged(*vid, query))).collect()
    }
}

/// The number in a tag.
const VID: u16 = 0xfff;

/// Puts the tag of a VLAN (0: none) into a frame.
fn tagged(vid: u16, mut frame: Vec<u8>) -> Vec<u8> {
    const MACS: usize = 12;
    if vid != 0 {
        frame.splice(MACS..MACS, [TPID_VLAN.to_be_bytes(), vid.to_be_bytes()].concat());
    }
    frame
}

/// Makes a query for `group` (0.0.0.0: for all, to all systems), from address 0.0.0.0 (RFC 4541 §2.1.1).
fn igmp(group: Ipv4Addr, response: Duration) -> Vec<u8> {
    let to = if group.is_unspecified() { ALL_SYSTEMS } else { group };
    // The time in tenths of seconds, at most 127 of them.
    let mut message = [0x11, (response.as_millis() / 100) as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    message[4..8].copy_from_slice(&group.octets());
    message[8..10].copy_from_slice(&ROBUSTNESS_AND_PERIOD);
    let check = sum(&message, 0);
    message[2..4].copy_from_slice(&check);
    // A header with the router alert option (RFC 2113), for the next hop only.
    let mut packet = vec![0x46, 0xc0, 0, 36, 0, 0, 0, 0, 1, protocol::IGMP, 0, 0, 0, 0, 0, 0];
    packet.extend(to.octets());
    packet.extend([148, 4, 0, 0]);
    let check = sum(&packet, 0);
    packet[10..12].copy_from_slice(&check);
    packet.extend(message);
    let [_, b, c, d] = to.octets();
    ethernet(Mac([1, 0, 0x5e, b & 0x7f, c, d]), MAC, 0x0800, &packet)
}

/// Makes a query for `group` (::: for all, to all nodes).
fn mld(group: Ipv6Addr, response: Duration) -> Vec<u8> {
    let to = if group.is_unspecified() { ALL_NODES } else { group };
    let mut message = vec![130, 0, 0, 0];
    // In milliseconds, at most 32767 of them.
    message.extend((response.as_millis() as u16).to_be_bytes());
    message.extend([0; 2]);
    message.extend(group.octets());
    message.extend(ROBUSTNESS_AND_PERIOD);
    message.extend([0; 2]);
    let mut packet = ipv6([link_local(MAC), to], (protocol::ICMPV6, 2), 1, &message);
    // The router alert option in front (RFC 2711).
    const ALERT: [u8; 8] = [protocol::ICMPV6, 0, 5, 2, 0, 0, 1, 0];
    packet.splice(IPV6..IPV6, ALERT);
    packet[6] = protocol::HOP_BY_HOP;
    packet[5] += ALERT.len() as u8;
    ethernet(group_mac(to), MAC, 0x86dd, &packet)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the time to answer, the lifetime of an answer and whether it asks for all groups; its checksums are right.
    fn asked(frame: &[u8]) -> (u64, u64, bool) {
        let headers = Headers::parse(frame, frame.len() as u32);
        let query = read(&headers, frame).expect("a message about groups");
        let Message::Query { response, lifetime, general } = query else { panic!("{query:?}") };
        let (ip, at) = (usize::from(headers.at), usize::from(headers.l4));
        let pseudo = if headers.net == Net::Ipv6 {
            let length = (frame.len() - at) as u32;
            u32::from(!u16::from_be_bytes(sum(&frame[ip + 8..ip + 40], length + 58)))
        } else {
            assert_eq!(sum(&frame[ip..at], 0), [0, 0], "IP's sum");
            0
        };
        assert_eq!(sum(&frame[at..], pseudo), [0, 0]);
        (response.as_secs(), lifetime.as_secs(), general)
    }

    #[test]
    fn it_asks_on_every_vlan_in_both_versions_of_ip() {
        let frames = Querier.announcements(&BTreeSet::from([0, 5]));
        assert_eq!(frames.iter().map(|f| asked(f)).collect::<Vec<_>>(), [(10, 260, true); 4]);
        let types: Vec<_> = frames.iter().map(|f| [f[12], f[13]]).collect();
        assert_eq!(types, [[0x08, 0], [0x86, 0xdd], [0x81, 0], [0x81, 0]]);
        assert_eq!(frames[2][14..16], [0, 5]);
    }

    #[test]
    fn after_a_leave_it_asks_the_groups_other_members_on_the_same_vlan() {
        let leaves = |group: Ipv4Addr| {
            let mut frame = igmp(group, LAST_MEMBER);
            // The query becomes a leave of eight bytes.
            frame[14 + 24] = 0x17;
            tagged(7, frame)
        };
        let query = Querier.answer(&leaves(Ipv4Addr::new(239, 1, 2, 3))).expect("a question");
        assert_eq!(asked(&query), (1, 251, false));
        assert_eq!((&query[..6], &query[12..16]), (&[1, 0, 0x5e, 1, 2, 3][..], &[0x81, 0, 0, 7][..]));
        assert_eq!(Querier.answer(&leaves(Ipv4Addr::new(10, 0, 0, 1))), None, "no group");

        let group: Ipv6Addr = "ff15::7".parse().unwrap();
        let mut done = mld(group, LAST_MEMBER);
        done[14 + IPV6 + 8] = 132;
        let query = Querier.answer(&done).expect("a question");
        assert_eq!((asked(&query), &query[..6]), ((1, 251, false), &group_mac(group).0[..]));
        done[14 + IPV6 + 8] = 131;
        assert_eq!(Querier.answer(&done), None, "it joins");

        // A report of two groups that were left.
        let mut two = igmp(Ipv4Addr::new(224, 0, 0, 22), LAST_MEMBER);
        two.truncate(14 + 24);
        two[17] = 24 + 24;
        two.extend([0x22, 0, 0, 0, 0, 0, 0, 2, 3, 0, 0, 0, 239, 1, 1, 1, 3, 0, 0, 0, 239, 1, 1, 2]);
        let query = Querier.answer(&two).expect("a question");
        assert!(asked(&query).2, "for all groups");
    }
}
