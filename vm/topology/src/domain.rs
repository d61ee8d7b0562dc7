// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A plan in the words of libvirt's XML: an existing domain as it must be to lie on the host's topology. What the plan does not decide stays as it is.

use anyhow::{Context, Result, bail, ensure};
use xml::reader::{EventReader, XmlEvent};
use xmltree::{Element, EmitterConfig, XMLNode};

use crate::cpus::CpuSet;
use crate::dedicated::Dedicated;
use crate::memory::{MIB, PageSize};
use crate::plan::VmPlan;
use crate::qemu;
use crate::request::{Pages, Part, Request};
use crate::shape::Slot;

/// More I/O threads than a domain has.
const MOST_IOTHREADS: usize = 1 << 16;

/// The most elements in each other: the parser calls itself for each.
const DEEPEST: u32 = 64;

/// Returns whether no element of this XML is deeper than [`DEEPEST`], as far as it is well-formed.
fn is_flat(text: &str) -> bool {
    let events = EventReader::new(text.as_bytes()).into_iter().map_while(Result::ok);
    let depths = events.scan(0u32, |depth, event| {
        match event {
            XmlEvent::StartElement { .. } => *depth += 1,
            XmlEvent::EndElement { .. } => *depth -= 1,
            _ => {}
        }
        Some(*depth)
    });
    depths.into_iter().all(|depth| depth <= DEEPEST)
}

/// A domain's XML.
#[derive(Clone, Debug)]
pub struct Domain {
    root: Element,
}

impl Domain {
    /// Reads what `virsh dumpxml --inactive` prints.
    ///
    /// # Errors
    /// It is no domain.
    pub fn parse(text: &str) -> Result<Domain> {
        ensure!(
            is_flat(text),
            "the domain's XML has more than {DEEPEST} elements in each other, which no domain has"
        );
        let root = Element::parse(text.as_bytes()).context("the domain's XML is malformed")?;
        if root.name != "domain" {
            bail!("this XML is of a <{}>, not of a <domain>", root.name);
        }
        Ok(Domain { root })
    }

    /// A domain without anything but what a plan decides, for a VM that libvirt does not know yet.
    pub fn new(name: &str) -> Domain {
        let mut root = Element::new("domain");
        root.attributes.insert("type".into(), "kvm".into());
        root.children.push(XMLNode::Element(with_text("name", name)));
        let mut os = Element::new("os");
        let machine = with_attributes(with_text("type", "hvm"), &[("arch", "x86_64"), ("machine", "q35")]);
        os.children.push(XMLNode::Element(machine));
        let cpu = with_attributes(Element::new("cpu"), &[("mode", "host-passthrough")]);
        for element in [os, cpu, Element::new("devices")] {
            root.children.push(XMLNode::Element(element));
        }
        Domain { root }
    }

    /// The domain's request to the host: CPUs, memory and PCI devices.
    ///
    /// # Errors
    /// The XML does not say how many CPUs or how much memory it has, or has more I/O threads than a machine can.
    pub fn request(&self, part: Part, pages: Pages) -> Result<Request> {
        let text = |name: &str| self.root.get_child(name).and_then(Element::get_text);
        let name = text("name").map(|name| name.trim().to_owned()).context("the domain has no <name>")?;
        let cpus =
            text("vcpu").and_then(|count| count.trim().parse().ok()).context("the domain has no <vcpu>")?;
        let memory = self.root.get_child("memory").context("the domain has no <memory>")?;
        let memory = bytes(memory).context("the domain's <memory> is no size")? / (2 * MIB) * (2 * MIB);
        let iothreads = || format!("the domain's <iothreads> is no number from 0 to {MOST_IOTHREADS}");
        self.count_of_iothreads().with_context(iothreads)?;
        let devices =
            self.passed_through().filter_map(|device| address(device.get_child("source")?)).collect();
        Ok(Request { name, part, cpus, memory, pages, devices })
    }

