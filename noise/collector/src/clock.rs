// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The frequency of the time-stamp counter, by the kernel's monotonic clock.

use std::time::Instant;

use crate::quanta;

/// Pairs of readings of which the tightest is taken. On a busy machine, or in a guest that its host interrupts, some milliseconds lie between the
/// two readings of a pair.
const PAIRS: u32 = 64;

/// The same moment by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    ticks: u64,
    time: Instant,
}

impl Moment {
    pub fn now() -> Self {
        let pair = |_| {
            let before = quanta::now();
            let time = Instant::now();
            let apart = quanta::now().saturating_sub(before);
            (apart, Self { ticks: before + apart / 2, time })
        };
        let (_, tightest) =
            (1..PAIRS).map(pair).fold(pair(0), |best, next| if next.0 < best.0 { next } else { best });
        tightest
    }

    /// Ticks per second between this moment and a later one; 0 where no time has passed.
    pub fn frequency(self, later: Self) -> u64 {
        let nanoseconds = later.time.saturating_duration_since(self.time).as_nanos();
        let ticks = u128::from(later.ticks.saturating_sub(self.ticks));
        u64::try_from((ticks * 1_000_000_000).checked_div(nanoseconds).unwrap_or(0)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_frequency_is_that_between_two_moments() {
        let first = Moment { ticks: 1000, time: Instant::now() };
        let later = |ticks, ms| Moment { ticks, time: first.time + Duration::from_millis(ms) };
        assert_eq!(first.frequency(later(1000 + 50_000_000, 25)), 2_000_000_000);
        assert_eq!(first.frequency(later(5000, 0)), 0);
        assert_eq!(later(500, 1).frequency(first), 0);
    }

    #[test]
    fn moments_follow_each_other() {
        let (first, second) = (Moment::now(), Moment::now());
        assert!(first.ticks < second.ticks && first.time < second.time);
    }
}
