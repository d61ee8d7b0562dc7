// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Features that KVM gives a VM whose vCPUs have CPUs of their own; a VM that shares its CPUs must not have them. TCG has none of them.
//!
//! - `kvm-hint-dedicated`: the guest's kernel takes its own spinlocks in place of the paravirtual ones, since no vCPU is preempted for long (Linux
//!   `Documentation/virt/kvm/x86/cpuid.rst`, KVM_HINTS_REALTIME).
//! - `cpu-pm`: the guest idles by itself (HLT, MWAIT, PAUSE), without an exit. To the host such a CPU is never idle.
//! - `invtsc`: the guest learns that its TSC has one rate in all states, and keeps it as its clock.

use serde::{Deserialize, Serialize};

use crate::plan::VmPlan;
use crate::qemu::Argument;

/// The features of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dedicated {
    /// `kvm-hint-dedicated`.
    pub hint: bool,
    /// `cpu-pm`.
    pub cpu_pm: bool,
    /// `invtsc`.
    pub invtsc: bool,
}

impl Dedicated {
    /// The rule for a VM under KVM. The hint needs CPUs on which QEMU's own threads don't run. `cpu_pm` is the setting; without one the guest idles
    /// by itself where nothing else may run on its CPUs (`isolated`). The TSC is the host's.
    pub fn of(plan: &VmPlan, isolated: bool, cpu_pm: Option<bool>, host: &HostFlags) -> Dedicated {
        Dedicated {
            hint: !plan.service_cpus().is_empty(),
            cpu_pm: cpu_pm.unwrap_or(isolated),
            invtsc: host.has("nonstop_tsc"),
        }
    }

    /// The flags of QEMU's `-cpu`, each with a comma before it.
    pub fn cpu_flags(self) -> String {
        let flags = [(self.hint, ",kvm-hint-dedicated=on"), (self.invtsc, ",invtsc=on")];
        flags.into_iter().filter(|(on, _)| *on).map(|(_, flag)| flag).collect()
    }

    /// QEMU's arguments beside `-cpu`.
    pub fn arguments(self) -> Vec<Argument> {
        if self.cpu_pm { vec![("-overcommit", "cpu-pm=on".into())] } else { Vec::new() }
    }

    /// The names of what the VM has.
    pub fn names(self) -> Vec<&'static str> {
        let names = [(self.hint, "kvm-hint-dedicated"), (self.cpu_pm, "cpu-pm"), (self.invtsc, "invtsc")];
        names.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect()
    }
}

/// The flags of a machine's CPUs, by /proc/cpuinfo.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFlags(String);

impl HostFlags {
    /// Those of this host.
    pub fn read() -> HostFlags {
        HostFlags::of(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
    }

    /// Those in the text of /proc/cpuinfo.
    pub fn of(cpuinfo: &str) -> HostFlags {
        let line = cpuinfo.lines().find(|line| line.starts_with("flags"));
        HostFlags(line.and_then(|line| line.split_once(':')).map_or("", |(_, flags)| flags).to_owned())
    }

    /// Returns whether the CPUs have this flag.
    pub fn has(&self, flag: &str) -> bool {
        self.0.split_ascii_whitespace().any(|own| own == flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Rules, plan};
    use crate::request::{Pages, Part, Request};
    use std::io::Write;
    use std::process::{Command, Output, Stdio};

    fn vm(reserve: u32) -> VmPlan {
        let host = crate::read::synthetic("package:1 [numa(memory=16GiB)] core:4 pu:1").unwrap();
        let request = Request {
            name: "a".into(),
            part: Part::Host,
            cpus: 0,
            memory: 1 << 30,
            pages: Pages::Auto,
            devices: vec![],
        };
        plan(&host, &Rules { reserve, ..Rules::default() }, &[request]).unwrap().vms.remove(0)
    }

    #[test]
    fn a_vm_has_what_its_cpus_and_its_host_allow() {
        let steady = HostFlags::of("processor\t: 0\nflags\t\t: fpu tsc constant_tsc nonstop_tsc\n");
        let other = HostFlags::of("flags\t\t: fpu tsc constant_tsc\n");
        let names =
            |reserve, isolated, cpu_pm, host| Dedicated::of(&vm(reserve), isolated, cpu_pm, host).names();
        assert_eq!(names(1, true, None, &steady), ["kvm-hint-dedicated", "cpu-pm", "invtsc"]);
        assert_eq!(names(1, false, None, &steady), ["kvm-hint-dedicated", "invtsc"]);
        assert_eq!(names(1, true, Some(false), &other), ["kvm-hint-dedicated"]);
        assert_eq!(names(0, false, Some(true), &other), ["cpu-pm"]);
        assert_eq!(names(0, false, None, &HostFlags::default()), Vec::<&str>::new());
    }

    /// A QEMU with these flags of `-cpu` and arguments, which ends before the guest's first instruction.
    fn qemu(flags: &str, arguments: &[Argument]) -> Output {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-machine", "q35", "-cpu", &format!("max{flags}"), "-S"]);
        command.args(["-display", "none", "-nodefaults", "-monitor", "stdio"]);
        command.args(arguments.iter().flat_map(|(option, value)| [*option, value.as_str()]));
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().expect("the package qemu-system-x86");
        // One that refuses its arguments reads nothing.
        let _has_ended = child.stdin.take().unwrap().write_all(b"quit\n");
        child.wait_with_output().unwrap()
    }

    #[test]
    fn this_qemu_knows_the_words() {
        let all = Dedicated { hint: true, cpu_pm: true, invtsc: true };
        assert_eq!(all.cpu_flags(), ",kvm-hint-dedicated=on,invtsc=on");
        let started = qemu(&all.cpu_flags(), &all.arguments());
        let said = String::from_utf8_lossy(&started.stderr).into_owned();
        assert!(started.status.success(), "{said}");
        // Under TCG it names each flag that the emulated CPU then lacks.
        assert!(said.contains("kvm-hint-dedicated [bit 0]") && said.contains("invtsc [bit 8]"), "{said}");
        assert!(!qemu(",kvm-hint-dedicate=on", &[]).status.success(), "a word that it does not know");
        assert!(!qemu("", &[("-overcommit", "cpu-mp=on".into())]).status.success());
    }
}
