// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cases that differ in one size only: `fio-read-4k-j1`, `fio-read-16k-j1` …

use crate::record::Better;
use crate::report::Table;

/// Cases of one name but for a size.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// The name, `*` for the size.
    pub name: String,
    /// Of the values.
    pub unit: String,
    /// The direction of better values.
    pub better: Better,
    /// A line for each system: its name, and (size, median) by growing size.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Family {
    /// A family is drawn where some system has three sizes of it.
    pub fn is_drawn(&self) -> bool {
        !self.is_limit() && self.lines.iter().any(|(_, points)| points.len() >= 3)
    }

    fn is_limit(&self) -> bool {
        self.lines.iter().all(|(system, _)| is_limit(system))
    }
}

/// A system that is no peer but what the hardware can do at most.
pub fn is_limit(system: &str) -> bool {
    system.starts_with("memcpy")
}

/// The family of the same sizes whose systems are limits of this one: frames that are only copied beside frames that are switched.
pub fn limit_of<'a>(family: &Family, all: &'a [Family]) -> Option<&'a Family> {
    (family.unit == "packets/s").then(|| all.iter().find(|f| f.is_limit() && f.unit == "frames/s"))?
}

/// The table's cases by family, in the order in which they first come.
pub fn families(table: &Table) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for case in &table.cases {
        let (Some((name, size)), Some((unit, better))) = (split(case), table.unit(case)) else { continue };
        let at = families.iter().position(|f| f.name == name).unwrap_or_else(|| {
            families.push(Family { name, unit: unit.to_owned(), better, lines: Vec::new() });
            families.len() - 1
        });
        for system in &table.systems {
            let Some(value) = table.get(case, system).filter(|value| *value > 0.0) else { continue };
            let lines = &mut families[at].lines;
            match lines.iter_mut().find(|(name, _)| name == system) {
                Some((_, points)) => points.push((size, value)),
                None => lines.push((system.clone(), vec![(size, value)])),
            }
        }
    }
    for (_, points) in families.iter_mut().flat_map(|f| &mut f.lines) {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    families
}

/// The family's name and the size: of the first word of a case that is a number, with or without k, K or M behind it.
fn split(case: &str) -> Option<(String, f64)> {
    let words: Vec<&str> = case.split('-').collect();
    let (at, size) = words.iter().enumerate().find_map(|(i, word)| Some((i, size(word)?)))?;
    let name: Vec<&str> =
        words.iter().enumerate().map(|(i, word)| if i == at { "*" } else { *word }).collect();
    Some((name.join("-"), size))
}

/// The number that a word of a case's name says.
pub fn size(word: &str) -> Option<f64> {
    let digits = word.trim_end_matches(['k', 'K', 'M']);
    let factor = match &word[digits.len()..] {
        "" => 1.0,
        "k" | "K" => 1024.0,
        "M" => 1024.0 * 1024.0,
        _ => return None,
    };
    Some(f64::from(digits.parse::<u32>().ok()?) * factor)
}

/// A size as case names say it.
pub fn label(size: f64) -> String {
    const K: f64 = 1024.0;
    match size {
        s if s >= K * K && s % (K * K) == 0.0 => format!("{}M", s / (K * K)),
        s if s >= K && s % K == 0.0 => format!("{}k", s / K),
        s => format!("{s}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Sample;

    #[test]
    fn the_first_number_of_a_case_is_its_size() {
        assert_eq!(split("fio-read-4k-j1"), Some(("fio-read-*-j1".into(), 4096.0)));
        assert_eq!(
            split("start-kernel-512M-device"),
            Some(("start-kernel-*-device".into(), 512.0 * 1048576.0))
        );
        assert_eq!(split("net-64-split"), Some(("net-*-split".into(), 64.0)));
        assert_eq!(split("meta-create"), None);
        assert_eq!(split("fio-read-4kM-j1"), None);
        for text in ["64", "4k", "2M", "1500"] {
            assert_eq!(label(size(text).unwrap()), text);
        }
    }

    #[test]
    fn copies_are_the_limit_of_packets_and_no_peer() {
        let mut samples = Vec::new();
        for size in [64, 256, 1500] {
            let case = |what: &str| format!("net-{size}-{what}");
            samples.push(Sample::new("net", case("split"), "tombolo", 2.0, "packets/s", Better::Higher));
            let copy = format!("net-copy-{size}");
            samples.push(Sample::new("net", copy, "memcpy", 9.0, "frames/s", Better::Higher));
        }
        let families = families(&Table::new(&samples));
        assert_eq!(families.iter().filter(|f| f.is_drawn()).count(), 1);
        assert_eq!(limit_of(&families[0], &families).unwrap().name, "net-copy-*");
    }
}
