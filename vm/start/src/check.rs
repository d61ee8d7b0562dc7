// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits of the host that would make growing fail later, found before anything is started.

use std::path::Path;

use thiserror::Error;

use crate::layout::{DEFAULT_DMA_ENTRIES, Layout, MIB};

/// A limit that is too low.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Shortage {
    /// The memory is not there.
    #[error(
        "the VM should have {wanted} MiB but this host has {available} MiB available and keeps {reserve} MiB for itself: \
         stop something, or lower the VM's memory"
    )]
    HostMemory {
        /// MiB the VM should have.
        wanted: u64,
        /// MiB the host could give.
        available: u64,
        /// MiB the host keeps.
        reserve: u64,
    },
    /// The VM's memory cannot all be pinned.
    #[error(
        "only {limit} MiB may be locked by this process but a device's VM locks {wanted} MiB: raise it (ulimit -l, LimitMEMLOCK= \
         in the service, memtune/hard_limit in libvirt)"
    )]
    LockedMemory {
        /// MiB allowed.
        limit: u64,
        /// MiB needed.
        wanted: u64,
    },
}

/// Limits as they are now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes the host could give without swapping.
    pub available: u64,
    /// All of the host's memory in bytes.
    pub host_total: u64,
    /// Bytes this user may lock; None: no limit.
    pub lockable: Option<u64>,
    /// DMA mappings a VFIO container may have.
    pub dma_entries: u64,
}

/// Bytes for QEMU and its device models beside the guest's memory.
const QEMU_ITSELF: u64 = 128 * MIB;

impl Limits {
    /// Reads the limits of this process from the files below `root`.
    pub fn read(root: &Path) -> std::io::Result<Self> {
        let meminfo = std::fs::read_to_string(root.join("proc/meminfo"))?;
        let status = std::fs::read_to_string(root.join("proc/self/status"))?;
        let limits = std::fs::read_to_string(root.join("proc/self/limits"))?;
        let entries = root.join("sys/module/vfio_iommu_type1/parameters/dma_entry_limit");
        Ok(Self {
            available: kib_line(&meminfo, "MemAvailable:").unwrap_or(0),
            host_total: kib_line(&meminfo, "MemTotal:").unwrap_or(0),
            lockable: if may_lock_all(&status) { None } else { lock_limit(&limits) },
            dma_entries: std::fs::read_to_string(entries)
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(DEFAULT_DMA_ENTRIES),
        })
    }

    /// Memory that the host keeps for itself: a twentieth, at most 2 GiB.
    pub fn reserve(&self) -> u64 {
        (self.host_total / 20).min(2048 * MIB)
    }

    /// Refuses a VM that cannot become complete.
    pub fn allow(&self, layout: &Layout, has_device: bool) -> Result<(), Shortage> {
        let total = layout.boot + layout.grown;
        if total + QEMU_ITSELF + self.reserve() > self.available {
            return Err(Shortage::HostMemory {
                wanted: total / MIB,
                available: self.available / MIB,
                reserve: self.reserve() / MIB,
            });
        }
        match self.lockable {
            Some(limit) if has_device && limit < total => {
                Err(Shortage::LockedMemory { limit: limit / MIB, wanted: total / MIB })
            }
            _ => Ok(()),
        }
    }
}

/// Bytes of a line like `MemAvailable:  1234 kB`.
pub(crate) fn kib_line(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Returns whether the process has CAP_IPC_LOCK (bit 14), which VFIO takes for no limit.
fn may_lock_all(status: &str) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|set| set & (1 << 14) != 0)
}

fn lock_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{GIB, Wish};

    fn host(cap: &str, lock: &str) -> Limits {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   8388608 kB\n");
        write("proc/self/status", &format!("Name:\tx\nCapEff:\t{cap}\n"));
        write(
            "proc/self/limits",
            &format!("Max locked memory         {lock}              {lock}              bytes\n"),
        );
        write("sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "4096\n");
        Limits::read(root.path()).unwrap()
    }

    fn layout(total: u64) -> Layout {
        Wish { total, boot: None, dma_entries: DEFAULT_DMA_ENTRIES }.layout().unwrap()
    }

    #[test]
    fn memory_that_is_not_there_is_refused_before_the_start() {
        let limits = host("000001ffffffffff", "65536");
        assert_eq!(limits.dma_entries, 4096);
        assert_eq!(limits.allow(&layout(4 * GIB), true), Ok(()));
        assert!(
            limits.allow(&layout(8 * GIB), false).unwrap_err().to_string().contains("8192 MiB available")
        );
    }

    #[test]
    fn a_limit_on_locked_memory_counts_only_with_a_device_and_without_the_capability() {
        let limits = host("0000000000000000", "8388608");
        assert!(matches!(limits.allow(&layout(4 * GIB), true), Err(Shortage::LockedMemory { limit: 8, .. })));
        assert_eq!(limits.allow(&layout(4 * GIB), false), Ok(()));
        assert_eq!(host("0000000000000000", "unlimited").allow(&layout(4 * GIB), true), Ok(()));
        assert_eq!(host("0000000000004000", "8388608").allow(&layout(4 * GIB), true), Ok(()));
    }
}
