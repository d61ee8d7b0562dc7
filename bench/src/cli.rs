// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, Parser, Subcommand};
use tombolo_bench_project::interrupt;
use tombolo_net_load::soak::Until;

use crate::files::{self, Plan, systems};
use crate::mpi;
use crate::net;
use crate::page;
use crate::record::{Recorded, Results, command_line};
use crate::report;
use crate::share;
use crate::topology;

/// Measure side by side with what else there is
#[derive(Debug, Parser)]
#[command(
    name = "tombolo-bench",
    bin_name = "tombolo bench",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub struct Arguments {
    /// Write JSON where a script would read it
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The shared file system beside 9p, virtiofs and NFS, with and without their caches, ext4 with DAX and tmpfs
    Files(FilesArgs),
    /// One root, one file of weights and one cache of many VMs, beside qcow2, virtiofs, 9p and NFS
    Share(ShareArgs),
    /// The switch beside DPDK's vhost, and with VMs beside TAP and a bridge
    Net(NetArgs),
    /// OpenCL programs on the device itself and forwarded, in turns
    Accel(tombolo_bench_accel::Options),
    /// A program of CUDA's driver API, and a training, on the device itself and forwarded, in turns
    Cuda(tombolo_bench_accel::cuda::Options),
    /// The start of VMs with and without passed-through devices
    Start {
        #[command(subcommand)]
        command: tombolo_bench_start::cli::Command,
    },
    /// HPC Challenge, STREAM and noise on the host, in a VM, and in a VM that lies on the host's topology
    Topology(TopologyArgs),
    /// Two ranks in two VMs through memory, beside TCP, one VM and the host
    Mpi(MpiArgs),
    /// Write one page of all results, or print the table of one results file again
    Report {
        /// A results file, whose table is printed; without it, the page is written
        file: Option<PathBuf>,
        /// Folder of the results, *.jsonl
        #[arg(long, default_value = "bench/results")]
        results: PathBuf,
        /// The page [default: index.html among the results]
        #[arg(long, value_name = "FILE", conflicts_with = "file")]
        html: Option<PathBuf>,
        /// Of the table, only cases whose name contains one of these words; the ratios are those of all cases
        #[arg(long, value_delimiter = ',', value_name = "WORDS", requires = "file")]
        only: Vec<String>,
    },
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Man {
        /// The folder
        dir: PathBuf,
    },
}

/// `tombolo bench files`
#[derive(Debug, Args)]
struct FilesArgs {
    /// A few cells only, under a minute
    #[arg(long)]
    quick: bool,
    /// Rounds over all systems
    #[arg(long)]
    rounds: Option<u32>,
    /// Begin no round that would end after so many minutes; one is always run
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u32>,
    /// Only these systems and tombolo: ext4-dax, tmpfs, 9p, virtiofs, nfs, 9p-loose, virtiofs-auto, virtiofs-always, and for mounts of a host host-kernel, host-fuse
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    systems: Vec<String>,
    /// Seconds of each of fio's cells
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<f64>,
    /// Block sizes of fio's cells
    #[arg(long, value_delimiter = ',', value_name = "SIZES", value_parser = ["4k", "16k", "128k", "2M"])]
    blocks: Vec<String>,
    /// Numbers of fio's jobs
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS", value_parser = clap::value_parser!(u32).range(1..=16))]
    jobs: Vec<u32>,
    /// MiB of each system's files for fio
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..))]
    size: Option<u32>,
    /// Names for the operations on names
    #[arg(long)]
    names: Option<u32>,
    /// Rounds in which a source tree is unpacked
    #[arg(long, value_name = "ROUNDS")]
    trees: Option<u32>,
    /// Only cases whose name contains one of these words: fio-randread-4k-j1, 4k-j1-buffered, meta, tree, vms2, handover, coherence
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// MB, at most, that go from a producer in one VM to a consumer in another
    #[arg(long, value_name = "MB")]
    handover: Option<u32>,
    /// Seconds, at most, until one VM sees what another has changed
    #[arg(long, value_name = "SECONDS")]
    coherence: Option<u32>,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "general-6.12")]
    kernel: String,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
}

/// `tombolo bench share`
#[derive(Debug, Args)]
struct ShareArgs {
    /// All parts with little of each
    #[arg(long)]
    quick: bool,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    parts: Vec<share::Part>,
    /// Only these systems and tombolo: qcow2, tmpfs, copy, 9p-loose, virtiofs-auto, virtiofs, nfs
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    systems: Vec<String>,
    /// VMs of each system
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    vms: Option<u32>,
    /// Rounds over all systems
    #[arg(long)]
    rounds: Option<u32>,
    /// The folder that is the root [default: the guest kit's image, unpacked]
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// MiB of weights
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    weights: Option<u32>,
    /// Entries of the cache
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    entries: Option<u32>,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "general-6.12")]
    kernel: String,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
}

