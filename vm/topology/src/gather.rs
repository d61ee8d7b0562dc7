// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The machine as a guest's kernel shows it: a script for the guest's shell, and the files that its output describes.
//!
//! The guest wrote the output, so nothing of it is believed: paths are built from known folders and plain names, and sizes are bounded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::model::Topology;
use crate::read;

/// The script. It needs a shell with grep, find and od, so any Linux guest runs it.
pub const SCRIPT: &str = include_str!("gather.sh");
/// The longest output that is looked at, in bytes: 1,024 CPUs write a tenth of it.
pub const LONGEST: usize = 32 << 20;
/// The most files and folders that are written, which take a page each in a tmpfs: 1,024 CPUs have half of them.
const MOST_FILES: usize = 1 << 17;
/// The most parts of a path below a folder of the script's: `cpu0/cache/index0/size` has four, `node0/access0/initiators/node0` too.
const DEEPEST: usize = 5;

/// The machine that the output of [`SCRIPT`] describes. `reader` starts a process that calls [`read::answer`].
///
/// # Errors
/// The output describes no machine.
pub fn topology(output: &str, reader: Command) -> Result<Topology> {
    let folder = tempfile::tempdir().context("no folder for the guest's files of /sys")?;
    let files = unpack(output, folder.path())?;
    let mut topology = read::folder(folder.path(), reader)?;
    for (node, bytes) in files.present {
        // The memory that the kernel was given, instead of the memory that it leaves for programs.
        if let Some(node) = topology.nodes.iter_mut().find(|n| n.os == node) {
            node.memory = bytes;
        }
    }
    ensure!(!topology.cpus.is_empty(), "the guest shows no CPU in /sys/devices/system/cpu");
    Ok(topology)
}

/// The result of unpacking.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Bytes of each node that exist, as /proc/zoneinfo counts them.
    pub present: BTreeMap<u32, u64>,
}

/// Writes the files that `output` describes below `root`.
///
/// # Errors
/// The output is none of [`SCRIPT`]'s, or a file can't be written.
pub fn unpack(output: &str, root: &Path) -> Result<Unpacked> {
    ensure!(
        output.len() <= LONGEST,
        "the guest's files of /sys are {} bytes: that is no machine",
        output.len()
    );
    let mut files: BTreeMap<PathBuf, Vec<u8>> = BTreeMap::new();
    let mut links: BTreeSet<PathBuf> = BTreeSet::new();
    let mut folder: Option<PathBuf> = None;
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("== ") {
            folder = Some(known(name)?);
            continue;
        }
        let (Some(folder), Some((name, text))) = (&folder, line.split_once(':')) else {
            bail!("the guest said {line:.60?} in place of a file of /sys");
        };
        ensure!(
            files.len() + links.len() < MOST_FILES,
            "the guest has {MOST_FILES} or more files of /sys: that is no machine"
        );
        let (path, bytes) = match (name.strip_suffix('/'), name.strip_suffix('#')) {
            (Some(link), _) => {
                links.insert(folder.join(plain(link)?));
                continue;
            }
            (_, Some(name)) => (plain(name)?, from_hex(text)?),
            _ => (plain(name)?, format!("{text}\n").into_bytes()),
        };
        files.entry(folder.join(path)).or_default().extend(bytes);
    }
    for link in links {
        std::fs::create_dir_all(root.join(link))?;
    }
    for (path, bytes) in &files {
        let path = root.join(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    }
    let zones = files.get(Path::new("proc/zoneinfo")).map(|bytes| String::from_utf8_lossy(bytes));
    Ok(Unpacked { present: zones.map(|text| present(&text)).unwrap_or_default() })
}

/// A folder that the script names, without its leading slash.
fn known(name: &str) -> Result<PathBuf> {
    const FOLDERS: [&str; 3] = ["/sys/devices/system/cpu", "/sys/devices/system/node", "/proc"];
    const PCI: &str = "/sys/bus/pci/devices/";
    let address = name.strip_prefix(PCI).is_some_and(|address| {
        address.len() <= 16
            && address.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.')
            && !address.starts_with('.')
    });
    ensure!(
        FOLDERS.contains(&name) || address,
        "the guest named the folder {name:.60?}, which was not asked for"
    );
    Ok(name.trim_start_matches('/').into())
}

