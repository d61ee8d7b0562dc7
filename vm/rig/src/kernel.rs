// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A kernel that guests boot, with its modules.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// A kernel and where its modules are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its release, as `uname -r` says it.
    pub release: String,
    /// The bootable image.
    pub image: PathBuf,
    /// The folder that `modprobe` calls `lib/modules/RELEASE`.
    pub modules: PathBuf,
}

impl Kernel {
    /// A kernel of the guest kit. `kit` is the kit's folder, which has a folder per kernel series in it.
    ///
    /// # Errors
    /// The kit has no such series.
    pub fn of_kit(kit: &Path, series: &str) -> Result<Self> {
        let folder = kit.join(series);
        let release = std::fs::read_to_string(folder.join("release"))
            .with_context(|| format!("no kernel {series} in {}: run `make guest`", kit.display()))?;
        let [image, modules] = ["vmlinuz", "modules"].map(|name| folder.join(name));
        Ok(Self { release: release.trim().to_owned(), image, modules })
    }

    /// A kernel that is installed below `root`.
    #[must_use]
    pub fn installed(root: &Path, release: &str) -> Self {
        Self {
            release: release.to_owned(),
            image: root.join(format!("boot/vmlinuz-{release}")),
            modules: root.join("lib/modules").join(release),
        }
    }

    /// The files of `modules` and of what they depend on, in the order in which to load them. What is built into the kernel is left out.
    ///
    /// # Errors
    /// A module does not exist, or there is no `modprobe`.
    pub fn files_of(&self, modules: &[impl AsRef<str>]) -> Result<Vec<PathBuf>> {
        // modprobe looks below lib/modules/RELEASE of some folder only.
        let root = tempfile::tempdir()?;
        let folder = root.path().join("lib/modules");
        std::fs::create_dir_all(&folder)?;
        let own = self.modules.canonicalize().with_context(|| self.modules.display().to_string())?;
        std::os::unix::fs::symlink(own, folder.join(&self.release))?;
        let mut seen = BTreeSet::new();
        let mut files = Vec::new();
        for module in modules {
            let module = module.as_ref();
            let mut command = Command::new("modprobe");
            command.arg("-d").arg(root.path()).args(["-S", &self.release, "--show-depends", module]);
            let output = command.output().context("modprobe can't be run; install the package kmod")?;
            ensure!(
                output.status.success(),
                "kernel {} has no module {module}: {}",
                self.release,
                String::from_utf8_lossy(&output.stderr).trim()
            );
            for line in String::from_utf8_lossy(&output.stdout).lines() {
                // "builtin NAME" needs no file.
                let Some(path) = line.strip_prefix("insmod ") else { continue };
                let path = Path::new(path.trim());
                let below = path.strip_prefix(folder.join(&self.release)).unwrap_or(path);
                let file = self.modules.join(below);
                if seen.insert(file.clone()) {
                    files.push(file);
                }
            }
        }
        Ok(files)
    }
}

/// A module's name and its content, uncompressed.
///
/// # Errors
/// The file can't be read or unpacked.
pub fn unpacked(file: &Path) -> Result<(String, Vec<u8>)> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let Some((name, suffix)) = name.split_once(".ko") else { bail!("{} is no module", file.display()) };
    let unpack = |program: &str, package: &str| {
        let output = Command::new(program).arg("-dcq").arg(file).output();
        let output =
            output.with_context(|| format!("{program} can't be run; install the package {package}"))?;
        ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(output.stdout)
    };
    let content = match suffix {
        ".xz" => unpack("xz", "xz-utils")?,
        ".zst" => unpack("zstd", "zstd")?,
        _ => std::fs::read(file).with_context(|| file.display().to_string())?,
    };
    Ok((name.to_owned(), content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_the_kit_lacks_is_named_with_the_remedy() {
        let kit = tempfile::tempdir().unwrap();
        let error = Kernel::of_kit(kit.path(), "6.12").unwrap_err().to_string();
        assert!(error.contains("no kernel 6.12") && error.contains("make guest"), "{error}");
    }

    #[test]
    fn a_module_is_unpacked_and_named_without_its_suffixes() {
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().join("x.ko");
        std::fs::write(&plain, "content").unwrap();
        assert_eq!(unpacked(&plain).unwrap(), ("x".into(), b"content".to_vec()));
        assert!(Command::new("xz").arg("--keep").arg(&plain).status().unwrap().success());
        assert_eq!(unpacked(&folder.path().join("x.ko.xz")).unwrap(), ("x".into(), b"content".to_vec()));
        assert!(unpacked(folder.path()).is_err());
    }
}
