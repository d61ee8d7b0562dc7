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
use crate::machine::{Exit, Machine, Phase, Sequel, growth, stop};
use crate::project::control::Stage;
use crate::qemu::version::Qemu;

impl Supervisor {
    /// Called once when a VM's QEMU has ended, on the thread that waits for it.
    pub(super) fn ended(self: &Arc<Self>, machine: &Arc<Machine>, exit: Exit) {
        let left = machine.zones();
        self.leave_zones(machine.name(), left.keys());
        let sequel = machine.set_ended(exit);
        // A zone that was attached meanwhile; one that comes later finds that the VM has ended.
        for name in machine.zones().keys().filter(|name| !left.contains_key(*name)) {
            self.leave_zone(machine.name(), name);
        }
        self.follow_up(machine, sequel);
    }

    /// Does what follows the end of a VM, which an earlier supervisor may have noted.
    pub(super) fn follow_up(self: &Arc<Self>, machine: &Arc<Machine>, sequel: Sequel) {
        if machine.phase() != Phase::Rebooting {
            machine.shim().unwatch();
        }
        match sequel {
            Sequel::Reboot => self.reboot(machine),
            Sequel::Policy => self.start_again(machine),
            Sequel::Nothing => {}
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
    /// it was: the zones attached later, their mounts and its consoles included. Called when its old QEMU and memberships are gone.
    fn reboot(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace_or_start_again(old, "reboots", |report| {
            self.start_one(self.wanted_again(old, None)?, &|_| {}, report)
        });
    }

    /// Its guest has no driver for memory that comes while it runs: it is stopped and started again with all of it.
    pub(super) fn start_slowly(self: &Arc<Self>, old: &Arc<Machine>) {
        self.replace_or_start_again(old, "starts again, with all its memory", |report| {
            // A command has stopped it, or it reboots: there is nothing to do.
            if old.phase() != Phase::Up {
                return Ok(());
            }
            let name = old.name();
            let all = Layout::slow(old.spec().memory.0);
            let again = growth::allow(name, old.spec(), &all).and_then(|()| self.wanted_again(old, None));
            let again = match again {
                Ok(again) => again,
                Err(e) => {
                    crate::say!("the VM '{name}' goes on with the memory it has: {e:#}");
                    return Ok(());
                }
            };
            old.set_restarting(true);
            let stopped = old.stop(&self.mounted(old), Instant::now() + stop::LONGEST, report);
            if stopped.is_err() || self.is_ending() {
                old.set_restarting(false);
                return stopped;
            }
            let wanted = Wanted { before: None, slow: true, ..again };
            self.start_one(
                wanted,
                &|machine| machine.mark("no virtio-mem driver: all memory at once"),
                report,
            )
        });
    }

    /// As [`Self::replace`]. Where there is no next QEMU, the restart policy decides.
    fn replace_or_start_again(
        self: &Arc<Self>,
        old: &Arc<Machine>,
        how: &str,
        start: impl FnOnce(&dyn Fn(Stage, &str)) -> anyhow::Result<()>,
    ) {
        if self.replace(old, how, start) {
            self.start_again(old);
        }
    }

    /// Starts a VM again, unless a command has stopped or started it meanwhile. `how` describes the start in the log. Returns whether there is
    /// no next QEMU and no thread yet that lets the restart policy decide.
    fn replace(
        self: &Arc<Self>,
        old: &Arc<Machine>,
        how: &str,
        start: impl FnOnce(&dyn Fn(Stage, &str)) -> anyhow::Result<()>,
    ) -> bool {
        let name = old.name();
        let _changing = self.changing.take(Of::Vm(name));
        // A project that ends has no use for it.
        if !self.is_current(old) || self.is_ending() {
            self.end_console(old);
            return false;
        }
        let report = |stage: Stage, detail: &str| {
            crate::say!("the VM '{name}' {how}: {stage:?} {detail}");
        };
        let Err(e) = start(&report) else { return false };
        crate::say!("the VM '{name}' {how}, and fails: {e:#}");
        old.set_restarting(false);
        let is_undecided = self.is_current(old) && old.has_ended() && old.set_next_failed();
        let current = self.lock().machines.get(name).cloned();
        let why = format!("it {how}, and fails: {e:#}");
        current.as_ref().unwrap_or(old).fail(why.lines().next().unwrap_or_default());
        is_undecided
    }

    /// The start of a VM that ended. `attempt`: starts in a row by the restart policy, if that policy starts the VM.
    ///
    /// # Errors
    /// The files that the VM had can't be had.
    fn wanted_again(&self, old: &Arc<Machine>, attempt: Option<u32>) -> anyhow::Result<Wanted> {
        let project = self.lock().project.clone();
        let near = project.file.parent().unwrap_or(Path::new("/"));
        Ok(Wanted {
            name: old.name().to_owned(),
            spec: old.spec().clone(),
            folder: old.folder().to_owned(),
            qemu: Arc::new(Qemu::find(project.compose.qemu.as_deref())?),
            hypervisor: old.hypervisor(),
            boot: kit::boot(old.name(), old.spec(), near)?,
            zones: old.zones(),
            before: Some(old.clone()),
            attempt,
            again: true,
            slow: old.layout().grown == 0,
            placement: old.placement().map(|placement| placement.plan),
            formats: old.formats().to_vec(),
        })
    }

    /// Sends those away who watch the console of a VM that does not reboot any more, as a command has stopped it meanwhile.
    fn end_console(&self, old: &Arc<Machine>) {
        let next = self.lock().machines.get(old.name()).cloned();
        if next.is_none_or(|next| !Arc::ptr_eq(next.shim(), old.shim())) {
            old.shim().unwatch();
        }
    }

    /// Returns whether this is still the project's machine of that VM.
    fn is_current(&self, machine: &Arc<Machine>) -> bool {
        self.lock().is_current(machine)
    }
}
