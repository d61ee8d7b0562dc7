// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A user who may have few processes and threads: what can't be begun is said, with the remedy, and what runs can be ended.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::stand_in::{fake, lab, number, said, until};
use common::{Lab, copy_program};
use serde_json::Value;

mod common;

const VM: &str = "kernel = \"kernel\"\nmemory = \"128M\"\nready = \"running\"\n";
/// For a command that has a limit of its own of 30 s.
const LONGEST: &str = "60";

/// A project whose user owns no other process.
struct User {
    lab: Lab,
    id: u32,
}

impl User {
    fn new(id: u32, vms: u32) -> User {
        let vms: String = (0..vms).map(|n| format!("[vm.v{n}]\n{VM}")).collect();
        let lab = lab(&vms);
        let place = lab.dir.path();
        copy_program(env!("CARGO_BIN_EXE_tombolo"), &place.join("program"));
        copy_program(fake(), &place.join("qemu"));
        let compose = place.join("tombolo.toml");
        let text = std::fs::read_to_string(&compose).unwrap();
        std::fs::write(
            &compose,
            text.replace(fake().to_str().unwrap(), place.join("qemu").to_str().unwrap()),
        )
        .unwrap();
        std::fs::set_permissions(place, std::fs::Permissions::from_mode(0o755)).unwrap();
        let scratch = place.join("scratch");
        std::fs::create_dir(&scratch).unwrap();
        std::os::unix::fs::chown(&scratch, Some(id), Some(id)).unwrap();
        User { lab, id }
    }

    /// Runs a program as the user, who may have so many processes and threads.
    fn run_program(&self, most: Option<usize>, program: &Path, arguments: &[&str]) -> Output {
        self.command(most, program, arguments).output().unwrap()
    }

    fn command(&self, most: Option<usize>, program: &Path, arguments: &[&str]) -> Command {
        let place = self.lab.dir.path();
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", LONGEST]);
        if let Some(most) = most {
            command.args(["prlimit", &format!("--nproc={most}")]);
        }
        command.args(["setpriv", "--clear-groups"]);
        command.args([format!("--reuid={}", self.id), format!("--regid={}", self.id)]);
        command.arg(program).args(arguments).current_dir(place).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("XDG_RUNTIME_DIR", place.join("scratch"));
        command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null());
        command
    }

    /// Runs a command of the user's, as above.
    fn run(&self, most: Option<usize>, arguments: &[&str]) -> Output {
        self.run_program(most, &self.lab.dir.path().join("program"), arguments)
    }

    fn ps(&self) -> Value {
        let output = self.run(None, &["ps", "--json", "--wait", "300"]);
        assert!(output.status.success(), "{}", said(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The user's processes and threads.
    fn tasks(&self) -> usize {
        let own = format!("\nUid:\t{}\t", self.id);
        let mut tasks = 0;
        for process in std::fs::read_dir("/proc").unwrap() {
            let path = process.unwrap().path();
            let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
            if status.contains(&own) {
                tasks += std::fs::read_dir(path.join("task")).map_or(0, Iterator::count);
            }
        }
        tasks
    }

    fn assert_nothing_left(&self) {
        until("processes are left", || self.tasks() == 0);
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.run(None, &["down"]);
    }
}

#[test]
fn a_down_that_has_no_threads_for_its_vms_stops_them_all() {
    let user = User::new(54_331, 6);
    let up = user.run(None, &["up"]);
    assert!(up.status.success(), "{}", said(&up));
    let supervisor = number(&user.ps()["supervisor"]);
    // Of threads that end.
    let mut tasks = 0;
    until("the user's threads come and go", || std::mem::replace(&mut tasks, user.tasks()) == user.tasks());
    // One for the command and one that hears it.
    let most = tasks + 2;
    let limit = [format!("--pid={supervisor}"), format!("--nproc={most}")];
    let limited = user.run_program(None, Path::new("prlimit"), &limit.each_ref().map(String::as_str));
    assert!(limited.status.success(), "{}", said(&limited));
    let down = user.run(None, &["down"]);
    assert!(down.status.success(), "{}", said(&down));
    user.assert_nothing_left();
}

#[test]
fn an_up_with_few_threads_works_or_says_what_is_lacking_and_leaves_nothing() {
    let user = User::new(54_332, 3);
    let mut done = 0;
    // Every third limit: each one that is too small waits for what it could not begin.
    for most in (1..).step_by(3) {
        let up = user.run(Some(most), &["up"]);
        let words = said(&up);
        if up.status.success() {
            let ps = user.ps();
            let vms = ps["vms"].as_array().unwrap();
            assert!(vms.len() == 3 && vms.iter().all(|vm| vm["state"] == "up"), "{most}: {ps}\n{words}");
            done += 1;
            assert!(user.run(None, &["down"]).status.success());
        } else {
            assert!(up.status.code().is_some() && !words.is_empty(), "{most}: {}: {words}", up.status);
            assert!(!words.contains("panicked") && !words.contains("install"), "{most}: {words}");
        }
        user.assert_nothing_left();
        if done > 1 {
            break;
        }
    }
}
