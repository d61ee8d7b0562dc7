// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The manual page tombolo.toml(5). A test compares its keys with those that the file's parser knows.

use roff::{Roff, bold, italic, roman};

/// A table of the file.
struct Table {
    header: &'static str,
    about: &'static str,
    keys: &'static [Key],
}

/// A key: name, an example of its value or its default, and what it means.
type Key = (&'static str, &'static str, &'static str);

const TABLES: [Table; 13] = [
    Table {
        header: "Top level",
        about: "Paths are relative to the file. An unknown key is an error.",
        keys: &[
            ("name", "\"demo\"", "Name of the project. Default: the name of the file's folder."),
            ("overcommit", "false", "VMs and zones may be larger together than the memory that is left."),
            (
                "reserve",
                "0",
                "Processors of each NUMA node that stay with the host, where VMs say topology; QEMU's own threads run there, and so do the switches and accelerator servers of such VMs and the interrupts of their devices.",
            ),
            ("qemu", "\"qemu-system-x86_64\"", "The QEMU program. Default: $TOMBOLO_QEMU, then the PATH."),
            ("zone", "[zone.NAME]", "Zones by name."),
            ("net", "[net.NAME]", "Networks by name."),
            ("accel", "[accel.NAME]", "Accelerators by name."),
            ("vm", "[vm.NAME]", "VMs by name."),
        ],
    },
    Table {
        header: "[zone.NAME]",
        about: "Memory that VMs and the host share.",
        keys: &[
            ("size", "\"512M\"", "A multiple of 2M, at least 8M. Required."),
            (
                "backing",
                "\"memfd\"",
                "\"memfd\"; \"hugetlb\": huge pages that are reserved; or the path of a file, with a '/' in it, which persists.",
            ),
            ("files", "false", "Make a file system in it when it is new."),
        ],
    },
    Table {
        header: "[net.NAME]",
        about: "A network with a switch of its own.",
        keys: &[
            (
                "uplink",
                "none",
                "Where frames go that are for no VM: \"user\" (a passt for each VM, which reaches no other VM here), { tap = \"tap0\" } or { interface = \"eth1\" }. The device must exist.",
            ),
            (
                "host_loopback",
                "false",
                "With uplink = \"user\": VMs reach what listens on the host's 127.0.0.1 and ::1, at their gateway's address.",
            ),
            (
                "subnet",
                "\"10.86.N.0/24\"",
                "Addresses of the VMs. Default without uplink: by the network's place in the file, kept while the network runs.",
            ),
            (
                "subnet6",
                "none",
                "A prefix such as \"fd00:86::/64\": the switch advertises it, and VMs make their IPv6 addresses of it and their MACs.",
            ),
            (
                "multicast",
                "\"snoop\"",
                "Where frames for a multicast group go: \"snoop\": to VMs that have joined it, where a multicast router asks for them, elsewhere to all; \"query\": to VMs that have joined it, for which the switch asks; \"flood\": to all.",
            ),
            ("gateway", "none", "The VMs' way out of the subnet."),
            (
                "dhcp",
                "false",
                "The switch gives VMs that ask for it their addresses; they need no agent then.",
            ),
            ("mtu", "1500", "Largest IP packet."),
            ("workers", "1", "Threads of the switch."),
            (
                "cpus",
                "[]",
                "Processors that the threads stay on, one each. Default: where VMs say topology, the reserved processors of their nodes.",
            ),
            ("poll_us", "50", "Microseconds for which an idle thread goes on polling."),
            ("budget", "none", "Processor time that the switch may use, in hundredths of a processor."),
            (
                "metrics",
                "none",
                "Where Prometheus finds the counters: an address with a port, or the path of a Unix socket.",
            ),
        ],
    },
    Table {
        header: "[accel.NAME]",
        about: "A server for the host's accelerators.",
        keys: &[
            ("api", "\"opencl\"", "What programs speak."),
            (
                "vm",
                "none",
                "The VM of this file that has the devices and serves the others. Default: the host serves.",
            ),
            ("memory", "none", "Device memory of a VM's processes together."),
            ("objects", "none", "Objects of a VM's processes together."),
            ("rate", "0", "Requests of a VM's processes together per second; 0: no limit."),
            ("window", "\"256M\"", "Memory shared with each process for bulk data, a multiple of 1M."),
            ("weight", "100", "Share of processor time of a VM beside others, 1 to 100."),
            ("channels", "8", "Processes of a VM at once."),
            ("metrics", "none", "As of a network."),
            ("unconfined", "false", "Kernels of VMs may do all that the server's user may."),
            (
                "cgroup",
                "one that is found",
                "The folder of the control group that the server divides between VMs, with no process in it.",
            ),
        ],
    },
    Table {
        header: "[vm.NAME]",
        about: "A virtual machine.",
        keys: &[
            (
                "kernel",
                "the newest of the guest kit",
                "A kernel image's path, or a version of the guest kit such as \"6.12\". What is a file beside the compose file is a path.",
            ),
            ("initrd", "the guest kit's", "The initramfs."),
            ("cmdline", "none", "More words for the kernel's command line."),
            (
                "disk",
                "none",
                "A disk image: qcow2 where its name ends in .qcow2, else raw; for other formats see 'disks'. The VM boots from it where no kernel is named.",
            ),
            ("snapshot", "false", "Throw away what the VM writes to its disk."),
            ("cpus", "2", "Virtual CPUs, 1 to 255."),
            (
                "memory",
                "\"512M\"",
                "A multiple of 2M, at least 128M; for a guest of the guest kit 192M, with devices of the host 256M.",
            ),
            (
                "hypervisor",
                "\"auto\"",
                "\"kvm\": or an error; \"tcg\": emulation; \"auto\": KVM where it works.",
            ),
            (
                "ready",
                "\"agent\"",
                "When the VM counts as up: \"agent\": its guest agent answers; \"running\": QEMU runs; \"console:REGEX\": a line of its console matches.",
            ),
            ("ready_timeout", "180", "Seconds until a VM that is not ready has failed."),
            ("zones", "{}", "Zones that it is a member of; see below."),
            ("networks", "[]", "Networks that it has a device in: names, or a table; see below."),
            ("accelerators", "[]", "Accelerators that its programs use: names, or a table; see below."),
            ("share", "[]", "Folders of the host, over 9p; see below. Debian's cloud kernels have no 9p."),
            ("hotplug_ports", "8", "Ports for zones that are attached later, one each, 0 to 16."),
            (
                "cpu_limit",
                "none",
                "Processors that its QEMU may use, the guest's included, such as 1.5. It needs a delegated cgroup.",
            ),
            (
                "memory_limit",
                "none",
                "Memory of the host that its QEMU may use, the guest's included. It needs a delegated cgroup.",
            ),
            (
                "topology",
                "none",
                "The part of the host that it lies on, whose topology its guest sees: \"host\": all free processors; \"node:0\": the same of a NUMA node; \"close\": as many processors as cpus says, close together; \"cpus:0-3,8\". See tombolo topology plan.",
            ),
            (
                "isolate",
                "false",
                "With topology and reserve: the kernel runs nothing but the vCPUs on its processors (a cgroup partition, Linux 6.7 and newer). It wants a delegated cgroup with the controller cpuset.",
            ),
            (
                "cpu_pm",
                "with isolate",
                "With topology, under KVM: the guest idles by itself, without an exit. To the host its processors are always busy, so other threads there wait for their turn.",
            ),
            (
                "pages",
                "\"auto\"",
                "With topology: \"1G\" or \"2M\": reserved huge pages; \"transparent\": those that the kernel makes; \"auto\": the largest that are free.",
            ),
            (
                "depends_on",
                "[]",
                "VMs that are ready before it and are stopped after it: names, or a table such as { db = \"healthy\" }; also \"started\" and \"ready\".",
            ),
            ("healthcheck", "none", "A command that tells whether it does what it is for; see below."),
            ("disks", "[]", "Disks beside \"disk\"; see below."),
            (
                "cloud_init",
                "none",
                "User data, keys and network for cloud-init in the VM's image; see below.",
            ),
            (
                "ports",
                "[]",
                "Ports of the host that lead to it, such as \"127.0.0.1:8080:80/tcp\". It needs a network with uplink = \"user\".",
            ),
            (
                "restart",
                "\"no\"",
                "Whether it is started again when it has ended: \"no\", \"on-failure\", \"on-failure:5\" (times in a row), \"always\" or \"unless-stopped\".",
            ),
            (
                "devices",
                "[]",
                "PCI devices of the host that become the VM's, such as \"0000:01:00.0\", or a table; see below.",
            ),
            ("trust", "false", "Who is root in the VM may be root on the host. Devices with bypass need it."),
            ("whole_group", "false", "Take the other devices of each IOMMU group along."),
            (
                "start",
                "\"auto\"",
                "How memory arrives. \"fast\": a part at start, the rest while the VM runs, which pays with devices; \"slow\": all at start; \"auto\": fast with devices, slow without.",
            ),
            (
                "boot_memory",
                "a thirty-second part",
                "Memory at a fast start. Default: a thirty-second part, from 512M to 8G.",
            ),
            ("growth_share", "100", "Percent of the time in which growing may disturb the guest."),
            ("qemu_args", "[]", "More arguments for QEMU, as they are."),
        ],
    },
    Table {
        header: "vm.NAME.zones.ZONE",
        about: "A VM's use of a zone.",
        keys: &[
            ("mount", "none", "Where the guest mounts the zone's file system."),
            (
                "options",
                "[]",
                "Options of that mount, which is nosuid and nodev unless \"suid\" and \"dev\" are among them.",
            ),
            ("rights", "\"rw\"", "\"ro\": it may only read."),
            ("subtree", "none", "The directory that the guest is confined to; made where it is missing."),
            ("bytes", "none", "What the files that the guest makes may take up together."),
            ("inodes", "none", "How many files and directories it may make."),
        ],
    },
    Table {
        header: "vm.NAME.networks.NETWORK",
        about: "A VM's device in a network.",
        keys: &[
            ("mac", "made of project, network and VM", "Its MAC."),
            (
                "address",
                "\"auto\"",
                "\"auto\": the next free one of the subnet; \"none\"; \"dhcp\"; or an IPv4 address.",
            ),
            (
                "macs",
                "[]",
                "MACs that it may use beside its own: those of macvlans, bridges and nested VMs in its guest.",
            ),
            (
                "learn",
                "0",
                "Further MACs that it may use, each on one VLAN, without their being listed: it gets their frames once it has sent from them. 0 to 64.",
            ),
            ("queues", "1", "Queue pairs, 1 to 16."),
            ("isolated", "false", "It reaches only the uplink."),
            ("vlan", "none", "The VLAN that it is in, 1 to 4094."),
            ("check_address", "false", "Drop what it sends from addresses other than its own."),
            ("router", "false", "It may be a router, a DHCP server or a multicast querier for the others."),
        ],
    },
    Table {
        header: "vm.NAME.accelerators.ACCELERATOR",
        about: "A VM's use of an accelerator. What is not said here is as the accelerator's table says.",
        keys: &[
            ("memory", "as [accel.NAME]", "Device memory of its processes together."),
            ("objects", "as [accel.NAME]", "Objects of its processes together."),
            ("rate", "as [accel.NAME]", "Requests of its processes together per second."),
            ("window", "as [accel.NAME]", "Memory shared with each process."),
            ("weight", "as [accel.NAME]", "Share of processor time."),
            ("channels", "as [accel.NAME]", "Processes at once."),
        ],
    },
    Table {
        header: "vm.NAME.healthcheck",
        about: "A command that runs in the guest now and then.",
        keys: &[
            (
                "command",
                "\"true\"",
                "A line for the guest's shell, or a list of words. 0 is healthy. Required.",
            ),
            (
                "interval",
                "\"30s\"",
                "The time from one check to the next; until the first that succeeds 5 seconds at most.",
            ),
            ("timeout", "\"30s\"", "A check that takes longer has failed."),
            ("retries", "3", "Failures in a row that make the VM unhealthy."),
            ("start_period", "\"0s\"", "Failures so soon after the VM is up don't count."),
        ],
    },
    Table {
        header: "vm.NAME.devices",
        about: "A list; an entry is an address, or a table.",
        keys: &[
            ("address", "\"0000:01:00.0\"", "The device, as 'tombolo passthrough list' shows it. Required."),
            (
                "bypass",
                "false",
                "Its DMA is not translated by the IOMMU: the guest's module tombolo_bypass does that. The device then reaches all of the host's memory. It needs trust, pages = \"2M\" or \"1G\", the module tombolo_bypass_host on the host, and a device that is alone in its IOMMU group and can be reset.",
            ),
        ],
    },
    Table {
        header: "vm.NAME.disks",
        about: "A list; each entry is a disk.",
        keys: &[
            ("path", "\"data.img\"", "The image, or a block device. Required."),
            (
                "format",
                "\"qcow2\" where its name ends in .qcow2, else \"raw\"",
                "\"raw\", \"qcow2\", \"vdi\", \"vmdk\" or \"vhdx\". Without this key an image whose header contradicts its name is refused.",
            ),
            ("readonly", "false", "The guest can't write to it."),
            (
                "overlay",
                "false",
                "What the guest writes goes to a file in the project's folder, which 'down' removes.",
            ),
            ("serial", "none", "Its serial number: the guest has it as /dev/disk/by-id/virtio-SERIAL."),
        ],
    },
    Table {
        header: "vm.NAME.cloud_init",
        about: "Each text is the path of a file, or the text itself where it has several lines or begins with '#'.",
        keys: &[
            ("user_data", "none", "#cloud-config, a script, or whatever else cloud-init takes."),
            ("network", "made from its networks", "The network configuration."),
            ("ssh_keys", "[]", "Public keys of the image's default user, or paths of files with them."),
            ("hostname", "the VM's name", "The guest's name."),
            (
                "instance_id",
                "made of the file's path and the VM's name",
                "What cloud-init takes for the same machine.",
            ),
        ],
    },
    Table {
        header: "vm.NAME.share",
        about: "A list; each entry is a folder of the host.",
        keys: &[
            ("tag", "\"src\"", "The mount tag. Required."),
            ("path", "\".\"", "The folder. Required."),
            ("readonly", "false", "Refuse writes."),
            (
                "mount",
                "none",
                "Where the guest mounts it; it needs a guest agent. Without it the guest mounts it itself: mount -t 9p -o trans=virtio TAG DIR.",
            ),
        ],
    },
];

/// The page, in roff.
#[must_use]
pub fn page() -> String {
    let mut page = Roff::new();
    page.control("TH", ["tombolo.toml", "5"]);
    page.control("SH", ["NAME"]);
    page.text([roman("tombolo.toml - zones, networks, accelerators and VMs of a project")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        bold("tombolo up"),
        roman(" starts what this TOML file declares, which it looks for in the current folder and those above. "),
        bold("tombolo config"),
        roman(" checks it and prints it with its defaults. Sizes are written as \"512M\" or \"4G\"."),
    ]);
    for Table { header, about, keys } in TABLES {
        page.control("SH", [header]);
        page.text([roman(about)]);
        for (name, value, text) in keys {
            page.control("TP", []);
            page.text([bold(*name), roman(" = "), italic(*value)]);
            page.text([roman(*text)]);
        }
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([bold("tombolo"), roman("(1)")]);
    page.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::accelerator::{AccelSpec, AccelUse};
    use crate::compose::cloud_init::CloudInit;
    use crate::compose::depends::HealthCheck;
    use crate::compose::device::DeviceTable;
    use crate::compose::disks::DiskSpec;
    use crate::compose::network::{NetSpec, NicSpec};
    use crate::compose::{Compose, Share, VmSpec, ZoneSpec, ZoneUse};
    use serde::de::DeserializeOwned;
    use std::collections::BTreeSet;

    /// The former key of `hypervisor`, which is still read.
    const FORMER: &str = "accel";

    /// The keys that a table's parser knows. The parser lists them in its error for an unknown key.
    fn known<T: DeserializeOwned>() -> Vec<String> {
        let error = toml::from_str::<T>("no-such-key = 0").err().expect("no table has this key");
        let message = error.message().to_owned();
        assert!(message.starts_with("unknown field `no-such-key`"), "{message}");
        let mut keys: Vec<String> = message.split('`').skip(3).step_by(2).map(str::to_owned).collect();
        keys.sort();
        keys
    }

    #[test]
    fn the_readmes_compose_file_is_one_and_has_all_keys() {
        let readme = include_str!("../../README.md");
        let (_, block) = readme.split_once("```toml\n").unwrap();
        let (block, _) = block.split_once("\n```\n").unwrap();
        // The parser knows each key that is set.
        toml::from_str::<Compose>(block).unwrap();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words: BTreeSet<&str> = block.split(|c| !is_part(c)).collect();
        for table in &TABLES {
            let missing: Vec<&str> =
                table.keys.iter().map(|(name, ..)| *name).filter(|name| !words.contains(name)).collect();
            assert!(missing.is_empty(), "{} of vm/README.md lacks {missing:?}", table.header);
        }
    }

    #[test]
    fn the_page_has_the_keys_that_the_parser_knows() {
        let parsers = [
            known::<Compose>(),
            known::<ZoneSpec>(),
            known::<NetSpec>(),
            known::<AccelSpec>(),
            known::<VmSpec>(),
            known::<ZoneUse>(),
            known::<NicSpec>(),
            known::<AccelUse>(),
            known::<HealthCheck>(),
            known::<DeviceTable>(),
            known::<DiskSpec>(),
            known::<CloudInit>(),
            known::<Share>(),
        ];
        for (table, mut known) in TABLES.iter().zip(parsers) {
            if table.header == "[vm.NAME]" {
                known.retain(|key| key != FORMER);
            }
            let mut described: Vec<String> = table.keys.iter().map(|(name, ..)| (*name).to_owned()).collect();
            described.sort();
            assert_eq!(described, known, "{}", table.header);
        }
        let page = page();
        assert!(page.contains("hotplug_ports") && page.contains(".SH [vm.NAME]"), "{page}");
    }

    #[test]
    fn the_readme_names_every_key_of_a_vm() {
        let readme = include_str!("../../README.md");
        for (key, ..) in TABLES.iter().flat_map(|table| table.keys) {
            assert!(readme.contains(key), "vm/README.md says nothing of '{key}'");
        }
    }
}
