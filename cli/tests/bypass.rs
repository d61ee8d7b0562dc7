// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The IOMMU bypass in the emulated KVM host: an NVMe disk of a trusted VM, counted by the emulated IOMMU's own trace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::kvm_host::Lab;

mod common;

/// The lab's NVMe disk, and the driver that the host has for it.
const DISK: &str = "0000:81:00.0";
/// Deaths of QEMU, the supervisor and the guest under load, in turn.
const DEATHS: usize = 6;

/// A zone of the bypassed VM: memory that is not in its map.
const ZONE: &str = "zones = { shared = { mount = \"/mnt\" } }\n[zone.shared]\nsize = \"32M\"\nfiles = true";

/// The folder of the guest kit's kernel that is the lab's own.
fn modules() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let built = Command::new(root.join("guest/build"))
        .args(["--kernel", "general-6.12", "--until", "module"])
        .status()
        .unwrap();
    assert!(built.success(), "the modules are not built");
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| root.join(".cache"), PathBuf::from);
    cache.join("guest/general-6.12")
}

/// A host with the module, a VM `plain` whose disk is translated, and a VM `fast` whose disk is not.
struct Bench {
    lab: Lab,
    trace: PathBuf,
}

impl Bench {
    /// `more` is in the compose file after the table of `fast`.
    fn start(more: &str) -> Bench {
        let modules = modules();
        let lab = Lab::start("bypass", &["--huge-pages", "640"]);
        let release = fs::read_to_string(modules.join("release")).unwrap();
        assert_eq!(
            lab.good("uname -r"),
            release,
            "the lab has another kernel than the guest kit: make guest-update"
        );
        lab.good("modprobe nvme");
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
        lab.good(&format!("insmod {}", modules.join("bypass/tombolo_bypass_host.ko").display()));
        let trace = lab.folder.join("trace.log");
        lab.monitor(&format!("logfile {}", trace.display()));
        lab.monitor("log trace:vtd_dmar_translate");
        Bench { lab, trace }
    }

    /// The number of addresses that the IOMMU has translated for the disk.
    fn translations(&self) -> usize {
        let trace = fs::read_to_string(&self.trace).unwrap();
        trace.lines().filter(|line| line.contains("dev 81:00.00")).count()
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
    fn die(&self, turn: usize) {
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

    // Everything but the VM's memory is guarded while it works, and its own once it is dead.
    for turn in 0..DEATHS {
        lab.good(&format!("rm -f filled; setsid {guard} 20 512 filled >guarded 2>&1 & echo $! >guard.pid"));
        lab.good("timeout 120 sh -c 'until [ -e filled ]; do sleep 0.1; done'");
        bench.read_on();
        bench.die(turn);
        println!("death {turn}: {}", lab.good(&format!("{guard} 2 64")).trim());
        lab.good("timeout 120 tail --pid=$(cat guard.pid) -f /dev/null; grep 'as they were' guarded");
        lab.run("tombolo down");
        assert_eq!(lab.driver(DISK), "nvme", "death {turn}");
        if turn + 1 < DEATHS {
            lab.good("tombolo up fast");
        }
    }
    end(lab);
}
