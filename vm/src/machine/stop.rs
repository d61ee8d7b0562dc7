// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The stop of a VM: the guest is asked once, then QEMU, then QEMU is killed. Each step has its time. All steps together take
//! [`LONGEST`] at most, whatever guest and QEMU do.

use std::time::{Duration, Instant};

use qapi::{qga, qmp};

use super::{Machine, Phase};
use crate::guest::agent::{Calls, Error, Farewell};
use crate::guest::mount;
use crate::project::control::Stage;

/// For the guest to unmount its zones.
const UNMOUNT: Duration = Duration::from_secs(4);
/// For the guest's agent to take the request to switch off.
const ASK: Duration = Duration::from_secs(1);
/// For a guest with a disk of its own to switch itself off.
const SWITCH_OFF: Duration = Duration::from_secs(12);
/// For QEMU to end when told to, its disks flushed.
const QUIT: Duration = Duration::from_secs(3);
/// For a killed process to end.
pub const KILL: Duration = Duration::from_secs(2);
/// The sum of the times above.
pub const LONGEST: Duration = Duration::from_secs(22);

impl Machine {
    /// Stops it by `until`, or within [`KILL`] where that has passed. A guest that is up is first asked to unmount the zones with these identities, and one with a disk to switch itself off.
    ///
    /// # Errors
    /// When the process does not die.
    pub fn stop(&self, zones: &[String], until: Instant, report: &dyn Fn(Stage, &str)) -> anyhow::Result<()> {
        let was = {
            let mut state = self.lock();
            if state.exit.is_some() {
                return Ok(());
            }
            std::mem::replace(&mut state.phase, Phase::Stopping)
        };
        self.save();
        // The thread that waits for the monitor's last event need not any more.
        self.changed.notify_all();
        // Another command stops it, and its guest has the time that this one would give it.
        if was == Phase::Stopping && self.wait_end(left(until, LONGEST)) {
            return Ok(());
        }
        let was_up = was == Phase::Up;
        self.record(&Phase::Stopping, "");
        report(Stage::Stopping, "");
        // Commands that still run in the guest get an error instead of a turn.
        let mut agent = Some(self.agent.retire()).filter(|_| self.lock().agent_open);
        if was_up && !zones.is_empty() {
            if let Err(e) = agent
                .as_ref()
                .map_or(Ok(()), |agent| mount::unmount(agent, &self.name, zones, left(until, UNMOUNT)))
            {
                // A member that can't unmount is treated as dead, which is safe.
                report(Stage::Stopping, &e.to_string());
                agent = None;
            }
        }
        if was_up && self.spec.written().next().is_some() && self.switch_off(agent.as_ref(), until, report) {
            return Ok(());
        }
        // QEMU flushes its disks when it quits.
        let quit = || QUIT.min(remaining(until).saturating_sub(KILL));
        let told = match self.qmp() {
            Ok(monitor) => monitor.execute_within(qmp::quit {}, quit()).is_ok(),
            Err(_) => false,
        };
        if told && self.wait_end(quit()) {
            return Ok(());
        }
        if !self.process.has_ended() {
            report(Stage::Stopping, "QEMU does not quit and is killed");
        }
        self.process.kill();
        if self.wait_end(KILL) {
            return Ok(());
        }
        anyhow::ensure!(
            !self.process.has_ended(),
            "the VM '{}' has ended, and what it had of the host, such as its CPUs, is not given back yet: another process may be at it; 'tombolo down' \
             again ends the rest",
            self.name
        );
        anyhow::bail!(
            "process {} of the VM '{}' does not die, though it was killed; see /proc/{0}/stack",
            self.pid,
            self.name
        );
    }

    /// Asks the guest to switch itself off, its agent once, then its power button; whether it did.
    fn switch_off(&self, agent: Option<&Farewell<'_>>, until: Instant, report: &dyn Fn(Stage, &str)) -> bool {
        let mode = Some(qga::GuestShutdownMode::Powerdown);
        // The agent does not answer this one when it succeeds.
        let asked = agent.is_some_and(|agent| {
            matches!(
                agent.call(qga::guest_shutdown { mode }, left(until, ASK)),
                Ok(_) | Err(Error::Silent { command: "guest-shutdown", .. })
            )
        });
        let pressed =
            self.qmp().is_ok_and(|q| q.execute_within(qmp::system_powerdown {}, left(until, ASK)).is_ok());
        if !asked && !pressed {
            return self.has_ended();
        }
        let time = left(until, SWITCH_OFF);
        report(Stage::Stopping, &format!("the guest has {} s to switch itself off", time.as_secs()));
        self.wait_end(time)
    }
}

/// The time of a step, so that QEMU can still be ended by `until`.
fn left(until: Instant, step: Duration) -> Duration {
    step.min(remaining(until).saturating_sub(QUIT + KILL))
}

fn remaining(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}
