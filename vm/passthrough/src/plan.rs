// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The plan of a binding, or the reason for refusing it. Nothing is changed here.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use thiserror::Error;

use crate::address::Address;
use crate::device::{Device, VFIO};
use crate::usage::Use;

/// A binding that is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Devices to take from their drivers, with the driver each has now.
    pub take: Vec<(Address, Option<String>)>,
    /// Devices that vfio-pci has already.
    pub ready: Vec<Address>,
    /// Warnings for the user, before the binding.
    pub warnings: Vec<String>,
}

/// Why a binding is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// There is no IOMMU to keep the device's DMA inside the VM.
    #[error(
        "this host uses no IOMMU, so a device given to a VM could write to all of the host's memory: turn on VT-d or \
         AMD-Vi in the firmware and start the kernel with intel_iommu=on (Intel) or amd_iommu=on (AMD)"
    )]
    NoIommu,
    /// No such device.
    #[error("there is no PCI device {0}: `tombolo passthrough list` shows what there is")]
    Absent(Address),
    /// A bridge.
    #[error("{0} is a {1}: it carries other devices and cannot be given to a VM; name the devices behind it")]
    Bridge(Address, &'static str),
    /// No group although there is an IOMMU.
    #[error(
        "{0} is in no IOMMU group, so nothing would keep its DMA inside the VM: try another slot, or the newest firmware"
    )]
    NoGroup(Address),
    /// The host needs it.
    #[error("{address} is in use by the host: {what}. Nothing was changed. To free it: {remedy}")]
    InUse {
        /// The PCI function that was asked for.
        address: Address,
        /// Each use that the host makes of it, as a clause.
        what: String,
        /// The steps that end those uses.
        remedy: String,
    },
    /// Other devices of its group would have to go along, and the host needs them.
    #[error(
        "{address} shares IOMMU group {group} with {other}, and the host needs that one: {what}. A group goes to one VM as a whole. \
         Free it first ({remedy}), or put the device into a slot with a group of its own"
    )]
    GroupInUse {
        /// The device asked for.
        address: Address,
        /// The number of the IOMMU group.
        group: u32,
        /// The member in use.
        other: Address,
        /// Each use that the host makes of that member, as a clause.
        what: String,
        /// The steps that end those uses.
        remedy: String,
    },
    /// Other devices of its group would have to go along.
    #[error(
        "{address} shares IOMMU group {group} with {others}, and a group goes to one VM as a whole: name them too, or add \
         --whole-group to take them from the host as well"
    )]
    GroupNotWhole {
        /// The device asked for.
        address: Address,
        /// The number of the IOMMU group.
        group: u32,
        /// The members that have a host driver.
        others: String,
    },
    /// Virtual functions hang from it.
    #[error(
        "{0} has {1} virtual functions: they would go with it; remove them first (echo 0 > /sys/bus/pci/devices/{0}/sriov_numvfs)"
    )]
    HasVirtualFunctions(Address, u32),
}

/// Decides whether `wanted` can be given to VMs. `whole_group` also takes group members that were not named.
pub fn plan(
    devices: &BTreeMap<Address, Device>,
    has_iommu: bool,
    wanted: &[Address],
    whole_group: bool,
) -> Result<Plan, Refusal> {
    let mut all: BTreeSet<Address> = wanted.iter().copied().collect();
    for address in wanted {
        let device = devices.get(address).ok_or(Refusal::Absent(*address))?;
        if !has_iommu {
            return Err(Refusal::NoIommu);
        }
        if device.is_bridge() {
            return Err(Refusal::Bridge(*address, device.kind()));
        }
        let group = device.group.ok_or(Refusal::NoGroup(*address))?;
        refuse_use(device)?;
        let unnamed = unnamed_members(devices, device, group, wanted)?;
        if whole_group {
            all.extend(unnamed.iter().map(|(other, _)| *other));
        } else if !unnamed.is_empty() {
            let others: Vec<_> =
                unnamed.iter().map(|(other, driver)| format!("{other} ({driver})")).collect();
            return Err(Refusal::GroupNotWhole { address: *address, group, others: others.join(", ") });
        }
    }
    let mut plan = Plan { take: Vec::new(), ready: Vec::new(), warnings: Vec::new() };
    for device in all.iter().filter_map(|address| devices.get(address)) {
        plan.add(device)?;
    }
    Ok(plan)
}

