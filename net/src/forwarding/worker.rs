// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A worker: a thread that polls the transmit queues it owns while there is work, and sleeps on their eventfds when there has
//! been none for a while. With several workers, it measures the cost of each queue ([`crate::forwarding::balance`]).
//!
//! Before it sleeps, it asks every driver for a kick, fences, and looks once more. Kicks and changes come on edge-triggered
//! descriptors, so a wake-up costs one system call and no read.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::event::Epoll;
use crate::forwarding::balance::{PERIOD, WHOLE};
use crate::forwarding::forward::{Forwarder, Pass};
use crate::forwarding::switch::Switch;
use crate::forwarding::view::View;
use crate::vring::queue::Vring;

/// The settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Time for which to keep polling after the last frame.
    pub poll: Duration,
    /// The processor to stay on.
    pub cpu: Option<usize>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { poll: Duration::from_micros(50), cpu: None }
    }
}

/// Interval at which a worker with a budget pays for its time (nanoseconds).
const PAY_EVERY: u64 = 1_000_000;
/// The shortest time from one adoption of changes, or one search for memory that was cut short, to the next (nanoseconds),
/// and its ratio to the processor time of that work. A front-end may start, stop and toggle its queues, and cut its memory short,
/// as often as it likes: the other ports keep 19 of 20 parts of the time. Time without a processor, as on a busy host, doesn't count:
/// 200 ms of it would leave a new VM without its port for four seconds.
const ADOPT_PAUSE: u64 = 1_000_000;
const ADOPT_SHARE: u64 = 19;
/// The longest rest at once, so that a switch ends soon when told to.
const REST_MAX: Duration = Duration::from_millis(50);

/// The queues of one port. One of them that has frames gets a pass in each round, so a port with many queues gets no more than others.
#[derive(Debug)]
struct Turn {
    /// The number of its first queue in [`Worker::queues`], and how many they are.
    first: usize,
    count: usize,
    /// The queue that is next, from the first on.
    next: usize,
}

/// A worker's state.
pub struct Worker {
    switch: Arc<Switch>,
    index: usize,
    pace: Pace,
    stop: Arc<AtomicBool>,
    generation: u64,
    /// The next adoption of changes is not before this time.
    adopt_at: u64,
    view: Arc<View>,
    /// Port and transmit queue, by port.
    queues: Vec<(usize, usize)>,
    turns: Vec<Turn>,
    /// Nanoseconds that each of them has cost since `since`; measured only with several workers.
    costs: Vec<u64>,
    since: u64,
    /// The processor time that was paid for, and when.
    paid: (u64, u64),
    epoll: Epoll,
    forwarder: Forwarder,
    faults: usize,
    /// The next search for memory that was cut short is not before this time.
    look_at: u64,
    /// Some queue has no eventfd: look at it every millisecond.
    must_poll: bool,
}

