// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that are killed. Two children work, each in a directory of its own and, under names of its own, in one that both use, so
//! that they share locks, the inode table and the block map. The parent kills one at a time at any instant, says so in the
//! member table, cleans up as another member, and compares what is there with what the child's model says.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};

use crate::model::{Model, Reach};
use crate::rng::Rng;
use crate::tree::Spot;
use crate::zone::{Zone, raise};

const CHILDREN: u32 = 2;
/// Counters in the zone: operations begun and done by child, its longest operation (ns), and whether it failed.
const BEGUN: u64 = 0;
const DONE: u64 = 8;
const LONGEST: u64 = 16;
const FAILED: u64 = 24;

struct Child {
    member: u32,
    model: Model,
    rng: Rng,
    pid: i32,
    done_before: u64,
}

/// Kills `kills` times.
pub fn run(seed: u64, mib: u64, kills: u64) -> Result<String, String> {
    let zone = Zone::new(mib)?;
    let parent = zone.open(zone.join(0)?)?;
    let dir = |name: &str| {
        parent
            .create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755))
            .map_err(|e| format!("{name}: {e}"))
    };
    let shared = dir("shared")?;
    let mut rng = Rng(seed);
    let mut children = Vec::new();
    for member in 1..=CHILDREN {
        let spot = |dir: Handle| Spot { ino: dir.ino, path: None };
        let own = spot(dir(&format!("own{member}"))?);
        let model = Model::new(own, Some(spot(shared)), &format!("m{member}-"), Reach::Core);
        children.push(Child { member, model, rng: Rng(rng.next()), pid: 0, done_before: 0 });
    }
    for child in &mut children {
        start(&zone, child)?;
    }
    let mut in_the_middle = 0;
    let mut slowest_recovery = Duration::ZERO;
    for kill in 0..kills {
        let victim = rng.below(u64::from(CHILDREN)) as usize;
        let delay = Duration::from_micros(if rng.one_in(3) { rng.below(300) } else { rng.below(20_000) });
        let until = Instant::now() + delay;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let child = &mut children[victim];
        wait_for_the_middle(&zone, child, &mut rng);
        end(child, libc::SIGKILL)?;
        zone.bury(child.member)?;
        let began = Instant::now();
        parent.recover(child.member).map_err(|e| format!("kill {kill}: recovery: {e}"))?;
        slowest_recovery = slowest_recovery.max(began.elapsed());
        let member = child.member;
        let middle =
            catch_up(&zone, &parent, child).map_err(|e| format!("kill {kill}, of member {member}: {e}"))?;
        in_the_middle += u64::from(middle);
        let child = &mut children[victim];
        start(&zone, child)?;
        for child in &children {
            let failed = zone.counter(FAILED + u64::from(child.member)).load(Ordering::Acquire);
            if failed != 0 {
                return Err(format!("member {} found a difference (above)", child.member));
            }
        }
    }
    for child in &mut children {
        end(child, libc::SIGKILL)?;
        zone.bury(child.member)?;
        parent.recover(child.member).map_err(|e| format!("recovery: {e}"))?;
        catch_up(&zone, &parent, child)?;
    }
    parent.recover_all().map_err(|e| format!("recovery: {e}"))?;
    drop(parent);
    zone.check()?;
    let done: u64 = (1..=u64::from(CHILDREN)).map(|m| zone.counter(DONE + m).load(Ordering::Acquire)).sum();
    let longest = (1..=u64::from(CHILDREN)).map(|m| zone.counter(LONGEST + m).load(Ordering::Acquire)).max();
    Ok(format!(
        "{kills} kills ({in_the_middle} in the middle of an operation), {done} operations: nothing lost, fsck finds nothing; longest operation {} ms, longest recovery {} ms",
        longest.unwrap_or(0) / 1_000_000,
        slowest_recovery.as_millis()
    ))
}

/// Models take longer than file systems: waits, within bounds, until an operation is under way, and a random moment more.
fn wait_for_the_middle(zone: &Zone, child: &Child, rng: &mut Rng) {
    let member = u64::from(child.member);
    let (begun, done) = (zone.counter(BEGUN + member), zone.counter(DONE + member));
    for _ in 0..200_000 {
        if begun.load(Ordering::Acquire) != done.load(Ordering::Acquire) {
            break;
        }
        std::hint::spin_loop();
    }
    let most = if rng.one_in(4) { 20_000 } else { 500 };
    for _ in 0..rng.below(most) {
        std::hint::spin_loop();
    }
}

fn start(zone: &Zone, child: &mut Child) -> Result<(), String> {
    let seat = zone.join(child.member)?;
    child.done_before = zone.counter(DONE + u64::from(child.member)).load(Ordering::Acquire);
    zone.counter(BEGUN + u64::from(child.member)).store(child.done_before, Ordering::Release);
    // SAFETY: this process has one thread; the child works and ends without returning.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if pid == 0 {
        // SAFETY: a plain call; the child dies with its parent.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let result = zone.open(seat).and_then(|fs| work(zone, child, &fs));
        if let Err(why) = result {
            eprintln!("member {}: {why}", child.member);
            zone.counter(FAILED + u64::from(child.member)).store(1, Ordering::Release);
        }
        // SAFETY: ends the child at once, without running what belongs to the parent.
        unsafe { libc::_exit(0) }
    }
    child.pid = pid;
    Ok(())
}

fn work(zone: &Zone, child: &mut Child, fs: &Filesystem) -> Result<(), String> {
    let member = u64::from(child.member);
    let (begun, done, longest) =
        (zone.counter(BEGUN + member), zone.counter(DONE + member), zone.counter(LONGEST + member));
    loop {
        let op = child.model.random_op(&mut child.rng);
        begun.fetch_add(1, Ordering::SeqCst);
        let since = Instant::now();
        let real = child.model.execute(fs, &op)?;
        raise(longest, since.elapsed().as_nanos() as u64);
        done.fetch_add(1, Ordering::SeqCst);
        child.model.settle(&op, real)?;
    }
}

fn end(child: &Child, signal: i32) -> Result<(), String> {
    // SAFETY: a child of this process that was not waited for yet.
    unsafe {
        libc::kill(child.pid, signal);
        let mut status = 0;
        if libc::waitpid(child.pid, &mut status, 0) != child.pid {
            return Err(format!("waitpid: {}", std::io::Error::last_os_error()));
        }
    }
    Ok(())
}

/// Repeats in the model what the child did, and has it agree with the file system. Whether it was in the middle of something.
fn catch_up(zone: &Zone, parent: &Filesystem, child: &mut Child) -> Result<bool, String> {
    let member = u64::from(child.member);
    let begun = zone.counter(BEGUN + member).load(Ordering::Acquire);
    let done = zone.counter(DONE + member).load(Ordering::Acquire);
    for _ in child.done_before..done {
        let op = child.model.random_op(&mut child.rng);
        // Numbers of inodes made meanwhile are learned when all is compared.
        let _ = child.model.apply(&op);
    }
    let open = (begun > done).then(|| child.model.random_op(&mut child.rng));
    child.model.adopt(parent, open.as_ref())?;
    Ok(open.is_some())
}
