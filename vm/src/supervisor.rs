// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor: one process per running project. It holds the zones, starts and watches the VMs, and answers the
//! commands over its control socket. It carries no data. Whatever it started dies with it (see [`crate::child`]), so a
//! crash or a kill leaves nothing behind.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;

use crate::accelerator::Accelerator;
use crate::compose::{Backing, Project, Rights, ZoneUse};
use crate::control::{Event, NetStatus, PortStatus, Request, Stage, Status, ZoneStatus};
use crate::machine::{Machine, Phase, hotplug};
use crate::mount::{self, Source};
use crate::network::Network;
use crate::peer::{self, Peer};
use crate::session;
use crate::state::{Address, StateDir};
use crate::zones::HostZone;

mod start;

/// How often the zones are looked after.
const TEND: Duration = Duration::from_secs(1);
/// Bytes of the console that somebody who attaches sees first.
const RECENT: usize = 2048;

struct Supervisor {
    dir: StateDir,
    inner: Mutex<Inner>,
    /// Held while VMs are started or stopped: one such request at a time.
    changing: Mutex<()>,
    over: Mutex<bool>,
    over_changed: Condvar,
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

/// What runs beside VMs: dropping it ends switches and servers, which takes a moment.
type Beside = (BTreeMap<String, Arc<Network>>, BTreeMap<String, Arc<Accelerator>>);

impl Inner {
    /// Lets go of everything but VMs.
    #[must_use]
    fn clear(&mut self) -> Beside {
        self.zones.clear();
        (std::mem::take(&mut self.networks), std::mem::take(&mut self.accelerators))
    }
}

/// Sends events of one request; sending to a client that has gone is not an error, its going cancels the request.
#[derive(Clone)]
struct Reporter {
    socket: Arc<Mutex<UnixStream>>,
}

impl Reporter {
    fn send(&self, event: &Event) {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = peer::send(&mut socket, event);
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
    let mut peer = Peer::new(control)?;
    let state = StateDir::of(&project)?;
    if state.path() != dir {
        anyhow::bail!(
            "{} is not the folder of this project, which is {}",
            dir.display(),
            state.path().display()
        );
    }
    let Some(_lock) = state.lock()? else {
        peer.send(&Event::Taken)?;
        return Ok(());
    };
    let socket = format!("tombolo-{}-{}", std::process::id(), crate::state::random_hex(12));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&socket)?)?;
    crate::state::log_to(&state.path().join("supervisor.log"))?;
    state.publish(&Address {
        socket,
        pid: std::process::id(),
        project: project.name.clone(),
        file: project.file.clone(),
    })?;
    peer.send(&Event::Note { text: "ready".into() })?;
    let supervisor = Arc::new(Supervisor {
        dir: state.clone(),
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
        changing: Mutex::new(()),
        over: Mutex::new(false),
        over_changed: Condvar::new(),
    });
    let accepting = supervisor.clone();
    std::thread::Builder::new().name("control".into()).spawn(move || {
        for socket in listener.incoming().map_while(Result::ok) {
            let own = accepting.clone();
            // A thread that can't be had closes this connection; the next may have more luck.
            drop(std::thread::Builder::new().name("request".into()).spawn(move || {
                if peer::check_user(&socket).is_ok() {
                    if let Ok(peer) = Peer::new(socket) {
                        own.serve(peer);
                    }
                }
            }));
        }
    })?;
    let terminated = session::signals()?;
    let own = supervisor.clone();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if terminated.wait() {
            own.stop(&[], None);
            drop(own.lock().clear());
            own.end();
        }
    })?;
    let own = supervisor.clone();
    std::thread::Builder::new().name("request".into()).spawn(move || own.serve(peer))?;
    let mut over = supervisor.over.lock().unwrap_or_else(PoisonError::into_inner);
    while !*over {
        (over, _) = supervisor.over_changed.wait_timeout(over, TEND).unwrap_or_else(PoisonError::into_inner);
        for zone in supervisor.all_zones() {
            if let Err(e) = zone.tend() {
                eprintln!("tombolo: {e:#}");
            }
        }
    }
    Ok(())
}

impl Supervisor {
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

    fn end(&self) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over_changed.notify_all();
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

