// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Offers memory to a guest, step by step, until it has all of it.
//!
//! The first offer is one block: taking it shows that the guest has the driver. Memory is prepared from the first moment on, while the guest
//! boots, by threads that give way to it. Once the first block is taken the offer is what is prepared, at most a step beyond what the
//! guest has. What the guest has is read from QEMU each time, never assumed: it shrinks to nothing when the guest starts anew, and stays
//! behind the offer when the guest takes no more.

use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use crate::ahead::{Ahead, Budget, Prepared};
use crate::layout::{Layout, MIB};
use crate::memory::{MemoryError, Source};
use crate::monitor::{Monitor, MonitorError, driver_runs, plugged, request};
use crate::pace::{Leave, Pace, Share};
use crate::progress::{Phase, Progress};

/// Limits of patience, and where to look for free memory.
pub struct Options {
    /// How long the guest may take to load its driver.
    pub driver_patience: Duration,
    /// The same, once its user space is there.
    pub settled: Duration,
    /// How long the guest may take nothing of an offer.
    pub plug_patience: Duration,
    /// How long to wait for free memory on the host.
    pub memory_patience: Duration,
    /// Between two looks.
    pub tick: Duration,
    /// How much of the time may go to growing, once the guest's driver runs.
    pub share: Share,
    /// Bytes that the host keeps.
    pub reserve: u64,
    /// Bytes the host could give now.
    pub available: Box<dyn Fn() -> u64 + Send>,
}

impl Options {
    /// What fits a host with these limits.
    pub fn for_host(limits: &crate::check::Limits) -> Self {
        Self {
            driver_patience: Duration::from_secs(180),
            settled: Duration::from_secs(10),
            plug_patience: Duration::from_secs(60),
            memory_patience: Duration::from_secs(120),
            tick: Duration::from_millis(50),
            share: Share::ALL,
            reserve: limits.reserve(),
            available: Box::new(|| {
                let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
                crate::check::kib_line(&meminfo, "MemAvailable:").unwrap_or(0)
            }),
        }
    }
}

/// Prepares memory ahead of the offers.
pub trait Prepare {
    /// Begins at the first byte: the guest lost everything, and the pages with it.
    fn restart(&mut self) -> Result<(), MemoryError>;
    /// The guest takes memory from now on, and waits for what is not prepared.
    fn hasten(&mut self);
    /// Go on up to this byte and no further.
    fn allow(&mut self, limit: u64);
    /// What is there.
    fn prepared(&self) -> Result<Prepared, MemoryError>;
}

/// No preparation: everything counts as there.
pub struct Unprepared;

impl Prepare for Unprepared {
    fn restart(&mut self) -> Result<(), MemoryError> {
        Ok(())
    }
    fn hasten(&mut self) {}
    fn allow(&mut self, _: u64) {}
    fn prepared(&self) -> Result<Prepared, MemoryError> {
        Ok(Prepared { ready: u64::MAX, ..Prepared::default() })
    }
}

/// Prepares the memory of a running QEMU.
pub struct FromOutside {
    /// Where it is.
    pub source: Source,
    /// Its size.
    pub size: u64,
    /// The host node that it is bound to.
    pub node: Option<u32>,
    /// What it may cost.
    pub budget: Budget,
    ahead: Option<Ahead>,
}

impl FromOutside {
    /// For the memory of `size` bytes of the process `pid`.
    pub fn of(pid: u32, size: u64, node: Option<u32>, budget: Budget) -> Result<Self, MemoryError> {
        let source = Source::find(std::path::Path::new("/"), pid, size)?;
        Ok(Self { source, size, node, budget, ahead: None })
    }
}

impl Prepare for FromOutside {
    fn restart(&mut self) -> Result<(), MemoryError> {
        // Ends the threads before new ones begin.
        self.ahead = None;
        let memory = self.source.open(self.size, self.budget.huge)?;
        self.ahead = Some(Ahead::start(memory, self.size, 0, self.node, self.budget));
        Ok(())
    }

    fn hasten(&mut self) {
        if let Some(ahead) = &mut self.ahead {
            ahead.hasten();
        }
    }

    fn allow(&mut self, limit: u64) {
        if let Some(ahead) = &self.ahead {
            ahead.allow(limit);
        }
    }

    fn prepared(&self) -> Result<Prepared, MemoryError> {
        self.ahead.as_ref().map_or(Ok(Prepared::default()), Ahead::prepared)
    }
}

