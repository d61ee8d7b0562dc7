// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims that need a KVM host, checked in the emulated one: a passed-through device from the compose file to `down`, and the host's part of a VM's noise.

use std::path::{Path, PathBuf};
use std::process::Command;

use common::kvm_host::Lab;
use serde_json::Value;

mod common;

#[test]
fn a_vm_of_a_compose_file_gets_its_device_and_memory_and_the_device_goes_back_on_down_and_after_a_crash() {
    let lab = Lab::start("device", &[]);
    let card = lab.card("e1000e");
    lab.good(&format!(
        "cat >tombolo.toml <<'END'\n\
         [vm.grows]\nkernel = \"6.12\"\nhypervisor = \"kvm\"\nmemory = \"1536M\"\nboot_memory = \"512M\"\ndevices = [\"{card}\"]\nready_timeout = 600\n\
         [vm.second]\nkernel = \"6.12\"\nhypervisor = \"kvm\"\nmemory = \"512M\"\ndevices = [\"{card}\"]\nready = \"running\"\nEND"
    ));

    // It starts with a part of its memory, has the card, and gets the rest.
    let up = lab.run("tombolo up grows");
    let said = String::from_utf8_lossy(&up.stderr).into_owned();
    assert!(
        up.status.success() && said.contains(" of 1536 MiB") || said.contains("1536 MiB, complete"),
        "{said}"
    );
    assert_eq!(lab.driver(&card), "vfio-pci");
    lab.until("tombolo ps --json", |ps| {
        let vm = &ps["vms"][0];
        assert!(vm["state"].as_str().is_some_and(|s| s.starts_with("up")), "{vm}");
        (vm["growth"]["phase"] == "complete").then_some(())
    });
    let kib = lab.good("tombolo exec grows -- awk '/^MemTotal/ { print $2 }' /proc/meminfo");
    assert!(kib.trim().parse::<u64>().unwrap() > 1400 << 10, "the guest has {kib} KiB");
    let ids = lab.good("tombolo exec grows -- sh -c 'cat /sys/bus/pci/devices/*/device'");
    assert!(ids.lines().any(|id| id == "0x10d3"), "no 82574L among {ids}");
    let blame = lab.good("tombolo start blame grows");
    for event in ["monitor answers", "first console output", "first grown block", "full memory"] {
        assert!(blame.contains(event), "{event} is not in\n{blame}");
    }
    println!("{blame}");
    assert!(lab.good("tombolo start metrics").contains("tombolo_start_complete{vm=\"grows\"} 1"));

    // Its memory is in ordinary and transparent huge pages, and so it is mapped for the card.
    let list = lab.json("tombolo passthrough ls --json");
    let mappings =
        &list.as_array().unwrap().iter().find(|d| d["address"] == card.as_str()).unwrap()["mappings"];
    let pages = mappings["pages"].as_array().unwrap();
    let bytes: u64 = pages.iter().map(|p| p["size"].as_u64().unwrap() * p["count"].as_u64().unwrap()).sum();
    assert!((1400 << 20..1700 << 20).contains(&bytes), "{mappings}");
    assert!(!mappings["why"].as_array().unwrap().is_empty(), "{mappings}");
    assert!(list.as_array().unwrap().iter().all(|d| d["driver"] == "vfio-pci" || d["mappings"].is_null()));

    // No other VM gets the card meanwhile.
    let refused = lab.run("tombolo up second");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("vm.second.devices"), "{said}");
    assert!(!lab.run(&format!("tombolo passthrough release {card}")).status.success());

    // The supervisor crashes, and QEMU with it; the next command gives the card back.
    let supervisor = lab.json("tombolo ps --json")["supervisor"].to_string();
    lab.good(&format!("kill -KILL {supervisor}"));
    assert_eq!(lab.driver(&card), "vfio-pci");
    lab.good("tombolo down");
    assert_eq!(lab.driver(&card), "e1000e");

    // And in peace.
    lab.good("tombolo up second");
    assert_eq!(lab.driver(&card), "vfio-pci");
    lab.good("tombolo down");
    assert_eq!(lab.driver(&card), "e1000e");
}

