// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The upgrade of a supervisor (`tombolo upgrade`): its process becomes another program while everything that it started runs on.
//!
//! The process stays: its main thread, whose children QEMUs, switches and servers are, calls execve(2). So none of them loses its parent,
//! and commands find the project's door where it was. What the next program must know is JSON in a sealed memfd; descriptors keep their
//! numbers. In order:
//! 1. The new program reads the state in a process of its own ([`Program::examine`]). What it can't read is refused, and nothing has happened.
//! 2. No request runs, no VM is between two phases, and both barriers are closed (see [`super::barrier`]); monitors and doorbells are paused.
//!    Commands that come wait in the door's queue.
//! 3. The main thread becomes the new program ([`Program::become_it`]), which reads the state again ([`read`]). One that can't becomes the old
//!    program again ([`fall_back`]), for which nothing has changed.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::{MemfdFlags, SealFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tombolo_brief::child::leave_sockets;
use tombolo_zone::keep::{Keep, Kept};

use crate::child;
use crate::host;
use crate::qemu::start;

/// The version of the state. A program reads no other; it is raised when a program of before could take the state for something that it
/// is not. A new key with a default is no reason.
pub const FORMAT: u32 = 1;
/// Time for a new program to read the state.
const EXAMINATION: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of its words in an error.
const WORDS: usize = 4096;

/// The beginning of the state, the same in every version.
#[derive(Debug, Serialize, Deserialize)]
pub struct Head {
    /// See [`FORMAT`].
    pub format: u32,
    /// The version of the program that wrote it.
    pub version: String,
    /// That program.
    pub program: Kept,
}

/// A program that a supervisor can become.
#[derive(Debug)]
pub struct Program {
    file: File,
    path: PathBuf,
}

impl Program {
    /// The program in this file, whatever becomes of its name.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn open(path: &Path) -> anyhow::Result<Program> {
        let file = host::open(path, host::Kind::File, false)
            .with_context(|| format!("the program {} can't be opened", path.display()))?;
        let mut magic = [0; 4];
        let read = file.read_at(&mut magic, 0).unwrap_or(0);
        // Command runs what the kernel does not know by a shell.
        anyhow::ensure!(
            magic[..read] == *b"\x7fELF" || magic.starts_with(b"#!"),
            "{} is no program",
            path.display()
        );
        let named = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Program { file, path: named.unwrap_or_else(|_| path.to_owned()) })
    }

    /// The program that this process is.
    ///
    /// # Errors
    /// As [`Program::open`].
    pub fn own() -> anyhow::Result<Program> {
        Program::open(Path::new("/proc/self/exe"))
    }

    /// Returns whether both are the same file.
    ///
    /// # Errors
    /// Those of the system.
    pub fn is_same(&self, other: &Program) -> io::Result<bool> {
        let (own, other) = (self.file.metadata()?, other.file.metadata()?);
        Ok((own.dev(), own.ino()) == (other.dev(), other.ino()))
    }

    /// The program's path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes it for the next program.
    pub fn keep(&self, keep: &mut Keep) -> Kept {
        keep.add(&self.file)
    }

    /// The same for another thread.
    ///
    /// # Errors
    /// When no descriptor can be had.
    pub fn try_clone(&self) -> io::Result<Program> {
        Ok(Program { file: self.file.try_clone()?, path: self.path.clone() })
    }

    /// Has the program read the state in a process of its own.
    ///
    /// # Errors
    /// The program's own words, or that it can't be started or does not end.
    pub fn examine(&self, state: &OwnedFd) -> anyhow::Result<()> {
        // It becomes the program by the descriptor, whose number it has until then.
        let kept = [self.file.try_clone()?.into(), state.try_clone()?];
        let mut command = Command::new(child::inherited_path(&kept[0]));
        command.arg0("tombolo").args(["supervise-on", "--examine", &kept[1].as_raw_fd().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        child::tie(&mut command, &kept);
        leave_sockets(&mut command);
        let mut process =
            command.spawn().with_context(|| format!("{} can't be started", self.path.display()))?;
        let begun = Instant::now();
        let status = loop {
            match process.try_wait()? {
                Some(status) => break status,
                None if begun.elapsed() >= EXAMINATION => {
                    process.kill()?;
                    process.wait()?;
                    anyhow::bail!(
                        "{} has not read the project's state within {} s",
                        self.path.display(),
                        EXAMINATION.as_secs()
                    );
                }
                None => std::thread::sleep(LOOK),
            }
        };
        if status.success() {
            return Ok(());
        }
        let words =
            process.stderr.take().map(|said| start::left_in(said, WORDS)).transpose()?.unwrap_or_default();
        let words = String::from_utf8_lossy(&words);
        let words = words.trim().trim_start_matches("tombolo: ");
        anyhow::bail!("{} can't go on with the project ({status}): {words}", self.path.display())
    }

    /// Makes this process the program, with the state and the descriptors in `keep`; called on the main thread. Signals that end a
    /// supervisor wait until the next program hears them. It returns only why that failed, and then nothing has changed.
    pub fn become_it(&self, state: &OwnedFd, keep: &Keep) -> io::Error {
        let mut also = Keep::default();
        also.add(&self.file);
        also.add(state);
        let failed = keep.set(true).and_then(|()| also.set(true)).err();
        let failed = failed.unwrap_or_else(|| {
            let number = state.as_raw_fd().to_string();
            execute(
                &format!("/proc/self/fd/{}", self.file.as_raw_fd()),
                &["tombolo", "supervise-on", "--state", &number],
            )
        });
        for kept in [keep, &also] {
            // Those that could be set can be set back.
            let _not_open = kept.set(false);
        }
        failed
    }
}

/// Writes a state that no program can change any more.
///
/// # Errors
/// When memory runs out.
pub fn write<T: Serialize>(state: &T) -> anyhow::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("tombolo-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(state)?)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Reads what the program before has left.
///
/// # Errors
/// This program can't read the state. Names the remedy.
pub fn read<T: DeserializeOwned>(text: &[u8]) -> anyhow::Result<T> {
    let head = serde_json::from_slice::<Head>(text).context("that is no state of a supervisor")?;
    let versions = || format!("it runs under version {}, and this is {}", head.version, crate::VERSION);
    anyhow::ensure!(
        head.format == FORMAT,
        "the state of the running project has format {}, of which this program knows {FORMAT} only ({}); to change over, take the project down \
         and up again",
        head.format,
        versions()
    );
    serde_json::from_slice(text).with_context(|| {
        format!("the state of the running project is not understood ({}); to change over, take it down and up again", versions())
    })
}

/// The text of a state that was inherited.
///
/// # Errors
/// When there is none.
pub fn text(state: RawFd) -> anyhow::Result<(OwnedFd, Vec<u8>)> {
    // SAFETY: the program before passes the number of a descriptor that no other part of this one owns.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(state) });
    let mut text = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut text)).context("the state can't be read")?;
    Ok((file.into(), text))
}

