// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A port's policy: its addresses, VLANs, rates and neighbours, from the configuration.

use std::net::IpAddr;

use crate::frames::frame::Mac;
use crate::policy::limit::Rate;
use crate::policy::rules::{Rule, Way};

pub use tombolo_control::net::config::Vlan;

/// A port's policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Its addresses: frames to them go to it.
    pub macs: Vec<Mac>,
    /// Drop frames that it sends with other source addresses.
    pub check_mac: bool,
    /// The number of addresses that it may use beyond its own: those of VMs nested in the guest.
    pub learn: u8,
    /// If not empty: drop IP packets, ARP and neighbour advertisements that claim other addresses.
    pub ips: Vec<IpAddr>,
    /// It may be a router or a DHCP server, and receives multicast for routers.
    pub router: bool,
    /// Drop the messages of routers and DHCP servers even without `ips`: the switch serves the addresses.
    pub no_server: bool,
    /// Reaches only the uplinks.
    pub isolated: bool,
    /// An uplink: receives frames without an owner.
    pub uplink: bool,
    /// Of an uplink: the only port with which it exchanges frames.
    pub only: Option<String>,
    pub vlan: Vlan,
    /// The port that gets copies of the frames that it sends and receives.
    pub mirror: Option<String>,
    /// Limits of the frames that it sends.
    pub rate: Rate,
    /// Limits of the frames that it receives.
    pub receive_rate: Rate,
    /// Rules for the IP packets that it may send and receive.
    pub rules: Vec<Rule>,
    /// Largest IP packet that it may send, or have segmented; 0: any.
    pub mtu: u16,
}

impl Policy {
    /// Returns whether only the MACs decide about frames that the port sends. Uplinks' frames are parsed for their
    /// tags.
    #[must_use]
    pub fn is_simple(&self) -> bool {
        self.vlan == Vlan::Transparent
            && !self.uplink
            && self.learn == 0
            && self.ips.is_empty()
            && !self.no_server
            && self.mtu == 0
            && self.rate == Rate::default()
            && self.rules.iter().all(|r| r.direction == Way::In)
    }

    /// Returns whether frames for the port must be parsed or counted against a limit.
    #[must_use]
    pub fn filters_receiving(&self) -> bool {
        self.receive_rate != Rate::default() || self.rules.iter().any(|r| r.direction == Way::In)
    }
}
