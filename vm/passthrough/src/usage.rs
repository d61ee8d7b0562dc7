// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host's own uses of a device, each of which would break if the device went to a VM.
//!
//! Block devices and network interfaces are found below their device's real sysfs folder; NVMe heads of the kernel's own multipath through
//! their subsystem. A disk is used when it, a partition of it, or anything stacked on it (LVM, RAID, crypt) is mounted, swapped to,
//! held, or opened exclusively. An interface is used when routes go through it, it has a global address, or something is stacked on it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::host::{Host, at, link_name, text};

/// One thing that the host does with a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case", tag = "use")]
pub enum Use {
    /// A file system on it is mounted.
    Mounted {
        /// The block device.
        block: String,
        /// The mount point or the place.
        on: String,
    },
    /// The host swaps to it.
    Swap {
        /// The block device.
        block: String,
    },
    /// Something is stacked on it, or a program holds it open exclusively.
    Held {
        /// The block device.
        block: String,
        /// By what.
        by: String,
    },
    /// Packets are routed through it.
    Routes {
        /// The name of the network interface that the routes leave by.
        interface: String,
        /// The default route is among them.
        default: bool,
    },
    /// It has an address that others can reach.
    Address {
        /// The name of the network interface that has the address.
        interface: String,
    },
    /// It is a port of a bridge, a bond or the like, or carries VLANs.
    Stacked {
        /// The name of the network interface that is part of another.
        interface: String,
        /// The set that it is part of.
        with: String,
    },
    /// The firmware's screen.
    Console,
    /// Another VM has it open.
    Vm {
        /// The IOMMU group that is open.
        group: u32,
    },
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mounted { block, on } => write!(f, "{block} is mounted on {on}"),
            Self::Swap { block } => write!(f, "the host swaps to {block}"),
            Self::Held { block, by } => write!(f, "{block} is held by {by}"),
            Self::Routes { interface, default: true } => write!(f, "the host's default route is {interface}"),
            Self::Routes { interface, default: false } => write!(f, "routes go through {interface}"),
            Self::Address { interface } => write!(f, "{interface} has an address"),
            Self::Stacked { interface, with } => write!(f, "{interface} is part of {with}"),
            Self::Console => write!(f, "it is the host's screen"),
            Self::Vm { group } => write!(f, "a VM has its IOMMU group {group} open"),
        }
    }
}

impl Use {
    /// The command that ends this use.
    pub fn remedy(&self) -> String {
        match self {
            Self::Mounted { on, .. } => format!("umount {on}"),
            Self::Swap { block } => format!("swapoff /dev/{block}"),
            Self::Held { by, .. } => format!("stop {by}"),
            Self::Routes { interface, .. } | Self::Address { interface } => {
                format!("move the host's network to another interface, then `ip addr flush dev {interface}`")
            }
            Self::Stacked { interface, with } => format!("take {interface} out of {with}"),
            Self::Console => "make another card the boot display in the firmware".into(),
            Self::Vm { .. } => "stop that VM".into(),
        }
    }
}

/// Everything the host uses, by the real sysfs folder it hangs from.
pub(crate) struct Usage {
    found: Vec<(PathBuf, Use)>,
    real: bool,
    root: PathBuf,
}

impl Usage {
    pub(crate) fn read(host: &Host) -> io::Result<Self> {
        let mut usage = Self { found: Vec::new(), real: host.is_real(), root: host.root().to_owned() };
        usage.blocks(host)?;
        usage.interfaces(host)?;
        Ok(usage)
    }

    /// The uses of the device with this real folder.
    pub(crate) fn of(&self, folder: &Path) -> Vec<Use> {
        let mut uses: BTreeSet<Use> = self
            .found
            .iter()
            .filter(|(place, _)| place.starts_with(folder))
            .map(|(_, u)| u.clone())
            .collect();
        if text(&folder.join("boot_vga")).as_deref() == Some("1")
            && link_name(&folder.join("driver")).as_deref() != Some("vfio-pci")
        {
            uses.insert(Use::Console);
        }
        if let Some(group) = self.open_group(folder) {
            uses.insert(Use::Vm { group });
        }
        uses.into_iter().collect()
    }

    /// The group of a device that is bound to vfio-pci and open; the kernel lets each group be opened once.
    fn open_group(&self, folder: &Path) -> Option<u32> {
        if !self.real || link_name(&folder.join("driver")).as_deref() != Some("vfio-pci") {
            return None;
        }
        let group: u32 = link_name(&folder.join("iommu_group"))?.parse().ok()?;
        let node = self.root.join("dev/vfio").join(group.to_string());
        let busy = rustix::fs::open(&node, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).err()
            == Some(rustix::io::Errno::BUSY);
        if busy { Some(group) } else { None }
    }

