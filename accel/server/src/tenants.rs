// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is served now: a worker each, its limits and its figures.

use crate::figures::{Figure, Figures};
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A client that is served.
pub struct Tenant {
    /// The address it came by, or `vm:` and the VM's name.
    pub via: String,
    /// What it may use.
    pub limits: Limits,
    /// What its worker says.
    pub figures: Figures,
    /// When its worker was started.
    pub since: Instant,
}

/// A tenant at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Its worker.
    pub pid: u32,
    /// Who it says it is: program and process.
    pub name: String,
    /// The address it came by, or `vm:` and the VM's name.
    pub via: String,
    /// Its share of time beside others.
    pub weight: u32,
    /// Bytes of device memory in use.
    pub memory: u64,
    /// The most it may use.
    pub memory_limit: u64,
    /// Objects that live.
    pub objects: u64,
    /// The most it may have.
    pub objects_limit: u32,
    /// Requests.
    pub calls: u64,
    /// Of these, those it waited for.
    pub waits: u64,
    /// Bytes in records.
    pub bytes: u64,
    /// Seconds from requests that it waited for to their replies.
    pub busy_seconds: f64,
    /// Seconds for which its requests were held back by its rate.
    pub held_seconds: f64,
    /// Seconds since its worker was started.
    pub seconds: f64,
}

#[derive(Default)]
struct Inner {
    by_pid: BTreeMap<u32, Tenant>,
    /// VMs that are attached: their processes may come at any time.
    vms: usize,
}

/// All tenants of a server.
#[derive(Default)]
pub struct Tenants {
    inner: Mutex<Inner>,
    left: Condvar,
}

impl Tenants {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Maps stay whole whatever happens between two changes.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more.
    pub fn add(&self, pid: u32, tenant: Tenant) {
        self.lock().by_pid.insert(pid, tenant);
    }

    /// One less.
    pub fn remove(&self, pid: u32) {
        self.lock().by_pid.remove(&pid);
        self.left.notify_all();
    }

    /// A VM came.
    pub fn vm_came(&self) {
        self.lock().vms += 1;
    }

    /// A VM went.
    pub fn vm_went(&self) {
        let mut inner = self.lock();
        inner.vms = inner.vms.saturating_sub(1);
        self.left.notify_all();
    }

    /// How many came by a socket, not from VMs.
    pub fn by_sockets(&self) -> usize {
        self.lock().by_pid.values().filter(|t| !t.via.starts_with("vm:")).count()
    }

    /// Waits until nobody is left, and nobody can come from a VM.
    pub fn wait_until_gone(&self) {
        let inner = self.lock();
        let gone = self.left.wait_while(inner, |i| !i.by_pid.is_empty() || i.vms > 0);
        drop(gone.unwrap_or_else(PoisonError::into_inner));
    }

    /// All of them now.
    pub fn status(&self) -> Vec<Status> {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let status = |(pid, t): (&u32, &Tenant)| Status {
            pid: *pid,
            name: t.figures.name(),
            via: t.via.clone(),
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
            seconds: t.since.elapsed().as_secs_f64(),
        };
        self.lock().by_pid.iter().map(status).collect()
    }
}
