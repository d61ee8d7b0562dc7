// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPUs on which threads and processes may run.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::cpus::CpuSet;

/// Passes over the threads of a process. A thread that begins during a pass may be missed by it; one that a confined thread starts is confined.
const PASSES: usize = 16;

/// The threads of a process.
///
/// # Errors
/// The process is gone.
pub fn threads(process: u32) -> Result<Vec<u32>> {
    let folder = Path::new("/proc").join(process.to_string()).join("task");
    let entries = fs::read_dir(&folder).with_context(|| format!("{} can't be read", folder.display()))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The CPUs on which a thread may run; none where the thread has ended.
pub fn of_thread(thread: u32) -> Option<CpuSet> {
    let text = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.parse().ok()
}

/// The CPUs on which any of these threads may run.
pub fn of_threads(threads: impl IntoIterator<Item = u32>) -> CpuSet {
    let sets: Vec<CpuSet> = threads.into_iter().filter_map(of_thread).collect();
    sets.iter().flat_map(CpuSet::iter).collect()
}

/// The CPUs on which any thread of a process or of its descendants may run; none where the process is gone.
pub fn of_family(process: u32) -> Option<CpuSet> {
    let mut all = Vec::new();
    family(process, &mut all);
    (!all.is_empty()).then(|| of_threads(all))
}

/// Lets a thread run on `cpus` alone. A thread that has ended needs none.
///
/// # Errors
/// The kernel refuses: all of `cpus` are offline or outside of the thread's cpuset, or the thread is another user's.
pub fn set(thread: u32, cpus: &CpuSet) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus.iter() {
        let cpu = cpu as usize;
        ensure!(cpu < rustix::thread::CpuSet::MAX_CPU, "CPU {cpu} is beyond what a thread can be pinned to");
        set.set(cpu);
    }
    let pid = i32::try_from(thread).ok().and_then(Pid::from_raw).context("a thread without a number")?;
    match rustix::thread::sched_setaffinity(Some(pid), &set) {
        Err(Errno::SRCH) => Ok(()),
        Err(Errno::INVAL) => bail!(
            "the thread {thread} can't be pinned to the CPUs {cpus}: they are offline, or outside of its cpuset; bring them online in \
             /sys/devices/system/cpu/cpu*/online, or add them to its cgroup (cpuset.cpus)"
        ),
        result => result.with_context(|| format!("the thread {thread} can't be pinned to the CPUs {cpus}")),
    }
}

/// Lets a process, its threads and its descendants run on `cpus` alone. Threads and children that they start later inherit that.
///
/// # Errors
/// As [`set`].
pub fn confine(process: u32, cpus: &CpuSet) -> Result<()> {
    let mut done = BTreeSet::new();
    for _ in 0..PASSES {
        let mut new = Vec::new();
        family(process, &mut new);
        new.retain(|thread| !done.contains(thread));
        if new.is_empty() {
            break;
        }
        for thread in new {
            set(thread, cpus)?;
            done.insert(thread);
        }
    }
    Ok(())
}

/// The threads of a process and of its descendants. A process that ends meanwhile is left out.
fn family(process: u32, all: &mut Vec<u32>) {
    for thread in threads(process).unwrap_or_default() {
        all.push(thread);
        let children = fs::read_to_string(format!("/proc/{process}/task/{thread}/children"));
        for child in children.unwrap_or_default().split_ascii_whitespace() {
            if let Ok(child) = child.parse() {
                family(child, all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_its_children_and_those_that_they_start_later_run_on_the_given_cpus() {
        let all = of_thread(std::process::id()).unwrap();
        let one = CpuSet::from_iter(all.first());
        // A shell with a child, which starts another one when it is told to.
        let mut shell = Command::new("sh")
            .args(["-c", "sh -c 'echo $$; read go; sleep 100 & echo $!; read go; kill $!' <&0; exit"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(shell.stdout.take().unwrap()).lines();
        let mut next = || said.next().unwrap().unwrap().parse::<u32>().unwrap();
        let child = next();
        confine(shell.id(), &one).unwrap();
        assert_eq!((of_thread(shell.id()), of_thread(child)), (Some(one.clone()), Some(one.clone())));
        shell.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        assert_eq!(of_thread(next()), Some(one));
        confine(shell.id(), &all).unwrap();
        assert_eq!(of_threads([shell.id(), child]), all);
        shell.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn cpus_that_the_host_does_not_have_are_refused_by_name() {
        let absent = CpuSet::from_iter([1000]);
        let error = set(std::process::id(), &absent).unwrap_err().to_string();
        assert!(
            error.contains("can't be pinned to the CPUs 1000") && error.ends_with("(cpuset.cpus)"),
            "{error}"
        );
    }
}
