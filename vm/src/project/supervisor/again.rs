// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The consequences of a VM's end: a guest that reboots gets its next QEMU at once, and a restart policy starts a VM again after a pause.

use std::sync::Arc;

use super::Supervisor;
use crate::machine::{Exit, Machine, Phase};
use crate::project::barrier::Inside;

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

    /// Returns whether this is still the project's machine of that VM.
    fn is_current(&self, machine: &Arc<Machine>) -> bool {
        self.lock().machines.get(machine.name()).is_some_and(|m| Arc::ptr_eq(m, machine))
    }
}
