// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Polling before sleep. An answer that is on its way comes within a few microseconds, so a thread first spins without giving its processor
//! up. After that it yields between looks: the peer, or a thread of the driver, may be waiting for this processor.

use std::time::{Duration, Instant};

/// Looks without a yield: some 2 µs.
const SPINS: u32 = 64;

/// One wait; see [`Spin::turn`].
pub struct Spin {
    turns: u32,
    since: Option<Instant>,
    limit: Duration,
}

impl Spin {
    /// A wait of about `limit`.
    pub fn new(limit: Duration) -> Spin {
        Spin { turns: 0, since: None, limit }
    }

    /// Spins or yields once, between two looks. `false`: the limit is over, and the caller should sleep.
    pub fn turn(&mut self) -> bool {
        if self.turns < SPINS {
            self.turns += 1;
            std::hint::spin_loop();
            return true;
        }
        std::thread::yield_now();
        self.since.get_or_insert_with(Instant::now).elapsed() < self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_however_short_its_limit_is() {
        let mut spin = Spin::new(Duration::ZERO);
        assert_eq!((0..).take_while(|_| spin.turn()).count(), SPINS as usize);
    }
}
