// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits of each process of a worker, and of their number. These hold without a cgroup; they count by process, a cgroup counts
//! all of them together.

use anyhow::Context;

/// Threads and processes of a worker at most: those that wait inside the driver, the driver's own, the linker's.
pub const TASKS: u64 = 1024;
/// Threads and processes that a worker may have however few the host has, beside one of the driver for each processor: each wait of its client may take one.
pub const FEWEST_TASKS: u64 = 256;
/// Signals under way, and timers. The kernel counts those of a user together, and the timers by which a server that isn't root's ends long waits are the same
/// user's (tombolo_brief): all workers together may have fewer than a user has by default.
pub const SIGNALS: u64 = 32;
/// Descriptors of each process.
const DESCRIPTORS: u64 = 1024;
/// Bytes of each process's first stack, which the limit of private memory doesn't count.
const STACK: u64 = 8 << 20;
/// Bytes of memory that each process may keep from being taken back (mlock): also what it maps of programs and libraries, which the limit of private memory
/// doesn't count. A server that starts with VMs and their devices may have no limit of its own.
pub const LOCKED: u64 = 4 << 20;
/// Bytes of private memory beside what the client's limit says: the driver, its compiler, threads' stacks.
pub const WORKING: u64 = 2 << 30;
/// Bytes of the files that a worker's driver writes, which are memory.
pub const SCRATCH: u64 = 512 << 20;
/// Arenas of malloc, each of which threads share: the C library would have 8 for each processor.
const ARENAS: u64 = 32;
/// Bytes of addresses that malloc reserves at once for an arena's memory (glibc).
const ARENA: u64 = 64 << 20;
/// Bytes of addresses beside those that a loaded driver has, and beside those of private memory: what is mapped of libraries and compiled kernels, and
/// what malloc has reserved for arenas.
pub const SPARE_ADDRESSES: u64 = (1 << 30) + ARENAS * ARENA;

/// The tasks that each worker of a server with so many places may have, so that all of them together take no more than half of those that the server's user, and
/// the host, may have; but [`FEWEST_TASKS`] and one for each processor.
pub fn tasks(places: usize) -> u64 {
    let of_host = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
        text.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(u64::MAX)
    };
    // SAFETY: plain integers, for which zeroes are values, which live during the call.
    let of_user = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NPROC, &mut limit) < 0 { u64::MAX } else { limit.rlim_max }
    };
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    share(of_user.min(of_host("threads-max")).min(of_host("pid_max")), places, processors)
}

/// Of so many tasks on so many processors, as many as one of these places may have.
fn share(tasks: u64, places: usize, processors: u64) -> u64 {
    let fewest = FEWEST_TASKS.saturating_add(processors).min(TASKS);
    (tasks / 2 / (places as u64).max(1)).clamp(fewest, TASKS)
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> anyhow::Result<()> {
    // SAFETY: plain integers, for which zeroes are values.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives during the call.
    if unsafe { libc::getrlimit(resource, &mut limit) } < 0 {
        return Err(std::io::Error::last_os_error()).context("getrlimit");
    }
    // A worker has no more than its server.
    let value = value.min(limit.rlim_max);
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: as above.
    if unsafe { libc::setrlimit(resource, &limit) } < 0 {
        return Err(std::io::Error::last_os_error()).context("setrlimit");
    }
    Ok(())
}

/// A core dump would hold the client's data. Where the host has its dumps taken by a program (`kernel.core_pattern` with a pipe), the kernel ignores a limit
/// of 0 and starts that program, as root and outside of all namespaces, to read what a client's kernel wrote. A limit of 1 keeps it from that
/// (fs/coredump.c), and is less than any dump. A program that a worker executes can be dumped again, so the limit may not be changed: see [`super::calls`].
pub fn no_core_dump() -> anyhow::Result<()> {
    limit(libc::RLIMIT_CORE, 1)
}

/// Limits the arenas of malloc, of which [`addresses`] counts [`ARENAS`]. For a process that has one thread.
#[cfg(target_env = "gnu")]
fn few_arenas() {
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    // SAFETY: integers only.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS.min(8 * processors) as libc::c_int) };
}

#[cfg(not(target_env = "gnu"))]
fn few_arenas() {}

/// Limits the addresses of this process, and of each that it starts, to those that it has now, those of its private memory, and [`SPARE_ADDRESSES`]. The limit of
/// private memory counts pages that may be written to: it forgets them, with what is in them, when that right is taken away (mprotect), and counts no
/// tables of pages, of which addresses without memory can have any number. For a process whose driver is loaded and runs kernels in it; drivers of devices with
/// memory of their own reserve as many addresses as they like.
pub fn addresses() -> anyhow::Result<()> {
    // SAFETY: plain integers, for which zeroes are values.
    let mut data: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives during the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_DATA, &mut data) } < 0 {
        return Err(std::io::Error::last_os_error()).context("getrlimit");
    }
    let pages = std::fs::read_to_string("/proc/self/statm").context("/proc/self/statm")?;
    let pages = pages.split(' ').next().and_then(|n| n.parse::<u64>().ok()).context("/proc/self/statm")?;
    let now = pages * tombolo_calls::memory::PAGE as u64;
    limit(libc::RLIMIT_AS, now.saturating_add(data.rlim_cur).saturating_add(SPARE_ADDRESSES))
}

/// Makes the kernel end a worker before other processes when the host runs out of memory. The process must still be able to write to its /proc.
pub fn first_to_go() -> anyhow::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000").context("/proc/self/oom_score_adj")
}

/// Sets all of them, for good; `memory` in bytes.
pub fn set(memory: u64, tasks: u64) -> anyhow::Result<()> {
    few_arenas();
    no_core_dump()?;
    limit(libc::RLIMIT_NPROC, tasks)?;
    limit(libc::RLIMIT_NOFILE, DESCRIPTORS)?;
    limit(libc::RLIMIT_DATA, memory)?;
    limit(libc::RLIMIT_STACK, STACK)?;
    limit(libc::RLIMIT_MEMLOCK, LOCKED)?;
    limit(libc::RLIMIT_SIGPENDING, SIGNALS)?;
    limit(libc::RLIMIT_MSGQUEUE, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_together_have_half_of_the_tasks_of_their_user_and_host_and_each_has_enough() {
        // A host with 4 million process numbers; one with 32768; a small one; one without; and one with more processors than that.
        assert_eq!(share(1 << 22, 64, 8), TASKS);
        assert_eq!(share(1 << 15, 32, 8), 512);
        assert_eq!(share(1 << 15, 64, 8), FEWEST_TASKS + 8);
        assert_eq!(share(0, 0, 8), FEWEST_TASKS + 8);
        assert_eq!(share(0, 64, 4096), TASKS);
        assert!((FEWEST_TASKS..=TASKS).contains(&tasks(64)));
    }
}
