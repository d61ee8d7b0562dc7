// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine beside what it must be, object by object.

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::memory::MIB;
use crate::model::{Cpu, Topology};

/// The result of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As planned.
    Same,
    /// Not as planned.
    Differs,
    /// One side does not show it.
    Unknown,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// The object, and the property that is compared.
    pub object: String,
    /// The plan's value.
    pub planned: String,
    /// The value in the guest or in QEMU.
    pub found: String,
    /// The comparison's result.
    pub verdict: Verdict,
}

impl Line {
    /// A line of two texts.
    pub fn of(object: impl Into<String>, planned: impl ToString, found: impl ToString) -> Line {
        let (planned, found) = (planned.to_string(), found.to_string());
        let verdict = if planned == found { Verdict::Same } else { Verdict::Differs };
        Line { object: object.into(), planned, found, verdict }
    }

    /// A line of which one side says nothing, and why.
    pub fn unknown(object: impl Into<String>, planned: impl ToString, why: impl Into<String>) -> Line {
        let (planned, found) = (planned.to_string(), why.into());
        Line { object: object.into(), planned, found, verdict: Verdict::Unknown }
    }
}

/// The firmware and the kernel's own tables hide a little of a node's memory: as much may be missing.
pub const HIDDEN: u64 = 4 * MIB;

/// The object of one kind that a CPU is a part of.
type Object = fn(&Cpu) -> Option<u32>;

/// Puts `found` beside `planned`.
pub fn compare(planned: &Topology, found: &Topology) -> Vec<Line> {
    let mut lines = vec![Line::of("CPUs online", planned.online(), found.online())];
    let kinds: [(&str, Object); 4] = [
        ("package", |cpu| Some(cpu.package)),
        ("die", |cpu| cpu.die),
        ("L3 cache", |cpu| cpu.l3),
        ("core", |cpu| Some(cpu.core)),
    ];
    for (kind, of) in kinds {
        objects(kind, &groups(planned, of), &groups(found, of), &mut lines);
    }
    nodes(planned, found, &mut lines);
    roots(planned, found, &mut lines);
    lines
}

fn groups(machine: &Topology, of: Object) -> Vec<CpuSet> {
    let mut groups: Vec<CpuSet> = machine.groups(of).into_values().collect();
    groups.sort_by_key(CpuSet::first);
    groups
}

/// Objects of one kind, found by their first CPU: their numbers mean nothing.
fn objects(kind: &str, planned: &[CpuSet], found: &[CpuSet], lines: &mut Vec<Line>) {
    let with = |cpus: &CpuSet| found.iter().find(|group| group.first() == cpus.first());
    for (number, cpus) in planned.iter().enumerate() {
        let there = with(cpus).map_or("none".into(), |cpus| format!("CPUs {cpus}"));
        lines.push(Line::of(format!("{kind} {number}"), format!("CPUs {cpus}"), there));
    }
    let known = |group: &&CpuSet| planned.iter().any(|cpus| cpus.first() == group.first());
    for group in found.iter().filter(|group| !known(group)) {
        lines.push(Line::of(format!("{kind} that is not planned"), "none", format!("CPUs {group}")));
    }
}

fn nodes(planned: &Topology, found: &Topology, lines: &mut Vec<Line>) {
    let list = |machine: &Topology| machine.nodes.iter().map(|node| node.os).collect::<CpuSet>();
    lines.push(Line::of("NUMA nodes", list(planned), list(found)));
    let (own, others) = (planned.own_cpus(), found.own_cpus());
    for node in &planned.nodes {
        let name = format!("node {}", node.os);
        let Some(there) = found.node(node.os) else { continue };
        // The kernel counts a CPU to one node; which CPUs are near a memory-only node is hwloc's inference.
        lines.push(Line::of(format!("{name}: CPUs"), &own[&node.os], &others[&node.os]));
        lines.push(size(&name, node.memory, there.memory));
        if let Some(access) = node.access {
            let text = |a: crate::model::Access| format!("{} MiB/s, {} ns", a.bandwidth, a.latency);
            let object = format!("{name}: bandwidth and latency");
            lines.push(match there.access {
                Some(there) => Line::of(object, text(access), text(there)),
                None => Line::unknown(object, text(access), "its kernel shows none"),
            });
        }
    }
    let Some(distances) = &planned.distances else { return };
    for (node, row) in planned.nodes.iter().zip(distances) {
        let there: Option<Vec<u64>> = planned.nodes.iter().map(|to| found.distance(node.os, to.os)).collect();
        let object = format!("node {}: distances", node.os);
        lines.push(match there {
            Some(there) => Line::of(object, text(row), text(&there)),
            // A kernel with one node shows none.
            None if planned.nodes.len() == 1 => continue,
            None => Line::unknown(object, text(row), "its kernel shows none"),
        });
    }
}

