// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPUs of processes that serve VMs: the switch of a network, the server of an accelerator. Those of VMs with `topology` run on reserved CPUs of
//! their VMs' nodes, where QEMU's own threads run too.

use serde::{Deserialize, Serialize};
use tombolo_topology::cpus::CpuSet;
use tombolo_topology::plan::VmPlan;

use crate::compose::Compose;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use crate::machine::placement::requests;
    use tombolo_topology::plan::{Rules, plan};

    /// The processes of a compose file on a host with two nodes of four CPUs.
    fn services(text: &str) -> Vec<(String, String)> {
        let project = Project::parse(std::path::Path::new("/p/tombolo.toml"), text).unwrap();
        let compose = &project.compose;
        let host = tombolo_topology::read::synthetic("package:2 [numa(memory=16GiB)] core:4 pu:1").unwrap();
        let rules = Rules { reserve: compose.reserve, ..Rules::default() };
        let requests = requests(compose.vm.iter().map(|(name, spec)| (name.as_str(), spec)));
        let plan = plan(&host, &rules, &requests).unwrap();
        let services = planned(compose, &plan.vms);
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
}
