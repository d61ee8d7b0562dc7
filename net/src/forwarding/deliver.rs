// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one copy: from the sender's buffers into the receiver's.
//!
//! Bytes are copied while both guests may write to them. A guest that does gets garbage in its frame and nothing else,
//! since the bytes that decisions were made on are in [`Frame::prefix`], a private copy.

use crate::cpu::{prefetch_write, prefetch_write_all};
use crate::frames::frame::{NET_HEADER, NetHeader};
use crate::frames::offload::Layers;
use crate::vring::queue::State;
use crate::vring::ring::{Broken, Chain, Segment, Window, window::WINDOW};

/// A frame on its way.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    /// Its virtio-net header.
    pub header: NetHeader,
    /// Offsets of its parts, if the header asks for a checksum or for segmentation.
    pub layers: Layers,
    /// Its first bytes, in private memory: checked, perhaps changed.
    pub prefix: &'a [u8],
    /// The buffers that hold the rest,
    pub rest: &'a [Segment],
    /// from this byte of the first one on.
    pub skip: u32,
    /// Bytes in all, without the virtio-net header.
    pub len: u32,
}

impl Frame<'_> {
    /// Returns the frame with more of its first bytes in private memory: as many as fit into `buffer`, or all.
    pub(crate) fn deepened<'a>(&'a self, buffer: &'a mut [u8]) -> Frame<'a> {
        let want = buffer.len().min(self.len as usize);
        let mut got = self.prefix.len();
        if got >= want {
            return *self;
        }
        buffer[..got].copy_from_slice(self.prefix);
        let (mut index, mut skip) = (0, self.skip);
        while let Some(s) = self.rest.get(index).filter(|_| got < want) {
            let n = (want - got).min((s.len - skip) as usize);
            // SAFETY: n bytes from skip on are mapped, and the buffer has room for want.
            unsafe {
                std::ptr::copy_nonoverlapping(s.ptr.add(skip as usize), buffer.as_mut_ptr().add(got), n);
            }
            got += n;
            skip += n as u32;
            if skip == s.len {
                (index, skip) = (index + 1, 0);
            }
        }
        Frame { prefix: &buffer[..got], rest: &self.rest[index..], skip, ..*self }
    }
}

/// The result of [`put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is in the receiver's buffers, visible after the next publish.
    Done,
    /// The receiver has no buffers at the moment.
    Full,
    /// The receiver's buffers will never hold it.
    TooLarge,
    /// The receiver's ring is broken.
    Broken(Broken),
}

/// Chains that are fetched at once.
const FETCH: usize = 32;
/// Frames from this length on have all their lines fetched ahead.
pub(crate) const LONG: u32 = 256;
/// Frames between a buffer's prefetch and its use.
const AHEAD: usize = 8;

/// Copies `frame` into the next buffers of `rx`, an active ring.
#[inline(always)]
pub fn put(rx: &mut State, frame: &Frame<'_>) -> Put {
    let State { ring: Some(ring), window, translator, negotiated, .. } = rx else { return Put::Full };
    if window.is_empty() {
        match ring.fetch(translator, window, true, FETCH) {
            Ok(0) => return Put::Full,
            Ok(_) => {
                for chain in window.chains().iter().take(AHEAD) {
                    prefetch_front(window, chain);
                }
            }
            Err(why) => return Put::Broken(why),
        }
    }
    let chains = window.chains();
    if let Some(ahead) = chains.get(AHEAD) {
        prefetch_front(window, ahead);
    }
    if frame.len > LONG {
        // The next frame is probably as long as this one.
        if let Some(s) = chains.get(1).and_then(|next| window.segments(next).first()) {
            prefetch_write_all(s.ptr, frame.len.min(s.len));
        }
    }
    let Some(&chain) = chains.first() else { return Put::Full };
    let need = u32::from(negotiated.header) + frame.len;
    let rest = (frame.len as usize).saturating_sub(frame.prefix.len());
    let from = match frame.rest {
        [from] => Some(from.ptr.wrapping_add(frame.skip as usize).cast_const()),
        // The prefix is the whole frame.
        [] if rest == 0 => Some(frame.prefix.as_ptr()),
        _ => None,
    };
    if let (Some(to), Some(from), true) = (window.only(&chain), from, chain.total >= need) {
        let head = usize::from(negotiated.header);
        // SAFETY: `to` has `need` = head + prefix + rest mapped bytes; `from` has `rest`, which are those from `skip` on.
        unsafe {
            put_header(to.ptr, &frame.header, 1, head);
            let at = to.ptr.add(head);
            copy(frame.prefix.as_ptr(), at, frame.prefix.len());
            copy(from, at.add(frame.prefix.len()), rest);
        }
        ring.complete(&chain, need);
        window.advance(1);
    } else {
        return put_scattered(rx, frame);
    }
    if rx.log.is_some() {
        log_chain(rx, &chain, need);
    }
    Put::Done
}

/// Fetches the lines that every frame writes: the header's and the one after it.
#[inline(always)]
fn prefetch_front(window: &Window, chain: &Chain) {
    if let Some(s) = window.only(chain).or_else(|| window.segments(chain).first()) {
        prefetch_write(s.ptr);
        prefetch_write(s.ptr.wrapping_add(64));
    }
}