/// A duration that fio can measure in.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.05..=3600.0).contains(&value) => Ok(value),
        _ => Err("there are durations from 0.05 to 3600 s".into()),
    }
}

/// `tombolo bench net`
#[derive(Debug, Args)]
struct NetArgs {
    /// The cases, and those without VMs
    #[command(flatten)]
    load: tombolo_net_load::load::Options,
    /// Leave out what is measured without VMs
    #[arg(long)]
    no_load: bool,
    /// Leave out what is measured with VMs
    #[arg(long)]
    no_vms: bool,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// Account for every frame for so many seconds instead, killing switches under load
    #[arg(long, value_name = "SECONDS")]
    soak: Option<u64>,
    /// The same until so many frames have been sent
    #[arg(long, value_name = "FRAMES", conflicts_with = "soak")]
    soak_frames: Option<u64>,
    /// The seed of the soak's kills
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
}

/// `tombolo bench topology`
#[derive(Debug, Args)]
struct TopologyArgs {
    /// The part of the host on which the VM lies, as the key 'topology' says it
    #[arg(long, default_value = "host", value_name = "PART")]
    part: String,
    /// CPUs of the VM, for the part 'close'
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// CPUs of each node that are kept for the host
    #[arg(long, default_value_t = 0, value_name = "N")]
    reserve: u32,
    /// Memory of the VMs in MiB
    #[arg(long, default_value_t = 4096, value_name = "MIB")]
    memory: u32,
    /// Order of the matrices [default: so that one takes a fifth of the memory]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    order: Option<u32>,
    /// Rounds over host, VM and VM with topology
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of each of the two phases of a noise measurement
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    noise: f64,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
}

/// `tombolo bench mpi`
#[derive(Debug, Args)]
struct MpiArgs {
    /// Rounds over the systems
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", value_parser = seconds)]
    seconds: f64,
    /// Order of hpcc's matrices; 0 leaves hpcc out
    #[arg(long, default_value_t = 400, value_name = "N")]
    order: u32,
    /// Leave out TAP devices and the bridge, which need root
    #[arg(long)]
    no_tap: bool,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
}

