// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The result: what was measured on each CPU, and a row for each source. All rates are for one CPU, so that runs on different numbers of CPUs can be
//! compared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::attribute::{Explained, Limits, attribute};
use crate::model::{self, Step};
use crate::recording::{Record, Recording};
use crate::source::{Kind, Source, plain_of};
use crate::timeline::{self, Timeline};

/// The version of the JSON.
pub const VERSION: u32 = 1;
/// The way into a handler or thread, and out of it, takes the kernel no longer than the recording of this many events.
const EDGE_EVENTS: u64 = 20;
/// The bounds of that way in nanoseconds, where recording is very cheap (or its cost unknown) or very dear (under emulation).
const EDGE_NS: std::ops::RangeInclusive<u64> = 1_000..=100_000;

/// The result of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// `host`, or the VM's name.
    #[serde(deserialize_with = "plain_of")]
    pub target: String,
    /// Length of a phase in seconds.
    pub seconds: f64,
    /// The shortest gap that was recorded, in microseconds.
    pub threshold_us: f64,
    /// The kernel's events were recorded, so that causes could be named.
    pub traced: bool,
    /// The measured CPUs.
    pub cpus: Vec<Cpu>,
    /// The sources of their interruptions, the dearest first.
    pub sources: Vec<Row>,
    /// Interruptions of the vCPUs' threads by the host's own account, where the clocks of guest and host could not be joined. They are not part of `sources`.
    pub host: Vec<Row>,
    /// The cost of tracing.
    pub tracing: Option<Tracing>,
    /// The modelled cost to a bulk-synchronous program, with `--model-ranks`.
    pub model: Vec<Step>,
    /// Each missing capability or file, with its remedy.
    pub notes: Vec<String>,
}

/// The measurements of a CPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cpu {
    /// The number that the kernel which recorded it has for the CPU.
    pub cpu: u32,
    /// Gaps per second.
    pub gaps_per_second: f64,
    /// Microseconds of gaps per second.
    pub us_per_second: f64,
    /// The longest gap in microseconds.
    pub longest_us: f64,
    /// Microseconds of a quantum of fixed work, without tracing.
    pub work_us: Spread,
    /// Units of work in a slot of fixed time, without tracing.
    pub units: Spread,
    /// System management interrupts were counted.
    pub smis_counted: bool,
    /// The time-stamp counter of that kernel's CPU at the begin of the phase in which causes were recorded. Reports before this field have 0.
    #[serde(default)]
    pub first_tick: u64,
    /// The same at its end.
    #[serde(default)]
    pub last_tick: u64,
}

/// How values are spread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many there are.
    pub count: usize,
    /// The smallest value; 0 if there are none.
    pub least: f64,
    /// Half of them are smaller.
    pub median: f64,
    /// Their mean.
    pub mean: f64,
    /// 99 of 100 are smaller.
    pub p99: f64,
    /// The largest value; 0 if there are none.
    pub most: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let (Some(least), Some(most)) = (values.first().copied(), values.last().copied()) else {
            return Self::default();
        };
        let mean = values.iter().sum::<f64>() / count as f64;
        Self { count, least, median: values[count / 2], mean, p99: values[count * 99 / 100], most }
    }
}

/// A source and what it took, on one CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The cause to which parts of gaps were attributed.
    pub source: Source,
    /// Gaps per second in which it had a part.
    pub per_second: f64,
    /// Microseconds per second.
    pub us_per_second: f64,
    /// Its largest part of a gap, in microseconds.
    pub longest_us: f64,
    /// The administrator's remedy, from [`Source::remedy`].
    pub remedy: String,
}

/// The cost of tracing on one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tracing {
    /// Nanoseconds for the recording of one event.
    pub event_ns: f64,
    /// Microseconds per second that were taken off the sources.
    pub us_per_second: f64,
    /// Microseconds of a quantum of fixed work without tracing.
    pub work_without_us: Spread,
    /// The same with tracing.
    pub work_with_us: Spread,
    /// Events that did not fit into the kernel's buffers.
    pub lost: u64,
}

