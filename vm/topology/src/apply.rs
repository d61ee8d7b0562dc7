// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A plan applied to a QEMU that runs: its threads are pinned, and what its memory lies on is read from the kernel.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::affinity;
use crate::compare::Line;
use crate::cpus::CpuSet;
use crate::memory::MIB;
use crate::plan::VmPlan;
use crate::shape::Slot;

/// A vCPU's place in the guest and the thread of QEMU that executes it, as QEMU's monitor says (`query-cpus-fast`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Socket, die, core and thread of the guest's machine.
    pub slot: Slot,
    /// The thread's number.
    pub thread: u32,
}

/// Reads the monitor's answer to `query-cpus-fast`; None: it has another shape.
pub fn threads(reply: &serde_json::Value) -> Option<Vec<Thread>> {
    let number = |value: &serde_json::Value| u32::try_from(value.as_u64()?).ok();
    let of = |cpu: &serde_json::Value| {
        // QEMU leaves out the levels of which the machine has one.
        let place = |name: &str| cpu["props"].get(name).map_or(Some(0), number);
        let slot = Slot {
            socket: place("socket-id")?,
            die: place("die-id")?,
            core: place("core-id")?,
            thread: place("thread-id")?,
        };
        Some(Thread { slot, thread: number(&cpu["thread-id"])? })
    };
    reply.as_array()?.iter().map(of).collect()
}

/// Pins each vCPU's thread to its host CPU, and all other threads of the process to the CPUs for QEMU's own work. Threads that the process
/// starts later inherit where their parent runs.
///
/// # Errors
/// A vCPU has no thread, or the kernel refuses a CPU; what it says is named.
pub fn pin(pid: u32, threads: &[Thread], plan: &VmPlan) -> Result<()> {
    let mut vcpus = BTreeMap::new();
    for vcpu in &plan.vcpus {
        let of = threads.iter().find(|thread| thread.slot == vcpu.slot);
        let thread = of.with_context(|| format!("QEMU has no thread for the vCPU on CPU {}", vcpu.host))?;
        vcpus.insert(thread.thread, vcpu.host);
    }
    for thread in affinity::threads(pid)? {
        let cpus = vcpus.get(&thread).map_or_else(|| plan.emulator.clone(), |cpu| CpuSet::from_iter([*cpu]));
        affinity::set(thread, &cpus)?;
    }
    Ok(())
}

/// The places of a running QEMU's memory and threads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// CPUs that the thread of each vCPU may use, in the guest's order.
    pub vcpus: Vec<CpuSet>,
    /// CPUs that any of QEMU's other threads may use.
    pub emulator: CpuSet,
    /// Bytes of the VM's memory that exist, by node of the host.
    pub memory: BTreeMap<u32, u64>,
    /// Bytes in huge pages, reserved or transparent.
    pub huge: u64,
}

/// Reads where a running QEMU's memory and threads are.
///
/// # Errors
/// The process is gone.
pub fn found(pid: u32, threads: &[Thread], plan: &VmPlan) -> Result<Found> {
    let process = Path::new("/proc").join(pid.to_string());
    let mut found = Found::default();
    for vcpu in &plan.vcpus {
        let of = threads.iter().find(|thread| thread.slot == vcpu.slot);
        found.vcpus.push(of.and_then(|of| affinity::of_thread(of.thread)).unwrap_or_default());
    }
    let own = affinity::threads(pid)?.into_iter();
    found.emulator = affinity::of_threads(own.filter(|own| !threads.iter().any(|vcpu| vcpu.thread == *own)));
    let read = |name: &str| {
        let path = process.join(name);
        std::fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))
    };
    let smaps = mappings(&read("smaps")?);
    let sizes: Vec<u64> = plan.nodes.iter().map(|node| node.memory).collect();
    let (memory, huge) = memory(&read("numa_maps").unwrap_or_default(), &smaps, &sizes);
    (found.memory, found.huge) = (memory, huge);
    Ok(found)
}

/// A mapping by /proc/PID/smaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mapping {
    bytes: u64,
    huge: u64,
}

/// Mappings by their first address.
fn mappings(smaps: &str) -> BTreeMap<u64, Mapping> {
    let mut mappings = BTreeMap::new();
    let mut current: Option<u64> = None;
    for line in smaps.lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let ends = range.and_then(|(first, last)| {
            Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
        });
        if let Some((first, last)) = ends {
            mappings.insert(first, Mapping { bytes: last - first, huge: 0 });
            current = Some(first);
            continue;
        }
        let counted = ["AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];
        let value = counted.iter().find_map(|name| line.strip_prefix(name));
        let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let Some(mapping) = current.and_then(|first| mappings.get_mut(&first)) else { continue };
        mapping.huge += kib.unwrap_or(0) << 10;
    }
    mappings
}

