// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A domain's XML, and what is changed in it. Elements and attributes that are not ours stay as they are.

use anyhow::{Context, bail};
use tombolo_start::layout::{DEFAULT_DMA_ENTRIES, Wish};
use xmltree::{Element, EmitterConfig, XMLNode};

use crate::devices::{self, Addition, MARK, element, with_text};
use crate::want::{self, Want};

/// libvirt's namespace for what it passes on to QEMU.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// The beginning of the argument of a zone's device.
const PMEM: &str = "virtio-pmem-pci,";
/// The first PCI slot of zones' devices.
const FIRST_SLOT: usize = 0x10;
/// Slots for memory devices.
const SLOTS: &str = "16";

/// A domain as `virsh dumpxml --inactive` has it.
#[derive(Clone, Debug)]
pub struct Domain {
    root: Element,
}

impl Domain {
    /// Reads XML.
    ///
    /// # Errors
    /// It is malformed, or no domain's.
    pub fn parse(text: &str) -> anyhow::Result<Domain> {
        let root = Element::parse(text.as_bytes()).context("the domain's XML is malformed")?;
        if root.name != "domain" {
            bail!("this XML is of a <{}>, not of a <domain>", root.name);
        }
        Ok(Domain { root })
    }

    /// The XML.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn text(&self) -> anyhow::Result<String> {
        render(&self.root)
    }

    /// The domain's name.
    pub fn name(&self) -> String {
        self.root
            .get_child("name")
            .and_then(Element::get_text)
            .map(|n| n.trim().to_owned())
            .unwrap_or_default()
    }

    /// Returns whether QEMU emulates the processor.
    fn is_emulated(&self) -> bool {
        self.root.attributes.get("type").is_some_and(|t| t == "qemu")
    }

    /// The wants that the domain has.
    ///
    /// # Errors
    /// As [`want::of_domain`].
    pub fn wants(&self) -> anyhow::Result<Vec<Want>> {
        want::of_domain(&self.root)
    }

    /// Adds what a want needs.
    ///
    /// # Errors
    /// It is there already, or the domain's own settings contradict it.
    pub fn attach(&mut self, want: &Want) -> anyhow::Result<()> {
        let mut wants = self.wants()?;
        if wants.iter().any(|there| there.is_same_thing(want)) {
            bail!("the domain '{}' has {} already", self.name(), want.label());
        }
        let addition = devices::of(want, self.is_emulated())?;
        self.check_new(want, &addition)?;
        if addition.shared_memory {
            self.share_memory()?;
        }
        if *want == Want::Grow {
            self.grow()?;
        }
        self.make_room(addition.room)?;
        self.add(addition)?;
        wants.push(want.clone());
        want::put(&mut self.root, &wants);
        Ok(())
    }

    /// Refuses a want whose device the domain has by another path.
    fn check_new(&self, want: &Want, addition: &Addition) -> anyhow::Result<()> {
        let taken: Vec<&str> = self.devices(MARK).into_iter().filter_map(alias).collect();
        let mut names = addition.devices.iter().filter_map(alias);
        let Some(there) = names.find(|name| taken.contains(name)) else { return Ok(()) };
        let (name, label) = (self.name(), want.label());
        match want {
            Want::Zone(_) | Want::Accel(_) => bail!(
                "{label} has the uuid of a zone that the domain '{name}' has already ({there}), as a copied file or a second name of one \
                 file has: a guest could not tell them apart; give a zone of its own (tombolo zone create)"
            ),
            Want::Port(port) => bail!(
                "the domain '{name}' has a card with the address {} already; give the one at {label} another: --mac",
                port.mac
            ),
            Want::Grow => Ok(()),
        }
    }

    /// Takes wants and all that they added away; room for memory devices and shared memory stay.
    ///
    /// # Errors
    /// The domain does not have one of them, or the file of a zone that stays has gone.
    pub fn detach(&mut self, away: &[Want]) -> anyhow::Result<()> {
        let mut wants = self.wants()?;
        for want in away {
            let Some(at) = wants.iter().position(|there| there.is_same_thing(want)) else {
                let has: Vec<String> = wants.iter().map(Want::label).collect();
                let has = if has.is_empty() { "nothing of tombolo's".to_owned() } else { has.join(", ") };
                bail!("the domain '{}' does not have {}; it has: {has}", self.name(), want.label());
            };
            wants.remove(at);
        }
        if away.contains(&Want::Grow) {
            self.shrink()?;
        }
        // The remaining wants are added anew, so nothing of the removed ones can stay, whatever their files have become meanwhile.
        self.clear();
        for other in wants.iter().filter(|w| **w != Want::Grow) {
            let addition = devices::of(other, self.is_emulated()).with_context(|| {
                format!(
                    "{} stays with the domain '{}'; detach it too if it has gone",
                    other.label(),
                    self.name()
                )
            })?;
            self.add(addition)?;
        }
        want::put(&mut self.root, &wants);
        Ok(())
    }

    /// An element of the domain.
    pub fn part(&self, name: &str) -> Option<&Element> {
        self.root.get_child(name)
    }

    /// An element that libvirt passes on to QEMU.
    pub fn qemu_part(&self, name: &str) -> Option<&Element> {
        self.root.get_child((name, QEMU))
    }

    /// Devices whose alias begins with `mark`.
    pub fn devices(&self, mark: &str) -> Vec<&Element> {
        let all = self.root.get_child("devices").into_iter().flat_map(|d| d.children.iter());
        let elements = all.filter_map(XMLNode::as_element);
        elements.filter(|e| alias(e).is_some_and(|name| name.starts_with(mark))).collect()
    }

    fn add(&mut self, addition: Addition) -> anyhow::Result<()> {
        let devices = self.root.get_mut_child("devices").context("the domain's XML has no <devices>")?;
        devices.children.extend(addition.devices.into_iter().map(XMLNode::Element));
        if !addition.arguments.is_empty() {
            let line = self.qemu_child("commandline");
            let taken = line.children.iter().filter_map(XMLNode::as_element);
            let taken =
                taken.filter(|e| e.attributes.get("value").is_some_and(|v| v.starts_with(PMEM))).count();
            // QEMU makes these devices before libvirt's, so they must keep clear of the low slots that libvirt gives out.
            let slot = |value: &String| match value.starts_with(PMEM) {
                true => format!("{value},addr={:#x}", FIRST_SLOT + taken),
                false => value.clone(),
            };
            let arguments = addition.arguments.iter().map(slot);
            let arguments: Vec<XMLNode> = arguments
                .map(|value| XMLNode::Element(qemu_element("arg", &[("value", &value)], Vec::new())))
                .collect();
            line.children.extend(arguments);
        }
        for (alias, name, value) in addition.properties {
            let property = qemu_element(
                "property",
                &[("name", name), ("type", "unsigned"), ("value", &value.to_string())],
                Vec::new(),
            );
            let front = qemu_element("frontend", &[], vec![property]);
            let device = qemu_element("device", &[("alias", &alias)], vec![front]);
            self.qemu_child("override").children.push(XMLNode::Element(device));
        }
        Ok(())
    }

    /// Takes all devices, arguments and properties of ours away but for memory that grows.
    fn clear(&mut self) {
        let grows = tombolo_start::libvirt::ALIAS;
        let ours = |e: &Element| alias(e).is_some_and(|name| name.starts_with(MARK) && name != grows);
        if let Some(devices) = self.root.get_mut_child("devices") {
            devices.children.retain(|node| !node.as_element().is_some_and(ours));
        }
        if let Some(line) = self.root.get_mut_child(("commandline", QEMU)) {
            drop_arguments(line);
        }
        if let Some(properties) = self.root.get_mut_child(("override", QEMU)) {
            properties.children.retain(|node| {
                let alias = node.as_element().and_then(|e| e.attributes.get("alias"));
                !alias.is_some_and(|name| name.starts_with(MARK))
            });
        }
        self.root.children.retain(|node| {
            let empty = |e: &Element| {
                e.namespace.as_deref() == Some(QEMU) && e.children.iter().all(|c| c.as_element().is_none())
            };
            !node.as_element().is_some_and(empty)
        });
    }

    /// `<qemu:NAME>` of the domain, made where it is not there.
    fn qemu_child(&mut self, name: &str) -> &mut Element {
        self.root.namespaces.get_or_insert_with(xmltree::Namespace::empty).put("qemu", QEMU);
        if self.root.get_child((name, QEMU)).is_none() {
            self.root.children.push(XMLNode::Element(qemu_element(name, &[], Vec::new())));
        }
        self.root.get_mut_child((name, QEMU)).expect("it was made")
    }

    /// Sees to it that other processes can map the guest's memory.
    fn share_memory(&mut self) -> anyhow::Result<()> {
        let name = self.name();
        let backing = child(&mut self.root, "memoryBacking");
        let get = |element: &Element, child: &str, attribute: &str| {
            element.get_child(child).and_then(|e| e.attributes.get(attribute)).cloned()
        };
        let (source, access) = (get(backing, "source", "type"), get(backing, "access", "mode"));
        let huge = backing.get_child("hugepages").is_some();
        match access.as_deref() {
            None => {
                backing.children.push(XMLNode::Element(element("access", &[("mode", "shared")], Vec::new())))
            }
            Some("shared") => {}
            Some(other) => bail!(
                "the domain '{name}' says <access mode='{other}'/> in <memoryBacking>, so a switch could not map its memory; \
                 change it to 'shared' (virsh edit {name})"
            ),
        }
        match source.as_deref() {
            None if huge => {}
            None => {
                backing.children.push(XMLNode::Element(element("source", &[("type", "memfd")], Vec::new())))
            }
            Some("memfd" | "file") => {}
            Some(other) => bail!(
                "the domain '{name}' has memory of <source type='{other}'/> in <memoryBacking>, which can't be shared; \
                 change it to 'memfd' (virsh edit {name})"
            ),
        }
        Ok(())
    }

    /// Bytes at the start: those of the NUMA cells, where there are any, else `<memory>`, which counts memory devices too.
    fn initial(&self) -> anyhow::Result<u64> {
        let cells = self.cells();
        if cells.is_empty() {
            return bytes_of(self.root.get_child("memory").context("the domain's XML has no <memory>")?);
        }
        cells
            .into_iter()
            .map(|cell| in_unit(cell, cell.attributes.get("memory").map_or("", String::as_str)))
            .sum()
    }

    fn cells(&self) -> Vec<&Element> {
        let numa = self.root.get_child("cpu").and_then(|c| c.get_child("numa"));
        numa.into_iter()
            .flat_map(|n| n.children.iter())
            .filter_map(XMLNode::as_element)
            .filter(|e| e.name == "cell")
            .collect()
    }

    /// Gives the domain one NUMA cell with this memory, as libvirt wants it of domains with memory devices.
    fn set_cell(&mut self, bytes: u64, shared: bool) {
        let kib = (bytes >> 10).to_string();
        let processors = self.root.get_child("vcpu").and_then(Element::get_text);
        let processors: u32 = processors.and_then(|n| n.trim().parse().ok()).unwrap_or(1);
        let last = format!("0-{}", processors.max(1) - 1);
        let numa = child(child(&mut self.root, "cpu"), "numa");
        let mut cell = numa
            .take_child("cell")
            .unwrap_or_else(|| element("cell", &[("id", "0"), ("cpus", &last)], Vec::new()));
        cell.attributes.extend([("memory".into(), kib), ("unit".into(), "KiB".to_owned())]);
        if shared {
            cell.attributes.insert("memAccess".into(), "shared".to_owned());
        }
        numa.children.push(XMLNode::Element(cell));
    }

    /// Sees to it that `<maxMemory>` leaves this much for more memory devices.
    fn make_room(&mut self, room: u64) -> anyhow::Result<()> {
        if room == 0 {
            return Ok(());
        }
        let initial = self.initial()?;
        if self.cells().is_empty() {
            self.set_cell(initial, false);
        }
        self.set_most(initial + self.grown()? + self.zones_room()? + room)
    }

    /// Raises `<maxMemory>` to at least this.
    fn set_most(&mut self, wanted: u64) -> anyhow::Result<()> {
        let there = self.root.get_child("maxMemory").map(bytes_of).transpose()?;
        if there.is_some_and(|most| most >= wanted) {
            return Ok(());
        }
        while self.root.take_child("maxMemory").is_some() {}
        let most = with_text("maxMemory", &[("slots", SLOTS), ("unit", "KiB")], &(wanted >> 10).to_string());
        self.root.children.push(XMLNode::Element(most));
        Ok(())
    }

    /// The bytes of `<maxMemory>` for zones that are there already.
    fn zones_room(&self) -> anyhow::Result<u64> {
        let zones = self.wants()?.into_iter().filter(|w| !matches!(w, Want::Port(_) | Want::Grow));
        zones.map(|want| Ok(devices::of(&want, false)?.room)).sum()
    }

    /// Bytes that arrive after the start.
    fn grown(&self) -> anyhow::Result<u64> {
        let device = self.devices(tombolo_start::libvirt::ALIAS).into_iter().next();
        let size = device.and_then(|d| d.get_child("target")).and_then(|t| t.get_child("size"));
        size.map_or(Ok(0), bytes_of)
    }

    /// Leaves a part of the memory to virtio-mem.
    fn grow(&mut self) -> anyhow::Result<()> {
        let name = self.name();
        let total = self.initial()?;
        if self.cells().len() > 1 {
            bail!(
                "the domain '{name}' has several NUMA cells; set their memory and add the device by hand: \
                 tombolo start plan {}M --libvirt",
                total >> 20
            );
        }
        let layout = Wish { total, boot: None, dma_entries: DEFAULT_DMA_ENTRIES }
            .layout()
            .map_err(|e| anyhow::anyhow!("the memory of the domain '{name}' can't arrive in parts: {e}"))?;
        if layout.grown == 0 {
            bail!(
                "the domain '{name}' has {} MiB, all of which is there at the start: nothing can grow",
                total >> 20
            );
        }
        self.set_cell(layout.boot, true);
        self.set_memory(total);
        self.set_most(total + self.zones_room()?)?;
        let kib = |name: &str, bytes: u64| with_text(name, &[("unit", "KiB")], &(bytes >> 10).to_string());
        let target = vec![
            kib("size", layout.grown),
            with_text("node", &[], "0"),
            kib("block", layout.block),
            kib("requested", 0),
        ];
        let alias = element("alias", &[("name", tombolo_start::libvirt::ALIAS)], Vec::new());
        let device =
            element("memory", &[("model", "virtio-mem")], vec![element("target", &[], target), alias]);
        let devices = self.root.get_mut_child("devices").context("the domain's XML has no <devices>")?;
        devices.children.push(XMLNode::Element(device));
        Ok(())
    }

    /// Gives the domain all of its memory at the start again.
    fn shrink(&mut self) -> anyhow::Result<()> {
        let total = self.initial()? + self.grown()?;
        if let Some(devices) = self.root.get_mut_child("devices") {
            let grows = Some(tombolo_start::libvirt::ALIAS);
            devices.children.retain(|node| node.as_element().and_then(alias) != grows);
        }
        self.set_cell(total, false);
        self.set_memory(total);
        Ok(())
    }

    fn set_memory(&mut self, bytes: u64) {
        for name in ["memory", "currentMemory"] {
            while self.root.take_child(name).is_some() {}
            let kib = (bytes >> 10).to_string();
            self.root.children.push(XMLNode::Element(with_text(name, &[("unit", "KiB")], &kib)));
        }
    }
}

