// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Divides processor time between tenants, by weight, where the device is the CPU.
//!
//! The kernel's scheduler divides between threads; a tenant with more of them, or with luckier ones, gets more. So a tenant that is ahead of the
//! one furthest behind by more than a quantum is held back until that one has caught up. What counts is the processor time of a
//! worker as the kernel knows it, so a worker can't lie about it, and needs to do nothing for it. The processes of a VM count together.
//!
//! A tenant that has not run for a while is not behind: it saves nothing up. One that is ready to run and waits for a processor, which the
//! host's other processes have, has not stopped working: it keeps what it is owed.
//!
//! Who is held back uses what the others leave, where the server can do that ([`crate::hold`]). Elsewhere it is stopped. When processors idle then, those
//! furthest behind can't use them alone: one tenant more may run whatever it has had. That is tried with one fewer again, after a longer time each time that it fails.
//!
//! The server looks at no tenant while there are fewer than two, and rarely while fewer than two of them run.

use crate::listen::Peer;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Between two looks, while there is something to divide.
const TICK: Duration = Duration::from_millis(4);
/// The longest between two looks.
const REST: Duration = Duration::from_millis(250);
/// A tenant may get so far ahead, in seconds of processor time at full weight.
const QUANTUM: f64 = 0.010;
/// A tenant that is held back runs again when it is only so far ahead.
const CLOSE: f64 = 0.005;
/// A tenant that could have had more, before those that are held back, is owed no more than this, in seconds of another's time, for what it left to that one.
const OWED: f64 = 0.050;
/// A client that begins so soon after another one of its peer has ended begins as far ahead as that one was.
const REMEMBERED: Duration = Duration::from_millis(250);
/// A tenant that has not run for so long has nothing to do.
const QUIET: Duration = Duration::from_millis(25);
/// The time, with a tenant stopped, over which idle processors are measured.
const WINDOW: Duration = Duration::from_millis(100);
/// Dividing is in vain where processors idle for more than this, all together, in a window in which a tenant is stopped. A client and its worker that
/// wait for each other leave less.
const IN_VAIN: Duration = Duration::from_millis(25);
/// The longest time before it is tried with a tenant fewer.
const CALM_MAX: Duration = Duration::from_millis(1600);
const FULL_WEIGHT: f64 = 100.0;

/// The processor time that a tenant has used.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// Its weight, 1 to 100.
    pub weight: u32,
    /// Its processor time so far.
    pub cpu: Duration,
    /// The peer whose client it is: what one client was ahead when it ended, the next one is when it begins.
    pub peer: Option<Peer>,
}

#[derive(Debug, Default)]
struct Share {
    /// Its processor time at the last look.
    cpu: Duration,
    /// What a second of its time counts.
    price: f64,
    /// Seconds that it has had at full weight, or would have had, had it not been quiet.
    spent: f64,
    /// The time at which it was last seen to run, or to be ready to.
    ran: Option<Duration>,
    held: bool,
    /// Of what it has spent, what others left to it since the last look, as it was held back.
    left: f64,
    peer: Option<Peer>,
}

impl Share {
    /// Counts what it has used since the last look, which it returns.
    fn count(&mut self, used: &Used) -> Duration {
        // Less than before: one of a VM's processes has ended.
        let ran = used.cpu.saturating_sub(std::mem::replace(&mut self.cpu, used.cpu));
        self.price = FULL_WEIGHT / f64::from(used.weight.max(1));
        let spent = ran.as_secs_f64() * self.price;
        self.spent += spent;
        self.left = if self.held { spent } else { 0.0 };
        ran
    }

    fn active(&self, now: Duration) -> bool {
        self.held || self.ran.is_some_and(|at| now.saturating_sub(at) <= QUIET)
    }
}

/// Decides which tenants may run.
#[derive(Debug, Default)]
pub struct Divider {
    shares: BTreeMap<String, Share>,
    /// Seconds that clients were ahead when they ended, with which no other client of their peer has begun yet; and when the last of them ended.
    ended: BTreeMap<Peer, (f64, Duration)>,
    last: Duration,
    /// What the one furthest behind had had at the last look.
    behind: f64,
    rest: Duration,
    window: Window,
}

