// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records one operation after the other; after every prefix of its stores all members die and another one recovers.
//!
//! The recovered file system must be that before the operation or after it, fsck must find nothing, no block may be lost, and everything must
//! be usable. Then once more: only the worker dies, and before any recovery a survivor removes everything and makes other files; all these must
//! be there afterwards. From some prefixes (all, with TOMBOLO_PREFIXES=all) the recovery is recorded too, and from every prefix of its stores
//! yet another member recovers. And once more with members that go on with their own work before, during and after the recovery, and the death
//! of the recovering member.

use std::collections::HashSet;

use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};

use crate::lines;
use crate::living::{HOME, Living, Work};
use crate::recorder::{self, Order, Store};
use crate::world::{self, Tree, World};

const WORKER: u32 = 2;
/// Longer runs of consecutive words are cut only at the ends of blocks.
const RUN: usize = 64;
const BLOCK: usize = 4096;
/// One of so many prefixes also has its recovery cut.
const DEEP: usize = 17;
/// One of so many accesses of a second recovery gives the living members a turn.
const TURNS: usize = 3;
/// In recoveries with more stores than this, not each store is cut.
const LONG: usize = 100;

/// The states allowed after a death.
struct Wanted<'a> {
    old: Found,
    new: Found,
    /// A file that may be a mixture of both.
    mixed: Option<&'a str>,
}

#[derive(Clone)]
struct Found {
    tree: Tree,
    blocks: u64,
}

/// A file system and the member that works in it.
pub struct Sweep {
    pub world: World,
    worker: Option<Filesystem>,
    home: Handle,
    /// States that were recovered from already, by the recovering member.
    seen: HashSet<(u64, u32)>,
    every: usize,
    persistent: bool,
    pub prefixes: usize,
    pub second: usize,
}

impl Sweep {
    /// `setup` makes the initial state. In persistent memory the machine fails, and the contents of its caches are lost.
    pub fn new(mib: u64, persistent: bool, setup: impl FnOnce(&Filesystem)) -> Sweep {
        let world = World::new(mib, persistent);
        let fs = world.open(3).expect("open");
        let home =
            fs.create(ROOT, Some(HOME.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755)).expect("mkdir");
        fs.create(home, Some(b"x"), &Create::mode(libc::S_IFREG)).expect("create");
        fs.unlink(home, b"x", None).expect("unlink");
        setup(&fs);
        drop(fs);
        let worker = Some(world.open(WORKER).expect("open"));
        let all = std::env::var("TOMBOLO_PREFIXES").is_ok_and(|v| v == "all");
        let every = if all { 1 } else { DEEP };
        Sweep { world, worker, home, seen: HashSet::new(), every, persistent, prefixes: 0, second: 0 }
    }

    /// Returns the member that works, and dies.
    pub fn worker(&self) -> &Filesystem {
        self.worker.as_ref().expect("until dropped")
    }

    /// Runs an operation that must be atomic.
    pub fn step<T>(&mut self, name: &str, op: impl FnOnce(&Filesystem) -> T) -> T {
        self.sweep(name, None, op)
    }

    /// Runs an operation that may have changed a part of the bytes of the file at a path.
    pub fn data<T>(&mut self, name: &str, path: &str, op: impl FnOnce(&Filesystem) -> T) -> T {
        self.sweep(name, Some(path), op)
    }

    fn sweep<T>(&mut self, name: &str, mixed: Option<&str>, op: impl FnOnce(&Filesystem) -> T) -> T {
        let base = recorder::count();
        let result = op(self.worker());
        let (log, orders) = (recorder::since(base), recorder::orders_since(base));
        let new = self.after_death().unwrap_or_else(|e| panic!("{name}: after it: {e}"));
        recorder::undo_to(base);
        let old = self.after_death().unwrap_or_else(|e| panic!("{name}: before it: {e}"));
        let mut wanted = Wanted { old, new, mixed };
        if self.persistent {
            self.lose_power(name, &log, &orders, &mut wanted);
            log.iter().for_each(recorder::redo);
            return result;
        }
        let cut = cuts(&log);
        for (i, store) in log.iter().enumerate() {
            recorder::redo(store);
            if cut[i] {
                let deep = i % self.every == 0;
                if let Err(why) = self.die(&wanted, deep) {
                    let last = self.world.name_of(store.at);
                    panic!("{name}: after store {} of {}, to {last}: {why}", i + 1, log.len());
                }
            }
        }
        result
    }

