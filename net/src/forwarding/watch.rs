// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frees workers that the kernel blocks. A worker makes one call that may block: it writes to the eventfds that interrupt
//! guests. They belong to front-ends, which can make them blocking (O_NONBLOCK is a flag of the open file, which both share)
//! and fill them. So a thread checks whether each worker that is awake makes progress, and interrupts the call of one that
//! does not. A signal has no effect on a worker that is merely slow. Control threads that write to such eventfds do so
//! [within](Watch::within) the watch.
//!
//! While all workers sleep, so does this thread.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The longest time that a worker may stay in one pass.
const TIMEOUT: Duration = Duration::from_millis(50);
/// The signal; without a handler it is ignored.
const SIGNAL: libc::c_int = libc::SIGURG;

/// The signs of life of a worker.
#[derive(Debug, Default)]
struct Pulse {
    /// Its thread; 0: none yet.
    thread: AtomicI32,
    beats: AtomicU64,
    awake: AtomicBool,
}

/// The workers of a switch, for the watching thread.
#[derive(Debug)]
pub struct Watch {
    pulses: Box<[Pulse]>,
    /// The thread sleeps until a worker wakes.
    idle: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    /// Control threads in a call that may block.
    others: Vec<libc::pid_t>,
}

extern "C" fn interrupted(_: libc::c_int) {}

impl Watch {
    /// Makes a watch of `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self {
            pulses: (0..workers).map(|_| Pulse::default()).collect(),
            idle: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Registers the calling thread as worker `index`, and awake.
    pub fn enter(&self, index: usize) {
        self.pulses[index].thread.store(own_thread(), Ordering::Relaxed);
        self.wake(index);
    }

    /// Records that worker `index` begins another round.
    #[inline(always)]
    pub fn beat(&self, index: usize, round: u64) {
        self.pulses[index].beats.store(round, Ordering::Relaxed);
    }

    /// Records that worker `index` is about to sleep.
    pub fn sleep(&self, index: usize) {
        self.pulses[index].awake.store(false, Ordering::SeqCst);
    }

    /// Records that worker `index` has woken.
    pub fn wake(&self, index: usize) {
        // The thread sets `idle`, then loads `awake`; this is the reverse order.
        self.pulses[index].awake.store(true, Ordering::SeqCst);
        if self.idle.load(Ordering::SeqCst) {
            let _lock = self.state();
            self.changed.notify_all();
        }
    }

    /// Runs `run`, which may block: the watch then interrupts it.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let thread = own_thread();
        self.state().others.push(thread);
        self.changed.notify_all();
        let done = run();
        let others = &mut self.state().others;
        if let Some(at) = others.iter().position(|t| *t == thread) {
            others.swap_remove(at);
        }
        done
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends [`Watch::run`].
    pub fn stop(&self) {
        self.state().stop = true;
        self.changed.notify_all();
    }

    fn is_anybody_awake(&self) -> bool {
        self.pulses.iter().any(|p| p.awake.load(Ordering::SeqCst))
    }

    /// Watches until [`Watch::stop`].
    ///
    /// # Errors
    /// The signal can't be handled.
    pub fn run(&self) -> io::Result<()> {
        handle()?;
        let mut seen: Vec<Option<u64>> = vec![None; self.pulses.len()];
        let mut state = self.state();
        while !state.stop {
            self.idle.store(true, Ordering::SeqCst);
            let sleeps = |s: &mut State| !s.stop && s.others.is_empty() && !self.is_anybody_awake();
            state = self.changed.wait_while(state, sleeps).unwrap_or_else(PoisonError::into_inner);
            self.idle.store(false, Ordering::SeqCst);
            let before = state.others.clone();
            let pause = self.changed.wait_timeout_while(state, TIMEOUT, |s| !s.stop);
            state = pause.unwrap_or_else(PoisonError::into_inner).0;
            // Under the lock, so they are still inside.
            state
                .others
                .iter()
                .filter(|thread| before.contains(thread))
                .for_each(|thread| interrupt(*thread));
            for (pulse, seen) in self.pulses.iter().zip(&mut seen) {
                let beats = pulse.awake.load(Ordering::SeqCst).then(|| pulse.beats.load(Ordering::Relaxed));
                if beats.is_some() && beats == *seen {
                    interrupt(pulse.thread.load(Ordering::Relaxed));
                }
                *seen = beats;
            }
        }
        Ok(())
    }
}

fn own_thread() -> libc::pid_t {
    // SAFETY: asks for a number.
    unsafe { libc::gettid() }
}

/// Interrupts the call that a thread of this process is in, if it waits.
fn interrupt(thread: libc::pid_t) {
    if thread != 0 {
        // SAFETY: a signal to a thread of this process, whose handler does nothing; one that has ended gets none.
        unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, SIGNAL) };
    }
}

/// Installs the handler: a blocked call ends, and is not restarted.
fn handle() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid; the handler is an extern "C" function that does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = interrupted as *const () as usize;
        if libc::sigaction(SIGNAL, &action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::Arc;

    #[test]
    fn a_worker_that_waits_in_the_kernel_is_interrupted_and_one_that_works_or_sleeps_is_not() {
        let watch = Arc::new(Watch::new(2));
        let (never, _writer) = rustix::pipe::pipe().unwrap();
        let mut never = std::fs::File::from(never);
        std::thread::scope(|s| {
            s.spawn(|| watch.run().unwrap());
            let works = s.spawn(|| {
                watch.enter(0);
                let mut slept = 0;
                for round in 0..20 {
                    watch.beat(0, round);
                    std::thread::sleep(Duration::from_millis(1));
                    slept += 1;
                }
                watch.sleep(0);
                slept
            });
            let waits = s.spawn(|| {
                watch.enter(1);
                watch.beat(1, 7);
                // This read is not repeated by std.
                let got = never.read(&mut [0]).unwrap_err().kind();
                watch.sleep(1);
                let within = watch.within(|| never.read(&mut [0]).unwrap_err().kind());
                assert_eq!(within, io::ErrorKind::Interrupted);
                got
            });
            assert_eq!(waits.join().unwrap(), io::ErrorKind::Interrupted);
            assert_eq!(works.join().unwrap(), 20);
            watch.stop();
        });
    }
}
