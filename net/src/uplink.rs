// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is behind a port that isn't a guest: a TAP device, an interface (AF_PACKET) or passt. One system call per
//! frame, on descriptors that don't block; the frame goes from the guest's buffers to the kernel without a copy of
//! ours, and large frames as large frames where the kernel takes them.

pub mod packet;
pub mod passt;
pub mod tap;

use std::io;
use std::os::fd::RawFd;
use std::sync::Mutex;

use crate::counters::Reason;
use crate::deliver::Frame;
use crate::fallback::{Buffers, finish, takes};
use crate::forward::{BATCH, Done, Forwarder, HOLD_NS, PREFIX, Pass, Sender};
use crate::frame::{ETH_HEADER, MAX_FRAME, NET_HEADER, NetHeader};
use crate::opens::Opens;
use crate::ring::Segment;
use crate::view::View;
use crate::vring::Negotiated;

/// Most pieces of one frame that are given to the kernel; a frame of more is put together first.
const PIECES: usize = 64;

/// A way out.
pub trait Link: Send + Sync {
    /// Bytes of virtio-net header before each frame (0, 10 or 12).
    fn header(&self) -> usize;

    /// What the other end can finish.
    fn offloads(&self) -> Negotiated;

    /// Sends a frame that lies in `pieces` (its header, as far as there is one, first).
    ///
    /// # Errors
    /// `WouldBlock`: no room at present. Others: the frame is lost.
    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()>;

    /// Receives a frame (its header, as far as there is one, first); its length.
    ///
    /// # Errors
    /// `WouldBlock`: there is none.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// What to wait for.
    fn fd(&self) -> RawFd;
}

/// A frame that came in and is not forwarded yet.
struct Inbox {
    buffer: Box<[u8]>,
    len: usize,
    held_since: Option<u64>,
    resume: usize,
}

/// An uplink.
pub struct Uplink {
    link: Box<dyn Link>,
    inbox: Mutex<Inbox>,
}

impl Uplink {
    /// An uplink over `link`.
    #[must_use]
    pub fn new(link: Box<dyn Link>) -> Self {
        let buffer = vec![0; NET_HEADER + MAX_FRAME].into_boxed_slice();
        Self { link, inbox: Mutex::new(Inbox { buffer, len: 0, held_since: None, resume: 0 }) }
    }

    /// What to wait for.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.link.fd()
    }
}

/// Sends one frame as it is.
fn send(link: &dyn Link, frame: &Frame<'_>) -> io::Result<()> {
    let header = frame.header.bytes(0);
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut pieces = [empty; PIECES + 2];
    let mut n = 0;
    let mut add = |ptr: *const u8, len: usize| {
        if len > 0 {
            pieces[n] = libc::iovec { iov_base: ptr.cast_mut().cast(), iov_len: len };
            n += 1;
        }
    };
    add(header.as_ptr(), link.header());
    add(frame.prefix.as_ptr(), frame.prefix.len());
    let mut skip = frame.skip;
    for s in frame.rest {
        add(s.ptr.wrapping_add(skip as usize), (s.len - skip) as usize);
        skip = 0;
    }
    link.send(&pieces[..n])
}

/// Hands a frame to the uplink at `dest`.
#[inline(never)]
pub(crate) fn hand(sender: &mut Sender<'_, '_>, dest: usize, frame: &Frame<'_>) -> Done {
    let attached = &sender.view.ports()[dest];
    let Some(uplink) = &attached.uplink else { return Done::Dropped(Reason::Down) };
    // The queue's lock is that of the way out, and makes its counters ours.
    let Some(guard) = attached.port.rx(0).try_lock() else { return Done::Again };
    let counters = guard.counters();
    let link = &*uplink.link;
    let give = |piece: &Frame<'_>| match send(link, piece) {
        Ok(()) => {
            counters.passed(1, piece.len.into());
            Done::Taken
        }
        Err(err) if err.kind() == io::ErrorKind::WouldBlock => Done::Again,
        Err(_) => {
            counters.drop_one(Reason::Uplink);
            Done::Taken
        }
    };
    let simple = frame.header.is_plain() || takes(&link.offloads(), &frame.header);
    if simple && frame.rest.len() <= PIECES {
        return give(frame);
    }
    if simple {
        let mut whole = vec![0; frame.len as usize];
        if crate::fallback::gather(frame, &mut whole).is_none() {
            return Done::Dropped(Reason::Oversize);
        }
        let rest = [Segment { ptr: whole.as_mut_ptr(), len: frame.len }];
        let skip = frame.prefix.len() as u32;
        return give(&Frame { rest: &rest, skip, ..*frame });
    }
    finish(sender.buffers, &mut sender.resume, frame, give)
}

