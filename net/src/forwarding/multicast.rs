// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IGMP and MLD snooping (RFC 4541): a frame for a multicast group goes to the ports that have joined it, and to routers.
//!
//! A port's reports change only what that port receives. Routers are the uplinks and the ports with `router = true`; only their
//! queries count. As in the Linux bridge, groups decide only where a querier is heard (per VLAN, and per version of IP), from
//! the time by which all hosts have answered it, as long as it keeps querying; elsewhere multicast goes to all. So do 224.0.0.x
//! and ff02::1. All multicast also goes to a port that has joined more groups than fit into its table, that sends a possible
//! report which can't be parsed, or that has just connected.
//!
//! Groups are distinguished by VLAN and MAC, so ports also receive groups with the same MAC. Reports go to routers only: a host
//! that hears another's would suppress its own.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::forwarding::deliver::Frame;
use crate::forwarding::forward::addresses;
use crate::forwarding::view::View;
use crate::frames::frame::Mac;
use crate::frames::headers::{Headers, LOOK, Net};
use crate::frames::membership::{self, Message, REPORT_LOOK, Report};
use crate::frames::vlan::VlanTag;
use crate::policy::port::{Policy, Vlan};

/// Most groups of a port, over all VLANs.
pub const MAX_GROUPS: usize = 128;
/// Groups whose places in the table are the same.
const WAYS: usize = 8;
const SETS: usize = MAX_GROUPS / WAYS;
/// The largest number of changes of one report that are used.
const MAX_CHANGES: usize = 64;
/// How long a port receives all multicast while its groups aren't known: the time that a querier with the usual settings needs
/// to ask (RFC 3376 §8.4).
pub const OPEN: Duration = Duration::from_secs(260);
/// How long a port stays in a group that a host behind it has left: until the others were asked (RFC 3376 §8.8). Even hosts with
/// the same MAC may be several (ipvlan).
const LAST_MEMBER: Duration = Duration::from_secs(2);
/// Added to the time that hosts have to answer a query, for transmission.
const ON_THE_WAY: Duration = Duration::from_secs(1);

const VID_SHIFT: u32 = 48;

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the MAC of a group; none for other addresses, and for groups that all hosts receive.
fn group_mac(group: IpAddr) -> Option<Mac> {
    match group {
        IpAddr::V4(ip) => {
            let [_, b, c, d] = ip.octets();
            Some(Mac([1, 0, 0x5e, b & 0x7f, c, d])).filter(|mac| ip.is_multicast() && !is_for_all(mac.key()))
        }
        IpAddr::V6(ip) => {
            let [.., a, b, c, d] = ip.octets();
            Some(Mac([0x33, 0x33, a, b, c, d])).filter(|mac| ip.is_multicast() && !is_for_all(mac.key()))
        }
    }
}

/// Returns whether it is 224.0.0.x or ff02::1, which no host needs to join (RFC 4541 §2.1.2, §3).
fn is_for_all(mac: u64) -> bool {
    mac & 0xff_ffff_ffff == Mac([1, 0, 0x5e, 0, 0, 0]).key() || mac == Mac([0x33, 0x33, 0, 0, 0, 1]).key()
}

/// Returns by a frame's destination whether it is a group of IPv4 (false) or IPv6 (true).
fn family(mac: u64) -> Option<bool> {
    match mac & 0xff_ffff {
        0x5e_0001 if mac & 0x8000_0000 == 0 => Some(false),
        _ if mac & 0xffff == 0x3333 => Some(true),
        _ => None,
    }
}

#[derive(Debug)]
struct Member {
    vid: u16,
    group: IpAddr,
    /// The end of the membership (nanoseconds of [`crate::forwarding::switch::Switch::now`]).
    until: u64,
}

/// Places of groups by VLAN and MAC; a line of keys, a line of times.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Set {
    keys: [AtomicU64; WAYS],
    until: [AtomicU64; WAYS],
}

/// The groups that a port has joined. Workers read by MAC without a lock; a report takes it.
#[derive(Debug, Default)]
pub struct Groups {
    members: Mutex<Vec<Member>>,
    sets: [Set; SETS],
    /// The port receives all multicast until then.
    open: AtomicU64,
}

fn key(vid: u16, mac: u64) -> u64 {
    mac | u64::from(vid) << VID_SHIFT
}

