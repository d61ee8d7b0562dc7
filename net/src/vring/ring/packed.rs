// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The packed virtqueue (virtio 1.3 §2.8).

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use super::split::{indirect, read_desc};
use super::window::WINDOW;
use super::{
    Broken, Chain, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, MAX_CHAIN, RingAddress, RingError, RingFeatures,
    Window, area, event_passed,
};
use crate::cpu::prefetch_write;
use crate::vring::memory::{GuestMemory, Translator};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;
const WRAP: u16 = 1 << 15;
/// The flags of a descriptor's state and kind.
const STATE: u16 = AVAIL | USED | DESC_NEXT | DESC_INDIRECT | DESC_WRITE;
/// The base of a new ring, as front-ends send it that keep no used places.
const BEGIN_WITHOUT_USED: u32 = WRAP as u32;

/// A place in the ring and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    index: u16,
    wrap: bool,
}

impl Place {
    /// Decodes an event or a vring base: wrap counter in the top bit.
    fn from_word(word: u16) -> Self {
        Self { index: word & !WRAP, wrap: word & WRAP != 0 }
    }

    fn word(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    /// Encodes it as available and used place of a vring base.
    fn base(self) -> u32 {
        u32::from(self.word()) << 16 | u32::from(self.word())
    }

    #[inline(always)]
    fn advance(&mut self, n: u16, size: u16) {
        self.index += n;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }
}

/// Returns whether a descriptor's flags show that the driver has made it available in the lap of `wrap`.
#[inline(always)]
fn is_available(flags: u16, wrap: bool) -> bool {
    (flags & AVAIL != 0) == wrap && (flags & USED != 0) != wrap
}

/// The device's side of a packed virtqueue.
#[derive(Debug)]
pub struct PackedRing {
    desc: *mut u8,
    driver_event: *const u8,
    device_event: *mut u8,
    size: u16,
    features: RingFeatures,
    /// A batch is marked used by one descriptor.
    skips: bool,
    /// The next descriptor to fetch.
    next: Place,
    /// The next descriptor to mark used.
    used: Place,
    /// Entries fetched and not completed.
    outstanding: u16,
    /// The used place that the driver can see.
    published: Place,
    /// Completed and not published: length, id, entries. Written at once, since the driver keeps reading the line of the
    /// first.
    shadow: [(u32, u16, u16); WINDOW],
    shadowed: usize,
    /// The used place at the last decision about a signal.
    signalled: Option<Place>,
}

// SAFETY: as for the split ring.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// Makes a ring of `size` entries at `at` in `mem`, continuing at `base` (available index and wrap counter in the low,
    /// used ones in the high half, as in SET_VRING_BASE).
    ///
    /// # Errors
    /// The size or base is impossible, or an area isn't in memory or not aligned.
    pub fn new(
        mem: &GuestMemory,
        at: RingAddress,
        size: u16,
        base: u32,
        features: RingFeatures,
    ) -> Result<Self, RingError> {
        // Everything is completed in order, so chains that were available but not used are done again. Some front-ends (DPDK's
        // virtio-user) leave the used half empty.
        let high = (base >> 16) as u16;
        let place = Place::from_word(if high == 0 { base as u16 } else { high });
        if size == 0 || size > super::MAX_QUEUE || place.index >= size {
            return Err(RingError::Size(size));
        }
        let desc = area(mem, "descriptor", at.desc, 16 * u64::from(size), 16)?;
        let driver_event = area(mem, "driver event", at.avail, 4, 4)?;
        let device_event = area(mem, "device event", at.used, 4, 4)?;
        Ok(Self {
            desc,
            driver_event,
            device_event,
            size,
            features,
            // A successor finds its place by the used descriptors in the ring, unless the front-end stores it or starts rings
            // anew. Front-ends that begin without a used place (DPDK's virtio-user) are of the latter kind.
            skips: features.in_order && base == BEGIN_WITHOUT_USED,
            next: place,
            used: place,
            outstanding: 0,
            published: place,
            shadow: [(0, 0, 0); WINDOW],
            shadowed: 0,
            signalled: None,
        })
    }

