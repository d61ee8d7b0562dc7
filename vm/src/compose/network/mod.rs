// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks as the compose file declares them.
//!
//! - `leases`: the MACs and addresses of VMs.
//! - `subnet`: IPv4 subnets; `check`: refuses what a switch can't do.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

mod check;
pub mod leases;
mod subnet;

pub(super) use check::check;
pub use leases::{Lease, leases, settle};
pub use subnet::Subnet;
pub use tombolo_control::Mac;
pub use tombolo_control::net::address::Prefix64;
pub use tombolo_control::net::config::Multicast;

/// `[net.NAME]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetSpec {
    /// `none`: Where frames go that are for no VM: "user" (a passt for each VM, which reaches no other VM here), { tap = "tap0" } or { interface = "eth1" }.
    /// The device must exist.
    pub uplink: Option<Uplink>,
    /// `false`: With uplink = "user": VMs reach what listens on the host's 127.0.0.1 and ::1, at their gateway's address.
    pub host_loopback: bool,
    /// `"10.86.N.0/24"`: Addresses of the VMs. Default without uplink: by the network's place in the file, kept while the network runs.
    pub subnet: Option<Subnet>,
    /// `none`: A prefix such as "fd00:86::/64": the switch advertises it, and VMs make their IPv6 addresses of it and their MACs.
    pub subnet6: Option<Prefix64>,
    /// `"snoop"`: Where frames for a multicast group go: "snoop": to VMs that have joined it, where a multicast router asks for them, elsewhere to all;
    /// "query": to VMs that have joined it, for which the switch asks; "flood": to all.
    pub multicast: Option<Multicast>,
    /// `none`: The VMs' way out of the subnet.
    pub gateway: Option<Ipv4Addr>,
    /// `false`: The switch gives VMs that ask for it their addresses; they need no agent then.
    pub dhcp: bool,
    /// `1500`: Largest IP packet.
    pub mtu: Option<u16>,
    /// `1`: Threads of the switch.
    pub workers: Option<usize>,
    /// `[]`: Processors that the threads stay on, one each. Default: where VMs say topology, the reserved processors of their nodes.
    pub cpus: Vec<usize>,
    /// `50`: Microseconds for which an idle thread goes on polling.
    pub poll_us: Option<u64>,
    /// `none`: Processor time that the switch may use, in hundredths of a processor.
    pub budget: Option<u32>,
    /// `none`: Where Prometheus finds the counters: an address with a port, or the path of a Unix socket.
    pub metrics: Option<tombolo_metrics::Place>,
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
    /// `made of project, network and VM`: Its MAC.
    pub mac: Option<Mac>,
    /// `[]`: MACs that it may use beside its own: those of macvlans, bridges and nested VMs in its guest.
    pub macs: Vec<Mac>,
    /// `0`: Further MACs that it may use, each on one VLAN, without their being listed: it gets their frames once it has sent from them. 0 to 64.
    pub learn: u8,
    /// `"auto"`: "auto": the next free one of the subnet; "none"; "dhcp"; or an IPv4 address.
    pub address: NicAddress,
    /// `1`: Queue pairs, 1 to 16.
    pub queues: Option<usize>,
    /// `false`: It reaches only the uplink.
    pub isolated: bool,
    /// `none`: The VLAN that it is in, 1 to 4094.
    pub vlan: Option<u16>,
    /// `false`: Drop what it sends from addresses other than its own.
    pub check_address: bool,
    /// `false`: It may be a router, a DHCP server or a multicast querier for the others.
    pub router: bool,
}

/// `address =`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NicAddress {
    /// The next free one of the subnet, where there is one.
    #[default]
    Auto,
    /// The guest sets its address itself.
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

#[cfg(test)]
mod tests;
