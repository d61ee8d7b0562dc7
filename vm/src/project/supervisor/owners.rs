// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs that own accelerators, as the supervisor sees them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Supervisor;
use crate::compose::Project;
use crate::machine::Phase;
use crate::project::accelerator::Accelerator;

impl Supervisor {
    /// The accelerator that a VM owns.
    pub(super) fn owned_by(&self, vm: &str) -> Option<Arc<Accelerator>> {
        self.lock().accelerators.values().find(|accelerator| accelerator.owner() == Some(vm)).cloned()
    }

    /// Gives back what accelerators' servers in VMs are done with.
    pub(super) fn tend_accelerators(&self) {
        let accelerators: Vec<_> = self.lock().accelerators.values().cloned().collect();
        for accelerator in accelerators {
            accelerator.tend();
        }
    }

    /// Checks that the owners of the accelerators of each VM of `starting` are up.
    ///
    /// # Errors
    /// Names the owner that is not up, and the remedy.
    pub(super) fn check_owners(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<()> {
        let inner = self.lock();
        for (vm, spec) in project.compose.vm.iter().filter(|(vm, _)| starting.contains(vm)) {
            for name in spec.accelerators.0.keys() {
                let Some(owner) = project.compose.accel.get(name).and_then(|accel| accel.vm.as_deref())
                else {
                    continue;
                };
                if starting.iter().any(|vm| *vm == owner) {
                    continue;
                }
                let phase = inner.machines.get(owner).map(|machine| machine.phase());
                if !matches!(phase, Some(Phase::Up | Phase::Booting | Phase::Rebooting)) {
                    anyhow::bail!(
                        "vm.{vm} uses accel.{name}, which the VM '{owner}' owns, and that is not up: tombolo up {owner} {vm}"
                    );
                }
            }
        }
        Ok(())
    }
}
