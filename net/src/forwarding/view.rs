// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as the workers see it: an immutable list of ports with their policies, and the MAC table. A change makes
//! a new one.

use std::collections::BTreeSet;
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
    /// The uplink behind it, if it isn't a guest's.
    pub uplink: Option<Arc<Uplink>>,
    /// The capture of it, if there is one.
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
    /// For each port: only the MACs decide about frames that it sends.
    simple: Vec<bool>,
    /// For each port: frames for it are filtered, or limited.
    filters: Vec<bool>,
    /// For each port: the port that gets copies of its frames.
    mirrors: Vec<Option<usize>>,
    /// For each port: the only one with which it exchanges frames.
    mates: Vec<Option<usize>>,
    /// Only the MACs decide about frames for every port.
    open: bool,
    /// The queriers heard; none: multicast goes to all.
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
        // A port with MACs is a service, and no uplink.
        let out = |a: &Attached| a.policy.uplink && a.policy.macs.is_empty();
        let uplinks = ports.iter().enumerate().filter(|(_, a)| out(a)).map(|(i, _)| i).collect();
        let learners = ports.iter().enumerate().filter(|(_, a)| a.policy.learn > 0).map(|(i, _)| i).collect();
        let mirror_of = |(i, a): (usize, &Attached)| {
            let name = a.policy.mirror.as_ref()?;
            ports.iter().position(|b| b.port.name() == name).filter(|to| *to != i)
        };
        let mirrors = ports.iter().enumerate().map(mirror_of).collect();
        let filters: Vec<bool> = ports.iter().map(|a| a.policy.filters_receiving()).collect();
        // A port that is not there has no number: then there is none.
        let position = |name: &String| ports.iter().position(|b| b.port.name() == name).unwrap_or(usize::MAX);
        let mates: Vec<_> = ports.iter().map(|a| a.policy.only.as_ref().map(position)).collect();
        let is_mate = |at: usize, other: usize| mates[at].is_none_or(|mate| mate == other);
        // A firewall decides by headers, of which it must have a copy: the guest could change the frame.
        let filtered = |at: usize| {
            let mut others = ports.iter().enumerate();
            others.any(|(i, b)| b.uplink.as_ref().is_some_and(|up| up.filters()) && is_mate(i, at))
        };
        let simple = ports.iter().enumerate().map(|(i, a)| a.policy.is_simple() && !filtered(i)).collect();
        let open = ports.iter().all(|a| a.policy.vlan == Vlan::Transparent && !a.policy.isolated)
            && !filters.contains(&true)
            && mates.iter().all(Option::is_none);
        Ok(Self { ports, table, uplinks, learners, simple, filters, mirrors, mates, open, snooping: None })
    }

    /// Returns the view with multicast by `snooping`.
    #[must_use]
    pub fn snooping(self, snooping: Option<Arc<Snooping>>) -> Self {
        Self { snooping, ..self }
    }

    /// Returns the queriers heard; none: multicast goes to all.
    #[must_use]
    pub fn queriers(&self) -> Option<&Snooping> {
        self.snooping.as_deref()
    }

    /// Returns the ports; the table holds positions in this list.
    #[must_use]
    pub fn ports(&self) -> &[Attached] {
        &self.ports
    }

    /// Returns the position of the owner of a MAC, by its key.
    #[inline(always)]
    #[must_use]
    pub fn owner(&self, key: u64) -> Option<usize> {
        self.table.find(key)
    }

    /// Returns the position of the port that uses a MAC without an owner on a VLAN, by its key
    /// ([`stations`](crate::forwarding::learn::stations)).
    #[must_use]
    pub fn learned(&self, key: u64, now: u64) -> Option<usize> {
        self.learners.iter().copied().find(|i| self.ports[*i].port.learned.has(key, now))
    }

    /// Returns the positions of the ports that may learn addresses.
    #[must_use]
    pub fn learners(&self) -> &[usize] {
        &self.learners
    }

    /// Returns the VLANs of the guests' ports; 0: untagged frames among transparent ports.
    #[must_use]
    pub fn vlans(&self) -> BTreeSet<u16> {
        let guests = self.ports.iter().filter(|a| a.uplink.is_none());
        guests.flat_map(|a| a.policy.vlan.numbers()).collect()
    }

    /// Returns the positions of the uplinks.
    #[must_use]
    pub fn uplinks(&self) -> &[usize] {
        &self.uplinks
    }

    /// Returns whether only the MACs decide about frames that the port at `src` sends.
    #[inline(always)]
    #[must_use]
    pub fn is_simple(&self, src: usize) -> bool {
        self.simple[src]
    }

    /// Returns the position of the port that mirrors the one at `at`.
    #[inline(always)]
    #[must_use]
    pub fn mirror(&self, at: usize) -> Option<usize> {
        self.mirrors[at]
    }

    /// Returns whether the port at `at` has a capture or a mirror.
    #[must_use]
    pub fn is_watched(&self, at: usize) -> bool {
        self.mirrors[at].is_some() || self.ports[at].capture.is_some()
    }

    /// Returns whether frames for the port at `dest` are filtered or limited.
    #[inline(always)]
    #[must_use]
    pub fn filters(&self, dest: usize) -> bool {
        self.filters[dest]
    }

    /// Returns whether one of two ports is an uplink of another port alone.
    #[must_use]
    pub fn are_apart(&self, one: usize, other: usize) -> bool {
        let lacks = |one: usize, other| self.mates[one].is_some_and(|mate| mate != other);
        lacks(one, other) || lacks(other, one)
    }

    /// Returns whether every port may get every frame.
    #[inline(always)]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }
}
