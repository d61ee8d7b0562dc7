// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that map files, as the kernel does it, beside members that remove the files' blocks and use free ones.

use core::mem::offset_of;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::io::Errno;
use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};
use tombolo_files::sys;

use crate::found::file;
use crate::plan::Plan;
use crate::schedule::{self, Schedule, Thread};
use crate::{Case, Doing, Zone};

const REG: u32 = libc::S_IFREG | 0o644;
const BLOCK: u64 = sys::TFS_BLOCK as u64;
const REVOKE: u64 = sys::TMB_PENDING_REVOKE as u64;
const SECOND: u64 = 1_000_000_000;
const LEN: usize = 20_000;

/// The blocks of a file that a member has mapped.
#[derive(Default)]
struct Mapping {
    /// The member's mapper bit is set; the file's sequence number from before.
    since: Cell<Option<u64>>,
    blocks: RefCell<Vec<(u64, u64)>>,
    /// Threads in a page fault; the worker waits for them.
    faults: Cell<u32>,
    revoking: Cell<bool>,
    ended: Cell<bool>,
}

std::thread_local! {
    static MAPPINGS: [Mapping; 2] = Default::default();
}

fn word(fs: &Filesystem, h: Handle, field: usize) -> u64 {
    let table = fs.area().word(offset_of!(sys::tfs_super, data_start) as u64).expect("a super block");
    let at = table * BLOCK + h.ino * size_of::<sys::tfs_inode>() as u64 + field as u64;
    schedule::access(fs.area().base() as usize + at as usize, false);
    fs.area().word(at).expect("an inode")
}

fn slot(fs: &Filesystem, field: impl Fn(*mut sys::tmb_member) -> *mut u64) -> &AtomicU64 {
    let member = fs.area().incarnation().expect("a member").member;
    // SAFETY: the table has 64 slots, is mapped as long as the file system, and all threads use atomic accesses.
    unsafe { AtomicU64::from_ptr(field(fs.area().members().add(member as usize))) }
}

fn pending(fs: &Filesystem) -> &AtomicU64 {
    // SAFETY: a field of the slot.
    slot(fs, |m| unsafe { &raw mut (*m).pending })
}

/// Lets the other threads run so many times; the time of all waits adds up.
fn pause(times: u32) {
    (0..times).for_each(|_| schedule::wait(SECOND / 100));
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        schedule::wait(100_000);
    }
}

/// A page fault of the process.
fn fault(fs: &Filesystem, m: &Mapping, h: Handle, fblock: u64) -> Result<(), Errno> {
    wait_until(|| !m.revoking.get());
    m.faults.set(m.faults.get() + 1);
    let done = (|| {
        if m.since.get().is_none() {
            let seq = word(fs, h, offset_of!(sys::tfs_inode, map_seq));
            fs.map_ref(h)?;
            m.since.set(Some(seq));
        }
        let run = fs.map(h, fblock, 1)?;
        if run.block != 0 {
            m.blocks.borrow_mut().push((fblock, run.block));
        }
        Ok(())
    })();
    m.faults.set(m.faults.get() - 1);
    done
}

/// The bytes that the mapping shows are the file's.
fn shows(fs: &Filesystem, m: &Mapping, byte: u8) -> Result<(), String> {
    for (at, block) in m.blocks.borrow().iter() {
        let mut bytes = [0; BLOCK as usize];
        assert!(fs.area().copy_out(block * BLOCK, &mut bytes));
        if let Some(other) = bytes.iter().find(|b| **b != byte && **b != 0) {
            return Err(format!(
                "the mapping of block {at} shows {other:#x} of another file (block {block})"
            ));
        }
    }
    Ok(())
}

fn process(fs: &Filesystem, which: usize, name: &[u8], byte: u8) -> Result<(), String> {
    MAPPINGS.with(|all| {
        let m = &all[which];
        let done = (|| {
            let Ok((h, _)) = fs.lookup(ROOT, name) else { return Ok(()) };
            if fs.open_ref(h).is_err() {
                return Ok(());
            }
            for round in 0..4 {
                match fault(fs, m, h, round % 3) {
                    Ok(()) | Err(Errno::STALE) => {}
                    Err(e) => return Err(format!("fault: {e}")),
                }
                for _ in 0..3 {
                    shows(fs, m, byte)?;
                    pause(25);
                }
            }
            Ok(())
        })();
        m.ended.set(true);
        done
    })
}

/// The member's worker: it is suspended for a while, and for good after so many rounds.
fn work(fs: &Filesystem, which: usize, name: &[u8], suspended: u32, rounds: u32) -> Result<(), String> {
    pause(suspended);
    MAPPINGS.with(|all| {
        let m = &all[which];
        let Ok((h, _)) = fs.lookup(ROOT, name) else { return Ok(()) };
        let mut again = false;
        for _ in 0..rounds {
            schedule::access(fs.area().members() as usize, true);
            let asked = pending(fs).fetch_and(!REVOKE, SeqCst) & REVOKE != 0;
            if !asked && !again {
                pause(5);
                continue;
            }
            again = fs.let_go_of(|| {
                let Some(since) = m.since.get() else { return };
                if word(fs, h, offset_of!(sys::tfs_inode, map_seq)) == since {
                    return;
                }
                m.revoking.set(true);
                wait_until(|| m.faults.get() == 0);
                m.blocks.borrow_mut().clear();
                m.since.set(None);
                fs.unmap_ref(h).expect("unmap");
                m.revoking.set(false);
            });
        }
        Ok(())
    })
}

