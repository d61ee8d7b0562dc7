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
        eprintln!("Error: {e:#}");
        NOT_CHECKED
    })))
}

/// Returns the exit code and what is to be said.
fn checked(args: &Args, json: bool) -> anyhow::Result<(u8, String)> {
    let target = Target::open(&args.zone, args.yes, args.area.as_deref())?;
    let _kept_out = args.yes.then(|| target.require_nobody("fsck")).transpose()?;
    let _alone = args.yes.then(|| target.hold_contents("fsck")).transpose()?;
    if args.yes {
        target.fill_holes()?;
    }
    let live = target.is_in_use()?;
    let area = target.area()?;
    let named = || args.zone.display().to_string();
    let unfinished = if live { 0 } else { fsck::unfinished(&area).with_context(named)? };
    let finished = if live || args.yes { None } else { fsck::finished(&area) };
    let report = {
        let mut meter = Meter::new(json);
        let checked = finished.as_ref().unwrap_or(&area);
        fsck::check(checked, Options { repair: args.yes, live }, &mut |s, d, o| meter.show(s, d, o))
            .with_context(named)?
    };
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
        let then = match (args.yes, finished.is_some()) {
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
