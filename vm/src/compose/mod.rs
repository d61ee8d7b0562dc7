// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The compose file: what `tombolo.toml` may say, and errors that name file, line and key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tombolo_passthrough::address::Address;
use tombolo_topology::request::{Pages, Part};

use crate::machine::growth::StartKind;
use accelerator::{AccelSpec, Uses};
use cloud_init::CloudInit;
use depends::{Depends, HealthCheck};
use disks::DiskSpec;
use interpolate::{Expanded, Variables};
use network::{NetSpec, Nics};
use ports::Forward;
use restart::Restart;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

pub mod accelerator;
pub mod cloud_init;
pub mod depends;
pub mod disks;
pub mod interpolate;
pub mod manual;
pub mod named;
pub mod network;
pub mod ports;
pub mod restart;

/// Zones are multiples of this many bytes: a virtio-pmem device of another size breaks the devices after it.
pub const ZONE_ALIGN: u64 = 2 << 20;
/// The smallest zone, in bytes.
pub const ZONE_MIN: u64 = 8 << 20;
/// The least memory a VM may have, in bytes: below it Debian's kernels don't reach their init.
pub const MEMORY_MIN: u64 = 128 << 20;

/// A compose file that has been read and checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Project {
    /// Name of the project: the file's `name`, or the name of its folder.
    pub name: String,
    /// The file, absolute.
    pub file: PathBuf,
    /// What it says, with paths made absolute.
    pub compose: Compose,
}

/// The file's top level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compose {
    /// Name of the project; default: the name of the file's folder.
    #[serde(default)]
    pub name: Option<String>,
    /// Allow VMs and zones to be larger together than the memory the host has left.
    #[serde(default)]
    pub overcommit: bool,
    /// CPUs of each NUMA node that stay with the host where VMs say `topology`.
    #[serde(default)]
    pub reserve: u32,
    /// The QEMU program; default: `qemu-system-x86_64` on the PATH.
    #[serde(default)]
    pub qemu: Option<PathBuf>,
    /// Zones by name.
    #[serde(default)]
    pub zone: BTreeMap<String, ZoneSpec>,
    /// Networks by name.
    #[serde(default)]
    pub net: BTreeMap<String, NetSpec>,
    /// Accelerators by name.
    #[serde(default)]
    pub accel: BTreeMap<String, AccelSpec>,
    /// VMs by name.
    #[serde(default)]
    pub vm: BTreeMap<String, VmSpec>,
}

/// `[zone.NAME]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneSpec {
    /// Bytes, a multiple of 2 MiB.
    pub size: Size,
    /// Where the memory comes from.
    #[serde(default)]
    pub backing: Backing,
    /// Make a file system in it when the zone is created.
    #[serde(default)]
    pub files: bool,
}