    fn blocks(&mut self, host: &Host) -> io::Result<()> {
        let class = host.root().join("sys/class/block");
        let mounts = read_or_empty(&host.root().join("proc/self/mountinfo"))?;
        let swaps = read_or_empty(&host.root().join("proc/swaps"))?;
        for (name, folder) in class_members(&class)? {
            let mut uses = Vec::new();
            let number = text(&folder.join("dev")).unwrap_or_default();
            for line in mounts.lines() {
                if let Some(on) = mounted_on(line, &number, &name) {
                    uses.push(Use::Mounted { block: name.clone(), on });
                }
            }
            let swapped = swaps.lines().skip(1).filter_map(|l| l.split_whitespace().next());
            if swapped.filter_map(|path| path.strip_prefix("/dev/")).any(|swap| swap == name) {
                uses.push(Use::Swap { block: name.clone() });
            }
            for holder in names_in(&folder.join("holders")) {
                uses.push(Use::Held { block: name.clone(), by: holder });
            }
            if uses.is_empty() && host.is_real() && held_exclusively(&name) {
                uses.push(Use::Held {
                    block: name.clone(),
                    by: "a program that has it open exclusively".into(),
                });
            }
            for place in places(&folder) {
                self.found.extend(uses.iter().map(|u| (place.clone(), u.clone())));
            }
        }
        Ok(())
    }

    fn interfaces(&mut self, host: &Host) -> io::Result<()> {
        let class = host.root().join("sys/class/net");
        let routes = read_or_empty(&host.root().join("proc/net/route"))?;
        let addresses = read_or_empty(&host.root().join("proc/net/if_inet6"))?;
        for (interface, folder) in class_members(&class)? {
            let destinations: Vec<&str> = routes
                .lines()
                .skip(1)
                .filter_map(|line| {
                    let mut fields = line.split_whitespace();
                    (fields.next()? == interface).then(|| fields.next())?
                })
                .collect();
            if !destinations.is_empty() {
                let default = destinations.contains(&"00000000");
                self.found.push((folder.clone(), Use::Routes { interface: interface.clone(), default }));
            }
            // Fields: address, index, prefix length, scope (00 is global), flags, name.
            let global = addresses.lines().any(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields.len() == 6 && fields[3] == "00" && fields[5] == interface
            });
            if global {
                self.found.push((folder.clone(), Use::Address { interface: interface.clone() }));
            }
            let master = link_name(&folder.join("master"));
            let uppers =
                names_in(&folder).into_iter().filter_map(|n| n.strip_prefix("upper_").map(str::to_owned));
            for with in master.into_iter().chain(uppers).collect::<BTreeSet<_>>() {
                self.found.push((folder.clone(), Use::Stacked { interface: interface.clone(), with }));
            }
        }
        Ok(())
    }
}

/// The mount point of a line of mountinfo (proc_pid_mountinfo(5)) if it mounts this block device. File systems over several disks
/// have numbers of their own, so the source's name counts too.
fn mounted_on(line: &str, number: &str, name: &str) -> Option<String> {
    let (before, after) = line.split_once(" - ")?;
    let fields: Vec<&str> = before.split(' ').collect();
    let source = after.split(' ').nth(1)?;
    let same = fields.get(2) == Some(&number) || source.strip_prefix("/dev/") == Some(name);
    same.then(|| fields.get(4).map(|on| (*on).to_owned()))?
}

/// Folders of the devices that a block device lives on: its own, or those of every path to an NVMe subsystem's head.
fn places(folder: &Path) -> Vec<PathBuf> {
    let mut places = vec![folder.to_owned()];
    let subsystem = folder
        .ancestors()
        .find(|a| a.parent().and_then(Path::file_name).is_some_and(|name| name == "nvme-subsystem"));
    if let Some(subsystem) = subsystem {
        for name in names_in(subsystem).iter().filter(|name| name.starts_with("nvme")) {
            let path = subsystem.join(name);
            if path.is_symlink() {
                places.extend(fs::canonicalize(path));
            }
        }
    }
    places
}

fn class_members(class: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(class) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(at(class, error)),
    };
    Ok(entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.file_name().into_string().ok()?, fs::canonicalize(entry.path()).ok()?))
        })
        .collect())
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// A file that some kernels do not have counts as empty; one that cannot be read does not.
fn read_or_empty(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        result => result.map_err(|error| at(path, error)),
    }
}

fn held_exclusively(block: &str) -> bool {
    let path = Path::new("/dev").join(block.replace('!', "/"));
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).err() == Some(rustix::io::Errno::BUSY)
}
