// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `restart =`: whether a VM that has ended is started again, and after which pause.

use std::time::Duration;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

/// The first pause; each further one is twice as long.
const FIRST: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);
/// A VM that was up for so long ended for another reason than the one before: the pauses begin anew.
pub const STEADY: Duration = Duration::from_secs(60);

/// When a VM that has ended is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Restart {
    /// Never.
    #[default]
    No,
    /// When it did not switch itself off; with a number, so many times in a row at most.
    OnFailure(Option<u32>),
    /// After each end, except by `down`.
    Always,
    /// As `Always`; one that `down VM` stopped is left alone by `up --boot`.
    UnlessStopped,
}

impl Restart {
    /// The pause before the VM is started again; `None`: it stays as it is. `clean`: the guest switched itself off. `attempts`: how often it was
    /// started again in a row without having been up for [`STEADY`].
    #[must_use]
    pub fn pause(self, clean: bool, attempts: u32) -> Option<Duration> {
        let wanted = match self {
            Restart::No => false,
            Restart::OnFailure(most) => !clean && most.is_none_or(|most| attempts < most),
            Restart::Always | Restart::UnlessStopped => true,
        };
        wanted.then(|| FIRST.saturating_mul(1 << attempts.min(16)).min(LONGEST))
    }
}

impl Serialize for Restart {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Restart::No => s.serialize_str("no"),
            Restart::OnFailure(None) => s.serialize_str("on-failure"),
            Restart::OnFailure(Some(most)) => s.collect_str(&format_args!("on-failure:{most}")),
            Restart::Always => s.serialize_str("always"),
            Restart::UnlessStopped => s.serialize_str("unless-stopped"),
        }
    }
}

impl<'de> Deserialize<'de> for Restart {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let count = text.strip_prefix("on-failure:").map(str::parse);
        match (text.as_str(), count) {
            ("no", _) => Ok(Restart::No),
            ("on-failure", _) => Ok(Restart::OnFailure(None)),
            (_, Some(Ok(most))) => Ok(Restart::OnFailure(Some(most))),
            ("always", _) => Ok(Restart::Always),
            ("unless-stopped", _) => Ok(Restart::UnlessStopped),
            (other, _) => Err(de::Error::custom(format!(
                "'{other}' is no restart policy; write \"no\", \"on-failure\", \"on-failure:5\", \"always\" or \"unless-stopped\""
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Result<Restart, String> {
        serde_json::from_value(serde_json::json!(text)).map_err(|e| e.to_string())
    }

    #[test]
    fn a_policy_is_written_as_it_is_read() {
        for text in ["no", "on-failure", "on-failure:5", "always", "unless-stopped"] {
            assert_eq!(serde_json::json!(policy(text).unwrap()), text);
        }
        for wrong in ["never", "on-failure:", "on-failure:many", ""] {
            assert!(policy(wrong).unwrap_err().contains("is no restart policy"), "{wrong}");
        }
    }

    #[test]
    fn pauses_double_up_to_a_minute() {
        let pauses: Vec<u64> = (0..9).map(|n| Restart::Always.pause(true, n).unwrap().as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(Restart::Always.pause(true, u32::MAX), Some(LONGEST));
    }

    #[test]
    fn a_guest_that_switched_itself_off_comes_back_only_under_always() {
        assert_eq!(Restart::No.pause(false, 0), None);
        assert_eq!(Restart::OnFailure(None).pause(true, 0), None);
        assert!(Restart::OnFailure(None).pause(false, 1000).is_some());
        assert!(Restart::OnFailure(Some(2)).pause(false, 1).is_some());
        assert_eq!(Restart::OnFailure(Some(2)).pause(false, 2), None);
        assert!(Restart::UnlessStopped.pause(true, 0).is_some());
    }
}
