// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's monitor: commands typed by the crate `qapi`, over a socket that can carry file descriptors. One thread reads: it
//! hands each reply to the caller that waits for it and each event to a callback.
//!
//! Every command has an id, and QEMU has at most one command at a time. A command whose reply did not come in time is still QEMU's: its late
//! reply is thrown away, and until then no other command is sent, so that nothing (no file descriptor above all) meets a QEMU in a state
//! that its caller does not know.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qapi::{Command, qmp};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde_json::Value;

/// Time for QEMU for one command; device_add with much memory is the slowest.
pub const REPLY: Duration = Duration::from_secs(60);
/// The longest line that is read, in bytes. A longer one ends the connection.
const LINE_MAX: usize = 16 << 20;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// QEMU said no.
    #[error("QEMU refused {command}: {message}")]
    Refused {
        /// The refused command's name.
        command: &'static str,
        /// QEMU's words.
        message: String,
    },
    /// No reply in time; QEMU may carry the command out later.
    #[error("QEMU gave no reply to {command} within {} s", limit.as_secs())]
    Silent {
        /// The name of the command that has no reply.
        command: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// An earlier command has no reply yet. This one was not sent.
    #[error("QEMU still owes the reply to {owed}, so {command} was not sent")]
    Behind {
        /// The name of the command that was not sent.
        command: &'static str,
        /// The earlier command.
        owed: &'static str,
    },
    /// The connection is gone.
    #[error("QEMU has ended")]
    Ended,
    /// A reply of another shape.
    #[error("QEMU's reply to {command} is not understood: {message}")]
    Shape {
        /// The name of the command whose reply it is.
        command: &'static str,
        /// The parser's error.
        message: String,
    },
}

/// A connection to one QEMU, past its greeting.
#[derive(Debug)]
pub struct Qmp {
    socket: UnixStream,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Ids used so far. The greeting counts as the reply to command 0.
    ids: u64,
    /// The command that QEMU has: its id and name.
    owed: Option<(u64, &'static str)>,
    /// The sender of that command waits no longer.
    given_up: bool,
    /// Replies whose senders have not taken them yet: the next command may be sent, and answered, before they wake up.
    replies: BTreeMap<u64, Value>,
    /// The process that has sent the greeting.
    sender: Option<u32>,
    ended: bool,
}

impl State {
    /// A command is sent: its id.
    fn begin(&mut self, name: &'static str) -> u64 {
        self.ids += 1;
        (self.owed, self.given_up) = (Some((self.ids, name)), false);
        self.ids
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits, at most until `deadline`, as long as `waits` holds and QEMU is there.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Instant,
        waits: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(state, left, |s| !s.ended && waits(s));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Reads until the connection's end.
    fn read(&self, socket: &UnixStream, event: &mut impl FnMut(&str, &Value)) {
        // A thread per VM has one: a message that is longer comes in several.
        let mut chunk = [0; 4096];
        let mut unread = Vec::new();
        loop {
            match self.read_some(socket, &mut chunk) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(n) if n > 0 => unread.extend_from_slice(&chunk[..n]),
                _ => break,
            }
            self.pass_on(&mut unread, event);
            if unread.len() > LINE_MAX {
                break;
            }
        }
        self.lock().ended = true;
        self.changed.notify_all();
        event("", &Value::Null);
    }

    /// Reads, and notes the sender of the greeting.
    fn read_some(&self, mut socket: &UnixStream, chunk: &mut [u8]) -> std::io::Result<usize> {
        if self.lock().owed.is_none_or(|(id, _)| id > 0) {
            return socket.read(chunk);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received =
            rustix::net::recvmsg(socket, &mut [IoSliceMut::new(chunk)], &mut ancillary, RecvFlags::empty())?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmCredentials(sender) = message {
                self.lock().sender = Some(sender.pid.as_raw_nonzero().get().unsigned_abs());
            }
        }
        Ok(received.bytes)
    }

