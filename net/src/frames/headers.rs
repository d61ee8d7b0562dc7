// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The description of a frame: its tags, its network header and its transport header, parsed once from the switch's own
//! copy of the frame's first bytes. VLANs, anti-spoofing, rules, checksums, segmentation and the virtio-net header for a
//! receiver all use this description, so they can't disagree about the place of a field.
//!
//! The parser follows IEEE 802.1Q tags, IPv4 options, IPv6 extension headers (RFC 8200, RFC 4302) and fragments up to the
//! transport header. A packet that it can't follow to the end is [`Net::Unknown`], which guarded ports may not send.

use std::net::IpAddr;

use crate::frames::frame::{ETH_HEADER, Mac};

/// Bytes at the front of a frame that are copied and parsed: Ethernet, two tags, IPv6 and 110 bytes of extension headers,
/// and TCP without options.
pub const LOOK: usize = 192;
/// Most tags that are parsed.
const MAX_TAGS: u8 = 2;
/// IPv4 and IPv6 protocol numbers.
pub mod protocol {
    pub const HOP_BY_HOP: u8 = 0;
    pub const ICMP: u8 = 1;
    pub const IGMP: u8 = 2;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const DCCP: u8 = 33;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const AUTHENTICATION: u8 = 51;
    pub const ICMPV6: u8 = 58;
    pub const DESTINATION: u8 = 60;
    pub const SCTP: u8 = 132;
    pub const MOBILITY: u8 = 135;
    pub const UDP_LITE: u8 = 136;
    pub const HIP: u8 = 139;
    pub const SHIM6: u8 = 140;
}

/// The network layer of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Net {
    /// IPv4, with a complete and consistent header.
    Ipv4,
    /// IPv6, parsed up to its transport header.
    Ipv6,
    /// ARP for IPv4 over Ethernet.
    Arp,
    /// Another EtherType, without IP addresses.
    Other(u16),
    /// Not parsable: too short, more than two tags, LLC, an inconsistent header, extension headers that go on beyond
    /// [`LOOK`].
    #[default]
    Unknown,
}

/// The part of an IP packet in a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    Whole,
    /// The first fragment, with the transport header.
    First,
    /// A later fragment: no transport header.
    Later,
}

/// A frame's description. Offsets are from the frame's first byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// The number of tags (3: more than are parsed, or cut short).
    pub tags: u8,
    /// Type of the outer tag; 0: none.
    pub tpid: u16,
    /// Priority and VLAN number of the outer tag.
    pub tci: u16,
    /// The network layer.
    pub net: Net,
    /// Offset of the network header.
    pub at: u16,
    /// The part of an IP packet in this frame.
    pub part: Part,
    /// Transport protocol of an IP packet.
    pub protocol: u8,
    /// Offset of the transport header; of a later fragment, of its data.
    pub l4: u16,
    /// Offset of the IP packet's end: later bytes of the frame are padding.
    pub end: u32,
}

/// IEEE 802.1Q.
pub const TPID_VLAN: u16 = 0x8100;

fn is_tag(ethertype: u16) -> bool {
    // 802.1Q, 802.1ad, and the types that were in use before 802.1ad.
    matches!(ethertype, TPID_VLAN | 0x88a8 | 0x9100 | 0x9200 | 0x9300)
}

/// Returns whether a frame that starts with `head` has a tag.
#[must_use]
pub fn is_tagged(head: &[u8]) -> bool {
    word(head, ETH_HEADER - 2).is_some_and(is_tag)
}

/// Returns the VLAN number in the outer tag of a frame that starts with `head`; 0: it has none, or one that only has a priority.
#[must_use]
pub fn outer_vid(head: &[u8]) -> u16 {
    let tci = word(head, ETH_HEADER).filter(|_| is_tagged(head));
    tci.unwrap_or(0) & 0xfff
}

/// `N` bytes of `b` from `at` on.
#[inline(always)]
pub(crate) fn get<const N: usize>(b: &[u8], at: usize) -> Option<[u8; N]> {
    b.get(at..)?.first_chunk().copied()
}

#[inline(always)]
fn word(b: &[u8], at: usize) -> Option<u16> {
    get(b, at).map(u16::from_be_bytes)
}

impl Headers {
    /// Parses `head`, the first bytes of a frame of `len` bytes.
    #[must_use]
    pub fn parse(head: &[u8], len: u32) -> Self {
        let mut h = Self { end: len, ..Self::default() };
        // A frame that can't be parsed to its end stays Unknown.
        let _ended_early = h.read(head, len);
        h
    }

