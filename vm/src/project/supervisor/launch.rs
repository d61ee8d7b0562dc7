// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The start of one VM: QEMU with its zones, networks and disks, then the boot, then mounts, addresses and devices in the guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tombolo_start::layout::Layout;
use tombolo_topology::plan::VmPlan;

use super::Supervisor;
use super::members::mount_zone;
use crate::compose::disks::Format;
use crate::compose::{self, VmSpec, ZoneUse};
use crate::guest::{health, kit, seed, share};
use crate::machine::cgroup::Group;
use crate::machine::{Machine, Start, disks, growth};
use crate::project::accelerator::Accelerator;
use crate::project::control::Stage;
use crate::project::network::{Network, Nic};
use crate::project::zones::Invitation;
use crate::qemu::Hypervisor;
use crate::qemu::version::Qemu;
use crate::shim::Shim;

/// A VM that is to be started.
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) spec: VmSpec,
    /// The compose file's folder, in which the VM has its files.
    pub(super) folder: PathBuf,
    pub(super) qemu: Arc<Qemu>,
    pub(super) hypervisor: Hypervisor,
    pub(super) boot: Option<kit::Boot>,
    /// The zones of the compose file, or those that the VM had when it ended.
    pub(super) zones: BTreeMap<String, ZoneUse>,
    /// The machine of the same VM that ended.
    pub(super) before: Option<Arc<Machine>>,
    /// Starts in a row by the restart policy, if that policy starts the VM.
    pub(super) attempt: Option<u32>,
    /// No command has asked for the start.
    pub(super) again: bool,
    /// Give the VM all memory at its start, whatever the compose file says.
    pub(super) slow: bool,
    pub(super) placement: Option<VmPlan>,
    /// The formats of its disks' images in its QEMU before; empty where there was none.
    pub(super) formats: Vec<Format>,
}

impl Supervisor {
    /// Starts one VM, waits until it is ready, and prepares its guest. `registered` gets the machine as soon as its QEMU runs.
    pub(super) fn start_one(
        self: &Arc<Self>,
        wanted: Wanted,
        registered: &dyn Fn(&Arc<Machine>),
        report: &dyn Fn(Stage, &str),
    ) -> anyhow::Result<()> {
        report(Stage::Starting, growth::advice(&wanted.spec).unwrap_or_default());
        let zones = wanted.zones.clone();
        let nics = self.nics(&wanted.name, &wanted.spec);
        let machine = self.start_machine(wanted, &nics, registered)?;
        let own = self.clone();
        if let Err(e) = growth::begin(&machine, move |machine| own.start_slowly(machine)) {
            machine.cancel();
            return Err(e);
        }
        machine.follow(report)?;
        self.mount_zones(&machine, &zones, report)?;
        set_addresses(&machine, &nics, report)?;
        let missing = self.make_devices(&machine, report)? + &mount_shares(&machine, report)?;
        machine.set_up();
        if let Some(check) = &machine.spec().healthcheck {
            health::begin(&machine, check)?;
        }
        let status = machine.status();
        let growing = status.growth.map(|g| format!(", {}", g.line())).unwrap_or_default();
        let unreached = self.unreached(machine.name()).unwrap_or_default();
        let unplugged = self.unplugged(machine.name(), machine.spec());
        report(Stage::Up, &format!("{:.1} s{growing}{missing}{unreached}{unplugged}", status.uptime));
        Ok(())
    }

    /// That no port of the host leads to a VM, for the end of a message; `None`: those that the file names do.
    fn unreached(&self, vm: &str) -> Option<String> {
        let networks: Vec<_> = self.lock().networks.values().cloned().collect();
        let without = networks.iter().find(|network| !network.await_ports(vm))?;
        let log = without.log();
        Some(format!(", but no port of the host leads to it: its passt does not run; see {}", log.display()))
    }

    /// That a VM whose agent has set up its devices has none in a network, for the end of a message.
    fn unplugged(&self, vm: &str, spec: &VmSpec) -> String {
        let has_agent = spec.ready == compose::Ready::Agent;
        let networks: Vec<_> = self.lock().networks.clone().into_iter().collect();
        let own = networks.iter().filter(|(name, _)| has_agent && spec.networks.0.contains_key(name));
        let without = own.filter(|(_, network)| !network.await_device(vm));
        let note = |(name, network): &(String, Arc<Network>)| {
            format!(", but its port in the network '{name}' is down; see {}", network.log().display())
        };
        without.map(note).collect()
    }

