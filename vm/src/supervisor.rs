// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor: one process per running project. It holds the zones, starts and watches the VMs, and answers the
//! commands over its control socket. It carries no data. Whatever it started dies with it (see [`crate::child`]), so a
//! crash or a kill leaves nothing behind.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;

use crate::compose::{Backing, Project, Ready, Rights};
use crate::control::{Event, NetStatus, Peer, PortStatus, Request, Stage, Status, ZoneStatus};
use crate::growth;
use crate::guestkit;
use crate::host;
use crate::machine::{Machine, Phase, Source, Start};
use crate::network::{Network, Plug};
use crate::qemu::kvm::{self, Accel};
use crate::qemu::version::Qemu;
use crate::session;
use crate::state::{Address, StateDir};
use crate::zones::HostZone;

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
}

impl Inner {
    /// Lets go of everything but VMs. What this returns ends the switches when it is dropped, which takes a moment.
    #[must_use]
    fn clear(&mut self) -> BTreeMap<String, Arc<Network>> {
        self.zones.clear();
        std::mem::take(&mut self.networks)
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
        let _ = crate::control::send(&mut socket, event);
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
                if crate::control::check_user(&socket).is_ok() {
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
        let zones: Vec<Arc<HostZone>> = supervisor.lock().zones.values().cloned().collect();
        for zone in zones {
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
            Phase::Booting => anyhow::bail!("the VM '{vm}' is still booting"),
            _ => anyhow::bail!(
                "the VM '{vm}' does not run ({}); start it with 'tombolo up'",
                machine.status().state
            ),
        }
    }

    fn serve(self: &Arc<Self>, mut peer: Peer) {
        let request = match peer.receive::<Request>() {
            Ok(Some(request)) => request,
            Ok(None) => return self.end_if_idle(),
            Err(e) => {
                let _ = peer.send(&Event::Failed { message: format!("{e:#}") });
                return self.end_if_idle();
            }
        };
        let Ok(writer) = peer.writer() else { return };
        let reporter = Reporter { socket: Arc::new(Mutex::new(writer)) };
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
                    Ok(()) => return,
                    Err(e) => Err(e),
                }
            }
            Request::ZoneAttach { zone, vm, rights, mount } => {
                self.attach(&zone, &vm, rights, mount.as_deref(), &reporter)
            }
            Request::ZoneDetach { zone, vm } => self.detach(&zone, &vm, &reporter),
        };
        // Whoever has the answer finds no trace of a supervisor that has nothing left to do.
        let idle = self.withdraw_if_idle();
        match result {
            Ok(()) => reporter.send(&Event::Done),
            Err(e) => reporter.send(&Event::Failed { message: format!("{e:#}") }),
        }
        if idle {
            self.end();
        }
    }

    /// A supervisor without VMs has nothing to do: it lets go of the zones and can't be found any more.
    fn withdraw_if_idle(&self) -> bool {
        let Ok(_changing) = self.changing.try_lock() else { return false };
        let mut inner = self.lock();
        let idle = inner.machines.is_empty();
        if idle {
            drop(inner.clear());
            self.dir.withdraw();
        }
        idle
    }

    fn end_if_idle(&self) {
        if self.withdraw_if_idle() {
            self.end();
        }
    }

    fn up(&self, project: Project, only: &[String], peer: Peer, reporter: &Reporter) -> anyhow::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        for name in only {
            if !project.compose.vm.contains_key(name) {
                let near = crate::compose::nearest(name, project.compose.vm.keys().map(String::as_str));
                let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
                anyhow::bail!("{} declares no VM '{name}'{hint}", project.file.display());
            }
        }
        let qemu = Qemu::find(project.compose.qemu.as_deref())?;
        let near = project.file.parent().unwrap_or(Path::new("/")).to_owned();

        // Everything that can be wrong is found out before anything is started.
        let mut missing = Vec::new();
        for (name, spec) in &project.compose.vm {
            if !only.is_empty() && !only.contains(name) {
                continue;
            }
            let known = self.lock().machines.get(name).cloned();
            match known {
                Some(machine) if !matches!(machine.phase(), Phase::Ended | Phase::Failed) => {
                    if machine.spec() != spec {
                        let text = format!(
                            "the VM '{name}' runs with what the file said before; to apply the change: tombolo down {name} && tombolo up"
                        );
                        reporter.send(&Event::Note { text });
                    }
                    reporter.stage(name, Stage::AlreadyUp, "");
                }
                _ => missing.push((name.clone(), spec.clone(), guestkit::boot(name, spec, &near)?)),
            }
        }
        for (name, spec, _) in &missing {
            host::check_files(name, spec)?;
            growth::check(name, spec)?;
        }
        let new_zones: Vec<_> = {
            let inner = self.lock();
            project.compose.zone.iter().filter(|(n, _)| !inner.zones.contains_key(*n)).collect()
        };
        for (name, spec) in &project.compose.zone {
            let changed = self.lock().zones.get(name).is_some_and(|z| z.spec() != spec);
            if changed {
                let text = format!(
                    "the zone '{name}' is what the file said before; to apply the change: tombolo down && tombolo up"
                );
                reporter.send(&Event::Note { text });
            }
        }
        if !project.compose.overcommit {
            let vms = missing.iter().map(|(n, s, _)| (n.as_str(), s.memory.0));
            let zones = new_zones
                .iter()
                .filter(|(_, z)| z.backing == Backing::Memfd)
                .map(|(n, z)| (n.as_str(), z.size.0));
            host::check_memory(vms, zones)?;
        }
        let accel = self.accel(&qemu, &missing, &near, reporter)?;
        let mut opened = BTreeMap::new();
        for (name, spec) in new_zones {
            opened.insert(name.clone(), Arc::new(HostZone::open(name, spec, self.dir.path())?));
        }
        let opened_names: Vec<String> = opened.keys().cloned().collect();
        let joined = self.networks(&project, &missing, reporter)?;
        let joined_names: Vec<String> = joined.keys().cloned().collect();
        {
            let mut inner = self.lock();
            inner.zones.extend(opened);
            inner.networks.extend(joined);
            inner.project = project;
        }

        // The client's going, or its word, cancels what has not been finished.
        let started: Mutex<Vec<Arc<Machine>>> = Mutex::new(Vec::new());
        let finished = AtomicBool::new(false);
        let cancelled = AtomicBool::new(false);
        let (_, socket) = peer.into_raw();
        let results: Vec<anyhow::Result<()>> = std::thread::scope(|scope| {
            scope.spawn(|| {
                if session::wait_hangup(&socket, &finished) {
                    cancelled.store(true, Ordering::Release);
                    for machine in started.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                        machine.cancel();
                    }
                }
            });
            let booting: Vec<_> = missing
                .into_iter()
                .map(|(name, spec, boot)| {
                    let (qemu, accel, started, cancelled) = (&qemu, &accel, &started, &cancelled);
                    scope.spawn(move || {
                        reporter.stage(&name, Stage::Starting, "");
                        let start = Start {
                            name: &name,
                            spec: &spec,
                            qemu,
                            accel: accel[&name],
                            boot,
                            zones: self.invite(&name, &spec)?,
                            memory: growth::layout(&name, &spec)?,
                            nics: self.plugs(&name, &spec),
                            dir: &self.dir,
                        };
                        let result = self.start_one(start, started, cancelled, reporter);
                        if let Err(e) = &result {
                            let first = format!("{e:#}");
                            reporter.stage(&name, Stage::Failed, first.lines().next().unwrap_or_default());
                        }
                        result
                    })
                })
                .collect();
            let results = booting
                .into_iter()
                .map(|b| {
                    b.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread that starts a VM failed")))
                })
                .collect();
            finished.store(true, Ordering::Release);
            results
        });
        let errors: Vec<String> =
            results.into_iter().filter_map(Result::err).map(|e| format!("{e:#}")).collect();
        if errors.is_empty() && !cancelled.load(Ordering::Acquire) {
            return Ok(());
        }
        // What this request started goes again; what ran before stays.
        for machine in started.into_inner().unwrap_or_else(PoisonError::into_inner) {
            machine.stop(&|stage, detail| reporter.stage(machine.name(), stage, detail));
            self.lock().machines.remove(machine.name());
            self.leave_zones(&machine);
        }
        let mut inner = self.lock();
        for name in opened_names {
            inner.zones.remove(&name);
        }
        let left: Vec<_> = joined_names.iter().filter_map(|name| inner.networks.remove(name)).collect();
        drop(inner);
        drop(left);
        if cancelled.load(Ordering::Acquire) {
            anyhow::bail!("cancelled; everything that was started has been stopped");
        }
        anyhow::bail!("{}", errors.join("\n"))
    }

    fn start_one(
        &self,
        start: Start<'_>,
        started: &Mutex<Vec<Arc<Machine>>>,
        cancelled: &AtomicBool,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let name = start.name.to_owned();
        let spec = start.spec.clone();
        let members: Vec<(String, Arc<HostZone>)> = {
            let inner = self.lock();
            spec.zones.keys().filter_map(|z| Some((z.clone(), inner.zones.get(z)?.clone()))).collect()
        };
        let dying = members.clone();
        let member = name.clone();
        let memory = start.memory;
        let nics = start.nics.clone();
        let devices = growth::Taken::take(&name, &spec, start.dir)?;
        let machine = Machine::start(start, move |_| {
            drop(devices);
            for (_, zone) in dying {
                zone.gone(&member);
            }
        })?;
        self.lock().machines.insert(name.clone(), machine.clone());
        started.lock().unwrap_or_else(PoisonError::into_inner).push(machine.clone());
        if cancelled.load(Ordering::Acquire) {
            machine.cancel();
        }
        let report = |stage: Stage, detail: &str| reporter.stage(&name, stage, detail);
        if let Err(e) = growth::begin(&machine, memory) {
            machine.cancel();
            return Err(e);
        }
        machine.follow(&report)?;
        for (zone_name, zone) in &members {
            let zone_use = &spec.zones[zone_name];
            if let Some(path) = &zone_use.mount {
                report(Stage::Preparing, &format!("mount {zone_name} on {path}"));
                machine.mount(zone_name, &source(zone, &name)?, path, zone_use.rights == Rights::ReadOnly)?;
            }
        }
        if spec.ready == Ready::Agent {
            for plug in &nics {
                report(Stage::Preparing, &format!("network {}", plug.net));
                plug.set_address(&name, machine.agent())?;
            }
        }
        machine.set_up();
        let seconds = machine.status().uptime;
        report(Stage::Up, &format!("{seconds:.1} s"));
        Ok(())
    }

    fn invite(
        &self,
        vm: &str,
        spec: &crate::compose::VmSpec,
    ) -> anyhow::Result<Vec<(String, crate::zones::Invitation)>> {
        let inner = self.lock();
        spec.zones
            .iter()
            .map(|(name, zone_use)| {
                let zone =
                    inner.zones.get(name).with_context(|| format!("the zone '{name}' is not there"))?;
                Ok((name.clone(), zone.invite(vm, zone_use.rights)?))
            })
            .collect()
    }

    /// Starts the switches that are missing for these VMs, and makes ports in those that run; returns the new ones.
    fn networks(
        &self,
        project: &Project,
        missing: &[(String, crate::compose::VmSpec, Option<guestkit::Boot>)],
        reporter: &Reporter,
    ) -> anyhow::Result<BTreeMap<String, Arc<Network>>> {
        let mut joined = BTreeMap::new();
        for (name, spec) in &project.compose.net {
            if !missing.iter().any(|(_, vm, _)| vm.networks.0.contains_key(name)) {
                continue;
            }
            let running = self.lock().networks.get(name).cloned();
            match running {
                None => {
                    let network = Network::start(name, project, self.dir.path())?;
                    joined.insert(name.clone(), Arc::new(network));
                }
                Some(network) => {
                    if network.spec() != spec {
                        let text = format!(
                            "the network '{name}' is what the file said before; to apply the change: tombolo down && tombolo up"
                        );
                        reporter.send(&Event::Note { text });
                    }
                    network.extend(project)?;
                }
            }
        }
        Ok(joined)
    }

    fn plugs(&self, vm: &str, spec: &crate::compose::VmSpec) -> Vec<Plug> {
        let inner = self.lock();
        let networks = spec.networks.0.keys().filter_map(|name| inner.networks.get(name));
        networks.filter_map(|network| network.plug(vm, &inner.project)).collect()
    }

    fn leave_zones(&self, machine: &Machine) {
        for name in machine.zones() {
            let zone = self.lock().zones.get(&name).cloned();
            if let Some(zone) = zone {
                zone.gone(machine.name());
            }
        }
    }

    /// What each VM runs under. KVM is only tried where somebody wants it.
    fn accel(
        &self,
        qemu: &Qemu,
        missing: &[(String, crate::compose::VmSpec, Option<guestkit::Boot>)],
        near: &Path,
        reporter: &Reporter,
    ) -> anyhow::Result<BTreeMap<String, Accel>> {
        use crate::compose::AccelChoice;
        let mut chosen = BTreeMap::new();
        let mut verdict = None;
        for (name, spec, boot) in missing {
            let choice = match std::env::var("TOMBOLO_ACCEL").ok().as_deref() {
                Some("tcg") if spec.accel == AccelChoice::Auto => AccelChoice::Tcg,
                _ => spec.accel,
            };
            if choice == AccelChoice::Tcg {
                chosen.insert(name.clone(), Accel::Tcg);
                continue;
            }
            let verdict = verdict.get_or_insert_with(|| {
                let kit = guestkit::kit(&guestkit::places(near), None);
                let kernel = kit.as_ref().or(boot.as_ref()).map(|b| b.kernel.as_path());
                kvm::verdict(qemu, kernel, || {
                    reporter.send(&Event::Note {
                        text: "finding out whether KVM works here (once per boot of the host)".into(),
                    });
                })
            });
            if choice == AccelChoice::Kvm && !verdict.works {
                anyhow::bail!("vm.{name}.accel is \"kvm\", but {}; write \"auto\" or \"tcg\"", verdict.why);
            }
            chosen.insert(name.clone(), verdict.accel());
        }
        if let Some(verdict) = verdict {
            let text = format!("{}: {}", verdict.accel().name(), verdict.why);
            reporter.send(&Event::Note { text: text.clone() });
            self.lock().accel = text;
        } else if !missing.is_empty() {
            self.lock().accel = "TCG: the compose file or TOMBOLO_ACCEL says so".into();
        }
        Ok(chosen)
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
            self.leave_zones(&machine);
            self.lock().machines.remove(machine.name());
        }
    }

    /// A member that unmounts leaves nothing to recover; one that can't is treated as dead, which is safe.
    fn unmount_all(&self, machine: &Machine) {
        for (name, zone_use) in &machine.spec().zones {
            let source = self.lock().zones.get(name).map(|z| z.uuid());
            if let (Some(source), Some(_)) = (source, &zone_use.mount) {
                if let Err(e) = machine.unmount(&source) {
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
        if machine.zones().iter().any(|z| z == zone_name) {
            anyhow::bail!("the VM '{vm}' is a member of the zone '{zone_name}' already");
        }
        let invitation = zone.invite(vm, rights)?;
        let read_only = rights == Rights::ReadOnly;
        if let Err(e) = machine.plug(zone_name, &invitation) {
            zone.gone(vm);
            return Err(e);
        }
        if let Some(path) = mount {
            machine.mount(zone_name, &source(&zone, vm)?, path, read_only)?;
        }
        reporter
            .send(&Event::Note { text: format!("the VM '{vm}' is a member of the zone '{zone_name}' now") });
        Ok(())
    }

    fn detach(&self, zone_name: &str, vm: &str, reporter: &Reporter) -> anyhow::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = self.running(vm)?;
        let zone = self.zone(zone_name)?;
        if !machine.zones().iter().any(|z| z == zone_name) {
            anyhow::bail!("the VM '{vm}' is no member of the zone '{zone_name}'");
        }
        machine.unmount(&zone.uuid())?;
        zone.gone(vm);
        machine.forget_zone(zone_name);
        reporter.send(&Event::Note {
            text: format!(
                "the VM '{vm}' has left the zone '{zone_name}'. Its memory device stays in the VM until that is stopped: stock QEMU can't unplug virtio-pmem"
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
            project: inner.project.name.clone(),
            file: inner.project.file.clone(),
            supervisor: Some(std::process::id()),
            accel: inner.accel.clone(),
            vms,
            zones,
        }
    }
}

/// What `member` mounts of `zone`.
fn source(zone: &HostZone, member: &str) -> anyhow::Result<Source> {
    let slot =
        zone.slot(member).with_context(|| format!("the VM '{member}' is no member of the zone any more"))?;
    Ok(Source { uuid: zone.uuid(), member: slot })
}
