// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The start of a supervisor. One that has died while something of its project lives on is followed by another as soon as a command looks for it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use tombolo_passthrough::lock;
use tombolo_zone::daemon;

use crate::child;
use crate::compose::{Compose, Project};
use crate::project::control::Event;
use crate::project::peer::Peer;
use crate::project::state::{self, StateDir};
use crate::qemu::start::no_process;
use crate::shim;

/// Time for another command to start a supervisor.
const TURN: Duration = Duration::from_secs(20);

/// The file in a project's folder with what its supervisor runs.
fn file_of(dir: &Path) -> PathBuf {
    dir.join("project.json")
}

/// Notes the running project for the next supervisor.
///
/// # Errors
/// Those of the file system.
pub fn note(dir: &StateDir, project: &Project) -> anyhow::Result<()> {
    let text =
        |variable: (OsString, OsString)| variable.0.into_string().ok().zip(variable.1.into_string().ok());
    let environment: BTreeMap<String, String> = std::env::vars_os().filter_map(text).collect();
    write_new(&environment_of(dir.path()), &serde_json::to_vec(&environment)?)?;
    Ok(write_new(&file_of(dir.path()), &serde_json::to_vec(project)?)?)
}

/// Writes a file that has not this content already: replacing one waits for the disk on some file systems.
fn write_new(path: &Path, content: &[u8]) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    state::write_atomically(path, content)
}

/// The file with the environment of a project's supervisor, which the next one has, too: by it the guest kit is found.
fn environment_of(dir: &Path) -> PathBuf {
    dir.join("environment.json")
}

/// The project that a supervisor has noted in this folder.
///
/// # Errors
/// There is none, or another version has noted it.
pub fn noted(dir: &Path) -> anyhow::Result<Project> {
    let path = file_of(dir);
    let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is of another version of tombolo", path.display()))
}

/// Starts a supervisor, this program or another one; `None` when another one was faster.
///
/// # Errors
/// Why it can't begin.
pub fn start(program: Option<&Path>, project: &Project, dir: &StateDir) -> anyhow::Result<Option<Peer>> {
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = OwnedFd::from(theirs);
    let number = theirs.as_raw_fd();
    let mut command = program.map_or_else(child::own_program, Command::new);
    command.args(["supervise", "--dir"]).arg(dir.path()).arg("--control").arg(number.to_string());
    command.arg("--file").arg(&project.file).arg("--name").arg(&project.name);
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // What an earlier supervisor has left, not what one has whose project has ended with it.
    let noted = std::fs::read(environment_of(dir.path())).ok().filter(|_| shim::handle::any(dir.path()));
    if let Some(text) = noted {
        command.env_clear().envs(serde_json::from_slice::<BTreeMap<String, String>>(&text)?);
    }
    daemon::detach(&mut command, &[theirs.as_fd()]);
    let started = command.spawn().map_err(|e| no_process(&e)).context("the supervisor can't be started")?;
    drop(theirs);
    let mut peer = Peer::new(ours);
    peer.watch(started.id());
    let begun = peer.receive::<Event>().context("the supervisor ended before it said anything")?;
    match begun {
        Some(Event::Note { .. }) => Ok(Some(peer)),
        Some(Event::Taken) => Ok(None),
        Some(Event::Failed { message }) => anyhow::bail!("{message}"),
        Some(other) => anyhow::bail!("the supervisor began with {other:?}"),
        None => anyhow::bail!("the supervisor ended before it said anything"),
    }
}

/// Locks a project's folder against other starts of its supervisor, until the file is closed.
///
/// # Errors
/// Another process keeps it locked; those of the file system.
pub fn turn(dir: &Path) -> anyhow::Result<File> {
    let named = || dir.display().to_string();
    let folder = File::open(dir).with_context(named)?;
    lock::take(&folder, dir, TURN).with_context(named)?;
    Ok(folder)
}

/// Starts a supervisor for what lives in a project's folder without one. Returns whether something does.
///
/// # Errors
/// It can't go on with that.
pub fn revive(dir: &Path) -> anyhow::Result<bool> {
    if !shim::handle::any(dir) {
        return Ok(false);
    }
    let _turn = turn(dir)?;
    let project = noted(dir).unwrap_or_else(|_| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Project { name, file: dir.to_owned(), compose: Compose::default() }
    });
    // It ends by itself when this connection ends and it has nothing to do.
    start(None, &project, &StateDir::at(dir.to_owned()))?;
    Ok(true)
}

/// Says whether a program can go on with what lives in a project's folder.
///
/// # Errors
/// Why it can't, in its own words.
pub fn examine(program: &File, dir: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(format!("/proc/{}/fd/{}", std::process::id(), program.as_raw_fd()));
    // A file, since a process that it leaves behind may keep a pipe open.
    let mut said = File::from(child::memory_file("said", &[])?);
    command.args(["supervise", "--check", "--dir"]).arg(dir).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(said.try_clone()?);
    let status = command.status().map_err(|e| no_process(&e)).context("the program can't be started")?;
    let mut stderr = Vec::new();
    said.rewind().and_then(|()| said.read_to_end(&mut stderr))?;
    anyhow::ensure!(
        status.success(),
        "{}",
        child::words(&std::process::Output { status, stdout: Vec::new(), stderr })
    );
    Ok(())
}
