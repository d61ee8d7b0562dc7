// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo-rig`: images and guests for the tests that are written in Python and shell.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser};
use tombolo_rig::image::Image;
use tombolo_rig::kernel::Kernel;
use tombolo_rig::machine::Machine;

/// Images and guests for tests
#[derive(Parser)]
enum Cli {
    /// Write an image that a guest boots from
    Image(ImageOptions),
    /// Become the QEMU of a guest; its shell is on standard input and output
    Boot(BootOptions),
}

#[derive(Args)]
struct ImageOptions {
    /// Release of the kernel
    #[arg(long)]
    release: String,
    /// Folder of the kernel's modules; without it: /lib/modules/RELEASE
    #[arg(long)]
    modules: Option<PathBuf>,
    /// Module to load, with what it depends on
    #[arg(long, value_name = "NAME")]
    module: Vec<String>,
    /// Module file to load after those
    #[arg(long, value_name = "FILE")]
    own_module: Vec<PathBuf>,
    /// Module file to put into /modules and not to load
    #[arg(long, value_name = "FILE")]
    unloaded: Vec<PathBuf>,
    /// Program or library for /bin, with its libraries
    #[arg(long, value_name = "FILE")]
    program: Vec<PathBuf>,
    /// File that keeps its path, with its libraries
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Init script instead of the one that serves a shell
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// The image
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Args)]
struct BootOptions {
    /// Kernel image
    #[arg(long)]
    kernel: PathBuf,
    /// Initramfs
    #[arg(long)]
    image: PathBuf,
    /// File for the kernel's messages
    #[arg(long)]
    console: PathBuf,
    /// Memory in MiB
    #[arg(long, default_value_t = 256)]
    memory: u64,
    /// Let other processes map the guest's memory
    #[arg(long)]
    shared_memory: bool,
    /// Number of CPUs
    #[arg(long, default_value_t = 2)]
    processors: u32,
    /// File that the guest sees as persistent memory
    #[arg(long, value_name = "FILE", requires = "zone_size")]
    zone: Option<PathBuf>,
    /// Size of that file in bytes
    #[arg(long, value_name = "BYTES", requires = "zone")]
    zone_size: Option<u64>,
    /// More arguments for the kernel
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    append: String,
    /// More arguments for QEMU
    #[arg(last = true)]
    arguments: Vec<std::ffi::OsString>,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Image(options) => image(options),
        Cli::Boot(options) => Err(boot(options)),
    }
}

fn image(options: ImageOptions) -> anyhow::Result<()> {
    let mut kernel = Kernel::installed("/".as_ref(), &options.release);
    if let Some(modules) = options.modules {
        kernel.modules = modules;
    }
    let init =
        options.init.map(|path| std::fs::read_to_string(&path).with_context(|| path.display().to_string()));
    let image = Image {
        modules: options.module,
        own_modules: options.own_module,
        unloaded: options.unloaded,
        programs: options.program,
        files: options.file,
        setup: String::new(),
        init: init.transpose()?,
    };
    image.write(&kernel, &options.output)
}

/// Returns only where QEMU can't be started.
fn boot(options: BootOptions) -> anyhow::Error {
    let mut machine = Machine::new(&options.kernel, &options.image, &options.console);
    machine.memory = options.memory;
    machine.shared_memory = options.shared_memory;
    machine.processors = options.processors;
    machine.zone = options.zone.zip(options.zone_size);
    machine.kernel_arguments = options.append;
    machine.arguments = options.arguments;
    match machine.command() {
        Ok(mut command) => {
            let error = command.exec();
            anyhow::Error::new(error).context(format!("starting {}", command.get_program().to_string_lossy()))
        }
        Err(error) => error,
    }
}
