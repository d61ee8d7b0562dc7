// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo passthrough …`.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use serde::Serialize;

use crate::address::Address;
use crate::bind::{Kernel, Reclaimed, Record, Store, bind, reclaim, release};
use crate::device::{Device, VFIO};
use crate::host::Host;
use crate::mappings::{self, Mappings};
use crate::plan::plan;

/// The commands of `tombolo passthrough`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Devices, their groups, what the host would lose with each, and the IOMMU's pages of those that VMs have
    #[command(visible_alias = "ls")]
    List {
        /// Bridges and devices without a group too
        #[arg(long)]
        all: bool,
    },
    /// Take devices from the host's drivers and hand them to vfio-pci
    Bind {
        /// PCI addresses, as `list` shows them
        #[arg(required = true)]
        devices: Vec<Address>,
        /// Take the other devices of each group along
        #[arg(long)]
        whole_group: bool,
        /// Say what would be done and do nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Give devices back to the drivers they came from
    Release {
        /// PCI addresses
        #[arg(required_unless_present_any = ["all", "orphans"])]
        devices: Vec<Address>,
        /// Every device that tombolo bound
        #[arg(long)]
        all: bool,
        /// Devices of VMs that died
        #[arg(long)]
        orphans: bool,
    },
}

/// Runs a command of `tombolo passthrough`.
pub fn run(command: Command, json: bool) -> Result<ExitCode> {
    let host = Host::at("/");
    let store = Store::of_host();
    match command {
        Command::List { all } => list(&host, &store, all, json),
        Command::Bind { devices, whole_group, dry_run } => {
            let plan = plan(&host.devices()?, host.has_iommu(), &devices, whole_group)?;
            if !dry_run {
                bind(&host, &mut Kernel, &store, &plan, None)?;
            }
            if json {
                println!("{}", serde_json::to_string(&plan)?);
            } else {
                let verb = if dry_run { "would go" } else { "went" };
                for (address, driver) in &plan.take {
                    println!(
                        "{address} {verb} from {} to vfio-pci",
                        driver.as_deref().unwrap_or("no driver")
                    );
                }
                for address in &plan.ready {
                    println!("{address} has vfio-pci already");
                }
            }
            for warning in &plan.warnings {
                let _ = writeln!(std::io::stderr(), "warning: {warning}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Release { devices, all, orphans } => {
            let Reclaimed { mut given, failures } = reclaim(&host, &mut Kernel, &store)?;
            if !orphans {
                let wanted =
                    if all { store.all()?.into_iter().map(|r| r.address).collect() } else { devices };
                for address in wanted.into_iter().filter(|a| !given.contains(a)).collect::<Vec<_>>() {
                    refuse_living_owner(&store.get(address)?)?;
                    release(&host, &mut Kernel, &store, address)?;
                    given.push(address);
                }
            }
            if json {
                println!("{}", serde_json::to_string(&given)?);
            } else {
                given.iter().for_each(|address| println!("{address} given back"));
            }
            let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
            ensure!(failures.is_empty(), "{}", failures.join("\n"));
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn refuse_living_owner(record: &Option<Record>) -> Result<()> {
    if let Some(Record { address, owner: Some(owner), .. }) = record {
        bail!("{address} belongs to the VM {}: `tombolo down` gives it back", owner.vm);
    }
    Ok(())
}

fn list(host: &Host, store: &Store, all: bool, json: bool) -> Result<ExitCode> {
    let devices = host.devices()?;
    let shown = || devices.values().filter(|d| all || (!d.is_bridge() && d.group.is_some()));
    if json {
        let listed = |device| Listed { device, mappings: of_vm(host, device) };
        println!("{}", serde_json::to_string(&shown().map(listed).collect::<Vec<_>>())?);
        return Ok(ExitCode::SUCCESS);
    }
    if !host.has_iommu() {
        let _ = writeln!(
            std::io::stderr(),
            "this host uses no IOMMU: nothing can be passed through (`tombolo passthrough bind` says how to turn it on)"
        );
    }
    println!(
        "{:<13}{:<10}{:<13}{:>5} {:>4}  {:<12} {:<10}WHAT WOULD BREAK",
        "ADDRESS", "ID", "KIND", "GROUP", "NODE", "DRIVER", "RESET"
    );
    for device in shown() {
        println!("{}", line(device, store.get(device.address)?.as_ref()));
        if let Some(mappings) = of_vm(host, device) {
            println!("{:<13}{mappings}", "");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A device in the output of `list --json`.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    device: &'a Device,
    /// Of a device that a VM has.
    mappings: Option<Mappings>,
}

/// The mappings of a device, if it is with vfio-pci and a VM has it.
fn of_vm(host: &Host, device: &Device) -> Option<Mappings> {
    device.driver.as_deref().filter(|driver| *driver == VFIO)?;
    mappings::of_device(host, device.address)
}

fn line(device: &Device, record: Option<&Record>) -> String {
    let number = |n: Option<u32>| n.map_or("-".into(), |n| n.to_string());
    let mut notes: Vec<String> = device.uses.iter().map(ToString::to_string).collect();
    let others: Vec<String> =
        device.group_members.iter().filter(|m| **m != device.address).map(ToString::to_string).collect();
    if !others.is_empty() {
        notes.push(format!("takes along {}", others.join(" ")));
    }
    if let Some(record) = record {
        let whose = record.owner.as_ref().map_or("by hand".to_owned(), |o| format!("for the VM {}", o.vm));
        notes.push(format!("taken from {} {whose}", record.driver.as_deref().unwrap_or("no driver")));
    }
    let reset = device.reset.first().map_or("none", String::as_str);
    format!(
        "{:<13}{:04x}:{:04x} {:<13}{:>5} {:>4}  {:<12} {:<10}{}",
        device.address.to_string(),
        device.ids.0,
        device.ids.1,
        device.kind(),
        number(device.group),
        number(device.numa_node),
        device.driver.as_deref().unwrap_or("-"),
        reset,
        if notes.is_empty() { "nothing".into() } else { notes.join("; ") }
    )
}
