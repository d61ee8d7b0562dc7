// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench net`: the switch beside its peers.
//!
//! Without VMs: [`tombolo_net_load::load`], DPDK's testpmd as the load. With VMs: [`vms`], between two VMs and from a VM to the
//! outside. And [`tombolo_net_load::soak`], every frame accounted for.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use tombolo_bench_project::interrupt;
use tombolo_net_load::load::{Figure, News, Options};
use tombolo_net_load::soak;

use crate::record::{Better, Machine, Results, Sample};

mod vms;

/// The parts of the bench that are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Options of the measurements without VMs, and the cases of both.
    pub options: Options,
    /// Measure without VMs.
    pub load: bool,
    /// The guests' kernel, for what is measured with VMs.
    pub kernel: Option<String>,
    /// Run a soak and nothing else.
    pub soak: Option<Soak>,
    /// Folder of the guest kit.
    pub kit: PathBuf,
}

/// The duration of a soak.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// Until then.
    pub until: soak::Until,
    /// The seed of its kills.
    pub seed: u64,
}

/// Runs the plan and writes `<dir>/net.jsonl`; `net-vm.jsonl` where only VMs are measured, `net-soak.jsonl` after a soak.
///
/// # Errors
/// A peer or the guest kit is missing, or a measurement fails.
pub fn run(plan: &Plan, dir: &Path, command: String) -> Result<Results> {
    let mut versions = Vec::new();
    for package in ["dpdk", "openvswitch-switch-dpdk", "iperf3"] {
        let output =
            Command::new("dpkg-query").args(["-W", "-f", "${Package} ${Version}", package]).output()?;
        versions.push(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let (name, hypervisor) = match (&plan.soak, plan.load, &plan.kernel) {
        (Some(_), ..) => ("net-soak", "no guests"),
        (None, false, Some(_)) => ("net-vm", "tcg or kvm, see the cases' names"),
        (None, true, Some(_)) => ("net", "tcg or kvm, see the cases' names"),
        (None, _, None) => ("net", "no guests"),
    };
    let mut results = Results::create(dir, name, Machine::here(command, Some(hypervisor), versions))?;
    if let Some(how) = plan.soak {
        soak(how, &mut results)?;
        return Ok(results);
    }
    if plan.load {
        tombolo_net_load::load::run(&plan.options, &mut |news| {
            match news {
                News::Figure(figure) => results.add(sample(figure))?,
                News::LeftOut { system, reason } => results.leave_out(&system, &reason)?,
            }
            interrupt::check()
        })?;
    }
    if let Some(kernel) = &plan.kernel {
        vms::run(kernel, &plan.kit, &plan.options, &mut results)?;
    }
    Ok(results)
}

fn sample(figure: Figure) -> Sample {
    let Figure { case, system, value, unit, higher } = figure;
    let better = if higher { Better::Higher } else { Better::Lower };
    Sample::new("net", case, &system, value, unit, better)
}

fn soak(how: Soak, results: &mut Results) -> Result<()> {
    let plan = soak::Plan {
        program: tombolo_bench_project::tombolo(),
        arguments: vec!["net".into(), "run".into()],
        until: how.until,
        round: std::time::Duration::from_secs(5),
        seed: how.seed,
    };
    let mut add = |what: &str, value: u64, higher: bool| {
        let (case, system) = (format!("net-soak-{what}"), "tombolo".into());
        results.add(sample(Figure { case, system, value: value as f64, unit: "frames", higher }))
    };
    let tally = soak::run(&plan, |tally| {
        eprintln!("{tally}");
        interrupt::check()
    })?;
    add("sent", tally.sent, true)?;
    add("received", tally.received, true)?;
    add("dropped-and-counted", tally.dropped(), false)?;
    for (reason, count) in &tally.drops {
        add(&format!("dropped-{reason}"), *count, false)?;
    }
    add("unexplained", tally.unexplained(), false)?;
    add("repeated", tally.repeated, false)?;
    add("kills", tally.kills, true)
}
