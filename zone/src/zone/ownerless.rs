// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone without an owner: which VMs live, and how a process becomes its owner.
//!
//! The owner of a zone holds the slots of VMs that it does not start. When it is killed, the kernel drops these locks and the VMs live on, with the whole
//! zone in their memory. So a VM that was let in, and whose slot no process holds, counts as alive until one of these shows that it has ended:
//! - the host has booted since ([`boot`]);
//! - the VM's own process held the slot;
//! - the kernel finds no process that has the zone open as these VMs have it ([`Openers`]);
//! - where the kernel can't be asked: the record of the VM's process, if it is of this process's namespaces ([`Room::lives`]).
//!
//! All but the record are the same for each user, environment and namespace.

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Owner, Zone, new_session};
use crate::boot;
use crate::format::{tmb_member, tmb_zone_header};
use crate::liveness::{self, OWNER_BYTE, Own, PROMISES_BYTE, TABLE_BYTE};
use crate::member::{Member, MemberId, MemberState, Rights, Role};
use crate::openers::{self, Access, Openers};
use crate::serve::room::Room;
use crate::{Error, Result};

/// How long a process that wants to become the owner waits for others that have the zone open for writing, commands for example, and for an owner and members
/// that may be about to end: umount(8) returns before a mount's process has left.
const OTHERS: Duration = Duration::from_secs(2);

/// A process that has died and that its zone's owner has not declared dead for so long: the owner is suspended.
const OVERDUE: Duration = Duration::from_secs(3);

/// Processes of the host that have died, by slot and epoch, each with the time since when this is known; for [`Zone::reap_for_owner`].
#[derive(Debug, Default)]
pub struct Unburied(Vec<(MemberId, u32, Instant)>);

/// A VM that is alive only because nothing but a record says that it has ended.
struct InDoubt {
    id: MemberId,
    /// The process that was recorded as the VM has ended. One that it has forked may be the VM, which the kernel knows.
    has_ended_by_record: bool,
}

impl InDoubt {
    /// Returns whether it counts as alive where these processes have the zone open.
    fn may_live(&self, openers: Openers) -> bool {
        match openers {
            Openers::None => false,
            Openers::Some => true,
            Openers::Unknown => !self.has_ended_by_record,
        }
    }
}

/// VMs that are alive only because nothing but a record says that they have ended.
struct Doubted {
    vms: Vec<InDoubt>,
    access: Access,
}

/// What keeps a process from becoming the owner.
enum Hindrance {
    /// VMs that may live: nothing says that they have ended, and other processes have the zone open so.
    Doubt(Vec<String>, Access, Openers),
    /// An owner or members that live.
    Living(Error),
    Other(Error),
}

impl Doubted {
    /// Looks for processes that could be these VMs; `None`: there are none of these.
    fn openers(&self, file: &File) -> Option<Openers> {
        (!self.vms.is_empty()).then(|| openers::look(file, self.access))
    }
}

impl From<Error> for Hindrance {
    fn from(error: Error) -> Hindrance {
        Hindrance::Other(error)
    }
}

impl Zone {
    /// Becomes the owner of a zone in a file whose owner and members have ended: it gets a new session, and each member that was active is
    /// declared dead. [`Error::InUse`]: an owner or a member still lives, or a VM may.
    pub fn take_over(path: impl AsRef<Path>) -> Result<Zone> {
        Self::take_over_within(path.as_ref(), OTHERS)
    }

    /// leaving: how long it waits for an owner and members that live, which may be about to end.
    fn take_over_within(path: &Path, leaving: Duration) -> Result<Zone> {
        let began = Instant::now();
        loop {
            match Self::try_take_over(path) {
                Ok(zone) => return Ok(zone),
                Err(Hindrance::Living(_)) if began.elapsed() < leaving => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(Hindrance::Other(error) | Hindrance::Living(error)) => return Err(error),
                Err(Hindrance::Doubt(_, _, Openers::Some)) if began.elapsed() < OTHERS => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(Hindrance::Doubt(vms, access, openers)) => {
                    let why = match (openers, access) {
                        (Openers::Unknown, _) => {
                            "this process can't find out whether they live; the user whose file it is and root can, outside of containers"
                                .to_owned()
                        }
                        (_, Access::Write) => format!("open for writing in {}", openers::names(path, access)),
                        (_, Access::Any) => format!("open in {}", openers::names(path, access)),
                    };
                    let by = format!("VMs that may have outlived their server: {} ({why})", vms.join(", "));
                    return Err(Error::InUse { zone: path.display().to_string(), by });
                }
            }
        }
    }

