// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that waits for one reply at a time.
//!
//! Programs make calls from the destructors of their static objects, when this thread's own storage is gone already. So what is kept per
//! thread is only to be fast: without it, a call makes its own; and nothing here needs the thread's handle.

use std::cell::RefCell;
use std::sync::atomic::{AtomicI32, AtomicU32};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// One reply, and the thread that sleeps until it comes.
#[derive(Default)]
pub(crate) struct Waiter {
    /// 0: not yet; 1: the reply is there; 2: it won't come.
    pub done: AtomicU32,
    pub status: AtomicI32,
    pub body: Mutex<Vec<u8>>,
    woken: Mutex<bool>,
    changed: Condvar,
}

thread_local! {
    static WAITER: Arc<Waiter> = Arc::default();
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Waiter {
    /// This thread's.
    pub fn own() -> Arc<Waiter> {
        WAITER.try_with(Arc::clone).unwrap_or_default()
    }

    /// Returns whether it is surely this thread's.
    pub fn is_own(self: &Arc<Self>) -> bool {
        WAITER.try_with(|own| Arc::ptr_eq(own, self)).unwrap_or(false)
    }

    /// Sleeps until woken, or not at all when that was before.
    pub fn park(&self) {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(woken, |woken| !*woken);
        *waited.unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Wakes the thread.
    pub fn unpark(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

/// Lends a buffer, empty, that usually has room already.
pub(crate) fn with_scratch<T>(mut use_it: impl FnMut(&mut Vec<u8>) -> T) -> T {
    let kept = SCRATCH.try_with(|scratch| {
        let mut bytes = scratch.take();
        bytes.clear();
        let result = use_it(&mut bytes);
        scratch.replace(bytes);
        result
    });
    kept.unwrap_or_else(|_| use_it(&mut Vec::new()))
}
