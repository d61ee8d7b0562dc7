// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests behind passt and the host's loopback addresses: what a guest begins there, and what it answers. Each test has a network
//! namespace of its own. Needs iproute2, util-linux and passt.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use common::namespace::alone;
use common::network::{ethernet, ipv4, sh, sum};
use common::passt::{configured, forwards_datagrams, host, offer};
use common::program::Switch;
use common::{Rig, wait_for};
use tombolo_net::frames::frame::Mac;
use tombolo_net::uplink::Link;
use tombolo_net::uplink::packet::Packet as Interface;
use tombolo_net_driver::Nic;

const GATEWAY: [u8; 4] = [192, 0, 2, 1];
/// The host's address, and the guest's.
const OWN: [u8; 4] = [192, 0, 2, 7];
/// A port of the host at which services listen.
const PORT: u16 = 5555;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// A packet of TCP or UDP, with its checksum.
fn packet(from: IpAddr, to: IpAddr, protocol: u8, mut body: Vec<u8>) -> (u16, Vec<u8>) {
    let at = if protocol == TCP { 16 } else { 6 };
    body[at..at + 2].fill(0);
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let (from, to) = (octets(from), octets(to));
    let len = (body.len() as u16).to_be_bytes();
    let check = sum(&[&from[..], &to, &[0, protocol], &len, &body].concat());
    body[at..at + 2].copy_from_slice(&check);
    if let (Ok(from), Ok(to)) = (from[..].try_into(), to[..].try_into()) {
        return (0x800, ipv4(to, from, protocol, &body));
    }
    (0x86dd, [&[0x60, 0, 0, 0][..], &len, &[protocol, 64], &from, &to, &body].concat())
}

fn segment(from: u16, to: u16, [sequence, acknowledged]: [u32; 2], flags: u8, data: &[u8]) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
    let numbers = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
    [&ports[..], &numbers, &[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0], data].concat()
}

fn datagram(from: u16, to: u16, data: &[u8]) -> Vec<u8> {
    let len = (8 + data.len() as u16).to_be_bytes();
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &len, &[0, 0], data].concat()
}

/// A guest with the address that passt has given it.
struct Guest {
    nic: Nic,
    own: Mac,
    passt: Mac,
}

/// A received packet of TCP or UDP.
struct Packet {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    body: Vec<u8>,
}

impl Packet {
    fn read(frame: &[u8]) -> Option<Self> {
        let ip = &frame[14..];
        let (from, to, protocol, body): (IpAddr, IpAddr, _, _) = match frame[12..14] {
            [8, 0] => {
                let of = |at: usize| <[u8; 4]>::try_from(&ip[at..at + 4]).unwrap().into();
                (of(12), of(16), ip[9], &ip[20..])
            }
            [0x86, 0xdd] => {
                let of = |at: usize| <[u8; 16]>::try_from(&ip[at..at + 16]).unwrap().into();
                (of(8), of(24), ip[6], &ip[40..])
            }
            _ => return None,
        };
        let body = body.to_vec();
        matches!(protocol, TCP | UDP).then_some(Self { from, to, protocol, body })
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.body[at], self.body[at + 1]])
    }

    fn long(&self, at: usize) -> u32 {
        u32::from(self.word(at)) << 16 | u32::from(self.word(at + 2))
    }
}

impl Guest {
    fn new(switch: &Switch) -> Self {
        let (mut nic, own) = (switch.guest(0), Rig::mac(1));
        let passt = offer(&mut nic, own)[6..12].try_into().map(Mac).unwrap();
        let mut guest = Self { nic, own, passt };
        // passt sends to the link-local address that it has seen.
        let hello = datagram(9, 9, b"hello");
        guest.send(guest.link_local(), "ff02::1".parse().unwrap(), UDP, hello);
        guest
    }

    fn link_local(&self) -> IpAddr {
        tombolo_net::policy::spoof::link_local(self.own).into()
    }

    fn send(&mut self, from: IpAddr, to: IpAddr, protocol: u8, body: Vec<u8>) {
        let (ethertype, packet) = packet(from, to, protocol, body);
        let frame = ethernet(self.passt, self.own, ethertype, &packet);
        wait_for("room", || self.nic.send(&frame).then_some(()));
    }

    /// A SYN and a datagram to port [`PORT`] of this address.
    fn probe(&mut self, to: IpAddr) {
        let from = if to.is_ipv4() { OWN.into() } else { self.link_local() };
        self.send(from, to, TCP, segment(40_000, PORT, [1, 0], SYN, &[]));
        self.send(from, to, UDP, datagram(40_000, PORT, b"probe"));
    }

