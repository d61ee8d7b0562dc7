// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses behind a port that the configuration doesn't name: VMs nested in its guest. A port that may learn takes the
//! sources of the frames that it sends, up to its limit, but never one that another port owns or uses, or that an uplink
//! receives frames from. An address that is silent for [`SILENCE_NS`] makes room. The table is the port's own and of fixed
//! size, so a guest that invents addresses fills only its own. An uplink has a table of [addresses outside](Outside), which is
//! not used for sending.
//!
//! An address is one of its VLAN ([`stations`]): the same one may be a nested VM's on one VLAN and another machine's on the next, and what is
//! learned on one steers no frame of another. That also holds for the tags that pass among transparent ports, which the switch does
//! not take for its VLANs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::forwarding::view::View;
use crate::frames::headers;
use crate::frames::vlan::VlanTag;
use crate::ports::counters::Reason;

/// Most addresses that a port may learn.
pub const MAX_LEARNED: usize = tombolo_control::net::config::LEARN_MAX as usize;
/// Lifetime of a silent address (nanoseconds): as in a bridge.
pub const SILENCE_NS: u64 = 300_000_000_000;

#[derive(Debug, Default)]
struct Slot {
    /// One of the [`stations`]; 0: none.
    key: AtomicU64,
    /// The time of its last frame.
    heard: AtomicU64,
}

/// The addresses that a port has learned. Workers read it without a lock.
#[derive(Debug)]
pub struct Learned {
    slots: [Slot; MAX_LEARNED],
}

impl Default for Learned {
    fn default() -> Self {
        Self { slots: std::array::from_fn(|_| Slot::default()) }
    }
}

/// A station of frames that pass among transparent ports with the tag that they have.
const OPEN: u64 = 1 << 60;

/// Returns the keys of the address `key` (as [`crate::frames::frame::Mac::key`] has it) in a frame on `tag` that starts with `head`: the
/// address on the switch's VLAN, and, if the frame may go to transparent ports, the address on the VLAN that its outer tag names there.
pub fn stations(key: u64, tag: VlanTag, head: &[u8]) -> impl Iterator<Item = u64> + use<> {
    let on = |vid: u16| key | u64::from(vid) << 48;
    let closed = tag.vid.map(on);
    closed.into_iter().chain(tag.open.then(|| on(headers::outer_vid(head)) | OPEN))
}

/// Held while an address is taken, so that two ports don't take the same one.
static TAKING: Mutex<()> = Mutex::new(());

impl Learned {
    /// Returns whether the station is known here and in use at `now`.
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

/// Addresses of an uplink that share their places.
const WAYS: usize = 8;
const SETS: usize = 1024;

#[derive(Debug, Default)]
struct Set {
    slots: [Slot; WAYS],
    /// The last time at which an address in use had to make room; 0: never.
    overflowed: AtomicU64,
}

/// Addresses outside: sources of the frames that an uplink has received. Workers read it without a lock.
#[derive(Debug)]
pub struct Outside {
    sets: Box<[Set]>,
}

impl Default for Outside {
    fn default() -> Self {
        Self { sets: (0..SETS).map(|_| Set::default()).collect() }
    }
}

impl Outside {
    fn set(&self, key: u64) -> &Set {
        &self.sets[(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SETS.trailing_zeros())) as usize]
    }

    /// Returns whether the address may be in use outside at `now`: it is known, or others were forgotten for want of room.
    fn may_have(&self, key: u64, now: u64) -> bool {
        let set = self.set(key);
        let overflowed = set.overflowed.load(Ordering::Relaxed);
        let forgotten = overflowed != 0 && now.saturating_sub(overflowed) < SILENCE_NS;
        forgotten || set.slots.iter().any(|s| s.key.load(Ordering::Relaxed) == key && s.is_fresh(now))
    }

    /// Enters an address.
    fn note(&self, key: u64, now: u64) {
        let set = self.set(key);
        let heard =
            |slot: &&Slot| (slot.key.load(Ordering::Relaxed) != 0, slot.heard.load(Ordering::Relaxed));
        let known = set.slots.iter().find(|slot| slot.key.load(Ordering::Relaxed) == key);
        let Some(slot) = known.or_else(|| set.slots.iter().min_by_key(heard)) else { return };
        if known.is_none() && slot.key.load(Ordering::Relaxed) != 0 && slot.is_fresh(now) {
            set.overflowed.store(now.max(1), Ordering::Relaxed);
        }
        slot.heard.store(now, Ordering::Relaxed);
        slot.key.store(key, Ordering::Relaxed);
    }
}

/// Called when the uplink at `src` receives a frame on `tag`, which starts with `head`, from the address `key`. If a port has learned that address there, the port
/// forgets it. No port learns it while the uplink keeps hearing it, nor while the uplink may have forgotten it for want of
/// room.
pub fn note_outside(view: &View, src: usize, key: u64, tag: VlanTag, head: &[u8], now: u64) {
    // No port owns a group's address, nor zero.
    if key & 1 != 0 || key == 0 {
        return;
    }
    stations(key, tag, head).for_each(|station| note_station(view, src, station, now));
}

fn note_station(view: &View, src: usize, key: u64, now: u64) {
    let outside = view.ports()[src].port.outside.get_or_init(Outside::default);
    let known = outside.set(key).slots.iter().find(|s| s.key.load(Ordering::Relaxed) == key);
    if let Some(slot) = known.filter(|slot| slot.is_fresh(now)) {
        slot.heard.store(now, Ordering::Relaxed);
        return;
    }
    let _taking = TAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    outside.note(key, now);
    for learner in view.learners() {
        if let Some(slot) = view.ports()[*learner].port.learned.find(key) {
            slot.key.store(0, Ordering::Relaxed);
        }
    }
}

/// Returns whether the port at `src` may send a frame on `tag`, which starts with `head`, from the address `mac`, which the configuration
/// doesn't give it. If so, the port learns it.
///
/// # Errors
/// It is another port's, is in use outside, or the port has as many as it may.
pub fn learn(view: &View, src: usize, mac: u64, tag: VlanTag, head: &[u8], now: u64) -> Result<(), Reason> {
    // A guest's frame is on a VLAN of the switch or passes among transparent ports.
    let Some(key) = stations(mac, tag, head).next() else { return Err(Reason::SpoofMac) };
    let own = &view.ports()[src];
    let slots = &own.port.learned.slots[..usize::from(own.policy.learn).min(MAX_LEARNED)];
    let known = || slots.iter().find(|s| s.key.load(Ordering::Relaxed) == key && s.is_fresh(now));
    if let Some(slot) = known() {
        slot.heard.store(now, Ordering::Relaxed);
        return Ok(());
    }
    // No port owns a group's address, nor zero.
    if mac & 1 != 0 || mac == 0 || view.owner(mac).is_some() {
        return Err(Reason::SpoofMac);
    }
    let _taking = TAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if known().is_none() {
        let outside = |at: &usize| view.ports()[*at].port.outside.get().is_some_and(|o| o.may_have(key, now));
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
