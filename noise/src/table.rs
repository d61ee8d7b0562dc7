// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A report as text, alone or beside an earlier one.

use std::fmt::Write;

use crate::report::{Report, Row, Spread};
use crate::source::Source;

/// The report as a table.
pub fn text(report: &Report) -> String {
    let mut text = head(report);
    for cpu in &report.cpus {
        let Spread { least, median, p99, most, .. } = cpu.work_us;
        text += &format!(
            "CPU {:<4} {:>9.1} gaps/s {:>10.1} us/s, longest {:.1} us; fixed work: {least:.1} us at least, median {median:.1}, 99 % {p99:.1}, \
             longest {most:.1}; fixed time: {:.0} units, at least {:.0}\n",
            cpu.cpu,
            cpu.gaps_per_second,
            cpu.us_per_second,
            cpu.longest_us,
            cpu.units.median,
            cpu.units.least
        );
    }
    text += "\n";
    text += &rows("source", &report.sources);
    if !report.host.is_empty() {
        text += "\nWhat held up the vCPUs' threads on the host; which gap that explains is not known, as the clocks of guest and host are not joined.\n";
        text += &rows("on the host", &report.host);
    }
    if let Some(tracing) = &report.tracing {
        let _ = write!(
            text,
            "\ntracing: {:.0} ns per event, {:.1} us/s taken off; a quantum of fixed work takes {:.1} us without and {:.1} us with it (means)\n",
            tracing.event_ns, tracing.us_per_second, tracing.work_without_us.mean, tracing.work_with_us.mean
        );
    }
    text += &model(report);
    for note in &report.notes {
        text += &format!("note: {note}\n");
    }
    text
}

fn head(report: &Report) -> String {
    format!(
        "{}: {} CPUs for {:.1} s, interruptions longer than {} us; rates are those of one CPU\n",
        report.target,
        report.cpus.len(),
        report.seconds,
        report.threshold_us
    )
}

fn width(title: &str, sources: impl Iterator<Item = String>) -> usize {
    sources.map(|source| source.chars().count()).chain([title.len()]).max().unwrap_or(0)
}

fn rows(title: &str, rows: &[Row]) -> String {
    let width = width(title, rows.iter().map(|row| row.source.to_string()));
    let mut text =
        format!("{title:<width$} {:>10} {:>12} {:>12}  remedy\n", "per s", "us per s", "longest us");
    for row in rows {
        let Row { source, per_second, us_per_second, longest_us, remedy } = row;
        let source = source.to_string();
        text += &format!(
            "{source:<width$} {per_second:>10.1} {us_per_second:>12.1} {longest_us:>12.1}  {remedy}\n"
        );
    }
    text
}

fn model(report: &Report) -> String {
    let Some(first) = report.model.first() else { return String::new() };
    let work = first.mean_ns / first.slowdown / 1e3;
    let mut text = format!(
        "\nmodel: a step of a bulk-synchronous program of N ranks, each with {work:.1} us of work, then a barrier; drawn from the measured quanta\n\
         {:>9} {:>12} {:>25} {:>9}\n",
        "ranks", "step us", "90 % of samples", "slowdown"
    );
    for step in &report.model {
        let bounds = format!("{:.1} to {:.1}", step.low_ns / 1e3, step.high_ns / 1e3);
        text +=
            &format!("{:>9} {:>12.1} {bounds:>25} {:>9.4}\n", step.ranks, step.mean_ns / 1e3, step.slowdown);
    }
    text
}

/// Two reports side by side: sources of either, the dearest of both first.
pub fn compared(before: &Report, after: &Report) -> String {
    let mut text = format!("before: {}after:  {}", head(before), head(after));
    let mut sources: Vec<&Source> =
        before.sources.iter().chain(&after.sources).map(|row| &row.source).collect();
    sources.sort();
    sources.dedup();
    let of =
        |report: &Report, source: &Source| report.sources.iter().find(|row| row.source == *source).cloned();
    let cost = |report: &Report, source: &Source| of(report, source).map_or(0.0, |row| row.us_per_second);
    let larger = |source: &Source| cost(before, source).max(cost(after, source));
    sources.sort_by(|a, b| larger(b).total_cmp(&larger(a)));
    let width = width("source", sources.iter().map(ToString::to_string));
    let columns = ["us per s", "after", "change", "longest us", "after"];
    let [first, second, third, fourth, fifth] = columns;
    text +=
        &format!("\n{:<width$} {first:>12} {second:>12} {third:>12} {fourth:>12} {fifth:>12}\n", "source");
    let longest = |row: Option<Row>| row.map_or(0.0, |row| row.longest_us);
    for source in sources {
        let (old, new) = (cost(before, source), cost(after, source));
        let (old_longest, new_longest) = (longest(of(before, source)), longest(of(after, source)));
        let name = source.to_string();
        text += &format!(
            "{name:<width$} {old:>12.1} {new:>12.1} {:>+12.1} {old_longest:>12.1} {new_longest:>12.1}\n",
            new - old
        );
    }
    let sum = |report: &Report| report.sources.iter().map(|row| row.us_per_second).sum::<f64>();
    let (old, new) = (sum(before), sum(after));
    text += &format!("{:<width$} {old:>12.1} {new:>12.1} {:>+12.1}\n", "all", new - old);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;
    use crate::recording::{Gap, Record, Recording};
    use crate::report::{Below, report};
    use crate::source::Kind;

    fn of(length: u64) -> Report {
        let record = Record { cpu: 3, last: 1_000_000_000, work: vec![1_000_000; 4], ..Record::default() };
        let traced = Record { gaps: vec![Gap { start: 0, end: length, smis: 0 }], ..record.clone() };
        let recording = Recording {
            hz: 1_000_000_000,
            event_cost: Some(1),
            plain: vec![record],
            traced: vec![traced],
            ..Recording::default()
        };
        report("host", 5.0, &recording, &Below::default(), None).report
    }

    #[test]
    fn the_table_has_cpus_sources_tracing_model_and_notes() {
        let mut report = of(300_000);
        report.model = model::steps(&[1e6, 2e6], 10);
        report.host =
            vec![Row { source: Source::here(Kind::Thread, "make").on_host(), ..report.sources[0].clone() }];
        let text = text(&report);
        for words in [
            "host: 1 CPUs for 1.0 s, interruptions longer than 5 us",
            "CPU 3          1.0 gaps/s      300.0 us/s, longest 300.0 us",
            "unknown        1.0        300.0        300.0  trace the host",
            "as the clocks of guest and host are not joined",
            "host: thread make",
            "tracing: 1 ns per event",
            "each with 1000.0 us of work",
            "note: SMIs are not counted",
        ] {
            assert!(text.contains(words), "{words} is not in {text}");
        }
    }

    #[test]
    fn two_reports_are_shown_side_by_side() {
        let (before, mut after) = (of(300_000), of(100_000));
        let timer =
            Row { source: Source::here(Kind::Timer, ""), us_per_second: 7.0, ..after.sources[0].clone() };
        after.sources.push(timer);
        let text = compared(&before, &after);
        let lines: Vec<Vec<&str>> =
            text.lines().skip(4).map(|line| line.split_ascii_whitespace().collect()).collect();
        assert_eq!(lines[0], ["unknown", "300.0", "100.0", "-200.0", "300.0", "100.0"], "{text}");
        assert_eq!(lines[1], ["timer", "interrupt", "0.0", "7.0", "+7.0", "0.0", "100.0"], "{text}");
        assert_eq!(lines[2], ["all", "300.0", "107.0", "-193.0"], "{text}");
    }
}
