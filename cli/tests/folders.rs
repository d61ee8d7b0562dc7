// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Projects whose folder gets another name while they are up. A stand-in for QEMU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::stand_in::{fake, number, said, until};
use common::{Lab, signal};

mod common;

/// A project in the folder 'old' of the lab's, whose VM is up.
fn up() -> (Lab, PathBuf) {
    let lab = Lab::new("");
    let old = lab.dir.path().join("old");
    std::fs::create_dir(&old).unwrap();
    let file = format!(
        "qemu = \"{}\"\n[vm.a]\nkernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n",
        fake().display()
    );
    std::fs::write(old.join("tombolo.toml"), file).unwrap();
    std::fs::write(old.join("kernel"), "").unwrap();
    good(lab.command(&["up"]).current_dir(&old));
    (lab, old)
}

fn good(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    output
}

/// The supervisor and the VM's process as 'ps' in this folder has them.
fn running(lab: &Lab, folder: &Path) -> (u32, u32) {
    let ps = good(lab.command(&["ps", "--json", "--wait", "300"]).current_dir(folder));
    let ps: serde_json::Value = serde_json::from_slice(&ps.stdout).unwrap();
    (number(&ps["supervisor"]), number(&ps["vms"][0]["pid"]))
}

#[test]
fn a_project_whose_folder_is_renamed_is_reached_by_its_old_path() {
    let (lab, old) = up();
    let before = running(&lab, &old);
    let [new, file] = [lab.dir.path().join("new"), old.join("tombolo.toml")];
    std::fs::rename(&old, &new).unwrap();
    let words = said(&good(lab.command(&["ps"]).current_dir(&new)));
    assert!(words.contains("nothing runs"), "{words}");
    let ps: serde_json::Value =
        serde_json::from_slice(&good(&mut lab.command(&["ps", "-a", "--json"])).stdout).unwrap();
    assert_eq!((number(&ps[0]["supervisor"]), number(&ps[0]["vms"][0]["pid"])), before);
    assert_eq!(Path::new(ps[0]["file"].as_str().unwrap()).file_name(), file.file_name());
    good(&mut lab.command(&["exec", "-f", file.to_str().unwrap(), "a", "--", "true"]));
    good(&mut lab.command(&["down", "-f", file.to_str().unwrap()]));
    lab.assert_nothing_left();
}

#[test]
fn a_switch_is_started_again_though_the_folder_of_sockets_and_logs_has_vanished() {
    let (lab, old) = up();
    let file = std::fs::read_to_string(old.join("tombolo.toml")).unwrap();
    let more = format!("{file}networks = {{ lan = {{ address = \"none\" }} }}\n[net.lan]\n");
    std::fs::write(old.join("tombolo.toml"), more).unwrap();
    good(lab.command(&["restart", "a"]).current_dir(&old));
    std::fs::remove_dir_all(lab.dir.path().join("tombolo")).unwrap();
    until("it is not found again", || {
        let ps = lab.command(&["ps", "--json", "--wait", "300"]).current_dir(&old).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&ps.stdout).is_ok_and(|ps| ps["supervisor"].is_u64())
    });
    let net = || {
        let ps = good(lab.command(&["ps", "--json", "--wait", "300"]).current_dir(&old));
        serde_json::from_slice::<serde_json::Value>(&ps.stdout).unwrap()["networks"][0].clone()
    };
    let first = net()["pid"].clone();
    signal(number(&first), "KILL");
    until("its switch is not started again", || net()["pid"].is_u64() && net()["pid"] != first);
    // It answers, and has its port.
    let ls = || lab.command(&["net", "ls", "--json"]).current_dir(&old).output().unwrap();
    until("it has no port", || {
        let socket = Path::new(net()["control"].as_str().unwrap()).with_file_name("lan.a.port");
        ls().status.success() && socket.exists()
    });
    good(lab.command(&["down"]).current_dir(&old));
    lab.assert_nothing_left();
}
