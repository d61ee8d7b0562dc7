// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The configuration of a switch: the file that it starts with, and the ports and uplinks that it is given while it runs.
//!
//! The switch reads these types, and the supervisor of a project writes them. Settings with their default value are not written, so that a
//! switch of an earlier version is not given fields that it does not know.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tombolo_metrics::Place;

use super::address::{Prefix64, SubnetAddress};
use crate::Mac;

/// The most queue pairs of a port.
pub const QUEUES_MAX: usize = 16;
/// The most addresses that a port may learn.
pub const LEARN_MAX: u8 = 64;

/// A switch's configuration file. `R` is a rule for the packets of a port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config<R> {
    /// The switch itself.
    pub switch: SwitchConfig,
    /// Guests.
    #[serde(bound(deserialize = "R: Deserialize<'de>"), skip_serializing_if = "Vec::is_empty")]
    pub port: Vec<PortConfig<R>>,
    /// Uplinks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uplink: Vec<UplinkConfig>,
    /// The service that gives guests their IPv4 addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp: Option<DhcpConfig>,
    /// The service that gives guests their IPv6 addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Config>,
}

impl<R> Default for Config<R> {
    fn default() -> Self {
        Self { switch: SwitchConfig::default(), port: Vec::new(), uplink: Vec::new(), dhcp: None, ipv6: None }
    }
}

/// The rules of ports whose writer has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoRule {}

/// The receivers of frames for a multicast group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multicast {
    /// Ports that have joined it, on VLANs with a multicast router that queries; elsewhere all.
    #[default]
    Snoop,
    /// Ports that have joined it; the switch itself queries.
    Query,
    /// All ports.
    Flood,
}

/// The settings of the switch itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchConfig {
    /// Worker threads.
    #[serde(skip_serializing_if = "is_one")]
    pub workers: usize,
    /// Processors for them, one each; empty: the kernel decides.
    #[serde(skip_serializing_if = "is_default")]
    pub cpus: Vec<usize>,
    /// Microseconds for which an idle worker keeps polling: 0 saves CPU, more saves latency.
    #[serde(skip_serializing_if = "is_usual_poll")]
    pub poll_us: u64,
    /// Processor time that all workers together may use, in hundredths of a processor; 0: no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub budget: u32,
    /// The path of the control socket; none: no control.
    #[serde(skip_serializing_if = "is_default")]
    pub control: Option<PathBuf>,
    /// Permissions of the sockets of ports that have none of their own.
    #[serde(skip_serializing_if = "is_default")]
    pub access: Access,
    /// The user as which a switch that root starts runs; none: `tombolo` if that user exists, otherwise `nobody`.
    #[serde(skip_serializing_if = "is_default")]
    pub user: Option<String>,
    /// The address for Prometheus, over HTTP.
    #[serde(skip_serializing_if = "is_default")]
    pub metrics: Option<Place>,
    /// The receivers of frames for a multicast group.
    #[serde(skip_serializing_if = "is_default")]
    pub multicast: Multicast,
    /// Give up all privileges once started.
    #[serde(skip_serializing_if = "is_yes")]
    pub sandbox: bool,
}

/// The default of [`SwitchConfig::poll_us`].
const POLL_US: u64 = 50;

impl Default for SwitchConfig {
    fn default() -> Self {
        Self {
            workers: 1,
            cpus: Vec::new(),
            poll_us: POLL_US,
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

/// Permissions of a port's socket, as a user writes them. By default a switch that root runs gives its sockets to the group of the VMMs,
/// with mode 0660; another user's switch leaves them to that user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    /// A user's name or number.
    pub owner: Option<String>,
    /// A group's name or number.
    pub group: Option<String>,
    /// Octal, such as "0660".
    pub mode: Option<String>,
}

/// The side that makes the connection of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The switch listens (QEMU's default, libvirt's `mode='client'`).
    #[default]
    Server,
    /// The front-end listens (QEMU's `server=on`, libvirt's `mode='server'`).
    Client,
}

/// A port's VLANs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub enum Vlan {
    /// Frames pass unchanged, tags included, among transparent ports.
    #[default]
    Transparent,
    /// Untagged frames of this VLAN.
    Access(u16),
    /// Tagged frames of these VLANs, and untagged ones of the native one.
    Trunk {
        /// VLANs that pass with a tag.
        vlans: Vec<u16>,
        /// VLAN of untagged frames.
        #[serde(default)]
        native: Option<u16>,
    },
}