/// The host's recording below a guest.
#[derive(Clone, Debug, Default)]
pub struct Below {
    /// Interruptions of the thread of each vCPU, by the guest's CPU and the guest's clock.
    pub joined: BTreeMap<u32, Timeline>,
    /// The same by the host's clock, for vCPUs whose clock is not known, with the length of the recording in ticks.
    pub apart: Vec<(Timeline, u64)>,
    /// Ticks per second of the host.
    pub hz: u64,
    /// Each missing capability or file.
    pub notes: Vec<String>,
}

/// A report with the gaps and quanta that it was made of, for its picture.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The report as it is printed, or written as JSON.
    pub report: Report,
    /// The gaps of each CPU, explained.
    pub gaps: Vec<(Record, Vec<Explained>)>,
    /// Microseconds of each quantum of fixed work without tracing, of all CPUs.
    pub plain_us: Vec<f64>,
    /// The same with tracing.
    pub traced_us: Vec<f64>,
    /// Ticks per second.
    pub hz: u64,
}

/// Makes the report of a recording. `ranks` asks for the model.
pub fn report(
    target: &str,
    threshold_us: f64,
    recording: &Recording,
    below: &Below,
    ranks: Option<u64>,
) -> Measured {
    let hz = recording.hz;
    let us = |ticks: f64| ticks * 1e6 / hz as f64;
    let traced = !recording.traced.is_empty();
    let records = if traced { &recording.traced } else { &recording.plain };
    let gaps: Vec<(Record, Vec<Explained>)> =
        records.iter().map(|record| (record.clone(), explain(record, recording, below))).collect();
    let seconds =
        records.iter().map(|record| us((record.last - record.first) as f64) / 1e6).fold(0.0, f64::max);
    let quanta = |records: &[Record]| -> Vec<f64> {
        records.iter().flat_map(|record| &record.work).map(|ticks| us(f64::from(*ticks))).collect()
    };
    let (plain_us, traced_us) = (quanta(&recording.plain), quanta(&recording.traced));
    let all: Vec<&Explained> = gaps.iter().flat_map(|(_, gaps)| gaps).collect();
    let cpu_seconds = (seconds * records.len() as f64).max(f64::MIN_POSITIVE);
    let tracing = traced.then(|| Tracing {
        event_ns: us(recording.event_cost.unwrap_or(0) as f64) * 1e3,
        us_per_second: us(all.iter().map(|one| one.tracing as f64).sum()) / cpu_seconds,
        work_without_us: Spread::of(plain_us.iter().copied()),
        work_with_us: Spread::of(traced_us.iter().copied()),
        lost: recording.lost,
    });
    let nanoseconds: Vec<f64> = plain_us.iter().map(|us| us * 1e3).collect();
    let report = Report {
        version: VERSION,
        target: target.to_owned(),
        seconds,
        threshold_us,
        traced,
        cpus: cpus(recording, records, us),
        sources: rows(
            all.into_iter().flat_map(|one| &one.parts).map(|p| (&p.source, us(p.ticks as f64))),
            cpu_seconds,
        ),
        host: apart(below),
        tracing,
        model: ranks.map(|ranks| model::steps(&nanoseconds, ranks)).unwrap_or_default(),
        notes: notes(recording, records, below),
    };
    Measured { report, gaps, plain_us, traced_us, hz }
}

fn explain(record: &Record, recording: &Recording, below: &Below) -> Vec<Explained> {
    let hz = recording.hz;
    let ticks = |ns: u64| u64::try_from(u128::from(ns) * u128::from(hz) / 1_000_000_000).unwrap_or(u64::MAX);
    let event = recording.event_cost.unwrap_or(0);
    let edge = event.saturating_mul(EDGE_EVENTS).clamp(ticks(*EDGE_NS.start()), ticks(*EDGE_NS.end()));
    let events = recording.trace.get(&record.cpu).map_or(&[][..], Vec::as_slice);
    let here = timeline::of_cpu(events, record.thread, hz);
    let host = below.joined.get(&record.cpu);
    // The hypervisor tells of the time in which the vCPU's thread waited for its CPU, and the host's record names who had it.
    let named = host.map_or(0, |host| host.waited(record.first, record.last));
    let limits = Limits { edge, event, steal: ticks(record.steal_ns).saturating_sub(named) };
    attribute(&record.gaps, &here, host, &limits)
}