    fn passed_through(&self) -> impl Iterator<Item = &Element> {
        let devices = self.root.get_child("devices").into_iter().flat_map(|devices| devices.children.iter());
        devices
            .filter_map(XMLNode::as_element)
            .filter(|e| e.name == "hostdev" && e.attributes.get("type").is_some_and(|kind| kind == "pci"))
    }

    /// Makes the domain as the plan says. `dedicated` is for a domain under KVM; libvirt has no word for `cpu-pm`.
    pub fn place(&mut self, plan: &VmPlan, amd: bool, dedicated: Dedicated) {
        self.size(plan);
        self.tune(plan);
        self.processor(plan, amd);
        if self.root.attributes.get("type").is_some_and(|kind| kind == "kvm") {
            self.dedicate(dedicated);
        }
        self.backing(plan);
        self.root_complexes(plan);
    }

    /// The XML.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn text(&self) -> Result<String> {
        let mut text = Vec::new();
        let config = EmitterConfig::new().perform_indent(true).write_document_declaration(false);
        self.root.write_with_config(&mut text, config)?;
        Ok(format!("{}\n", String::from_utf8(text)?))
    }

    /// Puts an element in the place of those with its name.
    fn put(&mut self, element: Element) {
        let named = |node: &XMLNode| node.as_element().is_some_and(|e| e.name == element.name);
        let at = self.root.children.iter().position(named).unwrap_or(self.root.children.len());
        self.root.children.retain(|node| !named(node));
        self.root.children.insert(at.min(self.root.children.len()), XMLNode::Element(element));
    }

    fn part(&mut self, name: &str) -> &mut Element {
        if self.root.get_child(name).is_none() {
            self.root.children.push(XMLNode::Element(Element::new(name)));
        }
        self.root.get_mut_child(name).expect("it is there, or was just added")
    }

    fn size(&mut self, plan: &VmPlan) {
        let kib = (plan.memory() >> 10).to_string();
        for name in ["memory", "currentMemory"] {
            self.put(with_attributes(with_text(name, &kib), &[("unit", "KiB")]));
        }
        let slots = plan.shape.slots();
        let count = plan.vcpus.len().to_string();
        let mut vcpu = with_text("vcpu", &slots.to_string());
        vcpu.attributes.insert("placement".into(), "static".into());
        self.root.children.retain(|node| node.as_element().is_none_or(|e| e.name != "vcpus"));
        if slots as usize > plan.vcpus.len() {
            vcpu.attributes.insert("current".into(), count);
            let mut vcpus = Element::new("vcpus");
            let there: CpuSet = plan.vcpus.iter().map(|vcpu| index(plan, vcpu.slot)).collect();
            for id in 0..slots {
                let enabled = if there.contains(id) { "yes" } else { "no" };
                // QEMU makes the first CPU itself and lets the others come and go.
                let hotpluggable = if id == 0 { "no" } else { "yes" };
                let id = id.to_string();
                push(
                    &mut vcpus,
                    "vcpu",
                    &[("id", &id), ("enabled", enabled), ("hotpluggable", hotpluggable)],
                );
            }
            self.put(vcpus);
        }
        self.put(vcpu);
    }

    /// How many I/O threads the domain says that it has.
    fn count_of_iothreads(&self) -> Option<usize> {
        let count = self.root.get_child("iothreads").and_then(Element::get_text);
        count.map_or(Some(0), |count| count.trim().parse().ok().filter(|count| *count <= MOST_IOTHREADS))
    }

    /// The numbers of the domain's I/O threads.
    fn iothreads(&self) -> Vec<u32> {
        let count = self.count_of_iothreads().unwrap_or(0);
        let ids = self.root.get_child("iothreadids").into_iter().flat_map(|ids| ids.children.iter());
        let ids = ids.filter_map(|node| node.as_element()?.attributes.get("id")?.parse().ok());
        let mut named: Vec<u32> = ids.collect();
        // libvirt gives the others the lowest numbers that are free.
        let free: Vec<u32> =
            (1..).filter(|id| !named.contains(id)).take(count.saturating_sub(named.len())).collect();
        named.extend(free);
        named.sort_unstable();
        named
    }

    fn tune(&mut self, plan: &VmPlan) {
        let iothreads = self.iothreads();
        let cputune = self.part("cputune");
        let ours = ["vcpupin", "emulatorpin", "iothreadpin"];
        cputune.children.retain(|node| node.as_element().is_none_or(|e| !ours.contains(&e.name.as_str())));
        for vcpu in &plan.vcpus {
            let (id, cpu) = (index(plan, vcpu.slot).to_string(), vcpu.host.to_string());
            push(cputune, "vcpupin", &[("vcpu", &id), ("cpuset", &cpu)]);
        }
        let services = plan.emulator.to_string();
        push(cputune, "emulatorpin", &[("cpuset", &services)]);
        for id in iothreads {
            push(cputune, "iothreadpin", &[("iothread", &id.to_string()), ("cpuset", &services)]);
        }
        let mut numatune = Element::new("numatune");
        let nodes: CpuSet = plan.nodes.iter().map(|node| node.host).collect();
        push(&mut numatune, "memory", &[("mode", "strict"), ("nodeset", &nodes.to_string())]);
        for (cell, node) in plan.nodes.iter().enumerate() {
            let (cell, host) = (cell.to_string(), node.host.to_string());
            push(&mut numatune, "memnode", &[("cellid", &cell), ("mode", "strict"), ("nodeset", &host)]);
        }
        self.put(numatune);
    }

    fn processor(&mut self, plan: &VmPlan, amd: bool) {
        let cpu = self.part("cpu");
        let ours = |e: &Element| {
            ["topology", "numa", "cache"].contains(&e.name.as_str()) || is_feature(e, "topoext")
        };
        cpu.children.retain(|node| !node.as_element().is_some_and(ours));
        let shape = plan.shape;
        let [sockets, dies, cores, threads] =
            [shape.sockets, shape.dies, shape.cores, shape.threads].map(|wide| wide.to_string());
        push(
            cpu,
            "topology",
            &[("sockets", &sockets), ("dies", &dies), ("cores", &cores), ("threads", &threads)],
        );
        if plan.l3 {
            push(cpu, "cache", &[("level", "3"), ("mode", "emulate")]);
        }
        if amd {
            push(cpu, "feature", &[("policy", "require"), ("name", "topoext")]);
        }
        let numa = numa(plan);
        cpu.children.push(XMLNode::Element(numa));
    }

    /// Features that only KVM has, for a VM whose vCPUs have CPUs of their own.
    fn dedicate(&mut self, dedicated: Dedicated) {
        let features = self.part("features");
        let kvm = features.take_child("kvm");
        let mut kvm = kvm.unwrap_or_else(|| Element::new("kvm"));
        kvm.children.retain(|node| node.as_element().is_none_or(|e| e.name != "hint-dedicated"));
        if dedicated.hint {
            push(&mut kvm, "hint-dedicated", &[("state", "on")]);
        }
        if kvm.children.iter().any(|node| node.as_element().is_some()) {
            features.children.push(XMLNode::Element(kvm));
        }
        let cpu = self.part("cpu");
        cpu.children.retain(|node| node.as_element().is_none_or(|e| !is_feature(e, "invtsc")));
        if dedicated.invtsc {
            push(cpu, "feature", &[("policy", "require"), ("name", "invtsc")]);
        }
    }

    fn backing(&mut self, plan: &VmPlan) {
        let backing = self.part("memoryBacking");
        backing.children.retain(|node| {
            node.as_element().is_none_or(|e| !["hugepages", "allocation"].contains(&e.name.as_str()))
        });
        let size = match plan.pages {
            PageSize::Gigantic => Some(("1", "G")),
            PageSize::Huge => Some(("2", "M")),
            PageSize::Transparent => None,
        };
        if let Some((size, unit)) = size {
            let mut pages = Element::new("hugepages");
            push(&mut pages, "page", &[("size", size), ("unit", unit)]);
            backing.children.insert(0, XMLNode::Element(pages));
        }
        push(backing, "allocation", &[("mode", "immediate")]);
    }

    /// A `pcie-expander-bus` per root complex, a port for each device, and the devices behind them.
    fn root_complexes(&mut self, plan: &VmPlan) {
        if plan.roots.is_empty() {
            return;
        }
        let devices = self.part("devices");
        let of_controllers = |name: &str, e: &Element| {
            e.name == "controller" && e.attributes.get("type").is_some_and(|t| t == name)
        };
        let highest =
            devices.children.iter().filter_map(XMLNode::as_element).filter(|e| of_controllers("pci", e));
        // A guest has 256 buses, so libvirt refuses a larger index.
        let highest = highest.filter_map(|e| e.attributes.get("index")?.parse::<u16>().ok()).max();
        let mut next = highest.map_or(0, u32::from) + 1;
        for root in &plan.roots {
            let bus = next;
            let mut expander = controller(bus, "pcie-expander-bus");
            let mut target = with_attributes(Element::new("target"), &[("busNr", &root.bus.to_string())]);
            if let Some(node) = root.node {
                target.children.push(XMLNode::Element(with_text("node", &node.to_string())));
            }
            expander.children.push(XMLNode::Element(target));
            devices.children.push(XMLNode::Element(expander));
            next += 1;
            for (slot, device) in root.devices.iter().enumerate() {
                let mut port = controller(next, "pcie-root-port");
                port.children.push(XMLNode::Element(place_of(bus, slot)));
                devices.children.push(XMLNode::Element(port));
                move_behind(devices, &device.address, next);
                next += 1;
            }
        }
    }
}

