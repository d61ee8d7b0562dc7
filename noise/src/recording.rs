// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what the collector wrote (`collector/src/output.rs`). It may come from a guest, so nothing in it is believed to be in order: what is not
//! as the collector writes it is an error that names the line.

use anyhow::{Context, Result, bail, ensure};

use crate::trace::{self, Trace};

/// The first line of an output of this version.
const HEAD: &str = "tombolo-noise 1";
/// The frequencies that a time-stamp counter can have, in Hz.
const FREQUENCIES: std::ops::RangeInclusive<u64> = 1_000_000..=100_000_000_000;

/// A time in which something else had the CPU, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The time-stamp counter when the program last had the CPU.
    pub start: u64,
    /// Its end; not before its begin.
    pub end: u64,
    /// System management interrupts in it, where they could be counted.
    pub smis: u32,
}

/// The measurements of one CPU in one phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The CPU.
    pub cpu: u32,
    /// The thread that measured.
    pub thread: u32,
    /// The first reading in ticks.
    pub first: u64,
    /// The last reading in ticks; not before the first.
    pub last: u64,
    /// Gaps that were not kept.
    pub dropped: u64,
    /// Stolen time in nanoseconds.
    pub steal_ns: u64,
    /// System management interrupts were counted.
    pub smis_counted: bool,
    /// In order, without overlaps.
    pub gaps: Vec<Gap>,
    /// Ticks of each quantum of fixed work.
    pub work: Vec<u32>,
    /// Units done in each slot of fixed time.
    pub time: Vec<u32>,
}

/// The output of one collector.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Ticks per second.
    pub hz: u64,
    /// Ticks that the recording of one event takes; none where nothing was traced.
    pub event_cost: Option<u64>,
    /// Units of work in a quantum of fixed work.
    pub units: u64,
    /// Ticks of a slot of fixed time.
    pub slot: u64,
    /// Each missing capability or file, in words for the user.
    pub notes: Vec<String>,
    /// CPUs without tracing.
    pub plain: Vec<Record>,
    /// CPUs with tracing; empty where there is none.
    pub traced: Vec<Record>,
    /// Events that did not fit into the kernel's buffers.
    pub lost: u64,
    /// Events by CPU.
    pub trace: Trace,
}

/// Reads the output of a collector.
///
/// # Errors
/// It is not such an output, or not all of it.
pub fn parse(output: &[u8]) -> Result<Recording> {
    let mut recording = Recording::default();
    let (mut traced, mut trace, mut complete) = (false, Vec::new(), false);
    for (number, line) in output.split(|byte| *byte == b'\n').enumerate() {
        if let Some(event) = line.strip_prefix(b"|") {
            trace.extend_from_slice(event);
            trace.push(b'\n');
            continue;
        }
        let line = String::from_utf8_lossy(line);
        if number == 0 {
            ensure!(line == HEAD, "it does not begin with '{HEAD}'");
            continue;
        }
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match (word, rest) {
            ("phase", "traced") => traced = true,
            ("end", _) => complete = true,
            ("", _) | ("watching", _) | ("phase", "plain") => {}
            _ => {
                let records = if traced { &mut recording.traced } else { &mut recording.plain };
                let read = match word {
                    "cpu" | "gap" | "work" | "time" => of_cpu(records, word, rest),
                    _ => of_all(&mut recording, word, rest),
                };
                read.with_context(|| format!("line {} is not as the collector writes it", number + 1))?;
            }
        }
    }
    ensure!(complete, "it is not complete");
    ensure!(FREQUENCIES.contains(&recording.hz), "its clock has {} Hz", recording.hz);
    recording.trace = trace::parse(&trace);
    Ok(recording)
}

fn of_all(recording: &mut Recording, word: &str, rest: &str) -> Result<()> {
    match word {
        "clock" => recording.hz = rest.parse()?,
        "event-cost" => recording.event_cost = Some(rest.parse()?),
        "lost" => recording.lost = rest.parse()?,
        "note" => recording.notes.push(rest.chars().filter(|c| !c.is_control()).collect()),
        "quantum" => {
            let [units, slot] = numbers(rest)?;
            (recording.units, recording.slot) = (units, slot);
        }
        _ => bail!("'{}' is unknown", word.escape_debug()),
    }
    Ok(())
}

