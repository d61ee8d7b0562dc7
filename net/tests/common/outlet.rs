// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device for an uplink that hands each frame to the test and never receives one.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use tombolo_net::event::Event;
use tombolo_net::uplink::Link;
use tombolo_net::vring::queue::Negotiated;

/// A device without header and offloads; `send` gets the pieces of each frame.
pub struct Outlet<F> {
    send: F,
    silence: Event,
}

impl<F: Fn(&[libc::iovec]) -> io::Result<()> + Send + Sync> Outlet<F> {
    pub fn new(send: F) -> Self {
        Self { send, silence: Event::new().unwrap() }
    }
}

impl<F: Fn(&[libc::iovec]) -> io::Result<()> + Send + Sync> Link for Outlet<F> {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        (self.send)(pieces)
    }

    fn receive(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn fd(&self) -> RawFd {
        self.silence.as_raw_fd()
    }
}
