// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memberships of VMs in zones: zones that come to a running VM, and the end of memberships.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use super::{Reporter, Supervisor};
use crate::compose::{Rights, ZoneUse};
use crate::guest::mount::{self, Source};
use crate::machine::{Machine, hotplug};
use crate::project::control::Event;
use crate::project::zones::HostZone;

/// Time for a guest to unmount a zone that it leaves.
const UNMOUNT: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Ends a VM's memberships in `zones` and in the zones of its accelerators.
    pub(super) fn leave_zones<'a>(&self, vm: &str, zones: impl Iterator<Item = &'a String>) {
        let accelerators: Vec<_> = self.lock().accelerators.values().cloned().collect();
        for accelerator in accelerators {
            accelerator.gone(vm);
        }
        for name in zones {
            self.leave_zone(vm, name);
        }
    }

    /// Ends a VM's membership in a zone of the compose file.
    pub(super) fn leave_zone(&self, vm: &str, name: &str) {
        let zone = self.lock().zones.get(name).cloned();
        if let Some(zone) = zone {
            zone.gone(vm);
        }
    }

    /// Makes a running VM a member of a zone, and mounts the zone there if `mount` says so.
    pub(super) fn attach(
        &self,
        zone_name: &str,
        vm: &str,
        rights: Rights,
        mount: Option<&str>,
        client: &UnixStream,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.turn(client, reporter)?;
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if machine.zones().contains_key(zone_name) {
            anyhow::bail!("the VM '{vm}' is a member of the zone '{zone_name}' already");
        }
        let zone_use = ZoneUse { mount: mount.map(str::to_owned), rights, ..ZoneUse::default() };
        let invitation = zone.invite(vm, &zone_use)?;
        let attached = machine.attach_zone(zone_name, &zone_use, &invitation);
        // Its next QEMU waits for this turn.
        if matches!(attached, Err(hotplug::Failure::Undone(_))) || machine.has_ended() {
            zone.gone(vm);
        }
        attached?;
        mount_zone(&machine, zone_name, &zone, &zone_use).with_context(|| {
            format!("the VM '{vm}' is a member of the zone '{zone_name}' now, but has not mounted it")
        })?;
        reporter
            .send(&Event::Note { text: format!("the VM '{vm}' is a member of the zone '{zone_name}' now") });
        Ok(())
    }

    /// Unmounts a zone in a running VM and ends the membership.
    pub(super) fn detach(
        &self,
        zone_name: &str,
        vm: &str,
        client: &UnixStream,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.turn(client, reporter)?;
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if !machine.zones().contains_key(zone_name) {
            anyhow::bail!("the VM '{vm}' is no member of the zone '{zone_name}'");
        }
        mount::unmount(machine.agent(), vm, &[zone.uuid()], UNMOUNT)?;
        zone.gone(vm);
        machine.forget_zone(zone_name);
        reporter.send(&Event::Note {
            text: format!(
                "the VM '{vm}' has left the zone '{zone_name}'. Its memory device stays in the VM until that is stopped, or attached again: stock QEMU can't unplug virtio-pmem"
            ),
        });
        Ok(())
    }

    pub(super) fn zone(&self, name: &str) -> anyhow::Result<Arc<HostZone>> {
        let inner = self.lock();
        let Some(zone) = inner.zones.get(name) else {
            let hint = crate::compose::nearest(name, inner.zones.keys().map(String::as_str));
            let hint = hint.map_or("declare it in the compose file and run 'tombolo up'".into(), |n| {
                format!("did you mean '{n}'?")
            });
            anyhow::bail!("the project '{}' has no zone '{name}'; {hint}", inner.project.name);
        };
        Ok(zone.clone())
    }
}

/// Mounts a zone's file system in a VM, if `zone_use` says so.
pub(super) fn mount_zone(
    machine: &Machine,
    name: &str,
    zone: &HostZone,
    zone_use: &ZoneUse,
) -> anyhow::Result<()> {
    let Some(path) = &zone_use.mount else { return Ok(()) };
    let vm = machine.name();
    let member = zone.slot(vm).with_context(|| format!("the VM '{vm}' is no member of the zone any more"))?;
    let source = Source { uuid: zone.uuid(), member };
    mount::mount(machine, name, &source, path, zone_use.rights == Rights::ReadOnly, &zone_use.options)
}