impl Groups {
    fn set(&self, key: u64) -> &Set {
        &self.sets[(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SETS.trailing_zeros())) as usize]
    }

    /// Returns whether the port receives the group of this key.
    fn has(&self, key: u64, now: u64) -> bool {
        let set = self.set(key);
        let at = set.keys.iter().position(|k| k.load(Ordering::Relaxed) == key);
        at.is_some_and(|at| set.until[at].load(Ordering::Relaxed) > now) || self.is_open(now)
    }

    /// Returns whether the port receives all multicast at `now`.
    #[must_use]
    pub fn is_open(&self, now: u64) -> bool {
        self.open.load(Ordering::Relaxed) > now
    }

    /// Has the port receive all multicast from `now` on, until its groups must be known.
    pub fn open_from(&self, now: u64) {
        self.open_until(now.saturating_add(nanos(OPEN)));
    }

    /// Has the port receive all multicast until `until`.
    fn open_until(&self, until: u64) {
        self.open.fetch_max(until, Ordering::Relaxed);
    }

    /// Returns the groups at `now`, with their VLANs.
    #[must_use]
    pub fn list(&self, now: u64) -> Vec<(u16, IpAddr)> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.iter().filter(|m| m.until > now).map(|m| (m.vid, m.group)).collect()
    }

    /// The port joins a group until `until`.
    fn join(&self, vid: u16, group: IpAddr, now: u64, until: u64) {
        let Some(mac) = group_mac(group) else { return };
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        match members.iter_mut().find(|m| m.vid == vid && m.group == group) {
            Some(member) => member.until = until,
            None => {
                if members.len() == MAX_GROUPS {
                    members.retain(|m| m.until > now);
                }
                if members.len() == MAX_GROUPS {
                    return self.open_until(until);
                }
                members.push(Member { vid, group, until });
            }
        }
        self.publish(&members, vid, mac, now);
    }

    /// Shortens the port's membership of a group to `until`.
    fn leave(&self, vid: u16, group: IpAddr, now: u64, until: u64) {
        let Some(mac) = group_mac(group) else { return };
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(member) = members.iter_mut().find(|m| m.vid == vid && m.group == group) {
            member.until = member.until.min(until);
        }
        members.retain(|m| m.until > now);
        self.publish(&members, vid, mac, now);
    }

    /// Publishes for the workers until when the port receives frames for `mac`.
    fn publish(&self, members: &[Member], vid: u16, mac: Mac, now: u64) {
        let same = |m: &&Member| m.vid == vid && group_mac(m.group) == Some(mac);
        let until = members.iter().filter(same).map(|m| m.until).max().unwrap_or(0);
        let key = key(vid, mac.key());
        let set = self.set(key);
        let free = |at: &usize| set.until[*at].load(Ordering::Relaxed) <= now;
        let found = (0..WAYS).find(|at| set.keys[*at].load(Ordering::Relaxed) == key);
        let Some(at) = found.or_else(|| (0..WAYS).find(free)) else { return self.open_until(until) };
        set.keys[at].store(key, Ordering::Relaxed);
        set.until[at].store(until, Ordering::Relaxed);
    }
}

/// The times of a querier on one VLAN and for one version of IP.
#[derive(Debug, Default)]
struct Querier {
    /// All hosts have answered by then.
    since: AtomicU64,
    /// It is considered present until then.
    until: AtomicU64,
    /// The time for which answers are valid.
    lifetime: AtomicU64,
}

impl Querier {
    fn acts(&self, now: u64) -> bool {
        self.since.load(Ordering::Relaxed) <= now && now < self.until.load(Ordering::Relaxed)
    }

    fn heard(&self, response: Duration, lifetime: Duration, now: u64) {
        if self.until.load(Ordering::Relaxed) <= now {
            self.since.store(now.saturating_add(nanos(response + ON_THE_WAY)), Ordering::Relaxed);
        }
        self.lifetime.store(nanos(lifetime), Ordering::Relaxed);
        self.until.store(now.saturating_add(nanos(lifetime)), Ordering::Relaxed);
    }
}

/// The queriers that the switch has heard.
#[derive(Debug)]
pub struct Snooping {
    /// By VLAN (0: none); for IPv4 and IPv6.
    queriers: Box<[[Querier; 2]]>,
}

impl Default for Snooping {
    fn default() -> Self {
        Self { queriers: (0..4096).map(|_| <[Querier; 2]>::default()).collect() }
    }
}

