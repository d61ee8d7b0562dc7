// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs while a command waits for others, and commands whose client stands still. A stand-in for QEMU.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::Duration;

use common::stand_in::{lab, number, said, until};
use common::{Lab, signal};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\n";
/// It is up when it is told to say a line.
const SLOW: &str = "ready = \"console:next words\"\nready_timeout = 6000\n";

fn vm(lab: &Lab, name: &str) -> serde_json::Value {
    let ps = lab.ps();
    let mut vms = ps["vms"].as_array().unwrap().iter();
    vms.find(|vm| vm["name"] == name).cloned().unwrap_or_default()
}

fn up(lab: &Lab, arguments: &[&str]) -> Child {
    let up = lab.command(&[&["up"], arguments].concat()).stderr(Stdio::piped()).spawn().unwrap();
    until("the VM that it waits for does not boot", || vm(lab, "slow")["state"] == "booting");
    up
}

/// Ends the wait of `up` for the VM 'slow'.
fn let_be_up(lab: &Lab, up: Child) {
    signal(number(&vm(lab, "slow")["pid"]), "USR2");
    let output = up.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn vms_reboot_and_start_again_while_an_up_waits_for_another() {
    let lab = lab(&format!("[vm.a]\n{VM}ready = \"running\"\nrestart = \"always\"\n[vm.slow]\n{VM}{SLOW}"));
    lab.good(&["up", "a"]);
    let up = up(&lab, &[]);
    let first = number(&vm(&lab, "a")["pid"]);
    signal(first, "USR1");
    until("it does not reboot", || vm(&lab, "a")["reboots"] == 1 && vm(&lab, "a")["state"] == "up");
    signal(number(&vm(&lab, "a")["pid"]), "KILL");
    until("it does not start again", || vm(&lab, "a")["restarts"] == 1 && vm(&lab, "a")["state"] == "up");
    assert_eq!(vm(&lab, "slow")["state"], "booting");
    let_be_up(&lab, up);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_up_that_is_interrupted_takes_back_what_has_rebooted_meanwhile_and_nothing_else() {
    let lab = lab(&format!(
        "[vm.a]\n{VM}ready = \"running\"\n[vm.b]\n{VM}ready = \"running\"\n[vm.slow]\n{VM}{SLOW}"
    ));
    lab.good(&["up", "a"]);
    let mut up = up(&lab, &[]);
    until("it is not up", || vm(&lab, "b")["state"] == "up");
    for name in ["a", "b"] {
        signal(number(&vm(&lab, name)["pid"]), "USR1");
        until("it does not reboot", || vm(&lab, name)["reboots"] == 1 && vm(&lab, name)["state"] == "up");
    }
    signal(up.id(), "INT");
    assert_eq!(up.wait().unwrap().code(), Some(130));
    let ps = lab.ps();
    let names: Vec<&str> =
        ps["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// web waits until db is healthy, which it is as long as there is the file 'well'.
fn db_and_web() -> Lab {
    let lab = lab("");
    let file = lab.dir.path().join("tombolo.toml");
    let well = lab.dir.path().join("well");
    let compose = std::fs::read_to_string(&file).unwrap();
    let compose = format!(
        "{compose}[vm.db]\n{VM}restart = \"on-failure\"\nqemu_args = [\"-fake\", \"healthy={}\"]\n\
         healthcheck = {{ command = [\"check-health\"], interval = \"100ms\", start_period = \"1h\" }}\n\
         [vm.web]\n{VM}depends_on = {{ db = \"healthy\" }}\n",
        well.display()
    );
    std::fs::write(&file, compose).unwrap();
    lab
}

#[test]
fn a_vm_that_others_wait_for_may_reboot_and_start_again_before_it_is_healthy() {
    let lab = db_and_web();
    let up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    until("db is not checked", || vm(&lab, "db")["health"] == "starting");
    signal(number(&vm(&lab, "db")["pid"]), "USR1");
    until("it does not reboot", || vm(&lab, "db")["reboots"] == 1 && vm(&lab, "db")["health"] == "starting");
    signal(number(&vm(&lab, "db")["pid"]), "KILL");
    until("it does not start again", || {
        vm(&lab, "db")["restarts"] == 1 && vm(&lab, "db")["health"] == "starting"
    });
    assert!(vm(&lab, "web").is_null(), "web waits");
    std::fs::write(lab.dir.path().join("well"), "").unwrap();
    let output = up.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(vm(&lab, "web")["state"], "up");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_that_ends_for_good_ends_the_wait_for_its_health() {
    let lab = db_and_web();
    let up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    until("db is not checked", || vm(&lab, "db")["health"] == "starting");
    // Under its policy it stays off then.
    signal(number(&vm(&lab, "db")["pid"]), "ALRM");
    let output = up.wait_with_output().unwrap();
    assert!(
        !output.status.success()
            && said(&output).contains("the VM 'web' was not started: the VM 'db' does not run any more"),
        "{}",
        said(&output)
    );
    lab.assert_nothing_left();
}

#[test]
fn a_down_in_the_middle_of_a_wait_ends_the_up_that_waits() {
    let lab = db_and_web();
    let up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    until("db is not checked", || vm(&lab, "db")["health"] == "starting");
    lab.good(&["down"]);
    assert!(!up.wait_with_output().unwrap().status.success());
    lab.assert_nothing_left();
    let up = lab.command(&["up", "--wait", "db"]).stderr(Stdio::piped()).spawn().unwrap();
    until("db is not checked", || vm(&lab, "db")["health"] == "starting");
    lab.good(&["down", "db"]);
    let output = up.wait_with_output().unwrap();
    assert!(
        !output.status.success() && said(&output).contains("the VM 'db' was stopped"),
        "{}",
        said(&output)
    );
    lab.assert_nothing_left();
}

#[test]
fn a_down_ends_the_project_though_the_client_of_a_command_is_stopped() {
    let lab = lab(&format!("[vm.a]\n{VM}ready = \"running\"\nqemu_args = [\"-fake\", \"wordy\"]\n"));
    lab.good(&["up"]);
    let mut exec = lab.command(&["exec", "a", "--", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(exec.stdout.take().unwrap());
    output.read_line(&mut String::new()).unwrap();
    signal(exec.id(), "STOP");
    let mut read = 0;
    until("the supervisor does not wait for its client", || {
        std::thread::sleep(Duration::from_millis(500));
        let before = std::mem::replace(&mut read, lab.good(&["logs", "--qemu", "a"]).len());
        before == read
    });
    let down = lab.run(&["down"]);
    assert!(down.status.success(), "{}", said(&down));
    signal(exec.id(), "CONT");
    output.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(exec.wait().unwrap().code(), Some(125));
    lab.assert_nothing_left();
}
