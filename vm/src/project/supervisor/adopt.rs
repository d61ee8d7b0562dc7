// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A supervisor goes on with what lives in its project's folder: the VMs, zones, networks and accelerators whose shims an earlier one has started.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Supervisor;
use crate::guest::health;
use crate::machine::{self, Machine, disks, growth};
use crate::project::accelerator::{self, Accelerator};
use crate::project::network::{self, Network};
use crate::project::revival;
use crate::project::state::StateDir;
use crate::project::zones::{self, HostZone, Place};
use crate::shim::handle::Safe;
use crate::shim::{self, Shim};
use crate::thread;

/// For a QEMU whose shim has died to end.
const DEATH: Duration = Duration::from_secs(5);
/// The pause between two looks whether it has.
const LOOK: Duration = Duration::from_millis(20);

/// A shim by what it is for.
#[derive(Debug)]
enum Kind {
    Zone,
    /// Zones for calls.
    Calls,
    Switch,
    /// The server of an accelerator on this host.
    Server,
    Vm,
    Unknown,
}

fn kind_of(name: &str) -> (Kind, &str) {
    let (kind, rest) = name.split_once('-').unwrap_or((name, ""));
    let kind = match kind {
        "zone" => Kind::Zone,
        "calls" => Kind::Calls,
        "switch" => Kind::Switch,
        "server" => Kind::Server,
        "vm" => Kind::Vm,
        _ => Kind::Unknown,
    };
    (kind, rest)
}

/// The shims that live.
fn living(dir: &StateDir) -> anyhow::Result<Vec<Shim>> {
    let mut living = Vec::new();
    for name in shim::handle::names(dir.path())? {
        living.extend(Shim::find(dir.path(), &name)?);
    }
    Ok(living)
}

/// Checks that this program can go on with what lives in a project's folder.
///
/// # Errors
/// Why it can't.
pub fn check(dir: &StateDir) -> anyhow::Result<()> {
    revival::noted(dir.path())?;
    for shim in living(dir)? {
        match kind_of(shim.name()).0 {
            Kind::Zone => zones::check(&shim),
            Kind::Calls => shim.record::<accelerator::Record>(shim::RECORD).map(drop),
            Kind::Switch => shim.record::<network::Record>(shim::RECORD).map(drop),
            Kind::Vm => machine::adopt::check(&shim),
            Kind::Server | Kind::Unknown => Ok(()),
        }?;
    }
    Ok(())
}

impl Supervisor {
    /// Goes on with what lives. What was just being started when the supervisor before ended is ended.
    ///
    /// # Errors
    /// This program can't go on with it, and nothing of it has been touched.
    pub(super) fn adopt(self: &Arc<Self>) -> anyhow::Result<()> {
        let (mut accelerators, mut vms) = (Vec::new(), Vec::new());
        for shim in living(&self.dir)? {
            let name = shim.name().to_owned();
            // The manager before has died before it knew what it would be.
            if shim.kept()?.is_empty() && !matches!(kind_of(&name).0, Kind::Server) {
                shim.end();
                continue;
            }
            let what = format!("what lives of the project can't be gone on with: {name}");
            match kind_of(&name) {
                (Kind::Zone, zone) => {
                    let adopted = HostZone::adopt(Place::all(Arc::new(Safe::of(shim)))).context(what)?;
                    self.dir.link_zone(zone, &adopted.path())?;
                    self.lock().zones.insert(zone.to_owned(), Arc::new(adopted));
                }
                (Kind::Switch, _) => {
                    let (name, network) = Network::adopt(shim, self.dir.path()).context(what)?;
                    self.lock().networks.insert(name, Arc::new(network));
                }
                (Kind::Calls, _) => accelerators.push(shim),
                (Kind::Vm, _) => vms.push(Machine::adopt(shim).context(what)?),
                (Kind::Server | Kind::Unknown, _) => {}
            }
        }
        for (name, zone) in self.lock().zones.iter() {
            for machine in &vms {
                if let Some(liveness) = machine.liveness(name) {
                    zone.hold_again(machine.name(), liveness);
                }
            }
        }
        self.lock().machines.extend(vms.iter().map(|machine| (machine.name().to_owned(), machine.clone())));
        for shim in accelerators {
            let machines = self.lock().machines.clone();
            let (name, adopted) = Accelerator::adopt(shim, self.dir.path(), &machines)
                .with_context(|| "an accelerator can't be gone on with")?;
            self.lock().accelerators.insert(name, Arc::new(adopted));
        }
        if vms.is_empty() {
            // What they lie over may have changed since.
            disks::discard(&self.dir, None);
        } else {
            self.lock().hypervisor = vms[0].hypervisor().name().to_owned();
        }
        let begun = Instant::now();
        while !self.bury() && begun.elapsed() < DEATH {
            std::thread::sleep(LOOK);
        }
        for machine in vms {
            self.go_on_with(machine)?;
        }
        Ok(())
    }

    /// Ends the memberships of VMs that have died with their shims. Returns whether none of them is left: a QEMU that was killed may take a while to end.
    pub(super) fn bury(&self) -> bool {
        let inner = self.lock();
        let known: BTreeSet<String> = inner.machines.keys().chain(inner.starting.keys()).cloned().collect();
        drop(inner);
        let mut are_gone = true;
        for zone in self.all_zones() {
            for member in zone.vms().into_iter().filter(|member| !known.contains(member)) {
                are_gone &= zone.gone_if_ended(&member);
            }
        }
        are_gone
    }

    fn go_on_with(self: &Arc<Self>, machine: Arc<Machine>) -> anyhow::Result<()> {
        let own = self.clone();
        if machine.has_ended() {
            // The supervisor before may have died in the middle of its next start.
            machine.end_unfinished();
            self.leave_zones(machine.name(), machine.zones().keys());
            let follow_up = move || own.follow_up(&machine, machine.sequel());
            thread::start("follow-up", follow_up)?;
            return Ok(());
        }
        machine.go_on(move |machine, exit| own.ended(machine, exit))?;
        if machine.is_growing() && machine.is_up() {
            let own = self.clone();
            // A VM that is ending has no memory any more; it must not end the others.
            if let Err(e) = growth::begin(&machine, move |machine| own.start_slowly(machine)) {
                crate::say!("the VM '{}': its memory does not grow on: {e:#}", machine.name());
            }
        }
        if let Some(check) = machine.spec().healthcheck.as_ref().filter(|_| machine.is_up()) {
            health::go_on(&machine, check, machine.up_for().unwrap_or_default())?;
        }
        Ok(())
    }
}