/// The receivers of a flooded frame, among the ports that may get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    All,
    Routers,
    /// Routers and the ports that have joined the group of a VLAN and MAC.
    Members(u64),
}

impl Audience {
    /// Returns whether the port at `at` is among them.
    pub fn has(self, view: &View, at: usize, now: u64) -> bool {
        let to = &view.ports()[at];
        match self {
            Audience::All => true,
            Audience::Routers => is_router(&to.policy),
            Audience::Members(key) => {
                // A transparent port may be on any VLAN, and its groups are stored without VLAN.
                let unknown = key >> VID_SHIFT != 0 && to.policy.vlan == Vlan::Transparent;
                unknown || is_router(&to.policy) || to.port.groups.has(key, now)
            }
        }
    }
}

/// Returns whether the configuration says that a multicast router is behind a port.
fn is_router(policy: &Policy) -> bool {
    policy.uplink || policy.router
}

impl Snooping {
    /// Returns the queriers at `now`: the VLAN (0: none), and whether for IPv6.
    #[must_use]
    pub fn queriers(&self, now: u64) -> Vec<(u16, bool)> {
        let one = |(vid, both): (usize, &[Querier; 2])| {
            [false, true]
                .into_iter()
                .filter(|v6| both[usize::from(*v6)].acts(now))
                .map(move |v6| (vid as u16, v6))
                .collect::<Vec<_>>()
        };
        self.queriers.iter().enumerate().flat_map(one).collect()
    }

    fn querier(&self, vid: u16, v6: bool) -> &Querier {
        &self.queriers[usize::from(vid) & 0xfff][usize::from(v6)]
    }

    /// Returns the receivers of a flooded frame from the port at `src`. Enters the reports and queries in it, and adds the changes of groups
    /// that it reports to `changes`.
    #[inline(never)]
    pub(crate) fn audience(
        &self,
        view: &View,
        src: usize,
        frame: &Frame<'_>,
        tag: VlanTag,
        now: u64,
        changes: &mut u64,
    ) -> Audience {
        let mut buffer = [0; LOOK];
        let frame = frame.deepened(&mut buffer);
        let headers = Headers::parse(frame.prefix, frame.len);
        // Between transparent ports VLANs are the guests' own. A tag of VLAN 0 is none.
        let vid = match tag.vid {
            Some(vid) => vid,
            None if headers.tags == 0 || headers.tci & 0xfff == 0 => 0,
            None => return Audience::All,
        };
        let (to, _) = addresses(frame.prefix);
        let Some(message) = membership::read(&headers, frame.prefix) else {
            return match family(to) {
                Some(v6) if !is_for_all(to) && self.querier(vid, v6).acts(now) => {
                    Audience::Members(key(vid, to))
                }
                _ => Audience::All,
            };
        };
        let (port, policy) = (&view.ports()[src].port, &*view.ports()[src].policy);
        let v6 = headers.net == Net::Ipv6;
        match message {
            Message::Query { response, lifetime, general } => {
                // Only members of the group answer another one.
                if general && is_router(policy) {
                    self.querier(vid, v6).heard(response, lifetime, now);
                }
                return Audience::All;
            }
            // Uplinks receive everything.
            _ if policy.uplink => {}
            Message::Report(_) => {
                let mut buffer = [0; REPORT_LOOK];
                let whole = frame.deepened(&mut buffer);
                if let Some(Message::Report(report)) = membership::read(&headers, whole.prefix) {
                    *changes += self.take(&port.groups, &report, (vid, v6), now);
                }
            }
            Message::Hidden => port.groups.open_from(now),
        }
        let acts = |v6| self.querier(vid, v6).acts(now);
        let any = headers.net == Net::Unknown && (acts(false) || acts(true));
        if any || acts(v6) { Audience::Routers } else { Audience::All }
    }

