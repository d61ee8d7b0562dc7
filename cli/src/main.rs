// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The `tombolo` command: it parses and wires; behaviour lives in the parts.

mod completion;
mod external;
mod init;
mod top;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use external::External;

#[global_allocator]
static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;

/// Files, packets, accelerator calls and function calls between co-resident VMs, through memory that they share
#[derive(Parser)]
#[command(name = "tombolo", version, max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 125 'exec' could not run the command (else the \
                        command's own code), 130 interrupted and taken back."
)]
struct Cli {
    /// Write JSON where a script would read it
    #[arg(long, global = true)]
    json: bool,
    /// Say more: which QEMU, kernel and accelerator, where logs are
    #[arg(short, long, global = true)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Vm(tombolo_vm::commands::cli::Command),
    /// Write a compose file to begin with
    Init(init::Options),
    /// Zones: memory that VMs and host share
    Zone {
        #[command(subcommand)]
        command: ZoneCommand,
    },
    /// File systems in zones
    Files {
        #[command(subcommand)]
        command: tombolo_files::cli::Command,
    },
    /// Zones, networks, accelerators and growing memory for domains of libvirt
    Libvirt {
        #[command(subcommand)]
        command: tombolo_libvirt::cli::Command,
    },
    /// PCI devices for VMs
    Passthrough {
        #[command(subcommand)]
        command: tombolo_passthrough::cli::Command,
    },
    /// Starts of VMs, and memory that arrives while they run
    Start {
        #[command(subcommand)]
        command: tombolo_vm::commands::start::StartCommand,
    },
    /// The host's packages, caches and nodes, and VMs that lie on them
    Topology {
        #[command(subcommand)]
        command: tombolo_vm::commands::topology::TopologyCommand,
    },
    /// Measure what interrupts programs on this host or in a VM, and name the causes
    Noise(tombolo_vm::commands::noise::NoiseOptions),
    /// Grow a running VM's virtio-mem to its full size
    Grow(tombolo_start::cli::GrowOptions),
    /// The switch: packets between VMs through memory
    Net {
        #[command(subcommand)]
        command: NetCommand,
    },
    /// Show again and again what VMs, zones and the ports of switches do
    Top(top::Options),
    /// Accelerators for programs in VMs
    Accel {
        #[command(subcommand)]
        command: tombolo_accel_server::cli::Command,
    },
    /// MPI programs across VMs, with unmodified libraries, through memory
    Mpi {
        #[command(subcommand)]
        command: tombolo_mpi::cli::Command,
    },
    /// An emulated KVM host, to run and test in
    Lab(external::Arguments),
    /// Measure side by side with what else there is
    Bench(external::Arguments),
    /// Write a shell's completion to the standard output
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages into a folder
    Man {
        /// The folder
        dir: PathBuf,
    },
}

/// Zones in files, and zones of running VMs.
#[derive(Subcommand)]
enum ZoneCommand {
    #[command(flatten)]
    Zone(tombolo_zone::cli::Command),
    #[command(flatten)]
    Vm(tombolo_vm::commands::zone::ZoneCommand),
}

/// Switches, and networks of running projects.
#[derive(Subcommand)]
enum NetCommand {
    #[command(flatten)]
    Net(Box<tombolo_net::control::cli::Command>),
    #[command(flatten)]
    Vm(tombolo_vm::commands::net::NetCommand),
}

fn main() -> ExitCode {
    tombolo_vm::child::stay_tied();
    completion::answer();
    tombolo_program::end_where_no_output_is_possible();
    tombolo_program::begin_as_usual();
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(error) = external::help(&words) {
        complain(&error);
        return ExitCode::FAILURE;
    }
    let cli = Cli::parse();
    if cli.verbose {
        tombolo_vm::log::set_verbose();
    }
    tombolo_program::end(run(cli), complain)
}

