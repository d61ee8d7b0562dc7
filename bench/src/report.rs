// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables made from samples.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::record::{Better, Recorded, Sample};

/// The median; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(sorted[n / 2]),
        _ => Some(f64::midpoint(sorted[n / 2 - 1], sorted[n / 2])),
    }
}

/// Medians by case and system, in the order in which they first came.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Case names.
    pub cases: Vec<String>,
    /// System names: Tombolo first, which the others are compared with, then in the order in which they first came.
    pub systems: Vec<String>,
    cells: BTreeMap<(String, String), f64>,
    /// Cells whose true figure is larger: a measurement of them was ended before its end.
    ended: BTreeSet<(String, String)>,
    units: BTreeMap<String, (String, Better)>,
}

/// A part of a table: its cases may be compared with each other.
pub struct Part {
    /// What its cases have in common; empty for the only part of a table.
    pub title: &'static str,
    /// Its cases, and the systems that have a figure in one of them.
    pub table: Table,
}

/// Titles of the parts, in their order.
const TITLES: [&str; 3] = ["With O_DIRECT", "Buffered", "Names, trees and coherence"];

/// The place in [`TITLES`] of a case's part. fio's jobs and handovers are O_DIRECT unless the case says otherwise.
fn part(case: &str) -> usize {
    match case {
        _ if case.ends_with(BUFFERED) => 1,
        _ if case.starts_with("fio-") || case.starts_with("handover-") => 0,
        _ => 2,
    }
}

/// The end of a case's name whose reads and writes go through the page cache, where the system has one.
pub const BUFFERED: &str = "-buffered";

/// Returns whether a case's name contains one of the words; it does if there are none.
pub fn wanted(case: &str, words: &[String]) -> bool {
    words.is_empty() || words.iter().any(|word| case.contains(word.as_str()))
}

impl Table {
    /// Gathers the samples.
    pub fn new(samples: &[Sample]) -> Table {
        let mut all: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
        let mut table = Table::default();
        for s in samples {
            if !table.cases.contains(&s.case) {
                table.cases.push(s.case.clone());
            }
            if !table.systems.contains(&s.system) {
                table.systems.push(s.system.clone());
            }
            table.units.insert(s.case.clone(), (s.unit.clone(), s.better));
            if s.at_least {
                table.ended.insert((s.case.clone(), s.system.clone()));
            }
            all.entry((s.case.clone(), s.system.clone())).or_default().push(s.value);
        }
        if let Some(own) = table.systems.iter().position(|system| system == "tombolo") {
            table.systems[..=own].rotate_right(1);
        }
        table.cells = all.into_iter().filter_map(|(key, values)| median(&values).map(|m| (key, m))).collect();
        table
    }

    /// The median of a case on a system.
    pub fn get(&self, case: &str, system: &str) -> Option<f64> {
        self.cells.get(&(case.to_owned(), system.to_owned())).copied()
    }

    /// The same in words, with > where the true figure is larger.
    pub fn shown(&self, case: &str, system: &str) -> Option<String> {
        let more = if self.ended.contains(&(case.to_owned(), system.to_owned())) { ">" } else { "" };
        self.get(case, system).map(|value| format!("{more}{}", figure(value)))
    }

    /// The parts whose cases may be compared with each other: the whole table, unless some cases are buffered.
    pub fn parts(&self) -> Vec<Part> {
        if !self.cases.iter().any(|case| case.ends_with(BUFFERED)) {
            return vec![Part { title: "", table: self.clone() }];
        }
        let parts = TITLES.iter().enumerate().map(|(at, title)| {
            let mut table = self.clone();
            table.cases.retain(|case| part(case) == at);
            table.systems.retain(|system| table.cases.iter().any(|case| self.get(case, system).is_some()));
            Part { title, table }
        });
        parts.filter(|part| !part.table.cases.is_empty()).collect()
    }

    /// The unit of a case, and which way is good.
    pub fn unit(&self, case: &str) -> Option<(&str, Better)> {
        self.units.get(case).map(|(unit, better)| (unit.as_str(), *better))
    }

