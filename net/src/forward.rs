// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One pass over a transmit queue: a batch of frames is taken, each is given to the port that owns its destination
//! (selection and forwarding, as in the NOVA paper), then all receivers' rings are published, then the sender's.
//!
//! Frames are done in order. A receiver without buffers holds its sender up for a moment ([`HOLD_NS`]): the frame stays
//! in the sender's ring and nothing is lost. A receiver that has no buffers for longer is *stuck*: what is sent to
//! it is dropped at once, until it takes a frame again, so that it can't hold up others.
//!
//! The bytes that decide (addresses, tags, whatever a check looks at) are copied first, and the copy is what the
//! receiver gets; a guest that changes its frame meanwhile changes nothing that was decided upon.

use crate::capture::Direction;
use crate::counters::Reason;
use crate::cpu::{prefetch, prefetch_all};
use crate::deliver::{Frame, LONG, Put, put};
use crate::fallback::{self, Buffers};
use crate::frame::{ETH_HEADER, MAX_FRAME, NET_HEADER, NetHeader};
use crate::lane::{self, Edit, Lane};
use crate::offload;
use crate::opens::{NotOpen, Opens};
use crate::policy::Policy;
use crate::ring::{Broken, Chain, Segment};
use crate::spoof;
use crate::view::View;
use crate::vring::State;

/// Frames of one pass.
pub const BATCH: usize = 32;
/// How long a receiver without buffers holds up its sender.
pub const HOLD_NS: u64 = 200_000;
/// Bytes of a frame that are copied before they are looked at: addresses, and type or tag.
pub(crate) const PREFIX: usize = 16;
/// Frames that are fetched ahead.
const AHEAD: usize = 8;

/// What a pass came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Nothing to do.
    Idle,
    /// So many frames were taken.
    Worked(usize),
    /// So many frames were taken, and the next waits for its receiver.
    Held(usize),
    /// The sender's ring is broken; it is stopped.
    Broken(Broken),
}

/// What became of a frame: taken (delivered, or dropped and counted), dropped for a reason to be counted at the
/// sender, or to be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Taken,
    Dropped(Reason),
    Again,
}

/// What a worker needs to forward: buffers for what can't be copied directly, and a list of receivers that broke.
#[derive(Default)]
pub struct Forwarder {
    pub(crate) buffers: Buffers,
    broken: Vec<(usize, Broken)>,
}

/// All that is known during a pass.
pub(crate) struct Sender<'a, 'w> {
    pub view: &'a View,
    pub src: usize,
    pub policy: &'a Policy,
    /// The key of its first MAC.
    pub own: u64,
    /// Which queue it is: frames of one queue go to one queue of a receiver.
    pub flow: usize,
    pub now: u64,
    pub opens: Opens<'a>,
    pub buffers: &'w mut Buffers,
    pub broken: &'w mut Vec<(usize, Broken)>,
    /// Segments of the present frame that were delivered before it was held up.
    pub resume: usize,
    /// Who had no room for the present frame.
    pub full: Option<usize>,
}