impl Worker {
    /// Makes the worker with number `index` of `switch`, which runs until `stop` is set and it is woken.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(switch: Arc<Switch>, index: usize, pace: Pace, stop: Arc<AtomicBool>) -> io::Result<Self> {
        Ok(Self {
            view: switch.view(),
            switch,
            index,
            pace,
            stop,
            generation: 0,
            adopt_at: 0,
            queues: Vec::new(),
            turns: Vec::new(),
            costs: Vec::new(),
            since: 0,
            paid: (0, 0),
            epoll: Epoll::new()?,
            forwarder: Forwarder::default(),
            faults: tombolo_sigbus::hits(),
            look_at: 0,
            must_poll: false,
        })
    }

    /// Works until it is stopped.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn run(mut self) -> io::Result<()> {
        if let Some(cpu) = self.pace.cpu {
            pin(cpu)?;
        }
        let several = self.switch.workers() > 1;
        let limited = self.switch.budget().is_limited();
        let poll = self.pace.poll.as_nanos() as u64;
        let mut last_work = 0;
        let mut round = 0u64;
        self.switch.watch().enter(self.index);
        loop {
            round += 1;
            self.switch.watch().beat(self.index, round);
            let mut now = self.switch.now();
            if self.switch.generation() != self.generation {
                if self.stop.load(Ordering::Acquire) {
                    self.switch.watch().sleep(self.index);
                    return Ok(());
                }
                if now >= self.adopt_at {
                    let begun = thread_time();
                    self.adopt();
                    now = self.switch.now();
                    self.adopt_at = now + ADOPT_PAUSE.max(ADOPT_SHARE * (thread_time() - begun));
                }
            }
            let (mut worked, mut mark) = (false, now);
            for turn in &mut self.turns {
                for _ in 0..turn.count {
                    let at = turn.first + turn.next;
                    turn.next = if turn.next + 1 == turn.count { 0 } else { turn.next + 1 };
                    let (port, queue) = self.queues[at];
                    match self.forwarder.pass(&self.view, port, queue, now) {
                        Pass::Idle => continue,
                        // It is tried again before this worker sleeps: an uplink that was given from one worker to the other would
                        // not wake it for frames that the other leaves.
                        Pass::Busy => {
                            worked = true;
                            continue;
                        }
                        Pass::Worked(_) | Pass::Held(_) => {
                            worked = true;
                            if several {
                                let end = self.switch.now();
                                self.costs[at] += end - mark;
                                mark = end;
                            }
                        }
                        Pass::Broken(why) => stop_port(&self.view, port, now, &why),
                    }
                    break;
                }
            }
            for (port, why) in self.forwarder.take_broken() {
                stop_port(&self.view, port, now, &why);
            }
            let robbed = tombolo_sigbus::hits() != self.faults;
            if robbed && now >= self.look_at {
                self.faults = tombolo_sigbus::hits();
                let begun = thread_time();
                self.stop_robbed();
                let pause = ADOPT_PAUSE.max(ADOPT_SHARE * (thread_time() - begun));
                self.look_at = self.switch.now() + pause;
            }
            if several && mark - self.since >= PERIOD {
                self.balance(mark);
            }
            if limited && now - self.paid.1 >= PAY_EVERY {
                self.pay(now);
            }
            if worked || robbed {
                last_work = now;
            } else if now - last_work >= poll {
                self.sleep()?;
                last_work = self.switch.now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Reports the cost of its queues, and gives one away if another worker has more time.
    #[cold]
    fn balance(&mut self, now: u64) {
        let period = now - self.since;
        let shares: Vec<u64> = self.costs.iter().map(|cost| cost * WHOLE / period).collect();
        self.since = now;
        self.costs.fill(0);
        if let Some((at, to)) = self.switch.board().report(self.index, now, &shares) {
            let (port, queue) = self.queues[at];
            let port = &self.view.ports()[port].port;
            tracing::info!(port = port.name(), queue, from = self.index, to, "queue moves to another worker");
            port.set_home(queue, to);
            self.switch.changed();
        }
    }

    /// Pays for the processor time since the last time, and rests if it was too much.
    #[cold]
    fn pay(&mut self, now: u64) {
        let used = thread_time();
        let rest = self.switch.budget().pay(used - self.paid.0, now);
        self.paid = (used, now);
        if rest > 0 {
            std::thread::sleep(Duration::from_nanos(rest).min(REST_MAX));
        }
    }

    /// Stops the ports whose memory was cut short.
    #[cold]
    fn stop_robbed(&self) {
        for (i, attached) in self.view.ports().iter().enumerate() {
            let gone = |v: &Vring| v.lock().translator.memory().is_gone();
            if attached.port.vrings().iter().any(gone) {
                stop_port(&self.view, i, self.switch.now(), &"the front-end took its memory away");
            }
        }
    }

    /// Adopts changes: the view, the own queues, the wake-up events.
    fn adopt(&mut self) {
        self.generation = self.switch.generation();
        self.view = self.switch.view();
        self.queues.clear();
        self.since = self.switch.now();
        self.must_poll = false;
        // If no descriptors are left, which a front-end may bring about, the old set stays. It may wake for other workers' queues.
        if let Ok(epoll) = Epoll::new() {
            self.epoll = epoll;
        }
        let wake = self.switch.wake(self.index);
        // What it says of later changes is not lost: the generation tells of them, too.
        wake.clear();
        self.must_poll |= self.epoll.add(wake.as_raw_fd()).is_err();
        for (i, attached) in self.view.ports().iter().enumerate() {
            for queue in 0..attached.port.pairs() {
                if attached.port.home(queue) != self.index {
                    continue;
                }
                if let Some(uplink) = &attached.uplink {
                    self.queues.push((i, queue));
                    self.must_poll |= uplink.wake_by(&self.epoll).is_err();
                    continue;
                }
                let vring = attached.port.tx(queue).lock();
                // Frames in a disabled queue are dropped.
                if vring.ring.is_none() {
                    continue;
                }
                self.queues.push((i, queue));
                match &vring.kick {
                    // A queue whose eventfd can't be polled is treated like one without.
                    Some(kick) if self.epoll.add(kick.as_raw_fd()).is_ok() => {}
                    _ => self.must_poll = true,
                }
            }
        }
        self.turns.clear();
        for (at, (port, _)) in self.queues.iter().enumerate() {
            match self.turns.last_mut() {
                Some(turn) if self.queues[turn.first].0 == *port => turn.count += 1,
                _ => self.turns.push(Turn { first: at, count: 1, next: 0 }),
            }
        }
        self.switch.note_adoption(self.index, self.generation);
        self.costs.clear();
        self.costs.resize(self.queues.len(), 0);
    }

    /// Sleeps until a kick or a change, unless there is work after all.
    fn sleep(&mut self) -> io::Result<()> {
        let mut work = false;
        for &(port, queue) in &self.queues {
            match self.view.ports()[port].port.tx(queue).try_lock() {
                Some(mut vring) => {
                    let pending = !vring.window.is_empty();
                    work |= pending || vring.ring.as_mut().is_some_and(crate::vring::ring::Ring::arm);
                }
                None => work = true,
            }
        }
        if !work && self.switch.generation() == self.generation {
            self.switch.watch().sleep(self.index);
            self.epoll.wait(if self.must_poll { 1 } else { -1 })?;
            self.switch.watch().wake(self.index);
        }
        for &(port, queue) in &self.queues {
            let port = &self.view.ports()[port].port;
            let mut vring = port.tx(queue).lock();
            // Checked under the lock: the new worker of a queue that has moved may have armed it already.
            if port.home(queue) == self.index {
                if let Some(ring) = &mut vring.ring {
                    ring.disarm();
                }
            }
        }
        Ok(())
    }
}

/// Processor time that this thread has used, in nanoseconds.
fn thread_time() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Processor time that this process has used, in nanoseconds.
#[must_use]
pub fn process_time() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock(id: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: time is a local variable; every thread has these clocks.
    unsafe { libc::clock_gettime(id, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Stops a port that broke the rules, and logs it.
#[cold]
fn stop_port(view: &View, index: usize, now: u64, why: &dyn std::fmt::Display) {
    let port = &view.ports()[index].port;
    if port.may_warn(now) {
        tracing::warn!(port = port.name(), %why, "port is stopped until its front-end starts it anew");
    }
    port.fail();
}

/// Returns whether the calling thread may run on processor `cpu`.
///
/// # Errors
/// The kernel refuses to tell.
pub fn may_use(cpu: usize) -> io::Result<bool> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Ok(false);
    }
    // SAFETY: an all-zero set is valid and local, and cpu is within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(libc::CPU_ISSET(cpu, &set))
    }
}

/// Pins the calling thread to one processor.
///
/// # Errors
/// There is no such processor for this process.
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
