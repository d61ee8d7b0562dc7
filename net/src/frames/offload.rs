// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The work that a sender left to the receiver: which of it the switch accepts, and its software form for receivers that
//! can't do it: checksums, and segmentation of large TCP and UDP frames (virtio 1.3 §5.1.6.2, RFC 9293, RFC 768, RFC
//! 1071).
//!
//! A sender's virtio-net header is never passed on. [`wanted`] compares it with the frame's description and makes a new
//! one, so that a checksum is only ever written into the checksum field of a TCP or UDP header.
//!
//! Pure functions over a frame in private memory.

use crate::frames::frame::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, NetHeader};
use crate::frames::headers::{Headers, Net, Part, protocol};

const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;
/// The shortest payload of a segment; shorter ones only serve to make work.
const MIN_GSO: u16 = 48;
/// The longest packet for the length field of IPv4.
const MAX_PACKET: usize = 65535;

/// Offsets of the parts of a TCP or UDP frame, for checksums and segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The IP header.
    pub ip: u16,
    /// The TCP or UDP header.
    pub l4: u16,
    /// The first byte behind the TCP or UDP header.
    pub payload: u16,
    /// IPv6, not 4.
    pub v6: bool,
    /// UDP, not TCP.
    pub udp: bool,
}

impl Layers {
    /// Returns the offset of the checksum in the transport header.
    fn checksum(self) -> u16 {
        if self.udp { 6 } else { 16 }
    }

    /// Returns the offsets in the frame with its first bytes longer by `delta`.
    #[must_use]
    pub fn shifted(self, delta: i32) -> Self {
        let shift = |v: u16| v.saturating_add_signed(delta as i16);
        Self { ip: shift(self.ip), l4: shift(self.l4), payload: shift(self.payload), ..self }
    }
}

/// Makes the virtio-net header of a frame of `len` bytes that starts with `head`, from the sender's `asked`. None: the
/// request doesn't fit the frame, which is then dropped for all receivers.
#[must_use]
pub fn wanted(asked: &NetHeader, headers: &Headers, head: &[u8], len: u32) -> Option<(NetHeader, Layers)> {
    let kind = asked.gso_type & !GSO_ECN;
    if asked.flags & NEEDS_CSUM == 0 {
        // Segments have checksums of their own, which only segmentation can make.
        return (asked.gso_type == GSO_NONE).then(Default::default);
    }
    let udp = match headers.protocol {
        protocol::TCP => false,
        protocol::UDP => true,
        _ => return None,
    };
    let v6 = headers.net == Net::Ipv6;
    let l4 = headers.l4;
    let header = if udp { 8 } else { u16::from(*head.get(usize::from(l4) + 12)? >> 4) * 4 };
    let layers = Layers { ip: headers.at, l4, payload: l4 + header, v6, udp };
    // The transport header belongs to the packet: bytes behind its end were not checked.
    let fits = headers.is_ip()
        && headers.part == Part::Whole
        && header >= if udp { 8 } else { 20 }
        && u32::from(layers.payload) <= headers.end
        && asked.csum_start == l4
        && asked.csum_offset == layers.checksum();
    let mut made = NetHeader {
        flags: NEEDS_CSUM,
        csum_start: l4,
        csum_offset: layers.checksum(),
        ..NetHeader::default()
    };
    let cut = match kind {
        GSO_NONE => asked.gso_type == GSO_NONE,
        GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4 => {
            made.gso_type = if udp { kind } else { asked.gso_type };
            made.gso_size = asked.gso_size;
            made.hdr_len = layers.payload;
            let right = match kind {
                GSO_TCPV4 => !v6 && !udp,
                GSO_TCPV6 => v6 && !udp,
                _ => udp,
            };
            // Segments get lengths of their own, so the whole frame must belong to the packet already.
            let packet = usize::from(layers.payload - layers.ip) + usize::from(asked.gso_size);
            right
                && asked.gso_size >= MIN_GSO
                && packet <= MAX_PACKET
                && headers.end == len
                && u32::from(layers.payload) < len
        }
        _ => false,
    };
    (fits && cut).then_some((made, layers))
}

/// Adds the ones' complement sum of `bytes`, taken as big-endian words, to `sum`.
#[must_use]
pub fn sum(bytes: &[u8], sum: u32) -> u32 {
    // Words are added in the machine's order, eight bytes at a time; the sum's bytes are swapped at the end.
    let mut total = 0u64;
    let mut chunks = bytes.chunks_exact(8);
    for c in &mut chunks {
        let word = u64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]);
        let (t, carry) = total.overflowing_add(word);
        total = t + u64::from(carry);
    }
    let mut last = [0u8; 8];
    let rest = chunks.remainder();
    last[..rest.len()].copy_from_slice(rest);
    let (t, carry) = total.overflowing_add(u64::from_le_bytes(last));
    total = t + u64::from(carry);
    let mut folded = (total >> 32) + (total & 0xffff_ffff);
    folded = (folded >> 16) + (folded & 0xffff);
    folded = (folded >> 16) + (folded & 0xffff);
    folded = (folded >> 16) + (folded & 0xffff);
    sum + u32::from((folded as u16).swap_bytes())
}