    /// Passes whole lines on.
    fn pass_on(&self, unread: &mut Vec<u8>, event: &mut impl FnMut(&str, &Value)) {
        let Some(end) = unread.iter().rposition(|&b| b == b'\n') else { return };
        let rest = unread.split_off(end + 1);
        for line in std::mem::replace(unread, rest).split(|&b| b == b'\n') {
            let Ok(value) = serde_json::from_slice::<Value>(line) else { continue };
            match value["event"].as_str() {
                Some(name) => event(name, &value["data"]),
                None => self.answered(value),
            }
        }
    }

    fn answered(&self, value: Value) {
        let id = if value.get("QMP").is_some() { Some(0) } else { value["id"].as_u64() };
        let mut state = self.lock();
        if let Some((owed, _)) = state.owed.filter(|(owed, _)| Some(*owed) == id) {
            state.owed = None;
            if !state.given_up {
                state.replies.insert(owed, value);
            }
            self.changed.notify_all();
        }
    }
}

impl Qmp {
    /// Does the handshake on `socket`; `event` gets each event's name and data, on the reading thread, and once ("", null)
    /// at the connection's end.
    ///
    /// # Errors
    /// When QEMU ends or says something else than a greeting.
    pub fn connect(
        socket: UnixStream,
        event: impl FnMut(&str, &Value) + Send + 'static,
    ) -> Result<Qmp, Error> {
        Self::connect_within(socket, REPLY, event)
    }

    /// As [`Qmp::connect`], with a limit for the greeting: a QEMU that touches all of its memory first is long in coming.
    ///
    /// # Errors
    /// See [`Qmp::connect`].
    pub fn connect_within(
        socket: UnixStream,
        limit: Duration,
        event: impl FnMut(&str, &Value) + Send + 'static,
    ) -> Result<Qmp, Error> {
        let state = State { owed: Some((0, "greeting")), ..State::default() };
        let qmp = Qmp::begin(socket, state, event)?;
        qmp.reply(0, "greeting", Instant::now() + limit, limit)?;
        qmp.execute(qmp::qmp_capabilities { enable: None })?;
        Ok(qmp)
    }

    /// Goes on with a connection that an earlier manager of this QEMU has had: late replies to it are thrown away, and events that came meanwhile are told.
    ///
    /// # Errors
    /// When no thread or descriptor can be had.
    pub fn resume(
        socket: UnixStream,
        event: impl FnMut(&str, &Value) + Send + 'static,
    ) -> Result<Qmp, Error> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        // Larger than any of the earlier manager's, who counted from its own time.
        let ids = u64::try_from(now.as_micros()).unwrap_or(u64::MAX / 2);
        Qmp::begin(socket, State { ids, ..State::default() }, event)
    }

    fn begin(
        socket: UnixStream,
        state: State,
        mut event: impl FnMut(&str, &Value) + Send + 'static,
    ) -> Result<Qmp, Error> {
        let reader = socket.try_clone().map_err(|_| Error::Ended)?;
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let own = shared.clone();
        std::thread::Builder::new()
            .name("qmp".into())
            .spawn(move || own.read(&reader, &mut event))
            .map_err(|_| Error::Ended)?;
        Ok(Qmp { socket, shared })
    }

    /// The process that has sent the greeting, where the socket was [made ready](ask_for_sender) to tell.
    pub fn sender(&self) -> Option<u32> {
        self.shared.lock().sender
    }

