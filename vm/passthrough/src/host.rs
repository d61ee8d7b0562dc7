// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the host's devices from sysfs (Linux `Documentation/ABI/testing/sysfs-bus-pci`) below a root folder.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::address::Address;
use crate::device::Device;
use crate::usage::Usage;

/// A host, seen through the files below a root folder (`/`, or a test's).
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// The host whose `/sys` and `/proc` are below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder that stands for `/`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns whether this is the machine itself, so that opening its devices says something.
    pub fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }

    /// The sysfs folder of a device.
    pub fn device_folder(&self, address: Address) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address.to_string())
    }

    /// Returns whether the kernel has an IOMMU in use.
    pub fn has_iommu(&self) -> bool {
        fs::read_dir(self.root.join("sys/kernel/iommu_groups"))
            .is_ok_and(|mut groups| groups.next().is_some())
    }

    /// Every PCI function, by address.
    pub fn devices(&self) -> io::Result<BTreeMap<Address, Device>> {
        let folder = self.root.join("sys/bus/pci/devices");
        let usage = Usage::read(self)?;
        let mut devices = BTreeMap::new();
        for entry in fs::read_dir(&folder).map_err(|e| at(&folder, e))? {
            let entry = entry?;
            let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A device may go away while we look.
            if let Some(device) = self.device(address, &usage) {
                devices.insert(address, device);
            }
        }
        Ok(devices)
    }

    fn device(&self, address: Address, usage: &Usage) -> Option<Device> {
        let folder = self.device_folder(address);
        let number = |name: &str| parse_hex(&text(&folder.join(name))?);
        let ids = (u16::try_from(number("vendor")?).ok()?, u16::try_from(number("device")?).ok()?);
        let group_folder = fs::canonicalize(folder.join("iommu_group")).ok();
        let group = group_folder.as_ref().and_then(|g| g.file_name()?.to_str()?.parse().ok());
        let mut group_members: Vec<Address> = group_folder
            .and_then(|g| fs::read_dir(g.join("devices")).ok())
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        group_members.sort();
        let reset_methods = text(&folder.join("reset_method")).unwrap_or_default();
        let mut reset: Vec<String> = reset_methods.split_whitespace().map(str::to_owned).collect();
        if reset.is_empty() && folder.join("reset").exists() {
            reset.push("yes".into());
        }
        let virtual_functions = text(&folder.join("sriov_totalvfs"))
            .and_then(|total| total.parse().ok())
            .filter(|total| *total > 0)
            .map(|total| {
                (text(&folder.join("sriov_numvfs")).and_then(|n| n.parse().ok()).unwrap_or(0), total)
            });
        let class = number("class")?;
        // A use of a device behind a bridge is no use of the bridge.
        let bridge = class >> 16 == 0x06;
        let uses = if bridge { Vec::new() } else { usage.of(&fs::canonicalize(&folder).ok()?) };
        Some(Device {
            address,
            ids,
            class,
            driver: link_name(&folder.join("driver")),
            driver_override: text(&folder.join("driver_override"))
                .filter(|name| name != "(null)" && !name.is_empty()),
            group,
            group_members,
            numa_node: text(&folder.join("numa_node")).and_then(|node| node.parse().ok()),
            reset,
            physical_function: link_name(&folder.join("physfn")).and_then(|name| name.parse().ok()),
            virtual_functions,
            uses,
        })
    }
}

/// A file's content without the line's end; None where it cannot be read.
pub(crate) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

/// The last part of where a link points.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

pub(crate) fn at(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn parse_hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}