/// Finds out how many tenants it takes to use the processors.
#[derive(Debug, Default)]
struct Window {
    /// The time, and the idle time of the processors, at the last look.
    last: (Duration, Duration),
    /// A tenant was stopped for so long in this window, and processors idled meanwhile for so long.
    stopped: Duration,
    idled: Duration,
    /// So many tenants, those next to the one furthest behind, run whatever they have had, as that one does.
    more: usize,
    /// After this time it is tried with one fewer.
    calm: Duration,
    /// So long it was the last time.
    backoff: Duration,
    /// Set while it is tried.
    tries: bool,
}

impl Window {
    /// Returns how many of the tenants that are active run whatever they have had. `stops`: one has been stopped since the last look.
    fn look(&mut self, now: Duration, idle: Duration, active: usize, stops: bool) -> usize {
        let last = std::mem::replace(&mut self.last, (now, idle));
        if stops {
            self.stopped += now.saturating_sub(last.0);
            self.idled += idle.saturating_sub(last.1);
        }
        let changed = if self.idled > IN_VAIN {
            self.backoff = if self.tries { self.backoff * 2 } else { self.backoff }.clamp(WINDOW, CALM_MAX);
            (self.more, self.calm, self.tries) = (self.more + 1, now + self.backoff, false);
            true
        } else if self.stopped >= WINDOW {
            if std::mem::take(&mut self.tries) {
                self.backoff = Duration::ZERO;
            }
            true
        } else if self.more > 0 && !self.tries && now >= self.calm {
            (self.more, self.tries) = (self.more - 1, true);
            true
        } else {
            false
        };
        if changed {
            (self.stopped, self.idled) = (Duration::ZERO, Duration::ZERO);
        }
        self.more = self.more.min(active.saturating_sub(1));
        self.more + 1
    }
}

impl Divider {
    /// Looks at what all tenants have used at `now`, and how long processors have been `idle` in all, both since some beginning; no `idle` where those that are
    /// held back use what others leave. `is_ready` tells of a tenant whether it has a
    /// processor or waits for one; it is asked only for those that ran lately, but not since the last look. Says how long to wait before the next look; [`Divider::holds`] says who may
    /// not run until then.
    pub fn look(
        &mut self,
        now: Duration,
        used: &BTreeMap<String, Used>,
        idle: Option<Duration>,
        is_ready: impl Fn(&str) -> bool,
    ) -> Duration {
        let last = std::mem::replace(&mut self.last, now);
        let since = now.saturating_sub(last);
        self.end(now, used);
        let is_new = |name: &String| !self.shares.contains_key(name);
        let new: Vec<(&String, &Used)> = used.iter().filter(|(name, _)| is_new(name)).collect();
        for (name, share) in &mut self.shares {
            let Some(used) = used.get(name) else { continue };
            let ran = share.count(used);
            if ran > since / 50 || (!share.held && share.active(last) && is_ready(name)) {
                share.ran = Some(now);
            }
        }
        // Who is new is not behind the others.
        let active = self.shares.values().filter(|share| share.active(now));
        let least = active.map(|share| share.spent).min_by(f64::total_cmp).unwrap_or(self.behind);
        for (name, used) in new {
            let spent = least + self.lead(used.peer);
            let mut share = Share { spent, peer: used.peer, ..Share::default() };
            share.ran = (share.count(used) > Duration::ZERO).then_some(now);
            self.shares.insert(name.clone(), share);
        }
        let mut active: Vec<(f64, &str)> =
            self.shares.iter().filter(|(_, s)| s.active(now)).map(|(n, s)| (s.spent, n.as_str())).collect();
        active.sort_by(|a, b| a.0.total_cmp(&b.0));
        let several = active.len() > 1;
        let behind = active.first().map_or(self.behind, |(spent, _)| *spent);
        self.behind = behind;
        let stops = self.shares.values().any(|share| share.held);
        // What it had before it was held back, however late that is seen, it owes in full.
        let owes = |share: &Share| (share.spent - OWED * share.price).min(behind + share.left);
        let owed = self.shares.values().filter(|s| s.active(now)).map(owes).fold(f64::NEG_INFINITY, f64::max);
        let count = idle.map_or(1, |idle| self.window.look(now, idle, active.len(), stops));
        let divides = !several || count < active.len();
        active.truncate(count);
        let most_free = active.last().map_or(behind, |(spent, _)| *spent);
        // Those furthest behind run, and are still behind: they can't use the processors. So much they save up at most.
        let least = if idle.is_some() { most_free - QUANTUM } else { owed };
        let free: BTreeSet<String> = active.into_iter().map(|(_, name)| name.to_owned()).collect();
        for (name, share) in &mut self.shares {
            if !share.active(now) || !divides {
                // Neither what was saved up nor what was had beyond the own share counts later.
                share.spent = if divides { share.spent.max(behind) } else { behind };
            }
            share.spent = share.spent.max(least);
            let most = if share.held { CLOSE } else { QUANTUM };
            share.held = share.active(now) && !free.contains(name) && share.spent - behind > most;
        }
        self.rest = if several { TICK } else { (self.rest * 2).clamp(TICK, REST) };
        self.rest
    }