    fn serve(self: &Arc<Self>, mut peer: Peer) {
        let request = match peer.receive::<Request>() {
            Ok(Some(request)) => request,
            Ok(None) => {
                if self.enter() && self.leave() {
                    self.end();
                }
                return;
            }
            Err(e) => {
                let _ = peer.send(&Event::Failed { message: format!("{e:#}") });
                return;
            }
        };
        let Ok(writer) = peer.writer() else { return };
        let reporter = Reporter { socket: Arc::new(Mutex::new(writer)) };
        if let Request::Attend = request {
            return attend(peer, &reporter);
        }
        // Without 'heard' the client starts another supervisor.
        if !self.enter() {
            return;
        }
        reporter.send(&Event::Heard);
        let result = match request {
            Request::Up { project, vms } => self.up(*project, &vms, peer, &reporter),
            Request::Down { vms } => self.down(&vms, &reporter),
            Request::Ps => {
                reporter.send(&Event::Status(Box::new(self.status())));
                Ok(())
            }
            Request::Exec { vm, argv, env, dir, input } => self.running(&vm).and_then(|machine| {
                let exec = crate::exec::Exec { argv, env, dir };
                session::exec(&machine, &exec, input, peer, &|event| reporter.send(event))
            }),
            Request::Console { vm } => {
                match self.machine(&vm).and_then(|m| session::console(&m, peer, RECENT)) {
                    Ok(()) => {
                        if self.leave() {
                            self.end();
                        }
                        return;
                    }
                    Err(e) => Err(e),
                }
            }
            Request::Attend => Ok(()),
            Request::ZoneAttach { zone, vm, rights, mount } => {
                self.attach(&zone, &vm, rights, mount.as_deref(), &reporter)
            }
            Request::ZoneDetach { zone, vm } => self.detach(&zone, &vm, &reporter),
        };
        // Whoever has the answer finds no trace of a supervisor that has nothing left to do.
        let idle = self.leave();
        match result {
            Ok(()) => reporter.send(&Event::Done),
            Err(e) => reporter.send(&Event::Failed { message: format!("{e:#}") }),
        }
        if idle {
            self.end();
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
        drop(beside);
        true
    }

    fn down(&self, vms: &[String], reporter: &Reporter) -> anyhow::Result<()> {
        for vm in vms {
            self.machine(vm)?;
        }
        self.stop(vms, Some(reporter));
        let mut inner = self.lock();
        if inner.machines.is_empty() {
            drop(inner.clear());
            self.dir.remove();
        }
        Ok(())
    }

    /// Stops VMs (all, where the list is empty), in parallel.
    fn stop(&self, vms: &[String], reporter: Option<&Reporter>) {
        // A start in progress is cut short rather than waited for.
        if vms.is_empty() {
            for machine in self.lock().machines.values().filter(|m| m.phase() == Phase::Booting) {
                machine.cancel();
            }
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen: Vec<Arc<Machine>> = {
            let inner = self.lock();
            inner
                .machines
                .values()
                .filter(|m| vms.is_empty() || vms.iter().any(|v| v == m.name()))
                .cloned()
                .collect()
        };
        std::thread::scope(|scope| {
            for machine in &chosen {
                scope.spawn(move || {
                    let report = |stage: Stage, detail: &str| {
                        if let Some(reporter) = reporter {
                            reporter.stage(machine.name(), stage, detail);
                        }
                    };
                    if machine.phase() == Phase::Up {
                        self.unmount_all(machine);
                    }
                    machine.stop(&report);
                    report(Stage::Stopped, "");
                });
            }
        });
        for machine in chosen {
            self.leave_zones(machine.name(), machine.zones().keys());
            self.lock().machines.remove(machine.name());
        }
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

    /// A member that unmounts leaves nothing to recover; one that can't is treated as dead, which is safe.
    fn unmount_all(&self, machine: &Machine) {
        for (name, zone_use) in machine.zones() {
            let source = self.lock().zones.get(&name).map(|z| z.uuid());
            if let (Some(source), Some(_)) = (source, zone_use.mount) {
                if let Err(e) = mount::unmount(machine, &source) {
                    eprintln!("tombolo: {e:#}");
                }
            }
        }
    }

    fn attach(
        &self,
        zone_name: &str,
        vm: &str,
        rights: Rights,
        mount: Option<&str>,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
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

    fn detach(&self, zone_name: &str, vm: &str, reporter: &Reporter) -> anyhow::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if !machine.zones().contains_key(zone_name) {
            anyhow::bail!("the VM '{vm}' is no member of the zone '{zone_name}'");
        }
        mount::unmount(&machine, &zone.uuid())?;
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
        let accelerators = accelerators.iter().map(|a| a.status()).collect();
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
                uuid: zone.uuid(),
                path: zone.path(),
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
                });
                NetStatus {
                    name: name.clone(),
                    uplink: network.spec().uplink.as_ref().map(ToString::to_string),
                    subnet: crate::netspec::subnet(&inner.project.compose, name).map(|s| s.to_string()),
                    pid,
                    starts,
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

/// Keeps the connection until the client goes, or this process ends.
fn attend(mut peer: Peer, reporter: &Reporter) {
    reporter.send(&Event::Heard);
    // Nothing is said on it: what comes is its end.
    let _end = peer.receive::<Request>();
}

/// Mounts a zone's file system in the VM where it is wanted.
fn mount_zone(machine: &Machine, name: &str, zone: &HostZone, zone_use: &ZoneUse) -> anyhow::Result<()> {
    let Some(path) = &zone_use.mount else { return Ok(()) };
    let vm = machine.name();
    let member = zone.slot(vm).with_context(|| format!("the VM '{vm}' is no member of the zone any more"))?;
    let source = Source { uuid: zone.uuid(), member };
    mount::mount(machine, name, &source, path, zone_use.rights == Rights::ReadOnly, &zone_use.options)
}