/// Returns the checksum field for a sum.
#[must_use]
pub fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

/// Completes the checksum of a frame. The layers must be those of that frame.
pub fn checksum(frame: &mut [u8], l: &Layers) {
    let start = usize::from(l.l4);
    let at = start + usize::from(l.checksum());
    let mut value = fold(sum(&frame[start..], 0));
    // UDP sends 0 for "none".
    if value == 0 {
        value = 0xffff;
    }
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn be16(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*b.get(at)?, *b.get(at + 1)?]))
}

/// Returns how many segments a frame makes, with the header and layers that [`wanted`] made.
#[must_use]
pub fn segments(frame: &[u8], h: &NetHeader, l: &Layers) -> usize {
    frame.len().saturating_sub(l.payload.into()).div_ceil(usize::from(h.gso_size.max(1)))
}

/// Writes segment `index` of the frame to `out`, whole, with all checksums, and returns its length. None: there is no
/// such segment, or `out` is too short. Header and layers are those that [`wanted`] made.
#[must_use]
pub fn segment(frame: &[u8], h: &NetHeader, l: &Layers, index: usize, out: &mut [u8]) -> Option<usize> {
    let (ip, l4, payload) = (usize::from(l.ip), usize::from(l.l4), usize::from(l.payload));
    let size = usize::from(h.gso_size);
    let from = payload + index * size;
    if from >= frame.len() {
        return None;
    }
    let to = (from + size).min(frame.len());
    let (first, last) = (index == 0, to == frame.len());
    let len = payload + to - from;
    let out = out.get_mut(..len)?;
    out[..payload].copy_from_slice(&frame[..payload]);
    out[payload..].copy_from_slice(&frame[from..to]);
    let put16 = |out: &mut [u8], at: usize, v: u16| out[at..at + 2].copy_from_slice(&v.to_be_bytes());
    let l4_len = (len - l4) as u16;
    let mut pseudo;
    if l.v6 {
        put16(out, ip + 4, (len - ip - 40) as u16);
        pseudo = sum(&out[ip + 8..ip + 40], 0);
    } else {
        put16(out, ip + 2, (len - ip) as u16);
        let id = be16(frame, ip + 4)?.wrapping_add(index as u16);
        put16(out, ip + 4, id);
        put16(out, ip + 10, 0);
        let header = fold(sum(&out[ip..l4], 0));
        put16(out, ip + 10, header);
        pseudo = sum(&out[ip + 12..ip + 20], 0);
    }
    pseudo += u32::from(l4_len) + u32::from(if l.udp { protocol::UDP } else { protocol::TCP });
    let at = if l.udp {
        put16(out, l4 + 4, l4_len);
        l4 + 6
    } else {
        let b = &frame[l4 + 4..l4 + 8];
        let sequence = u32::from_be_bytes([b[0], b[1], b[2], b[3]]).wrapping_add((index * size) as u32);
        out[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
        if !last {
            out[l4 + 13] &= !TCP_FIN_PSH;
        }
        if !first && h.gso_type & GSO_ECN != 0 {
            out[l4 + 13] &= !TCP_CWR;
        }
        l4 + 16
    };
    put16(out, at, 0);
    let mut value = fold(sum(&out[l4..], pseudo));
    if value == 0 && l.udp {
        value = 0xffff;
    }
    put16(out, at, value);
    Some(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::headers::LOOK;
    use proptest::prelude::*;

    const TCP: u8 = protocol::TCP;
    const UDP: u8 = protocol::UDP;
    const ETH_IPV4: u16 = 0x0800;
    const ETH_IPV6: u16 = 0x86dd;

    /// Parses a frame as the switch does.
    fn look(f: &[u8], h: &NetHeader) -> Option<(NetHeader, Layers)> {
        let head = &f[..f.len().min(LOOK)];
        wanted(h, &Headers::parse(head, f.len() as u32), head, f.len() as u32)
    }

    /// A frame as a guest with segmentation offload sends it: lengths of the whole, partial checksum.
    fn large(v6: bool, udp: bool, payload: usize, flags: u8) -> (Vec<u8>, NetHeader) {
        let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        f.extend(if v6 { ETH_IPV6 } else { ETH_IPV4 }.to_be_bytes());
        let protocol = if udp { UDP } else { TCP };
        let l4_len = payload + if udp { 8 } else { 32 };
        if v6 {
            f.extend([0x60, 0, 0, 0]);
            f.extend((l4_len as u16).to_be_bytes());
            f.extend([protocol, 64]);
            f.extend([0xfd; 15]);
            f.push(1);
            f.extend([0xfd; 15]);
            f.push(2);
        } else {
            f.extend([0x45, 0]);
            f.extend(((l4_len + 20) as u16).to_be_bytes());
            f.extend([0x12, 0x34, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let l4 = f.len();
        if udp {
            f.extend([0x10, 0, 0x20, 0, 0, 0, 0, 0]);
        } else {
            f.extend([0x10, 0, 0x20, 0, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 7, 0x80, flags, 1, 0, 0, 0, 0, 0]);
            f.extend([1; 12]);
        }
        f.extend((0..payload).map(|i| (i * 7 + i / 256) as u8));
        let gso_type = match (udp, v6) {
            (true, _) => GSO_UDP_L4,
            (false, false) => GSO_TCPV4,
            (false, true) => GSO_TCPV6,
        };
        let header = NetHeader {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: 0,
            gso_size: 1000,
            csum_start: l4 as u16,
            csum_offset: if udp { 6 } else { 16 },
        };
        (f, header)
    }

    /// Returns the sum that a receiver makes over pseudo header and segment: all ones if it is right.
    fn receiver_sum(f: &[u8], v6: bool, udp: bool) -> u32 {
        let protocol = u32::from(if udp { UDP } else { TCP });
        let (addresses, l4) = if v6 { (&f[22..54], 54) } else { (&f[26..34], 34) };
        let mut s = sum(addresses, protocol + (f.len() - l4) as u32);
        s = sum(&f[l4..], s);
        u32::from(!fold(s))
    }

    /// RFC 1071, one word at a time.
    fn slow_sum(b: &[u8]) -> u16 {
        let mut s = 0u64;
        for pair in b.chunks(2) {
            s += u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        }
        while s > 0xffff {
            s = (s >> 16) + (s & 0xffff);
        }
        !(s as u16)
    }

    proptest! {
        #[test]
        fn the_sum_is_that_of_the_rfc(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (fast, slow) = (fold(sum(&bytes, 0)), slow_sum(&bytes));
            // Both zeros are the same number.
            prop_assert!(fast == slow || fast ^ slow == 0xffff && (fast == 0 || slow == 0));
        }

        #[test]
        fn segments_are_whole_packets_that_add_up_to_the_frame(
            v6 in any::<bool>(), udp in any::<bool>(), payload in 1usize..20_000, size in 48u16..9000,
        ) {
            let (frame, mut h) = large(v6, udp, payload, 0x99);
            h.gso_size = size;
            h.gso_type |= if udp { 0 } else { GSO_ECN };
            let (h, l) = look(&frame, &h).unwrap();
            prop_assert_eq!(usize::from(h.hdr_len), frame.len() - payload);
            let n = segments(&frame, &h, &l);
            prop_assert_eq!(n, payload.div_ceil(size.into()));
            let mut out = vec![0; 65_600];
            let mut all = Vec::new();
            for i in 0..n {
                let len = segment(&frame, &h, &l, i, &mut out).unwrap();
                let s = &out[..len];
                prop_assert_eq!(receiver_sum(s, v6, udp), 0xffff);
                let l4 = usize::from(h.csum_start);
                let head = l4 + if udp { 8 } else { 32 };
                if v6 {
                    prop_assert_eq!(be16(s, 18), Some((len - 54) as u16));
                } else {
                    prop_assert_eq!(fold(sum(&s[14..34], 0)), 0);
                    prop_assert_eq!(be16(s, 16), Some((len - 14) as u16));
                    prop_assert_eq!(be16(s, 18), Some(0x1234 + i as u16));
                }
                if udp {
                    prop_assert_eq!(be16(s, l4 + 4), Some((len - l4) as u16));
                } else {
                    let seq = u32::from_be_bytes(s[l4 + 4..l4 + 8].try_into().unwrap());
                    prop_assert_eq!(seq, 0xffff_ff00u32.wrapping_add((i * usize::from(size)) as u32));
                    let flags = s[l4 + 13];
                    prop_assert_eq!(flags & TCP_FIN_PSH != 0, i == n - 1);
                    prop_assert_eq!(flags & TCP_CWR != 0, i == 0);
                }
                all.extend_from_slice(&s[head..]);
            }
            prop_assert_eq!(segment(&frame, &h, &l, n, &mut out), None);
            prop_assert_eq!(&all[..], &frame[frame.len() - payload..]);
        }

        #[test]
        fn a_checksum_changes_two_bytes_behind_the_addresses(
            v6 in any::<bool>(), udp in any::<bool>(), payload in 0usize..300, csum_start in 0u16..320,
            csum_offset in 0u16..320, flags in any::<u8>(), gso_type in any::<u8>(), gso_size in any::<u16>(),
            damage in prop::collection::vec((12usize..80, any::<u8>()), 0..4), honest in any::<bool>(),
        ) {
            let (mut frame, right) = large(v6, udp, payload, 0x18);
            for (at, value) in damage {
                if let Some(b) = frame.get_mut(at) {
                    *b = value;
                }
            }
            let mut h = NetHeader { flags, gso_type, gso_size, csum_start, csum_offset, ..right };
            if honest {
                h = NetHeader { flags, gso_type, gso_size, ..right };
            }
            if let Some((made, l)) = look(&frame, &h) {
                prop_assert_eq!(made.flags & !NEEDS_CSUM, 0);
                if made.gso_type == GSO_NONE && made.flags != 0 {
                    let mut done = frame.clone();
                    checksum(&mut done, &l);
                    let at = usize::from(made.csum_start + made.csum_offset);
                    let ip_header = if l.v6 { 40 } else { 20 };
                    prop_assert!(l.l4 >= l.ip + ip_header);
                    prop_assert_eq!(&done[..at], &frame[..at]);
                    prop_assert_eq!(&done[at + 2..], &frame[at + 2..]);
                }
                if made.gso_type != GSO_NONE {
                    let mut out = vec![0; 65_600];
                    for i in 0..segments(&frame, &made, &l) {
                        prop_assert!(segment(&frame, &made, &l, i, &mut out).is_some());
                    }
                }
            }
        }
    }

    #[test]
    fn a_partial_checksum_is_completed() {
        for (v6, udp) in [(false, false), (false, true), (true, false), (true, true)] {
            let (mut frame, h) = large(v6, udp, 777, 0x18);
            let l4 = usize::from(h.csum_start);
            // A guest leaves the pseudo header's sum in the field.
            let addresses = if v6 { 22..54 } else { 26..34 };
            let pseudo =
                sum(&frame[addresses], u32::from(if udp { UDP } else { TCP }) + (frame.len() - l4) as u32);
            if udp {
                let n = ((frame.len() - l4) as u16).to_be_bytes();
                frame[l4 + 4..l4 + 6].copy_from_slice(&n);
            }
            let at = l4 + usize::from(h.csum_offset);
            frame[at..at + 2].copy_from_slice(&(!fold(pseudo)).to_be_bytes());
            let (_, l) = look(&frame, &h).unwrap();
            checksum(&mut frame, &l);
            assert_eq!(receiver_sum(&frame, v6, udp), 0xffff, "v6 {v6} udp {udp}");
        }
    }

    #[test]
    fn only_the_checksum_of_a_tcp_or_udp_header_may_be_asked_for() {
        let (frame, right) = large(false, false, 100, 0x18);
        let plain = NetHeader { gso_type: GSO_NONE, gso_size: 0, ..right };
        let made = NetHeader { hdr_len: 0, ..plain };
        assert_eq!(look(&frame, &NetHeader { hdr_len: 9, ..plain }).unwrap().0, made);
        for (csum_start, csum_offset) in
            [(14, 16), (14, 12), (34, 6), (34, 24), (33, 17), (35, 15), (65535, 65535)]
        {
            assert_eq!(look(&frame, &NetHeader { csum_start, csum_offset, ..plain }), None);
        }
        let gso = |gso_type, gso_size| look(&frame, &NetHeader { gso_type, gso_size, ..right }).is_some();
        assert!(gso(GSO_TCPV4, 48) && gso(GSO_TCPV4 | GSO_ECN, 48));
        assert!(!gso(GSO_TCPV4, 0) && !gso(GSO_TCPV6, 1000) && !gso(GSO_UDP_L4, 1000) && !gso(3, 1000));
        assert!(!gso(GSO_ECN, 0), "a bit without its type");
        let mut fragment = frame.clone();
        fragment[20] = 0x20;
        assert_eq!(look(&fragment, &plain), None);
        let mut arp = frame.clone();
        arp[12..14].copy_from_slice(&[8, 6]);
        assert_eq!(look(&arp, &plain), None);
        // Fields that a receiver would not understand are not passed on.
        let noise = NetHeader { flags: 0xfe, gso_size: 7, hdr_len: 9, csum_start: 1, ..NetHeader::default() };
        assert_eq!(look(&frame, &noise), Some(Default::default()));
    }
}
