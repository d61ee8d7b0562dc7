// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One pass over a transmit queue: takes a batch of frames, gives each to the port that owns its destination (selection and
//! forwarding, as in the NOVA paper), then publishes all receivers' rings, then the sender's.
//!
//! Frames are handled in order. If a receiver has no buffers, its frame waits in the sender's ring ([`crate::forwarding::held`]) as
//! long as the sender's credit with that receiver lasts ([`crate::forwarding::credit`]), and is then dropped, so that no receiver
//! holds up frames for others. Flooded frames don't wait for buffers.
//!
//! The bytes that decisions depend on (addresses, tags, the fields that a check reads) are copied first, and the receiver gets the
//! copy; a guest that changes its frame meanwhile changes no decision. For a port without policy only the addresses decide; for
//! others, and for frames that ask for offloads, the headers are parsed ([`crate::frames::headers`]).

use crate::cpu::{prefetch, prefetch_all};
use crate::forwarding::capture::Direction;
use crate::forwarding::credit::Credits;
use crate::forwarding::deliver::{Frame, LONG};
use crate::forwarding::fallback::Buffers;
use crate::forwarding::held::{Held, Progress};
use crate::forwarding::learn;
use crate::forwarding::opens::{self, Opens};
use crate::forwarding::view::View;
use crate::frames::frame::{DATA_VALID, ETH_HEADER, GSO_NONE, MAX_FRAME, NET_HEADER, NetHeader};
use crate::frames::headers::{self, Headers, LOOK};
use crate::frames::offload::{self, Layers};
use crate::frames::vlan::{self, VlanTag};
use crate::policy::port::Policy;
use crate::policy::rules::{self, Way};
use crate::policy::spoof;
use crate::ports::counters::{Counters, Reason};
use crate::vring::queue::{Guard, State};
use crate::vring::ring::{Broken, Chain, Segment};

/// Frames of one pass.
pub const BATCH: usize = 32;
/// Bytes of a frame that are copied first: addresses, and type or tag.
pub(crate) const PREFIX: usize = 16;
/// Frames that are fetched ahead.
const AHEAD: usize = 8;
/// The work of a pass before other queues have their turn, in bytes; the last frame may exceed it. A frame that goes to several
/// receivers, or is segmented, counts once per copy, and [`EACH`] more.
const WORK: u64 = 512 << 10;
const EACH: u64 = 256;
/// The same for a port that gets a flooded frame: a system call may have to interrupt its driver.
const FLOODED: u64 = 4 << 10;
/// The same for a descriptor of a chain of several, of the sender's or a receiver's, and for a buffer of the sender's in each copy.
const DESCRIPTOR: u64 = 64;
/// The same for a change of multicast groups that a frame reports.
const REPORTED: u64 = 4 << 10;

/// The result of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Nothing to do.
    Idle,
    /// Another thread has the queue: there may be something to do.
    Busy,
    /// So many frames were taken.
    Worked(usize),
    /// So many frames were taken, and the next waits for its receiver.
    Held(usize),
    /// The sender's ring is broken; it is stopped.
    Broken(Broken),
}

/// The result of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// It ended once; its receiver counted it.
    Taken,
    /// It ended as often as [`Progress::ends`] says; each end was counted there.
    Ended,
    /// The sender counts it as dropped.
    Dropped(Reason),
    /// It is tried again.
    Again,
}

/// A worker's state for forwarding: buffers for frames that can't be copied directly, and a list of receivers that broke.
#[derive(Default)]
pub struct Forwarder {
    pub(crate) buffers: Buffers,
    broken: Vec<(usize, Broken)>,
}

