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

/// The name of an uplink, behind that of the network or of the VM that it belongs to. No VM has a name with a dot.
const UPLINK: &str = "uplink";

/// Returns the name of the uplink of a network, or of a VM's own.
pub fn uplink_name(of: &str) -> String {
    format!("{of}.{UPLINK}")
}

/// The port of the VM `vm` in a network.
pub(super) fn of_port(vm: &str, socket: PathBuf, nic: &NicSpec, lease: &Lease, spec: &NetSpec) -> Port {
    let macs = [lease.mac].into_iter().chain(nic.macs.iter().copied()).collect();
    let mut port = Port::new(vm.to_owned(), socket, macs);
    port.learn = nic.learn;
    port.queues = nic.queues.unwrap_or(1);
    // passt gives all VMs the address of the host, and answers for every other one.
    port.isolated = nic.isolated || spec.uplink == Some(Uplink::User);
    port.vlan = nic.vlan.map_or(Vlan::Transparent, Vlan::Access);
    port.router = nic.router;
    if nic.check_address {
        let ipv4 = lease.address.map(|(ip, _)| IpAddr::V4(ip));
        port.ips = ipv4.into_iter().chain(lease.address6.map(IpAddr::V6)).collect();
    }
    port.address = lease.address.map(|(ip, _)| ip).filter(|_| spec.dhcp);
    port
}

/// The configuration of the switch of network `name`. Its subnet is settled.
pub(super) fn of_network(
    name: &str,
    spec: &NetSpec,
    control: PathBuf,
    ports: Vec<Port>,
    uplinks: Vec<UplinkConfig>,
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
        uplink: uplinks,
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

/// The uplink that all VMs of a network have. None: each has its own.
pub(super) fn of_uplink(net: &str, uplink: &Uplink) -> Option<UplinkConfig> {
    let way = match uplink {
        Uplink::User => return None,
        Uplink::Tap(name) => Way::Tap(name.clone()),
        Uplink::Interface(name) => Way::Interface(name.clone()),
    };
    Some(UplinkConfig::new(uplink_name(net), way))
}

/// The uplink of the VM `vm` alone, in a network with user-mode networking: a passt serves one guest.
pub(super) fn of_vm(vm: &str, spec: &NetSpec, forwards: &[Forward]) -> Option<UplinkConfig> {
    spec.uplink.as_ref().filter(|uplink| **uplink == Uplink::User)?;
    let of = |protocol| {
        forwards.iter().filter(|forward| forward.protocol == protocol).map(Forward::for_passt).collect()
    };
    let mut config = UplinkConfig::new(uplink_name(vm), Way::User("passt".into()));
    config.port = Some(vm.to_owned());
    config.tcp_ports = of(Protocol::Tcp);
    config.udp_ports = of(Protocol::Udp);
    config.host_loopback = spec.host_loopback;
    Some(config)
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
            of_port(vm, "/s".into(), &compose.vm[vm].networks.0["lan"], lease, spec)
        };
        let ports = leases.iter().map(port).collect();
        let own = compose.vm.iter().filter_map(|(vm, of)| of_vm(vm, spec, &of.ports));
        let uplinks = spec.uplink.iter().filter_map(|uplink| of_uplink("lan", uplink)).chain(own).collect();
        toml::to_string(&of_network("lan", spec, "/c".into(), ports, uplinks)).unwrap()
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
             mac = \"52:54:00:00:00:0b\", macs = [\"52:54:00:00:00:0c\"], learn = 4, check_address = true, isolated = true, queues = 2, router = true } }\n",
        );
        has(&config, "macs = [\"52:54:00:00:00:0b\", \"52:54:00:00:00:0c\"]\n");
        has(
            &config,
            "queues = 2\nlearn = 4\nips = [\"10.86.0.2\", \"fd00:86::5054:ff:fe00:b\"]\nrouter = true\nisolated = true\n",
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
    fn each_vm_has_a_passt_of_its_own_that_forwards_its_ports_and_reaches_no_other_vm() {
        let config = config(
            "[net.lan]\nuplink = \"user\"\n[vm.a]\nnetworks = [\"lan\"]\nports = [\"8080:80\", \"127.0.0.1:5353:53/udp\"]\n\
             [vm.b]\nnetworks = [\"lan\"]\n",
        );
        has(
            &config,
            "[[uplink]]\nname = \"a.uplink\"\nuser = \"passt\"\nport = \"a\"\ntcp-ports = [\"8080:80\"]\nudp-ports = [\"127.0.0.1/5353:53\"]\n",
        );
        has(&config, "[[uplink]]\nname = \"b.uplink\"\nuser = \"passt\"\nport = \"b\"\n");
        assert_eq!(config.matches("isolated = true").count(), 2, "{config}");
        assert!(!config.contains("host-loopback"), "{config}");
    }

    #[test]
    fn no_vm_has_the_name_of_an_uplink_or_of_a_service() {
        let config = config("[net.lan]\nuplink = { tap = \"t\" }\n[vm.uplink]\nnetworks = [\"lan\"]\n");
        has(&config, "[[port]]\nname = \"uplink\"\n");
        has(&config, "[[uplink]]\nname = \"lan.uplink\"\n");
        let file = Path::new("/somewhere/demo/tombolo.toml");
        assert!(Project::parse(file, "[vm.\"lan.uplink\"]\n").is_err());
    }

    #[test]
    fn guests_reach_the_hosts_loopback_if_the_file_says_so() {
        let of = |text: &str| {
            config(&format!("[net.lan]\nuplink = \"user\"\n{text}\n[vm.a]\nnetworks = [\"lan\"]\n"))
        };
        has(&of("host_loopback = true"), "host-loopback = true\n");
        let e =
            Project::parse(Path::new("/somewhere/demo/tombolo.toml"), "[net.lan]\nhost_loopback = true\n")
                .unwrap_err();
        assert!(format!("{e:#}").contains("net.lan.host_loopback belongs to user-mode networking"), "{e:#}");
    }

    #[test]
    fn a_tap_device_is_the_uplink_of_all_vms() {
        let config = config("[net.lan]\nuplink = { tap = \"t\" }\n[vm.a]\nnetworks = [\"lan\"]\n");
        has(&config, "[[uplink]]\nname = \"lan.uplink\"\ntap = \"t\"\n");
        assert!(!config.contains("isolated"), "{config}");
    }
}
