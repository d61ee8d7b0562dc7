// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A plan in the words of QEMU's command line.

use std::collections::BTreeMap;

use crate::memory::{MIB, PageSize};
use crate::model::Device;
use crate::plan::{GuestRoot, VmPlan};
use crate::shape::{Shape, Slot};

/// The parts of a command line that don't come from the plan.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// QEMU's version.
    pub version: (u32, u32, u32),
    /// QEMU's type of a CPU: `host` or `max`.
    pub cpu: &'a str,
    /// Other processes map the memory (vhost-user).
    pub shared: bool,
    /// Bind the memory to the host's nodes and make all of it exist at the start.
    pub bound: bool,
    /// Keep a second slot beside a lone CPU: TCG's atomic instructions need it.
    pub spare_slot: bool,
    /// QEMU's `-device` for one of the host's functions, without its bus; none leaves it out.
    pub device: fn(&Device) -> Option<String>,
}

/// A plan that this QEMU can't express.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Inexpressible {
    /// More slots than the machine type has.
    #[error(
        "the VM '{vm}' needs {wanted} slots for CPUs and QEMU {version} has {most}; give it fewer CPUs, or CPUs of equally wide packages"
    )]
    Slots {
        /// The VM.
        vm: String,
        /// The needed number.
        wanted: u32,
        /// The available number.
        most: u32,
        /// QEMU's version.
        version: String,
    },
    /// APIC ids that need an IOMMU with interrupt remapping.
    #[error(
        "the VM '{vm}' would have the APIC id {id}, and QEMU's machine has ids below 255 without an emulated IOMMU; give it fewer CPUs or packages"
    )]
    ApicId {
        /// The VM.
        vm: String,
        /// The highest id.
        id: u32,
    },
}

/// One option with its value.
pub type Argument = (&'static str, String);

/// The highest APIC id of a machine without interrupt remapping.
const HIGHEST_APIC_ID: u32 = 254;

/// QEMU's arguments for CPUs, memory and nodes. The machine's type, `-m` and `-cpu` are the caller's: see [`VmPlan::memory`] and [`cpu_flags`]. The
/// devices are in [`root_complexes`].
///
/// # Errors
/// This QEMU can't express the plan.
pub fn arguments(plan: &VmPlan, options: &Options<'_>) -> Result<Vec<Argument>, Inexpressible> {
    check(plan, options)?;
    let mut list = processors(plan, options);
    memory(plan, options, &mut list);
    nodes_of_slots(plan, options, &mut list);
    distances(plan, &mut list);
    access(plan, &mut list);
    Ok(list)
}

/// QEMU's arguments for root complexes and the devices behind them. They must be the last ones with devices: QEMU puts a device that names no bus on
/// the root complex that it has made last, where it takes bridges alone.
pub fn root_complexes(plan: &VmPlan, options: &Options<'_>) -> Vec<Argument> {
    let mut list = Vec::new();
    for (number, root) in plan.roots.iter().enumerate() {
        root_complex(number, root, options, &mut list);
    }
    list
}

/// The vendor of the CPU that a guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD's: `topoext` tells the guest of threads and dies, and QEMU never sets it by itself.
    Amd,
    /// That of QEMU's emulation: only as Intel's it tells of dies.
    Emulated,
    /// Any other.
    Other,
}

impl Vendor {
    /// That of this host's CPUs.
    pub fn of_host() -> Vendor {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let vendor = text.lines().find_map(|line| line.strip_prefix("vendor_id"));
        let amd = vendor.is_some_and(|vendor| vendor.contains("AuthenticAMD"));
        if amd { Vendor::Amd } else { Vendor::Other }
    }
}

/// The flags of `-cpu` after the model, each with a comma before it.
pub fn cpu_flags(plan: &VmPlan, vendor: Vendor) -> String {
    let cache = if plan.l3 { ",l3-cache=on" } else { ",l3-cache=off" };
    let vendor = match vendor {
        Vendor::Amd => ",topoext=on",
        Vendor::Emulated => ",vendor=GenuineIntel",
        Vendor::Other => "",
    };
    format!("{cache}{vendor}")
}