    #[inline]
    fn read(&mut self, head: &[u8], len: u32) -> Option<()> {
        let mut at = ETH_HEADER;
        let mut ethertype = word(head, at - 2)?;
        while is_tag(ethertype) {
            if self.tags == 0 {
                self.tpid = ethertype;
            }
            let Some(next) = word(head, at + 2).filter(|_| self.tags < MAX_TAGS) else {
                self.tags = MAX_TAGS + 1;
                return None;
            };
            if self.tags == 0 {
                self.tci = word(head, at)?;
            }
            self.tags += 1;
            ethertype = next;
            at += 4;
        }
        self.at = at as u16;
        match ethertype {
            0x0800 => self.ipv4(head, at, len),
            0x86dd => self.ipv6(head, at, len),
            0x0806 => {
                // Ethernet, IPv4, their lengths: the following fields are at the usual offsets.
                if get(head, at)? != [0, 1, 8, 0, 6, 4] || head.len() < at + 28 {
                    return None;
                }
                self.net = Net::Arp;
                Some(())
            }
            // A length: an LLC header follows, which may hold any EtherType.
            0..0x600 => None,
            other => {
                self.net = Net::Other(other);
                Some(())
            }
        }
    }

    #[inline]
    fn ipv4(&mut self, head: &[u8], at: usize, len: u32) -> Option<()> {
        let fixed: [u8; 20] = get(head, at)?;
        let header = usize::from(fixed[0] & 0xf) * 4;
        let total = u32::from(u16::from_be_bytes([fixed[2], fixed[3]]));
        let available = len.saturating_sub(at as u32);
        // A frame that is to be segmented may be longer than this field can hold.
        let packet = if total == 0 { available } else { total };
        if fixed[0] >> 4 != 4 || header < 20 || packet < header as u32 || packet > available {
            return None;
        }
        let fragment = u16::from_be_bytes([fixed[6], fixed[7]]);
        self.part = match (fragment & 0x1fff, fragment & 0x2000 != 0) {
            (0, false) => Part::Whole,
            (0, true) => Part::First,
            _ => Part::Later,
        };
        self.protocol = fixed[9];
        self.l4 = (at + header) as u16;
        self.end = at as u32 + packet;
        self.net = Net::Ipv4;
        Some(())
    }

    #[inline]
    fn ipv6(&mut self, head: &[u8], at: usize, len: u32) -> Option<()> {
        let fixed: [u8; 40] = get(head, at)?;
        let payload = u32::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        let available = len.saturating_sub(at as u32 + 40);
        if fixed[0] >> 4 != 6 || payload > available {
            return None;
        }
        // 0: a jumbogram, or a frame that is to be segmented.
        let end = at as u32 + 40 + if payload == 0 { available } else { payload };
        let (mut next, mut l4) = (fixed[6], at + 40);
        // Each header takes 8 bytes or more of LOOK.
        while self.part != Part::Later {
            let size = match next {
                protocol::HOP_BY_HOP
                | protocol::ROUTING
                | protocol::DESTINATION
                | protocol::MOBILITY
                | protocol::HIP
                | protocol::SHIM6 => 8 + 8 * usize::from(*head.get(l4 + 1)?),
                protocol::AUTHENTICATION => 8 + 4 * usize::from(*head.get(l4 + 1)?),
                protocol::FRAGMENT => {
                    let word = word(head, l4 + 2)?;
                    self.part = match (word >> 3, word & 1 != 0) {
                        _ if self.part == Part::First => return None,
                        (0, false) => Part::Whole,
                        (0, true) => Part::First,
                        _ => Part::Later,
                    };
                    8
                }
                _ => break,
            };
            next = *head.get(l4)?;
            l4 += size;
            // The header itself must be complete, and so must the next one's first byte.
            if l4 > head.len() || l4 as u32 > end {
                return None;
            }
        }
        self.protocol = next;
        self.l4 = l4 as u16;
        self.end = end;
        self.net = Net::Ipv6;
        Some(())
    }

    /// Returns the VLAN number and priority of a frame's only tag, if it is one of IEEE 802.1Q.
    #[inline(always)]
    #[must_use]
    pub fn only_tag(&self) -> Option<u16> {
        (self.tags == 1 && self.tpid == TPID_VLAN).then_some(self.tci)
    }

    /// Returns whether it is IPv4 or IPv6.
    #[inline(always)]
    #[must_use]
    pub fn is_ip(&self) -> bool {
        matches!(self.net, Net::Ipv4 | Net::Ipv6)
    }