    /// Executes one command.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute<C: Command>(&self, command: C) -> Result<C::Ok, Error> {
        self.execute_with(command, None, REPLY)
    }

    /// Executes one command and waits at most `limit` for its reply.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_within<C: Command>(&self, command: C, limit: Duration) -> Result<C::Ok, Error> {
        self.execute_with(command, None, limit)
    }

    /// Executes one command that carries a file descriptor (`add-fd`, `getfd`).
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_with<C: Command>(
        &self,
        command: C,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<C::Ok, Error> {
        let shape = |message: String| Error::Shape { command: C::NAME, message };
        let arguments = serde_json::to_value(&command).map_err(|e| shape(e.to_string()))?;
        let value = self.raw(C::NAME, &arguments, fd, limit)?;
        serde_json::from_value(value).map_err(|e| shape(e.to_string()))
    }

    /// Executes a command given by name and arguments, for what `qapi` has no exact type for.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_value(&self, name: &'static str, arguments: &Value) -> Result<Value, Error> {
        self.execute_value_within(name, arguments, REPLY)
    }

    /// As [`Qmp::execute_value`]; waits at most `limit` for the reply.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn execute_value_within(
        &self,
        name: &'static str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, Error> {
        self.raw(name, arguments, None, limit)
    }

    fn raw(
        &self,
        name: &'static str,
        arguments: &Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, Error> {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.wait(self.shared.lock(), deadline, |s| s.owed.is_some());
        match state.owed {
            _ if state.ended => return Err(Error::Ended),
            Some((_, owed)) => return Err(Error::Behind { command: name, owed }),
            None => {}
        }
        let id = state.begin(name);
        let command = serde_json::json!({ "execute": name, "arguments": arguments, "id": id });
        let mut text = command.to_string().into_bytes();
        text.push(b'\n');
        // QEMU has read all earlier commands, so that one fits into the socket without a wait.
        send(&self.socket, &text, fd).map_err(|_| Error::Ended)?;
        drop(state);
        let reply = self.reply(id, name, deadline, limit)?;
        if let Some(error) = reply.get("error") {
            let message = error["desc"].as_str().unwrap_or("no reason given").to_owned();
            return Err(Error::Refused { command: name, message });
        }
        Ok(reply["return"].clone())
    }

    fn reply(
        &self,
        id: u64,
        command: &'static str,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Value, Error> {
        let mut state = self.shared.wait(self.shared.lock(), deadline, |s| !s.replies.contains_key(&id));
        if let Some(reply) = state.replies.remove(&id) {
            return Ok(reply);
        }
        state.given_up = true;
        if state.ended { Err(Error::Ended) } else { Err(Error::Silent { command, limit }) }
    }
}

