// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The small HTTP server that hands figures out to Prometheus (text format 0.0.4): one request at a time, `/metrics` and nothing else.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

/// Answers HTTP requests on `listener` with what `text` says, until `is_over` when a connection comes. `what`: how the figures are called.
pub fn serve(listener: &TcpListener, what: &str, is_over: impl Fn() -> bool, text: impl Fn() -> String) {
    for stream in listener.incoming() {
        if is_over() {
            return;
        }
        let Ok(mut stream) = stream else { continue };
        let limit = Some(Duration::from_secs(1));
        if stream.set_read_timeout(limit).is_err() || stream.set_write_timeout(limit).is_err() {
            continue;
        }
        let mut request = [0u8; 2048];
        let Ok(n) = stream.read(&mut request) else { continue };
        let fine = request[..n].starts_with(b"GET /metrics ") || request[..n].starts_with(b"GET / ");
        let (code, body) = if fine {
            ("200 OK", text())
        } else {
            ("404 Not Found", format!("the {what} are at /metrics\n"))
        };
        let head = format!(
            "HTTP/1.1 {code}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        // Whoever asked may have gone.
        let _gone = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    }
}
