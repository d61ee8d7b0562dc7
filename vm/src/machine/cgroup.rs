// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cpu_limit`, `memory_limit` and `isolate`: a cgroup of its own for a VM's QEMU, below one that was delegated to the supervisor's user.
//!
//! A cgroup whose children are limited has no processes itself, so the supervisor, and who else is in its cgroup, moves to the child
//! `supervisor` first. The VM's cgroup goes with its QEMU.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::child::halted;
use crate::compose::VmSpec;
use crate::machine::partition;
use crate::project::state::StateDir;

/// The mount of all cgroups of version 2.
pub const ROOT: &str = "/sys/fs/cgroup";
/// Names the delegated cgroup where it is not the supervisor's own.
const VARIABLE: &str = "TOMBOLO_CGROUP";
/// The child in which the supervisor is.
const OWN: &str = "supervisor";
/// There where systemd is the host's service manager (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";
/// Extended attributes with which systemd marks a delegated cgroup.
const DELEGATED: [&str; 2] = ["user.delegate", "trusted.delegate"];
/// The period of a limit of processor time, in microseconds; the kernel's default.
const PERIOD: u32 = 100_000;
/// The remedy if no cgroup is delegated.
const REMEDY: &str = "start it in one: systemctl start tombolo@NAME (its unit has Delegate=yes), systemd-run --user --scope -p Delegate=yes \
                      tombolo up, or as root: name an empty cgroup with TOMBOLO_CGROUP=/sys/fs/cgroup/…";

/// The cgroup of one VM, removed when dropped.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
    /// The group's cgroup.procs, open for writing.
    procs: File,
}

impl Group {
    /// Makes the cgroup of a VM that has limits.
    ///
    /// # Errors
    /// When no cgroup is delegated, with the remedy.
    pub fn of(dir: &StateDir, vm: &str, spec: &VmSpec) -> anyhow::Result<Option<Group>> {
        let limited = spec.cpu_limit.is_some() || spec.memory_limit.is_some();
        let mut controllers = Vec::new();
        if limited {
            controllers.extend(["cpu", "memory"]);
        }
        if spec.isolate {
            controllers.push("cpuset");
        }
        if controllers.is_empty() {
            return Ok(None);
        }
        // Two projects may have one name, but not one folder.
        let project = dir.path().file_name().unwrap_or_default().to_string_lossy();
        let made = find_parent()
            .and_then(|parent| enable(&parent, &controllers).map(|()| parent))
            .and_then(|parent| Group::below(&parent, &project, vm, spec));
        if let Some(frozen) = made.as_ref().ok().and_then(|group| halted::frozen(group.path())) {
            let group = frozen.display();
            anyhow::bail!(
                "vm.{vm}: the cgroup {group} is frozen, so QEMU would not begin there; echo 0 >{group}/cgroup.freeze"
            );
        }
        made.map(Some).with_context(|| {
            let key = if limited { "has cpu_limit or memory_limit" } else { "says isolate" };
            format!("vm.{vm} {key}, and there is no cgroup for it; {REMEDY}")
        })
    }

    fn below(parent: &Path, project: &str, vm: &str, spec: &VmSpec) -> anyhow::Result<Group> {
        let path = parent.join(prefix(project) + vm);
        match fs::create_dir(&path) {
            // That of a supervisor that was killed.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.with_context(|| format!("{} can't be made", path.display()))?,
        }
        let limit = |file: &str, value: String, limited: bool| {
            // Without a limit the controller may be off.
            if !limited && !path.join(file).exists() {
                return Ok(());
            }
            fs::write(path.join(file), &value)
                .with_context(|| format!("{file} of {} can't be set to {value}", path.display()))
        };
        let memory = spec.memory_limit.map_or("max".into(), |size| size.0.to_string());
        limit("memory.max", memory, spec.memory_limit.is_some())?;
        let quota = spec.cpu_limit.map_or_else(|| format!("max {PERIOD}"), quota);
        limit("cpu.max", quota, spec.cpu_limit.is_some())?;
        let procs = OpenOptions::new().write(true).open(path.join("cgroup.procs"))?;
        Ok(Group { path, procs })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The group of a VM that runs on, which an earlier supervisor has made.
    ///
    /// # Errors
    /// When it is gone.
    pub fn take_over(path: PathBuf) -> anyhow::Result<Group> {
        let procs = OpenOptions::new().write(true).open(path.join("cgroup.procs"));
        Ok(Group { procs: procs.with_context(|| path.display().to_string())?, path })
    }

    /// The group's cgroup.procs: a process that writes "0" to it enters the group.
    #[must_use]
    pub fn procs(&self) -> &File {
        &self.procs
    }

    /// Returns whether the kernel has killed a process of the group for want of memory.
    #[must_use]
    pub fn ran_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let kills =
            events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok());
        kills.is_some_and(|kills| kills > 0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir(&self.path) {
            crate::say!("the cgroup {} stays: {e}", self.path.display());
        }
    }
}