/// Why growing ended before the end.
#[derive(Debug, Error)]
pub enum GrowError {
    /// The guest cannot take memory.
    #[error(
        "the guest has no virtio-mem driver running (after {seconds} s): load the module virtio_mem in it and set {}, or start the \
         VM with start = \"slow\"",
        crate::guest::KERNEL_ARGUMENTS
    )]
    NoDriver {
        /// How long it had.
        seconds: u64,
    },
    /// The guest takes no more.
    #[error(
        "the guest stopped at {present} of {total} MiB and took nothing of {offered} MiB more for {seconds} s: look for `virtio_mem` in \
         its kernel log; most often its boot memory is too small for the map of the rest (boot-memory)"
    )]
    Refused {
        /// MiB the guest has.
        present: u64,
        /// MiB it should have.
        total: u64,
        /// MiB of the open offer.
        offered: u64,
        /// How long.
        seconds: u64,
    },
    /// The host has nothing left.
    #[error("the host ran out of memory at {present} of {total} MiB: free some, then `tombolo grow` goes on")]
    HostMemory {
        /// MiB the guest has.
        present: u64,
        /// MiB it should have.
        total: u64,
    },
    /// Preparing failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// QEMU ended or refused.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
}

/// How growing went.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Seconds from the first offer to the last block.
    pub elapsed: f64,
    /// Seconds from the first block to the last.
    pub growing: f64,
    /// Times the guest started anew.
    pub restarts: u32,
    /// What preparing took.
    pub prepared: Prepared,
}

struct Growth<'a> {
    monitor: &'a mut dyn Monitor,
    id: &'a str,
    layout: Layout,
    prepare: &'a mut dyn Prepare,
    options: &'a Options,
    observe: &'a mut dyn FnMut(&Progress),
    pace: Pace,
    began: Instant,
    first_block: Option<Instant>,
    /// Of the guest's memory, at the last look.
    size: u64,
    /// When the guest last took something, or was first offered something after it had taken all.
    moved: Instant,
    waiting_for_memory: Option<Instant>,
    /// Time and size at the last rate.
    measured: (Instant, u64),
    rate: f64,
    restarts: u32,
}

/// Grows the virtio-mem device `id` to the layout's full size. `observe` is called at each look.
pub fn grow(
    monitor: &mut dyn Monitor,
    id: &str,
    layout: Layout,
    prepare: &mut dyn Prepare,
    options: &Options,
    observe: &mut dyn FnMut(&Progress),
) -> Result<Report, GrowError> {
    let now = Instant::now();
    let mut growth = Growth {
        monitor,
        id,
        layout,
        prepare,
        options,
        observe,
        pace: Pace::new(layout, options.share),
        began: now,
        first_block: None,
        size: 0,
        moved: now,
        waiting_for_memory: None,
        measured: (now, 0),
        rate: 0.0,
        restarts: 0,
    };
    let result = growth.run();
    if let Err(error) = &result {
        // The guest is offered what it has, so that nothing arrives later unseen. QEMU may be the one that failed.
        let _ = request(growth.monitor, id, growth.size);
        growth.tell(Phase::Failed(error.to_string()));
    }
    result
}

