// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Assigns queues to workers: queues move from a worker that is busy most of its time to one that has time left, and
//! all workers together keep to a budget of processor time.
//!
//! There is no thread for that, and no work while nothing is sent. A busy worker measures its own time every
//! [`PERIOD`], reports it on the [`Board`], and gives one of its queues away if that lowers the load of the busier of
//! the two. One worker at a time carries a queue, so frames of a queue stay in order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Interval at which a worker reports the cost of its queues (nanoseconds).
pub const PERIOD: u64 = 100_000_000;
/// The whole of a worker's time, in the board's units.
pub const WHOLE: u64 = 1000;
/// A worker with less load than this keeps its queues.
const BUSY: u64 = WHOLE / 2;

/// A worker's report.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    at: u64,
    load: u64,
}

/// The reports of all workers.
#[derive(Debug)]
pub struct Board(Mutex<Vec<Said>>);

impl Board {
    /// Makes a board for so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self(Mutex::new(vec![Said::default(); workers]))
    }

    /// Returns each worker's load at `now`, in parts of [`WHOLE`]; without a recent report it is 0.
    #[must_use]
    pub fn loads(&self, now: u64) -> Vec<u64> {
        let board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.iter().map(|s| if now.saturating_sub(s.at) > 3 * PERIOD { 0 } else { s.load }).collect()
    }

    /// Reports that worker `own` spent so much of its time (parts of [`WHOLE`]) on each of its queues. Returns a queue
    /// to move and its new worker, if one should move.
    pub fn report(&self, own: usize, now: u64, queues: &[u64]) -> Option<(usize, usize)> {
        let mut loads = self.loads(now);
        loads[own] = queues.iter().sum();
        let moved = choose(own, queues, &loads);
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board[own] = Said { at: now, load: loads[own] };
        if let Some((queue, to)) = moved {
            // Counted at once, so that no other worker takes it for idle before its own report.
            board[to] = Said { at: now, load: loads[to] + queues[queue] };
            board[own].load -= queues[queue];
        }
        moved
    }
}

/// Returns the queue whose move to the least loaded worker leaves the busier of the two least busy, if that is less by
/// an eighth than worker `own`'s load now.
fn choose(own: usize, queues: &[u64], loads: &[u64]) -> Option<(usize, usize)> {
    let total: u64 = queues.iter().sum();
    if total < BUSY {
        return None;
    }
    let (to, least) =
        loads.iter().copied().enumerate().filter(|(i, _)| *i != own).min_by_key(|(_, load)| *load)?;
    let peak = |queue: u64| (total - queue).max(least + queue);
    let (at, best) =
        queues.iter().enumerate().map(|(i, queue)| (i, peak(*queue))).min_by_key(|(_, peak)| *peak)?;
    (best * 8 <= total * 7).then_some((at, to))
}

/// Time that may be used at once after a rest (nanoseconds).
const BURST: u64 = 5_000_000;

/// Processor time that all workers together may use. A worker rests for the time that it has used beyond it.
#[derive(Debug, Default)]
pub struct Budget {
    /// Hundredths of a processor; 0: no limit.
    percent: u64,
    /// The time by which all used time will have been paid.
    paid: AtomicU64,
}

impl Budget {
    /// Makes a budget of so many hundredths of a processor; 0: no limit.
    #[must_use]
    pub fn new(percent: u64) -> Self {
        Self { percent, paid: AtomicU64::new(0) }
    }

    /// Returns whether there is a limit.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.percent != 0
    }

    /// Pays for `used` nanoseconds at time `now`, and returns for how many nanoseconds the worker must rest.
    pub fn pay(&self, used: u64, now: u64) -> u64 {
        if self.percent == 0 {
            return 0;
        }
        let cost = used.saturating_mul(100) / self.percent;
        self.paid.fetch_max(now, Ordering::Relaxed);
        let paid = self.paid.fetch_add(cost, Ordering::Relaxed) + cost;
        paid.saturating_sub(now + BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_of_two_busy_queues_moves_to_the_worker_that_has_time() {
        assert_eq!(choose(0, &[500, 500], &[1000, 0]), Some((0, 1)));
        assert_eq!(choose(1, &[100, 500, 300], &[0, 900, 700]), Some((1, 0)), "the one that evens out best");
    }

    #[test]
    fn a_queue_that_only_changes_places_stays_and_so_does_everything_while_there_is_time() {
        assert_eq!(choose(0, &[1000], &[1000, 0]), None, "alone on its worker");
        assert_eq!(choose(0, &[450, 450], &[900, 900]), None, "the other has no time either");
        assert_eq!(choose(0, &[200, 200], &[400, 0]), None, "time left");
        assert_eq!(choose(0, &[500, 500], &[1000]), None, "no other worker");
    }

    #[test]
    fn what_was_given_to_a_worker_counts_before_it_says_so_and_silence_is_idleness() {
        let board = Board::new(3);
        assert_eq!(board.report(0, PERIOD, &[500, 500]), Some((0, 1)));
        assert_eq!(board.loads(PERIOD), [500, 500, 0]);
        assert_eq!(board.report(0, PERIOD, &[400, 400]), Some((0, 2)));
        assert_eq!(board.loads(10 * PERIOD), [0, 0, 0]);
    }

    proptest! {
        #[test]
        fn with_steady_loads_the_heaviest_worker_gets_lighter_until_nothing_moves(
            queues in prop::collection::vec((0usize..4, 0u64..600), 1..12)
        ) {
            let mut queues = queues;
            let loads = |queues: &[(usize, u64)]| -> Vec<u64> {
                (0..4).map(|w| queues.iter().filter(|q| q.0 == w).map(|q| q.1).sum()).collect()
            };
            let mut quiet = 0;
            for round in 0.. {
                prop_assert!(round < 400, "it never ends");
                let own = round % 4;
                let at: Vec<usize> = (0..queues.len()).filter(|i| queues[*i].0 == own).collect();
                let costs: Vec<u64> = at.iter().map(|i| queues[*i].1).collect();
                let before = loads(&queues);
                let Some((queue, to)) = choose(own, &costs, &before) else {
                    quiet += 1;
                    if quiet == 4 { break }
                    continue;
                };
                quiet = 0;
                queues[at[queue]].0 = to;
                let after = loads(&queues);
                prop_assert!(after[own].max(after[to]) < before[own]);
            }
        }
    }

    #[test]
    fn who_uses_all_the_time_it_gets_uses_its_budget_and_a_burst() {
        for percent in [1, 20, 100, 150] {
            let budget = Budget::new(percent);
            let (mut now, mut used) = (0, 0);
            while now < 10_000_000_000 {
                now += 1_000_000;
                used += 1_000_000;
                now += budget.pay(1_000_000, now);
            }
            let share = used * 100 / now;
            assert!(share <= percent.min(100) && share + 2 > percent.min(100), "{share} of {percent}");
        }
        assert_eq!(Budget::new(0).pay(u64::MAX, 0), 0);
    }
}