/// Writes the virtio-net header.
///
/// # Safety
/// `at` has room for `len` (10 or 12) bytes.
#[inline(always)]
unsafe fn put_header(at: *mut u8, header: &NetHeader, buffers: u16, len: usize) {
    let bytes = header.bytes(buffers);
    // SAFETY: the caller's promise; len is at most 12.
    unsafe {
        if len == NET_HEADER {
            at.cast::<[u8; NET_HEADER]>().write_unaligned(bytes);
        } else {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, len);
        }
    }
}

/// Copies `len` bytes; short ones without a call.
///
/// # Safety
/// Both sides have `len` mapped bytes.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    type Word = [u64; 2];
    // SAFETY: every offset below stays under len, by the branch that it is in.
    unsafe {
        if (16..=64).contains(&len) {
            let word = |i: usize| from.add(i).cast::<Word>().read_unaligned();
            let put = |i: usize, w: Word| to.add(i).cast::<Word>().write_unaligned(w);
            // Two or four words that may overlap in the middle.
            let (a, d) = (word(0), word(len - 16));
            if len > 32 {
                let (b, c) = (word(16), word(len - 32));
                put(16, b);
                put(len - 32, c);
            }
            put(0, a);
            put(len - 16, d);
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
        }
    }
}

/// As [`put`], for a frame in several pieces, or one that takes several buffers.
#[inline(never)]
fn put_scattered(rx: &mut State, frame: &Frame<'_>) -> Put {
    let count = match chains_for(rx, frame) {
        Ok(count) => count,
        Err(put) => return put,
    };
    let State { ring: Some(ring), window, translator, negotiated, log, .. } = rx else { return Put::Full };
    let header = frame.header.bytes(count as u16);
    let mut source = source(&header[..usize::from(negotiated.header)], frame);
    for _ in 0..count {
        let Some(&chain) = window.chain(0) else { break };
        let written = window.segments(&chain).iter().map(|to| source.fill(*to)).sum();
        if let Some(log) = log {
            log_segments(log, translator.memory(), window.segments(&chain), written);
        }
        ring.complete(&chain, written);
        window.advance(1);
    }
    Put::Done
}

/// Returns how many of the next chains hold `frame` together, and fetches as many. An error: they are not there, or can't hold it.
fn chains_for(rx: &mut State, frame: &Frame<'_>) -> Result<usize, Put> {
    let State { ring: Some(ring), window, translator, negotiated, .. } = rx else { return Err(Put::Full) };
    let head = u32::from(negotiated.header);
    let need = head + frame.len;
    let (mut count, mut room) = (0usize, 0u64);
    while room < u64::from(need) {
        if let Some(chain) = window.chain(count) {
            if chain.total < head || !negotiated.mergeable && chain.total < need {
                return Err(Put::TooLarge);
            }
            room += u64::from(chain.total);
            count += 1;
            continue;
        }
        if count >= WINDOW {
            return Err(Put::TooLarge);
        }
        match ring.fetch(translator, window, true, FETCH) {
            Ok(0) => return Err(Put::Full),
            Ok(_) => {}
            Err(why) => return Err(Put::Broken(why)),
        }
    }
    Ok(count)
}

/// The bytes of a frame with its virtio-net header, to be copied front to back.
struct Source<I> {
    /// The pieces that come after `piece`.
    pieces: I,
    /// The rest of the present piece.
    piece: Segment,
    /// Bytes in all.
    left: u32,
}

/// Begins with `header`; the frame's prefix and its other buffers follow.
fn source<'a>(header: &'a [u8], frame: &'a Frame<'a>) -> Source<impl Iterator<Item = Segment> + 'a> {
    let own = |bytes: &[u8]| Segment { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() as u32 };
    let rest = frame.rest.iter().enumerate().map(|(i, s)| after(*s, if i == 0 { frame.skip } else { 0 }));
    let pieces = [own(header), own(frame.prefix)].into_iter().chain(rest).filter(|s| s.len > 0);
    let none = Segment { ptr: std::ptr::null_mut(), len: 0 };
    Source { pieces, piece: none, left: header.len() as u32 + frame.len }
}

impl<I: Iterator<Item = Segment>> Source<I> {
    /// Copies as many of the bytes left as `to` holds; returns how many.
    fn fill(&mut self, mut to: Segment) -> u32 {
        let room = to.len;
        while to.len > 0 && self.left > 0 {
            if self.piece.len == 0 {
                let Some(next) = self.pieces.next() else { break };
                self.piece = next;
            }
            let n = self.piece.len.min(to.len).min(self.left);
            // SAFETY: both pieces have n mapped bytes left.
            unsafe { copy(self.piece.ptr, to.ptr, n as usize) };
            self.piece = after(self.piece, n);
            to = after(to, n);
            self.left -= n;
        }
        room - to.len
    }
}

/// Returns a segment without its first `n` bytes.
fn after(s: Segment, n: u32) -> Segment {
    Segment { ptr: s.ptr.wrapping_add(n as usize), len: s.len - n }
}

#[cold]
fn log_segments(
    log: &crate::vring::dirty::DirtyLog,
    mem: &crate::vring::memory::GuestMemory,
    segments: &[Segment],
    written: u32,
) {
    let mut left = written;
    for s in segments {
        let n = s.len.min(left);
        if let Some(gpa) = mem.gpa_of(s.ptr) {
            log.mark(gpa, n.into());
        }
        left -= n;
    }
}

/// Marks the bytes written to a chain that is complete but still in the window as dirty.
#[cold]
fn log_chain(rx: &State, chain: &crate::vring::ring::Chain, written: u32) {
    if let Some(log) = &rx.log {
        log_segments(log, rx.translator.memory(), rx.window.segments(chain), written);
    }
}
