// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A project whose supervisor does not answer: the VMs whose QEMUs are its children.

use std::fs;

use crate::child::halted;
use crate::qemu::cmdline;

/// A VM's QEMU.
#[derive(Debug, PartialEq, Eq)]
struct Running {
    vm: String,
    process: u32,
}

/// The children of this process that run VMs; none where the kernel does not tell of children.
fn running(supervisor: u32) -> Vec<Running> {
    // All of them are children of its main thread.
    let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"));
    let children = children.unwrap_or_default();
    let processes = children.split_whitespace().filter_map(|number| number.parse().ok());
    let mut running: Vec<Running> = processes
        .filter_map(|process| {
            let line = fs::read(format!("/proc/{process}/cmdline")).ok()?;
            let vm = line.split(|&byte| byte == 0).find_map(cmdline::vm_of)?.to_owned();
            Some(Running { vm, process })
        })
        .collect();
    running.sort_by(|a, b| a.vm.cmp(&b.vm));
    running
}

/// A sentence about the VMs of a supervisor that does not answer.
pub fn describe(supervisor: u32) -> String {
    let vms: Vec<String> = running(supervisor)
        .into_iter()
        .map(|Running { vm, process }| {
            let halted = halted::of(process).map(|halted| format!(", {}", halted.word())).unwrap_or_default();
            format!("{vm} (process {process}{halted})")
        })
        .collect();
    if vms.is_empty() { "it runs no VM".into() } else { format!("it runs the VMs {}", vms.join(", ")) }
}
