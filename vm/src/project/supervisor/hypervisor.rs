// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The choice between KVM and TCG for VMs that are to be started.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;

use super::{Reporter, Supervisor};
use crate::compose::{HypervisorChoice, VmSpec};
use crate::guest::kit;
use crate::project::control::Event;
use crate::qemu::version::Qemu;
use crate::qemu::{Hypervisor, kvm};

/// Set to "tcg" it makes VMs with `hypervisor = "auto"` use TCG.
const VARIABLE: &str = "TOMBOLO_HYPERVISOR";

/// A VM that is to be started: its name, its table of the compose file, and its kernel.
type Starting = (String, VmSpec, Option<kit::Boot>);

impl Supervisor {
    /// Chooses the hypervisor of each VM. KVM is tried only if a VM may use it; the kernel for that is looked for `near` the compose file.
    ///
    /// # Errors
    /// A VM needs KVM, which does not work, or `is_cancelled` ended the wait for the answer.
    pub(super) fn choose_hypervisors(
        &self,
        qemu: &Qemu,
        vms: &[Starting],
        near: &Path,
        reporter: &Reporter,
        is_cancelled: &dyn Fn() -> bool,
    ) -> anyhow::Result<BTreeMap<String, Hypervisor>> {
        let limit = if vms.iter().any(|(_, spec, _)| spec.hypervisor == HypervisorChoice::Kvm) {
            kvm::INSISTING
        } else {
            kvm::LIMIT
        };
        let mut chosen = BTreeMap::new();
        let (mut verdict, mut tried) = (None, false);
        for (name, spec, boot) in vms {
            let choice = effective(spec.hypervisor);
            if choice == HypervisorChoice::Tcg {
                chosen.insert(name.clone(), Hypervisor::Tcg);
                continue;
            }
            if verdict.is_none() {
                let kit = kit::kit(&kit::places(near), None);
                let kernel = kit.as_ref().or(boot.as_ref()).map(|b| b.kernel.as_path());
                let announce = || {
                    tried = true;
                    let text = "finding out whether KVM works here".into();
                    reporter.send(&Event::Note { text });
                };
                verdict = kvm::verdict(qemu, kernel, limit, announce, is_cancelled);
            }
            let verdict = verdict.as_ref().context("cancelled; nothing was started")?;
            if choice == HypervisorChoice::Kvm && !verdict.works {
                anyhow::bail!(
                    "vm.{name}.hypervisor is \"kvm\", but {}; write \"auto\" or \"tcg\"",
                    verdict.why
                );
            }
            chosen.insert(name.clone(), verdict.hypervisor());
        }
        if let Some(verdict) = verdict {
            let text = format!("{}: {}", verdict.hypervisor().name(), verdict.why);
            // A verdict that is known from an earlier start is a detail.
            let known = text.clone();
            reporter.send(&if tried { Event::Note { text: known } } else { Event::Detail { text: known } });
            self.lock().hypervisor = text;
        } else if !vms.is_empty() {
            self.lock().hypervisor = format!("TCG: the compose file or {VARIABLE} says so");
        }
        self.report_details(qemu, vms, &chosen, reporter);
        Ok(chosen)
    }

    /// Tells a client that asked for details which QEMU and kernel each VM gets, and where the logs are.
    fn report_details(
        &self,
        qemu: &Qemu,
        vms: &[Starting],
        chosen: &BTreeMap<String, Hypervisor>,
        reporter: &Reporter,
    ) {
        for (name, _, boot) in vms {
            let kernel =
                boot.as_ref().map_or("its disk's".to_owned(), |boot| boot.kernel.display().to_string());
            let text = format!(
                "the VM '{name}': {} {} with {}, kernel {kernel}",
                qemu.program.display(),
                qemu.version_text(),
                chosen[name].name()
            );
            reporter.send(&Event::Detail { text });
        }
        let logs = self.dir.path().display();
        reporter.send(&Event::Detail { text: format!("supervisor {}, logs in {logs}", std::process::id()) });
    }
}

/// The choice of the compose file, as far as the environment does not override it.
fn effective(choice: HypervisorChoice) -> HypervisorChoice {
    match std::env::var(VARIABLE).ok().as_deref() {
        Some("tcg") if choice == HypervisorChoice::Auto => HypervisorChoice::Tcg,
        _ => choice,
    }
}
