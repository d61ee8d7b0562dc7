// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The IOMMU bypass in the emulated KVM host: an NVMe disk of a trusted VM, counted by the emulated IOMMU's own trace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use common::kvm_host::Lab;

mod common;

/// The lab's NVMe disk, and the driver that the host has for it.
const DISK: &str = "0000:81:00.0";
/// The disk beside AMD's IOMMU.
const DISK_OF_AMD: &str = "0000:00:11.0";
/// Deaths under load, unless TOMBOLO_KILLS says how many: of six, four are QEMU's, one the supervisor's, one the guest's.
const DEATHS: u64 = 6;
/// Seconds of load that is verified, unless TOMBOLO_SECONDS says how many.
const SECONDS: u64 = 20;

/// A zone of the bypassed VM: memory that is not in its map.
const ZONE: &str = "zones = { shared = { mount = \"/mnt\" } }\n[zone.shared]\nsize = \"32M\"\nfiles = true";

/// Guards memory of the emulated host.
const GUARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bypass_guard.py");

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Has the guest kit make something of a kernel. Returns the kernel's folder.
fn kit(kernel: &str, options: [&str; 2]) -> PathBuf {
    let built =
        Command::new(root().join("guest/build")).args(["--kernel", kernel]).args(options).status().unwrap();
    assert!(built.success(), "no {options:?} of {kernel}");
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from);
    cache.join("guest").join(kernel)
}

/// Builds a module of the tests for a kernel of the kit.
fn test_module(kernel: &str, name: &str) -> PathBuf {
    let folder = kit(kernel, ["--until", "module"]).join("bypass-test");
    fs::create_dir_all(&folder).unwrap();
    for file in ["Kbuild", "tombolo_bypass_test.c", "tombolo_bypass_snoop.c"] {
        fs::copy(root().join("vm/passthrough/tests/driver").join(file), folder.join(file)).unwrap();
    }
    let build = folder.with_file_name("build");
    let mut make = Command::new("make");
    make.arg("-C").arg(build).arg(format!("M={}", folder.display())).arg("modules");
    assert!(make.output().unwrap().status.success(), "the tests' modules do not build");
    folder.join(name).with_extension("ko")
}

/// A host with the module, a VM `plain` whose disk is translated, and a VM `fast` whose disk is not.
struct Bench {
    lab: Lab,
    trace: PathBuf,
    /// How the trace names the disk.
    disk: &'static str,
}

