// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab's kernel: the newest `linux-image-amd64` that apt knows (Debian 12: its backports), downloaded as a package and unpacked into a
//! cache folder, never installed. A folder appears there whole or not at all, so any number of labs may start at once.

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

/// Where the project keeps what can be fetched again: `$TOMBOLO_CACHE`, or `tombolo` in the user's cache folder.
pub fn folder() -> Result<PathBuf> {
    let base = std::env::var_os("TOMBOLO_CACHE").map(PathBuf::from).or_else(|| {
        let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|c| c.join("tombolo"))
    });
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
pub fn fetch(folder: &Path) -> Result<Kernel> {
    let package = newest_package(&output(Command::new("apt-cache").args(["show", "linux-image-amd64"]))?)?;
    let release = package.strip_prefix("linux-image-").unwrap_or(&package).to_owned();
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let work =
        tempfile::Builder::new().prefix("fetch-").tempdir_in(folder).context("creating a work folder")?;
    output(Command::new("apt-get").args(["download", "-q", "-o", "APT::Sandbox::User=root", &package]).current_dir(&work))
        .with_context(|| {
            format!("the lab's kernel could not be fetched: run `apt-get update`, then check that `apt-get download {package}` works")
        })?;
    let archive = fs::read_dir(&work)?
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no package behind")?;
    let tree = work.path().join("tree");
    output(Command::new("dpkg-deb").arg("-x").args([&archive, &tree]))?;
    // Debian 13 ships its modules under /usr/lib; depmod and modprobe look under /lib.
    if !tree.join("lib").exists() {
        std::os::unix::fs::symlink("usr/lib", tree.join("lib")).context("linking lib to usr/lib")?;
    }
    output(Command::new("depmod").arg("-b").args([tree.as_os_str(), release.as_ref()]))?;
    let target = folder.join(format!("kernel-{release}"));
    match fs::rename(&tree, &target) {
        Ok(()) => {}
        // Another lab was faster; its folder is as good as ours.
        Err(_) if target.join("boot").exists() => {}
        Err(error) => {
            return Err(error).with_context(|| format!("moving the kernel to {}", target.display()));
        }
    }
    Ok(Kernel::in_folder(&target, &release))
}

/// Packages of a QEMU, as Debian cuts it.
const QEMU_PACKAGES: [&str; 4] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

/// A QEMU of Debian's backports, from the cache or fetched now and unpacked there. Its libraries are those of the installed one.
pub fn backported_qemu() -> Result<PathBuf> {
    let folder = folder()?.join("lab");
    let target = folder.join("qemu-backports");
    let program = |root: &Path| root.join("usr/bin/qemu-system-x86_64");
    if program(&target).exists() {
        return Ok(program(&target));
    }
    let codename = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename =
        codename.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).unwrap_or("bookworm").to_owned();
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let work =
        tempfile::Builder::new().prefix("fetch-").tempdir_in(&folder).context("creating a work folder")?;
    let mut download = Command::new("apt-get");
    download.args(["download", "-q", "-o", "APT::Sandbox::User=root"]);
    download.args(QEMU_PACKAGES.map(|package| format!("{package}/{codename}-backports")));
    output(download.current_dir(&work))?;
    let tree = work.path().join("tree");
    for entry in fs::read_dir(&work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "deb") {
            output(Command::new("dpkg-deb").arg("-x").args([&path, &tree]))?;
        }
    }
    match fs::rename(&tree, &target) {
        Ok(()) => {}
        // Another lab was faster; its folder is as good as ours.
        Err(_) if program(&target).exists() => {}
        Err(error) => return Err(error).with_context(|| format!("moving QEMU to {}", target.display())),
    }
    Ok(program(&target))
}

/// The kernel package that the newest version of the metapackage depends on.
fn newest_package(show: &str) -> Result<String> {
    let mut packages: Vec<&str> = show
        .lines()
        .filter_map(|line| line.strip_prefix("Depends: "))
        .flat_map(|depends| depends.split(", "))
        .filter_map(|dependency| dependency.split_whitespace().next())
        .filter(|name| name.starts_with("linux-image-") && series(&name["linux-image-".len()..]).is_some())
        .collect();
    packages.sort_by_key(|name| numbers(name));
    match packages.pop() {
        Some(package) => Ok(package.to_owned()),
        None => bail!(
            "apt offers no linux-image-amd64 of {}.{} or newer: run `apt-get update`; on Debian 12 add bookworm-backports to \
             the sources",
            OLDEST.0,
            OLDEST.1
        ),
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
    fn the_newest_kernel_is_chosen_by_number_not_by_spelling() {
        let show = "Package: linux-image-amd64\nVersion: 6.9\nDepends: linux-image-6.9.2-amd64 (= 6.9.2-1)\n\n\
                    Package: linux-image-amd64\nDepends: linux-image-6.12.95+deb12-amd64\n\n\
                    Package: linux-image-amd64\nDepends: linux-image-6.1.0-56-amd64 (= 6.1.192-2)\n";
        assert_eq!(newest_package(show).unwrap(), "linux-image-6.12.95+deb12-amd64");
    }

    #[test]
    fn a_release_too_old_for_the_lab_is_refused_with_the_remedy() {
        let error = newest_package("Depends: linux-image-5.10.0-30-amd64\n").unwrap_err();
        assert!(error.to_string().contains("bookworm-backports"), "{error}");
    }

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
