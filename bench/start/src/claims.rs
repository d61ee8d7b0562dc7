// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims about fast start that are checked inside a lab, one function for each. The test outside boots the lab and calls them by name.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tombolo_lab::cache;
use tombolo_passthrough::bind::{Owner, Store, bind, reclaim};
use tombolo_passthrough::host::Host;
use tombolo_passthrough::plan::{Refusal, plan};
use tombolo_passthrough::{bind as binding, device::Device};
use tombolo_start::ahead::Budget;
use tombolo_start::check::Limits;
use tombolo_start::grow::{GrowError, Options, grow};
use tombolo_start::layout::{DEFAULT_DMA_ENTRIES, Layout, MIB, Wish};
use tombolo_start::monitor::Monitor;
use tombolo_start::prepare::ProcessMemory;
use tombolo_start::progress::Phase;
use tombolo_start::timeline::{Event, render};

use crate::measure::{System, grow_to_full, memory_in};
use crate::nested::{Backing, Card, Guest, Image, MEMORY, Spec};

/// A claim: its name, whether the short run checks it, and how.
pub struct Claim {
    pub name: &'static str,
    /// It belongs to the short run.
    pub short: bool,
    check: fn() -> Result<()>,
}

pub const ALL: &[Claim] = &[
    Claim {
        name: "a_device_of_the_hosts_own_disk_or_network_is_refused_untouched",
        short: true,
        check: what_the_host_uses_is_refused,
    },
    Claim { name: "a_group_goes_as_a_whole_or_not_at_all", short: true, check: a_group_goes_whole },
    Claim {
        name: "a_vm_with_a_device_starts_small_and_gets_all_of_its_memory",
        short: true,
        check: a_vm_with_a_device_grows,
    },
    Claim {
        name: "a_device_of_a_vm_that_was_killed_goes_back_to_its_driver",
        short: true,
        check: a_killed_vm_gives_its_device_back,
    },
    Claim {
        name: "a_passed_through_card_carries_packets_while_memory_grows",
        short: false,
        check: packets_while_growing,
    },
    Claim {
        name: "a_guest_that_reboots_while_growing_gets_all_of_its_memory",
        short: false,
        check: a_reboot_is_grown_again,
    },
    Claim {
        name: "a_debian_guest_with_the_kits_initramfs_scripts_has_its_memory_before_its_root_file_system",
        short: false,
        check: memory_before_the_root,
    },
    Claim { name: "a_guest_without_virtio_mem_is_told", short: false, check: no_driver_is_told },
    Claim { name: "a_device_may_come_and_go_while_memory_grows", short: false, check: devices_come_and_go },
    Claim {
        name: "a_host_that_runs_out_of_memory_leaves_a_vm_that_says_so",
        short: false,
        check: host_memory_runs_out,
    },
];

/// Checks the claims that `chosen` picks, all of them, and tells of each; an error if one did not hold.
pub fn check(chosen: impl Fn(&Claim) -> bool) -> Result<()> {
    let mut failed = Vec::new();
    for claim in ALL.iter().filter(|c| chosen(c)) {
        let began = std::time::Instant::now();
        match (claim.check)() {
            Ok(()) => println!("claim {}: ok ({:.1} s)", claim.name, began.elapsed().as_secs_f64()),
            Err(error) => {
                println!("claim {}: FAILED: {error:#}", claim.name);
                failed.push(claim.name);
            }
        }
    }
    if !failed.is_empty() {
        bail!("{} of the claims did not hold: {}", failed.len(), failed.join(", "));
    }
    Ok(())
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let result =
        Command::new(program).args(arguments).output().with_context(|| format!("running {program}"))?;
    ensure!(
        result.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&result.stderr).trim()
    );
    Ok(())
}

fn find(host: &Host, what: impl Fn(&Device) -> bool) -> Result<Device> {
    host.devices()?.into_values().find(|d| what(d)).context("the lab lacks a device")
}

