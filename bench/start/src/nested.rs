// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest inside the lab: QEMU under real KVM, its console line by line with the time of each, its monitor, and the network card
//! it may have.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tombolo_lab::cache::Kernel;
use tombolo_lab::initramfs::write_guest;
use tombolo_lab::signals::{ChildOf, detach};
use tombolo_passthrough::address::Address;
use tombolo_passthrough::bind::{self, Store, bind};
use tombolo_passthrough::host::Host;
use tombolo_passthrough::plan::plan;
use tombolo_qemu::hypervisor::Hypervisor;
use tombolo_qemu::version::Qemu;
use tombolo_start::layout::{Layout, MIB};
use tombolo_start::monitor::{Monitor, Socket};
use tombolo_start::timeline::{Event, Mark, now};

/// Longest time for anything a guest does.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// The id of the growing memory.
pub const MEMORY: &str = "vmem0";

/// The source of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// QEMU's default.
    Plain,
    /// A memfd that other processes may map.
    Shared,
    /// Reserved huge pages, touched by several threads before the start.
    Tuned,
}

/// A guest to start.
#[derive(Debug, Clone)]
pub struct Spec {
    pub layout: Layout,
    /// The source of the memory at start.
    pub backing: Backing,
    /// The device it gets.
    pub device: Option<Address>,
    /// Kernel and initramfs.
    pub image: Image,
}

/// A kernel and an initramfs for guests.
#[derive(Debug, Clone)]
pub struct Image {
    kernel: PathBuf,
    initramfs: PathBuf,
    /// Its own kernel arguments.
    arguments: &'static str,
}

/// The guest's work: it copies memory for ever, and after each round prints the round's number and the memory that it has.
const WORK: &str = "\
    $B mount -t tmpfs -o size=64m tmp /tmp\n\
    $B dd if=/dev/zero of=/tmp/a bs=1M count=16 2>/dev/null; $B cp /tmp/a /tmp/b\n\
    echo TOMBOLO login\n\
    n=0\n\
    while :; do\n\
    $B dd if=/tmp/a of=/tmp/b bs=1M conv=notrunc 2>/dev/null; n=$((n+1))\n\
    read -r _ kib _ < /proc/meminfo; echo TOMBOLO work $n $kib\n\
    done\n";

impl Image {
    /// A guest that takes memory and works.
    pub fn working(kernel: &Kernel, folder: &Path) -> Result<Self> {
        Self::with(kernel, folder, "work", &["virtio_mem"], WORK)
    }

    /// A guest without the driver.
    pub fn without_driver(kernel: &Kernel, folder: &Path) -> Result<Self> {
        Self::with(kernel, folder, "bare", &[], WORK)
    }

    /// A guest with an Intel network driver that asks its card for an address, then works.
    pub fn with_network(kernel: &Kernel, folder: &Path) -> Result<Self> {
        let script = format!(
            "$B ip link set eth0 up; for i in 1 2 3 4 5 6 7 8 9 10; do $B sleep 1; [ \"$($B cat /sys/class/net/eth0/carrier)\" = 1 ] && break; done\n\
             $B ip addr add 10.0.2.15/24 dev eth0; $B ping -c 3 -w 20 10.0.2.2 > /dev/null && echo TOMBOLO ping\n{WORK}"
        );
        Self::with(kernel, folder, "network", &["virtio_mem", "e1000e"], &script)
    }

    fn with(kernel: &Kernel, folder: &Path, name: &str, modules: &[&str], script: &str) -> Result<Self> {
        let initramfs = folder.join(format!("{name}.cpio"));
        write_guest(&initramfs, kernel, modules, script)?;
        let arguments = tombolo_start::guest::KERNEL_ARGUMENTS;
        Ok(Self { kernel: kernel.image.clone(), initramfs, arguments })
    }

