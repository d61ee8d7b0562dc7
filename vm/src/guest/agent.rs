// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU guest agent: one request at a time over the VM's virtio-serial port, typed by the crate `qapi`. After a reply
//! that did not come in time the connection is brought back in step with `guest-sync-delimited`.
//!
//! The agent is the guest's, so nothing that it says is believed or kept: each command has a longest reply, and a reply is parsed straight
//! into the command's own type, without what that has no field for.
//!
//! A stop of the VM [retires](Agent::retire) the agent: requests that wait or run fail at once, and only those of the stop are sent.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qapi::{Command, Execute, qga};
use serde::Deserialize;

use crate::project::state::random_hex;

/// The longest reply to guest-file-read in bytes: a read of 1 MiB in base64, with room.
const LONG_REPLY: usize = 2 << 20;
/// The longest reply to any other command, in bytes: what a short script says.
const REPLY: usize = 256 << 10;
/// The pause between two checks whether the agent was retired.
const LOOK: Duration = Duration::from_millis(100);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent said no.
    #[error("the guest agent refused {command}: {message}")]
    Refused {
        command: &'static str,
        /// The agent's words.
        message: String,
    },
    /// No reply in time.
    #[error("the guest agent did not answer {command} within {} s", limit.as_secs())]
    Silent {
        command: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// Other requests took all the time.
    #[error("the guest agent was busy for {} s, so {command} was not sent", limit.as_secs())]
    Busy {
        command: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The agent was retired.
    #[error("the VM is being stopped")]
    Retired,
    /// QEMU is gone.
    #[error("the VM has ended")]
    Ended,
    /// A reply of another shape.
    #[error("the guest agent's reply to {command} is not understood: {message}")]
    Shape { command: &'static str, message: String },
}

/// A sender of requests to an agent.
pub trait Calls {
    /// Sends one request and waits at most `limit` for its turn and its reply.
    ///
    /// # Errors
    /// See [`Error`].
    fn call<C: Command>(&self, command: C, limit: Duration) -> Result<C::Ok, Error>;
}

/// The agent of one VM.
#[derive(Debug)]
pub struct Agent {
    /// None: a request has it.
    line: Mutex<Option<Line>>,
    freed: Condvar,
    retired: AtomicBool,
    /// When the request was begun that has no answer yet.
    asked: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Line {
    socket: UnixStream,
    buffer: Vec<u8>,
    in_step: bool,
    /// The number of the last synchronization. It begins anywhere: a late reply to an earlier manager has another one.
    next: u32,
}

/// The last requests to an agent.
#[derive(Debug)]
pub struct Farewell<'a>(&'a Agent);

impl Calls for Agent {
    fn call<C: Command>(&self, command: C, limit: Duration) -> Result<C::Ok, Error> {
        self.call_until(command, limit, &|| self.retired.load(Ordering::Acquire))
    }
}

impl Calls for Farewell<'_> {
    fn call<C: Command>(&self, command: C, limit: Duration) -> Result<C::Ok, Error> {
        self.0.call_until(command, limit, &|| false)
    }
}

impl Agent {
    /// An agent behind `socket`, which need not be there yet.
    pub fn new(socket: UnixStream) -> Agent {
        let line = Line { socket, buffer: Vec::new(), in_step: false, next: any_number() };
        let (line, freed) = (Mutex::new(Some(line)), Condvar::new());
        Agent { line, freed, retired: AtomicBool::new(false), asked: Mutex::default() }
    }

    /// Returns whether the agent answers within `limit`.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn ping(&self, limit: Duration) -> Result<(), Error> {
        self.call(qga::guest_ping {}, limit).map(|_| ())
    }

    /// Requests fail from now on, also those that wait; what is returned sends the last ones.
    pub fn retire(&self) -> Farewell<'_> {
        self.retired.store(true, Ordering::Release);
        Farewell(self)
    }

    fn call_until<C: Command>(
        &self,
        command: C,
        limit: Duration,
        over: &dyn Fn() -> bool,
    ) -> Result<C::Ok, Error> {
        let shape = |message: String| Error::Shape { command: C::NAME, message };
        let text = serde_json::to_vec(&Execute::<C>::from(command)).map_err(|e| shape(e.to_string()))?;
        let deadline = Instant::now() + limit;
        let mut line = self.take(C::NAME, limit, deadline, over)?;
        self.asked().get_or_insert_with(Instant::now);
        let reply = line.call(C::NAME, text, &Wait { limit, deadline, over });
        // One that got no answer in time goes on to count.
        if !matches!(reply, Err(Error::Silent { .. })) {
            *self.asked() = None;
        }
        *self.line.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
        self.freed.notify_one();
        match parse(&reply?).map_err(|e| shape(e.to_string()))? {
            Reply { error: Some(error), .. } => Err(Error::Refused { command: C::NAME, message: error.desc }),
            Reply { value: Some(value), .. } => Ok(value),
            Reply { .. } => Err(shape("neither 'return' nor 'error'".into())),
        }
    }

    fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long the agent has owed an answer.
    pub fn silent_for(&self) -> Option<Duration> {
        self.asked().map(|since| since.elapsed())
    }

    /// Takes the line when it is this request's turn.
    fn take(
        &self,
        command: &'static str,
        limit: Duration,
        deadline: Instant,
        over: &dyn Fn() -> bool,
    ) -> Result<Line, Error> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if over() {
                return Err(Error::Retired);
            }
            if let Some(line) = line.take() {
                return Ok(line);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Busy { command, limit });
            }
            (line, _) = self.freed.wait_timeout(line, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn any_number() -> u32 {
    u32::from_str_radix(&random_hex(4), 16).unwrap_or_default()
}

/// The wait for a reply.
struct Wait<'a> {
    limit: Duration,
    deadline: Instant,
    over: &'a dyn Fn() -> bool,
}

