// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Resolves a command's ZONE argument: a zone with a FILES area, a file with nothing but a file system, or, in a guest, `pci:NAME`: a zone in an
//! ivshmem device.

use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::FlockOperation;
use tombolo_zone::doorbell::Bell;
use tombolo_zone::pci::{self, Registers};
use tombolo_zone::{
    AreaType, KeptOut, Liveness, Member, MemberId, MemberState, Membership, Rights, Role, Unburied, Zone,
};
use uuid::Uuid;

use crate::area::{Area, Incarnation, Map, open_backing};
use crate::fs::Ringer;
use crate::fsck;
use crate::room;
use crate::sys;

/// Begins an argument that names a zone in an ivshmem device of this guest.
pub(crate) const PCI: &str = "pci:";

/// Returns the argument as a process in another folder names it.
///
/// # Errors
/// When the current folder is gone.
pub(crate) fn from_anywhere(argument: &Path) -> std::io::Result<PathBuf> {
    if argument.as_os_str().as_encoded_bytes().starts_with(PCI.as_bytes()) {
        return Ok(argument.to_owned());
    }
    std::path::absolute(argument)
}

/// An opened argument.
pub struct Target {
    path: PathBuf,
    kind: Kind,
}

enum Kind {
    /// A mount holds the file with flock.
    Bare { area: Area, file: OwnedFd },
    Zone {
        zone: Arc<Zone>,
        area: tombolo_zone::Area,
        file: Option<OwnedFd>,
        /// Used inside a VM, whose slot the host assigns.
        inside: bool,
    },
}

/// A mount holds the file of a bare file system by flock until its process has written everything back, and by a write lock of the open file
/// description on this byte until it learns of the unmount. So a command after an unmount waits for that process's end, and a command before it fails
/// because the file is in use.
const SERVING: libc::off_t = 0;
/// umount(8) returns before the mount's process learns of it; this is how long that may take on a busy host.
const LEARNT: Duration = Duration::from_secs(5);

/// A process holds this byte of the file of a bare file system while it makes, restores or repairs that.
const REPLACING: libc::off_t = 1;

fn byte_lock(
    file: &OwnedFd,
    byte: libc::off_t,
    command: libc::c_int,
    kind: libc::c_int,
) -> std::io::Result<libc::flock> {
    let whence = libc::SEEK_SET as libc::c_short;
    let mut lock =
        libc::flock { l_type: kind as libc::c_short, l_whence: whence, l_start: byte, l_len: 1, l_pid: 0 };
    // SAFETY: an open descriptor and a flock that lives across the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(std::io::Error::last_os_error()),
    }
}

const UNLOCKED: libc::c_short = libc::F_UNLCK as libc::c_short;

