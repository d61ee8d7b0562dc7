// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that are killed. Six children work, each in a directory of its own and, under names of its own, in a common one, so that they share
//! locks, the inode table and the block map. The parent kills one at any instant, and now and then a second one before the first is recovered, or
//! the one that recovers it and the one that recovers that, or stops one for a moment. At least three live on and do not pause: a death becomes
//! known late, and the parent recovers later still; a child that needs a dead one's lock recovers it before. Then the state is compared with the
//! dead child's model.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};
use tombolo_files::sys;

use crate::model::{Model, Reach};
use crate::rng::Rng;
use crate::tree::Spot;
use crate::zone::{Zone, raise};

const CHILDREN: u32 = 6;
/// So many of them live on.
const SURVIVORS: usize = 3;
/// Counters in the zone: operations begun and done by child, its longest operation (ns), and whether it failed.
const BEGUN: u64 = 0;
const DONE: u64 = 8;
const LONGEST: u64 = 16;
const FAILED: u64 = 24;

/// After so many operations a child has a pause after each.
const AT_ONCE: u64 = 100;
const PAUSE: Duration = Duration::from_millis(1);

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
    let mut tally = Tally::default();
    while tally.kills < kills {
        round(&zone, &parent, &mut children, &mut rng, &mut tally)
            .map_err(|e| format!("kill {}: {e}; {}", tally.kills, tally.line(&zone)))?;
        if tally.kills % 100 < 2 {
            println!("{}", tally.line(&zone));
        }
    }
    for child in &mut children {
        end(child, libc::SIGKILL)?;
        zone.declare_dead(child.member)?;
        parent.recover(child.member).map_err(|e| format!("recovery: {e}"))?;
        catch_up(&zone, &parent, child)?;
    }
    parent.recover_all().map_err(|e| format!("recovery: {e}"))?;
    drop(parent);
    zone.check()?;
    Ok(format!("nothing lost, fsck finds nothing; {}", tally.line(&zone)))
}

/// The sums of all rounds.
#[derive(Default)]
struct Tally {
    kills: u64,
    seconds: u64,
    recoverers: u64,
    stops: u64,
    in_the_middle: u64,
    slowest_recovery: Duration,
}

impl Tally {
    fn line(&self, zone: &Zone) -> String {
        let counters = |first: u64| {
            (1..=u64::from(CHILDREN)).map(move |m| zone.counter(first + m).load(Ordering::Acquire))
        };
        format!(
            "{} kills ({} in the middle of an operation, {} before the recovery from another, {} in the recovery from another), {} stops, {} operations; longest operation {} ms, longest recovery {} ms",
            self.kills,
            self.in_the_middle,
            self.seconds,
            self.recoverers,
            self.stops,
            counters(DONE).sum::<u64>(),
            counters(LONGEST).max().unwrap_or(0) / 1_000_000,
            self.slowest_recovery.as_millis()
        )
    }
}

/// One or two deaths, and the state required after them.
fn round(
    zone: &Zone,
    parent: &Filesystem,
    children: &mut [Child],
    rng: &mut Rng,
    tally: &mut Tally,
) -> Result<(), String> {
    if zone.take_pending(0)? & u64::from(sys::TMB_PENDING_REVOKE) != 0 {
        parent.let_go();
    }
    let first = rng.below(u64::from(CHILDREN)) as usize;
    let second = rng.one_in(4).then(|| (first + 1) % children.len());
    let stopped = rng.one_in(5).then(|| (first + 2) % children.len());
    let delay = Duration::from_micros(if rng.one_in(3) { rng.below(300) } else { rng.below(20_000) });
    std::thread::sleep(delay);
    if let Some(stopped) = stopped {
        signal(&children[stopped], libc::SIGSTOP)?;
        tally.stops += 1;
    }
    wait_for_the_middle(zone, &children[first], rng);
    let mut victims: Vec<usize> = [Some(first), second].into_iter().flatten().collect();
    let chain = rng.one_in(2);
    for (n, victim) in victims.iter().enumerate() {
        tally.seconds += u64::from(n > 0);
        let is_last = n + 1 == victims.len();
        kill(zone, &children[*victim], rng, tally)?;
        if !is_last {
            std::thread::sleep(Duration::from_micros(rng.below(2000)));
        }
    }
    if chain {
        kill_recoverers(zone, children, rng, &mut victims, tally)?;
    }
    std::thread::sleep(Duration::from_micros(rng.below(10_000)));
    if let Some(stopped) = stopped.filter(|stopped| !victims.contains(stopped)) {
        signal(&children[stopped], libc::SIGCONT)?;
    }
    for victim in &victims {
        let began = Instant::now();
        let member = children[*victim].member;
        parent.recover(member).map_err(|e| format!("recovery of member {member}: {e}"))?;
        tally.slowest_recovery = tally.slowest_recovery.max(began.elapsed());
    }
    for victim in victims {
        let child = &mut children[victim];
        let member = child.member;
        let middle = catch_up(zone, parent, child).map_err(|e| format!("of member {member}: {e}"))?;
        tally.in_the_middle += u64::from(middle);
        start(zone, child)?;
    }
    for child in children {
        let failed = zone.counter(FAILED + u64::from(child.member)).load(Ordering::Acquire);
        if failed != 0 {
            return Err(format!("member {} found a difference (above)", child.member));
        }
    }
    Ok(())
}

