// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo clean`: removes what killed processes have left and what can be made again: folders of projects whose supervisor died, scratch
//! folders of accelerators, cgroups of VMs, the cached answer whether KVM works. Devices of VMs that died go back to their drivers. What a living project
//! uses stays.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use crate::commands::cli::say;
use crate::commands::client;
use crate::machine::orphans::{GivenBack, OfHost};
use crate::machine::{cgroup, partition};
use crate::project::accelerator;
use crate::project::state::{self, StateDir};

/// Names of the scratch files of programs that use accelerators end with their process.
const OF_PROCESSES: [&str; 4] = ["tombolo-keep-", "tombolo-trace-", "tombolo-connect-", "tombolo-include-"];

/// The cgroup of a VM with limits.
const GROUP: &str = "the cgroup of a VM whose supervisor died";

/// `tombolo clean`
#[derive(Args, Debug)]
pub struct Options {
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

/// A leftover: a file, folder or cgroup that no process uses.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Leftover {
    path: PathBuf,
    what: &'static str,
}

/// Removes leftovers.
///
/// # Errors
/// When one can't be removed; the others are.
pub fn run(options: &Options, json: bool) -> anyhow::Result<ExitCode> {
    let base = state::base()?;
    let of_host = if options.dry_run {
        let partitions = GivenBack { given: partition::orphans()?, failures: Vec::new() };
        OfHost { partitions, ..OfHost::default() }
    } else {
        OfHost::give_back(None)
    };
    let mut errors: Vec<String> = of_host.failures().cloned().collect();
    let groups = cgroup::leftovers(Path::new(cgroup::ROOT), &living()?);
    let mut leftovers: Vec<Leftover> =
        groups.into_iter().map(|path| Leftover { path, what: GROUP }).collect();
    leftovers.extend(of_projects(&base)?);
    leftovers.extend(scratch(&std::env::temp_dir(), scratch_in_use)?);
    leftovers.sort();
    for leftover in &leftovers {
        if !options.dry_run {
            if let Err(e) = remove(leftover) {
                errors.push(format!("{}: {e}", leftover.path.display()));
                continue;
            }
        }
        if !json {
            let verb = if options.dry_run { "would remove" } else { "removed" };
            say(&format!("{verb} {} ({})", leftover.path.display(), leftover.what))?;
        }
    }
    if json {
        let devices: Vec<String> = of_host.devices.given.iter().map(ToString::to_string).collect();
        let partitions = &of_host.partitions.given;
        say(&serde_json::to_string_pretty(&serde_json::json!({
            "dry_run": options.dry_run, "removed": leftovers, "devices_given_back": devices, "partitions_given_back": partitions, "errors": errors,
        }))?)?;
    } else {
        for address in of_host.devices.given {
            say(&format!("gave {address} back to its driver: its VM died"))?;
        }
        let verb = if options.dry_run { "would give" } else { "gave" };
        for path in of_host.partitions.given {
            say(&format!("{verb} the CPUs of {} back to the host: its VM died", path.display()))?;
        }
    }
    anyhow::ensure!(errors.is_empty(), "{}", errors.join("\n"));
    Ok(ExitCode::SUCCESS)
}

/// Folders of projects that run.
fn living() -> anyhow::Result<BTreeSet<PathBuf>> {
    Ok(state::supervisors()?.iter().map(|found| found.dir().to_owned()).collect())
}

/// Folders of projects without a supervisor, and cached answers.
fn of_projects(base: &Path) -> anyhow::Result<Vec<Leftover>> {
    let living = living()?;
    let mut leftovers = Vec::new();
    for path in own_entries(base)? {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.starts_with("kvm-") && name.ends_with(".json") {
            leftovers.push(Leftover { what: "whether KVM works here", path });
        } else if path.join("lock").is_file()
            && !living.contains(&path)
            && StateDir::at(path.clone()).is_free()?
        {
            leftovers.push(Leftover { what: "a project whose supervisor died", path });
        }
    }
    Ok(leftovers)
}