/// The state of a pass.
pub(crate) struct Sender<'a, 'w> {
    pub view: &'a View,
    pub src: usize,
    pub policy: &'a Policy,
    /// The key of its first MAC.
    own: u64,
    /// Only the MACs decide.
    simple: bool,
    /// Its MACs are checked.
    checked: bool,
    /// A capture or mirror of the sender exists.
    watched: bool,
    /// The destination of an earlier frame, and the position of its port, if only the MACs decide.
    pub recent: (u64, usize),
    /// The number of the queue: frames of one queue go to one queue of a receiver.
    pub flow: usize,
    pub now: u64,
    pub opens: Opens<'a>,
    pub buffers: &'w mut Buffers,
    pub broken: &'w mut Vec<(usize, Broken)>,
    /// The progress of the present frame.
    pub progress: Progress,
    pub flooding: bool,
    /// A copy of it is given to a mirror.
    pub mirroring: bool,
    /// The receiver that it waits for.
    pub receiver: usize,
    /// The frame that is to be tried again.
    pub held: Option<Held>,
    /// The frames sent.
    pub tally: Tally,
    /// The work of the frames beyond one copy each, in bytes.
    pub work: u64,
}

/// The frames that a pass has sent.
#[derive(Default)]
pub(crate) struct Tally {
    packets: u64,
    bytes: u64,
}

impl Tally {
    /// Counts one frame that ended once.
    #[inline(always)]
    pub fn one(&mut self, len: u32) {
        self.packets += 1;
        self.bytes += u64::from(len);
    }

    #[inline(always)]
    pub fn count(&self, counters: &Counters) {
        counters.passed(self.packets, self.bytes);
    }
}

impl Forwarder {
    /// Returns the receivers whose rings were found broken since the last call, by position in the view.
    pub fn take_broken(&mut self) -> impl Iterator<Item = (usize, Broken)> + '_ {
        self.broken.drain(..)
    }

    /// Does one pass over transmit queue `queue` of the port at `src`, at time `now` (nanoseconds).
    pub fn pass(&mut self, view: &View, src: usize, queue: usize, now: u64) -> Pass {
        let Some(attached) = view.ports().get(src) else { return Pass::Idle };
        if let Some(uplink) = &attached.uplink {
            return crate::uplink::pass(self, view, src, uplink, now);
        }
        let Some(mut tx) = attached.port.tx(queue).try_lock() else { return Pass::Busy };
        if let Err(pass) = fetch(&mut tx) {
            return pass;
        }
        let credits = std::mem::take(&mut tx.credits);
        let mut sender = Sender::new(self, view, src, queue, now, credits);
        sender.read(tx.window.take_effort());
        let (taken, waits) = sender.batch(&mut tx);
        // Receivers first: a frame must not be done for the sender before the receiver can see it.
        tx.credits = sender.opens.finish();
        if waits {
            tx.held = sender.held.take();
        }
        complete(&mut tx, taken);
        sender.tally.count(tx.counters());
        if taken > 0 {
            tx.publish();
        }
        if waits { Pass::Held(taken) } else { Pass::Worked(taken) }
    }
}

/// Fetches a batch of frames unless some are left from the last pass. An error: there is nothing to do, or the ring is broken.
#[inline(always)]
fn fetch(tx: &mut State) -> Result<(), Pass> {
    let Some(ring) = &mut tx.ring else { return Err(Pass::Idle) };
    if !tx.window.is_empty() {
        return Ok(());
    }
    match ring.fetch(&mut tx.translator, &mut tx.window, false, BATCH) {
        _ if !tx.window.is_empty() => Ok(()),
        Ok(_) => Err(Pass::Idle),
        Err(why) => {
            tx.fail(why);
            Err(Pass::Broken(why))
        }
    }
}

/// Marks the `taken` oldest frames used, and removes them from the window.
#[inline(always)]
fn complete(tx: &mut State, taken: usize) {
    if taken == 0 {
        return;
    }
    if let Some(ring) = &mut tx.ring {
        ring.complete_all(&tx.window.chains()[..taken]);
    }
    tx.window.advance(taken);
}

/// Fetches the start of the frame that is [`AHEAD`] others away, and all of the next one if this one is long: it is probably as long.
#[inline(always)]
fn prefetch_next(tx: &State, taken: usize, chain: &Chain, head: u32) {
    let chains = tx.window.chains();
    if let Some(ahead) = chains.get(taken + AHEAD) {
        prefetch_front(tx, ahead, head);
    }
    if chain.total > LONG {
        if let Some(s) = chains.get(taken + 1).and_then(|next| tx.window.segments(next).last()) {
            prefetch_all(s.ptr, s.len);
        }
    }
}

