// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands of this part: `tombolo doctor, up, restart, upgrade, config, events, down, ps, exec, logs, console, zone attach, zone detach`.
//!
//! Exit codes: 0 done; 1 it failed; 2 wrong usage; 125 `exec` could not run the command (else the command's own code);
//! 130 interrupted, and taken back.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::commands::{clean, config, copy, doctor, events, guest_doctor, logs, terminal, up, upgrade};
use crate::compose::{self, Project, Rights, Size};
use crate::machine::growth;
use crate::project::control::{Event, Request, Status, VmStatus, ZoneStatus};
use crate::project::peer;
use crate::project::state::{self, StateDir};
use crate::project::stopped;
use crate::project::supervisor;
use anyhow::Context;
use clap::{Args, Subcommand};

/// How long a supervisor may take to end after its last word.
const ENDING: Duration = Duration::from_secs(5);
/// Exit code of `exec` whose output nobody reads any more: a shell's for SIGPIPE.
const BROKEN_PIPE: u8 = 141;

/// Whether somebody has closed a pipe that was written to.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Which compose file.
#[derive(Args, Clone, Debug, Default)]
pub struct File {
    /// The compose file [default: tombolo.toml here or in a folder above]
    #[arg(short, long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Take variables from this file instead of .env beside the compose file; the last of several counts
    #[arg(long, value_name = "PATH")]
    env_file: Vec<PathBuf>,
}

impl File {
    /// The file at this path; `None`: `tombolo.toml` here or in a folder above.
    pub(crate) fn at(file: Option<PathBuf>) -> File {
        File { file, env_file: Vec::new() }
    }

    /// The project as the file declares it.
    ///
    /// # Errors
    /// When there is no file, and what is wrong with it.
    pub(crate) fn load(&self) -> anyhow::Result<Project> {
        Ok(Project::load_with(&compose::find(self.file.as_deref())?, &self.env_file)?)
    }

    /// The project, for commands that need no more of it than its supervisor. While that lives, the file may be broken or gone.
    ///
    /// # Errors
    /// As [`File::load`], where no supervisor lives.
    pub(crate) fn identify(&self) -> anyhow::Result<Project> {
        let path = match (compose::find(self.file.as_deref()), &self.file) {
            (Err(_), Some(gone)) if state::supervisor(&compose::locate_gone(gone)?)?.is_some() => {
                compose::locate_gone(gone)?
            }
            (path, _) => path?,
        };
        match Project::load_with(&path, &self.env_file) {
            Err(_) if state::supervisor(&path)?.is_some() => Ok(Project::unread(&path)),
            project => Ok(project?),
        }
    }
}