fn of_cpu(records: &mut Vec<Record>, word: &str, rest: &str) -> Result<()> {
    if word == "cpu" {
        let [cpu, thread, first, last, dropped, steal_ns, smis] = numbers(rest)?;
        ensure!(first <= last, "it ends before it begins");
        records.push(Record {
            cpu: u32::try_from(cpu)?,
            thread: u32::try_from(thread)?,
            first,
            last,
            dropped,
            steal_ns,
            smis_counted: smis != 0,
            ..Record::default()
        });
        return Ok(());
    }
    let record = records.last_mut().context("it belongs to no CPU")?;
    if word == "gap" {
        let [start, end, smis] = numbers(rest)?;
        let free = record.gaps.last().map_or(record.first, |gap| gap.end);
        ensure!(free <= start && start <= end && end <= record.last, "a gap is not in its place");
        record.gaps.push(Gap { start, end, smis: u32::try_from(smis)? });
        return Ok(());
    }
    let to = if word == "work" { &mut record.work } else { &mut record.time };
    for value in rest.split_ascii_whitespace() {
        to.push(value.parse()?);
    }
    Ok(())
}

fn numbers<const N: usize>(text: &str) -> Result<[u64; N]> {
    let numbers: Result<Vec<u64>, _> = text.split_ascii_whitespace().map(str::parse).collect();
    let found: Result<[u64; N], _> = numbers?.try_into();
    found.map_err(|found: Vec<u64>| anyhow::anyhow!("{} numbers in place of {N}", found.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OUTPUT: &str = "tombolo-noise 1\nnote no msr\nclock 2000000000\nevent-cost 300\nquantum 50 2000000\nphase plain\n\
        cpu 1 70 100 900 0 0 0\nwork 5 6\nwork 7\nphase traced\ncpu 1 71 1000 1900 2 10 1\ngap 1100 1200 0\ngap 1200 1300 1\n\
        time 9\nlost 3\n|          <idle>-0       [001] d.h1.   110: irq_handler_exit: irq=4 ret=handled\nend\n";

    #[test]
    fn what_the_collector_writes_is_read() {
        let read = parse(OUTPUT.as_bytes()).unwrap();
        assert_eq!(
            (read.hz, read.event_cost, read.units, read.slot, read.lost),
            (2_000_000_000, Some(300), 50, 2_000_000, 3)
        );
        assert_eq!(read.notes, ["no msr"]);
        assert_eq!(read.plain[0].work, [5, 6, 7]);
        let traced = &read.traced[0];
        assert_eq!((traced.thread, traced.dropped, traced.smis_counted), (71, 2, true));
        assert_eq!(
            traced.gaps,
            [Gap { start: 1100, end: 1200, smis: 0 }, Gap { start: 1200, end: 1300, smis: 1 }]
        );
        assert_eq!(read.trace[&1].len(), 1);
    }

    #[test]
    fn half_an_output_and_a_wrong_one_are_refused() {
        let refused = |text: String| format!("{:#}", parse(text.as_bytes()).unwrap_err());
        assert!(refused(OUTPUT.replace("\nend", "")).contains("not complete"));
        assert!(refused(OUTPUT.replace("clock 2000000000", "clock 0")).contains("0 Hz"));
        assert!(refused(OUTPUT.replace("1200 1300", "1150 1300")).contains("a gap is not in its place"));
        assert!(
            refused(OUTPUT.replace("1200 1300", "1200 1901"))
                .contains("line 13 is not as the collector writes it")
        );
        assert!(refused(OUTPUT.replace("note", "\u{1b}[2J")).contains("'\\u{1b}[2J' is unknown"));
        assert!(refused(String::new()).contains("does not begin"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(head: bool, bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            let text = if head { [HEAD.as_bytes(), b"\n", &bytes].concat() } else { bytes };
            prop_assert!(parse(&text).is_err(), "a clock and an end come by chance");
        }

        #[test]
        fn damaged_outputs_are_read_or_refused(at in 0..OUTPUT.len(), byte: u8, cut in 0..OUTPUT.len()) {
            let mut text = OUTPUT.as_bytes().to_vec();
            text[at] = byte;
            text.truncate(cut.max(at + 1));
            if let Ok(read) = parse(&text) {
                let ordered = |record: &Record| record.gaps.windows(2).all(|two| two[0].end <= two[1].start);
                prop_assert!(read.plain.iter().chain(&read.traced).all(ordered));
            }
        }
    }
}
