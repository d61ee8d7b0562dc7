// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab's kernel, the newest `linux-image-amd64` that Debian has for this machine's release (Debian 12: of its backports), and where the
//! installed QEMU is old the newest QEMU. Both are downloaded as packages by the guest kit's own apt and unpacked into a cache folder, never
//! installed. A folder appears there whole or not at all, so any number of labs may start at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The oldest kernel series with everything the lab and the project's modules need (major, minor).
const OLDEST: (u32, u32) = (6, 1);

/// An unpacked kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its release, as `uname -r` says it.
    pub release: String,
    /// The bootable image.
    pub image: PathBuf,
    /// The folder that holds `lib/modules/RELEASE`.
    pub root: PathBuf,
}

impl Kernel {
    fn in_folder(root: &Path, release: &str) -> Self {
        Self {
            release: release.into(),
            image: root.join(format!("boot/vmlinuz-{release}")),
            root: root.into(),
        }
    }

    /// The folder of the kernel's modules.
    pub fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.release)
    }
}

/// Where the project keeps what can be fetched again: `$TOMBOLO_CACHE`; for a program in a checkout the checkout's `.cache`; or else
/// `tombolo` in the user's cache folder.
pub fn folder() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("TOMBOLO_CACHE") {
        return Ok(folder.into());
    }
    let program = std::env::current_exe().unwrap_or_default();
    if let Some(checkout) = program.ancestors().find(|a| a.join("guest/common.sh").is_file()) {
        return Ok(checkout.join(".cache"));
    }
    let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|c| c.join("tombolo"));
    base.context("no folder to keep the lab's kernel in: set TOMBOLO_CACHE or HOME")
}

/// The newest kernel in the cache, or else the newest that apt offers, fetched now.
pub fn kernel() -> Result<Kernel> {
    let folder = folder()?.join("lab");
    if let Some(kernel) = newest_cached(&folder)? {
        return Ok(kernel);
    }
    fetch(&folder)
}

fn newest_cached(folder: &Path) -> Result<Option<Kernel>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", folder.display())),
    };
    let mut releases: Vec<String> = entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.strip_prefix("kernel-").map(str::to_owned))
        .filter(|release| series(release).is_some())
        .collect();
    releases.sort_by_key(|release| numbers(release));
    Ok(releases.pop().map(|release| Kernel::in_folder(&folder.join(format!("kernel-{release}")), &release)))
}

/// Downloads and unpacks the newest kernel package, and writes its module index.
fn fetch(folder: &Path) -> Result<Kernel> {
    let (work, release) = unpack(folder, "kernel")
        .context("the lab's kernel could not be fetched; `tombolo lab fetch` tries again")?;
    if series(&release).is_none() {
        bail!("Debian's newest kernel here is {release}; the lab needs {}.{} or newer", OLDEST.0, OLDEST.1);
    }
    let target = folder.join(format!("kernel-{release}"));
    keep(&work.path().join("tree"), &target)?;
    Ok(Kernel::in_folder(&target, &release))
}

/// The newest QEMU that Debian has for this release, from the cache or fetched now. Its libraries are those of the installed one.
pub fn newer_qemu() -> Result<PathBuf> {
    let folder = folder()?.join("lab");
    let target = folder.join("qemu");
    if !target.exists() {
        let (work, _) = unpack(&folder, "qemu")?;
        keep(&work.path().join("tree"), &target)?;
    }
    Ok(target.join("usr/bin/qemu-system-x86_64"))
}

/// Runs `fetch.sh` with the guest kit's functions beside it. What it unpacked is in `tree` of the folder that is returned; with it what it
/// printed.
fn unpack(folder: &Path, what: &str) -> Result<(tempfile::TempDir, String)> {
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let work =
        tempfile::Builder::new().prefix("fetch-").tempdir_in(folder).context("creating a work folder")?;
    let script = work.path().join("fetch.sh");
    fs::write(&script, include_str!("fetch.sh"))?;
    fs::write(work.path().join("common.sh"), include_str!("../../guest/common.sh"))?;
    let mut command = Command::new("bash");
    command.arg(&script).arg(what).arg(work.path().join("tree"));
    command.env("TOMBOLO_CACHE", self::folder()?);
    let printed = output(&mut command)?;
    Ok((work, printed.trim().to_owned()))
}

/// Moves an unpacked tree to its place, where it appears whole or not at all.
fn keep(tree: &Path, target: &Path) -> Result<()> {
    match fs::rename(tree, target) {
        // Another lab was faster; its folder is as good as ours.
        Err(_) if target.exists() => Ok(()),
        result => result.with_context(|| format!("moving what was unpacked to {}", target.display())),
    }
}

fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

fn series(release: &str) -> Option<(u32, u32)> {
    let numbers = numbers(release);
    let series = (*numbers.first()?, *numbers.get(1)?);
    (series >= OLDEST).then_some(series)
}

/// Runs a program to its end and gives its output; an error carries what it said.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let result = command.output().with_context(|| format!("running {name}; is its package installed?"))?;
    if !result.status.success() {
        bail!("{name} failed ({}): {}", result.status, String::from_utf8_lossy(&result.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_downloads_are_not_taken_for_kernels() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("fetch-x")).unwrap();
        assert_eq!(newest_cached(folder.path()).unwrap(), None);
        fs::create_dir(folder.path().join("kernel-6.12.9+deb12-amd64")).unwrap();
        fs::create_dir(folder.path().join("kernel-6.12.10+deb12-amd64")).unwrap();
        let kernel = newest_cached(folder.path()).unwrap().unwrap();
        assert_eq!(kernel.release, "6.12.10+deb12-amd64");
        assert!(kernel.image.ends_with("boot/vmlinuz-6.12.10+deb12-amd64"));
    }
}