/// Has the kernel tell who sends over `socket`; called before QEMU is started.
///
/// # Errors
/// Those of the system.
pub fn ask_for_sender(socket: &UnixStream) -> std::io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_passcred(socket, true)?)
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
    use std::io::{BufRead, BufReader, Write};
    use std::sync::mpsc;

    /// A peer that greets and answers each line with the next of `answers`.
    fn fake(answers: &'static [&'static str]) -> (UnixStream, std::thread::JoinHandle<Vec<String>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            writeln!(writer, r#"{{"QMP": {{"version": {{}}, "capabilities": []}}}}"#).unwrap();
            let mut heard = Vec::new();
            let mut lines = BufReader::new(theirs).lines();
            for answer in [r#"{"return": {}, "id": ID}"#].iter().chain(answers) {
                let Some(Ok(line)) = lines.next() else { break };
                let id = serde_json::from_str::<Value>(&line).unwrap()["id"].to_string();
                heard.push(line);
                writeln!(writer, "{}", answer.replace("ID", &id)).unwrap();
            }
            heard
        });
        (ours, thread)
    }

    #[test]
    fn replies_and_events_are_told_apart() {
        let (socket, peer) = fake(&[
            "{\"event\": \"RESET\", \"data\": {\"guest\": true}, \"timestamp\": {\"seconds\": 1, \"microseconds\": 2}}\n{\"id\": ID, \"return\": {\"running\": true, \"singlestep\": false, \"status\": \"running\"}}",
        ]);
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let qmp = Qmp::connect(socket, move |name, data| {
            seen.lock().unwrap().push((name.to_owned(), data.clone()))
        })
        .unwrap();
        assert!(qmp.execute(qmp::query_status {}).unwrap().running);
        assert_eq!(peer.join().unwrap()[1], r#"{"arguments":{},"execute":"query-status","id":2}"#);
        let events = events.lock().unwrap();
        assert_eq!(events[0].0, "RESET");
        assert_eq!(events[0].1["guest"], true);
    }

    #[test]
    fn a_refusal_carries_the_words_of_qemu() {
        let (socket, _peer) =
            fake(&[r#"{"id": ID, "error": {"class": "GenericError", "desc": "Bus 'hp9' not found"}}"#]);
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

    /// A monitor whose greeting and capabilities are done, and QEMU's end of it.
    fn connected() -> (Qmp, UnixStream, std::io::Lines<BufReader<UnixStream>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut writer = theirs.try_clone().unwrap();
        let mut lines = BufReader::new(theirs).lines();
        let connecting = std::thread::spawn(move || Qmp::connect(ours, |_, _| ()).unwrap());
        writeln!(writer, r#"{{"QMP": {{}}}}"#).unwrap();
        lines.next().unwrap().unwrap();
        writeln!(writer, r#"{{"return": {{}}, "id": 1}}"#).unwrap();
        (connecting.join().unwrap(), writer, lines)
    }

    #[test]
    fn a_reply_waits_for_its_sender_though_the_next_command_is_answered_before_that_wakes_up() {
        let (qmp, mut writer, _lines) = connected();
        let answered = |id: u64, writer: &mut UnixStream| {
            writeln!(writer, r#"{{"return": {id}, "id": {id}}}"#).unwrap();
            let deadline = Instant::now() + REPLY;
            drop(qmp.shared.wait(qmp.shared.lock(), deadline, |s| s.owed.is_some()));
        };
        let ids = ["first", "second"].map(|name| {
            let id = qmp.shared.lock().begin(name);
            answered(id, &mut writer);
            id
        });
        for id in ids {
            let reply = qmp.reply(id, "sent", Instant::now(), Duration::ZERO).unwrap();
            assert_eq!(reply["return"], id);
        }
        assert!(qmp.shared.lock().replies.is_empty());
    }

    #[test]
    fn a_late_reply_is_not_taken_for_the_next_one_and_nothing_is_sent_before_it() {
        let (qmp, mut writer, mut lines) = connected();
        let short = Duration::from_millis(50);
        let late = qmp.execute_with(qmp::add_fd { fdset_id: Some(7), opaque: None }, None, short);
        assert!(matches!(late, Err(Error::Silent { command: "add-fd", .. })), "{late:?}");
        // QEMU still has the first command: the second, which may carry another descriptor, stays here.
        let early = qmp.execute_within(qmp::stop {}, short);
        assert!(matches!(early, Err(Error::Behind { command: "stop", owed: "add-fd" })), "{early:?}");
        assert!(lines.next().unwrap().unwrap().contains("add-fd"));
        std::thread::scope(|scope| {
            let next = scope
                .spawn(|| qmp.execute_with(qmp::add_fd { fdset_id: Some(8), opaque: None }, None, REPLY));
            writeln!(writer, r#"{{"return": {{"fdset-id": 7, "fd": 70}}, "id": 2}}"#).unwrap();
            let line = lines.next().unwrap().unwrap();
            assert!(line.contains(r#""fdset-id":8"#) && line.contains(r#""id":3"#), "{line}");
            // A reply to no question.
            writeln!(writer, r#"{{"return": {{"fdset-id": 6, "fd": 60}}}}"#).unwrap();
            writeln!(writer, r#"{{"return": {{"fdset-id": 7, "fd": 70}}, "id": 2}}"#).unwrap();
            writeln!(writer, r#"{{"return": {{"fdset-id": 8, "fd": 80}}, "id": 3}}"#).unwrap();
            assert_eq!(next.join().unwrap().unwrap().fd, 80);
        });
    }

    #[test]
    fn a_connection_goes_on_in_the_middle_of_a_line_and_of_a_command() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut writer = theirs.try_clone().unwrap();
        let mut lines = BufReader::new(theirs).lines();
        // The manager before has read the begin of the first line, and has sent the command 2.
        writer.write_all(b"ESET\"}\n{\"event\": \"STOP\"}\n{\"return\": {}, \"id\": 2}\n").unwrap();
        let (sender, events) = mpsc::channel();
        let next = Qmp::resume(ours, move |name, _| drop(sender.send(name.to_owned()))).unwrap();
        assert_eq!(events.recv().unwrap(), "STOP");
        std::thread::scope(|scope| {
            let command = scope.spawn(|| next.execute(qmp::cont {}));
            let sent: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            assert!(sent["id"].as_u64().unwrap() > 1 << 40, "{sent}");
            writeln!(writer, "{}", serde_json::json!({ "return": {}, "id": sent["id"] })).unwrap();
            command.join().unwrap().unwrap();
        });
    }
}
