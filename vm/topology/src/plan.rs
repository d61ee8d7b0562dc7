// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The plan of VMs on the host: a pure function of the host's topology, of the parts that are taken, and of the VMs' requests.
//!
//! CPUs are reserved for the host first. Then VMs choose: those that name CPUs, those that name a node, those that want CPUs close together,
//! and at last those that take what is left. Nothing is planned twice, and an error says which object is missing and what to change.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::memory::{self, PageSize};
use crate::model::{Access, Cpu, Device, Root, Topology};
use crate::place;
use crate::request::{Part, Request};
use crate::shape::{self, Shape, Slot};

/// The parts of the host that VMs must not get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// CPUs of each node that stay with the host; whole cores are kept, so it may be more.
    pub reserve: u32,
    /// CPUs of others.
    pub taken: CpuSet,
    /// CPUs that VMs' own cgroup partitions keep outside of the cpuset of the process that looked. They are the VMs', not lost.
    pub isolated: CpuSet,
    /// Bytes of others, by node.
    pub taken_memory: BTreeMap<u32, u64>,
}

/// The parts of the host for each VM, and the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// In the order of the requests.
    pub vms: Vec<VmPlan>,
    /// CPUs that stay with the host, by node.
    pub reserved: BTreeMap<u32, CpuSet>,
    /// Free CPUs.
    pub free: CpuSet,
    /// Bytes that no VM has, by node.
    pub free_memory: BTreeMap<u32, u64>,
}

/// The part of the host for one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPlan {
    /// The VM's name.
    pub name: String,
    /// Its virtual CPUs, in the order in which its kernel numbers them.
    pub vcpus: Vec<Vcpu>,
    /// The widest that its packages, dies and cores are.
    pub shape: Shape,
    /// Its CPUs have a cache of level 3.
    pub l3: bool,
    /// Its NUMA nodes, in the order of their numbers.
    pub nodes: Vec<GuestNode>,
    /// Distances between its nodes, where the host declares them.
    pub distances: Option<Vec<Vec<u64>>>,
    /// The pages of its memory.
    pub pages: PageSize,
    /// Host CPUs for QEMU's own threads, those of devices included.
    pub emulator: CpuSet,
    /// Host CPUs that stay idle because their core is the VM's.
    pub idle: CpuSet,
    /// PCI root complexes for the devices that it gets.
    pub roots: Vec<GuestRoot>,
    /// Why it is so, and where it is not as the host is.
    pub notes: Vec<String>,
}

/// A virtual CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// The host's CPU that it runs on.
    pub host: u32,
    /// Its place in the guest.
    pub slot: Slot,
    /// The guest's node that it belongs to.
    pub node: u32,
}

/// A NUMA node of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNode {
    /// The host's node whose memory it is.
    pub host: u32,
    /// Bytes of the guest's memory on this node.
    pub memory: u64,
    /// Bandwidth and latency of the memory, if the host's firmware has them.
    pub access: Option<Access>,
}

/// A PCI root complex of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRoot {
    /// The host's, as domain and first bus.
    pub host: String,
    /// The guest's first bus.
    pub bus: u8,
    /// The guest's node that it is attached to.
    pub node: Option<u32>,
    /// The host's functions that lie behind it.
    pub devices: Vec<Device>,
    /// Host CPUs for the interrupts of these devices: reserved ones of their node, else those of QEMU's own threads. Empty: the kernel decides.
    #[serde(default)]
    pub interrupts: CpuSet,
}

