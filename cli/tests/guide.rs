// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the commands of the guide's pages as they stand there: of docs/vms.md those for `tombolo.toml` with a real guest and those for `services.toml`
//! with the stand-in for QEMU, of docs/start.md with two guests that boot a small disk image, of docs/files.md on this host (those of kind `sh guest`: `cgroups.rs`). A line `…` stands for
//! output that is left out.

use std::path::Path;
use std::process::{Command, Stdio};

use common::Lab;
use common::page::{self, file};

mod common;

/// The page's commands with what they print, from the blocks that name `services.toml` or from those that don't.
fn commands(page: &str, services: bool) -> Vec<(String, String)> {
    page::commands(page, "sh", |block| block.text.contains("services.toml") == services)
}

fn run(lab: &Lab, commands: &[(String, String)]) {
    let program = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    for (command, expected) in commands {
        println!("$ {command}");
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(lab.dir.path()).stdin(Stdio::null());
        shell.env("PATH", &path).env("XDG_RUNTIME_DIR", lab.dir.path()).env("XDG_STATE_HOME", lab.dir.path());
        let output = shell.env("TOMBOLO_HYPERVISOR", "tcg").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "$ {command}\n{out}{err}");
        if expected.trim() == "…" {
            continue;
        }
        // A terminal ends its lines with a carriage return too.
        assert_eq!(out.replace('\r', "").trim_end(), expected.trim_end(), "$ {command}\n{err}");
    }
}

#[test]
fn a_vm_does_what_the_guide_says_of_ports_disks_cloud_init_terminals_and_copies() {
    let commands = commands("vms.md", false);
    assert!(commands.len() > 12, "{commands:?}");
    let lab = Lab::new(&file("vms.md", "tombolo.toml"));
    run(&lab, &commands);
    lab.assert_nothing_left();
}

#[test]
fn services_do_what_the_guide_says_of_variables_order_health_and_restarts() {
    let commands = commands("vms.md", true);
    assert!(commands.len() > 8, "{commands:?}");
    let lab = Lab::new("");
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let compose = file("vms.md", "services.toml");
    let mut adapted = format!("qemu = \"{}\"\n", fake.display());
    for line in compose.lines() {
        adapted.extend([line, "\n"]);
        if line.starts_with("[vm.") {
            adapted.push_str("kernel = \"./kernel\"\n");
        }
    }
    std::fs::write(lab.dir.path().join("services.toml"), adapted).unwrap();
    run(&lab, &commands);
    lab.assert_nothing_left();
}

#[test]
fn two_vms_and_their_host_write_one_file_as_the_first_page_says() {
    let commands = commands("start.md", false);
    assert!(commands.len() > 8, "{commands:?}");
    let lab = Lab::new(&file("start.md", "tombolo.toml"));
    let [raw, image] = ["guest.raw", "guest.qcow2"].map(|name| lab.dir.path().join(name));
    common::disk_image(&raw);
    let convert = Command::new("qemu-img").args(["convert", "-O", "qcow2"]).args([&raw, &image]).status();
    assert!(convert.expect("the package qemu-utils").success());
    run(&lab, &commands);
    lab.assert_nothing_left();
}

#[test]
fn a_zones_files_are_copied_and_brought_back_as_the_page_on_files_says() {
    let commands = commands("files.md", false);
    assert!(commands.len() > 16, "{commands:?}");
    let lab = Lab::new("");
    run(&lab, &commands);
    lab.assert_nothing_left();
}
