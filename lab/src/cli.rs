// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo lab …`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use clap::CommandFactory;
use rustix::process::{Pid, Signal, kill_process};

use crate::bochs::Bochs;
use crate::carry::find_program;
use crate::client::{RawTerminal, Session, Through, copy_back};
use crate::config::{Config, Iommu, Machine};
use crate::emulator::Emulator;
use crate::instance::{self, BOOT_TIMEOUT, Lab, Watch};
use crate::protocol::Start;
use crate::signals::Signals;
use crate::{agent, cache};

/// An emulated KVM host, to run and test in
#[derive(Debug, clap::Parser)]
#[command(
    name = "tombolo-lab",
    bin_name = "tombolo lab",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub struct Arguments {
    /// Write JSON where a script would read it
    #[arg(long, global = true)]
    json: bool,
    /// The lab with Intel VMX, EPT and VMFUNC, under Bochs: slower, and it sees of this machine only what it is given
    #[arg(long, global = true)]
    vmx: bool,
    #[command(subcommand)]
    command: Command,
}

/// The commands of `tombolo lab`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Boot a lab that stays up until `down`
    Up(Options),
    /// Run a command in the lab, or in one that is booted for it alone, and exit with its code
    Run(RunOptions),
    /// A shell in the lab, or in one that is booted for it alone
    Shell(Options),
    /// End a lab
    Down {
        /// The lab's name (default: lab, with --vmx: vmx)
        #[arg(long)]
        name: Option<String>,
    },
    /// Names of the labs that are up
    List,
    /// Fetch the lab's kernel, with --vmx also Bochs, now instead of at the first start
    Fetch,
    /// The lab's own first process; runs only inside a lab
    #[command(hide = true)]
    Agent {
        /// The port that this worker serves
        #[arg(long)]
        port: Option<PathBuf>,
    },
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Man {
        /// The folder
        dir: PathBuf,
    },
}