fn check(plan: &VmPlan, options: &Options<'_>) -> Result<(), Inexpressible> {
    let (major, minor, _) = options.version;
    let most = if (major, minor) < (8, 1) { 288 } else { 1024 };
    let vm = plan.name.clone();
    let (wanted, id) = (plan.shape.slots(), plan.shape.highest_apic_id());
    if wanted > most {
        let version = format!("{major}.{minor}");
        return Err(Inexpressible::Slots { vm, wanted, most, version });
    }
    if id > HIGHEST_APIC_ID {
        return Err(Inexpressible::ApicId { vm, id });
    }
    Ok(())
}

fn slot_value(slot: Slot) -> String {
    let Slot { socket, die, core, thread } = slot;
    format!("socket-id={socket},die-id={die},core-id={core},thread-id={thread}")
}

/// The machine's width, and where slots stay empty each CPU by its place.
fn processors(plan: &VmPlan, options: &Options<'_>) -> Vec<Argument> {
    let Shape { sockets, dies, cores, threads } = shape(plan, options);
    let slots = sockets * dies * cores * threads;
    let full = slots as usize == plan.vcpus.len();
    let spare = slots > plan.shape.slots();
    let first = if full { slots } else { 1 };
    let smp =
        format!("{first},sockets={sockets},dies={dies},cores={cores},threads={threads},maxcpus={slots}");
    let mut list = vec![("-smp", smp)];
    if !full && !spare {
        // The first CPU is the machine's own.
        list.extend(plan.vcpus.iter().skip(1).map(|vcpu| {
            let value = format!("{}-x86_64-cpu,{}", options.cpu, slot_value(vcpu.slot));
            ("-device", value)
        }));
    }
    list
}

fn shape(plan: &VmPlan, options: &Options<'_>) -> Shape {
    let mut shape = plan.shape;
    if options.spare_slot && shape.slots() < 2 {
        shape.sockets = 2;
    }
    shape
}

fn memory(plan: &VmPlan, options: &Options<'_>, list: &mut Vec<Argument>) {
    for (number, node) in plan.nodes.iter().enumerate() {
        let bound = if options.bound {
            // Threads on the node fill its memory.
            list.push(("-object", format!("thread-context,id=fill{number},node-affinity={}", node.host)));
            format!(
                ",host-nodes={},policy=bind,prealloc=on,prealloc-threads=4,prealloc-context=fill{number}",
                node.host
            )
        } else {
            String::new()
        };
        let size = node.memory / MIB;
        let (backend, pages) = match plan.pages {
            PageSize::Gigantic => ("memfd", ",hugetlb=on,hugetlbsize=1G"),
            PageSize::Huge => ("memfd", ",hugetlb=on,hugetlbsize=2M"),
            PageSize::Transparent if options.shared => ("memfd", ""),
            PageSize::Transparent => ("ram", ""),
        };
        let share = if options.shared { ",share=on" } else { "" };
        list.push((
            "-object",
            format!("memory-backend-{backend},id=ram{number},size={size}M{pages}{share}{bound}"),
        ));
        list.push(("-numa", format!("node,nodeid={number},memdev=ram{number}{}", initiator(plan, number))));
    }
}

/// With an HMAT QEMU wants to know whose CPUs are nearest to a node: its own, else those of the nearest node.
fn initiator(plan: &VmPlan, number: usize) -> String {
    if !has_access(plan) {
        return String::new();
    }
    format!(",initiator={}", nearest_with_cpus(plan, number))
}

/// The node with CPUs that is nearest to a node.
pub(crate) fn nearest_with_cpus(plan: &VmPlan, number: usize) -> usize {
    let distance = |to: usize| match &plan.distances {
        Some(rows) => rows[number][to],
        None => u64::from(to != number),
    };
    let with_cpus = |node: &usize| plan.vcpus.iter().any(|vcpu| vcpu.node as usize == *node);
    (0..plan.nodes.len()).filter(with_cpus).min_by_key(|node| (distance(*node), *node)).unwrap_or(0)
}

