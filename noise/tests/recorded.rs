// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recordings of a guest of the kit (6.12, two CPUs, TCG), made as `planted.rs` makes them: `planted` has a real-time thread every 10 ms for 200 µs,
//! which has written when it had the CPU; `quiet` has none.

use std::path::Path;

use tombolo_noise::recording::{self, Recording};
use tombolo_noise::report::{Below, Measured, report};
use tombolo_noise::source::{Kind, Source};

fn read(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(name)).unwrap()
}

fn measured(name: &str) -> (Recording, Measured) {
    let recording = recording::parse(read(name).as_bytes()).unwrap();
    let measured = report("host", 5.0, &recording, &Below::default(), None);
    (recording, measured)
}

fn plant() -> Source {
    Source::here(Kind::Thread, "noise-plant")
}

#[test]
fn a_planted_thread_has_its_time() {
    let (recording, measured) = measured("planted.txt");
    let record = &recording.traced[0];
    let mut planted = Vec::new();
    for line in read("planted.truth").lines() {
        let (start, end) = line.split_once(' ').unwrap();
        let (start, end): (u64, u64) = (start.parse().unwrap(), end.parse().unwrap());
        if record.first <= start && end <= record.last {
            planted.push((start, end));
        }
    }
    let ticks: u64 = planted.iter().map(|(start, end)| end - start).sum();
    let explained = &measured.gaps[0].1;
    let found: u64 = explained.iter().map(|gap| gap.of(&plant())).sum();
    assert!(planted.len() > 30 && found * 100 >= ticks * 95, "{found} of {ticks} in {}", planted.len());
    // It has no part of a gap in which it did not run.
    for gap in explained.iter().filter(|gap| gap.of(&plant()) > 0) {
        let ran = recording.trace[&record.cpu]
            .iter()
            .any(|event| (gap.gap.start..=gap.gap.end).contains(&event.at));
        assert!(ran, "{gap:?}");
    }
}

#[test]
fn where_nothing_is_planted_nothing_is_invented() {
    let (recording, measured) = measured("quiet.txt");
    assert_eq!(recording.lost, 0);
    let sources: Vec<&Source> = measured.report.sources.iter().map(|row| &row.source).collect();
    assert!(!sources.contains(&&plant()));
    assert!(sources.contains(&&Source::here(Kind::Timer, "")), "{sources:?}");
    // The names of all sources stand in the trace, or say that nothing was recorded.
    let text = read("quiet.txt");
    let unnamed = |source: &Source| source.name.is_empty() || source.name == "idle";
    let named = |source: &&Source| !unnamed(source) && source.kind == Kind::Thread;
    for source in sources.iter().copied().filter(named) {
        assert!(text.contains(&format!("next_comm={} ", source.name)), "{source}");
    }
}
