// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's command line for one VM. Everything that QEMU shares with the supervisor comes by inherited descriptors: zones
//! (`/proc/self/fd/N`), monitor, console, agent and doorbells (connected sockets); so nothing has a name to be left behind.

use std::ffi::OsString;
use std::os::fd::RawFd;

use anyhow::Context;

use super::{Hypervisor, Qemu};
use crate::compose::{Share, VmSpec};
use crate::guest::kit::Boot;
use crate::machine::disks::Drive;
use crate::machine::growth::MEMORY;
use crate::machine::placement;
use crate::project::network::Nic;
use tombolo_passthrough::bypass::{PORT, PORT_READS};
use tombolo_start::layout::Layout;
use tombolo_topology::plan::VmPlan;

/// Address space for zones that are attached later, in bytes.
const HOTPLUG_ROOM: u64 = 64 << 30;
/// Interrupt vectors of a doorbell.
pub const DOORBELL_VECTORS: usize = tombolo_zone::doorbell::VECTORS;
pub const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// A guest that may get memory above 4 GiB reserves 64 MiB of bounce buffers for devices that can't reach it. Only the host's devices could be such
/// ones; 8 MiB are left for what the user's own arguments add.
const FEW_BOUNCE_BUFFERS: &str = " swiotlb=4096";

/// A guest of the guest kit loads the module for bypassed devices.
const BYPASS: &str = " tombolo.bypass";

/// One zone as a VM sees it.
#[derive(Clone, Debug)]
pub struct ZoneDevice {
    /// The zone's name, and its devices' ids.
    pub name: String,
    /// The zone's identity.
    pub uuid: String,
    /// The zone's memory, as numbered in QEMU.
    pub memory: RawFd,
    /// Its size in bytes.
    pub size: u64,
    /// The VM has no right to write to it.
    pub read_only: bool,
    /// A socket connected to the zone's ivshmem server, as numbered in QEMU.
    pub doorbell: RawFd,
}

/// The parts of a command line.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The VM's name.
    pub name: &'a str,
    /// The VM's table of the compose file.
    pub spec: &'a VmSpec,
    pub qemu: &'a Qemu,
    pub hypervisor: Hypervisor,
    /// Kernel and initramfs; `None` boots the disk.
    pub boot: Option<Boot>,
    /// Connected socket for the monitor.
    pub monitor: RawFd,
    /// Connected socket for the serial console.
    pub console: RawFd,
    /// Connected socket for the guest agent.
    pub agent: RawFd,
    /// The parts in which memory arrives.
    pub memory: Layout,
    pub zones: Vec<ZoneDevice>,
    /// Networks.
    pub nics: &'a [Nic],
    /// Disks, in the guest's order.
    pub drives: &'a [Drive],
    /// The part of the host that the VM lies on.
    pub placement: Option<&'a VmPlan>,
    /// Connected socket for the requests of a guest with bypassed devices.
    pub bypass: Option<RawFd>,
}

/// A command line under construction.
struct CommandLine(Vec<OsString>);

impl CommandLine {
    fn add(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.extend([option.into(), value.into()]);
    }

    fn add_all<Option: AsRef<str>>(&mut self, pairs: impl IntoIterator<Item = (Option, String)>) {
        for (option, value) in pairs {
            self.add(option.as_ref(), value);
        }
    }
}

