// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Passed-through devices of a VM, and memory that arrives while it runs: what the compose file asks for is checked before anything
//! is touched, taken when the VM starts, and given back when its QEMU has ended.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tombolo_passthrough::address::Address;
use tombolo_passthrough::bind::{self, BindError, Kernel, Owner, Store};
use tombolo_passthrough::host::Host;
use tombolo_passthrough::plan::plan;
use tombolo_start::ahead::Budget;
use tombolo_start::check::Limits;
use tombolo_start::grow::{GrowError, Options, grow};
use tombolo_start::layout::{Layout, Wish};
use tombolo_start::monitor::{Monitor, MonitorError};
use tombolo_start::pace::Share;
use tombolo_start::prepare::ProcessMemory;

use crate::compose::VmSpec;
use crate::machine::orphans::GivenBack;
use crate::machine::{Machine, bypass};

/// The id of the memory that grows.
pub const MEMORY: &str = "vmem0";

/// `start =`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartKind {
    /// The faster of the two: fast with passed-through devices, whose memory is pinned at start, slow without.
    Auto,
    /// A small part of the memory at start, the rest while the VM runs.
    Fast,
    /// All of the memory before the first instruction.
    Slow,
}

/// Whether a VM has a part of its memory at the start, and the rest arrives while it runs.
pub fn is_fast(spec: &VmSpec) -> bool {
    match spec.start.unwrap_or(StartKind::Auto) {
        // Memory that is bound to nodes is there at the start.
        StartKind::Auto => !spec.devices.is_empty() && spec.topology.is_none(),
        StartKind::Fast => true,
        StartKind::Slow => false,
    }
}

/// The parts in which a VM's memory arrives.
///
/// # Errors
/// Names the key to change.
pub fn layout(name: &str, spec: &VmSpec) -> anyhow::Result<Layout> {
    if !is_fast(spec) {
        return Ok(Layout::slow(spec.memory.0));
    }
    let limits = limits()?;
    let wish =
        Wish { total: spec.memory.0, boot: spec.boot_memory.map(|b| b.0), dma_entries: limits.dma_entries };
    wish.layout().with_context(|| format!("vm.{name}.memory"))
}

/// Advice for a user who chose the slower way.
pub fn advice(spec: &VmSpec) -> Option<&'static str> {
    let needless = spec.start == Some(StartKind::Fast) && spec.devices.is_empty();
    needless.then_some("start = \"fast\" only pays with passed-through devices; \"auto\" chooses by itself")
}

fn limits() -> anyhow::Result<Limits> {
    Limits::read(std::path::Path::new("/")).context("reading the host's limits")
}

/// Gives back the devices of VMs that died with their supervisor.
pub fn give_back_orphans() -> GivenBack<Address> {
    let store = Store::of_host();
    if store.is_anothers() {
        return GivenBack::default();
    }
    match bind::reclaim(&Host::at("/"), &mut Kernel, &store) {
        Ok(reclaimed) => GivenBack {
            given: reclaimed.given,
            failures: reclaimed.failures.iter().map(ToString::to_string).collect(),
        },
        Err(e) => GivenBack { given: Vec::new(), failures: vec![e.to_string()] },
    }
}

/// Refuses devices and memory that can't be had.
///
/// # Errors
/// Says which device and why. Nothing has been touched.
pub fn check(name: &str, spec: &VmSpec) -> anyhow::Result<()> {
    let layout = layout(name, spec)?;
    if spec.devices.is_empty() {
        return Ok(());
    }
    let host = Host::at("/");
    plan(&host.devices()?, host.has_iommu(), &spec.addresses(), spec.whole_group)
        .with_context(|| format!("vm.{name}.devices"))?;
    bypass::check(name, spec, &host)?;
    allow(name, spec, &layout)
}

/// Refuses a layout that the host's limits don't allow.
///
/// # Errors
/// Says which limit and how to raise it.
pub fn allow(name: &str, spec: &VmSpec, layout: &Layout) -> anyhow::Result<()> {
    limits()?.allow(layout, !spec.devices.is_empty()).with_context(|| format!("vm.{name}.memory"))
}

/// Devices that are a VM's; dropping this gives them back.
#[derive(Debug, Default)]
pub struct Taken {
    devices: Vec<Address>,
}

impl Taken {
    /// Hands the VM's devices to vfio-pci; they are the VM's as long as the process `owner` lives.
    ///
    /// # Errors
    /// When one can't be had; then none was taken.
    pub fn take(name: &str, spec: &VmSpec, owner: u32) -> anyhow::Result<Taken> {
        if spec.devices.is_empty() {
            return Ok(Taken { devices: Vec::new() });
        }
        let host = Host::at("/");
        let plan = plan(&host.devices()?, host.has_iommu(), &spec.addresses(), spec.whole_group)
            .with_context(|| format!("vm.{name}.devices"))?;
        let owner = Owner::new(name, owner)?;
        let devices = bind::bind(&host, &mut Kernel, &Store::of_host(), &plan, Some(&owner))?;
        Ok(Taken { devices })
    }
}

