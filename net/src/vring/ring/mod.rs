// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device's side of a virtqueue, split ([`split`]) or packed ([`packed`]) (virtio 1.3 §2.7, §2.8).
//!
//! Both work alike: [`Ring::fetch`] copies available chains once, checks every field and stores translated buffers in a
//! [`Window`]; the caller uses buffers in order and marks them used with [`Ring::complete`]; [`Ring::publish`] makes them
//! visible to the driver with one release store for the whole batch; [`Ring::should_signal`] reads, after a fence, whether
//! the driver wants an interrupt. Chains are always completed in the order in which they were made available, so the in-order
//! feature costs nothing, and the ring's own used index is the only in-flight state.
//!
//! Results are three-way: `Ok(n > 0)` chains, `Ok(0)` no chain at the moment, `Err` ([`Broken`]) a ring that no correct
//! driver makes; the caller stops the port.

pub mod packed;
pub mod split;
pub mod window;

use crate::vring::memory::{GuestMemory, Translator};
pub use packed::PackedRing;
pub use split::SplitRing;
pub use window::{Chain, Segment, Window};

/// Most descriptors that one chain may have, indirect ones included.
pub const MAX_CHAIN: usize = 1024;
/// Largest queue (virtio 1.3 §2.7: queue size is at most 32768).
pub const MAX_QUEUE: u16 = 32768;

/// Descriptor flag: another descriptor follows.
pub const DESC_NEXT: u16 = 1;
/// Descriptor flag: the device writes, else it reads.
pub const DESC_WRITE: u16 = 2;
/// Descriptor flag: the buffer is itself a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;

/// A fault that no correct driver makes. The port is stopped with it as the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More chains available than the ring has entries.
    #[error("{pending} chains available in a ring of {size}")]
    MoreThanRing {
        /// Chains or descriptors that the driver claims.
        pending: u16,
        /// Entries in the ring.
        size: u16,
    },
    /// A descriptor index beyond its table.
    #[error("descriptor index {index} beyond a table of {size}")]
    Index {
        index: u32,
        /// Entries in the table.
        size: u32,
    },
    /// A chain that goes on for longer than its table has entries: a loop.
    #[error("descriptor chain longer than its table of {size}: a loop")]
    Loop {
        /// Entries in the table.
        size: u32,
    },
    /// A chain of more than [`MAX_CHAIN`] descriptors or 4 GiB.
    #[error("descriptor chain longer than {MAX_CHAIN} pieces or 4 GiB")]
    TooLong,
    /// A buffer outside of the guest's memory.
    #[error("buffer of {len} bytes at guest address {gpa:#x} is not in the guest's memory")]
    Address {
        /// Guest-physical address.
        gpa: u64,
        len: u32,
    },
    /// A buffer that the device should read is for writing, or the other way round.
    #[error("descriptor for the other direction (flags {flags:#x})")]
    Direction {
        /// The descriptor's flags.
        flags: u16,
    },
    /// An indirect table inside an indirect table, or together with NEXT, or not negotiated.
    #[error("indirect descriptor where none may be (flags {flags:#x})")]
    Indirect {
        /// The descriptor's flags.
        flags: u16,
    },
    /// An indirect table whose length isn't a positive multiple of 16, or too large.
    #[error("indirect table of {len} bytes")]
    IndirectLength { len: u32 },
}

/// The negotiated features that a ring uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
}

/// The addresses of a ring's three areas (the front-end's virtual addresses).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddress {
    /// Descriptor table, or the packed ring.
    pub desc: u64,
    /// Available ring, or the driver's event suppression.
    pub avail: u64,
    /// Used ring, or the device's event suppression.
    pub used: u64,
}

/// The reason why a ring can't be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Size 0, too large, or (split) no power of two.
    #[error("queue size {0} is not possible")]
    Size(u16),
    /// An area isn't in shared memory.
    #[error("the {0} area at {1:#x} is not in the memory that was shared")]
    Unmapped(&'static str, u64),
    /// An area isn't aligned.
    #[error("the {0} area at {1:#x} is not aligned")]
    Unaligned(&'static str, u64),
}

/// Translates and checks one area.
fn area(
    mem: &GuestMemory,
    name: &'static str,
    user: u64,
    len: u64,
    align: u64,
) -> Result<*mut u8, RingError> {
    let host = mem.at_user(user, len).ok_or(RingError::Unmapped(name, user))?;
    if (host as u64) % align != 0 {
        return Err(RingError::Unaligned(name, user));
    }
    Ok(host)
}

/// Returns whether going from `old` to `new` passed the index that the driver waits for (virtio 1.3 §2.7.10).
#[inline(always)]
fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A virtqueue, either kind.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one per queue, in place; a box would be a cache line more per batch"
)]
pub enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

macro_rules! either {
    ($ring:expr, $r:ident => $body:expr) => {
        match $ring {
            Ring::Split($r) => $body,
            Ring::Packed($r) => $body,
        }
    };
}

impl Ring {
    /// Copies and checks up to `max` more available chains into `win`; `write`: the device writes into them (receive queue of
    /// the guest). Returns how many.
    ///
    /// # Errors
    /// The ring is broken; `win` holds the chains before the bad one.
    #[inline]
    pub fn fetch(
        &mut self,
        tr: &mut Translator,
        win: &mut Window,
        write: bool,
        max: usize,
    ) -> Result<usize, Broken> {
        either!(self, r => r.fetch(tr, win, write, max))
    }

    /// Marks the oldest fetched chain used, with `len` bytes written; the driver sees it after [`Ring::publish`].
    #[inline(always)]
    pub fn complete(&mut self, chain: &Chain, len: u32) {
        either!(self, r => r.complete(chain, len));
    }

    /// Marks the oldest fetched chains used, with nothing written. For a driver with in-order completion only the last one is
    /// marked, so the lines of the others are not written (virtio 1.3 §2.7.9, §2.8.11).
    #[inline]
    pub fn complete_all(&mut self, chains: &[Chain]) {
        either!(self, r => r.complete_all(chains));
    }

    /// Makes all completed chains visible to the driver. False: there were none.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(self, r => r.publish())
    }

    /// Returns whether the driver wants an interrupt for the chains published since the last call.
    #[inline]
    pub fn should_signal(&mut self) -> bool {
        either!(self, r => r.should_signal())
    }

    /// Asks the driver for a kick at the next available chain. True: there is one already, the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        either!(self, r => r.arm())
    }

    /// Tells the driver not to kick.
    pub fn disarm(&mut self) {
        either!(self, r => r.disarm());
    }

    /// Returns whether there are available chains that were not fetched.
    #[must_use]
    pub fn has_available(&self) -> bool {
        either!(self, r => r.has_available())
    }

    /// Forgets chains fetched and not completed: the next fetch starts there.
    pub fn rewind(&mut self) {
        either!(self, r => r.rewind());
    }

    /// Returns the position in the form of GET_VRING_BASE: available index; packed: with wrap counters and used index.
    #[must_use]
    pub fn base(&self) -> u32 {
        either!(self, r => r.base())
    }

    /// Returns the place up to which the driver sees chains as used, in the form of [`Ring::base`].
    #[must_use]
    pub fn published(&self) -> u32 {
        either!(self, r => r.published())
    }

    /// Calls `range` with the first byte and length of each range of the ring that the device has written since `from` (a
    /// former [`Ring::base`]), for the dirty log.
    pub fn written_since(&self, from: u32, range: impl FnMut(*const u8, usize)) {
        either!(self, r => r.written_since(from, range));
    }
}
