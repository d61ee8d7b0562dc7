// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a VM: its phases, and the events that change them. Each change of the phase is recorded in the project's journal.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tombolo_start::progress::Progress;

use super::stall::Stall;
use super::{Machine, QUIT};
use crate::compose::ZoneUse;
use crate::compose::restart::STEADY;
use crate::guest::health::Health;
use crate::moment;
use crate::project::changes::Kind;
use crate::project::control::ShareStatus;
use crate::project::journal;

/// The way in which a QEMU ended.
#[derive(Clone, Debug)]
pub struct Exit {
    /// In words, for users.
    pub(super) how: String,
    /// The guest switched itself off.
    pub(super) clean: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) phase: Phase,
    #[serde(with = "moment")]
    pub(super) up_since: Option<Instant>,
    /// The guest agent has opened its port.
    pub(super) agent_open: bool,
    /// The guest asked for a reset, which ends QEMU (-no-reboot).
    pub(super) reset: bool,
    /// The guest's kernel panicked, which ends QEMU (pvpanic).
    pub(super) panicked: bool,
    /// The monitor's connection has ended: no event follows.
    pub(super) monitor_ended: bool,
    /// The way in which QEMU ended, in words; `None`: it runs.
    pub(super) exit: Option<String>,
    /// Set when QEMU ended without a command to stop: whether the guest switched itself off.
    pub(super) ending: Option<bool>,
    /// QEMU has ended, and the restart policy has not decided yet, or waits for its next start.
    pub(super) restart_due: bool,
    /// Failed starts by the restart policy since QEMU ended.
    pub(super) failed_starts: u32,
    /// The time of the restart policy's next start.
    #[serde(with = "moment")]
    pub(super) restart_at: Option<Instant>,
    /// The result of the last health check.
    pub(super) health: Option<Health>,
    /// The time from ready to the end.
    pub(super) lasted: Duration,
    /// Memberships in zones, those attached later included.
    pub(super) zones: BTreeMap<String, ZoneUse>,
    /// Milestones of the start, in seconds since its begin.
    pub(super) timeline: Vec<(String, f64)>,
    /// Progress of memory that grows.
    pub(super) growth: Option<Progress>,
    /// Why QEMU has paused it.
    #[serde(default)]
    pub(super) stall: Option<Stall>,
    /// The supervisor stops it to start it again, or has done so.
    #[serde(default)]
    pub(super) restarting: bool,
    /// Its memory grows no more, and what follows from that has been done.
    #[serde(default)]
    pub(super) grown: bool,
    /// The host's folders; empty until the guest has been asked about them.
    pub(super) shares: Vec<ShareStatus>,
}

impl State {
    /// The state of a VM whose QEMU has just been started as a member of `zones`.
    pub(super) fn booting(zones: BTreeMap<String, ZoneUse>) -> State {
        State {
            phase: Phase::Booting,
            up_since: None,
            agent_open: false,
            reset: false,
            panicked: false,
            monitor_ended: false,
            exit: None,
            ending: None,
            restart_due: false,
            failed_starts: 0,
            restart_at: None,
            health: None,
            lasted: Duration::ZERO,
            zones,
            timeline: Vec::new(),
            growth: None,
            stall: None,
            restarting: false,
            grown: false,
            shares: Vec::new(),
        }
    }

    fn sequel(&self) -> Sequel {
        match self.phase {
            Phase::Rebooting => Sequel::Reboot,
            _ if self.restart_due => Sequel::Policy,
            _ => Sequel::Nothing,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// QEMU runs, and the VM is not ready yet.
    Booting,
    /// The VM is ready.
    Up,
    /// The guest rebooted after it was up; the next QEMU is about to be started.
    Rebooting,
    Stopping,
    /// The VM was never ready.
    Failed,
    /// QEMU has ended.
    Ended,
}

/// The supervisor's next step after the end of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequel {
    /// The guest rebooted: the VM gets its next QEMU.
    Reboot,
    /// The restart policy decides.
    Policy,
    /// A command stopped the VM, or the policy has decided.
    Nothing,
}

impl Phase {
    /// The phase as the journal has it.
    fn name(&self) -> &'static str {
        match self {
            Phase::Booting => "booting",
            Phase::Up => "up",
            Phase::Rebooting => "rebooting",
            Phase::Stopping => "stopping",
            Phase::Failed => "failed",
            Phase::Ended => "ended",
        }
    }
}

impl Machine {
    pub fn phase(&self) -> Phase {
        self.lock().phase.clone()
    }

    pub fn has_ended(&self) -> bool {
        self.lock().exit.is_some()
    }

    pub fn is_up(&self) -> bool {
        self.lock().phase == Phase::Up
    }

    /// Makes a booting VM count as up.
    pub fn set_up(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Booting {
            state.phase = Phase::Up;
            state.up_since = Some(Instant::now());
            self.record(&Phase::Up, "");
        }
        drop(state);
        self.save();
    }

    /// The time since the VM became ready.
    pub fn up_for(&self) -> Option<Duration> {
        self.lock().up_since.map(|since| since.elapsed())
    }

    pub fn set_growth(&self, progress: Progress) {
        self.lock().growth = Some(progress);
    }

    /// Notes that the supervisor stops the VM to start it again, or that it does not any more.
    pub fn set_restarting(&self, restarting: bool) {
        self.lock().restarting = restarting;
        self.save();
    }

    /// Returns whether the VM is about to have another QEMU: its guest reboots, or the supervisor or its policy starts it again.
    pub fn is_to_start_again(&self) -> bool {
        let state = self.lock();
        match state.phase {
            Phase::Rebooting => true,
            Phase::Stopping => state.restarting,
            Phase::Ended | Phase::Failed => state.restarting || state.restart_due,
            Phase::Booting | Phase::Up => false,
        }
    }