/// An emulated host with the drivers of its disk and its card, and the folder of the modules for its kernel.
fn host(options: &[&str]) -> (Lab, PathBuf) {
    let modules = kit("general-6.12", ["--until", "module"]);
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

/// Returns false for a request that the IOMMU passed through. Of a device without translation QEMU traces the first request, with AMD's IOMMU each.
fn translates(event: &str) -> bool {
    let address = |after: &str| event.split(after).nth(1).and_then(|rest| rest.split_whitespace().next());
    // AMD's answers have the page alone.
    let page = |after: &str| {
        let text = address(after).and_then(|text| text.strip_prefix("0x"));
        text.map(|text| u64::from_str_radix(text, 16).unwrap() >> 12)
    };
    match () {
        () if event.contains("vtd_dmar_translate") => address("iova ") != address("gpa "),
        () if event.contains("amdvi_translation_result") => page("gpa ") != page("hpa "),
        () => true,
    }
}

impl Bench {
    /// VMs of `memory_mib`. `more` is in the compose file after the table of `fast`.
    fn start(memory_mib: u64, more: &str) -> Bench {
        Bench::on(&[], memory_mib, more)
    }

    /// On a lab with more options.
    fn on(options: &[&str], memory_mib: u64, more: &str) -> Bench {
        let (address, event, disk) = match options {
            ["--iommu", "amd"] => (DISK_OF_AMD, "trace:amdvi_translation_result", "devid: 00:11.0 "),
            _ => (DISK, "trace:vtd_dmar_translate", "dev 81:00.00"),
        };
        // Other pages are guarded, or another VM's.
        let pages = (memory_mib / 2 + 384).to_string();
        let (lab, modules) = host(&[options, &["--huge-pages", &pages]].concat());
        let vm = |name: &str, device: &str, more: &str| {
            let kernel = if more.contains("kernel = ") { "" } else { "kernel = \"6.12\"\n" };
            format!(
                "[vm.{name}]\n{kernel}hypervisor = \"kvm\"\ncpus = 1\nmemory = \"{memory_mib}M\"\ntopology = \"close\"\npages = \"2M\"\n\
                 ready_timeout = 600\ndevices = [{device}]\n{more}\n"
            )
        };
        let bypassed = format!("{{ address = \"{address}\", bypass = true }}");
        let file = vm("plain", &format!("\"{address}\""), "")
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
            assert_eq!(lab.driver(address), "nvme");
        }
        load_module(&lab, &modules);
        let trace = trace(&lab, event);
        Bench { lab, trace, disk }
    }

    /// The number of addresses that the IOMMU has translated for the disk.
    fn translations(&self) -> usize {
        events(&self.trace, self.disk).len()
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

    /// Reads from the disk until the VM dies. Returns once reads have been done.
    fn read_on(&self) {
        self.guest(
            "(while :; do dd if=/dev/nvme0n1 of=/dev/null bs=1M count=256 iflag=direct; done) >/dev/null 2>&1 &
            reads() { read -r _ _ sectors _ </sys/block/nvme0n1/stat; echo $sectors; }
            first=$(reads)
            until [ $(reads) -gt $((first + 8192)) ]; do :; done",
        );
    }

    /// The number of mappings that the guest has copied.
    fn copies(&self) -> u64 {
        let copies = self.guest("cat /sys/module/tombolo_bypass/parameters/bounces");
        copies.trim().parse().unwrap()
    }

    /// Runs a script in the VM `fast`.
    fn guest(&self, script: &str) -> String {
        self.lab.good(&format!("tombolo exec fast -- sh -ec '{script}'"))
    }

    /// The death of one part of the VM. Returns when its memory has gone back.
    fn die(&self, turn: u64) {
        let ps = self.lab.json("tombolo ps --json");
        let supervisor = ps["supervisor"].to_string();
        let vms = ps["vms"].as_array().unwrap();
        let qemu = vms.iter().find(|vm| vm["name"] == "fast").unwrap()["pid"].to_string();
        let gone = format!("timeout 120 tail --pid={qemu} -f /dev/null");
        match turn % 6 {
            2 => drop(self.lab.good(&format!("kill -KILL {supervisor}; {gone}"))),
            5 => {
                // The answer does not come.
                self.lab.run("timeout 60 tombolo exec fast -- sh -c 'echo c >/proc/sysrq-trigger'");
                self.lab.good(&gone);
            }
            _ => drop(self.lab.good(&format!("kill -KILL {qemu}; {gone}"))),
        }
    }

    /// Begins to guard all of the emulated host's free huge pages, and 512 MiB beside them.
    fn guard(&self) {
        self.lab.good(&format!("setsid {GUARD} asked look 512 >guarded 2>&1 &"));
        self.lab.good("timeout 120 sh -c 'until [ -e look.filled ]; do sleep 0.1; done'");
    }

    /// Looks whether what is guarded is as it was, after as many looks before. The last one's word is `end`, that of others `look`.
    fn look(&self, word: &str, before: u64) -> String {
        let said = before + 1;
        self.lab.good(&format!(
            "echo {word} >look; timeout 120 sh -c 'until [ $(wc -l <guarded) -ge {said} ]; do sleep 0.1; done'; tail -n 1 guarded | grep \"as they were\""
        ))
    }

    /// A file system of the zone `shared`, mounted on the emulated host too.
    fn mount_zone(&self) -> &'static str {
        self.lab.good("mkdir -p /run/zone; tombolo files mount shared /run/zone");
        "/run/zone"
    }
}

/// Says that nothing but what is expected came from the kernel, and gives the module back.
fn end(lab: &Lab) {
    end_with(lab, DISK);
}

/// The same where the disk is elsewhere.
fn end_with(lab: &Lab, disk: &str) {
    lab.good("test ! -e tombolo.toml || tombolo down");
    assert_eq!(lab.driver(disk), "nvme");
    lab.good("rmmod tombolo_bypass_host");
    let said = lab.good("dmesg");
    assert!(!said.contains("WARNING:") && !said.contains("BUG:"), "{said}");
}

#[test]
fn a_trusted_vms_disk_is_not_translated_and_its_data_is_what_was_written() {
    let bench = Bench::start(512, ZONE);
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
    bench.guest(
        "dd if=/tmp/a of=/tmp/b bs=16M count=1 2>/dev/null; for n in 1 2 3 4; do dd if=/dev/nvme0n1 bs=16M count=1 iflag=direct 2>/dev/null | cmp - /tmp/b; done",
    );
    println!("copied mappings: {}", bench.copies());
    end(lab);
}

