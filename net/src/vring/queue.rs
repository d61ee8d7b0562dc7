// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A vring: a queue of a port with its ring, memory and counters, behind a lock that is tried once per batch.
//!
//! Workers only ever try the lock ([`Vring::try_lock`]) and do other work if they don't get it. The port's control
//! thread waits for it ([`Vring::lock`]), for at most as long as a batch takes. No thread waits for one lock while
//! holding another, so there is no deadlock. While the lock is held no other thread touches the ring, the window or the
//! memory that its translator keeps alive: to stop a ring or change memory, a thread takes the lock and changes it.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::forwarding::credit::Credits;
use crate::forwarding::held::Held;
use crate::ports::counters::Counters;
use crate::vring::dirty::DirtyLog;
use crate::vring::memory::{GuestMemory, Translator};
use crate::vring::ring::{Broken, PackedRing, Ring, RingAddress, RingError, RingFeatures, SplitRing, Window};

/// The negotiated features that the data path uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    pub ring: RingFeatures,
    /// Bytes of the virtio-net header: 12, or 10 for a legacy driver without mergeable buffers.
    pub header: u8,
    /// VIRTIO_NET_F_MRG_RXBUF.
    pub mergeable: bool,
    /// Any of VIRTIO_NET_F_CSUM and VIRTIO_NET_F_HOST_*: the driver fills in the headers of what it sends.
    pub host: bool,
    /// VIRTIO_NET_F_GUEST_CSUM: the driver takes frames with partial checksums.
    pub csum: bool,
    /// VIRTIO_NET_F_GUEST_TSO4.
    pub tso4: bool,
    /// VIRTIO_NET_F_GUEST_TSO6.
    pub tso6: bool,
    /// VIRTIO_NET_F_GUEST_ECN.
    pub ecn: bool,
    /// VIRTIO_NET_F_GUEST_USO4 and 6.
    pub uso: bool,
}

/// The parts of a vring that its lock protects.
pub struct State {
    /// The ring, while it is started.
    pub ring: Option<Ring>,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// Chains fetched and not completed.
    pub window: Window,
    /// Translation to the guest's memory.
    pub translator: Translator,
    /// The negotiated features.
    pub negotiated: Negotiated,
    /// Entries, from SET_VRING_NUM.
    pub size: u16,
    /// The addresses of the areas.
    pub address: RingAddress,
    /// Base, from SET_VRING_BASE.
    pub base: u32,
    /// The base at which the switch stopped the ring itself.
    pub known_base: Option<u32>,
    /// The eventfd for interrupts.
    pub call: Option<File>,
    /// The eventfd for kicks.
    pub kick: Option<Arc<File>>,
    /// The eventfd for errors.
    pub err: Option<File>,
    /// The log of written pages, during migration.
    pub log: Option<Arc<DirtyLog>>,
    /// Log address of the used ring, if the front-end wants it logged.
    pub log_used: Option<u64>,
    /// The place in a packed ring, stored for a successor.
    pub inflight: Option<crate::vring::inflight::Queue>,
    /// The reason why the switch stopped the ring.
    pub broken: Option<Broken>,
    /// The first fetched frame, if it was admitted and waits for its receiver.
    pub held: Option<Held>,
    /// The credits of waiting frames.
    pub credits: Credits,
    /// Set when a write to an eventfd of the front-end had to be interrupted. Then none of its eventfds is written until it has gone;
    /// all vrings of a port share this flag.
    pub blocks: Arc<AtomicBool>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            ring: None,
            enabled: false,
            window: Window::default(),
            translator: Translator::new(Arc::new(GuestMemory::default())),
            negotiated: Negotiated::default(),
            size: 0,
            address: RingAddress::default(),
            base: 0,
            known_base: None,
            call: None,
            kick: None,
            err: None,
            log: None,
            log_used: None,
            inflight: None,
            broken: None,
            held: None,
            credits: Credits::default(),
            blocks: Arc::default(),
        }
    }
}

