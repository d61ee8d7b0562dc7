// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The consequences of a VM's end: a guest that reboots gets its next QEMU at once, and a restart policy starts a VM again after a pause.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tombolo_start::layout::Layout;

use super::Supervisor;
use super::launch::Wanted;
use super::turn::Of;
use crate::guest::kit;
use crate::machine::{Exit, Machine, Phase, growth, stop};
use crate::project::barrier::Inside;
use crate::project::control::Stage;
use crate::qemu::version::Qemu;

impl Supervisor {
    /// Called once when a VM's QEMU has ended, on the thread that waits for it.
    pub(super) fn ended(self: &Arc<Self>, machine: &Arc<Machine>, exit: Exit, inside: Inside) {
        self.leave_zones(machine.name(), machine.zones().keys());
        machine.set_ended(exit);
        drop(inside);
        self.follow_up(machine);
    }

    /// Does what follows the end of a VM, which another program of this process may have noted.
    pub(super) fn follow_up(self: &Arc<Self>, machine: &Arc<Machine>) {
        machine.close_consoles();
        match machine.phase() {
            Phase::Rebooting => self.reboot(machine),
            _ if machine.is_restart_due() => self.start_again(machine),
            _ => {}
        }
    }

    /// Starts a VM again as often as its policy says, with growing pauses, until one start has led to a new QEMU, whose own end is another
    /// call. A VM that a command stopped or started meanwhile is left alone.
    fn start_again(self: &Arc<Self>, old: &Arc<Machine>) {
        let name = old.name();
        while let Some(pause) = old.ending().and_then(|clean| old.spec().restart.pause(clean, old.attempts()))
        {
            old.set_restart_in(pause);
            crate::say!("the VM '{name}' starts again in {} s: {}", pause.as_secs(), old.status().state);
            std::thread::sleep(pause);
            self.replace(old, "starts again", |report| {
                self.start_one(self.wanted_again(old, Some(old.attempts() + 1))?, &|_| {}, report)
            });
            if !self.is_current(old) {
                return;
            }
            old.count_failed_start();
        }
        old.stay_ended();
    }

    /// A guest that reboots ends its QEMU, since a member's memory and doorbell must not outlast its epoch; here it gets a new one, as what
    /// it was: the zones attached later, their mounts and its consoles included. Called when its old QEMU and memberships are gone. Where there
    /// is no next QEMU, its restart policy decides.
    fn reboot(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace(old, "reboots", |report| self.start_one(self.wanted_again(old, None)?, &|_| {}, report));
        if self.is_current(old) {
            self.start_again(old);
        }
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
    fn replace(
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
    fn wanted_again(&self, old: &Arc<Machine>, attempt: Option<u32>) -> anyhow::Result<Wanted> {
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

    /// Returns whether this is still the project's machine of that VM.
    fn is_current(&self, machine: &Arc<Machine>) -> bool {
        self.lock().machines.get(machine.name()).is_some_and(|m| Arc::ptr_eq(m, machine))
    }
}
