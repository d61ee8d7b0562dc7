// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `down` and `up --wait` beside VMs that reboot or that the supervisor starts again. A stand-in for QEMU.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};

use common::stand_in::{fake, lab, number, said, until};
use common::{Lab, signal};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";
/// Its guest has no driver for memory that comes later, and its QEMU takes 3 s to be stopped.
const DRIVERLESS: &str = "kernel = \"kernel\"\nmemory = \"320M\"\nboot_memory = \"128M\"\nstart = \"fast\"\n\
                          ready_timeout = 1\n";

fn vm(lab: &Lab, name: &str) -> Value {
    let ps = lab.ps();
    let mut vms = ps["vms"].as_array().unwrap().iter();
    vms.find(|vm| vm["name"] == name).cloned().unwrap_or_default()
}

fn piped(lab: &Lab, arguments: &[&str]) -> Child {
    lab.command(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// All events of a project, once it has ended.
struct Events(Child);

impl Events {
    fn begin(lab: &Lab) -> Events {
        Events(piped(lab, &["events", "--since", "1h"]))
    }

    fn all(mut self) -> String {
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.0.wait().unwrap();
        text
    }
}

/// Reads up to a line with these words.
fn read_to(reader: &mut impl BufRead, words: &str) {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the end came before '{words}'");
    }
}

/// A VM without the driver, with a check that fails as long as the file is not there.
fn driverless() -> (Lab, std::path::PathBuf) {
    let lab = lab("");
    let healthy = lab.dir.path().join("healthy");
    let file = lab.dir.path().join("tombolo.toml");
    let qemu = std::fs::read_to_string(&file).unwrap();
    let more = format!(
        "qemu_args = [\"-fake\", \"driverless\", \"-fake\", \"no-quit\", \"-fake\", \"healthy={}\"]\n\
         healthcheck = {{ command = [\"check-health\"], interval = \"1s\", start_period = \"1h\" }}\n",
        healthy.display()
    );
    std::fs::write(&file, format!("{qemu}[vm.a]\n{DRIVERLESS}{more}")).unwrap();
    (lab, healthy)
}

#[test]
fn a_vm_that_is_started_again_with_all_its_memory_reboots_and_who_waits_for_its_health_waits_on() {
    let (lab, healthy) = driverless();
    let up = piped(&lab, &["up", "--wait"]);
    let mut states = std::collections::BTreeSet::new();
    until("it is not started again", || {
        let now = vm(&lab, "a");
        states.extend(now["state"].as_str().map(|state| state.split(',').next().unwrap().to_owned()));
        now["timeline"].to_string().contains("no virtio-mem driver") && now["state"] == "up"
    });
    states.remove("booting");
    assert_eq!(Vec::from_iter(states), ["rebooting", "up"]);
    std::fs::write(healthy, "").unwrap();
    let output = up.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_down_beside_a_start_with_all_memory_starts_nothing_any_more() {
    let (lab, healthy) = driverless();
    std::fs::write(healthy, "").unwrap();
    lab.good(&["up"]);
    let events = Events::begin(&lab);
    until("it is not stopped for its next start", || {
        matches!(vm(&lab, "a")["state"].as_str(), Some("rebooting" | "stopping"))
    });
    lab.good(&["down"]);
    let all = events.all();
    assert_eq!(all.matches("a booting").count(), 1, "{all}");
    lab.assert_nothing_left();
}

/// Another process writes the program: a child that is being started elsewhere could hold it open for writing.
fn stand_in_script(path: &std::path::Path, text: &str) {
    use std::io::Write;
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "cat >\"$0\" && chmod +x \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success());
}

#[test]
fn a_console_ends_with_a_vm_that_is_taken_down_before_its_reboot() {
    let lab = lab(&format!(
        "[zone.late]\nsize = \"8M\"\nfiles = true\n[vm.a]\n{VM}[vm.b]\n{VM}qemu_args = [\"-fake\", \"deaf-agent\"]\n"
    ));
    lab.good(&["up"]);
    let mut console = piped(&lab, &["console", "a"]);
    let mut words = BufReader::new(console.stdout.take().unwrap());
    read_to(&mut words, "first words");
    // A command whose turn lasts: the reboot waits for it.
    let mut attach = piped(&lab, &["zone", "attach", "--mount", "/mnt", "late", "b"]);
    until("the zone is not attached", || lab.ps()["zones"][0]["members"].to_string().contains("\"b\""));
    signal(number(&vm(&lab, "a")["pid"]), "USR1");
    until("it does not reboot", || vm(&lab, "a")["state"] == "rebooting");
    lab.good(&["down"]);
    attach.wait().unwrap();
    let mut rest = String::new();
    words.read_to_string(&mut rest).unwrap();
    assert!(console.wait().unwrap().success());
    lab.assert_nothing_left();
}

#[test]
fn a_reboot_beside_a_down_leads_to_no_vm_that_is_up() {
    let lab = lab("");
    let held = lab.dir.path().join("held");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--version*) while [ -e {} ]; do sleep 0.05; done;; esac\nexec '{}' \"$@\"\n",
        held.display(),
        fake().display()
    );
    stand_in_script(&lab.dir.path().join("qemu"), &script);
    let web =
        "disks = [{ path = \"web.img\" }]\ndepends_on = [\"a\"]\nqemu_args = [\"-fake\", \"no-quit\"]\n";
    std::fs::write(lab.dir.path().join("web.img"), [0; 512]).unwrap();
    let text = format!("qemu = \"./qemu\"\n[vm.a]\n{VM}[vm.web]\n{VM}{web}");
    std::fs::write(lab.dir.path().join("tombolo.toml"), text).unwrap();
    lab.good(&["up"]);
    let events = Events::begin(&lab);
    std::fs::write(&held, "").unwrap();
    signal(number(&vm(&lab, "a")["pid"]), "USR1");
    until("it does not reboot", || vm(&lab, "a")["state"] == "rebooting");
    let mut down = piped(&lab, &["down"]);
    // Its guest is stopped first, while the reboot is in the way.
    let mut words = BufReader::new(down.stderr.take().unwrap());
    read_to(&mut words, "s to switch itself off");
    std::fs::remove_file(&held).unwrap();
    let mut more = String::new();
    words.read_to_string(&mut more).unwrap();
    assert!(down.wait().unwrap().success(), "{more}");
    let all = events.all();
    assert_eq!(all.matches("a up").count(), 1, "{all}");
    lab.assert_nothing_left();
}

#[test]
fn a_vm_that_ends_while_a_zone_is_attached_is_no_member_any_more_and_starts_again_with_it() {
    let lab = lab(&format!(
        "[zone.late]\nsize = \"8M\"\n[vm.a]\n{VM}restart = \"always\"\nhotplug_ports = 4\n\
         qemu_args = [\"-fake\", \"leaves-at=virtio-pmem-pci\"]\n"
    ));
    lab.good(&["up"]);
    assert!(!lab.run(&["zone", "attach", "late", "a"]).status.success());
    until("it does not start again", || vm(&lab, "a")["restarts"] == 1 && vm(&lab, "a")["state"] == "up");
    assert_eq!(
        lab.ps()["zones"][0]["members"].to_string(),
        vm(&lab, "a")["zones"].to_string().replace("late", "a")
    );
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
