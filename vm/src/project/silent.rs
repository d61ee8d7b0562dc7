// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A project whose supervisor does not answer: its VMs, as their shims tell.

use std::path::Path;

use crate::child::halted;
use crate::shim::Shim;
use crate::shim::handle::names;

/// A sentence about the VMs of a supervisor that does not answer; `dir` is its project's folder.
pub fn describe(dir: &Path) -> String {
    let vm = |name: String| {
        let vm = name.strip_prefix("vm-")?;
        let (state, child) = Shim::find(dir, &name).ok()??.look().ok()?;
        let process = child.filter(|_| state.exit.is_none())?.pid;
        let halted = halted::of(process).map(|halted| format!(", {}", halted.word())).unwrap_or_default();
        Some(format!("{vm} (process {process}{halted})"))
    };
    let vms: Vec<String> = names(dir).unwrap_or_default().into_iter().filter_map(vm).collect();
    if vms.is_empty() { "it runs no VM".into() } else { format!("it runs the VMs {}", vms.join(", ")) }
}
