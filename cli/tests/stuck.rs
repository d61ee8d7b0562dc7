// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children that do not become their programs, limits that would end the supervisor, and QEMUs that end before they answer. A stand-in for QEMU.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use common::stand_in::{fake, lab, said, until};
use common::{Lab, write_program};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

/// A VM with a limit and one without. The first one's cgroup takes no process: its QEMU does not begin, as in one that is frozen.
struct Frozen {
    lab: Lab,
    _full: File,
}

impl Frozen {
    fn new() -> Frozen {
        let lab = lab(&format!("[vm.a]\n{VM}cpu_limit = 1.5\n[vm.b]\n{VM}"));
        let parent = lab.dir.path().join("groups");
        std::fs::create_dir(&parent).unwrap();
        for (file, text) in [("cgroup.subtree_control", "cpu memory\n"), ("cgroup.procs", "")] {
            std::fs::write(parent.join(file), text).unwrap();
        }
        // It makes the VM's folder, in which it finds no cgroup.
        let refused = up(&lab, &["a"]).wait_with_output().unwrap();
        assert!(!refused.status.success(), "{}", said(&refused));
        let group: Vec<PathBuf> = std::fs::read_dir(&parent)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        let procs = group[0].join("cgroup.procs");
        assert!(Command::new("mkfifo").arg(&procs).status().unwrap().success());
        let options = &mut OpenOptions::new();
        let mut full = options.read(true).write(true).custom_flags(nonblock()).open(procs).unwrap();
        loop {
            match full.write(&[0; 4096]) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                other => drop(other.unwrap()),
            }
        }
        Frozen { lab, _full: full }
    }
}

fn nonblock() -> i32 {
    i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap()
}

fn up(lab: &Lab, arguments: &[&str]) -> Child {
    let mut up = lab.command(&[&["up"], arguments].concat());
    up.env("TOMBOLO_CGROUP", lab.dir.path().join("groups")).stderr(Stdio::piped()).spawn().unwrap()
}

/// The children of a process that have not become their programs.
fn unbegun(shim: u32) -> usize {
    let line = |pid: &str| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let children = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children"));
    let own = line(&shim.to_string());
    children.unwrap_or_default().split_whitespace().filter(|pid| line(pid) == own).count()
}

fn await_stuck(lab: &Lab) {
    until("no child is stuck", || lab.processes().into_iter().any(|pid| unbegun(pid) == 1));
}

#[test]
fn a_child_that_does_not_begin_is_given_up_with_the_reason() {
    let frozen = Frozen::new();
    let up = up(&frozen.lab, &[]);
    await_stuck(&frozen.lab);
    let output = up.wait_with_output().unwrap();
    let words = said(&output);
    assert!(!output.status.success() && words.contains("has not answered within 20 s; "), "{words}");
    assert!(frozen.lab.ps()["supervisor"].is_null());
    frozen.lab.assert_nothing_left();
}

#[test]
fn a_down_while_a_child_does_not_begin_leaves_nothing() {
    let frozen = Frozen::new();
    let up = up(&frozen.lab, &[]);
    await_stuck(&frozen.lab);
    let down = frozen.lab.run(&["down"]);
    assert!(down.status.success(), "{}", said(&down));
    assert!(!up.wait_with_output().unwrap().status.success());
    frozen.lab.assert_nothing_left();
}

/// Runs a command whose files, and those of what it starts, may have so many bytes.
fn run_limited(lab: &Lab, size: u64, arguments: &[&str]) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={size}")).arg(env!("CARGO_BIN_EXE_tombolo")).args(arguments);
    command.current_dir(lab.dir.path()).env("XDG_RUNTIME_DIR", lab.dir.path());
    command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_limit_on_the_size_of_files_cuts_a_log_and_ends_no_vm() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}qemu_args = [\"-fake\", \"flood\"]\n"));
    let up = run_limited(&lab, 1 << 20, &["up"]);
    assert!(up.status.success(), "{}", said(&up));
    until("the flood does not end", || lab.ps()["vms"][1]["state"] == "up");
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["exec", "a", "--", "true"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_zone_that_is_larger_than_files_may_be_is_refused_by_name() {
    let lab = lab(&format!("[zone.z]\nsize = \"8M\"\n[vm.a]\n{VM}zones = {{ z = {{}} }}\n"));
    let up = run_limited(&lab, 1 << 20, &["up"]);
    let words = said(&up);
    assert!(!up.status.success() && words.contains("ulimit -f"), "{words}");
    lab.assert_nothing_left();
}

/// A stand-in that does this where there is the file 'sick', and else what the stand-in does.
fn sick(lab: &Lab, what: &str) {
    qemu(lab, &format!("[ \"$1\" != --version ] && {what}"));
}

/// A stand-in that begins with this line of shell where there is the file 'sick'.
fn qemu(lab: &Lab, line: &str) {
    let place = lab.dir.path();
    let text = format!(
        "#!/bin/sh\n[ -e '{}' ] && {line}\nexec '{}' \"$@\"\n",
        place.join("sick").display(),
        fake().display()
    );
    write_program(&place.join("qemu"), &text);
    let compose = place.join("tombolo.toml");
    let text = std::fs::read_to_string(&compose).unwrap();
    std::fs::write(&compose, text.replace(fake().to_str().unwrap(), "./qemu")).unwrap();
}

fn set_sick(place: &Path) {
    std::fs::write(place.join("sick"), "").unwrap();
}

#[test]
fn a_qemu_that_ends_before_its_monitor_answers_says_how() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    sick(&lab, "kill -KILL $$");
    set_sick(lab.dir.path());
    let up = lab.run(&["up"]);
    let words = said(&up);
    assert!(words.contains("it ended before its monitor answered (QEMU was killed by signal 9)"), "{words}");
    lab.assert_nothing_left();
}