/// `[vm.NAME]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// A kernel image's path, or a version of the guest kit ("6.12"): what is a file beside the compose file is a path.
    #[serde(default)]
    pub kernel: Option<String>,
    /// The initramfs; default: the guest kit's, where the kernel is.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// More words for the kernel's command line.
    #[serde(default)]
    pub cmdline: Option<String>,
    /// A disk image (qcow2 or raw).
    #[serde(default)]
    pub disk: Option<PathBuf>,
    /// Throw away what the VM writes to its disk.
    #[serde(default)]
    pub snapshot: bool,
    /// Virtual CPUs.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// Memory in bytes.
    #[serde(default = "default_memory")]
    pub memory: Size,
    /// How it is run.
    #[serde(default)]
    pub accel: AccelChoice,
    /// When the VM counts as up.
    #[serde(default)]
    pub ready: Ready,
    /// Seconds until a VM that is not ready counts as failed.
    #[serde(default = "default_ready_timeout")]
    pub ready_timeout: u32,
    /// Zones the VM is a member of, by name.
    #[serde(default)]
    pub zones: BTreeMap<String, ZoneUse>,
    /// Its devices in networks, by network.
    #[serde(default)]
    pub networks: Nics,
    /// Accelerators that its programs use, by name.
    #[serde(default)]
    pub accelerators: Uses,
    /// Host folders offered over 9p (for tests and benches; the guest's kernel needs 9p).
    #[serde(default)]
    pub share: Vec<Share>,
    /// Empty PCI Express ports for zones that are attached later, one for each.
    #[serde(default = "default_ports")]
    pub hotplug_ports: u32,
    /// PCI devices of the host that become the VM's, such as "0000:01:00.0".
    #[serde(default)]
    pub devices: Vec<Address>,
    /// Take the other devices of each IOMMU group along.
    #[serde(default)]
    pub whole_group: bool,
    /// How the memory arrives; default: "auto", fast with devices and slow without.
    #[serde(default)]
    pub start: Option<StartKind>,
    /// Memory at a fast start; default: a thirty-second part, from 512 MiB to 8 GiB.
    #[serde(default)]
    pub boot_memory: Option<Size>,
    /// Percent of the time in which growing may disturb the guest; default: 100, memory as soon as it can be had.
    #[serde(default)]
    pub growth_share: Option<tombolo_start::pace::Share>,
    /// Processors that its QEMU may use, the guest's included, such as 1.5.
    #[serde(default)]
    pub cpu_limit: Option<f64>,
    /// Memory of the host that its QEMU may use, the guest's included.
    #[serde(default)]
    pub memory_limit: Option<Size>,
    /// The part of the host that it lies on.
    #[serde(default)]
    pub topology: Option<Part>,
    /// What its memory is made of, where it says `topology`.
    #[serde(default)]
    pub pages: Pages,
    /// VMs that are started before it, and stopped after it.
    #[serde(default)]
    pub depends_on: Depends,
    /// A command that tells whether it does what it is for.
    #[serde(default)]
    pub healthcheck: Option<HealthCheck>,
    /// Disks beside `disk`.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// User data, keys and network that cloud-init in the VM's image reads.
    #[serde(default)]
    pub cloud_init: Option<CloudInit>,
    /// Ports of the host that lead to it.
    #[serde(default)]
    pub ports: Vec<Forward>,
    /// Whether it is started again when it has ended.
    #[serde(default)]
    pub restart: Restart,
    /// More arguments for QEMU, as they are.
    #[serde(default)]
    pub qemu_args: Vec<String>,
}

/// One entry of a VM's `zones`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneUse {
    /// Where the guest mounts the zone's file system.
    #[serde(default)]
    pub mount: Option<String>,
    /// Options of that mount: noatime and the like. Set-id bits and devices count only with "suid" and "dev".
    #[serde(default)]
    pub options: Vec<String>,
    /// Rights of the member.
    #[serde(default)]
    pub rights: Rights,
    /// The directory of the zone's file system that the guest is confined to; made where it is missing.
    #[serde(default)]
    pub subtree: Option<String>,
    /// What the files that the guest makes may take up together.
    #[serde(default)]
    pub bytes: Option<Size>,
    /// How many files and directories it may make.
    #[serde(default)]
    pub inodes: Option<u64>,
}

/// One entry of a VM's `share`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The mount tag.
    pub tag: String,
    /// The folder on the host.
    pub path: PathBuf,
    /// Refuse writes.
    #[serde(default)]
    pub readonly: bool,
    /// Where the guest mounts it; none: it does so itself.
    #[serde(default)]
    pub mount: Option<String>,
}

/// Rights of a member of a zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rights {
    #[default]
    #[serde(rename = "rw")]
    ReadWrite,
    #[serde(rename = "ro")]
    ReadOnly,
}

/// `accel =`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// KVM where a tiny guest ran under it, TCG otherwise.
    #[default]
    Auto,
    /// KVM or an error.
    Kvm,
    /// QEMU's own emulation.
    Tcg,
}

fn default_cpus() -> u32 {
    2
}
fn default_memory() -> Size {
    Size(512 << 20)
}
fn default_ready_timeout() -> u32 {
    180
}
fn default_ports() -> u32 {
    8
}

pub use tombolo_control::Size;

/// Where a zone's memory comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory, gone with the project.
    #[default]
    Memfd,
    /// Huge pages that the host's administrator has reserved.
    Hugetlb,
    /// A file that persists.
    File(PathBuf),
}

