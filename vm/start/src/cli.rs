// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo start blame` and `tombolo grow`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::ahead::Budget;
use crate::check::Limits;
use crate::grow::{Options, grow};
use crate::layout::{MIB, Wish};
use crate::libvirt::{Virsh, running_layout, xml};
use crate::monitor::{Monitor, Socket};
use crate::pace::Share;
use crate::prepare::{Prepare, ProcessMemory, Unprepared};
use crate::progress::Progress;
use crate::timeline::{Timeline, render};

/// The commands of `tombolo start`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Show the steps of a start with their times
    Blame {
        /// The VM's timeline file
        timeline: PathBuf,
    },
    /// Show the parts in which a VM's memory would arrive
    Plan {
        /// MiB of the VM
        memory: u64,
        /// MiB at start
        #[arg(long)]
        boot_memory: Option<u64>,
        /// As the XML of a libvirt domain
        #[arg(long)]
        libvirt: bool,
    },
    /// Grow a running VM's virtio-mem to its full size
    Grow(GrowOptions),
}

/// Options of `grow`.
#[derive(Debug, clap::Args)]
pub struct GrowOptions {
    /// A libvirt domain
    #[arg(required_unless_present = "qmp")]
    pub domain: Option<String>,
    /// A VM's QMP socket instead
    #[arg(long, requires = "pid", conflicts_with = "domain")]
    pub qmp: Option<PathBuf>,
    /// The process behind the QMP socket
    #[arg(long)]
    pub pid: Option<u32>,
    /// The virtio-mem device, if there are several
    #[arg(long)]
    pub device: Option<String>,
    /// The host node that the memory is bound to
    #[arg(long)]
    pub node: Option<u32>,
    /// Most MiB a second to prepare
    #[arg(long)]
    pub bandwidth: Option<u64>,
    /// Percent of the time in which growing may disturb the guest; 100: without pauses
    #[arg(long, value_name = "PERCENT", default_value = "100")]
    pub share: Share,
    /// Offer memory that was not prepared
    #[arg(long)]
    pub unprepared: bool,
    /// Keep the progress in this file
    #[arg(long)]
    pub progress: Option<PathBuf>,
}

/// Runs a command of `tombolo start`.
pub fn run(command: Command, json: bool) -> Result<ExitCode> {
    match command {
        Command::Blame { timeline } => {
            let marks = Timeline::at(&timeline)
                .marks()
                .with_context(|| format!("reading {}: was the VM started by tombolo?", timeline.display()))?;
            if json {
                println!("{}", serde_json::to_string(&marks)?);
            } else {
                print!("{}", render(&marks, 40));
            }
        }
        Command::Plan { memory, boot_memory, libvirt } => {
            return plan(memory * MIB, boot_memory.map(|m| m * MIB), libvirt, json);
        }
        Command::Grow(options) => return run_grow(&options, json),
    }
    Ok(ExitCode::SUCCESS)
}

/// `tombolo start plan`: how `total` bytes would arrive.
pub fn plan(total: u64, boot: Option<u64>, libvirt: bool, json: bool) -> Result<ExitCode> {
    let limits = Limits::read(std::path::Path::new("/"))?;
    let layout = Wish { total, boot, dma_entries: limits.dma_entries }.layout()?;
    if libvirt {
        print!("{}", xml(&layout));
    } else if json {
        println!("{}", serde_json::to_string(&layout)?);
    } else {
        println!(
            "{} MiB at start, {} MiB in blocks of {} MiB ({} DMA mappings), {} MiB a step",
            layout.boot / MIB,
            layout.grown / MIB,
            layout.block / MIB,
            layout.mappings(),
            layout.step / MIB
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// `tombolo grow`.
pub fn run_grow(options: &GrowOptions, json: bool) -> Result<ExitCode> {
    let (mut monitor, pid): (Box<dyn Monitor>, u32) = match (&options.domain, &options.qmp, options.pid) {
        (Some(domain), None, _) => {
            let virsh = Virsh::domain(domain);
            let pid = virsh.pid()?;
            (Box::new(virsh), pid)
        }
        (None, Some(socket), Some(pid)) => (Box::new(Socket::connect(socket, Duration::from_secs(60))?), pid),
        _ => bail!("name a libvirt domain, or --qmp and --pid"),
    };
    let (id, layout) = running_layout(&mut *monitor, options.device.as_deref())?;
    let limits = Limits::read(std::path::Path::new("/"))?;
    let budget = Budget { bandwidth: options.bandwidth.map(|m| m * MIB), ..Budget::default() };
    let mut prepare: Box<dyn Prepare> = if options.unprepared {
        Box::new(Unprepared)
    } else {
        Box::new(ProcessMemory::of(pid, layout.grown, options.node, budget)?)
    };
    let terminal = std::io::stderr().is_terminal() && !json;
    let mut observe = |progress: &Progress| {
        if let Some(path) = &options.progress {
            // Memory grows also if the file can't be written; the last state is printed below too.
            let _ = progress.save(path);
        }
        if terminal {
            // A terminal that has gone meanwhile ends no growth.
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", progress.line());
        }
    };
    let settings = Options { share: options.share, ..Options::for_host(&limits) };
    let result = grow(&mut *monitor, &id, layout, &mut *prepare, &settings, &mut observe);
    if terminal {
        let _ = writeln!(std::io::stderr());
    }
    let report = result?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{} MiB after {:.1} s", (layout.boot + layout.grown) / MIB, report.elapsed);
    }
    Ok(ExitCode::SUCCESS)
}
