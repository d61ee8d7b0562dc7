// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The MACs and addresses of a network's VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::{Mac, NetSpec, NicAddress, NicSpec, Subnet, Uplink};
use crate::compose::Compose;
use crate::project::state::hash;

/// The addresses of one VM in one network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub mac: Mac,
    /// Its address and the subnet's prefix length.
    pub address: Option<(Ipv4Addr, u8)>,
    /// The IPv6 address that its kernel makes.
    pub address6: Option<Ipv6Addr>,
    /// The guest asks for an address by itself.
    pub dhcp: bool,
}

/// The subnet of a network, said or by convention.
#[must_use]
pub fn subnet(compose: &Compose, net: &str) -> Option<Subnet> {
    let spec = compose.net.get(net)?;
    if spec.subnet.is_some() || spec.uplink.is_some() {
        return spec.subnet;
    }
    let n = compose.net.keys().position(|k| k == net).and_then(|n| u8::try_from(n).ok())?;
    Some(Subnet { base: Ipv4Addr::new(10, 86, n, 0), prefix: 24 })
}

/// Writes down the subnets that networks have by convention. A network that runs keeps the one that it has (`held`), whichever networks the
/// file has gained or lost since; a new one gets the first that is free.
pub fn settle(compose: &mut Compose, held: &BTreeMap<String, Subnet>) {
    let said = compose.net.values().filter_map(|spec| spec.subnet);
    let mut taken: BTreeSet<Ipv4Addr> =
        said.chain(held.values().copied()).map(|subnet| subnet.base).collect();
    let names: Vec<String> = compose.net.keys().cloned().collect();
    for name in names {
        let Some(own) = subnet(compose, &name) else { continue };
        let Some(spec) = compose.net.get_mut(&name).filter(|spec| spec.subnet.is_none()) else { continue };
        let conventional = || (0..=u8::MAX).map(|n| Subnet { base: Ipv4Addr::new(10, 86, n, 0), prefix: 24 });
        let chosen = held.get(&name).copied().unwrap_or_else(|| {
            let free =
                std::iter::once(own).chain(conventional()).find(|subnet| !taken.contains(&subnet.base));
            free.unwrap_or(own)
        });
        taken.insert(chosen.base);
        spec.subnet = Some(chosen);
    }
}

/// The leases of a network's VMs; `held` are those in use, which VMs keep.
///
/// # Errors
/// A MAC or an address is given twice, or the subnet is full. The first part names the VM.
pub fn leases(
    compose: &Compose,
    project: &str,
    net: &str,
    held: &BTreeMap<String, Lease>,
) -> Result<BTreeMap<String, Lease>, (String, String)> {
    let Some(spec) = compose.net.get(net) else { return Ok(BTreeMap::new()) };
    let nics: Vec<_> =
        compose.vm.iter().filter_map(|(name, vm)| Some((name.as_str(), vm.networks.0.get(net)?))).collect();
    let subnet = subnet(compose, net);
    let mut addresses = Addresses::new(net, spec, subnet, &nics, held)?;
    let mut macs: BTreeMap<Mac, &str> = BTreeMap::new();
    let mut leases = BTreeMap::new();
    for (name, nic) in nics {
        // A VM whose MAC the file has changed gets a new lease.
        let old = held.get(name).filter(|lease| nic.mac.is_none_or(|mac| mac == lease.mac));
        let mac = nic.mac.or(old.map(|lease| lease.mac)).unwrap_or_else(|| generated_mac(project, net, name));
        for mac in nic.macs.iter().copied().chain([mac]) {
            if let Some(other) = macs.insert(mac, name) {
                return Err(taken_twice(name, other, &format!("MAC {mac}"), net, "another with mac or macs"));
            }
        }
        let address = addresses.of(name, nic, old)?;
        let dhcp = nic.address == NicAddress::Dhcp
            || nic.address == NicAddress::Auto && address.is_none() && spec.uplink == Some(Uplink::User);
        let address6 = spec.subnet6.map(|prefix| prefix.of(mac));
        leases.insert(name.to_owned(), Lease { mac, address, address6, dhcp });
    }
    Ok(leases)
}

/// A locally administered MAC, made from the names of project, network and VM.
fn generated_mac(project: &str, net: &str, vm: &str) -> Mac {
    let h = hash(format!("{project}\n{net}\n{vm}").as_bytes()).to_le_bytes();
    Mac([0x52, 0x54, 0, h[0], h[1], h[2]])
}

fn taken_twice(vm: &str, other: &str, what: &str, net: &str, remedy: &str) -> (String, String) {
    let message =
        format!("vm.{vm} and vm.{other} both have the {what} in '{net}'; give one of them {remedy}");
    (vm.to_owned(), message)
}

/// The IPv4 addresses of one network.
struct Addresses<'a> {
    net: &'a str,
    spec: &'a NetSpec,
    subnet: Option<Subnet>,
    /// Those that no further VM may get.
    used: BTreeSet<Ipv4Addr>,
}

impl<'a> Addresses<'a> {
    /// # Errors
    /// Two VMs have the same address in the file.
    fn new(
        net: &'a str,
        spec: &'a NetSpec,
        subnet: Option<Subnet>,
        nics: &[(&str, &NicSpec)],
        held: &BTreeMap<String, Lease>,
    ) -> Result<Addresses<'a>, (String, String)> {
        let mut declared: BTreeMap<Ipv4Addr, &str> = BTreeMap::new();
        for (name, nic) in nics {
            let NicAddress::Static(ip) = nic.address else { continue };
            if let Some(other) = declared.insert(ip, name) {
                return Err(taken_twice(name, other, &format!("address {ip}"), net, "another"));
            }
        }
        let gateway = subnet.map(|s| spec.gateway.unwrap_or_else(|| s.first()));
        let mut used: BTreeSet<Ipv4Addr> = declared.keys().copied().chain(gateway).collect();
        used.extend(held.values().filter_map(|lease| lease.address).map(|(ip, _)| ip));
        Ok(Addresses { net, spec, subnet, used })
    }

    /// The address of a VM and the prefix length: the file's, the one of its `old` lease, or the next free one.
    ///
    /// # Errors
    /// No address of the subnet is free.
    fn of(
        &mut self,
        vm: &str,
        nic: &NicSpec,
        old: Option<&Lease>,
    ) -> Result<Option<(Ipv4Addr, u8)>, (String, String)> {
        let from_subnet = match nic.address {
            NicAddress::Static(ip) => return Ok(Some((ip, self.subnet.map_or(24, |s| s.prefix)))),
            NicAddress::Auto => true,
            NicAddress::Dhcp => self.spec.dhcp,
            NicAddress::None => false,
        };
        let Some(subnet) = self.subnet.filter(|_| from_subnet) else { return Ok(None) };
        if let Some(address) = old.and_then(|lease| lease.address) {
            return Ok(Some(address));
        }
        let Some(free) = subnet.hosts().find(|ip| !self.used.contains(ip)) else {
            let message = format!(
                "the subnet {subnet} of '{}' has no address left for vm.{vm}; make it larger",
                self.net
            );
            return Err((vm.to_owned(), message));
        };
        self.used.insert(free);
        Ok(Some((free, subnet.prefix)))
    }
}
