// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random operations on the shared file system, against a model of it. A seed determines everything but the instants of kills.
//!
//! - `members`: several members take turns; each must see the others' changes.
//! - `kill`: members in processes of their own are killed at any instant; the others recover them and go on.
//! - `threads`: members at once on one file and one directory: appends whole, one winner per name.
//! - `damage`: fsck finds and repairs overwritten words.
//! - `queue`: members that queue for one lock are killed and stopped there; the waiting ones recover them.
//! - `together`: two guests with the kernel module and a FUSE mount of the host, in turns and at once.
//! - `deaths`: the same, dying under load.
//! - `repair`: how long the next member's recovery takes when all are dead.
//! - `serve`: owns a zone and serves its doorbells, for tests in which that ends.
//! - `files …`: the commands `tombolo files …`.
//!
//! Modules: [`model`] is the expected file system, [`compare`] compares it with a real one, which [`tree`] reaches: the core itself,
//! [`mounted`], or a [`remote`] [`worker`] next to a mount. [`turns`], [`fsx`], [`crowd`], [`kill`], [`together`] and [`deaths`] are the runs,
//! [`zone`] memory with a member table, [`site`] a real zone with its owner, [`guest`] a VM.

mod compare;
mod crowd;
mod damage;
mod deaths;
mod fsx;
mod guest;
mod kill;
mod model;
mod mounted;
mod queue;
mod remote;
mod repair;
mod rng;
mod site;
mod together;
mod tree;
mod turns;
mod worker;
mod zone;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tombolo_zone::Zone;
use tombolo_zone::doorbell::DoorbellServer;

#[global_allocator]
static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;

/// Random operations on the shared file system, against a model of it.
#[derive(Parser)]
struct Cli {
    /// Seed of all random choices
    #[arg(long, default_value_t = 1, global = true)]
    seed: u64,
    /// Size of the zone in MiB
    #[arg(long, default_value_t = 96, global = true)]
    mib: u64,
    #[command(subcommand)]
    run: Run,
}

#[derive(Subcommand)]
enum Run {
    /// Members take turns
    Members {
        #[arg(long, default_value_t = 20_000)]
        operations: u64,
        #[arg(long, default_value_t = 3)]
        members: u32,
    },
    /// Members are killed
    Kill {
        #[arg(long, default_value_t = 20)]
        kills: u64,
    },
    /// Words are overwritten and fsck repairs
    Damage {
        #[arg(long, default_value_t = 200)]
        rounds: u64,
    },
    /// Two guests with the kernel module and a FUSE mount: in turns in one tree and in one file, then at once
    Together {
        #[command(flatten)]
        boot: site::Boot,
        #[command(flatten)]
        amount: together::Amount,
    },
    /// Two guests and a FUSE mount that die under load, one after the other
    Deaths {
        #[command(flatten)]
        boot: site::Boot,
        #[arg(long, default_value_t = 20)]
        kills: u64,
    },
    /// A member at a mount, for the other commands: runs the orders that it receives
    Worker { root: PathBuf, channel: PathBuf },
    /// Owns a zone and serves its doorbells until it is killed; prints "serving"
    Serve { zone: PathBuf },
    /// All members die in a full zone
    Repair,
    /// The commands of this part
    Files {
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: tombolo_files::cli::Command,
    },
    /// Members that queue for one lock are killed and stopped
    Queue {
        #[arg(long, default_value_t = 50)]
        kills: u64,
    },
    /// Members at once
    Threads {
        #[arg(long, default_value_t = 2)]
        seconds: u64,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    if let Run::Files { json, command } = cli.run {
        return tombolo_files::cli::run(command, json);
    }
    if let Run::Serve { zone } = cli.run {
        return serve(&zone);
    }
    println!("seed {}", cli.seed);
    let result = match cli.run {
        Run::Members { operations, members } => crowd::turns(cli.seed, cli.mib, operations, members),
        Run::Kill { kills } => kill::run(cli.seed, cli.mib, kills),
        Run::Damage { rounds } => damage::run(cli.seed, rounds),
        Run::Queue { kills } => queue::run(cli.seed, cli.mib, kills),
        Run::Repair => repair::run(cli.mib),
        Run::Files { .. } | Run::Serve { .. } => unreachable!("done above"),
        Run::Together { boot, amount } => together::run(cli.seed, cli.mib, &boot, amount),
        Run::Deaths { boot, kills } => deaths::run(cli.seed, cli.mib, &boot, kills),
        Run::Worker { root, channel } => worker::run(&root, &channel),
        Run::Threads { seconds } => crowd::at_once(cli.seed, cli.mib, seconds),
    };
    match result {
        Ok(summary) => {
            println!("{summary}");
            Ok(ExitCode::SUCCESS)
        }
        Err(why) => {
            eprintln!("seed {}: {why}", cli.seed);
            Ok(ExitCode::FAILURE)
        }
    }
}

fn serve(zone: &Path) -> anyhow::Result<ExitCode> {
    let zone = Arc::new(Zone::take_over_or_open(zone)?);
    let (bells, events) = DoorbellServer::start(Arc::clone(&zone))?;
    println!("serving");
    loop {
        match events.recv_timeout(Duration::from_millis(100)) {
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the doorbell server has ended"),
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
        }
        if !zone.reap()?.is_empty() {
            bells.ring_all()?;
        }
    }
}
