// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the supervisor starts VMs: those that `up` asks for, all at once, and each one whose guest reboots.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tombolo_start::layout::Layout;

use super::{Beside, Reporter, Supervisor, mount_zone};
use crate::compose::{Backing, Project, Ready, VmSpec, ZoneUse};
use crate::guest::kit;
use crate::host;
use crate::machine::growth;
use crate::machine::{Machine, Phase, Start};
use crate::project::accelerator::Accelerator;
use crate::project::control::{Event, Stage};
use crate::project::keeper::Part;
use crate::project::network::Plug;
use crate::project::peer::Peer;
use crate::project::session;
use crate::project::zones::{HostZone, Invitation};
use crate::qemu::version::Qemu;
use crate::qemu::{Hypervisor, kvm};

/// A VM that is to be started.
struct Wanted {
    name: String,
    spec: VmSpec,
    qemu: Arc<Qemu>,
    accel: Hypervisor,
    boot: Option<kit::Boot>,
    /// Those of the compose file, or what it had when it rebooted.
    zones: BTreeMap<String, ZoneUse>,
    /// What it was before it rebooted.
    before: Option<Arc<Machine>>,
    /// All memory at its start, whatever the compose file says.
    slow: bool,
}

impl Supervisor {
    pub(super) fn up(
        self: &Arc<Self>,
        project: Project,
        only: &[String],
        peer: Peer,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let _changing = self.changing.take();
        self.check_not_ending()?;
        for name in only {
            if !project.compose.vm.contains_key(name) {
                let near = crate::compose::nearest(name, project.compose.vm.keys().map(String::as_str));
                let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
                anyhow::bail!("{} declares no VM '{name}'{hint}", project.file.display());
            }
        }
        let qemu = Arc::new(Qemu::find(project.compose.qemu.as_deref())?);
        let near = project.file.parent().unwrap_or(Path::new("/")).to_owned();

        // Everything that can be wrong is found out before anything is started.
        let mut missing = Vec::new();
        for (name, spec) in &project.compose.vm {
            if !only.is_empty() && !only.contains(name) {
                continue;
            }
            let known = self.lock().machines.get(name).cloned();
            match known {
                Some(machine)
                    if !matches!(machine.phase(), Phase::Ended | Phase::Failed | Phase::Rebooting) =>
                {
                    if machine.spec() != spec {
                        let text = format!(
                            "the VM '{name}' runs with what the file said before; to apply the change: tombolo down {name} && tombolo up"
                        );
                        reporter.send(&Event::Note { text });
                    }
                    reporter.stage(name, Stage::AlreadyUp, "");
                }
                _ => missing.push((name.clone(), spec.clone(), kit::boot(name, spec, &near)?)),
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
            host::check_memory(self.promised(), vms, zones)?;
        }
        let accel = self.accel(&qemu, &missing, &near, reporter)?;
        self.check_not_ending()?;
        let mut opened = BTreeMap::new();
        for (name, spec) in new_zones {
            opened.insert(name.clone(), Arc::new(HostZone::open(name, spec)?));
        }
        let opened_names: Vec<String> = opened.keys().cloned().collect();
        let running = self.lock().networks.clone();
        let joined = self.parts(&running, &project, &missing, reporter)?;
        let joined_names: Vec<String> = joined.keys().cloned().collect();
        let running = self.lock().accelerators.clone();
        let served = self.parts(&running, &project, &missing, reporter)?;
        let served_names: Vec<String> = served.keys().cloned().collect();
        self.check_not_ending()?;
        {
            let mut inner = self.lock();
            inner.zones.extend(opened);
            inner.networks.extend(joined);
            inner.accelerators.extend(served);
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
                    let wanted = Wanted {
                        zones: spec.zones.clone(),
                        qemu: qemu.clone(),
                        accel: accel[&name],
                        name: name.clone(),
                        before: None,
                        slow: false,
                        spec,
                        boot,
                    };
                    let (started, cancelled) = (&started, &cancelled);
                    scope.spawn(move || {
                        let registered = |machine: &Arc<Machine>| {
                            started.lock().unwrap_or_else(PoisonError::into_inner).push(machine.clone());
                            if cancelled.load(Ordering::Acquire) {
                                machine.cancel();
                            }
                        };
                        let report = |stage: Stage, detail: &str| reporter.stage(&name, stage, detail);
                        let result = self.start_one(wanted, &registered, &report);
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
            return Ok(());
        }
        // What this request started goes again; what ran before stays.
        for machine in started.into_inner().unwrap_or_else(PoisonError::into_inner) {
            if let Err(e) = machine.stop(&[], &|stage, detail| reporter.stage(machine.name(), stage, detail))
            {
                crate::say!("{e:#}");
            }
            self.lock().machines.remove(machine.name());
            self.leave_zones(machine.name(), machine.zones().keys());
        }
        let mut inner = self.lock();
        for name in opened_names {
            inner.zones.remove(&name);
        }
        let beside = Beside {
            networks: take_out(&mut inner.networks, joined_names),
            accelerators: take_out(&mut inner.accelerators, served_names),
        };
        drop(inner);
        beside.end();
        if cancelled.load(Ordering::Acquire) {
            anyhow::bail!("cancelled; everything that was started has been stopped");
        }
        anyhow::bail!("{}", errors.join("\n"))
    }

    /// What running VMs and zones of all projects of this user may still take.
    fn promised(&self) -> u64 {
        let others = crate::project::state::supervisors().unwrap_or_default();
        let others = others.iter().filter(|found| found.process != std::process::id());
        // One that does not answer can't be counted.
        let others = others.filter_map(|found| crate::commands::client::status_of(found).ok().flatten());
        others.chain([self.status()]).map(|project| host::promised(&project)).sum()
    }

    fn check_not_ending(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.ending.load(Ordering::Acquire), "cancelled: the project is being taken down");
        Ok(())
    }

    /// Starts one VM, waits until it is ready, and mounts its zones. `registered` gets it as soon as it can be stopped.
    fn start_one(
        self: &Arc<Self>,
        wanted: Wanted,
        registered: &dyn Fn(&Arc<Machine>),
        report: &dyn Fn(Stage, &str),
    ) -> anyhow::Result<()> {
        let Wanted { name, spec, qemu, accel, boot, zones, before, slow } = wanted;
        report(Stage::Starting, "");
        let memory = if slow { Layout::slow(spec.memory.0) } else { growth::layout(&name, &spec)? };
        let devices = growth::Taken::take(&name, &spec)?;
        let nics = self.plugs(&name, &spec);
        let start = Start {
            name: &name,
            spec: &spec,
            qemu: &qemu,
            accel,
            boot,
            zones: self.invite(&name, &zones)?,
            accelerators: self.seats(&name, &spec, &zones)?,
            memory,
            nics: nics.clone(),
            dir: &self.dir,
            before: before.as_deref(),
        };
        let own = self.clone();
        let ended = move |machine: &Arc<Machine>, how| {
            drop(devices);
            own.leave_zones(machine.name(), machine.zones().keys());
            if machine.set_ended(how) == Phase::Rebooting {
                own.reboot(machine);
            }
        };
        let machine = match Machine::start(start, ended) {
            Ok(machine) => machine,
            Err(e) => {
                self.leave_zones(&name, zones.keys());
                return Err(e);
            }
        };
        self.lock().machines.insert(name.clone(), machine.clone());
        registered(&machine);
        let own = self.clone();
        if let Err(e) = growth::begin(&machine, move |machine| own.start_slowly(machine)) {
            machine.cancel();
            return Err(e);
        }
        machine.follow(report)?;
        for (zone_name, zone_use) in &zones {
            if let Some(path) = &zone_use.mount {
                report(Stage::Preparing, &format!("mount {zone_name} on {path}"));
            }
            let zone = self.zone(zone_name)?;
            mount_zone(&machine, zone_name, &zone, zone_use)?;
        }
        if spec.ready == Ready::Agent {
            for plug in &nics {
                report(Stage::Preparing, &format!("network {}", plug.net));
                plug.set_address(&name, machine.agent())?;
            }
        }
        let bare = self.make_devices(&machine, report)?;
        machine.set_up();
        let status = machine.status();
        let growing = status.growth.map(|g| format!(", {}", g.line())).unwrap_or_default();
        report(Stage::Up, &format!("{:.1} s{growing}{bare}", status.uptime));
        Ok(())
    }

    /// Makes the devices of a VM's accelerators in its guest. What is returned says what the guest lacks for using them.
    fn make_devices(&self, machine: &Machine, report: &dyn Fn(Stage, &str)) -> anyhow::Result<String> {
        let spec = machine.spec();
        let mut bare = Vec::new();
        if spec.ready == Ready::Agent {
            for (name, accelerator) in self.accelerators_of(spec) {
                report(Stage::Preparing, &format!("accelerator {name}"));
                if !accelerator.set_up(machine)? {
                    bare.push(name);
                }
            }
        }
        if bare.is_empty() {
            return Ok(String::new());
        }
        Ok(format!(", no libtombolo-opencl.so in it for {}: see docs/accelerators.md", bare.join(", ")))
    }

    fn accelerators_of(&self, spec: &VmSpec) -> Vec<(String, Arc<Accelerator>)> {
        let inner = self.lock();
        let names = spec.accelerators.0.keys();
        names.filter_map(|name| Some((name.clone(), inner.accelerators.get(name)?.clone()))).collect()
    }

    /// Invitations to the zones of a VM's accelerators; `zones` are those that it has been invited to.
    fn seats(
        &self,
        vm: &str,
        spec: &VmSpec,
        zones: &BTreeMap<String, ZoneUse>,
    ) -> anyhow::Result<Vec<(String, Invitation)>> {
        let invite = |(name, accelerator): (String, Arc<Accelerator>)| {
            Some(accelerator.invite(vm).transpose()?.map(|invitation| (name, invitation)))
        };
        let seats: anyhow::Result<Vec<_>> =
            self.accelerators_of(spec).into_iter().filter_map(invite).collect();
        seats.inspect_err(|_| self.leave_zones(vm, zones.keys()))
    }

    /// A guest that reboots ends its QEMU, since a member's memory and doorbell must not outlast its epoch; here it gets a new one, as what
    /// it was: the zones attached later, their mounts and its consoles included. Called when its old QEMU and memberships are gone.
    fn reboot(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace(old, "reboots", |report| self.start_one(self.wanted_again(old)?, &|_| {}, report));
    }

    /// Its guest has no driver for memory that comes while it runs: it is stopped and started again with all of it.
    fn start_slowly(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace(old, "starts again, with all its memory", |report| {
            // Whoever stopped it, or let it reboot, has decided already.
            if old.phase() != Phase::Up {
                return Ok(());
            }
            let name = old.name();
            let all = Layout::slow(old.spec().memory.0);
            if let Err(e) = growth::allow(name, old.spec(), &all) {
                crate::say!("the VM '{name}' goes on with the memory it has: {e:#}");
                return Ok(());
            }
            let again = self.wanted_again(old)?;
            old.stop(&self.mounted(old), report)?;
            let wanted = Wanted { before: None, slow: true, ..again };
            self.start_one(
                wanted,
                &|machine| machine.mark("no virtio-mem driver: all memory at once"),
                report,
            )
        });
    }

    /// Starts a VM again, unless somebody has stopped it, or brought it up again, meanwhile. `how` says it to whoever reads the log.
    fn replace(
        self: &Arc<Self>,
        old: &Arc<Machine>,
        how: &str,
        start: impl FnOnce(&dyn Fn(Stage, &str)) -> anyhow::Result<()>,
    ) {
        let _changing = self.changing.take();
        let name = old.name();
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

    fn wanted_again(&self, old: &Arc<Machine>) -> anyhow::Result<Wanted> {
        let project = self.lock().project.clone();
        let near = project.file.parent().unwrap_or(Path::new("/"));
        Ok(Wanted {
            name: old.name().to_owned(),
            spec: old.spec().clone(),
            qemu: Arc::new(Qemu::find(project.compose.qemu.as_deref())?),
            accel: old.accel(),
            boot: kit::boot(old.name(), old.spec(), near)?,
            zones: old.zones(),
            before: Some(old.clone()),
            slow: old.layout().grown == 0,
        })
    }

    /// Starts the parts that are missing for these VMs, and extends those that run; returns the new ones.
    fn parts<P: Part>(
        &self,
        running: &BTreeMap<String, Arc<P>>,
        project: &Project,
        missing: &[(String, VmSpec, Option<kit::Boot>)],
        reporter: &Reporter,
    ) -> anyhow::Result<BTreeMap<String, Arc<P>>> {
        let names: BTreeSet<&String> = missing.iter().flat_map(|(_, vm, _)| P::used_by(vm)).collect();
        let mut new = BTreeMap::new();
        for name in names {
            let Some(part) = running.get(name) else {
                new.insert(name.clone(), Arc::new(P::start(name, project, self.dir.path())?));
                continue;
            };
            if part.differs(project) {
                let text = format!(
                    "the {} '{name}' is what the file said before; to apply the change: tombolo down && tombolo up",
                    P::KIND
                );
                reporter.send(&Event::Note { text });
            }
            part.extend(project)?;
        }
        Ok(new)
    }

    fn plugs(&self, vm: &str, spec: &VmSpec) -> Vec<Plug> {
        let inner = self.lock();
        let networks = spec.networks.0.keys().filter_map(|name| inner.networks.get(name));
        networks.filter_map(|network| network.plug(vm, &inner.project)).collect()
    }

    fn invite(
        &self,
        vm: &str,
        zones: &BTreeMap<String, ZoneUse>,
    ) -> anyhow::Result<Vec<(String, ZoneUse, Invitation)>> {
        let mut invitations = Vec::new();
        for (name, zone_use) in zones {
            match self.zone(name).and_then(|zone| zone.invite(vm, zone_use)) {
                Ok(invitation) => invitations.push((name.clone(), zone_use.clone(), invitation)),
                Err(e) => {
                    self.leave_zones(vm, invitations.iter().map(|(name, ..)| name));
                    return Err(e);
                }
            }
        }
        Ok(invitations)
    }

    /// What each VM runs under. KVM is only tried where somebody wants it.
    fn accel(
        &self,
        qemu: &Qemu,
        missing: &[(String, VmSpec, Option<kit::Boot>)],
        near: &Path,
        reporter: &Reporter,
    ) -> anyhow::Result<BTreeMap<String, Hypervisor>> {
        use crate::compose::AccelChoice;
        let mut chosen = BTreeMap::new();
        let mut verdict = None;
        let insists = missing.iter().any(|(_, spec, _)| spec.accel == AccelChoice::Kvm);
        let limit = if insists { kvm::INSISTING } else { kvm::LIMIT };
        for (name, spec, boot) in missing {
            let choice = match std::env::var("TOMBOLO_VM_ACCEL").ok().as_deref() {
                Some("tcg") if spec.accel == AccelChoice::Auto => AccelChoice::Tcg,
                _ => spec.accel,
            };
            if choice == AccelChoice::Tcg {
                chosen.insert(name.clone(), Hypervisor::Tcg);
                continue;
            }
            let verdict = verdict.get_or_insert_with(|| {
                let kit = kit::kit(&kit::places(near), None);
                let kernel = kit.as_ref().or(boot.as_ref()).map(|b| b.kernel.as_path());
                kvm::verdict(qemu, kernel, limit, || {
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
            self.lock().accel = "TCG: the compose file or TOMBOLO_VM_ACCEL says so".into();
        }
        Ok(chosen)
    }
}

/// Takes these entries out of `all`.
fn take_out<T>(all: &mut BTreeMap<String, T>, names: Vec<String>) -> BTreeMap<String, T> {
    names.into_iter().filter_map(|name| all.remove_entry(&name)).collect()
}
