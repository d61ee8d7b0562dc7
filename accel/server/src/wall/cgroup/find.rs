// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds a control group that this server may divide. In this order:
//!
//! 1. The group that systemd delegated (`Delegate=yes`): this process's own, or the one above it (`DelegateSubgroup=`).
//! 2. Of a server that isn't root: the process's own group where it belongs to this user.
//! 3. Of a server of root: a new group at the top of the hierarchy that it sees.
//!
//! A group with processes can't be divided. So a server whose own group it is moves into a new group in it first, which fails where others are in
//! that group as well.

use super::{Delegated, Own, made, set, sweep};
use anyhow::{Context, anyhow, bail};
use std::ffi::CStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// The beginning of the names of groups that servers of root make; their process number follows.
pub(super) const PREFIX: &str = "tombolo-accel-";

/// This process's group: where its hierarchy is mounted, and its folder.
#[derive(Debug, PartialEq, Eq)]
struct Here {
    top: PathBuf,
    own: PathBuf,
}

impl Here {
    /// From the texts of /proc/self/cgroup and /proc/self/mountinfo.
    fn of(cgroup: &str, mounts: &str) -> Option<Here> {
        let path = Path::new(cgroup.lines().find_map(|line| line.strip_prefix("0::"))?);
        // Outside of what this namespace shows.
        if path.components().any(|part| part == Component::ParentDir) {
            return None;
        }
        mounts.lines().find_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut fields = place.split(' ');
            let (root, top) = (fields.nth(3)?, PathBuf::from(fields.next()?));
            let own = path.strip_prefix(root).ok().filter(|_| kind.starts_with("cgroup2 "))?;
            Some(Here { own: top.join(own), top })
        })
    }
}

/// systemd's mark, for users and for root.
const MARKS: [&CStr; 2] = [c"user.delegate", c"trusted.delegate"];

fn is_marked(folder: &Path) -> bool {
    MARKS.iter().any(|name| {
        let mut value = [0_u8; 8];
        rustix::fs::getxattr(folder, *name, &mut value).is_ok_and(|len| value[..len.min(8)] == *b"1")
    })
}

fn owner_is(folder: &Path, user: u32) -> bool {
    std::fs::metadata(folder).is_ok_and(|found| found.uid() == user)
}

/// The group that this process is in, after it moved into a group inside of that one.
fn own(folder: &Path) -> anyhow::Result<Delegated> {
    let inner = folder.join("server");
    let made = std::fs::create_dir(&inner);
    if let Err(e) = made {
        if e.kind() != std::io::ErrorKind::AlreadyExists {
            return Err(e).with_context(|| inner.display().to_string());
        }
    }
    let this = std::process::id().to_string();
    set(&inner, "cgroup.procs", &this)?;
    Delegated::at(folder).inspect_err(|_| {
        // Others are in it, and there this process stays.
        if set(folder, "cgroup.procs", &this).is_ok() {
            let _others_in_it = std::fs::remove_dir(&inner);
        }
    })
}

fn at_the_top(top: &Path) -> anyhow::Result<Delegated> {
    // A controller may be switched on already in a folder that may not be changed.
    set(top, "cgroup.subtree_control", super::CONTROLLERS).context("the controllers memory, pids and cpu")?;
    sweep(top);
    let folder = top.join(format!("{PREFIX}{}", std::process::id()));
    let lock = made(&folder)?;
    Delegated::over(Own { folder: folder.clone(), made: Some(lock.into()) }).inspect_err(|_| {
        // It is empty; what fails here failed before.
        let _left = std::fs::remove_dir(&folder);
    })
}

/// A group to divide; why there is none.
///
/// # Errors
/// Each thing that was tried, and what it failed of.
pub fn find() -> anyhow::Result<Delegated> {
    let read = |name: &str| std::fs::read_to_string(name).with_context(|| name.to_owned());
    let here = Here::of(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?);
    let Some(Here { top, own: folder }) = here else { bail!("no cgroup2 is mounted that has this process") };
    // SAFETY: takes nothing.
    let user = unsafe { libc::geteuid() };
    let mut why = Vec::new();
    let mut tried = |what: &Path, outcome: anyhow::Result<Delegated>| {
        outcome.inspect_err(|e| why.push(format!("{}: {e:#}", what.display()))).ok()
    };
    let above = folder.parent().filter(|above| above.starts_with(&top) && is_marked(above));
    if is_marked(&folder) || user != 0 && owner_is(&folder, user) {
        if let Some(found) = tried(&folder, own(&folder)) {
            return Ok(found);
        }
    } else if let Some(above) = above {
        if let Some(found) = tried(above, Delegated::at(above)) {
            return Ok(found);
        }
    }
    if user == 0 {
        if let Some(found) = tried(&top, at_the_top(&top)) {
            return Ok(found);
        }
    }
    if why.is_empty() {
        bail!("{} belongs to another user", folder.display());
    }
    Err(anyhow!("{}", why.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "24 1 0:22 / /sys rw - sysfs sysfs rw\n\
                          30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn a_processs_group_is_where_the_hierarchy_is_mounted() {
        let here = |cgroup, mounts| Here::of(cgroup, mounts).map(|here| here.own);
        let service = "0::/system.slice/a.service\n";
        assert_eq!(here(service, MOUNTS), Some("/sys/fs/cgroup/system.slice/a.service".into()));
        assert_eq!(here("4:memory:/x\n0::/\n", MOUNTS), Some("/sys/fs/cgroup".into()));
        // A container's view of a part of the hierarchy.
        let part = "30 24 0:26 /system.slice /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(here(service, part), Some("/cg/a.service".into()));
        assert_eq!(here("0::/user.slice\n", part), None);
        assert_eq!(here("0::/../b.service\n", MOUNTS), None);
        assert_eq!(here("4:memory:/x\n", MOUNTS), None);
        assert_eq!(here(service, "24 1 0:22 / /sys rw - sysfs sysfs rw\n"), None);
    }
}
