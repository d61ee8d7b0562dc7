// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones as the supervisor holds them: the one module that knows the crate `tombolo-zone`. The supervisor owns each zone,
//! keeps a slot for each member, whose QEMU holds the member's liveness, and declares it dead when that has ended.
//!
//! A shim keeps the zone's memory, the owner's lock, the doorbells' connections and what the owner knows, so the next supervisor goes on with them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tombolo_brief::child::leave_sockets;
use tombolo_calls::hello::Geometry;
use tombolo_calls::zone::{Area, RING};
use tombolo_zone::doorbell::store::{Kept, Store};
use tombolo_zone::doorbell::{DoorbellServer, Event};
use tombolo_zone::numa::Nodes;
use tombolo_zone::zone::handover::ZoneState;
use tombolo_zone::{AreaConfig, AreaType, Liveness, MemberId, Role, Zone, ZoneConfig};

use crate::compose::{Backing, Rights, Size, ZoneSpec, ZoneUse};
use crate::qemu::start::no_process;
use crate::shim::handle::Safe;
use crate::shim::{RECORD, Shim};

/// The names of a zone's memory and of its owner's lock in a shim.
const MEMORY: &str = "memory";
const LOCK: &str = "lock";

/// Size of the huge pages of `backing = "hugetlb"`, in bytes.
const HUGE_PAGE: u64 = 2 << 20;

/// A zone of a running project.
#[derive(Debug)]
pub struct HostZone {
    name: String,
    spec: ZoneSpec,
    zone: Arc<Zone>,
    bells: DoorbellServer,
    members: Mutex<BTreeMap<String, Held>>,
    place: Place,
    /// The process of the shim that keeps it, and what that has of it.
    kept_by: AtomicU32,
    saved: Mutex<Option<Record>>,
}

#[derive(Debug)]
struct Held {
    id: MemberId,
    /// Let go after the member's death has been declared. `None`: its QEMU alone holds it.
    liveness: Option<Liveness>,
}

/// What the owner of a zone knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    name: String,
    spec: ZoneSpec,
    zone: ZoneState,
    members: Vec<(String, MemberId)>,
}

/// The place in a shim in which a zone is kept.
#[derive(Clone, Debug)]
pub struct Place {
    safe: Arc<Safe>,
    /// The begin of the names.
    prefix: String,
}

impl Place {
    /// All of a shim.
    pub fn all(safe: Arc<Safe>) -> Place {
        Place { safe, prefix: String::new() }
    }

    /// A part of a shim.
    pub fn part(safe: &Arc<Safe>, name: &str) -> Place {
        Place { safe: safe.clone(), prefix: format!("{name}/") }
    }

    fn name(&self, of: &str) -> String {
        format!("{}{of}", self.prefix)
    }

    fn get(&self, of: &str) -> anyhow::Result<OwnedFd> {
        self.safe.shim().get(&self.name(of))
    }

    fn record<T: DeserializeOwned>(&self, of: &str) -> anyhow::Result<T> {
        self.safe.shim().record(&self.name(of))
    }

    /// Removes what is kept.
    fn clear(&self) -> anyhow::Result<()> {
        let shim = self.safe.shim();
        shim.remove(shim.kept()?.into_iter().filter(|name| name.starts_with(&self.prefix)).collect())
    }
}

/// Keeps the clients of a zone's doorbell server.
struct Bells {
    place: Place,
    /// The names of each client's descriptors.
    names: BTreeMap<u16, Vec<String>>,
}

/// The name of the shim of a zone of the compose file.
pub fn shim_of(zone: &str) -> String {
    format!("zone-{zone}")
}

/// Checks that this program can go on with a zone of the compose file.
///
/// # Errors
/// It can't read what the shim keeps.
pub fn check(shim: &Shim) -> anyhow::Result<()> {
    shim.record::<Record>(RECORD).map(drop)
}

/// The begin of the names of doorbells, and that of the next peer's id.
const BELL: &str = "bell.";
const NEXT_PEER: &str = "next-peer";

impl Store for Bells {
    fn next_peer(&mut self, next: Option<u16>) {
        said(self.place.safe.shim().put_record(&self.place.name(NEXT_PEER), &next));
    }