/// The arguments, without the program.
///
/// # Errors
/// This QEMU can't express the part of the host that the VM lies on.
pub fn arguments(plan: &Plan<'_>) -> anyhow::Result<Vec<OsString>> {
    let mut line = CommandLine(Vec::new());
    line.add("-name", format!("guest=tombolo-{},debug-threads=on", plan.name));
    add_machine(&mut line, plan)?;
    // Devices of a VM that lies on a part of the host are behind its root complexes, at the end.
    let devices = plan.spec.devices.iter().filter(|_| plan.placement.is_none());
    for (n, device) in devices.enumerate() {
        line.add("-device", format!("vfio-pci,id=device{n},host={}", device.address));
    }
    add_channels(&mut line, plan);
    if let Some(port) = plan.bypass {
        line.add("-chardev", format!("socket,id=bypass,fd={port}"));
        line.add("-device", format!("isa-debugcon,iobase={PORT:#x},readback={PORT_READS:#x},chardev=bypass"));
    }
    plan.zones.iter().for_each(|zone| line.add_all(zone_arguments(zone)));
    for (n, nic) in plan.nics.iter().enumerate() {
        line.add_all(nic_arguments(n, nic, plan));
    }
    for port in 0..plan.spec.hotplug_ports {
        line.add("-device", format!("pcie-root-port,id=hp{port},chassis={},slot={}", port + 1, port + 1));
    }
    for (n, share) in plan.spec.share.iter().enumerate() {
        line.add_all(share_arguments(n, share));
    }
    for (n, drive) in plan.drives.iter().enumerate() {
        // QEMU gives a kernel that it loads itself the first place.
        line.add_all(drive.arguments(n == 0 && plan.boot.is_none()));
    }
    if let Some(boot) = &plan.boot {
        add_boot(&mut line, plan, boot)?;
    }
    line.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny");
    line.0.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(OsString::from));
    line.0.extend(["-display", "none", "-vga", "none"].map(OsString::from));
    line.0.extend(plan.spec.qemu_args.iter().map(OsString::from));
    if let Some(placed) = plan.placement {
        line.add_all(placement::root_complexes(placed, plan.qemu, plan.hypervisor));
    }
    Ok(line.0)
}

/// Adds the machine, its CPUs and its memory.
fn add_machine(line: &mut CommandLine, plan: &Plan<'_>) -> anyhow::Result<()> {
    let Layout { boot: memory, grown, block, .. } = plan.memory;
    let zones: u64 = plan.zones.iter().map(|z| z.size).sum();
    line.add("-machine", "q35,usb=off,vmport=off");
    let [accel, accel_value, cpu, cpu_value] = plan.hypervisor.arguments(plan.qemu);
    line.add(accel, accel_value);
    // The room for zones must be known at start; it costs address space only.
    let most = (memory + grown + zones).next_multiple_of(1 << 30) + HOTPLUG_ROOM;
    line.add("-m", format!("size={}M,maxmem={}M", memory >> 20, most >> 20));
    // A network's switch maps its guests' memory, and so does what the user's own arguments may add (virtiofs). Anonymous memory comes in
    // huge pages on every host; a memfd does not.
    let private = plan.nics.is_empty() && plan.spec.qemu_args.is_empty();
    let (backend, share) =
        if private { ("memory-backend-ram", "") } else { ("memory-backend-memfd", ",share=on") };
    if let Some(placed) = plan.placement {
        line.add_all(placement::arguments(placed, plan.spec, plan.qemu, plan.hypervisor, !private)?);
    } else {
        line.add("-machine", "memory-backend=ram");
        line.add(cpu, cpu_value);
        line.add("-smp", plan.hypervisor.processors(plan.spec.cpus));
        line.add("-object", format!("{backend},id=ram,size={}M{share}", memory >> 20));
    }
    if grown > 0 {
        line.add("-object", format!("{backend},id={MEMORY}-memory,size={grown}{share},reserve=off"));
        line.add(
            "-device",
            format!("virtio-mem-pci,id={MEMORY},memdev={MEMORY}-memory,block-size={block},requested-size=0"),
        );
    }
    Ok(())
}

/// Adds the channels between the supervisor and the VM, and the devices that every VM has.
fn add_channels(line: &mut CommandLine, plan: &Plan<'_>) {
    line.add("-chardev", format!("socket,id=monitor,fd={}", plan.monitor));
    line.add("-mon", "chardev=monitor,mode=control");
    line.add("-chardev", format!("socket,id=console,fd={}", plan.console));
    line.add("-serial", "chardev:console");
    line.add("-device", "virtio-serial-pci,id=ports");
    line.add("-chardev", format!("socket,id=agent,fd={}", plan.agent));
    // QEMU tells of a port's opening only where the port has an id.
    line.add("-device", format!("virtserialport,id=agent,chardev=agent,name={AGENT_PORT}"));
    line.add("-device", "virtio-rng-pci");
    // A kernel that panics says so, whatever its command line makes of a panic; QEMU ends then.
    line.add("-device", "pvpanic");
}

