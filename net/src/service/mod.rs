// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own services. Each is a port among the others: frames that guests flood, or send to its MAC, reach it like
//! an uplink. It forwards nothing, and its frames reach guests only.
//!
//! - [`dhcp`]: IPv4 addresses for guests that ask for one
//! - [`ipv6`]: router advertisements; [`dhcp6`]: IPv6 addresses for guests that ask for one
//! - [`querier`]: multicast queries
//! - `wire`: headers and checksums of the services' frames

pub mod dhcp;
pub mod dhcp6;
pub mod ipv6;
pub mod querier;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::Event;
use crate::frames::frame::Mac;
use crate::uplink::Link;
use crate::vring::queue::Negotiated;

/// Most answers that wait for their delivery.
const WAITING: usize = 4096;
/// Most of them for the same guest, so that one that asks without end doesn't keep others from their answers.
const WAITING_EACH: usize = 4;
/// Bytes of the longest frame that is parsed.
const LOOK: usize = 1514;

/// The settings for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease<A> {
    pub address: A,
    pub name: String,
}

/// The leases by MAC.
#[derive(Clone, Debug)]
pub struct Leases<A>(Arc<Mutex<BTreeMap<Mac, Lease<A>>>>);

impl<A> Default for Leases<A> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<A: Clone + PartialEq> Leases<A> {
    /// Gives `lease` to the owner of `mac`.
    ///
    /// # Errors
    /// Another port has that address: its name.
    pub fn put(&self, mac: Mac, lease: Lease<A>) -> Result<(), String> {
        let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = leases.values().find(|l| l.address == lease.address) {
            return Err(other.name.clone());
        }
        leases.insert(mac, lease);
        Ok(())
    }

    /// Removes the lease of `mac`.
    pub fn take(&self, mac: Mac) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&mac);
    }

    /// Returns the lease of `mac`.
    #[must_use]
    pub fn get(&self, mac: Mac) -> Option<Lease<A>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&mac).cloned()
    }
}

/// The logic of a service.
pub trait Responder: Send + Sync {
    /// Returns the answer to a frame, if it gets one.
    fn answer(&self, frame: &[u8]) -> Option<Vec<u8>>;

    /// Returns the frames that are sent to all from time to time. `_vlans`: those of the guests, 0 for untagged frames.
    fn announcements(&self, _vlans: &BTreeSet<u16>) -> Vec<Vec<u8>> {
        Vec::new()
    }
}

/// Frames that wait for their delivery.
#[derive(Default)]
struct Waiting {
    /// Answers, with the MACs that asked.
    answers: VecDeque<([u8; 6], Vec<u8>)>,
    announcements: VecDeque<Vec<u8>>,
}

impl Waiting {
    /// Queues an answer for the owner of `asker`, unless too many wait already.
    fn push(&mut self, asker: [u8; 6], answer: Vec<u8>) -> io::Result<()> {
        let own = self.answers.iter().filter(|(mac, _)| *mac == asker).count();
        if self.answers.len() == WAITING || own == WAITING_EACH {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.answers.push_back((asker, answer));
        Ok(())
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        self.answers.pop_front().map(|(_, frame)| frame).or_else(|| self.announcements.pop_front())
    }
}

struct Outbox {
    waiting: Mutex<Waiting>,
    /// Readable while frames wait.
    event: Event,
}

impl Outbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A service as a port's link.
pub struct Service {
    responder: Arc<dyn Responder>,
    outbox: Arc<Outbox>,
}

/// Sends a service's announcements.
pub struct Announcer {
    responder: Arc<dyn Responder>,
    outbox: Arc<Outbox>,
}

impl Announcer {
    /// Sends the service's announcements; `vlans` are those of the guests, 0 for untagged frames.
    pub fn announce(&self, vlans: &BTreeSet<u16>) {
        // They take the place of those that were not sent yet.
        self.outbox.waiting().announcements = self.responder.announcements(vlans).into();
        self.outbox.event.raise();
    }
}

impl Service {
    /// Makes the service of `responder`.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(responder: Arc<dyn Responder>) -> io::Result<Self> {
        let outbox = Arc::new(Outbox { waiting: Mutex::default(), event: Event::new()? });
        Ok(Self { responder, outbox })
    }

    /// Returns the sender of its announcements.
    #[must_use]
    pub fn announcer(&self) -> Announcer {
        Announcer { responder: self.responder.clone(), outbox: self.outbox.clone() }
    }
}

impl Link for Service {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        let mut frame: Vec<u8> = Vec::with_capacity(LOOK);
        for p in pieces {
            let len = p.iov_len.min(LOOK - frame.len());
            // SAFETY: the piece is mapped; copied through a raw pointer, as a guest may be writing to it.
            unsafe {
                let at = frame.len();
                std::ptr::copy_nonoverlapping(p.iov_base.cast::<u8>(), frame.as_mut_ptr().add(at), len);
                frame.set_len(at + len);
            }
        }
        let asker = frame.get(6..12).and_then(|mac| mac.first_chunk().copied());
        if let (Some(asker), Some(answer)) = (asker, self.responder.answer(&frame)) {
            self.outbox.waiting().push(asker, answer)?;
            self.outbox.event.raise();
        }
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let frame = self.outbox.waiting().pop().ok_or(io::ErrorKind::WouldBlock)?;
        buffer[..frame.len()].copy_from_slice(&frame);
        Ok(frame.len())
    }

    fn fd(&self) -> RawFd {
        self.outbox.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl Responder for Echo {
        fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
            Some([&frame[6..12], &frame[..6]].concat())
        }
    }

    #[test]
    fn a_guest_that_asks_without_end_keeps_no_other_from_an_answer() {
        let service = Service::new(Arc::new(Echo)).unwrap();
        let ask = |guest: u8| {
            let mut frame = [0, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, guest];
            service.send(&[libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() }])
        };
        let heard = (0..2 * WAITING).filter(|_| ask(1).is_ok()).count();
        assert_eq!(heard, WAITING_EACH);
        ask(2).expect("another's question");
        let mut buffer = [0; 64];
        let mut answered = Vec::new();
        while let Ok(len) = service.receive(&mut buffer) {
            answered.push(buffer[..len][5]);
        }
        assert_eq!(answered, [1, 1, 1, 1, 2]);
    }
}
