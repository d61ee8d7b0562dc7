// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A port: a name and its vrings. Receive and transmit are seen from the guest: it receives from vring 0, 2, 4, … (the switch
//! writes) and transmits on 1, 3, 5, … (the switch reads).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::forwarding::learn::{Learned, Outside};
use crate::forwarding::multicast::Groups;
use crate::policy::limit::Limiter;
use crate::ports::counters::Counts;
use crate::vring::queue::Vring;

/// Most queue pairs of a port.
pub const MAX_PAIRS: usize = tombolo_control::net::config::QUEUES_MAX;

/// The interval of warnings about a port after a burst (nanoseconds).
const WARNING_NS: u64 = 1_000_000_000;
const WARNINGS_NS: u64 = 20 * WARNING_NS;

/// The number of the next port.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// A port of the switch.
pub struct Port {
    name: String,
    /// No other port of this process has it, earlier or later.
    number: usize,
    vrings: Box<[Vring]>,
    /// Bit n: receive queue n is started and enabled.
    active_rx: AtomicU32,
    /// Bit n: transmit queue n is started and enabled.
    active_tx: AtomicU32,
    /// The worker that carries each transmit queue.
    homes: Box<[AtomicUsize]>,
    /// The use of the port's sending rates.
    pub limiter: Limiter,
    /// The use of the port's receiving rates.
    pub receive_limiter: Limiter,
    /// The announcements that its front-end has had sent.
    pub announcements: Limiter,
    /// Addresses that it has learned beyond its own.
    pub learned: Learned,
    /// Of an uplink: the addresses behind it.
    pub outside: OnceLock<Outside>,
    /// Multicast groups that it has joined.
    pub groups: Groups,
    /// A front-end is connected.
    pub connected: AtomicBool,
    /// The present front-end has made an eventfd block ([`crate::vring::queue::State::blocks`]).
    pub blocks: Arc<AtomicBool>,
    /// The time up to which warnings about it have been paid for.
    warned: AtomicU64,
}

impl Port {
    /// Makes a port with room for `pairs` queue pairs (1 to [`MAX_PAIRS`]).
    #[must_use]
    pub fn new(name: &str, pairs: usize) -> Self {
        let pairs = pairs.clamp(1, MAX_PAIRS);
        let blocks = Arc::<AtomicBool>::default();
        let vring = |_| {
            let vring = Vring::default();
            vring.lock().blocks = blocks.clone();
            vring
        };
        Self {
            name: name.into(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            vrings: (0..2 * pairs).map(vring).collect(),
            active_rx: AtomicU32::new(0),
            active_tx: AtomicU32::new(0),
            homes: (0..pairs).map(|_| AtomicUsize::new(0)).collect(),
            limiter: Limiter::default(),
            receive_limiter: Limiter::default(),
            announcements: Limiter::default(),
            learned: Learned::default(),
            outside: OnceLock::new(),
            groups: Groups::default(),
            connected: AtomicBool::new(false),
            blocks,
            warned: AtomicU64::new(0),
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a number that no other port has, earlier or later. A port that was made later has a larger one.
    #[inline(always)]
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns whether a warning about it may be logged at `now`: a burst, and then one per second, since its front-end may
    /// break it as often as it likes.
    pub fn may_warn(&self, now: u64) -> bool {
        if self.warned.fetch_max(now, Ordering::Relaxed) > now.saturating_add(WARNINGS_NS) {
            return false;
        }
        self.warned.fetch_add(WARNING_NS, Ordering::Relaxed);
        true
    }

    /// Returns all vrings, in the protocol's order.
    #[must_use]
    pub fn vrings(&self) -> &[Vring] {
        &self.vrings
    }

    /// Returns the number of queue pairs.
    #[inline(always)]
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.vrings.len() / 2
    }

    /// Returns the vring that the guest receives from, for any number (taken modulo the number of queues).
    #[inline(always)]
    #[must_use]
    pub fn rx(&self, queue: usize) -> &Vring {
        &self.vrings[2 * (queue % self.pairs())]
    }

    /// Returns the vring that the guest transmits on, for any number (taken modulo the number of queues).
    #[inline(always)]
    #[must_use]
    pub fn tx(&self, queue: usize) -> &Vring {
        &self.vrings[2 * (queue % self.pairs()) + 1]
    }

    /// Returns the worker that carries transmit queue `queue`.
    #[must_use]
    pub fn home(&self, queue: usize) -> usize {
        self.homes[queue % self.pairs()].load(Ordering::Relaxed)
    }

    /// Assigns transmit queue `queue` to a worker, which takes it over at the switch's next change.
    pub fn set_home(&self, queue: usize, worker: usize) {
        self.homes[queue % self.pairs()].store(worker, Ordering::Relaxed);
    }

    /// Records which queues are active; called after each change.
    pub fn note_active(&self) {
        for (parity, active) in [&self.active_rx, &self.active_tx].into_iter().enumerate() {
            let mut mask = 0;
            for (i, vring) in self.vrings.iter().skip(parity).step_by(2).enumerate() {
                if vring.lock().is_active() {
                    mask |= 1 << i;
                }
            }
            active.store(mask, Ordering::Release);
        }
    }

    /// Returns whether transmit queue `queue` was active at the last change, without a lock.
    #[must_use]
    pub fn is_transmitting(&self, queue: usize) -> bool {
        self.active_tx.load(Ordering::Relaxed) >> queue & 1 != 0
    }

    /// Stops all queues after one of them was found broken. The caller holds none of their locks.
    pub fn fail(&self) {
        for vring in &self.vrings {
            let mut vring = vring.lock();
            if vring.ring.is_some() {
                vring.stop();
                vring.tell_error();
            }
        }
        // A front-end may have started one again.
        self.note_active();
    }

    /// Returns an active receive queue, the same for the same `flow`. None: the port is down.
    #[inline(always)]
    #[must_use]
    pub fn active_rx(&self, flow: usize) -> Option<usize> {
        let mut mask = self.active_rx.load(Ordering::Relaxed);
        if mask == 0 {
            return None;
        }
        for _ in 0..flow % mask.count_ones() as usize {
            mask &= mask - 1;
        }
        Some(mask.trailing_zeros() as usize)
    }

    /// Returns the guest's received frames (and those dropped for it), over all queues.
    #[must_use]
    pub fn received(&self) -> Counts {
        self.sum(0)
    }

    /// Returns the guest's sent frames, over all queues.
    #[must_use]
    pub fn sent(&self) -> Counts {
        self.sum(1)
    }

    fn sum(&self, parity: usize) -> Counts {
        let mut sum = Counts::default();
        for vring in self.vrings.iter().skip(parity).step_by(2) {
            sum += vring.counters.read();
        }
        sum
    }
}
