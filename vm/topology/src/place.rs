// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The choice of a VM's CPUs.
//!
//! CPUs that are to be close together come from the smallest object that has enough whole cores, and enough memory in the pages that are asked for: the CPUs of one L3 cache, then one node, then as few nodes as
//! possible, the nearest to each other, with equal parts. Among equals the one that is left with the fewest free CPUs is taken, so that large
//! objects stay whole for later VMs.

use std::collections::BTreeMap;

use crate::cpus::CpuSet;
use crate::memory;
use crate::model::{Cpu, Topology};
use crate::plan::{Ledger, PlanError};
use crate::request::{Part, Request};

/// CPUs of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub cpus: CpuSet,
    /// Siblings of a core that is used in part.
    pub idle: CpuSet,
    /// Why these.
    pub why: String,
}

/// CPUs that stay with the host: of each node the first cores, until there are `least` CPUs.
pub(crate) fn reserve(host: &Topology, least: u32) -> BTreeMap<u32, CpuSet> {
    let usable = host.usable();
    let mut reserved = BTreeMap::new();
    for (node, cpus) in host.own_cpus() {
        let mut kept = CpuSet::default();
        for core in cores(host, &cpus.and(&usable)) {
            if kept.len() >= least as usize {
                break;
            }
            kept.extend(core.iter());
        }
        if !kept.is_empty() {
            reserved.insert(node, kept);
        }
    }
    reserved
}

/// `cpus` by core, in the order of packages, dies, caches and cores.
fn cores(host: &Topology, cpus: &CpuSet) -> Vec<CpuSet> {
    let key = |cpu: &Cpu| cpus.contains(cpu.os).then_some((cpu.package, cpu.die, cpu.l3, cpu.core));
    host.groups(key).into_values().collect()
}

/// Chooses the CPUs of a VM.
pub(crate) fn choose(ledger: &Ledger<'_>, request: &Request) -> Result<Placed, PlanError> {
    let short = |wanted: usize, left: usize, of: String| {
        Err(PlanError::CpusShort { vm: request.name.clone(), wanted, left, of })
    };
    let whole = |cpus: CpuSet, why: String| Ok(Placed { cpus, idle: CpuSet::default(), why });
    match &request.part {
        Part::Host if ledger.free.is_empty() => short(1, 0, String::new()),
        Part::Host => whole(ledger.free.clone(), "all free CPUs".into()),
        Part::Node(node) => {
            let Some(own) = ledger.host.own_cpus().remove(node) else {
                let nodes: CpuSet = ledger.host.nodes.iter().map(|node| node.os).collect();
                let nodes = format!("the nodes {nodes}");
                return Err(PlanError::NoSuchNode { vm: request.name.clone(), node: *node, nodes });
            };
            if own.is_empty() {
                return Err(PlanError::NodeWithoutCpus { vm: request.name.clone(), node: *node });
            }
            let free = own.and(&ledger.free);
            if free.is_empty() {
                return short(1, 0, format!(" on node {node}"));
            }
            whole(free, format!("all free CPUs of node {node}"))
        }
        Part::Cpus(cpus) => {
            refuse(ledger, request, cpus)?;
            whole(cpus.clone(), "the CPUs that the compose file names".into())
        }
        Part::Close => close(ledger, request),
    }
}

/// Refuses named CPUs that can't be had.
fn refuse(ledger: &Ledger<'_>, request: &Request, cpus: &CpuSet) -> Result<(), PlanError> {
    let refused = |cpus: CpuSet, why| {
        if cpus.is_empty() {
            return Ok(());
        }
        Err(PlanError::CpusRefused { vm: request.name.clone(), cpus, why })
    };
    let host = ledger.host;
    refused(
        cpus.and(&host.offline),
        "they are offline; bring them online in /sys/devices/system/cpu/cpu*/online, or name others",
    )?;
    refused(
        cpus.without(&host.online()),
        "the host does not have them; 'tombolo topology show' shows its CPUs",
    )?;
    refused(
        cpus.and(&host.outside),
        "they are outside of the cpuset of this process; add them to its cgroup (cpuset.cpus), or name others",
    )?;
    refused(
        cpus.without(&ledger.free),
        "they are reserved for the host or another VM has them; 'tombolo topology plan' shows who has which",
    )
}

