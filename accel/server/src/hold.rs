// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds a tenant back that has had more than its share of the processors.
//!
//! Where the kernel lets this server do so, such a tenant gets the time that the others leave: its control group, or each of its threads, becomes idle in
//! the scheduler's sense, so any other that wants to run takes the processor from it at once. Elsewhere the tenant is stopped.

use crate::divide;
use crate::wall::census::Census;
use crate::wall::cgroup::Group;
use crate::wall::limits::TASKS;
use crate::wall::spawn;
use rustix::fs::{CWD, Dir, Mode, OFlags};
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A pass over a worker's threads may miss those that were started meanwhile; so many passes are made at once.
const PASSES: u32 = 4;

/// Changing a worker with many threads takes long. The server changes it again only after so many times as long.
const RESTS: u32 = 32;

/// Idle threads take time from others if they are many: 32 on a processor have a fifth of it beside one thread that always runs. Who has more than so many for
/// each processor is a crowd.
const FEW: usize = 8;

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
        let tried = std::thread::spawn(|| {
            let own = Process::of(std::process::id() as i32)?;
            // SAFETY: takes nothing.
            let thread = unsafe { libc::gettid() };
            Some([libc::SCHED_IDLE, libc::SCHED_OTHER].map(|policy| own.set(thread, policy)))
        });
        let may = tried.join().is_ok_and(|tried| tried == Some([Outcome::Changed; 2]));
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
    Threads(Threads),
    Stop,
}

/// The threads of a worker, and of the processes that it started.
struct Threads {
    /// All are as they were told to be, and so will be what they start.
    is_set: bool,
    /// Some had another policy after the last passes: whoever starts and ends threads fast enough is always ahead of a pass. It is stopped, so that the
    /// next pass finds them all.
    escape: bool,
    /// More than [`FEW`] for each processor.
    are_many: bool,
    is_stopped: bool,
    /// They are left as they are until then.
    rest: Instant,
}

impl Threads {
    fn new() -> Threads {
        Threads { is_set: true, escape: false, are_many: false, is_stopped: false, rest: Instant::now() }
    }

    /// Gives all of them the policy for this; returns whether they should be stopped.
    fn set(&mut self, pid: u32, holds: bool, is_new: bool, has_others: bool, idled: bool) -> bool {
        // The census finds a new process only at its next look, so the passes before may have missed it.
        self.is_set &= !is_new && !has_others;
        if !self.is_set && (Instant::now() >= self.rest || is_new && !self.are_many) {
            let began = divide::own_time();
            let policy = if holds { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
            let last = set_all(pid, policy, has_others, few());
            (self.is_set, self.escape, self.are_many) =
                (last.is_complete, !last.is_complete, last.threads > few());
            self.rest = Instant::now() + RESTS * divide::own_time().saturating_sub(began);
        } else if !self.is_set && is_new {
            self.escape = true;
        }
        // A crowd has its turn where processors idle.
        holds && (self.escape || self.are_many && !idled)
    }
}

/// The most threads that are no crowd.
pub(crate) fn few() -> usize {
    static FEW_HERE: OnceLock<usize> = OnceLock::new();
    *FEW_HERE.get_or_init(|| FEW * std::thread::available_parallelism().map_or(1, usize::from))
}

impl Hold {
    /// Of the worker `pid`. `group`: the control group of its VM, or its own.
    pub fn new(way: Way, pid: u32, process: Arc<OwnedFd>, group: Option<Arc<Group>>) -> Hold {
        let means = match (way, group) {
            (Way::Groups, Some(group)) => Means::Group(group),
            (Way::Threads, _) => Means::Threads(Threads::new()),
            _ => Means::Stop,
        };
        Hold { pid, process, means, is_over: false }
    }

    /// Returns whether it is held back by stopping it, although those that are ahead use what others leave.
    pub fn is_crowd(&self) -> bool {
        matches!(&self.means, Means::Threads(threads) if threads.are_many)
    }

    /// Returns whether it was killed. It may take long to end.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns whether the last call of [`Hold::set`] has done all that it was to do: the threads of a crowd are left as they are for a while.
    pub fn is_settled(&self) -> bool {
        self.is_over || !matches!(&self.means, Means::Threads(threads) if !threads.is_set)
    }

