// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Properties of each plan, on machines of many shapes up to 16 nodes and 1,024 CPUs.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tombolo_topology::cpus::CpuSet;
use tombolo_topology::model::{Device, Node, Root, Topology};
use tombolo_topology::plan::{Plan, PlanError, Rules, VmPlan, plan};
use tombolo_topology::read::synthetic;
use tombolo_topology::request::{Pages, Part, Request};

const GIB: u64 = 1 << 30;

/// A machine: packages, dies, caches, cores, threads, where its nodes are, and what is wrong with it.
#[derive(Clone, Debug)]
struct Machine {
    wide: [usize; 5],
    node_per_die: bool,
    memory_only: usize,
    offline: BTreeSet<usize>,
    outside: BTreeSet<usize>,
}

impl Machine {
    fn cpus(&self) -> usize {
        self.wide.iter().product()
    }

    fn nodes(&self) -> usize {
        self.wide[0] * if self.node_per_die { self.wide[1] } else { 1 }
    }

    fn build(&self) -> Topology {
        let [packages, dies, caches, cores, threads] = self.wide;
        let (package, die) =
            if self.node_per_die { ("", "[numa(memory=8GiB)]") } else { ("[numa(memory=8GiB)]", "") };
        let text =
            format!("package:{packages} {package} die:{dies} {die} l3:{caches} core:{cores} pu:{threads}");
        let mut machine = synthetic(&text).unwrap();
        for _ in 0..self.memory_only {
            let os = u32::try_from(machine.nodes.len()).unwrap();
            let (cpus, memory) = (machine.online(), 4 * GIB);
            machine.nodes.push(Node { os, cpus, memory, ..Node::default() });
        }
        let count = machine.nodes.len() as u64;
        let far = |a: u64, b: u64| if a == b { 10 } else { 20 + (a * 3 + b * 3) % 7 };
        machine.distances = Some((0..count).map(|a| (0..count).map(|b| far(a, b)).collect()).collect());
        let numbers = |set: &BTreeSet<usize>| -> CpuSet {
            set.iter().map(|cpu| u32::try_from(cpu % self.cpus()).unwrap()).filter(|cpu| *cpu > 0).collect()
        };
        machine.offline = numbers(&self.offline);
        let offline = machine.offline.clone();
        machine.cpus.retain(|cpu| !offline.contains(cpu.os));
        for node in &mut machine.nodes {
            node.cpus = node.cpus.without(&offline);
        }
        machine.outside = numbers(&self.outside).without(&offline);
        machine
    }
}

fn machines() -> impl Strategy<Value = Machine> {
    let holes = || prop::collection::btree_set(0_usize..1024, 0..4);
    let wide = (1_usize..=16, 1_usize..=4, 1_usize..=2, 1_usize..=16, 1_usize..=2);
    (wide, any::<bool>(), 0_usize..=2, holes(), holes())
        .prop_map(|((a, b, c, d, e), node_per_die, memory_only, offline, outside)| Machine {
            wide: [a, b, c, d, e],
            node_per_die,
            memory_only,
            offline,
            outside,
        })
        .prop_filter("up to 1,024 CPUs and 16 nodes", |m| m.cpus() <= 1024 && m.nodes() + m.memory_only <= 16)
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let part = prop_oneof![
        4 => Just(Part::Close),
        1 => (0_u32..4).prop_map(Part::Node),
        1 => Just(Part::Host),
    ];
    let one = (part, 1_u32..40, 1_u64..4000).prop_map(|(part, cpus, megabytes)| Request {
        name: "vm".into(),
        part,
        cpus,
        memory: megabytes << 21,
        pages: Pages::Auto,
        devices: vec![],
    });
    prop::collection::vec(one, 1..5)
}

