// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as a program of its own; the same commands are under `tombolo net`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use tombolo_net::control::cli::{self, Command};

#[global_allocator]
static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;

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
    let args = Args::parse();
    cli::run(args.command, args.json).unwrap_or_else(|err| {
        // Standard error may have no reader.
        let _unheard = writeln!(std::io::stderr(), "tombolo: {err:#}");
        ExitCode::FAILURE
    })
}
