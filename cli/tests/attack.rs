// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A second attack on the supervisor: few descriptors, odd but legal files, hostile agents in newer commands, one project by several paths. A
//! stand-in for QEMU, real switches.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::process::{Command, Stdio};

use common::stand_in::{RESIDENT_MAX, lab, most_resident, number, said, until};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

#[test]
fn an_up_with_few_descriptors_works_or_says_what_is_lacking_and_leaves_nothing() {
    let lab = lab(&format!(
        "[zone.z]\nsize = \"8M\"\n[net.lan]\n[vm.a]\n{VM}zones = {{ z = {{}} }}\nnetworks = {{ lan = {{ address = \"none\" }} }}\n[vm.b]\n{VM}"
    ));
    let mut worked = 0;
    for limit in [8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 256] {
        let mut up = Command::new("prlimit");
        up.arg(format!("--nofile={limit}:{limit}")).args([env!("CARGO_BIN_EXE_tombolo"), "up"]);
        up.current_dir(lab.dir.path())
            .env("XDG_RUNTIME_DIR", lab.dir.path())
            .env("TOMBOLO_HYPERVISOR", "tcg");
        let output = up.stdin(Stdio::null()).output().unwrap();
        let words = said(&output);
        assert!(!words.contains("panicked"), "limit {limit}: {words}");
        if output.status.success() {
            worked += 1;
            assert_eq!(lab.ps()["vms"][1]["state"], "up");
            lab.good(&["down"]);
        } else {
            assert!(
                ["Too many open files", "descriptor", "does not start"]
                    .iter()
                    .any(|lack| words.contains(lack)),
                "limit {limit}: {words}"
            );
            until("something of it runs on", || lab.ps()["supervisor"].is_null());
            lab.good(&["down"]);
        }
        lab.assert_nothing_left();
    }
    assert!(worked > 0);
}

#[test]
fn names_of_parts_that_are_names_of_files_elsewhere_are_names_like_any_other() {
    let words = [
        "supervisor",
        "lock",
        "zones",
        "uplink",
        "seed",
        "disk",
        "agent",
        "monitor",
        "console",
        "n2345678901234567890123456789-1",
    ];
    let mut compose = String::new();
    for word in words {
        compose.push_str(&format!("[zone.{word}]\nsize = \"8M\"\n"));
    }
    compose.push_str("[net.supervisor]\n[net.n2345678901234567890123456789-1]\n");
    for word in words {
        let nets = "networks = { supervisor = { address = \"none\" }, n2345678901234567890123456789-1 = { address = \"none\" } }\n";
        let (zones, nets) =
            (format!("zones = {{ {word} = {{}} }}\n"), if word == "lock" { nets } else { "" });
        compose.push_str(&format!("[vm.{word}]\n{VM}{zones}{nets}"));
    }
    let lab = lab(&compose);
    lab.good(&["up"]);
    for word in words {
        assert!(lab.good(&["logs", word]).contains("first words"), "{word}");
        lab.good(&["exec", word, "--", "true"]);
        lab.good(&["zone", "inspect", word]);
    }
    lab.good(&["restart", "lock", "supervisor"]);
    assert_eq!(lab.ps()["vms"].as_array().unwrap().len(), words.len());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_project_by_another_path_is_the_same_project() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let elsewhere = tempfile::tempdir().unwrap();
    let (file, folder) = (elsewhere.path().join("other.toml"), elsewhere.path().join("folder"));
    std::os::unix::fs::symlink(lab.dir.path().join("tombolo.toml"), &file).unwrap();
    std::os::unix::fs::symlink(lab.dir.path(), &folder).unwrap();
    let paths = [file, folder.join("tombolo.toml"), lab.dir.path().join("./tombolo.toml")];
    let ups: Vec<_> = paths
        .iter()
        .map(|path| {
            lab.command(&["up", "-f", path.to_str().unwrap()]).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for up in ups {
        let output = up.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let first = lab.ps()["vms"][0]["pid"].clone();
    for path in &paths {
        let ps: Value =
            serde_json::from_str(&lab.good(&["ps", "--json", "-f", path.to_str().unwrap()])).unwrap();
        assert_eq!(ps["vms"][0]["pid"], first);
    }
    lab.good(&["down", "-f", paths[0].to_str().unwrap()]);
    lab.assert_nothing_left();
}

#[test]
fn a_runtime_folder_that_another_command_has_made_with_usual_rights_is_taken() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let base = lab.dir.path().join("tombolo");
    DirBuilder::new().mode(0o755).create(&base).unwrap();
    lab.good(&["up"]);
    let folder = std::fs::read_dir(&base).unwrap().next().unwrap().unwrap();
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    lab.good(&["down"]);
    std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o777)).unwrap();
    let refused = lab.run(&["up"]);
    assert!(said(&refused).contains("not a folder that only you can write to"), "{}", said(&refused));
}

#[test]
fn a_vm_that_ends_when_its_agent_is_first_asked_has_ended_and_is_not_silent() {
    for command in ["guest-sync-delimited", "guest-ping"] {
        let words = format!("qemu_args = [\"-fake\", \"ends-at={command}\"]\n");
        let lab = lab(&format!("[vm.a]\n{}{words}", VM.replace("running", "agent")));
        let up = lab.run(&["up"]);
        let words = said(&up);
        assert!(!up.status.success() && words.contains("it ended while it booted"), "{words}");
    }
}

#[test]
fn an_agent_that_floods_whatever_it_is_asked_fails_each_command_and_takes_no_memory() {
    let words = "qemu_args = [\"-fake\", \"flood\"]\nhealthcheck = { command = \"true\", interval = \"1s\", timeout = \"1s\", retries = 1 }\n";
    let lab = lab(&format!("[vm.a]\n{}{words}", VM.replace("running", "agent")));
    lab.good(&["up"]);
    let supervisor = number(&lab.ps()["supervisor"]);
    until("the flood does not end", || lab.good(&["logs", "-n", "1", "a"]).contains("the flood is over"));
    let commands = [
        &["cp", "kernel", "a:/tmp/x"][..],
        &["cp", "a:/etc/x", "here"],
        &["exec", "-t", "a", "--", "true"],
        &["doctor", "a"],
    ];
    for command in commands {
        assert!(!lab.run(command).status.success(), "{command:?}");
    }
    assert!(!lab.dir.path().join("here").exists());
    until("it is not unhealthy", || lab.ps()["vms"][0]["health"] == "unhealthy");
    let most = most_resident(supervisor);
    assert!(most < RESIDENT_MAX, "{most} KiB");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
