// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands `tombolo files …`. Exit codes: 0 done, 1 failed (a line says what, where and what to do); fsck's are its own.

use std::io::{IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Subcommand;
use serde_json::json;
use tombolo_control::Size;

use crate::fs::{self, Filesystem, Handle, Mkfs};
use crate::room;
use crate::shown::shown;
use crate::sys;
use crate::target::{self, PCI, Target};

mod fsck;
mod grant;
mod import;
mod mount;
mod rsync;
mod snapshot;
mod transfer;
mod watch;

/// The file system that members share
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an empty file system in a zone, or in a file of its own
    Mkfs {
        /// A zone of the running project (tombolo.toml here or above) by name, a zone's file, or a plain file to be filled
        zone: PathBuf,
        /// Name of the FILES area, where the zone has several
        #[arg(long)]
        area: Option<String>,
        /// Overwrite an existing file system
        #[arg(long)]
        force: bool,
        /// Name of the file system, at most 31 bytes
        #[arg(long, default_value = "")]
        label: String,
        /// Make the plain file with this size first (K, M, G)
        #[arg(long, value_parser = Size::bytes_of)]
        size: Option<u64>,
        /// Owner of the root directory
        #[arg(long, default_value_t = 0)]
        uid: u32,
        /// Group of the root directory
        #[arg(long, default_value_t = 0)]
        gid: u32,
        /// Permission bits of the root directory, octal
        #[arg(long, default_value = "755", value_parser = parse_mode)]
        mode: u32,
        /// The zone lies in real persistent memory (a file on a DAX file system): finished operations survive a loss of power
        #[arg(long)]
        persistent: bool,
    },
    /// Show how much of a file system is used
    Df {
        /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system
        zone: PathBuf,
        /// Name of the FILES area, where the zone has several
        #[arg(long)]
        area: Option<String>,
    },
    /// Mount a file system on this host, by the kernel's module where that is loaded, else by FUSE; ends on unmount or SIGTERM
    Mount(mount::Args),
    /// Find damage, and repair it; exit codes: 0 clean, 1 repaired, 4 damage is left, 8 could not check
    Fsck(fsck::Args),
    /// Limit how much a VM's files may take, or confine it to a directory
    Grant(grant::Args),
    /// Show the accounts that members' files count for, with their limits
    Accounts {
        /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system
        zone: PathBuf,
        /// Name of the FILES area, where the zone has several
        #[arg(long)]
        area: Option<String>,
    },
    /// Write a consistent image of a file system in use; its members wait while it is copied
    Snapshot(snapshot::Args),
    /// Check an image and copy it back into an unused zone
    Restore(snapshot::RestoreArgs),
    /// Copy a directory of this host into a zone; run again, it copies the changes
    Import(transfer::ImportArgs),
    /// Copy a directory of a zone to this host; run again, it copies the changes
    Export(transfer::ExportArgs),
    /// Show changes by members as they happen
    Watch(watch::Args),
    /// Show the file system's record of a path, for debugging
    Stat {
        /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system
        zone: PathBuf,
        /// Path in the file system
        #[arg(default_value = "/")]
        path: String,
        /// Name of the FILES area, where the zone has several
        #[arg(long)]
        area: Option<String>,
    },
}

impl Command {
    /// Returns the argument if it names a zone rather than a file; the caller replaces it by the path of the zone's memory.
    pub fn zone_by_name(&mut self) -> Option<&mut PathBuf> {
        let zone = match self {
            // A plain file that is to be made.
            Command::Mkfs { size: Some(_), .. } => return None,
            Command::Mkfs { zone, .. }
            | Command::Df { zone, .. }
            | Command::Stat { zone, .. }
            | Command::Accounts { zone, .. } => zone,
            Command::Grant(args) => &mut args.zone,
            Command::Mount(args) => args.zone_mut(),
            Command::Fsck(args) => &mut args.zone,
            Command::Watch(args) => &mut args.zone,
            Command::Snapshot(args) => &mut args.zone,
            Command::Restore(args) => &mut args.zone,
            Command::Import(args) => &mut args.to.zone,
            Command::Export(args) => &mut args.from.zone,
        };
        let bytes = zone.as_os_str().as_encoded_bytes();
        let is_name = !bytes.contains(&b'/') && !bytes.starts_with(PCI.as_bytes()) && !zone.exists();
        is_name.then_some(zone)
    }

    /// Returns the exit code of a command that can't start.
    pub fn failure(&self) -> ExitCode {
        match self {
            Command::Fsck(_) => ExitCode::from(fsck::NOT_CHECKED),
            _ => ExitCode::FAILURE,
        }
    }
}

/// Shows the progress of a long command on a terminal; wiped when dropped.
struct Meter {
    show: bool,
}

impl Meter {
    fn new(json: bool) -> Meter {
        Meter { show: !json && std::io::stderr().is_terminal() }
    }

