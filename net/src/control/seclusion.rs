// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way in which a passt is kept from leading its guest to the host's loopback, which depends on its version.
//!
//! Since July 2024 passt knows datagrams by their flows, and `--no-map-gw` is all it takes. With that option older ones (Debian 12
//! has one of 2023) lose the guest's answers to datagrams that the host itself sends to a forwarded port, and offer the guest no
//! name server of the host's loopback. Where there is either, they map their gateways as ever, and the switch's
//! [firewall](crate::uplink::loopback) drops what a guest begins there. It must know these addresses, so passt is told which to take.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tombolo_brief::child::leave_sockets;

use crate::uplink::loopback::{GATEWAY6, Gateway, Mapping, NO_GATEWAY};

/// The host's name servers.
const RESOLVERS: &str = "/etc/resolv.conf";
/// The host's routes (proc_net(5)).
const ROUTES: &str = "/proc/net/route";
/// Flags of a route: it is usable, and leads to a gateway.
const RTF_UP: u16 = 1;
const RTF_GATEWAY: u16 = 2;
/// The date of the first passt that knows the flows of datagrams, 26 July 2024, as a number.
const FLOWS: u32 = 20_240_726;
/// The longest wait for a program that tells its version.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of its answer that are read. The version is in the first line.
const MOST_ANSWER: usize = 4096;

/// The way chosen for a passt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seclusion {
    gateways: [Gateway; 2],
    /// For each of them: a name server of the host listens on the loopback, which the guest asks at this address.
    resolves: [bool; 2],
    /// The gateways that passt maps to the host's loopback. `None`: the keeper tells it to map none.
    mapping: Option<Mapping>,
}

impl Seclusion {
    /// Chooses the way for this program with these forwarded UDP ports, on this host.
    pub fn of(program: &Path, udp: &[String]) -> Self {
        let version = answer(Command::new(program).arg("--version"), TIMEOUT);
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::new(version.is_some_and(|v| knows_flows(&v)), udp, &read(ROUTES), &read(RESOLVERS))
    }

    fn new(knows_flows: bool, udp: &[String], routes: &str, resolvers: &str) -> Self {
        let servers = servers(resolvers);
        let resolves = [true, false].map(|v4| servers.iter().any(|s| s.is_loopback() && s.is_ipv4() == v4));
        // passt leads connections to this address of the loopback, and datagrams to any that its name server has.
        let of = |address: IpAddr, resolves: bool, own: IpAddr| {
            let dns = resolves || servers.contains(&address);
            Gateway { address, dns, tcp_dns: servers.contains(&own) }
        };
        let v4 = gateway(routes).unwrap_or(NO_GATEWAY);
        let gateways = [
            of(v4.into(), resolves[0], Ipv4Addr::LOCALHOST.into()),
            of(GATEWAY6.into(), resolves[1], Ipv6Addr::LOCALHOST.into()),
        ];
        let udp_ports: Vec<_> = udp.iter().flat_map(|ports| guest_ports(ports)).collect();
        let maps = !knows_flows && (!udp_ports.is_empty() || resolves.contains(&true));
        Self { gateways, resolves, mapping: maps.then_some(Mapping { gateways, udp_ports }) }
    }

    /// Returns passt's options.
    pub fn options(&self) -> Vec<String> {
        let mut options = Vec::new();
        if self.mapping.is_none() {
            options.push("--no-map-gw".into());
        }
        for (gateway, resolves) in self.gateways.iter().zip(self.resolves) {
            let address = gateway.address.to_string();
            // A name server on the loopback, or at an address that passt maps to it, is reached by no other way.
            if resolves || gateway.dns && self.mapping.is_some() {
                options.extend(["--dns-forward".into(), address.clone()]);
            }
            if self.mapping.is_some() {
                options.extend(["--gateway".into(), address]);
            }
        }
        options
    }

    /// Returns what passt maps to the loopback.
    pub fn into_mapping(self) -> Option<Mapping> {
        self.mapping
    }
}

