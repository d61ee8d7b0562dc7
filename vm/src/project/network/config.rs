// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The configuration of a network's switch, made from the compose file.

use std::net::IpAddr;
use std::path::PathBuf;

use tombolo_control::net::address::SubnetAddress;
use tombolo_control::net::config::{
    Config, DhcpConfig, Ipv6Config, NoRule, PortConfig, SwitchConfig, UplinkConfig, Vlan, Way,
};

use crate::compose::network::{Lease, NetSpec, NicSpec, Uplink};
use crate::compose::ports::{Forward, Protocol};

/// A port of a switch. The compose file has no rules for packets.
pub(super) type Port = PortConfig<NoRule>;

/// The name of a network's only uplink.
pub(super) const UPLINK: &str = "uplink";

/// The port of the VM `vm`. `dhcp`: the switch gives the guest its address.
pub(super) fn of_port(vm: &str, socket: PathBuf, nic: &NicSpec, lease: &Lease, dhcp: bool) -> Port {
    let mut port = Port::new(vm.to_owned(), socket, vec![lease.mac]);
    port.queues = nic.queues.unwrap_or(1);
    port.isolated = nic.isolated;
    port.vlan = nic.vlan.map_or(Vlan::Transparent, Vlan::Access);
    port.router = nic.router;
    if nic.check_address {
        let ipv4 = lease.address.map(|(ip, _)| IpAddr::V4(ip));
        port.ips = ipv4.into_iter().chain(lease.address6.map(IpAddr::V6)).collect();
    }
    port.address = lease.address.map(|(ip, _)| ip).filter(|_| dhcp);
    port
}

/// The configuration of the switch of network `name`. Its subnet is settled.
pub(super) fn of_network(
    name: &str,
    spec: &NetSpec,
    forwards: &[Forward],
    control: PathBuf,
    ports: Vec<Port>,
) -> Config<NoRule> {
    let default = SwitchConfig::default();
    Config {
        switch: SwitchConfig {
            control: Some(control),
            workers: spec.workers.unwrap_or(default.workers),
            cpus: spec.cpus.clone(),
            poll_us: spec.poll_us.unwrap_or(default.poll_us),
            budget: spec.budget.unwrap_or(default.budget),
            metrics: spec.metrics.clone(),
            multicast: spec.multicast.unwrap_or_default(),
            ..default
        },
        port: ports,
        uplink: spec.uplink.iter().map(|uplink| of_uplink(uplink, forwards)).collect(),
        dhcp: of_dhcp(name, spec),
        ipv6: spec.subnet6.map(Ipv6Config::new),
    }
}

/// The DHCP service of a network with `dhcp = true`. Its address is the gateway's, or the first of the subnet, which no VM has.
fn of_dhcp(net: &str, spec: &NetSpec) -> Option<DhcpConfig> {
    let subnet = spec.subnet.filter(|_| spec.dhcp)?;
    let address = spec.gateway.unwrap_or_else(|| subnet.first());
    let mut dhcp = DhcpConfig::new(SubnetAddress { address, prefix: subnet.prefix.into() });
    dhcp.domain = Some(net.to_owned());
    dhcp.router = spec.gateway;
    Some(dhcp)
}

fn of_uplink(uplink: &Uplink, forwards: &[Forward]) -> UplinkConfig {
    let way = match uplink {
        Uplink::User => Way::User("passt".into()),
        Uplink::Tap(name) => Way::Tap(name.clone()),
        Uplink::Interface(name) => Way::Interface(name.clone()),
    };
    let of = |protocol| {
        forwards.iter().filter(|forward| forward.protocol == protocol).map(Forward::for_passt).collect()
    };
    let mut config = UplinkConfig::new(UPLINK.to_owned(), way);
    config.tcp_ports = of(Protocol::Tcp);
    config.udp_ports = of(Protocol::Udp);
    config
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;
    use crate::compose::Project;
    use crate::compose::network::{leases, settle};

    /// The configuration of the switch of 'lan', as the file has it that the switch reads.
    fn config(text: &str) -> String {
        let mut compose = Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).unwrap().compose;
        settle(&mut compose, &BTreeMap::new());
        let spec = &compose.net["lan"];
        let leases = leases(&compose, "p", "lan", &BTreeMap::new()).unwrap();
        let port = |(vm, lease): (&String, &Lease)| {
            of_port(vm, "/s".into(), &compose.vm[vm].networks.0["lan"], lease, spec.dhcp)
        };
        let ports = leases.iter().map(port).collect();
        let forwards: Vec<Forward> = compose.vm.values().flat_map(|vm| vm.ports.clone()).collect();
        toml::to_string(&of_network("lan", spec, &forwards, "/c".into(), ports)).unwrap()
    }

    fn has(config: &str, lines: &str) {
        assert!(config.contains(lines), "'{lines}' is missing in\n{config}");
    }

    #[test]
    fn a_network_with_dhcp_names_each_guests_address_and_the_service() {
        let config =
            config("[net.lan]\ndhcp = true\n[vm.a]\nnetworks = { lan = { mac = \"52:54:00:00:00:01\" } }\n");
        has(
            &config,
            "name = \"a\"\nsocket = \"/s\"\nmacs = [\"52:54:00:00:00:01\"]\nqueues = 1\naddress = \"10.86.0.2\"\n",
        );
        has(&config, "[dhcp]\naddress = \"10.86.0.1/24\"\ndomain = \"lan\"\n");
    }

    #[test]
    fn a_port_has_the_settings_of_the_vms_device() {
        let config = config(
            "[net.lan]\nsubnet6 = \"fd00:86::/64\"\nmulticast = \"query\"\n[vm.a]\nnetworks = { lan = { \
             mac = \"52:54:00:00:00:0b\", check_address = true, isolated = true, queues = 2, router = true } }\n",
        );
        has(
            &config,
            "queues = 2\nips = [\"10.86.0.2\", \"fd00:86::5054:ff:fe00:b\"]\nrouter = true\nisolated = true\n",
        );
        has(&config, "multicast = \"query\"");
        has(&config, "[ipv6]\nprefix = \"fd00:86::/64\"\n");
    }

    #[test]
    fn a_vlan_is_an_access_port() {
        let config = config("[net.lan]\n[vm.a]\nnetworks = { lan = { vlan = 5 } }\n");
        has(&config, "[port.vlan]\naccess = 5\n");
    }

    #[test]
    fn an_uplink_forwards_the_ports_of_the_vms() {
        let config = config(
            "[net.lan]\nuplink = \"user\"\n[vm.a]\nnetworks = [\"lan\"]\nports = [\"8080:80\", \"127.0.0.1:5353:53/udp\"]\n",
        );
        has(&config, "[[uplink]]\nname = \"uplink\"\nuser = \"passt\"\n");
        has(&config, "tcp-ports = [\"8080:80\"]\nudp-ports = [\"127.0.0.1/5353:53\"]\n");
    }
}