    fn show(&mut self, stage: &str, done: u64, of: u64) {
        if self.show {
            draw(format_args!("{stage:<12} {:>3}%", done * 100 / of.max(1)));
        }
    }

    /// Shows progress without a known end.
    fn count(&mut self, stage: &str, done: u64) {
        if self.show {
            draw(format_args!("{stage:<12} {done}"));
        }
    }
}

/// Draws the line anew. A terminal that has gone meanwhile ends no command that goes on without it (nohup(1)).
fn draw(line: std::fmt::Arguments<'_>) {
    let _ = write!(std::io::stderr(), "\r{line}\x1b[K");
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.show {
            draw(format_args!(""));
        }
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o7777).ok_or_else(|| format!("{text:?} is no mode"))
}

/// Explains an errno of opening a file system.
fn open_error(path: &Path, e: rustix::io::Errno) -> anyhow::Error {
    let (at, why) = (
        path.display(),
        match e.raw_os_error() {
            libc::EINVAL => "there is no file system; make one with: tombolo files mkfs",
            libc::EPROTONOSUPPORT => {
                "the file system is of another version than this program knows; use the program that made it"
            }
            libc::EUCLEAN => "the file system is damaged; run: tombolo files fsck",
            _ => "the file system can't be opened",
        },
    );
    anyhow::anyhow!("{at}: {why} ({e})")
}

/// Why a command or a mount ends whose memory is lost.
const LOST: &str =
    "its file was cut short while it was in use, or has a hole for which its file system has no room left";

/// Runs the command.
///
/// # Errors
/// A line for the user.
pub fn run(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    let done = run_one(command, json);
    if tombolo_sigbus::hits() > 0 {
        bail!("nothing that this command said or did holds, since a zone or a file is lost: {LOST}");
    }
    done
}

fn run_one(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Mkfs { zone, area, force, label, size, uid, gid, mode, persistent } => {
            if label.len() > 31 {
                bail!("--label: {} bytes are too long, 31 are the most", label.len());
            }
            mkfs(
                &zone,
                area.as_deref(),
                force,
                size,
                &Mkfs { label, uid, gid, mode, persistent, ..Mkfs::default() },
                json,
            )
        }
        Command::Df { zone, area } => df(&zone, area.as_deref(), json),
        Command::Mount(args) => mount::run(&args, json),
        Command::Fsck(args) => return fsck::run(&args, json),
        Command::Snapshot(args) => snapshot::run(&args, json),
        Command::Restore(args) => snapshot::restore(&args, json),
        Command::Grant(args) => grant::run(&args),
        Command::Accounts { zone, area } => grant::accounts(&zone, area.as_deref(), json),
        Command::Import(args) => transfer::import(&args, json),
        Command::Export(args) => transfer::export(&args, json),
        Command::Watch(args) => watch::run(&args, json),
        Command::Stat { zone, path, area } => stat(&zone, area.as_deref(), &path, json),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn mkfs(
    zone: &Path,
    area: Option<&str>,
    force: bool,
    size: Option<u64>,
    options: &Mkfs,
    json: bool,
) -> anyhow::Result<()> {
    let is_new = size.is_some() && !zone.exists();
    let done = size
        .map_or(Ok(()), |size| grow(zone, size))
        .and_then(|()| fill(zone, area, force, size.is_some(), options));
    if done.is_err() && is_new {
        // The first error is the one to tell, whether or not this removal fails.
        let _ = target::remove_unfilled(zone);
    }
    let s = done?;
    let block = u64::from(sys::TFS_BLOCK);
    let uuid = uuid::Uuid::from_bytes(options.uuid);
    if json {
        println!("{}", json!({"uuid": uuid, "bytes": s.blocks * block, "free": s.blocks_free * block}));
    } else {
        println!(
            "{}: file system {uuid}, {} of {} MiB free",
            zone.display(),
            s.blocks_free >> 8,
            s.blocks >> 8
        );
    }
    Ok(())
}

/// Makes a file of a size for a file system.
fn grow(zone: &Path, size: u64) -> anyhow::Result<()> {
    // It is for the user alone who makes it, as zones are. A pipe in its place is not waited for.
    let mut options = std::fs::File::options();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK);
    let file = options.open(zone);
    let file = file.with_context(|| format!("creating {}", zone.display()))?;
    if file.metadata()?.len() != 0 {
        bail!("{}: exists already; leave --size away to use it as it is", zone.display());
    }
    if let Err(e) = room::take(&file, size) {
        // It is again as it was, unless that fails, too.
        let _ = file.set_len(0);
        return Err(e).with_context(|| format!("{}: growing to {size} bytes", zone.display()));
    }
    Ok(())
}

