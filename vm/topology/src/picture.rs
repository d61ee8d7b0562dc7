// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A topology as a tree of text, and as SVG.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::cpus::CpuSet;
use crate::memory::{GIB, MIB};
use crate::model::{Cpu, Topology};

/// CPUs by user: a VM, or a process that serves VMs.
pub type Users = BTreeMap<String, CpuSet>;

/// A machine as a tree.
pub fn text(machine: &Topology, users: &Users) -> String {
    let memory = machine.nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.memory));
    let mut out = format!("machine: {} CPUs, {}\n", machine.cpus.len(), size(memory));
    let own = machine.own_cpus();
    for node in &machine.nodes {
        let cpus = &own[&node.os];
        let cpus = if cpus.is_empty() { "no CPUs".into() } else { format!("CPUs {cpus}") };
        let huge = node.huge.iter().filter(|pages| pages.free > 0);
        let huge: String = huge.map(|h| format!(", {} free pages of {}", h.free, size(h.size))).collect();
        let speed =
            node.access.map(|a| format!(", {} MiB/s, {} ns", a.bandwidth, a.latency)).unwrap_or_default();
        let _ = writeln!(out, "  node {}: {}, {cpus}{huge}{speed}", node.os, size(node.memory));
    }
    for (node, row) in machine.nodes.iter().zip(machine.distances.iter().flatten()) {
        let row: Vec<String> = row.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "  distances of node {}: {}", node.os, row.join(" "));
    }
    for level in tree(machine) {
        let _ = writeln!(
            out,
            "{}{}{}",
            "  ".repeat(level.depth),
            level.name,
            who(&level.cpus, level.is_core, users)
        );
    }
    for (name, cpus) in [("offline", &machine.offline), ("outside of this process' cpuset", &machine.outside)]
    {
        if !cpus.is_empty() {
            let _ = writeln!(out, "  {name}: CPUs {cpus}");
        }
    }
    for root in &machine.roots {
        let node = root.node.map_or(String::new(), |node| format!(", node {node}"));
        let _ = writeln!(out, "  PCI root complex {:04x}:{:02x}{node}", root.domain, root.bus);
        for device in &root.devices {
            let _ = writeln!(
                out,
                "    {} {:04x}:{:04x} class {:04x}",
                device.address, device.vendor, device.device, device.class
            );
        }
    }
    out
}

/// A line of the tree of packages, dies, caches and cores.
struct Level {
    depth: usize,
    name: String,
    cpus: CpuSet,
    is_core: bool,
}

fn tree(machine: &Topology) -> Vec<Level> {
    let mut levels = Vec::new();
    let mut last: [Option<u32>; 4] = [None; 4];
    let mut cpus: Vec<&Cpu> = machine.cpus.iter().collect();
    cpus.sort_by_key(|cpu| (cpu.package, cpu.die, cpu.l3, cpu.core, cpu.os));
    for cpu in cpus {
        let objects = [
            ("package", Some(cpu.package)),
            ("die", cpu.die),
            ("L3 cache", cpu.l3),
            ("core", Some(cpu.core)),
        ];
        let mut depth = 1;
        for (at, (kind, number)) in objects.into_iter().enumerate() {
            let Some(number) = number else { continue };
            if last[at] != Some(number) {
                let is_core = kind == "core";
                levels.push(Level {
                    depth,
                    name: format!("{kind} {number}"),
                    cpus: CpuSet::default(),
                    is_core,
                });
                last[at] = Some(number);
                last[at + 1..].fill(None);
            }
            depth += 1;
        }
        if let Some(core) = levels.last_mut() {
            core.cpus.insert(cpu.os);
        }
    }
    levels
}

/// The CPUs of a core, with their users.
fn who(cpus: &CpuSet, is_core: bool, users: &Users) -> String {
    if !is_core {
        return String::new();
    }
    let named = cpus.iter().map(|cpu| match user(cpu, users) {
        Some(name) => format!("CPU {cpu} ({name})"),
        None => format!("CPU {cpu}"),
    });
    format!(": {}", named.collect::<Vec<_>>().join(", "))
}

/// The users of a CPU.
fn user(cpu: u32, users: &Users) -> Option<String> {
    let names: Vec<&str> =
        users.iter().filter(|(_, cpus)| cpus.contains(cpu)).map(|(name, _)| name.as_str()).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// Bytes in the largest unit that leaves one digit before the point.
pub fn size(bytes: u64) -> String {
    let (unit, name) = if bytes >= GIB { (GIB, "GiB") } else { (MIB, "MiB") };
    let tenths = (u128::from(bytes) * 10 + u128::from(unit) / 2) / u128::from(unit);
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        tenth => format!("{}.{tenth} {name}", tenths / 10),
    }
}

/// Width and height of a CPU in SVG, in pixels.
const CELL: (usize, usize) = (96, 26);
/// Space between boxes.
const GAP: usize = 8;
/// Height of a line of text.
const LINE: usize = 18;
/// Cores in a row.
const ROW: usize = 8;
/// Colours of users, in turn.
const COLOURS: [&str; 8] =
    ["#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bebada", "#fccde5", "#ffffb3"];

