// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench start`: outside it boots a lab and runs itself there, inside it measures.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use tombolo_lab::client::{Output, Session};
use tombolo_lab::config::{Config, Iommu};
use tombolo_lab::instance::{BOOT_TIMEOUT, Lab};
use tombolo_lab::protocol::Start;
use tombolo_record::{Machine, Results, Sample};
use tombolo_start::layout::{Layout, MIB};

use crate::claims;
use crate::measure::{System, start};
use crate::nested::{Backing, Card, Guest, Image, Spec};
use crate::report::{costs, lines, model, table};

/// The commands of `tombolo bench start`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Boot a lab, measure in it, and write the figures
    Run(RunOptions),
    /// Measure on this machine: in a lab, or on a host with KVM, an IOMMU and a card to spare
    Inside(InsideOptions),
    /// Check claims on this machine, which should be a lab
    Claims {
        /// Only the short ones
        #[arg(long)]
        short: bool,
        /// Only those whose name contains this
        #[arg(long)]
        only: Option<String>,
    },
    /// Figures of a file as a table, with the model
    Show {
        /// A file of JSON lines
        file: PathBuf,
    },
    /// The agent of a lab; runs only inside it
    #[command(hide = true)]
    Agent {
        /// The port that this worker serves
        #[arg(long)]
        port: Option<PathBuf>,
    },
}

/// The cases to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct InsideOptions {
    /// MiB of the VMs
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096")]
    pub sizes: Vec<u64>,
    /// Ways to start them
    #[arg(long, value_delimiter = ',', value_enum, default_value = "qemu,tombolo")]
    pub systems: Vec<System>,
    /// Starts of each
    #[arg(long, default_value_t = 1)]
    pub repeat: u32,
    /// With a passed-through device, without, or both
    #[arg(long, value_delimiter = ',', value_parser = ["yes", "no"], default_value = "yes")]
    pub device: Vec<String>,
    /// Allow huge pages on shared memory on request first (shmem_enabled = advise)
    #[arg(long)]
    pub shared_huge_pages: bool,
    /// Let the guest work while it grows, and measure that too
    #[arg(long)]
    pub work: bool,
}

/// Options of `run`.
#[derive(Debug, Clone, clap::Args)]
pub struct RunOptions {
    /// The cases to measure
    #[command(flatten)]
    pub inside: InsideOptions,
    /// MiB of the lab
    #[arg(long, default_value_t = 7168)]
    pub lab_memory: u64,
    /// CPUs of the lab
    #[arg(long)]
    pub lab_cpus: Option<u32>,
    /// The QEMU that emulates the lab
    #[arg(long)]
    pub qemu: Option<PathBuf>,
    /// Append the figures to this file
    #[arg(long, default_value = "bench/results/start.jsonl")]
    pub results: PathBuf,
}

