// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Instants for the next program of this process: as nanoseconds of the host's monotonic clock, which an execve does not touch.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

fn clock() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock begins at zero.
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// A moment, before or after now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(Duration);

impl From<Instant> for Moment {
    fn from(at: Instant) -> Moment {
        let (clock, now) = (clock(), Instant::now());
        Moment((clock + at.saturating_duration_since(now)).saturating_sub(now.saturating_duration_since(at)))
    }
}

impl From<Moment> for Instant {
    fn from(Moment(at): Moment) -> Instant {
        let (clock, now) = (clock(), Instant::now());
        let later = now + at.saturating_sub(clock);
        later.checked_sub(clock.saturating_sub(at)).unwrap_or(now)
    }
}

/// For serde's `with`.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(at: &Option<Instant>, s: S) -> Result<S::Ok, S::Error> {
    at.map(Moment::from).serialize(s)
}

/// For serde's `with`.
///
/// # Errors
/// When it is no moment.
pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Instant>, D::Error> {
    Ok(Option::<Moment>::deserialize(d)?.map(Instant::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_same_instant_again_before_and_after_now() {
        let (hour, slack) = (Duration::from_secs(3600), Duration::from_millis(100));
        for at in [Instant::now(), Instant::now() + hour, Instant::now().checked_sub(hour / 60).unwrap()] {
            let text = serde_json::to_string(&Moment::from(at)).unwrap();
            let again = Instant::from(serde_json::from_str::<Moment>(&text).unwrap());
            let apart = again.saturating_duration_since(at) + at.saturating_duration_since(again);
            assert!(apart < slack, "{apart:?}");
        }
    }
}
