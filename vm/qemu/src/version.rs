// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU program and its version.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use tombolo_brief::child::leave_sockets;

use crate::start;

/// The oldest QEMU that is supported, as (major, minor).
pub const OLDEST: (u32, u32) = (7, 2);

/// Time for a program to say its version.
const LIMIT: Duration = Duration::from_secs(20);
/// How often it is looked whether it has.
const LOOK: Duration = Duration::from_millis(5);
/// The most bytes of it that are read.
const SAID: usize = 1024;

/// A QEMU program that has been asked for its version.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The name or path that was run; a name is looked up in PATH.
    pub program: PathBuf,
    /// (major, minor, micro)
    pub version: (u32, u32, u32),
}

impl Qemu {
    /// Asks `program` (default: `$TOMBOLO_QEMU`, then `qemu-system-x86_64`) for its version.
    ///
    /// # Errors
    /// When it is missing, says something else, or is too old.
    pub fn find(program: Option<&Path>) -> anyhow::Result<Qemu> {
        let program = program
            .map(Path::to_owned)
            .or_else(|| std::env::var_os("TOMBOLO_QEMU").map(PathBuf::from))
            .unwrap_or_else(|| "qemu-system-x86_64".into());
        Qemu::ask(program, LIMIT)
    }

    fn ask(program: PathBuf, limit: Duration) -> anyhow::Result<Qemu> {
        let mut command = Command::new(&program);
        let command = command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped());
        leave_sockets(command);
        let asked = command.stderr(Stdio::null()).spawn();
        let mut asked = asked.map_err(|e| start::no_program(&program, "qemu-system-x86", &e))?;
        let begun = Instant::now();
        while asked.try_wait()?.is_none() {
            if begun.elapsed() >= limit {
                asked.kill()?;
                asked.wait()?;
                anyhow::bail!("{} --version does not end; name another program", program.display());
            }
            std::thread::sleep(LOOK);
        }
        // It fits into a pipe.
        let text =
            asked.stdout.take().map(|said| start::left_in(said, SAID)).transpose()?.unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let version = parse(&text).with_context(|| {
            let said = text.lines().next().unwrap_or_default();
            format!(
                "{} --version says '{said}', which is no QEMU; install the package qemu-system-x86",
                program.display()
            )
        })?;
        if (version.0, version.1) < OLDEST {
            anyhow::bail!(
                "{} is version {}.{}; at least {}.{} is needed",
                program.display(),
                version.0,
                version.1,
                OLDEST.0,
                OLDEST.1
            );
        }
        Ok(Qemu { program, version })
    }

    /// "7.2.22"
    pub fn version_text(&self) -> String {
        format!("{}.{}.{}", self.version.0, self.version.1, self.version.2)
    }
}

fn parse(text: &str) -> Option<(u32, u32, u32)> {
    let rest = text.strip_prefix("QEMU emulator version ")?;
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let mut parts = number.split('.').map(|p| p.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_distributions_are_understood() {
        assert_eq!(
            parse("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright"),
            Some((7, 2, 22))
        );
        assert_eq!(parse("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)"), Some((10, 0, 2)));
        assert_eq!(parse("QEMU emulator version 9.1"), Some((9, 1, 0)));
        assert_eq!(parse("something else"), None);
    }

    #[test]
    fn a_program_that_does_not_end_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("hangs");
        // Another process writes it: a child that is being started could hold it open for writing.
        let write = "printf '#!/bin/sh\\nexec sleep 1000\\n' >\"$0\" && chmod +x \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&program).status().unwrap().success());
        let e = Qemu::ask(program, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(e.ends_with("hangs --version does not end; name another program"), "{e}");
    }
}