    /// As [`PackedRing::new`], with a front-end's base for a switch that hasn't seen the ring before. A front-end that keeps
    /// no in-flight state (QEMU's virtio-net) knows only an old place after a crash of the switch: if the ring contradicts it,
    /// the ring's own place is used.
    ///
    /// # Errors
    /// As [`PackedRing::new`].
    pub fn told(
        mem: &GuestMemory,
        at: RingAddress,
        size: u16,
        base: u32,
        features: RingFeatures,
    ) -> Result<Self, RingError> {
        let mut ring = Self::new(mem, at, size, base, features)?;
        if let Some(found) = ring.shown().filter(|_| ring.contradicts(ring.used)) {
            (ring.next, ring.used, ring.published) = (found, found, found);
        }
        Ok(ring)
    }

    /// Returns the available and the used flag of an entry.
    fn state(&self, index: u16) -> (bool, bool) {
        let flags = self.flags(index).load(Ordering::Acquire);
        (flags & AVAIL != 0, flags & USED != 0)
    }

    /// Returns whether the device can't be at `place`. In lap `w` an entry before it can't still be as lap `!w` left it used,
    /// and one from there on can't be used in `w`. Entries within longer chains only ever have the driver's flags, so they
    /// look available and prove nothing. If all entries do, a driver that gave all of them to the device shows its place, at
    /// the border between the flags of the two laps.
    fn contradicts(&self, place: Place) -> bool {
        let used_in = |i: u16, lap: bool| self.state(i) == (lap, lap);
        if (0..self.size).all(|i| !used_in(i, true) && !used_in(i, false)) {
            return self.shown().is_some_and(|shown| shown != place);
        }
        (0..place.index).any(|i| used_in(i, !place.wrap))
            || (place.index..self.size).any(|i| used_in(i, place.wrap))
    }

    /// Returns the device's place by the used flags, if every entry is a chain of its own (as Linux drivers make them): in lap
    /// `w` the entries before its place have them at `w`, the later ones at `!w`. Else None.
    fn shown(&self) -> Option<Place> {
        let (_, first) = self.state(0);
        let place = match (1..self.size).find(|i| self.state(*i).1 != first) {
            None => Place { index: 0, wrap: !first },
            Some(index) => Place { index, wrap: first },
        };
        (place.index..self.size).all(|i| self.state(i).1 != place.wrap).then_some(place)
    }

    /// Makes a ring that continues where a predecessor was, whose last batch led from `old` to `new`: at `new` if the driver
    /// can see that batch, else at `old`.
    ///
    /// # Errors
    /// As [`PackedRing::new`].
    pub fn resume(
        mem: &GuestMemory,
        at: RingAddress,
        size: u16,
        (old, new): (u16, u16),
        features: RingFeatures,
    ) -> Result<Self, RingError> {
        let both = |word: u16| u32::from(word) << 16 | u32::from(word);
        let ring = Self::new(mem, at, size, both(old), features)?;
        let flags = ring.flags(ring.used.index).load(Ordering::Acquire);
        let visible = (flags & AVAIL != 0) == ring.used.wrap && (flags & USED != 0) == ring.used.wrap;
        if old != new && visible { Self::new(mem, at, size, both(new), features) } else { Ok(ring) }
    }

    #[inline(always)]
    fn flags(&self, index: u16) -> &AtomicU16 {
        // SAFETY: index < size; the descriptor area is mapped and 16-aligned.
        unsafe { AtomicU16::from_ptr(self.desc.add(16 * usize::from(index) + 14).cast()) }
    }

    /// Returns length, id and flags of a descriptor, in one word.
    #[inline(always)]
    fn tail(&self, index: u16) -> &AtomicU64 {
        // SAFETY: index < size; the descriptor area is mapped and 16-aligned.
        unsafe { AtomicU64::from_ptr(self.desc.add(16 * usize::from(index) + 8).cast()) }
    }

    #[inline(always)]
    fn driver_word(&self, byte: usize) -> u16 {
        // SAFETY: byte is 0 or 2 in a mapped, aligned area of 4.
        unsafe { AtomicU16::from_ptr(self.driver_event.add(byte).cast_mut().cast()).load(Ordering::Relaxed) }
    }

    fn set_device_word(&self, byte: usize, value: u16) {
        // SAFETY: byte is 0 or 2 in a mapped, aligned area of 4.
        unsafe { AtomicU16::from_ptr(self.device_event.add(byte).cast()).store(value, Ordering::Relaxed) }
    }