#[test]
fn amds_iommu_leaves_a_disk_untranslated_too() {
    let bench = Bench::on(&["--iommu", "amd"], 512, "");
    let lab = &bench.lab;
    lab.good("tombolo up plain");
    assert!(bench.write_and_read("plain") > 1000);
    lab.good("tombolo down; tombolo up fast");
    assert_eq!(bench.write_and_read("fast"), 0);
    bench.read_on();
    bench.die(0);
    end_with(lab, DISK_OF_AMD);
}

/// Has fio write about 48 MiB of the disk and then verify them, again and again: from buffers in memory of the VM or, with `buffer`, in a file that is mapped.
/// No time is set for a pass, which could end before all of it is verified.
fn verified(seconds: u64, buffer: &str) -> String {
    format!(
        "end=$(($(date +%s) + {seconds}))
        while
            fio --name=verified --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bsrange=4k-256k --size=48M \
                --verify=crc32c --verify_fatal=1 --do_verify=1 --randrepeat=0 --minimal {buffer} || exit
            [ $(date +%s) -lt $end ]
        do :; done"
    )
}

#[test]
fn fio_finds_what_it_wrote_also_in_buffers_that_lie_in_a_zone() {
    let guest = kit("6.12", ["--flavour", "bench"]);
    let [kernel, initrd] = ["vmlinuz", "initrd-bench.img"].map(|file| guest.join(file));
    let keys = format!("kernel = {kernel:?}\ninitrd = {initrd:?}\n{ZONE}");
    let bench = Bench::start(512, &keys);
    bench.lab.good("tombolo up fast");
    let before = bench.translations();
    let seconds = common::setting("TOMBOLO_SECONDS", SECONDS);
    let verify = |seconds: u64, buffer: &str| {
        let said = bench.guest(&verified(seconds, buffer));
        // A pass has a line, whose sixth field in version 3 is the KiB that were read: fio reads to verify alone.
        let passes: Vec<u64> = said
            .lines()
            .filter(|line| line.starts_with("3;"))
            .map(|line| line.split(';').nth(5).unwrap().parse().unwrap())
            .collect();
        println!("fio has verified {} KiB in {} passes {buffer}", passes.iter().sum::<u64>(), passes.len());
        assert!(!passes.is_empty() && passes.iter().all(|read| *read > 44 << 10), "{said}");
    };
    verify(seconds, "");
    let copies = bench.copies();
    bench.guest("truncate -s 4M /mnt/buffers");
    verify(SECONDS, "--mem=mmapshared:/mnt/buffers");
    assert!(bench.copies() > copies + 1000, "buffers in the zone are not in the map: {}", bench.copies());
    assert_eq!(bench.translations(), before);
    end(&bench.lab);
}

#[test]
fn a_session_refuses_what_is_wrong_and_gives_everything_back_whoever_has_it_last() {
    let (lab, modules) = host(&["--huge-pages", "64"]);
    load_module(&lab, &modules);
    lab.good("modprobe vfio-pci");
    let attack = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bypass_sessions.py");
    println!("{}", lab.good(&format!("{attack} {DISK} {SECONDS}")));
    end(&lab);
}

/// Binds the test driver to the device and returns its findings, a line each.
fn findings(bench: &Bench) -> Vec<String> {
    let said = bench.guest(
        "cd /sys/bus/pci/devices/$(cat /tmp/address)
        dmesg -c >/dev/null
        echo $(cat /tmp/address) >/sys/bus/pci/drivers/tombolo_bypass_test/bind
        dmesg
        echo $(cat /tmp/address) >driver/unbind",
    );
    said.lines().filter_map(|line| line.split_once("test: ")).map(|(_, finding)| finding.to_owned()).collect()
}

