// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses behind a port that the configuration doesn't name: VMs nested in its guest. A port that may learn some takes
//! the sources of what it sends, as many as it may, never one that another port owns or uses, or that an uplink brings
//! frames from; one that is silent for [`SILENCE_NS`] makes room. The table is the port's own and of fixed size, so a guest
//! that makes addresses up fills nobody's but its own. An uplink's says who is outside: nothing is sent by it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::forwarding::view::View;
use crate::ports::counters::Reason;

/// Most addresses that a port may learn.
pub const MAX_LEARNED: usize = 64;
/// How long an address stays that sends nothing (nanoseconds): as a bridge's do.
pub const SILENCE_NS: u64 = 300_000_000_000;

#[derive(Debug, Default)]
struct Slot {
    /// An address, as [`crate::frames::frame::Mac::key`] has it; 0: none.
    key: AtomicU64,
    /// When it sent last.
    heard: AtomicU64,
}

/// What a port has learned. Workers read it without a lock.
#[derive(Debug)]
pub struct Learned {
    slots: [Slot; MAX_LEARNED],
}

impl Default for Learned {
    fn default() -> Self {
        Self { slots: std::array::from_fn(|_| Slot::default()) }
    }
}

/// Held while an address is taken, so that two ports don't take the same one.
static TAKING: Mutex<()> = Mutex::new(());

impl Learned {
    /// Is the address known here, and in use at `now`?
    #[must_use]
    pub fn has(&self, key: u64, now: u64) -> bool {
        self.find(key).is_some_and(|slot| slot.is_fresh(now))
    }

    fn find(&self, key: u64) -> Option<&Slot> {
        self.slots.iter().find(|slot| key != 0 && slot.key.load(Ordering::Relaxed) == key)
    }
}

impl Slot {
    fn is_fresh(&self, now: u64) -> bool {
        now.saturating_sub(self.heard.load(Ordering::Relaxed)) < SILENCE_NS
    }
}

/// The uplink at `src` brings a frame from the address `key`: whoever uses that is outside. What a port has learned of it
/// is forgotten, and it is learned no more while it is heard. Of addresses beyond [`MAX_LEARNED`], those heard last stay.
pub fn note_outside(view: &View, src: usize, key: u64, now: u64) {
    // A group's address is nobody's, nor is zero.
    if key & 1 != 0 || key == 0 {
        return;
    }
    let outside = &view.ports()[src].port.learned;
    let (slots, known) = (&outside.slots, || outside.find(key));
    if let Some(slot) = known().filter(|slot| slot.is_fresh(now)) {
        slot.heard.store(now, Ordering::Relaxed);
        return;
    }
    let _taking = TAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let heard = |slot: &&Slot| (slot.key.load(Ordering::Relaxed) != 0, slot.heard.load(Ordering::Relaxed));
    if let Some(slot) = known().or_else(|| slots.iter().min_by_key(heard)) {
        slot.heard.store(now, Ordering::Relaxed);
        slot.key.store(key, Ordering::Relaxed);
    }
    for learner in view.learners() {
        if let Some(slot) = view.ports()[*learner].port.learned.find(key) {
            slot.key.store(0, Ordering::Relaxed);
        }
    }
}

/// May the port at `src` send from the address `key`, which the configuration doesn't give it? If so, it is learned.
///
/// # Errors
/// It is another's, somebody's outside, or the port has as many as it may.
pub fn learn(view: &View, src: usize, key: u64, now: u64) -> Result<(), Reason> {
    let own = &view.ports()[src];
    let slots = &own.port.learned.slots[..usize::from(own.policy.learn).min(MAX_LEARNED)];
    let known = || slots.iter().find(|s| s.key.load(Ordering::Relaxed) == key && s.is_fresh(now));
    if let Some(slot) = known() {
        slot.heard.store(now, Ordering::Relaxed);
        return Ok(());
    }
    // A group's address is nobody's, nor is zero.
    if key & 1 != 0 || key == 0 || view.owner(key).is_some() {
        return Err(Reason::SpoofMac);
    }
    let _taking = TAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if known().is_none() {
        let outside = |at: &usize| view.ports()[*at].port.learned.has(key, now);
        if view.learned(key, now).is_some() || view.uplinks().iter().any(outside) {
            return Err(Reason::SpoofMac);
        }
        let free = slots.iter().find(|s| s.key.load(Ordering::Relaxed) == 0 || !s.is_fresh(now));
        let slot = free.ok_or(Reason::TooManyMacs)?;
        slot.heard.store(now, Ordering::Relaxed);
        slot.key.store(key, Ordering::Relaxed);
    }
    Ok(())
}