/// Fetches the bytes that are read of every frame: the header, if the driver fills it in, and the addresses, which may lie on the next
/// line.
#[inline(always)]
fn prefetch_front(tx: &State, chain: &Chain, head: u32) {
    let fetch = |s: &Segment| {
        if tx.negotiated.host {
            prefetch(s.ptr);
        }
        prefetch(s.ptr.wrapping_add(head as usize));
    };
    match tx.window.only(chain) {
        Some(one) => fetch(one),
        None => tx.window.segments(chain).iter().take(2).for_each(fetch),
    }
}

/// Destination and source of a frame, as [`Mac::key`](crate::frames::frame::Mac::key) has them.
#[inline(always)]
pub(crate) fn addresses(prefix: &[u8]) -> (u64, u64) {
    let word =
        |at: usize| prefix.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b));
    (word(0) & 0xffff_ffff_ffff, word(4) >> 16)
}

/// Copies the fields of a virtio-net header that a sender fills in. A driver without offloads fills in none (virtio 1.3 §5.1.6.2):
/// then its line, which that driver has just written, is not read.
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

impl<'a, 'w> Sender<'a, 'w> {
    /// Begins a pass over queue `queue` of the port at `src`.
    #[inline(always)]
    pub fn new(
        forwarder: &'w mut Forwarder,
        view: &'a View,
        src: usize,
        queue: usize,
        now: u64,
        credits: Credits,
    ) -> Self {
        let policy = &*view.ports()[src].policy;
        Sender {
            view,
            src,
            policy,
            own: policy.macs.first().map_or(0, |mac| mac.key()),
            simple: view.is_simple(src),
            checked: policy.check_mac,
            watched: view.is_watched(src),
            recent: (u64::MAX, 0),
            flow: queue,
            now,
            opens: Opens::new(credits),
            buffers: &mut forwarder.buffers,
            broken: &mut forwarder.broken,
            progress: Progress::default(),
            flooding: false,
            mirroring: false,
            receiver: 0,
            held: None,
            tally: Tally::default(),
            work: 0,
        }
    }

    /// Handles the window's frames in order, first the one that waits, if any. Returns how many have ended, and whether the next one waits.
    #[inline(always)]
    fn batch(&mut self, tx: &mut Guard<'_>) -> (usize, bool) {
        let head = u32::from(tx.negotiated.header);
        let mut taken = 0;
        for chain in tx.window.chains().iter().take(AHEAD) {
            prefetch_front(tx, chain, head);
        }
        // Moved only if there is one: it is a few hundred bytes.
        if let Some(held) = tx.held.is_some().then(|| tx.held.take()).flatten() {
            let chain = tx.window.chains()[0];
            if !self.again(&held, tx.window.segments(&chain), tx.counters()) {
                return (0, true);
            }
            taken = 1;
        }
        let (window, host, enabled) = (&tx.window, tx.negotiated.host, tx.enabled);
        let chains = window.chains();
        while let Some(&chain) = chains.get(taken).filter(|_| self.has_time()) {
            prefetch_next(tx, taken, &chain, head);
            let len = chain.total.saturating_sub(head);
            let done = if !enabled {
                Done::Dropped(Reason::Disabled)
            } else if len < ETH_HEADER as u32 {
                Done::Dropped(Reason::Short)
            } else if len > MAX_FRAME as u32 {
                Done::Dropped(Reason::Oversize)
            } else if let Some(one) = window.only(&chain) {
                self.frame(std::slice::from_ref(one), head, len, host)
            } else {
                self.frame(window.segments(&chain), head, len, host)
            };
            if done == Done::Taken {
                self.tally.one(len);
            } else if !self.end(done, len, tx.counters()) {
                return (taken, true);
            }
            taken += 1;
        }
        (taken, false)
    }

