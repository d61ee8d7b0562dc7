// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Uplinks, the ports without a guest: a TAP device, an interface (AF_PACKET) or passt. One system call per frame, on
//! descriptors that don't block. The frame goes from the guest's buffers to the kernel without a copy in the switch,
//! and large frames stay large if the kernel takes them.

pub mod loopback;
pub mod packet;
pub mod passt;
pub mod tap;

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, TryLockError};

use serde::{Deserialize, Serialize};

use crate::event::Epoll;
use crate::forwarding::credit::Credits;
use crate::forwarding::deliver::Frame;
use crate::forwarding::fallback::{finish, takes};
use crate::forwarding::forward::{BATCH, Done, Forwarder, Pass, Sender};
use crate::forwarding::held::Held;
use crate::forwarding::opens;
use crate::forwarding::view::View;
use crate::frames::frame::{ETH_HEADER, MAX_FRAME, NET_HEADER, NetHeader};
use crate::frames::headers::{LOOK, is_tagged};
use crate::frames::offload::Layers;
use crate::policy::port::Vlan;
use crate::ports::counters::Reason;
use crate::vring::queue::Negotiated;
use crate::vring::ring::Segment;

/// The segments of one frame that a device is given in one turn. Each takes a system call, and other ports wait.
const SEGMENTS: usize = 64;

/// The largest number of pieces of one frame that the kernel is given; a frame of more is gathered first.
const PIECES: usize = 64;

/// The device of an uplink.
pub trait Link: Send + Sync {
    /// Bytes of virtio-net header before each frame (0, 10 or 12).
    fn header(&self) -> usize;

    /// The work that the other end can finish.
    fn offloads(&self) -> Negotiated;

    /// Sends a frame that lies in `pieces`, after its header if there is one.
    ///
    /// # Errors
    /// `WouldBlock`: no room at present. Others: the frame is lost.
    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()>;

    /// Receives a frame, after its header if there is one; returns its length.
    ///
    /// # Errors
    /// `WouldBlock`: there is none.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Returns the descriptor to poll.
    fn fd(&self) -> RawFd;

    /// Returns whether it may keep the rest of a frame, which [`Link::receive`] sends once there is room.
    fn keeps_rest(&self) -> bool {
        false
    }
}

/// An opened device, without its descriptor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Opened {
    /// A TAP device.
    Tap(tap::Offloads),
    /// A packet socket.
    Packet,
    /// A connection to passt.
    Passt,
}

impl Opened {
    /// Makes the uplink of an opened device.
    ///
    /// # Errors
    /// The kernel's.
    pub fn uplink(self, fd: OwnedFd) -> io::Result<Uplink> {
        Ok(match self {
            Self::Tap(offloads) => Uplink::new(Box::new(tap::Tap::over(offloads, fd))),
            Self::Packet => Uplink::new(Box::new(packet::Packet::over(fd))),
            Self::Passt => Uplink { firewall: true, ..Uplink::new(Box::new(passt::Passt::over(fd)?)) },
        })
    }
}

/// A received frame that is not forwarded yet.
struct Inbox {
    buffer: Box<[u8]>,
    len: usize,
    held: Option<Held>,
    credits: Credits,
}

pub struct Uplink {
    link: Box<dyn Link>,
    /// Of passt: frames to or from the host's loopback are dropped.
    firewall: bool,
    /// The other end is gone for good.
    down: AtomicBool,
    inbox: Mutex<Inbox>,
}

impl Uplink {
    /// Makes an uplink over `link`.
    #[must_use]
    pub fn new(link: Box<dyn Link>) -> Self {
        let buffer = vec![0; NET_HEADER + MAX_FRAME].into_boxed_slice();
        let inbox = Mutex::new(Inbox { buffer, len: 0, held: None, credits: Credits::default() });
        Self { link, firewall: false, down: AtomicBool::new(false), inbox }
    }

    /// Returns whether the headers of frames for it decide.
    #[must_use]
    pub fn filters(&self) -> bool {
        self.firewall
    }

    /// Returns whether frames can pass.
    #[must_use]
    pub fn is_up(&self) -> bool {
        !self.down.load(Ordering::Relaxed)
    }

    /// Notes an error of its device, named `name`, which may be gone.
    #[cold]
    fn note(&self, name: &str, err: &io::Error) {
        let gone = matches!(
            err.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::NotConnected
                | io::ErrorKind::InvalidData
        );
        // The answers of a TAP device and of an interface that were removed.
        let removed = matches!(err.raw_os_error(), Some(libc::EBADFD | libc::ENXIO));
        if (gone || removed) && !self.down.swap(true, Ordering::Relaxed) {
            tracing::warn!(uplink = name, %err, "uplink is down: its device is gone");
        }
    }

    /// Adds its descriptor to those that wake a worker.
    ///
    /// # Errors
    /// It can't be waited for.
    pub fn wake_by(&self, epoll: &Epoll) -> io::Result<()> {
        let fd = self.link.fd();
        if self.link.keeps_rest() { epoll.add_both_ways(fd) } else { epoll.add(fd) }
    }
}

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

