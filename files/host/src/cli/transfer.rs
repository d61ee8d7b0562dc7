// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files import` and `export`: make a directory of a zone equal to one of the host, or the reverse. The zone is mounted meanwhile, and rsync copies.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::Meter;
use super::import::image::{self, Source};
use super::import::stage::Stage;
use super::import::unpack::Unpacker;
use super::rsync::{self, Done, Job};
use crate::fuse::session;
use crate::log;
use crate::shown::shown_path;

/// ZONE[:PATH].
#[derive(Clone, Debug)]
pub struct Place {
    /// The zone, by name or file.
    pub(super) zone: PathBuf,
    /// The directory in it.
    path: PathBuf,
}

/// Reads ZONE[:PATH]; a file whose name has a colon is a zone without a path.
pub(super) fn parse_place(text: &str) -> Result<Place, String> {
    let whole = || Place { zone: text.into(), path: PathBuf::new() };
    if Path::new(text).exists() {
        return Ok(whole());
    }
    let Some((zone, path)) = text.rsplit_once(':') else { return Ok(whole()) };
    let path = Path::new(path.trim_start_matches('/'));
    if zone.is_empty() || path.components().any(|c| !matches!(c, std::path::Component::Normal(_))) {
        return Err(format!("{text:?} is not ZONE or ZONE:PATH, such as shared:/data"));
    }
    Ok(Place { zone: zone.into(), path: path.to_owned() })
}

/// Arguments of `tombolo files import`.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The directory to copy; or a tar archive (plain, gzip or zstd), or the folder of an OCI image (oci-layout), to unpack into a new directory
    from: PathBuf,
    /// The zone and the directory in it, which is made if it is missing
    #[arg(value_name = "ZONE[:PATH]", value_parser = parse_place)]
    pub(super) to: Place,
    #[command(flatten)]
    more: More,
}

/// Arguments of `tombolo files export`.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// The zone and the directory in it to copy
    #[arg(value_name = "ZONE[:PATH]", value_parser = parse_place)]
    pub(super) from: Place,
    /// The directory, which is made if it is missing
    to: PathBuf,
    /// Keep set-id bits and capabilities of files; a user of this host who runs such a file gets its rights
    #[arg(long)]
    suid: bool,
    /// Copy device nodes
    #[arg(long)]
    dev: bool,
    #[command(flatten)]
    more: More,
}

#[derive(Debug, clap::Args)]
struct More {
    /// Remove entries that the source does not have
    #[arg(long)]
    delete: bool,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
}

/// Runs `import`.
pub fn import(args: &ImportArgs, json: bool) -> anyhow::Result<()> {
    if let Some(source) = image::source(&args.from)? {
        return unpack(args, &source, json);
    }
    rsync::check_programs()?;
    let folder = folder(&args.from)?;
    let mounted = Mounted::new(&args.to.zone, args.more.area.as_deref(), false)?;
    let point = mounted.point();
    directory(&point, &args.to, true)?;
    let (mount, inside, delete) = (&*point, &*args.to.path, args.more.delete);
    let job = Job { mount, inside, folder: &folder, export: false, delete, suid: true, devices: true };
    let done = job.run(json);
    finish(mounted, done, "", json)
}

/// Unpacks an archive or an image into a new directory, which is there as a whole or not at all.
fn unpack(args: &ImportArgs, source: &Source, json: bool) -> anyhow::Result<()> {
    let to = &args.to;
    if args.more.delete {
        bail!(
            "--delete: an archive is unpacked into a new directory: remove the old one on a mount of the zone"
        );
    }
    let (Some(name), Some(above)) = (to.path.file_name(), to.path.parent()) else {
        bail!(
            "{}: an archive is unpacked into a new directory: name it, such as {0}:/image",
            to.zone.display()
        );
    };
    let mounted = Mounted::new(&to.zone, args.more.area.as_deref(), false)?;
    let above = Place { zone: to.zone.clone(), path: above.to_owned() };
    let folder = directory(&mounted.point(), &above, true)?;
    let exists = || {
        let (zone, path) = (to.zone.display(), shown_path(&to.path));
        anyhow::anyhow!("{zone}:/{path} is there already: an archive is unpacked into a new directory")
    };
    if rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
        return Err(exists());
    }
    let stage = Stage::new(&folder, name).context("making a directory for what is unpacked")?;
    let done = unpack_into(stage.root()?, source, json).and_then(|done| match stage.publish(name) {
        Err(Errno::EXIST) => Err(exists()),
        Err(e) => Err(e).context("naming what was unpacked"),
        Ok(()) => Ok(done),
    });
    let removed = stage.remove().context("removing the directory in which it was unpacked");
    let done = done.and_then(|done| removed.map(|()| done));
    drop(folder);
    finish(mounted, done, "", json)
}

