// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a side waits before it sleeps. An answer that is on its way comes within a few microseconds, so at first the processor is kept;
//! after that it is offered to whoever wants it: the peer, or a thread of the driver, may be waiting for this very one.

use std::time::{Duration, Instant};

/// Looks for which the processor is kept: some 2 µs.
const KEPT: u32 = 64;

/// One wait; see [`Patience::turn`].
pub struct Patience {
    turns: u32,
    since: Option<Instant>,
    limit: Duration,
}

impl Patience {
    /// Waits for about `limit`.
    pub fn new(limit: Duration) -> Patience {
        Patience { turns: 0, since: None, limit }
    }

    /// Lets a moment pass. `false`: it is time to sleep.
    pub fn turn(&mut self) -> bool {
        if self.turns < KEPT {
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
    fn patience_ends_however_short_it_is() {
        let mut patience = Patience::new(Duration::ZERO);
        assert_eq!((0..).take_while(|_| patience.turn()).count(), KEPT as usize);
    }
}
