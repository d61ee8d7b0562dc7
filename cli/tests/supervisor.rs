// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor in trouble: no guests, a stand-in for QEMU (`fake-qemu`).

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::stand_in::{said, until};
use common::{Lab, copy_program, signal};
use tombolo_zone::{MemberState, Rights, Role, Zone};

mod common;

/// A project of one VM whose QEMU is the stand-in, with these words for it and more lines for the VM.
fn lab(words: &[&str], more: &str) -> Lab {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let arguments: Vec<String> = words.iter().map(|w| format!("\"-fake\", \"{w}\"")).collect();
    let lab = Lab::new(&format!(
        "qemu = \"{}\"\n[zone.z]\nsize = \"8M\"\n[vm.a]\nkernel = \"./kernel\"\nmemory = \"128M\"\nhotplug_ports = 2\nready = \"running\"\nqemu_args = [{}]\n{more}",
        fake.display(),
        arguments.join(", ")
    ));
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    lab
}

fn supervisor(lab: &Lab) -> u32 {
    u32::try_from(lab.ps()["supervisor"].as_u64().unwrap()).unwrap()
}

fn qemu(lab: &Lab) -> u32 {
    u32::try_from(lab.ps()["vms"][0]["pid"].as_u64().unwrap()).unwrap()
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Starts `console` and waits until it shows the guest's first words.
fn console(lab: &Lab) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child =
        lab.command(&["console", "a"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.contains("first words"), "{line}");
    (child, reader)
}

#[test]
fn a_console_that_is_closed_gives_its_descriptor_back_though_the_guest_is_silent() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let supervisor = supervisor(&lab);
    let before = descriptors(supervisor);
    for _ in 0..5 {
        let (mut child, _reader) = console(&lab);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    until("consoles leak", || descriptors(supervisor) <= before);
}

#[test]
fn a_supervisor_out_of_descriptors_still_answers_ps_and_down() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let (supervisor, qemu) = (supervisor(&lab), qemu(&lab));
    let limit = format!("--nofile={}", descriptors(supervisor));
    let limited = Command::new("prlimit").args([format!("--pid={supervisor}"), limit]).status();
    assert!(limited.unwrap().success());
    for _ in 0..3 {
        assert_eq!(lab.ps()["vms"][0]["state"], "up");
    }
    for refused in [&["zone", "attach", "z", "a"][..], &["up"]] {
        let words = said(&lab.run(refused));
        let is_told =
            ["no file descriptor left", "Too many open files"].iter().any(|why| words.contains(why));
        assert!(is_told, "{refused:?}: {words}");
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
    assert!(!Path::new(&format!("/proc/{qemu}")).exists());
}

#[test]
fn a_supervisor_that_is_stopped_is_told_by_every_command_and_down_can_be_interrupted() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let supervisor = supervisor(&lab);
    signal(supervisor, "STOP");
    for command in
        [&["ps"][..], &["ps", "-a"], &["down"], &["up"], &["exec", "a", "--", "true"], &["zone", "path", "z"]]
    {
        let begun = Instant::now();
        let output = lab.run(command);
        assert!(!output.status.success(), "{command:?}");
        assert!(
            said(&output).contains(&format!("kill -CONT {supervisor}")),
            "{command:?}: {}",
            said(&output)
        );
        assert!(begun.elapsed() < Duration::from_secs(60), "{command:?}");
    }
    signal(supervisor, "CONT");
    assert_eq!(lab.ps()["vms"][0]["state"], "up", "commands that were not heard did nothing");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_project_whose_runtime_folder_has_vanished_is_found_again_and_reboots_its_guests() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let (first, qemu) = (supervisor(&lab), qemu(&lab));
    // As at a logout.
    std::fs::remove_dir_all(lab.dir.path().join("tombolo")).unwrap();
    until("it is not found again", || lab.ps()["supervisor"] == first);
    assert_eq!(self::qemu(&lab), qemu);
    reboot(&lab);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// Takes the project down and says how long that took, at most 30 s, and what was said.
fn down(lab: &Lab) -> (Duration, String) {
    let begun = Instant::now();
    let output = lab.run(&["down"]);
    let took = begun.elapsed();
    let words = said(&output);
    assert!(output.status.success(), "{words}");
    assert!(took < Duration::from_secs(30), "{took:?}: {words}");
    (took, words)
}

#[test]
fn a_guest_and_a_qemu_that_hear_nothing_are_stopped_within_the_time_that_is_said() {
    let lab = lab(&["deaf-agent", "no-quit"], "disk = \"disk\"\nzones = { z = {} }\n");
    std::fs::write(lab.dir.path().join("disk"), "").unwrap();
    lab.good(&["up"]);
    // Commands that the agent never answers stand in the way.
    let mut waiting: Vec<Child> = (0..5)
        .map(|_| lab.command(&["exec", "a", "--", "true"]).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    let (_, words) = down(&lab);
    for told in ["12 s to switch itself off", "QEMU does not quit and is killed", "a: stopped"] {
        assert!(words.contains(told), "{words}");
    }
    for command in &mut waiting {
        assert_eq!(command.wait().unwrap().code(), Some(125));
    }
    lab.assert_nothing_left();
}

#[test]
fn a_qemu_that_is_stopped_in_the_middle_of_a_plug_does_not_hold_up_down() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let qemu = qemu(&lab);
    signal(qemu, "STOP");
    let mut attach = lab.command(&["zone", "attach", "z", "a"]).stderr(Stdio::piped()).spawn().unwrap();
    // The monitor owes the reply to the first step when QEMU has been sent something.
    until("attaching the zone begins", || lab.ps()["zones"][0]["members"] != serde_json::json!([]));
    down(&lab);
    assert!(!attach.wait().unwrap().success());
    lab.assert_nothing_left();
}

#[test]
fn a_down_that_is_interrupted_says_that_it_goes_on_and_does() {
    let lab = lab(&["no-quit"], "disk = \"disk\"\n");
    std::fs::write(lab.dir.path().join("disk"), "").unwrap();
    lab.good(&["up"]);
    let mut child = lab.command(&["down"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("stopping") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0);
    }
    signal(child.id(), "TERM");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("the supervisor goes on with it"), "{rest}");
    lab.assert_nothing_left();
}

