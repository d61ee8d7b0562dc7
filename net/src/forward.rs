// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One pass over a transmit queue: a batch of frames is taken, each is given to the port that owns its destination
//! (selection and forwarding, as in the NOVA paper), then all receivers' rings are published, then the sender's.
//!
//! Frames are done in order. A receiver without buffers holds its sender up for a moment ([`HOLD_NS`]): the frame stays
//! in the sender's ring and nothing is lost. A receiver that has no buffers for longer is *stuck*: what is sent to
//! it is dropped at once, until it takes a frame again, so that it can't hold up others.

use crate::counters::Reason;
use crate::cpu::prefetch;
use crate::deliver::{Frame, Put, put};
use crate::frame::{ETH_HEADER, MAX_FRAME, NET_HEADER, NetHeader};
use crate::ring::{Broken, Segment};
use crate::view::View;
use crate::vring::Guard;

/// Frames of one pass.
pub const BATCH: usize = 32;
/// How long a receiver without buffers holds up its sender.
pub const HOLD_NS: u64 = 200_000;
/// Receivers whose rings are open at one time.
const OPEN: usize = 8;
/// Bytes of a frame that are copied before they are looked at.
const PREFIX: usize = 16;
/// Frames that are fetched ahead.
const AHEAD: usize = 4;

/// What a pass came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Nothing to do.
    Idle,
    /// So many frames were taken.
    Worked(usize),
    /// The next frame waits for its receiver.
    Held(usize),
    /// The sender's ring is broken; it is stopped.
    Broken(Broken),
}

struct Open<'a> {
    dest: usize,
    guard: Guard<'a>,
    packets: u64,
    bytes: u64,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if self.packets > 0 {
            self.guard.counters().passed(self.packets, self.bytes);
            self.guard.publish();
        }
    }
}

/// Receivers' rings held during a pass.
struct Opens<'a> {
    list: [Option<Open<'a>>; OPEN],
    last: usize,
}

/// Why a receiver's ring can't be had.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NotOpen {
    Busy,
    Down,
}

impl<'a> Opens<'a> {
    fn new() -> Self {
        Self { list: [const { None }; OPEN], last: 0 }
    }

    #[inline(always)]
    fn get(&mut self, view: &'a View, dest: usize, flow: usize) -> Result<&mut Open<'a>, NotOpen> {
        if !matches!(&self.list[self.last], Some(open) if open.dest == dest) {
            self.last = self.find(view, dest, flow)?;
        }
        self.list[self.last].as_mut().ok_or(NotOpen::Busy)
    }

    #[inline(never)]
    fn find(&mut self, view: &'a View, dest: usize, flow: usize) -> Result<usize, NotOpen> {
        if let Some(at) = self.list.iter().position(|o| matches!(o, Some(o) if o.dest == dest)) {
            return Ok(at);
        }
        let port = &view.ports()[dest].port;
        let queue = port.active_rx(flow).ok_or(NotOpen::Down)?;
        let guard = port.rx(queue).try_lock().ok_or(NotOpen::Busy)?;
        if !guard.is_active() {
            return Err(NotOpen::Down);
        }
        // A free place, or the one after the last used, whose ring is published by that.
        let at = self.list.iter().position(Option::is_none).unwrap_or((self.last + 1) % OPEN);
        self.list[at] = Some(Open { dest, guard, packets: 0, bytes: 0 });
        Ok(at)
    }

    fn close(&mut self, dest: usize) {
        for open in &mut self.list {
            if matches!(open, Some(o) if o.dest == dest) {
                *open = None;
            }
        }
    }
}

/// What became of a frame: taken (delivered or dropped), or to be tried again.
enum Done {
    Taken,
    Dropped(Reason),
    Again,
}

/// Does one pass over transmit queue `queue` of the port at `src`, at time `now` (nanoseconds).
pub fn pass(view: &View, src: usize, queue: usize, now: u64) -> Pass {
    let Some(attached) = view.ports().get(src) else { return Pass::Idle };
    let Some(mut tx) = attached.port.tx(queue).try_lock() else { return Pass::Idle };
    if !tx.is_active() {
        return Pass::Idle;
    }
    {
        let state = &mut *tx;
        let Some(ring) = &mut state.ring else { return Pass::Idle };
        if state.window.is_empty() {
            if let Err(why) = ring.fetch(&mut state.translator, &mut state.window, false, BATCH) {
                if state.window.is_empty() {
                    state.fail(why);
                    return Pass::Broken(why);
                }
            }
        }
        if state.window.is_empty() {
            return Pass::Idle;
        }
    }
    let mut opens = Opens::new();
    let mut taken = 0;
    let mut bytes = 0;
    let head = u32::from(tx.negotiated.header);
    let mut held = false;
    while let Some(&chain) = tx.window.chain(taken) {
        if let Some(ahead) = tx.window.chain(taken + AHEAD) {
            for s in tx.window.segments(ahead).iter().take(2) {
                prefetch(s.ptr);
            }
        }
        let len = chain.total.wrapping_sub(head);
        let done = if chain.total < head + ETH_HEADER as u32 {
            Done::Dropped(Reason::Short)
        } else if len > MAX_FRAME as u32 {
            Done::Dropped(Reason::Oversize)
        } else {
            let prefix: [u8; PREFIX];
            match tx.window.segments(&chain) {
                [one] if one.len >= head + PREFIX as u32 => {
                    // SAFETY: the segment has that many mapped bytes.
                    let header = unsafe {
                        prefix = one.ptr.add(head as usize).cast::<[u8; PREFIX]>().read_unaligned();
                        read_header(one.ptr, head)
                    };
                    let frame = Frame {
                        header,
                        prefix: &prefix,
                        rest: std::slice::from_ref(one),
                        skip: head + PREFIX as u32,
                        len,
                    };
                    forward(view, src, queue, &mut opens, &frame)
                }
                [first, two] if first.len == head && two.len >= PREFIX as u32 => {
                    // SAFETY: the segments have that many mapped bytes.
                    let header = unsafe {
                        prefix = two.ptr.cast::<[u8; PREFIX]>().read_unaligned();
                        read_header(first.ptr, head)
                    };
                    let frame = Frame {
                        header,
                        prefix: &prefix,
                        rest: std::slice::from_ref(two),
                        skip: PREFIX as u32,
                        len,
                    };
                    forward(view, src, queue, &mut opens, &frame)
                }
                segments => scattered(view, src, queue, &mut opens, segments, head, len),
            }
        };
        match done {
            Done::Taken => {}
            Done::Dropped(reason) => tx.counters().drop_one(reason),
            Done::Again => {
                // Not taken now: the receiver is full or another worker has it.
                let since = *tx.held_since.get_or_insert(now);
                if now.saturating_sub(since) < HOLD_NS {
                    held = true;
                    break;
                }
                tx.held_since = None;
                tx.counters().drop_one(Reason::NoBuffer);
                taken += 1;
                bytes += u64::from(len);
                continue;
            }
        }
        tx.held_since = None;
        taken += 1;
        bytes += u64::from(len);
    }
    // Receivers first: a frame is never done for the sender before the receiver can see it.
    drop(opens);
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

/// Copies a virtio-net header of `head` bytes.
///
/// # Safety
/// `at` has `head` (10 or 12) mapped bytes.
#[inline(always)]
unsafe fn read_header(at: *const u8, head: u32) -> NetHeader {
    let mut bytes = [0u8; NET_HEADER];
    // SAFETY: the caller's promise.
    unsafe {
        if head == NET_HEADER as u32 {
            bytes = at.cast::<[u8; NET_HEADER]>().read_unaligned();
        } else {
            std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), head as usize);
        }
    }
    NetHeader::parse(&bytes)
}

