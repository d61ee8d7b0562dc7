// SPDX-License-Identifier: Apache-2.0 OR MIT
//! fsck: reads the format on its own, without the core, and compares what must agree. Repairs on request.
//!
//! A pass goes through the stages below. Each value is copied once and checked. A block is claimed before its references are followed,
//! and only once, so a pass visits at most as many blocks as the area has. With repair, a finding is fixed where it is found: bad
//! references are cut, counters set, indexes dropped for the core to rebuild. Inodes that lost their names then go to /lost+found, and
//! passes repeat until one finds nothing.
//!
//! - [`raw`]: fields of super block, inodes and member areas.
//! - [`trees`]: claims blocks of radix trees.
//! - [`table`]: the inode table as a whole.
//! - [`inodes`]: each inode by itself.
//! - [`dirs`]: entries, names, indexes.
//! - [`links`]: reachability, link counts, the block map, counters.
//! - [`repair`]: repairs through the core: recovery, /lost+found.

mod accounts;
mod dirs;
mod inodes;
mod links;
mod raw;
mod repair;
mod table;
mod trees;

use std::collections::HashMap;

use serde::Serialize;

use crate::area::Area;

/// The options of a check.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Fix findings. The area must be writable, and no other process may use it.
    pub repair: bool,
    /// Members use the file system meanwhile: unfinished work is no damage.
    pub live: bool,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A harmless leftover or statistic.
    Note,
    /// Damage that can be repaired.
    Damage,
    /// Damage that repair can only cut away: contents are lost.
    Loss,
}

/// One finding.
#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// The kind, for scripts.
    pub code: &'static str,
    pub text: String,
    pub severity: Severity,
    /// The finding was fixed.
    pub fixed: bool,
}

/// The result of a check.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Findings, the first [`KEEP`] of them.
    pub problems: Vec<Problem>,
    /// All findings that are damage or loss.
    pub damage: u64,
    /// Of these, those that are not fixed.
    pub left: u64,
    /// Live inodes.
    pub inodes: u64,
    /// Directories among them.
    pub directories: u64,
    /// Blocks that are referred to.
    pub blocks_used: u64,
    /// Blocks that files can have.
    pub blocks: u64,
    /// Passes made.
    pub passes: u32,
}

/// What was found, and repaired, is not in the file then ([`Area::is_lost`]).
pub(crate) const LOST: &str = "a page of the file is missing: it was cut short meanwhile, or its file system is full or does not answer";

/// Findings that a report keeps in full.
pub const KEEP: usize = 10_000;
const MAX_PASSES: u32 = 8;

impl Report {
    /// Returns whether there are only notes.
    pub fn is_clean(&self) -> bool {
        self.damage == 0
    }
}

/// Checks an unused file system without repairing it. An error names the damage in a line.
pub fn expect_clean(area: &Area, progress: Progress<'_>) -> Result<Report, String> {
    let report = check(area, Options::default(), progress).map_err(|e| e.0)?;
    if report.is_clean() {
        return Ok(report);
    }
    let bad = report.problems.iter().filter(|p| p.severity != Severity::Note).take(10);
    let bad: Vec<&str> = bad.map(|p| p.text.as_str()).collect();
    Err(format!("fsck: {} findings: {}", report.damage, bad.join("; ")))
}

/// The reason why nothing could be checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable(pub String);

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreadable {}

/// Finds out whether the area has a file system whose places this program knows.
///
/// # Errors
/// It has none, or one of another version.
pub(crate) fn expect_known(area: &Area) -> Result<(), Unreadable> {
    raw::Layout::read(area).map(drop)
}

/// Facts about one inode from the stages so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Known {
    pub(crate) live: bool,
    pub(crate) mode: u32,
    pub(crate) nlink: u64,
    /// Names that refer to it, "." and ".." not counted.
    pub(crate) names: u64,
    /// Directories: the first directory that names it.
    pub(crate) named_by: u64,
    /// Directories below it.
    pub(crate) subdirs: u64,
    /// Blocks of its trees, without a directory's index.
    pub(crate) blocks: u64,
}

/// Reports progress: stage, done, of.
pub type Progress<'a> = &'a mut dyn FnMut(&str, u64, u64);

pub(crate) struct Checker<'a> {
    pub(crate) area: &'a Area,
    pub(crate) options: Options,
    pub(crate) layout: raw::Layout,
    pub(crate) report: Report,
    /// Bit per block: it is referred to.
    pub(crate) claimed: Vec<u64>,
    /// By file block of the inode table: the block; 0: missing.
    pub(crate) table: Vec<u64>,
    pub(crate) inodes: Vec<Known>,
    /// Directories in the order of their numbers.
    pub(crate) dirs: Vec<u64>,
    pub(crate) lost: Vec<u64>,
    pub(crate) changed: bool,
    /// Directory of each directory, from the entries.
    pub(crate) parents: HashMap<u64, u64>,
}

