// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's configuration, as a TOML file or as parts of a compose file have it.

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
    /// Ways out.
    pub uplink: Vec<UplinkConfig>,
    /// The service that gives guests their IPv4 addresses.
    pub dhcp: Option<DhcpConfig>,
    /// The service that gives guests their IPv6 addresses.
    pub ipv6: Option<Ipv6Config>,
}

/// Where frames for a multicast group go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multicast {
    /// To ports that have joined it, where a multicast router asks which those are; elsewhere to all.
    #[default]
    Snoop,
    /// To ports that have joined it; the switch asks.
    Query,
    Flood,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchConfig {
    /// Threads that carry packets.
    pub workers: usize,
    /// Processors that they stay on, one each; empty: the kernel decides.
    pub cpus: Vec<usize>,
    /// Microseconds for which an idle worker goes on polling: 0 saves CPU, more saves latency.
    pub poll_us: u64,
    /// Processor time that all of them together may use, in hundredths of a processor; 0: all that they can get.
    pub budget: u32,
    /// Where the control socket is made; none: no control.
    pub control: Option<PathBuf>,
    /// Who may connect to ports that say nothing else.
    pub access: Access,
    /// The user as which a switch that root runs goes on; none: `tombolo` if there is that user, otherwise `nobody`.
    pub user: Option<String>,
    /// Where Prometheus finds the counters, over HTTP.
    pub metrics: Option<Place>,
    /// Where frames for a multicast group go.
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
    /// Who listens there.
    #[serde(default)]
    pub role: Role,
    /// Who may connect there; none: as the switch's configuration says.
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
    /// How many addresses the port may use beyond its own, for VMs nested in its guest.
    #[serde(default)]
    pub learn: u8,
    /// If any: drop IP, ARP and neighbour discovery from other addresses.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// The address that it gets from the switch's DHCP service; none: the first IPv4 address of `ips`.
    #[serde(default)]
    pub address: Option<Ipv4Addr>,
    /// The address that it gets from the switch's IPv6 service; none: one of the prefix and its first MAC.
    #[serde(default)]
    pub address6: Option<Ipv6Addr>,
    /// It may send router advertisements, redirects, multicast queries and a DHCP server's answers, and gets what is for
    /// multicast routers.
    #[serde(default)]
    pub router: bool,
    /// Reaches only uplinks.
    #[serde(default)]
    pub isolated: bool,
    #[serde(default)]
    pub vlan: Vlan,
    /// Limits.
    #[serde(default)]
    pub rate: Rate,
    /// The port or uplink that gets copies of what it sends, as far as it may, and of what it gets.
    #[serde(default)]
    pub mirror: Option<Box<str>>,
    /// Limits of what it is sent.
    #[serde(default)]
    pub receive_rate: Rate,
    /// Which IP packets it may send and get; the first that fits decides.
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

    /// Is it possible?
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
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
    let all = match vlan {
        Vlan::Transparent => vec![],
        Vlan::Access(v) => vec![*v],
        Vlan::Trunk { vlans, native } => vlans.iter().chain(native).copied().collect(),
    };
    for v in all {
        anyhow::ensure!((1..4095).contains(&v), "port {name}: VLAN {v} is not possible; use 1 to 4094");
    }
    Ok(())
}

/// Where an uplink leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A TAP device, made if there is none.
    Tap(String),
    /// An interface of the host.
    Interface(String),
    /// passt's socket.
    Passt(PathBuf),
    /// passt (this program), started for the switch: it ends with it.
    User(PathBuf),
}

/// A way out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UplinkConfig {
    pub name: String,
    /// Where it leads.
    #[serde(flatten)]
    pub way: Way,
    #[serde(default)]
    pub vlan: Vlan,
    /// TCP ports of the host that a passt started for the switch forwards, as its option -t has them: "8080:80", "127.0.0.1/2222:22".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp_ports: Vec<String>,
    /// UDP ports, as its option -u has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub udp_ports: Vec<String>,
}

impl UplinkConfig {
    /// An uplink without VLANs and forwarded ports.
    #[must_use]
    pub fn new(name: String, way: Way) -> Self {
        Self { name, way, vlan: Vlan::default(), tcp_ports: Vec::new(), udp_ports: Vec::new() }
    }

    /// What it may do.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy { uplink: true, vlan: self.vlan.clone(), ..Policy::default() }
    }

    /// Is it possible?
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
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
