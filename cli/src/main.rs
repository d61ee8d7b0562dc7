// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The `tombolo` command: it parses and wires; behaviour lives in the parts.

mod completion;
mod init;
mod top;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use tombolo_vm::commands::cli::is_broken_pipe;

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
    /// An emulated KVM host, to run and test in
    Lab(tombolo_lab::cli::LabArguments),
    /// Measure side by side with what else there is
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
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

/// The benches.
#[derive(Subcommand)]
enum BenchCommand {
    #[command(flatten)]
    Bench(tombolo_bench::cli::Command),
    /// OpenCL programs on the device itself and forwarded, in turns
    Accel(tombolo_bench_accel::Options),
    /// The start of VMs with and without passed-through devices
    Start {
        #[command(subcommand)]
        command: tombolo_bench_start::cli::Command,
    },
}

fn main() -> ExitCode {
    completion::answer();
    end_quietly_on_a_closed_pipe();
    let cli = Cli::parse();
    if cli.verbose {
        tombolo_vm::log::set_verbose();
    }
    match run(cli) {
        Ok(code) => code,
        // The reader of the output has gone ('| head'), which is no failure.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            complain(&e);
            ExitCode::FAILURE
        }
    }
}

/// Prints an error. Words of a part that ran as another process begin with the program's name already.
fn complain(error: &anyhow::Error) {
    tombolo_vm::say!("{}", format!("{error:#}").trim_start_matches("tombolo: "));
}

/// `println!` panics if the reader of the standard output has gone. This makes such a panic end the program as a broken pipe does.
fn end_quietly_on_a_closed_pipe() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let words = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if words.starts_with("failed printing to stdout") && words.contains("Broken pipe") {
            std::process::exit(0);
        }
        others(panic);
    }));
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Vm(command) => tombolo_vm::commands::cli::run(command, cli.json),
        Command::Init(options) => init::run(&options),
        Command::Zone { command: ZoneCommand::Zone(mut command) } => {
            if let tombolo_zone::cli::Command::Inspect { path } = &mut command {
                // As with 'files': a name that is no file here is a zone of the running project.
                if !path.as_os_str().as_encoded_bytes().contains(&b'/') && !path.exists() {
                    put_path(path)?;
                }
            }
            tombolo_zone::cli::run(command, cli.json)
        }
        Command::Zone { command: ZoneCommand::Vm(command) } => {
            tombolo_vm::commands::zone::run(command, cli.json)
        }
        Command::Files { mut command } => {
            if let Some(Err(e)) = command.zone_by_name().map(put_path) {
                complain(&e);
                return Ok(command.failure());
            }
            tombolo_files::cli::run(command, cli.json)
        }
        Command::Libvirt { command } => tombolo_libvirt::cli::run(command),
        Command::Passthrough { command } => tombolo_passthrough::cli::run(command, cli.json),
        Command::Lab(arguments) => tombolo_lab::cli::run(arguments, cli.json),
        Command::Start { command } => tombolo_vm::commands::start::run(command, cli.json),
        Command::Topology { command } => tombolo_vm::commands::topology::run(command, cli.json),
        Command::Noise(options) => tombolo_vm::commands::noise::run(&options, cli.json),
        Command::Grow(options) => tombolo_start::cli::run_grow(&options, cli.json),
        Command::Net { command: NetCommand::Vm(command) } => {
            tombolo_vm::commands::net::run(command, cli.json)
        }
        Command::Net { command: NetCommand::Net(mut command) } => {
            if let Some(control) = command.control_mut() {
                let name = control.as_deref().and_then(Path::to_str);
                if name.is_none_or(|name| !name.contains('/')) {
                    *control = tombolo_vm::commands::net::find_switch(name)?.or_else(|| control.take());
                }
            }
            tombolo_net::control::cli::run(*command, cli.json)
        }
        Command::Top(options) => top::run(&options, cli.json),
        Command::Accel { command: tombolo_accel_server::cli::Command::Ls { control: None } } => {
            list_accelerators(cli.json)
        }
        Command::Accel { command } => tombolo_accel_server::cli::run(command, cli.json),
        Command::Bench { command: BenchCommand::Bench(command) } => {
            tombolo_bench::cli::run(command, cli.json)
        }
        Command::Bench { command: BenchCommand::Accel(options) } => {
            tombolo_bench_accel::run(&options, cli.json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { command: BenchCommand::Start { command } } => {
            tombolo_bench_start::cli::run(command, cli.json)
        }
        Command::Completion { shell } => {
            completion::script(shell, &mut std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            manual(&dir)
                .with_context(|| format!("the manual pages can't be written to {}", dir.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
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

fn manual(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command(), dir)?;
    std::fs::write(dir.join("tombolo.toml.5"), tombolo_vm::compose::manual::page())?;
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
