// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch: the current [`View`], its workers, and the propagation of changes to them.
//!
//! A change makes a new view, increments the generation and wakes the workers, which adopt it between two passes. No
//! thread waits for that: a worker's reference keeps the old view alive, and a ring or memory that must stop at once is
//! stopped under the vring's lock.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::event::Event;
use crate::forwarding::balance::{Board, Budget};
use crate::forwarding::multicast::Snooping;
use crate::forwarding::table::Duplicate;
use crate::forwarding::view::{Attached, View};
use crate::forwarding::watch::Watch;
use crate::ports::port::Port;

/// Interval of the checks whether all workers have adopted a change.
const SETTLE: Duration = Duration::from_micros(200);

/// The state that workers and control threads share.
pub struct Switch {
    view: Mutex<Arc<View>>,
    generation: AtomicU64,
    adoptions: AtomicU64,
    /// The generation that each worker has adopted.
    adopted: Vec<AtomicU64>,
    wake: Vec<Event>,
    start: Instant,
    board: Board,
    budget: Budget,
    watch: Watch,
    /// The multicast queriers heard; outlives all views.
    snooping: Option<Arc<Snooping>>,
}

impl Switch {
    /// Makes a switch without ports for `workers` workers, which together may use `budget` hundredths of a processor
    /// (0: no limit). With `snoops`, multicast goes to the ports that joined.
    ///
    /// # Errors
    /// No event descriptors are left.
    pub fn new(workers: usize, budget: u32, snoops: bool) -> io::Result<Self> {
        Ok(Self {
            start: Instant::now(),
            snooping: snoops.then(Arc::default),
            board: Board::new(workers.max(1)),
            budget: Budget::new(budget.into()),
            watch: Watch::new(workers.max(1)),
            view: Mutex::default(),
            generation: AtomicU64::new(1),
            adoptions: AtomicU64::new(0),
            adopted: (0..workers.max(1)).map(|_| AtomicU64::new(0)).collect(),
            wake: (0..workers.max(1)).map(|_| Event::new()).collect::<io::Result<_>>()?,
        })
    }

    /// Returns the number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.wake.len()
    }

    /// Returns the nanoseconds since it began.
    #[inline(always)]
    #[must_use]
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Returns the workers' reports of their load.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Returns the workers' budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the watch that frees blocked workers.
    #[must_use]
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Returns the event that wakes worker `index`.
    #[must_use]
    pub fn wake(&self, index: usize) -> &Event {
        &self.wake[index]
    }

    /// Returns the number of changes.
    #[inline(always)]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns how often workers have adopted changes.
    #[must_use]
    pub fn adoptions(&self) -> u64 {
        self.adoptions.load(Ordering::Relaxed)
    }

    /// Records that worker `index` has adopted the state of `generation`.
    pub(crate) fn note_adoption(&self, index: usize, generation: u64) {
        self.adoptions.fetch_add(1, Ordering::Relaxed);
        self.adopted[index].store(generation, Ordering::Release);
    }

    /// Waits until all workers have adopted the present state, or `give_up` returns true.
    pub fn settle(&self, give_up: impl Fn() -> bool) {
        let now = self.generation();
        while self.adopted.iter().any(|g| g.load(Ordering::Acquire) < now) && !give_up() {
            std::thread::sleep(SETTLE);
        }
    }

    /// Returns the current view.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the workers to adopt a change: a ring was started or stopped, a queue moved.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        for event in &self.wake {
            event.raise();
        }
    }

    /// Replaces the ports by the result of `edit`.
    ///
    /// # Errors
    /// Two ports own the same MAC; nothing is changed then.
    pub fn edit(&self, edit: impl FnOnce(&mut Vec<Attached>)) -> Result<(), Duplicate> {
        {
            let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            let mut ports = view.ports().to_vec();
            edit(&mut ports);
            *view = Arc::new(View::new(ports)?.snooping(self.snooping.clone()));
        }
        self.changed();
        Ok(())
    }

    /// Adds a port.
    ///
    /// # Errors
    /// It has a MAC that another port has.
    pub fn attach(&self, attached: Attached) -> Result<(), Duplicate> {
        self.edit(|ports| {
            for queue in 0..attached.port.pairs() {
                attached.port.set_home(queue, (ports.len() + queue) % self.workers());
            }
            ports.push(attached);
        })
    }

    /// Removes a port.
    pub fn detach(&self, port: &Arc<Port>) {
        // Without this port there is no new duplicate.
        let _never = self.edit(|ports| ports.retain(|a| !Arc::ptr_eq(&a.port, port)));
    }
}
