// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program as the DHCP and IPv6 server of its guests.

mod common;

use std::net::Ipv6Addr;

use common::program::Switch;
use common::talk::{group6, ipv6};
use common::{Rig, wait_for};
use serde_json::{Value, json};
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::frames::frame::Mac;
use tombolo_net_driver::{Nic, NicConfig};

const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const ACK: u8 = 5;
const NAK: u8 = 6;
const SERVER: [u8; 4] = [10, 86, 0, 1];

fn start() -> Switch {
    let config = tempfile::NamedTempFile::new().unwrap();
    let text = "[dhcp]\naddress = '10.86.0.1/24'\nrouter = '10.86.0.254'\ndns = ['9.9.9.9']\n";
    std::fs::write(config.path(), text).unwrap();
    Switch::start(0, &["--config", config.path().to_str().unwrap()])
}

fn add(switch: &Switch, n: usize, more: &Value) -> anyhow::Result<()> {
    let socket = switch.dir.path().join(format!("vm{n}"));
    let mut port = json!({ "name": format!("vm{n}"), "socket": socket, "macs": [Rig::mac(n)] });
    port.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask::<serde_json::Value>(&switch.control(), &Request::Add { port: serde_json::from_value(port).unwrap() })
        .map(drop)
}

fn guest(switch: &Switch, n: usize) -> Nic {
    let mut nic = Nic::new(NicConfig::default()).unwrap();
    nic.connect(&switch.dir.path().join(format!("vm{n}"))).unwrap();
    nic
}

/// A frame with a DHCP message between these ports.
fn message(from: Mac, ports: [u8; 4], op: u8, options: &[u8]) -> Vec<u8> {
    let mut body = vec![0; 240];
    body[..8].copy_from_slice(&[op, 1, 6, 0, 9, 9, 9, 9]);
    body[28..34].copy_from_slice(&from.0);
    body[236..].copy_from_slice(&[0x63, 0x82, 0x53, 0x63]);
    body.extend(options);
    body.push(255);
    let udp = [&ports[..], &((8 + body.len()) as u16).to_be_bytes(), &[0, 0], &body].concat();
    let len = ((20 + udp.len()) as u16).to_be_bytes();
    let ip = [&[0x45, 0][..], &len, &[0, 0, 0, 0, 64, 17, 0, 0], &[0; 4], &[255; 4]].concat();
    [&[0xff; 6][..], &from.0, &[8, 0], &ip, &udp].concat()
}

/// Returns the answer to the guest: the type and the address.
fn asks(nic: &mut Nic, mac: Mac, options: &[u8]) -> (u8, [u8; 4]) {
    assert!(nic.send(&message(mac, [0, 68, 0, 67], 1, options)));
    let reply =
        wait_for("an answer", || nic.receive().map(|(_, f)| f).filter(|f| f[34..38] == [0, 67, 0, 68]));
    assert_eq!((&reply[..6], &reply[26..30], &reply[282..284]), (&mac.0[..], &SERVER[..], &[53, 1][..]));
    (reply[284], reply[58..62].try_into().unwrap())
}

#[test]
fn each_guest_is_given_its_own_address_and_no_other() {
    let switch = start();
    add(&switch, 1, &json!({ "address": "10.86.0.5" })).unwrap();
    // The address of a port's policy is also its lease.
    add(&switch, 2, &json!({ "ips": ["fd00::6", "10.86.0.6"], "isolated": true })).unwrap();
    for (n, address) in [(1, [10, 86, 0, 5]), (2, [10, 86, 0, 6])] {
        let mut nic = guest(&switch, n);
        assert_eq!(asks(&mut nic, Rig::mac(n), &[53, 1, DISCOVER]), (OFFER, address));
        let wants = |ip: [u8; 4]| [&[53, 1, REQUEST, 54, 4][..], &SERVER, &[50, 4], &ip].concat();
        assert_eq!(asks(&mut nic, Rig::mac(n), &wants(address)), (ACK, address));
        assert_eq!(asks(&mut nic, Rig::mac(n), &wants([10, 86, 0, 7])), (NAK, [0; 4]));
    }
    for (more, words) in [
        (json!({ "address": "10.86.0.5" }), "10.86.0.5 is given to port vm1 already"),
        (json!({ "address": "10.86.1.5" }), "a guest can't have 10.86.1.5"),
        (json!({ "address": "10.86.0.1" }), "a guest can't have 10.86.0.1"),
    ] {
        let said = add(&switch, 3, &more).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    }
    // Removing a port frees its address; the service itself stays.
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "vm1".into() }).unwrap();
    add(&switch, 3, &json!({ "address": "10.86.0.5" })).unwrap();
    assert_eq!(asks(&mut guest(&switch, 3), Rig::mac(3), &[53, 1, DISCOVER]), (OFFER, [10, 86, 0, 5]));
    let said = ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "switch.dhcp".into() })
        .unwrap_err()
        .to_string();
    assert!(said.contains("the switch's own service"), "{said}");
}