impl Forwarder {
    /// Receivers whose rings were found broken since the last call, by position in the view.
    pub fn take_broken(&mut self) -> impl Iterator<Item = (usize, Broken)> + '_ {
        self.broken.drain(..)
    }

    pub(crate) fn note_broken(&mut self, more: Vec<(usize, Broken)>) {
        self.broken.extend(more);
    }

    /// Does one pass over transmit queue `queue` of the port at `src`, at time `now` (nanoseconds).
    pub fn pass(&mut self, view: &View, src: usize, queue: usize, now: u64) -> Pass {
        let Some(attached) = view.ports().get(src) else { return Pass::Idle };
        if let Some(uplink) = &attached.uplink {
            return crate::uplink::pass(self, view, src, uplink, now);
        }
        let Some(mut tx) = attached.port.tx(queue).try_lock() else { return Pass::Idle };
        {
            let state = &mut *tx;
            if !state.enabled {
                return Pass::Idle;
            }
            let Some(ring) = &mut state.ring else { return Pass::Idle };
            if state.window.is_empty() {
                let fetched = ring.fetch(&mut state.translator, &mut state.window, false, BATCH);
                if state.window.is_empty() {
                    return match fetched {
                        Ok(_) => Pass::Idle,
                        Err(why) => {
                            state.fail(why);
                            Pass::Broken(why)
                        }
                    };
                }
            }
        }
        let mut sender = Sender {
            view,
            src,
            policy: &attached.policy,
            own: attached.policy.macs.first().map_or(0, |mac| mac.key()),
            flow: queue,
            now,
            opens: Opens::new(),
            buffers: &mut self.buffers,
            broken: &mut self.broken,
            resume: tx.resume,
            full: None,
        };
        let deep = !attached.policy.ips.is_empty();
        let head = u32::from(tx.negotiated.header);
        let (mut taken, mut bytes, mut held) = (0, 0, false);
        for chain in tx.window.chains().iter().take(AHEAD) {
            prefetch_front(&tx, chain, head);
        }
        while let Some(&chain) = tx.window.chain(taken) {
            if let Some(ahead) = tx.window.chain(taken + AHEAD) {
                prefetch_front(&tx, ahead, head);
            }
            if let Some(next) = tx.window.chain(taken + 1).filter(|next| next.total > LONG) {
                if let Some(s) = tx.window.segments(next).last() {
                    prefetch_all(s.ptr, s.len);
                }
            }
            let len = chain.total.wrapping_sub(head);
            let done = if chain.total < head + ETH_HEADER as u32 {
                Done::Dropped(Reason::Short)
            } else if len > MAX_FRAME as u32 {
                Done::Dropped(Reason::Oversize)
            } else {
                sender.frame(tx.window.segments(&chain), head, len, deep, tx.negotiated.host)
            };
            match done {
                Done::Taken => {}
                Done::Dropped(reason) => tx.counters().drop_one(reason),
                Done::Again => {
                    let since = *tx.held_since.get_or_insert(now);
                    if now.saturating_sub(since) < HOLD_NS {
                        held = true;
                        break;
                    }
                    sender.give_up();
                    tx.counters().drop_one(Reason::NoBuffer);
                }
            }
            tx.held_since = None;
            sender.resume = 0;
            taken += 1;
            bytes += u64::from(len);
        }
        tx.resume = sender.resume;
        // Receivers first: a frame is never done for the sender before the receiver can see it.
        drop(sender);
        if taken > 0 {
            let state = &mut *tx;
            if let Some(ring) = &mut state.ring {
                for chain in &state.window.chains()[..taken] {
                    ring.complete(chain, 0);
                }
            }
            state.window.advance(taken);
            tx.counters().passed(taken as u64, bytes);
            tx.publish();
        }
        if held { Pass::Held(taken) } else { Pass::Worked(taken) }
    }
}

/// Fetches what every frame is looked at for: the header, where it says anything, and the addresses, which may lie on the
/// next line.
#[inline(always)]
fn prefetch_front(tx: &State, chain: &Chain, head: u32) {
    for s in tx.window.segments(chain).iter().take(2) {
        if tx.negotiated.host {
            prefetch(s.ptr);
        }
        prefetch(s.ptr.wrapping_add(head as usize));
    }
}

/// Destination and source of a frame, as [`Mac::key`](crate::frame::Mac::key) has them.
#[inline(always)]
fn addresses(prefix: &[u8]) -> (u64, u64) {
    let word =
        |at: usize| prefix.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b));
    (word(0) & 0xffff_ffff_ffff, word(4) >> 16)
}

/// Copies a virtio-net header, as far as a sender fills it in. A driver without offloads has nothing to say there
/// (virtio 1.3 §5.1.6.2): then its line, which that driver has just written, stays where it is.
///
/// # Safety
/// `at` has 10 mapped bytes.
#[inline(always)]
pub(crate) unsafe fn read_header(at: *const u8, host: bool) -> NetHeader {
    if !host {
        return NetHeader::default();
    }
    // SAFETY: the caller's promise.
    let (first, last) =
        unsafe { (at.cast::<u64>().read_unaligned(), at.add(8).cast::<u16>().read_unaligned()) };
    NetHeader::from_words(u64::from_le(first), u16::from_le(last))
}