/// The package, die and L3 cache of a core.
type Domain = (u32, Option<u32>, Option<u32>);

/// A core with all its usable CPUs free.
struct Core {
    cpus: CpuSet,
    node: u32,
    domain: Domain,
}

/// Cores that no VM and no reservation has a part of.
fn free_cores(ledger: &Ledger<'_>) -> Vec<Core> {
    let usable = ledger.host.usable();
    cores(ledger.host, &usable)
        .into_iter()
        .filter(|cpus| cpus.without(&ledger.free).is_empty())
        .filter_map(|cpus| {
            let cpu = ledger.host.cpu(cpus.first()?)?;
            let node = *ledger.node_of.get(&cpu.os)?;
            // A VM's memory is on the nodes of its CPUs.
            ledger.host.node(node).filter(|node| node.memory > 0)?;
            Some(Core { cpus, node, domain: (cpu.package, cpu.die, cpu.l3) })
        })
        .collect()
}

fn close(ledger: &Ledger<'_>, request: &Request) -> Result<Placed, PlanError> {
    let wanted = request.cpus as usize;
    let cores = free_cores(ledger);
    let left: usize = cores.iter().map(|core| core.cpus.len()).sum();
    if wanted == 0 || wanted > left {
        let (vm, of) = (request.name.clone(), String::new());
        return Err(PlanError::CpusShort { vm, wanted, left, of });
    }
    let mut by_node: BTreeMap<u32, Vec<&Core>> = BTreeMap::new();
    for core in &cores {
        by_node.entry(core.node).or_default().push(core);
    }
    let fits = |nodes: &[u32]| memory::fits(ledger, request, nodes);
    if let Some((domain, chosen)) = one_cache(&by_node, wanted, fits) {
        let object = match domain {
            (_, _, Some(l3)) => format!("L3 cache {l3}"),
            (_, Some(die), _) => format!("die {die}"),
            (package, ..) => format!("package {package}"),
        };
        return Ok(taken(&chosen, wanted, format!("{object} is the smallest object that holds it")));
    }
    // Nodes that hold the CPUs may lack the memory: then no set of nodes fits, and the division of the memory names what is missing.
    let nodes = few_nodes(ledger, &by_node, wanted, fits)
        .or_else(|| few_nodes(ledger, &by_node, wanted, |_| true))
        .unwrap_or_else(|| by_node.keys().copied().collect());
    let mut chosen = Vec::new();
    let mut open = wanted;
    for (at, node) in smallest_first(&nodes, &by_node).into_iter().enumerate() {
        let share = open.div_ceil(nodes.len() - at);
        let mut of_node = from_node(&by_node[&node], share);
        open -= of_node.iter().map(|core| core.cpus.len()).sum::<usize>().min(open);
        chosen.append(&mut of_node);
    }
    let list: CpuSet = nodes.iter().copied().collect();
    let why = match nodes.len() {
        1 => format!("node {list} is the smallest object that holds it"),
        _ => format!("the nodes {list} are the fewest and nearest that hold it"),
    };
    Ok(taken(&chosen, wanted, why))
}

fn count(cores: &[&Core]) -> usize {
    cores.iter().map(|core| core.cpus.len()).sum()
}