#[test]
fn a_guest_that_plays_the_server_reaches_nobody() {
    let switch = start();
    add(&switch, 1, &json!({ "address": "10.86.0.5" })).unwrap();
    add(&switch, 2, &json!({ "router": true })).unwrap();
    let (mut rogue, mut victim, mut router) = (switch.guest(0), guest(&switch, 1), guest(&switch, 2));
    let offer = |mac| message(mac, [0, 67, 0, 68], 2, &[53, 1, OFFER]);
    assert!(rogue.send(&offer(Rig::mac(0))));
    wait_for("the drop", || (switch.port("vm")?["sent"]["drops"]["server"] == 1).then_some(()));
    // A port that is a router by its policy may.
    assert!(router.send(&offer(Rig::mac(2))));
    let got = wait_for("the router's offer", || victim.receive()).1;
    assert_eq!(got[6..12], Rig::mac(2).0);
    assert_eq!(asks(&mut victim, Rig::mac(1), &[53, 1, DISCOVER]), (OFFER, [10, 86, 0, 5]));
}

#[test]
fn the_service_is_no_way_out() {
    let switch = start();
    let mut nic = switch.guest(0);
    assert!(nic.send(&common::frame(Mac([2, 0, 0, 0, 0, 9]), Rig::mac(0), 60, 0)));
    wait_for("the drop", || (switch.port("vm")?["sent"]["drops"]["unknown"] == 1).then_some(()));
    let said = add(&Switch::start(0, &[]), 1, &json!({ "address": "10.86.0.5" })).unwrap_err().to_string();
    assert!(said.contains("which this switch doesn't serve; say [dhcp]"), "{said}");
}

/// The link-local address of guest `n`, and a group's or node's address.
fn local(n: u8) -> Ipv6Addr {
    format!("fe80::5054:ff:fe00:{n:x}").parse().unwrap()
}

fn solicitation(n: u8) -> Vec<u8> {
    let routers: Ipv6Addr = "ff02::2".parse().unwrap();
    let from = Rig::mac(n.into());
    ipv6(group6(routers), from, [local(n), routers], 58, &[133, 0, 0, 0, 0, 0, 0, 0])
}

