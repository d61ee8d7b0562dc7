// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The time-stamp counter of a guest under KVM: the host's, scaled and shifted. KVM shows both numbers for each vCPU in debugfs.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::timeline::{Span, Timeline};

/// KVM's folder in debugfs.
const DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// How a vCPU's time-stamp counter follows from the host's: `(host * ratio >> fraction) + offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestClock {
    offset: i64,
    ratio: u64,
    fraction: u32,
}

impl GuestClock {
    /// The clock of a vCPU of the VM whose QEMU is `process`.
    ///
    /// # Errors
    /// KVM does not show it; the remedy is named.
    pub fn of(process: u32, vcpu: u32) -> Result<Self> {
        Self::below(Path::new(DEBUGFS), process, vcpu).context(
            "the guest's TSC offset is not known, so what the host did is not joined with the guest's gaps; \
             run it as root, with debugfs mounted (mount -t debugfs nodev /sys/kernel/debug)",
        )
    }

    fn below(folder: &Path, process: u32, vcpu: u32) -> Result<Self> {
        let entries =
            std::fs::read_dir(folder).with_context(|| format!("{} can't be read", folder.display()))?;
        let prefix = format!("{process}-");
        let vm = entries.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        let vm = vm.with_context(|| format!("{} has no VM of the process {process}", folder.display()))?;
        let folder = vm.path().join(format!("vcpu{vcpu}"));
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))
        };
        let offset = read("tsc-offset")?.trim().parse().context("the offset is no number")?;
        // Processors that can't scale have neither file.
        let (ratio, fraction) = match (read("tsc-scaling-ratio"), read("tsc-scaling-ratio-frac-bits")) {
            (Ok(ratio), Ok(fraction)) => (ratio.trim().parse()?, fraction.trim().parse()?),
            _ => (1, 0),
        };
        Ok(Self { offset, ratio, fraction })
    }

    /// The clock where it is still the same at the end of a measurement.
    ///
    /// # Errors
    /// KVM has changed it meanwhile, as it does where the host's own counter is not stable.
    pub fn unchanged(self, end: Self) -> Result<Self> {
        ensure!(
            self == end,
            "the host has moved the guest's TSC during the measurement, as KVM does where the host's own is not stable (its kernel's log says why), \
             so what the host did is not joined with the guest's gaps; where the host's TSC is known to be stable, boot it with tsc=reliable"
        );
        Ok(end)
    }

    /// The guest's counter at a moment of the host's.
    pub fn guest(&self, host: u64) -> u64 {
        let scaled = u128::from(host) * u128::from(self.ratio);
        let scaled = scaled.checked_shr(self.fraction).unwrap_or(0) as u64;
        scaled.wrapping_add_signed(self.offset)
    }

    /// A timeline of the host's, by the guest's clock.
    #[must_use]
    pub fn joined(&self, host: &Timeline) -> Timeline {
        // Recording them took the host's time, which is not known here.
        let span = |span: &Span| Span {
            start: self.guest(span.start),
            end: self.guest(span.end),
            recorded: false,
            source: span.source.clone(),
        };
        // Before the guest's counter began its time was negative: such spans would wrap around.
        let spans = host.spans.iter().map(span).filter(|span| span.start < span.end);
        let mut spans: Vec<Span> = spans.collect();
        spans.sort_by_key(|span| span.start);
        let awaited = host.awaited.iter().map(span).filter(|span| span.start < span.end).collect();
        Timeline { spans, awaited, ..Timeline::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Kind, Source};

    #[test]
    fn a_guests_clock_is_read_from_debugfs() {
        let folder = tempfile::tempdir().unwrap();
        let vcpu = folder.path().join("70-12/vcpu1");
        std::fs::create_dir_all(&vcpu).unwrap();
        std::fs::write(vcpu.join("tsc-offset"), "-1000\n").unwrap();
        let plain = GuestClock::below(folder.path(), 70, 1).unwrap();
        assert_eq!(plain.guest(5000), 4000);
        // Half the host's frequency.
        std::fs::write(vcpu.join("tsc-scaling-ratio"), "140737488355328\n").unwrap();
        std::fs::write(vcpu.join("tsc-scaling-ratio-frac-bits"), "48\n").unwrap();
        let scaled = GuestClock::below(folder.path(), 70, 1).unwrap();
        assert_eq!(scaled.guest(5000), 1500);
        let error = format!("{:#}", GuestClock::below(folder.path(), 7, 1).unwrap_err());
        assert!(error.contains("has no VM of the process 7"), "{error}");
    }

    #[test]
    fn a_clock_that_was_moved_during_the_measurement_joins_nothing() {
        let clock = GuestClock { offset: -1000, ratio: 1, fraction: 0 };
        assert_eq!(clock.unchanged(clock).unwrap(), clock);
        let moved = clock.unchanged(GuestClock { offset: -990, ..clock }).unwrap_err().to_string();
        assert!(moved.contains("moved the guest's TSC") && moved.contains("tsc=reliable"), "{moved}");
    }

    #[test]
    fn a_timeline_of_the_hosts_is_moved_to_the_guests_clock() {
        let span =
            |start, end| Span { start, end, source: Source::here(Kind::VmExit, "HLT"), recorded: true };
        let host = Timeline { spans: vec![span(900, 1100), span(5000, 6000)], ..Timeline::default() };
        let clock = GuestClock { offset: -1000, ratio: 1, fraction: 0 };
        assert_eq!(clock.joined(&host).spans, [Span { recorded: false, ..span(4000, 5000) }]);
    }
}
