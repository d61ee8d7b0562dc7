// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones for VMs that tombolo does not start: a server per zone.
//!
//! The server owns the zone and listens for each VM that has a slot in the member table. The process that connects to a VM's socket is the VM:
//! the server holds the slot's liveness until that process has ended, and its connection too: one that connects for a QEMU and passes the connection on may
//! end first. Then it declares the VM dead, tells the other members, and keeps the slot for the VM's next start. `tombolo zone invite` and `expel` write and
//! remove a record of the VM in the zone's [`room`]; the server reads the records once a second and needs no commands. It ends when no VM is invited any
//! more. The VMs that the member table had when the server started are invited, too; afterwards the table, which each member can write, decides nothing.
//!
//! - [`room`]: the folder with the VMs' sockets, and the records by which a later server knows VMs that outlived an earlier one.
//! - [`access`]: permissions of the sockets.
//! - [`invitation`]: a VM's settings for joining, as QEMU's arguments and as libvirt's XML.
//! - [`log`]: lines that no reader holds up.
//! - [`start`]: makes sure that a zone has a server.

pub mod access;
pub mod invitation;
pub mod log;
pub mod room;
pub mod start;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::doorbell::process::Process;
use crate::doorbell::{DoorbellServer, Event, Knock};
use crate::zone::HeldByOwner;
use crate::{Error, MemberId, MemberState, Result, Rights, Role, Zone};
use room::Room;

/// Interval at which the server reads the invitations and stamps the owner's heartbeat.
const TICK: Duration = Duration::from_secs(1);

/// An event that the server handles.
enum Happening {
    Bell(Event),
    /// The process of a VM has ended.
    Ended(MemberId, Process),
}

/// A VM that has connected and not ended.
struct Guest {
    /// `None`: it can't be told, or it has ended and left its connection to another one, which is the VM.
    process: Option<Process>,
    /// The connections that were let in and of whose end nothing was heard.
    connections: u32,
    /// The process has the zone in its memory: it is the VM, not one that passes its connection on.
    is_vm: bool,
    /// Dropped after the VM's death has been declared.
    _liveness: HeldByOwner,
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
    happenings: Receiver<Happening>,
    sender: Sender<Happening>,
    /// VMs that have a socket.
    listening: BTreeMap<MemberId, Invited>,
    guests: BTreeMap<MemberId, Guest>,
}