/// Returns the guest's ports in an argument of passt's option -u: "8080:80,127.0.0.1/53,60000-60010", "all". passt refuses what
/// can't be read here.
fn guest_ports(argument: &str) -> Vec<RangeInclusive<u16>> {
    let ports = argument.rsplit_once('/').map_or(argument, |(_, ports)| ports);
    let forwarded: Vec<&str> = ports.split(',').filter(|part| !part.starts_with('~')).collect();
    // Exceptions alone imply all others.
    if forwarded.is_empty() || ports == "all" {
        return vec![0..=u16::MAX];
    }
    let ranges = forwarded.into_iter().filter_map(|part| {
        let range = part.split_once(':').map_or(part, |(_, guest)| guest);
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.collect()
}

/// Returns what a program says that ends by itself. None: it can't be started, which is reported when it is to serve; it fails; it
/// runs longer than `limit`; or it leaves behind a process that may still say something.
fn answer(command: &mut Command, limit: Duration) -> Option<String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    leave_sockets(command);
    let mut child = command.spawn().ok()?;
    let output = child.stdout.take()?;
    if !ends(&child, limit) {
        // It may have ended meanwhile.
        let _ended = child.kill();
    }
    let status = child.wait().ok()?;
    rustix::io::ioctl_fionbio(&output, true).ok()?;
    let text = read_all(output).ok()?;
    status.success().then_some(text)
}

/// Reads what a non-blocking pipe holds, up to [`MOST_ANSWER`] bytes.
///
/// # Errors
/// `WouldBlock`: others may still write to it.
fn read_all(pipe: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    pipe.take(MOST_ANSWER as u64).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the end of a child. False: it has not ended after `limit`.
fn ends(child: &Child, limit: Duration) -> bool {
    let Ok(process) = pidfd_open(Pid::from_child(child), PidfdFlags::empty()) else { return false };
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
            Ok(n) => return n > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Returns the name servers in a resolv.conf(5).
fn servers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().map(str::split_whitespace);
    let words = lines.filter_map(|mut words| (words.next() == Some("nameserver")).then(|| words.next())?);
    words.filter_map(|server| server.parse().ok()).collect()
}

/// Returns the gateway of the first default route.
fn gateway(routes: &str) -> Option<Ipv4Addr> {
    routes.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "00000000", gateway, flags, _, _, _, "00000000", ..] = fields[..] else { return None };
        let flags = u16::from_str_radix(flags, 16).ok()?;
        let gateway = u32::from_str_radix(gateway, 16).ok()?;
        // The kernel writes the address as a number in the machine's order.
        (flags & (RTF_UP | RTF_GATEWAY) == RTF_UP | RTF_GATEWAY).then(|| gateway.to_ne_bytes().into())
    })
}

