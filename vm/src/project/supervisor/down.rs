// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The stop of VMs, and of the project with the last of them. It takes [`LONGEST`] at most: a command that is in the way is cut off
//! by the end of its VMs, and if that does not help by the end of all shims, with which everything ends that was started.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::order::{self, Turnstile};
use super::requests::SILENT;
use super::turn::{Of, Turn};
use super::{Beside, Reporter, Supervisor};
use crate::machine::{Machine, Phase, disks, stop};
use crate::project::control::{Event, Stage};
use crate::project::keeper;
use crate::shim::{self, Shim};
use crate::thread;

/// For a command that is in the way to end by itself.
const COURTESY: Duration = Duration::from_secs(2);
/// For one whose VMs were killed.
const CUT_OFF: Duration = Duration::from_secs(2);
/// For a command that starts or stops the VMs which are to be stopped.
const OTHERS: Duration = Duration::from_secs(2);
/// For the VMs that are stopped beside a command in the way. They give what it takes to kill those that are left when it has ended.
const BESIDE: Duration = stop::LONGEST.saturating_sub(stop::KILL);
/// For other requests to end when nothing runs any more: a client that does not read has less than that.
const LAST: Duration = Duration::from_secs(3);
/// The pause between two checks whether they have ended.
const LOOK: Duration = Duration::from_millis(20);
/// All of `down`: what comes before, the VMs at the same time, then switches and servers at the same time.
const LONGEST: Duration = Duration::from_secs(30);
/// For switches and servers.
const SERVICES: Duration = keeper::ENDING.saturating_add(keeper::DEATH);
const _: () = assert!(is_short([COURTESY, BESIDE, CUT_OFF, stop::KILL, SERVICES]));
const _: () = assert!(is_short([SILENT, OTHERS, stop::LONGEST, Duration::ZERO, SERVICES]));

/// Returns whether steps take less than [`LONGEST`] together.
const fn is_short(steps: [Duration; 5]) -> bool {
    let [a, b, c, d, e] = steps;
    let sum = a.saturating_add(b).saturating_add(c).saturating_add(d).saturating_add(e);
    sum.as_millis() < LONGEST.as_millis()
}

impl Supervisor {
    /// Stops VMs, all of them and what runs beside them where the list is empty.
    ///
    /// # Errors
    /// Names VMs that are not there, and processes that don't die.
    pub(super) fn down(&self, vms: &[String], reporter: &Reporter) -> anyhow::Result<()> {
        if vms.is_empty() {
            let latest = Instant::now() + LONGEST;
            self.down_all(Some(reporter))?;
            self.await_others(Instant::now() + LAST, latest, reporter);
            return Ok(());
        }
        for vm in vms {
            self.machine(vm)?;
        }
        let vms: BTreeSet<String> = vms.iter().cloned().collect();
        let turn = self.turn_of(&vms, reporter)?;
        self.stop(|machine| vms.contains(machine.name()), Instant::now() + stop::LONGEST, Some(reporter))?;
        drop(turn);
        // A command that has the turn still may use what runs beside the VMs.
        let Some(_turn) = self.changing.take_within(Of::All, Duration::ZERO) else { return Ok(()) };
        let mut inner = self.lock();
        if inner.machines.is_empty() {
            let beside = inner.clear();
            drop(inner);
            beside.end();
            self.retire();
        }
        Ok(())
    }

