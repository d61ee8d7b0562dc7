// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long another process of ours is waited for. A process that hangs, because it is stopped, sleeps without an answer, or loops, is given up
//! after a limit. Time in which it waits for a CPU does not count towards that limit: on a host with much to do it answers when its turn comes.
//!
//! [`Patience::look`] is called after each pause in which the process said nothing. It looks at the states of the process's threads: the process
//! waits for a CPU if one of them could run, and has had a CPU for less than half of the time since the last look.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::child::halted::{self, Halted};

/// The pauses between two looks.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];
/// Time for a stopped or frozen process to go on.
const HALTED: Duration = Duration::from_millis(500);
/// The longest wait for a process that waits for a CPU.
const BUSY: Duration = Duration::from_secs(30);

/// Why a process is given up.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Silent {
    /// It is stopped, or frozen.
    #[error("{0}")]
    Halted(Halted),
    /// It sleeps or loops.
    #[error("lives and has not answered within {} s", .0.as_secs_f64())]
    Hangs(Duration),
    /// The host has too much to do.
    #[error("lives and waits for a CPU of this busy host; it has not answered within {} s", .0.as_secs())]
    Waits(Duration),
}

impl Silent {
    /// The error of a command that has given up its project's supervisor.
    pub fn of_supervisor(self, process: u32) -> std::io::Error {
        std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            format!("the supervisor (process {process}) {self}"),
        )
    }
}

/// A thread that could run when it was looked at.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    /// CPU time that it had had.
    had: Duration,
}

/// The wait for one process.
#[derive(Clone, Debug)]
pub struct Patience {
    process: u32,
    begun: Instant,
    looked: Instant,
    /// `None`: without end, unless the process is stopped or frozen.
    limit: Option<Duration>,
    /// The part of it that has passed.
    spent: Duration,
    halted_since: Option<Instant>,
    runnable: HashMap<u32, Seen>,
}

impl Patience {
    /// Waits for `process`, at most `limit` long unless it waits for a CPU.
    pub fn new(process: u32, limit: Option<Duration>) -> Patience {
        let now = Instant::now();
        let runnable = HashMap::new();
        Patience {
            process,
            begun: now,
            looked: now,
            limit,
            spent: Duration::ZERO,
            halted_since: None,
            runnable,
        }
    }

    /// The time to wait until the next [look](Patience::look).
    pub fn pause(&self) -> Duration {
        let [shortest, longest] = PAUSES;
        self.limit.map_or(longest, |limit| limit.saturating_sub(self.spent).clamp(shortest, longest))
    }

    /// Judges the process after a pause without a word of it.
    ///
    /// # Errors
    /// It is given up.
    pub fn look(&mut self) -> Result<(), Silent> {
        // A longer time is one in which this process waited for a CPU.
        let passed = self.looked.elapsed().min(self.pause());
        self.looked = Instant::now();
        let halted = halted::of(self.process);
        self.halted_since = halted.is_some().then(|| self.halted_since.unwrap_or(self.looked));
        if let (Some(halted), Some(since)) = (halted, self.halted_since) {
            if since.elapsed() >= HALTED {
                return Err(Silent::Halted(halted));
            }
        }
        let Some(limit) = self.limit else { return Ok(()) };
        if self.waits_for_cpu() {
            let longest = limit.max(BUSY);
            return if self.begun.elapsed() < longest { Ok(()) } else { Err(Silent::Waits(longest)) };
        }
        self.spent += passed;
        if self.spent < limit { Ok(()) } else { Err(Silent::Hangs(limit)) }
    }

    /// Returns whether the process has had less CPU time since the last look than it could have used. A thread that could not run then, or
    /// was not there, is known from the next look on.
    fn waits_for_cpu(&mut self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.process)).into_iter().flatten();
        let numbers = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for number in numbers {
            let stat = fs::read_to_string(format!("/proc/{}/task/{number}/stat", self.process));
            let Some(had) = stat.ok().and_then(|stat| runnable(&stat)) else {
                self.runnable.remove(&number);
                continue;
            };
            let seen = Seen { at: Instant::now(), had };
            if let Some(before) = self.runnable.insert(number, seen) {
                if seen.had.saturating_sub(before.had) < (seen.at - before.at) / 2 {
                    return true;
                }
            }
        }
        false
    }
}

/// The CPU time that a thread has had, if it runs or waits for a CPU (proc_pid_stat(5)).
fn runnable(stat: &str) -> Option<Duration> {
    // The state follows the name, which is in parentheses and may contain some.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if fields.next()? != "R" {
        return None;
    }
    let (user, system): (u64, u64) = (fields.nth(10)?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 1000 / rustix::param::clock_ticks_per_second()))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// Processes that are killed at the end.
    pub struct Processes(Vec<Child>);

    impl Processes {
        pub fn start(words: &[&str], count: usize) -> Processes {
            let start = |_| Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).spawn().unwrap();
            Processes((0..count).map(start).collect())
        }

        /// Each of them has a small part of the time of one CPU.
        pub fn on_one_cpu(count: usize) -> Processes {
            let allowed = rustix::thread::sched_getaffinity(None).unwrap();
            let cpu = (0..rustix::thread::CpuSet::MAX_CPU).find(|n| allowed.is_set(*n)).unwrap().to_string();
            Processes::start(&["taskset", "-c", &cpu, "sh", "-c", "while :; do :; done"], count)
        }

        pub fn first(&self) -> u32 {
            self.0[0].id()
        }
    }

    impl Drop for Processes {
        fn drop(&mut self) {
            for process in &mut self.0 {
                process.kill().unwrap();
                process.wait().unwrap();
            }
        }
    }

    fn given_up(process: u32, limit: Duration) -> Silent {
        let mut patience = Patience::new(process, Some(limit));
        loop {
            std::thread::sleep(patience.pause());
            if let Err(silent) = patience.look() {
                return silent;
            }
        }
    }

    #[test]
    fn a_process_that_sleeps_is_given_up_after_the_limit() {
        let limit = Duration::from_millis(300);
        assert_eq!(given_up(Processes::start(&["sleep", "1000"], 1).first(), limit), Silent::Hangs(limit));
    }

    #[test]
    fn a_process_that_is_stopped_is_named() {
        let process = Processes::start(&["sleep", "1000"], 1);
        let stop = rustix::process::Signal::STOP;
        rustix::process::kill_process(rustix::process::Pid::from_child(&process.0[0]), stop).unwrap();
        assert_eq!(
            given_up(process.first(), Duration::from_secs(60)),
            Silent::Halted(Halted::Stopped(process.first()))
        );
    }

    #[test]
    fn time_in_which_a_process_waits_for_a_cpu_does_not_count() {
        let crowd = Processes::on_one_cpu(8);
        let mut patience = Patience::new(crowd.first(), Some(Duration::from_secs(1)));
        for _ in 0..30 {
            std::thread::sleep(patience.pause());
            patience.look().unwrap();
        }
    }

    #[test]
    fn a_thread_that_could_run_has_had_the_cpu_time_of_its_line_in_proc() {
        let line =
            |state| format!("7 (a) R 1) {state} 1 7 7 0 -1 4194304 101 0 0 0 3 4 0 0 20 0 1 0 3976655 313");
        assert_eq!(runnable(&line("R")), Some(Duration::from_millis(70)));
        assert_eq!(runnable(&line("S")), None);
        assert_eq!(runnable("7 (a) R 1"), None);
    }
}