/// Commands for VMs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Say what this host can do, or what a running VM's guest has, each line with its remedy
    Doctor {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// The VM
        vm: Option<String>,
    },
    /// Start what the compose file declares and does not run yet
    Up(up::UpOptions),
    /// Stop VMs and start them as the compose file says now
    Restart(up::RestartOptions),
    /// Check the compose file and print it with its defaults
    Config(config::Options),
    /// Have running projects go on under another version of this program, without a stop
    Upgrade(upgrade::Options),
    /// Remove what killed processes have left in /run and temporary folders
    #[command(visible_alias = "prune")]
    Clean(clean::Options),
    /// Show state changes of VMs, networks and accelerators as they happen
    Events(events::Options),
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
        /// Run it on a terminal, with this command's input
        #[arg(short, long)]
        tty: bool,
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
    /// Show what consoles said
    Logs(logs::Options),
    /// Copy files and folders to and from a VM: one of the two is VM:PATH; '-' is a tar on the standard input or output
    Cp {
        /// Which compose file
        #[command(flatten)]
        file: File,
        /// Copy a folder with all that is in it
        #[arg(short, long)]
        recursive: bool,
        /// What is copied
        from: String,
        /// Its new name, or the folder that it goes to
        to: String,
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
        /// The project's name
        #[arg(long)]
        name: String,
    },
    /// Go on as the supervisor that this process was in another program (started by 'upgrade')
    #[command(hide = true)]
    SuperviseOn {
        /// Only say whether this program could go on with this inherited state
        #[arg(long, conflicts_with = "state")]
        examine: Option<RawFd>,
        /// The inherited state
        #[arg(long, required_unless_present = "examine")]
        state: Option<RawFd>,
        /// Why the program that was tried did not go on
        #[arg(long)]
        refused: Option<String>,
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
    let status = client::status(client::living(&file.identify()?, &Request::Ps)?)?;
    if json {
        say(&serde_json::to_string_pretty(&status.networks)?)?;
    } else if status.networks.is_empty() {
        crate::say!(
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
        Command::Doctor { file, vm } => diagnose(&file, vm.as_deref(), json),
        Command::Up(options) => up::up(options, json),
        Command::Restart(options) => up::restart(options, json),
        Command::Config(options) => config::run(&options, json),
        Command::Upgrade(options) => upgrade::run(options, json),
        Command::Clean(options) => clean::run(&options, json),
        Command::Events(options) => events::run(&options, json),
        Command::Down { file, vms } => down(&file.identify()?, vms, json),
        Command::Ps { file, all } => ps(&file, all, json),
        Command::Exec { file, interactive, tty, env, dir, vm, command } => {
            let terminal = tty.then(terminal::here);
            let request = Request::Exec { vm, argv: command, env, dir, input: interactive, terminal };
            let run = if tty { terminal::exec } else { client::exec };
            match file.identify().and_then(|project| run(&project, &request)) {
                Ok(code) => Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(255))),
                // Whoever read the output has seen enough.
                Err(e) if is_broken_pipe(&e) => Ok(ExitCode::from(BROKEN_PIPE)),
                Err(e) => {
                    crate::say!("{e:#}");
                    Ok(ExitCode::from(125))
                }
            }
        }
        Command::Logs(options) => logs::run(&options, json),
        Command::Cp { file, recursive, from, to } => {
            copy::copy(&file.identify()?, &from, &to, recursive)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Console { file, vm } => {
            client::console(&file.identify()?, &vm)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Supervise { dir, control, file, name } => {
            // What the file says comes with the first request.
            supervisor::run(Project { name, file, compose: compose::Compose::default() }, &dir, control)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::SuperviseOn { examine, state, refused } => {
            match (examine, state) {
                (Some(state), _) => supervisor::examine(state)?,
                (None, Some(state)) => supervisor::go_on(state, refused)?,
                (None, None) => anyhow::bail!("there is no state to go on with"),
            }
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
    let mut peer = client::living(&file.identify()?, &request)?;
    finish(client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave)?)
}

/// One line or more on the standard output; who reads it may be gone, which is an error like any other.
pub(crate) fn say(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{}", crate::log::plain(text))
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
    let project = file.identify()?;
    let mut zones = client::status(client::living(&project, &Request::Ps)?)?.zones;
    if let Some(at) = zones.iter().position(|z| z.name == name) {
        let mut zone = zones.swap_remove(at);
        // Messages of whoever opens it say its name.
        if let (Some(link), true) = (zone.link.to_str(), zone.link.exists()) {
            zone.path = link.to_owned();
        }
        return Ok(zone);
    }
    let near = compose::nearest(name, zones.iter().map(|z| z.name.as_str()));
    let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
    anyhow::bail!("the project '{}' has no zone '{name}'{hint}", project.name);
}

/// The exit code of a request.
pub(crate) fn finish(outcome: Outcome) -> anyhow::Result<ExitCode> {
    match outcome {
        Outcome::Done => Ok(ExitCode::SUCCESS),
        Outcome::Interrupted => {
            crate::say!("interrupted; everything that was started has been stopped");
            Ok(ExitCode::from(130))
        }
        Outcome::Left => {
            crate::say!("interrupted; the supervisor goes on with it, 'tombolo ps' shows how far it is");
            Ok(ExitCode::from(130))
        }
    }
}

fn diagnose(file: &File, vm: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let findings = match vm {
        Some(vm) => guest_doctor::examine(&file.identify()?, vm)?,
        None => doctor::examine(&std::env::current_dir()?, || {
            crate::say!("finding out whether KVM works here (once per boot of the host)");
        }),
    };
    if json {
        say(&serde_json::to_string_pretty(&findings)?)?;
    } else {
        say(doctor::table(&findings, std::io::stdout().is_terminal()).trim_end())?;
    }
    let bad = findings.iter().any(|f| f.grade == doctor::Grade::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Stops VMs, without a name everything.
pub(crate) fn down(project: &Project, vms: Vec<String>, json: bool) -> anyhow::Result<ExitCode> {
    let dir = StateDir::of(project)?;
    let all = vms.is_empty();
    let Some(mut peer) = peer::ask(project, &Request::Down { vms: vms.clone() })? else {
        // Logs of a supervisor that died; one that is about to end keeps its lock until then.
        if dir.path().exists() {
            let _lock = dir.lock_within(ENDING)?;
            dir.remove();
        }
        for address in growth::give_back_orphans()? {
            crate::say!("{address} given back: its VM died");
        }
        if json {
            say(&serde_json::to_string(&Event::Done)?)?;
        } else {
            crate::say!("the project '{}' is not up", project.name);
        }
        return Ok(ExitCode::SUCCESS);
    };
    let outcome = client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave)?;
    if outcome == Outcome::Done {
        stopped::add(project, &vms)?;
        if all {
            // The supervisor ends right after its last word; whoever called `down` may count on it.
            peer.wait_ended(ENDING)?;
        }
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
        let project = file.identify()?;
        let found = peer::ask(&project, &Request::Ps)?.map(client::status).transpose()?;
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
fn all_running() -> anyhow::Result<(Vec<Status>, Vec<anyhow::Error>)> {
    let (mut projects, mut silent) = (Vec::new(), Vec::new());
    let supervisors = state::supervisors()?;
    // Those that don't answer are waited for at the same time.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            supervisors.iter().map(|found| scope.spawn(|| client::status_of(found))).collect();
        asked.into_iter().map(|answer| answer.join()).collect()
    });
    for answer in answers {
        match answer.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread that asks a supervisor failed"))) {
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
        return Ok(vec![client::status(client::living(&project, &Request::Ps)?)?]);
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
        StartCommand::Blame { file, vm } => blame(&file.identify()?, &vm, json),
        StartCommand::Metrics { file } => {
            let status = client::status(client::living(&file.identify()?, &Request::Ps)?)?;
            let growing = status.vms.iter().filter_map(|vm| Some((vm.name.as_str(), vm.growth.as_ref()?)));
            if json {
                say(&serde_json::to_string_pretty(&growing.collect::<BTreeMap<_, _>>())?)?;
            } else {
                say(tombolo_start::progress::prometheus(&growing.collect::<Vec<_>>()).trim_end())?;
            }
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
        say(&serde_json::to_string_pretty(&vm.timeline)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    say(tombolo_start::timeline::render_names(&vm.timeline, 40).trim_end())?;
    if let Some(growth) = &vm.growth {
        say(&growth.line())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(status: &Status) -> String {
    let supervisor = status.supervisor.map_or("-".into(), |p| p.to_string());
    let mut text = format!("{}  {}  supervisor {supervisor}\n", status.project, status.file.display());
    if crate::log::is_verbose() {
        text.push_str(&status.accel);
        text.push('\n');
    }
    let mut rows =
        vec![["VM", "STATE", "ACCEL", "PID", "CPUS", "MEMORY", "UPTIME", "ZONES"].map(str::to_owned)];
    for vm in &status.vms {
        rows.push([
            vm.name.clone(),
            vm_state(vm),
            vm.accel.name().to_lowercase(),
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

/// What the accelerator servers of all projects of this user say, as `tombolo accel ls` shows it.
///
/// # Errors
/// When a supervisor that lives does not answer.
pub fn accelerator_servers() -> anyhow::Result<Vec<tombolo_control::accel::Listing>> {
    let accelerators = running(None)?.into_iter().flat_map(|project| project.accelerators);
    Ok(accelerators.filter_map(|accelerator| accelerator.server).collect())
}

fn networks(status: &Status) -> String {
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let mut rows = vec![["NET", "SWITCH", "UPLINK", "SUBNET", "VM", "MAC", "ADDRESS"].map(str::to_owned)];
    for net in &status.networks {
        let switch = net.pid.map_or("starting".into(), |p| match &net.trouble {
            None => p.to_string(),
            Some(trouble) => format!("{p} ({trouble})"),
        });
        let head = [net.name.clone(), switch, dash(&net.uplink), dash(&net.subnet)];
        for (n, port) in net.ports.iter().enumerate() {
            let [name, switch, uplink, subnet] = if n == 0 { head.clone() } else { Default::default() };
            let both: Vec<_> = port.address.iter().chain(&port.address6).cloned().collect();
            let addresses = Some(both.join(",")).filter(|a| !a.is_empty());
            rows.push([name, switch, uplink, subnet, port.vm.clone(), port.mac.clone(), dash(&addresses)]);
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
