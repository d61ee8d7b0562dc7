// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's configuration: a TOML file, or part of a compose file.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tombolo_metrics::Place;

use crate::forwarding::learn::MAX_LEARNED;
use crate::frames::frame::Mac;
use crate::policy::limit::Rate;
use crate::policy::port::{Policy, Vlan};
use crate::policy::rules::Rule;
use crate::ports::access::Access;
use crate::ports::endpoint::Role;
use crate::ports::port::MAX_PAIRS;
use crate::service::dhcp::DhcpConfig;
use crate::service::ipv6::Ipv6Config;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    pub switch: SwitchConfig,
    /// Guests.
    pub port: Vec<PortConfig>,
    /// Uplinks.
    pub uplink: Vec<UplinkConfig>,
    /// The service that gives guests their IPv4 addresses.
    pub dhcp: Option<DhcpConfig>,
    /// The service that gives guests their IPv6 addresses.
    pub ipv6: Option<Ipv6Config>,
}

/// The receivers of frames for a multicast group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multicast {
    /// Ports that have joined it, on VLANs with a multicast router that queries; elsewhere all.
    #[default]
    Snoop,
    /// Ports that have joined it; the switch itself queries.
    Query,
    Flood,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchConfig {
    /// Worker threads.
    pub workers: usize,
    /// Processors for them, one each; empty: the kernel decides.
    pub cpus: Vec<usize>,
    /// Microseconds for which an idle worker keeps polling: 0 saves CPU, more saves latency.
    pub poll_us: u64,
    /// Processor time that all workers together may use, in hundredths of a processor; 0: no limit.
    pub budget: u32,
    /// The path of the control socket; none: no control.
    pub control: Option<PathBuf>,
    /// Permissions of the sockets of ports that have none of their own.
    pub access: Access,
    /// The user as which a switch that root starts runs; none: `tombolo` if that user exists, otherwise `nobody`.
    pub user: Option<String>,
    /// The address for Prometheus, over HTTP.
    pub metrics: Option<Place>,
    /// The receivers of frames for a multicast group.
    pub multicast: Multicast,
    /// Give up all privileges once started.
    pub sandbox: bool,
}

impl Default for SwitchConfig {
    fn default() -> Self {
        Self {
            workers: 1,
            cpus: Vec::new(),
            poll_us: 50,
            budget: 0,
            control: None,
            access: Access::default(),
            user: None,
            metrics: None,
            multicast: Multicast::default(),
            sandbox: true,
        }
    }
}

fn yes() -> bool {
    true
}

fn four() -> usize {
    4
}

/// A guest's port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PortConfig {
    pub name: String,
    /// Its vhost-user socket.
    pub socket: PathBuf,
    /// The side that listens there.
    #[serde(default)]
    pub role: Role,
    /// Permissions of the socket; none: those of the switch's configuration.
    #[serde(default)]
    pub access: Option<Access>,
    /// The MACs that it owns.
    pub macs: Vec<Mac>,
    /// Queue pairs that the guest may use.
    #[serde(default = "four")]
    pub queues: usize,
    /// Drop frames from other MACs.
    #[serde(default = "yes")]
    pub check_mac: bool,
    /// The number of addresses that the port may use beyond its own, for VMs nested in its guest.
    #[serde(default)]
    pub learn: u8,
    /// If any: drop IP, ARP and neighbour discovery from other addresses.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// The address from the switch's DHCP service; none: the first IPv4 address of `ips`.
    #[serde(default)]
    pub address: Option<Ipv4Addr>,
    /// The address from the switch's IPv6 service; none: one of the prefix and its first MAC.
    #[serde(default)]
    pub address6: Option<Ipv6Addr>,
    /// It may send router advertisements, redirects, multicast queries and a DHCP server's answers, and receives frames for multicast
    /// routers.
    #[serde(default)]
    pub router: bool,
    /// Reaches only uplinks.
    #[serde(default)]
    pub isolated: bool,
    #[serde(default)]
    pub vlan: Vlan,
    /// Limits of the frames that it sends.
    #[serde(default)]
    pub rate: Rate,
    /// The port or uplink that gets copies of the admitted frames that it sends, and of those that it receives.
    #[serde(default)]
    pub mirror: Option<Box<str>>,
    /// Limits of the frames that it receives.
    #[serde(default)]
    pub receive_rate: Rate,
    /// Rules for the IP packets that it may send and receive; the first that matches decides.
    #[serde(default)]
    pub rules: Box<[Rule]>,
    /// Largest IP packet that it may send; 0: any.
    #[serde(default)]
    pub mtu: u16,
    /// Offer checksum and segmentation offload.
    #[serde(default = "yes")]
    pub offload: bool,
}

impl PortConfig {
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy {
            macs: self.macs.clone(),
            check_mac: self.check_mac,
            learn: self.learn,
            ips: self.ips.clone(),
            router: self.router,
            no_server: false,
            isolated: self.isolated,
            uplink: false,
            vlan: self.vlan.clone(),
            mirror: self.mirror.as_deref().map(str::to_owned),
            rate: self.rate,
            receive_rate: self.receive_rate,
            rules: self.rules.to_vec(),
            mtu: self.mtu,
        }
    }

    /// Checks the port's settings.
    ///
    /// # Errors
    /// Names the wrong setting and the remedy.
    pub fn check(&self) -> anyhow::Result<()> {
        let name = &self.name;
        check_name("port", name)?;
        anyhow::ensure!(!self.macs.is_empty(), "port {name} owns no MAC; give it one in 'macs'");
        anyhow::ensure!(
            (1..=MAX_PAIRS).contains(&self.queues),
            "port {name} has {} queues; from 1 to {MAX_PAIRS} are possible",
            self.queues
        );
        anyhow::ensure!(
            usize::from(self.learn) <= MAX_LEARNED,
            "port {name} may learn {} addresses; up to {MAX_LEARNED} are possible",
            self.learn
        );
        check_vlan(name, &self.vlan)
    }
}

