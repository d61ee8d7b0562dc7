// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arguments and the output that `noise host` and `noise VM` share.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::model::MOST_RANKS;
use crate::recording::Recording;
use crate::report::{Below, Report, VERSION, report};
use crate::run::Measurement;
use crate::{plot, table};

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
    let text = std::fs::read(path).with_context(|| format!("{shown} can't be read"))?;
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
    if let Some(path) = &options.svg {
        let picture = plot::svg(&measured)?;
        std::fs::write(path, picture)
            .with_context(|| format!("the picture can't be written to {}", path.display()))?;
    }
    let text = match (json, before) {
        (true, _) => format!("{}\n", serde_json::to_string_pretty(&measured.report)?),
        (false, Some(before)) => {
            format!("{}\n{}", table::text(&measured.report), table::compared(before, &measured.report))
        }
        (false, None) => table::text(&measured.report),
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
