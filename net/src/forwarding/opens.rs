// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The receivers whose rings a pass holds. A ring is published when it is given back, so a pass that sends much to few
//! publishes each of them once.

use crate::forwarding::credit::Credits;
use crate::forwarding::view::View;
use crate::vring::queue::Guard;

/// Receivers whose rings are open at one time.
const OPEN: usize = 8;

/// A receiver's ring, held.
pub(crate) struct Open<'a> {
    dest: usize,
    /// The receiver's number in [`Credits`].
    key: usize,
    pub guard: Guard<'a>,
    pub packets: u64,
    pub bytes: u64,
    /// A capture or mirror of the receiver exists.
    pub watched: bool,
}

impl Drop for Open<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.packets > 0 {
            self.guard.counters().passed(self.packets, self.bytes);
            self.guard.publish();
        }
    }
}

/// The reason why a receiver's ring can't be used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotOpen {
    /// Another worker holds it.
    Busy,
    /// There is no driver.
    Down,
    /// It isn't a guest.
    Uplink,
}

/// The receivers' rings of a pass.
pub(crate) struct Opens<'a> {
    list: [Option<Open<'a>>; OPEN],
    last: usize,
    /// The sender's credits with its receivers.
    pub credits: Credits,
}

/// Returns the number of the port at `dest` in [`Credits`].
pub(crate) fn key(view: &View, dest: usize) -> usize {
    view.ports()[dest].port.number()
}

impl<'a> Opens<'a> {
    pub fn new(credits: Credits) -> Self {
        Self { list: [const { None }; OPEN], last: 0, credits }
    }

    /// Releases all rings, and returns the credits with those that the receivers have earned.
    #[inline(always)]
    pub fn finish(&mut self) -> Credits {
        if !self.credits.are_whole() {
            (0..OPEN).for_each(|at| self.shut(at));
        }
        for open in &mut self.list {
            *open = None;
        }
        std::mem::take(&mut self.credits)
    }

    #[cold]
    fn shut(&mut self, at: usize) {
        if let Some(open) = self.list[at].take() {
            if !self.credits.are_whole() {
                self.credits.earn(open.key, open.packets, open.bytes);
            }
        }
    }

    /// Returns the ring of the port at `dest` for frames of `flow`.
    #[inline(always)]
    pub fn get(&mut self, view: &'a View, dest: usize, flow: usize) -> Result<&mut Open<'a>, NotOpen> {
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
        let attached = &view.ports()[dest];
        if attached.uplink.is_some() {
            return Err(NotOpen::Uplink);
        }
        let queue = attached.port.active_rx(flow).ok_or(NotOpen::Down)?;
        let guard = attached.port.rx(queue).try_lock().ok_or(NotOpen::Busy)?;
        if !guard.is_active() {
            return Err(NotOpen::Down);
        }
        // A free place, or the one after the last used, whose ring is then published.
        let at = self.list.iter().position(Option::is_none).unwrap_or((self.last + 1) % OPEN);
        if self.list[at].is_some() {
            self.shut(at);
        }
        self.list[at] = Some(Open {
            dest,
            key: key(view, dest),
            guard,
            packets: 0,
            bytes: 0,
            watched: view.is_watched(dest),
        });
        Ok(at)
    }

    /// Releases a ring.
    pub fn close(&mut self, dest: usize) {
        for at in 0..OPEN {
            if matches!(&self.list[at], Some(o) if o.dest == dest) {
                self.shut(at);
            }
        }
    }
}
