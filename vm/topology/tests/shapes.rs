// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests that lie on emulated hosts of many shapes: a guest under TCG with `-smp` and `-numa` of a shape is the host. hwloc reads what its kernel
//! shows, the planner gives a second guest a part of it, and what that guest's kernel shows must be the plan, object by object.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use tombolo_qemu::hypervisor::Hypervisor;
use tombolo_qemu::version::Qemu;
use tombolo_rig::guest::Guest;
use tombolo_rig::image::Image;
use tombolo_rig::kernel::Kernel;
use tombolo_rig::machine::Machine;
use tombolo_topology::compare::{Line, Verdict, compare};
use tombolo_topology::gather;
use tombolo_topology::model::{Device, Topology};
use tombolo_topology::plan::{Rules, VmPlan, plan};
use tombolo_topology::qemu::{self, Options, Vendor};
use tombolo_topology::request::{Pages, Part, Request};

const MIB: u64 = 1 << 20;

/// An emulated host.
struct Shape {
    /// QEMU's arguments for CPUs, memory, nodes and root complexes.
    host: &'static [&'static str],
    /// The expected counts of the host, so that a shape that QEMU did not make fails.
    packages: usize,
    dies: usize,
    caches: usize,
    cores: usize,
    nodes: usize,
    roots: usize,
}

/// Two nodes with two cores of two threads each, unequal distances and memories.
const TWO_NODES: Shape = Shape {
    host: &[
        "-smp",
        "8,sockets=2,dies=1,cores=2,threads=2",
        "-m",
        "576M",
        "-object",
        "memory-backend-ram,id=m0,size=320M",
        "-object",
        "memory-backend-ram,id=m1,size=256M",
        "-numa",
        "node,nodeid=0,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
        "-numa",
        "dist,src=0,dst=1,val=21",
        "-numa",
        "dist,src=1,dst=0,val=31",
    ],
    packages: 2,
    dies: 0,
    caches: 2,
    cores: 4,
    nodes: 2,
    roots: 1,
};

const FOUR_NODES: Shape = Shape {
    host: &[
        "-smp",
        "4,sockets=4,dies=1,cores=1,threads=1",
        "-m",
        "768M",
        "-object",
        "memory-backend-ram,id=m0,size=192M",
        "-object",
        "memory-backend-ram,id=m1,size=192M",
        "-object",
        "memory-backend-ram,id=m2,size=192M",
        "-object",
        "memory-backend-ram,id=m3,size=192M",
        "-numa",
        "node,nodeid=0,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-numa",
        "node,nodeid=2,memdev=m2",
        "-numa",
        "node,nodeid=3,memdev=m3",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
        "-numa",
        "cpu,node-id=2,socket-id=2",
        "-numa",
        "cpu,node-id=3,socket-id=3",
        "-numa",
        "dist,src=0,dst=1,val=12",
        "-numa",
        "dist,src=0,dst=2,val=22",
        "-numa",
        "dist,src=0,dst=3,val=24",
        "-numa",
        "dist,src=1,dst=2,val=24",
        "-numa",
        "dist,src=1,dst=3,val=22",
        "-numa",
        "dist,src=2,dst=3,val=12",
    ],
    packages: 4,
    dies: 0,
    caches: 4,
    cores: 4,
    nodes: 4,
    roots: 1,
};

const SMT: Shape = Shape {
    host: &["-smp", "6,sockets=1,dies=1,cores=3,threads=2", "-m", "512M"],
    packages: 1,
    dies: 0,
    caches: 1,
    cores: 3,
    nodes: 1,
    roots: 1,
};

const TWO_DIES: Shape = Shape {
    host: &["-smp", "8,sockets=1,dies=2,cores=2,threads=2", "-m", "512M"],
    packages: 1,
    dies: 2,
    caches: 2,
    cores: 4,
    nodes: 1,
    roots: 1,
};

const UNEQUAL_MEMORIES: Shape = Shape {
    host: &[
        "-smp",
        "4,sockets=2,dies=1,cores=2,threads=1",
        "-m",
        "768M",
        "-object",
        "memory-backend-ram,id=m0,size=640M",
        "-object",
        "memory-backend-ram,id=m1,size=128M",
        "-numa",
        "node,nodeid=0,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
    ],
    packages: 2,
    dies: 0,
    caches: 2,
    cores: 4,
    nodes: 2,
    roots: 1,
};

const MEMORY_ONLY_NODE: Shape = Shape {
    host: &[
        "-smp",
        "4,sockets=2,dies=1,cores=2,threads=1",
        "-m",
        "640M",
        "-object",
        "memory-backend-ram,id=m0,size=256M",
        "-object",
        "memory-backend-ram,id=m1,size=192M",
        "-object",
        "memory-backend-ram,id=m2,size=192M",
        "-numa",
        "node,nodeid=0,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-numa",
        "node,nodeid=2,memdev=m2",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
        "-numa",
        "dist,src=0,dst=1,val=20",
        "-numa",
        "dist,src=0,dst=2,val=17",
        "-numa",
        "dist,src=1,dst=2,val=28",
    ],
    packages: 2,
    dies: 0,
    caches: 2,
    cores: 4,
    nodes: 3,
    roots: 1,
};

