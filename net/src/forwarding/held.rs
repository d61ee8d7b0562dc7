// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A frame that was admitted and waits for its receiver. It was parsed, checked, captured and paid for once; a later try
//! uses the state kept here, with the rest of the bytes in the sender's buffers.

use crate::forwarding::deliver::Frame;
use crate::frames::frame::NetHeader;
use crate::frames::headers::LOOK;
use crate::frames::offload::Layers;
use crate::frames::vlan::VlanTag;
use crate::vring::ring::Segment;

/// The progress of a frame.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Segments that its receiver has already, if it is segmented.
    pub resume: usize,
    /// It is flooded, and the receivers before the one that it waits for have had it.
    pub begun: bool,
    /// Ends of the frame, as a packet or a drop, beyond those counted.
    pub ends: u64,
    /// It has ended for one receiver and was counted as sent.
    pub counted: bool,
    /// Its receiver takes more: it waits for the sender's next turn, and no credit pays for that.
    pub paused: bool,
}

/// A frame that waits.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    header: NetHeader,
    layers: Layers,
    prefix: [u8; LOOK],
    prefix_len: u8,
    /// The sender's segment that comes after the prefix, and the byte in it.
    index: u16,
    skip: u32,
    len: u32,
    pub tag: VlanTag,
    /// The frame's progress.
    pub progress: Progress,
    /// The time up to which its waiting was paid for (nanoseconds).
    pub since: u64,
    /// The receiver that it waits for, as [`crate::forwarding::credit::Credits`] numbers them.
    pub receiver: usize,
}

impl Held {
    /// Keeps `frame`, whose rest begins with its sender's segment `index`.
    pub(crate) fn new(frame: &Frame<'_>, index: usize, tag: VlanTag, since: u64, receiver: usize) -> Self {
        let mut prefix = [0; LOOK];
        let n = frame.prefix.len().min(LOOK);
        prefix[..n].copy_from_slice(&frame.prefix[..n]);
        Self {
            header: frame.header,
            layers: frame.layers,
            prefix,
            prefix_len: n as u8,
            index: index as u16,
            skip: frame.skip,
            len: frame.len,
            tag,
            progress: Progress::default(),
            since,
            receiver,
        }
    }

    /// Returns the frame, whose rest is in its sender's `segments`.
    pub(crate) fn frame<'a>(&'a self, segments: &'a [Segment]) -> Frame<'a> {
        Frame {
            header: self.header,
            layers: self.layers,
            prefix: &self.prefix[..self.prefix_len.into()],
            rest: &segments[self.index.into()..],
            skip: self.skip,
            len: self.len,
        }
    }

    /// Bytes of the frame.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }
}
