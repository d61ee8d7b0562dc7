// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The elements of a domain's XML that a want becomes. Each device has an alias that begins with [`MARK`], by which it is found again.

use anyhow::Context;
use tombolo_zone::doorbell::VECTORS;
use tombolo_zone::serve::invitation::Invitation;
use xmltree::{Element, XMLNode};

use crate::want::{Port, Want};

/// The beginning of our devices' aliases; libvirt keeps aliases that begin with `ua-`.
pub const MARK: &str = "ua-tombolo-";

/// The XML that a want adds to a domain.
#[derive(Debug, Default)]
pub struct Addition {
    /// For `<devices>`.
    pub devices: Vec<Element>,
    /// Arguments for QEMU itself, where libvirt has no element for them.
    pub arguments: Vec<String>,
    /// Address space for memory devices, in bytes.
    pub room: u64,
    /// Other processes map the guest's memory.
    pub shared_memory: bool,
    /// Properties of a device that libvirt has no element for: alias, property, value.
    pub properties: Vec<(String, &'static str, u64)>,
}

/// An element with attributes.
pub fn element(name: &str, attributes: &[(&str, &str)], children: Vec<Element>) -> Element {
    let mut made = Element::new(name);
    made.attributes.extend(attributes.iter().map(|(k, v)| ((*k).into(), (*v).to_owned())));
    made.children = children.into_iter().map(XMLNode::Element).collect();
    made
}

/// An element that holds text.
pub fn with_text(name: &str, attributes: &[(&str, &str)], text: &str) -> Element {
    let mut made = element(name, attributes, Vec::new());
    made.children.push(XMLNode::Text(text.to_owned()));
    made
}

fn alias(kind: &str, id: &str) -> Element {
    element("alias", &[("name", &format!("{MARK}{kind}-{id}"))], Vec::new())
}

/// The memory and the doorbell of a zone.
fn zone(invitation: &Invitation) -> Addition {
    let id = invitation.id();
    let socket = invitation.socket.to_string_lossy();
    let doorbell = element(
        "shmem",
        &[("name", &format!("tombolo-{id}"))],
        vec![
            element("model", &[("type", "ivshmem-doorbell")], Vec::new()),
            element("server", &[("path", &socket)], Vec::new()),
            element("msi", &[("vectors", &VECTORS.to_string())], Vec::new()),
            alias("bell", &id),
        ],
    );
    Addition {
        devices: vec![doorbell],
        arguments: invitation.libvirt_arguments(),
        room: invitation.room(),
        ..Addition::default()
    }
}

/// A card at a switch. QEMU before 9.0 without KVM crashes when a guest masks an interrupt vector of a vhost-user device, so `emulated`
/// domains get none.
fn port(port: &Port, emulated: bool) -> Addition {
    let id = port.mac.replace(':', "");
    let socket = port.socket.to_string_lossy();
    let reconnect = element("reconnect", &[("enabled", "yes"), ("timeout", "1")], Vec::new());
    let card = element(
        "interface",
        &[("type", "vhostuser")],
        vec![
            element("mac", &[("address", &port.mac)], Vec::new()),
            element("source", &[("type", "unix"), ("path", &socket), ("mode", "client")], vec![reconnect]),
            element("model", &[("type", "virtio")], Vec::new()),
            alias("net", &id),
        ],
    );
    let properties = if emulated { vec![(format!("{MARK}net-{id}"), "vectors", 0)] } else { Vec::new() };
    Addition { devices: vec![card], shared_memory: true, properties, ..Addition::default() }
}

/// The XML that a want adds, except for memory that grows, which changes the domain's own memory ([`crate::domain`]).
///
/// # Errors
/// A file that is no zone.
pub fn of(want: &Want, emulated: bool) -> anyhow::Result<Addition> {
    Ok(match want {
        Want::Zone(want) => zone(&want.invitation()?),
        Want::Port(want) => port(want, emulated),
        Want::Accel(folder) => {
            let path = folder.join("zone");
            let memory = tombolo_zone::Zone::open(&path, false).with_context(|| {
                format!("{} is no folder of 'tombolo accel serve --vm FOLDER' that runs", folder.display())
            })?;
            zone(&Invitation {
                member: String::new(),
                rights: tombolo_zone::Rights::READ_WRITE,
                zone: memory.name().to_owned(),
                uuid: memory.uuid(),
                path,
                size: memory.size(),
                socket: folder.join("bell"),
            })
        }
        Want::Grow => Addition { shared_memory: true, ..Addition::default() },
    })
}