    #[inline(always)]
    fn available(&self, place: Place) -> bool {
        is_available(self.flags(place.index).load(Ordering::Acquire), place.wrap)
    }

    #[inline]
    pub(super) fn fetch(
        &mut self,
        tr: &mut Translator,
        win: &mut Window,
        write: bool,
        max: usize,
    ) -> Result<usize, Broken> {
        let max = win.room(max);
        let mut done = self.fetch_singles(tr, win, write, max);
        while done < max && self.has_available() {
            if !self.fetch_chain(tr, win, write)? {
                break;
            }
            done += 1;
            done += self.fetch_singles(tr, win, write, max - done);
        }
        Ok(done)
    }

    /// Returns length, id and flags of a descriptor that the driver has made available; its address then is valid, too.
    #[inline(always)]
    fn look(&self, place: Place) -> Option<(u32, u16, u16)> {
        let tail = self.tail(place.index).load(Ordering::Acquire);
        let (len, id, flags) = (tail as u32, (tail >> 32) as u16, (tail >> 48) as u16);
        is_available(flags, place.wrap).then_some((len, id, flags))
    }

    /// Fetches up to `max` chains of one buffer in one piece, up to the first other one; returns how many.
    #[inline(always)]
    fn fetch_singles(&mut self, tr: &mut Translator, win: &mut Window, write: bool, max: usize) -> usize {
        let mut next = self.next;
        let max = max.min(usize::from(self.size - self.outstanding));
        let mut singles = win.singles();
        let direction = if write { DESC_WRITE } else { 0 };
        let mut done = 0;
        'laps: while done < max {
            // Available, alone and for this direction; up to the ring's end all flags are those of one lap.
            let wanted = direction | if next.wrap { AVAIL } else { USED };
            let run = (max - done).min(usize::from(self.size - next.index));
            for i in 0..run {
                // Length, id and flags in one load; the address is valid once the flags are.
                let index = next.index + i as u16;
                let tail = self.tail(index).load(Ordering::Acquire);
                let at = self.desc.wrapping_add(16 * usize::from(index));
                // SAFETY: index < size, and the ring is mapped and aligned.
                let addr = unsafe { at.cast::<u64>().read_volatile() };
                let alone = (tail >> 48) as u16 & STATE == wanted;
                if !alone || !singles.push(tr, addr, tail as u32, (tail >> 32) as u16) {
                    next.index = index;
                    break 'laps;
                }
                // For writing: descriptors are marked used in place.
                prefetch_write(at.wrapping_add(128));
                done += 1;
            }
            next.advance(run as u16, self.size);
        }
        singles.finish();
        self.next = next;
        self.outstanding += done as u16;
        done
    }

    /// Fetches a chain of any kind whose first descriptor is available. False: no room at present.
    fn fetch_chain(&mut self, tr: &mut Translator, win: &mut Window, write: bool) -> Result<bool, Broken> {
        let Some((len, id, flags)) = self.look(self.next) else { return Ok(false) };
        win.begin();
        let (fits, id, entries) = if flags & (DESC_NEXT | DESC_INDIRECT) == 0 {
            if (flags & DESC_WRITE != 0) != write {
                return Err(Broken::Direction { flags });
            }
            // SAFETY: index < size, and the ring is mapped and aligned.
            let addr =
                unsafe { self.desc.add(16 * usize::from(self.next.index)).cast::<u64>().read_volatile() };
            (win.push(tr, addr, len)?, id, 1)
        } else {
            self.walk(tr, win, write)?
        };
        if !fits {
            win.abandon();
            return Ok(false);
        }
        if entries > self.size - self.outstanding {
            return Err(Broken::MoreThanRing { pending: entries + self.outstanding, size: self.size });
        }
        win.commit(id, entries);
        self.outstanding += entries;
        self.next.advance(entries, self.size);
        Ok(true)
    }

    /// Copies a chain of several descriptors or an indirect one; returns whether it fits, its id and its entries.
    fn walk(&self, tr: &mut Translator, win: &mut Window, write: bool) -> Result<(bool, u16, u16), Broken> {
        let mut at = self.next;
        for entries in 1..=self.size {
            // SAFETY: index < size, and the ring is mapped.
            let d = unsafe { read_desc(self.desc.add(16 * usize::from(at.index))) };
            let (id, flags) = (d.flags, d.next);
            if flags & DESC_INDIRECT != 0 {
                if !self.features.indirect || flags & DESC_NEXT != 0 || entries != 1 {
                    return Err(Broken::Indirect { flags });
                }
                return Ok((indirect(tr, win, write, d.addr, d.len, false)?, id, 1));
            }
            if (flags & DESC_WRITE != 0) != write {
                return Err(Broken::Direction { flags });
            }
            if usize::from(entries) > MAX_CHAIN {
                return Err(Broken::TooLong);
            }
            if !win.push(tr, d.addr, d.len)? {
                return Ok((false, id, entries));
            }
            if flags & DESC_NEXT == 0 {
                return Ok((true, id, entries));
            }
            at.advance(1, self.size);
        }
        Err(Broken::Loop { size: self.size.into() })
    }

    #[inline(always)]
    pub(super) fn complete(&mut self, chain: &Chain, len: u32) {
        if self.shadowed == WINDOW {
            self.publish();
        }
        self.shadow[self.shadowed] = (len, chain.id, chain.entries);
        self.shadowed += 1;
        self.used.advance(chain.entries, self.size);
        self.outstanding -= chain.entries;
    }

    #[inline]
    pub(super) fn complete_all(&mut self, chains: &[Chain]) {
        if let (true, Some(last)) = (self.skips && self.shadowed < WINDOW, chains.last()) {
            let entries = chains.iter().map(|chain| chain.entries).sum();
            self.complete(&Chain { entries, ..*last }, 0);
        } else {
            chains.iter().for_each(|chain| self.complete(chain, 0));
        }
    }

    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        let [first, rest @ ..] = &self.shadow[..self.shadowed] else { return false };
        let used = |(len, id, _): (u32, u16, u16), wrap: bool| {
            let flags = if wrap { AVAIL | USED } else { 0 } | if len > 0 { DESC_WRITE } else { 0 };
            u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48
        };
        let (begin, mut at) = (self.published, self.published);
        at.advance(first.2, self.size);
        for entry in rest {
            self.tail(at.index).store(used(*entry, at.wrap), Ordering::Relaxed);
            at.advance(entry.2, self.size);
        }
        // The first becomes visible last, and all others with it.
        self.tail(begin.index).store(used(*first, begin.wrap), Ordering::Release);
        self.published = at;
        self.shadowed = 0;
        true
    }

    #[inline]
    pub(super) fn should_signal(&mut self) -> bool {
        fence(Ordering::SeqCst);
        match self.driver_word(2) & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.features.event_idx => {
                let event = Place::from_word(self.driver_word(0));
                let new = self.used;
                let Some(old) = self.signalled.replace(new) else { return true };
                // Indices that grow without wrapping, seen from the present lap.
                let lap =
                    |p: Place| if p.wrap == new.wrap { p.index } else { p.index.wrapping_sub(self.size) };
                event_passed(lap(event), new.index, lap(old))
            }
            _ => true,
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        if self.features.event_idx {
            self.set_device_word(0, self.next.word());
            fence(Ordering::Release);
            self.set_device_word(2, EVENT_DESC);
        } else {
            self.set_device_word(2, EVENT_ENABLE);
        }
        fence(Ordering::SeqCst);
        self.has_available()
    }

    pub(super) fn disarm(&mut self) {
        self.set_device_word(2, EVENT_DISABLE);
    }

    pub(super) fn has_available(&self) -> bool {
        self.outstanding < self.size && self.available(self.next)
    }

    pub(super) fn rewind(&mut self) {
        self.publish();
        self.next = self.used;
        self.outstanding = 0;
    }

    pub(super) fn base(&self) -> u32 {
        // Available and used place are equal once all fetched chains are completed or forgotten.
        self.used.base()
    }

    pub(super) fn published(&self) -> u32 {
        self.published.base()
    }

    pub(super) fn written_since(&self, from: u32, mut range: impl FnMut(*const u8, usize)) {
        let mut at = Place::from_word((from >> 16) as u16);
        for _ in 0..self.size {
            if at == self.used {
                break;
            }
            range(self.desc.wrapping_add(16 * usize::from(at.index)), 16);
            at.advance(1, self.size);
        }
        range(self.device_event, 4);
    }
}
