// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random operations on the shared file system, against a model of it. Everything follows from a seed, but for the instants of kills.
//!
//! - `members`: several members take turns; each must see what the others did.
//! - `kill`: members in processes of their own are killed at any instant; the others clean up and go on.
//! - `threads`: members at once on one file and one directory: appends whole, one winner per name.
//! - `damage`: fsck finds and repairs what was overwritten.
//! - `queue`: members that stand in line for one lock are killed and stopped there; those who wait clean up.
//! - `lockers`: how an appender fares among threads that lock ranges of its file; no test, a figure.
//! - `together`: two guests with the kernel module and a FUSE mount of the host, in turns and at once.
//! - `deaths`: those, dying under load.
//! - `repair`: how long the next one needs when all are dead.
//! - `files …`: the commands of this part, as `tombolo files …` has them.
//!
//! Modules: [`model`] is the file system as it should be, [`compare`] it against a real one, which [`tree`] is the way to: the core itself,
//! [`mounted`], or a [`remote`] [`worker`] next to a mount. [`turns`], [`fsx`], [`crowd`], [`kill`], [`together`] and [`deaths`] are the runs,
//! [`zone`] memory with a member table, [`site`] a real zone with its owner, [`guest`] a VM.

mod compare;
mod crowd;
mod damage;
mod deaths;
mod fsx;
mod guest;
mod kill;
mod lockers;
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

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Random operations on the shared file system, against a model of it.
#[derive(Parser)]
struct Cli {
    /// Everything follows from it
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
    /// Two guests and a FUSE mount, of which one after the other dies under load
    Deaths {
        #[command(flatten)]
        boot: site::Boot,
        #[arg(long, default_value_t = 20)]
        kills: u64,
    },
    /// What members by mounts work with: does what it is told over a line
    Worker { root: PathBuf, channel: PathBuf },
    /// Everybody dies in a full zone
    Repair,
    /// The commands of this part
    Files {
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: tombolo_files::cli::Command,
    },
    /// Members in line for one lock are killed and stopped
    Queue {
        #[arg(long, default_value_t = 50)]
        kills: u64,
    },
    /// An appender among lockers of its file
    Lockers {
        #[arg(long, default_value_t = 8)]
        lockers: u64,
        #[arg(long, default_value_t = 5)]
        seconds: u64,
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
    println!("seed {}", cli.seed);
    let result = match cli.run {
        Run::Members { operations, members } => crowd::turns(cli.seed, cli.mib, operations, members),
        Run::Kill { kills } => kill::run(cli.seed, cli.mib, kills),
        Run::Damage { rounds } => damage::run(cli.seed, rounds),
        Run::Queue { kills } => queue::run(cli.seed, cli.mib, kills),
        Run::Lockers { lockers, seconds } => lockers::run(cli.mib, lockers, seconds),
        Run::Repair => repair::run(cli.mib),
        Run::Files { .. } => unreachable!("done above"),
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
