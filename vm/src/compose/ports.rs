// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ports =`: ports of the host that lead to a VM. passt does the forwarding, so the VM is alone in a network with `uplink = "user"`: passt knows
//! one address to forward to.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

use super::check::Fault;
use super::network::Uplink;
use super::{Compose, VmSpec};

/// A port of the host that leads to a port of a VM: "8080:80", "127.0.0.1:2222:22/tcp", "5353:53/udp".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The host's address; none: all of them.
    pub address: Option<IpAddr>,
    /// The host's port.
    pub host: u16,
    /// The VM's port.
    pub guest: u16,
    /// The protocol that is forwarded.
    pub protocol: Protocol,
}

/// The protocol of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(IpAddr::V6(address)) => write!(f, "[{address}]:")?,
            Some(address) => write!(f, "{address}:")?,
            None => {}
        }
        write!(f, "{}:{}/{}", self.host, self.guest, self.protocol)
    }
}

impl FromStr for Forward {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no forwarded port; write HOST:GUEST, such as \"8080:80\", \"127.0.0.1:2222:22/tcp\" or \"5353:53/udp\""
            )
        };
        let (rest, protocol) = match text.rsplit_once('/') {
            None | Some((_, "tcp")) => (text.trim_end_matches("/tcp"), Protocol::Tcp),
            Some((rest, "udp")) => (rest, Protocol::Udp),
            Some(_) => return Err(wrong()),
        };
        let (rest, guest) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let (address, host) = match rest.rsplit_once(':') {
            Some((address, host)) => {
                let bare = address.trim_start_matches('[').trim_end_matches(']');
                (Some(bare.parse().map_err(|_| wrong())?), host)
            }
            None => (None, rest),
        };
        let port = |text: &str| text.parse().ok().filter(|&port: &u16| port > 0).ok_or_else(wrong);
        Ok(Forward { address, host: port(host)?, guest: port(guest)?, protocol })
    }
}

impl Serialize for Forward {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Forward {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}

impl Forward {
    /// As passt's options -t and -u have it.
    #[must_use]
    pub fn for_passt(&self) -> String {
        match self.address {
            Some(address) => format!("{address}/{}:{}", self.host, self.guest),
            None => format!("{}:{}", self.host, self.guest),
        }
    }

    fn meets(&self, other: &Forward) -> bool {
        let same = self.protocol == other.protocol && self.host == other.host;
        // A port of all addresses of a family covers each of them. A port of all addresses of IPv6 also covers those of IPv4, as on the host.
        let covers = |one: Option<IpAddr>, other: Option<IpAddr>| match (one, other) {
            (None, _) => true,
            (Some(one), other) => {
                one.is_unspecified() && (one.is_ipv6() || other.is_some_and(|a| a.is_ipv4()))
            }
        };
        let (one, other) = (self.address, other.address);
        same && (one == other || covers(one, other) || covers(other, one))
    }

    /// Tries to bind the host's port.
    fn try_out(&self) -> io::Result<()> {
        let bind = |address: SocketAddr| match self.protocol {
            Protocol::Tcp => TcpListener::bind(address).map(drop),
            Protocol::Udp => UdpSocket::bind(address).map(drop),
        };
        match self.address {
            Some(address) => bind((address, self.host).into()),
            None => {
                bind((Ipv4Addr::UNSPECIFIED, self.host).into())?;
                match bind((Ipv6Addr::UNSPECIFIED, self.host).into()) {
                    // A host without IPv6.
                    Err(e) if e.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) => {
                        Ok(())
                    }
                    Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => Ok(()),
                    bound => bound,
                }
            }
        }
    }
}

/// The network through which a VM's ports are forwarded: its one with user-mode networking.
#[must_use]
pub fn network<'a>(compose: &Compose, vm: &'a VmSpec) -> Option<&'a str> {
    let by_user = |net: &&String| compose.net.get(*net).is_some_and(|spec| spec.uplink == Some(Uplink::User));
    vm.networks.0.keys().find(by_user).map(String::as_str)
}

/// The ports that are forwarded through a network.
pub fn through<'a>(compose: &'a Compose, net: &'a str) -> impl Iterator<Item = &'a Forward> {
    let uses = move |vm: &&VmSpec| network(compose, vm) == Some(net);
    compose.vm.values().filter(uses).flat_map(|vm| &vm.ports)
}

/// Checks what needs nothing from the host.
pub(super) fn check(compose: &Compose) -> Result<(), Fault> {
    let fail = |vm: &str, message: String| Err((format!("vm.{vm}"), "ports".to_owned(), message));
    let mut seen: Vec<(&str, &Forward)> = Vec::new();
    for (name, vm) in compose.vm.iter().filter(|(_, vm)| !vm.ports.is_empty()) {
        let Some(net) = network(compose, vm) else {
            return fail(
                name,
                format!(
                    "vm.{name}.ports: ports are forwarded by user-mode networking; add [net.{name}] with uplink = \"user\", and networks = \
                     [\"{name}\"] to the VM"
                ),
            );
        };
        let other = compose.vm.iter().find(|(n, vm)| *n != name && vm.networks.0.contains_key(net));
        if let Some((other, _)) = other {
            return fail(
                name,
                format!(
                    "vm.{name}.ports: vm.{other} is in the network '{net}' too, and passt forwards to one VM only; give one of them a network \
                     of its own with uplink = \"user\""
                ),
            );
        }
        for forward in &vm.ports {
            if let Some((owner, first)) = seen.iter().find(|(_, other)| other.meets(forward)) {
                return fail(
                    name,
                    format!(
                        "vm.{name}.ports: {forward} and {first} of vm.{owner} are the same port of the host"
                    ),
                );
            }
            seen.push((name, forward));
        }
    }
    Ok(())
}

