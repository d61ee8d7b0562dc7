// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The slots of the member table: how members are invited, come, leave, die and are forgotten.

use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};

use super::ledger::{self, Tenant};
use super::{Membership, Zone};
use crate::boot;
use crate::format::{self, tmb_member};
use crate::liveness::{self, Liveness, REPAIR_BYTE, TABLE_BYTE, member_byte};
use crate::member::{self, HeldBy, Member, MemberId, MemberState, Pending, Rights, Role, name_to};
use crate::{Error, Result};

/// A name as slots have it.
type Name = [u8; format::TMB_NAME_LEN as usize];

/// Tries of a compare-and-swap on a slot that is not the owner's to change, which a hostile member may write all the time.
const CAS_TRIES: u32 = 64;

/// Who holds a slot after [`Zone::hold_by`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The description, since this moment.
    New,
    /// The description, since an earlier call.
    Same,
    Another,
}

impl Zone {
    /// All members that live, and all slots that are not empty.
    pub fn members(&self) -> Result<Vec<Member>> {
        let mut slots = self.slots()?;
        slots.retain(|m| m.alive || m.state != MemberState::Empty);
        Ok(slots)
    }

    /// A copy of one slot. The owner's has the name, the role and the rights that a living member came with.
    pub fn member(&self, id: MemberId) -> Result<Member> {
        self.copy(id, self.is_held(id)?)
    }

    fn copy(&self, id: MemberId, held: bool) -> Result<Member> {
        let mut member = member::read(&self.mem, id)?;
        if let Some(owner) = &self.owner {
            member.assumed = owner.ledger.is_assumed(id);
        }
        member.assumed &= !held;
        member.alive = held || member.assumed;
        if let Some(owner) = &self.owner {
            owner.ledger.correct(&mut member);
        }
        Ok(member)
    }

    pub(super) fn slots(&self) -> Result<Vec<Member>> {
        let held = liveness::members_held(self.file.as_fd())?;
        MemberId::all().map(|id| self.copy(id, held >> id.index() & 1 != 0)).collect()
    }

    /// Returns whether a process holds a member's liveness.
    pub(crate) fn is_held(&self, id: MemberId) -> Result<bool> {
        liveness::is_held(self.file.as_fd(), member_byte(id))
    }

    /// Keeps a slot for a member of this name. A name that had a slot before gets it again (a VM that reboots), with its epoch, so that locks
    /// of the former life differ from those of the new one. Any host process that can write the zone may do this.
    ///
    /// The table decides only which slot a name gets: a slot whose member does not live can be had whatever the members wrote into it.
    pub fn invite(&self, name: &str, role: Role, rights: Rights) -> Result<MemberId> {
        let field = name_to(&self.header.name, "member name", name)?;
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        let slot = self.slot_for(name, role)?;
        self.fill(&slot, field, name, role, rights)?;
        Ok(slot.id)
    }

    /// As [`Self::invite`], for this process, which holds the slot from this moment on. [`Self::join_claimed`] then takes it.
    pub fn claim(&self, name: &str, role: Role, rights: Rights) -> Result<(MemberId, Liveness)> {
        let field = name_to(&self.header.name, "member name", name)?;
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        let slot = self.slot_for(name, role)?;
        let liveness = self.hold(slot.id)?;
        self.fill(&slot, field, name, role, rights)?;
        Ok((slot.id, liveness))
    }

    /// Joins with a slot that [`Self::claim`] gave, whatever members have written there since.
    pub fn join_claimed(&self, id: MemberId, liveness: Liveness) -> Result<Membership> {
        Ok(Membership { id, epoch: self.enter(id)?, liveness })
    }