/// Makes a file system; `grown`: in a file that was made for it.
fn fill(
    zone: &Path,
    area: Option<&str>,
    force: bool,
    grown: bool,
    options: &Mkfs,
) -> anyhow::Result<fs::Statfs> {
    let target = Target::open(zone, true, area)?;
    let _alone = target.hold_contents("mkfs")?;
    target.require_unused("mkfs", force)?;
    let area = target.area()?;
    if area.word(0) == Some(sys::TFS_MAGIC) && !force {
        bail!("{}: has a file system already; --force overwrites it, with all files in it", zone.display());
    }
    if !target.is_zone() && !force && !grown && !starts_empty(&area) {
        bail!("{}: is not empty and holds no file system; --force overwrites it", zone.display());
    }
    target.fill_holes()?;
    crate::snapshot::make(&area, options, || target.retire("mkfs", force))
        .and_then(|()| area.sync().context("syncing"))
        .with_context(|| zone.display().to_string())?;
    let fs = Filesystem::open(area).map_err(|e| open_error(zone, e))?;
    Ok(fs.statfs())
}

fn starts_empty(area: &crate::area::Area) -> bool {
    area.block(0).is_some_and(|block| block.iter().all(|word| *word == 0))
}

fn df(zone: &Path, area: Option<&str>, json: bool) -> anyhow::Result<()> {
    let target = Target::open(zone, false, area)?;
    let fs = Filesystem::open(target.area()?).map_err(|e| open_error(zone, e))?;
    let s = fs.statfs();
    let block = u64::from(sys::TFS_BLOCK);
    let used = s.blocks.saturating_sub(s.blocks_free);
    let (deferred, holders) = fs.deferred();
    if json {
        println!(
            "{}",
            json!({"bytes": s.blocks * block, "used": used * block, "free": s.blocks_free * block,
                   "inodes": s.inodes, "inodes_free": s.inodes_free, "deferred": deferred * block, "deferred_members": holders})
        );
    } else {
        let percent = (used * 100).div_ceil(s.blocks.max(1));
        println!("{:<32} {:>10} {:>10} {:>10} {:>4} {:>10}", "zone", "MiB", "used", "free", "use%", "inodes");
        let inodes = s.inodes.saturating_sub(s.inodes_free);
        println!(
            "{:<32} {:>10} {:>10} {:>10} {:>3}% {:>10}",
            zone.display(),
            s.blocks >> 8,
            used >> 8,
            s.blocks_free >> 8,
            percent,
            inodes
        );
        if deferred > 0 {
            println!(
                "{} KiB of it are unused; their freeing waits for members {holders:?}, which may still map them",
                (deferred * block) >> 10
            );
        }
    }
    Ok(())
}

fn stat(zone: &Path, area: Option<&str>, path: &str, json: bool) -> anyhow::Result<()> {
    let target = Target::open(zone, false, area)?;
    let fs = Filesystem::open(target.area()?).map_err(|e| open_error(zone, e))?;
    let mut ino = Handle::from(fs::ROOT);
    for name in path.split('/').filter(|n| !n.is_empty()) {
        ino = fs.lookup(ino, name.as_bytes()).with_context(|| format!("{path}: at {name:?}"))?.0;
    }
    let a = fs.getattr(ino).with_context(|| format!("{path}: inode {}", ino.ino))?;
    let xattrs: Vec<String> = fs
        .xattr_list(ino)
        .unwrap_or_default()
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect();
    let mut runs = Vec::new();
    if a.mode & libc::S_IFMT == libc::S_IFREG {
        let end = a.size.div_ceil(u64::from(sys::TFS_BLOCK));
        let mut at = 0;
        while at < end && runs.len() < 10_000 {
            let run = fs.map(ino, at, end - at).with_context(|| format!("{path}: block {at}"))?;
            if run.block != 0 {
                runs.push((at, run.block, run.count));
            }
            at += run.count.max(1);
        }
    }
    if json {
        println!(
            "{}",
            json!({"ino": a.ino, "generation": a.generation, "mode": format!("{:o}", a.mode), "uid": a.uid, "gid": a.gid,
                   "nlink": a.nlink, "size": a.size, "blocks": a.blocks, "version": a.version, "rdev": a.rdev,
                   "atime_ns": a.atime, "mtime_ns": a.mtime, "ctime_ns": a.ctime, "btime_ns": a.btime,
                   "xattrs": xattrs, "runs": runs})
        );
    } else {
        println!("inode {} generation {} version {}", a.ino, a.generation, a.version);
        println!("mode {:o} uid {} gid {} links {}", a.mode, a.uid, a.gid, a.nlink);
        println!("size {} blocks {} extended attributes: {}", a.size, a.blocks, shown(&xattrs.join(" ")));
        for (at, block, count) in runs {
            println!("  file block {at}: block {block}, {count} long");
        }
    }
    Ok(())
}
