// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU that emulates the host, and its command line.
//!
//! The host has fixed devices, so that tests can name them: behind root port 10.0 an e1000e in a group of its own (with
//! [`NETWORK_PEERS`]), behind 11.0 an NVMe disk on node 1, behind 12.0 two e1000e functions in one group, behind 13.0 an igb with these peers where QEMU has it, and at 15.0 an
//! NVMe disk that plays the host's own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::agent::{PORT_PREFIX, PORTS};
use crate::cache::Kernel;
use crate::config::{Config, Iommu};
use crate::emulator::Alive;
use crate::initramfs;
use crate::instance::CONSOLE;
use tombolo_qemu::hypervisor::{emulated_cpu, emulates_cx16};
use tombolo_qemu::version;

const DISK_BYTES: u64 = 1 << 30;

/// A QEMU binary and what it can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    pub program: PathBuf,
    /// Folders of firmware that belong to it, where it is not installed.
    pub firmware: Vec<PathBuf>,
    /// Major, minor and micro version.
    pub version: (u32, u32, u32),
}

impl Qemu {
    /// Finds out what `program` (or the installed QEMU) is.
    pub fn find(program: Option<&Path>) -> Result<Self> {
        let named = program.unwrap_or(Path::new("qemu-system-x86_64"));
        let version::Qemu { program, version } = version::Qemu::find(Some(named))?;
        Ok(Self { firmware: unpacked_firmware(&program), program, version })
    }

    /// The QEMU named, or else the installed one if it emulates SVM well, or else that of Debian's backports where it can be had.
    ///
    /// QEMU 7.2 corrupts the flags of nested guests under load: of eight that ran their kernel with all mitigations four crashed.
    pub fn choose(named: Option<&Path>) -> Result<Self> {
        let installed = Self::find(named)?;
        if named.is_some() || installed.version.0 >= 9 {
            return Ok(installed);
        }
        match crate::cache::newer_qemu().and_then(|program| Self::find(Some(&program))) {
            Ok(newer) => Ok(newer),
            Err(error) => {
                eprintln!(
                    "lab: emulating with QEMU {}.{}, under which nested guests may crash: no newer one could be had ({error:#})",
                    installed.version.0, installed.version.1
                );
                Ok(installed)
            }
        }
    }

    /// Writes the lab's initramfs and disks into its folder and returns the command that starts the emulated host.
    pub fn prepare(&self, folder: &Path, config: &Config, kernel: &Kernel) -> Result<Command> {
        let initramfs = folder.join("initramfs");
        initramfs::write_lab(&initramfs, kernel, config)?;
        for disk in Files::disks(folder) {
            File::create(&disk)?.set_len(DISK_BYTES)?;
        }
        let mut command = Command::new(&self.program);
        for folder in &self.firmware {
            command.arg("-L").arg(folder);
        }
        command.args(arguments(self, config, &Files { folder, initramfs: &initramfs, kernel }));
        Ok(command)
    }

    /// Waits for the sockets of the command ports. The agent need not be there yet: what it is sent waits in them.
    pub fn await_sockets(folder: &Path, alive: &mut Alive<'_>, deadline: Instant) -> Result<()> {
        let socket = Files::port(folder, PORTS - 1);
        while !socket.exists() {
            alive()?;
            if Instant::now() > deadline {
                bail!("QEMU opened no sockets");
            }
            // QEMU gives no sign that its sockets exist but the sockets.
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn has_igb(&self) -> bool {
        self.version >= (8, 0, 0)
    }

    /// CPUs that this QEMU emulates reliably: with two, 7.2 was seen to crash a kernel that patched its own code.
    pub fn cpus(&self, config: &Config) -> u32 {
        config.cpus.unwrap_or(if self.version.0 >= 10 { 2 } else { 1 })
    }
}

/// For a QEMU that was unpacked from its packages (…/usr/bin/qemu-system-x86_64): the firmware beside it.
fn unpacked_firmware(program: &Path) -> Vec<PathBuf> {
    let Some(usr) = program.parent().and_then(Path::parent).filter(|u| *u != Path::new("/usr")) else {
        return Vec::new();
    };
    ["share/qemu", "share/seabios", "lib/ipxe/qemu"]
        .iter()
        .map(|f| usr.join(f))
        .filter(|f| f.exists())
        .collect()
}

/// Files and sockets of one lab.
#[derive(Debug, Clone)]
pub struct Files<'a> {
    /// The lab's folder; sockets, disks and the console's log are in it.
    pub folder: &'a Path,
    /// The lab's initramfs.
    pub initramfs: &'a Path,
    /// The lab's kernel.
    pub kernel: &'a Kernel,
}

impl Files<'_> {
    /// The socket of a command port.
    pub fn port(folder: &Path, number: usize) -> PathBuf {
        folder.join(format!("port-{number}"))
    }

    /// The monitor's socket.
    pub fn monitor(folder: &Path) -> PathBuf {
        folder.join("qmp")
    }