/// Why there is no plan: the object, and what to do.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// Fewer CPUs are left than a VM wants.
    #[error(
        "the VM '{vm}' wants {wanted} CPUs and {left} are left in whole cores{of}; lower its 'cpus' or 'reserve', or stop another VM"
    )]
    CpusShort {
        /// The VM.
        vm: String,
        /// The wanted number.
        wanted: usize,
        /// The available number.
        left: usize,
        /// The node, where the VM names one.
        of: String,
    },
    /// A VM names CPUs that it can't get.
    #[error("the VM '{vm}' can't have the CPUs {cpus}: {why}")]
    CpusRefused {
        /// The VM.
        vm: String,
        /// The CPUs.
        cpus: CpuSet,
        /// Why, with the remedy.
        why: &'static str,
    },
    /// A VM names a node that does not exist.
    #[error("the VM '{vm}' names node {node}, and the host has {nodes}; 'tombolo topology show' shows them")]
    NoSuchNode {
        /// The VM.
        vm: String,
        /// The number that the VM asked for.
        node: u32,
        /// Those that exist.
        nodes: String,
    },
    /// A VM names a node that has only memory.
    #[error(
        "node {node}, which the VM '{vm}' names, has memory and no CPU; name a node with CPUs, or take topology = \"host\""
    )]
    NodeWithoutCpus {
        /// The VM.
        vm: String,
        /// The number of the host's node without CPUs.
        node: u32,
    },
    /// The CPUs of a VM belong to a node without memory.
    #[error(
        "node {node} has CPUs of the VM '{vm}' and no memory to bind; name a node with memory, or take topology = \"close\", which avoids such nodes"
    )]
    NodeWithoutMemory {
        /// The VM.
        vm: String,
        /// The number of the host's node without memory.
        node: u32,
    },
    /// A CPU belongs to no node.
    #[error("CPU {cpu}, which the VM '{vm}' would get, belongs to no NUMA node; name other CPUs")]
    CpuWithoutNode {
        /// The VM.
        vm: String,
        /// The CPU.
        cpu: u32,
    },
    /// Nodes have less memory than a VM wants.
    #[error("the VM '{vm}' wants {wanted} MiB in {pages}, and of the nodes {nodes}; {remedy}")]
    MemoryShort {
        /// The VM.
        vm: String,
        /// MiB.
        wanted: u64,
        /// The size of the pages that were asked for or chosen.
        pages: PageSize,
        /// The free memory of each node.
        nodes: String,
        /// What frees enough memory, as an imperative.
        remedy: &'static str,
    },
    /// QEMU has no words for a cache that several dies share.
    #[error(
        "the L3 cache {l3} of the host is shared by several dies, which QEMU can't express; give the VM '{vm}' CPUs of one die"
    )]
    CacheAcrossDies {
        /// The VM.
        vm: String,
        /// The number of the cache in the host's topology.
        l3: u32,
    },
    /// QEMU has no words for a core that belongs to two nodes.
    #[error(
        "the CPUs of core {core} belong to several NUMA nodes, which QEMU can't express; give the VM '{vm}' other CPUs"
    )]
    CoreAcrossNodes {
        /// The VM.
        vm: String,
        /// The number of the core in the host's topology.
        core: u32,
    },
    /// A VM gets a device that is not there.
    #[error(
        "the VM '{vm}' gets the PCI device {address}, which the host does not have; 'tombolo passthrough ls' lists them"
    )]
    NoDevice {
        /// The VM.
        vm: String,
        /// The device's PCI address, as the VM asked for it.
        address: String,
    },
    /// A guest has 256 buses.
    #[error("the VM '{vm}' gets more PCI devices than the buses of a guest can hold; give it fewer")]
    BusesShort {
        /// The VM.
        vm: String,
    },
}

/// The free parts of the host while VMs choose.
#[derive(Clone, Debug)]
pub(crate) struct Ledger<'a> {
    pub host: &'a Topology,
    /// CPUs that may be given away.
    pub free: CpuSet,
    /// Bytes by node.
    pub memory: BTreeMap<u32, u64>,
    /// Free huge pages by node and size.
    pub huge: BTreeMap<(u32, u64), u64>,
    /// The node of each CPU.
    pub node_of: BTreeMap<u32, u32>,
}

impl<'a> Ledger<'a> {
    fn open(host: &'a Topology, rules: &Rules, reserved: &BTreeMap<u32, CpuSet>) -> Self {
        let mut free = host.usable().without(&rules.taken);
        for cpus in reserved.values() {
            free = free.without(cpus);
        }
        let memory = host.nodes.iter().map(|node| {
            let taken = rules.taken_memory.get(&node.os).copied().unwrap_or(0);
            (node.os, node.memory.saturating_sub(taken))
        });
        let huge = host.nodes.iter().flat_map(|node| node.huge.iter().map(|h| ((node.os, h.size), h.free)));
        let node_of = host
            .own_cpus()
            .into_iter()
            .flat_map(|(node, cpus)| cpus.iter().map(|cpu| (cpu, node)).collect::<Vec<_>>());
        Ledger { host, free, memory: memory.collect(), huge: huge.collect(), node_of: node_of.collect() }
    }
}

/// Plans all VMs of `requests` at once.
///
/// # Errors
/// The first VM that can't have what it wants, and why.
pub fn plan(host: &Topology, rules: &Rules, requests: &[Request]) -> Result<Plan, PlanError> {
    let host = &Topology { outside: host.outside.without(&rules.isolated), ..host.clone() };
    let reserved = place::reserve(host, rules.reserve);
    let mut ledger = Ledger::open(host, rules, &reserved);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|at| match requests[*at].part {
        Part::Cpus(_) => 0,
        Part::Node(_) => 1,
        Part::Close => 2,
        Part::Host => 3,
    });
    let mut vms: Vec<Option<VmPlan>> = vec![None; requests.len()];
    for at in order {
        vms[at] = Some(plan_one(&mut ledger, &reserved, &requests[at])?);
    }
    let vms = vms.into_iter().flatten().collect();
    Ok(Plan { vms, reserved, free: ledger.free, free_memory: ledger.memory })
}

