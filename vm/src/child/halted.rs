// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that a user has to continue: a signal or a debugger has stopped them, or their cgroup is frozen (as by
//! `systemctl freeze`). /proc shows the state of a frozen process as that of one that sleeps.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Why a process does nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Halted {
    /// By a signal (SIGSTOP) or a debugger.
    Stopped(u32),
    /// This cgroup is frozen, which the process is in or below.
    Frozen(PathBuf),
}

impl Halted {
    /// The state in a word.
    pub fn word(&self) -> &'static str {
        match self {
            Halted::Stopped(_) => "stopped",
            Halted::Frozen(_) => "frozen",
        }
    }
}

/// The end of a sentence about the process, with the remedy.
impl fmt::Display for Halted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Halted::Stopped(process) => write!(f, "is stopped; to let it go on: kill -CONT {process}"),
            Halted::Frozen(group) => {
                let group = group.display();
                write!(f, "is in the frozen cgroup {group}; to let it go on: echo 0 >{group}/cgroup.freeze")
            }
        }
    }
}

/// Returns why a process does nothing, if it is so.
pub fn of(process: u32) -> Option<Halted> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may contain some.
    if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't'])) {
        return Some(Halted::Stopped(process));
    }
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    let group = group_of(mount()?, &groups)?;
    frozen(&group).map(Halted::Frozen)
}

/// A sentence about a process that does not answer, if it does nothing.
pub fn sentence(process: u32) -> Option<String> {
    of(process).map(|halted| format!("does not answer: process {process} {halted}"))
}

/// The cgroup that keeps those of `group` frozen: itself, or one above it.
pub fn frozen(group: &Path) -> Option<PathBuf> {
    let events = fs::read_to_string(group.join("cgroup.events")).ok()?;
    let is_set = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.trim() == "1");
    let is_frozen = events.lines().any(|line| line == "frozen 1");
    is_frozen
        .then(|| group.ancestors().find(|at| is_set(&at.join("cgroup.freeze"))).unwrap_or(group).to_owned())
}

/// The mount of all cgroups of version 2; beside those of version 1 it is not at its usual place.
fn mount() -> Option<&'static Path> {
    static MOUNT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || mount_in(&fs::read_to_string("/proc/self/mountinfo").ok()?);
    MOUNT.get_or_init(find).as_deref()
}

/// The mount of the root of cgroups of version 2 among these (proc(5), /proc/PID/mountinfo).
fn mount_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then(|| at.into())
    })
}

/// The folder of the cgroup of version 2 in a process's list of cgroups (`/proc/PID/cgroup`).
fn group_of(mount: &Path, groups: &str) -> Option<PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(mount.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_frozen_with_its_cgroup_and_by_the_one_above_that_says_so() {
        let mount = tempfile::tempdir().unwrap();
        let outer = mount.path().join("outer");
        let inner = outer.join("inner");
        fs::create_dir_all(&inner).unwrap();
        let set = |group: &Path, freeze: &str, frozen: &str| {
            fs::write(group.join("cgroup.freeze"), format!("{freeze}\n")).unwrap();
            fs::write(group.join("cgroup.events"), format!("populated 1\nfrozen {frozen}\n")).unwrap();
        };
        let of = |groups: &str| frozen(&group_of(mount.path(), groups).unwrap());
        set(&inner, "0", "0");
        assert_eq!(of("3:cpu:/other\n0::/outer/inner\n"), None);
        set(&inner, "1", "1");
        assert_eq!(of("0::/outer/inner\n"), Some(inner.clone()));
        set(&inner, "0", "1");
        set(&outer, "1", "1");
        assert_eq!(of("0::/outer/inner\n"), Some(outer));
        assert_eq!(of("0::/gone\n"), None);
    }

    #[test]
    fn cgroups_of_version_2_are_found_beside_those_of_version_1() {
        let mounts = "30 24 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 24 0:27 /part /elsewhere rw - cgroup2 cgroup2 rw\n\
                      32 24 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_in(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_in(""), None);
    }
}