#[test]
fn a_device_is_reset_before_it_is_untranslated_and_is_given_no_address_that_it_cannot_reach() {
    let bench = Bench::start(512, "");
    let lab = &bench.lab;
    let driver = test_module("6.12", "tombolo_bypass_test");
    lab.good("tombolo up fast");
    lab.good(&format!("tombolo exec -i fast -- sh -c 'cat >/tmp/test.ko' <{}", driver.display()));
    bench.guest(
        "basename $(readlink -f /sys/class/nvme/nvme0/device) >/tmp/address
        cd /sys/bus/pci/devices/$(cat /tmp/address)
        echo $(cat /tmp/address) >driver/unbind
        echo tombolo_bypass_test >driver_override
        insmod /tmp/test.ko
        echo $(cat /tmp/address) >driver/unbind",
    );
    // The driver leaves the device running; it is found reset each time.
    for _ in 0..3 {
        let findings = findings(&bench);
        println!("{findings:#?}");
        assert_eq!(findings[0], "reset");
        assert_eq!(findings.len(), 8);
        assert!(findings.iter().all(|finding| !finding.contains("OUT OF REACH")), "{findings:?}");
        // The disk is close to the node whose memory the VM has: above 4 GiB of the lab's 6.
        assert!(findings[2].contains("no mask set, mapping refused"), "{findings:?}");
        assert!(findings[6].contains("64 bits asked for, mapping in reach"), "{findings:?}");
    }
    end(lab);
}

#[test]
fn a_bypassed_device_asks_the_caches_with_each_access_whatever_it_was_set_to() {
    let bench = Bench::start(512, "");
    let lab = &bench.lab;
    let module = test_module("general-6.12", "tombolo_bypass_snoop");
    lab.good(&format!("insmod {} address={DISK}", module.display()));
    let no_snoop = || lab.good("cat /sys/module/tombolo_bypass_snoop/parameters/no_snoop");
    assert_eq!(no_snoop(), "Y\n");
    lab.good("tombolo up fast");
    assert_eq!(no_snoop(), "N\n");
    assert_eq!(bench.write_and_read("fast"), 0);
    assert_eq!(no_snoop(), "N\n");
    // The host gets the device as it was.
    lab.good("tombolo down");
    assert_eq!(no_snoop(), "Y\n");
    lab.good("rmmod tombolo_bypass_snoop");
    end(lab);
}

#[test]
fn a_driver_that_hands_its_device_to_programs_gets_none_that_is_untranslated() {
    let bench = Bench::start(512, "");
    let lab = &bench.lab;
    lab.good("tombolo up fast");
    bench.guest(
        "basename $(readlink -f /sys/class/nvme/nvme0/device) >/tmp/address; modprobe uio_pci_generic",
    );
    let bound = |driver: &str| {
        bench.guest(&format!(
            "address=$(cat /tmp/address)
            cd /sys/bus/pci/devices/$address
            echo $address >driver/unbind
            echo {driver} >driver_override
            echo $address >/sys/bus/pci/drivers_probe
            test $(basename $(readlink driver)) = {driver}"
        ));
        let blame = lab.good("tombolo start blame fast");
        blame.matches(&format!("{DISK} goes untranslated")).count()
    };
    assert_eq!(bound("uio_pci_generic"), 1);
    // The next driver gets it untranslated again.
    assert_eq!(bound("nvme"), 2);
    bench.guest("until [ -b /dev/nvme0n1 ]; do :; done");
    assert_eq!(bench.write_and_read("fast"), 0);
    end(lab);
}

#[test]
fn a_vm_that_may_start_a_crash_kernel_stays_translated() {
    let bench = Bench::start(512, "cmdline = \"crashkernel=64M\"");
    bench.lab.good("tombolo up fast");
    assert!(bench.write_and_read("fast") > 1000);
    let said = bench.guest("dmesg");
    assert!(said.contains("stays translated: a crash kernel"), "{said}");
    // Without the reserve none can be loaded, and the next driver of the device goes past the translation.
    bench.guest(
        "echo 0 >/sys/kernel/kexec_crash_size
        address=$(basename $(readlink -f /sys/class/nvme/nvme0/device))
        echo $address >/sys/bus/pci/drivers/nvme/unbind
        echo $address >/sys/bus/pci/drivers/nvme/bind
        until [ -b /dev/nvme0n1 ]; do :; done",
    );
    assert_eq!(bench.write_and_read("fast"), 0);
    end(&bench.lab);
}

