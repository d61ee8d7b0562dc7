// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Visits by VMFUNC in the lab with VMX, under stock KVM: a VM without a kernel, which does what no kernel would (tiny.c), and a client in a nested guest
//! (visits.rs), with what happens when each party misbehaves or dies (host.sh).

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tombolo_lab::cache::{self, Kernel};
use tombolo_lab::carry::Carried;
use tombolo_qemu::cpio::Archive;

const INIT: &str = "#!/bin/busybox sh\n\
    B=/bin/busybox\n\
    $B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev\n\
    $B insmod /tombolo_service.ko && /bin/visits\n\
    echo \"visits: exit $?\"\n\
    echo o > /proc/sysrq-trigger\n\
    while :; do $B sleep 60; done\n";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the checkout")
}

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("started");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

/// Builds both modules for the lab's kernel; returns their folder.
fn modules(kernel: &Kernel) -> PathBuf {
    let root = root();
    run(Command::new(root.join("guest/kernel")).arg("general-6.12"));
    let kit = cache::folder().expect("a cache").join("guest/general-6.12");
    let release = fs::read_to_string(kit.join("release")).expect("the kit's kernel");
    assert_eq!(
        release.trim(),
        kernel.release,
        "the lab's kernel and its headers: `tombolo lab fetch` and guest/kernel general-6.12 fetch the newest"
    );
    let source = root.join("calls/service/linux");
    run(Command::new("make").arg("-C").arg(&source).arg(format!("KDIR={}", kit.join("build").display())));
    source.join("build").join(&kernel.release)
}

/// A copy of a program without what debuggers need: the lab's memory is small.
fn stripped(program: &str, into: &Path) -> PathBuf {
    let target = into.join(Path::new(program).file_name().expect("a name"));
    run(Command::new("strip").arg("-o").arg(&target).arg(program));
    target
}

fn write_guest(target: &Path, module: &Path, program: &Path) {
    let mut archive = Archive::new(BufWriter::new(File::create(target).expect("created")));
    for folder in ["bin", "lib", "lib64", "lib/x86_64-linux-gnu", "proc", "sys", "dev", "tmp"] {
        archive.directory(folder).expect("written");
    }
    let mut put =
        |place: &str, from: &Path| archive.program(place, &fs::read(from).expect("read")).expect("written");
    put("bin/busybox", &tombolo_rig::image::busybox().expect("busybox"));
    put("tombolo_service.ko", module);
    put("bin/visits", program);
    let mut libraries = Carried::default();
    libraries.add(program).expect("its libraries");
    for (place, from) in libraries.entries().filter(|(_, from)| *from != program) {
        put(place.strip_prefix("/usr").expect("a library").to_str().expect("a path"), from);
    }
    archive.program("init", INIT.as_bytes()).expect("written");
    archive.finish().expect("written");
}

/// Exits by reason, between the two counts.
fn exits(said: &str) -> BTreeMap<u32, u64> {
    let mut exits = BTreeMap::new();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["exits", when, reason, count] = words[..] {
            let count: u64 = count.parse().expect("a count");
            let entry: &mut u64 = exits.entry(reason.parse().expect("a reason")).or_default();
            *entry = if when == "after" { count - *entry } else { count };
        }
    }
    exits.retain(|_, count| *count > 0);
    exits
}

/// What both tests give their lab.
struct Given {
    folder: tempfile::TempDir,
    kernel: Kernel,
    modules: PathBuf,
    server: PathBuf,
}

impl Given {
    fn new() -> Given {
        let folder = tempfile::tempdir().expect("a folder");
        let kernel = cache::kernel().expect("the lab's kernel");
        let modules = modules(&kernel);
        let server = stripped(env!("CARGO_BIN_EXE_tombolo-service"), folder.path());
        let given = Given { folder, kernel, modules, server };
        fs::create_dir(given.path()).expect("created");
        common::service("examples/kv.c", &given.path());
        common::service("tests/vmfunc/odd.c", &given.path());
        let module = "tombolo_service_host.ko";
        run(Command::new("strip")
            .args(["-g", "-o"])
            .args([given.path().join(module), given.modules.join(module)]));
        given
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("given")
    }

    /// Boots a lab for a script of this folder; returns what it said.
    fn lab(&self, script: &str, arguments: &[&Path]) -> String {
        let there = self.path().join(script);
        fs::copy(root().join("calls/service/tests/vmfunc").join(script), &there).expect("copied");
        let mut lab = Command::new(root().join("target/debug/tombolo-lab"));
        lab.args(["--vmx", "run", "--with"]).arg(self.path()).arg("--with").arg(&self.server);
        lab.args(["--", "busybox", "sh"]).arg(there).arg(self.path()).args(arguments).arg(&self.server);
        let said = run(lab.env("XDG_RUNTIME_DIR", self.folder.path()));
        println!("{said}");
        said
    }
}

fn has_said(said: &str, lines: &[&str]) {
    for line in lines {
        assert!(said.contains(line), "not said: {line}");
    }
}

fn number(said: &str, what: &str) -> u64 {
    let rest = said.lines().find_map(|l| l.strip_prefix(what)).unwrap_or_else(|| panic!("not said: {what}"));
    rest.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
}

#[test]
fn a_vm_that_does_what_no_kernel_would_calls_without_an_exit_and_gets_nothing_else() {
    let given = Given::new();
    let source = root().join("calls/service/tests/vmfunc/tiny.c");
    run(Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s", "-o"])
        .args([given.path().join("tiny"), source]));
    let said = given.lab("tiny.sh", &[]);
    has_said(
        &said,
        &[
            "claim: a call is done, and one that does not exist is an error",
            "claim: a service that loops, faults or leaves its context ends the visit with an error, and serves on",
            "claim: a visit that an exception ends at any instruction of gate and door leaves the service to others",
            "claim: a client with other page tables or in another mode does not reach the gate",
            "claim: a client that enters its gate at any byte and by any index, with any privilege, gets nowhere",
            "claim: a million calls",
            "host: the module is gone",
            "host: the kernel complains of nothing",
        ],
    );
    assert!(number(&said, "instructions of a call: ") <= 150);
    // The host's own interrupts, and no others: a call of its own would make a million.
    assert!(number(&said, "exits of a million calls, all of them: ") < 10_000);
}

#[test]
fn a_guests_process_calls_a_service_and_the_death_of_a_party_in_a_visit_harms_no_other() {
    let given = Given::new();
    let client = stripped(env!("CARGO_BIN_EXE_visits"), given.folder.path());
    write_guest(&given.path().join("guest.cpio"), &given.modules.join("tombolo_service.ko"), &client);
    let said = given.lab("host.sh", &[&given.kernel.image]);
    has_said(
        &said,
        &[
            "claim: a client stores and finds, and a call that does not exist is an error",
            "claim: a service that loops, faults or leaves its context ends the visit with an error, and serves on",
            "claim: two clients call at the same time",
            "claim: a client that enters its gate at any byte and by any index gets nowhere",
            "claim: a million calls",
            "claim: a client whose server dies in mid-visit is told that the service is gone",
            "host: the VM has died in a visit",
            "host: the module is gone",
            "host: the kernel complains of nothing",
        ],
    );
    println!("exits during a million calls, by reason: {:?}", exits(&said));
}
