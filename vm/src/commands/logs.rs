// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo logs`: what consoles said. The log of a VM goes on over reboots and restarts; a full one is renamed (see [`crate::log`]), which
//! a reader that follows it notices by the file's number.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::compose;
use crate::project::state::{self, StateDir};

/// The pause between two checks for more.
const LOOK: Duration = Duration::from_millis(200);
/// The longest line that is waited for, in bytes; a longer one is printed in pieces.
const LINE_MAX: usize = 64 << 10;

/// `tombolo logs`
#[derive(Args, Debug)]
pub struct Options {
    /// The compose file [default: tombolo.toml here or in a folder above]
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Go on as they say more, over reboots and restarts, until the project is down
    #[arg(short, long, short_alias = 'F')]
    follow: bool,
    /// Begin with so many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<usize>,
    /// QEMU's own words instead
    #[arg(long)]
    qemu: bool,
    /// The VMs [default: all that have a log]
    vms: Vec<String>,
}

/// Prints logs: one as it is, several with the VM's name before each line, or JSON, a line for each line.
///
/// # Errors
/// When a VM has no log.
pub fn run(options: &Options, json: bool) -> anyhow::Result<ExitCode> {
    let project = crate::commands::cli::File::at(options.file.clone()).identify()?;
    let dir = StateDir::of(&project.file)?;
    let kind = if options.qemu { "qemu" } else { "console" };
    let declared = || project.compose.vm.keys().map(String::as_str);
    let names = if options.vms.is_empty() { logged(dir.path(), kind)? } else { options.vms.clone() };
    anyhow::ensure!(
        !names.is_empty(),
        "the project '{}' has no logs; start it with 'tombolo up'",
        project.name
    );
    let mut tails = Vec::new();
    for vm in names {
        let path = if options.qemu { dir.qemu_log(&vm) } else { dir.console_log(&vm) };
        match Tail::open(&vm, &path) {
            Ok(tail) => tails.push(tail),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !project.compose.vm.contains_key(&vm) => {
                let hint = compose::nearest(&vm, declared()).map(|n| format!("; did you mean '{n}'?"));
                anyhow::bail!("{} declares no VM '{vm}'{}", project.file.display(), hint.unwrap_or_default());
            }
            Err(e) => {
                return Err(e).with_context(|| {
                    format!("the VM '{vm}' has no log ({}); start it with 'tombolo up'", path.display())
                });
            }
        }
    }
    let width = tails.iter().map(|tail| tail.vm.len()).max().filter(|_| tails.len() > 1);
    let printer = Printer { json, width };
    let mut out = io::stdout().lock();
    for tail in &mut tails {
        let old = tail.so_far()?;
        printer.print(&mut out, tail, last_lines(&old, options.tail))?;
    }
    let living = if options.follow { state::supervisor(&project.file)? } else { None };
    while living.as_ref().is_some_and(|found| found.is_there()) {
        out.flush()?;
        std::thread::sleep(LOOK);
        for tail in &mut tails {
            let new = tail.more()?;
            printer.print(&mut out, tail, &new)?;
        }
    }
    for tail in &mut tails {
        printer.finish(&mut out, tail)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Names of the VMs that have a log of this kind.
fn logged(dir: &Path, kind: &str) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(names),
        entries => entries.map_err(|e| state::at(dir, &e))?,
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == kind) {
            names.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
        }
    }
    names.sort();
    Ok(names)
}

/// The end of `text` that has so many lines.
fn last_lines(text: &[u8], lines: Option<usize>) -> &[u8] {
    let Some(lines) = lines else { return text };
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    match lines {
        0 => &text[text.len()..],
        lines => &text[ends.clone().nth(lines - 1).unwrap_or(0)..],
    }
}

/// A log that is read while it is written.
struct Tail {
    vm: String,
    path: PathBuf,
    file: File,
    /// The beginning of a line whose end has not come.
    partial: Vec<u8>,
}

impl Tail {
    fn open(vm: &str, path: &Path) -> io::Result<Tail> {
        Ok(Tail { vm: vm.to_owned(), path: path.to_owned(), file: File::open(path)?, partial: Vec::new() })
    }

    /// The text so far, with that of the file before.
    fn so_far(&mut self) -> io::Result<Vec<u8>> {
        let mut text = match std::fs::read(crate::log::before(&self.path)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            text => text?,
        };
        self.file.read_to_end(&mut text)?;
        Ok(text)
    }

