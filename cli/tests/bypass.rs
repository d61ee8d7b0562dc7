// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The IOMMU bypass in the emulated KVM host: an NVMe disk of a trusted VM, counted by the emulated IOMMU's own trace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::kvm_host::Lab;

mod common;

/// The lab's NVMe disk, and the driver that the host has for it.
const DISK: &str = "0000:81:00.0";
/// Deaths of QEMU, the supervisor and the guest under load, in turn, unless TOMBOLO_KILLS says how many.
const DEATHS: u64 = 6;

/// A zone of the bypassed VM: memory that is not in its map.
const ZONE: &str = "zones = { shared = { mount = \"/mnt\" } }\n[zone.shared]\nsize = \"32M\"\nfiles = true";

/// Has the guest kit make what it makes of the lab's kernel, up to and including `until`. Returns the folder.
fn kit(until: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let built = Command::new(root.join("guest/build"))
        .args(["--kernel", "general-6.12", "--until", until])
        .status()
        .unwrap();
    assert!(built.success(), "no {until} of general-6.12");
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| root.join(".cache"), PathBuf::from);
    cache.join("guest/general-6.12")
}

/// A host with the module, a VM `plain` whose disk is translated, and a VM `fast` whose disk is not.
struct Bench {
    lab: Lab,
    trace: PathBuf,
}

/// An emulated host with the drivers of its disk and its card, and the folder of the modules for its kernel.
fn host(options: &[&str]) -> (Lab, PathBuf) {
    let modules = kit("module");
    let lab = Lab::start("bypass", options);
    let release = fs::read_to_string(modules.join("release")).unwrap();
    assert_eq!(
        lab.good("uname -r"),
        release,
        "the lab has another kernel than the guest kit: make guest-update"
    );
    lab.good("modprobe nvme");
    (lab, modules)
}

fn load_module(lab: &Lab, modules: &Path) {
    lab.good(&format!("insmod {}", modules.join("bypass/tombolo_bypass_host.ko").display()));
}

/// Has the emulated IOMMU write events of these kinds to the file that is returned.
fn trace(lab: &Lab, events: &str) -> PathBuf {
    let trace = lab.folder.join("trace.log");
    lab.monitor(&format!("logfile {}", trace.display()));
    lab.monitor(&format!("log {events}"));
    trace
}

/// The events of a trace that hold these words.
fn events(trace: &Path, words: &str) -> Vec<String> {
    let trace = fs::read_to_string(trace).unwrap();
    trace.lines().filter(|line| line.contains(words) && translates(line)).map(str::to_owned).collect()
}

/// Returns false for a request that the IOMMU passed through. QEMU traces the first request of a device without translation, and none after it.
fn translates(event: &str) -> bool {
    let word = |after: &str| event.split(after).nth(1).and_then(|rest| rest.split(' ').next());
    !event.contains("vtd_dmar_translate") || word("iova ") != word("gpa ")
}

