// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Giving PCI devices of the host to VMs, and taking them back.
//!
//! The host's state is read from sysfs and procfs below a root folder, so that a test can put a made-up tree there. From it
//! follow the devices, their IOMMU groups, and what the host itself does with each: mounts, swap, routes, bridges, the console. A
//! [`plan::Plan`] says what binding would change, or why it is refused; nothing has been touched by then. Carrying a plan out writes a
//! record of each device's driver first, then `driver_override`, unbind and probe, device by device, and undoes all of them when one
//! fails. A record may belong to an owner, a process: when it dies, however it dies, the next command that looks gives the
//! devices back.
//!
//! - [`address`]: a PCI address.
//! - [`device`]: what is known of a device and its group.
//! - [`host`]: reads the devices from a root folder.
//! - [`usage`]: what the host itself uses a device for.
//! - [`lock`]: locks of files between processes.
//! - [`mappings`]: the pages by which a VM's memory is mapped for its devices.
//! - [`plan`]: what binding would do, or why not.
//! - [`bind`]: carries a plan out, keeps records, gives devices back.
//! - [`bypass`]: DMA of a trusted VM's device past the IOMMU's translation.
//! - [`cli`]: `tombolo passthrough …`.

#![deny(missing_docs)]

pub mod address;
pub mod bind;
pub mod bypass;
pub mod cli;
pub mod device;
#[cfg(test)]
mod fake;
pub mod host;
pub mod lock;
pub mod mappings;
pub mod plan;
pub mod usage;
