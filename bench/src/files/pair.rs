// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two VMs on one shared system: both work at the same time, and a consumer in one reads what a producer in the other writes.

use std::thread;

use anyhow::{Context, Result, anyhow};
use tombolo_bench_project::Project;

use super::matrix::VMS;
use super::peers::Peer;
use super::{OTHER, Plan, VM, add};
use crate::record::{Better, Results};

/// Seconds that a producer writes at most.
const HANDOVER_SECONDS: u32 = 3;

/// Runs a script in each of the two VMs at the same time and returns what they printed.
fn both(project: &Project, first: &str, second: &str) -> Result<(String, String)> {
    thread::scope(|scope| {
        let other = scope.spawn(|| project.exec(OTHER, second));
        let here = project.exec(VM, first)?;
        let there = other.join().map_err(|_| anyhow!("the thread of VM {OTHER} panicked"))??;
        Ok((here, there))
    })
}

/// The fio matrix with one job in each VM, each on a file of its own, at the same time: the sum of both.
pub fn at_once(plan: &Plan, project: &Project, peer: &Peer, results: &mut Results) -> Result<()> {
    let dir = &peer.dir;
    let script = |vm: &str, other: &str| {
        // Each VM makes a file in the zone when it is ready and waits for the other's, so that both run the same job at the same time.
        let prepare = plan.matrix.prepare_vm(dir, vm);
        let fio = plan.matrix.fio_vm(dir, vm)?;
        let wait = format!("until [ -e /mnt/tombolo/ready.{other} ]; do :; done");
        Some(format!("{prepare} && : >/mnt/tombolo/ready.{vm} && timeout 300 sh -c '{wait}' && {fio}"))
    };
    let (Some(first), Some(second)) = (script(VM, OTHER), script(OTHER, VM)) else { return Ok(()) };
    let (here, there) = both(project, &first, &second)?;
    project.exec(VM, "rm /mnt/tombolo/ready.*")?;
    let there = plan.matrix.read(&there, VMS)?;
    for ((case, here), (_, there)) in plan.matrix.read(&here, VMS)?.into_iter().zip(there) {
        add(results, peer, case, here + there, "MB/s", Better::Higher)?;
    }
    Ok(())
}

/// A producer writes a file in one VM while a consumer in the other follows, from the first write to the last read.
pub fn handover(plan: &Plan, project: &Project, peer: &Peer, results: &mut Results) -> Result<()> {
    if !plan.matrix.wants("handover") {
        return Ok(());
    }
    for (name, bytes) in [("1k", 1u32 << 10), ("4k", 4 << 10), ("1M", 1 << 20)] {
        let file = format!("{}/handover-{name}", peer.dir);
        project.exec(VM, &format!(": >{file} && : >{file}.back"))?;
        let (said, _) = both(
            project,
            &format!("/bench/handover produce {file} {bytes} {} {HANDOVER_SECONDS}", plan.handover_mb),
            &format!("/bench/handover consume {file} {bytes}"),
        )?;
        project.exec(VM, &format!("rm {file} {file}.back"))?;
        let (written, seconds) =
            said.trim().split_once(' ').with_context(|| format!("handover printed '{said}'"))?;
        let rate = written.parse::<f64>()? / seconds.parse::<f64>()? / 1e6;
        add(results, peer, format!("handover-{name}"), rate, "MB/s", Better::Higher)?;
    }
    Ok(())
}
