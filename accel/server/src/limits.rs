// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The limits of a client, and the bucket that slows its requests down to a rate.

use crate::account::Account;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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
    /// The niceness of a worker above its server's: the scheduler gives a thread 1.25 times less for each step.
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

/// A bucket of requests that fills at a rate and holds a tenth of a second's worth (the generic cell rate algorithm: one word tells up to when
/// requests are spent). A VM's rate is divided equally between those of its processes that send requests.
pub struct Bucket {
    rate: u32,
    /// Nanoseconds of the monotonic clock, up to which requests are spent.
    spent: Spent,
}

enum Spent {
    Alone(AtomicU64),
    OfVm(Arc<Account>),
}

/// A process of a VM that has sent nothing for so long has no share of its VM's rate.
const ACTIVE: u64 = 1_000_000_000;

impl Bucket {
    /// A full bucket; rate 0 never empties.
    pub fn new(rate: u32, account: Option<Arc<Account>>) -> Bucket {
        let spent = account.map_or_else(|| Spent::Alone(AtomicU64::new(0)), Spent::OfVm);
        Bucket { rate, spent }
    }

    /// Takes one request out; how long the client has to wait for it.
    pub fn take(&self) -> Option<Duration> {
        if self.rate == 0 {
            return None;
        }
        self.take_at(monotonic())
    }

    fn take_at(&self, now: u64) -> Option<Duration> {
        let (word, sharing) = match &self.spent {
            Spent::Alone(word) => (word, 1),
            Spent::OfVm(account) => (account.spent(), account.active(now.saturating_sub(ACTIVE))),
        };
        let each = 1_000_000_000 / u64::from(self.rate) * sharing;
        let earliest = now.saturating_sub(100_000_000.max(each));
        let after = |spent: u64| spent.max(earliest) + each;
        let before = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |spent| Some(after(spent)));
        let wait = after(before.unwrap_or(now)).saturating_sub(now);
        (wait > 0).then(|| Duration::from_nanos(wait))
    }
}

/// The clock that all processes of this machine share.
fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the value lives during the call, which can't fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_rate_wait_for_their_turn() {
        let b = Bucket::new(100, None);
        let start = monotonic();
        let burst = (0..10).filter(|_| b.take_at(start).is_none()).count();
        assert_eq!(burst, 10);
        let wait = b.take_at(start).expect("the burst is used up");
        assert!(wait > Duration::from_millis(9) && wait < Duration::from_millis(11), "{wait:?}");
        assert_eq!(b.take_at(start + 50_000_000), None);
    }

    #[test]
    fn processes_of_a_vm_share_its_rate_and_none_can_take_more_of_it_from_another_than_its_share() {
        let (server, files) = Account::new(3).expect("pages");
        let account = |channel| {
            let copies = files.fds().map(|fd| std::fs::File::from(fd.try_clone_to_owned().expect("a copy")));
            Arc::new(Account::of([&copies[0], &copies[1]], channel).expect("the same pages"))
        };
        let accounts = [0, 1].map(account);
        let [a, b] = [0, 1].map(|i: usize| Bucket::new(100, Some(accounts[i].clone())));
        let start = monotonic();
        let burst = (0..10).filter(|_| a.take_at(start).is_none()).count();
        assert_eq!(burst, 10, "alone, it has the whole rate");
        let rate = |bucket: &Bucket, begin: u64| {
            let at = |i: u64| begin + i * 1_000_000;
            (0..1000).fold((0, 0), |(sent, free), i| match at(i) < free {
                true => (sent, free),
                false => (sent + 1, at(i) + bucket.take_at(at(i)).map_or(0, |wait| wait.as_nanos() as u64)),
            })
        };
        // In a second, half of the rate and what the bucket holds.
        let (of_b, _) = rate(&b, start);
        assert!((50..=57).contains(&of_b), "{of_b}");
        // The worker may have written anything there.
        accounts[0].spent().store(u64::MAX, Ordering::Relaxed);
        let later = start + 10_000_000_000;
        let (of_b, _) = rate(&b, later);
        assert!((50..=57).contains(&of_b), "{of_b}");
        server.clear(0);
        let (of_b, _) = rate(&b, later + 10_000_000_000);
        assert!((100..=112).contains(&of_b), "{of_b}");
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
        let b = Bucket::new(0, None);
        assert!((0..1000).all(|_| b.take().is_none()));
    }
}
