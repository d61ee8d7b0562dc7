// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones as the supervisor holds them: the one module that knows the crate `tombolo-zone`. The supervisor owns each zone,
//! keeps a slot for each member, holds a member's liveness while its QEMU runs, and declares it dead when that has ended.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tombolo_brief::child::leave_sockets;
use tombolo_calls::hello::Geometry;
use tombolo_calls::zone::{Area, RING};
use tombolo_zone::doorbell::handover::{Paused, ServerState};
use tombolo_zone::doorbell::{DoorbellServer, Event};
use tombolo_zone::keep::{Keep, Kept};
use tombolo_zone::numa::Nodes;
use tombolo_zone::zone::handover::ZoneState as ZoneMemory;
use tombolo_zone::{AreaConfig, AreaType, Liveness, MemberId, Role, Zone, ZoneConfig};

use crate::compose::{Backing, Rights, Size, ZoneSpec, ZoneUse};
use crate::project::losses::Losses;
use crate::qemu::start::no_process;

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
}

#[derive(Debug)]
struct Held {
    id: MemberId,
    /// Let go after the member's death has been declared. `None`: its QEMU alone holds it.
    liveness: Option<Liveness>,
}

/// The state of a zone that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostZoneState {
    name: String,
    spec: ZoneSpec,
    zone: ZoneMemory,
    bells: ServerState,
    members: Vec<(String, MemberId, Option<Kept>)>,
}

/// The descriptors by which a VM becomes a member.
#[derive(Debug)]
pub struct Invitation {
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
    pub fn open(name: &str, spec: &ZoneSpec, nodes: Option<Nodes>) -> anyhow::Result<HostZone> {
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
        HostZone::serve(name, spec.clone(), zone)
    }

    /// Makes the zone through which a VM's programs call an accelerator.
    ///
    /// # Errors
    /// When memory or descriptors run out.
    pub fn for_calls(accelerator: &str, size: u64) -> anyhow::Result<HostZone> {
        let calls = AreaConfig { kind: AreaType::Calls, name: "calls".into(), size: None };
        let zone = Zone::create(&ZoneConfig::new(accelerator, size).areas(vec![calls]))?;
        let spec = ZoneSpec { size: Size(size), backing: Backing::Memfd, files: false };
        HostZone::serve(accelerator, spec, zone)
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

    /// Goes on with the channels that the program before has prepared.
    ///
    /// # Errors
    /// When there is no memory to map it.
    pub fn resume_calls(&self, channels: u32, window: u64) -> anyhow::Result<Area> {
        let place = self.zone.area(AreaType::Calls, None)?;
        let memory = File::from(self.zone.as_fd().try_clone_to_owned()?);
        Ok(Area::resume(memory, place.offset, place.len, channels, Geometry { ring: RING, window })?)
    }

    /// Lets the zone's doorbells stand still until what is returned is dropped, and notes what the next program needs.
    ///
    /// # Errors
    /// When the doorbell server has ended.
    pub fn hand_over(&self, keep: &mut Keep) -> anyhow::Result<(HostZoneState, Paused)> {
        let (bells, paused) = self.bells.pause(keep)?;
        let members = self.lock();
        let members = members.iter().map(|(name, held)| {
            (name.clone(), held.id, held.liveness.as_ref().map(|liveness| keep.add(liveness)))
        });
        let members = members.collect();
        let zone = ZoneMemory::of(&self.zone, keep);
        Ok((HostZoneState { name: self.name.clone(), spec: self.spec.clone(), zone, bells, members }, paused))
    }

    /// Goes on with a zone of the program before. Members whose doorbell can't be taken over are noted in `losses`.
    ///
    /// # Errors
    /// When the zone's memory can't be had, or no thread.
    pub fn take_over(left: HostZoneState, losses: &mut Losses) -> anyhow::Result<HostZone> {
        let HostZoneState { name, spec, zone, bells, members: left } = left;
        let zone = Arc::new(zone.resume()?);
        let mut members = BTreeMap::new();
        for (member, id, liveness) in left {
            let liveness = match liveness.map(Kept::take) {
                Some(Ok(fd)) => Some(Liveness::resume(fd)),
                // Its QEMU has the lock, too.
                _ if zone.member(id)?.held_by_vm => None,
                // A lock whose descriptor is gone is free, and is taken anew.
                _ => Some(zone.hold(id)?),
            };
            members.insert(member, Held { id, liveness });
        }
        let (bells, events, lost) = DoorbellServer::resume(zone.clone(), bells)?;
        for lost in lost {
            let vm = members.iter().find(|(_, held)| held.id == lost.member).map(|(vm, _)| vm);
            match vm {
                Some(vm) => losses.of_vm(vm, &format!("its doorbell in the zone '{name}'"), lost.why),
                // A process of the host finds its connection closed.
                None => crate::say!("zone '{name}': the doorbell of a process is lost: {}", lost.why),
            }
        }
        listen(&name, events)?;
        Ok(HostZone { name, spec, zone, bells, members: Mutex::new(members) })
    }

    fn serve(name: &str, spec: ZoneSpec, zone: Zone) -> anyhow::Result<HostZone> {
        let zone = Arc::new(zone);
        let (bells, events) = DoorbellServer::start(zone.clone())?;
        listen(name, events)?;
        Ok(HostZone { name: name.to_owned(), spec, zone, bells, members: Mutex::new(BTreeMap::new()) })
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

    /// Keeps a slot for a VM and holds it alive until [`HostZone::gone`].
    ///
    /// # Errors
    /// When the zone is full or has a member of this name, or what the file says of limits and subtree can't be had.
    pub fn invite(&self, member: &str, zone_use: &ZoneUse) -> anyhow::Result<Invitation> {
        let granted = match zone_use.rights {
            Rights::ReadWrite => tombolo_zone::Rights::READ_WRITE,
            Rights::ReadOnly => tombolo_zone::Rights::READ_ONLY,
        };
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
        if self.spec.files {
            if let Err(e) = self.grant(member, zone_use) {
                self.gone(member);
                return Err(e.context(format!("vm.{member}")));
            }
        }
        Ok(Invitation { memory, size: self.zone.size(), read_only, doorbell, liveness: None })
    }

    /// As [`Self::invite`], for a VM whose QEMU gets the descriptor by which the VM is held, before the memory: if this process is killed, the zone's other
    /// members know when the VM has ended.
    ///
    /// # Errors
    /// Those of [`Self::invite`].
    pub fn invite_held_by_qemu(&self, member: &str, zone_use: &ZoneUse) -> anyhow::Result<Invitation> {
        let invitation = self.invite(member, zone_use)?;
        let copied = self.copy_liveness(member);
        let liveness = copied.inspect_err(|_| self.gone(member))?;
        Ok(Invitation { liveness, ..invitation })
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
        for e in buried.err().into_iter().chain(ended.err().map(anyhow::Error::from)) {
            crate::say!("zone '{}', member '{member}': {e:#}", self.name);
        }
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
        Ok(self.bells.restore(&self.zone)?)
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
