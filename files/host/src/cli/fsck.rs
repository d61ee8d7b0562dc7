// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files fsck`, with the exit codes of other fsck programs: 0 clean, 1 repaired, 4 damage is left, 8 could not check.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::json;

use super::Meter;
use crate::fsck::{self, Options, Severity};
use crate::log;
use crate::shown::shown;
use crate::target::Target;

/// The exit code when nothing was checked.
pub const NOT_CHECKED: u8 = 8;

/// Arguments of `tombolo files fsck`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system
    pub zone: PathBuf,
    /// Only check, with the zone opened read-only (the default without -y)
    #[arg(short = 'n', conflicts_with = "yes")]
    pub no: bool,
    /// Repair all damage; no member may use the zone meanwhile
    #[arg(short = 'y')]
    pub yes: bool,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    pub area: Option<String>,
    /// Also report harmless findings (leftovers, statistics)
    #[arg(long, short)]
    pub verbose: bool,
}

/// Runs the command.
pub fn run(args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let told = checked(args, json).and_then(|(code, said)| {
        let mut output = io::stdout().lock();
        match output.write_all(said.as_bytes()).and_then(|()| output.flush()) {
            // Who reads no further has the code still: 'fsck | head' finds no damaged file system clean.
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
                Err(anyhow::Error::new(e).context("the output can't be written"))
            }
            _ => Ok(code),
        }
    });
    Ok(ExitCode::from(told.unwrap_or_else(|e| {
        log::say(&format!("{e:#}"));
        NOT_CHECKED
    })))
}

/// Checks, and tells `check` whether members use the file system. What it finds where nobody does may be what a member does that has come since, so then it
/// checks once more as in use. Returns what it told at last, and the result.
fn told_apart<T>(
    target: &Target,
    mut check: impl FnMut(bool) -> anyhow::Result<(bool, T)>,
) -> anyhow::Result<(bool, T)> {
    let before = target.epochs()?;
    let live = target.is_in_use()?;
    let (is_damaged, checked) = check(live)?;
    if live || !is_damaged || target.epochs()? == before {
        return Ok((live, checked));
    }
    Ok((true, check(true)?.1))
}

/// Returns the exit code and what is to be said.
fn checked(args: &Args, json: bool) -> anyhow::Result<(u8, String)> {
    let target = Target::open(&args.zone, args.yes, args.area.as_deref())?;
    let _kept_out = args.yes.then(|| target.require_nobody("fsck")).transpose()?;
    let _alone = args.yes.then(|| target.hold_contents("fsck")).transpose()?;
    if args.yes {
        target.fill_holes()?;
    }
    let area = target.area()?;
    let named = || args.zone.display().to_string();
    let (live, (unfinished, is_finished, report)) = told_apart(&target, |live| {
        let unfinished = if live { 0 } else { fsck::unfinished(&area).with_context(named)? };
        let finished = if live || args.yes { None } else { fsck::finished(&area) };
        let mut meter = Meter::new(json);
        let checked = finished.as_ref().unwrap_or(&area);
        let options = Options { repair: args.yes, live };
        let report = fsck::check(checked, options, &mut |s, d, o| meter.show(s, d, o)).with_context(named)?;
        // Nobody comes during a repair.
        Ok((report.damage > 0 && !args.yes, (unfinished, finished.is_some(), report)))
    })?;
    if args.yes {
        area.sync()?;
    }
    let code = match (report.damage, report.left) {
        (0, _) => 0,
        (_, 0) => 1,
        _ => 4,
    };
    if json {
        let said = json!({"zone": args.zone, "live": live, "unfinished": unfinished, "exit": code, "report": report});
        return Ok((code, format!("{said}\n")));
    }
    let mut said = String::new();
    for problem in report.problems.iter().filter(|p| args.verbose || p.severity != Severity::Note) {
        let done = match (problem.fixed, problem.severity) {
            (true, _) => " (repaired)",
            (false, Severity::Note) => "",
            _ => " (not repaired)",
        };
        writeln!(said, "{}: {}{done}", args.zone.display(), shown(&problem.text))?;
    }
    if unfinished > 0 {
        let then = match (args.yes, is_finished) {
            (true, _) => "",
            (_, true) => " by the next mount; checked as it will be then",
            (_, false) => {
                " by the next mount; there is no memory for a copy in which that is done, so they are among the damage"
            }
        };
        writeln!(
            said,
            "{}: operations that members left unfinished when they died: {unfinished}, completed or undone{then}",
            args.zone.display()
        )?;
    }
    let state = match code {
        0 if live => "clean as far as can be told while members use it",
        0 => "clean",
        1 => "repaired",
        _ if args.yes => "damage is left that can't be repaired",
        _ => "damaged; repair with: tombolo files fsck -y",
    };
    writeln!(
        said,
        "{}: {state}: {} inodes, {} of them directories, {} of {} MiB used",
        args.zone.display(),
        report.inodes,
        report.directories,
        report.blocks_used >> 8,
        report.blocks >> 8
    )?;
    Ok((code, said))
}

#[cfg(test)]
mod tests {
    use tombolo_zone::{Backing, Zone, ZoneConfig};

    use super::*;
    use crate::fs::Mkfs;
    use crate::target::Name;

    #[test]
    fn what_a_member_does_that_comes_during_a_check_is_no_damage() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("zone");
        let config = ZoneConfig::new("zone", 16 << 20).backing(Backing::File(path.clone()));
        let _owner = Zone::create(&config)?;
        crate::fs::mkfs(&Target::open(&path, true, None)?.area()?, &Mkfs::default())?;
        let target = Target::open(&path, false, None)?;
        // Nobody came: it is.
        assert_eq!(told_apart(&target, |live| Ok((true, live)))?, (false, false));
        for leaves in [true, false] {
            let mut stays = None;
            let told = told_apart(&target, |live| {
                if !live {
                    let other = Target::open(&path, true, None)?;
                    let (_, member) = other.join(Name::Process("mount"))?;
                    let member = member.context("a zone")?;
                    if leaves { member.leave()? } else { stays = Some(member) }
                }
                Ok((true, live))
            })?;
            assert_eq!(told, (true, true), "leaves: {leaves}");
            drop(stays);
        }
        Ok(())
    }
}
