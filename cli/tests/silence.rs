// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ps` answers while a QEMU, a switch, an accelerator server or a guest agent does not, and names it. A stand-in for QEMU, real switches and accelerator servers.

use std::process::Stdio;

use common::signal;
use common::stand_in::{lab, number, said, until};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

fn remedy(pid: u32) -> String {
    format!("does not answer: process {pid} is stopped; to let it go on: kill -CONT {pid}")
}

#[test]
fn a_qemu_that_is_stopped_is_named_with_the_remedy() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}"));
    lab.good(&["up"]);
    let qemu = number(&lab.ps()["vms"][0]["pid"]);
    signal(qemu, "STOP");
    until("it is not named", || lab.ps()["vms"][0]["trouble"] == format!("QEMU {}", remedy(qemu)));
    let ps = lab.ps();
    assert!(ps["vms"][1]["trouble"].is_null(), "{ps}");
    assert!(lab.good(&["ps"]).contains(&format!("up (QEMU {})", remedy(qemu))));
    signal(qemu, "CONT");
    until("it is named on", || lab.ps()["vms"][0]["trouble"].is_null());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_switch_that_is_stopped_is_named_with_the_remedy() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    lab.good(&["up"]);
    let switch = number(&lab.ps()["networks"][0]["pid"]);
    signal(switch, "STOP");
    until("it is not named", || lab.ps()["networks"][0]["trouble"] == remedy(switch));
    assert!(lab.good(&["ps"]).contains(&remedy(switch)));
    signal(switch, "CONT");
    until("it is named on", || lab.ps()["networks"][0]["trouble"].is_null());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_accelerators_server_that_is_stopped_is_named_with_the_remedy() {
    let lab = lab(&format!("[accel.cl]\n[vm.a]\n{VM}accelerators = [\"cl\"]\n"));
    lab.good(&["up"]);
    assert_eq!(lab.ps()["accelerators"][0]["state"], "serving");
    let server = number(&lab.ps()["accelerators"][0]["pid"]);
    signal(server, "STOP");
    until("it is not named", || lab.ps()["accelerators"][0]["state"] == remedy(server));
    // Also while an earlier 'ps' still asks it.
    for _ in 0..3 {
        assert_eq!(lab.ps()["accelerators"][0]["state"], remedy(server));
    }
    signal(server, "CONT");
    until("it does not serve again", || lab.ps()["accelerators"][0]["state"] == "serving");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_guest_agent_that_owes_an_answer_is_named() {
    let lab = lab(&format!("[vm.a]\n{VM}qemu_args = [\"-fake\", \"deaf-agent\"]\n"));
    lab.good(&["up"]);
    let mut exec = lab.command(&["exec", "a", "--", "true"]).stderr(Stdio::null()).spawn().unwrap();
    until("ps does not name the agent", || {
        let ps = lab.ps();
        ps["vms"][0]["trouble"]
            .as_str()
            .is_some_and(|t| t.starts_with("its guest agent has not answered for "))
    });
    exec.kill().unwrap();
    exec.wait().unwrap();
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_supervisor_that_is_stopped_holds_up_the_list_of_no_other_project() {
    let (stopped, other) = (lab(&format!("[vm.a]\n{VM}")), lab(&format!("[vm.b]\n{VM}")));
    stopped.good(&["up"]);
    other.good(&["up"]);
    let supervisor = number(&stopped.ps()["supervisor"]);
    signal(supervisor, "STOP");
    let refused = stopped.run(&["ps"]);
    let words =
        format!("the supervisor (process {supervisor}) is stopped; to let it go on: kill -CONT {supervisor}");
    assert!(!refused.status.success() && said(&refused).contains(&words), "{}", said(&refused));
    let all = other.run(&["ps", "--all"]);
    let listed = String::from_utf8_lossy(&all.stdout).into_owned();
    assert!(listed.contains(&*other.dir.path().to_string_lossy()), "{listed}");
    assert!(!all.status.success() && said(&all).contains(&words), "{}", said(&all));
    signal(supervisor, "CONT");
    for lab in [&stopped, &other] {
        lab.good(&["down"]);
        lab.assert_nothing_left();
    }
}
