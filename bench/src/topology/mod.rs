// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench topology`: HPC Challenge, with STREAM in it, and noise on the host, in a VM as QEMU makes it, and in a VM with the key `topology`.
//!
//! All three have the same number of CPUs, the host's programs those on which the VM with `topology` lies. In each round a VM runs only while it is measured.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tombolo_bench_project::kit::Kit;
use tombolo_bench_project::{Project, interrupt, tombolo};

use crate::record::{Better, Machine, Results, Sample};

pub(crate) mod hpcc;

/// The name of the VM.
const VM: &str = "hpc";

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The value of the key `topology`: "host", "node:1", "close", "cpus:4-7".
    pub part: String,
    /// The value of the key `cpus`, for "close".
    pub cpus: Option<u32>,
    /// The value of the key `reserve`.
    pub reserve: u32,
    /// Memory of the VMs in MiB.
    pub memory_mib: u32,
    /// Order of the matrices; `None`: by the memory.
    pub order: Option<u32>,
    /// Rounds over the three systems.
    pub rounds: u32,
    /// Seconds of each of the two phases of a noise measurement.
    pub noise_seconds: f64,
    /// The guests' kernel, a series of the guest kit.
    pub kernel: String,
    /// Folder of the guest kit.
    pub kit: PathBuf,
}

/// Runs the plan and writes `<dir>/topology.jsonl`.
///
/// # Errors
/// A package or the guest kit is missing, the VM does not fit on the host, or a measurement fails.
pub fn run(plan: &Plan, dir: &Path, command: String) -> Result<Results> {
    let versions = ["hpcc", "openmpi-bin"].map(version).into_iter().collect::<Result<_>>()?;
    let temp = tempfile::tempdir()?;
    let image = temp.path().join("initrd.img");
    let kit = Kit::new(&plan.kit, &plan.kernel)?;
    kit.add(&items(), &image)?;
    let up = |keys: &str| Project::up(temp.path(), &compose(plan, &kit.kernel(), &image, keys)).map(Guest);
    let first = up(&placed(plan))?;
    let hypervisor = first.0.hypervisor(VM)?;
    let mut results = Results::create(dir, "topology", Machine::here(command, Some(&hypervisor), versions))?;
    let mut first = Some(first);
    for round in 1..=plan.rounds {
        eprintln!("round {round} of {}: VM with topology", plan.rounds);
        let guest = first.take().map_or_else(|| up(&placed(plan)), Ok)?;
        let cpus = guest.0.host_cpus(VM)?;
        measure(&guest, "tombolo", cpus.len() as u32, plan, &mut results)?;
        drop(guest);
        eprintln!("round {round} of {}: host, CPUs {}", plan.rounds, list(&cpus));
        measure(&Host { cpus: list(&cpus) }, "host", cpus.len() as u32, plan, &mut results)?;
        eprintln!("round {round} of {}: VM without topology", plan.rounds);
        let guest = up(&format!("cpus = {}\n", cpus.len()))?;
        measure(&guest, "vm", cpus.len() as u32, plan, &mut results)?;
    }
    Ok(results)
}

/// A package's name and version.
fn version(package: &str) -> Result<String> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${Version}", package])
        .output()
        .context("can't run dpkg-query")?;
    ensure!(output.status.success(), "package {package} is missing: 'scripts/bootstrap bench' installs it");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The items that hpcc needs in a guest image: the program, its launcher, and the folders of plugins that the launcher loads.
fn items() -> Vec<String> {
    let libraries = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let folders = [format!("{libraries}/openmpi"), format!("{libraries}/pmix2"), "/usr/share/openmpi".into()];
    let folders = folders.map(|folder| format!("{folder}:{folder}"));
    ["hpcc", "mpirun", "orted"].map(String::from).into_iter().chain(folders).collect()
}

/// The keys that lay the VM on the host.
fn placed(plan: &Plan) -> String {
    let cpus = plan.cpus.map(|cpus| format!("cpus = {cpus}\n")).unwrap_or_default();
    format!("topology = {:?}\n{cpus}", plan.part)
}

fn compose(plan: &Plan, kernel: &Path, image: &Path, keys: &str) -> String {
    // Without a reserve QEMU's own threads run on the VM's CPUs; a file without `topology` has no use for the key.
    let reserve = match plan.reserve {
        0 => String::new(),
        _ if !keys.contains("topology") => String::new(),
        cpus => format!("reserve = {cpus}\n"),
    };
    format!(
        "name = \"bench-topology\"\n{reserve}[vm.{VM}]\nkernel = {kernel:?}\ninitrd = {image:?}\nmemory = \"{}M\"\n{keys}",
        plan.memory_mib
    )
}

/// CPU numbers as taskset and `tombolo noise` take them.
fn list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// A place where programs are measured.
trait Place {
    /// Runs a shell script and returns its standard output.
    fn shell(&self, script: &str) -> Result<String>;
    /// Measures the noise on its CPUs, as `tombolo noise --json` reports it.
    fn noise(&self, seconds: f64) -> Result<Value>;
}

/// CPUs of the host.
struct Host {
    cpus: String,
}

