// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cost of a program's calls: the program is run with a file in `TOMBOLO_ACCEL_TRACE`, to which the client library of each of its
//! processes adds a line of JSON when it ends.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::process::{Command, ExitCode};

/// One function of a process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Function {
    pub name: String,
    /// Requests sent.
    pub calls: u64,
    /// Of these, those whose result was waited for.
    pub waits: u64,
    /// Bytes in records.
    pub bytes: u64,
    /// Nanoseconds waited.
    pub waited_ns: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub program: String,
    /// Functions that sent something, the longest wait first.
    pub functions: Vec<Function>,
}

pub fn table(process: &Process) -> String {
    let mut out = format!(
        "{}:{}\n{:<36} {:>9} {:>9} {:>12} {:>12} {:>9}\n",
        process.program, process.pid, "function", "calls", "waits", "bytes", "waited µs", "µs/wait"
    );
    let mut row = |name: &str, calls: u64, waits: u64, bytes: u64, ns: u64| {
        let each = if waits == 0 { 0.0 } else { ns as f64 / 1e3 / waits as f64 };
        // Writing to a string can't fail.
        let _infallible =
            writeln!(out, "{name:<36} {calls:>9} {waits:>9} {bytes:>12} {:>12} {each:>9.1}", ns / 1000);
    };
    let sum = |get: fn(&Function) -> u64| process.functions.iter().map(get).sum();
    for f in &process.functions {
        row(&f.name, f.calls, f.waits, f.bytes, f.waited_ns);
    }
    row("all", sum(|f| f.calls), sum(|f| f.waits), sum(|f| f.bytes), sum(|f| f.waited_ns));
    out
}

/// Runs a program and says what its calls cost, on the standard error (with `json`, on the standard output); its exit code.
pub fn run(program: &[String], server: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let Some((name, arguments)) = program.split_first() else { bail!("which program?") };
    // A new file with a name that no other user can make a file or a link of before.
    let file = tempfile::Builder::new().prefix("tombolo-trace-").tempfile();
    let file = file.with_context(|| format!("a file in {}", std::env::temp_dir().display()))?;
    let mut command = Command::new(name);
    command.args(arguments).env("TOMBOLO_ACCEL_TRACE", file.path());
    if let Some(server) = server {
        command.env("TOMBOLO_ACCEL", server);
    }
    let status = command.status().with_context(|| format!("{name} can't be run"));
    let text = std::fs::read_to_string(file.path()).with_context(|| file.path().display().to_string());
    let (status, text) = (status?, text?);
    let processes = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<Vec<Process>, _>>()
        .context("the client library's counts can't be read; is it of the same release?")?;
    if processes.is_empty() {
        eprintln!(
            "tombolo: {name} sent nothing to an accelerator server; is libtombolo-opencl.so among the drivers (/etc/OpenCL/vendors), or libcuda.so.1 where programs find it?"
        );
    }
    if json {
        println!("{}", serde_json::to_string(&processes)?);
    } else {
        processes.iter().for_each(|p| eprint!("{}", table(p)));
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_adds_up() {
        let line = r#"{"pid":7,"program":"p","functions":[{"name":"clFinish","calls":2,"waits":2,"bytes":32,"waited_ns":9000},
            {"name":"clFlush","calls":3,"waits":0,"bytes":48,"waited_ns":0}]}"#;
        let text = table(&serde_json::from_str(line).expect("as the client writes it"));
        let all: Vec<&str> = text.lines().last().unwrap_or_default().split_whitespace().collect();
        assert_eq!(all, ["all", "5", "2", "80", "9", "4.5"]);
    }
}
