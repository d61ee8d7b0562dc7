// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a process becomes the owner of a zone, and what members do where there is none, or where it is suspended.

use std::mem::offset_of;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Owner, Zone, new_session};
use crate::format::tmb_zone_header;
use crate::liveness::{self, OWNER_BYTE, Own, TABLE_BYTE};
use crate::member::{Member, MemberId, MemberState, Role};
use crate::{Error, Result};

/// How long a process that wants to become the owner waits for an owner and members that may be about to end: umount(8) returns before a mount's process has left.
const LEAVING: Duration = Duration::from_secs(2);

/// A member that has died and that its zone's owner has not declared dead for so long: the owner is suspended.
const OVERDUE: Duration = Duration::from_secs(3);

/// Members that have died, by slot and epoch, each with the time since when this is known; for [`Zone::reap_for_owner`].
#[derive(Debug, Default)]
pub struct Unburied(Vec<(MemberId, u32, Instant)>);

fn has_ended(member: &Member) -> bool {
    !member.alive && matches!(member.state, MemberState::Active | MemberState::Damaged)
}

impl Zone {
    /// Becomes the owner of a zone in a file whose owner and members have ended: it gets a new session, and each member that was active is
    /// declared dead. [`Error::InUse`]: an owner or a member still lives.
    pub fn take_over(path: impl AsRef<Path>) -> Result<Zone> {
        Self::own_within(path.as_ref(), true, LEAVING)
    }

    /// As [`Self::take_over`], also while members live: they stay.
    pub fn own(path: impl AsRef<Path>) -> Result<Zone> {
        Self::own_within(path.as_ref(), false, LEAVING)
    }

    /// As [`Self::take_over`], or [`Self::open`] if a process owns the zone or a member lives.
    pub fn take_over_or_open(path: impl AsRef<Path>) -> Result<Zone> {
        match Self::own_within(path.as_ref(), true, Duration::ZERO) {
            Err(Error::InUse { .. }) => Self::open(path, true),
            other => other,
        }
    }

    fn own_within(path: &Path, alone: bool, limit: Duration) -> Result<Zone> {
        let began = Instant::now();
        loop {
            match Self::try_own(path, alone) {
                Err(Error::InUse { .. }) if began.elapsed() < limit => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                done => return done,
            }
        }
    }

    fn try_own(path: &Path, alone: bool) -> Result<Zone> {
        let mut zone = Self::open(path, true)?;
        zone.may_write()?;
        let in_use = |by: String| Error::InUse { zone: zone.label.clone(), by };
        let lock = Own::try_hold(zone.file.as_fd(), OWNER_BYTE)?
            .ok_or_else(|| in_use("its owner, another process".to_owned()))?;
        zone.require_at(path)?;
        // Before it looks who lives: a process that finds the zone owned joins at once, and must not be declared dead.
        let table = liveness::hold_waiting(zone.file.as_fd(), TABLE_BYTE)?;
        let slots = zone.slots()?;
        if alone {
            let alive: Vec<String> = slots.iter().filter(|m| m.alive).map(Member::described).collect();
            if !alive.is_empty() {
                return Err(in_use(format!("members that outlived its owner: {}", alive.join(", "))));
            }
            if liveness::sessions_held(zone.file.as_fd())? {
                return Err(in_use("processes that have its semaphores open".to_owned()));
            }
        }
        for id in slots.iter().filter(|m| !m.alive).map(|m| m.id) {
            zone.clear(id)?;
        }
        zone.header.session = new_session();
        zone.mem.store_u64(offset_of!(tmb_zone_header, session) as u64, zone.header.session)?;
        let owner = Owner::new(lock)?;
        for member in slots.iter().filter(|m| m.alive) {
            owner.ledger.learn(member);
            owner.tell(member.id)?;
        }
        drop(table);
        zone.owner = Some(owner);
        Ok(zone)
    }

    /// Makes sure that the zone is the file at this path still, for a process that holds a byte of it: who removes a zone looks for such ones first.
    ///
    /// # Errors
    /// The file was removed, or another one is there by now.
    pub fn require_at(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let failed = |e| Error::io(format!("looking for zone {}", path.display()), e);
        let there = std::fs::metadata(path).map_err(failed)?;
        let own = self.file.metadata().map_err(failed)?;
        if (there.dev(), there.ino()) == (own.dev(), own.ino()) {
            return Ok(());
        }
        Err(failed(std::io::Error::other("another file has taken its place; try again")))
    }

    /// As [`Self::reap`], by a member: does it in place of an owner if none lives.
    pub fn reap_without_owner(&self) -> Result<Vec<MemberId>> {
        let no_owner_comes = Own::try_hold(self.file.as_fd(), OWNER_BYTE)?;
        if !self.is_owner() && no_owner_comes.is_none() {
            return Ok(Vec::new());
        }
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        // A member that has become the owner has let in no VM, and knows of none whether it lives.
        self.bury_those(&|member| has_ended(member) && (member.role == Some(Role::Host) || !self.is_owner()))
    }

    /// Called now and then by a member where another process owns the zone: declares members dead that the owner leaves, since it is suspended. Where it runs it is
    /// sooner.
    pub fn reap_for_owner(&self, unburied: &mut Unburied) -> Result<Vec<MemberId>> {
        let now = Instant::now();
        let still: Vec<Member> = self.slots()?.into_iter().filter(has_ended).collect();
        unburied.0.retain(|(id, epoch, _)| still.iter().any(|m| (m.id, m.epoch) == (*id, *epoch)));
        for member in &still {
            if !unburied.0.iter().any(|(id, ..)| *id == member.id) {
                unburied.0.push((member.id, member.epoch, now));
            }
        }
        if !unburied.0.iter().any(|(.., since)| now - *since > OVERDUE) {
            return Ok(Vec::new());
        }
        // The holder of the table may be suspended as well. Then this call buries nobody, and the next one tries again.
        let Some(_table) = Own::try_hold(self.file.as_fd(), TABLE_BYTE)? else { return Ok(Vec::new()) };
        self.bury_those(&|member| {
            let is_overdue = |(id, epoch, since): &(MemberId, u32, Instant)| {
                (*id, *epoch) == (member.id, member.epoch) && now - *since > OVERDUE
            };
            has_ended(member) && unburied.0.iter().any(is_overdue)
        })
    }

    /// Ends members. The caller holds the table's lock.
    fn bury_those(&self, which: &dyn Fn(&Member) -> bool) -> Result<Vec<MemberId>> {
        let mut dead = Vec::new();
        for member in self.slots()?.into_iter().filter(which) {
            if self.bury(member.id)? {
                dead.push(member.id);
            }
        }
        Ok(dead)
    }
}
