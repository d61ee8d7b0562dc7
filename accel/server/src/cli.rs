// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo accel`.

use crate::limits::Limits;
use crate::supervisor::{self, Config};
use crate::vm;
use std::process::ExitCode;

/// Accelerators through memory.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Serve this machine's OpenCL devices to clients
    Serve {
        /// Where to listen: unix:/path or tcp:host:port; may be repeated
        #[arg(long, default_values_t = ["unix:/run/tombolo/accel.sock".to_string()])]
        listen: Vec<String>,
        /// A VM to serve through memory: a folder on tmpfs that gets its zone and its doorbell's socket; may be repeated
        #[arg(long, value_name = "FOLDER")]
        vm: Vec<std::path::PathBuf>,
        /// Processes of a VM at once
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
        vm_channels: u32,
        /// Window of each process of a VM, in MiB; used only as far as it is needed
        #[arg(long, default_value_t = 256)]
        vm_window: u64,
        /// Clients at once
        #[arg(long, default_value_t = 64)]
        clients: usize,
        /// Device memory of a client, in MiB
        #[arg(long, default_value_t = 4096)]
        memory: u64,
        /// Objects of a client
        #[arg(long, default_value_t = 65536)]
        objects: u32,
        /// Requests of a client per second; 0: no limit
        #[arg(long, default_value_t = 0)]
        rate: u32,
        /// Memory shared with a client for bulk data, in MiB; used only as far as it is needed
        #[arg(long, default_value_t = 1024)]
        window: u64,
    },
    /// Serve one client (started by 'serve')
    #[command(hide = true)]
    Worker {
        /// Limits, as JSON
        #[arg(long)]
        limits: String,
        /// The place of its channel in a VM's zone, as JSON
        #[arg(long)]
        place: Option<String>,
    },
}

/// Runs a command.
pub fn run(command: Command, _json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve { listen, vm, vm_channels, vm_window, clients, memory, objects, rate, window } => {
            let limits = Limits { memory: memory << 20, objects, rate, window: window << 20 };
            let of = |folder| vm::Config { folder, channels: vm_channels, window: vm_window << 20 };
            let vms = vm.into_iter().map(of).collect();
            supervisor::serve(Config { listen, vms, limits, clients })?;
        }
        Command::Worker { limits, place } => {
            let place = place.map(|p| serde_json::from_str(&p)).transpose()?;
            crate::worker::run(&serde_json::from_str(&limits)?, place)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
