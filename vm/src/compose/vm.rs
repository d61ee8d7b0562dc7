// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `[vm.NAME]`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use tombolo_topology::request::{Pages, Part};

use super::Size;
use super::accelerator::Uses;
use super::cloud_init::CloudInit;
use super::depends::{Depends, HealthCheck};
use super::device::DeviceSpec;
use super::disks::DiskSpec;
use super::network::Nics;
use super::ports::Forward;
use super::restart::Restart;
use super::zone::ZoneUse;
use crate::machine::growth::StartKind;

/// The least memory a VM may have, in bytes: below it Debian's kernels don't reach their init.
pub const MEMORY_MIN: u64 = 128 << 20;

/// `[vm.NAME]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// A kernel image's path, or a version of the guest kit ("6.12"): what is a file beside the compose file is a path.
    #[serde(default)]
    pub kernel: Option<String>,
    /// The initramfs; default: the guest kit's, where the kernel is.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// More words for the kernel's command line.
    #[serde(default)]
    pub cmdline: Option<String>,
    /// A disk image: qcow2 where its name ends in .qcow2, else raw.
    #[serde(default)]
    pub disk: Option<PathBuf>,
    /// Throw away what the VM writes to its disk.
    #[serde(default)]
    pub snapshot: bool,
    /// Virtual CPUs.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// Memory in bytes.
    #[serde(default = "default_memory")]
    pub memory: Size,
    /// KVM or TCG.
    #[serde(default, alias = "accel")]
    pub hypervisor: HypervisorChoice,
    /// When the VM counts as up.
    #[serde(default)]
    pub ready: Ready,
    /// Seconds until a VM that is not ready counts as failed.
    #[serde(default = "default_ready_timeout")]
    pub ready_timeout: u32,
    /// Zones the VM is a member of, by name.
    #[serde(default)]
    pub zones: BTreeMap<String, ZoneUse>,
    /// Its devices in networks, by network.
    #[serde(default)]
    pub networks: Nics,
    /// Accelerators that its programs use, by name.
    #[serde(default)]
    pub accelerators: Uses,
    /// Host folders offered over 9p (for tests and benches; the guest's kernel needs 9p).
    #[serde(default)]
    pub share: Vec<Share>,
    /// Empty PCI Express ports for zones that are attached later, one for each.
    #[serde(default = "default_ports")]
    pub hotplug_ports: u32,
    /// PCI devices of the host that become the VM's, such as "0000:01:00.0".
    #[serde(default)]
    pub devices: Vec<DeviceSpec>,
    /// Who is root in it may be root on the host.
    #[serde(default)]
    pub trust: bool,
    /// Take the other devices of each IOMMU group along.
    #[serde(default)]
    pub whole_group: bool,
    /// The way in which memory arrives; default: "auto", fast with devices and slow without.
    #[serde(default)]
    pub start: Option<StartKind>,
    /// Memory at a fast start; default: a thirty-second part, from 512 MiB to 8 GiB.
    #[serde(default)]
    pub boot_memory: Option<Size>,
    /// Percent of the time in which growing may disturb the guest; default: 100, memory as soon as it can be had.
    #[serde(default)]
    pub growth_share: Option<tombolo_start::pace::Share>,
    /// Processors that its QEMU may use, the guest's included, such as 1.5.
    #[serde(default)]
    pub cpu_limit: Option<f64>,
    /// Memory of the host that its QEMU may use, the guest's included.
    #[serde(default)]
    pub memory_limit: Option<Size>,
    /// The part of the host that it lies on.
    #[serde(default)]
    pub topology: Option<Part>,
    /// Nothing but its vCPUs runs on its CPUs, with `topology`.
    #[serde(default)]
    pub isolate: bool,
    /// Its guest idles by itself under KVM, with `topology`; default: with `isolate`.
    #[serde(default)]
    pub cpu_pm: Option<bool>,
    /// The pages of its memory, with `topology`.
    #[serde(default)]
    pub pages: Pages,
    /// VMs that are started before it, and stopped after it.
    #[serde(default)]
    pub depends_on: Depends,
    /// A command that tells whether it does what it is for.
    #[serde(default)]
    pub healthcheck: Option<HealthCheck>,
    /// Disks beside `disk`.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// User data, keys and network that cloud-init in the VM's image reads.
    #[serde(default)]
    pub cloud_init: Option<CloudInit>,
    /// Ports of the host that lead to it.
    #[serde(default)]
    pub ports: Vec<Forward>,
    /// The policy for starts after the VM has ended.
    #[serde(default)]
    pub restart: Restart,
    /// More arguments for QEMU, as they are.
    #[serde(default)]
    pub qemu_args: Vec<String>,
}

/// One entry of a VM's `share`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The mount tag.
    pub tag: String,
    /// The folder on the host.
    pub path: PathBuf,
    /// Refuse writes.
    #[serde(default)]
    pub readonly: bool,
    /// The guest's mount point; none: the guest mounts it itself.
    #[serde(default)]
    pub mount: Option<String>,
}

/// `hypervisor =`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HypervisorChoice {
    /// KVM where a tiny guest ran under it, TCG otherwise.
    #[default]
    Auto,
    /// KVM or an error.
    Kvm,
    /// QEMU's own emulation.
    Tcg,
}

/// When a VM counts as up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ready {
    /// The guest agent answers.
    #[default]
    Agent,
    /// QEMU runs.
    Running,
    /// A line of the console matches.
    Console(String),
}

impl Serialize for Ready {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Ready::Agent => s.serialize_str("agent"),
            Ready::Running => s.serialize_str("running"),
            Ready::Console(regex) => s.collect_str(&format_args!("console:{regex}")),
        }
    }
}

impl<'de> Deserialize<'de> for Ready {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "agent" => Ok(Ready::Agent),
            "running" => Ok(Ready::Running),
            other => match other.strip_prefix("console:") {
                Some(regex) => match regex_lite::Regex::new(regex) {
                    Ok(_) => Ok(Ready::Console(regex.to_owned())),
                    Err(e) => Err(de::Error::custom(format!("'{regex}' is not a regular expression: {e}"))),
                },
                None => Err(de::Error::custom(format!(
                    "'{other}' is no readiness; write \"agent\", \"running\" or \"console:REGEX\""
                ))),
            },
        }
    }
}

fn default_cpus() -> u32 {
    2
}
fn default_memory() -> Size {
    Size(512 << 20)
}
fn default_ready_timeout() -> u32 {
    180
}
fn default_ports() -> u32 {
    8
}