/// Returns whether an element of `<cpu>` is about this feature.
fn is_feature(element: &Element, name: &str) -> bool {
    element.name == "feature" && element.attributes.get("name").is_some_and(|own| own == name)
}

/// libvirt counts vCPUs by slot, empty ones included.
fn index(plan: &VmPlan, slot: Slot) -> u32 {
    let shape = plan.shape;
    ((slot.socket * shape.dies + slot.die) * shape.cores + slot.core) * shape.threads + slot.thread
}

/// The guest's nodes with their CPUs, memory, distances and speed. An empty slot goes with the slot before it.
fn numa(plan: &VmPlan) -> Element {
    let mut numa = Element::new("numa");
    let mut cpus = vec![CpuSet::default(); plan.nodes.len()];
    let mut last = 0;
    for id in 0..plan.shape.slots() {
        let here = plan.vcpus.iter().find(|vcpu| index(plan, vcpu.slot) == id);
        last = here.map_or(last, |vcpu| vcpu.node as usize);
        cpus[last].insert(id);
    }
    for (id, (node, cpus)) in plan.nodes.iter().zip(cpus).enumerate() {
        let mut cell = Element::new("cell");
        cell.attributes.insert("id".into(), id.to_string());
        if !cpus.is_empty() {
            cell.attributes.insert("cpus".into(), cpus.to_string());
        }
        cell.attributes.insert("memory".into(), (node.memory >> 10).to_string());
        cell.attributes.insert("unit".into(), "KiB".into());
        if let Some(rows) = &plan.distances {
            let mut distances = Element::new("distances");
            for (to, value) in rows[id].iter().enumerate() {
                push(&mut distances, "sibling", &[("id", &to.to_string()), ("value", &value.to_string())]);
            }
            cell.children.push(XMLNode::Element(distances));
        }
        numa.children.push(XMLNode::Element(cell));
    }
    if qemu::has_access(plan) {
        numa.children.push(XMLNode::Element(interconnects(plan)));
    }
    numa
}

