// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads that prepare memory ahead of the guest: low in priority, on the memory's own node, and within a budget.
//!
//! On idle CPUs they run at full speed, unless a bandwidth is set. On busy ones they give way. While the guest boots it does not wait for memory, and
//! they are SCHED_IDLE: to the scheduler a CPU that runs such a thread is idle, so a virtual CPU or an I/O thread that wakes up gets it at once. Once the
//! guest takes memory it waits for them, and others with a nice value go on (nice 11 against 0: weights 87 to 1024, 8 % of a busy CPU). They are
//! others because leaving SCHED_IDLE takes a privilege and becoming nice takes none. Preparation goes from the start to the end, as a Linux guest
//! plugs.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::memory::{Memory, MemoryError, thread_cpu};

/// Limits of the cost of preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Threads.
    pub threads: u32,
    /// Nice value of the threads once the guest takes memory, 0 to 19.
    pub nice: i32,
    /// Most bytes a second in all; None: no limit.
    pub bandwidth: Option<u64>,
    /// Try huge pages.
    pub huge: bool,
}

impl Default for Budget {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1));
        Self { threads: (cpus / 2).clamp(1, 16), nice: 11, bandwidth: None, huge: true }
    }
}

/// Bytes prepared at a time by one thread; a multiple of the huge page.
const CHUNK: u64 = 16 << 20;

struct Shared {
    memory: Memory,
    size: u64,
    budget: Budget,
    began: Instant,
    /// The first byte that no thread has taken.
    next: AtomicU64,
    /// No further than this.
    limit: AtomicU64,
    stop: AtomicBool,
    /// The guest takes memory.
    hastened: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Ends of finished chunks that others before them are still missing from.
    islands: Vec<u64>,
    /// Everything before this is prepared.
    ready: u64,
    huge: u64,
    cpu: Duration,
    failure: Option<MemoryError>,
}

/// The prepared bytes, and their cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Prepared {
    /// Bytes from the start that are there.
    pub ready: u64,
    /// Bytes for which huge pages were not refused.
    pub huge: u64,
    /// CPU time of the threads.
    pub cpu: Duration,
}

/// The scheduling of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Priority {
    /// Behind all other threads.
    Idle,
    /// With the nice value.
    Nice(i32),
}

/// Preparation that runs until the end, an error, or its drop.
pub struct Ahead {
    shared: Arc<Shared>,
    node: Option<u32>,
    threads: Vec<JoinHandle<()>>,
}