/// Returns the members of the group that have a host driver and were not named.
fn unnamed_members<'a>(
    devices: &'a BTreeMap<Address, Device>,
    device: &'a Device,
    group: u32,
    wanted: &'a [Address],
) -> Result<Vec<(Address, &'a str)>, Refusal> {
    let mut unnamed = Vec::new();
    // Members without a driver, and bridges, do no DMA of their own: VFIO allows them (Linux vfio_dev_viable).
    for other in others(devices, device, wanted).filter(|o| !o.is_bridge()) {
        if let Some((what, remedy)) = describe(&other.uses) {
            let (address, other) = (device.address, other.address);
            return Err(Refusal::GroupInUse { address, group, other, what, remedy });
        }
        match other.driver.as_deref() {
            None | Some(VFIO) => {}
            Some(driver) => unnamed.push((other.address, driver)),
        }
    }
    Ok(unnamed)
}

impl Plan {
    fn add(&mut self, device: &Device) -> Result<(), Refusal> {
        if let Some((now, _)) = device.virtual_functions.filter(|(now, _)| *now > 0) {
            return Err(Refusal::HasVirtualFunctions(device.address, now));
        }
        if device.driver.as_deref() == Some(VFIO) {
            self.ready.push(device.address);
        } else {
            self.take.push((device.address, device.driver.clone()));
        }
        if device.reset.is_empty() {
            self.warnings.push(format!(
                "{} cannot be reset: what one VM leaves in it, the next owner finds",
                device.address
            ));
        }
        Ok(())
    }
}

fn others<'a>(
    devices: &'a BTreeMap<Address, Device>,
    device: &'a Device,
    wanted: &'a [Address],
) -> impl Iterator<Item = &'a Device> {
    device
        .group_members
        .iter()
        .filter(|member| !wanted.contains(member))
        .filter_map(|member| devices.get(member))
}

fn refuse_use(device: &Device) -> Result<(), Refusal> {
    match describe(&device.uses) {
        Some((what, remedy)) => Err(Refusal::InUse { address: device.address, what, remedy }),
        None => Ok(()),
    }
}

