// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's monitor: commands typed by the crate `qapi`, over a socket that can carry file descriptors. One thread reads: it
//! hands each reply to the one caller that waits and each event to a callback.

use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use qapi::{Command, Execute, qmp};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;

/// How long QEMU may take for one command; device_add with much memory is the slowest.
const REPLY: Duration = Duration::from_secs(60);

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// QEMU said no.
    #[error("QEMU refused {command}: {message}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        message: String,
    },
    /// No reply.
    #[error("QEMU gave no reply to {command} within {} s", REPLY.as_secs())]
    Silent {
        /// The command.
        command: &'static str,
    },
    /// The connection is gone.
    #[error("QEMU has ended")]
    Ended,
    /// A reply of another shape.
    #[error("QEMU's reply to {command} is not understood: {message}")]
    Shape {
        /// The command.
        command: &'static str,
        /// What the parser said.
        message: String,
    },
}

/// A connection to one QEMU, past its greeting.
#[derive(Debug)]
pub struct Qmp {
    socket: UnixStream,
    replies: Mutex<mpsc::Receiver<Value>>,
}

impl Qmp {
    /// Does the handshake on `socket`; `event` gets each event's name and data, on the reading thread, and once ("", null)
    /// at the connection's end.
    ///
    /// # Errors
    /// When QEMU ends or says something else than a greeting.
    pub fn connect(
        socket: UnixStream,
        mut event: impl FnMut(&str, &Value) + Send + 'static,
    ) -> Result<Qmp, Error> {
        let reader = socket.try_clone().map_err(|_| Error::Ended)?;
        let (sender, replies) = mpsc::channel();
        std::thread::Builder::new()
            .name("qmp".into())
            .spawn(move || {
                for line in BufReader::new(reader).lines().map_while(Result::ok) {
                    let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
                    if let Some(name) = value["event"].as_str() {
                        event(name, &value["data"]);
                    } else if sender.send(value).is_err() {
                        break;
                    }
                }
                event("", &Value::Null);
            })
            .map_err(|_| Error::Ended)?;
        let qmp = Qmp { socket, replies: Mutex::new(replies) };
        {
            let replies = qmp.replies.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let greeting = wait(&replies, "greeting")?;
            if greeting.get("QMP").is_none() {
                return Err(Error::Shape { command: "greeting", message: greeting.to_string() });
            }
        }
        qmp.execute(qmp::qmp_capabilities { enable: None })?;
        Ok(qmp)
    }

    /// Executes one command.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute<C: Command>(&self, command: C) -> Result<C::Ok, Error> {
        self.execute_with(command, None)
    }

    /// Executes one command that carries a file descriptor (`add-fd`, `getfd`).
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_with<C: Command>(&self, command: C, fd: Option<BorrowedFd<'_>>) -> Result<C::Ok, Error> {
        let shape = |message: String| Error::Shape { command: C::NAME, message };
        let text = serde_json::to_vec(&Execute::<C>::from(command)).map_err(|e| shape(e.to_string()))?;
        self.raw(C::NAME, text, fd).and_then(|v| serde_json::from_value(v).map_err(|e| shape(e.to_string())))
    }

    /// Executes a command given by name and arguments, for what `qapi` has no exact type for.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_value(&self, name: &'static str, arguments: &Value) -> Result<Value, Error> {
        let text = serde_json::json!({ "execute": name, "arguments": arguments });
        self.raw(name, text.to_string().into_bytes(), None)
    }

    fn raw(&self, name: &'static str, mut text: Vec<u8>, fd: Option<BorrowedFd<'_>>) -> Result<Value, Error> {
        // Held until the reply is there: replies come in the order of the commands, one at a time.
        let replies = self.replies.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        text.push(b'\n');
        send(&self.socket, &text, fd).map_err(|_| Error::Ended)?;
        let reply = wait(&replies, name)?;
        if let Some(error) = reply.get("error") {
            let message = error["desc"].as_str().unwrap_or("no reason given").to_owned();
            return Err(Error::Refused { command: name, message });
        }
        Ok(reply["return"].clone())
    }
}

fn wait(replies: &mpsc::Receiver<Value>, command: &'static str) -> Result<Value, Error> {
    replies.recv_timeout(REPLY).map_err(|e| match e {
        mpsc::RecvTimeoutError::Timeout => Error::Silent { command },
        mpsc::RecvTimeoutError::Disconnected => Error::Ended,
    })
}

/// Writes all of `data`; `fd`, if any, travels with its first byte.
///
/// # Errors
/// Those of sendmsg.
pub fn send(socket: &UnixStream, data: &[u8], fd: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    let mut sent = 0;
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    while sent < data.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(std::io::Error::other("no room for a file descriptor"));
        }
        let slice = [IoSlice::new(&data[sent..])];
        match rustix::net::sendmsg(socket.as_fd(), &slice, &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(n) => sent += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::Arc;

    /// A peer that greets and answers each line with the next of `answers`.
    fn fake(answers: &'static [&'static str]) -> (UnixStream, std::thread::JoinHandle<Vec<String>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            writeln!(writer, r#"{{"QMP": {{"version": {{}}, "capabilities": []}}}}"#).unwrap();
            let mut heard = Vec::new();
            let mut lines = BufReader::new(theirs).lines();
            for answer in [r#"{"return": {}}"#].iter().chain(answers) {
                let Some(Ok(line)) = lines.next() else { break };
                heard.push(line);
                writeln!(writer, "{answer}").unwrap();
            }
            heard
        });
        (ours, thread)
    }

    #[test]
    fn replies_and_events_are_told_apart() {
        let (socket, peer) = fake(&[
            "{\"event\": \"RESET\", \"data\": {\"guest\": true}, \"timestamp\": {\"seconds\": 1, \"microseconds\": 2}}\n{\"return\": {\"running\": true, \"singlestep\": false, \"status\": \"running\"}}",
        ]);
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let qmp = Qmp::connect(socket, move |name, data| {
            seen.lock().unwrap().push((name.to_owned(), data.clone()))
        })
        .unwrap();
        assert!(qmp.execute(qmp::query_status {}).unwrap().running);
        assert_eq!(peer.join().unwrap()[1], r#"{"execute":"query-status","arguments":{}}"#);
        let events = events.lock().unwrap();
        assert_eq!(events[0].0, "RESET");
        assert_eq!(events[0].1["guest"], true);
    }

    #[test]
    fn a_refusal_carries_the_words_of_qemu() {
        let (socket, _peer) =
            fake(&[r#"{"error": {"class": "GenericError", "desc": "Bus 'hp9' not found"}}"#]);
        let qmp = Qmp::connect(socket, |_, _| ()).unwrap();
        let error = qmp.execute(qmp::stop {}).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused stop: Bus 'hp9' not found");
    }

    #[test]
    fn the_end_of_qemu_is_an_error_for_who_waits_and_an_event() {
        let (socket, _peer) = fake(&[]);
        let (sender, ended) = mpsc::channel();
        let qmp = Qmp::connect(socket, move |name, _| sender.send(name.to_owned()).unwrap()).unwrap();
        assert!(matches!(qmp.execute(qmp::stop {}), Err(Error::Ended)));
        assert_eq!(ended.recv().unwrap(), "");
    }
}
