// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the next program of a supervisor could not take over. Each loss is said at once, named with its remedy in the answer to the upgrade,
//! and, where it is a VM's, in `ps` until that VM is started again.

use std::fmt::Display;

/// The losses of one upgrade, each with the VM that has it.
#[derive(Debug, Default)]
pub struct Losses(Vec<(Option<String>, String)>);

impl Losses {
    /// Notes a loss that is no single VM's.
    pub fn note(&mut self, text: String) {
        crate::say!("{text}");
        self.0.push((None, text));
    }

    /// Notes what a running VM lacks from here on, such as `its console`. A new QEMU has it.
    pub fn of_vm(&mut self, vm: &str, lacks: &str, why: impl Display) {
        self.note_for(
            vm,
            format!("lacks {lacks} since the upgrade ({why}); to start it again: tombolo restart {vm}"),
        );
    }

    /// Notes a loss of a VM with a remedy of its own.
    pub fn note_for(&mut self, vm: &str, text: String) {
        crate::say!("the VM '{vm}' {text}");
        self.0.push((Some(vm.to_owned()), text));
    }

    /// Those of VMs: its name and the loss.
    pub fn of_vms(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|(vm, text)| Some((vm.as_deref()?, text.as_str())))
    }

    /// A line for each; `None`: everything was taken over.
    pub fn summary(&self) -> Option<String> {
        let line = |(vm, text): &(Option<String>, String)| match vm {
            Some(vm) => format!("the VM '{vm}' {text}"),
            None => text.clone(),
        };
        (!self.0.is_empty()).then(|| self.0.iter().map(line).collect::<Vec<_>>().join("\n"))
    }
}
