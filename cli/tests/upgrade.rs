// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo upgrade`: another program's supervisor goes on with what runs. A stand-in for QEMU, real switches.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::stand_in::{lab, number, said, until};
use common::{Lab, copy_program, signal, write_program};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nhotplug_ports = 4\nready = \"running\"\n";

/// Another program for the lab: this one under another name and number.
fn next(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.dir.path().join(name);
    copy_program(env!("CARGO_BIN_EXE_tombolo"), &path);
    path
}

/// A program that is a script.
fn script(lab: &Lab, text: &str) -> PathBuf {
    let path = lab.dir.path().join("script");
    write_program(&path, text);
    path
}

#[test]
fn an_upgrade_with_odd_words_ends_and_leaves_the_project_as_it_was() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let (before, pipe) = (lab.ps()["vms"][0]["pid"].clone(), lab.dir.path().join("pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let refused = lab.run(&["upgrade", "--program", pipe.to_str().unwrap()]);
    let words = said(&refused);
    assert!(!refused.status.success() && words.contains("it is no regular file"), "{words}");
    let longest = u64::MAX.to_string();
    lab.good(&["upgrade", "--program", next(&lab, "next").to_str().unwrap(), "--wait", &longest]);
    assert_eq!(lab.ps()["vms"][0]["pid"], before);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

fn upgrade(lab: &Lab, program: &Path) {
    lab.good(&["upgrade", "--program", program.to_str().unwrap()]);
}

/// The program that the project's supervisor is.
fn program(lab: &Lab) -> PathBuf {
    let supervisor = number(&lab.ps()["supervisor"]);
    std::fs::read_link(format!("/proc/{supervisor}/exe")).unwrap()
}

fn piped(lab: &Lab, arguments: &[&str]) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = lab.command(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let reader = BufReader::new(child.stdout.take().unwrap());
    (child, reader)
}

fn line_with(reader: &mut impl BufRead, words: &str) -> String {
    loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the end came before '{words}'");
        if line.contains(words) {
            return line;
        }
    }
}

#[test]
fn vms_networks_zones_consoles_and_events_go_on_under_another_program() {
    let lab = lab(&format!(
        "[net.lan]\n[zone.z]\nsize = \"8M\"\n[zone.late]\nsize = \"8M\"\n\
         [vm.a]\n{VM}zones = {{ z = {{}} }}\nnetworks = {{ lan = {{ address = \"none\" }} }}\n[vm.b]\n{VM}"
    ));
    lab.good(&["up"]);
    lab.good(&["zone", "attach", "late", "a"]);
    let before = lab.ps();
    let (mut console, mut words) = piped(&lab, &["console", "a"]);
    line_with(&mut words, "first words");
    let (mut events, mut happened) = piped(&lab, &["events", "--since", "1h"]);
    line_with(&mut happened, "b up");
    let next = next(&lab, "next");
    upgrade(&lab, &next);
    assert_eq!(program(&lab), next);
    let after = lab.ps();
    let lasting = |ps: &Value| {
        let mut ps = ps.clone();
        for other in ["supervisor", "hypervisor"] {
            ps[other].take();
        }
        ps["zones"].as_array_mut().unwrap().iter_mut().for_each(|zone| drop(zone["path"].take()));
        // All but the time that has passed.
        ps["vms"].as_array_mut().unwrap().iter_mut().for_each(|vm| drop(vm["uptime"].take()));
        ps
    };
    assert_eq!(lasting(&before), lasting(&after));
    assert!(after["vms"][0]["uptime"].as_f64() > before["vms"][0]["uptime"].as_f64());

    // Each of its parts does what it did.
    lab.good(&["exec", "a", "--", "true"]);
    lab.good(&["zone", "detach", "late", "a"]);
    lab.good(&["zone", "attach", "late", "a"]);
    lab.good(&["zone", "attach", "late", "b"]);
    let qemu = |name: &str| {
        let ps = lab.ps();
        let vm = ps["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned().unwrap();
        (vm["pid"].as_u64().map(|pid| u32::try_from(pid).unwrap()), vm)
    };
    signal(qemu("a").0.unwrap(), "USR2");
    line_with(&mut words, "next words");
    assert!(lab.good(&["logs", "a"]).contains("first words"), "the log goes on");
    signal(qemu("a").0.unwrap(), "USR1");
    until("a does not reboot", || {
        let (_, vm) = qemu("a");
        vm["reboots"] == 1 && vm["state"] == "up"
    });
    line_with(&mut happened, "a rebooting");
    line_with(&mut words, "first words");
    signal(qemu("b").0.unwrap(), "KILL");
    until("ps does not show the end of b", || qemu("b").1["state"] == "ended: QEMU was killed by signal 9");
    let switch = number(&after["networks"][0]["pid"]);
    signal(switch, "KILL");
    until("the switch is not started again", || {
        let net = &lab.ps()["networks"][0];
        net["starts"] == 2 && net["pid"].as_u64().is_some_and(|pid| pid != u64::from(switch))
    });
    lab.good(&["up"]);
    assert_eq!(qemu("b").1["state"], "up");
    lab.good(&["down"]);
    assert!(console.wait().unwrap().success());
    assert!(events.wait().unwrap().success());
    lab.assert_nothing_left();
}

#[test]
fn a_guest_that_does_not_read_what_is_typed_holds_up_neither_an_upgrade_nor_the_end_of_its_console() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let (mut console, _words) = piped(&lab, &["console", "a"]);
    let mut input = console.stdin.take().unwrap();
    let typed = Arc::new(AtomicUsize::new(0));
    let count = typed.clone();
    // More than all buffers hold: it ends when the client does.
    let typing = std::thread::spawn(move || {
        while input.write_all(&[b'x'; 4096]).is_ok() {
            count.fetch_add(4096, Ordering::Relaxed);
        }
    });
    // The pipe and the sockets on the way to a guest take more.
    until("nothing is typed", || typed.load(Ordering::Relaxed) > 200_000);
    upgrade(&lab, &next(&lab, "next"));
    console.kill().unwrap();
    console.wait().unwrap();
    typing.join().unwrap();
    upgrade(&lab, &next(&lab, "after"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_accelerators_server_serves_on() {
    let lab = lab(&format!("[accel.cl]\n[vm.a]\n{VM}accelerators = [\"cl\"]\n"));
    lab.good(&["up"]);
    let before = lab.ps()["accelerators"][0].clone();
    upgrade(&lab, &next(&lab, "next"));
    let after = lab.ps()["accelerators"][0].clone();
    assert_eq!(
        (&before["pid"], &before["starts"], "serving"),
        (&after["pid"], &after["starts"], after["state"].as_str().unwrap())
    );
    signal(number(&after["pid"]), "KILL");
    until("it is not started again", || {
        let now = &lab.ps()["accelerators"][0];
        now["starts"] == 2 && now["state"] == "serving"
    });
    lab.good(&["restart", "a"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// The servers of a project's accelerators.
fn servers(lab: &Lab) -> Vec<u32> {
    let is_server = |pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--overseen")
    };
    lab.processes().into_iter().filter(is_server).collect()
}

/// Kills a process that may have ended.
fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    let _ended = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

#[test]
fn an_accelerators_server_that_is_killed_twice_while_the_program_changes_is_followed_by_one_that_serves() {
    let lab = lab(&format!("[accel.cl]\n[vm.a]\n{VM}accelerators = [\"cl\"]\n"));
    lab.good(&["up"]);
    for round in 0..8 {
        let next = next(&lab, &format!("next-{round}"));
        std::thread::scope(|scope| {
            let upgrading = scope.spawn(|| upgrade(&lab, &next));
            // At another step each time.
            for pause in [round * 12, 150] {
                std::thread::sleep(std::time::Duration::from_millis(pause));
                servers(&lab).into_iter().for_each(kill);
            }
            upgrading.join().unwrap();
        });
        until("no server serves", || {
            let now = &lab.ps()["accelerators"][0];
            now["state"] == "serving" && now["vms"][0]["served"] == true
        });
        assert_eq!(program(&lab), next);
        assert_eq!(servers(&lab).len(), 1);
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn memory_goes_on_growing_and_a_policy_goes_on_starting_its_vm() {
    let again = "restart = \"always\"\n";
    let lab = lab(&format!(
        "[vm.big]\n{}boot_memory = \"128M\"\nstart = \"fast\"\n[vm.again]\n{VM}{again}",
        VM.replace("128M", "1G")
    ));
    lab.good(&["up"]);
    let vm = |name: &str| {
        lab.ps()["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned().unwrap()
    };
    let first = number(&vm("again")["pid"]);
    signal(first, "KILL");
    until("its end is not seen", || vm("again")["pid"].as_u64() != Some(u64::from(first)));
    // The pause before its restart may be over or not.
    upgrade(&lab, &next(&lab, "next"));
    until("it is not started again", || vm("again")["state"] == "up" && vm("again")["restarts"] == 1);
    until("its memory does not grow", || vm("big")["growth"]["phase"] == "complete");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn commands_that_come_in_the_middle_wait_and_are_answered() {
    let lab = lab(&format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let programs = [next(&lab, "one"), next(&lab, "two")];
    let qemu = number(&lab.ps()["vms"][0]["pid"]);
    let (mut attached, over) = (
        lab.command(&["up", "--attach"]).stderr(Stdio::null()).spawn().unwrap(),
        &std::sync::atomic::AtomicBool::new(false),
    );
    std::thread::scope(|scope| {
        let commands = [&["ps", "--json"][..], &["exec", "a", "--", "true"], &["up"], &["zone", "path", "z"]];
        let asking = commands.map(|command| {
            let lab = &lab;
            scope.spawn(move || {
                let mut asked = 0;
                while !over.load(std::sync::atomic::Ordering::Acquire) {
                    lab.good(command);
                    asked += 1;
                }
                asked
            })
        });
        for round in 0..6 {
            upgrade(&lab, &programs[round % 2]);
        }
        over.store(true, std::sync::atomic::Ordering::Release);
        for asked in asking {
            assert!(asked.join().unwrap() > 0);
        }
    });
    assert_eq!(number(&lab.ps()["vms"][0]["pid"]), qemu);
    assert!(attached.try_wait().unwrap().is_none(), "who stays in the foreground stays");
    lab.good(&["down"]);
    attached.wait().unwrap();
    lab.assert_nothing_left();
}

#[test]
fn a_program_that_can_not_go_on_leaves_the_project_to_the_old_one() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let (before, own) = (lab.ps(), program(&lab));
    let refuses = |program: &Path, words: &str| {
        let refused = lab.run(&["upgrade", "--program", program.to_str().unwrap()]);
        assert!(!refused.status.success() && said(&refused).contains(words), "{}", said(&refused));
        assert_eq!(self::program(&lab), own);
        assert_eq!(lab.ps()["vms"][0]["pid"], before["vms"][0]["pid"]);
        lab.good(&["exec", "a", "--", "true"]);
    };
    refuses(Path::new("/nonexistent"), "/nonexistent can't be opened");
    let text = lab.dir.path().join("tombolo.toml");
    refuses(&text, "the program can't be started");
    refuses(&script(&lab, "#!/bin/sh\necho it knows nothing >&2\nexit 3\n"), "it knows nothing");
    assert_eq!(lab.ps()["supervisor"], before["supervisor"], "none of these has ended it");
    // One that finds out too late.
    refuses(&script(&lab, "#!/bin/sh\n[ \"$2\" = --check ]\n"), "is run by the program before");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_upgrade_waits_for_commands_in_guests_and_gives_up_where_they_go_on() {
    let lab = lab("");
    let busy = lab.dir.path().join("busy");
    std::fs::write(&busy, "").unwrap();
    let compose = lab.dir.path().join("tombolo.toml");
    let qemu = std::fs::read_to_string(&compose).unwrap();
    let words = format!("qemu_args = [\"-fake\", \"busy={}\"]\n", busy.display());
    std::fs::write(&compose, format!("{qemu}[vm.a]\n{VM}{words}")).unwrap();
    lab.good(&["up"]);
    let next = next(&lab, "next");
    let mut exec = lab.command(&["exec", "a", "--", "sleep"]).stderr(Stdio::null()).spawn().unwrap();
    until("the command does not begin", || !std::fs::read(&busy).unwrap().is_empty());
    let refused = lab.run(&["upgrade", "--wait", "0", "--program", next.to_str().unwrap()]);
    let words = said(&refused);
    assert!(
        words.contains("is busy, so it runs on as it did; to be ended first: exec a -- sleep"),
        "{words}"
    );
    let mut waiting = lab.command(&["upgrade", "--wait", "600", "--program", next.to_str().unwrap()]);
    let mut waiting = waiting.stderr(Stdio::piped()).spawn().unwrap();
    line_with(
        &mut BufReader::new(waiting.stderr.take().unwrap()),
        "this waits for the end of: exec a -- sleep",
    );
    assert_eq!(lab.ps()["vms"][0]["state"], "up", "others are heard meanwhile");
    std::fs::remove_file(&busy).unwrap();
    assert!(exec.wait().unwrap().success());
    assert!(waiting.wait().unwrap().success());
    assert_eq!(program(&lab), next);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_project_that_is_up_to_date_is_left_alone() {
    let labs = [lab(&format!("[vm.a]\n{VM}")), lab(&format!("[vm.b]\n{VM}"))];
    for lab in &labs {
        lab.good(&["up"]);
    }
    let next = next(&labs[0], "next");
    upgrade(&labs[0], &next);
    let again = labs[0].run(&["upgrade", "--program", next.to_str().unwrap()]);
    assert!(
        again.status.success() && said(&again).contains("is run by this program already"),
        "{}",
        said(&again)
    );
    // By itself it is the program that the command is.
    let mut other = Command::new(&next);
    other.args(["upgrade", "--file"]).arg(labs[1].dir.path().join("tombolo.toml"));
    other.env("XDG_RUNTIME_DIR", labs[1].dir.path()).stdin(Stdio::null());
    assert!(other.status().unwrap().success());
    for lab in &labs {
        assert_eq!(program(lab), next);
        lab.good(&["down"]);
        lab.assert_nothing_left();
    }
}

#[test]
fn all_projects_of_a_user_go_on_under_the_program_that_is_asked_to() {
    let labs = [lab(&format!("[vm.a]\n{VM}")), lab(&format!("[vm.b]\n{VM}"))];
    let next = next(&labs[0], "next");
    // Processes of its own, so that projects of other tests are left alone; they end with the shell.
    let script = "\"$0\" up -f \"$1\" && \"$0\" up -f \"$2\" && \"$3\" upgrade --all && for link in /proc/[0-9]*/exe; do readlink \"$link\"; done";
    let mut command = Command::new("unshare");
    command.args(["-rpf", "--mount-proc", "sh", "-c", script, env!("CARGO_BIN_EXE_tombolo")]);
    command.args(labs.each_ref().map(|lab| lab.dir.path().join("tombolo.toml"))).arg(&next);
    command.env("XDG_RUNTIME_DIR", labs[0].dir.path()).env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let programs = String::from_utf8(output.stdout).unwrap();
    let upgraded = programs.lines().filter(|program| Path::new(program) == next).count();
    assert_eq!(upgraded, 2, "{programs}");
}
