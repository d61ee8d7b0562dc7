// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The capabilities of this host, each with its remedy.

use std::path::Path;

use serde::Serialize;

use crate::compose::accelerator::Api;
use crate::guest::kit;
use crate::host;
use crate::project::accelerator::devices;
use crate::qemu::kvm;
use crate::qemu::version::Qemu;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// As it should be.
    Good,
    /// It works, with less.
    Less,
    /// It does not work.
    Bad,
}

/// One line of the doctor.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The subject of the check.
    pub name: &'static str,
    pub grade: Grade,
    /// The check's result in words.
    pub found: String,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

pub(crate) fn finding(name: &'static str, grade: Grade, found: String, remedy: Option<&str>) -> Finding {
    Finding { name, grade, found, remedy: remedy.map(str::to_owned) }
}

/// Looks at everything; `near` is where a compose file is or would be.
pub fn examine(near: &Path, announce: impl FnOnce()) -> Vec<Finding> {
    let mut findings = Vec::new();
    let places = kit::places(near);
    let kit = kit::kit(&places, None);
    let qemu = Qemu::find(None);
    findings.push(match &qemu {
        Ok(q) => finding("qemu", Grade::Good, format!("{} {}", q.program.display(), q.version_text()), None),
        Err(e) => finding("qemu", Grade::Bad, format!("{e:#}"), Some("apt install qemu-system-x86")),
    });
    findings.push(match &kit {
        Some(boot) => finding("guest kit", Grade::Good, boot.kernel.display().to_string(), None),
        None => finding(
            "guest kit",
            Grade::Less,
            "not built".into(),
            Some("make guest (or name kernels and disks of your own)"),
        ),
    });
    let kernel = kit.as_ref().map(|b| b.kernel.as_path());
    // A signal ends this process, and the guest's QEMU with it.
    let verdict = qemu.as_ref().ok().and_then(|q| kvm::verdict(q, kernel, kvm::LIMIT, announce, &|| false));
    if let Some(verdict) = verdict {
        let (grade, remedy) = if verdict.works {
            (Grade::Good, None)
        } else {
            (
                Grade::Less,
                Some("VMs run under TCG, slower; use a host with hardware virtualization for speed"),
            )
        };
        findings.push(finding("kvm", grade, verdict.why, remedy));
    }
    findings.push(memory());
    findings.push(huge_pages());
    findings.push(iommu(Path::new("/sys/kernel/iommu_groups")));
    findings.push(match crate::project::state::base_dir() {
        Ok(dir) => finding("state folder", Grade::Good, dir.display().to_string(), None),
        Err(e) => finding(
            "state folder",
            Grade::Bad,
            format!("{e:#}"),
            Some("set XDG_RUNTIME_DIR to a folder of your own"),
        ),
    });
    findings.push(fuse(Path::new("/dev/fuse")));
    findings.push(module(&std::fs::read_to_string("/proc/filesystems").unwrap_or_default()));
    findings.push(opencl(devices(Api::OpenCl)));
    findings.push(cuda(devices(Api::Cuda)));
    findings
}

fn opencl(devices: anyhow::Result<Vec<String>>) -> Finding {
    match devices {
        Ok(devices) => finding("opencl", Grade::Good, devices.join(", "), None),
        Err(e) => {
            let remedy =
                "apt install pocl-opencl-icd, or your device's driver (only for accelerators in VMs)";
            let found = format!("{e:#}");
            finding("opencl", Grade::Less, found.split(';').next().unwrap_or_default().into(), Some(remedy))
        }
    }
}

fn cuda(devices: anyhow::Result<Vec<String>>) -> Finding {
    match devices {
        Ok(devices) => finding("cuda", Grade::Good, devices.join(", "), None),
        Err(e) => {
            let remedy = "install NVIDIA's driver (only for CUDA in VMs)";
            let found = format!("{e:#}");
            finding("cuda", Grade::Less, found.split(';').next().unwrap_or_default().into(), Some(remedy))
        }
    }
}

