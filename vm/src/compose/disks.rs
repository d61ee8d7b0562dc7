// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `disks =`: a VM's disks beside `disk`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::check::Fault;
use super::{Compose, VmSpec};
use crate::host;

/// The longest serial number that virtio has room for, in bytes.
const SERIAL_MAX: usize = 20;

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The image, or a block device.
    pub path: PathBuf,
    /// The image's format; default: qcow2 where it begins as one does, else raw.
    #[serde(default)]
    pub format: Option<Format>,
    /// The guest can't write to it.
    #[serde(default)]
    pub readonly: bool,
    /// The guest's writes go to a file in the project's folder, which `down` removes.
    #[serde(default)]
    pub overlay: bool,
    /// Its serial number: the guest has it as /dev/disk/by-id/virtio-SERIAL.
    #[serde(default)]
    pub serial: Option<String>,
}

/// An image's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's own.
    Qcow2,
    /// VirtualBox's.
    Vdi,
    /// VMware's.
    Vmdk,
    /// Hyper-V's.
    Vhdx,
}

impl Format {
    /// As QEMU calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vdi => "vdi",
            Format::Vmdk => "vmdk",
            Format::Vhdx => "vhdx",
        }
    }

    /// qcow2 by its magic, raw otherwise. Raw is never guessed by QEMU itself: a guest could write another format's header into its own disk.
    #[must_use]
    pub fn of(path: &Path) -> Format {
        let mut magic = [0; 4];
        let opened = host::open(path, host::Kind::Disk, false);
        let read = opened.and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
        if read.is_ok() && magic == *b"QFI\xfb" { Format::Qcow2 } else { Format::Raw }
    }
}

impl DiskSpec {
    /// Returns whether the guest's writes reach the image.
    #[must_use]
    pub fn is_written(&self) -> bool {
        !self.readonly && !self.overlay
    }
}

impl VmSpec {
    /// Returns whether the VM has a disk to boot from.
    #[must_use]
    pub fn has_disk(&self) -> bool {
        self.disk.is_some() || !self.disks.is_empty()
    }

    /// Images that keep what the guest writes.
    pub fn written(&self) -> impl Iterator<Item = &Path> {
        let first = self.disk.as_deref().filter(|_| !self.snapshot);
        first.into_iter().chain(self.disks.iter().filter(|d| d.is_written()).map(|d| &*d.path))
    }

    /// Images that must not change while the VM runs.
    fn read(&self) -> impl Iterator<Item = &Path> {
        let first = self.disk.as_deref().filter(|_| self.snapshot);
        first.into_iter().chain(self.disks.iter().filter(|d| !d.is_written()).map(|d| &*d.path))
    }
}

/// Checks what needs nothing from the host.
pub(super) fn check(compose: &Compose) -> Result<(), Fault> {
    let mut written: BTreeMap<&Path, &str> = BTreeMap::new();
    for (name, vm) in &compose.vm {
        let fail = |message: String| Err((format!("vm.{name}"), "disks".to_owned(), message));
        for disk in &vm.disks {
            let serial = disk.serial.as_deref().unwrap_or("disk");
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if serial.is_empty() || serial.len() > SERIAL_MAX || !serial.chars().all(plain) {
                return fail(format!(
                    "vm.{name}.disks: '{serial}' is no serial number; use up to {SERIAL_MAX} letters, digits, '-', '_' and '.'"
                ));
            }
            if disk.readonly && disk.overlay {
                return fail(format!(
                    "vm.{name}.disks: {} is readonly and has an overlay, which is for writes; leave one of them out",
                    disk.path.display()
                ));
            }
        }
        for path in vm.written() {
            if let Some(other) = written.insert(path, name) {
                return fail(format!(
                    "vm.{name} and vm.{other} both write to the disk {}; give one of them overlay = true, readonly = true or another disk",
                    path.display()
                ));
            }
        }
    }
    for (name, vm) in &compose.vm {
        if let Some((path, other)) = vm.read().find_map(|path| Some((path, written.get(path)?))) {
            let message = format!(
                "vm.{name} reads the disk {}, which vm.{other} writes to; give vm.{other} overlay = true or another disk",
                path.display()
            );
            return Err((format!("vm.{name}"), "disks".to_owned(), message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;

    fn parse(text: &str) -> Result<Project, String> {
        Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_disk_that_two_vms_write_to_is_refused_and_an_overlay_is_the_remedy() {
        let two = |a: &str, b: &str| parse(&format!("[vm.a]\n{a}\n[vm.b]\n{b}\n"));
        let e = two("disk = \"d.img\"", "disks = [{ path = \"d.img\" }]").unwrap_err();
        assert!(e.contains(":4: vm.b and vm.a both write to the disk /somewhere/demo/d.img"), "{e}");
        let e = two("disks = [{ path = \"d.img\", overlay = true }]", "disk = \"d.img\"").unwrap_err();
        assert!(e.contains(":2: vm.a reads the disk /somewhere/demo/d.img, which vm.b writes to"), "{e}");
        let shared = "disks = [{ path = \"d.img\", overlay = true }]";
        two(shared, "disks = [{ path = \"d.img\", readonly = true }]").unwrap();
        assert!(parse("[vm.a]\ndisks = [{ path = \"x\" }, { path = \"x\" }]\n").is_err());
    }

    #[test]
    fn a_serial_number_fits_virtio() {
        let e =
            parse("[vm.a]\ndisks = [{ path = \"x\", serial = \"123456789012345678901\" }]\n").unwrap_err();
        assert!(e.contains("is no serial number; use up to 20"), "{e}");
        parse("[vm.a]\ndisks = [{ path = \"x\", serial = \"data-1\", format = \"vmdk\" }]\n").unwrap();
        let e = parse("[vm.a]\ndisks = [{ path = \"x\", format = \"iso\" }]\n").unwrap_err();
        assert!(e.contains("vm.a.disks[0].format") && e.contains("qcow2"), "{e}");
    }
}
