// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One request over a new connection.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
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

/// Sends a request to the server whose control socket is `socket`, and waits for its answer, at most `limit` if there is one. Returns the
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
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("no {server} answers at {}; {remedy}", socket.display()))?;
    stream.set_read_timeout(limit)?;
    writeln!(stream, "{}", serde_json::to_string(request)?)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).with_context(|| format!("the {server} gives no answer"))?;
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
    fn a_socket_without_a_server_is_named_with_the_remedy() {
        let error = ask::<accel::Answer<()>>(Path::new("/nonexistent"), &accel::Request::Ls, None, WHO);
        assert_eq!(error.unwrap_err().to_string(), "no server answers at /nonexistent; start one");
    }
}
