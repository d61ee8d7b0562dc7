// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab on its own, for use where the `tombolo` binary is not built.

use std::process::ExitCode;

use clap::Parser;

/// An emulated KVM host: real KVM, VFIO, NUMA and huge pages on any machine
#[derive(Parser)]
#[command(name = "tombolo-lab", version)]
struct Arguments {
    /// Machine-readable output
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    lab: tombolo_lab::cli::LabArguments,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match tombolo_lab::cli::run(arguments.lab, arguments.json) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tombolo-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
