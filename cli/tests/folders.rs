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
fn a_project_whose_folder_is_renamed_is_the_same_project_and_says_its_old_place() {
    let (lab, old) = up();
    let before = running(&lab, &old);
    let [new, link] = ["new", "link"].map(|name| lab.dir.path().join(name));
    std::fs::rename(&old, &new).unwrap();
    std::os::unix::fs::symlink(&new, &link).unwrap();
    for folder in [&new, &link] {
        assert_eq!(running(&lab, folder), before);
    }
    let words = said(&good(lab.command(&["ps"]).current_dir(&new)));
    let file = old.canonicalize().unwrap_or(old).join("tombolo.toml");
    assert!(words.contains(&format!("was started as {}", file.display())), "{words}");
    good(lab.command(&["exec", "a", "--", "true"]).current_dir(&new));
    // No second VM of the same files; those of the one that runs are told.
    let words = said(&good(lab.command(&["up"]).current_dir(&new)));
    assert!(words.contains("leave the VM 'a' as it runs: kernel"), "{words}");
    assert_eq!(running(&lab, &new), before);
    let words = said(&good(lab.command(&["ps"]).current_dir(&link)));
    assert!(!words.contains("was started as"), "{words}");
    good(lab.command(&["down"]).current_dir(&link));
    lab.assert_nothing_left();
}

#[test]
fn a_folder_that_is_mounted_elsewhere_too_is_the_same_project() {
    let (lab, old) = up();
    let before = running(&lab, &old);
    let mount = lab.dir.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let inside = |arguments: &str| {
        let script = format!("mount --bind \"$1\" \"$2\" && cd \"$2\" && exec \"$0\" {arguments}");
        let command = lab.command(&[]);
        let tombolo = command.get_program().to_owned();
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "sh", "-c", &script]).arg(tombolo).args([&old, &mount]);
        let set = command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
        good(shell.envs(set.collect::<Vec<_>>()))
    };
    inside("up");
    assert_eq!(running(&lab, &old), before);
    inside("down");
    lab.assert_nothing_left();
}

#[test]
fn a_folder_that_is_made_anew_under_the_same_path_finds_what_was_started_there() {
    let (lab, old) = up();
    let before = running(&lab, &old);
    std::fs::remove_dir_all(&old).unwrap();
    std::fs::create_dir(&old).unwrap();
    std::fs::write(old.join("tombolo.toml"), "").unwrap();
    assert_eq!(running(&lab, &old), before);
    // Another project, even where it has the inode number of the folder that was removed.
    let other = lab.dir.path().join("other");
    std::fs::rename(&old, &other).unwrap();
    let words = said(&good(lab.command(&["ps"]).current_dir(&other)));
    assert!(words.contains("nothing runs"), "{words}");
    good(&mut lab.command(&["down", "-f", "old/tombolo.toml"]));
    lab.assert_nothing_left();
}

#[test]
fn a_copy_at_the_place_of_a_moved_folder_is_another_project_and_no_reboot_opens_its_files() {
    let (lab, old) = up();
    let before = running(&lab, &old);
    let new = lab.dir.path().join("new");
    std::fs::rename(&old, &new).unwrap();
    good(Command::new("cp").arg("-r").args([&new, &old]));
    let words = said(&good(lab.command(&["ps"]).current_dir(&old)));
    assert!(words.contains("nothing runs"), "{words}");
    good(lab.command(&["up"]).current_dir(&old));
    let copy = running(&lab, &old);
    assert!(copy.0 != before.0 && copy.1 != before.1);
    assert_eq!(running(&lab, &new), before);

    let its_vm = || {
        let ps = good(lab.command(&["ps", "--json", "--wait", "300"]).current_dir(&new));
        let ps: serde_json::Value = serde_json::from_slice(&ps.stdout).unwrap();
        ps["vms"][0].clone()
    };
    let state = || its_vm()["state"].as_str().unwrap().to_owned();
    signal(before.1, "USR1");
    until("it reboots", || state().contains("fails"));
    let [at, now] = [&old, &new].map(|folder| folder.canonicalize().unwrap());
    let why = format!("{} is another folder than the one", at.display());
    assert!(state().contains(&why) && state().contains(now.to_str().unwrap()), "{}", state());
    good(lab.command(&["restart", "a"]).current_dir(&new));
    let (supervisor, vm) = running(&lab, &new);
    assert_eq!(supervisor, before.0);
    let line = std::fs::read(format!("/proc/{vm}/cmdline")).unwrap();
    assert!(String::from_utf8_lossy(&line).contains(now.join("kernel").to_str().unwrap()));
    // It has its place now.
    signal(vm, "USR1");
    until("it does not reboot", || its_vm()["reboots"] == 1 && its_vm()["state"] == "up");
    assert_eq!(running(&lab, &old), copy);
    good(lab.command(&["down"]).current_dir(&old));
    assert_eq!(running(&lab, &new).0, before.0);
    good(lab.command(&["down"]).current_dir(&new));
    lab.assert_nothing_left();
}

