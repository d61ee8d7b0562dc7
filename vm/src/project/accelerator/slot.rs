// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The slots of VMs at an accelerator's server.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tombolo_calls::zone::Area;
use tombolo_control::accel::{Guest, Request};

use super::adopt::SlotRecord;
use crate::compose::accelerator::AccelUse;
use crate::project::owner::{self, Client};
use crate::project::zones::HostZone;

/// A VM's zone for calls, and what the server grants it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) zone: Arc<HostZone>,
    pub(super) used: AccelUse,
    /// The server is in its zone; `None`: none has ever been.
    pub(super) served: Option<bool>,
    /// Set if the guest had the client library when it came up.
    pub(super) library: Option<bool>,
    /// The zone's channels, where a VM serves them.
    pub(super) channels: Option<Channels>,
}

/// The channels of a zone that the owner VM serves.
pub(super) struct Channels {
    pub(super) area: Area,
    pub(super) reach: Reach,
}

/// The access of the running owner VM to a client's zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reach {
    /// Nothing.
    Apart,
    /// The devices of the zone are in the owner VM.
    There,
    /// Its server has been told of it.
    Served,
}

impl std::fmt::Debug for Channels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channels({}, {:?})", self.area.channels(), self.reach)
    }
}

impl Slot {
    /// What the next supervisor needs to know.
    pub(super) fn record(&self) -> SlotRecord {
        let (used, served, library, reach) = (self.used.clone(), self.served, self.library, self.reach());
        SlotRecord { used, served, library, reach }
    }

    /// None: no VM serves it.
    pub(super) fn reach(&self) -> Option<Reach> {
        self.channels.as_ref().map(|channels| channels.reach)
    }

    pub(super) fn set_reach(&mut self, reach: Reach) {
        self.channels.iter_mut().for_each(|channels| channels.reach = reach);
    }

    /// The request that makes a server serve a VM, whose zone is at this path.
    pub(super) fn guest(&self, vm: &str, zone: PathBuf) -> Guest {
        let (channels, window) = self.used.geometry();
        Guest {
            vm: vm.to_owned(),
            zone,
            channels,
            window,
            memory: self.used.memory.map(|m| m.0),
            objects: self.used.objects,
            rate: self.used.rate,
            weight: self.used.weight,
        }
    }

    /// The request that makes the owner VM serve a VM.
    pub(super) fn client(&self, vm: &str) -> Client {
        let uuid = self.zone.uuid();
        let guest = self.guest(vm, owner::device(&uuid).into());
        Client { vm: vm.to_owned(), uuid, guest }
    }

    pub(super) fn request(&self, vm: &str) -> Request {
        Request::Vm(self.guest(vm, self.zone.path().into()))
    }

    pub(super) fn ring(&self, vm: &str) {
        if let Err(e) = self.zone.ring(vm) {
            crate::say!("the VM '{vm}' can't be rung: {e:#}");
        }
    }
}
