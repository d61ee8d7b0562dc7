// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The account of one VM's processes: a file of shared memory with a page for each. A worker can write to its own page and read the others',
//! and the server clears the page of one that has ended; so however a worker dies, nothing stays charged. A worker runs its client's kernels, so its page may
//! lie: that its process has everything, or nothing. The first it could have had without a lie. The control group of the VM
//! ([`crate::wall::cgroup`]) limits what the second hides.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use tombolo_calls::memory::{Mapping, PAGE, sealed_memfd};

/// The things that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Good {
    /// Bytes of device memory.
    Memory,
    Objects,
}

/// The word of a page that tells up to when requests are spent: see [`crate::limits::Bucket`].
const SPENT: usize = 2;

/// The file, for the server: to pass on.
pub struct Files {
    write: File,
    read: File,
}

impl Files {
    /// The descriptors that the worker of a channel gets, for [`Account::of`].
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.write.as_fd(), self.read.as_fd()]
    }
}

/// The pages, as the process sees them that has one of them.
pub struct Account {
    all: Mapping,
    /// The own page once more, to write to; none: all of them may be written to.
    own: Option<Mapping>,
    place: usize,
}

impl Account {
    /// Fresh pages for so many processes, all of which the server may write to.
    pub fn new(processes: u32) -> io::Result<(Account, Files)> {
        let len = processes as usize * PAGE;
        let write = sealed_memfd(c"tombolo-accel-account", len as u64)?;
        // Opened for reading only: what is mapped of it can't be made writable.
        let read = File::open(format!("/proc/self/fd/{}", write.as_raw_fd()))?;
        let all = Mapping::of_file(&write, 0, len)?;
        Ok((Account { all, own: None, place: 0 }, Files { write, read }))
    }

    /// The pages of [`Files::fds`], for the worker of a channel. It closes the files before it reads what its client sends.
    pub fn of([write, read]: [&File; 2], channel: u32) -> io::Result<Account> {
        let (len, place) = (read.metadata()?.len() as usize, channel as usize);
        let own = Mapping::of_file(write, (place * PAGE) as u64, PAGE)?;
        Ok(Account { all: Mapping::to_read(read, len)?, own: Some(own), place })
    }

    fn places(&self) -> usize {
        self.all.len() / PAGE
    }

    fn word(&self, place: usize, word: usize) -> &AtomicU64 {
        assert!(place < self.places() && word <= SPENT, "no such place");
        let base = match &self.own {
            Some(own) if place == self.place => own.base(),
            // SAFETY: inside the mapping, as checked just now. Of others' pages a worker only reads.
            _ => unsafe { self.all.base().add(place * PAGE) },
        };
        // SAFETY: the word lies in the page, aligned; the mapping lives as long as self; an atomic may be written by others at any time.
        unsafe { AtomicU64::from_ptr(base.cast::<u64>().add(word)) }
    }

    /// Up to when this process's requests are spent.
    pub fn spent(&self) -> &AtomicU64 {
        self.word(self.place, SPENT)
    }

    /// The number of processes that have spent requests since `earliest`, this one among them.
    pub fn active(&self, earliest: u64) -> u64 {
        let others = (0..self.places()).filter(|place| *place != self.place);
        1 + others.filter(|place| self.word(*place, SPENT).load(Ordering::Relaxed) > earliest).count() as u64
    }

    /// The sum over all processes.
    pub fn sum(&self, good: Good) -> u64 {
        let used = |place| self.word(place, good as usize).load(Ordering::SeqCst);
        (0..self.places()).map(used).fold(0, u64::saturating_add)
    }

    /// Charges the own place, if all together then use no more than `limit`; else what they use. Of two that ask at the same moment
    /// for what is left, at most one gets it.
    pub fn charge(&self, good: Good, n: u64, limit: u64) -> Result<(), u64> {
        let own = self.word(self.place, good as usize);
        own.fetch_add(n, Ordering::SeqCst);
        let sum = self.sum(good);
        if sum <= limit {
            return Ok(());
        }
        own.fetch_sub(n, Ordering::SeqCst);
        Err(sum.saturating_sub(n))
    }

    pub fn give_back(&self, good: Good, n: u64) {
        self.word(self.place, good as usize).fetch_sub(n, Ordering::SeqCst);
    }

    /// The worker of a channel has ended.
    pub fn clear(&self, channel: u32) {
        for word in 0..=SPENT {
            self.word(channel as usize, word).store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &Files, channel: u32) -> Account {
        Account::of([&files.write, &files.read], channel).expect("the same pages")
    }

    #[test]
    fn a_worker_cannot_make_the_pages_of_others_writable() {
        let (_server, files) = Account::new(2).expect("pages");
        let worker = of(&files, 1);
        let protect = |at: &Mapping, len| {
            // SAFETY: a mapping of this test's; it may become writable.
            unsafe { libc::mprotect(at.base().cast(), len, libc::PROT_READ | libc::PROT_WRITE) }
        };
        assert_eq!(protect(&worker.all, 2 * PAGE), -1);
        assert_eq!(protect(worker.own.as_ref().expect("its own"), PAGE), 0);
    }

    #[test]
    fn what_one_has_the_others_can_not_have_until_it_gives_it_back_or_ends() {
        let (server, files) = Account::new(64).expect("pages");
        let [a, b] = [3, 63].map(|channel| of(&files, channel));
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
        let (_server, files) = Account::new(2).expect("pages");
        let both = [0, 1].map(|channel| of(&files, channel));
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