/// A relative path of plain names.
fn plain(name: &str) -> Result<PathBuf> {
    let name = name.strip_prefix("./").unwrap_or(name);
    let good = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    let shallow = name.split('/').count() <= DEEPEST;
    ensure!(
        shallow && name.split('/').all(good),
        "the guest named the file {name:.60?}, which is no file of /sys"
    );
    Ok(name.into())
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    let pairs = text.trim().as_bytes().chunks(2);
    let byte = |pair: &[u8]| {
        let text = std::str::from_utf8(pair).ok().filter(|text| text.len() == 2);
        text.and_then(|text| u8::from_str_radix(text, 16).ok())
    };
    pairs.map(byte).collect::<Option<_>>().context("the guest's PCI configuration is not hexadecimal")
}

/// Bytes of each node by /proc/zoneinfo: the pages that each of its zones has, holes left out.
fn present(text: &str) -> BTreeMap<u32, u64> {
    const PAGE: u64 = 4096;
    let mut nodes = BTreeMap::new();
    let mut node = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("Node ") {
            node = rest.split(',').next().and_then(|number| number.trim().parse::<u32>().ok());
        } else if let (Some(node), Some(pages)) = (node, line.trim().strip_prefix("present")) {
            let pages: u64 = pages.trim().parse().unwrap_or(0);
            *nodes.entry(node).or_default() += pages.saturating_mul(PAGE);
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_runs_here_and_its_output_is_unpacked() {
        let output = Command::new("sh").args(["-c", SCRIPT]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let folder = tempfile::tempdir().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        unpack(&text, folder.path()).unwrap();
        for file in
            ["sys/devices/system/cpu/online", "sys/devices/system/cpu/cpu0/topology/core_id", "proc/meminfo"]
        {
            // Some of meminfo counts up while it is read.
            let there = std::fs::read_to_string(folder.path().join(file)).unwrap();
            let here = std::fs::read_to_string(Path::new("/").join(file)).unwrap();
            assert_eq!(there.lines().next(), here.lines().next(), "{file}");
        }
    }

    #[test]
    fn memory_that_exists_is_counted_by_node() {
        let text = "Node 0, zone      DMA\n        present  10\nNode 0, zone   Normal\n        present  20\n\
                    Node 1, zone   Normal\n        present  5\n";
        assert_eq!(present(text), BTreeMap::from([(0, 30 * 4096), (1, 5 * 4096)]));
    }

    #[test]
    fn a_guest_writes_no_file_but_those_of_its_own_sys() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        for output in [
            "== /etc\npasswd:x",
            "== /sys/devices/system/cpu\n../../../../x:y",
            "== /sys/devices/system/cpu\n/x:y",
            "== /sys/devices/system/cpu/../../../..\nx:y",
            "== /sys/bus/pci/devices/..\nx:y",
            "== /sys/bus/pci/devices/0000:00:00.0\nconfig#:0g",
            "x:y",
            "== /proc\nno colon",
        ] {
            assert!(unpack(output, &inner).is_err(), "{output}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_guest_fills_no_file_system_of_the_host() {
        let folder = tempfile::tempdir().unwrap();
        let many = |begin: &str, line: &dyn Fn(usize) -> String| {
            (0..=MOST_FILES).fold(format!("== {begin}\n"), |text, number| text + &line(number))
        };
        let cpus = "/sys/devices/system/cpu";
        for output in [
            many(cpus, &|number| format!("{number:x}:\n")),
            many(cpus, &|number| format!("{number:x}/:\n")),
            format!("== {cpus}\n{}:1", ["a"; 1000].join("/")),
            format!("== {cpus}\n{}/:", ["a"; 1000].join("/")),
        ] {
            assert!(output.len() < LONGEST);
            let error = format!("{:#}", unpack(&output, folder.path()).unwrap_err());
            assert!(error.contains("no machine") || error.contains("no file of /sys"), "{error}");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{error}");
        }
    }

    #[test]
    fn the_files_of_a_machine_are_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let output = "== /sys/bus/pci/devices/0000:00:01.0\nclass:0x020000\nconfig#:8680ff\n== /proc\nmeminfo:a: 1\nmeminfo:b: 2\n";
        unpack(output, folder.path()).unwrap();
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        assert_eq!(read("sys/bus/pci/devices/0000:00:01.0/config"), [0x86, 0x80, 0xff]);
        assert_eq!(read("proc/meminfo"), b"a: 1\nb: 2\n");
    }
}
