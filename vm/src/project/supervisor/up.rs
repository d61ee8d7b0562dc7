// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo up`: it checks and plans, opens zones, networks and accelerators, and starts VMs in the order of `depends_on`. If a VM fails, or the
//! client goes, everything that it started is stopped again.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tombolo_topology::plan::VmPlan;

use super::launch::Wanted;
use super::order::{self, Order, Reached};
use super::plan::{replaced, started, take_out};
use super::requests::LOOK;
use super::turn::Turn;
use super::{Beside, Inner, Reporter, Supervisor};
use crate::compose::{Project, VmSpec, ZoneSpec};
use crate::machine::orphans::OfHost;
use crate::machine::{Machine, disks, placement, stop};
use crate::project::changes::{Action, Kind, Wish};
use crate::project::control::{Event, Stage};
use crate::project::keeper::Part;
use crate::project::peer::Peer;
use crate::project::preflight::{self, Ready};
use crate::project::revival;
use crate::project::session;
use crate::project::zones::HostZone;
use crate::qemu::Hypervisor;
use crate::thread;

/// The pause between two checks whether a VM is healthy.
const HEALTH: Duration = Duration::from_millis(100);

/// The names of the parts that an `up` has added to the project.
#[derive(Default)]
struct Added {
    zones: Vec<String>,
    networks: Vec<String>,
    accelerators: Vec<String>,
}

impl Supervisor {
    pub(super) fn up(
        self: &Arc<Self>,
        mut project: Project,
        wish: &Wish,
        wait: bool,
        peer: Peer,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let turn = self.turn(&peer.socket(), reporter)?;
        self.check_not_ending()?;
        wish.check(&project)?;
        // All checks come before the first stop or start.
        // What can't be given back is a dead VM's. If this start needs it, a check below refuses it by name.
        for text in OfHost::give_back(None).failures() {
            reporter.send(&Event::Note { text: text.clone() });
        }
        let (running, actions) = self.plan(&mut project, wish);
        let (promised, has_ports) = (|| self.promised(), |vm: &str| self.has_ports(vm));
        let ready = preflight::examine(&project, &running, &actions, promised, has_ports)?;
        let placements = self.placements(&project, &ready.vms)?;
        for (name, plan) in &placements {
            placement::check_isolation(&project.compose, name, plan)?;
        }
        self.check_owners(&project, &started(&actions).collect())?;
        let near = project.file.parent().unwrap_or(Path::new("/")).to_owned();
        let client = peer.socket();
        let is_cancelled = || self.ending.load(Ordering::Acquire) || session::has_gone(&client);
        let hypervisors = self.choose_hypervisors(&ready.qemu, &ready.vms, &near, reporter, &is_cancelled)?;
        let mut wished = self.kept(&actions);
        self.check_not_ending()?;
        self.announce(&actions, reporter);
        self.clear_away(&actions, reporter)?;
        let mut added = Added::default();
        self.add_parts(project, &actions, &placements, &mut added)
            .inspect_err(|_| self.remove_parts(&added))?;

        let wanted = wanted(ready, &near, &hypervisors, placements);
        let starting: BTreeSet<String> = wanted.iter().map(|vm| vm.name.clone()).collect();
        turn.narrow(starting.clone());
        let (_, socket) = peer.into_raw();
        let starts = Starts::new(self, &turn, reporter, &wished);
        let mut errors = starts.run(wanted, &socket);
        let cancelled = starts.is_cancelled();
        if errors.is_empty() && !cancelled {
            drop(turn);
            wished.extend(starting);
            return if wait { self.wait_healthy(&wished, &socket, reporter) } else { Ok(()) };
        }
        let left = starts.take_back(&starting);
        self.remove_parts(&added);
        anyhow::ensure!(
            !cancelled || !left.is_empty(),
            "cancelled; everything that was started has been stopped"
        );
        errors.extend(left);
        anyhow::bail!("{}", errors.join("\n"))
    }