/// The node of each slot, given for sockets if a socket is of one node, else for dies, else for cores.
fn nodes_of_slots(plan: &VmPlan, options: &Options<'_>, list: &mut Vec<Argument>) {
    let Shape { sockets, dies, cores, .. } = shape(plan, options);
    let known: BTreeMap<(u32, u32, u32), u32> =
        plan.vcpus.iter().map(|v| ((v.slot.socket, v.slot.die, v.slot.core), v.node)).collect();
    let mut last = 0;
    for socket in 0..sockets {
        // An empty slot goes with the slot before it.
        let mut of = BTreeMap::new();
        for die in 0..dies {
            for core in 0..cores {
                last = known.get(&(socket, die, core)).copied().unwrap_or(last);
                of.insert((die, core), last);
            }
        }
        let die_id = |die: u32| if dies > 1 { format!(",die-id={die}") } else { String::new() };
        if let Some(node) = one(of.values().copied()) {
            list.push(("-numa", format!("cpu,node-id={node},socket-id={socket}")));
            continue;
        }
        for die in 0..dies {
            let id = die_id(die);
            if let Some(node) = one(of.range((die, 0)..(die + 1, 0)).map(|(_, node)| *node)) {
                list.push(("-numa", format!("cpu,node-id={node},socket-id={socket}{id}")));
                continue;
            }
            for core in 0..cores {
                let node = of[&(die, core)];
                list.push(("-numa", format!("cpu,node-id={node},socket-id={socket}{id},core-id={core}")));
            }
        }
    }
}

