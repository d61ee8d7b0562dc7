// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the commands of docs/vms.md as the page has them: those for `tombolo.toml` with a real guest, those for `services.toml` with the
//! stand-in for QEMU.

use std::path::Path;
use std::process::{Command, Stdio};

use common::Lab;

mod common;

/// A fenced block of the page: what stands behind the fence, and its lines.
struct Block {
    kind: String,
    text: String,
}

fn blocks() -> Vec<Block> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/vms.md");
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

/// The file of this name, from all its pieces.
fn file(name: &str) -> String {
    let pieces = blocks().into_iter().filter(|block| block.kind == format!("toml {name}"));
    pieces.map(|block| block.text).collect()
}

/// Commands with what they print, those that name `services.toml` or those that don't.
fn commands(services: bool) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for block in blocks().into_iter().filter(|block| block.kind == "sh") {
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
        let output = shell.env("TOMBOLO_VM_ACCEL", "tcg").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "$ {command}\n{out}{err}");
        // A terminal ends its lines with a carriage return too.
        assert_eq!(out.replace('\r', "").trim_end(), expected.trim_end(), "$ {command}\n{err}");
    }
}

#[test]
fn a_vm_does_what_the_guide_says_of_ports_disks_cloud_init_terminals_and_copies() {
    let commands = commands(false);
    assert!(commands.len() > 12, "{commands:?}");
    let lab = Lab::new(&file("tombolo.toml"));
    run(&lab, &commands);
    lab.assert_nothing_left();
}

#[test]
fn services_do_what_the_guide_says_of_variables_order_health_and_restarts() {
    let commands = commands(true);
    assert!(commands.len() > 8, "{commands:?}");
    let lab = Lab::new("");
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let compose = file("services.toml");
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
