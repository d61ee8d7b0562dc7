// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parts of a project that the next program of its supervisor can't take over: the others go on, and the error names the part and its remedy.
//! A stand-in for QEMU, real switches and servers.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::stand_in::{lab, number, said, until};
use common::{Lab, signal};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

/// A program that becomes the real one, which then finds `wrong` at this place of its state.
fn damage(lab: &Lab, place: &str, wrong: &str) -> PathBuf {
    let text = format!(
        "#!/usr/bin/env python3\nimport json, os, sys\n\
         if sys.argv[2] == '--state':\n    state = json.load(open('/proc/self/fd/' + sys.argv[3]))\n    \
         state{place} = {wrong}\n    fd = os.memfd_create('state', 0)\n    os.write(fd, json.dumps(state).encode())\n    \
         sys.argv[3] = str(fd)\nos.execv('{}', ['tombolo'] + sys.argv[1:])\n",
        env!("CARGO_BIN_EXE_tombolo")
    );
    let path = lab.dir.path().join("damage");
    // Another process writes it: a child that is being started elsewhere could hold it open for writing.
    let mut shell = Command::new("sh");
    shell.args(["-c", "rm -f \"$0\" && cat >\"$0\" && chmod +x \"$0\""]).arg(&path).stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success());
    path
}

/// Upgrades the project to a program that finds no such descriptor: what the command says.
fn upgrade(lab: &Lab, place: &str, wrong: &str) -> (bool, String) {
    let supervisor = number(&lab.ps()["supervisor"]);
    let program = damage(lab, place, wrong);
    let upgraded = lab.run(&["upgrade", "--program", program.to_str().unwrap()]);
    assert_eq!(number(&lab.ps()["supervisor"]), supervisor, "{place}: {}", said(&upgraded));
    (upgraded.status.success(), said(&upgraded))
}

