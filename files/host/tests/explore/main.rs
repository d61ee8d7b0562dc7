// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The core under every order of its accesses to the zone, up to a bound. Members run operations at the same time, some of them die, others recover.
//! Then acknowledged changes are there, no others are, and fsck finds nothing.
//!
//! - [`schedule`]: threads as coroutines, switched before any access to the zone.
//! - [`plan`]: the order in which threads run and die.
//! - [`hooks`]: what the instrumented core calls.
//! - [`cases`]: the members' operations, and their required outcome.
//! - [`endless`]: walks that damage has made as long as can be.
//! - [`found`]: single states in which a member is suspended, refused or has left work, and what one member does in them.
//! - [`mapped`]: members that map files whose blocks are removed, and those that use the blocks again.
//! - [`narrow`]: two threads that meet within a few accesses, and states after several deaths.
//! - [`rights`]: the mode of a file and its access ACL, which change together.
//! - [`scarce`]: operations that find too few blocks or no memory.
//!
//! Of each case all schedules with one switch, and all with one death, are tried at every n-th access; then as many random ones, each with any number
//! of switches and deaths. TOMBOLO_EXPLORE=SECONDS goes on with random ones for so long in each case, with other seeds each time, and with all
//! accesses of the first kind. A failure prints its plan; TOMBOLO_EXPLORE_SEED=N begins with that seed.

mod cases;
mod endless;
mod found;
mod hooks;
mod mapped;
mod narrow;
mod plan;
mod rights;
mod scarce;
mod schedule;

use core::mem::offset_of;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plan::Plan;
use schedule::{Ran, Schedule, Thread};
use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::fs::{self, Filesystem, Mkfs};
use tombolo_files::{fsck, sys};

const TABLE: usize = 4096;
const AREA: usize = 32768;
const MIB: u64 = 4;
/// Random schedules in the short form.
const SHORT: u64 = 1500;
/// Places for a switch or death that the short form tries.
const PLACES: usize = 400;

/// A thread's operation. An error: a forbidden outcome.
type Body = fn(&Filesystem) -> Result<(), String>;

/// A member's thread.
struct Doing {
    member: u32,
    read_only: bool,
    mortal: bool,
    /// Starts once the death of this thread is known.
    after: Option<usize>,
    body: Body,
}

/// Several members at once.
struct Case {
    setup: fn(&Filesystem),
    doing: Vec<Doing>,
    /// Checked afterwards by a member that joins then, in some plans one that died; with the threads that ended.
    check: fn(&Filesystem, &[bool]) -> Result<(), String>,
}

struct Zone {
    map: Arc<Map>,
    /// The same memory, for read-only members.
    reader: Arc<Map>,
    area: Area,
    image: Vec<u8>,
}

impl Zone {
    fn new(setup: fn(&Filesystem)) -> Zone {
        let map = Arc::new(Map::memfd("explore", AREA as u64 + (MIB << 20)).expect("memory"));
        let area = Area::in_map(&map, AREA as u64, MIB << 20, None).expect("an area");
        fs::mkfs(&area, &Mkfs { hash_seed: 5, ..Mkfs::default() }).expect("mkfs");
        let reader = Arc::new(Map::new(map.file(), map.size(), false).expect("memory"));
        let mut zone = Zone { map, reader, area, image: Vec::new() };
        let fs = zone.open(20, false).expect("open");
        setup(&fs);
        drop(fs);
        let (base, len) = Zone::region(&zone.map);
        // SAFETY: the region is mapped, and only this thread uses it.
        zone.image = unsafe { std::slice::from_raw_parts(base as *const u8, len) }.to_vec();
        zone
    }

    /// Address and length.
    fn region(map: &Arc<Map>) -> (usize, usize) {
        let whole = Area::in_map(map, 0, map.size(), None).expect("all of it");
        (whole.base() as usize, map.size() as usize)
    }

    fn reset(&self) {
        let to = Zone::region(&self.map).0 as *mut u8;
        // SAFETY: the region is mapped writable and as long as its image; only this thread uses it.
        unsafe { std::ptr::copy_nonoverlapping(self.image.as_ptr(), to, self.image.len()) };
    }

    fn state(&self, member: u32) -> (Area, u64) {
        let table = Area::in_map(&self.map, TABLE as u64, 64 * 256, None).expect("a table");
        let epoch = table.word(u64::from(member) * 256).expect("a slot") >> 32;
        (table, epoch)
    }

    fn open(&self, member: u32, read_only: bool) -> Result<Filesystem, String> {
        let (table, epoch) = self.state(member);
        let state = (epoch + 1) << 32 | u64::from(sys::TMB_MEMBER_ACTIVE);
        let rights = if read_only { 0 } else { u64::from(sys::TMB_RIGHT_WRITE) };
        assert!(table.store_word(u64::from(member) * 256, state));
        assert!(
            table.store_word(u64::from(member) * 256 + offset_of!(sys::tmb_member, rights) as u64, rights)
        );
        let incarnation = Some((TABLE as u64, Incarnation { member, epoch: epoch as u32 + 1 }));
        let map = if read_only { &self.reader } else { &self.map };
        let area = Area::in_map(map, AREA as u64, MIB << 20, incarnation).expect("an area");
        Filesystem::open(area).map_err(|e| format!("open: {e}"))
    }

    /// Runs one thread alone, to its end.
    fn alone<T>(&self, body: impl FnOnce() -> T) -> Result<T, String> {
        let mut result = None;
        let thread = Thread { body: Box::new(|| result = Some(body())), after: None, process: None };
        let regions = [Zone::region(&self.map), Zone::region(&self.reader)];
        let ran = Schedule::run(vec![thread], regions, Plan::new(0, Vec::new(), Vec::new(), true), |_| {})?;
        match ran.damage.is_empty() {
            true => result.ok_or_else(|| "it came to no end".into()),
            false => Err(format!("damage: {:?}", ran.damage)),
        }
    }