    /// Waits for the turn to stop these VMs. Commands about others are not in the way, and a start that no command asked for is cut short.
    ///
    /// # Errors
    /// One about these does not end.
    fn turn_of(&self, vms: &BTreeSet<String>, reporter: &Reporter) -> anyhow::Result<Turn<'_>> {
        self.cancel(|machine| vms.contains(machine.name()) && machine.starts_by_itself());
        let turn = self.changing.take_within(Of::Vms(vms), SILENT).or_else(|| {
            let text = format!(
                "another command is starting or stopping this VM; this one waits for its end, at most {} s",
                OTHERS.as_secs()
            );
            reporter.send(&Event::Note { text });
            self.changing.take_within(Of::Vms(vms), OTHERS)
        });
        turn.with_context(|| {
            format!(
                "another command has been starting or stopping {} for more than {} s; try again, or 'tombolo down' without a name, which cuts it off",
                vms.iter().map(|vm| format!("'{vm}'")).collect::<Vec<_>>().join(" or "),
                (SILENT + OTHERS).as_secs()
            )
        })
    }

    /// Stops everything.
    ///
    /// # Errors
    /// Names processes that don't die.
    pub(super) fn down_all(&self, reporter: Option<&Reporter>) -> anyhow::Result<()> {
        self.ending.store(true, Ordering::Release);
        let stopped = self.clear_all(reporter);
        // If the stop failed, the user may start VMs again.
        self.ending.store(stopped.is_ok(), Ordering::Release);
        stopped
    }

    /// Waits for the end of other requests when nothing runs any more. One that is stuck, as in a file system that does not answer, keeps this process no
    /// longer than that: it can't start anything now.
    fn await_others(&self, until: Instant, latest: Instant, reporter: &Reporter) {
        self.lock().downs += 1;
        let others = || {
            let inner = self.lock();
            inner.requests.len() > inner.downs
        };
        while others() {
            if Instant::now() >= until.min(latest) {
                let others: Vec<String> =
                    self.lock().requests.values().filter(|what| *what != "down").cloned().collect();
                let text = format!("the supervisor ends, though this does not: {}", others.join(", "));
                reporter.send(&Event::Note { text });
                self.lock().withdrawn = true;
                break;
            }
            std::thread::sleep(LOOK);
        }
        self.lock().downs -= 1;
    }

    fn clear_all(&self, reporter: Option<&Reporter>) -> anyhow::Result<()> {
        // A start in progress is cut short rather than waited for.
        self.lock().starting.values().for_each(|shim| shim.kill());
        self.cancel(|machine| machine.phase() == Phase::Booting);
        let free = self.changing.take_within(Of::All, COURTESY);
        let until = Instant::now() + if free.is_some() { stop::LONGEST } else { BESIDE };
        let turn = free.or_else(|| self.stop_beside(until, reporter)).or_else(|| {
            self.cancel(|_| true);
            self.changing.take_within(Of::All, CUT_OFF)
        });
        if turn.is_none() {
            let text =
                "another command does not end; the supervisor ends, and with it everything that it started";
            if let Some(reporter) = reporter {
                reporter.send(&Event::Note { text: text.into() });
            }
            self.lock().withdrawn = true;
            self.retire();
            return Ok(());
        }
        // What is left of the time, also where VMs have had some of it already.
        self.stop(|_| true, until, reporter)?;
        let beside = self.lock().clear();
        beside.end();
        self.retire();
        Ok(())
    }

    /// Removes the project's folder, in which no shim is left.
    fn retire(&self) {
        self.end_shims();
        self.dir.remove(self.endpoint().lock());
    }

    /// Ends all shims of the project, and with each its child: also those of parts whose start has failed.
    pub(super) fn end_shims(&self) {
        for name in shim::handle::names(self.dir.path()).unwrap_or_default() {
            match Shim::find(self.dir.path(), &name) {
                Ok(shim) => shim.into_iter().for_each(|shim| shim.end()),
                Err(e) => crate::say!("{e:#}"),
            }
        }
    }

    /// Stops VMs while another command has the turn, in good order as ever: a guest that has nothing to do with that command has its time to
    /// switch itself off, and so has one that the command is stopping. Returns the turn if the command has ended with that.
    fn stop_beside(&self, until: Instant, reporter: Option<&Reporter>) -> Option<Turn<'_>> {
        let is_stopping = |machine: &Machine| machine.phase() == Phase::Stopping;
        if let Err(e) = self.stop(|machine| !is_stopping(machine), until, reporter) {
            crate::say!("{e:#}");
        }
        let waits = self.lock().machines.values().any(|machine| is_stopping(machine));
        if !waits {
            return self.changing.take_within(Of::All, Duration::ZERO);
        }
        if let Some(reporter) = reporter {
            let text = "another command is stopping VMs; this one waits for its end";
            reporter.send(&Event::Note { text: text.into() });
        }
        self.changing.take_within(Of::All, until.saturating_duration_since(Instant::now()))
    }

    fn cancel(&self, which: impl Fn(&Machine) -> bool) {
        for machine in self.lock().machines.values().filter(|machine| which(machine)) {
            machine.cancel();
        }
    }

    /// Stops VMs by `until`, those first on which no other depends. Those that don't die stay in the list.
    pub(super) fn stop(
        &self,
        which: impl Fn(&Machine) -> bool,
        until: Instant,
        reporter: Option<&Reporter>,
    ) -> anyhow::Result<()> {
        let chosen: Vec<Arc<Machine>> = {
            let inner = self.lock();
            inner.machines.values().filter(|machine| which(machine)).cloned().collect()
        };
        let depends = chosen.iter().map(|m| (m.name().to_owned(), m.spec().depends_on.clone())).collect();
        let waves = order::waves(&depends);
        let time = until.saturating_duration_since(Instant::now());
        let turnstile = Turnstile::new(waves.iter().map(BTreeSet::len).collect(), time);
        let stop = |machine: &Arc<Machine>, wave: usize| {
            turnstile.wait(wave);
            let report = |stage: Stage, detail: &str| {
                if let Some(reporter) = reporter {
                    reporter.stage(machine.name(), stage, detail);
                }
            };
            let stopped = machine.stop(&self.mounted(machine), until, &report);
            if stopped.is_ok() {
                report(Stage::Stopped, "");
            }
            turnstile.leave(wave);
            stopped
        };
        let wave_of = |machine: &Arc<Machine>| waves.iter().position(|wave| wave.contains(machine.name()));
        let mut chosen: Vec<(usize, Arc<Machine>)> =
            chosen.into_iter().map(|machine| (wave_of(&machine).unwrap_or_default(), machine)).collect();
        // Those that have no thread are stopped in this order.
        chosen.sort_by_key(|(wave, _)| *wave);
        let stopped = thread::all("stop", chosen.iter().map(|(wave, machine)| || stop(machine, *wave)));
        let mut errors = Vec::new();
        for ((_, machine), stopped) in chosen.iter().zip(stopped) {
            match stopped.unwrap_or_else(|| Err(anyhow::anyhow!("a thread that stops a VM failed"))) {
                Ok(()) => self.forget(machine),
                Err(e) => errors.push(format!("{e:#}")),
            }
        }
        anyhow::ensure!(errors.is_empty(), "{}", errors.join("\n"));
        Ok(())
    }

    /// Removes a VM that was stopped. Where there is a next machine, that has the shim, the zones and the disks.
    pub(super) fn forget(&self, machine: &Arc<Machine>) {
        let is_removed = self.lock().remove(machine);
        if is_removed {
            machine.shim().end();
            self.leave_zones(machine.name(), machine.zones().keys());
            disks::discard(&self.dir, Some(machine.name()));
        }
    }

    /// Identities of the zones that a VM has mounted.
    pub(super) fn mounted(&self, machine: &Machine) -> Vec<String> {
        let inner = self.lock();
        let zones: BTreeMap<_, _> = machine.zones();
        let mounted = zones.iter().filter(|(_, zone_use)| zone_use.mount.is_some());
        mounted.filter_map(|(name, _)| inner.zones.get(name).map(|zone| zone.uuid())).collect()
    }
}

/// The end of a switch or a server.
type Job = Box<dyn FnOnce() + Send>;

impl Beside {
    /// Ends zones, then switches and servers, all at the same time.
    pub(super) fn end(self) {
        self.zones.values().for_each(|zone| zone.end());
        let networks = self.networks.into_values().map(|network| Box::new(move || drop(network)) as Job);
        let accelerators = self.accelerators.into_values();
        let accelerators = accelerators.map(|accelerator| Box::new(move || drop(accelerator)) as Job);
        thread::all("end", networks.chain(accelerators));
    }
}
