// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The image that a guest boots from: an initramfs with busybox, kernel modules, programs with their shared libraries, and an init script.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tombolo_qemu::cpio::Archive;

use crate::kernel::{Kernel, unpacked};

/// The init script that serves a shell on the second serial port.
const SHELL: &str = include_str!("init.sh");
/// Folders that every image has.
const FOLDERS: [&str; 6] = ["bin", "dev", "modules", "proc", "sys", "tmp"];

/// The content of an image. Modules are loaded in the order given, each after those that it depends on.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// Modules of the kernel, by name.
    pub modules: Vec<String>,
    /// Module files from elsewhere, loaded after those, and named without their folder.
    pub own_modules: Vec<PathBuf>,
    /// Module files that lie in /modules and are not loaded.
    pub unloaded: Vec<PathBuf>,
    /// Programs and libraries that go to /bin, with the libraries that they need.
    pub programs: Vec<PathBuf>,
    /// Files that go where they are here, programs among them with the libraries that they need.
    pub files: Vec<PathBuf>,
    /// Shell commands that the init script runs before it serves its shell; variables that they export are the shell's.
    pub setup: String,
    /// Another init script, instead of the one that serves a shell.
    pub init: Option<String>,
}

impl Image {
    /// Writes the image to `target`.
    ///
    /// # Errors
    /// Says which file can't be read, or which program is missing on this host.
    pub fn write(&self, kernel: &Kernel, target: &Path) -> Result<()> {
        let file = File::create(target).with_context(|| target.display().to_string())?;
        let mut archive = Archive::new(BufWriter::new(file));
        let mut folders = BTreeSet::new();
        for folder in FOLDERS {
            add_folder(&mut archive, &mut folders, Path::new(folder))?;
        }
        archive.program("bin/busybox", &std::fs::read(busybox()?)?)?;
        self.add_modules(kernel, &mut archive)?;
        for (path, from) in self.placed()? {
            if let Some(parent) = path.parent() {
                add_folder(&mut archive, &mut folders, parent)?;
            }
            let content = std::fs::read(&from).with_context(|| from.display().to_string())?;
            let name = path.to_string_lossy();
            let executable = from.metadata()?.permissions().mode() & 0o111 != 0;
            if executable { archive.program(&name, &content)? } else { archive.file(&name, &content)? }
        }
        archive.file("setup", self.setup.as_bytes())?;
        archive.program("init", self.init.as_deref().unwrap_or(SHELL).as_bytes())?;
        archive.finish()?.flush()?;
        Ok(())
    }

    fn add_modules(&self, kernel: &Kernel, archive: &mut Archive<impl Write>) -> Result<()> {
        let mut order = String::new();
        let loaded = kernel.files_of(&self.modules)?;
        for file in loaded.iter().chain(&self.own_modules) {
            let (name, content) = unpacked(file)?;
            archive.file(&format!("modules/{name}.ko"), &content)?;
            order.push_str(&format!("{name}\n"));
        }
        for file in &self.unloaded {
            let (name, content) = unpacked(file)?;
            archive.file(&format!("modules/{name}.ko"), &content)?;
        }
        Ok(archive.file("modules/order", order.as_bytes())?)
    }

    /// Each file's path in the image, without the leading slash, and where it is taken from.
    fn placed(&self) -> Result<BTreeMap<PathBuf, PathBuf>> {
        let mut placed = BTreeMap::new();
        for program in &self.programs {
            let name = program.file_name().with_context(|| format!("{} has no name", program.display()))?;
            placed.insert(Path::new("bin").join(name), program.clone());
        }
        for file in &self.files {
            placed.insert(relative(file)?, file.clone());
        }
        let mut libraries = BTreeSet::new();
        for file in placed.values().filter(|file| may_need_libraries(file)) {
            libraries.extend(libraries_of(file)?);
        }
        for library in libraries {
            placed.entry(relative(&library)?).or_insert(library);
        }
        Ok(placed)
    }
}

/// Adds a folder and its parents, those once that are not there yet.
fn add_folder(archive: &mut Archive<impl Write>, there: &mut BTreeSet<PathBuf>, folder: &Path) -> Result<()> {
    let mut path = PathBuf::new();
    for part in folder.components() {
        path.push(part);
        if there.insert(path.clone()) {
            archive.directory(&path.to_string_lossy())?;
        }
    }
    Ok(())
}

fn relative(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let parts = path.components().filter(|c| matches!(c, Component::Normal(_)));
    Ok(parts.collect())
}

/// The static busybox of Debian's package busybox-static.
///
/// # Errors
/// It is not installed.
pub fn busybox() -> Result<PathBuf> {
    let found = ["/bin/busybox", "/usr/bin/busybox"].iter().map(PathBuf::from).find(|p| p.exists());
    found.context("no /bin/busybox: install the package busybox-static")
}

fn may_need_libraries(file: &Path) -> bool {
    let executable = file.metadata().is_ok_and(|m| m.permissions().mode() & 0o111 != 0);
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    executable || name.ends_with(".so") || name.contains(".so.")
}

/// The shared libraries of this host that a program or library needs; none for a static program or a script.
fn libraries_of(file: &Path) -> Result<Vec<PathBuf>> {
    let output =
        Command::new("ldd").arg(file).output().context("ldd can't be run; install the package libc-bin")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).filter(|path| path != file).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_lies_in_bin_and_its_libraries_where_they_are_here() {
        let image = Image { programs: vec!["/bin/sh".into()], ..Image::default() };
        let placed = image.placed().unwrap();
        assert_eq!(placed[Path::new("bin/sh")], Path::new("/bin/sh"));
        let libc = placed.keys().find(|path| path.ends_with("libc.so.6")).unwrap();
        assert_eq!(Path::new("/").join(libc), placed[libc]);
    }

    #[test]
    fn a_script_needs_no_library() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(libraries_of(&script).unwrap(), Vec::<PathBuf>::new());
    }

    #[test]
    fn the_init_script_is_valid_shell() {
        let status = Command::new("sh").args(["-n", "-c", SHELL]).status().unwrap();
        assert!(status.success());
    }
}
