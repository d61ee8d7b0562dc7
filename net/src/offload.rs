// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The work that a sender left to the receiver, done in software where the receiver can't: checksums, and cutting large
//! TCP and UDP frames into segments (virtio 1.3 §5.1.6.2, RFC 9293, RFC 768, RFC 1071).
//!
//! Pure functions over a frame in our own memory; nothing in the frame or its header is believed before it is checked.

use crate::frame::{ETH_HEADER, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, NetHeader};

const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86dd;
const ETH_VLAN: u16 = 0x8100;
const TCP: u8 = 6;
const UDP: u8 = 17;
const TCP_FIN_PSH: u8 = 0x09;
const TCP_CWR: u8 = 0x80;
/// Shortest payload of a segment that is cut; shorter ones only serve to make work.
const MIN_GSO: u16 = 48;

/// Does a header's wish fit a frame of `len` bytes? What doesn't is dropped, whoever the receiver is.
#[must_use]
pub fn is_valid(h: &NetHeader, len: u32) -> bool {
    if h.flags & NEEDS_CSUM != 0 {
        let at = u32::from(h.csum_start) + u32::from(h.csum_offset);
        if u32::from(h.csum_start) < ETH_HEADER as u32 || at + 2 > len {
            return false;
        }
    }
    match h.gso_type & !GSO_ECN {
        GSO_NONE => h.gso_type == GSO_NONE,
        GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4 => {
            h.flags & NEEDS_CSUM != 0 && h.gso_size >= MIN_GSO && u32::from(h.csum_start) < len
        }
        _ => false,
    }
}

/// Ones' complement sum of `bytes`, taken as big-endian words, added to `sum`.
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

/// The checksum field for a sum.
#[must_use]
pub fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

/// Completes the checksum that `h` asks for. The header must be valid for the frame.
pub fn checksum(frame: &mut [u8], h: &NetHeader) {
    let start = usize::from(h.csum_start);
    let at = start + usize::from(h.csum_offset);
    let mut value = fold(sum(&frame[start..], 0));
    // UDP sends 0 for "none".
    if value == 0 {
        value = 0xffff;
    }
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Where a large frame's headers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layers {
    ip: usize,
    v6: bool,
    l4: usize,
    payload: usize,
    udp: bool,
}

fn be16(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*b.get(at)?, *b.get(at + 1)?]))
}

fn layers(frame: &[u8], h: &NetHeader) -> Option<Layers> {
    let mut ip = ETH_HEADER;
    let mut ethertype = be16(frame, 12)?;
    while ethertype == ETH_VLAN && ip < ETH_HEADER + 8 {
        ethertype = be16(frame, ip + 2)?;
        ip += 4;
    }
    let l4 = usize::from(h.csum_start);
    let udp = h.gso_type & !GSO_ECN == GSO_UDP_L4;
    let v6 = match ethertype {
        ETH_IPV4 => {
            let ihl = usize::from(frame.get(ip)? & 0xf) * 4;
            let protocol = *frame.get(ip + 9)?;
            if ihl < 20 || ip + ihl != l4 || protocol != if udp { UDP } else { TCP } {
                return None;
            }
            // Fragments can't be cut.
            if be16(frame, ip + 6)? & 0x3fff != 0 {
                return None;
            }
            false
        }
        ETH_IPV6 if l4 >= ip + 40 => true,
        _ => return None,
    };
    let expected = match h.gso_type & !GSO_ECN {
        GSO_TCPV4 => !v6,
        GSO_TCPV6 => v6,
        _ => true,
    };
    let payload = if udp { l4 + 8 } else { l4 + usize::from(frame.get(l4 + 12)? >> 4) * 4 };
    let ok = expected && payload >= l4 + if udp { 8 } else { 20 } && payload < frame.len();
    ok.then_some(Layers { ip, v6, l4, payload, udp })
}

/// How many segments the frame makes. None: it can't be cut.
#[must_use]
pub fn segments(frame: &[u8], h: &NetHeader) -> Option<usize> {
    let l = layers(frame, h)?;
    Some((frame.len() - l.payload).div_ceil(usize::from(h.gso_size)))
}

