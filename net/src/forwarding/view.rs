// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as the workers see it: an immutable list of ports with what they may do, and the MAC table. A change
//! makes a new one.

use std::sync::Arc;

use crate::forwarding::capture::Capture;
use crate::forwarding::multicast::Snooping;
use crate::forwarding::table::{Duplicate, MacTable};
use crate::policy::port::{Policy, Vlan};
use crate::ports::port::Port;
use crate::uplink::Uplink;

/// A port in its place.
#[derive(Clone)]
pub struct Attached {
    pub port: Arc<Port>,
    pub policy: Arc<Policy>,
    /// What is behind it, if that isn't a guest.
    pub uplink: Option<Arc<Uplink>>,
    /// Somebody who watches it.
    pub capture: Option<Arc<Capture>>,
}

impl Attached {
    /// A guest's port.
    #[must_use]
    pub fn guest(port: Arc<Port>, policy: Policy) -> Self {
        Self { port, policy: Arc::new(policy), uplink: None, capture: None }
    }
}

/// All ports.
#[derive(Clone, Default)]
pub struct View {
    ports: Vec<Attached>,
    table: MacTable,
    uplinks: Vec<usize>,
    /// Ports that may learn addresses.
    learners: Vec<usize>,
    /// For each port: of what it sends only the MACs decide.
    simple: Vec<bool>,
    /// For each port: what is sent to it is looked at, or limited.
    filters: Vec<bool>,
    /// For each port: who gets copies of its frames.
    mirrors: Vec<Option<usize>>,
    /// Of what may be sent to any port only the MACs decide.
    open: bool,
    /// What is known of queriers; none: multicast goes to all.
    snooping: Option<Arc<Snooping>>,
}

impl View {
    /// A view of `ports`.
    ///
    /// # Errors
    /// Two of them own the same MAC.
    pub fn new(ports: Vec<Attached>) -> Result<Self, Duplicate> {
        let pairs: Vec<_> =
            ports.iter().enumerate().flat_map(|(i, a)| a.policy.macs.iter().map(move |m| (*m, i))).collect();
        let table = MacTable::new(&pairs)?;
        // One that owns MACs is a service: it is no way out.
        let out = |a: &Attached| a.policy.uplink && a.policy.macs.is_empty();
        let uplinks = ports.iter().enumerate().filter(|(_, a)| out(a)).map(|(i, _)| i).collect();
        let learners = ports.iter().enumerate().filter(|(_, a)| a.policy.learn > 0).map(|(i, _)| i).collect();
        let simple = ports.iter().map(|a| a.policy.is_simple()).collect();
        let mirror_of = |(i, a): (usize, &Attached)| {
            let name = a.policy.mirror.as_ref()?;
            ports.iter().position(|b| b.port.name() == name).filter(|to| *to != i)
        };
        let mirrors = ports.iter().enumerate().map(mirror_of).collect();
        let filters: Vec<bool> = ports.iter().map(|a| a.policy.filters_receiving()).collect();
        let open = ports.iter().all(|a| a.policy.vlan == Vlan::Transparent && !a.policy.isolated)
            && !filters.contains(&true);
        Ok(Self { ports, table, uplinks, learners, simple, filters, mirrors, open, snooping: None })
    }

    /// The same, where multicast goes by what `snooping` knows.
    #[must_use]
    pub fn snooping(self, snooping: Option<Arc<Snooping>>) -> Self {
        Self { snooping, ..self }
    }

    /// What is known of queriers; none: multicast goes to all.
    #[must_use]
    pub fn queriers(&self) -> Option<&Snooping> {
        self.snooping.as_deref()
    }

    /// The ports; positions are what the table speaks of.
    #[must_use]
    pub fn ports(&self) -> &[Attached] {
        &self.ports
    }

    /// Position of the owner of a MAC, by its key.
    #[inline(always)]
    #[must_use]
    pub fn owner(&self, key: u64) -> Option<usize> {
        self.table.find(key)
    }

    /// Position of the port that uses a MAC which nobody owns, by its key.
    #[must_use]
    pub fn learned(&self, key: u64, now: u64) -> Option<usize> {
        self.learners.iter().copied().find(|i| self.ports[*i].port.learned.has(key, now))
    }

    /// Positions of the ports that may learn addresses.
    #[must_use]
    pub fn learners(&self) -> &[usize] {
        &self.learners
    }

    /// Positions of the uplinks.
    #[must_use]
    pub fn uplinks(&self) -> &[usize] {
        &self.uplinks
    }

    /// Do only the MACs decide about what the port at `src` sends?
    #[inline(always)]
    #[must_use]
    pub fn is_simple(&self, src: usize) -> bool {
        self.simple[src]
    }

    /// Position of the port that gets copies of what the one at `at` sends and gets.
    #[inline(always)]
    #[must_use]
    pub fn mirror(&self, at: usize) -> Option<usize> {
        self.mirrors[at]
    }

    /// Does anybody watch the port at `at`?
    #[must_use]
    pub fn is_watched(&self, at: usize) -> bool {
        self.mirrors[at].is_some() || self.ports[at].capture.is_some()
    }

    /// Is what is sent to the port at `dest` looked at, or limited?
    #[inline(always)]
    #[must_use]
    pub fn filters(&self, dest: usize) -> bool {
        self.filters[dest]
    }

    /// May every port have what any other sends?
    #[inline(always)]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }
}