fn vm(lab: &Lab, name: &str) -> Value {
    lab.ps()["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned().unwrap()
}

/// A program that is killed at the end.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_vm_runs_on_without_the_part_that_could_not_be_taken_over_until_it_is_started_again() {
    let lab = lab(&format!(
        "[net.lan]\n[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\nnetworks = {{ lan = {{ address = \"none\" }} }}\n\
         [vm.b]\n{VM}"
    ));
    lab.good(&["up"]);
    let b = vm(&lab, "b")["pid"].clone();
    for (place, lacks) in [
        // The first peer is the VM's until it is started again.
        ("['zones']['z']['bells']['clients'][0]['stream']", "its doorbell in the zone 'z'"),
        ("['machines'][0]['console']['socket']", "its console"),
        ("['machines'][0]['log']['socket']", "the log of its QEMU"),
        ("['machines'][0]['agent'][0]", "its guest agent"),
        ("['machines'][0]['monitor'][0]", "its monitor"),
        ("['machines'][0]['group']", "the care of its cgroup"),
    ] {
        let before = vm(&lab, "a")["pid"].clone();
        let wrong = if place.contains("group") { "'/nonexistent/group'" } else { "1000000" };
        let (good, words) = upgrade(&lab, place, wrong);
        let told = format!("the VM 'a' lacks {lacks}");
        assert!(!good && words.contains(&told) && words.contains("tombolo restart a"), "{place}: {words}");
        let after = vm(&lab, "a");
        assert_eq!((&after["pid"], &after["state"]), (&before, &Value::from("up")), "{place}");
        assert!(after["trouble"].as_str().is_some_and(|trouble| trouble.contains(lacks)), "{place}: {after}");
        // It is noted until the VM is started again, and nothing else is lost by another upgrade.
        let (_, again) = upgrade(&lab, "['nothing']", "0");
        assert!(again.contains("is run by version"), "{again}");
        assert_eq!(vm(&lab, "a")["trouble"], after["trouble"], "{place}");
        if place.contains("agent") {
            let exec = lab.run(&["exec", "a", "--", "true"]);
            assert!(said(&exec).contains("lost in an upgrade"), "{}", said(&exec));
        }
        assert_eq!((&vm(&lab, "b")["pid"], &vm(&lab, "b")["trouble"]), (&b, &Value::Null), "{place}");
        lab.good(&["exec", "b", "--", "true"]);
        let restarted = lab.run(&["restart", "a"]);
        let words = said(&restarted);
        assert!(restarted.status.success() && !words.contains("is killed"), "{place}: {words}");
        assert_eq!(vm(&lab, "a")["trouble"], Value::Null, "{place}");
        lab.good(&["exec", "a", "--", "true"]);
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn what_can_be_had_anew_is_had_anew() {
    let lab = lab(&format!("[net.lan]\n[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\n"));
    lab.good(&["up"]);
    let before = vm(&lab, "a");
    for place in ["['signals']", "['zones']['z']['bells']['hosts']['listener']", "['program']"] {
        let (good, words) = upgrade(&lab, place, "1000000");
        assert!(good, "{place}: {words}");
        assert_eq!((&vm(&lab, "a")["pid"], &vm(&lab, "a")["state"]), (&before["pid"], &before["state"]));
        assert_eq!(lab.ps()["zones"][0]["members"], serde_json::json!(["a"]), "{place}");
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_whose_process_is_lost_ends_and_its_policy_starts_it_again() {
    let lab =
        lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}[vm.c]\n{VM}restart = \"always\"\n[zone.z]\nsize = \"8M\"\n"));
    lab.good(&["up"]);
    let (b, c) = (vm(&lab, "b")["pid"].clone(), vm(&lab, "c")["pid"].clone());
    let (good, words) = upgrade(&lab, "['machines'][0]['pid']", "1");
    assert!(
        !good && words.contains("the VM 'a' has ended: its process 1 could not be taken over"),
        "{words}"
    );
    until("ps says that it runs", || {
        vm(&lab, "a")["state"].as_str().unwrap().starts_with("ended: its process 1")
    });
    upgrade(&lab, "['machines'][2]['pid']", "1");
    until("its policy does not start it again", || {
        let now = vm(&lab, "c");
        now["state"] == "up" && now["restarts"] == 1 && now["pid"] != c
    });
    assert_eq!(vm(&lab, "b")["pid"], b);
    // No process is left that was not taken over.
    let ps = lab.ps();
    let known = [&ps["supervisor"], &vm(&lab, "b")["pid"], &vm(&lab, "c")["pid"]].map(number);
    until("a lost process runs on", || lab.processes().iter().all(|process| known.contains(process)));
    lab.good(&["up"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_zone_that_is_lost_takes_no_vm_along_and_is_not_made_anew_beside_them() {
    let lab = lab(&format!(
        "[zone.y]\nsize = \"8M\"\n[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\n\
         [vm.b]\n{VM}zones = {{ y = {{}} }}\n"
    ));
    lab.good(&["up"]);
    let before = lab.ps();
    let (good, words) = upgrade(&lab, "['zones']['z']['zone']['memory']", "1000000");
    assert!(
        !good && words.contains("zone.z is lost") && words.contains("tombolo down && tombolo up"),
        "{words}"
    );
    for (old, name) in before["vms"].as_array().unwrap().iter().zip(["a", "b"]) {
        assert_eq!((&vm(&lab, name)["pid"], &vm(&lab, name)["state"]), (&old["pid"], &old["state"]));
    }
    assert!(vm(&lab, "a")["trouble"].as_str().unwrap().contains("has no owner since the upgrade"));
    for command in [&["up"][..], &["restart", "a"], &["zone", "path", "z"], &["zone", "attach", "z", "b"]] {
        let refused = lab.run(command);
        assert!(
            !refused.status.success() && said(&refused).contains("lost in an upgrade"),
            "{}",
            said(&refused)
        );
    }
    assert_eq!(vm(&lab, "a")["pid"], before["vms"][0]["pid"], "a command that is refused stops nothing");
    assert_eq!(lab.ps()["zones"][0]["members"], serde_json::json!(["b"]));
    lab.good(&["down"]);
    lab.good(&["up"]);
    assert_eq!(vm(&lab, "a")["trouble"], Value::Null);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn switches_and_servers_that_are_lost_are_started_again() {
    let lab = lab(&format!(
        "[net.lan]\n[net.other]\n[accel.cl]\n[vm.a]\n{VM}accelerators = [\"cl\"]\n\
         networks = {{ lan = {{ address = \"none\" }}, other = {{ address = \"none\" }} }}\n\
         [vm.b]\n{VM}accelerators = [\"cl\"]\n"
    ));
    lab.good(&["up"]);
    let before = lab.ps();
    let (good, words) = upgrade(&lab, "['networks']['lan']['switch']['pid']", "1");
    assert!(!good && words.contains("the network 'lan' has lost its switch"), "{words}");
    until("the switch is not started again", || {
        let nets = &lab.ps()["networks"];
        nets[0]["starts"].as_u64() >= Some(2)
            && nets[0]["pid"].is_u64()
            && nets[1]["pid"] == before["networks"][1]["pid"]
    });
    let serves = |starts: u64| {
        until("the server is not started again", || {
            let now = &lab.ps()["accelerators"][0];
            now["starts"] == starts && now["state"] == "serving"
        });
    };
    let (good, words) = upgrade(&lab, "['accelerators']['cl']['link']", "1000000");
    assert!(!good && words.contains("the accelerator 'cl' has lost the connection to its server"), "{words}");
    serves(2);
    let (good, words) =
        upgrade(&lab, "['accelerators']['cl']['slots']['a']['zone']['zone']['memory']", "1000000");
    assert!(!good && words.contains("the VM 'a' lacks its accelerator 'cl'"), "{words}");
    serves(3);
    let served = || {
        let ps = lab.ps();
        let vms = ps["accelerators"][0]["vms"].as_array().unwrap().clone();
        vms.iter().map(|vm| (vm["vm"].to_string(), vm["served"] == true)).collect::<Vec<_>>()
    };
    assert_eq!(served(), [("\"b\"".to_owned(), true)]);
    lab.good(&["restart", "a"]);
    assert_eq!(served(), [("\"a\"".to_owned(), true), ("\"b\"".to_owned(), true)]);
    assert_eq!(vm(&lab, "b")["pid"], before["vms"][1]["pid"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_console_that_is_lost_ends_and_others_go_on() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}"));
    lab.good(&["up"]);
    let watch = |name: &str| {
        let mut child = lab.command(&["console", name]);
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut words = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        words.read_line(&mut line).unwrap();
        assert!(line.contains("first words"));
        (Ended(child), words)
    };
    let ((_lost, _), (_other, mut words)) = (watch("a"), watch("b"));
    let (good, text) = upgrade(&lab, "['lasting'][0][0]", "1000000");
    assert!(!good && text.contains("a 'console a' has ended in the upgrade"), "{text}");
    signal(number(&vm(&lab, "b")["pid"]), "USR2");
    let mut line = String::new();
    words.read_line(&mut line).unwrap();
    assert!(line.contains("next words"), "{line}");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_whose_process_does_not_die_keeps_no_project_from_an_upgrade() {
    let lab = lab("");
    let held = lab.dir.path().join("held");
    std::fs::write(&held, "").unwrap();
    let file = lab.dir.path().join("tombolo.toml");
    let qemu = std::fs::read_to_string(&file).unwrap();
    let immortal = format!("qemu_args = [\"-fake\", \"immortal={}\"]\n", held.display());
    std::fs::write(&file, format!("{qemu}[vm.a]\n{VM}{immortal}[vm.b]\n{VM}")).unwrap();
    lab.good(&["up"]);
    let refused = lab.run(&["down", "a"]);
    assert!(said(&refused).contains("does not die"), "{}", said(&refused));
    let before = lab.ps();
    let (good, words) = upgrade(&lab, "['signals']", "1000000");
    assert!(good, "{words}");
    assert_eq!(
        (&vm(&lab, "a")["pid"], &vm(&lab, "b")["pid"]),
        (&before["vms"][0]["pid"], &before["vms"][1]["pid"])
    );
    std::fs::remove_file(&held).unwrap();
    until("its end is not seen", || vm(&lab, "a")["state"].as_str().unwrap().starts_with("ended"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
