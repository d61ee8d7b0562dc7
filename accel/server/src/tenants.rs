// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tenants: clients that are served now, each with its worker, limits and figures; and the thread that divides time between them.

use crate::divide::{self, Divider, Used};
use crate::figures::{Figure, Figures};
use crate::hold::{Hold, Way};
use crate::limits::Limits;
use crate::listen::Peer;
use crate::wall::census::{self, Census};
use crate::workers::{Confinement, Origin};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tombolo_calls::say;

pub use tombolo_control::accel::Tenant as Status;

/// After each look the thread that divides rests so many times as long as that has taken: whatever tenants do, dividing takes little of what is to be divided.
const SHARE: u32 = 8;

/// A client that is served.
pub struct Tenant {
    /// Where it came from.
    pub origin: Origin,
    /// The tenant's limits.
    pub limits: Limits,
    /// The figures of its worker.
    pub figures: Figures,
    /// The time at which its worker was started.
    pub since: Instant,
    /// How its worker is held back.
    pub hold: Hold,
    /// The processes that its worker started, once they can be seen.
    pub census: Option<Census>,
    /// The processor time of its worker, and of what that started, at the last look.
    pub used: Duration,
    /// How long it was held back, because its share of time was used up.
    pub paused: Pause,
}

impl Tenant {
    /// The processes whose time is counted together: those of a VM.
    fn group(&self, pid: u32) -> String {
        if self.origin.is_vm() { self.origin.via.clone() } else { pid.to_string() }
    }

    /// The processor time of its worker and of what that started.
    fn cpu(&mut self, pid: u32) -> Duration {
        // The processes of a killed worker end with it: no census is needed.
        if self.census.is_none() && !self.hold.is_over() {
            self.census = Census::of(pid);
        }
        let started = self.census.as_mut().map(Census::look).unwrap_or_default();
        // One that has ended has used what it had.
        self.used = divide::cpu(pid).map_or(self.used, |own| own + started).max(self.used);
        self.used
    }

    /// Returns whether its worker, or a process that this started, has a processor or waits for one.
    fn is_ready_to_run(&self, pid: u32) -> bool {
        let task = std::fs::File::open(format!("/proc/{pid}/task"));
        task.is_ok_and(|task| census::is_ready_to_run(&task.into()))
            || self.census.as_ref().is_some_and(Census::is_ready_to_run)
    }

    fn end_if_it_has_too_many_processes(&mut self, pid: u32) {
        if self.census.as_ref().is_some_and(Census::has_too_many) {
            say!("tombolo accel: worker {pid} started more processes than any driver does, and is killed");
            self.census = None;
            self.hold.kill();
        }
    }

    /// Returns whether it runs, and all of its threads have what they have when it runs.
    fn runs_for_good(&self) -> bool {
        self.paused.since.is_none() && self.hold.is_settled()
    }

    /// Lets it run, or holds it back. `idled`: processors have idled since the last look.
    fn may_run(&mut self, runs: bool, idled: bool) {
        let is_new = self.paused.since.is_some() == runs;
        if is_new && !runs {
            // The census finds processes that the worker started just before: they are not idle yet. Those that it starts from now on are.
            self.census.iter_mut().for_each(Census::wake);
        }
        self.hold.set(!runs, is_new, self.census.as_ref(), idled);
        self.paused = match self.paused.since {
            None if !runs => Pause { since: Some(Instant::now()), ..self.paused },
            Some(since) if runs => Pause { before: self.paused.before + since.elapsed(), since: None },
            _ => self.paused,
        };
    }
}

/// Time in which a worker was held back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pause {
    before: Duration,
    since: Option<Instant>,
}

impl Pause {
    fn total(&self) -> Duration {
        self.before + self.since.map(|since| since.elapsed()).unwrap_or_default()
    }
}