    /// The text since the last call.
    fn more(&mut self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        self.file.read_to_end(&mut text)?;
        // Between a change of files and the first line of the new one there is none.
        let Ok(now) = self.path.metadata() else { return Ok(text) };
        if now.ino() != self.file.metadata()?.ino() {
            // The end of the old file.
            self.file.read_to_end(&mut text)?;
            self.file = File::open(&self.path)?;
            self.file.read_to_end(&mut text)?;
        } else if now.len() < self.file.stream_position()? {
            self.file.seek(SeekFrom::Start(0))?;
            self.file.read_to_end(&mut text)?;
        }
        Ok(text)
    }
}

struct Printer {
    json: bool,
    /// Of the names before lines; none: the log as it is.
    width: Option<usize>,
}

impl Printer {
    fn print(&self, out: &mut impl Write, tail: &mut Tail, new: &[u8]) -> io::Result<()> {
        if self.width.is_none() && !self.json {
            return out.write_all(new);
        }
        tail.partial.extend_from_slice(new);
        let partial = std::mem::take(&mut tail.partial);
        let mut rest = &partial[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.line(out, &tail.vm, &rest[..end])?;
            rest = &rest[end + 1..];
        }
        while rest.len() > LINE_MAX {
            self.line(out, &tail.vm, &rest[..LINE_MAX])?;
            rest = &rest[LINE_MAX..];
        }
        tail.partial = rest.to_vec();
        Ok(())
    }

    /// Prints a line that never ended.
    fn finish(&self, out: &mut impl Write, tail: &Tail) -> io::Result<()> {
        if tail.partial.is_empty() { Ok(()) } else { self.line(out, &tail.vm, &tail.partial) }
    }

    fn line(&self, out: &mut impl Write, vm: &str, line: &[u8]) -> io::Result<()> {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end_matches('\r');
        match self.width {
            _ if self.json => writeln!(out, "{}", json!({ "vm": vm, "line": text })),
            Some(width) => writeln!(out, "{vm:width$} | {text}"),
            None => writeln!(out, "{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_reads_on_over_changes_of_files_and_truncation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.console");
        std::fs::write(dir.path().join("a.console.1"), "older\n").unwrap();
        std::fs::write(&path, "old\n").unwrap();
        let mut tail = Tail::open("a", &path).unwrap();
        assert_eq!(tail.so_far().unwrap(), b"older\nold\n");
        assert_eq!(tail.more().unwrap(), b"");
        let mut log = File::options().append(true).open(&path).unwrap();
        log.write_all(b"next ").unwrap();
        assert_eq!(tail.more().unwrap(), b"next ");
        log.write_all(b"last\n").unwrap();
        std::fs::rename(&path, dir.path().join("a.console.1")).unwrap();
        std::fs::write(&path, "new file\n").unwrap();
        assert_eq!(tail.more().unwrap(), b"last\nnew file\n");
        std::fs::write(&path, "cut\n").unwrap();
        assert_eq!(tail.more().unwrap(), b"cut\n");
    }

    #[test]
    fn lines_of_several_logs_have_names_and_json_has_both() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.console");
        std::fs::write(&path, "").unwrap();
        let mut tail = Tail::open("web", &path).unwrap();
        let mut out = Vec::new();
        let named = Printer { json: false, width: Some(5) };
        named.print(&mut out, &mut tail, b"one\r\ntw").unwrap();
        named.print(&mut out, &mut tail, b"o\nthree").unwrap();
        named.finish(&mut out, &tail).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "web   | one\nweb   | two\nweb   | three\n");
        let (mut out, json) = (Vec::new(), Printer { json: true, width: None });
        json.line(&mut out, "web", b"say \"x\"").unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&out).unwrap(),
            json!({ "vm": "web", "line": "say \"x\"" })
        );
    }

    #[test]
    fn the_last_lines_are_counted_from_the_end() {
        let text = b"1\n2\n3\n";
        for (lines, expected) in [
            (None, "1\n2\n3\n"),
            (Some(0), ""),
            (Some(1), "3\n"),
            (Some(2), "2\n3\n"),
            (Some(9), "1\n2\n3\n"),
        ] {
            assert_eq!(last_lines(text, lines), expected.as_bytes(), "{lines:?}");
        }
        assert_eq!(last_lines(b"1\n2", Some(1)), b"2");
    }
}
