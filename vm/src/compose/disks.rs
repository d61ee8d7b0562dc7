// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `disks =`: a VM's disks beside `disk`.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::check::Fault;
use super::{Compose, VmSpec};
use crate::host;

/// The longest serial number that virtio has room for, in bytes.
const SERIAL_MAX: usize = 20;
/// The first bytes of a qcow2 image.
const MAGIC: &[u8] = b"QFI\xfb";
/// Bytes of a qcow2 image's header that are read.
const HEADER: u64 = 80;
/// The field of a qcow2 image's header that is 0 where it has no backing file.
const BACKING_OFFSET: Range<usize> = 8..16;
/// The byte of a qcow2 image's header with its version: 2 or 3.
const VERSION: usize = 7;
/// The last byte of the field of a qcow2 image's incompatible features, which version 2 has not.
const FEATURES: usize = 79;
/// The feature of an image whose data are in another file.
const EXTERNAL_DATA: u8 = 4;

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The image, or a block device.
    pub path: PathBuf,
    /// The image's format; default: see [`Format::guess`].
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

    /// The format of an image for which the compose file names none: qcow2 where its name ends so, or where it begins as one does; else raw.
    ///
    /// A guest can write any header into its raw disk. So an image that is qcow2 by its header alone must not name other files: QEMU would open
    /// them, and the guest would have what is in them.
    ///
    /// # Errors
    /// Names the remedy.
    pub fn guess(path: &Path) -> io::Result<Format> {
        let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("qcow2"));
        let mut header = Vec::new();
        host::open(path, host::Kind::Disk, false)?.take(HEADER).read_to_end(&mut header)?;
        match (header.starts_with(MAGIC), named) {
            (true, false) if names_other_files(&header) => Err(io::Error::other(
                "its header says that it is a qcow2 image over another file, which a guest can write into a raw disk; name its format in disks = \
                 [{ path = ..., format = \"raw\" }], or format = \"qcow2\" where the image is your own",
            )),
            (false, true) => Err(io::Error::other(
                "its name ends in .qcow2, and it is no such image; rename it, or name its format in disks = [{ path = ..., format = \"raw\" }]",
            )),
            (true, _) => Ok(Format::Qcow2),
            (false, false) => Ok(Format::Raw),
        }
    }
}

/// Returns whether the header of a qcow2 image names a backing file or a data file (QEMU, docs/interop/qcow2.txt).
fn names_other_files(header: &[u8]) -> bool {
    let byte = |at: usize| header.get(at).copied().unwrap_or_default();
    BACKING_OFFSET.map(byte).any(|b| b != 0) || byte(VERSION) > 2 && byte(FEATURES) & EXTERNAL_DATA != 0
}

impl DiskSpec {
    /// The image's format.
    ///
    /// # Errors
    /// See [`Format::guess`].
    pub fn format(&self) -> io::Result<Format> {
        self.format.map_or_else(|| Format::guess(&self.path), Ok)
    }

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
    fn an_image_that_names_other_files_is_qcow2_only_if_its_name_or_the_compose_file_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let image = |name: &str, header: &[(usize, u8)]| {
            let mut bytes = [MAGIC, &[0, 0, 0, 3], &[0; 504]].concat();
            for &(at, byte) in header {
                bytes[at] = byte;
            }
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let guess = |path: &Path| Format::guess(path).map_err(|e| e.to_string());
        for over in [[(15, 0x68)].as_slice(), &[(8, 1)], &[(79, 4)]] {
            let e = guess(&image("disk.img", over)).unwrap_err();
            assert!(e.starts_with("its header says that it is a qcow2 image over another file"), "{e}");
            assert_eq!(guess(&image("mine.QCOW2", over)), Ok(Format::Qcow2));
        }
        assert_eq!(guess(&image("cloud.img", &[(79, 1)])), Ok(Format::Qcow2));
        // Version 2 has other things there.
        assert_eq!(guess(&image("old.img", &[(7, 2), (79, 4)])), Ok(Format::Qcow2));
        let e = guess(&image("raw.qcow2", &[(0, 0)])).unwrap_err();
        assert!(e.starts_with("its name ends in .qcow2, and it is no such image"), "{e}");
        std::fs::write(dir.path().join("short"), "QFI").unwrap();
        assert_eq!(guess(&dir.path().join("short")), Ok(Format::Raw));
        let disk = DiskSpec { format: Some(Format::Qcow2), ..disk(&image("disk.img", &[(79, 4)])) };
        assert_eq!(disk.format().unwrap(), Format::Qcow2);
    }

    fn disk(path: &Path) -> DiskSpec {
        toml::from_str(&format!("path = \"{}\"", path.display())).unwrap()
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
