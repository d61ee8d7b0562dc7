// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Results of benches: a line that describes the machine, then a line per sample, all JSON. Every bench writes them with this, and
//! a reader of a results file knows what to expect.

#![deny(missing_docs)]

use std::env;
use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The direction of better values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Throughput, rates.
    Higher,
    /// Times, sizes.
    Lower,
}

/// One repetition of one case on one system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The bench: "files", "net" …
    pub bench: String,
    /// The case: "fio-randread-4k-j1" …
    pub case: String,
    /// The system: "tombolo", "9p" …
    pub system: String,
    /// The figure, in `unit`.
    pub value: f64,
    /// Its unit: "MB/s" (10^6 bytes), "1/s", "s" …
    pub unit: String,
    /// The direction of better values.
    pub better: Better,
    /// The measurement was ended at `value`: the true figure is larger.
    #[serde(default, skip_serializing_if = "is_false")]
    pub at_least: bool,
}

/// What a system shares, which decides what it may be compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Several VMs use it, and each sees at once what another one wrote.
    Coherent,
    /// Several VMs use it, each behind a cache of its own.
    Cached,
    /// One VM has it alone: a ceiling, no peer.
    Local,
}

/// What a system of a run is: a line of its own in a results file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The system: "virtiofs-always" …
    pub system: String,
    /// What it shares.
    pub group: Group,
    /// How it was set up, in words for those who use it.
    pub setup: String,
    /// The drawback that its users accept for its speed; `None`: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gives_up: Option<String>,
}

/// A system that did not take part in a run, or not to its end, and why: a line of its own in a results file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The system: "nfs" …
    pub system: String,
    /// The reason, in one line.
    pub left_out: String,
}

/// A line of a results file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Sample(Sample),
    About(About),
    LeftOut(LeftOut),
    Machine(Machine),
}

/// The content of a results file.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// The machines and commands of its runs, at least one.
    pub machines: Vec<Machine>,
    /// The samples of all runs.
    pub samples: Vec<Sample>,
    /// What its systems are; empty where a bench does not say.
    pub abouts: Vec<About>,
    /// The systems that were left out.
    pub left_out: Vec<LeftOut>,
}

/// The machine of a run: the first line of a results file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The command that made the run.
    pub command: String,
    /// The commit of the project, with "+" if the tree had changes.
    pub commit: String,
    /// UTC time of the start, ISO 8601.
    pub date: String,
    /// Processor model and number of cores.
    pub cpu: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// The host's kernel.
    pub kernel: String,
    /// QEMU's version, and how guests ran ("tcg" or "kvm"), where there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu: Option<String>,
    /// Versions of the peers and of the guest's kernel, as found.
    pub versions: Vec<String>,
    /// Durations, sizes and counts of the run, those that the command leaves to their defaults too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl Sample {
    /// A sample of `bench`.
    pub fn new(bench: &str, case: String, system: &str, value: f64, unit: &str, better: Better) -> Sample {
        Sample {
            bench: bench.into(),
            case,
            system: system.into(),
            value,
            unit: unit.into(),
            better,
            at_least: false,
        }
    }
}

fn json(line: &impl Serialize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(&serde_json::to_string(line).map_err(|_| fmt::Error)?)
}

impl fmt::Display for Sample {
    /// Its line in a results file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        json(self, f)
    }
}

impl fmt::Display for About {
    /// Its line in a results file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        json(self, f)
    }
}

impl fmt::Display for LeftOut {
    /// Its line in a results file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        json(self, f)
    }
}

impl fmt::Display for Machine {
    /// Its line in a results file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        json(self, f)
    }
}

/// The command that runs, all its words, as its user gives it: `tombolo bench` for the program `tombolo-bench`, then the arguments.
pub fn command_line() -> String {
    let mut words = env::args();
    let program = words.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().replace("tombolo-bench", "tombolo bench");
    words.fold(name, |line, word| line + " " + &word)
}

fn output(program: &str, args: &[&str]) -> String {
    Command::new(program)
        .args(args)
        .output()
        .ok()
        .filter(|o| o.status.success())
        .map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
        .unwrap_or_default()
}

impl Machine {
    /// Describes this machine; `accel`: how guests ran, if there were any; `versions` are lines about the peers.
    pub fn here(command: String, accel: Option<&str>, versions: Vec<String>) -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo
            .lines()
            .find_map(|l| l.strip_prefix("model name").and_then(|l| l.split_once(':')))
            .map_or("unknown", |(_, name)| name.trim());
        let cores = cpuinfo.lines().filter(|l| l.starts_with("processor")).count();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory_kib: u64 = meminfo
            .lines()
            .find_map(|l| l.strip_prefix("MemTotal:"))
            .and_then(|l| l.trim().trim_end_matches(" kB").parse().ok())
            .unwrap_or(0);
        let changed = !output("git", &["status", "--porcelain", "--untracked-files=no"]).is_empty();
        Machine {
            command,
            commit: format!(
                "{}{}",
                output("git", &["rev-parse", "--short", "HEAD"]),
                if changed { "+" } else { "" }
            ),
            date: output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
            cpu: format!("{model}, {cores} cores"),
            memory_mib: memory_kib / 1024,
            kernel: output("uname", &["-r"]),
            qemu: accel.map(|accel| {
                let version = output("qemu-system-x86_64", &["--version"]);
                format!("{} ({accel})", version.lines().next().unwrap_or("unknown"))
            }),
            versions,
            settings: None,
        }
    }
}

/// A results file being written: each line is on disk when the call that adds it returns.
pub struct Results {
    file: fs::File,
    /// The file that the lines go to.
    pub path: PathBuf,
    /// The lines of this run that are in the file so far.
    pub recorded: Recorded,
}

