// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Member slots, copied out of the shared memory and checked.

use serde::{Deserialize, Serialize};

use crate::boot;
use crate::format::{self, TMB_MAX_MEMBERS, tmb_member};
use crate::mem::SharedMem;
use crate::{Error, Result};

/// The number of a member slot, below 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemberId(u32);

impl MemberId {
    /// `None` at 64 and above.
    pub const fn new(index: u32) -> Option<MemberId> {
        if index < TMB_MAX_MEMBERS { Some(MemberId(index)) } else { None }
    }

    /// The slot's number.
    pub const fn index(self) -> u32 {
        self.0
    }

    /// All 64.
    pub fn all() -> impl Iterator<Item = MemberId> {
        (0..TMB_MAX_MEMBERS).map(MemberId)
    }

    /// Offset of a field of the slot within the zone.
    pub(crate) fn at(self, field: usize) -> u64 {
        format::MEMBERS_OFF + u64::from(self.0) * format::MEMBER_SIZE + field as u64
    }
}

impl std::fmt::Display for MemberId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Bits 0-7 of a slot's state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    /// Free.
    Empty,
    /// Kept for a member that has not joined.
    Invited,
    /// A member has joined.
    Active,
    /// Its member died; its locks and references wait for recovery.
    Dead,
    /// A value that the format doesn't know: a member stored garbage. Treated like `Dead`.
    Damaged,
}

impl MemberState {
    pub(crate) fn from_word(word: u64) -> MemberState {
        match format::state_of(word) {
            format::TMB_MEMBER_EMPTY => MemberState::Empty,
            format::TMB_MEMBER_INVITED => MemberState::Invited,
            format::TMB_MEMBER_ACTIVE => MemberState::Active,
            format::TMB_MEMBER_DEAD => MemberState::Dead,
            _ => MemberState::Damaged,
        }
    }
}

/// The kind of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A virtual machine.
    Vm,
    /// A process on the host.
    Host,
}

impl Role {
    pub(crate) fn raw(self) -> u32 {
        match self {
            Role::Vm => format::TMB_ROLE_VM,
            Role::Host => format::TMB_ROLE_HOST,
        }
    }
}

/// A member's rights, granted by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rights {
    /// Without it the member's mapping is read-only.
    pub write: bool,
}

impl Rights {
    /// Everything.
    pub const READ_WRITE: Rights = Rights { write: true };
    /// Reading only.
    pub const READ_ONLY: Rights = Rights { write: false };

    pub(crate) fn raw(self) -> u32 {
        if self.write { format::TMB_RIGHT_WRITE } else { 0 }
    }
}

/// Reasons for a doorbell (`TMB_PENDING_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Pending {
    /// Blocks of a mapped file were removed.
    Revoke = format::TMB_PENDING_REVOKE as u64,
    /// A lock may be free.
    Lock = format::TMB_PENDING_LOCK as u64,
    /// Change events.
    Event = format::TMB_PENDING_EVENT as u64,
    /// Semaphores and their like.
    Sync = format::TMB_PENDING_SYNC as u64,
    /// Calls.
    Calls = format::TMB_PENDING_CALLS as u64,
    /// The member table changed.
    Members = format::TMB_PENDING_MEMBERS as u64,
}

/// A copy of a member slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Member {
    /// The number of the slot in the member table.
    pub id: MemberId,
    /// Its name; '/', control characters and bytes that are not UTF-8 are replaced.
    pub name: String,
    /// As the slot's state word had it when it was copied.
    pub state: MemberState,
    /// Its present epoch.
    pub epoch: u32,
    /// The member's kind; `None`: the slot holds no valid value.
    pub role: Option<Role>,
    /// The member's rights.
    pub rights: Rights,
    /// Its doorbell's ivshmem peer id.
    pub doorbell: Option<u16>,
    /// `TMB_PENDING_*` bits not yet taken.
    pub pending: u64,
    /// The time of its last heartbeat, Unix time in ns; 0: never.
    pub heartbeat_ns: u64,
    /// Epochs up to this one are recovered.
    pub recovered_epoch: u64,
    /// A process holds the member's liveness (see [`crate::liveness`]), or it is assumed to live.
    pub alive: bool,
    /// It is a VM of whose end no lock tells: it counts as living until the host's next boot, unless the process that let it in sees its end.
    pub assumed: bool,
    /// What the slot says of a VM's liveness.
    #[serde(skip)]
    pub(crate) held_by: HeldBy,
}

