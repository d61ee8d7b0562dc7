// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench mpi`: two ranks of Debian's Open MPI in two VMs with a CPU each, through the memory of a zone (`tombolo`), by TCP over the switch (`tcp`) and over TAP
//! devices and a bridge (`tap-bridge`); in one VM with two CPUs (`one-vm`) and on the host itself (`host`), both as the library does it by itself.
//!
//! The program is `mpi/tests/programs/measure.c`, and hpcc. All VMs are up during the whole run and idle while they are not measured; systems take turns.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use tombolo_bench_project::kit::Kit;
use tombolo_bench_project::{Project, interrupt};

use crate::record::{Better, Machine, Results, Sample};
use crate::topology::hpcc;

/// The folder of the zone in the VMs.
const SHARED: &str = "/mnt/shared";
/// The second network card of a VM has this in its address before the VM's number.
const BRIDGED: &str = "10.88.0";

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Rounds over the systems.
    pub rounds: u32,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Order of hpcc's matrices; `None`: hpcc is left out.
    pub order: Option<u32>,
    /// Leave out TAP devices and the bridge, which need root.
    pub no_tap: bool,
    /// The guests' kernel, a series of the guest kit.
    pub kernel: String,
    /// Folder of the guest kit.
    pub kit: PathBuf,
}

/// Where two ranks run, and how they talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Tombolo,
    OneVm,
    Tcp,
    TapBridge,
    Host,
}

impl System {
    const ALL: [System; 5] = [System::Tombolo, System::OneVm, System::Tcp, System::TapBridge, System::Host];

    fn name(self) -> &'static str {
        match self {
            System::Tombolo => "tombolo",
            System::OneVm => "one-vm",
            System::Tcp => "tcp",
            System::TapBridge => "tap-bridge",
            System::Host => "host",
        }
    }
}

/// Runs the plan and writes `<dir>/mpi.jsonl`.
///
/// # Errors
/// A package or the guest kit's image is missing, or a measurement fails.
pub fn run(plan: &Plan, dir: &Path, command: String) -> Result<Results> {
    let temp = tempfile::tempdir()?;
    let program = temp.path().join("measure");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpi/tests/programs/measure.c");
    let compiled = Command::new("mpicc.openmpi").args(["-O2", "-o"]).args([&program, &source]).status();
    let compiled = compiled.context("mpicc.openmpi is missing: 'scripts/bootstrap bench' installs it")?;
    ensure!(compiled.success(), "{} does not compile", source.display());
    let kit = Kit::new(&plan.kit, &plan.kernel)?;
    let image = kit.kernel().with_file_name("initrd-mpi.img");
    ensure!(
        image.exists(),
        "{} is not there: guest/build --kernel {} --flavour mpi",
        image.display(),
        plan.kernel
    );
    if !plan.no_tap {
        bridge()?;
    }
    let versions = ["openmpi-bin", "hpcc"].into_iter().filter_map(version).collect();
    let project = Project::up(temp.path(), &compose(plan, &kit.kernel(), &image))?;
    let mut results =
        Results::create(dir, "mpi", Machine::here(command, Some(&project.hypervisor("a")?), versions))?;
    let bench = Bench { plan, project, program, folder: temp.path().to_owned() };
    bench.prepare()?;
    for round in 1..=plan.rounds {
        for system in System::ALL.into_iter().filter(|system| !(plan.no_tap && *system == System::TapBridge))
        {
            eprintln!("round {round} of {}: {}", plan.rounds, system.name());
            bench.measure(system, &mut results)?;
        }
    }
    Ok(results)
}

