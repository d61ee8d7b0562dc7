// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo start`: where the time of starts goes, and how memory arrives.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;

use crate::commands::cli::{File, say};
use crate::commands::client;
use crate::compose::{Project, Size};

/// Commands about starts.
#[derive(Subcommand, Debug)]
pub enum StartCommand {
    /// Show the steps of a VM's start with their times
    Blame {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// The VM
        vm: String,
    },
    /// Write the progress of running VMs' memory in Prometheus' text format
    Metrics {
        /// The compose file
        #[command(flatten)]
        file: File,
    },
    /// Show the parts in which the memory of a VM would arrive
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

/// Runs one of [`StartCommand`].
///
/// # Errors
/// The project is not up, or has no such VM.
pub fn run(command: StartCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        StartCommand::Blame { file, vm } => blame(&file.identify()?, &vm, json),
        StartCommand::Metrics { file } => {
            let status = client::status(&file.identify()?)?;
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
    let status = client::status_if_up(project)?.with_context(not_up)?;
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