fn cpus(recording: &Recording, records: &[Record], us: impl Fn(f64) -> f64) -> Vec<Cpu> {
    let of = |record: &Record| {
        let plain = recording.plain.iter().find(|plain| plain.cpu == record.cpu).unwrap_or(record);
        let seconds = (us((record.last - record.first) as f64) / 1e6).max(f64::MIN_POSITIVE);
        let lengths = || record.gaps.iter().map(|gap| us((gap.end - gap.start) as f64));
        Cpu {
            cpu: record.cpu,
            gaps_per_second: (record.gaps.len() as f64 + record.dropped as f64) / seconds,
            us_per_second: lengths().sum::<f64>() / seconds,
            longest_us: lengths().fold(0.0, f64::max),
            work_us: Spread::of(plain.work.iter().map(|ticks| us(f64::from(*ticks)))),
            units: Spread::of(plain.time.iter().map(|units| f64::from(*units))),
            smis_counted: record.smis_counted,
            first_tick: record.first,
            last_tick: record.last,
        }
    };
    records.iter().map(of).collect()
}

/// A row for each source, the dearest first.
fn rows<'a>(parts: impl Iterator<Item = (&'a Source, f64)>, cpu_seconds: f64) -> Vec<Row> {
    let mut sources: BTreeMap<&Source, (u64, f64, f64)> = BTreeMap::new();
    for (source, us) in parts {
        let (count, sum, longest) = sources.entry(source).or_default();
        (*count, *sum, *longest) = (*count + 1, *sum + us, longest.max(us));
    }
    let row = |(source, (count, sum, longest)): (&Source, (u64, f64, f64))| Row {
        source: source.clone(),
        per_second: count as f64 / cpu_seconds,
        us_per_second: sum / cpu_seconds,
        longest_us: longest,
        remedy: source.remedy().to_owned(),
    };
    let mut rows: Vec<Row> = sources.into_iter().map(row).collect();
    rows.sort_by(|a, b| b.us_per_second.total_cmp(&a.us_per_second));
    rows
}

/// The host's view of vCPUs whose clocks are not joined. A thread that sleeps, as in the guest's idle time, is not held up.
fn apart(below: &Below) -> Vec<Row> {
    let us = |ticks: u64| ticks as f64 * 1e6 / below.hz.max(1) as f64;
    let seconds: f64 = below.apart.iter().map(|(_, ticks)| us(*ticks) / 1e6).sum();
    let spans = below.apart.iter().flat_map(|(timeline, _)| &timeline.spans);
    let held = spans.filter(|span| span.source.kind != Kind::Asleep);
    rows(held.map(|span| (&span.source, us(span.end - span.start))), seconds.max(f64::MIN_POSITIVE))
}

