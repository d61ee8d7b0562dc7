// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU guest agent: one request at a time over the VM's virtio-serial port, typed by the crate `qapi`. After a reply
//! that did not come in time the connection is brought back in step with `guest-sync-delimited`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use qapi::{Command, Execute, qga};
use serde_json::Value;

/// A reply longer than this is not waited for (the agent itself captures at most 16 MiB, in base64).
const REPLY_MAX: usize = 64 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent said no.
    #[error("the guest agent refused {command}: {message}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The agent's words.
        message: String,
    },
    /// No reply in time.
    #[error("the guest agent did not answer {command} within {} s", limit.as_secs())]
    Silent {
        /// The command.
        command: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// QEMU is gone.
    #[error("the VM has ended")]
    Ended,
    /// A reply of another shape.
    #[error("the guest agent's reply to {command} is not understood: {message}")]
    Shape {
        /// The command.
        command: &'static str,
        /// What is wrong.
        message: String,
    },
}

/// The agent of one VM.
#[derive(Debug)]
pub struct Agent {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    socket: UnixStream,
    buffer: Vec<u8>,
    in_step: bool,
    next: u32,
}

impl Agent {
    /// An agent behind `socket`, which need not be there yet.
    pub fn new(socket: UnixStream) -> Agent {
        Agent { inner: Mutex::new(Inner { socket, buffer: Vec::new(), in_step: false, next: 1 }) }
    }

    /// Sends one request and waits at most `limit` for its reply.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn call<C: Command>(&self, command: C, limit: Duration) -> Result<C::Ok, Error> {
        let shape = |message: String| Error::Shape { command: C::NAME, message };
        let text = serde_json::to_vec(&Execute::<C>::from(command)).map_err(|e| shape(e.to_string()))?;
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = inner.call(C::NAME, text, limit)?;
        drop(inner);
        if let Some(error) = reply.get("error") {
            let message = error["desc"].as_str().unwrap_or("no reason given").to_owned();
            return Err(Error::Refused { command: C::NAME, message });
        }
        let value = reply.get("return").cloned().ok_or_else(|| shape(reply.to_string()))?;
        serde_json::from_value(value).map_err(|e| shape(e.to_string()))
    }

    /// Whether the agent answers within `limit`.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn ping(&self, limit: Duration) -> Result<(), Error> {
        self.call(qga::guest_ping {}, limit).map(|_| ())
    }
}

impl Inner {
    fn call(&mut self, command: &'static str, text: Vec<u8>, limit: Duration) -> Result<Value, Error> {
        let deadline = Instant::now() + limit;
        let timed = |e: Error| match e {
            Error::Silent { .. } => Error::Silent { command, limit },
            e => e,
        };
        if !self.in_step {
            self.synchronize(deadline).map_err(timed)?;
        }
        // Until the reply is read completely the connection is out of step.
        self.in_step = false;
        self.send(text)?;
        let line = self.line(command, deadline).map_err(timed)?;
        self.in_step = true;
        serde_json::from_slice(&line).map_err(|e| Error::Shape { command, message: e.to_string() })
    }

    /// Sends a sentinel byte and a number, and throws away everything up to the reply with that number.
    fn synchronize(&mut self, deadline: Instant) -> Result<(), Error> {
        const SYNC: &str = "guest-sync-delimited";
        self.next = self.next.wrapping_add(1);
        let id = i64::from(self.next) << 20 | i64::from(std::process::id() & 0xf_ffff);
        let command = qga::guest_sync_delimited { id };
        let mut text = vec![0xff];
        let json = serde_json::to_vec(&Execute::<qga::guest_sync_delimited>::from(command));
        text.extend(json.map_err(|e| Error::Shape { command: SYNC, message: e.to_string() })?);
        self.send(text)?;
        loop {
            let line = self.line(SYNC, deadline)?;
            let Some(after) = line.iter().rposition(|&b| b == 0xff) else { continue };
            if serde_json::from_slice::<Value>(&line[after + 1..]).is_ok_and(|v| v["return"] == id) {
                self.in_step = true;
                return Ok(());
            }
        }
    }

