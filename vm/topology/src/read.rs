// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine's topology, as hwloc finds it: this host's, a synthetic one, or the one that lies in a folder as files of /sys and /proc.
//!
//! hwloc takes such a folder from the environment of its process ([`FSROOT`]). So a folder is read by a child process, which also keeps
//! what a guest wrote away from this process: the child parses it, and this process parses the child's JSON.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use hwlocality::Topology as Hwloc;
use hwlocality::memory::attribute::MemoryAttribute;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{DownstreamAttributes, ObjectAttributes};
use hwlocality::object::distance::DistancesKind;
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::{BuildFlags, TopologyBuilder, TypeFilter};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::cpus::CpuSet;
use crate::model::{Access, Cpu, Device, HugePages, Node, Root, Topology};

/// The variable by which hwloc reads another folder than `/`.
pub const FSROOT: &str = "HWLOC_FSROOT";
/// The most CPUs that a description may have: more than any machine has, and few enough to be read at once.
const MOST_CPUS: usize = 1 << 14;
/// The most memory, in bytes, and seconds of a CPU that the reading of a folder takes: 3,000 CPUs take 31 MiB and half a second.
const MOST_MEMORY: u64 = 2 << 30;
const MOST_SECONDS: u64 = 60;

/// This host.
///
/// # Errors
/// hwloc finds nothing.
pub fn host() -> Result<Topology> {
    let mut topology = plain(&built(Hwloc::builder())?);
    for node in &mut topology.nodes {
        count_free(Path::new("/"), node);
    }
    Ok(topology)
}

/// The machine that one of hwloc's synthetic descriptions names, such as `package:2 core:4 pu:2`.
///
/// # Errors
/// The description is none.
pub fn synthetic(description: &str) -> Result<Topology> {
    ensure!(
        cpus_of(description) <= MOST_CPUS as u64,
        "'{description:.60}' describes more than {MOST_CPUS} CPUs, which no machine has"
    );
    let builder = Hwloc::builder()
        .from_synthetic(description)
        .with_context(|| format!("'{description}' is no synthetic description of hwloc's; see lstopo(1)"))?;
    Ok(plain(&built(builder)?))
}

/// The number of CPUs that a synthetic description names, before hwloc makes objects of them: the product of the numbers of its levels, without what is in
/// brackets.
fn cpus_of(description: &str) -> u64 {
    let mut depth = 0u32;
    let outside: String = description
        .chars()
        .filter(|c| {
            match c {
                '(' | '[' => depth += 1,
                ')' | ']' => depth = depth.saturating_sub(1),
                _ => return depth == 0,
            }
            false
        })
        .collect();
    let count = |level: &str| level.rsplit(':').next().and_then(|number| number.parse().ok()).unwrap_or(1);
    outside.split_ascii_whitespace().map(count).fold(1, u64::saturating_mul)
}

/// Prints the topology in the folder that [`FSROOT`] names, as JSON: the child's part of [`folder`].
///
/// # Errors
/// The variable is not set, or hwloc finds nothing.
pub fn answer() -> Result<()> {
    let root = std::env::var_os(FSROOT).with_context(|| format!("{FSROOT} is not set"))?;
    // A guest may have written CPU numbers for which hwloc makes masks of gigabytes.
    for (resource, most) in [(Resource::As, MOST_MEMORY), (Resource::Cpu, MOST_SECONDS)] {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(resource, limit).context("this process can't limit itself")?;
    }
    let mut topology = plain(&built(Hwloc::builder())?);
    for node in &mut topology.nodes {
        count_free(Path::new(&root), node);
    }
    serde_json::to_writer(std::io::stdout().lock(), &topology)?;
    std::io::stdout().flush()?;
    Ok(())
}

/// The machine whose /sys and /proc lie below `root`. `reader` starts a process that calls [`answer`].
///
/// # Errors
/// The files describe no machine.
pub fn folder(root: &Path, mut reader: Command) -> Result<Topology> {
    // Without the x86 component, which would ask this machine's CPUs.
    reader.env(FSROOT, root).env("HWLOC_COMPONENTS", "linux,stop").env_remove("HWLOC_XMLFILE");
    reader.env_remove("HWLOC_SYNTHETIC").stdin(Stdio::null());
    let output = reader.output().context("the process that reads the files of /sys can't be started")?;
    ensure!(
        output.status.success(),
        "the files of /sys in {} describe no machine: {}",
        root.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout)
        .context("the process that reads the files of /sys said something else")
}