/// Scratch folders that running projects use.
fn scratch_in_use() -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut used = BTreeSet::new();
    for found in state::supervisors()? {
        // One that does not answer may use any: that is an error, which ends the command.
        let Some(status) = client::status_of(&found)? else { continue };
        used.extend(status.accelerators.iter().map(|accel| accelerator::scratch(found.dir(), &accel.name)));
    }
    Ok(used)
}

/// Scratch files and folders; the projects that run are asked where there are some of accelerators.
fn scratch(
    folder: &Path,
    used: impl FnOnce() -> anyhow::Result<BTreeSet<PathBuf>>,
) -> anyhow::Result<Vec<Leftover>> {
    let (mut leftovers, mut compiled) = (Vec::new(), Vec::new());
    for path in own_entries(folder)? {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let process = OF_PROCESSES.iter().find_map(|prefix| name.strip_prefix(prefix)?.parse::<u32>().ok());
        if accelerator::is_scratch(name) {
            compiled.push(path);
        } else if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            leftovers.push(Leftover { what: "files of a program that has ended", path });
        }
    }
    if !compiled.is_empty() {
        let used = used()?;
        let unused = compiled.into_iter().filter(|path| !used.contains(path));
        leftovers.extend(
            unused.map(|path| Leftover { what: "compiled kernels of an accelerator that has ended", path }),
        );
    }
    Ok(leftovers)
}

/// This user's entries of a folder, without symbolic links.
fn own_entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let user = rustix::process::geteuid().as_raw();
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?.filter_map(Result::ok).map(|entry| entry.path()),
    };
    let own = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|m| m.uid() == user && !m.is_symlink());
    Ok(entries.filter(own).collect())
}

fn remove(leftover: &Leftover) -> anyhow::Result<()> {
    if leftover.path.join("lock").is_file() {
        let dir = StateDir::at(leftover.path.clone());
        // A supervisor that has just begun keeps it.
        if let Some(lock) = dir.lock()? {
            dir.remove(&lock);
            anyhow::ensure!(!leftover.path.exists(), "it stays");
        }
        return Ok(());
    }
    let removed = if leftover.what == GROUP {
        fs::remove_dir(&leftover.path)
    } else if leftover.path.is_dir() {
        fs::remove_dir_all(&leftover.path)
    } else {
        fs::remove_file(&leftover.path)
    };
    // Another 'clean' was faster.
    Ok(removed.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_uses_is_a_leftover() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (used, left) = (path("tombolo-accel-00000001"), path("tombolo-accel-00000002"));
        let living = path(&format!("tombolo-keep-{}", std::process::id()));
        let dead = path(&format!("tombolo-keep-{}", u32::MAX));
        for path in [&used, &left, &living, &dead, &path("else")] {
            fs::create_dir(path).unwrap();
        }
        std::os::unix::fs::symlink("/", path("tombolo-accel-00000003")).unwrap();
        fs::create_dir(path("tombolo-accel-vm-00000004")).unwrap();
        let mut found: Vec<PathBuf> = scratch(folder.path(), || Ok(BTreeSet::from([used])))
            .unwrap()
            .into_iter()
            .map(|l| l.path)
            .collect();
        found.sort();
        assert_eq!(found, [left, dead]);
    }

    #[test]
    fn a_folder_whose_lock_is_held_stays() {
        let base = tempfile::tempdir().unwrap();
        let lock = StateDir::at(base.path().join("living-1")).lock().unwrap().unwrap();
        drop(StateDir::at(base.path().join("dead-1")).lock().unwrap().unwrap());
        fs::write(base.path().join("kvm-0.json"), "").unwrap();
        fs::create_dir(base.path().join("passthrough")).unwrap();
        let mut found: Vec<String> = of_projects(base.path())
            .unwrap()
            .into_iter()
            .map(|l| l.path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        found.sort();
        assert_eq!(found, ["dead-1", "kvm-0.json"]);
        drop(lock);
        assert_eq!(of_projects(base.path()).unwrap().len(), 3);
    }
}