#[test]
fn a_kernel_that_another_has_started_finds_the_disk_blocked_until_its_own_module_asks() {
    let bench = Bench::start(512, &ZONE.replace("32M", "160M"));
    let lab = &bench.lab;
    lab.good("tombolo up fast");
    let (mounted, guest) = (bench.mount_zone(), kit("6.12", ["--until", "image"]));
    lab.good(&format!(
        "cc -static -o {mounted}/next_kernel {}/tests/next_kernel.c; cp {1}/vmlinuz {1}/initrd.img {mounted}; umount {mounted}",
        env!("CARGO_MANIFEST_DIR"),
        guest.display()
    ));
    bench.guard();
    let blocked = "dmesg | grep -qF \"Request device [81:00.0] fault\"";
    bench.read_on();
    bench.guest("touch /run/first");
    lab.good(&format!("! {blocked}"));
    // The answer does not come.
    lab.run(
        "timeout 120 tombolo exec fast -- sh -c '/mnt/next_kernel /mnt/vmlinuz /mnt/initrd.img \"$(sed \"s/ tombolo.bypass//\" /proc/cmdline)\"'",
    );
    lab.good(
        "timeout 280 sh -c 'until timeout 60 tombolo exec fast -- test ! -e /run/first; do sleep 1; done'",
    );

    // Its driver tries the disk.
    bench.guest("test ! -e /sys/module/tombolo_bypass; modprobe nvme");
    lab.good(&format!("timeout 120 sh -c 'until {blocked}; do sleep 0.1; done'"));
    bench.guest("test ! -e /dev/nvme0n1");
    println!("{}", bench.look("end", 0));

    bench.guest(
        "for device in /sys/bus/pci/devices/*; do [ $(cat $device/class) != 0x010802 ] || address=$(basename $device); done
        modprobe tombolo_bypass rebind=1
        until [ -b /dev/nvme0n1 ]; do echo $address >/sys/bus/pci/drivers/nvme/bind 2>/dev/null || sleep 0.1; done",
    );
    assert_eq!(bench.write_and_read("fast"), 0);
    end(lab);
}

#[test]
fn a_supervisor_that_wakes_late_switches_no_device_that_its_guest_uses_translated() {
    let bench = Bench::start(512, &format!("cmdline = \"crashkernel=64M\"\n{ZONE}"));
    let lab = &bench.lab;
    lab.good("tombolo up fast");
    let zone = bench.mount_zone();
    // The reserve has kept the device translated: one that was untranslated once is blocked between its drivers. The guest binds the driver when it is told
    // to through the zone, works with the device, and is done when it says so there.
    bench.guest(
        "basename $(readlink -f /sys/class/nvme/nvme0/device) >/tmp/address
        echo 0 >/sys/kernel/kexec_crash_size
        echo $(cat /tmp/address) >/sys/bus/pci/drivers/nvme/unbind
        (
            until [ -e /mnt/bind ]; do sleep 0.1; done
            echo $(cat /tmp/address) >/sys/bus/pci/drivers/nvme/bind
            until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
            touch /mnt/bound
            until [ -e /mnt/work ]; do sleep 0.1; done
            dd if=/dev/urandom of=/tmp/a bs=1M count=24
            dd if=/tmp/a of=/dev/nvme0n1 bs=1M oflag=direct
            dd if=/dev/nvme0n1 of=/tmp/b bs=1M count=24 iflag=direct
            cmp /tmp/a /tmp/b && touch /mnt/same
            touch /mnt/done
        ) >/dev/null 2>&1 &",
    );
    let supervisor = lab.json("tombolo ps --json")["supervisor"].to_string();
    lab.good(&format!(
        "kill -STOP {supervisor}; touch {zone}/bind; timeout 280 sh -c 'until [ -e {zone}/bound ]; do sleep 0.2; done'"
    ));
    // The request that the guest has withdrawn lies in the port.
    let before = bench.translations();
    lab.good(&format!("kill -CONT {supervisor}"));
    bench.guest("dmesg | grep \"refuses untranslated DMA (-110)\"");
    lab.good(&format!("touch {zone}/work; timeout 280 sh -c 'until [ -e {zone}/done ]; do sleep 0.2; done'"));
    lab.good(&format!("test -e {zone}/same"));
    assert!(bench.translations() > before + 100);
    // The next request is answered.
    bench.guest(
        "echo $(cat /tmp/address) >/sys/bus/pci/drivers/nvme/unbind
        echo $(cat /tmp/address) >/sys/bus/pci/drivers/nvme/bind
        until [ -b /dev/nvme0n1 ]; do :; done",
    );
    assert_eq!(bench.write_and_read("fast"), 0);
    lab.good("umount /run/zone");
    end(lab);
}