fn what_the_host_uses_is_refused() -> Result<()> {
    let host = Host::at("/");
    run("modprobe", &["-a", "nvme", "ext4", "e1000e"])?;
    // Without udev no program waits for the disk's node; the driver makes it after its first answer from the disk.
    let disk = find(&host, |d| d.class == 0x01_0802 && d.numa_node.is_none())?;
    let node = wait_for(|| block_of(&disk))?;
    run("mkfs.ext4", &["-q", "-F", &node])?;
    fs::create_dir_all("/mnt/claim")?;
    run("mount", &[&node, "/mnt/claim"])?;
    let refused = plan(&host.devices()?, host.has_iommu(), &[disk.address], true);
    run("umount", &["/mnt/claim"])?;
    match refused {
        Err(Refusal::InUse { what, .. }) => ensure!(what.contains("mounted on /mnt/claim"), "{what}"),
        other => bail!("a mounted disk was not refused: {other:?}"),
    }
    plan(&host.devices()?, host.has_iommu(), &[disk.address], true).context("after umount it is free")?;

    let card = find(&host, |d| d.class >> 8 == 0x0200 && d.group_members.len() == 1)?;
    let interface =
        wait_for(|| names(&format!("/sys/bus/pci/devices/{}/net", card.address)).into_iter().next())?;
    run("ip", &["addr", "add", "192.0.2.1/24", "dev", &interface])?;
    run("ip", &["link", "set", &interface, "up"])?;
    let refused = plan(&host.devices()?, host.has_iommu(), &[card.address], true);
    run("ip", &["link", "set", &interface, "down"])?;
    run("ip", &["addr", "flush", "dev", &interface])?;
    match refused {
        Err(Refusal::InUse { what, .. }) => ensure!(what.contains("routes go through"), "{what}"),
        other => bail!("a card with an address was not refused: {other:?}"),
    }
    let driver = find(&host, |d| d.address == card.address)?.driver;
    ensure!(driver.as_deref() == Some("e1000e"), "the card was touched: {driver:?}");
    Ok(())
}

fn names(folder: &str) -> Vec<String> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect()
}

/// The node of a disk's block device. A disk in an NVMe subsystem has a hidden path `nvme0c1n1`, and `nvme0n1` stands for all of them.
fn block_of(device: &Device) -> Option<String> {
    let own = fs::canonicalize(format!("/sys/bus/pci/devices/{}", device.address)).ok()?;
    names("/sys/class/block").into_iter().find_map(|name| {
        let real = fs::canonicalize(format!("/sys/class/block/{name}")).ok()?;
        let head = match name.split_once('c') {
            Some((subsystem, path)) => subsystem.to_owned() + &path[path.find('n')?..],
            None => name,
        };
        let node = format!("/dev/{head}");
        (real.starts_with(&own) && Path::new(&node).exists()).then_some(node)
    })
}

/// Waits for something that a driver makes on its own time.
fn wait_for<T>(look: impl Fn() -> Option<T>) -> Result<T> {
    for _ in 0..600 {
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    bail!("a driver did not come up with its device within 30 s")
}

fn a_group_goes_whole() -> Result<()> {
    let host = Host::at("/");
    let pair = find(&host, |d| d.class >> 8 == 0x0200 && d.group_members.len() == 2)?;
    let refused = plan(&host.devices()?, true, &[pair.address], false);
    ensure!(
        matches!(refused, Err(Refusal::GroupNotWhole { .. })),
        "half a group was not refused: {refused:?}"
    );
    let folder = tempfile::tempdir()?;
    let store = Store::at(folder.path());
    let whole = plan(&host.devices()?, true, &[pair.address], true)?;
    bind(&host, &mut binding::Kernel, &store, &whole, None)?;
    let drivers = |host: &Host| -> Result<Vec<Option<String>>> {
        let devices = host.devices()?;
        Ok(pair.group_members.iter().map(|a| devices[a].driver.clone()).collect())
    };
    let bound = drivers(&host)?;
    for address in &pair.group_members {
        binding::release(&host, &mut binding::Kernel, &store, *address)?;
    }
    ensure!(bound.iter().all(|d| d.as_deref() == Some("vfio-pci")), "bound: {bound:?}");
    let after = drivers(&host)?;
    ensure!(after.iter().all(|d| d.as_deref() == Some("e1000e")), "given back: {after:?}");
    Ok(())
}

/// A VM of 1.5 GiB, a third of it at start.
fn small() -> Result<Layout> {
    Ok(Wish { total: 1536 * MIB, boot: Some(512 * MIB), dma_entries: DEFAULT_DMA_ENTRIES }.layout()?)
}

fn folder_and_kernel() -> Result<(tempfile::TempDir, cache::Kernel)> {
    Ok((tempfile::tempdir()?, cache::kernel()?))
}

fn start(layout: Layout, device: Option<&Card>, image: Image) -> Result<Guest> {
    Guest::start(&Spec { layout, backing: Backing::Plain, device: device.map(|c| c.address), image })
}

/// The guest's own account of its memory reaches the layout's, less what its kernel keeps.
fn sees_all(guest: &mut Guest, layout: Layout) -> Result<()> {
    let all = layout.boot + layout.grown;
    for _ in 0..200 {
        let (_, line) = guest.await_line("TOMBOLO work")?;
        if memory_in(&line).is_some_and(|bytes| bytes > all / 100 * 92) {
            return Ok(());
        }
    }
    bail!("QEMU says the guest has everything but the guest does not see it");
}

fn a_vm_with_a_device_grows() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let card = Card::take()?;
    let layout = small()?;
    let mut guest = start(layout, Some(&card), Image::working(&kernel, folder.path())?)?;
    let (report, seen) = grow_to_full(&mut guest, layout, System::Tombolo)?;
    ensure!(report.restarts == 0, "{report:?}");
    let complete = seen.iter().filter(|p| p.phase == Phase::Complete).count();
    ensure!(
        complete == 1 && seen.last().is_some_and(|p| p.present == layout.boot + layout.grown),
        "not told as complete once"
    );
    sees_all(&mut guest, layout)?;
    ensure!(
        guest.at(Event::KernelLine) < guest.at(Event::FirstBlock),
        "memory was waited for before the first kernel line"
    );
    let mut marks = guest.marks.clone();
    marks.sort_by(|a, b| a.at.total_cmp(&b.at));
    print!("{}", render(&marks, 30));
    drop(guest);
    card.give_back()
}