/// Returns whether the passt of this version knows the flows of datagrams. Those of 2025 print their version to a terminal only.
fn knows_flows(version: &str) -> bool {
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

    const HEADING: &str =
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";

    fn hex(address: [u8; 4]) -> String {
        format!("{:08X}", u32::from_ne_bytes(address))
    }

    fn routes() -> String {
        let (net, mask, gateway) = (hex([192, 0, 2, 0]), hex([255, 255, 255, 0]), hex([192, 0, 2, 1]));
        format!(
            "{HEADING}out\t{net}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n\
             tun\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n\
             out\t00000000\t{gateway}\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        )
    }

    fn old(udp: &[&str], resolvers: &str) -> Seclusion {
        let udp: Vec<String> = udp.iter().map(|&ports| ports.to_owned()).collect();
        Seclusion::new(false, &udp, &routes(), resolvers)
    }

    #[test]
    fn passt_maps_its_gateways_only_if_it_is_old_and_forwards_datagrams() {
        let ports = ["7001:7".to_owned()];
        for (knows_flows, udp) in [(true, &[][..]), (true, &ports), (false, &[])] {
            let none = Seclusion::new(knows_flows, udp, &routes(), "nameserver 192.0.2.1\n");
            assert_eq!(none.options(), ["--no-map-gw"]);
            assert_eq!(none.into_mapping(), None);
        }
        let old = old(&["7001:7"], "nameserver 198.51.100.1\n");
        let gateways = ["192.0.2.1".to_owned(), GATEWAY6.to_string()];
        assert_eq!(old.options(), ["--gateway", &gateways[0], "--gateway", &gateways[1]]);
        let mapping = old.into_mapping().unwrap();
        assert_eq!(mapping.gateways.map(|g| g.address.to_string()), gateways);
        assert_eq!(mapping.udp_ports, [7..=7]);
    }

    #[test]
    fn without_a_gateway_of_the_host_passt_is_given_one_that_is_no_other_hosts() {
        for routes in [HEADING, "", "tun\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n"] {
            assert_eq!(gateway(routes), None);
        }
        let old = Seclusion::new(false, &["7".into()], HEADING, "");
        assert_eq!(old.options()[..2], ["--gateway", "169.254.2.2"]);
    }

    #[test]
    fn a_name_server_on_the_loopback_or_at_a_mapped_gateway_is_reached_through_passt() {
        let allowed = |s: Seclusion| s.into_mapping().unwrap().gateways.map(|g| (g.dns, g.tcp_dns));
        let local = old(&[], "# one\nnameserver 127.0.0.53\noptions edns0\n");
        assert_eq!(local.options()[..4], ["--dns-forward", "192.0.2.1", "--gateway", "192.0.2.1"]);
        assert_eq!(local.mapping.as_ref().unwrap().udp_ports, []);
        assert_eq!(allowed(local), [(true, false), (false, false)], "connections would lead to 127.0.0.1");
        assert_eq!(allowed(old(&[], "nameserver 127.0.0.1\n")), [(true, true), (false, false)]);
        let router = old(&["7"], "nameserver 192.0.2.1\nnameserver ::1\n");
        assert_eq!(allowed(router), [(true, false), (true, true)]);
        let later = |resolvers| Seclusion::new(true, &[], &routes(), resolvers).options();
        assert_eq!(later("nameserver 192.0.2.1\n"), ["--no-map-gw"]);
        assert_eq!(later("nameserver 127.0.0.1\n"), ["--no-map-gw", "--dns-forward", "192.0.2.1"]);
    }

    #[test]
    fn the_guests_ports_are_those_behind_the_hosts() {
        assert_eq!(guest_ports("8080:80"), [80..=80]);
        assert_eq!(guest_ports("22,25-30,40-41:50-51"), [22..=22, 25..=30, 50..=51]);
        assert_eq!(guest_ports("192.0.2.1%eth0/22:23"), [23..=23]);
        assert_eq!(guest_ports("::1/7002:7"), [7..=7]);
        assert_eq!(guest_ports("2000-5000,~3000-3010"), [2000..=5000]);
        assert_eq!(guest_ports("127.0.0.1/~20-30"), [0..=u16::MAX]);
        assert_eq!(guest_ports("all"), [0..=u16::MAX]);
        assert_eq!(guest_ports("none"), []);
    }

    #[test]
    fn a_program_that_does_not_end_or_leaves_a_process_behind_says_nothing() {
        let says = |script: &str, limit| answer(Command::new("sh").args(["-c", script]), limit);
        let long = Duration::from_secs(600);
        assert_eq!(says("echo passt 2024_07_26.57a21d2", long).unwrap(), "passt 2024_07_26.57a21d2\n");
        assert_eq!(says("exit 0", long).unwrap(), "");
        assert_eq!(says("echo passt 2024_07_26.57a21d2; exit 1", long), None);
        assert_eq!(says("exec sleep 1000", Duration::from_millis(50)), None);
        assert_eq!(says("exec yes", Duration::from_millis(50)), None);
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        assert_eq!(says(&format!("sleep 1000 & echo $! > {}", pid.display()), long), None);
        let pid = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
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
            assert_eq!(knows_flows(version), knows, "{version}");
        }
    }
}
