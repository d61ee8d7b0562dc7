// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files watch`: shows changes by members as they happen.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::json;

use super::open_error;
use crate::change::Change;
use crate::fs::Filesystem;
use crate::fuse::session;
use crate::log;
use crate::shown::shown;
use crate::target::{Joined, Name, Target};

/// Interval at which a member without a doorbell polls for changes.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
const NAMES: [(u32, &str); 7] = [
    (libc::IN_CREATE, "create"),
    (libc::IN_DELETE, "delete"),
    (libc::IN_MOVED_FROM, "moved-from"),
    (libc::IN_MOVED_TO, "moved-to"),
    (libc::IN_MODIFY, "modify"),
    (libc::IN_ATTRIB, "attrib"),
    (libc::IN_CLOSE_WRITE, "close-write"),
];

/// Arguments of `tombolo files watch`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A zone of the running project (tombolo.toml here or above) by name, or a zone's file
    pub(super) zone: PathBuf,
    /// Only changes at or below this path of the file system
    #[arg(default_value = "/")]
    path: String,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
}

/// Runs the command until a signal ends it.
pub fn run(args: &Args, json: bool) -> anyhow::Result<()> {
    let signals = session::end_signals().context("taking over signals")?;
    let target = Target::open(&args.zone, true, args.area.as_deref())?;
    let (area, joined) = target.join(Name::Process("watch"))?;
    let joined = joined.with_context(|| {
        format!(
            "{}: a file system outside a zone has one user at a time, so there is no other member to watch",
            args.zone.display()
        )
    })?;
    let mut fs = Filesystem::open(area).map_err(|e| open_error(&args.zone, e))?;
    fs.ring_by(joined.ringer());
    let watched = watch(args, json, &fs, &joined, &signals);
    drop(fs);
    joined.leave().context("leaving the zone")?;
    watched
}

fn watch(
    args: &Args,
    json: bool,
    fs: &Filesystem,
    joined: &Joined,
    signals: &std::fs::File,
) -> anyhow::Result<()> {
    let below = args.path.trim_matches('/');
    let mut listener = fs.listen().context("listening for changes")?;
    let mut out = std::io::stdout().lock();
    if !json {
        writeln!(out, "{:<8} {:<12} {:<4} path", "member", "what", "type")?;
    }
    out.flush()?;
    loop {
        joined.take_pending()?;
        loop {
            match listener.next_change() {
                Ok(Some(change)) => show(&mut out, json, fs, joined, &change, below)?,
                Ok(None) => break,
                Err(Errno::OVERFLOW) => log::say("changes came faster than they were read; some are missing"),
                Err(e) => return Err(e).context("reading changes"),
            }
        }
        out.flush()?;
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend(joined.rung().map(|rung| PollFd::new(rung, PollFlags::IN)));
        let timeout = (!joined.is_served()).then_some(&LOOK);
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).context("waiting for changes"),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
    }
}

fn show(
    out: &mut impl Write,
    json: bool,
    fs: &Filesystem,
    joined: &Joined,
    change: &Change,
    below: &str,
) -> anyhow::Result<()> {
    let path = match &change.place {
        Some((dir, name)) => format!("{}/{}", path_of(fs, *dir), String::from_utf8_lossy(name)),
        None => format!("<inode {}>", change.ino),
    };
    let inside = path.trim_matches('/').strip_prefix(below);
    if !inside.is_some_and(|rest| below.is_empty() || rest.is_empty() || rest.starts_with('/')) {
        return Ok(());
    }
    let id = tombolo_zone::MemberId::new(change.member);
    let member = id.and_then(|id| joined.zone().member(id).ok()).map_or_else(String::new, |m| m.name);
    let kind = if change.mask & libc::IN_ISDIR != 0 { "dir" } else { "file" };
    for (_, what) in NAMES.iter().filter(|(bit, _)| change.mask & bit != 0) {
        if json {
            writeln!(
                out,
                "{}",
                json!({"member": member, "what": what, "type": kind, "path": path, "inode": change.ino,
                       "cookie": change.cookie})
            )?;
        } else {
            writeln!(out, "{:<8} {what:<12} {kind:<4} {}", shown(&member), shown(&path))?;
        }
    }
    Ok(())
}

/// Returns the path of a directory, or its number if it was removed meanwhile.
fn path_of(fs: &Filesystem, dir: u64) -> String {
    let (mut at, mut names) = (dir, Vec::new());
    while at != fs.root().ino && names.len() < 1000 {
        let Ok(parent) = fs.parent(at) else { break };
        let mut found = None;
        let read = fs.readdir(parent, 0, |name, ino, _, _| {
            if ino == at {
                found = Some(String::from_utf8_lossy(name).into_owned());
            }
            found.is_none()
        });
        match (read, found) {
            (Ok(_), Some(name)) => names.push(name),
            _ => {
                names.push(format!("<inode {at}>"));
                break;
            }
        }
        at = parent;
    }
    names.iter().rev().fold(String::new(), |path, name| path + "/" + name)
}
