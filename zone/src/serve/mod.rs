// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones for VMs that tombolo does not start: a server per zone.
//!
//! The server owns the zone and listens for each VM that has a slot in the member table. When a process connects to a VM's socket, the server locks the VM's slot with
//! that process's own descriptor of the zone (pidfd_getfd(2)), which QEMU keeps until its end. So the kernel frees the slot with the VM's end, whatever has become of the
//! server; a server that is started again finds its VMs by these locks. Where the kernel does not let the server have the descriptor, the VM is *assumed* to
//! live: until the server sees the end of its process, and without that until the host's next boot.
//!
//! When a VM has ended, the server declares it dead, tells the other members, and keeps the slot for the VM's next start. `tombolo zone invite` and `expel` write and
//! remove a record of the VM in the zone's [`room`]; the server reads the records once a second and needs no commands. It ends when no VM is invited any
//! more. The VMs that the member table had when the server started are invited, too; afterwards the table, which each member can write, decides nothing.
//!
//! - [`room`]: the folder with the VMs' sockets and invitations.
//! - [`access`]: permissions of the sockets.
//! - [`invitation`]: a VM's settings for joining, as QEMU's arguments and as libvirt's XML.
//! - [`log`]: lines that no reader holds up.
//! - [`start`]: makes sure that a zone has a server.

pub mod access;
pub mod invitation;
pub mod log;
pub mod room;
pub mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::doorbell::process::Process;
use crate::doorbell::{DoorbellServer, Event, Knock};
use crate::zone::Holder;
use crate::{Error, MemberId, MemberState, Result, Rights, Role, Zone};
use room::{Room, Serving};

/// Interval at which the server reads the invitations, looks which VMs have ended and stamps the owner's heartbeat.
const TICK: Duration = Duration::from_secs(1);
/// Interval while something is about to happen: a VM opens the zone, or ends.
const SOON: Duration = Duration::from_millis(10);
/// For a process that has connected to open the zone. QEMU does so before it needs an answer, but may first fill the VM's own memory.
const OPENING: Duration = Duration::from_secs(1);

/// A VM that was let in and has not ended.
#[derive(Default)]
struct Guest {
    /// Its slot is not locked by its process: no lock tells of its end.
    assumed: bool,
    /// Of one that is assumed. `None`: it can't be told, or it has ended and left its connection to another one, which is the VM.
    process: Option<Process>,
    /// The connections that were let in and of whose end nothing was heard.
    connections: u32,
}

impl Guest {
    fn may_have_ended(&self) -> bool {
        self.assumed && self.process.as_ref().is_none_or(Process::has_ended)
    }

    /// Returns whether this is the process that was let in. No two processes that live have one number.
    fn is_of(&self, process: &Process) -> bool {
        let own = self.process.as_ref().filter(|own| !own.has_ended()).and_then(Process::number);
        own.is_some() && own == process.number()
    }
}

/// A VM that is let in, and how, for the log.
type Admitted = (Guest, String);

/// A process that has connected and not opened the zone yet.
struct Comer {
    knock: Knock,
    process: Process,
    since: Instant,
}

/// An invited VM.
struct Invited {
    name: String,
    rights: Rights,
}

/// The server of one zone.
pub struct Server {
    zone: Arc<Zone>,
    bells: DoorbellServer,
    room: Room,
    serving: Serving,
    events: Receiver<Event>,
    /// VMs that have a socket.
    listening: BTreeMap<MemberId, Invited>,
    guests: BTreeMap<MemberId, Guest>,
    comers: BTreeMap<MemberId, Comer>,
    /// The peer ids of VMs that an earlier server has let in: they know their slots by these.
    earlier: BTreeMap<MemberId, u16>,
    /// A doorbell has gone, so that its VM may be about to end.
    hurries: bool,
}

