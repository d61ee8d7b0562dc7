// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A try-lock with a contended flag. A thread that fails to take the lock can set the flag; unlocking tells whether the flag was set.
//!
//! Several threads of a server share one ring, and a doorbell wakes any one of them. If the woken thread finds the ring locked by another
//! thread it sleeps again, and the wake-up is used up; but the lock's owner may have looked at the ring for the last time just before.
//! With the flag the owner learns of the wake-up when it unlocks, and looks again. Locking, setting the flag and unlocking are steps
//! of one atomic word; the model in `tests/ring_model.rs` tries all orders.

#[cfg(loom)]
use loom::sync::atomic::AtomicU32;
use std::ops::{Deref, DerefMut};
#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

const FREE: u32 = 0;
const LOCKED: u32 = 1;
/// Locked, and another thread has set the flag.
const CONTENDED: u32 = 2;

/// A value that one thread at a time may use.
pub struct TryLock<T> {
    state: AtomicU32,
    /// Never contended: only the thread that moved `state` from `FREE` locks it.
    value: Mutex<T>,
}

/// The locked value. Dropping it unlocks.
pub struct Guard<'l, T> {
    lock: &'l TryLock<T>,
    value: Option<MutexGuard<'l, T>>,
}

impl<T> TryLock<T> {
    /// An unlocked value.
    pub fn new(value: T) -> Self {
        TryLock { state: AtomicU32::new(FREE), value: Mutex::new(value) }
    }

    /// Locks, unless another thread holds the lock.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let locked = self.state.compare_exchange(FREE, LOCKED, Ordering::Acquire, Ordering::Relaxed);
        locked.is_ok().then(|| self.guard())
    }

    /// Locks, or sets the contended flag: then the lock's owner learns of it from [`Guard::unlock`].
    pub fn try_lock_or_flag(&self) -> Option<Guard<'_, T>> {
        loop {
            if let Some(guard) = self.try_lock() {
                return Some(guard);
            }
            let flagged =
                self.state.compare_exchange(LOCKED, CONTENDED, Ordering::Release, Ordering::Relaxed);
            if flagged.is_ok() || flagged == Err(CONTENDED) {
                return None;
            }
        }
    }

    fn guard(&self) -> Guard<'_, T> {
        // A thread that panicked with the lock left a whole value: nothing here calls out in the middle of a change.
        Guard { lock: self, value: Some(self.value.lock().unwrap_or_else(|e| e.into_inner())) }
    }
}

impl<T> Guard<'_, T> {
    /// Unlocks. `true`: another thread failed to lock meanwhile; the caller must look (again) for what woke that thread.
    #[must_use]
    pub fn unlock(mut self) -> bool {
        self.release()
    }

    fn release(&mut self) -> bool {
        self.value.take().is_some() && self.lock.state.swap(FREE, Ordering::AcqRel) == CONTENDED
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("locked until it is released")
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("locked until it is released")
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // The owner failed or panicked: the code that handles that wakes every thread.
        let _contended = self.release();
    }
}
