// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The compose file: what `tombolo.toml` may say, and errors that name file, line and key.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use accelerator::AccelSpec;
use error::{bad_header, explain, line_of, locate};
use interpolate::{Expanded, Variables};
use network::NetSpec;

use crate::host;

pub mod accelerator;
mod check;
pub mod cloud_init;
mod conflicts;
pub mod depends;
mod device;
pub mod disks;
mod error;
pub mod interpolate;
pub mod manual;
pub mod named;
pub mod network;
pub mod ports;
pub mod restart;
mod vm;
mod zone;

pub use error::{ComposeError, nearest};
pub use tombolo_control::Size;
pub use vm::{HypervisorChoice, Ready, RootSpec, Share, VmSpec};
pub use zone::{Backing, Rights, ZoneSpec, ZoneUse};

/// The longest compose or env file that is read, in bytes.
const LONGEST: u64 = 32 << 20;

/// A compose file that has been read and checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Project {
    /// Name of the project: the file's `name`, or the name of its folder.
    pub name: String,
    /// The file, absolute.
    pub file: PathBuf,
    /// The content of the file, with absolute paths.
    pub compose: Compose,
}

/// The file's top level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compose {
    /// `"demo"`: Name of the project. Default: the name of the file's folder.
    #[serde(default)]
    pub name: Option<String>,
    /// `false`: VMs and zones may be larger together than the memory that is left.
    #[serde(default)]
    pub overcommit: bool,
    /// `0`: Processors of each NUMA node that stay with the host, where VMs say topology; QEMU's own threads run there, and so do the switches and
    /// accelerator servers of such VMs and the interrupts of their devices.
    #[serde(default)]
    pub reserve: u32,
    /// `"qemu-system-x86_64"`: The QEMU program. Default: $TOMBOLO_QEMU, then the PATH.
    #[serde(default)]
    pub qemu: Option<PathBuf>,
    /// `[zone.NAME]`: Zones by name.
    #[serde(default)]
    pub zone: BTreeMap<String, ZoneSpec>,
    /// `[net.NAME]`: Networks by name.
    #[serde(default)]
    pub net: BTreeMap<String, NetSpec>,
    /// `[accel.NAME]`: Accelerators by name.
    #[serde(default)]
    pub accel: BTreeMap<String, AccelSpec>,
    /// `[vm.NAME]`: VMs by name.
    #[serde(default)]
    pub vm: BTreeMap<String, VmSpec>,
}

/// Finds the compose file: `file` if given, else `tombolo.toml` here or in a folder above.
///
/// # Errors
/// When there is none.
pub fn find(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(file) = file {
        return std::path::absolute(file)
            .and_then(|f| f.canonicalize())
            .map_err(|e| anyhow::anyhow!("{}: {e}; name an existing compose file with -f", file.display()));
    }
    let here = std::env::current_dir()?;
    for dir in here.ancestors() {
        let file = dir.join("tombolo.toml");
        if file.is_file() {
            return Ok(file.canonicalize()?);
        }
    }
    anyhow::bail!(
        "no tombolo.toml in {} or above; write one to begin with (tombolo init), or name a compose file with -f",
        here.display()
    )
}

/// The path by which a compose file that is not there any more was known.
///
/// # Errors
/// When there is no current folder.
pub fn locate_gone(file: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(file)?;
    let (Some(folder), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Ok(absolute) };
    // The folder may be gone too; then its path is as good as it gets.
    Ok(folder.canonicalize().unwrap_or_else(|_| folder.to_owned()).join(name))
}

impl Project {
    /// A project whose compose file can't be read: it has its file's identity and nothing else.
    pub fn unread(file: &Path) -> Project {
        Project { name: folder_name(file), file: file.to_owned(), compose: Compose::default() }
    }

    /// Reads and checks a compose file, with the environment's variables and those of `.env` beside it.
    ///
    /// # Errors
    /// [`ComposeError`] with the line, as far as it is known.
    pub fn load(file: &Path) -> Result<Project, ComposeError> {
        Project::load_with(file, &[])
    }

    /// As [`Project::load`], with these env files instead of `.env`.
    ///
    /// # Errors
    /// [`ComposeError`] with the line, as far as it is known.
    pub fn load_with(file: &Path, env_files: &[PathBuf]) -> Result<Project, ComposeError> {
        if file.to_str().is_none() {
            let message = "its path is not UTF-8; rename the folder or the file".into();
            return Err(ComposeError { file: file.to_owned(), line: None, message });
        }
        let text = read(file).map_err(|e| ComposeError {
            file: file.to_owned(),
            line: None,
            message: format!("can't be read: {e}"),
        })?;
        Project::parse_with(file, &text, &Variables::load(file, env_files)?)
    }