    /// Returns the source and destination of an IP packet in a frame that starts with `head`, the bytes that were parsed.
    #[must_use]
    pub fn addresses(&self, head: &[u8]) -> Option<(IpAddr, IpAddr)> {
        let at = usize::from(self.at);
        match self.net {
            Net::Ipv4 => Some((get::<4>(head, at + 12)?.into(), get::<4>(head, at + 16)?.into())),
            Net::Ipv6 => Some((get::<16>(head, at + 8)?.into(), get::<16>(head, at + 24)?.into())),
            _ => None,
        }
    }

    /// Returns the source and destination port, if they are within `head`, the bytes that were parsed.
    #[must_use]
    pub fn ports(&self, head: &[u8]) -> Option<(u16, u16)> {
        let has = self.should_have_ports() && u32::from(self.l4) + 4 <= self.end;
        let b: [u8; 4] = get(head, usize::from(self.l4)).filter(|_| has)?;
        Some((u16::from_be_bytes([b[0], b[1]]), u16::from_be_bytes([b[2], b[3]])))
    }

    fn should_have_ports(&self) -> bool {
        self.is_ip()
            && self.part != Part::Later
            && matches!(
                self.protocol,
                protocol::TCP | protocol::UDP | protocol::SCTP | protocol::DCCP | protocol::UDP_LITE
            )
    }

    /// Returns whether the packet ends before the ports of its protocol. A receiver that reads on, or reassembles
    /// fragments, finds some.
    #[must_use]
    pub fn lacks_ports(&self, head: &[u8]) -> bool {
        self.should_have_ports() && self.ports(head).is_none()
    }

    /// Returns the description of the frame with its first bytes longer by `delta`.
    #[must_use]
    pub fn shifted(self, delta: i32) -> Self {
        let shift = |v: u16| if v == 0 { 0 } else { v.saturating_add_signed(delta as i16) };
        Self { at: shift(self.at), l4: shift(self.l4), end: self.end.saturating_add_signed(delta), ..self }
    }
}