/// A package's name and version, where it is installed.
fn version(package: &str) -> Option<String> {
    let output =
        Command::new("dpkg-query").args(["-W", "-f", "${Package} ${Version}", package]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A network namespace of this process with a bridge between two TAP devices.
fn bridge() -> Result<()> {
    // SAFETY: a network namespace of its own takes nothing from this process's memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .context("TAP devices and a bridge need root; --no-tap leaves them out")?;
    let script = "ip link set lo up; ip link add br0 type bridge; ip link set br0 up
        for n in 0 1; do ip tuntap add t$n mode tap vnet_hdr; ip link set t$n master br0 up; done";
    let output = Command::new("sh").args(["-ec", script]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn compose(plan: &Plan, kernel: &Path, image: &Path) -> String {
    let vm = |name: &str, cpus: u32, more: &str| {
        format!(
            "[vm.{name}]\nkernel = {kernel:?}\ninitrd = {image:?}\nmemory = \"1G\"\ncpus = {cpus}\n\
             zones = {{ shared = {{ mount = \"{SHARED}\" }} }}\n{more}"
        )
    };
    let cards = |n: u32| {
        let tap = format!("tap,id=b,ifname=t{n},script=no,downscript=no");
        let device = format!("virtio-net-pci,netdev=b,mac=52:54:00:88:00:0{n},romfile=");
        let bridged = if plan.no_tap { Vec::new() } else { vec!["-netdev", &tap, "-device", &device] };
        format!("networks = [\"lan\"]\nqemu_args = {bridged:?}\n")
    };
    format!(
        "name = \"bench-mpi\"\n[zone.shared]\nsize = \"512M\"\nfiles = true\n[net.lan]\nsubnet = \"10.86.0.0/24\"\n{}{}{}",
        vm("a", 1, &cards(0)),
        vm("b", 1, &cards(1)),
        vm("one", 2, "")
    )
}

struct Bench<'a> {
    plan: &'a Plan,
    project: Project,
    /// The measuring program on the host.
    program: PathBuf,
    /// A folder of the host for its own runs.
    folder: PathBuf,
}

impl Bench<'_> {
    fn prepare(&self) -> Result<()> {
        self.project.tombolo("cp", &[&self.program.to_string_lossy(), &format!("a:{SHARED}/measure")])?;
        if let Some(order) = self.plan.order {
            let input = hpcc::input(2, order);
            self.project.exec("a", &format!("cat >{SHARED}/hpccinf.txt <<'END'\n{input}END"))?;
            std::fs::write(self.folder.join("hpccinf.txt"), input)?;
        }
        for (n, vm) in ["a", "b"].into_iter().enumerate().filter(|_| !self.plan.no_tap) {
            let script = format!(
                "for d in /sys/class/net/*; do if [ $(cat $d/address) = 52:54:00:88:00:0{n} ]; then \
                 ip addr add {BRIDGED}.{}/24 dev ${{d##*/}}; ip link set ${{d##*/}} up; exit; fi; done; exit 1",
                n + 2
            );
            self.project.exec(vm, &script)?;
        }
        Ok(())
    }

    fn measure(&self, system: System, results: &mut Results) -> Result<()> {
        let mut add = |case: &str, value: f64, unit: &str, better: Better| {
            results.add(Sample::new("mpi", case.to_owned(), system.name(), value, unit, better))
        };
        interrupt::check()?;
        let out = self.run(system, &format!("./measure {}", self.plan.seconds))?;
        for line in out.lines() {
            let (case, value, unit) = figure(line)?;
            add(case, value, unit, if unit == "us" { Better::Lower } else { Better::Higher })?;
        }
        // hpcc asks what two VMs cost against one with as many CPUs; TCP is compared by messages.
        if self.plan.order.is_none() || matches!(system, System::Tcp | System::TapBridge) {
            return Ok(());
        }
        interrupt::check()?;
        self.run(system, "hpcc")?;
        for figure in hpcc::figures(&self.summary(system)?)? {
            add(&format!("hpcc-{}", figure.case), figure.value, figure.unit, figure.better)?;
        }
        Ok(())
    }

    /// The summary that hpcc has written, which is removed.
    fn summary(&self, system: System) -> Result<String> {
        let script = "cat hpccoutf.txt && rm hpccoutf.txt";
        match system {
            System::Host => self.host(script),
            System::OneVm => self.project.exec("one", &format!("cd {SHARED} && {script}")),
            _ => self.project.exec("a", &format!("cd {SHARED} && {script}")),
        }
    }

    /// Runs a program as two ranks; returns its standard output.
    fn run(&self, system: System, program: &str) -> Result<String> {
        let own = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm=isolated \
                   mpirun.openmpi --host localhost:2 -np 2 --mca pml ob1 --mca btl self,vader";
        let network = match system {
            System::Host => return self.host(&format!("{own} {program}")),
            System::OneVm => return self.project.exec("one", &format!("cd {SHARED} && {own} {program}")),
            System::Tombolo => None,
            System::Tcp => Some("10.86.0.0/24".to_owned()),
            System::TapBridge => Some(format!("{BRIDGED}.0/24")),
        };
        let variables = network
            .map(|net| ["OMPI_MCA_btl=self,tcp".to_owned(), format!("OMPI_MCA_btl_tcp_if_include={net}")]);
        let mut words = vec!["run", "-n", "2", "--vms", "a,b", "--launcher", "openmpi"];
        for variable in variables.iter().flatten() {
            words.extend(["-e", variable]);
        }
        words.push("--");
        words.extend(program.split(' '));
        self.project.tombolo("mpi", &words)
    }

    fn host(&self, script: &str) -> Result<String> {
        let output = Command::new("sh")
            .args(["-c", script])
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "on the host, {}: {script}\n{said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// A line of the measuring program: case, value, unit.
fn figure(line: &str) -> Result<(&str, f64, &str)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [case, value, unit] = words[..] else { bail!("the measuring program printed '{line}'") };
    Ok((case, value.parse().with_context(|| format!("'{value}' is no figure"))?, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_program_is_a_case_a_value_and_a_unit() {
        assert_eq!(figure("mpi-lat-8 0.25 us").unwrap(), ("mpi-lat-8", 0.25, "us"));
        assert!(figure("mpirun was unable").is_err() && figure("a b c").is_err());
    }

    #[test]
    fn only_ranks_of_different_vms_have_a_network() {
        let plan = Plan {
            rounds: 1,
            seconds: 1.0,
            order: None,
            no_tap: false,
            kernel: "6.1".into(),
            kit: "/k".into(),
        };
        let text = compose(&plan, Path::new("/vmlinuz"), Path::new("/i.img"));
        assert_eq!((text.matches("networks =").count(), text.matches("ifname=t").count()), (2, 2));
        let text = compose(&Plan { no_tap: true, ..plan }, Path::new("/vmlinuz"), Path::new("/i.img"));
        assert_eq!(text.matches("ifname=t").count(), 0);
    }
}