    /// Runs two threads in this order of accesses.
    fn both(&self, plan: Plan, one: impl FnOnce(), other: impl FnOnce()) {
        let threads = [Box::new(one) as Box<dyn FnOnce()>, Box::new(other)]
            .map(|body| Thread { body, after: None, process: None })
            .into();
        let regions = [Zone::region(&self.map), Zone::region(&self.reader)];
        let ran = Schedule::run(threads, regions, plan, |_| {}).expect("both come to their end");
        assert_eq!(ran.damage, Vec::<String>::new());
    }

    /// The member has left.
    fn leave(&self, member: u32) {
        let (table, epoch) = self.state(member);
        assert!(table.store_word(u64::from(member) * 256, epoch << 32 | u64::from(sys::TMB_MEMBER_INVITED)));
    }

    fn declare_dead(&self, member: u32) {
        let (table, epoch) = self.state(member);
        assert!(
            table.store_word(u64::from(member) * 256, (epoch + 1) << 32 | u64::from(sys::TMB_MEMBER_DEAD))
        );
    }
}

impl Case {
    fn run(&self, zone: &Zone, plan: Plan) -> Result<Ran, String> {
        let said = format!("{plan:?}");
        self.try_run(zone, plan).map_err(|e| format!("{e}\nunder {said}"))
    }

    fn try_run(&self, zone: &Zone, plan: Plan) -> Result<Ran, String> {
        zone.reset();
        let mut members: Vec<(u32, Filesystem)> = Vec::new();
        for doing in &self.doing {
            if !members.iter().any(|(m, _)| *m == doing.member) {
                members.push((doing.member, zone.open(doing.member, doing.read_only)?));
            }
        }
        let back = plan.deaths.first().filter(|_| !plan.at_once);
        let last = back.map_or(30, |(thread, _)| self.doing[*thread].member);
        let wrong = std::cell::RefCell::new(Vec::new());
        let mut threads = Vec::new();
        for (i, doing) in self.doing.iter().enumerate() {
            let fs = &members.iter().find(|(m, _)| *m == doing.member).ok_or("no member")?.1;
            let wrong = &wrong;
            let body = Box::new(move || {
                if let Err(why) = (doing.body)(fs) {
                    wrong.borrow_mut().push(format!("thread {i}: {why}"));
                }
            });
            threads.push(Thread { body, after: doing.after, process: Some(doing.member) });
        }
        let ran = Schedule::run(threads, [Zone::region(&zone.map), Zone::region(&zone.reader)], plan, |i| {
            zone.declare_dead(self.doing[i].member)
        })?;
        members.into_iter().for_each(|(_, fs)| fs.abandon());
        let mut wrong = wrong.into_inner();
        wrong.extend(ran.damage.iter().map(|what| format!("damage: {what}")));
        if !wrong.is_empty() {
            return Err(wrong.join("; "));
        }
        self.doing.iter().for_each(|doing| zone.declare_dead(doing.member));
        let last = zone.alone(|| {
            let last = zone.open(last, false)?;
            last.recover_all().map_err(|e| format!("the last recovery: {e}")).map(|()| last)
        })??;
        (self.check)(&last, &ran.done)?;
        last.abandon();
        fsck::expect_clean(&zone.area, &mut |_, _, _| {}).map_err(|e| format!("fsck: {e}"))?;
        Ok(ran)
    }

    /// Explores the case and returns the number of schedules.
    fn explore(&self, name: &str) -> usize {
        let zone = Zone::new(self.setup);
        let mut tried = 0;
        let mut go = |plan: Plan, what: &str| {
            tried += 1;
            self.run(&zone, plan).unwrap_or_else(|e| panic!("{name}: {what}: {e}"))
        };
        let long =
            std::env::var("TOMBOLO_EXPLORE").ok().and_then(|s| s.parse().ok()).map(Duration::from_secs);
        let n = self.doing.len();
        let alone = go(Plan::new(0, Vec::new(), Vec::new(), true), "one after the other");
        let (steps, mut stores) = (alone.steps, alone.stores);
        let places = |of: usize| {
            let every = if long.is_some() { 1 } else { of.div_ceil(PLACES).max(1) };
            (1..=of).step_by(every)
        };
        for (first, of) in steps.iter().enumerate() {
            for at in places(*of) {
                go(Plan::new(first, vec![(first, at)], Vec::new(), true), "one switch");
            }
        }
        let mortal: Vec<usize> = (0..n).filter(|i| self.doing[*i].mortal).collect();
        for first in mortal.iter().copied() {
            for (at, at_once) in places(stores[first]).flat_map(|at| [(at, true), (at, false)]) {
                let ran = go(Plan::new(first, Vec::new(), vec![(first, at)], at_once), "one death");
                stores.iter_mut().zip(ran.stores).for_each(|(most, n)| *most = (*most).max(n));
            }
        }
        let start = Instant::now();
        let from =
            std::env::var("TOMBOLO_EXPLORE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(match long {
                Some(_) => u64::from(std::process::id()) << 24,
                None => 1,
            });
        for seed in from.. {
            if long.map_or(seed - from >= SHORT, |time| start.elapsed() > time) {
                break;
            }
            go(Plan::by_chance(seed, &mortal, &stores), &format!("seed {seed}"));
        }
        println!("{name}: {tried} schedules, of up to {} accesses", steps.iter().sum::<usize>());
        tried
    }
}