/// A frame whose header lies across buffers: its first bytes are gathered.
#[inline(never)]
fn scattered<'a>(
    view: &'a View,
    src: usize,
    queue: usize,
    opens: &mut Opens<'a>,
    segments: &[Segment],
    head: u32,
    len: u32,
) -> Done {
    let mut first = [0u8; NET_HEADER + PREFIX];
    let prefix_len = len.min(PREFIX as u32);
    let want = (head + prefix_len) as usize;
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
    // SAFETY: first holds at least head bytes.
    let header = unsafe { read_header(first.as_ptr(), head) };
    let prefix = &first[head as usize..want];
    let frame = Frame { header, prefix, rest: &segments[index..], skip, len };
    forward(view, src, queue, opens, &frame)
}

/// Chooses the receiver and gives it the frame.
#[inline(always)]
fn forward<'a>(view: &'a View, src: usize, queue: usize, opens: &mut Opens<'a>, frame: &Frame<'_>) -> Done {
    let key = u64::from_le_bytes([
        frame.prefix[0],
        frame.prefix[1],
        frame.prefix[2],
        frame.prefix[3],
        frame.prefix[4],
        frame.prefix[5],
        0,
        0,
    ]);
    if key & 1 != 0 {
        return flood(view, src, queue, opens, frame);
    }
    match view.owner(key) {
        Some(dest) if dest != src => give(view, dest, queue, opens, frame),
        Some(_) => Done::Dropped(Reason::Loop),
        None => Done::Dropped(Reason::Unknown),
    }
}

/// Gives a frame to one port.
#[inline(always)]
fn give<'a>(view: &'a View, dest: usize, queue: usize, opens: &mut Opens<'a>, frame: &Frame<'_>) -> Done {
    let open = match opens.get(view, dest, queue) {
        Ok(open) => open,
        Err(NotOpen::Busy) => return Done::Again,
        Err(NotOpen::Down) => return Done::Dropped(Reason::Down),
    };
    match put(&mut open.guard, frame) {
        Put::Done => {
            open.packets += 1;
            open.bytes += u64::from(frame.len);
            Done::Taken
        }
        Put::Full => Done::Again,
        Put::TooLarge => {
            open.guard.counters().drop_one(Reason::BufferSize);
            Done::Taken
        }
        Put::Broken(why) => {
            open.guard.fail(why);
            opens.close(dest);
            Done::Dropped(Reason::Down)
        }
    }
}

/// Gives a frame to all ports but its sender.
#[inline(never)]
fn flood<'a>(view: &'a View, src: usize, queue: usize, opens: &mut Opens<'a>, frame: &Frame<'_>) -> Done {
    for dest in 0..view.ports().len() {
        if dest == src {
            continue;
        }
        // A flooded frame waits for nobody: it is counted as dropped where it can't be had.
        if let Done::Again = give(view, dest, queue, opens, frame) {
            if let Ok(open) = opens.get(view, dest, queue) {
                open.guard.counters().drop_one(Reason::NoBuffer);
            }
        }
    }
    Done::Taken
}
