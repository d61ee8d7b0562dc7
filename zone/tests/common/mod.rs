// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests with a zone for tests: the rig's, with the test module and the program that uses semaphores.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use tombolo_rig::image::Image;
use tombolo_rig::kernel::Kernel;
use tombolo_rig::machine::Machine;

/// The zone's address in the guest's memory, for the test module.
const SETUP: &str = "region=/sys/bus/nd/devices/region0\n\
    export ZONE=\"phys=$(cat $region/resource) size=$(cat $region/size)\"\n";

/// The guest kit's folder: one folder per kernel series, each with vmlinuz, modules/ and build/.
pub fn kit() -> PathBuf {
    let near = || zone_dir().parent().unwrap().join(".cache");
    std::env::var_os("TOMBOLO_CACHE").map_or_else(near, PathBuf::from).join("guest")
}

/// The kernel series to test: TOMBOLO_KERNELS, or both.
pub fn series() -> Vec<String> {
    let chosen = std::env::var("TOMBOLO_KERNELS").unwrap_or_else(|_| "6.1 6.12".to_owned());
    chosen.split_whitespace().map(str::to_owned).collect()
}

/// Returns the folder zone/, for each of its crates that compile this.
fn zone_dir() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|dir| dir.join("tests/guest").is_dir()).unwrap()
}

fn must(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// An image for a kernel series with both builds of the test module: /modules/tmbtest.ko and /modules/ordinary.ko. Built once per run.
pub fn image(series: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(series.to_owned()).or_insert_with(|| build(series)).clone()
}

fn build(series: &str) -> PathBuf {
    // The kernel's build system refuses a path with a space. The kit's has none once its links are resolved (guest/cache.sh); the checkout's may have one.
    let kit = kit().canonicalize().unwrap();
    let dir = &kit.join(series).join(env!("CARGO_PKG_NAME"));
    std::fs::create_dir_all(dir).unwrap();
    let kernel = Kernel::of_kit(&kit, series).unwrap();
    let headers = kit.join(series).join("build");
    let sources = zone_dir().join("tests/guest");
    let (good, bad) = (dir.join("good"), dir.join("bad"));
    let build_module = sources.join("build-module.sh");
    must(Command::new(&build_module).args([&headers, &good]));
    must(Command::new(&build_module).args([&headers, &bad]).arg("ordinary"));
    std::fs::copy(bad.join("tmbtest.ko"), dir.join("ordinary.ko")).unwrap();
    let synctest = dir.join("synctest");
    let include = |folder: &str| format!("-I{}", zone_dir().join(folder).display());
    must(
        Command::new("gcc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", &include("format"), &include("sync")])
            .arg(sources.join("synctest.c"))
            .arg(zone_dir().join("sync/sync.c"))
            .arg("-o")
            .arg(&synctest),
    );
    let image = Image {
        modules: ["virtio_pci", "virtio_pmem", "virtio_net"].map(str::to_owned).to_vec(),
        unloaded: vec![good.join("tmbtest.ko"), dir.join("ordinary.ko")],
        programs: vec![synctest],
        setup: SETUP.into(),
        ..Image::default()
    };
    let target = dir.join("image.cpio");
    image.write(&kernel, &target).unwrap();
    target
}

/// A running guest. Dropping it kills QEMU.
pub struct Guest(tombolo_rig::guest::Guest);

/// The configuration of a guest.
pub struct GuestConfig<'a> {
    pub series: &'a str,
    pub image: &'a Path,
    pub zone: &'a Path,
    pub zone_size: u64,
    /// Socket of the doorbell server, if the guest has a doorbell.
    pub bell: Option<&'a Path>,
    /// A network that its device is on, as `-netdev` says it (without an id).
    pub net: Option<&'a str>,
    /// The path of the console's log.
    pub console: PathBuf,
}

impl Guest {
    pub fn start(config: GuestConfig<'_>) -> Guest {
        let kernel = Kernel::of_kit(&kit(), config.series).unwrap();
        let mut machine = Machine::new(&kernel.image, config.image, &config.console);
        // With one CPU online the kernel patches its LOCK prefixes away, which is the harder case.
        machine.processors = 1;
        machine.zone = Some((config.zone.to_owned(), config.zone_size));
        machine.kernel_arguments = "oops=panic".into();
        let mut add = |words: &[&str]| machine.arguments.extend(words.iter().map(Into::into));
        if let Some(bell) = config.bell {
            add(&["-chardev", &format!("socket,path={},id=bell", bell.display())]);
            add(&["-device", "ivshmem-doorbell,chardev=bell,vectors=1"]);
        }
        if let Some(net) = config.net {
            add(&["-netdev", &format!("{net},id=net"), "-device", "virtio-net-pci,netdev=net"]);
        }
        Guest(tombolo_rig::guest::Guest::start(&machine).unwrap())
    }

    /// Sends a shell command without waiting for its end.
    pub fn send(&mut self, command: &str) {
        self.0.send(command).unwrap();
    }

    /// Waits for the end of a command that was sent: its exit status and output.
    pub fn finish(&mut self) -> (i32, String) {
        self.0.finish().unwrap()
    }

    /// Runs a shell command that must succeed, and returns its output.
    pub fn run(&mut self, command: &str) -> String {
        self.0.run(command).unwrap()
    }

    /// Kills QEMU, as a crash of the VM would.
    pub fn kill(self) {
        self.0.kill();
    }
}
