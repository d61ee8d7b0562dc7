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
    /// The network outside, for frames to no VM; default: none.
    pub uplink: Option<Uplink>,
    /// With user-mode networking, VMs reach what listens on the host's loopback addresses.
    pub host_loopback: bool,
    /// Addresses of the VMs; default without uplink: 10.86.N.0/24, N-th network of the file.
    pub subnet: Option<Subnet>,
    /// Prefix of 64 bits for the VMs' IPv6 addresses, which their kernels make of it and their MACs.
    pub subnet6: Option<Prefix64>,
    /// The receivers of frames for a multicast group; default: `snoop`.
    pub multicast: Option<Multicast>,
    /// The VMs' way out of the subnet.
    pub gateway: Option<Ipv4Addr>,
    /// The switch gives VMs that ask for it their addresses.
    pub dhcp: bool,
    /// Largest IP packet of the VMs' devices; default: 1500.
    pub mtu: Option<u16>,
    /// Threads of the switch.
    pub workers: Option<usize>,
    /// Processors that they stay on, one each.
    pub cpus: Vec<usize>,
    /// Microseconds for which an idle worker goes on polling.
    pub poll_us: Option<u64>,
    /// Processor time that the switch may use, in hundredths of a processor.
    pub budget: Option<u32>,
    /// The address for Prometheus.
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
    /// Its MAC; default: one that depends on project, network and VM.
    pub mac: Option<Mac>,
    /// MACs that it may use beside its own: those of macvlans, bridges and nested VMs in its guest.
    pub macs: Vec<Mac>,
    /// The number of further MACs that it may use, each on one VLAN, once it has sent from them; default: 0.
    pub learn: u8,
    /// Its address; default: the next free one of the subnet.
    pub address: NicAddress,
    /// Queue pairs; default: 1.
    pub queues: Option<usize>,
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
