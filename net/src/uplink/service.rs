// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own DHCP service, as a port among the others: what guests flood, or send to its MAC, comes to it as to a way
//! out; it gives no frame to anybody and none to another uplink.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::Link;
use crate::event::Event;
use crate::frames::frame::Mac;
use crate::policy::dhcp::{DhcpConfig, Lease, answer};
use crate::vring::queue::Negotiated;

/// Most answers that wait for their delivery.
const WAITING: usize = 256;
/// Bytes of the longest frame that is looked at.
const LOOK: usize = 1514;

/// Who gets which address.
#[derive(Clone, Debug, Default)]
pub struct Leases(Arc<Mutex<BTreeMap<Mac, Lease>>>);

impl Leases {
    /// The owner of `mac` gets `lease`.
    ///
    /// # Errors
    /// The name of the one who has that address.
    pub fn put(&self, mac: Mac, lease: Lease) -> Result<(), String> {
        let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = leases.values().find(|l| l.address == lease.address) {
            return Err(other.name.clone());
        }
        leases.insert(mac, lease);
        Ok(())
    }

    /// The owner of `mac` gets no address any more.
    pub fn take(&self, mac: Mac) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&mac);
    }

    fn get(&self, mac: Mac) -> Option<Lease> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&mac).cloned()
    }
}

/// The service.
pub struct Service {
    config: DhcpConfig,
    leases: Leases,
    answers: Mutex<VecDeque<Vec<u8>>>,
    /// There are answers.
    event: Event,
}

impl Service {
    /// The service of `config`, which gives what `leases` says.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(config: DhcpConfig, leases: Leases) -> io::Result<Self> {
        Ok(Self { config, leases, answers: Mutex::default(), event: Event::new()? })
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
        let Some(reply) = answer(&self.config, &frame, |mac| self.leases.get(mac)) else { return Ok(()) };
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.len() == WAITING {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        answers.push_back(reply);
        self.event.raise();
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let reply = self.answers.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let reply = reply.ok_or(io::ErrorKind::WouldBlock)?;
        buffer[..reply.len()].copy_from_slice(&reply);
        Ok(reply.len())
    }

    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
