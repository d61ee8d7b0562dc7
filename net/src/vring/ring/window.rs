// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chains fetched and not yet completed, in order, with their buffers translated.

use super::{Broken, MAX_CHAIN};
use crate::vring::memory::Translator;

/// Most chains in a window.
pub const WINDOW: usize = 64;
const SEGMENTS: usize = 2 * MAX_CHAIN;

/// Bytes of guest memory in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first byte, in this process.
    pub ptr: *mut u8,
    pub len: u32,
}

/// A fetched chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Head index (split) or buffer id (packed).
    pub id: u16,
    /// Ring entries that it takes (packed; 1 for split).
    pub entries: u16,
    /// Index of its first segment in the window.
    pub first: u16,
    /// Segments.
    pub count: u16,
    /// Bytes in all segments.
    pub total: u32,
}

/// A queue of fetched chains.
#[derive(Debug)]
pub struct Window {
    chains: Box<[Chain; WINDOW]>,
    start: usize,
    end: usize,
    segments: Box<[Segment; SEGMENTS]>,
    used_segments: usize,
    /// Of the chain being built.
    open: Chain,
    /// Descriptors read of chains of several, since [`Window::take_effort`].
    effort: usize,
}

// SAFETY: the pointers are addresses in guest mappings that the owner's Translator keeps alive; the window itself is
// used by one thread at a time, under its vring's lock.
unsafe impl Send for Window {}

impl Default for Window {
    fn default() -> Self {
        Self {
            chains: Box::new([Chain::default(); WINDOW]),
            start: 0,
            end: 0,
            segments: Box::new([Segment { ptr: std::ptr::null_mut(), len: 0 }; SEGMENTS]),
            used_segments: 0,
            open: Chain::default(),
            effort: 0,
        }
    }
}

/// Chains of one buffer each that are being put into a [`Window`]. Their number is in registers meanwhile.
pub(super) struct Singles<'a> {
    chains: &'a mut [Chain; WINDOW],
    end: &'a mut usize,
    segments: &'a mut [Segment; SEGMENTS],
    used_segments: &'a mut usize,
    next: usize,
    next_segment: usize,
}

impl Singles<'_> {
    /// Puts a chain of one buffer. False: no room, or the buffer isn't in one piece; the caller tries [`Window::push`].
    #[inline(always)]
    pub(super) fn push(&mut self, tr: &mut Translator, gpa: u64, len: u32, id: u16) -> bool {
        let (at, first) = (self.next, self.next_segment);
        let Some(ptr) = tr.near(gpa, len).filter(|_| at < WINDOW && first < SEGMENTS) else { return false };
        self.segments[first] = Segment { ptr, len };
        self.chains[at] = Chain { id, entries: 1, first: first as u16, count: 1, total: len };
        (self.next, self.next_segment) = (at + 1, first + 1);
        true
    }

    /// Stores the number of chains in the window.
    #[inline(always)]
    pub(super) fn finish(self) {
        (*self.end, *self.used_segments) = (self.next, self.next_segment);
    }
}

impl Window {
    /// Returns fetched chains, oldest first.
    #[inline(always)]
    #[must_use]
    pub fn chains(&self) -> &[Chain] {
        &self.chains[self.start..self.end]
    }

    /// Returns the `i`-th oldest chain.
    #[inline(always)]
    #[must_use]
    pub fn chain(&self, i: usize) -> Option<&Chain> {
        self.chains[..self.end].get(self.start + i)
    }

    /// Number of chains.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns whether there is no chain.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns a chain's buffers.
    #[inline(always)]
    #[must_use]
    pub fn segments(&self, chain: &Chain) -> &[Segment] {
        &self.segments[chain.first as usize..][..chain.count as usize]
    }

    /// Returns the buffer of a chain that has one.
    #[inline(always)]
    #[must_use]
    pub fn only(&self, chain: &Chain) -> Option<&Segment> {
        if chain.count == 1 { self.segments.get(usize::from(chain.first)) } else { None }
    }

