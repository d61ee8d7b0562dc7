// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benches that are interrupted. They need what benches need: root, the peers (scripts/bootstrap bench), the guest kit.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use common::{Lab, TIMEOUT};

mod common;

/// `tombolo bench net` in a process group of its own, as a shell starts it; its files are in the lab's folder.
fn start(lab: &Lab, args: &[&str]) -> Child {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut command = lab.command(&["bench", "net", "--results"]);
    command.arg(lab.dir.path()).args(args).current_dir(root).env("TMPDIR", lab.dir.path());
    command.process_group(0).stdout(Stdio::null()).spawn().unwrap()
}

/// Does a process of this lab run `program`?
fn runs(lab: &Lab, program: &str) -> bool {
    lab.processes().iter().any(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).next().is_some_and(|name| String::from_utf8_lossy(name).contains(program))
    })
}

/// Ctrl-C as soon as `program` runs: the bench ends by itself with 130 and leaves nothing.
fn interrupted(args: &[&str], program: &str) {
    let lab = Lab::new("");
    let mut bench = start(&lab, args);
    let since = Instant::now();
    while !runs(&lab, program) {
        assert!(bench.try_wait().unwrap().is_none(), "the bench has ended");
        assert!(since.elapsed() < TIMEOUT, "{program} never ran");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let group = format!("-{}", bench.id());
    assert!(std::process::Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    assert_eq!(bench.wait().unwrap().code(), Some(130));
    lab.assert_nothing_left();
}

#[test]
fn an_interrupted_bench_leaves_no_vm_and_no_namespace() {
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(".cache/guest");
    interrupted(&["--no-load", "--kit", kit.to_str().unwrap()], "qemu-system");
}

#[test]
fn an_interrupted_bench_leaves_no_peer() {
    interrupted(&["--no-vms", "--systems", "ovs-dpdk"], "dpdk-testpmd");
    interrupted(&["--no-vms", "--systems", "ovs-dpdk"], "ovs-vswitchd");
}
