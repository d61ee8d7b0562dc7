// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The emulated KVM host, for tests with a project in it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::TIMEOUT;

const TOMBOLO: &str = env!("CARGO_BIN_EXE_tombolo");

/// A lab that is up until this is dropped, with a folder for the project in it.
pub struct Lab {
    name: String,
    /// Its files, its monitor's socket `qmp` among them.
    pub folder: PathBuf,
}

impl Lab {
    /// With options of `tombolo lab up`.
    pub fn start(name: &str, options: &[&str]) -> Lab {
        let name = format!("{name}-{}", std::process::id());
        let up = Command::new(TOMBOLO).args(["lab", "up", "--json", "--name", &name]).args(options).output();
        let up = up.unwrap();
        assert!(up.status.success(), "the lab did not come up: {}", String::from_utf8_lossy(&up.stderr));
        let said: Value = serde_json::from_slice(&up.stdout).unwrap();
        let lab = Lab { name, folder: said["folder"].as_str().unwrap().into() };
        lab.good("mkdir -p /run/project && modprobe e1000e");
        lab
    }

    /// Runs a line of shell in the project's folder, `tombolo` in its PATH.
    pub fn run(&self, line: &str) -> Output {
        let folder = std::path::Path::new(TOMBOLO).parent().unwrap().display();
        let script = format!(
            "PATH={folder}:$PATH XDG_RUNTIME_DIR=/run; export PATH XDG_RUNTIME_DIR\ncd /run/project 2>/dev/null\n{line}"
        );
        let mut command = Command::new(TOMBOLO);
        command.args(["lab", "run", "--name", &self.name, "--", "bash", "-c", &script]).stdin(Stdio::null());
        command.output().unwrap()
    }

    pub fn good(&self, line: &str) -> String {
        let output = self.run(line);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {}\n{err}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.good(line)).unwrap()
    }

    pub fn driver(&self, device: &str) -> String {
        self.good(&format!("basename $(readlink /sys/bus/pci/devices/{device}/driver)")).trim().to_owned()
    }

    /// The address of the network card that has this driver and is alone in its IOMMU group.
    pub fn card(&self, driver: &str) -> String {
        let list = self.json("tombolo passthrough list --json");
        let card = list.as_array().unwrap().iter().find(|d| {
            d["driver"] == driver && d["group_members"].as_array().is_some_and(|members| members.len() == 1)
        });
        card.unwrap()["address"].as_str().unwrap().to_owned()
    }

    /// Says a line to the emulator's monitor for people.
    pub fn monitor(&self, line: &str) {
        let mut socket = UnixStream::connect(self.folder.join("qmp")).unwrap();
        let mut replies = BufReader::new(socket.try_clone().unwrap()).lines();
        let commands = [
            json!({ "execute": "qmp_capabilities" }),
            json!({ "execute": "human-monitor-command", "arguments": { "command-line": line } }),
        ];
        replies.next().unwrap().unwrap();
        for command in commands {
            writeln!(socket, "{command}").unwrap();
            let reply =
                replies.by_ref().map(Result::unwrap).find(|line| !line.contains("\"event\"")).unwrap();
            assert!(reply.contains("\"return\""), "{line}: {reply}");
        }
    }

    /// Looks until `ready`.
    pub fn until<T>(&self, line: &str, ready: impl Fn(&Value) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            let seen = self.json(line);
            if let Some(found) = ready(&seen) {
                return found;
            }
            assert!(begun.elapsed() < 2 * TIMEOUT, "{line} still says {seen}");
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // What the VMs' consoles said, if the lab still runs.
            let logs = self.run("tombolo logs 2>&1 | tail -n 60");
            eprintln!("{}", String::from_utf8_lossy(&logs.stdout));
            // They go with the lab, which may have ended by itself.
            for log in ["emulator.log", "console.log"] {
                let text = std::fs::read(self.folder.join(log)).unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                let first = text.lines().count().saturating_sub(30);
                text.lines().skip(first).for_each(|line| eprintln!("{log}: {line}"));
            }
        }
        let status = Command::new(TOMBOLO).args(["lab", "down", "--name", &self.name]).status();
        assert!(std::thread::panicking() || status.is_ok_and(|s| s.success()));
    }
}