/// CPUs of the guest that share an object of the host must share it in the guest, and no others.
fn is_like_the_host(host: &Topology, vm: &VmPlan) {
    let guest = vm.guest();
    type Relation = fn(&Topology, u32, u32) -> bool;
    let same_package: Relation = |m, a, b| m.cpu(a).unwrap().package == m.cpu(b).unwrap().package;
    let same_die: Relation = |m, a, b| {
        let die = |cpu| m.cpu(cpu).map(|cpu| (cpu.package, cpu.die)).unwrap();
        die(a) == die(b)
    };
    let same_l3: Relation = |m, a, b| m.cpu(a).unwrap().l3 == m.cpu(b).unwrap().l3;
    let same_core: Relation = |m, a, b| m.cpu(a).unwrap().core == m.cpu(b).unwrap().core;
    let same_node: Relation = |m, a, b| m.node_of(a) == m.node_of(b);
    let mut relations = vec![same_package, same_l3, same_core, same_node];
    if !vm.notes.iter().any(|note| note.contains("become dies")) {
        relations.push(same_die);
    }
    for (a, first) in (0..).zip(&vm.vcpus) {
        // Neighbours in the guest's order, and a few far ones: all pairs of 1,024 are too many for each case.
        for (b, second) in (0..).zip(&vm.vcpus).skip(a as usize).step_by(1 + vm.vcpus.len() / 32) {
            for relation in &relations {
                assert_eq!(
                    relation(host, first.host, second.host),
                    relation(&guest, a, b),
                    "{first:?} {second:?}"
                );
            }
        }
    }
    for (a, from) in vm.nodes.iter().enumerate() {
        for (b, to) in vm.nodes.iter().enumerate() {
            let (a, b) = (u32::try_from(a).unwrap(), u32::try_from(b).unwrap());
            assert_eq!(host.distance(from.host, to.host), guest.distance(a, b));
        }
    }
    let slots: BTreeSet<_> = vm.vcpus.iter().map(|vcpu| vcpu.slot).collect();
    assert_eq!(slots.len(), vm.vcpus.len(), "each vCPU has a slot of its own");
    assert!(vm.vcpus.is_sorted_by_key(|vcpu| vcpu.slot), "the guest's kernel numbers CPUs by their slots");
}

fn nothing_is_given_twice(host: &Topology, rules: &Rules, plan: &Plan) {
    let mut given = CpuSet::default();
    let vms = plan.vms.iter().flat_map(|vm| [vm.host_cpus(), vm.idle.clone()]);
    for cpus in vms.chain(plan.reserved.values().cloned()).chain([plan.free.clone()]) {
        for cpu in cpus.iter() {
            assert!(given.insert(cpu) || rules.taken.contains(cpu), "CPU {cpu} is given twice");
        }
    }
    for cpu in given.iter() {
        assert!(host.usable().contains(cpu), "CPU {cpu} can't be used");
    }
    assert!(host.usable().without(&rules.taken).without(&given).is_empty(), "a CPU is lost");
    for cpu in plan.vms.iter().flat_map(|vm| vm.vcpus.iter().map(|vcpu| vcpu.host)) {
        assert!(!rules.taken.contains(cpu), "CPU {cpu} was taken");
    }
}

