// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages of hosts and routers about multicast groups: IGMP (RFC 2236, RFC 3376) and MLD (RFC 2710, RFC 3810), parsed from
//! the switch's own copy of a frame's first bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crate::frames::headers::{Headers, Net, Part, get, protocol};

/// Bytes at the front of a frame that are parsed for reports.
pub const REPORT_LOOK: usize = 1600;

/// Types of IGMP messages.
pub(crate) mod igmp {
    pub const QUERY: u8 = 0x11;
    pub const REPORT_V1: u8 = 0x12;
    pub const REPORT_V2: u8 = 0x16;
    pub const LEAVE: u8 = 0x17;
    pub const REPORT_V3: u8 = 0x22;
    /// Multicast router advertisement (RFC 4286).
    pub const ROUTER_ADVERTISEMENT: u8 = 0x30;
}

/// Types of ICMPv6 messages about groups.
pub(crate) mod mld {
    pub const QUERY: u8 = 130;
    pub const REPORT: u8 = 131;
    pub const DONE: u8 = 132;
    pub const REPORT_V2: u8 = 143;
    /// Multicast router advertisement (RFC 4286).
    pub const ROUTER_ADVERTISEMENT: u8 = 151;
}

/// A message about groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A router's query.
    Query {
        /// The time that hosts have to answer.
        response: Duration,
        /// The time for which an answer is valid.
        lifetime: Duration,
        /// It asks for all groups, not for one.
        general: bool,
    },
    /// A host's report of groups that it has joined and left.
    Report(Report<'a>),
    /// Possibly a report: a fragment or a header that can't be followed to its end.
    Hidden,
}

/// A host's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report<'a> {
    /// One group, joined or left (IGMPv1, IGMPv2, MLDv1).
    One { group: IpAddr, joined: bool },
    /// Records of many groups (IGMPv3, MLDv2).
    Many {
        /// The number of records.
        count: u16,
        records: &'a [u8],
        /// Of IPv6 groups.
        v6: bool,
    },
}

/// The group that was joined or left; None: the report goes on beyond the bytes that were read, or is inconsistent.
pub type Change = Option<(IpAddr, bool)>;

/// Parses the message about groups in a frame with these `headers` that starts with `head`. None: it has none.
#[must_use]
pub fn read<'a>(headers: &Headers, head: &'a [u8]) -> Option<Message<'a>> {
    match headers.net {
        Net::Ipv4 if headers.protocol == protocol::IGMP => Some(if headers.part == Part::Whole {
            read_igmp(body(headers, head)).unwrap_or(Message::Hidden)
        } else {
            Message::Hidden
        }),
        Net::Ipv6 if headers.protocol == protocol::ICMPV6 && headers.part != Part::Later => {
            let body = body(headers, head);
            match *body.first()? {
                mld::QUERY | mld::REPORT | mld::DONE | mld::REPORT_V2 if headers.part != Part::Whole => {
                    Some(Message::Hidden)
                }
                kind @ (mld::QUERY | mld::REPORT | mld::DONE | mld::REPORT_V2) => {
                    Some(read_mld(kind, body).unwrap_or(Message::Hidden))
                }
                _ => None,
            }
        }
        Net::Unknown => Some(Message::Hidden).filter(|_| may_be_ip(headers, head)),
        _ => None,
    }
}

/// Returns whether an unparsable frame may be IP: not with another type, nor with a length (LLC).
fn may_be_ip(headers: &Headers, head: &[u8]) -> bool {
    let ethertype = usize::from(headers.at).checked_sub(2).and_then(|at| get(head, at));
    headers.tags > 0 && headers.at == 0 || matches!(ethertype, Some([0x08, 0x00] | [0x86, 0xdd]))
}

/// Returns the packet's payload, as far as it is in `head`.
fn body<'a>(headers: &Headers, head: &'a [u8]) -> &'a [u8] {
    let end = head.len().min(headers.end as usize);
    head.get(usize::from(headers.l4)..end).unwrap_or_default()
}

fn read_igmp(body: &[u8]) -> Option<Message<'_>> {
    let (&kind, code) = (body.first()?, *body.get(1)?);
    let group = IpAddr::from(Ipv4Addr::from(get::<4>(body, 4)?));
    let one = |joined| Some(Message::Report(Report::One { group, joined }));
    match kind {
        igmp::QUERY => {
            // IGMPv1 has no time, IGMPv2 tenths of seconds, and so does IGMPv3, in a floating form beyond 127.
            let tenths = match (code, body.len() >= 12) {
                (0, _) => 100,
                (code, true) => float(code.into(), 7, 4),
                (code, false) => code.into(),
            };
            let response = Duration::from_millis(100 * tenths);
            let lifetime = lifetime(body.get(8..10), response);
            Some(Message::Query { response, lifetime, general: group.is_unspecified() })
        }
        igmp::REPORT_V1 | igmp::REPORT_V2 => one(true),
        igmp::LEAVE => one(false),
        igmp::REPORT_V3 => {
            let count = u16::from_be_bytes(get(body, 6)?);
            Some(Message::Report(Report::Many { count, records: body.get(8..)?, v6: false }))
        }
        // Other protocols (DVMRP, PIM) don't change hosts' reports.
        _ => Some(Message::Hidden).filter(|_| kind == igmp::ROUTER_ADVERTISEMENT),
    }
}