    /// The worker dies after each store of `op`, and `then` checks the result.
    pub fn each_death(&mut self, op: impl FnOnce(&Filesystem), then: impl Fn(&World) -> Result<(), String>) {
        let base = recorder::count();
        op(self.worker());
        let log = recorder::since(base);
        recorder::undo_to(base);
        for (i, store) in log.iter().enumerate() {
            recorder::redo(store);
            let here = recorder::count();
            World::declare_dead(WORKER);
            if let Err(why) = then(&self.world) {
                let last = self.world.name_of(store.at);
                panic!("after store {} of {}, to {last}: {why}", i + 1, log.len());
            }
            recorder::undo_to(here);
        }
    }

    /// Power fails at any time during an operation; a finished operation stays done.
    fn lose_power(&mut self, name: &str, log: &[Store], orders: &[(usize, Order)], wanted: &mut Wanted<'_>) {
        let here = recorder::count();
        let (mut tried, mut over) = (0, false);
        let result = lines::each_state(log, orders, |durable, after| {
            if after && !over {
                over = true;
                self.seen.clear();
                wanted.old = wanted.new.clone();
                wanted.mixed = None;
            }
            tried += 1;
            durable.iter().for_each(|i| recorder::redo(&log[*i]));
            let died = self.fail(wanted, tried % (self.every * self.every) == 0);
            recorder::undo_to(here);
            died.map_err(|e| {
                let last = durable.last().copied().unwrap_or(0);
                let missing: Vec<String> = (0..last)
                    .filter(|i| durable.binary_search(i).is_err())
                    .map(|i| format!("{i} to {}", self.world.name_of(log[i].at)))
                    .collect();
                let name = self.world.name_of(log[last].at);
                let (n, of) = (durable.len(), log.len());
                format!("{e}\nwith {n} of {of} stores, the last {last} to {name}, without {missing:?}")
            })
        });
        if let Err(why) = result {
            let when = if over { "after it" } else { "during it" };
            panic!("{name}: power fails {when}: {why}");
        }
    }

    fn fail(&mut self, wanted: &Wanted<'_>, deep: bool) -> Result<(), String> {
        let here = recorder::count();
        if !self.seen.insert((recorder::state(), 0)) {
            return Ok(());
        }
        self.prefixes += 1;
        self.world.check_before_recovery()?;
        let fs = self.recover(0)?;
        let (log, orders) = (recorder::since(here), recorder::orders_since(here));
        self.verify(fs, wanted)?;
        recorder::undo_to(here);
        if !deep {
            return Ok(());
        }
        lines::each_state(&log, &orders, |durable, _| {
            durable.iter().for_each(|i| recorder::redo(&log[*i]));
            if self.seen.insert((recorder::state(), 1)) {
                self.second += 1;
                let fs = self.recover(1).map_err(|e| format!("and during recovery: {e}"))?;
                self.verify(fs, wanted).map_err(|e| format!("and during recovery: {e}"))?;
            }
            recorder::undo_to(here);
            Ok(())
        })
    }

    fn after_death(&self) -> Result<Found, String> {
        let here = recorder::count();
        let fs = self.recover(0)?;
        let found = Found { tree: world::read(&fs)?, blocks: self.world.check()? };
        fs.abandon();
        recorder::undo_to(here);
        Ok(found)
    }

    /// All members die; `member` is the next to join.
    fn recover(&self, member: u32) -> Result<Filesystem, String> {
        (0..12).filter(|m| World::is_active(*m)).for_each(World::declare_dead);
        let fs = self.world.open(member)?;
        fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
        Ok(fs)
    }

    fn die(&mut self, wanted: &Wanted<'_>, deep: bool) -> Result<(), String> {
        let here = recorder::count();
        if !self.seen.insert((recorder::state(), 0)) {
            return Ok(());
        }
        self.prefixes += 1;
        self.world.check_before_recovery()?;
        let fs = self.recover(0)?;
        let recovery = recorder::since(here);
        self.verify(fs, wanted)?;
        recorder::undo_to(here);
        self.survive().map_err(|e| format!("a survivor went on, then: {e}"))?;
        recorder::undo_to(here);
        self.live_on(wanted, deep).map_err(|e| format!("with members that live on: {e}"))?;
        recorder::undo_to(here);
        if !deep {
            return Ok(());
        }
        let cut = cuts(&recovery);
        let every = if self.every == 1 { 1 } else { 1 + recovery.len() / LONG };
        for (i, store) in recovery.iter().enumerate() {
            recorder::redo(store);
            if !cut[i] || i % every != 0 || !self.seen.insert((recorder::state(), 1)) {
                continue;
            }
            self.second += 1;
            let there = recorder::count();
            let last = || self.world.name_of(store.at);
            // Another member, or the one that died during it, joins in a new epoch.
            let next = u32::try_from(self.second % 2).unwrap_or(0);
            let fs = self.recover(next).and_then(|fs| self.verify(fs, wanted));
            fs.map_err(|e| {
                format!("and store {} of {} of its recovery, to {}: {e}", i + 1, recovery.len(), last())
            })?;
            recorder::undo_to(there);
        }
        recorder::undo_to(here);
        Ok(())
    }

