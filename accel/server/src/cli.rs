// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo accel`.

use crate::control::{self, Listing, Request};
use crate::limits::Limits;
use crate::supervisor::{self, Config};
use crate::wall::Wall;
use crate::worker::Behind;
use crate::{trace, vm};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The address of a server unless it is told another.
const LISTEN: &str = "unix:/run/tombolo/accel.sock";

/// Accelerators through memory.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Serve this machine's OpenCL and CUDA devices to clients
    Serve(Serve),
    /// List servers and who they serve, those of running projects among them
    Ls {
        /// Only the server with this control socket
        #[arg(long)]
        control: Option<PathBuf>,
    },
    /// List the devices that a server on this machine has to offer
    Devices {
        /// Only those of one API
        #[arg(long, value_parser = ["opencl", "cuda"])]
        api: Option<String>,
    },
    /// Let a server accept no more clients and end when its last one has gone; its address is free at once
    Drain {
        /// Control socket of the server
        #[arg(long, default_value = control::DEFAULT)]
        control: PathBuf,
    },
    /// Run a program and tell calls, waits, bytes and time per function
    Trace {
        /// The server's address [default: that of TOMBOLO_ACCEL]
        #[arg(long)]
        server: Option<String>,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        program: Vec<String>,
    },
    /// Let the server in the VM that owns the accelerator serve one more VM (started by 'tombolo up')
    #[command(hide = true)]
    Join {
        /// Control socket of the server
        #[arg(long)]
        control: PathBuf,
        /// The VM's file in the folder of '--guests'
        guest: PathBuf,
    },
    /// Serve one client (started by 'serve')
    #[command(hide = true)]
    Worker {
        /// Limits, as JSON
        #[arg(long, default_value = "")]
        limits: String,
        /// The place of its channel in a VM's zone, as JSON
        #[arg(long)]
        place: Option<String>,
        /// How it is confined, as JSON
        #[arg(long)]
        wall: Option<String>,
        /// The folder for its driver's files, if it is not confined
        #[arg(long)]
        scratch: Option<PathBuf>,
        /// The descriptor by which its supervisor judges what it executes
        #[arg(long)]
        executions: Option<i32>,
        /// Serve no client: only try whether this process can be confined
        #[arg(long)]
        trial: bool,
    },
}

/// `tombolo accel serve`
#[derive(clap::Args)]
pub struct Serve {
    /// Where to listen: unix:/path or tcp:host:port, with limits of its own behind it (,memory=MIB ,objects=N ,rate=N ,weight=1…100);
    /// may be repeated
    /// [default: unix:/run/tombolo/accel.sock]
    #[arg(long)]
    listen: Vec<String>,
    /// A VM to serve through memory: a folder on tmpfs that gets its zone and its doorbell's socket, with limits as --listen has;
    /// may be repeated
    #[arg(long, value_name = "FOLDER")]
    vm: Vec<String>,
    /// Processes of a VM at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    vm_channels: u32,
    /// Window of each process of a VM, in MiB; used only as far as it is needed
    #[arg(long, default_value_t = 256)]
    vm_window: u64,
    /// Clients at once, not counting processes of VMs
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Clients of one peer at once: of a user of this machine, or of an address over TCP (of IPv6, of a network of 64 bits)
    /// [default: half of --clients]
    #[arg(long)]
    clients_per_peer: Option<usize>,
    /// Device memory of a client, in MiB
    #[arg(long, default_value_t = 4096)]
    memory: u64,
    /// Objects of a client
    #[arg(long, default_value_t = 65536)]
    objects: u32,
    /// Requests of a client per second; 0: no limit
    #[arg(long, default_value_t = 0)]
    rate: u32,
    /// Share of processor time of a client beside others, 1 to 100
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    weight: u32,
    /// Memory shared with a client for bulk data, in MiB; used only as far as it is needed
    #[arg(long, default_value_t = 1024)]
    window: u64,
    /// Control socket [default: /run/tombolo/accel-control.sock if the server listens at its default address, otherwise none]
    #[arg(long)]
    control: Option<PathBuf>,
    /// Address for Prometheus, such as 127.0.0.1:9128, or a Unix socket's absolute path
    #[arg(long)]
    metrics: Option<tombolo_metrics::Place>,
    /// Let clients' kernels do all that this server's user may: for hosts that can't confine workers, and clients that are trusted
    #[arg(long)]
    unconfined: bool,
    /// A cgroup (version 2) of this server's own, without a process: each client, and each VM, gets a group in it with limits of memory, tasks and
    /// processor time [default: the group that systemd delegated; of root's servers a new one]
    #[arg(long, value_name = "FOLDER")]
    cgroup: Option<PathBuf>,
    /// Listen nowhere by itself: commands come over the standard input, a socket (started by 'tombolo up')
    #[arg(long, hide = true)]
    overseen: bool,
    /// In the VM that owns the accelerator: a folder with a file for each VM to serve through a zone's device, which has what 'tombolo up' says of that VM.
    /// The log is then this server's own
    #[arg(long, hide = true, value_name = "FOLDER")]
    guests: Option<PathBuf>,
}

