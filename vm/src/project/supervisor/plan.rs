// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The running project, as [`changes::plan`] compares it, and the steps of a plan before the first start.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use tombolo_topology::plan::VmPlan;

use super::{Beside, Reporter, Supervisor};
use crate::compose::{Project, VmSpec, network};
use crate::guest::kit;
use crate::host;
use crate::machine::{Machine, Phase, placement, stop};
use crate::project::changes::{self, Action, Kind, Parts, Side, Wish};
use crate::project::control::{Event, Stage, Status};
use crate::project::preflight;

/// Returns whether `up` leaves a machine alone.
fn runs(machine: &Machine) -> bool {
    !matches!(machine.phase(), Phase::Ended | Phase::Failed | Phase::Rebooting)
}

impl Supervisor {
    /// Compares what runs with what the file says, whose networks get the subnets that they have already.
    pub(super) fn plan(&self, project: &mut Project, wish: &Wish) -> (Side, Vec<Action>) {
        let (running, wanted) = self.sides(project);
        let actions = changes::plan(&running, &wanted, &wish.with_dependencies(&project.compose));
        (running, actions)
    }

    /// The VMs that a plan leaves running.
    pub(super) fn kept(&self, actions: &[Action]) -> BTreeSet<String> {
        let inner = self.lock();
        let left = actions.iter().filter_map(|action| match action {
            Action::Keep { kind: Kind::Vm, name } | Action::Wait { kind: Kind::Vm, name, .. } => Some(name),
            _ => None,
        });
        left.filter(|name| inner.machines.contains_key(*name)).cloned().collect()
    }

    /// The answer to a dry run.
    pub(super) fn planned(&self, mut project: Project, wish: &Wish) -> Event {
        let (running, actions) = self.plan(&mut project, wish);
        let examined =
            preflight::examine(&project, &running, &actions, || self.promised(), |vm| self.has_ports(vm))
                .and_then(|_| self.check_owners(&project, &started(&actions).collect()));
        Event::Plan { actions, refused: examined.err().map(|e| format!("{e:#}")) }
    }

    /// Returns whether the ports of the host that lead to a VM are its own; a switch that does not answer is believed to have them.
    pub(super) fn has_ports(&self, vm: &str) -> bool {
        let networks: Vec<_> = self.lock().networks.values().cloned().collect();
        networks.iter().all(|network| network.has_ports(vm) != Some(false))
    }

    fn sides(&self, project: &mut Project) -> (Side, Side) {
        let inner = self.lock();
        let held = inner.networks.iter().filter_map(|(name, net)| Some((name.clone(), net.spec().subnet?)));
        network::settle(&mut project.compose, &held.collect());
        let mut wanted = Side::declared(&project.name, &project.compose);
        // One that has ended and is not declared any more still is in the list of `ps`.
        let declared = |name: &String| project.compose.vm.contains_key(name);
        let machines = inner.machines.iter().filter(|(name, machine)| runs(machine) || !declared(name));
        let mut accelerators = Parts::new();
        for (name, accelerator) in &inner.accelerators {
            accelerators.insert(name.clone(), accelerator.settings(None));
            if wanted.accelerators.contains_key(name) {
                wanted.accelerators.insert(name.clone(), accelerator.settings(Some(project)));
            }
        }
        let running = Side {
            project: inner.project.name.clone(),
            vms: machines.map(|(name, machine)| (name.clone(), changes::value(machine.spec()))).collect(),
            zones: inner
                .zones
                .iter()
                .map(|(name, zone)| (name.clone(), changes::value(zone.spec())))
                .collect(),
            networks: inner.networks.iter().map(|(name, net)| (name.clone(), net.settings())).collect(),
            accelerators,
            forwards: inner.networks.values().flat_map(|net| net.forwards()).collect(),
            members: inner
                .zones
                .iter()
                .map(|(name, zone)| (name.clone(), zone.members().into_iter().collect()))
                .collect(),
        };
        (running, wanted)
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
    pub(super) fn placements(
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

    /// Tells the client what happens beside the starts of VMs, which tell of themselves.
    pub(super) fn announce(&self, actions: &[Action], reporter: &Reporter) {
        for action in actions {
            if let Action::Keep { kind: Kind::Vm, name } | Action::Wait { kind: Kind::Vm, name, .. } = action
            {
                reporter.stage(name, Stage::AlreadyUp, "");
            }
            if action.is_news() {
                reporter.send(&Event::Action(action.clone()));
            }
        }
    }

    /// Stops what the plan stops, replaces and restarts.
    ///
    /// # Errors
    /// Names VMs that don't die.
    pub(super) fn clear_away(&self, actions: &[Action], reporter: &Reporter) -> anyhow::Result<()> {
        let stops = |machine: &Machine| {
            actions.iter().any(|action| match action {
                Action::Stop { kind: Kind::Vm, name } | Action::Restart { name, .. } => {
                    name == machine.name()
                }
                _ => false,
            })
        };
        self.stop(stops, Instant::now() + stop::LONGEST, Some(reporter))?;
        let named = |wanted: Kind| {
            actions.iter().filter_map(move |action| match action {
                Action::Stop { kind, name } | Action::Replace { kind, name, .. } if *kind == wanted => {
                    Some(name)
                }
                _ => None,
            })
        };
        let mut inner = self.lock();
        let beside = Beside {
            zones: take_out(&mut inner.zones, named(Kind::Zone)),
            networks: take_out(&mut inner.networks, named(Kind::Network)),
            accelerators: take_out(&mut inner.accelerators, named(Kind::Accelerator)),
        };
        drop(inner);
        beside.end();
        Ok(())
    }
}

/// Takes these entries out of `all`.
pub(super) fn take_out<'a, T>(
    all: &mut BTreeMap<String, Arc<T>>,
    names: impl Iterator<Item = &'a String>,
) -> BTreeMap<String, Arc<T>> {
    names.filter_map(|name| all.remove_entry(name)).collect()
}

/// The VMs that a plan starts.
pub(super) fn started(actions: &[Action]) -> impl Iterator<Item = &String> {
    actions.iter().filter_map(|action| match action {
        Action::Start { kind: Kind::Vm, name } | Action::Restart { name, .. } => Some(name),
        _ => None,
    })
}

/// Parts that a plan starts anew.
pub(super) fn replaced(actions: &[Action], wanted: Kind) -> impl Iterator<Item = &String> {
    actions.iter().filter_map(move |action| match action {
        Action::Replace { kind, name, .. } if *kind == wanted => Some(name),
        _ => None,
    })
}