    /// Only the worker dies; the living go on before the death is noticed, but wait for its locks.
    fn survive(&self) -> Result<(), String> {
        const FILES: u64 = 6;
        World::declare_dead(WORKER);
        let fs = self.world.open(1)?;
        let text = |what: &str, e| format!("{what}: {e}");
        remove_all(&fs, ROOT)?;
        for i in 0..FILES {
            let name = format!("other-{i}");
            let made = fs.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFREG | 0o600));
            let made = made.map_err(|e| text("create", e))?;
            fs.pwrite(made, &[b'o'; 5000], i * 5000, false).map_err(|e| text("write", e))?;
        }
        fs.recover_all().map_err(|e| text("recovery", e))?;
        let tree = world::read(&fs)?;
        fs.abandon();
        let right = |(path, object): (&String, &world::Object)| {
            let Some(i) = path.strip_prefix("/other-").and_then(|i| i.parse::<u64>().ok()) else {
                return path.is_empty();
            };
            let bytes = object.data.values().flatten().filter(|b| **b == b'o').count();
            object.size == (i + 1) * 5000 && bytes == 5000 && object.mode == libc::S_IFREG | 0o600
        };
        if tree.len() as u64 != FILES + 1 || !tree.iter().all(right) {
            return Err(format!("there is {}", world::difference(&tree, &Tree::new())));
        }
        self.world.check().map(|_| ())
    }

    /// Some members live; another one recovers, and, if 'deep', dies after each store of that.
    fn live_on(&self, wanted: &Wanted<'_>, deep: bool) -> Result<(), String> {
        let mut living = Living::join(&self.world, self.home)?;
        // All members use the lock of the inode table, and wait for it until the death is known.
        if !self.world.table_is_locked() {
            living.go_on().map_err(|e| format!("before another member knows of the death: {e}"))?;
        }
        World::declare_dead(WORKER);
        living.go_on().map_err(|e| format!("before the recovery: {e}"))?;
        let (here, work) = (recorder::count(), living.work());
        let fs = self.world.open(0)?;
        fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
        let recovery = recorder::since(here);
        self.verify_among(&mut living, fs, wanted)?;
        if !deep {
            return Ok(());
        }
        recorder::undo_to(here);
        drop(living);
        let cut = cuts(&recovery);
        let every = if self.every == 1 { 1 } else { 1 + recovery.len() / LONG };
        for (i, store) in recovery.iter().enumerate() {
            recorder::redo(store);
            if !cut[i] || i % every != 0 {
                continue;
            }
            let there = recorder::count();
            self.recoverer_dies(wanted, &work).map_err(|e| {
                let last = self.world.name_of(store.at);
                format!("and store {} of {} of its recovery, to {last}: {e}", i + 1, recovery.len())
            })?;
            recorder::undo_to(there);
        }
        Ok(())
    }

    /// Member 0 dies while it recovers; 1 recovers both, and between any two stores of that the living go on.
    fn recoverer_dies(&self, wanted: &Wanted<'_>, work: &Work) -> Result<(), String> {
        let here = recorder::count();
        World::declare_dead(0);
        let fs = self.world.open(1)?;
        let before = recorder::accesses();
        fs.recover_all().map_err(|e| format!("second recovery: {e}"))?;
        let accesses = recorder::accesses() - before;
        fs.abandon();
        recorder::undo_to(here);
        let turns = if self.every == 1 { accesses } else { TURNS };
        for turn in 0..turns {
            let mut living = Living::again(&self.world, work.clone())?;
            living.go_on().map_err(|e| format!("before another member knows of the second death: {e}"))?;
            World::declare_dead(0);
            let fs = self.world.open(1)?;
            let (mut went_on, mut living_too) = (Ok(()), Some(living));
            let living = &mut living_too;
            let went = &mut went_on;
            let at = recorder::accesses() + accesses * turn / turns;
            recorder::interrupt_at(
                at,
                || {
                    *went = living.as_mut().map_or(Ok(()), Living::go_on);
                },
                || fs.recover_all().map_err(|e| format!("second recovery: {e}")),
            )?;
            went_on.map_err(|e| format!("during the second recovery: {e}"))?;
            let mut living = living_too.take().expect("put there above");
            self.verify_among(&mut living, fs, wanted)?;
            drop(living);
            recorder::undo_to(here);
        }
        Ok(())
    }

    fn verify_among(&self, living: &mut Living, fs: Filesystem, wanted: &Wanted<'_>) -> Result<(), String> {
        living.go_on().map_err(|e| format!("after the recovery: {e}"))?;
        let tree = living.tree_without(&fs)?;
        self.is_wanted(&tree, wanted)?;
        fs.abandon();
        self.world.check().map(|_| ())
    }

    fn is_wanted(&self, tree: &Tree, wanted: &Wanted<'_>) -> Result<(), String> {
        let Wanted { old, new, mixed } = wanted;
        let mixture = mixed.is_some_and(|path| world::is_mixture(tree, &old.tree, &new.tree, path));
        if *tree == old.tree || *tree == new.tree || mixture {
            return Ok(());
        }
        Err(format!(
            "neither as before: {}\nnor as after: {}",
            world::difference(tree, &old.tree),
            world::difference(tree, &new.tree)
        ))
    }

    fn verify(&self, fs: Filesystem, wanted: &Wanted<'_>) -> Result<(), String> {
        let tree = world::read(&fs)?;
        self.is_wanted(&tree, wanted)?;
        let Wanted { old, new, mixed } = wanted;
        let blocks = self.world.check()?;
        // Blocks allocated past the end of a file may have been freed with the member that died while writing to it.
        if (mixed.is_none() && blocks < old.blocks.min(new.blocks)) || blocks > old.blocks.max(new.blocks) {
            return Err(format!("{blocks} blocks in use, {} before and {} after", old.blocks, new.blocks));
        }
        use_all(&fs, &tree).map_err(|e| format!("can't be used: {e}"))?;
        fs.abandon();
        self.world.check().map(|_| ()).map_err(|e| format!("after being used: {e}"))
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.abandon();
        }
    }
}