const THREE_ROOT_COMPLEXES: Shape = Shape {
    host: &[
        "-smp",
        "4,sockets=2,dies=1,cores=2,threads=1",
        "-m",
        "576M",
        "-object",
        "memory-backend-ram,id=m0,size=320M",
        "-object",
        "memory-backend-ram,id=m1,size=256M",
        "-numa",
        "node,nodeid=0,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
        "-device",
        "pxb-pcie,id=r0,bus=pcie.0,bus_nr=64,numa_node=0",
        "-device",
        "pcie-root-port,id=p0,bus=r0,chassis=1",
        "-device",
        "e1000e,romfile=,bus=p0",
        "-device",
        "pxb-pcie,id=r1,bus=pcie.0,bus_nr=128,numa_node=1",
        "-device",
        "pcie-root-port,id=p1,bus=r1,chassis=2",
        "-device",
        "virtio-rng-pci,bus=p1",
        "-device",
        "pcie-root-port,id=p2,bus=r1,chassis=3",
        "-device",
        "e1000e,romfile=,bus=p2",
    ],
    packages: 2,
    dies: 0,
    caches: 2,
    cores: 4,
    nodes: 2,
    roots: 3,
};

/// A fast node, and a slow one without CPUs of its own, whose speeds the firmware declares (HMAT).
const DECLARED_SPEEDS: Shape = Shape {
    host: &[
        "-machine",
        "hmat=on",
        "-smp",
        "4,sockets=2,dies=1,cores=2,threads=1",
        "-m",
        "640M",
        "-object",
        "memory-backend-ram,id=m0,size=256M",
        "-object",
        "memory-backend-ram,id=m1,size=192M",
        "-object",
        "memory-backend-ram,id=m2,size=192M",
        "-numa",
        "node,nodeid=0,memdev=m0,initiator=0",
        "-numa",
        "node,nodeid=1,memdev=m1,initiator=1",
        "-numa",
        "node,nodeid=2,memdev=m2,initiator=0",
        "-numa",
        "cpu,node-id=0,socket-id=0",
        "-numa",
        "cpu,node-id=1,socket-id=1",
        "-numa",
        "dist,src=0,dst=1,val=20",
        "-numa",
        "dist,src=0,dst=2,val=17",
        "-numa",
        "dist,src=1,dst=2,val=28",
        "-numa",
        "hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=90",
        "-numa",
        "hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=20480M",
        "-numa",
        "hmat-lb,initiator=1,target=1,hierarchy=memory,data-type=access-latency,latency=90",
        "-numa",
        "hmat-lb,initiator=1,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=20480M",
        "-numa",
        "hmat-lb,initiator=0,target=2,hierarchy=memory,data-type=access-latency,latency=250",
        "-numa",
        "hmat-lb,initiator=0,target=2,hierarchy=memory,data-type=access-bandwidth,bandwidth=5120M",
    ],
    packages: 2,
    dies: 0,
    caches: 2,
    cores: 4,
    nodes: 3,
    roots: 1,
};

/// The emulated device in the place of one that a real host would pass through.
fn stand_in(device: &Device) -> Option<String> {
    match (device.vendor, device.device) {
        (0x8086, 0x10d3) => Some("e1000e,romfile=".into()),
        (0x1af4, _) => Some("virtio-rng-pci".into()),
        _ => None,
    }
}

