// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks as the compose file has them: what may be said, and who gets which MAC and address.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::compose::{Compose, Ready, VmSpec, nearest};
use crate::project::state::hash;

/// Queue pairs that a port may have.
const QUEUES_MAX: u32 = 16;

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

pub use tombolo_control::Mac;

/// An IPv4 subnet, "10.0.0.0/24".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// Its first address.
    pub base: Ipv4Addr,
    /// Bits of it that are the network's.
    pub prefix: u8,
}

impl Subnet {
    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }

    /// The first address, which VMs have only where the file says so.
    fn first(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) + 1)
    }

    /// Can a VM have this address?
    #[must_use]
    pub fn has(self, ip: Ipv4Addr) -> bool {
        let (base, ip) = (u32::from(self.base), u32::from(ip));
        ip & self.mask() == base && ip != base && ip != base | !self.mask()
    }

    /// All addresses that VMs can have.
    fn hosts(self) -> impl Iterator<Item = Ipv4Addr> {
        let base = u32::from(self.base);
        (base + 1..base | !self.mask()).map(Ipv4Addr::from)
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

impl FromStr for Subnet {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no subnet; write one such as \"10.0.0.0/24\", of 8 to 30 bits");
        let (base, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let base: Ipv4Addr = base.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix.parse().ok().filter(|p| (8..=30).contains(p)).ok_or_else(wrong)?;
        let subnet = Subnet { base, prefix };
        let first = Ipv4Addr::from(u32::from(base) & subnet.mask());
        if first != base {
            return Err(format!(
                "'{text}' is no subnet, {base} is in the midst of one; write \"{first}/{prefix}\""
            ));
        }
        Ok(subnet)
    }
}

/// An IPv6 network's prefix of 64 bits, "fd00:86::/64".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix64(Ipv6Addr);

impl Prefix64 {
    /// The address that a guest's kernel makes of the prefix and its MAC (RFC 4291, appendix A).
    #[must_use]
    pub fn of(self, mac: Mac) -> Ipv6Addr {
        let [a, b, c, d, e, f] = mac.0;
        let [p, q, r, s, ..] = self.0.segments();
        let own = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
        Ipv6Addr::new(p, q, r, s, own[0], own[1], own[2], own[3])
    }
}

impl fmt::Display for Prefix64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/64", self.0)
    }
}

impl FromStr for Prefix64 {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let base = text.strip_suffix("/64").and_then(|t| t.parse::<Ipv6Addr>().ok());
        let plain = |ip: &Ipv6Addr| {
            !ip.is_multicast()
                && !ip.is_unspecified()
                && !ip.is_unicast_link_local()
                && ip.segments()[4..] == [0; 4]
        };
        match base.filter(plain) {
            Some(base) => Ok(Prefix64(base)),
            None => Err(format!("'{text}' is no IPv6 prefix of 64 bits; write one such as \"fd00:86::/64\"")),
        }
    }
}

