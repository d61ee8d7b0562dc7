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
