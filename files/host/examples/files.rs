// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands of this part alone, for tests: what `tombolo files …` does, without building the other parts.

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand)]
enum Part {
    /// The file system that members share
    Files {
        #[command(subcommand)]
        command: tombolo_files::cli::Command,
    },
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    let cli = Cli::parse();
    let Part::Files { command } = cli.part;
    tombolo_files::cli::run(command, cli.json)
}