fn built(builder: TopologyBuilder) -> Result<Hwloc> {
    let flags = builder.flags() | BuildFlags::INCLUDE_DISALLOWED;
    let builder = builder.with_flags(flags).context("hwloc refuses to see CPUs outside of the cpuset")?;
    let builder =
        builder.with_io_type_filter(TypeFilter::KeepAll).context("hwloc refuses to look for devices")?;
    builder.build().context("hwloc finds no topology here")
}

/// hwloc's tree as plain data.
fn plain(found: &Hwloc) -> Topology {
    let mut topology = Topology { nodes: nodes(found), roots: roots(found), ..Topology::default() };
    let l3 = numbered(found, ObjectType::L3Cache);
    let die = numbered(found, ObjectType::Die);
    let package = numbered(found, ObjectType::Package);
    let core = numbered(found, ObjectType::Core);
    for pu in found.objects_with_type(ObjectType::PU).take(MOST_CPUS) {
        let Some(os) = pu.os_index().and_then(|os| u32::try_from(os).ok()) else { continue };
        let cpu = Cpu {
            os,
            // A machine that names no package is one; a thread without a core is its own.
            package: package.get(&os).copied().unwrap_or(0),
            die: die.get(&os).copied(),
            l3: l3.get(&os).copied(),
            core: core.get(&os).copied().unwrap_or(os),
        };
        topology.cpus.push(cpu);
    }
    topology.cpus.sort_by_key(|cpu| cpu.os);
    topology.drop_lone_dies();
    let online = set(&found.cpuset());
    topology.offline = set(&found.complete_cpuset()).without(&online);
    topology.outside = online.without(&set(&found.allowed_cpuset()));
    topology.distances = distances(found, &topology.nodes);
    topology
}

/// For each CPU the number of the object of this type that it is a part of.
fn numbered(found: &Hwloc, ty: ObjectType) -> BTreeMap<u32, u32> {
    let mut numbers = BTreeMap::new();
    for (number, object) in (0..).zip(found.objects_with_type(ty)) {
        let Some(cpus) = object.cpuset() else { continue };
        numbers.extend(set(&cpus).iter().map(|cpu| (cpu, number)));
    }
    numbers
}

fn set(bitmap: &hwlocality::cpu::cpuset::CpuSet) -> CpuSet {
    bitmap.iter_set().take(MOST_CPUS).filter_map(|index| u32::try_from(usize::from(index)).ok()).collect()
}

fn nodes(found: &Hwloc) -> Vec<Node> {
    let mut nodes: Vec<Node> = found
        .objects_with_type(ObjectType::NUMANode)
        .filter_map(|object| {
            let mut node = Node { os: u32::try_from(object.os_index()?).ok()?, ..Node::default() };
            node.cpus = object.cpuset().map(|cpus| set(&cpus)).unwrap_or_default();
            if let Some(ObjectAttributes::NUMANode(attributes)) = object.attributes() {
                node.memory = attributes.local_memory().map_or(0, u64::from);
                let sizes = attributes.page_types().iter().map(|page| u64::from(page.size()));
                node.huge =
                    sizes.filter(|size| *size > 4096).map(|size| HugePages { size, free: 0 }).collect();
            }
            node.access = access(found, object);
            Some(node)
        })
        .collect();
    nodes.sort_by_key(|node| node.os);
    nodes
}

/// Bandwidth and latency from the nearest CPUs to a node; None: the firmware does not have both.
fn access(found: &Hwloc, node: &TopologyObject) -> Option<Access> {
    let best = |attribute: MemoryAttribute<'_>| Some(attribute.best_initiator(node).ok()??.1);
    let bandwidth = best(MemoryAttribute::bandwidth(found)).filter(|value| *value > 0)?;
    let latency = best(MemoryAttribute::latency(found)).filter(|value| *value > 0)?;
    Some(Access { bandwidth, latency })
}

/// Distances between nodes, as the firmware declares them (SLIT).
fn distances(found: &Hwloc, nodes: &[Node]) -> Option<Vec<Vec<u64>>> {
    let kind = DistancesKind::FROM_OS | DistancesKind::MEANS_LATENCY;
    let matrices = found.distances_with_type(Some(kind), ObjectType::NUMANode).ok()?;
    let matrix = matrices.first()?;
    let mut values = BTreeMap::new();
    for ((from, to), value) in matrix.object_distances() {
        values.insert((from?.os_index()?, to?.os_index()?), value);
    }
    let place = |node: &Node| usize::try_from(node.os).ok();
    nodes
        .iter()
        .map(|from| nodes.iter().map(|to| values.get(&(place(from)?, place(to)?)).copied()).collect())
        .collect()
}

