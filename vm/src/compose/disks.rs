// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `disks =`: a VM's disks beside `disk`.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::check::Fault;
use super::{Compose, VmSpec};
use crate::host;

/// The longest serial number that virtio has room for, in bytes.
const SERIAL_MAX: usize = 20;
/// Bytes of an image's header that are read.
const HEADER: u64 = 68;
/// What the headers of images other than raw ones have, and at which byte. A VMDK image may be a text that names other files.
const SIGNATURES: [(usize, &[u8], Format); 6] = [
    (0, b"QFI\xfb", Format::Qcow2),
    (0, b"KDMV", Format::Vmdk),
    (0, b"COWD", Format::Vmdk),
    (0, b"# Disk DescriptorFile", Format::Vmdk),
    (0, b"vhdxfile", Format::Vhdx),
    (64, &0xbeda_107f_u32.to_le_bytes(), Format::Vdi),
];

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// `"data.img"`: The image, or a block device. Required.
    pub path: PathBuf,
    /// `"qcow2" where its name ends in .qcow2, else "raw"`: "raw", "qcow2", "vdi", "vmdk" or "vhdx". Without this key an image whose header contradicts its
    /// name is refused.
    #[serde(default)]
    pub format: Option<Format>,
    /// `false`: The guest can't write to it.
    #[serde(default)]
    pub readonly: bool,
    /// `false`: What the guest writes goes to a file in the project's folder, which 'down' removes.
    #[serde(default)]
    pub overlay: bool,
    /// `none`: Its serial number: the guest has it as /dev/disk/by-id/virtio-SERIAL.
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

    /// The format of an image for which the compose file names none: qcow2 where its name ends so, else raw. `before` is the format that the
    /// VM's QEMU before this one had it in: a guest that reboots gets its disk as it was.
    ///
    /// The header decides nothing, since a guest writes what it likes into its raw disk. An image whose header contradicts its name is refused.
    ///
    /// # Errors
    /// The image can't be read, or is refused. Names the remedy.
    pub fn of(path: &Path, before: Option<Format>) -> io::Result<Format> {
        let image = host::open(path, host::Kind::Disk, false)?;
        if let Some(before) = before {
            return Ok(before);
        }
        let mut header = Vec::new();
        image.take(HEADER).read_to_end(&mut header)?;
        let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("qcow2"));
        let by_name = if named { Format::Qcow2 } else { Format::Raw };
        let by_header = Format::of_header(&header);
        if by_header == by_name {
            return Ok(by_name);
        }
        let key = |format: Format| format!("disks = [{{ path = ..., format = \"{}\" }}]", format.name());
        Err(io::Error::other(match by_header {
            Format::Raw => format!(
                "its name ends in .qcow2, and it is no such image; rename it, or name its format in {}",
                key(Format::Raw)
            ),
            other => format!(
                "its name makes it a {} image, and it begins as a {} image; if that is what it is, name its format in {}{}; if a guest has written that \
                 into its disk, in {}",
                by_name.name(),
                other.name(),
                key(other),
                if other == Format::Qcow2 { ", or let its name end in .qcow2" } else { "" },
                key(by_name),
            ),
        }))
    }

    /// The format that an image begins as.
    fn of_header(header: &[u8]) -> Format {
        let is = |(at, signature, _): &(usize, &[u8], Format)| {
            header.get(*at..).is_some_and(|h| h.starts_with(signature))
        };
        SIGNATURES.iter().find(|known| is(known)).map_or(Format::Raw, |(.., format)| *format)
    }
}

impl DiskSpec {
    /// The image's format; `before`: see [`Format::of`].
    ///
    /// # Errors
    /// See [`Format::of`].
    pub fn format(&self, before: Option<Format>) -> io::Result<Format> {
        self.format.map_or_else(|| Format::of(&self.path, before), Ok)
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
    fn the_name_or_the_key_decides_an_images_format_and_a_header_that_contradicts_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let image = |name: &str, at: usize, signature: &[u8]| {
            let mut bytes = vec![0; 512];
            bytes[at..at + signature.len()].copy_from_slice(signature);
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let of = |path: &Path| Format::of(path, None).map_err(|e| e.to_string());
        for (at, signature, format) in SIGNATURES {
            let disk_image = image("disk.img", at, signature);
            let e = of(&disk_image).unwrap_err();
            let remedy = format!("disks = [{{ path = ..., format = \"{}\" }}]", format.name());
            assert!(
                e.contains(&format!("it begins as a {} image", format.name())) && e.contains(&remedy),
                "{e}"
            );
            assert!(e.contains("format = \"raw\""), "{e}");
            assert_eq!(e.contains("let its name end in .qcow2"), format == Format::Qcow2, "{e}");
            // As a guest that reboots has it.
            assert_eq!(Format::of(&disk_image, Some(Format::Raw)).unwrap(), Format::Raw);
            for key in [Format::Raw, format] {
                let disk = DiskSpec { format: Some(key), ..disk(&disk_image) };
                assert_eq!(disk.format(None).unwrap(), key);
            }
        }
        assert_eq!(of(&image("mine.QCOW2", 0, b"QFI\xfb\0\0\0\x03")), Ok(Format::Qcow2));
        let e = of(&image("vm.qcow2", 0, b"vhdxfile")).unwrap_err();
        assert!(e.contains("its name makes it a qcow2 image, and it begins as a vhdx image"), "{e}");
        let e = of(&image("raw.qcow2", 0, b"\0")).unwrap_err();
        assert!(e.starts_with("its name ends in .qcow2, and it is no such image"), "{e}");
        assert_eq!(of(&image("disk.img", 4, b"QFI\xfb")), Ok(Format::Raw));
        // Encrypted by its guest.
        assert_eq!(of(&image("disk.img", 0, b"LUKS\xba\xbe")), Ok(Format::Raw));
        std::fs::write(dir.path().join("short"), "QFI").unwrap();
        assert_eq!(of(&dir.path().join("short")), Ok(Format::Raw));
        assert!(Format::of(&dir.path().join("none"), Some(Format::Raw)).is_err());
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