#[test]
fn a_bypassed_disk_writes_nowhere_but_to_its_vm_whoever_dies() {
    let bench = Bench::start(256, "");
    let lab = &bench.lab;
    lab.good("tombolo up fast");
    let upgrade = lab.run("cp $(command -v tombolo) other; tombolo upgrade --program ./other");
    let said = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    assert!(!upgrade.status.success() && said.contains("bypassed devices"), "{said}");

    // Everything but the VM's memory is guarded all the time, and its own once it is dead.
    bench.guard();
    let deaths = common::setting("TOMBOLO_KILLS", DEATHS);
    for turn in 0..deaths {
        let begun = Instant::now();
        bench.read_on();
        bench.die(turn);
        let dead = begun.elapsed();
        let own = lab.good(&format!("{GUARD} once 1 64"));
        let others = bench.look(if turn + 1 < deaths { "look" } else { "end" }, turn);
        println!("death {turn} after {dead:.0?}: {}; {}", own.trim(), others.trim());
        // The supervisor has given the disk back; where it died, the next command does.
        if turn % 6 == 2 {
            let said = lab.good("tombolo down 2>&1");
            let given = said.contains(&format!("{DISK} given back"));
            assert!(given, "{said}{}", lab.good("dmesg | tail -n 20"));
        }
        lab.good(&format!(
            "timeout 120 sh -c 'until [ \"$(basename $(readlink /sys/bus/pci/devices/{DISK}/driver))\" = nvme ]; do sleep 0.1; done'"
        ));
        if turn + 1 < deaths {
            lab.good("tombolo up fast");
        }
        println!("turn {turn} took {:.0?}", begun.elapsed());
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

/// Sends 8 MiB by the VM's card with this driver and compares the peer's checksum, then takes the numbers that the peer sends.
fn card_moves(driver: &str) -> String {
    format!(
        "modprobe {driver}
    card=$(for i in /sys/class/net/*; do case $(readlink -f $i/device/driver) in */{driver}) basename $i;; esac; done)
    ip addr add 10.0.2.15/24 dev $card
    ip link set $card up
    head -c 8388608 /dev/urandom >/tmp/c
    test \"$(nc 10.0.2.100 7 </tmp/c | cut -c 1-64)\" = \"$(sha256sum </tmp/c | cut -c 1-64)\"
    seq 1000000 >/tmp/numbers
    nc 10.0.2.100 19 </dev/null | cmp - /tmp/numbers
    ip link set $card down
    ip addr flush dev $card"
    )
}

/// The MiB that the card sends and receives. The numbers that it receives have 6,888,896 bytes.
const CARD_MEBIBYTES: f64 = 8.0 + 6_888_896.0 / (1 << 20) as f64;

#[test]
fn translations_for_each_mebibyte_by_page_size_and_by_bypass() {
    // Debian's cloud kernel, which VMs have otherwise, has no driver for the card.
    kit("general-6.12", ["--until", "image"]);
    let (lab, modules) = host(&["--huge-pages", "640", "--append", "hugepagesz=1G hugepages=1:1"]);
    load_module(&lab, &modules);
    // A VM without `pages` has small ones then.
    lab.good("cd /sys/kernel/mm/transparent_hugepage; echo never >enabled; echo never >shmem_enabled");
    lab.good("modprobe igb");
    let cards = ["e1000e", "igb"].map(|driver| (driver, lab.card(driver)));

    let vm = |name: &str, memory: &str, bypass: bool| {
        let device = |address: &str| format!("{{ address = \"{address}\", bypass = {bypass} }}");
        format!(
            "[vm.{name}]\nkernel = \"general-6.12\"\nhypervisor = \"kvm\"\ncpus = 1\nready_timeout = 600\ntrust = {bypass}\n\
             devices = [{}, {}, {}]\n{memory}\n",
            device(DISK),
            device(&cards[0].1),
            device(&cards[1].1)
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
    let mut kinds =
        vec![("nvme", 48.0, DISK_MOVES.to_owned(), "dev 81:00.00".to_owned(), "sid 0x8100 ".to_owned())];
    for (driver, card) in &cards {
        let bus = &card[5..7];
        let walk = format!("sid 0x{}00 ", bus.trim_start_matches('0'));
        kinds.push((driver, CARD_MEBIBYTES, card_moves(driver), format!("dev {bus}:00.00"), walk));
    }
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
        for (driver, card) in &cards {
            assert_eq!(lab.driver(card), *driver);
        }
    }
    end(&lab);
}
