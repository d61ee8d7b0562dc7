// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo topology`: the host and who has what of it, what VMs would get, and whether a guest sees what its VM got.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;
use tombolo_topology::cli::ShowOptions;
use tombolo_topology::compare::{self, Line, Verdict};
use tombolo_topology::cpus::CpuSet;
use tombolo_topology::dedicated::{Dedicated, HostFlags};
use tombolo_topology::domain::Domain;
use tombolo_topology::model::Topology;
use tombolo_topology::picture::{self, Users};
use tombolo_topology::plan::{Plan, Rules, VmPlan};
use tombolo_topology::qemu::Vendor;
use tombolo_topology::request::{Pages, Part};
use tombolo_topology::{affinity, apply, cli, gather, interrupts, read};
use tombolo_zone::numa::Nodes;

use crate::commands::cli::{File, say};
use crate::commands::client;
use crate::commands::ps::running;
use crate::compose::{Compose, Project};
use crate::machine::placement::{self, Placement};
use crate::project::control::{Event, Request, Status};
use crate::project::services::{self, Service};
use crate::qemu::Hypervisor;

/// The host's topology, and VMs on it.
#[derive(clap::Subcommand, Debug)]
pub enum TopologyCommand {
    /// Show the host: packages, dies, caches, cores, nodes, PCI root complexes, and which VM has which CPUs
    Show(ShowOptions),
    /// Show what each VM of a compose file would get, and why; nothing is changed
    Plan {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// Plan for a machine of this description of hwloc's instead of this host
        #[arg(long, value_name = "DESCRIPTION")]
        synthetic: Option<String>,
    },
    /// Compare what a running VM's guest sees with what the VM got, object by object; exit code 1 where something differs
    Check {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// The VM
        vm: String,
    },
    /// Print the XML of a domain of libvirt's that lies on the host's topology
    Libvirt(LibvirtOptions),
    /// Print the machine below $HWLOC_FSROOT as JSON
    #[command(hide = true)]
    Read,
}

/// Options of `tombolo topology libvirt`.
#[derive(clap::Args, Debug)]
pub struct LibvirtOptions {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// The domain's name, a file with its XML, or '-' for the standard input
    #[arg(required_unless_present = "vm", conflicts_with = "vm")]
    domain: Option<String>,
    /// A VM of the compose file instead
    #[arg(long)]
    vm: Option<String>,
    /// The part of the host: "host", "node:0", "close" or "cpus:0-3"
    #[arg(long, default_value = "close", conflicts_with = "vm")]
    part: Part,
    /// CPUs of each node that stay with the host
    #[arg(long, default_value_t = 0, conflicts_with = "vm")]
    reserve: u32,
}

