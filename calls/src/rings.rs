// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link over two rings and a window that lie one after the other in memory that both sides map; who wakes whom, and how, is
//! the transport's ([`crate::process`], [`crate::zone`]).

use crate::children::NotInChildren;
use crate::hello::Geometry;
use crate::memory::{Mapping, RING_HEADER, SharedRing};
use crate::ring::{Consumer, Popped, Producer};
use crate::{Bell, Error, Link, Rx, Tx, Window};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// Bytes of both rings and the window.
pub(crate) fn total(geometry: Geometry) -> u64 {
    let ring = RING_HEADER.next_multiple_of(PAGE).saturating_add(geometry.ring);
    ring.saturating_mul(2).saturating_add(geometry.window)
}

/// Wakes the peer.
pub(crate) trait Ring: Send + Sync {
    fn ring(&self);
}

/// The two sides of a channel; each writes one of the rings.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// The bells of one side, and how it rings the peer.
pub(crate) struct Bells {
    pub bell: Arc<dyn Bell>,
    pub room: Arc<dyn Bell>,
    /// Wakes the peer for records.
    pub peer: Arc<dyn Ring>,
    /// Wakes the peer for room.
    pub peer_room: Arc<dyn Ring>,
}

struct RingTx {
    ring: Producer<SharedRing>,
    peer: Arc<dyn Ring>,
}

impl Tx for RingTx {
    fn try_send(&mut self, parts: &[&[u8]]) -> Result<bool, Error> {
        self.ring.try_push(parts)
    }
    fn publish(&mut self) -> Result<(), Error> {
        if self.ring.publish() {
            self.peer.ring();
        }
        Ok(())
    }
    fn arm_room(&mut self) -> Result<bool, Error> {
        self.ring.arm()
    }
    fn max_record(&self) -> usize {
        self.ring.max_record()
    }
    fn push_window(&mut self, _offset: u64, _len: u64) -> Result<(), Error> {
        Ok(())
    }
    fn shares_window(&self) -> bool {
        true
    }
}

struct RingRx {
    ring: Consumer<SharedRing>,
    peer_room: Arc<dyn Ring>,
}

impl Rx for RingRx {
    fn try_recv(&mut self, into: &mut Vec<u8>) -> Result<bool, Error> {
        Ok(match self.ring.try_pop(into)? {
            Popped::Record => true,
            Popped::Empty => false,
            Popped::EmptyWake => {
                self.peer_room.ring();
                false
            }
        })
    }
    fn arm(&mut self) -> Result<bool, Error> {
        self.ring.arm()
    }
    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// One side of the channel at byte `at` of a mapping.
pub(crate) fn link(
    mapping: Arc<Mapping>,
    at: u64,
    geometry: Geometry,
    side: Side,
    bells: Bells,
    gone: NotInChildren,
) -> Result<Link, Error> {
    mapping.not_in_children()?;
    let step = RING_HEADER.next_multiple_of(PAGE) + geometry.ring;
    let ring =
        |at| SharedRing::new(mapping.clone(), at, geometry.ring).ok_or(Error::Broken("a ring doesn't fit"));
    let window = Window::new(mapping.clone(), at + 2 * step, geometry.window)
        .ok_or(Error::Broken("the window doesn't fit"))?;
    let (to_server, to_client) = (ring(at)?, ring(at + step)?);
    let (outgoing, incoming) = match side {
        Side::Client => (to_server, to_client),
        Side::Server => (to_client, to_server),
    };
    Ok(Link {
        bell: bells.bell,
        room: bells.room,
        tx: Box::new(RingTx { ring: Producer::new(outgoing), peer: bells.peer }),
        rx: Box::new(RingRx { ring: Consumer::new(incoming), peer_room: bells.peer_room }),
        window: Arc::new(window),
        gone,
    })
}