impl Server {
    /// Becomes the owner of the zone in a file and makes the sockets of the invited VMs. VMs of an earlier server go on.
    ///
    /// # Errors
    /// [`Error::InUse`] if a process owns the zone; those of the system.
    pub fn start(path: &Path) -> Result<Server> {
        let zone = Arc::new(Zone::own(path)?);
        let room = Room::of(zone.uuid())?;
        room.take_for(path)?;
        // Before this is known as the zone's server.
        room.clear_sockets()?;
        let serving = room.begin()?;
        let living = zone.members()?.into_iter().filter(|member| member.alive);
        let earlier: BTreeMap<_, _> =
            living.filter_map(|member| Some((member.id, member.doorbell?))).collect();
        let (bells, events) =
            DoorbellServer::start_beside(Arc::clone(&zone), earlier.values().copied().collect())?;
        let (listening, guests, comers) = Default::default();
        let mut server =
            Server { zone, bells, room, serving, events, listening, guests, comers, earlier, hurries: false };
        // Those of the records first: members may have written names into all slots, and names that can't be served.
        let recorded = server.look();
        let adopted = server.adopt();
        let looked = recorded.and(server.look());
        server.serving.has_started()?;
        adopted?;
        if server.listening.is_empty() { looked.map(|()| server) } else { Ok(server) }
    }