fn unpack_into(root: OwnedFd, source: &Source, json: bool) -> anyhow::Result<Done> {
    rustix::fs::fchmod(&root, Mode::from_raw_mode(0o755))?;
    let mut unpacker = Unpacker::new(root, Meter::new(json));
    let (archives, are_layers) = match source {
        Source::Tar(path) => (std::slice::from_ref(path), false),
        Source::Layers(paths) => (&**paths, true),
    };
    for path in archives {
        let unpacked = image::plain(path).and_then(|from| unpacker.archive(from, are_layers));
        unpacked.with_context(|| path.display().to_string())?;
    }
    Ok(unpacker.done)
}

/// Runs `export`.
pub fn export(args: &ExportArgs, json: bool) -> anyhow::Result<()> {
    rsync::check_programs()?;
    let mounted = Mounted::new(&args.from.zone, args.more.area.as_deref(), true)?;
    let point = mounted.point();
    directory(&point, &args.from, false)?;
    std::fs::create_dir_all(&args.to).with_context(|| format!("making {}", args.to.display()))?;
    let folder = folder(&args.to)?;
    let (mount, inside, delete) = (&*point, &*args.from.path, args.more.delete);
    let (suid, devices) = (args.suid, args.dev);
    let done = Job { mount, inside, folder: &folder, export: true, delete, suid, devices }.run(json);
    let remedy = if devices { "" } else { "; --dev copies them" };
    finish(mounted, done.and_then(|done| sync(&folder).map(|()| done)), remedy, json)
}

/// Returns the path of a directory that the user of this process has given, without links.
fn folder(path: &Path) -> anyhow::Result<PathBuf> {
    let found = path.canonicalize().and_then(|path| std::fs::read_dir(&path).map(|_| path));
    found.with_context(|| format!("no directory that can be copied: {}", path.display()))
}

/// Writes everything on the file system of a folder to its disk.
fn sync(folder: &Path) -> anyhow::Result<()> {
    let open = rustix::fs::openat(CWD, folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    open.and_then(rustix::fs::syncfs).with_context(|| format!("syncing {}", folder.display()))
}

/// Opens a directory of a mounted zone; `make`: what is missing of it is made. A part of its path that is a link is refused.
fn directory(mount: &Path, place: &Place, make: bool) -> anyhow::Result<OwnedFd> {
    const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::PATH).union(OFlags::CLOEXEC);
    let below = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let name = || format!("{}:/{}", place.zone.display(), shown_path(&place.path));
    let mut at = rustix::fs::openat(CWD, mount, DIRECTORY, Mode::empty()).with_context(name)?;
    for part in &place.path {
        let open = || rustix::fs::openat2(at.as_fd(), part, DIRECTORY, Mode::empty(), below);
        let opened = match open() {
            Err(Errno::NOENT) if make => match rustix::fs::mkdirat(&at, part, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => open(),
                Err(e) => Err(e),
            },
            opened => opened,
        };
        let part = shown_path(Path::new(part));
        at = match opened {
            Err(Errno::LOOP | Errno::NOTDIR) => {
                bail!("{}: '{part}' is a link or a file, not a directory", name())
            }
            opened => opened.with_context(|| format!("{}: '{part}'", name()))?,
        };
    }
    Ok(at)
}

fn finish(mounted: Mounted, done: anyhow::Result<Done>, remedy: &str, json: bool) -> anyhow::Result<()> {
    let ended = mounted.end();
    let done = done?;
    ended?;
    if json {
        println!("{}", serde_json::to_string(&done)?);
    } else {
        println!(
            "{} copied ({} MiB), {} unchanged, {} removed",
            done.copied,
            done.bytes >> 20,
            done.same,
            done.removed
        );
        if done.devices_left_out > 0 {
            log::say(&format!("{} device nodes were left out{remedy}", done.devices_left_out));
        }
    }
    if done.failed > 0 {
        bail!("all else is copied; failures: {} (see the lines above; /zone is the zone)", done.failed);
    }
    Ok(())
}

/// A mount below a directory that only this user can enter, by a child process.
struct Mounted {
    /// The directory; the mount is `zone` in it.
    folder: Option<PathBuf>,
    /// The directory's lock.
    _alive: OwnedFd,
    child: Child,
}

/// Begins the names of the directories; the rest is a UUID.
const FOLDER: &str = ".tombolo-copy-";

/// Opens a copy's directory and takes its lock, which a copy has as long as it lives.
fn lock_folder(folder: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
    rustix::fs::flock(&open, FlockOperation::NonBlockingLockExclusive)?;
    Ok(open)
}