impl State {
    /// Returns whether frames can pass.
    #[inline(always)]
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.enabled && self.ring.is_some()
    }

    /// Starts the ring at the front-end's addresses.
    ///
    /// # Errors
    /// As [`SplitRing::new`] and [`PackedRing::new`].
    pub fn start(&mut self) -> Result<(), RingError> {
        self.stop();
        let (mem, at, n) = (self.translator.memory(), self.address, self.negotiated);
        let mut ring = if n.packed {
            let left = self.inflight.as_ref().and_then(crate::vring::inflight::Queue::places_left);
            Ring::Packed(match left {
                Some(places) => PackedRing::resume(mem, at, self.size, places, n.ring)?,
                None if self.known_base == Some(self.base) => {
                    PackedRing::new(mem, at, self.size, self.base, n.ring)?
                }
                None => PackedRing::told(mem, at, self.size, self.base, n.ring)?,
            })
        } else {
            Ring::Split(SplitRing::new(mem, at, self.size, self.base as u16, n.ring)?)
        };
        ring.disarm();
        self.base = ring.base();
        self.broken = None;
        self.ring = Some(ring);
        Ok(())
    }

    /// Stops the ring; chains fetched and not completed count as not fetched. Returns the base for a successor.
    pub fn stop(&mut self) -> u32 {
        self.window.clear();
        self.held = None;
        if let Some(mut ring) = self.ring.take() {
            ring.rewind();
            self.base = ring.base();
            self.known_base = Some(self.base);
        }
        self.base
    }

    /// Replaces the memory under the ring, which continues if it is mapped there.
    ///
    /// # Errors
    /// The ring isn't in the new memory; it is stopped.
    pub fn set_memory(&mut self, mem: Arc<GuestMemory>) -> Result<(), RingError> {
        let running = self.ring.is_some();
        self.stop();
        self.translator = Translator::new(mem);
        if running { self.start() } else { Ok(()) }
    }

    /// Stops a ring until the front-end starts it anew, and tells the front-end.
    #[cold]
    pub fn fail(&mut self, why: Broken) {
        self.stop();
        self.broken = Some(why);
        self.tell_error();
    }

    /// Tells the front-end that the ring was stopped.
    pub fn tell_error(&mut self) {
        // The eventfd may have no reader.
        let _unheard = raise(&mut self.err, &self.blocks);
    }

    /// Makes completed chains visible and interrupts the driver if it wants that.
    #[inline(always)]
    pub fn publish(&mut self, counters: &Counters) {
        let Some(ring) = &mut self.ring else { return };
        if self.log.is_some() || self.inflight.is_some() {
            return self.publish_slow(counters);
        }
        if ring.publish() && ring.should_signal() {
            self.signal(counters);
        }
    }

    #[cold]
    fn publish_slow(&mut self, counters: &Counters) {
        let Some(ring) = &mut self.ring else { return };
        let (old, new) = (ring.published(), ring.base());
        if old == new {
            return;
        }
        if let Some(inflight) = &self.inflight {
            inflight.begin((old >> 16) as u16, (new >> 16) as u16);
        }
        ring.publish();
        if let Some(inflight) = &self.inflight {
            inflight.end((new >> 16) as u16);
        }
        if let (Some(log), Some(at)) = (&self.log, self.log_used) {
            let mem = self.translator.memory();
            let used = mem.at_user(self.address.used, 1).map_or(0, |p| p as usize);
            let packed = self.negotiated.packed;
            ring.written_since(old, |ptr, len| {
                // For a split ring the front-end gives the used area's log address; a packed ring is all in memory.
                let gpa = if packed {
                    mem.gpa_of(ptr)
                } else {
                    Some(at.saturating_add((ptr as usize - used) as u64))
                };
                if let Some(gpa) = gpa {
                    log.mark(gpa, len as u64);
                }
            });
        }
        if ring.should_signal() {
            self.signal(counters);
        }
    }

    #[inline(never)]
    fn signal(&mut self, counters: &Counters) {
        if raise(&mut self.call, &self.blocks) {
            counters.signalled();
        }
    }
}

/// Writes to an eventfd of the front-end, unless one of them `blocks`. Returns whether its reader has been woken.
fn raise(event: &mut Option<File>, blocks: &AtomicBool) -> bool {
    let Some(event) = event.as_mut().filter(|_| !blocks.load(Ordering::Relaxed)) else { return false };
    match event.write(&1u64.to_ne_bytes()) {
        // The front-end has made it blocking, and it was full.
        Err(err) if err.kind() == io::ErrorKind::Interrupted => {
            blocks.store(true, Ordering::Relaxed);
            false
        }
        // A full counter has woken the other side already.
        _ => true,
    }
}

pub struct Vring {
    busy: AtomicBool,
    state: UnsafeCell<State>,
    /// Written under the lock; any thread may read.
    pub counters: Counters,
}

// SAFETY: state is only reached through a Guard, of which there is one at a time.
unsafe impl Sync for Vring {}

impl Default for Vring {
    fn default() -> Self {
        Self {
            busy: AtomicBool::new(false),
            state: UnsafeCell::new(State::default()),
            counters: Counters::default(),
        }
    }
}

impl Vring {
    /// Takes the lock if it is free.
    #[inline(always)]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        // A load first keeps the line shared while another thread holds the lock.
        if self.busy.load(Ordering::Relaxed) || self.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(Guard(self))
    }

    /// Takes the lock, after at most a batch's time. For control threads.
    pub fn lock(&self) -> Guard<'_> {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            std::thread::yield_now();
        }
    }
}

/// The right to use a vring's state.
pub struct Guard<'a>(&'a Vring);

impl Guard<'_> {
    /// The vring's counters.
    #[inline(always)]
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// [`State::publish`] with the vring's counters.
    #[inline(always)]
    pub fn publish(&mut self) {
        // SAFETY: this thread holds the lock; counters and state are different fields.
        unsafe { (*self.0.state.get()).publish(&self.0.counters) };
    }
}

impl Deref for Guard<'_> {
    type Target = State;

    #[inline(always)]
    fn deref(&self) -> &State {
        // SAFETY: the guard is the only one.
        unsafe { &*self.0.state.get() }
    }
}

impl DerefMut for Guard<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State {
        // SAFETY: the guard is the only one.
        unsafe { &mut *self.0.state.get() }
    }
}

impl Drop for Guard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}