    /// Forgets the tenants that have ended, but for a while not by how much they were ahead.
    fn end(&mut self, now: Duration, used: &BTreeMap<String, Used>) {
        let (behind, ended) = (self.behind, &mut self.ended);
        ended.retain(|_, (lead, at)| *lead > 0.0 && now.saturating_sub(*at) < REMEMBERED);
        self.shares.retain(|name, share| {
            let lives = used.contains_key(name);
            if let Some(peer) = share.peer.filter(|_| !lives && share.spent > behind) {
                let (lead, at) = ended.entry(peer).or_default();
                (*lead, *at) = (*lead + share.spent - behind, now);
            }
            lives
        });
    }

    /// By how much a new client of this peer is ahead, for others that have ended.
    fn lead(&mut self, peer: Option<Peer>) -> f64 {
        let Some((left, _)) = peer.and_then(|peer| self.ended.get_mut(&peer)) else { return 0.0 };
        let lead = left.min(OWED);
        *left -= lead;
        lead
    }

    /// Returns whether a tenant is held back now.
    pub fn holds(&self, name: &str) -> bool {
        self.shares.get(name).is_some_and(|s| s.held)
    }
}

/// The idle time of all processors that this process may run on, together; zero if the kernel doesn't tell.
pub fn idle() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    // SAFETY: a set of processors is plain data, for which zeroes are a value.
    let mut own: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives during the call, and its size is given. Where it fails no processor is ours, and none idles.
    unsafe { libc::sched_getaffinity(0, size_of_val(&own), &mut own) };
    // SAFETY: takes an integer.
    let ticks_a_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    let ticks = idle_ticks(&stat, |cpu| {
        // SAFETY: the index lies in the set.
        cpu < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(cpu, &own) }
    });
    Duration::from_millis(ticks * 1000 / ticks_a_second)
}

/// The sum of idle and waiting for input, of the lines of those processors.
fn idle_ticks(stat: &str, own: impl Fn(usize) -> bool) -> u64 {
    let of = |line: &str| {
        let mut fields = line.strip_prefix("cpu")?.split(' ');
        let cpu = fields.next()?.parse().ok()?;
        let idle: u64 = fields.skip(3).take(2).filter_map(|f| f.parse::<u64>().ok()).sum();
        own(cpu).then_some(idle)
    };
    stat.lines().filter_map(of).sum()
}

