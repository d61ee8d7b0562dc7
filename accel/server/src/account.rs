// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the processes of one VM use together: a page that their workers share, with a place for each. A worker writes only its own, and the
//! server clears the place of one that has ended; so however a worker dies, nothing stays charged. A worker runs its client's kernels, so
//! what stands there may be a lie, by which a VM harms itself and nobody else.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use tombolo_calls::memory::{Mapping, sealed_memfd};
use tombolo_calls::zone::CHANNELS_MAX;

const PLACES: usize = CHANNELS_MAX as usize;
/// The words of one good lie together: whoever charges reads all of them.
const PAGE: usize = 4096;
/// Where the word of the rate stands.
const SPENT_AT: usize = 2 * PLACES * 8;
const _: () = assert!(SPENT_AT + 8 <= PAGE);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Good {
    /// Bytes of device memory.
    Memory,
    /// Objects.
    Objects,
}

/// The page, as the process at one of its places sees it.
pub struct Account {
    page: Mapping,
    place: usize,
}

impl Account {
    /// A fresh page, and the file to pass on.
    pub fn new() -> io::Result<(Account, File)> {
        let file = sealed_memfd(c"tombolo-accel-account", PAGE as u64)?;
        Ok((Account::of(&file, 0)?, file))
    }

    /// The page of a file that [`Account::new`] made, for the worker of a channel.
    pub fn of(file: &File, channel: u32) -> io::Result<Account> {
        Ok(Account { page: Mapping::of_file(file, 0, PAGE)?, place: channel as usize })
    }

    fn word(&self, place: usize, good: Good) -> &AtomicU64 {
        assert!(place < PLACES, "no such place");
        // SAFETY: the word lies in the page, aligned; the mapping lives as long as self; an atomic may be written by others at any time.
        unsafe { AtomicU64::from_ptr(self.page.base().add((good as usize * PLACES + place) * 8).cast()) }
    }

    /// Up to when their requests are spent: see [`crate::limits::Bucket`].
    pub fn spent(&self) -> &AtomicU64 {
        // SAFETY: as in word(): in the page, aligned.
        unsafe { AtomicU64::from_ptr(self.page.base().add(SPENT_AT).cast()) }
    }

    /// What all use together.
    pub fn sum(&self, good: Good) -> u64 {
        let used = |place| self.word(place, good).load(Ordering::SeqCst);
        (0..PLACES).map(used).fold(0, u64::saturating_add)
    }

    /// Charges the own place, if all together then use no more than `limit`; else what they use. Of two that ask at the same moment
    /// for what is left, at most one gets it.
    pub fn charge(&self, good: Good, n: u64, limit: u64) -> Result<(), u64> {
        let own = self.word(self.place, good);
        own.fetch_add(n, Ordering::SeqCst);
        let sum = self.sum(good);
        if sum <= limit {
            return Ok(());
        }
        own.fetch_sub(n, Ordering::SeqCst);
        Err(sum.saturating_sub(n))
    }

    /// Gives back.
    pub fn give_back(&self, good: Good, n: u64) {
        self.word(self.place, good).fetch_sub(n, Ordering::SeqCst);
    }

    /// The worker of a channel has ended.
    pub fn clear(&self, channel: u32) {
        for good in [Good::Memory, Good::Objects] {
            self.word(channel as usize, good).store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_has_the_others_can_not_have_until_it_gives_it_back_or_ends() {
        let (server, file) = Account::new().expect("a page");
        let [a, b] = [3, 63].map(|channel| Account::of(&file, channel).expect("the same page"));
        assert_eq!(a.charge(Good::Memory, 60, 100), Ok(()));
        assert_eq!(b.charge(Good::Memory, 50, 100), Err(60));
        assert_eq!(b.charge(Good::Memory, 40, 100), Ok(()));
        assert_eq!(b.charge(Good::Objects, 1, 1), Ok(()), "counted by itself");
        a.give_back(Good::Memory, 30);
        assert_eq!(b.charge(Good::Memory, 30, 100), Ok(()));
        server.clear(63);
        assert_eq!((server.sum(Good::Memory), server.sum(Good::Objects)), (30, 0));
    }

    #[test]
    fn of_two_that_ask_for_the_last_at_the_same_moment_not_both_get_it() {
        let (_server, file) = Account::new().expect("a page");
        let both = [0, 1].map(|channel| Account::of(&file, channel).expect("the same page"));
        let together = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for account in &both {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        if account.charge(Good::Objects, 1, 1).is_ok() {
                            assert_eq!(together.fetch_add(1, Ordering::SeqCst), 0);
                            together.fetch_sub(1, Ordering::SeqCst);
                            account.give_back(Good::Objects, 1);
                        }
                    }
                });
            }
        });
    }
}