/// A reply. What else it contains is skipped.
#[derive(Deserialize)]
struct Reply<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

fn parse<'a, T: Deserialize<'a>>(line: &'a [u8]) -> serde_json::Result<Reply<T>> {
    serde_json::from_slice(line)
}

fn longest(command: &str) -> usize {
    if command == "guest-file-read" { LONG_REPLY } else { REPLY }
}

impl Line {
    fn call(&mut self, command: &'static str, text: Vec<u8>, wait: &Wait<'_>) -> Result<Vec<u8>, Error> {
        if !self.in_step {
            self.synchronize(command, wait)?;
        }
        // Until the reply is read completely the connection is out of step.
        self.in_step = false;
        self.send(text, command, wait)?;
        let line = self.read(command, longest(command), wait)?;
        self.in_step = true;
        Ok(line)
    }

    /// Sends a sentinel byte and a number, and throws away everything up to the reply with that number.
    fn synchronize(&mut self, command: &'static str, wait: &Wait<'_>) -> Result<(), Error> {
        self.next = self.next.wrapping_add(1);
        let id = i64::from(self.next) << 20 | i64::from(std::process::id() & 0xf_ffff);
        let sync = qga::guest_sync_delimited { id };
        let mut text = vec![0xff];
        let json = serde_json::to_vec(&Execute::<qga::guest_sync_delimited>::from(sync));
        text.extend(json.map_err(|e| Error::Shape { command, message: e.to_string() })?);
        self.send(text, command, wait)?;
        loop {
            // The late reply may be one to another command.
            let line = self.read(command, LONG_REPLY, wait)?;
            let Some(after) = line.iter().rposition(|&b| b == 0xff) else { continue };
            if parse::<i64>(&line[after + 1..]).is_ok_and(|reply| reply.value == Some(id)) {
                self.in_step = true;
                return Ok(());
            }
        }
    }

    /// Sends a request; a guest that does not read takes none.
    fn send(&mut self, mut text: Vec<u8>, command: &'static str, wait: &Wait<'_>) -> Result<(), Error> {
        text.push(b'\n');
        let mut rest = &text[..];
        while !rest.is_empty() {
            let slice = wait.slice(command)?;
            self.socket.set_write_timeout(Some(slice)).map_err(|_| Error::Ended)?;
            match (&self.socket).write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if is_pause(&e) => {}
                Err(_) => return Err(Error::Ended),
            }
        }
        Ok(())
    }

    /// The next line, at most `longest` bytes of it.
    fn read(&mut self, command: &'static str, longest: usize, wait: &Wait<'_>) -> Result<Vec<u8>, Error> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&b| b == b'\n') {
                let rest = self.buffer.split_off(searched + end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                if line.len() <= longest {
                    return Ok(line);
                }
            }
            searched = self.buffer.len();
            if searched > longest {
                self.buffer = Vec::new();
                return Err(Error::Shape { command, message: format!("longer than {longest} bytes") });
            }
            let slice = wait.slice(command)?;
            self.socket.set_read_timeout(Some(slice)).map_err(|_| Error::Ended)?;
            let mut chunk = [0; 64 << 10];
            match (&self.socket).read(&mut chunk) {
                Ok(0) => return Err(Error::Ended),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(e) if is_pause(&e) => {}
                Err(_) => return Err(Error::Ended),
            }
        }
    }
}