impl Serialize for Backing {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Backing::Memfd => s.serialize_str("memfd"),
            Backing::Hugetlb => s.serialize_str("hugetlb"),
            Backing::File(path) => path.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Backing {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "memfd" => Ok(Backing::Memfd),
            "hugetlb" => Ok(Backing::Hugetlb),
            path if path.contains('/') => Ok(Backing::File(path.into())),
            other => Err(de::Error::custom(format!(
                "'{other}' is no backing; write \"memfd\", \"hugetlb\", or a file's path with a '/' in it"
            ))),
        }
    }
}

/// When a VM counts as up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ready {
    /// The guest agent answers.
    #[default]
    Agent,
    /// QEMU runs.
    Running,
    /// A line of the console matches.
    Console(String),
}

impl Serialize for Ready {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Ready::Agent => s.serialize_str("agent"),
            Ready::Running => s.serialize_str("running"),
            Ready::Console(regex) => s.collect_str(&format_args!("console:{regex}")),
        }
    }
}

impl<'de> Deserialize<'de> for Ready {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "agent" => Ok(Ready::Agent),
            "running" => Ok(Ready::Running),
            other => match other.strip_prefix("console:") {
                Some(regex) => match regex_lite::Regex::new(regex) {
                    Ok(_) => Ok(Ready::Console(regex.to_owned())),
                    Err(e) => Err(de::Error::custom(format!("'{regex}' is not a regular expression: {e}"))),
                },
                None => Err(de::Error::custom(format!(
                    "'{other}' is no readiness; write \"agent\", \"running\" or \"console:REGEX\""
                ))),
            },
        }
    }
}

/// What is wrong with a compose file, and where.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}{}: {message}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct ComposeError {
    pub file: PathBuf,
    /// Line, from 1.
    pub line: Option<usize>,
    /// What and what to do.
    pub message: String,
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
        let text = std::fs::read_to_string(file).map_err(|e| ComposeError {
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
                message: explain(&path, error.message()),
            });
        };
        let dir = file.parent().unwrap_or(Path::new("/"));
        make_absolute(&mut compose, dir);
        check(&compose).map_err(|(table, key, message)| ComposeError {
            file: file.to_owned(),
            line: locate(&text, &table, &key),
            message,
        })?;
        let name = compose.name.clone().unwrap_or_else(|| folder_name(file));
        Ok(Project { name, file: file.to_owned(), compose })
    }
}