    /// A guest that waits for a root file system in an initramfs of Debian's with the guest kit's scripts, and has no other word of grown
    /// memory. It says what becomes of memory that arrives.
    pub fn debian(kernel: &Kernel, folder: &Path) -> Result<Self> {
        let settings = folder.join("initramfs-tools");
        let write = |path: &str, text: &str| -> Result<()> {
            let path = settings.join(path);
            fs::create_dir_all(path.parent().context("a file is in a folder")?)?;
            fs::write(&path, text)?;
            Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
        };
        write("initramfs.conf", "MODULES=list\nBUSYBOX=y\nCOMPRESS=gzip\n")?;
        write("modules", "")?;
        write("hooks/tombolo-memory", include_str!("../../../guest/initramfs-tools/hooks/tombolo-memory"))?;
        write(
            "scripts/init-top/tombolo-memory",
            include_str!("../../../guest/initramfs-tools/scripts/init-top/tombolo-memory"),
        )?;
        write(
            "scripts/init-top/claim",
            "#!/bin/sh\ncase $1 in prereqs) echo tombolo-memory; exit 0 ;; esac\n\
             echo \"TOMBOLO memory goes $(cat /sys/devices/system/memory/auto_online_blocks)\" >/dev/console\n",
        )?;
        // mkinitramfs asks the kernel's configuration what it can unpack.
        let config = format!("boot/config-{}", kernel.release);
        fs::create_dir_all("/boot")?;
        fs::copy(kernel.root.join(&config), Path::new("/").join(&config))
            .with_context(|| format!("copying {config}"))?;
        let initramfs = folder.join("debian.img");
        let made = Command::new("mkinitramfs")
            .arg("-d")
            .arg(&settings)
            .arg("-o")
            .arg(&initramfs)
            .arg(&kernel.release)
            .output()
            .context("running mkinitramfs (package initramfs-tools)")?;
        if !made.status.success() {
            bail!("mkinitramfs: {}", String::from_utf8_lossy(&made.stderr).trim());
        }
        Ok(Self { kernel: kernel.image.clone(), initramfs, arguments: "root=/dev/vda rootdelay=600" })
    }
}

/// A guest that runs.
pub struct Guest {
    child: Child,
    pub monitor: Socket,
    lines: Receiver<(f64, String)>,
    /// Events so far.
    pub marks: Vec<Mark>,
    seen: Vec<String>,
    folder: tempfile::TempDir,
}