/// Sends a frame to the uplink at `dest`.
#[inline(never)]
pub(crate) fn hand(sender: &mut Sender<'_, '_>, dest: usize, frame: &Frame<'_>) -> Done {
    let attached = &sender.view.ports()[dest];
    let Some(uplink) = attached.uplink.as_ref().filter(|uplink| uplink.is_up()) else {
        return Done::Dropped(Reason::Down);
    };
    // A port with MACs is a service, which would take a transparent guest's own tag for a VLAN of the switch.
    let own_tags = sender.policy.vlan == Vlan::Transparent && !sender.policy.uplink;
    if own_tags && !attached.policy.macs.is_empty() && is_tagged(frame.prefix) {
        return Done::Dropped(Reason::Vlan);
    }
    if let Some(Err(reason)) = uplink.firewall.then(|| loopback::check(frame.prefix, frame.len)) {
        return Done::Dropped(reason);
    }
    sender.resume_at(dest);
    // The queue's lock is the uplink's, and its holder may write the counters.
    let Some(guard) = attached.port.rx(0).try_lock() else { return sender.wait(dest, Reason::Busy) };
    let counters = guard.counters();
    let link = &*uplink.link;
    let mut full = false;
    let key = opens::key(sender.view, dest);
    let credits = &mut sender.opens.credits;
    let mut give = |piece: &Frame<'_>| match send(link, piece) {
        Ok(()) => {
            counters.passed(1, piece.len.into());
            if !credits.are_whole() {
                credits.earn(key, 1, piece.len.into());
            }
            Done::Taken
        }
        Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
            full = true;
            Done::Again
        }
        Err(err) => {
            uplink.note(attached.port.name(), &err);
            counters.drop_one(Reason::Uplink);
            Done::Taken
        }
    };
    let simple = frame.header.is_plain() || takes(&link.offloads(), &frame.header);
    let done = if simple && frame.rest.len() <= PIECES {
        give(frame)
    } else if simple {
        let mut whole = vec![0; frame.len as usize];
        if crate::forwarding::fallback::gather(frame, &mut whole).is_none() {
            return Done::Dropped(Reason::Oversize);
        }
        let rest = [Segment { ptr: whole.as_mut_ptr(), len: frame.len }];
        let skip = frame.prefix.len() as u32;
        give(&Frame { rest: &rest, skip, ..*frame })
    } else {
        // A mirror's copy never waits.
        let mut left = if sender.mirroring { usize::MAX } else { SEGMENTS };
        finish(sender.buffers, &mut sender.progress, frame, |segment| {
            if left == 0 {
                return Done::Again;
            }
            left -= 1;
            give(segment)
        })
    };
    match done {
        Done::Again if !full => sender.pause(dest),
        Done::Again if sender.flooding => Done::Dropped(Reason::Uplink),
        Done::Again => sender.wait(dest, Reason::Uplink),
        done => done,
    }
}

/// Receives up to a batch of frames from an uplink and forwards them.
pub(crate) fn pass(forwarder: &mut Forwarder, view: &View, src: usize, uplink: &Uplink, now: u64) -> Pass {
    if !uplink.is_up() {
        return Pass::Idle;
    }
    let mut inbox = match uplink.inbox.try_lock() {
        Ok(inbox) => inbox,
        Err(TryLockError::WouldBlock) => return Pass::Busy,
        Err(TryLockError::Poisoned(left)) => left.into_inner(),
    };
    let attached = &view.ports()[src];
    let counted = attached.port.tx(0);
    let Some(_counting) = counted.try_lock() else { return Pass::Busy };
    let link = &*uplink.link;
    let head = link.header();
    let inbox = &mut *inbox;
    let (mut taken, mut failures) = (0, 0);
    let credits = std::mem::take(&mut inbox.credits);
    let mut sender = Sender::new(forwarder, view, src, 0, now, credits);
    while taken + failures < BATCH && sender.has_time() {
        if inbox.len == 0 {
            match link.receive(&mut inbox.buffer) {
                Ok(len) => inbox.len = len,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) => {
                    uplink.note(attached.port.name(), &err);
                    if !uplink.is_up() {
                        break;
                    }
                    // A frame that the kernel could not hand out, or the device was down: others may wait behind it.
                    failures += 1;
                    continue;
                }
            }
        }
        let frame = &inbox.buffer[..inbox.len];
        let rest = [Segment { ptr: frame.as_ptr().cast_mut(), len: frame.len() as u32 }];
        sender.flow = flow_of(frame.get(head..).unwrap_or_default());
        let len = frame.len().saturating_sub(head);
        let ended = if let Some(held) = inbox.held.take() {
            sender.again(&held, &rest, &counted.counters)
        } else {
            let done = if len < ETH_HEADER {
                Done::Dropped(Reason::Short)
            } else {
                let header = match frame.first_chunk::<NET_HEADER>() {
                    Some(h) if head > 0 => NetHeader::parse(h),
                    _ => NetHeader::default(),
                };
                let split = head + len.min(LOOK);
                let (prefix, skip) = (&frame[head..split], split as u32);
                let layers = Layers::default();
                sender.described(Frame { header, layers, prefix, rest: &rest, skip, len: len as u32 }, 0)
            };
            sender.end(done, len as u32, &counted.counters)
        };
        if !ended {
            break;
        }
        inbox.len = 0;
        taken += 1;
    }
    inbox.held = sender.held.take();
    inbox.credits = sender.opens.finish();
    sender.tally.count(&counted.counters);
    match (inbox.held.is_some(), taken) {
        (true, n) => Pass::Held(n),
        (false, 0) => Pass::Idle,
        (false, n) => Pass::Worked(n),
    }
}

/// Returns a number that is the same for all frames of one connection: from addresses and ports of IPv4 and IPv6, or
/// the MACs.
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
