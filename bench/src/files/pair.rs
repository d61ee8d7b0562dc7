// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two VMs on one shared system: both work at the same time, a consumer in one reads what a producer in the other writes, and one looks
//! for what the other has changed.

use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use tombolo_bench_project::Project;

use super::matrix::{Matrix, VMS, group};
use super::systems::{Io, System};
use super::{OTHER, Plan, VM, add};
use crate::record::{Better, Results, Sample};

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

/// All that two VMs do, in the round of this number; the time until a change is seen is measured in the first alone.
pub fn all(
    plan: &Plan,
    number: u32,
    project: &Project,
    system: &System,
    results: &mut Results,
) -> Result<()> {
    if number == 0 {
        coherence(plan, project, system, results)?;
    }
    if plan.handover_mb > 0 {
        at_once(plan, project, system, results)?;
        handover(plan, project, system, results)?;
    }
    Ok(())
}

/// The fio matrix with one job in each VM, each on a file of its own, at the same time: the sum of both.
fn at_once(plan: &Plan, project: &Project, system: &System, results: &mut Results) -> Result<()> {
    for io in plan.io(system) {
        let dir = system.dir();
        let script = |vm: &str, other: &str| {
            // Each VM makes a file in the zone when it is ready and waits for the other's, so that both run the same job at the same time.
            let prepare = plan.matrix.prepare_vm(&dir, vm);
            let warm_up = Matrix::warm_up(system, io, &format!("fio.{vm}"));
            let fio = plan.matrix.fio_vm(&dir, vm, io)?;
            let wait = format!("until [ -e /mnt/tombolo/ready.{other} ]; do :; done");
            Some(format!(
                "{prepare} && sync && {warm_up}: >/mnt/tombolo/ready.{vm} && timeout 300 sh -c '{wait}' && {fio} && sync"
            ))
        };
        let (Some(first), Some(second)) = (script(VM, OTHER), script(OTHER, VM)) else { continue };
        let (here, there) = both(project, &first, &second)?;
        project.exec(VM, "rm /mnt/tombolo/ready.*")?;
        let group = group(VMS, io);
        let there = plan.matrix.read(&there, &group)?;
        for ((case, here), (_, there)) in plan.matrix.read(&here, &group)?.into_iter().zip(there) {
            add(results, system, case, here + there, "MB/s", Better::Higher)?;
        }
    }
    Ok(())
}

/// A producer writes a file in one VM while a consumer in the other follows, from the first write to the last read. Both use O_DIRECT: a
/// system that is measured buffered only would never show the consumer the file's growth.
fn handover(plan: &Plan, project: &Project, system: &System, results: &mut Results) -> Result<()> {
    if !plan.matrix.wants("handover") || !plan.io(system).any(|io| io == Io::Direct) {
        return Ok(());
    }
    for (name, bytes) in [("1k", 1u32 << 10), ("4k", 4 << 10), ("1M", 1 << 20)] {
        let file = format!("{}/handover-{name}", system.dir());
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
        add(results, system, format!("handover-{name}"), rate, "MB/s", Better::Higher)?;
    }
    Ok(())
}

/// The time after which a VM sees what another has changed; ended after the plan's seconds.
fn coherence(plan: &Plan, project: &Project, system: &System, results: &mut Results) -> Result<()> {
    if !plan.looks_for_coherence() {
        return Ok(());
    }
    let (dir, flag) =
        (format!("{}/coherence", system.dir()), format!("/mnt/tombolo/coherence-{}", system.name));
    project.exec(VM, &format!("/bench/coherence make {dir}"))?;
    let (_, said) = both(
        project,
        &format!("/bench/coherence change {dir} {flag}"),
        &format!("/bench/coherence look {dir} {flag} {}", plan.coherence_s),
    )?;
    for line in said.lines() {
        results.add(seen(system.name, line)?)?;
    }
    Ok(())
}

/// The sample of a line of guest/coherence.c.
fn seen(system: &str, line: &str) -> Result<Sample> {
    let words: Vec<&str> = line.split(' ').collect();
    let (what, seconds, at_least) = match words[..] {
        [what, seconds] => (what, seconds, false),
        [what, seconds, "unseen"] => (what, seconds, true),
        _ => bail!("coherence printed '{line}'"),
    };
    let seconds = seconds.parse().with_context(|| format!("coherence printed '{line}'"))?;
    let case = format!("coherence-{what}");
    Ok(Sample { at_least, ..Sample::new("files", case, system, seconds, "s", Better::Lower) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_seen_took_at_least_as_long_as_was_waited() {
        let sample = seen("9p-loose", "name 30.000 unseen").unwrap();
        assert!(sample.at_least && sample.value == 30.0 && sample.case == "coherence-name", "{sample}");
        let sample = seen("nfs", "read 3.017").unwrap();
        assert!(!sample.at_least && sample.value == 3.017, "{sample}");
        assert!(seen("nfs", "read soon").is_err() && seen("nfs", "").is_err());
    }
}