impl Vlan {
    /// Returns the VLANs of a port; 0: untagged frames of a transparent one.
    #[must_use]
    pub fn numbers(&self) -> Vec<u16> {
        match self {
            Self::Transparent => vec![0],
            Self::Access(vid) => vec![*vid],
            Self::Trunk { vlans, native } => vlans.iter().chain(native).copied().collect(),
        }
    }
}

/// Limits of a port; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rate {
    /// Bytes per second, Ethernet headers included.
    pub bytes: u64,
    /// Packets per second (segments of a large frame count as one).
    pub packets: u64,
}

fn yes() -> bool {
    true
}

fn four() -> usize {
    4
}

/// Leaves a default value out of what is written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn is_one(value: &usize) -> bool {
    *value == 1
}

fn is_usual_poll(value: &u64) -> bool {
    *value == POLL_US
}

fn is_empty<R>(rules: &[R]) -> bool {
    rules.is_empty()
}

/// A guest's port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PortConfig<R> {
    /// The name of the port.
    pub name: String,
    /// Its vhost-user socket.
    pub socket: PathBuf,
    /// The side that listens there.
    #[serde(default, skip_serializing_if = "is_default")]
    pub role: Role,
    /// Permissions of the socket; none: those of the switch's configuration.
    #[serde(default, skip_serializing_if = "is_default")]
    pub access: Option<Access>,
    /// The MACs that it owns.
    pub macs: Vec<Mac>,
    /// Queue pairs that the guest may use, up to [`QUEUES_MAX`].
    #[serde(default = "four")]
    pub queues: usize,
    /// Drop frames from other MACs.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub check_mac: bool,
    /// The number of addresses that the port may use beyond its own, for VMs nested in its guest, up to [`LEARN_MAX`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub learn: u8,
    /// If any: drop IP, ARP and neighbour discovery from other addresses.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ips: Vec<IpAddr>,
    /// The address from the switch's DHCP service; none: the first IPv4 address of `ips`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub address: Option<Ipv4Addr>,
    /// The address from the switch's IPv6 service; none: one of the prefix and its first MAC.
    #[serde(default, skip_serializing_if = "is_default")]
    pub address6: Option<Ipv6Addr>,
    /// It may send router advertisements, redirects, multicast queries and a DHCP server's answers, and receives frames for multicast
    /// routers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub router: bool,
    /// Reaches only uplinks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub isolated: bool,
    /// The VLANs of the frames that it sends and receives.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vlan: Vlan,
    /// Limits of the frames that it sends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rate: Rate,
    /// The port or uplink that gets copies of the admitted frames that it sends, and of those that it receives.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mirror: Option<Box<str>>,
    /// Limits of the frames that it receives.
    #[serde(default, skip_serializing_if = "is_default")]
    pub receive_rate: Rate,
    /// Rules for the IP packets that it may send and receive; the first that matches decides.
    #[serde(default = "Box::default", skip_serializing_if = "is_empty")]
    #[serde(bound(deserialize = "R: Deserialize<'de>"))]
    pub rules: Box<[R]>,
    /// Largest IP packet that it may send; 0: any.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mtu: u16,
    /// Offer checksum and segmentation offload.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub offload: bool,
}

impl<R> PortConfig<R> {
    /// A port with default settings and one queue pair.
    #[must_use]
    pub fn new(name: String, socket: PathBuf, macs: Vec<Mac>) -> Self {
        Self {
            name,
            socket,
            role: Role::default(),
            access: None,
            macs,
            queues: 1,
            check_mac: true,
            learn: 0,
            ips: Vec::new(),
            address: None,
            address6: None,
            router: false,
            isolated: false,
            vlan: Vlan::default(),
            rate: Rate::default(),
            mirror: None,
            receive_rate: Rate::default(),
            rules: Box::default(),
            mtu: 0,
            offload: true,
        }
    }
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenUplink", rename_all = "kebab-case")]
pub struct UplinkConfig {
    /// The name of the uplink.
    pub name: String,
    /// Where its frames leave the host; written as the key `tap`, `interface`, `passt` or `user`.
    #[serde(flatten)]
    pub way: Way,
    /// The only port that it serves; none: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The VLANs of the frames that it sends and receives.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vlan: Vlan,
    /// TCP ports of the host that a passt started for the switch forwards, as its option -t takes them: "8080:80",
    /// "127.0.0.1/2222:22".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp_ports: Vec<String>,
    /// UDP ports, as its option -u takes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub udp_ports: Vec<String>,
    /// The guest of a passt started for the switch reaches what listens on the host's loopback addresses, at its gateway's address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub host_loopback: bool,
}

/// An uplink as it is read. Serde refuses no unknown fields of a struct with a flattened one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WrittenUplink {
    name: String,
    tap: Option<String>,
    interface: Option<String>,
    passt: Option<PathBuf>,
    user: Option<PathBuf>,
    port: Option<String>,
    #[serde(default)]
    vlan: Vlan,
    #[serde(default)]
    tcp_ports: Vec<String>,
    #[serde(default)]
    udp_ports: Vec<String>,
    #[serde(default)]
    host_loopback: bool,
}