    /// Handles the frame of `len` bytes in `segments` after a virtio-net header of `head` bytes.
    #[inline(always)]
    fn frame(&mut self, segments: &[Segment], head: u32, len: u32, host: bool) -> Done {
        let (at, header_at, rest, skip) = match segments {
            [one] if one.len >= head + PREFIX as u32 && self.simple => {
                (one.ptr.wrapping_add(head as usize), one.ptr, one, head + PREFIX as u32)
            }
            [first, two] if first.len == head && two.len >= PREFIX as u32 && self.simple => {
                (two.ptr, first.ptr, two, PREFIX as u32)
            }
            _ => return self.gathered(segments, head, len, host),
        };
        // SAFETY: the segments have that many mapped bytes.
        let (prefix, header) =
            unsafe { (at.cast::<[u8; PREFIX]>().read_unaligned(), read_header(header_at, host)) };
        if !header.is_plain() {
            return self.gathered(segments, head, len, host);
        }
        let (header, layers) = (NetHeader::default(), Layers::default());
        let rest = std::slice::from_ref(rest);
        let frame = Frame { header, layers, prefix: &prefix, rest, skip, len };
        let done = self.plain(&frame);
        if done == Done::Again {
            self.keep(&frame, segments.len() - 1, VlanTag::OPEN);
        }
        done
    }

    /// As [`Sender::frame`], for a frame whose first bytes lie in several buffers, or that needs parsing.
    #[inline(never)]
    fn gathered(&mut self, segments: &[Segment], head: u32, len: u32, host: bool) -> Done {
        let mut first = [0u8; NET_HEADER + LOOK];
        let want = (head + len.min(LOOK as u32)) as usize;
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
        let frame = Frame { header, layers: Layers::default(), prefix, rest: &segments[index..], skip, len };
        self.described(frame, index)
    }

    /// Handles a frame of which only the MACs decide.
    #[inline(always)]
    fn plain(&mut self, frame: &Frame<'_>) -> Done {
        if self.watched {
            self.capture(frame);
        }
        let (_, from) = addresses(frame.prefix);
        // Nearly always it is the port's first MAC.
        if self.checked && from != self.own {
            if let Err(reason) = spoof::check_mac(self.policy, frame.prefix) {
                return Done::Dropped(reason);
            }
        }
        if self.watched {
            self.mirror_sent(frame, VlanTag::OPEN);
        }
        self.deliver(frame, VlanTag::OPEN)
    }

    /// Gives the port's captures and mirror the frame.
    #[cold]
    fn capture(&self, frame: &Frame<'_>) {
        if let Some(capture) = &self.view.ports()[self.src].capture {
            capture.take(frame, Direction::FromGuest);
        }
    }

    /// Handles a frame by its headers; its virtio-net header is as its sender wrote it. `index`: the sender's segment with which its
    /// rest begins.
    pub fn described(&mut self, mut frame: Frame<'_>, index: usize) -> Done {
        self.capture(&frame);
        let tag = match self.admit(&mut frame) {
            Ok(tag) => tag,
            Err(reason) => return Done::Dropped(reason),
        };
        self.mirror_sent(&frame, tag);
        let done = self.deliver(&frame, tag);
        if done == Done::Again {
            self.keep(&frame, index, tag);
        }
        done
    }

    /// Checks whether the sender may send the frame, and on which VLAN. Makes the frame's virtio-net header, and charges the sender.
    fn admit(&mut self, frame: &mut Frame<'_>) -> Result<VlanTag, Reason> {
        let policy = self.policy;
        let headers = Headers::parse(frame.prefix, frame.len);
        let entered = vlan::enter(policy, &headers).ok_or(Reason::Vlan);
        if policy.learn > 0 && !headers::source(frame.prefix).is_some_and(|mac| policy.macs.contains(&mac)) {
            let (_, from) = addresses(frame.prefix);
            learn::learn(self.view, self.src, from, entered?, frame.prefix, self.now)?;
        }
        if policy.uplink && !self.view.learners().is_empty() {
            if let Ok(tag) = entered {
                let (_, from) = addresses(frame.prefix);
                learn::note_outside(self.view, self.src, from, tag, frame.prefix, self.now);
            }
        }
        spoof::check(policy, &headers, frame.prefix)?;
        let tag = entered?;
        let asked = frame.header;
        (frame.header, frame.layers) =
            offload::wanted(&asked, &headers, frame.prefix, frame.len).ok_or(Reason::Header)?;
        if policy.uplink && frame.header.flags == 0 {
            // The host's kernel may vouch for a checksum; a guest may not.
            frame.header.flags = asked.flags & DATA_VALID;
        }
        if let Some(reason) = rules::decide(&policy.rules, Way::Out, &headers, frame.prefix).count() {
            return Err(reason);
        }
        // A frame that is to be segmented is as long as the segments that it asks for.
        let longest = match frame.header.gso_type {
            GSO_NONE => frame.len,
            _ => frame.len.min(u32::from(frame.layers.payload) + u32::from(frame.header.gso_size)),
        };
        let link = ETH_HEADER as u32 + 4 * u32::from(headers.tags);
        if policy.mtu != 0 && longest > link + u32::from(policy.mtu) {
            return Err(Reason::Oversize);
        }
        let port = &self.view.ports()[self.src].port;
        if !port.limiter.admit(&policy.rate, frame.len.into(), self.now) {
            return Err(Reason::Rate);
        }
        Ok(tag)
    }

