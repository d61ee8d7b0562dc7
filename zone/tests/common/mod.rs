// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Real guests for tests: a kernel of the guest kit, a small initramfs, QEMU, and a serial line for commands.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A guest under TCG on a loaded machine boots in less; one that takes longer hangs.
const BOOT: Duration = Duration::from_secs(120);

/// One CPU is online, so the kernel patches its LOCK prefixes away, which is the harder case; a second possible one makes TCG
/// itself emulate atomics as such.
const CPUS: &str = "1,maxcpus=2";

/// Without erms and fsrm, which TCG interprets byte by byte; without cx16, after which QEMU 7.2's TCG leaves garbage in EFLAGS, so
/// that a 6.12 kernel (its slab allocator uses it) double-faults during boot now and then.
const TCG_CPU: &str = "max,-erms,-fsrm,-cx16";

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

/// The folder zone/, of whichever of its crates this is compiled into.
fn zone_dir() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|dir| dir.join("tests/guest").is_dir()).unwrap()
}

fn script(name: &str, args: &[&Path], last: Option<&str>) {
    let path = zone_dir().join("tests/guest").join(name);
    let mut command = Command::new(path);
    command.args(args);
    command.args(last);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// An initramfs for a kernel series with both builds of the test module: /tmbtest.ko and /ordinary.ko. Built once per run.
pub fn image(series: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(series.to_owned()).or_insert_with(|| build(series)).clone()
}

fn build(series: &str) -> PathBuf {
    let dir = &Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("guest-{series}"));
    std::fs::create_dir_all(dir).unwrap();
    let kit = kit().join(series);
    assert!(kit.join("vmlinuz").exists(), "no kernel {series} in {}: run `make guest`", kit.display());
    let (good, bad) = (dir.join("good"), dir.join("bad"));
    script("build-module.sh", &[&kit.join("build"), &good], None);
    script("build-module.sh", &[&kit.join("build"), &bad], Some("ordinary"));
    std::fs::copy(bad.join("tmbtest.ko"), dir.join("ordinary.ko")).unwrap();
    let image = dir.join("image.cpio");
    script("build-image.sh", &[&kit, &image, &good.join("tmbtest.ko"), &dir.join("ordinary.ko")], None);
    image
}

/// A running guest. Dropping it kills QEMU.
pub struct Guest {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    console: PathBuf,
}

/// What a guest is made of.
pub struct GuestConfig<'a> {
    pub series: &'a str,
    pub image: &'a Path,
    pub zone: &'a Path,
    pub zone_size: u64,
    /// Socket of the doorbell server, if the guest has a doorbell.
    pub bell: Option<&'a Path>,
    /// A network that its device is on, as `-netdev` says it (without an id).
    pub net: Option<&'a str>,
    /// Where the console's log goes.
    pub console: PathBuf,
}

impl Guest {
    pub fn start(config: GuestConfig<'_>) -> Guest {
        let accel = std::env::var("TOMBOLO_TEST_ACCEL").unwrap_or_else(|_| "tcg,thread=multi".to_owned());
        let cpu = if accel.starts_with("kvm") { "host" } else { TCG_CPU };
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-M",
            "q35",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-accel",
            &accel,
            "-cpu",
            cpu,
        ]);
        qemu.args(["-m", "256M,maxmem=2G", "-smp", CPUS]);
        qemu.arg("-kernel").arg(kit().join(config.series).join("vmlinuz"));
        qemu.arg("-initrd").arg(config.image);
        qemu.args(["-append", "console=ttyS0 quiet panic=-1 tsc=unstable rdinit=/init oops=panic"]);
        qemu.arg("-object").arg(format!(
            "memory-backend-file,id=zone,mem-path={},size={},share=on",
            config.zone.display(),
            config.zone_size
        ));
        qemu.args(["-device", "virtio-pmem-pci,memdev=zone"]);
        if let Some(bell) = config.bell {
            qemu.arg("-chardev").arg(format!("socket,path={},id=bell", bell.display()));
            qemu.args(["-device", "ivshmem-doorbell,chardev=bell,vectors=1"]);
        }
        if let Some(net) = config.net {
            qemu.arg("-netdev").arg(format!("{net},id=net"));
            qemu.args(["-device", "virtio-net-pci,netdev=net"]);
        }
        qemu.arg("-serial").arg(format!("file:{}", config.console.display()));
        qemu.args(["-serial", "stdio"]);
        let mut child =
            qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("qemu-system-x86_64");
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines() {
                let Ok(line) = line else { return };
                if sender.send(line.trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });
        let guest = Guest { child, stdin, lines, console: config.console };
        while guest.line(BOOT) != "TMB-READY" {}
        guest
    }

    fn line(&self, timeout: Duration) -> String {
        self.lines.recv_timeout(timeout).unwrap_or_else(|_| {
            let console = std::fs::read(&self.console).unwrap_or_default();
            panic!("the guest does not answer; its console:\n{}", String::from_utf8_lossy(&console))
        })
    }

    /// Sends a shell command without waiting for its end.
    pub fn send(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    /// Waits for the end of a command that was sent: its exit status and output.
    pub fn finish(&mut self) -> (i32, String) {
        let mut output = String::new();
        loop {
            let line = self.line(BOOT);
            if let Some(status) = line.strip_prefix("TMB-DONE ") {
                return (status.parse().unwrap(), output);
            }
            output.push_str(&line);
            output.push('\n');
        }
    }

    /// Runs a shell command that must succeed; its output.
    pub fn run(&mut self, command: &str) -> String {
        self.send(command);
        let (status, output) = self.finish();
        assert_eq!(status, 0, "`{command}` in the guest: {output}");
        output.trim().to_owned()
    }

    /// Kills QEMU, as a crash of the VM would.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
