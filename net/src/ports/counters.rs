// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counters of a vring: packets, bytes, and drops by reason. Only the holder of the vring's lock writes, so a count
//! is a load and a store; any thread may read.
//!
//! A port's sending vring counts every frame once (`packets`). The frame ends as a packet of a receiving vring or as one
//! drop, counted by the sending or the receiving vring. A frame that becomes several, since it is flooded or segmented,
//! ends once for each of them; the sending vring counts those beyond the first as `copies`. So over all vrings of a
//! switch, sent packets and copies equal received packets and drops.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// The reason for dropping a frame.
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
    /// The guest put it into a queue before it stopped using that queue: vhost-user has the back-end discard what a disabled queue still
    /// has, since the guest waits for its end (TCP sends nothing again that its device has).
    Disabled = "disabled",
    /// Shorter than a virtio-net header and an Ethernet header.
    Short = "short",
    /// Longer than the port's MTU, or than a frame can be.
    Oversize = "oversize",
    /// The virtio-net header is invalid.
    Header = "header",
    /// The receiver has no buffers, and the sender's credit with it is used up.
    NoBuffer = "no_buffer",
    /// Another worker has held the receiver for the sender's whole credit.
    Busy = "busy",
    /// The receiver's buffers can't hold a frame of that length.
    BufferSize = "buffer_size",
    /// The destination is known, but not connected.
    Down = "down",
    /// The destination is unknown and there is no uplink, or no port may get a flooded frame.
    Unknown = "unknown",
    /// Sent to itself.
    Loop = "loop",
    /// The source MAC isn't one of the port's.
    SpoofMac = "spoof_mac",
    /// The port uses as many MACs as it may learn.
    TooManyMacs = "too_many_macs",
    /// The source IP, ARP or ND sender isn't one of the port's.
    SpoofIp = "spoof_ip",
    /// The port is guarded, and the frame can't be parsed.
    Unparsable = "unparsable",
    /// A message of a router, multicast querier or DHCP server from a port that may not be one.
    Server = "server",
    /// For an address that bridges do not forward (01:80:c2:00:00:00 to :0f).
    Reserved = "reserved",
    /// To a multicast group that no port has joined.
    Unwanted = "unwanted",
    /// The VLAN isn't one of the port's.
    Vlan = "vlan",
    /// One of the two ports is isolated.
    Isolated = "isolated",
    /// Beyond the port's rate.
    Rate = "rate",
    /// Beyond the receiver's rate.
    ReceiveRate = "receive_rate",
    /// A rule of the sender or the receiver drops it.
    Rule = "rule",
    /// For the host's loopback, from a guest behind passt.
    Loopback = "loopback",
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
    /// Counts forwarded packets with their bytes (Ethernet header included, virtio-net header not). Lock holder only.
    #[inline(always)]
    pub fn passed(&self, packets: u64, bytes: u64) {
        add(&self.packets, packets);
        add(&self.bytes, bytes);
    }

    /// Counts one dropped frame. Lock holder only.
    #[cold]
    pub fn drop_one(&self, reason: Reason) {
        add(&self.drops[reason as usize], 1);
    }

    /// Counts one flooded frame. Lock holder only.
    pub fn flooded(&self) {
        add(&self.flooded, 1);
    }

    /// Counts the copies of a frame. Lock holder only.
    pub fn copied(&self, copies: u64) {
        add(&self.copies, copies);
    }

    /// Counts one interrupt. Lock holder only.
    #[inline(always)]
    pub fn signalled(&self) {
        add(&self.signals, 1);
    }

    /// Returns the present counts.
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
    /// Frames that flooding and segmentation added.
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