/// The cores below one cache that are enough, of the cache that is left with the fewest.
fn one_cache<'a>(
    by_node: &BTreeMap<u32, Vec<&'a Core>>,
    wanted: usize,
    fits: impl Fn(&[u32]) -> bool,
) -> Option<(Domain, Vec<&'a Core>)> {
    let mut best: Option<(usize, _, Vec<&Core>)> = None;
    for (node, cores) in by_node {
        if !fits(&[*node]) {
            continue;
        }
        for (domain, cores) in by_domain(cores) {
            let free = count(&cores);
            if free >= wanted && best.as_ref().is_none_or(|(least, ..)| free < *least) {
                best = Some((free, domain, cores));
            }
        }
    }
    best.map(|(_, domain, cores)| (domain, cores))
}

fn by_domain<'a>(cores: &[&'a Core]) -> BTreeMap<Domain, Vec<&'a Core>> {
    let mut domains: BTreeMap<_, Vec<&Core>> = BTreeMap::new();
    for core in cores {
        domains.entry(core.domain).or_default().push(core);
    }
    domains
}

/// The fewest nodes that have enough CPUs and memory, and among those the nearest to each other, then those that are left with the fewest CPUs.
fn few_nodes(
    ledger: &Ledger<'_>,
    by_node: &BTreeMap<u32, Vec<&Core>>,
    wanted: usize,
    fits: impl Fn(&[u32]) -> bool,
) -> Option<Vec<u32>> {
    let far = |from: u32, to: u32| ledger.host.distance(from, to).unwrap_or(u64::from(from != to));
    let mut best: Option<(usize, u64, usize, Vec<u32>)> = None;
    for start in by_node.keys() {
        let mut others: Vec<u32> = by_node.keys().copied().filter(|node| node != start).collect();
        others.sort_by_key(|node| (far(*start, *node), *node));
        let mut nodes = vec![*start];
        let mut others = others.into_iter();
        loop {
            let free: usize = nodes.iter().map(|node| count(&by_node[node])).sum();
            if free >= wanted && fits(&nodes) {
                let spread = nodes.iter().flat_map(|a| nodes.iter().map(|b| far(*a, *b))).sum();
                let rank = (nodes.len(), spread, free);
                if best.as_ref().is_none_or(|(count, spread, free, _)| rank < (*count, *spread, *free)) {
                    best = Some((rank.0, rank.1, rank.2, nodes));
                }
                break;
            }
            let Some(next) = others.next() else { break };
            nodes.push(next);
        }
    }
    let mut nodes = best?.3;
    nodes.sort_unstable();
    Some(nodes)
}

/// Nodes in the order in which equal parts are taken: what a small one can't give, a larger one gives.
fn smallest_first(nodes: &[u32], by_node: &BTreeMap<u32, Vec<&Core>>) -> Vec<u32> {
    let mut nodes = nodes.to_vec();
    nodes.sort_by_key(|node| (count(&by_node[node]), *node));
    nodes
}

/// Cores of a node with at least `share` CPUs together, as far as it has them, from as few caches as possible.
fn from_node<'a>(cores: &[&'a Core], share: usize) -> Vec<&'a Core> {
    let mut domains: Vec<Vec<&Core>> = by_domain(cores).into_values().collect();
    domains.sort_by_key(|cores| std::cmp::Reverse(count(cores)));
    let mut chosen: Vec<&Core> = Vec::new();
    while count(&chosen) < share && !domains.is_empty() {
        let open = share - count(&chosen);
        // The smallest that holds the rest, else the largest.
        let at = domains.iter().rposition(|cores| count(cores) >= open).unwrap_or(0);
        for core in domains.remove(at) {
            if count(&chosen) < share {
                chosen.push(core);
            }
        }
    }
    chosen
}

/// `wanted` CPUs of whole cores; what is left of the last core stays idle.
fn taken(cores: &[&Core], wanted: usize, why: String) -> Placed {
    let (mut cpus, mut idle) = (CpuSet::default(), CpuSet::default());
    for core in cores {
        if cpus.len() == wanted {
            break;
        }
        for cpu in core.cpus.iter() {
            let set = if cpus.len() < wanted { &mut cpus } else { &mut idle };
            set.insert(cpu);
        }
    }
    Placed { cpus, idle, why }
}
