// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The places of VMs on the host: the plan for those of a compose file that say `topology`. It is made before any start, and applied
//! before a guest runs its first instruction.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tombolo_topology::apply::{self, Thread};
use tombolo_topology::dedicated::{Dedicated, HostFlags};
use tombolo_topology::plan::{Plan, Rules, VmPlan, plan};
use tombolo_topology::qemu::{self, Argument, Options, Vendor};
use tombolo_topology::read;
use tombolo_topology::request::Request;

use crate::compose::{Compose, VmSpec};
use crate::machine::{bypass, cgroup, partition};
use crate::project::control::Status;
use crate::qemu::Hypervisor;
use crate::qemu::qmp::Qmp;
use crate::qemu::version::Qemu;

/// The part of the host that a running VM lies on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The plan by which it was started.
    pub plan: VmPlan,
    /// The threads of its vCPUs; empty until QEMU has told them.
    #[serde(default)]
    pub threads: Vec<Thread>,
    /// The cgroup partition of its vCPUs.
    #[serde(default)]
    pub partition: Option<PathBuf>,
    /// The features of CPUs of its own; none under TCG.
    #[serde(default)]
    pub dedicated: Dedicated,
}

/// The requests of the VMs that say `topology`.
pub fn requests<'a>(vms: impl Iterator<Item = (&'a str, &'a VmSpec)>) -> Vec<Request> {
    let placed = vms.filter_map(|(name, spec)| {
        Some(Request {
            name: name.to_owned(),
            part: spec.topology.clone()?,
            cpus: spec.cpus,
            memory: spec.memory.0,
            pages: spec.pages,
            devices: spec.addresses().iter().map(ToString::to_string).collect(),
        })
    });
    placed.collect()
}

/// The rules that running VMs of these projects set: theirs is taken. VMs that `except` names are left out.
pub fn rules(compose: &Compose, running: &[Status], except: impl Fn(&Status, &str) -> bool) -> Rules {
    let mut rules = Rules { reserve: compose.reserve, ..Rules::default() };
    for project in running {
        let vms = project.vms.iter().filter(|vm| vm.pid.is_some() && !except(project, &vm.name));
        // Also that of a VM that is left out goes back when it is stopped.
        for placement in project.vms.iter().filter_map(|vm| vm.placement.as_ref()) {
            if placement.partition.is_some() {
                rules.isolated.extend(placement.plan.isolated_cpus().iter());
            }
        }
        for plan in vms.filter_map(|vm| Some(&vm.placement.as_ref()?.plan)) {
            rules.taken.extend(plan.host_cpus().iter().chain(plan.idle.iter()));
            for node in &plan.nodes {
                *rules.taken_memory.entry(node.host).or_default() += node.memory;
            }
        }
    }
    rules
}

/// Plans VMs together.
///
/// # Errors
/// The first that can't have what it wants, with the remedy.
pub fn plan_all(requests: &[Request], rules: &Rules) -> anyhow::Result<Plan> {
    Ok(plan(&read::host()?, rules, requests)?)
}

/// The plans of the VMs that are to be started, by name. The host is only looked at where one says `topology`.
///
/// # Errors
/// As [`plan_all`].
pub fn of_starting<'a>(
    vms: impl Iterator<Item = (&'a str, &'a VmSpec)>,
    rules: impl FnOnce() -> Rules,
) -> anyhow::Result<BTreeMap<String, VmPlan>> {
    let requests = requests(vms);
    if requests.is_empty() {
        return Ok(BTreeMap::new());
    }
    let plan = plan_all(&requests, &rules())?;
    Ok(plan.vms.into_iter().map(|vm| (vm.name.clone(), vm)).collect())
}

/// Checks that a VM that says `isolate` could have its CPUs for itself. Nothing is changed.
///
/// # Errors
/// Something is missing; the error names the place and the remedy.
pub fn check_isolation(compose: &Compose, vm: &str, plan: &VmPlan) -> anyhow::Result<()> {
    if !compose.vm.get(vm).is_some_and(|spec| spec.isolate) {
        return Ok(());
    }
    let checked = cgroup::parent().and_then(|parent| partition::check(&parent, &plan.isolated_cpus()));
    checked.with_context(|| format!("vm.{vm}.isolate"))
}

/// Returns the features that KVM gives a VM that lies on a part of this host.
pub fn dedicated(plan: &VmPlan, spec: &VmSpec, hypervisor: Hypervisor) -> Dedicated {
    match hypervisor {
        Hypervisor::Kvm => Dedicated::of(plan, spec.isolate, spec.cpu_pm, &HostFlags::read()),
        Hypervisor::Tcg => Dedicated::default(),
    }
}

/// QEMU's arguments for a VM that lies on a part of the host, `-cpu` included; its devices are in [`root_complexes`].
///
/// # Errors
/// This QEMU can't express the plan.
pub fn arguments(
    plan: &VmPlan,
    spec: &VmSpec,
    qemu: &Qemu,
    hypervisor: Hypervisor,
    shared: bool,
) -> anyhow::Result<Vec<Argument>> {
    let options = options(qemu, hypervisor, shared);
    let vendor = match hypervisor {
        Hypervisor::Kvm => Vendor::of_host(),
        Hypervisor::Tcg => Vendor::Emulated,
    };
    let [.., value] = hypervisor.arguments(qemu);
    let dedicated = dedicated(plan, spec, hypervisor);
    let flags = qemu::cpu_flags(plan, vendor) + &dedicated.cpu_flags();
    let mut list = vec![("-cpu", format!("{value}{flags}"))];
    list.extend(dedicated.arguments());
    list.extend(qemu::arguments(plan, &options)?);
    Ok(list)
}

/// QEMU's arguments for the devices of a VM that lies on a part of the host, and the root complexes that they are behind: the last devices of the
/// command line, as [`qemu::root_complexes`] says.
pub fn root_complexes(plan: &VmPlan, qemu: &Qemu, hypervisor: Hypervisor) -> Vec<Argument> {
    qemu::root_complexes(plan, &options(qemu, hypervisor, false))
}

fn options(qemu: &Qemu, hypervisor: Hypervisor, shared: bool) -> Options<'static> {
    let cpu = match hypervisor {
        Hypervisor::Kvm => "host",
        Hypervisor::Tcg => "max",
    };
    let spare_slot = hypervisor == Hypervisor::Tcg;
    let device = |device: &tombolo_topology::model::Device| {
        Some(format!("vfio-pci,id={},host={}", bypass::device_id(&device.address), device.address))
    };
    Options { version: qemu.version, cpu, shared, bound: true, spare_slot, device }
}

/// The threads of a QEMU's vCPUs.
///
/// # Errors
/// QEMU does not tell them.
pub fn threads(qmp: &Qmp) -> anyhow::Result<Vec<Thread>> {
    let reply = qmp.execute_value("query-cpus-fast", &json!({}))?;
    apply::threads(&reply).context("QEMU does not tell the threads of its vCPUs")
}