    /// The ratio of `system` to `peer` in each case that both have, greater than 1 if `system` is better. Cases with a value of zero, or whose
    /// measurement was ended, are left out.
    pub fn ratios(&self, system: &str, peer: &str) -> Vec<(String, f64)> {
        let whole = |case: &str, system: &str| !self.ended.contains(&(case.to_owned(), system.to_owned()));
        self.cases
            .iter()
            .filter(|case| whole(case, system) && whole(case, peer))
            .filter_map(|case| {
                let (a, b) = (self.get(case, system)?, self.get(case, peer)?);
                let ratio = match self.units.get(case)?.1 {
                    Better::Higher => a / b,
                    Better::Lower => b / a,
                };
                ratio.is_normal().then(|| (case.clone(), ratio))
            })
            .collect()
    }

    /// As text: a row per case that is wanted by one of the words, a column per system; then the mean, the median and the least ratio of the
    /// first system over the others in all cases.
    pub fn text(&self, words: &[String]) -> String {
        let width = self.cases.iter().map(String::len).max().unwrap_or(4).max(22);
        let columns: Vec<usize> = self.systems.iter().map(|system| system.len().max(10)).collect();
        let row = |case: &str, unit: &str, cell: &dyn Fn(&str) -> Option<String>| {
            let mut row = format!("{case:width$}  {unit:6}");
            for (system, column) in self.systems.iter().zip(&columns) {
                let _ = write!(row, " {:>column$}", cell(system).as_deref().unwrap_or("-"));
            }
            row + "\n"
        };
        let mut out = row("case", "unit", &|system| Some(system.to_owned()));
        for case in self.cases.iter().filter(|case| wanted(case, words)) {
            let unit = self.units.get(case).map_or("", |(unit, _)| unit.as_str());
            out += &row(case, unit, &|system| self.shown(case, system));
        }
        let Some((first, _)) = self.systems.split_first() else { return out };
        for (label, pick) in
            [("mean ratio", mean as fn(&[f64]) -> f64), ("median ratio", middle), ("least ratio", least)]
        {
            out += &row(&format!("{label} of {first}"), "x", &|system| {
                if system == first {
                    return Some("1".into());
                }
                let ratios: Vec<f64> = self.ratios(first, system).into_iter().map(|(_, r)| r).collect();
                (!ratios.is_empty()).then(|| figure(pick(&ratios)))
            });
        }
        out
    }
}

