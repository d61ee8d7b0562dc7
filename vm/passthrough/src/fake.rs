// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A made-up host for tests: a sysfs tree in a temporary folder, and a kernel that answers writes to it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::bind::{BindError, Bus};
use crate::host::{Host, link_name};

/// A tree of files that looks like a host's `/`.
pub(crate) struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn host(&self) -> Host {
        Host::at(self.path())
    }

    /// A server: NIC alone in its group (01:00.0), two NIC functions in one group (02:00.0, .1) with the bridge above them, an
    /// NVMe disk with the root file system (03:00.0), one with a spare disk under LVM (04:00.0).
    pub(crate) fn server() -> Self {
        let tree = Self { folder: tempfile::tempdir().unwrap() };
        for folder in ["sys/kernel/iommu_groups", "sys/class/net", "sys/class/block", "proc/net", "proc/self"]
        {
            fs::create_dir_all(tree.path().join(folder)).unwrap();
        }
        tree.write("sys/bus/pci/drivers_probe", "");
        for driver in ["e1000e", "nvme", "pcieport", "vfio-pci"] {
            tree.write(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
        }
        tree.device("0000:00:02.0", 0x06_0400, "pcieport", 2);
        tree.device("0000:01:00.0", 0x02_0000, "e1000e", 1);
        tree.device("0000:02:00.0", 0x02_0000, "e1000e", 2);
        tree.device("0000:02:00.1", 0x02_0000, "e1000e", 2);
        tree.device("0000:03:00.0", 0x01_0802, "nvme", 3);
        tree.device("0000:04:00.0", 0x01_0802, "nvme", 4);
        for (address, name) in [("0000:01:00.0", "ens1"), ("0000:02:00.0", "ens2"), ("0000:02:00.1", "ens3")]
        {
            tree.class_member("net", address, name);
        }
        tree.class_member("block", "0000:03:00.0", "nvme0n1");
        tree.class_member("block", "0000:04:00.0", "nvme1n1");
        tree.write(
            "proc/self/mountinfo",
            "29 1 259:2 / / rw - ext4 /dev/nvme0n1 rw\n31 29 0:5 / /dev rw - devtmpfs udev rw\n",
        );
        tree.write("proc/net/route", "Iface\tDestination\tGateway\n");
        tree.write("proc/swaps", "Filename Type Size\n");
        tree
    }

    pub(crate) fn write(&self, path: &str, content: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn device(&self, address: &str, class: u32, driver: &str, group: u32) {
        let real = format!("sys/devices/pci0000:00/{address}");
        for (file, content) in [
            ("vendor", "0x8086\n".to_owned()),
            ("device", "0x10d3\n".to_owned()),
            ("class", format!("{class:#08x}\n")),
            ("numa_node", "-1\n".to_owned()),
            ("reset_method", "flr bus\n".to_owned()),
            ("reset", String::new()),
            ("driver_override", "(null)\n".to_owned()),
        ] {
            self.write(&format!("{real}/{file}"), &content);
        }
        let group_devices = format!("sys/kernel/iommu_groups/{group}/devices");
        fs::create_dir_all(self.path().join(&group_devices)).unwrap();
        fs::create_dir_all(self.path().join("sys/bus/pci/devices")).unwrap();
        let folder = self.path().join(&real);
        symlink(&folder, self.path().join(&group_devices).join(address)).unwrap();
        symlink(self.path().join(format!("sys/kernel/iommu_groups/{group}")), folder.join("iommu_group"))
            .unwrap();
        symlink(&folder, self.path().join("sys/bus/pci/devices").join(address)).unwrap();
        symlink(self.path().join("sys/bus/pci/drivers").join(driver), folder.join("driver")).unwrap();
    }

    fn class_member(&self, class: &str, address: &str, name: &str) {
        let real = format!("sys/devices/pci0000:00/{address}/{class}/{name}");
        self.write(&format!("{real}/dev"), &format!("259:{}\n", if name == "nvme0n1" { 2 } else { 7 }));
        fs::create_dir_all(self.path().join(&real).join("holders")).unwrap();
        symlink(self.path().join(&real), self.path().join("sys/class").join(class).join(name)).unwrap();
    }

    pub(crate) fn remove_driver(&self, address: &str) {
        fs::remove_file(self.host().device_folder(address.parse().unwrap()).join("driver")).unwrap();
    }

    pub(crate) fn unplug(&self, address: &str) {
        fs::remove_file(self.path().join("sys/bus/pci/devices").join(address)).unwrap();
    }

    pub(crate) fn remove_iommu(&self) {
        fs::remove_dir_all(self.path().join("sys/kernel/iommu_groups")).unwrap();
    }
}

/// A kernel that binds and unbinds in a [`Tree`] as Linux does, and can fail at a chosen write.
pub(crate) struct FakeBus {
    root: PathBuf,
    writes: usize,
    pub(crate) fail_at: Option<usize>,
    /// The process is killed before this write.
    pub(crate) killed_at: Option<usize>,
    /// The file that says EAGAIN, and how often.
    pub(crate) busy: Option<(&'static str, usize)>,
    /// A driver that takes no device.
    pub(crate) broken: Option<&'static str>,
    /// The devices that were reset, as the driver of each was then.
    pub(crate) resets: Vec<Option<String>>,
}

impl FakeBus {
    pub(crate) fn new(tree: &Tree) -> Self {
        let root = tree.path().to_owned();
        Self { root, writes: 0, fail_at: None, killed_at: None, busy: None, broken: None, resets: Vec::new() }
    }
}

impl Bus for FakeBus {
    fn load_vfio(&mut self) -> Result<(), BindError> {
        Ok(())
    }

    fn write(&mut self, path: &Path, content: &str) -> io::Result<()> {
        let number = self.writes;
        self.writes += 1;
        assert!(self.killed_at != Some(number), "killed");
        if self.fail_at == Some(number) {
            return Err(io::Error::from_raw_os_error(22));
        }
        if let Some((file, times @ 1..)) = &mut self.busy {
            if path.ends_with(*file) {
                *times -= 1;
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
        }
        let devices = self.root.join("sys/bus/pci/devices");
        if path.ends_with("reset") {
            self.resets.push(link_name(&path.with_file_name("driver")));
            return Ok(());
        }
        if path.ends_with("driver/unbind") {
            return fs::remove_file(devices.join(content).join("driver"));
        }
        if !path.ends_with("drivers_probe") {
            return fs::write(path, content);
        }
        let folder = devices.join(content.trim());
        if link_name(&folder.join("driver")).is_some() {
            return Ok(());
        }
        let chosen = fs::read_to_string(folder.join("driver_override"))?;
        let class = fs::read_to_string(folder.join("class"))?;
        let own = if class.starts_with("0x0108") { "nvme" } else { "e1000e" };
        let driver = if chosen.trim() == "vfio-pci" { "vfio-pci" } else { own };
        if self.broken == Some(driver) {
            return Ok(());
        }
        symlink(self.root.join("sys/bus/pci/drivers").join(driver), folder.join("driver"))
    }
}
