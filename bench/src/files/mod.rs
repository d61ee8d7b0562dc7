// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench files`: the shared file system beside its peers, in one VM, in one run, with the same jobs.
//!
//! Every system gets the same fio matrix (StargateFS's: sequential and random, read and write, one to four jobs), with O_DIRECT, since
//! what is measured is sharing: bytes that another VM sees when the call has returned, not the guest's page cache. Systems
//! take turns, round by round, so that a slower minute of the machine meets all of them. Then operations on names, a source
//! tree, and what two VMs do with one of the systems that share.
//!
//! - [`peers`]: what is mounted where
//! - [`servers`]: the servers on the host that some peers need
//! - [`matrix`]: the fio jobs and how their output is read
//! - [`pair`]: two VMs at once, and producer and consumer

pub mod matrix;
pub mod pair;
pub mod peers;
pub mod servers;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tempfile::TempDir;
use tombolo_bench_project::{Project, interrupt};

use crate::record::{Better, Machine, Results, Sample, command_line};
use matrix::{Matrix, VMS};
use peers::{Peer, TOMBOLO};
use servers::Servers;

/// The parts of the bench that are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// fio's matrix.
    pub matrix: Matrix,
    /// Rounds over all systems.
    pub rounds: u32,
    /// Names for the operations on names; 0: leave them out.
    pub names: u32,
    /// A second VM: fio in both at once, and at most that many MB from a producer in one to a consumer in the other; 0: leave it out.
    pub handover_mb: u32,
    /// Unpack a source tree and ask git for its status.
    pub tree: bool,
    /// The guest kit's kernel; one with 9p, which Debian's cloud kernels leave out.
    pub kernel: String,
}

impl Plan {
    /// The whole matrix.
    pub fn full() -> Plan {
        Plan {
            matrix: Matrix::full(),
            rounds: 3,
            names: 10_000,
            handover_mb: 1024,
            tree: true,
            kernel: "general-6.12".into(),
        }
    }

    /// A few cells, for the demo: what it's worth, in well under a minute.
    pub fn quick() -> Plan {
        Plan {
            matrix: Matrix::quick(),
            rounds: 1,
            names: 1000,
            handover_mb: 0,
            tree: false,
            kernel: "general-6.12".into(),
        }
    }
}

const VM: &str = "bench";
const OTHER: &str = "other";

/// Runs the plan and writes `<dir>/files.jsonl`.
pub fn run(plan: &Plan, dir: &Path, kit: &Path) -> Result<Results> {
    let bench = Bench::start(plan, kit)?;
    let machine = bench.machine()?;
    let mut results = Results::create(dir, "files", machine)?;
    for (system, reason) in bench.servers.left_out() {
        results.leave_out(system, reason)?;
    }
    bench.measure(&mut results)?;
    Ok(results)
}

/// The VMs of a run with the peers' servers and the guest's tools. Fields are dropped in this order: VMs, servers, their folder.
struct Bench<'a> {
    plan: &'a Plan,
    /// A second VM takes part.
    two: bool,
    project: Project,
    servers: Servers,
    _folder: TempDir,
}

impl<'a> Bench<'a> {
    fn start(plan: &'a Plan, kit: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("tombolo-bench-")
            .tempdir_in("/dev/shm")
            .context("can't use /dev/shm")?;
        let export = folder.path().join("export");
        let tools = folder.path().join("tools");
        fs::create_dir(&export)?;
        fs::create_dir(&tools)?;
        build_tool("namebench", &tools)?;
        build_tool("handover", &tools)?;
        if plan.tree {
            pack_tree(&tools.join("tree.tar"))?;
        }
        let servers = Servers::start(folder.path(), &export);
        let initrd = kit.join(&plan.kernel).join("initrd-bench.img");
        if !initrd.exists() {
            bail!("{} is not there: 'scripts/prepare bench' makes it", initrd.display());
        }
        let two = plan.handover_mb > 0 && (plan.matrix.wants("handover") || plan.matrix.wants(VMS));
        let compose = compose(plan, &initrd, folder.path(), &servers, two);
        let project = Project::up(folder.path(), &compose)?;
        let bench = Bench { plan, two, project, servers, _folder: folder };
        for vm in bench.vms() {
            let mount = "mkdir -p /bench && mount -t 9p -o trans=virtio,version=9p2000.L tools /bench";
            bench.project.exec(vm, mount)?;
        }
        Ok(bench)
    }

