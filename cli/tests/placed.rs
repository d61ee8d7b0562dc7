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
    for object in ["CPUs online", "package 0", "core 0", "node 0: memory", "vCPU 0: host CPUs"] {
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