    /// Finds the slot for a member of this name. The caller holds the table's lock.
    fn slot_for(&self, name: &str, role: Role) -> Result<Member> {
        let slots = self.slots()?;
        let promised = self.promised()?;
        let is_promised = |m: &Member| promised.is_some_and(|slots| slots >> m.id.index() & 1 != 0);
        // Of a slot that the owner keeps for a VM, a member may have written that it is this process's.
        let is_its = |m: &&Member| {
            self.name_of(m).as_deref() == Some(name)
                && (self.is_owner() || role == Role::Vm || m.alive || !is_promised(m))
        };
        let known = slots.iter().find(is_its);
        if known.is_some_and(|m| m.alive) {
            return Err(self.refuse(name, "is in the zone already".to_owned()));
        }
        let free = |state| slots.iter().find(|m| !m.alive && m.state == state && !is_promised(m));
        let slot = known.or_else(|| free(MemberState::Empty)).or_else(|| free(MemberState::Dead));
        let slot = slot.or_else(|| free(MemberState::Active)).or_else(|| free(MemberState::Damaged));
        // A slot that is only written to be invited may be a member's that comes later, unless the owner says whose slots it keeps. A process of the host holds
        // its slot from the moment at which it takes it. If nobody holds such a slot, its process died before it joined, or while it left.
        let is_left = |m: &&Member| m.role == Some(Role::Host) && m.doorbell.is_none();
        let left = || slots.iter().filter(|m| !m.alive && m.state == MemberState::Invited).find(is_left);
        let slot = slot.or_else(|| match promised {
            Some(_) => free(MemberState::Invited),
            None => left(),
        });
        slot.cloned()
            .ok_or_else(|| self.refuse(name, format!("all {} slots are taken", format::TMB_MAX_MEMBERS)))
    }

    /// The slots that the owner keeps for members, a bit each; `None`: it is not known.
    fn promised(&self) -> Result<Option<u64>> {
        match &self.owner {
            None => liveness::promises_held(self.file.as_fd()),
            Some(_) => {
                let bit = |id: MemberId| u64::from(self.is_promised(id)) << id.index();
                Ok(Some(MemberId::all().map(bit).sum()))
            }
        }
    }

    /// Invites a member to this slot, whatever is written there. For the owner, which knows that the slot is that member's.
    pub fn invite_to(&self, id: MemberId, name: &str, role: Role, rights: Rights) -> Result<()> {
        let field = name_to(&self.header.name, "member name", name)?;
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        let slot = self.member(id)?;
        if slot.alive {
            return Err(self.refuse(name, "is in the zone already".to_owned()));
        }
        self.fill(&slot, field, name, role, rights)
    }