    /// Returns whether everything is being stopped.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(super) fn check_not_ending(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_ending(), "cancelled: the project is being taken down");
        Ok(())
    }

    /// Opens the zones of the project that are missing, and starts the networks and accelerators that the plan's VMs lack. `added` gets the name of each one.
    fn add_parts(
        &self,
        project: Project,
        actions: &[Action],
        placements: &BTreeMap<String, VmPlan>,
        added: &mut Added,
    ) -> anyhow::Result<()> {
        self.dir.renew()?;
        for (name, spec) in &project.compose.zone {
            if !self.lock().zones.contains_key(name) {
                let zone = self.open_zone(&project, name, spec, placements)?;
                self.lock().zones.insert(name.clone(), Arc::new(zone));
                added.zones.push(name.clone());
            }
        }
        self.parts(&project, actions, Kind::Network, |inner| &mut inner.networks, &mut added.networks)?;
        let accelerators = &mut added.accelerators;
        self.parts(&project, actions, Kind::Accelerator, |inner| &mut inner.accelerators, accelerators)?;
        self.check_not_ending()?;
        self.lock().project = project.clone();
        revival::note(&self.dir, &project)
    }

    fn open_zone(
        &self,
        project: &Project,
        name: &str,
        spec: &ZoneSpec,
        placements: &BTreeMap<String, VmPlan>,
    ) -> anyhow::Result<HostZone> {
        let nodes = self.zone_nodes(project, name, spec, placements);
        let zone = HostZone::open(name, spec, nodes, self.dir.path())?;
        let running = self.lock().zones.clone();
        if let Some((same, _)) = running.iter().find(|(_, there)| there.uuid() == zone.uuid()) {
            zone.end();
            anyhow::bail!(
                "zone.{name} has the uuid of the zone '{same}', as a copied file has: a guest could not tell them apart. Make a zone for the copy: \
                 tombolo zone create, then tombolo files snapshot and restore"
            );
        }
        if let Err(e) = self.dir.link_zone(name, &zone.path()) {
            crate::say!("the zone '{name}' has no path of its name: {e}");
        }
        Ok(zone)
    }

    fn remove_parts(&self, added: &Added) {
        let mut inner = self.lock();
        let beside = Beside {
            zones: take_out(&mut inner.zones, added.zones.iter()),
            networks: take_out(&mut inner.networks, added.networks.iter()),
            accelerators: take_out(&mut inner.accelerators, added.accelerators.iter()),
        };
        drop(inner);
        beside.end();
    }

    /// Starts the parts that a plan's VMs lack and those that it starts anew, and extends those that run. `added` gets the names of the new ones.
    fn parts<P: Part>(
        &self,
        project: &Project,
        actions: &[Action],
        kind: Kind,
        all: impl Fn(&mut Inner) -> &mut BTreeMap<String, Arc<P>>,
        added: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let starting: BTreeSet<&String> = started(actions).collect();
        let vms = starting.iter().filter_map(|name| Some((*name, project.compose.vm.get(*name)?)));
        let used = vms.flat_map(|(name, vm)| P::used_by(name, vm, &project.compose));
        let names: BTreeSet<&String> = used.chain(replaced(actions, kind)).collect();
        for name in names {
            let running = all(&mut self.lock()).get(name).cloned();
            if let Some(part) = running {
                part.extend(project, &starting)?;
            } else {
                let part = Arc::new(P::start(name, project, self.dir.path())?);
                all(&mut self.lock()).insert(name.clone(), part);
                added.push(name.clone());
            }
        }
        Ok(())
    }

    /// Waits until all these VMs are healthy. They stay as they are if one is not, or the client goes.
    fn wait_healthy(
        &self,
        names: &BTreeSet<String>,
        client: &UnixStream,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let find = |vm: &str| self.machine(vm).ok();
        for name in names {
            let mut told = false;
            while !order::is_healthy(name, &find)? {
                if !std::mem::replace(&mut told, true) {
                    reporter.stage(name, Stage::Waiting, "until it is healthy");
                }
                anyhow::ensure!(!session::has_gone(client), "cancelled; the VMs run on");
                std::thread::sleep(HEALTH);
            }
            if told {
                reporter.stage(name, Stage::Up, "healthy");
            }
        }
        Ok(())
    }
}

/// The starts of the VMs of a plan.
fn wanted(
    ready: Ready,
    folder: &Path,
    hypervisors: &BTreeMap<String, Hypervisor>,
    mut placements: BTreeMap<String, VmPlan>,
) -> Vec<Wanted> {
    let Ready { qemu, vms } = ready;
    let start = |(name, spec, boot): (String, VmSpec, _)| Wanted {
        folder: folder.to_owned(),
        zones: spec.zones.clone(),
        qemu: qemu.clone(),
        hypervisor: hypervisors[&name],
        before: None,
        attempt: None,
        again: false,
        slow: false,
        placement: placements.remove(&name),
        formats: Vec::new(),
        name,
        spec,
        boot,
    };
    vms.into_iter().map(start).collect()
}

/// The VMs that one `up` starts, each on a thread of its own.
struct Starts<'a> {
    supervisor: &'a Arc<Supervisor>,
    turn: &'a Turn<'a>,
    reporter: &'a Reporter,
    order: Order,
    /// Machines that have been started.
    started: Mutex<Vec<Arc<Machine>>>,
    /// The client has gone, or has asked for the end.
    cancelled: AtomicBool,
}