fn describe(uses: &[Use]) -> Option<(String, String)> {
    if uses.is_empty() {
        return None;
    }
    let what = uses.iter().map(Use::to_string).collect::<Vec<_>>().join("; ");
    let remedy = uses.iter().map(Use::remedy).collect::<Vec<_>>().join("; ");
    Some((what, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    fn try_plan(tree: &Tree, wanted: &[&str], whole_group: bool) -> Result<Plan, Refusal> {
        let host = tree.host();
        let wanted: Vec<Address> = wanted.iter().map(|a| a.parse().unwrap()).collect();
        plan(&host.devices().unwrap(), host.has_iommu(), &wanted, whole_group)
    }

    #[test]
    fn a_device_alone_in_its_group_can_be_taken() {
        let plan = try_plan(&Tree::server(), &["01:00.0"], false).unwrap();
        assert_eq!(plan.take, vec![("01:00.0".parse().unwrap(), Some("e1000e".into()))]);
        assert!(plan.warnings.is_empty());
    }

    #[test]
    fn the_disk_with_the_root_file_system_is_refused_with_the_mount_point() {
        let error = try_plan(&Tree::server(), &["03:00.0"], true).unwrap_err().to_string();
        assert!(
            error.contains("nvme0n1 is mounted on /") && error.contains("Nothing was changed"),
            "{error}"
        );
    }

    #[test]
    fn a_disk_mounted_by_a_file_system_over_several_disks_is_found_by_name() {
        let tree = Tree::server();
        tree.write("proc/self/mountinfo", "9 1 0:44 / /data rw - btrfs /dev/nvme1n1 rw\n");
        let error = try_plan(&tree, &["04:00.0"], true).unwrap_err().to_string();
        assert!(error.contains("mounted on /data"), "{error}");
    }

    #[test]
    fn a_disk_under_lvm_or_swap_is_refused() {
        let tree = Tree::server();
        tree.write("sys/devices/pci0000:00/0000:04:00.0/block/nvme1n1/holders/dm-0", "");
        assert!(try_plan(&tree, &["04:00.0"], true).unwrap_err().to_string().contains("held by dm-0"));
        let tree = Tree::server();
        tree.write("proc/swaps", "Filename Type\n/dev/nvme1n1 partition 8\n");
        assert!(
            try_plan(&tree, &["04:00.0"], true).unwrap_err().to_string().contains("swapoff /dev/nvme1n1")
        );
    }

    #[test]
    fn a_disk_behind_the_kernels_multipath_is_found_through_its_subsystem() {
        let tree = Tree::server();
        let head = "sys/devices/virtual/nvme-subsystem/nvme-subsys1/nvme9n1";
        tree.write(&format!("{head}/dev"), "259:77\n");
        tree.write("sys/devices/pci0000:00/0000:04:00.0/nvme/nvme1/x", "");
        let link = |from: &str, to: &str| {
            std::os::unix::fs::symlink(tree.path().join(to), tree.path().join(from)).unwrap();
        };
        link(
            "sys/devices/virtual/nvme-subsystem/nvme-subsys1/nvme1",
            "sys/devices/pci0000:00/0000:04:00.0/nvme/nvme1",
        );
        link("sys/class/block/nvme9n1", head);
        tree.write("proc/self/mountinfo", "9 1 259:77 / /srv rw - xfs /dev/nvme9n1 rw\n");
        let error = try_plan(&tree, &["04:00.0"], true).unwrap_err().to_string();
        assert!(error.contains("nvme9n1 is mounted on /srv"), "{error}");
    }

    #[test]
    fn the_hosts_own_network_is_refused() {
        let cases: [(&str, &str, &str); 2] = [
            ("proc/net/route", "Iface\tDestination\nens1\t00000000\n", "default route"),
            (
                "proc/net/if_inet6",
                "20010db8000000000000000000000001 02 40 00 80     ens1\n",
                "has an address",
            ),
        ];
        for (file, content, said) in cases {
            let tree = Tree::server();
            tree.write(file, content);
            let error = try_plan(&tree, &["01:00.0"], true).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let tree = Tree::server();
        tree.write("sys/devices/pci0000:00/0000:01:00.0/net/ens1/upper_br0", "");
        assert!(try_plan(&tree, &["01:00.0"], true).unwrap_err().to_string().contains("part of br0"));
    }

    #[test]
    fn an_interface_with_only_a_link_local_address_can_be_taken() {
        let tree = Tree::server();
        tree.write("proc/net/if_inet6", "fe800000000000000000000000000001 02 40 20 80     ens1\n");
        assert!(try_plan(&tree, &["01:00.0"], false).is_ok());
    }

    #[test]
    fn a_group_goes_as_a_whole_or_not_at_all_and_its_bridge_does_not_count() {
        let tree = Tree::server();
        let error = try_plan(&tree, &["02:00.0"], false).unwrap_err();
        assert!(
            matches!(&error, Refusal::GroupNotWhole { group: 2, others, .. } if others == "0000:02:00.1 (e1000e)")
        );
        assert!(error.to_string().contains("--whole-group"));
        assert_eq!(try_plan(&tree, &["02:00.0"], true).unwrap().take.len(), 2);
        assert_eq!(try_plan(&tree, &["02:00.0", "02:00.1"], false).unwrap().take.len(), 2);
    }

    #[test]
    fn a_group_with_a_member_that_the_host_needs_is_refused_even_as_a_whole() {
        let tree = Tree::server();
        tree.write("proc/net/route", "Iface\tDestination\nens3\t00000000\n");
        let error = try_plan(&tree, &["02:00.0"], true).unwrap_err();
        assert!(matches!(error, Refusal::GroupInUse { group: 2, .. }), "{error}");
    }

    #[test]
    fn without_an_iommu_the_remedy_names_firmware_and_kernel() {
        let tree = Tree::server();
        tree.remove_iommu();
        let error = try_plan(&tree, &["01:00.0"], true).unwrap_err();
        assert_eq!(error, Refusal::NoIommu);
        assert!(error.to_string().contains("intel_iommu=on"));
    }

    #[test]
    fn bridges_and_absent_devices_are_refused() {
        let tree = Tree::server();
        assert!(matches!(try_plan(&tree, &["00:02.0"], true), Err(Refusal::Bridge(..))));
        assert!(matches!(try_plan(&tree, &["09:00.0"], true), Err(Refusal::Absent(_))));
    }

    #[test]
    fn a_device_that_cannot_be_reset_is_taken_with_a_warning() {
        let tree = Tree::server();
        let device = tree.path().join("sys/devices/pci0000:00/0000:01:00.0");
        std::fs::remove_file(device.join("reset_method")).unwrap();
        std::fs::remove_file(device.join("reset")).unwrap();
        assert!(try_plan(&tree, &["01:00.0"], false).unwrap().warnings[0].contains("cannot be reset"));
    }

    #[test]
    fn a_physical_function_with_virtual_ones_is_refused() {
        let tree = Tree::server();
        tree.write("sys/devices/pci0000:00/0000:01:00.0/sriov_totalvfs", "7\n");
        tree.write("sys/devices/pci0000:00/0000:01:00.0/sriov_numvfs", "2\n");
        assert_eq!(
            try_plan(&tree, &["01:00.0"], false),
            Err(Refusal::HasVirtualFunctions("01:00.0".parse().unwrap(), 2))
        );
    }
}
