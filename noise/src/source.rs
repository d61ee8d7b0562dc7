// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sources: the causes that take a CPU from a program, each with its remedy.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use crate::trace::MMIO;

/// Exits by which a guest's idle CPU stops.
const HALTS: [&str; 4] = ["HLT", "hlt", "MWAIT", "mwait"];

/// The kernel that recorded it: the host's or the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The machine on which the program runs: the guest where a VM is measured.
    Here,
    /// The host below the guest that is measured.
    Host,
}

/// The kind of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The CPU's own timer: the kernel's tick and programs' timers.
    Timer,
    /// A device's interrupt.
    Interrupt,
    /// An interrupt from another CPU or from the CPU itself.
    Ipi,
    /// A non-maskable interrupt.
    Nmi,
    /// Work that an interrupt has put off.
    Softirq,
    /// Another thread.
    Thread,
    /// A page that had to be mapped.
    PageFault,
    /// The hypervisor, on behalf of the guest.
    VmExit,
    /// The thread slept by itself.
    Asleep,
    /// A system management interrupt: firmware.
    Smi,
    /// A hypervisor ran something else, by its own account.
    Steal,
    /// Nothing that was recorded.
    Unknown,
}

/// A source of noise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Source {
    /// The kernel that recorded it: the host's or the guest's.
    pub place: Place,
    /// Thread, interrupt, softirq and the like; decides the remedy.
    pub kind: Kind,
    /// The name that the kernel has for it, [plain]; empty where the kind says all.
    #[serde(deserialize_with = "plain_of")]
    pub name: String,
}

/// `text` without control characters, which a terminal obeys and XML forbids: a thread of any user or guest has any name.
pub(crate) fn plain(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Reads a text of a report that any program may have written.
pub(crate) fn plain_of<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|text| plain(&text))
}

impl Source {
    /// A source that this machine's kernel recorded.
    pub fn here(kind: Kind, name: impl AsRef<str>) -> Self {
        Self { place: Place::Here, kind, name: plain(name.as_ref()) }
    }

    /// The same, recorded by the host below.
    #[must_use]
    pub fn on_host(mut self) -> Self {
        self.place = Place::Host;
        self
    }

    /// The CPU has nothing to do.
    pub(crate) fn idles(&self) -> bool {
        self.kind == Kind::Thread && self.name == "idle"
    }

    /// The guest has halted its CPU.
    pub(crate) fn halts(&self) -> bool {
        self.kind == Kind::VmExit && HALTS.contains(&self.name.as_str())
    }

    /// The administrator's remedy.
    pub fn remedy(&self) -> &'static str {
        match self.kind {
            Kind::Timer => "nohz_full=CPUS on the kernel's command line stops the tick while one thread runs",
            Kind::Interrupt => {
                "move it: write other CPUs to /proc/irq/NUMBER/smp_affinity_list, and keep irqbalance away"
            }
            Kind::Ipi => ipi(&self.name),
            Kind::Nmi => "nowatchdog on the kernel's command line; end profilers (perf)",
            Kind::Softirq => softirq(&self.name),
            Kind::Thread => thread(&self.name),
            Kind::PageFault => {
                "touch memory before the measured part, mlockall, huge pages; numa_balancing=disable"
            }
            Kind::VmExit => exit(&self.name),
            Kind::Asleep => "the thread waited for something of its own, such as a lock or a device",
            Kind::Smi => {
                "firmware: look for settings of power management, USB legacy support and memory scrubbing"
            }
            Kind::Steal => {
                "the hypervisor ran something else: one host CPU for each vCPU (topology = \"host\")"
            }
            Kind::Unknown => {
                "trace the host below too (tombolo noise VM), and load the module msr to count SMIs"
            }
        }
    }
}

fn ipi(name: &str) -> &'static str {
    match name {
        "reschedule" => "a thread was woken here: keep other threads off by isolcpus= or a cpuset partition",
        "call function" | "call function single" => {
            "other CPUs flush mappings or ask: fewer processes that share memory, no perf"
        }
        "irq work" => "work that a kernel tracer or perf has put off; end them",
        _ => "see the kernel's documentation of this vector (/proc/interrupts)",
    }
}

fn softirq(name: &str) -> &'static str {
    match name {
        "TIMER" | "HRTIMER" | "SCHED" => {
            "nohz_full=CPUS stops the tick that raises it; isolcpus=CPUS stops load balancing"
        }
        "RCU" => "rcu_nocbs=CPUS moves RCU's callbacks to other CPUs",
        "NET_RX" | "NET_TX" => "move the network device's interrupts, and RPS, to other CPUs",
        "BLOCK" | "IRQ_POLL" => "move the disk's interrupts to other CPUs; rq_affinity=2 of the disk's queue",
        _ => "move what raises it to other CPUs: drivers' interrupts first",
    }
}

fn thread(name: &str) -> &'static str {
    let kinds = [
        ("kworker", "write other CPUs to /sys/devices/virtual/workqueue/cpumask"),
        ("ksoftirqd", "find the softirq that floods it, and move its interrupt"),
        ("rcu", "rcu_nocbs=CPUS, and bind RCU's threads to other CPUs"),
        (
            "migration",
            "isolcpus=CPUS or a cpuset partition 'isolated': the kernel then moves no threads here",
        ),
        ("watchdog", "nowatchdog on the kernel's command line"),
        ("idle", "the thread waited: it was not ready to run"),
    ];
    let of = kinds.iter().find(|(prefix, _)| name.starts_with(prefix));
    of.map_or(
        "keep it off: a cpuset partition 'isolated', isolcpus=CPUS, or taskset for that thread",
        |(_, remedy)| remedy,
    )
}

fn exit(name: &str) -> &'static str {
    match name {
        name if HALTS.contains(&name) => {
            "the guest idles: -overcommit cpu-pm=on keeps its idle states in the guest"
        }
        "EXTERNAL_INTERRUPT" | "interrupt" => {
            "an interrupt of the host: move it to other CPUs; nohz_full=CPUS on the host for its tick"
        }
        "EPT_VIOLATION" | "npf" => {
            "the host had not mapped the memory: huge pages, and memory filled at start"
        }
        "PREEMPTION_TIMER" | "MSR_WRITE" | "msr" | "vintr" => {
            "the guest's own timer: nohz_full=CPUS on the guest's kernel command line"
        }
        "IO_INSTRUCTION" | "io" | "EPT_MISCONFIG" | MMIO => {
            "an emulated device: use virtio, or a passed-through one"
        }
        "PAUSE_INSTRUCTION" | "pause" => "vCPUs wait for each other's locks: give each a host CPU of its own",
        _ => "see the host's trace of kvm:kvm_exit for what the guest asked for",
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Timer => "timer interrupt",
            Kind::Interrupt => "interrupt",
            Kind::Ipi => "IPI",
            Kind::Nmi => "NMI",
            Kind::Softirq => "softirq",
            Kind::Thread => "thread",
            Kind::PageFault => "page fault",
            Kind::VmExit => "VM exit",
            Kind::Asleep => "asleep",
            Kind::Smi => "SMI",
            Kind::Steal => "steal",
            Kind::Unknown => "unknown",
        };
        let host = if self.place == Place::Host { "host: " } else { "" };
        let space = if self.name.is_empty() { "" } else { " " };
        write!(f, "{host}{kind}{space}{}", self.name)
    }
}