    /// Disks, as sparse files.
    pub fn disks(folder: &Path) -> [PathBuf; 2] {
        [folder.join("disk-0"), folder.join("disk-1")]
    }
}

fn arguments(qemu: &Qemu, config: &Config, files: &Files<'_>) -> Vec<String> {
    let mut list = List::default();
    list.pair("-M", "q35,kernel-irqchip=split");
    list.pair("-accel", "tcg,thread=multi");
    // AMD's IOMMU driver may insist on cmpxchg16b. Nested guests crash under TCG with 5-level paging.
    let cx16 = emulates_cx16(qemu.version) || config.iommu == Iommu::Amd;
    list.pair("-cpu", &format!("{},-la57", emulated_cpu(cx16)));
    list.pair("-display", "none");
    list.0.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    nodes(&mut list, qemu.cpus(config), config.memory_mib);
    list.pair("-serial", &format!("file:{}", files.folder.join(CONSOLE).display()));
    list.pair("-qmp", &format!("unix:{},server=on,wait=off", Files::monitor(files.folder).display()));
    match config.iommu {
        // Interrupt remapping needs the split irqchip above; caching mode is not needed by devices that QEMU emulates itself.
        Iommu::Intel if emulates_x2apic(qemu.version) => {
            list.pair("-device", "intel-iommu,intremap=on,eim=on");
        }
        Iommu::Intel => list.pair("-device", "intel-iommu,intremap=on"),
        // With remapped interrupts the kernel finds no timer behind QEMU 10's AMD-Vi. With `pt` it translates nothing, whatever the kernel asks for.
        Iommu::Amd => list.pair("-device", "amd-iommu,intremap=off,pt=off"),
        Iommu::None => {}
    }
    let share = |tag: &str, path: &Path, read_only: bool| {
        let ro = if read_only { ",readonly=on" } else { "" };
        format!("local,path={},mount_tag={tag},security_model=none,multidevs=remap{ro}", path.display())
    };
    list.pair("-virtfs", &share("root", Path::new("/"), true));
    list.pair("-virtfs", &share("out", &files.folder.join("out"), false));
    if let Some(fresh) = &config.fresh {
        list.pair("-virtfs", &share("fresh", fresh, true));
    }
    list.pair("-device", &format!("virtio-serial-pci,bus=pcie.0,max_ports={}", PORTS + 1));
    for port in 0..PORTS {
        let path = Files::port(files.folder, port);
        list.pair("-chardev", &format!("socket,id=port{port},path={},server=on,wait=off", path.display()));
        list.pair("-device", &format!("virtserialport,chardev=port{port},name={PORT_PREFIX}{port}"));
    }
    devices(&mut list, qemu, config.iommu, files.folder);
    list.pair("-kernel", &files.kernel.image.display().to_string());
    list.pair("-initrd", &files.initramfs.display().to_string());
    let iommu = if config.iommu == Iommu::Intel { "intel_iommu=on " } else { "" };
    let more = &config.kernel_arguments;
    list.pair(
        "-append",
        &format!(
            "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable {iommu}iommu=pt mitigations=off {more}"
        ),
    );
    list.0
}

/// Returns whether this QEMU emulates x2APICs, whose registers are MSRs.
fn emulates_x2apic(version: (u32, u32, u32)) -> bool {
    version >= (9, 0, 0)
}

#[derive(Default)]
struct List(Vec<String>);

impl List {
    fn pair(&mut self, first: &str, second: &str) {
        self.0.extend([first.to_owned(), second.to_owned()]);
    }
}

/// Two nodes with half of the memory each, and the CPUs in turn.
fn nodes(list: &mut List, cpus: u32, memory_mib: u64) {
    list.pair("-smp", &format!("{cpus},sockets={cpus},cores=1,threads=1"));
    list.pair("-m", &format!("{}M", memory_mib / 2 * 2));
    for node in 0..2 {
        list.pair("-object", &format!("memory-backend-ram,id=node{node},size={}M", memory_mib / 2));
        let own = (node..cpus).step_by(2).map(|cpu| format!(",cpus={cpu}")).collect::<String>();
        list.pair("-numa", &format!("node,nodeid={node},memdev=node{node}{own}"));
    }
    list.pair("-numa", "dist,src=0,dst=1,val=20");
}

/// Whom the first card and the igb reach: 10.0.2.100 answers on port 7 by the SHA-256 of what it was sent, and sends a million numbers from port 19.
const NETWORK_PEERS: &str =
    ",guestfwd=tcp:10.0.2.100:7-cmd:sha256sum,guestfwd=tcp:10.0.2.100:19-cmd:seq 1000000";