    fn joined(&mut self, client: &Kept, fds: &[BorrowedFd<'_>]) {
        let name = |n| self.place.name(&format!("{BELL}{}.{}.{n}", client.peer, client.member));
        let named: Vec<(String, BorrowedFd<'_>)> =
            (0..fds.len()).map(name).zip(fds.iter().copied()).collect();
        said(self.place.safe.shim().put(&named));
        self.names.insert(client.peer, named.into_iter().map(|(name, _)| name).collect());
    }

    fn left(&mut self, peer: u16) {
        if let Some(names) = self.names.remove(&peer) {
            said(self.place.safe.shim().remove(names));
        }
    }
}

/// A shim that has died is followed by another one, in which all is kept anew ([`HostZone::tend`]).
fn said(kept: anyhow::Result<()>) {
    if let Err(e) = kept {
        crate::say!("{e:#}");
    }
}

/// A client with its descriptors.
type KeptClient = (Kept, Vec<OwnedFd>);

impl Bells {
    /// The clients that an earlier supervisor has kept.
    fn find(place: Place) -> anyhow::Result<(Bells, Vec<KeptClient>)> {
        let shim = place.safe.shim();
        let mut found: BTreeMap<(u16, u32), Vec<String>> = BTreeMap::new();
        // In the order of their names, so that a client's connection comes before its vectors.
        for name in shim.kept()? {
            let numbers = name.strip_prefix(&place.name(BELL)).map(|rest| rest.split('.'));
            let Some(mut numbers) = numbers else { continue };
            let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
            if let (Some(peer), Some(member)) = (next().and_then(|peer| u16::try_from(peer).ok()), next()) {
                found.entry((peer, member)).or_default().push(name);
            }
        }
        let mut bells = Bells { place, names: BTreeMap::new() };
        let mut kept = Vec::new();
        for ((peer, member), names) in found {
            let Some(member) = MemberId::new(member) else { continue };
            let fds = names.iter().map(|name| shim.get(name)).collect::<anyhow::Result<Vec<_>>>()?;
            kept.push((Kept { peer, member }, fds));
            bells.names.insert(peer, names);
        }
        Ok((bells, kept))
    }
}

/// The descriptors by which a VM becomes a member.
#[derive(Debug)]
pub struct Invitation {
    /// The zone's identity.
    pub uuid: String,
    /// The zone's memory.
    pub memory: OwnedFd,
    /// Its size in bytes.
    pub size: u64,
    /// The VM can't write to it: QEMU maps it read-only.
    pub read_only: bool,
    /// A connection to the zone's doorbell server.
    pub doorbell: UnixStream,
    /// Holds the member alive as long as QEMU has it.
    pub liveness: Option<OwnedFd>,
}

impl HostZone {
    /// Makes the zone, with a file system if it wants one, or takes over the one that its file holds. Memory that is made comes from these nodes of the
    /// host, or from any where they can't give it.
    ///
    /// # Errors
    /// Names the zone's key and the remedy; a zone that another process holds is 'in use'.
    pub fn open(
        name: &str,
        spec: &ZoneSpec,
        nodes: Option<Nodes>,
        folder: &Path,
    ) -> anyhow::Result<HostZone> {
        let config = ZoneConfig::new(name, spec.size.0);
        let (zone, new) = match &spec.backing {
            Backing::Memfd => (create(&config, nodes)?, true),
            Backing::Hugetlb => {
                let config = config.backing(tombolo_zone::Backing::Hugetlb(HUGE_PAGE));
                (create(&config, nodes).with_context(|| format!("zone.{name}.backing"))?, true)
            }
            Backing::File(path) if path.exists() => (take_over(name, spec, path)?, false),
            Backing::File(path) => {
                let config = config.backing(tombolo_zone::Backing::File(path.clone()));
                (Zone::create(&config).with_context(|| format!("zone.{name}.backing"))?, true)
            }
        };
        match (spec.files, new) {
            (true, true) => files_command(name, &zone, "mkfs", &["--label".to_owned(), name.to_owned()])?,
            // One that is damaged or of another version is found here, before a guest stumbles on it.
            (true, false) => files_command(name, &zone, "df", &[])?,
            (false, _) => {}
        }
        let safe = Arc::new(Safe::start(folder, &shim_of(name))?);
        HostZone::serve(name, spec.clone(), zone, Place::all(safe.clone())).inspect_err(|_| safe.shim().end())
    }

    /// Makes the zone through which a VM's programs call an accelerator.
    ///
    /// # Errors
    /// When memory or descriptors run out.
    pub fn for_calls(accelerator: &str, size: u64, place: Place) -> anyhow::Result<HostZone> {
        let calls = AreaConfig { kind: AreaType::Calls, name: "calls".into(), size: None };
        let zone = Zone::create(&ZoneConfig::new(accelerator, size).areas(vec![calls]))?;
        let spec = ZoneSpec { size: Size(size), backing: Backing::Memfd, files: false };
        HostZone::serve(accelerator, spec, zone, place)
    }

    /// Makes the channels of a zone for calls ready for a server in another VM, which comes later.
    ///
    /// # Errors
    /// When there is no memory to map it.
    pub fn prepare_calls(&self, channels: u32, window: u64) -> anyhow::Result<Area> {
        let place = self.zone.area(AreaType::Calls, None)?;
        let memory = File::from(self.zone.as_fd().try_clone_to_owned()?);
        let geometry = Geometry { ring: RING, window };
        Ok(Area::prepare(memory, place.offset, place.len, channels, geometry)?)
    }

    /// Rings a member that has a doorbell.
    ///
    /// # Errors
    /// Those of the system.
    pub fn ring(&self, member: &str) -> anyhow::Result<()> {
        let Some(id) = self.lock().get(member).map(|held| held.id) else { return Ok(()) };
        Ok(self.bells.ring_member(id)?)
    }

    /// Goes on with the channels that an earlier supervisor has prepared.
    ///
    /// # Errors
    /// When there is no memory to map it.
    pub fn resume_calls(&self, channels: u32, window: u64) -> anyhow::Result<Area> {
        let place = self.zone.area(AreaType::Calls, None)?;
        let memory = File::from(self.zone.as_fd().try_clone_to_owned()?);
        Ok(Area::resume(memory, place.offset, place.len, channels, Geometry { ring: RING, window })?)
    }

    /// Goes on with a zone that an earlier supervisor has made.
    ///
    /// # Errors
    /// When it is not all there, or there is no room for it.
    pub fn adopt(place: Place) -> anyhow::Result<HostZone> {
        let record: Record = place.record(RECORD)?;
        let Record { name, spec, zone, members } = record.clone();
        let zone = Arc::new(Zone::resume(zone, place.get(MEMORY)?, place.get(LOCK)?)?);
        let next_peer = place.record(NEXT_PEER).unwrap_or(Some(0));
        let (store, kept) = Bells::find(place.clone())?;
        let (bells, events) = DoorbellServer::resume(zone.clone(), kept, next_peer, Box::new(store))?;
        listen(&name, events)?;
        // The QEMU of each holds it.
        let members = members.into_iter().map(|(name, id)| (name, Held { id, liveness: None })).collect();
        let (members, kept_by) = (Mutex::new(members), AtomicU32::new(place.safe.shim().pid()));
        Ok(HostZone { name, spec, zone, bells, members, place, kept_by, saved: Mutex::new(Some(record)) })
    }

    fn serve(name: &str, spec: ZoneSpec, zone: Zone, place: Place) -> anyhow::Result<HostZone> {
        let zone = Arc::new(zone);
        let store = Bells { place: place.clone(), names: BTreeMap::new() };
        let (bells, events) = DoorbellServer::start_with(zone.clone(), Box::new(store))?;
        listen(name, events)?;
        let (members, kept_by, saved) = (Mutex::default(), AtomicU32::default(), Mutex::default());
        let zone = HostZone { name: name.to_owned(), spec, zone, bells, members, place, kept_by, saved };
        zone.put()?;
        Ok(zone)
    }

    /// Has the shim keep the zone.
    fn put(&self) -> anyhow::Result<()> {
        let Some(lock) = self.zone.owners_lock() else { return Ok(()) };
        let named = [(self.place.name(MEMORY), self.zone.as_fd()), (self.place.name(LOCK), lock)];
        let shim = self.place.safe.shim();
        shim.put(&named)?;
        self.kept_by.store(shim.pid(), Ordering::Release);
        self.save()
    }

    /// Has the shim keep what has changed.
    fn save(&self) -> anyhow::Result<()> {
        let Some(zone) = self.zone.state() else { return Ok(()) };
        let members = self.lock().iter().map(|(name, held)| (name.clone(), held.id)).collect();
        let record = Record { name: self.name.clone(), spec: self.spec.clone(), zone, members };
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.as_ref() != Some(&record) {
            self.place.safe.shim().put_record(&self.place.name(RECORD), &record)?;
            *saved = Some(record);
        }
        Ok(())
    }

    /// Gives the shim its socket again, where the project's folder has vanished.
    ///
    /// # Errors
    /// See [`Shim::listen_again`].
    pub fn listen_again(&self) -> anyhow::Result<()> {
        self.place.safe.shim().listen_again()
    }

    /// Ends the zone: what runs in it has ended, or shares its memory on without an owner.
    pub fn end(&self) {
        if self.place.prefix.is_empty() {
            self.place.safe.shim().end();
        } else if let Err(e) = self.place.clear() {
            crate::say!("the zone '{}': {e:#}", self.name);
        }
    }

    /// Returns whether a process has truncated the zone's file.
    pub fn is_lost(&self) -> bool {
        self.zone.is_lost()
    }

    /// The zone's table of the compose file.
    pub fn spec(&self) -> &ZoneSpec {
        &self.spec
    }

    /// The zone's identity, which is what a guest names when it mounts it.
    pub fn uuid(&self) -> String {
        self.zone.uuid().to_string()
    }

    /// The path of the zone's memory in this process, at which other commands open it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.zone.as_fd().as_raw_fd())
    }

    /// The slot of a member that is there.
    pub fn slot(&self, member: &str) -> Option<u32> {
        self.lock().get(member).map(|held| held.id.index())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Held>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a slot for a VM, whose QEMU gets the descriptor by which the VM is held, before the memory: whoever is killed, the zone's other members know when the
    /// VM has ended.
    ///
    /// # Errors
    /// When the zone is full or has a member of this name, or what the file says of limits and subtree can't be had.
    pub fn invite(&self, member: &str, zone_use: &ZoneUse) -> anyhow::Result<Invitation> {
        let granted = match zone_use.rights {
            Rights::ReadWrite => tombolo_zone::Rights::READ_WRITE,
            Rights::ReadOnly => tombolo_zone::Rights::READ_ONLY,
        };
        // Its shim may have died since the last look.
        self.keep()?;
        let id = self.zone.invite(member, Role::Vm, granted)?;
        let liveness = self.zone.hold(id)?;
        let doorbell = self.bells.connect(id)?;
        let read_only = zone_use.rights == Rights::ReadOnly;
        if read_only {
            // It can't write into its slot that it is there.
            self.zone.activate(id)?;
        }
        let memory =
            if read_only { self.zone.read_only_fd()? } else { self.zone.as_fd().try_clone_to_owned()? };
        self.lock().insert(member.to_owned(), Held { id, liveness: Some(liveness) });
        self.save()?;
        if self.spec.files {
            if let Err(e) = self.grant(member, zone_use) {
                self.gone(member);
                return Err(e.context(format!("vm.{member}")));
            }
        }
        let copied = self.copy_liveness(member);
        let liveness = copied.inspect_err(|_| self.gone(member))?;
        Ok(Invitation { uuid: self.uuid(), memory, size: self.zone.size(), read_only, doorbell, liveness })
    }

    fn copy_liveness(&self, member: &str) -> anyhow::Result<Option<OwnedFd>> {
        let members = self.lock();
        let Some(Held { id, liveness: Some(liveness) }) = members.get(member) else { return Ok(None) };
        let copy = liveness.as_fd().try_clone_to_owned()?;
        self.zone.tell_held_by_vm(*id)?;
        Ok(Some(copy))
    }

    /// Grants limits and a subtree, or takes back the grant of the member that had the slot before.
    fn grant(&self, member: &str, zone_use: &ZoneUse) -> anyhow::Result<()> {
        let mut args = vec![member.to_owned()];
        match zone_use {
            ZoneUse { subtree: None, bytes: None, inodes: None, .. } => args.push("--none".to_owned()),
            ZoneUse { subtree, bytes, inodes, .. } => {
                args.extend(subtree.iter().map(|path| format!("--subtree={path}")));
                args.extend(bytes.iter().map(|size| format!("--bytes={}", size.0)));
                args.extend(inodes.iter().map(|n| format!("--inodes={n}")));
            }
        }
        files_command(&self.name, &self.zone, "grant", &args)
    }

    /// A member has gone, with or without saying so: its epoch ends and the others are told. Its memory must be out of its
    /// reach, or it has unmounted.
    pub fn gone(&self, member: &str) {
        let Some(Held { id, liveness }) = self.lock().remove(member) else { return };
        // Its QEMU, which may go on without the zone, has a copy of the descriptor, and so may a process that it has started.
        let (buried, ended) = (self.bury(id), liveness.map_or(Ok(()), Liveness::end));
        if let Err(e) = self.save() {
            crate::say!("zone '{}': {e:#}", self.name);
        }
        for e in buried.err().into_iter().chain(ended.err().map(anyhow::Error::from)) {
            crate::say!("zone '{}', member '{member}': {e:#}", self.name);
        }
    }

    /// Holds a member with the descriptor by which an earlier supervisor has held it.
    pub fn hold_again(&self, member: &str, liveness: OwnedFd) {
        if let Some(held) = self.lock().get_mut(member) {
            held.liveness = Some(Liveness::resume(liveness));
        }
    }

    /// As [`HostZone::gone`], for one that no process holds any more. Returns whether that is so.
    pub fn gone_if_ended(&self, member: &str) -> bool {
        let Some(id) = self.lock().get(member).map(|held| held.id) else { return true };
        let has_ended = self.zone.member(id).is_ok_and(|member| !member.alive);
        if has_ended {
            self.gone(member);
        }
        has_ended
    }

    fn bury(&self, id: MemberId) -> anyhow::Result<()> {
        self.bells.unlisten(id)?;
        self.zone.declare_dead(id)?;
        Ok(self.bells.ring_all()?)
    }

    /// Does the owner's work of each second: stamps its heartbeat, declares members dead that ended without leaving, such as a
    /// killed process of the host, and writes into the member table again what a member has changed there.
    ///
    /// # Errors
    /// When the zone's memory can't be reached.
    pub fn tend(&self) -> anyhow::Result<()> {
        if self.zone.is_lost() {
            return Ok(());
        }
        self.keep()?;
        self.zone.beat()?;
        if self.zone.is_lost() {
            // Said once: the next look ends above.
            crate::say!(
                "zone '{}': a process has truncated its file; its VMs lose it, or end. tombolo down && tombolo up",
                self.name
            );
            return Ok(());
        }
        if !self.zone.reap()?.is_empty() {
            self.bells.ring_all()?;
        }
        self.bells.restore(&self.zone)?;
        self.save()
    }

    /// Puts the zone into another shim where that of it has died.
    fn keep(&self) -> anyhow::Result<()> {
        self.place.safe.renew()?;
        if self.place.safe.shim().pid() == self.kept_by.load(Ordering::Acquire) {
            return Ok(());
        }
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.put()?;
        Ok(self.bells.keep_again()?)
    }

    /// The VMs for which slots are kept.
    pub fn vms(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Everyone who is in the zone, VMs and processes of the host.
    pub fn members(&self) -> Vec<String> {
        let members = self.zone.members().unwrap_or_default();
        members.into_iter().filter(|m| m.alive).map(|m| m.name).collect()
    }
}

/// Says comings and goings of doorbells in the log; the thread ends with the server.
fn listen(name: &str, events: Receiver<Event>) -> std::io::Result<()> {
    let listen = move || {
        for event in events {
            crate::say!("doorbell: {event:?}");
        }
    };
    crate::thread::start(&format!("zone-{name}"), listen).map(drop)
}

/// Makes a zone, if possible on these nodes.
fn create(config: &ZoneConfig, nodes: Option<Nodes>) -> tombolo_zone::Result<Zone> {
    if let Some(nodes) = nodes {
        match Zone::create(&config.clone().nodes(nodes)) {
            Err(e) => crate::say!("the zone '{}' is where the kernel puts it: {e}", config.name),
            made => return made,
        }
    }
    Zone::create(config)
}

fn take_over(name: &str, spec: &ZoneSpec, path: &Path) -> anyhow::Result<Zone> {
    let zone = match Zone::take_over(path) {
        Err(tombolo_zone::Error::InUse { by, .. }) => anyhow::bail!(
            "zone.{name}: {} is in use by {by}; unmount it where it is mounted ('mount-7' is the mount of process 7), take the project down that has it \
             (tombolo ps --all), or name another file",
            path.display()
        ),
        other => other.with_context(|| format!("zone.{name}.backing"))?,
    };
    if zone.size() != spec.size.0 {
        anyhow::bail!(
            "zone.{name}.size is {}, but the zone in {} has {}; write that, or name another file",
            spec.size,
            path.display(),
            Size(zone.size())
        );
    }
    Ok(zone)
}

/// Runs `tombolo files` on the zone's memory, since this part does not know file systems.
fn files_command(name: &str, zone: &Zone, what: &str, args: &[String]) -> anyhow::Result<()> {
    let memory = zone.as_fd().try_clone_to_owned()?;
    let inherited = crate::child::inherited_path(&memory);
    let mut command = crate::child::own_program();
    command.args(["files", what]).arg(&inherited).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    crate::child::tie(&mut command, std::slice::from_ref(&memory));
    leave_sockets(&mut command);
    let output = command.stderr(Stdio::piped()).output();
    let output = output.map_err(|e| no_process(&e)).context("'tombolo files' can't be run")?;
    if !output.status.success() {
        let words = crate::child::words(&output).replace(&inherited, name);
        anyhow::bail!("zone.{name}.files: {words}");
    }
    Ok(())
}