/// A DHCPv6 message of guest `n`, from one port to another.
fn dhcp6(n: u8, ports: [u16; 2], kind: u8) -> Vec<u8> {
    let servers: Ipv6Addr = "ff02::1:2".parse().unwrap();
    let message = [kind, 1, 2, 3, 0, 1, 0, 4, 9, 9, 9, n, 0, 3, 0, 12, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut body = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
    body.extend((8 + message.len() as u16).to_be_bytes());
    body.extend([0, 0]);
    body.extend(message);
    ipv6(group6(servers), Rig::mac(n.into()), [local(n), servers], 17, &body)
}

fn ipv6_switch(managed: bool) -> Switch {
    let config = tempfile::NamedTempFile::new().unwrap();
    let text = format!("[ipv6]\nprefix = 'fd00:86::/64'\nmanaged = {managed}\n");
    std::fs::write(config.path(), text).unwrap();
    Switch::start(0, &["--config", config.path().to_str().unwrap()])
}

#[test]
fn a_guest_learns_the_prefix_and_is_given_its_own_ipv6_address() {
    let switch = ipv6_switch(true);
    add(&switch, 1, &json!({ "address6": "fd00:86::5" })).unwrap();
    let mut nic = guest(&switch, 1);
    assert!(nic.send(&solicitation(1)));
    let told = wait_for("an advertisement", || nic.receive().map(|r| r.1).filter(|f| f[54] == 134));
    assert_eq!((told[59] & 0x80, &told[60..62]), (0x80, &[0, 0][..]), "managed, and no router");
    assert_eq!(told[94..110], "fd00:86::".parse::<Ipv6Addr>().unwrap().octets());
    assert!(nic.send(&dhcp6(1, [546, 547], 1)));
    let offer = wait_for("an offer", || nic.receive().map(|r| r.1).filter(|f| f[20] == 17));
    let own = "fd00:86::5".parse::<Ipv6Addr>().unwrap().octets();
    assert!(offer[62] == 2 && offer.windows(16).any(|w| w == own), "{offer:02x?}");
    for (more, words) in [
        (json!({ "address6": "fd00:86::5" }), "is given to port vm1 already"),
        (json!({ "address6": "fd00:87::5" }), "is not of the switch's fd00:86::/64"),
    ] {
        let said = add(&switch, 3, &more).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    }
    let said = add(&ipv6_switch(false), 3, &json!({ "address6": "fd00:86::5" })).unwrap_err().to_string();
    assert!(said.contains("say managed = true"), "{said}");
}

#[test]
fn a_guest_that_plays_router_or_dhcpv6_server_reaches_nobody_in_any_form() {
    let switch = ipv6_switch(false);
    add(&switch, 1, &json!({})).unwrap();
    add(&switch, 2, &json!({ "router": true })).unwrap();
    let (mut rogue, mut victim, mut router) = (switch.guest(0), guest(&switch, 1), guest(&switch, 2));
    let all: Ipv6Addr = "ff02::1".parse().unwrap();
    let advertisement = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let of =
        |n: u8, next: u8, body: &[u8]| ipv6(group6(all), Rig::mac(n.into()), [local(n), all], next, body);
    let behind = |first: &[u8]| [first, &advertisement[..]].concat();
    let far = [&[58, 30][..], &[0; 246], &advertisement].concat();
    let udp =
        |from: u16| [&from.to_be_bytes()[..], &546u16.to_be_bytes(), &[0, 12, 0, 0, 2, 1, 2, 3]].concat();
    let forms = [
        of(0, 58, &advertisement),
        of(0, 60, &behind(&[58, 0, 1, 4, 0, 0, 0, 0])),
        of(0, 44, &behind(&[58, 0, 0, 1, 0, 0, 0, 1])),
        of(0, 44, &behind(&[58, 0, 0, 0, 0, 0, 0, 1])),
        of(0, 60, &far),
        of(0, 58, &[137; 40]),
        of(0, 17, &udp(547)),
        of(0, 17, &udp(9)),
        of(0, 44, &[&[17, 0, 0, 1, 0, 0, 0, 1][..], &udp(547)].concat()),
        of(0, 44, &[17, 0, 0, 1, 0, 0, 0, 1, 2, 35]),
        [&of(0, 58, &advertisement)[..12], &[0x81, 0, 0, 0], &of(0, 58, &advertisement)[12..]].concat(),
        [&of(0, 58, &advertisement)[..12], &[0x81, 0, 0, 0].repeat(3), &of(0, 58, &advertisement)[12..]]
            .concat(),
    ];
    for form in &forms {
        assert!(rogue.send(form));
    }
    wait_for("the drops", || {
        let drops = &switch.port("vm")?["sent"]["drops"];
        let n = |reason: &str| drops[reason].as_u64().unwrap_or(0);
        (n("server") + n("unparsable") == forms.len() as u64).then_some(())
    });
    // A port that is a router by its policy may; and the victim has heard of no router before.
    assert!(router.send(&of(2, 58, &advertisement)));
    let heard = wait_for("an advertisement", || {
        victim.receive().map(|r| r.1).filter(|f| f[20] == 58 && f[54] == 134 && f[60..62] != [0, 0])
    });
    assert_eq!(heard[6..12], Rig::mac(2).0);
}