    fn send(&mut self, mut text: Vec<u8>) -> Result<(), Error> {
        text.push(b'\n');
        self.socket.write_all(&text).map_err(|_| Error::Ended)
    }

    fn line(&mut self, command: &'static str, deadline: Instant) -> Result<Vec<u8>, Error> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&b| b == b'\n') {
                let rest = self.buffer.split_off(searched + end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                return Ok(line);
            }
            searched = self.buffer.len();
            if searched > REPLY_MAX {
                self.buffer.clear();
                return Err(Error::Shape { command, message: format!("longer than {REPLY_MAX} bytes") });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Silent { command, limit: Duration::ZERO });
            }
            self.socket.set_read_timeout(Some(left)).map_err(|_| Error::Ended)?;
            let mut chunk = [0; 64 << 10];
            match self.socket.read(&mut chunk) {
                Ok(0) => return Err(Error::Ended),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Error::Ended),
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    /// An agent whose guest is `serve`: it gets each request but the synchronizing ones, and answers with a "return"
    /// value, or not at all.
    pub(crate) fn fake(mut serve: impl FnMut(&str, &Value) -> Option<Value> + Send + 'static) -> Agent {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            let mut reader = BufReader::new(theirs);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
                let start = line.iter().rposition(|&b| b == 0xff).map_or(0, |p| p + 1);
                let request: Value = serde_json::from_slice(&line[start..]).unwrap();
                line.clear();
                let name = request["execute"].as_str().unwrap();
                let mut reply = Vec::new();
                let value = if name == "guest-sync-delimited" {
                    reply.push(0xff);
                    Some(request["arguments"]["id"].clone())
                } else {
                    serve(name, &request["arguments"])
                };
                let Some(value) = value else { continue };
                let reply_json = match value.get("refuse") {
                    Some(desc) => serde_json::json!({"error": {"class": "GenericError", "desc": desc}}),
                    None => serde_json::json!({ "return": value }),
                };
                reply.extend(format!("{reply_json}\n").into_bytes());
                if writer.write_all(&reply).is_err() {
                    return;
                }
            }
        });
        Agent::new(ours)
    }

    #[test]
    fn a_request_that_is_refused_carries_the_agents_words() {
        let agent = fake(|_, _| Some(serde_json::json!({"refuse": "no such file"})));
        let e = agent.ping(Duration::from_secs(60)).unwrap_err();
        assert_eq!(e.to_string(), "the guest agent refused guest-ping: no such file");
    }

    #[test]
    fn a_late_reply_is_not_taken_for_the_next_one() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let agent = Agent::new(ours);
        let guest = std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            let mut lines = BufReader::new(theirs).split(b'\n').map(Result::unwrap);
            let sync = |line: Vec<u8>| -> Vec<u8> {
                let request: Value = serde_json::from_slice(&line[1..]).unwrap();
                let mut reply = vec![0xff];
                reply.extend(format!("{{\"return\": {}}}\n", request["arguments"]["id"]).into_bytes());
                reply
            };
            let first = lines.next().unwrap();
            writer.write_all(&sync(first)).unwrap();
            lines.next().unwrap(); // the request that gets no answer in time
            let again = lines.next().unwrap();
            writer.write_all(b"{\"return\": {\"late\": true}}\n").unwrap();
            writer.write_all(&sync(again)).unwrap();
            lines.next().unwrap();
            writer.write_all(b"{\"return\": 42}\n").unwrap();
        });
        let open = || qga::guest_file_open { path: "/x".into(), mode: None };
        let late = agent.call(open(), Duration::from_millis(50)).unwrap_err();
        assert!(matches!(late, Error::Silent { command: "guest-file-open", .. }), "{late}");
        assert_eq!(agent.call(open(), Duration::from_secs(60)).unwrap(), 42);
        guest.join().unwrap();
    }

    #[test]
    fn the_end_of_the_vm_ends_the_wait() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(matches!(Agent::new(ours).ping(Duration::from_secs(3600)), Err(Error::Ended)));
    }
}
