// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench start` on its own; also the agent of the labs it boots, and the program it runs in them.

use std::process::ExitCode;

use clap::Parser;

/// Start times of VMs, measured in the lab
#[derive(Parser)]
#[command(name = "tombolo-bench-start", version)]
struct Arguments {
    /// JSON lines instead of a table
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: tombolo_bench_start::cli::Command,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match tombolo_bench_start::cli::run(arguments.command, arguments.json) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tombolo-bench-start: {error:#}");
            ExitCode::FAILURE
        }
    }
}
