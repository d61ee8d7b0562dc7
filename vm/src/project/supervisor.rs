// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor: one process per running project. It holds the zones, starts and watches the VMs, and answers the
//! commands over its control socket. It carries no data. Whatever it started dies with it (see [`crate::child`]), so a
//! crash or a kill leaves nothing behind.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Resource, Rlimit};
use tombolo_zone::door::Door;

use crate::child::main_thread;
use crate::compose::{Backing, Project, Rights, ZoneUse};
use crate::guest::mount::{self, Source};
use crate::machine::{Machine, Phase, disks, hotplug};
use crate::project::accelerator::Accelerator;
use crate::project::barrier::{HOUSEHOLD, Inside, REQUESTS};
use crate::project::control::{Event, NetStatus, PortStatus, Request, Stage, Status, ZoneStatus};
use crate::project::journal;
use crate::project::network::Network;
use crate::project::peer::{self, Peer};
use crate::project::session;
use crate::project::state::StateDir;
use crate::project::zones::HostZone;
use lasting::Lasting;
use reception::Connection;
use turn::{Of, Turns};

mod again;
mod down;
mod lasting;
mod order;
mod owners;
mod plan;
mod reception;
mod start;
mod turn;
mod upgrade;

pub use upgrade::{examine, go_on};

/// How often the zones are looked after.
const TEND: Duration = Duration::from_secs(1);
/// How long a client may take to say what it wants.
const UNSAID: Duration = Duration::from_secs(5);
/// How long a client may leave what it is told unread.
const UNREAD: Duration = Duration::from_secs(2);
/// How long a guest may take to unmount a zone that it leaves.
const UNMOUNT: Duration = Duration::from_secs(30);
/// How long a request waits for its turn before it says so.
const SILENT: Duration = Duration::from_secs(1);
/// How often one that waits looks whether its client has gone.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of the console that somebody who attaches sees first.
const RECENT: usize = 2048;

struct Supervisor {
    dir: StateDir,
    seat: Seat,
    signals: session::Signals,
    inner: Mutex<Inner>,
    /// Held while VMs are started or stopped: one such request at a time.
    changing: Turns,
    /// Everything is being stopped.
    ending: AtomicBool,
    /// This process is about to become another program.
    upgrading: AtomicBool,
    lasting: Lasting,
}

/// What makes a process a project's supervisor.
struct Seat {
    /// Held in the project's folder.
    lock: File,
    door: Door,
}

struct Inner {
    project: Project,
    accel: String,
    machines: BTreeMap<String, Arc<Machine>>,
    zones: BTreeMap<String, Arc<HostZone>>,
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
    /// Requests that are being carried out.
    requests: usize,
    /// The supervisor is about to end and hears no more requests.
    withdrawn: bool,
}

/// What runs beside VMs.
struct Beside {
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
}

impl Inner {
    /// Lets go of everything but VMs. What is returned is to be ended, which takes a moment, without the lock.
    #[must_use]
    fn clear(&mut self) -> Beside {
        self.zones.clear();
        Beside {
            networks: std::mem::take(&mut self.networks),
            accelerators: std::mem::take(&mut self.accelerators),
        }
    }
}

/// Sends events of one request; sending to a client that has gone is not an error, its going cancels the request.
struct Reporter {
    /// None: the client has gone, or does not read.
    socket: Mutex<Option<Arc<UnixStream>>>,
}

impl Reporter {
    fn of(peer: &Peer, request: &Request) -> Reporter {
        let socket = peer.socket();
        // Output of a command waits for its reader. Nothing else waits long for a client that is stopped.
        let limit = (!matches!(request, Request::Exec { .. })).then_some(UNREAD);
        // It fails for a limit of zero only.
        let _never = socket.set_write_timeout(limit);
        Reporter { socket: Mutex::new(Some(socket)) }
    }