#[test]
fn a_down_of_a_vm_cuts_short_the_start_that_no_command_asked_for() {
    for how in ["KILL", "USR1"] {
        let lab = lab(&format!("[vm.a]\n{VM}restart = \"always\"\n[vm.b]\n{VM}"));
        sick(&lab, &format!("exec '{}' \"$@\" -fake mute", fake().display()));
        lab.good(&["up"]);
        let vm = || lab.ps()["vms"][0].clone();
        let first = common::stand_in::number(&vm()["pid"]);
        set_sick(lab.dir.path());
        common::signal(first, how);
        until("it does not start again", || {
            let vm = vm();
            vm["state"] == "booting" && vm["pid"] != first && !vm["pid"].is_null()
        });
        lab.good(&["down", "a"]);
        let ps = lab.ps();
        assert!(ps["vms"].as_array().unwrap().iter().all(|vm| vm["name"] == "b"), "{how}: {ps}");
        lab.good(&["down"]);
        lab.assert_nothing_left();
    }
}

#[test]
fn a_list_of_stopped_vms_that_another_process_keeps_locked_holds_up_no_command_for_long() {
    let lab = lab(&format!("[vm.a]\n{VM}restart = \"unless-stopped\"\n[vm.b]\n{VM}"));
    lab.good(&["up"]);
    let list = lab.dir.path().join("tombolo");
    let locked = || {
        let both = [File::open(&list), File::options().create(true).append(true).open(list.join("lock"))];
        let both = both.map(Result::unwrap);
        for file in &both {
            rustix::fs::flock(file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        }
        both
    };
    let held = locked();
    let down = lab.run(&["down", "a"]);
    let words = said(&down);
    assert!(!down.status.success() && words.contains("fuser -v"), "{words}");
    assert_eq!(lab.ps()["vms"].as_array().unwrap().len(), 1, "it is stopped");
    drop(held);
    lab.good(&["up"]);
    lab.good(&["down", "a"]);
    let _held = locked();
    let up = lab.run(&["up"]);
    let words = said(&up);
    assert!(!up.status.success() && words.contains("the VMs are up, and that is not noted"), "{words}");
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_compose_file_that_is_too_long_for_the_supervisor_is_refused_before_anything_begins() {
    let line = "a: b\n".repeat(4 << 20);
    let lab = lab(&format!("[vm.a]\n{VM}cloud_init = {{ user_data = \"\"\"#cloud-config\n{line}\"\"\" }}\n"));
    let up = lab.run(&["up"]);
    let words = said(&up);
    assert!(!up.status.success() && words.contains("16M are possible"), "{words}");
    lab.assert_nothing_left();
}

#[test]
fn an_output_that_takes_nothing_is_named_as_the_cause() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    for arguments in [&["up", "--json"][..], &["config"]] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output =
            lab.command(arguments).stdout(full).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
        let words = said(&output.unwrap());
        assert!(words.contains("the output can't be written"), "{arguments:?}: {words}");
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_command_that_is_stuck_does_not_keep_the_supervisor_after_a_down() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    // It is asked for its version by the dry run, and answers when that has been given up.
    qemu(&lab, "[ \"$1\" = --version ] && exec sleep 18");
    lab.good(&["up"]);
    set_sick(lab.dir.path());
    let mut stuck =
        lab.command(&["up", "--dry-run", "--remove-orphans"]).stderr(Stdio::piped()).spawn().unwrap();
    let asks =
        |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"sleep\x0018\0");
    until("it does not ask for the version", || lab.processes().iter().any(asks));
    let down = lab.run(&["down"]);
    let words = said(&down);
    assert!(down.status.success() && words.contains("though this does not: up --dry-run"), "{words}");
    assert!(lab.ps()["supervisor"].is_null());
    assert!(!stuck.wait().unwrap().success());
    until("the question for the version does not end", || lab.processes().is_empty());
}