impl TryFrom<WrittenUplink> for UplinkConfig {
    type Error = String;

    fn try_from(written: WrittenUplink) -> Result<Self, String> {
        let WrittenUplink {
            name,
            tap,
            interface,
            passt,
            user,
            port,
            vlan,
            tcp_ports,
            udp_ports,
            host_loopback,
        } = written;
        let ways =
            [tap.map(Way::Tap), interface.map(Way::Interface), passt.map(Way::Passt), user.map(Way::User)];
        let ways: Vec<Way> = ways.into_iter().flatten().collect();
        let [way] = <[Way; 1]>::try_from(ways).map_err(|ways| {
            let n = ways.len();
            format!("uplink {name} has {n} devices; give it one of tap, interface, passt and user")
        })?;
        Ok(Self { name, way, port, vlan, tcp_ports, udp_ports, host_loopback })
    }
}

impl UplinkConfig {
    /// Returns an uplink of all ports, without VLANs and forwarded ports.
    #[must_use]
    pub fn new(name: String, way: Way) -> Self {
        Self {
            name,
            way,
            port: None,
            vlan: Vlan::default(),
            tcp_ports: Vec::new(),
            udp_ports: Vec::new(),
            host_loopback: false,
        }
    }

    /// Returns whether its device serves one guest only, and all ports lead to it: passt gives every guest the same address, and
    /// sends what is for any of them to the one that it heard last.
    #[must_use]
    pub fn serves_one_of_many(&self) -> bool {
        self.port.is_none() && matches!(self.way, Way::User(_) | Way::Passt(_))
    }
}

fn hour() -> u32 {
    3600
}

/// The service that gives guests their IPv4 addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DhcpConfig {
    /// The server's own address, and the subnet.
    pub address: SubnetAddress,
    /// The subnet's router.
    #[serde(default, skip_serializing_if = "is_default")]
    pub router: Option<Ipv4Addr>,
    /// Name servers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dns: Vec<Ipv4Addr>,
    /// The domain of the guests' names.
    #[serde(default, skip_serializing_if = "is_default")]
    pub domain: Option<String>,
    /// Seconds for which an address is leased.
    #[serde(default = "hour")]
    pub lease: u32,
    /// The VLAN of the guests that are served.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vlan: Vlan,
}

impl DhcpConfig {
    /// The service of a server with this address, with default settings.
    #[must_use]
    pub fn new(address: SubnetAddress) -> Self {
        Self { address, router: None, dns: Vec::new(), domain: None, lease: hour(), vlan: Vlan::default() }
    }

    /// Returns the server's MAC: a local one, made from its address.
    #[must_use]
    pub fn mac(&self) -> Mac {
        let [a, b, c, d] = self.address.address.octets();
        Mac([0x02, 0x54, a, b, c, d])
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Names the wrong setting and the remedy.
    pub fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.dns.len() <= 16, "dhcp: {} name servers; up to 16 are possible", self.dns.len());
        anyhow::ensure!(self.lease >= 60, "dhcp: a lease of {} s is too short; write 60 or more", self.lease);
        let long = self.domain.as_ref().is_some_and(|d| d.len() > 64 || !d.is_ascii());
        anyhow::ensure!(!long, "dhcp: the domain must be of up to 64 ASCII characters");
        Ok(())
    }
}