/// The name of a project whose file says none.
fn folder_name(file: &Path) -> String {
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

/// Checks that need no look at the host. The error is (table, key, message).
fn check(compose: &Compose) -> Result<(), (String, String, String)> {
    let fail = |table: &str, key: &str, message: String| Err((table.to_owned(), key.to_owned(), message));
    if let Some(name) = &compose.name {
        if name.is_empty() || *name != sanitize(name) {
            return fail(
                "",
                "name",
                format!("name '{name}': use up to 40 letters, digits, '-', '_' and '.'"),
            );
        }
    }
    for (name, zone) in &compose.zone {
        let table = format!("zone.{name}");
        if let Some(message) = bad_name("a zone", name) {
            return fail(&table, "", message);
        }
        let size = zone.size.0;
        if size < ZONE_MIN || size % ZONE_ALIGN != 0 {
            let better = Size(size.max(ZONE_MIN).next_multiple_of(ZONE_ALIGN));
            return fail(
                &table,
                "size",
                format!(
                    "zone.{name}.size is {}; a zone is a multiple of 2M and at least 8M: write \"{better}\"",
                    zone.size
                ),
            );
        }
    }
    for (name, vm) in &compose.vm {
        let table = format!("vm.{name}");
        if let Some(message) = bad_name("a VM", name) {
            return fail(&table, "", message);
        }
        if vm.memory.0 < MEMORY_MIN {
            return fail(
                &table,
                "memory",
                format!("vm.{name}.memory is {}; a guest needs at least {}", vm.memory, Size(MEMORY_MIN)),
            );
        }
        if vm.memory.0 % (2 << 20) != 0 {
            return fail(
                &table,
                "memory",
                format!("vm.{name}.memory is {}; it must be a multiple of 2M", vm.memory),
            );
        }
        if vm.cpus == 0 || vm.cpus > 255 {
            return fail(&table, "cpus", format!("vm.{name}.cpus is {}; write 1 to 255", vm.cpus));
        }
        if vm.topology.is_none() && vm.pages != Pages::Auto {
            return fail(
                &table,
                "pages",
                format!("vm.{name}.pages needs topology = \"close\" or another part"),
            );
        }
        if vm.topology.is_some() && vm.start == Some(StartKind::Fast) {
            return fail(
                &table,
                "start",
                format!(
                    "vm.{name}.start: memory that is bound to nodes is there at the start; leave out start or topology"
                ),
            );
        }
        if vm.cpu_limit.is_some_and(|limit| !(0.01..=10_000.0).contains(&limit)) {
            return fail(
                &table,
                "cpu_limit",
                format!("vm.{name}.cpu_limit: write a number of processors, such as 1.5"),
            );
        }
        if let Some(limit) = vm.memory_limit.filter(|limit| *limit < vm.memory) {
            return fail(
                &table,
                "memory_limit",
                format!(
                    "vm.{name}.memory_limit is {limit}, less than the guest's memory of {}; QEMU needs that and some 200M more",
                    vm.memory
                ),
            );
        }
        if vm.hotplug_ports > 16 {
            return fail(
                &table,
                "hotplug_ports",
                format!("vm.{name}.hotplug_ports is {}; write 0 to 16", vm.hotplug_ports),
            );
        }
        if vm.initrd.is_some() && vm.kernel.is_none() {
            return fail(
                &table,
                "initrd",
                format!("vm.{name} has an initrd but no kernel; add kernel = \"PATH\""),
            );
        }
        if vm.snapshot && vm.disk.is_none() {
            return fail(&table, "snapshot", format!("vm.{name}.snapshot is set, but there is no disk"));
        }
        for share in &vm.share {
            let Some(mount) = &share.mount else { continue };
            if !mount.starts_with('/') {
                let message = format!("vm.{name}.share: mount is '{mount}'; write an absolute path");
                return fail(&table, "share", message);
            }
            if vm.ready != Ready::Agent {
                let message = format!(
                    "vm.{name} mounts the share '{}', which is done through the guest agent: ready must be \"agent\"",
                    share.tag
                );
                return fail(&table, "ready", message);
            }
        }
        for (zone, zone_use) in &vm.zones {
            let Some(spec) = compose.zone.get(zone) else {
                let near = nearest(zone, compose.zone.keys().map(String::as_str));
                let hint = match near {
                    Some(near) => format!("did you mean '{near}'?"),
                    None => format!("add [zone.{zone}] with a size"),
                };
                return fail(
                    &table,
                    "zones",
                    format!("vm.{name}.zones names the zone '{zone}', which is not declared; {hint}"),
                );
            };
            if let Some(mount) = &zone_use.mount {
                if !spec.files {
                    return fail(
                        &table,
                        "zones",
                        format!(
                            "vm.{name} mounts the zone '{zone}', which has no file system; add files = true to [zone.{zone}]"
                        ),
                    );
                }
                if !mount.starts_with('/') {
                    return fail(
                        &table,
                        "zones",
                        format!("vm.{name}.zones.{zone}.mount is '{mount}'; write an absolute path"),
                    );
                }
                if vm.ready != Ready::Agent {
                    return fail(
                        &table,
                        "ready",
                        format!(
                            "vm.{name} mounts the zone '{zone}', which is done through the guest agent: ready must be \"agent\""
                        ),
                    );
                }
            }
        }
    }
    network::check(compose)?;
    ports::check(compose)?;
    disks::check(compose)?;
    depends::check(compose)?;
    accelerator::check(compose)
}

pub(crate) fn bad_name(kind: &str, name: &str) -> Option<String> {
    let good = !name.is_empty()
        && name.len() < 32
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    (!good).then(|| format!("'{name}' can't name {kind}: use up to 31 letters, digits, '-' and '_'"))
}

/// Line, from 1, of a byte offset.
fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Line, from 1, where `key` stands in `[table]`; the table's own line if the key has none.
fn locate(text: &str, table: &str, key: &str) -> Option<usize> {
    let mut inside = table.is_empty();
    let mut header = None;
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix('[') {
            let found = rest.split(']').next().unwrap_or("").replace(['"', ' '], "");
            if found == format!("{table}.{key}") {
                return Some(n + 1);
            }
            inside = found == table;
            if inside {
                header = Some(n + 1);
            }
        } else if inside && !key.is_empty() {
            let name = line.split(['=', '.']).next().unwrap_or("").trim();
            if line.contains('=') && name == key {
                return Some(n + 1);
            }
        }
    }
    header
}