impl<'a> Checker<'a> {
    fn new(area: &'a Area, options: Options) -> Result<Checker<'a>, Unreadable> {
        let layout = raw::Layout::read(area)?;
        let words =
            usize::try_from(layout.blocks.div_ceil(64)).map_err(|_| Unreadable("too large".into()))?;
        Ok(Checker {
            area,
            options,
            layout,
            report: Report { blocks: layout.blocks - layout.data_start, ..Report::default() },
            claimed: vec![0; words],
            table: Vec::new(),
            inodes: Vec::new(),
            dirs: Vec::new(),
            lost: Vec::new(),
            changed: false,
            parents: HashMap::new(),
        })
    }

    /// Adds a finding; true: the caller fixes it.
    pub(crate) fn found(&mut self, severity: Severity, code: &'static str, text: String) -> bool {
        let fix = self.options.repair;
        if severity != Severity::Note {
            self.report.damage += 1;
            self.report.left += u64::from(!fix);
        }
        if self.report.problems.len() < KEEP {
            self.report.problems.push(Problem { code, text, severity, fixed: fix });
        }
        self.changed |= fix && severity != Severity::Note;
        fix
    }

    pub(crate) fn damage(&mut self, code: &'static str, text: String) -> bool {
        self.found(Severity::Damage, code, text)
    }

    pub(crate) fn loss(&mut self, code: &'static str, text: String) -> bool {
        self.found(Severity::Loss, code, text)
    }

    pub(crate) fn note(&mut self, code: &'static str, text: String) -> bool {
        self.found(Severity::Note, code, text)
    }

    /// Adds damage that can't be repaired.
    pub(crate) fn hopeless(&mut self, code: &'static str, text: String) {
        self.report.damage += 1;
        self.report.left += 1;
        self.report.problems.push(Problem { code, text, severity: Severity::Loss, fixed: false });
    }

    /// Stores a word of the area. Called only for findings that are to be fixed.
    pub(crate) fn put(&mut self, offset: u64, value: u64) {
        debug_assert!(self.options.repair);
        // Always in range: offsets come from checked blocks.
        let _ = self.area.store_word(offset, value);
    }

    fn pass(&mut self, progress: Progress<'_>) {
        self.check_super();
        self.check_members();
        self.check_table(progress);
        self.check_dirs(progress);
        self.check_links();
        self.check_map(progress);
        self.fill_table();
        self.check_counters();
        self.check_accounts();
    }
}

/// Returns how many operations members left unfinished when they died, in an area that nobody uses.
///
/// # Errors
/// There is no file system, or one of another version.
pub fn unfinished(area: &Area) -> Result<usize, Unreadable> {
    Ok(raw::Layout::read(area)?.begun(area).len())
}

/// Returns an area that nobody uses as the next member will find it, in memory: what members left unfinished when they died is completed or undone there. `None`:
/// the area is no file's, or there is no memory for it.
pub fn finished(area: &Area) -> Option<Area> {
    let finished = area.private().ok().flatten()?;
    repair::recover(&finished);
    Some(finished)
}

/// Checks, and repairs if asked to; a repair completes what members left unfinished, which counts as damage otherwise. An error: there is no file system, or
/// one of another version, or a page of the file is missing.
pub fn check(area: &Area, options: Options, progress: Progress<'_>) -> Result<Report, Unreadable> {
    let report = passes(area, options, progress);
    if area.is_lost() { Err(Unreadable(LOST.into())) } else { report }
}

fn passes(area: &Area, options: Options, progress: Progress<'_>) -> Result<Report, Unreadable> {
    if options.repair && (!area.writable() || options.live) {
        return Err(Unreadable("repair needs the area for itself, writable".into()));
    }
    let mut total = Report::default();
    if options.repair {
        repair::recover(area);
    }
    for pass in 1..=MAX_PASSES {
        let mut checker = Checker::new(area, options)?;
        checker.pass(progress);
        let again = checker.changed;
        let lost = std::mem::take(&mut checker.lost);
        let report = checker.report;
        total.damage += report.damage;
        total.inodes = report.inodes;
        total.directories = report.directories;
        total.blocks_used = report.blocks_used;
        total.blocks = report.blocks;
        total.passes = pass;
        let last = pass == MAX_PASSES;
        total.left += if last && again { report.damage } else { report.left };
        let room = KEEP.saturating_sub(total.problems.len());
        total.problems.extend(report.problems.into_iter().take(room));
        if options.repair && !lost.is_empty() {
            repair::reconnect(area, &lost, &mut total);
        }
        if !again {
            break;
        }
    }
    if options.repair && total.left == 0 {
        raw::clear_errors(area);
    }
    Ok(total)
}