    /// Holds the worker back, or lets it run. To be called from time to time while nothing changes, too. `census`: the processes that it has started.
    /// `idled`: processors have idled since the last call.
    pub fn set(&mut self, holds: bool, is_new: bool, census: Option<&Census>, idled: bool) {
        let others = census.filter(|census| census.has_others());
        let process = self.process.as_fd();
        let signal = |signal| {
            others.inspect(|others| others.signal(signal));
            let _ended = spawn::signal(process, signal);
        };
        match &mut self.means {
            _ if self.is_over => {}
            Means::Group(group) => {
                // Each time: the workers of a VM have one group. It fails only where that was removed.
                if holds || is_new {
                    let _removed = group.set_idle(holds);
                }
            }
            Means::Threads(threads) => {
                // The numbers of a process that has ended may be others' soon.
                if spawn::signal(process, 0).is_err() {
                    return;
                }
                let stops = threads.set(self.pid, holds, is_new, others.is_some(), idled);
                let was_stopped = std::mem::replace(&mut threads.is_stopped, stops);
                match (was_stopped, stops) {
                    // Each time, for the reasons below.
                    (_, true) => signal(libc::SIGSTOP),
                    (true, false) => signal(libc::SIGCONT),
                    (false, false) => {}
                }
            }
            Means::Stop => {
                // Each time: it may have started processes since, or another process may have sent SIGCONT.
                if holds || is_new {
                    signal(if holds { libc::SIGSTOP } else { libc::SIGCONT });
                }
            }
        }
    }

    /// Kills the worker.
    pub fn kill(&mut self) {
        let _ended = spawn::signal(self.process.as_fd(), libc::SIGKILL);
        match &self.means {
            Means::Group(group) => {
                let _removed = group.set_idle(false);
            }
            Means::Threads(_) if spawn::signal(self.process.as_fd(), 0).is_ok() => {
                // It ends when the processes have that it started.
                set_all(self.pid, libc::SCHED_OTHER, true, usize::MAX);
            }
            _ => {}
        }
        self.is_over = true;
    }
}

/// The result of a change of a thread's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It was this one before.
    Same,
    Changed,
    /// The thread has ended, or this server may not change it.
    Not,
}

/// A process, whatever becomes of its number.
struct Process {
    pid: i32,
    /// Its folder in /proc.
    folder: OwnedFd,
}

/// The attributes of a thread for the scheduler (struct sched_attr, SCHED_ATTR_SIZE_VER0): its size, the policy, and others that are only passed on.
type Attributes = [u32; 12];

impl Process {
    fn of(pid: i32) -> Option<Process> {
        let folder = rustix::fs::openat(CWD, format!("/proc/{pid}"), FOLDER, Mode::empty()).ok()?;
        Some(Process { pid, folder })
    }