fn make(fs: &Filesystem, name: &str, byte: u8) -> Result<(), String> {
    let file =
        fs.create(ROOT, Some(name.as_bytes()), &Create::mode(REG)).map_err(|e| format!("create: {e}"))?;
    match fs.pwrite(file, &vec![byte; LEN], 0, false) {
        Ok(LEN) => Ok(()),
        other => Err(format!("write: {other:?}")),
    }
}

fn setup(fs: &Filesystem) {
    make(fs, "h", b'h').expect("a file");
    make(fs, "g", b'g').expect("a file");
}

fn start() {
    MAPPINGS.with(|all| {
        for m in all {
            m.since.set(None);
            m.blocks.borrow_mut().clear();
            m.faults.set(0);
            m.revoking.set(false);
            m.ended.set(false);
        }
    });
}

fn doing(member: u32, mortal: bool, body: crate::Body) -> Doing {
    Doing { member, read_only: false, mortal, after: None, body }
}

fn cut(fs: &Filesystem, name: &[u8]) -> Result<(), String> {
    let (h, _) = fs.lookup(ROOT, name).map_err(|e| e.to_string())?;
    fs.truncate(h, 0, false).map_err(|e| format!("truncate: {e}"))
}

fn recover(fs: &Filesystem) -> Result<(), String> {
    fs.recover_all().map_err(|e| format!("recovery: {e}"))
}

fn nothing_deferred(fs: &Filesystem) -> Result<(), String> {
    match fs.deferred().0 {
        0 => Ok(()),
        n => Err(format!("{n} blocks are deferred though all members have gone: {:?}", fs.deferred())),
    }
}

#[test]
fn mappings_show_no_other_file_whoever_is_suspended_or_dies() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| cut(fs, b"h")),
            doing(5, true, |fs| cut(fs, b"g")),
            doing(10, false, |fs| process(fs, 0, b"h", b'h')),
            doing(10, false, |fs| work(fs, 0, b"h", 0, 20)),
            doing(11, false, |fs| process(fs, 1, b"g", b'g')),
            doing(11, false, |fs| work(fs, 1, b"g", 350, 40)),
            doing(12, false, |fs| {
                for name in ["o", "p", "q"] {
                    make(fs, name, b'o')?;
                    pause(250);
                }
                Ok(())
            }),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(1), ..doing(2, false, recover) },
        ],
        check: |fs, _| {
            start();
            nothing_deferred(fs)
        },
    };
    case.explore("mapped");
}

/// Files that member 10 maps: it let a wait run out, so that no removal waits for it, and has blocks of one that are deferred for it.
fn prepared(zone: &Zone, fs: &Filesystem) -> Handle {
    let (sparse, old, cut) =
        (file(fs, "sparse", b""), file(fs, "old", &[1; 9000]), file(fs, "cut", &[2; 9000]));
    fs.truncate(sparse, BLOCK, false).expect("grow");
    [sparse, old, cut].into_iter().for_each(|f| zone.maps(10, f));
    zone.does(|| fs.pwrite(sparse, b"x", 0, false)).expect("write");
    zone.does(|| fs.truncate(old, 0, false)).expect("truncate");
    cut
}

#[test]
fn a_member_waits_for_no_former_life_of_another_one_before_it_frees_blocks() {
    let zone = Zone::new(|_| {});
    let fs = zone.open(4, false).expect("open");
    // A removal stored the bit when the member had left.
    zone.store(offset_of!(sys::tfs_super, deferred_members) as u64, 1 << 11);
    let [mapper, back] = [10, 11].map(|m| zone.does(|| zone.open(m, false)).expect("open"));
    prepared(&zone, &fs);
    pending(&mapper).fetch_and(!REVOKE, SeqCst);
    zone.does(|| mapper.let_go());
    assert_eq!(fs.deferred(), (0, vec![]));
    [fs, mapper, back].into_iter().for_each(Filesystem::abandon);
    zone.assert_clean(&[4, 10, 11]);
}

/// Member 10 lets go and dies at store 'death', while member 4 cuts a file before access 'place'. Returns the accesses and stores.
fn dies_letting_go(zone: &Zone, place: usize, death: usize) -> (usize, usize) {
    zone.reset();
    let [fs, mapper] = [4, 10].map(|m| zone.open(m, false).expect("open"));
    let cut = prepared(zone, &fs);
    let plan = Plan::new(1, vec![(1, place)], vec![(1, death)], true);
    let bodies: Vec<Box<dyn FnOnce()>> = vec![
        Box::new(|| fs.truncate(cut, 0, false).expect("truncate")),
        Box::new(|| {
            pending(&mapper).fetch_and(!REVOKE, SeqCst);
            mapper.let_go();
        }),
    ];
    let threads = bodies.into_iter().map(|body| Thread { body, after: None, process: None }).collect();
    let regions = [Zone::region(&zone.map), Zone::region(&zone.reader)];
    let ran = Schedule::run(threads, regions, plan, |_| zone.declare_dead(10)).expect("an end");
    zone.declare_dead(10);
    zone.does(|| fs.recover_all()).expect("recovery");
    assert_eq!(fs.deferred(), (0, vec![]), "cut before access {place}, death at store {death}");
    [fs, mapper].into_iter().for_each(Filesystem::abandon);
    (ran.steps[1], ran.stores[1])
}

#[test]
fn the_death_of_a_member_that_lets_go_leaves_no_block_deferred() {
    let zone = Zone::new(|_| {});
    let (steps, stores) = dies_letting_go(&zone, usize::MAX, usize::MAX);
    for place in (1..=steps).filter(|at| *at < 20 || at + 20 > steps) {
        for death in 1..=stores {
            dies_letting_go(&zone, place, death);
        }
    }
}
