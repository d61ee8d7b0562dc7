// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench files`: the shared file system beside its peers, in one VM, in one run, with the same jobs.
//!
//! Every system gets the same fio matrix (StargateFS's: sequential and random, read and write, one to four jobs). With O_DIRECT what is
//! measured is sharing: bytes that another VM sees when the call has returned. Systems whose users accept a cache in each guest are measured
//! with buffered reads and writes, and beside them those that share at once and those of one guest, buffered too. Systems
//! take turns, round by round, so that a slower minute of the machine meets all of them. Then operations on names, a source
//! tree, and what two VMs do with one of the systems that share: work at once, hand over a file, see each other's changes.
//!
//! - [`systems`]: the systems, each a declaration
//! - [`servers`], [`network`]: the servers on the host that some need, and the way to the NFS server
//! - [`guest`]: programs and the source tree for the guests
//! - [`matrix`]: the fio jobs and how their output is read
//! - [`pair`]: two VMs on one system

pub mod guest;
pub mod matrix;
pub mod network;
pub mod pair;
pub mod servers;
pub mod systems;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tempfile::TempDir;
use tombolo_bench_project::{Project, interrupt};

use crate::record::{Better, Group, Machine, Results, Sample, command_line};
use matrix::{Matrix, jobs_group};
use servers::Servers;
use systems::{Io, Needs, System, TOMBOLO};

/// The parts of the bench that are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The systems.
    pub systems: Vec<&'static System>,
    /// Ways in which fio opens files.
    pub io: Vec<Io>,
    /// fio's matrix.
    pub matrix: Matrix,
    /// Rounds over all systems, at most.
    pub rounds: u32,
    /// No round begins that would, if it took as long as the one before, end after so many minutes; at least one is run.
    pub minutes: Option<u32>,
    /// Names for the operations on names; 0: leave them out.
    pub names: u32,
    /// Rounds in which a source tree is unpacked and git asked for its status, which takes minutes over 9p; 0: leave it out.
    pub trees: u32,
    /// A second VM: fio in both at once, and at most that many MB from a producer in one to a consumer in the other; 0: leave it out.
    pub handover_mb: u32,
    /// Seconds that a second VM waits at most for what the first has changed; 0: leave it out.
    pub coherence_s: u32,
    /// The guest kit's kernel; one with 9p, which Debian's cloud kernels leave out.
    pub kernel: String,
}

impl Plan {
    /// The whole matrix.
    pub fn full() -> Plan {
        Plan {
            systems: systems::ALL.iter().collect(),
            io: vec![Io::Direct, Io::Buffered],
            matrix: Matrix::full(),
            rounds: 3,
            minutes: None,
            names: 10_000,
            trees: 3,
            handover_mb: 1024,
            coherence_s: 70,
            kernel: "general-6.12".into(),
        }
    }

    /// A few cells, for the demo: what it's worth, in well under a minute.
    pub fn quick() -> Plan {
        Plan {
            io: vec![Io::Direct],
            matrix: Matrix::quick(),
            rounds: 1,
            names: 1000,
            trees: 0,
            handover_mb: 0,
            coherence_s: 0,
            ..Plan::full()
        }
    }

    /// The ways in which fio uses a system; none: it takes no part.
    fn io(&self, system: &System) -> impl Iterator<Item = Io> {
        self.io.iter().copied().filter(|io| system.io.contains(io))
    }

