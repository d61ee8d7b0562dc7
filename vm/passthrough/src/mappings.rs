// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pages by which a VM's memory is mapped for its devices: larger ones are fewer, and the IOMMU keeps more of them at hand.
//!
//! Intel's IOMMUs show their tables in debugfs (Linux `drivers/iommu/intel/debugfs.c`): there each mapping is counted. For others the count follows
//! from the memory behind it: the process that has the device's group open, and the huge pages that its mappings have.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Serialize;

use crate::address::Address;
use crate::host::{Host, link_name, text};

const KIB4: u64 = 4 << 10;
const MIB2: u64 = 2 << 20;
const GIB1: u64 = 1 << 30;
/// Mappings of a process below this are no guest's memory: stacks, libraries, heaps.
const LEAST: u64 = 16 << 20;

/// The source of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The IOMMU's tables.
    Tables,
    /// The memory behind them: the IOMMU may have larger pages where it is contiguous by chance, and smaller ones at its ends.
    Memory,
}

/// Mappings of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pages {
    /// Bytes that each of the mappings covers.
    pub size: u64,
    /// The number of mappings.
    pub count: u64,
}

/// The mappings of a device that a VM has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mappings {
    /// By size, the largest first. Empty: it can't be said, and `why` says why.
    pub pages: Vec<Pages>,
    /// How they are known; `None`: they are not.
    pub source: Option<Source>,
    /// Why there are not larger pages, or why it can't be said.
    pub why: Vec<String>,
}

impl Mappings {
    /// The number of mappings.
    pub fn count(&self) -> u64 {
        self.pages.iter().map(|pages| pages.count).sum()
    }
}

impl std::fmt::Display for Mappings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(source) = self.source else {
            return write!(f, "IOMMU pages can't be said: {}", self.why.join("; "));
        };
        let pages = self.pages.iter().map(|Pages { size, count }| format!("{count} of {}", unit(*size)));
        let pages: Vec<String> = pages.collect();
        let source = match source {
            Source::Tables => "by the IOMMU's tables",
            Source::Memory => "by the memory behind them",
        };
        write!(f, "{} IOMMU pages {source}: {}", self.count(), pages.join(", "))?;
        if !self.why.is_empty() {
            write!(f, "; {}", self.why.join("; "))?;
        }
        Ok(())
    }
}

fn unit(size: u64) -> String {
    match size {
        GIB1.. => format!("{} GiB", size >> 30),
        MIB2.. => format!("{} MiB", size >> 20),
        _ => format!("{} KiB", size >> 10),
    }
}

/// The mappings of a device. `None`: no process has its group open.
pub fn of_device(host: &Host, address: Address) -> Option<Mappings> {
    let process = user(host, address)?;
    let behind = memory(host, process);
    let largest = largest(host, address);
    let (pages, source) = match tables(host, address) {
        Some(pages) => (pages, Some(Source::Tables)),
        None => match &behind {
            Some(behind) => (behind.mapped(largest), Some(Source::Memory)),
            None => (BTreeMap::new(), None),
        },
    };
    let mut why = reasons(&pages, behind.as_ref(), largest);
    if source.is_none() {
        why = vec![format!(
            "the IOMMU shows no tables in /sys/kernel/debug/iommu, and the memory of process {process} can't be read; try it as root"
        )];
    }
    let pages = pages.into_iter().rev().map(|(size, count)| Pages { size, count }).collect();
    Some(Mappings { pages, source, why })
}

/// The process that has the device's group open.
fn user(host: &Host, address: Address) -> Option<u32> {
    let group = link_name(&host.device_folder(address).join("iommu_group"))?;
    let wanted = Path::new("/dev/vfio").join(group);
    let processes = fs::read_dir(host.root().join("proc")).ok()?.flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let opens = |process: &u32| {
        let open = fs::read_dir(host.root().join(format!("proc/{process}/fd")));
        let mut open = open.into_iter().flatten().flatten();
        open.any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == wanted))
    };
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers.into_iter().find(opens)
}

/// A guest's memory by the size of its pages: reserved huge pages, transparent ones, ordinary ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memory {
    bytes: BTreeMap<u64, u64>,
    transparent: u64,
}

impl Memory {
    /// The mappings that it takes in an IOMMU whose largest page is known.
    fn mapped(&self, largest: Option<u64>) -> BTreeMap<u64, u64> {
        let mut pages = BTreeMap::new();
        let all = self.bytes.iter().map(|(size, bytes)| (*size, *bytes)).chain([(MIB2, self.transparent)]);
        for (size, bytes) in all.filter(|(_, bytes)| *bytes > 0) {
            let size = largest.map_or(size, |largest| size.min(largest));
            *pages.entry(size).or_default() += bytes / size;
        }
        pages
    }
}