/// Makes serde's message about the value at `path` ("vm.a.cpus"; "." for the whole file) one for people: unknown keys get their table and
/// the nearest valid key, other errors the key that they are about.
fn explain(path: &str, message: &str) -> String {
    let whole_file = path == ".";
    let in_table = |table: &str| {
        if table.is_empty() { " at the top level".to_owned() } else { format!(" in [{table}]") }
    };
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let mut quoted = rest.split('`');
        let key = quoted.next().unwrap_or_default();
        let valid: Vec<&str> = quoted.skip(1).step_by(2).collect();
        let hint = match nearest(key, valid.iter().copied()) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("valid keys: {}", valid.join(", ")),
        };
        // The path ends with the unknown key itself.
        let table = path.rsplit_once('.').map_or("", |(table, _)| table);
        return format!("unknown key '{key}'{}; {hint}", in_table(table));
    }
    if let Some(rest) = message.strip_prefix("missing field `") {
        let key = rest.split('`').next().unwrap_or_default();
        return format!("key '{key}' is missing{}; add it", in_table(if whole_file { "" } else { path }));
    }
    let message = message.trim().replace('\n', ": ");
    if whole_file { message } else { format!("{path}: {message}") }
}

/// The candidate nearest to `word`, if one is near enough to be meant.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1) + 1;
    candidates.map(|c| (strsim::osa_distance(word, c), c)).filter(|(d, _)| *d <= limit).min().map(|(_, c)| c)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Project, ComposeError> {
        Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text)
    }

    fn error(text: &str) -> String {
        parse(text).expect_err("must be refused").to_string()
    }

    #[test]
    fn a_small_file_gets_the_defaults() {
        let p = parse("[zone.shared]\nsize = \"512M\"\nfiles = true\n[vm.a]\nzones = { shared = { mount = \"/mnt\" } }\n[vm.b]\n").unwrap();
        assert_eq!(p.name, "demo");
        assert_eq!(p.compose.zone["shared"].size, Size(512 << 20));
        assert_eq!(p.compose.zone["shared"].backing, Backing::Memfd);
        let a = &p.compose.vm["a"];
        assert_eq!((a.cpus, a.memory, &a.ready), (2, Size(512 << 20), &Ready::Agent));
        assert_eq!(a.zones["shared"].mount.as_deref(), Some("/mnt"));
        assert_eq!(a.zones["shared"].rights, Rights::ReadWrite);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_its_table_and_the_nearest_valid_one() {
        assert_eq!(
            error("[vm.a]\ncpus = 2\nmemroy = \"1G\"\n"),
            "/somewhere/demo/tombolo.toml:3: unknown key 'memroy' in [vm.a]; did you mean 'memory'?"
        );
        let e = error("[vm.a]\ncpus = 2\n[netwrk.x]\n");
        assert!(e.starts_with("/somewhere/demo/tombolo.toml:3: unknown key 'netwrk'"), "{e}");
        let e = error("[zone.z]\nsize=\"8M\"\n[vm.a.zones]\nz = { mont = \"/x\" }\n");
        assert!(e.contains(":4: unknown key 'mont'") && e.contains("'mount'"), "{e}");
    }

    #[test]
    fn a_value_of_the_wrong_kind_names_its_key() {
        let e = error("[vm.a]\nnetworks = 5\n");
        assert!(e.contains(":2: vm.a.networks: invalid type: integer `5`"), "{e}");
        let e = error("[vm]\na = 1\n");
        assert!(e.contains(":2: vm.a: invalid type: integer `1`"), "{e}");
        assert!(error("[vms.a]\n").contains(":1: unknown key 'vms' at the top level; did you mean 'vm'?"));
        assert!(error("[vm.a]\ncpus = \n").starts_with("/somewhere/demo/tombolo.toml:2: "));
    }

    #[test]
    fn too_little_memory_names_key_and_line() {
        assert_eq!(
            error("[vm.a]\n\nmemory = \"16M\"\n"),
            "/somewhere/demo/tombolo.toml:3: vm.a.memory is 16M; a guest needs at least 128M"
        );
    }

    #[test]
    fn a_limit_below_what_a_guest_is_given_is_refused() {
        assert!(
            error("[vm.a]\nmemory = \"1G\"\nmemory_limit = \"512M\"\n")
                .contains(":3: vm.a.memory_limit is 512M, less than")
        );
        assert!(error("[vm.a]\ncpu_limit = 0.0\n").contains(":2: vm.a.cpu_limit"));
        parse("[vm.a]\ncpu_limit = 1.5\nmemory_limit = \"1G\"\n").unwrap();
    }

    #[test]
    fn a_part_of_the_host_is_named_with_what_it_excludes() {
        let p = parse("reserve = 2\n[vm.a]\ntopology = \"node:1\"\npages = \"2M\"\n").unwrap();
        assert_eq!((p.compose.reserve, p.compose.vm["a"].topology.clone()), (2, Some(Part::Node(1))));
        assert!(
            error("[vm.a]\ntopology = \"all\"\n").contains(":2: vm.a.topology: 'all' is no part of a host")
        );
        assert!(error("[vm.a]\npages = \"1G\"\n").contains(":2: vm.a.pages needs topology"));
        let e = error("[vm.a]\ntopology = \"host\"\nstart = \"fast\"\n");
        assert!(e.contains(":3: vm.a.start: memory that is bound"), "{e}");
    }

    #[test]
    fn a_zone_that_would_break_its_neighbours_is_refused_with_a_size_that_works() {
        assert!(error("[zone.z]\nsize = \"9M\"\n").ends_with("write \"10M\""));
        assert!(error("[zone.z]\nsize = \"1M\"\n").ends_with("write \"8M\""));
        assert!(error("[zone.z]\nsize = \"much\"\n").contains(":2: zone.z.size: 'much' is not a size"));
    }

    #[test]
    fn an_undeclared_zone_is_named_with_the_one_that_was_meant() {
        let e = error("[zone.shared]\nsize=\"8M\"\n[vm.a]\nzones = { shraed = {} }\n");
        assert!(e.contains(":4: ") && e.ends_with("did you mean 'shared'?"), "{e}");
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let p = parse("[zone.z]\nsize=\"8M\"\nbacking=\"./z.img\"\n[vm.a]\ndisk=\"a.qcow2\"\n[vm.b]\nkernel=\"k/vmlinuz\"\n[vm.c]\nkernel=\"6.1\"\n")
            .unwrap();
        assert_eq!(p.compose.vm["a"].disk.as_deref(), Some(Path::new("/somewhere/demo/a.qcow2")));
        assert_eq!(p.compose.vm["b"].kernel.as_deref(), Some("/somewhere/demo/k/vmlinuz"));
        assert_eq!(p.compose.vm["c"].kernel.as_deref(), Some("6.1"));
        assert_eq!(p.compose.zone["z"].backing, Backing::File("/somewhere/demo/./z.img".into()));
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["0", "512M", "3G", "1T", "12K", "1000"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        assert_eq!("2 GiB".parse::<Size>().unwrap(), Size(2 << 30));
        assert!("99999999T".parse::<Size>().is_err());
    }

    #[test]
    fn a_project_survives_the_way_to_the_supervisor() {
        let p = parse("[zone.z]\nsize=\"8M\"\nbacking=\"hugetlb\"\n[vm.a]\nready=\"console:log.n:\"\nzones={z={rights=\"ro\"}}\n").unwrap();
        let json = serde_json::to_string(&p).unwrap();
        assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), p);
    }
}
