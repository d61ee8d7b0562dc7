// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench share`: what VMs share that people keep many copies of, beside the peers that people have for it.
//!
//! Each system has VMs of its own, which start anew in each round, so that no memory or cache is left of another system's turn; systems
//! take turns, round by round. Three parts:
//! - [`root`]: VMs that start from one root file system: time, and memory of the host
//! - [`members`]: VMs that use one directory: they map a file of weights, and fill a cache of many small files
//!
//! [`memory`] is how memory of the host is measured.

pub mod members;
pub mod memory;
pub mod root;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;
use tombolo_bench_project::{Project, interrupt, tombolo};

use crate::files::last_line;
use crate::files::systems::{self, System, TOMBOLO};
use crate::record::{Better, Machine, Results, Sample, command_line};

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Part {
    /// VMs with one root.
    Root,
    /// VMs that map one file of weights.
    Weights,
    /// VMs that fill and use one cache.
    Cache,
}

/// The parts of the bench that are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The parts.
    pub parts: Vec<Part>,
    /// Only these systems and Tombolo; empty: all.
    pub systems: Vec<String>,
    /// VMs of each system, at least two.
    pub vms: usize,
    /// Rounds over all systems.
    pub rounds: u32,
    /// The folder that is the VMs' root; `None`: the guest kit's own.
    pub root: Option<PathBuf>,
    /// MiB of weights.
    pub weights_mib: u32,
    /// Entries of the cache.
    pub entries: u32,
    /// The guest kit's kernel; one with 9p, which Debian's cloud kernels leave out.
    pub kernel: String,
}

impl Plan {
    /// All parts.
    pub fn full() -> Plan {
        Plan {
            parts: vec![Part::Root, Part::Weights, Part::Cache],
            systems: Vec::new(),
            vms: 3,
            rounds: 3,
            root: None,
            weights_mib: 100,
            entries: 1000,
            kernel: "general-6.12".into(),
        }
    }

    /// All parts with little of each.
    pub fn quick() -> Plan {
        Plan { vms: 2, rounds: 1, weights_mib: 16, entries: 100, ..Plan::full() }
    }

    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    fn wants(&self, system: &System) -> bool {
        system.name == TOMBOLO
            || self.systems.is_empty()
            || self.systems.iter().any(|name| name == system.name)
    }

    /// The names of the VMs.
    fn vms(&self) -> Vec<String> {
        (0..self.vms).map(|number| format!("vm{number}")).collect()
    }

    /// What was set, for the results file.
    fn settings(&self) -> String {
        let root =
            self.root.as_ref().map_or("the guest kit's image".into(), |root| root.display().to_string());
        format!(
            "{} rounds with {} VMs of each system; root: {root}; weights of {} MiB; a cache of {} entries",
            self.rounds, self.vms, self.weights_mib, self.entries
        )
    }

    /// An error names a system that there is not.
    fn check(&self) -> Result<()> {
        let known: BTreeSet<&str> =
            root::systems().iter().chain(&members::systems()).map(|system| system.name).collect();
        let unknown = self.systems.iter().find(|name| !known.contains(name.as_str()));
        let all: Vec<&str> = known.iter().copied().collect();
        anyhow::ensure!(
            unknown.is_none(),
            "there is no system '{}'; there are {}",
            unknown.map_or("", String::as_str),
            all.join(", ")
        );
        Ok(())
    }
}

/// Runs the plan and writes `<dir>/share.jsonl`.
///
/// # Errors
/// Something is missing, or Tombolo fails at a part.
pub fn run(plan: &Plan, dir: &Path, kit: &Path) -> Result<Results> {
    plan.check()?;
    let mut record = Record { plan, dir, results: None, ended: BTreeSet::new() };
    let root = plan.has(Part::Root).then(|| root::Image::new(plan, kit)).transpose()?;
    let members = (plan.has(Part::Weights) || plan.has(Part::Cache))
        .then(|| members::Kit::new(plan, kit))
        .transpose()?;
    for _ in 0..plan.rounds {
        if let Some(image) = &root {
            root::round(plan, image, &mut record)?;
        }
        if let Some(kit) = &members {
            members::round(plan, kit, &mut record)?;
        }
    }
    record.results.context("nothing was measured")
}

