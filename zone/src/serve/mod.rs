// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones for VMs that tombolo does not start: a server per zone.
//!
//! The server owns the zone and listens for each VM that has a slot in the member table. The process that connects to a VM's socket is the VM:
//! the server holds the slot's liveness until that process has ended. Then it declares the VM dead, tells the other members, and keeps the
//! slot for the VM's next start. Any process that can write the zone invites and expels VMs by changing the member table; the server reads the
//! table once a second and needs no commands. It ends when no VM is invited any more.
//!
//! - [`room`]: the folder with the VMs' sockets, and the records by which a later server knows VMs that outlived an earlier one.
//! - [`access`]: permissions of the sockets.
//! - [`invitation`]: a VM's settings for joining, as QEMU's arguments and as libvirt's XML.
//! - [`start`]: makes sure that a zone has a server.

pub mod access;
pub mod invitation;
pub mod room;
pub mod start;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::doorbell::process::Process;
use crate::doorbell::{DoorbellServer, Event};
use crate::{Error, Liveness, Member, MemberId, MemberState, Result, Role, Zone};
use room::Room;

/// Interval at which the server reads the member table and stamps the owner's heartbeat.
const TICK: Duration = Duration::from_secs(1);

/// An event that the server handles.
enum Happening {
    Bell(Event),
    /// The process of a VM has ended.
    Ended(MemberId, Process),
}

/// A VM that has connected and not ended.
struct Guest {
    process: Option<Process>,
    /// Dropped after the VM's death has been declared.
    _liveness: Liveness,
}

/// The server of one zone.
pub struct Server {
    zone: Arc<Zone>,
    bells: DoorbellServer,
    room: Room,
    happenings: Receiver<Happening>,
    sender: Sender<Happening>,
    /// Names of VMs that have a socket.
    listening: BTreeMap<MemberId, String>,
    guests: BTreeMap<MemberId, Guest>,
}