#[derive(Default)]
struct Inner {
    by_pid: BTreeMap<u32, Tenant>,
    /// The use of processes that have ended, by VM: a client that begins anew again and again still owes it.
    ended: BTreeMap<String, Used>,
    /// The use of clients that came by a socket and have ended since the last look.
    gone: BTreeMap<String, Used>,
    /// The idle time of the processors at the last look at which it was of use.
    idle: Duration,
    /// VMs that are attached: their processes may come at any time.
    vms: usize,
    /// Those that have connected to a socket, and have no worker yet.
    guests: Vec<Peer>,
}

/// The place of a peer that has connected, until it is a tenant or this is dropped.
pub struct Guest {
    tenants: Arc<Tenants>,
    peer: Peer,
    has_place: bool,
}

impl Guest {
    /// The peer that has the place.
    pub fn peer(&self) -> Peer {
        self.peer
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.has_place {
            self.tenants.lock().leave(self.peer);
            self.tenants.changed.notify_all();
        }
    }
}

/// Why a peer gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// All places are taken.
    Server,
    /// The peer has so many.
    Peer(usize),
}

impl Inner {
    /// How many came by a socket, not from VMs; and how many of them are of this peer.
    fn by_sockets(&self, peer: Peer) -> (usize, usize) {
        let tenants = self.by_pid.values().filter_map(|t| t.origin.peer);
        let peers = tenants.chain(self.guests.iter().copied());
        peers.fold((0, 0), |(all, own), one| (all + 1, own + usize::from(one == peer)))
    }

    /// Takes one place of a guest back.
    fn leave(&mut self, peer: Peer) {
        if let Some(at) = self.guests.iter().position(|guest| *guest == peer) {
            self.guests.swap_remove(at);
        }
    }

    fn remove(&mut self, pid: u32) {
        let Some(mut gone) = self.by_pid.remove(&pid) else { return };
        // What has ended holds no later process of its VM back. Those that are there are held back with it until the next look lets them run.
        let name = gone.group(pid);
        if !self.by_pid.iter().any(|(pid, tenant)| tenant.group(*pid) == name) {
            gone.may_run(true, false);
        }
        gone.cpu(pid);
        let (weight, peer) = (gone.limits.weight, gone.origin.peer);
        let before = if gone.origin.is_vm() { &mut self.ended } else { &mut self.gone };
        before.entry(name).or_insert(Used { weight, cpu: Duration::ZERO, peer }).cpu += gone.used;
    }

    /// Returns the processor time of each group of tenants, processes that have ended included.
    fn used(&mut self) -> BTreeMap<String, Used> {
        let mut used = self.ended.clone();
        used.append(&mut self.gone);
        for (pid, tenant) in &mut self.by_pid {
            let cpu = tenant.cpu(*pid);
            tenant.end_if_it_has_too_many_processes(*pid);
            let weight = tenant.limits.weight;
            let peer = tenant.origin.peer;
            used.entry(tenant.group(*pid)).or_insert(Used { weight, cpu: Duration::ZERO, peer }).cpu += cpu;
        }
        used
    }

    /// Holds the tenants back that are ahead and lets the others run. Returns the time until the next look.
    fn divide(&mut self, divider: &mut Divider, way: Way, now: Duration) -> Duration {
        let used = self.used();
        let by_pid = &self.by_pid;
        let is_ready =
            |name: &str| by_pid.iter().any(|(pid, t)| t.group(*pid) == name && t.is_ready_to_run(*pid));
        let idle = (!way.uses_the_rest()).then(divide::idle);
        let idled = by_pid.values().any(|tenant| tenant.hold.is_crowd()) && {
            let idle = divide::idle();
            std::mem::replace(&mut self.idle, idle) < idle
        };
        let rest = divider.look(now, &used, idle, is_ready);
        for (pid, tenant) in &mut self.by_pid {
            let runs = !divider.holds(&tenant.group(*pid));
            tenant.may_run(runs, idled);
        }
        rest
    }
}

/// All tenants of a server.
#[derive(Default)]
pub struct Tenants {
    inner: Mutex<Inner>,
    changed: Condvar,
    confinement: Confinement,
}