    /// Sends a datagram to an address of the host at which the guest may reach it, until it is there.
    fn mark(&mut self, to: SocketAddr) {
        // A process that the switch starts has a copy of the socket of the mark before until it is executed.
        let socket = wait_for("the host's port", || UdpSocket::bind(to).ok());
        socket.set_nonblocking(true).unwrap();
        let from = if to.is_ipv4() { OWN.into() } else { "fd00:9::2".parse().unwrap() };
        let mut sent = Instant::now() - Duration::from_secs(1);
        wait_for("a datagram at the host", || {
            if sent.elapsed() > Duration::from_millis(200) {
                self.send(from, to.ip(), UDP, datagram(40_001, to.port(), b"mark"));
                sent = Instant::now();
            }
            self.nic.receive();
            socket.recv(&mut [0; 16]).ok()
        });
    }

    /// Sends back what comes by TCP and UDP, until `done`.
    fn echo<T>(&mut self, mut done: impl FnMut() -> Option<T>) -> T {
        wait_for("an answer", || {
            if let Some(p) = self.nic.receive().and_then(|(_, frame)| Packet::read(&frame)) {
                let (peer, port) = (p.word(0), p.word(2));
                if p.protocol == UDP && port == 7 {
                    self.send(p.to, p.from, UDP, datagram(port, peer, &p.body[8..]));
                } else if p.protocol == TCP && port == 7 {
                    let data = &p.body[usize::from(p.body[12] >> 4) * 4..];
                    if p.body[13] & SYN != 0 {
                        let numbers = [1000, p.long(4).wrapping_add(1)];
                        self.send(p.to, p.from, TCP, segment(port, peer, numbers, SYN | ACK, &[]));
                    } else if !data.is_empty() {
                        let numbers = [p.long(8), p.long(4).wrapping_add(data.len() as u32)];
                        self.send(p.to, p.from, TCP, segment(port, peer, numbers, PSH | ACK, data));
                    }
                }
            }
            done()
        })
    }
}

/// The services of the host's loopback, by TCP and UDP over both versions of IP.
struct Services {
    tcp: Vec<TcpListener>,
    udp: Vec<UdpSocket>,
}

impl Services {
    fn new() -> Self {
        let places = ["127.0.0.1", "::1"].map(|ip| SocketAddr::new(ip.parse().unwrap(), PORT));
        let tcp: Vec<_> = places.iter().map(|at| TcpListener::bind(at).unwrap()).collect();
        let udp: Vec<_> = places.iter().map(|at| UdpSocket::bind(at).unwrap()).collect();
        tcp.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        udp.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        Self { tcp, udp }
    }

    /// The services that were reached.
    fn reached(&self) -> Vec<String> {
        let is_there = |kind: ErrorKind| assert_eq!(kind, ErrorKind::WouldBlock);
        let tcp = self.tcp.iter().filter(|s| s.accept().map_err(|e| is_there(e.kind())).is_ok());
        let tcp: Vec<_> = tcp.map(|s| format!("tcp {}", s.local_addr().unwrap())).collect();
        let udp = self.udp.iter().filter(|s| s.recv(&mut [0; 64]).map_err(|e| is_there(e.kind())).is_ok());
        let udp: Vec<_> = udp.map(|s| format!("udp {}", s.local_addr().unwrap())).collect();
        [tcp, udp].concat()
    }
}

