// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab's kernel, the newest `linux-image-amd64` that Debian has for this machine's release (Debian 12: of its backports), where the
//! installed QEMU is old the newest QEMU, and Debian 13's Bochs. All are downloaded as packages by the guest kit's own apt and unpacked into a
//! cache folder, never installed. A folder appears there whole or not at all, so any number of labs may start at once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::progress::Progress;
use crate::signals::follow;

/// The oldest kernel series with everything the lab and the project's modules need (major, minor).
const OLDEST: (u32, u32) = (6, 1);

/// Names of folders in which something is being unpacked begin with this.
const WORK: &str = "fetch-";

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

    /// This kernel as images are made from it.
    pub fn with_modules(&self) -> tombolo_rig::kernel::Kernel {
        tombolo_rig::kernel::Kernel::installed(&self.root, &self.release)
    }
}

/// Where the project keeps what can be fetched again: `$TOMBOLO_CACHE`; for a program in a checkout the checkout's `.cache`; or else
/// `tombolo` in the user's cache folder. Its links are resolved: an emulated host has this machine's root elsewhere, where an absolute link leads to
/// nothing.
pub fn folder() -> Result<PathBuf> {
    let folder = named_folder()?;
    let failed = || format!("the cache folder {}", folder.display());
    fs::create_dir_all(&folder).with_context(failed)?;
    folder.canonicalize().with_context(failed)
}

fn named_folder() -> Result<PathBuf> {
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
    let unpacked = Unpacked::fetch(folder, "kernel")
        .context("the lab's kernel could not be fetched; `tombolo lab fetch` tries again")?;
    let release = &unpacked.printed;
    if series(release).is_none() {
        bail!("Debian's newest kernel here is {release}; the lab needs {}.{} or newer", OLDEST.0, OLDEST.1);
    }
    let target = folder.join(format!("kernel-{release}"));
    unpacked.keep(&target)?;
    Ok(Kernel::in_folder(&target, release))
}

/// The newest QEMU that Debian has for this release, from the cache or fetched now. Its libraries are those of the installed one.
pub fn newer_qemu() -> Result<PathBuf> {
    let folder = folder()?.join("lab");
    let target = folder.join("qemu");
    if !target.exists() {
        Unpacked::fetch(&folder, "qemu")?.keep(&target)?;
    }
    Ok(target.join("usr/bin/qemu-system-x86_64"))
}

/// The folder of Debian 13's Bochs with what it needs, from the cache or fetched now. Its file `version` tells the package's version.
pub fn bochs() -> Result<PathBuf> {
    let folder = folder()?.join("lab");
    let target = folder.join("bochs");
    if !target.exists() {
        Unpacked::fetch(&folder, "bochs")?.keep(&target)?;
    }
    Ok(target)
}

/// The folder into which `fetch.sh` unpacks, until it is kept.
struct Unpacked {
    work: tempfile::TempDir,
    /// The output of the script.
    printed: String,
    /// One fetches at a time.
    _lock: File,
}

impl Unpacked {
    /// Runs `fetch.sh` with the guest kit's functions beside it.
    fn fetch(folder: &Path, what: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let lock = File::create(folder.join("fetch.lock")).context("locking the lab's cache")?;
        flock(&lock, FlockOperation::LockExclusive).context("waiting for another lab that fetches")?;
        // No other process fetches now, so these folders are left over from processes that were killed.
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(WORK) {
                fs::remove_dir_all(entry.path())
                    .with_context(|| format!("removing {}", entry.path().display()))?;
            }
        }
        let work =
            tempfile::Builder::new().prefix(WORK).tempdir_in(folder).context("creating a work folder")?;
        let script = work.path().join("fetch.sh");
        for (name, text) in [
            ("fetch.sh", include_str!("fetch.sh")),
            ("common.sh", include_str!("../../guest/common.sh")),
            ("cache.sh", include_str!("../../guest/cache.sh")),
        ] {
            fs::write(work.path().join(name), text)?;
        }
        let mut command = Command::new("bash");
        command.arg(&script).arg(what).arg(work.path().join("tree"));
        command.env("TOMBOLO_CACHE", self::folder()?);
        let _progress = Progress::begin(&format!("fetching the lab's {what} from Debian's archive"));
        let printed = output(&mut command)?.trim().to_owned();
        Ok(Self { work, printed, _lock: lock })
    }

    /// Moves the unpacked tree to its place, where it appears whole or not at all.
    fn keep(&self, target: &Path) -> Result<()> {
        match fs::rename(self.work.path().join("tree"), target) {
            // Another lab was faster; its folder is as good as ours.
            Err(_) if target.exists() => Ok(()),
            result => result.with_context(|| format!("moving what was unpacked to {}", target.display())),
        }
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
    follow(command);
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