impl Tenants {
    /// No tenants yet, and the confinement of the workers to come.
    pub fn of(confinement: Confinement) -> Tenants {
        Tenants { confinement, ..Tenants::default() }
    }

    pub fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Maps stay whole whatever happens between two changes.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a tenant, which has the place of its guest from now on.
    pub fn add(&self, pid: u32, tenant: Tenant, guest: Option<Guest>) {
        let mut inner = self.lock();
        inner.by_pid.insert(pid, tenant);
        if let Some(mut guest) = guest {
            // In one step: the peer has one place throughout.
            inner.leave(guest.peer);
            guest.has_place = false;
            drop(inner);
        }
        self.changed.notify_all();
    }

    /// Gives a place to a peer that has connected to a socket, unless there are `most` on all sockets, or `of_peer` of this peer.
    pub fn welcome(self: &Arc<Self>, peer: Peer, most: usize, of_peer: usize) -> Result<Guest, Full> {
        let mut inner = self.lock();
        let (all, own) = inner.by_sockets(peer);
        if all >= most {
            return Err(Full::Server);
        }
        if own >= of_peer {
            return Err(Full::Peer(own));
        }
        inner.guests.push(peer);
        Ok(Guest { tenants: self.clone(), peer, has_place: true })
    }

    pub fn remove(&self, pid: u32) {
        self.lock().remove(pid);
        self.changed.notify_all();
    }

    /// Kills a worker.
    pub fn kill(&self, pid: u32) {
        if let Some(tenant) = self.lock().by_pid.get_mut(&pid) {
            tenant.hold.kill();
        }
    }

    pub fn vm_came(&self) {
        self.lock().vms += 1;
    }

