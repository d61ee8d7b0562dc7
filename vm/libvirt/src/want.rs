// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A domain's wants: parts of tombolo, written in its XML as `<tombolo:domain>` in `<metadata>`, with an element for each want.

use std::path::{Path, PathBuf};

use crate::identity::Identity;
use anyhow::{Context, bail};
use tombolo_zone::Rights;
use tombolo_zone::serve::invitation::Invitation;
use tombolo_zone::serve::room::Room;
use xmltree::{Element, XMLNode};

/// The namespace of our elements in `<metadata>`.
pub const NAMESPACE: &str = "urn:tombolo:domain:1";
const PREFIX: &str = "tombolo";

/// A port at a switch that runs by itself (`tombolo net run`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The switch's control socket.
    pub control: PathBuf,
    /// The port's name there.
    pub name: String,
    /// The socket to which the domain's QEMU connects.
    pub socket: PathBuf,
    /// The address of the domain's card.
    pub mac: String,
}

/// A zone in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneWant {
    /// The zone's file.
    pub path: PathBuf,
    /// The domain's name in the zone.
    pub member: String,
    /// It may only read.
    pub read_only: bool,
    /// The guest's mount point; the guest's own /etc/fstab mounts it.
    pub mount: Option<String>,
    /// The zone as it was when it was attached; domains that an older version has defined have none.
    pub identity: Option<Identity>,
}

/// One thing that a domain has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// To be a member of a zone.
    Zone(ZoneWant),
    /// To be at a switch.
    Port(Port),
    /// A folder of `tombolo accel serve --vm FOLDER`: its zone and its doorbell.
    Accel(PathBuf),
    /// Memory that arrives after the start.
    Grow,
}

impl ZoneWant {
    /// The zone and the domain's slot in it, without asking for one.
    ///
    /// # Errors
    /// The file is no zone, or another user could change the folder of its sockets.
    pub fn invitation(&self) -> anyhow::Result<Invitation> {
        let zone = tombolo_zone::Zone::open(&self.path, false)?;
        Ok(Invitation {
            member: self.member.clone(),
            rights: if self.read_only { Rights::READ_ONLY } else { Rights::READ_WRITE },
            zone: zone.name().to_owned(),
            uuid: zone.uuid(),
            path: self.path.clone(),
            size: zone.size(),
            socket: Room::of(zone.uuid())?.socket(&self.member),
        })
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Want {
    /// The name for users.
    pub fn label(&self) -> String {
        match self {
            Want::Zone(zone) => format!("zone {}", zone.path.display()),
            Want::Port(port) => format!("network {}", port.control.display()),
            Want::Accel(folder) => format!("accelerator {}", folder.display()),
            Want::Grow => "growing memory".to_owned(),
        }
    }

    /// Returns whether both are for the same thing, whatever else they say.
    pub fn is_same_thing(&self, other: &Want) -> bool {
        match (self, other) {
            (Want::Zone(a), Want::Zone(b)) => a.path == b.path,
            (Want::Port(a), Want::Port(b)) => a.control == b.control,
            (Want::Accel(a), Want::Accel(b)) => a == b,
            (Want::Grow, Want::Grow) => true,
            _ => false,
        }
    }

    fn element(&self) -> Element {
        let (kind, attributes): (&str, Vec<(&str, String)>) = match self {
            Want::Zone(zone) => {
                let mut all = vec![("path", text(&zone.path)), ("member", zone.member.clone())];
                all.extend(zone.identity.iter().flat_map(Identity::attributes));
                all.extend(zone.read_only.then(|| ("rights", "ro".to_owned())));
                all.extend(zone.mount.clone().map(|mount| ("mount", mount)));
                ("zone", all)
            }
            Want::Port(port) => (
                "network",
                vec![
                    ("control", text(&port.control)),
                    ("port", port.name.clone()),
                    ("socket", text(&port.socket)),
                    ("mac", port.mac.clone()),
                ],
            ),
            Want::Accel(folder) => ("accel", vec![("folder", text(folder))]),
            Want::Grow => ("grow", Vec::new()),
        };
        let mut element = Element::new(kind);
        element.prefix = Some(PREFIX.to_owned());
        element.namespace = Some(NAMESPACE.to_owned());
        element.attributes.extend(attributes.into_iter().map(|(name, value)| (name.into(), value)));
        element
    }

    fn of(element: &Element) -> anyhow::Result<Want> {
        let get = |name: &str| {
            let value = element.attributes.get(name).cloned();
            value.with_context(|| {
                format!("<tombolo:{}> in the domain's metadata has no '{name}'", element.name)
            })
        };
        Ok(match element.name.as_str() {
            "zone" => Want::Zone(ZoneWant {
                path: get("path")?.into(),
                member: get("member")?,
                read_only: element.attributes.get("rights").is_some_and(|r| r == "ro"),
                mount: element.attributes.get("mount").cloned(),
                identity: element.attributes.get("uuid").map(|_| Identity::read(&get)).transpose()?,
            }),
            "network" => Want::Port(Port {
                control: get("control")?.into(),
                name: get("port")?,
                socket: get("socket")?.into(),
                mac: get("mac")?,
            }),
            "accel" => Want::Accel(get("folder")?.into()),
            "grow" => Want::Grow,
            other => bail!("<tombolo:{other}> in the domain's metadata is of another version of tombolo"),
        })
    }
}

/// All wants of a domain's XML.
///
/// # Errors
/// An element that this version does not know.
pub fn of_domain(root: &Element) -> anyhow::Result<Vec<Want>> {
    let Some(own) = root.get_child("metadata").and_then(|m| m.get_child(("domain", NAMESPACE))) else {
        return Ok(Vec::new());
    };
    own.children.iter().filter_map(XMLNode::as_element).map(Want::of).collect()
}

/// Writes the wants into a domain's XML in place of those that are there.
pub fn put(root: &mut Element, wants: &[Want]) {
    if root.get_child("metadata").is_none() && !wants.is_empty() {
        root.children.push(XMLNode::Element(Element::new("metadata")));
    }
    let Some(metadata) = root.get_mut_child("metadata") else { return };
    while metadata.take_child(("domain", NAMESPACE)).is_some() {}
    if !wants.is_empty() {
        let mut own = Element::new("domain");
        own.prefix = Some(PREFIX.to_owned());
        own.namespace = Some(NAMESPACE.to_owned());
        let mut namespaces = xmltree::Namespace::empty();
        namespaces.put(PREFIX, NAMESPACE);
        own.namespaces = Some(namespaces);
        own.children = wants.iter().map(|want| XMLNode::Element(want.element())).collect();
        metadata.children.push(XMLNode::Element(own));
    }
}
