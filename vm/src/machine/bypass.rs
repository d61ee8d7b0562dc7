// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices of a trusted VM whose DMA goes past the IOMMU's translation: the VM's memory is pinned before its guest runs, and a thread answers
//! the guest's module until QEMU ends.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use anyhow::Context;
use serde_json::{Value, json};
use tombolo_passthrough::address::Address;
use tombolo_passthrough::bypass::memory::{self, Memory};
use tombolo_passthrough::bypass::service::{self, Devices};
use tombolo_passthrough::bypass::{self, Session};
use tombolo_passthrough::host::Host;
use tombolo_topology::request::Pages;

use super::Machine;
use crate::compose::VmSpec;

/// The id of a passed-through device in its QEMU.
#[must_use]
pub fn device_id(address: &str) -> String {
    format!("device-{}", address.replace(':', "-"))
}

/// Refuses a bypass that this host can't give. Nothing is changed.
///
/// # Errors
/// Names the device and the remedy.
pub fn check(name: &str, spec: &VmSpec, host: &Host) -> anyhow::Result<()> {
    let devices = host.devices()?;
    for address in spec.bypassed() {
        if let Some(device) = devices.get(&address) {
            bypass::check(host, device).with_context(|| format!("vm.{name}.devices"))?;
        }
    }
    Ok(())
}

/// A session that has no QEMU yet.
#[derive(Debug)]
pub(super) struct Prepared {
    session: Session,
    port: UnixStream,
}

/// The descriptors that QEMU gets of it: its side of the port, and the session, which ends after QEMU.
pub(super) struct ForQemu {
    pub(super) port: OwnedFd,
    pub(super) session: OwnedFd,
}

impl Prepared {
    /// Begins a session, if the VM has a device for it.
    pub(super) fn of(spec: &VmSpec) -> anyhow::Result<Option<(Prepared, ForQemu)>> {
        if spec.bypassed().is_empty() {
            return Ok(None);
        }
        let session = Session::open()?;
        for address in spec.bypassed() {
            session.add(address).with_context(|| format!("{address} can't be bypassed"))?;
        }
        let (port, qemus) = UnixStream::pair()?;
        let for_qemu = ForQemu { port: qemus.into(), session: session.share()? };
        Ok(Some((Prepared { session, port }, for_qemu)))
    }
}

/// A session with a QEMU. It is dropped after QEMU's end, and before its devices go back to the host: then the module has stopped them.
#[derive(Debug)]
pub(super) struct Bypass {
    thread: Option<JoinHandle<()>>,
    /// VFIO has stopped the devices when this ends, unless this process dies before QEMU.
    _session: Arc<Session>,
}

impl Drop for Bypass {
    fn drop(&mut self) {
        // It ends with the port, which ended with QEMU.
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            crate::say!("the thread that answers a VM's bypass panicked");
        }
    }
}

impl Bypass {
    /// Pins the VM's memory and begins to answer its guest, which does not run yet.
    ///
    /// # Errors
    /// The memory is not where a bypass needs it.
    pub(super) fn begin(machine: &Arc<Machine>, prepared: Prepared) -> anyhow::Result<Bypass> {
        let Prepared { session, port } = prepared;
        let page = match machine.spec.pages {
            Pages::Gigantic => 1 << 30,
            _ => 2 << 20,
        };
        let ranges = memory::ranges(&machine.monitor_says("info mtree -f".into())?);
        let ranges: Vec<_> = ranges
            .into_iter()
            .map(|range| {
                let said = machine.monitor_says(format!("gpa2hva {:#x}", range.first))?;
                anyhow::Ok((range, memory::host_address(&said)))
            })
            .collect::<Result<_, _>>()?;
        let memory = Memory::pin(&session, machine.pid, page, &ranges)?;
        machine.mark("memory pinned for bypass");
        let session = Arc::new(session);
        let mut devices = Switches {
            machine: Arc::downgrade(machine),
            session: session.clone(),
            devices: machine.spec.bypassed(),
        };
        let name = machine.name.clone();
        let serve = move || {
            let refused = |e: &anyhow::Error| crate::say!("the VM '{name}': bypass is refused: {e:#}");
            match service::serve(port, &memory, &mut devices, refused) {
                Err(e) if e.kind() != io::ErrorKind::ConnectionReset => {
                    crate::say!("the VM '{name}': no further device is bypassed: {e}");
                }
                _ => {}
            }
        };
        let thread = crate::thread::start(&format!("bypass-{}", machine.name), serve)?;
        Ok(Bypass { thread: Some(thread), _session: session })
    }
}

/// The VM's devices, by their place in the compose file.
struct Switches {
    machine: Weak<Machine>,
    session: Arc<Session>,
    devices: Vec<Address>,
}

impl Devices for Switches {
    fn functions(&mut self) -> anyhow::Result<Vec<u32>> {
        let machine = self.machine.upgrade().context("the VM has ended")?;
        let buses = machine.qmp()?.execute_value("query-pci", &json!({}))?;
        let function = |address: &Address| {
            let id = device_id(&address.to_string());
            function(&buses, &id)
                .with_context(|| format!("QEMU does not tell where {address} is in the guest"))
        };
        self.devices.iter().map(function).collect()
    }

    fn switch(&mut self, device: u32, on: bool) -> anyhow::Result<()> {
        let address = usize::try_from(device).ok().and_then(|number| self.devices.get(number));
        let address = *address.with_context(|| format!("the guest names the device {device}"))?;
        let switched = if on { self.session.on(address) } else { self.session.off(address) };
        switched.with_context(|| format!("{address} is not switched"))?;
        if let Some(machine) = self.machine.upgrade() {
            machine.mark(&format!("{address} {}", if on { "goes untranslated" } else { "is blocked" }));
        }
        Ok(())
    }
}

/// The guest's address of a device, by its id, from the monitor's answer to `query-pci`.
fn function(buses: &Value, id: &str) -> Option<u32> {
    fn of_devices(devices: &Value, id: &str) -> Option<u32> {
        devices.as_array()?.iter().find_map(|device| {
            if device["qdev_id"] == id {
                let number = |key: &str| u32::try_from(device[key].as_u64()?).ok();
                return Some(number("bus")? << 8 | number("slot")? << 3 | number("function")?);
            }
            of_devices(&device["pci_bridge"]["devices"], id)
        })
    }
    buses.as_array()?.iter().find_map(|bus| of_devices(&bus["devices"], id))
}

impl Machine {
    /// The answer of QEMU's monitor for people, which alone tells where memory is.
    fn monitor_says(&self, line: String) -> anyhow::Result<String> {
        let said =
            self.qmp()?.execute_value("human-monitor-command", &json!({ "command-line": line.clone() }))?;
        said.as_str().map(str::to_owned).with_context(|| format!("QEMU's monitor does not answer '{line}'"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_behind_its_bridges() {
        let buses = json!([
            { "bus": 0, "devices": [ { "bus": 0, "slot": 1, "function": 0, "qdev_id": "other" } ] },
            { "bus": 128, "devices": [ { "bus": 128, "slot": 0, "function": 0, "qdev_id": "root0.0", "pci_bridge": {
                "bus": {}, "devices": [ { "bus": 129, "slot": 2, "function": 1, "qdev_id": "device-0000-81-00.0" } ] } } ] },
        ]);
        assert_eq!(function(&buses, &device_id("0000:81:00.0")), Some(129 << 8 | 2 << 3 | 1));
        assert_eq!(function(&buses, "device-0000-82-00.0"), None);
    }
}
