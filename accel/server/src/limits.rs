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
    /// Share of time beside other clients, 1 to 100.
    pub weight: u32,
}

impl Limits {
    /// How much nicer than its server a worker is: the scheduler gives a thread 1.25 times less for each step.
    pub fn nice(&self) -> i32 {
        let steps = (100.0 / f64::from(self.weight.clamp(1, 100))).ln() / 1.25f64.ln();
        (steps.round() as i32).min(19)
    }

    /// Takes the limits that stand behind an address: `ADDRESS[,NAME=NUMBER…]`; memory and window in MiB. The address, and its limits.
    pub fn split(&self, text: &str) -> Result<(String, Limits), String> {
        let mut words = text.split(',');
        let address = words.next().unwrap_or_default().to_owned();
        let mut limits = self.clone();
        for word in words {
            let wrong = || {
                format!(
                    "{word}: expected memory=MIB, objects=N, rate=N, window=MIB or weight=1…100 behind {address}"
                )
            };
            let (name, number) = word.split_once('=').ok_or_else(wrong)?;
            let number: u32 = number.parse().map_err(|_| wrong())?;
            match name {
                "memory" => limits.memory = u64::from(number) << 20,
                "objects" => limits.objects = number,
                "rate" => limits.rate = number,
                "window" => limits.window = u64::from(number) << 20,
                "weight" if (1..=100).contains(&number) => limits.weight = number,
                _ => return Err(wrong()),
            }
        }
        Ok((address, limits))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 4 << 30, objects: 1 << 16, rate: 0, window: 1 << 30, weight: 100 }
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
    fn limits_behind_an_address_are_that_addresss_own() {
        let all = Limits::default();
        let (address, own) = all.split("unix:/run/a.sock,memory=8,rate=5,weight=25").expect("fine");
        assert_eq!((address.as_str(), own.memory, own.rate), ("unix:/run/a.sock", 8 << 20, 5));
        assert_eq!((own.objects, own.nice(), all.nice()), (all.objects, 6, 0));
        for wrong in ["a,weight=0", "a,weight=101", "a,memory", "a,memory=x", "a,speed=3"] {
            assert!(all.split(wrong).unwrap_err().contains("expected memory="), "{wrong}");
        }
    }

    #[test]
    fn no_rate_means_no_wait() {
        let mut b = Bucket::new(0);
        assert!((0..1000).all(|_| b.take().is_none()));
    }
}
