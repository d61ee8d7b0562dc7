// SPDX-License-Identifier: Apache-2.0 OR MIT
//! [`Zone`]: a mapped zone: how it is made, opened, and told of changes. Its member table is in `slots`.

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use crate::backing::Backing;
use crate::format::{self, tmb_member, tmb_zone_header};
use crate::header::{self, Area, AreaConfig, AreaType, HEADER_SIZE, Header};
use crate::liveness::{self, GRANTS_BYTE, Liveness, OWNER_BYTE, Own, REPAIR_BYTE, promise_byte};
use crate::mem::SharedMem;
use crate::member::{self, MemberId, MemberState, Pending, name_to};
use crate::numa::Nodes;
use crate::{Error, Result};

pub mod handover;
mod ledger;
mod owner;
mod slots;
mod whole;

use ledger::Ledger;
pub use owner::Unburied;
pub(crate) use slots::Holder;

/// A zone to be made.
#[derive(Clone, Debug)]
pub struct ZoneConfig {
    /// 1 to 31 bytes.
    pub name: String,
    /// Bytes: a multiple of 2 MiB, at least 8 MiB.
    pub size: u64,
    /// The kind of memory.
    pub backing: Backing,
    /// Its areas; `None`: [`header::default_areas`].
    pub areas: Option<Vec<AreaConfig>>,
    /// The NUMA nodes of its memory; `None`: the node of the member that touches a page first.
    pub nodes: Option<Nodes>,
    /// Its identity, by which guests find it; `None`: a new one.
    pub uuid: Option<Uuid>,
}

impl ZoneConfig {
    /// Describes a zone in a memfd with the default areas.
    pub fn new(name: impl Into<String>, size: u64) -> ZoneConfig {
        ZoneConfig { name: name.into(), size, backing: Backing::Memfd, areas: None, nodes: None, uuid: None }
    }

    /// Sets another backing.
    pub fn backing(mut self, backing: Backing) -> ZoneConfig {
        self.backing = backing;
        self
    }

    /// Sets other areas.
    pub fn areas(mut self, areas: Vec<AreaConfig>) -> ZoneConfig {
        self.areas = Some(areas);
        self
    }

    /// Takes its memory from these NUMA nodes, where it is no file on a disk.
    pub fn nodes(mut self, nodes: Nodes) -> ZoneConfig {
        self.nodes = Some(nodes);
        self
    }

    /// Gives it the identity of a zone that is no more, so that those who knew that one find it.
    pub fn uuid(mut self, uuid: Uuid) -> ZoneConfig {
        self.uuid = Some(uuid);
        self
    }

    fn layout(&self) -> Result<Vec<Area>> {
        name_to(&self.name, "its name", &self.name)?;
        let default = header::default_areas();
        header::layout(&self.name, self.size, self.areas.as_deref().unwrap_or(&default))
    }
}

/// A membership of a zone, in an epoch. Dropping it without [`Zone::leave`] counts as death: the owner ([`Zone::reap`]) then declares the
/// member dead, and its work is recovered.
#[derive(Debug)]
pub struct Membership {
    id: MemberId,
    epoch: u32,
    liveness: Liveness,
}

impl Membership {
    /// The number of the member's slot in the zone's member table.
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// The epoch that this membership's lock words carry.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The liveness, to let a child process inherit it.
    pub fn liveness(&self) -> &Liveness {
        &self.liveness
    }
}

/// What [`Zone::hold_grants`] gives.
#[derive(Debug)]
pub struct GrantsHeld {
    _own: Own,
}

/// What [`Zone::keep_members_out`] gives.
#[derive(Debug)]
pub struct KeptOut {
    _own: Own,
}

/// A mapped zone. Share it between threads in an `Arc`.
#[derive(Debug)]
pub struct Zone {
    file: File,
    mem: SharedMem,
    header: Header,
    label: String,
    owner: Option<Owner>,
}

/// What only the owner has.
#[derive(Debug)]
struct Owner {
    lock: Own,
    ledger: Ledger,
}

impl Owner {
    fn new(lock: Own) -> Result<Owner> {
        Owner::of(lock, Ledger::default())
    }

    fn of(lock: Own, ledger: Ledger) -> Result<Owner> {
        let owner = Owner { lock, ledger };
        MemberId::all().try_for_each(|id| owner.tell(id))?;
        owner.lock.set(liveness::PROMISES_BYTE, true)?;
        Ok(owner)
    }

    /// Tells other processes whether a slot is kept for a member, by a lock that no member can take or fake.
    fn tell(&self, id: MemberId) -> Result<()> {
        self.lock.set(promise_byte(id), self.ledger.name(id).is_some())
    }
}

impl Zone {
    /// Makes a zone and owns it. A file must not exist yet; it is removed again when this fails.
    pub fn create(config: &ZoneConfig) -> Result<Zone> {
        let areas = config.layout()?;
        let file = config.backing.create(&config.name, config.size, config.nodes.as_ref())?;
        let made = Self::format(file, config, areas);
        if let (Err(_), Backing::File(path)) = (&made, &config.backing) {
            let _ = std::fs::remove_file(path);
        }
        made
    }