/// The buses and slots of devices that can be passed through, with the root ports that make them: the first card's, the disk's and the pair's.
///
/// Beside AMD-Vi the first two are on the root bus itself. QEMU's knows a device by the number that its bus has before the firmware gives numbers: behind a
/// bridge that is 0, so such a device would be translated like the host bridge. The pair is behind one, since on the root bus its functions are two groups.
fn slots(list: &mut List, iommu: Iommu) -> [String; 3] {
    list.pair("-device", "pcie-root-port,id=rp3,chassis=4,bus=pcie.0,addr=12.0");
    let pair = "bus=rp3,addr=0".to_owned();
    if iommu == Iommu::Amd {
        return ["bus=pcie.0,addr=10".to_owned(), "bus=pcie.0,addr=11".to_owned(), pair];
    }
    list.pair("-device", "pcie-root-port,id=rp0,chassis=1,bus=pcie.0,addr=10.0");
    list.pair("-device", "pxb-pcie,id=pxb1,bus_nr=128,numa_node=1,bus=pcie.0,addr=11.0");
    list.pair("-device", "pcie-root-port,id=rp1,bus=pxb1,chassis=2");
    ["bus=rp0,addr=0".to_owned(), "bus=rp1,addr=0".to_owned(), pair]
}

fn devices(list: &mut List, qemu: &Qemu, iommu: Iommu, folder: &Path) {
    for net in 0..3 {
        let peers = if net == 0 { NETWORK_PEERS } else { "" };
        list.pair("-netdev", &format!("user,id=net{net},restrict=on{peers}"));
    }
    for (number, path) in Files::disks(folder).iter().enumerate() {
        list.pair(
            "-drive",
            &format!("file={},if=none,id=disk{number},format=raw,cache=unsafe", path.display()),
        );
    }
    let [card, disk, pair] = slots(list, iommu);
    list.pair("-device", &format!("e1000e,netdev=net0,{card}.0,romfile="));
    list.pair("-device", &format!("nvme,drive=disk0,serial=tombolo-pass,{disk}.0"));
    // Two functions of one endpoint, and no ACS between them: one group.
    list.pair("-device", &format!("e1000e,netdev=net1,{pair}.0,multifunction=on,romfile="));
    list.pair("-device", &format!("e1000e,netdev=net2,{pair}.1,romfile="));
    // Its virtual functions have no room in these slots of the root bus.
    if qemu.has_igb() && iommu != Iommu::Amd {
        list.pair("-netdev", &format!("user,id=net3,restrict=on{NETWORK_PEERS}"));
        list.pair("-device", "pcie-root-port,id=rp2,chassis=3,bus=pcie.0,addr=13.0");
        list.pair("-device", "igb,netdev=net3,bus=rp2,romfile=");
    }
    // Not at 14.0: AMD-Vi takes what a device there does for the southbridge's IOAPIC, and its interrupts get lost.
    list.pair("-device", "nvme,drive=disk1,serial=tombolo-host,bus=pcie.0,addr=15.0");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(version: (u32, u32, u32), config: &Config) -> String {
        let qemu = Qemu { program: "qemu".into(), firmware: vec![], version };
        let kernel = Kernel { release: "r".into(), image: "/k".into(), root: "/".into() };
        arguments(
            &qemu,
            config,
            &Files { folder: Path::new("/f"), initramfs: Path::new("/i"), kernel: &kernel },
        )
        .join(" ")
    }

    #[test]
    fn both_nodes_have_memory_whatever_the_number_of_cpus() {
        let one = line((7, 2, 22), &Config::default());
        assert!(
            one.contains("nodeid=0,memdev=node0,cpus=0") && one.contains("nodeid=1,memdev=node1 "),
            "{one}"
        );
        let two = line((10, 0, 2), &Config::default());
        assert!(two.contains("nodeid=1,memdev=node1,cpus=1"), "{two}");
    }

    #[test]
    fn igb_is_asked_for_only_where_qemu_has_it() {
        assert!(!line((7, 2, 22), &Config::default()).contains("igb"));
        assert!(!line((10, 0, 2), &Config { iommu: Iommu::Amd, ..Config::default() }).contains("igb"));
        assert!(line((10, 0, 2), &Config::default()).contains("igb"));
    }

    #[test]
    fn amds_iommu_translates_and_has_its_devices_on_the_root_bus() {
        let amd = line((10, 0, 2), &Config { iommu: Iommu::Amd, ..Config::default() });
        assert!(amd.contains("serial=tombolo-pass,bus=pcie.0,addr=11.0"), "{amd}");
        assert!(amd.contains("amd-iommu,intremap=off,pt=off"), "{amd}");
        let intel = line((10, 0, 2), &Config::default());
        assert!(intel.contains("serial=tombolo-pass,bus=rp1,addr=0.0"), "{intel}");
    }

    #[test]
    fn interrupts_reach_x2apics_where_qemu_emulates_them() {
        assert!(line((10, 0, 2), &Config::default()).contains("intremap=on,eim=on"));
        assert!(!line((7, 2, 22), &Config::default()).contains("eim"));
    }

    #[test]
    fn a_host_without_an_iommu_has_none() {
        let none = line((10, 0, 2), &Config { iommu: Iommu::None, ..Config::default() });
        assert!(!none.contains("-iommu") && !none.contains("intel_iommu"), "{none}");
        assert!(line((10, 0, 2), &Config { iommu: Iommu::Amd, ..Config::default() }).contains("amd-iommu"));
    }
}
