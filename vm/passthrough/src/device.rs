// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A PCI device and its properties.

use serde::Serialize;

use crate::address::Address;
use crate::usage::Use;

/// The driver that hands devices to user space.
pub const VFIO: &str = "vfio-pci";

/// A PCI function of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Domain, bus, device and function.
    pub address: Address,
    /// Vendor and device id.
    pub ids: (u16, u16),
    /// Class code, 24 bits: base class, subclass, programming interface.
    pub class: u32,
    /// The driver that has it now.
    pub driver: Option<String>,
    /// `driver_override`, where it is set.
    pub driver_override: Option<String>,
    /// Its IOMMU group; None without an IOMMU.
    pub group: Option<u32>,
    /// Every function of the group, itself included.
    pub group_members: Vec<Address>,
    /// The NUMA node it is attached to, where the firmware says so.
    pub numa_node: Option<u32>,
    /// The ways to reset it between owners, best first; empty: none.
    pub reset: Vec<String>,
    /// For a virtual function of SR-IOV: its physical function.
    pub physical_function: Option<Address>,
    /// For a physical function with SR-IOV: virtual functions now, and at most.
    pub virtual_functions: Option<(u32, u32)>,
    /// The host's own uses of it.
    pub uses: Vec<Use>,
}

impl Device {
    /// A PCI bridge of any kind; it carries other devices and is never given to a VM.
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// A name for its class.
    pub fn kind(&self) -> &'static str {
        match (self.class >> 16, self.class >> 8 & 0xff) {
            (0x01, 0x08) => "NVMe disk",
            (0x01, _) => "storage",
            (0x02, 0x07) => "InfiniBand",
            (0x02, _) => "network",
            (0x03, _) => "display",
            (0x04, _) => "multimedia",
            (0x06, 0x00) => "host bridge",
            (0x06, 0x04) => "PCI bridge",
            (0x06, _) => "bridge",
            (0x07, _) => "communication",
            (0x08, _) => "system",
            (0x0c, 0x03) => "USB",
            (0x0c, _) => "serial bus",
            (0x12, _) => "accelerator",
            _ => "other",
        }
    }
}