    /// A file of its folder. A process's name, which is in some, may have any bytes.
    fn read(&self, name: &str) -> Option<String> {
        let file = rustix::fs::openat(&self.folder, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mut bytes = Vec::new();
        fs::File::from(file.ok()?).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The number of its parent.
    fn parent(&self) -> Option<i32> {
        // Number, name of any characters in parentheses, state, parent.
        self.read("stat")?.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    }

    /// The numbers of the processes that a thread of it started.
    fn children(&self, thread: i32) -> Vec<i32> {
        let children = self.read(&format!("task/{thread}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|child| child.parse().ok()).collect()
    }

    /// The numbers of its threads, the oldest first.
    fn threads(&self) -> Vec<i32> {
        let task = rustix::fs::openat(&self.folder, "task", FOLDER, Mode::empty());
        let found = task.and_then(Dir::read_from).into_iter().flatten().flatten();
        found.filter_map(|thread| thread.file_name().to_str().ok()?.parse().ok()).collect()
    }

    fn has(&self, thread: i32) -> bool {
        // SAFETY: integers; without a signal the kernel only looks.
        unsafe { libc::syscall(libc::SYS_tgkill, self.pid, thread, 0) == 0 }
    }

    /// Gives a thread of it a policy that has no priorities. The number of a thread that has ended may be another's at once: a thread of
    /// another process that got it before is left alone, and one that got it just now is given back what it had.
    fn set(&self, thread: i32, policy: libc::c_int) -> Outcome {
        let mut before: Attributes = [0; 12];
        // SAFETY: room for attributes of this size, which lives during the call.
        let known = unsafe {
            libc::syscall(libc::SYS_sched_getattr, thread, before.as_mut_ptr(), size_of_val(&before), 0)
        };
        match known {
            0 if before[1] == policy as u32 => return Outcome::Same,
            0 if self.has(thread) => {}
            _ => return Outcome::Not,
        }
        let none = libc::sched_param { sched_priority: 0 };
        // SAFETY: integers, and a value that lives during the call.
        if unsafe { libc::sched_setscheduler(thread, policy, &none) } < 0 {
            return Outcome::Not;
        }
        // In this order: as long as the process has its number, it is the one that was asked for its thread.
        if self.has(thread) && spawn::signal(self.folder.as_fd(), 0).is_ok() {
            return Outcome::Changed;
        }
        // SAFETY: attributes that the kernel gave, which live during the call.
        unsafe { libc::syscall(libc::SYS_sched_setattr, thread, before.as_ptr(), 0) };
        Outcome::Not
    }
}

/// What a pass has found.
struct Pass {
    threads: usize,
    /// Each thread had the policy before. One that has ended may have started another.
    is_complete: bool,
}

/// Makes passes until one finds all as they were to be, or more than so many threads. Returns what the last one found.
fn set_all(pid: u32, policy: libc::c_int, with_others: bool, few: usize) -> Pass {
    let mut left = PASSES;
    loop {
        let pass = set_processes(pid, policy, with_others);
        left -= 1;
        if pass.is_complete || left == 0 || pass.threads > few {
            return pass;
        }
    }
}

/// Gives all threads of a process a policy, and `with_others` those of the processes that they started.
fn set_processes(pid: u32, policy: libc::c_int, with_others: bool) -> Pass {
    let mut pass = Pass { threads: 0, is_complete: true };
    let worker = pid as i32;
    let mut left = vec![(worker, None)];
    // No worker has more of them.
    for _ in 0..TASKS {
        let Some((pid, parent)) = left.pop() else { break };
        // The number of one that has ended may be that of another's process. What has lost its parent is the worker's.
        let is_its = |process: &Process| {
            parent.is_none_or(|parent| [Some(parent), Some(worker)].contains(&process.parent()))
        };
        let process = Process::of(pid).filter(is_its);
        let threads = process.as_ref().map(Process::threads).unwrap_or_default();
        pass.is_complete &= !threads.is_empty();
        pass.threads += threads.len();
        let Some(process) = process else { continue };
        // The newest first: it is the one that may end soon. What a thread starts after this has its policy.
        for thread in threads.iter().rev() {
            pass.is_complete &= process.set(*thread, policy) == Outcome::Same;
        }
        if with_others {
            for thread in threads {
                left.extend(process.children(thread).into_iter().map(|child| (child, Some(pid))));
            }
        }
    }
    pass
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// Those of all threads of a process.
    pub(crate) fn policies(pid: u32) -> Vec<libc::c_int> {
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
        // A user without the right to make threads what they were can make them idle.
        let may_undo = Way::without_groups() == Way::Threads;
        let (mut child, other) = family();
        for policy in [libc::SCHED_IDLE, libc::SCHED_OTHER].into_iter().take(1 + usize::from(may_undo)) {
            assert!(!set_processes(child.id(), policy, true).is_complete);
            assert!(set_processes(child.id(), policy, true).is_complete);
            assert_eq!((policies(child.id()), policies(other)), (vec![policy; 2], vec![policy]));
        }
        child.kill().expect("killed");
        child.wait().expect("its end");
        assert!(!set_processes(child.id(), libc::SCHED_IDLE, true).is_complete);
        kill(other);
    }

    fn kill(pid: u32) {
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("not 0");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("killed");
    }

    #[test]
    fn a_thread_of_another_process_that_has_got_the_number_of_one_that_ended_keeps_its_policy() {
        let [mut worker, mut other] =
            [(); 2].map(|()| Command::new("sleep").arg("1000").spawn().expect("sleep"));
        let process = Process::of(worker.id() as i32).expect("it lives");
        let thread = other.id() as i32;
        assert_eq!(process.set(thread, libc::SCHED_IDLE), Outcome::Not);
        assert_eq!(policies(other.id()), [libc::SCHED_OTHER]);
        assert_eq!(process.set(worker.id() as i32, libc::SCHED_IDLE), Outcome::Changed);
        assert_eq!(policies(worker.id()), [libc::SCHED_IDLE]);
        worker.kill().expect("killed");
        worker.wait().expect("its end");
        // A user without the right to make threads what they were can make them idle.
        if Way::without_groups() == Way::Threads {
            // One that has got the number of the whole process: it isn't the process that the folder is of.
            let reused = Process { pid: thread, folder: process.folder };
            assert_eq!(reused.set(thread, libc::SCHED_IDLE), Outcome::Not);
            assert_eq!(policies(other.id()), [libc::SCHED_OTHER]);
        }
        other.kill().expect("killed");
        other.wait().expect("its end");
    }

    #[test]
    fn a_process_is_known_by_its_parent_whatever_its_name_is() {
        let (mut child, other) = family();
        let parent = |pid: u32| Process::of(pid as i32).and_then(|process| process.parent());
        assert_eq!(parent(child.id()), Some(std::process::id() as i32));
        assert_eq!(parent(other), Some(child.id() as i32));
        child.kill().expect("killed");
        child.wait().expect("its end");
        kill(other);
    }

    /// A process of accel/tests/held.c, a child of this one; it ends with this value.
    pub(crate) struct Held(pub(crate) Child);

    impl Held {
        pub(crate) fn start(what: &str, count: u32) -> Held {
            use std::io::{BufRead, BufReader};
            static PROGRAM: OnceLock<tempfile::TempDir> = OnceLock::new();
            let folder = PROGRAM.get_or_init(|| {
                let folder = tempfile::tempdir().expect("a folder");
                let source = format!("{}/../tests/held.c", env!("CARGO_MANIFEST_DIR"));
                let mut cc = Command::new("cc");
                let built = cc.args(["-O1", &source, "-lpthread", "-o"]).arg(folder.path().join("held"));
                assert!(built.status().expect("cc").success());
                folder
            });
            let mut program = Command::new(folder.path().join("held"));
            let program = program.args([what, &count.to_string()]).stdout(Stdio::piped());
            let mut child = program.spawn().expect("it starts");
            let mut line = String::new();
            BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
            assert_eq!(line, "ready\n");
            Held(child)
        }

        fn hold(&self, way: Way) -> Hold {
            let pid = rustix::process::Pid::from_raw(self.0.id() as i32).expect("not 0");
            let process =
                rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it lives");
            Hold::new(way, self.0.id(), Arc::new(process), None)
        }

        fn is_stopped(&self) -> bool {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).expect("it lives");
            stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"))
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.kill().expect("killed");
            self.0.wait().expect("its end");
        }
    }

    /// Between two looks.
    fn tick() {
        std::thread::sleep(std::time::Duration::from_millis(4));
    }

    #[test]
    fn no_thread_escapes_being_idle_by_ending_before_it_is_looked_at_and_all_run_on() {
        let hopping = Held::start("hop", 4);
        let mut hold = hopping.hold(Way::Threads);
        let mut is_new = true;
        let is_set = |hold: &Hold| match &hold.means {
            Means::Threads(threads) => threads.is_set && !threads.is_stopped,
            _ => false,
        };
        while is_new || !is_set(&hold) {
            hold.set(true, std::mem::take(&mut is_new), None, false);
            tick();
        }
        // One that ended just now has none.
        for _ in 0..300 {
            let seen = policies(hopping.0.id());
            assert!(seen.iter().all(|policy| [libc::SCHED_IDLE, -1].contains(policy)), "{seen:?}");
        }
        let used = |held: &Held| divide::cpu(held.0.id()).expect("it lives");
        let before = used(&hopping);
        while used(&hopping) < before + std::time::Duration::from_millis(20) {
            tick();
        }
    }

    #[test]
    fn a_crowd_of_threads_is_stopped_as_idle_ones_take_time_from_others_together_and_has_idle_processors() {
        let crowd = Held::start("crowd", 2 * few() as u32);
        let mut hold = crowd.hold(Way::Threads);
        let mut is_new = true;
        while !crowd.is_stopped() {
            hold.set(true, std::mem::take(&mut is_new), None, false);
            tick();
        }
        assert!(hold.is_crowd());
        while crowd.is_stopped() {
            hold.set(true, false, None, true);
            tick();
        }
        while !crowd.is_stopped() {
            hold.set(true, false, None, false);
            tick();
        }
        hold.set(false, true, None, false);
        while crowd.is_stopped() {
            tick();
        }
    }

    #[test]
    fn a_process_that_is_seen_after_its_worker_was_held_back_is_held_back_as_well_and_let_run_with_it() {
        // A user without the right to make threads what they were can make them idle.
        let turns = if Way::without_groups() == Way::Threads { 2 } else { 1 };
        let chain = Held::start("chain", 2);
        let children = format!("/proc/{0}/task/{0}/children", chain.0.id());
        let child = fs::read_to_string(children).expect("it lives").trim().parse().expect("a child");
        let mut threads = Threads::new();
        for (holds, policy) in [(true, libc::SCHED_IDLE), (false, libc::SCHED_OTHER)].into_iter().take(turns)
        {
            let before = policies(child);
            threads.rest = Instant::now();
            threads.set(chain.0.id(), holds, true, false, false);
            assert_eq!((policies(chain.0.id()), policies(child)), (vec![policy], before));
            threads.rest = Instant::now();
            threads.set(chain.0.id(), holds, false, true, false);
            assert_eq!(policies(child), [policy]);
        }
    }

    #[test]
    fn processes_that_started_each_other_are_set_however_many_there_are() {
        let chain = Held::start("chain", 900);
        // As much stack as a thread of the server has.
        let pid = chain.0.id();
        let passes = std::thread::spawn(move || {
            [0; 2].map(|_| {
                let pass = set_processes(pid, libc::SCHED_IDLE, true);
                (pass.threads, pass.is_complete)
            })
        });
        assert_eq!(passes.join().expect("it ends"), [(900, false), (900, true)]);
    }
}
