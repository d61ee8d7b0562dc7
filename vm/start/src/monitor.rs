// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The narrow view of QMP that growing needs, and a client for QEMU's own socket.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;

/// Why a monitor did not answer as wished.
#[derive(Debug, Error)]
pub enum MonitorError {
    /// QEMU has ended or closed the socket.
    #[error("QEMU has ended")]
    Gone,
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command.
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

impl From<io::Error> for MonitorError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                Self::Gone
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Late,
            _ => Self::Transport(error.to_string()),
        }
    }
}

/// A QMP monitor of one VM.
pub trait Monitor {
    /// Runs a command and returns its result.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError>;
    /// Waits until something happened in the VM or the time is over; which does not matter, the caller looks again.
    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError>;
    /// How long the guest's user space has been there, where that is known: its drivers are loaded then.
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

/// Whether the guest's driver runs the device `id`; None where this QEMU cannot tell (before 7.2, or another id scheme).
pub fn driver_runs(monitor: &mut dyn Monitor, id: &str) -> Option<bool> {
    let path = format!("/machine/peripheral/{id}/virtio-backend");
    let status = monitor.execute("x-query-virtio-status", json!({"path": path})).ok()?;
    let words = status["status"]["statuses"].as_array()?;
    Some(words.iter().filter_map(Value::as_str).any(|word| word.starts_with("VIRTIO_CONFIG_S_DRIVER_OK")))
}

/// A client of a QMP socket.
pub struct Socket {
    reader: BufReader<UnixStream>,
    line: Vec<u8>,
    events: VecDeque<Value>,
}

impl Socket {
    /// Connects and leaves the negotiation mode. `patience` bounds the answer to every command from now on.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, MonitorError> {
        let stream = UnixStream::connect(path)
            .map_err(|e| MonitorError::Transport(format!("connecting to {}: {e}", path.display())))?;
        Self::over(stream, patience)
    }

    /// The same over a connection that is there.
    pub fn over(stream: UnixStream, patience: Duration) -> Result<Self, MonitorError> {
        stream.set_read_timeout(Some(patience))?;
        let mut socket = Self { reader: BufReader::new(stream), line: Vec::new(), events: VecDeque::new() };
        socket.read()?;
        socket.execute("qmp_capabilities", json!({}))?;
        Ok(socket)
    }

    /// Events that came so far, oldest first.
    pub fn take_events(&mut self) -> Vec<Value> {
        self.events.drain(..).collect()
    }

    fn read(&mut self) -> Result<Value, MonitorError> {
        // A line that a time-out cut in two goes on here.
        if self.reader.read_until(b'\n', &mut self.line)? == 0 {
            return Err(MonitorError::Gone);
        }
        let value = serde_json::from_slice(&self.line).map_err(|e| MonitorError::Transport(e.to_string()));
        self.line.clear();
        value
    }

    /// At most this many events are kept; older ones are dropped.
    const KEPT: usize = 1024;

    fn keep(&mut self, event: Value) {
        if self.events.len() == Self::KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

impl Monitor for Socket {
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        let line = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        self.reader.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut answer = self.read()?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(reason) = answer["error"]["desc"].as_str() {
                return Err(MonitorError::Refused { command: command.into(), reason: reason.into() });
            }
            self.keep(answer);
        }
    }

    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError> {
        let before = self.reader.get_ref().read_timeout()?;
        self.reader.get_ref().set_read_timeout(Some(longest.max(Duration::from_millis(1))))?;
        let result = match self.read() {
            Ok(event) => {
                self.keep(event);
                Ok(())
            }
            Err(MonitorError::Late) => Ok(()),
            Err(error) => Err(error),
        };
        self.reader.get_ref().set_read_timeout(before)?;
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn server(answers: Vec<&'static str>) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            reader.get_mut().write_all(b"{\"QMP\": {}}\n").unwrap();
            for answer in answers {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                reader.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        (folder, path)
    }

    #[test]
    fn events_between_command_and_answer_are_kept_for_later() {
        let (_folder, path) = server(vec!["{\"return\": {}}\n", "{\"event\": \"RESET\"}\n{\"return\": 5}\n"]);
        let mut socket = Socket::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(socket.execute("x", json!({})).unwrap(), json!(5));
        assert_eq!(socket.take_events(), vec![json!({"event": "RESET"})]);
        assert!(matches!(socket.execute("x", json!({})), Err(MonitorError::Gone)));
    }

    #[test]
    fn an_error_names_the_command_and_the_reason() {
        let (_folder, path) = server(vec!["{\"return\": {}}\n", "{\"error\": {\"desc\": \"no\"}}\n"]);
        let mut socket = Socket::connect(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(socket.execute("stop", json!({})).unwrap_err().to_string(), "QEMU refused stop: no");
    }
}
