// SPDX-License-Identifier: Apache-2.0 OR MIT
//! clpeak's figures: bandwidths, single-precision arithmetic, transfers and the latency of a launch.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::program::Place;

/// A line of clpeak's output.
#[derive(Debug, PartialEq)]
pub struct Figure {
    /// The case's name, in lower case with dashes.
    pub case: String,
    /// The measured value.
    pub value: f64,
    pub unit: String,
}

/// Runs clpeak, natively or forwarded to this address.
pub fn run(place: &Place, server: Option<&str>) -> Result<Vec<Figure>> {
    let mut command = place.with_driver(Path::new("clpeak"), server);
    let parts = ["--global-bandwidth", "--compute-sp", "--transfer-bandwidth", "--kernel-latency"];
    let output = command.args(parts).output().context("clpeak (package clpeak)")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let found = figures(&said);
    ensure!(output.status.success() && !found.is_empty(), "clpeak: {}: {said}", output.status);
    Ok(found)
}

/// Figures stand as `name : value` below a heading with their unit; a latency has its own.
fn figures(text: &str) -> Vec<Figure> {
    let mut found = Vec::new();
    let mut heading = None;
    for line in text.lines().map(str::trim) {
        let Some((name, rest)) = line.split_once(" : ") else {
            heading = line.strip_suffix(')').and_then(|l| l.rsplit_once(" (")).or(heading);
            continue;
        };
        let mut words = rest.split_whitespace();
        let Some(value) = words.next().and_then(|w| w.parse().ok()) else { continue };
        let (case, unit) = match (words.next(), heading) {
            (Some(unit @ "us"), _) => (slug(name), unit),
            (None, Some((above, unit))) => (format!("{}-{}", slug(above), slug(name)), unit),
            // Lines about the device itself.
            _ => continue,
        };
        found.push(Figure { case, value, unit: unit.into() });
    }
    found
}

/// Words in lower case with dashes between them.
fn slug(text: &str) -> String {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_figure_is_named_by_its_heading_and_its_line() {
        let text = "\nPlatform: Portable Computing Language\n  Device: pthread\n    Driver version  : 3.1+debian (Linux x64)\n    \
                    Compute units   : 2\n    Clock frequency : 2596 MHz\n\n    Global memory bandwidth (GBPS)\n      float   : 3.72\n\n    \
                    Transfer bandwidth (GBPS)\n      enqueueMapBuffer(for read)      : 14109.62\n\n    Kernel launch latency : 21.86 us\n";
        let found: Vec<_> = figures(text).into_iter().map(|f| (f.case, f.value, f.unit)).collect();
        let figure = |case: &str, value, unit: &str| (case.to_owned(), value, unit.to_owned());
        assert_eq!(
            found,
            [
                figure("global-memory-bandwidth-float", 3.72, "GBPS"),
                figure("transfer-bandwidth-enqueuemapbuffer-for-read", 14109.62, "GBPS"),
                figure("kernel-launch-latency", 21.86, "us"),
            ]
        );
    }
}
