// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that are in each other's way, QEMUs whose monitor never answers, and one that does not die. A stand-in for QEMU.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use common::stand_in::{lab, number, said, until};
use common::{Lab, signal};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";
/// Its guest has a disk, and does not switch itself off.
const STUBBORN: &str = "disks = [{ path = \"DISK\" }]\nqemu_args = [\"-fake\", \"no-quit\"]\n";
/// The message of a `down` that has given QEMU all of its time.
const KILLED: &str = "QEMU does not quit and is killed";
const TIME: &str = "12 s to switch itself off";

fn stubborn(disk: &str) -> String {
    format!("{VM}{}", STUBBORN.replace("DISK", disk))
}

fn disks(lab: &Lab) {
    for disk in ["a.img", "b.img"] {
        std::fs::write(lab.dir.path().join(disk), [0; 512]).unwrap();
    }
}

fn names(lab: &Lab) -> Vec<String> {
    let ps = lab.ps();
    ps["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
}

fn begin(lab: &Lab, arguments: &[&str]) -> (Child, BufReader<ChildStderr>) {
    let mut child = lab.command(arguments).stderr(Stdio::piped()).spawn().unwrap();
    let words = BufReader::new(child.stderr.take().unwrap());
    (child, words)
}

/// Reads up to a line with these words.
fn read_to(reader: &mut impl BufRead, words: &str) {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the end came before '{words}'");
    }
}

/// Returns the rest of the messages of a command, which succeeds.
fn rest(mut child: Child, mut reader: BufReader<ChildStderr>) -> String {
    let mut words = String::new();
    reader.read_to_string(&mut words).unwrap();
    assert!(child.wait().unwrap().success(), "{words}");
    words
}

/// A VM that is up, and one whose QEMU says nothing while `up` waits for it.
fn mute() -> (Lab, Child, BufReader<ChildStderr>) {
    let lab =
        lab(&format!("[vm.a]\n{}[vm.mute]\n{VM}qemu_args = [\"-fake\", \"mute\"]\n", stubborn("a.img")));
    disks(&lab);
    lab.good(&["up", "a"]);
    let (up, mut words) = begin(&lab, &["up"]);
    read_to(&mut words, "mute: starting");
    (lab, up, words)
}

