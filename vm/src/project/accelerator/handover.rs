// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An accelerator that goes on in the next program of this process: its server, the connection to it, and the zones of its VMs.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tombolo_zone::doorbell::handover::Paused;
use tombolo_zone::keep::{Keep, Kept};

use super::slot::{Channels, Reach, Slot};
use super::{Accelerator, Runs, Server, lock, names};
use crate::compose::accelerator::{AccelSpec, AccelUse};
use crate::machine::Machine;
use crate::project::keeper::{Keeper, KeeperState};
use crate::project::losses::Losses;
use crate::project::owner::Owner;
use crate::project::peer::Peer;
use crate::project::zones::{HostZone, HostZoneState};

/// The state of an accelerator that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub struct AcceleratorState {
    name: String,
    spec: AccelSpec,
    scratch: Option<PathBuf>,
    #[serde(alias = "seats")]
    slots: BTreeMap<String, SlotState>,
    link: Option<Kept>,
    runs: RunsState,
}

#[derive(Debug, Serialize, Deserialize)]
struct SlotState {
    zone: HostZoneState,
    used: AccelUse,
    served: Option<bool>,
    library: Option<bool>,
    /// The owner VM's access to the zone; `None`: no VM serves it.
    reach: Option<Reach>,
}

#[derive(Debug, Serialize, Deserialize)]
enum RunsState {
    Here(KeeperState),
    In { vm: String, starts: u32 },
}

impl Accelerator {
    /// Pauses the zones' doorbells until the second value is dropped, and returns the state for the next program. The caller has closed
    /// `BACKGROUND`, so the server owes no answer.
    ///
    /// # Errors
    /// Those of the zones.
    pub fn hand_over(&self, keep: &mut Keep) -> anyhow::Result<(AcceleratorState, Vec<Paused>)> {
        let server = &self.server;
        let link = lock(&server.link).as_ref().map(|link| keep.add(&*lock(link).socket()));
        let (mut slots, mut paused) = (BTreeMap::new(), Vec::new());
        for (vm, slot) in &*lock(&server.slots) {
            let (zone, bells) = slot.zone.hand_over(keep)?;
            paused.push(bells);
            let reach = slot.channels.as_ref().map(|channels| channels.reach);
            let (used, served, library) = (slot.used.clone(), slot.served, slot.library);
            slots.insert(vm.clone(), SlotState { zone, used, served, library, reach });
        }
        let runs = match &self.runs {
            Runs::Here(keeper) => RunsState::Here(keeper.hand_over()),
            Runs::In(owner) => RunsState::In { vm: owner.vm().to_owned(), starts: owner.starts() },
        };
        let (name, spec, scratch) = (server.name.clone(), server.spec.clone(), server.scratch.clone());
        Ok((AcceleratorState { name, spec, scratch, slots, link, runs }, paused))
    }

    /// Goes on with an accelerator of the program before; `dir` is the project's folder. A VM whose zone can't be taken over has no accelerator until
    /// it is started again; a server that can't be reached, or has lost a zone, is started again.
    ///
    /// # Errors
    /// When there is no thread for its server.
    pub fn take_over(
        left: AcceleratorState,
        dir: &Path,
        machines: &BTreeMap<String, Arc<Machine>>,
        losses: &mut Losses,
    ) -> anyhow::Result<Accelerator> {
        let mut slots = BTreeMap::new();
        let mut whole = true;
        for (vm, slot) in left.slots {
            match slot.resume(losses) {
                Ok(slot) => drop(slots.insert(vm, slot)),
                Err(e) => {
                    whole = false;
                    losses.of_vm(&vm, &format!("its accelerator '{}'", left.name), format!("{e:#}"));
                }
            }
        }
        let link = left.link.map(Kept::take).transpose().unwrap_or_else(|e| {
            whole = false;
            let name = &left.name;
            losses.note(format!(
                "the accelerator '{name}' has lost the connection to its server ({e}), which is started again"
            ));
            None
        });
        let link = link.map(|socket| Arc::new(Mutex::new(Peer::new(UnixStream::from(socket)))));
        let server = Arc::new(Server {
            name: left.name,
            spec: left.spec,
            scratch: left.scratch,
            telling: Mutex::default(),
            slots: Mutex::new(slots),
            link: Mutex::new(link),
        });
        let runs = match left.runs {
            RunsState::Here(kept) => {
                let keeper = Keeper::take_over(names(&server.name, dir), server.clone(), kept, losses)?;
                if !whole {
                    keeper.start_again();
                }
                Runs::Here(keeper)
            }
            RunsState::In { vm, starts } => {
                Runs::In(Arc::new(Owner::take_over(&vm, starts, machines.get(&vm))))
            }
        };
        Ok(Accelerator { server, runs })
    }
}

impl SlotState {
    /// # Errors
    /// Those of its zone.
    fn resume(self, losses: &mut Losses) -> anyhow::Result<Slot> {
        let SlotState { zone, used, served, library, reach } = self;
        let zone = Arc::new(HostZone::take_over(zone, losses)?);
        let (channels, window) = used.geometry();
        let channels =
            reach.map(|reach| anyhow::Ok(Channels { area: zone.resume_calls(channels, window)?, reach }));
        Ok(Slot { zone, used, served, library, channels: channels.transpose()? })
    }
}