/// Adds the kernel that QEMU loads itself, its initramfs and its command line.
fn add_boot(line: &mut CommandLine, plan: &Plan<'_>, boot: &Boot) -> anyhow::Result<()> {
    line.add("-kernel", &boot.kernel);
    if let Some(initrd) = &boot.initrd {
        line.add("-initrd", initrd);
    }
    let mut cmdline = "console=ttyS0 quiet panic=-1".to_owned();
    if plan.memory.grown > 0 {
        cmdline.push(' ');
        cmdline.push_str(tombolo_start::guest::KERNEL_ARGUMENTS);
    }
    cmdline.push_str(plan.hypervisor.kernel_arguments(plan.qemu, plan.spec.cpus));
    if plan.spec.devices.is_empty() {
        cmdline.push_str(FEW_BOUNCE_BUFFERS);
    }
    if plan.bypass.is_some() {
        cmdline.push_str(BYPASS);
    }
    if let Some(root) = &plan.spec.root {
        let zone = plan.zones.iter().find(|zone| zone.name == root.zone);
        let zone =
            zone.with_context(|| format!("vm.{}.root: the zone '{}' is not there", plan.name, root.zone))?;
        cmdline.push_str(&format!(" tombolo.root={}:{}", zone.uuid.replace('-', ""), root.path));
    }
    if let Some(more) = &plan.spec.cmdline {
        cmdline.push(' ');
        cmdline.push_str(more);
    }
    line.add("-append", cmdline);
    Ok(())
}

/// A folder of the host, over 9p.
fn share_arguments(n: usize, share: &Share) -> [(&'static str, String); 2] {
    let read_only = if share.readonly { ",readonly=on" } else { "" };
    let path = share.path.to_string_lossy().replace(',', ",,");
    let tag = share.tag.replace(',', ",,");
    [
        ("-fsdev", format!("local,id=share{n},path={path},security_model=none,multidevs=remap{read_only}")),
        ("-device", format!("virtio-9p-pci,fsdev=share{n},mount_tag={tag}")),
    ]
}

/// A port of a switch: QEMU connects again by itself when the switch has been away.
fn nic_arguments(n: usize, nic: &Nic, plan: &Plan<'_>) -> [(&'static str, String); 3] {
    let path = nic.socket.to_string_lossy().replace(',', ",,");
    let reconnect = if plan.qemu.version >= (9, 2, 0) { "reconnect-ms=200" } else { "reconnect=1" };
    let (mac, queues, mtu) = (nic.lease.mac, nic.queues, nic.mtu);
    // A vector for each queue, one for changes and one for the control queue. Old QEMUs crash under TCG when a guest masks
    // a vector of a vhost-user device, so their guests get none and use the pin.
    let old = plan.hypervisor == Hypervisor::Tcg && plan.qemu.version < (9, 0, 0);
    let vectors = if old { 0 } else { 2 * queues + 2 };
    let multiqueue = if queues > 1 { ",mq=on" } else { "" };
    [
        ("-chardev", format!("socket,id=port{n},path={path},{reconnect}")),
        ("-netdev", format!("vhost-user,id=net{n},chardev=port{n},queues={queues}")),
        (
            "-device",
            format!(
                "virtio-net-pci,id=nic{n},netdev=net{n},mac={mac},host_mtu={mtu},romfile=,vectors={vectors}{multiqueue}"
            ),
        ),
    ]
}

