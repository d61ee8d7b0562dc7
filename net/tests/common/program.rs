// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as a program, sandboxed.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tombolo_net::control::socket::{Request, ask};
use tombolo_net_driver::{Nic, NicConfig};

use super::{Rig, wait_for};

/// The program, with one port for the guest that owns [`Rig::mac`] of `n`.
pub struct Switch {
    pub child: Child,
    pub dir: tempfile::TempDir,
}

impl Switch {
    pub fn start(n: usize, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        Self::start_in(dir, n, args, log.into())
    }

    /// The same in a folder, with its log wherever that goes.
    pub fn start_in(dir: tempfile::TempDir, n: usize, args: &[&str], log: Stdio) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-switch"));
        command.arg("run").arg("--control").arg(dir.path().join("control"));
        command.arg("--port").arg(format!("vm,{},{}", dir.path().join("vm").display(), Rig::mac(n)));
        command.args(args).env("NO_COLOR", "1");
        let child = command.stderr(log).stdin(Stdio::null()).spawn().unwrap();
        let switch = Self { child, dir };
        wait_for("the switch", || ask::<serde_json::Value>(&switch.control(), &Request::Ports).ok());
        switch
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    pub fn guest(&self, features: u64) -> Nic {
        let features = NicConfig::default().features | features;
        let mut nic = Nic::new(NicConfig { tx_buffer: 66_000, features, ..NicConfig::default() }).unwrap();
        nic.connect(&self.dir.path().join("vm")).unwrap();
        nic
    }

    /// Returns the process of its keeper.
    pub fn keeper(&self) -> u32 {
        child_of(self.child.id())
    }

    /// The port of this name, as the control socket shows it.
    pub fn port(&self, name: &str) -> Option<Value> {
        let (answer, _) = ask::<serde_json::Value>(&self.control(), &Request::Ports).unwrap();
        answer["ports"].as_array().unwrap().iter().find(|p| p["name"] == name).cloned()
    }

    /// Returns whether frames can pass at the port of this name.
    pub fn is_up(&self, name: &str) -> bool {
        self.port(name).unwrap()["up"].as_bool().unwrap()
    }
}

/// The one child of a process.
pub fn child_of(pid: u32) -> u32 {
    let children = format!("/proc/{pid}/task/{pid}/children");
    std::fs::read_to_string(children).unwrap().trim().parse().unwrap()
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