/// Prints an error. Words of a part that ran as another process begin with the program's name already.
fn complain(error: &anyhow::Error) {
    tombolo_vm::say!("{}", format!("{error:#}").trim_start_matches("tombolo: "));
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Vm(command) => tombolo_vm::commands::cli::run(command, cli.json),
        Command::Init(options) => init::run(&options),
        Command::Zone { command } => zone(command, cli.json),
        Command::Files { command } => files(command, cli.json),
        Command::Libvirt { command } => tombolo_libvirt::cli::run(command),
        Command::Passthrough { command } => tombolo_passthrough::cli::run(command, cli.json),
        Command::Mpi { command } => tombolo_mpi::cli::run(&command, cli.json),
        Command::Lab(arguments) => Err(External::Lab.execute(&arguments, cli.json)),
        Command::Start { command } => tombolo_vm::commands::start::run(command, cli.json),
        Command::Topology { command } => tombolo_vm::commands::topology::run(command, cli.json),
        Command::Noise(options) => tombolo_vm::commands::noise::run(&options, cli.json),
        Command::Grow(options) => tombolo_start::cli::run_grow(&options, cli.json),
        Command::Net { command } => net(command, cli.json),
        Command::Top(options) => top::run(&options, cli.json),
        Command::Accel { command: tombolo_accel_server::cli::Command::Ls { control: None } } => {
            list_accelerators(cli.json)
        }
        Command::Accel { command } => tombolo_accel_server::cli::run(command, cli.json),
        Command::Bench(arguments) => Err(External::Bench.execute(&arguments, cli.json)),
        Command::Completion { shell } => {
            completion::script(shell, &mut std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            manual(&dir)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn zone(command: ZoneCommand, json: bool) -> anyhow::Result<ExitCode> {
    let mut command = match command {
        ZoneCommand::Zone(command) => command,
        ZoneCommand::Vm(command) => return tombolo_vm::commands::zone::run(command, json),
    };
    if let tombolo_zone::cli::Command::Inspect { path } = &mut command {
        // As with 'files': a name that is no file here is a zone of the running project.
        if !path.as_os_str().as_encoded_bytes().contains(&b'/') && !path.exists() {
            put_path(path)?;
        }
    }
    tombolo_zone::cli::run(command, json)
}

fn files(mut command: tombolo_files::cli::Command, json: bool) -> anyhow::Result<ExitCode> {
    if let Some(Err(e)) = command.zone_by_name().map(put_path) {
        complain(&e);
        return Ok(command.failure());
    }
    tombolo_files::cli::run(command, json)
}

fn net(command: NetCommand, json: bool) -> anyhow::Result<ExitCode> {
    let mut command = match command {
        NetCommand::Net(command) => command,
        NetCommand::Vm(command) => return tombolo_vm::commands::net::run(command, json),
    };
    if let Some(control) = command.control_mut() {
        let name = control.as_deref().and_then(Path::to_str);
        if name.is_none_or(|name| !name.contains('/')) {
            *control = tombolo_vm::commands::net::find_switch(name)?.or_else(|| control.take());
        }
    }
    tombolo_net::control::cli::run(*command, json)
}

/// The server at the default address, where there is one, and those of running projects.
fn list_accelerators(json: bool) -> anyhow::Result<ExitCode> {
    use tombolo_accel_server::{cli, control};
    let mut servers = tombolo_vm::commands::ps::accelerator_servers()?;
    match control::servers(Path::new(control::DEFAULT)) {
        Ok(others) => servers.splice(0..0, others).for_each(drop),
        Err(e) if servers.is_empty() => return Err(e),
        Err(_) => {}
    }
    cli::list(&servers, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Puts the path of a zone's memory in place of the name that the running project has for it.
fn put_path(zone: &mut PathBuf) -> anyhow::Result<()> {
    let name = zone.to_string_lossy();
    let found = tombolo_vm::commands::zone::find_zone(&tombolo_vm::commands::cli::File::default(), &name)
        .with_context(|| format!("'{name}' is no file here, and no zone of a running project"))?;
    *zone = found.path.into();
    Ok(())
}

/// Writes the manual pages of this program, and lets the installed programs of its other commands write theirs.
fn manual(dir: &Path) -> anyhow::Result<()> {
    tombolo_program::write_manual(Cli::command(), dir)?;
    let page = dir.join("tombolo.toml.5");
    std::fs::write(&page, tombolo_vm::compose::manual::page())
        .with_context(|| format!("{} can't be written", page.display()))?;
    for external in External::ALL {
        let Ok(mut program) = external.start() else { continue };
        let status = program.arg("man").arg(dir).status().with_context(|| format!("{program:?}"))?;
        anyhow::ensure!(status.success(), "{program:?} failed: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let dir = tempfile::tempdir().unwrap();
        manual(dir.path()).unwrap();
        for page in [
            "tombolo.1",
            "tombolo-up.1",
            "tombolo-exec.1",
            "tombolo-top.1",
            "tombolo-zone-attach.1",
            "tombolo.toml.5",
        ] {
            assert!(dir.path().join(page).is_file(), "{page}");
        }
    }
}