impl<'a> Starts<'a> {
    /// `ready`: VMs that run already.
    fn new(
        supervisor: &'a Arc<Supervisor>,
        turn: &'a Turn<'a>,
        reporter: &'a Reporter,
        ready: &BTreeSet<String>,
    ) -> Starts<'a> {
        let order = Order::default();
        for name in ready {
            order.reach(name, Reached::Ready);
        }
        let (started, cancelled) = (Mutex::default(), AtomicBool::new(false));
        Starts { supervisor, turn, reporter, order, started, cancelled }
    }

    fn started(&self) -> MutexGuard<'_, Vec<Arc<Machine>>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Starts all VMs and waits until each is ready or has failed. Returns the errors. The end of the connection to the client cancels starts
    /// that have not finished.
    fn run(&self, wanted: Vec<Wanted>, client: &UnixStream) -> Vec<String> {
        let finished = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = || {
                if session::wait_hangup(client, &finished) {
                    self.cancel();
                }
            };
            if let Err(e) = thread::start_in(scope, "hangup", watch) {
                return vec![format!("no VM is started: {e}")];
            }
            let threads: Vec<_> = wanted
                .into_iter()
                .map(|vm| {
                    let name = vm.name.clone();
                    let begun = thread::start_in(scope, "start", move || self.start(vm));
                    // Others may wait for this VM already.
                    begun.inspect_err(|_| self.order.reach(&name, Reached::Failed)).map_err(|e| (name, e))
                })
                .collect();
            let failed = || Err(anyhow::anyhow!("a thread that starts a VM failed"));
            let results: Vec<_> = threads
                .into_iter()
                .map(|thread| match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|_| failed()),
                    Err((name, e)) => Err(anyhow::anyhow!("the VM '{name}' is not started: {e}")),
                })
                .collect();
            finished.store(true, Ordering::Release);
            results.into_iter().filter_map(Result::err).map(|e| format!("{e:#}")).collect()
        })
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        for machine in self.started().iter() {
            machine.cancel();
        }
    }

    /// Starts a VM when those that it depends on have come far enough.
    fn start(&self, wanted: Wanted) -> anyhow::Result<()> {
        let (name, depends) = (wanted.name.clone(), wanted.spec.depends_on.clone());
        let report = |stage: Stage, detail: &str| self.reporter.stage(&name, stage, detail);
        let waits = |what: &str| report(Stage::Waiting, what);
        let find = |vm: &str| self.supervisor.machine(vm).ok();
        let result = self
            .order
            .wait(&name, &depends, &find, &|| self.is_cancelled(), &waits)
            .and_then(|()| self.supervisor.check_not_ending())
            .and_then(|()| self.supervisor.start_one(wanted, &|machine| self.register(machine), &report));
        if result.is_ok() {
            // It may reboot while others start.
            self.turn.release(&name);
        }
        self.order.reach(&name, if result.is_ok() { Reached::Ready } else { Reached::Failed });
        if let Err(e) = &result {
            let text = format!("{e:#}");
            report(Stage::Failed, text.lines().next().unwrap_or_default());
        }
        result
    }

    /// Notes a machine whose QEMU runs.
    fn register(&self, machine: &Arc<Machine>) {
        self.started().push(machine.clone());
        self.order.reach(machine.name(), Reached::Started);
        if self.is_cancelled() {
            machine.cancel();
        }
    }

    /// Stops the VMs that were started, all at the same time, and removes the overlays of those that were not. Returns why some are still there.
    fn take_back(&self, starting: &BTreeSet<String>) -> Vec<String> {
        let started: BTreeSet<String> =
            self.started().iter().map(|machine| machine.name().to_owned()).collect();
        for name in starting.difference(&started) {
            if self.supervisor.machine(name).is_err() {
                disks::discard(&self.supervisor.dir, Some(name));
            }
        }
        let stopped = thread::all("stop", started.intersection(starting).map(|name| || self.stop(name)));
        let failed = || Err(anyhow::anyhow!("a thread that stops a VM failed"));
        let stopped = stopped.into_iter().map(|stopped| stopped.unwrap_or_else(failed));
        stopped.filter_map(|stopped| stopped.err().map(|e| format!("{e:#}"))).collect()
    }

    /// Stops a VM that was started, or whose reboot has begun since.
    ///
    /// # Errors
    /// Its process does not die. It stays in the list.
    fn stop(&self, name: &str) -> anyhow::Result<()> {
        while !self.turn.reclaim(name, LOOK) {
            if let Ok(machine) = self.supervisor.machine(name) {
                machine.cancel();
            }
        }
        let Ok(machine) = self.supervisor.machine(name) else { return Ok(()) };
        let report = |stage: Stage, detail: &str| self.reporter.stage(name, stage, detail);
        machine.stop(&[], Instant::now() + stop::LONGEST, &report)?;
        self.supervisor.forget(&machine);
        Ok(())
    }
}
