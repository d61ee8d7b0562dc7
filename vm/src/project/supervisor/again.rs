// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What follows a VM's end: a reboot gets its next QEMU at once, and a restart policy starts it again after a pause.

use std::sync::Arc;

use super::Supervisor;
use crate::machine::{Exit, Machine, Phase};

impl Supervisor {
    /// Called once when a VM's QEMU has ended, on the thread that started it.
    pub(super) fn ended(self: &Arc<Self>, machine: &Arc<Machine>, exit: Exit) {
        self.leave_zones(machine.name(), machine.zones().keys());
        match machine.set_ended(exit) {
            Phase::Rebooting => self.reboot(machine),
            _ => self.start_again(machine),
        }
    }

    /// Starts a VM again as often as its policy says, with growing pauses, until one start has led to a new QEMU, whose own end is another
    /// call. A VM that was stopped or started by somebody else meanwhile is left alone.
    fn start_again(self: &Arc<Self>, old: &Arc<Machine>) {
        let name = old.name();
        let mut attempts = old.attempts();
        while let Some(pause) = old.ending().and_then(|clean| old.spec().restart.pause(clean, attempts)) {
            old.set_restart_in(pause);
            crate::say!("the VM '{name}' starts again in {} s: {}", pause.as_secs(), old.status().state);
            std::thread::sleep(pause);
            self.replace(old, "starts again", |report| {
                self.start_one(self.wanted_again(old, Some(attempts + 1))?, &|_| {}, report)
            });
            if !self.is_current(old) {
                return;
            }
            attempts += 1;
        }
    }

    /// Whether this is still what the project has under the VM's name.
    fn is_current(&self, machine: &Arc<Machine>) -> bool {
        self.lock().machines.get(machine.name()).is_some_and(|m| Arc::ptr_eq(m, machine))
    }
}