impl Member {
    /// Its name, for a message about what it is in the way of.
    pub fn described(&self) -> String {
        let remedy = " (no lock tells whether it lives; if it has ended: tombolo zone expel --force)";
        format!("{}{}", self.name, if self.assumed { remedy } else { "" })
    }
}

/// Who holds the liveness of a VM, as its slot says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeldBy {
    /// The slot does not say: it has not come yet, or has come without being let in.
    #[default]
    Unknown,
    /// The VM's own process.
    Vm,
    /// No process, and it was let in.
    Nobody,
}

impl HeldBy {
    pub(crate) fn raw(self) -> u32 {
        match self {
            HeldBy::Unknown => 0,
            HeldBy::Vm => format::TMB_HELD_BY_VM,
            HeldBy::Nobody => format::TMB_ASSUMED,
        }
    }
}

/// Copies a slot. `alive` is left false; `assumed` is what the slot says.
pub(crate) fn read(mem: &SharedMem, id: MemberId) -> Result<Member> {
    let field = |f: usize| id.at(f);
    let word = mem.load_u64(field(std::mem::offset_of!(tmb_member, state_epoch)))?;
    let bell = mem.load_u32(field(std::mem::offset_of!(tmb_member, doorbell)))?;
    let role = mem.load_u32(field(std::mem::offset_of!(tmb_member, role)))?;
    let rights = mem.load_u32(field(std::mem::offset_of!(tmb_member, rights)))?;
    let boot = mem.load_u32(field(std::mem::offset_of!(tmb_member, boot)))?;
    let state = MemberState::from_word(word);
    let held_by = match rights {
        _ if rights & format::TMB_ASSUMED != 0 => HeldBy::Nobody,
        _ if rights & format::TMB_HELD_BY_VM != 0 => HeldBy::Vm,
        _ => HeldBy::Unknown,
    };
    let mut name = [0; format::TMB_NAME_LEN as usize];
    mem.read(field(std::mem::offset_of!(tmb_member, name)), &mut name)?;
    Ok(Member {
        id,
        name: name_from(&name),
        state,
        epoch: format::epoch_of(word),
        role: match role {
            format::TMB_ROLE_VM => Some(Role::Vm),
            format::TMB_ROLE_HOST => Some(Role::Host),
            _ => None,
        },
        rights: Rights { write: rights & format::TMB_RIGHT_WRITE != 0 },
        doorbell: bell.checked_sub(1).and_then(|peer| u16::try_from(peer).ok()),
        pending: mem.load_u64(field(std::mem::offset_of!(tmb_member, pending)))?,
        heartbeat_ns: mem.load_u64(field(std::mem::offset_of!(tmb_member, heartbeat_ns)))?,
        recovered_epoch: mem.load_u64(field(std::mem::offset_of!(tmb_member, recovered_epoch)))?,
        alive: false,
        assumed: match held_by {
            HeldBy::Vm => false,
            _ if role == format::TMB_ROLE_HOST || boot::is_over(boot) => false,
            HeldBy::Nobody => true,
            HeldBy::Unknown => matches!(state, MemberState::Active | MemberState::Damaged),
        },
        held_by,
    })
}

/// Text of a NUL-padded name field. Each member can write there what it likes, and names become parts of paths and go to terminals: what
/// [`name_to`] refuses is replaced.
pub(crate) fn name_from(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).replace(is_refused, "\u{fffd}")
}

/// Returns whether no name has this character.
fn is_refused(c: char) -> bool {
    c.is_control() || c == '/'
}

/// Checks a name and pads it: 1 to 31 bytes, no control characters, no `/`.
pub(crate) fn name_to(zone: &str, what: &str, name: &str) -> Result<[u8; format::TMB_NAME_LEN as usize]> {
    let mut field = [0; format::TMB_NAME_LEN as usize];
    if name.is_empty() || name.len() >= field.len() || name.chars().any(is_refused) {
        return Err(Error::Config {
            zone: zone.to_owned(),
            why: format!(
                "{what} {name:?} must be 1 to {} bytes without '/' and control characters",
                field.len() - 1
            ),
        });
    }
    field[..name.len()].copy_from_slice(name.as_bytes());
    Ok(field)
}
