// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of networks, and of VMs' devices in them.

use std::collections::BTreeMap;

use tombolo_control::net::config::{LEARN_MAX, QUEUES_MAX};

use super::leases::{leases, subnet};
use super::{NetSpec, NicAddress, NicSpec, Uplink};
use crate::compose::check::{Fault, bad_name};
use crate::compose::{Compose, Ready, VmSpec, nearest};

/// A wrong setting of one table: its key and the message.
type Wrong = (&'static str, String);

/// Checks all networks, VMs' devices in them, and that each VM can have its MAC and address.
pub(in crate::compose) fn check(compose: &Compose) -> Result<(), Fault> {
    let in_table = |table: String| move |(key, message): Wrong| (table, key.to_owned(), message);
    for (name, net) in &compose.net {
        check_network(compose, name, net).map_err(in_table(format!("net.{name}")))?;
    }
    for (name, vm) in &compose.vm {
        for (net, nic) in &vm.networks.0 {
            check_nic(compose, name, vm, (net, nic)).map_err(in_table(format!("vm.{name}")))?;
        }
    }
    for net in compose.net.keys() {
        let in_vm = |(vm, message)| (format!("vm.{vm}"), "networks".to_owned(), message);
        let leases = leases(compose, "", net, &BTreeMap::new()).map_err(in_vm)?;
        let unknown = leases.into_iter().find(|(vm, lease)| {
            compose.vm[vm].networks.0[net].check_address
                && lease.address.is_none()
                && lease.address6.is_none()
        });
        if let Some((vm, _)) = unknown {
            let message = format!(
                "vm.{vm}.networks.{net}.check_address: no address of the VM is known here that could be checked; give it one, or leave check_address out"
            );
            return Err(in_vm((vm, message)));
        }
    }
    Ok(())
}

fn check_network(compose: &Compose, name: &str, net: &NetSpec) -> Result<(), Wrong> {
    if let Some(message) = bad_name("a network", name) {
        return Err(("", message));
    }
    if let Some(Uplink::Tap(device) | Uplink::Interface(device)) = &net.uplink {
        if device.is_empty() || device.len() > 15 || device.contains(['/', ' ']) {
            let message = format!(
                "net.{name}.uplink: '{device}' can't name an interface; use 1 to 15 letters and digits"
            );
            return Err(("uplink", message));
        }
    }
    if net.host_loopback && net.uplink != Some(Uplink::User) {
        let message =
            format!("net.{name}.host_loopback belongs to user-mode networking; add uplink = \"user\"");
        return Err(("host_loopback", message));
    }
    let subnet = subnet(compose, name);
    if let (Some(gateway), Some(subnet)) = (net.gateway, subnet) {
        if !subnet.has(gateway) {
            let message = format!("net.{name}.gateway is {gateway}, which is not in {subnet}");
            return Err(("gateway", message));
        }
    }
    if net.dhcp && subnet.is_none() {
        let message =
            format!("net.{name}.dhcp: the addresses are those of a subnet; add subnet = \"10.0.0.0/24\"");
        return Err(("dhcp", message));
    }
    let ipv6_fits = net.mtu.is_none_or(|mtu| mtu >= 1280);
    if net.subnet6.is_some() && !ipv6_fits {
        return Err(("mtu", format!("net.{name}.mtu: IPv6 (subnet6) takes 1280 or more")));
    }
    if net.mtu.is_some_and(|mtu| !(68..=65_521).contains(&mtu)) {
        return Err(("mtu", format!("net.{name}.mtu: write 68 to 65521")));
    }
    if net.workers.is_some_and(|workers| workers == 0 || workers > 64) {
        return Err(("workers", format!("net.{name}.workers: write 1 to 64")));
    }
    Ok(())
}

/// Checks the device of the VM `name` in a network.
fn check_nic(
    compose: &Compose,
    name: &str,
    vm: &VmSpec,
    (net, nic): (&String, &NicSpec),
) -> Result<(), Wrong> {
    let fail = |message: String| Err(("networks", message));
    let Some(spec) = compose.net.get(net) else {
        let hint = match nearest(net, compose.net.keys().map(String::as_str)) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("add [net.{net}]"),
        };
        return fail(format!("vm.{name}.networks names the network '{net}', which is not declared; {hint}"));
    };
    if nic.queues.is_some_and(|queues| !(1..=QUEUES_MAX).contains(&queues)) {
        return fail(format!("vm.{name}.networks.{net}.queues: write 1 to {QUEUES_MAX}"));
    }
    if nic.learn > LEARN_MAX {
        return fail(format!("vm.{name}.networks.{net}.learn: write 0 to {LEARN_MAX}"));
    }
    if nic.vlan.is_some_and(|vlan| !(1..4095).contains(&vlan)) {
        return fail(format!("vm.{name}.networks.{net}.vlan: write 1 to 4094"));
    }
    if (spec.dhcp || spec.subnet6.is_some()) && nic.vlan.is_some() {
        let key = if spec.dhcp { "dhcp" } else { "subnet6" };
        return fail(format!(
            "vm.{name}.networks.{net}: the network gives addresses to VMs without a VLAN only; leave out vlan, or {key}"
        ));
    }
    check_address(compose, name, vm, (net, nic))
}

/// Checks the address that the file gives a device.
fn check_address(
    compose: &Compose,
    name: &str,
    vm: &VmSpec,
    (net, nic): (&String, &NicSpec),
) -> Result<(), Wrong> {
    let spec = &compose.net[net];
    if let (NicAddress::Static(ip), Some(subnet)) = (nic.address, subnet(compose, net)) {
        if !subnet.has(ip) {
            let message =
                format!("vm.{name}.networks.{net}.address is {ip}, which no VM can have in {subnet}");
            return Err(("networks", message));
        }
        if spec.dhcp && ip == spec.gateway.unwrap_or_else(|| subnet.first()) {
            let message = format!(
                "vm.{name}.networks.{net}.address is {ip}, by which the network's DHCP goes; choose another"
            );
            return Err(("networks", message));
        }
    }
    let set = matches!(nic.address, NicAddress::Static(_) | NicAddress::Dhcp);
    // A guest that asks by DHCP needs no agent, and cloud-init reads its address at the start.
    if set && !spec.dhcp && vm.cloud_init.is_none() && vm.ready != Ready::Agent {
        let message = format!(
            "vm.{name} has an address in '{net}', which is set through the guest agent: ready must be \"agent\""
        );
        return Err(("ready", message));
    }
    Ok(())
}
