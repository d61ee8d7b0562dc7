// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tenants: clients that are served now, each with its worker, limits and figures.

use crate::figures::{Figure, Figures};
use crate::limits::Limits;
use crate::listen::Peer;
use crate::wall::cgroup::Group;
use crate::wall::spawn;
use crate::workers::{Confinement, Origin};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use tombolo_control::accel::Tenant as Status;

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
    /// The pidfd of its worker.
    pub process: Arc<OwnedFd>,
    /// The control group of its worker, if the server has one to divide.
    pub group: Option<Arc<Group>>,
}

impl Tenant {
    /// The processor time of all processes in its worker's control group; without one, of the worker alone.
    fn cpu(&self, pid: u32) -> Duration {
        let used = match &self.group {
            Some(group) => group.cpu(),
            None => cpu(pid),
        };
        // It has ended.
        used.unwrap_or_default()
    }
}

/// The processor time that a process has used; `None`: it has ended.
fn cpu(pid: u32) -> Option<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both values live during the calls; the clock is only read where it was found.
    let read = unsafe {
        libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[derive(Default)]
struct Inner {
    by_pid: BTreeMap<u32, Tenant>,
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
        self.lock().by_pid.remove(&pid);
        self.changed.notify_all();
    }

    /// Kills a worker.
    pub fn kill(&self, pid: u32) {
        if let Some(tenant) = self.lock().by_pid.get(&pid) {
            let _ended = spawn::signal(tenant.process.as_fd(), libc::SIGKILL);
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

    pub fn status(&self) -> Vec<Status> {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let status = |(pid, t): (&u32, &Tenant)| Status {
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
            seconds: t.since.elapsed().as_secs_f64(),
        };
        self.lock().by_pid.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Makes a tenant of a process.
    fn join(tenants: &Tenants, pid: u32, via: &str) {
        let number = rustix::process::Pid::from_raw(pid as i32).expect("not 0");
        let process = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty());
        let tenant = Tenant {
            origin: Origin { via: via.into(), peer: (!via.starts_with("vm:")).then_some(Peer::User(0)) },
            limits: Limits::default(),
            figures: Figures::new().expect("a page").0,
            since: Instant::now(),
            process: Arc::new(process.expect("it was not waited for")),
            group: None,
        };
        tenants.add(pid, tenant, None);
    }

    #[test]
    fn a_place_is_counted_once_whether_a_peer_has_said_who_it_is_or_has_a_worker() {
        let tenants = Arc::new(Tenants::default());
        let welcome = |peer| tenants.welcome(peer, 3, 2);
        let (a, b) = (Peer::User(1), Peer::User(2));
        let first = welcome(a).expect("a place");
        let second = welcome(a).expect("a place");
        assert_eq!(welcome(a).err(), Some(Full::Peer(2)));
        let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep");
        join(&tenants, child.id(), "vm:x");
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
}