macro_rules! as_text {
    ($($name:ident)*) => {$(
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}
as_text! { Subnet Prefix64 }

/// What one VM has in one network.
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

/// Who has which MAC and address in a network; `held` are those that are in use already.
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
    let subnet = subnet(compose, net);
    let members = || compose.vm.iter().filter_map(|(name, vm)| Some((name, vm.networks.0.get(net)?)));
    let mut taken: BTreeMap<Ipv4Addr, &str> = BTreeMap::new();
    for (name, nic) in members() {
        let NicAddress::Static(ip) = nic.address else { continue };
        if let Some(other) = taken.insert(ip, name) {
            return Err((
                name.clone(),
                format!(
                    "vm.{name} and vm.{other} both have the address {ip} in '{net}'; give one of them another"
                ),
            ));
        }
    }
    let gateway = subnet.map(|s| spec.gateway.unwrap_or_else(|| s.first()));
    let mut used: BTreeSet<Ipv4Addr> = taken.keys().copied().chain(gateway).collect();
    used.extend(held.values().filter_map(|l| l.address).map(|(ip, _)| ip));
    let mut macs: BTreeMap<Mac, String> = BTreeMap::new();
    let mut leases = BTreeMap::new();
    for (name, nic) in members() {
        let old = held.get(name).filter(|l| nic.mac.is_none_or(|m| m == l.mac));
        let mac = nic.mac.or(old.map(|l| l.mac)).unwrap_or_else(|| {
            let h = hash(format!("{project}\n{net}\n{name}").as_bytes()).to_le_bytes();
            Mac([0x52, 0x54, 0, h[0], h[1], h[2]])
        });
        if let Some(other) = macs.insert(mac, name.clone()) {
            return Err((
                name.clone(),
                format!(
                    "vm.{name} and vm.{other} both have the MAC {mac} in '{net}'; give one of them another with mac = \"…\""
                ),
            ));
        }
        let prefix = subnet.map_or(24, |s| s.prefix);
        let address = match (nic.address, subnet) {
            (NicAddress::Static(ip), _) => Some((ip, prefix)),
            (NicAddress::Auto | NicAddress::Dhcp, Some(subnet))
                if nic.address == NicAddress::Auto || spec.dhcp =>
            {
                match old.and_then(|l| l.address) {
                    Some(address) => Some(address),
                    None => {
                        let free = subnet.hosts().find(|ip| !used.contains(ip)).ok_or_else(|| {
                        (name.clone(), format!("the subnet {subnet} of '{net}' has no address left for vm.{name}; make it larger"))
                    })?;
                        used.insert(free);
                        Some((free, prefix))
                    }
                }
            }
            _ => None,
        };
        let dhcp = nic.address == NicAddress::Dhcp
            || nic.address == NicAddress::Auto && address.is_none() && spec.uplink == Some(Uplink::User);
        let address6 = spec.subnet6.map(|prefix| prefix.of(mac));
        leases.insert(name.clone(), Lease { mac, address, address6, dhcp });
    }
    Ok(leases)
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

/// Checks that need no look at the host. The error is (table, key, message).
pub(crate) fn check(compose: &Compose) -> Result<(), (String, String, String)> {
    let fail = |table: &str, key: &str, message: String| Err((table.to_owned(), key.to_owned(), message));
    for (name, net) in &compose.net {
        let table = format!("net.{name}");
        if let Some(message) = crate::compose::bad_name("a network", name) {
            return fail(&table, "", message);
        }
        if let Some(Uplink::Tap(device) | Uplink::Interface(device)) = &net.uplink {
            if device.is_empty() || device.len() > 15 || device.contains(['/', ' ']) {
                return fail(
                    &table,
                    "uplink",
                    format!(
                        "net.{name}.uplink: '{device}' can't name an interface; use 1 to 15 letters and digits"
                    ),
                );
            }
        }
        if let (Some(gateway), Some(subnet)) = (net.gateway, subnet(compose, name)) {
            if !subnet.has(gateway) {
                return fail(
                    &table,
                    "gateway",
                    format!("net.{name}.gateway is {gateway}, which is not in {subnet}"),
                );
            }
        }
        if net.dhcp && subnet(compose, name).is_none() {
            return fail(
                &table,
                "dhcp",
                format!("net.{name}.dhcp: the addresses are those of a subnet; add subnet = \"10.0.0.0/24\""),
            );
        }
        let ipv6_fits = net.mtu.is_none_or(|m| m >= 1280);
        if net.subnet6.is_some() && !ipv6_fits {
            return fail(&table, "mtu", format!("net.{name}.mtu: IPv6 (subnet6) takes 1280 or more"));
        }
        if net.mtu.is_some_and(|m| !(68..=65_521).contains(&m)) {
            return fail(&table, "mtu", format!("net.{name}.mtu: write 68 to 65521"));
        }
        if net.workers.is_some_and(|w| w == 0 || w > 64) {
            return fail(&table, "workers", format!("net.{name}.workers: write 1 to 64"));
        }
    }
    for (name, vm) in &compose.vm {
        check_vm(compose, name, vm).map_err(|(key, message)| (format!("vm.{name}"), key, message))?;
    }
    for name in compose.net.keys() {
        leases(compose, "", name, &BTreeMap::new())
            .map_err(|(vm, message)| (format!("vm.{vm}"), "networks".to_owned(), message))?;
    }
    Ok(())
}

fn check_vm(compose: &Compose, name: &str, vm: &VmSpec) -> Result<(), (String, String)> {
    let fail = |message: String| Err(("networks".to_owned(), message));
    for (net, nic) in &vm.networks.0 {
        if !compose.net.contains_key(net) {
            let hint = match nearest(net, compose.net.keys().map(String::as_str)) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("add [net.{net}]"),
            };
            return fail(format!(
                "vm.{name}.networks names the network '{net}', which is not declared; {hint}"
            ));
        }
        if nic.queues.is_some_and(|q| q == 0 || q > QUEUES_MAX) {
            return fail(format!("vm.{name}.networks.{net}.queues: write 1 to {QUEUES_MAX}"));
        }
        if nic.vlan.is_some_and(|v| !(1..4095).contains(&v)) {
            return fail(format!("vm.{name}.networks.{net}.vlan: write 1 to 4094"));
        }
        if let (NicAddress::Static(ip), Some(subnet)) = (nic.address, subnet(compose, net)) {
            if !subnet.has(ip) {
                return fail(format!(
                    "vm.{name}.networks.{net}.address is {ip}, which no VM can have in {subnet}"
                ));
            }
        }
        let served = compose.net.get(net).is_some_and(|spec| spec.dhcp);
        let served6 = compose.net.get(net).is_some_and(|spec| spec.subnet6.is_some());
        if (served || served6) && nic.vlan.is_some() {
            let key = if served { "dhcp" } else { "subnet6" };
            return fail(format!(
                "vm.{name}.networks.{net}: the network gives addresses to VMs without a VLAN only; leave out vlan, or {key}"
            ));
        }
        if let (true, NicAddress::Static(ip), Some(subnet)) = (served, nic.address, subnet(compose, net)) {
            let own = compose.net.get(net).and_then(|spec| spec.gateway).unwrap_or_else(|| subnet.first());
            if ip == own {
                return fail(format!(
                    "vm.{name}.networks.{net}.address is {ip}, by which the network's DHCP goes; choose another"
                ));
            }
        }
        let set = matches!(nic.address, NicAddress::Static(_) | NicAddress::Dhcp);
        // Who asks by itself needs no agent, and cloud-init is told at the start.
        if set && !served && vm.cloud_init.is_none() && vm.ready != Ready::Agent {
            return Err((
                "ready".to_owned(),
                format!(
                    "vm.{name} has an address in '{net}', which is set through the guest agent: ready must be \"agent\""
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use std::path::Path;

    fn parse(text: &str) -> Result<Project, String> {
        Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).map_err(|e| e.to_string())
    }

    fn plan(text: &str, net: &str) -> BTreeMap<String, Lease> {
        leases(&parse(text).unwrap().compose, "p", net, &BTreeMap::new()).unwrap()
    }

    const TWO: &str = "[net.lan]\n[vm.a]\nnetworks = [\"lan\"]\n[vm.b]\nnetworks = { lan = { mac = \"52:54:00:00:00:0b\" } }\n";

    #[test]
    fn addresses_come_by_convention_and_macs_from_names() {
        let plan = plan(TWO, "lan");
        assert_eq!(plan["a"].address, Some((Ipv4Addr::new(10, 86, 0, 2), 24)));
        assert_eq!(plan["b"].address, Some((Ipv4Addr::new(10, 86, 0, 3), 24)));
        assert_eq!(plan["b"].mac.to_string(), "52:54:00:00:00:0b");
        assert!(plan["a"].mac.to_string().starts_with("52:54:00:"));
        assert_ne!(plan["a"].mac, plan["b"].mac);
    }

    #[test]
    fn a_vm_that_runs_keeps_its_address_when_others_come() {
        let before = plan(TWO, "lan");
        let text = format!(
            "{TWO}[vm.aa]\nnetworks = [\"lan\"]\n[vm.z]\nnetworks = {{ lan = {{ address = \"10.86.0.4\" }} }}\n"
        );
        let after = leases(&parse(&text).unwrap().compose, "p", "lan", &before).unwrap();
        assert_eq!((&after["a"], &after["b"]), (&before["a"], &before["b"]));
        assert_eq!(after["z"].address, Some((Ipv4Addr::new(10, 86, 0, 4), 24)));
        assert_eq!(after["aa"].address, Some((Ipv4Addr::new(10, 86, 0, 5), 24)));
    }

    #[test]
    fn a_network_that_runs_keeps_its_subnet_when_another_comes_before_it() {
        let mut first = parse(TWO).unwrap().compose;
        settle(&mut first, &BTreeMap::new());
        let lan = first.net["lan"].subnet.unwrap();
        assert_eq!(lan.to_string(), "10.86.0.0/24");
        let mut second = parse(&format!("[net.alpha]\n[net.out]\nuplink = \"user\"\n{TWO}")).unwrap().compose;
        settle(&mut second, &BTreeMap::from([("lan".to_owned(), lan)]));
        assert_eq!(second.net["lan"].subnet, Some(lan));
        assert_eq!(second.net["alpha"].subnet.unwrap().to_string(), "10.86.1.0/24");
        assert_eq!(second.net["out"].subnet, None);
    }

    #[test]
    fn an_uplink_leaves_addresses_to_whoever_is_there() {
        let text = |uplink: &str| format!("[net.out]\nuplink = {uplink}\n[vm.a]\nnetworks = [\"out\"]\n");
        let tap = &plan(&text("{ tap = \"tap0\" }"), "out")["a"];
        assert!(tap.address.is_none() && !tap.dhcp);
        let user = &plan(&text("\"user\""), "out")["a"];
        assert!(user.address.is_none() && user.dhcp);
    }

    #[test]
    fn a_network_with_dhcp_gives_addresses_to_those_who_ask_and_needs_no_agent() {
        let text = "[net.lan]\ndhcp = true\n[vm.a]\nready = \"running\"\nnetworks = { lan = { address = \"dhcp\" } }\n\
                    [vm.b]\nnetworks = [\"lan\"]\n";
        let project = parse(text).unwrap();
        let plan = plan(text, "lan");
        assert_eq!((plan["a"].address, plan["a"].dhcp), (Some((Ipv4Addr::new(10, 86, 0, 2), 24)), true));
        assert_eq!((plan["b"].address, plan["b"].dhcp), (Some((Ipv4Addr::new(10, 86, 0, 3), 24)), false));
        let nic = &project.compose.vm["a"].networks.0["lan"];
        assert_eq!(port("a", Path::new("/s"), nic, &plan["a"], true)["address"], "10.86.0.2");
        let mut compose = project.compose.clone();
        settle(&mut compose, &BTreeMap::new());
        let service = service("lan", &compose.net["lan"]).unwrap();
        assert_eq!((&service["address"], &service["domain"]), (&"10.86.0.1/24".into(), &"lan".into()));
        let error = |text: &str| parse(text).unwrap_err();
        let e = error("[net.out]\nuplink = \"user\"\ndhcp = true\n[vm.a]\nnetworks = [\"out\"]\n");
        assert!(e.contains(":3: ") && e.contains("add subnet ="), "{e}");
        let e = error("[net.lan]\ndhcp = true\n[vm.a]\nnetworks = { lan = { address = \"10.86.0.1\" } }\n");
        assert!(e.contains("by which the network's DHCP goes"), "{e}");
        let e = error("[net.lan]\ndhcp = true\n[vm.a]\nnetworks = { lan = { vlan = 5 } }\n");
        assert!(e.contains("leave out vlan, or dhcp"), "{e}");
        let e = error("[net.lan]\nsubnet6 = \"fd00::/64\"\n[vm.a]\nnetworks = { lan = { vlan = 5 } }\n");
        assert!(e.contains("leave out vlan, or subnet6"), "{e}");
    }

    #[test]
    fn a_network_with_an_ipv6_prefix_says_which_address_each_vm_makes() {
        let text = "[net.lan]\nsubnet6 = \"fd00:86::/64\"\nmulticast = \"query\"\n[vm.a]\n\
                    networks = { lan = { mac = \"52:54:00:00:00:0b\", check_address = true, router = true } }\n";
        let lease = &plan(text, "lan")["a"];
        assert_eq!(lease.address6.unwrap().to_string(), "fd00:86::5054:ff:fe00:b");
        let project = parse(text).unwrap();
        let nic = &project.compose.vm["a"].networks.0["lan"];
        let port = port("a", Path::new("/s"), nic, lease, false);
        assert_eq!(port["ips"], serde_json::json!(["10.86.0.2", "fd00:86::5054:ff:fe00:b"]));
        assert_eq!(port["router"], true);
        for text in ["fd00::/48", "fd00::1/64", "fe80::/64", "10.0.0.0/24"] {
            let e = parse(&format!("[net.lan]\nsubnet6 = \"{text}\"\n")).unwrap_err();
            assert!(e.contains("such as \"fd00:86::/64\""), "{e}");
        }
        let e = parse("[net.lan]\nsubnet6 = \"fd00::/64\"\nmtu = 1000\n").unwrap_err();
        assert!(e.contains("1280 or more"), "{e}");
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_remedy() {
        let error = |text: &str| parse(text).unwrap_err();
        let e = error("[net.lan]\n[vm.a]\nnetworks = [\"lna\"]\n");
        assert!(e.contains(":3: ") && e.ends_with("did you mean 'lan'?"), "{e}");
        let e = error("[net.lan]\n[vm.a]\nnetworks = { lan = { mac = \"01:00:00:00:00:00\" } }\n");
        assert!(e.contains("is no unicast MAC"), "{e}");
        let mac = "networks = { lan = { mac = \"52:54:00:00:00:01\" } }";
        let e = error(&format!("[net.lan]\n[vm.a]\n{mac}\n[vm.b]\n{mac}\n"));
        assert!(e.contains(":5: vm.b and vm.a both have the MAC 52:54:00:00:00:01"), "{e}");
        let e = error("[net.lan]\nsubnet = \"10.0.0.1/24\"\n");
        assert!(e.contains(":2: ") && e.contains("write \"10.0.0.0/24\""), "{e}");
        let e = error("[net.lan]\nuplink = { bridge = \"br0\" }\n");
        assert!(e.contains("bridge") && e.contains("tap"), "{e}");
        let e = error(
            "[net.lan]\nsubnet = \"10.0.0.0/30\"\n[vm.a]\nnetworks = [\"lan\"]\n[vm.b]\nnetworks = [\"lan\"]\n",
        );
        assert!(e.contains("no address left for vm.b"), "{e}");
        let e = error("[net.lan]\n[vm.a]\nnetworks = { lan = { address = \"10.9.0.1\" } }\n");
        assert!(e.contains("which no VM can have in 10.86.0.0/24"), "{e}");
    }

    #[test]
    fn a_port_says_what_the_file_says() {
        let p = parse("[net.lan]\n[vm.a]\nnetworks = { lan = { vlan = 5, isolated = true, check_address = true, queues = 2 } }\n").unwrap();
        let lease = &leases(&p.compose, "p", "lan", &BTreeMap::new()).unwrap()["a"];
        let port = port("a", Path::new("/s"), &p.compose.vm["a"].networks.0["lan"], lease, false);
        assert_eq!(port["vlan"]["access"], 5);
        assert_eq!(port["ips"][0], "10.86.0.2");
        assert_eq!((&port["queues"], &port["isolated"]), (&2.into(), &true.into()));
        let json = serde_json::to_string(&p).unwrap();
        assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), p);
    }
}