fn text(row: &[u64]) -> String {
    row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn size(name: &str, planned: u64, found: u64) -> Line {
    let mut line =
        Line::of(format!("{name}: memory"), format!("{} MiB", planned / MIB), format!("{} MiB", found / MIB));
    let same = found <= planned && planned - found <= HIDDEN;
    line.verdict = if same { Verdict::Same } else { Verdict::Differs };
    line
}

fn roots(planned: &Topology, found: &Topology, lines: &mut Vec<Line>) {
    for root in &planned.roots {
        let name = format!("PCI root complex {:02x}", root.bus);
        let Some(there) = found.roots.iter().find(|r| (r.domain, r.bus) == (root.domain, root.bus)) else {
            lines.push(Line::of(name, "there", "none"));
            continue;
        };
        if let Some(node) = root.node {
            let object = format!("{name}: node");
            lines.push(match there.node {
                Some(found) => Line::of(object, node, found),
                None => Line::unknown(object, node, "its kernel shows none"),
            });
        }
        let devices = |root: &crate::model::Root| {
            let mut list: Vec<String> =
                root.devices.iter().map(|d| format!("{:04x}:{:04x}", d.vendor, d.device)).collect();
            list.sort();
            list.join(" ")
        };
        lines.push(Line::of(format!("{name}: devices"), devices(root), devices(there)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::synthetic;

    fn differing(planned: &Topology, found: &Topology) -> Vec<String> {
        let lines = compare(planned, found);
        lines.into_iter().filter(|line| line.verdict != Verdict::Same).map(|line| line.object).collect()
    }

    #[test]
    fn a_machine_is_the_same_as_itself_whatever_its_objects_are_numbered() {
        let machine = synthetic("package:2 [numa(memory=1GiB)] die:2 l3:1 core:2 pu:2").unwrap();
        let mut other = machine.clone();
        other.cpus.iter_mut().for_each(|cpu| (cpu.core, cpu.package) = (cpu.core + 100, 7 - cpu.package));
        other.nodes[0].memory -= HIDDEN;
        assert_eq!(differing(&machine, &other), Vec::<String>::new());
    }

    #[test]
    fn each_thing_that_differs_is_named() {
        let mut machine = synthetic("package:2 [numa(memory=1GiB)] die:2 l3:1 core:2 pu:2").unwrap();
        machine.distances = Some(vec![vec![10, 20], vec![20, 10]]);
        machine.roots = vec![crate::model::Root { bus: 0x20, node: Some(0), ..Default::default() }];
        type Change = fn(&mut Topology);
        let changes: [(&str, Change); 8] = [
            ("CPUs online", |m| m.cpus.truncate(15)),
            ("package 0", |m| m.cpus[7].package = 1),
            ("die 0", |m| m.cpus.iter_mut().for_each(|cpu| cpu.die = None)),
            ("L3 cache 3", |m| m.cpus[15].l3 = Some(9)),
            ("core 0", |m| m.cpus[1].core = 77),
            ("node 1: memory", |m| m.nodes[1].memory -= HIDDEN + 1),
            ("node 0: distances", |m| m.distances = Some(vec![vec![10, 21], vec![20, 10]])),
            ("PCI root complex 20: node", |m| m.roots[0].node = Some(1)),
        ];
        for (object, change) in changes {
            let mut other = machine.clone();
            change(&mut other);
            let differing = differing(&machine, &other);
            assert!(differing.iter().any(|name| name == object), "{object} is not in {differing:?}");
        }
    }
}
