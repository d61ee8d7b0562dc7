// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The starts of VMs: those of `up`, all at once, and those of guests that reboot.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tombolo_start::layout::Layout;
use tombolo_topology::plan::VmPlan;

use super::launch::Wanted;
use super::order::{self, Order, Reached};
use super::plan::{replaced, started, take_out};
use super::requests::LOOK;
use super::turn::{Of, Turn};
use super::{Beside, Reporter, Supervisor};
use crate::compose::{Project, VmSpec};
use crate::guest::kit;
use crate::host;
use crate::machine::{Machine, Phase, disks, growth, placement, stop};
use crate::project::changes::{Action, Kind, Wish};
use crate::project::control::{Stage, Status};
use crate::project::keeper::Part;
use crate::project::peer::Peer;
use crate::project::preflight::{self, Ready};
use crate::project::session;
use crate::project::zones::HostZone;
use crate::qemu::version::Qemu;

/// The pause between two checks whether a VM is healthy.
const HEALTH: Duration = Duration::from_millis(100);

impl Supervisor {
    pub(super) fn up(
        self: &Arc<Self>,
        mut project: Project,
        wish: &Wish,
        wait: bool,
        peer: Peer,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let changing = self.turn(&peer.socket(), reporter)?;
        self.check_not_ending()?;
        wish.check(&project)?;
        let near = project.file.parent().unwrap_or(Path::new("/")).to_owned();

        // Everything that can be wrong is found out before anything is stopped or started.
        growth::give_back_orphans()?;
        let (running, actions) = self.plan(&mut project, wish);
        let Ready { qemu, vms: missing } =
            preflight::examine(&project, &running, &actions, || self.promised())?;
        let mut placements = self.placements(&project, &missing)?;
        self.check_owners(&project, &started(&actions).collect())?;
        let mut wished: BTreeSet<String> = self.kept(&actions);
        let order = Order::default();
        for name in &wished {
            order.reach(name, Reached::Ready);
        }
        let hypervisors = self.choose_hypervisors(&qemu, &missing, &near, reporter)?;
        self.check_not_ending()?;
        self.announce(&actions, reporter);
        self.clear_away(&actions, reporter)?;
        let mut opened = BTreeMap::new();
        for (name, spec) in &project.compose.zone {
            if !self.lock().zones.contains_key(name) {
                let zone = HostZone::open(name, spec)?;
                if let Err(e) = self.dir.link_zone(name, &zone.path()) {
                    crate::say!("the zone '{name}' has no path of its name: {e}");
                }
                opened.insert(name.clone(), Arc::new(zone));
            }
        }
        let opened_names: Vec<String> = opened.keys().cloned().collect();
        let running = self.lock().networks.clone();
        let joined = self.parts(&running, &project, &actions, Kind::Network)?;
        let joined_names: Vec<String> = joined.keys().cloned().collect();
        let running = self.lock().accelerators.clone();
        let served = self.parts(&running, &project, &actions, Kind::Accelerator)?;
        let served_names: Vec<String> = served.keys().cloned().collect();
        self.check_not_ending()?;
        {
            let mut inner = self.lock();
            inner.zones.extend(opened);
            inner.networks.extend(joined);
            inner.accelerators.extend(served);
            inner.project = project;
        }
        let starting: BTreeSet<String> = missing.iter().map(|(name, ..)| name.clone()).collect();
        changing.narrow(starting.clone());

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
                    let wanted = Wanted {
                        zones: spec.zones.clone(),
                        qemu: qemu.clone(),
                        hypervisor: hypervisors[&name],
                        name: name.clone(),
                        before: None,
                        attempt: None,
                        slow: false,
                        placement: placements.remove(&name),
                        spec,
                        boot,
                    };
                    let (started, cancelled, order, changing) = (&started, &cancelled, &order, &changing);
                    let depends = wanted.spec.depends_on.clone();
                    scope.spawn(move || {
                        let registered = |machine: &Arc<Machine>| {
                            started.lock().unwrap_or_else(PoisonError::into_inner).push(machine.clone());
                            order.reach(machine.name(), Reached::Started);
                            if cancelled.load(Ordering::Acquire) {
                                machine.cancel();
                            }
                        };
                        let report = |stage: Stage, detail: &str| reporter.stage(&name, stage, detail);
                        let waits = |what: &str| report(Stage::Waiting, what);
                        let find = |vm: &str| self.machine(vm).ok();
                        let result = order
                            .wait(&name, &depends, &find, &|| cancelled.load(Ordering::Acquire), &waits)
                            .and_then(|()| self.start_one(wanted, &registered, &report));
                        if result.is_ok() {
                            // It may reboot while others start.
                            changing.release(&name);
                        }
                        order.reach(&name, if result.is_ok() { Reached::Ready } else { Reached::Failed });
                        if let Err(e) = &result {
                            let first = format!("{e:#}");
                            report(Stage::Failed, first.lines().next().unwrap_or_default());
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
            drop(changing);
            wished.extend(starting);
            return if wait { self.wait_healthy(&wished, &socket, reporter) } else { Ok(()) };
        }
        // The VMs that this request started are stopped again; those that ran before stay.
        let started = started.into_inner().unwrap_or_else(PoisonError::into_inner);
        for name in &starting {
            if started.iter().any(|machine| machine.name() == name) {
                self.take_back(name, &changing, reporter);
            } else if self.machine(name).is_err() {
                disks::discard(&self.dir, Some(name));
            }
        }
        let mut inner = self.lock();
        for name in opened_names {
            inner.zones.remove(&name);
        }
        let beside = Beside {
            networks: take_out(&mut inner.networks, joined_names.iter()),
            accelerators: take_out(&mut inner.accelerators, served_names.iter()),
        };
        drop(inner);
        beside.end();
        if cancelled.load(Ordering::Acquire) {
            anyhow::bail!("cancelled; everything that was started has been stopped");
        }
        anyhow::bail!("{}", errors.join("\n"))
    }

    /// Stops a VM that this request has started, or whose reboot has begun since.
    fn take_back(&self, name: &str, changing: &Turn<'_>, reporter: &Reporter) {
        while !changing.reclaim(name, LOOK) {
            if let Ok(machine) = self.machine(name) {
                machine.cancel();
            }
        }
        let Ok(machine) = self.machine(name) else { return };
        let report = |stage: Stage, detail: &str| reporter.stage(name, stage, detail);
        if let Err(e) = machine.stop(&[], Instant::now() + stop::LONGEST, &report) {
            crate::say!("{e:#}");
        }
        self.lock().machines.remove(name);
        disks::discard(&self.dir, Some(name));
        self.leave_zones(name, machine.zones().keys());
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

    /// The bytes that running VMs and zones of all projects of this user may still take.
    pub(super) fn promised(&self) -> u64 {
        self.all_projects().iter().map(host::promised).sum()
    }

    /// The state of all projects of this user, this one last. A supervisor that does not answer can't be counted.
    fn all_projects(&self) -> Vec<Status> {
        let others = crate::project::state::supervisors().unwrap_or_default();
        let others = others.iter().filter(|found| found.process != std::process::id());
        let others = others.filter_map(|found| crate::commands::client::status_of(found).ok().flatten());
        others.chain([self.status()]).collect()
    }

    /// The places on the host of VMs that are to be started, beside those that run.
    fn placements(
        &self,
        project: &Project,
        missing: &[(String, VmSpec, Option<kit::Boot>)],
    ) -> anyhow::Result<BTreeMap<String, VmPlan>> {
        // One that is restarted gives back what it has first.
        let starts = |status: &Status, vm: &str| {
            status.supervisor == Some(std::process::id()) && missing.iter().any(|(name, ..)| name == vm)
        };
        let rules = || placement::rules(&project.compose, &self.all_projects(), starts);
        placement::of_starting(missing.iter().map(|(name, spec, _)| (name.as_str(), spec)), rules)
    }

    fn check_not_ending(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.ending.load(Ordering::Acquire), "cancelled: the project is being taken down");
        Ok(())
    }

    /// A guest that reboots ends its QEMU, since a member's memory and doorbell must not outlast its epoch; here it gets a new one, as what
    /// it was: the zones attached later, their mounts and its consoles included. Called when its old QEMU and memberships are gone.
    pub(super) fn reboot(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace(old, "reboots", |report| self.start_one(self.wanted_again(old, None)?, &|_| {}, report));
    }

    /// Its guest has no driver for memory that comes while it runs: it is stopped and started again with all of it.
    pub(super) fn start_slowly(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace(old, "starts again, with all its memory", |report| {
            // A command has stopped it, or it reboots: there is nothing to do.
            if old.phase() != Phase::Up {
                return Ok(());
            }
            let name = old.name();
            let all = Layout::slow(old.spec().memory.0);
            if let Err(e) = growth::allow(name, old.spec(), &all) {
                crate::say!("the VM '{name}' goes on with the memory it has: {e:#}");
                return Ok(());
            }
            let again = self.wanted_again(old, None)?;
            old.stop(&self.mounted(old), Instant::now() + stop::LONGEST, report)?;
            let wanted = Wanted { before: None, slow: true, ..again };
            self.start_one(
                wanted,
                &|machine| machine.mark("no virtio-mem driver: all memory at once"),
                report,
            )
        });
    }

    /// Starts a VM again, unless a command has stopped or started it meanwhile. `how` describes the start in the log.
    pub(super) fn replace(
        self: &Arc<Self>,
        old: &Arc<Machine>,
        how: &str,
        start: impl FnOnce(&dyn Fn(Stage, &str)) -> anyhow::Result<()>,
    ) {
        let name = old.name();
        let _changing = self.changing.take(Of::Vm(name));
        if !self.lock().machines.get(name).is_some_and(|m| Arc::ptr_eq(m, old)) {
            return;
        }
        let report = |stage: Stage, detail: &str| {
            crate::say!("the VM '{name}' {how}: {stage:?} {detail}");
        };
        if let Err(e) = start(&report) {
            crate::say!("the VM '{name}' {how}, and fails: {e:#}");
            let current = self.lock().machines.get(name).cloned();
            let why = format!("it {how}, and fails: {e:#}");
            current.as_ref().unwrap_or(old).fail(why.lines().next().unwrap_or_default());
        }
    }

    /// The start of a VM that ended. `attempt`: starts in a row by the restart policy, if that policy starts the VM.
    pub(super) fn wanted_again(&self, old: &Arc<Machine>, attempt: Option<u32>) -> anyhow::Result<Wanted> {
        let project = self.lock().project.clone();
        let near = project.file.parent().unwrap_or(Path::new("/"));
        Ok(Wanted {
            name: old.name().to_owned(),
            spec: old.spec().clone(),
            qemu: Arc::new(Qemu::find(project.compose.qemu.as_deref())?),
            hypervisor: old.hypervisor(),
            boot: kit::boot(old.name(), old.spec(), near)?,
            zones: old.zones(),
            before: Some(old.clone()),
            attempt,
            slow: old.layout().grown == 0,
            placement: old.placement().map(|placement| placement.plan),
        })
    }

    /// Starts the parts that a plan's VMs lack and those that it starts anew, and extends those that run; returns the new ones.
    fn parts<P: Part>(
        &self,
        running: &BTreeMap<String, Arc<P>>,
        project: &Project,
        actions: &[Action],
        kind: Kind,
    ) -> anyhow::Result<BTreeMap<String, Arc<P>>> {
        let starting: BTreeSet<&String> = started(actions).collect();
        let vms = starting.iter().filter_map(|name| Some((*name, project.compose.vm.get(*name)?)));
        let used = vms.flat_map(|(name, vm)| P::used_by(name, vm, &project.compose));
        let names: BTreeSet<&String> = used.chain(replaced(actions, kind)).collect();
        let mut new = BTreeMap::new();
        for name in names {
            match running.get(name) {
                Some(part) => part.extend(project, &starting)?,
                None => drop(new.insert(name.clone(), Arc::new(P::start(name, project, self.dir.path())?))),
            }
        }
        Ok(new)
    }
}
