// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Bochs that emulates a host with Intel VMX, EPT and VMFUNC, and what it starts from.
//!
//! Bochs has no virtio and loads no kernel itself: it boots a CD ([`crate::iso`]), which is also the lab's root file system. The
//! kernel's console is its first serial port; on its second the agent says that it is ready. Clients reach the agent over
//! an e1000 card and Bochs' own user-mode network, which forwards one port of the loopback interface and lets nothing out.
//! There is no screen: of Bochs' displays the curses one needs the least, and its terminal is /dev/null (fetch.sh).
//!
//! Debian 12 has no Bochs with VMFUNC, so on every release the lab takes Debian 13's, unpacked, with the loader and libraries of that release.

use std::fs::{self, File};
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::agent::{Status, TCP_PORT};
use crate::cache::{self, Kernel};
use crate::carry::Carried;
use crate::config::Config;
use crate::emulator::Alive;
use crate::instance::CONSOLE;
use crate::progress::Progress;
use crate::protocol::Nonce;
use crate::{initramfs, iso};

/// Bochs' own messages, in the lab's folder.
pub const LOG: &str = "bochs.log";
/// The lab's address in the network that Bochs emulates.
pub const GUEST_ADDRESS: &str = "10.0.2.15";

const STATUS: &str = "status";
const ADDRESS: &str = "address";

/// Below the ports that the kernel chooses for sockets without a port.
const FORWARDED_PORTS: std::ops::Range<u16> = 20_000..32_000;

/// nosmp and tsc=reliable spare the kernel calibrations that fail where time is counted in instructions; reboot=triple makes a
/// panic the end of Bochs.
const KERNEL_ARGUMENTS: &str = "console=ttyS0,115200 nokaslr mitigations=off nosmp no_timer_check tsc=reliable no5lvl random.trust_cpu=on \
     rcupdate.rcu_expedited=1 lsm=capability panic=-1 reboot=triple";

/// Bochs, unpacked from Debian's packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bochs {
    tree: PathBuf,
    /// As the package says it.
    pub version: String,
}

/// The address of a lab's agent from outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// A TCP port of the loopback interface.
    pub port: u16,
    /// The token that a client must send first.
    pub token: Nonce,
}

impl Address {
    /// The address of the lab in `folder`; None where clients come by sockets in the folder.
    pub fn of(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(ADDRESS);
        match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).with_context(|| format!("reading {}", path.display()))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
        }
    }

    fn fresh() -> Result<Self> {
        let mut random = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut random).context("reading /dev/urandom")?;
        let (token, rest) = random.split_at(16);
        let start = usize::from(u16::from_le_bytes([rest[0], rest[1]]));
        let ports: Vec<u16> = FORWARDED_PORTS.collect();
        let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let port = ports.iter().cycle().skip(start % ports.len()).take(ports.len()).copied().find(free);
        Ok(Self {
            port: port
                .with_context(|| format!("no TCP port of this machine in {FORWARDED_PORTS:?} is free"))?,
            token: token.try_into().context("half of the random bytes")?,
        })
    }
}

/// The status that the lab in `folder` has reported; `None` until it is ready.
pub fn status(folder: &Path) -> Result<Option<Status>> {
    let path = folder.join(STATUS);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("reading {}", path.display()))?,
    };
    // Bochs writes byte by byte.
    let Some((line, _)) = text.split_once('\n') else { return Ok(None) };
    serde_json::from_str(line).map(Some).with_context(|| format!("the lab's agent said {line:?}"))
}

impl Bochs {
    /// Debian 13's Bochs from the cache, or else fetched now.
    pub fn fetched() -> Result<Self> {
        let tree = cache::bochs().context(
            "no Bochs for the lab with VMX: it is Debian 13's package bochs, which could not be fetched",
        )?;
        let version = tree.join("version");
        let version =
            fs::read_to_string(&version).with_context(|| format!("reading {}", version.display()))?;
        Ok(Self { version: version.trim().to_owned(), tree })
    }

