// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ethernet addresses and the virtio-net header.

/// Bytes of an Ethernet header without a tag.
pub const ETH_HEADER: usize = 14;
/// Bytes of a virtio-net header with `num_buffers` (virtio 1.3 §5.1.6).
pub const NET_HEADER: usize = 12;
/// Largest frame: 64 KiB of IP packet, an Ethernet header and two tags.
pub const MAX_FRAME: usize = 65535 + ETH_HEADER + 8;

pub use tombolo_control::Mac;

/// `flags`: the checksum from `csum_start` on is still to be computed.
pub const NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum was verified.
pub const DATA_VALID: u8 = 2;
/// `gso_type`: no segmentation.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP segmentation.
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type`: a bit: segments after the first must not repeat CWR.
pub const GSO_ECN: u8 = 0x80;

/// A virtio-net header, in the machine's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetHeader {
    /// [`NEEDS_CSUM`] and others.
    pub flags: u8,
    /// [`GSO_NONE`] and others.
    pub gso_type: u8,
    /// Bytes of all headers, a hint.
    pub hdr_len: u16,
    /// Payload bytes of a segment.
    pub gso_size: u16,
    /// Offset at which checksumming starts.
    pub csum_start: u16,
    /// Offset of the checksum from there.
    pub csum_offset: u16,
}

impl NetHeader {
    /// Parses the first bytes of a buffer.
    #[inline(always)]
    #[must_use]
    pub fn parse(b: &[u8; NET_HEADER]) -> Self {
        let word = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// Parses the first bytes of a buffer, read as two little-endian words.
    #[inline(always)]
    #[must_use]
    pub fn from_words(first: u64, last: u16) -> Self {
        Self {
            flags: first as u8,
            gso_type: (first >> 8) as u8,
            hdr_len: (first >> 16) as u16,
            gso_size: (first >> 32) as u16,
            csum_start: (first >> 48) as u16,
            csum_offset: last,
        }
    }

    /// Returns the bytes of a buffer, for a frame that takes `buffers` buffers.
    #[inline(always)]
    #[must_use]
    pub fn bytes(&self, buffers: u16) -> [u8; NET_HEADER] {
        let (h, g, s, o, n) = (
            self.hdr_len.to_le_bytes(),
            self.gso_size.to_le_bytes(),
            self.csum_start.to_le_bytes(),
            self.csum_offset.to_le_bytes(),
            buffers.to_le_bytes(),
        );
        [self.flags, self.gso_type, h[0], h[1], g[0], g[1], s[0], s[1], o[0], o[1], n[0], n[1]]
    }

    /// Returns whether it asks the receiver for nothing.
    #[inline(always)]
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.flags == 0 && self.gso_type == GSO_NONE
    }
}
