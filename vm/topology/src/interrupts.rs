// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPUs that handle the interrupts of passed-through devices.
//!
//! A device of a VM gets its interrupts (MSI and MSI-X) when the guest's driver asks for them, and may get others when that is loaded again; so
//! [`Interrupts::place`] is called again and again. The kernel frees these interrupts when QEMU closes the device, however that comes about:
//! a crash leaves nothing to give back. A device's line (INTx) stays where it is, since other devices may share it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;

/// An interrupt that can't be placed.
#[derive(Debug, thiserror::Error)]
#[error(
    "interrupt {number} of {device} can't be handled by the CPUs {cpus}: {path}: {source}; it stays on the CPUs {stays}"
)]
pub struct Refused {
    /// The number in /proc/irq.
    pub number: u32,
    /// The device's address.
    pub device: String,
    /// The CPUs that it should go to.
    pub cpus: CpuSet,
    /// The kernel's file.
    pub path: PathBuf,
    /// The CPUs that handle it now.
    pub stays: CpuSet,
    /// The kernel's error.
    pub source: io::Error,
}

/// Interrupts that were placed, and where they were before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    before: BTreeMap<u32, CpuSet>,
    /// Those that the kernel refused to place: it is asked once.
    refused: BTreeMap<u32, CpuSet>,
}

/// The numbers of a device's message-signalled interrupts; `root` is the folder that stands for `/`.
pub fn of_device(root: &Path, address: &str) -> Vec<u32> {
    let folder = root.join("sys/bus/pci/devices").join(address).join("msi_irqs");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// The CPUs that may handle an interrupt; none where there is no such interrupt.
pub fn cpus(root: &Path, number: u32) -> Option<CpuSet> {
    fs::read_to_string(file(root, number)).ok()?.parse().ok()
}

fn file(root: &Path, number: u32) -> PathBuf {
    root.join("proc/irq").join(number.to_string()).join("smp_affinity_list")
}

impl Interrupts {
    /// Gives the interrupts that a device has now to `cpus`. Returns those that the kernel has refused for the first time.
    pub fn place(&mut self, root: &Path, device: &str, cpus: &CpuSet) -> Vec<Refused> {
        let numbers = of_device(root, device);
        let placed = numbers.into_iter().filter_map(|number| self.place_one(root, device, number, cpus));
        placed.collect()
    }

    fn place_one(&mut self, root: &Path, device: &str, number: u32, cpus: &CpuSet) -> Option<Refused> {
        let now = self::cpus(root, number)?;
        if now == *cpus || self.refused.get(&number) == Some(cpus) {
            return None;
        }
        let path = file(root, number);
        match fs::write(&path, cpus.to_string()) {
            Ok(()) => {
                self.before.entry(number).or_insert(now);
                None
            }
            // The guest's driver gave it back meanwhile.
            Err(_) if !path.exists() => None,
            Err(source) => {
                self.refused.insert(number, cpus.clone());
                let device = device.to_owned();
                Some(Refused { number, device, cpus: cpus.clone(), path, stays: now, source })
            }
        }
    }

    /// Gives interrupts that are still there back to the CPUs that handled them before.
    pub fn give_back(&mut self, root: &Path) {
        self.refused.clear();
        for (number, cpus) in std::mem::take(&mut self.before) {
            // The kernel frees a device's interrupts with the device; a number that is gone is given back.
            let _freed_meanwhile = fs::write(file(root, number), cpus.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = "0000:81:00.0";

    /// A host with a device that has the interrupts 30 and 31, beside interrupt 40 of another one.
    fn host() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (number, cpus) in [(30, "0-7\n"), (31, "4\n"), (40, "0-7\n")] {
            write(format!("proc/irq/{number}/smp_affinity_list"), cpus);
        }
        for number in [30, 31] {
            write(format!("sys/bus/pci/devices/{DEVICE}/msi_irqs/{number}"), "msix\n");
        }
        root
    }

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn the_interrupts_of_a_device_go_to_its_cpus_and_back_and_those_of_others_stay() {
        let root = host();
        let at = |number| cpus(root.path(), number).unwrap();
        let mut interrupts = Interrupts::default();
        assert!(interrupts.place(root.path(), DEVICE, &set("0-1")).is_empty());
        assert_eq!([at(30), at(31), at(40)], [set("0-1"), set("0-1"), set("0-7")]);
        // Another program moves one: it is placed again, and where it was at first is what counts.
        fs::write(root.path().join("proc/irq/30/smp_affinity_list"), "6").unwrap();
        interrupts.place(root.path(), DEVICE, &set("0-1"));
        assert_eq!(at(30), set("0-1"));
        interrupts.give_back(root.path());
        assert_eq!([at(30), at(31)], [set("0-7"), set("4")]);
        assert_eq!(interrupts, Interrupts::default());
    }

    #[test]
    fn an_interrupt_that_the_kernel_has_freed_needs_nothing() {
        let root = host();
        let mut interrupts = Interrupts::default();
        interrupts.place(root.path(), DEVICE, &set("0"));
        fs::remove_dir_all(root.path().join("proc/irq/30")).unwrap();
        assert!(interrupts.place(root.path(), DEVICE, &set("1")).is_empty());
        interrupts.give_back(root.path());
        assert_eq!(cpus(root.path(), 30), None);
        assert_eq!(cpus(root.path(), 31), Some(set("4")));
    }

    #[test]
    fn an_interrupt_that_the_kernel_does_not_move_is_named_once() {
        let root = host();
        // A list of CPUs that can be read and not written, by root neither.
        let path = root.path().join("proc/irq/31/smp_affinity_list");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/sys/devices/system/cpu/online", &path).unwrap();
        let mut interrupts = Interrupts::default();
        let refused = interrupts.place(root.path(), DEVICE, &set("1000"));
        let [said] = &refused[..] else { panic!("{refused:?}") };
        let said = said.to_string();
        assert!(
            said.starts_with(&format!("interrupt 31 of {DEVICE} can't be handled by the CPUs 1000")),
            "{said}"
        );
        assert!(interrupts.place(root.path(), DEVICE, &set("1000")).is_empty());
        assert_eq!(interrupts.place(root.path(), DEVICE, &set("1001")).len(), 1);
    }
}
