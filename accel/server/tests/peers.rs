// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hostile peers of a server: they take places and don't use them, send nothing, or what takes hours to end.

mod rig;

use rig::Server;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, stream};

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(300);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A server that listens over TCP too, with two of four places for each peer.
fn server(name: &str) -> (Server, SocketAddr) {
    let tcp = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let options = ["--listen", &format!("tcp:{tcp}"), "--clients", "4", "--clients-per-peer", "2"];
    (Server::start(name, &options), tcp)
}

/// Connects from 127.0.0.`last`, which is another machine to a server.
fn connect_from(last: u8, to: SocketAddr) -> TcpStream {
    let address = |last: u8, port: u16| libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, last]).to_be() },
        sin_zero: [0; 8],
    };
    let (own, server) = (address(last, 0), address(1, to.port()));
    let len = size_of_val(&own) as libc::socklen_t;
    // SAFETY: the addresses live during the calls and their size is given; the descriptor is fresh.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0, "a socket");
        assert_eq!(libc::bind(fd, (&raw const own).cast(), len), 0, "bound");
        assert_eq!(libc::connect(fd, (&raw const server).cast(), len), 0, "connected");
        OwnedFd::from_raw_fd(fd)
    };
    socket.into()
}

fn call(socket: TcpStream) -> Result<Link, Error> {
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "peer".into() };
    stream::connect(socket.into(), &hello)
}

fn ping(link: Link) {
    let client = Connection::new(link).expect("a connection");
    client.call(&Ping {}, |_, _| ()).expect("an answer");
}

fn tenants(server: &Server) -> usize {
    server.ls()[0].tenants.len()
}

#[test]
fn a_peer_that_takes_every_place_it_can_get_leaves_the_others_theirs() {
    let (server, tcp) = server("places");
    // They say nothing, and have their places all the same.
    let silent: Vec<TcpStream> = (0..2).map(|_| connect_from(1, tcp)).collect();
    for _ in 0..20 {
        let why = call(connect_from(1, tcp)).err().expect("refused").to_string();
        assert!(
            why.contains("2 clients of 127.0.0.1 already") && why.contains("--clients-per-peer"),
            "{why}"
        );
    }
    ping(call(connect_from(2, tcp)).expect("a place"));
    ping(server.connect());
    let listed = server.ls().remove(0).tenants;
    let of_silent = listed.iter().filter(|t| t.peer.as_deref() == Some("127.0.0.1")).count();
    assert_eq!(of_silent, 0, "they have no worker: {listed:?}");
    // One place less, one client more.
    drop(silent);
    wait_until("the places are free", || call(connect_from(1, tcp)).map(ping).is_ok());
    server.end();
}

#[test]
fn a_user_that_takes_every_place_it_can_get_leaves_others_theirs() {
    let (server, tcp) = server("user");
    let clients: Vec<Link> = (0..2).map(|_| server.connect()).collect();
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "third".into() };
    let why = tombolo_calls::process::connect(&server.socket, &hello).err().expect("refused").to_string();
    // SAFETY: takes nothing.
    let own = unsafe { libc::geteuid() };
    assert!(why.contains(&format!("2 clients of user {own} already")), "{why}");
    ping(call(connect_from(1, tcp)).expect("a place"));
    drop(clients);
    server.end();
}

#[test]
fn who_does_not_say_who_it_is_loses_its_place_soon() {
    let (server, tcp) = server("silent");
    let silent = connect_from(1, tcp);
    let slow = connect_from(1, tcp);
    // A byte at a time, for longer than the server waits.
    let mut said = Vec::new();
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "slow".into() };
    hello.send(&mut said).expect("written to memory");
    let dribbling = std::thread::spawn(move || {
        let mut bytes = said.iter().take(said.len() - 1).cycle();
        // Until the server hangs up.
        while (&slow).write_all(&[*bytes.next().expect("a cycle")]).is_ok() {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    // Both have their places.
    assert!(call(connect_from(1, tcp)).is_err());
    assert_eq!(tenants(&server), 0);
    dribbling.join().expect("it ends");
    ping(call(connect_from(1, tcp)).expect("a place"));
    // It hears the end, and nothing else.
    assert_eq!((&silent).read(&mut [0]).unwrap_or(0), 0);
    server.end();
}

/// Page faults of the processes that a server has started and waited for: the kernel counts each, where it only samples processor time.
fn of_workers(server: &Server) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.child.id())).expect("it runs");
    let mut fields = stat.rsplit_once(')').expect("a name").1.split_whitespace();
    fields.nth(8).expect("a field").parse().expect("a number")
}

