// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of posted commands. No call waits for a posted command's status, so its queue keeps the first error: from then on the queue refuses
//! commands with that code, until a call that the client waits for has returned it. So nothing that follows a failed command looks as
//! if it had succeeded: neither a blocking read, nor an event, nor the data of a read that didn't block.

use super::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Stands for the queue of requests that belong to none, the creation of a buffer say. Its error refuses no command, since whatever uses
/// the object is refused; clFinish tells it, so that a program that only creates hears of it.
pub const NO_QUEUE: u64 = 0;

/// The first error of each queue that has one.
#[derive(Default)]
pub struct Late {
    errors: Mutex<HashMap<u64, i32>>,
    /// The number of queues that have one, to be read without the lock.
    count: AtomicUsize,
}

impl Late {
    /// Keeps the error of a posted command of this queue.
    pub fn note(&self, queue: u64, code: i32) {
        let mut errors = lock(&self.errors);
        errors.entry(queue).or_insert(code);
        self.count.store(errors.len(), Ordering::Release);
    }

    /// Returns whether a wait for this queue has no error to return.
    pub fn is_clean(&self, queue: u64) -> bool {
        self.check(queue, false).is_ok() && self.check(NO_QUEUE, false).is_ok()
    }

    /// The queue's error. It is kept unless the client is `told` it.
    pub fn check(&self, queue: u64, told: bool) -> Result<(), i32> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut errors = lock(&self.errors);
        let code = if told { errors.remove(&queue) } else { errors.get(&queue).copied() };
        self.count.store(errors.len(), Ordering::Release);
        code.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_keeps_its_first_error_until_the_client_is_told() {
        let late = Late::default();
        late.note(7, -5);
        late.note(7, -4);
        assert_eq!(late.check(8, true), Ok(()));
        assert_eq!(late.check(7, false), Err(-5));
        assert_eq!(late.check(7, true), Err(-5));
        assert_eq!(late.check(7, true), Ok(()));
    }
}
