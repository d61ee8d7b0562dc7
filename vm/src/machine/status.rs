// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a VM as `tombolo ps` shows it.

use std::time::{Duration, Instant};

use tombolo_start::progress::Phase as Growth;
use tombolo_topology::plan::VmPlan;

use super::state::State;
use super::{Machine, Phase};
use crate::child::halted;
use crate::project::control::VmStatus;

/// A guest agent that owes an answer for so long is reported.
const SILENT: Duration = Duration::from_secs(5);

impl Machine {
    /// Says that QEMU is stopped or has paused the VM, or that the guest agent owes an answer. Asks neither.
    fn trouble(&self, state: &State) -> Option<String> {
        let agent = || {
            let silent = self.agent.silent_for().filter(|silent| *silent > SILENT)?;
            Some(format!("its guest agent has not answered for {} s", silent.as_secs()))
        };
        let paused = || state.stall.as_ref().map(|stall| stall.why.clone());
        halted::sentence(self.pid).map(|text| format!("QEMU {text}")).or_else(paused).or_else(agent)
    }

    pub fn status(&self) -> VmStatus {
        // It may lock the state.
        let placement = self.placement();
        let state = self.lock();
        VmStatus {
            name: self.name.clone(),
            state: in_words(&state),
            pid: state.exit.is_none().then_some(self.pid),
            hypervisor: self.hypervisor,
            cpus: self.placement.as_ref().map_or(self.spec.cpus, VmPlan::cpus),
            memory: self.spec.memory.0,
            zones: state.zones.keys().cloned().collect(),
            uptime: self.started.elapsed().as_secs_f64(),
            reboots: self.reboots,
            restarts: self.restarts,
            health: state.health.filter(|_| state.phase == Phase::Up),
            trouble: self.trouble(&state).filter(|_| state.exit.is_none()),
            timeline: state.timeline.clone(),
            shares: state.shares.clone(),
            growth: state.growth.clone(),
            placement,
        }
    }
}

fn in_words(state: &State) -> String {
    let how = state.exit.as_deref().unwrap_or("QEMU still runs");
    let text = match state.phase {
        Phase::Booting => "booting".to_owned(),
        Phase::Rebooting => "rebooting".to_owned(),
        Phase::Stopping | Phase::Ended if state.restarting => "rebooting".to_owned(),
        // A VM that lacks memory must not look complete.
        Phase::Up => match state.growth.as_ref().filter(|g| g.phase != Growth::Complete) {
            Some(growth) => format!("up, {}", growth.line()),
            None => "up".to_owned(),
        },
        Phase::Stopping => "stopping".to_owned(),
        Phase::Failed => format!("failed: {how}"),
        Phase::Ended => format!("ended: {how}"),
    };
    match state.restart_at {
        Some(at) => {
            let left = at.saturating_duration_since(Instant::now()).as_secs_f64().ceil();
            format!("restarting in {left} s ({text})")
        }
        None => text,
    }
}