fn a_killed_vm_gives_its_device_back() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let host = Host::at("/");
    let card = find(&host, |d| d.class >> 8 == 0x0200 && d.group_members.len() == 1)?;
    let mut process = std::process::Command::new("sleep").arg("3600").spawn()?;
    let store = Store::at(folder.path().join("records"));
    let owner = Owner::new("claim", process.id())?;
    bind(
        &host,
        &mut binding::Kernel,
        &store,
        &plan(&host.devices()?, true, &[card.address], false)?,
        Some(&owner),
    )?;
    let spec = Spec {
        layout: Layout::slow(256 * MIB),
        backing: Backing::Plain,
        device: Some(card.address),
        image: Image::without_driver(&kernel, folder.path())?,
    };
    let guest = Guest::start(&spec)?;
    let open = binding::release(&host, &mut binding::Kernel, &store, card.address);
    ensure!(
        matches!(open, Err(binding::BindError::Open(_))),
        "a device that is open in a VM was released: {open:?}"
    );
    // The guest is killed and its owner dies with it.
    drop(guest);
    ensure!(reclaim(&host, &mut binding::Kernel, &store)?.given.is_empty(), "taken from an owner that lives");
    process.kill()?;
    process.wait()?;
    ensure!(reclaim(&host, &mut binding::Kernel, &store)?.given == [card.address], "not given back");
    let driver = find(&host, |d| d.address == card.address)?.driver;
    ensure!(driver.as_deref() == Some("e1000e"), "it went to {driver:?}");
    Ok(())
}

fn packets_while_growing() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let card = Card::take()?;
    let layout = small()?;
    let mut guest = start(layout, Some(&card), Image::with_network(&kernel, folder.path())?)?;
    grow_to_full(&mut guest, layout, System::Tombolo)?;
    guest.await_line("TOMBOLO ping")?;
    Ok(())
}

fn a_reboot_is_grown_again() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let card = Card::take()?;
    let layout = small()?;
    let mut guest = start(layout, Some(&card), Image::working(&kernel, folder.path())?)?;
    let limits = Limits::read(Path::new("/"))?;
    let mut prepare = ProcessMemory::of(guest.pid(), layout.grown, None, Budget::default())?;
    let mut monitor = Midway::new(&mut guest.monitor, layout, "system_reset", json!({}));
    let report = grow(&mut monitor, MEMORY, layout, &mut prepare, &Options::for_host(&limits), &mut |_| {})?;
    ensure!(monitor.done() && report.restarts == 1, "{report:?}");
    sees_all(&mut guest, layout)
}

fn memory_before_the_root() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let layout = small()?;
    let mut guest = start(layout, None, Image::debian(&kernel, folder.path())?)?;
    let (report, _) = grow_to_full(&mut guest, layout, System::Tombolo)?;
    ensure!(report.restarts == 0, "{report:?}");
    guest.await_line("TOMBOLO memory goes online_kernel")?;
    Ok(())
}

