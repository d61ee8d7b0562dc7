// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPUs and nodes of what VMs share: the switch of a network, the server of an accelerator, the memory of a zone. Those of VMs with `topology` run on reserved CPUs of
//! their VMs' nodes, where QEMU's own threads run too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tombolo_topology::cpus::CpuSet;
use tombolo_topology::plan::VmPlan;
use tombolo_zone::numa::Nodes;

use crate::compose::{Backing, Compose};
use crate::project::changes::Kind;

/// A process that serves VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// A network or an accelerator.
    pub kind: Kind,
    /// The name of what it serves.
    pub name: String,
    /// The process, while it runs.
    pub process: Option<u32>,
    /// The host's CPUs that it runs on. Empty: the kernel decides.
    pub cpus: CpuSet,
    /// Its VMs with `topology`.
    pub vms: Vec<String>,
}

impl Service {
    /// The process of a part that these VMs use. It gets none of the CPUs that are `taken` by vCPUs.
    pub fn of<'a>(
        kind: Kind,
        name: &str,
        process: Option<u32>,
        users: impl Iterator<Item = &'a VmPlan>,
        taken: &CpuSet,
    ) -> Service {
        let (mut cpus, mut vms) = (CpuSet::default(), Vec::new());
        for plan in users {
            cpus.extend(plan.service_cpus().iter());
            vms.push(plan.name.clone());
        }
        Service { kind, name: name.to_owned(), process, cpus: cpus.without(taken), vms }
    }

    /// Its name in messages.
    pub fn title(&self) -> String {
        let process = if self.kind == Kind::Network { "switch" } else { "server" };
        format!("{process} of {}", self.name)
    }
}

/// The CPUs that vCPUs have.
pub fn taken<'a>(plans: impl Iterator<Item = &'a VmPlan>) -> CpuSet {
    let sets: Vec<CpuSet> = plans.map(VmPlan::host_cpus).collect();
    sets.iter().flat_map(CpuSet::iter).collect()
}

/// The processes of a compose file whose VMs are planned so, where they get CPUs. A network that says `cpus` keeps those, and an accelerator that
/// a VM owns has no process on the host.
pub fn planned(compose: &Compose, plans: &[VmPlan]) -> Vec<Service> {
    let taken = taken(plans.iter());
    let placed = |name: &str| plans.iter().find(|plan| plan.name == name);
    let networks = compose.net.iter().filter(|(_, spec)| spec.cpus.is_empty()).map(|(name, _)| {
        let users = compose.vm.iter().filter(|(_, vm)| vm.networks.0.contains_key(name));
        Service::of(Kind::Network, name, None, users.filter_map(|(vm, _)| placed(vm)), &taken)
    });
    let accelerators = compose.accel.iter().filter(|(_, spec)| spec.vm.is_none()).map(|(name, _)| {
        let users = compose.vm.iter().filter(|(_, vm)| vm.accelerators.0.contains_key(name));
        Service::of(Kind::Accelerator, name, None, users.filter_map(|(vm, _)| placed(vm)), &taken)
    });
    networks.chain(accelerators).filter(|service| !service.cpus.is_empty()).collect()
}

/// The host's nodes for the memory of a zone whose VMs lie on these parts of the host: those of their CPUs. `None`: no such VM uses it.
pub fn zone_nodes<'a>(users: impl Iterator<Item = &'a VmPlan>) -> Option<Nodes> {
    let mut nodes: Vec<u32> = users
        .flat_map(|plan| plan.vcpus.iter().filter_map(|vcpu| Some(plan.nodes.get(vcpu.node as usize)?.host)))
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    match nodes.len() {
        0 => None,
        1 => Some(Nodes::Bind(nodes)),
        _ => Some(Nodes::Interleave(nodes)),
    }
}

/// Those of `nodes` that have room for a zone of `size` bytes; `free`: bytes that a node can give. `None`: the kernel decides, since a bound
/// zone that outgrows its nodes ends its members.
pub fn with_room(nodes: Nodes, size: u64, free: impl Fn(u32) -> Option<u64>) -> Option<Nodes> {
    let (Nodes::Bind(list) | Nodes::Interleave(list)) = &nodes;
    let share = size / list.len().max(1) as u64;
    list.iter().all(|node| free(*node).is_none_or(|free| free >= share)).then_some(nodes)
}

/// Bytes that a node of this host can give: free ones, and the page cache.
pub fn free_of(node: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?;
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.split_once(name)).map(|(_, value)| value);
        line?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    Some((of("MemFree:")? + of("FilePages:").unwrap_or(0)) << 10)
}

