// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The boot of a VM: from the guest's first instruction until the VM is ready, as the compose file defines it.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use qapi::qmp;
use tombolo_passthrough::bind::Owner;
use tombolo_topology::apply::{self, Thread};
use tombolo_topology::plan::VmPlan;

use super::partition::{Kernel, Partition, Store};
use super::{Machine, Phase, QUIT, disks, placement};
use crate::compose::Ready;
use crate::guest::agent;
use crate::project::control::Stage;

/// Lines of the console and of QEMU's log in an error.
const LAST_LINES: usize = 15;
/// The shortest time that an agent has for its first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(1);

impl Machine {
    /// Lets the guest run and waits until the VM is ready.
    ///
    /// # Errors
    /// The VM is not ready in time, or QEMU ends; the error has the console's last lines. QEMU has ended in both cases.
    pub fn follow(&self, report: &dyn Fn(Stage, &str)) -> anyhow::Result<()> {
        report(Stage::Booting, self.hypervisor.name());
        let result = self.boot();
        if let Err(e) = &result {
            self.lock().phase = Phase::Failed;
            self.record(&Phase::Failed, e.to_string().lines().next().unwrap_or_default());
            self.process.kill();
            self.wait_end(QUIT);
        }
        result
    }

    fn boot(&self) -> anyhow::Result<()> {
        self.pin().map_err(|e| self.failure(&format!("{e:#}")))?;
        self.qmp()?.execute(qmp::cont {}).map_err(|e| self.failure(&e.to_string()))?;
        self.mark("guest runs");
        let limit = Duration::from_secs(self.spec.ready_timeout.into());
        match &self.spec.ready {
            Ready::Running => {}
            Ready::Console(pattern) => self.await_console(pattern, limit)?,
            Ready::Agent => self.await_agent(limit)?,
        }
        if let Some(first) = self.console.first_output() {
            let at = first.saturating_duration_since(self.started).as_secs_f64();
            self.lock().timeline.push(("first console output".into(), at));
        }
        self.mark("ready");
        Ok(())
    }

    /// Pins the threads of a VM that lies on a part of the host.
    fn pin(&self) -> anyhow::Result<()> {
        if let Some(plan) = &self.placement {
            let threads = placement::threads(self.qmp()?)?;
            if self.spec.isolate {
                self.isolate(plan, &threads)?;
            }
            apply::pin(self.pid, &threads, plan)?;
            let _set_once = self.threads.set(threads);
            self.mark("threads pinned");
        }
        Ok(())
    }

    /// Takes the VM's CPUs out of the host's, and moves its vCPUs' threads there.
    fn isolate(&self, plan: &VmPlan, threads: &[Thread]) -> anyhow::Result<()> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let group = held.group.as_ref().context("QEMU has ended")?;
        let owner = Owner::new(&self.name, self.shim.pid())?;
        let threads: Vec<u32> = threads.iter().map(|thread| thread.thread).collect();
        let (store, cpus) = (Store::of_user()?, plan.isolated_cpus());
        let partition = Partition::make(&mut Kernel, &store, owner, group.path(), &cpus, &threads)?;
        let _set_once = self.isolated.set(partition.path());
        held.partition = Some(partition);
        self.mark("CPUs isolated");
        Ok(())
    }

    /// Waits until a line of the console matches the pattern of `ready`.
    fn await_console(&self, pattern: &str, limit: Duration) -> anyhow::Result<()> {
        let matched = self.console.wait_match(limit);
        self.check_alive()?;
        if matched {
            return Ok(());
        }
        let seconds = limit.as_secs();
        Err(self.failure(&format!("no line of its console matched '{pattern}' within {seconds} s")))
    }

    /// Waits until the guest agent answers. `limit` counts from the start of QEMU.
    fn await_agent(&self, limit: Duration) -> anyhow::Result<()> {
        let deadline = self.started + limit;
        let silent = |cause: &str| {
            self.failure(&format!(
                "its guest agent did not answer within {} s{cause}; if the image has no qemu-guest-agent, set ready = \"running\" or \"console:REGEX\"",
                limit.as_secs()
            ))
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), left, |s| !s.agent_open && s.exit.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        let open = state.agent_open;
        drop(state);
        self.check_alive()?;
        if !open {
            return Err(silent(""));
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(FIRST_ANSWER);
        if let Err(e) = self.agent.ping(left) {
            // QEMU closes its sockets before the thread that waits for its end notes that.
            if matches!(e, agent::Error::Ended) {
                self.wait_end(QUIT);
            }
            self.check_alive()?;
            return Err(silent(&format!(" ({e})")));
        }
        Ok(())
    }

    /// # Errors
    /// The start was cancelled, or QEMU has ended.
    fn check_alive(&self) -> anyhow::Result<()> {
        if self.cancelled.load(Ordering::Acquire) {
            anyhow::bail!("cancelled");
        }
        let exit = self.lock().exit.clone();
        let Some(how) = exit else { return Ok(()) };
        Err(self.failure(&format!("it ended while it booted ({how})")))
    }

    /// Returns an error with the last lines of the console and of QEMU's log, of a QEMU that has ended its last ones. A message of QEMU that is known replaces
    /// `cause`.
    pub(super) fn failure(&self, cause: &str) -> anyhow::Error {
        if self.lock().exit.is_some() {
            self.console.wait_end(QUIT);
            self.log.wait_end(QUIT);
        }
        let explained = disks::explain(&self.log.last_lines(LAST_LINES));
        let cause = explained.as_deref().unwrap_or(cause);
        let mut text = format!("the VM '{}' failed: {cause}", self.name);
        for (title, lines) in [
            ("QEMU said", self.log.last_lines(LAST_LINES)),
            ("last lines of its console", self.console.last_lines(LAST_LINES)),
        ] {
            if !lines.is_empty() {
                text.push_str(&format!("\n  {title}:"));
                for line in lines {
                    text.push_str("\n  | ");
                    text.push_str(&line);
                }
            }
        }
        anyhow::anyhow!(text)
    }
}