impl Server {
    /// Takes over the zone in a file and makes the sockets of the invited VMs.
    ///
    /// # Errors
    /// [`Error::InUse`] if a process owns the zone, or VMs of an earlier server live; those of the system.
    pub fn start(path: &Path) -> Result<Server> {
        let zone = Arc::new(Zone::take_over(path)?);
        let room = Room::of(zone.uuid());
        room.make()?;
        room.note_server()?;
        let (bells, events) = DoorbellServer::start(Arc::clone(&zone))?;
        let (sender, happenings) = channel();
        let forward = sender.clone();
        std::thread::Builder::new()
            .name("doorbell-events".to_owned())
            .spawn(move || events.into_iter().all(|event| forward.send(Happening::Bell(event)).is_ok()))
            .map_err(|e| Error::io("starting a thread", e))?;
        let (listening, guests) = (BTreeMap::new(), BTreeMap::new());
        let mut server = Server { zone, bells, room, happenings, sender, listening, guests };
        server.look()?;
        Ok(server)
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
            let done = match self.happenings.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Happening::Bell(event)) => self.hear(event, say),
                Ok(Happening::Ended(member, process)) => self.ended(member, &process, say),
                Err(RecvTimeoutError::Timeout) => {
                    next = Instant::now() + TICK;
                    self.tend()
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

    fn tend(&mut self) -> Result<()> {
        self.zone.beat()?;
        if !self.zone.reap()?.is_empty() {
            self.announce()?;
        }
        self.look()
    }

    fn announce(&self) -> Result<()> {
        for peer in self.zone.announce()? {
            self.bells.ring(peer)?;
        }
        Ok(())
    }

    /// Makes a socket for each VM in the member table, and removes the sockets of expelled ones.
    fn look(&mut self) -> Result<()> {
        let members = self.zone.members()?;
        let invited: Vec<&Member> = members.iter().filter(|m| m.role == Some(Role::Vm)).collect();
        let still = |id, name: &str| invited.iter().any(|m| m.id == id && m.name == name);
        let gone: Vec<MemberId> =
            self.listening.iter().filter(|(id, name)| !still(**id, name)).map(|(id, _)| *id).collect();
        for id in gone {
            self.listening.remove(&id);
            self.bells.unlisten(id)?;
        }
        for member in invited {
            if self.listening.contains_key(&member.id) {
                continue;
            }
            self.keep(member)?;
            let socket = self.room.socket(&member.name);
            self.bells.listen(member.id, &socket)?;
            access::give(&socket)?;
            self.listening.insert(member.id, member.name.clone());
        }
        Ok(())
    }

    /// Keeps a slot for a VM that is not running.
    fn keep(&self, member: &Member) -> Result<()> {
        if member.alive || member.state == MemberState::Invited {
            return Ok(());
        }
        self.zone.invite(&member.name, Role::Vm, member.rights).map(drop)
    }

    fn hear(&mut self, event: Event, say: &mut dyn FnMut(String)) -> Result<()> {
        match event {
            Event::Joined { member, process, .. } => self.joined(member, process, say)?,
            // A VM ends with its process; without its doorbell it polls. If its process is not known, this is its end.
            Event::Left { member, why, .. } => match self.guests.get(&member) {
                Some(Guest { process: None, .. }) => self.end_guest(member, say)?,
                Some(_) => say(format!("{}: its doorbell is gone: {why}", self.name(member))),
                None => {}
            },
            Event::Refused { member, why } => {
                let who = member.map_or_else(|| "an unknown process".to_owned(), |id| self.name(id));
                say(format!("{who}: refused: {why}"));
            }
        }
        Ok(())
    }

    fn joined(&mut self, id: MemberId, process: Option<Process>, say: &mut dyn FnMut(String)) -> Result<()> {
        // A process of the host that uses the zone's doorbells, or a VM that comes back with a second device.
        let Some(name) = self.listening.get(&id).cloned() else { return Ok(()) };
        if let Some(there) = self.guests.get(&id) {
            if there.process == process {
                return Ok(());
            }
            // Two processes claim one VM: the first has not ended.
            if there.process.as_ref().is_some_and(|p| !p.has_ended()) {
                say(format!(
                    "{name}: another process has its doorbell while its own lives; end one of the two"
                ));
                return Ok(());
            }
            self.end_guest(id, say)?;
        }
        let liveness = self.zone.hold(id)?;
        if let Some(process) = &process {
            self.room.note(&name, process)?;
            self.watch(id, process.clone())?;
        }
        if !self.zone.member(id)?.rights.write {
            // It can't write to its slot, so the server marks it active.
            self.zone.activate(id)?;
        }
        let number =
            process.as_ref().map_or_else(|| "of another namespace".to_owned(), |p| p.id().to_string());
        say(format!("{name}: connected, process {number}"));
        self.guests.insert(id, Guest { process, _liveness: liveness });
        Ok(())
    }

    /// Starts a thread that waits for a process's end.
    fn watch(&self, id: MemberId, process: Process) -> Result<()> {
        let sender = self.sender.clone();
        let wait = move || {
            process.wait_ended();
            // The server may have ended.
            let _ = sender.send(Happening::Ended(id, process));
        };
        let thread = std::thread::Builder::new().name("vm-process".to_owned()).spawn(wait);
        thread.map(drop).map_err(|e| Error::io("starting a thread", e))
    }

    fn ended(&mut self, id: MemberId, process: &Process, say: &mut dyn FnMut(String)) -> Result<()> {
        if self.guests.get(&id).is_some_and(|g| g.process.as_ref() == Some(process)) {
            self.end_guest(id, say)?;
        }
        Ok(())
    }

    /// Ends a VM's epoch and keeps its slot for its next start.
    fn end_guest(&mut self, id: MemberId, say: &mut dyn FnMut(String)) -> Result<()> {
        let Some(guest) = self.guests.remove(&id) else { return Ok(()) };
        let name = self.name(id);
        let died = self.zone.declare_dead(id)?;
        drop(guest);
        self.announce()?;
        self.room.forget(&name)?;
        let member = self.zone.member(id)?;
        // Another process may have expelled it in this moment.
        if member.name == name && member.state != MemberState::Empty {
            self.keep(&member)?;
        }
        say(format!("{name}: ended{}", if died { ", its epoch with it" } else { "" }));
        Ok(())
    }

    fn name(&self, id: MemberId) -> String {
        self.listening.get(&id).cloned().unwrap_or_else(|| format!("member {id}"))
    }
}