impl Server {
    /// Takes over the zone in a file and makes the sockets of the invited VMs.
    ///
    /// # Errors
    /// [`Error::InUse`] if a process owns the zone, or VMs of an earlier server live; those of the system.
    pub fn start(path: &Path) -> Result<Server> {
        let zone = Arc::new(Zone::take_over(path)?);
        let room = Room::of(zone.uuid())?;
        room.take_for(path)?;
        // Before this is known as the zone's server.
        room.clear_sockets()?;
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
        // Those of the records first: members may have written names into all slots, and names that can't be served.
        let recorded = server.look();
        let adopted = server.adopt();
        let looked = recorded.and(server.look());
        server.room.note_started()?;
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
            let done = match self.happenings.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Happening::Bell(event)) => self.hear(event, say),
                Ok(Happening::Ended(member, process)) => self.ended(member, &process, say),
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
        self.zone.beat()?;
        self.end_unwatched(say)?;
        if !self.zone.reap()?.is_empty() {
            self.bells.ring_all()?;
        }
        self.bells.restore(&self.zone)?;
        let noted = self.note_vms();
        self.look().and(noted)
    }

    /// Records which processes are VMs. QEMU connects before it maps the zone, so this is not known when it connects.
    fn note_vms(&mut self) -> Result<()> {
        for (id, guest) in self.guests.iter_mut().filter(|(_, guest)| !guest.is_vm) {
            let (Some(process), Some(vm)) = (&guest.process, self.listening.get(id)) else { continue };
            let Some(name) = process.name() else { continue };
            // One that has ended by now may have left its number to another process.
            if self.zone.is_mapped_by(name.pid) && !process.has_ended() {
                self.room.note_as_vm(&vm.name, name, self.zone.header().session)?;
                guest.is_vm = true;
            }
        }
        Ok(())
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
        let expelled = |(id, vm): (&MemberId, &Invited)| {
            (!invited.contains_key(&vm.name) && !self.guests.contains_key(id)).then_some(*id)
        };
        for id in self.listening.iter().filter_map(expelled).collect::<Vec<_>>() {
            self.listening.remove(&id);
            self.bells.unlisten(id)?;
            done = done.and(self.zone.remove(id));
        }
        for (id, vm) in &mut self.listening {
            // The rights of one that runs change when it has ended.
            match invited.get(&vm.name) {
                Some(Ok(rights)) if *rights != vm.rights && !self.guests.contains_key(id) => {
                    vm.rights = *rights;
                    done = done.and(self.zone.invite_to(*id, &vm.name, Role::Vm, vm.rights));
                }
                _ => {}
            }
        }
        // What a member wrote into the slots of VMs that don't run; those of running ones are the zone's to restore.
        for (id, vm) in self.listening.iter().filter(|(id, _)| !self.guests.contains_key(id)) {
            let there = self.zone.member(*id)?;
            let kept = there.state == MemberState::Invited && there.role == Some(Role::Vm);
            if !kept || there.name != vm.name || there.rights != vm.rights {
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

    /// Keeps a slot for a VM, and makes its socket.
    fn open(&mut self, name: String, rights: Rights) -> Result<()> {
        let id = self.zone.invite(&name, Role::Vm, rights)?;
        let socket = self.room.socket(&name);
        self.bells.listen_at_the_door(id, &socket)?;
        access::give(&socket)?;
        self.listening.insert(id, Invited { name, rights });
        Ok(())
    }

    fn hear(&mut self, event: Event, say: &mut dyn FnMut(String)) -> Result<()> {
        match event {
            Event::Knocked { member, guest } => self.knocked(member, guest, say)?,
            Event::Joined { .. } => {}
            // A VM ends with its process; without its doorbell it polls. If its process is not known, this is its end.
            Event::Left { member, why, .. } => match self.disconnected(member) {
                Some(Guest { process: None, .. }) => self.end_guest(member, say)?,
                Some(_) => say(format!("{}: its doorbell is gone: {why}", self.name(member))),
                None => {}
            },
            Event::NotJoined { member, why } => {
                say(format!("{}: it got no doorbell: {why}", self.name(member)));
                if self.disconnected(member).is_some_and(|guest| guest.process.is_none()) {
                    self.end_guest(member, say)?;
                }
            }
            Event::Refused { member, why } => {
                let who = member.map_or_else(|| "an unknown process".to_owned(), |id| self.name(id));
                say(format!("{who}: refused: {why}"));
            }
        }
        Ok(())
    }

    /// Notes that a VM's connection has ended.
    fn disconnected(&mut self, id: MemberId) -> Option<&Guest> {
        let guest = self.guests.get_mut(&id)?;
        guest.connections = guest.connections.saturating_sub(1);
        Some(guest)
    }

    /// A process stands at a VM's socket.
    fn knocked(&mut self, id: MemberId, knock: Knock, say: &mut dyn FnMut(String)) -> Result<()> {
        // Its rights may have changed since the last look. Other VMs that a look has trouble with do not keep this one out.
        let looked = self.look();
        let Some(Invited { name, rights }) = self.listening.get(&id) else { return looked };
        let (name, rights) = (name.clone(), *rights);
        let process = match knock.process() {
            Ok(process) => process,
            Err(e) => {
                say(format!("{name}: refused: finding its process: {e}"));
                return looked;
            }
        };
        if let Some(there) = self.guests.get_mut(&id) {
            if process.is_some() && there.process == process {
                // A VM that comes back with a second device.
                there.connections += 1;
                self.bells.let_in(knock)?;
                return looked;
            }
            // One that has a connection of whose end nothing was heard may have passed it on; one that is not known has not ended: that would have been heard.
            if there.connections > 0 || there.process.as_ref().is_none_or(|p| !p.has_ended()) {
                say(format!("{name}: refused: another process is this VM and lives; end one of the two"));
                return looked;
            }
            self.end_guest(id, say)?;
        }
        match self.admit(id, &name, rights, process.as_ref()) {
            Ok(liveness) => {
                let number = process
                    .as_ref()
                    .and_then(Process::number)
                    .map_or_else(|| "of another namespace, or ended".to_owned(), |number| number.to_string());
                self.guests.insert(id, Guest { process, connections: 1, is_vm: false, _liveness: liveness });
                self.bells.let_in(knock)?;
                say(format!("{name}: connected, process {number}"));
            }
            Err(e) => say(format!("{name}: refused: {e}")),
        }
        looked
    }

    /// Makes a VM count as alive, before it gets an answer. It gets none while the zone is repaired. If this server dies, the next command and the next server
    /// find the VM by its record.
    fn admit(
        &self,
        id: MemberId,
        name: &str,
        rights: Rights,
        process: Option<&Process>,
    ) -> Result<HeldByOwner> {
        let liveness = self.zone.hold_as_owner(id)?;
        // The end of one that is refused is no VM's.
        if let Some(process) = process {
            self.watch(id, process.clone())?;
        }
        if !rights.write {
            // It can't write to its slot, so the server marks it active.
            self.zone.activate(id)?;
        }
        // Last, so that none is left of one that is refused.
        match process.and_then(Process::name) {
            Some(process) => self.room.note(name, process)?,
            // No record of a former one is left.
            None => self.room.forget(name)?,
        }
        Ok(liveness)
    }

    /// Ends the VMs whose processes have ended without being heard: a thread that waits for that may have found no memory.
    fn end_unwatched(&mut self, say: &mut dyn FnMut(String)) -> Result<()> {
        let processes = self.guests.iter().filter_map(|(id, guest)| Some((*id, guest.process.clone()?)));
        let ended: Vec<_> = processes.filter(|(_, process)| process.has_ended()).collect();
        ended.into_iter().try_for_each(|(id, process)| self.ended(id, &process, say))
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
        let Some(guest) = self.guests.get_mut(&id).filter(|g| g.process.as_ref() == Some(process)) else {
            return Ok(());
        };
        if guest.connections == 0 {
            return self.end_guest(id, say);
        }
        // Another process may have the connection, and is the VM then. If none has it, the server hears the connection's end at once. The record of the process that
        // has ended would say that the VM has ended.
        guest.process = None;
        self.room.forget(&self.name(id))
    }

    /// Ends a VM's epoch and keeps its slot for its next start.
    fn end_guest(&mut self, id: MemberId, say: &mut dyn FnMut(String)) -> Result<()> {
        let Some(guest) = self.guests.remove(&id) else { return Ok(()) };
        let name = self.name(id);
        let died = self.zone.declare_dead(id)?;
        drop(guest);
        self.bells.ring_all()?;
        self.room.forget(&name)?;
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    use super::*;
    use crate::{Backing, ZoneConfig};

    /// A process that has connected, and ended.
    fn ended_process(dir: &Path) -> Process {
        let path = dir.join("connect");
        let listener = UnixListener::bind(&path).unwrap();
        let script =
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\ns.recv(1)";
        let mut child = Command::new("python3").args(["-c", script]).arg(&path).spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        let process = Process::of(&stream).unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
        drop(stream);
        child.wait().unwrap();
        process
    }

    /// In a process of its own, whose folder of sockets is a new one.
    #[test]
    fn a_vm_whose_end_nothing_has_told_ends_once_its_connection_has_ended_too() {
        let Some(folder) = std::env::var_os("TOMBOLO_TEST_FOLDER") else {
            let dir = tempfile::tempdir().unwrap();
            let mut own = Command::new(std::env::current_exe().unwrap());
            let name = "serve::tests::a_vm_whose_end_nothing_has_told_ends_once_its_connection_has_ended_too";
            own.args(["--exact", name, "--nocapture"]).env("TOMBOLO_TEST_FOLDER", dir.path());
            assert!(own.env("TOMBOLO_ZONES_RUN", dir.path().join("zones")).status().unwrap().success());
            return;
        };
        let dir = Path::new(&folder);
        let path = dir.join("zone");
        let zone = Zone::create(&ZoneConfig::new("z", 8 << 20).backing(Backing::File(path.clone()))).unwrap();
        let id = zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
        drop(zone);
        let mut server = Server::start(&path).unwrap();
        let process = Some(ended_process(dir));
        let _liveness = server.zone.hold_as_owner(id).unwrap();
        server.guests.insert(id, Guest { process, connections: 1, is_vm: true, _liveness });
        let mut said = Vec::new();
        // One that comes before that was heard does not take the place of the process that has the connection.
        let _second = UnixStream::connect(server.room.socket("a")).unwrap();
        let Happening::Bell(knock) = server.happenings.recv().unwrap() else { panic!("not of a doorbell") };
        server.hear(knock, &mut |line| said.push(line)).unwrap();
        assert!(said.pop().unwrap().starts_with("a: refused: another process is this VM"));
        // Nor does the look for processes that have ended.
        server.tend(&mut |line| said.push(line)).unwrap();
        assert!(server.zone.member(id).unwrap().alive && server.guests[&id].process.is_none());
        let guest = server.guests.get_mut(&id).unwrap();
        (guest.process, guest.connections) = (Some(ended_process(dir)), 0);
        server.tend(&mut |line| said.push(line)).unwrap();
        assert!(!server.zone.member(id).unwrap().alive);
        assert_eq!(said, ["a: ended"]);
    }
}
