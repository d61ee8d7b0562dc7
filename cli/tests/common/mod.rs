// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Helpers of tests with real guests.
#![allow(dead_code, reason = "not every test needs all of it")]

pub mod kvm_host;
pub mod page;
pub mod plain;
pub mod stand_in;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Timeout of every wait: far beyond what anything here takes, so that no test fails for a slow machine.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// The number in an environment variable, or `default` where that is not set.
pub fn setting(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Copies a program. Another process writes it: a child that another test's thread is starting would keep this one's descriptor, and with it the program from
/// being run (ETXTBSY).
pub fn copy_program(program: impl AsRef<Path>, to: &Path) {
    assert!(Command::new("cp").arg(program.as_ref()).arg(to).status().unwrap().success());
}

/// Makes a program that is a script, as [`copy_program`] copies one.
pub fn write_program(path: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success());
}

/// A folder with a compose file, and a runtime folder of its own; everything is taken down at the end.
pub struct Lab {
    pub dir: tempfile::TempDir,
}

impl Lab {
    pub fn new(compose: &str) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tombolo.toml"), compose).unwrap();
        Lab { dir }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(args).current_dir(self.dir.path());
        command.env("XDG_RUNTIME_DIR", self.dir.path()).env("XDG_STATE_HOME", self.dir.path());
        command.env("TOMBOLO_HYPERVISOR", "tcg").stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub fn good(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "tombolo {args:?}: {}\n{err}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `ps`, again while an accelerator's server waits for a CPU: `ps` gives such a server 300 ms to answer.
    pub fn ps(&self) -> serde_json::Value {
        for _ in 0..100 {
            let ps: serde_json::Value =
                serde_json::from_str(&self.good(&["ps", "--json", "--wait", "300"])).unwrap();
            let servers = ps["accelerators"].as_array();
            let waits = |server: &serde_json::Value| server["state"] == "waits for a CPU of this busy host";
            if !servers.is_some_and(|servers| servers.iter().any(waits)) {
                return ps;
            }
        }
        panic!("an accelerator's server waits for a CPU at 100 looks of ps");
    }

    /// Processes that belong to this lab: the supervisor and the QEMUs name its folder or inherit its environment.
    pub fn processes(&self) -> Vec<u32> {
        let mark = format!("XDG_RUNTIME_DIR={}", self.dir.path().display());
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap() {
            let path = entry.unwrap().path();
            let Some(pid) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()) else {
                continue;
            };
            let environment = std::fs::read(path.join("environ")).unwrap_or_default();
            if environment.split(|&b| b == 0).any(|v| v == mark.as_bytes()) {
                found.push(pid);
            }
        }
        found
    }

    /// The processes of this lab that are shims, by their names, such as `vm-a`.
    pub fn shims(&self) -> BTreeMap<String, u32> {
        let name_of = |pid: u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let (_, rest) = line.split_once("shim\0--name\0")?;
            Some((rest.split('\0').next()?.to_owned(), pid))
        };
        self.processes().into_iter().filter_map(name_of).collect()
    }

    pub fn shim(&self, name: &str) -> u32 {
        *self.shims().get(name).unwrap_or_else(|| panic!("no shim '{name}'"))
    }

    /// Kills the supervisor and the shims of these names, and with them their children.
    pub fn kill_with_shims(&self, names: &[&str]) {
        let shims = names.iter().map(|name| self.shim(name));
        let supervisor = u32::try_from(self.ps()["supervisor"].as_u64().unwrap()).unwrap();
        let all: Vec<u32> = std::iter::once(supervisor).chain(shims).collect();
        all.iter().for_each(|pid| signal(*pid, "KILL"));
        let start = Instant::now();
        // One whose parent does not ask for its end yet has no command line.
        let lives =
            |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
        while all.iter().any(lives) {
            assert!(start.elapsed() < TIMEOUT, "{all:?} live");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no process is left.
    pub fn assert_no_process_left(&self) {
        let start = Instant::now();
        while !self.processes().is_empty() {
            assert!(start.elapsed() < TIMEOUT, "left behind: {:?}", self.processes());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until no process is left, and looks for sockets.
    pub fn assert_nothing_left(&self) {
        self.assert_no_process_left();
        let mut folders = vec![self.dir.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let entry = entry.unwrap();
                let kind = entry.file_type().unwrap();
                use std::os::unix::fs::FileTypeExt;
                assert!(!kind.is_socket(), "{} is left behind", entry.path().display());
                if kind.is_dir() {
                    folders.push(entry.path());
                }
            }
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

/// Sends a signal. A process that is to stop has stopped then: it does so when it has a processor next.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
    assert!(status.success());
    let start = Instant::now();
    let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    while name == "STOP" && !stat().rsplit(')').next().unwrap().starts_with(" T ") {
        assert!(start.elapsed() < TIMEOUT, "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// That `up` failed because its guest has not the module, and said what to do.
pub fn assert_names_the_missing_module(up: &Output) {
    let err = String::from_utf8_lossy(&up.stderr);
    assert!(
        !up.status.success() && err.contains("guest without the module") && err.contains("tombolo-dkms"),
        "{err}"
    );
}

/// Makes a disk image that boots by itself with the kit's 6.1 kernel.
pub fn disk_image(image: &Path) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/disk-image");
    let made = Command::new(program).arg(plain::kit()).arg(image).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}