/// Runs a command of `tombolo bench start`.
pub fn run(command: Command, json: bool) -> Result<ExitCode> {
    match command {
        Command::Agent { port } => {
            return tombolo_lab::agent::run(port.as_deref()).map(|()| ExitCode::SUCCESS);
        }
        Command::Claims { short, only } => {
            claims::check(|c| {
                (!short || c.short) && only.as_ref().is_none_or(|o| c.name.contains(o.as_str()))
            })?;
        }
        Command::Inside(options) => inside(&options)?,
        Command::Run(options) => outside(&options, json)?,
        Command::Show { file } => {
            let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            show(&Results::samples(&text));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn show(figures: &[Sample]) {
    print!("{}", table(figures));
    if let Some(costs) = costs(figures) {
        print!("{}", model(&costs));
    }
}

fn inside(options: &InsideOptions) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let kernel = tombolo_lab::cache::kernel()?;
    let image = Image::working(&kernel, folder.path())?;
    if options.shared_huge_pages {
        let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        fs::write(setting, "advise").with_context(|| format!("writing {setting}"))?;
    }
    for device in &options.device {
        let card = (device == "yes").then(Card::take).transpose()?;
        // A lab's memory is its machine's, taken when it is first touched: that is no cost of any system's.
        let largest = Layout::slow(options.sizes.iter().max().copied().unwrap_or(512) * MIB);
        let touched = card.as_ref().map(|c| c.address);
        drop(Guest::start(&Spec {
            layout: largest,
            backing: Backing::Plain,
            device: touched,
            image: image.clone(),
        })?);
        for _ in 0..options.repeat {
            for size in &options.sizes {
                for system in &options.systems {
                    let total = size * MIB;
                    let _pages =
                        (*system == System::QemuTuned).then(|| HugePages::reserve(total)).transpose()?;
                    let figures =
                        start(*system, total, card.as_ref().map(|c| c.address), &image, options.work)
                            .with_context(|| format!("{} {size} MiB, device: {device}", system.name()))?;
                    for line in lines(*system, total, card.is_some(), &figures) {
                        println!("{line}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Reserved huge pages, given back when dropped.
struct HugePages;

impl HugePages {
    const FILE: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(bytes: u64) -> Result<Self> {
        let pages = bytes.div_ceil(2 * MIB);
        fs::write(Self::FILE, pages.to_string())?;
        let got: u64 = fs::read_to_string(Self::FILE)?.trim().parse()?;
        let reserved = Self;
        if got < pages {
            bail!(
                "only {got} of {pages} huge pages could be reserved: give the lab more memory (--lab-memory)"
            );
        }
        Ok(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = fs::write(Self::FILE, "0") {
            eprintln!("the reserved huge pages stay: {error}");
        }
    }
}

/// The command of `tombolo-bench` that has the commands of this module.
const COMMAND: &str = "start";

/// Boots a lab for `program`, a `tombolo-bench`, which is the lab's agent and the program that runs in it.
pub fn lab(
    program: &Path,
    iommu: Iommu,
    memory_mib: u64,
    cpus: Option<u32>,
    qemu: Option<PathBuf>,
) -> Result<Lab> {
    let own = program.to_str().context("this program's path is not UTF-8")?.to_owned();
    let qemu = qemu.or_else(|| std::env::var_os("TOMBOLO_LAB_QEMU").map(PathBuf::from));
    let config = Config {
        iommu,
        memory_mib,
        cpus,
        qemu,
        agent: vec![own, COMMAND.into(), "agent".into()],
        ..Config::default()
    };
    Lab::start(&config, None, &())
}

/// Runs `tombolo-bench start ARGUMENTS` in a lab; passes its error output on.
pub fn in_lab(lab: &Lab, program: &Path, arguments: &[String]) -> Result<Output> {
    struct Sink<'a>(&'a mut Output);
    impl tombolo_lab::client::Sink for Sink<'_> {
        fn stdout(&mut self, data: &[u8]) -> std::io::Result<()> {
            self.0.stdout.extend_from_slice(data);
            std::io::stderr().write_all(data)
        }
        fn stderr(&mut self, data: &[u8]) -> std::io::Result<()> {
            self.0.stderr.extend_from_slice(data);
            std::io::stderr().write_all(data)
        }
    }
    let mut argv = vec![program.to_str().context("this program's path is not UTF-8")?.to_owned()];
    argv.push(COMMAND.into());
    argv.extend_from_slice(arguments);
    let mut env =
        vec![("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned())];
    let cache = tombolo_lab::cache::folder()?;
    env.push(("TOMBOLO_CACHE".into(), cache.to_str().context("the cache's path is not UTF-8")?.into()));
    let mut session = Session::open(lab.folder(), BOOT_TIMEOUT)?;
    let mut output = Output { code: 0, stdout: Vec::new(), stderr: Vec::new() };
    let start = Start { argv, env, cwd: "/".into(), tty: None };
    output.code = session.run(start, None, &mut Sink(&mut output))?;
    Ok(output)
}

fn outside(options: &RunOptions, json: bool) -> Result<()> {
    let program = std::env::current_exe()?;
    let lab = lab(&program, Iommu::Intel, options.lab_memory, options.lab_cpus, options.qemu.clone())?;
    let started = lab.started.as_ref().context("the lab did not say what it runs on")?;
    let wanted = &options.inside;
    let join = |list: Vec<String>| list.join(",");
    let systems = wanted.systems.iter().map(|s| s.name().to_owned()).collect();
    let mut arguments = vec![
        "inside".to_owned(),
        format!("--sizes={}", join(wanted.sizes.iter().map(u64::to_string).collect())),
        format!("--systems={}", join(systems)),
        format!("--repeat={}", wanted.repeat),
        format!("--device={}", join(wanted.device.clone())),
    ];
    if wanted.shared_huge_pages {
        arguments.push("--shared-huge-pages".into());
    }
    if wanted.work {
        arguments.push("--work".into());
    }
    let output = in_lab(&lab, &program, &arguments)?;
    if output.code != 0 {
        bail!("measuring in the lab ended with {}", output.code);
    }
    let figures = Results::samples(&String::from_utf8_lossy(&output.stdout));
    let qemu = started.emulator.qemu().context("this bench's lab runs under QEMU")?;
    let cpus = qemu.cpus(&Config { cpus: options.lab_cpus, ..Config::default() });
    let versions = vec![format!(
        "lab: {} MiB, {cpus} CPUs, kernel {}, {} (tcg); its guests: kvm",
        options.lab_memory, started.kernel.release, started.emulator
    )];
    let machine = Machine::here(tombolo_record::command_line(), None, versions);
    let mut results = Results::append(&options.results, machine)?;
    for sample in &figures {
        results.add(sample.clone())?;
    }
    if json {
        print!("{}", String::from_utf8_lossy(&output.stdout));
    } else {
        show(&figures);
    }
    Ok(())
}
