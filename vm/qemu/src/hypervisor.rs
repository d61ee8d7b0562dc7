// SPDX-License-Identifier: Apache-2.0 OR MIT
//! KVM or TCG (QEMU's own emulation), and what QEMU and the guest's kernel must be told for each.

use serde::{Deserialize, Serialize};

use crate::version::Qemu;

/// The program or hardware that executes a VM's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hypervisor {
    /// The host's CPU.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Hypervisor {
    /// "KVM" or "TCG".
    pub fn name(self) -> &'static str {
        match self {
            Hypervisor::Kvm => "KVM",
            Hypervisor::Tcg => "TCG",
        }
    }

    /// QEMU's options `-accel` and `-cpu`.
    pub fn arguments(self, qemu: &Qemu) -> [&'static str; 4] {
        match self {
            Hypervisor::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Hypervisor::Tcg => {
                ["-accel", "tcg,thread=multi", "-cpu", emulated_cpu(emulates_cx16(qemu.version))]
            }
        }
    }

    /// The value of QEMU's option `-smp`. TCG executes a guest's atomic instructions without atomicity towards other guests where the
    /// guest can have one CPU only; so it gets a second possible CPU, which stays offline.
    pub fn processors(self, count: u32) -> String {
        if self == Hypervisor::Tcg && count < 2 { format!("{count},maxcpus=2") } else { count.to_string() }
    }

    /// Arguments that the kernel of a guest with so many CPUs needs, with a space before each.
    ///
    /// `no_timer_check`: on a loaded host an emulated timer comes too late for the kernel's check of it, which ends in a panic.
    /// `tsc=unstable` and `nohz=off`: a kernel that trusts the TSC, or lets idle CPUs sleep through ticks, patches the code of its timers late in its boot,
    /// which the other CPU executes then: see [`follows_patched_code`].
    pub fn kernel_arguments(self, qemu: &Qemu, cpus: u32) -> &'static str {
        match self {
            Hypervisor::Kvm => "",
            Hypervisor::Tcg if cpus < 2 || follows_patched_code(qemu.version) => {
                " no_timer_check tsc=unstable"
            }
            Hypervisor::Tcg => " no_timer_check tsc=unstable nohz=off",
        }
    }
}

/// Returns whether each vCPU of this QEMU's TCG executes code as another vCPU has patched it. Before 8.1 a vCPU does not lock a page of code before it
/// translates it, and keeps what it has read if another vCPU writes there meanwhile. The kernel patches code by way of a breakpoint (int3), and dies
/// where a vCPU executes the breakpoint after the patching has ended.
pub fn follows_patched_code(version: (u32, u32, u32)) -> bool {
    version >= (8, 1, 0)
}

/// Returns whether this QEMU emulates `cmpxchg16b` correctly. Before 8.0 the instruction damages the flags now and then; the kernel's slab
/// allocator uses it, and 6.12 kernels die of that during boot.
pub fn emulates_cx16(version: (u32, u32, u32)) -> bool {
    version >= (8, 0, 0)
}

/// The CPU of TCG. Without erms and fsrm kernels don't copy by `rep movsb`, which TCG executes byte by byte.
pub fn emulated_cpu(cx16: bool) -> &'static str {
    if cx16 { "max,-erms,-fsrm" } else { "max,-erms,-fsrm,-cx16" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu(version: (u32, u32, u32)) -> Qemu {
        Qemu { program: "qemu".into(), version }
    }

    #[test]
    fn an_old_emulator_does_not_offer_the_instruction_that_it_gets_wrong() {
        let cpu = |hypervisor: Hypervisor, version| hypervisor.arguments(&qemu(version))[3];
        assert_eq!(cpu(Hypervisor::Tcg, (7, 2, 22)), "max,-erms,-fsrm,-cx16");
        assert_eq!(cpu(Hypervisor::Tcg, (10, 0, 2)), "max,-erms,-fsrm");
        assert_eq!(cpu(Hypervisor::Kvm, (7, 2, 22)), "host");
    }

    #[test]
    fn an_old_emulator_of_several_cpus_is_spared_a_kernel_that_patches_its_timers() {
        let spared = |hypervisor: Hypervisor, version, cpus| {
            hypervisor.kernel_arguments(&qemu(version), cpus).contains("nohz=off")
        };
        assert!(spared(Hypervisor::Tcg, (7, 2, 22), 2) && spared(Hypervisor::Tcg, (8, 0, 5), 4));
        assert!(!spared(Hypervisor::Tcg, (7, 2, 22), 1) && !spared(Hypervisor::Tcg, (8, 1, 0), 2));
        assert!(!spared(Hypervisor::Kvm, (7, 2, 22), 2));
    }

    #[test]
    fn a_guest_with_one_cpu_keeps_its_atomics_under_emulation() {
        assert_eq!(Hypervisor::Tcg.processors(1), "1,maxcpus=2");
        assert_eq!(Hypervisor::Tcg.processors(2), "2");
        assert_eq!(Hypervisor::Kvm.processors(1), "1");
    }
}
