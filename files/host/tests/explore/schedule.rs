// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads of members as coroutines of one thread, which are switched at the core's accesses to the zone. So a plan alone repeats a schedule.
//!
//! The core is that of the prefixes test, compiled with the instrumentation for thread sanitizers. The functions that it calls, and its
//! surroundings (`tfs_os_*`), are in [`crate::hooks`] and call this module. Time is simulated and passes while a thread waits.
//!
//! A thread that dies is not run any more, nor are the other threads of its process: its member stays as it was, with all locks, until its death is known. The plan says when, or it is
//! when no other thread can run.

use std::cell::Cell;
use std::mem::MaybeUninit;

use crate::plan::Plan;

const STACK: usize = 256 << 10;
/// Waits in one run; more count as endless.
const WAITS: usize = 300_000;

thread_local! {
    static CURRENT: Cell<*mut Schedule> = const { Cell::new(std::ptr::null_mut()) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Starts once the death of this one is known.
    After(usize),
    Ready,
    Waits,
    Done,
    /// Not run any more; true: the death is known.
    Dead(bool),
}

struct Coroutine<'a> {
    context: Box<libc::ucontext_t>,
    _stack: Vec<u8>,
    body: Option<Box<dyn FnOnce() + 'a>>,
    process: Option<u32>,
    state: State,
    steps: usize,
    stores: usize,
    /// Accesses when it last yielded the CPU.
    yielded: usize,
}

/// A thread of a run.
pub struct Thread<'a> {
    pub body: Box<dyn FnOnce() + 'a>,
    /// Starts once the death of this one is known.
    pub after: Option<usize>,
    /// Threads with the same one die together.
    pub process: Option<u32>,
}

pub struct Schedule<'a> {
    coroutines: Vec<Coroutine<'a>>,
    main: Box<libc::ucontext_t>,
    current: usize,
    plan: Plan,
    regions: [(usize, usize); 2],
    clock: u64,
    waits: usize,
    longest: usize,
    pub damage: Vec<String>,
}

/// The result of a run.
pub struct Ran {
    /// Accesses of each thread.
    pub steps: Vec<usize>,
    /// Of these, those that may store.
    pub stores: Vec<usize>,
    /// The thread ended.
    pub done: Vec<bool>,
    /// The most accesses of a thread in which it has not yielded the CPU.
    pub longest: usize,
    pub damage: Vec<String>,
}

fn blank() -> Box<libc::ucontext_t> {
    // SAFETY: plain data, filled by getcontext or swapcontext before it is used.
    unsafe { Box::new(MaybeUninit::zeroed().assume_init()) }
}

extern "C" fn enter() {
    let s = CURRENT.get();
    // SAFETY: run() set it for as long as coroutines run; this thread has no other user of it.
    let body = unsafe { (&mut *s).coroutines[(*s).current].body.take() };
    if let Some(body) = body {
        body();
    }
    // SAFETY: as above.
    unsafe { (&mut *s).leave(State::Done) };
    unreachable!("a coroutine that is done goes on");
}

impl<'a> Schedule<'a> {
    /// Runs threads to their end as the plan says; `declare_dead(i)` makes the death of thread i known. Errors: a wait without end.
    pub fn run(
        threads: Vec<Thread<'a>>,
        regions: [(usize, usize); 2],
        plan: Plan,
        mut declare_dead: impl FnMut(usize),
    ) -> Result<Ran, String> {
        let mut s = Schedule {
            coroutines: threads.into_iter().map(Coroutine::new).collect(),
            main: blank(),
            current: 0,
            plan,
            regions,
            clock: 1,
            waits: 0,
            longest: 0,
            damage: Vec::new(),
        };
        let p: *mut Schedule<'a> = &raw mut s;
        CURRENT.set(p.cast());
        // SAFETY: p is s, which lives until the end of this function; between switches only one side uses it.
        let ended = unsafe { (&mut *p).all(&mut declare_dead) };
        CURRENT.set(std::ptr::null_mut());
        ended.map_err(|e| format!("{e}; {:?}", s.damage))?;
        Ok(Ran {
            steps: s.coroutines.iter().map(|c| c.steps).collect(),
            stores: s.coroutines.iter().map(|c| c.stores).collect(),
            done: s.coroutines.iter().map(|c| c.state == State::Done).collect(),
            longest: s.longest,
            damage: s.damage,
        })
    }

