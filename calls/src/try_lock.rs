// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What several threads may use, one at a time, none of them waiting: who finds it taken leaves word, and who gives it back learns
//! of it.
//!
//! A doorbell wakes some thread; if that thread finds the ring in another's hands it sleeps again, and the wake-up has been used
//! up. The other may have looked at the ring for the last time just before. So the two must not miss each other: taking, leaving
//! word and giving back are steps of one atomic word (the model in `tests/ring_model.rs` tries all orders).

#[cfg(loom)]
use loom::sync::atomic::AtomicU32;
use std::ops::{Deref, DerefMut};
#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and another thread came in vain.
const CALLED: u32 = 2;

/// A value that one thread at a time leads.
pub struct Lead<T> {
    state: AtomicU32,
    /// Never contended: only who took `state` locks it.
    value: Mutex<T>,
}

/// The lead, until it is given back.
pub struct Leading<'l, T> {
    lead: &'l Lead<T>,
    value: Option<MutexGuard<'l, T>>,
}

impl<T> Lead<T> {
    /// A value that nobody leads yet.
    pub fn new(value: T) -> Self {
        Lead { state: AtomicU32::new(FREE), value: Mutex::new(value) }
    }

    /// Takes the lead. None: another thread has it.
    pub fn try_take(&self) -> Option<Leading<'_, T>> {
        let taken = self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| self.locked())
    }

    /// Takes the lead. None: another thread has it, and learns from [`Leading::give`] that it was called.
    pub fn take_or_call(&self) -> Option<Leading<'_, T>> {
        loop {
            if let Some(leading) = self.try_take() {
                return Some(leading);
            }
            let called = self.state.compare_exchange(TAKEN, CALLED, Ordering::Release, Ordering::Relaxed);
            if called.is_ok() || called == Err(CALLED) {
                return None;
            }
        }
    }

    fn locked(&self) -> Leading<'_, T> {
        // A thread that panicked while it led left a whole value: nothing here calls out in the middle of a change.
        Leading { lead: self, value: Some(self.value.lock().unwrap_or_else(|e| e.into_inner())) }
    }
}

impl<T> Leading<'_, T> {
    /// Gives the lead back. `true`: another thread came in vain meanwhile; whatever called it must be looked at (again).
    #[must_use]
    pub fn give(mut self) -> bool {
        self.give_back()
    }

    fn give_back(&mut self) -> bool {
        self.value.take().is_some() && self.lead.state.swap(FREE, Ordering::AcqRel) == CALLED
    }
}

impl<T> Deref for Leading<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("until it is given back")
    }
}

impl<T> DerefMut for Leading<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("until it is given back")
    }
}

impl<T> Drop for Leading<'_, T> {
    fn drop(&mut self) {
        // An error or a panic: whoever deals with it wakes everybody.
        let _called = self.give_back();
    }
}
