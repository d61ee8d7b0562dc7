// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Projects whose VMs are the stand-in for QEMU, `fake-qemu`.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Lab, TIMEOUT};

/// The most memory that a supervisor may take up, whatever guests do, in KiB.
pub const RESIDENT_MAX: u64 = 50 << 10;

/// The stand-in's program.
pub fn fake() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu")
}

/// A project with this file after the line that names the stand-in.
pub fn lab(compose: &str) -> Lab {
    let lab = Lab::new(&format!("qemu = \"{}\"\n{compose}", fake().display()));
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    lab
}

/// The standard error of a command.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A pid in an answer.
pub fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

/// Waits until it holds; `what` says that it does not.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The most memory that a process has had, in KiB.
pub fn most_resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