fn notes(recording: &Recording, records: &[Record], below: &Below) -> Vec<String> {
    let mut notes = recording.notes.clone();
    notes.extend(below.notes.iter().cloned());
    let dropped: u64 = records.iter().map(|record| record.dropped).sum();
    if dropped > 0 {
        notes.push(format!("{dropped} gaps were counted but not kept; raise --threshold"));
    }
    if recording.lost > 0 {
        notes.push(format!(
            "{} events did not fit into the kernel's buffers; lower --seconds",
            recording.lost
        ));
    }
    if !records.iter().any(|record| record.smis_counted) {
        notes.push(
            "SMIs are not counted; on Intel's processors: modprobe msr, and run it as root (CAP_SYS_RAWIO)"
                .into(),
        );
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Gap;
    use crate::timeline::Span;
    use crate::trace;

    /// 1 GHz: a tick is a nanosecond.
    fn recording() -> Recording {
        let record = Record {
            cpu: 1,
            thread: 70,
            first: 0,
            last: 1_000_000_000,
            gaps: vec![
                Gap { start: 1000, end: 221_000, smis: 0 },
                Gap { start: 500_000, end: 600_000, smis: 0 },
            ],
            work: vec![1_000_000; 100],
            time: vec![50; 100],
            ..Record::default()
        };
        let text = b"           <...>-70      [001] d....   2000: sched_switch: prev_comm=a prev_pid=70 prev_prio=120 prev_state=R \
            ==> next_comm=plant next_pid=80 next_prio=49\n           <...>-80      [001] d....   220000: sched_switch: \
            prev_comm=plant prev_pid=80 prev_prio=49 prev_state=S ==> next_comm=a next_pid=70 next_prio=120\n";
        let trace = trace::parse(text);
        let plain = Record { work: vec![2_000_000; 100], ..record.clone() };
        Recording {
            hz: 1_000_000_000,
            event_cost: Some(500),
            traced: vec![record],
            plain: vec![plain],
            trace,
            ..Recording::default()
        }
    }

    #[test]
    fn rows_have_rates_of_one_cpu_and_the_overhead_is_taken_off() {
        let report = report("host", 5.0, &recording(), &Below::default(), Some(1000)).report;
        let row = |at: usize| (report.sources[at].source.to_string(), report.sources[at].us_per_second);
        assert_eq!(row(0), ("thread plant".into(), 219.5));
        assert_eq!(row(1), ("unknown".into(), 100.0));
        let tracing = report.tracing.unwrap();
        assert_eq!((tracing.event_ns, tracing.us_per_second), (500.0, 0.5));
        assert_eq!((tracing.work_without_us.median, tracing.work_with_us.median), (2000.0, 1000.0));
        assert_eq!((report.cpus[0].us_per_second, report.cpus[0].work_us.median), (320.0, 2000.0));
        assert_eq!(report.model.len(), 4);
        assert!(report.notes[0].contains("SMIs are not counted"), "{:?}", report.notes);
    }

    #[test]
    fn what_the_host_did_explains_a_guests_gaps_where_the_clocks_are_joined() {
        let source = Source::here(Kind::VmExit, "EPT_VIOLATION").on_host();
        let span = Span { start: 450_000, end: 570_000, source, recorded: true };
        let timeline = Timeline { spans: vec![span], ..Timeline::default() };
        let joined = Below { joined: [(1, timeline.clone())].into(), ..Below::default() };
        let of = |below: &Below| report("a", 5.0, &recording(), below, None).report;
        let rows = |rows: &[Row]| {
            rows.iter().map(|row| (row.source.to_string(), row.us_per_second)).collect::<Vec<_>>()
        };
        let with = of(&joined);
        assert_eq!(
            rows(&with.sources[1..]),
            [("host: VM exit EPT_VIOLATION".into(), 70.0), ("unknown".into(), 30.0)]
        );
        assert!(with.host.is_empty());
        let apart =
            of(&Below { apart: vec![(timeline, 500_000_000)], hz: 1_000_000_000, ..Below::default() });
        assert_eq!(rows(&apart.sources[1..]), [("unknown".into(), 100.0)]);
        assert_eq!(rows(&apart.host), [("host: VM exit EPT_VIOLATION".into(), 240.0)]);
    }

    #[test]
    fn time_that_is_told_as_stolen_is_not_put_to_other_gaps_where_the_host_names_who_had_it() {
        let thread = Source::here(Kind::Thread, "make").on_host();
        let span = Span { start: 450_000, end: 570_000, source: thread, recorded: true };
        let below = Below {
            joined: [(1, Timeline { spans: vec![span], ..Timeline::default() })].into(),
            ..Below::default()
        };
        let of = |told: u64, below: &Below| {
            let mut recording = recording();
            recording.traced[0].steal_ns = told;
            let report = report("a", 5.0, &recording, below, None).report;
            let rows = report.sources[1..].iter().map(|row| (row.source.to_string(), row.us_per_second));
            rows.collect::<Vec<_>>()
        };
        let make = ("host: thread make".to_owned(), 70.0);
        assert_eq!(of(120_000, &below), [make.clone(), ("unknown".into(), 30.0)]);
        assert_eq!(of(200_000, &below), [make, ("steal".into(), 30.0)]);
        assert_eq!(of(200_000, &Below::default()), [("steal".into(), 100.0)]);
    }

    #[test]
    fn a_report_is_read_back_from_its_json() {
        let report = report("host", 5.0, &recording(), &Below::default(), Some(10)).report;
        let json = serde_json::to_string(&report).unwrap();
        let back: Report = serde_json::from_str(&json).unwrap();
        let names = |report: &Report| report.sources.iter().map(|row| row.source.clone()).collect::<Vec<_>>();
        assert_eq!(names(&back), names(&report));
        assert_eq!((back.version, back.cpus.len(), back.model.len()), (VERSION, 1, 2));
    }
}
