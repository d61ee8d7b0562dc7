// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo-accel`: the commands of `tombolo accel` as a program of their own.

use clap::Parser;

#[global_allocator]
static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;

#[derive(Parser)]
#[command(name = "tombolo-accel", version, about = "Accelerators through memory")]
struct Args {
    /// Answer in JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: tombolo_accel_server::cli::Command,
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    let args = Args::parse();
    tombolo_accel_server::cli::run(args.command, args.json)
}