    /// Returns whether the pass may go on.
    #[inline(always)]
    pub fn has_time(&self) -> bool {
        self.tally.bytes + self.work < WORK
    }

    /// Returns whether the pass may go on with a flooded frame of `len` bytes that `receivers` ports got in it.
    pub fn may_flood(&self, receivers: u64, len: u32) -> bool {
        let frame = self.progress.ends * (u64::from(len) + EACH) + receivers * FLOODED;
        self.tally.bytes + self.work + frame < WORK
    }

    /// Charges the pass for descriptors of chains of several, or for buffers that a copy is made of.
    #[inline(always)]
    pub fn read(&mut self, descriptors: usize) {
        self.work += descriptors as u64 * DESCRIPTOR;
    }

    /// Charges the pass for the changes of multicast groups in a report.
    pub fn reported(&mut self, changes: u64) {
        self.work += changes * REPORTED;
    }

    /// Charges the pass for the ports that got a flooded frame.
    pub fn flooded(&mut self, receivers: u64) {
        self.work += receivers * FLOODED;
    }

    /// Called before a frame is segmented for the port at `dest`: the segments that another port has had, which the frame waited for and
    /// which has gone, don't count.
    pub fn resume_at(&mut self, dest: usize) {
        if self.progress.resume > 0 && self.receiver != opens::key(self.view, dest) {
            self.progress.resume = 0;
        }
    }

    /// Keeps an admitted frame that is to be tried again.
    #[cold]
    fn keep(&mut self, frame: &Frame<'_>, index: usize, tag: VlanTag) {
        self.held = Some(Held::new(frame, index, tag, self.now, self.receiver));
    }

    /// Tries a waiting frame again, with its sender's `segments`. Returns whether it has ended.
    #[cold]
    pub fn again(&mut self, held: &Held, segments: &[Segment], counters: &Counters) -> bool {
        if !held.progress.paused {
            self.opens.credits.wait(held.receiver, self.now.saturating_sub(held.since), self.now);
        }
        self.progress = Progress { paused: false, ..held.progress };
        self.receiver = held.receiver;
        let done = self.deliver(&held.frame(segments), held.tag);
        if done == Done::Again {
            let mut held = *held;
            (held.since, held.receiver) = (self.now, self.receiver);
            self.held = Some(held);
        }
        self.end(done, held.len(), counters)
    }

    /// Counts the result of a frame of `len` bytes. False: it is to be tried again.
    #[cold]
    pub fn end(&mut self, done: Done, len: u32, counters: &Counters) -> bool {
        let ends = match done {
            Done::Taken => self.progress.ends + 1,
            Done::Dropped(reason) => {
                counters.drop_one(reason);
                self.progress.ends + 1
            }
            Done::Ended | Done::Again => self.progress.ends,
        };
        self.work += ends * (u64::from(len) + EACH);
        let mut progress = Progress { ends: 0, ..self.progress };
        if ends > 0 {
            if !progress.counted {
                self.tally.one(len);
            }
            counters.copied(ends - u64::from(!progress.counted));
            progress.counted = true;
        }
        self.progress = Progress::default();
        if let Some(held) = &mut self.held {
            held.progress = progress;
        }
        done != Done::Again
    }
}