impl Serve {
    fn config(mut self) -> anyhow::Result<Config> {
        if self.listen.is_empty() && !self.overseen && self.guests.is_none() {
            self.listen.push(LISTEN.to_owned());
        }
        let limits = Limits {
            memory: self.memory << 20,
            objects: self.objects,
            rate: self.rate,
            window: self.window << 20,
            weight: self.weight,
        };
        let split = |limits: &Limits, text: &String| limits.split(text).map_err(anyhow::Error::msg);
        let listen = self.listen.iter().map(|l| split(&limits, l)).collect::<anyhow::Result<Vec<_>>>()?;
        let of_vms = Limits { window: self.vm_window << 20, ..limits };
        let vm = |text: &String| {
            let (folder, limits) = split(&of_vms, text)?;
            Ok(vm::Config { folder: folder.into(), channels: self.vm_channels, limits })
        };
        let vms = self.vm.iter().map(vm).collect::<anyhow::Result<Vec<_>>>()?;
        let own_log = self.overseen || self.guests.is_some();
        let guests = self.guests.as_deref().map(guests).transpose()?.unwrap_or_default();
        let at_default = listen.iter().any(|(address, _)| address == LISTEN);
        let control = self.control.or_else(|| at_default.then(|| control::DEFAULT.into()));
        let (clients, metrics, overseen) = (self.clients, self.metrics, self.overseen);
        let of_peer = self.clients_per_peer.unwrap_or(clients.div_ceil(2));
        let (unconfined, cgroup) = (self.unconfined, self.cgroup);
        Ok(Config {
            listen,
            vms,
            guests,
            of_vms,
            overseen,
            own_log,
            unconfined,
            cgroup,
            clients,
            of_peer,
            control,
            metrics,
        })
    }
}

/// The entry of a file for a VM that is served through a zone's device.
fn guest(file: &Path) -> anyhow::Result<vm::Guest> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_json::from_str(&text).with_context(|| file.display().to_string())
}

/// All of a folder, in the order of their names.
fn guests(folder: &Path) -> anyhow::Result<Vec<vm::Guest>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut guests = entries.map(|entry| guest(&entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    guests.sort_by(|a, b| a.vm.cmp(&b.vm));
    Ok(guests)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn print(servers: &[Listing]) {
    for server in servers {
        let state = if server.draining { ", draining" } else { "" };
        let place = server.vm.as_ref().map(|vm| format!(" in the VM {vm}")).unwrap_or_default();
        if let Some(trouble) = &server.trouble {
            println!("server {}{place}{state}: {trouble}", server.pid);
            continue;
        }
        println!("server {}{place} at {}{state}", server.pid, server.listens.join(" "));
        println!(
            "{:>9} {:<24} {:>6} {:>15} {:>13} {:>12} {:>12} {:>9} {:>9}  VIA",
            "PID", "TENANT", "WEIGHT", "MEMORY MiB", "OBJECTS", "CALLS", "WAITS", "BUSY s", "CPU s"
        );
        for t in &server.tenants {
            println!(
                "{:>9} {:<24} {:>6} {:>15} {:>13} {:>12} {:>12} {:>9.1} {:>9.1}  {}",
                t.pid,
                t.name,
                t.weight,
                format!("{}/{}", mib(t.memory), mib(t.memory_limit)),
                format!("{}/{}", t.objects, t.objects_limit),
                t.calls,
                t.waits,
                t.busy_seconds,
                t.cpu_seconds,
                t.peer.as_ref().map_or_else(|| t.via.clone(), |peer| format!("{} ({peer})", t.via))
            );
        }
    }
}

/// Writes the servers and their tenants.
pub fn list(servers: &[Listing], json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(servers)?);
    } else {
        print(servers);
    }
    Ok(())
}

fn devices(api: Option<&str>, json: bool) -> anyhow::Result<()> {
    let devices = crate::worker::devices(api)?;
    if json {
        println!("{}", serde_json::to_string(&devices)?);
    } else {
        devices.iter().for_each(|d| println!("{}: {}", d.platform, d.name));
    }
    Ok(())
}

/// Runs a command; with `json`, answers are JSON.
pub fn run(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(serve) => supervisor::serve(serve.config()?)?,
        Command::Ls { control } => {
            list(&control::servers(control.as_deref().unwrap_or(Path::new(control::DEFAULT)))?, json)?;
        }
        Command::Devices { api } => devices(api.as_deref(), json)?,
        Command::Drain { control } => control::ask::<()>(&control, &Request::Drain)?,
        Command::Join { control, guest: file } => {
            control::ask::<()>(&control, &Request::Vm(guest(&file)?))?;
        }
        Command::Trace { server, program } => return trace::run(&program, server.as_deref(), json),
        Command::Worker { limits, place, wall, scratch, executions, trial } => {
            let wall: Option<Wall> = wall.map(|w| serde_json::from_str(&w)).transpose()?;
            let wall = wall.map(|wall| Behind { wall, executions });
            if trial {
                return Ok(crate::worker::trial(&wall.context("--wall")?));
            }
            let place = place.map(|p| serde_json::from_str(&p)).transpose()?;
            crate::worker::run(&serde_json::from_str(&limits)?, place, wall, scratch)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
