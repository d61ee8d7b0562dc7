// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An uplink in memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use tombolo_net::uplink::Link;
use tombolo_net::vring::queue::Negotiated;

use super::Rig;

/// The end outside.
#[derive(Default)]
pub struct Wire {
    /// Frames from outside.
    pub inward: Mutex<VecDeque<Vec<u8>>>,
    /// The results of the next sends: 0 no room, 1 an error. Empty: all are taken.
    pub trouble: Mutex<VecDeque<u8>>,
    /// The frames that were taken.
    pub outward: Mutex<Vec<Vec<u8>>>,
}

/// The switch's end of it.
struct End(Arc<Wire>);

impl Link for End {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        match self.0.trouble.lock().unwrap().pop_front() {
            Some(0) => Err(io::ErrorKind::WouldBlock.into()),
            Some(1) => Err(io::ErrorKind::InvalidInput.into()),
            _ => {
                let piece = |p: &libc::iovec| {
                    let mut bytes = vec![0; p.iov_len];
                    // SAFETY: the switch's promise: the pieces are mapped.
                    unsafe {
                        std::ptr::copy_nonoverlapping(p.iov_base.cast(), bytes.as_mut_ptr(), p.iov_len)
                    };
                    bytes
                };
                self.0.outward.lock().unwrap().push(pieces.iter().flat_map(piece).collect());
                Ok(())
            }
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let f = self.0.inward.lock().unwrap().pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        if f.is_empty() {
            return Err(io::ErrorKind::NetworkDown.into());
        }
        buffer[..f.len()].copy_from_slice(&f);
        Ok(f.len())
    }

    fn fd(&self) -> RawFd {
        -1
    }
}

/// Gives the guests of `rig` an uplink, as their last port.
pub fn with_uplink(rig: &mut Rig) -> Arc<Wire> {
    let wire = Arc::new(Wire::default());
    rig.add_link(Box::new(End(wire.clone())));
    wire
}
