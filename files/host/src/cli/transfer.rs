// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files import` and `export`: make a directory of a zone equal to one of the host, or the reverse. The zone is mounted meanwhile.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::mirror::{self, Done};

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
    /// The directory to copy
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
    if !args.from.is_dir() {
        bail!("{} is no directory that can be copied", args.from.display());
    }
    let mounted = Mounted::new(&args.to.zone, args.more.area.as_deref(), false)?;
    let to = mounted.directory().join(&args.to.path);
    std::fs::create_dir_all(&to).with_context(|| format!("making {} in the zone", args.to.path.display()))?;
    let done = copy(&args.from, &to, args.more.delete, json);
    finish(mounted, done, json)
}

/// Runs `export`.
pub fn export(args: &ExportArgs, json: bool) -> anyhow::Result<()> {
    let mounted = Mounted::new(&args.from.zone, args.more.area.as_deref(), true)?;
    let from = mounted.directory().join(&args.from.path);
    if !from.is_dir() {
        bail!("{}: /{} is no directory there", args.from.zone.display(), args.from.path.display());
    }
    std::fs::create_dir_all(&args.to).with_context(|| format!("making {}", args.to.display()))?;
    let done = copy(&from, &args.to, args.more.delete, json);
    finish(mounted, done, json)
}

fn copy(from: &Path, to: &Path, delete: bool, json: bool) -> anyhow::Result<Done> {
    let mut meter = super::Meter::new(json);
    mirror::mirror(from, to, delete, &mut |done| meter.count("copied", done.copied))
}

fn finish(mounted: Mounted, done: anyhow::Result<Done>, json: bool) -> anyhow::Result<()> {
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
    }
    Ok(())
}

/// A mount in a private directory, by a child process.
struct Mounted {
    folder: Option<PathBuf>,
    child: Child,
}

impl Mounted {
    fn new(zone: &Path, area: Option<&str>, read_only: bool) -> anyhow::Result<Mounted> {
        let own = std::process::id();
        let folder = std::env::temp_dir().join(format!(".tombolo-copy-{own}"));
        std::fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
        let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
        // Set-id bits and devices are copied, not used.
        command.args([
            "files",
            "mount",
            "--foreground",
            "--suid",
            "--dev",
            "--member",
            &format!("copy-{own}"),
        ]);
        command.args(read_only.then_some("--read-only"));
        command.args(area.map(|area| format!("--area={area}"))).arg("--").arg(zone).arg(&folder);
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let child = spawned.context("starting tombolo files mount");
        let mut mounted = Mounted {
            child: match child {
                Ok(child) => child,
                Err(e) => {
                    std::fs::remove_dir(&folder)?;
                    return Err(e);
                }
            },
            folder: Some(folder),
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

    fn directory(&self) -> &Path {
        self.folder.as_deref().unwrap_or(Path::new(""))
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
        std::fs::remove_dir(&folder).with_context(|| format!("removing {}", folder.display()))?;
        if !status.success() {
            bail!("the mount ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            eprintln!("tombolo: {e:#}");
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
