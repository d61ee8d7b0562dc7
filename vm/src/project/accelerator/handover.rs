// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An accelerator that goes on in the next program of this process: its server, the connection to it, and the zones of its VMs.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tombolo_zone::doorbell::handover::Paused;
use tombolo_zone::keep::{Keep, Kept};

use super::seat::{Channels, Reach, Seat};
use super::{Accelerator, Runs, Server, lock, names};
use crate::compose::accelerator::{AccelSpec, AccelUse};
use crate::machine::Machine;
use crate::project::keeper::{Keeper, KeeperState};
use crate::project::owner::Owner;
use crate::project::peer::Peer;
use crate::project::zones::{HostZone, HostZoneState};

/// What the next program needs to go on with an accelerator.
#[derive(Debug, Serialize, Deserialize)]
pub struct AcceleratorState {
    name: String,
    spec: AccelSpec,
    scratch: Option<PathBuf>,
    seats: BTreeMap<String, SeatState>,
    link: Option<Kept>,
    runs: RunsState,
}

#[derive(Debug, Serialize, Deserialize)]
struct SeatState {
    zone: HostZoneState,
    used: AccelUse,
    served: Option<bool>,
    library: Option<bool>,
    /// What the owner VM has of the zone; `None`: no VM serves it.
    reach: Option<Reach>,
}

#[derive(Debug, Serialize, Deserialize)]
enum RunsState {
    Here(KeeperState),
    In { vm: String, starts: u32 },
}

impl Accelerator {
    /// Lets the zones' doorbells stand still until what is returned is dropped, and notes what the next program needs; nobody is in the
    /// household, so that the server owes no answer.
    ///
    /// # Errors
    /// Those of the zones.
    pub fn hand_over(&self, keep: &mut Keep) -> anyhow::Result<(AcceleratorState, Vec<Paused>)> {
        let server = &self.server;
        let link = lock(&server.link).as_ref().map(|link| keep.add(&*lock(link).socket()));
        let (mut seats, mut paused) = (BTreeMap::new(), Vec::new());
        for (vm, seat) in &*lock(&server.seats) {
            let (zone, bells) = seat.zone.hand_over(keep)?;
            paused.push(bells);
            let reach = seat.channels.as_ref().map(|channels| channels.reach);
            let (used, served, library) = (seat.used.clone(), seat.served, seat.library);
            seats.insert(vm.clone(), SeatState { zone, used, served, library, reach });
        }
        let runs = match &self.runs {
            Runs::Here(keeper) => RunsState::Here(keeper.hand_over()),
            Runs::In(owner) => RunsState::In { vm: owner.vm().to_owned(), starts: owner.starts() },
        };
        let (name, spec, scratch) = (server.name.clone(), server.spec.clone(), server.scratch.clone());
        Ok((AcceleratorState { name, spec, scratch, seats, link, runs }, paused))
    }

    /// Goes on with an accelerator of the program before; `dir` is the project's folder.
    ///
    /// # Errors
    /// Those of its zones, and when its server is no child of this process.
    pub fn take_over(
        left: AcceleratorState,
        dir: &Path,
        machines: &BTreeMap<String, Arc<Machine>>,
    ) -> anyhow::Result<Accelerator> {
        let mut seats = BTreeMap::new();
        for (vm, seat) in left.seats {
            let SeatState { zone, used, served, library, reach } = seat;
            let zone = Arc::new(HostZone::take_over(zone)?);
            let (channels, window) = used.geometry();
            let channels = reach
                .map(|reach| anyhow::Ok(Channels { area: zone.resume_calls(channels, window)?, reach }))
                .transpose()?;
            seats.insert(vm, Seat { zone, used, served, library, channels });
        }
        let link = left.link.map(Kept::take).transpose()?;
        let link = link.map(|socket| Arc::new(Mutex::new(Peer::new(UnixStream::from(socket)))));
        let server = Arc::new(Server {
            name: left.name,
            spec: left.spec,
            scratch: left.scratch,
            telling: Mutex::default(),
            seats: Mutex::new(seats),
            link: Mutex::new(link),
        });
        let runs = match left.runs {
            RunsState::Here(kept) => {
                Runs::Here(Keeper::take_over(names(&server.name, dir), server.clone(), kept)?)
            }
            RunsState::In { vm, starts } => {
                Runs::In(Arc::new(Owner::take_over(&vm, starts, machines.get(&vm))))
            }
        };
        Ok(Accelerator { server, runs })
    }
}