/// Runs a bench, or shows results.
///
/// # Errors
/// Something is missing, or a measurement fails.
pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let json = arguments.json;
    match arguments.command {
        Command::Files(args) => interruptible(|| print(&files(args)?, json)),
        Command::Share(args) => interruptible(|| print(&share(args)?, json)),
        Command::Net(args) => interruptible(|| print(&net(args)?, json)),
        Command::Accel(options) => {
            tombolo_bench_accel::run(&options, json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Cuda(options) => {
            tombolo_bench_accel::cuda::run(&options, json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Start { command } => tombolo_bench_start::cli::run(command, json),
        Command::Topology(args) => interruptible(|| print(&topology(args)?, json)),
        Command::Mpi(args) => interruptible(|| print(&mpi(args)?, json)),
        Command::Report { file, results, html, only } => {
            report(file.as_deref(), &results, html, &only)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            tombolo_program::write_manual(Arguments::command(), &dir)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs a bench that ends at its next check after a signal.
fn interruptible(bench: impl FnOnce() -> Result<()>) -> Result<ExitCode> {
    interrupt::watch()?;
    match bench() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // A program that the signal ended may have failed before.
        Err(_) if interrupt::is_asked() => {
            eprintln!("tombolo: interrupted; everything that was started has been stopped");
            Ok(ExitCode::from(130))
        }
        Err(e) => Err(e),
    }
}

fn files(args: FilesArgs) -> Result<Results> {
    let mut plan = if args.quick { Plan::quick() } else { Plan::full() };
    plan.systems = systems::chosen(&args.systems).map_err(anyhow::Error::msg)?;
    plan.rounds = args.rounds.unwrap_or(plan.rounds);
    plan.minutes = args.minutes;
    plan.kernel = args.kernel;
    plan.names = args.names.unwrap_or(plan.names);
    plan.trees = args.trees.unwrap_or(plan.trees).min(plan.rounds);
    plan.handover_mb = args.handover.unwrap_or(plan.handover_mb);
    plan.coherence_s = args.coherence.unwrap_or(plan.coherence_s);
    let matrix = &mut plan.matrix;
    matrix.only = args.only;
    matrix.runtime_ms = args.seconds.map_or(matrix.runtime_ms, |seconds| (seconds * 1000.0).round() as u32);
    matrix.total_mb = args.size.unwrap_or(matrix.total_mb);
    if !args.blocks.is_empty() {
        matrix.sizes = args.blocks;
    }
    if !args.jobs.is_empty() {
        matrix.jobs = args.jobs;
    }
    files::run(&plan, &args.results, &std::path::absolute(&args.kit)?)
}

fn share(args: ShareArgs) -> Result<Results> {
    let plan = if args.quick { share::Plan::quick() } else { share::Plan::full() };
    let plan = share::Plan {
        parts: if args.parts.is_empty() { plan.parts } else { args.parts },
        systems: args.systems,
        vms: args.vms.map_or(plan.vms, |vms| vms as usize),
        rounds: args.rounds.unwrap_or(plan.rounds),
        root: args.root.map(std::path::absolute).transpose()?,
        weights_mib: args.weights.unwrap_or(plan.weights_mib),
        entries: args.entries.unwrap_or(plan.entries),
        kernel: args.kernel,
    };
    share::run(&plan, &args.results, &std::path::absolute(&args.kit)?)
}

fn net(args: NetArgs) -> Result<Results> {
    let until = match (args.soak, args.soak_frames) {
        (None, None) => None,
        (Some(seconds), _) => Some(Until::Time(Duration::from_secs(seconds))),
        (None, Some(frames)) => Some(Until::Frames(frames)),
    };
    let plan = net::Plan {
        options: args.load,
        load: !args.no_load,
        kernel: (!args.no_vms).then_some(args.kernel),
        soak: until.map(|until| net::Soak { until, seed: args.seed }),
        kit: std::path::absolute(&args.kit)?,
    };
    net::run(&plan, &args.results, command_line())
}

fn topology(args: TopologyArgs) -> Result<Results> {
    let plan = topology::Plan {
        part: args.part,
        cpus: args.cpus,
        reserve: args.reserve,
        memory_mib: args.memory,
        order: args.order,
        rounds: args.rounds,
        noise_seconds: args.noise,
        kernel: args.kernel,
        kit: std::path::absolute(&args.kit)?,
    };
    topology::run(&plan, &args.results, command_line())
}

fn mpi(args: MpiArgs) -> Result<Results> {
    let plan = mpi::Plan {
        rounds: args.rounds,
        seconds: args.seconds,
        order: (args.order > 0).then_some(args.order),
        no_tap: args.no_tap,
        kernel: args.kernel,
        kit: std::path::absolute(&args.kit)?,
    };
    mpi::run(&plan, &args.results, command_line())
}

/// Prints the table of `file` with the cases of the words `only`, or writes the page of all results of the folder `results`.
fn report(file: Option<&Path>, results: &Path, html: Option<PathBuf>, only: &[String]) -> Result<()> {
    if let Some(file) = file {
        let read = Results::read(file)?;
        print!("{}", report::text(&read, only));
        return Ok(());
    }
    let html = html.unwrap_or_else(|| results.join("index.html"));
    let page = page::html(&recorded(results)?);
    if let Some(dir) = html.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("can't make the folder {}", dir.display()))?;
    }
    std::fs::write(&html, page).with_context(|| format!("can't write {}", html.display()))?;
    println!("page: {}", html.display());
    Ok(())
}

/// All results files of a folder by name.
fn recorded(dir: &Path) -> Result<Vec<(String, Recorded)>> {
    let entries =
        std::fs::read_dir(dir).with_context(|| format!("can't read the folder {}", dir.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    files.retain(|file| file.extension().is_some_and(|e| e == "jsonl"));
    files.sort();
    anyhow::ensure!(
        !files.is_empty(),
        "{} has no results; 'tombolo bench files --quick' makes some",
        dir.display()
    );
    let name = |file: &Path| file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    files.iter().map(|file| Ok((name(file), Results::read(file)?))).collect()
}

fn print(results: &Results, json: bool) -> Result<()> {
    if json {
        let Recorded { machines, samples, abouts, left_out } = &results.recorded;
        machines.iter().for_each(|line| println!("{line}"));
        abouts.iter().for_each(|line| println!("{line}"));
        samples.iter().for_each(|line| println!("{line}"));
        left_out.iter().for_each(|line| println!("{line}"));
    } else {
        println!("{}", report::text(&results.recorded, &[]));
        println!("results: {}", results.path.display());
    }
    Ok(())
}
