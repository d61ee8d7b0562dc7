// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Divides the time between growing and the guest's own work.
//!
//! Without a share the guest is offered whatever is prepared. With one, growing takes turns: a small step is prepared, offered and taken; then
//! nothing happens for so long that the turn was at most the share of the time. However much a turn disturbs the guest, it can't lose more than that:
//! QEMU pins and maps, on the virtual CPU that asked (7.2) or in its main thread (10.0), and the guest sets up its map. QEMU does not see what a
//! guest does with memory that it has plugged. It does see the next block being plugged, which a Linux guest does when it has put the memory
//! before it to use; so the last block of a turn is offered by itself, and ends it.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::layout::{Layout, SECTION};

/// The part of the time in which growing may disturb the guest, in percent, from 1 to 100; 100 is without pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Share(u32);

impl Share {
    /// Growing never waits for the guest.
    pub const ALL: Self = Self(100);

    /// The pause after a turn.
    fn rest(self, turn: Duration) -> Duration {
        turn * (100 - self.0) / self.0
    }
}

impl TryFrom<u32> for Share {
    type Error = String;

    fn try_from(percent: u32) -> Result<Self, String> {
        if (1..=100).contains(&percent) {
            return Ok(Self(percent));
        }
        Err(format!("a share of {percent} %: it is from 1 (a hundredth of the time) to 100 (no pauses)"))
    }
}

impl From<Share> for u32 {
    fn from(share: Share) -> u32 {
        share.0
    }
}

impl std::str::FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<u32>().map_err(|e| format!("{text:?} is no percentage ({e})")).and_then(Self::try_from)
    }
}

/// A guest that reboots in a pause is found out after this long.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The bytes up to which preparation and offers may go now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leave {
    /// Memory may be prepared up to here.
    pub prepare: u64,
    /// And offered up to here.
    pub offer: u64,
}

/// The turns of one growth.
#[derive(Debug)]
pub struct Pace {
    layout: Layout,
    share: Share,
    /// When the turn began, and the size that ends it.
    turn: Option<(Instant, u64)>,
    rest_until: Option<Instant>,
}

impl Pace {
    /// Nothing has been offered yet.
    pub fn new(layout: Layout, share: Share) -> Self {
        Self { layout, share, turn: None, rest_until: None }
    }

    /// The limits for a guest that has `size` bytes, while `ready` bytes are prepared; None: this time is the guest's.
    pub fn leave(&mut self, size: u64, ready: u64, now: Instant) -> Option<Leave> {
        let Layout { grown, block, step, .. } = self.layout;
        if self.share == Share::ALL {
            return Some(Leave {
                // Not all at once, so that the host's free memory is looked at on the way.
                prepare: (size.max(ready) + 3 * step).min(grown),
                offer: (size + step).min(grown),
            });
        }
        if let Some((began, end)) = self.turn.filter(|(_, end)| size >= *end) {
            debug_assert!(end <= grown);
            self.turn = None;
            self.rest_until = Some(now + self.share.rest(now - began));
        }
        if self.rest_until.is_some_and(|until| now < until) {
            return None;
        }
        let (_, end) = *self.turn.get_or_insert_with(|| {
            // A whole section, which a guest adds at a time: less gains nothing.
            let piece = SECTION.max(block);
            (now, ((size / piece + 1) * piece).min(grown))
        });
        let before_last = end - block;
        Some(Leave { prepare: end, offer: if size < before_last { before_last } else { end } })
    }

    /// How long to wait before the next look, where `tick` is usual: the end of a turn should not be missed, and in a pause even looking costs
    /// (QEMU answers under its big lock).
    pub fn wait(&self, tick: Duration, now: Instant) -> Duration {
        match (self.turn, self.rest_until) {
            (Some(_), _) => tick / 5,
            (None, Some(until)) => until.saturating_duration_since(now).clamp(tick, LONGEST_WAIT),
            (None, None) => tick,
        }
    }