    fn send(&self, event: &Event) {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        if socket.as_ref().is_some_and(|socket| peer::send(socket, event).is_err()) {
            // Half a message may be out.
            if let Some(socket) = socket.take() {
                let _gone_already = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn stage(&self, vm: &str, stage: Stage, detail: &str) {
        self.send(&Event::Stage { vm: vm.to_owned(), stage, detail: detail.to_owned() });
    }
}

/// Runs the supervisor of `project` in `dir`; `control` is the inherited connection of the command that started it.
///
/// # Errors
/// When it can't begin. Later failures go to the client that asked.
pub fn run(project: Project, dir: &Path, control: RawFd) -> anyhow::Result<()> {
    // SAFETY: the command that starts this process passes the number of a descriptor that nobody else here owns.
    let control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(control) });
    let mut peer = Peer::new(control);
    let state = StateDir::at(dir.to_owned());
    let queue = main_thread::claim();
    let seat = match settle(&state, &project) {
        Ok(Some(seat)) => seat,
        Ok(None) => return Ok(peer.send(&Event::Taken)?),
        Err(e) => {
            let message = format!("the project's folder {} can't be used: {e:#}", dir.display());
            return Ok(peer.send(&Event::Failed { message })?);
        }
    };
    let inside = REQUESTS.enter("the command that started the project");
    let begun = session::signals().and_then(|signals| {
        let supervisor = Arc::new(Supervisor::new(state, seat, signals, project));
        supervisor.lock().requests = 1;
        supervisor.attend_to_all()?;
        Ok(supervisor)
    });
    let supervisor = match begun {
        Ok(supervisor) => supervisor,
        Err(e) => {
            let message = format!("the project's supervisor can't begin: {e:#}");
            return Ok(peer.send(&Event::Failed { message })?);
        }
    };
    peer.send(&Event::Note { text: "ready".into() })?;
    let own = supervisor.clone();
    std::thread::Builder::new().name("request".into()).spawn(move || own.begin(peer, inside))?;
    queue.serve();
    journal::close();
    Ok(())
}

/// Makes this process the project's supervisor; `None`: another process is.
fn settle(state: &StateDir, project: &Project) -> anyhow::Result<Option<Seat>> {
    let Some(lock) = state.lock()? else { return Ok(None) };
    let Some(door) = state.open_door(&project.file)? else { return Ok(None) };
    crate::log::open(&state.path().join("supervisor.log"))?;
    // Those of a supervisor that was killed: what they lie over may have changed since.
    disks::discard(state, None);
    // Each VM, console and command takes a few.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(Some(Seat { lock, door }))
}

impl Supervisor {
    fn new(dir: StateDir, seat: Seat, signals: session::Signals, project: Project) -> Supervisor {
        Supervisor {
            dir,
            seat,
            signals,
            inner: Mutex::new(Inner {
                project,
                accel: "not known yet".into(),
                machines: BTreeMap::new(),
                zones: BTreeMap::new(),
                networks: BTreeMap::new(),
                accelerators: BTreeMap::new(),
                requests: 0,
                withdrawn: false,
            }),
            changing: Turns::default(),
            ending: AtomicBool::new(false),
            upgrading: AtomicBool::new(false),
            lasting: Lasting::default(),
        }
    }

    /// Begins to hear commands and signals, and to look after zones.
    fn attend_to_all(self: &Arc<Self>) -> std::io::Result<()> {
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let own = self.clone();
        thread("control").spawn(move || {
            let admitting = own.clone();
            let serve = Arc::new(move |connection| admitting.admit(connection));
            reception::receive(own.seat.door.listener(), &(serve as Arc<dyn Fn(Connection) + Send + Sync>));
        })?;
        let own = self.clone();
        thread("signals").spawn(move || {
            own.signals.wait_there();
            // It ends with the process: there is nothing left to hand over.
            let _inside = HOUSEHOLD.enter("the end of the project, by a signal");
            if own.signals.wait() {
                if let Err(e) = own.down_all(None) {
                    crate::say!("{e:#}");
                }
                main_thread::end();
            }
        })?;
        let own = self.clone();
        thread("tend").spawn(move || own.tend()).map(drop)
    }