    /// Writes an invitation into a slot whose member does not live. The caller holds the table's lock.
    fn fill(&self, slot: &Member, field: Name, name: &str, role: Role, rights: Rights) -> Result<()> {
        let id = slot.id;
        let base = offset_of!(tmb_member, state_epoch);
        let died = matches!(slot.state, MemberState::Active | MemberState::Damaged);
        let is_epoch = (self.least_epoch(id)..format::TMB_EPOCH_END).contains(&slot.epoch);
        let epoch = if is_epoch && !died { slot.epoch } else { self.next_epoch(id, slot.epoch)? };
        // Fields first, then the state that makes them valid.
        self.mem.store_u64(id.at(base), format::state_epoch(format::TMB_MEMBER_EMPTY, epoch))?;
        self.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), 0)?;
        self.mem.store_u32(id.at(offset_of!(tmb_member, role)), role.raw())?;
        self.store_rights(id, rights, HeldBy::Unknown)?;
        self.mem.store_u32(id.at(offset_of!(tmb_member, boot)), boot::number())?;
        self.mem.write(id.at(offset_of!(tmb_member, name)), &field)?;
        self.mem.store_u64(id.at(offset_of!(tmb_member, pending)), 0)?;
        self.mem.store_u64(id.at(offset_of!(tmb_member, heartbeat_ns)), 0)?;
        self.mem.store_u64(id.at(base), format::state_epoch(format::TMB_MEMBER_INVITED, epoch))?;
        if died {
            self.pend_others(id)?;
        }
        if let Some(owner) = &self.owner {
            let name = name.to_owned();
            let tenant = Tenant { name, role: Some(role), rights, lived: false, held_by: HeldBy::Unknown };
            owner.ledger.with(id, |entry| entry.tenant = Some(tenant));
            owner.tell(id)?;
        }
        Ok(())
    }

    /// The name that a slot is kept for.
    fn name_of(&self, slot: &Member) -> Option<String> {
        let promised = self.owner.as_ref().and_then(|owner| owner.ledger.name(slot.id));
        promised.or_else(|| (slot.alive || slot.state != MemberState::Empty).then(|| slot.name.clone()))
    }

    /// Returns whether the owner keeps this slot for a member.
    fn is_promised(&self, id: MemberId) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.ledger.name(id).is_some())
    }

    /// Takes the slot that [`Self::invite`] kept, for this process.
    pub fn join(&self, id: MemberId) -> Result<Membership> {
        let liveness = self.hold(id)?;
        let epoch = self.activate(id)?;
        Ok(Membership { id, epoch, liveness })
    }

    /// Moves an invited slot to ACTIVE in a new epoch, for a member that can't do it itself: a VM with a read-only mapping.
    pub fn activate(&self, id: MemberId) -> Result<u32> {
        let at = id.at(offset_of!(tmb_member, state_epoch));
        if self.is_promised(id) {
            return self.enter(id);
        }
        for _ in 0..CAS_TRIES {
            let word = self.mem.load_u64(at)?;
            if MemberState::from_word(word) != MemberState::Invited {
                return Err(self.refuse_id(id, format!("is {:?}, not invited", MemberState::from_word(word))));
            }
            let epoch = self.next_epoch(id, format::epoch_of(word))?;
            if self.mem.cas_u64(at, word, format::state_epoch(format::TMB_MEMBER_ACTIVE, epoch))?.is_ok() {
                return Ok(epoch);
            }
        }
        Err(self.refuse_id(id, "its slot changes all the time".to_owned()))
    }

    /// Makes a slot active that is kept for the member: no other member can have it refused by writing into it.
    fn enter(&self, id: MemberId) -> Result<u32> {
        let at = id.at(offset_of!(tmb_member, state_epoch));
        let epoch = self.next_epoch(id, format::epoch_of(self.mem.load_u64(at)?))?;
        self.mem.store_u64(at, format::state_epoch(format::TMB_MEMBER_ACTIVE, epoch))?;
        Ok(epoch)
    }

    /// Takes a VM's own slot from inside the VM, in a new epoch even if a former process still has it; for a guest whose kernel has no
    /// module. Only processes of the same VM exclude each other. The caller rings the other members ([`Self::announce`]), which recover the
    /// former process.
    pub fn occupy(&self, id: MemberId) -> Result<Membership> {
        let liveness = self.hold(id)?;
        let at = id.at(offset_of!(tmb_member, state_epoch));
        for _ in 0..CAS_TRIES {
            let word = self.mem.load_u64(at)?;
            let state = MemberState::from_word(word);
            if matches!(state, MemberState::Empty | MemberState::Damaged) {
                return Err(self.refuse_id(id, format!("is {state:?}: the host keeps no slot for it")));
            }
            let epoch = self.next_epoch(id, format::epoch_of(word))?;
            if self.mem.cas_u64(at, word, format::state_epoch(format::TMB_MEMBER_ACTIVE, epoch))?.is_ok() {
                if state == MemberState::Active {
                    self.pend_others(id)?;
                }
                return Ok(Membership { id, epoch, liveness });
            }
        }
        Err(self.refuse_id(id, "its slot changes all the time".to_owned()))
    }

    /// Leaves a slot taken with [`Self::occupy`]; the doorbell stays the VM's. False: another process has it by now.
    pub fn vacate(&self, membership: &Membership) -> Result<bool> {
        self.end_occupation(membership, format::state_epoch(format::TMB_MEMBER_INVITED, membership.epoch))
    }

    /// Declares that the process that took a slot with [`Self::occupy`] died. False: it left, or another process has the slot by now.
    pub fn abandon(&self, membership: &Membership) -> Result<bool> {
        let next = membership.epoch.saturating_add(1);
        let died = self.end_occupation(membership, format::state_epoch(format::TMB_MEMBER_DEAD, next))?;
        if died {
            self.pend_others(membership.id)?;
        }
        Ok(died)
    }

    fn end_occupation(&self, membership: &Membership, then: u64) -> Result<bool> {
        let at = membership.id.at(offset_of!(tmb_member, state_epoch));
        let active = format::state_epoch(format::TMB_MEMBER_ACTIVE, membership.epoch);
        Ok(self.mem.cas_u64(at, active, then)?.is_ok())
    }

    /// Holds a member alive: the process that runs a VM takes this before the VM's start and drops it after its end, or lets QEMU inherit it.
    pub fn hold(&self, id: MemberId) -> Result<Liveness> {
        let held = liveness::try_hold(self.file.as_fd(), self.mem.writable(), member_byte(id))?;
        let held = held.ok_or_else(|| self.refuse_second(id))?;
        self.require_not_kept_out(id)?;
        Ok(held)
    }

    /// Has a VM's own process hold its slot, by the open file description of the zone that `theirs` is a copy of.
    pub(crate) fn hold_by(&self, id: MemberId, theirs: BorrowedFd<'_>) -> Result<Holder> {
        let failed = |e| Error::io("locking the zone's memory for a VM", e);
        let was_held = self.is_held(id)?;
        if !liveness::hold_by(theirs, member_byte(id)).map_err(failed)? {
            return Ok(Holder::Another);
        }
        if was_held {
            return Ok(Holder::Same);
        }
        if let Err(e) = self.require_not_kept_out(id) {
            liveness::free(theirs, member_byte(id)).map_err(failed)?;
            return Err(e);
        }
        self.tell_held_by(id, HeldBy::Vm)?;
        Ok(Holder::New)
    }

    /// Has a VM count as living though its process does not hold its slot. For the owner.
    pub(crate) fn assume(&self, id: MemberId) -> Result<()> {
        self.tell_held_by(id, HeldBy::Nobody)?;
        let refused = self.require_not_kept_out(id);
        refused.or_else(|e| self.tell_held_by(id, HeldBy::Unknown).and(Err(e)))
    }

    /// Makes the slot of a member that does not live ready for another owner's.
    pub(super) fn clear(&self, id: MemberId) -> Result<()> {
        self.mark_dead(id)?;
        self.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), 0)?;
        self.tell_held_by(id, HeldBy::Unknown)
    }

    /// Tells other processes that a VM's process was started with a copy of the descriptor that holds the VM's slot. Without an owner, they take that VM for
    /// dead once nobody holds its slot. The slot's next member begins without this mark.
    pub fn tell_held_by_vm(&self, id: MemberId) -> Result<()> {
        self.tell_held_by(id, HeldBy::Vm)
    }

    fn tell_held_by(&self, id: MemberId, held_by: HeldBy) -> Result<()> {
        if let Some(owner) = &self.owner {
            owner
                .ledger
                .with(id, |entry| entry.tenant.iter_mut().for_each(|tenant| tenant.held_by = held_by));
        }
        self.mem.store_u32(id.at(offset_of!(tmb_member, boot)), boot::number())?;
        self.store_rights(id, member::read(&self.mem, id)?.rights, held_by)
    }

    /// From now on the lock of the slot alone tells whether its member lives.
    fn end_assumption(&self, id: MemberId) -> Result<()> {
        self.store_rights(id, member::read(&self.mem, id)?.rights, HeldBy::Vm)
    }

    fn store_rights(&self, id: MemberId, rights: Rights, held_by: HeldBy) -> Result<()> {
        self.mem.store_u32(id.at(offset_of!(tmb_member, rights)), rights.raw() | held_by.raw())
    }

    /// Waits until nothing holds the slot: no process, and no mount of the kernel's.
    pub fn await_end(&self, id: MemberId) -> Result<()> {
        liveness::hold_waiting(self.file.as_fd(), member_byte(id)).map(drop)
    }

    fn refuse_second(&self, id: MemberId) -> Error {
        self.refuse_id(id, "another process is this member".to_owned())
    }

    /// Called with the member's byte held: who keeps members out takes these two in the other order.
    fn require_not_kept_out(&self, id: MemberId) -> Result<()> {
        if liveness::is_held(self.file.as_fd(), REPAIR_BYTE)? {
            return Err(self.refuse_id(
                id,
                "the zone is being repaired or removed; try again once 'tombolo files fsck -y' has ended"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Ends a membership: the slot is kept for a later join. The member holds no lock or reference any more.
    pub fn leave(&self, membership: Membership) -> Result<()> {
        let Membership { id, epoch, liveness } = membership;
        self.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), 0)?;
        let at = id.at(offset_of!(tmb_member, state_epoch));
        let active = format::state_epoch(format::TMB_MEMBER_ACTIVE, epoch);
        let invited = format::state_epoch(format::TMB_MEMBER_INVITED, epoch);
        let left = self.mem.cas_u64(at, active, invited)?.map_err(|found| {
            self.refuse_id(
                id,
                format!(
                    "is {:?} in epoch {}, not active in epoch {epoch}: it was declared dead or removed",
                    MemberState::from_word(found),
                    format::epoch_of(found)
                ),
            )
        });
        // A process that is being started has a copy of the descriptor until its exec.
        left.and(liveness.end())
    }

    /// Declares that an active member died: its epoch ends, its doorbell is cleared, and the other members are told (see [`Self::announce`]).
    /// False: it was not active. The caller knows that the member can't write any more (its process has ended).
    pub fn declare_dead(&self, id: MemberId) -> Result<bool> {
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        self.bury(id)
    }

    /// Declares dead each active member whose liveness no process holds; returns these. The owner's call also writes what it knows of the living
    /// members into the table again, where a member has changed it.
    pub fn reap(&self) -> Result<Vec<MemberId>> {
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        let mut dead = Vec::new();
        for member in self.slots()? {
            if member.alive {
                self.restore(&member)?;
                continue;
            }
            let ended = matches!(member.state, MemberState::Active | MemberState::Damaged);
            if ended && self.bury(member.id)? {
                dead.push(member.id);
            } else if let Some(owner) = &self.owner {
                if member::read(&self.mem, member.id)?.assumed {
                    self.end_assumption(member.id)?;
                }
                // It has left, or a member wrote that it has.
                if owner.ledger.with(member.id, |entry| entry.tenant.take_if(|t| t.lived).is_some()) {
                    owner.tell(member.id)?;
                }
            }
        }
        Ok(dead)
    }

    /// Frees the slot of a member that does not live and won't come back. Its epoch goes on with the slot's next member.
    pub fn remove(&self, id: MemberId) -> Result<()> {
        self.remove_if(id, &|member| !member.alive)
    }

    /// As [`Self::remove`], of a member that may be assumed to live: the caller knows that it has ended.
    pub fn remove_assumed(&self, id: MemberId) -> Result<()> {
        self.remove_if(id, &|member| !member.alive || member.assumed)
    }

    fn remove_if(&self, id: MemberId, has_ended: &dyn Fn(&Member) -> bool) -> Result<()> {
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        if !has_ended(&self.member(id)?) {
            return Err(self.refuse_id(id, "is in the zone; stop it first".to_owned()));
        }
        self.bury(id)?;
        let epoch = self.member(id)?.epoch;
        let at = id.at(offset_of!(tmb_member, state_epoch));
        self.mem.store_u64(at, format::state_epoch(format::TMB_MEMBER_EMPTY, epoch))
    }

    /// As [`Self::remove`], of the member that this process was and that has left. Another process may have taken the slot since: it stays that one's.
    pub fn remove_left(&self, id: MemberId) -> Result<()> {
        match self.remove(id) {
            Err(Error::Member { .. }) if self.member(id)?.alive => Ok(()),
            done => done,
        }
    }

    /// Ends a member. The caller holds the table's lock.
    pub(super) fn bury(&self, id: MemberId) -> Result<bool> {
        if let Some(owner) = &self.owner {
            owner.ledger.with(id, |entry| entry.tenant = None);
            owner.tell(id)?;
        }
        self.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), 0)?;
        self.end_assumption(id)?;
        let died = self.mark_dead(id)?;
        if died {
            self.pend_others(id)?;
        }
        Ok(died)
    }

    /// Changes ACTIVE (or garbage) to DEAD in a new epoch, whatever the slot's present epoch. The caller holds the table's lock.
    fn mark_dead(&self, id: MemberId) -> Result<bool> {
        let at = id.at(offset_of!(tmb_member, state_epoch));
        let word = self.mem.load_u64(at)?;
        if !matches!(MemberState::from_word(word), MemberState::Active | MemberState::Damaged) {
            return Ok(false);
        }
        let epoch = self.next_epoch(id, format::epoch_of(word))?;
        // A store, not a compare-and-swap, which a member that writes all the time could have fail: the dead member changes its slot no more.
        self.mem.store_u64(at, format::state_epoch(format::TMB_MEMBER_DEAD, epoch))?;
        Ok(true)
    }

    /// Learns of a living member, or writes what the owner knows of it into its slot, where that says something else. The caller holds the table's lock.
    fn restore(&self, copy: &Member) -> Result<()> {
        let Some(owner) = &self.owner else { return Ok(()) };
        let id = copy.id;
        let (known, is_new) = owner.ledger.learn(copy);
        if is_new {
            owner.tell(id)?;
        }
        let there = member::read(&self.mem, id)?;
        if there.role != known.role {
            let role = known.role.map_or(0, Role::raw);
            self.mem.store_u32(id.at(offset_of!(tmb_member, role)), role)?;
        }
        if (there.rights, there.held_by) != (known.rights, known.held_by) {
            self.store_rights(id, known.rights, known.held_by)?;
        }
        self.mem.store_u32(id.at(offset_of!(tmb_member, boot)), boot::number())?;
        if there.name != known.name {
            // A name that the owner found in the table may be one that no member can have.
            if let Ok(field) = name_to(&self.header.name, "member name", &known.name) {
                self.mem.write(id.at(offset_of!(tmb_member, name)), &field)?;
            }
        }
        if matches!(copy.state, MemberState::Empty | MemberState::Damaged)
            || copy.epoch >= format::TMB_EPOCH_END
        {
            // A mount that it had has ended with the word that named it; it can have another.
            let epoch = self.next_epoch(id, copy.epoch)?;
            let at = id.at(offset_of!(tmb_member, state_epoch));
            self.mem.store_u64(at, format::state_epoch(format::TMB_MEMBER_INVITED, epoch))?;
            self.pend_others(id)?;
        }
        Ok(())
    }

    /// The lowest epoch that a slot can have, by what the owner knows.
    fn least_epoch(&self, id: MemberId) -> u32 {
        self.owner.as_ref().map_or(0, |owner| owner.ledger.with(id, |entry| entry.epoch))
    }

    /// Returns the epoch after the one that was found in a slot. No epoch from it on can have been recovered.
    fn next_epoch(&self, id: MemberId, found: u32) -> Result<u32> {
        let next = ledger::next_epoch(self.least_epoch(id), found);
        if let Some(owner) = &self.owner {
            owner.ledger.with(id, |entry| entry.epoch = next);
        }
        for field in [offset_of!(tmb_member, recovered_epoch), offset_of!(tmb_member, forgotten_epoch)] {
            if self.mem.load_u64(id.at(field))? >= u64::from(next) {
                self.mem.store_u64(id.at(field), 0)?;
            }
        }
        Ok(next)
    }

    fn pend_others(&self, except: MemberId) -> Result<()> {
        for id in MemberId::all().filter(|&id| id != except) {
            let word = self.mem.load_u64(id.at(offset_of!(tmb_member, state_epoch)))?;
            if MemberState::from_word(word) == MemberState::Active {
                self.mem.fetch_or_u64(id.at(offset_of!(tmb_member, pending)), Pending::Members as u64)?;
            }
        }
        Ok(())
    }

    fn refuse(&self, member: &str, why: String) -> Error {
        Error::Member { zone: self.header.name.clone(), member: member.to_owned(), why }
    }

    fn refuse_id(&self, id: MemberId, why: String) -> Error {
        self.refuse(&id.to_string(), why)
    }
}