    /// The systems that take part.
    fn systems(&self) -> Vec<&'static System> {
        self.systems.iter().copied().filter(|system| self.io(system).next().is_some()).collect()
    }

    /// Returns whether another round like the last one ends in time.
    fn has_time(&self, since_start: Duration, last_round: Duration) -> bool {
        self.minutes
            .is_none_or(|minutes| since_start + last_round <= Duration::from_secs(60 * u64::from(minutes)))
    }

    fn looks_for_coherence(&self) -> bool {
        self.coherence_s > 0 && self.matrix.wants("coherence")
    }

    /// The VMs that are needed.
    fn vms(&self) -> &'static [&'static str] {
        let hands_over = self.handover_mb > 0 && (self.matrix.wants("handover") || self.matrix.wants_vms());
        if hands_over || self.looks_for_coherence() { &[VM, OTHER] } else { &[VM] }
    }

    /// MiB that all jobs' files of all systems take in the page cache of a guest, when `mb` are one system's.
    fn cache_mb(&self, mb: u32) -> u32 {
        let cached = |system: &&&'static System| {
            system.group == Group::Cached && self.io(system).any(|io| io == Io::Buffered)
        };
        mb * self.systems().iter().filter(cached).count() as u32
    }

    /// The systems that are a zone in the guest's memory.
    fn own_zones(&self) -> u32 {
        self.systems().iter().filter(|system| matches!(system.needs, Needs::OwnZone(_))).count() as u32
    }

    /// MiB of such a zone: the files of all numbers of jobs, and names.
    fn zone_mb(&self) -> u32 {
        self.matrix.total_mb * 2 + 128
    }

    /// What was set, for the results file.
    fn settings(&self, tree: usize) -> String {
        let Matrix { kinds, sizes, jobs, runtime_ms, total_mb, .. } = &self.matrix;
        let jobs: Vec<String> = jobs.iter().map(u32::to_string).collect();
        let limit =
            self.minutes.map(|minutes| format!(", or what fits {minutes} minutes")).unwrap_or_default();
        format!(
            "{} rounds{limit}; fio {} of {} by {} jobs, {} s each on files of {total_mb} MiB; {} names; a tree of {tree} files in {} rounds; two VMs: {} MB \
             handed over, up to {} s for a change to be seen",
            self.rounds,
            kinds.join("/"),
            sizes.join("/"),
            jobs.join("/"),
            f64::from(*runtime_ms) / 1000.0,
            self.names,
            self.trees,
            self.handover_mb,
            self.coherence_s,
        )
    }
}

const VM: &str = "bench";
const OTHER: &str = "other";

/// Runs the plan and writes `<dir>/files.jsonl`.
pub fn run(plan: &Plan, dir: &Path, kit: &Path) -> Result<Results> {
    let bench = Bench::start(plan, kit)?;
    let machine = bench.machine()?;
    let mut results = Results::create(dir, "files", machine)?;
    for system in plan.systems() {
        results.describe(system.about())?;
    }
    for (system, reason) in bench.servers.left_out() {
        results.leave_out(system, reason)?;
    }
    bench.measure(&mut results)?;
    Ok(results)
}

/// The VMs of a run with the peers' servers and the guest's tools. Fields are dropped in this order: VMs, servers, their folder.
struct Bench<'a> {
    plan: &'a Plan,
    project: Project,
    servers: Servers,
    /// Files of the source tree.
    tree: usize,
    _folder: TempDir,
}