    /// Looks after zones for as long as the process lives.
    fn tend(&self) {
        loop {
            let inside = HOUSEHOLD.enter("the care of zones");
            for zone in self.all_zones() {
                if let Err(e) = zone.tend() {
                    crate::say!("{e:#}");
                }
            }
            self.tend_accelerators();
            drop(inside);
            std::thread::sleep(TEND);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that this process keeps, those of accelerators among them.
    fn all_zones(&self) -> Vec<Arc<HostZone>> {
        let (mut zones, accelerators): (Vec<_>, Vec<_>) = {
            let inner = self.lock();
            (inner.zones.values().cloned().collect(), inner.accelerators.values().cloned().collect())
        };
        zones.extend(accelerators.iter().flat_map(|a| a.zones()));
        zones
    }

    fn machine(&self, vm: &str) -> anyhow::Result<Arc<Machine>> {
        let inner = self.lock();
        let Some(machine) = inner.machines.get(vm) else {
            let names: Vec<&str> = inner.machines.keys().map(String::as_str).collect();
            let hint = match crate::compose::nearest(vm, names.iter().copied()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => {
                    format!("running: {}", if names.is_empty() { "none".into() } else { names.join(", ") })
                }
            };
            anyhow::bail!("no VM '{vm}' runs in the project '{}'; {hint}", inner.project.name);
        };
        Ok(machine.clone())
    }

    fn running(&self, vm: &str) -> anyhow::Result<Arc<Machine>> {
        let machine = self.machine(vm)?;
        match machine.phase() {
            Phase::Up => Ok(machine),
            Phase::Booting | Phase::Rebooting => anyhow::bail!("the VM '{vm}' is still booting"),
            _ => anyhow::bail!(
                "the VM '{vm}' does not run ({}); start it with 'tombolo up'",
                machine.status().state
            ),
        }
    }

    /// Serves the command that started this process.
    fn begin(self: &Arc<Self>, mut peer: Peer, inside: Inside) {
        match peer.receive::<Request>() {
            Ok(Some(request)) => {
                let reporter = Reporter::of(&peer, &request);
                self.serve(request, peer, reporter, inside);
            }
            // It has gone again.
            Ok(None) | Err(_) => self.leave_for_good(),
        }
    }

    /// Serves a command that has found this process.
    fn admit(self: &Arc<Self>, connection: Connection) {
        // What it fails for is a limit of zero.
        let _never = connection.socket.set_read_timeout(Some(UNSAID));
        let mut peer = Peer::new(connection.socket);
        let request = peer.receive::<Request>();
        let _never = peer.socket().set_read_timeout(None);
        let request = match request {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(e) => {
                let _ = peer.send(&Event::Failed { message: format!("{e:#}") });
                return;
            }
        };
        let reporter = Reporter::of(&peer, &request);
        if connection.scarce && !matches!(request, Request::Ps | Request::Down { .. }) {
            let message = "it has no file descriptor left; 'ps' and 'down' still work. Close consoles and commands, or take the project                            down and start it with a higher limit (ulimit -n)";
            reporter.send(&Event::Failed { message: message.into() });
            return;
        }
        let inside = connection.inside;
        inside.rename(request.what());
        match request {
            Request::Attend => {
                reporter.send(&Event::Heard);
                return self.lasting.attend(peer, inside);
            }
            Request::Events { since } => {
                reporter.send(&Event::Heard);
                return self.lasting.tell(&peer.socket(), lasting::since(since), &reporter, inside);
            }
            _ => {}
        }
        // A client that has waited too long has said so and gone. Without 'heard' one that is there starts another supervisor.
        if !session::has_gone(&peer.socket()) && self.enter() {
            self.serve(request, peer, reporter, inside);
        }
    }

    fn serve(self: &Arc<Self>, request: Request, peer: Peer, reporter: Reporter, inside: Inside) {
        reporter.send(&Event::Heard);
        let result = match request {
            Request::Up { project, wish, wait } => self.up(*project, &wish, wait, peer, &reporter),
            Request::Plan { project, wish } => {
                reporter.send(&self.planned(*project, &wish));
                Ok(())
            }
            Request::Down { vms } => self.down(&vms, &reporter),
            Request::Ps => {
                reporter.send(&Event::Status(Box::new(self.status())));
                Ok(())
            }
            Request::Exec { vm, argv, env, dir, input, terminal } => self.running(&vm).and_then(|machine| {
                let exec = crate::guest::exec::Exec { argv, env, dir };
                let report = |event: &Event| reporter.send(event);
                match terminal {
                    Some(terminal) => session::exec_on_terminal(&machine, &exec, &terminal, peer, &report),
                    None => session::exec(&machine, &exec, input, peer, &report),
                }
            }),
            Request::Console { vm } => {
                match self.machine(&vm).and_then(|m| Ok((session::watch(&m, peer, RECENT)?, m))) {
                    Ok((socket, machine)) => {
                        self.lasting.type_all(&machine, &socket, Some(inside));
                        return self.leave_for_good();
                    }
                    Err(e) => Err(e),
                }
            }
            Request::Upgrade { program, seconds } => {
                self.upgrade(program.as_deref(), seconds, peer, &reporter, inside)
            }
            Request::Attend | Request::Events { .. } => Ok(()),
            Request::ZoneAttach { zone, vm, rights, mount } => {
                self.attach(&zone, &vm, rights, mount.as_deref(), &peer.socket(), &reporter)
            }
            Request::ZoneDetach { zone, vm } => self.detach(&zone, &vm, &peer.socket(), &reporter),
        };
        // Whoever has the answer finds no trace of a supervisor that has nothing left to do.
        let idle = self.leave();
        match result {
            Ok(()) => reporter.send(&Event::Done),
            Err(e) => reporter.send(&Event::Failed { message: format!("{e:#}") }),
        }
        if idle {
            main_thread::end();
        }
    }

    /// A request begins; false: this supervisor is about to end.
    fn enter(&self) -> bool {
        let mut inner = self.lock();
        if !inner.withdrawn {
            inner.requests += 1;
        }
        !inner.withdrawn
    }

    /// A request ends that nobody waits for.
    fn leave_for_good(&self) {
        if self.leave() {
            main_thread::end();
        }
    }

    /// A request ends. A supervisor without requests and VMs has nothing to do: it lets go of the zones, can't be found any more, and is
    /// to end (true).
    fn leave(&self) -> bool {
        let mut inner = self.lock();
        inner.requests -= 1;
        inner.withdrawn |= inner.requests == 0 && inner.machines.is_empty();
        if !inner.withdrawn {
            return false;
        }
        let beside = inner.clear();
        self.dir.withdraw();
        drop(inner);
        beside.end();
        true
    }

    /// Ends a VM's memberships, those in its accelerators' zones too.
    fn leave_zones<'a>(&self, vm: &str, zones: impl Iterator<Item = &'a String>) {
        let accelerators: Vec<_> = self.lock().accelerators.values().cloned().collect();
        for accelerator in accelerators {
            accelerator.gone(vm);
        }
        for name in zones {
            let zone = self.lock().zones.get(name).cloned();
            if let Some(zone) = zone {
                zone.gone(vm);
            }
        }
    }

    fn attach(
        &self,
        zone_name: &str,
        vm: &str,
        rights: Rights,
        mount: Option<&str>,
        client: &UnixStream,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.turn(client, reporter)?;
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if machine.zones().contains_key(zone_name) {
            anyhow::bail!("the VM '{vm}' is a member of the zone '{zone_name}' already");
        }
        let zone_use = ZoneUse { mount: mount.map(str::to_owned), rights, ..ZoneUse::default() };
        let invitation = zone.invite(vm, &zone_use)?;
        if let Err(e) = machine.plug(zone_name, &zone_use, &invitation) {
            if let hotplug::Failure::Undone(_) = e {
                zone.gone(vm);
            }
            return Err(e.into());
        }
        mount_zone(&machine, zone_name, &zone, &zone_use).with_context(|| {
            format!("the VM '{vm}' is a member of the zone '{zone_name}' now, but has not mounted it")
        })?;
        reporter
            .send(&Event::Note { text: format!("the VM '{vm}' is a member of the zone '{zone_name}' now") });
        Ok(())
    }

    /// Waits for the turn to start and stop VMs, which a client that goes does not want any more.
    fn turn(&self, client: &UnixStream, reporter: &Reporter) -> anyhow::Result<turn::Turn<'_>> {
        if let Some(turn) = self.changing.take_within(Of::All, SILENT) {
            return Ok(turn);
        }
        let text = "another command is starting or stopping VMs; this one waits for its end";
        reporter.send(&Event::Note { text: text.into() });
        loop {
            if let Some(turn) = self.changing.take_within(Of::All, LOOK) {
                return Ok(turn);
            }
            anyhow::ensure!(
                !session::has_gone(client),
                "cancelled while it waited for another command; nothing was begun"
            );
        }
    }

