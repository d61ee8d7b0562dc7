// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server with its peers: fast, slow, silent and broken ones.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Instant;

use tombolo_metrics::{MOST, Place, Server, Stop, TIMEOUT};

/// A server with its thread.
struct Running {
    place: Place,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn at(place: &Place, text: &'static str, times: usize) -> Self {
        let server = Server::bind(place).unwrap();
        let (place, stop) = (server.place().unwrap(), server.stop().unwrap());
        let thread = std::thread::spawn(move || server.serve("figures", || text.repeat(times)).unwrap());
        Self { place, stop, thread: Some(thread) }
    }

    fn new() -> Self {
        Self::at(&"127.0.0.1:0".parse().unwrap(), "up 1\n", 1)
    }

    fn connect(&self) -> TcpStream {
        let Place::Tcp(address) = self.place else { panic!("{}", self.place) };
        TcpStream::connect(address).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.now();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn answer(mut stream: impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_request_in_several_segments_or_with_a_query_gets_the_figures() {
    let server = Running::new();
    let whole = "GET /metrics?a=b HTTP/1.1\r\nHost: here\r\n\r\n";
    let mut stream = server.connect();
    stream.set_nodelay(true).unwrap();
    for byte in whole.as_bytes() {
        stream.write_all(&[*byte]).unwrap();
    }
    let text = answer(stream);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nup 1\n"), "{text}");
    assert!(text.contains("Content-Length: 5\r\n"), "{text}");
}

#[test]
fn what_is_not_there_or_no_request_is_said_so() {
    let server = Running::new();
    for (line, status) in [
        ("GET /other HTTP/1.1", "404 Not Found"),
        ("DELETE /metrics HTTP/1.1", "405 Method Not Allowed"),
        ("hello", "400 Bad Request"),
    ] {
        let mut stream = server.connect();
        write!(stream, "{line}\r\n\r\n").unwrap();
        let text = answer(stream);
        assert!(text.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{line}: {text}");
    }
    let mut stream = server.connect();
    stream.write_all(b"HEAD /metrics HTTP/1.1\r\n\r\n").unwrap();
    let text = answer(stream);
    assert!(text.contains("Content-Length: 5\r\n") && text.ends_with("\r\n\r\n"), "{text}");
}

#[test]
fn peers_that_say_nothing_or_take_no_answer_hold_up_no_scrape() {
    // An answer that fits into no socket's buffer.
    let server = Running::at(&"127.0.0.1:0".parse().unwrap(), "long 1\n", 1 << 20);
    let silent: Vec<_> = (0..4 * MOST).map(|_| server.connect()).collect();
    let deaf: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            stream
        })
        .collect();
    let begun = Instant::now();
    let mut stream = server.connect();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(answer(stream).len() > 7 << 20);
    assert!(begun.elapsed() < TIMEOUT, "{:?}", begun.elapsed());
    drop((silent, deaf));
}

#[test]
fn a_unix_socket_hands_out_the_figures_and_goes_with_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics");
    let place: Place = path.to_str().unwrap().parse().unwrap();
    let ask = |path: &Path| {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        answer(stream)
    };
    // A server that was killed leaves its socket, which the next one replaces.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = Running::at(&place, "up 1\n", 1);
    assert!(ask(&path).ends_with("up 1\n"));
    assert!(Server::bind(&place).is_err(), "two servers at one socket");
    assert!(ask(&path).ends_with("up 1\n"));
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_place_is_an_address_or_an_absolute_path() {
    for text in ["127.0.0.1:9127", "[::1]:9127", "/run/tombolo/metrics.sock"] {
        assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
    }
    for text in ["metrics.sock", "127.0.0.1", ""] {
        assert!(text.parse::<Place>().unwrap_err().contains("nor an absolute path"), "{text}");
    }
}

#[test]
fn files_that_a_peer_passes_along_and_whose_end_takes_hours_hold_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures");
    let server = Server::bind(&Place::Unix(path.clone())).unwrap();
    let stop = server.stop().unwrap();
    let (asked, ask) = channel();
    let (go_on, goes_on) = channel::<()>();
    let text = move || {
        asked.send(()).unwrap();
        // Until it may go on: later at once.
        let _ended = goes_on.recv();
        "up 1\n".to_owned()
    };
    let thread = std::thread::spawn(move || server.serve("figures", text).unwrap());
    let request = b"GET /metrics HTTP/1.1\r\n\r\n";
    let connect = || UnixStream::connect(&path).unwrap();
    let mut first = connect();
    first.write_all(request).unwrap();
    ask.recv().unwrap();
    // The server stands still, so that they are passed before it looks, and end with it.
    let mut others = Vec::new();
    let mut pass = |to: &UnixStream, bytes: &[u8]| {
        let (passed, other) = tombolo_brief::endless::lingering().unwrap();
        others.push(other);
        tombolo_brief::endless::pass(to, bytes, passed).unwrap();
    };
    let (silent, asks) = (connect(), connect());
    pass(&silent, b"G");
    pass(&asks, request);
    // This stays in the socket until it is closed.
    pass(&asks, b"more");
    pass(&connect(), b"gone");
    drop(go_on);
    let mut last = connect();
    last.write_all(request).unwrap();
    for asker in [first, last] {
        assert!(answer(asker).ends_with("up 1\n"));
    }
    stop.now();
    thread.join().unwrap();
}

#[test]
fn a_server_that_ends_leaves_the_socket_of_another_that_has_its_path_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures");
    let bind = || Server::bind(&Place::Unix(path.clone())).unwrap();
    let first = bind();
    // By an administrator.
    std::fs::remove_file(&path).unwrap();
    let second = bind();
    drop(first);
    assert!(UnixStream::connect(&path).is_ok());
    drop(second);
    assert!(!path.exists());
}

#[test]
fn of_servers_that_begin_at_one_path_at_once_one_has_it() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let path = folder.path().join(round.to_string());
        // A killed server leaves its socket's file.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let bind = || Server::bind(&Place::Unix(path.clone()));
        let servers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect()
        });
        assert_eq!(servers.len(), 1, "round {round}");
        assert!(UnixStream::connect(&path).is_ok());
    }
}

#[test]
fn a_server_that_stands_still_with_all_its_places_taken_keeps_no_other_from_being_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures");
    let stopped = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&stopped, 0).unwrap();
    let _waits = UnixStream::connect(&path).unwrap();
    let (tells, told) = channel();
    let place = Place::Unix(path);
    let thread = std::thread::spawn(move || tells.send(Server::bind(&place).err()).unwrap());
    let why = told.recv_timeout(TIMEOUT);
    // It ends the wait of one that waits.
    drop(stopped);
    thread.join().unwrap();
    let why = why.expect("at once").expect("the other has the path").to_string();
    assert!(why.contains("figures: another server listens there already"), "{why}");
}
