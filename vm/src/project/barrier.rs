// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Barriers around work that an upgrade of this process must not interrupt. A thread enters a barrier for the time of such work. A closed
//! barrier has no thread inside, and a thread that enters waits until it is open.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests of commands, from accept to answer.
pub static REQUESTS: Barrier = Barrier::new();
/// Work of the supervisor that no command asked for: it hears monitors and consoles, tends zones, notes the end of a process. A thread
/// inside waits for nothing that takes long, and for no other thread that enters.
pub static BACKGROUND: Barrier = Barrier::new();

/// A barrier; see the module.
#[derive(Debug)]
pub struct Barrier {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    closed: bool,
    /// The activities inside, in words.
    inside: BTreeMap<u64, String>,
    entered: u64,
}

/// A thread's stay inside, until this is dropped.
#[derive(Debug)]
pub struct Inside {
    barrier: &'static Barrier,
    number: u64,
}

/// A barrier that is closed until this is dropped.
#[derive(Debug)]
pub struct Closed(&'static Barrier);

impl Barrier {
    const fn new() -> Barrier {
        let state = State { closed: false, inside: BTreeMap::new(), entered: 0 };
        Barrier { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the barrier is open, and enters. `what` names the work, for a thread that waits for its end.
    pub fn enter(&'static self, what: &str) -> Inside {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state| state.closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.entered += 1;
        let number = state.entered;
        state.inside.insert(number, what.to_owned());
        Inside { barrier: self, number }
    }

    /// The activities inside, in words.
    pub fn inside(&self) -> Vec<String> {
        self.lock().inside.values().cloned().collect()
    }

    /// Closes the barrier and waits until no thread is inside.
    ///
    /// # Errors
    /// A thread is still inside at the limit. Names its activity; the barrier is open again.
    pub fn close(&'static self, limit: Duration) -> Result<Closed, Vec<String>> {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state| state.closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        let waited = self.changed.wait_timeout_while(state, limit, |state| !state.inside.is_empty());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let inside: Vec<String> = state.inside.values().cloned().collect();
        drop(state);
        let closed = Closed(self);
        if inside.is_empty() { Ok(closed) } else { Err(inside) }
    }
}

impl Inside {
    /// Says more about what is done.
    pub fn rename(&self, what: String) {
        self.barrier.lock().inside.insert(self.number, what);
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.barrier.lock().inside.remove(&self.number);
        self.barrier.changed.notify_all();
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.lock().closed = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_that_somebody_does_not_leave_is_open_again_and_says_what_is_done() {
        static BARRIER: Barrier = Barrier::new();
        let inside = BARRIER.enter("exec");
        inside.rename("exec in 'a'".into());
        assert_eq!(BARRIER.close(Duration::from_millis(1)).unwrap_err(), ["exec in 'a'"]);
        drop(BARRIER.enter("ps"));
        drop(inside);
        BARRIER.close(Duration::ZERO).unwrap();
    }

    #[test]
    fn whoever_comes_to_a_closed_barrier_waits_until_it_is_open() {
        static BARRIER: Barrier = Barrier::new();
        let closed = BARRIER.close(Duration::ZERO).unwrap();
        let (sender, entered) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || sender.send(BARRIER.enter("late")).unwrap());
            assert!(entered.recv_timeout(Duration::from_millis(50)).is_err());
            drop(closed);
            drop(entered.recv().unwrap());
        });
        BARRIER.close(Duration::ZERO).unwrap();
    }
}