    fn all(&mut self, declare_dead: &mut impl FnMut(usize)) -> Result<(), String> {
        loop {
            let unknown = self.coroutines.iter().position(|c| c.state == State::Dead(false));
            let ready: Vec<usize> = self.with(State::Ready);
            let waiting: Vec<usize> = self.with(State::Waits);
            if let Some(dead) = unknown {
                if ready.is_empty() || self.plan.is_known(dead) {
                    declare_dead(dead);
                    for known in self.process_of(dead) {
                        if self.coroutines[known].state == State::Dead(false) {
                            self.coroutines[known].state = State::Dead(true);
                        }
                        for i in self.with(State::After(known)) {
                            self.coroutines[i].state = State::Ready;
                        }
                    }
                    continue;
                }
            }
            if ready.is_empty() && waiting.is_empty() {
                return Ok(());
            }
            if self.waits > WAITS {
                return Err(format!("threads {waiting:?} wait without end"));
            }
            if ready.is_empty() {
                waiting.iter().for_each(|i| self.coroutines[*i].state = State::Ready);
                continue;
            }
            self.current = self.plan.pick(&ready);
            let to: *const libc::ucontext_t = &*self.coroutines[self.current].context;
            // SAFETY: made by Coroutine::new or left by leave().
            unsafe { libc::swapcontext(&mut *self.main, to) };
        }
    }

    fn with(&self, state: State) -> Vec<usize> {
        (0..self.coroutines.len()).filter(|i| self.coroutines[*i].state == state).collect()
    }

    /// Returns the threads that die with this one, itself included.
    fn process_of(&self, thread: usize) -> Vec<usize> {
        let process = self.coroutines[thread].process;
        let same = |i: &usize| *i == thread || (process.is_some() && self.coroutines[*i].process == process);
        (0..self.coroutines.len()).filter(same).collect()
    }

    fn die(&mut self) {
        for i in self.process_of(self.current) {
            let c = &mut self.coroutines[i];
            if matches!(c.state, State::Ready | State::Waits) {
                c.state = State::Dead(false);
            }
        }
        self.leave(State::Dead(false));
    }

    fn leave(&mut self, state: State) {
        let c = &mut self.coroutines[self.current];
        c.state = state;
        let from: *mut libc::ucontext_t = &mut *c.context;
        // SAFETY: main was left by all(), which is on this thread's own stack.
        unsafe { libc::swapcontext(from, &*self.main) };
    }

    fn step(&mut self, stores: bool) {
        let c = &mut self.coroutines[self.current];
        c.steps += 1;
        c.stores += usize::from(stores);
        let (steps, store) = (c.steps, c.stores);
        self.longest = self.longest.max(steps - c.yielded);
        if stores && self.plan.dies(self.current, store) {
            self.die();
        } else if self.plan.switches(self.current, steps) {
            self.leave(State::Ready);
        }
    }
}

impl<'a> Coroutine<'a> {
    fn new(thread: Thread<'a>) -> Coroutine<'a> {
        let (mut context, mut stack) = (blank(), vec![0; STACK]);
        // SAFETY: the context and the stack live as long as the coroutine; enter takes no argument.
        unsafe {
            libc::getcontext(&mut *context);
            context.uc_stack.ss_sp = stack.as_mut_ptr().cast();
            context.uc_stack.ss_size = STACK;
            libc::makecontext(&mut *context, enter, 0);
        }
        let state = thread.after.map_or(State::Ready, State::After);
        let (body, process) = (Some(thread.body), thread.process);
        Coroutine { context, _stack: stack, body, process, state, steps: 0, stores: 0, yielded: 0 }
    }
}

fn with(f: impl FnOnce(&mut Schedule<'_>)) {
    let s = CURRENT.get();
    if !s.is_null() {
        // SAFETY: set while run() is on; coroutines and the loop take turns.
        f(unsafe { &mut *s });
    }
}

/// Called before an access to an address. Threads die at stores: to die before a load is to die after the store before it.
pub fn access(address: usize, stores: bool) {
    with(|s| {
        if s.regions.iter().any(|(base, len)| address.wrapping_sub(*base) < *len) {
            s.step(stores);
        }
    });
}

/// Called when a thread lets others have the CPU.
pub fn yielded() {
    with(|s| {
        let c = &mut s.coroutines[s.current];
        c.yielded = c.steps;
    });
}

/// Called when a thread waits, for so long if nothing happens.
pub fn wait(ns: u64) {
    yielded();
    with(|s| {
        s.clock += ns.max(1000);
        s.waits += 1;
        s.leave(State::Waits);
    });
}

pub fn clock() -> u64 {
    let mut now = 1;
    with(|s| now = s.clock);
    now
}

/// Returns the running thread.
pub fn thread() -> usize {
    let mut current = 0;
    with(|s| current = s.current);
    current
}

pub fn damage(what: String) {
    with(|s| s.damage.push(what));
}