fn memory() -> Finding {
    let available = host::memory_available().unwrap_or(0) >> 20;
    let grade = if available >= 2048 { Grade::Good } else { Grade::Less };
    let remedy = (grade == Grade::Less)
        .then_some("two VMs with a zone want 2 GB: close something, or make them smaller");
    finding("memory", grade, format!("{available} MB available"), remedy)
}

fn huge_pages() -> Finding {
    let free = host::meminfo("HugePages_Free").map_or(0, |b| b >> 10);
    let shmem =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let chosen = shmem.split('[').nth(1).and_then(|s| s.split(']').next()).unwrap_or("unknown").to_owned();
    let good = free > 0 || matches!(chosen.as_str(), "always" | "advise" | "within_size" | "force");
    let found = format!("{free} reserved and free, transparent ones for shared memory: {chosen}");
    let remedy =
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (fewer TLB misses on zones)";
    finding("huge pages", if good { Grade::Good } else { Grade::Less }, found, (!good).then_some(remedy))
}

fn iommu(groups: &Path) -> Finding {
    let count = std::fs::read_dir(groups).map_or(0, Iterator::count);
    if count > 0 {
        return finding("iommu", Grade::Good, format!("{count} groups: devices can be passed through"), None);
    }
    let remedy = "to pass devices through: enable VT-d or AMD-Vi in the firmware and boot with intel_iommu=on or amd_iommu=on";
    finding("iommu", Grade::Less, "no groups".into(), Some(remedy))
}

fn fuse(device: &Path) -> Finding {
    match std::fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => finding("fuse", Grade::Good, "the host can mount zones".into(), None),
        Err(e) => {
            let remedy = "modprobe fuse; apt install fuse3 (only for mounting zones on the host)";
            finding("fuse", Grade::Less, format!("{} can't be opened: {e}", device.display()), Some(remedy))
        }
    }
}

/// `known`: the kernel's file systems, as proc(5) lists them.
fn module(known: &str) -> Finding {
    if known.lines().any(|line| line == "nodev\ttombolo") {
        return finding("tombolo.ko", Grade::Good, "root's mounts of zones are the kernel's".into(), None);
    }
    let remedy = "apt install tombolo-dkms; modprobe tombolo (only for mounting zones on the host)";
    finding(
        "tombolo.ko",
        Grade::Less,
        "not loaded: the host mounts by FUSE, without shared mappings".into(),
        Some(remedy),
    )
}

/// The findings as lines for a person.
pub fn table(findings: &[Finding], colour: bool) -> String {
    let width = findings.iter().map(|f| f.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for f in findings {
        let (mark, code) = match f.grade {
            Grade::Good => ("good", "32"),
            Grade::Less => ("less", "33"),
            Grade::Bad => ("bad ", "31"),
        };
        let mark = if colour { format!("\x1b[{code}m{mark}\x1b[0m") } else { mark.to_owned() };
        text.push_str(&format!("{mark}  {:width$}  {}\n", f.name, f.found));
        if let Some(remedy) = &f.remedy {
            text.push_str(&format!("      {:width$}  -> {remedy}\n", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_its_remedy() {
        let none = opencl(Err(anyhow::anyhow!("no OpenCL device on this machine; install one")));
        assert_eq!(none.found, "no OpenCL device on this machine");
        assert_eq!(module("nodev\tproc\nnodev\ttombolo\n").grade, Grade::Good);
        let lacks = Path::new("/nonexistent");
        for finding in [iommu(lacks), fuse(lacks), module("nodev\tproc\n"), none] {
            assert_eq!(finding.grade, Grade::Less);
            assert!(finding.remedy.is_some());
        }
        let text = table(&[iommu(Path::new("/nonexistent"))], false);
        assert!(
            text.starts_with("less  iommu  no groups\n") && text.contains("-> to pass devices through"),
            "{text}"
        );
        assert!(!text.contains('\x1b'));
    }
}
