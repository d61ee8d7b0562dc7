// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo zone` for the zones of running projects.

use std::process::ExitCode;

use clap::Subcommand;

use crate::commands::cli::{File, finish, say};
use crate::commands::client::{self, OnInterrupt, Progress};
use crate::compose::{self, Rights};
use crate::project::control::{Request, ZoneStatus};

/// Commands for zones of running VMs.
#[derive(Subcommand, Debug)]
pub enum ZoneCommand {
    /// Make a running VM a member of a zone
    Attach {
        /// The compose file
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
        /// The compose file
        #[command(flatten)]
        file: File,
        /// The zone
        zone: String,
    },
    /// Unmount a zone in a running VM and end its membership
    Detach {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// The zone
        zone: String,
        /// The VM
        vm: String,
    },
}

/// Runs one of [`ZoneCommand`].
///
/// # Errors
/// The project is not up, or the VM or the zone does not exist.
pub fn run(command: ZoneCommand, json: bool) -> anyhow::Result<ExitCode> {
    let (file, request) = match command {
        ZoneCommand::Attach { file, read_only, mount, zone, vm } => {
            let rights = if read_only { Rights::ReadOnly } else { Rights::ReadWrite };
            (file, Request::ZoneAttach { zone, vm, rights, mount })
        }
        ZoneCommand::Path { file, zone } => return print_path(&file, &zone, json),
        ZoneCommand::Detach { file, zone, vm } => (file, Request::ZoneDetach { zone, vm }),
    };
    let mut peer = client::living(&file.identify()?, &request)?;
    finish(client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Leave)?)
}

fn print_path(file: &File, name: &str, json: bool) -> anyhow::Result<ExitCode> {
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
    let mut zones = client::status(&project)?.zones;
    if let Some(at) = zones.iter().position(|z| z.name == name) {
        let mut zone = zones.swap_remove(at);
        // Messages of the program that opens it say its name.
        if let (Some(link), true) = (zone.link.to_str(), zone.link.exists()) {
            zone.path = link.to_owned();
        }
        return Ok(zone);
    }
    let near = compose::nearest(name, zones.iter().map(|z| z.name.as_str()));
    let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
    anyhow::bail!("the project '{}' has no zone '{name}'{hint}", project.name);
}
