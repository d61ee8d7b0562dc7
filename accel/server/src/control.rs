// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands from outside: a line of JSON, and so is the answer. They come over the control socket, one per connection, or from the process
//! that started a server and looks after it (`tombolo up`), over a socket that is the server's standard input.
//!
//! A server that drains gives its name to its successor: its control socket moves to `NAME.draining-PID`.

use crate::listen;
use crate::supervisor::Server;
use anyhow::Context;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
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
use tombolo_listen::Name;

pub use tombolo_control::accel::{Listing, Request};

/// The path of a server's control socket unless it is told another.
pub const DEFAULT: &str = "/run/tombolo/accel-control.sock";
const MAX_REQUEST: usize = 4096;
/// Time for all of a request, and timeout of each write of an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Before the process number of a server that drains, in the name of its socket.
const DRAINING: &str = ".draining-";
/// Time for each server to say who it is and whom it serves.
const ANSWER: Duration = Duration::from_secs(5);
/// The end of a file that a client passes along waits for no longer.
const LATE: Duration = Duration::from_millis(200);

/// Listens for commands. Removes what servers have left that drained and were killed.
pub fn listen(path: &Path) -> anyhow::Result<(UnixListener, Name)> {
    let taken = listen::listen(path, 0o600).context("--control")?;
    for left in drained(path).filter(|left| is_left(left)) {
        // Another server may do the same now.
        let _gone = std::fs::remove_file(left);
    }
    Ok(taken)
}

/// Returns whether a socket has no server any more.
fn is_left(socket: &Path) -> bool {
    tombolo_listen::is_served(socket).is_ok_and(|served| !served)
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
    path.push(format!("{DRAINING}{}", std::process::id()));
    path.into()
}

/// The sockets of servers that drain, or have drained until they were killed.
fn drained(control: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let prefix = format!("{}{DRAINING}", control.file_name().unwrap_or_default().to_string_lossy());
    let entries = control.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    let is_socket = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_socket());
    let is_one = move |entry: &DirEntry| entry.file_name().to_string_lossy().starts_with(&prefix);
    entries.filter(is_socket).filter(is_one).map(|entry| entry.path())
}

/// The servers of a control socket: the one that takes clients, and those that drain. One that gives no answer in time is among them.
///
/// # Errors
/// No server has the socket, and none drains.
pub fn servers(control: &Path) -> anyhow::Result<Vec<Listing>> {
    let drained: Vec<PathBuf> = drained(control).collect();
    let (first, others) = std::thread::scope(|scope| {
        let others: Vec<_> = drained.iter().map(|socket| scope.spawn(|| listing(socket, true))).collect();
        let joined = others.into_iter().filter_map(|asked| asked.join().ok());
        (listing(control, false), joined.collect::<Vec<_>>())
    });
    // One that drained and ended just now, or was killed, answers no more.
    let mut found: Vec<Listing> = others.into_iter().filter_map(Result::ok).collect();
    match first {
        Ok(listing) => found.insert(0, listing),
        Err(e) if found.is_empty() => return Err(e),
        Err(_) => {}
    }
    Ok(found)
}

/// Asks a server who it is and whom it serves; one that has the socket and gives no answer is listed without that.
fn listing(socket: &Path, draining: bool) -> anyhow::Result<Listing> {
    let why = match ask_within(socket, &Request::Ls, Some(ANSWER)) {
        Ok(listing) => return Ok(listing),
        Err(why) => why,
    };
    match process(socket) {
        Some(pid) if !is_left(socket) => Ok(Listing {
            pid,
            vm: None,
            listens: Vec::new(),
            draining,
            trouble: Some(format!("{why:#}; 'kill -CONT {pid}' continues one that was stopped")),
            tenants: Vec::new(),
        }),
        _ => Err(why),
    }
}

/// The process that listens at a socket: the name of one that drains has its number.
fn process(socket: &Path) -> Option<u32> {
    if let Some((_, number)) = socket.file_name()?.to_str()?.rsplit_once(DRAINING) {
        return number.parse().ok();
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let peer = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    rustix::net::connect(&peer, &SocketAddrUnix::new(socket).ok()?).ok()?;
    tombolo_listen::peer::of(&peer).ok()?.process
}
