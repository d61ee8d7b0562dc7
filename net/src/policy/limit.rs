// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limits: how many bytes and packets a port may send per second, with a burst. Generic cell rate algorithm: one
//! number per limit, the time at which the port will have paid for its frames.

use std::sync::atomic::{AtomicU64, Ordering};

pub use tombolo_control::net::config::Rate;

/// The burst after a rest, as time: 50 ms worth of the rate.
const BURST_NS: u64 = 50_000_000;
const SECOND: u64 = 1_000_000_000;

/// A port's use of its limits.
#[derive(Debug, Default)]
pub struct Limiter {
    bytes: AtomicU64,
    packets: AtomicU64,
}

fn cost(amount: u64, rate: u64) -> u64 {
    u64::try_from(u128::from(amount) * u128::from(SECOND) / u128::from(rate)).unwrap_or(u64::MAX / 4)
}

impl Limiter {
    /// Returns whether a frame of `bytes` may be sent at `now` (nanoseconds); if so, it is paid for.
    pub fn admit(&self, rate: &Rate, bytes: u64, now: u64) -> bool {
        let open = self.is_open(rate, now);
        if open {
            self.pay(rate, bytes, now);
        }
        open
    }

    /// Returns whether a frame may be sent at `now`.
    pub fn is_open(&self, rate: &Rate, now: u64) -> bool {
        let open = |paid: &AtomicU64, rate| {
            rate == 0 || paid.load(Ordering::Relaxed) <= now.saturating_add(BURST_NS)
        };
        open(&self.bytes, rate.bytes) && open(&self.packets, rate.packets)
    }

    /// Pays for a frame of `bytes`.
    pub fn pay(&self, rate: &Rate, bytes: u64, now: u64) {
        for (paid, rate, amount) in [(&self.bytes, rate.bytes, bytes), (&self.packets, rate.packets, 1)] {
            if rate != 0 {
                paid.fetch_max(now, Ordering::Relaxed);
                paid.fetch_add(cost(amount, rate), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_ten_seconds_a_port_sends_what_it_may_and_a_burst() {
        let limiter = Limiter::default();
        let rate = Rate { bytes: 1_000_000, packets: 0 };
        let mut sent = 0;
        for now in (0..10 * SECOND).step_by(100_000) {
            if limiter.admit(&rate, 1000, now) {
                sent += 1000;
            }
        }
        assert!((10_000_000..=10_052_000).contains(&sent), "{sent}");
    }

    #[test]
    fn packets_are_limited_whatever_their_size_and_no_limit_is_none() {
        let limiter = Limiter::default();
        let rate = Rate { bytes: 0, packets: 1000 };
        let sent = (0..SECOND).step_by(10_000).filter(|now| limiter.admit(&rate, 1, *now)).count();
        assert!((1000..=1052).contains(&sent), "{sent}");
        assert!((0..100_000).all(|_| limiter.admit(&Rate::default(), 1 << 40, 0)));
    }

    #[test]
    fn a_rest_saves_up_no_more_than_a_burst() {
        let limiter = Limiter::default();
        let rate = Rate { bytes: 0, packets: 1000 };
        let now = 100 * SECOND;
        assert_eq!((0..1000).filter(|_| limiter.admit(&rate, 1, now)).count(), 51);
    }
}
