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
    /// `the newest of the guest kit`: A kernel image's path, or a version of the guest kit such as "6.12". What is a file beside the compose file is a path.
    #[serde(default)]
    pub kernel: Option<String>,
    /// `the guest kit's`: The initramfs.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// `none`: More words for the kernel's command line.
    #[serde(default)]
    pub cmdline: Option<String>,
    /// `none`: A disk image: qcow2 where its name ends in .qcow2, else raw; for other formats see 'disks'. The VM boots from it where no kernel is named.
    #[serde(default)]
    pub disk: Option<PathBuf>,
    /// `none`: A directory of a zone that it has as its root, such as { zone = "base" }: read-only, one copy for all VMs, below a tmpfs of its own; see below. For
    /// kernels of the guest kit.
    #[serde(default)]
    pub root: Option<RootSpec>,
    /// `false`: Throw away what the VM writes to its disk.
    #[serde(default)]
    pub snapshot: bool,
    /// `2`: Virtual CPUs, 1 to 255.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// `"512M"`: A multiple of 2M, at least 128M; for a guest of the guest kit 192M, with devices of the host 256M.
    #[serde(default = "default_memory")]
    pub memory: Size,
    /// `"auto"`: "kvm": or an error; "tcg": emulation; "auto": KVM where it works.
    #[serde(default, alias = "accel")]
    pub hypervisor: HypervisorChoice,
    /// `"agent"`: When the VM counts as up: "agent": its guest agent answers; "running": QEMU runs; "console:REGEX": a line of its console matches.
    #[serde(default)]
    pub ready: Ready,
    /// `180`: Seconds until a VM that is not ready has failed.
    #[serde(default = "default_ready_timeout")]
    pub ready_timeout: u32,
    /// `{}`: Zones that it is a member of; see below.
    #[serde(default)]
    pub zones: BTreeMap<String, ZoneUse>,
    /// `[]`: Networks that it has a device in: names, or a table; see below.
    #[serde(default)]
    pub networks: Nics,
    /// `[]`: Accelerators that its programs use: names, or a table; see below.
    #[serde(default)]
    pub accelerators: Uses,
    /// `[]`: Folders of the host, over 9p; see below. Debian's cloud kernels have no 9p.
    #[serde(default)]
    pub share: Vec<Share>,
    /// `8`: Ports for zones that are attached later, one each, 0 to 16.
    #[serde(default = "default_ports")]
    pub hotplug_ports: u32,
    /// `[]`: PCI devices of the host that become the VM's, such as "0000:01:00.0", or a table; see below.
    #[serde(default)]
    pub devices: Vec<DeviceSpec>,
    /// `false`: Who is root in the VM may be root on the host. Devices with bypass need it.
    #[serde(default)]
    pub trust: bool,
    /// `false`: Take the other devices of each IOMMU group along.
    #[serde(default)]
    pub whole_group: bool,
    /// `"auto"`: How memory arrives. "fast": a part at start, the rest while the VM runs, which pays with devices; "slow": all at start; "auto": fast with
    /// devices, slow without.
    #[serde(default)]
    pub start: Option<StartKind>,
    /// `a thirty-second part`: Memory at a fast start. Default: a thirty-second part, from 512M to 8G.
    #[serde(default)]
    pub boot_memory: Option<Size>,
    /// `100`: Percent of the time in which growing may disturb the guest.
    #[serde(default)]
    pub growth_share: Option<tombolo_start::pace::Share>,
    /// `none`: Processors that its QEMU may use, the guest's included, such as 1.5. It needs a delegated cgroup.
    #[serde(default)]
    pub cpu_limit: Option<f64>,
    /// `none`: Memory of the host that its QEMU may use, the guest's included. It needs a delegated cgroup.
    #[serde(default)]
    pub memory_limit: Option<Size>,
    /// `none`: The part of the host that it lies on, whose topology its guest sees: "host": all free processors; "node:0": the same of a NUMA node; "close":
    /// as many processors as cpus says, close together; "cpus:0-3,8". See tombolo topology plan.
    #[serde(default)]
    pub topology: Option<Part>,
    /// `false`: With topology and reserve: the kernel runs nothing but the vCPUs on its processors (a cgroup partition, Linux 6.7 and newer). It wants a
    /// delegated cgroup with the controller cpuset.
    #[serde(default)]
    pub isolate: bool,
    /// `with isolate`: With topology, under KVM: the guest idles by itself, without an exit. To the host its processors are always busy, so other threads
    /// there wait for their turn.
    #[serde(default)]
    pub cpu_pm: Option<bool>,
    /// `"auto"`: With topology: "1G" or "2M": reserved huge pages; "transparent": those that the kernel makes; "auto": the largest that are free.
    #[serde(default)]
    pub pages: Pages,
    /// `[]`: VMs that are ready before it and are stopped after it: names, or a table such as { db = "healthy" }; also "started" and "ready".
    #[serde(default)]
    pub depends_on: Depends,
    /// `none`: A command that tells whether it does what it is for; see below.
    #[serde(default)]
    pub healthcheck: Option<HealthCheck>,
    /// `[]`: Disks beside "disk"; see below.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// `none`: User data, keys and network for cloud-init in the VM's image; see below.
    #[serde(default)]
    pub cloud_init: Option<CloudInit>,
    /// `[]`: Ports of the host that lead to it, such as "127.0.0.1:8080:80/tcp". It needs a network with uplink = "user".
    #[serde(default)]
    pub ports: Vec<Forward>,
    /// `"no"`: Whether it is started again when it has ended: "no", "on-failure", "on-failure:5" (times in a row), "always" or "unless-stopped".
    #[serde(default)]
    pub restart: Restart,
    /// `[]`: More arguments for QEMU, as they are.
    #[serde(default)]
    pub qemu_args: Vec<String>,
}

/// A VM's `root`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootSpec {
    /// `"base"`: The zone. The VM is a member that may only read, unless zones says more. Required.
    pub zone: String,
    /// `"/"`: The directory in it.
    #[serde(default = "default_root_path")]
    pub path: String,
}

/// One entry of a VM's `share`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// `"src"`: The mount tag. Required.
    pub tag: String,
    /// `"."`: The folder. Required.
    pub path: PathBuf,
    /// `false`: Refuse writes.
    #[serde(default)]
    pub readonly: bool,
    /// `none`: Where the guest mounts it; it needs a guest agent. Without it the guest mounts it itself: mount -t 9p -o trans=virtio TAG DIR.
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
fn default_root_path() -> String {
    "/".into()
}
fn default_ready_timeout() -> u32 {
    180
}
fn default_ports() -> u32 {
    8
}
