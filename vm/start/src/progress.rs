// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Progress of growth: kept in a file beside the VM's other state, for `tombolo ps`, `start blame` and Prometheus.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tombolo_metrics::text::{Kind, Text};

/// The activity of growth, or its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase", content = "reason")]
pub enum Phase {
    /// The guest's driver has not taken anything yet.
    AwaitingDriver,
    /// Memory arrives.
    Growing,
    /// The host has not enough free memory now.
    AwaitingHostMemory,
    /// The guest has all of it.
    Complete,
    /// It will get no more; why.
    Failed(String),
}

/// A moment of growing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The activity now.
    #[serde(flatten)]
    pub phase: Phase,
    /// Bytes the guest has, boot memory included.
    pub present: u64,
    /// Bytes it will have.
    pub total: u64,
    /// Bytes prepared ahead, beyond boot memory.
    pub prepared: u64,
    /// Bytes a second over the last steps.
    pub rate: f64,
    /// Seconds from the start of growing.
    pub elapsed: f64,
    /// Times that the guest started anew and lost what it had.
    pub restarts: u32,
}

impl Progress {
    /// Seconds until all is there at this rate; None when nothing moves.
    pub fn remaining(&self) -> Option<f64> {
        let left = self.total.saturating_sub(self.present);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        (self.rate > 0.0).then(|| left as f64 / self.rate)
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let (present, total) = (self.present >> 20, self.total >> 20);
        match &self.phase {
            Phase::AwaitingDriver => {
                format!("{present} of {total} MiB; waiting for the guest's virtio-mem driver")
            }
            Phase::AwaitingHostMemory => {
                format!("{present} of {total} MiB; waiting for free memory on the host")
            }
            Phase::Complete => format!("{total} MiB, complete after {:.1} s", self.elapsed),
            Phase::Failed(reason) => format!("{present} of {total} MiB and no more: {reason}"),
            Phase::Growing => {
                let left = self.remaining().map_or("?".into(), |s| format!("{s:.0} s"));
                format!("{present} of {total} MiB, {:.0} MiB/s, {left} left", self.rate / f64::from(1 << 20))
            }
        }
    }

    /// Replaces the file at `path`.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, path)
    }

    /// Reads a file that [`Progress::save`] wrote.
    pub fn load(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }
}

/// The figures of growing VMs, by name, in Prometheus' text format.
pub fn prometheus(vms: &[(&str, &Progress)]) -> String {
    let mut text = Text::new("tombolo_start_");
    let mut memory = text.family("memory_bytes", Kind::Gauge, "Memory of a VM, by how far it has come.");
    for (vm, p) in vms {
        for (state, bytes) in [("present", p.present), ("prepared", p.prepared), ("total", p.total)] {
            memory.sample(&[("vm", vm), ("state", state)], bytes);
        }
    }
    type Value = fn(&Progress) -> f64;
    let families: [(&str, Kind, &str, Value); 4] = [
        ("rate_bytes_per_second", Kind::Gauge, "Memory that the guest takes per second.", |p| p.rate.round()),
        ("complete", Kind::Gauge, "1 if the guest has all of its memory.", |p| {
            f64::from(u8::from(p.phase == Phase::Complete))
        }),
        ("failed", Kind::Gauge, "1 if the guest has stopped taking memory.", |p| {
            f64::from(u8::from(matches!(p.phase, Phase::Failed(_))))
        }),
        ("guest_restarts_total", Kind::Counter, "Reboots of the guest while its memory grew.", |p| {
            f64::from(p.restarts)
        }),
    ];
    for (name, kind, help, value) in families {
        let mut family = text.family(name, kind, help);
        for (vm, progress) in vms {
            family.sample(&[("vm", vm)], value(progress));
        }
    }
    text.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half() -> Progress {
        Progress {
            phase: Phase::Growing,
            present: 2 << 30,
            total: 4 << 30,
            prepared: 3 << 30,
            rate: 256.0 * 1024.0 * 1024.0,
            elapsed: 1.0,
            restarts: 0,
        }
    }

    #[test]
    fn the_rest_is_estimated_from_the_rate() {
        assert_eq!(half().remaining(), Some(8.0));
        assert_eq!(half().line(), "2048 of 4096 MiB, 256 MiB/s, 8 s left");
        assert_eq!(Progress { rate: 0.0, ..half() }.remaining(), None);
    }

    #[test]
    fn a_vm_that_stopped_growing_does_not_look_complete() {
        let failed = Progress { phase: Phase::Failed("no memory".into()), ..half() };
        assert!(failed.line().contains("and no more: no memory"));
        let figures = prometheus(&[("a\"b", &failed), ("c", &half())]);
        for line in [
            r#"tombolo_start_complete{vm="a\"b"} 0"#,
            r#"tombolo_start_failed{vm="a\"b"} 1"#,
            "tombolo_start_failed{vm=\"c\"} 0",
            "tombolo_start_memory_bytes{vm=\"c\",state=\"total\"} 4294967296",
        ] {
            assert!(figures.lines().any(|l| l == line), "{line} is not in {figures}");
        }
        assert_eq!(figures.matches("# TYPE tombolo_start_failed ").count(), 1, "{figures}");
    }

    #[test]
    fn progress_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("growth.json");
        for phase in [Phase::Growing, Phase::Complete, Phase::Failed("x".into())] {
            let progress = Progress { phase, ..half() };
            progress.save(&path).unwrap();
            assert_eq!(Progress::load(&path).unwrap(), progress);
        }
    }
}