impl Bench {
    /// `more` is in the compose file after the table of `fast`.
    fn start(more: &str) -> Bench {
        let (lab, modules) = host(&["--huge-pages", "640"]);
        let vm = |name: &str, device: &str, more: &str| {
            format!(
                "[vm.{name}]\nkernel = \"6.12\"\nhypervisor = \"kvm\"\ncpus = 1\nmemory = \"512M\"\ntopology = \"close\"\npages = \"2M\"\n\
                 ready_timeout = 600\ndevices = [{device}]\n{more}\n"
            )
        };
        let bypassed = format!("{{ address = \"{DISK}\", bypass = true }}");
        let file = vm("plain", &format!("\"{DISK}\""), "")
            + &vm("fast", &bypassed, &format!("trust = true\n{more}"));
        lab.good(&format!("cat >tombolo.toml <<'END'\n{file}END"));
        lab.good("mkdir ../untrusted; grep -v trust tombolo.toml >../untrusted/tombolo.toml");

        // What is missing is named before anything was changed.
        for (line, said) in [
            ("cd ../untrusted; tombolo up fast", "all of the host's memory"),
            ("tombolo up fast", "tombolo_bypass_host"),
        ] {
            let refused = lab.run(line);
            let error = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && error.contains(said), "{line}: {error}");
            assert_eq!(lab.driver(DISK), "nvme");
        }
        load_module(&lab, &modules);
        let trace = trace(&lab, "trace:vtd_dmar_translate");
        Bench { lab, trace }
    }

    /// The number of addresses that the IOMMU has translated for the disk.
    fn translations(&self) -> usize {
        events(&self.trace, "dev 81:00.00").len()
    }

    /// Writes 24 MiB to the VM's disk, past its cache and through it, and reads them back both ways. Returns the translations that took.
    fn write_and_read(&self, vm: &str) -> usize {
        let exec = |line: &str| self.lab.good(&format!("tombolo exec {vm} -- sh -ec '{line}'"));
        exec("test -b /dev/nvme0n1; dd if=/dev/urandom of=/tmp/a bs=1M count=24 2>/dev/null");
        let before = self.translations();
        exec("dd if=/tmp/a of=/dev/nvme0n1 bs=1M oflag=direct 2>/dev/null");
        exec("dd if=/tmp/a of=/dev/nvme0n1 bs=1M seek=64 conv=fsync 2>/dev/null");
        exec("echo 3 >/proc/sys/vm/drop_caches");
        exec("dd if=/dev/nvme0n1 of=/tmp/b bs=1M count=24 2>/dev/null; cmp /tmp/a /tmp/b");
        exec(
            "dd if=/dev/nvme0n1 of=/tmp/b bs=1M count=24 skip=64 iflag=direct 2>/dev/null; cmp /tmp/a /tmp/b",
        );
        let took = self.translations() - before;
        println!("{vm}: {took} translations for 96 MiB");
        took
    }

    /// Reads from the disk until the VM dies.
    fn read_on(&self) {
        self.lab.good(
            "tombolo exec fast -- sh -c '(while :; do dd if=/dev/nvme0n1 of=/dev/null bs=1M count=256 iflag=direct; done) >/dev/null 2>&1 &'",
        );
        let reads = || {
            let line =
                self.lab.good("tombolo exec fast -- sh -c \"awk '{ print \\$3 }' /sys/block/nvme0n1/stat\"");
            line.trim().parse::<u64>().unwrap()
        };
        let first = reads();
        while reads() == first {}
    }

    /// The death of one part of the VM. Returns when its memory has gone back.
    fn die(&self, turn: u64) {
        let ps = self.lab.json("tombolo ps --json");
        let supervisor = ps["supervisor"].to_string();
        let vms = ps["vms"].as_array().unwrap();
        let qemu = vms.iter().find(|vm| vm["name"] == "fast").unwrap()["pid"].to_string();
        match turn % 3 {
            0 => drop(self.lab.good(&format!("kill -KILL {qemu}"))),
            1 => drop(self.lab.good(&format!("kill -KILL {supervisor}"))),
            // The answer does not come.
            _ => drop(self.lab.run("timeout 60 tombolo exec fast -- sh -c 'echo c >/proc/sysrq-trigger'")),
        }
        self.lab.good(&format!("timeout 120 tail --pid={qemu} -f /dev/null"));
    }
}

/// Says that nothing but what is expected came from the kernel, and gives the module back.
fn end(lab: &Lab) {
    lab.good("tombolo down");
    assert_eq!(lab.driver(DISK), "nvme");
    lab.good("rmmod tombolo_bypass_host");
    let said = lab.good("dmesg");
    assert!(!said.contains("WARNING:") && !said.contains("BUG:"), "{said}");
}

#[test]
fn a_trusted_vms_disk_is_not_translated_and_its_data_is_what_was_written() {
    let bench = Bench::start(ZONE);
    let lab = &bench.lab;

    // The control: the same work with translation is counted.
    lab.good("tombolo up plain");
    assert!(bench.write_and_read("plain") > 1000);
    lab.good("tombolo down");
    assert_eq!(lab.driver(DISK), "nvme");

    lab.good("tombolo up fast");
    let blame = lab.good("tombolo start blame fast");
    assert!(blame.contains(&format!("{DISK} goes untranslated")), "{blame}");
    assert_eq!(bench.write_and_read("fast"), 0);
    // Large buffers may cross huge pages that are apart on the host; such parts are copied.
    lab.good(
        "tombolo exec fast -- sh -ec 'dd if=/tmp/a of=/tmp/b bs=16M count=1 2>/dev/null; for n in 1 2 3 4; do dd if=/dev/nvme0n1 bs=16M count=1 iflag=direct 2>/dev/null | cmp - /tmp/b; done'",
    );
    let copied = lab.good("tombolo exec fast -- cat /sys/module/tombolo_bypass/parameters/bounces");
    println!("copied mappings: {}", copied.trim());
    end(lab);
}

#[test]
fn a_bypassed_disk_writes_nowhere_but_to_its_vm_whoever_dies() {
    let bench = Bench::start("");
    let lab = &bench.lab;
    let guard = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bypass_guard.py");
    lab.good("tombolo up fast");
    let upgrade = lab.run("cp $(command -v tombolo) other; tombolo upgrade --program ./other");
    let said = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    assert!(!upgrade.status.success() && said.contains("bypassed devices"), "{said}");

    let deaths = common::setting("TOMBOLO_KILLS", DEATHS);
    // Everything but the VM's memory is guarded while it works, and its own once it is dead.
    for turn in 0..deaths {
        lab.good(&format!("rm -f filled; setsid {guard} 20 512 filled >guarded 2>&1 & echo $! >guard.pid"));
        lab.good("timeout 120 sh -c 'until [ -e filled ]; do sleep 0.1; done'");
        bench.read_on();
        bench.die(turn);
        println!("death {turn}: {}", lab.good(&format!("{guard} 2 64")).trim());
        lab.good("timeout 120 tail --pid=$(cat guard.pid) -f /dev/null; grep 'as they were' guarded");
        lab.run("tombolo down");
        assert_eq!(lab.driver(DISK), "nvme", "death {turn}");
        if turn + 1 < deaths {
            lab.good("tombolo up fast");
        }
    }
    end(lab);
}