fn memory_fits(host: &Topology, requests: &[Request], plan: &Plan) {
    let mut used: BTreeMap<u32, u64> = BTreeMap::new();
    for (vm, request) in plan.vms.iter().zip(requests) {
        assert_eq!(vm.memory(), request.memory);
        for node in &vm.nodes {
            assert!(node.memory > 0);
            *used.entry(node.host).or_default() += node.memory;
        }
    }
    for (node, bytes) in used {
        let all = host.node(node).unwrap().memory;
        assert!(bytes <= all);
        assert_eq!(plan.free_memory[&node], all - bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 500, ..ProptestConfig::default() })]
    #[test]
    fn a_plan_gives_nothing_twice_keeps_the_reserve_and_is_like_the_host(
        machine in machines(),
        requests in requests(),
        reserve in 0_u32..5,
        taken in prop::collection::btree_set(0_u32..64, 0..6),
    ) {
        let host = machine.build();
        let taken: CpuSet = taken.into_iter().filter(|cpu| host.usable().contains(*cpu)).collect();
        let rules = Rules { reserve, taken, ..Rules::default() };
        match plan(&host, &rules, &requests) {
            Ok(plan) => {
                nothing_is_given_twice(&host, &rules, &plan);
                memory_fits(&host, &requests, &plan);
                for (node, cpus) in host.own_cpus() {
                    let usable = cpus.and(&host.usable());
                    let kept = plan.reserved.get(&node).map_or(0, CpuSet::len);
                    assert!(kept >= usable.len().min(reserve as usize), "node {node} keeps {kept}");
                }
                for (vm, request) in plan.vms.iter().zip(&requests) {
                    is_like_the_host(&host, vm);
                    if request.part == Part::Close {
                        assert_eq!(vm.vcpus.len(), request.cpus as usize);
                    }
                }
            }
            Err(PlanError::CpusShort { wanted, left, .. }) => assert!(wanted > left),
            Err(PlanError::NoSuchNode { node, .. }) => assert!(host.node(node).is_none()),
            Err(PlanError::NodeWithoutCpus { node, .. }) => assert!(host.own_cpus()[&node].is_empty()),
            Err(PlanError::MemoryShort { .. }) => {
                let all: u64 = host.nodes.iter().map(|node| node.memory).sum();
                let wanted: u64 = requests.iter().map(|request| request.memory).sum();
                let least = host.nodes.iter().map(|node| node.memory).min().unwrap_or(0);
                assert!(wanted > all.min(least) || requests.iter().any(|r| r.memory < 16 * (2 << 20)));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

fn request(part: Part, cpus: u32) -> Request {
    Request { name: "a".into(), part, cpus, memory: GIB, pages: Pages::Auto, devices: vec![] }
}

fn error(host: &Topology, rules: &Rules, request: Request) -> String {
    plan(host, rules, &[request]).unwrap_err().to_string()
}

#[test]
fn cpus_that_are_close_are_below_one_cache_where_one_holds_them() {
    let host = synthetic("package:2 [numa(memory=16GiB)] l3:2 core:4 pu:2").unwrap();
    let rules = Rules { reserve: 2, ..Rules::default() };
    let plan = plan(&host, &rules, &[request(Part::Close, 8), request(Part::Close, 6)]).unwrap();
    let caches =
        |vm: &VmPlan| -> BTreeSet<_> { vm.host_cpus().iter().map(|cpu| host.cpu(cpu).unwrap().l3).collect() };
    assert_eq!(plan.vms[0].host_cpus().to_string(), "8-15");
    assert_eq!(plan.vms[1].host_cpus().to_string(), "2-7", "the cache that is left with the fewest");
    assert_eq!(plan.vms.iter().map(|vm| caches(vm).len()).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(plan.vms[0].emulator.to_string(), "0-1");
}

#[test]
fn cpus_of_several_nodes_are_in_equal_parts_on_the_nearest() {
    let mut host = synthetic("package:4 [numa(memory=16GiB)] core:8 pu:1").unwrap();
    let far = |a: usize, b: usize| {
        if a == b {
            10
        } else if a / 2 == b / 2 {
            12
        } else {
            32
        }
    };
    host.distances = Some((0..4).map(|a| (0..4).map(|b| far(a, b)).collect()).collect());
    let rules = Rules { taken: "0".parse().unwrap(), ..Rules::default() };
    let vm = plan(&host, &rules, &[request(Part::Close, 12)]).unwrap().vms.remove(0);
    assert_eq!(vm.host_cpus().to_string(), "1-6,8-13");
    assert_eq!(vm.nodes.iter().map(|node| node.host).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_vm_with_the_whole_host_has_its_memory_only_nodes_too_and_sizes_in_their_proportion() {
    let mut host = synthetic("package:2 [numa(memory=6GiB)] core:2 pu:1").unwrap();
    host.nodes[1].memory = 2 * GIB;
    host.nodes.push(Node { os: 2, memory: 8 * GIB, ..Node::default() });
    let mut wanted = request(Part::Host, 0);
    wanted.memory = 8 * GIB;
    let vm = plan(&host, &Rules::default(), &[wanted]).unwrap().vms.remove(0);
    let sizes: Vec<u64> = vm.nodes.iter().map(|node| node.memory / GIB).collect();
    assert_eq!(sizes, [3, 1, 4]);
    assert!(vm.cpus_of(2).is_empty());
}

#[test]
fn huge_pages_are_taken_where_all_of_the_memory_is_reserved_on_its_nodes() {
    let mut host = synthetic("package:2 [numa(memory=16GiB)] core:2 pu:1").unwrap();
    let huge = |free| vec![tombolo_topology::model::HugePages { size: 2 << 20, free }];
    (host.nodes[0].huge, host.nodes[1].huge) = (huge(512), huge(256));
    let pages = |host: &Topology, wanted| {
        let request = Request { pages: wanted, ..request(Part::Host, 0) };
        plan(host, &Rules::default(), &[request]).map(|plan| plan.vms[0].pages.to_string())
    };
    assert_eq!(pages(&host, Pages::Auto), Ok("reserved pages of 2 MiB".into()), "512 MiB on each");
    host.nodes[1].huge = huge(255);
    assert_eq!(pages(&host, Pages::Auto), Ok("transparent huge pages".into()));
    let refused = pages(&host, Pages::Gigantic).unwrap_err().to_string();
    assert!(refused.contains("reserved pages of 1 GiB") && refused.contains("hugepages"), "{refused}");
}

#[test]
fn cpus_lie_where_the_pages_that_a_vm_wants_are_left() {
    let mut host = synthetic("package:3 [numa(memory=16GiB)] core:2 pu:1").unwrap();
    let huge = |size, free| vec![tombolo_topology::model::HugePages { size, free }];
    (host.nodes[1].huge, host.nodes[2].huge) = (huge(2 << 20, 4096), huge(1 << 30, 4));
    let node = |pages| {
        let wanted = Request { pages, ..request(Part::Close, 1) };
        plan(&host, &Rules::default(), &[wanted]).map(|plan| plan.vms[0].nodes[0].host)
    };
    assert_eq!((node(Pages::Huge), node(Pages::Gigantic)), (Ok(1), Ok(2)));
    // Nodes 1 and 2 have their CPUs taken: what is left has no such page.
    let rules = Rules { taken: "2-5".parse().unwrap(), ..Rules::default() };
    let wanted = Request { pages: Pages::Huge, ..request(Part::Close, 1) };
    let refused = plan(&host, &rules, &[wanted]).unwrap_err().to_string();
    assert!(refused.contains("node 0 has 0 MiB left"), "{refused}");
}

#[test]
fn interrupts_of_devices_and_processes_beside_a_vm_get_reserved_cpus_of_the_right_node() {
    let mut host = synthetic("package:3 [numa(memory=16GiB)] core:4 pu:1").unwrap();
    let root = |bus: u8, node, address: &str| Root {
        bus,
        node,
        devices: vec![Device { address: address.into(), ..Device::default() }],
        ..Root::default()
    };
    host.roots = vec![
        root(0x10, Some(0), "0000:11:00.0"),
        root(0x20, Some(2), "0000:21:00.0"),
        root(0x30, None, "0000:31:00.0"),
    ];
    let devices: Vec<String> = host.roots.iter().map(|root| root.devices[0].address.clone()).collect();
    let of = |reserve| {
        let rules = Rules { reserve, ..Rules::default() };
        let request = Request { devices: devices.clone(), ..request(Part::Node(1), 0) };
        let vm = plan(&host, &rules, &[request]).unwrap().vms.remove(0);
        let interrupts: Vec<String> = vm.roots.iter().map(|root| root.interrupts.to_string()).collect();
        (vm.service_cpus().to_string(), interrupts)
    };
    let owned = |list: [&str; 3]| list.map(str::to_owned).to_vec();
    assert_eq!(of(1), ("4".into(), owned(["0", "8", "4"])), "a device without a node goes to the VM's");
    assert_eq!(of(0), (String::new(), owned(["", "", ""])), "vCPUs handle none");
}

#[test]
fn what_can_not_be_had_is_refused_by_name_with_the_remedy() {
    let mut host = synthetic("package:2 [numa(memory=16GiB)] core:4 pu:1").unwrap();
    (host.offline, host.outside) = ("9".parse().unwrap(), "7".parse().unwrap());
    host.nodes.push(Node { os: 2, memory: GIB, ..Node::default() });
    let rules = Rules { reserve: 1, ..Rules::default() };
    let cpus = |list: &str| request(Part::Cpus(list.parse().unwrap()), 0);
    let mut large = request(Part::Node(0), 0);
    large.memory = 64 * GIB;
    let mut with_device = request(Part::Host, 0);
    with_device.devices = vec!["0000:01:00.0".into()];
    let cases = [
        (request(Part::Close, 8), "wants 8 CPUs and 5 are left", "lower its 'cpus'"),
        (cpus("1,9"), "CPUs 9: they are offline", "bring them online"),
        (cpus("7"), "CPUs 7: they are outside of the cpuset", "cpuset.cpus"),
        (cpus("12"), "CPUs 12: the host does not have them", "topology show"),
        (cpus("0-1"), "CPUs 0: they are reserved", "topology plan"),
        (request(Part::Node(7), 0), "node 7, and the host has the nodes 0-2", "topology show"),
        (
            request(Part::Node(2), 0),
            "node 2, which the VM 'a' names, has memory and no CPU",
            "name a node with CPUs",
        ),
        (large, "wants 65536 MiB", "lower its 'memory'"),
        (with_device, "0000:01:00.0", "passthrough ls"),
    ];
    for (request, what, remedy) in cases {
        let text = error(&host, &rules, request);
        assert!(text.contains("'a'") && text.contains(what) && text.contains(remedy), "{text}");
    }
    host.nodes[1].memory = 0;
    let text = error(&host, &rules, request(Part::Node(1), 0));
    assert!(text.contains("node 1 has CPUs of the VM 'a' and no memory") && text.contains("close"), "{text}");
}

#[test]
fn what_qemu_can_not_express_is_refused_with_the_object_and_given_where_a_part_is_asked_for_that_it_can() {
    let rules = Rules::default();
    let cpus = |list: &str| request(Part::Cpus(list.parse().unwrap()), 0);
    let refused = |host: &Topology, request: Request, what: &str, remedy: &str| {
        let text = error(host, &rules, request);
        assert!(text.contains("'a'") && text.contains(what) && text.contains(remedy), "{text}");
    };

    let mut host = synthetic("package:1 [numa(memory=16GiB)] die:2 l3:1 core:2 pu:1").unwrap();
    host.cpus.iter_mut().for_each(|cpu| cpu.l3 = Some(5));
    refused(&host, cpus("0-3"), "the L3 cache 5 of the host is shared by several dies", "CPUs of one die");
    assert_eq!(plan(&host, &rules, &[cpus("2-3")]).unwrap().vms[0].shape.dies, 1);

    let mut host = synthetic("package:2 [numa(memory=16GiB)] core:2 pu:2").unwrap();
    host.nodes[0].cpus = "0,2-3".parse().unwrap();
    host.nodes[1].cpus = "1,4-7".parse().unwrap();
    refused(&host, cpus("0-1"), "the CPUs of core 0 belong to several NUMA nodes", "other CPUs");
    host.nodes[1].cpus = "4-7".parse().unwrap();
    refused(&host, cpus("1-2"), "CPU 1, which", "name other CPUs");
    assert_eq!(plan(&host, &rules, &[cpus("2-3")]).unwrap().vms[0].vcpus.len(), 2);

    let devices: Vec<Device> = (0..300u32)
        .map(|n| Device { address: format!("0000:{:02x}:{:02x}.0", n / 32, n % 32), ..Device::default() })
        .collect();
    let many =
        Request { devices: devices.iter().map(|d| d.address.clone()).collect(), ..request(Part::Host, 0) };
    host.nodes[0].cpus = "0-3".parse().unwrap();
    host.roots = vec![Root { devices, ..Root::default() }];
    refused(&host, many, "more PCI devices than the buses of a guest can hold", "fewer");
}