    /// A program of the unpacked packages, run with their loader and libraries whatever this machine's are.
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.tree.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(self.libraries()).arg(self.tree.join("usr/bin").join(name));
        command
    }

    /// A file of the unpacked packages.
    pub fn file(&self, path: &str) -> PathBuf {
        self.tree.join(path)
    }

    fn libraries(&self) -> PathBuf {
        self.file("usr/lib/x86_64-linux-gnu")
    }

    /// Writes the CD and Bochs' configuration into the lab's folder and returns the command that starts the emulated host.
    pub fn prepare(&self, folder: &Path, config: &Config, kernel: &Kernel) -> Result<Command> {
        let address = Address::fresh()?;
        let initramfs = folder.join("initramfs");
        initramfs::write_vmx_lab(&initramfs, kernel, config, &address.token)?;
        let carried = Carried::for_lab(config, kernel)?;
        let arguments = format!("{KERNEL_ARGUMENTS} {}", config.kernel_arguments);
        iso::write(
            self,
            folder,
            &iso::Boot { kernel: &kernel.image, initramfs: &initramfs, arguments: &arguments },
            &carried,
        )?;
        fs::write(folder.join("network"), network(address.port))?;
        fs::write(folder.join("bochsrc"), self.configuration(folder, config.memory_mib))?;
        fs::write(folder.join(ADDRESS), serde_json::to_vec(&address)?)?;
        let mut command = self.program("bochs-bin");
        command.args(["-q", "-f"]).arg(folder.join("bochsrc"));
        command.env("LTDL_LIBRARY_PATH", self.libraries().join("bochs/plugins"));
        command.env("BXSHARE", self.file("usr/share/bochs"));
        command.envs([("TERM", "vt100"), ("LINES", "25"), ("COLUMNS", "80"), ("LC_ALL", "C")]);
        Ok(command)
    }

    fn configuration(&self, folder: &Path, memory_mib: u64) -> String {
        let folder = folder.display();
        let bios = self.file("usr/share/bochs/BIOS-bochs-latest");
        let vga_bios = self.file("usr/share/vgabios/vgabios.bin");
        // ips is more than any machine reaches: time in the lab passes slower than outside while it works, and as fast while it waits (slowdown).
        // Every read of a register that Bochs does not know is an error of the processor, and a guest's kernel reads one all the time.
        format!(
            "config_interface: textconfig\n\
             display_library: term\n\
             memory: guest={memory_mib}, host={memory_mib}\n\
             romimage: file=\"{bios}\", options=fastboot\n\
             vgaromimage: file=\"{vga_bios}\"\n\
             cpu: model=corei7_haswell_4770, count=1, ips=200000000, reset_on_triple_fault=0, ignore_bad_msrs=1\n\
             clock: sync=slowdown, time0=utc\n\
             pci: enabled=1, chipset=i440fx\n\
             ata0-master: type=cdrom, path=\"{folder}/{image}\", status=inserted\n\
             boot: cdrom\n\
             com1: enabled=1, mode=file, dev=\"{folder}/{CONSOLE}\"\n\
             com2: enabled=1, mode=file, dev=\"{folder}/{STATUS}\"\n\
             e1000: enabled=1, mac=52:54:00:12:34:56, ethmod=slirp, script=\"{folder}/network\"\n\
             speaker: enabled=0\n\
             sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy\n\
             log: \"{folder}/{LOG}\"\n\
             panic: action=fatal\n\
             error: action=report, cpu0=ignore\n\
             info: action=ignore\n\
             debug: action=ignore\n",
            bios = bios.display(),
            vga_bios = vga_bios.display(),
            image = iso::NAME,
        )
    }

    /// Waits for the agent's word, showing what the kernel says.
    pub fn await_status(folder: &Path, alive: &mut Alive<'_>, deadline: Instant) -> Result<()> {
        let mut progress = Progress::begin("booting Debian under Bochs, which takes about a minute");
        loop {
            if let Some(status) = status(folder)? {
                drop(progress);
                return check(&status);
            }
            alive()?;
            if Instant::now() > deadline {
                bail!("its agent said nothing within the time that a boot may take");
            }
            progress.show_end_of(&folder.join(CONSOLE));
            // Bochs gives no sign of what happens in it but the files that it writes.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn check(status: &Status) -> Result<()> {
    if !status.kvm {
        bail!("kvm-intel found no VMX in it");
    }
    if !status.eptp_switching() {
        bail!("its processor has no EPTP switching (IA32_VMX_VMFUNC is {:#x})", status.vm_functions);
    }
    Ok(())
}

/// The user-mode network: nothing gets out, and one port of this machine leads to the agent.
fn network(port: u16) -> String {
    format!("# slirp config\nrestricted = 1\nhostfwd = tcp:127.0.0.1:{port}-{GUEST_ADDRESS}:{TCP_PORT}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lab_is_ready_when_its_agent_has_said_a_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(status(folder.path()).unwrap(), None);
        for half in ["", "{\"kvm\":true,\"vm_fun", "{\"kvm\":true,\"vm_functions\":1}\r"] {
            fs::write(folder.path().join(STATUS), half).unwrap();
            assert_eq!(status(folder.path()).unwrap(), None, "{half:?}");
        }
        fs::write(folder.path().join(STATUS), "{\"kvm\":true,\"vm_functions\":1}\r\n").unwrap();
        assert_eq!(status(folder.path()).unwrap(), Some(Status { kvm: true, vm_functions: 1 }));
    }

    #[test]
    fn a_processor_without_eptp_switching_is_no_lab() {
        assert!(check(&Status { kvm: true, vm_functions: 3 }).is_ok());
        assert!(check(&Status { kvm: true, vm_functions: 0 }).unwrap_err().to_string().contains("EPTP"));
        assert!(
            check(&Status { kvm: false, vm_functions: 1 }).unwrap_err().to_string().contains("kvm-intel")
        );
    }

    #[test]
    fn two_labs_have_two_tokens_and_clients_find_them() {
        let (one, two) = (Address::fresh().unwrap(), Address::fresh().unwrap());
        assert_ne!(one.token, two.token);
        assert!(FORWARDED_PORTS.contains(&one.port));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Address::of(folder.path()).unwrap(), None);
        fs::write(folder.path().join(ADDRESS), serde_json::to_vec(&one).unwrap()).unwrap();
        assert_eq!(Address::of(folder.path()).unwrap(), Some(one));
    }
}
