// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo up`, `restart` and their dry run.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use crate::commands::cli::{File, down, finish, say};
use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::compose::{Project, network};
use crate::host;
use crate::project::changes::{self, Action, Side, Wish};
use crate::project::control::{Event, Request};
use crate::project::session::{self, Signals};
use crate::project::state::StateDir;
use crate::project::{peer, preflight, state, stopped};

/// `tombolo up`
#[derive(Args, Debug)]
pub struct UpOptions {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// Stay in the foreground; Ctrl-C takes everything down
    #[arg(short, long)]
    attach: bool,
    /// As at the host's boot: leave alone what 'down VM' has stopped under restart = "unless-stopped"
    #[arg(long)]
    boot: bool,
    /// Wait until all VMs with a health check are healthy
    #[arg(short, long)]
    wait: bool,
    /// Say what would be done, and change nothing
    #[arg(long, conflicts_with = "attach")]
    dry_run: bool,
    /// Stop what runs and the compose file does not declare
    #[arg(long)]
    remove_orphans: bool,
    /// Only these VMs, and those that they depend on
    vms: Vec<String>,
}

/// `tombolo restart`
#[derive(Args, Debug)]
pub struct RestartOptions {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// Say what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Only these VMs
    vms: Vec<String>,
}

/// Starts what is declared and does not run.
///
/// # Errors
/// The supervisor refuses or fails.
pub fn up(options: UpOptions, json: bool) -> anyhow::Result<ExitCode> {
    let project = declaring(&options.file)?;
    let mut wish = Wish { vms: options.vms, remove_orphans: options.remove_orphans, ..Wish::default() };
    if options.boot {
        let stopped = stopped::list(&project)?;
        let wanted = |vm: &&String| (wish.vms.is_empty() || wish.vms.contains(vm)) && !stopped.contains(*vm);
        wish.vms = project.compose.vm.keys().filter(wanted).cloned().collect();
        if wish.vms.is_empty() {
            crate::say!("all VMs were stopped by 'down VM'; start them with 'tombolo up'");
            if options.attach {
                tell_ready()?;
            }
            return Ok(ExitCode::SUCCESS);
        }
    }
    if options.dry_run {
        return dry_run(project, wish, json);
    }
    let vms = wish.vms.clone();
    // From here on, so that none is lost that comes after the start and before the wait.
    let signals = options.attach.then(session::signals).transpose()?;
    let outcome = start(&project, wish, options.wait, json)?;
    if outcome == Outcome::Done {
        if !options.boot {
            note_started(&project, &vms)?;
        }
        if let Some(signals) = signals {
            return stay(&project, signals, json);
        }
    }
    finish(outcome)
}

/// Tells a service manager that all that is to be up is up; one that is not told takes an end for a failure.
fn tell_ready() -> std::io::Result<()> {
    sd_notify::notify(false, &[sd_notify::NotifyState::Ready])
}

/// Stays until Ctrl-C or SIGTERM, which take the project down, or until it is down. A service manager that waits for it is told that all is up.
fn stay(project: &Project, signals: Signals, json: bool) -> anyhow::Result<ExitCode> {
    let dir = StateDir::of(&project.file)?;
    tell_ready()?;
    if !json {
        crate::say!("Ctrl-C takes everything down");
    }
    match client::attach(project, signals) {
        Ok(()) => down(project, Vec::new(), json),
        // A supervisor that was told to end takes its folder along, one that died does not.
        Err(_) if !dir.path().exists() => {
            crate::say!("the project '{}' was taken down", project.name);
            Ok(ExitCode::SUCCESS)
        }
        Err(e) => Err(e),
    }
}

/// Stops VMs and starts them as the compose file says now.
///
/// # Errors
/// The supervisor refuses or fails.
pub fn restart(options: RestartOptions, json: bool) -> anyhow::Result<ExitCode> {
    let project = declaring(&options.file)?;
    let wish = Wish { vms: options.vms, restart: true, ..Wish::default() };
    if options.dry_run {
        return dry_run(project, wish, json);
    }
    let vms = wish.vms.clone();
    let outcome = start(&project, wish, false, json)?;
    if outcome == Outcome::Done {
        note_started(&project, &vms)?;
    }
    finish(outcome)
}

fn note_started(project: &Project, vms: &[String]) -> anyhow::Result<()> {
    stopped::remove(project, vms).context("the VMs are up, and that is not noted for the next boot")
}

fn declaring(file: &File) -> anyhow::Result<Project> {
    let project = file.load()?;
    // A file that declares nothing any more has orphans to tell of.
    if project.compose.vm.is_empty() && state::supervisor(&project.file)?.is_none() {
        anyhow::bail!("{} declares no VM; add a table [vm.NAME]", project.file.display());
    }
    Ok(project)
}

fn start(project: &Project, wish: Wish, wait: bool, json: bool) -> anyhow::Result<Outcome> {
    let request = Request::Up { project: Box::new(project.clone()), wish, wait };
    let mut peer = client::supervisor(project, &request)?;
    client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Cancel)
}

/// The output of a dry run with `--json`.
#[derive(Serialize)]
struct DryRun<'a> {
    project: &'a str,
    actions: &'a [Action],
    refused: Option<&'a str>,
}

fn dry_run(mut project: Project, wish: Wish, json: bool) -> anyhow::Result<ExitCode> {
    wish.check(&project)?;
    let request = Request::Plan { project: Box::new(project.clone()), wish: wish.clone() };
    let (actions, refused) = match peer::ask(&project, &request)? {
        Some(mut peer) => match peer.receive::<Event>()? {
            Some(Event::Plan { actions, refused }) => (actions, refused),
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            other => anyhow::bail!("the supervisor answered {other:?}"),
        },
        None => {
            network::settle(&mut project.compose, &std::collections::BTreeMap::new());
            let wanted = Side::declared(&project.name, &project.compose);
            let actions = changes::plan(&Side::default(), &wanted, &wish.with_dependencies(&project.compose));
            let examined = preflight::examine(&project, &Side::default(), &actions, promised, |_| false);
            (actions, examined.err().map(|e| format!("{e:#}")))
        }
    };
    if json {
        let printed = DryRun { project: &project.name, actions: &actions, refused: refused.as_deref() };
        say(&serde_json::to_string_pretty(&printed)?)?;
    } else {
        for action in &actions {
            say(&action.to_string())?;
        }
    }
    match refused {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => Err(anyhow::anyhow!("'up' would be refused: {why}")),
    }
}

/// Memory that running projects of this user may still take, in bytes.
fn promised() -> u64 {
    let found = state::supervisors().unwrap_or_default();
    // One that does not answer can't be counted.
    let projects = found.iter().filter_map(|found| client::status_of(found).ok().flatten());
    projects.map(|project| host::promised(&project)).sum()
}