/// Kernel and image of the guests.
struct Bench {
    folder: tempfile::TempDir,
    kernel: Kernel,
    image: PathBuf,
    qemu: Qemu,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("gather.sh");
        std::fs::write(&script, gather::SCRIPT).unwrap();
        let cache = std::env::var_os("TOMBOLO_CACHE")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"), PathBuf::from);
        let kernel = Kernel::of_kit(&cache.join("guest"), "6.12").unwrap();
        let image = folder.path().join("image");
        Image { files: vec![], programs: vec![script], ..Image::default() }.write(&kernel, &image).unwrap();
        Bench { folder, kernel, image, qemu: Qemu::find(None).unwrap() }
    }

    /// Boots a guest with this layout and returns the topology that its kernel shows.
    fn boot(&self, name: &str, layout: Vec<OsString>) -> Topology {
        let console = self.folder.path().join(format!("{name}.console"));
        let mut machine = Machine::new(&self.kernel.image, &self.image, &console);
        machine.layout = Some(layout);
        let mut guest = Guest::start(&machine).unwrap();
        let output = guest.run("sh /bin/gather.sh").unwrap();
        guest.kill();
        gather::topology(&output, Command::new(env!("CARGO_BIN_EXE_tombolo-topology"))).unwrap()
    }

    fn cpu(&self, flags: &str) -> [OsString; 2] {
        let [_, _, option, value] = Hypervisor::Tcg.arguments(&self.qemu);
        [option.into(), format!("{value}{flags}").into()]
    }

    fn host(&self, shape: &Shape) -> Topology {
        let mut layout: Vec<OsString> = shape.host.iter().map(OsString::from).collect();
        layout.extend(self.cpu(",vendor=GenuineIntel,l3-cache=on"));
        let host = self.boot("host", layout);
        let of = [
            host.groups(|cpu| Some(cpu.package)).len(),
            host.groups(|cpu| cpu.die).len(),
            host.groups(|cpu| cpu.l3).len(),
            host.groups(|cpu| Some(cpu.core)).len(),
            host.nodes.len(),
            host.roots.len(),
        ];
        let must = [shape.packages, shape.dies, shape.caches, shape.cores, shape.nodes, shape.roots];
        assert_eq!(of, must, "packages, dies, caches, cores, nodes and roots of the host: {host:#?}");
        host
    }

    fn guest(&self, plan: &VmPlan) -> Topology {
        let options = Options {
            version: self.qemu.version,
            cpu: "max",
            shared: false,
            // The emulated host's nodes are not this machine's.
            bound: false,
            spare_slot: true,
            device: stand_in,
        };
        let arguments = qemu::arguments(plan, &options).unwrap();
        let mut layout: Vec<OsString> = arguments
            .into_iter()
            .chain(qemu::root_complexes(plan, &options))
            .flat_map(|(option, value)| [OsString::from(option), value.into()])
            .collect();
        layout.extend(["-m".into(), format!("{}M", plan.memory() / MIB).into()]);
        layout.extend(self.cpu(&qemu::cpu_flags(plan, Vendor::Emulated)));
        self.boot("guest", layout)
    }

    /// A guest on a part of a host of this shape must see that part.
    fn check(&self, shape: &Shape, rules: &Rules, part: Part, cpus: u32, memory: u64) -> Vec<Line> {
        let host = self.host(shape);
        let devices = host.roots.iter().flat_map(|root| &root.devices).filter(|d| stand_in(d).is_some());
        let devices = devices.map(|device| device.address.clone()).collect();
        let memory = memory * MIB;
        let request = Request { name: "a".into(), part, cpus, memory, pages: Pages::Transparent, devices };
        let plan = plan(&host, rules, &[request]).unwrap().vms.remove(0);
        let found = self.guest(&plan);
        let lines = compare(&plan.guest(), &found);
        let others: Vec<_> = lines.iter().filter(|line| line.verdict != Verdict::Same).collect();
        assert!(others.is_empty(), "{others:#?}\nplanned: {plan:#?}\nfound: {found:#?}");
        assert!(lines.len() > plan.vcpus.len(), "{lines:#?}");
        lines
    }
}

/// The short form: nodes with unequal memories and distances, and threads.
#[test]
fn short_two_nodes() {
    Bench::new().check(&TWO_NODES, &Rules::default(), Part::Host, 0, 448);
}

#[test]
fn four_nodes() {
    Bench::new().check(&FOUR_NODES, &Rules::default(), Part::Host, 0, 640);
}

#[test]
fn four_nodes_of_which_the_guest_has_the_nearest_two() {
    let rules = Rules { taken: "0".parse().unwrap(), ..Rules::default() };
    Bench::new().check(&FOUR_NODES, &rules, Part::Close, 2, 320);
}

#[test]
fn threads_of_cores() {
    Bench::new().check(&SMT, &Rules::default(), Part::Host, 0, 384);
}

#[test]
fn threads_of_cores_one_of_which_is_reserved() {
    let rules = Rules { reserve: 1, ..Rules::default() };
    Bench::new().check(&SMT, &rules, Part::Close, 3, 384);
}

#[test]
fn two_dies_with_a_cache_each() {
    Bench::new().check(&TWO_DIES, &Rules::default(), Part::Host, 0, 384);
}

#[test]
fn two_dies_of_which_one_lacks_a_reserved_core() {
    let rules = Rules { reserve: 2, ..Rules::default() };
    Bench::new().check(&TWO_DIES, &rules, Part::Host, 0, 384);
}

#[test]
fn nodes_of_unequal_memories() {
    Bench::new().check(&UNEQUAL_MEMORIES, &Rules::default(), Part::Host, 0, 512);
}

#[test]
fn a_node_with_memory_alone() {
    Bench::new().check(&MEMORY_ONLY_NODE, &Rules::default(), Part::Host, 0, 512);
}

#[test]
fn three_root_complexes() {
    Bench::new().check(&THREE_ROOT_COMPLEXES, &Rules::default(), Part::Host, 0, 448);
}

#[test]
fn nodes_of_declared_speeds() {
    let lines = Bench::new().check(&DECLARED_SPEEDS, &Rules::default(), Part::Host, 0, 512);
    let slow = lines.iter().find(|line| line.object == "node 2: bandwidth and latency").unwrap();
    assert_eq!(slow.planned, "5120 MiB/s, 250 ns");
}