fn plan_one(
    ledger: &mut Ledger<'_>,
    reserved: &BTreeMap<u32, CpuSet>,
    request: &Request,
) -> Result<VmPlan, PlanError> {
    let mut notes = Vec::new();
    let placed = place::choose(ledger, request)?;
    notes.push(placed.why);
    if !placed.idle.is_empty() {
        notes.push(format!("CPUs {} stay idle: their cores are the VM's", placed.idle));
    }
    let nodes = nodes_of(ledger, request, &placed.cpus)?;
    let (pages, sizes) = memory::divide(ledger, request, &placed.cpus, &nodes)?;
    let arranged = shape::arrange(ledger.host, &placed.cpus, &request.name)?;
    notes.extend(arranged.notes);
    let guest_node = |host: u32| (0..).zip(&nodes).find(|(_, node)| **node == host).map(|(guest, _)| guest);
    let vcpus = arranged
        .slots
        .into_iter()
        .map(|(host, slot)| {
            let node = ledger.node_of.get(&host).and_then(|node| guest_node(*node));
            let missing = || PlanError::CpuWithoutNode { vm: request.name.clone(), cpu: host };
            Ok(Vcpu { host, slot, node: node.ok_or_else(missing)? })
        })
        .collect::<Result<Vec<_>, PlanError>>()?;
    let emulator = emulator_cpus(reserved, &nodes, &placed.cpus, &mut notes);
    let mut roots = roots(ledger.host, request, guest_node, &mut notes)?;
    for root in &mut roots {
        root.interrupts = interrupt_cpus(ledger.host, reserved, root, &emulator.without(&placed.cpus));
    }
    ledger.free = ledger.free.without(&placed.cpus).without(&placed.idle);
    let nodes: Vec<GuestNode> = nodes
        .into_iter()
        .zip(sizes)
        .map(|(host, memory)| {
            memory::take(ledger, host, memory, pages);
            GuestNode { host, memory, access: ledger.host.node(host).and_then(|node| node.access) }
        })
        .collect();
    let distances = distances(ledger.host, &nodes);
    Ok(VmPlan {
        name: request.name.clone(),
        vcpus,
        shape: arranged.shape,
        l3: arranged.l3,
        nodes,
        distances,
        pages,
        emulator,
        idle: placed.idle,
        roots,
        notes,
    })
}