#[test]
fn who_talks_nonsense_costs_no_worker() {
    let (server, tcp) = server("nonsense");
    ping(call(connect_from(1, tcp)).expect("a place"));
    wait_until("it has gone", || tenants(&server) == 0);
    let before = of_workers(&server);
    assert!(before > 0, "one client was served");
    let hello = Hello { api: wire::API.into(), identity: [7; 16], name: "of another build".into() };
    for _ in 0..50 {
        let why = stream::connect(connect_from(1, tcp).into(), &hello).err().expect("refused").to_string();
        assert!(why.contains("different declarations") || why.contains("already"), "{why}");
        let mut nonsense = connect_from(1, tcp);
        // It may be refused before that.
        let _hung_up = nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n");
        while nonsense.read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
    }
    assert_eq!(of_workers(&server), before);
    // The log is not filled by it.
    let lines =
        server.end().lines().filter(|l| l.contains("declarations") || l.contains("handshake")).count();
    assert!(lines < 25, "{lines}");
}

/// A connection whose end waits for hours, as its other end, which comes with it, takes nothing more.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
    let (other, _) = listener.accept().expect("accepted");
    let hours = libc::linger { l_onoff: 1, l_linger: 30_000 };
    // SAFETY: the structure lives during the call, and its size is given.
    let set = unsafe {
        let (at, len) = ((&raw const hours).cast(), size_of_val(&hours) as libc::socklen_t);
        libc::setsockopt(own.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, len)
    };
    assert_eq!(set, 0, "SO_LINGER");
    own.set_nonblocking(true).expect("set");
    let mut fd = libc::pollfd { fd: own.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: the structure lives during the call.
    while unsafe { libc::poll(&mut fd, 1, 500) } > 0 {
        while (&own).write(&[0; 65536]).is_ok() {}
    }
    (own, other)
}

/// Sends a descriptor, its last one, with a byte.
fn pass(to: &UnixStream, passed: impl AsFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [passed.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(to, &[IoSlice::new(b"T")], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.expect("sent"), 1);
}

fn signal(pid: u32, signal: libc::c_int) {
    // SAFETY: integers only.
    assert_eq!(unsafe { libc::kill(pid as libc::pid_t, signal) }, 0);
}

#[test]
fn files_that_clients_pass_along_and_whose_end_takes_hours_hold_up_nobody() {
    let (mut server, _) = server("lingering");
    let connect = || UnixStream::connect(&server.socket).expect("connected");
    let files: Vec<_> = (0..4).map(|_| lingering()).collect();
    let (mut passed, _others): (Vec<_>, Vec<_>) = files.into_iter().unzip();
    let mut next = || passed.pop().expect("one for each");
    // So that they are passed before the server looks, and end with the server.
    signal(server.child.id(), libc::SIGSTOP);
    let said = [connect(), connect()];
    said.iter().for_each(|to| pass(to, next()));
    // Not even there any more when the server accepts it.
    pass(&connect(), next());
    signal(server.child.id(), libc::SIGCONT);
    // Others are heard, and hear.
    let mut other = connect();
    other.set_read_timeout(Some(TIMEOUT)).expect("set");
    let mut answer = Vec::new();
    other.write_all(b"nonsense").and_then(|()| other.read_to_end(&mut answer).map(drop)).unwrap_or_else(
        |e| {
            assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "the server doesn't answer: {e}");
        },
    );
    drop(said);
    // They have their places no more, and a client has one of its own.
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "passes".into() };
    let mut client = connect();
    wait_until("a place is free", || {
        client = connect();
        client.set_read_timeout(Some(TIMEOUT)).expect("set");
        let sent = hello.send(&mut client);
        sent.is_ok() && tombolo_calls::hello::welcomed(&mut client).is_ok()
    });
    // Its worker ends before it does, with what it passed.
    pass(&client, next());
    signal(server.ls()[0].tenants[0].pid, libc::SIGKILL);
    wait_until("it is no tenant any more", || tenants(&server) == 0);
    // And the server ends when it is told to.
    let mut drain = std::process::Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    rig::run(drain.args(["drain", "--control"]).arg(&server.control));
    wait_until("it is drained", || server.child.try_wait().expect("it runs").is_some());
}

#[test]
fn a_client_that_leaves_its_own_end_of_the_connection_in_it_and_ends_keeps_neither_worker_nor_place() {
    let (mut server, _) = server("cycle");
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "leaves".into() };
    // As many as have places, which say who they are before they do so, or have been answered.
    for is_answered in [false, true] {
        let mut client = UnixStream::connect(&server.socket).expect("connected");
        hello.send(&mut client).expect("sent");
        if is_answered {
            tombolo_calls::hello::welcomed(&mut client).expect("served");
        }
        // The message that lies in the connection is all that has it open then.
        pass(&client, client.try_clone().expect("a copy"));
    }
    wait_until("they have no worker any more", || tenants(&server) == 0);
    ping(server.connect());
    let mut drain = std::process::Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    rig::run(drain.args(["drain", "--control"]).arg(&server.control));
    wait_until("it is drained", || server.child.try_wait().expect("it runs").is_some());
    assert!(server.end().contains("a client sent descriptors"));
}