#[test]
fn the_noise_of_a_vm_under_kvm_has_its_hosts_part() {
    let lab = Lab::start("noise", &[]);
    lab.good(
        "cat >tombolo.toml <<'END'\n\
         [vm.a]\nkernel = \"6.12\"\naccel = \"kvm\"\ncpus = 1\nmemory = \"256M\"\nready_timeout = 600\nEND",
    );
    lab.good("tombolo up");
    lab.good("mountpoint -q /sys/kernel/debug || mount -t debugfs nodev /sys/kernel/debug");
    let report = lab.json("tombolo noise a --seconds 1 --json");
    assert_eq!(report["traced"], true, "{report}");
    let notes = report["notes"].to_string();
    assert!(!notes.contains("TSC offset is not known"), "{notes}");
    // The guest's own interrupts, and the exits by which the host took the CPU, by name.
    let sources = report["sources"].as_array().unwrap();
    let of = |place: &str, kind: &str| {
        let mut rows =
            sources.iter().filter(|row| row["source"]["place"] == place && row["source"]["kind"] == kind);
        rows.find(|row| row["us_per_second"].as_f64() > Some(0.0))
    };
    let exit = of("host", "vm_exit").unwrap_or_else(|| panic!("no exit explains a gap: {report:#}"));
    assert!(exit["source"]["name"].as_str().is_some_and(|name| !name.is_empty()), "{exit}");
    assert!(of("here", "timer").is_some(), "{report:#}");
    println!("{}", lab.good("tombolo noise a --seconds 1"));
    lab.good("tombolo down");
}

/// Builds the program that plants noise, where the lab sees it.
fn noise_plant() -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("noise-plant");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../noise/tests/programs/plant.rs");
    let built = Command::new("rustc").args(["--edition", "2024", "-O", source, "-o"]).arg(&program).status();
    assert!(built.unwrap().success(), "{source} does not build");
    program
}

/// Builds the library by which a QEMU unmaps its guest's memory, where the lab sees it.
fn unmap_library() -> PathBuf {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unmap.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/unmap.c");
    let built =
        Command::new("cc").args(["-Wall", "-O2", "-shared", "-fPIC", source, "-o"]).arg(&library).status();
    assert!(built.unwrap().success(), "{source} does not build");
    library
}

/// Measures the only VM, of one CPU, for a second while a plant runs on the host: `command` is followed by the file for whose life it runs and the one
/// that it makes. Returns the report, and the microseconds that the plant had in the phase in which the causes were recorded, by its own account.
fn measured_beside(lab: &Lab, command: &str) -> (Value, f64) {
    lab.good(&format!(
        "rm -f begun ended; touch planted; setsid sh -c '{command} planted begun; touch ended' >truth 2>&1 &"
    ));
    lab.good("timeout 120 sh -c 'until [ -e begun ]; do sleep 0.1; done' || ! cat truth");
    let vm = lab.json("tombolo ps --json")["vms"]
        .as_array()
        .unwrap()
        .iter()
        .find(|vm| !vm["pid"].is_null())
        .cloned()
        .unwrap();
    let report = lab.json(&format!("tombolo noise {} --seconds 1 --json", vm["name"].as_str().unwrap()));
    let truth = lab.good("rm planted; timeout 120 sh -c 'until [ -e ended ]; do sleep 0.1; done'; cat truth");

    let qemu = vm["pid"].to_string();
    // The emulated processor does not scale a guest's time-stamp counter.
    let offset = lab.good(&format!(
        "cd /sys/kernel/debug/kvm/{qemu}-*/vcpu0; test ! -e tsc-scaling-ratio; cat tsc-offset"
    ));
    let offset: i64 = offset.trim().parse().unwrap();
    let cpu = &report["cpus"][0];
    let [first, last] = ["first_tick", "last_tick"].map(|key| cpu[key].as_u64().unwrap());
    let tick = |word: &str| {
        word.parse::<u64>().unwrap_or_else(|e| panic!("{e}: {truth}")).wrapping_add_signed(offset)
    };
    let stretches = truth.lines().map(|line| {
        let (start, end) = line.split_once(' ').unwrap_or_else(|| panic!("{truth}"));
        tick(end).min(last).saturating_sub(tick(start).max(first))
    });
    println!("{} stretches were planted in all", truth.lines().count());
    let us_per_tick = report["seconds"].as_f64().unwrap() * 1e6 / (last - first) as f64;
    (report, stretches.sum::<u64>() as f64 * us_per_tick)
}

/// The microseconds that a report puts to a source of the host's, in all of its recorded phase.
fn of_host(report: &Value, kind: &str, name: &str) -> f64 {
    of(report, "host", kind, name)
}

