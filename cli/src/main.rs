// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The `tombolo` command: it parses and wires; behaviour lives in the parts.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

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
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Vm(tombolo_vm::cli::Command),
    /// Zones: memory that VMs and host share
    Zone {
        #[command(subcommand)]
        command: tombolo_vm::cli::ZoneCommand,
    },
    /// An emulated host with real KVM, VFIO, NUMA and huge pages, on any machine
    Lab {
        #[command(subcommand)]
        command: tombolo_lab::cli::Command,
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

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("tombolo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Vm(command) => tombolo_vm::cli::run(command, cli.json),
        Command::Zone { command } => tombolo_vm::cli::run_zone(command, cli.json),
        Command::Lab { command } => tombolo_lab::cli::run(command, cli.json),
        Command::Completion { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tombolo", &mut text);
            std::io::stdout().write_all(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            manual(&dir)
                .with_context(|| format!("the manual pages can't be written to {}", dir.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn manual(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command(), dir)?;
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
    fn every_command_has_a_manual_page_and_a_completion() {
        let dir = tempfile::tempdir().unwrap();
        manual(dir.path()).unwrap();
        for page in ["tombolo.1", "tombolo-up.1", "tombolo-exec.1", "tombolo-zone-attach.1"] {
            assert!(dir.path().join(page).is_file(), "{page}");
        }
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tombolo", &mut text);
            assert!(String::from_utf8(text).unwrap().contains("doctor"));
        }
    }
}
