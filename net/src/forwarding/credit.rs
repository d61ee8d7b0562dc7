// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long a sender waits for a receiver. A frame stays in its sender's ring while its receiver has no buffers, so that
//! bursts are not lost. But the frames behind it wait too, for all receivers. So each pair of ports has a credit of
//! time.
//!
//! Waiting uses the credit up. It grows with the frames that the receiver takes from that sender, and slowly by itself.
//! A pair without credit doesn't wait: frames that the receiver can't take are dropped, until a good part of the credit
//! is back. A receiver that takes a frame now and then thus costs its sender a sixty-fourth of its time; one that takes
//! many, half a microsecond for each.

/// The largest credit of a pair (nanoseconds).
pub const CREDIT_NS: u64 = 200_000;
/// Credit for a frame that was taken.
const PER_FRAME: u64 = 500;
/// Bytes of a frame for one more nanosecond of credit.
const BYTES_PER_NS: u64 = 4;
/// Nanoseconds after which the credit grows by one.
const SLOWNESS: u64 = 64;
/// The credit that a pair which has used it up needs before it waits again.
const AGAIN_NS: u64 = CREDIT_NS / 4;

#[derive(Clone, Copy, Debug)]
struct Account {
    receiver: usize,
    left: u64,
    /// The time up to which it has grown by itself.
    grown: u64,
    used_up: bool,
}

impl Account {
    fn add(&mut self, ns: u64) {
        self.left = self.left.saturating_add(ns).min(CREDIT_NS);
        self.used_up &= self.left < AGAIN_NS;
    }

    fn grow(&mut self, now: u64) {
        let gained = now.saturating_sub(self.grown) / SLOWNESS;
        self.grown += gained * SLOWNESS;
        self.add(gained);
    }
}

/// The credits of one sending queue with all receivers. A receiver that isn't in the list has its whole credit.
#[derive(Debug, Default)]
pub struct Credits(Vec<Account>);

impl Credits {
    /// Returns whether every receiver has its whole credit.
    #[inline(always)]
    #[must_use]
    pub fn are_whole(&self) -> bool {
        self.0.is_empty()
    }

    /// Charges `ns` that a frame has waited for `receiver` (any number that identifies it), at time `now`. Returns
    /// whether it may go on waiting.
    #[cold]
    pub fn wait(&mut self, receiver: usize, ns: u64, now: u64) -> bool {
        let at = self.0.iter().position(|a| a.receiver == receiver).unwrap_or_else(|| {
            // Receivers with their whole credit make room.
            self.0.retain_mut(|a| {
                a.grow(now);
                a.left < CREDIT_NS
            });
            self.0.push(Account { receiver, left: CREDIT_NS, grown: now, used_up: false });
            self.0.len() - 1
        });
        let account = &mut self.0[at];
        account.grow(now);
        account.left = account.left.saturating_sub(ns);
        account.used_up |= account.left == 0;
        !account.used_up
    }

    /// Adds the credit that `receiver` earned by taking `packets` of `bytes`.
    #[cold]
    pub fn earn(&mut self, receiver: usize, packets: u64, bytes: u64) {
        if let Some(at) = self.0.iter().position(|a| a.receiver == receiver) {
            self.0[at].add(packets * PER_FRAME + bytes / BYTES_PER_NS);
            if self.0[at].left == CREDIT_NS {
                self.0.swap_remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_receiver_that_takes_nothing_is_waited_for_once_and_then_for_a_small_part_of_the_time() {
        let mut credits = Credits::default();
        let (mut waited, mut since) = (0, None);
        for now in (0..1_000_000_000u64).step_by(1000) {
            let ns = since.map_or(0, |s| now - s);
            waited += ns;
            since = credits.wait(1, ns, now).then_some(now);
        }
        assert!((CREDIT_NS..1_000_000_000 / 50).contains(&waited), "{waited} ns of a second");
    }

    #[test]
    fn one_receivers_debt_is_not_anothers() {
        let mut credits = Credits::default();
        assert!(!credits.wait(1, CREDIT_NS, 0));
        assert!(credits.wait(2, CREDIT_NS - 1, 0));
        assert!(!credits.wait(1, 0, 1000));
        credits.earn(1, AGAIN_NS / PER_FRAME, 0);
        assert!(credits.wait(1, 0, 1000));
        credits.earn(1, 1000, 0);
        credits.earn(2, 1000, 0);
        assert!(credits.are_whole());
    }

    proptest! {
        #[test]
        fn no_one_waits_longer_than_the_credit_and_what_was_earned(
            steps in prop::collection::vec((0u64..300_000, 0u64..50, 0u64..100_000), 1..200),
        ) {
            let mut credits = Credits::default();
            let (mut now, mut waited, mut earned) = (0u64, 0u64, 0u64);
            let mut waiting = credits.wait(7, 0, 0);
            for (ns, packets, bytes) in steps {
                now += ns;
                // A waiting frame is looked at again before the wait gets too long.
                let part = if waiting { ns.min(1000) } else { 0 };
                waited += part;
                credits.earn(7, packets, bytes);
                earned += packets * PER_FRAME + bytes / BYTES_PER_NS;
                waiting = credits.wait(7, part, now);
                prop_assert!(waited <= CREDIT_NS + earned + now / SLOWNESS + 1000);
            }
        }
    }
}
