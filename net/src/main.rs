// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as a program of its own; the same commands are under `tombolo net`.

use std::process::ExitCode;

use clap::Parser;
use tombolo_net::cli::{self, Command};

/// Packets between VMs through memory: a vhost-user switch
#[derive(Parser)]
#[command(name = "tombolo-switch", version)]
struct Args {
    /// Answers as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    let args = Args::parse();
    cli::run(args.command, args.json).unwrap_or_else(|err| {
        eprintln!("tombolo: {err:#}");
        ExitCode::FAILURE
    })
}