impl Results {
    /// Starts `<dir>/<bench>.jsonl` anew.
    pub fn create(dir: &Path, bench: &str, machine: Machine) -> Result<Results> {
        fs::create_dir_all(dir).with_context(|| format!("can't make the folder {}", dir.display()))?;
        let path = dir.join(format!("{bench}.jsonl"));
        let file = fs::File::create(&path).with_context(|| format!("can't write {}", path.display()))?;
        Results::begin(file, path, machine)
    }

    /// Goes on in `path`, after what earlier runs wrote there.
    pub fn append(path: &Path, machine: Machine) -> Result<Results> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("can't make the folder {}", dir.display()))?;
        }
        let file = fs::File::options().append(true).create(true).open(path);
        let file = file.with_context(|| format!("can't write {}", path.display()))?;
        Results::begin(file, path.to_owned(), machine)
    }

    fn begin(mut file: fs::File, path: PathBuf, machine: Machine) -> Result<Results> {
        writeln!(file, "{machine}").with_context(|| format!("can't write {}", path.display()))?;
        Ok(Results { file, path, recorded: Recorded { machines: vec![machine], ..Recorded::default() } })
    }

    fn write(&mut self, line: &impl fmt::Display) -> Result<()> {
        writeln!(self.file, "{line}").with_context(|| format!("can't write {}", self.path.display()))
    }

    /// Keeps one sample.
    pub fn add(&mut self, sample: Sample) -> Result<()> {
        self.write(&sample)?;
        self.recorded.samples.push(sample);
        Ok(())
    }

    /// Says what a system is.
    pub fn describe(&mut self, about: About) -> Result<()> {
        self.write(&about)?;
        self.recorded.abouts.push(about);
        Ok(())
    }

    /// Notes that a system takes no further part; of `reason`, the words are kept on one line. A reason that repetitions repeat stands once.
    pub fn leave_out(&mut self, system: &str, reason: &str) -> Result<()> {
        let left_out = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        let line = LeftOut { system: system.into(), left_out };
        if self.recorded.left_out.contains(&line) {
            return Ok(());
        }
        self.write(&line)?;
        self.recorded.left_out.push(line);
        Ok(())
    }

    /// The samples in a text of such lines; other lines, of machines, are left out.
    pub fn samples(text: &str) -> Vec<Sample> {
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Reads a results file, of one run or of several.
    pub fn read(path: &Path) -> Result<Recorded> {
        let text = fs::read_to_string(path).with_context(|| format!("can't read {}", path.display()))?;
        let mut recorded = Recorded::default();
        for (i, line) in text.lines().enumerate() {
            let line = serde_json::from_str(line).with_context(|| {
                format!("{}, line {}: neither a machine nor a sample", path.display(), i + 1)
            })?;
            match line {
                Line::Machine(machine) => recorded.machines.push(machine),
                _ if recorded.machines.is_empty() => {
                    anyhow::bail!("{}: the first line does not describe a machine", path.display())
                }
                Line::Sample(sample) => recorded.samples.push(sample),
                Line::About(about) => recorded.abouts.push(about),
                Line::LeftOut(line) => recorded.left_out.push(line),
            }
        }
        anyhow::ensure!(!recorded.machines.is_empty(), "{} is empty", path.display());
        Ok(recorded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::here("test".into(), Some("tcg"), vec!["x 1".into()]);
        let mut results = Results::create(dir.path(), "files", machine.clone()).unwrap();
        let sample = Sample::new("files", "fio-read-4k-j1".into(), "9p", 3.5, "MB/s", Better::Higher);
        let ended = Sample { at_least: true, ..sample.clone() };
        let about = |gives_up: Option<&str>| About {
            system: "9p".into(),
            group: Group::Cached,
            setup: "cache=loose".into(),
            gives_up: gives_up.map(str::to_owned),
        };
        let abouts = [about(None), about(Some("coherence"))];
        for about in &abouts {
            results.describe(about.clone()).unwrap();
        }
        results.add(sample.clone()).unwrap();
        results.add(ended.clone()).unwrap();
        results.leave_out("nfs", "its server ended:\n  no such folder").unwrap();
        results.leave_out("nfs", "its server ended: no such folder").unwrap();
        let read = Results::read(&results.path).unwrap();
        assert_eq!(read.machines, [machine]);
        assert_eq!(read.samples, [sample, ended]);
        assert_eq!(read.abouts, abouts);
        assert_eq!(read.left_out, results.recorded.left_out);
        assert_eq!(read.left_out.len(), 1);
        assert_eq!(read.left_out[0].left_out, "its server ended: no such folder");
    }

    #[test]
    fn a_second_run_is_added_to_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/net.jsonl");
        let machine = Machine::here("test".into(), None, vec![]);
        assert!(!machine.to_string().contains("qemu"), "{machine}");
        for value in [1.0, 2.0] {
            let sample =
                Sample::new("net", "net-64-split".into(), "tombolo", value, "packets/s", Better::Higher);
            Results::append(&path, machine.clone()).unwrap().add(sample).unwrap();
        }
        let values: Vec<f64> =
            Results::samples(&fs::read_to_string(&path).unwrap()).iter().map(|s| s.value).collect();
        assert_eq!(values, [1.0, 2.0]);
        assert_eq!(Results::read(&path).unwrap().machines, [machine.clone(), machine]);
    }

    #[test]
    fn a_broken_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let results =
            Results::create(dir.path(), "files", Machine::here("t".into(), Some("tcg"), vec![])).unwrap();
        let mut text = fs::read_to_string(&results.path).unwrap();
        text.push_str("{\"bench\":\n");
        fs::write(&results.path, text).unwrap();
        let error = format!("{:#}", Results::read(&results.path).unwrap_err());
        assert!(error.contains("line 2"), "{error}");
    }
}