/// Writes 24 MiB to the VM's disk and reads them back, past its cache.
const DISK_MOVES: &str = "modprobe nvme
    test -b /dev/nvme0n1
    dd if=/dev/urandom of=/tmp/a bs=1M count=24 2>/dev/null
    dd if=/tmp/a of=/dev/nvme0n1 bs=1M oflag=direct 2>/dev/null
    dd if=/dev/nvme0n1 of=/tmp/b bs=1M count=24 iflag=direct 2>/dev/null
    cmp /tmp/a /tmp/b";

/// Sends 8 MiB by the VM's card and compares the peer's checksum, then takes the numbers that the peer sends.
const CARD_MOVES: &str = "modprobe e1000e
    card=$(for i in /sys/class/net/*; do case $(readlink -f $i/device/driver) in */e1000e) basename $i;; esac; done)
    ip addr add 10.0.2.15/24 dev $card
    ip link set $card up
    head -c 8388608 /dev/urandom >/tmp/c
    test \"$(nc 10.0.2.100 7 </tmp/c | cut -c 1-64)\" = \"$(sha256sum </tmp/c | cut -c 1-64)\"
    seq 1000000 >/tmp/numbers
    nc 10.0.2.100 19 </dev/null | cmp - /tmp/numbers";

/// The MiB that the card sends and receives. The numbers that it receives have 6,888,896 bytes.
const CARD_MEBIBYTES: f64 = 8.0 + 6_888_896.0 / (1 << 20) as f64;

#[test]
fn translations_for_each_mebibyte_by_page_size_and_by_bypass() {
    // Debian's cloud kernel, which VMs have otherwise, has no driver for the card.
    kit("image");
    let (lab, modules) = host(&["--huge-pages", "640", "--append", "hugepagesz=1G hugepages=1:1"]);
    load_module(&lab, &modules);
    // A VM without `pages` has small ones then.
    lab.good("cd /sys/kernel/mm/transparent_hugepage; echo never >enabled; echo never >shmem_enabled");
    let card = lab.card();

    let vm = |name: &str, memory: &str, bypass: bool| {
        let device = |address: &str| format!("{{ address = \"{address}\", bypass = {bypass} }}");
        format!(
            "[vm.{name}]\nkernel = \"general-6.12\"\nhypervisor = \"kvm\"\ncpus = 1\nready_timeout = 600\ntrust = {bypass}\n\
             devices = [{}, {}]\n{memory}\n",
            device(DISK),
            device(&card)
        )
    };
    let small = "memory = \"512M\"";
    let large = "topology = \"close\"\nmemory = \"512M\"\npages = \"2M\"";
    let giant = "topology = \"close\"\nmemory = \"1G\"\npages = \"1G\"";
    let file = vm("small", small, false)
        + &vm("large", large, false)
        + &vm("giant", giant, false)
        + &vm("large-bypass", large, true)
        + &vm("giant-bypass", giant, true);
    lab.good(&format!("cat >tombolo.toml <<'END'\n{file}END"));
    let trace = trace(&lab, "trace:vtd_dmar_translate,trace:vtd_iotlb_page_update");

    // In the trace a device has its bus in the request, and its whole number in what the IOTLB takes up.
    let bus = &card[5..7];
    let kinds = [
        ("nvme", 48.0, DISK_MOVES, "dev 81:00.00".to_owned(), "sid 0x8100 ".to_owned()),
        (
            "e1000e",
            CARD_MEBIBYTES,
            CARD_MOVES,
            format!("dev {bus}:00.00"),
            format!("sid 0x{}00 ", bus.trim_start_matches('0')),
        ),
    ];
    println!("device  memory        translations/MiB  table walks/MiB");
    for name in ["small", "large", "giant", "large-bypass", "giant-bypass"] {
        lab.good(&format!("tombolo up {name}"));
        for (device, mebibytes, moves, request, walk) in &kinds {
            let before = [request, walk].map(|words| events(&trace, words).len());
            lab.good(&format!("tombolo exec {name} -- sh -ec '{moves}'"));
            let [requests, walks] = [(request, before[0]), (walk, before[1])]
                .map(|(words, before)| events(&trace, words).split_off(before));
            let per_mebibyte = |lines: &[String]| lines.len() as f64 / mebibytes;
            println!(
                "{device:<7} {name:<13} {:>16.1} {:>16.1}",
                per_mebibyte(&requests),
                per_mebibyte(&walks)
            );
            if name.ends_with("bypass") {
                assert_eq!((requests, walks), (vec![], vec![]), "{device} of {name}");
            } else {
                assert!(requests.len() > 48 && walks.len() <= requests.len(), "{device} of {name}");
            }
        }
        lab.good("tombolo down");
        assert_eq!(lab.driver(DISK), "nvme");
        assert_eq!(lab.driver(&card), "e1000e");
    }
    end(&lab);
}
