// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench accel` as a program of its own.

use std::process::ExitCode;

use clap::Parser;

/// OpenCL programs on the device itself and forwarded, in turns
#[derive(Parser)]
#[command(name = "tombolo-bench-accel", version)]
struct Arguments {
    /// JSON lines instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: tombolo_bench_accel::Options,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match tombolo_bench_accel::run(&arguments.options, arguments.json) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tombolo-bench-accel: {error:#}");
            ExitCode::FAILURE
        }
    }
}
