// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A worker: a thread that polls the transmit queues it owns while there is work, and sleeps on their eventfds when
//! there has been none for a while.
//!
//! Falling asleep is the usual dance: ask every driver for a kick, fence, look once more, sleep. Kicks come on
//! edge-triggered descriptors, so a wake-up costs one system call and no read.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::event::Epoll;
use crate::fault;
use crate::forward::{Forwarder, Pass};
use crate::switch::Switch;
use crate::view::View;
use crate::vring::Vring;

/// How a worker spends its time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long to go on polling after the last frame.
    pub poll: Duration,
    /// The processor to stay on.
    pub cpu: Option<usize>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { poll: Duration::from_micros(50), cpu: None }
    }
}

/// What a worker tells about itself.
#[derive(Debug, Default)]
pub struct Vitals {
    /// Times that it went to sleep.
    pub sleeps: AtomicU64,
    /// Passes that moved frames.
    pub passes: AtomicU64,
}

/// A worker's own things.
pub struct Worker {
    switch: Arc<Switch>,
    index: usize,
    pace: Pace,
    vitals: Arc<Vitals>,
    stop: Arc<AtomicBool>,
    generation: u64,
    view: Arc<View>,
    /// Port and transmit queue.
    queues: Vec<(usize, usize)>,
    epoll: Epoll,
    forwarder: Forwarder,
    faults: usize,
    /// Some queue has no eventfd: look at it every millisecond.
    must_poll: bool,
}

impl Worker {
    /// A worker with number `index` of `switch`, which runs until `stop` is set and it is woken.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(switch: Arc<Switch>, index: usize, pace: Pace, stop: Arc<AtomicBool>) -> io::Result<Self> {
        Ok(Self {
            view: switch.view(),
            switch,
            index,
            pace,
            vitals: Arc::default(),
            stop,
            generation: 0,
            queues: Vec::new(),
            epoll: Epoll::new()?,
            forwarder: Forwarder::default(),
            faults: fault::hits(),
            must_poll: false,
        })
    }

    /// What it tells about itself.
    #[must_use]
    pub fn vitals(&self) -> Arc<Vitals> {
        self.vitals.clone()
    }

    /// Works until told to stop.
    ///
    /// # Errors
    /// The kernel refuses to let it wait.
    pub fn run(mut self) -> io::Result<()> {
        if let Some(cpu) = self.pace.cpu {
            pin(cpu)?;
        }
        let start = Instant::now();
        let poll = self.pace.poll.as_nanos() as u64;
        let mut last_work = 0;
        loop {
            if self.switch.generation() != self.generation {
                if self.stop.load(Ordering::Acquire) {
                    return Ok(());
                }
                self.adopt()?;
            }
            let now = start.elapsed().as_nanos() as u64;
            let mut worked = false;
            for i in 0..self.queues.len() {
                let (port, queue) = self.queues[i];
                match self.forwarder.pass(&self.view, port, queue, now) {
                    Pass::Idle => {}
                    Pass::Worked(_) | Pass::Held(_) => worked = true,
                    Pass::Broken(why) => {
                        stop_port(&self.view, port, &why);
                    }
                }
            }
            for (port, why) in self.forwarder.take_broken() {
                stop_port(&self.view, port, &why);
            }
            if fault::hits() != self.faults {
                self.faults = fault::hits();
                self.stop_robbed();
            }
            if worked {
                last_work = now;
                self.vitals.passes.fetch_add(1, Ordering::Relaxed);
            } else if now - last_work >= poll {
                self.sleep()?;
                last_work = start.elapsed().as_nanos() as u64;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Stops the ports whose memory was taken away.
    #[cold]
    fn stop_robbed(&self) {
        for (i, attached) in self.view.ports().iter().enumerate() {
            let gone = |v: &Vring| v.lock().translator.memory().is_gone();
            if attached.port.vrings().iter().any(gone) {
                stop_port(&self.view, i, &"the front-end took its memory away");
            }
        }
    }

    /// Takes over what has changed: the view, which queues are ours, what wakes us.
    fn adopt(&mut self) -> io::Result<()> {
        self.generation = self.switch.generation();
        self.view = self.switch.view();
        self.queues.clear();
        self.must_poll = false;
        self.epoll = Epoll::new()?;
        self.epoll.add(self.switch.wake(self.index).as_raw_fd(), false)?;
        for (i, attached) in self.view.ports().iter().enumerate() {
            for queue in 0..attached.port.pairs() {
                if (i + queue) % self.switch.workers() != self.index {
                    continue;
                }
                if let Some(uplink) = &attached.uplink {
                    self.queues.push((i, queue));
                    self.epoll.add(uplink.fd(), true)?;
                    continue;
                }
                let vring = attached.port.tx(queue).lock();
                if !vring.is_active() {
                    continue;
                }
                self.queues.push((i, queue));
                match &vring.kick {
                    // One that can't be waited for is looked at like none.
                    Some(kick) if self.epoll.add(kick.as_raw_fd(), true).is_ok() => {}
                    _ => self.must_poll = true,
                }
            }
        }
        Ok(())
    }

    /// Sleeps until a kick or a change, unless there is work after all.
    fn sleep(&mut self) -> io::Result<()> {
        let mut work = false;
        for &(port, queue) in &self.queues {
            match self.view.ports()[port].port.tx(queue).try_lock() {
                Some(mut vring) => {
                    let pending = !vring.window.is_empty();
                    work |= pending || vring.ring.as_mut().is_some_and(crate::ring::Ring::arm);
                }
                None => work = true,
            }
        }
        if !work && self.switch.generation() == self.generation {
            self.vitals.sleeps.fetch_add(1, Ordering::Relaxed);
            self.epoll.wait(if self.must_poll { 1 } else { -1 })?;
            self.switch.wake(self.index).clear();
        }
        for &(port, queue) in &self.queues {
            if let Some(ring) = &mut self.view.ports()[port].port.tx(queue).lock().ring {
                ring.disarm();
            }
        }
        Ok(())
    }
}

/// Stops a port that broke the rules, and says so.
#[cold]
fn stop_port(view: &View, index: usize, why: &dyn std::fmt::Display) {
    let port = &view.ports()[index].port;
    tracing::warn!(port = port.name(), %why, "port is stopped until its front-end starts it anew");
    port.fail();
}

/// Keeps the calling thread on one processor.
///
/// # Errors
/// There is no such processor for us.
pub fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: an all-zero set is valid, and CPU_SET checks its bounds.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) != 0 {
            let err = io::Error::last_os_error();
            return Err(io::Error::new(err.kind(), format!("can't run on CPU {cpu}: {err}")));
        }
    }
    Ok(())
}
