// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands of this part: `tombolo doctor, up, down, ps, exec, logs, console, zone attach, zone detach`.
//!
//! Exit codes: 0 done; 1 it failed; 2 wrong usage; 125 `exec` could not run the command (else the command's own code);
//! 130 interrupted, and taken back.

use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use tombolo_zone::door::Found;

use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::commands::doctor;
use crate::compose::{self, Project, Rights, Size};
use crate::machine::growth;
use crate::project::control::{Request, Status, ZoneStatus};
use crate::project::peer;
use crate::project::state::{self, StateDir};
use crate::project::supervisor;

/// How long a supervisor may take to end after its last word.
const ENDING: Duration = Duration::from_secs(5);

/// Which compose file.
#[derive(Args, Clone, Debug, Default)]
pub struct File {
    /// The compose file [default: tombolo.toml here or in a folder above]
    #[arg(short, long, value_name = "PATH")]
    file: Option<PathBuf>,
}

impl File {
    fn load(&self) -> anyhow::Result<Project> {
        Ok(Project::load(&compose::find(self.file.as_deref())?)?)
    }
}

/// Commands for VMs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Say what this host can do, each line with its remedy
    Doctor,
    /// Start what the compose file declares and does not run yet
    Up {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Stay in the foreground; Ctrl-C takes everything down
        #[arg(short, long)]
        attach: bool,
        /// Only these VMs
        vms: Vec<String>,
    },
    /// Stop VMs; without a name all of them, and the zones with them
    Down {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Only these VMs
        vms: Vec<String>,
    },
    /// Show what runs
    Ps {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// All projects of this user
        #[arg(short, long)]
        all: bool,
    },
    /// Run a command in a VM; its exit code is this command's
    Exec {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Pass this command's input on
        #[arg(short, long)]
        interactive: bool,
        /// Set a variable
        #[arg(short, long, value_name = "NAME=VALUE")]
        env: Vec<String>,
        /// Run it in this folder of the guest
        #[arg(short = 'C', long, value_name = "PATH")]
        dir: Option<String>,
        /// The VM
        vm: String,
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Show what a VM's console said
    Logs {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Go on as it says more
        #[arg(short = 'F', long)]
        follow: bool,
        /// QEMU's own words instead
        #[arg(long)]
        qemu: bool,
        /// The VM
        vm: String,
    },
    /// Use a VM's serial console; Ctrl-] leaves it
    Console {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// The VM
        vm: String,
    },
    /// Hold the zones and VMs of a project (started by 'up')
    #[command(hide = true)]
    Supervise {
        /// The project's folder
        #[arg(long)]
        dir: PathBuf,
        /// The inherited connection
        #[arg(long)]
        control: RawFd,
        /// The compose file
        #[arg(long)]
        file: PathBuf,
    },
}

/// Commands about starts.
#[derive(Subcommand, Debug)]
pub enum StartCommand {
    /// What a VM's start spent its time on
    Blame {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// The VM
        vm: String,
    },
    /// How far the memory of running VMs is, in Prometheus' text format
    Metrics {
        /// Which compose file
        #[command(flatten)]
        file: File,
    },
    /// How the memory of a VM would arrive
    Plan {
        /// Its memory, such as "350G"
        memory: Size,
        /// Memory at start
        #[arg(long)]
        boot_memory: Option<Size>,
        /// As the XML of a libvirt domain
        #[arg(long)]
        libvirt: bool,
    },
}

/// Commands for zones of running VMs.
#[derive(Subcommand, Debug)]
pub enum ZoneCommand {
    /// Make a running VM a member of a zone
    Attach {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Let it only read
        #[arg(long)]
        read_only: bool,
        /// Mount the zone's file system there
        #[arg(long, value_name = "PATH")]
        mount: Option<String>,
        /// The zone
        zone: String,
        /// The VM
        vm: String,
    },
    /// Print where a running project's zone can be opened: tombolo files mount "$(tombolo zone path ZONE)" DIR
    Path {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// The zone
        zone: String,
    },
    /// Unmount a zone in a running VM and end its membership
    Detach {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// The zone
        zone: String,
        /// The VM
        vm: String,
    },
}

/// Commands for the networks of running projects.
#[derive(Subcommand, Debug)]
pub enum NetCommand {
    /// List the networks of a running project: switch, uplink, and who has which address
    Ls {
        /// Which compose file
        #[command(flatten)]
        file: File,
    },
}

