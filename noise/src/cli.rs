// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arguments and the output that `noise host` and `noise VM` share.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::model::MOST_RANKS;
use crate::recording::Recording;
use crate::report::{Below, Report, VERSION, report};
use crate::run::Measurement;
use crate::{plot, table};

/// The longest report that is read, in bytes: one of a machine with 65,536 CPUs is shorter.
const LONGEST: u64 = 64 << 20;

/// The options of a measurement and of its output.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The CPUs and the duration
    #[command(flatten)]
    pub measurement: Measurement,
    /// Draw interruptions and quanta into this file, as SVG
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,
    /// Show sources beside those of an earlier run, which --json has written into this file
    #[arg(long, value_name = "BEFORE.json")]
    compare: Option<PathBuf>,
    /// Estimate the cost of the measured quanta for a bulk-synchronous program of up to this many ranks, by a model
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_RANKS))]
    model_ranks: Option<u64>,
}

impl Options {
    /// The earlier report that this run is compared with.
    ///
    /// # Errors
    /// The file is no report.
    pub fn before(&self) -> Result<Option<Report>> {
        self.compare.as_deref().map(read).transpose()
    }
}

fn read(path: &Path) -> Result<Report> {
    let shown = path.display();
    let mut text = Vec::new();
    let file = File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut text));
    file.with_context(|| format!("{shown} can't be read"))?;
    ensure!(text.len() as u64 <= LONGEST, "{shown} is no report: it is longer than {} MiB", LONGEST >> 20);
    let words = || format!("{shown} is no report; 'tombolo noise --json' writes one");
    let report: Report = serde_json::from_slice(&text).with_context(words)?;
    let version = report.version;
    ensure!(version == VERSION, "{shown} is a report of version {version}, and this program knows {VERSION}");
    Ok(report)
}

/// Prints what was recorded of `target`.
///
/// # Errors
/// The picture or the output can't be written.
pub fn show(
    target: &str,
    options: &Options,
    before: Option<&Report>,
    recording: &Recording,
    below: &Below,
    json: bool,
) -> Result<()> {
    let measured = report(target, options.measurement.threshold, recording, below, options.model_ranks);
    let text = match (json, before) {
        (true, _) => format!("{}\n", serde_json::to_string_pretty(&measured.report)?),
        (false, Some(before)) => {
            format!("{}\n{}", table::text(&measured.report), table::compared(before, &measured.report))
        }
        (false, None) => table::text(&measured.report),
    };
    // One of the two is there where the other can't be written.
    let printed = std::io::stdout().lock().write_all(text.as_bytes());
    if let Some(path) = &options.svg {
        let picture = plot::svg(&measured)?;
        std::fs::write(path, picture)
            .with_context(|| format!("the picture can't be written to {}", path.display()))?;
    }
    Ok(printed?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Gap, Record};

    #[test]
    fn what_is_no_report_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("before.json");
        let refused = || format!("{:#}", read(&path).unwrap_err());
        assert!(refused().contains("before.json can't be read"));
        std::fs::write(&path, "{}").unwrap();
        assert!(refused().contains("before.json is no report; 'tombolo noise --json' writes one"));
        let mut report = report("host", 5.0, &Recording::default(), &Below::default(), None).report;
        report.version = 2;
        std::fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        assert!(refused().contains("version 2"), "{}", refused());
        // Without an end, and too deep for a parser that calls itself.
        let error = format!("{:#}", read(Path::new("/dev/zero")).unwrap_err());
        assert!(error.contains("longer than 64 MiB"), "{error}");
        std::fs::write(&path, "[".repeat(1 << 20)).unwrap();
        assert!(refused().contains("is no report"), "{}", refused());
    }

    #[test]
    fn names_that_another_program_has_written_say_nothing_to_a_terminal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("before.json");
        let gap = Gap { start: 0, end: 9000, smis: 0 };
        let record = Record { last: 10_000, gaps: vec![gap], ..Record::default() };
        let recording = Recording { hz: 1_000_000, traced: vec![record], ..Recording::default() };
        let report = report("host", 5.0, &recording, &Below::default(), None).report;
        let written = serde_json::to_string(&report).unwrap();
        let written = written.replace(r#""name":"""#, r#""name":"\u001b]0;x\u0007\ny""#);
        std::fs::write(&path, written.replace(r#""target":"host""#, r#""target":"\u001b[2J""#)).unwrap();
        let text = table::compared(&read(&path).unwrap(), &report);
        assert!(
            text.contains("unknown \u{fffd}]0;x\u{fffd}\u{fffd}y") && text.contains("before: \u{fffd}[2J"),
            "{text}"
        );
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
}