/// Root complexes with what is behind them.
fn roots(found: &Hwloc) -> Vec<Root> {
    let mut roots: Vec<Root> = found
        .objects_with_type(ObjectType::Bridge)
        .filter_map(|object| {
            let Some(ObjectAttributes::Bridge(bridge)) = object.attributes() else { return None };
            if bridge.upstream_attributes().is_some() {
                return None;
            }
            let Some(DownstreamAttributes::PCI(down)) = bridge.downstream_attributes() else { return None };
            let mut root =
                Root { domain: down.domain().into(), bus: down.secondary_bus(), ..Root::default() };
            let nodes: Vec<u32> = object.first_non_io_ancestor().map(near).unwrap_or_default();
            root.node = <[u32; 1]>::try_from(nodes).ok().map(|[node]| node);
            devices(object, &mut root.devices);
            root.devices.sort();
            Some(root)
        })
        .collect();
    roots.sort_by_key(|root| (root.domain, root.bus));
    roots
}

/// Nodes that an object is attached to.
fn near(object: &TopologyObject) -> Vec<u32> {
    let nodes = object.nodeset().map(|nodes| nodes.iter_set().take(MOST_CPUS).collect::<Vec<_>>());
    nodes.unwrap_or_default().into_iter().filter_map(|node| u32::try_from(usize::from(node)).ok()).collect()
}

fn devices(object: &TopologyObject, into: &mut Vec<Device>) {
    for child in object.io_children() {
        if let Some(ObjectAttributes::PCIDevice(pci)) = child.attributes() {
            let [bus, slot, function] = [pci.bus_id(), pci.bus_device(), pci.function()];
            into.push(Device {
                address: format!("{:04x}:{bus:02x}:{slot:02x}.{function:x}", pci.domain()),
                class: pci.class_id(),
                vendor: pci.vendor_id(),
                device: pci.device_id(),
            });
        }
        devices(child, into);
    }
}

/// Counts the free huge pages of a node; hwloc knows the number of all.
fn count_free(root: &Path, node: &mut Node) {
    let folder = root.join(format!("sys/devices/system/node/node{}/hugepages", node.os));
    for pages in &mut node.huge {
        let file = folder.join(format!("hugepages-{}kB/free_hugepages", pages.size >> 10));
        let text = std::fs::read_to_string(file).unwrap_or_default();
        pages.free = text.trim().parse().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_cpus_that_a_vm_may_use_and_a_node_that_they_belong_to() {
        let host = host().unwrap();
        let usable = host.usable();
        let own = rustix::thread::sched_getaffinity(None).unwrap();
        assert!(!usable.is_empty());
        for cpu in usable.iter() {
            assert!(host.node_of(cpu).is_some(), "CPU {cpu} has no node");
        }
        let count = usize::try_from(own.count()).unwrap();
        assert!(count <= host.cpus.len(), "{count} CPUs are usable, {} were found", host.cpus.len());
        assert!(host.nodes.iter().map(|node| node.memory).sum::<u64>() > 0);
    }

    #[test]
    fn a_synthetic_machine_has_what_its_description_says() {
        let machine = synthetic("package:2 [numa(memory=16GiB)] die:2 l3:1 core:4 pu:2").unwrap();
        assert_eq!(machine.cpus.len(), 32);
        assert_eq!(machine.nodes.len(), 2);
        assert_eq!(machine.groups(|cpu| cpu.die).len(), 4);
        assert_eq!(machine.groups(|cpu| cpu.l3).len(), 4);
        assert_eq!(machine.groups(|cpu| Some(cpu.core)).len(), 16);
        assert_eq!(machine.node_of(31), Some(1));
        assert!(synthetic("package:two").unwrap_err().to_string().contains("synthetic description"));
    }

    #[test]
    fn a_description_of_more_cpus_than_any_machine_has_is_refused_at_once() {
        for description in
            ["pu:4294967295", "package:100000 pu:100000", "package:2 [numa(memory=1GiB)] core:8193 pu:1"]
        {
            let error = synthetic(description).unwrap_err().to_string();
            assert!(error.contains("more than 16384 CPUs"), "{error}");
        }
        let memory = "package:2 [numa(memory=99999999999999999999GiB)] pu:1";
        assert!(
            crate::picture::text(&synthetic(memory).unwrap(), &Default::default())
                .starts_with("machine: 2 CPUs")
        );
    }

    #[test]
    fn a_die_that_is_its_package_is_forgotten() {
        let machine = synthetic("package:2 die:1 core:2 pu:1").unwrap();
        assert!(machine.cpus.iter().all(|cpu| cpu.die.is_none()));
    }
}
