// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `isolate = true`: a VM's CPUs as a cgroup partition of kind 'isolated', on which the kernel runs nothing but the vCPUs' threads (Linux
//! `Documentation/admin-guide/cgroup-v2.rst`, "Cpuset").
//!
//! The partition is the threaded cgroup `vcpus` in the VM's own. Its ancestors are no partitions, so it is a 'remote' one (Linux 6.7 and newer): each
//! ancestor but the root lists its CPUs in `cpuset.cpus.exclusive`. QEMU's other threads stay in the VM's cgroup.
//!
//! An empty partition still keeps its CPUs from the host. So a record of it is written before the first change, and removed after
//! the last step back. It names the owner, which is the supervisor's process: what a dead owner has left is taken back by the next `up` of
//! any project, or by `clean`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tombolo_passthrough::bind::Owner;
use tombolo_passthrough::lock;
use tombolo_topology::cpus::CpuSet;

use crate::machine::orphans::GivenBack;
use crate::project::state;

/// The cgroup of the vCPUs' threads, below the VM's.
const VCPUS: &str = "vcpus";
const EXCLUSIVE: &str = "cpuset.cpus.exclusive";
const KIND: &str = "cpuset.cpus.partition";
/// The first Linux with remote partitions.
const FIRST_LINUX: (u32, u32) = (6, 7);
/// Time for a QEMU that was killed together with its supervisor to end.
const LETTING_GO: Duration = Duration::from_secs(30);
/// A file of each cgroup below the root, which only those can open who may end the processes there (mode 0200).
const OWNERS: &str = "cgroup.kill";
/// Time for another process to change the exclusive CPUs of a cgroup.
const LOCK: Duration = Duration::from_secs(20);

/// The kernel's side.
pub trait Cgroups {
    /// Makes a cgroup.
    ///
    /// # Errors
    /// The kernel's.
    fn make(&mut self, path: &Path) -> io::Result<()>;
    /// Removes a cgroup in which no thread is.
    ///
    /// # Errors
    /// The kernel's.
    fn remove(&mut self, path: &Path) -> io::Result<()>;
    /// Writes to a file of a cgroup.
    ///
    /// # Errors
    /// The kernel's.
    fn write(&mut self, path: &Path, text: &str) -> io::Result<()>;
}

/// The running kernel.
#[derive(Debug, Default)]
pub struct Kernel;

impl Cgroups for Kernel {
    fn make(&mut self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn write(&mut self, path: &Path, text: &str) -> io::Result<()> {
        fs::write(path, text)
    }
}

/// The steps back from a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    owner: Owner,
    cpus: CpuSet,
    /// The VM's cgroup.
    group: PathBuf,
    /// Ancestors of the VM's cgroup that got CPUs to hand down, the lowest first, with these CPUs.
    given: Vec<(PathBuf, CpuSet)>,
}

/// The folder of the records.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// Records of this user.
    ///
    /// # Errors
    /// The user's folder can't be had.
    pub fn of_user() -> anyhow::Result<Store> {
        Ok(Store { folder: state::base()?.join("partitions") })
    }

    fn path(&self, group: &Path) -> PathBuf {
        self.folder.join(group.file_name().unwrap_or_default()).with_extension("json")
    }

    fn put(&self, record: &Record) -> anyhow::Result<()> {
        let path = self.path(&record.group);
        let write = || {
            fs::create_dir_all(&self.folder)?;
            state::write_atomically(&path, &serde_json::to_vec_pretty(record)?)
        };
        write().with_context(|| format!("the record {} can't be written", path.display()))
    }

    fn remove(&self, record: &Record) -> io::Result<()> {
        match fs::remove_file(self.path(&record.group)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    fn get(&self, group: &Path) -> Option<Record> {
        read(&self.path(group))
    }

    /// The records whose owners are dead, or whose VMs have ended.
    fn orphans(&self) -> Vec<Record> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let records = entries.filter_map(|entry| {
            let path = entry.path();
            let json = path.extension().is_some_and(|extension| extension == "json");
            read(&path).filter(|_| json)
        });
        let mut orphans: Vec<Record> = records.filter(|record| !record.owner.is_alive()).collect();
        orphans.sort_by(|a, b| a.group.cmp(&b.group));
        orphans
    }
}