impl Taken {
    /// Their addresses.
    pub fn addresses(&self) -> &[Address] {
        &self.devices
    }

    /// Devices that an earlier supervisor has taken for a VM that runs on.
    pub fn take_over(devices: Vec<Address>) -> Taken {
        Taken { devices }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for address in &self.devices {
            match bind::give_back(&Host::at("/"), &mut Kernel, &Store::of_host(), *address) {
                Ok(()) | Err(BindError::NotOurs(_)) => {}
                // It is an orphan now, which the next command gives back, 'down' among them.
                Err(e) => crate::say!("{e}"),
            }
        }
    }
}

/// Grows the VM's memory in a thread of its own until it is complete or can't be; the machine keeps the progress.
///
/// A guest without a driver for such memory is for `start_slowly`.
///
/// # Errors
/// When the thread can't be had, or QEMU's memory can't be found.
pub fn begin(
    machine: &Arc<Machine>,
    start_slowly: impl FnOnce(&Arc<Machine>) + Send + 'static,
) -> anyhow::Result<()> {
    let layout = machine.layout();
    if layout.grown == 0 {
        return Ok(());
    }
    let mut prepare = ProcessMemory::of(machine.pid(), layout.grown, None, Budget::default())?;
    let driver_timeout = Duration::from_secs(machine.spec().ready_timeout.into());
    let share = machine.spec().growth_share.unwrap_or(Share::ALL);
    let options = Options { driver_timeout, share, ..Options::for_host(&limits()?) };
    let machine = machine.clone();
    crate::thread::start(&format!("grow-{}", machine.name()), move || {
        let mut first = true;
        let mut monitor = Through(&machine);
        let result = grow(&mut monitor, MEMORY, layout, &mut prepare, &options, &mut |progress| {
            if first && progress.present > layout.boot {
                first = false;
                machine.mark("first grown block");
            }
            machine.set_growth(progress.clone());
        });
        match result {
            Ok(_) => machine.mark("full memory"),
            // A VM that ended grows no more; that is told elsewhere.
            Err(_) if machine.has_ended() => {}
            Err(e) => {
                crate::say!("the VM '{}': {e}", machine.name());
                if matches!(e, GrowError::NoDriver { .. }) {
                    start_slowly(&machine);
                }
            }
        }
        machine.set_grown();
    })?;
    Ok(())
}

/// A machine's monitor as growing needs it.
struct Through<'a>(&'a Machine);

impl Monitor for Through<'_> {
    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError> {
        let monitor = self.0.qmp().map_err(|e| MonitorError::Transport(e.to_string()))?;
        Ok(monitor.execute_value(command, &arguments)?)
    }

    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError> {
        if self.0.wait_end(longest) { Err(MonitorError::Gone) } else { Ok(()) }
    }

    fn ready_for(&self) -> Option<Duration> {
        self.0.up_for()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VmSpec {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn fast_is_the_default_with_a_device_and_slow_without() {
        assert_eq!(layout("a", &spec("memory = \"4G\"")).unwrap().grown, 0);
        let device = spec("memory = \"4G\"\ndevices = [\"01:00.0\"]");
        assert_eq!(layout("a", &device).unwrap().boot, 512 << 20);
        let slow = spec("memory = \"4G\"\ndevices = [\"01:00.0\"]\nstart = \"slow\"");
        assert_eq!(layout("a", &slow).unwrap().grown, 0);
        let fast = spec("memory = \"4G\"\nstart = \"fast\"\nboot_memory = \"1G\"");
        assert_eq!(layout("a", &fast).unwrap().boot, 1 << 30);
        assert!(advice(&fast).is_some() && advice(&device).is_none());
        assert_eq!(layout("a", &spec("memory = \"4G\"\nstart = \"auto\"")).unwrap().grown, 0);
    }

    #[test]
    fn what_is_wrong_names_the_key() {
        let wrong = spec("memory = \"1G\"\nstart = \"fast\"\nboot_memory = \"2G\"");
        assert!(format!("{:#}", layout("a", &wrong).unwrap_err()).starts_with("vm.a.memory: boot memory"));
        let none = toml::from_str::<VmSpec>("memory = \"1G\"\ngrowth_share = 0").unwrap_err();
        assert!(none.to_string().contains("growth_share") && none.to_string().contains("from 1"), "{none}");
        let absent = spec("memory = \"1G\"\ndevices = [\"ffff:ff:1f.7\"]");
        let error = format!("{:#}", check("a", &absent).unwrap_err());
        assert!(error.starts_with("vm.a.devices: ") && error.contains("ffff:ff:1f.7"), "{error}");
    }
}
