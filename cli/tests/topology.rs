// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo topology` without VMs: what it shows of machines, what it plans, what it refuses, and the XML for libvirt.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, signal};

mod common;

const TWO_PACKAGES: &str = "package:2 [numa(memory=16GiB)] l3:1 core:4 pu:2";

#[test]
fn a_machine_is_shown_as_text_json_and_a_picture() {
    let lab = Lab::new("");
    let text = lab.good(&["topology", "show", "--synthetic", TWO_PACKAGES]);
    assert!(text.starts_with("machine: 16 CPUs, 32 GiB\n  node 0: 16 GiB, CPUs 0-7\n"), "{text}");
    let json = lab.good(&["topology", "show", "--synthetic", TWO_PACKAGES, "--json", "--svg", "host.svg"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["machine"]["cpus"].as_array().unwrap().len(), 16);
    let picture = std::fs::read_to_string(lab.dir.path().join("host.svg")).unwrap();
    assert!(picture.contains("package 1") && picture.trim_end().ends_with("</svg>"), "{picture}");
    // This host, whatever it is.
    assert!(lab.good(&["topology", "show"]).contains("core 0"));
    let refused = lab.run(&["topology", "show", "--synthetic", "packages two"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("'packages two' is no synthetic description"));
}

#[test]
fn a_plan_says_what_each_vm_gets_why_and_what_is_left() {
    let lab = Lab::new(
        "reserve = 2\n[vm.rest]\ntopology = \"host\"\nmemory = \"2G\"\n[vm.small]\ntopology = \"close\"\ncpus = 4\nmemory = \"1G\"\n[vm.free]\n",
    );
    let text = lab.good(&["topology", "plan", "--synthetic", TWO_PACKAGES]);
    for part in [
        "small: 4 CPUs (1 sockets, 1 dies, 2 cores, 2 threads), 1 GiB in transparent huge pages",
        "vCPUs 0-3 on CPUs 2-5",
        "L3 cache 0 is the smallest object that holds it",
        "rest: 8 CPUs (2 sockets, 1 dies, 3 cores, 2 threads), 2 GiB",
        "4 slots of the guest stay empty",
        "reserved: CPUs 0-1,8-9",
        "free: no CPUs",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let json = lab.good(&["topology", "plan", "--synthetic", TWO_PACKAGES, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let names: Vec<_> = json["vms"].as_array().unwrap().iter().map(|vm| vm["name"].clone()).collect();
    assert_eq!(names, ["rest", "small"], "a VM that names no part is not planned");
}

#[test]
fn what_can_not_be_planned_is_refused_with_the_remedy() {
    let plan = |compose: &str| {
        let output = Lab::new(compose).run(&["topology", "plan", "--synthetic", TWO_PACKAGES]);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let cases = [
        ("[vm.a]\n", "add topology = \"host\""),
        ("[vm.a]\ntopology = \"close\"\ncpus = 17\n", "the VM 'a' wants 17 CPUs and 16 are left"),
        ("[vm.a]\ntopology = \"node:2\"\n", "names node 2, and the host has the nodes 0-1"),
        ("[vm.a]\ntopology = \"host\"\nmemory = \"64G\"\n", "node 0 has 16384 MiB left"),
        ("[vm.a]\ntopology = \"host\"\npages = \"1G\"\nmemory = \"2G\"\n", "reserve pages in /sys/devices"),
        ("[vm.a]\ntopology = \"moon\"\n", "'moon' is no part of a host"),
    ];
    for (compose, words) in cases {
        let said = plan(compose);
        assert!(said.contains(words), "{words} is not in {said}");
    }
    // The same before anything is started.
    let lab = Lab::new("[vm.a]\ntopology = \"close\"\ncpus = 250\nmemory = \"256M\"\n");
    let up = lab.run(&["up"]);
    assert!(String::from_utf8_lossy(&up.stderr).contains("wants 250 CPUs"), "{up:?}");
    lab.assert_nothing_left();
}

/// The CPUs on which the threads of a process and of its children may run.
fn runs_on(process: u64) -> String {
    let process = u32::try_from(process).unwrap();
    tombolo_topology::affinity::of_family(process).map(|cpus| cpus.to_string()).unwrap_or_default()
}

/// The switch of 'lan' as `ps` has it, once it `is` so.
fn switch(lab: &Lab, is: impl Fn(u64, &str) -> bool) -> (u64, String) {
    let begun = Instant::now();
    loop {
        let ps = lab.ps();
        let service = ps["services"].as_array().unwrap().iter().find(|s| s["name"] == "lan").unwrap();
        let cpus = service["cpus"].as_str().unwrap().to_owned();
        match service["process"].as_u64() {
            Some(process) if is(process, &cpus) => return (process, cpus),
            _ => assert!(begun.elapsed() < TIMEOUT, "{ps:#}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_switch_of_a_placed_vm_runs_on_reserved_cpus_when_it_is_started_again_too_and_gets_the_others_back() {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let vm = "kernel = \"./kernel\"\nmemory = \"128M\"\nready = \"running\"\nnetworks = { lan = { address = \"none\" } }\n";
    let lab = Lab::new(&format!(
        "qemu = \"{}\"\nreserve = 1\n[net.lan]\n[zone.near]\nsize = \"8M\"\n[zone.far]\nsize = \"8M\"\n\
         [vm.placed]\ntopology = \"close\"\ncpus = 1\nzones = {{ near = {{}} }}\n{vm}[vm.other]\n{vm}",
        fake.display()
    ));
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    lab.good(&["up"]);
    let all = runs_on(u64::from(std::process::id()));
    let (first, reserved) = switch(&lab, |process, cpus| !cpus.is_empty() && runs_on(process) == cpus);
    assert_ne!(reserved, all, "this test needs a second CPU");
    let ps = lab.ps();
    let placed = ps["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == "placed").unwrap();
    assert_eq!(placed["placement"]["plan"]["emulator"], reserved.as_str(), "{ps:#}");
    assert!(lab.good(&["topology", "show"]).contains("QEMU of placed, switch of lan)"));
    assert!(lab.good(&["topology", "plan"]).contains(&format!("switch of lan: CPUs {reserved}")));

    let memory = |zone: &str| {
        let shown: serde_json::Value =
            serde_json::from_str(&lab.good(&["zone", "inspect", zone, "--json"])).unwrap();
        shown["memory"].clone()
    };
    let node = &placed["placement"]["plan"]["nodes"][0]["host"];
    let near = memory("near");
    assert_eq!(near["nodes"], serde_json::json!({"policy": "bind", "nodes": [node]}), "{near}");
    assert!(near["bytes"][node.to_string()].as_u64() > Some(0), "{near}");
    assert!(memory("far")["nodes"].is_null());
    let words = format!("; new pages: bound to node {node}\n");
    assert!(lab.good(&["zone", "inspect", "near"]).contains(&words));
    assert!(
        lab.good(&["topology", "plan"]).contains(&format!("memory of the zone near: bound to node {node}"))
    );

    signal(u32::try_from(first).unwrap(), "KILL");
    let (second, _) = switch(&lab, |process, cpus| process != first && runs_on(process) == cpus);
    lab.good(&["down", "placed"]);
    switch(&lab, |process, cpus| cpus.is_empty() && runs_on(process) == all);
    lab.good(&["up"]);
    switch(&lab, |process, cpus| process == second && runs_on(process) == cpus && cpus == reserved);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_domain_gets_xml_that_libvirt_accepts() {
    let lab = Lab::new("[vm.a]\ntopology = \"close\"\ncpus = 1\nmemory = \"128M\"\n");
    let xml = "<domain type='qemu'><name>d</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features><devices/></domain>";
    std::fs::write(lab.dir.path().join("d.xml"), xml).unwrap();
    for (arguments, name) in [(["d.xml", "--part=close"], "d"), (["--vm", "a"], "a")] {
        let placed = lab.good(&[&["topology", "libvirt"][..], &arguments].concat());
        assert!(placed.contains("<vcpupin vcpu=\"0\"") && placed.contains(&format!("<name>{name}</name>")));
        let file = lab.dir.path().join(format!("{name}-placed.xml"));
        std::fs::write(&file, &placed).unwrap();
        let valid = Command::new("virt-xml-validate").arg(&file).arg("domain").output().unwrap();
        assert!(valid.status.success(), "{placed}\n{}", String::from_utf8_lossy(&valid.stderr));
    }
}