/// The processor time of this thread.
pub fn own_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the value lives during the call, which knows this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The processor time that a process has used; `None`: it has ended.
pub fn cpu(pid: u32) -> Option<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both values live during the calls; the clock is only read where it was found.
    let read = unsafe {
        libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenant of the simulation: weight, threads that always want to run, and whether it runs at all now.
    struct Tenant {
        weight: u32,
        threads: f64,
        works: bool,
        cpu: f64,
    }

    fn tenant(weight: u32, threads: f64) -> Tenant {
        Tenant { weight, threads, works: true, cpu: 0.0 }
    }

    /// Processors under a scheduler that divides them between threads.
    struct Host {
        /// Who is held back uses what the others leave.
        uses_rest: bool,
        processors: f64,
        divider: Divider,
        tenants: Vec<Tenant>,
        now: Duration,
        idle: f64,
    }

    impl Host {
        fn new(uses_rest: bool, tenants: Vec<Tenant>) -> Host {
            let processors = 2.0;
            Host {
                uses_rest,
                processors,
                divider: Divider::default(),
                tenants,
                now: Duration::ZERO,
                idle: 0.0,
            }
        }

        /// Runs for a time; what each tenant got in it, in seconds, and what was left idle.
        fn run(&mut self, time: Duration) -> (Vec<f64>, f64) {
            let (end, idle) = (self.now + time, self.idle);
            let before: Vec<f64> = self.tenants.iter().map(|t| t.cpu).collect();
            while self.now < end {
                let used: BTreeMap<String, Used> = self
                    .tenants
                    .iter()
                    .enumerate()
                    .map(|(i, t)| {
                        (
                            i.to_string(),
                            Used { weight: t.weight, cpu: Duration::from_secs_f64(t.cpu), peer: None },
                        )
                    })
                    .collect();
                let idle = (!self.uses_rest).then(|| Duration::from_secs_f64(self.idle));
                let next = self.divider.look(self.now, &used, idle, |_| false);
                let mut left = self.processors;
                let (held, free): (Vec<usize>, Vec<usize>) =
                    (0..self.tenants.len()).partition(|i| self.divider.holds(&i.to_string()));
                for turn in [free, if self.uses_rest { held } else { Vec::new() }] {
                    let wants = |i: usize| if self.tenants[i].works { self.tenants[i].threads } else { 0.0 };
                    let threads: f64 = turn.iter().map(|i| wants(*i)).sum();
                    let each = if threads > left { left / threads } else { 1.0 };
                    let had: Vec<f64> = turn.iter().map(|i| wants(*i) * each).collect();
                    for (i, had) in turn.into_iter().zip(had) {
                        self.tenants[i].cpu += had * next.as_secs_f64();
                        left -= had;
                    }
                }
                self.idle += left.max(0.0) * next.as_secs_f64();
                self.now += next;
            }
            let got = self.tenants.iter().zip(before).map(|(t, before)| t.cpu - before).collect();
            (got, self.idle - idle)
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn equal_tenants_get_equal_time_however_many_threads_they_have() {
        for uses_rest in [false, true] {
            let mut host = Host::new(uses_rest, vec![tenant(100, 2.0), tenant(100, 4.0), tenant(100, 8.0)]);
            host.run(SECOND);
            let (got, idle) = host.run(4 * SECOND);
            let mean = got.iter().sum::<f64>() / 3.0;
            assert!(got.iter().all(|g| (g - mean).abs() < 0.02 * mean), "{uses_rest}: {got:?}");
            assert!(idle < 0.01, "{uses_rest}: {idle}");
        }
    }

    #[test]
    fn time_goes_by_weight_however_many_threads_the_lighter_one_has() {
        for (uses_rest, weight, threads) in
            [false, true].into_iter().flat_map(|rest| [(rest, 25, 2.0), (rest, 25, 50.0), (rest, 5, 50.0)])
        {
            let mut host = Host::new(uses_rest, vec![tenant(100, 2.0), tenant(weight, threads)]);
            host.run(5 * SECOND);
            let (got, _) = host.run(20 * SECOND);
            let ratio = got[0] / got[1] * f64::from(weight) / 100.0;
            assert!((0.9..1.1).contains(&ratio), "{uses_rest}, {weight}, {threads}: {got:?}");
        }
    }

    #[test]
    fn tenants_that_wait_for_others_of_the_host_are_owed_their_shares() {
        // Each gets a processor for some of 200 milliseconds, the second for a third of the first's time, when the first's turn is over.
        let turns: [(&str, u64, u64); 2] = [("0", 0, 30), ("1", 100, 10)];
        let (mut divider, mut next, mut got) = (Divider::default(), Duration::ZERO, [0; 2]);
        for now in 0..20_000 {
            let at = Duration::from_millis(now);
            if at >= next {
                let used = |ms: u64| Used { weight: 100, cpu: Duration::from_millis(ms), peer: None };
                let used = turns.iter().zip(got).map(|((name, ..), ms)| ((*name).to_owned(), used(ms)));
                next = at + divider.look(at, &used.collect(), Some(Duration::ZERO), |_| true);
            }
            for ((name, begin, time), got) in turns.iter().zip(&mut got) {
                let has_turn = (*begin..begin + time).contains(&(now % 200));
                *got += u64::from(has_turn && !divider.holds(name));
            }
        }
        let [first, second] = got;
        assert!(first.abs_diff(second) * 10 < second, "{got:?}");
    }

    #[test]
    fn a_peer_whose_clients_come_and_go_gets_no_more_than_one_that_stays() {
        // One processor. Each client of the first peer has two threads, and ends before it is a quantum ahead; alone, and three at once.
        for at_once in [1, 3] {
            let (mut divider, mut got) = (Divider::default(), [0.0; 2]);
            let mut clients: Vec<(u32, f64)> = (0..at_once).map(|i| (i, 0.0)).collect();
            let (mut next, mut ended) = (at_once, Vec::new());
            for now in (0..20_000).step_by(4) {
                let used = |cpu: f64, peer| Used {
                    weight: 100,
                    cpu: Duration::from_secs_f64(cpu),
                    peer: Some(Peer::User(peer)),
                };
                let seen = clients.iter().copied().chain(std::mem::take(&mut ended));
                let mut tenants: BTreeMap<String, Used> =
                    seen.map(|(name, cpu)| (name.to_string(), used(cpu, 1))).collect();
                tenants.insert("stays".into(), used(got[1], 2));
                divider.look(Duration::from_millis(now), &tenants, None, |_| false);
                let runs: Vec<bool> =
                    clients.iter().map(|(name, _)| !divider.holds(&name.to_string())).collect();
                let stays = !divider.holds("stays");
                let each = 0.004 / (2 * runs.iter().filter(|r| **r).count() + usize::from(stays)) as f64;
                got[1] += if stays { each } else { 0.0 };
                for (client, _) in clients.iter_mut().zip(runs).filter(|(_, runs)| *runs) {
                    got[0] += 2.0 * each;
                    client.1 += 2.0 * each;
                    if client.1 >= 0.008 {
                        ended.push(std::mem::replace(client, (next, 0.0)));
                        next += 1;
                    }
                }
            }
            // Each that is there has a share.
            let wanted = got[1] * f64::from(at_once);
            assert!(got[0] < 1.1 * wanted, "{at_once}: {got:?}");
        }
    }

    #[test]
    fn who_comes_back_gets_its_share_and_not_what_it_left_to_others() {
        for uses_rest in [false, true] {
            let mut host = Host::new(uses_rest, vec![tenant(100, 2.0), tenant(100, 2.0)]);
            host.tenants[1].works = false;
            let (got, _) = host.run(4 * SECOND);
            assert!(got[0] > 7.9, "{uses_rest}: {got:?}");
            host.tenants[1].works = true;
            host.run(SECOND / 2);
            let (got, _) = host.run(SECOND);
            assert!((got[0] - got[1]).abs() < 0.05, "{uses_rest}: {got:?}");
        }
    }

    #[test]
    fn no_tenant_is_stopped_for_one_that_can_not_use_the_time() {
        // One thread of a tenant can't use two processors, and a tenth of one leaves almost all of them.
        for (little, uses_rest) in [(1.0, false), (0.1, false), (1.0, true), (0.1, true)] {
            let mut host = Host::new(uses_rest, vec![tenant(100, little), tenant(100, 2.0)]);
            host.run(2 * SECOND);
            let (_, idle) = host.run(4 * SECOND);
            assert!(idle < 8.0 * 0.06, "{little}, {uses_rest}: {idle}");
        }
    }

    #[test]
    fn tenants_that_use_the_processors_together_only_get_equal_time_and_leave_none_idle() {
        for uses_rest in [false, true] {
            // The scheduler gives the third and fourth, of more threads, twice the time of the others.
            let mut host =
                Host::new(uses_rest, [0.8, 0.8, 1.6, 1.6].map(|threads| tenant(100, threads)).into());
            host.run(2 * SECOND);
            let (got, idle) = host.run(8 * SECOND);
            assert!(got.iter().all(|g| (g - 4.0).abs() < 0.2), "{uses_rest}: {got:?}");
            assert!(idle < 16.0 * 0.03, "{uses_rest}: {idle}");
        }
    }

    #[test]
    fn a_tenant_that_wants_little_is_owed_no_more_than_a_quantum() {
        for uses_rest in [false, true] {
            let mut host = Host::new(uses_rest, vec![tenant(100, 0.1), tenant(100, 2.0), tenant(100, 2.0)]);
            host.run(4 * SECOND);
            host.tenants[0].threads = 2.0;
            let (got, _) = host.run(SECOND);
            assert!(got[0] < 0.8, "{uses_rest}: {got:?}");
        }
    }

    #[test]
    fn what_a_tenant_had_before_it_was_held_back_is_owed_in_full_however_late_it_is_seen() {
        let mut divider = Divider::default();
        let mut now = Duration::ZERO;
        let mut look = |a: u64, b: u64| {
            now += TICK;
            let used = |ms| Used { weight: 100, cpu: Duration::from_millis(ms), peer: None };
            let used = BTreeMap::from([("a".to_owned(), used(a)), ("b".to_owned(), used(b))]);
            divider.look(now, &used, None, |_| true);
            divider.holds("b")
        };
        let (mut a, mut b) = (0, 0);
        for _ in 0..10 {
            (a, b) = (a + 4, b + 4);
            assert!(!look(a, b));
        }
        // As of many processes, at which the server does not look each time.
        b += 300;
        assert!(look(a, b));
        let before = a;
        loop {
            // Both processors, but for a little that is left.
            (a, b) = (a + 7, b + 1);
            if !look(a, b) {
                break;
            }
        }
        assert!(a - before > 290, "{}", a - before);
    }

    #[test]
    fn looks_are_rare_while_fewer_than_two_run() {
        for uses_rest in [false, true] {
            let mut host = Host::new(uses_rest, vec![tenant(100, 2.0), tenant(100, 2.0)]);
            assert_eq!(host.divider.rest, Duration::ZERO);
            host.run(SECOND);
            assert_eq!(host.divider.rest, TICK);
            host.tenants[1].works = false;
            host.run(2 * SECOND);
            assert_eq!(host.divider.rest, REST);
            assert!(!host.divider.holds("0") && !host.divider.holds("1"));
        }
    }

    #[test]
    fn idle_time_is_that_of_the_own_processors() {
        let stat = "cpu  9 9 9 900 90 1\ncpu0 1 2 3 400 40 0\ncpu1 1 2 3 500 50 0\nintr 5\n";
        assert_eq!(idle_ticks(stat, |_| true), 990);
        assert_eq!(idle_ticks(stat, |cpu| cpu == 1), 550);
        assert_eq!(idle_ticks("", |_| true), 0);
    }

    #[test]
    fn the_processor_time_of_a_process_that_is_gone_is_none() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        child.wait().expect("its end");
        assert_eq!(cpu(child.id()), None);
        assert!(cpu(std::process::id()).expect("of this one") > Duration::ZERO);
    }
}