#[test]
fn programs_that_leave_a_process_with_their_output_hold_up_no_command() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let over = lab.dir.path().join("over");
    let wait = format!("sh -c 'until [ -e \"{}\" ]; do sleep 0.1; done' &", over.display());
    qemu(&lab, &format!("[ \"$1\" = --version ] && {{ {wait} exit; }}"));
    lab.good(&["up"]);
    set_sick(lab.dir.path());
    let refused = lab.run(&["restart", "a"]);
    assert!(said(&refused).contains("which is no QEMU"), "{}", said(&refused));
    let next = lab.dir.path().join("next");
    write_program(&next, &format!("#!/bin/sh\n{wait}\necho its own words >&2\nexit 1\n"));
    let refused = lab.run(&["upgrade", "--program", next.to_str().unwrap()]);
    assert!(said(&refused).contains("its own words"), "{}", said(&refused));
    assert_eq!(lab.ps()["vms"][0]["state"], "up");
    lab.good(&["down"]);
    std::fs::write(over, "").unwrap();
    lab.assert_nothing_left();
}

#[test]
fn the_last_words_of_a_qemu_that_ends_before_its_monitor_answers_are_told() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    // As much as its log's socket takes, which is read after its end.
    let words = "head -c 150000 /dev/zero | tr '\\0' x; echo; echo its last words";
    sick(&lab, &format!("{{ {words}; exit 1; }}"));
    set_sick(lab.dir.path());
    // On one CPU the supervisor often sees its end before it has read that.
    let own = sched_getaffinity(None).unwrap();
    let mut first = CpuSet::new();
    first.set((0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).unwrap());
    sched_setaffinity(None, &first).unwrap();
    for _ in 0..10 {
        let refused = said(&lab.run(&["up"]));
        assert!(refused.contains("its last words"), "{}", &refused[refused.len().saturating_sub(500)..]);
    }
    lab.run(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_terminal_too_many_is_refused_with_the_remedy() {
    let lab = lab(&format!("[vm.a]\n{VM}qemu_args = [\"-fake\", \"no-port\"]\n"));
    lab.good(&["up"]);
    let exec = lab.run(&["exec", "-t", "a", "--", "true"]);
    let words = said(&exec);
    assert!(exec.status.code() == Some(125) && words.contains("run the command without -t"), "{words}");
    lab.good(&["exec", "a", "--", "true"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_script_that_does_not_become_its_qemu_is_refused_with_the_remedy_and_leaves_nothing() {
    for words in ["", " -fake mute"] {
        let lab = lab(&format!("[vm.a]\n{VM}"));
        let beside = "sleep 100000 & ";
        sick(&lab, &format!("{{ {beside}'{}' \"$@\"{words}; exit; }}", fake().display()));
        set_sick(lab.dir.path());
        let up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
        if !words.is_empty() {
            // One that says nothing is given up by its user.
            let runs = || {
                lab.processes().iter().any(|pid| {
                    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"mute\0"))
                })
            };
            until("it does not begin", runs);
            lab.good(&["down"]);
        }
        let refused = up.wait_with_output().unwrap();
        let told = said(&refused);
        assert!(!refused.status.success(), "{told}");
        assert!(!words.is_empty() || told.contains("write exec before QEMU's name in that script"), "{told}");
        lab.assert_nothing_left();
    }
}

#[test]
fn what_a_script_starts_beside_a_qemu_and_a_qemu_of_another_user_end_with_a_shim_that_is_killed() {
    let lab = lab(&format!("[vm.a]\n{VM}[vm.b]\n{VM}qemu_args = [\"-fake\", \"demoted\"]\n"));
    qemu(&lab, "[ \"$1\" != --version ] && { sleep 100000 & }");
    set_sick(lab.dir.path());
    lab.good(&["up"]);
    let ps = lab.ps();
    assert!(ps["vms"].as_array().unwrap().iter().all(|vm| vm["state"] == "up"), "{ps}");
    assert_eq!(lab.processes().len(), 7, "the supervisor, two shims and QEMUs, and one beside each");
    lab.kill_with_shims(&["vm-a", "vm-b"]);
    lab.assert_no_process_left();
    lab.run(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_process_beside_a_qemu_that_keeps_its_sockets_keeps_no_guest_from_a_reboot() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    let over = lab.dir.path().join("over");
    // As one that a script has started as a daemon: it is in no process group of QEMU's.
    let beside = format!("setsid sh -c 'until [ -e \"{}\" ]; do sleep 0.1; done' &", over.display());
    qemu(&lab, &format!("[ \"$1\" != --version ] && {{ {beside} }}"));
    set_sick(lab.dir.path());
    lab.good(&["up"]);
    for reboots in 1..=2 {
        let vm = || lab.ps()["vms"][0].clone();
        common::signal(common::stand_in::number(&vm()["pid"]), "USR1");
        until("it does not reboot", || vm()["reboots"] == reboots && vm()["state"] == "up");
    }
    lab.good(&["down"]);
    std::fs::write(over, "").unwrap();
    lab.assert_nothing_left();
}
