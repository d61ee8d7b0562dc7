// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone whose owner's process has ended, and which another one goes on with: the zone's memory, the lock by which a process is the owner, and what the owner
//! knows of members, are kept outside of the process.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::ledger::{Entry, Ledger};
use super::{Owner, Zone};
use crate::Result;
use crate::header::Header;
use crate::liveness::Own;
use crate::mem::SharedMem;

/// What an owner knows of its zone. The header is the owner's copy: members may have written over the one in the zone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZoneState {
    label: String,
    header: Header,
    ledger: Vec<Entry>,
}

impl Zone {
    /// What the owner knows; `None`: this process is not the owner.
    pub fn state(&self) -> Option<ZoneState> {
        let ledger = self.owner.as_ref()?.ledger.entries();
        Some(ZoneState { label: self.label.clone(), header: self.header.clone(), ledger })
    }

    /// The descriptor that holds the owner's lock; `None`: this process is not the owner. The lock lasts as long as a process has a copy of it, or until
    /// the owner drops the zone.
    pub fn owners_lock(&self) -> Option<BorrowedFd<'_>> {
        Some(self.owner.as_ref()?.lock.liveness().as_fd())
    }

    /// Goes on as the owner of a zone whose owner's process has ended; `memory` and `lock` are that one's.
    ///
    /// # Errors
    /// When there is no room for the mapping.
    pub fn resume(state: ZoneState, memory: OwnedFd, lock: OwnedFd) -> Result<Zone> {
        let file = File::from(memory);
        let mem = SharedMem::map(file.as_fd(), 0, state.header.size, true)?;
        let owner = Owner::of(Own::resume(lock), Ledger::resume(state.ledger))?;
        Ok(Zone { file, mem, header: state.header, label: state.label, owner: Some(owner) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::liveness::OWNER_BYTE;
    use crate::{Rights, Role, ZoneConfig};

    #[test]
    fn the_next_owner_has_the_members_and_the_lock_of_the_one_before() {
        let zone = Zone::create(&ZoneConfig::new("z", 8 << 20)).unwrap();
        let member = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        zone.activate(member).unwrap();
        let state = serde_json::to_string(&zone.state().unwrap()).unwrap();
        let memory = zone.as_fd().try_clone_to_owned().unwrap();
        let lock = zone.owners_lock().unwrap().try_clone_to_owned().unwrap();
        // A member writes over the header.
        zone.mem().write(0, &[0xff; 4096]).unwrap();
        // As at the death of a process: nothing is dropped.
        std::mem::forget(zone);
        let zone = Zone::resume(serde_json::from_str(&state).unwrap(), memory, lock).unwrap();
        assert!(zone.is_owner() && zone.has_owner().unwrap());
        assert_eq!((zone.name(), zone.member(member).unwrap().name.as_str()), ("z", "a"));
        assert!(zone.declare_dead(member).unwrap());
        let memory = zone.as_fd().try_clone_to_owned().unwrap();
        drop(zone);
        assert!(!crate::liveness::is_held(memory.as_fd(), OWNER_BYTE).unwrap(), "the lock was this owner's");
    }
}
