// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options that keep passt from leading its guest to the host's loopback, and name servers all the same.
//!
//! `--no-map-gw` is all it takes since passt knows datagrams by their flows (26 July 2024). With that option older ones (Debian 12,
//! Ubuntu 24.04) lose the guest's answers to datagrams that the host itself sends to a forwarded port, so they forward no UDP ports; and
//! they lead no guest to a name server on the host's loopback, so they are told the servers that systemd-resolved asks.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

use tombolo_brief::child::leave_sockets;

/// The host's name servers, and those that systemd-resolved asks for it.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// The date of the first passt that knows the flows of datagrams, as a number.
const FLOWS: u32 = 20_240_726;
/// Link-local addresses, and so no other host's, at which passt offers the guest a name server of the host's loopback.
const NAME_SERVER: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 2, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0x6a1f, 0x93d2, 0x5c07, 0xb84e)),
];

/// Returns the options for this passt, which forwards these UDP ports, on this host.
///
/// # Errors
/// It is too old for what it is to do; the message says what to do.
pub(crate) fn options(passt: &Path, udp: &[String]) -> io::Result<Vec<String>> {
    let resolvers = RESOLVERS.map(|file| std::fs::read_to_string(file).unwrap_or_default());
    options_of(|| knows_flows(passt), udp, &resolvers.map(|text| servers(&text)))
}

fn options_of(
    knows_flows: impl Fn() -> bool,
    udp: &[String],
    [servers, upstream]: &[Vec<IpAddr>; 2],
) -> io::Result<Vec<String>> {
    let mut options = vec!["--no-map-gw".to_owned()];
    let are_local = !servers.is_empty() && servers.iter().all(IpAddr::is_loopback);
    if udp.is_empty() && !are_local {
        return Ok(options);
    }
    if knows_flows() {
        let is_local = |v4| servers.iter().any(|server| server.is_loopback() && server.is_ipv4() == v4);
        let offered = NAME_SERVER.iter().filter(|address| is_local(address.is_ipv4()));
        options.extend(offered.flat_map(|address| ["--dns-forward".to_owned(), address.to_string()]));
        return Ok(options);
    }
    let lacks = if !udp.is_empty() {
        "it would lose the guest's answers at forwarded UDP ports"
    } else if upstream.iter().all(IpAddr::is_loopback) {
        "it leads the guest to no name server on the host's loopback, and /etc/resolv.conf names no other"
    } else {
        let servers = upstream.iter().filter(|server| !server.is_loopback());
        options.extend(servers.flat_map(|server| ["--dns".to_owned(), server.to_string()]));
        return Ok(options);
    };
    Err(io::Error::other(format!(
        "this passt is older than July 2024: {lacks}; install a newer one (Debian 13 has it), or let the guest reach all of the host's loopback (host-loopback = true, \
         in a compose file host_loopback = true)"
    )))
}

/// Returns the name servers in a resolv.conf(5).
fn servers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().map(str::split_whitespace);
    let words = lines.filter_map(|mut words| (words.next() == Some("nameserver")).then(|| words.next())?);
    words.filter_map(|server| server.parse().ok()).collect()
}

/// Asks passt for its version. One that can't be started is told of when it is to serve.
fn knows_flows(passt: &Path) -> bool {
    let mut command = Command::new(passt);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
    leave_sockets(&mut command);
    command
        .output()
        .is_ok_and(|said| said.status.success() && has_flows(&String::from_utf8_lossy(&said.stdout)))
}

/// Returns whether the passt of this version knows the flows of datagrams. Those of 2025 print their version to a terminal only.
fn has_flows(version: &str) -> bool {
    version.is_empty() || date(version).is_some_and(|date| date >= FLOWS)
}

/// Returns the date in passt's version, as a number like 20230309: "passt 0.0~git20230309.7c7625d-1", "passt 2023_03_09.7c7625d".
fn date(version: &str) -> Option<u32> {
    let first = version.lines().next()?.replace('_', "");
    let digits = first.split(|c: char| !c.is_ascii_digit());
    digits.filter(|run| run.len() == 8 && run.starts_with("20")).find_map(|run| run.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(knows_flows: bool, udp: &[&str], resolvers: [&str; 2]) -> Result<String, String> {
        let udp: Vec<String> = udp.iter().map(|&ports| ports.to_owned()).collect();
        let options = options_of(|| knows_flows, &udp, &resolvers.map(servers));
        options.map(|options| options.join(" ")).map_err(|err| err.to_string())
    }

    #[test]
    fn a_passt_maps_no_gateway_and_an_old_one_forwards_no_udp_ports() {
        let outside = ["# one\nnameserver 192.0.2.1\noptions edns0\n", ""];
        for (knows_flows, udp) in [(true, &[][..]), (true, &["7001:7"]), (false, &[])] {
            assert_eq!(with(knows_flows, udp, outside).unwrap(), "--no-map-gw");
        }
        let refused = with(false, &["7001:7"], outside).unwrap_err();
        assert!(refused.contains("UDP ports; install a newer one"), "{refused}");
    }

    #[test]
    fn a_name_server_on_the_loopback_is_offered_by_a_new_passt_and_those_that_it_asks_by_an_old_one() {
        let resolved = ["nameserver 127.0.0.53\n", "nameserver 192.0.2.9\nnameserver fd00::9\n"];
        assert_eq!(with(true, &[], resolved).unwrap(), "--no-map-gw --dns-forward 169.254.2.2");
        assert_eq!(with(false, &[], resolved).unwrap(), "--no-map-gw --dns 192.0.2.9 --dns fd00::9");
        let mixed = ["nameserver ::1\nnameserver 192.0.2.1\n", ""];
        assert_eq!(with(false, &[], mixed).unwrap(), "--no-map-gw", "the other one is asked");
        let refused = with(false, &[], ["nameserver 127.0.0.1\n", ""]).unwrap_err();
        assert!(refused.contains("no name server on the host's loopback"), "{refused}");
    }

    #[test]
    fn versions_tell_which_passt_knows_flows() {
        for (version, knows) in [
            ("passt unknown version\nCopyright 20250101", false),
            ("passt 0.0~git20230309.7c7625d-1\nCopyright", false),
            ("passt 2024_02_20.1e6f92b\n", false),
            ("passt 2024_07_26.57a21d2\n", true),
            ("passt 0^20240906.g6b38f07-1.fc41.x86_64\n", true),
            ("", true),
        ] {
            assert_eq!(has_flows(version), knows, "{version}");
        }
    }
}