/// The node that all of these are.
fn one(mut nodes: impl Iterator<Item = u32>) -> Option<u32> {
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

fn distances(plan: &VmPlan, list: &mut Vec<Argument>) {
    for (src, row) in plan.distances.iter().flatten().enumerate() {
        for (dst, val) in row.iter().enumerate().filter(|(dst, _)| *dst != src) {
            list.push(("-numa", format!("dist,src={src},dst={dst},val={val}")));
        }
    }
}

/// Returns whether the speed of all nodes is known: QEMU's HMAT wants it of each or of none.
pub fn has_access(plan: &VmPlan) -> bool {
    plan.nodes.len() > 1 && plan.nodes.iter().all(|node| node.access.is_some())
}

/// The HMAT: each node's latency and bandwidth from its nearest CPUs.
fn access(plan: &VmPlan, list: &mut Vec<Argument>) {
    if !has_access(plan) {
        return;
    }
    list.push(("-machine", "hmat=on".into()));
    for (target, node) in plan.nodes.iter().enumerate() {
        let Some(access) = node.access else { continue };
        let pair =
            format!("hmat-lb,initiator={},target={target},hierarchy=memory", nearest_with_cpus(plan, target));
        list.push(("-numa", format!("{pair},data-type=access-latency,latency={}", access.latency)));
        list.push(("-numa", format!("{pair},data-type=access-bandwidth,bandwidth={}M", access.bandwidth)));
    }
}

/// A root complex, with a port for each device.
fn root_complex(number: usize, root: &GuestRoot, options: &Options<'_>, list: &mut Vec<Argument>) {
    let node = root.node.map_or(String::new(), |node| format!(",numa_node={node}"));
    list.push(("-device", format!("pxb-pcie,id=root{number},bus=pcie.0,bus_nr={}{node}", root.bus)));
    for (at, device) in root.devices.iter().enumerate() {
        let port = format!("root{number}.{at}");
        // Chassis and slot together must differ from those of all other ports.
        list.push((
            "-device",
            format!("pcie-root-port,id={port},bus=root{number},chassis={},slot={at}", 100 + number),
        ));
        if let Some(device) = (options.device)(device) {
            list.push(("-device", format!("{device},bus={port}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Rules, plan};
    use crate::read::synthetic;
    use crate::request::{Pages, Part, Request};

    const OPTIONS: Options<'_> = Options {
        version: (7, 2, 0),
        cpu: "max",
        shared: false,
        bound: true,
        spare_slot: false,
        device: |device| Some(format!("vfio-pci,host={}", device.address)),
    };

    fn line(host: &crate::model::Topology, rules: &Rules, devices: &[&str]) -> String {
        let request = Request {
            name: "a".into(),
            part: Part::Host,
            cpus: 0,
            memory: 4 << 30,
            pages: Pages::Auto,
            devices: devices.iter().map(ToString::to_string).collect(),
        };
        let plan = plan(host, rules, &[request]).unwrap();
        let mut list = arguments(&plan.vms[0], &OPTIONS).unwrap();
        list.extend(root_complexes(&plan.vms[0], &OPTIONS));
        list.iter().map(|(option, value)| format!("{option} {value}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn two_nodes_are_two_bound_backends_and_a_socket_each() {
        let mut host = synthetic("package:2 [numa(memory=16GiB)] core:2 pu:2").unwrap();
        host.distances = Some(vec![vec![10, 21], vec![22, 10]]);
        let line = line(&host, &Rules::default(), &[]);
        for part in [
            "-smp 8,sockets=2,dies=1,cores=2,threads=2,maxcpus=8",
            "-object thread-context,id=fill1,node-affinity=1 -object memory-backend-ram,id=ram1,size=2048M,host-nodes=1,policy=bind,prealloc=on",
            "-numa node,nodeid=1,memdev=ram1",
            "-numa cpu,node-id=1,socket-id=1",
            "-numa dist,src=0,dst=1,val=21 -numa dist,src=1,dst=0,val=22",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("hmat") && !line.contains("-x86_64-cpu"), "{line}");
    }

    #[test]
    fn cpus_of_unequal_packages_are_placed_one_by_one() {
        let host = synthetic("package:2 [numa(memory=16GiB)] core:2 pu:1").unwrap();
        let rules = Rules { taken: "3".parse().unwrap(), ..Rules::default() };
        let line = line(&host, &rules, &[]);
        assert!(line.contains("-smp 1,sockets=2,dies=1,cores=2,threads=1,maxcpus=4"), "{line}");
        assert!(line.contains("-device max-x86_64-cpu,socket-id=0,die-id=0,core-id=1,thread-id=0"), "{line}");
        assert!(line.contains("-device max-x86_64-cpu,socket-id=1,die-id=0,core-id=0,thread-id=0"), "{line}");
        assert_eq!(line.matches("-x86_64-cpu").count(), 2, "{line}");
    }

    #[test]
    fn nodes_within_a_package_are_said_of_cores_and_devices_lie_behind_their_root() {
        let mut host = synthetic("package:1 l3:1 group:2 [numa(memory=16GiB)] core:2 pu:1").unwrap();
        host.roots = vec![crate::model::Root {
            domain: 0,
            bus: 0x80,
            node: Some(1),
            devices: vec![crate::model::Device { address: "0000:81:00.0".into(), ..Default::default() }],
        }];
        let line = line(&host, &Rules::default(), &["0000:81:00.0"]);
        for part in [
            "-numa cpu,node-id=0,socket-id=0,core-id=1 -numa cpu,node-id=1,socket-id=0,core-id=2",
            "-device pxb-pcie,id=root0,bus=pcie.0,bus_nr=32,numa_node=1",
            "-device vfio-pci,host=0000:81:00.0,bus=root0.0",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn an_hmat_is_said_where_the_speed_of_each_node_is_known() {
        let mut host = synthetic("package:2 [numa(memory=16GiB)] core:1 pu:1").unwrap();
        for node in &mut host.nodes {
            node.access = Some(crate::model::Access { bandwidth: 1000, latency: 90 });
        }
        let line = line(&host, &Rules::default(), &[]);
        assert!(
            line.contains("nodeid=1,memdev=ram1,initiator=1") && line.contains("-machine hmat=on"),
            "{line}"
        );
        assert!(line.contains(
            "hmat-lb,initiator=1,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=1000M"
        ));
    }

    #[test]
    fn what_this_qemu_can_not_express_is_refused() {
        let host = synthetic("package:16 [numa(memory=16GiB)] core:24 pu:1").unwrap();
        let request = Request {
            name: "a".into(),
            part: Part::Host,
            cpus: 0,
            memory: 4 << 30,
            pages: Pages::Auto,
            devices: vec![],
        };
        let plan = plan(&host, &Rules::default(), &[request]).unwrap();
        let error = arguments(&plan.vms[0], &OPTIONS).unwrap_err().to_string();
        assert!(error.contains("384 slots") && error.contains("fewer CPUs"), "{error}");
        let error = arguments(&plan.vms[0], &Options { version: (10, 0, 0), ..OPTIONS }).unwrap_err();
        assert_eq!(error, Inexpressible::ApicId { vm: "a".into(), id: 15 * 32 + 23 });
    }
}
