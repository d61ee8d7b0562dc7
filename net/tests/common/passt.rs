// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A host with a way out, and a switch whose guest is behind passt.

use std::path::Path;
use std::time::{Duration, Instant};

use tombolo_net::frames::frame::Mac;
use tombolo_net_driver::Nic;

use super::network::{ethernet, ipv4, sh};
use super::program::Switch;
use super::wait_for;

/// Gives the host an address and a way out, which passt gives its guest.
pub fn host() {
    sh("ip link add out type veth peer name far; ip link set far up; ip link set out up
        ip addr add 192.0.2.7/24 dev out; ip route add default via 192.0.2.1");
}

/// Returns whether the host's passt is of July 2024 or newer, whose guests answer datagrams of the host's own programs.
pub fn forwards_datagrams() -> bool {
    let help = std::process::Command::new("passt").arg("--help").output().unwrap();
    // An option of August 2024.
    String::from_utf8_lossy(&[help.stdout, help.stderr].concat()).contains("--map-host-loopback")
}

/// A switch with this file as its configuration, in `dir`.
pub fn configured(dir: &Path, text: &str) -> Switch {
    let file = dir.join("switch.toml");
    std::fs::write(&file, text).unwrap();
    Switch::start(1, &["--config", file.to_str().unwrap()])
}

/// A request for an address.
pub fn discover(own: Mac) -> Vec<u8> {
    let mut dhcp = vec![1, 1, 6, 0, 1, 2, 3, 4];
    dhcp.resize(28, 0);
    dhcp.extend(own.0);
    dhcp.resize(236, 0);
    dhcp.extend([0x63, 0x82, 0x53, 0x63, 53, 1, 1, 255]);
    dhcp.resize(300, 0);
    let udp = [&[0, 68, 0, 67][..], &308u16.to_be_bytes(), &[0, 0], &dhcp].concat();
    ethernet(Mac::BROADCAST, own, 0x800, &ipv4([255; 4], [0; 4], 17, &udp))
}

/// Asks for an address until there is an offer. passt may still be starting.
pub fn offer(guest: &mut Nic, own: Mac) -> Vec<u8> {
    let discover = discover(own);
    let mut asked = Instant::now() - Duration::from_secs(1);
    wait_for("an offer", || {
        if asked.elapsed() > Duration::from_millis(500) {
            // The next one may find room.
            let _full = guest.send(&discover);
            asked = Instant::now();
        }
        guest.receive().map(|(_, f)| f).filter(|f| f.len() > 280 && f[34..38] == [0, 67, 0, 68])
    })
}