fn interconnects(plan: &VmPlan) -> Element {
    let mut all = Element::new("interconnects");
    let speeds = |target: usize| plan.nodes[target].access;
    let initiator = |target| qemu::nearest_with_cpus(plan, target).to_string();
    for target in 0..plan.nodes.len() {
        let Some(access) = speeds(target) else { continue };
        let (from, to, value) = (initiator(target), target.to_string(), access.latency.to_string());
        let pair = [("initiator", from.as_str()), ("target", &to), ("type", "access"), ("value", &value)];
        push(&mut all, "latency", &pair);
    }
    for target in 0..plan.nodes.len() {
        let Some(access) = speeds(target) else { continue };
        let (from, to, value) = (initiator(target), target.to_string(), access.bandwidth.to_string());
        let pair = [
            ("initiator", from.as_str()),
            ("target", &to),
            ("type", "access"),
            ("value", &value),
            ("unit", "MiB"),
        ];
        push(&mut all, "bandwidth", &pair);
    }
    all
}

fn controller(index: u32, model: &str) -> Element {
    with_attributes(
        Element::new("controller"),
        &[("type", "pci"), ("index", &index.to_string()), ("model", model)],
    )
}

/// A guest's PCI address.
fn place_of(bus: u32, slot: usize) -> Element {
    let (bus, slot) = (format!("{bus:#04x}"), format!("{slot:#04x}"));
    let place =
        [("type", "pci"), ("domain", "0x0000"), ("bus", bus.as_str()), ("slot", &slot), ("function", "0x0")];
    with_attributes(Element::new("address"), &place)
}

