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

use crate::ahead::Prepared;
use crate::layout::{Layout, MIB};
use crate::memory::MemoryError;
use crate::monitor::{Monitor, MonitorError, driver_runs, plugged, request};
use crate::pace::{Leave, Pace, Share};
use crate::prepare::Prepare;
use crate::progress::{Phase, Progress};

/// Time limits, and the source of free memory.
pub struct Options {
    /// Time for the guest to load its driver.
    pub driver_timeout: Duration,
    /// Time for the guest to load its driver once its user space runs.
    pub settled: Duration,
    /// Time for the guest to take a block of an offer.
    pub offer_timeout: Duration,
    /// Time for the host to have free memory.
    pub memory_timeout: Duration,
    /// The pause between two queries of the guest's size.
    pub tick: Duration,
    /// The share of the time in which memory may grow, once the guest's driver runs.
    pub share: Share,
    /// Bytes that the host keeps.
    pub reserve: u64,
    /// Returns the bytes that the host can give now.
    pub available: Box<dyn Fn() -> u64 + Send>,
}

impl Options {
    /// The options for a host with these limits.
    pub fn for_host(limits: &crate::check::Limits) -> Self {
        Self {
            driver_timeout: Duration::from_secs(180),
            settled: Duration::from_secs(10),
            offer_timeout: Duration::from_secs(60),
            memory_timeout: Duration::from_secs(120),
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

/// The reason for which a guest did not get all of its memory.
#[derive(Debug, Error)]
pub enum GrowError {
    /// The guest has no driver for memory that is added.
    #[error(
        "the guest has no virtio-mem driver running (after {seconds} s): load the module virtio_mem in it and set {}, or start the \
         VM with start = \"slow\"",
        crate::guest::KERNEL_ARGUMENTS
    )]
    NoDriver {
        /// Seconds that it had.
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
        /// Seconds without a new block.
        seconds: u64,
    },
    /// The host has no free memory.
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

/// Times and counts of a growth that is complete.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Seconds from the first offer to the last block.
    pub elapsed: f64,
    /// Seconds from the first block to the last.
    pub growing: f64,
    /// Times the guest started anew.
    pub restarts: u32,
    /// The cost of preparation.
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
    /// Bytes that the guest has, at the last query.
    size: u64,
    /// The time of the last new block, or of the first offer after the guest had taken everything.
    moved: Instant,
    waiting_for_memory: Option<Instant>,
    /// Time and size at the last rate.
    measured: (Instant, u64),
    rate: f64,
    restarts: u32,
}

/// Grows the virtio-mem device `id` to the layout's full size. `observe` is called after each query.
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

    /// Begins, also after the guest started anew, with the memory that the guest has now.
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
            // The time before the guest's driver took the first block is not part of the rate.
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

    /// Lets the preparation go on and offers the prepared memory. Returns what growth waits for.
    fn offer(&mut self, requested: u64) -> Result<Phase, GrowError> {
        let block = self.layout.block;
        let prepared = self.prepare.prepared()?;
        let Some(leave) = self.leave(prepared.ready) else {
            // This time is the guest's. It has everything that was offered, so it can't be late.
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
            if since.elapsed() > self.options.memory_timeout {
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
            // Nothing is offered, so the guest can't be late.
            self.moved = Instant::now();
        } else if self.moved.elapsed() > self.options.offer_timeout {
            return Err(GrowError::Refused {
                present: self.present(),
                total: self.total(),
                offered: (requested - self.size) / MIB,
                seconds: self.options.offer_timeout.as_secs(),
            });
        }
        Ok(Phase::Growing)
    }

    /// The bytes up to which preparation and offers may go now; `None`: this time is the guest's. A guest that boots has no work that growth
    /// could disturb.
    fn leave(&mut self, ready: u64) -> Option<Leave> {
        if self.size == 0 {
            return Pace::new(self.layout, Share::ALL).leave(0, ready, Instant::now());
        }
        self.pace.leave(self.size, ready, Instant::now())
    }

    fn await_driver(&mut self) -> Result<Phase, GrowError> {
        let waited = self.moved.elapsed();
        let settled = self.monitor.ready_for().is_some_and(|ready| ready > self.options.settled);
        let runs = if settled || waited > self.options.driver_timeout {
            driver_runs(self.monitor, self.id)
        } else {
            None
        };
        if waited <= self.options.driver_timeout && runs != Some(false) {
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
mod tests;