fn zone_arguments(zone: &ZoneDevice) -> [(&'static str, String); 4] {
    let ZoneDevice { name, memory, size, .. } = zone;
    let read_only = if zone.read_only { ",readonly=on" } else { "" };
    [
        (
            "-object",
            format!(
                "memory-backend-file,id=zone-{name},mem-path=/proc/self/fd/{memory},size={size},share=on{read_only}"
            ),
        ),
        ("-device", format!("virtio-pmem-pci,id=pmem-{name},memdev=zone-{name}")),
        ("-chardev", format!("socket,id=bell-{name},fd={}", zone.doorbell)),
        (
            "-device",
            format!("ivshmem-doorbell,id=doorbell-{name},chardev=bell-{name},vectors={DOORBELL_VECTORS}"),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn line(spec: &str, hypervisor: Hypervisor, zones: Vec<ZoneDevice>) -> String {
        line_of((10, 0, 2), spec, hypervisor, zones)
    }

    fn line_of(
        version: (u32, u32, u32),
        spec: &str,
        hypervisor: Hypervisor,
        zones: Vec<ZoneDevice>,
    ) -> String {
        let spec: VmSpec = toml::from_str(spec).unwrap();
        let boot = (spec.disk.is_none() || spec.kernel.is_some())
            .then(|| Boot { kernel: "/k".into(), initrd: Some("/i".into()) });
        let qemu = Qemu { program: "qemu".into(), version };
        let memory = crate::machine::growth::layout("a", &spec).unwrap();
        let dir = crate::project::state::StateDir::at("/nonexistent".into());
        let drives = crate::machine::disks::drives(&dir, "a", &spec, &[]).unwrap();
        let plan = Plan {
            name: "a",
            spec: &spec,
            qemu: &qemu,
            hypervisor,
            boot,
            monitor: 7,
            console: 8,
            agent: 9,
            memory,
            zones,
            nics: &[],
            drives: &drives,
            placement: None,
            bypass: spec.bypassed().first().map(|_| 10),
        };
        let args: Vec<String> =
            arguments(&plan).unwrap().into_iter().map(|a| a.into_string().unwrap()).collect();
        args.join(" ")
    }

    #[test]
    fn memory_is_shared_where_another_process_may_map_it() {
        let own = line("memory = \"1G\"\nqemu_args = [\"-S\"]", Hypervisor::Tcg, vec![]);
        assert!(own.contains("memory-backend-memfd,id=ram,size=1024M,share=on"), "{own}");
        let alone = line("memory = \"1G\"", Hypervisor::Tcg, vec![]);
        assert!(alone.contains("memory-backend-ram,id=ram,size=1024M "), "{alone}");
    }

    #[test]
    fn only_a_vm_with_a_bypassed_device_has_the_port_and_the_word_for_its_guest() {
        let bypassed =
            "devices = [{ address = \"01:00.0\", bypass = true }]\nstart = \"slow\"\nmemory = \"512M\"";
        let with = line(bypassed, Hypervisor::Kvm, vec![]);
        assert!(
            with.contains("-chardev socket,id=bypass,fd=10 -device isa-debugcon,iobase=0x5b0,readback=0x7b,chardev=bypass"),
            "{with}"
        );
        assert!(with.contains(" tombolo.bypass"), "{with}");
        let without = line("devices = [\"01:00.0\"]\nstart = \"slow\"", Hypervisor::Kvm, vec![]);
        assert!(!without.contains("bypass") && !without.contains("debugcon"), "{without}");
    }

    #[test]
    fn only_under_kvm_a_vm_on_a_part_of_the_host_is_told_that_its_cpus_are_its_own() {
        let placed = |hypervisor| {
            let spec: VmSpec =
                toml::from_str("topology = \"host\"\nisolate = true\nmemory = \"1G\"").unwrap();
            let host =
                tombolo_topology::read::synthetic("package:1 [numa(memory=16GiB)] core:4 pu:1").unwrap();
            let requests = placement::requests([("a", &spec)].into_iter());
            let rules = tombolo_topology::plan::Rules { reserve: 1, ..Default::default() };
            let plan = tombolo_topology::plan::plan(&host, &rules, &requests).unwrap();
            let qemu = Qemu { program: "qemu".into(), version: (7, 2, 0) };
            let list = placement::arguments(&plan.vms[0], &spec, &qemu, hypervisor, false).unwrap();
            list.iter().map(|(option, value)| format!("{option} {value}")).collect::<Vec<_>>().join(" ")
        };
        let (kvm, tcg) = (placed(Hypervisor::Kvm), placed(Hypervisor::Tcg));
        assert!(kvm.contains(",kvm-hint-dedicated=on") && kvm.contains("-overcommit cpu-pm=on"), "{kvm}");
        assert!(
            !tcg.contains("hint-dedicated") && !tcg.contains("cpu-pm") && !tcg.contains("invtsc"),
            "{tcg}"
        );
    }

    /// One that lies on a part of the host with a device, and has devices that name no bus.
    #[test]
    fn qemu_starts_a_vm_whose_device_is_behind_a_root_complex() {
        use std::io::{Read, Write};
        use std::os::fd::AsRawFd;
        use std::os::unix::net::UnixStream;
        use std::process::{Command, Stdio};
        let spec: VmSpec = toml::from_str(
            "topology = \"host\"\ncpus = 1\nmemory = \"64M\"\ndevices = [\"0000:81:00.0\"]\nhotplug_ports = 1\n\
             qemu_args = [\"-S\", \"-device\", \"virtio-balloon-pci\"]",
        )
        .unwrap();
        let mut host =
            tombolo_topology::read::synthetic("package:1 [numa(memory=16GiB)] core:1 pu:1").unwrap();
        host.roots = vec![tombolo_topology::model::Root {
            domain: 0,
            bus: 0x80,
            node: Some(0),
            devices: vec![tombolo_topology::model::Device {
                address: "0000:81:00.0".into(),
                ..Default::default()
            }],
        }];
        let requests = placement::requests([("a", &spec)].into_iter());
        let placed = tombolo_topology::plan::plan(&host, &Default::default(), &requests).unwrap();
        let channels: [(UnixStream, UnixStream); 3] = std::array::from_fn(|_| UnixStream::pair().unwrap());
        let of_qemu = channels.each_ref().map(|(_, other)| {
            rustix::io::fcntl_setfd(other, rustix::io::FdFlags::empty()).unwrap();
            other.as_raw_fd()
        });
        let qemu = Qemu::find(None).expect("the package qemu-system-x86");
        let plan = Plan {
            name: "a",
            spec: &spec,
            qemu: &qemu,
            hypervisor: Hypervisor::Tcg,
            boot: None,
            monitor: of_qemu[0],
            console: of_qemu[1],
            agent: of_qemu[2],
            memory: crate::machine::growth::layout("a", &spec).unwrap(),
            zones: vec![],
            nics: &[],
            drives: &[],
            placement: Some(&placed.vms[0]),
            bypass: None,
        };
        let mut args = arguments(&plan).unwrap();
        // Stands in for the host's device, which this machine need not have.
        let device = args
            .iter_mut()
            .find(|word| **word == *"vfio-pci,id=device-0000-81-00.0,host=0000:81:00.0,bus=root0.0");
        *device.expect("the device is behind its root complex") = "e1000e,romfile=,bus=root0.0".into();
        let mut child = Command::new(&qemu.program)
            .args(&args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let [(mut monitor, other), ..] = channels;
        drop(other);
        let ask = monitor.write_all(b"{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"quit\"}\n");
        let mut said = String::new();
        // A QEMU that refuses its arguments resets the connection.
        let _ = monitor.read_to_string(&mut said);
        let mut refused = String::new();
        child.stderr.take().unwrap().read_to_string(&mut refused).unwrap();
        assert!(child.wait().unwrap().success() && ask.is_ok(), "{refused}");
        assert!(said.contains("\"QMP\""), "{said}");
    }

    #[test]
    fn a_plain_vm_has_two_cpus_its_kernel_and_nothing_with_a_name_in_the_file_system() {
        let line = line("", Hypervisor::Tcg, vec![]);
        for part in [
            "-accel tcg,thread=multi -m size=512M,maxmem=66560M",
            "-machine memory-backend=ram -cpu max,-erms,-fsrm -smp 2 -object memory-backend-ram,id=ram",
            "socket,id=monitor,fd=7",
            "socket,id=console,fd=8",
            "socket,id=agent,fd=9",
            "-kernel /k -initrd /i -append console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable swiotlb=4096",
            "-no-reboot",
            "pcie-root-port,id=hp3,chassis=4,slot=4",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("path="), "{line}");
    }

    #[test]
    fn a_vm_with_a_device_has_a_part_of_its_memory_at_start_and_the_rest_to_grow() {
        let line = line("memory = \"4G\"\ndevices = [\"01:00.0\"]", Hypervisor::Kvm, vec![]);
        for part in [
            "-m size=512M,maxmem=69632M",
            "memory-backend-ram,id=vmem0-memory,size=3758096384,reserve=off",
            "virtio-mem-pci,id=vmem0,memdev=vmem0-memory,block-size=16777216,requested-size=0",
            "vfio-pci,id=device0,host=0000:01:00.0",
            "memhp_default_state=online_kernel",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn a_zone_is_a_pmem_device_and_a_doorbell() {
        let zone = ZoneDevice {
            name: "z".into(),
            uuid: "u".into(),
            memory: 11,
            size: 64 << 20,
            read_only: false,
            doorbell: 12,
        };
        let line = line(
            "",
            Hypervisor::Kvm,
            vec![zone.clone(), ZoneDevice { name: "r".into(), read_only: true, ..zone }],
        );
        assert!(line.contains("-accel kvm ") && line.contains("-cpu host "), "{line}");
        assert!(line.contains("memory-backend-file,id=zone-z,mem-path=/proc/self/fd/11,size=67108864,share=on -device virtio-pmem-pci,id=pmem-z,memdev=zone-z"), "{line}");
        assert!(line.contains(
            "-chardev socket,id=bell-z,fd=12 -device ivshmem-doorbell,id=doorbell-z,chardev=bell-z,vectors=1"
        ));
        assert!(line.contains("id=zone-r,mem-path=/proc/self/fd/11,size=67108864,share=on,readonly=on"));
    }

    #[test]
    fn a_network_is_a_port_of_a_switch_that_may_come_and_go() {
        let spec: VmSpec = toml::from_str("").unwrap();
        let of = |version, hypervisor, queues| {
            let qemu = Qemu { program: "qemu".into(), version };
            let lease = crate::compose::network::Lease {
                mac: crate::compose::network::Mac([2, 0, 0, 0, 0, 1]),
                address: None,
                address6: None,
                dhcp: false,
            };
            let nic = Nic {
                net: "lan".into(),
                socket: "/x,y".into(),
                lease,
                queues,
                mtu: 1500,
                gateway: None,
                names: vec![],
            };
            let nics = [nic];
            let plan = Plan {
                name: "a",
                spec: &spec,
                qemu: &qemu,
                hypervisor,
                boot: None,
                monitor: 7,
                console: 8,
                agent: 9,
                memory: crate::machine::growth::layout("a", &spec).unwrap(),
                zones: vec![],
                nics: &nics,
                drives: &[],
                placement: None,
                bypass: None,
            };
            let args: Vec<String> =
                arguments(&plan).unwrap().into_iter().map(|a| a.into_string().unwrap()).collect();
            args.join(" ")
        };
        let new = of((10, 0, 2), Hypervisor::Kvm, 2);
        assert!(new.contains("socket,id=port0,path=/x,,y,reconnect-ms=200 -netdev vhost-user,id=net0,chardev=port0,queues=2"), "{new}");
        assert!(new.contains("mac=02:00:00:00:00:01,host_mtu=1500,romfile=,vectors=6,mq=on"), "{new}");
        let old = of((7, 2, 22), Hypervisor::Tcg, 1);
        assert!(old.contains("reconnect=1 ") && old.contains("romfile=,vectors=0 "), "{old}");
    }

    #[test]
    fn a_disk_boots_by_itself_and_its_format_is_told_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let disk: PathBuf = dir.path().join("a,b.qcow2");
        std::fs::write(&disk, b"QFI\xfb\0\0\0\x03").unwrap();
        let spec = format!("disk = \"{}\"\nsnapshot = true\nqemu_args = [\"-S\"]", disk.display());
        let line = line(&spec, Hypervisor::Tcg, vec![]);
        assert!(line.contains("a,,b.qcow2,if=none,id=disk,format=qcow2,snapshot=on"), "{line}");
        assert!(line.contains("virtio-blk-pci,drive=disk,bootindex=0 "), "{line}");
        assert!(line.ends_with("-S") && !line.contains("-kernel"));
        // QEMU refuses a second 'first': the kernel is.
        let both = self::line(&format!("kernel = \"/k\"\n{spec}"), Hypervisor::Tcg, vec![]);
        assert!(both.contains("-kernel /k") && !both.contains("bootindex"), "{both}");
    }
}
