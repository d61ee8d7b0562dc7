// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's disks as QEMU has them, and the overlays that take what a guest writes to an image that is to stay as it is.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use tombolo_brief::child::leave_sockets;

use crate::child;
use crate::compose::VmSpec;
use crate::compose::disks::{DiskSpec, Format};
use crate::project::state::StateDir;
use crate::qemu::start;

/// The extension of overlays in a project's folder.
const OVERLAY: &str = "overlay";
/// The longest name of an overlay's image, in bytes; the format has it.
const NAME_MAX: u32 = 1023;

/// A disk as QEMU has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Its id in QEMU.
    pub id: String,
    /// The file that QEMU opens.
    pub file: PathBuf,
    /// The file's format.
    pub format: Format,
    /// The format of the image that the compose file names: the file, or what is under an overlay.
    pub image: Format,
    /// The guest can't write to it.
    pub read_only: bool,
    /// QEMU keeps what the guest writes to itself.
    pub snapshot: bool,
    /// Its serial number.
    pub serial: Option<String>,
}

impl Drive {
    /// QEMU's arguments; `first`: the firmware boots from it.
    #[must_use]
    pub fn arguments(&self, first: bool) -> [(&'static str, String); 2] {
        let Drive { id, file, format, .. } = self;
        let path = file.to_string_lossy().replace(',', ",,");
        let flag = |set: bool, text| if set { text } else { "" };
        let (read_only, snapshot) =
            (flag(self.read_only, ",readonly=on"), flag(self.snapshot, ",snapshot=on"));
        let serial = self.serial.as_ref().map(|serial| format!(",serial={serial}")).unwrap_or_default();
        let first = flag(first, ",bootindex=0");
        [
            ("-drive", format!("file={path},if=none,id={id},format={}{read_only}{snapshot}", format.name())),
            ("-device", format!("virtio-blk-pci,drive={id}{serial}{first}")),
        ]
    }
}

/// The disks of a VM in the guest's order; overlays that are not there yet are made. `before` has the formats that the images had in the VM's QEMU
/// before this one, and is empty where there was none.
///
/// # Errors
/// When an image is refused (see [`Format::of`]), or an overlay can't be made.
pub fn drives(dir: &StateDir, vm: &str, spec: &VmSpec, before: &[Format]) -> anyhow::Result<Vec<Drive>> {
    let mut before = before.iter().copied();
    let mut drives = Vec::new();
    if let Some(file) = &spec.disk {
        let format =
            Format::of(file, before.next()).with_context(|| format!("vm.{vm}.disk: {}", file.display()))?;
        drives.push(Drive {
            id: "disk".into(),
            file: file.clone(),
            format,
            image: format,
            read_only: false,
            snapshot: spec.snapshot,
            serial: None,
        });
    }
    for (n, disk) in spec.disks.iter().enumerate() {
        let image =
            disk.format(before.next()).with_context(|| format!("vm.{vm}.disks: {}", disk.path.display()))?;
        let (file, format) = if disk.overlay {
            (overlay(dir, vm, n, disk, image)?, Format::Qcow2)
        } else {
            (disk.path.clone(), image)
        };
        let (id, serial) = (format!("disk{n}"), disk.serial.clone());
        drives.push(Drive { id, file, format, image, read_only: disk.readonly, snapshot: false, serial });
    }
    Ok(drives)
}

fn overlay(dir: &StateDir, vm: &str, n: usize, disk: &DiskSpec, format: Format) -> anyhow::Result<PathBuf> {
    let path = dir.path().join(format!("{vm}.{n}.{OVERLAY}"));
    // The file may name another image for this disk since.
    if backing(&path).is_some_and(|image| image == disk.path) {
        return Ok(path);
    }
    // One that is cut off in the middle has not the name of one that is complete.
    let begun = dir.path().join(format!("{vm}.{n}.new.{OVERLAY}"));
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", format.name(), "-b"]).arg(&disk.path).arg(&begun);
    leave_sockets(&mut command);
    let output = command.output().map_err(|e| start::no_program(Path::new("qemu-img"), "qemu-utils", &e))?;
    if !output.status.success() {
        // It may not have begun it.
        let _none = std::fs::remove_file(&begun);
        anyhow::bail!(
            "vm.{vm}.disks: no overlay over {} can be made: {}",
            disk.path.display(),
            child::words(&output)
        );
    }
    std::fs::rename(&begun, &path).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The image under an overlay: the name that stands in its header (QEMU, docs/interop/qcow2.txt).
fn backing(overlay: &Path) -> Option<PathBuf> {
    let file = std::fs::File::open(overlay).ok()?;
    let (mut offset, mut length) = ([0; 8], [0; 4]);
    file.read_exact_at(&mut offset, 8).and_then(|()| file.read_exact_at(&mut length, 16)).ok()?;
    let length = u32::from_be_bytes(length).min(NAME_MAX);
    let mut name = vec![0; usize::try_from(length).ok()?];
    file.read_exact_at(&mut name, u64::from_be_bytes(offset)).ok()?;
    Some(PathBuf::from(OsString::from_vec(name)))
}

/// Removes the overlays of a VM that has been stopped, or of all.
pub fn discard(dir: &StateDir, vm: Option<&str>) {
    let Ok(entries) = std::fs::read_dir(dir.path()) else { return };
    for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        let its = |vm: &str| is_overlay_of(&path, vm);
        if path.extension().is_some_and(|e| e == OVERLAY) && vm.is_none_or(its) {
            if let Err(e) = std::fs::remove_file(&path) {
                crate::say!("{}: {e}", path.display());
            }
        }
    }
}

/// Names of VMs have no dot.
fn is_overlay_of(path: &Path, vm: &str) -> bool {
    path.file_name().and_then(|name| name.to_str()).and_then(|name| name.split('.').next()) == Some(vm)
}

/// Explains QEMU's message about a disk that it can't lock.
#[must_use]
pub fn explain(said: &[String]) -> Option<String> {
    said.iter().find(|line| line.contains("Failed to get") && line.contains("lock"))?;
    let path = said.iter().find_map(|line| line.split_once("using the image [")?.1.split(']').next());
    Some(format!(
        "its disk {} is in use: another VM or program has it open, which QEMU's lock on the image tells. Stop that one ('lsof' or 'fuser' names \
         it), or share the image by overlay = true or readonly = true in all VMs that use it",
        path.unwrap_or("(see below)")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VmSpec {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn disks_come_in_the_files_order_after_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::at(folder.path().to_owned());
        for image in ["a,b", "c"] {
            std::fs::write(folder.path().join(image), "").unwrap();
        }
        let vm = spec(&format!(
            "disk = \"{0}/a,b\"\nsnapshot = true\ndisks = [{{ path = \"{0}/c\", serial = \"data\" }}, {{ path = \"/d\", readonly = true, format = \"vmdk\" }}]",
            folder.path().display()
        ));
        let drives = drives(&dir, "a", &vm, &[]).unwrap();
        let lines: Vec<String> =
            drives.iter().enumerate().flat_map(|(n, d)| d.arguments(n == 0)).map(|(_, v)| v).collect();
        let lines: Vec<String> =
            lines.iter().map(|line| line.replace(&*folder.path().to_string_lossy(), "")).collect();
        assert_eq!(
            lines,
            [
                "file=/a,,b,if=none,id=disk,format=raw,snapshot=on",
                "virtio-blk-pci,drive=disk,bootindex=0",
                "file=/c,if=none,id=disk0,format=raw",
                "virtio-blk-pci,drive=disk0,serial=data",
                "file=/d,if=none,id=disk1,format=vmdk,readonly=on",
                "virtio-blk-pci,drive=disk1",
            ]
        );
    }

    #[test]
    fn an_overlay_stays_until_its_vm_is_stopped_and_the_image_is_never_written() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("base.img");
        std::fs::write(&image, vec![7; 1 << 20]).unwrap();
        let dir = StateDir::at(folder.path().to_owned());
        let vm = spec(&format!("disks = [{{ path = \"{}\", overlay = true }}]", image.display()));
        let first = drives(&dir, "a", &vm, &[]).unwrap().remove(0);
        assert_eq!((first.format, first.file.file_name().unwrap()), (Format::Qcow2, "a.0.overlay".as_ref()));
        let write = |to: &Path| {
            let io = Command::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 1 0 64k"]).arg(to).output();
            assert!(io.expect("the package qemu-utils").status.success());
        };
        write(&first.file);
        let before = std::fs::read(&first.file).unwrap();
        assert_eq!(drives(&dir, "a", &vm, &[]).unwrap().remove(0), first);
        assert_eq!(std::fs::read(&first.file).unwrap(), before, "a restart keeps what was written");
        assert!(std::fs::read(&image).unwrap().iter().all(|&b| b == 7));
        let other = drives(&dir, "ab", &vm, &[]).unwrap().remove(0);
        discard(&dir, Some("a"));
        assert!(!first.file.exists() && other.file.exists());
        discard(&dir, None);
        assert!(!other.file.exists() && image.exists());
    }

    #[test]
    fn a_guest_that_writes_an_images_header_into_its_raw_disk_reboots_with_it_as_it_was_and_is_refused_by_up()
    {
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::at(folder.path().to_owned());
        let [evil, disk] = ["evil", "disk.img"].map(|name| folder.path().join(name));
        // A disk of any size, whose header names no other file.
        let made =
            Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&evil).arg("1T").output();
        assert!(made.expect("the package qemu-utils").status.success());
        for (text, has_overlay) in [
            (format!("disk = \"{}\"", disk.display()), false),
            (format!("disks = [{{ path = \"{}\" }}]", disk.display()), false),
            (format!("disks = [{{ path = \"{}\", overlay = true }}]", disk.display()), true),
        ] {
            let spec = spec(&text);
            std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
            let first = drives(&dir, "a", &spec, &[]).unwrap();
            assert_eq!((first[0].image, first[0].format == Format::Qcow2), (Format::Raw, has_overlay));
            std::fs::copy(&evil, &disk).unwrap();
            assert_eq!(drives(&dir, "a", &spec, &[Format::Raw]).unwrap(), first);
            discard(&dir, None);
            let e = format!("{:#}", drives(&dir, "a", &spec, &[]).unwrap_err());
            assert!(e.contains("disk.img: its name makes it a raw image, and it begins as a qcow2"), "{e}");
            let e = format!("{:#}", crate::host::check_files("a", &spec).unwrap_err());
            assert!(e.contains("format = \"raw\""), "{e}");
        }
        let named = spec(&format!("disks = [{{ path = \"{}\", format = \"raw\" }}]", disk.display()));
        crate::host::check_files("a", &named).unwrap();
        assert_eq!(drives(&dir, "a", &named, &[]).unwrap()[0].format, Format::Raw);
    }

    #[test]
    fn an_overlay_over_another_image_and_one_that_is_cut_off_are_not_taken_for_a_disks_own() {
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::at(folder.path().to_owned());
        let over = |image: &str| {
            let image = folder.path().join(image);
            let vm = spec(&format!("disks = [{{ path = \"{}\", overlay = true }}]", image.display()));
            drives(&dir, "a", &vm, &[]).map(|mut drives| drives.remove(0).file)
        };
        for image in ["one.img", "two.img"] {
            std::fs::write(folder.path().join(image), vec![0; 1 << 20]).unwrap();
        }
        let overlay = over("one.img").unwrap();
        assert_eq!(backing(&overlay).unwrap(), folder.path().join("one.img"));
        assert_eq!(over("two.img").unwrap(), overlay);
        assert_eq!(backing(&overlay).unwrap(), folder.path().join("two.img"));
        std::fs::write(&overlay, "QFI\u{fb}").unwrap();
        over("one.img").unwrap();
        assert_eq!(backing(&overlay).unwrap(), folder.path().join("one.img"));
        assert!(over("none.img").is_err());
        discard(&dir, Some("a"));
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "the images");
    }

    #[test]
    fn qemus_words_about_a_lock_become_the_name_of_the_disk_and_the_remedy() {
        let said = [
            "qemu-system-x86_64: -drive file=/x/d.img,if=none: Failed to get \"write\" lock",
            "Is another process using the image [/x/d.img]?",
        ];
        let text = explain(&said.map(str::to_owned)).unwrap();
        assert!(text.starts_with("its disk /x/d.img is in use"), "{text}");
        assert_eq!(explain(&["qemu: no such device".to_owned()]), None);
    }
}