    fn try_take_over(path: &Path) -> std::result::Result<Zone, Hindrance> {
        // Before this process has the zone open for writing.
        let before = Self::open(path, false)?;
        let doubted = before.doubted(&mut before.slots_held()?)?;
        let mut openers = doubted.openers(&before.file).unwrap_or(Openers::Some);
        let looked_for = doubted.access;
        let mut zone = Self::open(path, true)?;
        zone.may_write()?;
        let in_use = |by: String| Error::InUse { zone: zone.label.clone(), by };
        let owner = Own::try_hold(zone.file.as_fd(), OWNER_BYTE)?
            .ok_or_else(|| Hindrance::Living(in_use("its owner, another process".to_owned())))?;
        zone.require_at(path)?;
        // Before it looks who lives: a process that finds the zone owned joins at once, and must not be declared dead.
        let _table = liveness::hold_waiting(zone.file.as_fd(), TABLE_BYTE)?;
        if !zone.is_as_before(&before)? {
            // Another owner has let VMs in meanwhile.
            openers = Openers::Some;
        }
        let room = zone.room()?;
        let outlived = room.as_ref().map(Room::vms).transpose()?.unwrap_or_default();
        if !outlived.is_empty() {
            let names: Vec<String> =
                outlived.into_iter().map(|(name, pid)| format!("{name} (process {pid})")).collect();
            return Err(in_use(format!("VMs that outlived their server: {}", names.join(", "))).into());
        }
        let mut slots = zone.slots_held()?;
        let alive: Vec<String> = slots.iter().filter(|m| m.alive).map(|m| m.name.clone()).collect();
        if !alive.is_empty() {
            let by = format!("members that outlived its owner: {}", alive.join(", "));
            return Err(Hindrance::Living(in_use(by)));
        }
        if liveness::sessions_held(zone.file.as_fd())? {
            return Err(in_use("processes that have its semaphores open".to_owned()).into());
        }
        let doubted = zone.doubted(&mut slots)?;
        if doubted.access > looked_for {
            openers = Openers::Some;
        }
        let name = |vm: &InDoubt| slots[vm.id.index() as usize].name.clone();
        let living: Vec<String> = doubted.vms.iter().filter(|vm| vm.may_live(openers)).map(name).collect();
        if !living.is_empty() {
            return Err(Hindrance::Doubt(living, doubted.access, openers));
        }
        // All of them have ended.
        if let Some(room) = room {
            room.forget_all()?;
        }
        for id in MemberId::all() {
            zone.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), 0)?;
            zone.mem.store_u32(id.at(offset_of!(tmb_member, let_in)), 0)?;
            zone.mark_dead(id)?;
        }
        zone.header.session = new_session();
        zone.mem.store_u64(offset_of!(tmb_zone_header, session) as u64, zone.header.session)?;
        zone.owner = Some(Owner::new(owner)?);
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

    /// Returns the records of the zone's VMs. `None`: they are those of the file that this one is a copy of, or lie in a folder that another user could
    /// change, in which there is no record of this user's.
    fn room(&self) -> Result<Option<Room>> {
        let file = self.file.metadata().map_err(|e| Error::io(format!("looking at {}", self.label), e))?;
        Ok(Room::of(self.uuid()).ok().filter(|room| room.other_file(&file).is_none()))
    }

    /// Returns whether no process has become the owner of this zone since it was opened as `before`.
    fn is_as_before(&self, before: &Zone) -> Result<bool> {
        let number = |file: &File| {
            let of = file.metadata().map_err(|e| Error::io(format!("looking at {}", self.label), e));
            of.map(|of| (of.dev(), of.ino()))
        };
        Ok(number(&self.file)? == number(&before.file)? && self.pulse()?.1 == before.header.session)
    }

    /// As [`Self::take_over`], or [`Self::open`] if a process owns the zone or a member lives.
    pub fn take_over_or_open(path: impl AsRef<Path>) -> Result<Zone> {
        match Self::take_over_within(path.as_ref(), Duration::ZERO) {
            Err(Error::InUse { .. }) => Self::open(path, true),
            other => other,
        }
    }

    /// As [`Self::reap`], by a member: does it in place of an owner if none lives. A VM is among the dead if it is known that it has ended.
    pub fn reap_without_owner(&self) -> Result<Vec<MemberId>> {
        let no_owner_comes = Own::try_hold(self.file.as_fd(), OWNER_BYTE)?;
        if !self.is_owner() && no_owner_comes.is_none() {
            return Ok(Vec::new());
        }
        let _table = liveness::hold_waiting(self.file.as_fd(), TABLE_BYTE)?;
        let mut slots = self.slots_held()?;
        // This process has the zone open itself, so the kernel can't tell.
        for vm in self.doubted(&mut slots)?.vms.iter().filter(|vm| vm.has_ended_by_record) {
            slots[vm.id.index() as usize].alive = false;
            // One that had not joined was let in all the same.
            self.mem.store_u32(vm.id.at(offset_of!(tmb_member, doorbell)), 0)?;
            self.mem.store_u32(vm.id.at(offset_of!(tmb_member, let_in)), 0)?;
        }
        let mut dead = Vec::new();
        for member in slots {
            let ended = matches!(member.state, MemberState::Active | MemberState::Damaged);
            // A member that has become the owner holds no VM, and knows of none what it is.
            let is_known = member.role == Some(Role::Host) || !self.is_owner();
            if !member.alive && ended && is_known && self.bury(member.id)? {
                dead.push(member.id);
            }
        }
        Ok(dead)
    }

    /// Called now and then by a member where another process owns the zone: declares processes of the host dead that the owner leaves, since it is suspended.
    /// Where it runs it is sooner.
    pub fn reap_for_owner(&self, unburied: &mut Unburied) -> Result<Vec<MemberId>> {
        let now = Instant::now();
        let is_unburied = |member: &Member| {
            let ended = matches!(member.state, MemberState::Active | MemberState::Damaged);
            !member.alive && ended && member.role == Some(Role::Host)
        };
        let still: Vec<Member> = self.slots_held()?.into_iter().filter(is_unburied).collect();
        unburied.0.retain(|(id, epoch, _)| still.iter().any(|m| (m.id, m.epoch) == (*id, *epoch)));
        for member in &still {
            if !unburied.0.iter().any(|(id, ..)| *id == member.id) {
                unburied.0.push((member.id, member.epoch, now));
            }
        }
        if !unburied.0.iter().any(|(.., since)| now - *since > OVERDUE) {
            return Ok(Vec::new());
        }
        // Who holds it may be suspended, too: the next call tries again.
        let Some(_table) = Own::try_hold(self.file.as_fd(), TABLE_BYTE)? else { return Ok(Vec::new()) };
        let mut dead = Vec::new();
        for member in self.slots_held()?.into_iter().filter(is_unburied) {
            let is_overdue = |(id, epoch, since): &&(MemberId, u32, Instant)| {
                (*id, *epoch) == (member.id, member.epoch) && now - *since > OVERDUE
            };
            if unburied.0.iter().find(is_overdue).is_some() && self.bury(member.id)? {
                dead.push(member.id);
            }
        }
        Ok(dead)
    }

    /// Returns whether a process has the zone in its memory; `false` also where this process may not look at it.
    pub(crate) fn is_mapped_by(&self, pid: u32) -> bool {
        openers::is_mapped_by(&self.file, pid)
    }

    /// Returns whether the zone is a device of this guest, whose host's locks do not reach here.
    fn is_in_guest(&self) -> bool {
        rustix::fs::fstatfs(&self.file).is_ok_and(|at| at.f_type == libc::SYSFS_MAGIC)
    }

    /// Finds out which VMs live in slots that no process holds.
    pub(super) fn settle(&self, slots: &mut [Member]) -> Result<()> {
        let doubted = self.doubted(slots)?;
        // A process that could write would find itself.
        let openers = if self.mem.writable() { None } else { doubted.openers(&self.file) };
        for vm in doubted.vms.iter().filter(|vm| openers.is_some_and(|openers| !vm.may_live(openers))) {
            slots.iter_mut().filter(|slot| slot.id == vm.id).for_each(|slot| slot.alive = false);
        }
        Ok(())
    }

    /// As [`Self::settle`], by what the slots and the records tell.
    fn doubted(&self, slots: &mut [Member]) -> Result<Doubted> {
        let mut doubted = Doubted { vms: Vec::new(), access: Access::Write };
        let is_candidate = |slot: &&mut Member| !slot.alive && slot.role != Some(Role::Host);
        if self.is_owner() || self.is_in_guest() || !slots.iter_mut().any(|slot| is_candidate(&slot)) {
            return Ok(doubted);
        }
        // An owner holds all that live. Not by its own byte, which others hold for a moment to keep owners away.
        let is_owned = liveness::is_held(self.file.as_fd(), PROMISES_BYTE)?;
        let (room, session) = (self.room()?, self.pulse()?.1);
        for slot in slots.iter_mut().filter(is_candidate) {
            let has_joined = matches!(slot.state, MemberState::Active | MemberState::Damaged);
            // A mount in the VM that died leaves its slot dead, and the VM can mount again.
            let was_let_in =
                slot.let_in != 0 && matches!(slot.state, MemberState::Invited | MemberState::Dead);
            let may_live =
                (has_joined || was_let_in || slot.doorbell.is_some()) && !boot::is_over(slot.let_in, session);
            slot.alive = match room.as_ref().and_then(|room| room.lives(&slot.name, session)) {
                Some(true) => true,
                _ if is_owned || slot.held_by_vm || !may_live => false,
                by_record => {
                    let has_ended_by_record = by_record == Some(false);
                    doubted.vms.push(InDoubt { id: slot.id, has_ended_by_record });
                    if slot.rights == Rights::READ_ONLY {
                        doubted.access = Access::Any;
                    }
                    true
                }
            };
        }
        Ok(doubted)
    }
}
