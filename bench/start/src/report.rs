// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Figures as JSON lines, as DESIGN's results are, and as a table; and the model that is made of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tombolo_record::{Better, Sample};
use tombolo_start::layout::{DEFAULT_DMA_ENTRIES, GIB, MIB, Wish};
use tombolo_start::model::{Costs, fit};

use crate::measure::{Figures, System};

fn sample(case: String, system: System, value: f64, unit: &str, better: Better) -> Sample {
    Sample::new("start", case, system.name(), value, unit, better)
}

/// The lines of one start of `total` bytes.
pub fn lines(system: System, total: u64, device: bool, figures: &Figures) -> Vec<Sample> {
    let size = format!("{}M{}", total / MIB, if device { "-device" } else { "" });
    let mut lines: Vec<Sample> = [
        ("qmp", figures.monitor),
        ("kernel", figures.kernel),
        ("login", figures.login),
        ("full", figures.full),
        // Both: the guest is up and has all of its memory.
        ("complete", figures.login.max(figures.full)),
    ]
    .into_iter()
    .map(|(what, value)| sample(format!("start-{what}-{size}"), system, value, "s", Better::Lower))
    .collect();
    if let Some(growth) = &figures.growth {
        let case = format!("start-growth-{size}");
        lines.push(sample(case, system, growth.gib_per_second, "GiB/s", Better::Higher));
        if let Some((during, after)) = growth.work {
            let share = 100.0 * during / after;
            let case = format!("start-work-{size}");
            lines.push(sample(case, system, share, "% of undisturbed", Better::Higher));
        }
        let cpu = growth.report.prepared.cpu.as_secs_f64();
        lines.push(sample(format!("start-prepare-cpu-{size}"), system, cpu, "s", Better::Lower));
    }
    lines
}

/// A table with a row for each case and a column for each system; of several repetitions the median.
pub fn table(lines: &[Sample]) -> String {
    let mut cells: BTreeMap<(&str, &str), BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for line in lines {
        let row = cells.entry((&line.case, &line.unit)).or_default();
        row.entry(&line.system).or_default().push(line.value);
    }
    let systems: Vec<&str> = cells
        .values()
        .flat_map(BTreeMap::keys)
        .copied()
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect();
    let mut text = format!("{:<36}{:<18}", "CASE", "UNIT");
    for system in &systems {
        let _ = write!(text, "{system:>14}");
    }
    text.push('\n');
    for ((case, unit), row) in &mut cells {
        let _ = write!(text, "{case:<36}{unit:<18}");
        for system in &systems {
            let cell = row.get_mut(system).map(|values| median(values));
            let _ = write!(text, "{:>14}", cell.map_or("-".into(), |v| format!("{v:.2}")));
        }
        text.push('\n');
    }
    text
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The costs that measured lines show, where there are enough of them.
pub fn costs(lines: &[Sample]) -> Option<Costs> {
    let slow: Vec<(u64, f64)> = of(lines, "start-qmp-", "qemu").collect();
    let (base, slow_per_gib) = fit(&slow)?;
    let per_gib = |what: &str| {
        let rates: Vec<f64> = of(lines, what, "tombolo").map(|(_, rate)| rate).collect();
        let mut seconds: Vec<f64> = rates.iter().map(|rate| 1.0 / rate).collect();
        (!seconds.is_empty()).then(|| median(&mut seconds))
    };
    let plug_per_gib = per_gib("start-growth-")?;
    let mut prepare: Vec<f64> = of(lines, "start-prepare-cpu-", "tombolo")
        .filter_map(|(total, cpu)| {
            let wish = Wish { total, boot: None, dma_entries: DEFAULT_DMA_ENTRIES };
            let grown = wish.layout().ok()?.grown;
            #[expect(clippy::cast_precision_loss, reason = "a model")]
            (grown > 0).then(|| cpu / (grown as f64 / GIB as f64))
        })
        .collect();
    let prepare_per_gib = if prepare.is_empty() { 0.0 } else { median(&mut prepare) };
    Some(Costs { base, slow_per_gib, plug_per_gib, prepare_per_gib })
}

/// Values of a system's lines with a device whose case begins with `what`, with the VM's size in bytes.
fn of<'a>(lines: &'a [Sample], what: &'a str, system: &'a str) -> impl Iterator<Item = (u64, f64)> + 'a {
    lines.iter().filter(move |l| l.system == system).filter_map(move |line| {
        let size = line.case.strip_prefix(what)?.strip_suffix("M-device")?;
        Some((size.parse::<u64>().ok()? * MIB, line.value))
    })
}

/// The model as text: what it is made of, and what it says of 350 GiB and 2 TiB.
pub fn model(costs: &Costs) -> String {
    let mut text = format!(
        "model, from these figures: {:.2} s + {:.2} s/GiB slow; {:.2} s/GiB plugging, {:.2} s/GiB preparing\n",
        costs.base, costs.slow_per_gib, costs.plug_per_gib, costs.prepare_per_gib
    );
    for total in [4, 350, 2048].map(|gib| gib * GIB) {
        if let Ok(f) = costs.forecast(total) {
            let _ = writeln!(
                text,
                "{:>6} GiB: first instruction after {:.0} s slow, {:.1} s fast; full memory after {:.0} s fast; {} mappings",
                f.gib, f.slow, f.fast, f.fast_full, f.mappings
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, system: &str, value: f64) -> Sample {
        Sample::new("start", case.into(), system, value, "s", Better::Lower)
    }

    #[test]
    fn the_table_has_medians_and_gaps() {
        let lines = [
            line("a", "qemu", 3.0),
            line("a", "qemu", 1.0),
            line("a", "qemu", 2.0),
            line("b", "tombolo", 5.0),
        ];
        let table = table(&lines);
        assert!(
            table.lines().any(|l| l.starts_with('a') && l.contains("2.00") && l.ends_with('-')),
            "{table}"
        );
    }

    #[test]
    fn the_model_is_made_of_lines_with_a_device_only() {
        let mut lines = vec![
            line("start-qmp-1024M-device", "qemu", 3.0),
            line("start-qmp-2048M-device", "qemu", 5.0),
            line("start-qmp-2048M", "qemu", 99.0),
        ];
        assert_eq!(costs(&lines), None);
        lines.push(line("start-growth-1536M-device", "tombolo", 0.5));
        lines.push(line("start-prepare-cpu-1536M-device", "tombolo", 1.5));
        let costs = costs(&lines).unwrap();
        assert!((costs.slow_per_gib - 2.0).abs() < 1e-9 && (costs.prepare_per_gib - 1.5).abs() < 1e-9);
        assert!(model(&costs).contains("350 GiB"));
    }
}