    /// Enters a report in a port's groups. Returns the number of its changes.
    fn take(&self, groups: &Groups, report: &Report<'_>, (vid, v6): (u16, bool), now: u64) -> u64 {
        let said = self.querier(vid, v6).lifetime.load(Ordering::Relaxed);
        let until = now.saturating_add(if said == 0 { nanos(OPEN) } else { said });
        let left = now.saturating_add(nanos(LAST_MEMBER));
        let mut changes = 0;
        report.each(|change| {
            changes += 1;
            match change.filter(|_| changes <= MAX_CHANGES as u64) {
                Some((group, true)) => groups.join(vid, group, now, until),
                Some((group, false)) => groups.leave(vid, group, now, left),
                None => groups.open_until(until),
            }
        });
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn mac_of(group: &str) -> u64 {
        group_mac(group.parse().unwrap()).unwrap().key()
    }

    #[test]
    fn groups_have_the_macs_that_ip_gives_them_and_some_are_for_all() {
        assert_eq!(mac_of("239.129.2.3"), Mac([1, 0, 0x5e, 1, 2, 3]).key());
        assert_eq!(mac_of("ff02::1:ff12:3456"), Mac([0x33, 0x33, 0xff, 0x12, 0x34, 0x56]).key());
        for text in ["224.0.0.251", "ff02::1", "10.0.0.1", "fd00::1"] {
            assert_eq!(group_mac(text.parse().unwrap()), None, "{text}");
        }
        assert_eq!([mac_of("239.1.2.3"), mac_of("ff02::2")].map(family), [Some(false), Some(true)]);
        assert_eq!(family(Mac::BROADCAST.key()), None);
        assert_eq!(family(Mac([1, 0, 0x5e, 0x80, 0, 1]).key()), None, "MPLS");
    }

    #[test]
    fn a_querier_is_relied_on_once_all_had_time_to_answer_and_forgotten_when_it_is_silent() {
        let querier = Querier::default();
        let second = nanos(Duration::from_secs(1));
        let ask = |at: u64| querier.heard(Duration::from_secs(10), Duration::from_secs(260), at * second);
        assert!(!querier.acts(5 * second));
        ask(5);
        assert_eq!(
            [5, 15, 16, 264, 265].map(|s| querier.acts(s * second)),
            [false, false, true, true, false]
        );
        ask(200);
        assert!(querier.acts(459 * second), "it goes on");
        ask(500);
        assert!(!querier.acts(510 * second), "it came back, and hosts must be asked anew");
    }

    #[test]
    fn a_group_is_left_though_another_with_the_same_mac_stays() {
        let groups = Groups::default();
        let [one, alias] = ["239.1.1.1", "239.129.1.1"].map(|g| g.parse().unwrap());
        let at = key(5, mac_of("239.1.1.1"));
        groups.join(5, one, 0, 100);
        groups.join(5, alias, 0, 200);
        groups.leave(5, alias, 10, 10);
        assert_eq!([50, 100].map(|now| groups.has(at, now)), [true, false]);
        groups.leave(5, one, 20, 20);
        assert!(!groups.has(at, 20));
        assert_eq!(groups.list(20), []);
    }

    #[test]
    fn a_port_with_more_groups_than_fit_gets_all_until_they_expire() {
        let groups = Groups::default();
        let join = |n: u8| groups.join(0, IpAddr::from([239, 0, 1, n]), 0, 100);
        (0..40).for_each(join);
        assert!(!groups.is_open(0), "forty in a row fit");
        (40..=MAX_GROUPS as u8).for_each(join);
        assert!(groups.has(key(0, mac_of("239.9.9.9")), 99) && !groups.has(key(0, mac_of("239.9.9.9")), 100));
        assert!(groups.list(0).len() <= MAX_GROUPS);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
        #[test]
        fn a_port_gets_what_it_has_joined_whatever_its_table_has_room_for(
            steps in prop::collection::vec((0u16..2, 0u8..150, 0u8..4, 0u64..6), 0..300),
        ) {
            let groups = Groups::default();
            let mut model: BTreeMap<(u16, u8), u64> = BTreeMap::new();
            let mut now = 0;
            for (vid, n, joins, time) in steps {
                now += time;
                let group = IpAddr::from([239, 1, 1, n]);
                if joins > 0 {
                    groups.join(vid, group, now, now + 100);
                    model.insert((vid, n), now + 100);
                } else {
                    groups.leave(vid, group, now, now);
                    model.remove(&(vid, n));
                }
                for vid in 0..2 {
                    for n in (n % 7..150).step_by(7) {
                        let wanted = model.get(&(vid, n)).is_some_and(|until| *until > now);
                        let has = groups.has(key(vid, Mac([1, 0, 0x5e, 1, 1, n]).key()), now);
                        prop_assert!(has == wanted || has && groups.is_open(now), "{vid} {n} at {now}");
                    }
                }
            }
        }
    }
}