/// The host's nodes that a VM gets: those of its CPUs, and with [`Part::Host`] those that only have memory.
fn nodes_of(ledger: &Ledger<'_>, request: &Request, cpus: &CpuSet) -> Result<Vec<u32>, PlanError> {
    let mut nodes: Vec<u32> = cpus.iter().filter_map(|cpu| ledger.node_of.get(&cpu).copied()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let bare = nodes.iter().find(|node| ledger.host.node(**node).is_none_or(|node| node.memory == 0));
    if let Some(node) = bare {
        return Err(PlanError::NodeWithoutMemory { vm: request.name.clone(), node: *node });
    }
    if request.part == Part::Host {
        let with_cpus: CpuSet = ledger.node_of.values().copied().collect();
        let others = ledger.host.nodes.iter().filter(|node| !with_cpus.contains(node.os));
        nodes.extend(others.filter(|node| node.memory > 0).map(|node| node.os));
        nodes.sort_unstable();
    }
    Ok(nodes)
}

/// The CPUs of QEMU's own threads: reserved CPUs of the VM's nodes, else any reserved CPU, else those of the vCPUs.
fn emulator_cpus(
    reserved: &BTreeMap<u32, CpuSet>,
    nodes: &[u32],
    own: &CpuSet,
    notes: &mut Vec<String>,
) -> CpuSet {
    let near: CpuSet = nodes.iter().filter_map(|node| reserved.get(node)).flat_map(CpuSet::iter).collect();
    if !near.is_empty() {
        return near;
    }
    let any: CpuSet = reserved.values().flat_map(CpuSet::iter).collect();
    if !any.is_empty() {
        notes.push("QEMU's own threads run on CPUs of other nodes: none is reserved on the VM's".into());
        return any;
    }
    notes.push("QEMU's own threads run on the CPUs of the VM and disturb it: set 'reserve'".into());
    own.clone()
}

/// The CPUs that handle the interrupts of a root complex's devices: reserved CPUs of its node, else `other`.
fn interrupt_cpus(
    host: &Topology,
    reserved: &BTreeMap<u32, CpuSet>,
    root: &GuestRoot,
    other: &CpuSet,
) -> CpuSet {
    let device = root.devices.first().and_then(|device| host.root_of(&device.address));
    let near = device.and_then(|(root, _)| reserved.get(&root.node?));
    near.unwrap_or(other).clone()
}

fn distances(host: &Topology, nodes: &[GuestNode]) -> Option<Vec<Vec<u64>>> {
    let row = |from: &GuestNode| nodes.iter().map(|to| host.distance(from.host, to.host)).collect();
    nodes.iter().map(row).collect()
}

/// The first bus of a guest's first further root complex; those below are of its own devices.
const FIRST_BUS: usize = 32;

/// One root complex of the guest for each of the host's that has one of the VM's devices.
fn roots(
    host: &Topology,
    request: &Request,
    guest_node: impl Fn(u32) -> Option<u32>,
    notes: &mut Vec<String>,
) -> Result<Vec<GuestRoot>, PlanError> {
    let mut behind: BTreeMap<(u32, u8), (&Root, Vec<Device>)> = BTreeMap::new();
    for address in &request.devices {
        let missing = || PlanError::NoDevice { vm: request.name.clone(), address: address.clone() };
        let (root, device) = host.root_of(address).ok_or_else(missing)?;
        behind.entry((root.domain, root.bus)).or_insert((root, Vec::new())).1.push(device.clone());
    }
    let mut bus = FIRST_BUS;
    let mut roots = Vec::new();
    for (root, devices) in behind.into_values() {
        let host = format!("{:04x}:{:02x}", root.domain, root.bus);
        let node = root.node.and_then(&guest_node);
        if let (Some(far), None) = (root.node, node) {
            notes.push(format!(
                "the devices of root complex {host} are on node {far}, of which the VM has nothing"
            ));
        }
        let first = u8::try_from(bus).map_err(|_| PlanError::BusesShort { vm: request.name.clone() })?;
        // The root's own bus, and one behind each port.
        bus += 1 + devices.len();
        if bus > 256 {
            return Err(PlanError::BusesShort { vm: request.name.clone() });
        }
        roots.push(GuestRoot { host, bus: first, node, devices, interrupts: CpuSet::default() });
    }
    Ok(roots)
}

impl VmPlan {
    /// The host's CPUs that the vCPUs run on.
    pub fn host_cpus(&self) -> CpuSet {
        self.vcpus.iter().map(|vcpu| vcpu.host).collect()
    }

    /// The host's CPUs for processes that serve the VM, such as the switch of its network: those of QEMU's own threads that no vCPU runs on.
    /// None where nothing is reserved.
    pub fn service_cpus(&self) -> CpuSet {
        self.emulator.without(&self.host_cpus())
    }

    /// The host's CPUs on which no other thread shall run: those of the vCPUs, and the idle ones of their cores.
    pub fn isolated_cpus(&self) -> CpuSet {
        self.host_cpus().iter().chain(self.idle.iter()).collect()
    }

    /// The number of virtual CPUs.
    pub fn cpus(&self) -> u32 {
        u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX)
    }

    /// Bytes of all nodes.
    pub fn memory(&self) -> u64 {
        self.nodes.iter().map(|node| node.memory).sum()
    }

    /// The vCPUs of a node of the guest.
    pub fn cpus_of(&self, node: u32) -> CpuSet {
        (0..).zip(&self.vcpus).filter(|(_, vcpu)| vcpu.node == node).map(|(number, _)| number).collect()
    }

    /// The topology that the guest's kernel must find.
    pub fn guest(&self) -> Topology {
        let lone = |package: u32| {
            let mut dies = self.vcpus.iter().filter(|v| v.slot.socket == package).map(|v| v.slot.die);
            dies.all(|die| die == 0)
        };
        let number = |slot: Slot, core: bool| {
            let die = slot.socket * self.shape.dies + slot.die;
            if core { die * self.shape.cores + slot.core } else { die }
        };
        let cpus = (0..).zip(&self.vcpus).map(|(os, Vcpu { slot, .. })| Cpu {
            os,
            package: slot.socket,
            die: (!lone(slot.socket)).then(|| number(*slot, false)),
            l3: self.l3.then(|| number(*slot, false)),
            core: number(*slot, true),
        });
        let nodes = (0..).zip(&self.nodes).map(|(os, node)| crate::model::Node {
            os,
            cpus: self.cpus_of(os),
            memory: node.memory,
            huge: Vec::new(),
            access: node.access,
        });
        let roots = self.roots.iter().map(|root| Root {
            domain: 0,
            bus: root.bus,
            node: root.node,
            devices: root.devices.clone(),
        });
        Topology {
            cpus: cpus.collect(),
            nodes: nodes.collect(),
            distances: self.distances.clone(),
            roots: roots.collect(),
            ..Topology::default()
        }
    }
}
