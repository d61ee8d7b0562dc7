// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An accelerator whose supervisor has ended goes on under the next one: its server, the connection to it, and the zones of its VMs.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::server::LINK;
use super::slot::{Channels, Reach, Slot};
use super::{Accelerator, Runs, Server, lock, look, names};
use crate::compose::accelerator::{AccelSpec, AccelUse};
use crate::machine::Machine;
use crate::project::keeper::{ANSWER, Keeper};
use crate::project::owner::Owner;
use crate::project::peer::Peer;
use crate::project::zones::{HostZone, Place};
use crate::shim::handle::Safe;
use crate::shim::{RECORD, Shim};

/// The supervisor's knowledge of an accelerator, which the shim of its zones keeps.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    pub(super) name: String,
    pub(super) spec: AccelSpec,
    pub(super) scratch: Option<PathBuf>,
    pub(super) slots: BTreeMap<String, SlotRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SlotRecord {
    pub(super) used: AccelUse,
    pub(super) served: Option<bool>,
    pub(super) library: Option<bool>,
    /// The owner VM's access to the zone; `None`: no VM serves it.
    pub(super) reach: Option<Reach>,
}

impl Accelerator {
    /// Goes on with an accelerator whose zones are in `safe`; `dir` is the project's folder. A server that does not answer is started again.
    ///
    /// # Errors
    /// This program can't read what the shim keeps, a zone is not there, or there is no thread for its server.
    pub fn adopt(
        safe: Shim,
        dir: &Path,
        machines: &BTreeMap<String, Arc<Machine>>,
    ) -> anyhow::Result<(String, Accelerator)> {
        let Record { name, spec, scratch, slots } = safe.record(RECORD)?;
        let safe = Arc::new(Safe::of(safe));
        let slots = slots.into_iter().map(|(vm, slot)| {
            let zone = Place::part(&safe, &vm);
            Ok((vm, slot.resume(zone)?))
        });
        let slots = slots.collect::<anyhow::Result<BTreeMap<String, Slot>>>()?;
        let owner = spec.vm.clone();
        let server = Arc::new(Server {
            name: name.clone(),
            spec,
            scratch,
            safe,
            telling: Mutex::default(),
            slots: Mutex::new(slots),
            link: Mutex::default(),
            started: Mutex::default(),
        });
        let runs = match owner {
            Some(vm) => Runs::In(Arc::new(Owner::adopt(&vm, machines.get(&vm)))),
            None => Runs::Here(server.adopt(dir)?),
        };
        Ok((name, Accelerator { server, runs }))
    }
}

impl Server {
    fn adopt(self: &Arc<Self>, dir: &Path) -> anyhow::Result<Keeper> {
        let names = names(&self.name, dir);
        let Some(shim) = Shim::find(dir, &names.shim())? else {
            return Ok(Keeper::start(names, self.clone())?);
        };
        let starts = shim.record(RECORD).unwrap_or_default();
        let answers = shim.get(LINK).is_ok_and(|socket| {
            let socket = UnixStream::from(socket);
            if socket.set_read_timeout(Some(ANSWER)).is_err() {
                return false;
            }
            let link = Arc::new(Mutex::new(Peer::new(socket)));
            // An answer to a question of the supervisor before is none to this one.
            let answers = look(link.clone(), shim.pid()).is_ok();
            *lock(&self.link) = Some(link).filter(|_| answers);
            answers
        });
        let keeper = Keeper::adopt(names, self.clone(), shim, starts)?;
        if !answers {
            keeper.start_again();
        }
        Ok(keeper)
    }
}

impl SlotRecord {
    /// # Errors
    /// Those of its zone.
    fn resume(self, place: Place) -> anyhow::Result<Slot> {
        let SlotRecord { used, served, library, reach } = self;
        let zone = Arc::new(HostZone::adopt(place)?);
        let (channels, window) = used.geometry();
        let channels =
            reach.map(|reach| anyhow::Ok(Channels { area: zone.resume_calls(channels, window)?, reach }));
        Ok(Slot { zone, used, served, library, channels: channels.transpose()? })
    }
}