impl Growth<'_> {
    fn run(&mut self) -> Result<Report, GrowError> {
        self.resume()?;
        loop {
            let now = plugged(self.monitor, self.id)?;
            if now.size < self.size {
                self.restarts += 1;
                self.size = now.size;
                self.resume()?;
                continue;
            }
            if now.size > self.size {
                self.advance(now.size);
            }
            if self.size >= self.layout.grown {
                self.tell(Phase::Complete);
                return self.report();
            }
            let phase = self.offer(now.requested)?;
            self.tell(phase);
            self.monitor.wait(self.pace.wait(self.options.tick, Instant::now()))?;
        }
    }

    /// Begins, or begins anew, from what the guest has now.
    fn resume(&mut self) -> Result<(), GrowError> {
        let now = plugged(self.monitor, self.id)?;
        self.size = now.size;
        self.pace = Pace::new(self.layout, self.options.share);
        self.moved = Instant::now();
        self.measured = (self.moved, now.size);
        self.first_block = (now.size > 0).then_some(self.moved);
        if now.size < self.layout.grown {
            self.prepare.restart()?;
        }
        if now.size > 0 {
            self.prepare.hasten();
        }
        request(self.monitor, self.id, now.size.max(self.layout.block))?;
        Ok(())
    }

    fn advance(&mut self, size: u64) {
        let now = Instant::now();
        if self.first_block.is_none() {
            self.first_block = Some(now);
            self.prepare.hasten();
            // What passed before the guest's driver took the first block says nothing of the rate.
            self.measured = (now, size);
        }
        self.size = size;
        self.moved = now;
        let seconds = now.duration_since(self.measured.0).as_secs_f64();
        if seconds >= 0.2 {
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            let rate = (size - self.measured.1) as f64 / seconds;
            self.rate = if self.rate == 0.0 { rate } else { 0.7 * self.rate + 0.3 * rate };
            self.measured = (now, size);
        }
    }

    /// Lets the preparation go on, offers what is prepared, and tells what is waited for.
    fn offer(&mut self, requested: u64) -> Result<Phase, GrowError> {
        let block = self.layout.block;
        let prepared = self.prepare.prepared()?;
        let Some(leave) = self.leave(prepared.ready) else {
            // The guest's own time. What it has is all that was offered, so it can't be late.
            self.prepare.allow(0);
            self.moved = Instant::now();
            return Ok(Phase::Growing);
        };
        let missing = leave.prepare.saturating_sub(prepared.ready);
        let enough = (self.options.available)() >= missing + self.options.reserve;
        if enough {
            self.prepare.allow(leave.prepare);
            self.waiting_for_memory = None;
        }
        if self.size == 0 {
            return self.await_driver();
        }
        if !enough && prepared.ready <= self.size {
            let since = *self.waiting_for_memory.get_or_insert_with(Instant::now);
            if since.elapsed() > self.options.memory_patience {
                return Err(GrowError::HostMemory { present: self.present(), total: self.total() });
            }
            self.moved = Instant::now();
            self.pace.waited(self.moved);
            return Ok(Phase::AwaitingHostMemory);
        }
        let target = leave.offer.min(prepared.ready) / block * block;
        if target > requested {
            if requested <= self.size {
                self.moved = Instant::now();
            }
            request(self.monitor, self.id, target)?;
        } else if requested <= self.size {
            // Nothing is on offer: the guest cannot be late.
            self.moved = Instant::now();
        } else if self.moved.elapsed() > self.options.plug_patience {
            return Err(GrowError::Refused {
                present: self.present(),
                total: self.total(),
                offered: (requested - self.size) / MIB,
                seconds: self.options.plug_patience.as_secs(),
            });
        }
        Ok(Phase::Growing)
    }

    /// How far preparing and offering may go now. While the guest boots there is no work of its own to spare.
    fn leave(&mut self, ready: u64) -> Option<Leave> {
        if self.size == 0 {
            return Pace::new(self.layout, Share::ALL).leave(0, ready, Instant::now());
        }
        self.pace.leave(self.size, ready, Instant::now())
    }

    fn await_driver(&mut self) -> Result<Phase, GrowError> {
        let waited = self.moved.elapsed();
        let settled = self.monitor.ready_for().is_some_and(|ready| ready > self.options.settled);
        let runs = if settled || waited > self.options.driver_patience {
            driver_runs(self.monitor, self.id)
        } else {
            None
        };
        if waited <= self.options.driver_patience && runs != Some(false) {
            return Ok(Phase::AwaitingDriver);
        }
        let seconds = waited.as_secs();
        match runs {
            Some(true) => Err(GrowError::Refused {
                present: self.present(),
                total: self.total(),
                offered: self.layout.block / MIB,
                seconds,
            }),
            _ => Err(GrowError::NoDriver { seconds }),
        }
    }

    fn present(&self) -> u64 {
        (self.layout.boot + self.size) / MIB
    }

    fn total(&self) -> u64 {
        (self.layout.boot + self.layout.grown) / MIB
    }

    fn tell(&mut self, phase: Phase) {
        let prepared = self.prepare.prepared().map_or(0, |p| p.ready.min(self.layout.grown));
        let progress = Progress {
            phase,
            present: self.layout.boot + self.size,
            total: self.layout.boot + self.layout.grown,
            prepared,
            rate: self.rate,
            elapsed: self.began.elapsed().as_secs_f64(),
            restarts: self.restarts,
        };
        (self.observe)(&progress);
    }

    fn report(&self) -> Result<Report, GrowError> {
        Ok(Report {
            elapsed: self.began.elapsed().as_secs_f64(),
            growing: self.first_block.map_or(0.0, |first| first.elapsed().as_secs_f64()),
            restarts: self.restarts,
            prepared: self.prepare.prepared()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::cell::RefCell;
    use std::rc::Rc;

    const BLOCK: u64 = 16 * MIB;

    /// A guest behind a monitor: takes a block at each look, as its settings allow.
    struct Guest {
        size: u64,
        requested: u64,
        takes_at_most: u64,
        reboots_at: Option<u64>,
        driver: bool,
        dies_at: Option<u64>,
        most_offered_unprepared: u64,
        offers: Vec<u64>,
        ready: Rc<RefCell<u64>>,
        up: Option<Duration>,
    }

    impl Guest {
        fn new() -> Self {
            Self {
                size: 0,
                requested: 0,
                takes_at_most: u64::MAX,
                reboots_at: None,
                driver: true,
                dies_at: None,
                most_offered_unprepared: 0,
                offers: Vec::new(),
                ready: Rc::default(),
                up: None,
            }
        }
    }

    impl Monitor for Guest {
        fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError> {
            match command {
                "query-memory-devices" => {
                    Ok(json!([{"type": "virtio-mem", "data": {"id": "vmem0", "size": self.size,
                    "requested-size": self.requested}}]))
                }
                "qom-set" => {
                    self.requested = arguments["value"].as_u64().unwrap();
                    self.offers.push(self.requested);
                    let unprepared = self.requested.saturating_sub(*self.ready.borrow());
                    self.most_offered_unprepared = self.most_offered_unprepared.max(unprepared);
                    Ok(json!({}))
                }
                "x-query-virtio-status" => {
                    let words = if self.driver { vec!["VIRTIO_CONFIG_S_DRIVER_OK: ready"] } else { vec![] };
                    Ok(json!({"status": {"statuses": words}}))
                }
                other => panic!("{other} is no business of growing"),
            }
        }

        fn ready_for(&self) -> Option<Duration> {
            self.up
        }

        fn wait(&mut self, _: Duration) -> Result<(), MonitorError> {
            if self.dies_at.is_some_and(|at| self.size >= at) {
                return Err(MonitorError::Gone);
            }
            if self.reboots_at.is_some_and(|at| self.size >= at) {
                self.reboots_at = None;
                self.size = 0;
            } else if self.driver && self.size < self.requested.min(self.takes_at_most) {
                self.size += BLOCK;
            }
            Ok(())
        }
    }

    /// Prepares a step at each look, as far as it is allowed, and fails where told.
    struct Pages {
        ready: Rc<RefCell<u64>>,
        limit: u64,
        fails_at: u64,
        starts: u32,
        stops: u32,
        hastened: u32,
    }

    impl Prepare for Pages {
        fn restart(&mut self) -> Result<(), MemoryError> {
            *self.ready.borrow_mut() = 0;
            self.limit = 0;
            self.starts += 1;
            Ok(())
        }
        fn hasten(&mut self) {
            self.hastened += 1;
        }
        fn allow(&mut self, limit: u64) {
            self.limit = limit;
            self.stops += u32::from(limit == 0);
        }
        fn prepared(&self) -> Result<Prepared, MemoryError> {
            let mut ready = self.ready.borrow_mut();
            *ready = (*ready + 3 * BLOCK).min(self.limit).max(*ready);
            if *ready > self.fails_at {
                let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
                return Err(MemoryError::Exhausted { start: 0, end: 0, source });
            }
            Ok(Prepared { ready: *ready, ..Prepared::default() })
        }
    }

    fn options() -> Options {
        Options {
            driver_patience: Duration::from_millis(20),
            settled: Duration::from_millis(20),
            plug_patience: Duration::from_millis(20),
            memory_patience: Duration::from_millis(20),
            tick: Duration::ZERO,
            share: Share::ALL,
            reserve: 0,
            available: Box::new(|| u64::MAX),
        }
    }

    fn run(
        guest: &mut Guest,
        fails_at: u64,
        options: &Options,
    ) -> (Result<Report, GrowError>, Vec<Progress>, Pages) {
        let layout = Layout { boot: 512 * MIB, grown: 1024 * MIB, block: BLOCK, step: 128 * MIB };
        let mut pages =
            Pages { ready: guest.ready.clone(), limit: 0, fails_at, starts: 0, stops: 0, hastened: 0 };
        let mut seen = Vec::new();
        let result = grow(guest, "vmem0", layout, &mut pages, options, &mut |p| seen.push(p.clone()));
        (result, seen, pages)
    }

    #[test]
    fn a_guest_gets_all_of_its_memory_and_only_prepared_memory_after_the_first_block() {
        let mut guest = Guest::new();
        let (result, seen, pages) = run(&mut guest, u64::MAX, &options());
        assert_eq!(result.unwrap().restarts, 0);
        assert_eq!((guest.size, pages.starts, pages.stops, pages.hastened), (1024 * MIB, 1, 0, 1));
        assert!(guest.most_offered_unprepared <= BLOCK);
        let last = seen.last().unwrap();
        assert_eq!((&last.phase, last.present), (&Phase::Complete, 1536 * MIB));
        assert!(seen[..seen.len() - 1].iter().all(|p| p.phase != Phase::Complete));
    }

    #[test]
    fn with_a_share_the_guest_has_pauses_in_which_nothing_is_prepared_or_offered() {
        let mut guest = Guest { reboots_at: Some(512 * MIB), ..Guest::new() };
        let options = Options { share: "50".parse().unwrap(), ..options() };
        let (result, _, pages) = run(&mut guest, u64::MAX, &options);
        assert_eq!((result.unwrap().restarts, guest.size), (1, 1024 * MIB));
        // A pause after each section but the last; the first time the guest rebooted after four.
        assert!(pages.stops >= 3 + 7, "{}", pages.stops);
        let from_first = guest.offers.rsplitn(2, |offer| *offer == BLOCK).next().unwrap();
        for end in (1..=8).map(|section| section * 128 * MIB) {
            let at = from_first.iter().position(|offer| *offer == end).unwrap();
            assert_eq!(from_first[at - 1], end - BLOCK, "{from_first:?}");
        }
    }

    #[test]
    fn a_guest_that_reboots_is_grown_again_from_nothing() {
        let mut guest = Guest { reboots_at: Some(512 * MIB), ..Guest::new() };
        let (result, _, pages) = run(&mut guest, u64::MAX, &options());
        assert_eq!(result.unwrap().restarts, 1);
        assert_eq!((guest.size, pages.starts, pages.hastened), (1024 * MIB, 2, 2));
    }

    #[test]
    fn a_guest_without_the_driver_is_told_apart_from_one_that_refuses() {
        let mut guest = Guest { driver: false, ..Guest::new() };
        let (result, seen, pages) = run(&mut guest, u64::MAX, &options());
        assert!(matches!(result, Err(GrowError::NoDriver { .. })));
        assert_eq!(pages.hastened, 0);
        assert!(
            matches!(&seen.last().unwrap().phase, Phase::Failed(why) if why.contains("start = \"slow\""))
        );
        assert_eq!(guest.requested, 0);
        // Once its user space is there, nobody waits as long as for one that may still be booting.
        let mut guest = Guest { driver: false, up: Some(Duration::from_secs(1)), ..Guest::new() };
        let patient = Options { driver_patience: Duration::from_secs(3600), ..options() };
        assert!(matches!(run(&mut guest, u64::MAX, &patient).0, Err(GrowError::NoDriver { .. })));

        let mut guest = Guest { takes_at_most: 0, ..Guest::new() };
        assert!(matches!(run(&mut guest, u64::MAX, &options()).0, Err(GrowError::Refused { .. })));
    }

    #[test]
    fn a_guest_that_stops_half_way_is_failed_and_offered_nothing_more() {
        let mut guest = Guest { takes_at_most: 512 * MIB, ..Guest::new() };
        let (result, seen, _) = run(&mut guest, u64::MAX, &options());
        assert!(matches!(result, Err(GrowError::Refused { present: 1024, total: 1536, .. })));
        assert_eq!(guest.requested, 512 * MIB);
        assert!(matches!(seen.last().unwrap().phase, Phase::Failed(_)));
    }

    #[test]
    fn a_host_without_memory_is_waited_for_and_then_told() {
        let mut guest = Guest::new();
        let (result, seen, _) =
            run(&mut guest, u64::MAX, &Options { available: Box::new(|| 0), ..options() });
        assert!(matches!(result, Err(GrowError::HostMemory { .. })));
        assert!(seen.iter().any(|p| p.phase == Phase::AwaitingHostMemory));
        assert_eq!(guest.requested, guest.size);
    }

    #[test]
    fn pages_that_cannot_be_made_end_it_with_the_guest_as_it_is() {
        let mut guest = Guest::new();
        let (result, _, _) = run(&mut guest, 400 * MIB, &options());
        assert!(matches!(result, Err(GrowError::Memory(MemoryError::Exhausted { .. }))));
        assert_eq!(guest.requested, guest.size);
    }

    #[test]
    fn a_vm_that_ends_while_it_grows_is_no_success() {
        let mut guest = Guest { dies_at: Some(256 * MIB), ..Guest::new() };
        let (result, seen, _) = run(&mut guest, u64::MAX, &options());
        assert!(matches!(result, Err(GrowError::Monitor(MonitorError::Gone))));
        assert!(matches!(seen.last().unwrap().phase, Phase::Failed(_)));
    }
}