impl Guest {
    /// Starts a guest and lets it run.
    pub fn start(spec: &Spec) -> Result<Self> {
        let folder = tempfile::tempdir().context("a folder for the guest's monitor")?;
        let socket = folder.path().join("qmp");
        let mut command = command(spec, &socket)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(fs::File::create(folder.path().join("stderr"))?);
        detach(&mut command, ChildOf::Us);
        let mut marks = vec![Mark { event: Event::Qemu, at: now() }];
        let mut child = command.spawn().context("starting qemu-system-x86_64 in the lab")?;
        let console = child.stdout.take().context("the guest's console")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(console).split(b'\n').map_while(|line| line.ok()) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send((now(), text)).is_err() {
                    return;
                }
            }
        });
        let monitor = match connect(&mut child, &socket) {
            Ok(monitor) => monitor,
            Err(error) => {
                // Ended already, or not worth keeping.
                let _ = child.kill();
                let _ = child.wait();
                let said = fs::read_to_string(folder.path().join("stderr")).unwrap_or_default();
                return Err(error).with_context(|| format!("QEMU says: {}", said.trim()));
            }
        };
        marks.push(Mark { event: Event::Monitor, at: now() });
        let mut guest = Self { child, monitor, lines, marks, seen: Vec::new(), folder };
        guest.monitor.execute("cont", json!({}))?;
        guest.mark(Event::FirstInstruction, now());
        Ok(guest)
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Notes an event once.
    pub fn mark(&mut self, event: Event, at: f64) {
        if self.at(event).is_none() {
            self.marks.push(Mark { event, at });
        }
    }

    /// When an event was.
    pub fn at(&self, event: Event) -> Option<f64> {
        self.marks.iter().find(|m| m.event == event).map(|m| m.at)
    }

    /// Seconds from QEMU's start to an event.
    pub fn since_start(&self, event: Event) -> Result<f64> {
        let begin = self.at(Event::Qemu).context("QEMU was not started")?;
        Ok(self.at(event).with_context(|| format!("{event:?} was not seen"))? - begin)
    }

    /// Waits for a console line that contains `text`; returns it and its time.
    pub fn await_line(&mut self, text: &str) -> Result<(f64, String)> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok((at, line)) => {
                    self.note(at, &line);
                    if line.contains(text) {
                        return Ok((at, line));
                    }
                }
                Err(RecvTimeoutError::Timeout) => bail!("no {text:?} on the console: {}", self.tail()),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended before {text:?}: {}", self.tail())
                }
            }
        }
    }

    /// Lines that came since the last look.
    pub fn new_lines(&mut self) -> Vec<(f64, String)> {
        let lines: Vec<_> = self.lines.try_iter().collect();
        lines.iter().for_each(|(at, line)| self.note(*at, line));
        lines
    }

    fn note(&mut self, at: f64, line: &str) {
        if line.contains("Malformed early option") {
            self.mark(Event::KernelLine, at);
        }
        if line.contains("TOMBOLO login") {
            self.mark(Event::Login, at);
        }
        self.seen.push(line.to_owned());
    }

    fn tail(&self) -> String {
        let said = fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default();
        format!("\n{}\n{}", self.seen[self.seen.len().saturating_sub(12)..].join("\n"), said.trim())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Fails only where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(child: &mut Child, socket: &Path) -> Result<Socket> {
    let deadline = Instant::now() + TIMEOUT;
    // The socket is there a moment before QEMU listens on it.
    loop {
        if let Ok(stream) = UnixStream::connect(socket) {
            return Ok(Socket::over(stream, TIMEOUT)?);
        }
        if let Some(status) = child.try_wait()? {
            bail!("it ended at once ({status})");
        }
        if Instant::now() > deadline {
            bail!("it opened no monitor");
        }
        // Nothing but the socket itself tells that it is there.
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn command(spec: &Spec, socket: &Path) -> Result<Command> {
    let qemu = Qemu::find(None)?;
    let mut command = Command::new(&qemu.program);
    let boot = spec.layout.boot / MIB;
    let (machine, backend) = match spec.backing {
        Backing::Plain => ("q35", None),
        Backing::Shared => ("q35,memory-backend=ram0", Some("")),
        Backing::Tuned => {
            ("q35,memory-backend=ram0", Some(",hugetlb=on,hugetlbsize=2M,prealloc=on,prealloc-threads=2"))
        }
    };
    command.args(["-M", machine, "-smp", "1", "-S", "-nodefaults", "-display", "none"]);
    command.args(Hypervisor::Kvm.arguments(&qemu));
    command.args(spec.layout.arguments(MEMORY, None));
    if let Some(more) = backend {
        command.args(["-object", &format!("memory-backend-memfd,id=ram0,size={boot}M,share=on{more}")]);
    }
    command.args(["-device", "pcie-root-port,id=port0,chassis=1"]);
    if let Some(address) = spec.device {
        command.args(["-device", &format!("vfio-pci,id=device0,host={address},bus=port0,rombar=0")]);
    }
    command.arg("-kernel").arg(&spec.image.kernel).arg("-initrd").arg(&spec.image.initramfs);
    let arguments = spec.image.arguments;
    // A serial console costs much here, so only warnings are shown, and the early console knows that before it begins; an option that means
    // nothing gives one as soon as the kernel reads its arguments. A search of 255 buses for bridges that firmware of old did not tell of
    // (thousands of exits) would take a fifth of the time to the first module.
    command.arg("-append").arg(format!(
        "console=ttyS0 no_timer_check loglevel=5 earlycon=uart8250,io,0x3f8 mem=none pci=lastbus=0 panic=-1 mitigations=off {arguments}"
    ));
    command.args(["-serial", "stdio", "-qmp"]).arg(format!("unix:{},server=on,wait=off", socket.display()));
    Ok(command)
}

/// A network card that is with vfio-pci, and goes back when this is dropped.
pub struct Card {
    pub address: Address,
    store: Store,
    _folder: tempfile::TempDir,
}

impl Card {
    /// Takes the lab's card that is alone in its group.
    pub fn take() -> Result<Self> {
        let host = Host::at("/");
        let devices = host.devices()?;
        // On a host without an IOMMU no device has a group, and the plan below refuses it.
        let alone = devices.values().find(|d| d.class >> 8 == 0x0200 && d.group_members.len() <= 1);
        let address = alone.context("the lab has no network card in a group of its own")?.address;
        let folder = tempfile::tempdir()?;
        let store = Store::at(folder.path());
        let plan = plan(&devices, host.has_iommu(), &[address], false)?;
        bind(&host, &mut bind::Kernel, &store, &plan, None)?;
        Ok(Self { address, store, _folder: folder })
    }

    /// Gives it back now, and says what went wrong.
    pub fn give_back(&self) -> Result<()> {
        Ok(bind::release(&Host::at("/"), &mut bind::Kernel, &self.store, self.address)?)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if let Ok(Some(_)) = self.store.get(self.address) {
            if let Err(error) = self.give_back() {
                eprintln!("{error:#}");
            }
        }
    }
}