/// Waits until the VM has rebooted once and is up again.
fn reboot(lab: &Lab) {
    signal(qemu(lab), "USR1");
    until("the guest does not come back", || {
        let vm = lab.ps()["vms"][0].clone();
        vm["reboots"] == 1 && vm["state"] == "up"
    });
}

#[test]
fn a_full_folder_stops_no_console_and_no_reboot() {
    let lab = lab(&[], "");
    lab.good(&["up"]);
    let folder = std::fs::read_dir(lab.dir.path().join("tombolo")).unwrap().next().unwrap().unwrap().path();
    lab.good(&["down"]);
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    for log in ["supervisor.log", "supervisor.panic", "a.console", "a.qemu"] {
        symlink("/dev/full", folder.join(log)).unwrap();
    }
    lab.good(&["up"]);
    let (mut child, mut reader) = console(&lab);
    let mut line = String::new();
    signal(qemu(&lab), "USR2");
    reader.read_line(&mut line).unwrap();
    assert!(line.contains("next words"), "{line}");
    reboot(&lab);
    reader.read_line(&mut line).unwrap();
    assert!(line.ends_with("first words\r\n"), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_running_project_outlasts_the_replacement_of_its_program() {
    let lab = lab(&[], "zones = { z = {} }\n[zone.files]\nsize = \"16M\"\nfiles = true\n");
    let program = lab.dir.path().join("tombolo-installed");
    copy_program(env!("CARGO_BIN_EXE_tombolo"), &program);
    let mut up = Command::new(&program);
    up.arg("up").current_dir(lab.dir.path()).env("XDG_RUNTIME_DIR", lab.dir.path());
    up.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null());
    let output = up.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    std::fs::remove_file(&program).unwrap();
    // Both have the supervisor run its own program: what is granted in a zone with files is written by it.
    lab.good(&["zone", "attach", "files", "a"]);
    reboot(&lab);
    assert_eq!(lab.ps()["vms"][0]["zones"], serde_json::json!(["files", "z"]));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_zone_file_that_somebody_cuts_short_takes_no_supervisor_and_no_other_vm_along() {
    let lab = lab(&[], "zones = { kept = {} }\n[zone.kept]\nsize = \"16M\"\nbacking = \"./kept.zone\"\n");
    lab.good(&["up"]);
    let before = (supervisor(&lab), qemu(&lab));
    let zone = lab.dir.path().join("kept.zone");
    std::fs::OpenOptions::new().write(true).open(&zone).unwrap().set_len(4096).unwrap();
    until("ps does not say that the zone is lost", || lab.ps()["zones"][0]["lost"] == true);
    assert_eq!((supervisor(&lab), qemu(&lab)), before);
    lab.good(&["zone", "attach", "z", "a"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_that_dies_with_its_supervisor_and_its_zones_owner_is_found_dead_by_a_mount_that_stays() {
    a_mount_that_stays_finds_the_vm_dead("zones = { kept = {} }", &[], &["zone-kept", "vm-a"]);
}

/// The shims start another supervisor.
#[test]
fn a_vm_that_dies_with_its_supervisor_is_found_dead_though_no_command_looks() {
    a_mount_that_stays_finds_the_vm_dead("zones = { kept = {} }", &[], &["vm-a"]);
}

#[test]
fn a_vm_with_a_zone_that_came_while_it_ran_is_found_dead_by_a_mount_that_stays() {
    a_mount_that_stays_finds_the_vm_dead("", &["zone", "attach", "kept", "a"], &["zone-kept", "vm-a"]);
}

/// QEMU is killed with its shim, and may take its time to end.
fn a_mount_that_stays_finds_the_vm_dead(zones: &str, attach: &[&str], killed: &[&str]) {
    let kept = "[zone.kept]\nsize = \"16M\"\nbacking = \"./kept.zone\"\nfiles = true\n";
    let lab = lab(&[], &format!("{zones}\n{kept}"));
    lab.good(&["up"]);
    if !attach.is_empty() {
        lab.good(attach);
    }
    let (path, mount) = (lab.dir.path().join("kept.zone"), lab.dir.path().join("mnt"));
    std::fs::create_dir(&mount).unwrap();
    lab.good(&["files", "mount", "kept.zone", "mnt"]);
    let zone = Zone::open(&path, true).unwrap();
    let of_vm = || zone.members().unwrap().into_iter().find(|m| m.name == "a").unwrap();
    // The guest's kernel does this when it mounts.
    zone.activate(of_vm().id).unwrap();
    let held = descriptor_with_a_lock(qemu(&lab));
    lab.kill_with_shims(killed);
    let has_owner = !killed.contains(&"zone-kept");
    until("the zone has another owner than it should", || zone.has_owner().unwrap() == has_owner);
    // The mount finds one that is dead, so it has looked.
    let (id, liveness) = zone.claim("other", Role::Host, Rights::READ_WRITE).unwrap();
    drop(zone.join_claimed(id, liveness).unwrap());
    until("nobody looks for the dead", || zone.member(id).unwrap().state == MemberState::Dead);
    assert!(of_vm().alive && of_vm().state == MemberState::Active, "{:?}", of_vm());
    drop(held);
    until("it is not declared dead", || of_vm().state == MemberState::Dead);
    if !has_owner {
        let refused = said(&lab.run(&["up"]));
        assert!(refused.contains("in use by members") && refused.contains("unmount it"), "{refused}");
    }
    assert!(Command::new("umount").arg(&mount).status().unwrap().success());
    // A project that is up no more.
    lab.run(&["down"]);
}

/// Guests find a zone by its uuid.
#[test]
fn a_project_with_a_zone_and_a_copy_of_its_file_is_refused() {
    let zone = |name: &str| format!("[zone.{name}]\nsize = \"16M\"\nbacking = \"./{name}.zone\"\n");
    let lab =
        lab(&[], &format!("zones = {{ first = {{}}, second = {{}} }}\n{}{}", zone("first"), zone("second")));
    lab.good(&["zone", "create", "first.zone", "--size", "16M"]);
    let path = |name: &str| lab.dir.path().join(name);
    std::fs::copy(path("first.zone"), path("second.zone")).unwrap();
    let refused = said(&lab.run(&["up"]));
    assert!(refused.contains("zone.second has the uuid of the zone 'first'"), "{refused}");
    std::fs::remove_file(path("second.zone")).unwrap();
    lab.good(&["zone", "create", "second.zone", "--size", "16M"]);
    lab.good(&["up"]);
    lab.good(&["down"]);
}

/// Its QEMU goes on with all descriptors that it was started with.
#[test]
fn a_vm_that_leaves_a_zone_that_it_was_started_with_frees_its_slot_and_can_come_back() {
    let lab = lab(&[], "zones = { kept = {} }\n[zone.kept]\nsize = \"16M\"\nbacking = \"./kept.zone\"\n");
    lab.good(&["up"]);
    let members = || {
        lab.ps()["zones"].as_array().unwrap().iter().find(|z| z["name"] == "kept").unwrap()["members"].clone()
    };
    for _ in 0..2 {
        lab.good(&["zone", "detach", "kept", "a"]);
        assert_eq!(members(), serde_json::json!([]));
        lab.good(&["zone", "attach", "kept", "a"]);
        assert_eq!(members(), serde_json::json!(["a"]));
    }
    lab.good(&["restart", "a"]);
    assert_eq!(members(), serde_json::json!(["a"]));
}

/// Returns a copy of the descriptor by which a process holds a lock: so the process's own one has not been closed yet.
fn descriptor_with_a_lock(pid: u32) -> OwnedFd {
    let has_lock = |entry: &std::fs::DirEntry| {
        std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains("OFDLCK"))
    };
    let all = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().map(Result::unwrap);
    let of = all.filter(has_lock).map(|entry| entry.file_name().to_str().unwrap().parse().unwrap());
    let [number] = of.collect::<Vec<i32>>()[..] else { panic!("QEMU has no lock, or several") };
    let process = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    let process = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).unwrap();
    let empty = rustix::process::PidfdGetfdFlags::empty();
    rustix::process::pidfd_getfd(process, number, empty).unwrap()
}

#[test]
fn memory_that_a_vm_has_not_touched_is_not_promised_twice() {
    let lab = lab(&[], "");
    let file = lab.dir.path().join("tombolo.toml");
    let compose = std::fs::read_to_string(&file).unwrap();
    let (head, vm) = compose.split_at(compose.find("[vm.a]").unwrap());
    let of = |name: &str, size: &str| {
        vm.replace("[vm.a]", &format!("[vm.{name}]")).replace("\"128M\"", &format!("\"{size}\""))
    };
    // The second never fits, so that the refusal says what counts; the stand-in for the first touches next to nothing.
    std::fs::write(&file, format!("{head}{}{}", of("a", "512M"), of("b", "100000G"))).unwrap();
    lab.good(&["up", "a"]);
    let refused = lab.run(&["up", "b"]);
    let words = said(&refused);
    let promised =
        words.split_once("beside the ").and_then(|(_, rest)| rest.split_once("M that running ones"));
    let (promised, _) = promised.unwrap_or_else(|| panic!("{words}"));
    assert!(!refused.status.success() && promised.parse::<u64>().unwrap() > 450, "{words}");
    lab.good(&["down"]);
}
