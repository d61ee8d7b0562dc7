// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The VMs that `down VM` has stopped, for `restart = "unless-stopped"`: a list per project that survives the host's reboot, in
//! `$XDG_STATE_HOME/tombolo` (root: `/var/lib/tombolo`).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use tombolo_passthrough::lock;

use crate::compose::Project;
use crate::compose::restart::Restart;
use crate::project::state;

/// Time for another command to change a list.
const LOCK: Duration = Duration::from_secs(5);

/// The VMs of this project that `down VM` has stopped and no command has started since.
///
/// # Errors
/// Those of the file system.
pub fn list(project: &Project) -> io::Result<BTreeSet<String>> {
    match std::fs::read_to_string(path_of(project)) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(e) => Err(e),
    }
}

/// Adds VMs to the list, those whose policy asks for it. Returns those that were not on it.
///
/// # Errors
/// Those of the file system.
pub fn add(project: &Project, vms: &[String]) -> io::Result<Vec<String>> {
    let asks =
        |vm: &&String| project.compose.vm.get(*vm).is_some_and(|spec| spec.restart == Restart::UnlessStopped);
    if !vms.iter().any(|vm| asks(&vm)) {
        return Ok(Vec::new());
    }
    let _lock = lock()?;
    let mut stopped = list(project)?;
    let new: Vec<String> = vms.iter().filter(asks).filter(|vm| !stopped.contains(*vm)).cloned().collect();
    stopped.extend(new.iter().cloned());
    if !new.is_empty() {
        write(project, &stopped)?;
    }
    Ok(new)
}

/// Takes VMs off the list, all where `vms` is empty.
///
/// # Errors
/// Those of the file system.
pub fn remove(project: &Project, vms: &[String]) -> io::Result<()> {
    // Most users have no list, and nothing is made for them.
    if list(project)?.is_empty() {
        return Ok(());
    }
    let _lock = lock()?;
    let mut stopped = list(project)?;
    let before = stopped.len();
    stopped.retain(|vm| !vms.is_empty() && !vms.contains(vm));
    if stopped.len() < before { write(project, &stopped) } else { Ok(()) }
}

fn write(project: &Project, stopped: &BTreeSet<String>) -> io::Result<()> {
    let lines: String = stopped.iter().map(|vm| format!("{vm}\n")).collect();
    state::write_atomically(&path_of(project), lines.as_bytes())
}

/// Keeps other commands from changing lists until it is dropped. Other users may open the folder, and what they can open they could lock.
fn lock() -> io::Result<File> {
    let dir = dir();
    // Whatever the umask allows, others may not write to it.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir);
    made.map_err(|e| state::at(&dir, &e))?;
    let path = dir.join("lock");
    let file = File::options().create(true).append(true).mode(0o600).open(&path);
    file.and_then(|file| lock::take(&file, &path, LOCK).map(|()| file)).map_err(|e| state::at(&path, &e))
}

fn path_of(project: &Project) -> PathBuf {
    let hash = state::hash(project.file.as_os_str().as_encoded_bytes());
    dir().join(format!("{:016x}.stopped", hash))
}

fn dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    if let Some(dir) = set("XDG_STATE_HOME") {
        return dir.join("tombolo");
    }
    if rustix::process::geteuid().is_root() {
        return "/var/lib/tombolo".into();
    }
    set("HOME").unwrap_or_else(std::env::temp_dir).join(".local/state/tombolo")
}