    /// Serves until no VM is invited any more. `say` gets a line for each VM that comes or goes.
    ///
    /// # Errors
    /// Those of the system, and a zone whose file was cut short.
    pub fn run(mut self, say: &mut dyn FnMut(String)) -> Result<()> {
        let mut next = Instant::now() + TICK;
        // The last error, which is reported once.
        let mut said: Option<String> = None;
        while !self.listening.is_empty() {
            let soon = self.hurries || !self.comers.is_empty();
            let left = next.saturating_duration_since(Instant::now());
            let done = match self.events.recv_timeout(if soon { left.min(SOON) } else { left }) {
                Ok(event) => self.hear(event, say),
                Err(RecvTimeoutError::Timeout) if Instant::now() < next => {
                    self.welcome(say).and(self.end_those_that_ended(say))
                }
                Err(RecvTimeoutError::Timeout) => {
                    next = Instant::now() + TICK;
                    self.tend(say)
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if self.zone.is_lost() {
                return Err(Error::NotAZone {
                    zone: self.zone.name().to_owned(),
                    why: "a process has truncated its file; its VMs lose it, or end".to_owned(),
                });
            }
            // Invalid values in one member's slot must not end the service for the others.
            let trouble = done.err().map(|e| e.to_string());
            if let Some(trouble) = trouble.as_ref().filter(|t| said.as_ref() != Some(*t)) {
                say(trouble.clone());
            }
            said = trouble.or(said);
        }
        Ok(())
    }

    fn tend(&mut self, say: &mut dyn FnMut(String)) -> Result<()> {
        self.hurries = false;
        self.zone.beat()?;
        let welcomed = self.welcome(say);
        self.lock_late();
        self.end_those_that_ended(say)?;
        if !self.zone.reap()?.is_empty() {
            self.bells.ring_all()?;
        }
        let living = self.zone.members()?.into_iter().filter(|member| member.alive).map(|member| member.id);
        let living: BTreeSet<MemberId> = living.collect();
        self.earlier.retain(|id, _| living.contains(id));
        self.bells.restore_beside(&self.zone, &self.earlier)?;
        self.look().and(welcomed)
    }

    /// Invites the VMs of the member table: the folder of records does not outlive the host's next start, the zone's file does.
    fn adopt(&self) -> Result<()> {
        let known = self.room.invited()?;
        for member in self.zone.members()?.into_iter().filter(|m| m.role == Some(Role::Vm)) {
            // A name that no VM can have is none.
            if crate::member::name_to("", "", &member.name).is_ok() && !known.contains_key(&member.name) {
                self.room.invite(&member.name, member.rights)?;
            }
        }
        Ok(())
    }

    /// Makes a socket for each invited VM, and removes the sockets of expelled ones. A VM that runs can't be expelled: it keeps its doorbell without a record,
    /// where a cleaner of temporary folders has removed that, say.
    fn look(&mut self) -> Result<()> {
        let mut invited = self.room.invited()?;
        let mut done = Ok(());
        let ids: Vec<MemberId> = self.listening.keys().copied().collect();
        for id in ids {
            let name = &self.listening[&id].name;
            let guest = self.guests.get(&id);
            let is_expelled = match invited.get(name) {
                None => guest.is_none() && !self.comers.contains_key(&id),
                Some(Ok(None)) => guest.is_none_or(Guest::may_have_ended),
                Some(_) => false,
            };
            if is_expelled {
                let name = name.clone();
                self.listening.remove(&id);
                self.bells.unlisten(id)?;
                done = done.and(self.forget(id)).and_then(|()| self.room.expel(&name));
                invited.remove(&name);
            }
        }
        for (id, vm) in self.listening.iter_mut().filter(|(id, _)| !self.guests.contains_key(id)) {
            // The rights of one that runs change when it has ended.
            if let Some(Ok(Some(rights))) = invited.get(&vm.name) {
                vm.rights = *rights;
            }
            // What a member wrote into the slots of VMs that don't run; those of running ones are the zone's to restore.
            let there = self.zone.member(*id)?;
            let kept = there.state == MemberState::Invited && there.role == Some(Role::Vm);
            if !there.alive && (!kept || there.name != vm.name || there.rights != vm.rights) {
                done = done.and(self.zone.invite_to(*id, &vm.name, Role::Vm, vm.rights));
            }
        }
        for vm in self.listening.values() {
            done = done.and(invited.remove(&vm.name).map_or(Ok(()), |rights| rights.map(drop)));
        }
        // A name that no socket can have keeps no other VM from its socket.
        for (name, rights) in invited {
            done = done.and(rights.and_then(|rights| self.open(name, rights)));
        }
        done
    }

    /// Frees the slot of a VM that is not invited any more.
    fn forget(&mut self, id: MemberId) -> Result<()> {
        self.guests.remove(&id);
        self.comers.remove(&id);
        self.zone.remove_assumed(id)
    }

    /// Keeps a slot for a VM, and makes its socket. One that an earlier server has let in lives in its slot. `rights`: `None` if it is to be expelled.
    fn open(&mut self, name: String, rights: Option<Rights>) -> Result<()> {
        let members = self.zone.members()?;
        let is_it = |m: &&crate::Member| m.alive && m.role == Some(Role::Vm) && m.name == name;
        let living = members.iter().find(is_it).filter(|m| !self.listening.contains_key(&m.id));
        let (id, rights) = match (living, rights) {
            (Some(there), _) => {
                self.guests.insert(there.id, Guest { assumed: there.assumed, ..Guest::default() });
                (there.id, there.rights)
            }
            (None, Some(rights)) => (self.zone.invite(&name, Role::Vm, rights)?, rights),
            (None, None) => return self.room.expel(&name),
        };
        let socket = self.room.socket(&name);
        self.bells.listen_at_the_door(id, &socket)?;
        access::give(&socket)?;
        self.listening.insert(id, Invited { name, rights });
        Ok(())
    }

    fn hear(&mut self, event: Event, say: &mut dyn FnMut(String)) -> Result<()> {
        match event {
            Event::Knocked { member, guest } => self.knocked(member, guest, say)?,
            // It knows its slot by another id from now on.
            Event::Joined { member, .. } => drop(self.earlier.remove(&member)),
            Event::Left { member, why, .. } => {
                if self.disconnected(member, say)? {
                    say(format!("{}: its doorbell is gone: {why}", self.name(member)));
                }
            }
            Event::NotJoined { member, why } => {
                say(format!("{}: it got no doorbell: {why}", self.name(member)));
                self.disconnected(member, say)?;
            }
            Event::Refused { member, why } => {
                let who = member.map_or_else(|| "an unknown process".to_owned(), |id| self.name(id));
                say(format!("{who}: refused: {why}"));
            }
        }
        Ok(())
    }

    /// Notes that a VM's connection has ended. A VM ends with its process; without its doorbell it polls. If its process is not known, this is its end. Returns whether
    /// it lives.
    fn disconnected(&mut self, id: MemberId, say: &mut dyn FnMut(String)) -> Result<bool> {
        let Some(guest) = self.guests.get_mut(&id) else { return Ok(false) };
        guest.connections = guest.connections.saturating_sub(1);
        if guest.assumed && guest.process.is_none() && guest.connections == 0 {
            self.end_guest(id, say)?;
        }
        self.end_if_ended(id, say)?;
        self.hurries |= self.guests.contains_key(&id);
        Ok(self.guests.contains_key(&id))
    }

    /// A process stands at a VM's socket.
    fn knocked(&mut self, id: MemberId, knock: Knock, say: &mut dyn FnMut(String)) -> Result<()> {
        // Its rights may have changed since the last look. Other VMs that a look has trouble with do not keep this one out.
        let looked = self.look();
        if !self.listening.contains_key(&id) {
            return looked;
        }
        self.end_if_ended(id, say)?;
        if self.comers.contains_key(&id) {
            let why = "another process connects at this moment".to_owned();
            self.let_in(id, knock, Err(why), say)?;
            return looked;
        }
        match knock.process() {
            Ok(Some(process)) => self.receive(id, Comer { knock, process, since: Instant::now() }, say)?,
            Ok(None) => {
                let admitted = self.assume(id, &knock, None, "the kernel does not tell which process it is");
                self.let_in(id, knock, admitted, say)?;
            }
            Err(e) => self.let_in(id, knock, Err(format!("finding its process: {e}")), say)?,
        }
        looked
    }

    /// Looks again whether the processes that have connected have opened the zone.
    fn welcome(&mut self, say: &mut dyn FnMut(String)) -> Result<()> {
        let comers = std::mem::take(&mut self.comers);
        let mut done = Ok(());
        for (id, comer) in comers {
            done = done.and(self.receive(id, comer, say));
        }
        done
    }

    /// Lets a VM in once its process has opened the zone and so can hold the slot.
    fn receive(&mut self, id: MemberId, comer: Comer, say: &mut dyn FnMut(String)) -> Result<()> {
        let why = match self.lock(id, &comer.process) {
            Ok(None) if comer.process.has_ended() => {
                let (knock, why) = (comer.knock, "the process that connected has ended");
                let admitted = self.assume(id, &knock, None, why);
                return self.let_in(id, knock, admitted, say);
            }
            Ok(None) if comer.since.elapsed() < OPENING => {
                self.comers.insert(id, comer);
                return Ok(());
            }
            Ok(None) => format!("it has not opened the zone within {} s", OPENING.as_secs()),
            Ok(Some(guest)) => return self.let_in(id, comer.knock, Ok(guest), say),
            Err(Error::Io { what, cause }) => format!("{what}: {cause}"),
            Err(e) => return self.let_in(id, comer.knock, Err(e.to_string()), say),
        };
        let Comer { knock, process, .. } = comer;
        let admitted = self.assume(id, &knock, Some(process), &why);
        self.let_in(id, knock, admitted, say)
    }

    /// Has a VM's process hold the VM's slot. `None`: it has not opened the zone.
    fn lock(&self, id: MemberId, process: &Process) -> Result<Option<Admitted>> {
        if self.guests.get(&id).is_some_and(|there| there.assumed && !there.is_of(process)) {
            return Err(self.is_taken(id));
        }
        let theirs = process.descriptors_of(self.zone.as_fd());
        let theirs = theirs.map_err(|e| Error::io("the process's descriptors of the zone", e))?;
        for fd in &theirs {
            let held = self.zone.hold_by(id, fd.as_fd())?;
            if held == Holder::Another {
                continue;
            }
            if held == Holder::New && !self.guests.contains_key(&id) {
                self.activate(id)?;
            }
            return Ok(Some((Guest::default(), "which holds its slot".to_owned())));
        }
        if theirs.is_empty() { Ok(None) } else { Err(self.is_taken(id)) }
    }

    /// Counts a VM as living whose process can't hold its slot.
    fn assume(
        &self,
        id: MemberId,
        knock: &Knock,
        process: Option<Process>,
        why: &str,
    ) -> std::result::Result<Admitted, String> {
        let assumed = || {
            if self.guests.contains_key(&id) || self.zone.member(id)?.alive {
                return Err(self.is_taken(id));
            }
            self.zone.assume(id)?;
            self.activate(id)
        };
        // Of one that has gone no lock would tell.
        if knock.has_gone() {
            return Err("it has gone".to_owned());
        }
        assumed().map_err(|e| e.to_string())?;
        let how = format!(
            "which does not hold its slot, so that a server that follows this one does not see its end: {why}"
        );
        Ok((Guest { assumed: true, process, connections: 0 }, how))
    }

    /// A VM that may only read can't write to its slot that it is there.
    fn activate(&self, id: MemberId) -> Result<()> {
        let reads = self.listening.get(&id).is_some_and(|vm| !vm.rights.write);
        if reads { self.zone.activate(id).map(drop) } else { Ok(()) }
    }

    fn is_taken(&self, id: MemberId) -> Error {
        Error::Member {
            zone: self.zone.name().to_owned(),
            member: self.name(id),
            why: "another process is this VM and lives; end one of the two. If it has ended and holds no lock: tombolo zone expel --force"
                .to_owned(),
        }
    }

    fn let_in(
        &mut self,
        id: MemberId,
        knock: Knock,
        admitted: std::result::Result<Admitted, String>,
        say: &mut dyn FnMut(String),
    ) -> Result<()> {
        let name = self.name(id);
        let (guest, how) = match admitted {
            Ok(admitted) => admitted,
            Err(why) => {
                say(format!("{name}: refused: {why}"));
                return Ok(());
            }
        };
        let process = knock.process().ok().flatten().and_then(|process| process.number());
        let process = process.map_or("?".to_owned(), |number| number.to_string());
        let there = self.guests.entry(id).or_default();
        *there = Guest { connections: there.connections + 1, ..guest };
        self.bells.let_in(knock)?;
        say(format!("{name}: connected, process {process}, {how}"));
        Ok(())
    }

    /// Ends the VMs that have ended, and has those hold their slots that have opened the zone after they were let in.
    fn end_those_that_ended(&mut self, say: &mut dyn FnMut(String)) -> Result<()> {
        let ids: Vec<MemberId> = self.guests.keys().copied().collect();
        ids.into_iter().try_for_each(|id| self.end_if_ended(id, say))
    }

    fn end_if_ended(&mut self, id: MemberId, say: &mut dyn FnMut(String)) -> Result<()> {
        let Some(guest) = self.guests.get_mut(&id) else { return Ok(()) };
        let has_ended = match &guest.process {
            Some(process) if guest.assumed => process.has_ended(),
            _ => !guest.assumed && !self.zone.is_held(id)?,
        };
        if has_ended && guest.connections == 0 {
            return self.end_guest(id, say);
        }
        if has_ended {
            // Another process may have the connection, and is the VM then. If none has it, the server hears the connection's end at once.
            *guest = Guest { assumed: true, process: None, connections: guest.connections };
            self.zone.assume(id)?;
        }
        Ok(())
    }

    /// Has VMs hold their slots that were let in before they opened the zone.
    fn lock_late(&mut self) {
        let holds = |(id, guest): &(&MemberId, &Guest)| {
            let process = guest.process.as_ref().filter(|_| guest.assumed);
            process.is_some_and(|process| self.lock(**id, process).is_ok_and(|held| held.is_some()))
        };
        let late: Vec<MemberId> = self.guests.iter().filter(holds).map(|(id, _)| *id).collect();
        for id in late {
            self.guests.entry(id).and_modify(|guest| guest.assumed = false);
        }
    }

    /// Ends a VM's epoch and keeps its slot for its next start.
    fn end_guest(&mut self, id: MemberId, say: &mut dyn FnMut(String)) -> Result<()> {
        self.guests.remove(&id);
        let name = self.name(id);
        let died = self.zone.declare_dead(id)?;
        self.bells.ring_all()?;
        if let Some(Invited { name, rights }) = self.listening.get(&id) {
            self.zone.invite_to(id, name, Role::Vm, *rights)?;
        }
        say(format!("{name}: ended{}", if died { ", its epoch with it" } else { "" }));
        Ok(())
    }

    fn name(&self, id: MemberId) -> String {
        self.listening.get(&id).map_or_else(|| format!("member {id}"), |vm| vm.name.clone())
    }
}
