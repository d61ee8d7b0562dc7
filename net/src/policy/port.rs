// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a port may do: its addresses, VLANs, rates and neighbours, as the configuration says.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::frames::frame::Mac;
use crate::policy::limit::Rate;
use crate::policy::rules::{Rule, Way};

/// How a port meets VLANs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vlan {
    /// Frames pass as they are, tags included, among ports that are transparent too.
    #[default]
    Transparent,
    /// Untagged frames of this VLAN.
    Access(u16),
    /// Tagged frames of these VLANs, and untagged ones of the native one.
    Trunk {
        /// VLANs that pass with a tag.
        vlans: Vec<u16>,
        /// VLAN that passes without.
        #[serde(default)]
        native: Option<u16>,
    },
}

/// What a port may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Its addresses: frames to them go to it.
    pub macs: Vec<Mac>,
    /// Drop what it sends with other source addresses.
    pub check_mac: bool,
    /// How many addresses it may use beyond its own: those of VMs nested in the guest.
    pub learn: u8,
    /// If not empty: drop IP packets, ARP and neighbour advertisements that claim other addresses.
    pub ips: Vec<IpAddr>,
    /// It may be a router or a server of addresses, and multicast for routers goes to it.
    pub router: bool,
    /// Drop what routers and servers of addresses send, also where it has no `ips`: the switch is the network's.
    pub no_server: bool,
    /// Reaches only the uplinks.
    pub isolated: bool,
    /// An uplink: takes what nobody owns.
    pub uplink: bool,
    pub vlan: Vlan,
    /// The port that gets copies of what it sends and gets.
    pub mirror: Option<String>,
    /// How much it may send.
    pub rate: Rate,
    /// How much it may be sent.
    pub receive_rate: Rate,
    /// Which IP packets it may send and get.
    pub rules: Vec<Rule>,
    /// Largest IP packet that it may send, or have a larger one cut into; 0: any.
    pub mtu: u16,
}

impl Policy {
    /// Do only the MACs decide about what the port sends? Uplinks are looked at for their tags.
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

    /// Must what is sent to the port be looked at, or counted against a limit?
    #[must_use]
    pub fn filters_receiving(&self) -> bool {
        self.receive_rate != Rate::default() || self.rules.iter().any(|r| r.direction == Way::In)
    }
}