fn of(report: &Value, place: &str, kind: &str, name: &str) -> f64 {
    let rows = report["sources"].as_array().unwrap().iter();
    let of = |source: &Value| source["place"] == place && source["kind"] == kind && source["name"] == name;
    let rate: f64 =
        rows.filter(|row| of(&row["source"])).map(|row| row["us_per_second"].as_f64().unwrap()).sum();
    rate * report["seconds"].as_f64().unwrap()
}

#[test]
fn a_real_time_thread_of_the_host_is_found_in_the_noise_of_a_vm_and_has_its_time() {
    let lab = Lab::start("planted", &[]);
    // Its memory is there before the guest runs, and its CPU stays where it is.
    lab.good(
        "cat >tombolo.toml <<'END'\n\
         [vm.a]\nkernel = \"6.12\"\naccel = \"kvm\"\ntopology = \"cpus:1\"\nmemory = \"256M\"\nready_timeout = 600\nEND",
    );
    lab.good("tombolo up");
    lab.good("mountpoint -q /sys/kernel/debug || mount -t debugfs nodev /sys/kernel/debug");
    let plant = noise_plant().display().to_string();

    // Nothing planted.
    let (quiet, _) = measured_beside(&lab, "touch");
    assert_eq!(of_host(&quiet, "thread", "noise-plant"), 0.0, "{quiet:#}");

    // A real-time thread on the vCPU's CPU, every 10 ms for 200 µs.
    let (report, planted) = measured_beside(&lab, &format!("taskset 2 chrt -f 50 {plant}"));
    let found = of_host(&report, "thread", "noise-plant");
    println!("real-time thread: {found:.0} µs found, {planted:.0} µs by its own account");
    assert!(planted > 0.0 && found >= 0.95 * planted, "{report:#}");
    lab.good("tombolo down");
}

#[test]
fn memory_that_the_host_unmaps_is_found_in_the_noise_of_a_vm_and_has_its_time() {
    let lab = Lab::start("unmapped", &["--huge-pages", "400"]);
    // The memory is shared as if other processes had a part in it. One guest stands still while the host fetches a page; the other one lets another thread
    // run meanwhile, or idles, as guests do unless they are told not to.
    let library = unmap_library();
    let vm = |name: &str, more: &str| {
        format!(
            "[vm.{name}]\nkernel = \"6.12\"\naccel = \"kvm\"\nqemu_args = [\"-boot\", \"strict=on\"]\ntopology = \"cpus:1\"\npages = \"2M\"\n\
             memory = \"256M\"\nready_timeout = 600\n{more}\n"
        )
    };
    let file = vm("waits", "cmdline = \"no-kvmapf\"") + &vm("goes-on", "");
    lab.good(&format!(
        "cat >tombolo.toml <<'END'\nqemu = \"/run/project/qemu\"\n{file}END\n\
         printf '#!/bin/sh\\nUNMAP=/run/project LD_PRELOAD={} exec qemu-system-x86_64 \"$@\"' >qemu; chmod +x qemu; mkfifo ask answer\n\
         printf 'echo \"$@\" >ask; cat answer' >unmap\n\
         mountpoint -q /sys/kernel/debug || mount -t debugfs nodev /sys/kernel/debug",
        library.display()
    ));
    for name in ["waits", "goes-on"] {
        lab.good(&format!("tombolo up {name}"));
        // QEMU's other threads leave the vCPU's CPU alone.
        lab.good(
            "for thread in /proc/$(pidof qemu-system-x86_64)/task/*; do grep -q ^CPU $thread/comm || taskset -p 1 ${thread##*/}; done",
        );
        // KVM maps what the guest touches for the first time; in the second run it has touched it.
        let [_, quiet] = [(); 2].map(|()| of_host(&measured_beside(&lab, "touch").0, "vm_exit", "npf"));
        let (report, planted) = measured_beside(&lab, "sh unmap");
        let found = of_host(&report, "vm_exit", "npf");
        let idle = of(&report, "here", "thread", "idle") + of_host(&report, "vm_exit", "hlt");
        println!(
            "{name}: {found:.0} µs of unmapped memory found, {planted:.0} µs planted, {quiet:.0} µs before; {idle:.0} µs idle"
        );
        assert!(planted > 0.0 && found >= 0.95 * planted && idle <= 0.05 * planted, "{report:#}");
        assert!(quiet < 0.05 * planted, "{quiet} µs where nothing was unmapped");
        lab.good(&format!("tombolo down {name}"));
    }
}
