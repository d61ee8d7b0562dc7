// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that are killed: what they had begun ends, and a terminal is what it was. A stand-in for QEMU.

use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use common::stand_in::{lab, number, until};
use common::{TIMEOUT, signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";

/// The names of a process's threads.
fn threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok()).collect()
}

#[test]
fn a_command_that_does_not_read_its_input_ends_with_its_client() {
    let lab = lab(&format!("[vm.a]\n{VM}qemu_args = [\"-fake\", \"busy=busy\"]\n"));
    let busy = lab.dir.path().join("busy");
    std::fs::write(&busy, "").unwrap();
    let compose = lab.dir.path().join("tombolo.toml");
    let text = std::fs::read_to_string(&compose).unwrap();
    std::fs::write(&compose, text.replace("busy=busy", &format!("busy={}", busy.display()))).unwrap();
    lab.good(&["up"]);
    let supervisor = number(&lab.ps()["supervisor"]);
    let input = lab.dir.path().join("input");
    std::fs::File::create(&input).unwrap().set_len(64 << 20).unwrap();
    let file = std::fs::File::open(&input).unwrap();
    let mut exec = lab.command(&["exec", "-i", "a", "--", "sleep", "1000"]).stdin(file).spawn().unwrap();
    // More than the command's port, the supervisor and the connection between them hold: each has a few chunks of 256 KiB.
    let sent = || {
        let position = std::fs::read_to_string(format!("/proc/{}/fdinfo/0", exec.id())).unwrap();
        position.lines().next().unwrap().trim_start_matches("pos:").trim().parse::<u64>().unwrap()
    };
    until("the input is not taken", || sent() >= 7 * (256 << 10));
    assert!(threads(supervisor).contains(&"exec-input\n".to_owned()));
    exec.kill().unwrap();
    exec.wait().unwrap();
    until("the command runs on", || !threads(supervisor).contains(&"exec-input\n".to_owned()));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_console_that_is_ended_by_a_signal_leaves_the_terminal_as_it_was() {
    let lab = lab(&format!("[vm.a]\n{VM}"));
    lab.good(&["up"]);
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).and_then(|()| unlockpt(&ours)).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let terminal =
        || -> OwnedFd { std::fs::File::options().read(true).write(true).open(&name).unwrap().into() };
    let held = terminal();
    let is_raw = || !tcgetattr(&held).unwrap().local_modes.contains(LocalModes::ICANON);
    for ending in ["TERM", "HUP"] {
        let before = tcgetattr(&held).unwrap();
        let tombolo = lab.command(&["console", "a"]);
        // Under nohup(1) this process ignores SIGHUP, and so would the console.
        let mut console = Command::new("env");
        console.arg(format!("--default-signal={ending}")).arg(tombolo.get_program()).args(tombolo.get_args());
        console.envs(tombolo.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut console = console
            .current_dir(lab.dir.path())
            .stdin(Stdio::from(terminal()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        until("the terminal does not become raw", is_raw);
        signal(console.id(), ending);
        assert_eq!(console.wait().unwrap().code(), Some(130), "SIG{ending}, within {TIMEOUT:?}");
        assert_eq!(tcgetattr(&held).unwrap().local_modes, before.local_modes, "SIG{ending}");
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
