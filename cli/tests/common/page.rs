// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guide's pages, by scripts/pages.py.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::path::Path;
use std::process::Command;

use super::Lab;

/// scripts/pages.py with these words.
pub fn pages(words: &[&str]) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/pages.py"));
    command.args(words);
    command
}

/// What it prints; it must succeed.
pub fn told(mut command: Command) -> String {
    let output = command.output().expect("python3");
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    out
}

/// The page's file of this name, from all its pieces.
pub fn file(page: &str, name: &str) -> String {
    let text = told(pages(&["file", page, name]));
    assert!(!text.is_empty(), "{page} has no {name}");
    text
}

/// The page's commands of this kind with what they print.
pub fn commands(page: &str, kind: &str) -> Vec<(String, String)> {
    serde_json::from_str(&told(pages(&["commands", page, kind]))).unwrap()
}

/// Runs the page's commands of this kind in the lab's folder. `stand_ins` is a folder of programs that go before the system's.
pub fn run(lab: &Lab, page: &str, kind: &str, stand_ins: Option<&Path>) {
    let program = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
    let before: String = stand_ins.iter().map(|folder| format!("{}:", folder.display())).collect();
    let path = format!("{before}{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut command = pages(&["run", page, kind]);
    command.current_dir(lab.dir.path()).env("PATH", path).env("TOMBOLO_HYPERVISOR", "tcg");
    command.env("XDG_RUNTIME_DIR", lab.dir.path()).env("XDG_STATE_HOME", lab.dir.path());
    println!("{}", told(command));
}