/// Writes segment `index` of the frame to `out`, whole, with all checksums, and returns its length. None: there is no
/// such segment, the frame can't be cut, or `out` is too short.
#[must_use]
pub fn segment(frame: &[u8], h: &NetHeader, index: usize, out: &mut [u8]) -> Option<usize> {
    let l = layers(frame, h)?;
    let size = usize::from(h.gso_size);
    let from = l.payload + index * size;
    if from >= frame.len() {
        return None;
    }
    let to = (from + size).min(frame.len());
    let (first, last) = (index == 0, to == frame.len());
    let len = l.payload + to - from;
    let out = out.get_mut(..len)?;
    out[..l.payload].copy_from_slice(&frame[..l.payload]);
    out[l.payload..].copy_from_slice(&frame[from..to]);
    let put16 = |out: &mut [u8], at: usize, v: u16| out[at..at + 2].copy_from_slice(&v.to_be_bytes());
    let l4_len = (len - l.l4) as u16;
    let mut pseudo;
    if l.v6 {
        put16(out, l.ip + 4, (len - l.ip - 40) as u16);
        pseudo = sum(&out[l.ip + 8..l.ip + 40], 0);
    } else {
        put16(out, l.ip + 2, (len - l.ip) as u16);
        let id = be16(frame, l.ip + 4)?.wrapping_add(index as u16);
        put16(out, l.ip + 4, id);
        put16(out, l.ip + 10, 0);
        let header = fold(sum(&out[l.ip..l.l4], 0));
        put16(out, l.ip + 10, header);
        pseudo = sum(&out[l.ip + 12..l.ip + 20], 0);
    }
    pseudo += u32::from(l4_len) + u32::from(if l.udp { UDP } else { TCP });
    let at = if l.udp {
        put16(out, l.l4 + 4, l4_len);
        l.l4 + 6
    } else {
        let b = &frame[l.l4 + 4..l.l4 + 8];
        let sequence = u32::from_be_bytes([b[0], b[1], b[2], b[3]]).wrapping_add((index * size) as u32);
        out[l.l4 + 4..l.l4 + 8].copy_from_slice(&sequence.to_be_bytes());
        if !last {
            out[l.l4 + 13] &= !TCP_FIN_PSH;
        }
        if !first && h.gso_type & GSO_ECN != 0 {
            out[l.l4 + 13] &= !TCP_CWR;
        }
        l.l4 + 16
    };
    put16(out, at, 0);
    let mut value = fold(sum(&out[l.l4..], pseudo));
    if value == 0 && l.udp {
        value = 0xffff;
    }
    put16(out, at, value);
    Some(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    /// The sum that a receiver makes over pseudo header and segment: all ones when it is right.
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
            prop_assert!(is_valid(&h, frame.len() as u32));
            let n = segments(&frame, &h).unwrap();
            prop_assert_eq!(n, payload.div_ceil(size.into()));
            let mut out = vec![0; 65_600];
            let mut all = Vec::new();
            for i in 0..n {
                let len = segment(&frame, &h, i, &mut out).unwrap();
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
            prop_assert_eq!(segment(&frame, &h, n, &mut out), None);
            prop_assert_eq!(&all[..], &frame[frame.len() - payload..]);
        }

        #[test]
        fn no_frame_and_header_make_it_panic(
            frame in prop::collection::vec(any::<u8>(), 14..300),
            flags in any::<u8>(), gso_type in any::<u8>(), gso_size in any::<u16>(),
            csum_start in 0u16..320, csum_offset in 0u16..320, index in 0usize..40,
        ) {
            let h = NetHeader { flags, gso_type, hdr_len: 0, gso_size, csum_start, csum_offset };
            if is_valid(&h, frame.len() as u32) {
                if h.flags & NEEDS_CSUM != 0 {
                    checksum(&mut frame.clone(), &h);
                }
                if h.gso_type != GSO_NONE {
                    let mut out = vec![0; 65_600];
                    let _ = segments(&frame, &h);
                    let _ = segment(&frame, &h, index, &mut out);
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
            checksum(&mut frame, &h);
            assert_eq!(receiver_sum(&frame, v6, udp), 0xffff, "v6 {v6} udp {udp}");
        }
    }

    #[test]
    fn wishes_beyond_the_frame_are_invalid() {
        let h = |csum_start, csum_offset| NetHeader {
            flags: NEEDS_CSUM,
            csum_start,
            csum_offset,
            ..NetHeader::default()
        };
        assert!(is_valid(&h(34, 16), 60));
        assert!(is_valid(&h(34, 24), 60));
        assert!(!is_valid(&h(34, 25), 60));
        assert!(!is_valid(&h(13, 0), 60));
        assert!(!is_valid(&h(65535, 65535), 65535));
        assert!(!is_valid(&NetHeader { gso_type: GSO_TCPV4, gso_size: 0, ..h(34, 16) }, 60));
        assert!(!is_valid(&NetHeader { gso_type: 3, gso_size: 1000, ..h(34, 16) }, 60));
        assert!(!is_valid(&NetHeader { gso_type: GSO_ECN, ..NetHeader::default() }, 60));
    }
}
