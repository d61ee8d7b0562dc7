// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Switches, accelerator servers and interrupts of devices on reserved CPUs. What runs is compared with what it should be each second, so that a
//! process that was started again, and an interrupt that a guest has asked for since, get their CPUs, and a process without such VMs
//! gets the supervisor's back.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use tombolo_topology::affinity;
use tombolo_topology::cpus::CpuSet;
use tombolo_topology::plan::VmPlan;
use tombolo_zone::numa::Nodes;

use super::{Inner, Supervisor};
use crate::compose::{Project, VmSpec, ZoneSpec};
use crate::machine::Machine;
use crate::project::changes::Kind;
use crate::project::services::{self, Service, taken};

/// Processes that were confined.
#[derive(Clone, Debug)]
pub(super) struct Confined {
    /// The supervisor's CPUs at its start. Later ones may lack those of a partition, which come back.
    own: CpuSet,
    /// The CPUs of confined processes.
    processes: BTreeMap<u32, CpuSet>,
}

impl Default for Confined {
    fn default() -> Confined {
        let own = affinity::of_thread(std::process::id()).unwrap_or_default();
        Confined { own, processes: BTreeMap::new() }
    }
}

impl Inner {
    /// The processes that serve VMs, as they should be placed.
    pub(super) fn services(&self) -> Vec<Service> {
        let placed: Vec<(&Arc<Machine>, &VmPlan)> = self
            .machines
            .values()
            .filter(|machine| !machine.has_ended())
            .filter_map(|machine| Some((machine, machine.plan()?)))
            .collect();
        let taken = taken(placed.iter().map(|(_, plan)| *plan));
        let networks = self.networks.iter().filter(|(_, network)| network.spec().cpus.is_empty());
        let networks = networks.map(|(name, network)| {
            let users = placed.iter().filter(|(machine, _)| machine.spec().networks.0.contains_key(name));
            let (process, _) = network.process();
            Service::of(Kind::Network, name, process, users.map(|(_, plan)| *plan), &taken)
        });
        let accelerators = self.accelerators.iter().filter(|(_, accelerator)| accelerator.owner().is_none());
        let accelerators = accelerators.map(|(name, accelerator)| {
            let users = placed.iter().filter(|(machine, _)| machine.spec().accelerators.0.contains_key(name));
            let process = accelerator.process();
            Service::of(Kind::Accelerator, name, process, users.map(|(_, plan)| *plan), &taken)
        });
        networks.chain(accelerators).collect()
    }
}

impl Supervisor {
    /// The nodes for the memory of a zone that is about to be made: those of VMs that run or are about to be started.
    pub(super) fn zone_nodes(
        &self,
        project: &Project,
        zone: &str,
        spec: &ZoneSpec,
        starting: &BTreeMap<String, VmPlan>,
    ) -> Option<Nodes> {
        let inner = self.lock();
        let uses = |vm: &VmSpec| vm.zones.contains_key(zone);
        let running = inner.machines.values().filter(|machine| !machine.has_ended() && uses(machine.spec()));
        let starting = starting
            .iter()
            .filter(|(vm, _)| project.compose.vm.get(*vm).is_some_and(uses))
            .map(|(_, plan)| plan);
        let nodes = services::zone_nodes(running.filter_map(|machine| machine.plan()).chain(starting))?;
        let placed = services::with_room(nodes.clone(), spec.size.0, services::free_of);
        if placed.is_none() {
            crate::say!(
                "the zone '{zone}' is where the kernel puts it: {} there is too little room for it",
                nodes
            );
        }
        placed
    }

    /// Confines the processes that serve VMs to their CPUs, and places the interrupts of passed-through devices.
    pub(super) fn tend_places(&self) {
        let (services, machines): (Vec<Service>, Vec<Arc<Machine>>) = {
            let inner = self.lock();
            (inner.services(), inner.machines.values().cloned().collect())
        };
        let mut confined = self.confined.lock().unwrap_or_else(PoisonError::into_inner);
        confined
            .processes
            .retain(|process, _| services.iter().any(|service| service.process == Some(*process)));
        for service in &services {
            if let Some(process) = service.process {
                confine(process, service, &mut confined);
            }
        }
        drop(confined);
        for machine in machines {
            machine.tend_interrupts();
        }
    }
}

fn confine(process: u32, service: &Service, confined: &mut Confined) {
    let before = confined.processes.get(&process);
    let (cpus, own) = match before {
        None if service.cpus.is_empty() => return,
        Some(before) if *before == service.cpus => return,
        Some(_) if service.cpus.is_empty() => (confined.own.clone(), true),
        _ => (service.cpus.clone(), false),
    };
    if let Err(e) = affinity::confine(process, &cpus) {
        crate::say!("the {} does not run on the CPUs {cpus}: {e:#}", service.title());
    }
    // A refusal is not repeated each second.
    match own {
        true => confined.processes.remove(&process),
        false => confined.processes.insert(process, cpus),
    };
}