    /// Returns whether the VM is booting again and no command waits for that: its guest reboots, or the supervisor or its policy starts it.
    pub fn starts_by_itself(&self) -> bool {
        self.again && self.lock().phase == Phase::Booting
    }

    /// Returns whether a command stops the VM, or has stopped it.
    pub fn is_stopped(&self) -> bool {
        let state = self.lock();
        state.phase == Phase::Stopping || state.phase == Phase::Ended && state.ending.is_none()
    }

    /// Notes that the end of the growth of its memory has been dealt with.
    pub fn set_grown(&self) {
        self.lock().grown = true;
        self.save();
    }

    pub fn set_shares(&self, shares: Vec<ShareStatus>) {
        self.lock().shares = shares;
        self.save();
    }

    /// Keeps the result of a health check. A change of it is recorded in the journal.
    pub fn set_health(&self, health: Health) {
        let before = self.lock().health.replace(health);
        if before != Some(health) {
            journal::record(Kind::Vm, &self.name, &health.to_string(), "");
        }
    }

    /// The result of the last health check; `None`: the VM has no check.
    pub fn health(&self) -> Option<Health> {
        self.lock().health
    }

    /// Adds a milestone to the timeline of the start.
    pub fn mark(&self, milestone: &str) {
        let at = self.started.elapsed().as_secs_f64();
        self.lock().timeline.push((milestone.to_owned(), at));
    }

    /// Notes QEMU's end and returns what the supervisor has to do. The caller does it, and calls `close_consoles` in each case.
    pub fn set_ended(&self, exit: Exit) -> Sequel {
        let mut state = self.lock();
        state.exit = Some(if state.panicked {
            "the guest's kernel panicked".into()
        } else if state.reset {
            "the guest reset itself".into()
        } else {
            exit.how
        });
        let wanted = state.phase == Phase::Stopping || self.cancelled.load(Ordering::Acquire);
        state.ending = (!wanted).then_some(exit.clean && !state.panicked && !state.reset);
        state.lasted = state.up_since.map_or(Duration::ZERO, |since| since.elapsed());
        state.phase = match state.phase {
            Phase::Failed => Phase::Failed,
            Phase::Up if state.reset => Phase::Rebooting,
            _ => Phase::Ended,
        };
        let phase = state.phase.clone();
        state.restart_due = !wanted && state.phase != Phase::Rebooting;
        self.record(&phase, state.exit.as_deref().unwrap_or_default());
        let sequel = state.sequel();
        drop(state);
        self.changed.notify_all();
        self.save();
        sequel
    }

    /// Returns the supervisor's next step after QEMU's end.
    pub fn sequel(&self) -> Sequel {
        self.lock().sequel()
    }

    /// Notes that the next QEMU of this VM could not be started, after this one has ended. Returns whether the caller has to let the restart
    /// policy decide; a thread that has begun to do so already goes on.
    pub fn set_next_failed(&self) -> bool {
        let mut state = self.lock();
        // Also of one that the supervisor had stopped for the next one.
        state.ending = Some(false);
        let is_undecided = !std::mem::replace(&mut state.restart_due, true);
        drop(state);
        self.save();
        is_undecided
    }

    /// Returns whether the guest switched itself off. `None`: a command stopped the VM, or it has not ended.
    pub fn ending(&self) -> Option<bool> {
        self.lock().ending
    }

    /// The number of starts in a row by the restart policy. A VM that was up for [`STEADY`] begins at zero again.
    pub fn attempts(&self) -> u32 {
        let state = self.lock();
        state.failed_starts + if state.lasted >= STEADY { 0 } else { self.attempt }
    }

    /// Notes that the restart policy starts the VM again after `pause`.
    pub fn set_restart_in(&self, pause: Duration) {
        self.lock().restart_at = Some(Instant::now() + pause);
        self.save();
    }

    /// Counts a failed start by the restart policy.
    pub fn count_failed_start(&self) {
        self.lock().failed_starts += 1;
        self.save();
    }

    /// Notes that the restart policy does not start the VM again.
    pub fn stay_ended(&self) {
        let mut state = self.lock();
        (state.restart_due, state.restart_at) = (false, None);
        drop(state);
        self.save();
    }

    /// Kills a VM that can't be made ready. `why` is its state in `ps`.
    pub fn fail(&self, why: &str) {
        self.process.kill();
        let ended = self.wait_end(QUIT);
        let mut state = self.lock();
        state.phase = Phase::Failed;
        // One that does not die still runs: its end is yet to come.
        if ended {
            state.exit = Some(why.to_owned());
        }
        self.record(&Phase::Failed, why);
        drop(state);
        self.save();
        self.shim.unwatch();
    }

    /// Handles an event of the monitor. The empty event is the end of its connection.
    pub(super) fn event(&self, event: &str, data: &serde_json::Value) {
        if event == "BLOCK_IO_ERROR" {
            return Stall::of(data).map_or((), |stall| self.stall(stall));
        }
        let mut state = self.lock();
        match event {
            "VSERPORT_CHANGE" if data["id"] == "agent" => state.agent_open = data["open"] == true,
            "SHUTDOWN" if data["reason"] == "guest-reset" => state.reset = true,
            "SHUTDOWN" if data["reason"] == "guest-panic" => state.panicked = true,
            "" => state.monitor_ended = true,
            _ => return,
        }
        drop(state);
        if event == "SHUTDOWN" {
            // QEMU says only once why it ends.
            self.save();
        }
        self.changed.notify_all();
    }

    /// Records a phase in the journal.
    pub(super) fn record(&self, phase: &Phase, detail: &str) {
        journal::record(Kind::Vm, &self.name, phase.name(), detail);
    }
}