impl Place for Host {
    fn shell(&self, script: &str) -> Result<String> {
        let output = Command::new("taskset")
            .args(["-c", &self.cpus, "sh", "-c", script])
            .stdin(Stdio::null())
            .output()
            .context("can't run taskset (package util-linux)")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "on the host, {}: {script}\n{said}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn noise(&self, seconds: f64) -> Result<Value> {
        let output = Command::new(tombolo())
            .args(["noise", "host", "--json", "--cpus", &self.cpus, "--seconds", &seconds.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("can't run 'tombolo noise host'")?;
        ensure!(output.status.success(), "'tombolo noise host' failed ({})", output.status);
        serde_json::from_slice(&output.stdout).context("'tombolo noise host --json' printed no JSON")
    }
}

/// A running VM.
struct Guest(Project);

impl Place for Guest {
    fn shell(&self, script: &str) -> Result<String> {
        self.0.exec(VM, script)
    }

    fn noise(&self, seconds: f64) -> Result<Value> {
        self.0.json("noise", &[VM, "--seconds", &seconds.to_string()])
    }
}

/// Runs all programs in one place, with a rank on each of its CPUs.
fn measure(place: &impl Place, system: &str, cpus: u32, plan: &Plan, results: &mut Results) -> Result<()> {
    let order = plan.order.unwrap_or_else(|| hpcc::order_for(u64::from(plan.memory_mib) << 20));
    let mut add = |case: &str, value: f64, unit: &str, better: Better| {
        results.add(Sample::new("topology", format!("topology-{case}"), system, value, unit, better))
    };
    interrupt::check()?;
    let summary = place.shell(&hpcc::script(cpus, order)).with_context(|| format!("hpcc, {system}"))?;
    for figure in hpcc::figures(&summary)? {
        add(figure.case, figure.value, figure.unit, figure.better)?;
    }
    interrupt::check()?;
    let noise = Noise::of(&place.noise(plan.noise_seconds)?)?;
    add("noise-lost", noise.lost_us, "us/s", Better::Lower)?;
    add("noise-longest", noise.longest_us, "us", Better::Lower)?;
    add("work-mean", noise.work_us, "us", Better::Lower)
}

/// The figures of a noise report.
#[derive(Debug, PartialEq)]
struct Noise {
    /// Microseconds per second that something else took, the mean of all CPUs.
    lost_us: f64,
    /// The longest interruption in microseconds, of any CPU.
    longest_us: f64,
    /// Microseconds of a unit of fixed work, the mean of all CPUs.
    work_us: f64,
}

impl Noise {
    /// The figures of the report that `tombolo noise --json` printed.
    fn of(report: &Value) -> Result<Self> {
        let cpus = report["cpus"].as_array().filter(|cpus| !cpus.is_empty());
        let cpus = cpus.with_context(|| format!("'tombolo noise --json' reports no CPU: {report}"))?;
        let values = |figure: fn(&Value) -> &Value| -> Result<Vec<f64>> {
            let of = |cpu| {
                figure(cpu).as_f64().with_context(|| format!("'tombolo noise --json' lacks a figure: {cpu}"))
            };
            cpus.iter().map(of).collect()
        };
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        Ok(Self {
            lost_us: mean(values(|cpu| &cpu["us_per_second"])?),
            longest_us: values(|cpu| &cpu["longest_us"])?.into_iter().fold(0.0, f64::max),
            work_us: mean(values(|cpu| &cpu["work_us"]["mean"])?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plan() -> Plan {
        Plan {
            part: "host".into(),
            cpus: None,
            reserve: 2,
            memory_mib: 1024,
            order: None,
            rounds: 1,
            noise_seconds: 1.0,
            kernel: "6.12".into(),
            kit: "/kit".into(),
        }
    }

    #[test]
    fn the_vm_on_the_host_has_the_reserve_and_the_other_as_many_cpus() {
        let [kernel, image] = ["/vmlinuz", "/i.img"].map(Path::new);
        let text = compose(&plan(), kernel, image, &placed(&plan()));
        assert!(
            text.contains("reserve = 2\n[vm.hpc]\n") && text.ends_with("topology = \"host\"\n"),
            "{text}"
        );
        let close = Plan { part: "close".into(), cpus: Some(3), ..plan() };
        assert_eq!(placed(&close), "topology = \"close\"\ncpus = 3\n");
        let plain = compose(&plan(), kernel, image, "cpus = 3\n");
        assert!(!plain.contains("reserve") && plain.contains("memory = \"1024M\"\ncpus = 3\n"), "{plain}");
    }

    #[test]
    fn noise_is_the_mean_of_the_cpus_and_the_longest_of_any() {
        let cpu =
            |us: f64| json!({ "us_per_second": us, "longest_us": us * 2.0, "work_us": { "mean": 10.0 } });
        let noise = Noise::of(&json!({ "cpus": [cpu(10.0), cpu(30.0)] })).unwrap();
        assert_eq!(noise, Noise { lost_us: 20.0, longest_us: 60.0, work_us: 10.0 });
        assert!(Noise::of(&json!({ "cpus": [] })).is_err());
        assert!(Noise::of(&json!({ "cpus": [{}] })).unwrap_err().to_string().contains("lacks a figure"));
    }

    #[test]
    fn cpus_are_listed_as_taskset_takes_them() {
        assert_eq!(list(&[2, 3, 8]), "2,3,8");
    }
}
