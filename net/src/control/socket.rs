// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control socket: one request per connection, a line of JSON; the answer is a line of JSON, for a capture followed
//! by pcapng until one side closes.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tombolo_control::net::{Answer, Done, Ports};

use crate::control::config::{PortConfig, UplinkConfig};
use crate::control::daemon::{Daemon, Detached};
use crate::control::metrics::{queriers, status};
use crate::forwarding::capture::Capture;

/// Longest request.
const MAX_REQUEST: usize = 64 << 10;
/// Time for all of a request, and for each write of an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which a capture is written out.
const CAPTURE_EVERY: Duration = Duration::from_millis(20);

/// A request to the switch.
pub type Request = tombolo_control::net::Request<PortConfig, UplinkConfig>;

/// Reads the request of a connection.
pub(crate) fn read(stream: &UnixStream) -> io::Result<anyhow::Result<Request>> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let read = tombolo_control::socket::read_line(&mut BufReader::new(stream), MAX_REQUEST, Some(TIMEOUT));
    let line = match read {
        Ok(line) => line,
        // Too long, too late, or no text: the user hears of it, if there is one.
        Err(err) if matches!(err.kind(), io::ErrorKind::InvalidData | io::ErrorKind::TimedOut) => {
            return Ok(Err(anyhow::anyhow!("invalid request: {err}")));
        }
        Err(err) => return Err(err),
    };
    Ok(serde_json::from_str(&line).map_err(|err| anyhow::anyhow!("invalid request: {err}")))
}

/// Writes an answer.
pub(crate) fn reply<T: Serialize>(mut stream: &UnixStream, answer: &Answer<T>) -> io::Result<()> {
    writeln!(stream, "{}", serde_json::to_string(answer)?)
}

/// Answers one connection. `removed`: what [`Request::Remove`] took out of the view.
pub(crate) fn answer(
    daemon: &Arc<Daemon>,
    stream: UnixStream,
    request: Request,
    removed: Option<anyhow::Result<Detached>>,
) -> io::Result<()> {
    let outcome = match request {
        Request::Ports => {
            return reply(
                &stream,
                &Answer::Value(Ports {
                    ports: status(daemon.switch()),
                    queriers: queriers(daemon.switch()),
                    cpu_ns: crate::forwarding::worker::process_time(),
                }),
            );
        }
        Request::Remove { .. } => removed.into_iter().try_for_each(|detached| {
            daemon.end(detached?);
            Ok(())
        }),
        Request::Capture { name, snap } => return capture(daemon, stream, &name, snap),
        Request::Add { .. } | Request::AddUplink { .. } => {
            Err(anyhow::anyhow!("ports and uplinks come from the keeper"))
        }
    };
    match outcome {
        Ok(()) => reply(&stream, &Answer::Value(Done { ok: true })),
        Err(err) => reply(&stream, &Answer::<Done>::Error { error: format!("{err:#}") }),
    }
}

fn capture(daemon: &Arc<Daemon>, mut stream: UnixStream, name: &str, snap: u32) -> io::Result<()> {
    let watch = Arc::new(Capture::new(snap.clamp(64, 1 << 17)));
    let mut found = Err("there is no such port; 'tombolo net ports' lists them");
    let edited = daemon.switch().edit(|ports| {
        if let Some(a) = ports.iter_mut().find(|a| a.port.name() == name) {
            found = match a.capture {
                Some(_) => Err("another capture of this port is running"),
                None => {
                    a.capture = Some(watch.clone());
                    Ok(())
                }
            };
        }
    });
    if let Err(why) = edited.map_err(|d| d.to_string()).and_then(|()| found.map_err(Into::into)) {
        return reply(&stream, &Answer::<Done>::Error { error: format!("port {name}: {why}") });
    }
    let result = stream_capture(daemon, &mut stream, name, &watch);
    // The same ports without this capture contain no duplicate.
    let _never = daemon.switch().edit(|ports| {
        for a in ports {
            if a.capture.as_ref().is_some_and(|c| Arc::ptr_eq(c, &watch)) {
                a.capture = None;
            }
        }
    });
    result
}

fn stream_capture(daemon: &Daemon, stream: &mut UnixStream, name: &str, watch: &Capture) -> io::Result<()> {
    reply(stream, &Answer::Value(Done { ok: true }))?;
    stream.write_all(&watch.preamble(name))?;
    let mut spare = Vec::new();
    // The reader ends the capture by closing its sending side.
    stream.set_read_timeout(Some(CAPTURE_EVERY))?;
    loop {
        watch.drain(stream, &mut spare)?;
        let ended = match stream.read(&mut [0; 16]) {
            Ok(_) => true,
            Err(err) if matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => false,
            Err(err) => return Err(err),
        };
        let view = daemon.switch().view();
        let is_there = |c: &Arc<Capture>| std::ptr::eq(&raw const **c, watch);
        let gone = !view.ports().iter().any(|a| a.capture.as_ref().is_some_and(is_there));
        if ended || gone || daemon.is_stopping() {
            watch.drain(stream, &mut spare)?;
            return stream.write_all(&watch.statistics());
        }
    }
}

/// Sends a request to the switch at `socket`; returns its answer and the connection, for data that follows the answer.
///
/// # Errors
/// No process listens there, or the switch refuses.
pub fn ask<T: DeserializeOwned>(
    socket: &Path,
    request: &Request,
) -> anyhow::Result<(T, BufReader<UnixStream>)> {
    tombolo_control::socket::ask::<Answer<T>>(
        socket,
        request,
        None,
        ("switch", "start one with 'tombolo net run'"),
    )
}