fn no_driver_is_told() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let layout = small()?;
    let mut guest = start(layout, None, Image::without_driver(&kernel, folder.path())?)?;
    guest.await_line("TOMBOLO login")?;
    let limits = Limits::read(Path::new("/"))?;
    let mut prepare = ProcessMemory::of(guest.pid(), layout.grown, None, Budget::default())?;
    let options = Options { driver_timeout: std::time::Duration::from_secs(2), ..Options::for_host(&limits) };
    let result = grow(&mut guest.monitor, MEMORY, layout, &mut prepare, &options, &mut |_| {});
    ensure!(matches!(result, Err(GrowError::NoDriver { .. })), "{result:?}");
    Ok(())
}

fn devices_come_and_go() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let card = Card::take()?;
    let layout = small()?;
    let mut guest = start(layout, None, Image::working(&kernel, folder.path())?)?;
    guest.await_line("TOMBOLO work 1 ")?;
    let limits = Limits::read(Path::new("/"))?;
    let mut prepare = ProcessMemory::of(guest.pid(), layout.grown, None, Budget::default())?;
    let host = card.address.to_string();
    let device = json!({"driver": "vfio-pci", "id": "device0", "host": host, "bus": "port0", "rombar": 0});
    let mut monitor = Midway::new(&mut guest.monitor, layout, "device_add", device);
    let report = grow(&mut monitor, MEMORY, layout, &mut prepare, &Options::for_host(&limits), &mut |_| {})?;
    ensure!(monitor.done(), "the device was never plugged");
    ensure!(report.restarts == 0, "{report:?}");
    // The kernel counts what VFIO has pinned: all of the memory, whenever it came.
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid()))?;
    let pinned = status.lines().find_map(|l| l.strip_prefix("VmPin:").or_else(|| l.strip_prefix("VmLck:")));
    println!("pinned: {}", pinned.unwrap_or("?").trim());
    guest.monitor.execute("device_del", json!({"id": "device0"}))?;
    sees_all(&mut guest, layout)
}

/// A monitor that runs a command of its own, once, when the guest has a quarter of the memory.
struct Midway<'a> {
    inner: &'a mut dyn Monitor,
    at: u64,
    command: Option<(&'static str, serde_json::Value)>,
}

impl<'a> Midway<'a> {
    fn new(
        inner: &'a mut dyn Monitor,
        layout: Layout,
        command: &'static str,
        arguments: serde_json::Value,
    ) -> Self {
        Self { inner, at: layout.grown / 4, command: Some((command, arguments)) }
    }

    fn done(&self) -> bool {
        self.command.is_none()
    }
}

impl Monitor for Midway<'_> {
    fn execute(
        &mut self,
        command: &'static str,
        arguments: serde_json::Value,
    ) -> Result<serde_json::Value, tombolo_start::monitor::MonitorError> {
        let answer = self.inner.execute(command, arguments)?;
        if answer[0]["data"]["size"].as_u64().is_some_and(|size| size >= self.at) {
            if let Some((command, arguments)) = self.command.take() {
                self.inner.execute(command, arguments)?;
            }
        }
        Ok(answer)
    }

    fn wait(&mut self, longest: std::time::Duration) -> Result<(), tombolo_start::monitor::MonitorError> {
        self.inner.wait(longest)
    }
}

fn host_memory_runs_out() -> Result<()> {
    let (folder, kernel) = folder_and_kernel()?;
    let layout = small()?;
    let mut guest = start(layout, None, Image::working(&kernel, folder.path())?)?;
    let limits = Limits::read(Path::new("/"))?;
    let mut prepare = ProcessMemory::of(guest.pid(), layout.grown, None, Budget::default())?;
    // The host has 300 MiB to give beyond what the guest has taken.
    let memory = prepare.source.clone();
    let options = Options {
        memory_timeout: std::time::Duration::from_secs(2),
        reserve: 0,
        available: Box::new(move || {
            let taken = memory.allocated().unwrap_or(0);
            (300 * MIB).saturating_sub(taken)
        }),
        ..Options::for_host(&limits)
    };
    let mut last = None;
    let result =
        grow(&mut guest.monitor, MEMORY, layout, &mut prepare, &options, &mut |p| last = Some(p.clone()));
    ensure!(matches!(result, Err(GrowError::HostMemory { .. })), "{result:?}");
    ensure!(
        last.is_some_and(|p| matches!(p.phase, Phase::Failed(_)) && p.present < p.total),
        "it looks complete"
    );
    // The guest keeps the memory that it has, and goes on working.
    guest.await_line("TOMBOLO work")?;
    Ok(())
}
