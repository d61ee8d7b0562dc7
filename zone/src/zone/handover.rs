// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone whose owner goes on in the next program of its process.

use std::fs::File;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::ledger::{Entry, Ledger};
use super::{Owner, Zone};
use crate::header::Header;
use crate::keep::{Keep, Kept};
use crate::liveness::{OWNER_BYTE, Own};
use crate::mem::SharedMem;
use crate::{Error, Result};

/// The state of an owner that goes over to the next program. The header is the owner's copy: members may have written over the one in the zone.
#[derive(Debug, Serialize, Deserialize)]
pub struct ZoneState {
    memory: Kept,
    owner: Option<Kept>,
    label: String,
    header: Header,
    /// A program before this field left none: the owner then learns of the members as they are found.
    #[serde(default)]
    ledger: Vec<Entry>,
}

impl ZoneState {
    /// Notes the descriptors of a zone.
    pub fn of(zone: &Zone, keep: &mut Keep) -> ZoneState {
        ZoneState {
            memory: keep.add(&zone.file),
            owner: zone.owner.as_ref().map(|owner| keep.add(owner.lock.liveness())),
            label: zone.label.clone(),
            header: zone.header.clone(),
            ledger: zone.owner.as_ref().map(|owner| owner.ledger.entries()).unwrap_or_default(),
        }
    }

    /// The zone, mapped anew.
    ///
    /// # Errors
    /// When a descriptor is not open, or there is no room for the mapping.
    pub fn resume(self) -> Result<Zone> {
        let failed = |e| Error::io("taking over a zone's memory", e);
        let file = File::from(self.memory.take().map_err(failed)?);
        let mem = SharedMem::map(file.as_fd(), 0, self.header.size, true)?;
        let owner = match self.owner {
            Some(kept) => Some(Owner::of(own(kept, &file)?, Ledger::resume(self.ledger))?),
            None => None,
        };
        Ok(Zone { file, mem, header: self.header, label: self.label, owner })
    }
}

/// The owner's lock; one whose descriptor is gone is free, and is taken anew.
fn own(kept: Kept, file: &File) -> Result<Own> {
    match kept.take() {
        Ok(fd) => Ok(Own::resume(fd)),
        Err(e) => Own::try_hold(file.as_fd(), OWNER_BYTE)?
            .ok_or_else(|| Error::io("taking over the owner's lock of a zone", e)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::{Rights, Role, ZoneConfig};

    #[test]
    fn the_next_owner_has_the_members_and_the_lock_of_the_one_before() {
        let zone = Zone::create(&ZoneConfig::new("z", 8 << 20)).unwrap();
        let member = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        zone.activate(member).unwrap();
        let state = serde_json::to_string(&ZoneState::of(&zone, &mut Keep::default())).unwrap();
        // A member writes over the header.
        zone.mem().write(0, &[0xff; 4096]).unwrap();
        // As an execve: the descriptors stay open, and nothing is dropped.
        std::mem::forget(zone);
        let zone = serde_json::from_str::<ZoneState>(&state).unwrap().resume().unwrap();
        assert!(zone.is_owner() && zone.has_owner().unwrap());
        assert_eq!((zone.name(), zone.member(member).unwrap().name.as_str()), ("z", "a"));
        assert!(zone.declare_dead(member).unwrap());
        let memory = zone.as_fd().try_clone_to_owned().unwrap();
        let state = serde_json::to_string(&ZoneState::of(&zone, &mut Keep::default())).unwrap();
        drop(zone);
        assert!(!crate::liveness::is_held(memory.as_fd(), OWNER_BYTE).unwrap(), "the lock was this owner's");
        // A lock whose descriptor is gone is taken anew.
        let mut state: serde_json::Value = serde_json::from_str(&state).unwrap();
        (state["memory"], state["owner"]) = (memory.as_raw_fd().into(), 1_000_000.into());
        let zone = serde_json::from_value::<ZoneState>(state).unwrap().resume().unwrap();
        std::mem::forget(memory);
        assert!(crate::liveness::is_held(zone.as_fd(), OWNER_BYTE).unwrap());
    }
}