impl Ahead {
    /// Starts to prepare the first `limit` bytes of `memory`, which has `size` in all. Threads run on the CPUs of `node`.
    pub fn start(memory: Memory, size: u64, limit: u64, node: Option<u32>, budget: Budget) -> Self {
        let shared = Arc::new(Shared {
            memory,
            size,
            budget,
            began: Instant::now(),
            next: AtomicU64::new(0),
            limit: AtomicU64::new(limit.min(size)),
            stop: AtomicBool::new(false),
            hastened: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut ahead = Self { shared, node, threads: Vec::new() };
        ahead.begin(Priority::Idle);
        ahead
    }

    fn begin(&mut self, priority: Priority) {
        let node = self.node;
        self.threads.extend((0..self.shared.budget.threads.max(1)).map(|_| {
            let shared = self.shared.clone();
            std::thread::spawn(move || {
                humble(priority, node);
                shared.work(priority);
            })
        }));
    }

    /// The guest takes memory from now on: what is prepared no longer only fills idle time.
    pub fn hasten(&mut self) {
        if !self.shared.hastened.swap(true, Ordering::AcqRel) {
            {
                let _state = self.shared.lock();
                self.shared.changed.notify_all();
            }
            self.begin(Priority::Nice(self.shared.budget.nice));
        }
    }

    /// Prepares up to `limit` and no further; what a thread is at goes on.
    pub fn allow(&self, limit: u64) {
        let limit = limit.min(self.shared.size);
        let before = self.shared.limit.swap(limit, Ordering::AcqRel);
        if before < limit {
            let _state = self.shared.lock();
            self.shared.changed.notify_all();
        }
    }

    /// The prepared memory so far; an error once, when the host had no more.
    pub fn prepared(&self) -> Result<Prepared, MemoryError> {
        let mut state = self.shared.lock();
        match state.failure.take() {
            Some(error) => Err(error),
            None => Ok(Prepared { ready: state.ready, huge: state.huge, cpu: state.cpu }),
        }
    }

    /// Waits until `bytes` are prepared, or preparation failed, or the time is over.
    pub fn wait(&self, bytes: u64, longest: Duration) -> Result<Prepared, MemoryError> {
        let state = self.shared.lock();
        let waiting = |state: &mut State| state.ready < bytes && state.failure.is_none();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, longest, waiting)
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        drop(state);
        self.prepared()
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            let _state = self.shared.lock();
            self.shared.changed.notify_all();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has told so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn work(&self, priority: Priority) {
        while let Some((start, end)) = self.take(priority) {
            let before = thread_cpu();
            let result = self.memory.populate(start..end);
            let cpu = thread_cpu().saturating_sub(before);
            let mut state = self.lock();
            state.cpu += cpu;
            match result {
                Ok(huge) => {
                    state.huge += huge;
                    state.finish(start, end);
                }
                Err(error) => {
                    state.failure.get_or_insert(error);
                    self.stop.store(true, Ordering::Release);
                }
            }
            self.changed.notify_all();
        }
    }

    /// The next chunk, once the limit and the bandwidth allow it; None at the end, and for a thread whose place others have taken.
    fn take(&self, priority: Priority) -> Option<(u64, u64)> {
        let mut state = self.lock();
        loop {
            let replaced = priority == Priority::Idle && self.hastened.load(Ordering::Acquire);
            if replaced || self.stop.load(Ordering::Acquire) {
                return None;
            }
            // Only the holder of the lock moves `next`.
            let start = self.next.load(Ordering::Acquire);
            if start >= self.size {
                return None;
            }
            let limit = self.limit.load(Ordering::Acquire);
            let due = self.due(start);
            if start < limit && due.is_zero() {
                let end = (start + CHUNK).min(limit);
                self.next.store(end, Ordering::Release);
                return Some((start, end));
            }
            let longest = if start < limit { due } else { Duration::from_secs(3600) };
            state = self
                .changed
                .wait_timeout(state, longest)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
    }

    /// The wait before byte `start` may be touched.
    fn due(&self, start: u64) -> Duration {
        let Some(bandwidth) = self.budget.bandwidth.filter(|b| *b > 0) else { return Duration::ZERO };
        let nanos = u128::from(start) * 1_000_000_000 / u128::from(bandwidth);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_sub(self.began.elapsed())
    }
}

impl State {
    fn finish(&mut self, start: u64, end: u64) {
        if start != self.ready {
            self.islands.push(start);
            self.islands.push(end);
            return;
        }
        self.ready = end;
        while let Some(at) = self.islands.chunks_exact(2).position(|pair| pair[0] == self.ready) {
            self.ready = self.islands[at * 2 + 1];
            self.islands.drain(at * 2..at * 2 + 2);
        }
    }
}

/// Lowers this thread's priority and moves it to the node's CPUs. Neither is needed for the result.
fn humble(priority: Priority, node: Option<u32>) {
    match priority {
        Priority::Idle => {
            let parameters = libc::sched_param { sched_priority: 0 };
            // SAFETY: the parameters outlive the call; 0 stands for the calling thread.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
        }
        Priority::Nice(nice) => {
            // SAFETY: setpriority takes integers only; 0 stands for the calling thread on Linux.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
        }
    }
    let cpus = node.map(|node| node_cpus(Path::new("/"), node)).unwrap_or_default();
    if !cpus.is_empty() {
        let mut set = rustix::thread::CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// CPUs of a node; none where it has none or there is no such node.
pub fn node_cpus(root: &Path, node: u32) -> Vec<usize> {
    let path = root.join(format!("sys/devices/system/node/node{node}/cpulist"));
    let text = fs::read_to_string(path).unwrap_or_default();
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last.min(first + 4096));
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    const MIB: u64 = 1 << 20;

    fn start(size: u64, limit: u64, budget: Budget) -> (File, Ahead) {
        let file =
            File::from(rustix::fs::memfd_create("tombolo-ahead", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(size).unwrap();
        let path = std::path::PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let memory = crate::memory::Source::File(path).open(size, budget.huge).unwrap();
        (file, Ahead::start(memory, size, limit, None, budget))
    }

    #[test]
    fn memory_is_prepared_up_to_the_limit_and_on_when_it_moves() {
        let (_file, ahead) = start(96 * MIB, 40 * MIB, Budget { threads: 3, ..Budget::default() });
        assert_eq!(ahead.wait(40 * MIB, Duration::from_secs(60)).unwrap().ready, 40 * MIB);
        assert_eq!(ahead.wait(41 * MIB, Duration::from_millis(20)).unwrap().ready, 40 * MIB);
        ahead.allow(u64::MAX);
        assert_eq!(ahead.wait(96 * MIB, Duration::from_secs(60)).unwrap().ready, 96 * MIB);
    }

    #[test]
    fn a_limit_that_moves_back_stops_the_threads_where_they_are() {
        let (_file, ahead) = start(96 * MIB, 16 * MIB, Budget { threads: 2, ..Budget::default() });
        ahead.wait(16 * MIB, Duration::from_secs(60)).unwrap();
        ahead.allow(0);
        assert_eq!(ahead.wait(17 * MIB, Duration::from_millis(20)).unwrap().ready, 16 * MIB);
        ahead.allow(64 * MIB);
        assert_eq!(ahead.wait(64 * MIB, Duration::from_secs(60)).unwrap().ready, 64 * MIB);
        assert_eq!(ahead.wait(65 * MIB, Duration::from_millis(20)).unwrap().ready, 64 * MIB);
    }

    #[test]
    fn what_idle_threads_have_left_others_finish_once_the_guest_takes_memory() {
        let (_file, mut ahead) = start(96 * MIB, 32 * MIB, Budget { threads: 2, ..Budget::default() });
        ahead.wait(32 * MIB, Duration::from_secs(60)).unwrap();
        ahead.hasten();
        ahead.hasten();
        assert_eq!(ahead.threads.len(), 4);
        ahead.allow(u64::MAX);
        assert_eq!(ahead.wait(96 * MIB, Duration::from_secs(60)).unwrap().ready, 96 * MIB);
    }

    #[test]
    fn a_thread_is_idle_or_nice_without_a_privilege() {
        // SAFETY: both calls take integers only; 0 stands for the calling thread.
        let own = || unsafe { (libc::sched_getscheduler(0), libc::getpriority(libc::PRIO_PROCESS, 0)) };
        let seen = |priority| {
            std::thread::spawn(move || {
                humble(priority, None);
                own()
            })
            .join()
            .unwrap()
        };
        assert_eq!(seen(Priority::Idle).0, libc::SCHED_IDLE);
        assert_eq!(seen(Priority::Nice(11)), (libc::SCHED_OTHER, 11));
    }

    #[test]
    fn a_bandwidth_is_kept() {
        let budget = Budget { threads: 2, bandwidth: Some(64 * MIB), ..Budget::default() };
        let began = Instant::now();
        let (_file, ahead) = start(48 * MIB, 48 * MIB, budget);
        ahead.wait(48 * MIB, Duration::from_secs(60)).unwrap();
        // The third chunk of 16 MiB may begin half a second after the start, not before.
        assert!(began.elapsed() >= Duration::from_millis(500));
    }

    #[test]
    fn dropping_ends_threads_that_wait_for_the_limit() {
        let (_file, ahead) = start(64 * MIB, 16 * MIB, Budget::default());
        ahead.wait(16 * MIB, Duration::from_secs(60)).unwrap();
        drop(ahead);
    }

    #[test]
    fn memory_that_shrinks_under_the_threads_is_an_error_and_no_crash() {
        let (file, ahead) = start(64 * MIB, 16 * MIB, Budget { huge: false, ..Budget::default() });
        ahead.wait(16 * MIB, Duration::from_secs(60)).unwrap();
        file.set_len(16 * MIB).unwrap();
        ahead.allow(64 * MIB);
        assert!(matches!(ahead.wait(64 * MIB, Duration::from_secs(60)), Err(MemoryError::Exhausted { .. })));
    }

    #[test]
    fn chunks_that_finish_out_of_order_count_once_the_gap_is_closed() {
        let mut state = State::default();
        for (start, end, ready) in [(2, 3, 0), (1, 2, 0), (0, 1, 3), (4, 5, 3), (3, 4, 5)] {
            state.finish(start, end);
            assert_eq!(state.ready, ready);
        }
    }

    #[test]
    fn the_cpus_of_a_node_are_read_from_its_list() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/node/node1");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cpulist"), "1,4-6\n").unwrap();
        assert_eq!(node_cpus(root.path(), 1), [1, 4, 5, 6]);
        fs::write(folder.join("cpulist"), "\n").unwrap();
        assert!(node_cpus(root.path(), 1).is_empty() && node_cpus(root.path(), 9).is_empty());
    }
}
