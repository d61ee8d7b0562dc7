// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The narrow view of QEMU's monitor that growing memory needs, and that view of a monitor's socket.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;
use tombolo_qemu::qmp::{self, Qmp};

/// Why a monitor did not answer as wished.
#[derive(Debug, Error)]
pub enum MonitorError {
    /// QEMU has ended or closed the socket.
    #[error("QEMU has ended")]
    Gone,
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The refused command's name.
        command: String,
        /// QEMU's reason.
        reason: String,
    },
    /// No answer within the time allowed.
    #[error("QEMU did not answer in time")]
    Late,
    /// The transport failed.
    #[error("the monitor cannot be reached: {0}")]
    Transport(String),
}

impl From<qmp::Error> for MonitorError {
    fn from(error: qmp::Error) -> Self {
        match error {
            qmp::Error::Ended => Self::Gone,
            qmp::Error::Silent { .. } | qmp::Error::Behind { .. } => Self::Late,
            qmp::Error::Refused { command, message } => {
                Self::Refused { command: command.into(), reason: message }
            }
            other => Self::Transport(other.to_string()),
        }
    }
}

/// A QMP monitor of one VM.
pub trait Monitor {
    /// Runs a command and returns its result.
    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError>;
    /// Waits until something happened in the VM or the time is over; which does not matter, the caller looks again.
    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError>;
    /// The time since the guest's user space began, if it is known: its drivers are loaded then.
    fn ready_for(&self) -> Option<Duration> {
        None
    }
}

/// State of a virtio-mem device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plugged {
    /// Bytes the guest has.
    pub size: u64,
    /// Bytes it was offered.
    pub requested: u64,
}

/// Asks for the state of the virtio-mem device `id`.
pub fn plugged(monitor: &mut dyn Monitor, id: &str) -> Result<Plugged, MonitorError> {
    let devices = monitor.execute("query-memory-devices", json!({}))?;
    let found =
        devices.as_array().into_iter().flatten().find(|d| d["type"] == "virtio-mem" && d["data"]["id"] == id);
    let number = |name: &str| found.and_then(|d| d["data"][name].as_u64());
    match (number("size"), number("requested-size")) {
        (Some(size), Some(requested)) => Ok(Plugged { size, requested }),
        _ => Err(MonitorError::Refused {
            command: "query-memory-devices".into(),
            reason: format!("this VM has no virtio-mem device named {id}: {devices}"),
        }),
    }
}

/// Offers the guest `bytes` in all on the virtio-mem device `id`.
pub fn request(monitor: &mut dyn Monitor, id: &str, bytes: u64) -> Result<(), MonitorError> {
    let path = format!("/machine/peripheral/{id}");
    monitor
        .execute("qom-set", json!({"path": path, "property": "requested-size", "value": bytes}))
        .map(|_| ())
}

/// Returns whether the guest's driver runs the device `id`; None where this QEMU cannot tell (before 7.2, or another id scheme).
pub fn driver_runs(monitor: &mut dyn Monitor, id: &str) -> Option<bool> {
    let path = format!("/machine/peripheral/{id}/virtio-backend");
    let status = monitor.execute("x-query-virtio-status", json!({"path": path})).ok()?;
    let words = status["status"]["statuses"].as_array()?;
    Some(words.iter().filter_map(Value::as_str).any(|word| word.starts_with("VIRTIO_CONFIG_S_DRIVER_OK")))
}

/// A monitor at a socket of QEMU's.
#[derive(Debug)]
pub struct Socket {
    qmp: Qmp,
    /// One message per event; the channel ends with the connection.
    events: Receiver<()>,
    limit: Duration,
}

impl Socket {
    /// Connects and leaves the negotiation mode. `limit` bounds the greeting and the reply to every command.
    ///
    /// # Errors
    /// Nothing listens at `path`, or it is no QEMU.
    pub fn connect(path: &Path, limit: Duration) -> Result<Self, MonitorError> {
        let stream = UnixStream::connect(path)
            .map_err(|e| MonitorError::Transport(format!("connecting to {}: {e}", path.display())))?;
        Self::over(stream, limit)
    }

    /// As [`Socket::connect`], over a connected stream.
    ///
    /// # Errors
    /// See [`Socket::connect`].
    pub fn over(stream: UnixStream, limit: Duration) -> Result<Self, MonitorError> {
        let (sender, events) = channel();
        let mut sender = Some(sender);
        let qmp = Qmp::connect_within(stream, limit, move |name, _| {
            // The empty name stands for the connection's end.
            let received = sender.as_ref().is_some_and(|s| !name.is_empty() && s.send(()).is_ok());
            if !received {
                sender = None;
            }
        })?;
        Ok(Self { qmp, events, limit })
    }
}

impl Monitor for Socket {
    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError> {
        Ok(self.qmp.execute_value_within(command, &arguments, self.limit)?)
    }

    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError> {
        match self.events.recv_timeout(longest) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(MonitorError::Gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// A QEMU that replies to each command with the next of `answers`, in which ID stands for the command's id; then it ends.
    fn server(answers: Vec<&'static str>) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            reader.get_mut().write_all(b"{\"QMP\": {}}\n").unwrap();
            for answer in ["{\"return\": {}, \"id\": ID}"].iter().chain(&answers) {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let id = serde_json::from_str::<Value>(&line).unwrap()["id"].to_string();
                writeln!(reader.get_mut(), "{}", answer.replace("ID", &id)).unwrap();
            }
        });
        (folder, path)
    }

    #[test]
    fn an_event_before_the_reply_ends_the_next_wait_and_qemus_end_every_wait() {
        let (_folder, path) = server(vec!["{\"event\": \"RESET\"}\n{\"return\": 5, \"id\": ID}"]);
        let mut socket = Socket::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(socket.execute("x", json!({})).unwrap(), json!(5));
        socket.wait(Duration::from_secs(3600)).unwrap();
        assert!(matches!(socket.wait(Duration::from_secs(3600)), Err(MonitorError::Gone)));
        assert!(matches!(socket.execute("x", json!({})), Err(MonitorError::Gone)));
    }

    #[test]
    fn an_error_names_the_command_and_the_reason() {
        let (_folder, path) = server(vec!["{\"error\": {\"desc\": \"no\"}, \"id\": ID}"]);
        let mut socket = Socket::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(socket.execute("stop", json!({})).unwrap_err().to_string(), "QEMU refused stop: no");
    }
}
