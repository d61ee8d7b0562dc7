// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A port: a name and its vrings. Receive and transmit are the guest's words: it receives from vring 0, 2, 4, …
//! (we write) and transmits on 1, 3, 5, … (we read).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::forwarding::learn::{Learned, Outside};
use crate::forwarding::multicast::Groups;
use crate::policy::limit::Limiter;
use crate::ports::counters::Counts;
use crate::vring::queue::Vring;

/// Most queue pairs of a port.
pub const MAX_PAIRS: usize = 16;

/// What a warning about a port costs, and how much may be said at once, in time (nanoseconds).
const WARNING_NS: u64 = 1_000_000_000;
const WARNINGS_NS: u64 = 20 * WARNING_NS;

/// A port of the switch.
pub struct Port {
    name: String,
    vrings: Box<[Vring]>,
    /// Bit n: receive queue n is started and enabled.
    active_rx: AtomicU32,
    /// Bit n: transmit queue n is started and enabled.
    active_tx: AtomicU32,
    /// Which worker carries what the guest sends, by queue.
    homes: Box<[AtomicUsize]>,
    /// What the port has used of its rates.
    pub limiter: Limiter,
    /// What others have used of what it may be sent.
    pub receive_limiter: Limiter,
    /// Addresses that it uses beyond its own, where it may.
    pub learned: Learned,
    /// Of an uplink: who is behind it.
    pub outside: OnceLock<Outside>,
    /// Multicast groups that it has joined.
    pub groups: Groups,
    /// A front-end is connected.
    pub connected: AtomicBool,
    /// The time that warnings about it have been paid for.
    warned: AtomicU64,
}

impl Port {
    /// A port with room for `pairs` queue pairs (1 to [`MAX_PAIRS`]).
    #[must_use]
    pub fn new(name: &str, pairs: usize) -> Self {
        let pairs = pairs.clamp(1, MAX_PAIRS);
        Self {
            name: name.into(),
            vrings: (0..2 * pairs).map(|_| Vring::default()).collect(),
            active_rx: AtomicU32::new(0),
            active_tx: AtomicU32::new(0),
            homes: (0..pairs).map(|_| AtomicUsize::new(0)).collect(),
            limiter: Limiter::default(),
            receive_limiter: Limiter::default(),
            learned: Learned::default(),
            outside: OnceLock::new(),
            groups: Groups::default(),
            connected: AtomicBool::new(false),
            warned: AtomicU64::new(0),
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// May the log have a warning about it at `now`? So many, and then one per second: its front-end may break it as often as
    /// it likes.
    pub fn may_warn(&self, now: u64) -> bool {
        if self.warned.fetch_max(now, Ordering::Relaxed) > now.saturating_add(WARNINGS_NS) {
            return false;
        }
        self.warned.fetch_add(WARNING_NS, Ordering::Relaxed);
        true
    }

    /// All vrings, in the protocol's order.
    #[must_use]
    pub fn vrings(&self) -> &[Vring] {
        &self.vrings
    }

    /// Queue pairs that there is room for.
    #[inline(always)]
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.vrings.len() / 2
    }

    /// The vring that the guest receives from, for any number (taken modulo the number of queues).
    #[inline(always)]
    #[must_use]
    pub fn rx(&self, queue: usize) -> &Vring {
        &self.vrings[2 * (queue % self.pairs())]
    }

    /// The vring that the guest transmits on, for any number (taken modulo the number of queues).
    #[inline(always)]
    #[must_use]
    pub fn tx(&self, queue: usize) -> &Vring {
        &self.vrings[2 * (queue % self.pairs()) + 1]
    }

    /// The worker that carries transmit queue `queue`.
    #[must_use]
    pub fn home(&self, queue: usize) -> usize {
        self.homes[queue % self.pairs()].load(Ordering::Relaxed)
    }

    /// Gives transmit queue `queue` to a worker, which takes it over at the switch's next change.
    pub fn set_home(&self, queue: usize, worker: usize) {
        self.homes[queue % self.pairs()].store(worker, Ordering::Relaxed);
    }

    /// Looks which queues are active; to be called after each change.
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

    /// Was transmit queue `queue` active at the last change? Whoever asks holds up no worker.
    #[must_use]
    pub fn is_transmitting(&self, queue: usize) -> bool {
        self.active_tx.load(Ordering::Relaxed) >> queue & 1 != 0
    }

    /// Stops all queues, one of them having been found broken. The caller holds none of their locks.
    pub fn fail(&self) {
        for vring in &self.vrings {
            let mut vring = vring.lock();
            if vring.ring.is_some() {
                vring.stop();
                vring.tell_error();
            }
        }
        self.active_rx.store(0, Ordering::Release);
        self.active_tx.store(0, Ordering::Release);
    }

    /// An active receive queue, the same for the same `flow`. None: the port is down.
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

    /// What the guest has received (and what was lost on the way in), over all queues.
    #[must_use]
    pub fn received(&self) -> Counts {
        self.sum(0)
    }

    /// What the guest has sent, over all queues.
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
