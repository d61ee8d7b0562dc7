// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the commands of the guide's pages as they stand there (scripts/pages.py says how a page marks them): with real guests, with the stand-in for QEMU, or on
//! this host. `cgroups.rs`, `plain.rs`, `accel.rs` and vm/libvirt/tests/libvirtd.py run those of other kinds, and scripts/check-docs finds a block that nothing runs.

use std::path::Path;
use std::process::Command;

use common::Lab;
use common::page::{self, file, pages, told};

mod common;

#[test]
fn a_vm_does_what_the_guide_says_of_ports_disks_cloud_init_terminals_and_copies() {
    let lab = Lab::new(&file("vms.md", "tombolo.toml"));
    page::run(&lab, "vms.md", "vm", None);
    lab.assert_nothing_left();
}

#[test]
fn services_do_what_the_guide_says_of_variables_order_health_and_restarts() {
    let lab = Lab::new("");
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let mut adapted = format!("qemu = \"{}\"\n", fake.display());
    for line in file("vms.md", "services.toml").lines() {
        adapted.extend([line, "\n"]);
        if line.starts_with("[vm.") {
            adapted.push_str("kernel = \"./kernel\"\n");
        }
    }
    std::fs::write(lab.dir.path().join("services.toml"), adapted).unwrap();
    page::run(&lab, "vms.md", "services", None);
    lab.assert_nothing_left();
}

#[test]
fn two_vms_and_their_host_write_one_file_as_the_first_page_says() {
    let lab = Lab::new(&file("start.md", "tombolo.toml"));
    let [raw, image] = ["guest.raw", "guest.qcow2"].map(|name| lab.dir.path().join(name));
    common::disk_image(&raw);
    let convert = Command::new("qemu-img").args(["convert", "-O", "qcow2"]).args([&raw, &image]).status();
    assert!(convert.expect("the package qemu-utils").success());
    page::run(&lab, "start.md", "vm", None);
    lab.assert_nothing_left();
}

#[test]
fn each_page_does_on_this_host_what_it_says() {
    let stand_ins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand-ins");
    let mut run = 0;
    for kind in ["", "system"] {
        for name in told(pages(&["list", kind])).lines() {
            let lab = Lab::new("");
            std::fs::remove_file(lab.dir.path().join("tombolo.toml")).unwrap();
            let mut disk = Command::new("qemu-img");
            disk.args(["create", "-q", "-f", "qcow2", "web.qcow2", "1G"]).current_dir(lab.dir.path());
            let made = disk.status();
            assert!(made.expect("the package qemu-utils").success());
            page::run(&lab, name, kind, Some(&stand_ins));
            lab.assert_nothing_left();
            run += 1;
        }
    }
    assert!(run > 5, "only {run} pages have such commands");
}

#[test]
fn a_compose_file_of_which_a_page_has_a_piece_is_understood() {
    let excerpts: Vec<(String, String)> = serde_json::from_str(&told(pages(&["excerpts", "toml"]))).unwrap();
    assert!(excerpts.len() > 6, "{excerpts:?}");
    for (place, text) in excerpts {
        let config = Lab::new(&text).run(&["config"]);
        assert!(config.status.success(), "{place}: {}\n{text}", String::from_utf8_lossy(&config.stderr));
    }
}

#[test]
fn each_command_in_the_text_of_a_page_exists_with_its_options() {
    told(pages(&["names", env!("CARGO_BIN_EXE_tombolo")]));
}
