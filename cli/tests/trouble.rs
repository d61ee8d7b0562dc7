// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Attacks on the supervisor: hostile guests, odd names, other users, stopped processes, many commands at once. A stand-in for QEMU, real switches.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use common::stand_in::{RESIDENT_MAX, fake, lab, most_resident, number, said, until};
use common::{copy_program, signal};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nhotplug_ports = 2\nready = \"running\"\n";

#[test]
fn guests_that_flood_console_and_agent_take_no_memory_of_the_supervisor() {
    let words = "qemu_args = [\"-fake\", \"flood\"]\n";
    let lab = lab(&format!("[vm.a]\n{VM}{words}[vm.b]\n{VM}{words}"));
    lab.good(&["up"]);
    let supervisor = number(&lab.ps()["supervisor"]);
    until("the flood does not end", || {
        ["a", "b"].iter().all(|vm| lab.good(&["logs", "-n", "1", vm]).contains("the flood is over"))
    });
    for vm in ["a", "b"] {
        let refused = lab.run(&["exec", vm, "--", "true"]);
        assert_eq!(refused.status.code(), Some(125), "{}", said(&refused));
    }
    let most = most_resident(supervisor);
    assert!(most < RESIDENT_MAX, "{most} KiB");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn the_supervisor_of_sixty_four_vms_takes_no_more_memory_than_that_of_a_few_may() {
    let vms: String = (0..64).map(|n| format!("[vm.v{n}]\n{VM}")).collect();
    let lab = lab(&vms);
    lab.good(&["up"]);
    let ps = lab.ps();
    let vms = ps["vms"].as_array().unwrap();
    assert!(vms.len() == 64 && vms.iter().all(|vm| vm["state"] == "up"), "{ps}");
    let most = most_resident(number(&ps["supervisor"]));
    assert!(most < RESIDENT_MAX, "{most} KiB");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn two_hundred_commands_at_once_are_all_answered() {
    let lab = lab(&format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let commands = [
        &["ps", "--json"][..],
        &["zone", "path", "z"],
        &["logs", "a"],
        &["ps"],
        &["up", "--dry-run"],
        &["net", "ls"],
        &["logs"],
        &["up"],
    ];
    let quiet = |arguments: &[&str]| {
        lab.command(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let running: Vec<(usize, Child)> = (0..200).map(|n| (n, quiet(commands[n % commands.len()]))).collect();
    for (n, child) in running {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{:?}: {}", commands[n % commands.len()], said(&output));
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn ups_and_downs_at_once_end_in_one_state_that_ps_knows() {
    for round in 0..6 {
        let lab = lab(&format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\n[vm.b]\n{VM}"));
        if round % 2 == 0 {
            lab.good(&["up"]);
        }
        let begin = |arguments: &[&str]| {
            lab.command(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let commands = [
            &["up"][..],
            &["down"],
            &["restart", "a"],
            &["down", "b"],
            &["up", "--remove-orphans"],
            &["down"],
        ];
        let running: Vec<Child> = commands.iter().map(|c| begin(c)).collect();
        for child in running {
            // Each may have been cut off by a 'down'; none hangs.
            child.wait_with_output().unwrap();
        }
        until("ps and the host differ", || {
            let ps = lab.ps();
            let vms = ps["vms"].as_array().unwrap().iter();
            let running = vms.clone().filter(|vm| !vm["pid"].is_null());
            let mut known: Vec<u32> = running.clone().map(|vm| number(&vm["pid"])).collect();
            known.extend(Some(&ps["supervisor"]).filter(|pid| !pid.is_null()).map(number));
            let zones = ps["zones"]
                .as_array()
                .unwrap()
                .iter()
                .map(|zone| format!("zone-{}", zone["name"].as_str().unwrap()));
            let beside: BTreeSet<String> =
                vms.map(|vm| format!("vm-{}", vm["name"].as_str().unwrap())).chain(zones).collect();
            let (mut there, shims) = (lab.processes(), lab.shims());
            there.retain(|pid| !shims.values().any(|shim| shim == pid));
            known.sort_unstable();
            there.sort_unstable();
            known == there && shims.into_keys().collect::<BTreeSet<_>>() == beside
        });
        lab.good(&["up"]);
        lab.good(&["down"]);
        lab.assert_nothing_left();
    }
}

#[test]
fn a_switch_that_is_stopped_holds_up_neither_ps_nor_down() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    lab.good(&["up"]);
    let switch = number(&lab.ps()["networks"][0]["pid"]);
    signal(switch, "STOP");
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["up"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_qemu_that_is_stopped_is_restarted_like_any_other() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let qemu = number(&lab.ps()["vms"][0]["pid"]);
    signal(qemu, "STOP");
    lab.good(&["restart", "a"]);
    assert_ne!(number(&lab.ps()["vms"][0]["pid"]), qemu);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// A project in a folder of this name below a new one. Its runtime folder is another; everything is taken down at the end.
struct Named {
    place: PathBuf,
    runtime: tempfile::TempDir,
    _dir: tempfile::TempDir,
}

impl Named {
    fn run(&self, arguments: &[&str]) -> Output {
        run_in(&self.place, self.runtime.path(), arguments)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

fn named(folder: &OsStr) -> Named {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join(folder);
    std::fs::create_dir_all(&place).unwrap();
    let text = format!(
        "qemu = \"{}\"\n[zone.z]\nsize = \"16M\"\nfiles = true\nbacking = \"./the zone,x.zone\"\n[net.lan]\n[vm.a]\n{VM}\
         zones = {{ z = {{}} }}\nnetworks = {{ lan = {{ address = \"none\" }} }}\n",
        fake().display()
    );
    std::fs::write(place.join("tombolo.toml"), text).unwrap();
    std::fs::write(place.join("kernel"), "").unwrap();
    Named { place, runtime: tempfile::tempdir().unwrap(), _dir: dir }
}

fn run_in(place: &Path, runtime: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    command
        .args(arguments)
        .current_dir(place)
        .env("XDG_RUNTIME_DIR", runtime)
        .env("TOMBOLO_HYPERVISOR", "tcg");
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_project_may_lie_in_a_folder_of_any_name_that_is_text() {
    let long = "l".repeat(250);
    for folder in [
        "with space",
        "ünïcödé-目录",
        "quote'\"$(x)`;&|",
        "comma,=%s%n",
        "new\nline",
        "-dash",
        " (deleted)",
        &long,
    ] {
        let project = named(OsStr::new(folder));
        for arguments in [
            &["up"][..],
            &["up"],
            &["logs", "a"],
            &["files", "df", "z"],
            &["zone", "detach", "z", "a"],
            &["zone", "attach", "z", "a"],
            &["ps"],
            &["down"],
        ] {
            let output = project.run(arguments);
            assert!(output.status.success(), "{folder:?} {arguments:?}: {}", said(&output));
        }
    }
}

#[test]
fn a_folder_whose_name_is_no_text_is_refused_in_plain_words() {
    let refused = named(OsStr::from_bytes(b"latin-\xe9")).run(&["up"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("is not UTF-8; rename"), "{}", said(&refused));
    let project = named(OsStr::new("plain"));
    let odd = project.runtime.path().join(OsStr::from_bytes(b"run-\xe9"));
    std::fs::create_dir(&odd).unwrap();
    let refused = run_in(&project.place, &odd, &["up"]);
    assert!(said(&refused).contains("is not UTF-8; set XDG_RUNTIME_DIR"), "{}", said(&refused));
}

#[test]
fn a_runtime_folder_that_can_not_be_used_is_named_with_the_remedy() {
    let project = named(OsStr::new("p"));
    let refused = run_in(&project.place, Path::new("/nonexistent/runtime"), &["up"]);
    assert!(
        said(&refused).contains("/nonexistent/runtime/tombolo can't be made; set XDG_RUNTIME_DIR"),
        "{}",
        said(&refused)
    );
    let long = tempfile::tempdir().unwrap();
    let deep = long.path().join("d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    let refused = run_in(&project.place, &deep, &["up"]);
    assert!(said(&refused).contains("107 are possible; shorten the names"), "{}", said(&refused));
    assert!(run_in(&project.place, &deep, &["down"]).status.success());
}

#[test]
fn a_runtime_folder_may_be_named_relative_to_where_the_command_is_called() {
    let project = named(OsStr::new("p"));
    std::fs::create_dir(project.place.join("run")).unwrap();
    for arguments in [&["up"][..], &["logs", "a"], &["ps"], &["down"]] {
        let output = run_in(&project.place, Path::new("run"), arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        if arguments == ["up"] {
            assert_eq!(std::fs::read_dir(project.place.join("run/tombolo")).unwrap().count(), 1);
        }
    }
}

#[test]
fn a_runtime_folder_without_room_is_named_and_nothing_runs() {
    let project = named(OsStr::new("p"));
    // A file system of its own for the command and what it starts, with room for few files: those of the supervisor, of zones and of networks do not fit.
    let script = "mount -t tmpfs -o size=1m,nr_inodes=\"$2\" none \"$1\" && \"$0\" up; code=$?; \"$0\" down; exit $code";
    let up = |files: u32| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_tombolo")]);
        command.arg(project.runtime.path()).arg(files.to_string());
        command.env("XDG_RUNTIME_DIR", project.runtime.path()).current_dir(&project.place);
        command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null()).output().unwrap()
    };
    let refused = (2..).map(up).take_while(|output| !output.status.success());
    let words: Vec<String> = refused.map(|output| said(&output)).collect();
    let folder = project.runtime.path().to_str().unwrap();
    let names = |words: &String| {
        words.lines().any(|line| line.contains(folder) && line.contains("No space left on device"))
    };
    assert!(words.len() > 5 && words.iter().all(names), "{words:#?}");
    assert!(
        String::from_utf8(project.run(&["ps", "--json"]).stdout).unwrap().contains("\"supervisor\": null")
    );
}

#[test]
fn a_runtime_folder_that_has_become_read_only_holds_up_no_down() {
    let project = named(OsStr::new("p"));
    let tombolo = env!("CARGO_BIN_EXE_tombolo");
    // Before anything was up, with a project that runs, and with VMs that have lost their supervisor: where there can be no other one, that is told.
    let script = "set -e; freeze() { mount --bind \"$1\" \"$1\"; mount -o remount,bind,ro \"$1\"; }
        freeze \"$1\"; \"$0\" down; \"$0\" clean --dry-run; umount \"$1\"
        \"$0\" up; freeze \"$1\"; \"$0\" ps; \"$0\" down; \"$0\" down; umount \"$1\"
        \"$0\" up; supervisor=$(\"$0\" ps --json | sed -n 's/.*\"supervisor\": \\([0-9]*\\).*/\\1/p'); kill -9 \"$supervisor\"
        tail -f /dev/null --pid \"$supervisor\"; freeze \"$1\"; ! \"$0\" down";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, tombolo]).arg(project.runtime.path());
    command.env("XDG_RUNTIME_DIR", project.runtime.path()).current_dir(&project.place);
    let output = command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null()).output().unwrap();
    let words = said(&output);
    assert!(output.status.success() && words.contains("Read-only file system"), "{words}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("a   up "), "{words}");
    assert!(project.run(&["down"]).status.success());
    assert_eq!(std::fs::read_dir(project.runtime.path().join("tombolo")).unwrap().count(), 0);
}

#[test]
fn a_command_that_waits_for_another_says_so_and_can_be_interrupted() {
    let lab = lab(&format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let qemu = number(&lab.ps()["vms"][0]["pid"]);
    signal(qemu, "STOP");
    let mut attach = lab.command(&["zone", "attach", "z", "a"]).stderr(Stdio::null()).spawn().unwrap();
    until("the attach begins", || lab.ps()["zones"][0]["members"] != serde_json::json!([]));
    let mut up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(up.stderr.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.contains("another command is starting or stopping VMs; this one waits"), "{line}");
    signal(up.id(), "INT");
    assert_eq!(up.wait().unwrap().code(), Some(130));
    signal(qemu, "CONT");
    assert!(attach.wait().unwrap().success());
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_file_that_breaks_between_its_check_and_the_supervisors_start_is_no_matter() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let file = lab.dir.path().join("tombolo.toml");
    let good = std::fs::read_to_string(&file).unwrap();
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flipping = scope.spawn(move || {
            while !over.load(Ordering::Acquire) {
                for text in ["[broken", good.as_str()] {
                    std::fs::write(file.with_extension("new"), text).unwrap();
                    std::fs::rename(file.with_extension("new"), &file).unwrap();
                }
            }
        });
        for _ in 0..10 {
            let up = lab.run(&["up"]);
            // Either the file was broken when it was read, or all is well.
            assert!(up.status.success() || said(&up).contains("tombolo.toml:1: "), "{}", said(&up));
            let down = lab.run(&["down"]);
            assert!(down.status.success() || said(&down).contains("tombolo.toml:1: "), "{}", said(&down));
        }
        over.store(true, Ordering::Release);
        flipping.join().unwrap();
    });
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_ordinary_user_without_home_and_runtime_folder_needs_no_privilege_and_others_see_nothing() {
    const USER: u32 = 54_321;
    let lab = lab(&format!(
        "[net.lan]\n[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\nnetworks = {{ lan = {{ address = \"none\" }} }}\n"
    ));
    let place = lab.dir.path();
    // All of it where that user can reach it.
    let program = place.join("tombolo-program");
    copy_program(env!("CARGO_BIN_EXE_tombolo"), &program);
    let qemu = place.join("qemu");
    copy_program(fake(), &qemu);
    let text = std::fs::read_to_string(place.join("tombolo.toml")).unwrap();
    std::fs::write(
        place.join("tombolo.toml"),
        text.replace(fake().to_str().unwrap(), qemu.to_str().unwrap()),
    )
    .unwrap();
    std::fs::set_permissions(place, std::fs::Permissions::from_mode(0o755)).unwrap();
    let scratch = place.join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    std::os::unix::fs::chown(&scratch, Some(USER), Some(USER)).unwrap();
    let as_user = |user: u32, arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([
            format!("--reuid={user}"),
            format!("--regid={user}"),
            "--clear-groups".into(),
            "--no-new-privs".into(),
        ]);
        command.arg(&program).args(arguments).current_dir(place).env_clear();
        command
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", "/nonexistent")
            .env("TMPDIR", &scratch)
            .env("TOMBOLO_HYPERVISOR", "tcg");
        command.stdin(Stdio::null()).output().unwrap()
    };
    for arguments in [
        &["up"][..],
        &["up", "--dry-run"],
        &["logs", "a"],
        &["zone", "detach", "z", "a"],
        &["clean", "--dry-run"],
    ] {
        let output = as_user(USER, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    }
    let ps = String::from_utf8(as_user(USER, &["ps", "--json"]).stdout).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&ps).unwrap()["vms"][0]["state"], "up");
    // Another user's 'ps' finds no project and can't read its folder.
    let other = as_user(USER + 1, &["ps", "-a", "--json"]);
    assert!(!String::from_utf8_lossy(&other.stdout).contains("\"supervisor\""), "{}", said(&other));
    for _already_down in 0..2 {
        let output = as_user(USER, &["down"]);
        assert!(output.status.success(), "{}", said(&output));
    }
    let left = || {
        std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).any(|entry| {
            std::os::unix::fs::MetadataExt::uid(&match entry.metadata() {
                Ok(metadata) => metadata,
                Err(_) => return false,
            }) == USER
        })
    };
    until("processes of the user are left", || !left());
}

#[test]
fn commands_without_standard_streams_do_their_work() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let closed = |arguments: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec \"$0\" {arguments} <&- >&- 2>&-"), env!("CARGO_BIN_EXE_tombolo")]);
        command
            .current_dir(lab.dir.path())
            .env("XDG_RUNTIME_DIR", lab.dir.path())
            .env("TOMBOLO_HYPERVISOR", "tcg");
        assert!(command.status().unwrap().success(), "{arguments}");
    };
    closed("up");
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    closed("logs a");
    closed("down");
    lab.assert_nothing_left();
}

#[test]
fn commands_whose_words_find_no_room_do_their_work() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let unheard = |arguments: &[&str]| {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let (reader, closed) = rustix::pipe::pipe().unwrap();
        drop(reader);
        [Stdio::from(full), Stdio::from(closed)].into_iter().for_each(|unheard| {
            let status = lab.command(arguments).stdout(Stdio::null()).stderr(unheard).status().unwrap();
            assert!(status.success(), "{arguments:?}: {status}");
        });
    };
    unheard(&["up"]);
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    unheard(&["restart", "a"]);
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    unheard(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn events_go_on_with_the_next_supervisor_until_the_project_is_down() {
    for kills in [true, false] {
        let lab = lab(&format!("[vm.a]\n{VM}"));
        lab.good(&["up"]);
        let mut events = lab.command(&["events", "--since", "1h"]);
        let mut events = events.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut told = BufReader::new(events.stdout.take().unwrap());
        told.read_line(&mut String::new()).unwrap();
        if kills {
            signal(number(&lab.ps()["supervisor"]), "KILL");
            lab.good(&["restart", "a"]);
            let is_of_next = |line: std::io::Result<String>| line.unwrap().contains("booting");
            assert!(told.by_ref().lines().any(is_of_next), "nothing of the next supervisor");
        }
        lab.good(&["down"]);
        let ended = events.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", said(&ended));
    }
}

#[test]
fn an_input_that_cannot_be_read_is_an_error_of_exec_and_not_its_end() {
    let lab = lab(&format!("[vm.a]\n{VM}qemu_args = [\"-fake\", \"busy=BUSY\"]\n"));
    // The command runs while this file is there.
    let (busy, compose) = (lab.dir.path().join("busy"), lab.dir.path().join("tombolo.toml"));
    std::fs::write(&busy, "").unwrap();
    let text = std::fs::read_to_string(&compose).unwrap();
    std::fs::write(&compose, text.replace("BUSY", busy.to_str().unwrap())).unwrap();
    lab.good(&["up"]);
    let folder = std::fs::File::open(lab.dir.path()).unwrap();
    let exec = lab.command(&["exec", "-i", "a", "--", "cat"]).stdin(folder).output().unwrap();
    let words = said(&exec);
    assert!(
        exec.status.code() == Some(125) && words.contains("the input can't be read: Is a directory"),
        "{exec:?}"
    );
    std::fs::remove_file(&busy).unwrap();
    lab.good(&["exec", "-i", "a", "--", "cat"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
