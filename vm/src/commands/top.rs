// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo top`, the projects' part: what runs, and how much processor time each VM takes.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::commands::ps::columns;
use crate::compose::Size;
use crate::project::control::Status;

/// The state of projects at one moment.
#[derive(Debug)]
pub struct Look {
    at: Instant,
    pub projects: Vec<Status>,
    /// Processor seconds by process.
    used: BTreeMap<u32, f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct VmRates {
    pub project: String,
    pub name: String,
    pub state: String,
    /// Processor time, in hundredths of a processor.
    pub cpu_percent: f64,
    /// Its memory in bytes.
    pub memory: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct ZoneRow {
    pub project: String,
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    pub members: Vec<String>,
}

/// Looks at the project of a compose file, or at all of this user.
///
/// # Errors
/// A supervisor lives and does not answer, or the named project is not up.
pub fn look(file: Option<&Path>) -> anyhow::Result<Look> {
    let projects = crate::commands::ps::running(file)?;
    let pids = projects.iter().flat_map(|p| p.vms.iter().filter_map(|vm| vm.pid));
    // A process that has just ended has used nothing.
    let used = pids.filter_map(|pid| Some((pid, cpu_seconds(pid)?))).collect();
    Ok(Look { at: Instant::now(), projects, used })
}

fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / rustix::param::clock_ticks_per_second() as f64)
}

/// The VMs of `now`, by what they have used since `before`.
#[must_use]
pub fn vms(before: &Look, now: &Look) -> Vec<VmRates> {
    let time = now.at.duration_since(before.at).as_secs_f64().max(0.001);
    let used = |pid: u32| Some(now.used.get(&pid)? - before.used.get(&pid)?);
    let all = now.projects.iter().flat_map(|p| p.vms.iter().map(move |vm| (p, vm)));
    all.map(|(project, vm)| VmRates {
        project: project.project.clone(),
        name: vm.name.clone(),
        state: vm.state.clone(),
        cpu_percent: vm.pid.and_then(used).unwrap_or(0.0) / time * 100.0,
        memory: vm.memory,
    })
    .collect()
}

#[must_use]
pub fn zones(now: &Look) -> Vec<ZoneRow> {
    let all = now.projects.iter().flat_map(|p| p.zones.iter().map(move |zone| (p, zone)));
    all.map(|(project, zone)| ZoneRow {
        project: project.project.clone(),
        name: zone.name.clone(),
        size: zone.size,
        members: zone.members.clone(),
    })
    .collect()
}

/// The tables for people.
#[must_use]
pub fn table(vms: &[VmRates], zones: &[ZoneRow]) -> String {
    let mut text = String::new();
    if !vms.is_empty() {
        let mut rows = vec![["PROJECT", "VM", "STATE", "CPU", "MEMORY"].map(str::to_owned)];
        rows.extend(vms.iter().map(|vm| {
            let cpu = format!("{:.0} %", vm.cpu_percent);
            [vm.project.clone(), vm.name.clone(), vm.state.clone(), cpu, Size(vm.memory).to_string()]
        }));
        text.push_str(&columns(&rows));
    }
    if !zones.is_empty() {
        let mut rows = vec![["PROJECT", "ZONE", "SIZE", "MEMBERS"].map(str::to_owned)];
        rows.extend(zones.iter().map(|zone| {
            let members = if zone.members.is_empty() { "-".into() } else { zone.members.join(",") };
            [zone.project.clone(), zone.name.clone(), Size(zone.size).to_string(), members]
        }));
        text.push_str(&columns(&rows));
    }
    text
}
