// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `up`, `restart`, `config`, `events`, `logs` and `clean` of a project whose file changes. A stand-in for QEMU, real switches.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::stand_in::said;
use common::{Lab, TIMEOUT, signal};
use serde_json::{Value, json};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nhotplug_ports = 2\nready = \"running\"\n";

/// A project with this file after the line that names the stand-in.
fn lab(compose: &str) -> Lab {
    let lab = Lab::new("");
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    write(&lab, compose);
    lab
}

fn write(lab: &Lab, compose: &str) {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let text = format!("qemu = \"{}\"\n{compose}", fake.display());
    std::fs::write(lab.dir.path().join("tombolo.toml"), text).unwrap();
}

/// Runs a command that succeeds, and says what it said.
fn told(lab: &Lab, arguments: &[&str]) -> String {
    let output = lab.run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    said(&output)
}

fn pid(ps: &Value, vm: &str) -> Option<u64> {
    ps["vms"].as_array().unwrap().iter().find(|v| v["name"] == vm)?["pid"].as_u64()
}

/// The actions that a dry run prints.
fn actions(lab: &Lab, arguments: &[&str]) -> Vec<Value> {
    let output = lab.good(&[&["up", "--dry-run", "--json"], arguments].concat());
    serde_json::from_str::<Value>(&output).unwrap()["actions"].as_array().unwrap().clone()
}

fn action(actions: &[Value], kind: &str, name: &str) -> String {
    let of = |a: &&Value| a["kind"] == kind && a["name"] == name;
    actions.iter().find(of).map(|a| a["action"].as_str().unwrap().to_owned()).unwrap_or_default()
}

#[test]
fn a_changed_network_waits_for_its_vms_and_a_restart_of_them_applies_it() {
    let file = |mtu: u32| {
        format!(
            "[net.lan]\nmtu = {mtu}\n[vm.a]\n{VM}networks = [\"lan\"]\n[vm.b]\n{VM}networks = [\"lan\"]\n"
        )
    };
    let lab = lab(&file(1500));
    lab.good(&["up"]);
    let before = lab.ps();
    write(&lab, &file(9000));
    let words = told(&lab, &["up"]);
    let expected =
        "tombolo: leave the network 'lan' as it runs: mtu 1500 -> 9000; to apply: tombolo restart a b";
    assert!(words.contains(expected), "{words}");
    assert_eq!(lab.ps()["networks"][0]["pid"], before["networks"][0]["pid"]);
    // One of them alone does not.
    assert!(told(&lab, &["restart", "a"]).contains("to apply: tombolo restart b"));
    let words = told(&lab, &["restart", "a", "b"]);
    assert!(words.contains("tombolo: start the network 'lan' anew: mtu 1500 -> 9000"), "{words}");
    assert!(!told(&lab, &["up"]).contains("leave"));
    let after = lab.ps();
    assert_ne!(after["networks"][0]["pid"], before["networks"][0]["pid"]);
    assert!(pid(&after, "a") != pid(&before, "a") && pid(&after, "b") != pid(&before, "b"));
    assert_eq!((&after["vms"][0]["state"], &after["vms"][1]["state"]), (&json!("up"), &json!("up")));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vms_changed_port_is_the_switchs_after_the_vms_restart_and_others_keep_theirs() {
    let file = |mac: &str| {
        format!(
            "[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ mac = \"{mac}\", address = \"none\" }} }}\n[vm.b]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"
        )
    };
    let lab = lab(&file("52:54:00:00:00:01"));
    lab.good(&["up"]);
    let before = lab.ps();
    write(&lab, &file("52:54:00:00:00:02"));
    assert!(told(&lab, &["up"]).contains("leave the VM 'a' as it runs: networks"));
    told(&lab, &["restart", "a"]);
    let after = lab.ps();
    let net = |ps: &Value| ps["networks"][0].clone();
    assert_eq!(net(&after)["ports"][0]["mac"], "52:54:00:00:00:02");
    assert_eq!(
        (net(&after)["pid"].clone(), pid(&after, "b")),
        (net(&before)["pid"].clone(), pid(&before, "b"))
    );
    let control = net(&after)["control"].as_str().unwrap().to_owned();
    let ports: Value =
        serde_json::from_str(&lab.good(&["net", "ports", "--control", &control, "--json"])).unwrap();
    assert!(
        ports.to_string().contains("52:54:00:00:00:02") && !ports.to_string().contains("52:54:00:00:00:01"),
        "{ports}"
    );
    lab.good(&["down"]);
}

#[test]
fn a_network_that_runs_keeps_its_addresses_when_the_file_gains_one_before_it() {
    let lan = format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{}} }}\n");
    // Addresses are set by an agent, which the stand-in has not.
    let lan = lan.replace("ready = \"running\"", "ready = \"agent\"");
    let lab = lab(&lan);
    lab.good(&["up"]);
    write(
        &lab,
        &format!(
            "[net.first]\n{lan}[vm.b]\n{}networks = [\"first\", \"lan\"]\n",
            VM.replace("running", "agent")
        ),
    );
    assert!(!told(&lab, &["up"]).contains("leave"));
    let ps = lab.ps();
    let subnets: Vec<&str> =
        ps["networks"].as_array().unwrap().iter().map(|n| n["subnet"].as_str().unwrap()).collect();
    assert_eq!(subnets, ["10.86.1.0/24", "10.86.0.0/24"]);
    lab.good(&["down"]);
}