/// A host with a way out by both versions of IP.
fn dual_host() {
    host();
    sh("ip addr add fd00:9::2/64 dev out nodad; ip -6 route add default via fd00:9::1
        ip -6 addr show dev out scope link | grep -q fe80");
}

#[test]
fn a_guest_reaches_nothing_on_the_hosts_loopback_unless_it_may() {
    alone("a_guest_reaches_nothing_on_the_hosts_loopback_unless_it_may", || {
        dual_host();
        let services = Services::new();
        let dir = tempfile::tempdir().unwrap();
        let loopback = ["127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "::", "::127.0.0.1", "::ffff:127.0.0.1"];
        for (setting, all) in [("", false), ("host-loopback = true", true)] {
            let file = format!("[[uplink]]\nname = 'out'\nuser = 'passt'\n{setting}\n");
            let switch = configured(dir.path(), &file);
            let mut guest = Guest::new(&switch);
            let reached = |guest: &mut Guest| {
                // passt has handled the packets before these.
                guest.mark("192.0.2.7:6000".parse().unwrap());
                guest.mark("[fd00:9::2]:6000".parse().unwrap());
                services.reached()
            };
            for address in loopback {
                guest.probe(address.parse().unwrap());
                assert_eq!(reached(&mut guest), [""; 0], "at {address}: {}", switch.log());
            }
            for (n, address) in ["192.0.2.1", "fd00:9::1"].into_iter().enumerate() {
                guest.probe(address.parse().unwrap());
                let expected =
                    [&services.tcp[n].local_addr().unwrap(), &services.udp[n].local_addr().unwrap()];
                let expected = if all {
                    vec![format!("tcp {}", expected[0]), format!("udp {}", expected[1])]
                } else {
                    vec![]
                };
                assert_eq!(reached(&mut guest), expected, "at {address}, '{setting}': {}", switch.log());
            }
        }
    });
}

/// Sends a datagram from a neighbour of the host to this address of it.
fn send_from_neighbour(from: IpAddr, to: IpAddr, body: Vec<u8>) {
    let link = sh("ip -brief link show out");
    let mac = link.split_whitespace().nth(2).and_then(|mac| mac.parse().ok()).unwrap();
    let (ethertype, packet) = packet(from, to, UDP, body);
    let frame = ethernet(mac, Rig::mac(99), ethertype, &packet);
    let neighbour = Interface::over(Interface::open("far").unwrap());
    let mut bytes = [vec![0; neighbour.header()], frame].concat();
    let piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    neighbour.send(&[piece]).unwrap();
}

#[test]
fn a_neighbour_with_the_gateways_address_opens_no_way_to_the_hosts_loopback() {
    const FROM: u16 = 4321;
    alone("a_neighbour_with_the_gateways_address_opens_no_way_to_the_hosts_loopback", || {
        dual_host();
        let services = Services::new();
        let dir = tempfile::tempdir().unwrap();
        resolvers(dir.path(), "nameserver 198.51.100.1\n");
        let fd00: IpAddr = "fd00:9::2".parse().unwrap();
        let with_ports = "udp-ports = ['7001:7']";
        for setting in ["", with_ports].into_iter().take(1 + usize::from(forwards_datagrams())) {
            let file = format!("[[uplink]]\nname = 'out'\nuser = 'passt'\n{setting}\n");
            let switch = configured(dir.path(), &file);
            let mut guest = Guest::new(&switch);
            for (gateway, own, peer) in [
                (GATEWAY.into(), IpAddr::from(OWN), "192.0.2.50"),
                ("fe80::1".parse().unwrap(), fd00, "2001:db8::1"),
            ] {
                let peer: IpAddr = peer.parse().unwrap();
                // passt has a socket of the host's port once the guest has sent from it, and hands on what comes there, in order.
                let mut sent = Instant::now() - Duration::from_secs(1);
                wait_for("the peer's answer", || {
                    if sent.elapsed() > Duration::from_millis(200) {
                        guest.send(own, peer, UDP, datagram(FROM, 1, b"question"));
                        send_from_neighbour(gateway, own, datagram(PORT, FROM, b"opens"));
                        send_from_neighbour(peer, own, datagram(1, FROM, b"answer"));
                        sent = Instant::now();
                    }
                    let (_, frame) = guest.nic.receive()?;
                    Packet::read(&frame).filter(|p| p.from == peer && p.body.ends_with(b"answer"))
                });
                let from = if gateway.is_ipv4() { own } else { guest.link_local() };
                guest.send(from, gateway, UDP, datagram(FROM, PORT, b"probe"));
                // passt has handled the probe before these.
                guest.mark("192.0.2.7:6000".parse().unwrap());
                guest.mark("[fd00:9::2]:6000".parse().unwrap());
                assert_eq!(services.reached(), [""; 0], "at {gateway}, '{setting}': {}", switch.log());
            }
        }
    });
}

/// Exchanges datagrams with the guest from this address, more than once.
fn exchange(guest: &mut Guest, from: &str, to: &str) {
    let socket = UdpSocket::bind(from).unwrap();
    socket.connect(to).unwrap();
    socket.set_nonblocking(true).unwrap();
    for round in 0..3u8 {
        let mut sent = Instant::now() - Duration::from_secs(1);
        guest.echo(|| {
            if sent.elapsed() > Duration::from_millis(200) {
                // passt may not listen yet.
                let _refused = socket.send(&[round; 100]);
                sent = Instant::now();
            }
            let mut answer = [0; 200];
            socket.recv(&mut answer).ok().filter(|n| answer[..*n] == [round; 100])
        });
    }
}

/// Sends data to the guest over a connection to this address, and receives them back.
fn converse(guest: &mut Guest, to: &str) {
    let mut stream = guest.echo(|| TcpStream::connect(to).ok());
    stream.write_all(b"to and fro").unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut answer = Vec::new();
    guest.echo(|| {
        let mut bytes = [0; 100];
        answer.extend(stream.read(&mut bytes).map(|n| bytes[..n].to_vec()).unwrap_or_default());
        (answer == b"to and fro").then_some(())
    });
}

#[test]
fn ports_of_the_host_are_answered_for_clients_on_the_host_and_those_of_udp_refused_with_an_old_passt() {
    alone(
        "ports_of_the_host_are_answered_for_clients_on_the_host_and_those_of_udp_refused_with_an_old_passt",
        || {
            dual_host();
            let dir = tempfile::tempdir().unwrap();
            let ports = "['7001:7', '::1/7002:7']";
            let by_tcp = format!("[[uplink]]\nname = 'out'\nuser = 'passt'\ntcp-ports = {ports}\n");
            let by_both = format!("{by_tcp}udp-ports = {ports}\n");
            let switch = if forwards_datagrams() {
                configured(dir.path(), &by_both)
            } else {
                let refused = configured(dir.path(), &by_both);
                wait_for("a refusal", || refused.log().contains("older than July 2024").then_some(()));
                configured(dir.path(), &by_tcp)
            };
            let mut guest = Guest::new(&switch);
            for (from, to) in [
                ("127.0.0.1:0", "127.0.0.1:7001"),
                ("192.0.2.7:0", "192.0.2.7:7001"),
                ("127.0.0.1:40000", "127.0.0.1:7001"),
                ("[::1]:0", "[::1]:7002"),
            ] {
                if forwards_datagrams() {
                    exchange(&mut guest, from, to);
                }
            }
            for to in ["127.0.0.1:7001", "192.0.2.7:7001", "[::1]:7002"] {
                converse(&mut guest, to);
            }
        },
    );
}

/// Makes these the host's name servers.
fn resolvers(dir: &Path, text: &str) {
    let file = dir.join("resolv.conf");
    std::fs::write(&file, text).unwrap();
    sh(&format!("mount --bind {} /etc/resolv.conf", file.display()));
}

#[test]
fn a_guest_asks_the_name_server_on_the_hosts_loopback_or_those_that_this_asks() {
    alone("a_guest_asks_the_name_server_on_the_hosts_loopback_or_those_that_this_asks", || {
        dual_host();
        let dir = tempfile::tempdir().unwrap();
        sh("mount -t tmpfs none /run; mkdir -p /run/systemd/resolve
            echo nameserver 192.0.2.53 >/run/systemd/resolve/resolv.conf");
        resolvers(dir.path(), "nameserver 127.0.0.53\n");
        let server = UdpSocket::bind("127.0.0.53:53").unwrap();
        server.set_nonblocking(true).unwrap();
        let switch = configured(dir.path(), "[[uplink]]\nname = 'out'\nuser = 'passt'\n");
        let mut guest = Guest::new(&switch);
        let offered = offer(&mut guest.nic, guest.own);
        let offers = |address: [u8; 4]| {
            let option = [&[6, 4][..], &address].concat();
            assert!(offered.windows(option.len()).any(|bytes| bytes == option), "a name server: {offered:?}");
        };
        if !forwards_datagrams() {
            return offers([192, 0, 2, 53]);
        }
        let address = [169, 254, 2, 2];
        offers(address);
        guest.send(OWN.into(), address.into(), UDP, datagram(40_000, 53, b"question"));
        let mut question = [0; 64];
        let (n, client) = wait_for("a question", || server.recv_from(&mut question).ok());
        assert_eq!(&question[..n], b"question");
        server.send_to(b"answer", client).unwrap();
        let answer = wait_for("an answer", || {
            let frame = guest.nic.receive().map(|(_, frame)| frame);
            frame.as_deref().and_then(Packet::read).filter(|p| p.protocol == UDP && p.word(0) == 53)
        });
        assert_eq!((answer.from, &answer.body[8..]), (address.into(), &b"answer"[..]));
    });
}
