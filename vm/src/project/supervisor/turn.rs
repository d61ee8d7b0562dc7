// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One request at a time that starts or stops VMs. A wait for one's turn can have a limit, which a mutex's can't.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
pub struct Turns {
    taken: Mutex<bool>,
    freed: Condvar,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a>(&'a Turns);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn. Whoever has it is ended by `down` at the latest.
    pub fn take(&self) -> Turn<'_> {
        let mut taken =
            self.freed.wait_while(self.lock(), |taken| *taken).unwrap_or_else(PoisonError::into_inner);
        *taken = true;
        Turn(self)
    }

    /// Waits at most `limit` for a turn.
    pub fn take_within(&self, limit: Duration) -> Option<Turn<'_>> {
        let waited = self.freed.wait_timeout_while(self.lock(), limit, |taken| *taken);
        let (mut taken, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            return None;
        }
        *taken = true;
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.freed.notify_one();
    }
}