/// Returns the source address of a frame.
#[must_use]
pub fn source(head: &[u8]) -> Option<Mac> {
    get(head, 6).map(Mac)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ethernet(tags: &[(u16, u16)], ethertype: u16, body: &[u8]) -> Vec<u8> {
        let mut f = vec![0; 12];
        for (tpid, tci) in tags {
            f.extend(tpid.to_be_bytes());
            f.extend(tci.to_be_bytes());
        }
        f.extend(ethertype.to_be_bytes());
        f.extend(body);
        f
    }

    fn parse(f: &[u8]) -> Headers {
        Headers::parse(&f[..f.len().min(LOOK)], f.len() as u32)
    }

    fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut b = vec![0x60, 0, 0, 0];
        b.extend((rest.len() as u16).to_be_bytes());
        b.extend([next, 64]);
        b.extend([0xfd; 32]);
        b.extend(rest);
        b
    }

    fn ipv4(fragment: u16, protocol: u8, rest: &[u8]) -> Vec<u8> {
        let mut b = vec![0x46, 0];
        b.extend((24 + rest.len() as u16).to_be_bytes());
        b.extend([0, 1]);
        b.extend(fragment.to_be_bytes());
        b.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 1, 1, 1, 1]);
        b.extend(rest);
        b
    }

    #[test]
    fn a_transport_header_is_found_behind_tags_options_and_extension_headers() {
        let tcp = [0, 80, 1, 2, 0, 0, 0, 0];
        for tags in [&[][..], &[(0x8100, 5)], &[(0x88a8, 6), (0x8100, 5)]] {
            let extra = 4 * tags.len() as u16;
            let f = ethernet(tags, 0x0800, &ipv4(0x4000, 6, &tcp));
            let h = parse(&f);
            assert_eq!((h.net, h.protocol, h.l4, h.tags), (Net::Ipv4, 6, 38 + extra, tags.len() as u8));
            assert_eq!(h.ports(&f), Some((80, 0x102)));

            let chain = [&[60, 0, 0, 0, 0, 0, 0, 0][..], &[6, 1], &[0; 14], &tcp].concat();
            let f = ethernet(tags, 0x86dd, &ipv6(0, &chain));
            let h = parse(&f);
            assert_eq!((h.net, h.protocol, h.l4), (Net::Ipv6, 6, 54 + 24 + extra));
            assert_eq!(h.ports(&f), Some((80, 0x102)));
            // Padding behind the packet does not count.
            let padded = parse(&[&f[..], &[0; 10]].concat());
            assert_eq!((padded.l4, padded.end), (h.l4, f.len() as u32));
        }
    }

    #[test]
    fn only_one_tag_of_802_1q_is_the_tag_of_a_vlan() {
        let tag = |tags| parse(&ethernet(tags, 0x88b5, &[0; 40])).only_tag();
        assert_eq!(tag(&[]), None);
        assert_eq!(tag(&[(0x8100, 0xa005)]), Some(0xa005));
        assert_eq!(tag(&[(0x88a8, 5)]), None);
        assert_eq!(tag(&[(0x8100, 0), (0x8100, 6)]), None);
        let three = parse(&ethernet(&[(0x8100, 1); 3], 0x0800, &[0; 40]));
        assert_eq!((three.tags, three.net), (3, Net::Unknown));
        assert_eq!(parse(&[&[0; 12][..], &[0x81, 0]].concat()).tags, 3, "cut within the tag");
    }

    #[test]
    fn fragments_have_a_transport_header_only_in_front() {
        let data = [0, 80, 1, 2, 0, 0, 0, 0];
        let part = |f: Vec<u8>| (parse(&f).part, parse(&f).ports(&f));
        let v4 = |word| part(ethernet(&[], 0x0800, &ipv4(word, 17, &data)));
        assert_eq!(v4(0x2000), (Part::First, Some((80, 0x102))));
        assert_eq!(v4(0x2001), (Part::Later, None));
        assert_eq!(v4(0x0001), (Part::Later, None));
        let v6 = |word: u16| {
            let w = word.to_be_bytes();
            let chain = [&[17, 0, w[0], w[1], 0, 0, 0, 1][..], &data].concat();
            part(ethernet(&[], 0x86dd, &ipv6(44, &chain)))
        };
        assert_eq!(v6(0), (Part::Whole, Some((80, 0x102))));
        assert_eq!(v6(1), (Part::First, Some((80, 0x102))));
        assert_eq!(v6(9), (Part::Later, None));
    }

    #[test]
    fn what_contradicts_itself_or_goes_on_out_of_sight_is_unknown() {
        let net = |ethertype, body: &[u8]| parse(&ethernet(&[], ethertype, body)).net;
        let whole = ipv4(0, 6, &[0; 20]);
        assert_eq!(net(0x0800, &whole), Net::Ipv4);
        for (at, value) in [(0, 0x66), (0, 0x44), (2, 0xff), (3, 10)] {
            let mut bad = whole.clone();
            bad[at] = value;
            assert_eq!(net(0x0800, &bad), Net::Unknown, "byte {at} is {value:#x}");
        }
        let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &whole].concat();
        assert_eq!(net(snap.len() as u16, &snap), Net::Unknown, "LLC");
        assert_eq!(net(0x0806, &[0, 1, 8, 0, 8, 4, 0, 1]), Net::Unknown, "ARP with other lengths");
        // A destination-options header that covers its own successor.
        assert_eq!(net(0x86dd, &ipv6(60, &[58, 4, 0, 0, 0, 0, 0, 0])), Net::Unknown);
        let far = [&[58, 30][..], &[0; 246], &[134, 0, 0, 0]].concat();
        assert_eq!(net(0x86dd, &ipv6(60, &far)), Net::Unknown, "beyond what is looked at");
        // Two fragment headers, the first of which claims to be a first fragment.
        let twice = [44, 0, 0, 1, 0, 0, 0, 1, 58, 0, 0, 8, 0, 0, 0, 1, 134, 0, 0, 0];
        assert_eq!(net(0x86dd, &ipv6(44, &twice)), Net::Unknown);
    }

    proptest! {
        #[test]
        fn any_bytes_are_described_within_the_frame(
            ethertype in prop::sample::select(vec![0x0800u16, 0x86dd, 0x0806, 0x8100, 0x88a8, 40]),
            body in prop::collection::vec(any::<u8>(), 0..300),
            more in 0u32..70_000,
        ) {
            let f = ethernet(&[], ethertype, &body);
            let (head, len) = (&f[..f.len().min(LOOK)], f.len() as u32 + more);
            let h = Headers::parse(head, len);
            if h.is_ip() {
                prop_assert!(u32::from(h.l4) <= h.end && h.end <= len);
                prop_assert!(usize::from(h.at) < head.len());
                let ip4 = h.net == Net::Ipv4;
                prop_assert!(usize::from(h.l4) <= head.len() || ip4);
            }
            let _ = h.ports(head);
        }
    }
}
