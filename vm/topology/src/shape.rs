// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets, dies, cores and threads of a guest that lies on given CPUs of the host.
//!
//! QEMU names a CPU by four numbers, and all sockets, dies and cores of a machine are equally wide. Where the host's are not, the guest is as wide as the
//! widest, and CPUs that are not there stay empty slots. QEMU gives each die one cache of level 3; so CPUs of one die that share several
//! such caches become several dies.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::model::Topology;
use crate::plan::PlanError;

/// The widths of a guest's machine: sockets, dies, cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Sockets of the machine.
    pub sockets: u32,
    /// Dies of a socket.
    pub dies: u32,
    /// Cores of a die.
    pub cores: u32,
    /// Threads of a core.
    pub threads: u32,
}

impl Shape {
    /// CPUs that fit in, empty slots included.
    pub fn slots(&self) -> u32 {
        self.sockets * self.dies * self.cores * self.threads
    }

    /// The highest APIC id of the machine: each level takes whole bits.
    pub fn highest_apic_id(&self) -> u32 {
        let bits = |wide: u32| wide.next_power_of_two().trailing_zeros();
        let mut id = self.sockets.saturating_sub(1);
        for wide in [self.dies, self.cores, self.threads] {
            id = (id << bits(wide)) | wide.saturating_sub(1);
        }
        id
    }
}

/// A CPU's place in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot {
    /// Socket of the machine.
    pub socket: u32,
    /// Die of the socket.
    pub die: u32,
    /// Core of the die.
    pub core: u32,
    /// Thread of the core.
    pub thread: u32,
}

/// CPUs of the host in the guest's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arranged {
    pub shape: Shape,
    /// The host's CPU in each slot, in the order of slots.
    pub slots: Vec<(u32, Slot)>,
    pub l3: bool,
    pub notes: Vec<String>,
}

/// CPUs by core, by die and L3, and by package.
type Tree = BTreeMap<u32, BTreeMap<(Option<u32>, Option<u32>), BTreeMap<u32, Vec<u32>>>>;

/// Gives each CPU of the host a slot of the guest.
pub(crate) fn arrange(host: &Topology, cpus: &CpuSet, vm: &str) -> Result<Arranged, PlanError> {
    let mut tree = Tree::new();
    let mut dies_of: BTreeMap<u32, (u32, Option<u32>)> = BTreeMap::new();
    let mut node_of: BTreeMap<u32, Option<u32>> = BTreeMap::new();
    for cpu in cpus.iter().filter_map(|cpu| host.cpu(cpu)) {
        if let Some(l3) = cpu.l3 {
            let die = (cpu.package, cpu.die);
            if *dies_of.entry(l3).or_insert(die) != die {
                return Err(PlanError::CacheAcrossDies { vm: vm.to_owned(), l3 });
            }
        }
        let node = host.node_of(cpu.os);
        if *node_of.entry(cpu.core).or_insert(node) != node {
            return Err(PlanError::CoreAcrossNodes { vm: vm.to_owned(), core: cpu.core });
        }
        let dies = tree.entry(cpu.package).or_default();
        dies.entry((cpu.die, cpu.l3)).or_default().entry(cpu.core).or_default().push(cpu.os);
    }
    let mut shape = Shape { sockets: 0, dies: 0, cores: 0, threads: 0 };
    let mut slots = Vec::new();
    let mut notes = Vec::new();
    for (socket, (package, dies)) in (0..).zip(&tree) {
        shape.sockets = socket + 1;
        let of_host: std::collections::BTreeSet<_> = dies.keys().map(|(die, _)| *die).collect();
        if of_host.len() < dies.len() {
            notes.push(format!(
                "the {} L3 caches of package {package} become dies: QEMU gives each die one L3",
                dies.len()
            ));
        }
        for (die, cores) in (0..).zip(dies.values()) {
            shape.dies = shape.dies.max(die + 1);
            for (core, threads) in (0..).zip(cores.values()) {
                shape.cores = shape.cores.max(core + 1);
                for (thread, cpu) in (0..).zip(threads) {
                    shape.threads = shape.threads.max(thread + 1);
                    slots.push((*cpu, Slot { socket, die, core, thread }));
                }
            }
        }
    }
    let empty = u64::from(shape.slots()).saturating_sub(slots.len() as u64);
    if empty > 0 {
        notes.push(format!(
            "{empty} slots of the guest stay empty: its packages, dies or cores are not equally wide"
        ));
    }
    Ok(Arranged { shape, slots, l3: !dies_of.is_empty(), notes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apic_ids_take_whole_bits_for_each_level() {
        let shape = |sockets, dies, cores, threads| Shape { sockets, dies, cores, threads };
        assert_eq!(shape(1, 1, 4, 2).highest_apic_id(), 7);
        assert_eq!(shape(2, 1, 3, 2).highest_apic_id(), 0b1101);
        assert_eq!(shape(2, 3, 1, 1).highest_apic_id(), 0b110);
    }

    #[test]
    fn caches_within_a_die_become_dies_and_one_across_dies_is_refused() {
        let zen = crate::read::synthetic("package:1 die:1 l3:2 core:2 pu:2").unwrap();
        let arranged = arrange(&zen, &zen.online(), "a").unwrap();
        assert_eq!(arranged.shape, Shape { sockets: 1, dies: 2, cores: 2, threads: 2 });
        assert!(arranged.notes[0].contains("become dies"), "{:?}", arranged.notes);
        let mut wide = crate::read::synthetic("package:1 die:2 core:2 pu:1").unwrap();
        wide.cpus.iter_mut().for_each(|cpu| cpu.l3 = Some(0));
        let error = arrange(&wide, &wide.online(), "a").unwrap_err().to_string();
        assert!(error.contains("L3 cache 0") && error.contains("one die"), "{error}");
    }
}