impl<'a> Bench<'a> {
    fn start(plan: &'a Plan, kit: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("tombolo-bench-")
            .tempdir_in("/dev/shm")
            .context("can't use /dev/shm")?;
        let made = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir(&path).with_context(|| format!("can't make {}", path.display()))?;
            anyhow::Ok(path)
        };
        let (export, tools) = (made("export")?, made("tools")?);
        for tool in ["namebench", "handover", "coherence"] {
            guest::build_tool(tool, &tools)?;
        }
        if plan.own_zones() > 0 {
            guest::copy_with_libraries(&tombolo_bench_project::tombolo(), &tools)?;
        }
        let mut tree = 0;
        if plan.trees > 0 && plan.matrix.wants("tree") {
            let work = made("tree")?;
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            tree = guest::pack_tree(&root, guest::TREE_FILES, &work, &tools.join("tree.tar"))?;
            fs::remove_dir_all(&work)?;
        }
        let servers = Servers::start(folder.path(), &export, &plan.systems(), plan.vms());
        let initrd = kit.join(&plan.kernel).join("initrd-bench.img");
        if !initrd.exists() {
            bail!("{} is not there: 'scripts/prepare bench' makes it", initrd.display());
        }
        let compose = compose(plan, &initrd, folder.path(), &servers);
        let project = Project::up(folder.path(), &compose)?;
        let bench = Bench { plan, project, servers, tree, _folder: folder };
        for vm in plan.vms() {
            // The tree is read from the guest's memory, so that nothing but the system under test decides.
            let mount = "set -e; mkdir -p /bench; mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro tools /bench; \
                         for f in /bench/*.tar; do if [ -e $f ]; then cp $f /tmp; fi; done";
            bench.project.exec(vm, mount)?;
        }
        Ok(bench)
    }

    fn machine(&self) -> Result<Machine> {
        let mut versions = self.servers.versions();
        versions.push(format!("guest kernel {}", self.project.exec(VM, "uname -r")?.trim()));
        versions.push(self.project.exec(VM, "fio --version")?.trim().to_owned());
        let machine = Machine::here(command_line(), Some(&self.project.hypervisor(VM)?), versions);
        Ok(Machine { settings: Some(self.plan.settings(self.tree)), ..machine })
    }

    /// Measures all systems round by round, in one VM, then those that two VMs share in both.
    fn measure(&self, results: &mut Results) -> Result<()> {
        let Bench { plan, project, .. } = self;
        let start = Instant::now();
        let two = plan.vms().len() > 1;
        let missing: Vec<&str> = self.servers.left_out().map(|(system, _)| system).collect();
        let mut systems = plan.systems();
        systems.retain(|system| !missing.contains(&system.name));
        each(&mut systems, results, |system, _| self.prepare(system))?;
        let shared = systems.iter().filter(|system| two && system.is_shared()).count();
        let bar = ProgressBar::new(u64::from(plan.rounds) * (systems.len() + shared) as u64)
            .with_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} {eta}")?);
        for number in 0..plan.rounds {
            let begin = Instant::now();
            each(&mut systems, results, |system, results| {
                bar.set_message(system.name);
                round(plan, number, project, system, results)?;
                bar.inc(1);
                Ok(())
            })?;
            each(&mut systems, results, |system, results| {
                if two && system.is_shared() {
                    bar.set_message(format!("{}, two VMs", system.name));
                    pair::all(plan, number, project, system, results)?;
                    bar.inc(1);
                }
                Ok(())
            })?;
            if !plan.has_time(start.elapsed(), begin.elapsed()) {
                break;
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Mounts a system in the VMs and makes its files.
    fn prepare(&self, system: &System) -> Result<()> {
        let vms = self.plan.vms().iter().filter(|vm| **vm == VM || system.is_shared());
        for vm in vms {
            let setup = match system.needs {
                Needs::OwnZone(backend) => servers::own_zone(system, backend, self.plan.zone_mb()),
                _ => self.servers.setup(system, vm).to_owned(),
            };
            self.project.exec(vm, &system.mount_script(&setup))?;
        }
        self.project.exec(VM, &self.plan.matrix.prepare(&system.dir()))?;
        Ok(())
    }
}

/// Runs one part of the bench on a system. Returns false for a system that fails, and notes why it takes no further part; Tombolo's own
/// failure, and an interruption, end the bench.
fn takes_part(
    system: &System,
    results: &mut Results,
    part: impl FnOnce(&mut Results) -> Result<()>,
) -> Result<bool> {
    match part(results) {
        Ok(()) => Ok(true),
        Err(e) if system.name == TOMBOLO || interrupt::is_asked() => Err(e),
        Err(e) => {
            results.leave_out(system.name, last_line(&format!("{e:#}")))?;
            Ok(false)
        }
    }
}

/// The last line of an error, which has the words of the program that failed: those before it are the script that called it.
pub(crate) fn last_line(error: &str) -> &str {
    error.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or(error)
}

/// Runs one part of the bench on each system, and keeps the systems that could do it.
fn each(
    systems: &mut Vec<&'static System>,
    results: &mut Results,
    mut part: impl FnMut(&System, &mut Results) -> Result<()>,
) -> Result<()> {
    let mut able = Vec::new();
    for system in systems.drain(..) {
        if takes_part(system, results, |results| part(system, results))? {
            able.push(system);
        }
    }
    *systems = able;
    Ok(())
}

fn add(
    results: &mut Results,
    system: &System,
    case: String,
    value: f64,
    unit: &str,
    better: Better,
) -> Result<()> {
    results.add(Sample::new("files", case, system.name, value, unit, better))
}

fn round(plan: &Plan, number: u32, project: &Project, system: &System, results: &mut Results) -> Result<()> {
    let dir = system.dir();
    for io in plan.io(system) {
        for jobs in plan.matrix.jobs.clone() {
            let Some(fio) = plan.matrix.fio(&dir, jobs, io) else { continue };
            let output = project.exec(VM, &(Matrix::warm_up(system, io, "fio.*") + &fio))?;
            for (case, mb_per_s) in plan.matrix.read(&output, &jobs_group(jobs, io))? {
                add(results, system, case, mb_per_s, "MB/s", Better::Higher)?;
            }
        }
    }
    if plan.names > 0 && plan.matrix.wants("meta") {
        let output = project.exec(VM, &format!("/bench/namebench {dir}/names {}", plan.names))?;
        for line in output.lines() {
            let (what, rate) = line.split_once(' ').with_context(|| format!("namebench printed '{line}'"))?;
            add(results, system, format!("meta-{what}"), rate.trim().parse()?, "1/s", Better::Higher)?;
        }
    }
    if number < plan.trees && plan.matrix.wants("tree") {
        let tree = format!("{dir}/tree");
        let unpack = timed(project, VM, &format!("mkdir {tree} && tar -xf /tmp/tree.tar -C {tree}"))?;
        add(results, system, "tree-unpack".into(), unpack, "s", Better::Lower)?;
        let status = timed(
            project,
            VM,
            &format!("git -c safe.directory='*' -C {tree} status --porcelain >/dev/null"),
        )?;
        add(results, system, "tree-git-status".into(), status, "s", Better::Lower)?;
        project.exec(VM, &format!("rm -rf {tree}"))?;
    }
    // What a cache held back is the work of this system's turn, not of the next.
    project.exec(VM, "sync")?;
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

fn compose(plan: &Plan, initrd: &Path, temp: &Path, servers: &Servers) -> String {
    let Matrix { total_mb, .. } = plan.matrix;
    // Of all numbers of jobs together. Each VM has half of `total_mb` beside, for what two do at once.
    let files_mb = total_mb * 2;
    let mut text = format!(
        "name = \"tombolo-bench-{}\"\n\
         [zone.files]\nsize = \"{zone}M\"\nfiles = true\n",
        std::process::id(),
        zone = files_mb + total_mb + plan.handover_mb + 512,
    );
    let has = |needs: Needs| plan.systems().into_iter().filter(move |system| system.needs == needs);
    let share = |tag: &str, path: &str, readonly: bool| {
        format!("{{ tag = \"{tag}\", path = \"{}\", readonly = {readonly} }}", temp.join(path).display())
    };
    for vm in plan.vms() {
        let mut arguments = servers.qemu_args(vm);
        if *vm == VM && has(Needs::Pmem).next().is_some() {
            let (file, size) = (temp.join("pmem"), files_mb + 512);
            arguments.extend([
                "-object".into(),
                format!("memory-backend-file,id=dax,mem-path={},size={size}M,share=on", file.display()),
                "-device".into(),
                "virtio-pmem-pci,memdev=dax".into(),
            ]);
        }
        let mut shares = vec![share("tools", "tools", true)];
        shares.extend(has(Needs::P9).map(|system| share(system.name, "export", false)));
        // The first VM has the tmpfs, and caches both.
        let in_guest = files_mb + plan.own_zones() * plan.zone_mb();
        let (own, cached) = if *vm == VM { (in_guest, files_mb + total_mb / 2) } else { (0, total_mb / 2) };
        let _ = write!(
            text,
            "[vm.{vm}]\nkernel = \"{kernel}\"\ninitrd = \"{initrd}\"\nmemory = \"{memory}M\"\ncpus = 2\n\
             share = [{shares}]\nqemu_args = {arguments:?}\n\
             [vm.{vm}.zones]\nfiles = {{ mount = \"/mnt/tombolo\" }}\n",
            kernel = initrd.with_file_name("vmlinuz").display(),
            initrd = initrd.display(),
            memory = own + plan.cache_mb(cached) + 1024,
            shares = shares.join(", "),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(plan: Plan, words: &[&str]) -> Plan {
        let only = words.iter().map(|word| (*word).to_owned()).collect();
        Plan { matrix: Matrix { only, ..plan.matrix }, ..plan }
    }

    #[test]
    fn a_peers_reason_is_the_last_line_of_what_its_script_said() {
        let said = "in VM bench, exit status: 1: set -e; mkdir -p /mnt/nfs\nmount $nfs_host:/bench\nmount: failed: no such file\n\n";
        assert_eq!(last_line(said), "mount: failed: no such file");
        assert_eq!(last_line("virtiofsd is not installed"), "virtiofsd is not installed");
    }

    #[test]
    fn the_demos_run_has_the_systems_that_share_at_once_and_one_vm() {
        let names: Vec<&str> = Plan::quick().systems().iter().map(|system| system.name).collect();
        assert_eq!(names, [TOMBOLO, "ext4-dax", "tmpfs", "9p", "virtiofs", "nfs"]);
        assert_eq!(Plan::quick().vms(), [VM]);
        assert_eq!(Plan::quick().cache_mb(64), 0);
    }

    #[test]
    fn a_second_vm_runs_only_where_a_case_of_two_vms_is_wanted() {
        let vms = |words: &[&str]| only(Plan::full(), words).vms().len();
        assert_eq!([vms(&["meta"]), vms(&["4k-j1"]), vms(&["tree"])], [1, 1, 1]);
        assert_eq!([vms(&["handover"]), vms(&["4k-vms2"]), vms(&["coherence"]), vms(&[])], [2, 2, 2, 2]);
        let no_coherence = Plan { coherence_s: 0, ..only(Plan::full(), &["coherence"]) };
        assert_eq!(no_coherence.vms(), [VM]);
    }

    #[test]
    fn a_round_begins_only_if_it_ends_in_time() {
        let plan = Plan { minutes: Some(25), ..Plan::full() };
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        assert!(plan.has_time(minutes(16), minutes(9)) && !plan.has_time(minutes(18), minutes(9)));
        assert!(Plan::full().has_time(minutes(600), minutes(300)));
    }

    #[test]
    fn each_9p_system_has_a_device_of_its_own_and_only_chosen_systems_have_any() {
        let dir = tempfile::tempdir().unwrap();
        let text = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let plan = Plan { systems: systems::chosen(&names).unwrap(), ..Plan::full() };
            let servers = Servers::start(dir.path(), dir.path(), &[], plan.vms());
            compose(&plan, Path::new("/kit/initrd"), dir.path(), &servers)
        };
        let all = text(&["9p", "9p-loose", "ext4-dax"]);
        for tag in ["tools", "9p", "9p-loose"] {
            assert_eq!(all.matches(&format!("tag = \"{tag}\"")).count(), 2, "in both VMs: {all}");
        }
        assert_eq!(all.matches("virtio-pmem-pci").count(), 1, "{all}");
        let least = text(&[TOMBOLO]);
        assert!(!least.contains("9p") && !least.contains("pmem"), "{least}");
    }

    #[test]
    fn settings_name_what_a_command_leaves_to_defaults() {
        let said = Plan::full().settings(900);
        for part in
            ["3 rounds", "4k/16k/128k/2M by 1/2/4 jobs, 0.7 s", "128 MiB", "a tree of 900 files in 3 rounds"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