/// Runs one of [`TopologyCommand`].
///
/// # Errors
/// The VM is not up, or says no `topology`, or the host can't be read. Names the remedy.
pub fn run(command: TopologyCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        TopologyCommand::Show(options) => {
            let users = if options.synthetic.is_none() { users(&running(None)?) } else { Users::new() };
            cli::show(&options, &options.machine()?, &users, json)
        }
        TopologyCommand::Plan { file, synthetic } => plan(&file.load()?, synthetic.as_deref(), json),
        TopologyCommand::Check { file, vm } => check(&file.identify()?, &vm, json),
        TopologyCommand::Libvirt(options) => {
            say(libvirt(&options)?.trim_end())?;
            Ok(ExitCode::SUCCESS)
        }
        TopologyCommand::Read => {
            read::answer()?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The CPUs of running VMs and of what serves them, by name.
fn users(projects: &[Status]) -> Users {
    let vms = projects.iter().flat_map(|project| project.vms.iter().filter(|vm| vm.pid.is_some()));
    let plans = vms.filter_map(|vm| Some((vm.name.clone(), &vm.placement.as_ref()?.plan)));
    let vms = plans.flat_map(|(name, plan)| {
        let own = (format!("QEMU of {name}"), plan.service_cpus());
        let interrupts = plan.roots.iter().flat_map(|root| root.interrupts.iter());
        let interrupts = (format!("interrupts of {name}"), interrupts.collect());
        [(name, plan.host_cpus()), own, interrupts]
    });
    let services = projects.iter().flat_map(|project| &project.services);
    vms.chain(services.map(|service| (service.title(), service.cpus.clone()))).collect()
}

fn plan(project: &Project, synthetic: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let vms = project.compose.vm.iter().map(|(name, spec)| (name.as_str(), spec));
    let requests = placement::requests(vms);
    anyhow::ensure!(
        !requests.is_empty(),
        "no VM of {} says 'topology'; add topology = \"host\", \"node:0\", \"close\" or \"cpus:0-3\" to one",
        project.file.display()
    );
    let plan = match synthetic {
        Some(description) => {
            let rules = Rules { reserve: project.compose.reserve, ..Rules::default() };
            tombolo_topology::plan::plan(&read::synthetic(description)?, &rules, &requests)?
        }
        None => {
            // The places of the project's own VMs are planned anew.
            let own = |status: &Status, _: &str| status.file == project.file;
            placement::plan_all(&requests, &placement::rules(&project.compose, &running(None)?, own))?
        }
    };
    let services = services::planned(&project.compose, &plan.vms);
    let isolated = isolated(&project.compose, &plan.vms, synthetic.is_none());
    let dedicated = plan.vms.iter().filter_map(|vm| {
        let spec = project.compose.vm.get(&vm.name)?;
        Some((vm.name.clone(), placement::dedicated(vm, spec, Hypervisor::Kvm)))
    });
    let zones = services::planned_zones(&project.compose, &plan.vms);
    let planned = Planned { plan: &plan, services, isolated, zones, dedicated: dedicated.collect() };
    if json {
        say(&serde_json::to_string_pretty(&planned)?)?;
    } else {
        say(describe(&planned).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The output of `plan --json`.
#[derive(Serialize)]
struct Planned<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    services: Vec<Service>,
    isolated: Vec<Isolated>,
    /// The nodes of zones' memory.
    zones: BTreeMap<String, Nodes>,
    /// By VM; nothing of it under TCG.
    dedicated: BTreeMap<String, Dedicated>,
}

/// A VM that says `isolate`.
#[derive(Serialize)]
struct Isolated {
    vm: String,
    cpus: CpuSet,
    /// Why this host can't do it.
    refused: Option<String>,
}

/// The VMs that want their CPUs for themselves; `here`: on this host, which may lack something for that.
fn isolated(compose: &Compose, plans: &[VmPlan], here: bool) -> Vec<Isolated> {
    let wanting = plans.iter().filter(|plan| compose.vm.get(&plan.name).is_some_and(|spec| spec.isolate));
    let of = |plan: &VmPlan| {
        let checked = if here { placement::check_isolation(compose, &plan.name, plan) } else { Ok(()) };
        let refused = checked.err().map(|e| format!("{e:#}"));
        Isolated { vm: plan.name.clone(), cpus: plan.isolated_cpus(), refused }
    };
    wanting.map(of).collect()
}

fn describe(Planned { plan, services, isolated, zones, dedicated }: &Planned<'_>) -> String {
    let mut text: String = plan.vms.iter().map(describe_vm).collect();
    for service in services {
        text.push_str(&format!("{}: CPUs {}\n", service.title(), service.cpus));
    }
    for (zone, nodes) in zones {
        text.push_str(&format!("memory of the zone {zone}: {nodes}\n"));
    }
    for (vm, dedicated) in dedicated.iter().filter(|(_, dedicated)| !dedicated.names().is_empty()) {
        text.push_str(&format!("under KVM {vm} has {}\n", dedicated.names().join(", ")));
    }
    for Isolated { vm, cpus, refused } in isolated {
        let refused = refused.as_ref().map(|why| format!(", which 'up' refuses: {why}")).unwrap_or_default();
        text.push_str(&format!("isolated for {vm}: CPUs {cpus}{refused}\n"));
    }
    let reserved: CpuSet = plan.reserved.values().flat_map(CpuSet::iter).collect();
    for (name, cpus) in [("reserved", &reserved), ("free", &plan.free)] {
        let cpus = if cpus.is_empty() { "no CPUs".into() } else { format!("CPUs {cpus}") };
        text.push_str(&format!("{name}: {cpus}\n"));
    }
    for (node, bytes) in &plan.free_memory {
        text.push_str(&format!("memory left on node {node}: {}\n", picture::size(*bytes)));
    }
    text
}

fn describe_vm(vm: &VmPlan) -> String {
    let shape = vm.shape;
    let mut text = format!(
        "{}: {} CPUs ({} sockets, {} dies, {} cores, {} threads), {} in {}\n",
        vm.name,
        vm.vcpus.len(),
        shape.sockets,
        shape.dies,
        shape.cores,
        shape.threads,
        picture::size(vm.memory()),
        vm.pages
    );
    for (number, node) in (0..).zip(&vm.nodes) {
        let guest = vm.cpus_of(number);
        let on: CpuSet = vm.vcpus.iter().filter(|v| v.node == number).map(|v| v.host).collect();
        let cpus = match guest.is_empty() {
            true => "no CPUs".to_owned(),
            false => format!("vCPUs {guest} on CPUs {on}"),
        };
        text.push_str(&format!(
            "  node {number}: {} of the host's node {}, {cpus}\n",
            picture::size(node.memory),
            node.host
        ));
    }
    text.push_str(&format!("  QEMU's own threads on CPUs {}\n", vm.emulator));
    for root in &vm.roots {
        let node = root.node.map_or("no node".into(), |node| format!("node {node}"));
        let devices: Vec<&str> = root.devices.iter().map(|device| device.address.as_str()).collect();
        text.push_str(&format!("  root complex {:02x} ({node}): {}\n", root.bus, devices.join(", ")));
        if !root.interrupts.is_empty() {
            text.push_str(&format!("    their interrupts on CPUs {}\n", root.interrupts));
        }
    }
    for note in &vm.notes {
        text.push_str(&format!("  - {note}\n"));
    }
    text
}

/// The output of `check --json`.
#[derive(Serialize)]
struct Checked<'a> {
    same: usize,
    differs: usize,
    unknown: usize,
    lines: &'a [Line],
}

fn check(project: &Project, name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let status = client::status(project)?;
    let vm = status.vms.iter().find(|vm| vm.name == name);
    let vm = vm.with_context(|| format!("the project '{}' runs no VM '{name}'", project.name))?;
    let placement = vm.placement.as_ref().with_context(|| {
        format!("the VM '{name}' was started without 'topology'; add it to the compose file and 'tombolo restart {name}'")
    })?;
    let pid = vm.pid.with_context(|| format!("the VM '{name}' does not run ({})", vm.state))?;
    let mut lines = compare::compare(&placement.plan.guest(), &guest(project, name)?);
    lines.extend(outside(pid, placement)?);
    if placement.dedicated != Dedicated::default() {
        let cpuinfo = ask(project, name, &["cat", "/proc/cpuinfo"])?;
        lines.extend(flags(placement.dedicated, &HostFlags::of(&cpuinfo), &HostFlags::read()));
    }
    lines.extend(placement.partition.iter().flat_map(|group| partition(&placement.plan, group)));
    lines.extend(beside(&status.services, name, &placement.plan));
    let count = |verdict| lines.iter().filter(|line| line.verdict == verdict).count();
    let [same, differs, unknown] = [Verdict::Same, Verdict::Differs, Verdict::Unknown].map(count);
    if json {
        say(&serde_json::to_string_pretty(&Checked { same, differs, unknown, lines: &lines })?)?;
    } else {
        for line in &lines {
            say(&sentence(line))?;
        }
        say(&format!("{same} same, {differs} differ, {unknown} can't be said"))?;
    }
    Ok(if differs == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sentence(line: &Line) -> String {
    let Line { object, planned, found, verdict } = line;
    match verdict {
        Verdict::Same if planned == found => format!("same      {object}: {found}"),
        Verdict::Same => format!("same      {object}: {found} (planned: {planned})"),
        Verdict::Differs => format!("differs   {object}: {found} in place of {planned}"),
        Verdict::Unknown => format!("not said  {object}: {found} (planned: {planned})"),
    }
}

/// Compares a plan with QEMU's process: the places of its threads and memory.
fn outside(pid: u32, placement: &Placement) -> anyhow::Result<Vec<Line>> {
    let found = apply::found(pid, &placement.threads, &placement.plan)?;
    Ok(apply::compare(&placement.plan, &found))
}

/// Compares the flags of a guest's CPUs under KVM with what the VM was given.
fn flags(given: Dedicated, guest: &HostFlags, host: &HostFlags) -> Vec<Line> {
    let word = |on: bool| if on { "on" } else { "off" };
    let mut lines = Vec::new();
    if given.invtsc {
        lines.push(Line::of("invariant TSC", "on", word(guest.has("nonstop_tsc"))));
    }
    if given.cpu_pm {
        // Only a guest that may idle by itself is offered MWAIT, where the host has it.
        lines.push(match host.has("monitor") {
            true => Line::of("the guest idles by itself (MWAIT)", "on", word(guest.has("monitor"))),
            false => Line::unknown("the guest idles by itself (MWAIT)", "on", "the host has no MWAIT"),
        });
    }
    if given.hint {
        lines.push(Line::unknown(
            "hint that its CPUs are its own",
            "on",
            "a guest's kernel does not show it",
        ));
    }
    lines
}

/// Compares the cgroup partition of a VM with its plan.
fn partition(plan: &VmPlan, group: &Path) -> Vec<Line> {
    let read = |file: &str| std::fs::read_to_string(group.join(file)).unwrap_or_default().trim().to_owned();
    vec![
        Line::of("cgroup partition of the vCPUs", "isolated", read("cpuset.cpus.partition")),
        Line::of("CPUs of the partition", plan.isolated_cpus(), read("cpuset.cpus.effective")),
    ]
}

/// Compares the CPUs of what serves a VM with its plan: switches, accelerator servers, interrupts of its devices.
fn beside(services: &[Service], vm: &str, plan: &VmPlan) -> Vec<Line> {
    let used = services.iter().filter(|s| !s.cpus.is_empty() && s.vms.iter().any(|user| user == vm));
    let mut lines: Vec<Line> = used
        .map(|service| {
            let object = format!("{}: host CPUs", service.title());
            match service.process.and_then(affinity::of_family) {
                Some(found) => Line::of(object, &service.cpus, found),
                None => Line::unknown(object, &service.cpus, "it is being started again"),
            }
        })
        .collect();
    for root in plan.roots.iter().filter(|root| !root.interrupts.is_empty()) {
        for device in &root.devices {
            let object = format!("interrupts of {}: host CPUs", device.address);
            let numbers = interrupts::of_device(Path::new("/"), &device.address);
            let found: Vec<CpuSet> =
                numbers.into_iter().filter_map(|number| interrupts::cpus(Path::new("/"), number)).collect();
            lines.push(match found.is_empty() {
                true => Line::unknown(object, &root.interrupts, "the guest's driver has asked for none"),
                false => Line::of(
                    object,
                    &root.interrupts,
                    found.iter().flat_map(CpuSet::iter).collect::<CpuSet>(),
                ),
            });
        }
    }
    lines
}

/// The machine that a guest's kernel shows, by its agent.
fn guest(project: &Project, vm: &str) -> anyhow::Result<Topology> {
    let said = ask(project, vm, &["/bin/sh", "-c", gather::SCRIPT])?;
    let mut reader = crate::child::own_program();
    reader.args(["topology", "read"]);
    gather::topology(&said, reader)
}

/// The output of a command in a guest.
fn ask(project: &Project, vm: &str, command: &[&str]) -> anyhow::Result<String> {
    let request = Request::Exec {
        vm: vm.to_owned(),
        argv: command.iter().map(|word| (*word).to_owned()).collect(),
        env: Vec::new(),
        dir: None,
        input: false,
        terminal: None,
    };
    let mut peer = client::living(project, &request)?;
    let mut said = Vec::new();
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => said.extend(BASE64.decode(data)?),
            Some(Event::Done) => break,
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(_) => {}
            None => anyhow::bail!("the supervisor ended while the guest was asked"),
        }
        anyhow::ensure!(said.len() <= gather::LONGEST, "the guest of '{vm}' does not stop writing");
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

fn libvirt(options: &LibvirtOptions) -> anyhow::Result<String> {
    let (mut domain, request, reserve) = match (&options.vm, &options.domain) {
        (Some(vm), _) => {
            let project = options.file.load()?;
            let spec = project.compose.vm.get(vm);
            let spec = spec.with_context(|| format!("{} has no VM '{vm}'", project.file.display()))?;
            let request = placement::requests([(vm.as_str(), spec)].into_iter()).pop();
            let request = request.with_context(|| format!("vm.{vm} does not say 'topology'; add it"))?;
            (Domain::new(vm), request, project.compose.reserve)
        }
        (None, Some(name)) => {
            let domain = Domain::parse(&xml_of(name)?)?;
            let request = domain.request(options.part.clone(), Pages::Auto)?;
            (domain, request, options.reserve)
        }
        (None, None) => anyhow::bail!("name a domain, or a VM with --vm"),
    };
    let compose = crate::compose::Compose { reserve, ..Default::default() };
    let rules = placement::rules(&compose, &running(None)?, |_, vm| options.vm.as_deref() == Some(vm));
    let plan = placement::plan_all(&[request], &rules)?;
    // libvirt makes no cgroup partition and can't say cpu-pm.
    let dedicated = Dedicated::of(&plan.vms[0], false, None, &HostFlags::read());
    domain.place(&plan.vms[0], Vendor::of_host() == Vendor::Amd, dedicated);
    domain.text()
}

/// The XML of a domain: of a file, of the standard input, or of libvirt.
fn xml_of(name: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    if name == "-" {
        std::io::stdin().read_to_string(&mut text).context("the standard input can't be read")?;
    } else if Path::new(name).is_file() {
        text = std::fs::read_to_string(name).with_context(|| format!("{name} can't be read"))?;
    } else {
        let output = Command::new("virsh").args(["dumpxml", "--inactive", "--", name]).output();
        let output = output.context("virsh can't be run; install the package libvirt-clients")?;
        if !output.status.success() {
            std::io::stderr().write_all(&output.stderr)?;
            anyhow::bail!("libvirt has no domain '{name}', and there is no such file");
        }
        text = String::from_utf8(output.stdout).context("the domain's XML is not UTF-8")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_lacks_what_its_vm_was_given_differs() {
        let all = Dedicated { hint: true, cpu_pm: true, invtsc: true };
        let has = HostFlags::of("flags : monitor nonstop_tsc\n");
        let lacks = HostFlags::of("flags : fpu\n");
        let verdicts =
            |guest, host| flags(all, guest, host).iter().map(|line| line.verdict).collect::<Vec<_>>();
        use Verdict::{Differs, Same, Unknown};
        assert_eq!(verdicts(&has, &has), [Same, Same, Unknown]);
        assert_eq!(verdicts(&lacks, &has), [Differs, Differs, Unknown]);
        assert_eq!(verdicts(&has, &lacks), [Same, Unknown, Unknown]);
        assert!(flags(Dedicated::default(), &lacks, &has).is_empty());
    }
}