    fn vms(&self) -> &'static [&'static str] {
        if self.two { &[VM, OTHER] } else { &[VM] }
    }

    fn machine(&self) -> Result<Machine> {
        let mut versions = self.servers.versions();
        versions.push(format!("guest kernel {}", self.project.exec(VM, "uname -r")?.trim()));
        versions.push(self.project.exec(VM, "fio --version")?.trim().to_owned());
        Ok(Machine::here(command_line(), Some(&self.project.hypervisor(VM)?), versions))
    }

    /// Measures all peers in each round; then, round by round, those that two VMs share.
    fn measure(&self, results: &mut Results) -> Result<()> {
        let Bench { plan, two, project, .. } = self;
        let mut peers = Vec::new();
        for peer in Peer::all(&self.servers) {
            if takes_part(&peer, results, |_| prepare(plan, project, &peer, *two))? {
                peers.push(peer);
            }
        }
        let shared = peers.iter().filter(|peer| *two && peer.shared).count();
        let bar = ProgressBar::new(u64::from(plan.rounds) * (peers.len() + shared) as u64)
            .with_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} {eta}")?);
        for _ in 0..plan.rounds {
            each(&mut peers, results, |peer, results| {
                bar.set_message(peer.system);
                round(plan, project, peer, results)?;
                bar.inc(1);
                Ok(())
            })?;
        }
        peers.retain(|peer| *two && peer.shared);
        each(&mut peers, results, |peer, _| {
            project.exec(VM, &format!("rm -f {}/fio.*", peer.dir))?;
            Ok(())
        })?;
        for _ in 0..plan.rounds {
            each(&mut peers, results, |peer, results| {
                bar.set_message(format!("{}, two VMs", peer.system));
                pair::at_once(plan, project, peer, results)?;
                pair::handover(plan, project, peer, results)?;
                bar.inc(1);
                Ok(())
            })?;
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// Mounts a peer in the VMs and makes its files.
fn prepare(plan: &Plan, project: &Project, peer: &Peer, two: bool) -> Result<()> {
    project.exec(VM, &peer.mount)?;
    if two && peer.shared {
        project.exec(OTHER, &peer.mount)?;
    }
    project.exec(VM, &plan.matrix.prepare(&peer.dir))?;
    Ok(())
}

/// Runs one part of the bench on a peer. Returns false for a peer that fails, and notes why it takes no further part; Tombolo's own
/// failure, and an interruption, end the bench.
fn takes_part(
    peer: &Peer,
    results: &mut Results,
    part: impl FnOnce(&mut Results) -> Result<()>,
) -> Result<bool> {
    match part(results) {
        Ok(()) => Ok(true),
        Err(e) if peer.system == TOMBOLO || interrupt::is_asked() => Err(e),
        Err(e) => {
            results.leave_out(peer.system, &format!("{e:#}"))?;
            Ok(false)
        }
    }
}

/// Runs one part of the bench on each peer, and keeps the peers that could do it.
fn each(
    peers: &mut Vec<Peer>,
    results: &mut Results,
    mut part: impl FnMut(&Peer, &mut Results) -> Result<()>,
) -> Result<()> {
    let mut able = Vec::new();
    for peer in peers.drain(..) {
        if takes_part(&peer, results, |results| part(&peer, results))? {
            able.push(peer);
        }
    }
    *peers = able;
    Ok(())
}

fn add(
    results: &mut Results,
    peer: &Peer,
    case: String,
    value: f64,
    unit: &str,
    better: Better,
) -> Result<()> {
    results.add(Sample::new("files", case, peer.system, value, unit, better))
}

fn round(plan: &Plan, project: &Project, peer: &Peer, results: &mut Results) -> Result<()> {
    for jobs in plan.matrix.jobs.clone() {
        let Some(fio) = plan.matrix.fio(&peer.dir, jobs) else { continue };
        let output = project.exec(VM, &fio)?;
        for (case, mb_per_s) in plan.matrix.read(&output, &format!("j{jobs}"))? {
            add(results, peer, case, mb_per_s, "MB/s", Better::Higher)?;
        }
    }
    if plan.names > 0 && plan.matrix.wants("meta") {
        let output = project.exec(VM, &format!("/bench/namebench {}/names {}", peer.dir, plan.names))?;
        for line in output.lines() {
            let (what, rate) = line.split_once(' ').with_context(|| format!("namebench printed '{line}'"))?;
            add(results, peer, format!("meta-{what}"), rate.trim().parse()?, "1/s", Better::Higher)?;
        }
    }
    if plan.tree && plan.matrix.wants("tree") {
        let tree = format!("{}/tree", peer.dir);
        let unpack = timed(project, VM, &format!("mkdir {tree} && tar -xf /bench/tree.tar -C {tree}"))?;
        add(results, peer, "tree-unpack".into(), unpack, "s", Better::Lower)?;
        let status = timed(
            project,
            VM,
            &format!("git -c safe.directory='*' -C {tree} status --porcelain >/dev/null"),
        )?;
        add(results, peer, "tree-git-status".into(), status, "s", Better::Lower)?;
        project.exec(VM, &format!("rm -rf {tree}"))?;
    }
    Ok(())
}

/// Seconds that a script takes in a VM, by the guest's own clock (10 ms); the script prints nothing.
fn timed(project: &Project, vm: &str, script: &str) -> Result<f64> {
    let clock = "$(cut -d' ' -f1 /proc/uptime)";
    let output = project.exec(vm, &format!("s={clock}; {script} || exit 1; echo $s {clock}"))?;
    let (start, end) =
        output.trim().split_once(' ').with_context(|| format!("in VM {vm}, no times: {output}"))?;
    Ok(end.parse::<f64>()? - start.parse::<f64>()?)
}

/// A static program from this folder's guest/, for the guest.
fn build_tool(name: &str, into: &Path) -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest").join(format!("{name}.c"));
    let status = Command::new("cc")
        .args(["-O2", "-static", "-o"])
        .arg(into.join(name))
        .arg(&source)
        .status()
        .context("can't run cc (package gcc)")?;
    if !status.success() {
        bail!("can't compile {}", source.display());
    }
    Ok(())
}

