// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Access to a zone in a guest whose kernel has no module: the memory as BAR 2 of an ivshmem-plain device, and the registers of the zone's
//! ivshmem-doorbell (QEMU, docs/specs/ivshmem-spec), both through sysfs.
//!
//! Interrupts need a driver, so a member without the module is not rung: it polls its pending bits.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::format::{TMB_DOORBELL_MAGIC, TMB_ZONE_MIN};
use crate::mem::SharedMem;
use crate::{Error, MemberId, Result, Zone};

const DEVICES: &str = "/sys/bus/pci/devices";
const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
/// Registers in BAR 0.
const POSITION: u64 = 8;
const DOORBELL: u64 = 12;
const PAGE: u64 = 4096;

fn text(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|e| Error::io(path.display().to_string(), e))?;
    Ok(text.trim().to_owned())
}

/// Returns the folders of this machine's ivshmem devices, and enables these.
fn devices() -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io(format!("looking through {DEVICES}"), e);
    let mut found = Vec::new();
    for entry in fs::read_dir(DEVICES).map_err(failed)? {
        let folder = entry.map_err(failed)?.path();
        if text(&folder.join("vendor"))? != VENDOR || text(&folder.join("device"))? != DEVICE {
            continue;
        }
        let enable = folder.join("enable");
        if text(&enable)? == "0" {
            fs::write(&enable, "1").map_err(|e| Error::io(enable.display().to_string(), e))?;
        }
        found.push(folder);
    }
    Ok(found)
}

/// Returns the path of a zone's memory in this guest.
///
/// # Errors
/// No device has it.
pub fn memory(name: &str) -> Result<PathBuf> {
    for folder in devices()? {
        let path = folder.join("resource2");
        if path.metadata().map_or(0, |m| m.len()) < u64::from(TMB_ZONE_MIN) {
            continue;
        }
        match Zone::open(&path, false) {
            Ok(zone) if zone.name() == name => return Ok(path),
            Ok(_) | Err(Error::NotAZone { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Error::NotAZone {
        zone: name.to_owned(),
        why: format!("no ivshmem device of this machine has a zone of this name (of {DEVICES})"),
    })
}

/// The registers of a zone's doorbell.
#[derive(Debug)]
pub struct Registers {
    page: SharedMem,
    /// Their offset in the page.
    at: u64,
}

impl Registers {
    /// Returns those of the device whose page names the zone; `None`: this machine has none.
    ///
    /// # Errors
    /// Those of the system, and invalid contents of the devices' files.
    pub fn of(zone: &Zone) -> Result<Option<Registers>> {
        for folder in devices()? {
            let page = folder.join("resource2");
            let mapped = map(&page, false)?;
            let mut uuid = [0; 16];
            mapped.read(8, &mut uuid)?;
            if mapped.load_u64(0)? != TMB_DOORBELL_MAGIC || uuid != *zone.uuid().as_bytes() {
                continue;
            }
            let resources = text(&folder.join("resource"))?;
            let start = resources.split_whitespace().next().and_then(|s| s.strip_prefix("0x"));
            let start = start
                .and_then(|s| u64::from_str_radix(s, 16).ok())
                .ok_or_else(|| Error::Access(format!("{} has no first resource", folder.display())))?;
            return Ok(Some(Registers { page: map(&folder.join("resource0"), true)?, at: start % PAGE }));
        }
        Ok(None)
    }

    /// This machine's peer id.
    ///
    /// # Errors
    /// The register does not lie in the page.
    pub fn peer(&self) -> Result<u16> {
        let id = self.page.load_u32(self.at + POSITION)?;
        u16::try_from(id).map_err(|_| Error::Access(format!("the doorbell device has no id yet ({id:#x})")))
    }

    /// Rings a peer, known or not.
    ///
    /// # Errors
    /// As above.
    pub fn ring(&self, peer: u16) -> Result<()> {
        self.page.store_u32(self.at + DOORBELL, u32::from(peer) << 16)
    }
}

/// Maps one page of a resource; the kernel checks the size.
fn map(path: &Path, writable: bool) -> Result<SharedMem> {
    let open = OpenOptions::new().read(true).write(writable).open(path);
    let file: File = open.map_err(|e| Error::io(path.display().to_string(), e))?;
    SharedMem::map(file.as_fd(), 0, PAGE, writable)
}

/// Returns this machine's slot of the member table: by its doorbell, or, without one, by its name.
///
/// # Errors
/// Neither identifies a slot.
pub fn slot(zone: &Zone, doorbell: Option<&Registers>, name: Option<&str>) -> Result<MemberId> {
    let peer = doorbell.map(Registers::peer).transpose()?;
    let members = zone.members()?;
    let own = members.iter().find(|m| match (peer, name) {
        (Some(peer), _) => m.doorbell == Some(peer),
        (None, Some(name)) => m.name == name,
        (None, None) => false,
    });
    own.map(|m| m.id).ok_or_else(|| Error::Member {
        zone: zone.name().to_owned(),
        member: name.unwrap_or("of this VM").to_owned(),
        why: match peer {
            Some(peer) => format!("no slot has this machine's doorbell, {peer}"),
            None => "this machine has no doorbell of the zone, and no slot has the name: give --member with the VM's name".to_owned(),
        },
    })
}