    /// Starts QEMU, adds the machine to the project's, and waits until its monitor answers.
    fn start_machine(
        self: &Arc<Self>,
        wanted: Wanted,
        nics: &[Nic],
        registered: &dyn Fn(&Arc<Machine>),
    ) -> anyhow::Result<Arc<Machine>> {
        self.dir.renew()?;
        let name = wanted.name.clone();
        let shim = match &wanted.before {
            Some(before) if !before.shim().has_ended() => before.shim().clone(),
            _ => self.new_shim(&name)?,
        };
        self.lock().starting.insert(name.clone(), shim.clone());
        self.start_in(shim.clone(), wanted, nics, registered).inspect_err(|_| {
            // It is no machine's where QEMU has not been started.
            self.lock().starting.remove(&name);
            let machine = self.lock().machines.get(&name).cloned();
            if machine.is_none_or(|machine| !Arc::ptr_eq(machine.shim(), &shim)) {
                shim.end();
            }
        })
    }

    /// A shim for a VM, whose machine before, if there was one, has ended.
    fn new_shim(&self, vm: &str) -> anyhow::Result<Arc<Shim>> {
        let before = self.lock().machines.get(vm).cloned();
        if let Some(before) = before {
            before.shim().end();
        }
        Ok(Arc::new(Shim::start(self.dir.path(), &format!("vm-{vm}"))?))
    }

    fn start_in(
        self: &Arc<Self>,
        shim: Arc<Shim>,
        wanted: Wanted,
        nics: &[Nic],
        registered: &dyn Fn(&Arc<Machine>),
    ) -> anyhow::Result<Arc<Machine>> {
        let Wanted {
            name,
            spec,
            folder,
            qemu,
            hypervisor,
            boot,
            zones,
            before,
            attempt,
            again,
            slow,
            placement,
            formats,
        } = wanted;
        let memory = if slow { Layout::slow(spec.memory.0) } else { growth::layout(&name, &spec)? };
        let devices = growth::Taken::take(&name, &spec, shim.pid())?;
        let given = spec.cloud_init.as_ref();
        let seed = given.map(|given| seed::make(&self.origin, &name, given, nics)).transpose()?;
        let drives = disks::drives(&self.dir, &name, &spec, &formats)?;
        let group = Group::of(&self.dir, &name, &spec)?;
        let start = Start {
            name: &name,
            spec: &spec,
            folder,
            qemu: &qemu,
            hypervisor,
            boot,
            zones: self.invite(&name, &zones)?,
            accelerators: self.invite_to_accelerators(&name, &spec, &zones)?,
            memory,
            placement,
            nics: nics.to_vec(),
            drives,
            seed,
            group,
            devices,
            dir: &self.dir,
            shim,
            before: before.as_deref(),
            attempt,
            again,
        };
        let own = self.clone();
        let ended = move |machine: &Arc<Machine>, exit| own.ended(machine, exit);
        // Also a QEMU whose monitor never answers is one that `ps` lists and that can be cancelled.
        let add = |machine: &Arc<Machine>| {
            let mut inner = self.lock();
            inner.starting.remove(&name);
            inner.machines.insert(name.clone(), machine.clone());
            drop(inner);
            registered(machine);
            // One that `down` has not found in the list.
            if self.is_ending() {
                machine.cancel();
            }
            self.tend_places();
        };
        Machine::start(start, ended, add).inspect_err(|_| self.leave_zones(&name, zones.keys()))
    }

    /// Mounts the zones in the guest, as far as `zones` says so.
    fn mount_zones(
        &self,
        machine: &Machine,
        zones: &BTreeMap<String, ZoneUse>,
        report: &dyn Fn(Stage, &str),
    ) -> anyhow::Result<()> {
        for (name, zone_use) in zones {
            if let Some(path) = &zone_use.mount {
                report(Stage::Preparing, &format!("mount {name} on {path}"));
            }
            let zone = self.zone(name)?;
            mount_zone(machine, name, &zone, zone_use)?;
        }
        Ok(())
    }

