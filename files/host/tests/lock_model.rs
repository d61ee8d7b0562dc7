// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A model of the lock across members (`files/core/wait.c`), explored exhaustively: every order of the steps of a few threads, with the
//! death of any member between any two steps of its own or of others: as owner, as the member that the lock is offered to, as a waiter
//! in the queue, and while it recovers another.
//!
//! A step is one access to shared memory, named as in `wait.c`. What is claimed of every reachable state:
//! - no two living threads own the lock, and none owns it before a dead owner's work is recovered;
//! - from every state, all living threads can still end;
//! - without deaths no wake-up is lost, even if no thread ever polls;
//! - a queued member sees the lock offered to each other member at most once before its own turn.

use std::collections::HashMap;

const MEMBERS: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Kind {
    #[default]
    Free,
    Held,
    Offered,
}

/// The lock word. Members count from 1; turn 0: it was never offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Word {
    kind: Kind,
    owner: u8,
    epoch: u8,
    demand: bool,
    turn: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Pc {
    #[default]
    Try,
    Look,
    Announce,
    Confirm,
    Demand,
    Sleep,
    Recover,
    Repair,
    Recovered,
    TakeDead,
    SkipIdler,
    TakeLapsed,
    Withdraw,
    Again,
    Enter,
    Leave,
    Release,
    HandOver,
    GiveBack,
    Wake,
    Done,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Thread {
    member: u8,
    pc: Pc,
    seen: Word,
    /// Acquisitions still to come.
    left: u8,
    slept: bool,
    rung: bool,
    /// Offers of the lock to other members while this one was first in its queue and announced.
    passed: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Member {
    alive: bool,
    epoch: u8,
    recovered: u8,
    /// The recovering member and its epoch.
    recovery: (u8, u8),
    /// Threads that wait, in order; private to the member.
    queue: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    word: Word,
    waiters: u8,
    members: [Member; MEMBERS],
    threads: Vec<Thread>,
    /// Members whose operation is not complete.
    half: u8,
    deaths: u8,
}

/// A part of the protocol that a run leaves out, to see that the claims fail.
#[derive(Clone, Copy, Default, PartialEq)]
enum Flaw {
    #[default]
    None,
    /// A dead owner's lock is taken without recovering first.
    NoRecovery,
    /// Announced after the last look instead of before.
    LateAnnouncement,
    /// The releasing owner counts from itself, not from the last turn.
    NoTurn,
    /// The lock is given to the next in the queue without its consent.
    OfferIsOwnership,
}

#[derive(Clone, Copy)]
struct Run {
    /// By member, how many threads it has, and how often each of these takes the lock.
    threads: &'static [u8],
    times: [u8; MEMBERS],
    deaths: u8,
    /// A dead member's slot is taken by a new incarnation with the same work.
    rejoin: bool,
    /// Sleepers also poll, and offers lapse. Otherwise no thread is ever late.
    polls: bool,
    flaw: Flaw,
}

impl State {
    fn new(run: &Run) -> State {
        let mut s = State { deaths: run.deaths, ..State::default() };
        for (m, threads) in run.threads.iter().enumerate() {
            s.members[m].alive = true;
            s.members[m].epoch = 1;
            for _ in 0..*threads {
                s.threads.push(Thread { member: m as u8, left: run.times[m], ..Thread::default() });
            }
        }
        s
    }

    fn alive(&self, member: u8, epoch: u8) -> bool {
        let m = &self.members[usize::from(member) - 1];
        m.alive && m.epoch == epoch
    }

    /// The next living member in the mask after a turn; bits of the dead are skipped.
    fn choose(&self, after: u8) -> Option<u8> {
        (1..=MEMBERS as u8)
            .map(|i| (after + i - 1) % MEMBERS as u8 + 1)
            .find(|m| self.waiters >> (m - 1) & 1 != 0 && self.members[usize::from(*m) - 1].alive)
    }

    fn ring(&mut self, member: u8) {
        if let Some(first) = self.members[usize::from(member) - 1].queue.first() {
            let first = usize::from(*first);
            self.threads[first].rung = true;
        }
    }

    fn swap(&mut self, old: Word, new: Word) -> bool {
        let same = self.word == old;
        if same {
            self.word = new;
        }
        same
    }

    /// Returns the states after each step that thread i may do next.
    fn steps(&self, i: usize, run: &Run) -> Vec<State> {
        let mut out = Vec::new();
        let t = &self.threads[i];
        let (m, own) = (usize::from(t.member), t.member + 1);
        let me = &self.members[m];
        let held = Word { kind: Kind::Held, owner: own, epoch: me.epoch, ..t.seen };
        let mut s = self.clone();
        macro_rules! go {
            ($pc:ident) => {{
                s.threads[i].pc = Pc::$pc;
                out.push(s);
            }};
        }
        match t.pc {
            Pc::Try => {
                let now = self.word;
                s.threads[i].seen = now;
                if now.kind == Kind::Free {
                    s.word = Word { kind: Kind::Held, owner: own, epoch: me.epoch, ..now };
                    go!(Enter);
                } else {
                    s.members[m].queue.push(i as u8);
                    go!(Look);
                }
            }
            Pc::Look => {
                // Not the first of its queue: sleeps until it is.
                if me.queue.first() != Some(&(i as u8)) {
                    s.threads[i].rung = false;
                    go!(Sleep);
                    return out;
                }
                s.threads[i].rung = false;
                let now = self.word;
                s.threads[i].seen = now;
                let dead = now.kind != Kind::Free && !self.alive(now.owner, now.epoch);
                match now.kind {
                    Kind::Free => {
                        s.word = Word { demand: false, kind: Kind::Held, owner: own, epoch: me.epoch, ..now };
                        s.leave_queue(m, i);
                        go!(Withdraw);
                    }
                    Kind::Offered if now.owner == own && now.epoch == me.epoch => {
                        s.word = Word { demand: false, ..Word { kind: Kind::Held, ..now } };
                        s.leave_queue(m, i);
                        go!(Withdraw);
                    }
                    Kind::Offered if dead => go!(TakeDead),
                    Kind::Held if dead => {
                        if self.members[usize::from(now.owner) - 1].recovered >= now.epoch
                            || run.flaw == Flaw::NoRecovery
                        {
                            go!(TakeDead);
                        } else {
                            go!(Recover);
                        }
                    }
                    Kind::Offered if run.polls => {
                        let mut lapsed = s.clone();
                        go!(Announce);
                        lapsed.threads[i].pc = Pc::SkipIdler;
                        out.push(lapsed);
                    }
                    _ => go!(Announce),
                }
            }
            Pc::Announce => {
                if run.flaw == Flaw::LateAnnouncement {
                    go!(Confirm);
                } else {
                    s.waiters |= 1 << m;
                    go!(Confirm);
                }
            }
            Pc::Confirm => {
                if self.word != t.seen {
                    go!(Look);
                } else if t.slept && t.seen.kind == Kind::Held && !t.seen.demand {
                    go!(Demand);
                } else {
                    go!(Sleep);
                }
            }
            Pc::Demand => {
                if s.swap(t.seen, Word { demand: true, ..t.seen }) {
                    go!(Sleep);
                } else {
                    go!(Look);
                }
            }
            Pc::Sleep => {
                if run.flaw == Flaw::LateAnnouncement {
                    s.waiters |= 1 << m;
                }
                if t.rung || run.polls {
                    s.threads[i].rung = false;
                    s.threads[i].slept = true;
                    go!(Look);
                } else if run.flaw == Flaw::LateAnnouncement && s != *self {
                    out.push(s);
                }
            }
            Pc::Recover => {
                // The word whose owner is dead; the recovery lock, or the end of another member's recovery.
                let d = usize::from(t.seen.owner) - 1;
                let (by, epoch) = self.members[d].recovery;
                if self.members[d].recovered >= t.seen.epoch {
                    go!(TakeDead);
                } else if by == 0 || !self.alive(by, epoch) {
                    s.members[d].recovery = (own, me.epoch);
                    go!(Repair);
                }
                // Else it waits: no step of its own.
            }
            Pc::Repair => {
                let d = usize::from(t.seen.owner) - 1;
                s.half &= !(1 << d);
                go!(Recovered);
            }
            Pc::Recovered => {
                let d = usize::from(t.seen.owner) - 1;
                s.members[d].recovered = s.members[d].recovered.max(t.seen.epoch);
                s.members[d].recovery = (0, 0);
                go!(TakeDead);
            }
            Pc::SkipIdler => {
                s.waiters &= !(1 << (t.seen.owner - 1));
                go!(TakeLapsed);
            }
            Pc::TakeDead | Pc::TakeLapsed => {
                if s.swap(t.seen, Word { demand: false, ..held }) {
                    s.leave_queue(m, i);
                    go!(Withdraw);
                } else {
                    go!(Look);
                }
            }
            Pc::Withdraw => {
                if me.queue.is_empty() {
                    s.waiters &= !(1 << m);
                    go!(Again);
                } else {
                    // The first of them sleeps, perhaps since before this thread announced anything.
                    s.waiters |= 1 << m;
                    go!(Enter);
                }
            }
            Pc::Again => {
                // A thread has entered the queue and may have announced itself in between.
                if !me.queue.is_empty() {
                    s.waiters |= 1 << m;
                }
                go!(Enter);
            }
            Pc::Enter => {
                s.half |= 1 << m;
                s.threads[i].slept = false;
                s.threads[i].passed = 0;
                go!(Leave);
            }
            Pc::Leave => {
                s.half &= !(1 << m);
                go!(Release);
            }
            Pc::Release => {
                let now = self.word;
                s.threads[i].seen = now;
                if now.demand {
                    go!(HandOver);
                } else {
                    go!(GiveBack);
                }
            }
            Pc::HandOver => {
                let after = if run.flaw == Flaw::NoTurn { own } else { t.seen.turn };
                let Some(n) = self.choose(after) else {
                    go!(GiveBack);
                    return out;
                };
                let kind = if run.flaw == Flaw::OfferIsOwnership { Kind::Held } else { Kind::Offered };
                let epoch = self.members[usize::from(n) - 1].epoch;
                if s.swap(t.seen, Word { kind, owner: n, epoch, demand: false, turn: n }) {
                    for j in 0..s.threads.len() {
                        let (member, waits) =
                            (s.threads[j].member, s.waiters >> s.threads[j].member & 1 != 0);
                        let first = s.members[usize::from(member)].queue.first() == Some(&(j as u8));
                        if waits && first && member + 1 != n {
                            s.threads[j].passed = (s.threads[j].passed + 1).min(10);
                        }
                    }
                    s.ring(n);
                    s.finish(i);
                    out.push(s);
                } else {
                    go!(Release);
                }
            }
            Pc::GiveBack => {
                if s.swap(t.seen, Word { turn: t.seen.turn, ..Word::default() }) {
                    go!(Wake);
                } else {
                    go!(Release);
                }
            }
            Pc::Wake => {
                if let Some(n) = self.choose(t.seen.turn) {
                    s.ring(n);
                }
                s.finish(i);
                out.push(s);
            }
            Pc::Done => {}
        }
        out
    }

    fn leave_queue(&mut self, m: usize, i: usize) {
        self.members[m].queue.retain(|t| usize::from(*t) != i);
    }

    fn finish(&mut self, i: usize) {
        let t = &mut self.threads[i];
        t.left -= 1;
        t.seen = Word::default();
        t.pc = if t.left == 0 { Pc::Done } else { Pc::Try };
    }

    /// The deaths and returns that can happen now.
    fn fates(&self, run: &Run) -> Vec<State> {
        let mut out = Vec::new();
        for m in 0..run.threads.len() {
            let mut s = self.clone();
            let member = &mut s.members[m];
            if member.alive && self.deaths > 0 {
                s.deaths -= 1;
                member.alive = false;
                member.queue.clear();
                for t in s.threads.iter_mut().filter(|t| usize::from(t.member) == m) {
                    *t = Thread { member: m as u8, pc: Pc::Done, left: t.left, ..Thread::default() };
                }
                out.push(s);
            } else if !member.alive && run.rejoin && member.epoch == 1 && member.recovered >= 1 {
                // It starts nothing before its former epoch is recovered, by itself or by another member.
                member.alive = true;
                member.epoch = 2;
                for t in s.threads.iter_mut().filter(|t| usize::from(t.member) == m) {
                    *t = Thread { member: m as u8, left: 1, ..Thread::default() };
                }
                out.push(s);
            } else if !member.alive && run.rejoin && member.epoch == 1 {
                // A member without interest in the lock recovers it: on the host's announcement, or in its own next epoch.
                let (by, epoch) = member.recovery;
                if by == 0 || !self.alive(by, epoch) {
                    let member = &mut s.members[m];
                    member.recovery = (0, 0);
                    member.recovered = 1;
                    s.half &= !(1 << m);
                    out.push(s);
                }
            }
        }
        out
    }

    fn done(&self) -> bool {
        self.threads.iter().all(|t| t.pc == Pc::Done)
    }

    fn check(&self, run: &Run) -> Result<(), String> {
        let owns = |t: &&Thread| {
            matches!(
                t.pc,
                Pc::Withdraw | Pc::Again | Pc::Enter | Pc::Leave | Pc::Release | Pc::HandOver | Pc::GiveBack
            )
        };
        let owners: Vec<&Thread> = self.threads.iter().filter(owns).collect();
        if owners.len() > 1 {
            return Err("two threads own the lock".into());
        }
        if let Some(owner) = owners.first() {
            if self.half & !(1 << owner.member) != 0 {
                return Err("the lock is owned before what a dead owner left was put in order".into());
            }
            if self.word.kind != Kind::Held || self.word.owner != owner.member + 1 {
                return Err("the word does not name the owner".into());
            }
        }
        // A lapsed offer is a skipped turn, so this counts only in runs without lateness.
        if !run.polls && self.threads.iter().any(|t| usize::from(t.passed) >= run.threads.len()) {
            return Err("a waiter was passed over".into());
        }
        Ok(())
    }
}

/// Explores everything and returns the number of states.
fn explore(run: &Run) -> Result<usize, String> {
    let mut numbers: HashMap<State, u32> = HashMap::new();
    let mut states = vec![State::new(run)];
    let mut before: Vec<Vec<u32>> = vec![Vec::new()];
    numbers.insert(states[0].clone(), 0);
    let mut at = 0;
    while at < states.len() {
        let s = states[at].clone();
        s.check(run).map_err(|why| format!("{why}: {s:?}"))?;
        let steps = (0..s.threads.len()).flat_map(|i| s.steps(i, run));
        for next in steps.chain(s.fates(run)) {
            let number = *numbers.entry(next.clone()).or_insert_with(|| {
                states.push(next);
                before.push(Vec::new());
                states.len() as u32 - 1
            });
            before[number as usize].push(at as u32);
        }
        at += 1;
    }
    // The states from which an end can be reached: backwards from the ends.
    let mut ends = vec![false; states.len()];
    let mut queue: Vec<u32> = (0..states.len() as u32).filter(|i| states[*i as usize].done()).collect();
    for i in &queue {
        ends[*i as usize] = true;
    }
    while let Some(i) = queue.pop() {
        for p in &before[i as usize] {
            if !std::mem::replace(&mut ends[*p as usize], true) {
                queue.push(*p);
            }
        }
    }
    match ends.iter().position(|e| !e) {
        Some(i) => Err(format!("some can never end: {:?}", states[i])),
        None => Ok(states.len()),
    }
}

const WHOLE: Run =
    Run { threads: &[1, 1, 1], times: [1; MEMBERS], deaths: 0, rejoin: false, polls: true, flaw: Flaw::None };

fn holds(name: &str, run: Run) {
    match explore(&run) {
        Ok(states) => println!("{name}: {states} states"),
        Err(why) => panic!("{name}: {why}"),
    }
}

#[test]
fn one_owner_at_a_time_and_everybody_ends_whoever_dies_at_any_step() {
    holds("three members, two deaths", Run { deaths: 2, ..WHOLE });
    holds("two threads of one member, a death", Run { threads: &[2, 1], deaths: 1, ..WHOLE });
    holds(
        "a new life in a dead member's slot",
        Run { threads: &[1, 1], deaths: 1, times: [2; MEMBERS], rejoin: true, ..WHOLE },
    );
}

#[test]
fn without_deaths_no_wake_up_is_lost() {
    holds("three members", Run { polls: false, ..WHOLE });
    holds("twice each", Run { polls: false, times: [2; MEMBERS], threads: &[1, 1], ..WHOLE });
    holds("two threads of one member", Run { polls: false, threads: &[2, 1], ..WHOLE });
    holds("three threads of one member", Run { polls: false, threads: &[3], ..WHOLE });
}

#[test]
fn a_waiter_is_passed_over_by_each_other_member_once_at_most() {
    holds("three members that come again", Run { polls: false, times: [2; MEMBERS], ..WHOLE });
}

#[test]
fn the_model_notices_what_is_taken_out_of_the_protocol() {
    let finds = |run: Run, what: &str| match explore(&run) {
        Ok(states) => panic!("nothing was wrong in {states} states without: {what}"),
        Err(why) => assert!(why.starts_with(what), "{why}"),
    };
    let two = Run { threads: &[1, 1], ..WHOLE };
    finds(Run { deaths: 1, flaw: Flaw::NoRecovery, ..two }, "the lock is owned before");
    finds(Run { polls: false, flaw: Flaw::LateAnnouncement, ..two }, "some can never end");
    finds(Run { flaw: Flaw::OfferIsOwnership, ..two }, "some can never end");
    finds(Run { polls: false, times: [4, 3, 1], flaw: Flaw::NoTurn, ..WHOLE }, "a waiter was passed over");
}