fn is_pause(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

impl Wait<'_> {
    /// The time until the next check.
    fn slice(&self, command: &'static str) -> Result<Duration, Error> {
        if (self.over)() {
            return Err(Error::Retired);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Silent { command, limit: self.limit });
        }
        Ok(left.min(LOOK))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::Value;
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

    #[test]
    fn a_retired_agent_gives_up_what_waits_and_takes_the_last_requests() {
        let (sender, asked) = std::sync::mpsc::channel();
        let agent = fake(move |name, _| {
            sender.send(name.to_owned()).unwrap();
            (name == "guest-ping").then(|| serde_json::json!({}))
        });
        let long = Duration::from_secs(3600);
        let open = || qga::guest_file_open { path: "/x".into(), mode: None };
        std::thread::scope(|scope| {
            let running = scope.spawn(|| agent.call(open(), long));
            assert_eq!(asked.recv().unwrap(), "guest-file-open");
            let waiting = scope.spawn(|| agent.call(open(), long));
            let last = agent.retire();
            assert!(matches!(running.join().unwrap(), Err(Error::Retired)));
            assert!(matches!(waiting.join().unwrap(), Err(Error::Retired)));
            last.call(qga::guest_ping {}, Duration::from_secs(60)).unwrap();
            assert!(matches!(agent.ping(long), Err(Error::Retired)));
        });
    }

    #[test]
    fn a_request_whose_turn_does_not_come_ends_at_its_limit() {
        let (sender, asked) = std::sync::mpsc::channel();
        let agent = fake(move |_, _| {
            sender.send(()).unwrap();
            None
        });
        std::thread::scope(|scope| {
            let running = scope.spawn(|| agent.ping(Duration::from_secs(3600)));
            asked.recv().unwrap();
            let error = agent.ping(Duration::from_millis(10)).unwrap_err();
            assert!(matches!(error, Error::Busy { command: "guest-ping", .. }), "{error}");
            agent.retire();
            running.join().unwrap().unwrap_err();
        });
    }

    /// Bytes of memory that this thread's process had at most.
    fn peak() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn a_hostile_reply_takes_no_more_memory_than_a_good_one() {
        let before = peak();
        for hostile in ["[],", "{\"a\":", "\"x\","] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let guest = std::thread::spawn(move || {
                let mut writer = theirs.try_clone().unwrap();
                let mut lines = BufReader::new(theirs).split(b'\n').map(Result::unwrap);
                let request: Value = serde_json::from_slice(&lines.next().unwrap()[1..]).unwrap();
                let sync = format!("{{\"return\": {}}}\n", request["arguments"]["id"]);
                writer.write_all(&[&[0xff], sync.as_bytes()].concat()).unwrap();
                lines.next().unwrap();
                // The thread ends when its reader has gone.
                let flood = hostile.repeat((1 << 20) / hostile.len());
                let mut sent = writer.write_all(b"{\"return\": [");
                for _ in 0..60 {
                    sent = sent.and_then(|()| writer.write_all(flood.as_bytes()));
                }
                sent.is_ok()
            });
            let agent = Agent::new(ours);
            let read = qga::guest_file_read { handle: 1, count: None };
            let error = agent.call(read, Duration::from_secs(60)).unwrap_err();
            assert!(error.to_string().contains("longer than"), "{error}");
            drop(agent);
            assert!(!guest.join().unwrap(), "all of it was read");
        }
        assert!(peak() - before < 40 << 20, "{} MiB", (peak() - before) >> 20);
    }
}
