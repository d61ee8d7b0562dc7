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
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Allowance {
        Allowance { full_at: now }
    }

    /// Returns whether the member may connect now, and counts the connection if so.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.max(now) + RENEWAL;
        let allowed = full_at <= now + RENEWAL * MAX_CONNECTIONS;
        if allowed {
            self.full_at = full_at;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_ends_and_a_vm_that_starts_again_and_again_is_never_refused() {
        let mut now = Instant::now();
        let mut allowance = Allowance::new(now);
        let connected = (0..1000).filter(|_| allowance.take(now)).count();
        assert_eq!(connected, MAX_CONNECTIONS as usize);
        for start in 0..1000 {
            now += RENEWAL;
            assert!(allowance.take(now), "start {start}");
        }
        assert!(!allowance.take(now), "the flood is not forgotten at once");
    }
}