/// The service that gives guests their IPv6 addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ipv6Config {
    /// The network's prefix.
    pub prefix: Prefix64,
    /// Guests ask for their addresses by DHCPv6; otherwise they make them of the prefix and their MACs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub managed: bool,
    /// Name servers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dns: Vec<Ipv6Addr>,
    /// The VLAN of the guests that are served.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vlan: Vlan,
}

impl Ipv6Config {
    /// The service of a network with this prefix, with default settings.
    #[must_use]
    pub fn new(prefix: Prefix64) -> Self {
        Self { prefix, managed: false, dns: Vec::new(), vlan: Vlan::default() }
    }

    /// Returns the service's MAC: a local one, made from the prefix.
    #[must_use]
    pub fn mac(&self) -> Mac {
        let [a, b, c, d, e, f, g, h, ..] = self.prefix.base().octets();
        Mac([0x06, 0x54, a ^ e, b ^ f, c ^ g, d ^ h])
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Names the wrong setting and the remedy.
    pub fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.dns.len() <= 16, "ipv6: {} name servers; up to 16 are possible", self.dns.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_with_default_settings_is_written_without_them() {
        let port =
            PortConfig::<NoRule>::new("a".into(), "/s".into(), vec!["52:54:00:00:00:01".parse().unwrap()]);
        let text = serde_json::to_string(&port).unwrap();
        assert_eq!(text, r#"{"name":"a","socket":"/s","macs":["52:54:00:00:00:01"],"queues":1}"#);
        assert_eq!(serde_json::from_str::<PortConfig<NoRule>>(&text).unwrap(), port);
    }

    #[test]
    fn a_switch_with_default_settings_is_written_without_them() {
        assert_eq!(serde_json::to_string(&SwitchConfig::default()).unwrap(), "{}");
        assert_eq!(serde_json::to_string(&Config::<NoRule>::default()).unwrap(), r#"{"switch":{}}"#);
    }

    #[test]
    fn an_uplink_has_one_device_and_no_setting_that_nobody_knows() {
        let read = |text: &str| serde_json::from_str::<UplinkConfig>(text).map_err(|err| err.to_string());
        let uplink =
            read(r#"{"name":"out","user":"passt","port":"a","tcp-ports":["8080:80"],"vlan":{"access":5}}"#)
                .unwrap();
        assert_eq!((&uplink.way, &uplink.vlan), (&Way::User("passt".into()), &Vlan::Access(5)));
        let text = serde_json::to_string(&uplink).unwrap();
        assert_eq!(
            text,
            r#"{"name":"out","user":"passt","port":"a","vlan":{"access":5},"tcp-ports":["8080:80"]}"#
        );
        for (text, said) in [
            (r#"{"name":"out","tap":"t","vlna":{"access":5}}"#, "vlna"),
            (r#"{"name":"out","tap":"t","vlan":{"trunk":{"vlans":[5],"nativ":6}}}"#, "nativ"),
            (r#"{"name":"out","tap":"t","interface":"i"}"#, "one of tap, interface, passt and user"),
            (r#"{"name":"out"}"#, "one of tap, interface, passt and user"),
        ] {
            let err = read(text).expect_err(text);
            assert!(err.contains(said), "{text}: {err}");
        }
    }

    #[test]
    fn the_file_of_a_supervisor_that_wrote_it_by_key_is_read() {
        let text = r#"{
            "switch": { "control": "/n", "workers": 2, "poll-us": 0, "budget": 50, "cpus": [0, 1],
                        "metrics": "127.0.0.1:9127", "multicast": "query" },
            "port": [{ "name": "a", "socket": "/s", "macs": ["52:54:00:00:00:01"], "queues": 1, "isolated": false,
                       "vlan": { "access": 5 }, "ips": ["10.0.0.1", "fd00::1"], "router": true, "address": "10.0.0.1" }],
            "dhcp": { "address": "10.0.0.254/24", "domain": "lan", "router": "10.0.0.254" },
            "ipv6": { "prefix": "fd00::/64" },
            "uplink": [{ "user": "passt", "tcp-ports": ["8080:80"], "name": "uplink" }]
        }"#;
        let config: Config<NoRule> = serde_json::from_str(text).unwrap();
        assert_eq!((config.switch.workers, config.switch.multicast), (2, Multicast::Query));
        assert_eq!((&config.port[0].vlan, config.port[0].router), (&Vlan::Access(5), true));
        assert_eq!((config.dhcp.unwrap().lease, config.uplink.len()), (3600, 1));
    }
}
