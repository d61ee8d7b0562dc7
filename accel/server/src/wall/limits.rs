// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits of each process of a worker, and of their number. These hold without a cgroup; they count by process, a cgroup counts
//! all of them together.

use anyhow::Context;

/// Threads and processes of a worker: those that wait inside the driver, the driver's own, the linker's.
pub const TASKS: u64 = 1024;
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
pub fn set(memory: u64) -> anyhow::Result<()> {
    few_arenas();
    no_core_dump()?;
    limit(libc::RLIMIT_NPROC, TASKS)?;
    limit(libc::RLIMIT_NOFILE, DESCRIPTORS)?;
    limit(libc::RLIMIT_DATA, memory)?;
    limit(libc::RLIMIT_STACK, STACK)?;
    limit(libc::RLIMIT_MEMLOCK, LOCKED)?;
    limit(libc::RLIMIT_SIGPENDING, TASKS)?;
    limit(libc::RLIMIT_MSGQUEUE, 0)
}
