// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables made from samples.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::record::{Better, LeftOut, Sample};

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
    units: BTreeMap<String, (String, Better)>,
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

    /// The unit of a case, and which way is good.
    pub fn unit(&self, case: &str) -> Option<(&str, Better)> {
        self.units.get(case).map(|(unit, better)| (unit.as_str(), *better))
    }

    /// The ratio of `system` to `peer` in each case that both have, greater than 1 if `system` is better. Cases with a value of zero are left out.
    pub fn ratios(&self, system: &str, peer: &str) -> Vec<(String, f64)> {
        self.cases
            .iter()
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

    /// As text: a row per case, a column per system, then the mean and the least ratio of the first system over the others.
    pub fn text(&self) -> String {
        let width = self.cases.iter().map(String::len).max().unwrap_or(4).max(22);
        let mut out = format!("{:width$}  {:6}", "case", "unit");
        for system in &self.systems {
            let _ = write!(out, " {system:>10}");
        }
        out.push('\n');
        for case in &self.cases {
            let unit = self.units.get(case).map_or("", |(unit, _)| unit.as_str());
            let _ = write!(out, "{case:width$}  {unit:6}");
            for system in &self.systems {
                match self.get(case, system) {
                    Some(value) => {
                        let _ = write!(out, " {:>10}", figure(value));
                    }
                    None => out.push_str("          -"),
                }
            }
            out.push('\n');
        }
        let Some((first, peers)) = self.systems.split_first() else { return out };
        for (label, pick) in
            [("mean ratio", mean as fn(&[f64]) -> f64), ("median ratio", middle), ("least ratio", least)]
        {
            let _ = write!(out, "{:width$}  {:6} {:>10}", format!("{label} of {first}"), "x", "1");
            for peer in peers {
                let ratios: Vec<f64> = self.ratios(first, peer).into_iter().map(|(_, r)| r).collect();
                if ratios.is_empty() {
                    out.push_str("          -");
                } else {
                    let _ = write!(out, " {:>10}", figure(pick(&ratios)));
                }
            }
            out.push('\n');
        }
        out
    }
}

/// The table of the samples, and below it the systems that were left out, each with its reason.
pub fn text(samples: &[Sample], left_out: &[LeftOut]) -> String {
    let mut out = Table::new(samples).text();
    for line in left_out {
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
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(case: &str, system: &str, value: f64, better: Better) -> Sample {
        Sample {
            bench: "t".into(),
            case: case.into(),
            system: system.into(),
            value,
            unit: "MB/s".into(),
            better,
        }
    }

    #[test]
    fn a_median_ignores_outliers_and_halves_even_counts() {
        assert_eq!(median(&[1.0, 100.0, 2.0]), Some(2.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0));
        assert_eq!(median(&[]), None);
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
        assert!(table.text().contains("least ratio of a"), "{}", table.text());
    }

    #[test]
    fn tombolo_is_what_others_are_compared_with_whichever_was_measured_first() {
        let systems = ["memcpy", "native", "tombolo", "9p"];
        let samples: Vec<Sample> =
            systems.iter().map(|system| sample("rate", system, 1.0, Better::Higher)).collect();
        assert_eq!(Table::new(&samples).systems, ["tombolo", "memcpy", "native", "9p"]);
    }
}