/// Makes a directory that only this user can enter. It counts as a dead copy's once the lock returned is closed.
fn private_folder(temporary: &Path) -> anyhow::Result<(PathBuf, OwnedFd)> {
    loop {
        let folder = temporary.join(format!("{FOLDER}{}", uuid::Uuid::new_v4()));
        DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("making {}", folder.display()))?;
        match lock_folder(&folder) {
            Ok(lock) if rustix::fs::fstat(&lock)?.st_nlink > 0 => return Ok((folder, lock)),
            // Another copy took it for a dead one's before it was locked.
            Ok(_) | Err(Errno::WOULDBLOCK | Errno::NOENT) => {}
            Err(e) => {
                // The first error is the one to tell, whether or not this removal fails.
                let _ = std::fs::remove_dir(&folder);
                return Err(e).with_context(|| format!("locking {}", folder.display()));
            }
        }
    }
}

/// Removes what this user's copies left that were killed: their directories, and mounts whose processes were killed, too. What can't be removed is left to the
/// next copy.
fn sweep(temporary: &Path) {
    let own = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(temporary).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(FOLDER.as_bytes()) {
            continue;
        }
        let Ok(lock) = lock_folder(&entry.path()) else { continue };
        if rustix::fs::fstat(&lock).is_ok_and(|about| about.st_uid == own) {
            let _ = remove(&entry.path());
        }
    }
}

impl Mounted {
    fn new(zone: &Path, area: Option<&str>, read_only: bool) -> anyhow::Result<Mounted> {
        let own = std::process::id();
        let temporary = std::env::temp_dir();
        sweep(&temporary);
        let (folder, alive) = private_folder(&temporary)?;
        let point = folder.join("zone");
        if let Err(e) = DirBuilder::new().mode(0o700).create(&point) {
            // The first error is the one to tell, whether or not this removal fails.
            let _ = std::fs::remove_dir(&folder);
            return Err(e).with_context(|| format!("making {}", point.display()));
        }
        let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
        command.args([
            "files",
            "mount",
            "--foreground",
            "--backend",
            "fuse",
            "--member",
            &format!("copy-{own}"),
        ]);
        command.args(read_only.then_some("--read-only"));
        command.args(area.map(|area| format!("--area={area}"))).arg("--").arg(zone).arg(&point);
        // A copy that is killed leaves no mount.
        let end_with_copy = move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
            if parent == Some(own) { Ok(()) } else { Err(std::io::ErrorKind::BrokenPipe.into()) }
        };
        // SAFETY: makes system calls only, and allocates nothing.
        unsafe { command.pre_exec(end_with_copy) };
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let child = spawned.context("starting tombolo files mount");
        let mut mounted = Mounted {
            child: match child {
                Ok(child) => child,
                Err(e) => {
                    remove(&folder)?;
                    return Err(e);
                }
            },
            folder: Some(folder),
            _alive: alive,
        };
        let mut line = String::new();
        if let Some(out) = mounted.child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        if line.is_empty() {
            mounted.child.wait()?;
            bail!("{}: the zone could not be mounted on this host (see the line above)", zone.display());
        }
        Ok(mounted)
    }

    /// Where the zone is mounted.
    fn point(&self) -> PathBuf {
        self.folder.as_deref().unwrap_or(Path::new("")).join("zone")
    }

    /// Unmounts. On return all data is in the zone, and the membership has ended.
    fn end(mut self) -> anyhow::Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        let Some(folder) = self.folder.take() else { return Ok(()) };
        if self.child.try_wait()?.is_none() {
            let pid = Pid::from_child(&self.child);
            kill_process(pid, Signal::TERM).context("ending the mount")?;
        }
        let status = self.child.wait().context("waiting for the mount's end")?;
        remove(&folder)?;
        if !status.success() {
            bail!("the mount ended with {status}");
        }
        Ok(())
    }
}

/// Removes the directory of a mount and its mount point, and what is left of a mount whose process was killed.
fn remove(folder: &Path) -> anyhow::Result<()> {
    let point = folder.join("zone");
    let removed = match std::fs::remove_dir(&point) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {
            session::detach(&point, None).and_then(|_| std::fs::remove_dir(&point))
        }
        done => done,
    };
    removed.with_context(|| format!("removing {}", point.display()))?;
    std::fs::remove_dir(folder).with_context(|| format!("removing {}", folder.display()))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            log::say(&format!("{e:#}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_zone_and_a_path_below_its_root() {
        let place = parse_place("shared:/a/b").unwrap();
        assert_eq!((place.zone.to_str(), place.path.to_str()), (Some("shared"), Some("a/b")));
        let place = parse_place("shared").unwrap();
        assert_eq!((place.zone.to_str(), place.path.to_str()), (Some("shared"), Some("")));
        for wrong in ["shared:../x", ":x", "shared:a/../../b"] {
            assert!(parse_place(wrong).unwrap_err().contains("ZONE:PATH"), "{wrong}");
        }
    }
}