fn read_mld(kind: u8, body: &[u8]) -> Option<Message<'_>> {
    let group = || Some(IpAddr::from(Ipv6Addr::from(get::<16>(body, 8)?)));
    match kind {
        mld::QUERY => {
            let code = u16::from_be_bytes(get(body, 4)?);
            let general = group()?.is_unspecified();
            let ms = if body.len() >= 28 { float(code.into(), 15, 12) } else { code.into() };
            let response = Duration::from_millis(ms);
            Some(Message::Query { response, lifetime: lifetime(body.get(24..26), response), general })
        }
        mld::REPORT_V2 => {
            let count = u16::from_be_bytes(get(body, 6)?);
            Some(Message::Report(Report::Many { count, records: body.get(8..)?, v6: true }))
        }
        _ => Some(Message::Report(Report::One { group: group()?, joined: kind == mld::REPORT })),
    }
}

/// Decodes a number whose highest of `bits` + 1 bits marks a mantissa of `mantissa` bits and an exponent (RFC 3376 §4.1.1).
fn float(code: u64, bits: u32, mantissa: u32) -> u64 {
    if code >> bits == 0 {
        return code;
    }
    let exponent = code >> mantissa & 7;
    (code & ((1 << mantissa) - 1) | 1 << mantissa) << (exponent + 3)
}

/// Returns how long a membership reported in answer to a query is valid (RFC 3376 §8.4), by the query's robustness and
/// interval; older versions have neither.
fn lifetime(said: Option<&[u8]>, response: Duration) -> Duration {
    let (robustness, interval) = match said {
        Some(&[flags, interval]) => (u64::from(flags & 7), float(interval.into(), 7, 4)),
        _ => (0, 0),
    };
    let robustness = if robustness == 0 { 2 } else { robustness };
    let interval = if interval == 0 { 125 } else { interval };
    Duration::from_secs(robustness * interval) + response
}

impl Report<'_> {
    /// Calls `change` for each group that was joined or left, up to the first incomplete record.
    pub fn each(&self, mut change: impl FnMut(Change)) {
        match *self {
            Report::One { group, joined } => change(Some((group, joined))),
            Report::Many { count, records, v6 } => {
                let mut rest = records;
                for _ in 0..count {
                    let Some((said, next)) = record(rest, v6) else { return change(None) };
                    if let Some(said) = said {
                        change(Some(said));
                    }
                    rest = next;
                }
            }
        }
    }
}