/// A lab, and its parts if it has to be booted.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The lab's name (default: lab, with --vmx: vmx)
    #[arg(long)]
    pub name: Option<String>,
    /// IOMMU of the emulated host (default: intel; not with --vmx)
    #[arg(long, value_enum)]
    pub iommu: Option<Iommu>,
    /// Memory of the emulated host in MiB (default: 6144, half of it on each of two nodes; with --vmx 2048)
    #[arg(long)]
    pub memory: Option<u64>,
    /// CPUs of the emulated host (default: what this QEMU emulates reliably; not with --vmx)
    #[arg(long)]
    pub cpus: Option<u32>,
    /// Huge pages of 2 MiB to reserve
    #[arg(long, default_value_t = 0)]
    pub huge_pages: u64,
    /// The QEMU to emulate the host with (default: $TOMBOLO_LAB_QEMU, or qemu-system-x86_64 in PATH; not with --vmx)
    #[arg(long)]
    pub qemu: Option<PathBuf>,
    /// A folder that the lab sees as it changes (default: the git work tree around the current folder; not with --vmx)
    #[arg(long)]
    pub fresh: Option<PathBuf>,
    /// Only with --vmx: a program (its libraries come along), file or folder of this machine that the lab gets
    #[arg(long = "with", value_name = "PATH")]
    pub carried: Vec<PathBuf>,
    /// More kernel arguments for the emulated host
    #[arg(long, default_value = "")]
    pub append: String,
}

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct RunOptions {
    /// The lab's options
    #[command(flatten)]
    pub lab: Options,
    /// Copy what the command puts into $TOMBOLO_LAB_OUT to this folder
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Set a variable for the command
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

/// Runs a command of `tombolo lab`; the exit code of `run` and `shell` is the command's.
pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let json = arguments.json;
    let machine = if arguments.vmx { Machine::Vmx } else { Machine::Svm };
    match arguments.command {
        Command::Agent { port } => agent::run(port.as_deref()).map(|()| ExitCode::SUCCESS),
        Command::Up(options) => up(machine, &options, json),
        Command::Run(options) => in_lab(machine, &options.lab, &Job { options: &options, terminal: false }),
        Command::Shell(lab) => {
            let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/bash".into());
            let options = RunOptions { lab: lab.clone(), out: None, env: Vec::new(), command: vec![shell] };
            in_lab(machine, &lab, &Job { options: &options, terminal: true })
        }
        Command::Down { name } => {
            let name = name_of(machine, name.as_deref());
            let was_up = instance::down(name)?;
            report(json, &serde_json::json!({"name": name, "was_up": was_up}), || {
                if was_up { format!("lab {name} ended") } else { format!("lab {name} was not up") }
            });
            Ok(ExitCode::SUCCESS)
        }
        Command::List => {
            let names = instance::list()?;
            report(json, &serde_json::json!(names), || names.join("\n"));
            Ok(ExitCode::SUCCESS)
        }
        Command::Fetch => fetch(machine, json),
        Command::Man { dir } => {
            tombolo_program::write_manual(Arguments::command(), &dir)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn fetch(machine: Machine, json: bool) -> Result<ExitCode> {
    let kernel = cache::kernel()?;
    let mut value = serde_json::json!({"kernel": kernel.release, "folder": kernel.root});
    let mut text = format!("kernel {} in {}", kernel.release, kernel.root.display());
    if machine == Machine::Vmx {
        let bochs = Bochs::fetched()?;
        value["bochs"] = bochs.version.clone().into();
        text = format!("{text}\nBochs {} in {}", bochs.version, bochs.file("").display());
    }
    report(json, &value, || text);
    Ok(ExitCode::SUCCESS)
}

fn name_of(machine: Machine, name: Option<&str>) -> &str {
    name.unwrap_or(match machine {
        Machine::Svm => "lab",
        Machine::Vmx => "vmx",
    })
}

fn report(json: bool, value: &serde_json::Value, text: impl FnOnce() -> String) {
    if json {
        println!("{value}");
    } else {
        println!("{}", text());
    }
}

impl Options {
    /// The lab's configuration, with the agent of the program that runs now.
    pub fn config(&self, machine: Machine) -> Result<Config> {
        let own = std::env::current_exe().context("finding this program's own file")?;
        let own = own.to_str().context("this program's path is not UTF-8")?.to_owned();
        let config = Config {
            machine,
            huge_pages: self.huge_pages,
            agent: vec![own, "agent".into()],
            kernel_arguments: self.append.clone(),
            ..Config::default()
        };
        match machine {
            Machine::Svm => self.svm(config),
            Machine::Vmx => self.vmx(config),
        }
    }

    fn svm(&self, config: Config) -> Result<Config> {
        if !self.carried.is_empty() {
            bail!("--with is for --vmx; this lab sees all of this machine's files");
        }
        let fresh = match &self.fresh {
            Some(folder) => {
                Some(folder.canonicalize().with_context(|| format!("--fresh {}", folder.display()))?)
            }
            None => work_tree(&std::env::current_dir()?),
        };
        Ok(Config {
            iommu: self.iommu.unwrap_or(config.iommu),
            memory_mib: self.memory.unwrap_or(config.memory_mib),
            cpus: self.cpus,
            qemu: self.qemu.clone().or_else(|| std::env::var_os("TOMBOLO_LAB_QEMU").map(PathBuf::from)),
            fresh,
            ..config
        })
    }

    fn vmx(&self, config: Config) -> Result<Config> {
        let refused = [
            ("--iommu", self.iommu.is_some()),
            ("--cpus", self.cpus.is_some()),
            ("--qemu", self.qemu.is_some()),
            ("--fresh", self.fresh.is_some()),
        ];
        if let Some((option, _)) = refused.into_iter().find(|(_, given)| *given) {
            bail!(
                "{option} is not for --vmx: Bochs emulates one CPU and no IOMMU, and the lab gets files by --with PATH"
            );
        }
        Ok(Config {
            memory_mib: self.memory.unwrap_or(VMX_MEMORY_MIB),
            carried: self.carried.clone(),
            cwd: std::env::current_dir()?,
            ..config
        })
    }
}

/// Enough for a host and a guest or two; Bochs takes it from this machine as it is used.
const VMX_MEMORY_MIB: u64 = 2048;

fn work_tree(from: &Path) -> Option<PathBuf> {
    from.ancestors().find(|folder| folder.join(".git").exists()).map(Path::to_path_buf)
}

fn up(machine: Machine, options: &Options, json: bool) -> Result<ExitCode> {
    let cleanup = Cleanup::install()?;
    let config = options.config(machine)?;
    let name = name_of(machine, options.name.as_deref());
    let lab = cleanup.unless_ended(Lab::start(&config, Some(name), &*cleanup))?;
    cleanup.disarm();
    let started = lab.started.as_ref().context("the lab did not say what it runs on")?;
    let seconds = started.boot.as_secs_f64();
    let mut value = serde_json::json!({
        "name": name, "folder": lab.folder(), "kernel": started.kernel.release, "seconds": seconds,
    });
    let has = match &started.emulator {
        Emulator::Qemu(qemu) => {
            value["qemu"] = format!("{}.{}", qemu.version.0, qemu.version.1).into();
            format!("IOMMU {:?}", config.iommu)
        }
        Emulator::Bochs(bochs) => {
            value["bochs"] = bochs.version.clone().into();
            "VMX with EPTP switching".to_owned()
        }
    };
    report(json, &value, || {
        format!(
            "lab {name} up in {seconds:.1} s: kernel {}, {}, {has}",
            started.kernel.release, started.emulator
        )
    });
    Ok(ExitCode::SUCCESS)
}

/// The option that chooses the kind that `machine` is not.
fn other(machine: Machine) -> &'static str {
    match machine {
        Machine::Svm => "--vmx ",
        Machine::Vmx => "",
    }
}

/// A command for a lab, and how it is run.
struct Job<'a> {
    options: &'a RunOptions,
    terminal: bool,
}

fn in_lab(machine: Machine, options: &Options, job: &Job<'_>) -> Result<ExitCode> {
    let cleanup = Cleanup::install()?;
    cleanup.unless_ended(work_in_lab(&cleanup, machine, options, job))
}

fn work_in_lab(cleanup: &Cleanup, machine: Machine, options: &Options, job: &Job<'_>) -> Result<ExitCode> {
    let name = name_of(machine, options.name.as_deref());
    let lab = match Lab::find(name)? {
        Some(lab) => {
            if lab.machine()? != machine {
                bail!(
                    "the lab {name} is of the other kind: `tombolo lab {}run --name {name}`",
                    other(machine)
                );
            }
            if !options.carried.is_empty() {
                bail!(
                    "--with {}: the lab {name} is up already and gets no more files",
                    options.carried[0].display()
                );
            }
            lab
        }
        None => {
            let mut config = options.config(machine)?;
            if machine == Machine::Vmx {
                config.carried.extend(find_program(&job.options.command[0]));
            }
            Lab::start(&config, None, cleanup)?
        }
    };
    let mut session = Session::open(lab.folder(), BOOT_TIMEOUT)?;
    let (out, inside) = session.out_folder(lab.folder())?;
    let start = job.start(&inside)?;
    if job.terminal {
        *cleanup.resize.lock().map_err(|_| anyhow::anyhow!("a thread panicked"))? =
            Some(Box::new(session.resizer()?));
    }
    let raw = if job.terminal { RawTerminal::enter()? } else { None };
    let code = session.run(start, Some(Box::new(io::stdin())), &mut Through);
    drop(raw);
    let code = code?;
    if let Some(folder) = &job.options.out {
        session.collect(&out, &inside)?;
        let count = copy_back(&out, folder)?;
        eprintln!("{count} files from the lab in {}", folder.display());
    }
    drop(lab);
    Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1)))
}