    fn detach(
        &self,
        zone_name: &str,
        vm: &str,
        client: &UnixStream,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.turn(client, reporter)?;
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if !machine.zones().contains_key(zone_name) {
            anyhow::bail!("the VM '{vm}' is no member of the zone '{zone_name}'");
        }
        mount::unmount(machine.agent(), vm, &[zone.uuid()], UNMOUNT)?;
        zone.gone(vm);
        machine.forget_zone(zone_name);
        reporter.send(&Event::Note {
            text: format!(
                "the VM '{vm}' has left the zone '{zone_name}'. Its memory device stays in the VM until that is stopped, or attached again: stock QEMU can't unplug virtio-pmem"
            ),
        });
        Ok(())
    }

    fn zone(&self, name: &str) -> anyhow::Result<Arc<HostZone>> {
        let inner = self.lock();
        let Some(zone) = inner.zones.get(name) else {
            let hint = crate::compose::nearest(name, inner.zones.keys().map(String::as_str));
            let hint = hint.map_or("declare it in the compose file and run 'tombolo up'".into(), |n| {
                format!("did you mean '{n}'?")
            });
            anyhow::bail!("the project '{}' has no zone '{name}'; {hint}", inner.project.name);
        };
        Ok(zone.clone())
    }

    fn status(&self) -> Status {
        let accelerators: Vec<_> = self.lock().accelerators.values().cloned().collect();
        // Each is given a moment to answer; all of them together have no more.
        let accelerators = std::thread::scope(|scope| {
            let asked: Vec<_> = accelerators.iter().map(|a| scope.spawn(|| a.status())).collect();
            asked.into_iter().filter_map(|answer| answer.join().ok()).collect()
        });
        let inner = self.lock();
        let vms: Vec<_> = inner.machines.values().map(|m| m.status()).collect();
        let zones = inner
            .zones
            .iter()
            .map(|(name, zone)| ZoneStatus {
                name: name.clone(),
                size: zone.spec().size.0,
                backing: match &zone.spec().backing {
                    Backing::Memfd => "memfd".into(),
                    Backing::Hugetlb => "hugetlb".into(),
                    Backing::File(path) => path.display().to_string(),
                },
                members: zone.members(),
                lost: zone.is_lost(),
                uuid: zone.uuid(),
                path: zone.path(),
                link: self.dir.zone_link(name),
            })
            .collect();
        let networks = inner
            .networks
            .iter()
            .map(|(name, network)| {
                let (pid, starts) = network.process();
                let ports = network.leases().into_iter().map(|(vm, lease)| PortStatus {
                    vm,
                    mac: lease.mac.to_string(),
                    address: lease.address.map(|(ip, prefix)| format!("{ip}/{prefix}")),
                    address6: lease.address6.map(|ip| ip.to_string()),
                });
                NetStatus {
                    name: name.clone(),
                    uplink: network.spec().uplink.as_ref().map(ToString::to_string),
                    subnet: network.spec().subnet.map(|s| s.to_string()),
                    pid,
                    starts,
                    trouble: pid.and_then(crate::child::stopped),
                    control: network.control(),
                    ports: ports.collect(),
                }
            })
            .collect();
        Status {
            networks,
            accelerators,
            project: inner.project.name.clone(),
            file: inner.project.file.clone(),
            supervisor: Some(std::process::id()),
            accel: inner.accel.clone(),
            vms,
            zones,
        }
    }
}

/// Mounts a zone's file system in the VM where it is wanted.
fn mount_zone(machine: &Machine, name: &str, zone: &HostZone, zone_use: &ZoneUse) -> anyhow::Result<()> {
    let Some(path) = &zone_use.mount else { return Ok(()) };
    let vm = machine.name();
    let member = zone.slot(vm).with_context(|| format!("the VM '{vm}' is no member of the zone any more"))?;
    let source = Source { uuid: zone.uuid(), member };
    mount::mount(machine, name, &source, path, zone_use.rights == Rights::ReadOnly, &zone_use.options)
}
