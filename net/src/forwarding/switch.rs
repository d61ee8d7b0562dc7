// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch: the current [`View`], its workers, and the way in which a change reaches them.
//!
//! A change makes a new view, counts the generation up and wakes the workers, which adopt it between two passes. Nobody
//! waits for that: what a worker still holds of the old view is kept alive by its reference, and what must stop at
//! once (a ring, memory) is stopped under the vring's lock.

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

/// How often it is looked whether all workers have adopted a change.
const SETTLE: Duration = Duration::from_micros(200);

/// What workers and control threads share.
pub struct Switch {
    view: Mutex<Arc<View>>,
    generation: AtomicU64,
    adoptions: AtomicU64,
    /// What each worker has adopted.
    adopted: Vec<AtomicU64>,
    wake: Vec<Event>,
    start: Instant,
    board: Board,
    budget: Budget,
    watch: Watch,
    /// What is known of multicast queriers; outlives all views.
    snooping: Option<Arc<Snooping>>,
}

impl Switch {
    /// A switch without ports for `workers` workers, which together may use `budget` hundredths of a processor (0: all
    /// they can get). With `snoops`, multicast goes where it was asked for.
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

    /// How many workers it is for.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.wake.len()
    }

    /// Nanoseconds since it began.
    #[inline(always)]
    #[must_use]
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// What the workers say of their load.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// What the workers may use.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What frees workers that wait.
    #[must_use]
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// What wakes worker `index`.
    #[must_use]
    pub fn wake(&self, index: usize) -> &Event {
        &self.wake[index]
    }

    /// Counts changes.
    #[inline(always)]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// How often workers have adopted changes.
    #[must_use]
    pub fn adoptions(&self) -> u64 {
        self.adoptions.load(Ordering::Relaxed)
    }

    /// Worker `index` has adopted what there was at `generation`.
    pub(crate) fn note_adoption(&self, index: usize, generation: u64) {
        self.adoptions.fetch_add(1, Ordering::Relaxed);
        self.adopted[index].store(generation, Ordering::Release);
    }

    /// Waits until all workers have adopted what there is now, or `give_up` says so.
    pub fn settle(&self, give_up: impl Fn() -> bool) {
        let now = self.generation();
        while self.adopted.iter().any(|g| g.load(Ordering::Acquire) < now) && !give_up() {
            std::thread::sleep(SETTLE);
        }
    }

    /// The view of this moment.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the workers to look again: a ring was started or stopped, a queue moved.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        for event in &self.wake {
            event.raise();
        }
    }

    /// Replaces the ports by what `edit` makes of them.
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
        // Fewer MACs make no new duplicate.
        let _never = self.edit(|ports| ports.retain(|a| !Arc::ptr_eq(&a.port, port)));
    }
}