impl<'a> Sender<'a, '_> {
    /// Takes the frame of `len` bytes that lies in `segments` after a virtio-net header of `head` bytes.
    #[inline(always)]
    fn frame(&mut self, segments: &[Segment], head: u32, len: u32, deep: bool, host: bool) -> Done {
        let (at, header_at, rest, skip) = match segments {
            [one] if one.len >= head + PREFIX as u32 && !deep => {
                (one.ptr.wrapping_add(head as usize), one.ptr, one, head + PREFIX as u32)
            }
            [first, two] if first.len == head && two.len >= PREFIX as u32 && !deep => {
                (two.ptr, first.ptr, two, PREFIX as u32)
            }
            _ => return self.gathered(segments, head, len, deep, host),
        };
        // SAFETY: the segments have that many mapped bytes.
        let (prefix, header) =
            unsafe { (at.cast::<[u8; PREFIX]>().read_unaligned(), read_header(header_at, host)) };
        let rest = std::slice::from_ref(rest);
        self.forward(&Frame { header, prefix: &prefix, rest, skip, len })
    }

    /// A frame whose first bytes lie across buffers, or of which more than usual must be looked at.
    #[inline(never)]
    fn gathered(&mut self, segments: &[Segment], head: u32, len: u32, deep: bool, host: bool) -> Done {
        let mut first = [0u8; NET_HEADER + spoof::DEEP];
        let want = (head + len.min(if deep { spoof::DEEP } else { PREFIX } as u32)) as usize;
        let (mut got, mut index, mut skip) = (0usize, 0usize, 0u32);
        while got < want {
            let Some(s) = segments.get(index) else { return Done::Dropped(Reason::Short) };
            let n = (want - got).min((s.len - skip) as usize);
            // SAFETY: n bytes from skip on are within the segment, and first has room for want.
            unsafe {
                std::ptr::copy_nonoverlapping(s.ptr.add(skip as usize), first.as_mut_ptr().add(got), n);
            }
            got += n;
            skip += n as u32;
            if skip == s.len {
                (index, skip) = (index + 1, 0);
            }
        }
        // SAFETY: first is longer than any header.
        let header = unsafe { read_header(first.as_ptr(), host) };
        let prefix = &first[head as usize..want];
        self.forward(&Frame { header, prefix, rest: &segments[index..], skip, len })
    }

    /// Chooses the receiver and gives it the frame.
    #[inline(always)]
    pub(crate) fn forward(&mut self, frame: &Frame<'_>) -> Done {
        if !frame.header.is_plain() && !offload::is_valid(&frame.header, frame.len) {
            return Done::Dropped(Reason::Header);
        }
        if let Some(capture) = &self.view.ports()[self.src].capture {
            if self.full.is_none() && self.resume == 0 {
                capture.take(frame, Direction::FromGuest);
            }
        }
        let (to, from) = addresses(frame.prefix);
        let mut lane = Lane { vid: None, tagged: false, open: true };
        if self.view.is_plain() {
            // Of all that can be checked only this is, and nearly always it is the port's first MAC.
            if self.policy.check_mac && from != self.own {
                if let Err(reason) = spoof::check(self.policy, frame.prefix) {
                    return Done::Dropped(reason);
                }
            }
        } else {
            lane = match self.admit(frame) {
                Ok(lane) => lane,
                Err(reason) => return Done::Dropped(reason),
            };
        }
        if to & 1 != 0 {
            return self.flood(frame, lane);
        }
        match self.view.owner(to) {
            Some(dest) if dest != self.src => self.give(dest, frame, lane),
            Some(_) => Done::Dropped(Reason::Loop),
            None => self.upward(frame, lane),
        }
    }

    /// Is the sender allowed to send this, and on which VLAN?
    #[inline(never)]
    fn admit(&mut self, frame: &Frame<'_>) -> Result<Lane, Reason> {
        let policy = self.policy;
        // A frame that is tried again was admitted, and paid for, before.
        let again = self.full.is_some() || self.resume > 0;
        spoof::check(policy, frame.prefix)?;
        let lane = lane::enter(policy, frame.prefix).ok_or(Reason::Vlan)?;
        let headers = ETH_HEADER as u32 + if lane.tagged { 4 } else { 0 };
        if policy.mtu != 0 && frame.header.gso_type == 0 && frame.len > headers + u32::from(policy.mtu) {
            return Err(Reason::Oversize);
        }
        let port = &self.view.ports()[self.src].port;
        if !again && !port.limiter.admit(&policy.rate, frame.len.into(), self.now) {
            return Err(Reason::Rate);
        }
        Ok(lane)
    }

    /// Gives a frame that nobody owns to an uplink.
    #[inline(never)]
    fn upward(&mut self, frame: &Frame<'_>, lane: Lane) -> Done {
        // The first uplink that it may leave by; one uplink never feeds another.
        for &dest in self.view.uplinks() {
            if dest == self.src || self.policy.uplink {
                continue;
            }
            match self.give(dest, frame, lane) {
                Done::Dropped(Reason::Vlan) => {}
                done => return done,
            }
        }
        Done::Dropped(Reason::Unknown)
    }

    /// Gives a frame to one port.
    #[inline(always)]
    fn give(&mut self, dest: usize, frame: &Frame<'_>, lane: Lane) -> Done {
        if !self.view.is_plain() {
            let to = &*self.view.ports()[dest].policy;
            if self.policy.isolated && !to.uplink || to.isolated && !self.policy.uplink {
                return Done::Dropped(Reason::Isolated);
            }
            match lane::leave(to, lane) {
                None => return Done::Dropped(Reason::Vlan),
                Some(Edit::Keep) => {}
                Some(edit) => return self.give_edited(dest, frame, edit),
            }
        }
        self.hand(dest, frame)
    }

    /// Gives a frame to one port with its tag changed.
    #[inline(never)]
    fn give_edited(&mut self, dest: usize, frame: &Frame<'_>, edit: Edit) -> Done {
        let mut buffer = [0u8; spoof::DEEP + 4];
        let old = frame.prefix;
        let (tail, at, delta): (&[u8], usize, i32) = match edit {
            Edit::Push(vid) => {
                buffer[12..14].copy_from_slice(&[0x81, 0]);
                buffer[14..16].copy_from_slice(&vid.to_be_bytes());
                (&old[12..], 16, 4)
            }
            Edit::Pop => (&old[16..], 12, -4),
            Edit::Keep => (&old[12..], 12, 0),
        };
        buffer[..12].copy_from_slice(&old[..12]);
        buffer[at..at + tail.len()].copy_from_slice(tail);
        let shift = |v: u16| if v == 0 { 0 } else { v.saturating_add_signed(delta as i16) };
        let mut header = frame.header;
        if !header.is_plain() {
            header.csum_start = shift(header.csum_start);
            header.hdr_len = shift(header.hdr_len);
        }
        let prefix = &buffer[..at + tail.len()];
        self.hand(dest, &Frame { header, prefix, len: frame.len.saturating_add_signed(delta), ..*frame })
    }

    /// Hands a frame to one port as it is, or in a form that the port can take.
    #[inline(always)]
    fn hand(&mut self, dest: usize, frame: &Frame<'_>) -> Done {
        let open = match self.opens.get(self.view, dest, self.flow) {
            Ok(open) => open,
            Err(NotOpen::Uplink) => return crate::uplink::hand(self, dest, frame),
            Err(NotOpen::Busy) => return Done::Again,
            Err(NotOpen::Down) => return Done::Dropped(Reason::Down),
        };
        if !frame.header.is_plain() && !fallback::takes(&open.guard.negotiated, &frame.header) {
            return fallback::hand(self, dest, frame);
        }
        match put(&mut open.guard, frame) {
            Put::Done => {
                open.packets += 1;
                open.bytes += u64::from(frame.len);
                if let Some(capture) = open.capture {
                    capture.take(frame, Direction::ToGuest);
                }
                Done::Taken
            }
            other => self.not_put(dest, other),
        }
    }

    /// What to do about a frame that the receiver's ring didn't take.
    #[cold]
    pub(crate) fn not_put(&mut self, dest: usize, why: Put) -> Done {
        let Ok(open) = self.opens.get(self.view, dest, self.flow) else { return Done::Again };
        match why {
            Put::Done => Done::Taken,
            Put::Full if open.guard.stuck => Done::Dropped(Reason::NoBuffer),
            Put::Full => {
                self.full = Some(dest);
                Done::Again
            }
            Put::TooLarge => {
                open.guard.counters().drop_one(Reason::BufferSize);
                Done::Taken
            }
            Put::Broken(why) => {
                open.guard.fail(why);
                self.opens.close(dest);
                self.broken.push((dest, why));
                Done::Dropped(Reason::Down)
            }
        }
    }

    /// The present frame has waited long enough.
    #[cold]
    pub(crate) fn give_up(&mut self) {
        if let Some(dest) = self.full.take() {
            if let Ok(open) = self.opens.get(self.view, dest, self.flow) {
                open.guard.stuck = true;
            }
        }
    }

    /// Gives a frame to all ports that may have it.
    #[inline(never)]
    fn flood(&mut self, frame: &Frame<'_>, lane: Lane) -> Done {
        for dest in 0..self.view.ports().len() {
            if dest == self.src || self.policy.uplink && self.view.ports()[dest].policy.uplink {
                continue;
            }
            let resume = std::mem::take(&mut self.resume);
            // A flooded frame waits for nobody: it is counted as dropped where it can't be had.
            if self.give(dest, frame, lane) == Done::Again {
                if let Ok(open) = self.opens.get(self.view, dest, self.flow) {
                    open.guard.counters().drop_one(Reason::NoBuffer);
                }
            }
            self.resume = resume;
        }
        self.full = None;
        self.view.ports()[self.src].port.tx(self.flow).counters.flooded();
        Done::Taken
    }
}
