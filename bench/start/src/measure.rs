// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One start, from the command to full memory.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tombolo_passthrough::address::Address;
use tombolo_start::ahead::Budget;
use tombolo_start::check::Limits;
use tombolo_start::grow::{Options, Report, grow};
use tombolo_start::layout::{Layout, Wish};
use tombolo_start::monitor::{Monitor, MonitorError, Socket};
use tombolo_start::pace::Share;
use tombolo_start::prepare::{Prepare, ProcessMemory, Unprepared};
use tombolo_start::progress::Progress;
use tombolo_start::timeline::{Event, now};

use crate::nested::{Backing, Guest, Image, MEMORY, Spec};

/// Percent of the time that growing may take of a paced VM's: what the bar of 90 % leaves.
const SHARE: u32 = 10;

/// The way in which a VM is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// Fast start.
    Tombolo,
    /// Fast start with a share of [`SHARE`].
    TomboloPaced,
    /// virtio-mem grown with nothing prepared.
    VirtioMem,
    /// QEMU as shipped.
    Qemu,
    /// QEMU as VMs with vhost-user devices or virtiofs have it: the memory is a memfd that others map.
    QemuShared,
    /// QEMU with reserved huge pages and preallocation threads.
    QemuTuned,
}

impl System {
    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tombolo => "tombolo",
            Self::TomboloPaced => "tombolo-paced",
            Self::VirtioMem => "virtio-mem",
            Self::Qemu => "qemu",
            Self::QemuShared => "qemu-shared",
            Self::QemuTuned => "qemu-tuned",
        }
    }

    fn grows(self) -> bool {
        matches!(self, Self::Tombolo | Self::TomboloPaced | Self::VirtioMem)
    }

    fn backing(self) -> Backing {
        match self {
            Self::QemuShared => Backing::Shared,
            Self::QemuTuned => Backing::Tuned,
            Self::Tombolo | Self::TomboloPaced | Self::VirtioMem | Self::Qemu => Backing::Plain,
        }
    }

    fn share(self) -> Result<Share> {
        match self {
            Self::TomboloPaced => Share::try_from(SHARE).map_err(anyhow::Error::msg),
            _ => Ok(Share::ALL),
        }
    }
}

/// Times of one start, in seconds from QEMU's start.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// The monitor answers.
    pub monitor: f64,
    /// First line of the guest's kernel.
    pub kernel: f64,
    /// The guest is up.
    pub login: f64,
    /// It has all of its memory.
    pub full: f64,
    /// The growth of the memory, if it grew.
    pub growth: Option<Growth>,
}

/// Growing, as seen from the host and from the guest's work.
#[derive(Debug, Clone, Serialize)]
pub struct Growth {
    /// GiB a second, first block to last.
    pub gib_per_second: f64,
    /// Rounds of work a second while growing, and after.
    pub work: Option<(f64, f64)>,
    /// The grower's own account.
    pub report: Report,
}

/// The parts in which the memory of a VM of `total` bytes arrives under a system.
pub fn layout(system: System, total: u64) -> Result<Layout> {
    if !system.grows() {
        return Ok(Layout::slow(total));
    }
    let limits = Limits::read(std::path::Path::new("/"))?;
    Ok(Wish { total, boot: None, dma_entries: limits.dma_entries }.layout()?)
}

/// Starts one VM of `total` bytes and measures it. With `work`, growing begins only once the guest works, and
/// the guest works on for a while afterwards, so that both rates are known.
pub fn start(
    system: System,
    total: u64,
    device: Option<Address>,
    image: &Image,
    work: bool,
) -> Result<Figures> {
    let layout = layout(system, total)?;
    let mut guest = Guest::start(&Spec { layout, backing: system.backing(), device, image: image.clone() })?;
    let mut growth = None;
    if layout.grown > 0 {
        if work {
            guest.await_line("TOMBOLO work 3 ")?;
        }
        growth = Some(grow_guest(&mut guest, system, layout, work)?);
    } else {
        guest.mark(Event::FullMemory, guest.at(Event::FirstInstruction).context("not started")?);
    }
    if guest.at(Event::Login).is_none() {
        guest.await_line("TOMBOLO login")?;
    }
    Ok(Figures {
        monitor: guest.since_start(Event::Monitor)?,
        kernel: guest.since_start(Event::KernelLine)?,
        login: guest.since_start(Event::Login)?,
        full: guest.since_start(Event::FullMemory)?,
        growth,
    })
}