/// Returns for each store whether all members die after it.
fn cuts(log: &[Store]) -> Vec<bool> {
    let mut cut = vec![true; log.len()];
    let mut first = 0;
    for i in 1..=log.len() {
        if i < log.len() && log[i].at == log[i - 1].at + 8 {
            continue;
        }
        if i - first > RUN {
            let blocks = if i - first > RUN * BLOCK / 8 { RUN } else { 1 };
            for k in first + 1..i - 1 {
                cut[k] = log[k].at % (BLOCK * blocks) == BLOCK * blocks - 8;
            }
        }
        first = i;
    }
    cut
}

fn remove_all(fs: &Filesystem, dir: u64) -> Result<(), String> {
    for entry in fs.list(dir).map_err(|e| format!("list: {e}"))? {
        let removed = if u32::from(entry.kind) == libc::S_IFDIR >> 12 {
            remove_all(fs, entry.ino)?;
            fs.rmdir(dir, &entry.name, None)
        } else {
            fs.unlink(dir, &entry.name, None)
        };
        removed.map_err(|e| format!("remove {}: {e}", String::from_utf8_lossy(&entry.name)))?;
    }
    Ok(())
}

/// Makes and removes a name in every directory, and writes a byte to every file.
fn use_all(fs: &Filesystem, tree: &Tree) -> Result<(), String> {
    for (path, object) in tree {
        let text = |what: &str, e| format!("{path}/: {what}: {e}");
        match object.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                let made = match fs.create(object.ino, Some(b"after"), &Create::mode(libc::S_IFREG | 0o600)) {
                    Err(rustix::io::Errno::NOSPC) => continue,
                    made => made.map_err(|e| text("create", e))?,
                };
                fs.rename((object.ino, b"after"), (ROOT, b"then"), 0).map_err(|e| text("rename", e))?;
                fs.unlink(ROOT, b"then", Some(made)).map_err(|e| text("unlink", e))?;
            }
            libc::S_IFREG => match fs.pwrite(object.ino, b"x", object.size, false) {
                Ok(_) | Err(rustix::io::Errno::NOSPC) => {}
                Err(e) => return Err(text("write", e)),
            },
            _ => {}
        }
    }
    Ok(())
}
