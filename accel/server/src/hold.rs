// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds a tenant back that has had more than its share of the processors.
//!
//! Where the kernel lets this server do so, such a tenant gets the time that the others leave: its control group, or each of its threads, becomes idle in
//! the scheduler's sense, so any other that wants to run takes the processor from it at once. Elsewhere the tenant is stopped.

use crate::wall::census::Census;
use crate::wall::cgroup::Group;
use crate::wall::spawn;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// A pass over a worker's threads may miss those that were started meanwhile; so many passes are made at once.
const PASSES: u32 = 4;

/// Whoever has many threads makes changing them take long; so it is changed again only after so many times as long.
const RESTS: u32 = 32;

/// How tenants of a server are held back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// Their control groups become idle.
    Groups,
    /// Their threads do.
    Threads,
    /// They are stopped.
    #[default]
    Stops,
}

impl Way {
    /// The way for tenants that have no control groups. Idle threads are for servers that may make a thread's priority what it was (CAP_SYS_NICE, RLIMIT_NICE),
    /// on kernels that tell which processes a thread started (CONFIG_PROC_CHILDREN).
    pub fn without_groups() -> Way {
        // On a thread of its own, which ends with what it set.
        let tried =
            std::thread::spawn(|| set_thread(0, libc::SCHED_IDLE) && set_thread(0, libc::SCHED_OTHER));
        let may = tried.join().is_ok_and(|may| may);
        if may && fs::exists("/proc/thread-self/children").unwrap_or(false) {
            Way::Threads
        } else {
            Way::Stops
        }
    }

    /// Returns whether a tenant that is held back uses what the others leave.
    pub fn uses_the_rest(self) -> bool {
        self != Way::Stops
    }
}

/// A worker, and how it is held back.
pub struct Hold {
    pid: u32,
    /// The worker, which stays the same process when its number is used again.
    process: Arc<OwnedFd>,
    means: Means,
    /// It was killed: it ends with all the time that it needs for that.
    is_over: bool,
}

enum Means {
    /// The control group of its VM, or its own.
    Group(Arc<Group>),
    /// `settled`: all threads are as they were told to be, and so will be what they start. They are left as they are until `rest` is over.
    Threads {
        settled: bool,
        rest: Instant,
    },
    Stop,
}

impl Hold {
    /// Of the worker `pid`. `group`: the control group of its VM, or its own.
    pub fn new(way: Way, pid: u32, process: Arc<OwnedFd>, group: Option<Arc<Group>>) -> Hold {
        let means = match (way, group) {
            (Way::Groups, Some(group)) => Means::Group(group),
            (Way::Threads, _) => Means::Threads { settled: true, rest: Instant::now() },
            _ => Means::Stop,
        };
        Hold { pid, process, means, is_over: false }
    }

    /// Holds the worker back, or lets it run. To be called from time to time while nothing changes, too. `census`: the processes that it has started.
    pub fn set(&mut self, holds: bool, is_new: bool, census: Option<&Census>) {
        let others = census.filter(|census| census.has_others());
        // A process that has ended runs as it likes.
        let ended = || spawn::signal(self.process.as_fd(), 0).is_err();
        match &mut self.means {
            _ if self.is_over => {}
            Means::Group(group) => {
                // Each time: the workers of a VM have one group. It fails only where that was removed.
                if holds || is_new {
                    let _removed = group.set_idle(holds);
                }
            }
            Means::Threads { settled, rest } => {
                *settled &= !is_new;
                let began = Instant::now();
                if !*settled && began >= *rest && !ended() {
                    let policy = if holds { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
                    let is_done = (0..PASSES).any(|_| !set_process(self.pid, policy, others.is_some()));
                    // What has just been started is not known yet.
                    *settled = is_done && others.is_none();
                    *rest = Instant::now() + RESTS * began.elapsed();
                }
            }
            Means::Stop => {
                // Each time: it may have started processes since, or another process may have sent SIGCONT.
                if holds || is_new {
                    let signal = if holds { libc::SIGSTOP } else { libc::SIGCONT };
                    others.inspect(|others| others.signal(signal));
                    let _ended = spawn::signal(self.process.as_fd(), signal);
                }
            }
        }
    }

    /// Kills the worker.
    pub fn kill(&mut self) {
        let _ended = spawn::signal(self.process.as_fd(), libc::SIGKILL);
        if let Means::Threads { rest, .. } = &mut self.means {
            *rest = Instant::now();
        }
        self.set(false, true, None);
        self.is_over = true;
    }
}

/// Gives a thread, 0 for this one, a policy that has no priorities. Returns whether it had another one before.
fn set_thread(thread: i32, policy: libc::c_int) -> bool {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: integers, and a value that lives during the call. It fails only where the thread has ended, or where `Way::without_groups` found that it may not.
    unsafe {
        libc::sched_getscheduler(thread) != policy && libc::sched_setscheduler(thread, policy, &none) == 0
    }
}

/// Gives all threads of a process a policy, and `with_others` those of the processes that they started. Returns whether one had another policy.
fn set_process(pid: u32, policy: libc::c_int, with_others: bool) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let threads: Vec<i32> = threads.filter_map(|t| t.file_name().to_str()?.parse().ok()).collect();
    // What a thread starts after this has its policy.
    let mut changed = false;
    for thread in &threads {
        changed |= set_thread(*thread, policy);
    }
    if with_others {
        for thread in threads {
            let others =
                fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
            for other in others.split_whitespace().filter_map(|pid| pid.parse().ok()) {
                changed |= set_process(other, policy, true);
            }
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn policies(pid: u32) -> Vec<libc::c_int> {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives").flatten();
        // SAFETY: takes an integer.
        let policy = |thread: i32| unsafe { libc::sched_getscheduler(thread) };
        threads
            .map(|t| policy(t.file_name().to_str().and_then(|t| t.parse().ok()).expect("a number")))
            .collect()
    }

    /// A process with a thread more than its first, and a child; and that child's number.
    fn family() -> (Child, u32) {
        use std::io::{BufRead, BufReader};
        let program = "import os, subprocess, threading, time\n\
                       threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n\
                       print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\n\
                       time.sleep(1000)";
        let mut child =
            Command::new("python3").args(["-c", program]).stdout(Stdio::piped()).spawn().expect("python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        (child, line.trim().parse().expect("a number"))
    }

    #[test]
    fn each_thread_of_a_worker_and_of_what_it_started_becomes_idle_and_what_it_was() {
        // Whoever may not undo it can do it.
        let may_undo = Way::without_groups() == Way::Threads;
        let (mut child, other) = family();
        for policy in [libc::SCHED_IDLE, libc::SCHED_OTHER].into_iter().take(1 + usize::from(may_undo)) {
            assert!(set_process(child.id(), policy, true));
            assert!(!set_process(child.id(), policy, true));
            assert_eq!((policies(child.id()), policies(other)), (vec![policy; 2], vec![policy]));
        }
        child.kill().expect("killed");
        child.wait().expect("its end");
        assert!(!set_process(child.id(), libc::SCHED_IDLE, true));
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(other as i32).expect("not 0"),
            rustix::process::Signal::KILL,
        )
        .expect("killed");
    }
}