/// Cgroups of VMs whose supervisor was killed: those below `root` that have no process, belong to this user, and to no project whose folder is
/// among the `living`.
#[must_use]
pub fn leftovers(root: &Path, living: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let kept: Vec<String> =
        living.iter().filter_map(|folder| Some(prefix(folder.file_name()?.to_str()?))).collect();
    let is_empty = |path: &Path| {
        fs::read_to_string(path.join("cgroup.procs")).is_ok_and(|procs| procs.trim().is_empty())
    };
    of_vms(root, |name, path| !kept.iter().any(|kept| name.starts_with(kept)) && is_empty(path))
}

/// Cgroups below `root` of the VMs of a project, by the name of its folder, that belong to this user. The processes in them may have not ended yet.
#[must_use]
pub fn of_project(root: &Path, project: &str) -> Vec<PathBuf> {
    of_vms(root, |name, _| name.starts_with(&prefix(project)))
}

/// The begin of the names of the cgroups of a project's VMs.
fn prefix(project: &str) -> String {
    format!("tombolo-{project}-")
}

/// Removes a VM's cgroup, once the processes in it have ended.
///
/// # Errors
/// They do not end.
pub fn remove(group: &Path) -> anyhow::Result<()> {
    partition::remove(&mut partition::Kernel, group)
}

/// This user's cgroups of VMs below `root`, those that are wanted by name and path.
fn of_vms(root: &Path, is_wanted: impl Fn(&str, &Path) -> bool) -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
            let own = entry.metadata().is_ok_and(|meta| meta.uid() == user);
            if own && is_of_vm(&name) && is_wanted(&name, &path) {
                found.push(path);
            } else {
                folders.push(path);
            }
        }
    }
    found
}

/// Returns whether a cgroup has the name of a VM's: `tombolo-`, its project, eight hexadecimal digits, its own name.
fn is_of_vm(name: &str) -> bool {
    let is_hash = |part: &str| part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts: Vec<&str> = name.split('-').collect();
    parts.len() > 3 && parts[0] == "tombolo" && parts[2..parts.len() - 1].iter().any(|part| is_hash(part))
}

/// So many processors, as cpu.max has it.
fn quota(processors: f64) -> String {
    let microseconds = (processors * f64::from(PERIOD)).round();
    format!("{microseconds:.0} {PERIOD}")
}

/// The cgroup below which VMs get theirs.
///
/// # Errors
/// None is delegated, with the remedy.
pub fn parent() -> anyhow::Result<PathBuf> {
    find_parent().context(REMEDY)
}

fn find_parent() -> anyhow::Result<PathBuf> {
    Ok(match std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => {
            let own = own()?;
            let own = if own.ends_with(OWN) { own.parent().unwrap_or(&own).to_owned() } else { own };
            anyhow::ensure!(
                is_left_to_its_processes(&own, Path::new(SYSTEMD)),
                "systemd has not delegated {}, which this process shares with others",
                own.display()
            );
            own
        }
    })
}

/// Returns whether the processes of a cgroup may make others below it: without systemd, or where it has marked the group as delegated. In a group
/// that systemd manages itself, such as that of a login session, a move of all processes would meet shells and daemons.
fn is_left_to_its_processes(group: &Path, systemd: &Path) -> bool {
    let is_set = |name: &&str| {
        let mut value = [0; 1];
        rustix::fs::getxattr(group, *name, &mut value[..]).is_ok_and(|n| value[..n] == *b"1")
    };
    !systemd.exists() || DELEGATED.iter().any(is_set)
}

/// This process's cgroup of version 2.
fn own() -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup")?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let root = Path::new(ROOT);
    anyhow::ensure!(
        root.join("cgroup.controllers").is_file(),
        "the host has no cgroups of version 2 in {}",
        root.display()
    );
    Ok(root.join(path.context("this process is in no cgroup of version 2")?))
}

/// Gives the children of `parent` these controllers.
fn enable(parent: &Path, controllers: &[&str]) -> anyhow::Result<()> {
    let control = parent.join("cgroup.subtree_control");
    let on = fs::read_to_string(&control).with_context(|| control.display().to_string())?;
    if controllers.iter().all(|c| on.split_whitespace().any(|o| o == *c)) {
        return Ok(());
    }
    move_all(parent)?;
    let wanted = controllers.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    fs::write(&control, &wanted).with_context(|| format!("{} does not take '{wanted}'", control.display()))
}