/// Parses a record of IGMPv3 or MLDv2: the group, if it was joined or left, and the bytes after the record.
#[expect(clippy::type_complexity, reason = "a pair of what is said and what is left")]
fn record(bytes: &[u8], v6: bool) -> Option<(Option<(IpAddr, bool)>, &[u8])> {
    const IS_INCLUDE: u8 = 1;
    const IS_EXCLUDE: u8 = 2;
    const TO_INCLUDE: u8 = 3;
    const TO_EXCLUDE: u8 = 4;
    const ALLOW: u8 = 5;
    let [kind, auxiliary, a, b] = get(bytes, 0)?;
    let sources = usize::from(u16::from_be_bytes([a, b]));
    let (group, size) = if v6 {
        (IpAddr::from(Ipv6Addr::from(get::<16>(bytes, 4)?)), 16)
    } else {
        (IpAddr::from(Ipv4Addr::from(get::<4>(bytes, 4)?)), 4)
    };
    // Sources are ignored: a host that wants some of a group gets all of it.
    let joined = match kind {
        IS_EXCLUDE | TO_EXCLUDE => Some(true),
        IS_INCLUDE | ALLOW => (sources > 0).then_some(true),
        TO_INCLUDE => Some(sources > 0),
        _ => None,
    };
    let next = bytes.get(4 + size + size * sources + 4 * usize::from(auxiliary)..)?;
    Some((joined.map(|j| (group, j)), next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v4(message: &[u8]) -> Vec<u8> {
        let mut f = vec![1, 0, 0x5e, 0, 0, 22, 2, 0, 0, 0, 0, 1, 8, 0];
        f.extend([
            0x46,
            0,
            0,
            24 + message.len() as u8,
            0,
            0,
            0,
            0,
            1,
            2,
            0,
            0,
            10,
            0,
            0,
            1,
            224,
            0,
            0,
            22,
            148,
            4,
            0,
            0,
        ]);
        f.extend(message);
        f
    }

    fn v6(message: &[u8]) -> Vec<u8> {
        let mut f = vec![0x33, 0x33, 0, 0, 0, 0x16, 2, 0, 0, 0, 0, 1, 0x86, 0xdd];
        f.extend([0x60, 0, 0, 0, 0, 8 + message.len() as u8, 0, 1]);
        f.extend([0; 32]);
        f.extend([58, 0, 5, 2, 0, 0, 1, 0]);
        f.extend(message);
        f
    }

    fn message(f: &[u8]) -> Option<Message<'_>> {
        read(&Headers::parse(f, f.len() as u32), f)
    }

    fn changes(f: &[u8]) -> Vec<Change> {
        let Some(Message::Report(report)) = message(f) else { panic!("{:?}", message(f)) };
        let mut all = Vec::new();
        report.each(|c| all.push(c));
        all
    }

    fn change(group: &str, joined: bool) -> Change {
        Some((group.parse().unwrap(), joined))
    }

    #[test]
    fn reports_of_every_version_say_what_was_joined_and_left() {
        for kind in [0x12, 0x16] {
            assert_eq!(changes(&v4(&[kind, 0, 0, 0, 239, 1, 2, 3])), [change("239.1.2.3", true)]);
        }
        assert_eq!(changes(&v4(&[0x17, 0, 0, 0, 239, 1, 2, 3])), [change("239.1.2.3", false)]);
        let mut three = vec![0x22, 0, 0, 0, 0, 0, 0, 3];
        three.extend([4, 0, 0, 0, 239, 0, 0, 1]);
        three.extend([3, 1, 0, 0, 239, 0, 0, 2, 9, 9, 9, 9]);
        three.extend([6, 0, 0, 1, 239, 0, 0, 3, 10, 0, 0, 9]);
        assert_eq!(changes(&v4(&three)), [change("239.0.0.1", true), change("239.0.0.2", false)]);
        let group: Ipv6Addr = "ff15::7".parse().unwrap();
        for (kind, joined) in [(131, true), (132, false)] {
            let one = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &group.octets()].concat();
            assert_eq!(changes(&v6(&one)), [change("ff15::7", joined)]);
        }
        let mut many = vec![143, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 1];
        many.extend(group.octets());
        many.extend([9; 16]);
        many.extend([4, 0, 0, 0]);
        assert_eq!(changes(&v6(&many)), [change("ff15::7", true), None], "the second is cut short");
    }

    #[test]
    fn queries_say_how_long_answers_take_and_hold() {
        let times = |f: &[u8]| match message(f) {
            Some(Message::Query { response, lifetime, general: true }) => {
                (response.as_millis(), lifetime.as_secs())
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(times(&v4(&[0x11, 0, 0, 0, 0, 0, 0, 0])), (10_000, 260), "IGMPv1");
        assert_eq!(times(&v4(&[0x11, 0xff, 0, 0, 0, 0, 0, 0])), (25_500, 275), "IGMPv2");
        assert_eq!(times(&v4(&[0x11, 0x80, 0, 0, 0, 0, 0, 0, 3, 0x80, 0, 0])), (12_800, 396), "IGMPv3");
        let mut query = vec![130, 0, 0, 0, 0x27, 0x10, 0, 0];
        query.extend([0; 16]);
        assert_eq!(times(&v6(&query)), (10_000, 260), "MLDv1");
        query.extend([2, 60, 0, 0]);
        query[4] = 0x80;
        assert_eq!(times(&v6(&query)), (8 * 0x1010, 120 + 32), "MLDv2");
    }

    #[test]
    fn what_hides_a_report_is_taken_for_one() {
        let report = [0x16, 0, 0, 0, 239, 1, 2, 3];
        let mut fragment = v4(&report);
        fragment[20] = 0x20;
        assert_eq!(message(&fragment), Some(Message::Hidden));
        assert_eq!(message(&v4(&[0x16, 0])), Some(Message::Hidden), "cut short");
        let mut far = v6(&[0; 8]);
        far[55] = 100;
        assert_eq!(message(&far), Some(Message::Hidden), "a header that goes on out of sight");
        let mut udp = v4(&report);
        udp[23] = 17;
        assert_eq!(message(&udp), None);
        assert_eq!(message(&v6(&[135, 0, 0, 0])), None, "a solicitation");
        let llc = [&v4(&report)[..12], &[0, 40, 0x42, 0x42, 3], &[0; 37]].concat();
        assert_eq!(message(&llc), None);
        let tags = [&v4(&report)[..12], &[0x81, 0, 0, 0].repeat(3), &v4(&report)[12..]].concat();
        assert_eq!(message(&tags), Some(Message::Hidden), "behind more tags than are read");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            start in prop::collection::vec(prop::sample::select(vec![0x22u8, 143, 0x11, 130, 0, 1, 4]), 0..12),
        ) {
            let _any = message(&bytes);
            for f in [v4(&[&start[..], &bytes[..bytes.len().min(180)]].concat()), v6(&[&start[..], &bytes[..bytes.len().min(180)]].concat())] {
                if let Some(Message::Report(report)) = message(&f) {
                    let mut n = 0;
                    report.each(|_| n += 1);
                    prop_assert!(n <= 1 + f.len() / 8);
                }
            }
        }
    }
}
