// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that queue for one lock and are killed or stopped there at any instant. Each appends records to one file as fast as it can. Only
//! the members that wait for the lock recover the dead. Two that held the lock at once would overwrite each other's records.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};

use crate::rng::Rng;
use crate::zone::{Zone, raise};

const CHILDREN: u32 = 4;
/// Counters in the zone, by child: records that were acknowledged, the longest append (ns), and whether it failed.
const DONE: u64 = 0;
const LONGEST: u64 = 8;
const FAILED: u64 = 16;
const RECORD: usize = 16;

struct Child {
    member: u32,
    pid: i32,
}

/// Kills `kills` times.
pub fn run(seed: u64, mib: u64, kills: u64) -> Result<String, String> {
    let zone = Zone::new(mib)?;
    let parent = zone.open(zone.join(0)?)?;
    let made = parent.create(ROOT, Some(b"log"), &Create::mode(libc::S_IFREG | 0o644));
    let log = made.map_err(|e| format!("create: {e}"))?;
    let mut rng = Rng(seed);
    let most = (mib << 20) / 4 * 3;
    let mut children = Vec::new();
    for member in 1..=CHILDREN {
        children.push(start(&zone, member, log, most)?);
    }
    let (mut stops, mut killed) = (0u64, 0u64);
    // With a full file no member would queue any more.
    while killed < kills && parent.size(log) < most {
        killed += 1;
        std::thread::sleep(Duration::from_micros(rng.below(8000)));
        if rng.one_in(3) {
            let stopped = &children[rng.below(u64::from(CHILDREN)) as usize];
            signal(stopped, libc::SIGSTOP)?;
            std::thread::sleep(Duration::from_micros(rng.below(80_000)));
            signal(stopped, libc::SIGCONT)?;
            stops += 1;
        }
        let victim = rng.below(u64::from(CHILDREN)) as usize;
        let member = children[victim].member;
        end(&children[victim])?;
        // Until the host has noticed, the others wait for the dead.
        std::thread::sleep(Duration::from_micros(rng.below(3000)));
        zone.declare_dead(member)?;
        std::thread::sleep(Duration::from_micros(rng.below(3000)));
        children[victim] = start(&zone, member, log, most)?;
        if (1..=u64::from(CHILDREN)).any(|m| zone.counter(FAILED + m).load(Ordering::Acquire) != 0) {
            return Err("a member failed (above)".into());
        }
    }
    for child in &children {
        end(child)?;
        zone.declare_dead(child.member)?;
    }
    parent.recover_all().map_err(|e| format!("recovery: {e}"))?;
    let records = verify(&zone, &parent, log, killed + u64::from(CHILDREN))?;
    drop(parent);
    zone.check()?;
    let longest = (1..=u64::from(CHILDREN)).map(|m| zone.counter(LONGEST + m).load(Ordering::Acquire)).max();
    Ok(format!(
        "{killed} kills and {stops} stops of members that append to one file: {records} records, all whole; longest append {} ms",
        longest.unwrap_or(0) / 1_000_000
    ))
}

/// Checks that every acknowledged record is there once, and at most one other record per death.
fn verify(zone: &Zone, fs: &Filesystem, log: Handle, deaths: u64) -> Result<u64, String> {
    let mut bytes = vec![0; fs.size(log) as usize];
    let got = fs.pread(log, &mut bytes, 0).map_err(|e| format!("read: {e}"))?;
    if got != bytes.len() || got % RECORD != 0 {
        return Err(format!("{got} bytes are no whole records"));
    }
    let mut last = [0u64; CHILDREN as usize + 1];
    for (at, record) in bytes.chunks_exact(RECORD).enumerate() {
        let word = |i: usize| u64::from_le_bytes(record[i..i + 8].try_into().unwrap_or_default());
        let (member, number) = (word(0), word(8));
        let last = last.get_mut(member as usize).filter(|_| member != 0);
        let last = last.ok_or_else(|| format!("record {at} is of no member: {record:?}"))?;
        // The next incarnation repeats an append that was not acknowledged before a death.
        if number != *last + 1 && number != *last {
            return Err(format!("record {at} is number {number} of member {member}, after {last}"));
        }
        *last = number;
    }
    let records = (bytes.len() / RECORD) as u64;
    let done: u64 = (1..=u64::from(CHILDREN)).map(|m| zone.counter(DONE + m).load(Ordering::Acquire)).sum();
    if records < done || records > done + deaths {
        return Err(format!("{records} records, {done} were acknowledged and {deaths} members died"));
    }
    Ok(records)
}

fn start(zone: &Zone, member: u32, log: Handle, most: u64) -> Result<Child, String> {
    let incarnation = zone.join(member)?;
    // SAFETY: this process has one thread; the child works and ends without returning.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if pid == 0 {
        // SAFETY: a plain call; the child dies with its parent.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        if let Err(why) =
            zone.open(incarnation).and_then(|fs| append(zone, u64::from(member), &fs, log, most))
        {
            eprintln!("member {member}: {why}");
            zone.counter(FAILED + u64::from(member)).store(1, Ordering::Release);
        }
        // SAFETY: ends the child at once, without running the parent's destructors.
        unsafe { libc::_exit(0) }
    }
    Ok(Child { member, pid })
}

fn append(zone: &Zone, member: u64, fs: &Filesystem, log: Handle, most: u64) -> Result<(), String> {
    let (done, longest) = (zone.counter(DONE + member), zone.counter(LONGEST + member));
    while fs.size(log) < most {
        let number = done.load(Ordering::Acquire) + 1;
        let mut record = [0; RECORD];
        record[..8].copy_from_slice(&member.to_le_bytes());
        record[8..].copy_from_slice(&number.to_le_bytes());
        let since = Instant::now();
        fs.append(log, &record, false).map_err(|e| format!("append: {e}"))?;
        raise(longest, since.elapsed().as_nanos() as u64);
        done.store(number, Ordering::Release);
    }
    // The file is full: waits to be killed.
    loop {
        std::thread::park();
    }
}

fn signal(child: &Child, signal: i32) -> Result<(), String> {
    // SAFETY: a child of this process that was not waited for yet.
    if unsafe { libc::kill(child.pid, signal) } == 0 {
        Ok(())
    } else {
        Err(format!("signal {signal}: {}", std::io::Error::last_os_error()))
    }
}

fn end(child: &Child) -> Result<(), String> {
    signal(child, libc::SIGKILL)?;
    let mut status = 0;
    // SAFETY: as above.
    if unsafe { libc::waitpid(child.pid, &mut status, 0) } != child.pid {
        return Err(format!("waitpid: {}", std::io::Error::last_os_error()));
    }
    Ok(())
}