/// Kills a child, whose death becomes known a moment later. Until then the others wait for it; then they recover it.
fn kill(zone: &Zone, child: &Child, rng: &mut Rng, tally: &mut Tally) -> Result<(), String> {
    tally.kills += 1;
    end(child, libc::SIGKILL)?;
    std::thread::sleep(Duration::from_micros(rng.below(10_000)));
    zone.declare_dead(child.member)?;
    zone.tell_of(child.member)
}

/// Kills who recovers one of the dead, and who recovers that one, each at a random moment of its recovery.
fn kill_recoverers(
    zone: &Zone,
    children: &[Child],
    rng: &mut Rng,
    victims: &mut Vec<usize>,
    tally: &mut Tally,
) -> Result<(), String> {
    while victims.len() + SURVIVORS < children.len() {
        let Some(recoverer) = wait_for_recoverer(zone, children, victims)? else { return Ok(()) };
        let most = if rng.one_in(2) { 20_000 } else { 200 };
        for _ in 0..rng.below(most) {
            std::hint::spin_loop();
        }
        let member = children[recoverer].member;
        kill(zone, &children[recoverer], rng, tally)?;
        for victim in &*victims {
            tally.recoverers += u64::from(zone.recoverer(children[*victim].member)? == Some(member));
        }
        victims.push(recoverer);
    }
    Ok(())
}

/// Waits, within bounds, until a living child recovers one of the dead.
fn wait_for_recoverer(zone: &Zone, children: &[Child], victims: &[usize]) -> Result<Option<usize>, String> {
    for _ in 0..100_000 {
        for victim in victims {
            let owner = zone.recoverer(children[*victim].member)?;
            let living = |child: &usize| !victims.contains(child);
            let found = children.iter().position(|child| Some(child.member) == owner).filter(living);
            if found.is_some() {
                return Ok(found);
            }
        }
        std::hint::spin_loop();
    }
    Ok(None)
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
    let incarnation = zone.join(child.member)?;
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
        let result = zone.open(incarnation).and_then(|fs| work(zone, child, &fs));
        if let Err(why) = result {
            eprintln!("member {}: {why}", child.member);
            zone.counter(FAILED + u64::from(child.member)).store(1, Ordering::Release);
        }
        // SAFETY: ends the child at once, without running the parent's destructors.
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
        let told = zone.take_pending(child.member)?;
        if told & u64::from(sys::TMB_PENDING_MEMBERS) != 0 {
            fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
        }
        if told & u64::from(sys::TMB_PENDING_REVOKE) != 0 {
            fs.let_go();
        }
        // The parent repeats the operations in the model, and must not fall behind for good.
        if done.load(Ordering::Relaxed) - child.done_before > AT_ONCE {
            std::thread::sleep(PAUSE);
        }
    }
}

fn signal(child: &Child, signal: i32) -> Result<(), String> {
    // SAFETY: a child of this process that was not waited for yet.
    match unsafe { libc::kill(child.pid, signal) } {
        0 => Ok(()),
        _ => Err(format!("signal {signal}: {}", std::io::Error::last_os_error())),
    }
}

fn end(child: &Child, with: i32) -> Result<(), String> {
    signal(child, with)?;
    let mut status = 0;
    // SAFETY: as above.
    if unsafe { libc::waitpid(child.pid, &mut status, 0) } != child.pid {
        return Err(format!("waitpid: {}", std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Repeats the child's operations in the model, and compares it with the file system. Returns whether the child was in the middle of one.
fn catch_up(zone: &Zone, parent: &Filesystem, child: &mut Child) -> Result<bool, String> {
    let member = u64::from(child.member);
    let begun = zone.counter(BEGUN + member).load(Ordering::Acquire);
    let done = zone.counter(DONE + member).load(Ordering::Acquire);
    for _ in child.done_before..done {
        let op = child.model.random_op(&mut child.rng);
        // Inode numbers made meanwhile are learned when everything is compared.
        let _ = child.model.apply(&op);
    }
    let open = (begun > done).then(|| child.model.random_op(&mut child.rng));
    child.model.adopt(parent, open.as_ref())?;
    Ok(open.is_some())
}