    /// Counts the time until now neither for growth nor for the guest: growth waited for the host.
    pub fn waited(&mut self, now: Instant) {
        if let Some((began, _)) = &mut self.turn {
            *began = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::MIB;

    const BLOCK: u64 = 16 * MIB;
    const LAYOUT: Layout = Layout { boot: 512 * MIB, grown: 1024 * MIB, block: BLOCK, step: 256 * MIB };

    fn share(percent: u32) -> Share {
        Share::try_from(percent).unwrap()
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn without_a_share_the_guest_is_offered_step_after_step_with_no_pause() {
        let mut pace = Pace::new(LAYOUT, Share::ALL);
        let now = Instant::now();
        assert_eq!(pace.leave(BLOCK, 0, now), Some(Leave { prepare: 784 * MIB, offer: 272 * MIB }));
        assert_eq!(pace.leave(1000 * MIB, 0, now), Some(Leave { prepare: 1024 * MIB, offer: 1024 * MIB }));
    }

    #[test]
    fn a_guest_has_the_rest_of_the_time_to_itself_however_long_a_turn_takes() {
        for percent in [1, 10, 33, 90] {
            let mut pace = Pace::new(LAYOUT, share(percent));
            let (mut now, mut size) = (Instant::now(), BLOCK);
            let (mut busy, mut all) = (Duration::ZERO, Duration::ZERO);
            let mut turns: u64 = 0;
            while size < LAYOUT.grown {
                match pace.leave(size, 0, now) {
                    // The guest takes a block in 1 to 5 ms.
                    Some(leave) => {
                        assert!(leave.offer > size && leave.offer <= leave.prepare, "{leave:?} at {size}");
                        busy += ms(1 + turns % 5);
                        all += ms(1 + turns % 5);
                        now += ms(1 + turns % 5);
                        size += BLOCK;
                        turns += 1;
                    }
                    None => {
                        all += ms(1);
                        now += ms(1);
                    }
                }
            }
            // The pause after the last turn is not there: growing is over.
            let last = ms(8 * 5);
            assert!((busy - last) * 100 <= all * percent, "{percent} %: {busy:?} of {all:?}");
        }
    }

    #[test]
    fn the_last_block_of_a_turn_is_offered_by_itself() {
        let mut pace = Pace::new(LAYOUT, share(10));
        let now = Instant::now();
        let offer = |pace: &mut Pace, size, at| pace.leave(size, 0, now + at).map(|leave| leave.offer);
        assert_eq!(offer(&mut pace, BLOCK, ms(0)), Some(112 * MIB));
        assert_eq!(offer(&mut pace, 64 * MIB, ms(50)), Some(112 * MIB));
        assert_eq!(offer(&mut pace, 112 * MIB, ms(90)), Some(128 * MIB));
        // The turn took 100 ms, so the next begins 900 ms later, with all of the next section.
        assert_eq!(offer(&mut pace, 128 * MIB, ms(100)), None);
        assert_eq!(offer(&mut pace, 128 * MIB, ms(999)), None);
        assert_eq!(offer(&mut pace, 128 * MIB, ms(1000)), Some(240 * MIB));
    }

    #[test]
    fn a_turn_is_looked_at_often_and_a_pause_hardly_ever() {
        let mut pace = Pace::new(LAYOUT, share(10));
        let now = Instant::now();
        assert_eq!(pace.wait(ms(50), now), ms(50));
        pace.leave(BLOCK, 0, now);
        assert_eq!(pace.wait(ms(50), now), ms(10));
        pace.leave(128 * MIB, 0, now + ms(100));
        assert_eq!(pace.wait(ms(50), now + ms(100)), ms(900));
        assert_eq!(pace.wait(ms(50), now + ms(990)), ms(50));
        pace.leave(128 * MIB, 0, now + ms(1000));
        pace.leave(256 * MIB, 0, now + ms(6000));
        assert_eq!(pace.wait(ms(50), now + ms(6000)), LONGEST_WAIT);
    }

    #[test]
    fn blocks_larger_than_a_section_come_one_in_a_turn() {
        let layout = Layout { block: 512 * MIB, ..LAYOUT };
        let mut pace = Pace::new(layout, share(50));
        let leave = pace.leave(512 * MIB, 0, Instant::now());
        assert_eq!(leave, Some(Leave { prepare: 1024 * MIB, offer: 1024 * MIB }));
    }

    #[test]
    fn waiting_for_the_host_is_no_turn_of_the_guests() {
        let mut pace = Pace::new(LAYOUT, share(10));
        let now = Instant::now();
        pace.leave(BLOCK, 0, now);
        pace.waited(now + ms(5000));
        assert_eq!(pace.leave(128 * MIB, 0, now + ms(5010)), None);
        assert!(pace.leave(128 * MIB, 0, now + ms(5100)).is_some());
    }

    #[test]
    fn a_share_is_a_percentage_above_nothing() {
        assert_eq!("10".parse(), Ok(share(10)));
        for wrong in ["0", "101", "-1", "x", ""] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }
}
