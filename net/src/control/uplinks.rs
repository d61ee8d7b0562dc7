// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opens the devices of uplinks for the switch.

use std::io;
use std::os::fd::OwnedFd;

use crate::control::config::{UplinkConfig, Way};
use crate::control::passt::{Connected, Program, Source};
use crate::uplink::Opened;
use crate::uplink::packet::Packet;
use crate::uplink::tap::Tap;

/// Opens the device of an uplink. A connection to passt is to be kept ([`Connection::keep`](crate::control::passt::Connection::keep)).
///
/// # Errors
/// Names the device and the remedy.
pub(crate) fn open(config: &UplinkConfig) -> io::Result<(Opened, OwnedFd, Option<Connected>)> {
    let source = match config.way.clone() {
        Way::Tap(name) => {
            let (offloads, fd) = Tap::open(&name)?;
            return Ok((Opened::Tap(offloads), fd, None));
        }
        Way::Interface(name) => return Ok((Opened::Packet, Packet::open(&name)?, None)),
        Way::Passt(path) => Source::Socket(path),
        Way::User(path) => Source::Program(Program {
            path,
            tcp: config.tcp_ports.clone(),
            udp: config.udp_ports.clone(),
            host_loopback: config.host_loopback,
        }),
    };
    let connection = source.connect()?;
    Ok((Opened::Passt, connection.socket()?, Some((source, connection))))
}