/// Runs one of [`NetCommand`].
///
/// # Errors
/// As [`run`].
pub fn run_net(command: NetCommand, json: bool) -> anyhow::Result<ExitCode> {
    let NetCommand::Ls { file } = command;
    let status = client::status(client::living(&file.load()?, &Request::Ps)?)?;
    if json {
        say(&serde_json::to_string_pretty(&status.networks)?)?;
    } else if status.networks.is_empty() {
        eprintln!(
            "the project '{}' has no network; add [net.NAME] and networks = [\"NAME\"] to a VM",
            status.project
        );
    } else {
        say(networks(&status).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The control socket of the switch of network `name` in the running project of this folder (or one above); without a
/// name, of the only one. `None`: there is no such project, or it is not up, or has no such network.
///
/// # Errors
/// When the compose file is malformed, the supervisor does not answer, or there are several networks and no name.
pub fn find_switch(name: Option<&str>) -> anyhow::Result<Option<PathBuf>> {
    let Ok(file) = compose::find(None) else { return Ok(None) };
    let Some(peer) = peer::ask(&Project::load(&file)?, &Request::Ps)? else {
        return Ok(None);
    };
    let networks = client::status(peer)?.networks;
    if let (None, [_, _, ..]) = (name, &networks[..]) {
        let names: Vec<&str> = networks.iter().map(|n| n.name.as_str()).collect();
        anyhow::bail!("there are several networks; say which with --control: {}", names.join(", "));
    }
    Ok(networks.into_iter().find(|n| name.is_none_or(|wanted| n.name == wanted)).map(|n| n.control))
}

/// Runs one of [`Command`].
///
/// # Errors
/// One message that says what, where and what to do.
pub fn run(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Doctor => diagnose(json),
        Command::Up { file, attach, vms } => up(&file.load()?, vms, attach, json),
        Command::Down { file, vms } => down(&file.load()?, vms, json),
        Command::Ps { file, all } => ps(&file, all, json),
        Command::Exec { file, interactive, env, dir, vm, command } => {
            let request = Request::Exec { vm, argv: command, env, dir, input: interactive };
            match file.load().and_then(|project| client::exec(&project, &request)) {
                Ok(code) => Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(255))),
                Err(e) => {
                    eprintln!("tombolo: {e:#}");
                    Ok(ExitCode::from(125))
                }
            }
        }
        Command::Logs { file, follow, qemu, vm } => logs(&file.load()?, &vm, follow, qemu),
        Command::Console { file, vm } => {
            client::console(&file.load()?, &vm)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Supervise { dir, control, file } => {
            supervisor::run(Project::load(&file)?, &dir, control)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs one of [`ZoneCommand`].
///
/// # Errors
/// As [`run`].
pub fn run_zone(command: ZoneCommand, json: bool) -> anyhow::Result<ExitCode> {
    let (file, request) = match command {
        ZoneCommand::Attach { file, read_only, mount, zone, vm } => {
            let rights = if read_only { Rights::ReadOnly } else { Rights::ReadWrite };
            (file, Request::ZoneAttach { zone, vm, rights, mount })
        }
        ZoneCommand::Path { file, zone } => return zone_path(&file, &zone, json),
        ZoneCommand::Detach { file, zone, vm } => (file, Request::ZoneDetach { zone, vm }),
    };
    let mut peer = client::living(&file.load()?, &request)?;
    finish(client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave)?)
}

/// One line or more on the standard output; who reads it may be gone, which is an error like any other.
fn say(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{text}")
}

fn zone_path(file: &File, name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let zone = find_zone(file, name)?;
    if json {
        say(&serde_json::to_string(&zone)?)?;
    } else {
        say(&zone.path)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The zone that the running project of this file calls `name`; its `path` is where other programs open its memory.
///
/// # Errors
/// When there is no such project, it is not up, or has no such zone.
pub fn find_zone(file: &File, name: &str) -> anyhow::Result<ZoneStatus> {
    let project = file.load()?;
    let mut zones = client::status(client::living(&project, &Request::Ps)?)?.zones;
    if let Some(at) = zones.iter().position(|z| z.name == name) {
        return Ok(zones.swap_remove(at));
    }
    let near = compose::nearest(name, zones.iter().map(|z| z.name.as_str()));
    let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
    anyhow::bail!("the project '{}' has no zone '{name}'{hint}", project.name);
}

fn finish(outcome: Outcome) -> anyhow::Result<ExitCode> {
    match outcome {
        Outcome::Done => Ok(ExitCode::SUCCESS),
        Outcome::Interrupted => {
            eprintln!("tombolo: interrupted; everything that was started has been stopped");
            Ok(ExitCode::from(130))
        }
        Outcome::Left => {
            eprintln!(
                "tombolo: interrupted; the supervisor goes on with it, 'tombolo ps' shows how far it is"
            );
            Ok(ExitCode::from(130))
        }
    }
}

fn diagnose(json: bool) -> anyhow::Result<ExitCode> {
    let near = std::env::current_dir()?;
    let findings = doctor::examine(&near, || {
        eprintln!("finding out whether KVM works here (once per boot of the host) ...")
    });
    if json {
        say(&serde_json::to_string_pretty(&findings)?)?;
    } else {
        say(doctor::table(&findings, std::io::stdout().is_terminal()).trim_end())?;
    }
    let bad = findings.iter().any(|f| f.grade == doctor::Grade::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn up(project: &Project, vms: Vec<String>, attach: bool, json: bool) -> anyhow::Result<ExitCode> {
    if project.compose.vm.is_empty() {
        anyhow::bail!("{} declares no VM; add a table [vm.NAME]", project.file.display());
    }
    let request = Request::Up { project: Box::new(project.clone()), vms };
    let mut peer = client::supervisor(project, &request)?;
    let outcome = client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Cancel)?;
    if outcome == Outcome::Done && attach {
        eprintln!("Ctrl-C takes everything down");
        client::attach(project)?;
        return down(project, Vec::new(), json);
    }
    finish(outcome)
}

fn down(project: &Project, vms: Vec<String>, json: bool) -> anyhow::Result<ExitCode> {
    let dir = StateDir::of(project)?;
    let all = vms.is_empty();
    let Some(mut peer) = peer::ask(project, &Request::Down { vms })? else {
        // Logs of a supervisor that died; one that is about to end keeps its lock until then.
        if dir.path().exists() {
            let _lock = dir.lock_within(ENDING)?;
            dir.remove();
        }
        for address in growth::give_back_orphans()? {
            eprintln!("{address} given back: its VM died");
        }
        if !json {
            eprintln!("the project '{}' is not up", project.name);
        }
        return Ok(ExitCode::SUCCESS);
    };
    let outcome = client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave)?;
    if all && outcome == Outcome::Done {
        // The supervisor ends right after its last word; whoever called `down` may count on it.
        peer.wait_ended(ENDING)?;
    }
    finish(outcome)
}

fn ps(file: &File, all: bool, json: bool) -> anyhow::Result<ExitCode> {
    let projects: Vec<Status>;
    let mut silent = Vec::new();
    if all {
        (projects, silent) = all_running()?;
        if json {
            say(&serde_json::to_string_pretty(&projects)?)?;
        }
    } else {
        let project = file.load()?;
        let found = peer::ask(&project, &Request::Ps)?.map(client::status).transpose()?;
        if json {
            let status = found.clone().unwrap_or_else(|| Status::down(&project));
            say(&serde_json::to_string_pretty(&status)?)?;
        }
        projects = found.into_iter().collect();
    }
    if !json {
        if projects.is_empty() && silent.is_empty() {
            eprintln!("nothing runs");
        }
        for status in &projects {
            say(table(status).trim_end())?;
        }
    }
    for error in &silent {
        eprintln!("tombolo: {error:#}");
    }
    Ok(if silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All projects of this user that are up, and why others that are up did not answer.
fn all_running() -> anyhow::Result<(Vec<Status>, Vec<anyhow::Error>)> {
    let (mut projects, mut silent) = (Vec::new(), Vec::new());
    for found in state::supervisors()? {
        match client::status_of(&found) {
            Ok(project) => projects.extend(project),
            Err(e) => silent.push(e),
        }
    }
    Ok((projects, silent))
}

/// The project of a compose file, which must be up; without a file all of this user that are up and answer.
pub(crate) fn running(file: Option<&Path>) -> anyhow::Result<Vec<Status>> {
    if let Some(file) = file {
        return Ok(vec![client::status(client::living(
            &Project::load(&compose::find(Some(file))?)?,
            &Request::Ps,
        )?)?]);
    }
    let (projects, silent) = all_running()?;
    match silent.into_iter().next() {
        Some(error) if projects.is_empty() => Err(error),
        _ => Ok(projects),
    }
}

/// Runs one of [`StartCommand`].
///
/// # Errors
/// What the command says.
pub fn run_start(command: StartCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        StartCommand::Blame { file, vm } => blame(&file.load()?, &vm, json),
        StartCommand::Metrics { file } => {
            let status = client::status(client::living(&file.load()?, &Request::Ps)?)?;
            let growing = status.vms.iter().filter_map(|vm| Some((vm.name.as_str(), vm.growth.as_ref()?)));
            say(tombolo_start::progress::prometheus(&growing.collect::<Vec<_>>()).trim_end())?;
            Ok(ExitCode::SUCCESS)
        }
        StartCommand::Plan { memory, boot_memory, libvirt } => {
            tombolo_start::cli::plan(memory.0, boot_memory.map(|b| b.0), libvirt, json)
        }
    }
}

fn blame(project: &Project, name: &str, json: bool) -> anyhow::Result<ExitCode> {
    let not_up = || format!("the VM '{name}' is not up; 'tombolo ps' shows what is");
    let status = client::status(peer::ask(project, &Request::Ps)?.with_context(not_up)?)?;
    let vm = status.vms.iter().find(|vm| vm.name == name).with_context(not_up)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&vm.timeline)?);
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", tombolo_start::timeline::render_names(&vm.timeline, 40));
    if let Some(growth) = &vm.growth {
        say(&growth.line())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(status: &Status) -> String {
    let supervisor = status.supervisor.map_or("-".into(), |p| p.to_string());
    let mut text =
        format!("{}  {}  supervisor {supervisor}\n{}\n", status.project, status.file.display(), status.accel);
    let mut rows = vec![["VM", "STATE", "PID", "CPUS", "MEMORY", "UPTIME", "ZONES"].map(str::to_owned)];
    for vm in &status.vms {
        rows.push([
            vm.name.clone(),
            vm.state.clone(),
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
            let backing =
                if zone.lost { format!("{} (cut short!)", zone.backing) } else { zone.backing.clone() };
            rows.push([zone.name.clone(), Size(zone.size).to_string(), backing, members]);
        }
        text.push_str(&columns(&rows));
    }
    if !status.networks.is_empty() {
        text.push_str(&networks(status));
    }
    if !status.accelerators.is_empty() {
        text.push_str(&accelerators(status));
    }
    text
}

/// Accelerators and who uses them.
fn accelerators(status: &Status) -> String {
    let mut rows =
        vec![["ACCEL", "SERVER", "STATE", "VM", "CLIENTS", "MEMORY", "LIBRARY"].map(str::to_owned)];
    for accel in &status.accelerators {
        let head = [accel.name.clone(), accel.pid.map_or("-".into(), |p| p.to_string()), accel.state.clone()];
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

/// What the accelerator servers of all projects of this user say, as `tombolo accel ls` shows it.
///
/// # Errors
/// When a supervisor that lives does not answer.
pub fn accelerator_servers() -> anyhow::Result<Vec<tombolo_control::accel::Listing>> {
    let accelerators = running(None)?.into_iter().flat_map(|project| project.accelerators);
    Ok(accelerators.filter_map(|accelerator| accelerator.server).collect())
}

/// Networks and who is in them.
fn networks(status: &Status) -> String {
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let mut rows = vec![["NET", "SWITCH", "UPLINK", "SUBNET", "VM", "MAC", "ADDRESS"].map(str::to_owned)];
    for net in &status.networks {
        let switch = net.pid.map_or("starting".into(), |p| p.to_string());
        let head = [net.name.clone(), switch, dash(&net.uplink), dash(&net.subnet)];
        for (n, port) in net.ports.iter().enumerate() {
            let [name, switch, uplink, subnet] = if n == 0 { head.clone() } else { Default::default() };
            rows.push([name, switch, uplink, subnet, port.vm.clone(), port.mac.clone(), dash(&port.address)]);
        }
    }
    columns(&rows)
}

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

fn logs(project: &Project, vm: &str, follow: bool, qemu: bool) -> anyhow::Result<ExitCode> {
    let dir = StateDir::of(project)?;
    let path = if qemu { dir.qemu_log(vm) } else { dir.console_log(vm) };
    if !project.compose.vm.contains_key(vm) {
        let near = compose::nearest(vm, project.compose.vm.keys().map(String::as_str));
        let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
        anyhow::bail!("{} declares no VM '{vm}'{hint}", project.file.display());
    }
    let mut log = std::fs::File::open(&path).with_context(|| {
        format!("the VM '{vm}' has no log ({}); start it with 'tombolo up'", path.display())
    })?;
    let mut out = std::io::stdout().lock();
    std::io::copy(&mut log, &mut out)?;
    let living = if follow { state::supervisor(project)? } else { None };
    while living.as_ref().is_some_and(Found::is_there) {
        std::thread::sleep(Duration::from_millis(200));
        log = reopened(log, &path)?;
        std::io::copy(&mut log, &mut out)?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The same log, or the new one after a change of files.
fn reopened(mut log: std::fs::File, path: &Path) -> anyhow::Result<std::fs::File> {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = path.metadata() else { return Ok(log) };
    if meta.ino() == log.metadata()?.ino() {
        if meta.len() < log.stream_position()? {
            log.seek(SeekFrom::Start(0))?;
        }
        return Ok(log);
    }
    let mut rest = Vec::new();
    log.read_to_end(&mut rest)?;
    std::io::stdout().write_all(&rest)?;
    Ok(std::fs::File::open(path)?)
}