/// Most bytes of a name.
const NAME_MAX: usize = 64;

fn check_name(kind: &str, name: &str) -> anyhow::Result<()> {
    anyhow::ensure!(!name.is_empty(), "the {kind} has no name; give it one");
    let plain = name.len() <= NAME_MAX && !name.chars().any(char::is_control);
    anyhow::ensure!(plain, "{kind} {name:?}: a name has up to {NAME_MAX} bytes and no control characters");
    Ok(())
}

fn check_vlan(name: &str, vlan: &Vlan) -> anyhow::Result<()> {
    let all = if *vlan == Vlan::Transparent { vec![] } else { vlan.numbers() };
    for v in all {
        anyhow::ensure!((1..4095).contains(&v), "port {name}: VLAN {v} is not possible; use 1 to 4094");
    }
    Ok(())
}

/// An uplink's device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A TAP device, made if there is none.
    Tap(String),
    /// An interface of the host.
    Interface(String),
    /// passt's socket.
    Passt(PathBuf),
    /// passt (this program), which the switch starts and which ends with it.
    User(PathBuf),
}

/// An uplink.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UplinkConfig {
    pub name: String,
    /// Its device.
    #[serde(flatten)]
    pub way: Way,
    #[serde(default)]
    pub vlan: Vlan,
    /// TCP ports of the host that a passt started for the switch forwards, as its option -t takes them: "8080:80",
    /// "127.0.0.1/2222:22".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp_ports: Vec<String>,
    /// UDP ports, as its option -u takes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub udp_ports: Vec<String>,
}

impl UplinkConfig {
    /// Returns an uplink without VLANs and forwarded ports.
    #[must_use]
    pub fn new(name: String, way: Way) -> Self {
        Self { name, way, vlan: Vlan::default(), tcp_ports: Vec::new(), udp_ports: Vec::new() }
    }

    /// Returns the uplink's policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy { uplink: true, vlan: self.vlan.clone(), ..Policy::default() }
    }

    /// Checks the uplink's settings.
    ///
    /// # Errors
    /// Names the wrong setting and the remedy.
    pub fn check(&self) -> anyhow::Result<()> {
        check_name("uplink", &self.name)?;
        check_vlan(&self.name, &self.vlan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_configuration_is_read() {
        let text = r#"
            [switch]
            workers = 2
            poll-us = 0
            budget = 150
            control = "/run/tombolo/net.sock"
            metrics = "127.0.0.1:9127"
            [[port]]
            name = "web"
            socket = "/run/tombolo/web.sock"
            macs = ["52:54:00:00:00:01", "52:54:00:00:00:02"]
            ips = ["10.0.0.1", "fd00::1"]
            vlan = { access = 5 }
            rate = { bytes = 1000000 }
            receive-rate = { packets = 100000 }
            rules = [{ action = "drop", direction = "out", protocol = "tcp", destination-port = 25 }]
            [[port]]
            name = "db"
            socket = "/run/tombolo/db.sock"
            role = "client"
            macs = ["52:54:00:00:00:03"]
            vlan = { trunk = { vlans = [5, 6], native = 7 } }
            isolated = true
            [[uplink]]
            name = "out"
            tap = "tap0"
            [[uplink]]
            name = "user"
            passt = "/tmp/passt.sock"
        "#;
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.port[0].vlan, Vlan::Access(5));
        assert!(config.port[0].check_mac && config.port[0].offload);
        assert_eq!(config.port[0].policy().rules[0].to_string(), "drop out tcp to port 25");
        assert_eq!(config.port[1].role, Role::Client);
        assert_eq!(config.uplink[0].way, Way::Tap("tap0".into()));
        assert_eq!(config.uplink[1].way, Way::Passt("/tmp/passt.sock".into()));
        config.port.iter().for_each(|p| p.check().unwrap());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_name_and_a_remedy() {
        let port = |extra: &str| {
            toml::from_str::<PortConfig>(&format!("name='a'\nsocket='/s'\n{extra}"))
                .map_err(|e| e.to_string())
                .and_then(|p| p.check().map_err(|e| e.to_string()))
                .unwrap_err()
        };
        assert!(port("macs=[]").contains("owns no MAC"));
        assert!(port("macs=['52:54:00:00:00:01']\nqueues=0").contains("from 1 to"));
        assert!(port("macs=['52:54:00:00:00:01']\nvlan={access=4095}").contains("1 to 4094"));
        assert!(port("macs=['52:54:00:00:00:01']\nlearn=65").contains("up to 64"));
        assert!(port("macs=['ff:ff:ff:ff:ff:ff']").contains("unicast"));
        assert!(port("macs=['52:54:00:00:00:01']\ncolour='red'").contains("colour"));
        for name in ["a\0", "a\nb", "\x1b[2J", &"x".repeat(65)] {
            let config = serde_json::json!({ "name": name, "socket": "/s", "macs": ["52:54:00:00:00:01"] });
            let err = serde_json::from_value::<PortConfig>(config).unwrap().check().unwrap_err().to_string();
            assert!(err.contains("no control characters"), "{err}");
        }
    }
}