/// The tables of a run, with the cases that are wanted by one of the words; below them what each system is and gives up, and the systems that were left out,
/// each with its reason.
pub fn text(run: &Recorded, words: &[String]) -> String {
    let mut out = String::new();
    for Part { title, table } in Table::new(&run.samples).parts() {
        if !title.is_empty() {
            let _ = writeln!(out, "{}{title}", if out.is_empty() { "" } else { "\n" });
        }
        out += &table.text(words);
    }
    for (at, about) in run.abouts.iter().enumerate() {
        let gives_up = about.gives_up.as_ref().map(|what| format!(". Gives up: {what}"));
        let first = if at == 0 { "\n" } else { "" };
        let _ = writeln!(out, "{first}{}: {}{}", about.system, about.setup, gives_up.unwrap_or_default());
    }
    for line in &run.left_out {
        let _ = writeln!(out, "{} was left out: {}", line.system, line.left_out);
    }
    out
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn middle(values: &[f64]) -> f64 {
    median(values).unwrap_or(f64::NAN)
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Three significant digits, no exponent.
pub fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.1 => format!("{value:.3}"),
        0.0 => "0".into(),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{About, Group};

    fn sample(case: &str, system: &str, value: f64, better: Better) -> Sample {
        Sample::new("t", case.into(), system, value, "MB/s", better)
    }

    #[test]
    fn a_median_ignores_outliers_and_halves_even_counts() {
        assert_eq!(median(&[1.0, 100.0, 2.0]), Some(2.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn a_figure_has_three_digits() {
        for (value, text) in
            [(12345.6, "12346"), (12.34, "12.3"), (1.234, "1.23"), (0.304, "0.304"), (0.0, "0")]
        {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn a_ratio_says_how_many_times_better_whichever_way_is_good() {
        let table = Table::new(&[
            sample("rate", "a", 10.0, Better::Higher),
            sample("rate", "b", 5.0, Better::Higher),
            sample("time", "a", 2.0, Better::Lower),
            sample("time", "b", 8.0, Better::Lower),
            sample("only", "a", 2.0, Better::Lower),
            sample("idle", "a", 0.0, Better::Lower),
            sample("idle", "b", 95.0, Better::Lower),
        ]);
        assert_eq!(table.ratios("a", "b"), vec![("rate".to_owned(), 2.0), ("time".to_owned(), 4.0)]);
        assert!(table.text(&[]).contains("least ratio of a"), "{}", table.text(&[]));
    }

    #[test]
    fn tombolo_is_what_others_are_compared_with_whichever_was_measured_first() {
        let systems = ["memcpy", "native", "tombolo", "9p"];
        let samples: Vec<Sample> =
            systems.iter().map(|system| sample("rate", system, 1.0, Better::Higher)).collect();
        assert_eq!(Table::new(&samples).systems, ["tombolo", "memcpy", "native", "9p"]);
    }

    #[test]
    fn buffered_cells_are_compared_among_themselves_only() {
        let mut samples = Vec::new();
        for (case, systems) in [
            ("fio-read-4k-j1", ["tombolo", "9p"]),
            ("fio-read-4k-j1-buffered", ["tombolo", "virtiofs-always"]),
            ("meta-stat", ["9p", "virtiofs-always"]),
        ] {
            samples.extend(systems.map(|system| sample(case, system, 1.0, Better::Higher)));
        }
        let parts = Table::new(&samples).parts();
        let systems: Vec<(&str, &[String])> =
            parts.iter().map(|part| (part.title, part.table.systems.as_slice())).collect();
        assert_eq!(systems[0], ("With O_DIRECT", &["tombolo".to_owned(), "9p".to_owned()][..]));
        assert_eq!(systems[1], ("Buffered", &["tombolo".to_owned(), "virtiofs-always".to_owned()][..]));
        assert_eq!(systems[2].1, ["9p", "virtiofs-always"]);
        let only = Table::new(&samples[..2]).parts();
        assert!(only.len() == 1 && only[0].title.is_empty(), "nothing is buffered: one table");
    }

    #[test]
    fn a_measurement_that_was_ended_shows_as_more_and_has_no_ratio() {
        let seen = |value| sample("coherence-read", "tombolo", value, Better::Lower);
        let unseen =
            Sample { at_least: true, ..sample("coherence-read", "virtiofs-always", 30.0, Better::Lower) };
        let table = Table::new(&[seen(0.5), unseen]);
        assert_eq!(table.shown("coherence-read", "virtiofs-always").unwrap(), ">30.0");
        assert_eq!(table.shown("coherence-read", "tombolo").unwrap(), "0.500");
        assert!(table.ratios("tombolo", "virtiofs-always").is_empty());
    }

    #[test]
    fn a_text_has_the_wanted_rows_the_ratios_of_all_and_what_each_system_gives_up() {
        let about = About {
            system: "b".into(),
            group: Group::Cached,
            setup: "cache=loose".into(),
            gives_up: Some("coherence".into()),
        };
        let samples = vec![
            sample("x", "a", 2.0, Better::Higher),
            sample("x", "b", 1.0, Better::Higher),
            sample("y", "a", 8.0, Better::Higher),
            sample("y", "b", 1.0, Better::Higher),
        ];
        let text = text(&Recorded { samples, abouts: vec![about], ..Recorded::default() }, &["y".into()]);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["y", "MB/s", "8.00", "1.00"]);
        assert_eq!(rows[2], ["mean", "ratio", "of", "a", "x", "1", "5.00"]);
        assert!(text.ends_with("b: cache=loose. Gives up: coherence\n"), "{text}");
    }
}