    pub fn vm_went(&self) {
        let mut inner = self.lock();
        inner.vms = inner.vms.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Waits until one comes or goes, or for so long.
    pub fn wait_for_change(&self, most: Duration) {
        drop(self.changed.wait_timeout(self.lock(), most).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until no tenant is left, and none can come from a VM or of those that have connected.
    pub fn wait_until_gone(&self) {
        let inner = self.lock();
        let stays = |i: &mut Inner| !i.by_pid.is_empty() || !i.guests.is_empty() || i.vms > 0;
        let gone = self.changed.wait_while(inner, stays);
        drop(gone.unwrap_or_else(PoisonError::into_inner));
    }

    /// Divides processor time between them, for ever.
    pub fn divide(&self) {
        // Before the threads of tenants, of which there may be thousands; it fails where this server may not.
        // SAFETY: integers only; 0 is this thread.
        let _as_before = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
        let begun = Instant::now();
        let mut divider = Divider::default();
        loop {
            let mut inner = self.lock();
            let before = divide::own_time();
            let rest = inner.divide(&mut divider, self.confinement.way, begun.elapsed());
            let rest = rest.max(SHARE * divide::own_time().saturating_sub(before));
            // A tenant that is held back for a VM whose processes have just ended goes on at one of the next looks.
            if inner.by_pid.len() < 2 && inner.by_pid.values().all(Tenant::runs_for_good) {
                drop(self.changed.wait_while(inner, |i| i.by_pid.len() < 2));
            } else {
                drop(inner);
                std::thread::sleep(rest);
            }
        }
    }

    pub fn status(&self) -> Vec<Status> {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let status = |(pid, t): (&u32, &mut Tenant)| Status {
            pid: *pid,
            name: t.figures.name(),
            via: t.origin.via.clone(),
            peer: t.origin.peer.map(|peer| peer.to_string()),
            weight: t.limits.weight,
            memory: t.figures.get(Figure::Memory),
            memory_limit: t.limits.memory,
            objects: t.figures.get(Figure::Objects),
            objects_limit: t.limits.objects,
            calls: t.figures.get(Figure::Calls),
            waits: t.figures.get(Figure::Waits),
            bytes: t.figures.get(Figure::Bytes),
            busy_seconds: seconds(t.figures.get(Figure::Busy)),
            held_seconds: seconds(t.figures.get(Figure::Held)),
            cpu_seconds: t.cpu(*pid).as_secs_f64(),
            paused_seconds: t.paused.total().as_secs_f64(),
            seconds: t.since.elapsed().as_secs_f64(),
        };
        self.lock().by_pid.iter_mut().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold::{
        self,
        tests::{Held, policies},
    };
    use std::os::fd::OwnedFd;
    use std::process::{Child, Command};

    /// The pidfd of a child that has not been waited for.
    fn pidfd(pid: u32) -> OwnedFd {
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("not 0");
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it was not waited for")
    }

    /// A process that always wants to run, on one processor, as a tenant of this weight.
    fn busy(tenants: &Tenants, via: &str, weight: u32) -> Child {
        let child = Command::new("taskset")
            .args(["-c", "0", "sh", "-c", "while :; do :; done"])
            .spawn()
            .expect("taskset (package util-linux)");
        join(tenants, child.id(), via, weight);
        child
    }

    /// Makes a tenant of a process.
    fn join(tenants: &Tenants, pid: u32, via: &str, weight: u32) {
        tenants.add(
            pid,
            Tenant {
                origin: Origin { via: via.into(), peer: (!via.starts_with("vm:")).then_some(Peer::User(0)) },
                limits: Limits { weight, ..Limits::default() },
                figures: Figures::new().expect("a page").0,
                since: Instant::now(),
                hold: Hold::new(tenants.confinement().way, pid, Arc::new(pidfd(pid)), None),
                census: None,
                used: Duration::ZERO,
                paused: Pause::default(),
            },
            None,
        );
    }

    /// Divides its time from now on, as long as this process lives.
    fn divide_the_first_processor(tenants: &Arc<Tenants>) {
        let dividing = tenants.clone();
        std::thread::spawn(move || {
            // SAFETY: a set of processors is plain data, for which zeroes are a value.
            let mut first: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set lives during both calls; where the children run is where idleness counts.
            unsafe {
                libc::CPU_SET(0, &mut first);
                libc::sched_setaffinity(0, size_of_val(&first), &first);
            }
            dividing.divide();
        });
    }

    #[test]
    fn a_place_is_counted_once_whether_a_peer_has_said_who_it_is_or_has_a_worker() {
        let tenants = Arc::new(Tenants::default());
        let welcome = |peer| tenants.welcome(peer, 3, 2);
        let (a, b) = (Peer::User(1), Peer::User(2));
        let first = welcome(a).expect("a place");
        let second = welcome(a).expect("a place");
        assert_eq!(welcome(a).err(), Some(Full::Peer(2)));
        let mut child = busy(&tenants, "vm:x", 1);
        let other = welcome(b).expect("those of VMs are not counted here");
        assert_eq!(welcome(b).err(), Some(Full::Server));
        drop(first);
        let again = welcome(a).expect("a place that is free again");
        // As a tenant it keeps its place and takes no second one.
        let mut inner = tenants.lock();
        let mut tenant = inner.by_pid.remove(&child.id()).expect("it was added");
        drop(inner);
        tenant.origin = Origin { via: "unix:/s".into(), peer: Some(a) };
        tenants.add(child.id(), tenant, Some(second));
        assert_eq!(tenants.lock().by_sockets(a), (3, 2));
        drop((again, other));
        assert_eq!(tenants.lock().by_sockets(a), (1, 1));
        child.kill().expect("killed");
        child.wait().expect("its end");
        tenants.remove(child.id());
        assert_eq!(tenants.lock().by_sockets(a), (0, 0));
    }

    #[test]
    fn a_process_of_a_vm_that_ends_lets_no_other_run_that_is_held_back_with_it_unless_it_is_the_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("vm");
        let group = Arc::new(crate::wall::cgroup::Group::without_kernel(&folder));
        let tenants = Tenants::default();
        let mut children = [(); 2].map(|()| busy(&tenants, "vm:a", 100));
        for (pid, tenant) in &mut tenants.lock().by_pid {
            tenant.hold = Hold::new(Way::Groups, *pid, Arc::new(pidfd(*pid)), Some(group.clone()));
            tenant.may_run(false, false);
        }
        let is_idle = || std::fs::read_to_string(folder.join("cpu.idle")).expect("written") == "1";
        assert!(is_idle());
        for (child, stays) in children.iter_mut().zip([true, false]) {
            child.kill().expect("killed");
            tenants.remove(child.id());
            child.wait().expect("its end");
            assert_eq!(is_idle(), stays);
        }
    }

    fn cpu(child: &Child) -> f64 {
        divide::cpu(child.id()).expect("it was not waited for").as_secs_f64()
    }

    #[test]
    fn what_a_vms_processes_had_used_when_they_ended_is_still_the_vms_and_a_clients_is_nobodys() {
        let tenants = Tenants::default();
        let used = || tenants.lock().used();
        for (via, stays) in [("vm:a", true), ("unix:/s", false)] {
            let mut child = busy(&tenants, via, 10);
            while used().values().all(|used| used.cpu < Duration::from_millis(20)) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let had = used();
            child.kill().expect("killed");
            tenants.remove(child.id());
            child.wait().expect("its end");
            let name = had.keys().find(|name| (*name == via) == stays).expect("its group");
            // One look finds out what it had used at its end.
            for looks in 0..2 {
                let left = used().get(name).map(|used| (used.cpu >= had[name].cpu, used.weight));
                assert_eq!(left, (stays || looks == 0).then_some((true, 10)), "{via}, {looks}");
            }
            tenants.lock().ended.clear();
        }
    }

    #[test]
    fn the_threads_of_a_crowd_that_was_held_back_are_what_they_were_when_the_others_have_gone() {
        let way = Way::without_groups();
        if way != Way::Threads {
            return;
        }
        let tenants = Tenants::of(Confinement::none(way));
        let crowd = Held::start("crowd", 2 * hold::few() as u32);
        let pid = crowd.0.id();
        join(&tenants, pid, "unix:/s", 100);
        let mut inner = tenants.lock();
        let tenant = inner.by_pid.get_mut(&pid).expect("it was added");
        tenant.may_run(false, false);
        assert!(!tenant.runs_for_good());
        // So soon that they are left as they are for a while.
        tenant.may_run(true, false);
        while !tenant.runs_for_good() {
            tenant.may_run(true, false);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(policies(pid).iter().all(|policy| *policy == libc::SCHED_OTHER));
    }

    #[test]
    fn real_processes_get_time_by_weight_those_of_a_vm_together_and_all_of_it_when_the_others_have_gone() {
        for way in [Way::Stops, Way::without_groups()] {
            let confinement = Confinement::none(way);
            let tenants = Arc::new(Tenants::of(confinement));
            // Two processes of a VM, and a client of a quarter of its weight.
            let mut children = [("vm:a", 100), ("vm:a", 100), ("unix:/s", 25)]
                .map(|(via, weight)| busy(&tenants, via, weight));
            divide_the_first_processor(&tenants);
            // Until the first two had two seconds, however long that takes here.
            while cpu(&children[0]) + cpu(&children[1]) < 2.0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            let of_vm = cpu(&children[0]) + cpu(&children[1]);
            let ratio = of_vm / cpu(&children[2]);
            assert!((3.0..5.5).contains(&ratio), "{way:?}: {ratio}");
            let paused = tenants.status().iter().map(|s| s.paused_seconds).fold(0.0, f64::max);
            assert!(paused > 0.0);
            for gone in &mut children[..2] {
                gone.kill().expect("killed");
                gone.wait().expect("its end");
                tenants.remove(gone.id());
            }
            // It runs on, or this takes for ever.
            let had = cpu(&children[2]);
            while cpu(&children[2]) < had + 0.1 {
                std::thread::sleep(Duration::from_millis(5));
            }
            children[2].kill().expect("killed");
            children[2].wait().expect("its end");
        }
    }
}
