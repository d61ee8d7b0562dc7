// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the commands of the guide's pages as they stand there: of docs/vms.md those for `tombolo.toml` with a real guest and those for `services.toml`
//! with the stand-in for QEMU, of docs/start.md with two guests that boot a small disk image, of docs/files.md on this host. A line `…` stands for
//! output that is left out.

use std::path::Path;
use std::process::{Command, Stdio};

use common::Lab;

mod common;

/// A fenced block of the page: what stands behind the fence, and its lines.
struct Block {
    kind: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let page = std::fs::read_to_string(page).unwrap();
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(kind), None) => open = Some(Block { kind: kind.to_owned(), text: String::new() }),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    blocks
}

/// The page's file of this name, from all its pieces.
fn file(page: &str, name: &str) -> String {
    let pieces = blocks(page).into_iter().filter(|block| block.kind == format!("toml {name}"));
    pieces.map(|block| block.text).collect()
}

/// The page's commands with what they print, from the blocks that name `services.toml` or from those that don't.
fn commands(page: &str, services: bool) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for block in blocks(page).into_iter().filter(|block| block.kind == "sh") {
        assert!(block.text.starts_with("$ "), "{}", block.text);
        let mut own = Vec::new();
        for line in block.text.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => own.push((command.to_owned(), String::new())),
                None => own.last_mut().unwrap().1.extend([line, "\n"]),
            }
        }
        if block.text.contains("services.toml") == services {
            commands.extend(own);
        }
    }
    commands
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
    common::disk_image(&lab.dir.path().join("guest.img"));
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