    /// Parses `text` as the compose file `file` (absolute), without variables.
    ///
    /// # Errors
    /// [`ComposeError`] with the line, as far as it is known.
    pub fn parse(file: &Path, text: &str) -> Result<Project, ComposeError> {
        Project::parse_with(file, text, &Variables::default())
    }

    /// Parses `text` as the compose file `file` (absolute).
    ///
    /// # Errors
    /// [`ComposeError`] with the line, as far as it is known.
    pub fn parse_with(file: &Path, text: &str, variables: &Variables) -> Result<Project, ComposeError> {
        let mut expanded = Expanded::new(text, variables).map_err(|(line, message)| ComposeError {
            file: file.to_owned(),
            line: Some(line),
            message,
        })?;
        let (text, mut compose) = loop {
            let text = expanded.render();
            let parsed = serde_path_to_error::deserialize(toml::Deserializer::new(&text));
            let error = match parsed {
                Ok(compose) => break (text, compose),
                Err(error) => error,
            };
            let path = error.path().to_string();
            let error = error.into_inner();
            if error.message().starts_with("invalid type: string") && expanded.unquote(&path) {
                continue;
            }
            let line = error.span().map(|s| line_of(&text, s.start));
            return Err(ComposeError {
                file: file.to_owned(),
                line,
                message: line
                    .and_then(|line| bad_header(&text, line))
                    .unwrap_or_else(|| explain(&path, error.message())),
            });
        };
        let dir = file.parent().unwrap_or(Path::new("/"));
        make_absolute(&mut compose, dir);
        // What has been read as a compose file is a table.
        let written = text.parse().unwrap_or_default();
        let checked = check::check(&compose).and_then(|()| conflicts::check(&compose, &written));
        checked.map_err(|(table, key, message)| ComposeError {
            file: file.to_owned(),
            line: locate(&text, &table, &key),
            message,
        })?;
        let name = compose.name.clone().unwrap_or_else(|| folder_name(file));
        Ok(Project { name, file: file.to_owned(), compose })
    }
}

/// The text of a compose file. A pipe or a device would keep its reader, and each command reads the file.
fn read(file: &Path) -> io::Result<String> {
    let text = read_all(host::open(file, host::Kind::File, false)?)?;
    String::from_utf8(text).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// Reads a file of at most [`LONGEST`] bytes.
fn read_all(file: File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if file.take(LONGEST + 1).read_to_end(&mut text)? as u64 > LONGEST {
        return Err(io::Error::other(format!("it is larger than {}M", LONGEST >> 20)));
    }
    Ok(text)
}

/// The name of a project whose file says none.
pub(crate) fn folder_name(file: &Path) -> String {
    let folder = file
        .parent()
        .and_then(Path::file_name)
        .map_or("tombolo".into(), |n| n.to_string_lossy().into_owned());
    sanitize(&folder)
}

fn sanitize(name: &str) -> String {
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect();
    let name = name.trim_start_matches(['-', '.']);
    if name.is_empty() { "tombolo".into() } else { name.chars().take(40).collect() }
}

fn make_absolute(compose: &mut Compose, dir: &Path) {
    for zone in compose.zone.values_mut() {
        if let Backing::File(path) = &mut zone.backing {
            *path = dir.join(&*path);
        }
    }
    if let Some(qemu) = &mut compose.qemu {
        if qemu.components().count() > 1 {
            *qemu = dir.join(&*qemu);
        }
    }
    for vm in compose.vm.values_mut() {
        if let Some(root) = &vm.root {
            let reads = || ZoneUse { rights: Rights::ReadOnly, ..ZoneUse::default() };
            vm.zones.entry(root.zone.clone()).or_insert_with(reads);
        }
        if let Some(kernel) = &mut vm.kernel {
            // A version of the guest kit is no file beside the compose file.
            if kernel.contains('/') || dir.join(&*kernel).is_file() {
                *kernel = dir.join(&*kernel).to_string_lossy().into_owned();
            }
        }
        for path in [&mut vm.initrd, &mut vm.disk].into_iter().flatten() {
            *path = dir.join(&*path);
        }
        for disk in &mut vm.disks {
            disk.path = dir.join(&disk.path);
        }
        if let Some(given) = &mut vm.cloud_init {
            given.make_absolute(dir);
        }
        for share in &mut vm.share {
            share.path = dir.join(&share.path);
        }
    }
}

#[cfg(test)]
mod tests;