/// A machine as a picture: a box per package, a row of boxes per cache, a cell per CPU in the colour of who has it.
pub fn svg(machine: &Topology, users: &Users) -> String {
    let mut body = String::new();
    let mut y = GAP;
    let width = ROW * (CELL.0 + GAP) + 5 * GAP;
    let own = machine.own_cpus();
    for node in &machine.nodes {
        let title = format!("node {}: {}, CPUs {}", node.os, size(node.memory), own[&node.os]);
        label(&mut body, GAP, y + LINE - 5, &title);
        y += LINE;
    }
    for (package, cpus) in machine.groups(|cpu| Some(cpu.package)) {
        let top = y;
        label(&mut body, 2 * GAP, y + LINE, &format!("package {package}"));
        y += LINE + GAP;
        let key = |cpu: &Cpu| cpus.contains(cpu.os).then_some((cpu.die, cpu.l3));
        for ((die, l3), cpus) in machine.groups(key) {
            let name = |kind, number: Option<u32>| number.map(|n| format!("{kind} {n}"));
            let names: Vec<String> = [name("die", die), name("L3 cache", l3)].into_iter().flatten().collect();
            let inner = y;
            label(&mut body, 3 * GAP, y + LINE, &names.join(", "));
            y += LINE + GAP;
            y = cores(&mut body, machine, &cpus, users, y);
            frame(&mut body, (2 * GAP, inner), (width - 4 * GAP, y - inner));
            y += GAP;
        }
        frame(&mut body, (GAP, top), (width - 2 * GAP, y - top));
        y += GAP;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{y}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{width}\" height=\"{y}\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// Cells for the CPUs of a cache, a column per core; returns where it ends.
fn cores(body: &mut String, machine: &Topology, cpus: &CpuSet, users: &Users, top: usize) -> usize {
    let groups = machine.groups(|cpu| cpus.contains(cpu.os).then_some(cpu.core));
    let deepest = groups.values().map(CpuSet::len).max().unwrap_or(1);
    let rows = groups.len().div_ceil(ROW);
    for (at, threads) in groups.values().enumerate() {
        let x = 3 * GAP + (at % ROW) * (CELL.0 + GAP);
        let y = top + (at / ROW) * (deepest * CELL.1 + GAP);
        for (thread, cpu) in threads.iter().enumerate() {
            let y = y + thread * CELL.1;
            let place = users.values().position(|cpus| cpus.contains(cpu));
            let colour = place.map_or("#f4f4f4", |place| COLOURS[place % COLOURS.len()]);
            let _ = writeln!(
                body,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{colour}\" stroke=\"#444\"/>",
                CELL.0, CELL.1
            );
            let name = user(cpu, users).map(|name| format!(" {name}")).unwrap_or_default();
            label(body, x + 5, y + CELL.1 - 8, &format!("{cpu}{name}"));
        }
    }
    top + rows * (deepest * CELL.1 + GAP)
}

fn frame(body: &mut String, (x, y): (usize, usize), (width, height): (usize, usize)) {
    let _ = writeln!(
        body,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#888\"/>"
    );
}

fn label(body: &mut String, x: usize, y: usize, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\">{text}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_each_object_once_and_says_who_has_a_cpu() {
        let machine =
            crate::read::synthetic("package:2 [numa(memory=16GiB)] die:2 l3:1 core:2 pu:2").unwrap();
        let users = Users::from([("web".into(), "2-3".parse().unwrap())]);
        let text = text(&machine, &users);
        assert!(text.starts_with("machine: 16 CPUs, 32 GiB\n  node 0: 16 GiB, CPUs 0-7\n"), "{text}");
        assert_eq!(text.matches("package").count(), 2, "{text}");
        assert_eq!(text.matches("die").count(), 4, "{text}");
        assert!(text.contains("        core 1: CPU 2 (web), CPU 3 (web)\n"), "{text}");
        let shared =
            Users::from(["QEMU of web", "switch of lan"].map(|name| (name.into(), "0".parse().unwrap())));
        assert!(
            super::text(&machine, &shared).contains("core 0: CPU 0 (QEMU of web, switch of lan), CPU 1\n")
        );
    }

    #[test]
    fn a_picture_is_well_formed_and_has_a_cell_for_each_cpu() {
        let machine = crate::read::synthetic("package:2 [numa] l3:2 core:12 pu:2").unwrap();
        let users = Users::from([("a<b&c".into(), "0-3".parse().unwrap())]);
        let picture = svg(&machine, &users);
        let root = xmltree::Element::parse(picture.as_bytes()).unwrap();
        let named = |name: &str| {
            root.children.iter().filter_map(|c| c.as_element()).filter(|e| e.name == name).count()
        };
        // The ground, two packages, four caches, and the CPUs.
        assert_eq!(named("rect"), 1 + 2 + 4 + 96);
        assert!(named("text") >= 96);
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!([size(GIB), size(3 * GIB / 2), size(512 * MIB)], ["1 GiB", "1.5 GiB", "512 MiB"]);
    }
}
