// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host's memory, and the files that a VM names.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;

use crate::compose::disks::Format;
use crate::compose::{Size, VmSpec};
use crate::project::control::Status;

/// Memory that is left, in bytes.
pub fn memory_available() -> Option<u64> {
    meminfo("MemAvailable")
}

/// A line of /proc/meminfo, in bytes.
pub fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kb| kb << 10)
}

/// Memory that running VMs and zones in memory may still take: they have been promised all of theirs, and the host counts as taken only
/// what they have touched. In bytes.
pub fn promised(project: &Status) -> u64 {
    let vms = project.vms.iter().filter_map(|vm| Some(vm.memory.saturating_sub(resident(vm.pid?))));
    let zones = project.zones.iter().filter(|zone| zone.backing == "memfd").map(|zone| {
        let touched = std::fs::metadata(&zone.path).map_or(zone.size, |meta| meta.blocks() * 512);
        zone.size.saturating_sub(touched)
    });
    vms.chain(zones).fold(0, u64::saturating_add)
}

/// Memory of a process that is its own or shared memory, in bytes.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let kilobytes = |line: &str| {
        let (key, value) = line.split_once(':')?;
        matches!(key, "RssAnon" | "RssShmem").then(|| value.split_whitespace().next()?.parse::<u64>().ok())?
    };
    status.lines().filter_map(kilobytes).sum::<u64>() << 10
}

/// Refuses what can't fit beside what has been `promised` already.
///
/// # Errors
/// Names the sizes and the largest part.
pub fn check_memory<'a>(
    promised: u64,
    vms: impl Iterator<Item = (&'a str, u64)>,
    zones: impl Iterator<Item = (&'a str, u64)>,
) -> anyhow::Result<()> {
    check_memory_of(memory_available(), promised, vms, zones)
}

fn check_memory_of<'a>(
    available: Option<u64>,
    promised: u64,
    vms: impl Iterator<Item = (&'a str, u64)>,
    zones: impl Iterator<Item = (&'a str, u64)>,
) -> anyhow::Result<()> {
    let Some(available) = available else { return Ok(()) };
    let left = available.saturating_sub(promised);
    let parts: Vec<(String, u64)> = vms
        .map(|(n, s)| (format!("vm.{n}.memory"), s))
        .chain(zones.map(|(n, s)| (format!("zone.{n}.size"), s)))
        .collect();
    let total: u64 = parts.iter().fold(0, |sum, (_, s)| sum.saturating_add(*s));
    if let Some((name, size)) = parts.iter().max_by_key(|(_, s)| *s).filter(|_| total > left) {
        anyhow::bail!(
            "too little memory: VMs and zones want {}M together, the host has {}M left{}; the largest is {name} with {}; \
             make it smaller, or set overcommit = true",
            total >> 20,
            left >> 20,
            if promised > 0 {
                format!(" beside the {}M that running ones may still take", promised >> 20)
            } else {
                String::new()
            },
            Size(*size)
        );
    }
    Ok(())
}

/// The required kind of a file that a compose file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A regular file or a block device.
    Disk,
}

/// Opens a file that a compose file names. Files that would block their reader, such as pipes, are refused.
///
/// # Errors
/// Those of the file system, and that it is something else.
pub fn open(path: &Path, kind: Kind, write: bool) -> io::Result<File> {
    let is_one = |meta: &Metadata| meta.is_file() || kind == Kind::Disk && meta.file_type().is_block_device();
    let refused = match kind {
        Kind::File => "it is no regular file",
        Kind::Disk => "it is neither a regular file nor a block device",
    };
    let check = |meta: Metadata| if is_one(&meta) { Ok(()) } else { Err(io::Error::other(refused)) };
    check(std::fs::metadata(path)?)?;
    // Something else may have come to its place.
    let file = OpenOptions::new().read(true).write(write).custom_flags(libc::O_NONBLOCK).open(path)?;
    check(file.metadata()?)?;
    Ok(file)
}

/// Looks whether the files a VM names are there.
///
/// # Errors
/// Names the key and the file.
pub fn check_files(name: &str, spec: &VmSpec) -> anyhow::Result<()> {
    let first = spec.disk.iter().map(|disk| ("disk", disk, !spec.snapshot, None));
    let others = spec.disks.iter().map(|disk| ("disks", &disk.path, disk.is_written(), disk.format));
    for (key, disk, written, format) in first.chain(others) {
        let opened = open(disk, Kind::Disk, written);
        opened.map_err(|e| anyhow::anyhow!("vm.{name}.{key}: {} can't be opened: {e}", disk.display()))?;
        if format.is_none() {
            Format::of(disk, None).with_context(|| format!("vm.{name}.{key}: {}", disk.display()))?;
        }
    }
    if let Some(given) = &spec.cloud_init {
        let read = given.read_user_data().and_then(|_| given.read_network()).and_then(|_| given.read_keys());
        read.with_context(|| format!("vm.{name}"))?;
    }
    for share in &spec.share {
        if !share.path.is_dir() {
            anyhow::bail!("vm.{name}.share: {} is not a folder", share.path.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_names_the_largest_part_and_the_remedy() {
        let vms = || [("a", 4 << 30), ("b", 1 << 30)].into_iter();
        let zones = || [("z", 2 << 30)].into_iter();
        let e = check_memory_of(Some(6 << 30), 0, vms(), zones()).unwrap_err().to_string();
        assert!(
            e.contains("want 7168M together, the host has 6144M") && e.contains("vm.a.memory with 4G"),
            "{e}"
        );
        assert!(e.contains("overcommit = true"));
        check_memory_of(Some(7 << 30), 0, vms(), zones()).unwrap();
        let e = check_memory_of(Some(8 << 30), 2 << 30, vms(), zones()).unwrap_err().to_string();
        assert!(e.contains("6144M left beside the 2048M that running ones may still take"), "{e}");
    }

    #[test]
    fn a_disk_that_is_a_folder_a_pipe_or_a_terminal_is_refused_and_nobody_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the name is a string that ends with a zero byte.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let check = |spec: &str| check_files("a", &toml::from_str(spec).unwrap()).unwrap_err().to_string();
        for path in [pipe.to_str().unwrap(), dir.path().to_str().unwrap(), "/dev/zero"] {
            let e = check(&format!("disk = \"{path}\""));
            assert!(
                e.starts_with(&format!("vm.a.disk: {path} can't be opened: it is neither a regular file")),
                "{e}"
            );
            let e = check(&format!("disks = [{{ path = \"{path}\", readonly = true }}]"));
            assert!(e.starts_with("vm.a.disks: ") && e.contains("nor a block device"), "{e}");
        }
        let image = dir.path().join("image");
        std::fs::write(&image, "").unwrap();
        check_files("a", &toml::from_str(&format!("disk = \"{}\"", image.display())).unwrap()).unwrap();
    }

    #[test]
    fn the_host_tells_its_memory() {
        assert!(memory_available().unwrap() > 0);
        assert!(meminfo("MemTotal").unwrap() >= memory_available().unwrap());
    }
}
