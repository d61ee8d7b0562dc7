// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtio features of a port (virtio 1.3 §5.1.3, §6): those that are offered, and those that the data path uses.

use crate::vring::queue::Negotiated;
use crate::vring::ring::RingFeatures;

/// Bit numbers.
pub mod bit {
    pub const CSUM: u32 = 0;
    pub const GUEST_CSUM: u32 = 1;
    pub const MTU: u32 = 3;
    pub const GUEST_TSO4: u32 = 7;
    pub const GUEST_TSO6: u32 = 8;
    pub const GUEST_ECN: u32 = 9;
    pub const HOST_TSO4: u32 = 11;
    pub const HOST_TSO6: u32 = 12;
    pub const HOST_ECN: u32 = 13;
    pub const MRG_RXBUF: u32 = 15;
    pub const STATUS: u32 = 16;
    pub const CTRL_VQ: u32 = 17;
    pub const CTRL_RX: u32 = 18;
    pub const GUEST_ANNOUNCE: u32 = 21;
    pub const MQ: u32 = 22;
    pub const LOG_ALL: u32 = 26;
    pub const ANY_LAYOUT: u32 = 27;
    pub const INDIRECT_DESC: u32 = 28;
    pub const EVENT_IDX: u32 = 29;
    pub const PROTOCOL_FEATURES: u32 = 30;
    pub const VERSION_1: u32 = 32;
    pub const RING_PACKED: u32 = 34;
    pub const IN_ORDER: u32 = 35;
    pub const GUEST_USO4: u32 = 54;
    pub const GUEST_USO6: u32 = 55;
    pub const HOST_USO: u32 = 56;
}

/// Features whose work the switch does itself or leaves to the receiver.
pub const OFFLOADS: u64 = mask(&[
    bit::CSUM,
    bit::GUEST_CSUM,
    bit::GUEST_TSO4,
    bit::GUEST_TSO6,
    bit::GUEST_ECN,
    bit::HOST_TSO4,
    bit::HOST_TSO6,
    bit::HOST_ECN,
    bit::GUEST_USO4,
    bit::GUEST_USO6,
    bit::HOST_USO,
]);

/// Features with which a driver fills in the headers of frames that it sends.
const HOST: u64 = mask(&[bit::CSUM, bit::HOST_TSO4, bit::HOST_TSO6, bit::HOST_ECN, bit::HOST_USO]);

pub const OFFERED: u64 = PLAIN | OFFLOADS;

/// The features offered to a port without offloads.
pub const PLAIN: u64 = mask(&[
    // The VMM sets the value.
    bit::MTU,
    bit::MRG_RXBUF,
    bit::STATUS,
    bit::CTRL_VQ,
    bit::CTRL_RX,
    bit::GUEST_ANNOUNCE,
    bit::MQ,
    bit::LOG_ALL,
    bit::ANY_LAYOUT,
    bit::INDIRECT_DESC,
    bit::EVENT_IDX,
    bit::PROTOCOL_FEATURES,
    bit::VERSION_1,
    bit::RING_PACKED,
    bit::IN_ORDER,
]);

const fn mask(bits: &[u32]) -> u64 {
    let mut m = 0;
    let mut i = 0;
    while i < bits.len() {
        m |= 1 << bits[i];
        i += 1;
    }
    m
}

/// Returns whether `bit` is among `features`.
#[must_use]
pub fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// Returns the data path's view of `features`.
#[must_use]
pub fn negotiated(features: u64) -> Negotiated {
    let has = |bit| has(features, bit);
    Negotiated {
        packed: has(bit::RING_PACKED),
        ring: RingFeatures {
            event_idx: has(bit::EVENT_IDX),
            indirect: has(bit::INDIRECT_DESC),
            in_order: has(bit::IN_ORDER),
        },
        header: if has(bit::VERSION_1) || has(bit::MRG_RXBUF) { 12 } else { 10 },
        mergeable: has(bit::MRG_RXBUF),
        host: features & HOST != 0,
        csum: has(bit::GUEST_CSUM),
        tso4: has(bit::GUEST_TSO4),
        tso6: has(bit::GUEST_TSO6),
        ecn: has(bit::GUEST_ECN),
        uso: has(bit::GUEST_USO4) && has(bit::GUEST_USO6),
    }
}
