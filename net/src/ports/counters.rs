// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is counted, per vring: packets, bytes, and drops by reason. Only the holder of the vring's lock writes, so a
//! count is a load and a store; anybody may read.
//!
//! Every frame that a port sends is counted once by its sending vring (`packets`), and ends as a packet of a receiving
//! vring or as one drop, counted by the sending or the receiving vring. A frame that becomes several, since it is flooded
//! or cut into segments, ends once for each of them; those beyond the first are counted by the sending vring as `copies`.
//! So over all vrings of a switch, sent packets and copies are received packets and drops.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// Why a frame was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        pub enum Reason { $($(#[doc = $doc])+ $name,)+ }
        /// All reasons, in the order of their numbers.
        pub const REASONS: &[Reason] = &[$(Reason::$name,)+];
        impl Reason {
            /// The reason's name in counters and metrics.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Reason::$name => $text,)+ }
            }
        }
    };
}

reasons! {
    /// Shorter than a virtio-net header and an Ethernet header.
    Short = "short",
    /// Longer than the port's MTU, or than a frame can be.
    Oversize = "oversize",
    /// The virtio-net header makes no sense.
    Header = "header",
    /// The receiver has no buffers, and the sender has waited for it as long as it may.
    NoBuffer = "no_buffer",
    /// Another worker has held the receiver for as long as the sender may wait.
    Busy = "busy",
    /// The receiver's buffers can't hold a frame of that length.
    BufferSize = "buffer_size",
    /// The destination is known, but not connected.
    Down = "down",
    /// The destination is unknown and there is no uplink, or nobody may have a flooded frame.
    Unknown = "unknown",
    /// Sent to itself.
    Loop = "loop",
    /// The source MAC isn't one of the port's.
    SpoofMac = "spoof_mac",
    /// The port uses as many MACs as it may learn.
    TooManyMacs = "too_many_macs",
    /// The source IP, ARP or ND sender isn't one of the port's.
    SpoofIp = "spoof_ip",
    /// The port is guarded, and the frame can't be read.
    Unparsable = "unparsable",
    /// A router's, multicast querier's or DHCP server's message from a port that may be none.
    Server = "server",
    /// To an address that no bridge forwards (01:80:c2:00:00:00 to :0f).
    Reserved = "reserved",
    /// To a multicast group that no port has joined.
    Unwanted = "unwanted",
    /// The VLAN isn't one of the port's.
    Vlan = "vlan",
    /// One of the two ports is isolated.
    Isolated = "isolated",
    /// Beyond the port's rate.
    Rate = "rate",
    /// Beyond what its receiver may be sent.
    ReceiveRate = "receive_rate",
    /// A rule of the sender or the receiver drops it.
    Rule = "rule",
    /// The uplink took no more.
    Uplink = "uplink",
}

const N: usize = REASONS.len();

/// The counters of one vring.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    packets: AtomicU64,
    bytes: AtomicU64,
    flooded: AtomicU64,
    copies: AtomicU64,
    signals: AtomicU64,
    drops: [AtomicU64; N],
}

#[inline(always)]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Counters {
    /// Packets that went through, with their bytes (Ethernet header included, virtio-net header not). Lock holder only.
    #[inline(always)]
    pub fn passed(&self, packets: u64, bytes: u64) {
        add(&self.packets, packets);
        add(&self.bytes, bytes);
    }

    /// One frame dropped. Lock holder only.
    #[cold]
    pub fn drop_one(&self, reason: Reason) {
        add(&self.drops[reason as usize], 1);
    }

    /// One frame flooded. Lock holder only.
    pub fn flooded(&self) {
        add(&self.flooded, 1);
    }

    /// Frames that were made of one. Lock holder only.
    pub fn copied(&self, copies: u64) {
        add(&self.copies, copies);
    }

    /// One interrupt sent. Lock holder only.
    #[inline(always)]
    pub fn signalled(&self) {
        add(&self.signals, 1);
    }

    /// The counts of this moment.
    #[must_use]
    pub fn read(&self) -> Counts {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let mut drops = [0; N];
        for (to, from) in drops.iter_mut().zip(&self.drops) {
            *to = get(from);
        }
        Counts {
            packets: get(&self.packets),
            bytes: get(&self.bytes),
            flooded: get(&self.flooded),
            copies: get(&self.copies),
            signals: get(&self.signals),
            drops,
        }
    }
}

/// Counts read at one moment; they add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub packets: u64,
    pub bytes: u64,
    /// Of the packets, those flooded.
    pub flooded: u64,
    /// Frames that the packets became beyond themselves, by flooding and segmentation.
    pub copies: u64,
    /// Interrupts.
    pub signals: u64,
    drops: [u64; N],
}

impl Counts {
    #[must_use]
    pub fn dropped_for(&self, reason: Reason) -> u64 {
        self.drops[reason as usize]
    }

    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.iter().sum()
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.flooded += other.flooded;
        self.copies += other.copies;
        self.signals += other.signals;
        for (a, b) in self.drops.iter_mut().zip(other.drops) {
            *a += b;
        }
    }
}