/// Takes up to a batch of frames from an uplink and forwards them.
pub(crate) fn pass(forwarder: &mut Forwarder, view: &View, src: usize, uplink: &Uplink, now: u64) -> Pass {
    let Ok(mut inbox) = uplink.inbox.try_lock() else { return Pass::Idle };
    let attached = &view.ports()[src];
    let counted = attached.port.tx(0);
    let Some(_counting) = counted.try_lock() else { return Pass::Idle };
    let link = &*uplink.link;
    let head = link.header();
    let Forwarder { buffers, .. } = forwarder;
    let mut spare: Buffers = std::mem::take(buffers);
    let mut broken = Vec::new();
    let (mut taken, mut bytes, mut held) = (0, 0, false);
    {
        let mut sender = Sender {
            view,
            src,
            policy: &attached.policy,
            own: 0,
            flow: 0,
            now,
            opens: Opens::new(),
            buffers: &mut spare,
            broken: &mut broken,
            resume: inbox.resume,
            full: None,
        };
        while taken < BATCH {
            if inbox.len == 0 {
                match link.receive(&mut inbox.buffer) {
                    Ok(len) => inbox.len = len,
                    Err(_) => break,
                }
            }
            let frame = &inbox.buffer[..inbox.len];
            let done = match frame.len().checked_sub(head) {
                Some(len) if len >= ETH_HEADER => {
                    let header = match frame.first_chunk::<NET_HEADER>() {
                        Some(h) if head > 0 => NetHeader::parse(h),
                        _ => NetHeader::default(),
                    };
                    let split = head
                        + len.min(if attached.policy.ips.is_empty() { PREFIX } else { crate::spoof::DEEP });
                    let rest = [Segment { ptr: frame.as_ptr().cast_mut(), len: frame.len() as u32 }];
                    sender.flow = flow_of(&frame[head..]);
                    sender.forward(&Frame {
                        header,
                        prefix: &frame[head..split],
                        rest: &rest,
                        skip: split as u32,
                        len: len as u32,
                    })
                }
                _ => Done::Dropped(Reason::Short),
            };
            match done {
                Done::Taken => {}
                Done::Dropped(reason) => counted.counters.drop_one(reason),
                Done::Again => {
                    let since = *inbox.held_since.get_or_insert(now);
                    if now.saturating_sub(since) < HOLD_NS {
                        held = true;
                        break;
                    }
                    sender.give_up();
                    counted.counters.drop_one(Reason::NoBuffer);
                }
            }
            bytes += (inbox.len - head.min(inbox.len)) as u64;
            inbox.len = 0;
            inbox.held_since = None;
            sender.resume = 0;
            taken += 1;
        }
        inbox.resume = sender.resume;
    }
    forwarder.buffers = spare;
    forwarder.note_broken(broken);
    counted.counters.passed(taken as u64, bytes);
    match (held, taken) {
        (true, n) => Pass::Held(n),
        (false, 0) => Pass::Idle,
        (false, n) => Pass::Worked(n),
    }
}

/// A number that is the same for all frames of one connection: addresses and ports of IPv4 and IPv6, or the MACs.
fn flow_of(frame: &[u8]) -> usize {
    let (at, len) = match frame.get(12..14) {
        Some([0x08, 0x00]) => (26, 12),
        Some([0x86, 0xdd]) => (22, 36),
        _ => (0, 12),
    };
    let mut hash = 0u32;
    for word in frame.get(at..at + len).unwrap_or_default().chunks(4) {
        let word = word.iter().fold(0u32, |w, b| w << 8 | u32::from(*b));
        hash = (hash ^ word).wrapping_mul(0x9e37_79b1).rotate_left(7);
    }
    hash as usize
}
