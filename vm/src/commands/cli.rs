// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments of the commands for VMs, and the module that runs each.
//!
//! Exit codes: 0 done; 1 it failed; 2 wrong usage; 125 `exec` could not run the command (else the command's own code);
//! 130 interrupted, and taken back.

use std::io::{IsTerminal, Write};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};

use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::commands::{clean, config, copy, doctor, events, guest_doctor, logs, ps, terminal, up, upgrade};
use crate::compose::{self, Project};
use crate::machine::orphans::OfHost;
use crate::project::control::{Event, Request};
use crate::project::peer::{self, Peer};
use crate::project::revival;
use crate::project::state::{self, StateDir};
use crate::project::stopped;
use crate::project::supervisor;
use crate::shim;

/// Time for a supervisor to end after its last word.
const ENDING: Duration = Duration::from_secs(5);
/// Exit code of `exec` if the reader of its output has gone: that of a shell for SIGPIPE.
const BROKEN_PIPE: u8 = 141;

/// Returns whether the reader of a pipe has gone.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The compose file
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
    pub fn load(&self) -> anyhow::Result<Project> {
        Ok(Project::load_with(&compose::find(self.file.as_deref())?, &self.env_file)?)
    }

    /// The project, for commands that need no more of it than its supervisor. While that lives, the file may be broken or gone.
    ///
    /// # Errors
    /// As [`File::load`], where no supervisor lives.
    pub fn identify(&self) -> anyhow::Result<Project> {
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

/// Checks a variable of a command line, as clap's parsers do.
///
/// # Errors
/// It is not NAME=VALUE.
pub fn parse_variable(text: &str) -> Result<String, String> {
    let name = text.split_once('=').map_or("", |(name, _)| name);
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(plain) {
        return Err(format!(
            "'{text}' sets no variable; write NAME=VALUE, with letters, digits and '_' in the name"
        ));
    }
    Ok(text.to_owned())
}

/// Commands for VMs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Say what this host can do, or what a running VM's guest has, each line with its remedy
    Doctor {
        /// The compose file
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
        /// The compose file
        #[command(flatten)]
        file: File,
        /// Only these VMs
        vms: Vec<String>,
    },
    /// Show what runs
    Ps {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// All projects of this user
        #[arg(short, long)]
        all: bool,
        /// How long a supervisor is waited for that has a CPU, or wants none [default: less than 1]
        #[arg(long, value_name = "SECONDS")]
        wait: Option<u64>,
    },
    /// Run a command in a VM; its exit code is this command's
    Exec {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// Pass this command's input on; for more than some hundred megabytes a zone is faster
        #[arg(short, long)]
        interactive: bool,
        /// Run it on a terminal, with this command's input
        #[arg(short, long)]
        tty: bool,
        /// Set a variable
        #[arg(short, long, value_name = "NAME=VALUE", value_parser = parse_variable)]
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
        /// The compose file
        #[command(flatten)]
        file: File,
        /// Copy a folder with all that is in it
        #[arg(short, long)]
        recursive: bool,
        /// The source
        from: String,
        /// Its new name, or the folder that it goes to
        to: String,
    },
    /// Use a VM's serial console; Ctrl-] leaves it
    Console {
        /// The compose file
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
        /// Only say whether this program could go on with what lives there
        #[arg(long)]
        check: bool,
        /// Start a supervisor for what lives there without one
        #[arg(long, conflicts_with = "check")]
        revive: bool,
        /// The inherited connection
        #[arg(long, required_unless_present_any = ["check", "revive"])]
        control: Option<RawFd>,
        /// The compose file
        #[arg(long, required_unless_present_any = ["check", "revive"])]
        file: Option<PathBuf>,
        /// The project's name
        #[arg(long, required_unless_present_any = ["check", "revive"])]
        name: Option<String>,
    },
    /// Stand beside a VM, a switch, a server or a zone (started by the supervisor)
    #[command(hide = true)]
    Shim {
        /// Its name, such as vm-a: the kind and the name of what it stands beside
        #[arg(long)]
        name: String,
        /// The project's folder
        #[arg(long)]
        dir: PathBuf,
        /// The inherited socket
        #[arg(long)]
        listener: RawFd,
        /// The inherited connection of its first manager
        #[arg(long)]
        manager: RawFd,
    },
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
        Command::Ps { file, all, wait } => ps::ps(&file, all, wait, json),
        Command::Exec { file, interactive, tty, env, dir, vm, command } => {
            let terminal = tty.then(terminal::here);
            let request = Request::Exec { vm, argv: command, env, dir, input: interactive, terminal };
            let run = if tty { terminal::exec } else { client::exec };
            match file.identify().and_then(|project| run(&project, &request)) {
                Ok(code) => Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(255))),
                // The reader of the output has gone, which is no failure.
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
        Command::Supervise { dir, check: true, .. } => {
            supervisor::check(&StateDir::at(dir))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Supervise { dir, revive: true, .. } => {
            revival::revive(&dir)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Supervise { dir, control, file, name, .. } => {
            let all = control.zip(file).zip(name).context("arguments are missing")?;
            let ((control, file), name) = all;
            // The first request brings the content of the file, where no supervisor before has noted it.
            let given = Project { name, file, compose: compose::Compose::default() };
            supervisor::run(revival::noted(&dir).unwrap_or(given), &dir, control)?;
            Ok(ExitCode::SUCCESS)
        }
        // The name is for those who look at the list of processes.
        Command::Shim { listener, manager, dir, name: _ } => {
            shim::process::run(listener, manager, Some(dir))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// One line or more on the standard output; who reads it may be gone, which is an error like any other.
pub(crate) fn say(text: &str) -> std::io::Result<()> {
    let written = writeln!(std::io::stdout().lock(), "{}", crate::log::plain(text));
    written.map_err(|e| std::io::Error::new(e.kind(), format!("the output can't be written: {e}")))
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
            crate::say!("finding out whether KVM works here");
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

/// Stops VMs, without a name everything, and gives the host back what VMs that have died still had of it.
///
/// # Errors
/// Names what does not stop, and what the host has not again, each with its remedy.
pub(crate) fn down(project: &Project, vms: Vec<String>, json: bool) -> anyhow::Result<ExitCode> {
    // Whatever has become of the folder for logs, what runs can be stopped.
    let Some(peer) = peer::ask(project, &Request::Down { vms: vms.clone() })? else {
        return down_dead(project, json);
    };
    let outcome = down_living(project, &vms, peer, json)?;
    if matches!(outcome, Outcome::Done) {
        give_back(None, json)?;
    }
    finish(outcome)
}

/// Has the supervisor stop VMs.
fn down_living(project: &Project, vms: &[String], mut peer: Peer, json: bool) -> anyhow::Result<Outcome> {
    // Before the answer: who interrupts the wait does not interrupt the stop.
    let noted = stopped::add(project, vms);
    let outcome = client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave);
    let noted = noted.context("the stop is not noted for the next boot")?;
    if outcome.is_err() && !noted.is_empty() {
        stopped::remove(project, &noted)?;
    }
    if vms.is_empty() && matches!(outcome, Ok(Outcome::Done)) {
        // The supervisor ends right after its last word; the caller of `down` may count on it.
        peer.wait_ended(ENDING)?;
    }
    outcome
}

/// Removes what a supervisor that has died has left.
fn down_dead(project: &Project, json: bool) -> anyhow::Result<ExitCode> {
    let dir = StateDir::of(&project.file)?;
    // Logs of a supervisor that died; one that is about to end keeps its lock until then.
    if dir.path().exists() {
        let lock = dir.lock_within(ENDING)?;
        dir.remove(&lock);
    }
    let name = dir.path().file_name().and_then(|name| name.to_str());
    let given = give_back(name, json);
    if !json {
        crate::say!("the project '{}' is not up", project.name);
    }
    given?;
    if json {
        say(&serde_json::to_string(&Event::Done)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Gives the host back what dead VMs had of it, and says so. `project` is the folder's name of a project that has no supervisor.
///
/// # Errors
/// Names what the host has not again, each with its remedy.
fn give_back(project: Option<&str>, json: bool) -> anyhow::Result<()> {
    let of_host = OfHost::give_back(project);
    for text in of_host.given() {
        if json {
            say(&serde_json::to_string(&Event::Note { text })?)?;
        } else {
            crate::say!("{text}");
        }
    }
    let failures: Vec<&str> = of_host.failures().map(String::as_str).collect();
    anyhow::ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}
