// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands from outside: a line of JSON, and so is the answer. They come over the control socket, one per connection, or from the process
//! that started a server and looks after it (`tombolo up`), over a socket that is the server's standard input.
//!
//! A server that drains gives its name to its successor: its control socket moves to `NAME.draining-PID`.

use crate::name::{self, Name};
use crate::supervisor::Server;
use anyhow::Context;
use serde::de::DeserializeOwned;
use std::fs::DirEntry;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tombolo_brief::{Brief, within};
use tombolo_calls::say;
use tombolo_control::accel::Answer;

pub use tombolo_control::accel::{Listing, Request};

/// The path of a server's control socket unless it is told another.
pub const DEFAULT: &str = "/run/tombolo/accel-control.sock";
const MAX_REQUEST: usize = 4096;
/// Time for all of a request, and timeout of each write of an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The end of a file that a client passes along waits for no longer.
const LATE: Duration = Duration::from_millis(200);

/// A list waits so long for a server that drains: one that is stopped answers later, if at all.
const LISTED: Duration = Duration::from_secs(5);

/// Listens for commands. Removes what servers have left that drained and were killed.
pub fn listen(path: &Path) -> anyhow::Result<(UnixListener, Name)> {
    let taken = Name::listen(path, 0o600)?.with_context(|| {
        format!("{}: a server is controlled there already; choose another --control", path.display())
    })?;
    for left in drained(path).filter(|left| !name::is_served(left)) {
        // Another server may do the same now.
        let _gone = std::fs::remove_file(left);
    }
    Ok(taken)
}

/// Answers commands for ever.
pub fn serve(listener: &UnixListener, server: &Arc<Server>) {
    for stream in listener.incoming() {
        let is_lost = stream.is_err();
        let answered = stream.map_err(anyhow::Error::from).and_then(|s| answer(&s.into(), server));
        server.end_if_drained();
        if let Err(e) = answered {
            say!("tombolo accel: a command could not be answered: {e:#}");
        }
        if is_lost {
            server.rest();
        }
    }
}

fn answer(stream: &Brief<UnixStream>, server: &Arc<Server>) -> anyhow::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut reader = BufReader::new(&**stream);
    let line = within(LATE, || tombolo_control::socket::read_line(&mut reader, MAX_REQUEST, Some(TIMEOUT)))?;
    writeln!(&**stream, "{}", carry_out(&line, server)?)?;
    Ok(())
}

fn carry_out(line: &str, server: &Arc<Server>) -> serde_json::Result<String> {
    match serde_json::from_str(line) {
        Err(e) => serde_json::to_string(&Answer::<()>::Error(format!("the request isn't understood: {e}"))),
        Ok(Request::Ls) => serde_json::to_string(&Answer::Ok(server.listing())),
        Ok(Request::Drain) => {
            server.drain();
            serde_json::to_string(&Answer::Ok(()))
        }
        Ok(Request::Vm(guest)) => serde_json::to_string(&match server.serve_vm(&guest) {
            Ok(()) => Answer::Ok(()),
            Err(e) => Answer::Error(format!("vm.{}: {e:#}", guest.vm)),
        }),
    }
}

/// Does what the process says that looks after this server, and ends the server when that process has gone.
pub fn obey(overseer: &UnixStream, server: &Arc<Server>) {
    let obeyed = BufReader::new(overseer).lines().try_for_each(|line| {
        let mut answer = carry_out(&line?, server)?;
        answer.push('\n');
        let mut overseer = overseer;
        let told = overseer.write_all(answer.as_bytes());
        server.end_if_drained();
        told
    });
    if let Err(e) = obeyed {
        say!("tombolo accel: the process that supervises this server has gone: {e}");
    }
    // The workers end with it.
    server.end();
    std::process::exit(0);
}

/// Asks the server that is controlled at `socket`.
pub fn ask<T: DeserializeOwned>(socket: &Path, request: &Request) -> anyhow::Result<T> {
    ask_within(socket, request, None)
}

fn ask_within<T: DeserializeOwned>(
    socket: &Path,
    request: &Request,
    limit: Option<Duration>,
) -> anyhow::Result<T> {
    let who = ("accelerator server", "start one with 'tombolo accel serve'");
    let (value, _) = tombolo_control::socket::ask::<Answer<T>>(socket, request, limit, who)?;
    Ok(value)
}

/// The path of the control socket of a server that drains.
pub fn draining(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(format!(".draining-{}", std::process::id()));
    path.into()
}

/// The sockets of servers that drain, or have drained until they were killed.
fn drained(control: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let prefix = format!("{}.draining-", control.file_name().unwrap_or_default().to_string_lossy());
    let entries = control.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    let is_socket = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_socket());
    let is_one = move |entry: &DirEntry| entry.file_name().to_string_lossy().starts_with(&prefix);
    entries.filter(is_socket).filter(is_one).map(|entry| entry.path())
}

/// The servers of a control socket: the one that takes clients, and those that drain.
pub fn servers(control: &Path) -> anyhow::Result<Vec<Listing>> {
    let left_out = |socket: &Path, why: anyhow::Error| {
        say!("tombolo accel: {}: {why:#}; it is left out, and may be stopped", socket.display());
    };
    let of_drained = |socket: PathBuf| match ask_within(&socket, &Request::Ls, Some(LISTED)) {
        Ok(listing) => Some(listing),
        Err(why) => {
            // One that ended just now, or was killed, answers no more.
            if name::is_served(&socket) {
                left_out(&socket, why);
            }
            None
        }
    };
    let mut found: Vec<Listing> = drained(control).filter_map(of_drained).collect();
    match ask_within(control, &Request::Ls, Some(LISTED)) {
        Ok(listing) => found.insert(0, listing),
        Err(why) if found.is_empty() => return Err(why),
        Err(why) if name::is_served(control) => left_out(control, why),
        Err(_) => {}
    }
    Ok(found)
}