/// Moves the processes of `parent` into its child for them.
fn move_all(parent: &Path) -> anyhow::Result<()> {
    let processes =
        fs::read_to_string(parent.join("cgroup.procs")).with_context(|| parent.display().to_string())?;
    if processes.trim().is_empty() {
        return Ok(());
    }
    let child = parent.join(OWN);
    match fs::create_dir(&child) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.with_context(|| format!("{} can't be made", child.display()))?,
    }
    for process in processes.split_whitespace() {
        let mut procs = OpenOptions::new().write(true).open(child.join("cgroup.procs"))?;
        match procs.write_all(process.as_bytes()) {
            // It has ended.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
            moved => {
                moved.with_context(|| format!("process {process} can't be moved to {}", child.display()))?
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a cgroup's files in it.
    fn group(at: &Path, controllers: &str, processes: &str) {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("cgroup.subtree_control"), controllers).unwrap();
        fs::write(at.join("cgroup.procs"), processes).unwrap();
    }

    fn spec(text: &str) -> VmSpec {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_vms_group_has_its_limits() {
        let dir = tempfile::tempdir().unwrap();
        let vm = dir.path().join("tombolo-p-a");
        group(&vm, "", "");
        let made =
            Group::below(dir.path(), "p", "a", &spec("cpu_limit = 1.5\nmemory_limit = \"2G\"")).unwrap();
        let read = |file: &str| fs::read_to_string(vm.join(file)).unwrap();
        assert_eq!((read("cpu.max").as_str(), read("memory.max").as_str()), ("150000 100000", "2147483648"));
        made.procs().write_all(b"0").unwrap();
        assert_eq!(read("cgroup.procs"), "0");
        assert!(!made.ran_out_of_memory());
        fs::write(vm.join("memory.events"), "oom 3\noom_kill 1\n").unwrap();
        assert!(made.ran_out_of_memory());
        let _open = Group::below(dir.path(), "p", "a", &spec("memory_limit = \"2G\"")).unwrap();
        assert_eq!(read("cpu.max"), "max 100000");
    }

    #[test]
    fn a_group_with_processes_gives_them_a_child_before_its_children_are_limited() {
        let dir = tempfile::tempdir().unwrap();
        group(dir.path(), "pids\n", "12\n34\n");
        group(&dir.path().join(OWN), "", "");
        enable(dir.path(), &["cpu", "memory"]).unwrap();
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "+cpu +memory");
        // A real one would have both.
        assert_eq!(read("supervisor/cgroup.procs"), "34");
        fs::write(dir.path().join("cgroup.subtree_control"), "cpu memory pids\n").unwrap();
        enable(dir.path(), &["cpu", "memory"]).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "cpu memory pids\n", "nothing to do");
        enable(dir.path(), &["cpuset"]).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "+cpuset");
    }

    #[test]
    fn a_group_that_systemd_has_not_delegated_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let set = |value: &str| {
            rustix::fs::setxattr(dir.path(), DELEGATED[0], value.as_bytes(), rustix::fs::XattrFlags::empty())
        };
        assert!(is_left_to_its_processes(dir.path(), &dir.path().join("no systemd")));
        assert!(!is_left_to_its_processes(dir.path(), dir.path()));
        set("0").unwrap();
        assert!(!is_left_to_its_processes(dir.path(), dir.path()));
        set("1").unwrap();
        assert!(is_left_to_its_processes(dir.path(), dir.path()));
    }

    #[test]
    fn a_group_without_processes_is_left_over_where_its_project_does_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join("unit").join(name);
        group(&at(""), "", "");
        for (name, processes) in [
            ("left-over-0123abcd-a-b", ""),
            ("living-0123abcd-a", ""),
            ("full-0123abcd-a", "7\n"),
            ("zone", ""),
        ] {
            group(&at(&format!("tombolo-{name}")), "", processes);
        }
        let living = BTreeSet::from(["/run/tombolo/living-0123abcd".into()]);
        assert_eq!(leftovers(dir.path(), &living), [at("tombolo-left-over-0123abcd-a-b")]);
        // Its supervisor has died, and its QEMU is about to.
        assert_eq!(of_project(dir.path(), "full-0123abcd"), [at("tombolo-full-0123abcd-a")]);
    }

    #[test]
    fn a_vm_without_limits_has_no_group() {
        assert!(Group::of(&StateDir::at("/nonexistent".into()), "a", &spec("")).unwrap().is_none());
    }
}