/// Reads numa_maps for the mappings that are as large as the VM's nodes: bytes by node, and those in huge pages.
fn memory(numa_maps: &str, mappings: &BTreeMap<u64, Mapping>, sizes: &[u64]) -> (BTreeMap<u32, u64>, u64) {
    let mut nodes: BTreeMap<u32, u64> = BTreeMap::new();
    let mut huge = 0;
    for line in numa_maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let Some(mapping) = first.and_then(|first| mappings.get(&first)) else { continue };
        if !sizes.contains(&mapping.bytes) {
            continue;
        }
        huge += mapping.huge;
        let words: Vec<(&str, u64)> = words
            .filter_map(|word| word.split_once('='))
            .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
            .collect();
        let page = words.iter().find(|(name, _)| *name == "kernelpagesize_kB").map_or(4, |(_, kib)| *kib);
        for (name, pages) in words {
            if let Some(node) = name.strip_prefix('N').and_then(|node| node.parse().ok()) {
                *nodes.entry(node).or_default() += pages.saturating_mul(page << 10);
            }
        }
    }
    (nodes, huge)
}

/// Puts what was found of a running QEMU beside its plan.
pub fn compare(plan: &VmPlan, found: &Found) -> Vec<Line> {
    let mut lines = Vec::new();
    for (number, (vcpu, cpus)) in plan.vcpus.iter().zip(&found.vcpus).enumerate() {
        lines.push(Line::of(format!("vCPU {number}: host CPUs"), vcpu.host, cpus));
    }
    lines.push(Line::of("QEMU's own threads: host CPUs", &plan.emulator, &found.emulator));
    let mut planned: BTreeMap<u32, u64> = BTreeMap::new();
    for node in &plan.nodes {
        *planned.entry(node.host).or_default() += node.memory;
    }
    for (node, bytes) in &planned {
        let object = format!("memory on host node {node}");
        let planned = format!("{} MiB", bytes / MIB);
        lines.push(match found.memory.get(node) {
            Some(bytes) => Line::of(object, planned, format!("{} MiB", bytes / MIB)),
            None if found.memory.is_empty() => {
                Line::unknown(object, planned, "the kernel shows no numa_maps")
            }
            None => Line::of(object, planned, "none"),
        });
    }
    let all = plan.memory();
    let share = format!("{} of {} MiB", found.huge / MIB, all / MIB);
    lines.push(match plan.pages.reserved() {
        Some(_) => Line::of("memory in huge pages", format!("{} of {} MiB", all / MIB, all / MIB), share),
        // The kernel promises nothing of transparent huge pages, so no share of them is wrong.
        None => Line {
            verdict: crate::compare::Verdict::Same,
            ..Line::of("memory in huge pages", "as the kernel gives them", share)
        },
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_vcpus_are_found_by_their_place() {
        let reply = serde_json::json!([
            {"cpu-index": 0, "thread-id": 70, "props": {"socket-id": 0, "core-id": 0, "thread-id": 0}},
            {"cpu-index": 1, "thread-id": 71, "props": {"socket-id": 1, "die-id": 2, "core-id": 3, "thread-id": 1}},
        ]);
        let slot = |socket, die, core, thread| Slot { socket, die, core, thread };
        let expected =
            [Thread { slot: slot(0, 0, 0, 0), thread: 70 }, Thread { slot: slot(1, 2, 3, 1), thread: 71 }];
        assert_eq!(threads(&reply).unwrap(), expected);
        assert_eq!(threads(&serde_json::json!({"error": {}})), None);
    }

    const SMAPS: &str = "7f00000000-7f40000000 rw-p 00000000 00:00 0 \nSize: 1048576 kB\nAnonHugePages:   1046528 kB\n\
                         7f80000000-7f80001000 rw-p 00000000 00:00 0 \nSize: 4 kB\nAnonHugePages:         0 kB\n";

    #[test]
    fn memory_is_counted_by_node_where_a_mapping_is_as_large_as_a_node_of_the_vm() {
        let numa_maps = "7f00000000 bind:1 anon=262144 dirty=262144 N0=144 N1=262000 kernelpagesize_kB=4\n\
                         7f80000000 default anon=1 N0=1 kernelpagesize_kB=4\n";
        let (nodes, huge) = memory(numa_maps, &mappings(SMAPS), &[1 << 30]);
        assert_eq!(nodes, BTreeMap::from([(0, 144 * 4096), (1, 262_000 * 4096)]));
        assert_eq!(huge, 1_046_528 << 10);
    }

    #[test]
    fn threads_run_where_the_plan_says() {
        let host = crate::read::host().unwrap();
        let request = crate::request::Request {
            name: "a".into(),
            part: crate::request::Part::Close,
            cpus: 1,
            memory: 2 * MIB,
            pages: crate::request::Pages::Transparent,
            devices: vec![],
        };
        let plan =
            crate::plan::plan(&host, &crate::plan::Rules::default(), &[request]).unwrap().vms.remove(0);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let thread = Thread { slot: plan.vcpus[0].slot, thread: child.id() };
        let pinned = pin(child.id(), &[thread], &plan).and_then(|()| found(child.id(), &[thread], &plan));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = pinned.unwrap();
        assert_eq!(found.vcpus, [CpuSet::from_iter([plan.vcpus[0].host])]);
        assert!(pin(1, &[], &plan).unwrap_err().to_string().contains("no thread for the vCPU"));
    }
}