#[test]
fn a_qemu_whose_monitor_never_answers_is_listed_and_an_up_that_waits_for_it_can_be_interrupted() {
    let (lab, mut up, _words) = mute();
    until("ps does not list its QEMU", || names(&lab) == ["a", "mute"]);
    signal(up.id(), "INT");
    assert_eq!(up.wait().unwrap().code(), Some(130));
    assert_eq!(names(&lab), ["a"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_down_while_a_monitor_does_not_answer_stops_the_other_vms_in_good_order() {
    let (lab, mut up, _words) = mute();
    let down = lab.run(&["down"]);
    let words = said(&down);
    assert!(down.status.success() && words.contains(TIME) && !words.contains("does not end"), "{words}");
    assert!(!up.wait().unwrap().success());
    lab.assert_nothing_left();
}

#[test]
fn a_second_down_leaves_guests_the_time_that_the_first_has_given_them() {
    let lab = lab(&format!("[vm.a]\n{}", stubborn("a.img")));
    disks(&lab);
    lab.good(&["up"]);
    let (first, mut words) = begin(&lab, &["down"]);
    read_to(&mut words, TIME);
    lab.good(&["down"]);
    let words = rest(first, words);
    assert!(words.contains(KILLED), "the guest was cut off: {words}");
    lab.assert_nothing_left();
}

#[test]
fn a_down_of_everything_gives_guests_their_time_though_another_command_stops_one() {
    for command in [&["down", "b"], &["restart", "b"]] {
        let lab = lab(&format!("[vm.a]\n{}[vm.b]\n{}", stubborn("a.img"), stubborn("b.img")));
        disks(&lab);
        lab.good(&["up"]);
        let (mut other, mut words) = begin(&lab, command);
        read_to(&mut words, TIME);
        let down = lab.run(&["down"]);
        let all = said(&down);
        assert!(down.status.success() && all.contains(TIME) && all.contains(KILLED), "{command:?}: {all}");
        read_to(&mut words, KILLED);
        other.wait().unwrap();
        lab.assert_nothing_left();
    }
}

#[test]
fn a_qemu_that_does_not_die_stays_in_the_list_though_its_start_has_failed() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let lives = lab.dir.path().join("lives");
    std::fs::write(&lives, "").unwrap();
    let file = lab.dir.path().join("tombolo.toml");
    let compose = std::fs::read_to_string(&file).unwrap();
    let never = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"console:never\"\nready_timeout = 5\n";
    let words = format!("qemu_args = [\"-fake\", \"immortal={}\"]\n", lives.display());
    std::fs::write(&file, format!("{compose}[vm.never]\n{never}{words}")).unwrap();
    lab.good(&["up", "a"]);
    let refused = lab.run(&["up"]);
    assert!(!refused.status.success());
    assert_eq!(names(&lab), ["a", "never"], "{}", said(&refused));
    let qemu = number(&lab.ps()["vms"][1]["pid"]);
    let why = format!("process {qemu} of the VM 'never' does not die");
    assert!(said(&refused).contains(&why), "{}", said(&refused));
    let refused = lab.run(&["down"]);
    assert!(!refused.status.success() && said(&refused).contains(&why), "{}", said(&refused));
    assert_eq!(names(&lab), ["never"]);
    std::fs::remove_file(&lives).unwrap();
    until("it does not die", || lab.ps()["vms"][0]["pid"].is_null());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_down_beside_another_stop_gives_a_qemu_that_does_not_die_no_second_time() {
    let lab = lab("");
    disks(&lab);
    let lives = lab.dir.path().join("lives");
    std::fs::write(&lives, "").unwrap();
    let more = stubborn("a.img")
        .replace("\"no-quit\"", &format!("\"no-quit\", \"-fake\", \"immortal={}\"", lives.display()));
    let file = lab.dir.path().join("tombolo.toml");
    let compose = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{compose}[vm.a]\n{more}")).unwrap();
    lab.good(&["up"]);
    let (mut first, mut words) = begin(&lab, &["down", "a"]);
    read_to(&mut words, TIME);
    let begun = Instant::now();
    let refused = lab.run(&["down"]);
    let took = begun.elapsed();
    assert!(!refused.status.success() && said(&refused).contains("does not die"), "{}", said(&refused));
    // Each step is a timer: 30 s at most, and 39 s where the second stop begins anew.
    assert!(took < Duration::from_secs(35), "{took:?}");
    first.wait().unwrap();
    std::fs::remove_file(&lives).unwrap();
    until("it does not die", || lab.ps()["vms"][0]["pid"].is_null());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_switch_that_does_not_die_holds_up_no_down() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    let lives = lab.dir.path().join("lives");
    std::fs::write(&lives, "").unwrap();
    lab.good(&["up"]);
    let switch = number(&lab.ps()["networks"][0]["pid"]).to_string();
    let mut holder = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hold-at-exit"));
    let mut holder = holder.arg(&switch).arg(&lives).stdout(Stdio::piped()).spawn().unwrap();
    read_to(&mut BufReader::new(holder.stdout.take().unwrap()), "held");
    let down = lab.run(&["down"]);
    assert!(down.status.success(), "{}", said(&down));
    assert!(Path::new("/proc").join(&switch).exists(), "the switch has died");
    std::fs::remove_file(&lives).unwrap();
    assert!(holder.wait().unwrap().success());
    until("the switch does not die", || !Path::new("/proc").join(&switch).exists());
}

#[test]
fn a_switch_that_is_stopped_ends_with_its_killed_shim_and_takes_its_sockets_with_it() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    lab.good(&["up"]);
    let line = |process: &u32| std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let mut switch = lab.processes();
    switch.retain(|process| line(process).starts_with(b"tombolo\0net\0run\0"));
    assert_eq!(switch.len(), 2, "the switch and its keeper");
    for process in &switch {
        signal(*process, "STOP");
    }
    lab.kill_with_shims(&["switch-lan", "vm-a"]);
    lab.assert_no_process_left();
}

#[test]
fn a_down_of_one_vm_waits_for_no_command_about_others_and_not_long_for_one_about_it() {
    let slow =
        "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"console:next words\"\nready_timeout = 6000\n";
    let lab = lab(&format!("[vm.a]\n{VM}[vm.slow]\n{slow}"));
    lab.good(&["up", "a"]);
    let (up, up_words) = begin(&lab, &["up"]);
    until("it does not boot", || lab.ps()["vms"][1]["state"] == "booting");
    lab.good(&["down", "a"]);
    let refused = lab.run(&["down", "slow"]);
    assert!(!refused.status.success());
    let words = said(&refused);
    assert!(words.contains("this one waits for its end, at most 2 s"), "{words}");
    assert!(
        words.contains("starting or stopping 'slow' for more than 3 s; try again, or 'tombolo down'"),
        "{words}"
    );
    signal(number(&lab.ps()["vms"][0]["pid"]), "USR2");
    rest(up, up_words);
    assert_eq!(names(&lab), ["slow"]);
    lab.good(&["down", "slow"]);
    lab.assert_nothing_left();
}

#[test]
fn an_up_that_fails_stops_what_it_has_started_at_the_same_time() {
    let never = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"console:never\"\nready_timeout = 2\n";
    let dies_late = format!("{VM}qemu_args = [\"-fake\", \"no-quit\"]\n");
    let lab = lab(&format!("[vm.a]\n{dies_late}[vm.b]\n{dies_late}[vm.never]\n{never}"));
    let words = said(&lab.run(&["up"]));
    let at = |words_of: &str| words.find(words_of).unwrap_or_else(|| panic!("no '{words_of}' in: {words}"));
    let killed = at(KILLED);
    assert!(at("a: stopping") < killed && at("b: stopping") < killed, "{words}");
    assert_eq!(words.matches(KILLED).count(), 2, "{words}");
    lab.assert_nothing_left();
}
