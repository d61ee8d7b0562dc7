// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a client may use, and how requests are slowed down to a rate.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Limits of one client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of device memory.
    pub memory: u64,
    /// Objects of all kinds.
    pub objects: u32,
    /// Requests a second; 0: no limit.
    pub rate: u32,
    /// Bytes of the window.
    pub window: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 4 << 30, objects: 1 << 16, rate: 0, window: 1 << 30 }
    }
}

/// A bucket of requests that fills at a rate and holds a tenth of a second's worth.
pub struct Bucket {
    rate: u32,
    tokens: f64,
    last: Instant,
}

impl Bucket {
    /// A full bucket; rate 0 never empties.
    pub fn new(rate: u32) -> Bucket {
        Bucket { rate, tokens: f64::from(rate) / 10.0, last: Instant::now() }
    }

    /// Takes one request out; how long the client has to wait for it.
    pub fn take(&mut self) -> Option<Duration> {
        if self.rate == 0 {
            return None;
        }
        self.take_at(Instant::now())
    }

    fn take_at(&mut self, now: Instant) -> Option<Duration> {
        let rate = f64::from(self.rate);
        let earned = now.saturating_duration_since(self.last).as_secs_f64() * rate;
        self.tokens = (self.tokens + earned).min((rate / 10.0).max(1.0));
        self.last = now;
        self.tokens -= 1.0;
        (self.tokens < 0.0).then(|| Duration::from_secs_f64(-self.tokens / rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_rate_wait_for_their_turn() {
        let mut b = Bucket::new(100);
        let start = Instant::now();
        let burst = (0..10).filter(|_| b.take_at(start).is_none()).count();
        assert_eq!(burst, 10);
        let wait = b.take_at(start).expect("the burst is used up");
        assert!(wait > Duration::from_millis(9) && wait < Duration::from_millis(11), "{wait:?}");
        assert_eq!(b.take_at(start + Duration::from_millis(50)), None);
    }

    #[test]
    fn no_rate_means_no_wait() {
        let mut b = Bucket::new(0);
        assert!((0..1000).all(|_| b.take().is_none()));
    }
}
