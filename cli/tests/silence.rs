// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ps` answers while a QEMU, a switch, an accelerator server, a guest agent or a supervisor does not, and names it. Stand-ins for QEMU and for a
//! supervisor that hangs, real switches and accelerator servers.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::stand_in::{lab, number, said, until};
use common::{Lab, signal};

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
    until("it does not serve", || lab.ps()["accelerators"][0]["state"] == "serving");
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
    let run = |lab: &Lab, arguments: &[&str]| {
        lab.command(arguments).env("XDG_RUNTIME_DIR", stopped.dir.path()).output().unwrap()
    };
    stopped.good(&["up"]);
    assert!(run(&other, &["up"]).status.success());
    let supervisor = number(&stopped.ps()["supervisor"]);
    signal(supervisor, "STOP");
    let refused = stopped.run(&["ps"]);
    let words =
        format!("the supervisor (process {supervisor}) is stopped; to let it go on: kill -CONT {supervisor}");
    assert!(!refused.status.success() && said(&refused).contains(&words), "{}", said(&refused));
    let all = run(&other, &["ps", "--all"]);
    let listed = String::from_utf8_lossy(&all.stdout).into_owned();
    assert!(listed.contains(&*other.dir.path().to_string_lossy()), "{listed}");
    assert!(!all.status.success() && said(&all).contains(&words), "{}", said(&all));
    signal(supervisor, "CONT");
    assert!(run(&other, &["down"]).status.success());
    stopped.good(&["down"]);
    stopped.assert_nothing_left();
}

#[test]
fn a_vm_that_qemu_has_paused_for_want_of_room_is_named_and_goes_on_when_there_is_some() {
    let lab = lab("");
    let file = lab.dir.path().join("tombolo.toml");
    let full = lab.dir.path().join("full");
    std::fs::write(&full, "").unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let words = format!("qemu_args = [\"-fake\", \"full={}\"]\n", full.display());
    std::fs::write(&file, format!("{text}[vm.a]\n{VM}{words}")).unwrap();
    lab.good(&["up"]);
    signal(number(&lab.ps()["vms"][0]["pid"]), "WINCH");
    let paused = || lab.ps()["vms"][0]["trouble"].as_str().is_some_and(|t| t.contains("QEMU has paused it"));
    until("ps does not say so", paused);
    assert!(lab.good(&["ps"]).contains("No space left on device; make room there, and it goes on"));
    std::fs::remove_file(&full).unwrap();
    until("it does not go on", || lab.ps()["vms"][0]["trouble"].is_null());
    let mut events = lab.command(&["events", "--since", "1h"]).stdout(Stdio::piped()).spawn().unwrap();
    let told: Vec<String> =
        BufReader::new(events.stdout.take().unwrap()).lines().map(Result::unwrap).take(4).collect();
    events.kill().unwrap();
    events.wait().unwrap();
    let states: Vec<&str> = told.iter().map(|line| line.split(' ').nth(3).unwrap()).collect();
    assert_eq!(states, ["booting", "up", "paused", "up"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// The fastest `ps` of a few, and its time: on a machine with much to do one may wait long for a processor.
fn fastest_ps(lab: &Lab) -> (Output, Duration) {
    let timed = |_| {
        let begun = Instant::now();
        let output = lab.run(&["ps"]);
        (output, begun.elapsed())
    };
    (0..5).map(timed).min_by_key(|(_, time)| *time).unwrap()
}

const A_SECOND: Duration = Duration::from_secs(1);

#[test]
fn ps_tells_within_a_second_of_a_supervisor_that_hangs_and_of_its_vms() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}"));
    let mut hangs = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/silent-supervisor"));
    lab.good(&["up"]);
    hangs.arg(lab.dir.path().canonicalize().unwrap());
    let mut hangs = hangs.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut words = BufReader::new(hangs.stdout.take().unwrap());
    let mut line = String::new();
    words.read_line(&mut line).unwrap();
    // It has the lock before another supervisor can.
    lab.kill_with_shims(&[]);
    words.read_line(&mut line).unwrap();
    let (output, time) = fastest_ps(&lab);
    let words = said(&output);
    hangs.kill().unwrap();
    hangs.wait().unwrap();
    let supervisor = hangs.id();
    let expected = format!(
        "the supervisor (process {supervisor}) lives and has not answered within 0.8 s; it runs the VMs a (process "
    );
    assert!(!output.status.success(), "{words}");
    assert!(words.contains(&expected) && words.contains(", b (process "), "{words}");
    assert!(time < A_SECOND, "{time:?}");
    assert_eq!(lab.ps()["vms"][1]["state"], "up", "they go on under the next one");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// Programs that use one CPU, ended with this.
struct Hogs(Vec<Child>);

impl Hogs {
    /// One takes all that the kernel gives a real-time process (95 %), others share the rest with whatever else is on that CPU.
    fn of(cpu: &str) -> Hogs {
        let start = |policy: &[&str]| {
            let mut hog = Command::new("chrt");
            hog.args(policy).args(["taskset", "-c", cpu, "sh", "-c", "while :; do :; done"]);
            hog.stdin(Stdio::null()).spawn().unwrap()
        };
        Hogs((0..5).map(|n| start(if n == 0 { &["-f", "1"] } else { &["-o", "0"] })).collect())
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.0 {
            hog.kill().unwrap();
            hog.wait().unwrap();
        }
    }
}

/// A CPU that this process may use.
fn a_cpu() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().split(['-', ',']).next().unwrap().to_owned()
}

#[test]
fn ps_waits_for_a_supervisor_that_waits_for_a_cpu() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let supervisor = number(&lab.ps()["supervisor"]).to_string();
    let cpu = a_cpu();
    let pinned = Command::new("taskset").args(["-a", "-c", "-p", &cpu, &supervisor]).output().unwrap();
    assert!(pinned.status.success(), "{}", said(&pinned));
    let mut hogs = Hogs::of(&cpu);
    for _ in 0..8 {
        lab.good(&["ps"]);
    }
    assert!(hogs.0.iter_mut().all(|hog| hog.try_wait().unwrap().is_none()), "a hog does not run (as root?)");
    drop(hogs);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn ps_takes_less_than_a_second_for_many_vms_stopped_ones_and_a_stopped_supervisor() {
    let vms: String = (0..20).map(|n| format!("[vm.v{n}]\n{VM}")).collect();
    let lab = lab(&vms);
    lab.good(&["up"]);
    let ps = lab.ps();
    for vm in ps["vms"].as_array().unwrap() {
        signal(number(&vm["pid"]), "STOP");
    }
    let (output, time) = fastest_ps(&lab);
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(table.matches("QEMU does not answer").count(), 20, "{table}");
    assert!(time < A_SECOND, "{time:?}");
    let supervisor = number(&ps["supervisor"]);
    signal(supervisor, "STOP");
    let (output, time) = fastest_ps(&lab);
    signal(supervisor, "CONT");
    let words = said(&output);
    assert!(words.contains("is stopped; to let it go on") && words.contains("v7 (process "), "{words}");
    assert!(time < A_SECOND, "{time:?}");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