/// Reads what the large mappings of a process are made of. `None`: it is another user's.
fn memory(host: &Host, process: u32) -> Option<Memory> {
    let smaps = fs::read_to_string(host.root().join(format!("proc/{process}/smaps"))).ok()?;
    let mut memory = Memory::default();
    let mut fields: BTreeMap<&str, u64> = BTreeMap::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(name), Some(value), Some("kB")) = (words.next(), words.next(), words.next()) else {
            // The last line of a mapping.
            if line.starts_with("VmFlags:") {
                add(&mut memory, &std::mem::take(&mut fields));
            }
            continue;
        };
        if let (Some(name), Ok(kib)) = (name.strip_suffix(':'), value.parse::<u64>()) {
            fields.insert(name, kib << 10);
        }
    }
    Some(memory)
}

fn add(memory: &mut Memory, fields: &BTreeMap<&str, u64>) {
    let of = |name: &str| fields.get(name).copied().unwrap_or(0);
    let reserved = of("Shared_Hugetlb") + of("Private_Hugetlb");
    if of("Size") < LEAST {
        return;
    }
    if reserved > 0 {
        *memory.bytes.entry(of("KernelPageSize")).or_default() += reserved;
        return;
    }
    let transparent = of("AnonHugePages") + of("ShmemPmdMapped");
    memory.transparent += transparent;
    *memory.bytes.entry(KIB4).or_default() += of("Rss").saturating_sub(transparent);
}

/// The largest page of the device's IOMMU, as far as Linux shows it: Intel's capabilities (VT-d 11.4.2, SLLPS). AMD's take any power of two.
fn largest(host: &Host, address: Address) -> Option<u64> {
    let cap = text(&host.device_folder(address).join("iommu/intel-iommu/cap"))?;
    let cap = u64::from_str_radix(cap.trim_start_matches("0x"), 16).ok()?;
    Some(if cap >> 35 & 1 == 1 {
        GIB1
    } else if cap >> 34 & 1 == 1 {
        MIB2
    } else {
        KIB4
    })
}

/// Counts the entries of the device's tables. `None`: the kernel does not show them.
fn tables(host: &Host, address: Address) -> Option<BTreeMap<u64, u64>> {
    let folder = host.root().join("sys/kernel/debug/iommu/intel");
    // Before Linux 6.7 one file has the tables of all devices.
    let own = File::open(folder.join(address.to_string()).join("domain_translation_struct"));
    let file = own.or_else(|_| File::open(folder.join("domain_translation_struct"))).ok()?;
    let mut pages = None;
    for line in BufReader::new(file).lines() {
        let line = line.ok()?;
        if let Some(device) = line.strip_prefix("Device ") {
            let own = device.split_ascii_whitespace().next() == Some(&address.to_string());
            match (own, &pages) {
                (true, None) => pages = Some(BTreeMap::new()),
                (false, Some(_)) => break,
                _ => {}
            }
        }
        // A mapping has an entry for each level down to its own, after the first page's number.
        let Some((_, entries)) = line.split_once('|') else { continue };
        let size = match entries.split_ascii_whitespace().count() {
            5 => KIB4,
            4 => MIB2,
            3 => GIB1,
            _ => continue,
        };
        if let Some(pages) = &mut pages {
            *pages.entry(size).or_default() += 1;
        }
    }
    pages
}

/// Says why a VM has not larger pages.
fn reasons(pages: &BTreeMap<u64, u64>, behind: Option<&Memory>, largest: Option<u64>) -> Vec<String> {
    let mut why = Vec::new();
    let Some(behind) = behind else { return why };
    let of = |size| behind.bytes.get(&size).copied().unwrap_or(0);
    let ordinary = of(KIB4);
    if ordinary >= LEAST {
        why.push(format!(
            "{} MiB of the VM's memory are ordinary pages: give it topology and pages = \"2M\" or \"1G\", or reserve huge pages for its zones",
            ordinary >> 20
        ));
    } else if of(GIB1) == 0 && behind.transparent + of(MIB2) > 0 {
        why.push("no page of 1 GiB: the VM's memory is in huge pages of 2 MiB; reserve larger ones and set pages = \"1G\"".into());
    }
    let name = |size| unit(size);
    if let Some(largest) = largest.filter(|largest| *largest < GIB1 && of(GIB1) > 0 || *largest < MIB2) {
        why.push(format!("the IOMMU has no pages larger than {}", name(largest)));
    } else if of(GIB1) > 0 && pages.get(&MIB2).is_some_and(|count| *count > 0) {
        why.push("parts of pages of 1 GiB are mapped by smaller ones: guests' memory has holes, at 640 KiB and below 4 GiB".into());
    }
    why
}

#[cfg(test)]
mod tests;