    fn format(file: File, config: &ZoneConfig, areas: Vec<Area>) -> Result<Zone> {
        let label = config.backing.describe(&config.name);
        let owner = Own::try_hold(file.as_fd(), OWNER_BYTE)?
            .ok_or_else(|| Error::InUse { zone: label.clone(), by: "another process".to_owned() })?;
        let mem = SharedMem::map(file.as_fd(), 0, config.size, true)?;
        let header = Header {
            name: config.name.clone(),
            uuid: config.uuid.unwrap_or_else(Uuid::new_v4),
            size: config.size,
            created_ns: now_ns(),
            areas,
            session: new_session(),
            may_write: true,
        };
        let page = header.encode()?;
        // Magic last: a process that sees it sees the rest.
        mem.write(8, &page[8..])?;
        mem.store_u64(offset_of!(tmb_zone_header, magic) as u64, format::TMB_ZONE_MAGIC)?;
        Ok(Zone { file, mem, header, label, owner: Some(Owner::new(owner)?) })
    }

    /// Attaches to the zone in a file (or in `/proc/PID/fd/N`), without owning it.
    pub fn open(path: impl AsRef<Path>, writable: bool) -> Result<Zone> {
        let path = path.as_ref();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(writable)
            .open(path)
            .map_err(|e| Error::io(format!("opening zone {}", path.display()), e))?;
        Self::attach(file, writable, path.display().to_string())
    }

    /// Attaches to the zone in a file descriptor, received from its owner, say.
    pub fn open_fd(fd: OwnedFd, writable: bool) -> Result<Zone> {
        Self::attach(File::from(fd), writable, "zone received as a file descriptor".to_owned())
    }

    fn attach(file: File, writable: bool, label: String) -> Result<Zone> {
        let meta = file.metadata().map_err(|e| Error::io(format!("{label}: asking for its size"), e))?;
        if meta.len() < HEADER_SIZE as u64 {
            return Err(Error::NotAZone { zone: label, why: format!("it has only {} bytes", meta.len()) });
        }
        crate::backing::check_pages(file.as_fd(), &label)?;
        // The header alone may not be mappable (huge pages), so the file is mapped as it is, and cut to the zone's size below.
        let probe = SharedMem::map(file.as_fd(), 0, meta.len(), writable)?;
        let mut page = [0; HEADER_SIZE];
        probe.read(0, &mut page)?;
        let header = Header::check(&page, meta.len(), &label)?;
        let mem = if header.size == meta.len() {
            probe
        } else {
            drop(probe);
            SharedMem::map(file.as_fd(), 0, header.size, writable)?
        };
        let zone = Zone { file, mem, header, label, owner: None };
        if writable {
            zone.may_write()?;
        }
        Ok(zone)
    }

    fn may_write(&self) -> Result<()> {
        if self.header.may_write {
            return Ok(());
        }
        Err(Error::Unsupported {
            zone: self.label.clone(),
            why: "it has features that this program does not know, and can only be read by it".to_owned(),
        })
    }

    /// The header as it was checked when the zone was opened; later changes by members have no effect on it.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Name.
    pub fn name(&self) -> &str {
        &self.header.name
    }

    /// Identity.
    pub fn uuid(&self) -> Uuid {
        self.header.uuid
    }

    /// Bytes of the whole zone, as its header says and the mapping confirms.
    pub fn size(&self) -> u64 {
        self.header.size
    }

    /// Returns whether this process owns the zone.
    pub fn is_owner(&self) -> bool {
        self.owner.is_some()
    }

    /// The mapping of the whole zone in this process.
    pub fn mem(&self) -> &SharedMem {
        &self.mem
    }

    /// A descriptor of the memory for another process that may only read it.
    pub fn read_only_fd(&self) -> Result<OwnedFd> {
        let file = liveness::reopen(self.file.as_fd(), false)
            .map_err(|e| Error::io(format!("{}: reopening for reading", self.label), e))?;
        Ok(file.into())
    }

    /// Returns the address of `area`, one of this zone's, in this process. C code that gets it follows the rules of [`crate::mem`].
    pub fn area_ptr(&self, area: &Area) -> Result<*mut u8> {
        if area.offset.checked_add(area.len).is_none_or(|end| end > self.size()) {
            return Err(Error::Access(format!("area {} at {} is not of this zone", area.name, area.offset)));
        }
        // The mapping has size() bytes, and they fit an usize since they are mapped.
        Ok(self.mem.as_ptr().wrapping_add(area.offset as usize))
    }

    /// Returns the address of the member table in this process.
    pub fn members_ptr(&self) -> *mut tmb_member {
        self.mem.as_ptr().wrapping_add(format::MEMBERS_OFF as usize).cast()
    }

