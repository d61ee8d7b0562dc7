// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The journal of this process' project: state changes of VMs, networks and accelerators, for `tombolo events`. The last
//! [`LIMIT`] are kept in memory.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::project::changes::Kind;

/// Entries that are kept.
pub const LIMIT: usize = 4096;
/// Bytes of a detail that are kept.
const DETAIL_MAX: usize = 1000;
/// The pause between two checks whether its client has gone.
const LOOK: Duration = Duration::from_millis(200);
/// Time for followers to pass on the last entries when this process ends.
const FLUSH: Duration = Duration::from_secs(1);

/// A part came to a state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, by the host's clock.
    #[serde(serialize_with = "write_time", deserialize_with = "read_time")]
    pub time: SystemTime,
    pub kind: Kind,
    pub name: String,
    /// The state: of a VM as in `ps`, of a network and an accelerator "up" or "ended".
    pub state: String,
    /// The cause, if it is known.
    pub detail: String,
}

fn write_time<S: Serializer>(time: &SystemTime, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(&humantime::format_rfc3339_millis(*time))
}

fn read_time<'de, D: Deserializer<'de>>(d: D) -> Result<SystemTime, D::Error> {
    humantime::parse_rfc3339(&String::deserialize(d)?).map_err(serde::de::Error::custom)
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = humantime::format_rfc3339_millis(self.time);
        write!(f, "{time} {} {} {}", self.kind.word(), self.name, self.state)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// Entries in the order in which they were made, which a clock that is set back does not change.
#[derive(Debug)]
pub struct Journal {
    ring: Mutex<Ring>,
    changed: Condvar,
}

#[derive(Debug)]
struct Ring {
    entries: VecDeque<Entry>,
    /// Number of the first that is kept.
    first: u64,
    followers: usize,
    closed: bool,
}

impl Ring {
    fn number_of(&self, since: Since) -> u64 {
        let end = self.first + self.entries.len() as u64;
        match since {
            Since::Now => end,
            Since::Time(time) => {
                let begin = self.entries.iter().position(|entry| entry.time >= time);
                begin.map_or(end, |at| self.first + at as u64)
            }
        }
    }
}

/// The journal of this process.
static OWN: Journal = Journal::new();

/// Adds an entry to the journal of this process.
pub fn record(kind: Kind, name: &str, state: &str, detail: &str) {
    OWN.record(kind, name, state, detail);
}

/// The first entry for a follower of this process's journal.
#[derive(Clone, Copy, Debug)]
pub enum Since {
    Now,
    Time(SystemTime),
}

/// Gets an entry, or nothing now and then; it says whether there is to be more.
pub type Send<'a> = dyn Fn(Option<&Entry>) -> bool + 'a;

/// Passes entries of this process's journal to `send` until it says no, or the process ends.
pub fn follow(since: Since, send: &Send<'_>) {
    OWN.follow(since, send);
}

/// Ends all followers, once they have passed on what there is.
pub fn close() {
    OWN.close();
}

impl Journal {
    const fn new() -> Journal {
        let ring = Ring { entries: VecDeque::new(), first: 0, followers: 0, closed: false };
        Journal { ring: Mutex::new(ring), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, kind: Kind, name: &str, state: &str, detail: &str) {
        let mut ring = self.lock();
        if ring.entries.len() == LIMIT {
            ring.entries.pop_front();
            ring.first += 1;
        }
        let end = detail.floor_char_boundary_at(DETAIL_MAX);
        ring.entries.push_back(Entry {
            time: SystemTime::now(),
            kind,
            name: name.to_owned(),
            state: state.to_owned(),
            detail: detail[..end].to_owned(),
        });
        drop(ring);
        self.changed.notify_all();
    }

    /// `send` gets `None` now and then, so that it can say no though nothing happens.
    fn follow(&self, since: Since, send: &Send<'_>) {
        let mut ring = self.lock();
        ring.followers += 1;
        let mut next = ring.number_of(since);
        loop {
            let skip = usize::try_from(next.saturating_sub(ring.first)).unwrap_or(usize::MAX);
            let new: Vec<Entry> = ring.entries.iter().skip(skip).cloned().collect();
            next = ring.first + ring.entries.len() as u64;
            let closed = ring.closed;
            // A client that does not read delays no other.
            drop(ring);
            let goes_on = new.iter().all(|entry| send(Some(entry))) && (!new.is_empty() || send(None));
            ring = self.lock();
            if !goes_on || closed && new.is_empty() {
                break;
            }
            let nothing_new =
                |ring: &mut Ring| ring.first + ring.entries.len() as u64 == next && !ring.closed;
            (ring, _) = self
                .changed
                .wait_timeout_while(ring, LOOK, nothing_new)
                .unwrap_or_else(PoisonError::into_inner);
        }
        ring.followers -= 1;
        drop(ring);
        self.changed.notify_all();
    }

    fn close(&self) {
        let mut ring = self.lock();
        ring.closed = true;
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(ring, FLUSH, |ring| ring.followers > 0));
    }
}

/// `str::floor_char_boundary`, which Rust 1.85 does not have.
trait FloorCharBoundary {
    fn floor_char_boundary_at(&self, most: usize) -> usize;
}

impl FloorCharBoundary for str {
    fn floor_char_boundary_at(&self, most: usize) -> usize {
        (0..=most.min(self.len())).rev().find(|at| self.is_char_boundary(*at)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// The states that a follower is sent until it has seen `count`.
    fn seen(journal: &Journal, since: Since, count: usize) -> Vec<String> {
        let states = RefCell::new(Vec::new());
        journal.follow(since, &|entry| {
            states.borrow_mut().extend(entry.map(|entry| entry.state.clone()));
            states.borrow().len() < count
        });
        states.into_inner()
    }

    #[test]
    fn a_follower_gets_what_was_since_a_time_and_what_comes() {
        let journal = Journal::new();
        journal.record(Kind::Vm, "a", "booting", "");
        let between = SystemTime::now();
        journal.record(Kind::Vm, "a", "up", "");
        assert_eq!(seen(&journal, Since::Time(SystemTime::UNIX_EPOCH), 2), ["booting", "up"]);
        assert_eq!(seen(&journal, Since::Time(between), 1), ["up"]);
        std::thread::scope(|scope| {
            let following = scope.spawn(|| seen(&journal, Since::Now, 1));
            while journal.lock().followers == 0 {
                std::thread::yield_now();
            }
            journal.record(Kind::Vm, "a", "ended", "");
            assert_eq!(following.join().unwrap(), ["ended"]);
        });
    }

    #[test]
    fn the_end_waits_for_followers_to_pass_on_the_last_entries() {
        let journal = Journal::new();
        std::thread::scope(|scope| {
            let following = scope.spawn(|| seen(&journal, Since::Now, usize::MAX));
            while journal.lock().followers == 0 {
                std::thread::yield_now();
            }
            journal.record(Kind::Network, "lan", "ended", "");
            journal.close();
            assert_eq!(journal.lock().followers, 0);
            assert_eq!(following.join().unwrap(), ["ended"]);
        });
    }

    #[test]
    fn the_oldest_entries_go_and_long_details_are_cut() {
        let journal = Journal::new();
        for n in 0..LIMIT + 10 {
            journal.record(Kind::Vm, "a", &n.to_string(), &"ü".repeat(DETAIL_MAX));
        }
        assert_eq!(journal.lock().entries.len(), LIMIT);
        assert_eq!(seen(&journal, Since::Time(SystemTime::UNIX_EPOCH), 1), ["10"]);
        assert_eq!(journal.lock().entries[0].detail.len(), DETAIL_MAX);
    }

    #[test]
    fn an_entry_is_a_line_for_people_and_json_for_scripts() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        let entry =
            Entry { time, kind: Kind::Vm, name: "a".into(), state: "ended".into(), detail: "why".into() };
        assert_eq!(entry.to_string(), "2023-11-14T22:13:20.123Z VM a ended (why)");
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!((&json["time"], &json["kind"]), (&"2023-11-14T22:13:20.123Z".into(), &"vm".into()));
        assert_eq!(serde_json::from_value::<Entry>(json).unwrap(), entry);
    }
}
