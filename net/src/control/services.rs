// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's own [services](crate::service) by its configuration: their ports, and the addresses that they give to
//! guests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use crate::control::config::{Config, Multicast, PortConfig};
use crate::forwarding::switch::Switch;
use crate::forwarding::view::Attached;
use crate::frames::frame::Mac;
use crate::policy::port::{Policy, Vlan};
use crate::ports::port::Port;
use crate::service::dhcp::{Dhcp, DhcpConfig};
use crate::service::ipv6::{Ipv6, Ipv6Config};
use crate::service::{Announcer, Lease, Leases, Responder, Service, querier};
use crate::uplink::Uplink;

/// The services' ports.
const DHCP: &str = "switch.dhcp";
const IPV6: &str = "switch.ipv6";
const QUERIER: &str = "switch.querier";

/// The services of a switch.
pub(crate) struct Services {
    dhcp: Option<(DhcpConfig, Leases<Ipv4Addr>)>,
    ipv6: Option<(Ipv6Config, Leases<Ipv6Addr>)>,
    asks: bool,
}

impl Services {
    /// Makes the services of `config`.
    ///
    /// # Errors
    /// The configuration is not possible.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        config.dhcp.as_ref().map_or(Ok(()), DhcpConfig::check)?;
        config.ipv6.as_ref().map_or(Ok(()), Ipv6Config::check)?;
        Ok(Self {
            dhcp: config.dhcp.clone().map(|dhcp| (dhcp, Leases::default())),
            ipv6: config.ipv6.clone().map(|ipv6| (ipv6, Leases::default())),
            asks: config.switch.multicast == Multicast::Query,
        })
    }

    /// Attaches their ports to a switch; returns the senders of their announcements.
    ///
    /// # Errors
    /// No descriptors are left, or a port has a service's MAC.
    pub fn attach(&self, switch: &Switch) -> anyhow::Result<Vec<Announcer>> {
        let mut announcers = Vec::new();
        let mut attach = |name, mac: Mac, vlan: &Vlan, responder: Arc<dyn Responder>| -> anyhow::Result<()> {
            let service = Service::new(responder)?;
            announcers.push(service.announcer());
            let policy = Policy { macs: vec![mac], uplink: true, vlan: vlan.clone(), ..Policy::default() };
            switch.attach(Attached {
                port: Arc::new(Port::new(name, 1)),
                policy: Arc::new(policy),
                uplink: Some(Arc::new(Uplink::new(Box::new(service)))),
                capture: None,
            })?;
            Ok(())
        };
        if let Some((config, leases)) = &self.dhcp {
            let responder = Dhcp::new(config.clone(), leases.clone());
            attach(DHCP, config.mac(), &config.vlan, Arc::new(responder))?;
        }
        if let Some((config, leases)) = &self.ipv6 {
            let responder = Ipv6::new(config.clone(), leases.clone());
            attach(IPV6, config.mac(), &config.vlan, Arc::new(responder))?;
        }
        if self.asks {
            attach(QUERIER, querier::MAC, &Vlan::Transparent, Arc::new(querier::Querier))?;
        }
        Ok(announcers)
    }

    /// Returns the part of the configuration whose service has a port of this name.
    pub fn part(&self, name: &str) -> Option<&'static str> {
        match name {
            DHCP if self.dhcp.is_some() => Some("[dhcp]"),
            IPV6 if self.ipv6.is_some() => Some("[ipv6]"),
            QUERIER if self.asks => Some("multicast = \"query\""),
            _ => None,
        }
    }

    /// Returns the policy of a port on this switch: it has the addresses that the services give it, and is no server
    /// beside them.
    pub fn policy(&self, config: &PortConfig) -> Policy {
        let mut policy = Policy::from(config);
        policy.no_server = self.dhcp.is_some() || self.ipv6.is_some();
        if !policy.ips.is_empty() {
            let given = [self.given4(config).map(IpAddr::V4), self.given6(config).map(IpAddr::V6)];
            policy.ips.extend(given.into_iter().flatten());
        }
        policy
    }

    fn given4(&self, config: &PortConfig) -> Option<Ipv4Addr> {
        let v4 = |ip: &IpAddr| if let IpAddr::V4(ip) = ip { Some(*ip) } else { None };
        self.dhcp.as_ref()?;
        config.address.or_else(|| config.ips.iter().find_map(v4))
    }

    fn given6(&self, config: &PortConfig) -> Option<Ipv6Addr> {
        let (ipv6, _) = self.ipv6.as_ref()?;
        let inside = |ip: &IpAddr| {
            if let IpAddr::V6(ip) = ip { Some(*ip).filter(|ip| ipv6.prefix.has(*ip)) } else { None }
        };
        let listed = || config.ips.iter().find_map(inside).filter(|_| ipv6.managed);
        config.address6.or_else(listed).or_else(|| Some(ipv6.prefix.of(*config.macs.first()?)))
    }

    /// Registers a port's addresses.
    ///
    /// # Errors
    /// Another port has them, or these services don't give such addresses.
    pub fn give(&self, config: &PortConfig) -> anyhow::Result<()> {
        self.give4(config)?;
        let given = self.give6(config);
        if given.is_err() {
            // The MACs are this port's, which is being added.
            self.take(&config.macs);
        }
        given
    }

    fn give4(&self, config: &PortConfig) -> anyhow::Result<()> {
        let name = &config.name;
        let (Some((dhcp, leases)), Some(address)) = (&self.dhcp, self.given4(config)) else {
            anyhow::ensure!(
                config.address.is_none(),
                "port {name}: its address is given by DHCP, which this switch doesn't serve; say [dhcp]"
            );
            return Ok(());
        };
        let inside = String::from(dhcp.address);
        anyhow::ensure!(
            dhcp.address.has(address) && address != dhcp.address.address,
            "port {name}: a guest can't have {address} where the DHCP service is {inside}"
        );
        put(leases, config, address)
    }

    fn give6(&self, config: &PortConfig) -> anyhow::Result<()> {
        let name = &config.name;
        let (Some((ipv6, leases)), Some(address)) = (&self.ipv6, self.given6(config)) else {
            anyhow::ensure!(
                config.address6.is_none(),
                "port {name}: its address6 is given by the switch, which has no prefix to give it of; say [ipv6]"
            );
            return Ok(());
        };
        let prefix = String::from(ipv6.prefix);
        anyhow::ensure!(ipv6.prefix.has(address), "port {name}: {address} is not of the switch's {prefix}");
        let own = config.macs.first().map(|mac| ipv6.prefix.of(*mac));
        anyhow::ensure!(
            ipv6.managed || own == Some(address),
            "port {name}: guests make their addresses of {prefix} and their MACs, and can't be given {address}; say managed = true in [ipv6]"
        );
        put(leases, config, address)
    }

    /// Unregisters the addresses of these MACs.
    pub fn take(&self, macs: &[Mac]) {
        for mac in macs {
            if let Some((_, leases)) = &self.dhcp {
                leases.take(*mac);
            }
            if let Some((_, leases)) = &self.ipv6 {
                leases.take(*mac);
            }
        }
    }
}

/// Registers `address` for the owner of a port's first MAC.
fn put<A: Clone + PartialEq + std::fmt::Display>(
    leases: &Leases<A>,
    config: &PortConfig,
    address: A,
) -> anyhow::Result<()> {
    let name = &config.name;
    let plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
    let lease = Lease { address: address.clone(), name: name.chars().filter(plain).take(63).collect() };
    let Some(mac) = config.macs.first() else { return Ok(()) };
    leases
        .put(*mac, lease)
        .map_err(|other| anyhow::anyhow!("port {name}: {address} is given to port {other} already"))
}

/// Sends announcements from time to time, until `stop` receives something or is hung up.
pub(crate) fn announce(switch: &Switch, announcers: &[Announcer], stop: &Receiver<()>) {
    let mut pause = querier::SECOND;
    loop {
        let vlans = switch.view().vlans();
        announcers.iter().for_each(|announcer| announcer.announce(&vlans));
        match stop.recv_timeout(std::mem::replace(&mut pause, querier::PERIOD)) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
