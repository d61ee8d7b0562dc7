// SPDX-License-Identifier: Apache-2.0 OR MIT
//! DMA of a trusted VM's device past the IOMMU's translation.
//!
//! A [`Session`] with the host's kernel module holds the VM's memory and its devices. The guest's module asks for the map of its memory and
//! for each device's switch (`linux/bypass.h`); [`service`] answers. When the last process with the session has closed it, the module has
//! stopped the devices and given the memory back.
//!
//! - [`memory`]: where a QEMU's memory is, by guest-physical address.
//! - [`service`]: the guest's requests.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use thiserror::Error;

use crate::address::Address;
use crate::device::Device;
use crate::host::{Host, text};

pub mod memory;
pub mod service;

#[allow(non_camel_case_types, dead_code, missing_docs, clippy::all)]
pub(crate) mod format {
    include!(concat!(env!("OUT_DIR"), "/bypass.rs"));
}

/// The I/O port of the guest's requests.
pub const PORT: u32 = format::TBP_PORT;
/// What a guest reads from that port.
pub const PORT_READS: u32 = format::TBP_PORT_READS;
/// Bypassed devices of a VM, at most.
pub const DEVICES: usize = format::TBP_DEVICES as usize;

/// The sessions of the host's module.
const SESSIONS: &str = "dev/tombolo-bypass";

/// Why a device's DMA can't go untranslated.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// The module is not loaded.
    #[error(
        "bypass needs the host's kernel module tombolo_bypass_host (Linux 6.12 or newer), which is not loaded: install tombolo-bypass-dkms (or build it in vm/passthrough/linux) and load it, or leave out bypass"
    )]
    NoModule,
    /// Others would be bypassed with it.
    #[error(
        "{0} shares its IOMMU group with other devices, whose DMA would go untranslated with its own: put it into a slot with a group of its own, or leave out bypass"
    )]
    Shared(Address),
    /// It can't be stopped for sure.
    #[error(
        "{0} can't be reset, so nothing would stop its DMA before the VM's memory goes back to the host: leave out bypass"
    )]
    NoReset(Address),
    /// An IOMMU without pass-through.
    #[error(
        "the IOMMU of {0} can't leave DMA untranslated (VT-d's extended capability PT): leave out bypass"
    )]
    NoPassThrough(Address),
}

/// Decides whether a device's DMA could go untranslated. Nothing is changed.
///
/// # Errors
/// The reason, with the remedy.
pub fn check(host: &Host, device: &Device) -> Result<(), Refusal> {
    if !host.root().join(SESSIONS).exists() {
        return Err(Refusal::NoModule);
    }
    if device.group_members.iter().any(|member| *member != device.address) {
        return Err(Refusal::Shared(device.address));
    }
    if device.reset.is_empty() {
        return Err(Refusal::NoReset(device.address));
    }
    let capabilities = text(&host.device_folder(device.address).join("iommu/intel-iommu/ecap"));
    let capabilities = capabilities.and_then(|text| u64::from_str_radix(&text, 16).ok());
    if capabilities.is_some_and(|bits| bits >> 6 & 1 == 0) {
        return Err(Refusal::NoPassThrough(device.address));
    }
    Ok(())
}

/// The memory of one VM and the devices that may reach it untranslated.
#[derive(Debug)]
pub struct Session(File);

impl Session {
    /// Begins a session. It ends when its last descriptor is closed.
    ///
    /// # Errors
    /// The module is not there, or this process may not.
    pub fn open() -> io::Result<Session> {
        let path = Path::new("/").join(SESSIONS);
        let open = File::options().read(true).write(true).open(&path);
        open.map(Session).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
    }

    /// A descriptor that keeps the session from ending, for QEMU.
    ///
    /// # Errors
    /// No descriptor can be had.
    pub fn share(&self) -> io::Result<OwnedFd> {
        Ok(self.0.try_clone()?.into())
    }

    /// Pins a memfd of huge pages. Returns the host-physical address of each page.
    ///
    /// # Errors
    /// It has other pages, or memory is missing.
    pub fn pin(&self, memfd: BorrowedFd<'_>, size: u64, page: u64) -> io::Result<Vec<u64>> {
        let count = usize::try_from(size / page).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut frames = vec![0u64; count];
        let request = format::tbp_pin {
            memfd: memfd.as_raw_fd(),
            reserved: 0,
            offset: 0,
            size,
            page,
            frames: frames.as_mut_ptr() as u64,
        };
        // SAFETY: the module reads `request` and writes size / page words to `frames`, which has as many.
        let result =
            unsafe { libc::ioctl(self.0.as_raw_fd(), format::TBP_IOC_PIN.into(), &raw const request) };
        if result == 0 { Ok(frames) } else { Err(io::Error::last_os_error()) }
    }

    /// Adds a device; its DMA stays as it is.
    ///
    /// # Errors
    /// It can't be bypassed, or is in another session.
    pub fn add(&self, device: Address) -> io::Result<()> {
        self.call(format::TBP_IOC_ADD, device)
    }

    /// Lets the device's DMA go untranslated.
    ///
    /// # Errors
    /// The VM has not its group.
    pub fn on(&self, device: Address) -> io::Result<()> {
        self.call(format::TBP_IOC_ON, device)
    }

    /// Blocks the device's DMA.
    ///
    /// # Errors
    /// The device is not in the session.
    pub fn off(&self, device: Address) -> io::Result<()> {
        self.call(format::TBP_IOC_OFF, device)
    }

    fn call(&self, request: u32, device: Address) -> io::Result<()> {
        let (domain, bus, devfn) = device.parts();
        let device = format::tbp_device { domain, bus, devfn, reserved: 0 };
        // SAFETY: the module reads one tbp_device.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request.into(), &raw const device) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    fn checked(tree: &Tree, address: &str) -> Result<(), Refusal> {
        let host = tree.host();
        check(&host, &host.devices().unwrap()[&address.parse().unwrap()])
    }

    #[test]
    fn without_the_module_a_bypass_is_refused_with_its_name() {
        let error = checked(&Tree::server(), "01:00.0").unwrap_err();
        assert_eq!(error, Refusal::NoModule);
        assert!(error.to_string().contains("tombolo_bypass_host"));
    }

    #[test]
    fn only_a_device_that_is_alone_in_its_group_and_can_be_reset_is_bypassed() {
        let tree = Tree::server();
        tree.write(SESSIONS, "");
        assert_eq!(checked(&tree, "01:00.0"), Ok(()));
        let shared = checked(&tree, "02:00.0").unwrap_err();
        assert!(matches!(shared, Refusal::Shared(_)), "{shared}");
        tree.write("sys/devices/pci0000:00/0000:01:00.0/reset_method", "");
        std::fs::remove_file(tree.path().join("sys/devices/pci0000:00/0000:01:00.0/reset")).unwrap();
        let unstoppable = checked(&tree, "01:00.0").unwrap_err();
        assert!(matches!(unstoppable, Refusal::NoReset(_)), "{unstoppable}");
    }

    #[test]
    fn an_iommu_without_pass_through_is_refused() {
        let tree = Tree::server();
        tree.write(SESSIONS, "");
        let ecap = "sys/devices/pci0000:00/0000:01:00.0/iommu/intel-iommu/ecap";
        tree.write(ecap, "f00f4a\n");
        assert_eq!(checked(&tree, "01:00.0"), Ok(()));
        tree.write(ecap, "f00f0a\n");
        assert!(matches!(checked(&tree, "01:00.0"), Err(Refusal::NoPassThrough(_))));
    }
}
