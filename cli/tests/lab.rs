// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims that need a KVM host, checked in the emulated one: a passed-through device from the compose file to `down`, and the host's part of a VM's noise.

use common::kvm_host::Lab;

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