    /// The areas that the header listed when the zone was opened, in the order of its table.
    pub fn areas(&self) -> &[Area] {
        &self.header.areas
    }

    /// An area by type and name; without a name, the first of its type.
    pub fn area(&self, kind: AreaType, name: Option<&str>) -> Result<Area> {
        let found = self.areas().iter().find(|a| a.kind == kind && name.is_none_or(|n| n == a.name));
        found.cloned().ok_or_else(|| Error::NoArea {
            zone: self.header.name.clone(),
            kind: kind.to_string(),
            name: name.map(|n| format!(" named {n:?}")).unwrap_or_default(),
        })
    }

    /// Waits until no other process of the host changes what members are granted (accounts of a file system, say) or replaces that file system, and holds
    /// these off until the value returned is dropped.
    pub fn hold_grants(&self) -> Result<GrantsHeld> {
        liveness::hold_waiting(self.file.as_fd(), GRANTS_BYTE).map(|own| GrantsHeld { _own: own })
    }

    /// As [`Self::hold_grants`]; `None`: another process holds them at this moment.
    pub fn try_hold_grants(&self) -> Result<Option<GrantsHeld>> {
        Ok(Own::try_hold(self.file.as_fd(), GRANTS_BYTE)?.map(|own| GrantsHeld { _own: own }))
    }

    /// Refuses every member that comes, until the value returned is dropped: for a repair of what lies in the zone. The caller looks afterwards who is
    /// there: a member that was not refused is seen then.
    pub fn keep_members_out(&self) -> Result<KeptOut> {
        let own = Own::try_hold(self.file.as_fd(), REPAIR_BYTE)?;
        own.map(|own| KeptOut { _own: own }).ok_or_else(|| Error::InUse {
            zone: self.label.clone(),
            by: "another process that repairs or removes it".to_owned(),
        })
    }

    /// Stores the ivshmem peer id by which a member is rung; `None`: it polls.
    pub fn set_doorbell(&self, id: MemberId, peer: Option<u16>) -> Result<()> {
        self.mem.store_u32(id.at(offset_of!(tmb_member, doorbell)), peer.map_or(0, |p| u32::from(p) + 1))
    }

    /// Returns the ivshmem peer id that a slot has at this moment.
    pub fn doorbell(&self, id: MemberId) -> Result<Option<u16>> {
        Ok(member::read(&self.mem, id)?.doorbell)
    }

    /// Sets a member's pending bit; returns the peer to ring, if it has a doorbell and the bit was not set already.
    pub fn pend(&self, id: MemberId, reason: Pending) -> Result<Option<u16>> {
        let before = self.mem.fetch_or_u64(id.at(offset_of!(tmb_member, pending)), reason as u64)?;
        let bell = self.mem.load_u32(id.at(offset_of!(tmb_member, doorbell)))?;
        Ok((before & reason as u64 == 0)
            .then(|| bell.checked_sub(1).and_then(|p| u16::try_from(p).ok()))
            .flatten())
    }

    /// Takes the pending bits of a member: the own ones, after the own doorbell rang.
    pub fn take_pending(&self, id: MemberId) -> Result<u64> {
        self.mem.swap_u64(id.at(offset_of!(tmb_member, pending)), 0)
    }

    /// Returns the doorbells of members that have pending bits.
    pub fn pending_peers(&self) -> Result<Vec<u16>> {
        let mut peers = Vec::new();
        for id in MemberId::all() {
            if self.mem.load_u64(id.at(offset_of!(tmb_member, pending)))? != 0 {
                peers.extend(self.doorbell(id)?);
            }
        }
        Ok(peers)
    }

    /// Returns the peers to ring so that every active member reads the member table.
    pub fn announce(&self) -> Result<Vec<u16>> {
        Ok(self
            .members()?
            .into_iter()
            .filter(|m| m.state == MemberState::Active)
            .filter_map(|m| m.doorbell)
            .collect())
    }

    /// Stamps the owner's heartbeat with the present time.
    pub fn beat(&self) -> Result<()> {
        self.mem.store_u64(offset_of!(tmb_zone_header, heartbeat_ns) as u64, now_ns())
    }

    /// Returns the owner's present heartbeat and session.
    pub fn pulse(&self) -> Result<(u64, u64)> {
        Ok((
            self.mem.load_u64(offset_of!(tmb_zone_header, heartbeat_ns) as u64)?,
            self.mem.load_u64(offset_of!(tmb_zone_header, session) as u64)?,
        ))
    }

    /// Returns whether a process has cut the zone's file short. This process then sees zeroes instead of the zone.
    pub fn is_lost(&self) -> bool {
        self.mem.is_lost()
    }

    /// Returns whether a process owns the zone.
    pub fn has_owner(&self) -> Result<bool> {
        liveness::is_held(self.file.as_fd(), OWNER_BYTE)
    }
}

impl AsFd for Zone {
    /// The memory, as every member maps it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn new_session() -> u64 {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    high ^ low
}