/// Grows a guest to its full size and notes when it had it.
pub fn grow_to_full(guest: &mut Guest, layout: Layout, system: System) -> Result<(Report, Vec<Progress>)> {
    let limits = Limits::read(std::path::Path::new("/"))?;
    let mut prepare: Box<dyn Prepare> = if system == System::VirtioMem {
        Box::new(Unprepared)
    } else {
        Box::new(ProcessMemory::of(guest.pid(), layout.grown, None, Budget::default())?)
    };
    let mut seen: Vec<Progress> = Vec::new();
    let mut first = None;
    let options = Options { share: system.share()?, ..Options::for_host(&limits) };
    let report =
        grow(&mut Shared(&mut guest.monitor), MEMORY, layout, &mut *prepare, &options, &mut |progress| {
            if first.is_none() && progress.present > layout.boot {
                first = Some(now());
            }
            seen.push(progress.clone());
        })?;
    guest.mark(Event::FirstBlock, first.unwrap_or_else(now));
    guest.mark(Event::FullMemory, now());
    Ok((report, seen))
}

/// A monitor that is lent out.
struct Shared<'a>(&'a mut Socket);

impl Monitor for Shared<'_> {
    fn execute(
        &mut self,
        command: &'static str,
        arguments: serde_json::Value,
    ) -> Result<serde_json::Value, MonitorError> {
        self.0.execute(command, arguments)
    }
    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError> {
        self.0.wait(longest)
    }
}

/// Rounds of work that are at least waited for after growing, to know the undisturbed rate.
const ROUNDS_AFTER: u64 = 20;

fn grow_guest(guest: &mut Guest, system: System, layout: Layout, work: bool) -> Result<Growth> {
    let began = now();
    let (report, _) = grow_to_full(guest, layout, system)?;
    let full = guest.at(Event::FullMemory).context("not full")?;
    let rates = if work { Some(work_rates(guest, began, full)?) } else { None };
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let gib = layout.grown as f64 / f64::from(1 << 30);
    Ok(Growth { gib_per_second: gib / report.growing.max(1e-9), work: rates, report })
}

/// Rounds a second between `began` and `full`, and for as long after it.
fn work_rates(guest: &mut Guest, began: f64, full: f64) -> Result<(f64, f64)> {
    let mut rounds: Vec<(f64, u64)> =
        guest.new_lines().iter().filter_map(|(at, line)| Some((*at, round(line)?))).collect();
    let enough = |rounds: &[(f64, u64)]| {
        let after = rounds.iter().filter(|(at, _)| *at > full);
        matches!((after.clone().next(), after.clone().next_back()),
            (Some(a), Some(b)) if b.1 - a.1 >= ROUNDS_AFTER && b.0 - full >= full - began)
    };
    while !enough(&rounds) {
        let (at, line) = guest.await_line("TOMBOLO work ")?;
        rounds.extend(round(&line).map(|n| (at, n)));
    }
    let rate = |from: f64, to: f64| {
        let inside: Vec<_> = rounds.iter().filter(|(at, _)| (from..=to).contains(at)).collect();
        match (inside.first(), inside.last()) {
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            (Some(first), Some(last)) if last.1 > first.1 => {
                Ok((last.1 - first.1) as f64 / (last.0 - first.0))
            }
            _ => bail!("the guest did not work between {from:.1} and {to:.1}"),
        }
    };
    Ok((rate(began, full)?, rate(full, f64::INFINITY)?))
}

/// The number of a line that tells of work.
fn round(line: &str) -> Option<u64> {
    line.split("TOMBOLO work ").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// The memory that a line tells of, in bytes.
pub fn memory_in(line: &str) -> Option<u64> {
    line.split("TOMBOLO work ").nth(1)?.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}
