// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The owner's own record of the member table, in memory that no member can write.
//!
//! The table in the zone is for the members. The owner decides by this record and by the locks of [`crate::liveness`]: each living
//! member's name, role and rights are what they were when it came, and epochs only grow. [`super::Zone::reap`] writes them back into the table.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::format::TMB_EPOCH_END as EPOCH_END;
use crate::member::{HeldBy, Member, MemberId, MemberState, Rights, Role};

/// The member that has a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tenant {
    pub name: String,
    pub role: Option<Role>,
    pub rights: Rights,
    /// A process has held its liveness: once none does, it has ended.
    pub lived: bool,
    #[serde(default)]
    pub held_by: HeldBy,
}

/// The record of one slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The highest epoch that the owner gave or saw at a living member.
    pub epoch: u32,
    /// From its invitation until it is declared dead.
    pub tenant: Option<Tenant>,
}

/// The records of all slots.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Vec<Entry>>);

impl Ledger {
    pub fn resume(entries: Vec<Entry>) -> Ledger {
        Ledger(Mutex::new(entries))
    }

    pub fn entries(&self) -> Vec<Entry> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes or reads a slot's record.
    pub fn with<T>(&self, id: MemberId, change: impl FnOnce(&mut Entry) -> T) -> T {
        let (mut entries, index) = (self.lock(), id.index() as usize);
        if entries.len() <= index {
            entries.resize(index + 1, Entry::default());
        }
        change(&mut entries[index])
    }

    /// The name of the member that a slot is kept for.
    pub fn name(&self, id: MemberId) -> Option<String> {
        self.with(id, |entry| entry.tenant.as_ref().map(|tenant| tenant.name.clone()))
    }

    /// Returns whether a member lives though no lock says so.
    pub fn is_assumed(&self, id: MemberId) -> bool {
        self.with(id, |entry| entry.tenant.as_ref().is_some_and(|tenant| tenant.held_by == HeldBy::Nobody))
    }

    /// Puts what the owner knows of a living member into a copy of its slot.
    pub fn correct(&self, member: &mut Member) {
        self.with(member.id, |entry| {
            if let Some(tenant) = entry.tenant.as_ref().filter(|_| member.alive) {
                (member.name, member.role) = (tenant.name.clone(), tenant.role);
                (member.rights, member.held_by) = (tenant.rights, tenant.held_by);
            }
        });
    }

    /// Learns of a living member by its slot, unless the owner knows it. Returns what the owner knows, and whether that is new.
    pub fn learn(&self, copy: &Member) -> (Tenant, bool) {
        self.with(copy.id, |entry| {
            let is_new = entry.tenant.is_none();
            let tenant = entry.tenant.get_or_insert_with(|| Tenant {
                name: copy.name.clone(),
                role: copy.role,
                rights: copy.rights,
                lived: true,
                held_by: if copy.assumed { HeldBy::Nobody } else { copy.held_by },
            });
            tenant.lived = true;
            if copy.state == MemberState::Active && copy.epoch < EPOCH_END {
                entry.epoch = entry.epoch.max(copy.epoch);
            }
            (tenant.clone(), is_new)
        })
    }
}

/// Returns the epoch after `found`, which a member may have written: one that is not in `from..EPOCH_END` doesn't count. A slot whose epochs are used up
/// begins anew with a random one, which no lock word of an earlier life has but by a chance of one in a thousand million.
pub(super) fn next_epoch(from: u32, found: u32) -> u32 {
    let present = if (from..EPOCH_END).contains(&found) { found } else { from };
    if present + 1 < EPOCH_END { present + 1 } else { random_epoch() }
}

fn random_epoch() -> u32 {
    let (random, _) = Uuid::new_v4().as_u64_pair();
    // The highest bits of a version 4 UUID are random; 30 of them are below half of EPOCH_END.
    (random >> 34) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_grow_whatever_a_member_writes_and_never_end() {
        assert_eq!(next_epoch(0, 0), 1);
        assert_eq!(next_epoch(4, 7), 8);
        assert_eq!(next_epoch(7, 4), 8, "one that was lowered");
        assert_eq!(next_epoch(7, u32::MAX), 8, "one that no member ever had");
        for used_up in [(0, EPOCH_END - 1), (EPOCH_END - 1, 0)] {
            let anew = next_epoch(used_up.0, used_up.1);
            assert!((1..EPOCH_END / 2).contains(&anew), "{anew}");
        }
    }
}
