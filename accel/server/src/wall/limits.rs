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

/// Makes the kernel end a worker before other processes when the host runs out of memory. The process must still be able to write to its /proc.
pub fn first_to_go() -> anyhow::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000").context("/proc/self/oom_score_adj")
}

/// Sets all of them, for good; `memory` in bytes.
pub fn set(memory: u64) -> anyhow::Result<()> {
    no_core_dump()?;
    limit(libc::RLIMIT_NPROC, TASKS)?;
    limit(libc::RLIMIT_NOFILE, DESCRIPTORS)?;
    limit(libc::RLIMIT_DATA, memory)?;
    limit(libc::RLIMIT_STACK, STACK)?;
    limit(libc::RLIMIT_MEMLOCK, LOCKED)?;
    limit(libc::RLIMIT_SIGPENDING, TASKS)?;
    limit(libc::RLIMIT_MSGQUEUE, 0)
}