/// This project's own sources as a git repository in a tar file: the source tree to unpack.
fn pack_tree(to: &Path) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let status = Command::new("tar")
        .arg("-cf")
        .arg(to)
        .args(["--exclude=./target", "--exclude=./.cache", "-C"])
        .arg(&root)
        .arg(".")
        .status()
        .context("can't run tar")?;
    if !status.success() {
        bail!("can't pack {}", root.display());
    }
    Ok(())
}

fn compose(plan: &Plan, initrd: &Path, temp: &Path, servers: &Servers, two: bool) -> String {
    let mut text = format!(
        "name = \"tombolo-bench-{}\"\n\
         [zone.files]\nsize = \"{zone}M\"\nfiles = true\n",
        std::process::id(),
        zone = plan.matrix.total_mb * 2 + plan.handover_mb + 512,
    );
    let pmem_file = temp.join("pmem");
    for vm in [VM, OTHER].iter().take(if two { 2 } else { 1 }) {
        let pmem = (*vm == VM).then_some((pmem_file.as_path(), plan.matrix.total_mb * 2 + 512));
        let _ = write!(
            text,
            "[vm.{vm}]\nkernel = \"{kernel}\"\ninitrd = \"{initrd}\"\nmemory = \"{memory}M\"\ncpus = 2\n\
             share = [{{ tag = \"export\", path = \"{export}\" }}, {{ tag = \"tools\", path = \"{tools}\", readonly = true }}]\n\
             qemu_args = {args:?}\n\
             [vm.{vm}.zones]\nfiles = {{ mount = \"/mnt/tombolo\" }}\n",
            kernel = initrd.with_file_name("vmlinuz").display(),
            initrd = initrd.display(),
            memory = if *vm == VM { plan.matrix.total_mb * 2 + 1024 } else { 1024 },
            export = temp.join("export").display(),
            tools = temp.join("tools").display(),
            args = servers.qemu_args(vm, pmem),
        );
    }
    text
}