/// Waits until no mount serves the file or has not left the zone yet; `attempt` gives EAGAIN while one does. Returns whether it succeeded.
fn await_serving(mut attempt: impl FnMut() -> std::io::Result<()>) -> std::io::Result<bool> {
    let until = Instant::now() + LEARNT;
    loop {
        match attempt() {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {}
            done => return done.map(|()| true),
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Removes a file that was made for a file system and has none, unless another process makes one in it.
pub(crate) fn remove_unfilled(path: &Path) -> anyhow::Result<()> {
    let mut file = open_backing(path, true)?;
    let mut magic = [0; 8];
    if file.read(&mut magic)? == magic.len() && u64::from_le_bytes(magic) == sys::TFS_MAGIC {
        return Ok(());
    }
    byte_lock(&file.into(), REPLACING, libc::F_OFD_SETLK, libc::F_WRLCK)?;
    Ok(std::fs::remove_file(path)?)
}

/// The name by which a process joins a zone.
#[derive(Clone, Copy, Debug)]
pub enum Name<'a> {
    /// The member's.
    Member(&'a str),
    /// One of its own, that begins with its work.
    Process(&'a str),
}

impl Name<'_> {
    /// Takes a slot of the zone. A process' number is part of its own name, and may be that of a process in another PID namespace: then it takes another
    /// name.
    fn claim(self, zone: &Zone) -> anyhow::Result<(MemberId, Liveness)> {
        let claim = |name: &str| zone.claim(name, Role::Host, Rights::READ_WRITE);
        let work = match self {
            Name::Member(name) => return Ok(claim(name)?),
            Name::Process(work) => work,
        };
        let mut name = format!("{work}-{}", std::process::id());
        loop {
            match claim(&name) {
                Err(_) if zone.members()?.iter().any(|m| m.alive && m.name == name) => {
                    let random = Uuid::new_v4().as_fields().0;
                    name = format!("{work}-{}-{random:08x}", std::process::id());
                }
                done => return Ok(done?),
            }
        }
    }
}

/// The way to ring other members.
enum Ringing {
    Nothing,
    Bell(Arc<Bell>),
    Registers(Arc<Registers>),
}

/// A membership of a zone for as long as the value lives; [`Joined::leave`] ends it.
pub struct Joined {
    zone: Arc<Zone>,
    membership: Option<Membership>,
    ringing: Ringing,
    rung: Arc<OwnedFd>,
    inside: bool,
}

impl Joined {
    /// Returns the own incarnation.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.membership.as_ref().map(|m| Incarnation { member: m.id().index(), epoch: m.epoch() })
    }

    pub fn zone(&self) -> &Arc<Zone> {
        &self.zone
    }

    /// Returns how to ring other members; `None`: no process serves the zone's doorbells.
    pub fn ringer(&self) -> Option<Ringer> {
        let zone = Arc::clone(&self.zone);
        let peer_of = move |member| MemberId::new(member).and_then(|id| zone.doorbell(id).ok()?);
        // A peer that has left meanwhile needs no ring.
        match &self.ringing {
            Ringing::Nothing => None,
            Ringing::Bell(bell) => {
                let bell = Arc::clone(bell);
                Some(Box::new(move |member| drop(peer_of(member).map(|peer| bell.ring(peer)))))
            }
            Ringing::Registers(registers) => {
                let registers = Arc::clone(registers);
                Some(Box::new(move |member| drop(peer_of(member).map(|peer| registers.ring(peer)))))
            }
        }
    }

    /// Returns a descriptor that is readable once this member was rung. `None`: it has no doorbell, and must poll its pending bits.
    pub fn rung(&self) -> Option<&OwnedFd> {
        matches!(self.ringing, Ringing::Bell(_)).then_some(&*self.rung)
    }

    /// Returns whether a process serves this member's doorbell. Else it must poll its pending bits, also if it had one before.
    pub fn is_served(&self) -> bool {
        matches!(&self.ringing, Ringing::Bell(bell) if bell.is_served())
    }

    /// Takes the own pending bits, and clears the rings.
    pub fn take_pending(&self) -> tombolo_zone::Result<u64> {
        let _rings = rustix::io::read(&self.rung, &mut [0; 8]);
        match &self.membership {
            Some(m) => self.zone.take_pending(m.id()),
            None => Ok(0),
        }
    }

    /// Called now and then: declares members dead whose processes have ended, if the zone has no owner, or one that does not do it in time.
    /// `unburied`: what the calls before have found.
    pub fn reap(&self, unburied: &mut Unburied) -> tombolo_zone::Result<()> {
        if self.inside {
            return Ok(());
        }
        if !self.is_served() {
            self.zone.reap_without_owner()?;
        }
        self.zone.reap_for_owner(unburied).map(drop)
    }

    /// Returns the descriptor that keeps this membership alive.
    pub fn liveness(&self) -> Option<BorrowedFd<'_>> {
        self.membership.as_ref().map(|own| own.liveness().as_fd())
    }

    /// Declares this membership's process dead, unless it left or another process has the slot.
    pub fn declare_dead(&self) -> tombolo_zone::Result<()> {
        let Some(own) = &self.membership else { return Ok(()) };
        if !self.zone.abandon(own)? {
            return Ok(());
        }
        let Ringing::Registers(registers) = &self.ringing else { return Ok(()) };
        self.zone.announce()?.into_iter().try_for_each(|peer| registers.ring(peer))
    }

    /// Leaves the zone, which frees the slot. The caller holds no lock or reference any more.
    pub fn leave(mut self) -> tombolo_zone::Result<()> {
        self.ringing = Ringing::Nothing;
        if let Some(membership) = self.membership.take() {
            if self.inside {
                self.zone.vacate(&membership)?;
                return Ok(());
            }
            let id = membership.id();
            self.zone.leave(membership)?;
            self.zone.remove_left(id)?;
        }
        Ok(())
    }
}

impl Target {
    /// Opens a zone or file system in a file. `area`: the FILES area's name if a zone has several.
    pub fn open(path: &Path, writable: bool, area: Option<&str>) -> anyhow::Result<Target> {
        if let Some(name) = path.to_str().and_then(|p| p.strip_prefix(PCI)) {
            let zone = Arc::new(Zone::open(pci::memory(name)?, writable)?);
            let area = zone.area(AreaType::Files, area)?;
            return Ok(Target {
                path: path.to_owned(),
                kind: Kind::Zone { zone, area, file: None, inside: true },
            });
        }
        let mut file = open_backing(path, writable).with_context(|| format!("opening {}", path.display()))?;
        let mut magic = [0; 8];
        let len = file.seek(std::io::SeekFrom::End(0));
        let len = len.and_then(|len| file.rewind().map(|()| len));
        let len = len.with_context(|| format!("{}: this is no file with a size", path.display()))?;
        if len >= 8 {
            file.read_exact(&mut magic).with_context(|| format!("reading {}", path.display()))?;
        }
        let kind = if u64::from_le_bytes(magic) == sys::TMB_ZONE_MAGIC {
            let zone =
                Arc::new(if writable { Zone::take_over_or_open(path)? } else { Zone::open(path, false)? });
            let area = zone.area(AreaType::Files, area)?;
            let memory = zone.as_fd().try_clone_to_owned()?;
            // Of huge pages a private mapping would keep as many again.
            let has_small_pages =
                rustix::fs::fstatfs(&memory).is_ok_and(|s| s.f_type != libc::HUGETLBFS_MAGIC);
            let file = has_small_pages.then_some(memory);
            Kind::Zone { zone, area, file, inside: false }
        } else {
            if len < 4096 {
                bail!("{}: {len} bytes are too few for a file system or a zone", path.display());
            }
            let map =
                Map::new(&file, len, writable).with_context(|| format!("mapping {}", path.display()))?;
            Kind::Bare { area: Area::whole(map)?, file: file.into() }
        };
        Ok(Target { path: path.to_owned(), kind })
    }

    /// Returns whether it is a zone, and not a bare file system.
    pub fn is_zone(&self) -> bool {
        matches!(self.kind, Kind::Zone { .. })
    }

    /// Returns whether it is a zone in a device of this VM.
    pub fn is_inside(&self) -> bool {
        matches!(self.kind, Kind::Zone { inside: true, .. })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the area without an incarnation: for readers, and for processes that are alone.
    pub fn area(&self) -> anyhow::Result<Area> {
        self.area_of(None)
    }

    /// Returns the area for a mount that only reads, and is no member. In a VM it has that VM's root; `name` is its own, needed where it has no doorbell.
    pub fn area_to_read(&self, name: Option<&str>) -> anyhow::Result<Area> {
        let Kind::Zone { zone, inside: true, .. } = &self.kind else { return self.area() };
        let registers = Registers::of(zone)?;
        let member = zone.member(pci::slot(zone, registers.as_ref(), name)?)?;
        self.area_of(Some(Incarnation { member: member.id.index(), epoch: member.epoch }))
    }

    fn area_of(&self, incarnation: Option<Incarnation>) -> anyhow::Result<Area> {
        Ok(match &self.kind {
            Kind::Bare { area, .. } => area.clone(),
            Kind::Zone { zone, area, file, .. } => {
                let file = file.as_ref().map(OwnedFd::try_clone).transpose()?;
                Area::of_zone(zone, area, incarnation, file)?
            }
        })
    }

    /// Returns the members that are invited or active; `None`: no zone.
    pub fn members(&self) -> anyhow::Result<Option<Vec<tombolo_zone::Member>>> {
        match &self.kind {
            Kind::Bare { .. } => Ok(None),
            Kind::Zone { zone, .. } => Ok(Some(zone.members()?)),
        }
    }

    /// Returns the epochs of all slots, one of which changes when a member joins. None: no zone, whose mounts wait until this process has closed the file.
    pub(crate) fn epochs(&self) -> anyhow::Result<Vec<u32>> {
        match &self.kind {
            Kind::Bare { .. } => Ok(Vec::new()),
            Kind::Zone { zone, .. } => {
                MemberId::all().map(|id| Ok(zone.member(id)?.epoch)).collect::<anyhow::Result<_>>()
            }
        }
    }

    fn alive(&self) -> anyhow::Result<Vec<String>> {
        Ok(match &self.kind {
            Kind::Zone { zone, .. } => {
                zone.members()?.iter().filter(|m| m.alive).map(Member::described).collect()
            }
            Kind::Bare { file, .. } => {
                let ended = await_serving(|| {
                    match byte_lock(file, SERVING, libc::F_OFD_GETLK, libc::F_WRLCK)?.l_type {
                        UNLOCKED => Ok(()),
                        _ => Err(std::io::Error::from_raw_os_error(libc::EAGAIN)),
                    }
                });
                let ended = ended.with_context(|| self.locking())?;
                if !ended {
                    return Ok(vec!["another process".to_owned()]);
                }
                rustix::fs::flock(file, FlockOperation::LockShared).with_context(|| self.locking())?;
                Vec::new()
            }
        })
    }

    /// Returns whether the zone has active members.
    pub fn is_in_use(&self) -> anyhow::Result<bool> {
        Ok(!self.alive()?.is_empty())
    }

    /// Returns the members that have mounted the file system. An active VM that has unmounted is not among them; a read-only one always is, since it
    /// can't store that.
    fn users(&self, readers: bool) -> anyhow::Result<Vec<String>> {
        let Kind::Zone { zone, .. } = &self.kind else { return self.alive() };
        let uses = |m: &tombolo_zone::Member| {
            let joined = matches!(m.state, MemberState::Active | MemberState::Damaged);
            m.alive && joined && (readers || m.rights != Rights::READ_ONLY)
        };
        Ok(zone.members()?.iter().filter(|m| uses(m)).map(Member::described).collect())
    }

    /// Refuses if a member has mounted the file system; with `force` read-only members don't matter.
    pub fn require_unused(&self, what: &str, force: bool) -> anyhow::Result<()> {
        let mut users = Vec::new();
        let unused = await_serving(|| {
            users = self.users(!force).map_err(std::io::Error::other)?;
            if users.is_empty() { Ok(()) } else { Err(std::io::Error::from_raw_os_error(libc::EAGAIN)) }
        })?;
        if !unused {
            if !self.is_zone() {
                bail!(
                    "{}: is mounted; {what} again once it is not. {}",
                    self.path.display(),
                    self.how_to_end()
                );
            }
            bail!(
                "{}: in use by {}; unmount there first (tombolo zone inspect lists its members), then {what} again; members that may only read count \
                 as users unless --force is given",
                self.path.display(),
                users.join(", ")
            );
        }
        Ok(())
    }

    /// Takes the room that what is to be written needs in its file, before any of it is written.
    pub fn fill_holes(&self) -> anyhow::Result<()> {
        if self.is_inside() { Ok(()) } else { room::fill_holes(&self.path) }
    }

    fn locking(&self) -> String {
        format!("{}: locking", self.path.display())
    }

    /// How the mount of a bare file system ends, for one that is no more in this process's mount table, too.
    fn how_to_end(&self) -> String {
        format!(
            "Unmount it; if it is unmounted here, another mount namespace, a container's say, has a copy of the mount: find the mount's process with \
             'fuser {}' and end it by kill",
            self.path.display()
        )
    }

    /// Keeps mounts and other processes from changing an image while it is copied, for as long as this value lives.
    ///
    /// # Errors
    /// A zone, which is no image; an image that is mounted, or that another process makes, restores or repairs.
    pub fn hold_image(&self, what: &str) -> anyhow::Result<()> {
        let Kind::Bare { file, .. } = &self.kind else {
            bail!(
                "{}: is a zone, not an image of a file system; take an image of it with: tombolo files snapshot",
                self.path.display()
            );
        };
        let still = await_serving(|| byte_lock(file, REPLACING, libc::F_OFD_SETLK, libc::F_RDLCK).map(drop));
        if !still.with_context(|| self.locking())? {
            return Err(self.is_replaced(what));
        }
        self.require_unused(what, false)
    }

    /// Keeps other processes from making, restoring, repairing or granting until the value returned is dropped, for a bare file system until this one is.
    pub fn hold_contents(&self, what: &str) -> anyhow::Result<Option<tombolo_zone::GrantsHeld>> {
        let mut held = None;
        let busy = || std::io::Error::from_raw_os_error(libc::EAGAIN);
        let alone = await_serving(|| match &self.kind {
            Kind::Zone { zone, .. } => {
                held = Some(zone.try_hold_grants().map_err(std::io::Error::other)?.ok_or_else(busy)?);
                Ok(())
            }
            Kind::Bare { file, .. } => byte_lock(file, REPLACING, libc::F_OFD_SETLK, libc::F_WRLCK).map(drop),
        });
        let alone = alone.with_context(|| self.locking())?;
        if !alone {
            return Err(self.is_replaced(what));
        }
        Ok(held)
    }

    fn is_replaced(&self, what: &str) -> anyhow::Error {
        anyhow::anyhow!(
            "{}: another process makes, restores or repairs its file system, or grants its members something; {what} again once that has ended",
            self.path.display()
        )
    }

    /// Refuses if a member could mount the file system at any moment, and keeps others out until the value returned is dropped. `None`: a file system
    /// outside a zone, which this process holds by flock.
    pub fn require_nobody(&self, what: &str) -> anyhow::Result<Option<KeptOut>> {
        // Before others are kept out: a mount that has just been unmounted may still leave.
        if self.is_zone() {
            let busy = || std::io::Error::from_raw_os_error(libc::EAGAIN);
            await_serving(|| {
                if self.is_in_use().map_err(std::io::Error::other)? { Err(busy()) } else { Ok(()) }
            })?;
        }
        let kept_out = match &self.kind {
            Kind::Zone { zone, .. } => Some(zone.keep_members_out()?),
            Kind::Bare { .. } => None,
        };
        let alive = self.alive()?;
        if !alive.is_empty() {
            let at = self.path.display();
            if !self.is_zone() {
                bail!("{at}: is mounted; {what} again once it is not. {}", self.how_to_end());
            }
            bail!(
                "{at}: {} could mount it at any moment; have them leave the zone first, then {what} again",
                alive.join(", ")
            );
        }
        Ok(kept_out)
    }

    /// Clears the magic so that no member can mount the file system; if one has mounted it, restores the magic.
    pub fn retire(&self, what: &str, force: bool) -> anyhow::Result<()> {
        self.require_unused(what, force)?;
        let area = self.area()?;
        let magic = area.word(0).unwrap_or_default();
        let store = |magic| area.store_word(0, magic).then_some(()).context("the area can't be written");
        store(0)?;
        // A member that mounts sets its bit before it looks for a file system: the bit is seen here, or it finds none.
        fence(Ordering::SeqCst);
        self.require_unused(what, force).or_else(|used| store(magic).and(Err(used)))
    }

    /// Becomes a member, with this name if that can be chosen, and returns the area with this incarnation. A file without a zone has no members: the
    /// process is alone, and recovers all former members.
    pub fn join(&self, name: Name<'_>) -> anyhow::Result<(Area, Option<Joined>)> {
        let zone = match &self.kind {
            Kind::Zone { zone, inside: true, .. } => return self.join_inside(zone, name),
            Kind::Zone { zone, .. } => zone,
            Kind::Bare { area, file } => {
                self.fill_holes()?;
                let at = self.path.display();
                if !await_serving(|| byte_lock(file, SERVING, libc::F_OFD_SETLK, libc::F_WRLCK).map(drop))
                    .with_context(|| format!("{at}: locking"))?
                {
                    bail!(
                        "{at}: is mounted already; a file system outside a zone has one user at a time. {}",
                        self.how_to_end()
                    );
                }
                rustix::fs::flock(file, FlockOperation::LockExclusive)
                    .with_context(|| format!("{at}: waiting for its last user to end"))?;
                return Ok((area.lone(), None));
            }
        };
        let (id, liveness) = self.claim(zone, name)?;
        let membership = zone.join_claimed(id, liveness)?;
        let rung = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let ring = Arc::clone(&rung);
        let bell = Bell::enter(zone, id, move || {
            // A full counter is rung already.
            let _full = rustix::io::write(&ring, &1u64.to_ne_bytes());
        })?;
        let ringing = bell.map_or(Ringing::Nothing, |bell| Ringing::Bell(Arc::new(bell)));
        let joined =
            Joined { zone: Arc::clone(zone), membership: Some(membership), ringing, rung, inside: false };
        Ok((self.area_of(joined.incarnation())?, Some(joined)))
    }

    /// Takes a slot of the zone, in which nothing is granted yet.
    pub(crate) fn claim(&self, zone: &Zone, name: Name<'_>) -> anyhow::Result<(MemberId, Liveness)> {
        self.fill_holes()?;
        let (id, liveness) = name.claim(zone)?;
        zone.require_at(&self.path)?;
        let area = self.area()?;
        // Grants of the slot's former member are not for this one. A file system of another version, which may have them elsewhere, is refused when it is
        // opened.
        if fsck::expect_known(&area).is_ok() && !crate::account::revoke(&area, id.index()) {
            bail!("{}: the area is too small for a file system", self.path.display());
        }
        Ok((id, liveness))
    }

    /// Returns the zone, if a kernel could mount it by its memory; or why not.
    pub(crate) fn for_kernel(&self) -> Result<&Arc<Zone>, &'static str> {
        let (zone, area) = match &self.kind {
            Kind::Bare { .. } => return Err("it is a file system outside of a zone"),
            Kind::Zone { inside: true, .. } => return Err("it is in a device of this VM"),
            Kind::Zone { zone, area, .. } => (zone, area),
        };
        let magic = rustix::fs::fstatfs(zone).map_or(0, |s| s.f_type);
        if ![libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC].contains(&magic) {
            return Err("its file is neither on tmpfs nor on hugetlbfs");
        }
        if zone.area(AreaType::Files, None).ok().as_ref() != Some(area) {
            return Err("the kernel mounts a zone's first area of files");
        }
        Ok(zone)
    }

    /// Waits until no other process changes what members are granted, and holds these off until the value returned is dropped. `None`: no zone.
    pub fn hold_grants(&self) -> anyhow::Result<Option<tombolo_zone::GrantsHeld>> {
        match &self.kind {
            Kind::Zone { zone, .. } => Ok(Some(zone.hold_grants()?)),
            Kind::Bare { .. } => Ok(None),
        }
    }

    /// Called after an unmount: the file of a bare file system stays locked only until it is written back.
    pub fn stop_serving(&self) -> std::io::Result<()> {
        match &self.kind {
            Kind::Bare { file, .. } => byte_lock(file, SERVING, libc::F_OFD_SETLK, libc::F_UNLCK).map(drop),
            Kind::Zone { .. } => Ok(()),
        }
    }

    /// Takes the slot of the VM in which this process runs.
    fn join_inside(&self, zone: &Arc<Zone>, name: Name<'_>) -> anyhow::Result<(Area, Option<Joined>)> {
        let registers = Registers::of(zone)?;
        let member = match name {
            Name::Member(name) => Some(name),
            Name::Process(_) => None,
        };
        let id = pci::slot(zone, registers.as_ref(), member)?;
        if zone.member(id)?.rights != Rights::READ_WRITE {
            bail!("zone {}: this VM may only read it; mount it with --read-only", zone.name());
        }
        let membership = zone.occupy(id)?;
        let rung = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let ringing = registers.map_or(Ringing::Nothing, |r| Ringing::Registers(Arc::new(r)));
        let joined =
            Joined { zone: Arc::clone(zone), membership: Some(membership), ringing, rung, inside: true };
        Ok((self.area_of(joined.incarnation())?, Some(joined)))
    }
}
