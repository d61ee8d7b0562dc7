// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a command inherits from the process that starts it, and where that is: open files, signals, a umask, a service manager's session, a PID namespace,
//! capabilities. A stand-in for QEMU, real switches.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use common::stand_in::{fake, lab, number, said, until};
use common::{Lab, signal};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

/// A command of the lab's, by another program that becomes it.
fn by(lab: &Lab, program: &[&str], arguments: &[&str]) -> Command {
    let own = lab.command(arguments);
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).arg(own.get_program()).args(own.get_args()).current_dir(lab.dir.path());
    command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdin(Stdio::null());
    command
}

/// As [`by`], by a few lines of Python before.
fn by_python(lab: &Lab, lines: &str, arguments: &[&str]) -> Output {
    let lines = format!("import os, signal, sys\n{lines}\nos.execv(sys.argv[1], sys.argv[1:])");
    by(lab, &["python3", "-c", &lines], arguments).output().unwrap()
}

fn state(lab: &Lab) -> String {
    lab.ps()["vms"][0]["state"].as_str().unwrap().to_owned()
}

#[test]
fn no_process_of_a_project_keeps_a_lock_or_another_file_of_the_caller_of_up_open() {
    let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
    let lock = lab.dir.path().join("the caller's lock");
    let up = by(&lab, &["flock", lock.to_str().unwrap()], &["up"]).output().unwrap();
    assert!(up.status.success(), "{}", said(&up));
    for process in lab.processes() {
        for descriptor in std::fs::read_dir(format!("/proc/{process}/fd")).unwrap() {
            let file = std::fs::read_link(descriptor.unwrap().path()).unwrap_or_default();
            assert_ne!(file, lock, "process {process}");
        }
    }
    assert!(Command::new("flock").arg("-n").arg(&lock).arg("true").status().unwrap().success());
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_mount_and_the_server_of_a_zone_keep_no_lock_of_their_caller_open_and_not_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let lock = dir.path().join("the caller's lock");
    let run = |arguments: &[&str]| {
        let mut command = Command::new("flock");
        command.arg(&lock).arg(env!("CARGO_BIN_EXE_tombolo")).args(arguments).current_dir(dir.path());
        let output =
            command.env("TOMBOLO_ZONES_RUN", dir.path().join("run")).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    };
    let is_free = || Command::new("flock").arg("-n").arg(&lock).arg("true").status().unwrap().success();
    for zone in ["mounted.zone", "served.zone"] {
        run(&["zone", "create", zone, "--size", "32M"]);
    }
    run(&["files", "mkfs", "mounted.zone"]);
    std::fs::create_dir(dir.path().join("mnt")).unwrap();
    run(&["files", "mount", "mounted.zone", "mnt"]);
    let by_mount = is_free();
    let folder = dir.path().canonicalize().unwrap();
    let is_there = |process: &std::fs::DirEntry| {
        std::fs::read_link(process.path().join("cwd")).is_ok_and(|at| at == folder)
    };
    let there: Vec<_> = std::fs::read_dir("/proc").unwrap().map(Result::unwrap).filter(is_there).collect();
    assert!(there.is_empty(), "{there:?}");
    assert!(Command::new("umount").arg(dir.path().join("mnt")).status().unwrap().success());
    run(&["zone", "invite", "served.zone", "vm"]);
    let by_server = is_free();
    run(&["zone", "expel", "served.zone", "vm"]);
    assert!(by_mount, "the mount has it");
    assert!(by_server, "the server has it");
}

#[test]
fn a_parent_that_ignores_the_ends_of_its_children_makes_no_end_unknown() {
    let lab = lab(&format!("[vm.a]\n{VM}restart = \"on-failure\"\n"));
    let up = by_python(&lab, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)", &["up"]);
    assert!(up.status.success(), "{}", said(&up));
    signal(number(&lab.ps()["vms"][0]["pid"]), "ALRM");
    until("it does not end", || state(&lab) == "ended: the guest switched itself off");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_supervisor_hears_a_signal_that_its_parent_has_blocked() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let block = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())";
    let up = by_python(&lab, block, &["up"]);
    assert!(up.status.success(), "{}", said(&up));
    let supervisor = number(&lab.ps()["supervisor"]);
    assert_eq!(mask(supervisor, "SigBlk"), 0);
    signal(supervisor, "TERM");
    lab.assert_nothing_left();
}

