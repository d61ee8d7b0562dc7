// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The answer to `tombolo ps`.

use super::Supervisor;
use crate::child::halted;
use crate::compose::{Backing, ZoneSpec};
use crate::project::control::{NetStatus, PortStatus, Status, ZoneStatus};
use crate::project::network::Network;
use crate::project::zones::HostZone;
use crate::thread;

impl Supervisor {
    /// The state of the project. Waits for no process that does not answer.
    pub(super) fn status(&self) -> Status {
        let accelerators: Vec<_> = self.lock().accelerators.values().cloned().collect();
        // Each has a moment to answer. They are asked at once, so all together have no more.
        let asked = thread::all("status", accelerators.iter().map(|accelerator| || accelerator.status()));
        let accelerators = asked.into_iter().flatten().collect();
        let inner = self.lock();
        Status {
            services: inner.services(),
            networks: inner.networks.iter().map(|(name, network)| network_status(name, network)).collect(),
            accelerators,
            project: inner.project.name.clone(),
            file: inner.project.file.clone(),
            supervisor: Some(std::process::id()),
            hypervisor: inner.hypervisor.clone(),
            vms: inner.machines.values().map(|machine| machine.status()).collect(),
            zones: inner.zones.iter().map(|(name, zone)| self.zone_status(name, zone)).collect(),
        }
    }

    fn zone_status(&self, name: &str, zone: &HostZone) -> ZoneStatus {
        ZoneStatus {
            name: name.to_owned(),
            size: zone.spec().size.0,
            backing: backing(zone.spec()),
            members: zone.members(),
            lost: zone.is_lost(),
            uuid: zone.uuid(),
            path: zone.path(),
            link: self.dir.zone_link(name),
        }
    }
}

fn backing(spec: &ZoneSpec) -> String {
    match &spec.backing {
        Backing::Memfd => "memfd".into(),
        Backing::Hugetlb => "hugetlb".into(),
        Backing::File(path) => path.display().to_string(),
    }
}

fn network_status(name: &str, network: &Network) -> NetStatus {
    let (pid, starts) = network.process();
    let ports = network.leases().into_iter().map(|(vm, lease)| PortStatus {
        vm,
        mac: lease.mac.to_string(),
        address: lease.address.map(|(ip, prefix)| format!("{ip}/{prefix}")),
        address6: lease.address6.map(|ip| ip.to_string()),
        up: None,
        uplink_up: None,
    });
    NetStatus {
        name: name.to_owned(),
        uplink: network.spec().uplink.as_ref().map(ToString::to_string),
        uplink_up: None,
        subnet: network.spec().subnet.map(|s| s.to_string()),
        pid,
        starts,
        trouble: pid.and_then(halted::sentence),
        control: network.control(),
        ports: ports.collect(),
    }
}