/// A device's alias.
fn alias(device: &Element) -> Option<&str> {
    device.get_child("alias")?.attributes.get("name").map(String::as_str)
}

/// The child of this name, made where it is not there.
fn child<'a>(parent: &'a mut Element, name: &str) -> &'a mut Element {
    if parent.get_child(name).is_none() {
        parent.children.push(XMLNode::Element(Element::new(name)));
    }
    parent.get_mut_child(name).expect("it was made")
}

/// An element that libvirt passes on to QEMU.
fn qemu_element(name: &str, attributes: &[(&str, &str)], children: Vec<Element>) -> Element {
    let mut made = element(name, attributes, children);
    made.prefix = Some("qemu".to_owned());
    made.namespace = Some(QEMU.to_owned());
    made
}

/// Takes our arguments away: pairs of an option and a value whose id is ours.
fn drop_arguments(line: &mut Element) {
    let value = |node: &XMLNode| node.as_element().and_then(|e| e.attributes.get("value").cloned());
    line.children.retain(|node| node.as_element().is_some());
    let ours = format!("id={MARK}");
    while let Some(at) = line.children.iter().position(|node| value(node).is_some_and(|v| v.contains(&ours)))
    {
        line.children.drain(at.saturating_sub(1)..=at);
    }
}

/// The bytes that an element's text says.
fn bytes_of(element: &Element) -> anyhow::Result<u64> {
    in_unit(element, &element.get_text().unwrap_or_default())
}

