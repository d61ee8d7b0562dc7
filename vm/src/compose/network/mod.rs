// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks as the compose file declares them.
//!
//! - [`leases`]: the MACs and addresses of VMs.
//! - `subnet`: subnets and prefixes; `check`: what the file may not say.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

mod check;
pub mod leases;
mod subnet;

pub(super) use check::check;
pub use leases::{Lease, leases, settle};
pub use subnet::{Prefix64, Subnet};
pub use tombolo_control::Mac;

/// `[net.NAME]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetSpec {
    /// Where frames go that are for no VM; default: nowhere.
    pub uplink: Option<Uplink>,
    /// Addresses of the VMs; default without uplink: 10.86.N.0/24, N-th network of the file.
    pub subnet: Option<Subnet>,
    /// Prefix of 64 bits for the VMs' IPv6 addresses, which their kernels make of it and their MACs.
    pub subnet6: Option<Prefix64>,
    /// Where frames for a multicast group go; default: `snoop`.
    pub multicast: Option<Multicast>,
    /// The VMs' way out of the subnet.
    pub gateway: Option<Ipv4Addr>,
    /// The switch gives VMs that ask for it their addresses.
    pub dhcp: bool,
    /// Largest IP packet of the VMs' devices; default: 1500.
    pub mtu: Option<u16>,
    /// Threads of the switch.
    pub workers: Option<u32>,
    /// Processors that they stay on, one each.
    pub cpus: Vec<u32>,
    /// Microseconds for which an idle worker goes on polling.
    pub poll_us: Option<u64>,
    /// Processor time that the switch may use, in hundredths of a processor.
    pub budget: Option<u32>,
    /// Where Prometheus finds the counters.
    pub metrics: Option<tombolo_metrics::Place>,
}

/// `multicast =`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multicast {
    /// To VMs that have joined it, where a multicast router asks which those are; elsewhere to all.
    Snoop,
    /// To VMs that have joined it; the switch asks.
    Query,
    /// To all.
    Flood,
}

/// `uplink =`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uplink {
    /// User-mode networking: passt is started for it, no privilege is needed.
    User,
    /// A TAP device, made if there is none.
    Tap(String),
    /// An interface of the host.
    Interface(String),
}

impl fmt::Display for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uplink::User => f.write_str("user"),
            Uplink::Tap(name) => write!(f, "tap {name}"),
            Uplink::Interface(name) => write!(f, "interface {name}"),
        }
    }
}

/// A VM's device in a network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NicSpec {
    /// Its MAC; default: one that depends on project, network and VM.
    pub mac: Option<Mac>,
    /// Its address; default: the next free one of the subnet.
    pub address: NicAddress,
    /// Queue pairs; default: 1.
    pub queues: Option<u32>,
    /// Reaches only the uplink.
    pub isolated: bool,
    pub vlan: Option<u16>,
    /// Drop what it sends from addresses other than its own.
    pub check_address: bool,
    /// It may be a router, a DHCP server or a multicast querier for the others.
    pub router: bool,
}

/// `address =`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NicAddress {
    /// The next free one of the subnet, where there is one.
    #[default]
    Auto,
    /// Whatever the guest does by itself.
    None,
    /// By DHCP, in a guest of the guest kit.
    Dhcp,
    Static(Ipv4Addr),
}

impl Serialize for NicAddress {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            NicAddress::Auto => s.serialize_str("auto"),
            NicAddress::None => s.serialize_str("none"),
            NicAddress::Dhcp => s.serialize_str("dhcp"),
            NicAddress::Static(ip) => s.collect_str(ip),
        }
    }
}

impl<'de> Deserialize<'de> for NicAddress {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match String::deserialize(d)?.as_str() {
            "auto" => Ok(NicAddress::Auto),
            "none" => Ok(NicAddress::None),
            "dhcp" => Ok(NicAddress::Dhcp),
            other => other.parse().map(NicAddress::Static).map_err(|_| {
                de::Error::custom(format!(
                    "'{other}' is no address; write \"auto\", \"none\", \"dhcp\", or an IPv4 address"
                ))
            }),
        }
    }
}

/// The devices of one VM, by network: written as a table, or as a list of names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Nics(
    /// By network.
    pub BTreeMap<String, NicSpec>,
);

impl<'de> Deserialize<'de> for Nics {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        crate::compose::named::deserialize(d, "network", "lan = { address = \"10.0.0.5\" }").map(Nics)
    }
}

/// What the file says of a VM's port, as the switch's configuration has it; `dhcp`: the switch gives it its address.
#[must_use]
pub fn port(
    vm: &str,
    socket: &std::path::Path,
    nic: &NicSpec,
    lease: &Lease,
    dhcp: bool,
) -> serde_json::Value {
    let mut port = serde_json::json!({
        "name": vm, "socket": socket, "macs": [lease.mac], "queues": nic.queues.unwrap_or(1), "isolated": nic.isolated,
    });
    if let Some(vlan) = nic.vlan {
        port["vlan"] = serde_json::json!({ "access": vlan });
    }
    if nic.check_address {
        let four = lease.address.map(|(ip, _)| IpAddr::V4(ip));
        let own: Vec<_> = four.into_iter().chain(lease.address6.map(IpAddr::V6)).collect();
        if !own.is_empty() {
            port["ips"] = serde_json::json!(own);
        }
    }
    if nic.router {
        port["router"] = true.into();
    }
    if let (true, Some((ip, _))) = (dhcp, lease.address) {
        port["address"] = serde_json::json!(ip);
    }
    port
}

/// The switch's DHCP service, as its configuration has it, for a network whose subnet is settled. It goes by the router's address, or by the
/// subnet's first, which no VM has.
#[must_use]
pub fn service(net: &str, spec: &NetSpec) -> Option<serde_json::Value> {
    let subnet = spec.subnet.filter(|_| spec.dhcp)?;
    let own = spec.gateway.unwrap_or_else(|| subnet.first());
    let mut service = serde_json::json!({ "address": format!("{own}/{}", subnet.prefix), "domain": net });
    if let Some(gateway) = spec.gateway {
        service["router"] = serde_json::json!(gateway);
    }
    Some(service)
}

#[cfg(test)]
mod tests;
