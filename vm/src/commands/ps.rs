// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo ps`: the state of projects, as tables or JSON.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::commands::cli::{File, say};
use crate::commands::{client, net};
use crate::compose::Size;
use crate::project::control::{NetStatus, Status, VmStatus};
use crate::project::state::{self, Found};

/// Time for supervisors to answer `ps`, which takes less than a second unless they wait for a CPU.
const DEFAULT_WAIT: Duration = Duration::from_millis(800);

/// Runs `tombolo ps`.
///
/// # Errors
/// The project of `file` has no compose file, or its supervisor does not answer.
pub(super) fn ps(file: &File, all: bool, wait: Option<u64>, json: bool) -> anyhow::Result<ExitCode> {
    let longest = wait.map_or(DEFAULT_WAIT, Duration::from_secs);
    let mut projects: Vec<Status>;
    let mut silent = Vec::new();
    if all {
        (projects, silent) = all_running(|found| client::status_within(found, longest))?;
        net::note_up(projects.iter_mut().flat_map(|status| &mut status.networks), longest);
        if json {
            say(&serde_json::to_string_pretty(&projects)?)?;
        }
    } else {
        let project = file.identify()?;
        let mut found = None;
        // One that has ended before it heard the question may be followed by another.
        while let Some(supervisor) = state::supervisor(&project.file)? {
            found = client::status_within(&supervisor, longest)?;
            if found.is_some() {
                break;
            }
        }
        net::note_up(found.iter_mut().flat_map(|status| &mut status.networks), longest);
        if json {
            let status = found.clone().unwrap_or_else(|| Status::down(&project));
            say(&serde_json::to_string_pretty(&status)?)?;
        }
        projects = found.into_iter().collect();
    }
    if !json {
        if projects.is_empty() && silent.is_empty() {
            crate::say!("nothing runs");
        }
        for status in &projects {
            say(table(status).trim_end())?;
        }
    }
    for error in &silent {
        crate::say!("{error:#}");
    }
    Ok(if silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All projects of this user that are up, and why others that are up did not answer.
fn all_running(
    ask: impl Fn(&Found) -> anyhow::Result<Option<Status>> + Sync,
) -> anyhow::Result<(Vec<Status>, Vec<anyhow::Error>)> {
    let (mut projects, mut silent) = (Vec::new(), Vec::new());
    let supervisors = state::supervisors()?;
    // Those that don't answer are waited for at the same time.
    for answer in crate::thread::all("ask", supervisors.iter().map(|found| || ask(found))) {
        match answer.unwrap_or_else(|| Err(anyhow::anyhow!("a thread that asks a supervisor failed"))) {
            Ok(project) => projects.extend(project),
            Err(e) => silent.push(e),
        }
    }
    Ok((projects, silent))
}

/// The project of a compose file, which must be up; without a file all of this user that are up and answer.
pub(crate) fn running(file: Option<&Path>) -> anyhow::Result<Vec<Status>> {
    if let Some(file) = file {
        let project = File::at(Some(file.to_owned())).identify()?;
        return Ok(vec![client::status(&project)?]);
    }
    let (projects, silent) = all_running(client::status_of)?;
    match silent.into_iter().next() {
        Some(error) if projects.is_empty() => Err(error),
        _ => Ok(projects),
    }
}

fn table(status: &Status) -> String {
    let supervisor = status.supervisor.map_or("-".into(), |p| p.to_string());
    let mut text = format!("{}  {}  supervisor {supervisor}\n", status.project, status.file.display());
    if crate::log::is_verbose() {
        text.push_str(&status.hypervisor);
        text.push('\n');
    }
    let mut rows =
        vec![["VM", "STATE", "HYPERVISOR", "PID", "CPUS", "MEMORY", "UPTIME", "ZONES"].map(str::to_owned)];
    for vm in &status.vms {
        rows.push([
            vm.name.clone(),
            vm_state(vm),
            vm.hypervisor.name().to_lowercase(),
            vm.pid.map_or("-".into(), |p| p.to_string()),
            vm.cpus.to_string(),
            Size(vm.memory).to_string(),
            format!("{:.0} s", vm.uptime),
            if vm.zones.is_empty() { "-".into() } else { vm.zones.join(",") },
        ]);
    }
    text.push_str(&columns(&rows));
    if !status.zones.is_empty() {
        let mut rows = vec![["ZONE", "SIZE", "BACKING", "MEMBERS"].map(str::to_owned)];
        for zone in &status.zones {
            let members = if zone.members.is_empty() { "-".into() } else { zone.members.join(",") };
            let trouble = zone.lost.then(|| "cut short!".to_owned());
            let backing = zone.backing.clone();
            let backing = trouble.map_or(backing.clone(), |trouble| format!("{backing} ({trouble})"));
            rows.push([zone.name.clone(), Size(zone.size).to_string(), backing, members]);
        }
        text.push_str(&columns(&rows));
    }
    if !status.networks.is_empty() {
        text.push_str(&networks(&status.networks));
    }
    if !status.accelerators.is_empty() {
        text.push_str(&accelerators(status));
    }
    text
}

/// A VM's state with what is known of its health and of who does not answer.
fn vm_state(vm: &VmStatus) -> String {
    let notes = vm.health.map(|health| health.to_string()).into_iter().chain(vm.trouble.clone());
    notes.fold(vm.state.clone(), |state, note| format!("{state} ({note})"))
}

/// Accelerators and who uses them.
fn accelerators(status: &Status) -> String {
    let mut rows =
        vec![["ACCEL", "SERVER", "STATE", "VM", "CLIENTS", "MEMORY", "LIBRARY"].map(str::to_owned)];
    for accel in &status.accelerators {
        let server = accel.owner.clone().or_else(|| accel.pid.map(|p| p.to_string()));
        let head = [accel.name.clone(), server.unwrap_or_else(|| "-".into()), accel.state.clone()];
        for (n, vm) in accel.vms.iter().enumerate() {
            let [name, server, state] = if n == 0 { head.clone() } else { Default::default() };
            let memory = Size(vm.memory.next_multiple_of(1 << 20)).to_string();
            let library = match vm.library {
                Some(true) => "there",
                Some(false) => "missing",
                None => "-",
            };
            let clients = if vm.served { vm.clients.to_string() } else { "not served".into() };
            rows.push([name, server, state, vm.vm.clone(), clients, memory, library.into()]);
        }
    }
    columns(&rows)
}

/// The listings of the accelerator servers of all projects of this user, as `tombolo accel ls` shows them.
///
/// # Errors
/// When a supervisor that lives does not answer.
pub fn accelerator_servers() -> anyhow::Result<Vec<tombolo_control::accel::Listing>> {
    let accelerators = running(None)?.into_iter().flat_map(|project| project.accelerators);
    Ok(accelerators.filter_map(|accelerator| accelerator.server).collect())
}

/// The table of networks.
pub(super) fn networks(networks: &[NetStatus]) -> String {
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let mut rows = vec![["NET", "SWITCH", "UPLINK", "SUBNET", "VM", "MAC", "ADDRESS"].map(str::to_owned)];
    for net in networks {
        let switch = net.pid.map_or("starting".into(), |p| match &net.trouble {
            None => p.to_string(),
            Some(trouble) => format!("{p} ({trouble})"),
        });
        let uplink = noted(dash(&net.uplink), [(net.uplink_up, "down")]);
        let head = [net.name.clone(), switch, uplink, dash(&net.subnet)];
        for (n, port) in net.ports.iter().enumerate() {
            let [name, switch, uplink, subnet] = if n == 0 { head.clone() } else { Default::default() };
            let both: Vec<_> = port.address.iter().chain(&port.address6).cloned().collect();
            let addresses = Some(both.join(",")).filter(|a| !a.is_empty());
            let vm = noted(port.vm.clone(), [(port.up, "down"), (port.uplink_up, "uplink down")]);
            rows.push([name, switch, uplink, subnet, vm, port.mac.clone(), dash(&addresses)]);
        }
    }
    columns(&rows)
}

/// Returns a name with those of the notes whose condition is known to be false.
fn noted<const N: usize>(name: String, notes: [(Option<bool>, &str); N]) -> String {
    let failed = notes.into_iter().filter(|(holds, _)| *holds == Some(false));
    match failed.map(|(_, note)| note).collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => name,
        some => format!("{name} ({some})"),
    }
}

/// Formats rows as columns of equal width.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let line: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}