/// Looks whether the ports of the host are free that a VM wants.
///
/// # Errors
/// Names the port and the remedy.
pub fn try_out(name: &str, spec: &VmSpec) -> anyhow::Result<()> {
    for forward in &spec.ports {
        let (host, protocol) = (forward.host, forward.protocol);
        forward.try_out().map_err(|e| match e.kind() {
            io::ErrorKind::AddrInUse => anyhow::anyhow!(
                "vm.{name}.ports: {protocol} port {host} of the host is in use; 'ss -lp --{protocol} sport = {host}' says by whom. Choose another"
            ),
            io::ErrorKind::PermissionDenied => anyhow::anyhow!(
                "vm.{name}.ports: this user may not have the host's port {host}; choose one from 1024 on, or as root: sysctl \
                 net.ipv4.ip_unprivileged_port_start={host}"
            ),
            io::ErrorKind::AddrNotAvailable => anyhow::anyhow!(
                "vm.{name}.ports: the host has no address {}; 'ip address' lists those it has",
                forward.address.map(|a| a.to_string()).unwrap_or_default()
            ),
            _ => anyhow::anyhow!("vm.{name}.ports: {forward} can't be had: {e}"),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use std::path::Path;

    fn error(text: &str) -> String {
        let parsed = Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text);
        parsed.expect_err("must be refused").to_string()
    }

    const NET: &str = "[net.out]\nuplink = \"user\"\n";

    #[test]
    fn a_port_is_read_and_said_to_passt() {
        for (text, again, passt) in [
            ("8080:80", "8080:80/tcp", "8080:80"),
            ("127.0.0.1:2222:22/tcp", "127.0.0.1:2222:22/tcp", "127.0.0.1/2222:22"),
            ("5353:53/udp", "5353:53/udp", "5353:53"),
            ("[::1]:1:2", "[::1]:1:2/tcp", "::1/1:2"),
        ] {
            let forward: Forward = text.parse().unwrap();
            assert_eq!((forward.to_string().as_str(), forward.for_passt().as_str()), (again, passt));
        }
        for wrong in ["80", "0:80", "80:0", "70000:1", "a:80", "80:80/sctp", "localhost:80:80", "80:", ":80"]
        {
            let e = wrong.parse::<Forward>().expect_err(wrong);
            assert!(e.contains("is no forwarded port"), "{e}");
        }
    }

    #[test]
    fn ports_want_a_network_of_the_vms_own_with_user_mode_networking() {
        let e = error("[vm.web]\nports = [\"8080:80\"]\n");
        assert!(e.contains(":2: vm.web.ports: ") && e.contains("[net.web] with uplink = \"user\""), "{e}");
        let e = error(&format!(
            "{NET}[vm.web]\nnetworks = [\"out\"]\nports = [\"8080:80\"]\n[vm.b]\nnetworks = [\"out\"]\n"
        ));
        assert!(e.contains(":5: vm.web.ports: vm.b is in the network 'out' too"), "{e}");
    }

    #[test]
    fn a_port_of_the_host_leads_to_one_vm() {
        let two = |a: &str, b: &str| {
            error(&format!(
                "{NET}[net.two]\nuplink = \"user\"\n[vm.a]\nnetworks = [\"out\"]\nports = [\"{a}\"]\n[vm.b]\nnetworks = [\"two\"]\nports = [\"{b}\"]\n"
            ))
        };
        for (a, b) in [("0.0.0.0:8080:80", "127.0.0.1:8080:81"), ("[::1]:8080:80", "[::]:8080:81")] {
            assert!(two(a, b).contains("are the same port of the host"), "{a} {b}");
        }
        let e = two("8080:80", "127.0.0.1:8080:81");
        assert!(
            e.contains(":10: vm.b.ports: 127.0.0.1:8080:81/tcp and 8080:80/tcp of vm.a are the same port"),
            "{e}"
        );
        let fine = "[net.out]\nuplink = \"user\"\n[vm.a]\nnetworks = [\"out\"]\nports = [\"127.0.0.1:53:53\", \"127.0.0.2:53:53\", \"53:53/udp\"]\n";
        let project = Project::parse(Path::new("/somewhere/demo/tombolo.toml"), fine).unwrap();
        assert_eq!(through(&project.compose, "out").count(), 3);
    }

    #[test]
    fn a_port_that_is_in_use_is_told_with_its_number() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let spec: VmSpec = toml::from_str(&format!("ports = [\"{port}:80\"]")).unwrap();
        let e = try_out("a", &spec).unwrap_err().to_string();
        assert!(e.contains(&format!("tcp port {port} of the host is in use")), "{e}");
        drop(taken);
        try_out("a", &spec).unwrap();
        let elsewhere: VmSpec = toml::from_str("ports = [\"192.0.2.1:8080:80\"]").unwrap();
        assert!(try_out("a", &elsewhere).unwrap_err().to_string().contains("has no address 192.0.2.1"));
    }
}
