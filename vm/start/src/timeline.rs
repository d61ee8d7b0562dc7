// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The timeline of a start: marks from the command to full memory, one JSON line each, appended by the process that sees the event.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Events of a start, in the order they usually come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The user's command began.
    Command,
    /// Devices are with vfio-pci.
    DevicesBound,
    /// QEMU was started.
    Qemu,
    /// QEMU's monitor answers: memory is allocated, devices are open.
    Monitor,
    /// The guest's first instruction.
    FirstInstruction,
    /// The first line of the guest's kernel.
    KernelLine,
    /// The guest took the first block of grown memory.
    FirstBlock,
    /// The guest is up: its login, or its agent, answers.
    Login,
    /// The guest has all of its memory.
    FullMemory,
}

impl Event {
    fn name(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::DevicesBound => "devices bound",
            Self::Qemu => "QEMU started",
            Self::Monitor => "monitor answers",
            Self::FirstInstruction => "first instruction",
            Self::KernelLine => "first kernel line",
            Self::FirstBlock => "first grown block",
            Self::Login => "login",
            Self::FullMemory => "full memory",
        }
    }
}

/// An event and when it was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// The step of the start that was reached.
    pub event: Event,
    /// Seconds of the host's monotonic clock.
    pub at: f64,
}

/// The marks of one start, in a file.
#[derive(Debug, Clone)]
pub struct Timeline {
    path: PathBuf,
}

impl Timeline {
    /// The timeline kept in `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Begins anew.
    pub fn begin(&self) -> io::Result<()> {
        fs::write(&self.path, b"")
    }

    /// Notes that an event happens now.
    pub fn mark(&self, event: Event) -> io::Result<()> {
        self.add(Mark { event, at: now() })
    }

    /// Notes an event with its time. One write appends a whole line, so several processes may do so.
    pub fn add(&self, mark: Mark) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all((serde_json::to_string(&mark)? + "\n").as_bytes())
    }

    /// The marks by time; the first of each event counts.
    pub fn marks(&self) -> io::Result<Vec<Mark>> {
        let mut marks: Vec<Mark> = Vec::new();
        for line in fs::read_to_string(&self.path)?.lines() {
            let mark: Mark = serde_json::from_str(line)?;
            if !marks.iter().any(|m| m.event == mark.event) {
                marks.push(mark);
            }
        }
        marks.sort_by(|a, b| a.at.total_cmp(&b.at));
        Ok(marks)
    }
}

/// Seconds of the host's monotonic clock, the same in every process.
pub fn now() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    #[expect(clippy::cast_precision_loss, reason = "seconds since boot and nanoseconds fit well enough")]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}

/// A table of marks with a bar for the time up to each.
pub fn render(marks: &[Mark], width: usize) -> String {
    let named: Vec<(String, f64)> = marks.iter().map(|m| (m.event.name().to_owned(), m.at)).collect();
    render_names(&named, width)
}

/// The same for events by name and time in seconds, in any order.
pub fn render_names(events: &[(String, f64)], width: usize) -> String {
    let mut events: Vec<&(String, f64)> = events.iter().collect();
    events.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (Some((_, first)), Some((_, last))) = (events.first(), events.last()) else {
        return "nothing was recorded\n".to_owned();
    };
    let span = (last - first).max(1e-9);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "columns of a bar"
    )]
    let column = |at: f64| ((at - first) / span * width as f64).round() as usize;
    let mut text = format!("{:>9} {:>9}  EVENT\n", "AT", "TOOK");
    let mut before = *first;
    for (name, at) in &events {
        let from = column(before);
        let bar = " ".repeat(from) + &"#".repeat(column(*at) - from);
        text += &format!("{:>8.3}s {:>8.3}s  {name:<20} |{bar:<width$}|\n", at - first, at - before);
        before = *at;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_back_in_time_order_and_the_first_of_a_kind_counts() {
        let folder = tempfile::tempdir().unwrap();
        let timeline = Timeline::at(folder.path().join("timeline"));
        timeline.begin().unwrap();
        for (event, at) in
            [(Event::Qemu, 2.0), (Event::Command, 1.0), (Event::Qemu, 9.0), (Event::Login, 5.0)]
        {
            timeline.add(Mark { event, at }).unwrap();
        }
        let marks = timeline.marks().unwrap();
        assert_eq!(marks.iter().map(|m| m.at).collect::<Vec<_>>(), [1.0, 2.0, 5.0]);
        let table = render(&marks, 8);
        assert!(table.contains("   4.000s    3.000s  login                |  ######|"), "{table}");
    }

    #[test]
    fn an_empty_timeline_says_so() {
        assert_eq!(render(&[], 10), "nothing was recorded\n");
    }
}