/// Makes this process the program again that it was before, which goes on with its own state. It returns only where that fails.
pub fn fall_back(state: &OwnedFd, text: &[u8], why: &str) -> anyhow::Error {
    let Ok(head) = serde_json::from_slice::<Head>(text) else {
        return anyhow::anyhow!("the state names no program to go back to: {why}");
    };
    let link = format!("/proc/self/fd/{}", number_of(&head.program));
    let failed = execute(
        &link,
        &["tombolo", "supervise-on", "--state", &state.as_raw_fd().to_string(), "--refused", why],
    );
    anyhow::anyhow!("{why}; and the program before can't be had again: {failed}")
}

fn number_of(kept: &Kept) -> String {
    serde_json::to_string(kept).unwrap_or_default()
}

/// Calls execve with this process's environment.
fn execute(path: &str, arguments: &[&str]) -> io::Error {
    let words = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    let (path, arguments) = (words(path), arguments.iter().map(|a| words(a)).collect::<Vec<_>>());
    let environment: Vec<CString> = std::env::vars_os()
        .filter_map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok())
        .collect();
    let pointers =
        |all: &[CString]| all.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
    let (argv, envp) = (pointers(&arguments), pointers(&environment));
    let path: &CStr = &path;
    // SAFETY: both arrays are terminated by null, and all strings live until the call returns, which it does only when it fails.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error()
}

/// Signals that end a supervisor, blocked in this thread and those that it starts from now on, or not any more.
pub fn block_signals(blocked: bool) {
    let how = if blocked { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    // SAFETY: the set is initialized by sigemptyset before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct State {
        #[serde(flatten)]
        head: Head,
        name: String,
    }

    fn state(format: u32) -> Vec<u8> {
        let program = Program::own().unwrap().keep(&mut Keep::default());
        let head = Head { format, version: "0.0.1".into(), program };
        serde_json::to_vec(&State { head, name: "p".into() }).unwrap()
    }

    #[test]
    fn a_state_of_another_format_is_refused_with_both_versions() {
        assert_eq!(read::<State>(&state(FORMAT)).unwrap().name, "p");
        let why = read::<State>(&state(FORMAT + 1)).unwrap_err().to_string();
        assert!(why.contains("format 2") && why.contains("under version 0.0.1"), "{why}");
    }

    #[test]
    fn a_state_that_lacks_something_is_refused() {
        let text = String::from_utf8(state(FORMAT)).unwrap().replace("name", "another");
        let why = format!("{:#}", read::<State>(text.as_bytes()).unwrap_err());
        assert!(why.contains("is not understood") && why.contains("missing field `name`"), "{why}");
    }

    #[test]
    fn a_program_that_can_not_read_the_state_is_refused_in_its_own_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let write = |text: &str| {
            // Another process writes it: a child that is being started could hold it open for writing.
            let mut shell = Command::new("sh")
                .args(["-c", "cat >\"$0\" && chmod +x \"$0\""])
                .arg(&path)
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
            assert!(shell.wait().unwrap().success());
        };
        let fd = super::write(&"state").unwrap();
        write("#!/bin/sh\ncat \"/proc/self/fd/$3\" >&2\nexit 1\n");
        let why = Program::open(&path).unwrap().examine(&fd).unwrap_err().to_string();
        assert!(why.ends_with("(exit status: 1): \"state\""), "{why}");
        write("#!/bin/sh\nexit 0\n");
        Program::open(&path).unwrap().examine(&fd).unwrap();
        write("no program");
        let why = Program::open(&path).unwrap_err().to_string();
        assert!(why.ends_with("is no program"), "{why}");
    }
}