    /// Makes the devices of a VM's accelerators in its guest. Returns what the guest lacks for using them, for the end of a message.
    fn make_devices(&self, machine: &Arc<Machine>, report: &dyn Fn(Stage, &str)) -> anyhow::Result<String> {
        if let Some(owned) = self.owned_by(machine.name()) {
            report(Stage::Preparing, "its accelerator's server");
            owned.serve(machine)?;
        }
        let spec = machine.spec();
        let mut without_library = Vec::new();
        if spec.ready == compose::Ready::Agent {
            for (name, accelerator) in self.accelerators_of(spec) {
                report(Stage::Preparing, &format!("accelerator {name}"));
                if !accelerator.set_up(machine)? {
                    without_library.push(format!("{} in it for {name}", accelerator.api().library()));
                }
            }
        }
        if without_library.is_empty() {
            return Ok(String::new());
        }
        Ok(format!(", no {}: see docs/accelerators.md", without_library.join(", no ")))
    }

    fn accelerators_of(&self, spec: &VmSpec) -> Vec<(String, Arc<Accelerator>)> {
        let inner = self.lock();
        let names = spec.accelerators.0.keys();
        names.filter_map(|name| Some((name.clone(), inner.accelerators.get(name)?.clone()))).collect()
    }

    /// The VM's devices in networks.
    fn nics(&self, vm: &str, spec: &VmSpec) -> Vec<Nic> {
        let inner = self.lock();
        let networks = spec.networks.0.keys().filter_map(|name| inner.networks.get(name));
        networks.filter_map(|network| network.nic(vm)).collect()
    }

    /// Makes the VM a member of `zones`.
    ///
    /// # Errors
    /// A zone refuses. The VM is a member of none then.
    fn invite(
        &self,
        vm: &str,
        zones: &BTreeMap<String, ZoneUse>,
    ) -> anyhow::Result<Vec<(String, ZoneUse, Invitation)>> {
        let mut invitations = Vec::new();
        for (name, zone_use) in zones {
            match self.zone(name).and_then(|zone| zone.invite(vm, zone_use)) {
                Ok(invitation) => invitations.push((name.clone(), zone_use.clone(), invitation)),
                Err(e) => {
                    self.leave_zones(vm, invitations.iter().map(|(name, ..)| name));
                    return Err(e);
                }
            }
        }
        Ok(invitations)
    }

    /// Makes the VM a member of its accelerators' zones, and of the zones of its clients if it owns an accelerator.
    ///
    /// # Errors
    /// A zone refuses. The VM is a member of none then, of those in `zones` neither.
    fn invite_to_accelerators(
        &self,
        vm: &str,
        spec: &VmSpec,
        zones: &BTreeMap<String, ZoneUse>,
    ) -> anyhow::Result<Vec<(String, Invitation)>> {
        let mut invitations = Vec::new();
        let used = self.accelerators_of(spec).into_iter().map(|(_, accelerator)| accelerator);
        for accelerator in used.chain(self.owned_by(vm)) {
            let invited = accelerator.invite(vm).inspect_err(|_| self.leave_zones(vm, zones.keys()))?;
            invitations.extend(invited);
        }
        Ok(invitations)
    }
}

/// Sets the addresses of the guest's devices, if the guest has an agent.
fn set_addresses(machine: &Machine, nics: &[Nic], report: &dyn Fn(Stage, &str)) -> anyhow::Result<()> {
    if machine.spec().ready == compose::Ready::Agent {
        for nic in nics {
            report(Stage::Preparing, &format!("network {}", nic.net));
            nic.set_address(machine.name(), machine.agent())?;
        }
    }
    Ok(())
}

/// Mounts the host's folders in a guest that has an agent. Returns those that the guest can't use, for the end of a message.
fn mount_shares(machine: &Machine, report: &dyn Fn(Stage, &str)) -> anyhow::Result<String> {
    let spec = machine.spec();
    if spec.share.is_empty() || spec.ready != compose::Ready::Agent {
        return Ok(String::new());
    }
    report(Stage::Preparing, "folders of the host");
    let shares = share::mount(machine.agent(), machine.name(), &spec.share)?;
    let missing =
        shares.iter().filter(|share| !share.there).map(|share| format!(", {}", share.state)).collect();
    machine.set_shares(shares);
    Ok(missing)
}
