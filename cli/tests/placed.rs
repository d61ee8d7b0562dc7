// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM that lies on a part of this host, under TCG: its guest sees what it got, and QEMU's threads and memory are where they belong.

use common::Lab;
use serde_json::Value;

mod common;

fn lines<'a>(checked: &'a Value, verdict: &str) -> Vec<&'a str> {
    let lines = checked["lines"].as_array().unwrap().iter();
    lines.filter(|line| line["verdict"] == verdict).map(|line| line["object"].as_str().unwrap()).collect()
}

#[test]
fn a_vm_lies_on_a_part_of_the_host_and_its_guest_sees_just_that() {
    let lab = Lab::new("[vm.a]\ntopology = \"close\"\ncpus = 1\nmemory = \"256M\"\nkernel = \"6.12\"\n");
    lab.good(&["up"]);
    let checked: Value = serde_json::from_str(&lab.good(&["topology", "check", "a", "--json"])).unwrap();
    assert_eq!(lines(&checked, "differs"), Vec::<&str>::new(), "{checked:#}");
    let same = lines(&checked, "same");
    for object in [
        "CPUs online",
        "package 0",
        "core 0",
        "node 0: memory",
        "vCPU 0: host CPUs",
        "QEMU's own threads: host CPUs",
    ] {
        assert!(same.contains(&object), "{object} is not in {same:?}");
    }
    let vm = &lab.ps()["vms"][0];
    let cpu = vm["placement"]["plan"]["vcpus"][0]["host"].to_string();
    assert!(lab.good(&["topology", "show"]).contains(&format!("CPU {cpu} (a)")));

    // The vCPU's thread is moved: the check reports it, and fails.
    let thread = vm["placement"]["threads"][0]["thread"].to_string();
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let all = own.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    assert_ne!(all, cpu, "this test needs a second CPU");
    let moved = std::process::Command::new("taskset").args(["-pc", all, &thread]).output().unwrap();
    assert!(moved.status.success(), "{moved:?}");
    let checked = lab.run(&["topology", "check", "a"]);
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("differs   vCPU 0: host CPUs: {all} in place of {cpu}")), "{said}");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_is_measured_inside_and_below() {
    // QEMU before 8.1 does not emulate kernels that patch their code.
    let arguments = tombolo_noise::run::RESIDENT;
    let lab = Lab::new(&format!(
        "[vm.a]\ncpus = 2\nmemory = \"256M\"\nkernel = \"6.12\"\ncmdline = \"{arguments}\"\n"
    ));
    lab.good(&["up"]);
    let json = lab.good(&["noise", "a", "--cpus", "1", "--seconds", "0.5", "--json"]);
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["traced"], true, "the guest's kernel has tracefs: {json}");
    assert_eq!(report["cpus"][0]["cpu"], 1, "{json}");
    let sources = report["sources"].as_array().unwrap();
    let timer =
        sources.iter().find(|row| row["source"]["kind"] == "timer" && row["source"]["place"] == "here");
    assert!(timer.is_some_and(|row| row["us_per_second"].as_f64() > Some(0.0)), "{json}");
    // Under TCG the guest's TSC offset is not known. The host's part has a table of its own, or a note says why it has none.
    let notes = report["notes"].to_string();
    assert!(
        notes.contains("only KVM tells a guest's TSC offset") || notes.contains("on the host: "),
        "{notes}"
    );
    assert!(!sources.iter().any(|row| row["source"]["place"] == "host"), "{json}");
    let left = lab.good(&[
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        "ls -d /run/.tombolo-noise-* /tmp/.tombolo-noise-* || true",
    ]);
    assert_eq!(left, "");

    let refused = |vm: &str, cpus: &str| {
        let output = lab.run(&["noise", vm, "--cpus", cpus]);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(
        refused("a", "7").contains("the guest of 'a' can't be measured: there is no CPU 7"),
        "{}",
        refused("a", "7")
    );
    assert!(refused("b", "0").contains("runs no VM 'b'"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
