// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How often a member may connect to its doorbell.

use std::time::{Duration, Instant};

/// Connections that a member may make at once: peer ids are not used twice, and there are 65536.
pub(super) const MAX_CONNECTIONS: u32 = 256;
/// After this time it may make another one. A VM that starts for years connects more seldom; a flood needs a week for all peer ids.
const RENEWAL: Duration = Duration::from_secs(10);

/// The connections of one member's socket.
pub(super) struct Allowance {
    /// When the member may make [`MAX_CONNECTIONS`] again.
    full_at: Instant,
    refuses: bool,
}

/// The answer to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Allowed,
    /// The first one since one was allowed: what is said of each would fill the log.
    Refused,
    RefusedAgain,
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Allowance {
        Allowance { full_at: now, refuses: false }
    }

    /// Returns whether the member may connect now, and counts the connection if so.
    pub(super) fn take(&mut self, now: Instant) -> Answer {
        let full_at = self.full_at.max(now) + RENEWAL;
        if full_at <= now + RENEWAL * MAX_CONNECTIONS {
            (self.full_at, self.refuses) = (full_at, false);
            return Answer::Allowed;
        }
        if std::mem::replace(&mut self.refuses, true) { Answer::RefusedAgain } else { Answer::Refused }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_ends_and_a_vm_that_starts_again_and_again_is_never_refused() {
        let mut now = Instant::now();
        let mut allowance = Allowance::new(now);
        let answers: Vec<Answer> = (0..1000).map(|_| allowance.take(now)).collect();
        let count = |answer| answers.iter().filter(|a| **a == answer).count();
        assert_eq!((count(Answer::Allowed), count(Answer::Refused)), (MAX_CONNECTIONS as usize, 1));
        for start in 0..1000 {
            now += RENEWAL;
            assert_eq!(allowance.take(now), Answer::Allowed, "start {start}");
        }
        assert_eq!(allowance.take(now), Answer::Refused, "the flood is not forgotten at once");
    }
}