#[test]
fn what_the_file_no_longer_declares_is_told_and_stopped_only_by_remove_orphans() {
    let a = format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\n");
    let lab = lab(&format!(
        "{a}[net.lan]\n[zone.y]\nsize = \"8M\"\n[vm.b]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\nzones = {{ y = {{}} }}\n"
    ));
    lab.good(&["up"]);
    let before = lab.ps();
    write(&lab, &format!("name = \"other\"\n{a}"));
    let words = told(&lab, &["up"]);
    for expected in [
        "leave the VM 'b', which the file does not declare; to stop it: tombolo up --remove-orphans",
        "leave the network 'lan', which the file does not declare; used by b",
        "leave the zone 'y', which the file does not declare; used by b",
        "to 'other'",
    ] {
        assert!(words.contains(expected), "{expected}: {words}");
    }
    let ps = lab.ps();
    assert_eq!((pid(&ps, "b"), &ps["project"]), (pid(&before, "b"), &json!("other")));
    told(&lab, &["up", "--remove-orphans"]);
    let after = lab.ps();
    assert_eq!((pid(&after, "a"), pid(&after, "b")), (pid(&before, "a"), None));
    assert_eq!((&after["networks"], after["zones"].as_array().unwrap().len()), (&json!([]), 1));
    assert!(told(&lab, &["up"]).lines().all(|line| line == "a: already running"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_dry_run_says_what_would_be_done_and_changes_nothing() {
    let file = |memory: &str| {
        format!(
            "[zone.z]\nsize = \"8M\"\n[net.lan]\n[vm.a]\n{}networks = {{ lan = {{ address = \"none\" }} }}\n",
            VM.replace("128M", memory)
        )
    };
    let lab = lab(&file("128M"));
    let planned = actions(&lab, &[]);
    for (kind, name) in [("zone", "z"), ("network", "lan"), ("vm", "a")] {
        assert_eq!(action(&planned, kind, name), "start", "{planned:?}");
    }
    lab.assert_nothing_left();
    assert!(lab.ps()["supervisor"].is_null());
    assert!(
        !lab.dir.path().join("tombolo").read_dir().is_ok_and(|mut dir| dir.any(|_| true)),
        "a folder is left"
    );
    lab.good(&["up"]);
    let before = lab.ps();
    write(&lab, &format!("{}[vm.b]\n{VM}", file("256M")));
    let planned = actions(&lab, &[]);
    assert_eq!((action(&planned, "vm", "a"), action(&planned, "vm", "b")), ("wait".into(), "start".into()));
    let restarts = lab.good(&["restart", "--dry-run", "a"]);
    assert!(restarts.contains("restart the VM 'a': memory 128M -> 256M"), "{restarts}");
    // A plan that `up` would refuse is refused.
    write(&lab, &format!("{}[vm.b]\n{}", file("128M"), VM.replace("\"kernel\"", "\"./missing\"")));
    let refused = lab.run(&["up", "--dry-run"]);
    assert!(!refused.status.success() && said(&refused).contains("vm.b.kernel: "), "{}", said(&refused));
    let after = lab.ps();
    assert_eq!(
        (&after["supervisor"], pid(&after, "a"), pid(&after, "b")),
        (&before["supervisor"], pid(&before, "a"), None)
    );
    lab.good(&["down"]);
}

#[test]
fn events_tell_each_state_from_now_on_or_since_a_time() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    lab.good(&["up"]);
    let mut now = lab.command(&["events", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut all = lab.command(&["events", "--since", "1h"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(all.stdout.take().unwrap());
    let mut first = String::new();
    reader.read_line(&mut first).unwrap();
    assert!(first.contains(" network lan up"), "{first}");
    // Nothing tells when `now` is heard but an event that it prints.
    let mut lines = BufReader::new(now.stdout.take().unwrap()).lines().map(Result::unwrap);
    let (sender, heard) = mpsc::channel();
    let reading = std::thread::spawn(move || lines.try_for_each(|line| sender.send(line)));
    let mut entries: Vec<String> = Vec::new();
    while entries.is_empty() {
        let network = lab.ps()["networks"][0].clone();
        signal(u32::try_from(network["pid"].as_u64().unwrap()).unwrap(), "KILL");
        until(|| lab.ps()["networks"][0]["starts"].as_u64() > network["starts"].as_u64());
        entries.extend(heard.try_iter());
    }
    signal(u32::try_from(pid(&lab.ps(), "a").unwrap()).unwrap(), "USR1");
    until(|| lab.ps()["vms"][0]["reboots"] == 1 && lab.ps()["vms"][0]["state"] == "up");
    lab.good(&["down"]);
    reading.join().unwrap().unwrap();
    entries.extend(heard);
    assert!(now.wait().unwrap().success() && all.wait().unwrap().success());
    let text = entries.join("\n");
    let entries: Vec<Value> = entries.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| {
        entries.iter().filter(|e| e["kind"] == kind).map(|e| e["state"].as_str().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(of("vm"), ["rebooting", "booting", "up", "stopping", "ended"], "{text}");
    let network = of("network");
    assert!(network.ends_with(&["up", "ended"]) && network.windows(2).all(|two| two[0] != two[1]), "{text}");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("VM a rebooting (the guest reset itself)"), "{rest}");
}

fn until(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn logs_are_followed_over_reboots_and_restarts_until_the_project_is_down() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.bee]\n{VM}"));
    lab.good(&["up"]);
    let mut raw = lab.command(&["logs", "-f", "a"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut both = lab.command(&["logs", "--follow", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(raw.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert_eq!(next(), "a guest's first words\r".trim_end());
    signal(u32::try_from(pid(&lab.ps(), "a").unwrap()).unwrap(), "USR1");
    assert_eq!(next(), "a guest's first words");
    until(|| lab.ps()["vms"][0]["state"] == "up");
    lab.good(&["restart", "a"]);
    assert_eq!(next(), "a guest's first words");
    let shown = lab.good(&["logs", "-n", "1"]);
    assert_eq!(shown, "a   | a guest's first words\nbee | a guest's first words\n");
    lab.good(&["down"]);
    assert!(lines.next().is_none() && raw.wait().unwrap().success());
    let mut text = String::new();
    both.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    both.wait().unwrap();
    assert_eq!(text.matches("{\"line\":\"a guest's first words\",\"vm\":\"a\"}").count(), 3, "{text}");
    let none = lab.run(&["logs", "nobody"]);
    assert!(said(&none).contains("declares no VM 'nobody'"), "{}", said(&none));
}

#[test]
fn config_prints_a_file_that_says_the_same_and_says_what_is_wrong() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}"));
    let printed = lab.good(&["config"]);
    assert!(
        printed.contains("subnet = \"10.86.0.0/24\"") && printed.contains("memory = \"128M\""),
        "{printed}"
    );
    std::fs::write(lab.dir.path().join("again.toml"), &printed).unwrap();
    assert_eq!(lab.good(&["config", "-f", "again.toml"]), printed);
    let json: Value = serde_json::from_str(&lab.good(&["config", "--json"])).unwrap();
    assert_eq!(json["vm"]["a"]["cpus"], 2);
    assert_eq!(lab.good(&["config", "-q"]), "");
    write(&lab, "[vms.a]\n");
    let wrong = lab.run(&["config", "-q"]);
    assert!(
        said(&wrong).contains("unknown key 'vms' at the top level; did you mean 'vm'?"),
        "{}",
        said(&wrong)
    );
}

#[test]
fn a_file_that_is_broken_or_gone_while_its_project_runs_keeps_nobody_from_stopping_it() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    write(&lab, "[vm.a\n");
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["logs", "a"]);
    assert!(said(&lab.run(&["up"])).contains(":2: "));
    std::fs::remove_file(lab.dir.path().join("tombolo.toml")).unwrap();
    let ps: Value = serde_json::from_str(&lab.good(&["ps", "--json", "-f", "tombolo.toml"])).unwrap();
    assert_eq!(ps["vms"][0]["state"], "up");
    lab.good(&["down", "-f", "tombolo.toml"]);
    lab.assert_nothing_left();
    assert!(said(&lab.run(&["down", "-f", "tombolo.toml"])).contains("name an existing compose file"));
}

#[test]
fn up_and_down_are_lines_of_json_where_a_script_reads_them() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let events = |arguments: &[&str]| -> Vec<Value> {
        lab.good(arguments).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let up = events(&["up", "--json"]);
    let stages: Vec<&str> =
        up.iter().filter(|e| e["vm"] == "a").map(|e| e["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["starting", "booting", "up"], "{up:?}");
    assert_eq!(up.last().unwrap()["event"], "done");
    assert_eq!(serde_json::from_str::<Value>(&lab.good(&["start", "metrics", "--json"])).unwrap(), json!({}));
    let down = events(&["down", "--json"]);
    assert_eq!(down.last().unwrap()["event"], "done");
    assert_eq!(events(&["down", "--json"]), [json!({ "event": "done" })]);
    write(&lab, &format!("[vm.a]\n{}", VM.replace("\"kernel\"", "\"./missing\"")));
    let failed = lab.run(&["up", "--json"]);
    let last = String::from_utf8_lossy(&failed.stdout).lines().last().unwrap().to_owned();
    let last: Value = serde_json::from_str(&last).unwrap();
    assert!(last["event"] == "failed" && last["message"].as_str().unwrap().contains("vm.a.kernel"), "{last}");
}

#[test]
fn whoever_closes_the_output_ends_every_printing_command_without_a_word() {
    let lab = lab(&format!(
        "[zone.z]\nsize = \"16M\"\nfiles = true\n[vm.a]\n{}zones = {{ z = {{}} }}\n",
        VM.replace("running", "agent")
    ));
    lab.good(&["up"]);
    for command in [
        &["ps"][..],
        &["ps", "--json"],
        &["logs"],
        &["config"],
        &["up", "--dry-run"],
        &["zone", "inspect", "z"],
        &["files", "df", "z"],
        &["start", "blame", "a"],
        &["start", "plan", "4G"],
        &["completion", "bash"],
        &["net", "ls", "--json"],
        &["clean", "--dry-run"],
    ] {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let output = lab.command(command).stdout(writer).output().unwrap();
        assert!(said(&output).is_empty(), "{command:?}: {}", said(&output));
    }
    lab.good(&["down"]);
}

#[test]
fn a_zone_is_named_where_files_take_a_name_and_messages_say_its_name() {
    let lab = lab(&format!(
        "[zone.shared]\nsize = \"16M\"\nfiles = true\n[vm.a]\n{VM}zones = {{ shared = {{}} }}\n"
    ));
    lab.good(&["up"]);
    assert!(lab.good(&["zone", "inspect", "shared"]).starts_with("shared "));
    let refused = lab.run(&["files", "mkfs", "shared"]);
    assert!(!refused.status.success(), "a file system is there");
    assert!(
        said(&refused).contains("/zones/shared: ") && !said(&refused).contains("/fd/"),
        "{}",
        said(&refused)
    );
    let unknown = lab.run(&["zone", "inspect", "shraed"]);
    assert!(said(&unknown).contains("did you mean 'shared'?"), "{}", said(&unknown));
    lab.good(&["down"]);
}

#[test]
fn an_uplink_over_a_device_that_is_not_there_starts_nothing() {
    let lab =
        lab(&format!("[net.out]\nuplink = {{ tap = \"nosuchtap\" }}\n[vm.a]\n{VM}networks = [\"out\"]\n"));
    let refused = lab.run(&["up"]);
    assert!(!refused.status.success());
    assert!(
        said(&refused).contains("net.out.uplink: there is no device 'nosuchtap'; make it: ip tuntap add"),
        "{}",
        said(&refused)
    );
    lab.assert_nothing_left();
}

#[test]
fn completion_knows_the_names_of_the_compose_file() {
    let lab = lab(&format!("[zone.data]\nsize = \"8M\"\n[net.lan]\n[vm.web]\n{VM}[vm.worker]\n{VM}"));
    let complete = |words: &[&str]| {
        let mut command = lab.command(&[&["--"], words].concat());
        command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
        command
            .env("_CLAP_COMPLETE_COMP_TYPE", "9")
            .env("_CLAP_COMPLETE_SPACE", "true")
            .env("_CLAP_IFS", "\n");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete(&["tombolo", "exec", "w"]), "web\nworker");
    assert_eq!(complete(&["tombolo", "restart", "wo"]), "worker");
    assert_eq!(complete(&["tombolo", "zone", "attach", "d"]), "data");
    assert!(complete(&["tombolo", "re"]).contains("restart"));
    write(&lab, "[broken");
    assert_eq!(complete(&["tombolo", "exec", "w"]), "");
}

#[test]
fn clean_removes_what_a_killed_supervisor_left_and_nothing_that_lives() {
    let (dead, living) = (lab(&format!("[vm.a]\n{VM}")), lab(&format!("[vm.a]\n{VM}")));
    // Both keep their folders in one place.
    let shared = tempfile::tempdir().unwrap();
    let run = |lab: &Lab, arguments: &[&str]| {
        let output = lab
            .command(arguments)
            .env("XDG_RUNTIME_DIR", shared.path())
            .env("TMPDIR", shared.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for lab in [&dead, &living] {
        run(lab, &["up"]);
    }
    let kill = |pid: u32| {
        signal(pid, "KILL");
        until(|| !Path::new(&format!("/proc/{pid}")).exists());
    };
    let status = || serde_json::from_str::<serde_json::Value>(&run(&dead, &["ps", "--json"])).unwrap();
    let supervisor = || u32::try_from(status()["supervisor"].as_u64().unwrap()).unwrap();
    let qemu = status()["vms"][0]["pid"].as_u64().unwrap();
    kill(supervisor());
    assert!(!run(&living, &["clean", "--dry-run"]).contains("a project whose"), "its VM lives");
    kill(supervisor());
    // The shim of its VM.
    let status = std::fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t")).unwrap();
    kill(parent.parse().unwrap());
    let folders = || shared.path().join("tombolo").read_dir().unwrap().count();
    let before = folders();
    assert!(run(&dead, &["clean", "--dry-run"]).contains("(a project whose supervisor died)"));
    assert_eq!(folders(), before);
    run(&dead, &["clean"]);
    assert!(!run(&dead, &["clean", "--dry-run"]).contains("whose supervisor died"));
    let ps: serde_json::Value = serde_json::from_str(&run(&living, &["ps", "--json"])).unwrap();
    assert_eq!(ps["vms"][0]["state"], "up");
    assert!(!run(&living, &["logs", "a"]).is_empty());
    run(&living, &["down"]);
}
