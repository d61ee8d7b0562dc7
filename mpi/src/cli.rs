// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of `tombolo mpi`.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tombolo_vm::commands::cli::File;
use tombolo_vm::commands::client;

use crate::{env, node, run};

/// Commands for MPI.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a program as ranks of one MPI job in several VMs; its exit code is this command's
    Run(RunOptions),
    /// Print what a launcher of the VMs' own (Slurm, hydra) needs for its ranks to share memory, and put its wrapper into the zone
    Env {
        /// The compose file
        #[command(flatten)]
        file: File,
        /// The zone through which ranks of different VMs talk [default: the one that the VM is a member of]
        #[arg(long)]
        zone: Option<String>,
        /// The VM
        vm: String,
    },
    /// Remove what jobs have left in zones whose VMs died
    Clean {
        /// The compose file
        #[command(flatten)]
        file: File,
    },
}

/// Options of `tombolo mpi run`.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// The compose file
    #[command(flatten)]
    pub file: File,
    /// Ranks
    #[arg(short = 'n', long = "np", value_name = "RANKS")]
    pub ranks: u32,
    /// The VMs, which get ranks in this order [default: all that run]
    #[arg(long, value_delimiter = ',', value_name = "VM,...")]
    pub vms: Vec<String>,
    /// Ranks of each VM [default: as even as possible]
    #[arg(long, value_name = "RANKS")]
    pub ppn: Option<u32>,
    /// The launcher: openmpi, mpich, or its path in the VMs [default: that of the program's library]
    #[arg(long, value_name = "LAUNCHER")]
    pub launcher: Option<String>,
    /// The zone through which ranks of different VMs talk [default: the one that the VMs have in common]
    #[arg(long)]
    pub zone: Option<String>,
    /// Put the rank before each line of output
    #[arg(short, long)]
    pub label: bool,
    /// Set a variable; NAME alone takes its value from here
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = parse_variable)]
    pub env: Vec<String>,
    /// The ranks' working folder in the VMs [default: where the zone is mounted]
    #[arg(short = 'C', long, value_name = "PATH")]
    pub dir: Option<String>,
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// A variable with its value, from here where the command line has none.
fn parse_variable(text: &str) -> Result<String, String> {
    if text.contains('=') {
        return tombolo_vm::commands::cli::parse_variable(text);
    }
    let value = std::env::var(text).map_err(|e| format!("'{text}' can't be passed on: {e}"))?;
    tombolo_vm::commands::cli::parse_variable(&format!("{text}={value}"))
}

/// Runs one of [`Command`].
///
/// # Errors
/// One message that says what, where and what to do.
pub fn run(command: &Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(options) => run::run(options, json),
        Command::Env { file, zone, vm } => env::print(file, vm, zone.as_deref(), json),
        Command::Clean { file } => clean(file, json),
    }
}

/// Has a VM of each zone remove what no job owns any more, and says what that was.
fn clean(file: &File, json: bool) -> anyhow::Result<ExitCode> {
    let project = file.identify()?;
    let status = client::status(&project)?;
    let mut removed = Vec::new();
    for zone in &status.zones {
        let members = status.vms.iter().filter(|vm| vm.state == "up" && vm.zones.contains(&zone.name));
        for vm in members {
            let said = node::output(&project, &vm.name, &["clean".to_owned(), zone.uuid.clone()])?;
            removed.extend(said.lines().map(|line| format!("{}: {line}", vm.name)));
        }
    }
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(&removed)?)?;
    } else {
        removed.iter().try_for_each(|line| writeln!(out, "removed {line}"))?;
    }
    Ok(ExitCode::SUCCESS)
}