/// The identity that cloud-init finds in the seed of the VM's QEMU.
fn instance_id(qemu: u32) -> String {
    let seeds = std::fs::read_dir(format!("/proc/{qemu}/fd")).unwrap().filter_map(|fd| {
        let path = fd.unwrap().path();
        let is_seed = std::fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().contains("memfd:cidata"));
        is_seed.then(|| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned())
    });
    let seed = seeds.last().unwrap();
    let line = seed.lines().find(|line| line.contains("instance-id")).unwrap();
    line.to_owned()
}

#[test]
fn a_vm_of_a_renamed_folder_stays_the_same_machine_to_cloud_init_while_the_project_is_up() {
    let (lab, old) = up();
    let file = std::fs::read_to_string(old.join("tombolo.toml")).unwrap();
    std::fs::write(old.join("tombolo.toml"), format!("{file}cloud_init = {{}}\n")).unwrap();
    good(lab.command(&["restart", "a"]).current_dir(&old));
    let (before, new) = (instance_id(running(&lab, &old).1), lab.dir.path().join("new"));
    std::fs::rename(&old, &new).unwrap();
    let next = lab.dir.path().join("next");
    good(Command::new("cp").arg(env!("CARGO_BIN_EXE_tombolo")).arg(&next));
    good(lab.command(&["upgrade", "--program", next.to_str().unwrap()]).current_dir(&new));
    good(lab.command(&["restart", "a"]).current_dir(&new));
    assert_eq!(instance_id(running(&lab, &new).1), before);
    good(lab.command(&["down"]).current_dir(&new));
    lab.assert_nothing_left();
}

#[test]
fn a_vm_that_was_stopped_stays_so_when_its_folder_is_renamed_and_a_copy_is_another_project() {
    let (lab, old) = up();
    let file = std::fs::read_to_string(old.join("tombolo.toml")).unwrap();
    let policy = "restart = \"unless-stopped\"\n";
    let more = format!("{file}{policy}[vm.b]\n{}{policy}", file.split_once("[vm.a]\n").unwrap().1);
    std::fs::write(old.join("tombolo.toml"), more).unwrap();
    good(lab.command(&["up"]).current_dir(&old));
    good(lab.command(&["down", "b"]).current_dir(&old));
    good(lab.command(&["down"]).current_dir(&old));
    let new = lab.dir.path().join("new");
    std::fs::rename(&old, &new).unwrap();
    good(Command::new("cp").arg("-r").args([&new, &old]));
    for (folder, vms) in [(&new, 1), (&old, 2)] {
        good(lab.command(&["up", "--boot"]).current_dir(folder));
        let ps = good(lab.command(&["ps", "--json", "--wait", "300"]).current_dir(folder));
        let ps: serde_json::Value = serde_json::from_slice(&ps.stdout).unwrap();
        assert_eq!(ps["vms"].as_array().unwrap().len(), vms, "{}", folder.display());
        good(lab.command(&["down"]).current_dir(folder));
    }
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

#[test]
fn whatever_is_in_the_place_of_the_folder_of_logs_what_runs_is_found_and_stopped() {
    let place = |lab: &Lab, name: &str| lab.dir.path().join(name);
    let link = |lab: &Lab| std::os::unix::fs::symlink(place(lab, "moved"), place(lab, "tombolo")).unwrap();
    let file = |lab: &Lab| std::fs::write(place(lab, "tombolo"), "").unwrap();
    for put in [&link as &dyn Fn(&Lab), &file] {
        let (lab, old) = up();
        std::fs::rename(place(&lab, "tombolo"), place(&lab, "moved")).unwrap();
        put(&lab);
        running(&lab, &old);
        good(lab.command(&["down"]).current_dir(&old));
        lab.assert_nothing_left();
    }
}