    /// Removes the `n` oldest chains.
    #[inline(always)]
    pub fn advance(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
        if self.start == self.end {
            self.clear();
        }
    }

    /// Removes all chains.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
        self.used_segments = 0;
    }

    /// Makes room for `wanted` chains as far as possible; returns how many fit.
    #[inline(always)]
    pub(super) fn room(&mut self, wanted: usize) -> usize {
        if self.start > 0 && WINDOW - self.end < wanted {
            self.compact();
        }
        (WINDOW - self.end).min(wanted)
    }

    #[cold]
    fn compact(&mut self) {
        let base = self.chains[self.start].first;
        self.segments.copy_within(usize::from(base)..self.used_segments, 0);
        self.used_segments -= usize::from(base);
        self.chains.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        for chain in &mut self.chains[..self.end] {
            chain.first -= base;
        }
    }

    /// Returns how many descriptors have been read of chains of several, or of those that did not fit, since the last call. They take time
    /// that the number of chains does not tell.
    #[inline(always)]
    pub fn take_effort(&mut self) -> usize {
        std::mem::take(&mut self.effort)
    }

    /// Begins to put chains of one buffer each into the present room.
    #[inline(always)]
    pub(super) fn singles(&mut self) -> Singles<'_> {
        let Window { chains, end, segments, used_segments, .. } = self;
        Singles { next: *end, next_segment: *used_segments, chains, end, segments, used_segments }
    }

    /// Begins a chain.
    #[inline(always)]
    pub(super) fn begin(&mut self) {
        self.open = Chain { first: self.used_segments as u16, ..Chain::default() };
    }

    /// Adds a buffer to the open chain. `Ok(false)`: no room at present, fetch it again later.
    #[inline(always)]
    pub(super) fn push(&mut self, tr: &mut Translator, gpa: u64, len: u32) -> Result<bool, Broken> {
        if let Some((ptr, piece)) = tr.at(gpa, len) {
            if piece == len && self.used_segments < SEGMENTS {
                let Some(total) = self.open.total.checked_add(len) else { return Err(Broken::TooLong) };
                self.open.total = total;
                self.segments[self.used_segments] = Segment { ptr, len };
                self.used_segments += 1;
                self.open.count += 1;
                return Ok(true);
            }
        }
        self.push_slow(tr, gpa, len)
    }

    /// As [`Window::push`], for a buffer in several pieces, an empty one, or a full window. An empty buffer takes a segment like any other,
    /// wherever it lies, so the window's size limits the descriptors that a fetch reads.
    #[cold]
    fn push_slow(&mut self, tr: &mut Translator, gpa: u64, len: u32) -> Result<bool, Broken> {
        let (mut at, mut rest) = (gpa, len);
        loop {
            let nowhere = std::ptr::NonNull::dangling().as_ptr();
            let found = if rest == 0 { Some((nowhere, 0)) } else { tr.at(at, rest) };
            let Some((ptr, piece)) = found else { return Err(Broken::Address { gpa, len }) };
            if self.used_segments == SEGMENTS {
                // Alone in the window and still too long, or just no room now.
                return if self.is_empty() { Err(Broken::TooLong) } else { Ok(false) };
            }
            self.segments[self.used_segments] = Segment { ptr, len: piece };
            self.used_segments += 1;
            self.open.count += 1;
            let Some(total) = self.open.total.checked_add(piece) else { return Err(Broken::TooLong) };
            self.open.total = total;
            rest -= piece;
            if rest == 0 {
                return Ok(true);
            }
            at = at.checked_add(u64::from(piece)).ok_or(Broken::Address { gpa, len })?;
        }
    }

    /// Ends the open chain.
    #[inline(always)]
    pub(super) fn commit(&mut self, id: u16, entries: u16) {
        self.chains[self.end] = Chain { id, entries, ..self.open };
        self.end += 1;
        self.effort += usize::from(self.open.count);
    }

    /// Drops the open chain.
    #[cold]
    pub(super) fn abandon(&mut self) {
        self.used_segments = usize::from(self.open.first);
        self.effort += usize::from(self.open.count);
    }
}
