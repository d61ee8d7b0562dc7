// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The split virtqueue (virtio 1.3 §2.7).

use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::window::WINDOW;
use super::{
    Broken, Chain, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, MAX_CHAIN, RingAddress, RingError, RingFeatures,
    Window, area, event_passed,
};
use crate::cpu::{prefetch, prefetch_write};
use crate::vring::memory::{GuestMemory, Translator};

const AVAIL_NO_INTERRUPT: u16 = 1;
const USED_NO_NOTIFY: u16 = 1;

/// One descriptor, copied.
#[derive(Clone, Copy)]
pub(super) struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

/// Copies the 16 bytes of a descriptor once, as two words.
///
/// # Safety
/// `at` points to 16 mapped bytes.
#[inline(always)]
pub(super) unsafe fn read_desc(at: *const u8) -> Desc {
    // SAFETY: the caller's promise; volatile, since the other side may write at any time.
    let (addr, rest) = unsafe {
        let p = at.cast::<u64>();
        if p.is_aligned() {
            (p.read_volatile(), p.add(1).read_volatile())
        } else {
            let mut bytes = [0u8; 16];
            for (i, b) in bytes.iter_mut().enumerate() {
                *b = at.add(i).read_volatile();
            }
            let word = |i: usize| u64::from_le_bytes(bytes[i..i + 8].try_into().unwrap_or_default());
            (word(0), word(8))
        }
    };
    Desc { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
}

/// The device's side of a split virtqueue.
#[derive(Debug)]
pub struct SplitRing {
    desc: *const u8,
    avail: *const u8,
    used: *mut u8,
    size: u16,
    features: RingFeatures,
    /// The available index as read last.
    seen: u16,
    /// The next available entry to fetch.
    next: u16,
    /// The next used entry to write.
    used_next: u16,
    /// The used index as published last.
    published: u16,
    /// The used index at the last decision about a signal; None: signal the first time.
    signalled: Option<u16>,
}

// SAFETY: the pointers belong to a mapping that the owner keeps alive next to the ring; one thread at a time uses it.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// Makes a ring of `size` entries at `at` in `mem`, continuing at available index `base`. If the used index in
    /// memory differs, it wins: everything is completed in order, so chains that were not completed are done again.
    ///
    /// # Errors
    /// The size is no power of two, or an area isn't in memory or not aligned.
    pub fn new(
        mem: &GuestMemory,
        at: RingAddress,
        size: u16,
        base: u16,
        features: RingFeatures,
    ) -> Result<Self, RingError> {
        if !size.is_power_of_two() || size > super::MAX_QUEUE {
            return Err(RingError::Size(size));
        }
        let n = u64::from(size);
        let desc = area(mem, "descriptor", at.desc, 16 * n, 16)?;
        let avail = area(mem, "available", at.avail, 6 + 2 * n, 2)?;
        let used = area(mem, "used", at.used, 6 + 8 * n, 4)?;
        let mut ring = Self {
            desc,
            avail,
            used,
            size,
            features,
            seen: base,
            next: base,
            used_next: base,
            published: base,
            signalled: None,
        };
        let used_idx = ring.used_idx().load(Ordering::Acquire);
        (ring.seen, ring.next, ring.used_next, ring.published) = (used_idx, used_idx, used_idx, used_idx);
        Ok(ring)
    }

    #[inline(always)]
    fn avail_word(&self, byte: usize) -> &AtomicU16 {
        // SAFETY: byte is an even offset within the available area, checked to be mapped and aligned.
        unsafe { AtomicU16::from_ptr(self.avail.add(byte).cast_mut().cast()) }
    }

    #[inline(always)]
    fn used_word(&self, byte: usize) -> &AtomicU16 {
        // SAFETY: byte is an even offset within the used area, checked to be mapped and aligned.
        unsafe { AtomicU16::from_ptr(self.used.add(byte).cast()) }
    }

    #[inline(always)]
    fn used_idx(&self) -> &AtomicU16 {
        self.used_word(2)
    }

    #[inline]
    pub(super) fn fetch(
        &mut self,
        tr: &mut Translator,
        win: &mut Window,
        write: bool,
        max: usize,
    ) -> Result<usize, Broken> {
        if self.seen == self.next {
            self.seen = self.avail_word(2).load(Ordering::Acquire);
        }
        let pending = self.seen.wrapping_sub(self.next);
        if pending == 0 {
            return Ok(0);
        }
        if pending > self.size {
            return Err(Broken::MoreThanRing { pending, size: self.size });
        }
        let n = win.room(usize::from(pending).min(max));
        let mask = self.size - 1;
        let mut heads = [0u16; WINDOW];
        for (i, head) in heads[..n].iter_mut().enumerate() {
            let slot = usize::from(self.next.wrapping_add(i as u16) & mask);
            *head = self.avail_word(4 + 2 * slot).load(Ordering::Relaxed);
            // SAFETY: a prefetch of any address is harmless.
            prefetch(self.desc.wrapping_add(16 * usize::from(*head)));
        }
        // The driver has read the lines of the used elements: stores that miss would wait for one another.
        for i in (0..n).step_by(8) {
            let slot = usize::from(self.next.wrapping_add(i as u16) & mask);
            prefetch_write(self.used.wrapping_add(4 + 8 * slot));
        }
        let mut done = self.fetch_singles(tr, win, write, &heads[..n]);
        while let Some(&head) = heads[..n].get(done) {
            if head >= self.size {
                return Err(Broken::Index { index: head.into(), size: self.size.into() });
            }
            if !self.walk(tr, win, write, head)? {
                break;
            }
            self.next = self.next.wrapping_add(1);
            done += 1;
            done += self.fetch_singles(tr, win, write, &heads[done..n]);
        }
        Ok(done)
    }

    /// Copies chains of one buffer in one piece, up to the first other one; returns how many.
    #[inline(always)]
    fn fetch_singles(&mut self, tr: &mut Translator, win: &mut Window, write: bool, heads: &[u16]) -> usize {
        let direction = if write { DESC_WRITE } else { 0 };
        let mut singles = win.singles();
        let mut done = 0;
        for &head in heads {
            if head >= self.size {
                break;
            }
            // SAFETY: head < size, and the table is mapped.
            let d = unsafe { read_desc(self.desc.add(16 * usize::from(head))) };
            let single = d.flags & (DESC_NEXT | DESC_INDIRECT | DESC_WRITE) == direction;
            if !single || !singles.push(tr, d.addr, d.len, head) {
                break;
            }
            done += 1;
        }
        singles.finish();
        self.next = self.next.wrapping_add(done as u16);
        done
    }

    /// Copies one chain. False: no room at present.
    #[inline(always)]
    fn walk(&self, tr: &mut Translator, win: &mut Window, write: bool, head: u16) -> Result<bool, Broken> {
        win.begin();
        // SAFETY: head < size, and the table is mapped.
        let d = unsafe { read_desc(self.desc.add(16 * usize::from(head))) };
        let fits = if d.flags & (DESC_NEXT | DESC_INDIRECT) == 0 {
            if (d.flags & DESC_WRITE != 0) != write {
                return Err(Broken::Direction { flags: d.flags });
            }
            win.push(tr, d.addr, d.len)?
        } else if d.flags & DESC_INDIRECT != 0 {
            if !self.features.indirect || d.flags & DESC_NEXT != 0 {
                return Err(Broken::Indirect { flags: d.flags });
            }
            indirect(tr, win, write, d.addr, d.len, true)?
        } else {
            self.walk_table(tr, win, write, d)?
        };
        if !fits {
            win.abandon();
            return Ok(false);
        }
        win.commit(head, 1);
        Ok(true)
    }

    /// Copies the rest of a chain through the ring's own table, from its first descriptor on.
    fn walk_table(
        &self,
        tr: &mut Translator,
        win: &mut Window,
        write: bool,
        first: Desc,
    ) -> Result<bool, Broken> {
        let mut d = first;
        for step in 1.. {
            if d.flags & DESC_INDIRECT != 0 {
                // Only the last descriptor of a chain may be indirect, and this device accepts it only alone.
                if !self.features.indirect || d.flags & DESC_NEXT != 0 {
                    return Err(Broken::Indirect { flags: d.flags });
                }
                return indirect(tr, win, write, d.addr, d.len, true);
            }
            if (d.flags & DESC_WRITE != 0) != write {
                return Err(Broken::Direction { flags: d.flags });
            }
            if !win.push(tr, d.addr, d.len)? {
                return Ok(false);
            }
            if d.flags & DESC_NEXT == 0 {
                break;
            }
            if step >= self.size {
                return Err(Broken::Loop { size: self.size.into() });
            }
            if usize::from(step) >= MAX_CHAIN {
                return Err(Broken::TooLong);
            }
            if d.next >= self.size {
                return Err(Broken::Index { index: d.next.into(), size: self.size.into() });
            }
            // SAFETY: next < size, and the table is mapped.
            d = unsafe { read_desc(self.desc.add(16 * usize::from(d.next))) };
        }
        Ok(true)
    }

    #[inline(always)]
    pub(super) fn complete(&mut self, chain: &Chain, len: u32) {
        let slot = usize::from(self.used_next & (self.size - 1));
        let word = u64::from(chain.id) | u64::from(len) << 32;
        // SAFETY: slot < size; the used area is mapped and 4-aligned, the element 8 bytes.
        unsafe { self.used.add(4 + 8 * slot).cast::<u64>().write_unaligned(word) };
        self.used_next = self.used_next.wrapping_add(1);
    }

    #[inline]
    pub(super) fn complete_all(&mut self, chains: &[Chain]) {
        if let (true, [all @ .., last]) = (self.features.in_order, chains) {
            // At the place of the first; the driver skips the others.
            self.complete(last, 0);
            self.used_next = self.used_next.wrapping_add(all.len() as u16);
        } else {
            chains.iter().for_each(|chain| self.complete(chain, 0));
        }
    }

    #[inline(always)]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.used_next {
            return false;
        }
        self.used_idx().store(self.used_next, Ordering::Release);
        self.published = self.used_next;
        true
    }

    #[inline]
    pub(super) fn should_signal(&mut self) -> bool {
        // The driver stores its event index, then loads the used index; the device the other way round.
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = self.avail_word(4 + 2 * usize::from(self.size)).load(Ordering::Relaxed);
            let new = self.published;
            self.signalled.replace(new).is_none_or(|old| event_passed(event, new, old))
        } else {
            self.avail_word(0).load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        if self.features.event_idx {
            self.used_word(4 + 8 * usize::from(self.size)).store(self.next, Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.has_available()
    }

    pub(super) fn disarm(&mut self) {
        if self.features.event_idx {
            // An event as far ahead as an index can be.
            self.used_word(4 + 8 * usize::from(self.size))
                .store(self.next.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.used_word(0).store(USED_NO_NOTIFY, Ordering::Relaxed);
        }
    }

    pub(super) fn has_available(&self) -> bool {
        self.avail_word(2).load(Ordering::Acquire) != self.next
    }

    pub(super) fn rewind(&mut self) {
        self.publish();
        self.next = self.used_next;
        self.seen = self.used_next;
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.used_next)
    }

    pub(super) fn published(&self) -> u32 {
        u32::from(self.published)
    }

    pub(super) fn written_since(&self, from: u32, mut range: impl FnMut(*const u8, usize)) {
        range(self.used, 4);
        let mut at = from as u16;
        for _ in 0..self.size {
            if at == self.used_next {
                break;
            }
            let slot = usize::from(at & (self.size - 1));
            range(self.used.wrapping_add(4 + 8 * slot), 8);
            at = at.wrapping_add(1);
        }
        range(self.used.wrapping_add(4 + 8 * usize::from(self.size)), 2);
    }
}

/// Copies the chain of an indirect table: in `chained` tables (split) descriptors name the next one, else (packed) they
/// follow one another.
#[inline]
pub(super) fn indirect(
    tr: &mut Translator,
    win: &mut Window,
    write: bool,
    gpa: u64,
    len: u32,
    chained: bool,
) -> Result<bool, Broken> {
    let count = len / 16;
    if len % 16 != 0 || count == 0 {
        return Err(Broken::IndirectLength { len });
    }
    if count as usize > MAX_CHAIN && !chained {
        return Err(Broken::TooLong);
    }
    // Usually the table lies in one piece; otherwise it is read descriptor by descriptor.
    let whole = tr.at(gpa, len).filter(|(_, piece)| *piece == len).map(|(ptr, _)| ptr);
    if whole.is_none() && !is_mapped(tr, gpa, len) {
        return Err(Broken::Address { gpa, len });
    }
    let mut index = 0u32;
    for _ in 0..count.min(MAX_CHAIN as u32) {
        let d = match whole {
            // SAFETY: index < count, so the 16 bytes are within the piece.
            Some(base) => unsafe { read_desc(base.add(16 * index as usize)) },
            None => read_scattered(tr, gpa, index)?,
        };
        // A packed descriptor has its id before its flags.
        let flags = if chained { d.flags } else { d.next };
        if flags & DESC_INDIRECT != 0 {
            return Err(Broken::Indirect { flags });
        }
        if (flags & DESC_WRITE != 0) != write {
            return Err(Broken::Direction { flags });
        }
        if !win.push(tr, d.addr, d.len)? {
            return Ok(false);
        }
        if chained {
            if flags & DESC_NEXT == 0 {
                return Ok(true);
            }
            index = d.next.into();
        } else {
            index += 1;
            if index == count {
                return Ok(true);
            }
        }
        if index >= count {
            return Err(Broken::Index { index, size: count });
        }
    }
    Err(if count as usize > MAX_CHAIN { Broken::TooLong } else { Broken::Loop { size: count } })
}

/// Returns whether all bytes of a range are in the guest's memory, if not in one piece.
#[cold]
fn is_mapped(tr: &mut Translator, gpa: u64, len: u32) -> bool {
    let (mut at, mut rest) = (gpa, len);
    while rest > 0 {
        let Some((_, piece)) = tr.at(at, rest) else { return false };
        rest -= piece;
        at = at.wrapping_add(piece.into());
    }
    true
}

/// Reads one descriptor of a table that lies across regions; byte by byte if it does so itself.
#[cold]
fn read_scattered(tr: &mut Translator, gpa: u64, index: u32) -> Result<Desc, Broken> {
    const SIZE: u32 = 16;
    let start = gpa.checked_add(u64::from(SIZE * index)).ok_or(Broken::Address { gpa, len: SIZE })?;
    if let Some((ptr, SIZE)) = tr.at(start, SIZE) {
        // SAFETY: 16 mapped bytes.
        return Ok(unsafe { read_desc(ptr) });
    }
    let mut bytes = [0u8; SIZE as usize];
    for (i, b) in bytes.iter_mut().enumerate() {
        let at = start.checked_add(i as u64).ok_or(Broken::Address { gpa, len: SIZE })?;
        let (ptr, _) = tr.at(at, 1).ok_or(Broken::Address { gpa: at, len: 1 })?;
        // SAFETY: one mapped byte.
        *b = unsafe { ptr.read_volatile() };
    }
    // SAFETY: 16 bytes of our own.
    Ok(unsafe { read_desc(bytes.as_ptr()) })
}