/// The nodes of a compose file's zones, as far as its VMs with `topology` choose them.
pub fn planned_zones(compose: &Compose, plans: &[VmPlan]) -> BTreeMap<String, Nodes> {
    let memory = compose.zone.iter().filter(|(_, spec)| !matches!(spec.backing, Backing::File(_)));
    let chosen = memory.filter_map(|(name, _)| {
        let uses = |plan: &&VmPlan| compose.vm.get(&plan.name).is_some_and(|vm| vm.zones.contains_key(name));
        Some((name.clone(), zone_nodes(plans.iter().filter(uses))?))
    });
    chosen.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use crate::machine::placement::requests;
    use tombolo_topology::plan::{Rules, plan};

    /// A compose file, and its plan on a host with two nodes of four CPUs.
    fn planned_here(text: &str) -> (Compose, Vec<VmPlan>) {
        let project = Project::parse(std::path::Path::new("/p/tombolo.toml"), text).unwrap();
        let compose = project.compose;
        let host = tombolo_topology::read::synthetic("package:2 [numa(memory=16GiB)] core:4 pu:1").unwrap();
        let rules = Rules { reserve: compose.reserve, ..Rules::default() };
        let requests = requests(compose.vm.iter().map(|(name, spec)| (name.as_str(), spec)));
        let plans = plan(&host, &rules, &requests).unwrap().vms;
        (compose, plans)
    }

    /// The processes of a compose file.
    fn services(text: &str) -> Vec<(String, String)> {
        let (compose, plans) = planned_here(text);
        let services = planned(&compose, &plans);
        services.iter().map(|service| (service.title(), service.cpus.to_string())).collect()
    }

    const VMS: &str = "[net.lan]\n[net.both]\n[net.own]\ncpus = [2]\n[net.free]\n[accel.cl]\n[accel.owned]\nvm = \"c\"\n\
         [vm.a]\ntopology = \"node:1\"\nnetworks = [\"lan\", \"both\", \"own\"]\naccelerators = [\"cl\", \"owned\"]\n\
         [vm.b]\ntopology = \"node:0\"\nnetworks = [\"both\"]\n[vm.c]\nnetworks = [\"free\"]\ndevices = [\"0000:01:00.0\"]\n";

    #[test]
    fn processes_that_serve_vms_run_on_the_reserved_cpus_of_their_vms_nodes() {
        let named = |list: &[(&str, &str)]| -> Vec<(String, String)> {
            list.iter().map(|(title, cpus)| ((*title).to_owned(), (*cpus).to_owned())).collect()
        };
        let expected = [("switch of both", "0,4"), ("switch of lan", "4"), ("server of cl", "4")];
        assert_eq!(services(&format!("reserve = 1\n{VMS}")), named(&expected));
        assert_eq!(services(VMS), named(&[]), "without reserved CPUs the kernel decides");
    }

    #[test]
    fn the_memory_of_a_zone_comes_from_the_nodes_of_its_vms() {
        let zones = ["one", "both", "nobody", "free"].map(|name| format!("[zone.{name}]\nsize = \"8M\"\n"));
        let vms = "[zone.file]\nsize = \"8M\"\nbacking = \"./f\"\n\
             [vm.a]\ntopology = \"node:1\"\nzones = { one = {}, both = {}, file = {} }\n\
             [vm.b]\ntopology = \"node:0\"\nzones = { both = {} }\n[vm.c]\nzones = { free = {}, one = {} }\n";
        let (compose, plans) = planned_here(&(zones.concat() + vms));
        let expected = [("both", Nodes::Interleave(vec![0, 1])), ("one", Nodes::Bind(vec![1]))];
        let expected = expected.map(|(name, nodes)| (name.to_owned(), nodes));
        assert_eq!(planned_zones(&compose, &plans), BTreeMap::from(expected));
    }

    #[test]
    fn a_zone_that_its_nodes_have_no_room_for_is_bound_to_none() {
        let free = |node: u32| [Some(10), Some(4), None].get(node as usize).copied().flatten();
        let both = Nodes::Interleave(vec![0, 1]);
        assert_eq!(with_room(both.clone(), 8, free), Some(both.clone()));
        assert_eq!(with_room(both, 10, free), None);
        assert_eq!(with_room(Nodes::Bind(vec![1]), 5, free), None);
        assert!(with_room(Nodes::Bind(vec![2]), 5, free).is_some(), "a node that says nothing");
        assert!(free_of(u32::MAX).is_none());
    }
}