/// A set of signals of a process (proc_pid_status(5)).
fn mask(process: u32, set: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(":\t")).unwrap();
    u64::from_str_radix(line, 16).unwrap()
}

#[test]
fn an_up_that_stays_in_the_foreground_under_nohup_outlasts_its_terminal() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let mut up = by(&lab, &["nohup"], &["up", "--attach"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut words = BufReader::new(up.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("Ctrl-C takes everything down") {
        line.clear();
        assert!(words.read_line(&mut line).unwrap() > 0);
    }
    assert_eq!(mask(up.id(), "SigIgn") & 1, 1, "it hears SIGHUP");
    signal(up.id(), "HUP");
    assert_eq!(state(&lab), "up");
    lab.good(&["down"]);
    words.read_to_string(&mut line).unwrap();
    assert!(line.contains("was taken down") && up.wait().unwrap().success(), "{line}");
    lab.assert_nothing_left();
}

#[test]
fn no_umask_keeps_a_project_from_its_own_files_or_lets_others_write_to_them() {
    for umask in ["0777", "0000"] {
        let lab = lab(&format!("[vm.a]\n{VM}restart = \"unless-stopped\"\n[vm.b]\n{VM}"));
        let script = format!("umask {umask}; exec \"$0\" \"$@\"");
        for arguments in [&["up"][..], &["down", "a"]] {
            let output = by(&lab, &["sh", "-c", &script], arguments).output().unwrap();
            assert!(output.status.success(), "{umask}: {}", said(&output));
        }
        let mut files = vec![lab.dir.path().join("tombolo")];
        let mut seen = Vec::new();
        while let Some(path) = files.pop() {
            let meta = std::fs::symlink_metadata(&path).unwrap();
            let mode = meta.permissions().mode() & 0o777;
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let own = if meta.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(mode & own, own, "{umask}: {} has {mode:o}", path.display());
            // Others can't enter a project's folder, whatever they may do with what is in it.
            let is_project =
                meta.is_dir() && path.join("lock").exists() && path.join("supervisor.log").exists();
            if is_project {
                assert_eq!(mode, 0o700, "{umask}: {}", path.display());
            } else {
                assert_eq!(mode & 0o022, 0, "{umask}: {} has {mode:o}", path.display());
                files.extend(
                    std::fs::read_dir(&path).into_iter().flatten().map(|entry| entry.unwrap().path()),
                );
            }
            seen.push(name);
        }
        assert!(seen.iter().any(|name| name.ends_with(".stopped")), "{seen:?}");
        lab.good(&["down"]);
        lab.assert_nothing_left();
    }
}

#[test]
fn a_session_that_ends_with_all_its_processes_gives_guests_their_time() {
    let lab = lab(&format!("[vm.a]\n{VM}disk = \"disk\"\n"));
    std::fs::write(lab.dir.path().join("disk"), [0; 512]).unwrap();
    lab.good(&["up"]);
    let mut events = lab.command(&["events"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(events.stdout.take().unwrap());
    let ps = lab.ps();
    // It is heard, as an event follows.
    lab.good(&["restart", "a"]);
    let mut line = String::new();
    while !line.contains(" up") {
        line.clear();
        assert!(told.read_line(&mut line).unwrap() > 0);
    }
    let processes = [number(&lab.ps()["vms"][0]["pid"]), number(&ps["supervisor"])];
    // As systemd ends a session: SIGTERM to each of its processes, and SIGHUP to shells.
    for process in processes {
        for signal in [Signal::TERM, Signal::HUP] {
            let sent = kill_process(Pid::from_raw(process as i32).unwrap(), signal);
            // An earlier signal may have ended the process.
            assert!(matches!(sent, Ok(()) | Err(Errno::SRCH)), "{sent:?}");
        }
    }
    let mut rest = String::new();
    told.read_to_string(&mut rest).unwrap();
    assert!(events.wait().unwrap().success());
    assert!(
        rest.contains("VM a stopping") && rest.contains("ended (the guest switched itself off)"),
        "{rest}"
    );
    lab.assert_nothing_left();
}

#[test]
fn a_supervisor_in_another_pid_namespace_is_named_and_not_taken_for_absent() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    for arguments in [&["ps"][..], &["ps", "-a"], &["up"], &["down"], &["exec", "a", "--", "true"]] {
        let output = by(&lab, &["unshare", "--pid", "--fork", "--mount-proc"], arguments).output().unwrap();
        let words = said(&output);
        assert!(
            !output.status.success() && words.contains("is in another PID namespace"),
            "{arguments:?}: {words}"
        );
    }
    assert_eq!(state(&lab), "up");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// A project of an ordinary user, with a program of that user's own.
struct User {
    lab: Lab,
    id: u32,
}

impl User {
    fn new(id: u32) -> User {
        let lab = lab(&format!("[net.lan]\n[vm.a]\n{VM}networks = {{ lan = {{ address = \"none\" }} }}\n"));
        let place = lab.dir.path();
        for (from, to) in [(Path::new(env!("CARGO_BIN_EXE_tombolo")), "program"), (&fake(), "qemu")] {
            // Another process writes it: a child that is being started elsewhere could hold it open for writing.
            assert!(Command::new("cp").arg(from).arg(place.join(to)).status().unwrap().success());
        }
        let compose = place.join("tombolo.toml");
        let text = std::fs::read_to_string(&compose).unwrap();
        std::fs::write(&compose, text.replace(fake().to_str().unwrap(), "./qemu")).unwrap();
        std::fs::set_permissions(place, PermissionsExt::from_mode(0o755)).unwrap();
        let runtime = place.join("runtime");
        std::fs::create_dir(&runtime).unwrap();
        std::os::unix::fs::chown(&runtime, Some(id), Some(id)).unwrap();
        User { lab, id }
    }

    /// Runs a command of the user's, who has this capability or none.
    fn run(&self, capability: Option<&str>, arguments: &[&str]) -> Output {
        let place = self.lab.dir.path();
        let mut command = Command::new("setpriv");
        command.args(["--clear-groups", &format!("--reuid={0}", self.id), &format!("--regid={0}", self.id)]);
        if let Some(capability) = capability {
            command
                .arg(format!("--inh-caps=-all,+{capability}"))
                .arg(format!("--ambient-caps=-all,+{capability}"));
        }
        command.arg(place.join("program")).args(arguments).current_dir(place).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("XDG_RUNTIME_DIR", place.join("runtime"));
        command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null()).output().unwrap()
    }

    fn good(&self, capability: Option<&str>, arguments: &[&str]) -> String {
        let output = self.run(capability, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn supervisor(&self) -> u32 {
        let ps: serde_json::Value =
            serde_json::from_str(&self.good(None, &["ps", "--json", "--wait", "300"])).unwrap();
        number(&ps["supervisor"])
    }

    fn assert_nothing_left(&self) {
        let own = format!("\nUid:\t{}\t", self.id);
        until("processes are left", || {
            let all =
                std::fs::read_dir("/proc").unwrap().map(|process| process.unwrap().path().join("status"));
            !all.into_iter().any(|status| std::fs::read_to_string(status).unwrap_or_default().contains(&own))
        });
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.run(Some("net_raw"), &["down"]);
    }
}

#[test]
fn a_program_whose_file_has_capabilities_finds_its_supervisor_and_what_that_leaves_when_it_is_killed() {
    let user = User::new(54_341);
    let program = user.lab.dir.path().join("program");
    assert!(Command::new("setcap").arg("cap_net_raw+ep").arg(&program).status().unwrap().success());
    user.good(None, &["up"]);
    assert!(user.good(None, &["ps"]).contains("a   up"), "{}", user.good(None, &["ps"]));
    user.good(None, &["down"]);
    user.assert_nothing_left();
    user.good(None, &["up"]);
    signal(user.supervisor(), "KILL");
    assert!(user.good(None, &["ps"]).contains("a   up"));
    user.good(None, &["down"]);
    user.assert_nothing_left();
}

#[test]
fn a_supervisor_with_capabilities_that_a_command_lacks_is_reached() {
    let user = User::new(54_342);
    user.good(Some("net_raw"), &["up"]);
    assert!(user.good(None, &["ps"]).contains("a   up"));
    user.good(None, &["exec", "a", "--", "true"]);
    user.good(None, &["down"]);
    user.assert_nothing_left();
}