/// A record. What can't be read is none: a record is written at once or not at all.
fn read(path: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// The CPUs of a VM that are its own.
#[derive(Debug)]
pub struct Partition {
    record: Record,
}

impl Partition {
    /// Takes `cpus` out of the host's and moves `threads` there. `group` is the VM's cgroup, in which QEMU is; its controller cpuset is on.
    ///
    /// # Errors
    /// Says what the kernel refuses and the remedy. Nothing is left of the attempt.
    pub fn make(
        kernel: &mut dyn Cgroups,
        store: &Store,
        owner: Owner,
        group: &Path,
        cpus: &CpuSet,
        threads: &[u32],
    ) -> anyhow::Result<Partition> {
        let _locks = lock(group)?;
        let given = ancestors(group).into_iter().filter_map(|ancestor| {
            let missing = cpus.without(&exclusive(&ancestor));
            (!missing.is_empty()).then_some((ancestor, missing))
        });
        let record = Record { owner, cpus: cpus.clone(), group: group.to_owned(), given: given.collect() };
        store.put(&record)?;
        let made = take(kernel, &record).and_then(|()| enter(kernel, &record, threads));
        if let Err(e) = made {
            // The first error counts. The record stays where a step back fails, and the next `up` repeats that step.
            let _first_error_counts = undo(kernel, store, &record);
            return Err(e);
        }
        Ok(Partition { record })
    }

    /// The cgroup that is the partition.
    pub fn path(&self) -> PathBuf {
        self.record.group.join(VCPUS)
    }

    /// The partition of a VM that runs on, which the program before has made in the VM's cgroup.
    ///
    /// # Errors
    /// Its record can't be read.
    pub fn take_over(store: &Store, group: &Path) -> anyhow::Result<Partition> {
        let path = store.path(group);
        let read = fs::read(&path).map_err(anyhow::Error::from);
        let record = read.and_then(|text| Ok(serde_json::from_slice(&text)?));
        Ok(Partition { record: record.with_context(|| path.display().to_string())? })
    }

    fn give_back(self, kernel: &mut dyn Cgroups, store: &Store) -> anyhow::Result<()> {
        let given = lock(&self.record.group).and_then(|_locks| undo(kernel, store, &self.record));
        if given.is_err() {
            // The VM has ended, though its owner lives.
            let owner = self.record.owner.ended();
            store.put(&Record { owner, ..self.record })?;
        }
        given
    }
}

/// Gives the CPUs of a VM whose QEMU has ended back to the host.
///
/// # Errors
/// The kernel refuses a step. The next [`give_back_orphans`] repeats it.
pub fn give_back(partition: Partition) -> anyhow::Result<()> {
    partition.give_back(&mut Kernel, &Store::of_user()?)
}

/// The VM's cgroups of dead supervisors that are still partitioned.
///
/// # Errors
/// The user's folder can't be had.
pub fn orphans() -> anyhow::Result<Vec<PathBuf>> {
    Ok(Store::of_user()?.orphans().into_iter().map(|record| record.group).collect())
}

/// Gives the CPUs of VMs that died with their supervisor back to the host, and removes the VMs' cgroups.
pub fn give_back_orphans() -> GivenBack<PathBuf> {
    // Whatever is in the place of the user's folder has no records of this user's.
    Store::of_user().map(|store| reclaim(&mut Kernel, &store)).unwrap_or_default()
}

fn reclaim(kernel: &mut dyn Cgroups, store: &Store) -> GivenBack<PathBuf> {
    let mut result = GivenBack::default();
    for record in store.orphans() {
        result.add(reclaim_one(kernel, store, &record).map(|given| given.then_some(record.group)));
    }
    result
}

/// Returns false where another process has given the CPUs back meanwhile, or has them for a VM.
fn reclaim_one(kernel: &mut dyn Cgroups, store: &Store, record: &Record) -> anyhow::Result<bool> {
    let is_there = record.group.parent().is_some_and(Path::is_dir);
    let _locks = is_there.then(|| lock(&record.group)).transpose()?;
    if store.get(&record.group).as_ref() != Some(record) {
        return Ok(false);
    }
    undo(kernel, store, record)?;
    remove(kernel, &record.group)?;
    Ok(true)
}

/// Checks that a VM in a cgroup below `parent` could have these CPUs for itself. Nothing is changed.
///
/// # Errors
/// Something is missing; the error names the place and the remedy.
pub fn check(parent: &Path, cpus: &CpuSet) -> anyhow::Result<()> {
    check_on(linux(), parent, cpus)
}

fn check_on((major, minor): (u32, u32), parent: &Path, cpus: &CpuSet) -> anyhow::Result<()> {
    anyhow::ensure!(
        (major, minor) >= FIRST_LINUX,
        "Linux {major}.{minor} can't isolate the CPUs of a cgroup that systemd or a user made; it takes Linux 6.7 or newer. Boot one, or leave out \
         'isolate' and boot with isolcpus={cpus}"
    );
    let controllers = fs::read_to_string(parent.join("cgroup.controllers"))
        .with_context(|| format!("{} is no cgroup", parent.display()))?;
    anyhow::ensure!(
        controllers.split_whitespace().any(|controller| controller == "cpuset"),
        "the cgroup {} lacks the controller cpuset; as root: echo +cpuset >{}/cgroup.subtree_control, or in the unit: Delegate=yes; a hierarchy of \
         version 1 that holds it must be unmounted first",
        parent.display(),
        parent.parent().unwrap_or(parent).display()
    );
    for ancestor in ancestors(&parent.join(VCPUS)) {
        if cpus.without(&exclusive(&ancestor)).is_empty() {
            continue;
        }
        let file = ancestor.join(EXCLUSIVE);
        let writable = rustix::fs::access(&file, rustix::fs::Access::WRITE_OK);
        writable.map_err(io::Error::from).with_context(|| {
            format!("the CPUs {cpus} must be in {}; as root: echo {cpus} >{0}", file.display())
        })?;
    }
    Ok(())
}

/// The version of the running Linux.
fn linux() -> (u32, u32) {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The cgroups above one, the lowest first, without the root of the hierarchy: that has no type.
fn ancestors(group: &Path) -> Vec<PathBuf> {
    let above = group.ancestors().skip(1).take_while(|path| path.join("cgroup.type").exists());
    above.map(Path::to_owned).collect()
}

/// The CPUs that a cgroup may hand down to partitions.
fn exclusive(group: &Path) -> CpuSet {
    let text = fs::read_to_string(group.join(EXCLUSIVE)).unwrap_or_default();
    text.parse().unwrap_or_default()
}

/// Keeps others from changing the exclusive CPUs of common ancestors meanwhile: locks of files that other users can't open, of all ancestors whose file this
/// user can open, the highest first. Where that is none, it is the lock of the highest cgroup, which any user can take. The VM's cgroup need not be there.
fn lock(group: &Path) -> anyhow::Result<Vec<File>> {
    let take = |file: File, path: &Path| lock::take(&file, path, LOCK).map(|()| file);
    let above = ancestors(group);
    let mut locks = Vec::new();
    for path in above.iter().rev().map(|ancestor| ancestor.join(OWNERS)) {
        let opened = match File::options().write(true).open(&path) {
            Err(e) if matches!(e.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound) => {
                continue;
            }
            other => other,
        };
        let taken = opened.and_then(|file| take(file, &path));
        locks.push(taken.with_context(|| path.display().to_string())?);
    }
    if locks.is_empty() {
        let highest = above.last().map(PathBuf::as_path).or(group.parent()).unwrap_or(group);
        let taken = File::open(highest).and_then(|file| take(file, highest));
        locks.push(taken.with_context(|| highest.display().to_string())?);
    }
    Ok(locks)
}

/// Makes the partition, from the highest cgroup down.
fn take(kernel: &mut dyn Cgroups, record: &Record) -> anyhow::Result<()> {
    let Record { cpus, group, given, .. } = record;
    let refused = |path: &Path, value: &str| {
        format!(
            "the CPUs {cpus} can't be isolated: {} does not take '{value}'; see who has them: grep -r . /sys/fs/cgroup --include=cpuset.cpus",
            path.display()
        )
    };
    let mut write =
        |path: PathBuf, value: &str| kernel.write(&path, value).with_context(|| refused(&path, value));
    for (ancestor, _) in given.iter().rev() {
        let all: CpuSet = exclusive(ancestor).iter().chain(cpus.iter()).collect();
        write(ancestor.join(EXCLUSIVE), &all.to_string())?;
    }
    let list = cpus.to_string();
    write(group.join("cgroup.subtree_control"), "+cpuset")?;
    write(group.join(EXCLUSIVE), &list)?;
    let vcpus = group.join(VCPUS);
    match kernel.make(&vcpus) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.with_context(|| format!("the cgroup {} can't be made", vcpus.display()))?,
    }
    let mut write = |file: &str, value: &str| {
        let path = vcpus.join(file);
        kernel.write(&path, value).with_context(|| refused(&path, value))
    };
    write("cgroup.type", "threaded")?;
    write("cpuset.cpus", &list)?;
    write(EXCLUSIVE, &list)?;
    write(KIND, "isolated")?;
    let kind = fs::read_to_string(vcpus.join(KIND)).unwrap_or_default();
    anyhow::ensure!(
        kind.trim() == "isolated",
        "the CPUs {cpus} can't be isolated: the kernel says '{}' in {}; name other CPUs, or free these",
        kind.trim(),
        vcpus.join(KIND).display()
    );
    Ok(())
}

/// Moves the vCPUs' threads into the partition.
fn enter(kernel: &mut dyn Cgroups, record: &Record, threads: &[u32]) -> anyhow::Result<()> {
    let path = record.group.join(VCPUS).join("cgroup.threads");
    for thread in threads {
        kernel
            .write(&path, &thread.to_string())
            .with_context(|| format!("the thread {thread} of a vCPU can't enter {}", path.display()))?;
    }
    Ok(())
}

/// Takes the steps back that are needed, from the lowest cgroup up; those that were never made, or are undone, need none.
fn undo(kernel: &mut dyn Cgroups, store: &Store, record: &Record) -> anyhow::Result<()> {
    let Record { cpus, group, given, .. } = record;
    let vcpus = group.join(VCPUS);
    if vcpus.is_dir() {
        // Threads that still run there may go on; the CPUs are the host's again.
        kernel
            .write(&vcpus.join(KIND), "member")
            .and_then(|()| kernel.write(&vcpus.join(EXCLUSIVE), "\n"))
            .with_context(|| {
            format!("the CPUs {cpus} stay isolated by {}; to try again: tombolo clean", vcpus.display())
        })?;
        let threads = fs::read_to_string(vcpus.join("cgroup.threads")).unwrap_or_default();
        for thread in threads.split_ascii_whitespace() {
            // One that has ended meanwhile needs no other place; the removal tells of any other failure.
            let _has_ended = kernel.write(&group.join("cgroup.threads"), thread);
        }
        remove(kernel, &vcpus)?;
    }
    if group.is_dir() && !exclusive(group).is_empty() {
        kernel.write(&group.join(EXCLUSIVE), "\n").with_context(|| group.display().to_string())?;
    }
    for (ancestor, added) in given.iter().filter(|(ancestor, _)| ancestor.is_dir()) {
        let now = exclusive(ancestor);
        let left = now.without(added);
        if left != now {
            // An empty line would be no write at all.
            kernel.write(&ancestor.join(EXCLUSIVE), &format!("{left}\n")).with_context(|| {
                let file = ancestor.join(EXCLUSIVE);
                format!("the CPUs {added} stay in {}; to try again: tombolo clean", file.display())
            })?;
        }
    }
    store.remove(record).with_context(|| store.path(group).display().to_string())
}

/// Removes a cgroup once the threads in it have ended.
pub(super) fn remove(kernel: &mut dyn Cgroups, path: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match kernel.remove(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The kernel tells the end of the last thread by this alone.
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && begun.elapsed() < LETTING_GO => {
                std::thread::sleep(Duration::from_millis(20));
            }
            removed => {
                return removed.with_context(|| {
                    let path = path.display();
                    format!(
                        "the cgroup {path} can't be removed; see {path}/cgroup.threads, then: tombolo clean"
                    )
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