/// A folder in the host's memory for what one part needs.
fn folder() -> Result<TempDir> {
    tempfile::Builder::new().prefix("tombolo-bench-").tempdir_in("/dev/shm").context("can't use /dev/shm")
}

/// Makes a zone in a file of `folder`, whose file system has the folder `source` there as its directory `into`: as one is filled before `up`.
fn zone(folder: &Path, file: &str, mib: u64, source: &str, into: &str) -> Result<()> {
    let size = format!("{mib}M");
    let to = format!("{file}:{into}");
    let commands: [&[&str]; 3] = [
        &["zone", "create", file, "--size", &size],
        &["files", "mkfs", file],
        &["files", "import", source, &to],
    ];
    for words in commands {
        let output =
            Command::new(tombolo()).args(words).current_dir(folder).output().context("can't run tombolo")?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "'tombolo {}' failed: {said}", words.join(" "));
    }
    Ok(())
}

/// The results file, which begins with the first project: that one says how VMs run.
pub struct Record<'a> {
    plan: &'a Plan,
    dir: &'a Path,
    results: Option<Results>,
    /// Systems that take no further part, each with the group of parts.
    ended: BTreeSet<(&'static str, &'static str)>,
}

impl Record<'_> {
    /// Notes that a system's VMs run, with the versions of what serves them.
    fn begin(&mut self, system: &System, project: &Project, versions: Vec<String>) -> Result<()> {
        let results = if let Some(results) = &mut self.results {
            results
        } else {
            let vm = self.plan.vms().remove(0);
            let mut all = vec![format!("guest kernel {}", project.exec(&vm, "uname -r")?.trim())];
            all.extend(versions);
            let machine = Machine::here(command_line(), Some(&project.hypervisor(&vm)?), all);
            let machine = Machine { settings: Some(self.plan.settings()), ..machine };
            self.results.insert(Results::create(self.dir, "share", machine)?)
        };
        if results.recorded.abouts.iter().all(|about| about.system != system.name) {
            results.describe(system.about())?;
        }
        Ok(())
    }

    fn add(&mut self, system: &System, case: &str, value: f64, unit: &str, better: Better) -> Result<()> {
        let results = self.results.as_mut().context("a figure came before its project")?;
        results.add(Sample::new("share", format!("share-{case}"), system.name, value, unit, better))
    }

    /// Runs a system's turn of one group of parts. One that fails takes no further part there, and its reason is noted; Tombolo's own failure, and an
    /// interruption, end the bench.
    fn turn(
        &mut self,
        group: &'static str,
        system: &'static System,
        turn: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if !self.plan.wants(system) || self.ended.contains(&(group, system.name)) {
            return Ok(());
        }
        match turn(self) {
            Ok(()) => Ok(()),
            Err(error) if system.name == TOMBOLO || interrupt::is_asked() => Err(error),
            Err(error) => {
                self.ended.insert((group, system.name));
                let results = self.results.as_mut().context("Tombolo's turn is the first")?;
                results.leave_out(system.name, last_line(&format!("{error:#}")))
            }
        }
    }
}

/// The system of `bench files` with this name.
fn of_files(name: &str) -> &'static System {
    systems::ALL.iter().find(|system| system.name == name).unwrap_or(&systems::ALL[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_that_there_is_not_is_told_with_those_that_there_are() {
        let plan = |name: &str| Plan { systems: vec![name.into()], ..Plan::quick() };
        let error = plan("smb").check().unwrap_err().to_string();
        assert!(error.contains("'smb'") && error.contains("qcow2") && error.contains("copy"), "{error}");
        plan("qcow2").check().unwrap();
    }

    #[test]
    fn settings_name_what_a_command_leaves_to_defaults() {
        let said = Plan::full().settings();
        for part in ["3 rounds with 3 VMs", "the guest kit's image", "100 MiB", "1000 entries"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    #[test]
    fn tombolo_is_first_and_every_peer_says_what_it_is() {
        for systems in [root::systems(), members::systems()] {
            assert_eq!(systems[0].name, TOMBOLO);
            assert!(systems.iter().all(|system| !system.setup.is_empty()));
        }
    }
}