impl Job<'_> {
    fn start(&self, out: &str) -> Result<Start> {
        let mut env =
            vec![("TOMBOLO_LAB_OUT".to_owned(), out.to_owned()), ("TOMBOLO_LAB".to_owned(), "1".to_owned())];
        for name in
            ["PATH", "HOME", "LANG", "TERM", "RUST_LOG", "RUST_BACKTRACE", "TOMBOLO_CACHE", "XDG_CACHE_HOME"]
        {
            if let Ok(value) = std::env::var(name) {
                env.push((name.to_owned(), value));
            }
        }
        for pair in &self.options.env {
            let Some((name, value)) = pair.split_once('=') else { bail!("--env {pair}: write NAME=VALUE") };
            env.push((name.to_owned(), value.to_owned()));
        }
        let cwd =
            std::env::current_dir()?.to_str().context("the current folder's path is not UTF-8")?.to_owned();
        let tty = self.terminal.then(|| RawTerminal::size().unwrap_or((25, 80)));
        Ok(Start { argv: self.options.command.clone(), env, cwd, tty })
    }
}

type Resizer = Box<dyn Fn(u16, u16) + Send>;

/// Ends what this process has started when a signal ends the process.
struct Cleanup {
    lab: Mutex<Option<(PathBuf, Option<Pid>)>>,
    resize: Mutex<Option<Resizer>>,
}

impl Cleanup {
    /// Takes over SIGINT, SIGTERM, SIGHUP and SIGWINCH; to be called before there are other threads.
    fn install() -> Result<Arc<Self>> {
        let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGWINCH])?;
        let cleanup = Arc::new(Self { lab: Mutex::new(None), resize: Mutex::new(None) });
        let shared = cleanup.clone();
        std::thread::spawn(move || {
            while let Ok(signal) = signals.next() {
                shared.on_signal(signal);
            }
        });
        Ok(cleanup)
    }

    fn on_signal(&self, signal: i32) {
        if signal == libc::SIGWINCH {
            let resize = self.resize.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let (Some(resize), Some((rows, columns))) = (resize.as_ref(), RawTerminal::size()) {
                resize(rows, columns);
            }
            return;
        }
        // Held until the exit: the main thread sees the lab's end and must not be faster with an error of its own.
        let mut lab = self.lab.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((folder, pid)) = lab.take() {
            // Both fail only where there is nothing left to clean up.
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
            let _ = std::fs::remove_dir_all(folder);
        }
        std::process::exit(128 + signal);
    }

    /// The main thread's result, unless a signal is ending the process.
    fn unless_ended<T>(&self, result: T) -> T {
        drop(self.lab.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        result
    }

    /// From now on the lab stays when this process ends.
    fn disarm(&self) {
        self.lab.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

impl Watch for Cleanup {
    fn begun(&self, folder: &Path, pid: Option<Pid>) {
        *self.lab.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((folder.to_owned(), pid));
    }
}
