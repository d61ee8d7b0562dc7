// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The topology of a machine as plain data: what the planner, the comparison and the pictures work on.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;

/// A machine: a host, or what a guest sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// CPUs that are online, in the order of their numbers.
    pub cpus: Vec<Cpu>,
    /// CPUs that exist and are offline.
    #[serde(default)]
    pub offline: CpuSet,
    /// CPUs that are online and outside of the cpuset of the process that looked.
    #[serde(default)]
    pub outside: CpuSet,
    /// NUMA nodes, in the order of their numbers.
    pub nodes: Vec<Node>,
    /// Distance from each node (row) to each node (column), in the order of [`Topology::nodes`].
    #[serde(default)]
    pub distances: Option<Vec<Vec<u64>>>,
    /// PCI root complexes, in the order of their domains and buses.
    #[serde(default)]
    pub roots: Vec<Root>,
}

/// A hardware thread, and the objects that it is a part of. Their numbers count through the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// The kernel's number.
    pub os: u32,
    /// Package, which is a socket.
    pub package: u32,
    /// Die; none where the package has one.
    pub die: Option<u32>,
    /// The CPUs that share a cache of level 3.
    pub l3: Option<u32>,
    /// Core.
    pub core: u32,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The kernel's number.
    pub os: u32,
    /// CPUs that are near. Those of a node without CPUs of its own are the CPUs of its neighbours.
    pub cpus: CpuSet,
    /// Bytes of the node's memory, used or not.
    pub memory: u64,
    /// Huge pages that are reserved and unused.
    #[serde(default)]
    pub huge: Vec<HugePages>,
    /// Bandwidth and latency from its nearest CPUs, if the firmware has them (HMAT).
    #[serde(default)]
    pub access: Option<Access>,
}

/// Huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Bytes of one page.
    pub size: u64,
    /// Free pages.
    pub free: u64,
}

/// Speed of memory, as the firmware declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// MiB per second.
    pub bandwidth: u64,
    /// Nanoseconds.
    pub latency: u64,
}

/// A PCI root complex, and what is behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// PCI domain.
    pub domain: u32,
    /// The first bus.
    pub bus: u8,
    /// The node that it is attached to; none where the firmware does not say.
    pub node: Option<u32>,
    /// Functions behind it, bridges left out.
    pub devices: Vec<Device>,
}

/// A PCI function.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Such as `0000:01:00.0`.
    pub address: String,
    /// Class and subclass.
    pub class: u16,
    /// Vendor.
    pub vendor: u16,
    /// The vendor's number of the device.
    pub device: u16,
}

impl Topology {
    /// The CPU with this number, where it is online.
    pub fn cpu(&self, os: u32) -> Option<&Cpu> {
        self.cpus.binary_search_by_key(&os, |cpu| cpu.os).ok().map(|at| &self.cpus[at])
    }

    /// The node with this number.
    pub fn node(&self, os: u32) -> Option<&Node> {
        self.nodes.iter().find(|node| node.os == os)
    }

    /// CPUs that are online.
    pub fn online(&self) -> CpuSet {
        self.cpus.iter().map(|cpu| cpu.os).collect()
    }

    /// CPUs that a VM of this process may use.
    pub fn usable(&self) -> CpuSet {
        self.online().without(&self.outside)
    }

    /// The node that the kernel counts a CPU to. A CPU may be near several nodes; then it is the one with the fewest near CPUs, and
    /// among those the first.
    pub fn node_of(&self, cpu: u32) -> Option<u32> {
        let near = self.nodes.iter().filter(|node| node.cpus.contains(cpu));
        near.min_by_key(|node| (node.cpus.len(), node.os)).map(|node| node.os)
    }

    /// For each node the CPUs that are counted to it; a memory-only node has none.
    pub fn own_cpus(&self) -> BTreeMap<u32, CpuSet> {
        let mut own: BTreeMap<u32, CpuSet> =
            self.nodes.iter().map(|node| (node.os, CpuSet::default())).collect();
        for cpu in &self.cpus {
            if let Some(node) = self.node_of(cpu.os) {
                own.entry(node).or_default().insert(cpu.os);
            }
        }
        own
    }

    /// Distance from one node to another; none where the machine does not say.
    pub fn distance(&self, from: u32, to: u32) -> Option<u64> {
        let place = |os| self.nodes.iter().position(|node| node.os == os);
        let (from, to) = (place(from)?, place(to)?);
        self.distances.as_ref()?.get(from)?.get(to).copied()
    }

    /// CPUs by the object that `of` names, in the order of the objects.
    pub fn groups<K: Ord>(&self, of: impl Fn(&Cpu) -> Option<K>) -> BTreeMap<K, CpuSet> {
        let mut groups: BTreeMap<K, CpuSet> = BTreeMap::new();
        for cpu in &self.cpus {
            if let Some(key) = of(cpu) {
                groups.entry(key).or_default().insert(cpu.os);
            }
        }
        groups
    }

    /// Forgets dies that are their whole package: such a die says nothing.
    pub(crate) fn drop_lone_dies(&mut self) {
        let mut dies: BTreeMap<u32, BTreeSet<Option<u32>>> = BTreeMap::new();
        for cpu in &self.cpus {
            dies.entry(cpu.package).or_default().insert(cpu.die);
        }
        for cpu in &mut self.cpus {
            if dies[&cpu.package].len() == 1 {
                cpu.die = None;
            }
        }
    }

    /// The root complex that has the function at this address.
    pub fn root_of(&self, address: &str) -> Option<(&Root, &Device)> {
        self.roots.iter().find_map(|root| Some((root, root.devices.iter().find(|d| d.address == address)?)))
    }
}