/// A number in an element's `unit`; KiB where it says none.
fn in_unit(element: &Element, number: &str) -> anyhow::Result<u64> {
    let unit = element.attributes.get("unit").map_or("KiB", String::as_str);
    let factor: u64 = match unit {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        other => bail!("<{}> has the unit '{other}', which libvirt does not know", element.name),
    };
    let count: u64 =
        number.trim().parse().with_context(|| format!("<{}> has no number: '{number}'", element.name))?;
    count.checked_mul(factor).with_context(|| format!("<{}> is too large", element.name))
}

/// An element as indented text.
///
/// # Errors
/// Memory runs out.
pub fn render(element: &Element) -> anyhow::Result<String> {
    let mut out = Vec::new();
    let config = EmitterConfig::new().perform_indent(true).write_document_declaration(false);
    element.write_with_config(&mut out, config)?;
    Ok(String::from_utf8(out)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::want::{Port, ZoneWant};
    use std::path::Path;
    use tombolo_zone::{Backing, Zone, ZoneConfig};

    const PLAIN: &str = r#"<domain type='kvm' id='3'>
  <name>web</name>
  <metadata><app:x xmlns:app="urn:app">kept</app:x></metadata>
  <memory unit='MiB'>1024</memory>
  <currentMemory unit='KiB'>1048576</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices>
</domain>"#;

    fn zone(dir: &Path, name: &str) -> Want {
        let path = dir.join(format!("{name}.zone"));
        drop(Zone::create(&ZoneConfig::new(name, 32 << 20).backing(Backing::File(path.clone()))).unwrap());
        Want::Zone(ZoneWant {
            path,
            member: "web".into(),
            read_only: false,
            mount: Some("/mnt".into()),
            identity: None,
        })
    }

    fn port() -> Want {
        Want::Port(Port {
            control: "/run/net.sock".into(),
            name: "web".into(),
            socket: "/run/ports/web.sock".into(),
            mac: "52:54:00:00:00:01".into(),
        })
    }

    #[test]
    fn what_is_attached_is_found_again_and_taken_away_without_a_trace_but_room() {
        let dir = tempfile::tempdir().unwrap();
        let mut domain = Domain::parse(PLAIN).unwrap();
        let mut reader = zone(dir.path(), "reader");
        if let Want::Zone(zone) = &mut reader {
            zone.read_only = true;
        }
        let wants = [zone(dir.path(), "one"), reader, port()];
        for want in &wants {
            domain.attach(want).unwrap();
        }
        let text = domain.text().unwrap();
        for part in [
            "ua-tombolo-zone-one-",
            "ua-tombolo-bell-one-",
            "<qemu:arg value=\"-object\" />",
            "ua-tombolo-pmem-reader-",
            "ua-tombolo-net-525400000001",
            "<access mode=\"shared\" />",
            ">kept<",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut again = Domain::parse(&text).unwrap();
        assert_eq!(again.wants().unwrap(), wants);
        assert!(again.attach(&wants[0]).unwrap_err().to_string().contains("already"));
        for want in &wants {
            again.detach(std::slice::from_ref(want)).unwrap();
        }
        let text = again.text().unwrap();
        assert_eq!(again.initial().unwrap(), 1 << 30);
        for part in ["ua-tombolo", "qemu:", "urn:tombolo"] {
            assert!(!text.contains(part), "{part}: {text}");
        }
        assert!(text.contains(">kept<"), "{text}");
        assert!(again.detach(&wants[..1]).unwrap_err().to_string().contains("nothing of tombolo's"));
    }

    #[test]
    fn zones_and_accelerators_of_one_name_have_devices_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let mut domain = Domain::parse(PLAIN).unwrap();
        let mut wants = Vec::new();
        for folder in ["x", "y", "z/own"] {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            wants.push(zone(&folder, "own"));
        }
        let accelerator = dir.path().join("z/own");
        std::fs::rename(accelerator.join("own.zone"), accelerator.join("zone")).unwrap();
        wants[2] = Want::Accel(accelerator);
        for want in &wants {
            domain.attach(want).unwrap();
        }
        let text = domain.text().unwrap();
        let words = text.split(['"', ',']);
        let mut ids: Vec<&str> =
            words.map(|w| w.trim_start_matches("id=")).filter(|w| w.starts_with(MARK)).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((ids.len(), all), (9, 9), "{text}");
        domain.detach(&wants[..1]).unwrap();
        assert_eq!(domain.devices(MARK).len(), 2);
        domain.detach(&wants[1..]).unwrap();
        assert!(!domain.text().unwrap().contains(MARK));
    }

    #[test]
    fn a_copy_of_a_zone_and_a_second_card_with_one_address_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut domain = Domain::parse(PLAIN).unwrap();
        domain.attach(&zone(dir.path(), "one")).unwrap();
        let copy = dir.path().join("copy.zone");
        std::fs::copy(dir.path().join("one.zone"), &copy).unwrap();
        let copy = Want::Zone(ZoneWant {
            path: copy,
            member: "web".into(),
            read_only: false,
            mount: None,
            identity: None,
        });
        let before = domain.text().unwrap();
        let said = domain.attach(&copy).unwrap_err().to_string();
        assert!(said.contains("copy.zone") && said.contains("could not tell them apart"), "{said}");
        assert_eq!(domain.text().unwrap(), before);
        domain.attach(&port()).unwrap();
        let Want::Port(first) = port() else { unreachable!("it is a port") };
        let said =
            domain.attach(&Want::Port(Port { control: "/run/other.sock".into(), ..first })).unwrap_err();
        let said = said.to_string();
        assert!(said.contains("52:54:00:00:00:01") && said.contains("--mac"), "{said}");
    }

    #[test]
    fn zones_whose_files_have_gone_are_taken_away_together() {
        let dir = tempfile::tempdir().unwrap();
        let mut domain = Domain::parse(PLAIN).unwrap();
        let wants = [zone(dir.path(), "one"), zone(dir.path(), "two")];
        for want in &wants {
            domain.attach(want).unwrap();
        }
        drop(dir);
        let said = domain.clone().detach(&wants[..1]).unwrap_err().to_string();
        assert!(said.contains("two.zone") && said.contains("detach it too"), "{said}");
        domain.detach(&wants).unwrap();
        assert!(!domain.text().unwrap().contains("ua-tombolo"));
    }

    #[test]
    fn there_is_room_for_every_zone_and_never_less_than_before() {
        let dir = tempfile::tempdir().unwrap();
        let most = |domain: &Domain| bytes_of(domain.root.get_child("maxMemory").unwrap()).unwrap() >> 30;
        let mut domain = Domain::parse(PLAIN).unwrap();
        domain.attach(&zone(dir.path(), "one")).unwrap();
        assert_eq!(most(&domain), 3);
        domain.attach(&zone(dir.path(), "two")).unwrap();
        assert_eq!(most(&domain), 5);
        let larger = PLAIN.replace("<vcpu", "<maxMemory slots='4' unit='GiB'>64</maxMemory><vcpu");
        let mut domain = Domain::parse(&larger).unwrap();
        domain.attach(&zone(dir.path(), "three")).unwrap();
        assert_eq!(most(&domain), 64);
    }

    #[test]
    fn memory_that_is_not_shared_is_named_with_its_remedy() {
        let private = "<memoryBacking><access mode='private'/></memoryBacking><vcpu";
        let mut domain = Domain::parse(&PLAIN.replace("<vcpu", private)).unwrap();
        let said = domain.attach(&port()).unwrap_err().to_string();
        assert!(said.contains("mode='private'") && said.contains("virsh edit web"), "{said}");
        let anonymous = "<memoryBacking><source type='anonymous'/></memoryBacking><vcpu";
        let mut domain = Domain::parse(&PLAIN.replace("<vcpu", anonymous)).unwrap();
        let said = domain.attach(&port()).unwrap_err().to_string();
        assert!(said.contains("change it to 'memfd'"), "{said}");
        let huge = "<memoryBacking><hugepages/></memoryBacking><vcpu";
        let mut domain = Domain::parse(&PLAIN.replace("<vcpu", huge)).unwrap();
        domain.attach(&port()).unwrap();
        assert!(!domain.text().unwrap().contains("memfd"));
    }

    #[test]
    fn an_emulated_domain_gets_no_interrupt_vectors_for_its_card() {
        let mut domain = Domain::parse(&PLAIN.replace("'kvm'", "'qemu'")).unwrap();
        domain.attach(&port()).unwrap();
        let text = domain.text().unwrap();
        assert!(text.contains("<qemu:property") && text.contains("name=\"vectors\""), "{text}");
        let mut domain = Domain::parse(PLAIN).unwrap();
        domain.attach(&port()).unwrap();
        assert!(!domain.text().unwrap().contains("vectors"));
    }

    #[test]
    fn memory_grows_from_a_part_and_is_whole_again_afterwards() {
        let mut domain = Domain::parse(&PLAIN.replace(">1024<", ">4096<")).unwrap();
        domain.attach(&Want::Grow).unwrap();
        let text = domain.text().unwrap();
        assert!(text.contains("virtio-mem") && text.contains("cpus=\"0-1\""), "{text}");
        assert_eq!(domain.initial().unwrap() + domain.grown().unwrap(), 4 << 30);
        assert!(domain.initial().unwrap() < 1 << 30);
        domain.detach(&[Want::Grow]).unwrap();
        assert!(!domain.text().unwrap().contains("virtio-mem"));
        assert_eq!(domain.initial().unwrap(), 4 << 30);
        let mut small = Domain::parse(&PLAIN.replace(">1024<", ">256<")).unwrap();
        let said = small.attach(&Want::Grow).unwrap_err().to_string();
        assert!(said.contains("nothing can grow"), "{said}");
    }

    #[test]
    fn what_is_no_domain_is_refused() {
        assert!(Domain::parse("<network/>").unwrap_err().to_string().contains("<network>"));
        assert!(Domain::parse("<domain>").is_err());
    }
}
