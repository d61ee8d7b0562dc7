// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One request over a new connection, and its line.

use std::borrow::Borrow;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An answer on the wire: the value, or the server's reason for refusing.
pub trait Answer: DeserializeOwned {
    /// The type of a successful answer.
    type Value;

    /// The value, or the reason.
    ///
    /// # Errors
    /// The server has refused.
    fn into_result(self) -> Result<Self::Value, String>;
}

/// Reads a line of at most `most` bytes. With a `limit` all of it must be there within that time, so a peer that sends a byte now and then
/// holds its reader up no longer than a silent one. The stream's timeout is changed.
///
/// # Errors
/// The line is late (`TimedOut`) or too long, or the connection broke.
pub fn read_line<S: Read + Borrow<UnixStream>>(
    reader: &mut BufReader<S>,
    most: usize,
    limit: Option<Duration>,
) -> io::Result<String> {
    let end = limit.map(|limit| Instant::now() + limit);
    let mut line = Vec::new();
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the line is not there in time"));
        }
        reader.get_ref().borrow().set_read_timeout(left)?;
        let some = match reader.fill_buf() {
            Ok(some) => some,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(e) => return Err(e),
        };
        let (len, ends) = match some.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (some.len(), some.is_empty()),
        };
        if line.len() + len > most {
            let text = format!("the line has more than {most} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        line.extend_from_slice(&some[..len]);
        reader.consume(len);
        if ends {
            return String::from_utf8(line).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
        }
    }
}

/// Connects to a server; `limit` is for one that takes no connections, and for each write.
fn connect(socket: &Path, limit: Option<Duration>) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, limit)?;
    match rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?) {
        Err(Errno::AGAIN) => Err(io::Error::new(io::ErrorKind::TimedOut, "it takes no more connections")),
        connected => Ok(connected.map(|()| stream.into())?),
    }
}

/// Sends a request to the server whose control socket is `socket`, and waits for its answer, at most `limit` for each step if there is one. Returns the
/// answer and the connection, for data that follows the answer. `who` names the server and how to start it, for the error.
///
/// # Errors
/// No process listens at the socket, the answer is late or invalid, or the server has refused: then the error is its reason.
pub fn ask<A: Answer>(
    socket: &Path,
    request: &impl Serialize,
    limit: Option<Duration>,
    who: (&str, &str),
) -> anyhow::Result<(A::Value, BufReader<UnixStream>)> {
    let (server, remedy) = who;
    let mut stream = connect(socket, limit)
        .with_context(|| format!("no {server} answers at {}; {remedy}", socket.display()))?;
    let line = serde_json::to_string(request)?;
    // A server that refuses the request may hang up before it has read all of it, and has then said why.
    let sent = match writeln!(stream, "{line}") {
        Err(err) if matches!(err.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
            Err(err)
        }
        other => Ok(other?),
    };
    let mut reader = BufReader::new(stream);
    let line = read_line(&mut reader, usize::MAX, limit).and_then(|line| {
        if line.is_empty() { sent.and(Err(io::ErrorKind::UnexpectedEof.into())) } else { Ok(line) }
    });
    let line = line.with_context(|| format!("the {server} gives no answer"))?;
    let answer: A =
        serde_json::from_str(&line).with_context(|| format!("the {server}'s answer is not understood"))?;
    match answer.into_result() {
        Ok(value) => Ok((value, reader)),
        Err(why) => bail!("{why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accel;
    use std::os::unix::net::UnixListener;

    fn answered(
        answer: &'static str,
    ) -> (tempfile::TempDir, std::path::PathBuf, std::thread::JoinHandle<String>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            line
        });
        (dir, path, server)
    }

    #[test]
    fn a_peer_that_sends_a_byte_now_and_then_holds_nobody_up() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            // Ends when the reader has closed its end.
            while (&theirs).write_all(b" ").is_ok() {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let mut reader = BufReader::new(ours);
        let late = read_line(&mut reader, 1 << 20, Some(Duration::from_millis(100))).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let long = read_line(&mut reader, 3, None).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidData);
        drop(reader);
        writer.join().unwrap();
    }

    #[test]
    fn a_line_is_read_to_its_end_and_no_further() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"one\ntwo").unwrap();
        drop(theirs);
        let mut reader = BufReader::new(&ours);
        assert_eq!(read_line(&mut reader, 4, Some(Duration::from_secs(60))).unwrap(), "one\n");
        assert_eq!(read_line(&mut reader, 4, None).unwrap(), "two");
        assert_eq!(read_line(&mut reader, 4, None).unwrap(), "");
    }

    const WHO: (&str, &str) = ("server", "start one");

    #[test]
    fn an_answer_is_the_value_and_a_refusal_the_servers_words() {
        let (_dir, path, server) = answered("{\"ok\":null}\n");
        ask::<accel::Answer<()>>(&path, &accel::Request::Drain, None, WHO).unwrap();
        assert_eq!(server.join().unwrap(), "{\"do\":\"drain\"}\n");
        let (_dir, path, _server) = answered("{\"error\":\"no zone\"}\n");
        let error = ask::<accel::Answer<()>>(&path, &accel::Request::Drain, None, WHO).unwrap_err();
        assert_eq!(error.to_string(), "no zone");
    }

    #[test]
    fn a_server_that_takes_no_connection_or_says_nothing_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let ask = || {
            let limit = Some(Duration::from_millis(100));
            ask::<accel::Answer<()>>(&path, &accel::Request::Ls, limit, WHO).unwrap_err()
        };
        assert_eq!(format!("{:#}", ask()), "the server gives no answer: the line is not there in time");
        // The first one still waits, and there is no room for another.
        assert!(format!("{:#}", ask()).ends_with("it takes no more connections"));
    }

    #[test]
    fn a_socket_without_a_server_is_named_with_the_remedy() {
        let error = ask::<accel::Answer<()>>(Path::new("/nonexistent"), &accel::Request::Ls, None, WHO);
        assert_eq!(error.unwrap_err().to_string(), "no server answers at /nonexistent; start one");
    }
}