/// Moves the device that the host has at `address` to a bus of the guest.
fn move_behind(devices: &mut Element, host: &str, bus: u32) {
    for node in &mut devices.children {
        let XMLNode::Element(element) = node else { continue };
        if element.get_child("source").and_then(address).as_deref() == Some(host) {
            element.children.retain(|n| n.as_element().is_none_or(|e| e.name != "address"));
            element.children.push(XMLNode::Element(place_of(bus, 0)));
        }
    }
}

/// The host's PCI address in a `<source>`, as Linux writes it.
fn address(source: &Element) -> Option<String> {
    let address = source.get_child("address")?;
    let number = |name: &str| {
        let text = address.attributes.get(name).map_or("0", String::as_str);
        match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    };
    let [domain, bus, slot, function] = ["domain", "bus", "slot", "function"].map(number);
    Some(format!("{:04x}:{:02x}:{:02x}.{:x}", domain?, bus?, slot?, function?))
}

/// A size with its unit, KiB where it has none.
fn bytes(element: &Element) -> Option<u64> {
    let count: u64 = element.get_text()?.trim().parse().ok()?;
    let unit = match element.attributes.get("unit").map_or("KiB", String::as_str) {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    count.checked_mul(unit)
}

fn with_text(name: &str, text: &str) -> Element {
    let mut element = Element::new(name);
    element.children.push(XMLNode::Text(text.to_owned()));
    element
}

fn with_attributes(mut element: Element, attributes: &[(&str, &str)]) -> Element {
    for (name, value) in attributes {
        element.attributes.insert((*name).to_owned(), (*value).to_owned());
    }
    element
}

fn push(parent: &mut Element, name: &str, attributes: &[(&str, &str)]) {
    parent.children.push(XMLNode::Element(with_attributes(Element::new(name), attributes)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Device, Root, Topology};
    use crate::plan::{Rules, plan};
    use crate::read::synthetic;
    use std::io::Write;
    use std::process::{Command, Stdio};

    const XML: &str = "<domain type='qemu'><name>a</name><memory unit='GiB'>4</memory><vcpu>2</vcpu>\
        <cputune><shares>2048</shares><vcpupin vcpu='0' cpuset='9'/></cputune>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os><cpu mode='host-model'><topology sockets='1' dies='1' cores='2' threads='1'/></cpu>\
        <devices><controller type='pci' index='0' model='pcie-root'/>\
        <hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0x0000' bus='0x81' slot='0x00' function='0x0'/></source></hostdev>\
        </devices></domain>";

    fn host() -> Topology {
        let mut host = synthetic("package:2 [numa(memory=16GiB)] die:2 l3:1 core:2 pu:2").unwrap();
        host.distances = Some(vec![vec![10, 21], vec![21, 10]]);
        let device = Device { address: "0000:81:00.0".into(), ..Device::default() };
        host.roots = vec![Root { domain: 0, bus: 0x80, node: Some(1), devices: vec![device] }];
        host
    }

    fn placed(host: &Topology, xml: &str, rules: &Rules) -> Domain {
        let mut domain = Domain::parse(xml).unwrap();
        let request = domain.request(Part::Host, Pages::Auto).unwrap();
        let plan = plan(host, rules, &[request]).unwrap();
        domain.place(&plan.vms[0], true, ALL);
        domain
    }

    const ALL: Dedicated = Dedicated { hint: true, cpu_pm: false, invtsc: true };

    /// libvirt's own validator.
    fn is_valid(xml: &str) -> Result<(), String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(xml.as_bytes()).unwrap();
        let output =
            Command::new("virt-xml-validate").arg(file.path()).arg("domain").stdin(Stdio::null()).output();
        let output = output.expect("virt-xml-validate; install the package libvirt-clients");
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    #[test]
    fn a_domain_gets_the_plan_and_keeps_the_rest() {
        let text = placed(&host(), XML, &Rules::default()).text().unwrap();
        for part in [
            "<vcpu placement=\"static\">16</vcpu>",
            "<shares>2048</shares>",
            "<vcpupin vcpu=\"15\" cpuset=\"15\" />",
            "<memnode cellid=\"1\" mode=\"strict\" nodeset=\"1\" />",
            "<topology sockets=\"2\" dies=\"2\" cores=\"2\" threads=\"2\" />",
            "<cell id=\"1\" cpus=\"8-15\" memory=\"2097152\" unit=\"KiB\">",
            "<sibling id=\"0\" value=\"21\" />",
            "model=\"pcie-expander-bus\"",
            "<target busNr=\"32\">",
            "<feature policy=\"require\" name=\"topoext\" />",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!([text.matches("<topology").count(), text.matches("vcpu=\"0\"").count()], [1, 1], "{text}");
        assert_eq!(is_valid(&text), Ok(()), "{text}");
    }

    #[test]
    fn the_io_threads_that_a_domain_has_run_beside_its_vcpus() {
        let rules = Rules { reserve: 1, ..Rules::default() };
        let xml = XML.replace(
            "<cputune>",
            "<iothreads>3</iothreads><iothreadids><iothread id='2'/><iothread id='7'/></iothreadids><cputune><iothreadpin iothread='7' cpuset='3'/>",
        );
        let text = placed(&host(), &xml, &rules).text().unwrap();
        let pins: Vec<&str> =
            text.lines().map(str::trim).filter(|line| line.contains("<iothreadpin")).collect();
        let pin = |id: u32| format!("<iothreadpin iothread=\"{id}\" cpuset=\"0-1,8-9\" />");
        assert_eq!(pins, [pin(1), pin(2), pin(7)], "{text}");
        assert_eq!(is_valid(&text), Ok(()), "{text}");
    }

    #[test]
    fn odd_numbers_and_depths_of_a_domain_are_refused() {
        let refused = |from: &str, to: &str| {
            let domain = Domain::parse(&XML.replace(from, to));
            let request = domain.and_then(|domain| domain.request(Part::Host, Pages::Auto));
            format!("{:#}", request.unwrap_err())
        };
        for count in ["1000000000", "-1", "x"] {
            let error = refused("<cputune>", &format!("<iothreads>{count}</iothreads><cputune>"));
            assert!(error.contains("<iothreads> is no number from 0 to 65536"), "{error}");
        }
        let deep = format!("{}{}<cputune>", "<a>".repeat(100_000), "</a>".repeat(100_000));
        assert!(refused("<cputune>", &deep).contains("more than 64 elements in each other"));
        // An index beyond all buses is left out of account: libvirt refuses it.
        let xml = XML.replace("index='0'", "index='4294967295'");
        assert!(placed(&host(), &xml, &Rules::default()).text().unwrap().contains("index=\"1\""));
    }

    #[test]
    fn unequal_packages_and_huge_pages_and_speeds_are_valid_xml_too() {
        let mut host = host();
        for node in &mut host.nodes {
            node.access = Some(crate::model::Access { bandwidth: 1000, latency: 90 });
            node.huge = vec![crate::model::HugePages { size: 1 << 30, free: 8 }];
        }
        let rules = Rules { reserve: 2, taken: "15".parse().unwrap(), ..Rules::default() };
        let text = placed(&host, XML, &rules).text().unwrap();
        for part in [
            "<vcpu placement=\"static\" current=\"11\">16</vcpu>",
            "<vcpu id=\"0\" enabled=\"yes\" hotpluggable=\"no\" />",
            "enabled=\"no\" hotpluggable=\"yes\" />",
            "<emulatorpin cpuset=\"0-1,8-9\" />",
            "<page size=\"1\" unit=\"G\" />",
            "<bandwidth initiator=\"1\" target=\"1\" type=\"access\" value=\"1000\" unit=\"MiB\" />",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(is_valid(&text), Ok(()), "{text}");
    }

    #[test]
    fn a_domain_that_is_placed_twice_is_as_one_placed_once() {
        let xml = XML.replace("<hostdev", "<hostdev_").replace("</hostdev>", "</hostdev_>");
        let once = placed(&host(), &xml, &Rules::default());
        let plan_of = |domain: &Domain| {
            let request = domain.request(Part::Host, Pages::Auto).unwrap();
            plan(&host(), &Rules::default(), &[request]).unwrap()
        };
        let mut twice = once.clone();
        twice.place(&plan_of(&once).vms[0], true, ALL);
        assert_eq!(once.text().unwrap(), twice.text().unwrap());
    }

    #[test]
    fn a_domain_under_kvm_is_told_what_its_own_cpus_allow() {
        let kvm = XML
            .replace("type='qemu'", "type='kvm'")
            .replace("<cpu ", "<features><acpi/><kvm><hidden state='on'/></kvm></features><cpu ");
        let given = placed(&host(), &kvm, &Rules::default());
        let text = given.text().unwrap();
        let words = ["<hint-dedicated state=\"on\" />", "<feature policy=\"require\" name=\"invtsc\" />"];
        for part in words.into_iter().chain(["<hidden state=\"on\" />", "<acpi />"]) {
            assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
        }
        assert_eq!(is_valid(&text), Ok(()), "{text}");
        // Placed where it shares its CPUs, and on a host whose TSC stops.
        let request = given.request(Part::Host, Pages::Auto).unwrap();
        let plan = plan(&host(), &Rules::default(), &[request]).unwrap();
        let mut shared = given.clone();
        shared.place(&plan.vms[0], true, Dedicated::default());
        let text = shared.text().unwrap();
        assert!(words.iter().all(|part| !text.contains(part)) && text.contains("<hidden"), "{text}");
        assert_eq!(is_valid(&text), Ok(()), "{text}");
        // Emulation has none of it.
        let emulated = placed(&host(), XML, &Rules::default()).text().unwrap();
        assert!(words.iter().all(|part| !emulated.contains(part)), "{emulated}");
    }
}
