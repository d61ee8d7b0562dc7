// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fallback for receivers that can't do the work which a sender left to them: the frame is copied once more,
//! checksummed or segmented, and delivered in a form that every driver takes.

use crate::forwarding::capture::Direction;
use crate::forwarding::deliver::{Frame, Put, put};
use crate::forwarding::forward::{Done, PREFIX, Sender};
use crate::forwarding::held::Progress;
use crate::frames::frame::{
    DATA_VALID, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, MAX_FRAME, NEEDS_CSUM, NetHeader,
};
use crate::frames::offload::{self, Layers};
use crate::ports::counters::Reason;
use crate::vring::queue::Negotiated;
use crate::vring::ring::Segment;

/// A worker's buffers for frames that can't be copied directly.
pub(crate) struct Buffers {
    /// A whole frame.
    pub whole: Box<[u8]>,
    /// A segment of it.
    pub cut: Box<[u8]>,
}

impl Default for Buffers {
    fn default() -> Self {
        let buffer = || vec![0; MAX_FRAME + 8].into_boxed_slice();
        Self { whole: buffer(), cut: buffer() }
    }
}

/// Returns whether a receiver with `n` can finish a frame with header `h`.
#[must_use]
pub(crate) fn takes(n: &Negotiated, h: &NetHeader) -> bool {
    let gso = match h.gso_type & !GSO_ECN {
        GSO_NONE => true,
        GSO_TCPV4 => n.tso4,
        GSO_TCPV6 => n.tso6,
        GSO_UDP_L4 => n.uso,
        _ => false,
    };
    (h.flags & (NEEDS_CSUM | DATA_VALID) == 0 || n.csum) && gso && (h.gso_type & GSO_ECN == 0 || n.ecn)
}

/// Copies a frame into one piece. None: it is longer than any frame can be.
pub(crate) fn gather(frame: &Frame<'_>, out: &mut [u8]) -> Option<usize> {
    let len = frame.len as usize;
    let out = out.get_mut(..len)?;
    let mut at = frame.prefix.len().min(len);
    out[..at].copy_from_slice(&frame.prefix[..at]);
    let mut skip = frame.skip as usize;
    for s in frame.rest {
        let n = (s.len as usize - skip).min(len - at);
        // SAFETY: n bytes from skip on are mapped, and out has room for them.
        unsafe { std::ptr::copy_nonoverlapping(s.ptr.add(skip), out.as_mut_ptr().add(at), n) };
        (at, skip) = (at + n, 0);
    }
    (at == len).then_some(len)
}

/// Runs `run` with a finished frame in private memory.
fn plain(bytes: &[u8], run: impl FnOnce(&Frame<'_>) -> Done) -> Done {
    let split = PREFIX.min(bytes.len());
    let rest = [Segment { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() as u32 }];
    run(&Frame {
        header: NetHeader::default(),
        layers: Layers::default(),
        prefix: &bytes[..split],
        rest: &rest,
        skip: split as u32,
        len: bytes.len() as u32,
    })
}

/// Finishes the frame in software and passes the results to `give`; segments that were delivered before a wait are left
/// out.
pub(crate) fn finish(
    buffers: &mut Buffers,
    progress: &mut Progress,
    frame: &Frame<'_>,
    mut give: impl FnMut(&Frame<'_>) -> Done,
) -> Done {
    let (header, layers) = (&frame.header, &frame.layers);
    if header.gso_type == GSO_NONE && header.flags & NEEDS_CSUM == 0 {
        // This receiver has not negotiated DATA_VALID.
        return give(&Frame { header: NetHeader::default(), ..*frame });
    }
    let Buffers { whole, cut } = buffers;
    let Some(len) = gather(frame, whole) else { return Done::Dropped(Reason::Oversize) };
    let whole = &mut whole[..len];
    if header.gso_type == GSO_NONE {
        offload::checksum(whole, layers);
        return plain(whole, give);
    }
    for index in progress.resume..offload::segments(whole, header, layers) {
        let Some(len) = offload::segment(whole, header, layers, index, cut) else {
            return Done::Dropped(Reason::Header);
        };
        match plain(&cut[..len], &mut give) {
            Done::Taken => progress.ends += 1,
            other => {
                progress.resume = index;
                return other;
            }
        }
    }
    Done::Ended
}

/// The descriptors of a receiver's chains of several that are read for one frame in one turn. A receiver that gives each segment a chain
/// of a thousand buffers would keep other ports waiting.
const EFFORT: usize = 4096;

/// Finishes a frame for the guest at `dest`, whose ring is open.
#[inline(never)]
pub(crate) fn hand(sender: &mut Sender<'_, '_>, dest: usize, frame: &Frame<'_>) -> Done {
    let mut failed = None;
    sender.resume_at(dest);
    // A mirror's copy never waits.
    let most = if sender.mirroring { usize::MAX } else { EFFORT };
    let mut progress = sender.progress;
    let (view, flow) = (sender.view, sender.flow);
    let mut read = 0;
    let done = {
        let Ok(open) = sender.opens.get(view, dest, flow) else { return Done::Dropped(Reason::Down) };
        finish(sender.buffers, &mut progress, frame, |piece| {
            if read >= most {
                return Done::Again;
            }
            let put = put(&mut open.guard, piece);
            read += open.guard.window.take_effort();
            match put {
                Put::Done => {
                    open.packets += 1;
                    open.bytes += u64::from(piece.len);
                    if let Some(capture) = &view.ports()[dest].capture {
                        capture.take(piece, Direction::ToGuest);
                    }
                    Done::Taken
                }
                other => {
                    failed = Some(other);
                    Done::Again
                }
            }
        })
    };
    sender.progress = progress;
    sender.read(read);
    match failed {
        Some(why) => sender.not_put(dest, why),
        None if done == Done::Again => sender.pause(dest),
        None => {
            sender.mirror(dest, frame);
            done
        }
    }
}
